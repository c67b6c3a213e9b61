# SPDX-License-Identifier: Apache-2.0
"""Comparisons that say where and by how much an array is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import oracle


def close(got: np.ndarray, expected: Any, bound: Any, what: str = "result") -> None:
    """Assert |got - expected| <= bound in every element.

    `expected` is not rounded; `bound` allows for the rounding. NaN agrees with NaN and with nothing
    else. Beyond got's dtype an infinity stands for the number that would follow the largest one.
    """
    __tracebackhide__ = True
    expected, bound = _same_shape(got, expected, what), np.asarray(bound)
    value = _wide(got)
    limit = oracle.past_largest(got.dtype.name).astype(value.dtype)
    with np.errstate(invalid="ignore"):
        error = np.abs(np.clip(value, -limit, limit) - np.clip(expected, -limit, limit))
    error = np.where(np.isnan(value) & np.isnan(expected), 0, error)
    wrong = ~(error <= bound)  # a NaN on one side is wrong
    if wrong.any():
        excess = np.where(wrong, np.where(np.isnan(error), np.inf, error - bound), -np.inf)
        _fail(what, got, expected, np.broadcast_to(bound, got.shape), error, wrong, excess)


def equal(got: np.ndarray, expected: np.ndarray, what: str = "result") -> None:
    """Assert equal dtype and equal bits; any NaN agrees with any NaN."""
    __tracebackhide__ = True
    expected = _same_shape(got, expected, what)
    if got.dtype != expected.dtype:
        raise AssertionError(f"{what}: got dtype {got.dtype}, expected {expected.dtype}")
    nan = np.not_equal(got, got) & np.not_equal(expected, expected)
    wrong = (bits(got) != bits(expected)) & ~nan
    if wrong.any():
        with np.errstate(invalid="ignore"):
            error = np.abs(_wide(got) - _wide(expected))
        excess = np.where(wrong, np.where(np.isnan(error), np.inf, error), -np.inf)
        _fail(what, got, _wide(expected), np.zeros(got.shape), error, wrong, excess)


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory, contiguous, as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def _same_shape(got: np.ndarray, expected: Any, what: str) -> np.ndarray:
    expected = np.asarray(expected)
    if got.shape != expected.shape:
        raise AssertionError(f"{what}: got shape {got.shape}, expected {expected.shape}")
    return expected


def _fail(
    what: str, got: Any, expected: Any, bound: Any, error: Any, wrong: Any, excess: Any
) -> None:
    __tracebackhide__ = True
    at = np.unravel_index(int(np.argmax(excess)), got.shape)
    unit = oracle.ulp(np.nan_to_num(expected[at], posinf=0, neginf=0), got.dtype.name)
    index = tuple(int(i) for i in at)
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {got.size} elements are wrong; the worst is {index}: "
        f"got {float(got[at])!r}, expected {float(expected[at])!r}, "
        f"{float(error[at] / unit):.4g} ulps of {got.dtype.name} apart "
        f"({float(error[at]):.4g}, allowed {float(bound[at]):.4g})"
    )
