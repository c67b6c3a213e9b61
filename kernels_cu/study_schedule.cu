// SPDX-License-Identifier: Apache-2.0
// y = x / sqrt(mean(x^2) + eps) * g, by other ways to spread rows over blocks: persistent blocks
// that load the next row into registers, the same through cp.async, and a cluster of blocks a row.
// Owner: thread t holds the VEC_SIZE elements from t * VEC_SIZE on of the row, or of its block's
// share of the row.
// Launch: block (HIDDEN_SIZE / VEC_SIZE / CLUSTER_SIZE), grid (up to rows), or (rows *
// CLUSTER_SIZE); no dynamic shared memory.
// Caller guarantees: contiguous rows; x and y on multiples of 16 bytes; a power of two of threads.
// Moves: one read of x, one write of y.

#include "reduce.cuh"
#include "study.cuh"

template <typename T, int VEC_SIZE, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / VEC_SIZE)
    rms_norm_persistent(T* y, const T* x, long long rows, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / VEC_SIZE;
    __shared__ float slots[32];
    const uint4* packs = reinterpret_cast<const uint4*>(x) + threadIdx.x;
    uint4 next = packs[blockIdx.x * static_cast<long long>(THREADS)];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        uint4 pack = next;
        if (row + gridDim.x < rows) next = packs[(row + gridDim.x) * THREADS];
        T* value = reinterpret_cast<T*>(&pack);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) squares += to_float(value[i]) * to_float(value[i]);
        const float sum = block_sum<THREADS>(squares, slots);
        const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) value[i] = from_float<T>(to_float(value[i]) * scale);
        reinterpret_cast<uint4*>(y)[row * THREADS + threadIdx.x] = pack;
        __syncthreads();  // the slots are read by all before the next row overwrites them
    }
}

// ASYNC is false before compute capability 8.0, where the copies are plain loads and stores.
template <typename T, int VEC_SIZE, bool ASYNC, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / VEC_SIZE)
    rms_norm_async(T* y, const T* x, long long rows, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / VEC_SIZE;
    __shared__ uint4 staged[2][THREADS];  // each thread reads only what it copied: no barrier
    __shared__ float slots[32];
    const uint4* packs = reinterpret_cast<const uint4*>(x) + threadIdx.x;
    const auto stage = [&](int buffer, long long row) {
        if constexpr (ASYNC) {
            if (row < rows) copy_async_16(&staged[buffer][threadIdx.x], packs + row * THREADS);
            copy_async_commit();
        } else {
            if (row < rows) staged[buffer][threadIdx.x] = packs[row * THREADS];
        }
    };
    int buffer = 0;
    stage(buffer, blockIdx.x);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        stage(1 - buffer, row + gridDim.x);
        if constexpr (ASYNC) copy_async_wait<1>();
        uint4 pack = staged[buffer][threadIdx.x];
        T* value = reinterpret_cast<T*>(&pack);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) squares += to_float(value[i]) * to_float(value[i]);
        const float sum = block_sum<THREADS>(squares, slots);
        const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) value[i] = from_float<T>(to_float(value[i]) * scale);
        reinterpret_cast<uint4*>(y)[row * THREADS + threadIdx.x] = pack;
        __syncthreads();  // the slots are read by all before the next row overwrites them
        buffer = 1 - buffer;
    }
}

template <typename T, int VEC_SIZE, int CLUSTER_SIZE, int HIDDEN_SIZE>
__global__ void CLUSTER_DIMS(CLUSTER_SIZE) __launch_bounds__(HIDDEN_SIZE / VEC_SIZE / CLUSTER_SIZE)
    rms_norm_cluster(T* y, const T* x, long long rows, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / VEC_SIZE / CLUSTER_SIZE;
    __shared__ float slots[32];
    __shared__ float cluster_slots[CLUSTER_SIZE];
    // Blocks of a cluster are neighbours in the grid: together they cover the row.
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    cluster_barrier();  // every block of the cluster runs, so its slots may be written
    T* value = reinterpret_cast<T*>(&pack);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) squares += to_float(value[i]) * to_float(value[i]);
    const float sum =
        cluster_reduce_sum<CLUSTER_SIZE>(block_sum<THREADS>(squares, slots), cluster_slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) value[i] = from_float<T>(to_float(value[i]) * scale);
    reinterpret_cast<uint4*>(y)[at] = pack;
}
