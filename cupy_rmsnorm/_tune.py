# SPDX-License-Identifier: Apache-2.0
"""The command's `tune`: which plan is the fastest on this GPU, written to a plan file.

For each function, hidden size and dtype all candidates take turns over one ring of buffers, the
library's own plan among them. The best few run again over other buffers and for more rounds: the
own plan stays unless one of them is faster there by more than `MARGIN`, and slower at no number of
rows by more than `SLOWER`. What is known is written after every function.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import __version__, _bench, _cuda, _info, _kernel
from ._call import Array, Backward, Device, Forward
from ._device import current_device
from ._dtypes import ROW_DTYPES, TABLE, numpy_dtype
from ._libraries import CUPY
from ._plan import Plan
from ._plan_file import OPS, Key

ROUNDS, FINAL_ROUNDS = 3, 7
FINALISTS = 3
# Where buffers lie moves all candidates alike. What is left of that between two runs, and of their
# noise, is to stay below these: a plan that wins by less may lose the next time.
MARGIN = 0.02
SLOWER = 0.01
FEW_ROWS = 16  # a step of decoding
MANY_BYTES = 2**26  # of x: more than the L2 cache
WRONG = 0.01  # of the largest value: no right result is that far from another
COMPARED_ROWS = 256
NOISE_ROWS = 64  # that differ; they repeat from there on
EPS = 1e-6


Times = Mapping[Plan | None, float]  # seconds by plan; None: of the copy


class TuneError(Exception):
    """Nothing can be tuned; the message says why."""


class Progress(Protocol):
    """The bar that the command draws."""

    def step(self, count: int) -> None:
        """`count` more of the steps are done."""


@dataclass(frozen=True, slots=True)
class Job:
    """One entry of the plan file to be."""

    op: str
    dtype: str
    hidden_size: int
    rows: tuple[int, ...]

    @property
    def key(self) -> Key:
        op = OPS[self.op]
        return Key(op, self.hidden_size, len(op.dtypes) * (self.dtype,))

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype} {self.hidden_size}"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job; seconds by number of rows."""

    plan: Plan
    own: bool  # whether that is the library's
    seconds: Mapping[int, float]
    own_seconds: Mapping[int, float]
    copy_seconds: Mapping[int, float]


# The command --------------------------------------------------------------------------------------


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `tune` and its options to the command's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="find the fastest plans on this GPU, for cupy_rmsnorm.load_plans",
        description="Measure every plan that makes sense for the given functions, hidden sizes and "
        "dtypes, and write the fastest ones to a file. Only cupy_rmsnorm.load_plans(FILE) reads "
        "it, on the same model of GPU and with the same version of the library.",
    )
    parser.add_argument("--hidden-size", type=count, nargs="+", required=True, metavar="N")
    parser.add_argument(
        "--dtype", choices=ROW_DTYPES, nargs="+", required=True, help="of every array of a call"
    )
    parser.add_argument(
        "--op", choices=OPS, nargs="+", default=["rms_norm"], help="default: rms_norm"
    )
    parser.add_argument(
        "--rows",
        type=count,
        nargs="+",
        metavar="N",
        help="the numbers of rows that count, all alike (default: 16, which backward functions "
        "leave out, and as many as have 64 MiB)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no further function, size and dtype after this time",
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="the plan file to write"
    )
    return parser


def count(text: str) -> int:
    """A number on the command line; its name is part of a message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run(
    args: argparse.Namespace, progress: Callable[[str, int], AbstractContextManager[Progress]]
) -> int:
    """Tune; raises TuneError where that cannot be."""
    usable, reason = _info.available()
    if not usable:
        raise TuneError(f"tuning needs a GPU: {reason}")
    plan_file = PlanFile(args.json)
    found = jobs(args.op, args.dtype, args.hidden_size, args.rows)
    device = _current_device()
    arch = _kernel.device_properties(device).arch
    begin = time.monotonic()
    left_out: list[str] = []
    others = 0
    with progress("Tuning", sum(_steps(job, arch) for job in found)) as bar:
        for job in found:
            if args.budget is not None and time.monotonic() - begin > args.budget:
                left_out.append(job.name)
                continue
            result = tune(job, device, bar)
            others += not result.own
            plan_file.add(job, result)
            _print_result(job, result)
            _free_memory()  # the next job has other sizes
    print(
        f"\n{len(plan_file.plans)} plans, {others} of them not the library's own, "
        f"in {time.monotonic() - begin:.0f} s"
    )
    if left_out:
        print(f"Left out after {args.budget:g} s: {', '.join(left_out)}")
    if plan_file.plans:
        print(f"To use them: cupy_rmsnorm.load_plans({str(args.json)!r})")
    return 0


def jobs(
    ops: Iterable[str],
    dtypes: Iterable[str],
    hidden_sizes: Iterable[int],
    rows: Sequence[int] | None,
) -> list[Job]:
    """What to tune, each once."""
    found = []
    for hidden_size in dict.fromkeys(hidden_sizes):
        for dtype in dict.fromkeys(dtypes):
            many = max(1, MANY_BYTES // (hidden_size * TABLE[dtype].itemsize))
            for op in dict.fromkeys(ops):
                default = (many,) if OPS[op].backward else (FEW_ROWS, many)
                counts = tuple(dict.fromkeys(rows or default))
                found.append(Job(op, dtype, hidden_size, counts))
    return found


def _print_result(job: Job, result: Result) -> None:
    plan = result.plan
    shape = f"{plan.threads_per_row} x {plan.vecs_per_thread} x {plan.vec_size}"
    cluster = f", {plan.cluster_size} blocks" if plan.cluster_size > 1 else ""
    late = "" if plan.early_weight else ", late weight"
    stays = ", as before" if result.own else ""
    print(f"{job.name}: {plan.kernel} {shape}{cluster}{late}{stays}")
    for rows, seconds in result.seconds.items():
        own, copy = result.own_seconds[rows], result.copy_seconds[rows]
        before = "" if result.own else f", before {own * 1e6:.2f} us"
        print(f"    {rows} rows: {seconds * 1e6:.2f} us, {copy / seconds:.2f} of a copy{before}")


class PlanFile:
    """The file that grows with every job; it is never seen half written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plans: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self._part = path.with_name(f"{path.name}.part")
        try:  # now, not after the work
            self._part.touch()
            self._part.unlink()
        except OSError as error:
            raise TuneError(f"cannot write {path}: {error.strerror or error}") from error
        found = _info.info()
        self.meta = {
            "device": _kernel.device_properties(_current_device()).name,
            "cupy_rmsnorm": __version__,
            "driver": found["driver_cuda"],
            "cupy": found["cupy"],
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }

    def add(self, job: Job, result: Result) -> None:
        """Write the file anew with one more entry."""
        key = job.key
        self.plans.append(
            {
                "op": job.op,
                "hidden_size": job.hidden_size,
                "dtypes": dict(zip(key.op.dtypes, key.dtypes, strict=True)),
                "plan": dataclasses.asdict(result.plan),
            }
        )
        for rows, copy in result.copy_seconds.items():
            place = {"op": job.op, "dtype": job.dtype, "rows": rows}
            place["hidden_size"] = job.hidden_size
            times = {"copy": copy, "default": result.own_seconds[rows]}
            times["ours"] = result.seconds[rows]
            for impl, seconds in times.items():
                us, ratio = float(f"{seconds * 1e6:.5g}"), round(copy / seconds, 4)
                self.rows.append({**place, "impl": impl, "us": us, "ratio": ratio})
        try:
            self._part.write_text(self._text(), "utf-8")
            os.replace(self._part, self.path)
        except OSError as error:
            raise TuneError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _text(self) -> str:
        plans, rows = (
            ",\n".join(f"  {json.dumps(item)}" for item in part) for part in (self.plans, self.rows)
        )
        meta = json.dumps(self.meta)
        return f'{{\n"meta": {meta},\n"plans": [\n{plans}\n],\n"rows": [\n{rows}\n]\n}}\n'


# One job ------------------------------------------------------------------------------------------


def _steps(job: Job, arch: int) -> int:
    return len(job.rows) * (len(job.key.candidates(arch)) + FINALISTS + 1)


def tune(job: Job, device: int, bar: Progress) -> Result:
    """The fastest plan of a job."""
    arch = _kernel.device_properties(device).arch
    candidates = job.key.candidates(arch)
    own = candidates[0]
    steps = _steps(job, arch)
    first: dict[int, Times] = {}
    for rows in job.rows:
        trial = Trial(job.key, rows, device)
        candidates = _right(trial, candidates)
        if own not in candidates:
            raise TuneError(f"{job.name}: the library's own plan does not run here")
        first[rows] = trial.race(candidates, ROUNDS)
        del trial  # its memory, before the next one looks how much there is
        bar.step(len(candidates))
        steps -= len(candidates)
    ranking = sorted(candidates, key=lambda plan: _share(plan, own, first))
    finalists = ranking[: ranking.index(own)][:FINALISTS]
    final: Mapping[int, Times] = first
    if finalists:
        final = {
            rows: Trial(job.key, rows, device).race((own, *finalists), FINAL_ROUNDS)
            for rows in job.rows
        }
    bar.step(steps)
    plan = choose(own, finalists, final)
    seconds, own_seconds = (
        {rows: times[which] for rows, times in final.items()} for which in (plan, own)
    )
    copies = {rows: times[None] for rows, times in final.items()}
    return Result(plan, plan == own, seconds, own_seconds, copies)


def choose(own: Plan, finalists: Sequence[Plan], times: Mapping[int, Times]) -> Plan:
    """The own plan, unless another is faster by more than what measuring it again changes."""

    def never_slower(plan: Plan) -> bool:
        return all(each[plan] <= (1 + SLOWER) * each[own] for each in times.values())

    fit = [plan for plan in finalists if never_slower(plan)]
    best = min(fit, key=lambda plan: _share(plan, own, times), default=own)
    return best if _share(best, own, times) < 1 - MARGIN else own


def _share(plan: Plan, own: Plan, times: Mapping[int, Times]) -> float:
    """The plan's time over that of the own one, as the geometric mean over numbers of rows."""
    return math.exp(sum(math.log(each[plan] / each[own]) for each in times.values()) / len(times))


class Trial:
    """Calls of one shape on a ring of placements."""

    def __init__(self, key: Key, rows: int, device: int) -> None:
        self.key, self.rows, self.device = key, rows, Device("cuda", device)
        given = dict(zip(key.op.dtypes, key.dtypes, strict=True))
        made = {"dx": given["x"]} if key.op.backward else {"y": given["x"]}
        if "residual" in given:
            made["residual_out"] = given["residual"]
        self.row_outputs = tuple(made)
        dtypes = {**given, **made}
        row_bytes = key.hidden_size * sum(TABLE[dtype].itemsize for dtype in dtypes.values())
        self.nbytes = rows * row_bytes
        self.placements = _bench.placement_count(self.nbytes)
        shape = (rows, key.hidden_size)
        self.rings = {
            name: _bench.ring(shape, numpy_dtype(dtype), self.placements)
            for name, dtype in dtypes.items()
        }
        self.others = self._others(given["x"])
        fill([ring for name, ring in self.rings.items() if name in given])
        self._calls = [self._call(i) for i in range(self.placements)]

    def _others(self, dtype: str) -> dict[str, Any]:
        """The arrays that all placements share."""
        import cupy

        key, layer = self.key, self.key.op.norm == "layer"
        names = ["weight"]
        if key.op.backward:
            names += ["dweight", "dbias"] if layer else ["dweight"]
        elif layer:
            names += ["bias"]
        arrays = {name: cupy.empty(key.hidden_size, numpy_dtype(dtype)) for name in names}
        if key.op.backward:
            accumulation = numpy_dtype(TABLE[dtype].accumulation or "")
            for name in ("mean", "rstd") if layer else ("rstd",):
                arrays[name] = cupy.empty(self.rows, accumulation)
        for name, value in (("weight", 1), ("bias", 0), ("mean", 0), ("rstd", 1)):
            if name in arrays:  # x has a mean of about 0 and a variance of about 1
                constant(arrays[name], value)
        return arrays

    def _call(self, i: int) -> Forward | Backward:
        natives = {**{name: ring[i] for name, ring in self.rings.items()}, **self.others}
        arrays: dict[str, Array | None] = {
            name: CUPY.describe(name, native, output=True) for name, native in natives.items()
        }
        record = Backward if self.key.op.backward else Forward
        wanted = {field.name for field in dataclasses.fields(record)}
        absent = {"residual", "residual_out", "bias", "mean", "rstd"}
        absent |= {"dresidual_out", "dresidual", "dweight", "dbias"}
        options: dict[str, Any] = {
            **dict.fromkeys(absent & wanted),
            **{name: array for name, array in arrays.items() if name in wanted},
            "function": "tune",
            "norm": self.key.op.norm,
            "space": CUPY.space(self.device),
            "normalized_ndim": 1,
            "weight_offset": 0.0,
            "eps": EPS,
            "cast": "once",
            "per_head": False,
            "where": None,
            "valid_rows": None,
            "masked": "keep",
        }
        return record(**options)

    def call(self, plan: Plan) -> _bench.Call:
        """What runs on a placement by this plan, on CuPy's current stream."""

        def run(i: int) -> None:
            # The space knows the stream, which is another one in each graph.
            call = dataclasses.replace(self._calls[i], space=CUPY.space(self.device))
            if isinstance(call, Backward):
                _cuda.backward(call, plan)
            else:
                _cuda.forward(call, plan)

        return run

    def outputs(self) -> list[Any]:
        """Those of the first placement: the first rows, and sums over all."""
        rows = [self.rings[name][0][:COMPARED_ROWS] for name in self.row_outputs]
        return rows + [self.others[name] for name in ("dweight", "dbias") if name in self.others]

    def race(self, plans: Iterable[Plan], rounds: int) -> Times:
        """Median seconds of each plan, and of the copy of the same bytes."""
        names = {str(plan): plan for plan in plans}
        times = _bench.race(
            {name: self.call(plan) for name, plan in names.items()},
            nbytes=self.nbytes,
            placements=self.placements,
            rounds=rounds,
        )
        copy = times.pop("copy")
        return {None: copy, **{names[name]: seconds for name, seconds in times.items()}}


def _right(trial: Trial, candidates: Sequence[Plan]) -> tuple[Plan, ...]:
    """The candidates that run here and compute what the first one does, built on many threads."""

    def build(plan: Plan) -> str:
        try:
            with current_device(trial.device.index):
                trial.call(plan)(0)
        except RuntimeError as error:
            return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = dict(zip(candidates, pool.map(build, candidates), strict=True))
    expected: list[Any] = []
    for plan in candidates:
        if faults[plan]:
            continue
        for output in trial.outputs():
            poison(output)
        trial.call(plan)(0)
        if not expected:
            expected = [copied(output) for output in trial.outputs()]
        if not all(map(agree, trial.outputs(), expected)):
            faults[plan] = "its result is another one"
    for plan, fault in faults.items():
        if fault:
            print(f"Left out: {plan}: {fault}")
    return tuple(plan for plan in candidates if not faults[plan])


# What arrays hold ---------------------------------------------------------------------------------


def fill(rings: Iterable[list[Any]]) -> None:
    """Noise, the same in every placement of a ring."""
    import cupy

    for ring in rings:
        first = ring[0]
        count = min(len(first), NOISE_ROWS)
        # NumPy's: CuPy's needs one more part of CUDA, which nothing else here does.
        values = np.random.default_rng(0).standard_normal((count, first.shape[1]), np.float32)
        noise = cupy.asarray(values)
        for row in range(0, len(first), count):
            part = first[row : row + count]
            part[...] = noise[: len(part)].astype(first.dtype)
        for other in ring[1:]:
            other[...] = first


def constant(array: Any, value: float) -> None:
    """Every element becomes `value`."""
    import cupy

    array[...] = cupy.full(array.shape, value, "float32").astype(array.dtype)


def poison(array: Any) -> None:
    """Every element becomes NaN."""
    array.view("uint8").fill(255)


def copied(array: Any) -> Any:
    """The values as they are now."""
    return array.copy()


def agree(array: Any, expected: Any) -> bool:
    """Whether two results are the same but for rounding."""
    array, expected = array.astype("float64"), expected.astype("float64")
    return bool(abs(array - expected).max() <= WRONG * abs(expected).max())


def _current_device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())


def _free_memory() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
