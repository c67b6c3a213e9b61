// SPDX-License-Identifier: Apache-2.0
// The formula of norm_forward for long rows. The row is copied once into the shared memory of a
// cluster of CLUSTER_SIZE blocks and read from there for every pass.
// Owner: block r of the cluster holds the r-th share of the row's packs; thread t holds packs t,
// t + THREADS, ... of the share, copies them itself and alone reads them.
// Launch: block (THREADS), grid (rows * CLUSTER_SIZE), dynamic shared memory for THREADS *
// VECS_PER_THREAD packs of x (and of residual).
// Caller guarantees: hidden_size is a multiple of VEC_SIZE; a share is at most THREADS *
// VECS_PER_THREAD packs, with equality in every block where FULL; ASYNC only where ALIGNED.
// Moves: one read of x (and residual), one write of y (and residual_out).

#include "fuse.cuh"
#include "reduce.cuh"

template <Norm NORM, typename Y, typename X, typename R, typename W, typename B, typename V,
          int VEC_SIZE, int VECS_PER_THREAD, int THREADS, int CLUSTER_SIZE, bool FULL, bool ALIGNED,
          bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, bool ASYNC, bool PARTIAL, Mask MASK>
__global__ void CLUSTER_DIMS(CLUSTER_SIZE) __launch_bounds__(THREADS, 1024 / THREADS)
    norm_forward_staged(const ForwardArguments<Y, X, R, W, B, V> arguments) {
    wait_for_earlier_kernels();
    let_next_kernel_begin();
    using A = typename Accumulation<X>::type;
    extern __shared__ uint4 staged[];
    using Sum = typename MeanSum<Y, A>::type;
    __shared__ Sum sum_slots[row_reduce_slots(THREADS, 1)];
    __shared__ A square_slots[row_reduce_slots(THREADS, 1)];
    __shared__ Sum cluster_sum_slots[CLUSTER_SIZE];
    __shared__ A cluster_square_slots[CLUSTER_SIZE];

    if constexpr (CLUSTER_SIZE > 1) cluster_arrive();
    const int rank = CLUSTER_SIZE == 1 ? 0 : static_cast<int>(cluster_rank());
    const long long row = blockIdx.x / CLUSTER_SIZE;
    const bool computed = row_is_computed<MASK, SPLIT_ROWS>(arguments, row);
    const int packs = static_cast<int>(arguments.hidden_size / VEC_SIZE);
    const int share = (packs + CLUSTER_SIZE - 1) / CLUSTER_SIZE;
    const int begin = min(rank * share, packs);
    const int end = min(begin + share, packs);
    const int first = begin + static_cast<int>(threadIdx.x);
    const RowPointers<Y, X, R, W, B> at =
        row_pointers<SPLIT_ROWS>(arguments, row, first * VEC_SIZE);
    if (!computed) {  // the same in every thread of the cluster
        if constexpr (CLUSTER_SIZE > 1) cluster_wait();
        if constexpr (MASK == ZERO_OTHERS) {
            zero_row<ALIGNED, VEC_SIZE>(at, end - first, THREADS);
            if (rank == 0 && threadIdx.x == 0) store_statistics<NORM>(arguments, row, A(0), A(0));
        }
        return;
    }

    auto* const x_staged = reinterpret_cast<Pack<X, VEC_SIZE>*>(staged) + threadIdx.x;
    auto* const residual_staged =
        reinterpret_cast<Pack<R, VEC_SIZE>*>(reinterpret_cast<Pack<X, VEC_SIZE>*>(staged) +
                                             THREADS * VECS_PER_THREAD) +
        threadIdx.x;
    const auto offset_of = [](int vec) { return vec * (THREADS * VEC_SIZE); };
    const auto holds = [=](int vec) { return FULL || first + vec * THREADS < end; };
    const auto held_values = [=](A(&values)[VEC_SIZE], int vec) {
        Pack<X, VEC_SIZE> x;
        Pack<R, VEC_SIZE> residual;
        load_pack<SHARED, true>(x, x_staged[vec * THREADS].data);
        if constexpr (is_array<R>) {
            load_pack<SHARED, true>(residual, residual_staged[vec * THREADS].data);
        }
        add_residual(values, x, residual);
    };

#pragma unroll
    for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
        if (holds(vec)) {
            bring_pack<ASYNC, ALIGNED>(x_staged + vec * THREADS, at.x + offset_of(vec));
            if constexpr (is_array<R>) {
                bring_pack<ASYNC, ALIGNED>(residual_staged + vec * THREADS,
                                           at.residual + offset_of(vec));
            }
        }
        if constexpr (ASYNC) copy_async_commit();
    }

    Sum sum = {};
    A squares = A(0);
#pragma unroll
    for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
        if constexpr (ASYNC) copy_async_wait_for(VECS_PER_THREAD - 1 - vec);
        if (!holds(vec)) continue;
        A values[VEC_SIZE];
        held_values(values, vec);
        if constexpr (NORM == LAYER) {
            add_pack(sum, values);
        } else {
            squares += pack_sum_squares<NORM, PARTIAL>(values, A(0), arguments,
                                                       first * VEC_SIZE + offset_of(vec));
        }
        if constexpr (is_array<R>) {
            Pack<R, VEC_SIZE> residual_out;
            round_pack(residual_out, values);
            store_pack<PLAIN, ALIGNED>(at.residual_out + offset_of(vec), residual_out);
        }
    }
    if constexpr (CLUSTER_SIZE > 1) {
        cluster_wait();  // every block of the cluster runs, so its slots may be written
    }
    A mean = A(0);
    if constexpr (NORM == LAYER) {
        sum = cluster_reduce_sum<CLUSTER_SIZE>(row_reduce_sum<THREADS>(sum, sum_slots),
                                               cluster_sum_slots);
        mean = mean_of(sum, static_cast<A>(arguments.hidden_size));
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            A values[VEC_SIZE];
            held_values(values, vec);
            squares += pack_sum_squares<NORM, false>(values, mean, arguments,
                                                     first * VEC_SIZE + offset_of(vec));
        }
    }
    squares = cluster_reduce_sum<CLUSTER_SIZE>(row_reduce_sum<THREADS>(squares, square_slots),
                                               cluster_square_slots);
    const A rstd = rstd_of<PARTIAL>(squares, arguments);

    if (rank == 0 && threadIdx.x == 0) store_statistics<NORM>(arguments, row, mean, rstd);
    const Normalise<NORM, CAST_BEFORE_WEIGHT, X, A> normalise = {
        mean, rstd, arguments.weight_offset, arguments.weight_constant, arguments.bias_constant};
    // Not unrolled further: the weights of all packs at once would take the registers of other
    // blocks, of which a cluster needs more.
#pragma unroll(CLUSTER_SIZE == 1 ? 4 : 2)
    for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
        if (!holds(vec)) continue;
        A values[VEC_SIZE];
        held_values(values, vec);
        Pack<W, VEC_SIZE> weight;
        Pack<B, VEC_SIZE> bias;
        if constexpr (is_array<W>) load_pack<KEEP, ALIGNED>(weight, at.weight + offset_of(vec));
        if constexpr (is_array<B>) load_pack<KEEP, ALIGNED>(bias, at.bias + offset_of(vec));
        Pack<Y, VEC_SIZE> y;
        normalise(y, values, weight, bias);
        store_pack<PLAIN, ALIGNED>(at.y + offset_of(vec), y);
    }
}
