# SPDX-License-Identifier: Apache-2.0
"""What the GPU counts in a few study kernels at 4096 x 4096, by Nsight Compute.

`python -m benchmarks.study_counters` writes results/counters.json. Needs `ncu` and the right to
read the counters; where either is missing it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import race

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "counters.json"
ROWS, HIDDEN_SIZE = 4096, 4096
PICKED = (
    ("rms_norm", "f16x8_pack_f32"),
    ("rms_norm", "f16x8_f32"),
    ("rms_norm", "f16x8_tree"),
    ("rms_norm", "f32x4"),
    ("layer_norm", "f16x8_pack_f32"),
    ("layer_norm", "f16_tiled"),
)
_L1 = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
METRICS = {
    "load_requests": _L1.format("requests", "ld"),
    "load_sectors": _L1.format("sectors", "ld"),
    "store_requests": _L1.format("requests", "st"),
    "store_sectors": _L1.format("sectors", "st"),
    "l1_hit_percent": "l1tex__t_sector_pipe_lsu_mem_global_op_ld_hit_rate.pct",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "instructions": "smsp__inst_executed.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}


def launch_all() -> None:
    """Each kernel once between start and stop of the profiler; runs below ncu."""
    import cupy
    import numpy as np

    from cupy_rmsnorm import variants

    normal = np.random.default_rng(0).standard_normal((ROWS, HIDDEN_SIZE), np.float32)
    wide = cupy.asarray(normal)
    for op, name in PICKED:
        variant = getattr(getattr(variants, op), name)
        x = wide.astype(variant.dtype)
        y = cupy.empty_like(x)
        one = cupy.ones(HIDDEN_SIZE, x.dtype)
        parameters = ((one, one) if op == "layer_norm" else (one,)) if variant.vector else ()
        enqueue = variant.bind(x, *parameters, out=y)
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStart()
        enqueue(cupy.cuda.get_current_stream().ptr)
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()


def rows_of(output: str) -> list[dict[str, Any]]:
    """The table that ncu printed, a row a launch, in the order of PICKED."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    launches = [row for row in csv.DictReader(lines) if row["ID"]]  # the first row has the units
    if len(launches) != len(PICKED):
        raise ValueError(f"{len(PICKED)} launches were expected, ncu saw {len(launches)}")
    rows = []
    for (op, name), launch in zip(PICKED, launches, strict=True):
        values = {
            short: float(launch[metric].replace(",", "")) for short, metric in METRICS.items()
        }
        values["load_sectors_per_request"] = values["load_sectors"] / values["load_requests"]
        values["store_sectors_per_request"] = values["store_sectors"] / values["store_requests"]
        rows.append({"op": op, "impl": name, "rows": ROWS, "hidden_size": HIDDEN_SIZE, **values})
    return rows


def _command(ncu: str) -> list[str]:
    return [
        *(ncu, "--clock-control", "none", "--profile-from-start", "off"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join(METRICS.values())),
        *(sys.executable, "-m", "benchmarks.study_counters", "--launch"),
    ]


def _found(ncu: str | None) -> str | None:
    places: Iterable[str | None] = (ncu, "ncu", "/usr/local/cuda/bin/ncu")
    return next((path for place in places if place and (path := shutil.which(place))), None)


def main() -> int:
    """Run ncu over this file and write what it counted."""
    parser = argparse.ArgumentParser(description="Count sectors, hits and bytes by ncu.")
    parser.add_argument("--ncu", help="the program, where it is not on the PATH")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--commit", help="of what is measured, where git cannot say")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        launch_all()
        return 0
    ncu = _found(args.ncu)
    if ncu is None:
        print("ncu was not found: install Nsight Compute, or name it by --ncu", file=sys.stderr)
        return 1
    try:
        done = subprocess.run(
            _command(ncu), cwd=ROOT, capture_output=True, text=True, timeout=args.timeout
        )
        rows = rows_of(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        output = "" if isinstance(error, subprocess.TimeoutExpired) else done.stdout + done.stderr
        print(f"nothing was counted: {error}\n{output[-2000:]}", file=sys.stderr)
        return 1
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    meta = race.meta(1, args.commit) | {
        "ncu": version.strip().splitlines()[-1] if version.strip() else None
    }
    args.json.write_text(race.dumps({"meta": meta, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
