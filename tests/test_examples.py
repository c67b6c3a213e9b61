# SPDX-License-Identifier: Apache-2.0
"""Every file of examples/ runs, as its docstring says, and computes what it claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_rmsnorm import _info
from tests import backends

ROOT = Path(__file__).parents[1]
# What the last lines say, and what the example imports.
EXAMPLES = {
    "train_cupy": (r"loss (\d\.\d+) -> (\d\.\d+) in 60 steps", []),
    "patched_llama": (
        r"7 norms replaced(?s:.+)10 modules restored\nsame tokens$",
        ["transformers"],
    ),
    "decode_cuda_graph": (r"the graph agrees$", ["torch"]),
}


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, f"examples/{name}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def needs_gpu(name: str) -> None:
    usable, reason = _info.available()
    if not usable:
        pytest.skip(str(reason))
    if name == "decode_cuda_graph":
        reason = backends.missing("torch-cuda")
        if reason is not None:
            pytest.skip(reason)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize(
    "name",
    [
        "train_cupy",
        "patched_llama",
        pytest.param("train_cupy", marks=pytest.mark.gpu, id="train_cupy-gpu"),
        pytest.param("patched_llama", marks=pytest.mark.gpu, id="patched_llama-gpu"),
        pytest.param("decode_cuda_graph", marks=pytest.mark.gpu),
    ],
)
def test_an_example_runs(name: str, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        needs_gpu(name)
    expected, imports = EXAMPLES[name]
    for library in imports:
        pytest.importorskip(library)
    done = run(name)
    assert done.returncode == 0, done.stderr
    found = re.search(expected, done.stdout.strip())
    assert found, done.stdout
    if name == "train_cupy":
        first, last = map(float, found.groups())
        assert last < first / 5


def test_an_example_without_a_gpu_says_so() -> None:
    pytest.importorskip("torch")
    if _info.available()[0]:
        pytest.skip("there is a GPU")
    done = run("decode_cuda_graph")
    assert done.returncode == 1
    assert done.stderr.startswith("this example needs a GPU: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_to_install(name: str) -> None:
    done = run(name, "-S")  # without site-packages
    assert done.returncode == 1
    said = r"No module named '\w+'\. In a clone, run: pip install \"\.\[(\w+,?)+\]\"\n"
    assert re.fullmatch(said, done.stderr)


def test_torchs_modules_say_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import cupy_rmsnorm.torch"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    last = "ModuleNotFoundError: cupy_rmsnorm.torch needs torch; run: pip install torch\n"
    assert done.stderr.endswith(last)
    assert done.stderr.count("Traceback") == 1
