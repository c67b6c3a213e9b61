// SPDX-License-Identifier: Apache-2.0
// dweight and dbias from the parts that the blocks of a backward kernel left: sums in fixed order.
// Owner: 32 threads a pack of elements, one in each of 8 slices of the parts.
// Launch: block (256), grid ceil(elements / 32) or fewer, no dynamic shared memory.
// Caller guarantees: nothing; without parts the sums are zero.
// Moves: one read of the parts, one write of the sums.

#include "backward.cuh"

template <typename DW, typename DB, typename A>
struct SumArguments {
    DW* dweight;
    DB* dbias;
    const A* dweight_parts;
    const A* dbias_parts;
    long long elements;
    long long parts;
};

template <typename DW, typename DB, typename A>
__global__ void __launch_bounds__(256) norm_backward_sum(const SumArguments<DW, DB, A> arguments) {
    constexpr int COLUMNS = 32;
    constexpr int SLICES = 8;
    __shared__ Pack<A, 1> slots[COLUMNS * SLICES];
    const long long first = static_cast<long long>(blockIdx.x) * COLUMNS;
    const long long step = static_cast<long long>(gridDim.x) * COLUMNS;
    if constexpr (is_array<DW>) {
        sum_parts<1, COLUMNS, SLICES>(arguments.dweight, arguments.dweight_parts,
                                      arguments.elements, arguments.parts, first, step, slots);
    }
    if constexpr (is_array<DB>) {
        sum_parts<1, COLUMNS, SLICES>(arguments.dbias, arguments.dbias_parts, arguments.elements,
                                      arguments.parts, first, step, slots);
    }
}
