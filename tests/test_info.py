# SPDX-License-Identifier: Apache-2.0
"""What the machine offers: one sentence for each reason that the GPU is not used.

Each reason runs in a process of its own, whose only CuPy is a stand-in with the fault in question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_rmsnorm import _info

CHECKOUT = Path(__file__).parent.parent
GOOD = '"cupy-cuda12x>=14.2" "cuda-toolkit[cudart,nvrtc]==12.*"'
GOOD_13 = '"cupy-cuda13x>=14.2" "cuda-toolkit[cudart,nvrtc]==13.*"'
TOOLKIT = 'run: pip install "cuda-toolkit[cudart,nvrtc]==12.*"'
REPLACE = f"pip uninstall -y cupy-cuda12x && pip install {GOOD}"

PROGRAM = """
import json, sys
import cupy_rmsnorm
from cupy_rmsnorm import _info
imported = [name for name in ("cupy", "torch", "ml_dtypes") if name in sys.modules]
driver = {driver}
if driver is not None:
    _info.read_driver = lambda: _info.Driver(*driver)
usable, reason = _info.available()
import numpy as np
y = cupy_rmsnorm.rms_norm(np.array([[3, 4]], np.float32), eps=0.0)
print(json.dumps([imported, usable, reason, _info.info(), y.tolist()]))
"""

STAND_IN = """
__version__ = {version!r}

def fail():
    raise RuntimeError("not found")

class cuda:
    get_cuda_path = staticmethod(lambda: {root!r})
    class runtime:
        is_hip = {rocm}
        getDeviceCount = staticmethod(lambda: 1)
        getDeviceProperties = staticmethod(lambda index: dict(
            name=b"A GPU", major=9, minor=0, multiProcessorCount=132, totalGlobalMem=2**37))
    class driver:
        get_build_version = staticmethod(lambda: {cuda})
    class nvrtc:
        getVersion = staticmethod(lambda: {nvrtc})
"""


@dataclass
class Machine:
    """A driver, a stand-in for CuPy and the names of the packages that claim to have brought it."""

    driver: tuple[object, ...] | None = (12090, 1)
    source: str | None = None  # in place of the stand-in; "": no CuPy
    packages: tuple[str, ...] = ("cupy-cuda12x",)
    version: str = "14.2.0"
    rocm: bool = False
    cuda: int = 12090
    nvrtc: str = "(12, 9)"
    headers: int | None = 12090
    visible: str | None = None

    def ask(self, folder: Path) -> tuple[list[str], bool, str, dict[str, object]]:
        """Run PROGRAM there; NumPy must work whatever the reason."""
        for module in (np, ml_dtypes):
            package = Path(module.__file__).parent
            for part in package.parent.glob(f"{package.name}*"):
                (folder / part.name).symlink_to(part)
        if self.headers is not None:
            include = folder / "toolkit" / "include"
            include.mkdir(parents=True)
            (include / "cuda_fp16.h").touch()
            (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {self.headers}\n")
        source = self.source
        if source is None:
            source = STAND_IN.format(root=str(folder / "toolkit"), **vars(self))
        if source:
            (folder / "cupy.py").write_text(source)
        for package in self.packages:
            metadata = folder / f"{package.replace('-', '_')}-{self.version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\n")
        environment = {
            **{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
            "PYTHONPATH": f"{folder}{os.pathsep}{CHECKOUT}",
            **({} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}),
        }
        # -S: without the site-packages of this environment, where the real CuPy may be.
        done = subprocess.run(
            [sys.executable, "-S", "-W", "error", "-c", PROGRAM.format(driver=self.driver)],
            env=environment,
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        imported, usable, reason, info, y = json.loads(done.stdout)
        np.testing.assert_allclose(y, [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6)
        assert info["reason"] == reason
        assert info["backend"] == ("CUDA" if usable else "NumPy")
        assert usable == (reason == "")
        return imported, usable, reason, info


def raising(error: str) -> str:
    return f"raise {error}"


REASONS = {
    "no driver": (
        Machine((0, 0, "libcuda.so.1: cannot open shared object file"), packages=()),
        "no NVIDIA driver was found (libcuda.so.1: cannot open shared object file); with an NVIDIA "
        f"GPU, install NVIDIA's driver, which pip cannot, and then run: pip install {GOOD}",
    ),
    "no driver, CuPy": (
        Machine((0, 0, "libcuda.so.1: cannot open shared object file")),
        "no NVIDIA driver was found (libcuda.so.1: cannot open shared object file); with an NVIDIA "
        "GPU, install NVIDIA's driver, which pip cannot",
    ),
    "old driver": (
        Machine((11040, 1), packages=()),
        "the NVIDIA driver supports CUDA 11.4, 12.0 or newer is needed; update the driver, and "
        f"then run: pip install {GOOD}",
    ),
    "old driver, CuPy": (
        Machine((11040, 1)),
        "the NVIDIA driver supports CUDA 11.4, 12.0 or newer is needed; update the driver",
    ),
    "no device": (
        Machine((12090, 0)),
        "the NVIDIA driver shows no GPU (the machine has none); no pip command mends that",
    ),
    "hidden device": (
        Machine((13000, 0), packages=(), visible=""),
        "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES is ''); no pip command mends that, "
        f"and CuPy comes with: pip install {GOOD_13}",
    ),
    "broken driver": (
        Machine((12090, 0, "cuInit returned error 803")),
        "the NVIDIA driver shows no GPU (cuInit returned error 803); no pip command mends that",
    ),
    "no CuPy": (
        Machine(source="", packages=()),
        f"CuPy is not installed; run: pip install {GOOD}",
    ),
    "no CuPy, new driver": (
        Machine((13010, 1), source="", packages=()),
        f"CuPy is not installed; run: pip install {GOOD_13}",
    ),
    "folder without CuPy": (
        Machine(source=""),
        f"CuPy is not installed; run: {REPLACE}",
    ),
    "ImportError": (
        Machine(source=raising(r"ImportError('\n=====\nFailed to import CuPy.\n\nMore.\n=====')")),
        f"importing CuPy failed (ImportError: Failed to import CuPy.); reinstall it: {REPLACE}",
    ),
    "missing dependency": (
        Machine(source="import missing_part"),
        "importing CuPy failed (ModuleNotFoundError: No module named 'missing_part'); reinstall "
        f"it: {REPLACE}",
    ),
    "PermissionError": (
        Machine(source=raising("PermissionError(13, 'Permission denied', '/home/me/.cupy')")),
        "importing CuPy failed (PermissionError: [Errno 13] Permission denied: '/home/me/.cupy'); "
        "set CUPY_CACHE_DIR to a folder that can be written to (pip cannot mend this)",
    ),
    "missing home": (
        Machine(source=raising("FileNotFoundError(2, 'No such file or directory', '/root')")),
        "importing CuPy failed (FileNotFoundError: [Errno 2] No such file or directory: '/root'); "
        "set CUPY_CACHE_DIR to a folder that can be written to (pip cannot mend this)",
    ),
    "read-only home": (
        Machine(source=raising("OSError(30, 'Read-only file system', '/home/me')")),
        "importing CuPy failed (OSError: [Errno 30] Read-only file system: '/home/me'); "
        "set CUPY_CACHE_DIR to a folder that can be written to (pip cannot mend this)",
    ),
    "OSError": (
        Machine(source=raising("OSError('libcudart.so.12: bad')")),
        f"importing CuPy failed (OSError: libcudart.so.12: bad); reinstall it: {REPLACE}",
    ),
    "any error": (
        Machine(source=raising("KeyError()")),
        f"importing CuPy failed (KeyError: KeyError); reinstall it: {REPLACE}",
    ),
    "two packages": (
        Machine(packages=("cupy-cuda12x", "cupy-cuda11x")),
        "2 CuPy packages are installed over one another (cupy-cuda11x, cupy-cuda12x); keep one: "
        f"pip uninstall -y cupy-cuda11x cupy-cuda12x && pip install {GOOD}",
    ),
    "two packages that warn": (
        Machine(
            packages=("cupy-cuda12x", "cupy"),
            source="import warnings; warnings.warn('multiple CuPy packages'); __version__ = '14.2'",
        ),
        "2 CuPy packages are installed over one another (cupy, cupy-cuda12x); keep one: pip "
        f"uninstall -y cupy cupy-cuda12x && pip install {GOOD}",
    ),
    "ROCm": (
        Machine(packages=("cupy-rocm-7-0",), rocm=True),
        "CuPy 14.2.0 is a ROCm build and these kernels are CUDA; with an NVIDIA GPU run: pip "
        f"uninstall -y cupy-rocm-7-0 && pip install {GOOD}",
    ),
    "old CuPy": (
        Machine(version="14.1.1"),
        f"CuPy 14.1.1 is too old, 14.2 or newer is needed; run: {REPLACE}",
    ),
    "driver older than CuPy": (
        Machine((12040, 1), packages=("cupy-cuda13x",), cuda=13000, nvrtc="(13, 0)", headers=13000),
        "CuPy was built for CUDA 13 and the NVIDIA driver supports CUDA 12.4; run: pip uninstall "
        f"-y cupy-cuda13x && pip install {GOOD}",
    ),
    "no NVRTC": (
        Machine(nvrtc="fail()"),
        f"NVRTC, CUDA's run-time compiler, was not found; {TOOLKIT}",
    ),
    "NVRTC of another major": (
        Machine(nvrtc="(13, 1)"),
        f"NVRTC 13.1 was found where CuPy was built for CUDA 12; {TOOLKIT}",
    ),
    "no headers": (
        Machine(headers=None),
        f"the CUDA headers (cuda_fp16.h) were not found; {TOOLKIT}",
    ),
    "headers of another major": (
        Machine(headers=13010),
        f"CUDA headers 13.1 were found where CuPy was built for CUDA 12; {TOOLKIT}",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reason(name: str, tmp_path: Path) -> None:
    machine, sentence = REASONS[name]
    imported, usable, reason, info = machine.ask(tmp_path)
    assert imported == []
    assert not usable
    assert reason == sentence
    assert info["devices"] == []


@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(version="14.2.0rc1"),
        Machine(version="15.0.0", packages=("cupy",)),
        Machine((13000, 1)),
        Machine((13000, 2), packages=("cupy-cuda13x",), cuda=13000, nvrtc="(13, 0)", headers=13000),
    ],
)
def test_usable(machine: Machine, tmp_path: Path) -> None:
    imported, usable, _, info = machine.ask(tmp_path)
    assert imported == []
    assert usable
    assert info["cupy"] == machine.version
    assert info["cupy_packages"] == list(machine.packages)
    assert info["cuda_headers_path"] == str(tmp_path / "toolkit" / "include")
    assert info["devices"] == [
        {
            "name": "A GPU",
            "compute_capability": "9.0",
            "multiprocessors": 132,
            "memory_gib": 128.0,
        }
    ]


def test_the_real_driver_is_asked(tmp_path: Path) -> None:
    """The driver of this machine, if there is one, answers as CuPy's stand-in cannot."""
    _, usable, reason, info = Machine(driver=None).ask(tmp_path)
    driver = _info.read_driver()
    assert bool(info["driver_cuda"]) == bool(driver.cuda)
    assert usable == bool(driver.devices)
    assert ("no NVIDIA driver was found" in reason) == (not driver.cuda)


def test_nothing_is_raised_here() -> None:
    usable, reason = _info.available()
    found = _info.info()
    assert usable == (not reason)
    assert found["numpy"] == np.__version__
    assert found["reason"] == reason


@pytest.mark.gpu
def test_the_gpu_of_this_machine() -> None:
    cupy = pytest.importorskip("cupy")
    usable, reason = _info.available()
    if not usable:
        pytest.skip(reason)
    found = _info.info()
    assert len(found["devices"]) == cupy.cuda.runtime.getDeviceCount()
    assert found["devices"][0]["name"]
    assert found["nvrtc"]
    assert found["cuda_headers"]
