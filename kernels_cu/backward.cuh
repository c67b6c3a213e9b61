// SPDX-License-Identifier: Apache-2.0
// What the backward kernels share: their arguments, where a row lies, rows on their way to shared
// memory, sums of several values at once, and how the gradients of weight and bias become one.
//
// With g = dout * (weight + offset) and c = x - mean (RMSNorm: x):
//     dx = rstd * (g - mean(g) - c * rstd * mean(g * c * rstd)) + dresidual_out
// where RMSNorm has no mean(g). dweight = sum of dout * c * rstd and dbias = sum of dout over rows.
// Every block sums its own rows into its part of a workspace; the parts are then summed in order.
#pragma once

#include "fuse.cuh"
#include "reduce.cuh"

// Outputs first, then inputs, sizes, scalars. DX, DW, DB: outputs, Absent where not wanted; D, X:
// dout and x; R: dresidual_out or Absent; W: weight or Constant; V: the type of valid_rows.
// Rows come in order of heads (row = position * heads + head); heads is 1 for a shared weight, and
// above 1 only where rows are split.
template <typename DX, typename DW, typename DB, typename D, typename X, typename R, typename W,
          typename V>
struct BackwardArguments {
    using A = typename Accumulation<X>::type;
    DX* dx;
    X* dresidual;  // a second copy of dx in another type, null where not wanted
    DW* dweight;   // (heads, hidden_size), as dbias
    DB* dbias;
    A* dweight_parts;  // (parts, heads, hidden_size)
    A* dbias_parts;
    A* mean_out;  // norm_backward_streamed without dx leaves the statistics here
    A* rstd_out;
    const D* dout;
    const X* x;
    const R* dresidual_out;
    const W* weight;
    const A* mean;  // null: recomputed
    const A* rstd;
    const bool* where;    // null: every row
    const V* valid_rows;  // null: every row
    long long rows;
    long long hidden_size;
    long long partial;  // columns that the statistic comes from, where PARTIAL
    long long inner_rows;
    RowCount mask_rows;  // neighbouring rows that share an element of the masks
    long long heads;
    long long parts;
    RowStrides dx_strides;
    RowStrides dresidual_strides;
    RowStrides dout_strides;
    RowStrides x_strides;
    RowStrides dresidual_out_strides;
    A eps;
    A weight_offset;
    A weight_constant;
};

// Of one type dx and dresidual are one array.
template <typename DX, typename X>
inline constexpr bool has_dresidual = is_array<DX> && !is_same<DX, X>;

// Places in the arrays of rows: an element of one row.
template <typename DX, typename D, typename X, typename R>
struct BackwardRow {
    DX* dx;
    X* dresidual;
    const D* dout;
    const X* x;
    const R* dresidual_out;
};

template <bool SPLIT_ROWS, typename DX, typename DW, typename DB, typename D, typename X,
          typename R, typename W, typename V>
__device__ __forceinline__ BackwardRow<DX, D, X, R> backward_row(
    const BackwardArguments<DX, DW, DB, D, X, R, W, V>& arguments, long long row,
    long long element) {
    const long long outer = SPLIT_ROWS ? row / arguments.inner_rows : 0;
    const long long inner = SPLIT_ROWS ? row - outer * arguments.inner_rows : row;
    const auto offset = [=](const RowStrides& strides) {
        return element +
               (SPLIT_ROWS ? outer * strides.outer + inner * strides.inner : inner * strides.inner);
    };
    BackwardRow<DX, D, X, R> at = {};
    if constexpr (is_array<DX>) {
        at.dx = arguments.dx + offset(arguments.dx_strides);
        if (has_dresidual<DX, X> && arguments.dresidual != nullptr) {
            at.dresidual = arguments.dresidual + offset(arguments.dresidual_strides);
        }
    }
    at.dout = arguments.dout + offset(arguments.dout_strides);
    at.x = arguments.x + offset(arguments.x_strides);
    if constexpr (is_array<R>) {
        at.dresidual_out = arguments.dresidual_out + offset(arguments.dresidual_out_strides);
    }
    return at;
}

// How a row comes to shared memory.
enum Copy {
    LOADS,  // through registers: at once
    ASYNC,  // each thread copies its own packs asynchronously
    BULK,   // one thread asks for the whole row
};

// Whether a thread moves its `elements` of a row from the ring to registers at once and keeps the
// weight in registers: as far as they suffice beside as many elements of dweight and dbias.
template <typename DB, typename X, typename D, typename R, typename W>
__host__ __device__ constexpr bool is_held(int elements, int threads) {
    const int accumulation = static_cast<int>(sizeof(typename Accumulation<X>::type));
    const int staged = static_cast<int>(sizeof(X) + sizeof(D)) + (is_array<R> ? sizeof(R) : 0);
    if (elements * accumulation <= 64 && threads <= 512) {
        return elements * (staged + static_cast<int>(sizeof(W))) <= 192;
    }
    // Longer rows and larger blocks where it is certain: the weight comes to be held in the
    // accumulation type, and registers are given to four warps at a time.
    const int registers = elements * (accumulation * (is_array<DB> ? 3 : 2) + staged) / 4;
    const int needed = registers + 40 + elements / 8;
    return needed <= 64 * 1024 / ((threads + 127) / 128 * 128) && registers <= 208;
}

// Blocks of an SM for __launch_bounds__; 0 leaves it to the compiler. It spills a few registers in
// the cases where this says 1, and in the others if they said so.
template <typename DB, typename X, typename D, typename R, typename W>
__host__ __device__ constexpr int least_blocks(int elements, int threads) {
    const int accumulation = elements * static_cast<int>(sizeof(typename Accumulation<X>::type));
    return accumulation <= 64 && !is_held<DB, X, D, R, W>(elements, threads) ? 1 : 0;
}

template <bool ALIGNED, typename A, typename DX, typename D, typename X, typename R, int VEC_SIZE>
__device__ __forceinline__ void store_dx(const BackwardRow<DX, D, X, R>& at, long long element,
                                         const A (&values)[VEC_SIZE]) {
    Pack<DX, VEC_SIZE> dx;
    round_pack(dx, values);
    store_pack<STREAM, ALIGNED>(at.dx + element, dx);
    if (has_dresidual<DX, X> && at.dresidual != nullptr) {
        Pack<X, VEC_SIZE> dresidual;
        round_pack(dresidual, values);
        store_pack<STREAM, ALIGNED>(at.dresidual + element, dresidual);
    }
}

// The formulas above for one element each; given its row's statistics and means.
template <Norm NORM, bool CAST_BEFORE_WEIGHT, typename X, typename A>
struct Gradient {
    A mean;
    A rstd;
    A mean_g;
    A mean_g_xhat;

    __device__ __forceinline__ A centered(A x) const { return NORM == LAYER ? sub_rn(x, mean) : x; }
    __device__ __forceinline__ A xhat(A x) const { return mul_rn(centered(x), rstd); }

    // ADDED: there is a dresidual_out.
    template <bool ADDED>
    __device__ __forceinline__ A dx(A g, A xhat, A dresidual_out) const {
        const A projected = fma_rn(-xhat, mean_g_xhat, g);
        if constexpr (NORM == RMS) return fma_rn(rstd, projected, dresidual_out);
        const A dx = fma_rn(rstd, projected, -mul_rn(rstd, mean_g));
        return ADDED ? add_rn(dx, dresidual_out) : dx;
    }

    __device__ __forceinline__ A add_dweight(A dweight, A dout, A xhat) const {
        if constexpr (CAST_BEFORE_WEIGHT) xhat = to_float(from_float<X>(xhat));
        return fma_rn(dout, xhat, dweight);
    }
};

template <typename A>
struct Factor {
    A weight_offset;
    A weight_constant;

    template <typename W>
    __device__ __forceinline__ A operator()(W weight) const {
        if constexpr (is_array<W>) {
            return add_rn(to_float(weight), weight_offset);
        } else {
            return add_rn(weight_constant, weight_offset);
        }
    }
};

// Adds one row's terms of dweight and dbias for the pack at `element`, given its statistics.
template <Norm NORM, bool CAST_BEFORE_WEIGHT, bool ALIGNED, bool SPLIT_ROWS, typename A,
          int VEC_SIZE, typename DX, typename DW, typename DB, typename D, typename X, typename R,
          typename W, typename V>
__device__ __forceinline__ void add_column_terms(
    A (&dweight)[VEC_SIZE], A (&dbias)[VEC_SIZE],
    const BackwardArguments<DX, DW, DB, D, X, R, W, V>& arguments, long long row,
    long long element) {
    const BackwardRow<DX, D, X, R> at = backward_row<SPLIT_ROWS>(arguments, row, element);
    Gradient<NORM, CAST_BEFORE_WEIGHT, X, A> gradient = {};
    if constexpr (NORM == LAYER) gradient.mean = arguments.mean[row];
    gradient.rstd = arguments.rstd[row];
    Pack<X, VEC_SIZE> x;
    Pack<D, VEC_SIZE> dout;
    load_pack<KEEP, ALIGNED>(x, at.x);
    load_pack<KEEP, ALIGNED>(dout, at.dout);
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
        const A arriving = to_float(dout.data[i]);
        dweight[i] = gradient.add_dweight(dweight[i], arriving, gradient.xhat(to_float(x.data[i])));
        dbias[i] += arriving;
    }
}

// Sums COUNT values at once over the THREADS_PER_ROW threads of a row by one barrier. `slots`,
// COUNT
// * row_reduce_slots places, may be used again only after another barrier of the block.
template <int THREADS_PER_ROW, typename A, int COUNT>
__device__ __forceinline__ void reduce_row_sums(A (&values)[COUNT], A* slots) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        values[i] = warp_reduce_sum<(THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32)>(values[i]);
    }
    if constexpr (THREADS_PER_ROW > 32) {
        constexpr int WARPS = THREADS_PER_ROW / 32;
        constexpr int WIDTH = ceil_power_of_two(WARPS);
        const int lane_id = threadIdx.x % 32;
        A* const row_slots = slots + threadIdx.x / THREADS_PER_ROW * (WARPS * COUNT);
        if (lane_id == 0) {
            const int warp = threadIdx.x % THREADS_PER_ROW / 32;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) row_slots[warp * COUNT + i] = values[i];
        }
        __syncthreads();  // every warp's sums are in their slots
        const int slot = lane_id % WIDTH;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            values[i] = warp_reduce_sum<WIDTH>(slot < WARPS ? row_slots[slot * COUNT + i] : A(0));
        }
    }
}

template <int CLUSTER_SIZE, typename A, int COUNT>
__device__ __forceinline__ void add_cluster_sums(A (&values)[COUNT], const A* cluster_slots) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        values[i] = cluster_slots[i];
#pragma unroll
        for (int rank = 1; rank < CLUSTER_SIZE; ++rank) {
            values[i] += cluster_slots[rank * COUNT + i];
        }
    }
}

// The same over the blocks of the cluster too, by another barrier of the cluster; `cluster_slots`,
// COUNT * CLUSTER_SIZE places, may be used again only after one more.
template <int THREADS_PER_ROW, int CLUSTER_SIZE, typename A, int COUNT>
__device__ __forceinline__ void reduce_sums(A (&values)[COUNT], A* slots, A* cluster_slots) {
    reduce_row_sums<THREADS_PER_ROW>(values, slots);
    if constexpr (CLUSTER_SIZE > 1) {
        if (threadIdx.x < CLUSTER_SIZE) {
            A* const own = cluster_slots + cluster_rank() * COUNT;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) cluster_store(own + i, threadIdx.x, values[i]);
        }
        cluster_barrier();  // every block's sums have arrived in every block
        add_cluster_sums<CLUSTER_SIZE>(values, cluster_slots);
    }
}

// The same in kernels that store a row before they sum the next: a barrier of the cluster would
// wait for those stores. Instead each block waits at its mbarrier, of one arrival a phase, for the
// sums that the others send. Both slots and mbarrier may be used again in the next reduction but
// one: a block sends its sums of the next only when all its threads have read these.
template <int THREADS_PER_ROW, int CLUSTER_SIZE, typename A, int COUNT>
__device__ __forceinline__ void reduce_sums(A (&values)[COUNT], A* slots, A* cluster_slots,
                                            unsigned long long* barrier, int phase) {
    static_assert(CLUSTER_SIZE == 1 || THREADS_PER_ROW > 32, "the row's barrier guards the slots");
    reduce_row_sums<THREADS_PER_ROW>(values, slots);
    if constexpr (CLUSTER_SIZE > 1) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect(barrier, CLUSTER_SIZE * COUNT * static_cast<int>(sizeof(A)));
        }
        if (threadIdx.x < CLUSTER_SIZE) {
            A* const own = cluster_slots + cluster_rank() * COUNT;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) cluster_send(own + i, threadIdx.x, values[i], barrier);
        }
        mbarrier_wait(barrier, phase);
        add_cluster_sums<CLUSTER_SIZE>(values, cluster_slots);
    }
}

// Writes a block's sums over its rows, which thread t of each row holds for packs begin + t, begin
// + t + threads of a row, ... below end; `room` is shared memory for those of all its rows, idle
// since the block's last barrier. Whole packs at once: in words of 4 bytes they are up to four
// times as many stores.
template <int ROWS_PER_BLOCK, typename A, int VECS_PER_THREAD, int VEC_SIZE>
__device__ __forceinline__ void store_part(A* part, const A (&sums)[VECS_PER_THREAD][VEC_SIZE],
                                           int begin, int end, int thread, A* room) {
    using Sums = Pack<A, VEC_SIZE>;
    const int threads_per_row = blockDim.x / ROWS_PER_BLOCK;
    const auto pack_of = [&](int vec) {
        Sums pack;
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) pack.data[i] = sums[vec][i];
        return pack;
    };
    Sums* const packs = reinterpret_cast<Sums*>(part);
    if constexpr (ROWS_PER_BLOCK == 1) {
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            const int pack = begin + thread + vec * threads_per_row;
            if (pack < end) packs[pack] = pack_of(vec);
        }
    } else {
        const int held = threads_per_row * VECS_PER_THREAD;  // packs of a row in the room
        Sums* const row = reinterpret_cast<Sums*>(room) + threadIdx.x / threads_per_row * held;
        __syncthreads();  // no thread uses the room any more
#pragma unroll
        for (int vec = 0; vec < VECS_PER_THREAD; ++vec) {
            row[thread + vec * threads_per_row] = pack_of(vec);
        }
        __syncthreads();  // every row's sums are in the room
        // By elements: of the packs of a short row few threads would have one.
        for (int element = threadIdx.x; element < end * VEC_SIZE; element += blockDim.x) {
            A sum = room[element];
#pragma unroll 8
            for (int other = 1; other < ROWS_PER_BLOCK; ++other) {
                sum += room[other * held * VEC_SIZE + element];
            }
            part[element] = sum;
        }
    }
}

// Sums `parts` arrays of `elements` values into `out`, packs first, first + step, ... of COLUMNS *
// SLICES threads: SLICES of them share a pack, each sums every SLICES-th part in order, and their
// sums are added in order. All threads of the block take part; `slots` has room for their packs.
template <int VEC_SIZE, int COLUMNS, int SLICES, typename T, typename A>
__device__ __forceinline__ void sum_parts(T* out, const A* parts, long long elements,
                                          long long count, long long first, long long step,
                                          Pack<A, VEC_SIZE>* slots) {
    const int column = threadIdx.x % COLUMNS;
    const int slice = threadIdx.x / COLUMNS;
    for (long long base = first; base < elements; base += step) {
        const long long element = base + static_cast<long long>(column) * VEC_SIZE;
        Pack<A, VEC_SIZE> sum = {};
        if (element < elements) {
#pragma unroll 8
            for (long long part = slice; part < count; part += SLICES) {
                Pack<A, VEC_SIZE> term;
                load_pack<STREAM, true>(term, parts + part * elements + element);
#pragma unroll
                for (int i = 0; i < VEC_SIZE; ++i) sum.data[i] += term.data[i];
            }
        }
        if constexpr (SLICES > 1) {
            slots[threadIdx.x] = sum;
            __syncthreads();  // every slice's sum is in its slot
            if (slice == 0) {
#pragma unroll
                for (int other = 1; other < SLICES; ++other) {
#pragma unroll
                    for (int i = 0; i < VEC_SIZE; ++i) {
                        sum.data[i] += slots[other * COLUMNS + column].data[i];
                    }
                }
            }
            __syncthreads();  // the slots are read before the next packs overwrite them
        }
        if (slice == 0 && element < elements) {
#pragma unroll
            for (int i = 0; i < VEC_SIZE; ++i) out[element + i] = from_float<T>(sum.data[i]);
        }
    }
}
