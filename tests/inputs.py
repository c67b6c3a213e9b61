# SPDX-License-Identifier: Apache-2.0
"""Deterministic inputs that show what plain random ones hide, and the layouts to put them in."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests import oracle

# Row lengths and row counts at which published kernels have failed: warp, vector and block edges,
# real models' sizes, one past a limit.
HIDDEN_SIZES = (
    *(1, 2, 3, 7, 8, 17, 31, 32, 33, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256, 257, 320),
    *(384, 511, 512, 513, 576, 768, 769, 1000, 1152, 1200, 1536, 2048, 2520, 2880, 3584, 4096),
    *(4304, 5120, 6144, 7168, 8192, 8193, 12288, 12289, 16384, 16385, 32768, 65536, 131072),
)
ROWS = (0, 1, 2, 3, 5, 17, 127, 131, 255, 256, 257, 1025, 65535, 65536, 65537)

GUARD = 64  # elements of NaN before and after every view that `lay` makes


def _random(*key: Any) -> np.random.Generator:
    return np.random.default_rng([int.from_bytes(str(part).encode(), "little") for part in key])


def _normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return _random("normal", seed).standard_normal(shape)


def _offset(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A mean far larger than the spread: E[x^2] - E[x]^2 cancels here."""
    return 100 + _random("offset", seed).standard_normal(shape)


def _tiny(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Of the size of sqrt(eps): where eps stands decides the result."""
    return 1e-3 * _random("tiny", seed).standard_normal(shape)


def _large(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Squares are past float16's largest number."""
    return 3000 * _random("large", seed).standard_normal(shape)


def _zero_row(shape: tuple[int, ...], seed: int) -> np.ndarray:
    values = _random("zero_row", seed).standard_normal(shape)
    values.reshape(-1, shape[-1])[::2] = 0
    return values


def _outlier(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One element a row holds nearly the whole sum of squares."""
    random = _random("outlier", seed)
    values = random.standard_normal(shape)
    rows = values.reshape(-1, shape[-1])
    rows[np.arange(len(rows)), random.integers(shape[-1], size=len(rows))] = 1000
    return values


def _row_tagged(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Row r is row 0 rolled by r and scaled: what mixes rows changes scale or roll.

    With eps 0, that is: then scale and roll are all that rows differ in.
    """
    size = shape[-1]
    base = _random("row_tagged", seed).uniform(0.5, 2, size) * np.where(np.arange(size) % 3, 1, -1)
    row = np.arange(int(np.prod(shape[:-1])))[:, None]
    return ((row % 97 + 1) * base[(np.arange(size) + row) % size]).reshape(shape)


KINDS = {
    "normal": _normal,
    "offset": _offset,
    "tiny": _tiny,
    "large": _large,
    "zero_row": _zero_row,
    "outlier": _outlier,
    "row_tagged": _row_tagged,
}


def array(shape: tuple[int, ...], dtype: str, kind: str = "normal", seed: int = 0) -> np.ndarray:
    """An input of this kind; the last axis is the row."""
    return oracle.round_to(KINDS[kind](shape, seed), dtype)


def weight(shape: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Never constant; negative entries and zeros among them (one element alone is not zero)."""
    values = _random("weight", seed).uniform(0.25, 2, shape)
    flat = values.reshape(-1)
    flat[1::3] *= -1
    flat[4::11] = 0
    return oracle.round_to(values, dtype)


def bias(shape: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return oracle.round_to(_random("bias", seed).uniform(-1, 1, shape), dtype)


# Each puts values into a larger buffer of NaN and returns the view. `strides` in the comments count
# elements of a (rows, hidden_size) array.
def _strided(values: np.ndarray, row_gap: int, step: int, start: int) -> np.ndarray:
    *rows, size = values.shape
    pitch = size * step + row_gap
    count = int(np.prod(rows, dtype=np.int64))
    buffer = _nan(GUARD + start + count * pitch + GUARD, values.dtype)
    body = buffer[GUARD + start : GUARD + start + count * pitch].reshape(*rows, pitch)
    view = body[..., : size * step : step]
    view[...] = values
    return view


def _nan(size: int, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "biu":
        return np.full(size, 0x55, np.uint8).repeat(dtype.itemsize).view(dtype)
    return np.full(size, np.nan, dtype)


def _transposed(values: np.ndarray) -> np.ndarray:
    """Strides (1, rows)."""
    turned = np.moveaxis(values, -1, 0)
    return np.moveaxis(_strided(np.ascontiguousarray(turned), 0, 1, 0), 0, -1)


def _reversed(values: np.ndarray) -> np.ndarray:
    """Strides (hidden_size, -1)."""
    return _strided(values[..., ::-1], 0, 1, 0)[..., ::-1]


LAYOUTS = {
    "contiguous": functools.partial(_strided, row_gap=0, step=1, start=0),
    "offset_1": functools.partial(_strided, row_gap=0, step=1, start=1),
    "offset_4": functools.partial(_strided, row_gap=0, step=1, start=4),
    "row_gap_8": functools.partial(_strided, row_gap=8, step=1, start=0),
    "row_gap_3": functools.partial(_strided, row_gap=3, step=1, start=0),  # each row aligned anew
    "inner_2": functools.partial(_strided, row_gap=0, step=2, start=0),
    "transposed": _transposed,
    "reversed": _reversed,
}


def lay(values: np.ndarray, layout: str = "contiguous") -> np.ndarray:
    """A view with these values in a larger buffer of NaN."""
    if values.ndim == 0:
        return LAYOUTS[layout](values.reshape(1)).reshape(())
    return LAYOUTS[layout](values)
