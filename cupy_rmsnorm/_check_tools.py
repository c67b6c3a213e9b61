# SPDX-License-Identifier: Apache-2.0
"""The rules on arguments that come without x: bound weights and warm-up."""

from __future__ import annotations

import operator
from typing import Any, cast

from ._call import Array, Cast, Masked, WarmupCall
from ._check import CASTS, MASKED, Options, row_dtypes
from ._dtypes import ROW_DTYPES
from ._refuse import choice, dtype_among, epsilon, flag, no_axes, offset, shown

OPERATIONS = (
    *(
        f"{add}{norm}_norm{kind}"
        for add in ("", "add_")
        for norm in ("rms", "layer")
        for kind in ("", "_forward", "_backward")
    ),
    "qk_norm",
)


def check_bound(weight: Array | float | None, bias: Array | float | None, options: Options) -> None:
    """What can be said of a weight, a bias and options before x comes."""
    epsilon(options.eps)
    flag("per_head", options.per_head)
    choice("cast", options.cast, CASTS)
    offset(options.weight_offset, weighted=weight is not None)
    for parameter in (weight, bias):
        if not isinstance(parameter, Array):
            continue
        dtype_among(parameter.name, parameter.dtype, ROW_DTYPES)
        if not parameter.shape:
            no_axes(parameter.name, "the normalised shape")


def check_only_calls(*others: object) -> None:
    """Refuse warm-up arguments beside `calls`."""
    if any(other is not None for other in others):
        raise TypeError("calls must come alone, got other arguments beside it")


def check_warmup(
    op: object,
    hidden_size: object,
    rounding: object,
    per_head: object,
    masked: object,
    **dtypes: str | None,
) -> WarmupCall:
    """The checked record of a call to prepare; dtypes that are not given follow x's."""
    op = choice("op", op, OPERATIONS)
    try:
        if isinstance(hidden_size, bool):
            raise TypeError
        size = operator.index(cast(Any, hidden_size))
    except TypeError:
        raise TypeError(f"hidden_size must be an int, got {shown(hidden_size)}") from None
    if size < 1:
        raise ValueError(f"hidden_size must be at least 1, got {size}")
    dtype = dtypes.pop("dtype")
    if dtype is None:
        raise TypeError("dtype must be a dtype, got None")
    for name, other in [("dtype", dtype), *dtypes.items()]:
        allowed = ROW_DTYPES if name == "dtype" else row_dtypes(dtype)
        if other is not None:
            dtype_among(name, other, allowed)
    is_backward = op.endswith("_backward")
    adds = op.startswith("add_") and not is_backward
    for name, has in (
        ("residual_dtype", adds),
        ("dout_dtype", is_backward),
        ("dweight_dtype", is_backward and dtypes["weight_dtype"] is not None),
    ):
        if dtypes[name] is not None and not has:
            raise ValueError(f"{name} must be None, since the call has no such array")
    return WarmupCall(
        op=op,
        hidden_size=size,
        dtype=dtype,
        weight_dtype=dtypes["weight_dtype"],
        bias_dtype=dtypes["bias_dtype"],
        residual_dtype=(dtypes["residual_dtype"] or dtype) if adds else None,
        out_dtype=dtypes["out_dtype"] or dtype,
        dout_dtype=(dtypes["dout_dtype"] or dtype) if is_backward else None,
        dweight_dtype=(dtypes["dweight_dtype"] or dtypes["weight_dtype"]) if is_backward else None,
        cast=cast(Cast, choice("cast", rounding, CASTS)),
        per_head=flag("per_head", per_head),
        masked=None if masked is None else cast(Masked, choice("masked", masked, MASKED)),
    )
