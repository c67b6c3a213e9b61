# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as far as no GPU is needed: shapes, results, bars, the report."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import backward, compare, instructions, race, report, shapes
from benchmarks.race import Candidate, Timing
from benchmarks.shapes import Shape
from cupy_rmsnorm import _bench

ROOT = Path(__file__).parents[1]
FAST = Shape("rms_norm", "bfloat16", 16384, 4096)
SMALL = Shape("rms_norm", "bfloat16", 16, 4096)

PUBLISHED = """
rms_norm float16 4096x512 4096x1024 4096x2048 4096x4096 4096x8192 8192x8192
rms_norm float32 4096x4096 8192x16384
rms_norm bfloat16 1x4096 16x4096 128x8192 16384x4096 16384x7168 131072x128
rms_norm bfloat16 8192x32768 8192x65536 4096x131072
add_rms_norm bfloat16 16384x4096 4096x32768 131072x128
layer_norm bfloat16 16384x4096 8192x8192 16384x7168 4096x32768 4096x512 131072x128
layer_norm float32 8192x4096
rms_norm_backward bfloat16 16384x4096 8192x8192 16384x7168 4096x32768 4096x512 131072x128 128x8192
rms_norm_backward float32 8192x4096
layer_norm_backward bfloat16 16384x4096 8192x8192 16384x7168 4096x32768 4096x512 131072x128 128x8192
layer_norm_backward float32 8192x4096
add_rms_norm_backward bfloat16 16384x4096 8192x8192 4096x32768 131072x128
"""


def row(shape: Shape, impl: str, us: float, copy: float, case: str | None = None) -> race.Result:
    place = dict(zip(("op", "dtype", "rows", "hidden_size"), shape, strict=True))
    made = {**place, "impl": impl, "us": us, "ratio": copy / us}
    return made if case is None else {**made, "case": case}


def rows_of(shape: Shape, copy: float, **times: float) -> list[race.Result]:
    return [row(shape, impl, us, copy) for impl, us in {"copy": copy, **times}.items()]


# Shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", PUBLISHED.split("\n")[1:-1])
def test_published_shapes_are_measured(line: str) -> None:
    op, dtype, *sizes = line.split()
    measured = {*shapes.FORWARD, *shapes.BACKWARD}
    for size in sizes:
        rows, hidden_size = map(int, size.split("x"))
        assert Shape(op, dtype, rows, hidden_size) in measured


def test_models_are_measured() -> None:
    for hidden_size in shapes.MODELS.values():
        rows = {
            shape.rows
            for shape in shapes.FORWARD
            if shape.op == "add_rms_norm" and shape.hidden_size == hidden_size
        }
        assert {1, 256} <= rows, "decode"
        assert {2048, 16384} <= rows, "prefill"


def test_odd_sizes_have_their_neighbours() -> None:
    measured = set(shapes.FORWARD)
    odd = [shape for shape in measured if shape.hidden_size in shapes.ODD]
    assert len(odd) == 2 * len(shapes.ODD)
    for shape in odd:
        assert shape._replace(hidden_size=shapes.ODD[shape.hidden_size]) in measured


def test_no_shape_is_measured_twice() -> None:
    for listed in (shapes.FORWARD, shapes.BACKWARD, shapes.VARIANTS):
        assert len(listed) == len(set(listed))
    assert set(shapes.FORWARD) | set(shapes.BACKWARD) >= shapes.COMPILED


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        ("rms_norm", 2),
        ("layer_norm", 2),
        ("add_rms_norm", 4),
        ("rms_norm_backward", 3),
        ("layer_norm_backward", 3),
        ("add_rms_norm_backward", 4),
    ],
)
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_bytes(op: str, tensors: int, dtype: str, itemsize: int) -> None:
    assert Shape(op, dtype, 3, 5).nbytes == tensors * 15 * itemsize


# Results ---------------------------------------------------------------------------------------


def candidate(impl: str, dtype: str = "bfloat16", case: str | None = None) -> Candidate:
    return Candidate(lambda: print, lambda outputs: None, impl, dtype, case)


def test_results_are_medians_over_the_fastest_copy() -> None:
    candidates = {name: candidate(name) for name in ("ours", "quack", "liger")}
    timing = Timing(
        {"ours": [2e-6, 9e-6, 4e-6], "liger": [8e-6, 8e-6, 8e-6]},
        {"driver": [5e-6, 5e-6, 5e-6], "kernel": [1e-6, 3e-6, 9e-6]},
        {"quack": "TypeError: no"},
        {"liger": "no"},
    )
    rows, left_out = race.results(SMALL, candidates, timing)
    place = {"op": "rms_norm", "dtype": "bfloat16", "rows": 16, "hidden_size": 4096}
    assert rows == [
        {**place, "impl": "copy", "us": 3.0, "ratio": 1.0},
        {**place, "impl": "ours", "us": 4.0, "ratio": 0.75, "spread": 1.75},
        {**place, "impl": "liger", "us": 8.0, "ratio": 0.375, "spread": 0.0, "uncaptured": "no"},
    ]
    assert left_out == [{**place, "impl": "quack", "reason": "TypeError: no"}]


@pytest.mark.parametrize(
    ("op", "factor"), [("layer_norm_backward", 1.5), ("add_rms_norm_backward", 2.0)]
)
def test_the_floor_of_backward(op: str, factor: float) -> None:
    shape = Shape(op, "bfloat16", 4096, 512)
    timing = Timing({"ours": [4e-6]}, {"copy": [2e-6]})
    rows, _ = race.results(shape, {"ours": candidate("ours")}, timing)
    assert [r["us"] for r in rows] == [2 * factor, 4.0]
    assert rows[1]["ratio"] == factor / 2


def test_options_are_told_apart_by_case() -> None:
    candidates = {
        "plain": candidate("ours", case="plain"),
        "bias": candidate("ours", case="bias"),
        "float16": candidate("ours", "float16", "plain"),
    }
    timing = Timing({"plain": [1e-6], "bias": [2e-6], "float16": [3e-6]}, {"copy": [1e-6]})
    rows, _ = race.results(SMALL, candidates, timing)
    cases = race.by_shape(rows, case="plain")
    assert {case: found["us"] for case, found in cases[SMALL].items()} == {
        "copy": 1.0,
        "plain": 1.0,
        "bias": 2.0,
    }
    half = cases[SMALL._replace(dtype="float16")]
    assert {case: found["us"] for case, found in half.items()} == {"copy": 1.0, "plain": 3.0}
    assert race.by_shape(rows) == {}


def test_a_reason_names_no_folder() -> None:
    error = OSError("\n  cannot open /home/someone/lib/libcuda.so.1: and more\nsecond line")
    assert race.reason(error) == "OSError: cannot open ...: and more"
    assert race.reason(ValueError()) == "ValueError"


def test_written_results_are_json_with_a_line_a_row() -> None:
    content = {"meta": {"device": "x"}, "rows": [{"us": 1.5}, {"us": 2}], "left_out": []}
    text = race.dumps(content)
    assert json.loads(text) == content
    assert text.splitlines()[2:5] == ['"rows": [', '  {"us": 1.5},', '  {"us": 2}']


# Commands --------------------------------------------------------------------------------------


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark as a program of its own in which nothing can import torch."""
    program = (
        "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ["train", "models", "cpu"])
def test_a_benchmark_without_torch_says_so(name: str) -> None:
    shown = without_torch(f"benchmarks.{name}", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: ")
    ended = without_torch(f"benchmarks.{name}")
    assert ended.returncode == 1
    assert re.fullmatch(r"this benchmark needs torch.*; run: pip install torch.*\n", ended.stderr)


# Runs ------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Makes a Run whose races take no GPU and, on a clock of its own, ten seconds each."""
    clock = [0.0]

    def time_on_gpu(candidates: Any, nbytes: int, placements: int, rounds: int) -> Timing:
        assert (placements, rounds) == (4, 7)
        clock[0] += 10
        return Timing({name: [nbytes * 1e-12] for name in candidates}, {"copy": [nbytes * 1e-12]})

    monkeypatch.setattr(race, "time_on_gpu", time_on_gpu)
    monkeypatch.setattr(race, "free_memory", lambda: None)
    monkeypatch.setattr(race.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(_bench, "placement_count", lambda nbytes: 4)

    def make(*arguments: str) -> race.Run:
        path = tmp_path / "result.json"
        options = race.parser("", 1000).parse_args(["--json", str(path), *arguments])
        clock[0] = 0.0
        made = race.Run(options, 0.0, {"device": "none"})
        made.path = path  # type: ignore[attr-defined]
        return made

    return make


def one(shape: Shape, count: int) -> dict[str, Candidate]:
    return {"ours": candidate("ours", shape.dtype)}


def test_a_run_stops_within_its_budget_and_says_what_is_missing(run: Any) -> None:
    listed = shapes.FORWARD[:6]
    made = run("--budget", "35")
    made.all(listed, one)
    written = json.loads(made.path.read_text())
    assert [Shape(*list(r.values())[:4]) for r in written["rows"][1::2]] == list(listed[:3])
    assert made.not_begun == [str(shape) for shape in listed[3:]]
    assert not list(made.path.parent.glob("*.partial"))


def test_a_run_resumes(run: Any) -> None:
    first = run("--budget", "25")
    first.all(shapes.FORWARD[:4], one)
    second = run("--resume", str(first.path))
    second.all(shapes.FORWARD[:4], one)
    assert [r["rows"] for r in second.rows[1::2]] == [s.rows for s in shapes.FORWARD[:4]]
    assert not second.not_begun


def test_cases_are_measured_anew_beside_rows_of_another_commit(run: Any, tmp_path: Path) -> None:
    shape, other = shapes.MASKED
    meta = dict.fromkeys(("device", "driver", "runtime", "cupy", "torch", "rounds"), 1)
    kept = [row(shape, "ours", 1.0, 1.0), row(other, "ours", 1.0, 1.0, "valid_rows")]
    rows = [*kept, row(shape, "ours", 1.0, 1.0, "valid_rows")]
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"meta": {**meta, "commit": "before"}, "rows": rows}))
    path = tmp_path / "now.json"
    arguments = ["--resume", str(earlier), "--json", str(path)]
    options = race.parser("", 1000).parse_args(arguments)
    made = race.Run(options, 0.0, {**meta, "commit": "now"}, [shape])
    made.all([shape], lambda *_: {"mask": candidate("ours", shape.dtype, "valid_rows")}, "mask")
    written = json.loads(path.read_text())
    assert written["meta"]["commit"] == "before"
    assert written["rows"][:2] == kept
    assert [(r["case"], r["commit"]) for r in written["rows"][2:]] == [("valid_rows", "now")]
    with pytest.raises(SystemExit, match=r"^the other rows are of torch 1, not 2$"):
        race.Run(options, 0.0, {**meta, "torch": 2, "commit": "now"}, [shape])


def test_a_run_takes_only_what_is_wanted(run: Any) -> None:
    made = run("--only", "layer_norm bfloat16 4096x")
    made.all(shapes.FORWARD, one)
    assert {(r["op"], r["rows"]) for r in made.rows} == {("layer_norm", 4096)}


def test_a_race_that_fails_does_not_end_the_run(run: Any) -> None:
    def failing(shape: Shape, count: int) -> dict[str, Candidate]:
        if shape == shapes.FORWARD[0]:
            raise MemoryError("too much")
        return one(shape, count)

    made = run()
    made.all(shapes.FORWARD[:2], failing)
    assert len(made.rows) == 2
    assert [r["reason"] for r in made.left_out] == ["MemoryError: too much"]


def test_a_candidate_that_fails_does_not_end_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    synchronized = []

    class Stream(contextlib.nullcontext[None]):
        ptr = 1

        def __init__(self, non_blocking: bool = False) -> None:
            super().__init__()

        def synchronize(self) -> None:
            synchronized.append(self)

    class Graph:
        def launch(self, stream: Any) -> None:
            launched.append(self)

    launched: list[Any] = []
    calls = {name: f"call of {name}" for name in ("ours", "uncapturable")}
    computed = []

    def graph(call: Any, placements: int, stream: Any, *, first_calls: int) -> tuple[Any, int]:
        call(0)
        if call is eager:
            raise RuntimeError("operation not permitted")
        return Graph(), 8

    def replay(graph: Any, stream: Any) -> float:
        graph.launch(stream)
        return 1.0 if isinstance(graph, Graph) else 2.0

    def eager(i: int) -> str:
        computed.append(i)
        return calls["uncapturable"]

    def wrong(outputs: Any) -> None:
        raise race.Wrong("y is off")

    def broken() -> Any:
        raise TypeError("no such argument")

    monkeypatch.setattr(cupy.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer: pointer)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(_bench, "copy_rings", lambda nbytes, placements: ([], []))
    monkeypatch.setattr(_bench, "copy_candidates", lambda *rings: {"copy": lambda i: None})
    monkeypatch.setattr(_bench, "l2_filler", lambda: lambda i: None)
    monkeypatch.setattr(_bench, "_graph", graph)
    monkeypatch.setattr(_bench, "_replay", replay)
    fine = candidate("ours")
    timing = race.time_on_gpu(
        {
            "ours": fine,
            "broken": fine._replace(make=broken),
            "wrong": fine._replace(make=lambda: lambda i: "y", check=wrong),
            "uncapturable": fine._replace(make=lambda: eager),
        },
        64,
        4,
        3,
    )
    assert timing.failures == {"broken": "TypeError: no such argument", "wrong": "Wrong: y is off"}
    assert timing.uncaptured == {"uncapturable": "RuntimeError: operation not permitted"}
    assert timing.seconds == {"ours": [1 / 8] * 3, "uncapturable": [2 / 4] * 3}
    assert timing.copies == {"copy": [1 / 8] * 3}
    assert computed == [0, 0, *[0, 1, 2, 3] * 3]
    assert len(synchronized) >= 4


@pytest.mark.parametrize("name", ["compare", "backward", "host", "sweep", "sweep_backward"])
def test_a_command_says_why_it_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "host":
        pytest.importorskip("cupy")
        pytest.importorskip("torch")
    monkeypatch.setattr(race._info, "available", lambda: (False, "no NVIDIA driver was found"))
    with pytest.raises(SystemExit, match="needs a GPU: no NVIDIA driver was found"):
        importlib.import_module(f"benchmarks.{name}").main([])


def test_instructions_are_not_counted_without_a_disassembler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(instructions.compiled, "disassembler", lambda: None)
    with pytest.raises(SystemExit, match="needs nvdisasm: pip install nvidia-cuda-nvdisasm"):
        instructions.main(["--json", str(tmp_path / "instructions.json")])
    assert not list(tmp_path.iterdir())


def test_instructions_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instructions.compiled, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(instructions.compiled, "versions", lambda: {"nvrtc": "12.9"})
    monkeypatch.setattr(instructions, "rows", lambda: [{"impl": "f32"}, {"impl": "f32x4"}])
    instructions.main(["--json", str(tmp_path / "instructions.json")])
    assert json.loads((tmp_path / "instructions.json").read_text()) == {
        "meta": {"nvrtc": "12.9"},
        "rows": [{"impl": "f32"}, {"impl": "f32x4"}],
    }


# Baselines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_baselines_compute_what_is_expected(op: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import baselines

    with torch.no_grad():
        data = baselines.ForwardData(Shape(op, dtype, 1100, 24), 2, "cpu")
        found = baselines.forward(data, ["liger", "quack", "flashinfer"])
        assert list(found) == ["ours", "torch", "liger", "quack", "flashinfer"]
        for impl in ("ours", "torch"):
            call = found[impl].make()
            for i in (0, 1):
                found[impl].check(call(i))
            with pytest.raises(race.Wrong, match="y is off by"):
                found[impl].check([call(0)[0] * 1.1, *call(0)[1:]])


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm"])
def test_backward_baselines_compute_what_is_expected(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import baselines

    monkeypatch.setattr(baselines, "compiled", lambda function: function)
    with torch.no_grad():
        shape = Shape(f"{op}_backward", "float32", 1100, 24)
        data = baselines.BackwardData(shape, 2, "cpu")
        ours, formula = baselines.ours_backward(data), baselines._compiled_backward(data)
        for call in (ours, formula):
            for i in (0, 1):
                data.check(call(i))
            dx, dweight, *dbias = call(0)
            with pytest.raises(race.Wrong, match="dweight is off by"):
                data.check((dx, dweight * 1.1, *dbias))


def test_the_data_of_a_race() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import baselines

    data = baselines.ForwardData(Shape("add_rms_norm", "bfloat16", 1100, 24), 3, "cpu")
    for tensors in (data.x, data.y, data.residual, data.residual_out):
        starts = [tensor.data_ptr() for tensor in tensors]
        pitch = starts[1] - starts[0]
        assert pitch >= 1100 * 24 * 2
        assert pitch % 512 == 0
        assert starts[2] - starts[1] == pitch
        assert tensors[0].shape == (1100, 24)
    assert all(torch.equal(data.x[0], other) for other in data.x)
    assert not torch.equal(data.x[0], data.residual[0])
    assert torch.equal(data.x[0][0], data.x[0][baselines.BLOCK_ROWS])
    assert not torch.equal(data.x[0][0], data.x[0][1])


def test_outputs_are_kept_until_their_placement_comes_round() -> None:
    torch = pytest.importorskip("torch")
    import weakref

    from benchmarks import baselines

    xs = [torch.zeros(8) for _ in range(3)]
    call = baselines.keeping(lambda x: (x + 1,), (xs,), 1)
    alive = [weakref.ref(call(i)[0]) for i in range(3)]
    assert all(reference() is not None for reference in alive)
    call(1)
    assert [reference() is None for reference in alive] == [False, True, False]


# Bars ------------------------------------------------------------------------------------------


def falling_short(bars: list[race.Bar]) -> list[str]:
    return [bar.what for bar in bars if not bar.holds]


@pytest.mark.parametrize(
    ("ours", "peer", "short"),
    [
        (100.0, 99.1, []),
        (100.0, 98.9, ["us, at or ahead of quack"]),
        (2.0, 1.96, []),
        (2.0, 1.94, ["us, at or ahead of quack"]),
    ],
)
def test_at_or_ahead(ours: float, peer: float, short: list[str]) -> None:
    shape = FAST if ours > 5 else SMALL
    rows = rows_of(shape, 0.98 * ours, ours=ours, torch=2 * ours, quack=peer)
    assert falling_short(compare.bars(rows)) == short


@pytest.mark.parametrize(
    ("shape", "ratio"),
    [
        (FAST, 0.97),
        (FAST._replace(op="add_rms_norm"), 0.97),
        (FAST._replace(op="layer_norm"), 0.96),
        (Shape("layer_norm", "bfloat16", 4096, 32768), 0.95),
        (Shape("rms_norm_backward", "bfloat16", 16384, 4096), 0.95),
        (Shape("rms_norm_backward", "bfloat16", 131072, 128), 0.90),
        (Shape("rms_norm_backward", "bfloat16", 4096, 32768), 0.85),
        (Shape("layer_norm_backward", "float32", 8192, 4096), 0.90),
        (Shape("layer_norm_backward", "bfloat16", 131072, 128), 0.85),
        (Shape("add_rms_norm_backward", "bfloat16", 4096, 32768), 0.93),
    ],
)
def test_ratios_that_are_demanded(shape: Shape, ratio: float) -> None:
    bars = backward.bars if shape.backward else compare.bars
    for change, short in ((0.001, []), (-0.001, ["of the copy's rate"])):
        rows = rows_of(shape, 100 * (ratio + change), ours=100.0)
        assert falling_short(bars(rows)) == short


def test_small_shapes_are_not_held_against_the_copy() -> None:
    assert compare.bars(rows_of(SMALL, 1.0, ours=2.0)) == []


def test_margins_over_peers() -> None:
    half = Shape("rms_norm", "float16", 4096, 512)
    assert falling_short(compare.bars(rows_of(half, 3.5, ours=3.9, quack=4.0))) == [
        "us, ahead of quack by 4 %"
    ]
    assert not falling_short(compare.bars(rows_of(half, 3.5, ours=3.8, quack=4.0)))
    small = Shape("rms_norm_backward", "bfloat16", 128, 8192)
    assert falling_short(backward.bars(rows_of(small, 4.0, ours=8.0, torch=13.0, liger=20.0))) == [
        "times faster than torch"
    ]
    assert not falling_short(backward.bars(rows_of(small, 4.0, ours=8.0, torch=14.0)))


def test_odd_sizes_against_their_neighbours() -> None:
    odd = Shape("rms_norm", "bfloat16", 8192, 4097)
    even = rows_of(odd._replace(hidden_size=4096), 30.0, ours=30.0)
    for us, short in ((39.0, []), (41.0, ["of the rate of 4096"])):
        assert falling_short(compare.bars(even + rows_of(odd, 30.0, ours=us))) == short


def test_options_against_the_plain_call() -> None:
    def rows(bias: float, half: float) -> list[race.Result]:
        return [
            row(FAST, "copy", 64.0, 64.0, "plain"),
            row(FAST, "ours", 65.0, 64.0, "plain"),
            row(FAST, "ours", bias, 64.0, "bias"),
            row(FAST._replace(dtype="float16"), "ours", half, 64.0, "plain"),
        ]

    assert falling_short(compare.bars(rows(66.2, 65.5))) == []
    assert falling_short(compare.bars(rows(66.4, 65.5))) == ["of the plain time"]
    assert falling_short(compare.bars(rows(66.2, 64.3))) == ["float16 against bfloat16, time"]


def test_the_summary_names_what_falls_short(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(FAST, 64.0, ours=70.0, quack=66.0) + rows_of(SMALL, 1.2, ours=1.5, quack=1.9)
    race.show(compare.bars(rows), rows)
    shown = capsys.readouterr().out
    assert re.search(r"16384x4096 .* SHORT: us, at or ahead of quack, of the copy's rate\n", shown)
    assert re.search(r"16x4096 .* ok\n", shown)
    assert "1 of 3 bars hold\n" in shown


# Report ----------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> report.Results:
    odd = Shape("rms_norm", "bfloat16", 8192, 4097)
    meta = {"device": "Some GPU", "cupy": "14.2.0", "torch": "2.11", "quack": "0.6.5", "date": "D"}
    rows = [
        *rows_of(FAST, 64.0, ours=65.0, quack=66.0),
        *rows_of(odd, 17.0, ours=20.0),
        *rows_of(odd._replace(hidden_size=4096), 16.0, ours=16.0),
        row(FAST, "ours", 65.0, 64.0, "plain"),
        row(FAST, "ours", 66.3, 64.0, "bias"),
    ]
    gradients = rows_of(shapes.BACKWARD[0], 96.0, ours=100.0, torch=200.0)
    for name, content in (("compare", rows), ("backward", gradients)):
        text = race.dumps({"meta": meta, "rows": content})
        (tmp_path / f"{name}.json").write_text(text)
    return report.Results(tmp_path)


def filled(name: str, results: report.Results) -> list[str]:
    text = f"before\n<!-- begin {name} -->\nold\n<!-- end {name} -->\nafter\n"
    lines = report.fill(text, results).split("\n")
    assert lines[:2] == ["before", f"<!-- begin {name} -->"]
    assert lines[-3:] == [f"<!-- end {name} -->", "after", ""]
    return lines[3:-4]


def test_report_of_forward_and_backward(results: report.Results) -> None:
    assert filled("rms_norm", results) == [
        "|  | copy, us | ours, us | this library | QuACK |",
        "| --- | --- | --- | --- | --- |",
        "| bf16 16384 x 4096 | 64.00 | 65.00 | **0.98** | 0.97 |",
    ]
    assert filled("backward", results)[2:] == [
        "| `rms_norm_backward` bf16 16384 x 4096 | 96.00 | 100.00 | **0.96** | 0.48 |"
    ]
    assert filled("layer_norm", results) == [report.PENDING]


def test_report_of_options_and_odd_sizes(results: report.Results) -> None:
    assert filled("options", results)[2:] == ["| `rms_norm` bf16 16384 x 4096 | 1.020 |"]
    assert filled("odd", results)[2:] == ["| `rms_norm` bf16 8192 x 4097 | 4096 | 20.00 | 0.80 |"]
    assert filled("meta", results) == ["Some GPU, CuPy 14.2.0, torch 2.11, QuACK 0.6.5, D."]


def test_report_of_steps(tmp_path: Path) -> None:
    ours = {"case": "decode", "impl": "ours", "us": 2000.0}
    theirs = {"case": "decode", "impl": "torch", "us": 2601.4}
    theirs |= {"gain_us": 600.4, "gain_low_us": 598.0, "gain_high_us": 603.0}
    (tmp_path / "models.json").write_text(race.dumps({"meta": {}, "rows": [ours, theirs]}))
    assert filled("steps", report.Results(tmp_path)) == [
        "| ms | this library | torch |",
        "| --- | --- | --- |",
        "| decode | 2.000 | 2.601 (+0.600, +0.598 to +0.603) |",
    ]


def test_report_of_the_demo(tmp_path: Path) -> None:
    small = Shape("rms_norm", "bfloat16", 36, 576)
    half = Shape("rms_norm", "float16", 4096, 4096)
    rows = rows_of(small, 1.5, ours=2.0) + rows_of(half, 18.0, ours=18.75)
    meta = {"device": "Some GPU", "cupy": "14.2.0", "date": "D"}
    (tmp_path / "demo.json").write_text(race.dumps({"meta": meta, "rows": rows}))
    assert filled("demo", report.Results(tmp_path)) == [
        "|  | copy, us | this library, us | of the copy's speed |",
        "| --- | --- | --- | --- |",
        "| `rms_norm` bf16 36 x 576 | 1.50 | 2.00 | **0.75** |",
        "| `rms_norm` f16 4096 x 4096 | 18.00 | 18.75 | **0.96** |",
        "",
        "Some GPU, CuPy 14.2.0, D; [benchmarks/results/demo.json](benchmarks/results/demo.json).",
    ]


def test_a_demo_without_a_gpu_is_not_reported(tmp_path: Path) -> None:
    rows = [{**row(SMALL, "ours", 900.0, 0.0), "ratio": None}]
    meta = {"device": "CPU", "cupy": None, "date": "D"}
    (tmp_path / "demo.json").write_text(race.dumps({"meta": meta, "rows": rows}))
    text = "<!-- begin demo -->\n<!-- end demo -->"
    assert report.fill(text, report.Results(tmp_path)) == text


def test_report_is_stable(results: report.Results) -> None:
    text = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in report.BLOCKS)
    once = report.fill(text, results)
    assert once != text
    assert report.fill(once, results) == once


def test_report_without_results(tmp_path: Path) -> None:
    empty = report.Results(tmp_path)
    for name in set(report.BLOCKS) - {"demo"}:
        assert filled(name, empty) == [report.PENDING]
    nothing = "<!-- begin demo -->\n<!-- end demo -->"
    assert report.fill(nothing.replace("\n", "\nold\n"), empty) == nothing


def test_plots_are_the_same_each_time(results: report.Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = [[path.read_bytes() for path in report.draw(results, tmp_path / name)] for name in "ab"]
    assert len(drawn[0]) == 2
    assert drawn[0] == drawn[1]


def test_the_documents_are_up_to_date() -> None:
    """`python -m benchmarks.report` has been run after the results changed."""
    found = []
    for path in report.DOCUMENTS:
        text = path.read_text()
        marks = re.findall(r"^<!-- (begin|end) (\w+) -->$", text, re.MULTILINE)
        assert marks[::2] == [("begin", name) for _, name in marks[1::2]]
        found += [name for _, name in marks[1::2]]
        assert report.fill(text, report.Results()) == text
    assert sorted(found) == sorted(report.BLOCKS)


# qk_norm and masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [40, 1200])
def test_qk_norm_is_raced_against_two_calls(rows: int) -> None:
    pytest.importorskip("torch")
    from benchmarks import baselines

    found = baselines.qk_norm(Shape("qk_norm", "bfloat16", rows, 128), 2, "cpu")
    assert list(found) == ["one launch", "two calls"]
    for each in found.values():
        call = each.make()  # with the values as they were: both work in place
        outputs = call(0)
        each.check(outputs)
        with pytest.raises(race.Wrong, match=r"^k is off"):
            each.check((outputs[0], outputs[1] * 1.1))


def test_masked_rows_are_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchmarks import baselines

    monkeypatch.setattr(baselines, "MASKED_ROWS", 60)
    found = baselines.masked(Shape("rms_norm", "bfloat16", 20, 24), 2, "cpu")
    assert len(found) == 5
    for each in found.values():
        (y,) = each.make()(0)
        each.check((y,))
        assert int(y.isfinite().all(-1).sum()) == 20, "other rows stay as they were"
        with pytest.raises(race.Wrong, match=r"^y is (off|not the rows of x)"):
            each.check((y * 1.1,))


def test_bars_of_qk_norm_and_masks() -> None:
    large, small = shapes.QK[:2]
    mask = shapes.MASKED[0]
    rows = [
        row(large, "ours", 10.0, 9.6, "one launch"),
        row(large, "ours", 9.0, 9.6, "two calls"),
        row(small, "ours", 2.0, 1.0, "one launch"),
        row(small, "ours", 1.9, 1.0, "two calls"),
        row(mask, "ours", 10.0, 9.0, "valid_rows"),
        row(mask, "ours", 10.0, 9.0, "where, scattered"),
        row(mask, "copy of rows", 9.7, 9.0, "copy, scattered"),
    ]
    found = {(bar.shape, bar.what): bar.holds for bar in compare.bars(rows)}
    assert sum(found.values()) == 2
    copy, these = "of the copy's rate", "of a copy of these rows"
    assert found[f"{large} one launch", copy]
    assert not found[f"{small} one launch", "us, 1 tokens, ahead of two calls"]
    assert not found[f"{mask} valid_rows", copy]
    assert not found[f"{mask} where, scattered", copy]
    assert found[f"{mask} where, scattered", these]
    assert len(found) == 5


# The study under pytest-benchmark -------------------------------------------------------------

FAKE_GPU = """
import contextlib
from types import SimpleNamespace

import cupy

from cupy_rmsnorm import _bench, _info

_info.available = lambda: (True, "")
cupy.cuda.Stream = lambda non_blocking: contextlib.nullcontext()
cupy.cuda.Device = lambda: SimpleNamespace(synchronize=lambda: None)
_bench._graph = lambda call, placements, stream: (call, 4)
_bench._replay = lambda graph, stream: graph(0)
_bench.l2_filler = lambda: lambda i: None


def pytest_collection_modifyitems(items):
    calls = {("rms_norm", "f32"): lambda i: 16e-6, ("rms_norm", "f32x4"): lambda i: 8e-6}
    items[0].module._candidates = lambda case, dtype: (2, 4096 * 512 * 8, calls)
"""


def run_study(folder: Path, *options: str) -> str:
    """pytest on one group of the study, of which two kernels run on a GPU that is not there."""
    (folder / "fake_gpu.py").write_text(FAKE_GPU)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "fake_gpu", "-p", "no:cacheprovider"),
            *("benchmarks/test_study.py", f"--benchmark-storage=file://{folder / 'stored'}"),
            *("-k", "4096x512-float32-rms_norm"),
            *options,
        ],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_study_under_pytest_benchmark(tmp_path: Path) -> None:
    """Seconds of one launch, a group a case, bytes and GB/s; what does not run is skipped."""
    pytest.importorskip("cupy")
    pytest.importorskip("pytest_benchmark")
    written = tmp_path / "study.json"
    kept = run_study(tmp_path, "--benchmark-autosave", f"--benchmark-json={written}")
    assert "2 passed, 12 skipped" in kept
    found = {
        row["extra_info"]["impl"]: row for row in json.loads(written.read_text())["benchmarks"]
    }
    assert set(found) == {"f32", "f32x4"}
    for name, seconds in (("f32", 4e-6), ("f32x4", 2e-6)):
        row = found[name]
        assert row["stats"]["median"] == pytest.approx(seconds)
        assert row["group"] == "4096x512 float32 rms_norm"
        assert row["extra_info"]["bytes"] == 4096 * 512 * 8
        assert row["extra_info"]["gb_per_second"] == pytest.approx(4096 * 512 * 8 / seconds / 1e9)
    compared = run_study(tmp_path, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert compared.count("(NOW)") == 2
    assert "2 passed" in run_study(tmp_path, "--benchmark-disable")


@pytest.mark.parametrize(
    ("ours", "holds"), [(4.5, True), (4.6, False), (None, False)], ids=["fast", "slow", "missing"]
)
def test_bars_on_host_cost_name_what_they_demand(
    ours: float | None, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("torch")
    from benchmarks import host

    bar = host.Bar(host.CUPY_OUT, 1.5, host.LAUNCH)
    times = {host.LAUNCH: 3.01} | ({} if ours is None else {host.CUPY_OUT: ours})
    verdict = bar.verdict(times)
    demand = "rms_norm ours cupy out=: at most 1.50 of launch driver packed, the kernel of rms_norm"
    assert (verdict["bar"], verdict["holds"]) == (demand, holds)
    json.dumps(verdict, allow_nan=False)
    host.show_bars([verdict])
    shown = capsys.readouterr().out
    assert demand in shown
    assert f"{holds:d} of 1 bars hold" in shown
    assert ("not measured" in shown) == (ours is None)


def test_a_sweep_keeps_the_shapes_that_it_does_not_sweep_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import sweep

    def row(hidden_size: int, us: float) -> dict[str, Any]:
        place = {"op": "rms_norm", "dtype": "float16", "rows": 2, "hidden_size": hidden_size}
        return place | {"impl": "copy", "us": us}

    earlier, out = tmp_path / "earlier.json", tmp_path / "out.json"
    content = {"meta": {"commit": "before"}, "rows": [row(8, 1.0), row(16, 2.0)]}
    earlier.write_text(json.dumps(content))
    monkeypatch.setattr(race, "need_gpu", lambda: None)
    monkeypatch.setattr(race, "meta", lambda rounds, commit: {"commit": commit})
    shapes = [("rms_norm", "float16", 2, 8), ("rms_norm", "float16", 2, 16)]
    arguments = ["--only", "2x16", "--commit", "now", "--resume", str(earlier), "--json", str(out)]
    sweep.run_sweeps("", shapes, lambda *shape: [row(shape[3], 3.0)], str, arguments)
    written = json.loads(out.read_text())
    assert written["meta"] == {"commit": "now"}
    assert written["rows"] == [{"commit": "before"} | row(8, 1.0), row(16, 3.0)]
