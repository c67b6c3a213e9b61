# SPDX-License-Identifier: Apache-2.0
"""What a kernel that cannot be compiled, loaded or kept on disk is reported as. No GPU."""

from __future__ import annotations

import builtins
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_rmsnorm import _build, _info, _kernel, _run, _source
from cupy_rmsnorm._call import Device

cupy = pytest.importorskip("cupy")

EXPRESSION = "kernel<float>"
SOURCE = "template <typename T> __global__ void kernel(T* y) { *y = 0; }"
TOOLKIT = 'pip install "cuda-toolkit[cudart,nvrtc]==12.*"'


class Fails:
    """A `cupy.RawModule` whose compilation fails."""

    error: Exception

    def __init__(self, **options: Any) -> None:
        pass

    def get_function(self, name: str) -> Any:
        raise self.error


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> type[Fails]:
    monkeypatch.setattr(cupy, "RawModule", Fails)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (80, 90))
    monkeypatch.setattr(_info, "missing_toolkit", lambda: "")
    return Fails


def load(arch: int = 90) -> Any:
    return _build.load(SOURCE, _kernel.OPTIONS, EXPRESSION, arch)


def test_a_compiler_error_is_a_runtime_error_with_the_log(fails: type[Fails]) -> None:
    log = 'kernel.cu(3): error: identifier "flaot" is undefined'
    fails.error = cupy.cuda.compiler.CompileException(log, SOURCE, "kernel.cu", ())
    with pytest.raises(RuntimeError, match=re.escape(f"cannot compile {EXPRESSION}: {log}")):
        load()


@pytest.mark.parametrize(
    "error",
    [
        cupy.cuda.compiler.CompileException("cannot open cuda_fp16.h", SOURCE, "kernel.cu", ()),
        RuntimeError("CuPy failed to load libnvrtc.so.12"),
    ],
    ids=["headers", "NVRTC"],
)
def test_missing_parts_are_named_with_the_command(
    fails: type[Fails], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fails.error = error
    parts = _info.CuPy(version="14.2.0", cuda=12090, nvrtc=None)
    monkeypatch.setattr(_info, "missing_toolkit", lambda: _info._explain_toolkit(parts))
    with pytest.raises(RuntimeError) as raised:
        load()
    assert str(raised.value).endswith(f"was not found; run: {TOOLKIT}")
    assert raised.value.__cause__ is error


def test_missing_toolkit_asks_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _info.CuPy(version="14.2.0", cuda=12090, nvrtc=(12, 9))
    monkeypatch.setattr(_info, "read_cupy", lambda: parts)
    assert (
        _info.missing_toolkit() == f"the CUDA headers (cuda_fp16.h) were not found; run: {TOOLKIT}"
    )


def test_a_load_that_a_capture_forbids_names_warmup(fails: type[Fails]) -> None:
    text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: operation not permitted when stream is capturing"
    fails.error = RuntimeError(text)  # what CuPy raises is one
    with pytest.raises(RuntimeError, match=rf"^cannot load {EXPRESSION} while .*: call warmup, or"):
        load()


def test_modules_load_in_the_relaxed_mode_of_captures(
    monkeypatch: pytest.MonkeyPatch, fails: type[Fails]
) -> None:
    modes = [0]  # of the thread; 0 is global

    def exchange(pointer: Any) -> None:
        modes.append(pointer._obj.value)
        pointer._obj.value = modes[-2]

    stand_in = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(_build, "driver", lambda: stand_in)
    seen = []
    monkeypatch.setattr(_build, "_load", lambda *arguments: seen.append(modes[-1]))
    load()
    assert seen == [2]
    assert modes == [0, 2, 0]


def test_other_errors_stay_as_they_are(fails: type[Fails]) -> None:
    fails.error = MemoryError("out of memory")
    with pytest.raises(MemoryError) as raised:
        load()
    assert raised.value is fails.error


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2)])
def test_a_cache_that_cannot_be_used_names_the_variable(
    fails: type[Fails], monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    fails.error = error
    monkeypatch.setenv("CUPY_CACHE_DIR", "/nowhere")
    with pytest.raises(RuntimeError, match=r"in /nowhere \(.*\): set CUPY_CACHE_DIR to a folder"):
        load()


@pytest.mark.parametrize("kernel", ["norm_forward", "norm_backward"])
def test_a_newer_gpu_gets_ptx(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """NVRTC's own PTX of a real kernel for the newest architecture, loaded from a file."""
    from tests import kernels

    rows = kernels.FORWARD if kernel == "norm_forward" else kernels.BACKWARD
    found = (
        row.specialisation(90, 132) if kernel == "norm_forward" else row.specialisations(90, 132)[0]
        for row in rows
    )
    expression = next(one for one in found if one.kernel == kernel).name_expression
    newest = max(cupy.cuda.nvrtc.getSupportedArchs())
    loaded: list[str] = []

    def module(path: str) -> Any:
        text = Path(path).read_text()
        return SimpleNamespace(get_function=lambda name: loaded.extend((text, name)))

    monkeypatch.setattr(cupy, "RawModule", module)
    _build.load(_source.load(kernel), _kernel.OPTIONS, expression, newest + 10)
    text, name = loaded
    assert re.search(rf"^\.target sm_{newest}\b", text, re.MULTILINE)
    assert f".entry {name}(" in text
    assert ".ftz." in text


def test_the_compiler_log_of_ptx(fails: type[Fails]) -> None:
    with pytest.raises(RuntimeError, match=rf"^cannot compile {EXPRESSION}: .*flaot"):
        _build.load(SOURCE + "flaot x;", _kernel.OPTIONS, EXPRESSION, 130)


def test_an_older_gpu_is_named_with_the_command(
    fails: type[Fails], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails.error = AssertionError("NVRTC was asked")
    parts = _info.CuPy(("cupy-cuda13x",), version="14.2.0", cuda=13000, nvrtc=(13, 0))
    monkeypatch.setattr(_info, "read_cupy", lambda: parts)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (75, 80, 90))
    with pytest.raises(RuntimeError) as raised:
        load(arch=70)
    assert str(raised.value) == (
        f"cannot compile {EXPRESSION}: NVRTC 13.0 compiles for compute capability 7.5 and newer, "
        "and this GPU has 7.0; run: pip uninstall -y cupy-cuda13x && "
        f'pip install "cupy-cuda12x>=14.2" {TOOLKIT.removeprefix("pip install ")}'
    )


def test_a_known_gpu_is_left_to_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def module(**options: Any) -> Any:
        asked.update(options)
        return SimpleNamespace(get_function=lambda name: name)

    monkeypatch.setattr(cupy, "RawModule", module)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (80, 90))
    assert load(89) == EXPRESSION
    assert asked == {
        "code": SOURCE,
        "options": _kernel.OPTIONS,
        "name_expressions": (EXPRESSION,),
    }


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied"), "CUPY_CACHE_DIR"),
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "pip install"),
    ],
    ids=["read-only home", "no CuPy"],
)
def test_a_cupy_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    """torch users may have a GPU and no CuPy, or a home that CuPy cannot write to."""
    real = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "cupy":
            raise error
        return real(name, *arguments, **options)

    monkeypatch.setattr(_info, "read_driver", lambda: _info.Driver(12090, 1))
    monkeypatch.setattr(_info, "_cupy_wheels", tuple)
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(builtins, "__import__", importing)
    _info.available.cache_clear()
    _run._require_cupy.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=f"^the GPU backend cannot run: .*{sentence}"):
            _run.backend(Device("cuda", 0))
    finally:
        _info.available.cache_clear()


def test_a_truncated_cache_file_is_compiled_anew(tmp_path: Path) -> None:
    """CuPy checks what it reads; this pins that, since nothing of ours would notice."""
    from cupy.cuda._compiler_cache import DiskKernelCacheBackend

    cache = DiskKernelCacheBackend(os.fspath(tmp_path))
    cache.save("kernel.cubin", b"a compiled kernel", "")
    file = tmp_path / "kernel.cubin"
    assert cache.load("kernel.cubin") == b"a compiled kernel"
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.load("kernel.cubin") is None
