# SPDX-License-Identifier: Apache-2.0
"""Fills the tables and verdicts of docs/study.md, and the README's, from benchmarks/results/.

`python -m benchmarks.study_report` rewrites what stands between the marks ``<!-- begin NAME -->``
and ``<!-- end NAME -->``, in the README between ``<!-- study -->`` and ``<!-- /study -->``; a table
whose numbers are not there yet says so. With `--check` it changes nothing and fails if a file is
not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, study_verdicts
from cupy_rmsnorm import variants

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "study.md"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots" / "study"
WIDTH = 120  # of the documents' lines
PENDING = "*Not measured yet.*"
PEERS = ("ours", "torch", "torch naive", "cupy naive")
ARCH = 90  # whose instructions are shown
TENSOR_GFLOPS = 989_000  # NVIDIA's figure for an H200, float16, dense
# The best RMSNorm kernel of the write-ups at each case, us and share of the copy of its own run, on
# an H200 as well (2026-11-29).
ORIGINALS = {
    ("4096x512", "float16"): (4.35, 0.80),
    ("4096x1024", "float16"): (6.1, 0.98),
    ("4096x2048", "float16"): (10.45, 0.95),
    ("4096x4096", "float16"): (19.6, 0.91),
    ("4096x8192", "float16"): (42.6, 0.79),
    ("8192x8192", "float16"): (82.8, 0.78),
    ("4096x4096", "float32"): (40.2, 0.84),
}
TORCH_LIKE = {"rms_norm": 4, "layer_norm": 7}  # operations an element, with weight and bias

Row = dict[str, Any]


class Results:
    """The rows of the result files; empty where a file is missing."""

    def __init__(self) -> None:
        study = _read("study.json")
        self.meta: dict[str, Any] = study.get("meta", {})
        self.rows: list[Row] = study.get("rows", [])
        self.numerics: list[Row] = study.get("numerics", [])
        # A run on more rows of activations than the package has.
        self.activations: list[Row] = _read("study_activations.json").get("rows", [])
        self.training: list[Row] = _read("train.json").get("rows", [])
        self.counters: list[Row] = _read("counters.json").get("rows", [])
        self.compare: list[Row] = _read("compare.json").get("rows", [])
        self.triton: list[Row] = _read("study_triton.json").get("rows", [])
        self.host: list[Row] = _read("host.json").get("rows", [])
        self.instructions: list[Row] = _read("instructions.json").get("rows", [])
        self.commits: dict[str, str] = {
            name: commit
            for name in ("study_activations", "study_triton", "counters", "train", "host")
            if (commit := _read(f"{name}.json").get("meta", {}).get("commit"))
        }

    def us(self, **wanted: Any) -> float | None:
        """The time of the one row with these values; None where there is none."""
        found = [row["us"] for row in self.rows if _matches(row, wanted)]
        return float(found[0]) if found else None

    def cases(self, group: str) -> list[str]:
        """The names of the plain cases ("rows") or of the batches, in order."""
        batch = re.compile(r"\d+x\d+x\d+")
        names = dict.fromkeys(row["case"] for row in self.rows)
        return [name for name in names if bool(batch.fullmatch(name)) == (group == "batch")]


def _read(name: str) -> dict[str, Any]:
    path = RESULTS / name
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _matches(row: Row, wanted: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in wanted.items())


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    lines = list(lines)
    if not lines:
        return PENDING
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _ratio(value: float | None, other: float | None) -> str:
    return "" if value is None or other is None else f"{value / other:.2f}"


# Blocks --------------------------------------------------------------------------------------


def block_variants(_: Results) -> str:
    """Every name, from the library's own table."""
    norms = {"rms": "RMSNorm", "layer": "LayerNorm"}
    lines: dict[str, list[str]] = {}
    for variant in variants.TABLE:
        line = lines.setdefault(
            variant.name,
            [
                f"`{variant.name}`",
                norms[variant.norm],
                str(variant.sizes),
                variant.dtype,
                variant.accumulation,
                variant.summary,
            ],
        )
        if line[1] != norms[variant.norm]:
            line[1] = "both"
    return _table(("name", "norm", "hidden size", "loads", "sums in", ""), lines.values())


def block_best(results: Results) -> str:
    """The fastest study kernel of each plain case with all rows right, and its peers."""
    lines = []
    for case in results.cases("rows"):
        for op in ("rms_norm", "layer_norm"):
            for dtype in ("float32", "float16", "bfloat16"):
                rows = [
                    row
                    for row in results.rows
                    if _matches(row, {"case": case, "op": op, "dtype": dtype})
                ]
                ranked = sorted(
                    (row for row in rows if _is_right_variant(row)),
                    key=lambda row: float(row["us"]),
                )
                if not ranked:
                    continue
                best, times = ranked[0], {row["impl"]: row for row in rows}
                lines.append(
                    [
                        op,
                        case,
                        dtype,
                        f"`{best['impl']}` {best['us']:.2f} ({best['ratio']:.2f})",
                        *(
                            f"{times[name]['us']:.2f} ({times[name]['ratio']:.2f})"
                            if name in times
                            else ""
                            for name in PEERS
                        ),
                        f"{times['copy']['us']:.2f}",
                    ]
                )
    head = ("op", "case", "dtype", "best study kernel, us (of copy)", *PEERS, "copy")
    return _table(head, lines)


def block_originals(results: Results) -> str:
    """The best study kernel against the write-ups' best, each as a share of its run's copy."""
    lines = []
    for (case, dtype), (us, ratio) in ORIGINALS.items():
        rows = [
            row
            for row in results.rows
            if _matches(row, {"case": case, "op": "rms_norm", "dtype": dtype})
            and _is_right_variant(row)
        ]
        if rows:
            best = min(rows, key=lambda row: float(row["us"]))
            behind = best["ratio"] / ratio - 1
            verdict = "ahead" if behind >= 0 else "yes" if behind >= -0.02 else "no"
            lines.append(
                [
                    case,
                    dtype,
                    f"{us:.2f} ({ratio:.2f})",
                    f"`{best['impl']}` {best['us']:.2f} ({best['ratio']:.2f})",
                    f"{behind:+.1%}",
                    verdict,
                ]
            )
    head = ("case", "dtype", "write-ups' best, us (of copy)", "best study kernel", "", "within 2 %")
    return _table(head, lines)


def block_triton(results: Results) -> str:
    """Two Triton kernels on the study's shapes, in one race with this library and torch."""
    names = ("copy", "ours", "triton row", "triton tiled", "torch")
    races: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in results.triton:
        place = (row["op"], row["rows"], row["hidden_size"], row["dtype"])
        races.setdefault(place, {})[row["impl"]] = row
    lines = [
        [op, f"{rows}x{hidden_size}", dtype]
        + [f"{found[n]['us']:.2f} ({found[n]['ratio']:.2f})" if n in found else "" for n in names]
        for (op, rows, hidden_size, dtype), found in races.items()
    ]
    head = ("op", "case", "dtype", "copy, us", "ours", "Triton, whole row", "tiled", "torch")
    return _table(head, lines)


def block_counters(results: Results) -> str:
    """All that ncu counted; nothing where it could not."""
    names = {
        "load_sectors_per_request": ("sectors a load", ".1f"),
        "store_sectors_per_request": ("a store", ".1f"),
        "l1_hit_percent": ("L1 hits, %", ".0f"),
        "shared_wavefronts": ("shared memory wavefronts", ".0f"),
        "instructions": ("instructions of warps", ".0f"),
        "dram_read_bytes": ("bytes read", ".3g"),
        "dram_write_bytes": ("written", ".3g"),
    }
    lines = [
        [
            row["op"],
            f"`{row['impl']}`",
            *(f"{row[name]:{form}}" for name, (_, form) in names.items()),
        ]
        for row in results.counters
    ]
    head = ("op", "4096x4096", *(title for title, _ in names.values()))
    return _table(head, lines) if lines else ""


def block_plots(_: Results) -> str:
    """What `--plot docs/plots/study` drew."""
    files = sorted(PLOTS.glob("*.svg"))
    places = [path.relative_to(DOCUMENT.parent) for path in files]
    return "\n\n".join(f"![{path.stem}]({path.as_posix()})" for path in places) or PENDING


def block_meta(results: Results) -> str:
    """On what, and what is missing."""
    meta = results.meta
    if not meta:
        return PENDING
    text = (
        f"{meta['device']}, CuPy {meta['cupy']}, torch {meta['torch']}, {meta['date']}, commit "
        f"{meta['commit']}."
    )
    if results.commits:
        others = (f"`{name}.json` {commit}" for name, commit in results.commits.items())
        text = f"{text} Other files, measured at commits: {', '.join(others)}."
    if left_out := meta.get("left_out"):
        text = f"{text} Left out for time: {', '.join(left_out)}."
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def readme_table(results: Results) -> str:
    """The best study kernel of each plain case in float16, beside this library and torch."""
    lines = []
    for op in ("rms_norm", "layer_norm"):
        for case in _plain_cases():
            wanted = {"case": case, "op": op, "dtype": "float16"}
            rows = [row for row in results.rows if _matches(row, wanted)]
            ranked = sorted(filter(_is_right_variant, rows), key=lambda row: float(row["us"]))
            if ranked:
                times = {row["impl"]: row for row in rows}
                cells = [
                    f"{times[name]['us']:.2f} ({times[name]['ratio']:.2f})" if name in times else ""
                    for name in ("ours", "torch", "torch naive")
                ]
                best = f"`{ranked[0]['impl']}` {ranked[0]['us']:.2f} ({ranked[0]['ratio']:.2f})"
                lines.append([op, case, f"{times['copy']['us']:.2f}", best, *cells])
    head = ("float16, us (of copy)", "case", "copy", "best study kernel", "this library")
    return _table((*head, "torch", "unfused in torch"), lines)


def _is_right_variant(row: Row) -> bool:
    name = row["impl"]
    if name in (*PEERS, "copy") or "-dlcm" in name:
        return False
    return bool(row["right_rows"] == row["checked_rows"])


def block_rms_layer(results: Results) -> str:
    """LayerNorm over RMSNorm."""
    names = ("f32", "f32x4", "f16_f32", "f16x2_f16", "f16x8_f32", "f16x8_pack_f32", "ours", "torch")
    lines = []
    for name in names:
        for dtype in ("float32", "float16"):
            ratios = [
                _ratio(
                    results.us(op="layer_norm", case=case, impl=name, dtype=dtype),
                    results.us(op="rms_norm", case=case, impl=name, dtype=dtype),
                )
                for case in _plain_cases()
            ]
            if any(ratios):
                lines.append([f"`{name}`", dtype, *ratios])
    return _table(("", "dtype", *_plain_cases()), lines)


def _plain_cases() -> tuple[str, ...]:
    return study_verdicts.PLAIN_CASES


def _over(
    results: Results, base: str, names: Iterable[str], dtypes: Iterable[str] = ("float16",)
) -> str:
    """Time of each name over that of `base`, by case."""
    lines = []
    for op in ("rms_norm", "layer_norm"):
        for name in names:
            for dtype in dtypes:
                ratios = [
                    _ratio(
                        results.us(op=op, case=case, impl=name, dtype=dtype),
                        results.us(op=op, case=case, impl=base, dtype=dtype),
                    )
                    for case in _plain_cases()
                ]
                if any(ratios):
                    lines.append([op, f"`{name}`", *ratios])
    return _table(("op", f"over `{base}`", *_plain_cases()), lines)


def block_pack(results: Results) -> str:
    """Four narrow loads over one wide one."""
    return _over(results, "f16x8_pack_f32", ("f16x8_f32", "f16_f32"))


def block_dlcm(results: Results) -> str:
    """With a cache modifier over without."""
    tables = []
    for base, dtype in (
        ("f16x8_pack_f32", "float16"),
        ("f32x4", "float32"),
        ("f32_ilp_1", "float32"),
    ):
        names = [f"{base} -dlcm={modifier}" for modifier in ("ca", "cg")]
        tables.append(_over(results, base, names, (dtype,)))
    return "\n\n".join(dict.fromkeys(tables))


def block_block_size(results: Results) -> str:
    """vector_weight at its three block sizes."""
    lines = []
    for case in (*_plain_cases(), *results.cases("batch")):
        for short, dtype in (("f32", "float32"), ("f16", "float16")):
            times = {
                threads: results.us(
                    case=case, op="rms_norm", impl=f"{short}_vector_weight_{threads}", dtype=dtype
                )
                for threads in (256, 512, 1024)
            }
            known = {threads: us for threads, us in times.items() if us is not None}
            if known:
                best = min(known, key=lambda threads: known[threads])
                cells = [f"{us:.2f}" for us in known.values()]
                lines.append([case, dtype, *cells, str(best)])
    return _table(("case", "dtype", "256, us", "512, us", "1024, us", "fastest"), lines)


def block_eps(results: Results) -> str:
    """Error by dtype, scale and eps."""
    rows = [row for row in results.numerics if row["claim"] == "eps"]
    values = list(dict.fromkeys(row["eps"] for row in rows))
    lines = [
        [
            dtype,
            f"{scale:g}",
            *(
                f"{row['error']:.1e}"
                for row in rows
                if _matches(row, {"dtype": dtype, "scale": scale})
            ),
        ]
        for dtype, scale in dict.fromkeys((row["dtype"], row["scale"]) for row in rows)
    ]
    return _table(("dtype", "scale", *(f"eps {value:g}" for value in values)), lines)


def block_eps_place(results: Results) -> str:
    """Both published places of eps: the root mean square of an output row."""
    rows = [row for row in results.numerics if row["claim"] == "eps place"]
    norms = {(row["rms"], row["place"]): row["output rms"] for row in rows}
    lines = [
        [f"{rms:g}", *(f"{norms[rms, place]:.6g}" for place in ("inside", "outside"))]
        for rms in dict.fromkeys(row["rms"] for row in rows)
    ]
    return _table(("root mean square of x", "of `eps_inside`", "of `eps_outside`"), lines)


def block_fusion(results: Results) -> str:
    """The naive expressions over this library."""
    dtypes = ("float32", "float16")
    lines = []
    for op in ("rms_norm", "layer_norm"):
        for name in ("cupy naive", "torch naive", "torch"):
            for dtype in dtypes:
                ratios = [
                    _ratio(
                        results.us(op=op, case=case, impl=name, dtype=dtype),
                        results.us(op=op, case=case, impl="ours", dtype=dtype),
                    )
                    for case in _plain_cases()
                ]
                if any(ratios):
                    lines.append([op, name, dtype, *ratios])
    return _table(("op", "over `ours`", "dtype", *_plain_cases()), lines)


def block_reduction(results: Results) -> str:
    """Other sums over the shuffle version."""
    names = ("f16x8_tree", "f16x8_groups", "f16x8_mma", "f16x8_cluster")
    schedules = ("f16x8_persistent", "f16x8_async")
    wide = _over(results, "f16x8_pack_f32", (*names, *schedules))
    single = _over(
        results,
        "f32x4",
        ("f32x4_tree", "f32x4_groups", "f32x4_cluster", "f32x4_persistent", "f32x4_async"),
        ("float32",),
    )
    return wide if wide == single else f"{wide}\n\n{single}"


def block_ilp(results: Results) -> str:
    """More independent sums over one."""
    half = _over(results, "f16_ilp_1", ("f16_ilp_2", "f16_ilp_4"))
    single = _over(results, "f32_ilp_1", ("f32_ilp_2", "f32_ilp_4"), ("float32",))
    return half if half == single else f"{half}\n\n{single}"


def block_cancellation(results: Results) -> str:
    """Errors of one pass and of two; and what the one pass saves."""
    rows = [row for row in results.numerics if row["claim"] == "cancellation"]
    lines = []
    for mean in dict.fromkeys(row["mean"] for row in rows):
        errors = {row["impl"]: row["error"] for row in rows if row["mean"] == mean}
        lines.append([f"{mean:g}", *(f"{error:.1e}" for error in errors.values())])
    errors = _table(("mean", "two passes", "E[x²] - E[x]²"), lines)
    times = _over(results, "f16x8_pack_f32", ("f16x8_single_pass",))
    return errors if times == PENDING else f"{errors}\n\nTime over two passes:\n\n{times}"


def block_shift(results: Results) -> str:
    """Changes of output and gradient."""
    rows = [row for row in results.numerics if row["claim"] == "mean shift"]
    lines = [
        [
            row["op"],
            f"{row['shift']:g}",
            f"{row['output change']:.1e}",
            f"{row['gradient change']:.1e}",
        ]
        for row in rows
    ]
    return _table(("op", "shift", "output", "gradient"), lines)


def block_intensity(results: Results) -> str:
    """What the copy's bandwidth allows, as a share of two peaks."""
    peak = results.meta.get("peak_gflops")
    lines = []
    if peak:
        for op, operations in TORCH_LIKE.items():
            for dtype, size in (("float16", 2), ("float32", 4)):
                rows = [
                    row
                    for row in results.rows
                    if _matches(row, {"case": "8192x8192", "op": op, "dtype": dtype})
                    and row["impl"] == "ours"
                ]
                for row in rows:
                    flops = row["gbps"] * operations / (2 * size)
                    lines.append(
                        [
                            op,
                            dtype,
                            f"{operations / (2 * size):.2f}",
                            f"{flops:.0f}",
                            f"{flops / peak:.1%}",
                            f"{flops / TENSOR_GFLOPS:.2%}",
                        ]
                    )
    head = (
        *("op", "dtype", "operations a byte", "GFLOP/s of `ours`, 8192x8192"),
        *("of float32's peak", "of the tensor cores'"),
    )
    return _table(head, lines)


def block_overflow(results: Results) -> str:
    """Right rows at x * 100 and of the activations, by variant."""
    cases = ("4096x512", "4096x512 times 100", "activations")
    rows = [row for row in results.rows if row["case"] != cases[-1] or not results.activations]
    rows += [row for row in results.activations if row["case"] == cases[-1]]
    lines = []
    for op in ("rms_norm", "layer_norm"):
        names = dict.fromkeys(
            row["impl"]
            for row in rows
            if row["op"] == op and row["dtype"] == "float16" and row["impl"] != "copy"
        )
        for name in names:
            if "dlcm" in name:
                continue
            counts = []
            for case in cases:
                wanted = {"op": op, "dtype": "float16", "impl": name, "case": case}
                found = [row for row in rows if _matches(row, wanted)]
                counts.append(
                    f"{found[0]['right_rows']} of {found[0]['checked_rows']}" if found else ""
                )
            if any(counts):
                lines.append([op, f"`{name}`", *counts])
    return _table(("op", "float16", *cases), lines)


def block_batch(results: Results) -> str:
    """Batches of sequences, best variant and peers, as a share of the copy."""
    lines = []
    for case in results.cases("batch"):
        for op in ("rms_norm", "layer_norm"):
            wanted = {"case": case, "op": op, "dtype": "float16"}
            rows = [row for row in results.rows if _matches(row, wanted)]
            ranked = sorted(
                (row for row in rows if _is_right_variant(row)),
                key=lambda row: float(row["us"]),
            )
            if not ranked:
                continue
            times = {row["impl"]: row for row in rows}
            lines.append(
                [
                    op,
                    case,
                    f"`{ranked[0]['impl']}` {ranked[0]['us']:.2f} ({ranked[0]['ratio']:.2f})",
                    *(
                        f"{times[name]['us']:.2f} ({times[name]['ratio']:.2f})"
                        if name in times
                        else ""
                        for name in ("ours", "torch")
                    ),
                ]
            )
    return _table(("op", "case", "best study kernel, us (of copy)", "ours", "torch"), lines)


def block_training(results: Results) -> str:
    """Losses by norm, over seeds."""
    lines = []
    for norm in dict.fromkeys(row["norm"] for row in results.training):
        rows = [row for row in results.training if row["norm"] == norm]
        losses = [row["valid_loss"] for row in rows]
        lines.append(
            [
                norm,
                " ".join(f"{loss:.4f}" for loss in losses),
                f"{sum(losses) / len(losses):.4f}",
                f"{sum(row['train_loss'] for row in rows) / len(rows):.4f}",
            ]
        )
    return _table(("norm", "validation loss by seed", "mean", "training loss, mean"), lines)


def _instructions(results: Results, picked: Iterable[tuple[str, str]], dlcm: bool = False) -> str:
    lines = []
    for op, name in picked:
        wanted = {"op": op, "impl": name, "hidden_size": 1024, "arch": ARCH}
        for row in results.instructions:
            if _matches(row, wanted) and (dlcm or row["dlcm"] == "default"):
                lines.append(
                    [
                        op,
                        f"`{name}`" + (f" {row['dlcm']}" if dlcm else ""),
                        str(row["registers"]),
                        str(row["instructions"]),
                        _codes(row["global_loads"]),
                        _codes(row["global_stores"]),
                        str(row["float"]),
                        str(row["shuffles"]),
                        str(sum(row["shared"].values())),
                        str(row["barriers"]),
                    ]
                )
    head = (
        *("op", "", "registers", "instructions", "loads", "stores", "arithmetic"),
        *("shuffles", "shared loads and stores", "barriers"),
    )
    return _table(head, lines)


def _codes(codes: dict[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in codes.items())


def block_rms_layer_instructions(results: Results) -> str:
    """One pair of kernels."""
    return _instructions(
        results, (("rms_norm", "f16x8_pack_f32"), ("layer_norm", "f16x8_pack_f32"))
    )


def block_pack_instructions(results: Results) -> str:
    """Wide and narrow loads."""
    return _instructions(results, (("rms_norm", "f16x8_pack_f32"), ("rms_norm", "f16x8_f32")))


def block_dlcm_instructions(results: Results) -> str:
    """The load under each modifier."""
    return _instructions(results, (("rms_norm", "f32x4"), ("rms_norm", "f32_ilp_1")), dlcm=True)


def block_reduction_instructions(results: Results) -> str:
    """Four ways to sum."""
    names = ("f16x8_pack_f32", "f16x8_tree", "f16x8_groups", "f16x8_mma")
    return _instructions(results, [("rms_norm", name) for name in names])


def _wrapped(rule: Callable[[Results], str]) -> Callable[[Results], str]:
    return lambda results: textwrap.fill(
        rule(results), WIDTH, break_long_words=False, break_on_hyphens=False
    )


BLOCKS: dict[str, Callable[[Results], str]] = {
    **report.blocks(globals()),
    **{name: _wrapped(rule) for name, rule in study_verdicts.RULES.items()},
}


def fill(text: str, results: Results) -> str:
    """The document with every table written anew."""
    return report.fill_blocks(text, lambda name: BLOCKS[name](results) + "\n")


def fill_readme(text: str, results: Results) -> str:
    """The README with its table of the study written anew."""
    table = f"<!-- study -->\n\n{readme_table(results)}\n\n<!-- /study -->"
    return re.sub(r"<!-- study -->\n.*?<!-- /study -->", lambda _: table, text, flags=re.DOTALL)


def main() -> int:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results, stale = Results(), False
    for path, filling in ((DOCUMENT, fill), (README, fill_readme)):
        text = path.read_text()
        filled = filling(text, results)
        stale |= text != filled
        if not args.check:
            path.write_text(filled)
    return int(args.check and stale)


if __name__ == "__main__":
    sys.exit(main())
