# SPDX-License-Identifier: Apache-2.0
"""Calls of the study kernels: the sizes they admit, how far they may err, and the emulator."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from cupy_rmsnorm import _kernel, _source, variants
from cupy_rmsnorm._kernel import DeviceProperties
from cupy_rmsnorm.variants import TABLE, Instance, Variant
from tests import backends, compare, emulator, inputs, oracle
from tests.emulator import build
from tests.emulator.install import UNIT

EPS = 1e-5
ARCH, SM_COUNT = 90, 4  # of the emulated GPU
PROPERTIES = DeviceProperties(ARCH, SM_COUNT)
ANY_SIZES = (1, 2, 7, 8, 24, 33, 257, 768, 1000, 4096, 5120, 16384)
HALF = 2.0**-11  # float16's unit of rounding
SUBNORMAL = 2.0**-25  # and the rounding of its smallest numbers


def sizes(variant: Variant) -> list[int]:
    """Every power of two that the variant admits; of any size, the ones that have failed."""
    if not variant.sizes.power_of_two:
        return [size for size in ANY_SIZES if size in variant.sizes]
    assert variant.sizes.maximum is not None
    powers = (1 << power for power in range(variant.sizes.maximum.bit_length()))
    return [size for size in powers if size in variant.sizes]


def is_pure_half(variant: Variant) -> bool:
    return variant.accumulation == "float16"


def _compile(members: list[Instance], checked: bool) -> Iterator[tuple[Instance, Any]]:
    source = members[0][0].source
    expressions = tuple(variant.name_expression(arguments) for variant, arguments in members)
    library = build.build(_source.load(source), expressions, (), checked)
    for member, expression in zip(members, expressions, strict=True):
        found = emulator.Function(library, expression, library.kernels[expression])
        emulator.check_parameters(found, _kernel.PARAMETERS[source])
        yield member, found


@contextlib.contextmanager
def emulated(checked: bool) -> Iterator[None]:
    """The emulator in the driver's place; `variants.load` compiles for it."""
    functions: dict[Any, Any] = {}

    def load(wanted: Iterable[Instance], device: int) -> None:
        build.runtime()
        units = variants.modules(wanted, device, UNIT)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for found in pool.map(lambda members: list(_compile(members, checked)), units):
                functions.update(((member, device), function) for member, function in found)

    with (
        mock.patch.object(variants, "load", load),
        mock.patch.object(variants, "_functions", functions),
        emulator.installed(arch=ARCH, sm_count=SM_COUNT, checked=checked),
    ):
        yield


def run(
    variant: Variant,
    backend: backends.Backend,
    x: np.ndarray,
    *,
    eps: float = EPS,
    layout: str = "contiguous",
) -> tuple[np.ndarray, Any, Any]:
    """The output between guard zones, and the gain and shift that it was given."""
    gain: Any = 0.75
    shift: Any = 0.3 if variant.norm == "layer" else None
    if variant.vector:
        gain = inputs.lay(inputs.weight(x.shape[-1], variant.dtype))
        if variant.norm == "layer":
            shift = inputs.lay(inputs.bias(x.shape[-1], variant.dtype))
    out = backend.empty(x.shape, variant.dtype, layout)
    parameters = [backend.input(value) for value in (gain, shift)]
    y = variant(backend.input(inputs.lay(x, layout)), *parameters, eps=eps, out=out)
    assert y is out
    backend.synchronize()
    backend.verify()
    return backend.numpy(y), gain, shift


def reference(
    variant: Variant, x: np.ndarray, gain: Any, shift: Any, eps: float = EPS
) -> tuple[np.ndarray, np.ndarray]:
    """The right output and how far a kernel may be from it."""
    forward = oracle.forward(x, gain, shift, norm=variant.norm, eps=eps)
    if not is_pure_half(variant):
        return forward.y.value, forward.y.bound(variant.dtype)
    return forward.y.value, half_bound(variant, x, forward, abs(gain), abs(shift or 0.0), eps)


def half_bound(
    variant: Variant, x: np.ndarray, right: oracle.Forward, gain: float, shift: float, eps: float
) -> np.ndarray:
    """What sums in float16 may lose, term by term, where nothing overflows.

    With u the unit of rounding and d the additions on one element's way into the sum, a sum of
    positive terms errs by (d + 1) u of itself, counting the rounding of each product. The mean, eps
    and their sum add 3 u and up to three roundings of a subnormal number; half of that relative
    error reaches rstd, which is itself rounded, like its product with x, like the gain and their
    product: 4 u. LayerNorm's mean errs by (d + 1) u mean|x|; that shifts every deviation and enters
    the variance squared; the deviations are rounded: 2 u of the variance.
    """
    held = variant.vec_size
    threads = x.shape[-1] // held
    d = {1: 0, 2: 1, 8: 4}[held] + math.log2(threads)
    wide = x.astype(np.float64)
    rows = right.rstd.value[..., None]
    mean_error = np.zeros_like(rows)
    squares = (d + 4) * HALF
    if variant.norm == "layer":
        mean_error = (d + 2) * HALF * np.abs(wide).mean(-1, keepdims=True)
        squares = squares + 2 * HALF + (mean_error * rows) ** 2
    relative = 0.5 * (squares + 3 * SUBNORMAL * rows**2) + 5 * HALF
    y = np.abs(right.y.value)
    return (
        gain * rows * mean_error
        + np.abs(right.xhat) * gain * relative * (1 + relative)
        + 2 * HALF * shift
        + HALF * y
        + 2 * SUBNORMAL * (1 + gain)
    )


def rows_for(variant: Variant, size: int, properties: DeviceProperties) -> int:
    """A few rows; for blocks that take several rows in turn, more rows than blocks."""
    if variant.geometry not in (variants._persistent, variants._async):
        return 3
    return variant.geometry(variant, size, 2**30, properties).grid + 5


@dataclass(frozen=True)
class Row:
    """A few rows of one size through one variant, held against the reference."""

    variant: Variant
    size: int

    @property
    def name(self) -> str:
        return f"{self.variant.norm}-{self.variant.name}-{self.size}"

    @property
    def instance(self) -> Instance:
        """What the emulated GPU runs."""
        arguments = self.variant.geometry(self.variant, self.size, 1, PROPERTIES).template_arguments
        return self.variant, arguments

    @property
    def checkable(self) -> bool:
        """Whether the emulator can tell this kernel's races from what it does on purpose.

        It takes the guard of a float16 array in shared memory, which C++ initialises, for shared
        memory; those kernels sum by block_sum, as those in float32 do. And in rms_norm_groups every
        lane of a warp writes the warp's sum.
        """
        return not is_pure_half(self.variant) and self.variant.template != "rms_norm_groups"

    def run(self, backend: backends.Backend, properties: DeviceProperties = PROPERTIES) -> None:
        # Sums of float16 overflow for the rows with a tag.
        kind = "normal" if is_pure_half(self.variant) else "row_tagged"
        rows = rows_for(self.variant, self.size, properties)
        x = inputs.array((rows, self.size), self.variant.dtype, kind)
        y, gain, shift = run(self.variant, backend, x)
        value, bound = reference(self.variant, x, gain, shift)
        compare.close(y, value, bound, f"{self.variant.name} at {self.size}")


# A short and a longer row of each variant.
ROWS = tuple(
    Row(variant, size)
    for variant in TABLE
    for size in dict.fromkeys((sizes(variant)[0], sizes(variant)[-1] // 8))
    if size in variant.sizes
)
