# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: which library an array is of, and what goes back to the caller.

It imports none of them before the caller has: an array's library is found through `sys.modules`.
NumPy, torch and CuPy arrays are described through their own attributes; any other array comes in
by DLPack, `__cuda_array_interface__`, `__array_interface__` or the buffer protocol, as a view
that NumPy (host memory) or CuPy (a GPU) holds, and runs on CuPy's current stream.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import numpy as np

from . import _refuse
from ._call import Array
from ._dtypes import TABLE
from ._libraries import (
    CUPY,
    DLPACK,
    DLPACK_CUDA,
    NUMPY,
    TORCH,
    Exchanged,
    Library,
    has_buffer,
    offers,
)


class Caller:
    """The library and device of one call's first array, which every other array joins."""

    def __init__(self, name: str, x: object) -> None:
        self._name = name
        self._library = _library(name, x)
        self.x = self._library.describe(name, x, output=False)
        self.space = self._library.space(self.x.device)

    def same_library(self, other: Caller) -> None:
        """Refuse a second caller of another library."""
        if other._library.name != self._library.name:
            _refuse.other_library(other._name, self._name, self._library.name, other._library.name)

    def input(self, name: str, value: object) -> Array:
        """Describe an input; it may be of another library than x."""
        return self._join(name, value, _library(name, value))

    def optional(self, name: str, value: object) -> Array | None:
        """Describe an input that may be None."""
        return None if value is None else self.input(name, value)

    def parameter(self, name: str, value: object) -> Array | float | None:
        """Describe a weight or bias: an array, a constant or None."""
        if value is None:
            return None
        if _refuse.is_number(value):
            return _refuse.number(name, value)
        return self._join(name, value, _parameter_library(name, value))

    def _join(self, name: str, value: object, library: Library) -> Array:
        array = library.describe(name, value, output=False)
        if array.device == self.x.device:
            self.space.wait_for(library.stream(array.device))
        return array

    def output(self, name: str, value: object) -> Array | None:
        """Describe an output that the caller gave, which must be of x's library."""
        if value is None:
            return None
        library = _library(name, value)
        if library.name != self._library.name:
            _refuse.other_library(name, self._name, self._library.name, library.name)
        return library.describe(name, value, output=True)

    def give(self, array: Array | None, given: object) -> Any:
        """What the caller gets back: the output that was given, or the one made for this call."""
        if array is None:
            return None
        if given is not None:
            self._library.written(array)
            return given
        return self._library.give(array)


def look_at_parameter(name: str, value: object) -> Array | float | None:
    """Describe a weight or bias that no call uses yet; one that requires grad may come so far."""
    if value is None:
        return None
    if _refuse.is_number(value):
        return _refuse.number(name, value)
    library = _parameter_library(name, value)
    if library is TORCH:
        value = TORCH.detached(value)
    return library.describe(name, value, output=False)


def dtype_name(name: str, value: object) -> str | None:
    """The name of the dtype that `value` stands for, in any library's spelling."""
    if value is None or (isinstance(value, str) and value in TABLE):
        return value
    if isinstance(value, (str, type, np.dtype)):
        found = _parsed(value)
        if found is None:
            _refuse.not_a_dtype(name, value)
        return found
    # Other libraries' dtypes show as torch.float16, array_api_strict.float16.
    _, dot, shown = str(value).rpartition(".")
    if not dot or not shown.isidentifier():
        _refuse.not_a_dtype(name, value)
    return shown


@functools.lru_cache(maxsize=64)
def _parsed(value: object) -> str | None:
    """The name of the dtype that NumPy makes of `value`; None if that is none of the machine's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a spelling that NumPy gives up
            dtype = np.dtype(value)  # type: ignore[call-overload]
    except Exception:  # NumPy parses strings, and any error of a parser may come
        return None
    return str(dtype.name) if dtype.isnative else None


# Finding the library of an array -------------------------------------------------------------


def _find(value: object) -> Library | None:
    """The library of `value`, or None if it is no array."""
    if isinstance(value, np.ndarray):
        return NUMPY
    if _is(value, "torch", "Tensor"):
        return TORCH
    if _is(value, "cupy", "ndarray"):
        return CUPY
    if isinstance(value, (np.generic, bytes, bytearray, type)):
        return None
    if offers(value, *DLPACK):
        device_type, _ = value.__dlpack_device__()  # type: ignore[attr-defined]
        if int(device_type) in DLPACK_CUDA:
            return Exchanged(value, CUPY)
        return Exchanged(value, NUMPY)
    if offers(value, "__cuda_array_interface__"):
        return Exchanged(value, CUPY)
    if offers(value, "__array_interface__") or has_buffer(value):
        return Exchanged(value, NUMPY)
    return None


def _library(name: str, value: object) -> Library:
    return _find(value) or _refuse.not_an_array(name, value)


def _parameter_library(name: str, value: object) -> Library:
    return _find(value) or _refuse.not_an_array(name, value, constant=True)


def _is(value: object, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)
