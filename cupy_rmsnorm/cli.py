# SPDX-License-Identifier: Apache-2.0
"""The command cupy-rmsnorm: what this machine offers, and the normalisation of a file."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import math
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import __version__, _bench, _info, _study, _tools, _tune, layer_norm, rms_norm
from ._dtypes import ROW_DTYPES, numpy_dtype
from ._progress import Progress

Rows = list[tuple[str, str]]  # label and value, a line each

OPS = {
    "rms_norm": (rms_norm, 1e-6),
    "layer_norm": (layer_norm, 1e-5),
}
SAMPLE = Path(__file__).parent / "data" / "smollm2_layer22.npz"
CHUNK = 1 << 22  # elements between two steps of the progress bar
# The bound on |y - reference| is ERROR * scale plus half an ulp of a 16-bit y.
ERROR = {"float32": 2e-6, "float64": 4e-15}
# Significand bits after the leading one, and the smallest normal exponent.
SIXTEEN_BITS = {"float16": (10, -14), "bfloat16": (7, -126)}


class UsageError(Exception):
    """What the user gave cannot be used; the message says what and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 (a result is wrong) or 2 (wrong usage).

    It is 141, as of a program that SIGPIPE ended, if nobody reads the output any more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may not know a file name's letters
    try:
        try:
            args = _parser().parse_args(argv)
            status: int = args.run(args)
        finally:
            print(end="", flush=True)
    except UsageError as error:
        message = str(error)
    except MemoryError as error:
        message = f"not enough memory: {error}"
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        message = f"cannot write {error.filename or 'the output'}: {error.strerror or error}"
        if error.filename is None:
            _drop_output()
    else:
        return status
    print(f"cupy-rmsnorm: {message}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    # What is left of it would fail once more when the interpreter ends, and change the status.
    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cupy-rmsnorm", description="Fused RMSNorm and LayerNorm on the GPU or with NumPy."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    info = commands.add_parser(
        "info", help="versions, devices, and why the GPU is not used if it is not"
    )
    info.add_argument(
        "--plans", metavar="FILE", help="load this plan file first, or say why it is refused"
    )
    info.set_defaults(run=run_info)

    demo = commands.add_parser(
        "demo",
        help="normalise a file, check the result and measure the speed",
        description="Normalise the last axis of FILE on the GPU or, where there is none, with "
        "NumPy; check every element against float64; print time, bandwidth, error and three "
        "values. Without FILE: real activations of a language model and a random input of a "
        "model's size.",
    )
    tensor = "a .npy file, or FILE.safetensors:NAME"
    demo.add_argument("file", nargs="?", metavar="FILE", help=f"the input: {tensor}")
    demo.add_argument("--weight", metavar="FILE", help=f"the weight: {tensor}")
    demo.add_argument("--bias", metavar="FILE", help=f"the bias: {tensor}")
    demo.add_argument("--out", metavar="FILE", help="write the result to this .npy file")
    demo.add_argument("--op", choices=OPS, default="rms_norm", help="default: %(default)s")
    demo.add_argument("--eps", type=float, help="default: 1e-6 (rms_norm), 1e-5 (layer_norm)")
    demo.add_argument(
        "--dtype",
        choices=ROW_DTYPES,
        help="convert the input first; bfloat16 also says what the |V2 of a .npy file means",
    )
    demo.add_argument(
        "--device",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="auto: the GPU if it can be used (default)",
    )
    demo.add_argument(
        "--json", metavar="FILE", help="also write the times to this file, if all is correct"
    )
    demo.add_argument("--commit", help="the commit that --json names")
    demo.set_defaults(run=run_demo)
    _study.add_parser(commands).set_defaults(run=run_study)
    _tune.add_parser(commands).set_defaults(run=run_tune)
    return parser


def run_info(args: argparse.Namespace) -> int:
    """Print what was found, one fact a line."""
    if args.plans is not None:
        try:
            _tools.load_plans(args.plans)
        except OSError as error:
            raise UsageError(f"cannot read {args.plans}: {error.strerror or error}") from error
        except (RuntimeError, ValueError) as error:
            raise UsageError(str(error)) from error
    found = _tools.info()
    reason, devices = found.pop("reason"), found.pop("devices")
    rows: Rows = [
        (
            f"device {number}",
            f"{device['name']}, compute capability {device['compute_capability']}, "
            f"{device['multiprocessors']} multiprocessors, {device['memory_gib']} GiB",
        )
        for number, device in enumerate(devices)
    ]
    for name, value in found.items():
        text = ", ".join(value) if isinstance(value, list) else value
        rows.append((name, text or ("none" if name.startswith("plan_file") else "not found")))
    print_rows("cupy-rmsnorm info", rows)
    if reason:
        print(f"The GPU is not used: {reason}")
    return 0


def run_study(args: argparse.Namespace) -> int:
    """Measure every study kernel."""
    try:
        return _study.run(args, Progress)
    except _study.StudyError as error:
        raise UsageError(str(error)) from error


def run_tune(args: argparse.Namespace) -> int:
    """Write the fastest plans on this GPU to a file."""
    try:
        return _tune.run(args, Progress)
    except _tune.TuneError as error:
        raise UsageError(str(error)) from error


@dataclass
class Job:
    """One input of the demo."""

    title: str
    op: str
    x: np.ndarray
    weight: np.ndarray | None
    bias: np.ndarray | None
    eps: float

    def __call__(self, x: Any, weight: Any, bias: Any, out: Any = None) -> Any:
        function, _ = OPS[self.op]
        try:
            return function(x, weight, bias, eps=self.eps, out=out)
        except TypeError as error:
            raise UsageError(f"{error}{self._remedy()}") from error
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _remedy(self) -> str:
        """What to do where float64 meets another dtype."""
        given = [array.dtype for array in (self.weight, self.bias) if array is not None]
        wide = {dtype == np.float64 for dtype in given}
        if wide != {self.x.dtype != np.float64}:
            return ""
        return f"; convert x by --dtype {given[0]}"


@dataclass
class Result:
    """What a device made of a job, and how long it took."""

    y: np.ndarray
    seconds: float
    copy_seconds: float | None = None


@dataclass
class Verdict:
    """How far a result is from the reference."""

    error: float = 0.0  # the largest |y - reference|
    share: float = 0.0  # the largest share of what rounding allows
    nans: int = 0  # where the reference has them too
    infinities: int = 0

    @property
    def correct(self) -> bool:
        return self.share <= 1


def run_demo(args: argparse.Namespace) -> int:
    """Normalise, check, measure and print; 1 if an element is further off than rounding allows."""
    usable, reason = _info.available()
    if args.device == "gpu" and not usable:
        raise UsageError(f"the GPU cannot be used: {reason}")
    on_gpu = usable and args.device != "cpu"
    if args.out is not None:
        if args.file is None:
            raise UsageError("--out needs an input FILE")
        if not args.out.endswith(".npy"):
            raise UsageError(f"--out must end in .npy, got {args.out}")

    device = _info.info()["devices"][0] if on_gpu else None
    if device is not None:
        print(f"On {device['name']}, compute capability {device['compute_capability']}")
    else:
        print("On the CPU, with NumPy" + (f" (no GPU: {reason})" if reason else ""))
    correct = True
    records: list[dict[str, Any]] = []
    for job in _jobs(args, on_gpu):
        with Progress(job.title, steps=2 * job.x.size) as progress:
            result = (_on_gpu if on_gpu else _on_cpu)(job, progress)
            verdict = _check(job, result.y, progress)
        if args.out is not None:
            _save(args.out, result.y)
        correct &= verdict.correct
        records += _records(job, result)
        print_rows(job.title, _report(job, result, verdict))
    if args.json is not None and correct:
        _write_json(args.json, _meta(device, args.commit), records)
    return 0 if correct else 1


def _report(job: Job, result: Result, verdict: Verdict) -> Rows:
    y, nbytes = result.y, job.x.nbytes + result.y.nbytes
    shape = " x ".join(map(str, job.x.shape))
    parameters = "".join(
        f", {name} {array.dtype}"
        for name, array in (("weight", job.weight), ("bias", job.bias))
        if array is not None
    )
    bandwidth = f"{nbytes / result.seconds / 1e9:.4g} GB/s"
    if result.copy_seconds is not None:
        percent = 100 * result.copy_seconds / result.seconds
        bandwidth += f", {percent:.0f} % of a device copy of the same bytes"
    judged = "correct" if verdict.correct else "WRONG"
    judgement = f"{verdict.error:.3g}, {verdict.share:.2f} of what rounding allows: {judged}"
    if verdict.nans + verdict.infinities == y.size:
        judgement = "not known: no result is finite"
    rows = [
        ("input", f"{shape} {job.x.dtype}{parameters}"),
        ("call", f"{job.op}, eps {job.eps:g}"),
        ("time", _duration(result.seconds)),
        ("bandwidth", bandwidth),
        ("largest error", judgement),
    ]
    counts = ((verdict.nans, "NaN"), (verdict.infinities, "infinite"))
    if found := [f"{count} {what}" for count, what in counts if count]:
        text = f"{' and '.join(found)} of {y.size} results, as in the reference"
        rows.append(("not finite", text))
    values = y.reshape(-1)[:3].astype(np.float64)
    rows.append(("first values", " ".join(f"{value:.6g}" for value in values)))
    return rows


def _records(job: Job, result: Result) -> Iterator[dict[str, Any]]:
    """The result file's rows of one job: a copy of the same bytes, and ours."""
    place = {"op": job.op, "dtype": job.x.dtype.name}
    place |= dict(zip(("rows", "hidden_size"), _rows(job.x).shape, strict=True))
    copy = result.copy_seconds
    for impl, seconds in (("copy", copy), ("ours", result.seconds)):
        if seconds is not None:
            ratio = None if copy is None else round(copy / seconds, 4)
            yield {**place, "impl": impl, "us": float(f"{1e6 * seconds:.5g}"), "ratio": ratio}


def _meta(device: dict[str, Any] | None, commit: str | None) -> dict[str, Any]:
    found = _info.info()
    return {
        "device": "CPU" if device is None else device["name"],
        "driver": None if device is None else _info.read_driver().cuda,
        "cupy": None if device is None else found["cupy"],
        "numpy": found["numpy"],
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _write_json(path: str, meta: dict[str, Any], records: list[dict[str, Any]]) -> None:
    rows = ",\n".join(f"  {json.dumps(record)}" for record in records)
    content = f'{{\n"meta": {json.dumps(meta)},\n"rows": [\n{rows}\n]\n}}\n'
    try:
        Path(path).write_text(content, "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _on_cpu(job: Job, progress: Progress) -> Result:
    x, y = _rows(job.x), np.empty(job.x.shape, job.x.dtype)
    y.fill(0)  # the system hands out its pages now, not while the clock runs
    out = _rows(y)

    def trip(step: Callable[[int], None]) -> float:
        seconds = 0.0
        for part in _chunks(x):
            begin = time.perf_counter()
            job(x[part], job.weight, job.bias, out[part])
            seconds += time.perf_counter() - begin
            step(x[part].size)
        return seconds

    trips = [trip(progress.step)]
    while sum(trips) < 0.3 and len(trips) < 100:
        trips.append(trip(lambda size: None))
    return Result(y, statistics.median(trips))


def _on_gpu(job: Job, progress: Progress) -> Result:
    weight, bias = _to_gpu(job.weight), _to_gpu(job.bias)
    x = _to_gpu(_rows(job.x))
    y = job(x, weight, bias)
    result = Result(_to_host(y).reshape(job.x.shape), float("nan"))
    progress.step(job.x.size // 2)

    nbytes = x.nbytes + y.nbytes
    count = _bench.placement_count(nbytes)
    xs, ys = _bench.ring(x.shape, x.dtype, count), _bench.ring(y.shape, y.dtype, count)
    for placed in xs:
        placed[...] = x
    times = _bench.race(
        {"ours": lambda i: job(xs[i], weight, bias, ys[i])}, nbytes=nbytes, placements=count
    )
    progress.step(job.x.size - job.x.size // 2)
    result.seconds, result.copy_seconds = times["ours"], times["copy"]
    return result


def _to_gpu(array: np.ndarray | None) -> Any:
    # As integers: CuPy moves those whatever the dtype that they stand for.
    import cupy

    if array is None:
        return None
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    return cupy.asarray(bits).view(array.dtype)


def _to_host(array: Any) -> np.ndarray:
    import cupy

    bits: np.ndarray = cupy.asnumpy(array.view(f"u{array.dtype.itemsize}"))
    return bits.view(array.dtype)


@np.errstate(all="ignore")  # NaN, infinity and 0 / 0 are results like others here
def _check(job: Job, y: np.ndarray, progress: Progress) -> Verdict:
    """Hold every element against the reference."""
    x, y = _rows(job.x), _rows(y)
    verdict = Verdict()
    for part in _chunks(x):
        reference, allowed = _reference(job, x[part])
        error = np.abs(y[part].astype(reference.dtype) - reference)
        # NaN agrees with NaN, and an overflow in y's dtype with a reference beyond that dtype.
        nan = np.isnan(y[part]) & np.isnan(reference)
        infinite = np.isinf(y[part]) & (y[part] == reference.astype(y.dtype))
        error = np.where(nan | infinite, 0, np.where(np.isnan(error), np.inf, error))
        share = np.where(error > 0, error / allowed, 0)
        share = np.where(np.isnan(share), np.inf, share)  # nothing else is like NaN or infinity
        verdict.error = max(verdict.error, float(error.max()))
        verdict.share = max(verdict.share, float(share.max()))
        verdict.nans += int(nan.sum())
        verdict.infinities += int(infinite.sum())
        progress.step(x[part].size)
    return verdict


def _reference(job: Job, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The normalised rows in two float64 passes, and how far a rounded result may be off."""
    single = x.dtype != np.float64
    wide = x.astype(np.float64 if single else np.longdouble)
    mean: Any = 0
    mean_size: Any = 0
    if job.op == "layer_norm":
        mean = wide.mean(axis=-1, keepdims=True)
        mean_size = np.abs(mean)
        if x.dtype.name in SIXTEEN_BITS:  # the mean may come from a plain float32 sum
            mean_size = mean_size + np.abs(wide).mean(axis=-1, keepdims=True) / 16
    centred = wide - mean
    rstd = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + job.eps)
    weight = 1 if job.weight is None else job.weight.astype(wide.dtype)
    bias = 0 if job.bias is None else job.bias.astype(wide.dtype)
    y = centred * rstd * weight + bias
    scale = (np.abs(centred) + mean_size) * rstd * np.abs(weight) + np.abs(bias)
    allowed = ERROR["float32" if single else "float64"] * scale
    if x.dtype.name in SIXTEEN_BITS:
        bits, smallest = SIXTEEN_BITS[x.dtype.name]
        _, exponent = np.frexp(np.abs(y) + allowed)
        allowed = allowed + np.ldexp(0.5, np.maximum(exponent - 1, smallest) - bits)
    if single:
        allowed = allowed + np.finfo(np.float32).tiny  # subnormal float32 is flushed to zero
    return y, allowed


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        cast: np.ndarray = values.astype(dtype)
    return cast


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _chunks(rows: np.ndarray) -> Iterator[slice]:
    step = max(1, CHUNK // rows.shape[1])
    return (slice(first, first + step) for first in range(0, len(rows), step))


def _jobs(args: argparse.Namespace, on_gpu: bool) -> Iterator[Job]:
    eps = OPS[args.op][1] if args.eps is None else args.eps
    weight = None if args.weight is None else _load(args.weight, args.dtype)
    bias = None if args.bias is None else _load(args.bias, args.dtype)
    job = partial(Job, op=args.op, bias=bias)
    if args.file is not None:
        x = _load(args.file, args.dtype)
        if x.ndim == 0:
            raise UsageError(f"{args.file} holds a single number, not rows to normalise")
        if x.size == 0:
            raise UsageError(f"{args.file} holds no elements, its shape is {x.shape}")
        if args.dtype is not None:
            x = _cast(x, numpy_dtype(args.dtype))
        yield job(title=args.file, x=x, weight=weight, eps=eps)
        return

    if weight is not None or bias is not None:
        raise UsageError("--weight and --bias need an input FILE")
    dtypes = [args.dtype] if args.dtype else ["bfloat16", "float16"] if on_gpu else ["bfloat16"]
    with np.load(SAMPLE) as sample:
        x = sample["x_bfloat16_bits"].view(numpy_dtype("bfloat16"))
        yield job(
            title="Real activations of SmolLM2-135M-Instruct, layer 22",
            x=_cast(x, numpy_dtype(dtypes[0])),
            weight=sample["weight"],
            eps=float(sample["eps"]) if args.eps is None else eps,
        )
    random = np.random.default_rng(0)
    x = random.standard_normal((4096, 4096), dtype=np.float32)
    x[:, ::509] *= 100  # a few channels of a language model are this much larger than the rest
    weight = (1 + 0.25 * random.standard_normal(4096)).astype(np.float32)
    for dtype in map(numpy_dtype, dtypes):
        yield job(
            title="Random input of a model's size",
            x=_cast(x, dtype),
            weight=_cast(weight, dtype),
            eps=eps,
        )


def _load(name: str, dtype: str | None) -> np.ndarray:
    """The array in FILE.npy or FILE.safetensors:NAME, with |V2 read as `dtype` says."""
    parts = re.fullmatch(r"(.*?\.safetensors)(?::(.*))?", name, re.DOTALL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's about headers that are old or odd
            array = _read_npy(name) if parts is None else _read_safetensors(*parts.groups(""))
    except UsageError:
        raise
    except Exception as error:  # a damaged file makes its reader raise any kind
        raise UsageError(f"cannot read {name}: {_reason(error)}") from error
    if array.dtype.str == "|V2":
        if dtype != "bfloat16":
            raise UsageError(
                f"{name} holds two-byte values without a dtype (|V2), as NumPy writes bfloat16; "
                "if that is what they are, say --dtype bfloat16"
            )
        return array.view(numpy_dtype("bfloat16"))
    if array.dtype.name not in ROW_DTYPES and (
        array.dtype.kind not in "biuf" or array.dtype.itemsize > 8
    ):
        raise UsageError(f"{name} holds {array.dtype}, which cannot be normalised")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _read_npy(path: str) -> np.ndarray:
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise UsageError(f"{path} is neither a .npy nor a .safetensors file")
        file.seek(0)
        array: np.ndarray = np.load(file, allow_pickle=False)
    return array


def _read_safetensors(path: str, tensor: str) -> np.ndarray:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise UsageError(
            "reading .safetensors files needs the package safetensors: pip install safetensors"
        ) from error
    numpy_dtype("bfloat16")  # registers the dtype that safetensors asks NumPy for by name
    with safe_open(path, framework="numpy") as file:
        names = list(file.keys())
        if not tensor and len(names) == 1:
            tensor = names[0]
        if tensor not in names:
            listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            asked = f"holds no tensor {tensor!r}" if tensor else "needs a name, FILE:NAME"
            raise UsageError(f"{path} {asked}; it holds {listed}")
        try:
            array: np.ndarray = file.get_tensor(tensor)
        except AttributeError as error:  # NumPy has no float8, for one
            raise UsageError(f"{path} holds {tensor} in a dtype that NumPy has not") from error
    return array


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    text = (getattr(error, "strerror", None) or str(error)).strip().split("\n")[0][:200]
    if isinstance(error, (OSError, ValueError, MemoryError)):
        return text
    return f"not a valid file ({type(error).__name__}: {text})"


def _save(path: str, array: np.ndarray) -> None:
    try:
        with open(path, "wb") as file:
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def print_rows(title: str, rows: Rows) -> None:
    """A titled table of two columns, by rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        width = max(len(label) for label, _ in rows)
        print(f"\n{title}")
        for label, value in rows:
            print(f"  {label.ljust(width)}  {value}")
        return
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))

    def broken_pipe() -> NoReturn:
        raise  # the BrokenPipeError, which `main` handles; rich would end in status 1

    console = Console()
    console.on_broken_pipe = broken_pipe
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
