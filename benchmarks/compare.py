# SPDX-License-Identifier: Apache-2.0
"""The forward functions beside a device copy, torch, torch.compile, Liger, QuACK and FlashInfer.

    python -m benchmarks.compare --json benchmarks/results/compare.json [--budget 170] [--only TEXT]

Needs a GPU and torch; of the others, those that can be imported take part. A row's ratio is the
time of the fastest copy of the same bytes in the same race over its own. Rows with a `case` come
from races of this library's options among themselves. At the end: which bars hold.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import race
from benchmarks.race import Bar, Candidate, Result, Run
from benchmarks.shapes import FORWARD, MASKED, ODD, QK, QK_TOKENS, VARIANTS, Shape

LARGE = 64 * 10**6  # bytes: from here on a copy's rate is the bar
AHEAD, AHEAD_SHORT = 1.01, 0.05  # "not slower": 1 %, below SHORT us 0.05 us
SHORT = 5.0
OPTION = 1.02  # of the plain call's time
ODD_RATE = 0.75
SAME_SPEED = 1.01  # float16 against bfloat16
QK_RATE = 0.95  # of the copy's, of many tokens
MASKED_RATE = 0.95  # of the rate of a copy of as many rows as are computed


def variants(shape: Shape, count: int) -> dict[str, Candidate]:
    """This library's options on one shape, and float16 in place of bfloat16."""
    from benchmarks import baselines

    data = baselines.ForwardData(shape, count)
    half = baselines.ForwardData(shape._replace(dtype="float16"), count)
    wide = data.weight.float()
    bias = (0.3 * data.normal(shape.hidden_size)).to(data.dtype)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (data, {}),
        "float32 weight": (data, {"weight": wide}),
        "weight_offset": (data, {"weight_offset": 1.0}),
        "cast before weight": (data, {"cast": "before_weight"}),
        "no weight": (data, {"weight": None}),
    }
    if shape.hidden_size >= 4096:
        cases["groups"] = (data, {"groups": 8})
        if not shape.layer:
            cases["partial"] = (data, {"partial": shape.hidden_size // 4})
    cases |= (
        {"no bias": (data, {"bias": None})} if shape.layer else {"bias": (data, {"bias": bias})}
    )

    def finite(outputs: Any) -> None:
        # What options compute is the tests' business; here they must only have run.
        if not bool(outputs[0][data.at].isfinite().all()):
            raise race.Wrong("y is not finite")

    def make(data: Any, options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: baselines.ours_forward(data, **options)

    found = {
        name: Candidate(make(chosen, options), finite, "ours", shape.dtype, name)
        for name, (chosen, options) in cases.items()
    }
    found["float16"] = Candidate(make(half, {}), half.check, "ours", "float16", "plain")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, write, and say which bars hold."""
    begin = time.perf_counter()
    parser = race.parser("The forward functions beside others.", 170)
    parser.add_argument("--masks", action="store_true", help="these races alone, anew in --resume")
    options = parser.parse_args(arguments)
    race.need_gpu()
    import torch

    from benchmarks import baselines

    torch.set_grad_enabled(False)
    if options.masks:
        run = Run(options, begin, race.meta(options.rounds, options.commit), MASKED)
        run.all(MASKED, baselines.masked, case="valid_rows")
        race.show(bars(run.rows), run.rows)
        return
    wanted = [shape for shape in FORWARD if options.only in str(shape)]
    with baselines.peers(wanted) as (present, missing):
        meta = race.meta(options.rounds, options.commit) | {"missing": missing}
        run = Run(options, begin, meta)
        # QuACK's kernels are being compiled: first the races that need none.
        run.all(VARIANTS, variants, case="plain")
        run.all(QK, baselines.qk_norm, case="one launch")
        run.all(MASKED, baselines.masked, case="valid_rows")
        run.all(
            FORWARD,
            lambda shape, count: baselines.forward(baselines.ForwardData(shape, count), present),
        )
    race.show(bars(run.rows), run.rows)
    print(f"{run.seconds():.0f} s")


# Bars ------------------------------------------------------------------------------------------


def bars(rows: Sequence[Result]) -> list[Bar]:
    """What is demanded of these results."""
    plain = race.by_shape(rows)
    found = [
        bar
        for shape, impls in plain.items()
        if "ours" in impls
        for bar in _shape_bars(shape, impls)
    ]
    races = race.by_shape(rows, case="plain")
    return [*found, *_odd_bars(plain), *_option_bars(races), *_qk_bars(races), *_mask_bars(races)]


def _shape_bars(shape: Shape, impls: dict[str, Result]) -> Iterator[Bar]:
    label, ours = str(shape), impls["ours"]
    peer = race.best_peer(impls)
    if peer is not None:
        limit = peer["us"] * AHEAD if ours["us"] >= SHORT else peer["us"] + AHEAD_SHORT
        yield Bar(label, f"us, at or ahead of {peer['impl']}", ours["us"], limit, most=True)
    if shape == Shape("rms_norm", "float16", 4096, 512) and "quack" in impls:
        yield Bar(label, "us, ahead of quack by 4 %", ours["us"], impls["quack"]["us"] / 1.04, True)
    if shape.nbytes >= LARGE and shape.hidden_size not in ODD:
        limit = 0.96 if shape.layer else 0.97
        if (shape.op, shape.rows, shape.hidden_size) == ("layer_norm", 4096, 32768):
            limit = 0.95
        yield Bar(label, "of the copy's rate", ours["ratio"], limit)


def _odd_bars(plain: dict[Shape, dict[str, Result]]) -> Iterator[Bar]:
    for shape, impls in plain.items():
        even = plain.get(shape._replace(hidden_size=ODD.get(shape.hidden_size, 0)), {})
        if "ours" in impls and "ours" in even:
            rates = (
                row["hidden_size"] * row["rows"] / row["us"]
                for row in (impls["ours"], even["ours"])
            )
            odd_rate, even_rate = rates
            what = f"of the rate of {ODD[shape.hidden_size]}"
            yield Bar(str(shape), what, odd_rate / even_rate, ODD_RATE)


def _option_bars(races: dict[Shape, dict[str, Result]]) -> Iterator[Bar]:
    for shape, cases in races.items():
        if "plain" not in cases or shape.dtype != "bfloat16":
            continue
        plain = cases["plain"]["us"]
        for case, row in cases.items():
            if case not in ("copy", "plain", "groups"):  # groups are rows of another length
                yield Bar(f"{shape} {case}", "of the plain time", row["us"] / plain, OPTION, True)
        half = races.get(shape._replace(dtype="float16"), {}).get("plain")
        if half is not None:
            slower, faster = max(half["us"], plain), min(half["us"], plain)
            what = "float16 against bfloat16, time"
            yield Bar(str(shape), what, slower / faster, SAME_SPEED, True)


def _qk_bars(races: dict[Shape, dict[str, Result]]) -> Iterator[Bar]:
    for shape, tokens in zip(QK, QK_TOKENS, strict=True):
        cases = races.get(shape, {})
        if "one launch" not in cases:
            continue
        label, one = f"{shape} one launch", cases["one launch"]
        if shape.nbytes >= LARGE:
            yield Bar(label, "of the copy's rate", one["ratio"], QK_RATE)
        elif "two calls" in cases:
            limit = cases["two calls"]["us"]
            yield Bar(label, f"us, {tokens} tokens, ahead of two calls", one["us"], limit, True)


def _mask_bars(races: dict[Shape, dict[str, Result]]) -> Iterator[Bar]:
    for shape in MASKED:
        cases = races.get(shape, {})
        for case, row in cases.items():
            if row["impl"] == "ours":
                yield Bar(f"{shape} {case}", "of the copy's rate", row["ratio"], MASKED_RATE)
                told = race.copy_of_rows(cases, case)
                if told is not None:
                    rate = told["us"] / row["us"]
                    yield Bar(f"{shape} {case}", "of a copy of these rows", rate, MASKED_RATE)


if __name__ == "__main__":
    main()
