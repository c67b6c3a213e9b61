# SPDX-License-Identifier: Apache-2.0
"""A bar on the terminal for what takes longer than a second."""

from __future__ import annotations

import sys
import time


class Progress:
    """A bar on a terminal's error stream, drawn only from the second second on."""

    WIDTH = 40

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.done = title, max(1, steps), 0
        self.begin, self.drawn = time.monotonic(), False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def step(self, count: int) -> None:
        """`count` more of the steps are done."""
        self.done += count
        passed = time.monotonic() - self.begin
        if passed > 1 and sys.stderr is not None and sys.stderr.isatty():
            self.drawn = True
            share = min(1.0, self.done / self.steps)
            bar = ("#" * int(share * self.WIDTH)).ljust(self.WIDTH, ".")
            line = f"\r[{bar}] {share:4.0%}{_time_left(passed, share)}\x1b[K"
            print(line, end="", file=sys.stderr, flush=True)


def _time_left(passed: float, share: float) -> str:
    """As much time as the steps that are done took each, for those that are not."""
    if share <= 0:
        return ""
    seconds = round(passed * (1 - share) / share)
    return f", {seconds // 60}:{seconds % 60:02d} left"
