# SPDX-License-Identifier: Apache-2.0
"""The array libraries and devices that every test runs on.

A test makes NumPy arrays, hands them out as arrays of the backend's library (`input`, `output`,
`empty`), calls the library under test, and reads results back (`numpy`). A view keeps its strides
and its offset, and views of one buffer share one buffer. `verify` then holds promises that every
call makes: an input has not changed, and nothing around an output was written.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests import inputs, oracle

ALIGNMENT = 64  # bytes, of the buffer that a view lies in; the view's own offset is on top


@dataclass
class _Buffer:
    owner: np.ndarray  # what was handed out
    native: Any  # a one-dimensional uint8 array of the backend's library
    writable: np.ndarray  # one bool an element


class Backend:
    """NumPy arrays; the other backends replace the four methods that follow the first block."""

    name = "numpy"
    gpu = False
    negative_strides = True

    @staticmethod
    def running() -> AbstractContextManager[None]:
        """What has to be in place while a test runs."""
        return nullcontext()

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}

    def input(self, array: Any) -> Any:
        """The backend's array with array's values, strides and offset. Scalars and None pass."""
        return self._hand_out(array) if isinstance(array, np.ndarray) else array

    def output(self, array: np.ndarray) -> Any:
        """The same for an array that the call may write."""
        native = self._hand_out(array)
        owner = _owner(array)
        if array.size == 0:
            return native
        start = _address(array) - _address(owner)
        strides = [stride // owner.itemsize for stride in array.strides]
        flags = self._buffers[id(owner)].writable
        np.ndarray(array.shape, bool, flags.data, start // owner.itemsize, strides)[...] = True
        return native

    def empty(self, shape: tuple[int, ...], dtype: str, layout: str = "contiguous") -> Any:
        """An output full of NaN, between guard zones."""
        values = np.full(shape, np.nan, oracle.DTYPES[dtype])
        return self.output(inputs.lay(values, layout))

    def verify(self) -> None:
        """Assert that every element that was not handed out as an output is as it was."""
        __tracebackhide__ = True
        for buffer in self._buffers.values():
            differs = self.numpy(buffer.native) != _bytes(buffer.owner)
            differs = (
                differs.reshape(buffer.owner.size, buffer.owner.itemsize).any(axis=1)
                & ~buffer.writable
            )
            if differs.any():
                raise AssertionError(
                    f"{int(differs.sum())} elements that are no output were written, the first is "
                    f"{int(np.argmax(differs))} of a {buffer.owner.dtype} buffer of {differs.size}"
                )

    def forget(self) -> None:
        """Drop every buffer, so that one test can hold many small cases."""
        self._buffers.clear()

    def _hand_out(self, array: np.ndarray) -> Any:
        owner = _owner(array)
        buffer = self._buffers.get(id(owner))
        if buffer is None:
            data = _bytes(owner)
            buffer = _Buffer(owner, self._upload(data), np.zeros(owner.size, bool))
            self._buffers[id(owner)] = buffer
        return self._as_strided(buffer.native, _address(array) - _address(owner), array)

    def holds(self, array: np.ndarray) -> bool:
        """Whether the library can have an array with these strides."""
        return self.negative_strides or min(array.strides, default=0) >= 0

    def _upload(self, data: np.ndarray) -> Any:
        room = np.empty(data.size + ALIGNMENT, np.uint8)
        start = -_address(room) % ALIGNMENT
        room = room[start : start + data.size]
        room[:] = data
        return room

    def _as_strided(self, native: Any, offset: int, like: np.ndarray) -> Any:
        if like.size == 0:
            return native[:0].view(like.dtype).reshape(like.shape)
        return np.ndarray(like.shape, like.dtype, native.data, offset, like.strides)

    def numpy(self, native: Any) -> np.ndarray:
        """The values, as a NumPy array that later calls do not change."""
        assert isinstance(native, np.ndarray), f"expected an ndarray, got {type(native)}"
        return native.copy()

    def fill(self, native: Any, value: float) -> None:
        """Write one value into every element."""
        native[...] = value

    def poison(self, nbytes: int) -> None:
        """Leave NaN in the memory that the library is likely to allocate next."""
        full = [self._upload(np.full(nbytes, 0xFF, np.uint8)) for _ in range(4)]
        del full

    def synchronize(self) -> None:
        """Wait for the device."""


class Torch(Backend):
    """torch tensors on the CPU."""

    name = "torch-cpu"
    device = "cpu"
    negative_strides = False

    def _upload(self, data: np.ndarray) -> Any:
        import torch

        native = torch.empty(data.size, dtype=torch.uint8, device=self.device)
        native.copy_(torch.from_numpy(np.array(data)))
        return native

    def _as_strided(self, native: Any, offset: int, like: np.ndarray) -> Any:
        import torch

        size = like.itemsize
        whole = native[: native.numel() // size * size].view(getattr(torch, like.dtype.name))
        strides = [stride // size for stride in like.strides]
        return torch.as_strided(whole, like.shape, strides, offset // size)

    def numpy(self, native: Any) -> np.ndarray:
        import torch

        assert type(native) is torch.Tensor, f"expected a torch.Tensor, got {type(native)}"
        assert native.device.type == self.device
        native = native.detach().cpu()
        if native.dtype == torch.bfloat16:
            return native.contiguous().view(torch.int16).numpy().copy().view(oracle.BFLOAT16)
        return native.numpy().copy()


class TorchCuda(Torch):
    """torch tensors on the GPU."""

    name = "torch-cuda"
    device = "cuda"
    gpu = True

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()


class Cupy(Backend):
    """CuPy arrays on the GPU."""

    name = "cupy"
    gpu = True

    def _upload(self, data: np.ndarray) -> Any:
        import cupy

        return cupy.asarray(data)

    def _as_strided(self, native: Any, offset: int, like: np.ndarray) -> Any:
        import cupy

        return cupy.ndarray(like.shape, like.dtype, native.data + offset, like.strides)

    def numpy(self, native: Any) -> np.ndarray:
        import cupy

        assert type(native) is cupy.ndarray, f"expected a cupy.ndarray, got {type(native)}"
        return native.view(f"u{native.itemsize}").get().view(native.dtype)

    def synchronize(self) -> None:
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


class Emulator(Cupy):
    """CuPy arrays over host memory, and the library's own kernels on the CPU."""

    name = "emulator"
    gpu = False

    @staticmethod
    def running() -> AbstractContextManager[None]:
        from tests import emulator

        return emulator.installed(checked=False)

    def _upload(self, data: np.ndarray) -> Any:
        from tests import emulator

        return emulator.from_numpy(data)

    def numpy(self, native: Any) -> np.ndarray:
        import cupy

        from tests import emulator

        assert type(native) is cupy.ndarray, f"expected a cupy.ndarray, got {type(native)}"
        return emulator.to_numpy(native)

    def fill(self, native: Any, value: float) -> None:
        from tests import emulator

        emulator.host_view(native)[...] = value

    def synchronize(self) -> None:
        """A launch returns when all is done."""


BACKENDS = {cls.name: cls for cls in (Backend, Torch, Emulator, Cupy, TorchCuda)}


@functools.cache
def missing(name: str) -> str | None:
    """Why a backend cannot run here; None where it can."""
    if name == "emulator":
        if importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed"
        from tests import emulator

        return emulator.missing()
    if name.startswith("torch"):
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        import torch

        if name == "torch-cuda" and not torch.cuda.is_available():
            return "torch finds no CUDA device"
    if name in ("cupy", "torch-cuda"):
        import cupy_rmsnorm

        if not cupy_rmsnorm.is_available():
            return f"no GPU: {cupy_rmsnorm.info()['reason']}"
    return None


def skip_without(name: str) -> None:
    """Skip the test that asks, where this backend cannot run."""
    import pytest  # which not all that take backends need

    reason = missing(name)
    if reason is not None:
        pytest.skip(reason)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _owner(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory which `array` views."""
    owner, base = array, array.base
    while base is not None:
        if isinstance(base, np.ndarray):
            owner = base
        base = getattr(base, "base", None)
    return owner


def _bytes(owner: np.ndarray) -> np.ndarray:
    return owner.reshape(-1, order="A").view(np.uint8)
