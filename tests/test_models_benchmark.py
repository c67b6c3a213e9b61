# SPDX-License-Identifier: Apache-2.0
"""benchmarks/models.py and curves.py: what they conclude, and that they run on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests import backends

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import curves, models


def test_students_t() -> None:
    """Of tables."""
    for degrees, expected in ((10, 2.2281), (19, 2.0930), (30, 2.0423), (100, 1.9840)):
        assert models.quantile(degrees) == pytest.approx(expected, abs=2e-4)


def test_intervals_are_of_paired_differences() -> None:
    mean, low, high = models.interval([1.0, 2.0, 3.0, 4.0] * 5)
    half = 2.0930 * math.sqrt(25 / 19) / math.sqrt(20)
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half), abs=1e-3)


def test_rows_say_what_is_gained() -> None:
    # Both drift alike: the pairs tell what the medians cannot.
    drift = [1.0, 2.0, 3.0, 4.0]
    seconds = {"ours": drift, "torch": [value + 0.5 for value in drift]}
    ours, torchs = models.rows_of("training step", models.TINY, seconds, "torch")
    assert (ours["rows"], ours["steps"], torchs["ratio"]) == (32, 4, 1.0)
    assert ours["ratio"] == pytest.approx(3.0 / 2.5)
    assert "gain_us" not in ours
    assert torchs["gain_low_us"] == torchs["gain_us"] == torchs["gain_high_us"] == 0.5e6


def test_steps_are_taken_in_turns() -> None:
    order: list[str] = []

    def step(name: str) -> Any:
        return lambda: (order.append(name), float(len(order)))[1]

    seconds = models.interleaved({"a": step("a"), "b": step("b")}, 2)
    assert order == ["a", "b", "b", "a"]
    assert seconds == {"a": [1.0, 4.0], "b": [2.0, 3.0]}


# Dynamo looks at the gradient of every input, a layer's hidden states too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_it_runs_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that a GPU alone has are left out; Liger may be missing and is named."""
    monkeypatch.setattr(models, "FIRST_STEPS", 1)
    monkeypatch.setattr(models, "FIRST_ROUNDS", 0)
    file = tmp_path / "models.json"
    arguments = ["--tiny", "--rounds", "2", "--json", str(file)]
    models.main([*arguments, "--only", "decode"])
    models.main([*arguments, "--only", "training", "--resume", str(file)])
    content = json.loads(file.read_text())
    found = {(row["case"], row["impl"]) for row in content["rows"]}
    for case in ("decode step", "training step"):
        assert {(case, impl) for impl in ("ours", "torch", "compile")} <= found
    assert ("training step, layers compiled", "ours") in found
    assert {row["impl"] for row in content["left_out"]} <= {"liger"}
    models.main([*arguments, "--budget", "-1"])
    assert "decode step" in json.loads(file.read_text())["not_begun"]


def test_a_model_that_computes_something_else_does_not_race() -> None:
    model = models.build(models.TINY, "cpu").eval()
    work = models.Decoding(models.TINY, "cpu", graphs=0)
    work.check(models.ours(model, models.TINY), model)
    other = models.twin(model)
    other.model.norm.register_forward_hook(lambda module, given, out: 1.05 * out)
    with pytest.raises(models.race.Wrong, match=r"logits are 0\.0\d+ of their size off"):
        work.check(other, model)


# Loss curves -------------------------------------------------------------------------------------


def curve(impl: str, seed: int, *loss: float, not_finite: int = 0) -> dict[str, Any]:
    made = {"dtype": "bfloat16", "seed": seed, "impl": impl}
    return {**made, "not_finite": not_finite, "loss": list(loss)}


def test_curves_are_held_to_the_span_of_torchs_seeds() -> None:
    torchs = [curve("torch", 0, 3.0, 2.0), curve("torch", 1, 3.2, 2.1)]
    assert curves.outside([*torchs, curve("ours", 0, 3.1, 2.05), curve("ours", 1, 3.2, 2.1)]) == []
    (fault,) = curves.outside([*torchs, curve("ours", 0, 3.0, 2.2), curve("ours", 1, 3.2, 2.1)])
    assert "seed 0 window 1: 2.2 beside torch's 2.0" in fault
    broken = curve("ours", 0, 3.0, math.nan, not_finite=4)
    assert len(curves.outside([*torchs, broken, curve("ours", 1, 3.2, 2.1)])) == 2


@pytest.mark.gpu
def test_16_bit_training_follows_torchs() -> None:
    reason = backends.missing("torch-cuda")
    if reason is not None:
        pytest.skip(reason)
    rows = curves.measure("cuda", steps=40, window=10)
    assert curves.outside(rows) == []
    for row in rows:
        assert row["loss"][-1] < row["loss"][0] - 0.5, "it learns"
