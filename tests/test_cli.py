# SPDX-License-Identifier: Apache-2.0
"""The command on files of the user's own: results, messages and exit statuses."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_rmsnorm
from cupy_rmsnorm import _info, cli
from tests import compare, oracle

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["rich", "plain"])
def run(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Run:
    """Run the command in an empty folder, with rich and without: status, output, errors."""
    monkeypatch.chdir(tmp_path)
    if request.param == "rich":
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "200")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def assert_normalised(y: np.ndarray, x: np.ndarray, weight: object, **options: object) -> None:
    expected = oracle.forward(x, weight, options.pop("bias", None), **options).y
    assert y.dtype == x.dtype
    compare.close(y, expected.value, expected.bound(x.dtype.name))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(257,), (5, 33), (3, 4, 96)])
def test_a_file_of_ones_own(
    run: Run, random: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> None:
    x = random.normal(3, 2, shape).astype(dtype)
    weight = random.normal(1, 1, shape[-1]).astype(dtype)
    np.save("x.npy", x)
    np.save("w.npy", weight)
    status, out, err = run("demo", "x.npy", "--weight", "w.npy", "--out", "y.npy", "--eps", "1e-3")
    assert (status, err) == (0, "")
    y = np.load("y.npy")
    assert_normalised(y, x, weight, eps=1e-3)
    assert "correct" in out
    assert " x ".join(map(str, shape)) in out
    assert " ".join(f"{value:.6g}" for value in y.reshape(-1)[:3].astype(np.float64)) in out
    assert "GB/s" in out


def test_layer_norm_with_bias(run: Run, random: np.random.Generator) -> None:
    x = random.normal(5, 1, (6, 40)).astype(np.float32)
    weight, bias = random.normal(0, 1, (2, 40)).astype(np.float32)
    for name, array in (("x", x), ("w", weight), ("b", bias)):
        np.save(f"{name}.npy", array)
    arguments = ("x.npy", "--weight", "w.npy", "--bias", "b.npy", "--op", "layer_norm")
    status, _, _ = run("demo", *arguments, "--out", "y.npy")
    assert status == 0
    assert_normalised(np.load("y.npy"), x, weight, bias=bias, norm="layer", eps=1e-5)


def test_a_bfloat16_file_needs_its_dtype(run: Run, random: np.random.Generator) -> None:
    x = random.normal(0, 300, (4, 64)).astype(BFLOAT16)
    np.save("x.npy", x)
    assert np.load("x.npy").dtype == "V2"
    status, _, err = run("demo", "x.npy")
    assert status == 2
    assert "x.npy holds two-byte values without a dtype (|V2)" in err
    assert "--dtype bfloat16" in err
    assert run("demo", "x.npy", "--dtype", "float16")[0] == 2

    status, out, _ = run("demo", "x.npy", "--dtype", "bfloat16", "--out", "y.npy")
    assert status == 0
    assert "4 x 64 bfloat16" in out
    assert_normalised(np.load("y.npy").view(BFLOAT16), x, None, eps=1e-6)
    assert run("demo", "y.npy", "--dtype", "bfloat16")[0] == 0  # what it writes, it reads


def test_dtype_converts(run: Run, random: np.random.Generator) -> None:
    x = random.normal(0, 1, (4, 64))
    np.save("x.npy", x)
    assert run("demo", "x.npy", "--dtype", "float16", "--out", "y.npy")[0] == 0
    assert_normalised(np.load("y.npy"), x.astype(np.float16), None, eps=1e-6)


def test_layouts_and_byte_orders(run: Run, random: np.random.Generator) -> None:
    x = random.normal(0, 1, (7, 48)).astype(np.float32)
    for stored in (np.asfortranarray(x), x.astype(">f4"), x.astype("<f4")):
        np.save("x.npy", stored)
        assert run("demo", "x.npy", "--out", "y.npy")[0] == 0
        assert_normalised(np.load("y.npy"), x, None, eps=1e-6)


def test_safetensors(run: Run, random: np.random.Generator) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    x = random.normal(0, 9, (4, 64)).astype(BFLOAT16)
    weight = random.normal(1, 1, 64).astype(np.float32)
    numpy_files.save_file({"layer.x": x, "layer.weight": weight}, "m.safetensors")
    numpy_files.save_file({"only": weight}, "one.safetensors")
    inputs = ("m.safetensors:layer.x", "--weight", "m.safetensors:layer.weight")
    assert run("demo", *inputs, "--out", "y.npy")[0] == 0
    assert_normalised(np.load("y.npy").view(BFLOAT16), x, weight, eps=1e-6)
    assert run("demo", "one.safetensors")[0] == 0

    status, _, err = run("demo", "m.safetensors")
    assert status == 2
    assert "m.safetensors needs a name, FILE:NAME; it holds layer.weight, layer.x" in err
    status, _, err = run("demo", "m.safetensors:x")
    assert status == 2
    assert "m.safetensors holds no tensor 'x'; it holds layer.weight, layer.x" in err
    Path("bad.safetensors").write_bytes(b"12345678 not a header")
    assert run("demo", "bad.safetensors:x")[0] == 2


def test_safetensors_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    status, _, err = run("demo", "m.safetensors:x")
    assert status == 2
    assert "pip install safetensors" in err


@pytest.mark.parametrize("name", ["d.safetensors/x.npy", "d.safetensors/x.safetensors:x/y:z"])
def test_the_file_part_decides_the_format(run: Run, random: np.random.Generator, name: str) -> None:
    x = random.normal(0, 1, (3, 20)).astype(np.float32)
    Path("d.safetensors").mkdir()
    np.save("d.safetensors/x.npy", x)
    if ":" in name:
        numpy_files = pytest.importorskip("safetensors.numpy")
        numpy_files.save_file({"x/y:z": x, "other": x}, "d.safetensors/x.safetensors")
    assert run("demo", name, "--out", "y.npy")[0] == 0
    assert_normalised(np.load("y.npy"), x, None, eps=1e-6)


def test_another_suffix_is_not_safetensors(run: Run) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    numpy_files.save_file({"x": np.ones((2, 8), np.float32)}, "m.safetensors")
    Path("m.safetensors").rename("m.safetensorsx")
    status, _, err = run("demo", "m.safetensorsx")
    assert status == 2
    assert "m.safetensorsx is neither a .npy nor a .safetensors file" in err
    assert run("demo", "m.safetensorsx:x")[0] == 2


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "F6_E2M3", "C64", "I64", "F99"])
def test_safetensors_of_other_dtypes(run: Run, dtype: str) -> None:
    pytest.importorskip("safetensors")
    size = {"F4": 4, "F6_E2M3": 6, "C64": 64, "I64": 64}.get(dtype, 8)
    tensor = {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, size]}
    header = json.dumps({"layer.x": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(size)
    Path("m.safetensors").write_bytes(content)
    status, _, err = run("demo", "m.safetensors:layer.x")
    assert status == 2
    assert err.startswith("cupy-rmsnorm: ")
    assert err.count("\n") == 1
    if dtype.startswith("F8"):
        assert "m.safetensors holds layer.x in a dtype that NumPy has not" in err


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"


@pytest.mark.parametrize(
    "header",
    [
        HEADER % "(1000000000000000,)",
        HEADER % f"({'9' * 400},)",
        HEADER % "(True,)",
        HEADER % "(-1, 4)",
        HEADER % "(4.0,)",
        HEADER % f"({'1, ' * 70})",
        HEADER[:-3] % (),
        HEADER.replace("<f4", "<f4,(") % "(4,)",
        HEADER.replace("'<f4'", "[('a', 3)]") % "(4,)",
        HEADER.replace("'<f4'", "[[]]") % "(4,)",
        "{[]: 1}",
        "{",
        "(" * 3000,
        "-" * 5000 + "1",
        " " * 20000,
        "",
    ],
)
def test_damaged_header(run: Run, header: str) -> None:
    text = f"{header}\n".encode()
    Path("x.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)
    )
    status, _, err = run("demo", "x.npy")
    assert status == 2
    assert err.startswith("cupy-rmsnorm: cannot read x.npy: ")
    assert err.count("\n") == 1
    assert len(err) < 300


def test_a_header_of_python_2_is_read_quietly(run: Run) -> None:
    text = (HEADER % "(2L, 8L)\n").encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    Path("x.npy").write_bytes(content + np.arange(16, dtype="<f4").tobytes())
    assert run("demo", "x.npy", "--out", "y.npy")[0] == 0
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert_normalised(np.load("y.npy"), x, None, eps=1e-6)


@pytest.fixture
def wrong_inputs(tmp_path: Path) -> None:
    def save(name: str, array: object, **options: bool) -> None:
        np.save(tmp_path / name, array, **options)

    save("x.npy", np.ones((2, 8), np.float32))
    save("double.npy", np.ones((2, 8)))
    save("weight.npy", np.ones(8, np.float32))
    save("weight64.npy", np.ones(8))
    save("short.npy", np.ones(7, np.float32))
    save("integers.npy", np.ones((2, 8), np.int64))
    save("complex.npy", np.ones((2, 8), np.complex128))
    save("text_array.npy", np.array(["a", "b"]))
    save("wide.npy", np.ones((2, 8), np.longdouble))
    save("no_rows.npy", np.ones((0, 8), np.float32))
    save("no_columns.npy", np.ones((2, 0), np.float32))
    save("scalar.npy", np.float32(1))
    save("objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", x=np.ones(3))
    (tmp_path / "text.npy").write_text("1 2 3")
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-5])
    (tmp_path / "header.npy").write_bytes(whole[:20])


@pytest.mark.usefixtures("wrong_inputs")
@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["missing.npy"], ["cannot read missing.npy", "No such file"]),
        (["missing.safetensors:x"], ["cannot read missing.safetensors"]),
        (["."], ["cannot read .", "directory"]),
        (["text.npy"], ["text.npy is neither a .npy nor a .safetensors file"]),
        (["archive.npz"], ["archive.npz is neither a .npy nor a .safetensors file"]),
        (["cut.npy"], ["cannot read cut.npy"]),
        (["header.npy"], ["cannot read header.npy"]),
        (["objects.npy"], ["cannot read objects.npy", "Object arrays"]),
        (["scalar.npy"], ["scalar.npy holds a single number"]),
        (["integers.npy"], ["int64"]),
        (["complex.npy"], ["complex.npy holds complex128, which cannot be normalised"]),
        (["text_array.npy"], ["text_array.npy holds <U1, which cannot be normalised"]),
        (["wide.npy"], ["wide.npy holds float128, which cannot be normalised"]),
        (["no_rows.npy"], ["no_rows.npy holds no elements, its shape is (0, 8)"]),
        (["no_columns.npy"], ["no_columns.npy holds no elements, its shape is (2, 0)"]),
        (["x.npy", "--weight", "short.npy"], ["weight must have shape (8,), got (7,)"]),
        (["x.npy", "--bias", "short.npy"], ["bias must have shape (8,), got (7,)"]),
        (["x.npy", "--weight", "integers.npy"], ["weight"]),
        (["double.npy", "--weight", "weight.npy"], ["got float32; convert x by --dtype float32"]),
        (["x.npy", "--weight", "weight64.npy"], ["got float64; convert x by --dtype float64"]),
        (["x.npy", "--eps", "-1"], ["eps"]),
        (["x.npy", "--eps", "nan"], ["eps"]),
        (["x.npy", "--out", "y.txt"], ["--out must end in .npy, got y.txt"]),
        (["x.npy", "--out", "missing/y.npy"], ["cannot write missing/y.npy"]),
        (["x.npy", "--json", "missing/j"], ["cannot write missing/j"]),
        (["--out", "y.npy"], ["--out needs an input FILE"]),
        (["--weight", "short.npy"], ["--weight and --bias need an input FILE"]),
    ],
)
def test_wrong_input(run: Run, arguments: list[str], messages: list[str]) -> None:
    status, _, err = run("demo", *arguments)
    assert status == 2
    assert err.startswith("cupy-rmsnorm: ")
    assert err.count("\n") == 1
    for message in messages:
        assert message in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["demo", "--dtype", "int8"], ["demo", "--op", "batch_norm"], ["demo", "--eps", "small"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: cupy-rmsnorm" in capsys.readouterr().err


def test_no_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info, "available", lambda: (False, "no NVIDIA driver was found"))
    np.save("x.npy", np.ones((2, 8), np.float32))
    status, _, err = run("demo", "x.npy", "--device", "gpu")
    assert status == 2
    assert "the GPU cannot be used: no NVIDIA driver was found" in err
    status, out, _ = run("demo", "x.npy")
    assert status == 0
    assert "On the CPU, with NumPy (no GPU: no NVIDIA driver was found)" in out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_on_the_gpu(run: Run, random: np.random.Generator, dtype: str) -> None:
    usable, reason = _info.available()
    if not usable:
        pytest.skip(reason)
    x = oracle.round_to(random.normal(3, 2, (3, 67, 200)), dtype)
    weight = oracle.round_to(random.normal(1, 1, 200), "float32" if dtype != "float64" else dtype)
    np.save("x.npy", x)
    np.save("w.npy", weight)
    arguments = ("x.npy", "--weight", "w.npy", "--dtype", dtype, "--device", "gpu")
    status, out, err = run("demo", *arguments, "--out", "y.npy")
    assert (status, err) == (0, "")
    assert_normalised(np.load("y.npy").view(x.dtype), x, weight, eps=1e-6)
    assert "% of a device copy of the same bytes" in out
    assert "compute capability" in out


def test_without_a_file(run: Run) -> None:
    status, out, err = run("demo", "--device", "cpu")
    assert (status, err) == (0, "")
    assert "36 x 576 bfloat16, weight float32" in out
    assert "4096 x 4096 bfloat16" in out
    assert out.count("correct") == 2


def test_the_sample_overflows_float16() -> None:
    """The shipped activations are what they are said to be: no toy."""
    with np.load(cli.SAMPLE) as sample:
        assert set(sample) == {"x_bfloat16_bits", "weight", "eps"}
        x = sample["x_bfloat16_bits"].view(BFLOAT16).astype(np.float64)
        assert sample["weight"].shape == (576,)
    assert x.shape == (36, 576)
    assert np.abs(x).max() == 22528
    assert ((x * x).sum(axis=1) > 65504).sum() == 29


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    "change",
    [
        lambda y: y * np.float32(1 + 2**-12),
        lambda y: np.where(np.arange(y.size).reshape(y.shape) == 100, np.nan, y),
        lambda y: np.where(np.arange(y.size).reshape(y.shape) == 100, np.inf, y),
        lambda y: y[::-1],
    ],
)
def test_a_wrong_result_is_found(
    run: Run,
    random: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    function, eps = cli.OPS[op]

    def faulty(x: np.ndarray, weight: object, bias: object, *, eps: float, out: object) -> None:
        out[...] = change(function(x, weight, bias, eps=eps))

    monkeypatch.setitem(cli.OPS, op, (faulty, eps))
    np.save("x.npy", random.normal(0, 1, (4, 50)).astype(np.float32))
    status, out, _ = run("demo", "x.npy", "--op", op, "--device", "cpu")
    assert status == 1
    assert "WRONG" in out
    assert "correct" not in out


def test_infinities_and_nans_are_not_wrong(run: Run) -> None:
    x = np.ones((4, 8), np.float16)
    x[1, 2], x[2, 3] = np.nan, np.inf
    x[0, 0] = 7  # beyond float16 once the weight is on
    np.save("x.npy", x)
    np.save("w.npy", np.full(8, 60000, np.float32))
    status, out, err = run("demo", "x.npy", "--weight", "w.npy", "--device", "cpu")
    assert (status, err) == (0, "")
    assert "correct" in out
    # The row of the NaN, the infinity itself, and the 7.
    assert "9 NaN and 1 infinite of 32 results, as in the reference" in out

    status, out, err = run("demo", "x.npy", "--op", "layer_norm", "--device", "cpu")
    assert (status, err) == (0, "")
    assert "16 NaN of 32 results, as in the reference" in out

    np.save("x.npy", np.full((4, 8), np.nan, np.float16))
    status, out, err = run("demo", "x.npy", "--device", "cpu")
    assert (status, err) == (0, "")
    assert "not known: no result is finite" in out
    assert "correct" not in out
    assert "32 NaN of 32 results, as in the reference" in out


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_zeros(run: Run, random: np.random.Generator, op: str, dtype: str) -> None:
    x = oracle.round_to(random.normal(0, 1, (5, 24)), dtype)
    x[1] = 0
    x[2, 3] = 0
    x[3] = np.tile([1, -1], 12)  # LayerNorm: the mean vanishes
    np.save("x.npy", x)
    arguments = ("x.npy", "--dtype", dtype, "--op", op, "--device", "cpu")
    status, out, err = run("demo", *arguments)
    assert (status, err) == (0, "")
    assert "not finite" not in out
    status, out, err = run("demo", *arguments, "--eps", "0")
    assert (status, err) == (0, "")
    assert "24 NaN of 120 results, as in the reference" in out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_of_squares_that_overflows(run: Run, dtype: str) -> None:
    """docs/numerics.md calls the result wrong; whether float64's is found depends on longdouble."""
    np.save("x.npy", np.full((2, 8), np.finfo(dtype).max / 4, dtype))
    status, out, err = run("demo", "x.npy", "--device", "cpu")
    assert err == ""
    assert ("WRONG" in out) == (status == 1)
    assert status == 1 or dtype == "float64"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_finite_result_where_none_can_be(
    run: Run, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def faulty(x: np.ndarray, weight: object, bias: object, *, eps: float, out: object) -> None:
        out[...] = 0.5

    monkeypatch.setitem(cli.OPS, "rms_norm", (faulty, 1e-6))
    np.save("x.npy", np.full((2, 8), value, np.float32))
    status, out, _ = run("demo", "x.npy", "--device", "cpu")
    assert status == 1
    assert "WRONG" in out


def test_json_of_a_file(run: Run, random: np.random.Generator) -> None:
    np.save("x.npy", random.normal(0, 1, (3, 5, 64)).astype(np.float16))
    assert run("demo", "x.npy", "--device", "cpu", "--json", "d.json", "--commit", "0ffee")[0] == 0
    content = json.loads(Path("d.json").read_text())
    meta = content["meta"]
    assert (meta["device"], meta["driver"], meta["cupy"]) == ("CPU", None, None)
    assert (meta["numpy"], meta["commit"]) == (np.__version__, "0ffee")
    assert len(meta["date"]) == len("2026-01-01")
    (row,) = content["rows"]
    assert row.pop("us") > 0
    place = {"op": "rms_norm", "dtype": "float16", "rows": 15, "hidden_size": 64}
    assert row == {**place, "impl": "ours", "ratio": None}


def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A device whose results are NumPy's times `share`."""

    def on_gpu(job: cli.Job, progress: cli.Progress) -> cli.Result:
        y = share * job(job.x, job.weight, job.bias)
        return cli.Result(y.astype(job.x.dtype), 20e-6, 19e-6)

    device = {"name": "A GPU", "compute_capability": "9.0"}
    found = {**_info.info(), "reason": "", "devices": [device], "cupy": "14.2.0"}
    monkeypatch.setattr(_info, "available", lambda: (True, ""))
    monkeypatch.setattr(_info, "info", lambda: found)
    monkeypatch.setattr(_info, "read_driver", lambda: _info.Driver(13000, 1))
    monkeypatch.setattr(cli, "_on_gpu", on_gpu)


def test_json_of_a_gpu(
    run: Run, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_a_gpu(monkeypatch, 1.0)
    np.save("x.npy", random.normal(0, 1, (15, 64)).astype(np.float32))
    status, out, _ = run("demo", "x.npy", "--op", "layer_norm", "--json", "d.json")
    assert status == 0
    assert "95 % of a device copy" in out
    content = json.loads(Path("d.json").read_text())
    meta = content["meta"]
    assert (meta["device"], meta["driver"], meta["cupy"]) == ("A GPU", 13000, "14.2.0")
    place = {"op": "layer_norm", "dtype": "float32", "rows": 15, "hidden_size": 64}
    assert content["rows"] == [
        {**place, "impl": "copy", "us": 19.0, "ratio": 1.0},
        {**place, "impl": "ours", "us": 20.0, "ratio": 0.95},
    ]


def test_wrong_results_are_not_written(
    run: Run, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_a_gpu(monkeypatch, 1.001)
    np.save("x.npy", random.normal(0, 1, (15, 64)).astype(np.float32))
    assert run("demo", "x.npy", "--json", "d.json")[0] == 1
    assert not Path("d.json").exists()


@pytest.mark.parametrize(
    ("options", "on_gpu", "dtypes"),
    [
        ([], True, ["bfloat16", "bfloat16", "float16"]),
        ([], False, ["bfloat16", "bfloat16"]),
        (["--dtype", "float32"], True, ["float32", "float32"]),
    ],
)
def test_the_inputs_without_a_file(options: list[str], on_gpu: bool, dtypes: list[str]) -> None:
    jobs = list(cli._jobs(cli._parser().parse_args(["demo", *options]), on_gpu))
    assert [job.x.dtype.name for job in jobs] == dtypes
    assert [job.x.shape for job in jobs] == [(36, 576), *[(4096, 4096)] * (len(jobs) - 1)]


def test_info(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run("info")
    assert (status, err) == (0, "")
    for label in ("cupy_rmsnorm", "backend", "nvrtc", "cuda_headers", "numpy", "python"):
        assert label in out
    assert cupy_rmsnorm.__version__ in out
    usable, reason = _info.available()
    assert (f"The GPU is not used: {reason}" in out) == (not usable)

    device = {
        "name": "A GPU",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "memory_gib": 139.8,
    }
    found = {**_info.info(), "reason": "", "devices": [device], "nvrtc": None}
    monkeypatch.setattr(_info, "info", lambda: found)
    _, out, _ = run("info")
    assert "A GPU, compute capability 9.0, 132 multiprocessors, 139.8 GiB" in out
    assert "not found" in out
    assert "The GPU is not used" not in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with cli.Progress("x", steps=4) as progress:
        now = 0.9
        progress.step(1)
        assert sys.stderr.getvalue() == ""
        now = 1.1
        progress.step(1)
        assert f"[{'#' * 20}{'.' * 20}]  50%, 0:01 left" in sys.stderr.getvalue()
        now = 120.0
        progress.step(1)
        assert f"[{'#' * 30}{'.' * 10}]  75%, 0:40 left" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\r\x1b[K")

    monkeypatch.setattr(sys, "stderr", io.StringIO())  # not a terminal: nothing is drawn
    with cli.Progress("x", steps=4) as progress:
        now = 9.0
        progress.step(1)
    assert sys.stderr.getvalue() == ""


def test_as_a_program(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(24, dtype=np.float32).reshape(2, 12))
    command = [sys.executable, "-m", "cupy_rmsnorm.cli"]
    root = Path(__file__).parent.parent
    asked = subprocess.run([*command, "--version"], cwd=root, capture_output=True, text=True)
    assert (asked.returncode, asked.stdout.strip()) == (0, cupy_rmsnorm.__version__)
    done = subprocess.run(
        [*command, "demo", tmp_path / "x.npy", "--out", tmp_path / "y.npy"], cwd=root
    )
    assert done.returncode == 0
    assert_normalised(np.load(tmp_path / "y.npy"), np.load(tmp_path / "x.npy"), None, eps=1e-6)
    wrong = subprocess.run([*command, "demo", "missing.npy"], cwd=root, capture_output=True)
    assert wrong.returncode == 2


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command as a program of its own, in an empty folder."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        environment["PYTHONUNBUFFERED"] = ""  # argparse hides what a write raises then
        environment |= options.pop("env", {})
        options.setdefault("stdout", subprocess.PIPE)
        return subprocess.run(
            [sys.executable, "-m", "cupy_rmsnorm.cli", *arguments],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            encoding="ascii",
            env=environment,
            **options,
        )

    return call


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["--version"], ["demo", "x.npy"]])
def test_output_that_cannot_be_written(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, arguments: list[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 8), np.float32))
    with open("/dev/full", "w") as full:
        done = program(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "cupy-rmsnorm: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    "arguments", [["info"], ["--help"], ["study", "--list"], ["demo", "x.npy", "--device", "cpu"]]
)
def test_output_that_nobody_reads(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, arguments: list[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 8), np.float32))
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        done = program(*arguments, stdout=output)
    assert (done.returncode, done.stderr) == (141, "")


def test_letters_that_the_output_does_not_know(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    np.save(tmp_path / "\xe9\u4e00.npy", np.ones((2, 8), np.float32))
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = program("demo", "\xe9\u4e00.npy", "--device", "cpu", env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9\\u4e00.npy" in done.stdout
    assert "correct" in done.stdout
