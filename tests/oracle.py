# SPDX-License-Identifier: Apache-2.0
"""What the right answer is: float64 references, their error bounds, and the exact rounding order.

Three things, each written once for every test of every backend:

* `round_to` rounds to a dtype once. (`astype` of ml_dtypes goes through float32 and rounds twice.)
* `forward` and `backward` are two-pass references in float64 (longdouble for float64 inputs). Their
  results carry the bound that a backend has to meet.
* `rounded_forward` is the library's rounding order: given the statistics that a backend returned,
  its outputs follow bit for bit.

Arrays have the shapes of the public functions. `ndim` counts the normalised trailing axes. A weight
of shape `x.shape[-ndim:]`, or with one more leading axis (per head), broadcasts against x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# Bits of the significand (the hidden one included) and the smallest exponent of a normal number.
_FORMATS = {
    "float16": (11, -14),
    "bfloat16": (8, -126),
    "float32": (24, -126),
    "float64": (53, -1022),
}

# Promise 6: |y - reference| <= E * scale, plus half an ulp of a 16-bit output. E is 33 units of
# rounding in the accumulation dtype, the scale is `_xhat_scale` * |weight + offset| + |bias|.
E = {"float32": 2e-6, "float64": 4e-15}


def accumulation(x: np.ndarray) -> np.dtype:
    """The dtype in which rows of x's dtype are summed."""
    return DTYPES["float64" if x.dtype.name == "float64" else "float32"]


def wide(array: Any, like: np.ndarray) -> Any:
    """`array` in the precision of a reference for `like`; None stays None."""
    if array is None:
        return None
    return np.asarray(array).astype(np.longdouble if like.dtype.name == "float64" else np.float64)


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """The distance between neighbours of format `dtype` in the binade of each value."""
    bits, smallest = _FORMATS[dtype]
    _, exponent = np.frexp(values)  # |values| = m * 2**exponent, 0.5 <= m < 1
    exponent = np.where(values == 0, smallest, exponent)
    return np.ldexp(np.ones_like(values), np.maximum(exponent - 1, smallest) - (bits - 1))


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` (any float dtype) rounded once to `dtype`: to nearest, ties to even."""
    values = np.asarray(values)
    if values.dtype == BFLOAT16:
        values = values.astype(np.float32)
    if values.dtype.itemsize < 8:
        values = values.astype(np.float64)
    finite = np.where(np.isfinite(values), values, 0)
    unit = ulp(finite, dtype)
    rounded = np.where(np.isfinite(values), np.rint(finite / unit) * unit, values)
    rounded = np.where(np.abs(rounded) >= past_largest(dtype), np.copysign(np.inf, values), rounded)
    rounded = np.where(np.isnan(values), values, rounded)
    # Every value is one of dtype's now (bfloat16's are float32's): the cast rounds nothing.
    if dtype == "bfloat16":
        return rounded.astype(np.float32).astype(BFLOAT16)
    return rounded.astype(DTYPES[dtype])


def past_largest(dtype: str) -> Any:
    """The number that would follow the largest finite one; rounding there gives infinity."""
    _, smallest = _FORMATS[dtype]
    return np.ldexp(np.longdouble(1), 2 - smallest)


def half_ulp(values: np.ndarray, dtype: str) -> Any:
    """What the rounding to a 16-bit `dtype` may add; the bounds hold the rounding to others."""
    return ulp(values, dtype) / 2 if dtype in ("float16", "bfloat16") else 0.0


def summation(count: int, unit: float) -> float:
    """Relative error of a sum of `count` terms in any fixed order, relative to sum |term|.

    (count - 1) * unit always holds; roundings that are independent stay within
    4 * sqrt(count) * unit with probability 1 - 2 exp(-8) (Higham and Mary, 2019).
    """
    return min(count, 4 * math.sqrt(count)) * unit


@dataclass(frozen=True)
class Reference:
    """A result that is not rounded, and how far from it the rounded one may lie."""

    value: np.ndarray
    error: np.ndarray  # before the rounding to the output's dtype

    def bound(self, dtype: str) -> np.ndarray:
        """The largest allowed |output - value| of an output of `dtype`."""
        return self.error + half_ulp(np.abs(self.value) + self.error, dtype)


@dataclass(frozen=True)
class Forward:
    y: Reference
    mean: Reference
    rstd: Reference
    residual_out: np.ndarray  # in the residual's dtype: one addition, exact
    xhat: np.ndarray
    xhat_scale: np.ndarray


def forward(
    x: np.ndarray,
    weight: Any = None,
    bias: Any = None,
    residual: np.ndarray | None = None,
    *,
    norm: str = "rms",
    eps: float,
    weight_offset: float = 0.0,
    cast: str = "once",
    ndim: int = 1,
    exact_mean: bool = False,
    partial: int | None = None,
) -> Forward:
    """RMSNorm or LayerNorm of x (plus residual), two passes, never rounded.

    With `exact_mean` the bound is promise 6 to the letter, which the library keeps where y has the
    accumulation dtype; otherwise LayerNorm's mean may come from a plain sum.
    """
    e = E[accumulation(x).name]
    axes = tuple(range(x.ndim - ndim, x.ndim))
    h = wide(x, x)
    residual_out = x
    if residual is not None:
        # float32 forms the sum and rounds it; the statistics see that float32 sum.
        total = x.astype(accumulation(x)) + residual.astype(accumulation(x))
        residual_out = round_to(total, residual.dtype.name)
        h = wide(total, x)
    rows = x.shape[: x.ndim - ndim]
    if norm == "layer":
        mean = h.mean(axis=axes, keepdims=True)
    else:
        mean = np.zeros(rows + (1,) * ndim, h.dtype)
    centred = h - mean
    counted, count = _counted(x, ndim, partial)
    squares = (centred * centred * counted).sum(axis=axes, keepdims=True)
    rstd = 1 / np.sqrt(squares / count + h.dtype.type(eps))
    xhat = centred * rstd
    mean_size = np.abs(h).mean(axis=axes, keepdims=True) if norm == "layer" else mean
    xhat_scale = _xhat_scale(centred, mean, 0 if exact_mean else mean_size, rstd)
    gain = _gain(weight, weight_offset, x)
    y = xhat * gain
    error = e * np.abs(xhat_scale * gain)
    if cast == "before_weight":
        error = error + half_ulp(np.abs(xhat) + e * xhat_scale, x.dtype.name) * np.abs(gain)
    if bias is not None:
        y = y + wide(bias, x)
        error = error + e * np.abs(wide(bias, x))
    # A sum of x in any order errs by E * mean|x|; that shift enters the variance squared.
    mean_error = e * mean_size
    rstd_error = rstd * (e + (mean_error * rstd) ** 2 / 2)
    return Forward(
        y=Reference(y, error),
        mean=Reference(mean.reshape(rows), mean_error.reshape(rows)),
        rstd=Reference(rstd.reshape(rows), rstd_error.reshape(rows)),
        residual_out=residual_out,
        xhat=xhat,
        xhat_scale=xhat_scale,
    )


def _counted(x: np.ndarray, ndim: int, partial: int | None) -> tuple[np.ndarray, int]:
    """Which elements of a row its statistic comes from (1, or else 0), and how many."""
    row = x.shape[x.ndim - ndim :]
    count = math.prod(row) if partial is None else partial
    return (np.arange(math.prod(row)) < count).reshape(row).astype(np.int8), count


def _xhat_scale(centred: Any, mean: Any, mean_size: Any, rstd: Any) -> Any:
    """Promise 6 bounds xhat's error by E times this: |xhat| for RMSNorm.

    `mean_size`, mean|x|, stands for a plain sum that makes the mean: where the terms cancel, its
    error follows them and not what is left. A sixteenth of E is two units of rounding.
    """
    return (np.abs(centred) + np.abs(mean) + mean_size / 16) * rstd


def _gain(weight: Any, weight_offset: float, x: np.ndarray) -> Any:
    """weight + offset; 1 without a weight."""
    return wide(1.0, x) if weight is None else wide(weight, x) + wide(weight_offset, x)


@dataclass(frozen=True)
class Gradients:
    dx: Reference
    dweight: Reference
    dbias: Reference


def backward(
    dout: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray | float | None = None,
    *,
    mean: np.ndarray | None = None,
    rstd: np.ndarray | None = None,
    dresidual_out: np.ndarray | None = None,
    norm: str = "rms",
    eps: float,
    weight_offset: float = 0.0,
    cast: str = "once",
    ndim: int = 1,
    computed: np.ndarray | None = None,
    weight_shape: tuple[int, ...] | None = None,
    partial: int | None = None,
) -> Gradients:
    """The gradients of `forward`; for add_* x is residual_out, the statistics are those saved.

    With g = dout * (weight + offset), S = `xhat_scale`, M = mean(|g| S) and u = E / 33, the unit of
    rounding, a backend that forms each term and each sum in the accumulation dtype errs by

    * g: 2 u |g| (sum, product); rstd: E rstd; xhat: E S (promise 6);
    * m2 = mean(g * xhat): E M from xhat, 3 u M from g and the product, E M from the sum, < 3 E M;
      m1 = mean(g): 2 u + E, < 2 E mean|g|;
    * xhat * m2: E S |m2| + 3 E M |xhat| + u |..|, < 5 E S M, because |xhat| <= S and |m2| <= M;
    * dx = rstd * (g - m1 - xhat * m2): the three, E for rstd, 3 u for its subtractions and product:
      |error| <= E rstd (2 |g| + 4 mean|g| + 7 S M), where mean|g| stands for LayerNorm only;
    * dx + dresidual_out: u (|dx| + |dresidual_out|), < E |dresidual_out| more.
    * with `partial` the means behind m2 and M are sums over the row by that many columns, and other
      columns have no term of m2;
    * dweight = sum of dout * xhat: (E + u + `summation`) sum(|dout| S); with the cast before the
      weight half an ulp of xhat's 16-bit rounding times |dout|; dbias: `summation` sum|dout|.
    """
    e = E[accumulation(x).name]
    unit = float(np.finfo(accumulation(x)).eps) / 2
    axes = tuple(range(x.ndim - ndim, x.ndim))
    rows = x.shape[: x.ndim - ndim]
    if computed is None:
        computed = np.ones(rows, bool)
    mask = computed.reshape(rows + (1,) * ndim)
    x = np.where(mask, x, np.ones_like(x))  # what other rows hold has no say
    d = np.where(mask, wide(dout, x), 0)
    saved = forward(x, norm=norm, eps=eps, ndim=ndim, partial=partial)
    spread = rows + (1,) * ndim
    r = wide(saved.rstd.value if rstd is None else rstd, x).reshape(spread)
    m = wide(saved.mean.value if mean is None else mean, x).reshape(spread)
    r, m = np.where(mask, r, 1), np.where(mask, m, 0)
    xhat = (wide(x, x) - m) * r
    mean_size = np.abs(wide(x, x)).mean(axis=axes, keepdims=True) if norm == "layer" else 0
    xhat_scale = _xhat_scale(wide(x, x) - m, m, mean_size, r)
    gain = _gain(weight, weight_offset, x)
    g = d * gain
    m1 = g.mean(axis=axes, keepdims=True) if norm == "layer" else 0
    counted, counts = _counted(x, ndim, partial)
    m2 = (g * xhat).sum(axis=axes, keepdims=True) / counts
    dx = r * (g - m1 - xhat * counted * m2)
    abs_m1 = np.abs(g).mean(axis=axes, keepdims=True) if norm == "layer" else 0
    abs_m2 = (np.abs(g) * xhat_scale).sum(axis=axes, keepdims=True) / counts * counted
    dx_error = e * r * (2 * np.abs(g) + 4 * abs_m1 + 7 * xhat_scale * abs_m2)
    if dresidual_out is not None:
        arriving = np.where(mask, wide(dresidual_out, x), 0)
        dx = dx + arriving
        dx_error = dx_error + e * np.abs(arriving)

    if weight_shape is None:
        weight_shape = x.shape[x.ndim - ndim :] if np.ndim(weight) == 0 else np.shape(weight)
    over = tuple(range(x.ndim - len(weight_shape)))
    count = max(1, math.prod(x.shape[: len(over)]))
    product, product_error = d * xhat, (e + unit + summation(count, unit)) * np.abs(d) * xhat_scale
    if cast == "before_weight":
        rounding = half_ulp(np.abs(xhat) + e * xhat_scale, x.dtype.name)
        product_error = product_error + np.abs(d) * rounding
    return Gradients(
        dx=Reference(dx, dx_error),
        dweight=Reference(product.sum(axis=over), product_error.sum(axis=over)),
        dbias=Reference(d.sum(axis=over), summation(count, unit) * np.abs(d).sum(axis=over)),
    )


def rounded_forward(
    x: np.ndarray,
    rstd: np.ndarray,
    mean: np.ndarray | None = None,
    weight: Any = None,
    bias: Any = None,
    residual: np.ndarray | None = None,
    *,
    weight_offset: float = 0.0,
    cast: str = "once",
    ndim: int = 1,
    out_dtype: str | None = None,
) -> np.ndarray:
    """The y that follows from the returned statistics, every step rounded in the order promised."""
    dtype = accumulation(x)

    def rounded(array: Any) -> np.ndarray:
        return np.asarray(array).astype(dtype)

    spread = x.shape[: x.ndim - ndim] + (1,) * ndim
    value = rounded(x)
    if residual is not None:
        value = value + rounded(residual)
    if mean is not None:
        value = value - mean.reshape(spread)
    value = value * rstd.reshape(spread)
    if cast == "before_weight":
        value = rounded(round_to(value, x.dtype.name))
    if weight is not None:
        value = value * (rounded(weight) + rounded(weight_offset))
    if bias is not None:
        value = value + rounded(bias)
    return round_to(value, out_dtype or x.dtype.name)
