# SPDX-License-Identifier: Apache-2.0
"""A character-level transformer on the sources of Python's standard library, and its training.

What benchmarks/train.py and benchmarks/curves.py run. Needs torch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SOURCES = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "optparse", "typing")
SOURCES += ("pickle", "statistics", "subprocess", "tarfile", "threading", "shutil")
CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 4
BATCH = 64
LEARNING_RATE, WARM_UP = 2e-3, 100
VALIDATION = 0.1  # of the text, its end
VALIDATION_BATCHES = 20
NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.before_attention, self.before_feed = norm(WIDTH), norm(WIDTH)
        self.project_in, self.project_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.project_in(self.before_attention(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.before_feed(x))


class Model(nn.Module):
    """Characters in, the next character's logits out."""

    def __init__(self, characters: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(norm) for _ in range(LAYERS)))
        self.last = norm(WIDTH)
        self.predict = nn.Linear(WIDTH, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.predict(self.last(self.blocks(self.embed(characters) + self.place)))


def text() -> bytes:
    """The sources, one after the other."""
    folder = Path(json.__file__).parents[1]
    return b"".join((folder / f"{name}.py").read_bytes() for name in SOURCES)


def encoded(content: bytes) -> tuple[torch.Tensor, int]:
    """Bytes as numbers from 0 on, and how many there are."""
    values, codes = torch.unique(
        torch.frombuffer(bytearray(content), dtype=torch.uint8), return_inverse=True
    )
    return codes, len(values)


def batch(codes: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows, and the same one character on."""
    starts = torch.randint(len(codes) - CONTEXT, (BATCH,), generator=generator)
    windows = (starts[:, None] + torch.arange(CONTEXT + 1)).to(codes.device)
    chosen = codes[windows]
    return chosen[:, :-1], chosen[:, 1:]


def loss_of(model: Model, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(pair[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), pair[1].flatten())


def train(norm: str, seed: int, steps: int, device: str) -> dict[str, Any]:
    """One model from one seed; its losses at the end."""
    torch.set_num_threads(1 if device == "cuda" else torch.get_num_threads())
    torch.set_float32_matmul_precision("high")
    codes, characters = encoded(text())
    codes = codes.to(device)
    split = int(len(codes) * (1 - VALIDATION))
    torch.manual_seed(seed)  # neither norm draws: all other weights are those of the other run
    model = Model(characters, NORMS[norm]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / (steps + 1))
    )
    generator = torch.Generator().manual_seed(seed)
    begin, losses = time.perf_counter(), []
    for _ in range(steps):
        loss = loss_of(model, batch(codes[:split], generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    with torch.no_grad():
        generator.manual_seed(0)
        held_out = [
            loss_of(model, batch(codes[split:], generator)) for _ in range(VALIDATION_BATCHES)
        ]
    last = losses[-max(1, steps // 10) :]
    return {
        "norm": norm,
        "seed": seed,
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_loss": round(float(torch.stack(last).mean()), 5),
        "valid_loss": round(float(torch.stack(held_out).mean()), 5),
        "seconds": round(time.perf_counter() - begin, 1),
    }
