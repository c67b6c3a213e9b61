// SPDX-License-Identifier: Apache-2.0
// dweight and dbias from the parts that the blocks of a backward kernel left: sums in fixed order.
// Owner: a block takes 32 elements, a thread one of them in every SLICES-th part.
// Launch: block (32 * SLICES), grid ceil(elements / 32) or fewer for each of dweight and dbias, no
// dynamic shared memory.
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

// The next kernel takes its places when this one ends: beside its few blocks the rows of another
// call would spread over the SMs unevenly.
template <typename DW, typename DB, typename A, int SLICES>
__global__ void __launch_bounds__(32 * SLICES)
    norm_backward_sum(const SumArguments<DW, DB, A> arguments) {
    wait_for_earlier_kernels();
    constexpr int COLUMNS = 32;
    constexpr int SUMS = is_array<DW> + is_array<DB>;
    __shared__ Pack<A, 1> slots[COLUMNS * SLICES];
    const long long first = static_cast<long long>(blockIdx.x / SUMS) * COLUMNS;
    const long long step = static_cast<long long>(gridDim.x / SUMS) * COLUMNS;
    // Of two neighbouring blocks one sums dweight, the other dbias.
    const bool of_dweight = is_array<DW> && blockIdx.x % SUMS == 0;
    if constexpr (is_array<DW>) {
        if (of_dweight) {
            sum_parts<1, COLUMNS, SLICES>(arguments.dweight, arguments.dweight_parts,
                                          arguments.elements, arguments.parts, first, step, slots);
        }
    }
    if constexpr (is_array<DB>) {
        if (!of_dweight) {
            sum_parts<1, COLUMNS, SLICES>(arguments.dbias, arguments.dbias_parts,
                                          arguments.elements, arguments.parts, first, step, slots);
        }
    }
}
