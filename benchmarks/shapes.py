# SPDX-License-Identifier: Apache-2.0
"""The shapes of compare.py and backward.py, the most telling first: a run may end early."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from cupy_rmsnorm._bench import CASES
from cupy_rmsnorm._dtypes import TABLE


class Shape(NamedTuple):
    """One function on one input; `op` is the public function's name."""

    op: str
    dtype: str
    rows: int
    hidden_size: int

    @property
    def tensors(self) -> int:
        """How many tensors of rows x hidden_size must cross memory."""
        return 3 + self.adds if self.backward else 2 + 2 * self.adds

    @property
    def backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def adds(self) -> bool:
        return self.op.startswith("add_")

    @property
    def layer(self) -> bool:
        return "layer_norm" in self.op

    @property
    def nbytes(self) -> int:
        """What a call must at least read and write together."""
        return self.tensors * self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.hidden_size * TABLE[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.rows}x{self.hidden_size}"


def _cases(op: str, dtype: str, *groups: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(op, dtype, case.rows, case.hidden_size)
        for group in groups
        for case in CASES[group]
        if case.scale == 1
    )


# Published comparisons stand on these.
RMS_NORM = (
    *_cases("rms_norm", "bfloat16", "prefill"),
    *_cases("rms_norm", "float16", "study"),
    *_cases("rms_norm", "bfloat16", "decode", "long"),
    Shape("rms_norm", "float32", 4096, 4096),
    Shape("rms_norm", "float32", 8192, 16384),
)
LAYER_NORM = (
    *_cases("layer_norm", "bfloat16", "prefill"),
    Shape("layer_norm", "bfloat16", 4096, 32768),
    Shape("layer_norm", "bfloat16", 4096, 512),
    Shape("layer_norm", "float32", 8192, 4096),
)
ADD_RMS_NORM = (
    Shape("add_rms_norm", "bfloat16", 16384, 4096),
    Shape("add_rms_norm", "bfloat16", 4096, 32768),
    Shape("add_rms_norm", "bfloat16", 131072, 128),
)

# Hidden sizes of models; their norms are these two functions in bfloat16.
MODELS = {
    "Llama 3 8B": 4096,
    "Llama 3 70B": 8192,
    "Qwen3 4B": 2560,
    "Qwen3 32B": 5120,
    "Gemma 3 27B": 5376,
    "DeepSeek V3": 7168,
}
MODEL_ROWS = (16384, 256, 2048, 1, 16)  # prefill and decode in turn
MODEL_SHAPES = tuple(
    Shape(op, "bfloat16", rows, hidden_size)
    for rows, hidden_size, op in itertools.product(
        MODEL_ROWS, MODELS.values(), ("rms_norm", "add_rms_norm")
    )
)

# An odd hidden size, and the neighbour whose rate it is held against.
ODD = {4097: 4096, 7169: 7168, 5000: 5120}
ODD_SHAPES = tuple(
    Shape(op, "bfloat16", 8192, hidden_size)
    for op in ("rms_norm", "layer_norm")
    for pair in ODD.items()
    for hidden_size in pair
)

# Where this library's options are held against its own plain call.
VARIANTS = (
    Shape("rms_norm", "bfloat16", 16384, 4096),
    Shape("rms_norm", "bfloat16", 8192, 8192),
    Shape("rms_norm", "bfloat16", 131072, 128),
    Shape("layer_norm", "bfloat16", 16384, 4096),
)

# qk_norm in a packed buffer of bfloat16: the rows are those of q and k.
Q_HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
QK_TOKENS = (16384, 1, 16, 256)
QK = tuple(
    Shape("qk_norm", "bfloat16", tokens * (Q_HEADS + KV_HEADS), HEAD_SIZE) for tokens in QK_TOKENS
)

# Of so many rows these are computed, the others masked.
MASKED_ROWS = 16384
MASKED = (
    Shape("rms_norm", "bfloat16", MASKED_ROWS // 2, 4096),
    Shape("rms_norm", "bfloat16", MASKED_ROWS // 10, 4096),
)

# torch.compile takes seconds a shape: these only.
COMPILED = frozenset(
    {
        *_cases("rms_norm", "bfloat16", "prefill"),
        Shape("rms_norm", "float16", 4096, 512),
        Shape("rms_norm", "bfloat16", 8192, 32768),
        Shape("layer_norm", "bfloat16", 16384, 4096),
        Shape("layer_norm", "bfloat16", 131072, 128),
        Shape("add_rms_norm", "bfloat16", 16384, 4096),
        Shape("rms_norm_backward", "bfloat16", 16384, 4096),
        Shape("rms_norm_backward", "bfloat16", 4096, 512),
        Shape("layer_norm_backward", "bfloat16", 16384, 4096),
        Shape("add_rms_norm_backward", "bfloat16", 16384, 4096),
    }
)

FORWARD = tuple(dict.fromkeys((*RMS_NORM, *ADD_RMS_NORM, *LAYER_NORM, *ODD_SHAPES, *MODEL_SHAPES)))

# The first four are large.
_BACKWARD = (
    ("bfloat16", 16384, 4096),
    ("bfloat16", 8192, 8192),
    ("bfloat16", 16384, 7168),
    ("float32", 8192, 4096),
    ("bfloat16", 131072, 128),
    ("bfloat16", 4096, 32768),
    ("bfloat16", 4096, 512),
    ("bfloat16", 128, 8192),
)
BACKWARD = (
    *(Shape("rms_norm_backward", *shape) for shape in _BACKWARD),
    *(Shape("layer_norm_backward", *shape) for shape in _BACKWARD),
    *(Shape("add_rms_norm_backward", *shape) for shape in (_BACKWARD[0], *_BACKWARD[4:6])),
    Shape("add_rms_norm_backward", *_BACKWARD[1]),
)
