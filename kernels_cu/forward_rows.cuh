// SPDX-License-Identifier: Apache-2.0
// The rows of norm_forward and norm_forward_pair.
#pragma once

#include "block_rows.cuh"
#include "fuse.cuh"
#include "reduce.cuh"

// Blocks an SM that registers must suffice for, 0 where the compiler may choose: beside a row of
// 64 KB there has to be room for a second one, or nothing happens while the first meets at its sum.
// A block that WALKS from row to row of a mask would take registers of other blocks for it.
template <typename X, typename R, typename W, typename B, int VEC_SIZE, int VECS_PER_THREAD,
          int THREADS, bool EARLY_WEIGHT, bool SPARE_REGISTERS, bool WALKS>
__host__ __device__ constexpr int min_blocks() {
    constexpr int ROW_ELEMENT = sizeof(X) + (is_array<R> ? sizeof(R) : 0);
    constexpr bool HOLDS_WEIGHT = EARLY_WEIGHT && (is_array<W> || is_array<B>);
    constexpr int HELD_BYTES = VECS_PER_THREAD * VEC_SIZE * ROW_ELEMENT;
    if (WALKS && !is_array<R> && sizeof(X) == 2 && THREADS % 128 == 0) {
        constexpr int ELEMENT =
            ROW_ELEMENT + (is_array<W> ? sizeof(W) : 0) + (is_array<B> ? sizeof(B) : 0);
        constexpr int REGISTERS = 24 + VECS_PER_THREAD * VEC_SIZE * ELEMENT / 4;
        constexpr int BLOCKS = 64 * 1024 / (REGISTERS * THREADS);
        if (REGISTERS <= 72) return BLOCKS * THREADS <= 1536 ? BLOCKS : 1536 / THREADS;
    }
    return THREADS == 512 && HELD_BYTES == 128 && !HOLDS_WEIGHT && !SPARE_REGISTERS ? 2 : 0;
}

// Computes the rows of one block of `blocks`, as norm_forward.cu describes it.
template <Norm NORM, int VEC_SIZE, int VECS_PER_THREAD, int THREADS_PER_ROW, int ROWS_PER_BLOCK,
          bool FULL, bool ALIGNED, bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, bool EARLY_WEIGHT,
          bool EVICT_FIRST, bool SPARE_REGISTERS, bool PARTIAL, Mask MASK, typename Y, typename X,
          typename R, typename W, typename B, typename V>
__device__ __forceinline__ void forward_rows(const ForwardArguments<Y, X, R, W, B, V>& arguments,
                                             unsigned block, unsigned blocks) {
    using A = typename Accumulation<X>::type;
    constexpr int SLOTS = row_reduce_slots(THREADS_PER_ROW, ROWS_PER_BLOCK);
    using Sum = typename MeanSum<Y, A>::type;
    __shared__ Sum sum_slots[NORM == LAYER ? SLOTS : 1];
    // RMSNorm has one barrier a row: the next row's sums go to the other half, so that they do not
    // overtake a thread that still reads. LayerNorm's first barrier keeps its rows apart.
    constexpr int HALVES = NORM == RMS ? 2 : 1;
    __shared__ A square_slots[HALVES][SLOTS];

    constexpr Hint HINT = EVICT_FIRST ? STREAM : PLAIN;
    const int thread = threadIdx.x % THREADS_PER_ROW;
    // A block's one row is computed. Where the compiler is told, its loads are not held up by a
    // test and its instructions are fewer, but it takes more registers, which other rows may need
    // more. To say it half, by the row's place alone, is best where LayerNorm's rows are many;
    // where they are dealt it would spill.
    constexpr bool ONE_ROW = MASK == ALL_ROWS && ROWS_PER_BLOCK == 1;
    constexpr bool ONE_DEALT_ROW = MASK == DEAL_ROWS && ROWS_PER_BLOCK == 1 && NORM == RMS;
    constexpr bool ROW_IS_COMPUTED = ONE_ROW && SPARE_REGISTERS || ONE_DEALT_ROW;
    constexpr bool ROW_IS_FIRST = ROW_IS_COMPUTED || ONE_ROW && NORM == LAYER;
    const int row_in_block = ROW_IS_FIRST ? 0 : threadIdx.x / THREADS_PER_ROW;
    const int packs = static_cast<int>(arguments.hidden_size) / VEC_SIZE;

    const int first_element = thread * VEC_SIZE;
    const auto offset_of = [](int vec) { return vec * (THREADS_PER_ROW * VEC_SIZE); };
    int half = 0;
    const auto zero = [&](long long row) {
        zero_row<ALIGNED, VEC_SIZE>(row_pointers<SPLIT_ROWS>(arguments, row, first_element),
                                    packs - thread, THREADS_PER_ROW);
        if (thread == 0) store_statistics<NORM>(arguments, row, A(0), A(0));
    };
    __shared__ Window<ROWS_PER_BLOCK> window;
    BlockRows<MASK, SPLIT_ROWS, ALIGNED, VEC_SIZE, THREADS_PER_ROW, ROWS_PER_BLOCK,
              ForwardArguments<Y, X, R, W, B, V>>
        rows(arguments, window, block, blocks);
    rows.look_up();
    if (MASK == ZERO_OTHERS && ROWS_PER_BLOCK == 1 && rows.count == 0 && block < arguments.rows) {
        zero(block);
    }
    auto next = rows.first();  // kept where there is a mask; without one it is as well formed anew
    for (auto first = next; rows.exists(first);
         first = MASK == ALL_ROWS ? rows.next(first) : next) {
        const auto place = first + row_in_block;
        const bool computed = ROW_IS_COMPUTED || rows.is_computed(place);
        const long long row = rows.row_at(place, row_in_block);
        next = rows.next(first);
        if (MASK == ZERO_OTHERS && ROWS_PER_BLOCK > 1 && !computed && rows.exists(place)) zero(row);
        // A row that is not computed still meets its block at the barriers, with no packs.
        const int held_packs = computed ? packs : 0;
        const RowPointers<Y, X, R, W, B> at =
            row_pointers<SPLIT_ROWS>(arguments, row, first_element);
        // A row ends in its threads' last pack alone. A test for each would cost narrow packs about
        // as many instructions as their work.
        const auto holds = [=](int vec) {
            const bool whole = FULL || vec < VECS_PER_THREAD - 1;
            return whole ? computed : thread + vec * THREADS_PER_ROW < held_packs;
        };

        Pack<X, VEC_SIZE> x[VECS_PER_THREAD];
        Pack<R, VEC_SIZE> residual[VECS_PER_THREAD];
        Pack<W, VEC_SIZE> weight[VECS_PER_THREAD];
        Pack<B, VEC_SIZE> bias[VECS_PER_THREAD];
        const auto load_parameters = [&](int vec) {
            if constexpr (is_array<W>) {
                load_pack<KEEP, ALIGNED>(weight[vec], at.weight + offset_of(vec));
            }
            if constexpr (is_array<B>) {
                load_pack<KEEP, ALIGNED>(bias[vec], at.bias + offset_of(vec));
            }
        };
        const auto held_values = [&](A(&values)[VEC_SIZE], int vec) {
            add_residual(values, x[vec], residual[vec]);
        };
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            load_pack<HINT, ALIGNED>(x[vec], at.x + offset_of(vec));
            if constexpr (is_array<R>) {
                load_pack<HINT, ALIGNED>(residual[vec], at.residual + offset_of(vec));
            }
        }
        if constexpr (EARLY_WEIGHT) {
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (holds(vec)) load_parameters(vec);
            }
        }
        if constexpr (is_array<R>) {
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!holds(vec)) continue;
                A values[VEC_SIZE];
                Pack<R, VEC_SIZE> residual_out;
                held_values(values, vec);
                round_pack(residual_out, values);
                store_pack<HINT, ALIGNED>(at.residual_out + offset_of(vec), residual_out);
            }
        }

        rows.find_next(next);
        A mean = A(0);
        if constexpr (NORM == LAYER) {
            Sum sum = {};
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!holds(vec)) continue;
                A values[VEC_SIZE];
                held_values(values, vec);
                add_pack(sum, values);
            }
            sum = row_reduce_sum<THREADS_PER_ROW>(sum, sum_slots);
            mean = mean_of(sum, static_cast<A>(arguments.hidden_size));
        }
        A squares = A(0);
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            A values[VEC_SIZE];
            held_values(values, vec);
            squares += pack_sum_squares<NORM, PARTIAL>(values, mean, arguments,
                                                       first_element + offset_of(vec));
        }
        squares = row_reduce_sum<THREADS_PER_ROW>(squares, square_slots[half]);
        half ^= HALVES - 1;
        if (MASK == DEAL_ROWS && THREADS_PER_ROW <= 32) __syncthreads();
        rows.prefetch(next);
        const A rstd = rstd_of<PARTIAL>(squares, arguments);
        if (computed && thread == 0) store_statistics<NORM>(arguments, row, mean, rstd);
        let_next_kernel_begin();
        const Normalise<NORM, CAST_BEFORE_WEIGHT, X, A> normalise = {
            mean, rstd, arguments.weight_offset, arguments.weight_constant,
            arguments.bias_constant};
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            if constexpr (!EARLY_WEIGHT) load_parameters(vec);
            A values[VEC_SIZE];
            Pack<Y, VEC_SIZE> y;
            held_values(values, vec);
            normalise(y, values, weight[vec], bias[vec]);
            store_pack<HINT, ALIGNED>(at.y + offset_of(vec), y);
        }
    }
}
