# SPDX-License-Identifier: Apache-2.0
"""Fills the tables of the README and of docs/models.md, and draws plots, from benchmarks/results/.

`python -m benchmarks.report` rewrites what stands between the marks ``<!-- begin NAME -->`` and
``<!-- end NAME -->`` of these files and draws docs/plots/*.svg (with matplotlib, if it is there).
With `--check` it changes nothing and fails if one of them is not up to date.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.race import Result, by_shape, copy_of_rows
from benchmarks.shapes import (
    ADD_RMS_NORM,
    BACKWARD,
    LAYER_NORM,
    MODEL_SHAPES,
    MODELS,
    ODD,
    ODD_SHAPES,
    RMS_NORM,
    Shape,
)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "models.md")
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
PENDING = "*Not measured yet.*"
IMPLS = ("ours", "torch", "compile", "liger", "quack", "flashinfer")
TITLES = {
    "ours": "this library",
    "torch": "torch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "flashinfer": "FlashInfer",
}
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
PLOTTED = {
    "forward": (*RMS_NORM, *ADD_RMS_NORM, *LAYER_NORM),
    "backward": BACKWARD,
}


class Results:
    """The content of the result files; empty where one is missing."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.compare = _read(folder / "compare.json")
        self.backward = _read(folder / "backward.json")
        self.demo = _read(folder / "demo.json")
        self.models = _read(folder / "models.json")

    def races(self) -> dict[Shape, dict[str, Result]]:
        """Every plain race, by impl."""
        return by_shape([*self.compare.get("rows", []), *self.backward.get("rows", [])])


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    lines = list(lines)
    if not lines:
        return PENDING
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _place(shape: Shape) -> str:
    return f"{DTYPES[shape.dtype]} {shape.rows} x {shape.hidden_size}"


def _races(results: Results, shapes: Iterable[Shape], label: Callable[[Shape], str]) -> str:
    """One line a shape: the copy's time, ours, and every ratio; the best one in bold."""
    races = results.races()
    shapes = [shape for shape in dict.fromkeys(shapes) if "ours" in races.get(shape, {})]
    impls = [impl for impl in IMPLS if any(impl in races[shape] for shape in shapes)]
    lines = []
    for shape in shapes:
        race = races[shape]
        best = max(race[impl]["ratio"] for impl in impls if impl in race)
        cells = []
        for impl in impls:
            ratio = f"{race[impl]['ratio']:.2f}" if impl in race else ""
            cells.append(f"**{ratio}**" if ratio and race[impl]["ratio"] == best else ratio)
        times = [f"{race[impl]['us']:.2f}" for impl in ("copy", "ours")]
        lines.append([label(shape), *times, *cells])
    return _table(("", "copy, us", "ours, us", *(TITLES[impl] for impl in impls)), lines)


# Blocks ----------------------------------------------------------------------------------------


def block_demo(results: Results) -> str:
    """What `cupy-rmsnorm demo --json` measured on a GPU; nothing before that."""
    lines = [
        [
            f"`{shape.op}` {_place(shape)}",
            f"{race['copy']['us']:.2f}",
            f"{race['ours']['us']:.2f}",
            f"**{race['ours']['ratio']:.2f}**",
        ]
        for shape, race in by_shape(results.demo.get("rows", [])).items()
        if {"copy", "ours"} <= set(race)
    ]
    if not lines:
        return ""
    meta = results.demo["meta"]
    table = _table(("", "copy, us", "this library, us", "of the copy's speed"), lines)
    source = "[benchmarks/results/demo.json](benchmarks/results/demo.json)"
    return f"{table}\n\n{meta['device']}, CuPy {meta['cupy']}, {meta['date']}; {source}."


def block_meta(results: Results) -> str:
    """On what it was measured."""
    meta = results.compare.get("meta") or results.backward.get("meta")
    if not meta:
        return PENDING
    names = {"triton": "Triton", "liger": "Liger", "quack": "QuACK", "flashinfer": "FlashInfer"}
    versions = [f"CuPy {meta['cupy']}", f"torch {meta['torch']}"]
    versions += [f"{title} {meta[name]}" for name, title in names.items() if meta.get(name)]
    return f"{meta['device']}, {', '.join(versions)}, {meta['date']}."


def block_rms_norm(results: Results) -> str:
    """Forward, RMSNorm."""
    return _races(results, RMS_NORM, _place)


def block_add_rms_norm(results: Results) -> str:
    """Forward, residual add and RMSNorm."""
    return _races(results, ADD_RMS_NORM, _place)


def block_layer_norm(results: Results) -> str:
    """Forward, LayerNorm."""
    return _races(results, LAYER_NORM, _place)


def block_models(results: Results) -> str:
    """Models' hidden sizes, decode and prefill."""
    names = {hidden_size: name for name, hidden_size in MODELS.items()}
    shapes = sorted(MODEL_SHAPES, key=lambda s: (s.op, list(names).index(s.hidden_size), s.rows))
    return _races(results, shapes, lambda s: f"`{s.op}` {names[s.hidden_size]}, {s.rows} rows")


def block_odd(results: Results) -> str:
    """Odd hidden sizes beside their neighbours."""
    races = results.races()
    lines = []
    for shape in ODD_SHAPES:
        even = shape._replace(hidden_size=ODD.get(shape.hidden_size, 0))
        if "ours" in races.get(shape, {}) and "ours" in races.get(even, {}):
            times = [races[each]["ours"]["us"] / each.hidden_size for each in (even, shape)]
            odd_us = races[shape]["ours"]["us"]
            rate = times[0] / times[1]
            cells = [str(even.hidden_size), f"{odd_us:.2f}", f"{rate:.2f}"]
            lines.append([f"`{shape.op}` {_place(shape)}", *cells])
    return _table(("", "beside", "ours, us", "of its rate"), lines)


def block_options(results: Results) -> str:
    """What options cost, over the plain call of the same race."""
    races = by_shape(results.compare.get("rows", []), case="plain")
    races = {
        shape: cases
        for shape, cases in races.items()
        if shape.dtype == "bfloat16" and "plain" in cases
    }
    names = list(dict.fromkeys(name for cases in races.values() for name in cases))
    names = [name for name in names if name not in ("copy", "plain")]
    lines = [
        [
            f"`{shape.op}` {_place(shape)}",
            *(f"{cases[n]['us'] / cases['plain']['us']:.3f}" if n in cases else "" for n in names),
        ]
        for shape, cases in races.items()
    ]
    return _table(("time over the plain call's", *names), lines)


def block_rows(results: Results) -> str:
    """q and k in place, and masked rows, over the bytes that they must move."""
    lines = []
    for shape, cases in by_shape(results.compare.get("rows", []), case="plain").items():
        if "plain" in cases:
            continue
        for case, row in cases.items():
            if row["impl"] == "copy":
                continue
            told = copy_of_rows(cases, case)
            name = f"`{row['op']}` {case}" if row["impl"] == "ours" else case
            of_told = "" if told is None else f"{told['us'] / row['us']:.2f}"
            times = f"{row['us']:.2f}", f"{row['ratio']:.2f}", of_told
            lines.append([name, _place(shape), *times])
    head = ("case", "rows computed", "us", "of the copy's speed", "of a copy's of these rows")
    return _table(head, lines)


def block_backward(results: Results) -> str:
    """Backward, all three."""
    return _races(results, BACKWARD, lambda shape: f"`{shape.op}` {_place(shape)}")


def block_steps(results: Results) -> str:
    """Steps of a patched model beside others; for these what it saves, and its interval."""
    rows = {(row["case"], row["impl"]): row for row in results.models.get("rows", [])}
    impls = [impl for impl in IMPLS if any(impl == each for _, each in rows)]
    lines = []
    for case in dict.fromkeys(case for case, _ in rows):
        cells = []
        for impl in impls:
            row = rows.get((case, impl), {})
            cell = f"{row['us'] / 1e3:.3f}" if row else ""
            if "gain_us" in row:
                names = ("gain_us", "gain_low_us", "gain_high_us")
                gain, low, high = (row[name] / 1e3 for name in names)
                cell += f" ({gain:+.3f}, {low:+.3f} to {high:+.3f})"
            cells.append(cell)
        lines.append([case, *cells])
    return _table(("ms", *(TITLES[impl] for impl in impls)), lines)


def blocks(names: Mapping[str, Any]) -> dict[str, Callable[[Any], str]]:
    """The functions of a module whose names begin with block_, by the rest of their names."""
    prefix = "block_"
    return {
        name.removeprefix(prefix): function
        for name, function in names.items()
        if name.startswith(prefix)
    }


BLOCKS: dict[str, Callable[[Results], str]] = blocks(globals())


def fill_blocks(text: str, content: Callable[[str], str]) -> str:
    """The document with what stands between marks written anew: the content of that name."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n{content(name)}<!-- end {name} -->"

    return re.sub(r"<!-- begin (\w+) -->\n.*?<!-- end \1 -->", block, text, flags=re.DOTALL)


def fill(text: str, results: Results) -> str:
    """The document with every block written anew."""

    def content(name: str) -> str:
        block = BLOCKS[name](results)
        return f"\n{block}\n\n" if block else ""

    return fill_blocks(text, content)


# Plots -----------------------------------------------------------------------------------------


def draw(results: Results, folder: Path = PLOTS) -> list[Path]:
    """The ratios of every implementation by shape, a file a direction; the same bytes each time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    races, written = results.races(), []
    for name, wanted in PLOTTED.items():
        shapes = [shape for shape in dict.fromkeys(wanted) if "ours" in races.get(shape, {})]
        impls = [impl for impl in IMPLS if any(impl in races[shape] for shape in shapes)]
        if not shapes:
            continue
        figure = Figure(figsize=(8, 0.8 + 0.36 * len(shapes)))
        axes = figure.add_subplot()
        for impl in reversed(impls):
            at = [number for number, shape in enumerate(shapes) if impl in races[shape]]
            ratios = [races[shapes[number]][impl]["ratio"] for number in at]
            style: dict[str, Any] = {"s": 34, "alpha": 0.8, "marker": "o"}
            if impl == "ours":
                style = {"s": 70, "marker": "D", "color": "black"}
            axes.scatter(ratios, at, label=TITLES[impl], **style)
        axes.axvline(1, color="grey", linewidth=1)
        axes.set_yticks(range(len(shapes)), [f"{shape.op} {_place(shape)}" for shape in shapes])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("share of the speed of a device copy of the same bytes")
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize="small", loc="lower left")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.svg"
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        written.append(path)
    return written


def main() -> int:
    """Rewrite or check the document, and draw."""
    parser = argparse.ArgumentParser(description="Fill the tables from benchmarks/results.")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = Results()
    texts = {path: path.read_text() for path in DOCUMENTS}
    filled = {path: fill(text, results) for path, text in texts.items()}
    if args.check:
        return int(texts != filled)
    for path, text in filled.items():
        path.write_text(text)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed")
    else:
        print("\n".join(map(str, draw(results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
