// SPDX-License-Identifier: Apache-2.0
// Sums over a row, from small to large: a warp by shuffles, the threads of a row through shared
// memory, the blocks of a cluster through each other's shared memory. Every step has a fixed order,
// and every thread that takes part receives the same sum.
//
// Blocks are whole warps and no thread leaves early, so a full shuffle mask is always valid.
#pragma once

#include "cast.cuh"
#include "ptx.cuh"

__host__ __device__ constexpr int ceil_power_of_two(int value) {
    int power = 1;
    while (power < value) power *= 2;
    return power;
}

// A sum with the rounding error of every addition carried along: as exact as twice the digits.
template <typename A>
struct ExactSum {
    A sum;
    A error;

    __device__ __forceinline__ void operator+=(A term) { *this += ExactSum{term, A(0)}; }
    // The order of the two operands changes no bit, so all lanes of a shuffle agree.
    __device__ __forceinline__ void operator+=(const ExactSum& other) {
        const A total = add_rn(sum, other.sum);
        const A added = sub_rn(total, sum);
        const A lost = add_rn(sub_rn(sum, sub_rn(total, added)), sub_rn(other.sum, added));
        error = add_rn(add_rn(error, other.error), lost);
        sum = total;
    }
    // Where the sum has overflowed the error is NaN and the sum the honest infinity.
    __device__ __forceinline__ A value() const { return error == error ? add_rn(sum, error) : sum; }
};

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
__device__ __forceinline__ double shuffle_xor(double value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
template <typename A>
__device__ __forceinline__ ExactSum<A> shuffle_xor(const ExactSum<A>& value, int lane_mask) {
    return {shuffle_xor(value.sum, lane_mask), shuffle_xor(value.error, lane_mask)};
}

// Sum over groups of WIDTH neighbouring lanes; WIDTH is a power of two up to 32. T here and below
// is a number or an ExactSum.
template <int WIDTH, typename T>
__device__ __forceinline__ T warp_reduce_sum(T value) {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) value += shuffle_xor(value, offset);
    return value;
}

// Room that row_reduce_sum needs for one reduction.
__host__ __device__ constexpr int row_reduce_slots(int threads_per_row, int rows_per_block) {
    return threads_per_row > 32 ? threads_per_row / 32 * rows_per_block : 1;
}

// Sum over the THREADS_PER_ROW threads of each row of the block. `slots` may be used again only
// after another barrier of the block.
template <int THREADS_PER_ROW, typename T>
__device__ __forceinline__ T row_reduce_sum(T value, T* slots) {
    if constexpr (THREADS_PER_ROW <= 32) {
        return warp_reduce_sum<THREADS_PER_ROW>(value);
    } else {
        constexpr int WARPS = THREADS_PER_ROW / 32;
        constexpr int WIDTH = ceil_power_of_two(WARPS);
        const int lane_id = threadIdx.x % 32;
        T* row_slots = slots + threadIdx.x / THREADS_PER_ROW * WARPS;
        value = warp_reduce_sum<32>(value);
        if (lane_id == 0) row_slots[threadIdx.x % THREADS_PER_ROW / 32] = value;
        __syncthreads();  // every warp's sum is in its slot
        const int slot = lane_id % WIDTH;
        return warp_reduce_sum<WIDTH>(slot < WARPS ? row_slots[slot] : T{});
    }
}

template <typename A>
__device__ __forceinline__ void cluster_store(ExactSum<A>* shared, unsigned rank,
                                              const ExactSum<A>& value) {
    cluster_store(&shared->sum, rank, value.sum);
    cluster_store(&shared->error, rank, value.error);
}

// Sum over the blocks of a cluster of a value that is equal in all threads of a block. `slots` has
// CLUSTER_SIZE places, each written once by the block with that rank.
template <int CLUSTER_SIZE, typename T>
__device__ __forceinline__ T cluster_reduce_sum(T value, T* slots) {
    if constexpr (CLUSTER_SIZE == 1) {
        return value;
    } else {
        if (threadIdx.x < CLUSTER_SIZE) cluster_store(slots + cluster_rank(), threadIdx.x, value);
        cluster_barrier();  // every block's sum has arrived in every block
        T sum = slots[0];
#pragma unroll
        for (int rank = 1; rank < CLUSTER_SIZE; ++rank) sum += slots[rank];
        return sum;
    }
}
