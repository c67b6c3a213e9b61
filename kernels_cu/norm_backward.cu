// SPDX-License-Identifier: Apache-2.0
// Gradients of norm_forward: the formulas of backward.cuh, x and dout read once.
// Owner: a cluster (one block for short rows) takes every parts-th group of ROWS_PER_BLOCK rows of
// one head; block r of it holds the r-th share of a row; thread t of a row owns packs t, t +
// THREADS_PER_ROW, ... of the share in every row, and sums their dweight and dbias in registers.
// Launch: block (THREADS_PER_ROW * ROWS_PER_BLOCK), grid (parts * heads * CLUSTER_SIZE), dynamic
// shared memory for a ring of STAGES such groups; each thread reads there its own packs alone.
// Caller guarantees: as norm_forward; a share is at most THREADS_PER_ROW * VECS_PER_THREAD packs,
// with equality in every block where FULL; ROWS_PER_BLOCK is 1 in a cluster; COPY is LOADS unless
// ALIGNED; BULK where packs of dout, x and dresidual_out have 16 bytes and dx is wanted.
// Moves: one read of x and dout (and dresidual_out), one write of dx (and dresidual).

#include "backward_rows.cuh"

template <Norm NORM, typename DX, typename DW, typename DB, typename D, typename X, typename R,
          typename W, typename V, int VEC_SIZE, int VECS_PER_THREAD, int THREADS_PER_ROW,
          int ROWS_PER_BLOCK, int CLUSTER_SIZE, int STAGES, bool FULL, bool ALIGNED,
          bool SPLIT_ROWS, bool CAST_BEFORE_WEIGHT, bool GIVEN_MEAN, bool GIVEN_RSTD, Copy COPY,
          Mask MASK>
__global__ void CLUSTER_DIMS(CLUSTER_SIZE)
    __launch_bounds__(THREADS_PER_ROW* ROWS_PER_BLOCK,
                      least_blocks<DB, X, D, R, W>(VECS_PER_THREAD* VEC_SIZE,
                                                   THREADS_PER_ROW* ROWS_PER_BLOCK))
        norm_backward(const BackwardArguments<DX, DW, DB, D, X, R, W, V> arguments) {
    wait_for_earlier_kernels();
    let_next_kernel_begin();
    backward_rows<NORM, DX, DW, DB, D, X, R, W, VEC_SIZE, VECS_PER_THREAD, THREADS_PER_ROW,
                  ROWS_PER_BLOCK, CLUSTER_SIZE, STAGES, FULL, ALIGNED, SPLIT_ROWS,
                  CAST_BEFORE_WEIGHT, GIVEN_MEAN, GIVEN_RSTD, COPY, MASK>(arguments);
}
