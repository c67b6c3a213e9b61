// SPDX-License-Identifier: Apache-2.0
// Conversions between storage types and the type rows are summed in, and arithmetic that rounds
// every step: the documented rounding order is exact, so no multiply-add may be contracted there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Stands for an operand that a kernel does not have: no weight vector, no bias, no residual.
struct Absent {};
// Stands for an operand that is one number for every element, passed in the kernel's scalars.
struct Constant {};

template <typename T, typename U>
inline constexpr bool is_same = false;
template <typename T>
inline constexpr bool is_same<T, T> = true;

template <typename T>
inline constexpr bool is_array = !is_same<T, Absent> && !is_same<T, Constant>;

// The type in which rows of T are summed.
template <typename T>
struct Accumulation {
    using type = float;
};
template <>
struct Accumulation<double> {
    using type = double;
};

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ double to_float(double value) { return value; }

// Rounds to nearest even, once.
template <typename T, typename A>
__device__ __forceinline__ T from_float(A value) {
    if constexpr (is_same<T, __half>) {
        return __float2half_rn(value);
    } else if constexpr (is_same<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(value);
    } else {
        return static_cast<T>(value);
    }
}

__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add_rn(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double sub_rn(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }

__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }

__device__ __forceinline__ float reciprocal_sqrt(float value) { return rsqrtf(value); }
__device__ __forceinline__ double reciprocal_sqrt(double value) { return rsqrt(value); }
