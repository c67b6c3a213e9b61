// SPDX-License-Identifier: Apache-2.0
// y = (s - mean) * rstd * (weight + offset) + bias over each row, s = x or x + residual;
// rstd = 1 / sqrt(mean((s - mean)^2) + eps), where RMSNorm has no mean. The row stays in registers.
// Owner: thread t of a row holds packs t, t + THREADS_PER_ROW, ...; VECS_PER_THREAD of them.
// Launch: block (THREADS_PER_ROW * ROWS_PER_BLOCK), a multiple of 32; any grid, but a block a row
// where ROWS_PER_BLOCK is 1 and rows are looked up one by one, and teams * members blocks where
// DEAL_ROWS; no dynamic shared memory.
// Caller guarantees: hidden_size is a multiple of VEC_SIZE and at most VEC_SIZE * VECS_PER_THREAD *
// THREADS_PER_ROW, with equality where FULL; no pack but a thread's last lies behind a row's end;
// every pack lies on its word size where ALIGNED; a team has 1024 rows at most, and no more walkers
// than members.
// Moves: one read of x (and residual), one write of y (and residual_out).

#include "forward_rows.cuh"

template <Norm NORM, typename Y, typename X, typename R, typename W, typename B, typename V,
          int VEC_SIZE, int VECS_PER_THREAD, int THREADS_PER_ROW, int ROWS_PER_BLOCK, bool FULL,
          bool ALIGNED, bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, bool EARLY_WEIGHT,
          bool EVICT_FIRST, bool SPARE_REGISTERS, bool PARTIAL, Mask MASK>
__global__ void __launch_bounds__(
    THREADS_PER_ROW* ROWS_PER_BLOCK,
    min_blocks<X, R, W, B, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW * ROWS_PER_BLOCK,
               EARLY_WEIGHT, SPARE_REGISTERS,
               (MASK == KEEP_OTHERS || MASK == DEAL_ROWS) && FULL && ALIGNED && !SPLIT_ROWS>())
    norm_forward(const ForwardArguments<Y, X, R, W, B, V> arguments) {
    wait_for_earlier_kernels();
    if (arguments.next_early) let_next_kernel_begin();
    forward_rows<NORM, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW, ROWS_PER_BLOCK, FULL, ALIGNED,
                 SPLIT_ROWS, CAST_BEFORE_WEIGHT, EARLY_WEIGHT, EVICT_FIRST, SPARE_REGISTERS,
                 PARTIAL, MASK>(arguments, blockIdx.x, gridDim.x);
}
