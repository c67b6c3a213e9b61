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

import ctypes
import functools
import os
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import _overlap
from ._call import Array, Forward
from ._dtypes import TABLE

if TYPE_CHECKING:
    from ._enqueue import Launched

ArrayT = TypeVar("ArrayT")
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
Shape = tuple[int, ...]
# What enqueues a launch with all its arguments, the buffer where the kernel's arguments lie, and
# what else a road wants to know of it. The driver copies the arguments and nobody changes them, so
# threads may share one. Who launches it holds all of it: another thread may drop it meanwhile.
Launch = tuple[Any, ...]
Launches = dict[Hashable, Launch]  # by all that chose it, as a road describes that
Bound = tuple[Launches, Hashable, tuple[Any, ...]]  # where a launch is kept, and with what


class BoundNorm(Protocol):
    """A normalisation with its weight and options held."""

    def __call__(self, x: ArrayT, out: ArrayT | None = None) -> ArrayT:
        """Normalise `x`; `out` is as in the function that this binds."""


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
    # `plain` with a bound weight; what does not qualify goes to the norm that is given.
    bind: Callable[[Kept, Any, BoundNorm], BoundNorm]
    compiled: Callable[[], bool] | None  # whether this very code is being compiled
    traced: Callable[[], bool] | None  # that, or whether the library records what is called
    # The address of a contiguous array that qualifies on this device, else 0.
    input: Callable[[Any, int], int]
    # The same of arrays of any strides.
    strided_input: Callable[[Any, int], int]
    strided_output: Callable[[Any, int], int]
    strides: Callable[[Any], tuple[int, ...]]  # in the library's own unit
    # (shape, dtype) -> what makes such a contiguous array, where another one lies.
    maker: Callable[[Shape, str], Callable[[Any], Any]]
    new_at: Callable[[Any], int]  # the address of what one of these made; 0 if it has none
    stream: Callable[[int], int]  # the raw handle of the device's current stream
    written: Callable[[Any], None] | None  # told of outputs that the caller gave


class Prepared:
    """One launch, ready but for stream and addresses, whose names are given."""

    def __init__(
        self, kernel: str, accumulation: str, addresses: tuple[str, ...], launched: Launched
    ) -> None:
        self._launched = launched
        self._places = _places(kernel, accumulation, addresses)

    def bind(self, stream: int, at: Iterable[int]) -> tuple[Callable[[], object], object]:
        """The launch with these addresses, in the order of their names, and its buffer."""
        buffer, address = self.new_buffer()
        for place, value in zip(self._places, at, strict=True):
            ADDRESS.pack_into(buffer, place, value)
        return self._launched.again(stream, address), buffer

    def was_at(self) -> tuple[int, ...]:
        """The addresses of the launch that this was made of."""
        return tuple(
            ADDRESS.unpack_from(self._launched.packed, place - 8)[0] for place in self._places
        )

    def new_buffer(self) -> tuple[Any, int]:
        """The driver's list of one parameter, then that parameter: the struct of all arguments."""
        buffer = ctypes.create_string_buffer(8 + len(self._launched.packed))
        address = ctypes.addressof(buffer)
        ADDRESS.pack_into(buffer, 0, address + 8)
        ctypes.memmove(address + 8, self._launched.packed, len(self._launched.packed))
        return buffer, address


class Entry(Prepared):
    """One launch of a forward kernel, and what a call needs to know of the one it was made of."""

    kernel = "norm_forward"  # or another with the same arguments
    addresses: tuple[str, ...] = _ADDRESSES

    def __init__(self, library: Library, call: Forward, launched: Launched, epoch: int) -> None:
        accumulation = TABLE[call.x.dtype].accumulation or ""
        super().__init__(self.kernel, accumulation, self.addresses, launched)
        self.epoch = epoch
        self._library = library
        self._device = call.x.device.index
        outputs = call.y, call.residual_out, call.mean, call.rstd
        makers: list[Any] = [array and library.maker(array.shape, array.dtype) for array in outputs]
        self.new_y, self._new_sums, self._new_mean, self._new_rstd = makers
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
            y = self.new_y(x)
            y_at = library.new_at(y)
        if residual is not None and residual_out is None:
            sums = self._new_sums(x)
            residual_out_at = library.new_at(sums)
        if self._new_rstd is not None:
            rstd = self._new_rstd(x)
            rstd_at = library.new_at(rstd)
            if self._new_mean is not None:
                mean = self._new_mean(x)
                mean_at = library.new_at(mean)
        found = None
        if bound is None:
            launches, more = kept.launches, (kind,)
            place: Hashable = (*at[:5], y_at, residual_out_at, mean_at, rstd_at)
            found = launches.get(place)
        else:
            launches, place, more = bound
        if found is None or found[2] != kind:
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
            launch, buffer = self.bind(stream, (*made, x_at, residual_at, weight_at, bias_at))
            found = launch, buffer, *more
            keep_launch(launches, place, found, self.epoch)
        try:
            if found[0]():
                return None
        except RuntimeError:  # as in a thread without a context: the general road tells why
            return None
        if library.written is not None:
            for given in (out, residual_out):
                if given is not None:
                    library.written(given)
        return y, sums, mean, rstd

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
        return lay_so([getattr(call, name) for name in self.addresses], self.was_at())


def lay_so(arrays: Iterable[Array | float | None], at: Iterable[int]) -> bool:
    """Whether arrays lie at these addresses (0: it is none), each as the short road takes it."""
    return all(
        array.pointer == address
        and array.pointer % ALIGNMENT == 0
        and min(array.strides, default=0) >= 0
        if isinstance(array, Array)
        else not address
        for array, address in zip(arrays, at, strict=True)
    )


class Kept:
    """What is kept of the calls of one function with equal options."""

    __slots__ = ("__weakref__", "entries", "launches", "made", "out_like_x", "series")

    def __init__(self, out_like_x: bool) -> None:
        self.entries: dict[Kind, Any] = {}  # an Entry each, or what else the function launches
        self.launches: Launches = {}
        self.series: dict[At, Any] = {}  # launches, of functions that take several
        self.made: dict[Shape, Shape] = {}  # those of which this road has made a y
        self.out_like_x = out_like_x  # whether a new y has x's dtype
        with _lock:
            _alive.add(self)

    def clear(self) -> None:
        """Keep nothing."""
        self.entries.clear()
        self.launches.clear()
        self.series.clear()
        self.made.clear()


@functools.cache
def _places(kernel: str, accumulation: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Where a buffer has these arguments."""
    from . import _kernel  # here, so that an import of the package does not wait for it

    return tuple(8 + _kernel.offset(kernel, accumulation, name) for name in names)


def reach(array: Array | float | None) -> int:
    """Bytes from the first element to the end of the last one; 0 where there is no array."""
    return _overlap.reach(array) if isinstance(array, Array) else 0


def _alike(a: Array | None, b: Array | None) -> bool:
    """Whether two arrays of one shape are the same if they begin at the same place."""
    return a is not None and b is not None and (a.dtype, a.strides) == (b.dtype, b.strides)


libraries: dict[type, Library] = {}  # by the type of x
if hasattr(os, "register_at_fork"):
    # CUDA does not serve a child of a process that used it: the general road says so.
    os.register_at_fork(after_in_child=libraries.clear)
_kept: dict[Hashable, Kept] = {}  # by function and options
_alive: weakref.WeakSet[Kept] = weakref.WeakSet()  # these, and others that a bound norm holds
# By function, what was last asked for: what is kept, its out_dtype and options. The same objects
# once more need not be hashed, nor asked for their types.
UNKNOWN: tuple[Any, ...] = 10 * (None,)
recent = dict.fromkeys(("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), UNKNOWN)
_lock = threading.RLock()
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
        found = _kept[key]
    except TypeError:  # an out_dtype that is none
        return None
    except KeyError:
        with _lock:
            found = _bounded(_kept, OPTIONS_LIMIT).setdefault(key, Kept(out_dtype is None))
    if function in recent:
        recent[function] = (found, out_dtype, *options)
    return found


def keep(kept: Kept, kind: Kind, learnt: Any) -> None:
    """Add `learnt`, unless its plan may have changed since."""
    with _lock:
        if learnt.epoch == epoch:
            _bounded(kept.entries, LIMIT)[kind] = learnt


def keep_launch(launches: dict[KeyT, ItemT], place: KeyT, launch: ItemT, epoch_: int) -> None:
    """Keep a launch that was made by an entry of `epoch_`, unless plans may have changed since."""
    with _lock:
        if len(launches) >= LAUNCHES_LIMIT:
            launches.clear()
        if epoch_ == epoch:
            launches[place] = launch


def forward(
    kept: Kept, x: Any, residual: Any, weight: Any, bias: Any, out: Any, residual_out: Any
) -> Done | None:
    """y, residual_out, mean and rstd, or None: the call has to take the general road."""
    library = libraries.get(type(x))
    if library is None:
        return None
    return library.road(kept, x, residual, weight, bias, out, residual_out)


def bind(cls: type, kept: Kept, weight: Any, bias: Any, general: BoundNorm) -> BoundNorm:
    """The norm with these bound, of arrays that are exactly of `cls`; see `Library.bind`."""
    library = libraries[cls]
    if bias is None:
        return library.bind(kept, weight, general)

    def bound(x: Any, out: Any = None) -> Any:
        if type(x) is cls and not (library.compiled and library.compiled()):
            done = library.road(kept, x, None, weight, bias, out, None)
            if done is not None:
                return done[0]
        return general(x, out)

    return bound


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
