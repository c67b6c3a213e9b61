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


STREAM = 2**47 + 1


class Driver:
    """Stands in for the driver's library and keeps what it was told."""

    def __init__(self) -> None:
        self.status = 0
        self.told: list[dict[str, Any]] = []
        self.told_plainly: list[tuple[int, ...]] = []
        # By stream: the graph that it captures, and the nodes behind which the next one comes.
        self.captures: dict[int, tuple[int, list[int]]] = {}
        self._node = 2**47
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(integer, *4 * [pointer])(self._launch)
        self.cuStreamGetCaptureInfo_v3 = ctypes.CFUNCTYPE(integer, *7 * [pointer])(self._capture)
        self.cuGetErrorName = self._name

    def add_node(self, stream: int) -> int:
        """A node of a graph, if the stream captures one."""
        if stream in self.captures:
            self._node += 8
            self.captures[stream] = self.captures[stream][0], [self._node]
        return self.status

    def launch_plainly(self, *arguments: int) -> int:
        self.told_plainly.append(arguments)
        return self.add_node(arguments[8])

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
        return self.add_node(told.stream or 0)

    def _capture(
        self, stream: int, status: int, capture: int, _: int, nodes: int, __: int, count: int
    ) -> int:
        number, ends = self.captures[stream]
        self._kept = (ctypes.c_void_p * len(ends))(*ends)
        ctypes.c_uint64.from_address(capture).value = number
        ctypes.c_void_p.from_address(nodes).value = ctypes.addressof(self._kept)
        ctypes.c_size_t.from_address(count).value = len(ends)
        return 0

    def _name(self, status: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(_build, "driver", lambda: made)
    monkeypatch.setattr(_enqueue, "launcher", lambda: made.launch_plainly)
    monkeypatch.setattr(_enqueue, "capture_test", lambda: made.captures.__contains__)
    return made


FUNCTION = _enqueue.Function(None, 2**47 + 16, overlaps=True)
TOLD = {
    "function": 2**47 + 16,
    "grid": (2**31 - 1, 1, 1),
    "block": (128, 1, 1),
    "shared_bytes": 227 * 1024,
    "stream": STREAM,
    "attributes": [(6, 1)],  # programmatic stream serialization: allowed
    "parameters": None,
    "packed": b"packed arguments",
}


GEOMETRY = (2**31 - 1, 128, 227 * 1024, STREAM)


def launch(stream: int = STREAM) -> None:
    _kernel.launch(FUNCTION, 1, 32, 0, stream, b"")


def test_a_launch_that_overlaps_says_so_to_the_driver(driver: Driver) -> None:
    driver.captures[STREAM] = 1, []
    launch()
    assert not driver.told
    launched = _kernel.launch(FUNCTION, *GEOMETRY, b"packed arguments")
    assert launched == (FUNCTION, *GEOMETRY[:3], b"packed arguments")
    assert driver.told == [TOLD]


def test_structures_are_as_large_as_the_drivers() -> None:
    assert ctypes.sizeof(_enqueue._Attribute) == 72  # CUlaunchAttribute
    assert ctypes.sizeof(_enqueue._Configuration) == 56  # CUlaunchConfig


def test_a_prepared_launch_is_repeated_and_says_what_fails(driver: Driver) -> None:
    size, packed = ctypes.c_size_t(16), ctypes.create_string_buffer(b"packed arguments", 16)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    again = _enqueue.prepare(FUNCTION, *GEOMETRY, 0, ctypes.addressof(extra))
    driver.captures[STREAM] = 1, []
    launch()
    assert not again()
    driver.status = ILLEGAL_ADDRESS
    assert again()
    assert driver.told == [TOLD, TOLD]
    with pytest.raises(
        RuntimeError, match=r"^a launch failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)$"
    ):
        launch()


def test_launches_overlap_behind_this_librarys_own_in_a_capture_alone(driver: Driver) -> None:
    def overlapped(stream: int = STREAM) -> bool:
        before = len(driver.told), len(driver.told_plainly)
        launch(stream)
        after = len(driver.told), len(driver.told_plainly)
        assert sum(after) == sum(before) + 1
        return after[0] > before[0]

    assert [overlapped() for _ in range(3)] == [False] * 3  # nothing is captured
    driver.captures[STREAM] = 1, [8]  # behind another stream's work
    assert [overlapped() for _ in range(3)] == [False, True, True]
    driver.add_node(STREAM)  # a kernel of somebody else
    assert [overlapped() for _ in range(2)] == [False, True]
    own = driver.captures[STREAM][1]
    driver.captures[STREAM] = 1, [*own, 16]  # two branches meet
    assert [overlapped() for _ in range(2)] == [False, True]
    driver.captures[7] = driver.captures[STREAM]  # another stream branches off
    assert overlapped(7)
    driver.captures[STREAM] = 2, driver.captures[STREAM][1]  # a later graph, at the same address
    assert not overlapped()
    driver.captures.clear()
    assert not overlapped()


def test_other_launches_are_left_to_the_plain_function(driver: Driver) -> None:
    for stream in (0, 3):
        driver.captures[stream] = 1, []
    # One that does not wait, and one that does, on the default stream.
    for _ in range(2):
        _enqueue.prepare(SimpleNamespace(ptr=5, overlaps=False), 7, 64, 1024, 3, 0, 11)()
        _enqueue.prepare(FUNCTION, 7, 64, 1024, 0, 11, 0)()
    plainly = [
        (5, 7, 1, 1, 64, 1, 1, 1024, 3, 0, 11),
        (FUNCTION.ptr, 7, 1, 1, 64, 1, 1, 1024, 0, 11, 0),
    ]
    assert driver.told_plainly == 2 * plainly
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
    if path.stem != "norm_backward_sum":
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
