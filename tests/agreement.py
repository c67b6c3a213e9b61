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
import multiprocessing
import sys
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cupy_rmsnorm import _kernel
from tests import calls, compare, compiled, emulator, kernels, oracle
from tests.backends import Backend, Cupy, Emulator

PROPERTIES = _kernel.DeviceProperties(arch=90, sm_count=kernels.SM_COUNT)  # decide the plans
TABLE: tuple[Any, ...] = (*kernels.FORWARD, *kernels.BACKWARD, *kernels.PAIRS)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "agreement.json"
ROWS, VALUES = 1000, 512
STATISTICS = ("mean", "rstd")
PROCESSES = 14  # on the GPU


def _results(row: Any, backend: Backend) -> dict[str, np.ndarray]:
    """What the row's call gives. The table's tests hold it against the oracle, not this."""
    checked: list[dict[str, np.ndarray]] = []
    with (
        mock.patch.object(calls, "check_forward", lambda case, got: checked.append(got)),
        mock.patch.object(calls, "check_backward"),
    ):
        results = row.run(backend)
    if isinstance(row, kernels.PairRow):
        results = {"q": checked[0]["y"], "k": checked[1]["y"]}
    return {name: array for name, array in results.items() if array is not None}


def _spread(array: np.ndarray, most: int) -> np.ndarray:
    """At most so many items, evenly spread."""
    return array[:: max(1, -(-len(array) // most))]


def checksums(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of each output one a row: what one statistic belongs to, where there are statistics."""
    statistics = [results[name].size for name in STATISTICS if name in results]

    def of(array: np.ndarray) -> np.ndarray:
        rows = statistics[0] if statistics else array.size // array.shape[-1]
        spread = _spread(compare.bits(array).reshape(rows, array.size // max(1, rows)), ROWS)
        return np.array([zlib.crc32(np.ascontiguousarray(row)) for row in spread], np.uint32)

    return {output: of(array) for output, array in results.items()}


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


def emulated() -> AbstractContextManager[None]:
    """The emulator as the GPU that results are compared with."""
    return emulator.installed(arch=PROPERTIES.arch, sm_count=PROPERTIES.sm_count, checked=False)


def emulate(file: Path, rows: list[Any]) -> None:
    """Keep what the emulator gives."""
    names = {row.name for row in rows}
    emulator.prefetch(
        (use.specialisation for use in compiled.uses(PROPERTIES.arch) if use.row in names),
        checked=False,
    )
    kept: dict[str, np.ndarray] = {}
    for row in rows:
        with emulated():
            results = _results(row, Emulator())
            for output, sums in checksums(results).items():
                kept[f"{row.name}/{output}/checksums"] = sums
                kept[f"{row.name}/{output}/values"] = values(results[output])
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

    @classmethod
    def of(cls, same: np.ndarray, ulps: float) -> Tally:
        """One case: whether its rows are equal, and how far they are apart."""
        return cls(1, int(same.all()), len(same), int(same.sum()), ulps)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.cases + other.cases,
            self.equal_cases + other.equal_cases,
            self.rows + other.rows,
            self.equal_rows + other.equal_rows,
            max(self.ulps, other.ulps),
        )


def compare_with(kept: Any, row: Any, backend: Backend, tallies: dict[str, Tally]) -> list[str]:
    """Make a row's call, count how its outputs agree, and name those that had to and do not."""
    got = _results(row, backend)
    same = {
        output: sums == kept[f"{row.name}/{output}/checksums"]
        for output, sums in checksums(got).items()
    }

    def count(what: str, same: np.ndarray, ulps: float) -> None:
        name = f"{'backward' if isinstance(row, kernels.BackwardRow) else 'forward'} {what}"
        tallies[name] = tallies.get(name, Tally()) + Tally.of(same, ulps)

    for output, array in got.items():
        there = kept[f"{row.name}/{output}/values"].view(array.dtype)
        count(output, same[output], ulps(values(array).view(array.dtype), there))
    if not isinstance(row, kernels.ForwardRow):
        return []
    statistics = np.logical_and.reduce([same[name] for name in STATISTICS if name in same])
    given = same["y"][statistics]
    count("y where statistics are equal", given, 0.0)
    exact = {"y": given, "residual_out": same.get("residual_out", given)}
    return [f"{row.name}: {output}" for output, equal in exact.items() if not equal.all()]


def compare_share(file: Path, first: int, every: int) -> tuple[list[str], dict[str, Tally]]:
    """The calls of each `every`-th kept row: what is wrong, and how the outputs agree."""
    found = _kernel.device_properties(0)
    if (found.arch, found.sm_count) != (PROPERTIES.arch, PROPERTIES.sm_count):
        return [f"the kept results are those of {PROPERTIES}, this is {found}"], {}
    kept = np.load(file)
    rows = {row.name: row for row in TABLE}
    faults: list[str] = []
    tallies: dict[str, Tally] = {}
    for name in list(dict.fromkeys(key.split("/")[0] for key in kept.files))[first::every]:
        if name in rows:
            faults += compare_with(kept, rows[name], Cupy(), tallies)
        else:
            faults.append(f"{name} is no row of the table any more")
    return faults, tallies


def compare_all(file: Path, out: Path, commit: str) -> int:
    """Make the calls on this GPU, compare, and write the figures."""
    import cupy

    # Most of the time goes into compilation.
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        shares = pool.starmap(compare_share, [(file, i, PROCESSES) for i in range(PROCESSES)])
    faults = [fault for share, _ in shares for fault in share]
    tallies: dict[str, Tally] = {}
    for _, share in shares:
        for name, tally in share.items():
            tallies[name] = tallies.get(name, Tally()) + tally
    meta = {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        **compiled.versions(),
        "commit": commit,
        "cases": len({key.split("/")[0] for key in np.load(file).files}),
        "faults": faults,
    }
    lines = [json.dumps({"output": name, **vars(tallies[name])}) for name in sorted(tallies)]
    body = ",\n".join(lines)
    out.write_text(f'{{"meta": {json.dumps(meta)},\n"rows": [\n{body}\n]}}\n')
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
    emulate(arguments.file, list(TABLE[:: arguments.every]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
