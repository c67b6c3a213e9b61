# SPDX-License-Identifier: Apache-2.0
"""How a row is computed (Plan) and how a call is launched (Launch). Pure: no CuPy, no device.

A Plan follows from norm, hidden size, dtypes and architecture alone, because it fixes which
elements each thread sums and in which order. A Launch may look at everything else (rows, alignment,
strides, the number of SMs), because it only changes how bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ._call import Norm
from ._dtypes import TABLE

VECTOR_BYTES = 16  # the widest load of a thread that every architecture has
WARP = 32
MAX_THREADS = 1024
MAX_GRID = 2**31 - 1

# The thresholds below were read off benchmarks/results/sweep.json (H200).
# Rows up to this many bytes of x are held in registers; longer ones are staged in shared memory:
# at 64 KB registers are still as fast as shared memory, at 128 KB a block has too few registers.
# LayerNorm, which holds its row over two sums, counts the residual too, where one block can hold
# both in shared memory by vector loads.
REGISTER_ROW_BYTES = 64 * 1024
# A thread holds at most this many elements of a row in registers.
MAX_HELD_ELEMENTS = 64
# (packs of a row up to, vectors a thread aimed at): the first line that fits decides. A sum with a
# residual holds two arrays, so it aims at half as many; LayerNorm's second reduction favours rows
# that one warp holds, and few warps where that is too many.
VECS_PER_THREAD = {
    "rms": ((3, 1), (32, 2), (64, 1), (128, 4), (288, 2), (400, 3), (512, 2), (2048, 4), (4096, 8)),
    "add": ((16, 1), (32, 2), (64, 1), (128, 4), (400, 2), (512, 1), (2048, 2), (4096, 4)),
    "layer": (
        *((3, 1), (8, 2), (32, 4), (64, 2), (128, 4), (192, 6), (256, 4), (448, 5)),
        *((512, 4), (896, 5), (1024, 4), (4096, 8)),
    ),
    "wide layer": ((8, 1), (64, 2), (128, 4), (288, 2), (400, 3), (1536, 4), (4096, 8)),
}
# Threads that aim at more are fewer warps for a row, which is worth idle lanes in the last.
MAX_FILLED_VECS = 4
# Rows that vector loads do not divide move by narrow packs: longer than a warp's, many a thread.
NARROW_PACKS = 128
NARROW_VECS_PER_THREAD = ((1024, 5), (REGISTER_ROW_BYTES, 16))
# Weight and bias are loaded before the sum is known where a thread then holds at most so many bytes
# of them and its row: more would take the registers of other rows, of which small blocks have more.
# Where they are wider than the row they come late in large blocks whose threads hold few elements:
# early, RMSNorm 16384 x 4096 bf16 with a bias took longer, where 8192 columns, twice as many a
# thread, took less. Where rows are few no others want the registers.
EARLY_WEIGHT_BYTES = 128
EARLY_WIDE_WEIGHT_BYTES, EARLY_WIDE_WEIGHT_ELEMENTS = 192, 32
SMALL_BLOCK_EARLY_WEIGHT_BYTES, SMALL_BLOCK_THREADS = 240, 128
FEW_ROWS_EARLY_WEIGHT_BYTES = 256
EARLY_WEIGHT_VECS = 8  # more, of narrow packs, are as many loads in the row's way
# Rows of up to so many bytes in all, x and residual, ask to be evicted from the L2 first, which is
# faster. More of them would find it full of what they may not evict, and be slower.
EVICT_FIRST_BYTES = 8 * 1024 * 1024
# Bytes of a staged row that one block holds; longer ones take a cluster.
BLOCK_ROW_BYTES = 128 * 1024
MAX_CLUSTER_SIZE = 8  # the largest that every architecture with clusters grants
STAGED_VECS_PER_THREAD = 8
STAGED_ADD_VECS_PER_THREAD = 4  # of x and of a residual, in one block
MAX_STAGED_VECS_PER_THREAD = 32
STREAMED_THREADS = 512
# Short rows share a block until it has this many threads.
BLOCK_THREADS = 128
# Where launches overlap, the next kernel of the stream takes its places while this one begins. If
# both just fit side by side, its blocks go where there is room and not where they are balanced: it
# then takes its places only when this one stores. And where no more than half of the threads are
# resident, they have twice the registers of those that fill an SM.
THREADS_PER_SM = 2048
# A GPU begins so many blocks a microsecond and no more, whether they have a row to compute or not.
# Of masked rows that are left as they are it gets one for every few turns, and of those that are
# set to zero one for so many bytes of short rows; but as many as fill it, if there are.
COUNTED_WALK = 8  # turns, where valid_rows says which rows they are
DEALT_WALK = 10
ZEROED_BYTES = 8 * 1024
# From more than so many times what fills it, blocks that look rows up deal them among themselves.
MASKED_DEAL = 2
FEWEST_WALKERS = 2
MASKED_WINDOW = 32 * 32  # rows that such blocks look at, as in block_rows.cuh
# Shared memory a block may ask for, by architecture, less room for the reduction's slots.
SHARED_RESERVE = 1024
SHARED_LIMITS = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of a row's sums: who holds which elements."""

    kernel: str
    vec_size: int
    vecs_per_thread: int  # 0: streamed, as many as the row needs
    threads_per_row: int  # of one block
    cluster_size: int = 1
    early_weight: bool = True  # weights may be loaded before the sum is known; changes no bits


@dataclass(frozen=True, slots=True)
class Launch:
    """How the rows of one call are spread over blocks."""

    grid: int
    block: int
    shared_bytes: int
    rows_per_block: int
    few_rows: bool = False  # not enough to give every SM a block
    evict_first: bool = False  # what is moved is of no use to the L2; changes no bits
    spare_registers: bool = False  # every block is resident at once and may take more of them
    next_early: bool = True  # the next kernel may take its places before this one's loads
    teams: int = 0  # of blocks that deal what a mask leaves of their windows; 0: nothing is dealt
    walkers: int = 0  # members that take more than one turn; 0: not known before the kernel is

    @property
    def members(self) -> int:
        """Blocks of a team, or all of them."""
        return self.grid // max(1, self.teams)


@dataclass(frozen=True, slots=True)
class PairLaunch(Launch):
    """How the rows of q and k are spread over the blocks of one launch."""

    k_share: int = 0  # of the blocks, times 2^62, rounded up


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that one block may ask for on `arch`; a newer one gets the least."""
    kilobytes = SHARED_LIMITS.get(arch, min(SHARED_LIMITS.values()))
    return kilobytes * 1024 - SHARED_RESERVE


def vector_size(hidden_size: int, itemsize: int) -> int:
    """Elements a pack: the largest power of two that divides the row and fits a vector load."""
    size = VECTOR_BYTES // itemsize
    while hidden_size % size:
        size //= 2
    return size


def row_itemsize(x_dtype: str, residual_dtype: str | None) -> int:
    """Bytes that one element of a row takes where the row is held as it came."""
    return TABLE[x_dtype].itemsize + (TABLE[residual_dtype].itemsize if residual_dtype else 0)


def whole_warps(threads: int) -> int:
    """`threads` rounded up: to what divides a warp, or to whole warps."""
    if threads <= WARP:
        return 1 << (threads - 1).bit_length()
    return -(-threads // WARP) * WARP


def choose_plan(
    norm: Norm, hidden_size: int, x_dtype: str, residual_dtype: str | None, arch: int
) -> Plan:
    """The plan of a forward row."""
    itemsize = TABLE[x_dtype].itemsize
    vec_size = vector_size(hidden_size, itemsize)
    packs = hidden_size // vec_size
    staged_itemsize = row_itemsize(x_dtype, residual_dtype)
    narrow = vec_size * itemsize < VECTOR_BYTES
    staged = _staged_plan(packs, vec_size, staged_itemsize, residual_dtype is not None, arch)
    held = hidden_size * itemsize <= REGISTER_ROW_BYTES
    if held and norm == "layer" and not narrow and staged and staged.cluster_size == 1:
        held = hidden_size * staged_itemsize <= REGISTER_ROW_BYTES
    if held:
        table: str = "add" if norm == "rms" and residual_dtype else norm
        if norm == "layer" and itemsize > 2:
            table = "wide layer"
        return _register_plan(table, packs, vec_size, narrow)
    if staged is not None:
        return staged
    cluster_size = MAX_CLUSTER_SIZE if arch >= 90 else 1
    return Plan("norm_forward_streamed", vec_size, 0, STREAMED_THREADS, cluster_size)


def _register_plan(table: str, packs: int, vec_size: int, narrow: bool) -> Plan:
    aim = next((vecs for limit, vecs in VECS_PER_THREAD[table] if packs <= limit), 8)
    if narrow and packs > NARROW_PACKS:
        aim = next(vecs for limit, vecs in NARROW_VECS_PER_THREAD if packs <= limit)
    if packs > WARP * aim and (narrow or aim <= MAX_FILLED_VECS):
        # A row that fills its warps to the last pack needs no test of where it ends.
        near = (vecs for vecs in (aim, aim + 1, aim - 1) if vecs * vec_size <= MAX_HELD_ELEMENTS)
        aim = next((vecs for vecs in near if vecs and packs % (WARP * vecs) == 0), aim)
    threads = min(whole_warps(-(-packs // aim)), MAX_THREADS)
    vecs_per_thread = -(-packs // threads)
    assert vecs_per_thread * vec_size <= MAX_HELD_ELEMENTS
    return Plan("norm_forward", vec_size, vecs_per_thread, threads)


def _staged_plan(
    packs: int, vec_size: int, staged_itemsize: int, add: bool, arch: int
) -> Plan | None:
    staged_bytes = packs * vec_size * staged_itemsize
    cluster_size = 1 if arch < 90 or staged_bytes <= BLOCK_ROW_BYTES else MAX_CLUSTER_SIZE
    share = -(-packs // cluster_size)
    aim = STAGED_ADD_VECS_PER_THREAD if add and cluster_size == 1 else STAGED_VECS_PER_THREAD
    threads = 256
    while threads < MAX_THREADS and share > threads * aim:
        threads *= 2
    vecs_per_thread = -(-share // threads)
    shared_bytes = vecs_per_thread * threads * vec_size * staged_itemsize
    if vecs_per_thread > MAX_STAGED_VECS_PER_THREAD or shared_bytes > shared_limit(arch):
        return None
    return Plan("norm_forward_staged", vec_size, vecs_per_thread, threads, cluster_size)


def choose_launch(
    plan: Plan,
    rows: int,
    staged_itemsize: int,
    sm_count: int,
    masked: str | None = None,
    where: bool = False,
) -> Launch:
    """The launch of `rows` >= 1 rows; `staged_itemsize` counts x and residual.

    `masked`: as in `ForwardKind`; `where`: rows are looked up one by one.
    """
    threads = plan.threads_per_row
    if plan.kernel != "norm_forward":
        shared_bytes = plan.vecs_per_thread * threads * plan.vec_size * staged_itemsize
        return Launch(rows * plan.cluster_size, threads, shared_bytes, 1)
    rows_per_block = _rows_per_block(plan)
    few_rows = rows <= most_few_rows(plan, sm_count)
    if few_rows:
        rows_per_block = max(1, WARP // threads)
    block = threads * rows_per_block
    grid = min(-(-rows // rows_per_block), MAX_GRID)
    teams = 0
    if masked is not None:
        deals = masked == "keep" and where and rows >= fewest_dealt_rows(plan, sm_count)
        enough = grid
        if masked == "keep" and (deals or not where):
            enough = -(-grid // (DEALT_WALK if deals else COUNTED_WALK))
        elif masked == "zero" and rows_per_block > 1:
            held = _held_bytes(plan, staged_itemsize) * rows_per_block
            enough = -(-grid * held // ZEROED_BYTES)
        grid = min(grid, max(enough, _filling(block, sm_count)))
        if deals:
            teams = -(-rows // MASKED_WINDOW)
            grid = teams * min(-(-grid // teams), MAX_GRID // teams)
    evict_first = rows <= rows_evicted_first(plan, staged_itemsize)
    launch = Launch(grid, block, 0, rows_per_block, few_rows, evict_first, teams=teams)
    return beside_others(launch, sm_count, walks=masked is not None)


def beside_others(launch: Launch, sm_count: int, *, walks: bool = False) -> Launch:
    """A launch of norm_forward with what follows from how many threads an SM then has.

    `walks`: a block may compute several rows.
    """
    threads = -(-launch.grid // sm_count) * launch.block
    half = THREADS_PER_SM // 2
    return replace(
        launch,
        spare_registers=launch.evict_first and threads <= half and not walks,
        next_early=not half // 2 < threads <= half,
    )


def most_few_rows(plan: Plan, sm_count: int) -> int:
    """The most rows that do not give every SM a block, by a plan of norm_forward."""
    return (sm_count - 1) * _rows_per_block(plan)


def most_spare_rows(plan: Plan, staged_itemsize: int, sm_count: int) -> int:
    """The most rows of a call whose blocks have registers to spare, by a plan of norm_forward."""
    rows_per_block = _rows_per_block(plan)
    blocks = THREADS_PER_SM // 2 // (plan.threads_per_row * rows_per_block)
    rows = sm_count * blocks * rows_per_block
    return min(rows, rows_evicted_first(plan, staged_itemsize))


def _rows_per_block(plan: Plan) -> int:
    """How many rows share a block of norm_forward, where they are not few."""
    return max(1, BLOCK_THREADS // plan.threads_per_row)


def choose_walkers(launch: Launch, resident: int) -> int:
    """How many members of a launch take more than one turn, where so many blocks fit at once: those
    of them, unless they are too few of each team for the teams to come out even."""
    walkers = resident // max(1, launch.teams)
    return min(walkers, launch.members) if walkers >= FEWEST_WALKERS else launch.members


def fewest_dealt_rows(plan: Plan, sm_count: int) -> int:
    """The fewest rows that blocks deal among themselves, by a plan of norm_forward."""
    rows_per_block = _rows_per_block(plan)
    filling = _filling(plan.threads_per_row * rows_per_block, sm_count)
    return MASKED_DEAL * filling * rows_per_block + 1


def _filling(block: int, sm_count: int) -> int:
    """How many blocks of so many threads fill a GPU, did they take few registers."""
    return THREADS_PER_SM // block * sm_count


def rows_evicted_first(plan: Plan, staged_itemsize: int) -> int:
    """The most rows of a call that does without the L2, by a plan of norm_forward."""
    return EVICT_FIRST_BYTES // _held_bytes(plan, staged_itemsize)


def _held_bytes(plan: Plan, staged_itemsize: int) -> int:
    """Bytes of registers for a row and its residual, by a plan of norm_forward."""
    return plan.vec_size * plan.vecs_per_thread * plan.threads_per_row * staged_itemsize


def loads_weight_early(
    plan: Plan, launch: Launch, staged_itemsize: int, parameter_itemsize: int
) -> bool:
    """Whether weight and bias, which `parameter_itemsize` counts, come before the sum.

    Rows of one warp meet at no barrier behind which the loads could hide.
    """
    if not plan.early_weight or plan.threads_per_row <= WARP:
        return plan.early_weight
    elements = plan.vec_size * plan.vecs_per_thread
    held = elements * (staged_itemsize + parameter_itemsize)
    if launch.few_rows:
        most = FEW_ROWS_EARLY_WEIGHT_BYTES
    elif plan.threads_per_row <= SMALL_BLOCK_THREADS:
        most = SMALL_BLOCK_EARLY_WEIGHT_BYTES
    elif parameter_itemsize <= staged_itemsize:
        most = EARLY_WEIGHT_BYTES
    else:
        most = EARLY_WIDE_WEIGHT_BYTES if elements >= EARLY_WIDE_WEIGHT_ELEMENTS else 0
    return held <= most and plan.vecs_per_thread <= EARLY_WEIGHT_VECS


def choose_pair_launch(
    plan: Plan, q_rows: int, k_rows: int, staged_itemsize: int, sm_count: int
) -> PairLaunch:
    """The launch of q and k together, for a plan of norm_forward."""
    together = choose_launch(plan, q_rows + k_rows, staged_itemsize, sm_count)
    q_blocks, k_blocks = (
        min(-(-rows // together.rows_per_block), MAX_GRID // 2) for rows in (q_rows, k_rows)
    )
    grid = q_blocks + k_blocks
    return PairLaunch(
        grid,
        together.block,
        0,
        together.rows_per_block,
        together.few_rows,
        together.evict_first,
        together.spare_registers,
        together.next_early,
        k_share=-(-(k_blocks << 62) // grid),
    )
