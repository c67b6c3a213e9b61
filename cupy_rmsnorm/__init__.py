# SPDX-License-Identifier: Apache-2.0
"""Fused RMSNorm and LayerNorm for CuPy, torch, DLPack and NumPy arrays."""

from ._api import rms_norm

__version__ = "0.1.0"

__all__ = ["rms_norm"]
