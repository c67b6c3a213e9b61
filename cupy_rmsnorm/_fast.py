# SPDX-License-Identifier: Apache-2.0
"""The short road of a forward call like one before it: look the launch up, and launch.

A call qualifies if

- x is exactly a `cupy.ndarray` or a `torch.Tensor`, every other array is of that same type (an
  input may be a torch `Parameter`), and there is neither a mask nor a constant weight or bias;
- every array lies on the calling thread's current device and begins at a multiple of 16 bytes;
  weight and bias are C-contiguous, other arrays have strides that a kernel takes without a copy,
  none of them negative;
- no array requires a gradient that would be recorded;
- a given output shares no byte with another array, or is exactly an input that it may replace;
- a statistic is made by the call, not given to it as an output;
- every option has the type that its signature names: False == 0, and only one of them is right.

Any other call, and the first of its kind, takes the general road, which checks, plans and compiles.
What that launched is kept here, under everything that chose it. A later call differs in addresses
and stream alone, so both roads run the same kernel with the same arguments. What it launches is
kept as well, under these, with what chose it: arrays where such a launch had like ones are aligned,
on their device, and apart from each other, and are not asked about that again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import _device, _overlap, _torch_memory
from ._call import Array, Forward
from ._dtypes import TABLE, numpy_dtype
from ._layout import contiguous_strides

if TYPE_CHECKING:
    from ._kernel import Launched

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")

# How many kinds of calls are kept of one function and its options, and how many of the latter; the
# oldest goes first. And how many launches, of about 1 KB each: a loop comes back to its addresses.
LIMIT = 512
OPTIONS_LIMIT = 64
LAUNCHES_LIMIT = 4096
ALIGNMENT = 16  # bytes: where every array begins

# What differs from call to call in the packed arguments of a forward kernel. In a buffer the
# driver's list of one parameter comes before them.
_ADDRESSES = ("y", "residual_out", "mean", "rstd", "x", "residual", "weight", "bias")
ADDRESS = struct.Struct("@Q")

Done = tuple[Any, Any, Any, Any]  # y, residual_out, mean and rstd
Kind = tuple[Hashable, ...]  # what chose a launch: devices, dtypes, shapes
At = tuple[int, ...]  # the stream, and where the arrays are
# A launch with all its arguments, its kind, and the buffer where the kernel's arguments lie. The
# driver copies them and nobody changes them, so threads may share one.
Launch = tuple[Callable[[], None], Kind, object]
Launches = dict[At, Launch]
Short = Callable[[Any, Any], Any]  # of a bound norm: (x, out) -> y, or None
Bound = tuple[Launches, At, Kind]  # where a launch is kept, and as what


class Road(Protocol):
    """The short road of one array library; one function for the sake of its speed."""

    def __call__(
        self,
        kept: Kept,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        out: Any,
        residual_out: Any,
        learnt: Entry | None = None,
        bound: Bound | None = None,
    ) -> Done | None:
        """y, residual_out, mean and rstd, or None: the call has to take the general road.

        x is of the library's own type. `kept` is what is kept of such calls; `learnt` joins it, if
        this call qualifies. A launch is kept where `bound` says, if it is given.
        """


@dataclass(frozen=True, slots=True)
class Library:
    """What the short road asks of an array library."""

    road: Road
    # The same of a call (kept, weight, x, out) without residual and bias: y, or None.
    plain: Callable[[Kept, Any, Any, Any], Any]
    # The same of a call (kept, weight, x, residual, out, residual_out): whether it was launched.
    add: Callable[[Kept, Any, Any, Any, Any, Any], bool]
    # That without a residual, with the weight bound.
    bind: Callable[[Kept, Any], Short]
    traced: Callable[[], bool] | None  # whether the library traces calls at the moment
    # The address of a contiguous array that qualifies on this device, else 0.
    input: Callable[[Any, int], int]
    # The same of arrays of any strides.
    strided_input: Callable[[Any, int], int]
    strided_output: Callable[[Any, int], int]
    strides: Callable[[Any], tuple[int, ...]]  # in the library's own unit
    # dtype -> what makes a contiguous array of the shape of another, on the current device.
    like: Callable[[str], Callable[[Any], Any]]
    # A new array, of a dtype of the library's own and another shape than x.
    new_at: Callable[[Any], int]  # the address of what one of these made; 0 if it has none
    empty: Callable[[Any, tuple[int, ...], Any], Any]
    dtype: Callable[[str], Any]
    stream: Callable[[int], int]  # the raw handle of the device's current stream
    written: Callable[[Any], None] | None  # told of outputs that the caller gave


class Entry:
    """One launch, ready but for addresses and stream."""

    kernel = "norm_forward"  # or another with the same arguments
    addresses: tuple[str, ...] = _ADDRESSES

    def __init__(self, library: Library, call: Forward, launched: Launched, epoch: int) -> None:
        self.epoch = epoch
        self._function = launched.function  # keeps the function behind its handle loaded
        self._packed = launched.packed
        self._launch = functools.partial(
            launched.launch_kernel,
            launched.function.ptr,
            *(launched.grid, 1, 1),
            *(launched.block, 1, 1),
            launched.shared_bytes,
        )
        accumulation = TABLE[call.x.dtype].accumulation or ""
        self._places = _places(self.kernel, accumulation, self.addresses)
        self._library = library
        self._device = call.x.device.index
        self.y_dtype = library.dtype(call.y.dtype)
        self.y_like = library.like(call.y.dtype)
        residual = call.residual or call.x
        self._residual_like = library.like(residual.dtype)
        self._row_shape = call.row_shape
        self._mean_dtype = library.dtype(call.mean.dtype) if call.mean else None
        self._rstd_dtype = library.dtype(call.rstd.dtype) if call.rstd else None
        self._x_bytes = reach(call.x)
        self._y_bytes = reach(call.y)
        self._residual_bytes = reach(call.residual)
        self._weight_bytes = reach(call.weight)
        self._bias_bytes = reach(call.bias)
        self._residual_out_bytes = reach(call.residual_out)
        self._y_may_be_x = _alike(call.y, call.x)
        self._y_may_be_residual = _alike(call.y, call.residual)
        self._residual_out_may_be_x = _alike(call.residual_out, call.x)
        self._residual_out_may_be_residual = _alike(call.residual_out, call.residual)

    def run(
        self, kept: Kept, kind: Kind, at: At, arrays: tuple[Any, ...], bound: Bound | None
    ) -> Done | None:
        """Launch it, or return None before anything happened.

        `arrays` are x, residual, weight, bias, out and residual_out. `kind` and `at` are what a
        road made of them: the latter the stream, their addresses in this order, and no statistics.
        """
        stream, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, mean_at, rstd_at = at
        x, residual, _, _, out, residual_out = arrays
        library = self._library
        y, sums, mean, rstd = out, residual_out, None, None
        if out is None:
            y = self.y_like(x)
            y_at = library.new_at(y)
        if residual is not None and residual_out is None:
            sums = self._residual_like(x)
            residual_out_at = library.new_at(sums)
        if self._rstd_dtype is not None:
            rstd = library.empty(x, self._row_shape, self._rstd_dtype)
            rstd_at = library.new_at(rstd)
            if self._mean_dtype is not None:
                mean = library.empty(x, self._row_shape, self._mean_dtype)
                mean_at = library.new_at(mean)
        launches, place = kept.launches, (*at[:5], y_at, residual_out_at, mean_at, rstd_at)
        found = None
        if bound is None:
            found = launches.get(place)
        else:
            launches, place, kind = bound
        if found is None or found[1] != kind:
            looks = (*2 * [library.strided_input], *2 * [library.input])
            for array, look in zip(arrays[:4], looks, strict=True):
                if array is not None and not look(array, self._device):
                    return None
            for array in (y, sums, mean, rstd):
                if array is not None and not library.strided_output(array, self._device):
                    return None
            if (x_at | residual_at | weight_at | bias_at | y_at | residual_out_at) % ALIGNMENT:
                return None
            if not self.separate(x_at, residual_at, weight_at, bias_at, y_at, residual_out_at):
                return None
            made = (y_at, residual_out_at, mean_at, rstd_at)
            found = self._bind(stream, (*made, x_at, residual_at, weight_at, bias_at), kind)
            with _lock:
                if len(launches) >= LAUNCHES_LIMIT:
                    launches.clear()
                if self.epoch == epoch:
                    launches[place] = found
        try:
            found[0]()
        except RuntimeError:  # as in a thread without a context: the general road tells why
            return None
        if library.written is not None:
            for given in (out, residual_out):
                if given is not None:
                    library.written(given)
        return y, sums, mean, rstd

    def _bind(self, stream: int, at: At, kind: Kind) -> Launch:
        """The launch with these addresses, in the order of `addresses`."""
        buffer, address = self.new_buffer()
        for place, value in zip(self._places, at, strict=True):
            ADDRESS.pack_into(buffer, place, value)
        return functools.partial(self._launch, stream, address, 0), kind, buffer

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
                or (y < residual_out + self._residual_out_bytes and residual_out < end)
            ):
                return False
            in_residual = y == residual and self._y_may_be_residual
            if y < residual_end and residual < end and not in_residual:
                return False
        if residual_out:
            end = residual_out + self._residual_out_bytes
            in_x = residual_out == x and self._residual_out_may_be_x
            in_residual = residual_out == residual and self._residual_out_may_be_residual
            return not (
                (residual_out < x + self._x_bytes and x < end and not in_x)
                or (residual_out < weight + self._weight_bytes and weight < end)
                or (residual_out < bias + self._bias_bytes and bias < end)
                or (residual_out < residual_end and residual < end and not in_residual)
            )
        return True

    def launched_on(self, call: Forward) -> bool:
        """Whether the launch had the arrays of `call`, not copies, each as this road takes it."""
        arrays = [
            array if isinstance(array, Array) else None
            for array in (getattr(call, name) for name in self.addresses)
        ]
        return all(
            ADDRESS.unpack_from(self._packed, place - 8)[0] == (array.pointer if array else 0)
            for place, array in zip(self._places, arrays, strict=True)
        ) and not any(
            array.pointer % ALIGNMENT or min(array.strides, default=0) < 0
            for array in arrays
            if array
        )

    def new_buffer(self) -> tuple[Any, int]:
        """The driver's list of one parameter, then that parameter: the struct of all arguments."""
        buffer = ctypes.create_string_buffer(8 + len(self._packed))
        address = ctypes.addressof(buffer)
        ADDRESS.pack_into(buffer, 0, address + 8)
        ctypes.memmove(address + 8, self._packed, len(self._packed))
        return buffer, address


class Kept:
    """What is kept of the calls of one function with equal options."""

    __slots__ = ("__weakref__", "entries", "launches", "out_like_x")

    def __init__(self, out_like_x: bool) -> None:
        self.entries: dict[Kind, Entry] = {}
        self.launches: Launches = {}
        self.out_like_x = out_like_x  # whether a new y has x's dtype
        with _lock:
            _alive.add(self)

    def clear(self) -> None:
        """Keep nothing."""
        self.entries.clear()
        self.launches.clear()


@functools.cache
def _places(kernel: str, accumulation: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Where a buffer has these arguments."""
    from . import _kernel  # here, since it is half of what an import of the package would cost

    return tuple(8 + _kernel.offset(kernel, accumulation, name) for name in names)


def reach(array: Array | float | None) -> int:
    """Bytes from the first element to the end of the last one; 0 where there is no array."""
    return _overlap.reach(array) if isinstance(array, Array) else 0


def _alike(a: Array | None, b: Array | None) -> bool:
    """Whether two arrays of one shape are the same if they begin at the same place."""
    return a is not None and b is not None and (a.dtype, a.strides) == (b.dtype, b.strides)


libraries: dict[type, Library] = {}  # by the type of x
_kept: dict[Hashable, Kept] = {}  # by function and options
_alive: weakref.WeakSet[Kept] = weakref.WeakSet()  # these, and others that a bound norm holds
# By function, what was last asked for: what is kept, its out_dtype and options.
_recent: dict[str, tuple[Any, ...]] = {}
_lock = threading.RLock()
epoch = 0  # counts what was forgotten: a call that began before is not remembered


def kept(function: str, options: tuple[object, ...], out_dtype: object) -> Kept | None:
    """What is kept of calls with these options, in the order of `Options`.

    None where one of them has not the type that its signature names.
    """
    eps, weight_offset, axis, cast, per_head, masked, groups, partial = options
    recent = _recent.get(function)
    if recent is not None:
        # The same objects: compared so, they need not be hashed, nor asked for their types.
        found, dtype_, eps_, offset_, axis_, cast_, per_head_, masked_, groups_, partial_ = recent
        if (
            eps is eps_
            and out_dtype is dtype_
            and weight_offset is offset_
            and axis is axis_
            and cast is cast_
            and per_head is per_head_
            and masked is masked_
            and groups is groups_
            and partial is partial_
        ):
            return found  # type: ignore[no-any-return]
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
        found = _kept[key]
    except TypeError:  # an out_dtype that is none
        return None
    except KeyError:
        with _lock:
            found = _bounded(_kept, OPTIONS_LIMIT).setdefault(key, Kept(out_dtype is None))
    _recent[function] = (found, out_dtype, *options)
    return found


def keep(kept: Kept, kind: Kind, learnt: Entry) -> None:
    """Add `learnt`, unless its plan may have changed since."""
    with _lock:
        if learnt.epoch == epoch:
            _bounded(kept.entries, LIMIT)[kind] = learnt


def _torch_library(torch: Any) -> Library:
    tensor, parameter = torch.Tensor, torch.nn.Parameter
    grad_enabled, forward_ad = torch.is_grad_enabled, torch.autograd.forward_ad
    increment_version = _increment_version(torch)
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is None:
        raw_stream = _public_stream(torch)
    current_device = _device.runtime().getDevice
    new = _torch_memory.new(torch)

    def address(array: Any, device: int) -> int:
        if forward_ad._current_level >= 0:  # where it may be a dual tensor
            return 0
        try:
            return array.data_ptr() if array.get_device() == device else 0
        except RuntimeError:
            return 0  # no memory of its own, as within vmap

    def strided_input(array: Any, device: int) -> int:
        cls = type(array)
        if cls is not tensor and cls is not parameter:
            return 0
        return 0 if array.requires_grad and grad_enabled() else address(array, device)

    def strided_output(array: Any, device: int) -> int:
        return 0 if type(array) is not tensor or array.requires_grad else address(array, device)

    def input(array: Any, device: int) -> int:
        at = strided_input(array, device)
        return at if at and array.is_contiguous() else 0

    def road(
        kept: Kept,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        out: Any,
        residual_out: Any,
        learnt: Entry | None = None,
        bound: Bound | None = None,
    ) -> Done | None:
        residual_at = weight_at = bias_at = y_at = residual_out_at = 0
        weight_dtype = weight_shape = bias_dtype = bias_shape = None
        residual_dtype = residual_shape = y_dtype = y_shape = None
        residual_out_dtype = residual_out_shape = None
        # The negative bit is not asked for, which costs more than a pointer: a view that has it
        # skips every other number, and kernels take its rows without a copy only where they have
        # a single element.
        try:
            device = x.get_device()
            x_at = x.data_ptr()
            x_shape = x.shape if x.is_contiguous() else (x.shape, x.stride())
            if weight is not None:
                cls = type(weight)
                if (cls is not parameter and cls is not tensor) or not weight.is_contiguous():
                    return None
                weight_at = weight.data_ptr()
                weight_dtype = weight.dtype
                weight_shape = weight.shape
            if bias is not None:
                cls = type(bias)
                if (cls is not parameter and cls is not tensor) or not bias.is_contiguous():
                    return None
                bias_at = bias.data_ptr()
                bias_dtype = bias.dtype
                bias_shape = bias.shape
            if residual is not None:
                cls = type(residual)
                if cls is not tensor and cls is not parameter:
                    return None
                residual_at = residual.data_ptr()
                residual_dtype = residual.dtype
                residual_shape = residual.shape
                if not residual.is_contiguous():
                    residual_shape = residual_shape, residual.stride()
            if out is not None:
                if type(out) is not tensor or out.requires_grad:
                    return None
                y_at = out.data_ptr()
                y_dtype = out.dtype
                y_shape = out.shape if out.is_contiguous() else (out.shape, out.stride())
            if residual_out is not None:
                if type(residual_out) is not tensor or residual_out.requires_grad:
                    return None
                residual_out_at = residual_out.data_ptr()
                residual_out_dtype = residual_out.dtype
                residual_out_shape = residual_out.shape
                if not residual_out.is_contiguous():
                    residual_out_shape = residual_out_shape, residual_out.stride()
        except RuntimeError:  # no memory of its own, as within vmap
            return None
        if forward_ad._current_level >= 0:
            return None
        if grad_enabled():
            for array in (x, weight, bias, residual):
                if array is not None and array.requires_grad:
                    return None
        kind = (
            current_device(),
            device,
            x.dtype,
            x_shape,
            weight_dtype,
            weight_shape,
            bias_dtype,
            bias_shape,
            residual_dtype,
            residual_shape,
            y_dtype,
            y_shape,
            residual_out_dtype,
            residual_out_shape,
        )
        stream = raw_stream(device)
        at = (stream, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, 0, 0)
        if out is not None and bound is None:
            found = kept.launches.get(at)
            if found is not None and found[1] == kind:
                try:
                    found[0]()
                except RuntimeError:
                    return None
                increment_version((out,) if residual_out is None else (out, residual_out))
                return out, residual_out, None, None
        if learnt is not None:
            keep(kept, kind, learnt)
            return None
        entry = kept.entries.get(kind)
        if entry is None:
            return None
        return entry.run(kept, kind, at, (x, residual, weight, bias, out, residual_out), bound)

    def long_way(kept: Kept, weight: Any, x: Any, out: Any, bound: Bound | None = None) -> Any:
        done = road(kept, x, None, weight, None, out, None, None, bound)
        return None if done is None else done[0]

    def plain(kept: Kept, weight: Any, x: Any, out: Any) -> Any:
        cls, y = type(weight), out
        if (cls is not parameter and cls is not tensor) or forward_ad._current_level >= 0:
            return long_way(kept, weight, x, out)
        try:
            if grad_enabled() and (x.requires_grad or weight.requires_grad):
                return None
            device = x.get_device()
            current = current_device()
            if not x.is_contiguous() or not weight.is_contiguous():
                return long_way(kept, weight, x, out)
            if out is None:
                if not kept.launches or not kept.out_like_x or device != current:
                    return long_way(kept, weight, x, out)
                y = new(tuple(x.shape), x.stride(), x.dtype)
                if y is None:
                    return long_way(kept, weight, x, out)
            elif type(out) is not tensor or out.requires_grad or not out.is_contiguous():
                return long_way(kept, weight, x, out)
            at = (raw_stream(device), x.data_ptr(), y.data_ptr(), weight.data_ptr())
        except RuntimeError:  # no memory of its own, as within vmap
            return None
        kind = (current, device, x.dtype, x.shape, y.dtype, y.shape, weight.dtype, weight.shape)
        found = kept.launches.get(at)
        if found is not None and found[1] == kind:
            try:
                found[0]()
            except RuntimeError:
                return None
            if out is not None:
                increment_version((out,))
            return y
        bound = (kept.launches, at, kind)
        if out is not None:
            return long_way(kept, weight, x, out, bound)
        allocating = (current, device, x.dtype, x.shape, weight.dtype, weight.shape, *8 * (None,))
        entry = kept.entries.get(allocating)
        if entry is None:
            return None
        stream, x_at, y_at, weight_at = at
        places = (stream, x_at, 0, weight_at, 0, y_at, 0, 0, 0)
        done = entry.run(kept, kind, places, (x, None, weight, None, y, None), bound)
        return None if done is None else done[0]

    def add(kept: Kept, weight: Any, x: Any, residual: Any, out: Any, residual_out: Any) -> bool:
        cls, bound = type(weight), None
        try:
            if (
                (cls is parameter or cls is tensor)
                and type(residual) is type(out) is type(residual_out) is tensor
                and forward_ad._current_level < 0
                and not out.requires_grad
                and not residual_out.requires_grad
                and not (
                    grad_enabled()
                    and (x.requires_grad or residual.requires_grad or weight.requires_grad)
                )
                and x.is_contiguous()
                and residual.is_contiguous()
                and weight.is_contiguous()
                and out.is_contiguous()
                and residual_out.is_contiguous()
            ):
                device = x.get_device()
                at = (
                    raw_stream(device),
                    x.data_ptr(),
                    residual.data_ptr(),
                    weight.data_ptr(),
                    out.data_ptr(),
                    residual_out.data_ptr(),
                )
                kind = (
                    current_device(),
                    device,
                    x.dtype,
                    x.shape,
                    residual.dtype,
                    residual.shape,
                    weight.dtype,
                    weight.shape,
                    out.dtype,
                    out.shape,
                    residual_out.dtype,
                    residual_out.shape,
                )
                found = kept.launches.get(at)
                if found is not None and found[1] == kind:
                    found[0]()
                    increment_version((out, residual_out))
                    return True
                bound = (kept.launches, at, kind)
        except RuntimeError:  # no memory of its own, as within vmap; or a launch that failed
            return False
        return road(kept, x, residual, weight, None, out, residual_out, None, bound) is not None

    def bind(kept: Kept, weight: Any) -> Short:
        return functools.partial(plain, kept, weight)

    def empty(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        made = new(shape, contiguous_strides(shape), dtype)
        return x.new_empty(shape, dtype=dtype) if made is None else made

    def like(name: str) -> Callable[[Any], Any]:
        dtype = getattr(torch, name)
        return lambda x: empty(x, tuple(x.shape), dtype)

    def new_at(array: Any) -> int:
        try:
            return array.data_ptr()  # type: ignore[no-any-return]
        except RuntimeError:
            return 0

    return Library(
        road=road,
        plain=plain,
        add=add,
        bind=bind,
        traced=torch.compiler.is_dynamo_compiling,
        input=input,
        strided_input=strided_input,
        strided_output=strided_output,
        strides=tensor.stride,
        like=like,
        new_at=new_at,
        empty=empty,
        dtype=lambda name: getattr(torch, name),
        stream=raw_stream,
        written=torch.autograd.graph.increment_version,
    )


def _public_stream(torch: Any) -> Callable[[int], int]:
    def stream(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream  # type: ignore[no-any-return]

    return stream


def _increment_version(torch: Any) -> Callable[[tuple[Any, ...]], None]:
    """torch.autograd.graph.increment_version without its Python, if that is still how it works."""
    with contextlib.suppress(AttributeError, TypeError):
        direct: Callable[[tuple[Any, ...]], None] = torch._C._increment_version
        direct((torch.empty(0),))
        return direct
    public = torch.autograd.graph.increment_version

    def increment_version(tensors: tuple[Any, ...]) -> None:
        for tensor in tensors:
            public(tensor)

    return increment_version


def _cupy_library(cupy: Any) -> Library:
    ndarray, current_stream = cupy.ndarray, cupy.cuda.get_current_stream
    current_device = _device.runtime().getDevice

    def strided_address(array: Any, device: int) -> int:
        if type(array) is not ndarray:
            return 0
        data = array.data
        return data.ptr if data.device_id == device else 0

    def address(array: Any, device: int) -> int:
        at = strided_address(array, device)
        return at if at and array._c_contiguous else 0

    def road(
        kept: Kept,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        out: Any,
        residual_out: Any,
        learnt: Entry | None = None,
        bound: Bound | None = None,
    ) -> Done | None:
        residual_at = weight_at = bias_at = y_at = residual_out_at = 0
        weight_dtype = weight_shape = bias_dtype = bias_shape = None
        residual_dtype = residual_shape = y_dtype = y_shape = None
        residual_out_dtype = residual_out_shape = None
        data = x.data
        device = data.device_id
        x_at = data.ptr
        x_shape = x.shape if x._c_contiguous else (x.shape, x.strides)
        if weight is not None:
            if type(weight) is not ndarray or not weight._c_contiguous:
                return None
            weight_at = weight.data.ptr
            weight_dtype = weight.dtype
            weight_shape = weight.shape
        if bias is not None:
            if type(bias) is not ndarray or not bias._c_contiguous:
                return None
            bias_at = bias.data.ptr
            bias_dtype = bias.dtype
            bias_shape = bias.shape
        if residual is not None:
            if type(residual) is not ndarray:
                return None
            residual_at = residual.data.ptr
            residual_dtype = residual.dtype
            residual_shape = residual.shape
            if not residual._c_contiguous:
                residual_shape = residual_shape, residual.strides
        if out is not None:
            if type(out) is not ndarray:
                return None
            y_at = out.data.ptr
            y_dtype = out.dtype
            y_shape = out.shape if out._c_contiguous else (out.shape, out.strides)
        if residual_out is not None:
            if type(residual_out) is not ndarray:
                return None
            residual_out_at = residual_out.data.ptr
            residual_out_dtype = residual_out.dtype
            residual_out_shape = residual_out.shape
            if not residual_out._c_contiguous:
                residual_out_shape = residual_out_shape, residual_out.strides
        kind = (
            current_device(),
            device,
            x.dtype,
            x_shape,
            weight_dtype,
            weight_shape,
            bias_dtype,
            bias_shape,
            residual_dtype,
            residual_shape,
            y_dtype,
            y_shape,
            residual_out_dtype,
            residual_out_shape,
        )
        stream = current_stream(device).ptr
        at = (stream, x_at, residual_at, weight_at, bias_at, y_at, residual_out_at, 0, 0)
        if out is not None and bound is None:
            found = kept.launches.get(at)
            if found is not None and found[1] == kind:
                try:
                    found[0]()
                except RuntimeError:
                    return None
                return out, residual_out, None, None
        if learnt is not None:
            keep(kept, kind, learnt)
            return None
        entry = kept.entries.get(kind)
        if entry is None:
            return None
        return entry.run(kept, kind, at, (x, residual, weight, bias, out, residual_out), bound)

    def plain(kept: Kept, weight: Any, x: Any, out: Any) -> Any:
        bound = None
        if (
            type(out) is ndarray
            and type(weight) is ndarray
            and x._c_contiguous
            and out._c_contiguous
            and weight._c_contiguous
        ):
            device = current_device()
            at = (current_stream(device).ptr, x.data.ptr, out.data.ptr, weight.data.ptr)
            kind = (device, x.dtype, out.dtype, weight.dtype, x.shape, out.shape, weight.shape)
            found = kept.launches.get(at)
            if found is not None and found[1] == kind:
                try:
                    found[0]()
                except RuntimeError:
                    return None
                return out
            bound = (kept.launches, at, kind)
        done = road(kept, x, None, weight, None, out, None, None, bound)
        return None if done is None else done[0]

    def add(kept: Kept, weight: Any, x: Any, residual: Any, out: Any, residual_out: Any) -> bool:
        bound = None
        if (
            type(residual) is type(weight) is type(out) is type(residual_out) is ndarray
            and x._c_contiguous
            and residual._c_contiguous
            and weight._c_contiguous
            and out._c_contiguous
            and residual_out._c_contiguous
        ):
            device = current_device()
            at = (
                current_stream(device).ptr,
                x.data.ptr,
                residual.data.ptr,
                weight.data.ptr,
                out.data.ptr,
                residual_out.data.ptr,
            )
            kind = (
                device,
                x.dtype,
                x.shape,
                residual.dtype,
                residual.shape,
                weight.dtype,
                weight.shape,
                out.dtype,
                out.shape,
                residual_out.dtype,
                residual_out.shape,
            )
            found = kept.launches.get(at)
            if found is not None and found[1] == kind:
                try:
                    found[0]()
                except RuntimeError:
                    return False
                return True
            bound = (kept.launches, at, kind)
        return road(kept, x, residual, weight, None, out, residual_out, None, bound) is not None

    def bind(kept: Kept, weight: Any) -> Short:
        # An array keeps its memory and its dtype for life: the weight needs no further look.
        own = Kept(kept.out_like_x)

        def short(x: Any, out: Any) -> Any:
            bound = None
            if type(out) is ndarray and x._c_contiguous and out._c_contiguous:
                device = current_device()
                at = (current_stream(device).ptr, x.data.ptr, out.data.ptr)
                kind = (device, x.dtype, out.dtype, x.shape, out.shape)
                found = own.launches.get(at)
                if found is not None and found[1] == kind:
                    try:
                        found[0]()
                    except RuntimeError:
                        return None
                    return out
                bound = (own.launches, at, kind)
            done = road(kept, x, None, weight, None, out, None, None, bound)
            return None if done is None else done[0]

        return short

    def like(name: str) -> Callable[[Any], Any]:
        dtype = numpy_dtype(name)
        return lambda x: ndarray(x.shape, dtype)

    return Library(
        road=road,
        plain=plain,
        add=add,
        bind=bind,
        traced=None,
        input=address,
        strided_input=strided_address,
        strided_output=strided_address,
        strides=operator.attrgetter("strides"),
        like=like,
        new_at=operator.attrgetter("data.ptr"),
        empty=lambda x, shape, dtype: ndarray(shape, dtype),
        dtype=numpy_dtype,
        stream=lambda index: current_stream(index).ptr,
        written=None,
    )


def forward(
    kept: Kept, x: Any, residual: Any, weight: Any, bias: Any, out: Any, residual_out: Any
) -> Done | None:
    """y, residual_out, mean and rstd, or None: the call has to take the general road."""
    library = libraries.get(type(x))
    if library is None:
        return None
    return library.road(kept, x, residual, weight, bias, out, residual_out)


def bind(library: Library, kept: Kept, weight: Any, bias: Any) -> Short:
    """The short road of a norm with these bound."""
    if bias is None:
        return library.bind(kept, weight)

    def short(x: Any, out: Any) -> Any:
        done = library.road(kept, x, None, weight, bias, out, None)
        return None if done is None else done[0]

    return short


def remember(
    kept: Kept,
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
    if _device.ready() != checked.x.device.index:
        return
    learnt = Entry(library, checked, launched, began)
    if learnt.launched_on(checked):
        library.road(kept, x, residual, weight, bias, out, residual_out, learnt)


def _bounded(kept: dict[KeyT, ItemT], limit: int) -> dict[KeyT, ItemT]:
    """`kept` with room for one more."""
    while len(kept) >= limit:
        del kept[next(iter(kept))]
    return kept


def forget() -> None:
    """Let every call take the general road once more: plans may have changed."""
    global epoch
    with _lock:
        epoch += 1
        for kept in _alive:
            kept.clear()


def known_library(cls: type) -> Library | None:
    """The library of arrays that are exactly of `cls`; the caller has imported it."""
    if cls not in libraries:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and cls is torch.Tensor:
            libraries[cls] = _torch_library(torch)
        elif cupy is not None and cls is cupy.ndarray and hasattr(cls, "_c_contiguous"):
            libraries[cls] = _cupy_library(cupy)
    return libraries.get(cls)
