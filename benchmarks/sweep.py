# SPDX-License-Identifier: Apache-2.0
"""Times every forward plan that makes sense for a shape, beside the device copy of its bytes.

``python -m benchmarks.sweep --json benchmarks/results/sweep.json`` writes one row a candidate plan;
the tables in ``cupy_rmsnorm/_plan.py`` are read off the fastest ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import race
from cupy_rmsnorm import _bench, _cuda, _kernel, _plan
from cupy_rmsnorm._call import Norm
from cupy_rmsnorm._candidates import forward_candidates
from cupy_rmsnorm._cuda import ForwardKind
from cupy_rmsnorm._dtypes import TABLE, numpy_dtype
from cupy_rmsnorm._plan import Plan

SM_COUNT = 132  # of an H200
SHOWN = 4  # candidates of a shape

Shape = tuple[str, str, int, int]  # operation, dtype, rows, hidden_size
SHAPES: list[Shape] = [
    ("rms_norm", "bfloat16", 131072, 16),
    ("rms_norm", "bfloat16", 131072, 64),
    ("rms_norm", "bfloat16", 131072, 128),
    ("rms_norm", "bfloat16", 65536, 256),
    ("rms_norm", "float16", 4096, 512),
    ("rms_norm", "float16", 4096, 1024),
    ("rms_norm", "bfloat16", 16384, 1536),
    ("rms_norm", "float16", 4096, 2048),
    ("rms_norm", "bfloat16", 16384, 2880),
    ("rms_norm", "float16", 4096, 4096),
    ("rms_norm", "bfloat16", 16384, 4096),
    ("rms_norm", "bfloat16", 16384, 5120),
    ("rms_norm", "bfloat16", 16384, 7168),
    ("rms_norm", "float16", 4096, 8192),
    ("rms_norm", "bfloat16", 8192, 8192),
    ("rms_norm", "bfloat16", 8192, 16384),
    ("rms_norm", "bfloat16", 8192, 32768),
    ("rms_norm", "bfloat16", 8192, 65536),
    ("rms_norm", "bfloat16", 4096, 131072),
    ("rms_norm", "float32", 4096, 4096),
    ("rms_norm", "float32", 8192, 16384),
    ("rms_norm", "bfloat16", 1, 4096),
    ("rms_norm", "bfloat16", 16, 4096),
    ("rms_norm", "bfloat16", 128, 8192),
    ("rms_norm", "bfloat16", 8192, 4097),
    ("rms_norm", "bfloat16", 8192, 7169),
    ("rms_norm", "bfloat16", 8192, 5000),
    ("layer_norm", "bfloat16", 131072, 128),
    ("layer_norm", "bfloat16", 4096, 512),
    ("layer_norm", "bfloat16", 16384, 1536),
    ("layer_norm", "bfloat16", 16384, 2048),
    ("layer_norm", "bfloat16", 16384, 2560),
    ("layer_norm", "bfloat16", 16384, 4096),
    ("layer_norm", "bfloat16", 16384, 7168),
    ("layer_norm", "bfloat16", 8192, 8192),
    ("layer_norm", "bfloat16", 4096, 32768),
    ("layer_norm", "float32", 8192, 4096),
    ("add_layer_norm", "bfloat16", 16384, 4096),
    ("add_layer_norm", "bfloat16", 4096, 16384),
    ("add_layer_norm", "bfloat16", 4096, 24576),
    ("add_layer_norm", "bfloat16", 4096, 32768),
    ("add_layer_norm", "float32", 4096, 16384),
    ("add_rms_norm", "bfloat16", 131072, 128),
    ("add_rms_norm", "bfloat16", 16384, 4096),
    ("add_rms_norm", "bfloat16", 8192, 8192),
    ("add_rms_norm", "bfloat16", 4096, 32768),
]


def kind_of(op: str, dtype: str) -> ForwardKind:
    norm: Norm = "layer" if "layer" in op else "rms"
    return ForwardKind(
        norm=norm,
        y=dtype,
        x=dtype,
        residual=dtype if op.startswith("add") else None,
        weight=dtype,
        bias=dtype if norm == "layer" else None,
    )


def loads_early(kind: ForwardKind, plan: Plan, launch: _plan.Launch) -> bool:
    """Whether the weight came before the sum, which a plan only permits."""
    if plan.kernel != "norm_forward":
        return plan.early_weight
    return _plan.loads_weight_early(plan, launch, kind.staged_itemsize, kind.parameter_itemsize)


def candidate_launches(plan: Plan, kind: ForwardKind, rows: int) -> list[_plan.Launch]:
    """The library's own launch of longer rows; short rows share blocks of several sizes."""
    if plan.kernel != "norm_forward":
        return [_plan.choose_launch(plan, rows, kind.staged_itemsize, SM_COUNT)]
    evict_first = rows <= _plan.rows_evicted_first(plan, kind.staged_itemsize)
    launches: list[_plan.Launch] = []
    for block in (32, 128, 512):
        rows_per_block = max(1, block // plan.threads_per_row)
        threads = plan.threads_per_row * rows_per_block
        if threads % 32 == 0 and (not launches or launches[-1].block != threads):
            grid = -(-rows // rows_per_block)
            launch = _plan.Launch(grid, threads, 0, rows_per_block, evict_first=evict_first)
            launches.append(_plan.beside_others(launch, SM_COUNT))
    return launches


class Buffers:
    """A ring of placements of one shape's arrays."""

    def __init__(self, kind: ForwardKind, rows: int, hidden_size: int) -> None:
        import cupy

        dtype = numpy_dtype(kind.x)
        size = rows * hidden_size
        self.tensors = 4 if kind.residual else 2
        self.nbytes = size * TABLE[kind.x].itemsize * self.tensors
        self.count = _bench.placement_count(self.nbytes)
        self.rows, self.hidden_size, self.kind = rows, hidden_size, kind
        names = ["x", "y"] + (["residual", "residual_out"] if kind.residual else [])
        self.rings = {n: _bench.ring((rows, hidden_size), dtype, self.count) for n in names}
        values = cupy.random.standard_normal((min(rows, 256), hidden_size), dtype="float32")
        for name in {"x", "residual"} & set(names):
            for array in self.rings[name]:
                for first in range(0, rows, 256):
                    part = array[first : first + 256]
                    part[...] = values[: len(part)].astype(dtype)
        self.weight = (1 + 0.5 * cupy.random.standard_normal(hidden_size)).astype(dtype)
        self.bias = (0.5 * cupy.random.standard_normal(hidden_size)).astype(dtype)
        self.sample = values[: min(4, rows)]

    def packed(self, plan: Plan, launch: _plan.Launch) -> list[bytes]:
        arguments: dict[str, Any] = dict.fromkeys(
            (name for name, _ in _kernel.FORWARD_PARAMETERS), 0
        )
        arguments |= {"rows": self.rows, "hidden_size": self.hidden_size, "eps": 1e-6}
        arguments |= {"weight": self.weight.data.ptr, "partial": self.hidden_size}
        arguments |= {"bias": self.bias.data.ptr if self.kind.bias else 0}
        arguments |= {"next_early": launch.next_early}
        arguments |= _kernel.row_count("inner_rows", self.rows) | _kernel.row_count("mask_rows", 1)
        result = []
        for i in range(self.count):
            for name, ring in self.rings.items():
                arguments[name] = ring[i].data.ptr
                arguments[f"{name}_strides.inner"] = self.hidden_size
            accumulation = TABLE[self.kind.x].accumulation or ""
            result.append(_kernel.pack(plan.kernel, accumulation, arguments))
        return result

    def wrong(self) -> float:
        """Largest error of the first rows over the scale of the output."""
        import cupy

        x = self.rings["x"][0][: len(self.sample)].astype("float64")
        if self.kind.residual:
            x = x + self.rings["residual"][0][: len(self.sample)].astype("float64")
        if self.kind.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x / cupy.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        y *= self.weight.astype("float64")
        if self.kind.bias:
            y += self.bias.astype("float64")
        got = self.rings["y"][0][: len(self.sample)].astype("float64")
        return float(abs(got - y).max() / abs(y).max())


def sweep(op: str, dtype: str, rows: int, hidden_size: int, rounds: int) -> list[dict[str, Any]]:
    import cupy

    kind = kind_of(op, dtype)
    properties = _kernel.device_properties(0)
    pairs = [
        (plan, launch)
        for plan in forward_candidates(
            kind.norm, hidden_size, kind.x, kind.residual, properties.arch
        )
        for launch in candidate_launches(plan, kind, rows)
    ]

    def build(pair: tuple[Plan, _plan.Launch]) -> Any:
        plan, launch = pair
        specialisation = _cuda.specialise_forward(
            kind, hidden_size, plan, launch, arch=properties.arch, aligned=True, split_rows=False
        )
        return _kernel.function(specialisation, 0, launch.shared_bytes)

    with ThreadPoolExecutor(16) as pool:
        functions = list(pool.map(build, pairs))
    buffers = Buffers(kind, rows, hidden_size)
    candidates, found = {}, {}
    packed = {
        (plan.kernel, launch.next_early): buffers.packed(plan, launch) for plan, launch in pairs
    }
    for (plan, launch), function in zip(pairs, functions, strict=True):
        arguments = packed[plan.kernel, launch.next_early]

        def call(
            i: int, function: Any = function, launch: Any = launch, arguments: Any = arguments
        ) -> None:
            _kernel.launch(
                function,
                launch.grid,
                launch.block,
                launch.shared_bytes,
                cupy.cuda.get_current_stream().ptr,
                arguments[i],
            )

        buffers.rings["y"][0].fill(0)
        call(0)
        cupy.cuda.Device().synchronize()
        error = buffers.wrong()
        assert error < 1e-2, (op, plan, launch, error)
        name = f"{plan} {launch}"
        candidates[name], found[name] = call, (plan, launch)
    times = _bench.race(candidates, nbytes=buffers.nbytes, placements=buffers.count, rounds=rounds)
    copy = times.pop("copy")
    shape = {"op": op, "dtype": dtype, "rows": rows, "hidden_size": hidden_size}
    result = [{**shape, "impl": "copy", "us": copy * 1e6, "ratio": 1.0}]
    for name, seconds in sorted(times.items(), key=lambda item: item[1]):
        plan, launch = found[name]
        result.append(
            {
                **shape,
                "impl": "ours",
                "us": round(seconds * 1e6, 3),
                "ratio": round(copy / seconds, 4),
                **dataclasses.asdict(plan),
                "early_weight": loads_early(kind, plan, launch),
                "rows_per_block": launch.rows_per_block,
            }
        )
    return result


def run_sweeps(
    description: str,
    shapes: Iterable[Shape],
    sweep: Callable[[str, str, int, int, int], list[dict[str, Any]]],
    show: Callable[[dict[str, Any]], str],
    arguments: Sequence[str] | None,
) -> None:
    """Sweep the shapes that the command line asks for; print the best of each, write them all."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="where this is no git checkout")
    parser.add_argument("--only", default="", help="substring of 'op dtype rowsxhidden_size'")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no shape after so long"
    )
    parser.add_argument(
        "--resume", type=Path, help="keep the other shapes of this result file, with its commit"
    )
    options = parser.parse_args(arguments)
    race.need_gpu()
    meta = race.meta(options.rounds, options.commit) if options.json else {}
    kept = earlier_rows(options.resume) if options.resume else {}
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for shape in shapes:
        label = f"{shape[0]} {shape[1]} {shape[2]}x{shape[3]}"
        if options.only not in label or time.perf_counter() - start > options.seconds:
            continue
        begin = time.perf_counter()
        try:
            found = sweep(*shape, options.rounds)
        except Exception:
            traceback.print_exc()
            continue
        rows += found
        kept.pop(tuple(shape), None)
        copy, *candidates = found
        print(
            f"{label}: copy {copy['us']:.2f} us, {len(candidates)} candidates, "
            f"{time.perf_counter() - begin:.1f} s"
        )
        for number, row in enumerate(candidates):
            if number < SHOWN or row.get("chosen"):
                print(f"   {row['us']:8.2f} us {row['ratio']:.3f} {show(row)}", flush=True)
        if options.json:
            others = list(itertools.chain.from_iterable(kept.values()))
            options.json.write_text(race.dumps({"meta": meta, "rows": others + rows}))


def earlier_rows(file: Path) -> dict[Shape, list[dict[str, Any]]]:
    """The rows of a result file, by shape."""
    shapes: dict[Shape, list[dict[str, Any]]] = {}
    for row in race.taken_over(json.loads(file.read_text())):
        shape = (row["op"], row["dtype"], row["rows"], row["hidden_size"])
        shapes.setdefault(shape, []).append(row)
    return shapes


def show(row: dict[str, Any]) -> str:
    """A candidate in a line."""
    return (
        f"{row['kernel']} {row['threads_per_row']}x{row['vecs_per_thread']} "
        f"cluster {row['cluster_size']} rows {row['rows_per_block']} early {row['early_weight']}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    run_sweeps(__doc__.splitlines()[0], SHAPES, sweep, show, arguments)


if __name__ == "__main__":
    main()
