# SPDX-License-Identifier: Apache-2.0
"""The study kernels: every variant at every size it admits, and where float16 sums overflow."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import instructions, study_counters, study_report, study_verdicts
from cupy_rmsnorm import _kernel, _source, _study, cli, variants
from cupy_rmsnorm._dtypes import TABLE as DTYPES
from cupy_rmsnorm._kernel import DeviceProperties
from cupy_rmsnorm.variants import TABLE, Variant
from tests import backends, compare, compiled, emulator, inputs, oracle, study
from tests.study import EPS, is_pure_half, reference, run, sizes

LARGEST = 65504.0
OVERFLOW = 65520.0  # rounds to infinity

CLASSIC = (
    *("f32", "f32x4", "f16_f16", "f16_f32", "f16x2_f16", "f16x8_f16", "f16x8_f32"),
    *("f16x8_pack_f16", "f16x8_pack_f32", "bf16x8_pack_f32"),
)


def label(variant: Variant) -> str:
    return f"{variant.norm}-{variant.name}"


# Where the kernels run ------------------------------------------------------------------------


@dataclass
class Machine:
    """A GPU, or the emulator of one."""

    backend_class: type[backends.Cupy]
    properties: DeviceProperties

    def backend(self) -> backends.Cupy:
        return self.backend_class()

    def admits(self, variant: Variant) -> None:
        """Skip what this machine cannot run."""
        if variant.min_arch > self.properties.arch:
            pytest.skip(f"{variant.name} needs compute capability {variant.min_arch / 10}")


def instances(properties: DeviceProperties) -> list[variants.Instance]:
    """Everything that the tests launch."""
    return [
        (variant, variant.geometry(variant, size, 1, properties).template_arguments)
        for variant in TABLE
        if variant.min_arch <= properties.arch
        for size in sorted({*sizes(variant), 512, 1024})
        if size in variant.sizes
    ]


@pytest.fixture(scope="module", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param == "emulator":
        if emulator.missing() is not None:
            pytest.skip(str(emulator.missing()))
        properties = study.PROPERTIES
        with study.emulated(checked=False):
            variants.load(instances(properties), 0)
            yield Machine(backends.Emulator, properties)
        return
    if backends.missing("cupy") is not None:
        pytest.skip(str(backends.missing("cupy")))
    properties = _kernel.device_properties(0)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there each process compiles what its tests take
        variants.load(instances(properties), 0)
    yield Machine(backends.Cupy, properties)


# Right answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", TABLE, ids=label)
def test_every_size(machine: Machine, variant: Variant) -> None:
    machine.admits(variant)
    for size in sizes(variant):
        study.Row(variant, size).run(machine.backend(), machine.properties)


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
def test_no_race_and_no_access_outside() -> None:
    checkable = [row for row in study.ROWS if row.checkable]
    with study.emulated(checked=True):
        variants.load([row.instance for row in checkable], 0)
        for row in checkable:
            row.run(backends.Emulator())


@pytest.mark.parametrize("variant", TABLE, ids=label)
def test_leading_axes_in_place_and_a_new_output(machine: Machine, variant: Variant) -> None:
    machine.admits(variant)
    backend = machine.backend()
    size = 1024
    x = inputs.array((2, 3, size), variant.dtype)
    expected, gain, shift = run(variant, backend, x)
    parameters = [backend.input(value) for value in (gain, shift)]
    new = variant(backend.input(inputs.lay(x)), *parameters)
    compare.equal(backend.numpy(new), expected, "a new output")
    both = backend.output(inputs.lay(x))
    assert variant(both, *parameters, out=both) is both
    compare.equal(backend.numpy(both), expected, "in place")
    none = variant(backend.input(np.empty((0, size), x.dtype)), *parameters)
    assert none.shape == (0, size)


def test_eps_is_a_run_time_argument(machine: Machine) -> None:
    for variant in (variants.rms_norm.f32, variants.rms_norm.f16_vector_weight_256):
        x = inputs.array((3, 512), variant.dtype, "tiny")
        for eps in (0.0, 1e-6, 1e-2):
            y, gain, shift = run(variant, machine.backend(), x, eps=eps)
            value, bound = reference(variant, x, gain, shift, eps)
            compare.close(y, value, bound, f"{variant.name} with eps {eps}")


def test_the_sum_reaches_every_warp(machine: Machine) -> None:
    """The fault of a published kernel: outside the first warp x was scaled by 1 / sqrt(eps)."""
    for variant in TABLE:
        if variant.template == "vector_weight":
            x = np.ones((2, 1024), oracle.DTYPES[variant.dtype])
            y, gain, _ = run(variant, machine.backend(), x)
            assert np.abs(y.astype(float)).max() <= 1.01 * np.abs(gain.astype(float)).max()


# Overflow -------------------------------------------------------------------------------------

HALF_VARIANTS = [variant for variant in TABLE if variant.dtype == "float16"]


@pytest.mark.parametrize("variant", HALF_VARIANTS, ids=label)
def test_a_hundredfold_input(machine: Machine, variant: Variant) -> None:
    """x * 100: sums in float16 pass 65504 in every row, and the row becomes zero."""
    machine.admits(variant)
    x = oracle.round_to(100 * inputs.array((8, 1024), "float64"), "float16")
    y, gain, shift = run(variant, machine.backend(), x)
    if is_pure_half(variant):
        assert np.isin(y, oracle.round_to(np.array(shift or 0.0), "float16")).all()
    else:
        value, bound = reference(variant, x, gain, shift)
        compare.close(y, value, bound, variant.name)


def test_a_hundredfold_input_written_naively() -> None:
    x = oracle.round_to(100 * inputs.array((8, 1024), "float64"), "float16")
    with np.errstate(over="ignore"):
        assert (variants.naive_rms_norm(x) == 0).all()
        assert (variants.naive_layer_norm(x) == 0).all()


def test_a_hundredfold_input_in_torch() -> None:
    """torch computes its own norms in float32: right, where the expression in float16 is not."""
    torch = pytest.importorskip("torch")
    x = oracle.round_to(100 * inputs.array((8, 1024), "float64"), "float16")
    tensor = torch.from_numpy(x)
    assert not variants.naive_rms_norm(tensor).any()
    y = torch.nn.functional.layer_norm(tensor, (1024,), eps=EPS).numpy()
    forward = oracle.forward(x, norm="layer", eps=EPS)
    compare.close(y, forward.y.value, forward.y.bound("float16"), "torch.layer_norm")


@pytest.mark.parametrize("variant", HALF_VARIANTS, ids=label)
def test_real_activations(machine: Machine, variant: Variant) -> None:
    """29 of the sample's 36 rows have sums of squares past 65504; padded with zeros to 1024."""
    machine.admits(variant)
    x = _study.activations(_study.SAMPLE).astype(np.float16)
    y, gain, shift = run(variant, machine.backend(), x)
    value, bound = reference(variant, x, gain, shift)
    right = (np.abs(y.astype(np.float64) - value) <= bound).all(-1)
    if not is_pure_half(variant):
        assert right.all()
        return
    wide = x.astype(np.float64)
    mean = wide.mean(-1, keepdims=True) if variant.norm == "layer" else 0
    sums = ((wide - mean) ** 2).sum(-1)
    assert (sums > LARGEST).sum() == 29
    # Rounding decides within 1 % of the limit: 14 additions of at most 2^-11 each.
    assert not right[sums > 1.01 * OVERFLOW].any()
    assert right[sums < 0.99 * OVERFLOW].all()


def test_real_activations_written_naively() -> None:
    """`mean` sums in float32: what is lost is rows with an element whose square overflows."""
    x = _study.activations(_study.SAMPLE).astype(np.float16)
    lost = (np.abs(x) >= 256).any(-1)
    assert 0 < lost.sum() < len(x)
    with np.errstate(over="ignore"):
        y = variants.naive_rms_norm(x)
    np.testing.assert_array_equal((y == 0).all(-1), lost)


def test_real_activations_in_torch() -> None:
    """torch's LayerNorm is right in every row, those whose squares pass 65504 among them."""
    torch = pytest.importorskip("torch")
    x = _study.activations(_study.SAMPLE).astype(np.float16)
    y = torch.nn.functional.layer_norm(torch.from_numpy(x), x.shape[-1:], eps=EPS).numpy()
    forward = oracle.forward(x, norm="layer", eps=EPS)
    compare.close(y, forward.y.value, forward.y.bound("float16"), "torch.layer_norm")
    assert not variants.naive_rms_norm(torch.from_numpy(x)).any(-1).all()


# Cancellation ---------------------------------------------------------------------------------


def test_one_pass_cancels_and_two_do_not(machine: Machine) -> None:
    x = (1000 + inputs.array((4, 1024), "float64")).astype(np.float32)
    two, gain, shift = run(variants.layer_norm.f32x4, machine.backend(), x)
    value, bound = reference(variants.layer_norm.f32x4, x, gain, shift)
    compare.close(two, value, bound, "two passes")
    one, _, _ = run(variants.layer_norm.f32x4_single_pass, machine.backend(), x)
    assert np.abs(one - value).max() > 1e-2


# Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", TABLE, ids=label)
def test_other_sizes_are_refused_with_the_range(machine: Machine, variant: Variant) -> None:
    machine.admits(variant)
    wrong = [variant.sizes.minimum - 1]
    if variant.sizes.power_of_two:
        wrong += [variant.sizes.minimum + 1, variant.sizes.minimum // 2]
    if variant.sizes.maximum is not None:
        wrong += [2 * variant.sizes.maximum]
    backend = machine.backend()
    for size in wrong:
        x = backend.input(np.zeros((1, size), oracle.DTYPES[variant.dtype]))
        gain = backend.input(np.ones(size, oracle.DTYPES[variant.dtype]))
        parameters = (gain, gain)[: 2 if variant.norm == "layer" else 1] if variant.vector else ()
        message = f"must be {variant.sizes} for {variant.name}, got {size}"
        with pytest.raises(ValueError, match=re.escape(message)):
            variant(x, *parameters)


def test_ranges_are_the_published_ones() -> None:
    largest = {v.name: v.sizes.maximum for v in TABLE if v.name in CLASSIC}
    assert {v.sizes.minimum for v in TABLE if v.name in CLASSIC} == {64}
    assert largest["f32"] == largest["f16_f16"] == largest["f16_f32"] == 1024
    assert largest["f16x2_f16"] == 2048
    assert largest["f32x4"] == 4096
    assert {largest[name] for name in CLASSIC if "x8" in name} == {8192}


def test_wrong_arguments(machine: Machine) -> None:
    backend = machine.backend()
    f32x4, layer = variants.rms_norm.f32x4, variants.layer_norm.f32x4
    vector = variants.rms_norm.f32_vector_weight_256
    values = inputs.array((4, 256), "float32")
    x = backend.input(inputs.lay(values))
    half = backend.input(values.astype(np.float16))

    def refuses(error: type[Exception], message: str, call: Any, *args: Any, **kw: Any) -> None:
        with pytest.raises(error, match=re.escape(message)):
            call(*args, **kw)

    refuses(TypeError, "x must be float32 for f32x4, got float16", f32x4, half)
    refuses(TypeError, "g must be a real number for f32x4, got an array", f32x4, x, x)
    refuses(TypeError, "g must be an array for f32_vector_weight_256, got 1.0", vector, x)
    refuses(TypeError, "b must be None: RMSNorm has no shift", f32x4, x, 1.0, 0.0)
    refuses(ValueError, "eps must not be negative, got -1.0", layer, x, eps=-1.0)
    refuses(ValueError, "g must be finite in float32, got 1e+39", f32x4, x, 1e39)
    refuses(ValueError, "eps must be finite in float32, got 1e+39", f32x4, x, eps=1e39)
    refuses(TypeError, "out must be float32 for f32x4, got float16", f32x4, x, out=half)
    short = backend.empty((3, 256), "float32")
    refuses(ValueError, "out must have shape (4, 256), got (3, 256)", f32x4, x, out=short)
    weight = backend.input(np.ones(255, np.float32))
    refuses(ValueError, "g must have shape (256,), got (255,)", vector, x, weight)
    for layout, strides in (("row_gap_8", (264, 1)), ("inner_2", (512, 2))):
        strided = backend.input(inputs.lay(values, layout))
        message = f"x must be C-contiguous, got strides {strides}"
        refuses(ValueError, message, f32x4, strided)
    unaligned = backend.input(inputs.lay(values, "offset_1"))
    message = "x must lie on a multiple of 16 bytes for f32x4, got one that is 4 past"
    refuses(ValueError, message, f32x4, unaligned)
    out = backend.output(inputs.lay(values, "offset_1"))
    refuses(ValueError, message.replace("x must", "out must"), f32x4, x, out=out)
    variants.rms_norm.f32(unaligned, out=backend.empty((4, 256), "float32"))
    buffer = inputs.lay(inputs.array((5, 256), "float32"))
    first, second = backend.input(buffer[:4]), backend.output(buffer[1:])
    refuses(ValueError, "out must not overlap x unless it is exactly x", f32x4, first, out=second)
    refuses(ValueError, "x must be on a CUDA device: variants are kernels, got cpu", f32x4, values)


def test_an_older_gpu_is_named() -> None:
    if emulator.missing() is not None:
        pytest.skip(str(emulator.missing()))
    with emulator.installed(arch=80):
        x = emulator.from_numpy(np.ones((1, 1024), np.float32))
        with pytest.raises(RuntimeError, match=r"f32x4_cluster needs compute capability 9\.0"):
            variants.rms_norm.f32x4_cluster(x)


def test_a_bound_call_is_the_call(machine: Machine) -> None:
    """Also a second time, after its output was overwritten."""
    backend = machine.backend()
    x = backend.input(inputs.lay(inputs.array((3, 512), "float16")))
    out = backend.empty((3, 512), "float16")
    expected = backend.numpy(variants.layer_norm.f16x8_pack_f32(x, 0.5, 0.25)).copy()
    enqueue = variants.layer_norm.f16x8_pack_f32.bind(x, 0.5, 0.25, out=out)
    for _ in range(2):
        backend.numpy(variants.layer_norm.f16x8_pack_f32(x, out=out))
        enqueue(0)
        backend.synchronize()
        np.testing.assert_array_equal(backend.numpy(out), expected)
    empty = backend.empty((0, 512), "float16")
    variants.layer_norm.f16x8_pack_f32.bind(empty, out=empty)(0)


def test_modules_are_split() -> None:
    members = [(variants.rms_norm.f32, (str(size),)) for size in (64, 128, 256)]
    other = (variants.layer_norm.f32, ("64",))
    assert variants.modules([*members, other, members[0]], -1) == [members, [other]]
    assert variants.modules([*members, other], -1, 2) == [members[:2], members[2:], [other]]


# The table ------------------------------------------------------------------------------------


def test_the_table_and_the_sources_agree() -> None:
    in_table = {(variant.source, variant.template) for variant in TABLE}
    kernel = re.compile(r"__global__ void [^{;]*?\b(\w+)\(\w+\*")
    in_sources = {
        (path.stem, name)
        for path in _source.directory().glob("study_*.cu")
        for name in kernel.findall(path.read_text())
    }
    assert in_table == in_sources


@pytest.mark.parametrize("arch", instructions.ARCHS)
def test_every_variant_compiles(arch: int) -> None:
    """Without spilled registers, and with 16-byte loads where the name promises one."""
    pytest.importorskip("cupy")
    wanted = {
        instructions.instance(variant, size, arch)
        for variant in TABLE
        if variant.min_arch <= arch
        for size in (sizes(variant)[0], sizes(variant)[-1])
    }
    found = instructions.compile_instances(wanted, arch)
    assert set(found) == wanted
    for (variant, arguments), counts in found.items():
        assert counts["spill_bytes"] == 0, variant.name_expression(arguments)
        wide = sum(n for code, n in counts["global_loads"].items() if ".128" in code)
        whole = variant.vec_size * DTYPES[variant.dtype].itemsize == 16 and variant.loads == 1
        if compiled.disassembler() is not None and variant.geometry is not variants._tiled:
            assert bool(wide) == whole, variant.name_expression(arguments)


def test_names_and_attributes() -> None:
    for norm, space in (("rms", variants.rms_norm), ("layer", variants.layer_norm)):
        names = variants.names(norm)  # type: ignore[arg-type]
        assert set(CLASSIC) <= set(names)
        assert set(names) == set(vars(space))
        assert all(vars(space)[name].name == name for name in names)
        assert all(vars(space)[name].norm == norm for name in names)
    assert set(variants.names()) == {variant.name for variant in TABLE}
    assert len({(variant.norm, variant.name) for variant in TABLE}) == len(TABLE)
    with pytest.raises(ValueError, match="norm must be 'rms', 'layer' or None, got 'batch'"):
        variants.names("batch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("space", "name", "message"),
    [
        (variants.rms_norm, "f16x8_pack_f23", "did you mean f16x8_pack_f32, "),
        (variants.layer_norm, "nosuch", "there are f32, f32x4, f16_f16, "),
        (variants, "f32_tild", "'f32_tild': did you mean f32_tiled"),
        (variants, "f32x4_tree", "the variant is rms_norm.f32x4_tree"),
        (variants, "f32x4", "the variant is rms_norm.f32x4 or layer_norm.f32x4"),
    ],
)
def test_a_name_that_is_none_says_which_there_are(space: Any, name: str, message: str) -> None:
    assert not hasattr(space, name)
    with pytest.raises(AttributeError, match=re.escape(message)):
        getattr(space, name)


def test_the_documentation_names_every_variant() -> None:
    text = (_source.directory().parent / "docs" / "study.md").read_text()
    missing = [name for name in variants.names() if f"`{name}`" not in text]
    assert not missing


# Formulas -------------------------------------------------------------------------------------


def test_the_naive_expressions_are_the_norms() -> None:
    x = inputs.array((5, 48), "float64")
    for norm, y in (
        ("rms", variants.naive_rms_norm(x, 0.5)),
        ("layer", variants.naive_layer_norm(x, 0.5, 0.25)),
    ):
        shift = 0.25 if norm == "layer" else None
        expected = oracle.forward(x, 0.5, shift, norm=norm, eps=EPS)
        compare.close(y, expected.y.value, expected.y.bound("float64"), norm)


def test_both_places_of_eps() -> None:
    """Equal without eps; with it, inside the root counts against rms^2 and outside against rms."""
    row = inputs.array((1, 64), "float64")
    np.testing.assert_allclose(
        variants.eps_inside(row, eps=0.0), variants.eps_outside(row, eps=0.0), rtol=1e-15
    )
    for rms, eps in itertools.product((1.0, 1e-3, 1e-6), (1e-6, 1e-5)):
        x = row / np.sqrt((row * row).mean()) * rms
        inside = np.sqrt((variants.eps_inside(x, eps=eps) ** 2).mean())
        outside = np.sqrt((variants.eps_outside(x, eps=eps) ** 2).mean())
        np.testing.assert_allclose(inside, rms / math.hypot(rms, math.sqrt(eps)), rtol=1e-12)
        np.testing.assert_allclose(outside, rms / (rms + eps), rtol=1e-12)
        assert (inside < outside) == (rms < 0.5)  # 1 - eps / (2 rms^2) against 1 - eps / rms


# The command ----------------------------------------------------------------------------------


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(variant.name in printed for variant in TABLE)
    for case in ("4096x512 times 100", "8192x8192", "32x128x768", "1024x128x16384"):
        assert case in printed


@pytest.mark.parametrize(
    ("options", "count", "cases"),
    [
        (["--op", "rms_norm", "--variant", "f16x8_pack_f32", "--case", "4096x4096"], 4, 1),
        (["--op", "layer_norm", "--variant", "f16_f16", "--case", "x128x1024"], 1, 6),
        (["--dtype", "bfloat16", "--variant", "bf16x8_pack_f32"], 2, 8),
    ],
)
def test_the_list_is_of_what_would_run(
    options: list[str], count: int, cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["study", "--list", *options]) == 0
    *lines, blank, last = capsys.readouterr().out.splitlines()
    assert (len(lines), blank) == (count, "")
    assert all(options[options.index("--variant") + 1] in line for line in lines)
    assert len([name for name in last.removeprefix("Cases:").split(",") if name.strip()]) == cases


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "nosuch"], "no case's name contains 'nosuch'; there are 4096x512, "),
        (["--case", "4096x512", "--case", "x9"], "no case's name contains 'x9'; there are "),
        (["--variant", "nosuch"], "no variant's name contains 'nosuch'; there are f32, f32x4, "),
        (["--variant", "f32x4", "--dtype", "float16"], "these options together leave no variant"),
        (["--case", "x128x768", "--dtype", "bfloat16"], "these options together leave no variant"),
    ],
)
@pytest.mark.parametrize("listed", [["--list"], []])
def test_what_selects_nothing_is_refused(
    options: list[str], message: str, listed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["study", *listed, *options]) == 2
    assert f"cupy-rmsnorm: {message}" in capsys.readouterr().err


def test_without_a_gpu_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(_study._info, "available", return_value=(False, "there is none")):
        assert cli.main(["study"]) == 2
    assert "the study needs a GPU: there is none" in capsys.readouterr().err


def test_files_that_hold_no_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    for name, message in (("x.npz", "must hold one uint16 array"), ("y.npz", "cannot read")):
        assert cli.main(["study", "--list", "--activations", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def rows() -> list[_study.Row]:
    return [
        _study.Row(op, "float16", 4096, size, impl, us, 10 / us, f"4096x{size}", 1000 / us)
        for op in _study.OPS
        for size in (512, 1024)
        for impl, us in (("copy", 10.0), ("f16x8_pack_f32", 12.5))
    ]


def test_files_of_results(tmp_path: Path) -> None:
    table = rows()
    table[1].right_rows, table[1].checked_rows = 63, 64
    table[1].values = (0.5, math.nan)
    with mock.patch.object(_study, "_meta", return_value={"device": "none"}):
        report = _study.Report(tmp_path / "s.csv", tmp_path / "new" / "s.json", [{"claim": "eps"}])
    report.left_out = ["4096x512 float16", "4096x1024 float16", "8192x8192 float32"]
    report.add(table[:1])
    written = json.loads((tmp_path / "new" / "s.json").read_text())
    assert len(written["rows"]) == 1
    assert written["meta"]["left_out"] == ["4096x1024 float16", "8192x8192 float32"]
    report.add(table[1:])
    written = json.loads((tmp_path / "new" / "s.json").read_text())
    assert written["meta"] == {"device": "none", "left_out": ["8192x8192 float32"]}
    assert [path.name for path in tmp_path.glob("**/*.part")] == []
    assert written["numerics"] == [{"claim": "eps"}]
    assert len(written["rows"]) == len(table)
    row = written["rows"][1]
    assert row["op"] == "rms_norm"
    assert row["impl"] == "f16x8_pack_f32"
    assert (row["us"], row["ratio"], row["values"]) == (12.5, 0.8, [0.5, "nan"])
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert len(lines) == 1 + len(table)
    assert lines[0].startswith("op,dtype,rows,hidden_size,impl,us,ratio")


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with mock.patch.object(_study, "_peak_gflops", return_value=6e4):
        _study.plot(tmp_path, rows())
    names = {path.name for path in tmp_path.iterdir()}
    kinds = ("bandwidth", "roofline")
    assert names == {f"{kind}-{op}-float16.svg" for kind in kinds for op in _study.OPS}


def test_the_tables_of_the_documentation_follow_the_results() -> None:
    """Otherwise: python -m benchmarks.study_report."""
    text = study_report.DOCUMENT.read_text()
    assert study_report.fill(text, study_report.Results()) == text
    marks = re.findall(r"<!-- begin (\w+) -->", text)
    assert sorted(marks) == sorted(study_report.BLOCKS)
    assert len(study_verdicts.RULES) == sum(mark.startswith("verdict_") for mark in marks)


class Figures(study_report.Results):
    """Results of which only what a test gives is there."""

    def __init__(self, **given: Any) -> None:
        self.meta, self.rows, self.numerics, self.training = {}, [], [], []
        self.counters, self.compare, self.instructions = [], [], []
        self.host, self.triton, self.commits = [], [], {}
        vars(self).update(given)


def timed(op: str, impl: str, case: str, us: float, **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "impl": impl,
        "case": case,
        "dtype": "float16",
        "us": us,
        "ratio": 9.8 / us,
        "right_rows": 64,
        "checked_rows": 64,
        "wall_us": us,
        **more,
    }


def test_verdicts_wait_for_their_numbers() -> None:
    for name, rule in study_verdicts.RULES.items():
        text = rule(Figures())
        assert re.search(r"\*not measured|not been measured yet", text), name
        assert "holds:" not in text, name
        assert "fails (" not in text, name


@pytest.mark.parametrize(
    ("narrow", "verdict"), [(10.1, "Verdict: holds"), (15.0, "Verdict: fails: 1.50 times")]
)
def test_a_verdict_follows_the_numbers(narrow: float, verdict: str) -> None:
    figures = Figures(
        rows=[
            timed("rms_norm", "f16x8_pack_f32", "4096x4096", 10.0),
            timed("rms_norm", "f16x8_f32", "4096x4096", narrow),
        ]
    )
    assert study_verdicts.pack(figures).startswith(verdict)


def test_the_verdict_on_triton_names_where_it_is_faster() -> None:
    shape = {"rows": 4096, "op": "rms_norm", "dtype": "float16"}
    names = ("ours", "triton row", "triton tiled", "torch")
    rows = [
        {**shape, "hidden_size": hidden_size, "impl": name, "us": us, "ratio": 5.0 / us}
        for hidden_size, times in ((512, (10.0, 9.0, 12.0, 20.0)), (1024, (10.0, 10.0, 11.0, 12.0)))
        for name, us in zip(names, times, strict=True)
    ]
    text = study_verdicts.triton(Figures(triton=rows))
    assert "the whole row 0.50 to 0.56, tiled 0.42 to 0.45, torch 0.25 to 0.42" in text
    assert text.endswith("the whole row at rms_norm 4096x512 float16 (1.11 times its time).")


def test_the_premise_about_the_cache_is_shown_by_hits() -> None:
    counted = [{"op": "rms_norm", "impl": "f16x8_f32", "l1_hit_percent": 75.0}]
    assert "75 % L1 hits of `f16x8_f32`" in study_verdicts.dlcm(Figures(counters=counted))


def test_kernels_are_measured_against_the_plain_one() -> None:
    figures = Figures(
        rows=[
            timed(op, impl, case, us)
            for op, impl, case, us in (
                ("rms_norm", "f16x8_pack_f32", "4096x512", 10.0),
                ("rms_norm", "f16x8_pack_f32", "4096x1024", 20.0),
                ("rms_norm", "f16x8_tree", "4096x512", 11.0),
                ("rms_norm", "f16x8_tree", "4096x1024", 21.0),
            )
        ]
    )
    assert study_verdicts.kernels(figures).endswith("rms_norm: `f16x8_tree` 1.05 to 1.10.")


def test_the_overflow_verdict_names_who_was_wrong() -> None:
    case = "4096x512 times 100"
    rows = [
        timed("rms_norm", "f16x8_pack_f32", case, 1.0),
        timed("rms_norm", "f16_f16", case, 1.0, right_rows=0),
        timed("rms_norm", "torch naive", case, 1.0, right_rows=0),
    ]
    assert study_verdicts.overflow(Figures(rows=rows)).startswith("Verdict: holds.")
    rows[0]["right_rows"] = 63
    assert study_verdicts.overflow(Figures(rows=rows)).startswith("Verdict: fails: ")


@pytest.mark.parametrize(("us", "within"), [(10.0, "ahead"), (10.4, "yes"), (11.0, "no")])
def test_the_best_kernel_against_the_best_of_the_write_ups(us: float, within: str) -> None:
    rows = [
        timed("rms_norm", "f16x8_pack_f32", "4096x2048", us),
        timed("rms_norm", "f16x8_f16", "4096x2048", 1.0, right_rows=0),  # wrong: does not count
        timed("rms_norm", "ours", "4096x2048", 1.0),
    ]
    table = study_report.block_originals(Figures(rows=rows)).splitlines()
    assert len(table) == 3
    assert table[2].endswith(f"| {within} |")
    assert "`f16x8_pack_f32`" in table[2]


def test_counters_are_read_from_ncu() -> None:
    names = list(study_counters.METRICS.values())
    numbers = [str(number + 1) for number in range(len(names))]
    lines = [["ID", "Kernel Name", *names], ["", "", *["unit"] * len(names)]]
    lines += [[str(i), "kernel", *numbers] for i in range(len(study_counters.PICKED))]
    output = "==PROF== text\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    rows = study_counters.rows_of(output)
    assert [(row["op"], row["impl"]) for row in rows] == list(study_counters.PICKED)
    assert rows[0]["load_sectors_per_request"] == 2.0
    with pytest.raises(ValueError, match="6 launches were expected, ncu saw 5"):
        study_counters.rows_of(output.rsplit("\n", 1)[0])
    for op, name in study_counters.PICKED:
        assert study_counters.HIDDEN_SIZE in getattr(getattr(variants, op), name).sizes


def test_the_readme_follows_the_results() -> None:
    """Otherwise: python -m benchmarks.study_report."""
    text = study_report.README.read_text()
    assert text.count("<!-- study -->") == text.count("<!-- /study -->") == 1
    assert study_report.fill_readme(text, study_report.Results()) == text


# On a GPU -------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(
    backends.missing("cupy") is not None, reason=str(backends.missing("cupy"))
)


@pytest.mark.gpu
@needs_gpu
def test_the_callers_stream() -> None:
    """What is captured on a stream was launched on it, and nothing synchronised."""
    import cupy

    x = cupy.asarray(inputs.array((4, 1024), "float32"))
    y = cupy.empty_like(x)
    variant = variants.rms_norm.f32x4
    expected = cupy.asnumpy(variant(x))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        variant(x, out=y)
        graph = stream.end_capture()
    y.fill(0)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    compare.equal(cupy.asnumpy(y), expected)


@pytest.mark.gpu
@pytest.mark.skipif(
    backends.missing("torch-cuda") is not None, reason=str(backends.missing("torch-cuda"))
)
def test_torch_tensors() -> None:
    import torch

    for dtype, variant in (
        (torch.float16, variants.rms_norm.f16x8_pack_f32),
        (torch.bfloat16, variants.layer_norm.bf16x8_pack_f32),
    ):
        x = torch.randn(4, 1024, device="cuda").to(dtype)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = variant(x)
        side.synchronize()
        assert type(y) is torch.Tensor
        assert y.dtype == dtype
        norm = torch.nn.functional.layer_norm if variant.norm == "layer" else None
        wide = x.double()
        expected = (
            norm(wide, (1024,), eps=EPS)
            if norm
            else wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)
        )
        torch.testing.assert_close(y, expected.to(dtype), rtol=2.0**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.large
@needs_gpu
def test_more_than_two_to_the_31_elements() -> None:
    import cupy

    variant = variants.rms_norm.f16x8_pack_f32
    rows = 2**18 + 3
    need = 2 * 2 * rows * 8192
    if cupy.cuda.runtime.memGetInfo()[0] < 1.2 * need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free GPU memory")
    last = cupy.asarray(inputs.array((1, 8192), "float16"))
    x = cupy.zeros((rows, 8192), np.float16)
    x[-1:] = last
    y = variant(x)
    compare.equal(cupy.asnumpy(y[-1:]), cupy.asnumpy(variant(last)))
    assert not y[:-1].any()
