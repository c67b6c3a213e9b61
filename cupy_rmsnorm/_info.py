# SPDX-License-Identifier: Apache-2.0
"""What this machine offers, and in one sentence why the GPU is not used. Never raises."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUPY_MINIMUM = (14, 2)


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: the newest CUDA it supports (12090 is 12.9) and the GPUs it shows."""

    cuda: int = 0  # 0: there is no driver
    devices: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class CuPy:
    """The installed CuPy and the CUDA parts that it found."""

    wheels: tuple[str, ...] = ()
    version: str = ""  # "": not imported
    error: str = ""  # what importing it raised
    rocm: bool = False
    cuda: int = 0  # the CUDA that the wheel was built with
    nvrtc: tuple[int, int] | None = None
    nvrtc_path: str | None = None
    headers: str | None = None  # the folder that holds cuda_fp16.h
    headers_cuda: int = 0


@functools.cache
def available() -> tuple[bool, str]:
    """Whether calls can run on a GPU here, and if not, why not and what mends it."""
    driver = read_driver()
    reason = explain(driver, read_cupy() if driver.devices else CuPy(_cupy_wheels()))
    return not reason, reason


def info() -> dict[str, Any]:
    """Versions, devices and the parts of CUDA that were found."""
    import platform

    driver, cupy = read_driver(), read_cupy()
    reason = explain(driver, cupy)
    return {
        "cupy_rmsnorm": getattr(sys.modules[__package__], "__version__", None),
        "backend": "NumPy" if reason else "CUDA",
        "reason": reason,
        "devices": [] if reason else _devices(),
        "driver_cuda": _dotted(driver.cuda),
        "cupy": cupy.version or None,
        "cupy_packages": list(cupy.wheels),
        "cupy_cuda": _dotted(cupy.cuda),
        "nvrtc": ".".join(map(str, cupy.nvrtc)) if cupy.nvrtc else None,
        "nvrtc_path": cupy.nvrtc_path,
        "cuda_headers": _dotted(cupy.headers_cuda),
        "cuda_headers_path": cupy.headers,
        "torch": _installed_version("torch"),
        "numpy": _installed_version("numpy"),
        "ml_dtypes": _installed_version("ml_dtypes"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def explain(driver: Driver, cupy: CuPy) -> str:
    """Why the GPU cannot be used, in one sentence with the command that mends it; "" if it can."""
    major = _fitting_major(driver, cupy)
    install = f"pip install {_requirements(major)}"
    if driver.cuda < 12000 or not driver.devices:
        return _explain_driver(driver, "" if cupy.wheels else install)
    return _explain_cupy(driver, cupy, _replace(cupy, install)) or _explain_toolkit(cupy)


def _explain_driver(driver: Driver, install: str) -> str:
    """`install` is "" where a CuPy is there already: whether it fits, a driver has to say first."""
    then = f", and then run: {install}" if install else ""
    if not driver.cuda:
        return (
            f"no NVIDIA driver was found ({driver.error}); with an NVIDIA GPU, install NVIDIA's "
            f"driver, which pip cannot{then}"
        )
    if driver.cuda < 12000:
        return (
            f"the NVIDIA driver supports CUDA {_dotted(driver.cuda)}, 12.0 or newer is needed; "
            f"update the driver{then}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cause = driver.error or (
        "the machine has none" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    )
    besides = f", and CuPy comes with: {install}" if install else ""
    return f"the NVIDIA driver shows no GPU ({cause}); no pip command mends that{besides}"


def _explain_cupy(driver: Driver, cupy: CuPy, replace: str) -> str:
    if len(cupy.wheels) > 1:
        return (
            f"{len(cupy.wheels)} CuPy packages are installed over one another "
            f"({', '.join(cupy.wheels)}); keep one: {replace}"
        )
    if cupy.error:
        return f"importing CuPy failed ({cupy.error}); {_mend_import(cupy.error, replace)}"
    if not cupy.version:
        return f"CuPy is not installed; run: {replace}"
    if cupy.rocm:
        return (
            f"CuPy {cupy.version} is a ROCm build and these kernels are CUDA; with an NVIDIA GPU "
            f"run: {replace}"
        )
    if _parse(cupy.version) < CUPY_MINIMUM:
        return (
            f"CuPy {cupy.version} is too old, {_parts(CUPY_MINIMUM)} or newer is needed; run: "
            f"{replace}"
        )
    if cupy.cuda // 1000 > driver.cuda // 1000:
        return (
            f"CuPy was built for CUDA {cupy.cuda // 1000} and the NVIDIA driver supports CUDA "
            f"{_dotted(driver.cuda)}; run: {replace}"
        )
    return ""


def _explain_toolkit(cupy: CuPy) -> str:
    toolkit = f"pip install {_toolkit_requirement(cupy.cuda // 1000)}"
    if cupy.nvrtc is None:
        return f"NVRTC, CUDA's run-time compiler, was not found; run: {toolkit}"
    if cupy.nvrtc[0] != cupy.cuda // 1000:
        return (
            f"NVRTC {_parts(cupy.nvrtc)} was found where CuPy was built for CUDA "
            f"{cupy.cuda // 1000}; run: {toolkit}"
        )
    if cupy.headers is None:
        return f"the CUDA headers (cuda_fp16.h) were not found; run: {toolkit}"
    if cupy.headers_cuda and cupy.headers_cuda // 1000 != cupy.cuda // 1000:
        return (
            f"CUDA headers {_dotted(cupy.headers_cuda)} were found where CuPy was built for CUDA "
            f"{cupy.cuda // 1000}; run: {toolkit}"
        )
    return ""


def explain_old_gpu(arch: int, oldest: int) -> str:
    """That NVRTC compiles for `oldest` and newer GPUs alone, and what mends it."""
    cupy = read_cupy()
    return (
        f"NVRTC {_parts(cupy.nvrtc or ())} compiles for compute capability {_capability(oldest)} "
        f"and newer, and this GPU has {_capability(arch)}; run: "
        f"{_replace(cupy, f'pip install {_requirements(12)}')}"
    )


def missing_toolkit() -> str:
    """What of CUDA's toolkit is missing or does not fit, and the command that mends it, or ""."""
    return _explain_toolkit(read_cupy())


def read_driver() -> Driver:
    """Ask the driver itself, without CuPy and without a CUDA context."""
    import ctypes

    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        version, devices = ctypes.c_int(), ctypes.c_int()
        status = library.cuDriverGetVersion(ctypes.byref(version))
        if status:
            return Driver(error=f"cuDriverGetVersion returned error {status}")
        status = library.cuInit(0)
        if status == 100:  # CUDA_ERROR_NO_DEVICE
            return Driver(version.value)
        if status:
            return Driver(version.value, error=f"cuInit returned error {status}")
        status = library.cuDeviceGetCount(ctypes.byref(devices))
        error = f"cuDeviceGetCount returned error {status}" if status else ""
        return Driver(version.value, devices.value, error)
    except (OSError, AttributeError) as error:
        return Driver(error=_first_line(error))


def read_cupy() -> CuPy:
    """Import CuPy and ask what it is and what it finds."""
    wheels = _cupy_wheels()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several wheels; explain() says it in one sentence
            import cupy
    except ModuleNotFoundError as error:
        missing = "" if error.name == "cupy" else _describe(error)
        return CuPy(wheels, error=missing)
    except Exception as error:
        return CuPy(wheels, error=_describe(error))

    def ask(question: Any) -> Any:
        # A missing or broken part may raise anything, and then it is not there.
        try:
            return question()
        except Exception:
            return None

    headers = ask(_find_headers)
    return CuPy(
        wheels,
        version=str(ask(lambda: cupy.__version__) or "0"),
        rocm=bool(ask(lambda: cupy.cuda.runtime.is_hip)),
        cuda=int(ask(lambda: cupy.cuda.driver.get_build_version()) or 0),
        nvrtc=ask(lambda: tuple(map(int, cupy.cuda.nvrtc.getVersion()))),
        nvrtc_path=ask(_find_nvrtc),
        headers=headers,
        headers_cuda=ask(lambda: _headers_version(headers)) or 0,
    )


def _cupy_wheels() -> tuple[str, ...]:
    # Every CuPy distribution brings the same folders, so two of them overwrite each other.
    import importlib.metadata
    import re

    known = re.compile(r"(amd-)?cupy(-cuda\d+x?|-rocm(-\d+)+)?")
    names = set()
    for entry in sys.path:
        try:
            found = list(Path(entry or ".").glob("*cupy*-info"))
        except OSError:
            continue
        for folder in found:
            name = importlib.metadata.PathDistribution(folder).metadata["Name"] or ""
            name = name.lower().replace("_", "-")
            if known.fullmatch(name):
                names.add(name)
    return tuple(sorted(names))


def _find_nvrtc() -> str | None:
    from cuda import pathfinder

    path: str | None = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    return path


def _find_headers() -> str | None:
    # CuPy's own order: the toolkit beside NVRTC, else the cudart headers that pathfinder knows.
    import cupy

    root = cupy.cuda.get_cuda_path()
    folders = [] if root is None else [Path(root) / "include"]
    try:
        from cuda import pathfinder

        folder = pathfinder.find_nvidia_header_directory("cudart")
        if folder is not None:
            folders.append(Path(folder))
    except ImportError:
        pass
    return next((str(folder) for folder in folders if (folder / "cuda_fp16.h").is_file()), None)


def _headers_version(folder: str) -> int:
    with open(Path(folder) / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("#define CUDART_VERSION"):
                return int(line.split()[2])
    return 0


def _devices() -> list[dict[str, Any]]:
    import cupy

    devices = []
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        devices.append(
            {
                "name": properties["name"].decode(),
                "compute_capability": f"{properties['major']}.{properties['minor']}",
                "multiprocessors": properties["multiProcessorCount"],
                "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
            }
        )
    return devices


def _fitting_major(driver: Driver, cupy: CuPy) -> int:
    # A CuPy that is already there decides, as long as the driver can run it.
    newest = 13 if driver.cuda >= 13000 else 12
    present = next((m for m in (12, 13) if cupy.wheels == (f"cupy-cuda{m}x",)), newest)
    return min(present, newest) if driver.cuda else present


def _replace(cupy: CuPy, install: str) -> str:
    return f"pip uninstall -y {' '.join(cupy.wheels)} && {install}" if cupy.wheels else install


def _requirements(major: int) -> str:
    return f'"cupy-cuda{major}x>={_parts(CUPY_MINIMUM)}" {_toolkit_requirement(major)}'


def _toolkit_requirement(major: int) -> str:
    return f'"cuda-toolkit[cudart,nvrtc]=={major}.*"'


def _mend_import(error: str, replace: str) -> str:
    if "[Errno" in error:  # of a file; CuPy makes its cache's folder, and a loader names no number
        return "set CUPY_CACHE_DIR to a folder that can be written to (pip cannot mend this)"
    return f"reinstall it: {replace}"


def _installed_version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except Exception:
        return None


def _parse(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)


def _parts(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _dotted(cuda: int) -> str | None:
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    # CuPy's own import error is a framed text whose first lines are rules and blanks.
    return next((line for line in lines if line.strip("=- ")), type(error).__name__)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"
