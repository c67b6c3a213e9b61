# SPDX-License-Identifier: Apache-2.0
"""What NVRTC makes of the kernels, on a machine without a GPU: registers, spills, SASS.

The modules come from `cupy.RawModule` as the library's do, with its options, headers and name
mapping. `python -m tests.compiled [ARCH ...]` writes benchmarks/results/resources.json.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cupy_rmsnorm import _kernel, _source
from cupy_rmsnorm._kernel import Specialisation
from tests import kernels

ARCHS = (75, 80, 86, 89, 90, 100, 120)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "resources.json"
UNIT = 50  # specialisations a module


@dataclass(frozen=True)
class Resources:
    """What one instantiation takes on one architecture."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    loads: dict[int, int]  # width in bytes -> instructions that load global memory
    stores: dict[int, int]
    asynchronous: dict[int, int]  # the same of copies into shared memory; 0: bulk copies


@contextmanager
def _no_device(arch: int) -> Iterator[None]:
    """Let CuPy compile for `arch` without asking a GPU. It names private parts of CuPy 14."""
    from cupy._core import raw
    from cupy.cuda import compiler, function

    class Module(function.Module):
        """Keeps the bytes that a driver would load."""

        def load(self, cubin: bytes) -> None:
            self.cubin = cubin

    with ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        replace(compiler, "_get_arch", lambda: str(arch))
        options = compiler._get_arch_for_options_for_nvrtc.__wrapped__
        replace(compiler, "_get_arch_for_options_for_nvrtc", options)
        replace(raw, "_get_raw_module", raw._get_raw_module.__wrapped__)
        replace(compiler, "function", SimpleNamespace(Module=Module))
        # A module from CuPy's disk cache has no log.
        stack.enter_context(mock.patch.dict("os.environ", CUPY_CACHE_IN_MEMORY="1"))
        yield


def compile_kernels(
    specialisations: Iterable[Specialisation], arch: int
) -> dict[Specialisation, Resources]:
    """Compile all of them for `arch` and say what each takes."""
    families: dict[str, list[Specialisation]] = {}
    for item in dict.fromkeys(specialisations):
        families.setdefault(item.kernel, []).append(item)
    modules = [
        family[start : start + UNIT]
        for family in families.values()
        for start in range(0, len(family), UNIT)
    ]
    found: dict[Specialisation, Resources] = {}
    with _no_device(arch), ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC frees the GIL
        for resources in pool.map(_compile_module, modules):
            found |= resources
    return found


def compile_ptx(specialisation: Specialisation, arch: int) -> tuple[str, str]:
    """The PTX for `arch`, which drivers compile for newer GPUs, and the kernel's name in it."""
    from cupy.cuda import compiler

    with _no_device(arch), mock.patch.object(compiler, "_use_ptx", True):
        module = _module([specialisation], None)
    return module.cubin.decode(), module.mapping[specialisation.name_expression]


def _module(specialisations: list[Specialisation], log: io.StringIO | None) -> Any:
    import cupy

    options = _kernel.OPTIONS if log is None else (*_kernel.OPTIONS, "--ptxas-options=-v")
    module = cupy.RawModule(
        code=_source.load(specialisations[0].kernel),
        options=options,
        name_expressions=tuple(item.name_expression for item in specialisations),
    )
    module.compile(log_stream=log)
    return module.module


def _compile_module(specialisations: list[Specialisation]) -> dict[Specialisation, Resources]:
    log = io.StringIO()
    compiled = _module(specialisations, log)
    usage = _usage(log.getvalue())
    listing = _disassemble(compiled.cubin)
    found = {}
    for item in specialisations:
        name = compiled.mapping[item.name_expression]
        registers, stack, spills, shared = usage[name]
        found[item] = Resources(registers, stack, spills, shared, *_memory(listing[name]))
    return found


_PROPERTIES = re.compile(
    r"Function properties for (\S+)\s+ptxas\s+\.\s+(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"ptxas info\s+: Used (\d+) registers(.*)"
)


def _usage(log: str) -> dict[str, tuple[int, int, int, int]]:
    """Mangled name -> registers, stack, spills, static shared memory."""
    usage = {}
    for name, stack, stores, loads, registers, rest in _PROPERTIES.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        spills = int(stores) + int(loads)
        usage[name] = (int(registers), int(stack), spills, int(shared[1]) if shared else 0)
    return usage


def disassembler() -> str | None:
    """The program of nvidia-cuda-nvdisasm; None where it is not installed."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    candidates = [folder / "cu13/bin/nvdisasm", folder / "cuda_nvdisasm/bin/nvdisasm"]
    return next((str(path) for path in candidates if path.exists()), shutil.which("nvdisasm"))


def _disassemble(cubin: bytes) -> dict[str, str]:
    """Mangled name -> SASS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin + b"\0")  # CuPy drops the last byte
        file.flush()
        command = [str(disassembler()), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


_INSTRUCTION = re.compile(r"\b(LDG|STG|LDGSTS|UBLKCP|LD|ST)\b((?:\.\w+)*)")


def _memory(sass: str) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    copies: Counter[int] = Counter()
    for name, suffixes in _INSTRUCTION.findall(sass):
        parts = suffixes.split(".")
        bits = next((int(part) for part in parts if part in ("64", "128", "256")), 32)
        bits = 8 if {"U8", "S8"} & set(parts) else 16 if {"U16", "S16"} & set(parts) else bits
        if name == "UBLKCP":
            copies[0] += 1
        else:
            kind = {"LDG": loads, "LD": loads, "STG": stores, "ST": stores, "LDGSTS": copies}[name]
            kind[bits // 8] += 1
    return dict(loads), dict(stores), dict(copies)


@dataclass(frozen=True)
class Use:
    """One launch of a row of the table."""

    row: str
    specialisation: Specialisation
    block: int
    shared_bytes: int
    forced: bool  # by the table, on a GPU that has room for it


@functools.cache
def uses(arch: int, every: int = 1, first: int = 0) -> tuple[Use, ...]:
    """What the table's rows launch on `arch`; of each `every`-th row."""
    found = []
    for row in kernels.FORWARD[first::every]:
        launch = row.launch(arch)
        found.append(
            Use(
                row.name,
                row.specialisation(arch),
                launch.block,
                launch.shared_bytes,
                row.forced is not None,
            )
        )
    for backward in kernels.BACKWARD[first::every]:
        found += [
            Use(
                backward.name,
                launched.specialisation,
                launched.block,
                launched.shared_bytes,
                backward.forced is not None,
            )
            for launched in backward.launches(arch)
        ]
    return tuple(found)


def table(archs: Iterable[int] = ARCHS) -> dict[str, dict[str, list[int]]]:
    """Kernel -> architecture -> registers, bytes of spills and of static shared memory."""
    entries: dict[str, dict[str, list[int]]] = {}
    for arch in archs:
        found = compile_kernels((use.specialisation for use in uses(arch)), arch)
        for item, resources in found.items():
            numbers = [resources.registers, resources.spill_bytes, resources.shared_bytes]
            entries.setdefault(item.name_expression, {})[f"sm_{arch}"] = numbers
    return entries


def recorded() -> dict[str, dict[str, list[int]]]:
    """What `table` gave when RESULTS was written."""
    rows = json.loads(RESULTS.read_text())["rows"]
    return {row.pop("kernel"): row for row in rows}


def versions() -> dict[str, str]:
    """What decides the numbers."""
    import cupy

    major, minor = cupy.cuda.nvrtc.getVersion()
    return {"nvrtc": f"{major}.{minor}", "cupy": cupy.__version__}


def main() -> None:
    """Write the table, or renew the architectures that are named."""
    archs = tuple(map(int, sys.argv[1:])) or ARCHS
    entries = table(archs)
    if archs != ARCHS:
        for kernel, before in recorded().items():
            kept = {arch: n for arch, n in before.items() if int(arch[3:]) not in archs}
            entries[kernel] = {**kept, **entries.get(kernel, {})}
    rows = [
        json.dumps({"kernel": kernel, **{arch: numbers[arch] for arch in sorted(numbers)}})
        for kernel, numbers in sorted(entries.items())
        if numbers
    ]
    columns = ["registers", "spill_bytes", "shared_bytes"]
    meta = json.dumps({**versions(), "columns": columns})
    RESULTS.write_text(f'{{"meta": {meta},\n"rows": [\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    main()
