# SPDX-License-Identifier: Apache-2.0
"""Fused RMSNorm and LayerNorm for CuPy, torch, DLPack and NumPy arrays."""

from ._api import add_layer_norm, add_rms_norm, layer_norm, qk_norm, rms_norm
from ._api_backward import (
    add_layer_norm_backward,
    add_rms_norm_backward,
    layer_norm_backward,
    rms_norm_backward,
)
from ._api_forward import (
    add_layer_norm_forward,
    add_rms_norm_forward,
    layer_norm_forward,
    rms_norm_forward,
)
from ._tools import bind_layer_norm, bind_rms_norm, info, is_available, load_plans, warmup

__version__ = "0.1.0"

__all__ = [
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_layer_norm_forward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "add_rms_norm_forward",
    "bind_layer_norm",
    "bind_rms_norm",
    "info",
    "is_available",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "load_plans",
    "qk_norm",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "warmup",
]
