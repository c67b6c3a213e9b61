// SPDX-License-Identifier: Apache-2.0
// Included before every kernel source that the emulator compiles: the CUDA vocabulary as plain C++.
// What needs other threads (barriers, shuffles, atomics, copies) is a call into runtime.cpp; the
// rest is here. Calls carry the line that they stand on, so that a fault can name it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

struct EmulatorThread {
    uint3 thread_index;
    uint3 block_index;
    dim3 block_dim;
    dim3 grid_dim;
};
struct EmulatorLine {
    const char* file;
    int line;
};
// One parameter, or one member of a parameter that is a struct.
struct EmulatorParameter {
    const char* name;
    char kind;  // p pointer, i integer, f floating point, b bool, s struct
    int offset;
    int size;
};
struct EmulatorKernel {
    const char* expression;
    void (*run)(const void* packed);
    const EmulatorParameter* parameters;
    int parameter_count;
    int packed_size;
    int cluster_size;
    int max_threads;  // of __launch_bounds__; 0: none given
};
struct EmulatorDynamic {
    void* (*address)();
    unsigned long long capacity;
};

enum EmulatorWarp { SYNCWARP, SHUFFLE_INDEX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, MATCH };
enum EmulatorAtomic {
    ADD,
    EXCHANGE,
    COMPARE,
    MINIMUM,
    MAXIMUM,
    AND,
    OR,
    XOR,
    INCREMENT,
    DECREMENT
};

extern "C" {
extern const EmulatorThread* emulator_thread;
void emulator_syncthreads(const char* file, int line);
int emulator_syncthreads_count(int predicate, const char* file, int line);
void emulator_named_barrier(unsigned id, unsigned threads, bool wait, const char* file, int line);
uint64_t emulator_warp(EmulatorWarp what, unsigned mask, uint64_t value, int argument, int width,
                       const char* file, int line);
unsigned emulator_lane();
uint64_t emulator_atomic(void* address, int size, char kind, EmulatorAtomic what, uint64_t operand,
                         uint64_t compare, const char* file, int line);
void emulator_fence();
[[noreturn]] void emulator_trap(const char* what, const char* file, int line);
void emulator_wait_for_earlier_kernels_at(const char* file, int line);
unsigned emulator_cluster_rank();
unsigned emulator_cluster_size();
void emulator_cluster_barrier(bool arrive, bool wait, const char* file, int line);
void* emulator_cluster_map_at(const void* shared, unsigned rank, const char* file, int line);
void emulator_copy_async_at(void* shared, const void* global, int bytes, const char* file,
                            int line);
void emulator_copy_async_commit();
void emulator_copy_async_wait_at(int groups_pending, const char* file, int line);
void emulator_mbarrier_init_at(void* barrier, unsigned count, const char* file, int line);
void emulator_mbarrier_arrive_at(void* barrier, unsigned bytes, const char* file, int line);
bool emulator_mbarrier_test_at(void* barrier, unsigned parity, bool wait, const char* file,
                               int line);
void emulator_bulk_copy_at(void* shared, const void* global, int bytes, void* barrier,
                           const char* file, int line);
void emulator_prefetch_at(const void* global, int bytes, const char* file, int line);
void emulator_cluster_send_at(void* shared, const void* value, int bytes, void* barrier,
                              const char* file, int line);
}

#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATOR_INLINE inline __attribute__((always_inline))

#define threadIdx (emulator_thread->thread_index)
#define blockIdx (emulator_thread->block_index)
#define blockDim (emulator_thread->block_dim)
#define gridDim (emulator_thread->grid_dim)
inline constexpr int warpSize = 32;

// Barriers, votes and shuffles.

EMULATOR_INLINE void __syncthreads(EMULATOR_HERE) { emulator_syncthreads(file, line); }
EMULATOR_INLINE int __syncthreads_count(int predicate, EMULATOR_HERE) {
    return emulator_syncthreads_count(predicate != 0, file, line);
}
EMULATOR_INLINE int __syncthreads_or(int predicate, EMULATOR_HERE) {
    return emulator_syncthreads_count(predicate != 0, file, line) != 0;
}
EMULATOR_INLINE int __syncthreads_and(int predicate, EMULATOR_HERE) {
    return emulator_syncthreads_count(predicate == 0, file, line) == 0;
}
EMULATOR_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_HERE) {
    emulator_warp(SYNCWARP, mask, 0, 0, 32, file, line);
}
EMULATOR_INLINE unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return static_cast<unsigned>(emulator_warp(BALLOT, mask, predicate != 0, 0, 32, file, line));
}
EMULATOR_INLINE int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return emulator_warp(BALLOT, mask, predicate != 0, 0, 32, file, line) != 0;
}
EMULATOR_INLINE int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return emulator_warp(BALLOT, mask, predicate != 0, 0, 32, file, line) == mask;
}

template <typename T>
EMULATOR_INLINE T emulator_shuffle(EmulatorWarp what, unsigned mask, T value, int argument,
                                   int width, const char* file, int line) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = emulator_warp(what, mask, bits, argument, width, file, line);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T>
EMULATOR_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATOR_HERE) {
    return emulator_shuffle(SHUFFLE_INDEX, mask, value, lane, width, file, line);
}
template <typename T>
EMULATOR_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32,
                                 EMULATOR_HERE) {
    return emulator_shuffle(SHUFFLE_UP, mask, value, lanes, width, file, line);
}
template <typename T>
EMULATOR_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32,
                                   EMULATOR_HERE) {
    return emulator_shuffle(SHUFFLE_DOWN, mask, value, lanes, width, file, line);
}
template <typename T>
EMULATOR_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                                  EMULATOR_HERE) {
    return emulator_shuffle(SHUFFLE_XOR, mask, value, lanes, width, file, line);
}

// Atomics and fences.

template <typename T>
inline constexpr char emulator_kind = std::is_floating_point_v<T> ? 'f'
                                      : std::is_signed_v<T>       ? 'i'
                                                                  : 'u';
template <typename T>
EMULATOR_INLINE T emulator_atomic_as(T* address, EmulatorAtomic what, T operand, T compare,
                                     const char* file, int line) {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4);
    uint64_t a = 0, b = 0;
    std::memcpy(&a, &operand, sizeof(T));
    std::memcpy(&b, &compare, sizeof(T));
    a = emulator_atomic(address, sizeof(T), emulator_kind<T>, what, a, b, file, line);
    std::memcpy(&operand, &a, sizeof(T));
    return operand;
}
template <typename T>
struct EmulatorSame {
    using type = T;
};
#define EMULATOR_ATOMIC(NAME, WHAT)                                                           \
    template <typename T>                                                                     \
    EMULATOR_INLINE T NAME(T* address, typename EmulatorSame<T>::type value, EMULATOR_HERE) { \
        return emulator_atomic_as<T>(address, WHAT, value, T(), file, line);                  \
    }
EMULATOR_ATOMIC(atomicAdd, ADD)
EMULATOR_ATOMIC(atomicExch, EXCHANGE)
EMULATOR_ATOMIC(atomicMin, MINIMUM)
EMULATOR_ATOMIC(atomicMax, MAXIMUM)
EMULATOR_ATOMIC(atomicAnd, AND)
EMULATOR_ATOMIC(atomicOr, OR)
EMULATOR_ATOMIC(atomicXor, XOR)
EMULATOR_ATOMIC(atomicInc, INCREMENT)
EMULATOR_ATOMIC(atomicDec, DECREMENT)
#undef EMULATOR_ATOMIC
template <typename T>
EMULATOR_INLINE T atomicCAS(T* address, typename EmulatorSame<T>::type compare,
                            typename EmulatorSame<T>::type value, EMULATOR_HERE) {
    return emulator_atomic_as<T>(address, COMPARE, value, compare, file, line);
}
EMULATOR_INLINE void __threadfence() { emulator_fence(); }
EMULATOR_INLINE void __threadfence_block() { emulator_fence(); }
EMULATOR_INLINE void __threadfence_system() { emulator_fence(); }

// What ptx.cuh calls in place of PTX.

EMULATOR_INLINE void emulator_wait_for_earlier_kernels(EMULATOR_HERE) {
    emulator_wait_for_earlier_kernels_at(file, line);
}
EMULATOR_INLINE void emulator_cluster_arrive_wait(EMULATOR_HERE) {
    emulator_cluster_barrier(true, true, file, line);
}
EMULATOR_INLINE void emulator_cluster_arrive(EMULATOR_HERE) {
    emulator_cluster_barrier(true, false, file, line);
}
EMULATOR_INLINE void emulator_cluster_wait(EMULATOR_HERE) {
    emulator_cluster_barrier(false, true, file, line);
}
EMULATOR_INLINE void* emulator_cluster_map(const void* shared, unsigned rank, EMULATOR_HERE) {
    return emulator_cluster_map_at(shared, rank, file, line);
}
EMULATOR_INLINE void emulator_copy_async(void* shared, const void* global, int bytes,
                                         EMULATOR_HERE) {
    emulator_copy_async_at(shared, global, bytes, file, line);
}
EMULATOR_INLINE void emulator_copy_async_wait(int groups_pending, EMULATOR_HERE) {
    emulator_copy_async_wait_at(groups_pending, file, line);
}
EMULATOR_INLINE void emulator_mbarrier_init(void* barrier, unsigned count, EMULATOR_HERE) {
    emulator_mbarrier_init_at(barrier, count, file, line);
}
EMULATOR_INLINE void emulator_mbarrier_arrive(void* barrier, EMULATOR_HERE) {
    emulator_mbarrier_arrive_at(barrier, 0, file, line);
}
EMULATOR_INLINE void emulator_mbarrier_arrive_expect(void* barrier, unsigned bytes, EMULATOR_HERE) {
    emulator_mbarrier_arrive_at(barrier, bytes, file, line);
}
EMULATOR_INLINE void emulator_mbarrier_wait(void* barrier, unsigned parity, EMULATOR_HERE) {
    emulator_mbarrier_test_at(barrier, parity, true, file, line);
}
EMULATOR_INLINE void emulator_bulk_copy(void* shared, const void* global, int bytes, void* barrier,
                                        EMULATOR_HERE) {
    emulator_bulk_copy_at(shared, global, bytes, barrier, file, line);
}
EMULATOR_INLINE void emulator_prefetch(const void* global, int bytes, EMULATOR_HERE) {
    emulator_prefetch_at(global, bytes, file, line);
}
EMULATOR_INLINE void emulator_cluster_send(void* shared, const void* value, int bytes,
                                           void* barrier, EMULATOR_HERE) {
    emulator_cluster_send_at(shared, value, bytes, barrier, file, line);
}

// Loads and stores with cache hints.

#define EMULATOR_LOAD(NAME)                    \
    template <typename T>                      \
    EMULATOR_INLINE T NAME(const T* address) { \
        return *address;                       \
    }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldlu)
EMULATOR_LOAD(__ldcv)
#undef EMULATOR_LOAD
#define EMULATOR_STORE(NAME)                                                      \
    template <typename T>                                                         \
    EMULATOR_INLINE void NAME(T* address, typename EmulatorSame<T>::type value) { \
        *address = value;                                                         \
    }
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
#undef EMULATOR_STORE

// Arithmetic. The build forbids contraction, so each operator rounds once.

EMULATOR_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMULATOR_INLINE float __fsub_rn(float a, float b) { return a - b; }
EMULATOR_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMULATOR_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMULATOR_INLINE float __frcp_rn(float a) { return 1.0f / a; }
EMULATOR_INLINE float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
EMULATOR_INLINE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
EMULATOR_INLINE float __frsqrt_rn(float a) {
    return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(a)));
}
EMULATOR_INLINE float rsqrtf(float a) { return __frsqrt_rn(a); }
EMULATOR_INLINE double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }
EMULATOR_INLINE float rsqrt(float a) { return __frsqrt_rn(a); }
EMULATOR_INLINE double __dadd_rn(double a, double b) { return a + b; }
EMULATOR_INLINE double __dsub_rn(double a, double b) { return a - b; }
EMULATOR_INLINE double __dmul_rn(double a, double b) { return a * b; }
EMULATOR_INLINE double __ddiv_rn(double a, double b) { return a / b; }
EMULATOR_INLINE double __drcp_rn(double a) { return 1.0 / a; }
EMULATOR_INLINE double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
EMULATOR_INLINE double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
EMULATOR_INLINE unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
EMULATOR_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
EMULATOR_INLINE float __fdividef(float a, float b) { return a / b; }
EMULATOR_INLINE float __saturatef(float a) { return a >= 1.0f ? 1.0f : a > 0.0f ? a : 0.0f; }

template <typename T>
EMULATOR_INLINE T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T>
EMULATOR_INLINE T max(T a, T b) {
    return a < b ? b : a;
}
EMULATOR_INLINE int __popc(unsigned a) { return __builtin_popcount(a); }
EMULATOR_INLINE int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
EMULATOR_INLINE int __ffs(int a) { return __builtin_ffs(a); }

template <typename To, typename From>
EMULATOR_INLINE To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}
EMULATOR_INLINE unsigned __float_as_uint(float a) { return emulator_bits<unsigned>(a); }
EMULATOR_INLINE float __uint_as_float(unsigned a) { return emulator_bits<float>(a); }
EMULATOR_INLINE int __float_as_int(float a) { return emulator_bits<int>(a); }
EMULATOR_INLINE float __int_as_float(int a) { return emulator_bits<float>(a); }
EMULATOR_INLINE long long __double_as_longlong(double a) { return emulator_bits<long long>(a); }
EMULATOR_INLINE double __longlong_as_double(long long a) { return emulator_bits<double>(a); }

EMULATOR_INLINE void __trap(EMULATOR_HERE) { emulator_trap("__trap()", file, line); }
EMULATOR_INLINE void __nanosleep(unsigned) {}
EMULATOR_INLINE void __builtin_assume(bool) {}

// From a kernel's type to its entry in the table that the build appends.

template <typename T>
constexpr char emulator_parameter_kind() {
    return std::is_pointer_v<T>          ? 'p'
           : std::is_same_v<T, bool>     ? 'b'
           : std::is_integral_v<T>       ? 'i'
           : std::is_floating_point_v<T> ? 'f'
           : std::is_enum_v<T>           ? 'i'
                                         : 's';
}
template <typename F>
struct EmulatorSignature;
template <typename... P>
struct EmulatorSignature<void (*)(P...)> {
    static constexpr int count = sizeof...(P);
    struct Layout {
        EmulatorParameter parameters[count == 0 ? 1 : count];
        int size;
    };
    static constexpr Layout layout() {
        Layout result = {};
        int offset = 0, i = 0;
        ((offset = (offset + int(alignof(P)) - 1) / int(alignof(P)) * int(alignof(P)),
          result.parameters[i++] = {"", emulator_parameter_kind<P>(), offset, int(sizeof(P))},
          offset += int(sizeof(P))),
         ...);
        result.size = offset;
        return result;
    }
    static constexpr Layout value = layout();

    template <typename T>
    static T load(const void* packed, int offset) {
        T result;
        std::memcpy(&result, static_cast<const char*>(packed) + offset, sizeof(T));
        return result;
    }
    template <std::size_t... I>
    static void call(void (*kernel)(P...), const void* packed, std::index_sequence<I...>) {
        kernel(load<std::remove_const_t<P>>(packed, value.parameters[I].offset)...);
    }
};
template <auto KERNEL>
void emulator_run(const void* packed) {
    using Signature = EmulatorSignature<decltype(KERNEL)>;
    Signature::call(KERNEL, packed, std::make_index_sequence<Signature::count>());
}
// The type of a kernel's parameter I.
template <typename F, int I>
struct EmulatorParameterType;
template <int I, typename P, typename... Rest>
struct EmulatorParameterType<void (*)(P, Rest...), I>
    : EmulatorParameterType<void (*)(Rest...), I - 1> {};
template <typename P, typename... Rest>
struct EmulatorParameterType<void (*)(P, Rest...), 0> {
    using type = P;
};
