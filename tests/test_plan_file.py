# SPDX-License-Identifier: Apache-2.0
"""Plan files: which are taken, which are refused and why, and what calls make of a loaded one."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_rmsnorm as norms
from cupy_rmsnorm import _candidates, _cuda_warmup, _info, _kernel, _plan_file, cli
from cupy_rmsnorm._check_tools import check_warmup
from cupy_rmsnorm._dtypes import ROW_DTYPES
from cupy_rmsnorm._kernel import DeviceProperties
from cupy_rmsnorm._plan import Plan
from cupy_rmsnorm._plan_file import OPS, Key
from tests import calls, emulator, inputs
from tests.backends import Emulator
from tests.calls import Case
from tests.recorder import recorded

DEVICE = "NVIDIA H200"
ARCH, SM_COUNT = 90, 132
HIDDEN_SIZES = (1, 64, 1000, 4096, 4097, 8192, 32768, 131072, 1_000_000)


def key_of(op: str, hidden_size: int, dtype: str) -> Key:
    return Key(OPS[op], hidden_size, len(OPS[op].dtypes) * (dtype,))


def entry(op: str, hidden_size: int, dtype: str, plan: Plan) -> dict[str, Any]:
    return {
        "op": op,
        "hidden_size": hidden_size,
        "dtypes": dict.fromkeys(OPS[op].dtypes, dtype),
        "plan": dataclasses.asdict(plan),
    }


def document(*entries: dict[str, Any]) -> dict[str, Any]:
    meta = {"device": DEVICE, "cupy_rmsnorm": norms.__version__, "date": "2026-11-30"}
    return {"meta": meta, "plans": list(entries), "rows": [{"impl": "ours"}]}


def other_plan(op: str, hidden_size: int, dtype: str) -> Plan:
    """A candidate whose sums have another order than those of the library's own plan."""
    own, *others = key_of(op, hidden_size, dtype).candidates(ARCH)
    return next(plan for plan in others if plan.threads_per_row != own.threads_per_row)


RMS = entry("rms_norm", 4096, "float16", other_plan("rms_norm", 4096, "float16"))
ADD = entry("add_layer_norm", 8192, "float32", other_plan("add_layer_norm", 8192, "float32"))
BACK = entry("rms_norm_backward", 4096, "float32", other_plan("rms_norm_backward", 4096, "float32"))


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    norms.load_plans(None)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    """Writes a plan file, on a machine with one GPU of this model."""
    monkeypatch.setattr(_info, "available", lambda: (True, ""))
    monkeypatch.setattr(_kernel, "devices", lambda: [DeviceProperties(ARCH, SM_COUNT, DEVICE)])

    def write(content: Any) -> Path:
        path = tmp_path / "plans.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


# What a file may hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("op", OPS)
def test_every_candidate_is_taken_and_the_own_plan_is_the_first(op: str, arch: int) -> None:
    for hidden_size, dtype in itertools.product(HIDDEN_SIZES, ROW_DTYPES):
        candidates = key_of(op, hidden_size, dtype).candidates(arch)
        assert len(set(candidates)) == len(candidates)
        for plan in candidates:
            written = json.loads(json.dumps([entry(op, hidden_size, dtype, plan)]))
            assert _plan_file.check_plans(written, arch) == {key_of(op, hidden_size, dtype): plan}


def test_there_is_something_to_choose_from() -> None:
    for op, dtype in itertools.product(OPS, ("bfloat16", "float32")):
        for hidden_size in (512, 4096, 8192):
            assert len(key_of(op, hidden_size, dtype).candidates(ARCH)) > 1, (op, hidden_size)


def changed(entry: dict[str, Any], **members: Any) -> dict[str, Any]:
    """A copy with other members, those of the plan among them; `absent` is left out."""
    entry = copy.deepcopy(entry)
    for name, value in members.items():
        into = entry["plan"] if name in entry["plan"] else entry
        if value is absent:
            del into[name]
        else:
            into[name] = value
    return entry


absent = object()
WHERE = "plans[0] (rms_norm, hidden size 4096, float16): "
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"op": "softmax"}, "op must be one of rms_norm, layer_norm"),
    ({"op": 1}, "op must be a string, got 1"),
    ({"op": absent}, "an entry must have op"),
    ({"plan": absent}, "an entry must have plan"),
    ({"note": "fast"}, 'an entry has "note", which nothing here is called'),
    ({"hidden_size": 4096.0}, "hidden_size must be an integer, got 4096.0"),
    ({"hidden_size": True}, "hidden_size must be an integer, got true"),
    ({"hidden_size": 0}, "hidden_size must be 1 to"),
    ({"hidden_size": -4096}, "hidden_size must be 1 to"),
    ({"hidden_size": 10**400}, "hidden_size must be 1 to"),
    ({"dtypes": {"x": "int32"}}, "dtypes: x must be one of float16, bfloat16, float32, float64"),
    ({"dtypes": {"x": None}}, "dtypes: x must be one of"),
    ({"dtypes": {}}, "dtypes must have x"),
    ({"dtypes": ["float16"]}, "dtypes must be an object"),
    (
        {"dtypes": {"x": "float16", "residual": "float16"}},
        'dtypes has "residual", which nothing here is called',
    ),
    ({"plan": []}, "plan must be an object, got []"),
    ({"kernel": 7}, "kernel must be a string, got 7"),
    ({"kernel": "norm_backward"}, "kernel must be one of norm_forward, norm_forward_staged"),
    ({"kernel": "x" * 10_000}, "kernel must be one of"),
    ({"vec_size": absent}, "plan must have vec_size"),
    ({"vec_size": 3}, "vec_size must be 8, got 3"),
    ({"vec_size": 4}, "vec_size must be 8, got 4"),
    ({"vec_size": "8"}, 'vec_size must be an integer, got "8"'),
    ({"vec_size": None}, "vec_size must be an integer, got null"),
    ({"threads_per_row": 0}, "threads_per_row must be 1 to 1024, got 0"),
    ({"threads_per_row": 2048}, "threads_per_row must be 1 to 1024, got 2048"),
    ({"threads_per_row": 100}, "threads_per_row must be a power of two up to 32 or whole warps"),
    ({"threads_per_row": 24}, "threads_per_row must be a power of two up to 32 or whole warps"),
    ({"threads_per_row": True}, "threads_per_row must be an integer, got true"),
    ({"threads_per_row": 10**30}, "threads_per_row must be 0 to 2147483647"),
    ({"threads_per_row": 256, "vecs_per_thread": 1}, "it holds 2048 elements of a row of 4096"),
    ({"vecs_per_thread": 0}, "vecs_per_thread must be at least 1, got 0"),
    ({"vecs_per_thread": -1}, "vecs_per_thread must be 0 to 2147483647"),
    ({"vecs_per_thread": 2.5}, "vecs_per_thread must be an integer, got 2.5"),
    ({"vecs_per_thread": 9}, "a thread holds at most 64 elements, not 72"),
    ({"cluster_size": 3}, "cluster_size must be one of (1, 2, 4, 8), got 3"),
    ({"cluster_size": 16}, "cluster_size must be one of (1, 2, 4, 8), got 16"),
    ({"cluster_size": 2}, "norm_forward has no clusters"),
    ({"early_weight": 1}, "early_weight must be true or false, got 1"),
    (
        {"kernel": "norm_forward_streamed"},
        "vecs_per_thread of a streamed row must be 0",
    ),
    (
        {"kernel": "norm_forward_staged", "threads_per_row": 1024, "vecs_per_thread": 30},
        "a block has 231424 bytes of shared memory, it needs 491520",
    ),
    # Fits, and no thread of it would be idle; but nobody has tested it.
    (
        {"kernel": "norm_forward_staged", "threads_per_row": 512, "vecs_per_thread": 1},
        "it is none of the plans that cupy-rmsnorm tune tries",
    ),
]


@pytest.mark.parametrize(("members", "reason"), FAULTS, ids=[reason for _, reason in FAULTS])
def test_a_wrong_entry_is_named(
    write: Callable[[Any], Path], members: dict[str, Any], reason: str
) -> None:
    path = write(document(changed(RMS, **members)))
    with pytest.raises(ValueError, match=r"^plan file .*plans\.json: plans\[0\]") as caught:
        norms.load_plans(path)
    message = str(caught.value)
    assert reason in message
    assert len(message) < 400
    if not {"op", "hidden_size", "dtypes", "plan", "note"} & set(members):
        assert WHERE in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 10_000, ""),
        ("[]", "the file must be an object, got []"),
        ("{}", "the file must have meta, plans"),
        ('{"meta": {}, "plans": []}', "meta must have cupy_rmsnorm, device"),
        ('{"meta": {"device": "x", "device": "y"}, "plans": []}', "two members of one name"),
        ('{"meta": {}, "plans": [], "rows": NaN}', "NaN is no number"),
        ('{"meta": {}, "plans": [], "more": 1}', 'the file has "more"'),
        (b" " * (2**24 + 1), "is longer than 16777216 bytes"),
        ({**document(), "plans": {}}, "plans must be a list, got {}"),
        (document(RMS, RMS), "there is another plan for the same calls"),
        ({**document(), "meta": {"device": 1, "cupy_rmsnorm": "0"}}, "meta: device must be a str"),
    ],
    ids=lambda value: value[:30] if isinstance(value, (str, bytes)) else "",
)
def test_a_wrong_file(write: Callable[[Any], Path], content: Any, reason: str) -> None:
    path = write(content)
    with pytest.raises(ValueError, match=r"^plan file .*plans\.json: ") as caught:
        norms.load_plans(path)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_entry_of_an_older_gpu(write: Callable[[Any], Path]) -> None:
    staged = next(
        plan
        for plan in key_of("rms_norm", 131072, "float16").candidates(90)
        if plan.cluster_size > 1
    )
    entries = [entry("rms_norm", 131072, "float16", staged)]
    with pytest.raises(ValueError, match="this GPU has no clusters, cluster_size must be 1, got"):
        _plan_file.check_plans(entries, 80)
    one_block = dataclasses.replace(
        other_plan("rms_norm", 32768, "float32"), kernel="norm_forward_staged"
    )
    one_block = dataclasses.replace(one_block, threads_per_row=1024, vecs_per_thread=8)
    assert _candidates.forward_fault(one_block, 32768, "float32", None, 90) == ""
    assert "a block has 64512 bytes of shared memory" in _candidates.forward_fault(
        one_block, 32768, "float32", None, 75
    )
    back = Plan("norm_backward", 4, 4, 1024)
    assert _candidates.backward_fault(back, 16384, "float32", 8, 90) == ""
    assert "shared memory, it needs" in _candidates.backward_fault(back, 16384, "float32", 8, 75)


def test_another_device_is_named(write: Callable[[Any], Path]) -> None:
    file = document(RMS)
    file["meta"]["device"] = "NVIDIA A100"
    with pytest.raises(ValueError, match=r"was made on 'NVIDIA A100', and here is 'NVIDIA H200'"):
        norms.load_plans(write(file))


def test_another_version_is_named(write: Callable[[Any], Path]) -> None:
    file = document(RMS)
    file["meta"]["cupy_rmsnorm"] = "0.0.9"
    with pytest.raises(ValueError, match=r"by cupy_rmsnorm 0\.0\.9, this is .*tune again"):
        norms.load_plans(write(file))


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info, "available", lambda: (False, "the machine has none"))
    (tmp_path / "plans.json").write_text(json.dumps(document(RMS)))
    with pytest.raises(RuntimeError, match=r"GPU's model, and there is none here: the machine"):
        norms.load_plans(tmp_path / "plans.json")
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        norms.load_plans(tmp_path / "missing.json")
    norms.load_plans(None)


def test_what_is_no_file(write: Callable[[Any], Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        norms.load_plans(tmp_path / "missing.json")
    with pytest.raises(TypeError, match="path must be a str or path-like, got int"):
        norms.load_plans(3)  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
def test_whatever_stands_in_a_file_it_is_refused_or_a_candidate(data: st.DataObject) -> None:
    file = copy.deepcopy(document(RMS, BACK))
    entry = file["plans"][data.draw(st.integers(0, 1))]
    into = data.draw(st.sampled_from([entry, entry["plan"], entry["dtypes"]]))
    name = data.draw(st.sampled_from(sorted(into)))
    small = st.integers(0, 2100) | st.sampled_from(sorted(OPS)) | st.sampled_from(ROW_DTYPES)
    into[name] = data.draw(small | JSON)
    try:
        content = json.dumps(file).encode()
        plans = _plan_file.check_plans(_plan_file.parse(content)["plans"], ARCH)
    except ValueError:
        return
    for key, plan in plans.items():
        assert plan in key.candidates(ARCH)


# What calls make of it ----------------------------------------------------------------------------


def specialisations(call: Callable[[], object]) -> list[str]:
    with recorded(ARCH, SM_COUNT) as launches:
        call()
    return [launch.specialisation.name_expression for launch in launches]


def test_only_calls_that_a_plan_is_for_take_it(write: Callable[[Any], Path]) -> None:
    x = np.ones((3, 4096), np.float16)
    single, long = np.ones((3, 4096), np.float32), np.ones((3, 8192), np.float32)
    taken = {
        "rms_norm": lambda: norms.rms_norm(x, np.ones(4096, np.float32)),
        "rms_norm_forward": lambda: norms.rms_norm_forward(x),
        "a view": lambda: norms.rms_norm(np.ones((3, 4100), np.float16)[:, 3:-1]),
        "groups": lambda: norms.rms_norm(np.ones((3, 8192), np.float16), groups=2),
        "a part": lambda: norms.rms_norm(x, partial=1000),
        "heads": lambda: norms.qk_norm(*2 * [np.ones((3, 2, 4096), np.float16)]),
        "layer norm with a residual": lambda: norms.add_layer_norm(long, long),
        "backward": lambda: norms.rms_norm_backward(single, single, single[0]),
        "backward, dx alone": lambda: norms.rms_norm_backward(single, single, need_dweight=False),
    }
    not_taken = {
        "layer_norm": lambda: norms.layer_norm(x),
        "another dtype": lambda: norms.rms_norm(single),
        "another size": lambda: norms.rms_norm(x[:, :2048]),
        "a residual": lambda: norms.add_rms_norm(x, x),
        "a residual of another dtype": lambda: norms.add_layer_norm(long, long.astype("float16")),
        "backward of another norm": lambda: norms.layer_norm_backward(single, single),
        "backward of a part": lambda: norms.rms_norm_backward(single, single, partial=1000),
        "backward of an add": lambda: norms.add_rms_norm_backward(single, single, single),
        "backward with another dout": lambda: norms.rms_norm_backward(x, single),
    }
    every = {**taken, **not_taken}
    before = {name: specialisations(call) for name, call in every.items()}
    norms.load_plans(write(document(RMS, ADD, BACK)))
    after = {name: specialisations(call) for name, call in every.items()}
    assert {name for name in every if after[name] != before[name]} == set(taken)
    threads = str(RMS["plan"]["threads_per_row"])
    assert f", {RMS['plan']['vecs_per_thread']}, {threads}, " in after["rms_norm"][0]
    norms.load_plans(None)
    assert {name: specialisations(call) for name, call in every.items()} == before


def test_only_devices_of_the_model_take_it(
    write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [DeviceProperties(80, 108, "Old"), DeviceProperties(90, 132, DEVICE)]
    monkeypatch.setattr(_kernel, "devices", lambda: [*devices, devices[1]])
    norms.load_plans(write(document(RMS)))
    found = [_plan_file.forward_plan(index, "rms", 4096, "float16", None) for index in range(4)]
    plan = Plan(**RMS["plan"])
    assert found == [None, plan, plan, None]


def test_a_refused_file_changes_nothing(write: Callable[[Any], Path]) -> None:
    norms.load_plans(write(document(RMS)))
    before, loaded = norms.info(), _plan_file.loaded()
    with pytest.raises(ValueError, match=r"plans\[1\]"):
        norms.load_plans(write(document(ADD, changed(BACK, vec_size=1))))
    assert norms.info() == before
    assert _plan_file.loaded() is loaded
    assert _plan_file.forward_plan(0, "rms", 4096, "float16", None) is not None
    assert _plan_file.forward_plan(0, "layer", 8192, "float32", "float32") is None
    norms.load_plans(write(document(ADD)))  # in place of the other, not beside it
    assert _plan_file.forward_plan(0, "rms", 4096, "float16", None) is None


def test_info_names_the_file(write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert norms.info()["plan_file"] is norms.info()["plan_file_sha256"] is None
    path = write(document(RMS))
    monkeypatch.chdir(path.parent)
    norms.load_plans(path.name)
    info = norms.info()
    assert info["plan_file"] == str(path)
    assert info["plan_file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    norms.load_plans(None)
    assert norms.info()["plan_file"] is None


def test_the_command_s_info_loads_a_file_or_says_why_not(
    write: Callable[[Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(document(RMS))
    with mock.patch.object(cli, "print_rows", lambda title, rows: print(dict(rows))):
        assert cli.main(["info", "--plans", str(path)]) == 0
        found = eval(capsys.readouterr().out.splitlines()[0])
        assert found["plan_file"] == str(path)
        assert found["plan_file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        norms.load_plans(None)
        assert cli.main(["info"]) == 0
        assert "'plan_file': 'none'" in capsys.readouterr().out
    write(document(changed(RMS, vec_size=1)))
    assert cli.main(["info", "--plans", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cupy-rmsnorm: plan file {path}: {WHERE}vec_size must be 8, got 1")
    assert cli.main(["info", "--plans", str(path.with_name("missing"))]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_warmup_builds_the_loaded_plans(
    write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        _kernel, "device_properties", lambda device: DeviceProperties(ARCH, SM_COUNT)
    )
    single = np.ones((300, 4096), np.float32)
    norms.load_plans(write(document(RMS, BACK)))
    for op, dtype, call in (
        ("rms_norm", "float16", lambda: norms.rms_norm(single.astype(np.float16))),
        ("rms_norm_backward", "float32", lambda: norms.rms_norm_backward(single, single)),
    ):
        dtypes = dict.fromkeys(
            ("weight_dtype", "bias_dtype", "residual_dtype", "out_dtype", "dout_dtype")
        )
        asked = check_warmup(
            op, 4096, "once", False, None, dtype=dtype, dweight_dtype=None, **dtypes
        )
        built = {found.name_expression for found, _ in _cuda_warmup.specialisations(asked, 0)}
        assert set(specialisations(call)) <= built


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
@pytest.mark.parametrize(
    ("op", "hidden_size", "dtype"),
    [("rms_norm", 1000, "float32"), ("layer_norm", 1024, "float16"), ("rms_norm", 77, "float32")],
)
def test_promises_hold_with_a_plan_file(
    write: Callable[[Any], Path], op: str, hidden_size: int, dtype: str
) -> None:
    """The oracle's bound; and a row's bits depend on neither the batch nor where the row lies."""
    plan = other_plan(op, hidden_size, dtype)
    path = write(document(entry(op, hidden_size, dtype, plan)))
    values = inputs.array((6, hidden_size), dtype, "row_tagged")
    weight = inputs.weight((hidden_size,), "float32")
    norm = op.partition("_")[0]

    def compute(x: np.ndarray) -> tuple[np.ndarray, list[str]]:
        launches: list[Any] = []
        with emulator.installed(arch=ARCH, sm_count=4, launches=launches):
            backend = Emulator()
            case = Case(x=x, norm=norm, weight=weight)
            got = calls.forward(backend, case, statistics=True)
            calls.check_forward(case, got)
            backend.verify()
        return got["y"].view(np.uint8), [launch[0] for launch in launches]

    own, by_own = compute(inputs.lay(values))
    norms.load_plans(path)
    tuned, by_tuned = compute(inputs.lay(values))
    assert by_tuned != by_own
    assert f", {plan.vecs_per_thread}, {plan.threads_per_row}, " in by_tuned[0]
    for layout in ("offset_1", "row_gap_8"):
        moved, _ = compute(inputs.lay(values, layout))
        assert (moved == tuned).all(), layout
    for row in (0, 5):
        alone, _ = compute(inputs.lay(values[row : row + 1]))
        assert (alone == tuned[row : row + 1]).all()
    norms.load_plans(None)
    again, by_own_again = compute(inputs.lay(values))
    assert (again == own).all()
    assert by_own_again == by_own
