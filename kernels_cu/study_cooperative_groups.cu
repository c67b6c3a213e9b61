// SPDX-License-Identifier: Apache-2.0
// y = x / sqrt(mean(x^2) + eps) * g, with the sums written in CUDA's cooperative groups: the code
// is shorter, the header costs compilation time and binary size.
// Owner: thread t holds the VEC_SIZE elements from t * VEC_SIZE on.
// Launch: grid (rows), block (HIDDEN_SIZE / VEC_SIZE), no dynamic shared memory.
// Caller guarantees: contiguous rows; x and y on multiples of 16 bytes; HIDDEN_SIZE / VEC_SIZE is a
// power of two from 32 to 1024.
// Moves: one read of x, one write of y.

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "cast.cuh"

template <typename T, int VEC_SIZE, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / VEC_SIZE)
    rms_norm_groups(T* y, const T* x, float eps, float g) {
    namespace cg = cooperative_groups;
    constexpr int THREADS = HIDDEN_SIZE / VEC_SIZE;
    constexpr int WARPS = THREADS / 32;
    __shared__ float slots[WARPS];
    const cg::thread_block block = cg::this_thread_block();
    const cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + block.thread_rank();
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    T* value = reinterpret_cast<T*>(&pack);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) squares += to_float(value[i]) * to_float(value[i]);
    slots[warp.meta_group_rank()] = cg::reduce(warp, squares, cg::plus<float>());
    block.sync();  // every warp's sum is in its slot
    const float warp_sum =
        static_cast<int>(warp.thread_rank()) < WARPS ? slots[warp.thread_rank()] : 0.0f;
    const float sum = cg::reduce(warp, warp_sum, cg::plus<float>());
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) value[i] = from_float<T>(to_float(value[i]) * scale);
    reinterpret_cast<uint4*>(y)[at] = pack;
}
