# SPDX-License-Identifier: Apache-2.0
"""Loss curves of a small transformer with torch's norm and with this library's, in 16 bits.

The model, text and batches are those of benchmarks/tiny_model.py. In bfloat16 all parameters are
bfloat16; in float16 they are float32 under autocast and GradScaler. From each seed both norms begin
with the same weights and see the same batches. benchmarks/models.py runs it and keeps the curves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from benchmarks import tiny_model
from cupy_rmsnorm.torch import RMSNorm

DTYPES = ("bfloat16", "float16")
NORMS: dict[str, type[nn.Module]] = {"torch": nn.RMSNorm, "ours": RMSNorm}
SEEDS, STEPS, WINDOW = 5, 200, 20
LEARNING_RATE = 1e-3


def losses(
    norm: str,
    dtype: str,
    seed: int,
    steps: int,
    device: str,
    codes: Any,
    characters: int,
    rows: int = tiny_model.BATCH,
) -> list[float]:
    """The loss of every step, each of that many windows of the text."""
    half = dtype == "float16"
    torch.manual_seed(seed)
    model = tiny_model.Model(characters, NORMS[norm]).to(device)
    if not half:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(device, enabled=half and device == "cuda")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        pair = [part[:rows] for part in tiny_model.batch(codes, generator)]
        with torch.autocast(device, torch.float16, enabled=half):
            logits = model(pair[0])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), pair[1].flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return [float(loss) for loss in found]


def measure(
    device: str, *, seeds: int = SEEDS, steps: int = STEPS, window: int = WINDOW, tiny: bool = False
) -> list[dict[str, Any]]:
    """A row a curve: the means of windows, and how many losses were not finite."""
    batch = tiny_model.BATCH
    if tiny:
        seeds, steps, window, batch = 2, 2, 1, 2
    codes, characters = tiny_model.encoded(tiny_model.text())
    codes = codes.to(device)
    rows = []
    for dtype in DTYPES:
        for seed in range(seeds):
            for norm in NORMS:
                found = losses(norm, dtype, seed, steps, device, codes, characters, batch)
                means = [
                    round(sum(found[at : at + window]) / window, 5)
                    for at in range(0, steps, window)
                ]
                bad = sum(not math.isfinite(loss) for loss in found)
                rows.append(
                    {"dtype": dtype, "seed": seed, "impl": norm, "not_finite": bad, "loss": means}
                )
    return rows


def outside(rows: list[dict[str, Any]]) -> list[str]:
    """Where this library's curves leave what torch's seeds span.

    A curve may differ from torch's of the same seed, in each window, by no more than torch's seeds
    differ among themselves; and may have no loss that is not finite where torch's has none.
    """
    faults = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        curves = {(r["impl"], r["seed"]): r for r in rows if r["dtype"] == dtype}
        seeds = sorted({seed for _, seed in curves})
        theirs = [curves["torch", seed]["loss"] for seed in seeds]
        for seed in seeds:
            mine, like = curves["ours", seed], curves["torch", seed]
            if mine["not_finite"] and not like["not_finite"]:
                faults.append(f"{dtype} seed {seed}: {mine['not_finite']} losses not finite")
            for window, (a, b) in enumerate(zip(mine["loss"], like["loss"], strict=True)):
                span = [curve[window] for curve in theirs]
                if not abs(a - b) <= max(span) - min(span):
                    faults.append(
                        f"{dtype} seed {seed} window {window}: {a} beside torch's {b}, "
                        f"whose seeds span {min(span)} to {max(span)}"
                    )
    return faults


def summary(rows: list[dict[str, Any]]) -> str:
    """The last losses, and whether the curves agree."""
    lines = []
    for dtype in DTYPES:
        for norm in NORMS:
            last = [r["loss"][-1] for r in rows if (r["dtype"], r["impl"]) == (dtype, norm)]
            lines.append(f"   {dtype} {norm:6} last losses {' '.join(map(str, last))}")
    faults = outside(rows)
    return "\n".join([*lines, *(f"   OUTSIDE {fault}" for fault in faults)])
