# SPDX-License-Identifier: Apache-2.0
"""torch.nn modules over the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _refuse
from ._api import add_rms_norm, layer_norm, qk_norm, rms_norm
from ._check import CASTS
from ._docs import Axis, CastOption

EPS32: float = torch.finfo(torch.float32).eps
EPS64: float = torch.finfo(torch.float64).eps
FLOAT64 = torch.float64


def eps_for(eps: float | None, x: Any) -> float:
    """`eps`, or where it is None what torch takes: epsilon of the dtype that rows are summed in."""
    if eps is None:
        return EPS64 if x.dtype is FLOAT64 else EPS32
    return eps


def axis_of(normalized_shape: tuple[int, ...]) -> Axis:
    """The trailing axes that are normalised together."""
    count = len(normalized_shape)
    return -1 if count == 1 else tuple(range(-count, 0))


def check_tensor(name: str, x: Any) -> None:
    """Refuse another library's arrays, for which a weight that requires grad would be blamed."""
    if not isinstance(x, torch.Tensor):
        _refuse.not_a_tensor(name, x)


def check_shape(x: Any, normalized_shape: tuple[int, ...]) -> None:
    """Refuse an x that does not end in the shape that the module was made for.

    Asked after an error, which names the weight, and beforehand only where there is none. Each
    forward writes that out: a function around its call would add to what every call costs the host.
    """
    _refuse.ends_in("x", x.shape, normalized_shape)


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """`torch.nn.RMSNorm`, computed by `cupy_rmsnorm.rms_norm`.

    Parameters, state_dict and what its arguments mean are torch's. Under autocast the output keeps
    x's dtype, where on a GPU torch's own module returns float32 by some releases (2.13, not 2.11).

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The trailing axes, which form one row together.
    eps : float, optional
        Added to the mean square. None is the machine epsilon of the dtype that rows are summed in:
        float32's, and float64's for float64.
    elementwise_affine : bool, default True
        Whether there is a weight.
    device, dtype : optional
        Of the weight; its dtype is independent of x's among float16, bfloat16 and float32.
    weight_offset : float, default 0.0
        Added to the weight in float32 before the multiplication (Gemma: 1.0). The weight begins at
        ``1 - weight_offset``.
    cast : {"once", "before_weight"}, default "once"
        "once" multiplies in float32 and rounds once (torch, Gemma). "before_weight" rounds the
        normalised value to x's dtype first (Llama in Hugging Face).

    Examples
    --------
    >>> import torch
    >>> from cupy_rmsnorm.torch import RMSNorm
    >>> norm = RMSNorm(4)
    >>> norm
    RMSNorm((4,), eps=None, elementwise_affine=True)
    >>> with torch.no_grad():
    ...     norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[0.3651, 0.7303, 1.0954, 1.4606]])
    """

    weight_offset: float = 0.0  # what torch's constructor sees when it resets the weight
    cast: CastOption = "once"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: float = 0.0,
        cast: CastOption = "once",
    ) -> None:
        _refuse.choice("cast", cast, CASTS)
        weight_offset = _refuse.offset(weight_offset, weighted=elementwise_affine)
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.cast = cast
        self._axis = axis_of(self.normalized_shape)
        if weight_offset:
            self.weight_offset = weight_offset
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that weight + weight_offset is 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Any) -> Any:
        """Normalise `x`."""
        check_tensor("x", x)
        weight = self.weight
        if weight is None:
            check_shape(x, self.normalized_shape)
        try:
            return rms_norm(
                x,
                weight,
                eps=eps_for(self.eps, x),
                weight_offset=self.weight_offset,
                axis=self._axis,
                cast=self.cast,
            )
        except ValueError:
            check_shape(x, self.normalized_shape)
            raise

    def extra_repr(self) -> str:
        """torch's, and the options that are not torch's where they are set."""
        text: str = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.cast != "once":
            text += f", cast={self.cast!r}"
        return text


class AddRMSNorm(RMSNorm):
    """Add a residual, then normalise the sum: `cupy_rmsnorm.add_rms_norm` as a module.

    The sum is formed in float32 (float64 for float64) and normalised unrounded; residual_out is
    that sum, rounded once to residual's dtype.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype, weight_offset, cast
        As in `RMSNorm`.

    Examples
    --------
    >>> import torch
    >>> from cupy_rmsnorm.torch import AddRMSNorm
    >>> norm = AddRMSNorm(4)
    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> with torch.no_grad():
    ...     norm(x, x)
    (tensor([[0.3651, 0.7303, 1.0954, 1.4606]]), tensor([[2., 4., 6., 8.]]))
    """

    def forward(  # type: ignore[override]  # modules are called with what their own forward takes
        self, x: Any, residual: Any
    ) -> tuple[Any, Any]:
        """The normalised sum, and the sum."""
        check_tensor("x", x)
        check_tensor("residual", residual)
        weight = self.weight
        if weight is None:
            check_shape(x, self.normalized_shape)
        try:
            return add_rms_norm(
                x,
                residual,
                weight,
                eps=eps_for(self.eps, x),
                weight_offset=self.weight_offset,
                axis=self._axis,
                cast=self.cast,
            )
        except ValueError:
            check_shape(x, self.normalized_shape)
            raise


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """`torch.nn.LayerNorm`, computed by `cupy_rmsnorm.layer_norm`.

    Parameters, state_dict and what its arguments mean are torch's. Under autocast the output keeps
    x's dtype, where on a GPU torch's own module returns float32.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The trailing axes, which form one row together.
    eps : float, default 1e-5
        Added to the variance.
    elementwise_affine : bool, default True
        Whether there is a weight.
    bias : bool, default True
        Whether there is a bias beside the weight.
    device, dtype : optional
        Of weight and bias; their dtype is independent of x's among float16, bfloat16 and float32.

    Examples
    --------
    >>> import torch
    >>> from cupy_rmsnorm.torch import LayerNorm
    >>> norm = LayerNorm(4, bias=False)
    >>> with torch.no_grad():
    ...     norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )
        self._axis = axis_of(self.normalized_shape)

    def forward(self, input: Any) -> Any:
        """Normalise `input`."""
        check_tensor("input", input)
        weight = self.weight
        if weight is None:
            check_shape(input, self.normalized_shape)
        try:
            return layer_norm(input, weight, self.bias, eps=self.eps, axis=self._axis)
        except ValueError:
            check_shape(input, self.normalized_shape)
            raise


class QKNorm(torch.nn.Module):  # type: ignore[misc]
    """Normalise the heads of q and k: `cupy_rmsnorm.qk_norm` as a module.

    Parameters
    ----------
    head_size : int
        The size of q's and k's last axis.
    eps : float, optional
        As in `RMSNorm`.
    elementwise_affine : bool, default True
        Whether there are weights, ``q_weight`` and ``k_weight``.
    device, dtype : optional
        Of the weights; their dtype is independent of q's among float16, bfloat16 and float32.
    heads : pair of int, optional
        ``(q_heads, k_heads)``, for a weight of each head's own: q is then
        ``(..., q_heads, head_size)`` and k ``(..., k_heads, head_size)``. Without it all heads of q
        share one weight, and those of k another.
    weight_offset, cast
        As in `RMSNorm`.

    Examples
    --------
    >>> import torch
    >>> from cupy_rmsnorm.torch import QKNorm
    >>> norm = QKNorm(2, heads=(3, 1))
    >>> norm
    QKNorm(2, eps=None, elementwise_affine=True, heads=(3, 1))
    >>> with torch.no_grad():
    ...     q, k = norm(torch.ones(5, 3, 2), torch.ones(5, 1, 2))
    >>> q.shape, k.shape
    (torch.Size([5, 3, 2]), torch.Size([5, 1, 2]))
    """

    def __init__(
        self,
        head_size: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        heads: tuple[int, int] | None = None,
        weight_offset: float = 0.0,
        cast: CastOption = "once",
    ) -> None:
        head_size = _refuse.count("head_size", head_size)
        if heads is not None:
            heads = _refuse.pair_of_counts("heads", heads, "q's and k's number of heads")
        _refuse.choice("cast", cast, CASTS)
        super().__init__()
        self.head_size = head_size
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.heads = heads
        self.weight_offset = _refuse.offset(weight_offset, weighted=elementwise_affine)
        self.cast: CastOption = cast
        for number, name in enumerate(("q_weight", "k_weight")):
            weight = None
            if elementwise_affine:
                shape = (head_size,) if heads is None else (heads[number], head_size)
                weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights so that weight + weight_offset is 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.q_weight, 1.0 - self.weight_offset)
            torch.nn.init.constant_(self.k_weight, 1.0 - self.weight_offset)

    def forward(self, q: Any, k: Any) -> tuple[Any, Any]:
        """q and k, normalised."""
        check_tensor("q", q)
        check_tensor("k", k)
        q_weight = self.q_weight
        if q_weight is None:
            self._check_heads(q, k)
        try:
            return qk_norm(
                q,
                k,
                q_weight,
                self.k_weight,
                eps=eps_for(self.eps, q),
                weight_offset=self.weight_offset,
                cast=self.cast,
            )
        except ValueError:
            self._check_heads(q, k)
            raise

    def _check_heads(self, q: Any, k: Any) -> None:
        """As `check_shape`."""
        heads = self.heads if self.elementwise_affine else None
        for number, (name, x) in enumerate((("q", q), ("k", k))):
            axes = () if heads is None else (heads[number],)
            _refuse.ends_in(name, x.shape, (*axes, self.head_size))

    def extra_repr(self) -> str:
        """Head size and options."""
        text = f"{self.head_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        if self.heads is not None:
            text += f", heads={self.heads}"
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.cast != "once":
            text += f", cast={self.cast!r}"
        return text
