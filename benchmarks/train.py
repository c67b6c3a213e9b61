# SPDX-License-Identifier: Apache-2.0
"""Does a model train as well with RMSNorm as with LayerNorm? Needs torch; writes train.json.

The model of benchmarks/tiny_model.py. The two runs of a seed differ in the norm alone: the same
initial weights elsewhere, the same batches in the same order. On a GPU all runs go side by side, a
process each: such a small model leaves it idle most of the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import race

RESULTS = Path(__file__).parent / "results" / "train.json"
STEPS, SEEDS = 1000, 3


def main() -> None:
    """Train with each norm from each seed."""
    parser = argparse.ArgumentParser(description="Train with LayerNorm and with RMSNorm.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of what is measured, where git cannot say")
    args = parser.parse_args()
    race.need("torch")
    import torch

    from benchmarks import tiny_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        meta = race.meta(args.seeds, args.commit)
    else:
        version = platform.python_version()
        meta = {"device": "cpu", "torch": torch.__version__, "python": version}
    meta["text_crc32"] = zlib.crc32(tiny_model.text())
    wanted = [(norm, seed) for seed in range(args.seeds) for norm in tiny_model.NORMS]
    rows: list[dict[str, Any]] = []
    workers = len(wanted) if device == "cuda" else 1
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        runs = [
            pool.submit(tiny_model.train, norm, seed, args.steps, device) for norm, seed in wanted
        ]
        for run in as_completed(runs):
            rows.append(run.result())
            print(rows[-1], flush=True)
            rows.sort(key=lambda row: (row["seed"], row["norm"]))
            args.json.write_text(race.dumps({"meta": meta, "rows": rows}))


if __name__ == "__main__":
    main()
