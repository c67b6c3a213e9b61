# SPDX-License-Identifier: Apache-2.0
"""Which lines of the kernels the tables run: ``python -m tests.emulator.coverage``.

The kernels are compiled once more with gcov's counters, and rows of `tests.kernels` and
`tests.study` run unchecked: first half of them, which usually run every line, and the others
only if they did not. A line that no row runs must be listed in EXPLAINED; otherwise the
command fails.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cupy_rmsnorm import _source, variants
from tests import emulator, kernels, study
from tests.backends import Emulator
from tests.emulator import build
from tests.emulator.mutate import ARCH, specialisations

# (file, stripped line) -> why the table does not run it.
EXPLAINED: dict[tuple[str, str], str] = {}


ROWS = (*kernels.FORWARD, *kernels.BACKWARD, *kernels.PAIRS)
SHORT = 500_000  # elements of a row of backward, whose long rows take half of the time


def _share(name: str) -> list[Any]:
    """The rows of the share "first" or "rest"."""
    long = [row for row in kernels.BACKWARD if row.rows * row.hidden_size > SHORT]
    first = [row for row in ROWS if row not in long][::2]
    return first if name == "first" else [row for row in ROWS if row not in first]


def _run(share: str) -> None:
    """In a process of its own, since gcov writes its counts when a process ends."""
    rows = _share(share)
    # The first of them compiles for all rows, so that no line is passed over with its row; the
    # others are without clusters, and without asynchronous copies either.
    for arch, compiled, chosen in (
        (ARCH, ROWS, rows),
        (75, rows[::6], rows[::6]),
        (80, rows[3::6], rows[3::6]),
    ):
        items = (item for row in compiled for item in specialisations(row, arch=arch))
        emulator.prefetch(items, checked=False)
        with emulator.installed(arch=arch, sm_count=kernels.SM_COUNT, checked=False):
            for row in chosen:
                row.run(Emulator())
    if share == "first":
        with study.emulated(checked=False):
            variants.load([row.instance for row in study.ROWS], 0)
            for row in study.ROWS:
                row.run(Emulator())


def _counts(folder: Path) -> dict[str, Counter[int]]:
    """file -> line -> how often it ran, over all instantiations."""
    counts: dict[str, Counter[int]] = {}
    for data in folder.rglob("*.gcda"):
        subprocess.run(
            ["gcov", "--json-format", data.name], cwd=data.parent, capture_output=True, check=True
        )
    for report in folder.rglob("*.gcov.json.gz"):
        with gzip.open(report) as file:
            content: dict[str, Any] = json.load(file)
        for source in content["files"]:
            lines = counts.setdefault(Path(source["file"]).name, Counter())
            for line in source["lines"]:
                lines[line["line_number"]] += line["count"]
    return counts


def _report(counts: dict[str, Counter[int]]) -> tuple[list[str], int]:
    """What to print, and how many lines are neither run nor explained."""
    report, missing = [], 0
    for path in sorted(_source.directory().glob("*.cu*")):
        name = path.name
        text = path.read_text("ascii").splitlines()
        lines = counts.get(name, Counter())
        if not lines:
            report.append(f"{name:32} NOT COMPILED")
            missing += 1
            continue
        not_run = [number for number in sorted(lines) if lines[number] == 0]
        share = 100 * (len(lines) - len(not_run)) / len(lines)
        report.append(f"{name:32} {len(lines):4} lines {share:5.1f} % run")
        for number in not_run:
            line = text[number - 1].strip()
            reason = EXPLAINED.get((name, line))
            missing += reason is None
            report.append(f"    {number}: {line}  ({reason or 'NOT RUN'})")
    return report, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=("first", "rest"), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        build.count_lines(arguments.into)
        _run(arguments.run)
        return 0

    report: list[str] = []
    missing = 0
    with tempfile.TemporaryDirectory() as folder:
        for share in ("first", "rest"):
            command = [sys.executable, "-m", "tests.emulator.coverage", "--run", share]
            subprocess.run([*command, "--into", folder], check=True)
            report, missing = _report(_counts(Path(folder)))
            if not missing:
                break
    print("\n".join(report))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
