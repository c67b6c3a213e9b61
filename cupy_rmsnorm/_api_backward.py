# SPDX-License-Identifier: Apache-2.0
"""The public backward functions."""

from __future__ import annotations

from typing import TypeVar

from . import _roads
from ._docs import Axis, CastOption, MaskedOption, documented

ArrayT = TypeVar("ArrayT")


@documented
def rms_norm_backward(
    dout: object,
    x: ArrayT,
    weight: object = None,
    rstd: object = None,
    *,
    eps: float = 1e-6,
    bias: object = None,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    partial: int | None = None,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    need_dx: bool = True,
    need_dweight: bool = True,
    dx_out: ArrayT | None = None,
    dweight_out: ArrayT | None = None,
    dbias_out: ArrayT | None = None,
    dweight_dtype: object = None,
) -> tuple[ArrayT | None, ArrayT | None, ArrayT | None]:
    """The gradients of `rms_norm`.

    Sums run in float32 (float64 for float64), dweight and dbias in a fixed order; every gradient is
    rounded once to its dtype.
    ``dout * (weight + weight_offset)`` is never rounded, whatever `cast` is; with "before_weight"
    dweight uses the rounded normalised value.

    Parameters
    ----------
    {dout}
    {x}
    {weight_backward}
    {rstd_backward}
    eps : float, default 1e-6
        As given to forward.
    {bias_backward}
    {options}
    {partial}
    {masked_backward}
    {gradient_options}

    Returns
    -------
    {dx}
    {dweight}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import rms_norm_backward
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> weight = np.array([1, 2, 0.5, -1], np.float32)
    >>> dout = np.array([[1, -1, 2, 0.5]], np.float32)
    >>> dx, dweight, dbias = rms_norm_backward(dout, x, weight)
    >>> dx.round(4)
    array([[ 0.3895, -0.6816,  0.4382, -0.0852]], dtype=float32)
    >>> dbias is None
    True
    """
    gradients = _roads.backward(
        "rms_norm_backward",
        "rms",
        dout,
        x,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, partial),
        rstd=rstd,
        where=where,
        valid_rows=valid_rows,
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=dx_out,
        dweight_out=dweight_out,
        dbias_out=dbias_out,
        dweight_dtype=dweight_dtype,
    )
    return gradients.dx, gradients.dweight, gradients.dbias


@documented
def layer_norm_backward(
    dout: object,
    x: ArrayT,
    weight: object = None,
    mean: object = None,
    rstd: object = None,
    *,
    eps: float = 1e-5,
    bias: object = None,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    need_dx: bool = True,
    need_dweight: bool = True,
    dx_out: ArrayT | None = None,
    dweight_out: ArrayT | None = None,
    dbias_out: ArrayT | None = None,
    dweight_dtype: object = None,
) -> tuple[ArrayT | None, ArrayT | None, ArrayT | None]:
    """The gradients of `layer_norm`.

    Sums run in float32 (float64 for float64), dweight and dbias in a fixed order; every gradient is
    rounded once to its dtype.
    ``dout * (weight + weight_offset)`` is never rounded, whatever `cast` is; with "before_weight"
    dweight uses the rounded normalised value.

    Parameters
    ----------
    {dout}
    {x}
    {weight_backward}
    {mean_backward}
    {rstd_backward}
    eps : float, default 1e-5
        As given to forward.
    {bias_backward}
    {options}
    {masked_backward}
    {gradient_options}

    Returns
    -------
    {dx}
    {dweight}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import layer_norm_backward
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> bias = np.zeros(4, np.float32)
    >>> dout = np.array([[1, -1, 2, 0.5]], np.float32)
    >>> dx, dweight, dbias = layer_norm_backward(dout, x, bias=bias)
    >>> dbias
    array([ 1. , -1. ,  2. ,  0.5], dtype=float32)
    >>> dweight is None
    True
    """
    gradients = _roads.backward(
        "layer_norm_backward",
        "layer",
        dout,
        x,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, None),
        mean=mean,
        rstd=rstd,
        where=where,
        valid_rows=valid_rows,
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=dx_out,
        dweight_out=dweight_out,
        dbias_out=dbias_out,
        dweight_dtype=dweight_dtype,
    )
    return gradients.dx, gradients.dweight, gradients.dbias


@documented
def add_rms_norm_backward(
    dout: object,
    dresidual_out: object,
    residual_out: ArrayT,
    weight: object = None,
    rstd: object = None,
    *,
    eps: float = 1e-6,
    bias: object = None,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    partial: int | None = None,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    need_dx: bool = True,
    need_dweight: bool = True,
    dx_out: ArrayT | None = None,
    dweight_out: ArrayT | None = None,
    dbias_out: ArrayT | None = None,
    dweight_dtype: object = None,
    x_dtype: object = None,
) -> tuple[ArrayT | None, ArrayT | None, ArrayT | None, ArrayT | None]:
    """The gradients of `add_rms_norm`.

    Sums run in float32 (float64 for float64), dweight and dbias in a fixed order; every gradient is
    rounded once to its dtype. The sum is seen as rounded into residual_out.
    ``dout * (weight + weight_offset)`` is never rounded, whatever `cast` is; with "before_weight"
    dweight uses the rounded normalised value.

    Parameters
    ----------
    {dout}
    {residual_inputs}
    {weight_backward}
    {rstd_backward}
    eps : float, default 1e-6
        As given to forward.
    {bias_backward}
    {options}
    {partial}
    {masked_backward}
    {gradient_options}
    {x_dtype}

    Returns
    -------
    {dx_residual}
    {dweight}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import add_rms_norm_backward
    >>> residual_out = np.array([[1, 2, 3, 4]], np.float32)
    >>> dout = np.zeros((1, 4), np.float32)
    >>> dresidual_out = np.array([[10, 20, 30, 40]], np.float32)
    >>> dx, dresidual, dweight, dbias = add_rms_norm_backward(dout, dresidual_out, residual_out)
    >>> dx
    array([[10., 20., 30., 40.]], dtype=float32)
    >>> dresidual is dx
    True
    """
    gradients = _roads.backward(
        "add_rms_norm_backward",
        "rms",
        dout,
        residual_out,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, partial),
        rstd=rstd,
        where=where,
        valid_rows=valid_rows,
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=dx_out,
        dweight_out=dweight_out,
        dbias_out=dbias_out,
        dweight_dtype=dweight_dtype,
        dresidual_out=dresidual_out,
        x_dtype=x_dtype,
        added=True,
    )
    return gradients.dx, gradients.dresidual, gradients.dweight, gradients.dbias


@documented
def add_layer_norm_backward(
    dout: object,
    dresidual_out: object,
    residual_out: ArrayT,
    weight: object = None,
    mean: object = None,
    rstd: object = None,
    *,
    eps: float = 1e-5,
    bias: object = None,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    need_dx: bool = True,
    need_dweight: bool = True,
    dx_out: ArrayT | None = None,
    dweight_out: ArrayT | None = None,
    dbias_out: ArrayT | None = None,
    dweight_dtype: object = None,
    x_dtype: object = None,
) -> tuple[ArrayT | None, ArrayT | None, ArrayT | None, ArrayT | None]:
    """The gradients of `add_layer_norm`.

    Sums run in float32 (float64 for float64), dweight and dbias in a fixed order; every gradient is
    rounded once to its dtype. The sum is seen as rounded into residual_out.
    ``dout * (weight + weight_offset)`` is never rounded, whatever `cast` is; with "before_weight"
    dweight uses the rounded normalised value.

    Parameters
    ----------
    {dout}
    {residual_inputs}
    {weight_backward}
    {mean_backward}
    {rstd_backward}
    eps : float, default 1e-5
        As given to forward.
    {bias_backward}
    {options}
    {masked_backward}
    {gradient_options}
    {x_dtype}

    Returns
    -------
    {dx_residual}
    {dweight}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import add_layer_norm_backward
    >>> residual_out = np.array([[1, 2, 3, 4]], np.float32)
    >>> dout = np.zeros((1, 4), np.float32)
    >>> dresidual_out = np.array([[10, 20, 30, 40]], np.float32)
    >>> dx, dresidual, dweight, dbias = add_layer_norm_backward(dout, dresidual_out, residual_out)
    >>> dx
    array([[10., 20., 30., 40.]], dtype=float32)
    >>> dresidual is dx
    True
    """
    gradients = _roads.backward(
        "add_layer_norm_backward",
        "layer",
        dout,
        residual_out,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, None),
        mean=mean,
        rstd=rstd,
        where=where,
        valid_rows=valid_rows,
        need_dx=need_dx,
        need_dweight=need_dweight,
        dx_out=dx_out,
        dweight_out=dweight_out,
        dbias_out=dbias_out,
        dweight_dtype=dweight_dtype,
        dresidual_out=dresidual_out,
        x_dtype=x_dtype,
        added=True,
    )
    return gradients.dx, gradients.dresidual, gradients.dweight, gradients.dbias
