// SPDX-License-Identifier: Apache-2.0
// The formula of norm_forward for rows that no cluster can hold: each pass reads the row again.
// Owner: block r of a cluster takes the r-th share of the row's packs; thread t takes packs t,
// t + THREADS, ... of the share.
// Launch: block (THREADS), grid (rows * CLUSTER_SIZE), no dynamic shared memory.
// Caller guarantees: hidden_size is a multiple of VEC_SIZE; every pack lies on its word size where
// ALIGNED.
// Moves: x (and residual) twice for RMSNorm, three times for LayerNorm; y (and residual_out) once.

#include "fuse.cuh"
#include "reduce.cuh"

template <Norm NORM, typename Y, typename X, typename R, typename W, typename B, typename V,
          int VEC_SIZE, int THREADS, int CLUSTER_SIZE, bool ALIGNED, bool SPLIT_ROWS,
          bool CAST_BEFORE_WEIGHT, bool PARTIAL, Mask MASK>
__global__ void CLUSTER_DIMS(CLUSTER_SIZE) __launch_bounds__(THREADS)
    norm_forward_streamed(const ForwardArguments<Y, X, R, W, B, V> arguments) {
    wait_for_earlier_kernels();
    let_next_kernel_begin();
    using A = typename Accumulation<X>::type;
    __shared__ ExactSum<A> sum_slots[row_reduce_slots(THREADS, 1)];
    __shared__ A square_slots[row_reduce_slots(THREADS, 1)];
    __shared__ ExactSum<A> cluster_sum_slots[CLUSTER_SIZE];
    __shared__ A cluster_square_slots[CLUSTER_SIZE];

    const int rank = CLUSTER_SIZE == 1 ? 0 : static_cast<int>(cluster_rank());
    const long long row = blockIdx.x / CLUSTER_SIZE;
    const bool computed = row_is_computed<MASK, SPLIT_ROWS>(arguments, row);
    const long long packs = arguments.hidden_size / VEC_SIZE;
    const long long share = (packs + CLUSTER_SIZE - 1) / CLUSTER_SIZE;
    const long long first = min(rank * share, packs) + threadIdx.x;
    const long long end = min((rank + 1) * share, packs);
    const RowPointers<Y, X, R, W, B> at =
        row_pointers<SPLIT_ROWS>(arguments, row, first * VEC_SIZE);
    if (!computed) {  // the same in every thread of the cluster
        if constexpr (MASK == ZERO_OTHERS) {
            zero_row<ALIGNED, VEC_SIZE>(at, end - first, THREADS);
            if (rank == 0 && threadIdx.x == 0) store_statistics<NORM>(arguments, row, A(0), A(0));
        }
        return;
    }
    if constexpr (CLUSTER_SIZE > 1) {
        cluster_barrier();  // every block of the cluster runs, so its slots may be written
    }

    const auto load_values = [=](A(&values)[VEC_SIZE], long long pack) {
        Pack<X, VEC_SIZE> x;
        Pack<R, VEC_SIZE> residual;
        load_pack<STREAM, ALIGNED>(x, at.x + pack * VEC_SIZE);
        if constexpr (is_array<R>) {
            load_pack<STREAM, ALIGNED>(residual, at.residual + pack * VEC_SIZE);
        }
        add_residual(values, x, residual);
    };
    A mean = A(0);
    if constexpr (NORM == LAYER) {
        ExactSum<A> sum = {};
#pragma unroll 4
        for (long long pack = 0; pack < end - first; pack += THREADS) {
            A values[VEC_SIZE];
            load_values(values, pack);
            add_pack(sum, values);
        }
        sum = cluster_reduce_sum<CLUSTER_SIZE>(row_reduce_sum<THREADS>(sum, sum_slots),
                                               cluster_sum_slots);
        mean = mean_of(sum, static_cast<A>(arguments.hidden_size));
    }
    ExactSum<A> square_sum = {};
#pragma unroll 4
    for (long long pack = 0; pack < end - first; pack += THREADS) {
        A values[VEC_SIZE];
        load_values(values, pack);
        square_sum +=
            pack_sum_squares<NORM, PARTIAL>(values, mean, arguments, (first + pack) * VEC_SIZE);
    }
    const A squares = cluster_reduce_sum<CLUSTER_SIZE>(
        row_reduce_sum<THREADS>(square_sum.value(), square_slots), cluster_square_slots);
    const A rstd = rstd_of<PARTIAL>(squares, arguments);

    if (rank == 0 && threadIdx.x == 0) store_statistics<NORM>(arguments, row, mean, rstd);
    const Normalise<NORM, CAST_BEFORE_WEIGHT, X, A> normalise = {
        mean, rstd, arguments.weight_offset, arguments.weight_constant, arguments.bias_constant};
    // residual_out may be x or residual itself, so it is written here, behind the last sum.
#pragma unroll 2
    for (long long pack = 0; pack < end - first; pack += THREADS) {
        const long long element = pack * VEC_SIZE;
        A values[VEC_SIZE];
        load_values(values, pack);
        if constexpr (is_array<R>) {
            Pack<R, VEC_SIZE> residual_out;
            round_pack(residual_out, values);
            store_pack<STREAM, ALIGNED>(at.residual_out + element, residual_out);
        }
        Pack<W, VEC_SIZE> weight;
        Pack<B, VEC_SIZE> bias;
        if constexpr (is_array<W>) load_pack<KEEP, ALIGNED>(weight, at.weight + element);
        if constexpr (is_array<B>) load_pack<KEEP, ALIGNED>(bias, at.bias + element);
        Pack<Y, VEC_SIZE> y;
        normalise(y, values, weight, bias);
        store_pack<STREAM, ALIGNED>(at.y + element, y);
    }
}
