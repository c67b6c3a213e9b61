# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels of calls that are yet to come, on many threads and without running them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from . import _kernel
from ._call import Array, Backward, Device, Norm, WarmupCall
from ._cuda import ForwardKind, forward_plan, specialise_forward, specialise_pair
from ._cuda_backward import Run
from ._device import current_device
from ._kernel import Specialisation
from ._plan import (
    Plan,
    choose_launch,
    choose_pair_launch,
    fewest_dealt_rows,
    most_few_rows,
    most_spare_rows,
    rows_evicted_first,
)
from ._plan_backward import BackwardLaunch
from ._progress import Progress

Built = tuple[Specialisation, int]  # what to build, and the shared memory it may ask for

# Rows a backward call may have: which kernels run, and how many rows share a block, depends on
# that. From one row to more than any threshold.
ROWS = tuple(2**power for power in range(25))
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def warmup(calls: Iterable[WarmupCall]) -> None:
    """Build what `calls` need on the current device."""
    from cupy.cuda import runtime

    device = int(runtime.getDevice())
    wanted = dict.fromkeys(built for call in calls for built in specialisations(call, device))

    def build(built: Built) -> None:
        with current_device(device):
            _kernel.function(built[0], device, built[1])

    with Progress("Warm-up", len(wanted)) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(build, wanted):
            bar.step(1)


def specialisations(call: WarmupCall, device: int) -> Iterator[Built]:
    """What calls like this one may take, for any number of contiguous, aligned rows."""
    mask_dtypes: tuple[str, ...] = ("int64",) if call.masked is None else ("int64", "int32")
    for valid_rows in mask_dtypes:
        if call.op == "qk_norm":
            yield from _pair(call, device)
        elif call.op.endswith("_backward"):
            yield from _backward(call, valid_rows, device)
        else:
            yield from _forward(call, valid_rows, device)


def _norm(call: WarmupCall) -> Norm:
    return "layer" if "layer_norm" in call.op else "rms"


def _forward_kind(call: WarmupCall, valid_rows: str = "int64") -> ForwardKind:
    return ForwardKind(
        norm=_norm(call),
        y=call.out_dtype,
        x=call.dtype,
        residual=call.residual_dtype,
        weight=call.weight_dtype,
        bias=call.bias_dtype,
        valid_rows=valid_rows,
        cast=call.cast,
        masked=call.masked,
        per_head=call.per_head,
        partial=call.partial is not None,
    )


def _rows(plan: Plan, kind: ForwardKind, sm_count: int) -> list[int]:
    """A number of rows for each kernel that forward calls of any number of them take."""
    if plan.kernel != "norm_forward":
        return [1]
    limits = (
        most_few_rows(plan, sm_count),
        most_spare_rows(plan, kind.staged_itemsize, sm_count),
        rows_evicted_first(plan, kind.staged_itemsize),
    )
    return [max(1, limit + more) for limit in limits for more in (0, 1)]


def _pair(call: WarmupCall, device: int) -> Iterator[Built]:
    """Of qk_norm, whose q and k are as often parts of a packed buffer as arrays of their own."""
    kind, sm_count = _forward_kind(call), _kernel.device_properties(device).sm_count
    plan = forward_plan(kind, call.hidden_size, device)
    if plan.kernel != "norm_forward":
        yield from _forward(call, kind.valid_rows, device)
        return
    for rows, split_rows in itertools.product(_rows(plan, kind, sm_count), (True, False)):
        q_rows = max(1, rows // 2)
        k_rows = max(1, rows - q_rows)
        launch = choose_pair_launch(plan, q_rows, k_rows, kind.staged_itemsize, sm_count)
        specialisation = specialise_pair(
            kind, call.hidden_size, plan, launch, aligned=True, split_rows=split_rows
        )
        yield specialisation, launch.shared_bytes


def _forward(call: WarmupCall, valid_rows: str, device: int) -> Iterator[Built]:
    properties = _kernel.device_properties(device)
    kind = _forward_kind(call, valid_rows)
    plan = forward_plan(kind, call.hidden_size, device)
    kinds = [kind]
    if kind.weight is None and kind.bias is None and call.op != "qk_norm":
        kinds.append(dataclasses.replace(kind, bias="constant"))  # beside a constant weight
    counts = _rows(plan, kind, properties.sm_count)
    sizes = [(rows, False) for rows in counts]
    if kind.masked == "keep" and plan.kernel == "norm_forward":
        dealt = fewest_dealt_rows(plan, properties.sm_count)
        sizes += dict.fromkeys((max(rows, dealt), True) for rows in counts)
    for (rows, where), each in itertools.product(sizes, kinds):
        launch = choose_launch(
            plan, rows, each.staged_itemsize, properties.sm_count, each.masked, where
        )
        specialisation = specialise_forward(
            each,
            call.hidden_size,
            plan,
            launch,
            arch=properties.arch,
            aligned=True,
            split_rows=call.per_head,
        )
        yield specialisation, launch.shared_bytes


class _Nowhere:
    """A Space without memory: every address is aligned, and nothing is ever read or written."""

    stream = 0

    def __init__(self, device: int) -> None:
        self.device = Device("cuda", device)

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        # x and dx lie apart, as they do in a call without dx_out.
        return Array(name, None, 512 if name == "dx" else 256, shape, strides, dtype, self.device)

    def contiguous(self, array: Array) -> Array:
        raise AssertionError("arrays of a warm-up are contiguous")

    def assign(self, target: Array, source: Array) -> None:
        raise AssertionError("arrays of a warm-up are contiguous")


class _Recorder(Run):
    """A backward call that notes what it would launch."""

    def __init__(self, call: Backward) -> None:
        super().__init__(call)
        self.built: list[Built] = []

    def enqueue(self, specialisation: Specialisation, launch: BackwardLaunch) -> None:
        self.built.append((specialisation, launch.shared_bytes))


def _backward(call: WarmupCall, valid_rows: str, device: int) -> Iterator[Built]:
    heads = (call.groups,) if call.groups > 1 else HEADS if call.per_head else (0,)
    # The sum that an add_* function returns need not have been used.
    arriving = (True, False) if call.op.startswith("add_") else (False,)
    for rows, head_count, statistics, arrives in itertools.product(
        ROWS, heads, (True, False), arriving
    ):
        row_shape = (rows, head_count) if call.per_head else (rows,)
        prepared = _backward_call(call, row_shape, valid_rows, statistics, arrives, device)
        recorder = _Recorder(prepared)
        if recorder.kind.dx is not None or recorder.kind.sums > 0:
            recorder.run()
            yield from recorder.built


def _backward_call(
    call: WarmupCall,
    row_shape: tuple[int, ...],
    valid_rows: str,
    statistics: bool,
    arrives: bool,
    device: int,
) -> Backward:
    """Such a call; `arrives` says whether a gradient comes to residual_out."""
    space: Any = _Nowhere(device)
    shape, weight_shape = (*row_shape, call.hidden_size), (*row_shape[1:], call.hidden_size)
    adds = call.op.startswith("add_")
    layer = _norm(call) == "layer"
    accumulation: Literal["float32", "float64"] = (
        "float64" if call.dtype == "float64" else "float32"
    )

    def room(name: str, shape: tuple[int, ...], dtype: str | None) -> Array | None:
        return None if dtype is None else space.empty(name, shape, dtype)

    given = accumulation if statistics else None
    dresidual = call.dtype if adds and call.need_dx and call.dtype != call.out_dtype else None
    weight = room("weight", weight_shape, call.weight_dtype)
    return Backward(
        function=call.op,
        norm="layer" if layer else "rms",
        space=space,
        x=space.empty("x", shape, call.dtype),
        normalized_ndim=1,
        weight=1.0 if weight is None else weight,
        weight_offset=0.0,
        eps=0.0,
        cast=call.cast,
        per_head=call.per_head,
        where=room("where", row_shape, None if call.masked is None else "bool"),
        valid_rows=room("valid_rows", (), None if call.masked is None else valid_rows),
        masked="zero",
        partial=call.partial,
        mask_rows=call.groups,
        dout=space.empty("dout", shape, call.dout_dtype or call.dtype),
        dresidual_out=room("dresidual_out", shape, call.dtype if arrives else None),
        mean=room("mean", row_shape, given if layer else None),
        rstd=room("rstd", row_shape, given),
        dx=room("dx", shape, call.out_dtype if call.need_dx else None),
        dresidual=room("dresidual", shape, dresidual),
        dweight=room("dweight", weight_shape, call.dweight_dtype),
        dbias=room("dbias", weight_shape, call.bias_dtype),
    )
