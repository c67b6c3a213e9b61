# SPDX-License-Identifier: Apache-2.0
"""What the sweeps measured beside what the library chooses: plans are read off it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# Plans that are so close are equally fast: where buffers lie, and the run, decide between them.
TOLERANCE = 0.02
# How many of its rows share a block is one rule for all lengths. No simple one is within the above
# for every shape: LayerNorm's rows of one and two warps are fastest in blocks of 1 or of 16.
LAUNCH_TOLERANCE = 0.03

Shape = tuple[str, str, int, int]  # op, dtype, rows, hidden_size


def swept(name: str) -> dict[Shape, list[dict[str, Any]]]:
    """The candidates of a sweep by shape."""
    shapes: dict[Shape, list[dict[str, Any]]] = {}
    for row in json.loads((RESULTS / name).read_text("utf-8"))["rows"]:
        shape = (row["op"], row["dtype"], row["rows"], row["hidden_size"])
        if row["impl"] == "ours":
            shapes.setdefault(shape, []).append(row)
    return shapes


def check(
    shape: Shape,
    rows: list[dict[str, Any]],
    chosen: Mapping[str, Any],
    rows_per_block: int,
    known: Mapping[Shape, str],
) -> None:
    """Assert that no candidate is faster than what has all members of `chosen`, as it is launched.

    `known` says of which shapes no launch of it is as fast, and why; no other may be there.
    """
    best = min(row["us"] for row in rows)
    plan = [row for row in rows if chosen.items() <= row.items()]
    same = [row["us"] for row in plan]
    own = [row["us"] for row in plan if row["rows_per_block"] == rows_per_block]
    assert own, f"{dict(chosen)} was not measured with {rows_per_block} rows a block"
    assert best >= (1 - LAUNCH_TOLERANCE) * min(own), (
        f"{dict(chosen)} with {rows_per_block} rows a block took {min(own)} us, "
        f"the fastest candidate {best} us"
    )
    fine = best >= (1 - TOLERANCE) * min(same)
    if shape in known:
        assert not fine, f"{shape} is no exception any more"
        return
    assert fine, f"{dict(chosen)} took {min(same)} us, the fastest candidate {best} us"
