# SPDX-License-Identifier: Apache-2.0
"""Times every backward plan that makes sense for a shape, and checks what each computes.

``python -m benchmarks.sweep_backward --json FILE`` writes one row a candidate; the tables in
``cupy_rmsnorm/_plan_backward.py`` are read off the fastest ones. The yardstick is 1.5 times the
copy of two tensors of the same run (2 times with a separate gradient of the residual).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sweep import Shape, run_sweeps
from cupy_rmsnorm import _bench, _cuda_backward, _kernel, _plan, _plan_backward
from cupy_rmsnorm._candidates import backward_candidates
from cupy_rmsnorm._cuda_backward import BackwardKind
from cupy_rmsnorm._dtypes import TABLE, numpy_dtype
from cupy_rmsnorm._plan import Plan
from cupy_rmsnorm._plan_backward import BackwardLaunch

SHAPES: list[Shape] = [
    ("rms_norm", "bfloat16", 16384, 4096),
    ("rms_norm", "bfloat16", 8192, 8192),
    ("rms_norm", "bfloat16", 16384, 7168),
    ("rms_norm", "float32", 8192, 4096),
    ("rms_norm", "bfloat16", 131072, 128),
    ("rms_norm", "bfloat16", 4096, 32768),
    ("rms_norm", "bfloat16", 4096, 512),
    ("rms_norm", "bfloat16", 128, 8192),
    ("layer_norm", "bfloat16", 16384, 4096),
    ("layer_norm", "bfloat16", 8192, 8192),
    ("layer_norm", "bfloat16", 16384, 7168),
    ("layer_norm", "float32", 8192, 4096),
    ("layer_norm", "bfloat16", 131072, 128),
    ("layer_norm", "bfloat16", 4096, 32768),
    ("layer_norm", "bfloat16", 4096, 512),
    ("add_rms_norm", "bfloat16", 16384, 4096),
    ("add_rms_norm", "bfloat16", 16384, 2048),
    ("add_rms_norm", "float32", 16384, 2048),
    ("add_rms_norm", "bfloat16", 131072, 128),
    ("add_rms_norm", "bfloat16", 4096, 32768),
    ("add_layer_norm", "bfloat16", 8192, 8192),
    ("add_layer_norm", "bfloat16", 16384, 4096),
    ("add_layer_norm", "float32", 16384, 2048),
]
EPS = 1e-6


def kind_of(op: str, dtype: str) -> BackwardKind:
    layer = "layer" in op
    return BackwardKind(
        norm="layer" if layer else "rms",
        dx=dtype,
        dweight=dtype,
        dbias=dtype if layer else None,
        dout=dtype,
        x=dtype,
        dresidual_out=dtype if op.startswith("add") else None,
        weight=dtype,
        given_mean=layer,
        given_rstd=True,
    )


def candidate_plans(kind: BackwardKind, hidden_size: int, arch: int) -> tuple[Plan, ...]:
    """The plans for rows that a block or a cluster holds, the library's own first."""
    found = backward_candidates(kind.norm, hidden_size, kind.x, kind.staged_itemsize, arch)
    return tuple(plan for plan in found if plan.kernel == "norm_backward")


def candidate_launches(
    plan: Plan, kind: BackwardKind, rows: int, sm_count: int
) -> list[BackwardLaunch]:
    """One row a block and two, shallow and deep rings, both ways to fill them.

    One block an SM, two where rows lie within a warp: two of longer rows were slower everywhere.
    """
    launches = []
    threads, limit = plan.threads_per_row, _plan_backward.ring_limit(90)
    short = threads <= _plan.WARP
    for block in (128, 256) if short else (threads, 2 * threads):
        rows_per_block = block // threads
        if block > 1024 or (rows_per_block > 1 and plan.cluster_size > 1):
            continue
        stage_bytes = block * plan.vecs_per_thread * plan.vec_size * kind.staged_itemsize
        blocks_per_sm = _plan_backward.MAX_BLOCKS_PER_SM if short else 1
        units = blocks_per_sm * sm_count // plan.cluster_size
        if plan.cluster_size > 2:
            units = units * _plan_backward.CLUSTER_EIGHTHS // 8
        parts = min(-(-rows // rows_per_block), units)
        for stages, bulk in itertools.product((2, 3), (True, False)):
            if stages * stage_bytes * blocks_per_sm > limit:
                continue
            launches.append(
                BackwardLaunch(
                    "norm_backward",
                    grid=parts * plan.cluster_size,
                    block=block,
                    shared_bytes=_plan_backward._asked(stages * stage_bytes),
                    rows_per_block=rows_per_block,
                    stages=stages,
                    parts=parts,
                    bulk=bulk,
                )
            )
    return launches


class Buffers:
    """A ring of placements of one shape's arrays, and one workspace."""

    def __init__(self, kind: BackwardKind, rows: int, hidden_size: int, parts: int) -> None:
        import cupy

        dtype = numpy_dtype(kind.x)
        size = rows * hidden_size
        names = ["dx", "dout", "x"] + (["dresidual_out"] if kind.dresidual_out else [])
        self.nbytes = size * TABLE[kind.x].itemsize * len(names)
        self.tensors = len(names)
        self.count = _bench.placement_count(self.nbytes)
        self.rows, self.hidden_size, self.kind = rows, hidden_size, kind
        self.rings = {n: _bench.ring((rows, hidden_size), dtype, self.count) for n in names}
        for name in names[1:]:
            values = cupy.random.standard_normal((min(rows, 1000), hidden_size), dtype="float32")
            for array in self.rings[name]:
                for first in range(0, rows, len(values)):
                    part = array[first : first + len(values)]
                    part[...] = values[: len(part)].astype(dtype)
        self.weight = (1 + 0.5 * cupy.random.standard_normal(hidden_size)).astype(dtype)
        self.dweight = cupy.empty(hidden_size, dtype)
        self.dbias = cupy.empty(hidden_size, dtype)
        self.parts = cupy.empty((2, parts, hidden_size), "float32")
        x = self.rings["x"][0].astype("float32")
        self.mean = x.mean(-1)
        if kind.norm == "layer":
            x = x - self.mean[:, None]
        self.rstd = 1 / cupy.sqrt((x * x).mean(-1) + cupy.float32(EPS))
        del x
        self._expect()

    def _expect(self) -> None:
        import cupy

        at = [0, 1, self.rows // 2, self.rows - 1]
        self.at = at

        def wide(name: str, select: Any) -> Any:
            array = self.rings[name][0]
            if isinstance(select, slice):
                return array[select].astype("float64")
            return cupy.concatenate([array[r : r + 1].astype("float64") for r in select])

        def gradients(select: Any) -> tuple[Any, Any, Any]:
            x, dout = wide("x", select), wide("dout", select)
            if self.kind.norm == "layer":
                x = x - self.mean[select][:, None].astype("float64")
            rstd = self.rstd[select][:, None].astype("float64")
            xhat = x * rstd
            g = dout * self.weight.astype("float64")
            dx = g - xhat * (g * xhat).mean(-1, keepdims=True)
            if self.kind.norm == "layer":
                dx = dx - g.mean(-1, keepdims=True)
            dx = dx * rstd
            if self.kind.dresidual_out:
                dx = dx + wide("dresidual_out", select)
            return dx, dout * xhat, dout

        self.dx = gradients(at)[0]
        self.sums = cupy.zeros((2, self.hidden_size))
        step = max(1, 2**24 // self.hidden_size)
        for first in range(0, self.rows, step):
            _, dweight, dbias = gradients(slice(first, first + step))
            self.sums[0] += dweight.sum(0)
            self.sums[1] += dbias.sum(0)

    def arguments(self, launch: BackwardLaunch, i: int) -> dict[str, Any]:
        arguments: dict[str, Any] = dict.fromkeys(
            (name for name, _ in _kernel.BACKWARD_PARAMETERS), 0
        )
        arguments |= {
            "rows": self.rows,
            "hidden_size": self.hidden_size,
            "inner_rows": self.rows,
            "heads": 1,
            "parts": launch.parts,
            "elements": self.hidden_size,
            "eps": EPS,
            "weight": self.weight.data.ptr,
            "mean": self.mean.data.ptr,
            "rstd": self.rstd.data.ptr,
            "dweight": self.dweight.data.ptr,
            "dbias": self.dbias.data.ptr,
            "dweight_parts": self.parts[0].data.ptr,
            "dbias_parts": self.parts[1].data.ptr,
        }
        for name, ring in self.rings.items():
            arguments[name] = ring[i].data.ptr
            arguments[f"{name}_strides.inner"] = self.hidden_size
        return arguments

    def wrong(self) -> dict[str, float]:
        """Largest errors over the scale of each result."""
        import cupy

        dx = self.rings["dx"][0]
        dx = cupy.concatenate([dx[r : r + 1].astype("float64") for r in self.at])
        errors = {"dx": float(abs(dx - self.dx).max() / abs(self.dx).max())}
        for i, name in enumerate(("dweight", "dbias")):
            if getattr(self.kind, name):
                got = getattr(self, name).astype("float64")
                errors[name] = float(abs(got - self.sums[i]).max() / abs(self.sums[i]).max())
        return errors


def sweep(op: str, dtype: str, rows: int, hidden_size: int, rounds: int) -> list[dict[str, Any]]:
    import cupy

    kind = kind_of(op, dtype)
    properties = _kernel.device_properties(0)
    pairs = [
        (plan, launch)
        for plan in candidate_plans(kind, hidden_size, properties.arch)
        if rows > 1024  # else norm_backward_few, below
        for launch in candidate_launches(plan, kind, rows, properties.sm_count)
    ]
    chosen = _plan_backward.choose_backward_plan(
        hidden_size, kind.x, kind.staged_itemsize, properties.arch
    )
    chosen_launch = _plan_backward.choose_backward_launch(
        chosen, rows, 1, kind.staged_itemsize, properties.arch, properties.sm_count
    )
    for plan in dict.fromkeys([chosen, *candidate_plans(kind, hidden_size, properties.arch)]):
        few = _plan_backward.choose_few_launch(
            plan, hidden_size, rows, kind.staged_itemsize, properties.arch, properties.sm_count
        )
        if few is not None:
            pairs.append((plan, few))
            if plan == chosen:
                chosen_launch = few
    if (chosen, chosen_launch) not in pairs:
        pairs.append((chosen, chosen_launch))

    def build(pair: tuple[Plan, BackwardLaunch]) -> Any:
        plan, launch = pair
        specialisation = _cuda_backward.specialise_backward(
            kind, hidden_size, plan, launch, arch=properties.arch, aligned=True, split_rows=False
        )
        return _kernel.function(specialisation, 0, launch.shared_bytes)

    with ThreadPoolExecutor(16) as pool:
        functions = list(pool.map(build, pairs))

    def sum_of(launch: BackwardLaunch) -> tuple[BackwardLaunch, Any]:
        found = _plan_backward.choose_sum_launch(hidden_size, launch.parts, kind.sums)
        return found, _kernel.function(_cuda_backward.specialise_sum(kind, found), 0, 0)

    buffers = Buffers(kind, rows, hidden_size, max(launch.parts for _, launch in pairs))
    candidates, found = {}, {}
    for (plan, launch), function in zip(pairs, functions, strict=True):
        packed = [
            _kernel.pack("norm_backward", kind.accumulation, buffers.arguments(launch, i))
            for i in range(buffers.count)
        ]
        packed_sum = _kernel.pack(
            "norm_backward_sum", kind.accumulation, buffers.arguments(launch, 0)
        )
        summing = sum_of(launch)

        def call(
            i: int,
            function: Any = function,
            launch: BackwardLaunch = launch,
            packed: Any = packed,
            packed_sum: Any = packed_sum,
            summing: Any = summing,
        ) -> None:
            stream = cupy.cuda.get_current_stream().ptr
            _kernel.launch(
                function, launch.grid, launch.block, launch.shared_bytes, stream, packed[i]
            )
            if launch.kernel == "norm_backward":
                last, sum_function = summing
                _kernel.launch(sum_function, last.grid, last.block, 0, stream, packed_sum)

        for array in (buffers.rings["dx"][0], buffers.dweight, buffers.dbias):
            array.view("uint8").fill(255)
        buffers.parts.fill(float("nan"))
        call(0)
        cupy.cuda.Device().synchronize()
        errors = buffers.wrong()
        if not all(error < 1e-2 for error in errors.values()):
            print("WRONG", op, plan, launch, errors, flush=True)
            continue
        name = f"{plan} {launch}"
        candidates[name], found[name] = call, (plan, launch)
    times = _bench.race(
        candidates,
        nbytes=buffers.nbytes // buffers.tensors * 2,
        placements=buffers.count,
        rounds=rounds,
    )
    floor = times.pop("copy") * buffers.tensors / 2
    shape = {"op": f"{op}_backward", "dtype": dtype, "rows": rows, "hidden_size": hidden_size}
    result = [{**shape, "impl": "copy", "us": floor * 1e6, "ratio": 1.0}]
    for name, seconds in sorted(times.items(), key=lambda item: item[1]):
        plan, launch = found[name]
        result.append(
            {
                **shape,
                "impl": "ours",
                "us": round(seconds * 1e6, 3),
                "ratio": round(floor / seconds, 4),
                "chosen": (plan, launch) == (chosen, chosen_launch),
                **dataclasses.asdict(plan),
                **dataclasses.asdict(launch),  # its kernel is the one that ran
            }
        )
    return result


def show(row: dict[str, Any]) -> str:
    """A candidate in a line."""
    return (
        f"{row['kernel']} {row['threads_per_row']}x{row['vecs_per_thread']} "
        f"cluster {row['cluster_size']} rows {row['rows_per_block']} stages {row['stages']} "
        f"parts {row['parts']} {'bulk' if row['bulk'] else 'copies'}"
        f"{' CHOSEN' if row['chosen'] else ''}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    run_sweeps(__doc__.splitlines()[0], SHAPES, sweep, show, arguments)


if __name__ == "__main__":
    main()
