# SPDX-License-Identifier: Apache-2.0
"""The backward half of the CuPy backend.

Few rows take one launch where the statistics are given, dx lies apart from x and heads share their
weight: some of its blocks write dx while others sum dweight and dbias. Otherwise these sums are
left in parts, which a second launch adds up. Rows that no cluster holds take up to four launches.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from . import _kernel, _plan_file
from ._call import Array, Backward, Cast, Norm
from ._dtypes import TABLE
from ._kernel import Specialisation
from ._operands import Operands
from ._plan import VECTOR_BYTES, Plan
from ._plan_backward import (
    FEW_COLUMN_PACKS,
    LIMIT,
    SUM_COLUMNS,
    BackwardLaunch,
    choose_backward_launch,
    choose_backward_plan,
    choose_columns_launch,
    choose_few_launch,
    choose_sum_launch,
    streamed_launch,
)

if TYPE_CHECKING:
    from ._enqueue import Launched

_MASKS = {False: "ALL_ROWS", True: "ZERO_OTHERS"}
_OUTPUTS = frozenset(("dx", "dresidual", "dweight", "dbias"))
_ROW_ARRAYS = ("dx", "dresidual", "dout", "x", "dresidual_out")


@dataclass(frozen=True, slots=True)
class BackwardKind:
    """What a backward call computes, apart from sizes and places. Dtypes by name, None: absent."""

    norm: Norm
    dx: str | None
    dweight: str | None
    dbias: str | None
    dout: str
    x: str
    dresidual_out: str | None = None
    weight: str | None = None  # None: a constant factor
    given_mean: bool = False
    given_rstd: bool = False
    valid_rows: str = "int64"
    cast: Cast = "once"
    masked: bool = False
    partial: bool = False

    @classmethod
    def of(cls, call: Backward) -> BackwardKind:
        def dtype(array: Array | None) -> str | None:
            return None if array is None else array.dtype

        return cls(
            norm=call.norm,
            dx=dtype(call.dx),
            dweight=dtype(call.dweight),
            dbias=dtype(call.dbias),
            dout=call.dout.dtype,
            x=call.x.dtype,
            dresidual_out=dtype(call.dresidual_out) if call.dx is not None else None,
            weight=call.weight.dtype if isinstance(call.weight, Array) else None,
            given_mean=call.mean is not None,
            given_rstd=call.rstd is not None,
            valid_rows="int64" if call.valid_rows is None else call.valid_rows.dtype,
            cast=call.cast,
            masked=call.where is not None or call.valid_rows is not None,
            partial=call.partial is not None,
        )

    @property
    def staged_itemsize(self) -> int:
        """Bytes that one element of a row takes in shared memory."""
        staged = (self.x, self.dout, self.dresidual_out)
        return sum(TABLE[dtype].itemsize for dtype in staged if dtype)

    @property
    def accumulation(self) -> str:
        return TABLE[self.x].accumulation or ""

    @property
    def statistics_given(self) -> bool:
        """Whether nothing about the rows needs to be recomputed."""
        return self.given_rstd and (self.given_mean or self.norm == "rms")

    @property
    def sums(self) -> int:
        """How many gradients are sums over rows."""
        return (self.dweight is not None) + (self.dbias is not None)


def backward_plan(kind: BackwardKind, hidden_size: int, device: int) -> Plan:
    """The plan of such rows: a loaded one, or the library's own."""
    staged = (kind.x, kind.dout, kind.dresidual_out)
    if not kind.partial and (
        loaded := _plan_file.backward_plan(device, kind.norm, hidden_size, *staged)
    ):
        return loaded
    arch = _kernel.device_properties(device).arch
    return choose_backward_plan(hidden_size, kind.x, kind.staged_itemsize, arch, kind.partial)


class Launches(NamedTuple):
    """What a call launched, by kernel, and the workspace between, by the kernels' names for it."""

    launched: list[tuple[str, Launched]]
    workspace: dict[str, Array]


def backward(call: Backward, plan: Plan | None = None) -> Launches | None:
    """Run a checked backward call on its arrays' GPU, which is the current device.

    Returns what it launched, if that is a kernel over the rows, and maybe the sum of its parts.
    """
    if call.dx is None and call.dweight is None and call.dbias is None:
        return None
    return Run(call, plan).run()


class Run:
    """One call on its way: the arrays as kernels get them, the workspace, the launches."""

    def __init__(self, call: Backward, plan: Plan | None = None) -> None:
        self.call = call
        self.plan = plan
        self.kind = BackwardKind.of(call)
        self.properties = _kernel.device_properties(call.space.device.index)
        self.rows, self.hidden_size = call.rows, call.hidden_size
        self.heads = call.row_shape[-1] if call.per_head else 1
        self.elements = self.heads * self.hidden_size
        self.operands = Operands(
            call,
            rows={
                "dx": call.dx,
                "dresidual": call.dresidual,
                "dout": call.dout,
                "x": call.x,
                "dresidual_out": call.dresidual_out if call.dx is not None else None,
            },
            others={
                "weight": call.weight if isinstance(call.weight, Array) else None,
                "where": call.where,
                "valid_rows": call.valid_rows,
                "mean": call.mean,
                "rstd": call.rstd,
                "dweight": call.dweight,
                "dbias": call.dbias,
            },
            outputs=_OUTPUTS,
        )
        self.split_rows = call.per_head or self.operands.layout.inner_rows != self.rows
        self.workspace: dict[str, Array] = {}  # kept until everything is enqueued
        self.launched: list[tuple[str, Launched]] = []
        self.arguments = self._arguments()

    def run(self) -> Launches | None:
        call, kind = self.call, self.kind
        plain = False
        if self.rows == 0:
            self._sum_parts(0)
        else:
            device = call.space.device.index
            plan = self.plan or backward_plan(kind, self.hidden_size, device)
            plain = plan.kernel == "norm_backward"
            if plain:
                self._run_rows(plan)
            else:
                self._run_streamed(plan)
        self.operands.finish()
        return Launches(self.launched, self.workspace) if plain and self.launched else None

    def _run_rows(self, plan: Plan) -> None:
        kind = self.kind
        arch, sm_count = self.properties.arch, self.properties.sm_count
        few = choose_few_launch(
            plan, self.hidden_size, self.rows, kind.staged_itemsize, arch, sm_count
        )
        # Its blocks read x while others write dx.
        apart = kind.dx is not None and self.arguments["dx"] != self.arguments["x"]
        if few is not None and kind.sums and kind.statistics_given and apart and self.heads == 1:
            self.arguments["parts"] = few.parts
            self._launch(kind, plan, few)
            return
        launch = choose_backward_launch(
            plan, self.rows, self.heads, kind.staged_itemsize, arch, sm_count
        )
        self._allocate_parts(launch.parts)
        self._launch(kind, plan, launch)
        self._sum_parts(launch.parts)

    def _run_streamed(self, plan: Plan) -> None:
        """Statistics, then dweight and dbias, and dx at last: it may lie where x is."""
        kind = self.kind
        launch = streamed_launch(plan, self.rows)
        if kind.sums > 0:
            if not kind.statistics_given:
                for name in ("mean", "rstd"):
                    self._allocate(f"{name}_out", (self.rows,), kind.accumulation)
                statistics = dataclasses.replace(kind, dx=None, dresidual_out=None)
                self._launch(statistics, plan, launch)
                for name in ("mean", "rstd"):
                    self.arguments[name] = self.arguments[f"{name}_out"]
                kind = dataclasses.replace(kind, given_mean=True, given_rstd=True)
            columns = choose_columns_launch(
                plan, self.hidden_size, self.rows, self.heads, self.properties.sm_count
            )
            self._allocate_parts(columns.parts)
            self._launch(kind, plan, columns)
            self._sum_parts(columns.parts)
        if kind.dx is not None:
            self._launch(kind, plan, launch)

    def _launch(self, kind: BackwardKind, plan: Plan, launch: BackwardLaunch) -> None:
        specialisation = specialise_backward(
            kind,
            self.hidden_size,
            plan,
            launch,
            arch=self.properties.arch,
            aligned=self.operands.aligned(plan.vec_size, VECTOR_BYTES),
            split_rows=self.split_rows,
        )
        self.enqueue(specialisation, launch)

    def _sum_parts(self, parts: int) -> None:
        if self.kind.sums > 0 and self.elements > 0:
            self.arguments["parts"] = parts
            launch = choose_sum_launch(self.elements, parts, self.kind.sums)
            self.enqueue(specialise_sum(self.kind, launch), launch)

    def enqueue(self, specialisation: Specialisation, launch: BackwardLaunch) -> None:
        space = self.call.space
        function = _kernel.function(specialisation, space.device.index, launch.shared_bytes)
        packed = _kernel.pack(launch.kernel, self.kind.accumulation, self.arguments)
        launched = _kernel.launch(
            function, launch.grid, launch.block, launch.shared_bytes, space.stream, packed
        )
        if launched is not None:
            self.launched.append((launch.kernel, launched))

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Make room in the workspace for an argument."""
        self.workspace[name] = self.call.space.empty(name, shape, dtype)
        self.arguments[name] = self.workspace[name].pointer

    def _allocate_parts(self, parts: int) -> None:
        self.arguments["parts"] = parts
        for name in ("dweight", "dbias"):
            if getattr(self.kind, name) is not None:
                shape = (parts, self.elements)
                self._allocate(f"{name}_parts", shape, self.kind.accumulation)

    def _arguments(self) -> dict[str, float]:
        call, operands = self.call, self.operands
        arguments: dict[str, float] = {
            "rows": self.rows,
            "hidden_size": self.hidden_size,
            "partial": call.partial or self.hidden_size,
            "inner_rows": operands.layout.inner_rows,
            "heads": self.heads,
            "parts": 0,
            "elements": self.elements,
            "eps": call.eps,
            "weight_offset": call.weight_offset,
            "weight_constant": 0.0 if isinstance(call.weight, Array) else call.weight,
        }
        arguments |= _kernel.row_count("mask_rows", call.mask_rows)
        return arguments | operands.places(_kernel.BACKWARD_PARAMETERS, _ROW_ARRAYS)


@functools.lru_cache(maxsize=LIMIT)
def specialise_backward(
    kind: BackwardKind,
    hidden_size: int,
    plan: Plan,
    launch: BackwardLaunch,
    *,
    arch: int,
    aligned: bool,
    split_rows: bool,
) -> Specialisation:
    """The instantiation of the launch's kernel that computes `kind` by `plan`."""
    dx, dweight, dbias = _cpp(kind.dx), _cpp(kind.dweight), _cpp(kind.dbias)
    dout, x, dresidual_out = _cpp(kind.dout), _cpp(kind.x), _cpp(kind.dresidual_out)
    weight, valid_rows = _cpp(kind.weight, "Constant"), _cpp(kind.valid_rows)
    held = plan.vec_size * plan.vecs_per_thread * plan.threads_per_row * plan.cluster_size
    full = held == hidden_size
    before_weight = kind.cast == "before_weight"
    given = (kind.given_mean and kind.norm == "layer", kind.given_rstd)
    copy = _copy(kind, plan, launch, aligned and arch >= 80)
    types: tuple[str, ...]
    geometry: tuple[int, ...]
    flags: tuple[bool, ...]
    ways: tuple[str, ...] = ()
    if launch.kernel == "norm_backward_columns":
        types = (dweight, dbias, dout, x, valid_rows)
        geometry = (plan.vec_size, launch.block)
        flags = (aligned, split_rows, before_weight)
    elif launch.kernel == "norm_backward_streamed":
        types = (dx, dout, x, dresidual_out, weight, valid_rows)
        geometry = (plan.vec_size, plan.threads_per_row, plan.cluster_size)
        flags = (aligned, split_rows, *given, kind.partial)
    else:
        types = (dx, dweight, dbias, dout, x, dresidual_out, weight, valid_rows)
        geometry = (
            plan.vec_size,
            plan.vecs_per_thread,
            plan.threads_per_row,
            launch.rows_per_block,
        )
        if launch.kernel == "norm_backward_few":
            geometry += (FEW_COLUMN_PACKS,)
            flags = (full, aligned, split_rows, before_weight)
        else:
            geometry += (plan.cluster_size, launch.stages)
            flags = (full, aligned, split_rows, before_weight, *given)
        ways = (copy,)
    norm = "LAYER" if kind.norm == "layer" else "RMS"
    return Specialisation(
        launch.kernel,
        (norm, *types, *map(str, geometry), *map(_flag, flags), *ways, _MASKS[kind.masked]),
    )


def _copy(kind: BackwardKind, plan: Plan, launch: BackwardLaunch, asynchronous: bool) -> str:
    """How rows come to shared memory."""
    staged = (kind.x, kind.dout, kind.dresidual_out)
    wide = all(plan.vec_size * TABLE[dtype].itemsize == VECTOR_BYTES for dtype in staged if dtype)
    if not asynchronous:
        return "LOADS"
    return "BULK" if launch.bulk and wide and kind.dx is not None else "ASYNC"


@functools.lru_cache(maxsize=LIMIT)
def specialise_sum(kind: BackwardKind, launch: BackwardLaunch) -> Specialisation:
    """The instantiation that sums the parts of dweight and dbias."""
    types = (_cpp(kind.dweight), _cpp(kind.dbias), _cpp(kind.accumulation))
    return Specialisation(launch.kernel, (*types, str(launch.block // SUM_COLUMNS)))


def _cpp(dtype: str | None, absent: str = "Absent") -> str:
    return absent if dtype is None else TABLE[dtype].cpp


def _flag(value: bool) -> str:
    return "true" if value else "false"
