# SPDX-License-Identifier: Apache-2.0
"""From the text of a `.cu` file to a library of instantiations that run on the CPU.

The text is compiled as it is, between a forced header (`cuda/device.h`) and a generated table of
the instantiations that are wanted. One translation unit holds many of them; what is built is kept
in a cache by source, options and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CUDA = Path(__file__).parent / "cuda"
DYNAMIC_BYTES = 232448  # the most shared memory that a block of any supported GPU may ask for
CANARY_BYTES = 4096  # as in runtime.cpp
GAP_BYTES = 64  # between variables in shared memory

_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-fno-extern-tls-init",  # no wrapper around extern shared arrays
    "-w",
    "-fmax-errors=3",
)
_RUNTIME_FLAGS = (*_FLAGS, "-O2", "-g1")
# Undefined behaviour is always looked for; runtime.cpp holds the handlers.
_KERNEL_FLAGS = (
    *_FLAGS,
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fstack-clash-protection",  # a frame larger than the guard page behind a stack
    "-fsanitize=alignment,bounds,null,signed-integer-overflow,shift,integer-divide-by-zero",
)
_CHECKED_FLAGS = ("-fsanitize=thread",)


class EmulatorUnavailable(RuntimeError):
    """This machine cannot run the emulator, and why."""


class CompileError(RuntimeError):
    """g++ refused a kernel's source."""


@functools.cache
def toolchain() -> tuple[str, ...]:
    """The compiler and its include options."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise EmulatorUnavailable(
            f"the emulator switches fibers in x86-64 assembly, this is {platform.machine()}"
        )
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or sys.platform != "linux":
        raise EmulatorUnavailable("the emulator needs g++ on Linux")
    packages = Path(sysconfig.get_paths()["purelib"])
    toolkit = next(
        (
            path
            for path in (packages / "nvidia/cuda_runtime/include", packages / "nvidia/cu13/include")
            if (path / "cuda_fp16.h").is_file()
        ),
        None,
    )
    if toolkit is None:
        raise EmulatorUnavailable(
            "the emulator needs the CUDA headers: pip install cuda-toolkit[cudart]"
        )
    libcudacxx = packages / "cupy/_core/include/cupy/_cccl/libcudacxx"  # for <nv/target>
    return (compiler, f"-I{CUDA}", f"-I{toolkit}", f"-I{libcudacxx}")


def missing() -> str | None:
    """Why the emulator cannot run here; None where it can."""
    try:
        toolchain()
    except EmulatorUnavailable as error:
        return str(error)
    return None


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "cupy_rmsnorm" / "emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _base_key() -> str:
    version = subprocess.run(
        [toolchain()[0], "--version"], capture_output=True, text=True, check=True
    ).stdout
    parts = [version, *toolchain()]
    parts += [path.read_text() for path in sorted(CUDA.rglob("*")) if path.is_file()]
    return "\0".join(parts)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((_base_key(), *parts)).encode()).hexdigest()[:32]


def _compile(arguments: Sequence[str], target: Path) -> None:
    """Run the compiler and put its output at `target` in one step."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}")
    compiler, *includes = toolchain()
    command = [compiler, *includes, *arguments, "-o", str(temporary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")
    temporary.replace(target)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The scheduler, which every kernel library calls."""
    path = cache_directory() / f"runtime-{_key(*_RUNTIME_FLAGS)}.so"
    if not path.exists():
        _compile([*_RUNTIME_FLAGS, "-shared", "-pthread", str(CUDA / "runtime.cpp")], path)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.emulator_add_range.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.emulator_remove_range.argtypes = [ctypes.c_void_p]
    library.emulator_set_variables.argtypes = [ctypes.c_int] + 3 * [ctypes.c_void_p]
    library.emulator_add_range.restype = library.emulator_remove_range.restype = None
    library.emulator_prefetched.restype = ctypes.c_size_t
    return library


_header_lock = threading.Lock()


def _precompiled_header(flags: Sequence[str]) -> Path:
    folder = cache_directory() / f"header-{_key(*flags)}"
    header = folder / "device.h"
    with _header_lock:
        if not (folder / "device.h.gch").exists():
            folder.mkdir(exist_ok=True)
            # In one step, as in `_compile`: another process may be about to include it.
            copy = header.with_name(f"device.h.{os.getpid()}")
            shutil.copyfile(CUDA / "device.h", copy)
            copy.replace(header)
            _compile([*flags, "-x", "c++-header", str(header)], folder / "device.h.gch")
    return header


class Parameter(ctypes.Structure):
    """One parameter of a kernel, or one member of a struct parameter, as C++ lays it out."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_char),
        ("offset", ctypes.c_int),
        ("size", ctypes.c_int),
    )


class Kernel(ctypes.Structure):
    """One instantiation in a library's table."""

    _fields_ = (
        ("expression", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(Parameter)),
        ("parameter_count", ctypes.c_int),
        ("packed_size", ctypes.c_int),
        ("cluster_size", ctypes.c_int),
        ("max_threads", ctypes.c_int),
    )


@dataclass(frozen=True)
class Library:
    """A compiled translation unit."""

    path: Path
    handle: ctypes.CDLL
    kernels: dict[str, Kernel]
    shared_variables: list[tuple[int, int, str]]  # offset, size, name; empty unless checked


@dataclass(frozen=True)
class Declaration:
    """A kernel's template as its source declares it."""

    template: str | None  # the parameter list, without the brackets
    cluster_size: str
    max_threads: str
    parameter_count: int


def declaration(code: str, name: str) -> Declaration:
    """Find the kernel `name` in `code`."""
    pattern = rf"__global__\s+(?P<attributes>(?:(?!__global__)[^;{{}}])*?)\b{name}\s*\("
    match = re.search(pattern, code)
    if match is None:
        raise CompileError(f"no __global__ function {name} in the source")
    before = code[: match.start()].rstrip()
    template = None
    if before.endswith(">"):
        start = before.rindex("template")
        template = before[before.index("<", start) + 1 : -1]
    attributes = match["attributes"]
    cluster = _arguments(attributes, "CLUSTER_DIMS") or _arguments(attributes, "__cluster_dims__")
    bounds = _arguments(attributes, "__launch_bounds__")
    parameters = _arguments(code[match.end() - 1 - len(name) :], name, "(<", ")>")
    return Declaration(
        template,
        cluster[0] if cluster else "1",
        bounds[0] if bounds else "0",
        len(parameters),
    )


def _arguments(text: str, name: str, opening: str = "(", closing: str = ")") -> list[str]:
    """What stands between the brackets of ``name(...)``, split at its commas."""
    start = text.find(f"{name}(")
    if start < 0:
        return []
    depth, begin, found = 0, start + len(name) + 1, []
    for end in range(start + len(name), len(text)):
        depth += (text[end] in opening) - (text[end] in closing)
        if depth == 0 or (depth == 1 and text[end] == ","):
            found.append(text[begin:end].strip())
            begin = end + 1
        if depth == 0:
            return found
    raise CompileError(f"{name}( is not closed")


_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+((?:__align__\(\w+\)\s*|alignas\(\w+\)\s*)?[\w:\s]+?)\s*(\w+)\s*\[\s*\]"
)


def _dynamic_arrays(code: str) -> dict[str, str]:
    """name -> type of every extern shared array."""
    arrays: dict[str, str] = {}
    for kind, name in _DYNAMIC.findall(code):
        arrays[name] = re.sub(r"(__align__|alignas)\(\w+\)", "", kind).strip()
    return arrays


def _table(code: str, expressions: Sequence[str], fields: Sequence[str]) -> str:
    """The C++ text that makes `expressions` callable from outside."""
    lines = ['#line 1 "table of instantiations"', "#include <cstddef>"]
    arrays = _dynamic_arrays(code)
    for name, kind in arrays.items():
        size = f"({DYNAMIC_BYTES + CANARY_BYTES}) / sizeof({kind})"
        lines.append(f"alignas(1024) thread_local {kind} {name}[{size}];")
    declared: dict[str, Declaration] = {}
    for expression in expressions:
        name = expression.split("<")[0]
        if name in declared:
            continue
        found = declared[name] = declaration(code, name)
        template = "" if found.template is None else f"template <{found.template}>"
        lines += [
            template,
            f"struct emulator_of_{name} {{",
            f"    static constexpr int cluster_size = {found.cluster_size};",
            f"    static constexpr int max_threads = {found.max_threads};",
            "};",
        ]
    entries = []
    for index, expression in enumerate(expressions):
        name, bracket, arguments = expression.partition("<")
        attributes = f"emulator_of_{name}{bracket}{arguments}"
        signature = f"EmulatorSignature<decltype(&{expression})>"
        parameters, count = f"{signature}::value.parameters", f"{signature}::count"
        if fields:
            members = ", ".join(
                f'{{"{field}", emulator_parameter_kind<std::decay_t<decltype('
                f"std::declval<P{index}&>().{field})>>(), int(offsetof(P{index}, {field})), "
                f"int(sizeof(std::declval<P{index}&>().{field}))}}"
                for field in fields
            )
            lines += [
                f"using P{index} = EmulatorParameterType<decltype(&{expression}), 0>::type;",
                f"static const EmulatorParameter parameters_{index}[] = {{{members}}};",
            ]
            parameters, count = f"parameters_{index}", str(len(fields))
        entries.append(
            f'    {{"{expression}", &emulator_run<&{expression}>, {parameters}, {count}, '
            f"{signature}::value.size, {attributes}::cluster_size, {attributes}::max_threads}},"
        )
    lines += [
        "thread_local char emulator_anchor_variable;",
        'extern "C" {',
        "char* emulator_anchor() { return &emulator_anchor_variable; }",
        "extern const EmulatorKernel emulator_kernels[] = {",
        *entries,
        "};",
        f"extern const int emulator_kernel_count = {len(entries)};",
        "extern const EmulatorDynamic emulator_dynamic[] = {",
        *(
            f"    {{[]() -> void* {{ return {name}; }}, {DYNAMIC_BYTES}}},"
            for name in (arrays or ())
        ),
        *([] if arrays else ["    {nullptr, 0},"]),
        "};",
        f"extern const int emulator_dynamic_count = {len(arrays)};",
        "}",
    ]
    return "\n".join(lines) + "\n"


_counting_folder: Path | None = None


def count_lines(folder: Path) -> None:
    """From now on compile with gcov's counters, into `folder` and past the cache."""
    global _counting_folder
    _counting_folder = folder


def _compile_counting(text: str, folder: Path) -> Path:
    """A library that leaves `.gcda` beside it when the process ends."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    source, path = folder / f"{name}.cpp", folder / f"{name}.so"
    if path.exists():
        return path
    source.write_text(text)
    compiler, *includes = toolchain()
    flags = [*_FLAGS, "-O0", "--coverage"]
    header = _precompiled_header(flags)
    command = [compiler, *includes, *flags, "-include", str(header)]
    command += ["-shared", source.name, "-o", path.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(done.stderr)
    return path


@functools.cache
def build(
    code: str, expressions: tuple[str, ...], fields: tuple[str, ...] = (), checked: bool = False
) -> Library:
    """Compile `expressions` of `code`, or take them from the cache.

    `fields` names the members of the kernels' one struct parameter. `checked` instruments every
    access to memory.
    """
    flags = (*_KERNEL_FLAGS, *(_CHECKED_FLAGS if checked else ()))
    text = code + _table(code, expressions, fields)
    path = cache_directory() / f"kernels-{_key(text, *flags)}.so"
    runtime()
    if _counting_folder is not None:
        path = _compile_counting(text, _counting_folder)
    elif not path.exists():
        source = path.with_name(f"{path.stem}.{os.getpid()}.cpp")
        assembly = source.with_suffix(".s")
        source.write_text(text)
        try:
            header = _precompiled_header(flags)
            # Linked without -fsanitize: runtime.cpp stands for the sanitizers' own libraries.
            _compile([*flags, "-include", str(header), "-S", str(source)], assembly)
            assembly.write_text(_with_gaps(assembly.read_text()))
            _compile([*_FLAGS, "-shared", str(assembly)], path)
        finally:
            source.unlink()
            assembly.unlink(missing_ok=True)
    handle = ctypes.CDLL(str(path))
    count = ctypes.c_int.in_dll(handle, "emulator_kernel_count").value
    table = (Kernel * count).in_dll(handle, "emulator_kernels")
    kernels = {kernel.expression.decode(): kernel for kernel in table}
    return Library(path, handle, kernels, _shared_variables(path) if checked else [])


_THREAD_LOCAL = re.compile(r"(\.section\s+\.tbss.*\n(?:.*\n)*?\S+:\n\s*\.zero\s+\d+\n)")


def _with_gaps(assembly: str) -> str:
    """Leave room behind each variable in shared memory, so that one more element meets nothing."""
    return _THREAD_LOCAL.sub(rf"\1\t.zero\t{GAP_BYTES}\n", assembly)


def _shared_variables(path: Path) -> list[tuple[int, int, str]]:
    """(offset, size, name) of every variable in a library's shared memory."""
    output = subprocess.run(
        ["readelf", "-sW", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = set()
    for line in output.splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[3] == "TLS":
            # The last component of a mangled local name: its length, then the name.
            local = re.search(r"E(\d+)([a-zA-Z_]\w*)$", fields[7])
            name = local[2][: int(local[1])] if local else fields[7]
            found.add((int(fields[1], 16), int(fields[2], 0), name))
    return sorted(found)


def source_line(library: str, offset: str) -> str:
    """``vec.cuh:53 (from norm_forward.cu:70)`` for a place in a library's code."""
    tool = shutil.which("addr2line")
    if tool is None:
        return f"{library}+{offset}"
    output = subprocess.run(
        [tool, "-i", "-e", library, f"0x{offset}"], capture_output=True, text=True, check=False
    ).stdout
    lines = [Path(line.split(" ")[0]).name for line in output.splitlines()]
    lines = [line for line in lines if not line.startswith(("device.h", "??", "table of"))]
    if not lines:
        return "an unknown line"
    return lines[0] if len(lines) == 1 else f"{lines[0]} (from {', '.join(lines[1:])})"
