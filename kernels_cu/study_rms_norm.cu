// SPDX-License-Identifier: Apache-2.0
// y = x / sqrt(mean(x^2) + eps) * g, in the classic shapes: one block a row, one load a thread.
// rms_norm_A_B loads A and accumulates in B: f16x8 is four loads of 4 bytes, pack one of 16 bytes.
// Owner: thread t holds the VEC_SIZE elements from t * VEC_SIZE on; VEC_SIZE is in the name.
// Launch: grid (rows), block (HIDDEN_SIZE / VEC_SIZE), no dynamic shared memory.
// Caller guarantees: contiguous rows; x and y on multiples of a load; HIDDEN_SIZE / VEC_SIZE is a
// power of two from 2 to 1024.
// Moves: one read of x, one write of y.

#include "study.cuh"

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE)
    rms_norm_f32(float* y, const float* x, float eps, float g) {
    __shared__ float slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE + threadIdx.x;
    const float value = x[at];
    const float sum = block_sum<HIDDEN_SIZE>(value * value, slots);
    y[at] = value * rsqrtf(sum / HIDDEN_SIZE + eps) * g;
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 4)
    rms_norm_f32x4(float* y, const float* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 4;
    __shared__ float slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    float4 value = reinterpret_cast<const float4*>(x)[at];
    const float squares =
        value.x * value.x + value.y * value.y + value.z * value.z + value.w * value.w;
    const float sum = block_sum<THREADS>(squares, slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
    value.x *= scale;
    value.y *= scale;
    value.z *= scale;
    value.w *= scale;
    reinterpret_cast<float4*>(y)[at] = value;
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE)
    rms_norm_f16_f16(__half* y, const __half* x, float eps, float g) {
    __shared__ __half slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE + threadIdx.x;
    const __half value = x[at];
    const __half sum = block_sum<HIDDEN_SIZE>(__hmul(value, value), slots);
    const __half mean = __hmul(sum, __float2half_rn(1.0f / HIDDEN_SIZE));
    const __half rstd = reciprocal_sqrt(__hadd(mean, __float2half_rn(eps)));
    y[at] = __hmul(__hmul(value, rstd), __float2half_rn(g));
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE)
    rms_norm_f16_f32(__half* y, const __half* x, float eps, float g) {
    __shared__ float slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * HIDDEN_SIZE + threadIdx.x;
    const float value = __half2float(x[at]);
    const float sum = block_sum<HIDDEN_SIZE>(value * value, slots);
    y[at] = __float2half_rn(value * rsqrtf(sum / HIDDEN_SIZE + eps) * g);
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 2)
    rms_norm_f16x2_f16(__half* y, const __half* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 2;
    __shared__ __half slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const __half2 value = reinterpret_cast<const __half2*>(x)[at];
    const __half2 squares = __hmul2(value, value);
    const __half sum = block_sum<THREADS>(__hadd(__low2half(squares), __high2half(squares)), slots);
    const __half mean = __hmul(sum, __float2half_rn(1.0f / HIDDEN_SIZE));
    const __half rstd = reciprocal_sqrt(__hadd(mean, __float2half_rn(eps)));
    reinterpret_cast<__half2*>(y)[at] =
        __hmul2(__hmul2(value, __half2half2(rstd)), __float2half2_rn(g));
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    rms_norm_f16x8_f16(__half* y, const __half* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ __half slots[32];
    const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * 4;
    __half2 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = reinterpret_cast<const __half2*>(x)[at + i];
    __half2 squares = __hmul2(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) squares = __hadd2(squares, __hmul2(value[i], value[i]));
    const __half sum = block_sum<THREADS>(__hadd(__low2half(squares), __high2half(squares)), slots);
    const __half mean = __hmul(sum, __float2half_rn(1.0f / HIDDEN_SIZE));
    const __half2 rstd = __half2half2(reciprocal_sqrt(__hadd(mean, __float2half_rn(eps))));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<__half2*>(y)[at + i] =
            __hmul2(__hmul2(value[i], rstd), __float2half2_rn(g));
    }
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    rms_norm_f16x8_f32(__half* y, const __half* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ float slots[32];
    const long long at = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) * 4;
    float2 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i] = __half22float2(reinterpret_cast<const __half2*>(x)[at + i]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += value[i].x * value[i].x + value[i].y * value[i].y;
    const float sum = block_sum<THREADS>(squares, slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<__half2*>(y)[at + i] =
            __floats2half2_rn(value[i].x * scale, value[i].y * scale);
    }
}

template <int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    rms_norm_f16x8_pack_f16(__half* y, const __half* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ __half slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    __half2* value = reinterpret_cast<__half2*>(&pack);
    __half2 squares = __hmul2(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) squares = __hadd2(squares, __hmul2(value[i], value[i]));
    const __half sum = block_sum<THREADS>(__hadd(__low2half(squares), __high2half(squares)), slots);
    const __half mean = __hmul(sum, __float2half_rn(1.0f / HIDDEN_SIZE));
    const __half2 rstd = __half2half2(reciprocal_sqrt(__hadd(mean, __float2half_rn(eps))));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i] = __hmul2(__hmul2(value[i], rstd), __float2half2_rn(g));
    }
    reinterpret_cast<uint4*>(y)[at] = pack;
}

// T: __half or __nv_bfloat16.
template <typename T, int HIDDEN_SIZE>
__global__ void __launch_bounds__(HIDDEN_SIZE / 8)
    rms_norm_x8_pack_f32(T* y, const T* x, float eps, float g) {
    constexpr int THREADS = HIDDEN_SIZE / 8;
    __shared__ float slots[32];
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 pack = reinterpret_cast<const uint4*>(x)[at];
    T* value = reinterpret_cast<T*>(&pack);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += to_float(value[i]) * to_float(value[i]);
    const float sum = block_sum<THREADS>(squares, slots);
    const float scale = rsqrtf(sum / HIDDEN_SIZE + eps) * g;
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = from_float<T>(to_float(value[i]) * scale);
    reinterpret_cast<uint4*>(y)[at] = pack;
}
