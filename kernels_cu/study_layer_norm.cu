// SPDX-License-Identifier: Apache-2.0
// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * g + b, in the classic shapes: one block a row,
// one load a thread, two reductions, of which the second waits for the first.
// layer_norm_A_B loads A and accumulates in B: f16x8 is four loads of 4 bytes, pack one of 16.
// Owner: thread t holds the VEC_SIZE elements from t * VEC_SIZE on; VEC_SIZE is in the name.
// Launch: grid (rows), block (HIDDEN_SIZE / VEC_SIZE), no dynamic shared memory.
// Caller guarantees: contiguous rows; x and y on multiples of a load; HIDDEN_SIZE / VEC_SIZE is a
// power of two from 2 to 1024.
// Moves: one read of x, one write of y.

#include "study.cuh"

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE)
    layer_norm_f32(float* y, const float* x, float eps, float g, float b) {
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE + threadIdx.x;
    const float value = x[at];
    const float mean = block_sum<HIDDEN_SIZE>(value, sum_slots) / HIDDEN_SIZE;
    const float deviation = value - mean;
    const float sum = block_sum<HIDDEN_SIZE>(deviation * deviation, square_slots);
    y[at] = deviation * rsqrtf(sum / HIDDEN_SIZE + eps) * g + b;
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 4)
    layer_norm_f32x4(float* y, const float* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / 4;
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    float4 value = reinterpret_cast<const float4*>(x)[at];
    const float mean =
        block_sum<THREADS>(value.x + value.y + value.z + value.w, sum_slots) / HIDDEN_SIZE;
    value.x -= mean;
    value.y -= mean;
    value.z -= mean;
    value.w -= mean;
    const float squares =
        value.x * value.x + value.y * value.y + value.z * value.z + value.w * value.w;
    const float sum = block_sum<THREADS>(squares, square_slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
    value.x = value.x * scale + b;
    value.y = value.y * scale + b;
    value.z = value.z * scale + b;
    value.w = value.w * scale + b;
    reinterpret_cast<float4*>(y)[at] = value;
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE)
    layer_norm_f16_f16(__half* y, const __half* x, float eps, float g, float b) {
    __shared__ __half sum_slots[32];
    __shared__ __half square_slots[32];
    const __half share = __float2half_rn(1.0f / HIDDEN_SIZE);
    const long long at = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE + threadIdx.x;
    const __half value = x[at];
    const __half mean = __hmul(block_sum<HIDDEN_SIZE>(value, sum_slots), share);
    const __half deviation = __hsub(value, mean);
    const __half sum = block_sum<HIDDEN_SIZE>(__hmul(deviation, deviation), square_slots);
    const __half rstd = reciprocal_sqrt(__hadd(__hmul(sum, share), __float2half_rn(eps)));
    y[at] = __hadd(__hmul(__hmul(deviation, rstd), __float2half_rn(g)), __float2half_rn(b));
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE)
    layer_norm_f16_f32(__half* y, const __half* x, float eps, float g, float b) {
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE + threadIdx.x;
    const float value = __half2float(x[at]);
    const float mean = block_sum<HIDDEN_SIZE>(value, sum_slots) / HIDDEN_SIZE;
    const float deviation = value - mean;
    const float sum = block_sum<HIDDEN_SIZE>(deviation * deviation, square_slots);
    y[at] = __float2half_rn(deviation * rsqrtf(sum / HIDDEN_SIZE + eps) * g + b);
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 2)
    layer_norm_f16x2_f16(__half* y, const __half* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / 2;
    __shared__ __half sum_slots[32];
    __shared__ __half square_slots[32];
    const __half share = __float2half_rn(1.0f / HIDDEN_SIZE);
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const __half2 value = reinterpret_cast<const __half2*>(x)[at];
    const __half mean =
        __hmul(block_sum<THREADS>(__hadd(__low2half(value), __high2half(value)), sum_slots), share);
    const __half2 deviation = __hsub2(value, __half2half2(mean));
    const __half2 squares = __hmul2(deviation, deviation);
    const __half sum =
        block_sum<THREADS>(__hadd(__low2half(squares), __high2half(squares)), square_slots);
    const __half rstd = reciprocal_sqrt(__hadd(__hmul(sum, share), __float2half_rn(eps)));
    reinterpret_cast<__half2*>(y)[at] = __hadd2(
        __hmul2(__hmul2(deviation, __half2half2(rstd)), __float2half2_rn(g)), __float2half2_rn(b));
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    layer_norm_f16x8_f16(__half* y, const __half* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ __half sum_slots[32];
    __shared__ __half square_slots[32];
    const __half share = __float2half_rn(1.0f / HIDDEN_SIZE);
    const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * 4;
    __half2 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = reinterpret_cast<const __half2*>(x)[at + i];
    const __half2 values = __hadd2(__hadd2(value[0], value[1]), __hadd2(value[2], value[3]));
    const __half2 mean = __half2half2(__hmul(
        block_sum<THREADS>(__hadd(__low2half(values), __high2half(values)), sum_slots), share));
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __hsub2(value[i], mean);
    __half2 squares = __hmul2(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) squares = __hadd2(squares, __hmul2(value[i], value[i]));
    const __half sum =
        block_sum<THREADS>(__hadd(__low2half(squares), __high2half(squares)), square_slots);
    const __half2 rstd =
        __half2half2(reciprocal_sqrt(__hadd(__hmul(sum, share), __float2half_rn(eps))));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<__half2*>(y)[at + i] =
            __hadd2(__hmul2(__hmul2(value[i], rstd), __float2half2_rn(g)), __float2half2_rn(b));
    }
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    layer_norm_f16x8_f32(__half* y, const __half* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * 4;
    float2 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i] = __half22float2(reinterpret_cast<const __half2*>(x)[at + i]);
    }
    float values = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) values += value[i].x + value[i].y;
    const float mean = block_sum<THREADS>(values, sum_slots) / HIDDEN_SIZE;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i].x -= mean;
        value[i].y -= mean;
        squares += value[i].x * value[i].x + value[i].y * value[i].y;
    }
    const float sum = block_sum<THREADS>(squares, square_slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<__half2*>(y)[at + i] =
            __floats2half2_rn(value[i].x * scale + b, value[i].y * scale + b);
    }
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    layer_norm_f16x8_pack_f16(__half* y, const __half* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ __half sum_slots[32];
    __shared__ __half square_slots[32];
    const __half share = __float2half_rn(1.0f / HIDDEN_SIZE);
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    __half2* value = reinterpret_cast<__half2*>(&pack);
    const __half2 values = __hadd2(__hadd2(value[0], value[1]), __hadd2(value[2], value[3]));
    const __half2 mean = __half2half2(__hmul(
        block_sum<THREADS>(__hadd(__low2half(values), __high2half(values)), sum_slots), share));
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __hsub2(value[i], mean);
    __half2 squares = __hmul2(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) squares = __hadd2(squares, __hmul2(value[i], value[i]));
    const __half sum =
        block_sum<THREADS>(__hadd(__low2half(squares), __high2half(squares)), square_slots);
    const __half2 rstd =
        __half2half2(reciprocal_sqrt(__hadd(__hmul(sum, share), __float2half_rn(eps))));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i] =
            __hadd2(__hmul2(__hmul2(value[i], rstd), __float2half2_rn(g)), __float2half2_rn(b));
    }
    reinterpret_cast<uint4*>(y)[at] = pack;
}

// T: __half or __nv_bfloat16.
template <typename T, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    layer_norm_x8_pack_f32(T* y, const T* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ float sum_slots[32];
    __shared__ float square_slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    T* value = reinterpret_cast<T*>(&pack);
    float values = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) values += to_float(value[i]);
    const float mean = block_sum<THREADS>(values, sum_slots) / HIDDEN_SIZE;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float deviation = to_float(value[i]) - mean;
        squares += deviation * deviation;
    }
    const float sum = block_sum<THREADS>(squares, square_slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        value[i] = from_float<T>((to_float(value[i]) - mean) * scale + b);
    }
    reinterpret_cast<uint4*>(y)[at] = pack;
}

// The shortcut: var(x) = E[x^2] - E[x]^2 needs one pass and one barrier, and cancels where the mean
// is large against the spread. T: float, __half or __nv_bfloat16.
template <typename T, int VEC_SIZE, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / VEC_SIZE)
    layer_norm_single_pass(T* y, const T* x, float eps, float g, float b) {
    constexpr int THREADS = HIDDEN_SIZE / VEC_SIZE;
    constexpr int WARPS = THREADS / 32;
    __shared__ float sum_slots[WARPS];
    __shared__ float square_slots[WARPS];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    T* value = reinterpret_cast<T*>(&pack);
    float sum = 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
        sum += to_float(value[i]);
        squares += to_float(value[i]) * to_float(value[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    if (threadIdx.x % 32 == 0) {
        sum_slots[threadIdx.x / 32] = sum;
        square_slots[threadIdx.x / 32] = squares;
    }
    __syncthreads();  // both sums of every warp are in their slots
    sum = sum_slots[threadIdx.x % WARPS];
    squares = square_slots[threadIdx.x % WARPS];
#pragma unroll
    for (int offset = WARPS / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    const float mean = sum / HIDDEN_SIZE;
    // Rounding can make the difference negative, and then the root NaN.
    const float variance = fmaxf(squares / HIDDEN_SIZE - mean * mean, 0.0f);
    const float scale = rsqrtf(variance + eps) * g;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
        value[i] = from_float<T>((to_float(value[i]) - mean) * scale + b);
    }
    reinterpret_cast<uint4*>(y)[at] = pack;
}
