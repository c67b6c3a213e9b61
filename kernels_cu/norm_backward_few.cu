// SPDX-License-Identifier: Apache-2.0
// Gradients of norm_forward for few rows with given statistics, in one launch and without a
// workspace: some blocks compute dx as in norm_backward, others sum dweight and dbias over all
// rows. Owner: the first blocks take ROWS_PER_BLOCK rows each. Each later one takes COLUMNS packs
// of columns; thread t takes pack t % COLUMNS in rows t / COLUMNS, + threads / COLUMNS, ... Launch:
// block (THREADS_PER_ROW * ROWS_PER_BLOCK), grid (parts + ceil(packs / COLUMNS)), dynamic shared
// memory for ROWS_PER_BLOCK rows. Caller guarantees: as norm_backward; one head, parts = ceil(rows
// / ROWS_PER_BLOCK), dx is not x. Moves: two reads of x and dout (the second from the cache), one
// write of dx (and dresidual).

#include "backward_rows.cuh"

template <typename A, int VEC_SIZE, int BLOCK, int COLUMNS, typename T>
__device__ __forceinline__ void store_column_sums(T* out, A (&sums)[VEC_SIZE], int packs, A* room) {
    constexpr int WARPS = BLOCK / 32;
    const int column = threadIdx.x % COLUMNS;
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
#pragma unroll
        for (int offset = COLUMNS; offset < 32; offset *= 2) {
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
        }
    }
    if (threadIdx.x % 32 < COLUMNS) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            room[threadIdx.x / 32 * (COLUMNS * VEC_SIZE) + column * VEC_SIZE + i] = sums[i];
        }
    }
    __syncthreads();  // every warp's sums are in the room
    for (int element = threadIdx.x; element < packs * VEC_SIZE; element += BLOCK) {
        A sum = room[element];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += room[warp * (COLUMNS * VEC_SIZE) + element];
        out[element] = from_float<T>(sum);
    }
    __syncthreads();  // the room is read before the next sums overwrite it
}

// Blocks of an SM for __launch_bounds__, as `least_blocks`: two where registers suffice, one of dx
// beside one of dweight.
template <Norm NORM, typename X, typename D, typename R, typename W>
__host__ __device__ constexpr int few_blocks(int elements, int threads) {
    const bool held = is_held<Absent, X, D, R, W>(elements, threads);
    if (NORM == RMS && elements * sizeof(X) <= 32 && held) return 2;
    return least_blocks<Absent, X, D, R, W>(elements, threads);
}

template <Norm NORM, typename DX, typename DW, typename DB, typename D, typename X, typename R,
          typename W, typename V, int VEC_SIZE, int VECS_PER_THREAD, int THREADS_PER_ROW,
          int ROWS_PER_BLOCK, int COLUMNS, bool FULL, bool ALIGNED, bool SPLIT_ROWS,
          bool CAST_BEFORE_WEIGHT, Copy COPY, Mask MASK>
__global__ void __launch_bounds__(THREADS_PER_ROW* ROWS_PER_BLOCK,
                                  few_blocks<NORM, X, D, R, W>(VECS_PER_THREAD* VEC_SIZE,
                                                               THREADS_PER_ROW* ROWS_PER_BLOCK))
    norm_backward_few(const BackwardArguments<DX, DW, DB, D, X, R, W, V> arguments) {
    wait_for_earlier_kernels();
    let_next_kernel_begin();
    using A = typename Accumulation<X>::type;
    constexpr int BLOCK = THREADS_PER_ROW * ROWS_PER_BLOCK;
    constexpr int SLICES = BLOCK / COLUMNS;
    if (blockIdx.x < arguments.parts) {
        backward_rows<NORM, DX, Absent, Absent, D, X, R, W, VEC_SIZE, VECS_PER_THREAD,
                      THREADS_PER_ROW, ROWS_PER_BLOCK, 1, 0, FULL, ALIGNED, SPLIT_ROWS, false,
                      NORM == LAYER, true, COPY, MASK>(arguments);
        return;
    }

    __shared__ A room[BLOCK / 32 * COLUMNS * VEC_SIZE];
    const int first_pack = static_cast<int>(blockIdx.x - arguments.parts) * COLUMNS;
    const int packs = min(COLUMNS, static_cast<int>(arguments.hidden_size / VEC_SIZE) - first_pack);
    const int column = threadIdx.x % COLUMNS;
    const int rows = column < packs ? static_cast<int>(arguments.rows) : 0;
    A dweight[VEC_SIZE] = {};
    A dbias[VEC_SIZE] = {};
#pragma unroll 4
    for (int row = threadIdx.x / COLUMNS; row < rows; row += SLICES) {
        if (!row_is_computed<MASK, SPLIT_ROWS>(arguments, row)) continue;
        add_column_terms<NORM, CAST_BEFORE_WEIGHT, ALIGNED, SPLIT_ROWS>(
            dweight, dbias, arguments, row, static_cast<long long>(first_pack + column) * VEC_SIZE);
    }
    const int first_element = first_pack * VEC_SIZE;
    if constexpr (is_array<DW>) {
        store_column_sums<A, VEC_SIZE, BLOCK, COLUMNS>(arguments.dweight + first_element, dweight,
                                                       packs, room);
    }
    if constexpr (is_array<DB>) {
        store_column_sums<A, VEC_SIZE, BLOCK, COLUMNS>(arguments.dbias + first_element, dbias,
                                                       packs, room);
    }
}
