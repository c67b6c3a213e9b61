# SPDX-License-Identifier: Apache-2.0
"""Launches that overlap: what the driver is told of them, and that every kernel waits first."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_rmsnorm import _build, _enqueue, _kernel, _source
from cupy_rmsnorm._plan import choose_launch, choose_plan

ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS


class Driver:
    """Stands in for the driver's library and keeps what it was told."""

    def __init__(self) -> None:
        self.status = 0
        self.told: list[dict[str, Any]] = []
        pointer = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *4 * [pointer])(self._launch)
        self.cuGetErrorName = self._name

    def _launch(self, configuration: int, function: int, parameters: int, extra: int) -> int:
        told = _enqueue._Configuration.from_address(configuration)
        attributes = [
            (attribute.id, attribute.value) for attribute in told.attributes[: told.attribute_count]
        ]
        size = ctypes.c_size_t.from_address((ctypes.c_void_p * 5).from_address(extra)[3] or 0)
        at = (ctypes.c_void_p * 5).from_address(extra)[1] or 0
        self.told.append(
            {
                "function": function,
                "grid": tuple(told.grid),
                "block": tuple(told.block),
                "shared_bytes": told.shared_bytes,
                "stream": told.stream,
                "attributes": attributes,
                "parameters": parameters,
                "packed": ctypes.string_at(at, size.value),
            }
        )
        return self.status

    def _name(self, status: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(_build, "driver", lambda: made)
    return made


FUNCTION = _enqueue.Function(None, 2**47 + 16, overlaps=True)
TOLD = {
    "function": 2**47 + 16,
    "grid": (2**31 - 1, 1, 1),
    "block": (128, 1, 1),
    "shared_bytes": 227 * 1024,
    "stream": 2**47 + 1,
    "attributes": [(6, 1)],  # programmatic stream serialization: allowed
    "parameters": None,
    "packed": b"packed arguments",
}


def test_a_launch_that_overlaps_says_so_to_the_driver(driver: Driver) -> None:
    geometry = (2**31 - 1, 128, 227 * 1024, 2**47 + 1)
    launched = _kernel.launch(FUNCTION, *geometry, b"packed arguments")
    assert launched == (FUNCTION, *geometry[:3], b"packed arguments")
    assert driver.told == [TOLD]


def test_structures_are_as_large_as_the_drivers() -> None:
    assert ctypes.sizeof(_enqueue._Attribute) == 72  # CUlaunchAttribute
    assert ctypes.sizeof(_enqueue._Configuration) == 56  # CUlaunchConfig


def test_a_prepared_launch_is_repeated_and_says_what_fails(driver: Driver) -> None:
    size, packed = ctypes.c_size_t(16), ctypes.create_string_buffer(b"packed arguments", 16)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    again = _enqueue.prepare(
        FUNCTION, 2**31 - 1, 128, 227 * 1024, 2**47 + 1, 0, ctypes.addressof(extra)
    )
    assert not again()
    driver.status = ILLEGAL_ADDRESS
    assert again()
    assert driver.told == [TOLD, TOLD]
    with pytest.raises(
        RuntimeError, match=r"^a launch failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)$"
    ):
        _kernel.launch(FUNCTION, 1, 32, 0, 5, b"")


def test_other_launches_are_left_to_the_plain_function(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(_enqueue, "launcher", lambda: lambda *arguments: told.append(arguments))
    # One that does not wait, and one that does, on the default stream.
    _enqueue.prepare(SimpleNamespace(ptr=5, overlaps=False), 7, 64, 1024, 3, 0, 11)()
    _enqueue.prepare(FUNCTION, 7, 64, 1024, 0, 11, 0)()
    assert told == [
        (5, 7, 1, 1, 64, 1, 1, 1024, 3, 0, 11),
        (FUNCTION.ptr, 7, 1, 1, 64, 1, 1, 1024, 0, 11, 0),
    ]
    assert not driver.told


@pytest.mark.parametrize(
    ("arch", "version", "overlaps"),
    [(90, 12030, True), (120, 13000, True), (89, 13000, False), (90, 12020, False)],
)
def test_architecture_and_driver_decide(
    monkeypatch: pytest.MonkeyPatch, arch: int, version: int, overlaps: bool
) -> None:
    monkeypatch.setattr(_enqueue, "_driver_version", lambda: version)
    assert _enqueue.may_overlap(arch) is overlaps


@pytest.mark.parametrize(
    "path", sorted(_source.directory().glob("*.cu")), ids=lambda path: path.stem
)
def test_a_kernel_that_may_overlap_waits_first(path: Any) -> None:
    text = path.read_text()
    bodies = re.findall(r"__global__[^;{]*\barguments\) \{\n(.*?;\n)(.*?;\n)", text)
    if path.stem.startswith("study_"):
        assert "wait_for_earlier_kernels" not in text  # they are launched one after the other
        return
    assert len(bodies) == text.count("__global__") == 1
    first, second = bodies[0]
    assert first.strip() == "wait_for_earlier_kernels();"
    assert second.strip().endswith("let_next_kernel_begin();")


@pytest.mark.parametrize(
    ("rows", "hidden_size", "early"),
    [
        (1, 4096, True),
        (2048, 2560, True),  # 16 blocks of 128 threads fill an SM
        (4096, 1024, False),  # 8 of 128 fill half
        (256, 5376, True),  # three of 256 still fit
    ],
)
def test_the_next_kernel_waits_where_two_just_fit(rows: int, hidden_size: int, early: bool) -> None:
    plan = choose_plan("rms", hidden_size, "float16", None, 90)
    assert choose_launch(plan, rows, 2, 132).next_early is early
