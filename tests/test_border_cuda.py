# SPDX-License-Identifier: Apache-2.0
"""What the border asks of CuPy and of a GPU's runtime, recorded where there is neither driver nor
GPU: CuPy arrays lie over host memory, and the backend is a stand-in that keeps its calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _build, _info, _libraries, _run
from cupy_rmsnorm._call import Device

cupy = pytest.importorskip("cupy")

F32 = np.float32
HOST = np.arange(24, dtype=F32).reshape(2, 3, 4)
CURRENT_STREAMS = {0: 100, 1: 101}


class Gpu:
    """What the border did: the current device, the runtime calls, the backend's calls."""

    def __init__(self) -> None:
        self.device = 0
        self.events: list[tuple[str, int]] = []
        self.calls: list[Any] = []
        self.failure: Exception | None = None
        self.allocated_on: list[int] = []

    def forward(self, call: Any) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure

    backward = forward

    def set_device(self, index: int) -> None:
        self.device = index

    def allocate(self, size: int) -> Any:
        self.allocated_on.append(self.device)
        return over(np.empty(max(size, 1), np.uint8), self.device).data

    @property
    def call(self) -> Any:
        (call,) = self.calls
        return call


def over(values: np.ndarray, device: int = 0) -> Any:
    """A CuPy array over the memory of an ndarray."""
    memory = cupy.cuda.UnownedMemory(values.ctypes.data, max(values.nbytes, 1), values, device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(values.shape, values.dtype, pointer, values.strides)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    runtime = cupy.cuda.runtime
    events = gpu.events

    def current_stream(device: int = -1) -> Any:
        return SimpleNamespace(ptr=CURRENT_STREAMS[gpu.device if device == -1 else device])

    monkeypatch.setattr(runtime, "getDevice", lambda: gpu.device)
    monkeypatch.setattr(runtime, "setDevice", gpu.set_device)
    monkeypatch.setattr(runtime, "eventCreateWithFlags", lambda flags: 9 if flags == 2 else 0)
    monkeypatch.setattr(
        runtime, "eventRecord", lambda event, stream: events.append(("record", stream))
    )
    monkeypatch.setattr(
        runtime, "streamWaitEvent", lambda stream, event: events.append(("wait", stream))
    )
    monkeypatch.setattr(runtime, "eventDestroy", lambda event: events.append(("destroy", event)))
    monkeypatch.setattr(
        runtime, "pointerGetAttributes", lambda pointer: SimpleNamespace(device=gpu.device)
    )
    monkeypatch.setattr(cupy.cuda, "get_current_stream", current_stream)
    monkeypatch.setattr(_run, "backend", lambda device: gpu)
    monkeypatch.setattr(_info, "available", lambda: (True, ""))
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(gpu.allocate)
    yield gpu
    cupy.cuda.set_allocator(before)


@pytest.mark.parametrize("status", [0, 3, 100])  # CUDA_ERROR_NOT_INITIALIZED is 3
def test_a_fork_that_cuda_does_not_serve(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(_build, "driver", lambda: SimpleNamespace(cuInit=lambda flags: status))
    _libraries._require_cuda.cache_clear()
    process = os.getpid()
    for turn in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda turn=turn: process + turn)
        if status == 3:
            with pytest.raises(RuntimeError, match=r"forked from .*: start .* 'spawn'$"):
                norms.rms_norm(over(HOST))
        else:
            norms.rms_norm(over(HOST))
    assert len(gpu.calls) == (0 if status == 3 else 2)


# CuPy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, F32, ml_dtypes.bfloat16])
def test_cupy_in_cupy_out(gpu: Gpu, dtype: Any) -> None:
    values = HOST.astype(dtype)
    y, rstd = norms.rms_norm_forward(over(values))
    assert type(y) is cupy.ndarray
    assert (y.shape, y.dtype, rstd.shape, rstd.dtype) == (HOST.shape, dtype, (2, 3), F32)
    x = gpu.call.x
    assert (x.pointer, x.shape, x.strides) == (values.ctypes.data, HOST.shape, (12, 4, 1))
    assert x.dtype == np.dtype(dtype).name
    assert x.device == Device("cuda", 0)
    assert x.numpy is None
    assert gpu.call.y.pointer == y.data.ptr
    assert gpu.events == []


def test_strides_and_offsets_of_a_view(gpu: Gpu) -> None:
    x = over(HOST)[:, ::2, 1:]
    norms.rms_norm(x)
    assert gpu.call.x.strides == (12, 8, 1)
    assert gpu.call.x.pointer == HOST.ctypes.data + 4


def test_outputs_are_the_same_objects(gpu: Gpu) -> None:
    x, out = over(HOST), over(HOST.copy())
    assert norms.rms_norm(x, out=out) is out
    assert norms.rms_norm(x, out=x) is x
    assert gpu.allocated_on == []


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_stream_and_memory_are_of_the_arrays_device(gpu: Gpu, current: int, device: int) -> None:
    gpu.device = current
    y = norms.rms_norm(over(HOST, device))
    assert gpu.call.space.stream == CURRENT_STREAMS[device]
    assert gpu.call.space.device == Device("cuda", device)
    assert gpu.allocated_on == [device]
    assert y.data.device_id == device
    assert gpu.device == current


def test_current_device_survives_an_error(gpu: Gpu) -> None:
    gpu.failure = RuntimeError("launch failed")
    with pytest.raises(RuntimeError, match="launch failed"):
        norms.rms_norm(over(HOST, 1))
    assert gpu.device == 0

    def out_of_memory(size: int) -> Any:
        raise MemoryError

    cupy.cuda.set_allocator(out_of_memory)
    with pytest.raises(MemoryError):
        norms.rms_norm(over(HOST, 1))
    assert gpu.device == 0


@pytest.mark.parametrize("name", ["weight", "bias", "where", "valid_rows", "out"])
def test_arrays_on_two_devices_are_refused(gpu: Gpu, name: str) -> None:
    values = {
        "weight": np.ones(4, F32),
        "bias": np.ones(4, F32),
        "where": np.ones((2, 3), bool),
        "valid_rows": np.ones(1, np.int64),
        "out": HOST.copy(),
    }[name]
    message = rf"^{name} must be on x's device cuda:0, got cuda:1$"
    with pytest.raises(ValueError, match=message):
        norms.rms_norm(over(HOST), **{name: over(values, 1)})
    if name != "out":
        with pytest.raises(ValueError, match=message.replace("cuda:1", "cpu")):
            norms.rms_norm(over(HOST), **{name: values})
        with pytest.raises(ValueError, match=rf"^{name} must be on x's device cpu, got cuda:0$"):
            norms.rms_norm(HOST, **{name: over(values)})
    assert gpu.calls == []


def test_device_scalars_are_no_constants(gpu: Gpu) -> None:
    with pytest.raises(TypeError, match=r"^weight must be an array .* got a 0-d array$"):
        norms.rms_norm(over(HOST), over(np.array(2, F32)))
    with pytest.raises(TypeError, match=r"^eps must be a real number, got cupy\.ndarray$"):
        norms.rms_norm(over(HOST), eps=over(np.array(1e-6, F32)))


# Arrays known by an interface only -----------------------------------------------------------


class Interface:
    """A numba-like array: `__cuda_array_interface__` and nothing else."""

    def __init__(self, values: np.ndarray, **changes: Any) -> None:
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (values.ctypes.data, False),
            "strides": None,
            "version": 3,
        } | changes


def test_cuda_array_interface_in_cupy_out(gpu: Gpu) -> None:
    y = norms.rms_norm(Interface(HOST))
    assert type(y) is cupy.ndarray
    x = gpu.call.x
    assert (x.pointer, x.shape, x.strides) == (HOST.ctypes.data, HOST.shape, (12, 4, 1))
    assert gpu.events == []


def test_cuda_array_interface_strides(gpu: Gpu) -> None:
    view = HOST[:, ::2, ::-1]
    norms.rms_norm(Interface(view, strides=view.strides))
    assert gpu.call.x.strides == (12, 8, -1)
    assert gpu.call.x.pointer == HOST.ctypes.data + 12


@pytest.mark.parametrize("stream", [1, 2, 77])
def test_its_stream_is_awaited_by_an_event(gpu: Gpu, stream: int) -> None:
    norms.rms_norm(Interface(HOST, stream=stream))
    assert gpu.events == [("record", stream), ("wait", 100), ("destroy", 9)]


def test_its_stream_is_not_awaited_if_it_is_ours(gpu: Gpu) -> None:
    norms.rms_norm(Interface(HOST, stream=100))
    assert gpu.events == []


def test_its_read_only_flag_is_kept(gpu: Gpu) -> None:
    out = Interface(HOST.copy(), data=(HOST.ctypes.data, True))
    with pytest.raises(ValueError, match=r"^out must be writable, got a read-only array$"):
        norms.rms_norm(over(HOST.copy()), out=out)


def test_masked_interface_is_refused(gpu: Gpu) -> None:
    with pytest.raises(TypeError, match=r"^x must be a plain array, got a masked array$"):
        norms.rms_norm(Interface(HOST, mask=Interface(HOST > 0)))


def test_out_by_interface_is_the_same_object(gpu: Gpu) -> None:
    out = Interface(HOST.copy())
    assert norms.rms_norm(Interface(HOST), out=out) is out
    assert gpu.call.y.pointer == out.values.ctypes.data


class Exchange:
    """A GPU array known by DLPack and an array namespace."""

    handed_out: list[Any]

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the border lets CuPy ask for it")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: ("from_dlpack", array))


def test_dlpack_runs_on_cupys_stream_and_comes_back(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy, "from_dlpack", lambda array: over(array.values))
    x = Exchange(HOST)
    name, y = norms.rms_norm(x)
    assert name == "from_dlpack"
    assert type(y) is cupy.ndarray
    assert gpu.call.space.stream == 100
    assert gpu.call.x.pointer == HOST.ctypes.data


def misaligned(values: np.ndarray) -> np.ndarray:
    """The same values one byte past a multiple of their size."""
    moved = np.empty(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    moved[...] = values
    return moved


@pytest.mark.parametrize("wrap", [over, Interface], ids=["cupy", "interface"])
@pytest.mark.parametrize("name", ["x", "weight", "bias", "out", "rstd_out", "valid_rows"])
def test_elements_at_odd_addresses_are_refused(gpu: Gpu, wrap: Any, name: str) -> None:
    arrays = {
        "x": HOST,
        "weight": np.ones(4, F32),
        "bias": np.ones(4, np.float16),
        "out": HOST.copy(),
        "rstd_out": np.ones((2, 3), F32),
        "valid_rows": np.array([6], np.int32),
    }
    size = arrays[name].itemsize
    arrays[name] = misaligned(arrays[name])
    message = (
        f"{name} must begin at a multiple of its element size, {size} bytes, got an address that "
        "is 1 past one: copy it first"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        norms.rms_norm_forward(**{key: wrap(value) for key, value in arrays.items()})
    assert gpu.calls == []


def test_empty_arrays_may_begin_anywhere(gpu: Gpu) -> None:
    norms.rms_norm(over(misaligned(HOST)[:0]))
    assert gpu.call.x.shape == (0, 3, 4)


# Two libraries in one call -------------------------------------------------------------------


class TorchTensor:
    """As much of a CUDA tensor as the border looks at."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = f"torch.{values.dtype.name}"
        self.device = SimpleNamespace(type="cuda", index=0)
        self.layout = "strided"
        self.is_nested = False
        self.requires_grad = False

    __torch_dispatch__ = None

    def is_neg(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return int(self.values.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.values.itemsize for stride in self.values.strides)


class Module(SimpleNamespace):
    """A key of caches, as modules are."""

    __hash__ = object.__hash__


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch whose current stream is 55."""
    made = []

    def empty(shape: Any, dtype: str, device: Any) -> TorchTensor:
        tensor = TorchTensor(np.empty(shape, dtype.removeprefix("torch.")))
        made.append((tensor, device))
        return tensor

    module = Module(
        Tensor=TorchTensor,
        strided="strided",
        float32="torch.float32",
        empty=empty,
        device=lambda kind, index: (kind, index),
        is_grad_enabled=lambda: True,
        autograd=SimpleNamespace(
            graph=SimpleNamespace(increment_version=lambda tensor: None),
            forward_ad=SimpleNamespace(unpack_dual=lambda tensor: SimpleNamespace(tangent=None)),
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 55 + index),
        made=made,
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", module)
    return module


def test_torch_tensors_run_on_torchs_stream(gpu: Gpu, torch: Any) -> None:
    y, rstd = norms.rms_norm_forward(TorchTensor(HOST), TorchTensor(np.ones(4, F32)))
    assert gpu.call.space.stream == 55
    assert gpu.call.x.pointer == HOST.ctypes.data
    assert gpu.call.x.device == Device("cuda", 0)
    assert [y, rstd] == [
        tensor for tensor, _ in sorted(torch.made, key=lambda m: -m[0].values.size)
    ]
    assert {device for _, device in torch.made} == {("cuda", 0)}
    assert gpu.events == []
    assert gpu.allocated_on == []


def test_torch_tensors_without_a_gpu_backend(
    gpu: Gpu, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_info, "available", lambda: (False, "CuPy is not installed"))
    message = r"^x is on a CUDA device, but the GPU backend cannot run: CuPy is not installed$"
    with pytest.raises(RuntimeError, match=message):
        norms.rms_norm(TorchTensor(HOST))
    assert gpu.calls == []


def test_torch_tensors_at_odd_addresses_are_refused(gpu: Gpu, torch: Any) -> None:
    with pytest.raises(ValueError, match=r"^x must begin at a multiple of its element size, 4 by"):
        norms.rms_norm(TorchTensor(misaligned(HOST)))


def test_torchs_stream_by_its_public_name(gpu: Gpu, torch: Any) -> None:
    torch._C = SimpleNamespace()
    stream = SimpleNamespace(cuda_stream=66)
    torch.cuda = SimpleNamespace(current_stream=lambda index: stream)
    norms.rms_norm(TorchTensor(HOST))
    assert gpu.call.space.stream == 66


def test_another_librarys_stream_is_awaited(gpu: Gpu, torch: Any) -> None:
    norms.rms_norm(TorchTensor(HOST), over(np.ones(4, F32)))
    assert gpu.events == [("record", 100), ("wait", 55), ("destroy", 9)]
    gpu.events.clear()
    norms.rms_norm(over(HOST), TorchTensor(np.ones(4, F32)))
    assert gpu.events == [("record", 55), ("wait", 100), ("destroy", 9)]
