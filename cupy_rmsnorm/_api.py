# SPDX-License-Identifier: Apache-2.0
"""The public forward functions."""

from __future__ import annotations

from typing import Literal, TypeVar

from . import _run
from ._check import Options
from ._docs import documented

ArrayT = TypeVar("ArrayT")
CastOption = Literal["once", "before_weight"]
MaskedOption = Literal["keep", "zero"]
Axis = int | tuple[int, ...]


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
    where: object = None,
    valid_rows: object = None,
    masked: MaskedOption = "keep",
    out: ArrayT | None = None,
    out_dtype: object = None,
) -> ArrayT:
    """Normalise each row by its root mean square.

    ``y = x * rstd * (weight + weight_offset) + bias`` with
    ``rstd = 1 / sqrt(mean(x ** 2) + eps)``, in float32 (float64 for float64), rounded once.

    Parameters
    ----------
    {x}
    {parameters}
    eps : float, default 1e-6
        Added to the mean square, in float32; at least 0.
    {options}
    {masked}
    {out}

    Returns
    -------
    {y}

    Raises
    ------
    {raises}

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_rmsnorm import rms_norm
    >>> rms_norm(np.array([[1, 2, 3, 4]], np.float32), eps=0.0).round(4)
    array([[0.3651, 0.7303, 1.0954, 1.4606]], dtype=float32)
    """
    return _run.forward(
        "rms_norm",
        "rms",
        x,
        weight,
        bias,
        Options(eps, weight_offset, axis, cast, per_head, masked),
        where=where,
        valid_rows=valid_rows,
        out=out,
        out_dtype=out_dtype,
    ).y
