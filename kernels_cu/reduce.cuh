// SPDX-License-Identifier: Apache-2.0
// Sums over a row, from small to large: a warp by shuffles, the threads of a row through shared
// memory, the blocks of a cluster through each other's shared memory. Every step has a fixed order,
// and every thread that takes part receives the same sum.
//
// Blocks are whole warps and no thread leaves early, so a full shuffle mask is always valid.
#pragma once

#include "ptx.cuh"

__host__ __device__ constexpr int ceil_power_of_two(int value) {
    int power = 1;
    while (power < value) power *= 2;
    return power;
}

// Sum over groups of WIDTH neighbouring lanes; WIDTH is a power of two up to 32.
template <int WIDTH, typename A>
__device__ __forceinline__ A warp_reduce_sum(A value) {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

// Room that row_reduce_sum needs for one reduction.
__host__ __device__ constexpr int row_reduce_slots(int threads_per_row, int rows_per_block) {
    return threads_per_row > 32 ? threads_per_row / 32 * rows_per_block : 1;
}

// Sum over the THREADS_PER_ROW threads of each row of the block. `slots` may be used again only
// after another barrier of the block.
template <int THREADS_PER_ROW, typename A>
__device__ __forceinline__ A row_reduce_sum(A value, A* slots) {
    if constexpr (THREADS_PER_ROW <= 32) {
        return warp_reduce_sum<THREADS_PER_ROW>(value);
    } else {
        constexpr int WARPS = THREADS_PER_ROW / 32;
        constexpr int WIDTH = ceil_power_of_two(WARPS);
        const int lane_id = threadIdx.x % 32;
        A* row_slots = slots + threadIdx.x / THREADS_PER_ROW * WARPS;
        value = warp_reduce_sum<32>(value);
        if (lane_id == 0) row_slots[threadIdx.x % THREADS_PER_ROW / 32] = value;
        __syncthreads();  // every warp's sum is in its slot
        const int slot = lane_id % WIDTH;
        return warp_reduce_sum<WIDTH>(slot < WARPS ? row_slots[slot] : A(0));
    }
}

// Sum over the blocks of a cluster of a value that is equal in all threads of a block. `slots` has
// CLUSTER_SIZE places, each written once by the block with that rank.
template <int CLUSTER_SIZE, typename A>
__device__ __forceinline__ A cluster_reduce_sum(A value, A* slots) {
    if constexpr (CLUSTER_SIZE == 1) {
        return value;
    } else {
        if (threadIdx.x < CLUSTER_SIZE) cluster_store(slots + cluster_rank(), threadIdx.x, value);
        cluster_barrier();  // every block's sum has arrived in every block
        A sum = slots[0];
#pragma unroll
        for (int rank = 1; rank < CLUSTER_SIZE; ++rank) sum += slots[rank];
        return sum;
    }
}
