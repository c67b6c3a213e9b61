# SPDX-License-Identifier: Apache-2.0
"""Plans and launches of the backward kernels. Pure, and by the rule of `_plan`: the plan, which
orders the sums behind dx, follows from hidden size, dtypes and architecture alone.

dweight and dbias are sums over rows: their order follows from the launch too, that is from the
number of rows and of SMs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ._dtypes import TABLE
from ._plan import MAX_GRID, VECTOR_BYTES, WARP, Plan, shared_limit, vector_size

# A thread sums dweight and dbias of this many elements of a row in registers, counted in 4-byte
# words of the accumulation type; in the longest rows of 16 and 32 bits twice as many.
HELD_WORDS = 16
MAX_THREADS = 512  # with so many registers a thread
CLUSTER_SIZES = (1, 2, 4, 8)
# Clusters lie within a part of the GPU that has 10 to 20 SMs; what is left there stays idle. A grid
# of more clusters than run at once would take twice as long: larger ones take so many eighths of
# the SMs, as clusters for the rest may find no room; which SMs are left varies by GPU.
CLUSTER_EIGHTHS = 7
# The thresholds below were read off benchmarks/results/sweep_backward.json (H200).
# Rows share a block until it has this many threads, or this many bytes of a stage: fewer where a
# row lies within a warp. A ring of rows keeps an SM busy with few threads.
BLOCK_THREADS = 512
WARP_ROWS_BLOCK_THREADS = 256
BLOCK_ROW_BYTES = 48 * 1024
# And until every SM has so many groups of rows to take in turn.
GROUPS_PER_SM = 4
FEW_BLOCK_THREADS = 256
# Of elements of so many bytes, a row takes all of HELD_WORDS up to the first number of threads,
# then half of them up to the second, then all of them again. With a gradient of the residual a
# stage has room for fewer rows of 32 bits, so that each needs more threads to fill its block.
ROW_THREADS = {2: (256, 896), 4: (128, 512)}
RESIDUAL_ROW_THREADS = ROW_THREADS | {4: (WARP, 512)}
CLUSTER_THREADS = 256  # where a block of a cluster holds twice as many words
# Two blocks an SM where rows lie within a warp.
MAX_BLOCKS_PER_SM = 2  # bounds the workspace: parts of dweight are 2 * SMs at most
MAX_STAGES = 4
# Two stages, three in a cluster, or as many as these bytes of an SM hold: with more on its way
# memory slows down.
RING_BYTES = 64 * 1024
WARP_ROWS_RING_BYTES = 32 * 1024
# Shared memory for the reduction's slots, beyond `_plan`'s reserve.
EXTRA_RESERVE = 1024
MBARRIER_BYTES = 8  # of a row on its way
# With the mbarriers of many short rows a block may exceed the 48 KB that it has unasked though the
# ring alone does not. From the first number of bytes on it takes the second, for which it must ask.
ASK_FROM, ASKED = 31 * 1024, 47 * 1024 + 16
# Up to so many rows an SM, blocks beside those of dx sum dweight and dbias from x and dout.
FEW_ROWS_PER_SM = 2
FEW_COLUMN_PACKS = 8  # packs of columns a block: 128 bytes of 16-bit rows
FEW_ROOM = 8 * 1024  # bytes of shared memory for these blocks' sums
STREAMED_THREADS = 512
PARTIAL_BLOCK_PACKS = 8192  # of a partial row that one block takes
COLUMN_THREADS = 128
SUM_COLUMNS = 32  # elements that one block of the sum takes at once
# (parts up to, threads that share one element): the first line that fits decides.
SUM_SLICES = ((64, 8), (192, 16), (2**63, 32))
# How many answers each function remembers: a training step asks for the same few again and again.
LIMIT = 512


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """How the rows of one backward call are spread over blocks and how their bytes move."""

    kernel: str
    grid: int
    block: int
    shared_bytes: int = 0
    rows_per_block: int = 1
    stages: int = 1  # groups of rows on their way to shared memory
    parts: int = 0  # blocks (clusters) that share the rows of one head, each with its own sums
    bulk: bool = False  # a row comes by one request where its layout allows it


def ring_limit(arch: int) -> int:
    """Bytes of shared memory that a ring of rows may take in one block."""
    return shared_limit(arch) - EXTRA_RESERVE


def _asked(shared_bytes: int) -> int:
    return max(shared_bytes, ASKED) if shared_bytes >= ASK_FROM else shared_bytes


@functools.lru_cache(maxsize=LIMIT)
def choose_backward_plan(
    hidden_size: int, x_dtype: str, staged_itemsize: int, arch: int, partial: bool = False
) -> Plan:
    """The plan of a backward row; `staged_itemsize` counts x, dout and dresidual_out."""
    itemsize = TABLE[x_dtype].itemsize
    words = max(1, itemsize // 4)  # of one element in the accumulation type
    vec_size = vector_size(hidden_size, itemsize)
    packs = hidden_size // vec_size
    if partial:
        return _partial_plan(packs, vec_size, arch)
    held = max(1, HELD_WORDS // (words * vec_size))
    threads = -(-packs // held)
    if threads <= WARP:
        threads = 1 << (threads - 1).bit_length()
        return Plan("norm_backward", vec_size, -(-packs // threads), threads)
    most = held if words > 1 else 2 * held
    table = ROW_THREADS if staged_itemsize <= 2 * itemsize else RESIDUAL_ROW_THREADS
    full, half = table.get(itemsize, (MAX_THREADS, MAX_THREADS))
    for cluster_size, vecs, most_threads in (
        (1, held, full),
        (1, max(1, held // 2), half),
        (1, held, MAX_THREADS),
        *((size, most, CLUSTER_THREADS) for size in CLUSTER_SIZES[1:]),
        (1, most, MAX_THREADS),
        (CLUSTER_SIZES[-1], most, MAX_THREADS),
    ):
        share = -(-packs // cluster_size)
        threads = -(-share // (vecs * WARP)) * WARP
        shared_bytes = threads * vecs * vec_size * staged_itemsize
        if threads > most_threads or shared_bytes > ring_limit(arch):
            continue
        if cluster_size == 1 or arch >= 90:
            vecs = -(-share // threads)
            return Plan("norm_backward", vec_size, vecs, threads, cluster_size)
    cluster_size = CLUSTER_SIZES[-1] if arch >= 90 else 1
    return Plan("norm_backward_streamed", vec_size, 0, STREAMED_THREADS, cluster_size)


def _partial_plan(packs: int, vec_size: int, arch: int) -> Plan:
    """One kernel knows of partial rows: it reads x and dout once more, from the L2 cache."""
    threads = min(STREAMED_THREADS, -(-packs // WARP) * WARP)
    long = packs > PARTIAL_BLOCK_PACKS and arch >= 90
    cluster_size = CLUSTER_SIZES[-1] if long else 1
    return Plan("norm_backward_streamed", vec_size, 0, threads, cluster_size)


@functools.lru_cache(maxsize=LIMIT)
def choose_backward_launch(
    plan: Plan,
    rows: int,
    heads: int,
    staged_itemsize: int,
    arch: int,
    sm_count: int,
) -> BackwardLaunch:
    """The launch of `rows` >= 1 rows."""
    threads = plan.threads_per_row
    positions = rows // heads
    aim = WARP_ROWS_BLOCK_THREADS if threads <= WARP else BLOCK_THREADS
    rows_per_block = max(1, aim // threads) if plan.cluster_size == 1 else 1
    row_bytes = threads * plan.vecs_per_thread * plan.vec_size * staged_itemsize
    room = row_bytes + MBARRIER_BYTES
    while rows_per_block * threads > WARP and rows_per_block > 1:
        blocks = -(-positions // rows_per_block) * heads
        if blocks >= GROUPS_PER_SM * sm_count and rows_per_block * row_bytes <= BLOCK_ROW_BYTES:
            break
        rows_per_block //= 2  # too few blocks for the SMs, or too long rows
    block = threads * rows_per_block
    blocks_per_sm = MAX_BLOCKS_PER_SM if threads <= WARP else 1
    units = blocks_per_sm * sm_count // plan.cluster_size
    if plan.cluster_size > 2:
        units = units * CLUSTER_EIGHTHS // 8
    parts = max(1, min(-(-positions // rows_per_block), units // heads))
    # Without asynchronous copies a row that is on its way holds up the one that is there.
    most = MAX_STAGES if arch >= 80 else 1
    fitting = ring_limit(arch) // blocks_per_sm // (rows_per_block * room)
    ring_bytes = WARP_ROWS_RING_BYTES if threads <= WARP else RING_BYTES
    enough = max(
        3 if plan.cluster_size > 1 else 2,
        ring_bytes // blocks_per_sm // (rows_per_block * row_bytes),
    )
    stages = max(1, min(most, fitting, enough))
    grid = parts * heads * plan.cluster_size
    assert grid <= MAX_GRID
    # With more bytes than those of x and a dout of its dtype, of a gradient of the residual where
    # this was measured, copies by the threads are faster.
    two_arrays = plan.vec_size * staged_itemsize <= 2 * VECTOR_BYTES
    return BackwardLaunch(
        "norm_backward",
        grid=grid,
        block=block,
        shared_bytes=_asked(stages * rows_per_block * row_bytes),
        rows_per_block=rows_per_block,
        stages=stages,
        parts=parts,
        bulk=arch >= 90 and stages > 1 and plan.cluster_size > 1 and two_arrays,
    )


@functools.lru_cache(maxsize=LIMIT)
def choose_few_launch(
    plan: Plan, hidden_size: int, rows: int, staged_itemsize: int, arch: int, sm_count: int
) -> BackwardLaunch | None:
    """The launch of norm_backward_few; None if there are too many rows, or too long ones."""
    threads = plan.threads_per_row
    rows_per_block = max(1, FEW_BLOCK_THREADS // threads)
    block = rows_per_block * threads
    shared_bytes = block * plan.vecs_per_thread * plan.vec_size * staged_itemsize
    if plan.cluster_size > 1 or plan.kernel != "norm_backward" or rows > FEW_ROWS_PER_SM * sm_count:
        return None
    if shared_bytes + FEW_ROOM > ring_limit(arch):
        return None
    parts = -(-rows // rows_per_block)
    columns = -(-(hidden_size // plan.vec_size) // FEW_COLUMN_PACKS)
    return BackwardLaunch(
        "norm_backward_few",
        parts + columns,
        block,
        _asked(shared_bytes),
        rows_per_block,
        parts=parts,
    )


def streamed_launch(plan: Plan, rows: int) -> BackwardLaunch:
    """The launch of rows that are streamed."""
    grid = rows * plan.cluster_size
    return BackwardLaunch("norm_backward_streamed", grid, plan.threads_per_row)


@functools.lru_cache(maxsize=LIMIT)
def choose_columns_launch(
    plan: Plan, hidden_size: int, rows: int, heads: int, sm_count: int
) -> BackwardLaunch:
    """The launch that sums dweight and dbias for streamed rows, one thread a pack of columns."""
    chunks = -(-(hidden_size // plan.vec_size) // COLUMN_THREADS)
    # Enough blocks for the SMs, and at most the bound on the workspace.
    parts = max(1, min(rows // heads, -(-4 * sm_count // (chunks * heads)), 2 * sm_count))
    grid = chunks * heads * parts
    assert grid <= MAX_GRID
    return BackwardLaunch("norm_backward_columns", grid, COLUMN_THREADS, parts=parts)


@functools.lru_cache(maxsize=LIMIT)
def choose_sum_launch(elements: int, parts: int, sums: int) -> BackwardLaunch:
    """The launch that sums the parts of `sums` gradients of `elements` each."""
    chunks = min(-(-elements // SUM_COLUMNS), MAX_GRID // 2)
    slices = next(slices for limit, slices in SUM_SLICES if parts <= limit)
    return BackwardLaunch("norm_backward_sum", chunks * sums, SUM_COLUMNS * slices, parts=parts)
