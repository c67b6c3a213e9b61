# SPDX-License-Identifier: Apache-2.0
"""One call of the library on any backend, and everything that its results must satisfy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_rmsnorm
from tests import compare, oracle
from tests.backends import Backend


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of a call, as NumPy arrays. With a residual it is a call of add_*."""

    x: np.ndarray
    norm: str = "rms"
    weight: Any = None
    bias: Any = None
    residual: np.ndarray | None = None
    eps: float = 1e-5
    weight_offset: float = 0.0
    cast: str = "once"
    per_head: bool = False
    axis: int | tuple[int, ...] = -1
    where: np.ndarray | None = None
    valid_rows: np.ndarray | None = None
    masked: str = "zero"
    groups: int = 1
    partial: int | None = None
    out_dtype: str | None = None

    def but(self, **changes: Any) -> Case:
        """This case with other arguments."""
        return dataclasses.replace(self, **changes)

    @property
    def ndim(self) -> int:
        """How many axes are normalised."""
        return len(self.axis) if isinstance(self.axis, tuple) else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.x.shape[: self.x.ndim - self.ndim]

    @property
    def computed(self) -> np.ndarray:
        """Which rows the masks leave."""
        rows = np.arange(int(np.prod(self.row_shape))).reshape(self.row_shape)
        computed = np.ones(self.row_shape, bool) if self.where is None else self.where
        if self.valid_rows is not None:
            computed = computed & (rows < int(self.valid_rows.reshape(())))
        return computed

    def split(self, array: Any) -> Any:
        """`array` with groups as an axis before its last one."""
        if not isinstance(array, np.ndarray):
            return array
        *leading, size = array.shape
        return array.reshape(*leading, self.groups, size // self.groups)

    def by_heads(self) -> Case:
        """The same call with each group as a head."""
        return self.but(
            x=self.split(self.x),
            weight=self.split(self.weight),
            bias=self.split(self.bias),
            residual=self.split(self.residual),
            where=np.repeat(self.computed[..., None], self.groups, axis=-1),
            valid_rows=None,
            per_head=True,
            groups=1,
        )

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        return self.row_shape if self.groups == 1 else (*self.row_shape, self.groups)

    @property
    def statistic_dtype(self) -> str:
        return oracle.accumulation(self.x).name

    def outputs(self, statistics: bool = False) -> dict[str, str]:
        """The outputs of the forward call, in their order, and their dtypes."""
        names = {"y": self.out_dtype or self.x.dtype.name}
        if self.residual is not None:
            names["residual_out"] = self.residual.dtype.name
        if statistics and self.norm == "layer":
            names["mean"] = self.statistic_dtype
        if statistics:
            names["rstd"] = self.statistic_dtype
        return names

    def shape(self, output: str) -> tuple[int, ...]:
        return self.statistic_shape if output in ("mean", "rstd") else self.x.shape

    def options(self, backend: Backend) -> dict[str, Any]:
        """The keyword arguments of forward and backward alike; those at their default are left out.

        eps is always given: its default is a test of its own.
        """
        options: dict[str, Any] = {"eps": self.eps}
        for name in ("weight_offset", "cast", "per_head", "axis", "groups", "partial"):
            if getattr(self, name) != getattr(Case, name):
                options[name] = getattr(self, name)
        for name in ("where", "valid_rows"):
            if getattr(self, name) is not None:
                options |= {name: backend.input(getattr(self, name)), "masked": self.masked}
        return options


PARAMETERS = {"y": "out", "residual_out": "residual_out", "mean": "mean_out", "rstd": "rstd_out"}


def forward(
    backend: Backend, case: Case, *, statistics: bool = False, **outputs: Any
) -> dict[str, np.ndarray]:
    """Call the public function of this case; its outputs by name.

    `outputs` are native arrays to write into, by the names of the results; a call must return those
    very objects.
    """
    name = ("add_" if case.residual is not None else "") + case.norm + "_norm"
    function = getattr(cupy_rmsnorm, name + ("_forward" if statistics else ""))
    arguments = [backend.input(case.x)]
    if case.residual is not None:
        arguments.append(backend.input(case.residual))
    arguments += [backend.input(case.weight), backend.input(case.bias)]
    options = case.options(backend)
    if case.out_dtype is not None:
        options["out_dtype"] = case.out_dtype
    options |= {PARAMETERS[output]: native for output, native in outputs.items()}
    results = function(*arguments, **options)
    names = case.outputs(statistics)
    results = (results,) if len(names) == 1 else results
    assert len(results) == len(names), f"{name} returned {len(results)} results, not {list(names)}"
    got = dict(zip(names, results, strict=True))
    for output, native in outputs.items():
        assert got[output] is native, f"{name} did not return the {output} that it was given"
    return {output: backend.numpy(result) for output, result in got.items()}


def check_forward(
    case: Case, got: dict[str, np.ndarray], before: dict[str, np.ndarray] | None = None
) -> None:
    """Assert promise 6, dtypes, shapes and masks; with the statistics also the rounding order.

    `before` is what outputs held before the call: NaN where it does not say.
    """
    __tracebackhide__ = True
    for output, dtype in case.outputs("rstd" in got).items():
        assert got[output].dtype.name == dtype, f"{output} is {got[output].dtype}, not {dtype}"
        assert got[output].shape == case.shape(output), f"{output} has shape {got[output].shape}"
    if case.groups > 1:
        check_forward(case.by_heads(), _split(case, got), _split(case, before or {}))
        return
    computed = case.computed
    _check_other_rows(case, got, before or {}, computed)
    # A row that is not computed may hold anything, and has no reference.
    row = computed.reshape(computed.shape + (1,) * case.ndim)
    x = np.where(row, case.x, np.ones_like(case.x))
    residual = case.residual
    if residual is not None:
        residual = np.where(row, residual, np.ones_like(residual))
    with np.errstate(over="ignore"):
        reference = oracle.forward(
            x,
            case.weight,
            case.bias,
            residual,
            norm=case.norm,
            eps=case.eps,
            weight_offset=case.weight_offset,
            cast=case.cast,
            ndim=case.ndim,
            exact_mean=got["y"].dtype == oracle.accumulation(case.x),
            partial=case.partial,
        )
    for output in ("y", "mean", "rstd"):
        if output in got:
            part: oracle.Reference = getattr(reference, output)
            bound = part.bound(got[output].dtype.name)
            compare.close(
                got[output][computed],
                part.value[computed],
                bound[computed],
                f"{output} of {case.norm}",
            )
    if residual is not None:
        exact = reference.residual_out
        compare.equal(got["residual_out"][computed], exact[computed], "residual_out")
    if "rstd" in got:
        exact = oracle.rounded_forward(
            x,
            np.where(computed, got["rstd"], 1),
            np.where(computed, got["mean"], 0) if "mean" in got else None,
            case.weight,
            case.bias,
            residual,
            weight_offset=case.weight_offset,
            cast=case.cast,
            ndim=case.ndim,
            out_dtype=got["y"].dtype.name,
        )
        compare.equal(got["y"][computed], exact[computed], f"y of {case.norm} given its statistics")


def _split(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """Results of a grouped call as those of `by_heads`; statistics are that already."""
    return {
        name: array if name in ("mean", "rstd") else case.split(array)
        for name, array in arrays.items()
    }


def _check_other_rows(
    case: Case, got: dict[str, np.ndarray], before: dict[str, np.ndarray], computed: np.ndarray
) -> None:
    for output, result in got.items():
        others = result[~computed]
        expected = np.zeros_like(others)
        if case.masked == "keep":
            expected = before.get(output, np.full_like(result, np.nan))[~computed]
        compare.equal(others, expected, f"{output} of rows that are not computed")


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What a backward call takes beside the case. With `added`, case.x is residual_out."""

    dout: np.ndarray
    added: bool = False
    dresidual_out: np.ndarray | None = None
    mean: np.ndarray | None = None
    rstd: np.ndarray | None = None
    need_dx: bool = True
    need_dweight: bool = True
    dweight_dtype: str | None = None
    x_dtype: str | None = None


def backward(
    backend: Backend, case: Case, given: Gradient, **outputs: Any
) -> dict[str, np.ndarray | None]:
    """Call the public backward function; its results by name, None where there is no gradient."""
    name = ("add_" if given.added else "") + case.norm + "_norm_backward"
    arguments = [backend.input(given.dout)]
    if given.added:
        arguments.append(backend.input(given.dresidual_out))
    arguments += [backend.input(case.x), backend.input(case.weight)]
    if case.norm == "layer":
        arguments.append(backend.input(given.mean))
    arguments.append(backend.input(given.rstd))
    options = case.options(backend)
    if case.bias is not None:
        options["bias"] = backend.input(case.bias)
    for option in ("need_dx", "need_dweight", "dweight_dtype", "x_dtype"):
        if getattr(given, option) != getattr(Gradient, option):
            options[option] = getattr(given, option)
    options |= {f"{output}_out": native for output, native in outputs.items()}
    results = getattr(cupy_rmsnorm, name)(*arguments, **options)
    names = ("dx", "dresidual", "dweight", "dbias") if given.added else ("dx", "dweight", "dbias")
    got = dict(zip(names, results, strict=True))
    for output, native in outputs.items():
        assert got[output] is native, f"{name} did not return the {output} that it was given"
    if given.added and (given.x_dtype or case.x.dtype.name) == case.x.dtype.name:
        assert got["dresidual"] is got["dx"]
    return {output: None if r is None else backend.numpy(r) for output, r in got.items()}


def check_backward(case: Case, given: Gradient, got: dict[str, np.ndarray | None]) -> None:
    """Assert that every gradient that exists is right, and that no other is there."""
    __tracebackhide__ = True
    if case.groups > 1:
        for output, result in got.items():
            shape = case.x.shape if output in ("dx", "dresidual") else case.x.shape[-1:]
            assert result is None or result.shape == shape, f"{output} has shape {result.shape}"
        arrays = {name: case.split(getattr(given, name)) for name in ("dout", "dresidual_out")}
        given = dataclasses.replace(given, **arrays)
        check_backward(case.by_heads(), given, _split(case, got))
        return
    weight, bias = case.weight, case.bias
    parameter_shape = case.x.shape[len(case.row_shape) - case.per_head :]
    reference = oracle.backward(
        given.dout,
        case.x,
        weight,
        mean=given.mean,
        rstd=given.rstd,
        dresidual_out=given.dresidual_out,
        norm=case.norm,
        eps=case.eps,
        weight_offset=case.weight_offset,
        cast=case.cast,
        ndim=case.ndim,
        computed=case.computed,
        weight_shape=parameter_shape,
        partial=case.partial,
    )
    weight_dtype = weight.dtype.name if isinstance(weight, np.ndarray) else None
    expected = {
        "dx": (reference.dx, (given.x_dtype or case.x.dtype.name) if given.need_dx else None),
        "dweight": (
            reference.dweight,
            (given.dweight_dtype or weight_dtype) if weight_dtype and given.need_dweight else None,
        ),
        "dbias": (reference.dbias, bias.dtype.name if isinstance(bias, np.ndarray) else None),
    }
    if given.added:
        expected["dresidual"] = (reference.dx, case.x.dtype.name if given.need_dx else None)
    assert got.keys() == expected.keys()
    for output, (part, dtype) in expected.items():
        result = got[output]
        if dtype is None:
            assert result is None, f"{output} was not asked for"
            continue
        assert result is not None, f"{output} is missing"
        assert result.dtype.name == dtype, f"{output} is {result.dtype}, not {dtype}"
        compare.close(result, part.value, part.bound(dtype), f"{output} of {case.norm}")
    if got["dx"] is not None:
        others = got["dx"][~case.computed]
        compare.equal(others, np.zeros_like(others), "dx of rows that are not computed")
