# SPDX-License-Identifier: Apache-2.0
"""The public forward functions."""

from __future__ import annotations

from typing import TypeVar

from . import _roads
from ._docs import Axis, CastOption, MaskedOption, documented

ArrayT = TypeVar("ArrayT")


@documented
def rms_norm(
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
) -> ArrayT:
    """Normalise each row by its root mean square.

    ``y = x * rstd * (weight + weight_offset) + bias`` with
    ``rstd = 1 / sqrt(mean(x ** 2) + eps)``, in float32 (float64 for float64), rounded once to the
    output's dtype.

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

    Returns
    -------
    {y}

    Raises
    ------
    {raises_plain}

    Notes
    -----
    {torch}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import rms_norm
    >>> rms_norm(np.array([[1, 2, 3, 4]], np.float32), eps=0.0).round(4)
    array([[0.3651, 0.7303, 1.0954, 1.4606]], dtype=float32)
    """
    return _roads.normalize(  # type: ignore[no-any-return]
        "rms_norm",
        "rms",
        False,
        x,
        None,
        weight,
        bias,
        eps,
        weight_offset,
        axis,
        cast,
        per_head,
        masked,
        groups,
        partial,
        where,
        valid_rows,
        out,
        out_dtype,
        None,
    )


@documented
def layer_norm(
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
) -> ArrayT:
    """Normalise each row to mean 0 and variance 1.

    ``y = (x - mean) * rstd * (weight + weight_offset) + bias`` with
    ``rstd = 1 / sqrt(mean((x - mean) ** 2) + eps)``, in float32 (float64 for float64), rounded once
    to the output's dtype. The variance is the population's, from the deviations themselves.

    Parameters
    ----------
    {x}
    {parameters}
    eps : float, default 1e-5
        Added to the variance, in float32 (float64 for float64); at least 0.
    {options}
    {masked}
    {out}

    Returns
    -------
    {y}

    Raises
    ------
    {raises_plain}

    Notes
    -----
    {torch}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import layer_norm
    >>> layer_norm(np.array([[1, 2, 3, 4]], np.float32), eps=0.0).round(4)
    array([[-1.3416, -0.4472,  0.4472,  1.3416]], dtype=float32)
    """
    return _roads.normalize(  # type: ignore[no-any-return]
        "layer_norm",
        "layer",
        False,
        x,
        None,
        weight,
        bias,
        eps,
        weight_offset,
        axis,
        cast,
        per_head,
        masked,
        groups,
        None,
        where,
        valid_rows,
        out,
        out_dtype,
        None,
    )


@documented
def add_rms_norm(
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
) -> tuple[ArrayT, ArrayT]:
    """Add a residual, then normalise the sum as `rms_norm` does.

    The sum is formed in float32 (float64 for float64) and normalised unrounded; residual_out is
    that sum rounded once to residual's dtype. In 16 bits y is therefore not bitwise
    ``rms_norm(residual_out)``. The normalised value is rounded once to y's dtype.

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

    Returns
    -------
    {y}
    {residual_sum}

    Raises
    ------
    {raises_plain}

    Notes
    -----
    {torch}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import add_rms_norm
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> y, residual_out = add_rms_norm(x, x, eps=0.0)
    >>> y.round(4)
    array([[0.3651, 0.7303, 1.0954, 1.4606]], dtype=float32)
    >>> residual_out
    array([[2., 4., 6., 8.]], dtype=float32)
    """
    return _roads.normalize(  # type: ignore[no-any-return]
        "add_rms_norm",
        "rms",
        True,
        x,
        residual,
        weight,
        bias,
        eps,
        weight_offset,
        axis,
        cast,
        per_head,
        masked,
        groups,
        partial,
        where,
        valid_rows,
        out,
        out_dtype,
        residual_out,
    )


@documented
def add_layer_norm(
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
) -> tuple[ArrayT, ArrayT]:
    """Add a residual, then normalise the sum as `layer_norm` does.

    The sum is formed in float32 (float64 for float64) and normalised unrounded; residual_out is
    that sum rounded once to residual's dtype. In 16 bits y is therefore not bitwise
    ``layer_norm(residual_out)``. The normalised value is rounded once to y's dtype.

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

    Returns
    -------
    {y}
    {residual_sum}

    Raises
    ------
    {raises_plain}

    Notes
    -----
    {torch}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import add_layer_norm
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> y, residual_out = add_layer_norm(x, x, eps=0.0)
    >>> y.round(4)
    array([[-1.3416, -0.4472,  0.4472,  1.3416]], dtype=float32)
    >>> residual_out
    array([[2., 4., 6., 8.]], dtype=float32)
    """
    return _roads.normalize(  # type: ignore[no-any-return]
        "add_layer_norm",
        "layer",
        True,
        x,
        residual,
        weight,
        bias,
        eps,
        weight_offset,
        axis,
        cast,
        per_head,
        masked,
        groups,
        None,
        where,
        valid_rows,
        out,
        out_dtype,
        residual_out,
    )


@documented
def qk_norm(
    q: ArrayT,
    k: ArrayT,
    q_weight: object = None,
    k_weight: object = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: CastOption = "once",
    q_out: ArrayT | None = None,
    k_out: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Normalise the heads of q and k, each over its last axis, as `rms_norm` does.

    q and k may be slices of one packed qkv buffer, and may be normalised in place there. Values
    are rounded once to the dtype of q and k, after float32 arithmetic (float64 for float64).

    Parameters
    ----------
    q, k : array
        Of one library, device, dtype and head size (last axis); any strides, such as
        ``(tokens, heads, head_size)``.
    q_weight, k_weight : array or number, optional
        Shape ``(head_size,)``, or ``(heads, head_size)`` for a weight of each head's own.
    eps : float, default 1e-6
        Added to the mean square, in float32 (float64 for float64); at least 0.
    weight_offset : float, default 0.0
        Added to each weight in float32 before the multiplication (Gemma: 1.0).
    cast : {"once", "before_weight"}, default "once"
        As in `rms_norm`.
    q_out, k_out : array, optional
        Outputs, returned as the same objects. q_out may be exactly q, k_out exactly k.

    Returns
    -------
    q_out : array
        Of q's library, shape and dtype.
    k_out : array
        Of k's library, shape and dtype.

    Raises
    ------
    {raises_plain}

    Notes
    -----
    {torch}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import qk_norm
    >>> qkv = np.arange(1, 13, dtype=np.float32).reshape(1, 6, 2)
    >>> q, k = qkv[:, :3], qkv[:, 3:5]
    >>> q_out, k_out = qk_norm(q, k, q_out=q, k_out=k)
    >>> qkv.round(2)[0, :, 1]
    array([ 1.26,  1.13,  1.09,  1.06,  1.05, 12.  ], dtype=float32)
    """
    return _roads.qk_norm(q, k, q_weight, k_weight, eps, weight_offset, cast, q_out, k_out)
