# SPDX-License-Identifier: Apache-2.0
"""`warmup` builds what coming calls launch: held against calls on the way to their launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _cuda_warmup, _kernel
from cupy_rmsnorm._check_tools import check_warmup
from cupy_rmsnorm._kernel import DeviceProperties, Specialisation
from tests.recorder import recorded

SM_COUNT = 132
ROWS = (1, 2, 100, 131, 132, 133, 300, 1000, 5000, 20000)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"masked": "zero"},
    {"per_head": True},
    {"weight_dtype": None},
    {"cast": "before_weight", "bias_dtype": "float16"},
)


def launched(op: str, rows: int, hidden_size: int, options: dict[str, Any]) -> set[Specialisation]:
    """What a real call takes."""
    shape = (rows, 2, hidden_size) if options.get("per_head") else (rows, hidden_size)
    x = np.ones(shape, np.float32)
    parameters: dict[str, Any] = {}
    weight = None
    if options.get("weight_dtype", "float32"):
        weight = np.ones(shape[1:], np.float32)
    if "bias_dtype" in options:
        parameters["bias"] = np.ones(shape[1:], options["bias_dtype"])
    if "masked" in options:
        parameters |= {"where": np.ones(shape[:-1], bool), "masked": options["masked"]}
        parameters["valid_rows"] = np.array(rows, np.int32)
    parameters |= {name: options[name] for name in ("per_head", "cast") if name in options}
    with recorded(90, SM_COUNT) as launches:
        if op.endswith("_backward"):
            forward = [x, x] if op.startswith("add_") else [x]
            getattr(norms, op)(x, *forward, weight, **parameters)
        elif op == "qk_norm":
            norms.qk_norm(x, x, weight, weight, **parameters)
        elif op.startswith("add_"):
            getattr(norms, op)(x, x, weight, **parameters)
        else:
            getattr(norms, op)(x, weight, **parameters)
    return {launch.specialisation for launch in launches}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "op",
    [
        "rms_norm",
        "layer_norm_forward",
        "add_rms_norm",
        "rms_norm_backward",
        "add_layer_norm_backward",
    ],
)
def test_calls_find_their_kernels(
    op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = DeviceProperties(90, SM_COUNT)
    monkeypatch.setattr(_kernel, "device_properties", lambda device: properties)
    for hidden_size in (64, 1000):
        dtypes = {"dtype": "float32", "weight_dtype": "float32", "bias_dtype": None}
        dtypes |= {name: options[name] for name in dtypes if name in options}
        for name in ("residual_dtype", "out_dtype", "dout_dtype", "dweight_dtype"):
            dtypes[name] = None
        others = [options.get("cast", "once"), options.get("per_head", False)]
        call = check_warmup(op, hidden_size, *others, options.get("masked"), **dtypes)
        built = {specialisation for specialisation, _ in _cuda_warmup.specialisations(call, 0)}
        for rows in ROWS:
            missing = launched(op, rows, hidden_size, options) - built
            assert not missing, (rows, missing)
