# SPDX-License-Identifier: Apache-2.0
"""Does the table notice a fault? Plants small ones in the kernels and runs rows until one fails.

``python -m tests.emulator.mutate`` writes benchmarks/results/mutation.json. A mutant that no row
kills is listed in EXPLAINED or CHOICES with the reason, or it counts as survived. Of ptx.cuh there
are none: what the emulator runs of it is not what a GPU runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import select
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cupy_rmsnorm import _source
from tests import emulator, kernels, study
from tests.backends import Emulator

ARCH = 90
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutation.json"
SHORT, LONG = 50_000, 500_000  # elements
LARGEST_BATCH = 8  # rows compiled together; the first batch is one row, and kills most mutants
TRIALS = 100  # rows that may kill a mutant, short ones first
TRIALS_OF_EXPLAINED = 10  # the same, where nobody expects that one does
TIMEOUT_S = 60  # of processor time for one batch

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
    r"^\s*(//|#|template|static_assert|asm|\")"
    r"|static_assert|__host__ __device__ constexpr|__launch_bounds__"
)

# (file, changed line) -> verdict and reason of mutants that no row kills.
_ASKED_FOR = (
    "survived",
    "what is asked for changes no result; test_emulated_kernels.py counts it instead",
)
EXPLAINED: dict[tuple[str, str], tuple[str, str]] = {
    ("backward.cuh", "for (long long base = first; base <= elements; base += step) {"): (
        "equivalent",
        "the pass more has no element below the bound that its body checks",
    ),
    ("backward.cuh", "if (has_dresidual<DX, X> || arguments.dresidual != nullptr) {"): (
        "survived",
        "every row of the table with two dtypes wants the second copy, and no other",
    ),
    ("backward.cuh", "if (has_dresidual<DX, X> || at.dresidual != nullptr) {"): (
        "survived",
        "every row of the table with two dtypes wants the second copy, and no other",
    ),
    (
        "backward.cuh",
        "for (int i = 0; i < VEC_SIZE; ++i) out[element - i] = from_float<T>(sum.data[i]);",
    ): ("equivalent", "its one caller takes packs of one element"),
    ("backward_rows.cuh", "constexpr bool MEAN = NORM == LAYER || !GIVEN_MEAN;"): (
        "survived",
        "sums a mean that RMSNorm does not use, and that LayerNorm was given",
    ),
    ("backward_rows.cuh", "if constexpr (COPY == ASYNC) ;"): (
        "equivalent",
        "rows behind the last are not asked for, so nothing is on its way",
    ),
    (
        "norm_backward_columns.cu",
        "for (long long position = part; position <= positions; position += arguments.parts) {",
    ): ("equivalent", "row_is_computed refuses the row more"),
    ("norm_backward_few.cu", "for (int offset = COLUMNS; offset + 1 < 32; offset *= 2) {"): (
        "equivalent",
        "offsets are powers of two: the last is 16",
    ),
    (
        "norm_backward_few.cu",
        "for (int element = threadIdx.x; element < packs * VEC_SIZE; element = BLOCK) {",
    ): ("survived", "no row has more columns a block than threads, so the loop runs once"),
    (
        "norm_backward_few.cu",
        "for (int row = threadIdx.x / COLUMNS; row <= rows; row += SLICES) {",
    ): ("survived", "reads row 0 behind its end, which is row 1, into a sum that nobody stores"),
    (
        "norm_backward_few.cu",
        "const int rows = column <= packs ? static_cast<int>(arguments.rows) : 0;",
    ): ("survived", "reads the pack behind a block's columns into a sum that nobody stores"),
    (
        "norm_forward_pair.cu",
        "false, ALL_ROWS>(arguments.q, blockIdx.x - k_block, gridDim.x + k_blocks);",
    ): (
        "survived",
        "a block takes a second group of rows only where there are more than a billion",
    ),
    ("block_rows.cuh", "if (SPLIT_ROWS || arguments.mask_rows.count != 1) {"): (
        "equivalent",
        "a quotient by 1 changes nothing, and rows that are not split have no other",
    ),
    (
        "block_rows.cuh",
        "const long long elements = quotient(arguments.rows + 1, arguments.mask_rows) + 1;",
    ): ("equivalent", "an element more has no rows, and they are counted after it"),
    ("block_rows.cuh", "if (MASK == ALL_ROWS || MASK != ZERO_OTHERS) return place + turn;"): (
        "equivalent",
        "says which blocks take more turns, not what they compute",
    ),
    ("block_rows.cuh", "if (count > MANY_TURNS + turn) shared *= 2;"): (
        "equivalent",
        "says which blocks take more turns, not what they compute",
    ),
    (
        "block_rows.cuh",
        "return ROWS_PER_BLOCK != 1 || exists(place) ? window.rows[parity][row_in_block] : 0;",
    ): ("equivalent", "a place that has no row is not computed, whatever it names"),
    ("block_rows.cuh", "for (int i = 0; i <= LOOKS; i += THREADS) {"): (
        "equivalent",
        "nothing is left to look up",
    ),
    ("block_rows.cuh", "if (look <= LOOKS) {"): (
        "equivalent",
        "what one thread more writes, the first warp writes anew before it is read",
    ),
    ("block_rows.cuh", "for (int i = 0; i <= ROWS_PER_BLOCK; i += 32) {"): (
        "equivalent",
        "nothing is left to write down",
    ),
    ("block_rows.cuh", "if (MASK != ALL_ROWS || MASK == ZERO_OTHERS) return;"): _ASKED_FOR,
    ("block_rows.cuh", "if (MASK == ALL_ROWS && MASK == ZERO_OTHERS) return;"): _ASKED_FOR,
    (
        "block_rows.cuh",
        "if (MASK == KEEP_OTHERS && arguments.where == nullptr) return;",
    ): _ASKED_FOR,
    ("block_rows.cuh", "for (int i = 0; i + 1 < LOOKS; i += THREADS) {"): (
        "equivalent",
        "the last step is never one short of the end",
    ),
    ("block_rows.cuh", "const bool shared = SPLIT_ROWS || arguments.mask_rows.count != 1;"): (
        "equivalent",
        "rows are looked up one by one, and found the same",
    ),
    (
        "block_rows.cuh",
        "if (!shared && arguments.valid_rows == nullptr && row + LOOK_ROWS < arguments.rows &&",
    ): ("equivalent", "rows are looked up one by one, and found the same"),
    ("block_rows.cuh", "for (int i = 0; i <= LOOK_ROWS; ++i) {"): (
        "equivalent",
        "a ninth bit does not fit the byte",
    ),
    ("forward_rows.cuh", "const bool whole = FULL && vec < VECS_PER_THREAD - 1;"): (
        "equivalent",
        "the test of where a row ends says the same",
    ),
    ("fuse.cuh", "return found + (found * rows.count > row);"): (
        "survived",
        "the quotient needs the correction only where row * count passes 2^62",
    ),
    ("fuse.cuh", "if (NORM == LAYER || arguments.mean != nullptr) arguments.mean[row] = mean;"): (
        "survived",
        "every row of the table asks for its statistics",
    ),
    ("fuse.cuh", "return rest != rest ? add_rn(mean, rest / count) : mean;"): (
        "survived",
        "what it refines is exact for equal elements alone: tests/test_numerics.py, not the table",
    ),
    ("fuse.cuh", "return rest != rest ? add_rn(mean, static_cast<float>(rest) / count) : mean;"): (
        "survived",
        "what it refines is exact for equal elements alone: tests/test_numerics.py, not the table",
    ),
}
EXPLAINED |= dict.fromkeys(
    (
        ("study_layer_norm.cu", "for (int i = 0; i <= 4; ++i) {"),
        ("study_layer_norm.cu", "for (int i = 0; i <= 8; ++i) {"),
        ("study_layer_norm.cu", "for (int i = 0; i <= VEC_SIZE; ++i) {"),
        (
            "study_layer_norm.cu",
            "for (int i = 0; i <= 4; ++i) value[i] = reinterpret_cast<const __half2*>(x)[at + i];",
        ),
        ("study_layer_norm.cu", "for (int i = 0; i <= 4; ++i) value[i] = __hsub2(value[i], mean);"),
        ("study_layer_norm_vector.cu", "for (int i = 0; i <= VEC_SIZE; ++i) {"),
        ("study_rms_norm.cu", "for (int i = 0; i <= 4; ++i) {"),
        (
            "study_schedule.cu",
            "for (int i = 0; i <= VEC_SIZE; ++i) value[i] = "
            "from_float<T>(to_float(value[i]) * scale);",
        ),
    ),
    ("survived", "changes what lies behind a thread's own array and is not used again"),
)


# Functions that choose at compile time what changes no result: verdict "equivalent".
CHOICES = {
    "is_held": "decides only what stays in registers",
    "least_blocks": "decides only how many blocks share a multiprocessor",
    "min_blocks": "decides only how many blocks share a multiprocessor",
    "few_blocks": "decides only how many blocks share a multiprocessor",
}


@dataclass(frozen=True)
class Mutant:
    """One changed line of one file."""

    file: str
    number: int
    line: str
    changed: str
    what: str
    function: str  # of CHOICES; else empty

    @property
    def explained(self) -> tuple[str, str] | None:
        """The verdict, and the reason, if no row kills it."""
        if self.function:
            return "equivalent", CHOICES[self.function]
        return EXPLAINED.get((self.file, self.changed.strip()))


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Every place of every line where an operator fits."""
    function = ""
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split("//")[0]
        function = next((name for name in CHOICES if f"constexpr int {name}(" in code), function)
        function = next((name for name in CHOICES if f"constexpr bool {name}(" in code), function)
        function = "" if code.startswith("}") else function
        if SKIP.search(code) or not code.strip():
            continue
        # Template heads that run over several lines have no statement to change.
        if re.match(r"^\s*(int|bool|typename) [A-Z_]+,", code):
            continue
        for what, pattern, replacement in OPERATORS:
            for match in re.finditer(pattern, code):
                changed = code[: match.start()] + match.expand(replacement) + code[match.end() :]
                if changed != code:
                    yield Mutant(file, number, code.rstrip(), changed.rstrip(), what, function)


@functools.cache
def specialisations(
    row: Any, sm_count: int = kernels.SM_COUNT, *, arch: int = ARCH
) -> tuple[Any, ...]:
    """What the row launches."""
    if isinstance(row, kernels.ForwardRow):
        return (row.specialisation(arch, sm_count),)
    return row.specialisations(arch, sm_count)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Trial:
    """A row of the table on a GPU of so many multiprocessors."""

    row: Any
    sm_count: int = kernels.SM_COUNT

    @property
    def sources(self) -> set[str]:
        return {item.kernel for item in specialisations(self.row)}

    @property
    def elements(self) -> int:
        return int(self.row.rows * self.row.hidden_size)

    @staticmethod
    def prepare(trials: Iterable[Trial]) -> None:
        """Compile for all of them at once."""
        emulator.prefetch(
            item for trial in trials for item in specialisations(trial.row, trial.sm_count)
        )

    def run(self) -> None:
        with emulator.installed(arch=ARCH, sm_count=self.sm_count):
            backend = Emulator()
            self.row.run(backend)
            backend.verify()


@dataclass(frozen=True)
class StudyTrial:
    """A row of a study kernel."""

    row: study.Row

    @property
    def sources(self) -> set[str]:
        return {self.row.variant.source}

    @property
    def elements(self) -> int:
        return self.row.size

    @staticmethod
    def prepare(trials: Iterable[StudyTrial]) -> None:
        """Each compiles when it runs."""

    def run(self) -> None:
        with study.emulated(checked=self.row.checkable):
            backend = Emulator()
            self.row.run(backend)
            backend.verify()


def _mixed(trials: list[Any]) -> list[Any]:
    """Neighbours in a table are alike: in strides, long rows last, forced launches first."""

    def late(trial: Any) -> int:
        if getattr(trial.row, "forced", None) is not None:
            return -1
        return int(trial.elements > SHORT) + int(trial.elements > LONG)

    return sorted((trial for start in range(7) for trial in trials[start::7]), key=late)


@functools.cache
def _every_trial() -> tuple[Any, ...]:
    rows = [Trial(row) for row in (*kernels.FORWARD, *kernels.BACKWARD, *kernels.PAIRS)]
    # On a GPU of two multiprocessors blocks walk over many rows.
    few = [
        dataclasses.replace(trial, sm_count=2)
        for trial in rows
        if trial.row.rows > 50 and trial.elements < LONG
    ]
    return (*_mixed([*rows, *few]), *_mixed([StudyTrial(row) for row in study.ROWS]))


def trials(file: str) -> list[Any]:
    """Those that run the file."""
    return [
        trial
        for trial in _every_trial()
        if any(f'#line 1 "{file}"' in _source.load(kernel) for kernel in trial.sources)
    ]


def limited(chosen: list[Any], count: int) -> list[Any]:
    """The first of them, and one of every kernel, with and without clusters, that is not there."""

    def kind(trial: Any) -> tuple[frozenset[str], bool]:
        plan = getattr(trial.row, "plan", None)
        return frozenset(trial.sources), plan is not None and plan(ARCH).cluster_size > 1

    first, rest = chosen[:count], chosen[count:]
    missing = {kind(trial): trial for trial in reversed(rest)}
    for trial in first:
        missing.pop(kind(trial), None)
    return [*first, *missing.values()]


def try_mutant(mutant: Mutant, chosen: list[Any], progress: Callable[[], object]) -> str | None:
    """What kills the mutant; None if nothing does."""
    original = _source.directory() / mutant.file
    lines = original.read_text("ascii").splitlines()
    lines[mutant.number - 1] = mutant.changed
    text = "\n".join(lines) + "\n"
    read_text = Path.read_text

    def read(path: Path, *arguments: Any) -> str:
        return text if path == original else read_text(path, *arguments)

    sources = set().union(*(trial.sources for trial in chosen))
    with mock.patch.object(Path, "read_text", read):
        _source.load.cache_clear()
        for kernel in sources:
            _source.load(kernel)
    start, size = 0, 1
    while start < len(chosen):
        batch = chosen[start : start + size]
        start, size = start + size, min(2 * size, LARGEST_BATCH)
        progress()
        try:
            for kind in (Trial, StudyTrial):
                kind.prepare([trial for trial in batch if isinstance(trial, kind)])
            for trial in batch:
                trial.run()
        except emulator.CompileError:
            return "does not compile"
        except (AssertionError, emulator.KernelFault, emulator.LaunchError) as error:
            return f"{trial.row.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _processor_time(process: int) -> float:
    """Seconds of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_one(mutant: Mutant, chosen: list[Any]) -> tuple[str, str]:
    """(killed, survived, equivalent or invalid; why), in a process that may hang or crash."""
    chosen = limited(chosen, TRIALS if mutant.explained is None else TRIALS_OF_EXPLAINED)
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            progress = functools.partial(os.write, write_end, b"\n")
            verdict = try_mutant(mutant, chosen, progress) or "survived"
        except BaseException as error:  # the child must not go on as its parent
            verdict = f"crash: {error!r}"
        os.write(write_end, verdict.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    output, used = b"", 0.0
    while True:
        if not select.select([read_end], [], [], 5)[0]:
            if _processor_time(process) - used < TIMEOUT_S:
                continue
            os.kill(process, signal.SIGKILL)
            output = b"does not end"
            break
        used = _processor_time(process)
        piece = os.read(read_end, 4096)
        if not piece:
            break
        output += piece
    os.close(read_end)
    os.waitpid(process, 0)
    verdict = output.decode().strip()
    if verdict == "survived":
        return mutant.explained or ("survived", "no row fails")
    if verdict == "does not compile":
        return "invalid", verdict
    return "killed", verdict or "the process dies"


def run_file(file: str, first: int, every: int) -> list[dict[str, Any]]:
    """The verdicts on each `every`-th mutant of a file."""
    chosen = trials(file)
    text = (_source.directory() / file).read_text("ascii")
    results = []
    for mutant in list(mutants(file, text))[first::every]:
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
                "why": why[:150],
            }
        )
    return results


def _write(path: Path, files: dict[str, Any], results: dict[str, list[Any]]) -> None:
    every = [result for file in sorted(results) for result in results[file]]
    counts = {
        verdict: sum(result["verdict"] == verdict for result in every)
        for verdict in ("killed", "survived", "equivalent", "invalid")
    }
    listed = ",\n".join(f"{json.dumps(file)}: {json.dumps(files[file])}" for file in sorted(files))
    rows = ",\n".join(map(json.dumps, every))
    meta = f'{{"arch": {ARCH}, {json.dumps(counts)[1:-1]}, "files": {{\n{listed}\n}}}}'
    path.write_text(f'{{"meta": {meta},\n"rows": [\n{rows}\n]}}\n')
    print(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="of kernels_cu/; all that the tables run")
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--changed", action="store_true", help="leave files that are as recorded")
    parser.add_argument("--commit", default="", help="to write into the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    names = {name for trial in _every_trial() for name in trial.sources}
    texts = [_source.load(name) for name in names]
    known = {file for text in texts for file in re.findall(r'#line 1 "(\S+)"', text)}
    files: dict[str, Any] = {}
    results: dict[str, list[Any]] = {}
    if arguments.out.exists():
        recorded = json.loads(arguments.out.read_text())
        files = {
            name: of for name, of in recorded["meta"].get("files", {}).items() if name in known
        }
        for row in recorded["rows"]:
            if row["file"] in files:
                results.setdefault(row["file"], []).append(row)
    # What mutants leave in the cache is of no use to anybody.
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        for file in arguments.files or sorted(known - {"ptx.cuh"}):
            text = (_source.directory() / file).read_text("ascii")
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            if arguments.changed and files.get(file, {}).get("sha256") == digest:
                continue
            count = len(list(mutants(file, text)))
            results[file] = run_file(file, arguments.first, arguments.every)
            files[file] = {"sha256": digest, "mutants": count, "tried": len(results[file])}
            files[file] |= {"first": arguments.first, "every": arguments.every}
            files[file] |= {"commit": arguments.commit}
            _write(arguments.out, files, results)


if __name__ == "__main__":
    main()
