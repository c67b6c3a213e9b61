# SPDX-License-Identifier: Apache-2.0
"""For torch: modules, and model patching. Import it where you need it: it brings torch."""

from ._torch_modules import AddRMSNorm, LayerNorm, QKNorm, RMSNorm
from ._torch_patch import PatchReport, patch, unpatch

__all__ = [
    "AddRMSNorm",
    "LayerNorm",
    "PatchReport",
    "QKNorm",
    "RMSNorm",
    "patch",
    "unpatch",
]
