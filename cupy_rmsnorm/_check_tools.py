# SPDX-License-Identifier: Apache-2.0
"""The rules on arguments that come without x: bound weights and warm-up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from ._call import Array, Cast, Masked, WarmupCall
from ._check import CASTS, MASKED, Options, axes_of, not_trailing, row_dtypes
from ._dtypes import ROW_DTYPES
from ._refuse import (
    choice,
    count,
    divides,
    dtype_among,
    epsilon,
    flag,
    grouped,
    lone_constant,
    no_axes,
    offset,
    partial,
    shown,
)

OPERATIONS = (
    *(
        f"{add}{norm}_norm{kind}"
        for add in ("", "add_")
        for norm in ("rms", "layer")
        for kind in ("", "_forward", "_backward")
    ),
    "qk_norm",
)


def check_bound(
    weight: Array | float | None,
    bias: Array | float | None,
    options: Options,
    out_dtype: str | None = None,
) -> None:
    """What can be said of a weight, a bias and options before x comes."""
    epsilon(options.eps)
    axes = _axes(options.axis)
    if out_dtype is not None:
        dtype_among("out_dtype", out_dtype, ROW_DTYPES)
    grouped(options.groups, axes=axes, per_head=flag("per_head", options.per_head))
    partial(options.partial)
    choice("cast", options.cast, CASTS)
    offset(options.weight_offset, weighted=weight is not None)
    lone_constant(weight, bias)
    for parameter in (weight, bias):
        if not isinstance(parameter, Array):
            continue
        dtype_among(parameter.name, parameter.dtype, ROW_DTYPES)
        if not parameter.shape:
            no_axes(parameter.name, "the normalised shape")


def _axes(axis: object) -> int:
    """How many axes; refuses those that are trailing ones of no x."""
    given = sorted(axes_of(axis))
    length = len(given)
    counted_from_end = all(one < 0 for one in given) and given != list(range(-length, 0))
    if not given or len(set(given)) < length or counted_from_end:
        not_trailing(axis)
    return length


def check_only_calls(*others: object) -> None:
    """Refuse warm-up arguments beside `calls`."""
    if any(other is not None for other in others):
        raise TypeError("calls must come alone, got other arguments beside it")


def check_calls(calls: object, check: Callable[..., WarmupCall]) -> list[WarmupCall]:
    """The records of many warm-up calls; what is wrong with one of them names it."""
    if not isinstance(calls, Iterable) or isinstance(calls, (str, bytes, Mapping)):
        raise TypeError(f"calls must be an iterable of mappings, got {shown(calls)}")
    known = inspect.signature(check).parameters
    checked = []
    for index, call in enumerate(calls):
        where = f"calls[{index}]"
        if not isinstance(call, Mapping):
            raise TypeError(f"{where} must be a mapping, got {shown(call)}")
        for name in call:
            if name not in known:
                raise TypeError(f"{where} must have keys of {', '.join(known)}, got {name!r}")
        try:
            checked.append(check(**call))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    return checked


def check_warmup(
    op: object,
    hidden_size: object,
    rounding: object,
    per_head: object,
    masked: object,
    groups: object = 1,
    columns: object = None,
    need_dx: object = True,
    need_dweight: object = True,
    **dtypes: str | None,
) -> WarmupCall:
    """The checked record of a call to prepare; dtypes that are not given follow x's."""
    op = choice("op", op, OPERATIONS)
    size = count("hidden_size", hidden_size)
    dtype = dtypes.pop("dtype")
    if dtype is None:
        raise TypeError("dtype must be a dtype, got None")
    for name, other in [("dtype", dtype), *dtypes.items()]:
        allowed = ROW_DTYPES if name == "dtype" else row_dtypes(dtype)
        if other is not None:
            dtype_among(name, other, allowed)
    by_head = flag("per_head", per_head)
    parts = grouped(groups, axes=1, per_head=by_head)
    divides(parts, size, "hidden_size")
    is_backward = op.endswith("_backward")
    adds = op.startswith("add_") and not is_backward
    for name, value, has in (
        ("residual_dtype", dtypes["residual_dtype"], adds),
        ("bias_dtype", dtypes["bias_dtype"], op != "qk_norm"),
        ("dout_dtype", dtypes["dout_dtype"], is_backward),
        (
            "dweight_dtype",
            dtypes["dweight_dtype"],
            is_backward and dtypes["weight_dtype"] is not None,
        ),
        ("masked", masked, op != "qk_norm"),
        ("partial", columns, "rms_norm" in op),
    ):
        if value is not None and not has:
            what = {"masked": "mask", "partial": "such option"}.get(name, "such array")
            raise ValueError(f"{name} must be None, since the call has no {what}")
    needs_dx, needs_dweight = flag("need_dx", need_dx), flag("need_dweight", need_dweight)
    for name, needs in (("need_dx", needs_dx), ("need_dweight", needs_dweight)):
        if not (needs or is_backward):
            raise ValueError(f"{name} must be True, since the call has no such option, got False")
    if parts > 1 and op == "qk_norm":
        raise ValueError(f"groups must be 1, since the call has no such option, got {parts}")
    out_dtype = dtypes["out_dtype"] or dtype
    if is_backward and not op.startswith("add_") and out_dtype != dtype:
        raise ValueError(f"out_dtype must be {dtype}, since dx has x's dtype, got {out_dtype}")
    dweight_dtype = dtypes["dweight_dtype"] or dtypes["weight_dtype"]
    return WarmupCall(
        op=op,
        hidden_size=size // parts,
        dtype=dtype,
        weight_dtype=dtypes["weight_dtype"],
        bias_dtype=dtypes["bias_dtype"],
        residual_dtype=(dtypes["residual_dtype"] or dtype) if adds else None,
        out_dtype=out_dtype,
        dout_dtype=(dtypes["dout_dtype"] or dtype) if is_backward else None,
        dweight_dtype=dweight_dtype if is_backward and needs_dweight else None,
        cast=cast(Cast, choice("cast", rounding, CASTS)),
        per_head=by_head or parts > 1,
        masked=None if masked is None else cast(Masked, choice("masked", masked, MASKED)),
        groups=parts,
        partial=partial(columns, size // parts),
        need_dx=needs_dx,
    )
