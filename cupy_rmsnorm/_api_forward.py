# SPDX-License-Identifier: Apache-2.0
"""The public forward functions that also return what their backward takes."""

from __future__ import annotations

from typing import TypeVar

from . import _roads
from ._docs import Axis, CastOption, MaskedOption, documented

ArrayT = TypeVar("ArrayT")


@documented
def rms_norm_forward(
    x: ArrayT,
    weight: object = None,
    bias: object = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    partial: int | None = None,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    out: ArrayT | None = None,
    out_dtype: object = None,
    rstd_out: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]:
    """`rms_norm`, and the statistic that `rms_norm_backward` takes.

    y has the bits that `rms_norm` gives. Values are rounded once, rstd not at all.

    Parameters
    ----------
    {x}
    {parameters}
    eps : float, default 1e-6
        Added to the mean square, in float32 (float64 for float64); at least 0.
    {options}
    {partial}
    {masked}
    {out}
    {rstd_out}

    Returns
    -------
    {y}
    {rstd_rms}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import rms_norm_forward
    >>> y, rstd = rms_norm_forward(np.array([[3, 4]], np.float32), eps=0.0)
    >>> rstd.round(4)
    array([0.2828], dtype=float32)
    """
    outputs = _roads.forward(
        "rms_norm_forward",
        "rms",
        x,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, partial),
        where=where,
        valid_rows=valid_rows,
        out=out,
        out_dtype=out_dtype,
        rstd_out=rstd_out,
    )
    return outputs.y, outputs.rstd


@documented
def layer_norm_forward(
    x: ArrayT,
    weight: object = None,
    bias: object = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    out: ArrayT | None = None,
    out_dtype: object = None,
    mean_out: ArrayT | None = None,
    rstd_out: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """`layer_norm`, and the statistics that `layer_norm_backward` takes.

    y has the bits that `layer_norm` gives. Values are rounded once, mean and rstd not at all.

    Parameters
    ----------
    {x}
    {parameters}
    eps : float, default 1e-5
        Added to the variance, in float32 (float64 for float64); at least 0.
    {options}
    {masked}
    {out}
    {mean_out}
    {rstd_out}

    Returns
    -------
    {y}
    {mean_returned}
    {rstd_layer}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import layer_norm_forward
    >>> y, mean, rstd = layer_norm_forward(np.array([[1, 3]], np.float32), eps=0.0)
    >>> mean, rstd
    (array([2.], dtype=float32), array([1.], dtype=float32))
    """
    outputs = _roads.forward(
        "layer_norm_forward",
        "layer",
        x,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, None),
        where=where,
        valid_rows=valid_rows,
        out=out,
        out_dtype=out_dtype,
        mean_out=mean_out,
        rstd_out=rstd_out,
    )
    return outputs.y, outputs.mean, outputs.rstd


@documented
def add_rms_norm_forward(
    x: ArrayT,
    residual: object,
    weight: object = None,
    bias: object = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    partial: int | None = None,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    out: ArrayT | None = None,
    out_dtype: object = None,
    residual_out: ArrayT | None = None,
    rstd_out: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """`add_rms_norm`, and the statistic that `add_rms_norm_backward` takes.

    y and residual_out have the bits that `add_rms_norm` gives; rstd is that of the unrounded sum.

    Parameters
    ----------
    {x}
    {residual}
    {parameters}
    eps : float, default 1e-6
        Added to the mean square, in float32 (float64 for float64); at least 0.
    {options}
    {partial}
    {masked}
    {out}
    {residual_out}
    {rstd_out}

    Returns
    -------
    {y}
    {residual_sum}
    {rstd_rms}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import add_rms_norm_forward
    >>> x = np.array([[3, 4]], np.float32)
    >>> y, residual_out, rstd = add_rms_norm_forward(x, x, eps=0.0)
    >>> rstd.round(4)
    array([0.1414], dtype=float32)
    """
    outputs = _roads.forward(
        "add_rms_norm_forward",
        "rms",
        x,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, partial),
        where=where,
        valid_rows=valid_rows,
        out=out,
        out_dtype=out_dtype,
        residual=residual,
        residual_out=residual_out,
        adds=True,
        rstd_out=rstd_out,
    )
    return outputs.y, outputs.residual_out, outputs.rstd


@documented
def add_layer_norm_forward(
    x: ArrayT,
    residual: object,
    weight: object = None,
    bias: object = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    axis: Axis = -1,
    cast: CastOption = "once",
    per_head: bool = False,
    groups: int = 1,
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    out: ArrayT | None = None,
    out_dtype: object = None,
    residual_out: ArrayT | None = None,
    mean_out: ArrayT | None = None,
    rstd_out: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]:
    """`add_layer_norm`, and the statistics that `add_layer_norm_backward` takes.

    y and residual_out have the bits that `add_layer_norm` gives; mean and rstd are those of the
    unrounded sum.

    Parameters
    ----------
    {x}
    {residual}
    {parameters}
    eps : float, default 1e-5
        Added to the variance, in float32 (float64 for float64); at least 0.
    {options}
    {masked}
    {out}
    {residual_out}
    {mean_out}
    {rstd_out}

    Returns
    -------
    {y}
    {residual_sum}
    {mean_returned}
    {rstd_layer}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import add_layer_norm_forward
    >>> x = np.array([[1, 3]], np.float32)
    >>> y, residual_out, mean, rstd = add_layer_norm_forward(x, x, eps=0.0)
    >>> mean, rstd
    (array([4.], dtype=float32), array([0.5], dtype=float32))
    """
    outputs = _roads.forward(
        "add_layer_norm_forward",
        "layer",
        x,
        weight,
        bias,
        (eps, weight_offset, axis, cast, per_head, masked, groups, None),
        where=where,
        valid_rows=valid_rows,
        out=out,
        out_dtype=out_dtype,
        residual=residual,
        residual_out=residual_out,
        adds=True,
        mean_out=mean_out,
        rstd_out=rstd_out,
    )
    return outputs.y, outputs.residual_out, outputs.mean, outputs.rstd
