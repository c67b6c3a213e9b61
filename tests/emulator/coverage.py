# SPDX-License-Identifier: Apache-2.0
"""Which lines of the kernels the tables run: ``python -m tests.emulator.coverage``.

The kernels are compiled once more with gcov's counters, and the rows of `tests.kernels` and
`tests.study` run unchecked. A line that is not run must be listed in EXPLAINED; otherwise the
command fails.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
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


def _run() -> None:
    """In a process of its own, since gcov writes its counts when a process ends."""
    for archs, rows in (
        ((ARCH,), (*kernels.FORWARD, *kernels.BACKWARD, *kernels.PAIRS)),
        ((75, 80), (*kernels.FORWARD[::9], *kernels.BACKWARD[::13])),
    ):
        for arch in archs:
            if arch == ARCH:
                emulator.prefetch(
                    (item for row in rows for item in specialisations(row)), checked=False
                )
            for row in rows:
                with emulator.installed(arch=arch, sm_count=kernels.SM_COUNT, checked=False):
                    row.run(Emulator())
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_into is not None:
        build.count_lines(arguments.run_into)
        _run()
        return 0

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.emulator.coverage", "--run-into", folder]
        subprocess.run(command, check=True, env=os.environ)
        counts = _counts(Path(folder))
    missing = 0
    for path in sorted(_source.directory().glob("*.cu*")):
        name = path.name
        text = path.read_text("ascii").splitlines()
        lines = counts.get(name, Counter())
        if not lines:
            print(f"{name:32} NOT COMPILED")
            missing += 1
            continue
        not_run = [number for number in sorted(lines) if lines[number] == 0]
        unexplained = [n for n in not_run if (name, text[n - 1].strip()) not in EXPLAINED]
        missing += len(unexplained)
        share = 100 * (len(lines) - len(not_run)) / len(lines)
        print(f"{name:32} {len(lines):4} lines {share:5.1f} % run")
        for number in not_run:
            reason = EXPLAINED.get((name, text[number - 1].strip()), "NOT RUN")
            print(f"    {number}: {text[number - 1].strip()}  ({reason})")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
