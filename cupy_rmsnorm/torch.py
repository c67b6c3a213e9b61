# SPDX-License-Identifier: Apache-2.0
"""For torch: modules, and model patching. Import it where you need it: it brings torch."""

try:
    from ._torch_modules import AddRMSNorm, LayerNorm, QKNorm, RMSNorm
    from ._torch_patch import PatchReport, patch, unpatch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "cupy_rmsnorm.torch needs torch; run: pip install torch"
    raise ModuleNotFoundError(message, name="torch") from None

__all__ = [
    "AddRMSNorm",
    "LayerNorm",
    "PatchReport",
    "QKNorm",
    "RMSNorm",
    "patch",
    "unpatch",
]
