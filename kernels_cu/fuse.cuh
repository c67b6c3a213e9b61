// SPDX-License-Identifier: Apache-2.0
// What the forward kernels share besides the reduction: their arguments, where a row lies, which
// rows are computed, and what is fused around the normalisation: residual add before it; weight,
// bias and the rounding to the output's type after it.
#pragma once

#include "cast.cuh"
#include "reduce.cuh"
#include "vec.cuh"

enum Norm { RMS, LAYER };

enum Mask {
    ALL_ROWS,
    KEEP_OTHERS,  // outputs of rows that are not computed stay as they are
    ZERO_OTHERS,  // and are set to zero
    DEAL_ROWS,    // as they are, of many rows that `where` is looked up for
};

// A number of rows below 2^62, and what stands for a division by it: ceil(2^62 / count).
struct RowCount {
    long long count;
    long long reciprocal;
};

__device__ __forceinline__ long long quotient(long long row, const RowCount& rows) {
    const long long found = __umul64hi(4ull * row, rows.reciprocal);
    return found - (found * rows.count > row);  // the reciprocal is rounded up: one too many
}

// A row's offset in elements is outer * outer_stride + inner * inner_stride, where
// row = outer * inner_rows + inner; with SPLIT_ROWS false it is row * inner_stride.
struct RowStrides {
    long long outer;
    long long inner;
};

// Outputs first, then inputs, sizes, scalars; Y, X: output and input; R: residual or Absent;
// W: weight or Constant; B: bias, Constant or Absent; V: the integer type of valid_rows. What few
// calls need comes last: constant memory arrives line by line, and a short call waits for each.
template <typename Y, typename X, typename R, typename W, typename B, typename V>
struct ForwardArguments {
    using A = typename Accumulation<X>::type;
    Y* y;
    R* residual_out;  // null where R is Absent
    A* mean;          // null where the statistic is not wanted
    A* rstd;
    const X* x;
    const R* residual;
    const W* weight;
    const B* bias;
    long long rows;
    long long hidden_size;
    long long next_early;  // whether the next kernel may take its places before this one's loads
    RowStrides x_strides;
    RowStrides y_strides;
    A eps;
    A weight_offset;
    A weight_constant;  // in place of a weight where W is Constant
    A bias_constant;
    RowStrides residual_out_strides;
    RowStrides residual_strides;
    RowCount inner_rows;
    long long weight_stride;  // between the heads' weights: hidden_size, or 0 for a shared weight
    long long bias_stride;
    long long partial;         // columns that the statistic comes from, where PARTIAL
    const bool* where;         // null: every row
    const V* valid_rows;       // null: every row
    unsigned teams;            // of blocks, where rows are dealt
    unsigned team_reciprocal;  // ceil(2^31 / teams)
    unsigned members;          // of a team
    unsigned walkers;          // of a team's or of all blocks: those that take more than one turn
    RowCount mask_rows;        // neighbouring rows that share an element of the masks
};

// Where a thread's first element of one row lies in each array. Its others are a number away that
// the compiler knows: one address serves all of them.
template <typename Y, typename X, typename R, typename W, typename B>
struct RowPointers {
    Y* y;
    R* residual_out;
    const X* x;
    const R* residual;
    const W* weight;
    const B* bias;
};

template <bool SPLIT_ROWS, typename Y, typename X, typename R, typename W, typename B, typename V>
__device__ __forceinline__ RowPointers<Y, X, R, W, B> row_pointers(
    const ForwardArguments<Y, X, R, W, B, V>& arguments, long long row, long long element) {
    const long long outer = SPLIT_ROWS ? quotient(row, arguments.inner_rows) : 0;
    const long long inner = SPLIT_ROWS ? row - outer * arguments.inner_rows.count : row;
    const auto offset = [=](const RowStrides& strides) {
        return (SPLIT_ROWS ? outer * strides.outer : 0) + inner * strides.inner + element;
    };
    RowPointers<Y, X, R, W, B> pointers = {};
    pointers.y = arguments.y + offset(arguments.y_strides);
    pointers.x = arguments.x + offset(arguments.x_strides);
    if constexpr (is_array<R>) {
        pointers.residual_out = arguments.residual_out + offset(arguments.residual_out_strides);
        pointers.residual = arguments.residual + offset(arguments.residual_strides);
    }
    // Weights of heads exist only where rows are split: inner is then the head.
    const long long head = SPLIT_ROWS ? inner : 0;
    if constexpr (is_array<W>) {
        pointers.weight = arguments.weight + head * arguments.weight_stride + element;
    }
    if constexpr (is_array<B>) {
        pointers.bias = arguments.bias + head * arguments.bias_stride + element;
    }
    return pointers;
}

// Asks for what a row is computed from to be brought to the L2.
template <bool SPLIT_ROWS, bool ALIGNED, int VEC_SIZE, typename Y, typename X, typename R,
          typename W, typename B, typename V>
__device__ __forceinline__ void prefetch_row(const ForwardArguments<Y, X, R, W, B, V>& arguments,
                                             long long row) {
    const RowPointers<Y, X, R, W, B> at = row_pointers<SPLIT_ROWS>(arguments, row, 0);
    const long long packs = arguments.hidden_size / VEC_SIZE;
    prefetch_packs<ALIGNED, VEC_SIZE>(at.x, packs);
    if constexpr (is_array<R>) prefetch_packs<ALIGNED, VEC_SIZE>(at.residual, packs);
}

// The element of the masks that is a row's. Rows share one only where they are split.
template <bool SPLIT_ROWS, typename Arguments>
__device__ __forceinline__ long long mask_element(const Arguments& arguments, long long row) {
    const bool shared = SPLIT_ROWS && arguments.mask_rows.count != 1;
    return shared ? quotient(row, arguments.mask_rows) : row;
}

template <Mask MASK, bool SPLIT_ROWS, typename Arguments>
__device__ __forceinline__ bool row_is_computed(const Arguments& arguments, long long row) {
    if (row >= arguments.rows) return false;
    if constexpr (MASK == ALL_ROWS) return true;
    const long long element = mask_element<SPLIT_ROWS>(arguments, row);
    if (arguments.valid_rows != nullptr && element >= *arguments.valid_rows) return false;
    return arguments.where == nullptr || arguments.where[element];
}

template <Norm NORM, typename Arguments, typename A>
__device__ __forceinline__ void store_statistics(const Arguments& arguments, long long row, A mean,
                                                 A rstd) {
    if (NORM == LAYER && arguments.mean != nullptr) arguments.mean[row] = mean;
    if (arguments.rstd != nullptr) arguments.rstd[row] = rstd;
}

// Zeroes a thread's packs of a row that is not computed: 0, step, ... below end.
template <bool ALIGNED, int VEC_SIZE, typename Y, typename X, typename R, typename W, typename B>
__device__ __forceinline__ void zero_row(const RowPointers<Y, X, R, W, B>& at, long long end,
                                         int step) {
    const Pack<Y, VEC_SIZE> y = {};
    const Pack<R, VEC_SIZE> residual_out = {};
    for (long long pack = 0; pack < end; pack += step) {
        store_pack<PLAIN, ALIGNED>(at.y + pack * VEC_SIZE, y);
        if constexpr (is_array<R>) {
            store_pack<PLAIN, ALIGNED>(at.residual_out + pack * VEC_SIZE, residual_out);
        }
    }
}

// The pack's values in the accumulation type. Neighbours of bfloat16 come out of their common word
// by one instruction each; the compiler would take two for the second.
template <typename A, typename T, int VEC_SIZE>
__device__ __forceinline__ void widen(A (&values)[VEC_SIZE], const Pack<T, VEC_SIZE>& pack) {
    if constexpr (is_same<T, __nv_bfloat16> && VEC_SIZE % 2 == 0) {
        const unsigned* const words = reinterpret_cast<const unsigned*>(pack.data);
#pragma unroll
        for (int i = 0; i < VEC_SIZE / 2; ++i) {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else if constexpr (is_array<T>) {
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) values[i] = to_float(pack.data[i]);
    }
}

// The values that are normalised: x in the accumulation type, plus the residual where there is one.
// A row is held as it came and this sum formed anew in every pass: it costs an instruction and
// saves half of the registers or shared memory, or more.
template <typename A, typename X, typename R, int VEC_SIZE>
__device__ __forceinline__ void add_residual(A (&values)[VEC_SIZE], const Pack<X, VEC_SIZE>& x,
                                             const Pack<R, VEC_SIZE>& residual) {
    widen(values, x);
    if constexpr (is_array<R>) {
        A added[VEC_SIZE];
        widen(added, residual);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) values[i] = add_rn(values[i], added[i]);
    }
}

template <typename T, typename A, int VEC_SIZE>
__device__ __forceinline__ void round_pack(Pack<T, VEC_SIZE>& pack, const A (&values)[VEC_SIZE]) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) pack.data[i] = from_float<T>(values[i]);
}

// From the held values to the output, one rounding a step, in this order: subtract the mean,
// multiply by rstd, (round to X,) multiply by weight + offset, add the bias, round to Y.
template <Norm NORM, bool CAST_BEFORE_WEIGHT, typename X, typename A>
struct Normalise {
    A mean;
    A rstd;
    A weight_offset;
    A weight_constant;
    A bias_constant;

    template <typename Y, typename W, typename B, int VEC_SIZE>
    __device__ __forceinline__ void operator()(Pack<Y, VEC_SIZE>& y, const A (&values)[VEC_SIZE],
                                               const Pack<W, VEC_SIZE>& weight,
                                               const Pack<B, VEC_SIZE>& bias) const {
        A factors[VEC_SIZE];
        A terms[VEC_SIZE];
        widen(factors, weight);
        widen(terms, bias);
#pragma unroll
        for (int i = 0; i < VEC_SIZE; ++i) {
            A value = NORM == LAYER ? sub_rn(values[i], mean) : values[i];
            value = mul_rn(value, rstd);
            if constexpr (CAST_BEFORE_WEIGHT) value = to_float(from_float<X>(value));
            if constexpr (is_array<W>) {
                value = mul_rn(value, add_rn(factors[i], weight_offset));
            } else {
                value = mul_rn(value, add_rn(weight_constant, weight_offset));
            }
            if constexpr (is_array<B>) {
                value = add_rn(value, terms[i]);
            } else if constexpr (is_same<B, Constant>) {
                value = add_rn(value, bias_constant);
            }
            y.data[i] = from_float<Y>(value);
        }
    }
};

// By halves: equal elements sum without a rounding error.
template <typename T, typename A, int VEC_SIZE>
__device__ __forceinline__ T pack_sum(const A (&values)[VEC_SIZE]) {
    T sums[VEC_SIZE];
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) sums[i] = static_cast<T>(values[i]);
#pragma unroll
    for (int half = VEC_SIZE / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
}

// The sum that LayerNorm's mean comes from. The mean must be exact relative to itself, not to the
// values: they may cancel, and an output in the accumulation type shows it. No output of 16 bits
// does, and a plain sum is enough.
template <typename Y, typename A>
struct MeanSum {
    using type = A;
};
template <>
struct MeanSum<float, float> {
    using type = double;
};
template <>
struct MeanSum<double, double> {
    using type = ExactSum<double>;
};

template <typename T, typename A, int VEC_SIZE>
__device__ __forceinline__ void add_pack(T& sum, const A (&values)[VEC_SIZE]) {
    sum += pack_sum<T>(values);
}
template <typename A, int VEC_SIZE>
__device__ __forceinline__ void add_pack(ExactSum<A>& sum, const A (&values)[VEC_SIZE]) {
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) sum += values[i];
}

// sum / count, rounded about once: a row of equal elements has that element as its mean.
__device__ __forceinline__ float mean_of(float sum, float count) { return sum / count; }
__device__ __forceinline__ float mean_of(double sum, float count) {
    const float mean = static_cast<float>(sum * static_cast<double>(1 / count));
    const double rest = fma_rn(-static_cast<double>(mean), static_cast<double>(count), sum);
    return rest == rest ? add_rn(mean, static_cast<float>(rest) / count) : mean;
}
template <typename A>
__device__ __forceinline__ A mean_of(const ExactSum<A>& sum, A count) {
    const A mean = sum.value() / count;
    const A rest = add_rn(fma_rn(-mean, count, sum.sum), sum.error);
    return rest == rest ? add_rn(mean, rest / count) : mean;
}

// Sum of (value - mean)^2 over one pack, whose first element is `element` of its row; RMSNorm has
// no mean. PARTIAL leaves out what lies behind the columns that the statistic comes from.
template <Norm NORM, bool PARTIAL, typename A, int VEC_SIZE, typename Arguments>
__device__ __forceinline__ A pack_sum_squares(const A (&values)[VEC_SIZE], A mean,
                                              const Arguments& arguments, long long element) {
    A sum = A(0);
    // One clamp a pack in place of a 64-bit comparison an element.
    const long long left = PARTIAL ? arguments.partial - element : VEC_SIZE;
    const int count = static_cast<int>(max(0ll, min(left, static_cast<long long>(VEC_SIZE))));
#pragma unroll
    for (int i = 0; i < VEC_SIZE; ++i) {
        if (PARTIAL && i >= count) continue;
        const A deviation = NORM == LAYER ? sub_rn(values[i], mean) : values[i];
        sum = fma_rn(deviation, deviation, sum);
    }
    return sum;
}

template <bool PARTIAL, typename A, typename Arguments>
__device__ __forceinline__ A rstd_of(A squares, const Arguments& arguments) {
    const long long count = PARTIAL ? arguments.partial : arguments.hidden_size;
    return reciprocal_sqrt(squares / static_cast<A>(count) + arguments.eps);
}
