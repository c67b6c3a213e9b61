# SPDX-License-Identifier: Apache-2.0
"""Where rows lie: strides of many leading axes folded into the two that kernels take. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Row r of array i begins `r // inner_rows * outer[i] + r % inner_rows * inner[i]` elements in.

    Where `inner_rows` equals the number of rows, only the inner strides count.
    """

    inner_rows: int
    outer: Axes
    inner: Axes


def is_contiguous(shape: Axes, strides: Axes) -> bool:
    """Whether elements follow each other in C order; axes of length 1 may have any stride."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


@functools.lru_cache(maxsize=512)
def contiguous_strides(shape: Axes) -> Axes:
    """The strides of a C-contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def collapse_rows(row_shape: Axes, strides: Sequence[Axes], keep_inner: bool) -> RowLayout | None:
    """Fold `row_shape` for all arrays at once; None if more than two axes remain.

    `strides[i]` are array i's strides along `row_shape`. With `keep_inner` the last axis (the
    heads) stays an axis of its own.
    """
    lengths: list[int] = []
    folded: list[list[int]] = [[] for _ in strides]
    last = len(row_shape) - 1
    for axis, length in enumerate(row_shape):
        if length == 1 and not (keep_inner and axis == last):
            continue
        here = [of_array[axis] for of_array in strides]
        joins = bool(lengths) and not (keep_inner and axis == last)
        if joins and all(f[-1] == s * length for f, s in zip(folded, here, strict=True)):
            lengths[-1] *= length
            for of_array, stride in zip(folded, here, strict=True):
                of_array[-1] = stride
        else:
            lengths.append(length)
            for of_array, stride in zip(folded, here, strict=True):
                of_array.append(stride)
    if len(lengths) > 2:
        return None
    rows = math.prod(row_shape)
    none = (0,) * len(strides)
    if not lengths:
        return RowLayout(rows, none, none)
    inner = tuple(of_array[-1] for of_array in folded)
    outer = tuple(of_array[0] for of_array in folded) if len(lengths) == 2 else none
    return RowLayout(lengths[-1], outer, inner)
