# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of a norm's forward, for `patch`: each norm by its own semantics.

A patched module keeps its class, parameters and hooks. What changes is one attribute of the
instance, ``forward``: a bound method of an object below that holds the module. Copies and pickles
of the model carry objects that hold their own modules, and torch.compile compiles once for all
layers: of a bound method it asks what it does, of another callable whether it is the same object.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from ._api import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ._torch_modules import axis_of, check_shape, eps_for

FLOAT32 = torch.float32
# The dtypes of x and weight that an operator takes together.
TAKEN = {
    (torch.float64, torch.float64),
    *itertools.product((torch.float16, torch.bfloat16, FLOAT32), repeat=2),
}

# On a GPU autocast returns layer_norm in float32, and rms_norm by some releases of torch only.
AUTOCASTS_RMS_NORM = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::rms_norm", "AutocastCUDA"
)


class Replacement:
    """What stands in a forward's place. `forward` names its argument as the one that it replaces.

    Parameters are looked up at each call, since training, `load_state_dict` and `to` may replace
    them; in `_parameters`, which takes a tenth of the time of ``module.weight``. One that is not
    there is parametrised, or None.
    """

    __slots__ = ("eps", "module")
    forward: Callable[..., Any]

    def __init__(self, module: Any, eps: Any) -> None:
        self.module = module
        self.eps = eps

    def norm(self, x: Any, weight: Any) -> Any:
        """What `forward` returns, by this library."""
        raise NotImplementedError

    def add_norm(self, x: Any, residual: Any, weight: Any) -> Any:
        """`norm` of ``x + residual``, all of weight's dtype, and that sum."""
        raise NotImplementedError

    def weight(self) -> Any:
        weight = self.module._parameters.get("weight")
        return self.module.weight if weight is None else weight

    def run(self, x: Any) -> Any:
        """`norm`, or the module's own forward where this library refuses the call.

        That may compute it (other dtypes, devices and layouts), or says why not in its own words.
        """
        weight = self.weight()
        # Nothing would catch what an operator raises once it is compiled.
        if not torch.compiler.is_compiling() or _taken(x, weight):
            try:
                return self.norm(x, weight)
            except (TypeError, ValueError):  # before anything is computed
                pass
        return type(self.module).forward(self.module, x)

    def run_added(self, x: Any, residual: Any) -> Any:
        """`add_norm`; None where this library refuses the call, or would give other dtypes."""
        weight = self.weight()
        tensors = (x, residual) if weight is None else (x, residual, weight)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not x.dtype:
                return None
        # Nothing would catch what an operator raises once it is compiled.
        if x.shape != residual.shape or (torch.compiler.is_compiling() and not _taken(x, weight)):
            return None
        try:
            return self.add_norm(x, residual, weight)
        except (TypeError, ValueError):  # before anything is computed
            return None


def _taken(x: Any, weight: Any) -> bool:
    return (x.dtype, x.dtype if weight is None else weight.dtype) in TAKEN


class LlamaForward(Replacement):
    """Round to x's dtype, then multiply: ``weight * xhat.to(x.dtype)``."""

    __slots__ = ()

    def forward(self, hidden_states: Any) -> Any:
        return self.run(hidden_states)

    def norm(self, x: Any, weight: Any) -> Any:
        dtype = x.dtype
        if weight.dtype is dtype:
            return rms_norm(x, weight, eps=self.eps, cast="before_weight")
        promoted = torch.promote_types(dtype, weight.dtype)
        return rms_norm(x, weight, eps=self.eps, cast="before_weight", out_dtype=promoted)

    def add_norm(self, x: Any, residual: Any, weight: Any) -> Any:
        return add_rms_norm(x, residual, weight, eps=self.eps, cast="before_weight")


class T5Forward(LlamaForward):
    """Round to a 16-bit weight's dtype, then multiply: the output has the weight's dtype.

    Where x is float32 and the weight is not, the first of these two roundings is left out.
    """

    __slots__ = ()

    def norm(self, x: Any, weight: Any) -> Any:
        dtype = weight.dtype
        if x.dtype is dtype:
            return rms_norm(x, weight, eps=self.eps, cast="before_weight")
        return rms_norm(x, weight, eps=self.eps, out_dtype=dtype)


class OnceForward(Replacement):
    """Multiply in float32, then round to x's dtype."""

    __slots__ = ()

    def forward(self, hidden_states: Any) -> Any:
        return self.run(hidden_states)

    def norm(self, x: Any, weight: Any) -> Any:
        return rms_norm(x, weight, eps=self.eps)

    def add_norm(self, x: Any, residual: Any, weight: Any) -> Any:
        return add_rms_norm(x, residual, weight, eps=self.eps)


class GemmaForward(Replacement):
    """Multiply by ``1 + weight`` in float32, then round to x's dtype."""

    __slots__ = ()

    def forward(self, x: Any) -> Any:
        return self.run(x)

    def norm(self, x: Any, weight: Any) -> Any:
        return rms_norm(x, weight, eps=self.eps, weight_offset=1.0)

    def add_norm(self, x: Any, residual: Any, weight: Any) -> Any:
        return add_rms_norm(x, residual, weight, eps=self.eps, weight_offset=1.0)


class TorchForward(Replacement):
    """What torch's own norms share."""

    __slots__ = ("axis",)

    def __init__(self, module: Any, eps: Any) -> None:
        super().__init__(module, eps)
        self.axis = axis_of(module.normalized_shape)


class TorchRMSForward(TorchForward):
    """torch.nn.RMSNorm, autocast included."""

    __slots__ = ()

    def forward(self, x: Any) -> Any:
        return self.run(x)

    def norm(self, x: Any, weight: Any) -> Any:
        if weight is None:
            check_shape(x, self.module.normalized_shape)
        dtype = _out_dtype(x) if AUTOCASTS_RMS_NORM else None
        return rms_norm(x, weight, eps=eps_for(self.eps, x), axis=self.axis, out_dtype=dtype)

    def add_norm(self, x: Any, residual: Any, weight: Any) -> Any:
        if weight is None:
            check_shape(x, self.module.normalized_shape)
        dtype = _out_dtype(x) if AUTOCASTS_RMS_NORM else None
        eps = eps_for(self.eps, x)
        return add_rms_norm(x, residual, weight, eps=eps, axis=self.axis, out_dtype=dtype)


class TorchLayerForward(TorchForward):
    """torch.nn.LayerNorm, autocast included."""

    __slots__ = ()

    def forward(self, input: Any) -> Any:
        return self.run(input)

    def norm(self, x: Any, weight: Any) -> Any:
        if weight is None:
            check_shape(x, self.module.normalized_shape)
        dtype = _out_dtype(x)
        return layer_norm(x, weight, self.bias(), eps=self.eps, axis=self.axis, out_dtype=dtype)

    def add_norm(self, x: Any, residual: Any, weight: Any) -> Any:
        if weight is None:
            check_shape(x, self.module.normalized_shape)
        return add_layer_norm(
            x,
            residual,
            weight,
            self.bias(),
            eps=self.eps,
            axis=self.axis,
            out_dtype=_out_dtype(x),
        )

    def bias(self) -> Any:
        bias = self.module._parameters.get("bias")
        return self.module.bias if bias is None else bias


def _out_dtype(x: Any) -> Any:
    """The dtype that autocast gives the norm of x on the GPU; None: x's own."""
    if torch.is_autocast_enabled() and x.is_cuda and x.dtype is not torch.float64:
        return FLOAT32
    return None
