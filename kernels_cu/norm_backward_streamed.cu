// SPDX-License-Identifier: Apache-2.0
// dx of norm_backward for rows that no cluster can hold: each pass reads the row again. Without dx
// it leaves the statistics for norm_backward_columns, which sums dweight and dbias.
// Owner: block r of a cluster takes the r-th share of the row's packs; thread t takes packs t,
// t + THREADS, ... of the share.
// Launch: block (THREADS), grid (rows * CLUSTER_SIZE), no dynamic shared memory.
// Caller guarantees: as norm_forward_streamed; dx may be x, so dweight and dbias come first.
// Moves: x and dout (and dresidual_out) twice, x once more for each statistic that is not given, dx
// (and dresidual) once.

#include "backward.cuh"

template <Norm NORM, typename DX, typename D, typename X, typename R, typename W, typename V,
          int VEC_SIZE, int THREADS, int CLUSTER_SIZE, bool ALIGNED, bool SPLIT_ROWS,
          bool GIVEN_MEAN, bool GIVEN_RSTD, bool PARTIAL, Mask MASK>
__global__ void CLUSTER_DIMS(CLUSTER_SIZE) __launch_bounds__(THREADS)
    norm_backward_streamed(const BackwardArguments<DX, Absent, Absent, D, X, R, W, V> arguments) {
    wait_for_earlier_kernels();
    let_next_kernel_begin();
    using A = typename Accumulation<X>::type;
    __shared__ A slots[3][2 * row_reduce_slots(THREADS, 1)];
    __shared__ A cluster_slots[3][2 * CLUSTER_SIZE];

    const int rank = CLUSTER_SIZE == 1 ? 0 : static_cast<int>(cluster_rank());
    const long long row = blockIdx.x / CLUSTER_SIZE;
    const bool computed = row_is_computed<MASK, SPLIT_ROWS>(arguments, row);
    const long long packs = arguments.hidden_size / VEC_SIZE;
    const long long share = (packs + CLUSTER_SIZE - 1) / CLUSTER_SIZE;
    const long long first = min(rank * share, packs) + threadIdx.x;
    const long long end = min((rank + 1) * share, packs);
    const BackwardRow<DX, D, X, R> at = backward_row<SPLIT_ROWS>(arguments, row, 0);
    if (!computed) {  // the same in every thread of the cluster
        if constexpr (is_array<DX>) {
            const A zeros[VEC_SIZE] = {};
            for (long long pack = first; pack < end; pack += THREADS) {
                store_dx<ALIGNED>(at, pack * VEC_SIZE, zeros);
            }
        } else if (rank == 0 && threadIdx.x == 0) {
            if (NORM == LAYER) arguments.mean_out[row] = A(0);
            arguments.rstd_out[row] = A(0);
        }
        return;
    }
    if constexpr (CLUSTER_SIZE > 1) {
        cluster_barrier();  // every block of the cluster runs, so its slots may be written
    }

    const A count = static_cast<A>(PARTIAL ? arguments.partial : arguments.hidden_size);
    // Whether the statistic comes from an element too.
    const auto counts = [=](long long element) { return !PARTIAL || element < arguments.partial; };
    Gradient<NORM, false, X, A> gradient = {};
    if constexpr (NORM == LAYER && GIVEN_MEAN) gradient.mean = arguments.mean[row];
    if constexpr (NORM == LAYER && !GIVEN_MEAN) {
        ExactSum<A> sum = {};
#pragma unroll 4
        for (long long pack = first; pack < end; pack += THREADS) {
            Pack<X, VEC_SIZE> x;
            load_pack<STREAM, ALIGNED>(x, at.x + pack * VEC_SIZE);
            A of_pack = to_float(x.data[0]);
#pragma unroll
            for (int i = 1; i < VEC_SIZE; ++i) of_pack += to_float(x.data[i]);
            sum += of_pack;
        }
        A total[1] = {sum.value()};
        reduce_sums<THREADS, CLUSTER_SIZE>(total, slots[0], cluster_slots[0]);
        gradient.mean = total[0] / count;
    }
    if constexpr (GIVEN_RSTD) {
        gradient.rstd = arguments.rstd[row];
    } else {
        ExactSum<A> sum = {};
#pragma unroll 4
        for (long long pack = first; pack < end; pack += THREADS) {
            Pack<X, VEC_SIZE> x;
            load_pack<STREAM, ALIGNED>(x, at.x + pack * VEC_SIZE);
            A of_pack = A(0);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                if (!counts(pack * VEC_SIZE + i)) continue;
                const A centered = gradient.centered(to_float(x.data[i]));
                of_pack = fma_rn(centered, centered, of_pack);
            }
            sum += of_pack;
        }
        A total[1] = {sum.value()};
        reduce_sums<THREADS, CLUSTER_SIZE>(total, slots[1], cluster_slots[1]);
        gradient.rstd = reciprocal_sqrt(total[0] / count + arguments.eps);
    }

    if constexpr (!is_array<DX>) {
        if (rank == 0 && threadIdx.x == 0) {
            if (NORM == LAYER) arguments.mean_out[row] = gradient.mean;
            arguments.rstd_out[row] = gradient.rstd;
        }
    } else {
        const Factor<A> factor = {arguments.weight_offset, arguments.weight_constant};
        const W* const weight_row =
            arguments.weight + (is_array<W> ? row % arguments.heads * arguments.hidden_size : 0);
        ExactSum<A> projection = {};
        ExactSum<A> sum_g = {};
#pragma unroll 2
        for (long long pack = first; pack < end; pack += THREADS) {
            Pack<X, VEC_SIZE> x;
            Pack<D, VEC_SIZE> dout;
            Pack<W, VEC_SIZE> weight;
            load_pack<STREAM, ALIGNED>(x, at.x + pack * VEC_SIZE);
            load_pack<STREAM, ALIGNED>(dout, at.dout + pack * VEC_SIZE);
            if constexpr (is_array<W>) {
                load_pack<KEEP, ALIGNED>(weight, weight_row + pack * VEC_SIZE);
            }
            A projection_of_pack = A(0);
            A g_of_pack = A(0);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                const A g = mul_rn(to_float(dout.data[i]), factor(weight.data[i]));
                const A centered = gradient.centered(to_float(x.data[i]));
                projection_of_pack = fma_rn(g, centered, projection_of_pack);
                g_of_pack += g;
            }
            projection += projection_of_pack;
            if constexpr (NORM == LAYER) sum_g += g_of_pack;
        }
        A sums[2] = {projection.value(), sum_g.value()};
        reduce_sums<THREADS, CLUSTER_SIZE>(sums, slots[2], cluster_slots[2]);
        gradient.mean_g_xhat = mul_rn(sums[0] / count, gradient.rstd);
        gradient.mean_g = sums[1] / count;

#pragma unroll 2
        for (long long pack = first; pack < end; pack += THREADS) {
            Pack<X, VEC_SIZE> x;
            Pack<D, VEC_SIZE> dout;
            Pack<R, VEC_SIZE> dresidual_out;
            Pack<W, VEC_SIZE> weight;
            load_pack<STREAM, ALIGNED>(x, at.x + pack * VEC_SIZE);
            load_pack<STREAM, ALIGNED>(dout, at.dout + pack * VEC_SIZE);
            if constexpr (is_array<R>) {
                load_pack<STREAM, ALIGNED>(dresidual_out, at.dresidual_out + pack * VEC_SIZE);
            }
            if constexpr (is_array<W>) {
                load_pack<KEEP, ALIGNED>(weight, weight_row + pack * VEC_SIZE);
            }
            A dx[VEC_SIZE];
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                A arriving = A(0);
                if constexpr (is_array<R>) arriving = to_float(dresidual_out.data[i]);
                const A g = mul_rn(to_float(dout.data[i]), factor(weight.data[i]));
                const A xhat =
                    counts(pack * VEC_SIZE + i) ? gradient.xhat(to_float(x.data[i])) : A(0);
                dx[i] = gradient.template dx<is_array<R>>(g, xhat, arriving);
            }
            store_dx<ALIGNED>(at, pack * VEC_SIZE, dx);
        }
    }
}
