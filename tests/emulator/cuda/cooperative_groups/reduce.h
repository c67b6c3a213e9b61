// SPDX-License-Identifier: Apache-2.0
// Reductions over a tile of a warp.
#pragma once

namespace cooperative_groups {

template <typename T>
struct plus {
    EMULATOR_INLINE T operator()(T a, T b) const { return a + b; }
};
template <unsigned SIZE, typename T, typename Operation>
EMULATOR_INLINE T reduce(thread_block_tile<SIZE> tile, T value, Operation operation,
                         EMULATOR_HERE) {
    for (int lanes = SIZE / 2; lanes > 0; lanes /= 2) {
        value = operation(value, __shfl_xor_sync(tile.mask(), value, lanes, 32, file, line));
    }
    return value;
}

}  // namespace cooperative_groups
