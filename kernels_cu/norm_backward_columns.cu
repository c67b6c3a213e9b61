// SPDX-License-Identifier: Apache-2.0
// Parts of dweight and dbias for the rows of norm_backward_streamed, given their statistics.
// Owner: a thread takes one pack of columns, in every parts-th row of one head.
// Launch: block (THREADS), grid (ceil(packs / THREADS) * heads * parts), no dynamic shared memory.
// Caller guarantees: hidden_size is a multiple of VEC_SIZE; every pack lies on its word size where
// ALIGNED; mean (for LayerNorm) and rstd of every computed row.
// Moves: one read of x and dout, one write of the parts.

#include "backward.cuh"

template <Norm NORM, typename DW, typename DB, typename D, typename X, typename V, int VEC_SIZE,
          int THREADS, bool ALIGNED, bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, Mask MASK>
__global__ void __launch_bounds__(THREADS) norm_backward_columns(
    const BackwardArguments<Absent, DW, DB, D, X, Absent, Constant, V> arguments) {
    wait_for_earlier_kernels();
    let_next_kernel_begin();
    using A = typename Accumulation<X>::type;
    const long long packs = arguments.hidden_size / VEC_SIZE;
    const long long chunks = (packs + THREADS - 1) / THREADS;
    const long long pack = blockIdx.x % chunks * THREADS + threadIdx.x;
    const long long unit = blockIdx.x / chunks;
    const long long head = unit % arguments.heads;
    const long long part = unit / arguments.heads;
    const long long positions = arguments.rows / arguments.heads;
    if (pack >= packs) return;

    A dweight[VEC_SIZE] = {};
    A dbias[VEC_SIZE] = {};
#pragma unroll 2
    for (long long position = part; position < positions; position += arguments.parts) {
        const long long row = position * arguments.heads + head;
        if (!row_is_computed<MASK, SPLIT_ROWS>(arguments, row)) continue;
        add_column_terms<NORM, CAST_BEFORE_WEIGHT, ALIGNED, SPLIT_ROWS>(dweight, dbias, arguments,
                                                                        row, pack * VEC_SIZE);
    }

    const long long element =
        (part * arguments.heads + head) * arguments.hidden_size + pack * VEC_SIZE;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
        if constexpr (is_array<DW>) arguments.dweight_parts[element + i] = dweight[i];
        if constexpr (is_array<DB>) arguments.dbias_parts[element + i] = dbias[i];
    }
}
