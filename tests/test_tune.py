# SPDX-License-Identifier: Apache-2.0
"""`cupy-rmsnorm tune`: what it measures, what it chooses, and that its file loads.

Without a GPU the emulator runs every candidate, and a table stands in for the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _bench, _info, _kernel, _plan_file, _tune, cli
from cupy_rmsnorm._kernel import DeviceProperties
from cupy_rmsnorm._plan import Plan
from cupy_rmsnorm._plan_file import OPS, Key
from tests import calls, compare, emulator, inputs
from tests.backends import Cupy, skip_without
from tests.calls import Case, Gradient

OWN, A, B = (Plan("norm_forward", 8, 1, threads) for threads in (512, 256, 128))


# What is chosen -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({16: (100, 100, 100)}, OWN),
        ({16: (100, 99, 98.1)}, OWN),  # within the margin
        ({16: (100, 97, 96)}, B),
        ({16: (100, 96, 97)}, A),
        ({16: (100, 50, 101), 4096: (100, 102, 90)}, B),  # a loses where it must not
        ({16: (100, 50, 101.5), 4096: (100, 102, 50)}, OWN),
        ({16: (1, 1.005, 1), 4096: (1000, 940, 980)}, A),
        ({16: (100, 98, 98), 4096: (100, 97.9, 98.2)}, A),  # in the mean
        ({16: (100, 98, 98), 4096: (100, 98.2, 98.2)}, OWN),
    ],
)
def test_the_own_plan_stays_unless_another_is_faster(
    times: Mapping[int, tuple[float, ...]], expected: Plan
) -> None:
    measured = {rows: dict(zip((OWN, A, B), each, strict=True)) for rows, each in times.items()}
    assert _tune.choose(OWN, (A, B), measured) == expected
    assert _tune.choose(OWN, (), measured) == OWN


def test_what_is_tuned() -> None:
    found = _tune.jobs(
        ["rms_norm", "rms_norm_backward"], ["float16", "float16"], [4096, 2**30], None
    )
    assert [(job.op, job.hidden_size, job.rows) for job in found] == [
        ("rms_norm", 4096, (16, 8192)),
        ("rms_norm_backward", 4096, (8192,)),
        ("rms_norm", 2**30, (16, 1)),
        ("rms_norm_backward", 2**30, (1,)),
    ]
    (job,) = _tune.jobs(["add_rms_norm"], ["float32"], [64], [7, 7, 100])
    assert job.rows == (7, 100)
    assert job.key == Key(OPS["add_rms_norm"], 64, ("float32", "float32"))


# The command --------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Runs the command in a folder of its own; gives status, output, error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = cli.main(["tune", *arguments])
        except SystemExit as error:  # of argparse
            status = int(error.code or 0)
        return (status, *capsys.readouterr())

    yield run
    norms.load_plans(None)


SIZES = ("--hidden-size", "64", "--dtype", "float16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: --hidden-size, --dtype, --json"),
        ((*SIZES,), "required: --json"),
        (("--hidden-size", "0", "--dtype", "float16", "--json", "p"), "must be at least 1, got 0"),
        (("--hidden-size", "x", "--dtype", "float16", "--json", "p"), "invalid count value"),
        (("--hidden-size", "64", "--dtype", "int8", "--json", "p"), "invalid choice: 'int8'"),
        ((*SIZES, "--op", "qk_norm", "--json", "p"), "invalid choice: 'qk_norm'"),
        ((*SIZES, "--rows", "-1", "--json", "p"), "must be at least 1, got -1"),
    ],
)
def test_wrong_arguments(run: Run, arguments: tuple[str, ...], message: str) -> None:
    status, _, error = run(*arguments)
    assert status == 2
    assert message in error


def test_without_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info, "available", lambda: (False, "there is none"))
    status, _, error = run(*SIZES, "--json", "plans.json")
    assert (status, error) == (2, "cupy-rmsnorm: tuning needs a GPU: there is none\n")
    assert not Path("plans.json").exists()


def host(array: Any) -> np.ndarray:
    return emulator.host_view(array)


def fill(rings: Any) -> None:
    for ring in rings:
        for array in ring:
            values = np.random.default_rng(0).standard_normal(array.shape)
            host(array)[...] = values.astype(array.dtype)


def constant(array: Any, value: float) -> None:
    host(array)[...] = value


def agree(array: Any, expected: Any) -> bool:
    return bool((abs(host(array).astype("f8") - expected) <= 0.01 * abs(expected).max()).all())


class Clock:
    """In place of `_bench.race`: runs every candidate, and has its seconds from a function."""

    def __init__(self) -> None:
        self.seconds: Callable[[str], float] = lambda name: 1e-6
        self.rounds: list[tuple[int, tuple[str, ...]]] = []

    def race(
        self, candidates: Mapping[str, _bench.Call], *, nbytes: int, placements: int, rounds: int
    ) -> dict[str, float]:
        for call in candidates.values():
            for i in range(placements):
                call(i)
        self.rounds.append((rounds, tuple(candidates)))
        return {**{name: self.seconds(name) for name in candidates}, "copy": 5e-7}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """An emulated GPU on which seconds are what the test says."""
    reason = emulator.missing()
    if reason is not None:
        pytest.skip(reason)
    stand_in = Clock()
    device = DeviceProperties(90, 4, "An emulated GPU")
    with emulator.installed(arch=90, sm_count=4, checked=False):
        for target, name, value in (
            (_kernel, "device_properties", lambda index: device),
            (_kernel, "devices", lambda: [device]),
            (_info, "available", lambda: (True, "")),
            (_bench, "race", stand_in.race),
            (_bench, "placement_count", lambda nbytes: 2),
            (_tune, "fill", fill),
            (_tune, "constant", constant),
            (_tune, "poison", lambda array: constant(array, np.nan)),
            (_tune, "copied", lambda array: host(array).astype("f8")),
            (_tune, "agree", agree),
            (_tune, "_free_memory", lambda: None),
        ):
            monkeypatch.setattr(target, name, value)
        yield stand_in


def key_of(op: str, hidden_size: int, dtype: str) -> Key:
    return Key(OPS[op], hidden_size, len(OPS[op].dtypes) * (dtype,))


@pytest.mark.parametrize("op", OPS)
def test_the_fastest_candidate_is_written_and_loads(run: Run, clock: Clock, op: str) -> None:
    key = key_of(op, 128, "float16")
    own, *others = key.candidates(90)
    fastest = others[0]
    clock.seconds = lambda name: 8e-7 if name == str(fastest) else 1e-6
    status, out, error = run(
        *("--op", op, "--hidden-size", "128", "--dtype", "float16", "--rows", "3", "5"),
        *("--json", "plans.json"),
    )
    assert (status, error) == (0, "")
    # All candidates for each number of rows, then the own plan and the fast one once more.
    names = tuple(map(str, (own, *others)))
    assert clock.rounds == [(3, names), (3, names)] + 2 * [(7, (str(own), str(fastest)))]
    assert f"{op} float16 128: {fastest.kernel} {fastest.threads_per_row} x " in out
    assert "5 rows: 0.80 us, 0.62 of a copy, before 1.00 us" in out
    assert "1 plans, 1 of them not the library's own" in out
    assert "cupy_rmsnorm.load_plans('plans.json')" in out

    document = json.loads(Path("plans.json").read_text())
    assert document["meta"]["device"] == "An emulated GPU"
    assert document["meta"]["cupy_rmsnorm"] == norms.__version__
    assert document["plans"] == [
        {
            "op": op,
            "hidden_size": 128,
            "dtypes": dict.fromkeys(OPS[op].dtypes, "float16"),
            "plan": dataclasses.asdict(fastest),
        }
    ]
    place = {"op": op, "dtype": "float16", "rows": 5, "hidden_size": 128}
    assert document["rows"][3:] == [
        {**place, "impl": "copy", "us": 0.5, "ratio": 1.0},
        {**place, "impl": "default", "us": 1.0, "ratio": 0.5},
        {**place, "impl": "ours", "us": 0.8, "ratio": 0.625},
    ]
    norms.load_plans("plans.json")
    loaded = _plan_file.loaded()
    assert loaded is not None
    assert loaded.plans == {key: fastest}
    assert [path.name for path in Path().iterdir()] == ["plans.json"]


def test_the_own_plan_is_written_where_none_is_faster(run: Run, clock: Clock) -> None:
    clock.seconds = lambda name: 1e-6
    _, out, _ = run(*SIZES, "--rows", "3", "--json", "plans.json")
    assert len(clock.rounds) == 1, "nothing to measure again"
    assert ", as before\n    3 rows: 1.00 us, 0.50 of a copy\n" in out
    norms.load_plans("plans.json")
    loaded = _plan_file.loaded()
    assert loaded is not None
    key = key_of("rms_norm", 64, "float16")
    assert loaded.plans == {key: key.candidates(90)[0]}


def test_a_candidate_that_fails_or_computes_something_else_is_left_out(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, failing = key_of("rms_norm", 1024, "float16").candidates(90)[1:3]
    call = _tune.Trial.call

    def faulty(trial: _tune.Trial, plan: Plan) -> _bench.Call:
        run = call(trial, plan)

        def spoiled(i: int) -> None:
            if plan == failing:
                raise RuntimeError("too many resources\nrequested")
            run(i)
            if plan == wrong:
                host(trial.rings["y"][i])[2, 7] += 1

        return spoiled

    monkeypatch.setattr(_tune.Trial, "call", faulty)
    clock.seconds = lambda name: 1e-9 if name == str(wrong) else 1e-6
    sizes = ("--hidden-size", "1024", "--dtype", "float16")
    status, out, _ = run(*sizes, "--rows", "3", "--json", "plans.json")
    assert status == 0
    assert f"Left out: {wrong}: its result is another one\n" in out
    assert f"Left out: {failing}: RuntimeError: too many resources\n" in out
    assert not {str(wrong), str(failing)} & {name for _, names in clock.rounds for name in names}
    norms.load_plans("plans.json")


def test_a_budget_and_a_second_run(run: Run, clock: Clock) -> None:
    sizes = ("--hidden-size", "64", "8", "--dtype", "float16", "--rows", "2")
    assert run(*sizes, "--json", "plans.json")[0] == 0
    before = Path("plans.json").read_bytes()
    assert len(json.loads(before)["plans"]) == 2
    status, out, _ = run(*sizes, "--json", "plans.json", "--budget", "-1")
    assert status == 0
    assert "0 plans" in out
    assert "Left out after -1 s: rms_norm float16 64, rms_norm float16 8\n" in out
    assert Path("plans.json").read_bytes() == before, "a file is replaced by one with a plan"


def test_a_file_that_cannot_be_written_is_an_error_before_the_work(run: Run, clock: Clock) -> None:
    status, _, error = run(*SIZES, "--json", "missing/plans.json")
    assert status == 2
    assert error == "cupy-rmsnorm: cannot write missing/plans.json: No such file or directory\n"
    assert not clock.rounds


# On a GPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file of this GPU, made in a few seconds."""
    skip_without("cupy")
    path = tmp_path_factory.mktemp("tuned") / "plans.json"
    command = ["tune", "--hidden-size", "1000", "--dtype", "float32", "bfloat16"]
    command += ["--op", "rms_norm", "add_layer_norm", "rms_norm_backward"]
    command += ["--rows", "64", "--budget", "8", "--json", str(path)]
    assert cli.main(command) == 0
    return path


@pytest.fixture
def other_plans(tuned: Path, tmp_path: Path) -> Path:
    """The same file with, for each of its calls, a plan that is not the library's own."""
    document = json.loads(tuned.read_text())
    arch = _kernel.device_properties(0).arch
    for entry in document["plans"]:
        key = key_of(entry["op"], entry["hidden_size"], entry["dtypes"]["x"])
        entry["plan"] = dataclasses.asdict(key.candidates(arch)[-1])
    path = tmp_path / "others.json"
    path.write_text(json.dumps(document))
    return path


@contextlib.contextmanager
def loaded(path: Path | None) -> Iterator[None]:
    norms.load_plans(path)
    try:
        yield
    finally:
        norms.load_plans(None)


def forward(rows: slice, layout: str, dtype: str, hidden_size: int, op: str) -> np.ndarray:
    """y of some rows, held against the oracle."""
    device = Cupy()
    values = inputs.array((9, hidden_size), dtype, "row_tagged")[rows]
    residual = inputs.lay(inputs.array((9, hidden_size), dtype, seed=1)[rows], layout)
    case = Case(
        x=inputs.lay(values, layout),
        norm="layer" if "layer" in op else "rms",
        weight=inputs.weight((hidden_size,), dtype),
        residual=residual if op.startswith("add") else None,
    )
    got = calls.forward(device, case, statistics=True)
    calls.check_forward(case, got)
    device.verify()
    return got["y"]


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["tuned", "other_plans"])
def test_promises_hold_with_a_plan_file(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    entries = json.loads(path.read_text())["plans"]
    assert entries
    for entry in entries:
        op, size, dtype = entry["op"], entry["hidden_size"], entry["dtypes"]["x"]
        if op.endswith("_backward"):
            x, dout = (inputs.array((50, size), dtype, seed=seed) for seed in (0, 1))
            case = Case(x=x, norm="rms", weight=inputs.weight((size,), dtype))
            gradient = Gradient(dout=dout)
            with loaded(path):
                first, second = (calls.backward(Cupy(), case, gradient) for _ in range(2))
            calls.check_backward(case, gradient, first)
            for name in ("dx", "dweight"):
                compare.equal(second[name], first[name], name)
            continue
        with loaded(path):
            whole = forward(slice(None), "contiguous", dtype, size, op)
            for layout in ("contiguous", "offset_1", "row_gap_8"):
                again = forward(slice(None), layout, dtype, size, op)
                compare.equal(again, whole, f"{op} {layout}")
            alone = forward(slice(5, 6), "contiguous", dtype, size, op)
            compare.equal(alone, whole[5:6], op)


@pytest.mark.gpu
def test_repeated_calls_take_the_loaded_plan(
    tuned: Path, other_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    launched: list[str] = []
    launch = _kernel.launch

    def seen(function: Any, *rest: Any) -> Any:
        made = launch(function, *rest)
        launched.append(functions.get(id(function), ""))
        return made

    functions: dict[int, str] = {}
    find = _kernel.function

    def named(specialisation: Any, *rest: Any) -> Any:
        found = find(specialisation, *rest)
        functions[id(found)] = specialisation.name_expression
        return found

    monkeypatch.setattr(_kernel, "launch", seen)
    monkeypatch.setattr(_kernel, "function", named)
    x = cupy.ones((32, 1000), "float32")  # the first entry of the file
    norms.rms_norm(x)
    norms.rms_norm(x)
    with loaded(other_plans):
        norms.rms_norm(x)
        norms.rms_norm(x)
    norms.rms_norm(x)
    own, other, back = launched  # what is repeated takes the short road
    assert own == back != other


@pytest.mark.gpu
def test_the_file_of_another_device_is_refused(tuned: Path, tmp_path: Path) -> None:
    document = json.loads(tuned.read_text())
    here = document["meta"]["device"]
    document["meta"]["device"] = "NVIDIA A100-SXM4-80GB"
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="was made on 'NVIDIA A100-SXM4-80GB', and here is") as got:
        norms.load_plans(path)
    assert here in str(got.value)
    assert norms.info()["plan_file"] is None
    with loaded(tuned):
        assert norms.info()["plan_file"] == str(tuned)
