# SPDX-License-Identifier: Apache-2.0
"""Lets NumPy arrays go through the CUDA backend, up to the launch, and keeps what it would launch.

No GPU, no compiler: everything that is decided before a kernel runs can be looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cupy_rmsnorm import _cpu, _cuda, _kernel
from cupy_rmsnorm._kernel import DeviceProperties, Specialisation
from cupy_rmsnorm._plan import THREADS_PER_SM


@dataclass(frozen=True)
class Launched:
    """One launch as the driver would have been given it."""

    specialisation: Specialisation
    grid: int
    block: int
    shared_bytes: int
    stream: int
    packed: bytes


def resident_blocks(sm_count: int) -> Callable[[Any, int, int], int]:
    """A stand-in for that of `_kernel`: threads alone say how many blocks fit."""
    return lambda function, block, device: THREADS_PER_SM // block * sm_count


@contextlib.contextmanager
def recorded(arch: int, sm_count: int) -> Iterator[list[Launched]]:
    """Within this, calls with NumPy arrays run on such a GPU and compute nothing."""
    launches: list[Launched] = []

    def function(specialisation: Specialisation, device: int, shared_bytes: int = 0) -> Any:
        return specialisation

    def launch(
        function: Any, grid: int, block: int, shared_bytes: int, stream: int, packed: bytes
    ) -> None:
        launches.append(Launched(function, grid, block, shared_bytes, stream, packed))

    def properties(device: int) -> DeviceProperties:
        return DeviceProperties(arch, sm_count)

    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (
            (_cpu, "forward", _cuda.forward),
            (_cpu, "forward_pair", _cuda.forward_pair),
            (_cpu, "backward", _cuda.backward),
            (_cuda, "current_device", lambda index: contextlib.nullcontext()),
            (_kernel, "device_properties", properties),
            (_kernel, "function", function),
            (_kernel, "resident_blocks", resident_blocks(sm_count)),
            (_kernel, "launch", launch),
        ):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield launches
