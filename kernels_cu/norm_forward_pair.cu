// SPDX-License-Identifier: Apache-2.0
// Two calls of norm_forward in one launch, q and k: bit for bit what each gives alone.
// Owner: the first q_blocks blocks take the rows of q, the others those of k, as norm_forward does.
// Launch: block (THREADS_PER_ROW * ROWS_PER_BLOCK), a multiple of 32; grid (q_blocks + any number);
// no dynamic shared memory.
// Caller guarantees: as norm_forward for either; neither reads what the other writes.
// Moves: one read and one write of each.

#include "forward_rows.cuh"

template <typename Y, typename X, typename W>
struct PairArguments {
    ForwardArguments<Y, X, Absent, W, Absent, long long> q;
    ForwardArguments<Y, X, Absent, W, Absent, long long> k;
    long long q_blocks;
};

template <typename Y, typename X, typename W, int VEC_SIZE, int VECS_PER_THREAD,
          int THREADS_PER_ROW, int ROWS_PER_BLOCK, bool FULL, bool ALIGNED, bool SPLIT_ROWS,
          bool CAST_BEFORE_WEIGHT, bool EARLY_WEIGHT>
__global__ void __launch_bounds__(THREADS_PER_ROW* ROWS_PER_BLOCK)
    norm_forward_pair(const PairArguments<Y, X, W> arguments) {
    const unsigned q_blocks = static_cast<unsigned>(arguments.q_blocks);
    if (blockIdx.x < q_blocks) {
        forward_rows<RMS, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW, ROWS_PER_BLOCK, FULL, ALIGNED,
                     SPLIT_ROWS, CAST_BEFORE_WEIGHT, EARLY_WEIGHT, false, ALL_ROWS>(
            arguments.q, blockIdx.x, q_blocks);
    } else {
        forward_rows<RMS, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW, ROWS_PER_BLOCK, FULL, ALIGNED,
                     SPLIT_ROWS, CAST_BEFORE_WEIGHT, EARLY_WEIGHT, false, ALL_ROWS>(
            arguments.k, blockIdx.x - q_blocks, gridDim.x - q_blocks);
    }
}
