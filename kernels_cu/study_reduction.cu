// SPDX-License-Identifier: Apache-2.0
// y = x / sqrt(mean(x^2) + eps) * g, by other ways to sum a row than the warp shuffle: a tree in
// shared memory, the tensor cores, and one to four running sums a thread.
// Owner: thread t holds the VEC_SIZE elements from t * VEC_SIZE on (tree, mma), or elements t,
// t + THREADS, ..., read twice (ilp).
// Launch: grid (rows), block (HIDDEN_SIZE / VEC_SIZE) or (THREADS), no dynamic shared memory.
// Caller guarantees: contiguous rows; x and y on multiples of 16 bytes; a power of two of threads,
// whole warps for mma; HIDDEN_SIZE a multiple of THREADS * ILP for ilp.
// Moves: one read of x (ilp: a second one from the cache), one write of y.

#include "ptx.cuh"
#include "study.cuh"

template <typename T, int VEC_SIZE, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / VEC_SIZE)
    rms_norm_tree(T* y, const T* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / VEC_SIZE;
    __shared__ float sums[THREADS];
    const int thread = threadIdx.x;
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + thread;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    T* value = reinterpret_cast<T*>(&pack);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) squares += to_float(value[i]) * to_float(value[i]);
    sums[thread] = squares;
    __syncthreads();  // every thread's sum is in its place
#pragma unroll
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (thread < half) sums[thread] += sums[thread + half];
        __syncthreads();  // this level is complete before the next reads it
    }
    const float scale = rsqrtf(sums[0] / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) value[i] = from_float<T>(to_float(value[i]) * scale);
    reinterpret_cast<uint4*>(y)[at] = pack;
}

// A row's elements enter one product as A and, transposed, as B: the diagonal of A * B then holds
// sums of squares, and the other elements are thrown away: one useful multiplication in sixteen.
template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    rms_norm_f16x8_mma(__half* y, const __half* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ float slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    float product[4] = {};
    mma_16x8x8(product, pack.x, 0u, pack.x);
    mma_16x8x8(product, pack.y, 0u, pack.y);
    mma_16x8x8(product, pack.z, 0u, pack.z);
    mma_16x8x8(product, pack.w, 0u, pack.w);
    // This lane has row lane / 4, columns 2 * (lane % 4) and the next one.
    const int lane_id = threadIdx.x % 32;
    const int column = lane_id / 4 - 2 * (lane_id % 4);
    const float diagonal = column == 0 ? product[0] : column == 1 ? product[1] : 0.0f;
    const float sum = block_sum<THREADS>(diagonal, slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
    __half* value = reinterpret_cast<__half*>(&pack);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = __float2half_rn(__half2float(value[i]) * scale);
    reinterpret_cast<uint4*>(y)[at] = pack;
}

// ILP loads and ILP additions of a thread do not wait for each other.
template <typename T, int ILP, int THREADS, int HIDDEN_SIZE>
__global__ void __launch_bounds__(THREADS) rms_norm_ilp(T* y, const T* x, float eps, float g) {
    __shared__ float slots[32];
    const long long row = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE;
    float squares[ILP] = {};
#pragma unroll 1
    for (int first = threadIdx.x; first < HIDDEN_SIZE; first += THREADS * ILP) {
        float value[ILP];
#pragma unroll
        for (int i = 0; i < ILP; ++i) value[i] = to_float(x[row + first + i * THREADS]);
#pragma unroll
        for (int i = 0; i < ILP; ++i) squares[i] += value[i] * value[i];
    }
#pragma unroll
    for (int i = 1; i < ILP; ++i) squares[0] += squares[i];
    const float sum = block_sum<THREADS>(squares[0], slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll 1
    for (int first = threadIdx.x; first < HIDDEN_SIZE; first += THREADS * ILP) {
        float value[ILP];
#pragma unroll
        for (int i = 0; i < ILP; ++i) value[i] = to_float(x[row + first + i * THREADS]);
#pragma unroll
        for (int i = 0; i < ILP; ++i)
            y[row + first + i * THREADS] = from_float<T>(value[i] * scale);
    }
}
