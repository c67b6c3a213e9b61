// SPDX-License-Identifier: Apache-2.0
// Which rows a block of norm_forward computes: of a call without a mask, or of its first valid_rows
// rows, those that come in turn; where rows have to be looked up, its own ones, each by itself.
// Where these are many and the others stay as they are (DEAL_ROWS), the blocks of a team look at
// one window, chunks of neighbouring rows from all over the call, and deal among themselves those
// that are left: as many to each, wherever the mask is dense. What a block computes next its first
// warp finds out while the row before is on its way, and asks for it to be brought to the L2 while
// that one is normalised and nothing else of the block is under way.
#pragma once

#include "fuse.cuh"

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int CHUNK_ROWS = 32;     // neighbours
constexpr int WINDOW_CHUNKS = 32;  // a lane for each
constexpr int LOOK_ROWS = 8;       // of a chunk, looked up by one thread
constexpr int MANY_TURNS = 8;      // of a block, if all took as many

// What a lane of a block's first warp knows of the window: its chunk's rows that are computed.
struct Chunk {
    unsigned bits;
    int end;  // how many there are up to the end of this chunk

    // The bit of the window's row at a place that is there. TOGETHER: the lanes ask for the same
    // one and vote; otherwise each has to search.
    template <bool TOGETHER>
    __device__ __forceinline__ int at(int place) const {
        int lane = 0;
        if constexpr (TOGETHER) {
            lane = __ffs(__ballot_sync(WHOLE_WARP, place < end)) - 1;
        } else {
#pragma unroll
            for (int half = WINDOW_CHUNKS / 2; half > 0; half /= 2) {
                if (__shfl_sync(WHOLE_WARP, end, lane + half - 1) <= place) lane += half;
            }
        }
        unsigned found = __shfl_sync(WHOLE_WARP, bits, lane);
        int before =
            place - (__shfl_sync(WHOLE_WARP, end, lane) - __popc(found));  // of the same chunk
        int bit = 0;
        if constexpr (TOGETHER) {
            const unsigned own = 1u << threadIdx.x % 32;
            const bool here = (found & own) != 0 && __popc(found & (own - 1)) == before;
            bit = __ffs(__ballot_sync(WHOLE_WARP, here)) - 1;
        } else {
#pragma unroll
            for (int half = CHUNK_ROWS / 2; half > 0; half /= 2) {
                const int lower = __popc(found & ((1u << half) - 1));
                if (lower <= before) {
                    before -= lower;
                    found >>= half;
                    bit += half;
                }
            }
        }
        return lane * CHUNK_ROWS + bit;
    }
};

// A block's shared memory. Its own rows of a turn are one half of `rows`, while the first warp
// writes the next turn's to the other.
template <int ROWS_PER_BLOCK>
struct Window {
    unsigned looks[WINDOW_CHUNKS];  // what each thread saw, side by side
    Chunk chunks[WINDOW_CHUNKS];
    int count;  // rows that are computed
    long long rows[2][ROWS_PER_BLOCK];
};

// How many rows come first, where valid_rows is the only mask.
template <bool SPLIT_ROWS, typename Arguments>
__device__ __forceinline__ long long valid_rows(const Arguments& arguments) {
    long long valid = *arguments.valid_rows;
    if (SPLIT_ROWS && arguments.mask_rows.count != 1) {
        const long long elements = quotient(arguments.rows - 1, arguments.mask_rows) + 1;
        valid = min(max(valid, 0ll), elements) * arguments.mask_rows.count;
    }
    return min(valid, arguments.rows);
}

// A window has 1024 places.
template <Mask MASK>
struct PlaceOf {
    using type = long long;
};
template <>
struct PlaceOf<DEAL_ROWS> {
    using type = int;
};

// Places of a team's rows, or of all rows, ROWS_PER_BLOCK at once to each member. Where masked rows
// stay as they are, each takes one turn, or two of many where they are dealt, and what is left then
// goes to the first `walkers` of them, which a GPU has on it at first: it deals out blocks, as
// there is room, better than these share.
template <Mask MASK, bool SPLIT_ROWS, bool ALIGNED, int VEC_SIZE, int THREADS_PER_ROW,
          int ROWS_PER_BLOCK, typename Arguments>
struct BlockRows {
    using Place = typename PlaceOf<MASK>::type;

    const Arguments& arguments;
    Window<ROWS_PER_BLOCK>& window;
    unsigned member;  // of the team, or of all blocks
    unsigned team = 0;
    int parity = 0;  // of the turn
    unsigned members;
    Place count = 0;

    __device__ __forceinline__ BlockRows(const Arguments& arguments_,
                                         Window<ROWS_PER_BLOCK>& window_, unsigned block,
                                         unsigned blocks)
        : arguments(arguments_), window(window_), member(block), members(blocks) {
        if constexpr (MASK == DEAL_ROWS) {
            member = __umulhi(2 * block, arguments.team_reciprocal);
            member -= member * arguments.teams > block;  // it is rounded up: one too many
            team = block - member * arguments.teams;
            members = arguments.members;
        }
    }

    __device__ __forceinline__ bool exists(Place place) const {
        return place < (MASK == ALL_ROWS ? arguments.rows : count);
    }

    __device__ __forceinline__ Place first() const {
        return static_cast<Place>(member) * ROWS_PER_BLOCK;
    }

    __device__ __forceinline__ Place next(Place place) const {
        const Place turn = static_cast<Place>(members) * ROWS_PER_BLOCK;
        if (MASK == ALL_ROWS || MASK == ZERO_OTHERS) return place + turn;
        Place shared = turn;
        if constexpr (MASK == DEAL_ROWS) {
            if (count > MANY_TURNS * turn) shared *= 2;
            if (place + turn < shared) return place + turn;
        }
        if (place < shared) return member < arguments.walkers ? place + turn : count;
        return place + static_cast<Place>(arguments.walkers) * ROWS_PER_BLOCK;
    }

    // Whether a place has a row that is computed.
    __device__ __forceinline__ bool is_computed(Place place) const {
        if (MASK == ALL_ROWS || MASK == DEAL_ROWS || ROWS_PER_BLOCK == 1) return exists(place);
        if (MASK == KEEP_OTHERS && arguments.where == nullptr) return exists(place);
        return row_is_computed<MASK, SPLIT_ROWS>(arguments, place);
    }

    // The row at a place of this turn.
    __device__ __forceinline__ long long row_at(Place place, int row_in_block) const {
        if (MASK != DEAL_ROWS) return place;
        return ROWS_PER_BLOCK == 1 || exists(place) ? window.rows[parity][row_in_block] : 0;
    }

    // Finds out how many places there are: none for a block whose one row is masked.
    __device__ __forceinline__ void look_up() {
        if constexpr (MASK == ALL_ROWS) {
            return;
        } else if constexpr (MASK == DEAL_ROWS) {
            look_up_window();
        } else if (MASK == KEEP_OTHERS && arguments.where == nullptr) {
            count = valid_rows<SPLIT_ROWS>(arguments);
        } else {
            const bool none =
                ROWS_PER_BLOCK == 1 && !row_is_computed<MASK, SPLIT_ROWS>(arguments, member);
            count = none ? 0 : arguments.rows;
        }
    }

    __device__ __forceinline__ long long row_of(unsigned chunk, unsigned bit) const {
        return (static_cast<long long>(chunk) * arguments.teams + team) * CHUNK_ROWS + bit;
    }

    // The same of a window, and the rows of the first turn.
    __device__ __forceinline__ void look_up_window() {
        constexpr int THREADS = THREADS_PER_ROW * ROWS_PER_BLOCK;
        constexpr int LOOKS = WINDOW_CHUNKS * CHUNK_ROWS / LOOK_ROWS;
#pragma unroll
        for (int i = 0; i < LOOKS; i += THREADS) {
            const int look = i + threadIdx.x;
            if (look < LOOKS) {
                const int row = look * LOOK_ROWS;
                reinterpret_cast<unsigned char*>(window.looks)[look] =
                    look_at(row_of(row / CHUNK_ROWS, row % CHUNK_ROWS));
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x;
            const unsigned bits = window.looks[lane];
            const int own = __popc(bits);
            const unsigned up_to_own = WHOLE_WARP >> (31 - lane);
            int end = 0;
#pragma unroll
            for (int digit = 0; 1 << digit <= CHUNK_ROWS; ++digit) {
                const unsigned votes = __ballot_sync(WHOLE_WARP, own >> digit & 1);
                end += __popc(votes & up_to_own) << digit;
                count += __popc(votes) << digit;
            }
            const Chunk chunk = {bits, end};
            find(first(), 0, chunk);
            prefetch(first());
            window.chunks[lane] = chunk;
            if (lane == 0) window.count = count;
        }
        __syncthreads();
        count = window.count;
    }

    // The first warp writes down the rows of the next turn, which begins at a place. Others may
    // read them behind the block's next barrier.
    __device__ __forceinline__ void find_next(Place place) {
        if constexpr (MASK != DEAL_ROWS) return;
        parity ^= 1;
        if (threadIdx.x < 32) find(place, parity, window.chunks[threadIdx.x]);
    }

    __device__ __forceinline__ void find(Place place, int turn_parity, const Chunk& chunk) const {
        if (!exists(place)) return;
        constexpr bool TOGETHER = ROWS_PER_BLOCK == 1;
        const int lane = TOGETHER ? 0 : threadIdx.x;
#pragma unroll
        for (int i = 0; i < ROWS_PER_BLOCK; i += 32) {
            const unsigned bit = chunk.template at<TOGETHER>(place + i + lane);
            const bool writes = TOGETHER ? threadIdx.x == 0 : i + lane < ROWS_PER_BLOCK;
            if (writes) {
                window.rows[turn_parity][i + lane] = row_of(bit / CHUNK_ROWS, bit % CHUNK_ROWS);
            }
        }
    }

    // Asks for the rows of a turn that begins at a place, if it has come to be known where they are
    // and that they are computed. Its own first threads are the first warp's that wrote them down.
    __device__ __forceinline__ void prefetch(Place place) const {
        if (MASK == ALL_ROWS || MASK == ZERO_OTHERS) return;
        if (MASK == KEEP_OTHERS && arguments.where != nullptr) return;
        const Place own = place + threadIdx.x;
        if (threadIdx.x < ROWS_PER_BLOCK && exists(own)) {
            prefetch_row<SPLIT_ROWS, ALIGNED, VEC_SIZE>(arguments, row_at(own, threadIdx.x));
        }
    }

    // Bits of neighbouring rows that one thread looks up: all at once, and as one word where
    // `where` is the only mask and has its elements, one for each row, on whole words.
    __device__ __forceinline__ unsigned look_at(long long row) const {
        const bool shared = SPLIT_ROWS && arguments.mask_rows.count != 1;
        const bool* const where = arguments.where + row;
        if (!shared && arguments.valid_rows == nullptr && row + LOOK_ROWS <= arguments.rows &&
            reinterpret_cast<unsigned long long>(where) % LOOK_ROWS == 0) {
            Pack<unsigned, LOOK_ROWS / 4> bytes;
            load_pack<KEEP, true>(bytes, reinterpret_cast<const unsigned*>(where));
            unsigned bits = 0;
#pragma unroll
            for (int i = 0; i < LOOK_ROWS / 4; ++i) {
                // Whatever a byte holds but 0 sets its highest bit; that of byte b goes to 28 + b.
                const unsigned set = ((bytes.data[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes.data[i];
                bits |= ((set >> 7 & 0x01010101u) * 0x10204080u >> 28) << 4 * i;
            }
            return bits;
        }
        const long long valid =
            arguments.valid_rows == nullptr ? arguments.rows : valid_rows<SPLIT_ROWS>(arguments);
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < LOOK_ROWS; ++i) {
            const bool computed =
                row + i < valid && arguments.where[mask_element<SPLIT_ROWS>(arguments, row + i)];
            if (computed) bits |= 1u << i;
        }
        return bits;
    }
};
