# SPDX-License-Identifier: Apache-2.0
"""The backward functions beside torch's own kernels, torch.compile, Liger and QuACK.

    python -m benchmarks.backward --json benchmarks/results/backward.json [--budget 70]

Statistics are given, the weight's (and bias's) gradient is included. The copy of a row is 1.5 times
the fastest copy of two tensors in the same race, 2 times where a residual gradient arrives too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import race
from benchmarks.race import Bar, Result, Run
from benchmarks.shapes import BACKWARD, Shape

LARGE = BACKWARD[:4]
RATIOS = {
    **dict.fromkeys(LARGE, 0.95),
    Shape("rms_norm_backward", "bfloat16", 131072, 128): 0.90,
    Shape("rms_norm_backward", "bfloat16", 4096, 32768): 0.85,
    **{shape._replace(op="layer_norm_backward"): 0.90 for shape in LARGE},
    Shape("layer_norm_backward", "bfloat16", 131072, 128): 0.85,
    **{shape: 0.93 for shape in BACKWARD if shape.adds},
}
TIMES_FASTER = {
    Shape("rms_norm_backward", "bfloat16", 4096, 512): 1.7,
    Shape("rms_norm_backward", "bfloat16", 128, 8192): 1.7,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, write, and say which bars hold."""
    begin = time.perf_counter()
    options = race.parser("The backward functions beside others.", 70).parse_args(arguments)
    race.need_gpu()
    import torch

    from benchmarks import baselines

    torch.set_grad_enabled(False)
    wanted = [shape for shape in BACKWARD if options.only in str(shape)]
    with baselines.peers(wanted) as (present, missing):
        meta = race.meta(options.rounds, options.commit) | {"missing": missing}
        run = Run(options, begin, meta)
        run.all(
            BACKWARD,
            lambda shape, count: baselines.backward(baselines.BackwardData(shape, count), present),
        )
    race.show(bars(run.rows), run.rows)
    print(f"{run.seconds():.0f} s")


def bars(rows: Sequence[Result]) -> list[Bar]:
    """What is demanded of these results."""
    return [
        bar
        for shape, impls in race.by_shape(rows).items()
        if "ours" in impls
        for bar in _shape_bars(shape, impls)
    ]


def _shape_bars(shape: Shape, impls: dict[str, Result]) -> Iterator[Bar]:
    label, ours = str(shape), impls["ours"]
    peer = race.best_peer(impls)
    if peer is not None:
        times = peer["us"] / ours["us"]
        yield Bar(label, f"times faster than {peer['impl']}", times, TIMES_FASTER.get(shape, 1.0))
    if shape in RATIOS:
        yield Bar(label, "of the copy's rate", ours["ratio"], RATIOS[shape])


if __name__ == "__main__":
    main()
