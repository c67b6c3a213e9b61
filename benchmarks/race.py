# SPDX-License-Identifier: Apache-2.0
"""One race of many implementations of which any may fail, and the run of all races.

`cupy_rmsnorm._bench` has the method. Here a candidate that raises, computes something else or
cannot be captured is reported and left out, or timed without a graph, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import Shape
from cupy_rmsnorm import _bench, _info

FIRST_CALLS = 3  # before the capture: they compile and autotune
Result = dict[str, Any]  # a row of a result file
Make = Callable[[], _bench.Call]  # what a candidate's call is made by; may raise


class Wrong(Exception):
    """A candidate's output is not the expected one."""


class Candidate(NamedTuple):
    """One implementation in a race. `check` raises `Wrong` for the outputs of a call."""

    make: Make
    check: Callable[[Any], None]
    impl: str
    dtype: str
    case: str | None = None


@dataclass
class Timing:
    """Seconds a round of each candidate and of each copy, and why others have none."""

    seconds: _bench.Times
    copies: _bench.Times
    failures: dict[str, str] = field(default_factory=dict)
    uncaptured: dict[str, str] = field(default_factory=dict)


def reason(error: BaseException) -> str:
    """An error in one line that says nothing about this machine's folders."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = re.sub(r"(?<![\w.])(/[\w.@+-]+){2,}", "...", line)
    return f"{type(error).__name__}: {line}"[:200].rstrip(": ")


class _Stream:
    """Work on a stream without a graph, with the interface of one."""

    def __init__(self, call: _bench.Call, placements: int) -> None:
        self._call, self._placements = call, placements

    def launch(self, stream: Any) -> None:
        for i in range(self._placements):
            self._call(i)


def time_on_gpu(
    candidates: Mapping[str, Candidate], nbytes: int, placements: int, rounds: int
) -> Timing:
    """Time all that can be timed, in turns, on one stream that CuPy and torch both work on."""
    import cupy
    import torch

    stream = cupy.cuda.Stream(non_blocking=True)
    copies = _bench.copy_candidates(*_bench.copy_rings(nbytes, placements))
    torch.cuda.synchronize()  # whatever fills the buffers runs on other streams
    timing = Timing({}, {})
    graphs: dict[str, tuple[Any, int]] = {}
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for name, call in copies.items():
            graphs[name] = _bench._graph(call, placements, stream, first_calls=FIRST_CALLS)
        for name, candidate in candidates.items():
            try:
                call = candidate.make()
                outputs = call(0)
                stream.synchronize()
                candidate.check(outputs)
                del outputs
            except Exception as error:
                timing.failures[name] = reason(error)
                stream.synchronize()  # raises where the device itself has failed: nothing helps
                continue
            try:
                graph = _bench._graph(call, placements, stream, first_calls=FIRST_CALLS)
            except Exception as error:
                timing.uncaptured[name] = reason(error)
                stream.synchronize()
                graph = _Stream(call, placements), placements
            graphs[name] = graph
        fill_l2 = _bench.l2_filler()
        times: _bench.Times = {name: [] for name in graphs}
        for number in range(rounds):
            for name in list(graphs)[:: -1 if number % 2 else 1]:
                graph, launches = graphs[name]
                fill_l2(0)
                times[name].append(_bench._replay(graph, stream) / launches)
        stream.synchronize()
    timing.copies = {name: times.pop(name) for name in copies}
    timing.seconds = times
    return timing


def free_memory() -> None:
    """Give back what a race held: the next one has other sizes."""
    import cupy
    import torch

    cupy.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()


def results(
    shape: Shape, candidates: Mapping[str, Candidate], timing: Timing
) -> tuple[list[Result], list[Result]]:
    """The rows of a race, and what was left out of it. The copy is the fastest one's median,
    scaled from two tensors to as many as the function must move."""
    copy = min(statistics.median(seconds) for seconds in timing.copies.values())
    copy *= 1 if not shape.backward else shape.tensors / 2
    place = {"op": shape.op, "dtype": shape.dtype}
    place |= {"rows": shape.rows, "hidden_size": shape.hidden_size}
    cases = dict.fromkeys((c.dtype, c.case) for c in candidates.values())
    rows = [
        _row(place, dtype, case, "copy", copy, copy)
        for dtype, case in cases
        if case in (None, "plain")
    ]
    left_out = []
    for name, candidate in candidates.items():
        dtype, case, impl = candidate.dtype, candidate.case, candidate.impl
        if name in timing.failures:
            row = {**place, "dtype": dtype, "impl": impl, "reason": timing.failures[name]}
            left_out.append(row | ({} if case is None else {"case": case}))
            continue
        seconds = timing.seconds[name]
        row = _row(place, dtype, case, impl, statistics.median(seconds), copy)
        row["spread"] = round((max(seconds) - min(seconds)) / statistics.median(seconds), 4)
        if name in timing.uncaptured:
            row["uncaptured"] = timing.uncaptured[name]
        rows.append(row)
    return rows, left_out


def _row(
    place: Result, dtype: str, case: str | None, impl: str, seconds: float, copy: float
) -> Result:
    row = {**place, "dtype": dtype, "impl": impl}
    if case is not None:
        row["case"] = case
    return row | {"us": round(seconds * 1e6, 4), "ratio": round(copy / seconds, 4)}


# A run -----------------------------------------------------------------------------------------


def parser(description: str, budget: float) -> argparse.ArgumentParser:
    """The options that compare.py and backward.py share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--only", default="", help="substring of 'op dtype rowsxhidden_size'")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--budget", type=float, default=budget, help="begin no race after seconds")
    made.add_argument("--json", type=Path)
    made.add_argument("--commit", help="of what is measured, where this is no checkout")
    made.add_argument("--resume", type=Path, help="keep the rows of this result file")
    return made


def need(*modules: str) -> None:
    """End the program, saying what to install, where one of them is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"this benchmark needs {' and '.join(missing)}; run: pip install {' '.join(missing)}"
        )


def need_gpu() -> None:
    """End the program, saying why, where there is none."""
    usable, why = _info.available()
    if not usable:
        raise SystemExit(f"this benchmark needs a GPU: {why}")


class Run:
    """Races one after the other within a budget; what is measured is written after each."""

    def __init__(
        self,
        options: argparse.Namespace,
        begin: float,
        meta: dict[str, Any],
        renewed: Sequence[Shape] = (),
    ) -> None:
        self._options, self._begin = options, begin
        self.meta = meta
        self.rows: list[Result] = []
        self.left_out: list[Result] = []
        self.not_begun: list[str] = []
        self._of_commit: Result = {}  # what rows say where they are not of the file's commit
        if options.resume is not None:
            earlier = json.loads(options.resume.read_text())
            self.rows, self.left_out = earlier["rows"], earlier.get("left_out", [])
            self.meta = earlier["meta"] | meta
            if renewed:
                self._renew(renewed, earlier["meta"], meta)

    def _renew(
        self, shapes: Sequence[Shape], earlier: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        """Measure these shapes' cases anew, on what the other rows were measured on."""
        for name in ("device", "driver", "runtime", "cupy", "torch", "rounds"):
            if earlier[name] != meta[name]:
                raise SystemExit(f"the other rows are of {name} {earlier[name]}, not {meta[name]}")
        self.meta = earlier
        self._of_commit = {"commit": meta["commit"]}
        self.rows = [row for row in self.rows if "case" not in row or shape_of(row) not in shapes]

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def races(self, shapes: Sequence[Shape], case: str | None = None) -> Iterator[Shape]:
        """The wanted shapes that have no rows yet, until the budget is spent."""
        done = {shape_of(row) for row in self.rows if ("case" in row) == (case is not None)}
        wanted = [s for s in shapes if self._options.only in str(s) and s not in done]
        begin = time.perf_counter()
        for number, shape in enumerate(wanted):
            each = (time.perf_counter() - begin) / number if number else 0.0
            if self.seconds() + each > self._options.budget:
                self.not_begun += [str(shape) for shape in wanted[number:]]
                print(f"budget spent, {len(wanted) - number} shapes not begun", flush=True)
                self.write()
                return
            left = each * (len(wanted) - number)
            print(
                f"[{self.seconds():.0f} s, {number + 1} of {len(wanted)}, {left:.0f} s to go] "
                f"{shape}",
                flush=True,
            )
            yield shape

    def race(self, shape: Shape, candidates: Mapping[str, Candidate], placements: int) -> None:
        """Time, print and write one race."""
        nbytes = 2 * shape.tensor_bytes if shape.backward else shape.nbytes
        timing = time_on_gpu(candidates, nbytes, placements, self._options.rounds)
        rows, left_out = results(shape, candidates, timing)
        self.rows += [row | self._of_commit for row in rows]
        self.left_out += left_out
        print("   " + ", ".join(map(_shown, rows)), flush=True)
        for row in left_out:
            print(f"   {row['impl']} {row.get('case', '')} left out: {row['reason']}", flush=True)
        self.write()

    def all(
        self,
        shapes: Sequence[Shape],
        candidates: Callable[[Shape, int], Mapping[str, Candidate]],
        case: str | None = None,
    ) -> None:
        """Race `candidates`, made for a shape and a number of placements, on every shape."""
        for shape in self.races(shapes, case):
            try:
                count = _bench.placement_count(shape.nbytes)
                self.race(shape, candidates(shape, count), count)
            except Exception as error:
                self.failed(shape, error)
            try:
                free_memory()
            except Exception as error:  # the device itself has failed
                print(f"stopped: {reason(error)}", flush=True)
                return

    def failed(self, shape: Shape, error: BaseException) -> None:
        """A whole race that could not be run."""
        print(f"   FAILED {reason(error)}", flush=True)
        place = dict(zip(("op", "dtype", "rows", "hidden_size"), shape, strict=True))
        self.left_out.append({**place, "impl": "all", "reason": reason(error)})
        self.write()

    def write(self) -> None:
        if self._options.json is None:
            return
        content = {
            "meta": self.meta,
            "rows": self.rows,
            "left_out": self.left_out,
            "not_begun": self.not_begun,
        }
        partial = self._options.json.with_suffix(".partial")
        partial.write_text(dumps(content))
        os.replace(partial, self._options.json)


def _shown(row: Result) -> str:
    case = f" {row['case']}" if row.get("case") else ""
    return f"{row['impl']}{case} {row['us']:.2f} ({row['ratio']:.3f})"


def taken_over(earlier: dict[str, Any], name: str = "rows") -> list[Result]:
    """Rows of an earlier result file, each with the commit that it was measured at."""
    commit = {"commit": earlier["meta"].get("commit")}
    return [commit | row for row in earlier[name]]


def dumps(content: dict[str, Any]) -> str:
    """JSON with one line a row."""
    parts = []
    for name, value in content.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
            parts.append(f'"{name}": [\n{lines}\n]' if value else f'"{name}": []')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


PEERS = {"liger": "liger-kernel", "quack": "quack-kernels", "flashinfer": "flashinfer-python"}


def meta(rounds: int, commit: str | None) -> dict[str, Any]:
    """What the numbers depend on; no names of hosts or folders."""
    import cupy
    import torch

    runtime = cupy.cuda.runtime
    device = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "device": device["name"].decode(),
        "multiprocessors": device["multiProcessorCount"],
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        **{name: _version(package) for name, package in PEERS.items()},
        "python": ".".join(map(str, sys.version_info[:3])),
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "rounds": rounds,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


# Bars ------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """One demand on one shape: `value` must be at least (or, `most`, at most) `limit`."""

    shape: str
    what: str
    value: float
    limit: float
    most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.most else self.value >= self.limit


def best_peer(rows: Mapping[str, Result]) -> Result | None:
    """The fastest of the others in one race, by impl."""
    others = [row for impl, row in rows.items() if impl not in ("ours", "copy")]
    return min(others, key=lambda row: float(row["us"]), default=None)


def shape_of(row: Result) -> Shape:
    """What a row was measured on."""
    return Shape(row["op"], row["dtype"], row["rows"], row["hidden_size"])


def copy_of_rows(cases: dict[str, Result], case: str) -> Result | None:
    """Of a case that looks masked rows up: the copy that is told where they are."""
    return cases.get(case.replace("where", "copy")) if case.startswith("where") else None


def by_shape(rows: Sequence[Result], *, case: str | None = None) -> dict[Shape, dict[str, Result]]:
    """The rows of the plain races (or of those with a case), by shape and impl (or case)."""
    found: dict[Shape, dict[str, Result]] = {}
    for row in rows:
        if ("case" in row) == (case is not None):
            name = row["impl"] if case is None or row["impl"] == "copy" else row["case"]
            found.setdefault(shape_of(row), {})[name] = row
    return found


def show(bars: Sequence[Bar], rows: Sequence[Result]) -> None:
    """Each shape's ratios, then each bar that falls short."""
    for shape, impls in by_shape(rows).items():
        if "ours" not in impls:
            continue
        peer = best_peer(impls)
        verdicts = [bar for bar in bars if bar.shape == str(shape)]
        short = [bar.what for bar in verdicts if not bar.holds]
        print(
            f"{shape!s:45} ours {impls['ours']['us']:9.2f} us {impls['ours']['ratio']:.3f}  "
            + (f"best peer {peer['impl']:10} {peer['ratio']:.3f}" if peer else "no peer")
            + (f"  SHORT: {', '.join(short)}" if short else "  ok" if verdicts else "")
        )
    held = sum(bar.holds for bar in bars)
    print(f"{held} of {len(bars)} bars hold")
    for bar in bars:
        if not bar.holds:
            side = "<=" if bar.most else ">="
            print(f"SHORT {bar.shape}: {bar.what}: {bar.value:.4f}, bar {side} {bar.limit:.4f}")
