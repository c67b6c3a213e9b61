# SPDX-License-Identifier: Apache-2.0
"""Do the emulator and a GPU agree, output against output, on the rows of the table?

``python -m tests.agreement emulate FILE`` makes the rows' calls in the emulator and keeps what they
gave; it needs g++ and no GPU. ``python -m tests.agreement compare FILE`` makes the same calls on a
GPU and writes benchmarks/results/agreement.json; it needs no g++. FILE is an .npz of a few MB: of
up to ROWS rows of an output a checksum each, and up to VALUES elements.

A GPU contracts products and sums and has reciprocal roots of its own, so statistics and gradients
may differ by ulps. Two things may not: residual_out, and y of a row whose statistics are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cupy_rmsnorm import _kernel
from tests import calls, compare, compiled, emulator, kernels, oracle
from tests.backends import Backend, Cupy, Emulator

PROPERTIES = _kernel.DeviceProperties(arch=90, sm_count=kernels.SM_COUNT)  # decide the plans
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "agreement.json"
ROWS, VALUES = 1000, 512
STATISTICS = ("mean", "rstd")
THREADS = 16  # that compile for the GPU


@contextmanager
def _unchecked() -> Iterator[None]:
    """The table's tests hold either side against the oracle; here the sides meet."""
    with mock.patch.multiple(calls, check_forward=mock.DEFAULT, check_backward=mock.DEFAULT):
        yield


def _results(row: Any, backend: Backend) -> dict[str, np.ndarray]:
    return {name: array for name, array in row.run(backend).items() if array is not None}


def _spread(array: np.ndarray, most: int) -> np.ndarray:
    """At most so many items, evenly spread."""
    return array[:: max(1, -(-len(array) // most))]


def checksums(output: str, array: np.ndarray) -> np.ndarray:
    """One a row; a statistic is a row of its own."""
    width = 1 if output in STATISTICS else array.shape[-1]
    rows = _spread(compare.bits(array).reshape(-1, width), ROWS)
    return np.array([zlib.crc32(np.ascontiguousarray(row)) for row in rows], np.uint32)


def values(array: np.ndarray) -> np.ndarray:
    """Some elements, as bits: NumPy's files have no bfloat16."""
    return np.ascontiguousarray(_spread(compare.bits(array).reshape(-1), VALUES))


def ulps(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in last places of the element or of the mean, whichever is larger."""
    there, here = expected.astype(np.float64), got.astype(np.float64)
    there, here = (side[np.isfinite(there) & np.isfinite(here)] for side in (there, here))
    if not there.size:
        return 0.0
    size = np.maximum(np.abs(there), np.abs(there).mean())
    return float((np.abs(here - there) / oracle.ulp(size, got.dtype.name)).max())


def emulate(file: Path, rows: list[Any]) -> None:
    """Keep what the emulator gives."""
    names = {row.name for row in rows}
    emulator.prefetch(
        (use.specialisation for use in compiled.uses(PROPERTIES.arch) if use.row in names),
        checked=False,
    )
    kept: dict[str, np.ndarray] = {}
    for row in rows:
        with (
            _unchecked(),
            emulator.installed(arch=PROPERTIES.arch, sm_count=PROPERTIES.sm_count, checked=False),
        ):
            for output, array in _results(row, Emulator()).items():
                kept[f"{row.name}/{output}/checksums"] = checksums(output, array)
                kept[f"{row.name}/{output}/values"] = values(array)
    np.savez_compressed(file, **kept)  # type: ignore[arg-type]
    print(f"{len(rows)} cases, {file.stat().st_size / 1e6:.1f} MB")


@dataclass
class Tally:
    """What became of one output of all cases."""

    cases: int = 0
    equal_cases: int = 0
    rows: int = 0
    equal_rows: int = 0
    ulps: float = 0.0

    def add(self, same: np.ndarray, ulps: float) -> None:
        self.cases += 1
        self.equal_cases += bool(same.all())
        self.rows += len(same)
        self.equal_rows += int(same.sum())
        self.ulps = max(self.ulps, ulps)


def compare_with(kept: Any, row: Any, backend: Backend, tallies: dict[str, Tally]) -> list[str]:
    """Make a row's call, count how its outputs agree, and name those that had to and do not."""
    got = _results(row, backend)
    same = {
        output: checksums(output, array) == kept[f"{row.name}/{output}/checksums"]
        for output, array in got.items()
    }
    direction = "forward" if "y" in got else "backward"
    for output, array in got.items():
        there = kept[f"{row.name}/{output}/values"].view(array.dtype)
        apart = ulps(values(array).view(array.dtype), there)
        tallies.setdefault(f"{direction} {output}", Tally()).add(same[output], apart)
    if direction == "backward":
        return []
    statistics = np.logical_and.reduce([same[name] for name in STATISTICS if name in same])
    given = same["y"][statistics]
    tallies.setdefault("forward y where statistics are equal", Tally()).add(given, 0.0)
    exact = {"y": given, "residual_out": same.get("residual_out", given)}
    return [f"{row.name}: {output}" for output, equal in exact.items() if not equal.all()]


def compare_all(file: Path, out: Path, commit: str) -> int:
    """Make the calls on this GPU, compare, and write the figures."""
    import cupy

    if _kernel.device_properties(0) != PROPERTIES:
        print(
            f"the kept results have plans for {PROPERTIES}, this is {_kernel.device_properties(0)}"
        )
        return 2
    kept = np.load(file)
    names = {key.split("/")[0] for key in kept.files}
    rows = [row for row in (*kernels.FORWARD, *kernels.BACKWARD) if row.name in names]
    if len(rows) != len(names):
        print("the table has other rows than it had")
        return 2

    def load(use: compiled.Use) -> None:
        _kernel.function(use.specialisation, 0, use.shared_bytes)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(load, (use for use in compiled.uses(PROPERTIES.arch) if use.row in names)))
    tallies: dict[str, Tally] = {}
    with _unchecked():
        faults = [fault for row in rows for fault in compare_with(kept, row, Cupy(), tallies)]
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    meta = {"device": device, "commit": commit, "cases": len(rows), "faults": faults}
    lines = [json.dumps({"output": name, **vars(tally)}) for name, tally in tallies.items()]
    body = ",\n".join(lines)
    out.write_text(f'{{"meta": {json.dumps(meta | compiled.versions())},\n"rows": [\n{body}\n]}}\n')
    print(out.read_text())
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["emulate", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--every", type=int, default=1, help="emulate each n-th row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="to write into the results")
    arguments = parser.parse_args()
    if arguments.what == "compare":
        return compare_all(arguments.file, arguments.out, arguments.commit)
    emulate(arguments.file, [*kernels.FORWARD, *kernels.BACKWARD][:: arguments.every])
    return 0


if __name__ == "__main__":
    sys.exit(main())
