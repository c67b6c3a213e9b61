# SPDX-License-Identifier: Apache-2.0
"""The short road of a forward call like one before it: look it up, pack addresses, launch.

A call qualifies if

- x is exactly a `cupy.ndarray` or a `torch.Tensor`, every other array is of that same type (an
  input may be a torch `Parameter`), and there is neither a mask nor a constant weight or bias;
- every array is C-contiguous, lies on the calling thread's current device, and begins at a
  multiple of 16 bytes;
- no array requires a gradient that would be recorded;
- a given output shares no byte with another array, or is exactly an input that it may replace;
- every option has the type that its signature names: False == 0, and only one of them is right.

Any other call, and the first of its kind, takes the general road, which checks, plans and compiles.
What that launched is kept here, under everything that chose it. A later call differs in addresses
and stream alone, so both roads run the same kernel with the same arguments.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import sys
import threading
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from . import _device
from ._call import Array, Forward
from ._dtypes import TABLE, numpy_dtype

if TYPE_CHECKING:
    from ._kernel import Launched

LIMIT = 1024  # calls that are kept; the oldest goes first
ALIGNMENT = 16  # bytes: where every array begins

# What the packed arguments of every forward kernel begin with: the addresses of y, residual_out,
# mean, rstd, x, residual, weight and bias.
_ADDRESSES = struct.Struct("@8Q")
_POINTER = struct.Struct("@Q")

# What tells a call apart, and the addresses of x, residual, weight, bias, out and residual_out
# (0: there is no such array).
Described = tuple[Hashable, int, int, int, int, int, int]


class _Torch:
    """torch tensors.

    The negative bit is not asked for, which costs more than a pointer: a view that has it skips
    every other number, and is contiguous only where it has a single element.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensor = torch.Tensor
        self._inputs = frozenset((torch.Tensor, torch.nn.Parameter))
        self._grad_enabled = torch.is_grad_enabled
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)
        self.written = torch.autograd.graph.increment_version

    def input(self, array: Any, device: int) -> int:
        """The address of an array that qualifies, else 0."""
        try:
            if (
                type(array) in self._inputs
                and array.get_device() == device
                and array.is_contiguous()
                and not (array.requires_grad and self._grad_enabled())
            ):
                return array.data_ptr()  # type: ignore[no-any-return]
        except RuntimeError:
            pass  # no memory of its own, as within vmap
        return 0

    def output(self, array: Any, device: int) -> int:
        """The same for an array that will be written."""
        if type(array) is self._tensor and not array.requires_grad:
            return self.input(array, device)
        return 0

    def dtype(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty_like(self, x: Any, dtype: Any) -> Any:
        """A new output, or one that does not qualify."""
        return self._torch.empty_like(x, dtype=dtype)


class _CuPy:
    """CuPy arrays."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._ndarray = cupy.ndarray
        # `flags` makes an object at each look.
        name = "_c_contiguous" if hasattr(cupy.ndarray, "_c_contiguous") else "flags.c_contiguous"
        self._contiguous = operator.attrgetter(name)

    def input(self, array: Any, device: int) -> int:
        """The address of an array that qualifies, else 0."""
        if type(array) is self._ndarray and self._contiguous(array):
            data = array.data
            if data.device_id == device:
                return data.ptr  # type: ignore[no-any-return]
        return 0

    output = input

    def dtype(self, name: str) -> Any:
        return numpy_dtype(name)

    def empty_like(self, x: Any, dtype: Any) -> Any:
        """A new output."""
        return self._ndarray(x.shape, dtype)

    def stream(self, device: int) -> int:
        return self._cupy.cuda.get_current_stream(device).ptr  # type: ignore[no-any-return]

    def written(self, array: Any) -> None:
        """CuPy does not count versions."""


Library = _Torch | _CuPy


class Entry:
    """One launch, ready but for addresses and stream."""

    def __init__(self, library: Library, call: Forward, launched: Launched) -> None:
        self._function = launched.function  # keeps the function behind `_handle` loaded
        self._handle = launched.function.ptr
        self._launch = launched.launch_kernel
        self._grid = launched.grid
        self._block = launched.block
        self._shared_bytes = launched.shared_bytes
        self._packed = launched.packed
        # A launch releases the GIL: each thread in one has a buffer of its own.
        self._buffers: deque[tuple[Any, int]] = deque()
        self.y_dtype = library.dtype(call.y.dtype)
        self.residual_dtype = library.dtype(call.residual.dtype) if call.residual else None
        self._x_bytes = _nbytes(call.x)
        self._y_bytes = _nbytes(call.y)
        self._residual_bytes = _nbytes(call.residual)
        self._weight_bytes = _nbytes(call.weight)
        self._bias_bytes = _nbytes(call.bias)
        residual_dtype = call.residual.dtype if call.residual else None
        self._y_may_be_x = call.y.dtype == call.x.dtype
        self._y_may_be_residual = call.y.dtype == residual_dtype
        self._residual_out_may_be_x = call.x.dtype == residual_dtype

    def separate(
        self, x: int, residual: int, weight: int, bias: int, y: int, residual_out: int
    ) -> bool:
        """Whether the given outputs overlap nothing but an input that they may replace."""
        x_end, residual_end = x + self._x_bytes, residual + self._residual_bytes
        weight_end, bias_end = weight + self._weight_bytes, bias + self._bias_bytes
        if y:
            end, residual_out_end = y + self._y_bytes, residual_out + self._residual_bytes
            in_x = y == x and self._y_may_be_x
            in_residual = y == residual and self._y_may_be_residual
            if (
                (y < x_end and x < end and not in_x)
                or (y < residual_end and residual < end and not in_residual)
                or (y < weight_end and weight < end)
                or (y < bias_end and bias < end)
                or (y < residual_out_end and residual_out < end)
            ):
                return False
        if residual_out:
            end = residual_out + self._residual_bytes
            in_x = residual_out == x and self._residual_out_may_be_x
            in_residual = residual_out == residual
            return not (
                (residual_out < x_end and x < end and not in_x)
                or (residual_out < residual_end and residual < end and not in_residual)
                or (residual_out < weight_end and weight < end)
                or (residual_out < bias_end and bias < end)
            )
        return True

    def launch(
        self, stream: int, x: int, residual: int, weight: int, bias: int, y: int, residual_out: int
    ) -> None:
        """Enqueue the kernel."""
        try:
            held = self._buffers.pop()
        except IndexError:
            held = self._new_buffer()
        buffer, address = held
        _ADDRESSES.pack_into(
            buffer, _POINTER.size, y, residual_out, 0, 0, x, residual, weight, bias
        )
        self._launch(
            self._handle,
            self._grid,
            1,
            1,
            self._block,
            1,
            1,
            self._shared_bytes,
            stream,
            address,
            0,
        )
        self._buffers.append(held)

    def _new_buffer(self) -> tuple[Any, int]:
        """The driver's list of one parameter, then that parameter: the struct of all arguments."""
        buffer = ctypes.create_string_buffer(_POINTER.size + len(self._packed))
        address = ctypes.addressof(buffer)
        _POINTER.pack_into(buffer, 0, address + _POINTER.size)
        ctypes.memmove(address + _POINTER.size, self._packed, len(self._packed))
        return buffer, address


def _nbytes(array: Array | float | None) -> int:
    return array.size * TABLE[array.dtype].itemsize if isinstance(array, Array) else 0


_libraries: dict[type, Library] = {}  # by the type of x
_entries: dict[Hashable, Entry] = {}
_lock = threading.Lock()


def typical(options: tuple[object, ...]) -> bool:
    """Whether each option has its documented type, so that equal options are the same ones."""
    eps, weight_offset, axis, cast, per_head, masked = options
    return (
        type(eps) is float
        and type(weight_offset) is float
        and type(axis) is int
        and type(cast) is str
        and type(per_head) is bool
        and type(masked) is str
    )


def forward(
    call: Hashable, x: Any, residual: Any, weight: Any, bias: Any, out: Any, residual_out: Any
) -> tuple[Any, Any] | None:
    """y and residual_out, or None: the call has to take the general road.

    `call` stands for the function and its options, whose types are `typical`.
    """
    library = _libraries.get(type(x))
    if library is None:
        return None
    device = _device.ready()
    described = _describe(library, device, call, x, residual, weight, bias, out, residual_out)
    if described is None:
        return None
    key, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at = described
    try:
        entry = _entries.get(key)
    except TypeError:  # an out_dtype that is no dtype
        return None
    if entry is None:
        return None
    if (y_at or residual_out_at) and not entry.separate(
        x_at, residual_at, weight_at, bias_at, y_at, residual_out_at
    ):
        return None
    y, sums = out, residual_out
    if out is None:
        y = library.empty_like(x, entry.y_dtype)
        y_at = library.output(y, device)
    if residual is not None and residual_out is None:
        sums = library.empty_like(x, entry.residual_dtype)
        residual_out_at = library.output(sums, device)
        if not residual_out_at:
            return None
    if not y_at:
        return None
    entry.launch(
        library.stream(device), x_at, residual_at, weight_at, bias_at, y_at, residual_out_at
    )
    if out is not None:
        library.written(out)
    if residual_out is not None:
        library.written(residual_out)
    return y, sums


def remember(
    call: Hashable,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual_out: Any,
    checked: Forward,
    launched: Launched,
) -> None:
    """Keep what the general road launched, if the call qualifies for the short one."""
    library = _library(type(x))
    if library is None or checked.hidden_size == 1:  # may have torch's negative bit
        return
    device = checked.space.device.index
    described = _describe(library, device, call, x, residual, weight, bias, out, residual_out)
    outputs = (checked.y.pointer, checked.residual_out.pointer if checked.residual_out else 0)
    if described is None or any(pointer % ALIGNMENT for pointer in outputs):
        return
    entry = Entry(library, checked, launched)
    try:
        with _lock:
            while len(_entries) >= LIMIT:
                del _entries[next(iter(_entries))]
            _entries[described[0]] = entry
    except TypeError:  # an out_dtype without a hash
        return


def forget() -> None:
    """Let every call take the general road once more."""
    with _lock:
        _entries.clear()


def _library(cls: type) -> Library | None:
    """The library of arrays that are exactly of `cls`; the caller has imported it."""
    if cls not in _libraries:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and cls is torch.Tensor:
            _libraries[cls] = _Torch(torch)
        elif cupy is not None and cls is cupy.ndarray:
            _libraries[cls] = _CuPy(cupy)
    return _libraries.get(cls)


def _describe(
    library: Library,
    device: int,
    call: Hashable,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual_out: Any,
) -> Described | None:
    """The call's arrays, or None where one does not qualify."""
    x_at = library.input(x, device)
    if not x_at:
        return None
    shape = x.shape
    residual_at = weight_at = bias_at = out_at = residual_out_at = 0
    residual_is = weight_is = bias_is = out_is = residual_out_is = None
    if weight is not None:
        weight_at = library.input(weight, device)
        if not weight_at:
            return None
        weight_is = weight.dtype, weight.shape
    if bias is not None:
        bias_at = library.input(bias, device)
        if not bias_at:
            return None
        bias_is = bias.dtype, bias.shape
    if residual is not None:
        residual_at = library.input(residual, device)
        if not residual_at or residual.shape != shape:
            return None
        residual_is = residual.dtype
    if out is not None:
        out_at = library.output(out, device)
        if not out_at or out.shape != shape:
            return None
        out_is = out.dtype
    if residual_out is not None:
        residual_out_at = library.output(residual_out, device)
        if not residual_out_at or residual_out.shape != shape:
            return None
        residual_out_is = residual_out.dtype
    if (x_at | residual_at | weight_at | bias_at | out_at | residual_out_at) % ALIGNMENT:
        return None
    return (
        (call, device, x.dtype, shape, weight_is, bias_is, residual_is, out_is, residual_out_is),
        x_at,
        residual_at,
        weight_at,
        bias_at,
        out_at,
        residual_out_at,
    )
