# SPDX-License-Identifier: Apache-2.0
"""The plans that may be tried for a row, and why another cannot run. Pure, like `_plan`.

`cupy-rmsnorm tune` and the sweeps measure these candidates, `load_plans` accepts no other plan, and
the test table has a row for each class of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from . import _plan, _plan_backward
from ._call import Norm
from ._dtypes import TABLE
from ._plan import (
    WARP,
    Plan,
    choose_plan,
    row_itemsize,
    shared_limit,
    vector_size,
    whole_warps,
)
from ._plan_backward import choose_backward_plan, ring_limit

# Vectors a thread: of rows in registers, of rows of which backward sums dweight in registers too.
HELD_VECS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
BACKWARD_VECS = (1, 2, 4)
# A plan whose threads could hold so many times the row, or more, wastes too much of them.
MOST_HELD = 1.34
BACKWARD_MOST_HELD = 1.2
# The weight may be loaded after the sum where a row has warps of threads with so many vectors each.
LATE_WEIGHT_VECS = 8
# Rows from so many bytes on may be staged in shared memory.
STAGED_ROW_BYTES = 32 * 1024
STAGED_THREADS = (256, 512, 1024)
STAGED_VECS = 16
STREAMED_THREADS = (256, 512, 1024)
FORWARD_KERNELS = ("norm_forward", "norm_forward_staged", "norm_forward_streamed")
BACKWARD_KERNELS = ("norm_backward", "norm_backward_streamed")
CLUSTER_SIZES = (1, 2, 4, 8)
# Backward: a cluster's block has at least so many elements of a row longer than the second number.
CLUSTER_SHARE, BLOCK_ROW = 4096, 8192
# Backward: fewer threads leave an SM idle where rows have more elements, or lie in a cluster.
FEW_THREADS, FEW_THREADS_ROW = 224, 4096
REGISTERS = 65536  # of an SM
REGISTERS_APART = 36  # of a thread in backward, beside what it holds of a row
MAX_BACKWARD_WORDS = 64  # of 4 bytes, for the sums of a thread


def forward_candidates(
    norm: Norm, hidden_size: int, x_dtype: str, residual_dtype: str | None, arch: int
) -> tuple[Plan, ...]:
    """Every plan of a forward row that makes sense, the library's own first."""
    own = choose_plan(norm, hidden_size, x_dtype, residual_dtype, arch)
    itemsize = TABLE[x_dtype].itemsize
    plans = [own, *_held(hidden_size, itemsize), *_staged(hidden_size, itemsize)]
    if own.kernel == "norm_forward_streamed":
        plans += _streamed(own)
    row = (hidden_size, x_dtype, residual_dtype, arch)
    return tuple(dict.fromkeys(plan for plan in plans if not forward_fault(plan, *row)))


def backward_candidates(
    norm: Norm, hidden_size: int, x_dtype: str, staged_itemsize: int, arch: int
) -> tuple[Plan, ...]:
    """The same of backward; `staged_itemsize` counts x, dout and dresidual_out."""
    own = choose_backward_plan(hidden_size, x_dtype, staged_itemsize, arch)
    plans = [own, *_summed(norm, hidden_size, TABLE[x_dtype].itemsize)]
    if own.kernel == "norm_backward_streamed":
        plans += _streamed(own)
    row = (hidden_size, x_dtype, staged_itemsize, arch)
    return tuple(dict.fromkeys(plan for plan in plans if not backward_fault(plan, *row)))


def _held(hidden_size: int, itemsize: int) -> Iterator[Plan]:
    """Rows in registers."""
    vec_size = vector_size(hidden_size, itemsize)
    packs = hidden_size // vec_size
    if hidden_size * itemsize > _plan.REGISTER_ROW_BYTES:
        return
    for aim in HELD_VECS:
        threads = whole_warps(-(-packs // aim))
        vecs = -(-packs // threads)
        if vecs > 1 and threads < 4:
            continue
        if threads * vecs * vec_size > MOST_HELD * hidden_size:
            continue
        yield Plan("norm_forward", vec_size, vecs, threads)
        if vecs >= LATE_WEIGHT_VECS and threads > WARP:
            yield Plan("norm_forward", vec_size, vecs, threads, early_weight=False)


def _staged(hidden_size: int, itemsize: int) -> Iterator[Plan]:
    """Rows in the shared memory of a block or a cluster."""
    vec_size = vector_size(hidden_size, itemsize)
    if hidden_size * itemsize < STAGED_ROW_BYTES or vec_size == 1:
        return
    for cluster_size in CLUSTER_SIZES:
        share = -(-(hidden_size // vec_size) // cluster_size)
        for threads in STAGED_THREADS:
            vecs = -(-share // threads)
            if 2 <= vecs <= STAGED_VECS:
                yield Plan("norm_forward_staged", vec_size, vecs, threads, cluster_size)


def _streamed(own: Plan) -> Iterator[Plan]:
    """Rows that nothing holds."""
    for threads in STREAMED_THREADS:
        yield dataclasses.replace(own, threads_per_row=threads)


def _summed(norm: Norm, hidden_size: int, itemsize: int) -> Iterator[Plan]:
    """Backward: rows in shared memory, sums over rows in registers."""
    vec_size = vector_size(hidden_size, itemsize)
    packs = hidden_size // vec_size
    words_of_element = max(1, itemsize // 4)
    for cluster_size in CLUSTER_SIZES:
        share = -(-packs // cluster_size)
        if cluster_size > 1 and (hidden_size <= BLOCK_ROW or share * vec_size < CLUSTER_SHARE):
            continue
        for aim in BACKWARD_VECS:
            threads = whole_warps(-(-share // aim))
            vecs = -(-share // threads)
            row_words = vecs * vec_size * words_of_element
            words = row_words * (2 if norm == "layer" else 1)  # dweight, and dbias
            if threads < 8 or words > MAX_BACKWARD_WORDS:
                continue
            if threads * vecs * vec_size * cluster_size > BACKWARD_MOST_HELD * hidden_size:
                continue
            if threads * (words + row_words * 3 // 2 + REGISTERS_APART) > REGISTERS:
                continue
            if threads < FEW_THREADS and (cluster_size > 1 or hidden_size > FEW_THREADS_ROW):
                continue
            yield Plan("norm_backward", vec_size, vecs, threads, cluster_size)


# Why a plan cannot run ----------------------------------------------------------------------------


def forward_fault(
    plan: Plan, hidden_size: int, x_dtype: str, residual_dtype: str | None, arch: int
) -> str:
    """Why this plan cannot compute such rows on `arch`; "" if it can."""
    itemsize = TABLE[x_dtype].itemsize
    if fault := _fault(plan, FORWARD_KERNELS, hidden_size, itemsize, arch):
        return fault
    if plan.kernel == "norm_forward":
        held = plan.vecs_per_thread * plan.vec_size
        if plan.cluster_size > 1:
            return "norm_forward has no clusters"
        if held > _plan.MAX_HELD_ELEMENTS:
            return f"a thread holds at most {_plan.MAX_HELD_ELEMENTS} elements, not {held}"
    if plan.kernel == "norm_forward_staged":
        needed = _held_by_a_block(plan) * row_itemsize(x_dtype, residual_dtype)
        if needed > shared_limit(arch):
            return f"a block has {shared_limit(arch)} bytes of shared memory, it needs {needed}"
    return ""


def backward_fault(
    plan: Plan, hidden_size: int, x_dtype: str, staged_itemsize: int, arch: int
) -> str:
    """The same of backward."""
    if fault := _fault(plan, BACKWARD_KERNELS, hidden_size, TABLE[x_dtype].itemsize, arch):
        return fault
    if plan.kernel == "norm_backward":
        rows = max(1, WARP // plan.threads_per_row)  # of the smallest block
        row_bytes = _held_by_a_block(plan) * staged_itemsize + _plan_backward.MBARRIER_BYTES
        if rows * row_bytes > ring_limit(arch):
            needed = rows * row_bytes
            return f"a block has {ring_limit(arch)} bytes of shared memory, it needs {needed}"
    return ""


def _fault(plan: Plan, kernels: tuple[str, ...], hidden_size: int, itemsize: int, arch: int) -> str:
    if plan.kernel not in kernels:
        return f"kernel must be one of {', '.join(kernels)}, got {plan.kernel[:40]!r}"
    threads = plan.threads_per_row
    wide = vector_size(hidden_size, itemsize)
    if plan.vec_size != wide:
        return f"vec_size must be {wide}, got {plan.vec_size}"
    if not 1 <= threads <= _plan.MAX_THREADS:
        return f"threads_per_row must be 1 to {_plan.MAX_THREADS}, got {threads}"
    if threads != whole_warps(threads):
        return f"threads_per_row must be a power of two up to 32 or whole warps, got {threads}"
    if plan.cluster_size not in CLUSTER_SIZES:
        return f"cluster_size must be one of {CLUSTER_SIZES}, got {plan.cluster_size}"
    if plan.cluster_size > 1 and arch < 90:
        return f"this GPU has no clusters, cluster_size must be 1, got {plan.cluster_size}"
    if plan.kernel == kernels[-1]:  # streamed
        return "" if plan.vecs_per_thread == 0 else "vecs_per_thread of a streamed row must be 0"
    if plan.vecs_per_thread < 1:
        return f"vecs_per_thread must be at least 1, got {plan.vecs_per_thread}"
    share = -(-(hidden_size // plan.vec_size) // plan.cluster_size)
    if plan.vecs_per_thread * threads < share:
        most = _held_by_a_block(plan) * plan.cluster_size
        return f"it holds {most} elements of a row of {hidden_size}"
    return ""


def _held_by_a_block(plan: Plan) -> int:
    """Elements of one row."""
    return plan.threads_per_row * plan.vecs_per_thread * plan.vec_size
