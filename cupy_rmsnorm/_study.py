# SPDX-License-Identifier: Apache-2.0
"""The command's `study`: every variant beside its peers, timed, checked and plotted.

All candidates of a case and dtype take turns (`_bench.gpu_time`) over one ring of inputs and
outputs, beside copies of the same bytes. Before that each runs once into an output full of NaN,
whose first rows are held against float64. What is known is written after every case.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import functools
import importlib
import importlib.util
import io
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _bench, _info, _kernel, layer_norm, rms_norm, variants, warmup
from ._device import current_device
from ._dtypes import TABLE as DTYPES
from ._dtypes import numpy_dtype
from .variants import EPS, Variant

SAMPLE = Path(__file__).parent / "data" / "smollm2_layer22.npz"
OPS = ("rms_norm", "layer_norm")
BATCHES = (32, 64, 128, 256, 512, 1024)
SEQUENCE = 128
BATCH_HIDDEN_SIZES = (768, 1024, 4096, 16384)
WARM_UP, ITERATIONS = 10, 1000  # of the wall-clock protocol
# It stops there where 1000 iterations take longer; the row says how many there were.
WALL_SECONDS = {"rows": 0.05, "batch": 0.003}
PEER_WALL_SECONDS = 0.003
CALL_SECONDS = 4e-6  # what a call costs the host at least
ROUNDS = {"rows": 5, "batch": 3}
WINDOWS = {"rows": 2e-3, "batch": 1e-3}  # seconds of one round
NAIVE_ROUNDS, NAIVE_WINDOW = 2, 1e-3  # so slow beside the others that nobody asks for 1 %
LARGE_BYTES, LARGE_PLACEMENTS = 2**30, 2  # no cache holds anything of a placement this large
MODULE_INSTANCES = 8  # compiled together
CHECKED_ROWS = 64
CORRECT = 0.01  # of a row's largest |y|: what a right row may be off, in any dtype
BLOCK_ROWS = 512  # rows that differ; they repeat from there on
NAIVE_BYTES = 2**30  # an unfused expression holds several temporaries of this size
CACHE_MODIFIERS = ("ca", "cg")  # of ptxas -dlcm, beside its default
MODIFIED = ("f32x4", "f16x8_pack_f32", "f32_ilp_1")
ACTIVATIONS = "activations"

Outputs = Callable[[int], Any]  # runs on placement i, gives the output


class StudyError(Exception):
    """The study cannot run; the message says why."""


class Progress(Protocol):
    """The bar that the command draws."""

    def step(self, count: int) -> None:
        """`count` more of the steps are done."""


class Case(NamedTuple):
    """One shape of the study."""

    name: str
    group: str  # "rows" or "batch"
    shape: tuple[int, ...]
    scale: float = 1.0

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def hidden_size(self) -> int:
        return self.shape[-1]


@dataclass
class Row:
    """One line of the table; `op` to `ratio` as in every result file."""

    op: str
    dtype: str
    rows: int
    hidden_size: int
    impl: str
    us: float
    ratio: float
    case: str
    gbps: float
    wall_us: float | None = None
    wall_iterations: int | None = None
    right_rows: int | None = None
    checked_rows: int | None = None
    values: tuple[float, ...] = ()


def cases(activation_rows: int, hidden_size: int) -> list[Case]:
    """The seven of the study, real activations, and batches of sequences."""
    seven = [
        Case(case.name, "rows", (case.rows, case.hidden_size), case.scale)
        for case in _bench.CASES["study"]
    ]
    batches = [
        Case(f"{batch}x{SEQUENCE}x{hidden}", "batch", (batch, SEQUENCE, hidden))
        for hidden in BATCH_HIDDEN_SIZES
        for batch in BATCHES
    ]
    return [*seven, Case(ACTIVATIONS, "rows", (activation_rows, hidden_size)), *batches]


def activations(path: Path) -> np.ndarray:
    """The bfloat16 rows in an .npz file, padded with zeros to a power of two, as float32.

    Zeros leave a row's sum of squares as it is, and every variant admits the hidden size.
    """
    with np.load(path) as arrays:
        bits = [arrays[name] for name in arrays if arrays[name].dtype == np.uint16]
    if len(bits) != 1:
        raise StudyError(f"{path} must hold one uint16 array of bfloat16 bits, got {len(bits)}")
    rows = bits[0].view(numpy_dtype("bfloat16")).astype(np.float32)
    rows = rows.reshape(-1, rows.shape[-1])
    padded = np.zeros((len(rows), 1 << (rows.shape[1] - 1).bit_length()), np.float32)
    padded[:, : rows.shape[1]] = rows
    return padded


# The command ---------------------------------------------------------------------------------


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `study` and its options to the command's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "study",
        help="every study kernel beside torch, CuPy and a device copy, on the GPU",
        description="Run the named kernels of cupy_rmsnorm.variants on the cases of the study: "
        "time on the device's clock (us) and by the wall clock of a loop of calls (wall), "
        "bandwidth, percent of a copy of the same bytes, how many of the first rows are right, "
        "and the first three values.",
    )
    parser.add_argument("--op", choices=OPS, action="append", help="default: both")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), action="append", help="default: all"
    )
    parser.add_argument(
        "--case",
        action="append",
        metavar="TEXT",
        help="only cases whose name contains TEXT, such as 4096x512 or x128x768",
    )
    parser.add_argument(
        "--variant", action="append", metavar="TEXT", help="only names that contain TEXT"
    )
    parser.add_argument(
        "--activations",
        type=Path,
        default=SAMPLE,
        metavar="FILE.npz",
        help="rows for the case of real activations: a file of numpy.savez with one uint16 array, "
        "the bits of bfloat16 rows along its last axis; arrays of other dtypes are ignored "
        "(default: the sample that comes with the package)",
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no further case after this time"
    )
    parser.add_argument("--show-all", action="store_true", help="print whole outputs")
    parser.add_argument("--list", action="store_true", help="list what would run, and stop")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the table to FILE, anew after every case"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the same, with versions, device and commit"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw the results into DIR (needs matplotlib)"
    )
    return parser


def run(
    args: argparse.Namespace, progress: Callable[[str, int], AbstractContextManager[Progress]]
) -> int:
    """Run the study; raises StudyError where it cannot."""
    try:
        rows = activations(args.activations)
    except (OSError, ValueError) as error:
        raise StudyError(f"cannot read {args.activations}: {error}") from error
    every = cases(*rows.shape)
    _refuse_unknown("case", args.case, [case.name for case in every])
    _refuse_unknown("variant", args.variant, [variant.name for variant in _all_variants()])
    chosen = [
        case for case in every if args.case is None or any(text in case.name for text in args.case)
    ]
    jobs = [(case, dtype) for case in chosen for dtype in _dtypes(case, args.dtype)]
    ops = args.op or OPS
    if not any(_wanted(case, dtype, ops, args.variant) for case, dtype in jobs):
        raise StudyError("these options together leave no variant to run")
    if args.list:
        _print_list(jobs, ops, args.variant)
        return 0
    usable, reason = _info.available()
    if not usable:
        raise StudyError(f"the study needs a GPU: {reason}")
    # Missing: an error before the work, not after it.
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise StudyError("--plot needs matplotlib: pip install matplotlib")

    begin = time.monotonic()
    races = [Race(case, dtype, ops, args.variant, rows) for case, dtype in jobs]
    _compile(races, progress)
    report = Report(args.csv, args.json, numeric_claims())
    print(f"compiled in {time.monotonic() - begin:.0f} s")
    report.left_out = [f"{race.case.name} {race.dtype}" for race in races]
    with progress("Study", len(races)) as bar:
        for race in races:
            if args.budget is not None and time.monotonic() - begin > args.budget:
                break
            report.add(_print_rows(race, race.run(args.show_all)))
            _free_memory()  # the next race has other sizes
            bar.step(1)
    report.write()
    print(f"\n{len(report.table)} rows in {time.monotonic() - begin:.0f} s")
    if report.left_out:
        print(f"Left out after {args.budget:g} s: {', '.join(report.left_out)}")
    if args.plot is not None:
        plot(args.plot, report.table)
        print(f"with plots {time.monotonic() - begin:.0f} s")
    return 0


def _refuse_unknown(what: str, texts: Iterable[str] | None, names: Iterable[str]) -> None:
    names = list(dict.fromkeys(names))
    for text in texts or ():
        if not any(text in name for name in names):
            raise StudyError(f"no {what}'s name contains {text!r}; there are {', '.join(names)}")


def _dtypes(case: Case, wanted: Iterable[str] | None) -> list[str]:
    dtypes = ["float32", "float16", "bfloat16"]
    if case.group == "batch":
        dtypes.remove("bfloat16")
    return [dtype for dtype in dtypes if wanted is None or dtype in wanted]


def _wanted(
    case: Case, dtype: str, ops: Iterable[str], names: Iterable[str] | None
) -> list[Variant]:
    """The variants that run on a case; of some, a GPU may be too old."""
    return [
        variant
        for variant in (_all_variants() if case.group == "rows" else variants.TABLE)
        if f"{variant.norm}_norm" in ops
        and variant.dtype == dtype
        and case.hidden_size in variant.sizes
        and (names is None or any(text in variant.name for text in names))
    ]


def _print_list(
    jobs: Iterable[tuple[Case, str]], ops: Iterable[str], names: Iterable[str] | None
) -> None:
    found = {(case.name, dtype): _wanted(case, dtype, ops, names) for case, dtype in jobs}
    listed = {variant for wanted in found.values() for variant in wanted}
    for variant in _all_variants():
        if variant in listed:
            op = f"{variant.norm}_norm"
            print(f"{op:11} {variant.name:27} {variant.dtype:9} {variant.sizes}: {variant.summary}")
    print("\nCases:", ", ".join(dict.fromkeys(case for (case, _), each in found.items() if each)))


# One race ------------------------------------------------------------------------------------


class Race:
    """The candidates of one case and dtype, over one ring of inputs and outputs."""

    def __init__(
        self,
        case: Case,
        dtype: str,
        ops: Iterable[str],
        names: Iterable[str] | None,
        activation_rows: np.ndarray,
    ) -> None:
        self.case, self.dtype = case, dtype
        self.ops = tuple(ops)
        self._activations = activation_rows
        self.nbytes = 2 * math.prod(case.shape) * DTYPES[dtype].itemsize
        arch = _kernel.device_properties(_current_device()).arch
        self.variants = [
            variant for variant in _wanted(case, dtype, self.ops, names) if variant.min_arch <= arch
        ]
        self.peers = names is None

    def instances(self) -> Iterator[variants.Instance]:
        """What has to be compiled."""
        device = _kernel.device_properties(_current_device())
        for variant in self.variants:
            launch = variant.geometry(variant, self.case.hidden_size, self.case.rows, device)
            yield variant, launch.template_arguments

    def prepare(self) -> tuple[list[Any], list[Any], dict[tuple[str, str], Outputs]]:
        """Inputs, outputs, and for each (op, name) what runs on one placement of them."""
        count = _bench.placement_count(self.nbytes)
        if self.nbytes > LARGE_BYTES:
            count = min(count, LARGE_PLACEMENTS)
        xs = _bench.ring(self.case.shape, numpy_dtype(self.dtype), count)
        ys = _bench.ring(self.case.shape, numpy_dtype(self.dtype), count)
        self._fill(xs)
        return xs, ys, self._candidates(xs, ys)

    def run(self, show_all: bool) -> list[Row]:
        """Check and time every candidate."""
        xs, ys, candidates = self.prepare()
        references = {op: self._reference(op, xs[0]) for op in self.ops}
        checks = {}
        for (op, name), call in candidates.items():
            _poison(ys[0])
            y = call(0)
            checks[op, name] = self._check(y, references[op])
            if show_all:
                print(f"{op} {name} {self.dtype}\n{_head(y, self.case.rows)}")
        times = self._times(xs, ys, candidates)
        copy = times.pop(("", "copy"))
        table = [self._row(op, "copy", copy, copy) for op in self.ops]
        mine = {variant.name for variant in self.variants}
        for (op, name), call in candidates.items():
            row = self._row(op, name, times[op, name], copy)
            limit = WALL_SECONDS[self.case.group] if name in mine else PEER_WALL_SECONDS
            row.wall_us, row.wall_iterations = _wall_us(call, times[op, name], limit)
            row.right_rows, row.checked_rows, row.values = checks[op, name]
            table.append(row)
        return table

    def _times(
        self, xs: list[Any], ys: list[Any], candidates: dict[tuple[str, str], Outputs]
    ) -> dict[tuple[str, str], float]:
        """Median device seconds of each candidate and, as ("", "copy"), of the fastest copy."""
        copies = _bench.copy_candidates(xs, ys)
        timed = {f"{op} {name}": call for (op, name), call in candidates.items()}
        naive = {name: call for name, call in timed.items() if name.endswith(" naive")}
        fast = {name: call for name, call in timed.items() if name not in naive}
        group, placements = self.case.group, len(xs)
        found = _bench.gpu_time(
            {**fast, **copies},
            placements=placements,
            rounds=ROUNDS[group],
            window=WINDOWS[group],
        )
        found |= _bench.gpu_time(
            naive, placements=placements, rounds=NAIVE_ROUNDS, window=NAIVE_WINDOW
        )
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        times = {(op, name): medians[f"{op} {name}"] for op, name in candidates}
        return {**times, ("", "copy"): min(medians[name] for name in copies)}

    def _row(self, op: str, name: str, seconds: float, copy: float) -> Row:
        return Row(
            op=op,
            dtype=self.dtype,
            rows=self.case.rows,
            hidden_size=self.case.hidden_size,
            impl=name,
            us=1e6 * seconds,
            ratio=copy / seconds,
            case=self.case.name,
            gbps=self.nbytes / seconds / 1e9,
        )

    def _fill(self, xs: list[Any]) -> None:
        """Every placement with the same rows: normal ones, from the host, which needs no cuRAND."""
        import cupy

        if self.case.name == ACTIVATIONS:
            block = cupy.asarray(self._activations)
        else:
            normal = _normal_rows(self.case.hidden_size)
            block = cupy.asarray(normal * np.float32(self.case.scale))
        block = _cast(block, self.dtype)
        for x in xs:
            flat = x.reshape(-1, *block.shape)
            flat.view(f"u{x.itemsize}")[...] = block.view(f"u{x.itemsize}")

    def _candidates(self, xs: list[Any], ys: list[Any]) -> dict[tuple[str, str], Outputs]:
        import cupy

        one = _cast(cupy.ones(self.case.hidden_size, np.float32), self.dtype)
        zero = _cast(cupy.zeros(self.case.hidden_size, np.float32), self.dtype)
        candidates: dict[tuple[str, str], Outputs] = {}
        for variant in self.variants:
            parameters: tuple[Any, ...] = ()
            if variant.vector:
                parameters = (one, zero) if variant.norm == "layer" else (one,)
            key = (f"{variant.norm}_norm", variant.name)
            candidates[key] = _bound(variant, parameters, xs, ys)
        if self.peers:
            for op in self.ops:
                for name, call in _peers(op, self.dtype, xs, ys, self.nbytes).items():
                    candidates[op, name] = call
        return candidates

    def _reference(self, op: str, x: Any) -> np.ndarray:
        """What the first rows must be, in float64."""
        count = self.case.rows if self.case.name == ACTIVATIONS else CHECKED_ROWS
        rows = _head(x, count).astype(np.float64)
        centred = rows - rows.mean(-1, keepdims=True) if op == "layer_norm" else rows
        reference: np.ndarray = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS)
        return reference

    @staticmethod
    def _check(y: Any, reference: np.ndarray) -> tuple[int, int, tuple[float, ...]]:
        """How many of the first rows are right, of how many, and the first three values."""
        got = _head(y, len(reference)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.abs(got - reference).max(-1)
        right = int((error <= CORRECT * np.abs(reference).max(-1)).sum())
        return right, len(got), tuple(float(value) for value in got.reshape(-1)[:3])


def _all_variants() -> Iterator[Variant]:
    """The table's, and three of them under each cache modifier."""
    for variant in variants.TABLE:
        yield variant
        if variant.name in MODIFIED:
            for modifier in CACHE_MODIFIERS:
                yield dataclasses.replace(
                    variant,
                    name=f"{variant.name} -dlcm={modifier}",
                    options=(*variant.options, f"--ptxas-options=-dlcm={modifier}"),
                )


def _compile(
    races: list[Race], progress: Callable[[str, int], AbstractContextManager[Progress]]
) -> None:
    """Everything that the races need, on many threads."""
    import cupy

    device = _current_device()
    instances = (instance for race in races for instance in race.instances())
    groups = variants.modules(instances, device, MODULE_INSTANCES)
    jobs: list[Callable[[], object]] = [
        partial(variants.load_module, group, device) for group in groups
    ]
    if any(race.peers for race in races):
        jobs.append(_import_torch)
        for dtype in ("float32", "float16"):
            for naive in (variants.naive_rms_norm, variants.naive_layer_norm):
                jobs.append(partial(naive, cupy.ones((2, 64), numpy_dtype(dtype))))
    calls = {
        (op, race.case.hidden_size, race.dtype) for race in races if race.peers for op in race.ops
    }

    def build(job: Callable[[], object]) -> None:
        with current_device(device):
            job()

    with progress("Compiling", len(jobs) + 1) as bar:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(build, jobs):
                bar.step(1)
        names = ("op", "hidden_size", "dtype")
        warmup(calls=[dict(zip(names, call, strict=True)) for call in sorted(calls)])
        bar.step(1)


def _import_torch() -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")


def _bound(variant: Variant, parameters: tuple[Any, ...], xs: list[Any], ys: list[Any]) -> Outputs:
    """Checked once; what is timed is launches, as from a compiled extension."""
    import cupy

    stream = cupy.cuda.get_current_stream
    launches = [variant.bind(x, *parameters, out=y) for x, y in zip(xs, ys, strict=True)]

    def run(i: int) -> Any:
        launches[i](stream().ptr)
        return ys[i]

    return run


def _peers(op: str, dtype: str, xs: list[Any], ys: list[Any], nbytes: int) -> dict[str, Outputs]:
    """This library's public function, torch's, and the unfused expression of CuPy and torch."""
    ours = rms_norm if op == "rms_norm" else layer_norm
    naive = variants.naive_rms_norm if op == "rms_norm" else variants.naive_layer_norm
    small = nbytes <= NAIVE_BYTES
    # Alive, so that outputs rotate like those given by out=. A large one leaves the cache anyway.
    kept: list[Any] = [None] * len(xs)

    def keep(function: Callable[[Any], Any], arrays: list[Any], i: int) -> Any:
        y = function(arrays[i])
        if small:
            kept[i] = y
        return y

    found: dict[str, Outputs] = {"ours": lambda i: ours(xs[i], eps=EPS, out=ys[i])}
    if dtype != "bfloat16" and small:  # CuPy computes nothing in bfloat16
        found["cupy naive"] = partial(keep, naive, xs)
    try:
        import torch
    except ImportError:
        return found
    tensors = [_tensor(x) for x in xs]
    functional = torch.nn.functional
    shape = (xs[0].shape[-1],)

    def on_stream(function: Callable[[Any], Any], i: int) -> Any:
        import cupy

        pointer = cupy.cuda.get_current_stream().ptr
        # 0 is the default stream, which is torch's current one as well.
        other = torch.cuda.stream(torch.cuda.ExternalStream(pointer)) if pointer else None
        with other or contextlib.nullcontext():
            return keep(function, tensors, i)

    if op == "layer_norm":
        found["torch"] = partial(on_stream, lambda x: functional.layer_norm(x, shape, eps=EPS))
    elif hasattr(functional, "rms_norm"):
        found["torch"] = partial(on_stream, lambda x: functional.rms_norm(x, shape, eps=EPS))
    if small:
        found["torch naive"] = partial(on_stream, naive)
    return found


def _wall_us(call: Outputs, seconds: float, limit: float) -> tuple[float, int]:
    """Microseconds of a call in a loop on one input, by the host's clock; and how many calls."""
    import cupy

    iterations = max(3, min(ITERATIONS, int(limit / max(seconds, CALL_SECONDS))))
    stream = cupy.cuda.get_current_stream()
    for _ in range(min(WARM_UP, iterations)):
        call(0)
    stream.synchronize()
    begin = time.perf_counter()
    for _ in range(iterations):
        call(0)
    stream.synchronize()
    return 1e6 * (time.perf_counter() - begin) / iterations, iterations


def _free_memory() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


# Arrays --------------------------------------------------------------------------------------


def _current_device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.lru_cache(maxsize=1)
def _normal_rows(hidden_size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((BLOCK_ROWS, hidden_size), np.float32)


def _poison(y: Any) -> None:
    """NaN in every dtype."""
    y.data.memset_async(0xFF, y.nbytes)


def _cast(values: Any, dtype: str) -> Any:
    """A float32 CuPy array in `dtype`; bfloat16, in which CuPy does not compute, by its bits."""
    if dtype != "bfloat16":
        return values.astype(numpy_dtype(dtype))
    bits = values.view("u4")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.astype("u2").view(numpy_dtype(dtype))


def _tensor(x: Any) -> Any:
    """A torch tensor over a CuPy array."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_dlpack(x.view("i2")).view(torch.bfloat16)
    return torch.from_dlpack(x)


def _head(array: Any, count: int) -> np.ndarray:
    """The first rows of a CuPy array or torch tensor, on the host."""
    rows = array.reshape(-1, array.shape[-1])[:count]
    if type(rows).__module__ == "torch":
        torch = sys.modules["torch"]
        torch.cuda.synchronize()
        if rows.dtype == torch.bfloat16:
            bits: np.ndarray = rows.view(torch.int16).cpu().numpy()
            return bits.view(numpy_dtype("bfloat16"))
        host: np.ndarray = rows.cpu().numpy()
        return host
    import cupy

    bits = cupy.asnumpy(rows.view(f"u{rows.itemsize}"))
    return bits.view(rows.dtype)


# Claims about numbers ------------------------------------------------------------------------


def numeric_claims() -> list[dict[str, Any]]:
    """Cancellation, eps, and shifts of the mean: errors as the variants make them on this GPU."""
    return [*_cancellation(), *_eps_by_dtype(), *_eps_places(), *_mean_shift()]


def _cancellation() -> Iterator[dict[str, Any]]:
    """LayerNorm of rows with a large mean: one pass against two."""
    import cupy

    normal = np.random.default_rng(0).standard_normal((64, 1024))
    for mean in (0.0, 1e1, 1e2, 1e3, 1e4):
        x = (normal + mean).astype(np.float32)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(-1, keepdims=True)
        expected = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS)
        for name in ("f32x4", "f32x4_single_pass"):
            y = _head(getattr(variants.layer_norm, name)(cupy.asarray(x)), len(x))
            error = float(np.abs(y - expected).max())
            yield {"claim": "cancellation", "impl": name, "mean": mean, "error": error}


def _eps_by_dtype() -> Iterator[dict[str, Any]]:
    """How far eps moves the result from that without eps, against the dtype's own rounding."""
    import cupy

    normal = np.random.default_rng(0).standard_normal((64, 1024))
    names = {"float32": "f32x4", "float16": "f16x8_pack_f32", "bfloat16": "bf16x8_pack_f32"}
    for dtype, name in names.items():
        for scale in (1.0, 1e-2):
            x = _cast(cupy.asarray(scale * normal, np.float32), dtype)
            wide = _head(x, len(normal)).astype(np.float64)
            exact = wide / np.sqrt((wide * wide).mean(-1, keepdims=True))
            for eps in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
                y = _head(getattr(variants.rms_norm, name)(x, eps=eps), len(normal))
                error = np.abs(y.astype(np.float64) - exact) / np.abs(exact).max(-1, keepdims=True)
                yield {
                    "claim": "eps",
                    "dtype": dtype,
                    "scale": scale,
                    "eps": eps,
                    "error": float(error.max()),
                }


def _eps_places() -> Iterator[dict[str, Any]]:
    """Both published places of eps, in float64."""
    row = np.random.default_rng(0).standard_normal((1, 1024))
    row /= np.sqrt((row * row).mean())
    for rms in (1.0, 1e-2, 1e-3, 1e-5):
        inside = variants.eps_inside(rms * row, eps=EPS)
        outside = variants.eps_outside(rms * row, eps=EPS)
        for place, y in (("inside", inside), ("outside", outside)):
            norm = float(np.sqrt((y * y).mean()))
            yield {"claim": "eps place", "place": place, "rms": rms, "output rms": norm}


def _mean_shift() -> Iterator[dict[str, Any]]:
    """What adding one number to a whole row does to the output and to the gradient."""
    from . import layer_norm_backward, rms_norm_backward

    random = np.random.default_rng(0)
    x, dout = random.standard_normal((2, 64, 1024))
    for op, forward, backward in (
        ("rms_norm", rms_norm, rms_norm_backward),
        ("layer_norm", layer_norm, layer_norm_backward),
    ):
        for shift in (0.1, 1.0, 10.0):
            y = forward(x, eps=EPS), forward(x + shift, eps=EPS)
            dx: list[Any] = [backward(dout, each, eps=EPS)[0] for each in (x, x + shift)]
            yield {
                "claim": "mean shift",
                "op": op,
                "shift": shift,
                "output change": float(np.abs(y[1] - y[0]).max()),
                "gradient change": float(np.abs(dx[1] - dx[0]).max()),
            }


# What comes out ------------------------------------------------------------------------------


def _print_rows(race: Race, table: list[Row]) -> list[Row]:
    shape = " x ".join(map(str, race.case.shape))
    for op in race.ops:
        title = f"{op}  {race.case.name}  ({shape})  {race.dtype}"
        print(
            f"\n{title}\n{'':28} {'us':>9} {'wall':>9} {'GB/s':>6} {'copy':>5} right  first values"
        )
        for row in sorted((row for row in table if row.op == op), key=lambda row: row.us):
            wall = "" if row.wall_us is None else f"{row.wall_us:.2f}"
            right = "" if row.right_rows is None else f"{row.right_rows}/{row.checked_rows}"
            values = " ".join(f"{value:.4f}" for value in row.values)
            print(
                f"{row.impl:28} {row.us:9.2f} {wall:>9} {row.gbps:6.0f} {row.ratio:5.0%} "
                f"{right:>6} {values}"
            )
    return table


class Report:
    """The files; written anew with every case, so that a run that is cut short leaves them."""

    def __init__(
        self, csv_path: Path | None, json_path: Path | None, numerics: list[dict[str, Any]]
    ) -> None:
        self.csv_path, self.json_path = csv_path, json_path
        self.numerics = numerics
        self.table: list[Row] = []
        self.left_out: list[str] = []
        self._meta = _meta()

    def add(self, rows: list[Row]) -> None:
        """The rows of the first case that was left out so far."""
        self.table += rows
        self.left_out = self.left_out[1:]
        self.write()

    def write(self) -> None:
        if self.csv_path is not None:
            _replace(self.csv_path, self._csv())
        if self.json_path is not None:
            _replace(self.json_path, self._json())

    def _csv(self) -> str:
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        writer.writeheader()
        for row in self.table:
            values = " ".join(f"{value:.6g}" for value in row.values)
            writer.writerow(dataclasses.asdict(row) | {"values": values})
        return file.getvalue()

    def _json(self) -> str:
        meta = {**self._meta, "left_out": self.left_out}
        rows = [json.dumps(_rounded(dataclasses.asdict(row))) for row in self.table]
        return (
            f'{{"meta": {json.dumps(meta)},\n"rows": [\n'
            + ",\n".join(rows)
            + '\n],\n"numerics": [\n'
            + ",\n".join(map(json.dumps, self.numerics))
            + "\n]}\n"
        )


def _replace(path: Path, content: str) -> None:
    """The whole file or the old one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(content, newline="")
    part.replace(path)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five digits; a value that is not finite as text, which JSON has no number for."""

    def value(item: Any) -> Any:
        if isinstance(item, tuple):
            return [value(each) for each in item]
        if not isinstance(item, float):
            return item
        return float(f"{item:.5g}") if math.isfinite(item) else str(item)

    return {name: value(item) for name, item in row.items()}


def _meta() -> dict[str, Any]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(_current_device())
    torch = sys.modules.get("torch")
    return {
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "torch": None if torch is None else torch.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "peak_gflops": _peak_gflops(),
        "wall_clock": f"{WARM_UP} warm-up calls, then up to {ITERATIONS} (wall_iterations): "
        f"fewer where they would take over {WALL_SECONDS['rows']} s, in batches "
        f"{WALL_SECONDS['batch']} s, and for peers {PEER_WALL_SECONDS} s",
    }


def _commit() -> str | None:
    """The checkout's commit; None where the package is installed."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _peak_gflops() -> float:
    """float32, without the tensor cores: 128 multiply-adds a cycle and multiprocessor."""
    from cupy.cuda import runtime

    device = _current_device()
    count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    kilohertz = runtime.deviceGetAttribute(runtime.cudaDevAttrClockRate, device)
    return float(count * 128 * 2 * kilohertz / 1e6)


# Floating-point operations an element, divisions and roots left out: they are one a row.
FLOPS = {"rms_norm": 4, "layer_norm": 7}


def plot(folder: Path, table: list[Row]) -> None:
    """Bandwidth against the hidden size, and a roofline, one file an op and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys((row.op, row.dtype) for row in table)
    for op, dtype in kinds:
        rows = [row for row in table if (row.op, row.dtype) == (op, dtype)]
        for name, draw in (("bandwidth", _draw_bandwidth), ("roofline", _draw_roofline)):
            figure = draw(op, dtype, rows)
            if figure is not None:
                figure.savefig(folder / f"{name}-{op}-{dtype}.svg", bbox_inches="tight")


def _draw_bandwidth(op: str, dtype: str, rows: list[Row]) -> Any:
    """4096 rows: every variant over the hidden size, and the copy."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.case == f"4096x{row.hidden_size}"]
    if not rows:
        return None
    figure = Figure(figsize=(9, 6))
    axes = figure.add_subplot()
    for number, name in enumerate(dict.fromkeys(row.impl for row in rows)):
        points = sorted((row.hidden_size, row.gbps) for row in rows if row.impl == name)
        style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if name == "copy" else {}
        line = ("-", "--", "-.", ":")[number // 10 % 4]
        axes.plot(*zip(*points, strict=True), line, marker=".", label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hidden size")
    axes.set_ylabel("GB/s")
    axes.set_title(f"{op}, {dtype}, 4096 rows")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_roofline(op: str, dtype: str, rows: list[Row]) -> Any:
    """The largest case: every variant, with the weight from the cache and from memory."""
    from matplotlib.figure import Figure

    largest = max(rows, key=lambda row: (row.rows * row.hidden_size, row.case))
    rows = [row for row in rows if row.case == largest.case]
    copy = next((row.gbps for row in rows if row.impl == "copy"), None)
    if copy is None:
        return None
    itemsize = DTYPES[dtype].itemsize
    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    peak = _peak_gflops()
    intensities = np.geomspace(0.1, 100, 200)
    axes.plot(intensities, np.minimum(copy * intensities, peak), color="black", label="roof")
    for label, arrays, marker in (("weight cached", 2, "o"), ("weight from memory", 3, "x")):
        intensity = FLOPS[op] / (arrays * itemsize)
        flops = [FLOPS[op] * row.gbps / (2 * itemsize) for row in rows if row.impl != "copy"]
        axes.scatter([intensity] * len(flops), flops, marker=marker, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("float32 operations a byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{op}, {dtype}, {largest.case}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure
