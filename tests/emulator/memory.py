# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays over host memory, between guard zones."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from tests.emulator import build

ALIGNMENT = 512  # as CuPy's pool gives
GUARD_BYTES = 512
GUARD, POISON = 0xA5, 0xFF  # 0xff: NaN in every floating-point dtype


class OutOfBounds(RuntimeError):
    """Something wrote beside an array."""


class _Allocation:
    """One block of host memory; kernels may reach `size` bytes from `pointer` and no others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = np.full(size + 2 * GUARD_BYTES + ALIGNMENT, GUARD, np.uint8)
        first = self._bytes.ctypes.data + GUARD_BYTES
        self.pointer = -(-first // ALIGNMENT) * ALIGNMENT
        start = self.pointer - self._bytes.ctypes.data
        self._bytes[start : start + size] = POISON
        self._guards = (
            self._bytes[start - GUARD_BYTES : start],
            self._bytes[start + size : start + size + GUARD_BYTES],
        )
        runtime = build.runtime()
        runtime.emulator_add_range(self.pointer, size)
        weakref.finalize(self, runtime.emulator_remove_range, self.pointer).atexit = False

    def check(self) -> None:
        before, after = self._guards
        if (before != GUARD).any():
            distance = GUARD_BYTES - int(np.flatnonzero(before != GUARD)[0])
            raise OutOfBounds(
                f"wrote {distance} bytes before the begin of an array of {self.size} bytes"
            )
        if (after != GUARD).any():
            distance = int(np.flatnonzero(after != GUARD)[0])
            raise OutOfBounds(
                f"wrote {distance} bytes behind the end of an array of {self.size} bytes"
            )


_live: weakref.WeakSet[_Allocation] = weakref.WeakSet()


def allocate(size: int) -> Any:
    """What `cupy.cuda.set_allocator` takes."""
    from cupy.cuda import memory

    allocation = _Allocation(size)
    _live.add(allocation)
    owned = memory.UnownedMemory(allocation.pointer, size, allocation, 0)
    return memory.MemoryPointer(owned, 0)


def check_guards() -> None:
    """Raise if anything was written beside a live array."""
    for allocation in list(_live):
        allocation.check()


def host_view(array: Any) -> np.ndarray:
    """The memory of a CuPy array of the emulator, as an ndarray."""
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(step for step in reach if step < 0)
    high = sum(step for step in reach if step > 0) + array.itemsize
    raw = (ctypes.c_char * (high - low)).from_address(array.data.ptr + low)
    view: np.ndarray = np.ndarray(array.shape, array.dtype, raw, -low, array.strides)
    weakref.finalize(raw, lambda kept: None, array).atexit = False
    return view


def from_numpy(values: Any) -> Any:
    """A C-contiguous CuPy array with these values."""
    import cupy

    values = np.asarray(values)
    array = cupy.ndarray(values.shape, values.dtype)
    host_view(array)[...] = values
    return array


def to_numpy(array: Any) -> np.ndarray:
    """A copy of a CuPy array's values."""
    return np.array(host_view(array))
