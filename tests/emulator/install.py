# SPDX-License-Identifier: Apache-2.0
"""Puts the emulator where the driver was, for the time of a `with` block."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests import kernels
from tests.emulator import build, memory
from tests.emulator import launch as launching
from tests.recorder import resident_blocks

UNIT = 25  # specialisations a translation unit; more of them only slow each other down

_lock = threading.Lock()


def _fields(kernel: str, code: str) -> tuple[str, ...]:
    """The members to look up where the packing table describes one struct."""
    from cupy_rmsnorm import _kernel

    table = _kernel.PARAMETERS[kernel]
    one_struct = build.declaration(code, kernel).parameter_count == 1 < len(table)
    return tuple(name for name, _ in table) if one_struct else ()


def _library(specialisations: Iterable[Any], checked: bool) -> build.Library:
    from cupy_rmsnorm import _source

    chosen = list(specialisations)
    kernel = chosen[0].kernel
    code = _source.load(kernel)
    expressions = tuple(item.name_expression for item in chosen)
    return build.build(code, expressions, _fields(kernel, code), checked)


_prefetched: dict[tuple[str, bool], build.Library] = {}


def prefetch(specialisations: Iterable[Any], *, checked: bool = True) -> None:
    """Compile many specialisations in few translation units."""
    units = kernels.units(specialisations, UNIT)
    build.runtime()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for unit, library in zip(
            units, pool.map(lambda unit: _library(unit, checked), units), strict=True
        ):
            for item in unit:
                _prefetched[item.name_expression, checked] = library


def function(specialisation: Any, *, checked: bool = False) -> launching.Function:
    """The emulator's function for a specialisation, its signature held against the table."""
    from cupy_rmsnorm import _kernel

    expression = specialisation.name_expression
    library = _prefetched.get((expression, checked)) or _library([specialisation], checked)
    found = launching.Function(library, expression, library.kernels[expression])
    launching.check_parameters(found, _kernel.PARAMETERS[specialisation.kernel])
    return found


@contextlib.contextmanager
def installed(
    *,
    arch: int = 90,
    sm_count: int = 4,
    schedule: str | int = "ahead",
    checked: bool = True,
    launches: list[Any] | None = None,
) -> Iterator[None]:
    """Run the library's GPU backend here.

    Parameters
    ----------
    arch, sm_count
        The GPU that plans see.
    schedule
        ``"ahead"``: a warp runs as far as it can before another starts; ``"reverse"``: the same,
        last warp, lane and block first; an int: drawn by this seed.
    checked
        Hold every access to memory against the arrays that exist, and look for races. Without it
        long rows run five times faster.
    launches
        Every launch is appended to this list: (expression, grid, block, shared_bytes, stream).
    """
    import cupy

    from cupy_rmsnorm import _kernel, _libraries

    build.runtime()

    def kernel_build(specialisation: Any, shared_bytes: int) -> launching.Function:
        found = function(specialisation, checked=checked)
        if shared_bytes > 48 * 1024 - 1024:
            found.attributes["max_dynamic_shared_size_bytes"] = shared_bytes
        return found

    def kernel_launch(
        found: Any, grid: Any, block: Any, shared_bytes: int, stream: int, packed_args: Any
    ) -> None:
        with _lock:
            if launches is not None:
                launches.append((found.expression, grid, block, shared_bytes, stream))
            launching.launch(
                found,
                grid,
                block,
                shared_bytes,
                bytes(packed_args),
                schedule=schedule,
                checked=checked,
            )
            try:
                memory.check_guards()
            except memory.OutOfBounds as error:
                raise launching.KernelFault(f"{found.expression}: {error}") from None

    def contiguous(space: Any, array: Any) -> Any:
        source = space._ndarray(array)
        return _libraries._cupy_array(array.name, memory.from_numpy(memory.host_view(source)))

    def assign(space: Any, target: Any, source: Any) -> None:
        view = memory.host_view(space._ndarray(target))
        view[...] = memory.host_view(space._ndarray(source))

    def nothing(*arguments: Any, **options: Any) -> None:
        """What a GPU would order and the emulator, where all is done at once, need not."""

    properties = _kernel.DeviceProperties(arch, sm_count)
    runtime = cupy.cuda.runtime
    allocator = cupy.cuda.get_allocator()
    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        replace(_kernel, "build", kernel_build)
        replace(_kernel, "launch", kernel_launch)
        replace(_kernel, "device_properties", lambda device: properties)
        replace(_kernel, "resident_blocks", resident_blocks(sm_count))
        replace(_kernel, "_functions", {})
        replace(_libraries._CuPySpace, "contiguous", contiguous)
        replace(_libraries._CuPySpace, "assign", assign)
        replace(cupy.cuda, "get_current_stream", lambda device=None: SimpleNamespace(ptr=0))
        replace(runtime, "getDevice", lambda: 0)
        replace(runtime, "setDevice", nothing)
        replace(runtime, "deviceSynchronize", nothing)
        stack.callback(cupy.cuda.set_allocator, allocator)
        cupy.cuda.set_allocator(memory.allocate)
        yield
