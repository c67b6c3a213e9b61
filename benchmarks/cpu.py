# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend against the plain NumPy expression and torch on the CPU.

    python -m benchmarks.cpu [--rounds 15] [--output benchmarks/results/cpu.json]

All take turns within one run, on one thread and on two; a figure is the fastest round, because what
else the machine does only ever adds to a time. "ours" writes into given outputs, as does the last
step of "numpy"; "ours allocating" and torch make new ones. peak_bytes is what a call holds at most
beside its arguments (torch's memory is not seen from Python).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupy_rmsnorm as cr
from benchmarks import race
from cupy_rmsnorm._bench import cpu_time

ROWS = HIDDEN_SIZE = 4096
EPS = 1e-6
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
Calls = dict[str, Callable[[], object]]


def plain_rms_norm(x: Any, weight: Any, out: Any) -> None:
    wide = x.astype(np.float32, copy=False)
    rstd = 1 / np.sqrt(np.mean(np.square(wide), axis=-1, keepdims=True) + np.float32(EPS))
    np.multiply(wide * rstd, weight.astype(np.float32), out=out, casting="unsafe")


def plain_layer_norm(x: Any, weight: Any, bias: Any, out: Any) -> None:
    wide = x.astype(np.float32, copy=False)
    centred = wide - np.mean(wide, axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + np.float32(EPS))
    np.add(
        centred * rstd * weight.astype(np.float32),
        bias.astype(np.float32),
        out=out,
        casting="unsafe",
    )


def plain_rms_norm_backward(
    dout: Any, x: Any, weight: Any, rstd: Any, dx: Any, dweight: Any
) -> None:
    wide, arriving = (array.astype(np.float32, copy=False) for array in (dout, x))
    xhat = arriving * rstd[:, None]
    scaled = wide * weight.astype(np.float32)
    inner = scaled - xhat * np.mean(scaled * xhat, axis=-1, keepdims=True)
    np.multiply(inner, rstd[:, None], out=dx, casting="unsafe")
    dweight[...] = np.sum(wide * xhat, axis=0)


def plain_layer_norm_backward(
    dout: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, dweight: Any, dbias: Any
) -> None:
    wide, arriving = (array.astype(np.float32, copy=False) for array in (dout, x))
    xhat = (arriving - mean[:, None]) * rstd[:, None]
    scaled = wide * weight.astype(np.float32)
    inner = scaled - np.mean(scaled, axis=-1, keepdims=True)
    inner -= xhat * np.mean(scaled * xhat, axis=-1, keepdims=True)
    np.multiply(inner, rstd[:, None], out=dx, casting="unsafe")
    dweight[...] = np.sum(wide * xhat, axis=0)
    dbias[...] = np.sum(wide, axis=0)


def candidates(dtype: str) -> dict[str, Calls]:
    """The calls of each operation."""
    import torch

    numpy_dtype, torch_dtype = DTYPES[dtype], getattr(torch, dtype)
    random = np.random.default_rng(0)

    def values(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32).astype(numpy_dtype)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(torch_dtype)

    x, dout = values(ROWS, HIDDEN_SIZE), values(ROWS, HIDDEN_SIZE)
    weight, bias = values(HIDDEN_SIZE), values(HIDDEN_SIZE)
    out, dx = np.empty_like(x), np.empty_like(x)
    dweight, dbias = np.empty_like(weight), np.empty_like(bias)
    _, rms_rstd = cr.rms_norm_forward(x, weight, eps=EPS)
    _, mean, rstd = cr.layer_norm_forward(x, weight, bias, eps=EPS)

    shape = (HIDDEN_SIZE,)
    tx, tdout, tweight, tbias = (tensor(array) for array in (x, dout, weight, bias))
    functional = torch.nn.functional
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (tx, tweight, tbias)]
    rms_graph = functional.rms_norm(leaves[0], shape, leaves[1], EPS)
    layer_graph = functional.layer_norm(leaves[0], shape, leaves[1], leaves[2], EPS)
    return {
        "rms_norm": {
            "ours": lambda: cr.rms_norm(x, weight, eps=EPS, out=out),
            "ours allocating": lambda: cr.rms_norm(x, weight, eps=EPS),
            "numpy": lambda: plain_rms_norm(x, weight, out),
            "torch": lambda: functional.rms_norm(tx, shape, tweight, EPS),
        },
        "layer_norm": {
            "ours": lambda: cr.layer_norm(x, weight, bias, eps=EPS, out=out),
            "ours allocating": lambda: cr.layer_norm(x, weight, bias, eps=EPS),
            "numpy": lambda: plain_layer_norm(x, weight, bias, out),
            "torch": lambda: functional.layer_norm(tx, shape, tweight, tbias, EPS),
        },
        "rms_norm_backward": {
            "ours": lambda: cr.rms_norm_backward(
                dout, x, weight, rms_rstd, eps=EPS, dx_out=dx, dweight_out=dweight
            ),
            "ours allocating": lambda: cr.rms_norm_backward(dout, x, weight, rms_rstd, eps=EPS),
            "numpy": lambda: plain_rms_norm_backward(dout, x, weight, rms_rstd, dx, dweight),
            "torch": lambda: torch.autograd.grad(rms_graph, leaves[:2], tdout, retain_graph=True),
        },
        "layer_norm_backward": {
            "ours": lambda: cr.layer_norm_backward(
                *(dout, x, weight, mean, rstd),
                bias=bias,
                eps=EPS,
                dx_out=dx,
                dweight_out=dweight,
                dbias_out=dbias,
            ),
            "ours allocating": lambda: cr.layer_norm_backward(
                dout, x, weight, mean, rstd, bias=bias, eps=EPS
            ),
            "numpy": lambda: plain_layer_norm_backward(
                dout, x, weight, mean, rstd, dx, dweight, dbias
            ),
            "torch": lambda: torch.autograd.grad(layer_graph, leaves, tdout, retain_graph=True),
        },
    }


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def measure(dtype: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for op, calls in candidates(dtype).items():
        times = cpu_time(calls, rounds=rounds, window=0.0)
        for name, call in calls.items():
            rows.append(
                {
                    "op": op,
                    "dtype": dtype,
                    "rows": ROWS,
                    "hidden_size": HIDDEN_SIZE,
                    "impl": name,
                    "threads": threads,
                    "us": round(min(times[name]) * 1e6, 1),
                    "peak_bytes": None if name == "torch" else peak_bytes(call),
                }
            )
        figures = "  ".join(
            f"{row['impl']} {row['us'] / 1e3:.2f} ms" for row in rows[-len(calls) :]
        )
        print(f"{op} {dtype}, {threads} thread(s):  {figures}", flush=True)
    return rows


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def meta() -> dict[str, Any]:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "device": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    race.need("torch")
    import torch

    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for threads in (1, 2):
        # The library works on as many threads as the caller may use cores.
        os.sched_setaffinity(0, cores[:threads])
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            rows += measure(dtype, threads, arguments.rounds)
    if arguments.output:
        text = ",\n".join("    " + json.dumps(row) for row in rows)
        head = json.dumps(meta())
        arguments.output.write_text(f'{{\n  "meta": {head},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
