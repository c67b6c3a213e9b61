// SPDX-License-Identifier: Apache-2.0
// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, with vectors for weight and
// bias. layer_norm_held reads a row once and keeps it in registers; layer_norm_tiled takes any
// hidden size and reads the row three times: for the mean, for the deviations, for the output.
// Owner: thread t holds packs t, t + THREADS, ... of VEC_SIZE elements.
// Launch: grid (rows), block (THREADS), no dynamic shared memory.
// Caller guarantees: contiguous rows; every pack on a multiple of its size; hidden_size a multiple
// of VEC_SIZE, and for layer_norm_held at most VEC_SIZE * VECS_PER_THREAD * THREADS.
// Moves: one write of y and one read of x from memory (held), or up to three (tiled).

#include "study.cuh"
#include "vec.cuh"

template <typename T, int VEC_SIZE, int VECS_PER_THREAD, int THREADS>
__global__ void __launch_bounds__(THREADS)
    layer_norm_held(T* y, const T* x, const T* weight, const T* bias, long long hidden_size,
                    float eps) {
    using Vector = typename Word<sizeof(T) * VEC_SIZE>::type;
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const int packs = static_cast<int>(hidden_size / VEC_SIZE);
    const long long row = static_cast<long long>(blockIdx.x) * packs;

    float value[VECS_PER_THREAD][VEC_SIZE];
    float sum = 0.0f;
#pragma unroll
    for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
        const int pack = threadIdx.x + vec * THREADS;
        if (pack >= packs) continue;
        const Vector word = reinterpret_cast<const Vector*>(x)[row + pack];
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            value[vec][i] = to_float(reinterpret_cast<const T*>(&word)[i]);
            sum += value[vec][i];
        }
    }
    const float mean = block_sum<THREADS>(sum, sum_slots) / static_cast<float>(hidden_size);
    float squares = 0.0f;
#pragma unroll
    for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
        if (static_cast<int>(threadIdx.x) + vec * THREADS >= packs) continue;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            value[vec][i] -= mean;
            squares += value[vec][i] * value[vec][i];
        }
    }
    squares = block_sum<THREADS>(squares, square_slots);
    const float rstd = rsqrtf(squares / static_cast<float>(hidden_size) + eps);
#pragma unroll
    for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
        const int pack = threadIdx.x + vec * THREADS;
        if (pack >= packs) continue;
        const Vector weights = reinterpret_cast<const Vector*>(weight)[pack];
        const Vector biases = reinterpret_cast<const Vector*>(bias)[pack];
        Vector word;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            const float w = to_float(reinterpret_cast<const T*>(&weights)[i]);
            const float b = to_float(reinterpret_cast<const T*>(&biases)[i]);
            reinterpret_cast<T*>(&word)[i] = from_float<T>(value[vec][i] * rstd * w + b);
        }
        reinterpret_cast<Vector*>(y)[row + pack] = word;
    }
}

template <typename T, int VEC_SIZE, int THREADS>
__global__ void __launch_bounds__(THREADS)
    layer_norm_tiled(T* y, const T* x, const T* weight, const T* bias, long long hidden_size,
                     float eps) {
    using Vector = typename Word<sizeof(T) * VEC_SIZE>::type;
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const long long packs = hidden_size / VEC_SIZE;
    const Vector* x_row = reinterpret_cast<const Vector*>(x) + blockIdx.x * packs;
    Vector* y_row = reinterpret_cast<Vector*>(y) + blockIdx.x * packs;

    float sum = 0.0f;
    for (long long pack = threadIdx.x; pack < packs; pack += THREADS) {
        const Vector word = x_row[pack];
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) sum += to_float(reinterpret_cast<const T*>(&word)[i]);
    }
    const float mean = block_sum<THREADS>(sum, sum_slots) / static_cast<float>(hidden_size);
    float squares = 0.0f;
    for (long long pack = threadIdx.x; pack < packs; pack += THREADS) {
        const Vector word = x_row[pack];
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            const float deviation = to_float(reinterpret_cast<const T*>(&word)[i]) - mean;
            squares += deviation * deviation;
        }
    }
    squares = block_sum<THREADS>(squares, square_slots);
    const float rstd = rsqrtf(squares / static_cast<float>(hidden_size) + eps);
    for (long long pack = threadIdx.x; pack < packs; pack += THREADS) {
        const Vector weights = reinterpret_cast<const Vector*>(weight)[pack];
        const Vector biases = reinterpret_cast<const Vector*>(bias)[pack];
        Vector word = x_row[pack];
        T* value = reinterpret_cast<T*>(&word);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            const float w = to_float(reinterpret_cast<const T*>(&weights)[i]);
            const float b = to_float(reinterpret_cast<const T*>(&biases)[i]);
            value[i] = from_float<T>((to_float(value[i]) - mean) * rstd * w + b);
        }
        y_row[pack] = word;
    }
}
