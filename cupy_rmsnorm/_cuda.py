# SPDX-License-Identifier: Apache-2.0
"""The CuPy backend: a checked call becomes a plan, a specialisation and a launch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from . import _cuda_backward, _kernel, _plan_file
from ._call import Array, Backward, Cast, Forward, Norm
from ._device import current_device
from ._dtypes import TABLE
from ._enqueue import Launched
from ._kernel import Specialisation
from ._operands import Operands
from ._plan import (
    VECTOR_BYTES,
    Launch,
    PairLaunch,
    Plan,
    choose_launch,
    choose_pair_launch,
    choose_plan,
    choose_walkers,
    loads_weight_early,
    row_itemsize,
)

_MASKS = {None: "ALL_ROWS", "keep": "KEEP_OTHERS", "zero": "ZERO_OTHERS"}
_FORWARD_OUTPUTS = frozenset(("y", "residual_out", "mean", "rstd"))
_ROW_ARRAYS = ("y", "residual_out", "x", "residual")


@dataclass(frozen=True, slots=True)
class ForwardKind:
    """What a forward call computes, apart from sizes and places. Dtypes by name."""

    norm: Norm
    y: str
    x: str
    residual: str | None = None
    weight: str | None = None  # None: a constant factor
    bias: str | None = None  # None: no bias; "constant": one number
    valid_rows: str = "int64"
    cast: Cast = "once"
    masked: str | None = None  # None: every row is computed
    per_head: bool = False
    partial: bool = False

    @classmethod
    def of(cls, call: Forward) -> ForwardKind:
        bias = call.bias
        mask_given = call.where is not None or call.valid_rows is not None
        return cls(
            norm=call.norm,
            y=call.y.dtype,
            x=call.x.dtype,
            residual=None if call.residual is None else call.residual.dtype,
            weight=call.weight.dtype if isinstance(call.weight, Array) else None,
            bias=bias.dtype if isinstance(bias, Array) else None if bias is None else "constant",
            valid_rows="int64" if call.valid_rows is None else call.valid_rows.dtype,
            cast=call.cast,
            masked=call.masked if mask_given else None,
            per_head=call.per_head,
            partial=call.partial is not None,
        )

    @property
    def staged_itemsize(self) -> int:
        """Bytes that one element of a row takes where the row is held as it came."""
        return row_itemsize(self.x, self.residual)

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of an element of weight and bias, where they are arrays."""
        return sum(TABLE[name].itemsize for name in (self.weight, self.bias) if name in TABLE)


def forward_plan(kind: ForwardKind, hidden_size: int, device: int) -> Plan:
    """The plan of such rows: a loaded one, or the library's own."""
    row = (kind.norm, hidden_size, kind.x, kind.residual)
    return _plan_file.forward_plan(device, *row) or choose_plan(
        *row, _kernel.device_properties(device).arch
    )


def forward(call: Forward, plan: Plan | None = None) -> Launched | None:
    """Run a checked forward call on the GPU of its arrays; returns what was launched.

    `plan`, if it is given, stands in place of the one that such calls have.
    """
    if call.rows == 0:
        return None
    kind = ForwardKind.of(call)
    with current_device(call.space.device.index):
        operands = _operands(call)
        device = call.space.device.index
        properties = _kernel.device_properties(device)
        plan = plan or forward_plan(kind, call.hidden_size, device)
        launch = choose_launch(
            plan,
            call.rows,
            kind.staged_itemsize,
            properties.sm_count,
            kind.masked,
            call.where is not None,
        )
        specialisation = specialise_forward(
            kind,
            call.hidden_size,
            plan,
            launch,
            arch=properties.arch,
            aligned=operands.aligned(plan.vec_size, VECTOR_BYTES),
            split_rows=_splits_rows(call, operands),
        )
        function = _kernel.function(specialisation, device, launch.shared_bytes)
        takes_turns = kind.masked == "keep" and (call.where is None or launch.teams > 0)
        if takes_turns and plan.kernel == "norm_forward" and not launch.walkers:
            resident = _kernel.resident_blocks(function, launch.block, device)
            launch = dataclasses.replace(launch, walkers=choose_walkers(launch, resident))
        arguments = _forward_arguments(call, operands, launch)
        packed = _kernel.pack(plan.kernel, TABLE[kind.x].accumulation or "", arguments)
        launched = _kernel.launch(
            function, launch.grid, launch.block, launch.shared_bytes, call.space.stream, packed
        )
        operands.finish()
        return launched


def forward_pair(q: Forward, k: Forward) -> Launched | None:
    """Run both halves of qk_norm: in one launch where one kernel computes either."""
    kind, device = ForwardKind.of(q), q.space.device.index
    alike = kind == dataclasses.replace(ForwardKind.of(k), per_head=kind.per_head)
    plan = forward_plan(kind, q.hidden_size, device)
    if not alike or q.rows == 0 or k.rows == 0 or plan.kernel != "norm_forward":
        forward(q)
        forward(k)
        return None
    with current_device(device):
        halves = {"q": (q, _operands(q)), "k": (k, _operands(k))}
        launch = choose_pair_launch(
            plan,
            q.rows,
            k.rows,
            kind.staged_itemsize,
            _kernel.device_properties(device).sm_count,
        )
        specialisation = specialise_pair(
            kind,
            q.hidden_size,
            plan,
            launch,
            aligned=all(o.aligned(plan.vec_size, VECTOR_BYTES) for _, o in halves.values()),
            split_rows=any(_splits_rows(*half) for half in halves.values()),
        )
        arguments: dict[str, float] = {"k_share": launch.k_share}
        for name, half in halves.items():
            values = _forward_arguments(*half, launch)
            arguments |= {f"{name}.{key}": value for key, value in values.items()}
        launched = _kernel.launch(
            _kernel.function(specialisation, device),
            launch.grid,
            launch.block,
            0,
            q.space.stream,
            _kernel.pack("norm_forward_pair", TABLE[kind.x].accumulation or "", arguments),
        )
        for _, operands in halves.values():
            operands.finish()
        return launched


def backward(call: Backward, plan: Plan | None = None) -> _cuda_backward.Launches | None:
    """Run a checked backward call on the GPU of its arrays; both are as in `forward`."""
    with current_device(call.space.device.index):
        return _cuda_backward.backward(call, plan)


def _operands(call: Forward) -> Operands:
    return Operands(
        call,
        rows={
            "x": call.x,
            "residual": call.residual,
            "y": call.y,
            "residual_out": call.residual_out,
        },
        others={
            "weight": call.weight if isinstance(call.weight, Array) else None,
            "bias": call.bias if isinstance(call.bias, Array) else None,
            "where": call.where,
            "valid_rows": call.valid_rows,
            "mean": call.mean,
            "rstd": call.rstd,
        },
        outputs=_FORWARD_OUTPUTS,
    )


def _splits_rows(call: Forward, operands: Operands) -> bool:
    return call.per_head or operands.layout.inner_rows != call.rows


def _forward_arguments(call: Forward, operands: Operands, launch: Launch) -> dict[str, float]:
    arguments: dict[str, float] = {
        "rows": call.rows,
        "hidden_size": call.hidden_size,
        "partial": call.partial or call.hidden_size,
        "weight_stride": call.hidden_size if call.per_head else 0,
        "bias_stride": call.hidden_size if call.per_head else 0,
        "eps": call.eps,
        "weight_offset": call.weight_offset,
        "weight_constant": 0.0 if isinstance(call.weight, Array) else call.weight,
        "bias_constant": call.bias if isinstance(call.bias, float) else 0.0,
        "next_early": launch.next_early,
        "teams": launch.teams,
        "team_reciprocal": -(-(2**31) // max(1, launch.teams)),
        "members": launch.members,
        "walkers": launch.walkers,
    }
    arguments |= _kernel.row_count("inner_rows", operands.layout.inner_rows)
    arguments |= _kernel.row_count("mask_rows", call.mask_rows)
    return arguments | operands.places(_kernel.FORWARD_PARAMETERS, _ROW_ARRAYS)


def specialise_pair(
    kind: ForwardKind,
    hidden_size: int,
    plan: Plan,
    launch: PairLaunch,
    *,
    aligned: bool,
    split_rows: bool,
) -> Specialisation:
    """The instantiation that computes q and k, both of `kind`, by `plan`."""
    alone = specialise_forward(
        kind, hidden_size, plan, launch, arch=0, aligned=aligned, split_rows=split_rows
    )
    _, y, x, _, weight, _, _, *geometry_and_flags, _, _ = alone.template_arguments
    return Specialisation("norm_forward_pair", (y, x, weight, *geometry_and_flags))


def specialise_forward(
    kind: ForwardKind,
    hidden_size: int,
    plan: Plan,
    launch: Launch,
    *,
    arch: int,
    aligned: bool,
    split_rows: bool,
) -> Specialisation:
    """The instantiation that computes `kind` by `plan`."""

    def cpp(dtype: str | None, absent: str) -> str:
        return absent if dtype is None else TABLE[dtype].cpp

    def flag(value: bool) -> str:
        return "true" if value else "false"

    types = (
        "LAYER" if kind.norm == "layer" else "RMS",
        cpp(kind.y, ""),
        cpp(kind.x, ""),
        cpp(kind.residual, "Absent"),
        cpp(kind.weight, "Constant"),
        "Constant" if kind.bias == "constant" else cpp(kind.bias, "Absent"),
        cpp(kind.valid_rows, ""),
    )
    geometry: tuple[int, ...]
    flags: tuple[bool, ...]
    held = plan.vec_size * plan.vecs_per_thread * plan.threads_per_row * plan.cluster_size
    full = held == hidden_size
    before_weight = kind.cast == "before_weight"
    mask = _MASKS[kind.masked]
    if plan.kernel == "norm_forward":
        geometry = (
            plan.vec_size,
            plan.vecs_per_thread,
            plan.threads_per_row,
            launch.rows_per_block,
        )
        early = loads_weight_early(plan, launch, kind.staged_itemsize, kind.parameter_itemsize)
        flags = (full, aligned, split_rows, before_weight, early)
        flags += (launch.evict_first, launch.spare_registers)
        mask = "DEAL_ROWS" if launch.teams else mask
    elif plan.kernel == "norm_forward_staged":
        geometry = (
            plan.vec_size,
            plan.vecs_per_thread,
            plan.threads_per_row,
            plan.cluster_size,
        )
        pack_bytes = plan.vec_size * TABLE[kind.x].itemsize
        asynchronous = aligned and arch >= 80 and pack_bytes % VECTOR_BYTES == 0
        flags = (full, aligned, split_rows, before_weight, asynchronous)
    else:
        geometry = (plan.vec_size, plan.threads_per_row, plan.cluster_size)
        flags = (aligned, split_rows, before_weight)
    return Specialisation(
        plan.kernel,
        (*types, *map(str, geometry), *map(flag, (*flags, kind.partial)), mask),
    )
