# SPDX-License-Identifier: Apache-2.0
"""Train a small network in plain CuPy, no autograd: forward and backward of the norm by hand.

    python examples/train_cupy.py

Without a GPU it runs on NumPy, by the same calls.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import numpy as np

    import cupy_rmsnorm as cr
except ModuleNotFoundError as error:
    sys.exit(f'{error}. In a clone, run: pip install ".[cuda12]"')

if cr.is_available():
    import cupy as xp
else:
    xp = np

HIDDEN, ROWS, STEPS, RATE = 96, 512, 60, 0.05


def main() -> tuple[float, float]:
    """The loss before and after."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return xp.asarray(generator.standard_normal(shape, dtype=np.float32))

    x = normal(ROWS, HIDDEN)
    target = xp.tanh(x @ normal(HIDDEN, 1) / HIDDEN**0.5)
    weight = xp.ones(HIDDEN, np.float32)  # of the norm
    inner, outer = normal(HIDDEN, HIDDEN) / HIDDEN**0.5, normal(HIDDEN, 1) / HIDDEN**0.5
    losses = []
    for _ in range(STEPS):
        # x + relu(norm(x) @ inner), normalised once more by the same weight, @ outer
        y, rstd = cr.rms_norm_forward(x, weight)
        active = xp.maximum(y @ inner, 0)
        z, total, total_rstd = cr.add_rms_norm_forward(active, x, weight)
        error = z @ outer - target
        losses.append(float((error**2).mean()))

        dprediction = 2 * error / ROWS
        dz = dprediction @ outer.T
        dactive, _, dweight, _ = cr.add_rms_norm_backward(dz, None, total, weight, rstd=total_rstd)
        dhidden = dactive * (active > 0)
        _, dweight_first, _ = cr.rms_norm_backward(dhidden @ inner.T, x, weight, rstd=rstd)
        outer -= RATE * (z.T @ dprediction)
        inner -= RATE * (y.T @ dhidden)
        weight -= RATE * (dweight + dweight_first)
    print(f"{xp.__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
