# SPDX-License-Identifier: Apache-2.0
"""The command cupy-rmsnorm: what this machine offers, and the normalisation of a file."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, _bench, _info, _study, layer_norm, rms_norm
from ._dtypes import ROW_DTYPES, numpy_dtype

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
    """Run the command; the exit status is 0, 1 (a result is wrong) or 2 (wrong usage)."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except UsageError as error:
        print(f"cupy-rmsnorm: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cupy-rmsnorm", description="Fused RMSNorm and LayerNorm on the GPU or with NumPy."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    info = commands.add_parser(
        "info", help="versions, devices, and why the GPU is not used if it is not"
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
    demo.set_defaults(run=run_demo)
    _study.add_parser(commands).set_defaults(run=run_study)
    return parser


def run_info(args: argparse.Namespace) -> int:
    """Print what was found, one fact a line."""
    found = _info.info()
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
        rows.append((name, text or "not found"))
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
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error


@dataclass
class Result:
    """What a device made of a job, and how long it took."""

    y: np.ndarray
    seconds: float
    copy_seconds: float | None = None


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

    if on_gpu:
        device = _info.info()["devices"][0]
        print(f"On {device['name']}, compute capability {device['compute_capability']}")
    else:
        print("On the CPU, with NumPy" + (f" (no GPU: {reason})" if reason else ""))
    correct = True
    for job in _jobs(args):
        try:
            with Progress(job.title, steps=2 * job.x.size) as progress:
                result = (_on_gpu if on_gpu else _on_cpu)(job, progress)
                error, share = _check(job, result.y, progress)
            if args.out is not None:
                _save(args.out, result.y)
        except MemoryError as problem:
            raise UsageError(f"not enough memory for {job.title}: {problem}") from problem
        correct &= share <= 1
        print_rows(job.title, _report(job, result, error, share))
    return 0 if correct else 1


def _report(job: Job, result: Result, error: float, share: float) -> Rows:
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
    verdict = "correct" if share <= 1 else "WRONG"
    values = y.reshape(-1)[:3].astype(np.float64)
    return [
        ("input", f"{shape} {job.x.dtype}{parameters}"),
        ("call", f"{job.op}, eps {job.eps:g}"),
        ("time", _duration(result.seconds)),
        ("bandwidth", bandwidth),
        ("largest error", f"{error:.3g}, {share:.2f} of what rounding allows: {verdict}"),
        ("first values", " ".join(f"{value:.6g}" for value in values)),
    ]


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


def _check(job: Job, y: np.ndarray, progress: Progress) -> tuple[float, float]:
    """The largest |y - reference|, and the largest share of what rounding allows."""
    x, y = _rows(job.x), _rows(y)
    worst, share = 0.0, 0.0
    for part in _chunks(x):
        reference, allowed = _reference(job, x[part])
        with np.errstate(invalid="ignore"):
            error = np.abs(y[part].astype(reference.dtype) - reference)
        # NaN agrees with NaN, and an overflow in y's dtype with a reference beyond that dtype.
        same = np.isnan(y[part]) & np.isnan(reference)
        same |= np.isinf(y[part]) & (y[part] == _cast(reference, y.dtype))
        error = np.where(same, 0, np.where(np.isnan(error), np.inf, error))
        worst = max(worst, float(error.max()))
        share = max(share, float((error / allowed).max(initial=0, where=error > 0)))
        progress.step(x[part].size)
    return worst, share


def _reference(job: Job, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The normalised rows in two float64 passes, and how far a rounded result may be off."""
    single = x.dtype != np.float64
    wide = x.astype(np.float64 if single else np.longdouble)
    mean = wide.mean(axis=-1, keepdims=True) if job.op == "layer_norm" else 0
    centred = wide - mean
    rstd = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + job.eps)
    weight = 1 if job.weight is None else job.weight.astype(wide.dtype)
    bias = 0 if job.bias is None else job.bias.astype(wide.dtype)
    y = centred * rstd * weight + bias
    scale = (np.abs(centred) + np.abs(mean)) * rstd * np.abs(weight) + np.abs(bias)
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


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
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
    dtype = numpy_dtype(args.dtype or "bfloat16")
    with np.load(SAMPLE) as sample:
        x = sample["x_bfloat16_bits"].view(numpy_dtype("bfloat16"))
        yield job(
            title="Real activations of SmolLM2-135M-Instruct, layer 22",
            x=_cast(x, dtype),
            weight=sample["weight"],
            eps=float(sample["eps"]) if args.eps is None else eps,
        )
    random = np.random.default_rng(0)
    x = random.standard_normal((4096, 4096), dtype=np.float32)
    x[:, ::509] *= 100  # a few channels of a language model are this much larger than the rest
    weight = (1 + 0.25 * random.standard_normal(4096)).astype(np.float32)
    yield job(
        title="Random input of a model's size",
        x=_cast(x, dtype),
        weight=_cast(weight, dtype),
        eps=eps,
    )


def _load(name: str, dtype: str | None) -> np.ndarray:
    """The array in FILE.npy or FILE.safetensors:NAME, with |V2 read as `dtype` says."""
    try:
        if ".safetensors" in name:
            return _load_safetensors(name)
        with open(name, "rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise UsageError(f"{name} is neither a .npy nor a .safetensors file")
            file.seek(0)
            array: np.ndarray = np.load(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"cannot read {name}: {error}") from error
    if array.dtype.str == "|V2":
        if dtype != "bfloat16":
            raise UsageError(
                f"{name} holds two-byte values without a dtype (|V2), as NumPy writes bfloat16; "
                "if that is what they are, say --dtype bfloat16"
            )
        return array.view(numpy_dtype("bfloat16"))
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise UsageError(f"{name} holds {array.dtype}, which cannot be normalised")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _load_safetensors(name: str) -> np.ndarray:
    path, _, tensor = name.partition(".safetensors")
    path, tensor = f"{path}.safetensors", tensor.removeprefix(":")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError(
            "reading .safetensors files needs the package safetensors: pip install safetensors"
        ) from error
    numpy_dtype("bfloat16")  # registers the dtype that safetensors asks NumPy for by name
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            if not tensor and len(names) == 1:
                tensor = names[0]
            if tensor not in names:
                listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                asked = f"holds no tensor {tensor!r}" if tensor else "needs a name, FILE:NAME"
                raise UsageError(f"{path} {asked}; it holds {listed}")
            array: np.ndarray = file.get_tensor(tensor)
    except SafetensorError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return array


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


class Progress:
    """A bar on a terminal's error stream, drawn only from the second second on."""

    WIDTH = 40

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.done = title, max(1, steps), 0
        self.begin, self.drawn = time.monotonic(), False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def step(self, count: int) -> None:
        """`count` more of the steps are done."""
        self.done += count
        if time.monotonic() - self.begin > 1 and sys.stderr.isatty():
            self.drawn = True
            share = min(1.0, self.done / self.steps)
            bar = ("#" * int(share * self.WIDTH)).ljust(self.WIDTH, ".")
            print(f"\r[{bar}] {share:4.0%}", end="", file=sys.stderr, flush=True)


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
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
