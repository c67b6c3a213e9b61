// SPDX-License-Identifier: Apache-2.0
// Packs: VEC_SIZE neighbouring elements, which one thread moves together. Where the row allows it a
// pack crosses memory in words of up to 16 bytes; a misaligned row fills the same pack element by
// element, so that which elements a thread sums never depends on where the row lies.
#pragma once

#include "ptx.cuh"

template <int BYTES>
struct Word;
template <>
struct Word<1> {
    using type = unsigned char;
};
template <>
struct Word<2> {
    using type = unsigned short;
};
template <>
struct Word<4> {
    using type = unsigned int;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};

__host__ __device__ constexpr int word_bytes(int bytes) { return bytes < 16 ? bytes : 16; }

template <typename T, int VEC_SIZE>
struct alignas(word_bytes(sizeof(T) * VEC_SIZE)) Pack {
    T data[VEC_SIZE];
};

// How a load or a store treats the caches, and which memory is meant.
enum Hint {
    KEEP,    // global memory that other blocks read too, and nobody writes: weights, bias
    PLAIN,   // global memory
    STREAM,  // global memory that is touched once: evict first
    SHARED,  // shared memory
};

template <Hint HINT, typename W>
__device__ __forceinline__ W load_word(const W* address) {
    if constexpr (HINT == STREAM) {
        return __ldcs(address);
    } else if constexpr (HINT == KEEP) {
        return __ldg(address);
    } else {
        return *address;
    }
}

template <Hint HINT, bool ALIGNED, typename T, int VEC_SIZE>
__device__ __forceinline__ void load_pack(Pack<T, VEC_SIZE>& pack, const T* source) {
    constexpr int BYTES = ALIGNED ? word_bytes(sizeof(T) * VEC_SIZE) : sizeof(T);
    using W = typename Word<BYTES>::type;
    W* words = reinterpret_cast<W*>(pack.data);
    const W* from = reinterpret_cast<const W*>(source);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) * VEC_SIZE / BYTES; ++i) {
        words[i] = load_word<HINT>(from + i);
    }
}

// Asks for neighbouring packs to be brought to the L2, where their words are of 16 bytes.
template <bool ALIGNED, int VEC_SIZE, typename T>
__device__ __forceinline__ void prefetch_packs(const T* first, long long packs) {
    constexpr int BYTES = sizeof(Pack<T, VEC_SIZE>);
    if constexpr (ALIGNED && BYTES % 16 == 0) prefetch_l2(first, static_cast<int>(packs) * BYTES);
}

// Begins to bring one pack to shared memory: by copies to wait for, or through registers.
template <bool ASYNC, bool ALIGNED, typename T, int VEC_SIZE>
__device__ __forceinline__ void bring_pack(Pack<T, VEC_SIZE>* shared, const T* source) {
    constexpr int BYTES = word_bytes(sizeof(Pack<T, VEC_SIZE>));
    if constexpr (ASYNC && BYTES >= 4) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Pack<T, VEC_SIZE>)) / BYTES; ++i) {
            copy_async<BYTES>(reinterpret_cast<char*>(shared) + i * BYTES,
                              reinterpret_cast<const char*>(source) + i * BYTES);
        }
    } else {
        Pack<T, VEC_SIZE> pack;
        load_pack<STREAM, ALIGNED>(pack, source);
        *shared = pack;
    }
}

template <Hint HINT, bool ALIGNED, typename T, int VEC_SIZE>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, VEC_SIZE>& pack) {
    constexpr int BYTES = ALIGNED ? word_bytes(sizeof(T) * VEC_SIZE) : sizeof(T);
    using W = typename Word<BYTES>::type;
    const W* words = reinterpret_cast<const W*>(pack.data);
    W* to = reinterpret_cast<W*>(target);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) * VEC_SIZE / BYTES; ++i) {
        if constexpr (HINT == STREAM) {
            __stcs(to + i, words[i]);
        } else {
            __stwb(to + i, words[i]);  // an assignment may be taken apart
        }
    }
}
