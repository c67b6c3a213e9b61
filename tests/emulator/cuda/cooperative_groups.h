// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's cooperative groups that the kernels use: the block, tiles of a warp, and sums
// over a tile. Calls carry the caller's line, as in device.h.
#pragma once

namespace cooperative_groups {

struct thread_block {
    static EMULATOR_INLINE unsigned thread_rank() {
        return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    }
    static EMULATOR_INLINE void sync(EMULATOR_HERE) { emulator_syncthreads(file, line); }
};
EMULATOR_INLINE thread_block this_thread_block() { return {}; }

template <unsigned SIZE>
struct thread_block_tile {
    static_assert(SIZE <= 32 && (SIZE & (SIZE - 1)) == 0);

    static EMULATOR_INLINE unsigned thread_rank() { return thread_block::thread_rank() % SIZE; }
    static EMULATOR_INLINE unsigned meta_group_rank() { return thread_block::thread_rank() / SIZE; }
    // The lanes of the warp that are this tile.
    static EMULATOR_INLINE unsigned mask() {
        const unsigned first = thread_block::thread_rank() % 32 / SIZE * SIZE;
        return static_cast<unsigned>((uint64_t(1) << SIZE) - 1) << first;
    }
};
template <unsigned SIZE>
EMULATOR_INLINE thread_block_tile<SIZE> tiled_partition(thread_block) {
    return {};
}

}  // namespace cooperative_groups
