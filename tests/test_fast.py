# SPDX-License-Identifier: Apache-2.0
"""The short road of a repeated call: which calls take it, and that it launches the same.

No GPU: arrays lie in host memory, and a stand-in for the driver reads the arguments as it would.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import (
    _border,
    _cpu,
    _cuda,
    _device,
    _enqueue,
    _fast,
    _fast_learn,
    _fast_pair,
    _fast_torch,
    _info,
    _kernel,
    _libraries,
    _plan_file,
    _refuse,
    _run,
    _torch_memory,
)
from cupy_rmsnorm._kernel import DeviceProperties, Specialisation
from tests.backends import skip_without
from tests.recorder import Launched, resident_blocks

ROWS, HIDDEN_SIZE = 4, 64
STREAM = 77


@dataclasses.dataclass(frozen=True)
class Launch(Launched):
    """One launch, as the driver gets it."""

    short: bool  # by the short road


class Driver:
    """Stands in for the driver: reads the arguments and computes nothing."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._functions: list[Specialisation] = []
        self.fails = ""  # how launches fail on the short road: they "raise", or "return" an error
        self.meanwhile: Callable[[], object] = lambda: None  # what another thread does then

    def function(self, specialisation: Specialisation, device: int, shared_bytes: int = 0) -> Any:
        self._functions.append(specialisation)
        return SimpleNamespace(ptr=len(self._functions) - 1, overlaps=False)

    def launch_kernel(
        self,
        function: int,
        *geometry_and_stream: int,
    ) -> int:
        grid, _, _, block, _, _, shared_bytes, stream, parameters, extra = geometry_and_stream
        specialisation = self._functions[function]
        if parameters and self.fails == "raise":
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
        if parameters and self.fails == "return":
            return 201
        size = _kernel._packer(specialisation.kernel, "float32").size
        self.meanwhile()
        if parameters:
            address = ctypes.c_void_p.from_address(parameters).value
        else:
            address = (ctypes.c_void_p * 5).from_address(extra)[1]
        packed = ctypes.string_at(address or 0, size)
        time.sleep(0)  # the driver reads without the GIL: another thread may run
        assert packed == ctypes.string_at(address or 0, size)
        self.launches.append(
            Launch(specialisation, grid, block, shared_bytes, stream, packed, bool(parameters))
        )
        return 0

    def roads(self, call: Callable[[], object]) -> tuple[Launch, Launch]:
        """The launches of two equal calls."""
        self.launches.clear()
        call()
        call()
        first, second = self.launches
        return first, second


class CuPyLibrary:
    """CuPy arrays over host memory."""

    name = "cupy"

    def __init__(self, stack: contextlib.ExitStack) -> None:
        import cupy

        self.cupy = cupy
        self.offset = 0  # of new memory, from a multiple of 512 bytes
        self.current_device = 0
        stream = SimpleNamespace(ptr=STREAM)
        for target, name, value in (
            (cupy.cuda, "get_current_stream", lambda device=-1: stream),
            (cupy.cuda.runtime, "getDevice", lambda: self.current_device),
            (cupy.cuda.runtime, "setDevice", lambda device: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.callback(cupy.cuda.set_allocator, cupy.cuda.get_allocator())
        cupy.cuda.set_allocator(self._allocate)
        stack.enter_context(mock.patch.object(_run, "backend", return_value=_cuda))
        stack.enter_context(
            mock.patch.object(_libraries._CuPySpace, "contiguous", self._contiguous)
        )

    @staticmethod
    def _contiguous(space: Any, array: Any) -> Any:
        return space.empty(array.name, array.shape, array.dtype)

    def _allocate(self, size: int) -> Any:
        values = np.zeros(size + 1024, np.uint8)
        start = -values.ctypes.data % 512 + self.offset
        memory = self.cupy.cuda.UnownedMemory(values.ctypes.data + start, max(size, 1), values, 0)
        return self.cupy.cuda.MemoryPointer(memory, 0)

    def empty(self, shape: tuple[int, ...], dtype: str = "float16") -> Any:
        return self.cupy.ndarray(shape, np.dtype(dtype))

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(array.strides)


class TorchLibrary:
    """torch tensors on the CPU that say they are on GPU 0."""

    name = "torch"

    def __init__(self, stack: contextlib.ExitStack) -> None:
        import torch

        self.torch = torch
        stack.enter_context(mock.patch.object(torch.Tensor, "get_device", return_value=0))
        # As strict about what it takes as the one for a GPU.
        new = torch._C._dynamo.guards._empty_strided_cpu
        stack.enter_context(mock.patch.object(_torch_memory, "new", return_value=new))
        stack.enter_context(
            mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", return_value=STREAM, create=True
            )
        )
        self.current_device = 0
        runtime = SimpleNamespace(getDevice=lambda: self.current_device)
        stack.enter_context(mock.patch.object(_device, "runtime", return_value=runtime))
        stack.enter_context(
            mock.patch.object(_device, "ready", side_effect=lambda: self.current_device)
        )
        stack.enter_context(mock.patch.object(_cpu, "forward", self._forward))
        stack.enter_context(mock.patch.object(_cpu, "forward_pair", self._forward_pair))
        stack.enter_context(mock.patch.object(_cpu, "backward", self._backward))
        stack.enter_context(
            mock.patch.object(_cuda, "current_device", return_value=contextlib.nullcontext())
        )

    def _forward(self, call: Any) -> Any:
        call.space.stream = STREAM
        return _cuda.forward(call)

    def _forward_pair(self, q: Any, k: Any) -> Any:
        q.space.stream = STREAM
        return _cuda.forward_pair(q, k)

    def _backward(self, call: Any) -> Any:
        call.space.stream = STREAM
        return _cuda.backward(call)

    def empty(self, shape: tuple[int, ...], dtype: str = "float16") -> Any:
        dtype = getattr(self.torch, dtype)
        room = self.torch.zeros(int(np.prod(shape)) + 512, dtype=dtype)
        start = -room.data_ptr() % 512 // room.element_size()
        return room[start : start + int(np.prod(shape))].view(shape)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(array.stride())


LIBRARIES = {"cupy": CuPyLibrary, "torch": TorchLibrary}


@pytest.fixture
def driver() -> Iterator[Driver]:
    stand_in = Driver()
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("_kernel.function", stand_in.function),
            ("_enqueue.launcher", lambda: stand_in.launch_kernel),
            ("_kernel.device_properties", lambda device: DeviceProperties(90, 132)),
            ("_kernel.resident_blocks", resident_blocks(132)),
        ):
            stack.enter_context(mock.patch(f"cupy_rmsnorm.{name}", value))
        stack.enter_context(mock.patch.object(_fast, "libraries", {}))
        yield stand_in
    _fast.forget()


@pytest.fixture(params=list(LIBRARIES))
def library(request: pytest.FixtureRequest, driver: Driver) -> Iterator[Any]:
    pytest.importorskip(request.param)
    with contextlib.ExitStack() as stack:
        yield LIBRARIES[request.param](stack)


@pytest.fixture
def torch_library(driver: Driver) -> Iterator[TorchLibrary]:
    pytest.importorskip("torch")
    with contextlib.ExitStack() as stack:
        yield TorchLibrary(stack)


@contextlib.contextmanager
def general_road() -> Iterator[None]:
    """Every call takes it."""
    with (
        mock.patch.object(_fast, "kept", return_value=None),
        mock.patch.dict(_fast.recent, dict.fromkeys(_fast.recent, _fast.UNKNOWN)),
    ):
        yield


def unpacked(launch: Launch) -> dict[str, Any]:
    """The arguments of a kernel, by name."""
    table = _kernel.PARAMETERS[launch.specialisation.kernel]
    fields = _kernel._packer(launch.specialisation.kernel, "float32").unpack(launch.packed)
    return {name: field for (name, _), field in zip(table, fields, strict=True)}


def test_the_forward_kernels_have_the_same_arguments() -> None:
    kernels = ("norm_forward", "norm_forward_staged", "norm_forward_streamed")
    assert len({_kernel.PARAMETERS[kernel] for kernel in kernels}) == 1


SHAPES = [(ROWS, HIDDEN_SIZE), (HIDDEN_SIZE,), (2, 3, 1024), (3, 40_000), (1, 300_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_a_repeated_call_launches_the_same(
    driver: Driver, library: Any, function: str, shape: tuple[int, ...]
) -> None:
    adds = function.startswith("add_")
    x, out, residual, sums = (library.empty(shape) for _ in range(4))
    weight, bias = library.empty(shape[-1:], "float32"), library.empty(shape[-1:])
    arrays = (x, residual) if adds else (x,)
    outputs = {"out": out, "residual_out": sums} if adds else {"out": out}

    def call() -> None:
        returned = getattr(norms, function)(*arrays, weight, bias, **outputs)
        if adds:
            assert returned[0] is out
            assert returned[1] is sums
        else:
            assert returned is out

    first, second = driver.roads(call)
    assert not first.short
    assert second == dataclasses.replace(first, short=True)
    assert first.stream == STREAM


def qkv(library: Any) -> tuple[Any, Any]:
    """q and k of one buffer, between other rows."""
    rows = library.empty((ROWS, 3, HIDDEN_SIZE))
    return rows[:, 0], rows[:, 1]


# x and an output, in layouts that kernels take without a copy.
LAYOUTS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "q of qkv": lambda library: (qkv(library)[0], library.empty((ROWS, HIDDEN_SIZE))),
    "q of qkv in place": lambda library: 2 * qkv(library)[:1],
    "every second row": lambda library: (
        library.empty((2 * ROWS, HIDDEN_SIZE))[::2],
        library.empty((ROWS, HIDDEN_SIZE)),
    ),
    "into a wider buffer": lambda library: (
        library.empty((ROWS, HIDDEN_SIZE)),
        library.empty((ROWS, 2 * HIDDEN_SIZE))[:, HIDDEN_SIZE:],
    ),
    "heads": lambda library: 2 * (library.empty((ROWS, 5, HIDDEN_SIZE))[:, 1:4],),
    "swapped axes": lambda library: 2 * (library.empty((3, ROWS, HIDDEN_SIZE)).swapaxes(0, 1),),
}


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_rows(driver: Driver, library: Any, layout: str, adds: bool) -> None:
    """The short road launches the same for a layout that it has seen, at any address."""
    general = []
    for _ in range(3):
        x, out = LAYOUTS[layout](library)
        weight = library.empty((HIDDEN_SIZE,))
        if adds:
            residual, sums = LAYOUTS[layout](library)
            arguments, outputs = (x, residual, weight), {"out": out, "residual_out": sums}
            function: Any = norms.add_rms_norm
        else:
            arguments, outputs, function = (x, weight), {"out": out}, norms.rms_norm
        function(*arguments, **outputs)
        with general_road():
            function(*arguments, **outputs)
        short, long = driver.launches[-2:]
        assert not long.short
        assert short == dataclasses.replace(long, short=short.short)
        assert unpacked(short)["x"] == library.address(x)
        general.append(not short.short)
    assert general == [True, False, False]


def test_new_outputs_of_strided_rows(driver: Driver, library: Any) -> None:
    x = library.empty((3, ROWS, HIDDEN_SIZE)).swapaxes(0, 1)
    made = [norms.add_rms_norm(x, x) for _ in range(2)]
    assert [launch.short for launch in driver.launches] == [False, True]
    for general, short in zip(*made, strict=True):
        assert short.shape == general.shape == (ROWS, 3, HIDDEN_SIZE)
        assert library.strides(short) == library.strides(general)


@pytest.mark.parametrize("strides", ["swapped", "as they were"])
def test_strided_rows_that_overlap_stay_refused(driver: Driver, library: Any, strides: str) -> None:
    """An output that begins where x does is x only if it lies the same."""
    room = library.empty((ROWS, ROWS, HIDDEN_SIZE))
    x = room.swapaxes(0, 1)
    free = library.empty((ROWS, ROWS, HIDDEN_SIZE))
    other = free if strides == "swapped" else free.swapaxes(0, 1)
    norms.rms_norm(x, out=other)
    if strides == "swapped":
        with pytest.raises(ValueError, match=r"^out must not overlap x"):
            norms.rms_norm(x, out=room)
    else:
        norms.rms_norm(x, out=x)
        assert [launch.short for launch in driver.launches] == [False, True]


def test_a_neighbour_in_a_packed_buffer_is_left_to_the_general_road(
    driver: Driver, library: Any
) -> None:
    q, k = qkv(library)
    for _ in range(2):
        norms.rms_norm(q, out=k)
    assert [launch.short for launch in driver.launches] == [False, False]


def test_other_addresses_are_packed(driver: Driver, library: Any) -> None:
    shape = (ROWS, HIDDEN_SIZE)
    for _ in range(3):
        x, out, weight = library.empty(shape), library.empty(shape), library.empty(shape[1:])
        norms.rms_norm(x, weight, out=out)
        packed = unpacked(driver.launches[-1])
        assert packed["x"] == library.address(x)
        assert packed["y"] == library.address(out)
        assert packed["weight"] == library.address(weight)
        assert packed["residual"] == packed["bias"] == packed["mean"] == packed["where"] == 0
    assert [launch.short for launch in driver.launches] == [False, True, True]


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_outputs_are_made_as_on_the_general_road(
    driver: Driver, library: Any, out_dtype: str | None
) -> None:
    x, residual = library.empty((ROWS, HIDDEN_SIZE)), library.empty((ROWS, HIDDEN_SIZE), "float32")
    made = [norms.add_rms_norm(x, residual, out_dtype=out_dtype) for _ in range(2)]
    assert [launch.short for launch in driver.launches] == [False, True]
    for general, short in zip(*made, strict=True):
        assert type(short) is type(general)
        assert short.dtype == general.dtype
        assert short.shape == general.shape
        assert library.address(short) != library.address(general)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_statistics(driver: Driver, library: Any, norm: str) -> None:
    x, residual = library.empty((2, ROWS, HIDDEN_SIZE)), library.empty((2, ROWS, HIDDEN_SIZE))
    made = [getattr(norms, f"add_{norm}_forward")(x, residual) for _ in range(2)]
    given = library.empty((2, ROWS), "float32")
    getattr(norms, f"add_{norm}_forward")(x, residual, rstd_out=given)
    assert [launch.short for launch in driver.launches] == [False, True, False]
    for general, short in zip(*made, strict=True):
        assert (type(short), short.dtype, short.shape) == (
            type(general),
            general.dtype,
            general.shape,
        )
    packed = unpacked(driver.launches[1])
    fields = [packed[name] for name in ("y", "residual_out", "mean", "rstd")]
    outputs = [library.address(array) for array in made[1]]
    assert [field for field in fields if field] == outputs


def test_bound(driver: Driver, library: Any) -> None:
    x, out = library.empty((ROWS, HIDDEN_SIZE)), library.empty((ROWS, HIDDEN_SIZE))
    bound = norms.bind_layer_norm(library.empty((HIDDEN_SIZE,)))
    first, second = driver.roads(lambda: bound(x, out))
    assert second == dataclasses.replace(first, short=True)


def test_bound_reads_where_the_weight_lies(driver: Driver, torch_library: TorchLibrary) -> None:
    x = torch_library.empty((ROWS, HIDDEN_SIZE))
    weight = torch_library.torch.nn.Parameter(torch_library.empty((HIDDEN_SIZE,)), False)
    bound = norms.bind_rms_norm(weight)
    bound(x)
    weight.data = torch_library.empty((HIDDEN_SIZE,))
    bound(x)
    assert [launch.short for launch in driver.launches] == [False, True]
    first, second = map(unpacked, driver.launches)
    assert first["weight"] != second["weight"] == weight.data_ptr()
    weight.data = torch_library.empty((HIDDEN_SIZE,), "float32")
    bound(x)
    assert not driver.launches[2].short
    weight.data = torch_library.empty((HIDDEN_SIZE - 1,), "float32")
    with pytest.raises(ValueError, match=r"^x must end in the axes \(63,\), got shape \(4, 64\)"):
        bound(x)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_bound_norm_tries_the_short_road_once(
    driver: Driver, library: Any, monkeypatch: pytest.MonkeyPatch, with_bias: bool
) -> None:
    """But that of x's own library, where the weight is of another, is for the call to try."""
    x, weight = library.empty((ROWS, HIDDEN_SIZE)), library.empty((HIDDEN_SIZE,))
    strided = library.empty((ROWS, 2 * HIDDEN_SIZE))[:, ::2]
    bound, other = (
        norms.bind_rms_norm(weight_, weight if with_bias else None) for weight_ in (weight, 1.0)
    )
    bound(x)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("another time")

    known = dataclasses.replace(_fast.libraries[type(x)], road=refuse, plain=refuse)
    monkeypatch.setitem(_fast.libraries, type(x), known)
    for array in (x, strided, strided):
        bound(array)
    assert [launch.short for launch in driver.launches] == [False, True, False, False]
    with pytest.raises(AssertionError, match="another time"):
        other(x)


def test_norms_with_other_weights_bound(driver: Driver, library: Any) -> None:
    x, weight = library.empty((ROWS, HIDDEN_SIZE)), library.empty((HIDDEN_SIZE,))
    for norm in (norms.bind_rms_norm(weight), norms.bind_rms_norm(None), norms.bind_rms_norm(2.0)):
        driver.launches.clear()
        out = library.empty((ROWS, HIDDEN_SIZE))
        assert norm(x, out=out) is out
        assert type(norm(x)) is type(x)
        assert unpacked(driver.launches[0])["y"] == library.address(out)
        assert unpacked(driver.launches[0])["x"] == library.address(x)
        assert len(driver.launches) == 2


def test_a_weight_on_the_cpu_wakes_no_cuda() -> None:
    torch = pytest.importorskip("torch")
    with mock.patch.object(_fast, "libraries", {}):
        norms.bind_rms_norm(torch.ones(4))(torch.ones(2, 4))
        norms.bind_rms_norm(torch.nn.Parameter(torch.ones(4)))
        norms.bind_rms_norm(np.ones(4))
        assert _fast.libraries == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_added_in_place(driver: Driver, library: Any, in_place: bool) -> None:
    x, residual = (library.empty((ROWS, HIDDEN_SIZE)) for _ in range(2))
    outputs = (x, residual) if in_place else (library.empty((ROWS, HIDDEN_SIZE)), residual)
    weight = library.empty((HIDDEN_SIZE,))
    for inputs in ((x, residual), (residual, residual)):
        first, second = driver.roads(
            lambda inputs=inputs: norms.add_rms_norm(
                *inputs, weight, out=outputs[0], residual_out=outputs[1]
            )
        )
        assert second == dataclasses.replace(first, short=True)


# What does not qualify ------------------------------------------------------------------------


def call_again(library: Any, change: str) -> None:
    """A call that qualifies, but for one thing."""
    shape = (ROWS, HIDDEN_SIZE)
    x, weight, out = library.empty(shape), library.empty(shape[1:]), library.empty(shape)
    options: dict[str, Any] = {}
    if change == "strided x":
        x = library.empty((ROWS, 2 * HIDDEN_SIZE))[:, :HIDDEN_SIZE]
    elif change == "gaps within rows":
        x = library.empty((ROWS, 2 * HIDDEN_SIZE))[:, ::2]
    elif change == "rows backwards":
        x = x[::-1] if library.name == "cupy" else x  # torch has none
    elif change == "misaligned x":
        x = library.empty((ROWS * HIDDEN_SIZE + 4,))[4:].reshape(shape)
    elif change == "strided weight":
        weight = library.empty((2 * HIDDEN_SIZE,))[::2]
    elif change == "strided out":
        out = library.empty((ROWS, 2 * HIDDEN_SIZE))[:, :HIDDEN_SIZE]
    elif change == "constant weight":
        weight = 2.0
    elif change == "mask":
        options["where"] = library.empty((ROWS,), "bool")
    elif change == "valid_rows":
        options["valid_rows"] = library.empty((1,), "int64")
    elif change == "integer eps":
        options["eps"] = 1
    elif change == "NumPy eps":
        options["eps"] = np.float32(1e-6)
    elif change == "tuple axis":
        options["axis"] = (-1,)
    elif change == "no rows":
        x, out = library.empty((0, HIDDEN_SIZE)), library.empty((0, HIDDEN_SIZE))
    elif change == "one column":
        x, weight, out = (library.empty(shape) for shape in ((3, 1), (1,), (3, 1)))
    else:
        assert change == ""
    norms.rms_norm(x, weight, out=out, **options)


CHANGES = (
    "strided x",
    "strided out",
    "gaps within rows",
    "rows backwards",
    "misaligned x",
    "strided weight",
    "constant weight",
    "mask",
    "valid_rows",
    "integer eps",
    "NumPy eps",
    "tuple axis",
    "no rows",
    "one column",
)


def test_an_unaligned_first_call_decides_nothing(driver: Driver, library: Any) -> None:
    for change in ("misaligned x", "", ""):
        call_again(library, change)
    unaligned, aligned, again = driver.launches
    assert [launch.short for launch in driver.launches] == [False, False, True]
    assert unaligned.specialisation != aligned.specialisation == again.specialisation


@pytest.mark.parametrize("change", ["", *CHANGES])
def test_what_qualifies(driver: Driver, library: Any, change: str) -> None:
    call_again(library, "")
    for _ in range(2):
        call_again(library, change)
    expected = [False, False, False]
    if change == "no rows":
        expected = [False]
    elif change in ("strided x", "strided out"):
        expected = [False, False, True]
    elif not change or (change == "rows backwards" and library.name == "torch"):
        expected = [False, True, True]
    assert [launch.short for launch in driver.launches] == expected


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "per_head must be True or False": (TypeError, {"per_head": 0}),
    "weight_offset must be a real number": (TypeError, {"weight_offset": False}),
    "axis must be an int": (TypeError, {"axis": -1.0}),
    "cast must be": (ValueError, {"cast": "twice"}),
    "masked must be": (ValueError, {"masked": "drop"}),
    "out_dtype must be a dtype": (TypeError, {"out_dtype": {1}}),
    "eps must not be negative": (ValueError, {"eps": -1.0}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors_stay(driver: Driver, library: Any, message: str) -> None:
    x, weight = library.empty((ROWS, HIDDEN_SIZE)), library.empty((HIDDEN_SIZE,))
    norms.rms_norm(x, weight)
    error, options = REFUSED[message]
    with pytest.raises(error, match=f"^{message}"):
        norms.rms_norm(x, weight, **options)
    assert len(driver.launches) == 1


def test_shapes_stay_checked(driver: Driver, library: Any) -> None:
    x, weight = library.empty((ROWS, HIDDEN_SIZE)), library.empty((HIDDEN_SIZE,))
    out = library.empty((ROWS, HIDDEN_SIZE))
    norms.add_rms_norm(x, x, weight, out=out)
    other = library.empty((HIDDEN_SIZE, ROWS))
    with pytest.raises(ValueError, match=r"^weight must have shape"):
        norms.add_rms_norm(x, x, library.empty((ROWS,)), out=out)
    with pytest.raises(ValueError, match=r"^residual must have shape"):
        norms.add_rms_norm(x, other, weight, out=out)
    with pytest.raises(ValueError, match=r"^out must have shape"):
        norms.add_rms_norm(x, x, weight, out=other)
    with pytest.raises(ValueError, match=r"^residual_out must have shape"):
        norms.add_rms_norm(x, x, weight, out=out, residual_out=other)


def test_overlaps_stay_refused(driver: Driver, library: Any) -> None:
    """Every place of every array in one buffer: the short road refuses what the general does."""
    room, size = library.empty((8 * 64,)), 64

    def at(place: int, dtype_width: int = 1) -> Any:
        return room[place : place + size].reshape(1, size)

    places = (0, 32, 64, 128)
    free = [library.empty((1, size)) for _ in range(4)]
    norms.add_rms_norm(free[0], free[1], free[2][0], out=free[3], residual_out=free[1])
    norms.add_rms_norm(free[0], free[1], free[2][0], out=free[0], residual_out=free[1])
    seen = set()
    for x, residual, weight, out, sums in np.ndindex(*(5 * [len(places)])):
        arrays = [at(places[i]) for i in (x, residual, weight, out, sums)]

        def call(arrays: list[Any] = arrays) -> str:
            try:
                norms.add_rms_norm(
                    arrays[0],
                    arrays[1],
                    arrays[2][0],
                    out=arrays[3],
                    residual_out=arrays[4],
                )
            except ValueError as error:
                return str(error)
            return ""

        driver.launches.clear()
        short = call()
        road = [launch.short for launch in driver.launches]
        with mock.patch.object(_fast, "forward", return_value=None):
            general = call()
        assert short == general
        assert road == ([] if general else [True])
        seen.add(bool(general))
    assert seen == {True, False}


def test_in_place_needs_equal_dtypes(driver: Driver, library: Any) -> None:
    x = library.empty((ROWS, HIDDEN_SIZE), "float32")
    norms.rms_norm(x, out=library.empty((ROWS, HIDDEN_SIZE)))
    view = x.view(library.empty((1,)).dtype)[:, :HIDDEN_SIZE]
    contiguous = x.reshape(-1)[: ROWS * HIDDEN_SIZE // 2].view(view.dtype)
    with pytest.raises(ValueError, match=r"^out must not overlap x"):
        norms.rms_norm(x, out=contiguous.reshape(ROWS, HIDDEN_SIZE))


def test_the_current_device_decides(driver: Driver, library: Any) -> None:
    for _ in range(2):
        call_again(library, "")
    library.current_device = 1
    for _ in range(2):
        call_again(library, "")
    library.current_device = 0
    call_again(library, "")
    assert [launch.short for launch in driver.launches] == [False, True, False, False, True]


@pytest.mark.parametrize("fails", ["raise", "return"])
def test_a_launch_that_fails_is_left_to_the_general_road(
    driver: Driver, library: Any, fails: str
) -> None:
    """In a thread without a context the general road makes one."""
    x, out = library.empty((ROWS, HIDDEN_SIZE)), library.empty((ROWS, HIDDEN_SIZE))
    bound = norms.bind_rms_norm(library.empty((HIDDEN_SIZE,)))
    calls = (lambda: norms.rms_norm(x, out=out), lambda: norms.rms_norm(x), lambda: bound(x, out))
    for call in calls:
        call()
        call()
        driver.launches.clear()
        driver.fails = fails
        call()
        driver.fails = ""
        call()
        assert [launch.short for launch in driver.launches] == [False, True]


def test_gradients(driver: Driver, torch_library: TorchLibrary) -> None:
    torch = torch_library.torch
    x, out = (torch_library.empty((ROWS, HIDDEN_SIZE)) for _ in range(2))
    weight = torch.nn.Parameter(torch_library.empty((HIDDEN_SIZE,)))
    with torch.no_grad():
        norms.rms_norm(x, weight, out=out)
        version = out._version
        norms.rms_norm(x, weight, out=out)
    assert [launch.short for launch in driver.launches] == [False, True]
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match=r"^weight requires grad"):
        norms.rms_norm(x, weight, out=out)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^out must not require grad"):
        norms.rms_norm(x, weight, out=out.clone().requires_grad_())
    assert len(driver.launches) == 2


def test_a_bound_weight_of_another_dtype_at_its_old_address(
    driver: Driver, torch_library: TorchLibrary
) -> None:
    torch = torch_library.torch
    x, out = (torch_library.empty((ROWS, HIDDEN_SIZE)) for _ in range(2))
    weight = torch.nn.Parameter(torch_library.empty((HIDDEN_SIZE,)), False)
    bound = norms.bind_rms_norm(weight)
    for _ in range(2):
        bound(x, out)
    weight.data = weight.data.view(torch.bfloat16)
    for _ in range(2):
        bound(x, out)
    arguments = [launch.specialisation.template_arguments for launch in driver.launches]
    assert ["__nv_bfloat16" in of_launch for of_launch in arguments] == [False, False, True, True]
    weight.data = weight.data[:32]
    with pytest.raises(ValueError, match=r"^x must end in the axes \(32,\), got shape \(4, 64\)"):
        bound(x, out)


@pytest.mark.parametrize("bound", [False, True])
def test_forward_mode_is_refused(driver: Driver, torch_library: TorchLibrary, bound: bool) -> None:
    x, out = (torch_library.empty((ROWS, HIDDEN_SIZE)) for _ in range(2))
    weight = torch_library.empty((HIDDEN_SIZE,))
    norm = norms.bind_rms_norm(weight)
    call = norm if bound else lambda x, out: norms.rms_norm(x, weight, out=out)
    for _ in range(2):
        call(x, out)
    forward_ad = torch_library.torch.autograd.forward_ad
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of how it sets this up
        dual = forward_ad.make_dual(x, x)
        with pytest.raises((RuntimeError, TypeError), match=r"^x "):
            call(dual, out)
    assert len(driver.launches) == 2


def test_subclasses_and_tensors_without_memory(driver: Driver, torch_library: TorchLibrary) -> None:
    torch = torch_library.torch

    class Tagged(torch.Tensor):  # type: ignore[name-defined, misc]
        pass

    x = torch_library.empty((ROWS, HIDDEN_SIZE))
    norms.rms_norm(x)
    norms.rms_norm(x.as_subclass(Tagged))
    assert [launch.short for launch in driver.launches] == [False, False]
    with pytest.raises(TypeError, match=r"^x must be a tensor with memory of its own"):
        torch.func.vmap(norms.rms_norm)(torch_library.empty((2, ROWS, HIDDEN_SIZE)))
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    fake = mode.from_tensor(x)
    with pytest.raises(TypeError, match=r"memory of its own"):
        norms.rms_norm(fake)
    with mode:  # it sees an operator
        assert type(norms.rms_norm(fake)) is type(fake)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("warm", [False, True])
def test_bound_norms_in_a_fork_without_cuda(
    driver: Driver, library: Any, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """They look at the device before anything else; the general road tells what is wrong."""
    x, out = (library.empty((ROWS, HIDDEN_SIZE)) for _ in range(2))
    weight = library.empty((HIDDEN_SIZE,))
    bound, with_bias = norms.bind_rms_norm(weight), norms.bind_rms_norm(weight, weight)
    calls = [lambda: bound(x, out), lambda: bound(x), lambda: with_bias(x, out)]
    if warm:
        for call in calls * 2:
            call()
    before = len(driver.launches)

    def fail(self: Any) -> int:
        raise RuntimeError("cudaErrorInitializationError: initialization error")

    monkeypatch.setattr(type(library), "current_device", property(fail), raising=False)
    monkeypatch.setattr(_fast, "libraries", {})  # as after a fork
    monkeypatch.setattr(_border, "Caller", lambda name, x: _refuse.forked())
    for call in calls:
        with pytest.raises(RuntimeError, match=r"'spawn'$"):
            call()
    assert len(driver.launches) == before


def test_new_memory_that_is_not_aligned(driver: Driver) -> None:
    pytest.importorskip("cupy")
    with contextlib.ExitStack() as stack:
        library = CuPyLibrary(stack)
        x = library.empty((ROWS, HIDDEN_SIZE))
        for offset in (0, 0, 8):
            library.offset = offset
            norms.add_rms_norm(x, x)
    assert [launch.short for launch in driver.launches] == [False, True, False]


def test_new_tensors_come_without_dispatch_where_no_mode_would_see_it() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    direct = SimpleNamespace(_empty_strided_cuda=torch._C._dynamo.guards._empty_strided_cpu)
    namespace = SimpleNamespace(
        float16=torch.float16,
        _C=SimpleNamespace(
            _dynamo=SimpleNamespace(guards=direct),
            _len_torch_dispatch_stack=torch._C._len_torch_dispatch_stack,
        ),
    )
    new = _torch_memory.new.__wrapped__(namespace)
    for shape, strides in (((2, 3), (3, 1)), ((1, 0, 4), (4, 4, 1))):
        made = new(shape, strides, torch.bfloat16)
        assert type(made) is torch.Tensor
        assert (made.shape, made.stride(), made.dtype) == (shape, strides, torch.bfloat16)
        assert not made.requires_grad
    with torch.inference_mode():
        assert new((3,), (1,), torch.float32).is_inference()
    with FakeTensorMode():
        assert new((3,), (1,), torch.float32) is None
    del direct._empty_strided_cuda
    assert _torch_memory.new.__wrapped__(namespace)((3,), (1,), torch.float32) is None


def test_no_tensor_is_made_in_vain(
    driver: Driver, torch_library: TorchLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        made.append(shape)
        return torch_library.torch._C._dynamo.guards._empty_strided_cpu(shape, strides, dtype)

    monkeypatch.setattr(_torch_memory, "new", lambda torch: new)
    x, weight = torch_library.empty((ROWS, HIDDEN_SIZE)), torch_library.empty((HIDDEN_SIZE,))
    for _ in range(2):
        norms.rms_norm(x, weight, out=torch_library.empty((ROWS, HIDDEN_SIZE)))
    assert made == []
    kept = []
    for count in range(5):  # the general road's come from a host's space here
        kept.append(norms.rms_norm(x, weight))
        assert made == count * [(ROWS, HIDDEN_SIZE)]
        assert unpacked(driver.launches[-1])["y"] == kept[-1].data_ptr()
    assert [launch.short for launch in driver.launches] == [False, True, False, *4 * [True]]


# Many of them -----------------------------------------------------------------------------------


def test_the_number_of_kept_calls_is_bounded(
    driver: Driver, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fast, "LIMIT", 4)
    arrays = [library.empty((rows, HIDDEN_SIZE)) for rows in range(1, 7)]
    for x in arrays:
        norms.rms_norm(x)
    assert [len(kept.entries) for kept in _fast._kept.values() if kept.entries] == [4]
    driver.launches.clear()
    norms.rms_norm(arrays[-1])
    norms.rms_norm(arrays[0])
    assert [launch.short for launch in driver.launches] == [True, False]


def test_the_number_of_kept_launches_is_bounded(
    driver: Driver, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fast, "LAUNCHES_LIMIT", 3)
    pairs = [(library.empty((1, 64)), library.empty((1, 64))) for _ in range(5)]
    for x, out in pairs + pairs:
        norms.rms_norm(x, out=out)
        assert all(len(kept.launches) <= 3 for kept in _fast._kept.values())
    for launch, (x, out) in zip(driver.launches, pairs + pairs, strict=True):
        packed = unpacked(launch)
        assert (packed["x"], packed["y"]) == (library.address(x), library.address(out))
    assert [launch.short for launch in driver.launches] == [False, *9 * [True]]


@pytest.mark.parametrize("bound", [False, True])
def test_the_same_addresses_with_other_arrays(driver: Driver, library: Any, bound: bool) -> None:
    """A launch is found again by its addresses, but not for another shape or dtype there."""
    room, other = library.empty((4096,)), library.empty((4096,))
    half, brain = room.dtype, library.empty((1,), "bfloat16").dtype
    weight = library.empty((64,))
    norm = norms.bind_rms_norm(weight)
    shapes = ((8, 64), (16, 64), (2, 4, 64))
    seen = []
    for repeat in range(3):
        for dtype in (half, brain):
            for shape in shapes:
                x = room[: int(np.prod(shape))].view(dtype).reshape(shape)
                out = other[: int(np.prod(shape))].view(dtype).reshape(shape)
                assert (norm(x, out) if bound else norms.rms_norm(x, weight, out=out)) is out
                seen.append((repeat, dtype, shape))
    assert [launch.short for launch in driver.launches] == [repeat > 0 for repeat, _, _ in seen]
    for launch, (_, dtype, shape) in zip(driver.launches, seen, strict=True):
        assert unpacked(launch)["rows"] == int(np.prod(shape[:-1]))
        cpp = "__half" if dtype == half else "__nv_bfloat16"
        assert launch.specialisation.template_arguments[1] == cpp


def test_two_libraries_in_the_same_memory(driver: Driver) -> None:
    pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    with contextlib.ExitStack() as stack:
        torch_library, _ = TorchLibrary(stack), CuPyLibrary(stack)
        tensors = [torch_library.empty(shape) for shape in (3 * [(8, 64)] + [(64,)] + [(8, 64)])]

        def view(tensor: Any) -> Any:
            memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), 2 * tensor.numel(), tensor, 0)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            return cupy.ndarray(tuple(tensor.shape), np.dtype("float16"), pointer)

        for _ in range(2):
            for arrays in (tensors, list(map(view, tensors))):
                x, residual, out, weight, sums = arrays
                assert norms.rms_norm(x, weight, out=out) is out
                made = norms.add_rms_norm(x, residual, weight, out=out, residual_out=sums)
                assert made[0] is out
                assert made[1] is sums
    assert [launch.short for launch in driver.launches] == 4 * [False] + 4 * [True]


@pytest.mark.parametrize("bound", [False, True])
def test_a_shape_that_is_wrong_at_known_addresses(
    driver: Driver, library: Any, bound: bool
) -> None:
    x, out, weight = library.empty((8, 64)), library.empty((8, 64)), library.empty((64,))
    norm = norms.bind_rms_norm(weight)
    call = norm if bound else lambda x, out: norms.rms_norm(x, weight, out=out)
    for _ in range(3):
        call(x, out)
    for wrong in (out.reshape(4, 128), out[:4], out.T):
        with pytest.raises(ValueError, match=r"^out must have shape \(8, 64\)"):
            call(x, wrong)
    strided = out.reshape(-1)[:256].reshape(4, 64)[:, :32]
    message = r"^x must end in the axes" if bound else r"^weight must have shape"
    with pytest.raises(ValueError, match=message):
        call(strided, None)


def test_every_shape_that_is_wrong_at_known_addresses(driver: Driver, library: Any) -> None:
    """What lies there is as large as before, but one array of another shape."""
    x, residual, out, sums = (library.empty((8, 64)) for _ in range(4))
    weight = library.empty((64,))
    arrays = {"x": x, "residual": residual, "weight": weight, "out": out, "residual_out": sums}

    def call(**changed: Any) -> None:
        given = arrays | changed
        norms.add_rms_norm(**given)
        for name in ("residual", "residual_out"):
            del given[name]
        norms.rms_norm(**given)

    for _ in range(3):
        call()
    launched = len(driver.launches)
    assert [launch.short for launch in driver.launches] == [False, False, *4 * [True]]
    for name, array in arrays.items():
        shapes = [(4, 128), (8, 8, 8), (512,), (8, 64, 1)] if array is not weight else [(64, 1)]
        for shape in shapes:
            with pytest.raises(ValueError, match=r"must have shape"):
                norms.add_rms_norm(**arrays | {name: array.reshape(shape)})
            if name in ("x", "weight", "out"):
                changed = {"x": x, "weight": weight, "out": out} | {name: array.reshape(shape)}
                with pytest.raises(ValueError, match=r"must have shape"):
                    norms.rms_norm(**changed)
    assert len(driver.launches) == launched


def test_a_launch_outlives_what_is_kept_of_it(driver: Driver, library: Any) -> None:
    """Another thread may forget it while the driver reads its arguments."""
    x, residual, out, sums = (library.empty((ROWS, HIDDEN_SIZE)) for _ in range(4))
    weight = library.empty((HIDDEN_SIZE,))
    bound, other = norms.bind_rms_norm(weight), norms.bind_layer_norm(weight, weight)
    size = 8 + _kernel._packer("norm_forward", "float32").size
    taken: list[Any] = []

    def forget() -> None:
        _fast.forget()
        taken.extend(ctypes.create_string_buffer(b"\xff" * size, size) for _ in range(9))

    for call in (
        lambda: norms.rms_norm(x, weight, out=out),
        lambda: norms.add_rms_norm(x, residual, weight, out=out, residual_out=sums),
        lambda: norms.layer_norm(x, weight, weight, out=out),
        lambda: bound(x, out),
        lambda: other(x, out),
    ):
        for driver.meanwhile in (lambda: None, lambda: None, lambda: None, forget):
            call()
        general, *_, last = driver.launches[-4:]
        assert last == dataclasses.replace(general, short=True)


def test_threads(driver: Driver, library: Any) -> None:
    """Each launch has the addresses of one caller, in first calls and in later ones."""
    threads, calls = 16, 40
    pairs = [
        (library.empty((ROWS, HIDDEN_SIZE)), library.empty((ROWS, HIDDEN_SIZE)))
        for _ in range(threads)
    ]
    start = threading.Barrier(threads)
    failures: list[BaseException] = []

    def work(x: Any, out: Any) -> None:
        try:
            start.wait()
            for _ in range(calls):
                assert norms.rms_norm(x, out=out) is out
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=work, args=pair) for pair in pairs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []
    assert len(driver.launches) == threads * calls
    assert sum(launch.short for launch in driver.launches) >= threads * (calls - 2)
    addresses = {library.address(x): library.address(out) for x, out in pairs}
    for launch in driver.launches:
        packed = unpacked(launch)
        assert addresses[packed["x"]] == packed["y"]
    (kept,) = (kept for kept in _fast._kept.values() if kept.entries)
    assert len(kept.launches) == threads


# On the emulator --------------------------------------------------------------------------------


@contextlib.contextmanager
def emulated() -> Iterator[list[str]]:
    """The library's own kernels on the CPU, by both roads; yields which road each launch took."""
    from tests import emulator

    roads: list[str] = []
    functions: list[Any] = []
    with emulator.installed(checked=False), mock.patch.object(_fast, "libraries", {}):
        run = _kernel.launch

        def launch_kernel(function: int, *geometry: int) -> None:
            grid, _, _, block, _, _, shared_bytes, stream, parameters, _ = geometry
            found, kernel = functions[function]
            address = ctypes.c_void_p.from_address(parameters).value
            packed = ctypes.string_at(address or 0, _kernel._packer(kernel, "float32").size)
            roads.append("short")
            run(found, grid, block, shared_bytes, stream, packed)

        def launch(
            function: Any, grid: int, block: int, shared_bytes: int, stream: int, packed: bytes
        ) -> Any:
            roads.append("general")
            run(function, grid, block, shared_bytes, stream, packed)
            functions.append((function, function.expression.partition("<")[0]))
            handle = SimpleNamespace(ptr=len(functions) - 1, overlaps=False)
            return _enqueue.Launched(handle, grid, block, shared_bytes, packed)

        with (
            mock.patch.object(_kernel, "launch", launch),
            mock.patch.object(_enqueue, "launcher", return_value=launch_kernel),
        ):
            yield roads
    _fast.forget()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("statistics", ["", "_forward"])
@pytest.mark.parametrize("function", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_both_roads_give_the_same_bits(function: str, statistics: str, in_place: bool) -> None:
    skip_without("emulator")
    from tests import emulator

    random = np.random.default_rng(0)
    adds = function.startswith("add_")
    shape = (5, 104)

    def draw(shape: tuple[int, ...], dtype: str = "float16") -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    weight, bias = draw(shape[1:], "float32"), draw(shape[1:])
    results: list[list[bytes]] = []
    values = [(draw(shape), draw(shape)) for _ in range(2)]
    with emulated() as roads:
        for forget in (False, True):  # the second time every call takes the general road
            results.append([])
            parameters = [emulator.from_numpy(array) for array in (weight, bias)]
            for pair in values:
                x, residual = map(emulator.from_numpy, pair)
                arrays = (x, residual) if adds else (x,)
                outputs = {}
                if in_place:
                    outputs = {"out": x, "residual_out": residual} if adds else {"out": x}
                if forget:
                    _fast.forget()
                made = getattr(norms, function + statistics)(*arrays, *parameters, **outputs)
                for array in made if isinstance(made, tuple) else (made,):
                    results[-1].append(emulator.to_numpy(array).tobytes())
    assert roads == ["general", "short", "general", "general"]
    assert results[0] == results[1]
    assert len(set(results[0])) == len(results[0])


# Loaded plans -------------------------------------------------------------------------------------

PLAN = _plan_file.Key(_plan_file.OPS["rms_norm"], 4096, ("float16",)).candidates(90)[1]


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a plan for rows of 4096, for the GPU here."""
    monkeypatch.setattr(_info, "available", lambda: (True, ""))
    monkeypatch.setattr(_kernel, "devices", lambda: [DeviceProperties(90, 132, "This GPU")])
    entry = {"op": "rms_norm", "hidden_size": 4096, "dtypes": {"x": "float16"}}
    document = {
        "meta": {"device": "This GPU", "cupy_rmsnorm": norms.__version__},
        "plans": [{**entry, "plan": dataclasses.asdict(PLAN)}],
    }
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(document))
    yield path
    norms.load_plans(None)


def uses(launch: Launch) -> bool:
    """Whether a launch is by the plan of the file."""
    geometry = (PLAN.vec_size, PLAN.vecs_per_thread, PLAN.threads_per_row)
    return launch.specialisation.template_arguments[7:10] == tuple(map(str, geometry))


def test_repeated_calls_take_a_plan_from_when_it_is_loaded(
    driver: Driver, library: Any, plans: Path
) -> None:
    x, weight = library.empty((ROWS, 4096)), library.empty((4096,))
    bound = norms.bind_rms_norm(weight)
    expected = []
    for path in (None, plans, None):
        norms.load_plans(path)
        for short in (False, True):
            norms.rms_norm(x, weight)
            bound(x, x)
            expected += 2 * [(path is not None, short)]
    assert [(uses(launch), launch.short) for launch in driver.launches] == expected


def test_a_bound_norm_forgets_when_others_took_its_place(
    driver: Driver, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it keeps is out of the bounded table of options by then, and so is what was asked for
    last."""
    monkeypatch.setattr(_fast, "OPTIONS_LIMIT", 1)
    x, out = library.empty((ROWS, HIDDEN_SIZE)), library.empty((ROWS, HIDDEN_SIZE))
    bound = norms.bind_rms_norm(library.empty((HIDDEN_SIZE,)))
    for _ in range(2):
        bound(x, out)
    norms.rms_norm(x, eps=1.0, out=out)
    _fast.forget()
    for _ in range(2):
        bound(x, out)
    assert [launch.short for launch in driver.launches] == [False, True, False, False, True]


def test_a_call_during_which_plans_change_is_not_remembered(
    driver: Driver, library: Any, plans: Path
) -> None:
    x = library.empty((ROWS, 4096))
    launch = _kernel.launch

    def load_first(*arguments: Any) -> Any:
        norms.load_plans(plans)  # as another thread would
        return launch(*arguments)

    with mock.patch.object(_kernel, "launch", load_first):
        norms.rms_norm(x)
    norms.rms_norm(x)
    norms.rms_norm(x)
    assert [(uses(made), made.short) for made in driver.launches] == [
        (False, False),
        (True, False),
        (True, True),
    ]


# q and k --------------------------------------------------------------------------------------

HEADS = (3, 2)


def packed_qk(library: Any, heads: tuple[int, int] = HEADS) -> tuple[Any, Any]:
    """q and k of one packed buffer, which holds v too."""
    qkv = library.empty((ROWS, heads[0] + 2 * heads[1], HIDDEN_SIZE))
    return qkv[:, : heads[0]], qkv[:, heads[0] : sum(heads)]


@pytest.mark.parametrize("place", ["in place", "new", "given", "q in place"])
def test_a_repeated_qk_norm_launches_the_same(driver: Driver, library: Any, place: str) -> None:
    q, k = packed_qk(library)
    weights = library.empty((HIDDEN_SIZE,)), library.empty((HEADS[1], HIDDEN_SIZE))
    outputs: dict[str, Any] = {}
    if place == "in place":
        outputs = {"q_out": q, "k_out": k}
    elif place == "given":
        outputs = dict(zip(("q_out", "k_out"), packed_qk(library), strict=True))
    elif place == "q in place":
        outputs = {"q_out": q}
    results = [norms.qk_norm(q, k, *weights, eps=1e-5, **outputs) for _ in range(2)]
    first, second = driver.launches
    fields = [name for name, _ in _kernel.PAIR_PARAMETERS]
    unpacked = [
        dict(zip(fields, _kernel._packer("norm_forward_pair", "float32").unpack(p), strict=True))
        for p in (first.packed, second.packed)
    ]
    for launched, arrays in zip(unpacked, results, strict=True):
        for half, array in zip("qk", arrays, strict=True):
            assert launched.pop(f"{half}.y") == library.address(array)
            assert array is outputs.get(f"{half}_out", array)
    assert unpacked[0] == unpacked[1]
    assert (first.short, second.short) == (False, True)
    assert second == dataclasses.replace(first, short=True, packed=second.packed)


def test_qk_norm_packs_other_addresses(driver: Driver, library: Any) -> None:
    for _ in range(3):
        q, k = packed_qk(library)
        weight = library.empty((HIDDEN_SIZE,))
        norms.qk_norm(q, k, weight, weight, q_out=q, k_out=k)
        values = _kernel._packer("norm_forward_pair", "float32").unpack(driver.launches[-1].packed)
        packed = dict(zip([name for name, _ in _kernel.PAIR_PARAMETERS], values, strict=True))
        for half, array in (("q", q), ("k", k)):
            assert packed[f"{half}.x"] == packed[f"{half}.y"] == library.address(array)
            assert packed[f"{half}.weight"] == library.address(weight)
    assert [launch.short for launch in driver.launches] == [False, True, True]


def test_other_calls_of_qk_norm_take_the_general_road(driver: Driver, library: Any) -> None:
    q, k = packed_qk(library)
    for _ in range(2):
        norms.qk_norm(q, k)
        norms.qk_norm(*packed_qk(library, (3, 1)))
        norms.qk_norm(*(array[..., ::2] for array in (q, k)))
        norms.qk_norm(*(array[:, ::-1] if library.name == "cupy" else array[0] for array in (q, k)))
    short = [launch.short for launch in driver.launches]
    strided = library.name == "torch"  # a tensor has no negative strides, and two axes will do
    assert short == [False] * 4 + [True, True, False, strided]
    driver.launches.clear()
    for arguments in ((q, k, 2.0), (q, k, None, library.empty((HIDDEN_SIZE,))), (q[:0], k)):
        for _ in range(2):
            norms.qk_norm(*arguments)
    assert not any(launch.short for launch in driver.launches)


def test_qk_norm_refuses_the_same_overlaps(driver: Driver, library: Any) -> None:
    """Every place of every array in one buffer, as above."""
    room, size = library.empty((6 * HIDDEN_SIZE,)), HIDDEN_SIZE
    free = [library.empty((1, size)) for _ in range(5)]
    norms.qk_norm(*free[:2], free[2][0], free[2][0], q_out=free[3], k_out=free[4])
    seen = set()
    for indices in np.ndindex(*(5 * [4])):
        places = [(0, 64, 96, 160)[index] for index in indices]
        arrays = [room[place : place + size].reshape(1, size) for place in places]
        q, k, weight, q_out, k_out = arrays

        def call() -> str:
            try:
                norms.qk_norm(q, k, weight[0], free[2][0], q_out=q_out, k_out=k_out)  # noqa: B023
            except ValueError as error:
                return str(error)
            return ""

        driver.launches.clear()
        short = call()
        with mock.patch.object(_fast_pair, "forward", return_value=None):
            general = call()
        assert short == general
        seen.add(bool(general))
    assert seen == {True, False}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", ["rms_norm", "add_rms_norm", "bound"])
def test_a_traced_call_takes_no_short_road(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_fast, "libraries", {})
    monkeypatch.setattr(_device, "runtime", lambda: SimpleNamespace(getDevice=int))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", abs, raising=False)
    assert _fast_learn.known_library(torch.Tensor) is not None
    x, weight = torch.ones(ROWS, HIDDEN_SIZE), torch.ones(HIDDEN_SIZE)
    with mock.patch.object(torch.Tensor, "get_device", return_value=0):  # bind the short road
        bound = norms.bind_rms_norm(weight)
    calls = {
        "rms_norm": lambda x, weight: norms.rms_norm(x, weight),
        "add_rms_norm": lambda x, weight: norms.add_rms_norm(x, x, weight)[0],
        "bound": lambda x, weight: bound(x),
    }
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(calls[function], backend=backend, fullgraph=True)
    try:
        assert torch.allclose(compiled(x, weight), torch.ones_like(x))
    finally:
        torch._dynamo.reset()
    (graph,) = graphs
    assert any("cupy_rmsnorm" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("how", ["jit", "fx", "mode"])
@pytest.mark.parametrize("function", ["rms_norm", "out", "bias", "add_rms_norm", "bound", "qk"])
def test_a_recorded_call_takes_no_short_road(
    driver: Driver, torch_library: TorchLibrary, function: str, how: str
) -> None:
    torch, empty = torch_library.torch, torch_library.empty
    x, out, sums = (empty((ROWS, HIDDEN_SIZE)) for _ in range(3))
    q, k = empty((ROWS, 4, HIDDEN_SIZE)), empty((ROWS, 2, HIDDEN_SIZE))
    weight = empty((HIDDEN_SIZE,))
    bound = norms.bind_rms_norm(weight)
    calls = {
        "rms_norm": lambda x: norms.rms_norm(x, weight),
        "out": lambda x: norms.rms_norm(x, weight, out=out),
        "bias": lambda x: norms.rms_norm(x, weight, weight, out=out),
        "add_rms_norm": lambda x: norms.add_rms_norm(x, x, weight, out=out, residual_out=sums),
        "bound": lambda x: bound(x, out),
        "qk": lambda x: norms.qk_norm(q, k, weight, weight),
    }
    call = calls[function]
    for _ in range(2):
        call(x)
    assert [launch.short for launch in driver.launches] == [False, True]
    seen: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[name-defined, misc]
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    if how == "jit":
        seen.append(str(torch.jit.trace(call, x, check_trace=False, strict=False).graph))
    elif how == "fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        seen.append(make_fx(call)(x).code)
    else:
        with Mode():
            call(x)
    assert "cupy_rmsnorm" in " ".join(seen)


# Backward -------------------------------------------------------------------------------------

BACKWARD = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
MADE = ("dx", "dresidual", "dweight", "dbias", "dweight_parts", "dbias_parts")


def backward_call(
    library: Any,
    function: str = "rms_norm",
    statistics: bool = True,
    out: bool = False,
    **changes: Any,
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The arrays of a backward call by the kernels' names, and the call."""
    shape, adds = (ROWS, HIDDEN_SIZE), function.startswith("add_")
    row = shape[1:]
    arrays = {
        "dout": library.empty(shape),
        "dresidual_out": library.empty(shape) if adds else None,
        "x": library.empty(shape),
        "weight": library.empty(row, "float32"),
        "mean": library.empty(shape[:1], "float32") if statistics and "layer" in function else None,
        "rstd": library.empty(shape[:1], "float32") if statistics else None,
        "bias": library.empty(row),
        "dx_out": library.empty(shape) if out else None,
        "dweight_out": library.empty(row, "float32") if out else None,
        "dbias_out": library.empty(row) if out else None,
    } | {name: value for name, value in changes.items() if not isinstance(value, bool)}
    given = {name: value for name, value in arrays.items() if value is not None}
    x = given.pop("x")
    options = {name: value for name, value in changes.items() if isinstance(value, bool)}
    first = (given.pop("dout"), given.pop("dresidual_out", None), x)[:: 1 if adds else 2]
    call = getattr(norms, f"{function}_backward")
    return arrays, lambda: call(*first, **given, **options)


def addresses(library: Any, arrays: dict[str, Any]) -> dict[str, int]:
    return {name: library.address(array) for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("function", BACKWARD)
def test_a_repeated_backward_launches_the_same(
    driver: Driver, library: Any, function: str, statistics: bool, out: bool
) -> None:
    """With other arrays, and as often as the general road; what it made is where it returned it."""
    count = 1 if statistics else 2  # few rows of which all is known take one launch
    arrays, call = backward_call(library, function, statistics, out)
    call()
    arrays, call = backward_call(library, function, statistics, out)
    returned = call()
    short = driver.launches[count:]
    with general_road():
        call()
    assert [launch.short for launch in driver.launches] == count * [False] + count * [True] + (
        count * [False]
    )
    known = addresses(library, arrays)
    outputs = dict(zip(("dx", "dweight", "dbias"), returned[:1] + returned[-2:], strict=True))
    for launch, general in zip(short, driver.launches[2 * count :], strict=True):
        packed, expected = unpacked(launch), unpacked(general)
        for name in MADE:
            got, _ = packed.pop(name, None), expected.pop(name, None)
            assert got is None or name not in outputs or got == library.address(outputs[name])
        assert packed == expected
        assert dataclasses.replace(general, short=True, packed=launch.packed) == launch
        for name in known.keys() & packed.keys():
            assert packed[name] == known[name]
    for name, array in outputs.items():
        assert array is arrays[f"{name}_out"] or not out
    if not statistics:
        rows, sums = map(unpacked, short)
        for name in MADE[2:]:
            assert rows[name] == sums[name] != 0
    if function.startswith("add_"):
        assert returned[1] is returned[0]


def test_dx_in_the_place_of_x_takes_other_kernels(driver: Driver, library: Any) -> None:
    x = library.empty((ROWS, HIDDEN_SIZE))
    for _ in range(2):
        for dx in (x, library.empty((ROWS, HIDDEN_SIZE))):
            backward_call(library, x=x, dx_out=dx)[1]()
    kernels = ["norm_backward", "norm_backward_sum", "norm_backward_few"]
    assert [(launch.specialisation.kernel, launch.short) for launch in driver.launches] == [
        (kernel, short) for short in (False, True) for kernel in kernels
    ]


def test_the_number_of_kept_launches_of_backward_is_bounded(
    driver: Driver, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fast, "LAUNCHES_LIMIT", 3)
    calls = [backward_call(library, out=True) for _ in range(5)]
    for arrays, call in calls + calls:
        call()
        assert unpacked(driver.launches[-1])["dx"] == library.address(arrays["dx_out"])
        assert all(len(kept.series) <= 3 for kept in _fast._kept.values())
    assert [launch.short for launch in driver.launches] == [False, *9 * [True]]


def test_given_gradients_count_their_versions(driver: Driver, torch_library: TorchLibrary) -> None:
    arrays, call = backward_call(torch_library, out=True)
    for count in range(3):
        for name in ("dx_out", "dweight_out", "dbias_out"):
            assert arrays[name]._version == count
        call()
    assert [launch.short for launch in driver.launches] == [False, True, True]


def test_gradients_that_torch_made_otherwise_are_left_to_the_general_road(
    driver: Driver, torch_library: TorchLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = torch_library.torch
    monkeypatch.setattr(_torch_memory, "new", lambda torch: lambda *layout: None)
    made = torch.nn.Parameter(torch_library.empty((ROWS, HIDDEN_SIZE)))
    _, call = backward_call(torch_library)
    call()
    with mock.patch.object(torch.Tensor, "new_empty", return_value=made):
        call()
    call()
    assert [launch.short for launch in driver.launches] == [False, False, True]


def test_the_backward_of_other_dtypes_is_apart(driver: Driver, library: Any) -> None:
    """dresidual is an output of its own where its dtype differs from dx's."""
    dtype = library.empty((1,), "float32").dtype
    for x_dtype in (None, dtype, None, dtype, "float32"):
        arrays, _ = backward_call(library, "add_rms_norm")
        dx, dresidual, _, _ = norms.add_rms_norm_backward(
            arrays["dout"], arrays["dresidual_out"], arrays["x"], x_dtype=x_dtype
        )
        packed = unpacked(driver.launches[-1])
        assert packed["dx"] == library.address(dx)
        assert (dresidual is dx) == (x_dtype is None)
        assert packed["dresidual"] == (0 if x_dtype is None else library.address(dresidual))
    short = [
        launch.short for launch in driver.launches if "sum" not in launch.specialisation.kernel
    ]
    assert short == [False, False, True, True, False]


BACKWARD_CHANGES: dict[str, tuple[bool, Callable[[Any], dict[str, Any]]]] = {
    "strided dout": (
        True,
        lambda lib: {"dout": lib.empty((ROWS, 2 * HIDDEN_SIZE))[:, :HIDDEN_SIZE]},
    ),
    "gaps in dout": (False, lambda lib: {"dout": lib.empty((ROWS, 2 * HIDDEN_SIZE))[:, ::2]}),
    "misaligned dout": (
        False,
        lambda lib: {"dout": lib.empty((ROWS * HIDDEN_SIZE + 4,))[4:].reshape(ROWS, HIDDEN_SIZE)},
    ),
    "gaps in weight": (False, lambda lib: {"weight": lib.empty((2 * HIDDEN_SIZE,))[::2]}),
    "constant weight": (False, lambda lib: {"weight": 2.0, "bias": None}),
    "mask": (False, lambda lib: {"where": lib.empty((ROWS,), "bool")}),
    "no dx": (True, lambda lib: {"need_dx": False}),
    "no dweight": (True, lambda lib: {"need_dweight": False}),
    "no bias": (True, lambda lib: {"bias": None}),
    "one for all rows": (
        False,
        lambda lib: {
            "x": lib.empty((ROWS, 1)),
            "dout": lib.empty((ROWS, 1)),
            "weight": None,
            "bias": None,
        },
    ),
    "no rows": (
        False,
        lambda lib: {name: lib.empty((0, HIDDEN_SIZE)) for name in ("x", "dout")} | {"rstd": None},
    ),
    "streamed": (
        False,
        lambda lib: (
            {name: lib.empty((1, 300_000)) for name in ("x", "dout")}
            | dict.fromkeys(("weight", "bias", "rstd"))
        ),
    ),
}


@pytest.mark.parametrize("change", BACKWARD_CHANGES)
def test_which_backward_qualifies(driver: Driver, library: Any, change: str) -> None:
    """Nothing of a plain call decides about another one."""
    qualifies, changes = BACKWARD_CHANGES[change]
    backward_call(library)[1]()
    driver.launches.clear()
    roads = []
    for _ in range(2):
        backward_call(library, **changes(library))[1]()
        roads.append({launch.short for launch in driver.launches})
        driver.launches.clear()
    assert roads == [{False}, {qualifies}]
    backward_call(library)[1]()
    assert [launch.short for launch in driver.launches] == [True]


def test_backward_refuses_the_same_overlaps(driver: Driver, library: Any) -> None:
    """Every place of some arrays in one buffer: the short road refuses what the general does."""
    room = library.empty((8 * HIDDEN_SIZE,))
    free = [library.empty((1, HIDDEN_SIZE)) for _ in range(5)]
    for replaced in (False, True):
        x, dx = free[0], free[0 if replaced else 1]
        norms.rms_norm_backward(free[2], x, free[3][0], dx_out=dx, dweight_out=free[4][0])
    seen = set()
    for indices in np.ndindex(*(5 * [4])):
        places = [(0, 32, 64, 128)[index] for index in indices]
        dout, x, weight, dx, dweight = (
            room[place : place + HIDDEN_SIZE].reshape(1, HIDDEN_SIZE) for place in places
        )

        def call(arrays: Any = (dout, x, weight[0], dx, dweight[0])) -> str:
            dout, x, weight, dx, dweight = arrays
            try:
                norms.rms_norm_backward(dout, x, weight, dx_out=dx, dweight_out=dweight)
            except ValueError as error:
                return str(error)
            return ""

        driver.launches.clear()
        short = call()
        roads = {launch.short for launch in driver.launches}
        with general_road():
            general = call()
        assert short == general
        assert roads == (set() if general else {True})
        seen.add(bool(general))
    assert seen == {True, False}


def test_errors_of_backward_stay(driver: Driver, library: Any) -> None:
    _, call = backward_call(library)
    call()
    for changes, error, message in (
        ({"need_dx": 1}, TypeError, "need_dx must be True or False"),
        ({"weight": library.empty((HIDDEN_SIZE - 1,))}, ValueError, "weight must have shape"),
        ({"bias": library.empty((HIDDEN_SIZE, 1))}, ValueError, "bias must have shape"),
        ({"rstd": library.empty((ROWS,))}, TypeError, "rstd must be float32"),
        ({"dx_out": library.empty((HIDDEN_SIZE, ROWS))}, ValueError, "dx_out must have shape"),
        ({"dweight_dtype": {1}}, TypeError, "dweight_dtype must be a dtype"),
        ({"eps": -1.0}, ValueError, "eps must not be negative"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            backward_call(library, **changes)[1]()
    assert len(driver.launches) == 1


def test_a_backward_that_fails_or_is_forgotten_takes_the_general_road(
    driver: Driver, library: Any
) -> None:
    _, call = backward_call(library)
    call()
    for driver.fails in ("raise", "return", ""):
        call()
    _fast.forget()
    call()
    library.current_device = 1
    call()
    assert [launch.short for launch in driver.launches] == [False, False, False, True, False, False]


@pytest.mark.parametrize("function", BACKWARD)
def test_recorded_calls_take_the_short_road(
    driver: Driver, torch_library: TorchLibrary, function: str
) -> None:
    """Forward and backward; each gradient is what the last launch was given room for."""
    torch, adds = torch_library.torch, function.startswith("add_")
    tensors = [torch_library.empty((ROWS, HIDDEN_SIZE)) for _ in range(1 + adds)]
    inputs = [tensor.requires_grad_() for tensor in tensors]
    inputs += [torch.nn.Parameter(torch_library.empty((HIDDEN_SIZE,), "float32"))]
    inputs += [torch.nn.Parameter(torch_library.empty((HIDDEN_SIZE,)))]
    douts = [torch_library.empty((ROWS, HIDDEN_SIZE)) for _ in range(1 + adds)]
    for short in (False, True, True):
        driver.launches.clear()
        made = getattr(norms, function)(*inputs)
        outputs = made if adds else (made,)
        gradients = torch.autograd.grad(outputs, inputs, douts)
        assert [launch.short for launch in driver.launches] == [short, short]
        forward, backward = map(unpacked, driver.launches)
        assert [forward["y"], forward["residual_out"]][: 1 + adds] == [
            output.data_ptr() for output in outputs
        ]
        assert forward["rstd"] == backward["rstd"] != 0
        assert forward["mean"] == backward["mean"]
        assert backward["x"] == (outputs[-1] if adds else inputs[0]).data_ptr()
        assert backward["dout"] == douts[0].data_ptr()
        assert [backward[name] for name in ("dx", "dweight", "dbias")] == [
            gradient.data_ptr() for gradient in (gradients[0], *gradients[-2:])
        ]
        assert [value.dtype for value in gradients] == [value.dtype for value in inputs]
    made = getattr(norms, function)(*inputs)
    with torch.no_grad():
        inputs[-2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(made if adds else (made,), inputs, douts)


@pytest.mark.parametrize("function", BACKWARD)
def test_both_roads_of_backward_give_the_same_bits(function: str) -> None:
    skip_without("emulator")
    from tests import emulator

    random = np.random.default_rng(1)
    shape, adds, layer = (5, 104), function.startswith("add_"), "layer" in function
    row, results = shape[1:], []
    rows = [[random.standard_normal(shape).astype("float16") for _ in range(3)] for _ in range(2)]
    weight = random.standard_normal(row).astype("float32")
    statistics = [random.random(shape[:1]).astype("float32") for _ in range(1 + layer)]
    with emulated() as roads:
        for forget in (False, True):  # the second time every call takes the general road
            results.append([])
            fixed = [emulator.from_numpy(array) for array in (weight, *statistics)]
            for values in rows:
                dout, dresidual_out, x = map(emulator.from_numpy, values)
                given = {"dx_out": x, "dweight_out": emulator.from_numpy(weight)}
                first = (dout, dresidual_out, x) if adds else (dout, x)
                for outputs in ({}, given):
                    if forget:
                        _fast.forget()
                    call = getattr(norms, f"{function}_backward")
                    for array in call(*first, *fixed, bias=fixed[0], **outputs):
                        if array is not None:
                            results[-1].append(emulator.to_numpy(array).tobytes())
    general, short = roads.count("general"), roads.count("short")
    assert general == 3 * short
    assert short == 3  # one launch with new outputs, two in place
    assert results[0] == results[1]


# What torch says of tensors -----------------------------------------------------------------------

UNLIKE: dict[str, Callable[[Any, Any], Any]] = {
    "another dtype": lambda torch, tensor: tensor.view(torch.bfloat16),
    "another shape": lambda torch, tensor: tensor.view(6, 4),
    "fewer rows": lambda torch, tensor: tensor[:3],
    "one axis more": lambda torch, tensor: tensor[None],
    "other strides": lambda torch, tensor: tensor.view(6, 4).T,
    "requires grad": lambda torch, tensor: tensor.detach().requires_grad_(),
    "a parameter": lambda torch, tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "a subclass": lambda torch, tensor: tensor.as_subclass(type("Tagged", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("change", UNLIKE)
@pytest.mark.parametrize("guards", [True, False])
def test_what_is_alike(guards: bool, change: str) -> None:
    """All that a kept launch stands for but addresses, with or without torch's own guards."""
    torch = pytest.importorskip("torch")
    if guards:
        alike = _fast_torch._alike(torch)
    else:
        c = SimpleNamespace(_dynamo=SimpleNamespace(guards=None), _is_tracing=torch._C._is_tracing)
        without = SimpleNamespace(_C=c)
        alike = _fast_torch._alike(without)
    tensors = [torch.zeros(4, 6, dtype=torch.float16) for _ in range(3)]
    check = alike(*tensors)
    assert check(*tensors)
    assert check(*map(torch.ones_like, tensors))
    for place, tensor in enumerate(tensors):
        others = [*tensors[:place], UNLIKE[change](torch, tensor), *tensors[place + 1 :]]
        assert not check(*others)
    assert ("TensorGuards" in str(check)) == guards
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.trace(lambda x: (seen.append(check(*tensors)), x + 1)[1], tensors[0])
    assert seen[0] is False
