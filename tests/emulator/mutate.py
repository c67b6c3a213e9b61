# SPDX-License-Identifier: Apache-2.0
"""Does the table notice a fault? Plants small ones in the kernels and runs rows until one fails.

``python -m tests.emulator.mutate`` writes benchmarks/results/mutation.json. A mutant that no row
kills is listed in EXPLAINED with the reason, or it counts as survived.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import select
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests import emulator, kernels
from tests.backends import Emulator

ARCH = 90
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutation.json"
LONG = 500_000  # elements
LARGEST_BATCH = 8  # rows compiled together; the first batch is one row, and kills most mutants
TIMEOUT_S = 60  # for one batch

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

# (file, changed line) -> verdict and reason of mutants that no row kills.
EXPLAINED: dict[tuple[str, str], tuple[str, str]] = {
    ("backward.cuh", "(is_array<R> ? elements + static_cast<int>(sizeof(R)) : 0);"): (
        "equivalent",
        "decides only what stays in registers",
    ),
    ("backward.cuh", "for (long long base = first; base <= elements; base += step) {"): (
        "equivalent",
        "the pass more has no element below the bound that its body checks",
    ),
    (
        "norm_backward_columns.cu",
        "for (long long position = part; position <= positions; position += arguments.parts) {",
    ): ("equivalent", "row_is_computed refuses the row more"),
    (
        "norm_backward_few.cu",
        "if (NORM == RMS && elements * sizeof(X) < 32 && is_held<X, D, R, W>(elements)) return 2;",
    ): ("equivalent", "decides only how many blocks share a multiprocessor"),
    (
        "norm_backward_few.cu",
        "for (int element = threadIdx.x; element < packs * VEC_SIZE; element = BLOCK) {",
    ): ("survived", "no row has more columns a block than threads, so the loop runs once"),
    (
        "norm_backward_few.cu",
        "for (int row = threadIdx.x / COLUMNS; row <= rows; row += SLICES) {",
    ): ("survived", "reads row 0 behind its end, which is row 1, into a sum that nobody stores"),
}


@dataclass(frozen=True)
class Mutant:
    """One changed line of one file."""

    file: str
    number: int
    line: str
    changed: str
    what: str


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


@functools.cache
def specialisations(row: Any, sm_count: int = kernels.SM_COUNT) -> tuple[Any, ...]:
    """What the row launches."""
    if isinstance(row, kernels.ForwardRow):
        return (row.specialisation(ARCH, sm_count),)
    return row.specialisations(ARCH, sm_count)  # type: ignore[no-any-return]


def _rows(file: str) -> list[tuple[Any, int]]:
    """Rows that run the file, and the number of multiprocessors to run them on."""
    from cupy_rmsnorm import _source

    def runs(row: Any) -> bool:
        texts = (_source.load(item.kernel) for item in specialisations(row))
        return any(f'#line 1 "{file}"' in text for text in texts)

    rows = [row for row in (*kernels.FORWARD, *kernels.BACKWARD) if runs(row)]
    # Neighbours in the table are alike: take them in strides, the long ones last.
    mixed = [row for start in range(7) for row in rows[start::7]]
    mixed.sort(key=lambda row: row.rows * row.hidden_size > LONG)
    # On a GPU of two multiprocessors blocks walk over many rows.
    few = [(row, 2) for row in mixed if row.rows > 50 and row.rows * row.hidden_size < LONG]
    return [*((row, kernels.SM_COUNT) for row in mixed), *few]


def try_mutant(
    mutant: Mutant, rows: list[tuple[Any, int]], progress: Callable[[], object]
) -> str | None:
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
        for kernel in {item.kernel for row, _ in rows for item in specialisations(row)}:
            _source.load(kernel)
    try:
        start, size = 0, 1
        while start < len(rows):
            batch = rows[start : start + size]
            start, size = start + size, min(2 * size, LARGEST_BATCH)
            progress()
            try:
                emulator.prefetch(item for pair in batch for item in specialisations(*pair))
            except emulator.CompileError:
                return "does not compile"
            for row, sm_count in batch:
                try:
                    with emulator.installed(arch=ARCH, sm_count=sm_count):
                        backend = Emulator()
                        row.run(backend)
                        backend.verify()
                except (AssertionError, emulator.KernelFault, emulator.LaunchError) as error:
                    return f"{row.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
        return None
    finally:
        _source.load.cache_clear()


def run_one(mutant: Mutant, rows: list[tuple[Any, int]]) -> tuple[str, str]:
    """(killed, survived, equivalent or invalid; why), in a process that may hang or crash."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            progress = functools.partial(os.write, write_end, b"\n")
            verdict = try_mutant(mutant, rows, progress) or "survived"
        except BaseException as error:  # the child must not go on as its parent
            verdict = f"crash: {error!r}"
        os.write(write_end, verdict.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    output = b""
    while True:
        if not select.select([read_end], [], [], TIMEOUT_S)[0]:
            os.kill(process, signal.SIGKILL)
            output = b"does not end"
            break
        piece = os.read(read_end, 4096)
        if not piece:
            break
        output += piece
    os.close(read_end)
    os.waitpid(process, 0)
    verdict = output.decode().strip()
    if verdict == "survived":
        return EXPLAINED.get((mutant.file, mutant.changed.strip()), ("survived", "no row fails"))
    if verdict == "does not compile":
        return "invalid", verdict
    return "killed", verdict or "the process dies"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="of kernels_cu/; all that the table runs")
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    from cupy_rmsnorm import _source

    rows = (*kernels.FORWARD, *kernels.BACKWARD)
    names = {item.kernel for row in rows for item in specialisations(row)}
    texts = [_source.load(name) for name in names]
    files = arguments.files or sorted(
        {file for text in texts for file in re.findall(r'#line 1 "(\S+)"', text)} - {"ptx.cuh"}
    )
    results = []
    for file in files:
        chosen = _rows(file)
        text = (_source.directory() / file).read_text("ascii")
        for mutant in list(mutants(file, text))[arguments.first :: arguments.every]:
            verdict, why = run_one(mutant, chosen)
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
    sample = {"arch": ARCH, "every": arguments.every, "first": arguments.first}
    meta = json.dumps({**counts, **sample})
    arguments.out.write_text(f'{{"meta": {meta},\n"rows": [\n{rows_json}\n]}}\n')
    print(counts)


if __name__ == "__main__":
    main()
