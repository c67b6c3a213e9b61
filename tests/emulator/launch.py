# SPDX-License-Identifier: Apache-2.0
"""Launch a compiled kernel: the checks that a driver and a signature allow, then the fibers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.emulator import build

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)

_SCHEDULES = {"ahead": 0, "reverse": 1}


class KernelFault(RuntimeError):
    """What a kernel did wrong: which block and thread, at which line."""


class LaunchError(RuntimeError):
    """A launch that the driver would refuse, or arguments that do not fit the signature."""


@dataclass(frozen=True)
class Function:
    """One loaded instantiation. Stands for what `cupy.RawModule.get_function` gives."""

    library: build.Library
    expression: str
    kernel: build.Kernel = field(repr=False)
    attributes: dict[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> list[tuple[str, str, int, int]]:
        """(name, kind, offset, size) of every parameter."""
        return [
            (item.name.decode(), item.kind.decode(), item.offset, item.size)
            for item in self.kernel.parameters[: self.kernel.parameter_count]
        ]

    @property
    def cluster_size(self) -> int:
        return int(self.kernel.cluster_size)


# What a packing table calls a kind, and what C++ says of a parameter of that kind.
_KINDS = {
    "pointer": {("p", 8)},
    "int64": {("i", 8)},
    "int32": {("i", 4)},
    "uint32": {("i", 4)},
    "float32": {("f", 4)},
    "float64": {("f", 8)},
    "accumulation": {("f", 4), ("f", 8)},
}


def check_parameters(function: Function, table: Iterable[tuple[str, str]]) -> None:
    """Hold a packing table against the C++ signature: names, kinds, sizes and offsets."""
    table = list(table)
    parameters = function.parameters
    if len(table) != len(parameters):
        raise LaunchError(
            f"{function.expression} has {len(parameters)} parameters, the table {len(table)}"
        )
    end = 0
    for (name, kind), (cpp_name, cpp_kind, offset, size) in zip(table, parameters, strict=True):
        if (cpp_kind, size) not in _KINDS[kind]:
            raise LaunchError(
                f"{function.expression}: {name} is packed as {kind}, "
                f"the signature has kind {cpp_kind!r} of {size} bytes"
            )
        expected = (end + size - 1) // size * size
        if offset != expected or (cpp_name and cpp_name != name):
            raise LaunchError(
                f"{function.expression}: {name} is packed at byte {expected}, "
                f"the signature has {cpp_name or 'a parameter'} at byte {offset}"
            )
        end = offset + size
    alignment = max((size for *_, size in parameters), default=1)
    if -(-end // alignment) * alignment != -(-function.kernel.packed_size // alignment) * alignment:
        raise LaunchError(
            f"{function.expression}: the table describes {end} bytes, "
            f"the signature has {function.kernel.packed_size}"
        )


def _dimensions(value: int | tuple[int, ...]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def launch(
    function: Function,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    shared_bytes: int,
    packed: bytes,
    *,
    schedule: str | int = "ahead",
    checked: bool = False,
    shared_limit: int = build.DYNAMIC_BYTES,
) -> None:
    """Run one launch to its end."""
    grid3, block3 = _dimensions(grid), _dimensions(block)
    threads = block3[0] * block3[1] * block3[2]
    kernel = function.kernel
    name = function.expression
    # A trailing pad of the struct is the compiler's; struct.pack does not write it.
    if not kernel.packed_size - 8 < len(packed) <= kernel.packed_size:
        raise LaunchError(
            f"{name}: {len(packed)} bytes of arguments, the signature has {kernel.packed_size}"
        )
    if min(*grid3, *block3) < 1 or threads > MAX_THREADS:
        raise LaunchError(f"{name}: grid {grid3} with block {block3} is not allowed")
    if any(got > most for got, most in zip(grid3, MAX_GRID, strict=True)):
        raise LaunchError(f"{name}: grid {grid3} is larger than {MAX_GRID}")
    if kernel.max_threads and threads > kernel.max_threads:
        raise LaunchError(
            f"{name}: a block of {threads} threads, __launch_bounds__ says {kernel.max_threads}"
        )
    if grid3[0] % kernel.cluster_size:
        raise LaunchError(
            f"{name}: a grid of {grid3[0]} blocks in clusters of {kernel.cluster_size}"
        )
    allowed = min(shared_limit, function.attributes.get("max_dynamic_shared_size_bytes", 48 * 1024))
    if shared_bytes > allowed:
        raise LaunchError(
            f"{name}: {shared_bytes} bytes of dynamic shared memory, {allowed} allowed"
        )
    seed = schedule if isinstance(schedule, int) else 0
    code = 2 if isinstance(schedule, int) else _SCHEDULES[schedule]
    handle = function.library.handle
    report = ctypes.create_string_buffer(4096)
    arguments = ctypes.create_string_buffer(bytes(packed), kernel.packed_size)
    variables = function.library.shared_variables
    count = len(variables)
    build.runtime().emulator_set_variables(
        count,
        (ctypes.c_ulonglong * count)(*(offset for offset, _, _ in variables)),
        (ctypes.c_ulonglong * count)(*(size for _, size, _ in variables)),
        (ctypes.c_char_p * count)(*(name.encode() for _, _, name in variables)),
    )
    failed = build.runtime().emulator_launch(
        ctypes.byref(kernel),
        ctypes.byref(ctypes.c_char.in_dll(handle, "emulator_dynamic")),
        ctypes.c_int.in_dll(handle, "emulator_dynamic_count"),
        handle.emulator_anchor,
        (ctypes.c_uint * 3)(*grid3),
        (ctypes.c_uint * 3)(*block3),
        ctypes.c_uint(shared_bytes),
        arguments,
        ctypes.c_int(code),
        ctypes.c_uint(seed),
        ctypes.c_int(checked),
        report,
        ctypes.c_size_t(len(report)),
    )
    if failed:
        text = re.sub(
            r"\{(.+?)\+([0-9a-f]+)\}",
            lambda match: build.source_line(match[1], match[2]),
            report.value.decode(),
        )
        raise KernelFault(f"{name}: {text}")
