# SPDX-License-Identifier: Apache-2.0
"""Every rule on a call's arguments, and every error message of the library.

`check_forward`, `check_backward` and `check_qk` turn described arrays and raw options into the
checked records that a backend runs. TypeError stands for a wrong kind or dtype, ValueError for a
wrong shape or value; each message names the argument, the rule and what came.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from . import _overlap
from ._call import Array, Backward, Cast, Forward, Masked, Norm, Space
from ._dtypes import ROW_DTYPES
from ._refuse import (
    choice,
    divides,
    dtype_among,
    either,
    epsilon,
    flag,
    grouped,
    lone_constant,
    no_axes,
    offset,
    partial,
)

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)  # below it a GPU reads zero
CASTS = ("once", "before_weight")
MASKED = ("keep", "zero")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options that every operation takes, as the caller gave them."""

    eps: object
    weight_offset: object = 0.0
    axis: object = -1
    cast: object = "once"
    per_head: object = False
    masked: object = "keep"
    groups: object = 1
    partial: object = None


# Rules on one array -------------------------------------------------------------------------


def _shape(array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{array.name} must have shape {shape}, got {array.shape}")


def _device(array: Array, x: Array) -> None:
    if array.device != x.device:
        raise ValueError(
            f"{array.name} must be on {x.name}'s device {x.device}, got {array.device}"
        )


def row_dtypes(x_dtype: str) -> tuple[str, ...]:
    """The dtypes that may stand beside `x_dtype`: float64 throughout, or not at all."""
    return ("float64",) if x_dtype == "float64" else ("float16", "bfloat16", "float32")


def _row_dtype(name: str, dtype: str, x: Array) -> None:
    dtype_among(name, dtype, row_dtypes(x.dtype), f" with a {x.dtype} {x.name}")


def _row_array(array: Array, x: Array, shape: tuple[int, ...]) -> None:
    """An array of values beside x: dtype, device, shape."""
    _row_dtype(array.name, array.dtype, x)
    _device(array, x)
    _shape(array, shape)


def _exact_dtype(array: Array, dtype: str, whose: str) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{array.name} must be {dtype}{whose}, got {array.dtype}")


def _statistic(array: Array, x: Array, row_shape: tuple[int, ...]) -> None:
    _exact_dtype(array, _statistic_dtype(x), "")
    _device(array, x)
    _shape(array, row_shape)


def _statistic_dtype(x: Array) -> str:
    return "float64" if x.dtype == "float64" else "float32"


def _parameter(value: Array | float | None, x: Array, shape: tuple[int, ...]) -> None:
    """A weight or bias: an array of exactly `shape`, or a constant."""
    if not isinstance(value, Array):
        return
    if not value.shape:
        no_axes(value.name, f"shape {shape}")
    _row_array(value, x, shape)


def _writable(array: Array) -> None:
    if array.readonly:
        raise ValueError(f"{array.name} must be writable, got a read-only array")
    if _overlap.repeats(array):
        raise ValueError(f"{array.name} must not have a stride of 0, got strides {array.strides}")
    if not _overlap.is_injective(array):
        raise ValueError(
            f"{array.name} must reach each element once, got shape {array.shape} with strides "
            f"{array.strides}"
        )


# Rules on the call --------------------------------------------------------------------------


def _x(x: Array) -> None:
    if x.dtype not in ROW_DTYPES:
        hint = ""
        if x.dtype == "void16":
            hint = " (a bfloat16 file loads so: use x.view(ml_dtypes.bfloat16))"
        raise TypeError(f"{x.name} must be {either(ROW_DTYPES)}, got {x.dtype}{hint}")
    if not x.shape:
        raise ValueError(f"{x.name} must have at least one axis, got shape ()")


def axes_of(axis: object) -> list[int]:
    """The argument `axis` as a list."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    try:
        if any(isinstance(one, (bool, np.bool_)) for one in axes):
            raise TypeError
        return [operator.index(cast(Any, one)) for one in axes]
    except TypeError:
        raise TypeError(f"axis must be an int or a tuple of ints, got {axis!r}") from None


def not_trailing(axis: object) -> NoReturn:
    """Refuse axes that are not the last ones."""
    raise ValueError(
        f"axis must be -1 or a tuple of trailing axes such as (-2, -1), got {axis}: "
        f"move the axis to the end first"
    )


def normalized_ndim(x: Array, axis: object) -> int:
    """How many trailing axes of `x` the argument `axis` names."""
    given = axes_of(axis)
    ndim = len(x.shape)
    for one in given:
        if not -ndim <= one < ndim:
            raise ValueError(f"axis must be within the {ndim} axes of {x.name}, got {axis}")
    if not given or sorted(one % ndim for one in given) != list(range(ndim - len(given), ndim)):
        not_trailing(axis)
    return len(given)


@dataclasses.dataclass(frozen=True, slots=True)
class _Common:
    """The checked options, ready for a record."""

    normalized_ndim: int
    row_shape: tuple[int, ...]
    statistic_shape: tuple[int, ...]
    parameter_shape: tuple[int, ...]
    eps: float
    weight_offset: float
    cast: Cast
    per_head: bool
    masked: Masked
    groups: int
    partial: int | None
    has_mask: bool


def _common(
    x: Array,
    weight: Array | float | None,
    bias: Array | float | None,
    where: Array | None,
    valid_rows: Array | None,
    options: Options,
    weight_name: str = "weight",
) -> _Common:
    """Check x, the options, the parameters and the masks."""
    _x(x)
    trailing = normalized_ndim(x, options.axis)
    leading = len(x.shape) - trailing
    if math.prod(x.shape[leading:]) == 0:
        raise ValueError(f"{x.name} must have a hidden size of at least 1, got shape {x.shape}")
    per_head = flag("per_head", options.per_head)
    if per_head and leading == 0:
        raise ValueError(
            f"per_head needs a head axis before the normalised axes of {x.name}, "
            f"got shape {x.shape}"
        )
    groups = grouped(options.groups, axes=trailing, per_head=per_head)
    divides(groups, x.shape[-1], f"{x.name}'s hidden size")
    row_shape, row_size = x.shape[:leading], math.prod(x.shape[leading:]) // groups
    parameter_shape = x.shape[leading - per_head :]
    weight_offset = offset(
        options.weight_offset, weighted=weight is not None, weight_name=weight_name
    )
    common = _Common(
        normalized_ndim=trailing,
        row_shape=row_shape,
        statistic_shape=row_shape if groups == 1 else (*row_shape, groups),
        parameter_shape=parameter_shape,
        eps=epsilon(options.eps),
        weight_offset=weight_offset,
        cast=cast(Cast, choice("cast", options.cast, CASTS)),
        per_head=per_head,
        masked=cast(Masked, choice("masked", options.masked, MASKED)),
        groups=groups,
        partial=partial(options.partial, row_size),
        has_mask=where is not None or valid_rows is not None,
    )
    constants = {"eps": common.eps, "weight_offset": weight_offset, weight_name: weight}
    lone_constant(weight, bias)
    _constants_fit(x, constants | {"bias": bias})
    _parameter(weight, x, parameter_shape)
    _parameter(bias, x, parameter_shape)
    if where is not None:
        _exact_dtype(where, "bool", "")
        _device(where, x)
        _shape(where, common.row_shape)
    if valid_rows is not None:
        dtype_among("valid_rows", valid_rows.dtype, ("int32", "int64"))
        _device(valid_rows, x)
        if valid_rows.shape not in ((), (1,)):
            raise ValueError(f"valid_rows must have shape () or (1,), got {valid_rows.shape}")
    return common


def _constants_fit(x: Array, constants: Mapping[str, Array | float | None]) -> None:
    if x.dtype == "float64":
        return
    eps = cast(float, constants["eps"])
    if 0 < eps < FLOAT32_TINY:
        raise ValueError(
            f"eps must be 0 or at least {FLOAT32_TINY:.4g}, float32's smallest normal number, "
            f"got {eps}"
        )
    for name, value in constants.items():
        if isinstance(value, (int, float)) and abs(value) > FLOAT32_MAX:
            raise ValueError(f"{name} must be finite in float32, got {value}")


def _out_dtype(name: str, out: Array | None, dtype: str | None, default: str, x: Array) -> str:
    """The dtype of an output: the given array decides, and a named dtype must agree."""
    if dtype is not None:
        _row_dtype(f"{name}_dtype", dtype, x)
    if out is None:
        return default if dtype is None else dtype
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"{name}_dtype must agree with {out.name}, {out.dtype}, got {dtype}")
    return out.dtype


def _overlaps(
    outputs: Sequence[Array | None],
    inputs: list[Array],
    in_place: Mapping[str, tuple[str, ...]],
) -> None:
    """Refuse an output that shares memory, unless it is exactly an input that it may replace:
    `in_place` has the names of these by the output's."""
    written = [array for array in outputs if array is not None]
    for position, output in enumerate(written):
        replaces = in_place.get(output.name, ())
        for other in written[position + 1 :] + inputs:
            if not _overlap.overlap(output, other):
                continue
            if other.name in replaces and _overlap.same(output, other):
                continue
            allowed = f", unless it is exactly {other.name}" if other.name in replaces else ""
            raise ValueError(
                f"{output.name} must not overlap {other.name}{allowed}, "
                f"got two views of the same memory"
            )


def keep_needs(names_given: Iterable[tuple[str, object]]) -> None:
    """Refuse to leave rows of a new output untouched."""
    for name, array in names_given:
        if array is None:
            raise ValueError(
                f"masked='keep' leaves rows untouched and needs {name}, got None: "
                f"pass {name} or masked='zero'"
            )


def check_forward(
    function: str,
    norm: Norm,
    space: Space,
    *,
    x: Array,
    residual: Array | None,
    weight: Array | float | None,
    bias: Array | float | None,
    where: Array | None,
    valid_rows: Array | None,
    options: Options,
    out: Array | None,
    out_dtype: str | None,
    residual_out: Array | None,
    mean_out: Array | None,
    rstd_out: Array | None,
    statistics: bool,
    out_name: str = "out",
    weight_name: str = "weight",
) -> Forward:
    """The checked record of a forward call, its outputs allocated."""
    common = _common(x, weight, bias, where, valid_rows, options, weight_name)
    wanted: list[tuple[str, Array | None]] = [(out_name, out)]
    y_dtype = _out_dtype(out_name, out, out_dtype, x.dtype, x)
    if residual is not None:
        _row_array(residual, x, x.shape)
        wanted.append(("residual_out", residual_out))
    if statistics:
        if norm == "layer":
            wanted.append(("mean_out", mean_out))
        wanted.append(("rstd_out", rstd_out))
    if out is not None:
        _row_array(out, x, x.shape)
    if residual_out is not None and residual is not None:
        _exact_dtype(residual_out, residual.dtype, ", residual's dtype")
        _device(residual_out, x)
        _shape(residual_out, x.shape)
    for statistic in (mean_out, rstd_out):
        if statistic is not None:
            _statistic(statistic, x, common.statistic_shape)
    outputs = [array for _, array in wanted if array is not None]
    if outputs:
        for array in outputs:
            _writable(array)
        inputs = _arrays(x, residual, weight, bias, where, valid_rows)
        replaced = (x.name, "residual")
        _overlaps(outputs, inputs, {out_name: replaced, "residual_out": replaced})
    if common.has_mask and common.masked == "keep":
        keep_needs(wanted)

    statistic_dtype = _statistic_dtype(x)

    def new_statistic(name: str) -> Array:
        return space.empty(name, common.statistic_shape, statistic_dtype)

    if residual is not None and residual_out is None:
        residual_out = space.empty("residual_out", x.shape, residual.dtype)
    if statistics and norm == "layer" and mean_out is None:
        mean_out = new_statistic("mean")
    if statistics and rstd_out is None:
        rstd_out = new_statistic("rstd")
    return Forward(
        function=function,
        norm=norm,
        space=space,
        x=x,
        normalized_ndim=common.normalized_ndim,
        weight=1.0 if weight is None else weight,
        weight_offset=common.weight_offset,
        eps=common.eps,
        cast=common.cast,
        per_head=common.per_head,
        where=where,
        valid_rows=valid_rows,
        masked=common.masked,
        groups=common.groups,
        partial=common.partial,
        residual=residual,
        bias=bias,
        y=space.empty("y", x.shape, y_dtype) if out is None else out,
        residual_out=residual_out,
        mean=mean_out,
        rstd=rstd_out,
    )


def check_backward(
    function: str,
    norm: Norm,
    space: Space,
    *,
    dout: Array,
    dresidual_out: Array | None,
    x: Array,
    weight: Array | float | None,
    bias: Array | float | None,
    mean: Array | None,
    rstd: Array | None,
    where: Array | None,
    valid_rows: Array | None,
    options: Options,
    need_dx: object,
    need_dweight: object,
    dx_out: Array | None,
    dweight_out: Array | None,
    dbias_out: Array | None,
    dweight_dtype: str | None,
    x_dtype: str | None,
    added: bool,
) -> Backward:
    """The checked record of a backward call, its outputs allocated.

    `added` says that x is the residual_out of an add_* function; `x_dtype` is then the dtype of
    that function's x.
    """
    if added:
        _in_order(dout, dresidual_out, x)
    common = _common(x, weight, bias, where, valid_rows, options)
    _row_array(dout, x, x.shape)
    if dresidual_out is not None:
        _row_array(dresidual_out, x, x.shape)
    if mean is not None and rstd is None:
        raise ValueError(
            "rstd must be given where mean is, got None: mean is the first of the two by "
            "position, pass both by name"
        )
    for statistic in (mean, rstd):
        if statistic is not None:
            _statistic(statistic, x, common.statistic_shape)

    wants_dx = flag("need_dx", need_dx)
    wants_dweight = flag("need_dweight", need_dweight) and isinstance(weight, Array)
    wants_dbias = isinstance(bias, Array)
    _no_gradient(dx_out, wants_dx, "need_dx=True")
    _no_gradient(dweight_out, wants_dweight, "a weight array and need_dweight=True")
    _no_gradient(dbias_out, wants_dbias, "a bias array")

    dx_dtype = x.dtype
    if added:
        dx_dtype = _x_dtype(dx_out, x_dtype, x)
    if dx_out is not None:
        _exact_dtype(dx_out, dx_dtype, "" if added else f", {x.name}'s dtype")
        _device(dx_out, x)
        _shape(dx_out, x.shape)
    weight_dtype = weight.dtype if isinstance(weight, Array) else x.dtype
    gradient_dtype = _out_dtype("dweight", dweight_out, dweight_dtype, weight_dtype, x)
    if dweight_out is not None:
        _row_array(dweight_out, x, common.parameter_shape)
    if dbias_out is not None and isinstance(bias, Array):
        _exact_dtype(dbias_out, bias.dtype, ", bias's dtype")
        _device(dbias_out, x)
        _shape(dbias_out, common.parameter_shape)
    outputs = [array for array in (dx_out, dweight_out, dbias_out) if array is not None]
    if outputs:
        for array in outputs:
            _writable(array)
        inputs = _arrays(x, dout, dresidual_out, weight, bias, mean, rstd, where, valid_rows)
        _overlaps(outputs, inputs, {"dx_out": (x.name,)})

    if wants_dx and dx_out is None:
        dx_out = space.empty("dx", x.shape, dx_dtype)
    if wants_dweight and dweight_out is None:
        dweight_out = space.empty("dweight", common.parameter_shape, gradient_dtype)
    if isinstance(bias, Array) and dbias_out is None:
        dbias_out = space.empty("dbias", common.parameter_shape, bias.dtype)
    dresidual = None
    if added and wants_dx and dx_dtype != x.dtype:
        dresidual = space.empty("dresidual", x.shape, x.dtype)
    return Backward(
        function=function,
        norm=norm,
        space=space,
        x=x,
        normalized_ndim=common.normalized_ndim,
        weight=1.0 if weight is None else weight,
        weight_offset=common.weight_offset,
        eps=common.eps,
        cast=common.cast,
        per_head=common.per_head,
        where=where,
        valid_rows=valid_rows,
        # The gradient of a row that was not computed is zero, whatever its output held.
        masked="zero",
        groups=common.groups,
        partial=common.partial,
        dout=dout,
        dresidual_out=dresidual_out,
        mean=mean,
        rstd=rstd,
        dx=dx_out,
        dresidual=dresidual,
        dweight=dweight_out,
        dbias=dbias_out,
    )


def check_qk(
    space: Space,
    *,
    q: Array,
    k: Array,
    q_weight: Array | float | None,
    k_weight: Array | float | None,
    options: Options,
    q_out: Array | None,
    k_out: Array | None,
) -> tuple[Forward, Forward]:
    """The checked records of both halves of qk_norm, their outputs allocated."""
    _x(q)
    _x(k)
    _exact_dtype(k, q.dtype, ", q's dtype")
    _device(k, q)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head size {q.shape[-1]}, got {k.shape[-1]}")

    def half(x: Array, weight: Array | float | None, out: Array | None) -> Forward:
        per_head = isinstance(weight, Array) and len(weight.shape) == 2 and len(x.shape) > 1
        return check_forward(
            "qk_norm",
            "rms",
            space,
            x=x,
            residual=None,
            weight=weight,
            bias=None,
            where=None,
            valid_rows=None,
            options=dataclasses.replace(options, per_head=per_head),
            out=out,
            out_dtype=None,
            residual_out=None,
            mean_out=None,
            rstd_out=None,
            statistics=False,
            out_name=f"{x.name}_out",
            weight_name=f"{x.name}_weight",
        )

    halves = half(q, q_weight, q_out), half(k, k_weight, k_out)
    _overlaps([q_out], [k, *_arrays(k_weight, k_out)], {})
    _overlaps([k_out], [q, *_arrays(q_weight)], {})
    return halves


def _in_order(dout: Array, dresidual_out: Array | None, x: Array) -> None:
    """Refuse gradients of another shape than x's before anything else is held against x: where
    one argument was left out, x is not what the caller meant."""
    for gradient in (dout, dresidual_out):
        if gradient is not None and gradient.shape != x.shape:
            raise ValueError(
                f"{gradient.name} must have shape {x.shape}, got {gradient.shape}: the first "
                f"arguments are dout, dresidual_out (or None) and {x.name}"
            )


def _no_gradient(out: Array | None, wanted: bool, needs: str) -> None:
    if out is not None and not wanted:
        raise ValueError(f"{out.name} needs {needs}: there is no such gradient, got an array")


def _x_dtype(dx_out: Array | None, x_dtype: str | None, x: Array) -> str:
    """The dtype of dx in the backward of an add_* function."""
    if x_dtype is not None:
        _row_dtype("x_dtype", x_dtype, x)
    if dx_out is None:
        return x.dtype if x_dtype is None else x_dtype
    _row_dtype(dx_out.name, dx_out.dtype, x)
    if x_dtype is not None and x_dtype != dx_out.dtype:
        raise TypeError(f"x_dtype must agree with {dx_out.name}, {dx_out.dtype}, got {x_dtype}")
    return dx_out.dtype


def _arrays(*values: Array | float | None) -> list[Array]:
    return [value for value in values if isinstance(value, Array)]
