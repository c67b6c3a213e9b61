// SPDX-License-Identifier: Apache-2.0
// The rows of norm_backward and norm_backward_few.
#pragma once

#include "backward.cuh"

// Computes the rows of one block (one block of a cluster), as norm_backward.cu describes it. DW and
// DB may be Absent though the arguments have them. With STAGES 0 every block has one group of rows.
template <Norm NORM, typename DX, typename DW, typename DB, typename D, typename X, typename R,
          typename W, int VEC_SIZE, int VECS_PER_THREAD, int THREADS_PER_ROW, int ROWS_PER_BLOCK,
          int CLUSTER_SIZE, int STAGES, bool FULL, bool ALIGNED, bool SPLIT_ROWS,
          bool CAST_BEFORE_WEIGHT, bool GIVEN_MEAN, bool GIVEN_RSTD, Copy COPY, Mask MASK,
          typename Arguments>
__device__ __forceinline__ void backward_rows(const Arguments& arguments) {
    using A = typename Accumulation<X>::type;
    constexpr int BLOCK = THREADS_PER_ROW * ROWS_PER_BLOCK;
    constexpr int RING = STAGES > 0 ? STAGES : 1;
    constexpr int PACKS = BLOCK * VECS_PER_THREAD;
    constexpr int X_BYTES = PACKS * static_cast<int>(sizeof(Pack<X, VEC_SIZE>));
    constexpr int DOUT_BYTES = PACKS * static_cast<int>(sizeof(Pack<D, VEC_SIZE>));
    constexpr int DRESIDUAL_BYTES =
        is_array<R> ? PACKS * static_cast<int>(sizeof(Pack<R, VEC_SIZE>)) : 0;
    constexpr int STAGE_BYTES = X_BYTES + DOUT_BYTES + DRESIDUAL_BYTES;
    constexpr bool HELD = is_held<DB, X, D, R, W>(VECS_PER_THREAD * VEC_SIZE, BLOCK);
    constexpr int HELD_VECS = HELD ? VECS_PER_THREAD : 1;
    // A row that is not computed runs along as zeros: that takes fewer instructions than branches
    // around each step.
    constexpr bool STRAIGHT = HELD && FULL;
    constexpr bool WANT_DX = is_array<DX>;
    constexpr bool MEAN = NORM == LAYER && !GIVEN_MEAN;
    // What is summed over a row, and where in `sums`.
    constexpr int SQUARES = WANT_DX ? 1 : 0;
    constexpr int G = SQUARES + !GIVEN_RSTD;
    constexpr int SUMS = G + (NORM == LAYER && WANT_DX);
    constexpr int SLOTS = row_reduce_slots(THREADS_PER_ROW, ROWS_PER_BLOCK);
    // A row that one thread asks for takes its place once all threads have read the one before: in
    // one warp they tell each other at once, else by the barrier of the sums.
    constexpr bool BEHIND_SUMS = COPY == BULK && THREADS_PER_ROW > 32;
    static_assert(COPY != BULK || (SUMS > 0 && STAGES > 1), "bulk copies need a barrier a row");

    extern __shared__ uint4 ring[];
    __shared__ unsigned long long arrived[COPY == BULK ? RING : 1][ROWS_PER_BLOCK];
    __shared__ A mean_slots[2][MEAN ? SLOTS : 1];
    __shared__ A slots[2][SUMS > 0 ? SUMS * SLOTS : 1];
    __shared__ A cluster_mean_slots[2][CLUSTER_SIZE];
    __shared__ A cluster_slots[2][SUMS > 0 ? SUMS * CLUSTER_SIZE : 1];
    __shared__ unsigned long long mean_sent[2];
    __shared__ unsigned long long sums_sent[2];

    const int rank = CLUSTER_SIZE == 1 ? 0 : static_cast<int>(cluster_rank());
    const int thread = threadIdx.x % THREADS_PER_ROW;
    const int row_in_block = threadIdx.x / THREADS_PER_ROW;
    const long long unit = blockIdx.x / CLUSTER_SIZE;
    const long long heads = SPLIT_ROWS ? arguments.heads : 1;
    const long long head = SPLIT_ROWS ? unit % heads : 0;
    const long long part = SPLIT_ROWS ? unit / heads : unit;
    const long long positions = SPLIT_ROWS ? arguments.rows / heads : arguments.rows;
    const long long step = arguments.parts * ROWS_PER_BLOCK;
    const int packs = static_cast<int>(arguments.hidden_size / VEC_SIZE);
    const int share = (packs + CLUSTER_SIZE - 1) / CLUSTER_SIZE;
    const int begin = min(rank * share, packs);
    const int end = min(begin + share, packs);
    const A count = static_cast<A>(arguments.hidden_size);
    const A inverse_count = A(1) / count;

    const auto owns = [=](int vec) { return FULL || begin + thread + vec * THREADS_PER_ROW < end; };
    // Where this thread's packs begin in a row, and how far they lie apart.
    const int first_element = (begin + thread) * VEC_SIZE;
    constexpr int APART = THREADS_PER_ROW * VEC_SIZE;
    const auto row_of = [=](long long position) { return position * heads + head; };
    const auto is_computed = [&](long long position) {
        if (MASK == ALL_ROWS) return position < positions;
        return position < positions &&
               row_is_computed<MASK, SPLIT_ROWS>(arguments, row_of(position));
    };
    // A row's packs lie side by side.
    const int first_place = row_in_block * (THREADS_PER_ROW * VECS_PER_THREAD) + thread;
    const auto staged_x = [=](int stage, int vec) {
        auto* const packs_of_x = reinterpret_cast<Pack<X, VEC_SIZE>*>(
            reinterpret_cast<char*>(ring) + stage * STAGE_BYTES);
        return packs_of_x + vec * THREADS_PER_ROW + first_place;
    };
    const auto staged_dout = [=](int stage, int vec) {
        auto* const packs_of_dout = reinterpret_cast<Pack<D, VEC_SIZE>*>(
            reinterpret_cast<char*>(ring) + stage * STAGE_BYTES + X_BYTES);
        return packs_of_dout + vec * THREADS_PER_ROW + first_place;
    };
    const auto staged_dresidual_out = [=](int stage, int vec) {
        auto* const packs_of_dresidual_out = reinterpret_cast<Pack<R, VEC_SIZE>*>(
            reinterpret_cast<char*>(ring) + stage * STAGE_BYTES + X_BYTES + DOUT_BYTES);
        return packs_of_dresidual_out + vec * THREADS_PER_ROW + first_place;
    };

    // Begins to bring this thread's packs of the row at `position`, and always closes a group; in
    // bulk the row's first thread asks for all of it, and always arrives.
    const auto bring_row = [&](int stage, long long position) {
        if (COPY == BULK && thread != 0) return;
        const bool comes = is_computed(position);
        BackwardRow<DX, D, X, R> at = {};
        if (comes) at = backward_row<SPLIT_ROWS>(arguments, row_of(position), first_element);
        if constexpr (COPY == BULK) {
            constexpr int PACK = static_cast<int>(sizeof(Pack<X, VEC_SIZE>));
            static_assert(PACK % 16 == 0 && sizeof(D) == sizeof(X), "bulk copies are of 16 bytes");
            const int bytes = (end - begin) * PACK;
            unsigned long long* const barrier = &arrived[stage][row_in_block];
            mbarrier_arrive_expect(barrier, comes ? bytes * (is_array<R> ? 3 : 2) : 0);
            if (!comes || bytes == 0) return;
            bulk_copy(staged_x(stage, 0), at.x, bytes, barrier);
            bulk_copy(staged_dout(stage, 0), at.dout, bytes, barrier);
            if constexpr (is_array<R>) {
                static_assert(sizeof(R) == sizeof(X), "bulk copies are of 16 bytes");
                bulk_copy(staged_dresidual_out(stage, 0), at.dresidual_out, bytes, barrier);
            }
        } else {
            // One array after the other: memory is slower where packs of x and dout come in turn.
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!comes || !owns(vec)) continue;
                bring_pack<COPY == ASYNC, ALIGNED>(staged_x(stage, vec), at.x + vec * APART);
            }
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!comes || !owns(vec)) continue;
                bring_pack<COPY == ASYNC, ALIGNED>(staged_dout(stage, vec), at.dout + vec * APART);
            }
            if constexpr (is_array<R> && WANT_DX) {
#pragma unroll
                for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                    if (!comes || !owns(vec)) continue;
                    bring_pack<COPY == ASYNC, ALIGNED>(staged_dresidual_out(stage, vec),
                                                       at.dresidual_out + vec * APART);
                }
            }
            if constexpr (COPY == ASYNC) copy_async_commit();
        }
    };

    // The statistics of a row are loaded one row ahead.
    A next_mean = A(0);
    A next_rstd = A(0);
    const auto load_statistics = [&](long long position) {
        if (position >= positions) return;
        if constexpr (NORM == LAYER && GIVEN_MEAN) next_mean = arguments.mean[row_of(position)];
        if constexpr (GIVEN_RSTD) next_rstd = arguments.rstd[row_of(position)];
    };

    if constexpr (COPY == BULK) {
        if (thread == 0) {
#pragma unroll
            for (int stage = 0; stage < RING; ++stage) {
                mbarrier_init(&arrived[stage][row_in_block], 1);
            }
        }
        __syncthreads();  // every row's barriers count
    }
    const long long first_position = part * ROWS_PER_BLOCK + row_in_block;
#pragma unroll
    for (int stage = 0; stage < RING; ++stage) bring_row(stage, first_position + stage * step);
    load_statistics(first_position);

    const W* const own_weight =
        arguments.weight + (is_array<W> ? head * arguments.hidden_size + first_element : 0);
    Pack<W, VEC_SIZE> held_weight[HELD_VECS];
    if constexpr (HELD && is_array<W>) {
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (owns(vec)) {
                load_pack<KEEP, ALIGNED>(held_weight[HELD ? vec : 0], own_weight + vec * APART);
            }
        }
    }
    const Factor<A> factor = {arguments.weight_offset, arguments.weight_constant};
    A dweight[is_array<DW> ? VECS_PER_THREAD : 1][VEC_SIZE] = {};
    A dbias[is_array<DB> ? VECS_PER_THREAD : 1][VEC_SIZE] = {};

    if constexpr (CLUSTER_SIZE > 1) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                mbarrier_init(&mean_sent[i], 1);
                mbarrier_init(&sums_sent[i], 1);
            }
        }
        cluster_barrier();  // every block of the cluster runs, so sums may be sent to it
    }

    int stage = 0;
    int parity = 0;
    int phase = 0;          // of the ring's mbarriers
    int cluster_phase = 0;  // of those for sums of the cluster
    for (long long first = part * ROWS_PER_BLOCK; first < positions; first += step) {
        const long long position = first + row_in_block;
        // The loop holds as much for a block of one row.
        const bool computed =
            (HELD && ROWS_PER_BLOCK == 1 && MASK == ALL_ROWS) || is_computed(position);
        const auto takes = [=](int vec) { return STRAIGHT || (computed && owns(vec)); };

        Gradient<NORM, CAST_BEFORE_WEIGHT, X, A> gradient = {};
        // Of one element LayerNorm makes a constant: its gradients are zero, exactly.
        const bool constant = NORM == LAYER && arguments.hidden_size == 1;
        if (computed) {
            gradient.mean = next_mean;
            gradient.rstd = next_rstd;
        }
        if constexpr (STAGES > 0) load_statistics(position + step);
        if constexpr (COPY == ASYNC) copy_async_wait<RING - 1>();
        if constexpr (COPY == BULK) mbarrier_wait(&arrived[stage][row_in_block], phase);

        Pack<X, VEC_SIZE> held_x[HELD_VECS];
        Pack<D, VEC_SIZE> held_dout[HELD_VECS];
        Pack<R, VEC_SIZE> held_dresidual_out[HELD_VECS];
        const auto load_staged = [&](int vec) {
            const int at = HELD ? vec : 0;
            load_pack<SHARED, true>(held_x[at], staged_x(stage, vec)->data);
            load_pack<SHARED, true>(held_dout[at], staged_dout(stage, vec)->data);
            if constexpr (is_array<R> && WANT_DX) {
                load_pack<SHARED, true>(held_dresidual_out[at],
                                        staged_dresidual_out(stage, vec)->data);
            }
            if constexpr (!HELD && is_array<W>) {
                load_pack<KEEP, ALIGNED>(held_weight[at], own_weight + vec * APART);
            }
        };
        if constexpr (HELD) {
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (STRAIGHT && !computed) {
                    held_x[HELD ? vec : 0] = {};
                    held_dout[HELD ? vec : 0] = {};
                } else if (takes(vec)) {
                    load_staged(vec);
                }
            }
        }

        if constexpr (MEAN) {
            A sum[1] = {};
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!takes(vec)) continue;
                if constexpr (!HELD) load_staged(vec);
                A x[VEC_SIZE];
                widen(x, held_x[HELD ? vec : 0]);
                A of_pack = x[0];
#pragma unroll
                for (int i = 1; i < VEC_SIZE; ++i) of_pack += x[i];
                sum[0] += of_pack;
            }
            reduce_sums<THREADS_PER_ROW, CLUSTER_SIZE>(sum, mean_slots[parity],
                                                       cluster_mean_slots[parity],
                                                       &mean_sent[parity], cluster_phase);
            gradient.mean = sum[0] / count;
        }

        A sums[SUMS > 0 ? SUMS : 1] = {};
        if constexpr (SUMS > 0) {
#pragma unroll
            for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                if (!takes(vec)) continue;
                if constexpr (!HELD) load_staged(vec);
                const int at = HELD ? vec : 0;
                A x[VEC_SIZE];
                A dout[VEC_SIZE];
                widen(x, held_x[at]);
                widen(dout, held_dout[at]);
#pragma unroll
                for (int i = 0; i < VEC_SIZE; ++i) {
                    const A centered = gradient.centered(x[i]);
                    if constexpr (!GIVEN_RSTD) {
                        sums[SQUARES] = fma_rn(centered, centered, sums[SQUARES]);
                    }
                    if constexpr (WANT_DX) {
                        const A g = mul_rn(dout[i], factor(held_weight[at].data[i]));
                        sums[0] = fma_rn(g, centered, sums[0]);
                        if constexpr (NORM == LAYER) sums[G] += g;
                    }
                }
            }
        }
        if constexpr (HELD && STAGES > 0 && !BEHIND_SUMS) {
            if constexpr (COPY == BULK) __syncwarp();  // the row is read before the next overwrites
            bring_row(stage, position + STAGES * step);
        }
        if constexpr (SUMS > 0) {
            reduce_sums<THREADS_PER_ROW, CLUSTER_SIZE>(sums, slots[parity], cluster_slots[parity],
                                                       &sums_sent[parity], cluster_phase);
            if constexpr (BEHIND_SUMS && HELD) bring_row(stage, position + STAGES * step);
            if constexpr (BEHIND_SUMS && !HELD) {
                // No thread reads the row before this one any more.
                const int free = stage == 0 ? RING - 1 : stage - 1;
                if (first != part * ROWS_PER_BLOCK) bring_row(free, position + (RING - 1) * step);
            }
            if constexpr (!GIVEN_RSTD) {
                gradient.rstd = reciprocal_sqrt(sums[SQUARES] / count + arguments.eps);
            }
            if (constant || (STRAIGHT && !computed)) gradient.rstd = A(0);
            if constexpr (WANT_DX) {
                gradient.mean_g_xhat = mul_rn(mul_rn(sums[0], inverse_count), gradient.rstd);
                if constexpr (NORM == LAYER) gradient.mean_g = mul_rn(sums[G], inverse_count);
            }
        }

        BackwardRow<DX, D, X, R> at = {};
        if (MASK == ALL_ROWS ? computed : position < positions) {
            at = backward_row<SPLIT_ROWS>(arguments, row_of(position), first_element);
        }
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            if (!takes(vec)) continue;
            if constexpr (!HELD) load_staged(vec);
            const int held = HELD ? vec : 0;
            A x[VEC_SIZE];
            A dout[VEC_SIZE];
            A dresidual_out[VEC_SIZE] = {};
            A dx[VEC_SIZE];
            widen(x, held_x[held]);
            widen(dout, held_dout[held]);
            if constexpr (WANT_DX) widen(dresidual_out, held_dresidual_out[held]);
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) {
                const A xhat = gradient.xhat(x[i]);
                if constexpr (WANT_DX) {
                    const A g = mul_rn(dout[i], factor(held_weight[held].data[i]));
                    dx[i] = gradient.template dx<is_array<R>>(g, xhat, dresidual_out[i]);
                }
                if constexpr (is_array<DW>) {
                    dweight[vec][i] = gradient.add_dweight(dweight[vec][i], dout[i], xhat);
                }
                if constexpr (is_array<DB>) dbias[vec][i] += dout[i];
            }
            if constexpr (WANT_DX) {
                if (computed) store_dx<ALIGNED>(at, vec * APART, dx);
            }
        }
        if constexpr (MASK != ALL_ROWS && WANT_DX) {
            if (!computed && position < positions) {
                const A zeros[VEC_SIZE] = {};
#pragma unroll 1
                for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
                    if (owns(vec)) store_dx<ALIGNED>(at, vec * APART, zeros);
                }
            }
        }
        if constexpr (!HELD && STAGES > 0 && !BEHIND_SUMS) {
            if constexpr (COPY == BULK) __syncwarp();  // the row is read before the next overwrites
            bring_row(stage, position + STAGES * step);
        }
        if constexpr (STAGES == 0) break;
        stage = stage + 1 == RING ? 0 : stage + 1;
        if (stage == 0) phase ^= 1;
        cluster_phase ^= parity;
        parity ^= 1;
    }
    if constexpr (COPY == ASYNC) copy_async_wait<0>();

    const long long elements = arguments.heads * arguments.hidden_size;
    const long long offset = part * elements + head * arguments.hidden_size;
    if constexpr (is_array<DW>) {
        store_part<ROWS_PER_BLOCK>(arguments.dweight_parts + offset, dweight, begin, end, thread,
                                   reinterpret_cast<A*>(ring));
    }
    if constexpr (is_array<DB>) {
        store_part<ROWS_PER_BLOCK>(arguments.dbias_parts + offset, dbias, begin, end, thread,
                                   reinterpret_cast<A*>(ring));
    }
}
