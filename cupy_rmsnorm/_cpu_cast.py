# SPDX-License-Identifier: Apache-2.0
"""16-bit floats to float32 and back by whole-array integer operations.

NumPy casts float16 one element at a time and ml_dtypes casts bfloat16 under the interpreter lock.
Both functions here are exact: every pattern decodes to its value, and encoding rounds once, to
nearest even.
"""

from __future__ import annotations

import numpy as np

CODED = ("float16", "bfloat16")

_HALF_MAX = 65520.0  # from here on float32 rounds to infinity in float16
_HALF_TINY = 2.0**-14  # the smallest normal float16
_REBIAS = 2.0**112  # 127 - 15: between the exponent biases of float32 and float16
_INFINITY = 0x7F800000


def decode(dtype: str, values: np.ndarray) -> None:
    """Turn `values`, whose memory holds sign-extended 16-bit codes as int32, into their floats."""
    bits = values.view(np.int32)
    if dtype == "bfloat16":
        np.left_shift(bits, 16, out=bits)
        return
    # The sign extension fills the top bits: three of them are not the exponent's.
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, ~0x70000000, out=bits)
    np.multiply(values, np.float32(_REBIAS), out=values)  # normalises subnormals too
    if values.size and max(values.max(), -values.min()) >= 65536:  # infinities and NaNs
        np.bitwise_or(bits, _INFINITY, out=bits, where=np.abs(values) >= 65536)


def encode(dtype: str, values: np.ndarray, code: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """The codes of float32 `values` in the low halves of int32: `code`, overwritten.

    `spare` is overwritten, `values` is kept; all three are float32, contiguous, of one shape.
    """
    bits, low = code.view(np.int32), spare.view(np.int32)
    if dtype == "bfloat16":
        source = values.view(np.int32)
        np.right_shift(source, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(bits, 0x7FFF, out=bits)
        np.add(bits, source, out=bits)
        np.right_shift(bits, 16, out=bits)
        if values.size and np.isnan(values.max()):  # the carry may have run through a NaN's bits
            nan = np.isnan(values)
            np.copyto(bits, (source >> 16) | 0x40, where=nan)
        return bits
    magnitude = np.abs(values, out=spare)
    subnormal = np.flatnonzero(magnitude < _HALF_TINY)
    if subnormal.size > values.size // 8:  # zeros too, but these come out right below
        subnormal = subnormal[magnitude.reshape(-1)[subnormal] != 0]
    if subnormal.size > values.size // 8 or not magnitude.max(initial=0) < _HALF_MAX:
        np.copyto(bits, values.astype(np.float16).view(np.int16))
        return bits
    np.multiply(values, np.float32(1 / _REBIAS), out=code)
    # Half an ulp less one, plus the last kept bit; and copies of the sign, whose lowest one
    # becomes the sign of the code.
    np.right_shift(bits, 13, out=low)
    np.bitwise_and(low, 0x70000001, out=low)
    np.add(low, 0x0FFF, out=low)
    np.add(bits, low, out=bits)
    np.right_shift(bits, 13, out=bits)
    if subnormal.size:  # their product has been rounded before
        halves = values.reshape(-1)[subnormal].astype(np.float16)
        bits.reshape(-1)[subnormal] = halves.view(np.int16)
    return bits
