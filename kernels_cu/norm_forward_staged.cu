// SPDX-License-Identifier: Apache-2.0
// The formula of norm_forward for long rows. The row is copied once into the shared memory of a
// cluster of CLUSTER_SIZE blocks and read from there for every pass.
// Owner: block r of the cluster holds the r-th share of the row's packs; thread t holds packs t,
// t + THREADS, ... of the share, copies them itself and alone reads them.
// Launch: block (THREADS), grid a multiple of CLUSTER_SIZE up to rows * CLUSTER_SIZE, dynamic shared
// memory for STAGES * THREADS * VECS_PER_THREAD packs of x (and of residual).
// Caller guarantees: hidden_size is a multiple of VEC_SIZE; a share is at most THREADS *
// VECS_PER_THREAD packs, with equality in every block where FULL; ASYNC only where ALIGNED.
// Moves: one read of x (and residual), one write of y (and residual_out).

#include "fuse.cuh"
#include "reduce.cuh"

template <bool ASYNC, bool ALIGNED, typename T, int VEC_SIZE>
__device__ __forceinline__ void stage_pack(Pack<T, VEC_SIZE>* shared, const T* source) {
    if constexpr (ASYNC && sizeof(Pack<T, VEC_SIZE>) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Pack<T, VEC_SIZE>)) / 16; ++i) {
            copy_async_16(reinterpret_cast<uint4*>(shared) + i,
                          reinterpret_cast<const uint4*>(source) + i);
        }
    } else {
        Pack<T, VEC_SIZE> pack;
        load_pack<STREAM, ALIGNED>(pack, source);
        *shared = pack;
    }
}

// Blocks an SM that registers must leave room for: held weights take about half of them.
__host__ __device__ constexpr int resident_blocks(int threads, bool early_weight) {
    const int resident_threads = early_weight ? 512 : 1024;
    return threads < resident_threads ? resident_threads / threads : 1;
}

template <Norm NORM, typename Y, typename X, typename R, typename W, typename B, typename V,
          int VEC_SIZE, int VECS_PER_THREAD, int THREADS, int CLUSTER_SIZE, int STAGES, bool FULL,
          bool ALIGNED, bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, bool EARLY_WEIGHT, bool ASYNC,
          Hint HINT, Mask MASK>
__global__ void CLUSTER_DIMS(CLUSTER_SIZE)
    __launch_bounds__(THREADS, resident_blocks(THREADS, EARLY_WEIGHT))
    norm_forward_staged(const ForwardArguments<Y, X, R, W, B, V> arguments) {
    using A = typename Accumulation<X>::type;
    constexpr int STAGE_PACKS = THREADS * VECS_PER_THREAD;
    extern __shared__ uint4 staged[];
    // Two of each: a row's sums must not overtake a thread that still reads those of the row before.
    __shared__ A sum_slots[2][row_reduce_slots(THREADS, 1)];
    __shared__ A square_slots[2][row_reduce_slots(THREADS, 1)];
    __shared__ A cluster_sum_slots[2][CLUSTER_SIZE];
    __shared__ A cluster_square_slots[2][CLUSTER_SIZE];

    const int thread = threadIdx.x;
    const int rank = CLUSTER_SIZE == 1 ? 0 : static_cast<int>(cluster_rank());
    const int packs = static_cast<int>(arguments.hidden_size / VEC_SIZE);
    const int share = (packs + CLUSTER_SIZE - 1) / CLUSTER_SIZE;
    const int begin = min(rank * share, packs);
    const int end = min(begin + share, packs);
    const long long first_row = blockIdx.x / CLUSTER_SIZE;
    const long long row_step = gridDim.x / CLUSTER_SIZE;

    auto* const x_staged = reinterpret_cast<Pack<X, VEC_SIZE>*>(staged) + thread;
    auto* const residual_staged =
        reinterpret_cast<Pack<R, VEC_SIZE>*>(reinterpret_cast<Pack<X, VEC_SIZE>*>(staged) +
                                             STAGES * STAGE_PACKS) +
        thread;
    const auto holds = [=](int vec) { return FULL || begin + thread + vec * THREADS < end; };
    const auto element_of = [=](int vec) { return (begin + thread + vec * THREADS) * VEC_SIZE; };
    // Copies are grouped by vector, or by row where they run a row ahead. Waits count groups, so
    // groups are closed also where there is nothing to copy.
    const auto fetch = [=](long long row, int stage) {
        const bool fetched = row_is_computed<MASK>(arguments, row);
        const RowPointers<Y, X, R, W, B> at = row_pointers<SPLIT_ROWS>(arguments, row);
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (fetched && holds(vec)) {
                const int slot = stage * STAGE_PACKS + vec * THREADS;
                stage_pack<ASYNC, ALIGNED>(x_staged + slot, at.x + element_of(vec));
                if constexpr (is_array<R>) {
                    stage_pack<ASYNC, ALIGNED>(residual_staged + slot,
                                               at.residual + element_of(vec));
                }
            }
            if constexpr (ASYNC && STAGES == 1) copy_async_commit();
        }
        if constexpr (ASYNC && STAGES == 2) copy_async_commit();
    };
    const auto held_values = [=](A(&values)[VEC_SIZE], int stage, int vec) {
        const int slot = stage * STAGE_PACKS + vec * THREADS;
        Pack<X, VEC_SIZE> x;
        Pack<R, VEC_SIZE> residual;
        load_pack<SHARED, true>(x, x_staged[slot].data);
        if constexpr (is_array<R>) load_pack<SHARED, true>(residual, residual_staged[slot].data);
        add_residual(values, x, residual);
    };

    fetch(first_row, 0);
    Pack<W, VEC_SIZE> weight[VECS_PER_THREAD];
    Pack<B, VEC_SIZE> bias[VECS_PER_THREAD];
    const auto load_parameters = [&](const W* row_weight, const B* row_bias, int vec) {
        if constexpr (is_array<W>) {
            load_pack<KEEP, ALIGNED>(weight[vec], row_weight + element_of(vec));
        }
        if constexpr (is_array<B>) load_pack<KEEP, ALIGNED>(bias[vec], row_bias + element_of(vec));
    };
    // Every row of this block uses the same share of the weight, unless heads differ.
    constexpr bool WEIGHT_ONCE = EARLY_WEIGHT && !SPLIT_ROWS;
    if constexpr (WEIGHT_ONCE) {
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (holds(vec)) load_parameters(arguments.weight, arguments.bias, vec);
        }
    }
    if constexpr (CLUSTER_SIZE > 1) {
        cluster_barrier();  // every block of the cluster runs, so its slots may be written
    }

    int stage = 0;
    int half = 0;
    for (long long row = first_row; row < arguments.rows; row += row_step) {
        const bool computed = row_is_computed<MASK>(arguments, row);
        const RowPointers<Y, X, R, W, B> at = row_pointers<SPLIT_ROWS>(arguments, row);
        if constexpr (STAGES == 2) fetch(row + row_step, stage ^ 1);
        if (computed) {  // the same in every thread of the cluster
            if constexpr (EARLY_WEIGHT && !WEIGHT_ONCE) {
#pragma unroll
                for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                    if (holds(vec)) load_parameters(at.weight, at.bias, vec);
                }
            }
            if constexpr (ASYNC && STAGES == 2) copy_async_wait<1>();
            A sum = A(0);
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if constexpr (ASYNC && STAGES == 1) copy_async_wait_for(VECS_PER_THREAD - 1 - vec);
                if (!holds(vec)) continue;
                A values[VEC_SIZE];
                held_values(values, stage, vec);
                sum += NORM == LAYER ? pack_sum(values) : pack_sum_squares(values, A(0));
                if constexpr (is_array<R>) {
                    Pack<R, VEC_SIZE> residual_out;
                    round_pack(residual_out, values);
                    store_pack<ALIGNED, HINT>(at.residual_out + element_of(vec), residual_out);
                }
            }
            sum = cluster_reduce_sum<CLUSTER_SIZE>(row_reduce_sum<THREADS>(sum, sum_slots[half]),
                                                   cluster_sum_slots[half]);
            A mean = A(0);
            A squares = sum;
            if constexpr (NORM == LAYER) {
                mean = sum / static_cast<A>(arguments.hidden_size);
                squares = A(0);
#pragma unroll
                for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                    if (!holds(vec)) continue;
                    A values[VEC_SIZE];
                    held_values(values, stage, vec);
                    squares += pack_sum_squares(values, mean);
                }
                squares = cluster_reduce_sum<CLUSTER_SIZE>(
                    row_reduce_sum<THREADS>(squares, square_slots[half]),
                    cluster_square_slots[half]);
            }
            half ^= 1;
            const A rstd =
                reciprocal_sqrt(squares / static_cast<A>(arguments.hidden_size) + arguments.eps);
            if (rank == 0 && thread == 0) store_statistics<NORM>(arguments, row, mean, rstd);
            const Normalise<NORM, CAST_BEFORE_WEIGHT, X, A> normalise = {
                mean, rstd, arguments.weight_offset, arguments.weight_constant,
                arguments.bias_constant};
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!holds(vec)) continue;
                if constexpr (!EARLY_WEIGHT) load_parameters(at.weight, at.bias, vec);
                A values[VEC_SIZE];
                Pack<Y, VEC_SIZE> y;
                held_values(values, stage, vec);
                normalise(y, values, weight[vec], bias[vec]);
                store_pack<ALIGNED, HINT>(at.y + element_of(vec), y);
            }
        } else if constexpr (MASK == ZERO_OTHERS) {
            zero_row<ALIGNED, VEC_SIZE>(at, begin + thread, end, THREADS);
            if (rank == 0 && thread == 0) store_statistics<NORM>(arguments, row, A(0), A(0));
        }
        if constexpr (STAGES == 2) {
            stage ^= 1;
        } else {
            fetch(row + row_step, 0);
        }
    }
    if constexpr (ASYNC) copy_async_wait<0>();
}
