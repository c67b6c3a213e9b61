// SPDX-License-Identifier: Apache-2.0
// Two calls of norm_forward in one launch, q and k: bit for bit what each gives alone.
// Owner: blocks of q and blocks of k, in turn by k_share, take rows as norm_forward does: the heads
// of a token, side by side in a packed buffer, are computed at about the same time.
// Launch: block (THREADS_PER_ROW * ROWS_PER_BLOCK), a multiple of 32; a grid of which k_share gives
// some blocks to each; no dynamic shared memory.
// Caller guarantees: as norm_forward for either; neither reads what the other writes.
// Moves: one read and one write of each.

#include "forward_rows.cuh"

template <typename Y, typename X, typename W>
struct PairArguments {
    ForwardArguments<Y, X, Absent, W, Absent, long long> q;
    ForwardArguments<Y, X, Absent, W, Absent, long long> k;
    long long k_share;  // of the blocks, times 2^62, rounded up
};

template <typename Y, typename X, typename W, int VEC_SIZE, int VECS_PER_THREAD,
          int THREADS_PER_ROW, int ROWS_PER_BLOCK, bool FULL, bool ALIGNED, bool SPLIT_ROWS,
          bool CAST_BEFORE_WEIGHT, bool EARLY_WEIGHT, bool EVICT_FIRST, bool SPARE_REGISTERS>
__global__ void __launch_bounds__(THREADS_PER_ROW* ROWS_PER_BLOCK)
    norm_forward_pair(const PairArguments<Y, X, W> arguments) {
    wait_for_earlier_kernels();
    if (arguments.q.next_early) let_next_kernel_begin();
    const auto k_blocks_before = [&](unsigned block) {
        return static_cast<unsigned>(__umul64hi(4ull * block, arguments.k_share));
    };
    const unsigned k_block = k_blocks_before(blockIdx.x);
    const unsigned k_blocks = k_blocks_before(gridDim.x);
    if (k_blocks_before(blockIdx.x + 1) == k_block) {
        forward_rows<RMS, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW, ROWS_PER_BLOCK, FULL, ALIGNED,
                     SPLIT_ROWS, CAST_BEFORE_WEIGHT, EARLY_WEIGHT, EVICT_FIRST, SPARE_REGISTERS,
                     false, ALL_ROWS>(arguments.q, blockIdx.x - k_block, gridDim.x - k_blocks);
    } else {
        forward_rows<RMS, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW, ROWS_PER_BLOCK, FULL, ALIGNED,
                     SPLIT_ROWS, CAST_BEFORE_WEIGHT, EARLY_WEIGHT, EVICT_FIRST, SPARE_REGISTERS,
                     false, ALL_ROWS>(arguments.k, k_block, k_blocks);
    }
}
