# SPDX-License-Identifier: Apache-2.0
"""CUPY_RMSNORM_DEBUG and CUPY_RMSNORM_NVTX, with stand-ins for what would run on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _cpu, _kernel, _watch
from tests.recorder import Launched, recorded

cupy = pytest.importorskip("cupy")
X = np.ones((3, 64), np.float16)
WEIGHT = np.ones(64, np.float32)


class Runtime:
    """CUDA's runtime, as far as it is asked."""

    def __init__(self) -> None:
        self.capturing = False
        self.events: list[object] = []
        self.failure: Exception | None = None

    def getDevice(self) -> int:
        return 0

    def setDevice(self, index: int) -> None:
        """There is one."""

    def streamIsCapturing(self, stream: int) -> bool:
        return self.capturing

    def streamSynchronize(self, stream: int) -> None:
        self.events.append(("synchronize", stream))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    with recorded(90, 132), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_cpu, "forward", _watch.forward)
        monkeypatch.setattr(_cpu, "forward_pair", _watch.forward_pair)
        monkeypatch.setattr(_cpu, "backward", _watch.backward)
        monkeypatch.setattr(_watch, "runtime", lambda: made)
        monkeypatch.setattr("cupy_rmsnorm._device.runtime", lambda: made)
        yield made


def test_debug_waits_for_each_call(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    norms.rms_norm(X)
    assert runtime.events == []
    monkeypatch.setattr(_watch, "DEBUG", True)
    for _ in range(2):
        norms.rms_norm(X)
    norms.rms_norm_backward(X, X)
    assert runtime.events == 3 * [("synchronize", 0)]
    runtime.capturing = True
    norms.rms_norm(X)
    assert len(runtime.events) == 3


def test_debug_says_which_call_failed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "DEBUG", True)
    runtime.failure = ValueError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised:
        norms.add_layer_norm(X, X, WEIGHT)
    assert str(raised.value) == (
        "add_layer_norm on cpu with x float16[3, 64], weight float32[64], residual float16[3, 64], "
        "y float16[3, 64], residual_out float16[3, 64] by Plan(kernel='norm_forward', vec_size=8, "
        "vecs_per_thread=2, threads_per_row=4, cluster_size=1, early_weight=True): "
        "an illegal memory access was encountered"
    )
    with pytest.raises(RuntimeError, match=r"^rms_norm_backward on cpu with .*Plan\(.*illegal"):
        norms.rms_norm_backward(X, X, WEIGHT)


@pytest.mark.parametrize("k_weight", [WEIGHT, None])
def test_debug_names_both_halves_of_a_pair(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, k_weight: np.ndarray | None
) -> None:
    """In one launch where their weights are alike, else in two."""
    monkeypatch.setattr(_watch, "DEBUG", True)
    q, k = np.ones((3, 8, 64), np.float16), np.ones((3, 2, 64), np.float16)
    norms.qk_norm(q, k, WEIGHT, k_weight)
    assert runtime.events == [("synchronize", 0)]
    runtime.failure = ValueError("an illegal memory access was encountered")
    given = "" if k_weight is None else "k_weight float32[64], "
    arrays = (
        "q float16[3, 8, 64], q_weight float32[64], q_out float16[3, 8, 64], "
        f"k float16[3, 2, 64], {given}k_out float16[3, 2, 64]"
    )
    with pytest.raises(RuntimeError) as raised:
        norms.qk_norm(q, k, WEIGHT, k_weight)
    message = str(raised.value)
    assert message.startswith(f"qk_norm on cpu with {arrays} by Plan(kernel='norm_forward', ")
    assert message.endswith("): an illegal memory access was encountered")


def test_debug_names_the_sum_that_backward_starts_from(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "DEBUG", True)
    runtime.failure = ValueError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match=r" with residual_out float16\[3, 64\], dout "):
        norms.add_rms_norm_backward(X, None, X)


def test_debug_says_which_launch_failed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Launched:
        raise OSError("no launch")

    monkeypatch.setattr(_watch, "DEBUG", True)
    monkeypatch.setattr(_kernel, "launch", fail)
    with pytest.raises(RuntimeError, match=r"^rms_norm on cpu with x float16.*: no launch$"):
        norms.rms_norm(X)


def test_nvtx_ranges(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvtx

    monkeypatch.setattr(_watch, "NVTX", True)
    monkeypatch.setattr(nvtx, "RangePush", lambda name: runtime.events.append(name))
    monkeypatch.setattr(nvtx, "RangePop", lambda: runtime.events.append("pop"))
    norms.layer_norm(X)
    norms.rms_norm_backward(X, X)
    norms.qk_norm(X, X)
    called = ("layer_norm", "rms_norm_backward", "qk_norm")
    assert runtime.events == [event for name in called for event in (name, "pop")]
    with pytest.raises(ValueError, match=r"^eps"):
        norms.layer_norm(X, eps=-1.0)
    assert len(runtime.events) == 6


ASK = """
from cupy_rmsnorm import _run, _call
print(_run.backend(_call.Device("cuda", 0)).__name__)
"""


@pytest.mark.parametrize(
    ("variable", "value", "backend"),
    [
        ("CUPY_RMSNORM_DEBUG", "1", "_watch"),
        ("CUPY_RMSNORM_NVTX", "1", "_watch"),
        ("CUPY_RMSNORM_DEBUG", "0", "_cuda"),
    ],
)
def test_the_environment_decides(
    variable: str, value: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    checkout = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", ASK], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == f"cupy_rmsnorm.{backend}"
