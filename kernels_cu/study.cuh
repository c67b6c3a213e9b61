// SPDX-License-Identifier: Apache-2.0
// What the study kernels share: the sum over a block. Their loads, their arithmetic and their
// stores stand in each kernel's own body.
#pragma once

#include "cast.cuh"

// Sum over the THREADS threads of a block, in the type of `value`; THREADS is a power of two from 2
// to 1024. The mask names the lanes that exist: a block may be smaller than a warp. `slots` has 32
// places and may be used again only after another barrier of the block.
template <int THREADS, typename A>
__device__ __forceinline__ A block_sum(A value, A* slots) {
    constexpr int WIDTH = THREADS < 32 ? THREADS : 32;
    constexpr unsigned LANES = THREADS < 32 ? (1u << (THREADS % 32)) - 1u : 0xffffffffu;
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
        value = value + __shfl_xor_sync(LANES, value, offset);
    }
    if constexpr (THREADS > 32) {
        constexpr int WARPS = THREADS / 32;
        if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
        __syncthreads();  // every warp's sum is in its slot
        value = slots[threadIdx.x % WARPS];
#pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2) {
            value = value + __shfl_xor_sync(LANES, value, offset);
        }
    }
    return value;
}

// 1 / sqrt(value), computed in float32 and rounded once.
__device__ __forceinline__ __half reciprocal_sqrt(__half value) {
    return __float2half_rn(rsqrtf(__half2float(value)));
}
