# SPDX-License-Identifier: Apache-2.0
"""On GPUs: bits on both sides of each class of launches, plain calls on another GPU than the
current, gradients above 2**31 elements.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm
from cupy_rmsnorm import _kernel
from cupy_rmsnorm._kernel import Specialisation
from cupy_rmsnorm._plan import Launch, choose_launch, choose_plan, row_itemsize
from cupy_rmsnorm._plan_backward import FEW_ROWS_PER_SM
from tests import calls, compare, inputs
from tests.backends import Backend, Cupy, TorchCuda, missing
from tests.calls import Case, Gradient
from tests.test_gpu import need_memory

pytestmark = pytest.mark.gpu

HIDDEN_SIZE = 4096


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Specialisation]:
    """The instantiations that the general road asks for."""
    seen: list[Specialisation] = []
    function = _kernel.function

    def asked(specialisation: Specialisation, *arguments: Any) -> Any:
        seen.append(specialisation)
        return function(specialisation, *arguments)

    monkeypatch.setattr(_kernel, "function", asked)
    return seen


# The same bits on both sides of every threshold ---------------------------------------------------

MOST_ROWS = 4096


def launch_classes(
    norm: Any, dtype: str, residual: str | None, arch: int, sm_count: int
) -> dict[int, Launch]:
    """Numbers of rows on both sides of each threshold, and how they are launched, grids apart."""
    plan = choose_plan(norm, HIDDEN_SIZE, dtype, residual, arch)
    itemsize = row_itemsize(dtype, residual)
    launches = [
        dataclasses.replace(choose_launch(plan, rows, itemsize, sm_count), grid=0)
        for rows in range(1, MOST_ROWS + 1)
    ]
    last = [rows for rows in range(1, MOST_ROWS) if launches[rows - 1] != launches[rows]]
    counts = {1, MOST_ROWS, *last, *(rows + 1 for rows in last)}
    return {rows: launches[rows - 1] for rows in sorted(counts)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", ["rms_norm", "layer_norm", "add_rms_norm"])
def test_a_row_s_bits_in_every_class_of_launches(
    cupy: ModuleType, built: list[Specialisation], function: str, dtype: str
) -> None:
    backend, properties = Cupy(), _kernel.device_properties(0)
    norm, adds = "layer" if "layer" in function else "rms", function.startswith("add_")
    residual = dtype if adds else None
    classes = launch_classes(norm, dtype, residual, properties.arch, properties.sm_count)
    shape = (MOST_ROWS, HIDDEN_SIZE)
    # Rows that repeat with a prime period: any two within a block differ.
    period = np.arange(MOST_ROWS) % 251
    x, added = (inputs.array((251, HIDDEN_SIZE), dtype, seed=seed)[period] for seed in (0, 1))
    case = Case(
        x=x,
        norm=norm,
        weight=inputs.weight(HIDDEN_SIZE, dtype),
        residual=added if adds else None,
    )
    assert x.shape == shape
    expected = calls.forward(backend, case, statistics=True)
    for output, values in expected.items():
        compare.equal(values, values[:251][period], f"{output}, rows that are alike")
    calls.check_forward(
        case.but(x=x[:9], residual=added[:9] if adds else None),
        {output: values[:9] for output, values in expected.items()},
    )
    for rows in classes:
        part = case.but(x=x[:rows], residual=added[:rows] if adds else None)
        got = calls.forward(backend, part, statistics=True)
        for output, values in got.items():
            compare.equal(values, expected[output][:rows], f"{output} of {rows} rows")
    backend.verify()
    kinds = {(launch.evict_first, launch.spare_registers) for launch in classes.values()}
    assert len(kinds) > 1
    assert {launch.few_rows for launch in classes.values()} == {True, False}
    assert len(set(built)) >= len(kinds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("hidden_size", [768, HIDDEN_SIZE])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_row_s_gradient_on_both_sides_of_few_rows(
    cupy: ModuleType, built: list[Specialisation], norm: str, hidden_size: int, dtype: str
) -> None:
    backend = Cupy()
    most_few = FEW_ROWS_PER_SM * _kernel.device_properties(0).sm_count
    dx: dict[int, np.ndarray] = {}
    for rows in (1, most_few - 1, most_few, most_few + 1, 4 * most_few):
        case, given = gradient_case(norm, 4 * most_few, hidden_size, dtype, rows)
        got = calls.backward(backend, case, given)
        assert got["dx"] is not None
        dx[rows] = got["dx"]
        if rows in (most_few, most_few + 1):
            calls.check_backward(case, given, got)
        kernel = "norm_backward_few" if rows <= most_few else "norm_backward"
        assert built[-1 if rows <= most_few else -2].kernel == kernel
    for rows, values in dx.items():
        compare.equal(values, dx[4 * most_few][:rows], f"dx of {rows} rows")
    backend.verify()


def gradient_case(
    norm: str, all_rows: int, hidden_size: int, dtype: str, rows: int
) -> tuple[Case, Gradient]:
    """The first `rows` of `all_rows` rows, with their statistics."""
    x, dout = (inputs.array((all_rows, hidden_size), dtype, seed=seed)[:rows] for seed in (0, 1))
    case = Case(
        x=x,
        norm=norm,
        weight=inputs.weight(hidden_size, dtype),
        bias=inputs.bias(hidden_size, dtype),
    )
    wide = x.astype(np.float64)
    mean = wide.mean(axis=1) if norm == "layer" else np.zeros(rows)
    rstd = 1 / np.sqrt(np.square(wide - mean[:, None]).mean(axis=1) + case.eps)
    given = Gradient(
        dout=dout,
        mean=mean.astype(np.float32) if norm == "layer" else None,
        rstd=rstd.astype(np.float32),
    )
    return case, given


# Another GPU than the current ---------------------------------------------------------------------


class SecondCupy(Cupy):
    """CuPy arrays on the second GPU, whichever is current."""

    @staticmethod
    def current() -> contextlib.AbstractContextManager[object]:
        import cupy

        current: contextlib.AbstractContextManager[object] = cupy.cuda.Device(1)
        return current

    def _upload(self, data: np.ndarray) -> Any:
        with self.current():
            return super()._upload(data)

    def numpy(self, native: Any) -> np.ndarray:
        assert native.data.device_id == 1, "an array of the first GPU"
        return super().numpy(native)


class SecondTorch(TorchCuda):
    """torch tensors on the second GPU, whichever is current."""

    device = "cuda"

    def _upload(self, data: np.ndarray) -> Any:
        import torch

        with torch.cuda.device(1):
            return super()._upload(data)

    def numpy(self, native: Any) -> np.ndarray:
        assert native.device.index == 1, "a tensor of the first GPU"
        return super().numpy(native)


def plain_calls(hidden_size: int) -> Iterator[tuple[Case, Gradient | None]]:
    """Forward and backward calls, every gradient with its case."""
    few = 5
    many = 300 if hidden_size <= HIDDEN_SIZE else 20
    for norm in ("rms", "layer"):
        case, given = gradient_case(norm, many, hidden_size, "float16", few)
        yield case, None
        yield case.but(residual=given.dout), None
        yield case, given
        added = dataclasses.replace(given, added=True, dresidual_out=given.dout)
        yield case, added
        # Sums of parts in a workspace, statistics that are recomputed.
        case, given = gradient_case(norm, many, hidden_size, "float16", many)
        yield case, dataclasses.replace(given, mean=None, rstd=None)


def check_plain_calls(backend: Backend, hidden_size: int, repeats: int) -> Iterator[None]:
    """Check each call's results; yields after each."""
    for case, given in plain_calls(hidden_size):
        for _ in range(repeats):
            if given is None:
                calls.check_forward(case, calls.forward(backend, case, statistics=True))
                yield
                calls.check_forward(case, calls.forward(backend, case))
            else:
                calls.check_backward(case, given, calls.backward(backend, case, given))
            yield
    backend.verify()


@pytest.mark.parametrize("library", ["cupy", "torch-cuda"])
@pytest.mark.parametrize("hidden_size", [96, HIDDEN_SIZE, 40_000])
def test_plain_calls_on_another_gpu_than_the_current(
    cupy: ModuleType, library: str, hidden_size: int
) -> None:
    """Results lie on the second GPU and are right, and the first one stays current."""
    runtime, reason = cupy.cuda.runtime, missing(library)
    if reason is not None:
        pytest.skip(reason)
    if runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs, this machine shows one")
    runtime.setDevice(0)
    backend = SecondCupy() if library == "cupy" else SecondTorch()
    for _ in check_plain_calls(backend, hidden_size, repeats=3):
        assert runtime.getDevice() == 0
    assert runtime.getDevice() == 0


# 64-bit offsets -----------------------------------------------------------------------------------

CHUNK = 2**14  # rows
PERIOD = 15  # of rows after which they are the same again; it divides no power of two


def whole_numbers() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, dout and dx of PERIOD rows, and weight: x is 1 or -1, so that xhat is x and sums exact."""
    row, column = np.arange(PERIOD)[:, None], np.arange(HIDDEN_SIZE)
    x = 1 - 2 * ((row + column * column) % 3 == 0)
    dout = ((7 * row + 3 * column) % 5 - 1) * (1 - 3 * (column % 2))
    weight = column % 4 - 1
    gradient = (dout * weight).astype(np.float64)
    dx = gradient - x * (gradient * x).mean(axis=1, keepdims=True)
    halves = [values.astype(np.float16) for values in (x, dout, dx)]
    return halves[0], halves[1], halves[2], weight.astype(np.float32)


def check_gradients_of_whole_numbers(xp: Any, rows: int) -> None:
    """dx and dweight of so many rows against exact ones, a chunk of rows at a time."""
    some_x, some_dout, some_dx, weight = map(xp.asarray, whole_numbers())
    x, dout, dx = (xp.empty((rows, HIDDEN_SIZE), np.float16) for _ in range(3))
    expected = xp.zeros(HIDDEN_SIZE, np.float64)
    parts = [
        (
            slice(start, start + CHUNK),
            xp.asarray(np.arange(start, min(start + CHUNK, rows)) % PERIOD),
        )
        for start in range(0, rows, CHUNK)
    ]
    for part, index in parts:
        x[part], dout[part], dx[part] = some_x[index], some_dout[index], np.nan
        expected += (x[part] * dout[part]).sum(axis=0, dtype=np.float64)
    got, dweight, _ = cupy_rmsnorm.rms_norm_backward(dout, x, weight, eps=0.0, dx_out=dx)
    assert got is dx
    # Every partial sum is a whole number below 2**24, which float32 adds exactly in any order.
    assert rows // 4 < int(abs(expected).min()) <= int(abs(expected).max()) < 2**24
    assert bool((dweight == expected.astype(np.float32)).all()), "dweight"
    for part, index in parts:
        assert bool((dx[part] == some_dx[index]).all()), f"dx of {part}"


@pytest.mark.large
@pytest.mark.parametrize("rows", [524_289, 1_048_577], ids=["2**31", "2**32"])
def test_weight_gradients_of_more_elements_than_32_bits_count(cupy: ModuleType, rows: int) -> None:
    need_memory(cupy, 3 * 2 * rows * HIDDEN_SIZE + 16 * CHUNK * HIDDEN_SIZE)
    try:
        check_gradients_of_whole_numbers(cupy, rows)
    finally:
        cupy.get_default_memory_pool().free_all_blocks()
