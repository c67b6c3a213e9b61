# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._call import Array, Backward, Forward, Rows
from ._dtypes import TABLE, numpy_dtype


def _round(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded once, to nearest even, to `dtype`."""
    return values.astype(numpy_dtype(dtype))


def _computed(call: Rows) -> np.ndarray | None:
    """The rows to compute, or None for all of them."""
    mask = None
    if call.where is not None:
        mask = np.array(call.where.numpy)
    if call.valid_rows is not None:
        valid = np.arange(call.rows).reshape(call.row_shape) < call.valid_rows.numpy.reshape(())
        mask = valid if mask is None else mask & valid
    return mask


def _write(call: Rows, target: Array | None, values: np.ndarray, mask: np.ndarray | None) -> None:
    if target is None:
        return
    out = target.numpy
    values = _round(values, target.dtype).reshape(out.shape)
    if mask is None:
        out[...] = values
        return
    mask = mask.reshape(mask.shape + (1,) * (out.ndim - mask.ndim))
    np.copyto(out, values, where=mask)
    if call.masked == "zero":
        np.copyto(out, np.zeros((), out.dtype), where=~mask)


def _statistics(call: Rows, x: np.ndarray) -> tuple[Any, np.ndarray]:
    mean: Any = None
    centered = x
    if call.norm == "layer":
        mean = x.mean(-1, keepdims=True)
        centered = x - mean
    variance = np.square(centered).mean(-1, keepdims=True)
    return mean, 1 / np.sqrt(variance + x.dtype.type(call.eps))


def _weight(call: Rows, acc: np.dtype) -> Any:
    if not isinstance(call.weight, Array):
        return acc.type(call.weight) + acc.type(call.weight_offset)
    heads = call.row_shape[-1:] if call.per_head else ()
    weight = call.weight.numpy.astype(acc) + acc.type(call.weight_offset)
    return weight.reshape(*heads, call.hidden_size)


def _load(call: Rows, array: Array, acc: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(array.numpy.astype(acc).reshape(*call.row_shape, call.hidden_size))


def forward(call: Forward) -> None:
    """Compute a checked forward call into its outputs."""
    acc = numpy_dtype(TABLE[call.x.dtype].accumulation or "float32")
    with np.errstate(all="ignore"):
        mask = _computed(call)
        x = _load(call, call.x, acc)
        if call.residual is not None:
            x = x + _load(call, call.residual, acc)
        mean, rstd = _statistics(call, x)
        y = (x if mean is None else x - mean) * rstd
        if call.cast == "before_weight":
            y = _round(y, call.x.dtype).astype(acc)
        y = y * _weight(call, acc)
        if isinstance(call.bias, Array):
            heads = call.row_shape[-1:] if call.per_head else ()
            y = y + call.bias.numpy.astype(acc).reshape(*heads, call.hidden_size)
        elif call.bias is not None:
            y = y + acc.type(call.bias)
        _write(call, call.residual_out, x, mask)
        _write(call, call.mean, mean if mean is not None else rstd, mask)
        _write(call, call.rstd, rstd, mask)
        _write(call, call.y, y, mask)


def backward(call: Backward) -> None:
    """Compute a checked backward call into its outputs."""
    acc = numpy_dtype(TABLE[call.x.dtype].accumulation or "float32")
    with np.errstate(all="ignore"):
        mask = _computed(call)
        x = _load(call, call.x, acc)
        dout = _load(call, call.dout, acc)
        mean, rstd = _statistics(call, x)
        if call.mean is not None:
            mean = call.mean.numpy.reshape(*call.row_shape, 1)
        if call.rstd is not None:
            rstd = call.rstd.numpy.reshape(*call.row_shape, 1)
        xhat = (x if mean is None else x - mean) * rstd
        g = dout * _weight(call, acc)
        dx = g - xhat * (g * xhat).mean(-1, keepdims=True)
        if call.norm == "layer":
            dx = dx - g.mean(-1, keepdims=True)
        dx = dx * rstd
        if call.dresidual_out is not None:
            dx = dx + _load(call, call.dresidual_out, acc)
        if mask is not None:
            dx = np.where(mask[..., None], dx, acc.type(0))
            dout = np.where(mask[..., None], dout, acc.type(0))
            xhat = np.where(mask[..., None], xhat, acc.type(0))
        if call.cast == "before_weight":
            xhat = _round(xhat, call.x.dtype).astype(acc)
        for target, values in ((call.dweight, dout * xhat), (call.dbias, dout)):
            if target is not None:
                heads = call.row_shape[-1] if call.per_head else 1
                total = values.reshape(-1, heads * call.hidden_size).sum(0, dtype=np.float64)
                target.numpy[...] = _round(total.astype(acc), target.dtype).reshape(target.shape)
        _write(call, call.dx, dx, None)
        _write(call, call.dresidual, dx, None)
