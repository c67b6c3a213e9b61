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

from . import _torch_autograd, _torch_ops
from ._api import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ._api_backward import add_layer_norm_backward, add_rms_norm_backward
from ._api_forward import layer_norm_forward, rms_norm_forward
from ._call import Norm
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
    them; in `_parameters`, which is quicker than ``module.weight``. One that is not there is
    parametrised, or None.
    """

    __slots__ = ("eps", "module")
    forward: Callable[..., Any]
    kind: Norm = "rms"

    def __init__(self, module: Any, eps: Any) -> None:
        self.module = module
        self.eps = eps

    def norm(self, x: Any, weight: Any) -> Any:
        """What `forward` returns, by this library."""
        return rms_norm(x, weight, **self.options(x))

    def options(self, x: Any) -> dict[str, Any]:
        """What the functions above are told where x has the weight's dtype."""
        raise NotImplementedError

    def weight(self) -> Any:
        weight = self.module._parameters.get("weight")
        return self.module.weight if weight is None else weight

    def bias(self) -> Any:
        return None

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
        """`norm` of ``x + residual``, and that sum.

        None where this library refuses the call, or would return other dtypes.
        """
        weight = self.weight()
        if not _of_one_dtype(x, residual, weight) or x.shape != residual.shape:
            return None
        try:
            add_norm = add_rms_norm if self.kind == "rms" else add_layer_norm
            return add_norm(x, residual, weight, self.bias(), **self.options(x))
        except (TypeError, ValueError):  # before anything is computed
            return None

    def run_beside(self, x: Any) -> Any:
        """`norm` of x, and x as another result of the same node.

        None as in `run_added`, where x has no gradient to add, and for torch.jit.trace and
        torch.func, which do not see such a node.
        """
        weight = self.weight()
        if not _of_one_dtype(x, x, weight) or not x.requires_grad:
            return None
        if torch.jit.is_tracing():
            return None
        if torch.compiler.is_compiling():
            options = {**BESIDE_OPTIONS, **self.options(x)}
            return BESIDE(self.kind, x, weight, self.bias(), *options.values())
        if torch._C._are_functorch_transforms_active():
            return None
        try:
            return _Beside.apply(self.kind, x, weight, self.bias(), self.options(x), False)
        except (TypeError, ValueError):  # before anything is computed
            return None


class _Beside(_torch_autograd.Node):
    """The node of a norm beside its own x: backward adds the gradient of that."""

    @staticmethod
    def forward(
        ctx: Any, kind: Norm, x: Any, weight: Any, bias: Any, options: dict[str, Any], view: bool
    ) -> Any:
        norm_forward = rms_norm_forward if kind == "rms" else layer_norm_forward
        y, *statistics = norm_forward(x, weight, bias, **options)
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.set_materialize_grads(False)
        ctx.kind = kind
        ctx.options = {name: value for name, value in options.items() if name != "out_dtype"}
        # x itself would come out as a view, which nothing may write to. Where torch compiles it has
        # to be one: a view of it that leaves the graph is made anew there, by what made it in here,
        # and a gradient does not come past detach.
        return y, x.view_as(x) if view else x.detach()

    @staticmethod
    def gradients(ctx: Any, saved: tuple[Any, ...], *douts: Any) -> tuple[Any, ...]:
        dout, dbeside = douts
        if dout is None:
            return None, dbeside, None, None, None, None
        x, weight, bias, *statistics = saved
        _, need_dx, need_dweight, need_dbias, *_ = ctx.needs_input_grad
        norm_backward = add_rms_norm_backward if ctx.kind == "rms" else add_layer_norm_backward
        dx, _, dweight, dbias = norm_backward(
            dout,
            dbeside,
            x,
            weight,
            *statistics,
            bias=bias if need_dbias else None,
            need_dx=need_dx,
            need_dweight=need_dweight,
            **ctx.options,
        )
        return None, dx, dweight, dbias, None, None


# What an operator knows of the options.
BESIDE_OPTIONS = {"eps": 0.0, "weight_offset": 0.0, "axis": -1, "cast": "once", "out_dtype": None}


def _norm_beside(kind: Norm, x: Any, weight: Any, bias: Any, *values: Any) -> Any:
    options = dict(zip(BESIDE_OPTIONS, values, strict=True))
    return _Beside.apply(kind, x, weight, bias, options | {"axis": tuple(options["axis"])}, True)


# The node as an operator, which dynamo takes as it is; what compiles then sees the node's own
# operators. Of an operator whose autograd is registered no result may be an input.
BESIDE = _torch_ops.define_composite(
    "norm_beside",
    "str kind, Tensor(a) x, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
    "int[1] axis, str cast, ScalarType? out_dtype",
    "(Tensor y, Tensor(a) beside)",
    _norm_beside,
)


def _of_one_dtype(x: Any, other: Any, weight: Any) -> bool:
    """Whether these are tensors that may be fused; a weight may be None."""
    tensors = (x, other) if weight is None else (x, other, weight)
    if not all(isinstance(t, torch.Tensor) and t.dtype is x.dtype for t in tensors):
        return False
    # As in `run`.
    return not torch.compiler.is_compiling() or _taken(x, weight)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Whether dynamo can tell that it is within torch.func (elsewhere an operator refuses), and what a
# method is bound to.
TRANSFORMS_ARE_TRACED = METHODS_ARE_TRACED = TORCH >= (2, 8)


def _taken(x: Any, weight: Any) -> bool:
    if TRANSFORMS_ARE_TRACED and torch._C._are_functorch_transforms_active():
        return False
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

    def options(self, x: Any) -> dict[str, Any]:
        return {"eps": self.eps, "cast": "before_weight"}


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

    def options(self, x: Any) -> dict[str, Any]:
        return {"eps": self.eps}


class GemmaForward(Replacement):
    """Multiply by ``1 + weight`` in float32, then round to x's dtype."""

    __slots__ = ()

    def forward(self, x: Any) -> Any:
        return self.run(x)

    def options(self, x: Any) -> dict[str, Any]:
        return {"eps": self.eps, "weight_offset": 1.0}


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

    def options(self, x: Any) -> dict[str, Any]:
        if self.weight() is None:
            check_shape(x, self.module.normalized_shape)
        dtype = _out_dtype(x) if AUTOCASTS_RMS_NORM else None
        return {"eps": eps_for(self.eps, x), "axis": self.axis, "out_dtype": dtype}


class TorchLayerForward(TorchForward):
    """torch.nn.LayerNorm, autocast included."""

    __slots__ = ()
    kind = "layer"

    def forward(self, input: Any) -> Any:
        return self.run(input)

    def norm(self, x: Any, weight: Any) -> Any:
        return layer_norm(x, weight, self.bias(), **self.options(x))

    def options(self, x: Any) -> dict[str, Any]:
        if self.weight() is None:
            check_shape(x, self.module.normalized_shape)
        return {"eps": self.eps, "axis": self.axis, "out_dtype": _out_dtype(x)}

    def bias(self) -> Any:
        bias = self.module._parameters.get("bias")
        return self.module.bias if bias is None else bias


def _out_dtype(x: Any) -> Any:
    """The dtype that autocast gives the norm of x on the GPU; None: x's own."""
    if torch.is_autocast_enabled() and x.is_cuda and x.dtype is not torch.float64:
        return FLOAT32
    return None
