// SPDX-License-Identifier: Apache-2.0
// y = (s - mean) * rstd * (weight + offset) + bias over each row, s = x or x + residual;
// rstd = 1 / sqrt(mean((s - mean)^2) + eps), where RMSNorm has no mean. The row stays in registers.
// Owner: thread t of a row holds packs t, t + THREADS_PER_ROW, ...; VECS_PER_THREAD of them.
// Launch: block (THREADS_PER_ROW * ROWS_PER_BLOCK), a multiple of 32; any grid; with STAGES > 0
// dynamic shared memory for STAGES * ROWS_PER_BLOCK rows of x (and residual).
// Caller guarantees: hidden_size is a multiple of VEC_SIZE and at most VEC_SIZE * VECS_PER_THREAD *
// THREADS_PER_ROW, with equality where FULL; every pack lies on its word size where ALIGNED;
// STAGES > 0 only where ALIGNED, with packs of 16 bytes (or 32), THREADS_PER_ROW > 32, ALL_ROWS.
// Moves: one read of x (and residual), one write of y (and residual_out).

#include "fuse.cuh"
#include "reduce.cuh"

// A ring of row buffers in shared memory, which bulk copies fill ahead of the computation.
template <typename X, typename R, int STAGES>
struct RowRing {
    unsigned long long* arrived;  // one mbarrier a stage
    char* memory;
    int x_bytes;  // of one row
    int residual_bytes;
    int rows_per_block;

    __device__ __forceinline__ int stage_bytes() const {
        return (x_bytes + residual_bytes) * rows_per_block;
    }
    __device__ __forceinline__ X* x(int stage, int row_in_block) const {
        return reinterpret_cast<X*>(memory + stage * stage_bytes() + row_in_block * x_bytes);
    }
    __device__ __forceinline__ R* residual(int stage, int row_in_block) const {
        return reinterpret_cast<R*>(memory + stage * stage_bytes() + rows_per_block * x_bytes +
                                    row_in_block * residual_bytes);
    }

    // Valid in one thread of the block. Asks for the rows from first_row on that exist.
    template <bool SPLIT_ROWS, typename Arguments>
    __device__ __forceinline__ void fetch(const Arguments& arguments, long long first_row,
                                          int stage) const {
        const long long left = arguments.rows - first_row;
        const int count = left < rows_per_block ? static_cast<int>(left) : rows_per_block;
        mbarrier_arrive_expect(arrived + stage, count * (x_bytes + residual_bytes));
        for (int i = 0; i < count; ++i) {
            const auto at = row_pointers<SPLIT_ROWS>(arguments, first_row + i);
            bulk_copy(x(stage, i), at.x, x_bytes, arrived + stage);
            if constexpr (is_array<R>) {
                bulk_copy(residual(stage, i), at.residual, residual_bytes, arrived + stage);
            }
        }
    }
};

template <Norm NORM, typename Y, typename X, typename R, typename W, typename B, typename V,
          int VEC_SIZE, int VECS_PER_THREAD, int THREADS_PER_ROW, int ROWS_PER_BLOCK, int STAGES,
          bool FULL, bool ALIGNED, bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, bool EARLY_WEIGHT,
          Mask MASK>
__global__ void __launch_bounds__(THREADS_PER_ROW* ROWS_PER_BLOCK)
    norm_forward(const ForwardArguments<Y, X, R, W, B, V> arguments) {
    using A = typename Accumulation<X>::type;
    constexpr int SLOTS = row_reduce_slots(THREADS_PER_ROW, ROWS_PER_BLOCK);
    extern __shared__ uint4 dynamic_shared[];
    __shared__ A sum_slots[NORM == LAYER ? SLOTS : 1];
    // RMSNorm has one barrier a row: the next row's sums go to the other half, so that they do not
    // overtake a thread that still reads. LayerNorm's first barrier keeps its rows apart.
    constexpr int HALVES = NORM == RMS ? 2 : 1;
    __shared__ A square_slots[HALVES][SLOTS];
    __shared__ unsigned long long arrived[STAGES > 0 ? STAGES : 1];

    const int thread = threadIdx.x % THREADS_PER_ROW;
    const int row_in_block = threadIdx.x / THREADS_PER_ROW;
    const int packs = static_cast<int>(arguments.hidden_size) / VEC_SIZE;
    const long long first_of_block = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK;
    const long long rows_a_pass = static_cast<long long>(gridDim.x) * ROWS_PER_BLOCK;

    const RowRing<X, R, STAGES> ring = {
        arrived, reinterpret_cast<char*>(dynamic_shared), packs * VEC_SIZE * int(sizeof(X)),
        is_array<R> ? packs * VEC_SIZE * int(sizeof(R)) : 0, ROWS_PER_BLOCK};
    int stage = 0;
    int parity = 0;
    int half = 0;
    if constexpr (STAGES > 0) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) mbarrier_init(arrived + i, 1);
            for (int i = 0; i < STAGES; ++i) {
                const long long first_row = first_of_block + i * rows_a_pass;
                if (first_row < arguments.rows) {
                    ring.template fetch<SPLIT_ROWS>(arguments, first_row, i);
                }
            }
        }
        __syncthreads();  // the mbarriers exist before anyone waits for them
    }

    const auto element_of = [=](int vec) { return (thread + vec * THREADS_PER_ROW) * VEC_SIZE; };
    Pack<W, VEC_SIZE> weight[VECS_PER_THREAD];
    Pack<B, VEC_SIZE> bias[VECS_PER_THREAD];
    const auto load_parameters = [&](const W* row_weight, const B* row_bias, int vec) {
        if constexpr (is_array<W>) {
            load_pack<KEEP, ALIGNED>(weight[vec], row_weight + element_of(vec));
        }
        if constexpr (is_array<B>) load_pack<KEEP, ALIGNED>(bias[vec], row_bias + element_of(vec));
    };
    // A block that walks over many rows keeps the weights in registers, unless heads differ.
    constexpr bool WEIGHT_ONCE = STAGES > 0 && EARLY_WEIGHT && !SPLIT_ROWS;
    if constexpr (WEIGHT_ONCE) {
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (FULL || element_of(vec) < packs * VEC_SIZE) {
                load_parameters(arguments.weight, arguments.bias, vec);
            }
        }
    }

    for (long long first_row = first_of_block; first_row < arguments.rows;
         first_row += rows_a_pass) {
        const long long row = first_row + row_in_block;
        const bool computed = row_is_computed<MASK>(arguments, row);
        // A row that is not computed still meets its block at the barriers, with no packs.
        const int held_packs = computed ? packs : 0;
        const RowPointers<Y, X, R, W, B> at = row_pointers<SPLIT_ROWS>(arguments, row);
        const auto holds = [=](int vec) {
            return FULL ? computed : thread + vec * THREADS_PER_ROW < held_packs;
        };

        Pack<X, VEC_SIZE> x[VECS_PER_THREAD];
        Pack<R, VEC_SIZE> residual[VECS_PER_THREAD];
        const auto held_values = [&](A(&values)[VEC_SIZE], int vec) {
            add_residual(values, x[vec], residual[vec]);
        };
        if constexpr (STAGES > 0) mbarrier_wait(arrived + stage, parity);
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            if constexpr (STAGES > 0) {
                load_pack<SHARED, true>(x[vec], ring.x(stage, row_in_block) + element_of(vec));
                if constexpr (is_array<R>) {
                    load_pack<SHARED, true>(residual[vec],
                                            ring.residual(stage, row_in_block) + element_of(vec));
                }
            } else {
                load_pack<STREAM, ALIGNED>(x[vec], at.x + element_of(vec));
                if constexpr (is_array<R>) {
                    load_pack<STREAM, ALIGNED>(residual[vec], at.residual + element_of(vec));
                }
            }
        }
        if constexpr (EARLY_WEIGHT && !WEIGHT_ONCE) {
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (holds(vec)) load_parameters(at.weight, at.bias, vec);
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
                store_pack<ALIGNED>(at.residual_out + element_of(vec), residual_out);
            }
        }

        A mean = A(0);
        if constexpr (NORM == LAYER) {
            A sum = A(0);
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!holds(vec)) continue;
                A values[VEC_SIZE];
                held_values(values, vec);
                sum += pack_sum(values);
            }
            mean = row_reduce_sum<THREADS_PER_ROW>(sum, sum_slots) /
                   static_cast<A>(arguments.hidden_size);
        }
        A squares = A(0);
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            A values[VEC_SIZE];
            held_values(values, vec);
            squares += pack_sum_squares(values, mean);
        }
        squares = row_reduce_sum<THREADS_PER_ROW>(squares, square_slots[half]);
        half ^= HALVES - 1;
        const A rstd =
            reciprocal_sqrt(squares / static_cast<A>(arguments.hidden_size) + arguments.eps);
        if constexpr (STAGES > 0) {
            // The barrier of the reduction lies behind us: every thread has emptied this stage.
            const long long next_row = first_row + STAGES * rows_a_pass;
            if (threadIdx.x == 0 && next_row < arguments.rows) {
                ring.template fetch<SPLIT_ROWS>(arguments, next_row, stage);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (stage == 0) parity ^= 1;
        }

        if (computed && thread == 0) store_statistics<NORM>(arguments, row, mean, rstd);
        const Normalise<NORM, CAST_BEFORE_WEIGHT, X, A> normalise = {
            mean, rstd, arguments.weight_offset, arguments.weight_constant, arguments.bias_constant};
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!holds(vec)) continue;
            if constexpr (!EARLY_WEIGHT) load_parameters(at.weight, at.bias, vec);
            A values[VEC_SIZE];
            Pack<Y, VEC_SIZE> y;
            held_values(values, vec);
            normalise(y, values, weight[vec], bias[vec]);
            store_pack<ALIGNED>(at.y + element_of(vec), y);
        }
        if constexpr (MASK == ZERO_OTHERS) {
            if (!computed && row < arguments.rows) {
                zero_row<ALIGNED, VEC_SIZE>(at, thread, packs, THREADS_PER_ROW);
                if (thread == 0) store_statistics<NORM>(arguments, row, A(0), A(0));
            }
        }
    }
}
