# SPDX-License-Identifier: Apache-2.0
"""Does the table notice a fault? Plants small ones in the kernels and runs rows until one fails.

``python -m tests.emulator.mutate`` writes benchmarks/results/mutation.json. A mutant that no row
kills is listed in EXPLAINED with the reason, or it counts as survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests import emulator, kernels
from tests.backends import Emulator

ARCH = 90
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutation.json"
BATCH = 4  # rows compiled together; most mutants die in the first batch
TIMEOUT_S = 60

# (what it does, pattern, replacement), applied to one place of one line at a time.
OPERATORS: tuple[tuple[str, str, str], ...] = (
    ("drops a barrier", r"__syncthreads\(\);", ";"),
    ("drops a cluster barrier", r"\bcluster_barrier\(\);", ";"),
    ("drops a warp barrier", r"__syncwarp\(\);", ";"),
    ("drops a fence", r"__threadfence\(\);", ";"),
    ("drops a wait", r"\b(copy_async_wait\w*(<\w+>)?|mbarrier_wait)\([^;]*\);", ";"),
    ("waits for less", r"copy_async_wait<(\w+)>", r"copy_async_wait<\1 + 1>"),
    ("wrong mask", r"0xffffffffu", "0xfffffffeu"),
    ("bound one further", r" < (?!<)", " <= "),
    ("bound one nearer", r" < (?=[\w.:]+;)", " + 1 < "),
    ("closed bound opened", r" <= ", " < "),
    ("turns a condition", r" == ", " != "),
    ("turns a condition", r" != ", " == "),
    ("and for or", r" && ", " || "),
    ("or for and", r" \|\| ", " && "),
    ("minus for plus", r" \+ (?!=)", " - "),
    ("plus for minus", r" - (?!=)", " + "),
    ("assigns for adds", r" \+= ", " = "),
    ("quotient for remainder", r" % ", " / "),
    ("remainder for quotient", r" / ", " % "),
    ("sum for product", r" \* (?!const)", " + "),
    ("swaps strides", r"\bouter \* strides\.outer", "outer * strides.inner"),
    ("swaps strides", r"\binner \* strides\.inner", "inner * strides.outer"),
    ("negates", r"if \(!", "if ("),
    ("negates", r"if \((?=\w+\()", "if (!"),
    ("halves", r" / 2\b", " / 4"),
    ("sum lost", r"\badd_rn\(([\w\[\].]+), ", r"add_rn(0 * \1, "),
    ("mean not subtracted", r"\bsub_rn\(", "add_rn("),
)

# Lines that hold no code of ours, or code that decides at compile time what the plan decided.
SKIP = re.compile(
    r"^\s*(//|#|template|static_assert|asm|\")|static_assert|__host__ __device__ constexpr"
)

# (file, stripped line, replaced by) -> why no row can tell.
EXPLAINED: dict[tuple[str, str, str], str] = {}


@dataclass(frozen=True)
class Mutant:
    """One changed line of one file."""

    file: str
    number: int
    line: str
    changed: str
    what: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line.strip(), self.changed.strip()


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Every place of every line where an operator fits."""
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split("//")[0]
        if SKIP.search(code) or not code.strip():
            continue
        # Template heads that run over several lines have no statement to change.
        if re.match(r"^\s*(int|bool|typename) [A-Z_]+,", code):
            continue
        for what, pattern, replacement in OPERATORS:
            for match in re.finditer(pattern, code):
                changed = code[: match.start()] + match.expand(replacement) + code[match.end() :]
                if changed != code:
                    yield Mutant(file, number, code.rstrip(), changed.rstrip(), what)


def _rows(file: str) -> list[Any]:
    """Rows whose kernel holds the file, those that run quickest first."""
    from cupy_rmsnorm import _source

    rows = [
        row
        for row in kernels.FORWARD
        if f'#line 1 "{file}"' in _source.load(row.specialisation(ARCH).kernel)
        and row.rows * row.hidden_size < 500_000
    ]
    # Neighbours in the table are alike: take them in strides.
    return [row for start in range(7) for row in rows[start::7]]


def try_mutant(mutant: Mutant, rows: list[Any]) -> str | None:
    """What kills the mutant; None if nothing does."""
    from cupy_rmsnorm import _source

    original = _source.directory() / mutant.file
    lines = original.read_text("ascii").splitlines()
    lines[mutant.number - 1] = mutant.changed
    text = "\n".join(lines) + "\n"
    read_text = Path.read_text

    def read(path: Path, *arguments: Any) -> str:
        return text if path == original else read_text(path, *arguments)

    with mock.patch.object(Path, "read_text", read):
        _source.load.cache_clear()
        sources = {row.specialisation(ARCH).kernel for row in rows}
        for kernel in sources:
            _source.load(kernel)
    try:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            try:
                emulator.prefetch(row.specialisation(ARCH) for row in batch)
            except emulator.CompileError:
                return "does not compile"
            for row in batch:
                try:
                    with emulator.installed(arch=ARCH, sm_count=kernels.SM_COUNT):
                        backend = Emulator()
                        row.run(backend)
                        backend.verify()
                except (AssertionError, emulator.KernelFault, emulator.LaunchError) as error:
                    return f"{row.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
        return None
    finally:
        _source.load.cache_clear()


def run_one(mutant: Mutant, rows: list[Any]) -> tuple[str, str]:
    """(killed, survived, equivalent or invalid; why), in a process that may hang or crash."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read_end)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        with os.fdopen(write_end, "w") as pipe:
            try:
                pipe.write(try_mutant(mutant, rows) or "survived")
            except BaseException as error:  # the child must not go on as its parent
                pipe.write(f"crash: {error!r}")
            pipe.flush()
            os._exit(0)
    os.close(write_end)
    deadline = time.monotonic() + TIMEOUT_S
    while os.waitpid(process, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(process, 9)
            os.waitpid(process, 0)
            os.close(read_end)
            return "killed", "does not end"
        time.sleep(0.02)
    with os.fdopen(read_end) as pipe:
        verdict = pipe.read()
    if verdict == "survived":
        reason = EXPLAINED.get(mutant.key)
        return ("equivalent", reason) if reason else ("survived", "no row fails")
    if verdict == "does not compile":
        return "invalid", verdict
    return "killed", verdict or "the process dies"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="of kernels_cu/; all that the table runs")
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    from cupy_rmsnorm import _source

    names = {row.specialisation(ARCH).kernel for row in kernels.FORWARD}
    texts = [_source.load(name) for name in names]
    files = arguments.files or sorted(
        {file for text in texts for file in re.findall(r'#line 1 "(\S+)"', text)} - {"ptx.cuh"}
    )
    emulator.installed  # noqa: B018  (loads the runtime before the forks)
    results = []
    for file in files:
        rows = _rows(file)
        text = (_source.directory() / file).read_text("ascii")
        for mutant in list(mutants(file, text))[:: arguments.every]:
            verdict, why = run_one(mutant, rows)
            print(f"{verdict:10} {file}:{mutant.number} {mutant.what}: {why}"[:200], flush=True)
            results.append(
                {
                    "file": file,
                    "line": mutant.number,
                    "what": mutant.what,
                    "from": mutant.line.strip(),
                    "to": mutant.changed.strip(),
                    "verdict": verdict,
                    "why": why,
                }
            )
    counts = {
        verdict: sum(result["verdict"] == verdict for result in results)
        for verdict in ("killed", "survived", "equivalent", "invalid")
    }
    rows_json = ",\n".join(json.dumps(result) for result in results)
    meta = json.dumps({**counts, "arch": ARCH, "every": arguments.every})
    arguments.out.write_text(f'{{"meta": {meta},\n"rows": [\n{rows_json}\n]}}\n')
    print(counts)


if __name__ == "__main__":
    main()
