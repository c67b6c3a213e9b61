# SPDX-License-Identifier: Apache-2.0
"""The study's shapes by Triton kernels: the whole row at once, and the row in tiles.

    python -m benchmarks.study_triton --json benchmarks/results/study_triton.json

Both are written from the formula, beside this library and torch in one race. Needs a GPU, torch and
Triton. `row` holds the row in registers, as wide as the next power of two; `tiled` reads it once a
pass: two passes for RMSNorm, three for LayerNorm.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
import triton.language as tl

from benchmarks import baselines, race
from benchmarks.race import Candidate, Run
from benchmarks.shapes import Shape

TILE = 1024
ELEMENTS_A_WARP = 256  # 8 a thread: 16 bytes of float16
SIZES = ((4096, 512), (4096, 1024), (4096, 2048), (4096, 4096), (4096, 8192), (8192, 8192))
SHAPES = tuple(
    Shape(op, dtype, rows, hidden_size)
    for op in ("rms_norm", "layer_norm")
    for dtype in ("float16", "float32")
    for rows, hidden_size in SIZES
)


@triton.jit
def row(y, x, weight, bias, hidden_size, eps, LAYER: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row, which it reads once."""
    start = tl.program_id(0).to(tl.int64) * hidden_size
    columns = tl.arange(0, WIDTH)
    inside = columns < hidden_size
    values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        mean = tl.sum(values, axis=0) / hidden_size
        values = tl.where(inside, values - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden_size + eps)
    result = values * rstd * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + columns, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def tiled(y, x, weight, bias, hidden_size, eps, LAYER: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row, which it reads in tiles, once a pass."""
    start = tl.program_id(0).to(tl.int64) * hidden_size
    mean = 0.0
    if LAYER:
        sums = tl.zeros((WIDTH,), tl.float32)
        for tile in range(0, hidden_size, WIDTH):
            columns = tile + tl.arange(0, WIDTH)
            inside = columns < hidden_size
            sums += tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(sums, axis=0) / hidden_size
    squares = tl.zeros((WIDTH,), tl.float32)
    for tile in range(0, hidden_size, WIDTH):
        columns = tile + tl.arange(0, WIDTH)
        inside = columns < hidden_size
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - mean, 0.0)
        squares += values * values
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / hidden_size + eps)
    for tile in range(0, hidden_size, WIDTH):
        columns = tile + tl.arange(0, WIDTH)
        inside = columns < hidden_size
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        result = (values - mean) * rstd * scale
        if LAYER:
            result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + start + columns, result.to(y.dtype.element_ty), mask=inside)


def triton_forward(data: baselines.ForwardData, kernel: Any) -> Any:
    """A kernel of this file on the race's arrays."""
    data.poison()
    rows, hidden_size = data.shape.rows, data.shape.hidden_size
    width = triton.next_power_of_2(hidden_size) if kernel is row else TILE
    warps = min(max(width // ELEMENTS_A_WARP, 1), 16)
    bias = data.weight if data.bias is None else data.bias  # an argument that RMSNorm never reads

    def call(i: int) -> tuple[torch.Tensor, ...]:
        kernel[(rows,)](
            data.y[i],
            data.x[i],
            data.weight,
            bias,
            hidden_size,
            baselines.EPS,
            LAYER=data.shape.layer,
            WIDTH=width,
            num_warps=warps,
        )
        return (data.y[i],)

    return call


def candidates(shape: Shape, count: int) -> dict[str, Candidate]:
    """What races on one shape."""
    data = baselines.ForwardData(shape, count)
    found = baselines.forward(data, ())
    found.pop("compile", None)
    for name, kernel in (("triton row", row), ("triton tiled", tiled)):

        def make(kernel: Any = kernel) -> Any:
            return triton_forward(data, kernel)

        found[name] = Candidate(make, data.check, name, shape.dtype)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, and write."""
    begin = time.perf_counter()
    options = race.parser("The study's shapes by Triton kernels.", 60).parse_args(arguments)
    race.need_gpu()
    torch.set_grad_enabled(False)
    run = Run(options, begin, race.meta(options.rounds, options.commit))
    run.all(SHAPES, candidates)
    print(f"{run.seconds():.0f} s")


if __name__ == "__main__":
    main()
