# SPDX-License-Identifier: Apache-2.0
"""Which arrays share memory: arithmetic on pointers, shapes and strides."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ._call import Array
from ._dtypes import TABLE


def same(a: Array, b: Array) -> bool:
    """Whether two arrays are one: the same elements in the same order, of one dtype."""
    return (
        a.pointer == b.pointer
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
    )


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays may share a byte.

    Exact for blocks, and for slices of one buffer with a common row stride (q and k of one qkv),
    which are compared modulo that stride; anything else that interleaves counts as an overlap.
    """
    if a.device != b.device:
        return False
    a_low, a_high = _span(a, 0)
    b_low, b_high = _span(b, 0)
    if a_high <= b_low or b_high <= a_low or not a.size or not b.size:
        return False
    return not any(_apart_modulo(a, b, period) for period in _periods(a) | _periods(b))


def reach(array: Array) -> int:
    """Bytes between the lowest and the end of the highest element."""
    low, high = _span(array, 0)
    return high - low


def repeats(array: Array) -> bool:
    """Whether an axis of `array` has stride 0, as in a broadcast view."""
    return array.size > 0 and any(size > 1 and stride == 0 for size, stride in _axes(array))


def is_injective(array: Array) -> bool:
    """Whether every element of `array` has an address of its own, its axes nested by stride."""
    reach = 0
    for stride, size in sorted((abs(s), n) for n, s in _axes(array) if n > 1):
        if stride <= reach:
            return array.size == 0
        reach += stride * (size - 1)
    return True


def _axes(array: Array) -> Iterator[tuple[int, int]]:
    """The (size, stride) of each axis."""
    return zip(array.shape, array.strides, strict=True)


def _itemsize(array: Array) -> int:
    return TABLE[array.dtype].itemsize


def _span(array: Array, period: int) -> tuple[int, int]:
    """First and past-the-end byte of the elements reached by axes whose stride `period` does not
    divide (0: by all axes)."""
    low, high = _reach(array.shape, array.strides, _itemsize(array), period)
    return array.pointer + low, array.pointer + high


@functools.lru_cache(maxsize=512)
def _reach(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, period: int
) -> tuple[int, int]:
    """The same of an array that begins at 0."""
    low = high = 0
    for size, stride in zip(shape, strides, strict=True):
        step = stride * itemsize
        if period and step % period == 0:
            continue
        reach = (size - 1) * step
        low += min(reach, 0)
        high += max(reach, 0)
    return low, high + itemsize


def _periods(array: Array) -> set[int]:
    """The strides, in bytes, at which slices of a wider buffer may repeat."""
    itemsize = _itemsize(array)
    return {abs(stride) * itemsize for size, stride in _axes(array) if size > 1 and stride}


def _apart_modulo(a: Array, b: Array, period: int) -> bool:
    """Whether, wrapped onto a circle of `period` bytes, the two arrays' rows are disjoint arcs."""
    a_low, a_high = _span(a, period)
    b_low, b_high = _span(b, period)
    distance = (b_low - a_low) % period
    return distance >= a_high - a_low and distance + b_high - b_low <= period
