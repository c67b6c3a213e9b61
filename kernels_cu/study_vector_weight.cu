// SPDX-License-Identifier: Apache-2.0
// y = x / sqrt(mean(x^2) + eps) * weight, for any hidden size and a weight vector.
// Owner: thread t holds elements t, t + THREADS, ... and reads each twice.
// Launch: grid (rows), block (THREADS), no dynamic shared memory.
// Caller guarantees: contiguous rows; THREADS is a power of two from 64 to 1024.
// Moves: one read of x from memory and a second one from the cache, one write of y.

#include "study.cuh"

// block_sum gives the row's sum to every thread. A version that leaves it in the first warp scales
// all other elements by 1 / sqrt(eps), and a test with a row of up to 32 elements cannot see it.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
    vector_weight(T* y, const T* x, const T* weight, long long hidden_size, float eps) {
    __shared__ float slots[32];
    const long long row = static_cast<long long>(blockIdx.x) * hidden_size;
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < hidden_size; i += THREADS) {
        const float value = to_float(x[row + i]);
        squares += value * value;
    }
    const float sum = block_sum<THREADS>(squares, slots);
    const float rstd = rsqrtf(sum / static_cast<float>(hidden_size) + eps);
    for (long long i = threadIdx.x; i < hidden_size; i += THREADS) {
        y[row + i] = from_float<T>(to_float(x[row + i]) * rstd * to_float(weight[i]));
    }
}
