// SPDX-License-Identifier: Apache-2.0
// The only file with inline PTX. Each piece stands beside a plain C++ body, which runs where the
// sources are compiled for a CPU; the names that begin with emulator_ are given there.
#pragma once

#include <cuda_fp16.h>

// Blocks a cluster, as an attribute of a kernel; architectures before 9.0 have no clusters and take
// CLUSTER_SIZE 1 alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER_DIMS(CLUSTER_SIZE) __cluster_dims__(CLUSTER_SIZE, 1, 1)
#else
#define CLUSTER_DIMS(CLUSTER_SIZE)
#endif

// Waits until all that comes before this kernel in its stream has ended and its writes are seen.
// Where launches overlap (compute capability 9.0 and later) a kernel may begin before that, so
// this is the first statement of each one that is launched so, in every thread.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if !defined(__CUDACC__)
    emulator_wait_for_earlier_kernels();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream may take its places once every block has come here or ended. It
// waits there; where it does not overlap, this does nothing.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Begins a 16-byte copy from global to shared memory (compute capability 8.0 and later).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global)
                 : "memory");
#else
    emulator_copy_async(shared, global, 16);
#endif
}

// The same for 4, 8 or 16 bytes, aligned to as many.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    if constexpr (BYTES == 16) {
        copy_async_16(shared, global);
    } else {
#if defined(__CUDACC__)
        const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global),
                     "n"(BYTES)
                     : "memory");
#else
        emulator_copy_async(shared, global, BYTES);
#endif
    }
}

// Closes the group of copies begun since the last call.
__device__ __forceinline__ void copy_async_commit() {
#if defined(__CUDACC__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emulator_copy_async_commit();
#endif
}

// Waits until at most PENDING of this thread's newest groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#if defined(__CUDACC__)
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#else
    emulator_copy_async_wait(PENDING);
#endif
}

// The same for a count that is a constant once its loop is unrolled; above 7 it waits for a few
// more groups than it has to.
__device__ __forceinline__ void copy_async_wait_for(int pending) {
    switch (pending) {
        case 0: return copy_async_wait<0>();
        case 1: return copy_async_wait<1>();
        case 2: return copy_async_wait<2>();
        case 3: return copy_async_wait<3>();
        case 4: return copy_async_wait<4>();
        case 5: return copy_async_wait<5>();
        case 6: return copy_async_wait<6>();
        default: return copy_async_wait<7>();
    }
}

// Bulk copies (compute capability 9.0 and later): one thread asks for a whole row; an mbarrier in
// shared memory counts the bytes that have arrived. Addresses and sizes are multiples of 16.

// Call in one thread, then synchronise the block before any other use.
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, int arrivals) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;\n"
        "fence.mbarrier_init.release.cluster;" ::"r"(address),
        "r"(arrivals)
        : "memory");
#else
    emulator_mbarrier_init(barrier, arrivals);
#endif
}

// Arrives, and makes the current phase wait for `bytes` more.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned long long* barrier, int bytes) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
#else
    emulator_mbarrier_arrive_expect(barrier, bytes);
#endif
}

// Waits for the end of the phase with this parity: the first phase has parity 0.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, int parity) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "waiting:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra waiting;\n"
        "}" ::"r"(address),
        "r"(parity)
        : "memory");
#else
    emulator_mbarrier_wait(barrier, parity);
#endif
}

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes,
                                          unsigned long long* barrier) {
#if defined(__CUDACC__)
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(global), "r"(bytes), "r"(address)
        : "memory");
#else
    emulator_bulk_copy(shared, global, bytes, barrier);
#endif
}

// Asks for memory to be brought to the L2 (nothing, before compute capability 9.0). Less than 1 MB,
// its address and size multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* global, int bytes) {
#if !defined(__CUDACC__)
    emulator_prefetch(global, bytes);
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

__device__ __forceinline__ unsigned cluster_rank() {
#if defined(__CUDACC__)
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return emulator_cluster_rank();
#endif
}

// The two halves of a barrier over the cluster that orders no memory: after the wait every block of
// the cluster has begun to run, and not more.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDACC__)
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDACC__)
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
    emulator_cluster_arrive_wait();
#endif
}

// Barrier over the cluster: what each block wrote to shared memory before it is seen by all after.
__device__ __forceinline__ void cluster_barrier() {
#if defined(__CUDACC__)
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
#else
    emulator_cluster_arrive_wait();
#endif
}

// Writes `value` to the place of `shared` in the block of the cluster with this rank.
__device__ __forceinline__ void cluster_store(float* shared, unsigned rank, float value) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile(
        "{\n"
        ".reg .u32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.f32 [remote], %2;\n"
        "}" ::"r"(address),
        "r"(rank), "f"(value)
        : "memory");
#else
    *static_cast<float*>(emulator_cluster_map(shared, rank)) = value;
#endif
}

__device__ __forceinline__ void cluster_store(double* shared, unsigned rank, double value) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile(
        "{\n"
        ".reg .u32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.f64 [remote], %2;\n"
        "}" ::"r"(address),
        "r"(rank), "d"(value)
        : "memory");
#else
    *static_cast<double*>(emulator_cluster_map(shared, rank)) = value;
#endif
}

// The same, and tells the mbarrier at the place of `barrier` in that block that the bytes have
// come: unlike a barrier of the cluster it waits for none of this thread's stores to global memory.
__device__ __forceinline__ void cluster_send(float* shared, unsigned rank, float value,
                                             unsigned long long* barrier) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const unsigned barrier_address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile(
        "{\n"
        ".reg .u32 remote, remote_barrier;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, "
        "[remote_barrier];\n"
        "}" ::"r"(address),
        "r"(barrier_address), "r"(rank), "f"(value)
        : "memory");
#else
    emulator_cluster_send(emulator_cluster_map(shared, rank), &value, sizeof(value),
                          emulator_cluster_map(barrier, rank));
#endif
}

__device__ __forceinline__ void cluster_send(double* shared, unsigned rank, double value,
                                             unsigned long long* barrier) {
#if defined(__CUDACC__)
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const unsigned barrier_address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile(
        "{\n"
        ".reg .u32 remote, remote_barrier;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [remote], %3, "
        "[remote_barrier];\n"
        "}" ::"r"(address),
        "r"(barrier_address), "r"(rank), "d"(value)
        : "memory");
#else
    emulator_cluster_send(emulator_cluster_map(shared, rank), &value, sizeof(value),
                          emulator_cluster_map(barrier, rank));
#endif
}

// One 16 x 8 x 8 product of a warp on the tensor cores (compute capability 7.5 and later):
// sum += A * B, float16 factors, float32 sums. With group = lane / 4 and pair = lane % 4, a lane
// gives A[group][2 * pair .. + 1], A[group + 8][the same] and B[2 * pair .. + 1][group], and holds
// the sums of rows group and group + 8, columns 2 * pair and the next.
__device__ __forceinline__ void mma_16x8x8(float (&sum)[4], unsigned a_low, unsigned a_high,
                                           unsigned b) {
#if defined(__CUDACC__)
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a_low), "r"(a_high), "r"(b));
#else
    const int group = threadIdx.x % 32 / 4;
    const int pair = threadIdx.x % 4;
    const auto half_of = [](unsigned word, int k) {
        __half_raw raw;
        raw.x = static_cast<unsigned short>(word >> (16 * k));
        return __half2float(__half(raw));
    };
    for (int source = 0; source < 4; ++source) {
        const unsigned rows[2] = {__shfl_sync(0xffffffffu, a_low, 4 * group + source),
                                  __shfl_sync(0xffffffffu, a_high, 4 * group + source)};
        const unsigned columns[2] = {__shfl_sync(0xffffffffu, b, 8 * pair + source),
                                     __shfl_sync(0xffffffffu, b, 8 * pair + 4 + source)};
        for (int i = 0; i < 4; ++i) {
            for (int k = 0; k < 2; ++k) {
                sum[i] += half_of(rows[i / 2], k) * half_of(columns[i % 2], k);
            }
        }
    }
#endif
}
