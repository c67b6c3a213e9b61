# SPDX-License-Identifier: Apache-2.0
"""What NVRTC makes of the kernels, on a machine without a GPU: registers, spills, SASS.

The modules come from `cupy.RawModule` as the library's do, with its options, headers and name
mapping. `python -m tests.compiled` brings benchmarks/results/resources.json up to date (under CUDA
13's NVRTC resources_cuda13.json): it compiles what has changed since that was written.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
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
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COLUMNS = ["registers", "spill_bytes", "shared_bytes"]
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
    specialisations: Iterable[Specialisation], arch: int, listing: bool = True
) -> dict[Specialisation, Resources]:
    """Compile all of them for `arch` and say what each takes; loads and stores by a `listing`."""
    modules = kernels.units(specialisations, UNIT)
    found: dict[Specialisation, Resources] = {}
    with _no_device(arch), ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC frees the GIL
        for resources in pool.map(lambda module: _compile_module(module, listing), modules):
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


def _compile_module(
    specialisations: list[Specialisation], listing: bool
) -> dict[Specialisation, Resources]:
    log = io.StringIO()
    compiled = _module(specialisations, log)
    usage = _usage(log.getvalue())
    sass = _disassemble(compiled.cubin) if listing else {}
    found = {}
    for item in specialisations:
        name = compiled.mapping[item.name_expression]
        registers, stack, spills, shared = usage[name]
        memory = _memory(sass.get(name, ""))
        found[item] = Resources(registers, stack, spills, shared, *memory)
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
    found += [
        Use(
            row.name,
            launched.specialisation,
            launched.block,
            launched.shared_bytes,
            isinstance(row, kernels.BackwardRow) and row.forced is not None,
        )
        for row in (*kernels.BACKWARD[first::every], *kernels.PAIRS[first::every])
        for launched in row.launches(arch)
    ]
    return tuple(found)


def versions() -> dict[str, str]:
    """What decides the numbers."""
    import cupy

    major, minor = cupy.cuda.nvrtc.getVersion()
    return {"nvrtc": f"{major}.{minor}", "cupy": cupy.__version__}


def results() -> Path:
    """The file of this NVRTC."""
    cuda13 = versions()["nvrtc"].startswith("13.")
    return RESULTS / ("resources_cuda13.json" if cuda13 else "resources.json")


Table = dict[str, dict[str, list[int]]]  # kernel -> architecture -> COLUMNS


def recorded() -> tuple[dict[str, Any], Table]:
    """The meta and the table as they were written; nothing where they were not."""
    if not results().exists():
        return {}, {}
    content = json.loads(results().read_text())
    return content["meta"], {row.pop("kernel"): row for row in content["rows"]}


def update(sources: dict[str, str]) -> Table:
    """The whole table; what is recorded with the same NVRTC and sources is not compiled again."""
    meta, before = recorded()
    if meta.get("nvrtc") != versions()["nvrtc"]:
        before = {}
    old = meta.get("sources", {})
    entries: Table = {}
    for arch in ARCHS:
        missing = []
        for item in dict.fromkeys(use.specialisation for use in uses(arch)):
            numbers = before.get(item.name_expression, {}).get(f"sm_{arch}")
            if numbers is None or old.get(item.kernel) != sources[item.kernel]:
                missing.append(item)
            else:
                entries.setdefault(item.name_expression, {})[f"sm_{arch}"] = numbers
        for item, found in compile_kernels(missing, arch, listing=False).items():
            numbers = [found.registers, found.spill_bytes, found.shared_bytes]
            entries.setdefault(item.name_expression, {})[f"sm_{arch}"] = numbers
        print(f"sm_{arch}: {len(missing)} compiled", flush=True)
    return entries


def main() -> None:
    """Write the table."""
    used = {use.specialisation.kernel for arch in ARCHS for use in uses(arch)}
    sources = {
        kernel: hashlib.sha256(_source.load(kernel).encode()).hexdigest()[:16]
        for kernel in sorted(used)
    }
    entries = update(sources)
    rows = [
        json.dumps({"kernel": kernel, **{arch: numbers[arch] for arch in sorted(numbers)}})
        for kernel, numbers in sorted(entries.items())
    ]
    meta = json.dumps({**versions(), "columns": COLUMNS, "sources": sources})
    results().write_text(f'{{"meta": {meta},\n"rows": [\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    main()
