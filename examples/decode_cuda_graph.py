# SPDX-License-Identifier: Apache-2.0
"""Decode one token at a time in a CUDA graph, which launches all kernels of a step at once.

    python examples/decode_cuda_graph.py

Takes torch and a GPU. A graph cannot compile: `warmup` does that first, once for all layers.
"""

from __future__ import annotations

import sys

try:
    import torch

    import cupy_rmsnorm as cr
except ModuleNotFoundError as error:
    sys.exit(f'{error}. In a clone, run: pip install ".[cuda12,torch]"')

HIDDEN, LAYERS, TOKENS = 2048, 4, 3


def main() -> bool:
    """Whether the graph computes what the calls do."""
    if not cr.is_available() or not torch.cuda.is_available():
        sys.exit(f"this example needs a GPU: {cr.info()['reason'] or 'torch finds none'}")
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.rand(HIDDEN, **options) + 0.5 for _ in range(LAYERS)]
    matrices = [torch.randn(HIDDEN, HIDDEN, **options) / HIDDEN**0.5 for _ in range(LAYERS)]

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for weight, matrix in zip(weights, matrices, strict=True):
            y, residual = cr.add_rms_norm(x, residual, weight)
            x = torch.nn.functional.silu(y @ matrix)
        return cr.rms_norm(x + residual, weights[0])

    kind = {"hidden_size": HIDDEN, "dtype": "bfloat16", "weight_dtype": "bfloat16"}
    cr.warmup(calls=[{"op": op, **kind} for op in ("rms_norm", "add_rms_norm")])
    torch.cuda.synchronize()
    x, residual = torch.randn(2, 1, HIDDEN, **options)
    x @ matrices[0]  # lets torch's own library begin outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = step(x, residual)

    same = True
    for token in range(TOKENS):
        x.copy_(torch.randn(1, HIDDEN, **options))  # the graph reads where x lies
        graph.replay()
        same &= torch.equal(y, step(x, residual))
        print(f"token {token}: {y[0, :4].tolist()}")
    return same


if __name__ == "__main__":
    print("the graph agrees" if main() else "THE GRAPH COMPUTES SOMETHING ELSE")
