# SPDX-License-Identifier: Apache-2.0
"""The array libraries: how each describes an array, allocates, and names its stream.

With `_border` the only file that knows them. None is imported before the caller has.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from typing import Any

import numpy as np

from . import _refuse, _torch_memory
from ._call import Array, Device
from ._device import current_device, runtime
from ._dtypes import TABLE, numpy_dtype
from ._layout import contiguous_strides

CPU = Device("cpu", 0)

DLPACK = ("__dlpack__", "__dlpack_device__")
# DLPack's device types that a backend can read.
DLPACK_HOST = (1, 3)  # plain and pinned
DLPACK_CUDA = (2, 13)  # CUDA's own and its managed memory

CUDA_EVENT_DISABLE_TIMING = 2
CUDA_ERROR_NOT_INITIALIZED = 3


class Library:
    """What the border asks of an array library."""

    name: str

    def describe(self, name: str, value: Any, output: bool) -> Array:
        """`value` as an Array; its `native` is what this library's space works on."""
        raise NotImplementedError

    def space(self, device: Device) -> Space:
        """Memory and the current stream of this library on `device`."""
        raise NotImplementedError

    def stream(self, device: Device) -> int:
        """The raw handle of this library's current stream on `device`; 0 on the CPU."""
        return 0

    def give(self, array: Array) -> Any:
        """An output made by this library's space, for the caller."""
        return array.native

    def written(self, array: Array) -> None:
        """Tell the library that an array of the caller's has new values."""


class Space:
    """The part of a space that does not depend on where it lies."""

    device: Device
    stream: int

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        raise NotImplementedError

    def contiguous(self, array: Array) -> Array:
        raise NotImplementedError

    def assign(self, target: Array, source: Array) -> None:
        raise NotImplementedError

    def wait_for(self, stream: int) -> None:
        """Let this space's stream wait for what `stream` has been given so far."""


class _HostSpace(Space):
    """Host memory, held by NumPy."""

    device = CPU
    stream = 0

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        return _host_array(name, np.empty(shape, numpy_dtype(dtype)))

    def contiguous(self, array: Array) -> Array:
        return _host_array(array.name, np.array(array.numpy, order="C", subok=False))

    def assign(self, target: Array, source: Array) -> None:
        np.copyto(target.numpy, source.numpy)


class _NumPy(Library):
    name = "numpy"

    def describe(self, name: str, value: Any, output: bool) -> Array:
        if isinstance(value, np.ma.MaskedArray):
            _refuse.unsupported_array(name, "a plain array", "a masked array")
        if not value.dtype.isnative:
            remedy = f'{name}.astype({name}.dtype.newbyteorder("="))'
            got = f"{value.dtype}; {remedy} converts it"
            _refuse.unsupported_array(name, "in native byte order", got)
        return _host_array(name, value, output)

    def space(self, device: Device) -> Space:
        return _HostSpace()


class _Torch(Library):
    name = "torch"

    def describe(self, name: str, value: Any, output: bool) -> Array:
        torch = sys.modules["torch"]
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            _refuse.unsupported_array(name, "a tensor with memory of its own", _refuse.kind(value))
        if value.layout is not torch.strided:
            _refuse.unsupported_array(name, "a dense tensor", str(value.layout))
        if value.is_nested:
            _refuse.unsupported_array(name, "a dense tensor", "a nested one")
        if value.is_neg():
            _refuse.unsupported_array(
                name, "a resolved tensor", "one with the negative bit set: use resolve_neg()"
            )
        try:
            pointer = value.data_ptr()
        except RuntimeError:
            _refuse.transformed(name)
        if value.requires_grad:
            if output:
                _refuse.output_needs_gradient(name)
            if torch.is_grad_enabled():
                _refuse.needs_gradient(name)
            value = value.detach()
        where = value.device
        if where.type not in ("cpu", "cuda"):
            _refuse.unreachable_device(name, str(where))
        shape = tuple(value.shape)
        if not pointer and math.prod(shape):  # functional tensors, zeros of autograd
            _refuse.unsupported_array(name, "a tensor with memory of its own", "one without")
        forward_ad = torch.autograd.forward_ad
        # Without a level there is no tangent to ask for, which takes a microsecond.
        if getattr(forward_ad, "_current_level", 0) >= 0 and (
            forward_ad.unpack_dual(value).tangent is not None
        ):
            _refuse.has_tangent(name)
        if where.type == "cpu":
            return _torch_host_array(name, value)
        _require_gpu(name)
        return _cuda_array(
            name,
            value,
            pointer,
            shape,
            value.stride(),
            _torch_dtype_name(value.dtype),
            where.index,
        )

    def detached(self, value: Any) -> Any:
        """The same memory without autograd."""
        return value.detach()

    def space(self, device: Device) -> Space:
        return _TorchHostSpace() if device == CPU else _TorchSpace(device)

    def stream(self, device: Device) -> int:
        return 0 if device == CPU else _torch_stream(device.index)

    def written(self, array: Array) -> None:
        # Autograd then refuses a backward through values that this call replaced.
        sys.modules["torch"].autograd.graph.increment_version(array.native)


class _CuPy(Library):
    name = "cupy"

    def describe(self, name: str, value: Any, output: bool) -> Array:
        return _cupy_array(name, value)

    def space(self, device: Device) -> Space:
        return _CuPySpace(device)

    def stream(self, device: Device) -> int:
        return 0 if device == CPU else _cupy_stream(device.index)


class Exchanged(Library):
    """Another library, whose arrays come in as views that NumPy or CuPy holds."""

    def __init__(self, value: Any, holder: Library) -> None:
        self._holder = holder
        self._namespace: Any = None
        self.name = holder.name
        if offers(value, "__array_namespace__"):
            self._namespace = value.__array_namespace__()
            self.name = type(value).__module__.partition(".")[0]

    def describe(self, name: str, value: Any, output: bool) -> Array:
        if self._holder is CUPY:
            view, readonly = _cuda_view(name, value)
            return _cupy_array(name, view, readonly)
        return self._holder.describe(name, _host_view(name, value, output), output)

    def space(self, device: Device) -> Space:
        return self._holder.space(device)

    def stream(self, device: Device) -> int:
        return self._holder.stream(device)

    def give(self, array: Array) -> Any:
        if self._namespace is None:
            return array.native
        try:
            return self._namespace.from_dlpack(array.native)
        except BufferError:
            # NumPy exports no bfloat16.
            return self._namespace.asarray(array.native)


NUMPY = _NumPy()
TORCH = _Torch()
CUPY = _CuPy()


# Host memory ---------------------------------------------------------------------------------


def _host_array(name: str, values: np.ndarray, output: bool = False) -> Array:
    itemsize = values.dtype.itemsize or 1  # 0: an empty record, refused with other dtypes
    if any(stride % itemsize for stride in values.strides):
        if output:
            _refuse.uneven_strides(name)
        values = np.array(values, order="C")
    values = values.view(np.ndarray)
    return Array(
        name,
        values,
        values.__array_interface__["data"][0],
        values.shape,
        _regular(values.shape, tuple(stride // itemsize for stride in values.strides)),
        _dtype_name(values.dtype),
        CPU,
        values,
        not values.flags.writeable,
    )


def offers(value: object, *protocol: str) -> bool:
    """Whether `value` has every attribute of an exchange protocol; None stands for none."""
    return all(getattr(value, attribute, None) is not None for attribute in protocol)


def has_buffer(value: object) -> bool:
    """Whether `value` offers the buffer protocol."""
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _host_view(name: str, value: Any, output: bool) -> np.ndarray:
    """Another library's array in host memory as an ndarray; of an output never a copy."""
    reason = f"{_refuse.kind(value)}, which offers no more than a copy"
    if offers(value, *DLPACK):
        device_type, index = value.__dlpack_device__()
        if int(device_type) not in DLPACK_HOST:
            _refuse.unreachable_device(name, f"DLPack device {(int(device_type), index)}")
        try:
            return _from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            reason = f"{_refuse.kind(value)}, whose DLPack export failed ({error})"
            if "dtype" in str(error):
                reason += "; NumPy reads no bfloat16 by DLPack"
    if offers(value, "__array_interface__") or has_buffer(value):
        return np.asarray(value)
    if output or not offers(value, "__array__"):
        rule = "an array whose memory NumPy can " + ("write" if output else "read")
        _refuse.unsupported_array(name, rule, reason)
    return np.asarray(value)


class _Unflagged:
    """The memory of an unversioned DLPack export, which cannot say whether it is read-only.

    NumPy takes it for read-only. Libraries that protect arrays do not export them this way.
    """

    def __init__(self, view: np.ndarray) -> None:
        self._view = view  # keeps the memory alive
        interface = view.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _from_dlpack(value: Any) -> np.ndarray:
    view = np.from_dlpack(value)
    if _immutable(value):
        view.flags.writeable = False
    elif not view.flags.writeable and '"numpy_dltensor"' in repr(view.base):
        view = np.asarray(_Unflagged(view))
    return view


def _immutable(value: object) -> bool:
    """Whether `value` is of a library whose arrays never change; not all exports say so."""
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


class _TorchHostSpace(_HostSpace):
    """Host memory, held by torch."""

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        torch = sys.modules["torch"]
        return _torch_host_array(
            name, torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        )


def _torch_host_array(name: str, tensor: Any) -> Array:
    torch = sys.modules["torch"]
    dtype = _torch_dtype_name(tensor.dtype)
    if dtype == "bfloat16":
        # torch.Tensor.numpy knows no bfloat16.
        values = tensor.view(torch.int16).numpy().view(numpy_dtype(dtype))
    elif dtype in TABLE:
        values = tensor.numpy()
    else:
        values = None
    shape = tuple(tensor.shape)
    return Array(
        name,
        tensor,
        tensor.data_ptr(),
        shape,
        _regular(shape, tensor.stride()),
        dtype,
        CPU,
        values,
    )


@functools.cache
def _torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _dtype_name(dtype: np.dtype) -> str:
    """NumPy makes the name anew at each look."""
    return str(dtype.name)


def _regular(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides` with the free ones, those of axes of length 1 and of empty arrays, set as in a
    contiguous array."""
    if 0 in shape:
        return contiguous_strides(shape)
    if 1 not in shape:
        return tuple(strides)
    regular: list[int] = []
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        regular.append(step if size == 1 else stride)
        step = regular[-1] * size
    return tuple(reversed(regular))


# GPU memory ----------------------------------------------------------------------------------


class _CudaSpace(Space):
    """Memory on a GPU, ordered on the stream that is current for the caller's library."""

    def __init__(self, device: Device, stream: int) -> None:
        _require_cuda(os.getpid())
        self.device = device
        self.stream = stream

    def wait_for(self, stream: int) -> None:
        if stream != self.stream:
            _order(stream, self.stream, self.device.index)


class _TorchSpace(_CudaSpace):
    def __init__(self, device: Device) -> None:
        super().__init__(device, _torch_stream(device.index))

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        torch = sys.modules["torch"]
        tensor, strides = None, contiguous_strides(shape)
        if runtime().getDevice() == self.device.index:
            tensor = _torch_memory.new(torch)(shape, strides, getattr(torch, dtype))
        if tensor is None or tensor.get_device() != self.device.index:
            device = torch.device("cuda", self.device.index)
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        pointer = tensor.data_ptr() if type(tensor) is torch.Tensor else 0
        if not pointer:  # an empty one, or one that a mode of torch's made
            return TORCH.describe(name, tensor, output=True)
        return Array(name, tensor, pointer, shape, strides, dtype, self.device)

    def contiguous(self, array: Array) -> Array:
        torch = sys.modules["torch"]
        if isinstance(array.native, torch.Tensor):
            copy = array.native.clone(memory_format=torch.contiguous_format)
        else:
            # CuPy copies first, since torch aborts on a DLPack array with a negative stride.
            cupy_space = _CuPySpace(self.device)
            source = cupy_space.contiguous(array)
            self.wait_for(cupy_space.stream)
            copy = torch.from_dlpack(source.native).clone()
            # CuPy's pool may hand the temporary out again only after torch has read it.
            cupy_space.wait_for(self.stream)
        return TORCH.describe(array.name, copy, output=True)

    def assign(self, target: Array, source: Array) -> None:
        target.native.copy_(source.native)


class _CuPySpace(_CudaSpace):
    def __init__(self, device: Device) -> None:
        super().__init__(device, _cupy_stream(device.index))

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        with current_device(self.device.index):
            return _cupy_array(name, _cupy().ndarray(shape, numpy_dtype(dtype)))

    def contiguous(self, array: Array) -> Array:
        with current_device(self.device.index):
            return _cupy_array(array.name, self._ndarray(array).copy(order="C"))

    def assign(self, target: Array, source: Array) -> None:
        with current_device(self.device.index):
            self._ndarray(target)[...] = self._ndarray(source)

    def _ndarray(self, array: Array) -> Any:
        if isinstance(array.native, _cupy().ndarray):
            return array.native
        return _over_pointer(
            array.pointer,
            array.shape,
            array.strides,
            numpy_dtype(array.dtype),
            array.device.index,
            array.native,
        )


def _cupy() -> Any:
    """CuPy, which this imports for arrays on a GPU that are neither torch's nor CuPy's."""
    import cupy

    return cupy


@functools.cache
def _info() -> Any:
    """The module, which an import statement at each array would look up anew."""
    from . import _info

    return _info


def _require_gpu(name: str) -> None:
    """Refuse an array on a GPU where the GPU backend cannot run."""
    available, reason = _info().available()
    if not available:
        _refuse.no_gpu(name, reason)


@functools.cache
def _require_cuda(process: int) -> None:
    """Refuse GPU work in a process whose parent had used CUDA before the fork."""
    from ._build import driver

    try:
        status = driver().cuInit(0)
    except (OSError, AttributeError):  # no driver: what is missing is told elsewhere
        return
    if status == CUDA_ERROR_NOT_INITIALIZED:
        _refuse.forked()


def _cuda_array(
    name: str,
    native: Any,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    index: int,
    readonly: bool = False,
) -> Array:
    """An array on a GPU, which loads elements only from multiples of their size."""
    itemsize = TABLE[dtype].itemsize if dtype in TABLE else 1
    if pointer % itemsize and 0 not in shape:
        _refuse.misaligned(name, itemsize, pointer % itemsize)
    device = Device("cuda", index)
    return Array(
        name, native, pointer, shape, _regular(shape, strides), dtype, device, readonly=readonly
    )


def _cupy_array(name: str, value: Any, readonly: bool = False) -> Array:
    itemsize = value.dtype.itemsize
    strides = value.strides
    if any(stride % itemsize for stride in strides):
        _refuse.uneven_strides(name)
    return _cuda_array(
        name,
        value,
        value.data.ptr,
        value.shape,
        tuple(stride // itemsize for stride in strides),
        _dtype_name(value.dtype),
        value.data.device_id,
        readonly,
    )


def _cuda_view(name: str, value: Any) -> tuple[Any, bool]:
    """Another library's array on a GPU as a CuPy array, and whether it is read-only.

    CuPy's current stream waits for the producer; the host never does.
    """
    _require_gpu(name)
    if offers(value, *DLPACK):
        # CuPy hands its current stream to value.__dlpack__(stream=...), and loses DLPack's
        # read-only flag.
        return _cupy().from_dlpack(value), _immutable(value)
    interface = value.__cuda_array_interface__
    if interface.get("mask") is not None:
        _refuse.unsupported_array(name, "a plain array", "a masked array")
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    pointer, readonly = interface["data"]
    itemsize = dtype.itemsize or 1
    strides = interface.get("strides")
    if strides is None:
        counted = contiguous_strides(shape)
    else:
        if any(stride % itemsize for stride in strides):
            _refuse.uneven_strides(name)
        counted = tuple(stride // itemsize for stride in strides)
    index = _pointer_device(pointer)
    stream = interface.get("stream")
    if stream is not None:
        current = _cupy_stream(index)
        if stream != current:
            _order(stream, current, index)
    return _over_pointer(pointer, shape, counted, dtype, index, value), readonly


def _over_pointer(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype,
    index: int,
    owner: object,
) -> Any:
    """A CuPy array over memory that `owner` keeps alive."""
    cupy = _cupy()
    steps = zip(shape, strides, strict=True)
    reach = sum((size - 1) * abs(stride) for size, stride in steps if size)
    memory = cupy.cuda.UnownedMemory(pointer, (reach + 1) * dtype.itemsize, owner, index)
    return cupy.ndarray(
        shape,
        dtype,
        cupy.cuda.MemoryPointer(memory, 0),
        tuple(stride * dtype.itemsize for stride in strides),
    )


def _pointer_device(pointer: int) -> int:
    runtime = _cupy().cuda.runtime
    if not pointer:  # an empty array
        return int(runtime.getDevice())
    return int(runtime.pointerGetAttributes(pointer).device)


def _torch_stream(index: int) -> int:
    torch = sys.modules["torch"]
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is not None:
        return int(raw_stream(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


def _cupy_stream(index: int) -> int:
    return int(_cupy().cuda.get_current_stream(index).ptr)


def _order(producer: int, consumer: int, index: int) -> None:
    """Let the stream `consumer` wait for the work that the stream `producer` has so far."""
    runtime = _cupy().cuda.runtime
    with current_device(index):
        event = runtime.eventCreateWithFlags(CUDA_EVENT_DISABLE_TIMING)
        try:
            runtime.eventRecord(event, producer)
            runtime.streamWaitEvent(consumer, event)
        finally:
            # CUDA frees the event once the wait is over.
            runtime.eventDestroy(event)
