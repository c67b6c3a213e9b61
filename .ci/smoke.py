# SPDX-License-Identifier: Apache-2.0
"""An installed package, used from outside the checkout: python smoke.py ROOT CHECKOUT.

ROOT is the folder that the package must come from, CHECKOUT has the sources it must bring.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import cupy_rmsnorm
from cupy_rmsnorm import _source


def main(root: Path, checkout: Path) -> None:
    package = Path(cupy_rmsnorm.__file__).resolve()
    assert package.is_relative_to(root), f"{package} is not below {root}"

    kernels = _source.directory().resolve()
    assert kernels.is_relative_to(root), f"{kernels} is not below {root}"
    wanted = {path.name: path.read_bytes() for path in (checkout / "kernels_cu").glob("*.cu*")}
    brought = {path.name: path.read_bytes() for path in kernels.glob("*.cu*")}
    assert wanted, "the checkout has no kernels"
    assert brought == wanted, f"kernels differ: {sorted(brought)}, {sorted(wanted)}"

    for name in ("py.typed", "data/smollm2_layer22.npz"):
        assert (package.parent / name).is_file(), f"{name} is missing"

    x = np.array([[1, 2, 3, 4], [-5, 6, -7, 8]], np.float16)
    weight = np.array([1, 2, 0.5, -1], np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight
    y = cupy_rmsnorm.rms_norm(x, weight)
    assert y.dtype == np.float16
    assert np.abs(y - expected).max() < 1e-3

    version = ".".join(map(str, sys.version_info[:3]))
    print(f"cupy_rmsnorm {cupy_rmsnorm.__version__} from {package.parent}, Python {version}: works")


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
