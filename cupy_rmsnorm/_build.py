# SPDX-License-Identifier: Apache-2.0
"""Compiles and loads one instantiation on the current device, or says in a sentence why not.

CuPy compiles and keeps what it compiled on disk. It asks NVRTC for the code of the very GPU, which
an NVRTC older than the GPU cannot give; then it is asked for PTX of the newest architecture that it
knows, which the driver translates. For a GPU that a newer NVRTC has dropped there is no such way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _info

CACHE_ADVICE = (
    "set CUPY_CACHE_DIR to a folder that can be written to, or CUPY_CACHE_IN_MEMORY=1 to keep "
    "nothing"
)


def load(source: str, options: tuple[str, ...], expression: str, arch: int) -> Any:
    """The `cupy.RawKernel` of the name expression, for a device of this architecture."""
    try:
        with _capture_allows_loading():
            return _load(source, options, expression, arch)
    except Exception as error:
        reason = _explain(error, expression)
        if reason is None:
            raise
        raise RuntimeError(reason) from error


@functools.cache
def driver() -> Any:
    """The driver's library, by ctypes."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@contextlib.contextmanager
def _capture_allows_loading() -> Iterator[None]:
    """Let this thread load a module even while a stream is captured into a graph."""
    try:
        exchange = driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver, or one without graphs
        yield
        return
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # it holds what was in force before


def _load(source: str, options: tuple[str, ...], expression: str, arch: int) -> Any:
    import cupy

    supported = cupy.cuda.nvrtc.getSupportedArchs()
    oldest, newest = min(supported), max(supported)
    if arch < oldest:
        raise RuntimeError(f"cannot compile {expression}: {_info.explain_old_gpu(arch, oldest)}")
    if arch > newest:
        return _load_ptx(source, options, expression, newest)
    module = cupy.RawModule(code=source, options=options, name_expressions=(expression,))
    return module.get_function(expression)


def _load_ptx(source: str, options: tuple[str, ...], expression: str, arch: int) -> Any:
    import cupy

    ptx, name = _compile_ptx(source, options, expression, arch)
    # CuPy reads the file when it is first asked for a function.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_bytes(ptx)
        return cupy.RawModule(path=str(path)).get_function(name)


def _compile_ptx(
    source: str, options: tuple[str, ...], expression: str, arch: int
) -> tuple[bytes, str]:
    """PTX, and the name that the expression has in it; the options are those of CuPy."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import compiler, nvrtc

    options = (*assemble_cupy_compiler_options(options), "-ftz=true", f"-arch=compute_{arch}")
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(program)
            raise compiler.CompileException(log, source, "kernel.cu", options) from None
        return nvrtc.getPTX(program), nvrtc.getLoweredName(program, expression)
    finally:
        nvrtc.destroyProgram(program)


def _explain(error: Exception, expression: str) -> str | None:
    """What to tell the caller; None where the error says enough."""
    from cupy.cuda.compiler import CompileException

    if isinstance(error, OSError):
        folder = os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")
        return f"CuPy cannot keep compiled kernels in {folder} ({error}): {CACHE_ADVICE}"
    if "captur" in str(error).lower():
        return (
            f"cannot load {expression} while a CUDA graph is captured ({error}): call warmup, or "
            "make the call once, before the capture"
        )
    missing = _info.missing_toolkit()
    if missing:
        return f"cannot compile {expression}: {missing}"
    if isinstance(error, CompileException):
        return f"cannot compile {expression}: {error}"
    return None
