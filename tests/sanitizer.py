# SPDX-License-Identifier: Apache-2.0
"""A few calls through every kernel, small enough to run under compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.sanitizer

and the same with racecheck, initcheck and synccheck. Every array is an allocation of its own that
ends with its last element, so that one element too far is out of bounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests import calls, inputs, kernels, oracle
from tests.backends import Cupy, missing
from tests.calls import Case, Gradient

Check = Callable[[], None]


def exact(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """A view of these values that begins `offset` elements in and ends with its buffer."""
    buffer = np.zeros(offset + values.size, values.dtype)
    view = buffer[offset:].reshape(values.shape)
    view[...] = values
    return view


def case(
    norm: str,
    dtype: str,
    *shape: int,
    residual: str | None = None,
    parameters: str | None = None,
    offset: int = 0,
    **options: Any,
) -> Case:
    """A call with weight, with LayerNorm a bias too; `offset` misaligns every array."""
    parameter_shape = shape[-2:] if options.get("per_head") else shape[-1:]
    parameters = parameters or dtype
    bias = inputs.bias(parameter_shape, parameters)
    return Case(
        x=exact(inputs.array(shape, dtype, "row_tagged"), offset),
        norm=norm,
        weight=exact(inputs.weight(parameter_shape, parameters), offset),
        bias=exact(bias, offset) if norm == "layer" else None,
        residual=residual and exact(inputs.array(shape, residual, seed=1), offset),
        **options,
    )


def forward(which: Case) -> Check:
    """One forward call with statistics, against the oracle."""

    def run() -> None:
        backend = Cupy()
        outputs = {}
        if which.masked == "keep":
            for name, dtype in which.outputs(statistics=True).items():
                untouched = np.full(which.shape(name), np.nan, oracle.DTYPES[dtype])
                outputs[name] = backend.output(untouched)
        got = calls.forward(backend, which, statistics=True, **outputs)
        calls.check_forward(which, got)
        backend.verify()

    return run


def backward(which: Case, added: str | None = None, statistics: bool = False) -> Check:
    """One backward call, with an incoming gradient of the sum in dtype `added`."""

    def run() -> None:
        backend = Cupy()
        shape = which.x.shape
        mean = rstd = None
        if statistics:
            saved = oracle.forward(which.x, norm=which.norm, eps=which.eps)
            mean, rstd = (part.value.astype(np.float32) for part in (saved.mean, saved.rstd))
        given = Gradient(
            dout=exact(inputs.array(shape, which.x.dtype.name, seed=2)),
            added=added is not None,
            dresidual_out=added and exact(inputs.array(shape, added, seed=3)),
            mean=mean,
            rstd=rstd,
        )
        calls.check_backward(which, given, calls.backward(backend, which, given))
        backend.verify()

    return run


def row(which: kernels.ForwardRow | kernels.PairRow) -> Check:
    """A row of the table: launches that otherwise need many rows, or two calls in one."""

    def run() -> None:
        backend = Cupy()
        which.run(backend)
        backend.verify()

    return run


def where(rows: int) -> np.ndarray:
    return np.arange(rows) % 3 != 1


def checks() -> Iterator[tuple[str, Check]]:
    """Every call, and its name."""
    for which in (
        # In registers: packs of every width, rows that share a block, idle lanes.
        case("rms", "float16", 300, 8),
        case("layer", "bfloat16", 133, 24, residual="float32"),
        case("rms", "float32", 37, 33),
        case("layer", "float16", 37, 769),
        case("rms", "bfloat16", 5, 2882, parameters="float32", cast="before_weight"),
        case("layer", "float32", 3, 4096, residual="bfloat16", weight_offset=1.0),
        case("rms", "float16", 5, 8192, residual="float16", out_dtype="float32"),
        case("rms", "float64", 5, 1000, residual="float64"),
        case("layer", "float16", 3, 16383),
        # Staged, in a block and over clusters.
        case("layer", "bfloat16", 3, 40_000, parameters="float32"),
        case("rms", "float16", 3, 40_001),
        case("rms", "float16", 3, 40_001, residual="float32"),
        case("layer", "float64", 2, 25_002),
        case("rms", "float32", 2, 65_536, residual="float32"),
        case("layer", "float16", 2, 131_072),
        # Streamed.
        case("rms", "float32", 2, 500_002, residual="float16"),
        case("layer", "float16", 2, 262_147),
        # Misaligned, masked, a weight for each head.
        case("rms", "float16", 5, 1024, offset=1, residual="float16"),
        case("layer", "float32", 3, 20_000, offset=1),
        case("rms", "float32", 3, 600_002, where=where(3)),
        case("layer", "float16", 300, 40, where=where(300), masked="keep"),
        case("rms", "bfloat16", 7, 3000, valid_rows=np.array(5, np.int32)),
        case("layer", "float16", 4, 40_000, where=where(4), residual="float16", masked="keep"),
        case("rms", "float16", 3, 520_000, where=where(3)),
        case("rms", "bfloat16", 11, 3, 96, per_head=True),
        # Groups, and statistics from a part of a row.
        case("layer", "float16", 9, 96, groups=4, where=where(9)),
        case("rms", "bfloat16", 7, 3000, partial=1001, valid_rows=np.array(5, np.int32)),
        case("rms", "float32", 2, 40_000, partial=30_001),
    ):
        yield f"forward {which.norm} {which.x.dtype} {which.x.shape}", forward(which)
    for which in kernels.FORWARD:
        clustered = which.tuned is not None and which.tuned.cluster_size > 1
        dealt = which.forced is not None and which.forced.teams > 0
        if dealt or ((which.forced is not None or clustered) and which.rows < 50):
            yield f"forward {which.name}", row(which)
    for pair in kernels.PAIRS[1:4]:
        yield f"forward {pair.name}", row(pair)
    for which, added in (
        (case("rms", "float16", 300, 8), None),
        (case("layer", "bfloat16", 133, 24), "float32"),
        (case("layer", "float16", 37, 769), None),
        (case("rms", "float32", 300, 4096), "bfloat16"),
        (case("layer", "bfloat16", 70, 7168, parameters="float32"), None),
        (case("rms", "float64", 9, 1000), None),
        (case("layer", "float16", 3, 20_001), "float16"),
        (case("rms", "bfloat16", 5, 65_536), None),
        (case("layer", "float32", 2, 300_002), None),
        (case("rms", "float16", 2, 520_000, cast="before_weight"), "float16"),
        (case("rms", "float16", 5, 1024, offset=1), None),
        (case("layer", "float32", 40, 520, where=where(40)), None),
        (case("rms", "bfloat16", 11, 3, 96, per_head=True), None),
        (case("rms", "float16", 9, 96, groups=4, where=where(9)), None),
        (case("rms", "bfloat16", 7, 3000, partial=1001), "float16"),
    ):
        name = f"backward {which.norm} {which.x.dtype} {which.x.shape}"
        yield name, backward(which, added)
    for which in (
        case("rms", "float16", 5, 4096),
        case("layer", "bfloat16", 37, 769),
        case("layer", "float32", 300, 520),
        case("rms", "float16", 3, 520_000),
    ):
        name = f"backward {which.norm} {which.x.dtype} {which.x.shape}, given statistics"
        yield name, backward(which, statistics=True)


def main(arguments: list[str] | None = None) -> int:
    """Run everything; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer", description=__doc__)
    parser.add_argument("--pool", action="store_true", help="keep CuPy's memory pool")
    parser.add_argument("--only", default="", help="run calls whose name holds this text")
    options = parser.parse_args(arguments)
    reason = missing("cupy")
    if reason is not None:
        print(f"cannot run: {reason}", file=sys.stderr)
        return 2
    if not options.pool:
        import cupy

        # A pool hands out parts of larger allocations, in which nothing is out of bounds.
        cupy.cuda.set_allocator(None)
    failures = 0
    for name, check in checks():
        if options.only not in name:
            continue
        start = time.perf_counter()
        try:
            check()
        except AssertionError as error:
            failures += 1
            print(f"WRONG  {name}: {error}")
        else:
            print(f"{time.perf_counter() - start:6.2f} s  {name}", flush=True)
    print(f"{failures} wrong" if failures else "all right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
