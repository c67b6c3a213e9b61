# SPDX-License-Identifier: Apache-2.0
"""The short road of a forward call like one before it: look it up, pack addresses, launch.

A call qualifies if

- x is exactly a `cupy.ndarray` or a `torch.Tensor`, every other array is of that same type (an
  input may be a torch `Parameter`), and there is neither a mask nor a constant weight or bias;
- every array is C-contiguous, lies on the calling thread's current device, and begins at a
  multiple of 16 bytes;
- no array requires a gradient that would be recorded;
- a given output shares no byte with another array, or is exactly an input that it may replace;
- a statistic is made by the call, not given to it as an output;
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
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from . import _device
from ._call import Array, Forward
from ._dtypes import TABLE, numpy_dtype

if TYPE_CHECKING:
    from ._kernel import Launched

ItemT = TypeVar("ItemT")

# How many calls are kept of one function and its options, and how many of the latter; the oldest
# goes first.
LIMIT = 512
OPTIONS_LIMIT = 64
ALIGNMENT = 16  # bytes: where every array begins

# What the packed arguments of every forward kernel begin with: the addresses of y, residual_out,
# mean, rstd, x, residual, weight and bias. In a buffer the driver's list of one parameter, 8 bytes,
# comes before them.
_ADDRESSES = struct.Struct("@8Q")
_POINTER = struct.Struct("@Q")


@dataclass(frozen=True, slots=True)
class Library:
    """What the short road asks of an array library."""

    # The address of an array that qualifies on this device, else 0.
    input: Callable[[Any, int], int]
    output: Callable[[Any, int], int]
    # The same of arrays of any strides.
    strided_input: Callable[[Any, int], int]
    strided_output: Callable[[Any, int], int]
    strides: Callable[[Any], tuple[int, ...]]  # in the library's own unit
    empty_like: Callable[[Any, Any], Any]  # a new array, of a dtype of the library's own
    empty: Callable[[Any, tuple[int, ...], Any], Any]  # the same, of another shape than x
    dtype: Callable[[str], Any]
    stream: Callable[[int], int]  # the raw handle of the device's current stream
    written: Callable[[Any], None] | None  # told of outputs that the caller gave


def _torch_library(torch: Any) -> Library:
    tensor, parameter = torch.Tensor, torch.nn.Parameter
    grad_enabled = torch.is_grad_enabled

    def address(array: Any, device: int) -> int:
        # The negative bit is not asked for, which costs more than a pointer: a view that has it
        # skips every other number, and is contiguous only where it has a single element.
        try:
            if array.get_device() == device and array.is_contiguous():
                return array.data_ptr()  # type: ignore[no-any-return]
        except RuntimeError:
            pass  # no memory of its own, as within vmap
        return 0

    def input(array: Any, device: int) -> int:
        cls = type(array)
        if cls is not tensor and cls is not parameter:
            return 0
        if array.requires_grad and grad_enabled():
            return 0
        return address(array, device)

    def output(array: Any, device: int) -> int:
        return 0 if type(array) is not tensor or array.requires_grad else address(array, device)

    def strided_address(array: Any, device: int) -> int:
        try:
            return array.data_ptr() if array.get_device() == device else 0
        except RuntimeError:
            return 0  # no memory of its own, as within vmap

    def strided_input(array: Any, device: int) -> int:
        if type(array) is not tensor or (array.requires_grad and grad_enabled()):
            return 0
        return strided_address(array, device)

    def strided_output(array: Any, device: int) -> int:
        if type(array) is not tensor or array.requires_grad:
            return 0
        return strided_address(array, device)

    empty_like = torch.empty_like
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return Library(
        input=input,
        output=output,
        strided_input=strided_input,
        strided_output=strided_output,
        strides=tensor.stride,
        empty_like=lambda x, dtype: empty_like(x, dtype=dtype),
        empty=lambda x, shape, dtype: x.new_empty(shape, dtype=dtype),
        dtype=lambda name: getattr(torch, name),
        stream=raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream),
        written=torch.autograd.graph.increment_version,
    )


def _cupy_library(cupy: Any) -> Library:
    ndarray, cuda = cupy.ndarray, cupy.cuda

    def address(array: Any, device: int) -> int:
        if type(array) is not ndarray:
            return 0
        try:
            contiguous = array._c_contiguous
        except AttributeError:  # then the public way, which makes an object at each look
            contiguous = array.flags.c_contiguous
        data = array.data
        return data.ptr if contiguous and data.device_id == device else 0

    def strided_address(array: Any, device: int) -> int:
        if type(array) is not ndarray:
            return 0
        data = array.data
        return data.ptr if data.device_id == device else 0

    return Library(
        input=address,
        output=address,
        strided_input=strided_address,
        strided_output=strided_address,
        strides=operator.attrgetter("strides"),
        empty_like=lambda x, dtype: ndarray(x.shape, dtype),
        empty=lambda x, shape, dtype: ndarray(shape, dtype),
        dtype=numpy_dtype,
        stream=lambda index: cuda.get_current_stream(index).ptr,
        written=None,
    )


class Entry:
    """One launch, ready but for addresses and stream."""

    def __init__(self, library: Library, call: Forward, launched: Launched, epoch: int) -> None:
        self.epoch = epoch
        self.function = launched.function  # keeps the function behind `handle` loaded
        self.handle = launched.function.ptr
        self.launch = launched.launch_kernel
        self.grid = launched.grid
        self.block = launched.block
        self.shared_bytes = launched.shared_bytes
        self._packed = launched.packed
        # A launch releases the GIL: each thread in one has a buffer of its own.
        self.buffers: deque[tuple[Any, int]] = deque()
        self.y_dtype = library.dtype(call.y.dtype)
        self.residual_dtype = library.dtype(call.residual.dtype) if call.residual else None
        self.row_shape = call.row_shape
        self.mean_dtype = library.dtype(call.mean.dtype) if call.mean else None
        self.rstd_dtype = library.dtype(call.rstd.dtype) if call.rstd else None
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
        residual_end = residual + self._residual_bytes
        if y:
            end = y + self._y_bytes
            if (
                (y < x + self._x_bytes and x < end and not (y == x and self._y_may_be_x))
                or (y < weight + self._weight_bytes and weight < end)
                or (y < bias + self._bias_bytes and bias < end)
                or (y < residual_out + self._residual_bytes and residual_out < end)
            ):
                return False
            in_residual = y == residual and self._y_may_be_residual
            if y < residual_end and residual < end and not in_residual:
                return False
        if residual_out:
            end = residual_out + self._residual_bytes
            in_x = residual_out == x and self._residual_out_may_be_x
            in_residual = residual_out == residual
            return not (
                (residual_out < x + self._x_bytes and x < end and not in_x)
                or (residual_out < weight + self._weight_bytes and weight < end)
                or (residual_out < bias + self._bias_bytes and bias < end)
                or (residual_out < residual_end and residual < end and not in_residual)
            )
        return True

    def new_buffer(self) -> tuple[Any, int]:
        """The driver's list of one parameter, then that parameter: the struct of all arguments."""
        buffer = ctypes.create_string_buffer(8 + len(self._packed))
        address = ctypes.addressof(buffer)
        _POINTER.pack_into(buffer, 0, address + 8)
        ctypes.memmove(address + 8, self._packed, len(self._packed))
        return buffer, address


Kept = dict[Hashable, Entry]  # by dtypes, shapes, device


def _nbytes(array: Array | float | None) -> int:
    return array.size * TABLE[array.dtype].itemsize if isinstance(array, Array) else 0


libraries: dict[type, Library] = {}  # by the type of x
_kept: dict[Hashable, Kept] = {}  # by function and options
_lock = threading.Lock()
epoch = 0  # counts what was forgotten: a call that began before is not remembered


def kept(function: str, options: tuple[object, ...], out_dtype: object) -> Kept | None:
    """What is kept of calls with these options, in the order of `Options`.

    None where one of them has not the type that its signature names.
    """
    eps, weight_offset, axis, cast, per_head, masked, groups, partial = options
    if not (
        type(eps) is float
        and type(weight_offset) is float
        and type(axis) is int
        and type(cast) is str
        and type(per_head) is bool
        and type(masked) is str
        and type(groups) is int
        and (partial is None or type(partial) is int)
    ):
        return None
    key = function, options, out_dtype
    try:
        return _kept[key]
    except TypeError:  # an out_dtype that is none
        return None
    except KeyError:
        with _lock:
            return _bounded(_kept, OPTIONS_LIMIT).setdefault(key, {})


def keep(entries: Kept, key: Hashable, learnt: Entry) -> None:
    """Add `learnt`, unless its plan may have changed since."""
    with _lock:
        if learnt.epoch == epoch:
            _bounded(entries, LIMIT)[key] = learnt


def forward(
    entries: Kept,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual_out: Any,
    learnt: Entry | None = None,
) -> tuple[Any, Any, Any, Any] | None:
    """y, residual_out, mean and rstd, or None: the call has to take the general road.

    `entries` is what is `kept` of such calls; `learnt` joins it, if this call qualifies. All is one
    function for the sake of its speed.
    """
    library = libraries.get(type(x))
    if library is None:
        return None
    device = _device.ready()
    look = library.input
    x_at = look(x, device)
    if not x_at:
        return None
    shape = x.shape
    residual_at = weight_at = bias_at = y_at = residual_out_at = 0
    weight_dtype = weight_shape = bias_dtype = bias_shape = None
    residual_dtype = y_dtype = residual_out_dtype = None
    if weight is not None:
        weight_at = look(weight, device)
        if not weight_at:
            return None
        weight_dtype = weight.dtype
        weight_shape = weight.shape
    if bias is not None:
        bias_at = look(bias, device)
        if not bias_at:
            return None
        bias_dtype = bias.dtype
        bias_shape = bias.shape
    if residual is not None:
        residual_at = look(residual, device)
        if not residual_at or residual.shape != shape:
            return None
        residual_dtype = residual.dtype
    if out is not None:
        y_at = library.output(out, device)
        if not y_at or out.shape != shape:
            return None
        y_dtype = out.dtype
    if residual_out is not None:
        residual_out_at = library.output(residual_out, device)
        if not residual_out_at or residual_out.shape != shape:
            return None
        residual_out_dtype = residual_out.dtype
    if (x_at | residual_at | weight_at | bias_at | y_at | residual_out_at) % ALIGNMENT:
        return None
    key = (
        device,
        x.dtype,
        shape,
        weight_dtype,
        weight_shape,
        bias_dtype,
        bias_shape,
        residual_dtype,
        y_dtype,
        residual_out_dtype,
    )
    if learnt is not None:
        keep(entries, key, learnt)
        return None
    entry = entries.get(key)
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
        if not y_at or y_at % ALIGNMENT:
            return None
    if residual is not None and residual_out is None:
        sums = library.empty_like(x, entry.residual_dtype)
        residual_out_at = library.output(sums, device)
        if not residual_out_at or residual_out_at % ALIGNMENT:
            return None
    mean = rstd = None
    mean_at = rstd_at = 0
    if entry.rstd_dtype is not None:
        rstd = library.empty(x, entry.row_shape, entry.rstd_dtype)
        rstd_at = library.output(rstd, device)
        if not rstd_at:
            return None
        if entry.mean_dtype is not None:
            mean = library.empty(x, entry.row_shape, entry.mean_dtype)
            mean_at = library.output(mean, device)
            if not mean_at:
                return None
    try:
        held = entry.buffers.pop()
    except IndexError:
        held = entry.new_buffer()
    buffer, address = held
    _ADDRESSES.pack_into(
        buffer, 8, y_at, residual_out_at, mean_at, rstd_at, x_at, residual_at, weight_at, bias_at
    )
    entry.launch(
        entry.handle,
        entry.grid,
        1,
        1,
        entry.block,
        1,
        1,
        entry.shared_bytes,
        library.stream(device),
        address,
        0,
    )
    entry.buffers.append(held)
    if library.written is not None:
        if out is not None:
            library.written(out)
        if residual_out is not None:
            library.written(residual_out)
    return y, sums, mean, rstd


def remember(
    entries: Kept,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual_out: Any,
    checked: Forward,
    launched: Launched,
    began: int,
) -> None:
    """Keep what the general road launched, if the call qualifies for the short one.

    `began` is the `epoch` before the call's plan was chosen.
    """
    library = known_library(type(x))
    if library is None or checked.hidden_size == 1:  # may have torch's negative bit
        return
    made = (checked.y.pointer, checked.residual_out.pointer if checked.residual_out else 0)
    if not any(pointer % ALIGNMENT for pointer in made):
        learnt = Entry(library, checked, launched, began)
        forward(entries, x, residual, weight, bias, out, residual_out, learnt)


def _bounded(kept: dict[Hashable, ItemT], limit: int) -> dict[Hashable, ItemT]:
    """`kept` with room for one more."""
    while len(kept) >= limit:
        del kept[next(iter(kept))]
    return kept


def forget() -> None:
    """Let every call take the general road once more: plans may have changed."""
    global epoch
    with _lock:
        epoch += 1
        for entries in _kept.values():
            entries.clear()


def known_library(cls: type) -> Library | None:
    """The library of arrays that are exactly of `cls`; the caller has imported it."""
    if cls not in libraries:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and cls is torch.Tensor:
            libraries[cls] = _torch_library(torch)
        elif cupy is not None and cls is cupy.ndarray:
            libraries[cls] = _cupy_library(cupy)
    return libraries.get(cls)
