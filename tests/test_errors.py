# SPDX-License-Identifier: Apache-2.0
"""Every error: its type, and a message that names the argument, the rule and what came."""

from __future__ import annotations

import array
import inspect
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_rmsnorm as norms

F32 = np.float32
X = np.arange(1, 25, dtype=F32).reshape(2, 3, 4)
X16 = X.astype(np.float16)
X64 = X.astype(np.float64)
ROWS = X.shape[:-1]
W = np.array([1, -2, 0.5, 3], F32)
RESIDUAL = X[::-1].copy()
DOUT = X + 1
STATISTIC = np.ones(ROWS, F32)


def new(shape: tuple[int, ...] = X.shape, dtype: Any = F32) -> np.ndarray:
    return np.empty(shape, dtype)


def read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.flags.writeable = False
    return values


def case(
    function: Callable[..., Any], error: type[Exception], message: str, *args: Any, **options: Any
) -> Any:
    return pytest.param(
        function, error, message, args, options, id=f"{function.__name__}: {message}"
    )


rms, layer, add = norms.rms_norm, norms.layer_norm, norms.add_rms_norm
rms_forward, layer_forward = norms.rms_norm_forward, norms.layer_norm_forward
rms_backward, layer_backward = norms.rms_norm_backward, norms.layer_norm_backward
add_backward, qk = norms.add_rms_norm_backward, norms.qk_norm

ROW = "float16, bfloat16, float32 or float64"
BESIDE = "float16, bfloat16 or float32 with a float32 x"
TRAILING = "axis must be -1 or a tuple of trailing axes such as (-2, -1), got "

X_CASES = [
    case(rms, TypeError, "x must be an array, got list", [1.0, 2.0]),
    case(rms, TypeError, "x must be an array, got float", 1.0),
    case(rms, TypeError, "x must be an array, got NoneType", None),
    case(rms, TypeError, "x must be an array, got numpy.float32", np.float32(1)),
    case(rms, TypeError, "x must be an array, got bytes", b"1234"),
    case(rms, TypeError, "x must be an array, got type", np.ndarray),
    case(rms, TypeError, f"x must be {ROW}, got int32", X.astype(np.int32)),
    case(rms, TypeError, f"x must be {ROW}, got bool", X.astype(bool)),
    case(rms, TypeError, f"x must be {ROW}, got complex64", X.astype(np.complex64)),
    case(rms, TypeError, f"x must be {ROW}, got object", X.astype(object)),
    case(rms, TypeError, f"x must be {ROW}, got void64", np.zeros((2, 2), "f4,f4")),
    case(rms, TypeError, f"x must be {ROW}, got str32", np.zeros((2, 2), "U1")),
    case(rms, TypeError, f"x must be {ROW}, got int64", array.array("q", [1, 2])),
    case(
        rms,
        TypeError,
        f"x must be {ROW}, got void16 (a bfloat16 file loads so: use x.view(ml_dtypes.bfloat16))",
        X.astype(ml_dtypes.bfloat16).view("V2"),
    ),
    case(rms, TypeError, f"x must be {ROW}, got void", np.zeros((2, 2), "V0")),
    case(
        rms,
        TypeError,
        'x must be in native byte order, got >f4; x.astype(x.dtype.newbyteorder("=")) converts it',
        X.astype(">f4"),
    ),
    case(rms, TypeError, "x must be a plain array, got a masked array", np.ma.array(X)),
    case(rms, ValueError, "x must have at least one axis, got shape ()", np.array(1, F32)),
    case(rms, ValueError, "x must have a hidden size of at least 1, got shape (2, 0)", new((2, 0))),
    case(
        rms,
        ValueError,
        "x must have a hidden size of at least 1, got shape (3, 0, 4)",
        new((3, 0, 4)),
        axis=(-2, -1),
    ),
]

PARAMETER_CASES = [
    case(rms, ValueError, "weight must have shape (4,), got (5,)", X, new((5,))),
    case(rms, ValueError, "weight must have shape (4,), got (3,)", X, new((3,))),
    case(rms, ValueError, "weight must have shape (4,), got (1,)", X, new((1,))),
    case(rms, ValueError, "weight must have shape (4,), got (1, 4)", X, new((1, 4))),
    case(rms, ValueError, "weight must have shape (4,), got (4, 1)", X, new((4, 1))),
    case(rms, ValueError, "weight must have shape (4,), got (3, 4)", X, new((3, 4))),
    case(rms, ValueError, "weight must have shape (3, 4), got (4,)", X, W, per_head=True),
    case(rms, ValueError, "weight must have shape (3, 4), got (12,)", X, new((12,)), axis=(-2, -1)),
    case(rms, ValueError, "bias must have shape (4,), got (5,)", X, W, new((5,))),
    case(rms, TypeError, f"weight must be {BESIDE}, got int32", X, W.astype(np.int32)),
    case(rms, TypeError, f"weight must be {BESIDE}, got bool", X, W.astype(bool)),
    case(rms, TypeError, f"weight must be {BESIDE}, got float64", X, W.astype(np.float64)),
    case(
        rms,
        TypeError,
        "weight must be float16, bfloat16 or float32 with a float16 x, got int64",
        X16,
        W.astype(np.int64),
    ),
    case(rms, TypeError, "weight must be float64 with a float64 x, got float32", X64, W),
    case(rms, TypeError, f"bias must be {BESIDE}, got uint8", X, W, W.astype(np.uint8)),
    case(
        rms,
        TypeError,
        "weight must be an array of shape (4,) or a Python number, got a 0-d array",
        X,
        np.array(2, F32),
    ),
    *(
        case(
            rms,
            TypeError,
            f"weight must be an array or a real number, got {type(shape).__name__} "
            "(the normalised shape follows from x and axis)",
            X,
            shape,
        )
        for shape in ((4,), [4])
    ),
    case(rms, TypeError, "weight must be an array or a real number, got list", X, [1.0] * 4),
    case(rms, TypeError, "weight must be an array or a real number, got bool", X, True),
    case(rms, TypeError, "weight must be an array or a real number, got complex", X, 1j),
    case(rms, TypeError, "weight must be an array or a real number, got str", X, "ones"),
    case(rms, TypeError, "weight must be a plain array, got a masked array", X, np.ma.array(W)),
    case(rms, ValueError, "weight must be finite, got nan", X, float("nan")),
    case(rms, ValueError, "weight must be finite, got inf", X, 10**400),
    case(rms, ValueError, "weight must be finite in float32, got 1e+39", X, 1e39),
    case(rms, TypeError, "bias must be an array or a real number, got tuple", X, W, (4,)),
    *(
        case(
            function,
            TypeError,
            "bias must be an array unless weight is a number, got 0.01: eps goes by name, eps=0.01",
            *arguments,
            0.01,
        )
        for function, *arguments in ((rms, X, W), (layer, X, None), (add, X, RESIDUAL, W))
    ),
    case(rms_backward, TypeError, "bias must be an array unless weight is a ", DOUT, X, W, bias=1),
    case(add, TypeError, "residual must be an array, got NoneType", X, None),
    case(add, ValueError, "residual must have shape (2, 3, 4), got (3, 4)", X, RESIDUAL[0]),
    case(add, TypeError, f"residual must be {BESIDE}, got float64", X, X64),
]

OPTION_CASES = [
    case(rms, TypeError, "eps must be a real number, got None", X, eps=None),
    case(rms, TypeError, "eps must be a real number, got '1e-6'", X, eps="1e-6"),
    case(rms, TypeError, "eps must be a real number, got True", X, eps=True),
    case(rms, TypeError, "eps must be a real number, got complex", X, eps=1j),
    case(rms, TypeError, "eps must be a real number, got numpy.ndarray", X, eps=np.array(1e-6)),
    case(rms, ValueError, "eps must not be negative, got -1e-06", X, eps=-1e-6),
    case(rms, ValueError, "eps must be finite, got nan", X, eps=float("nan")),
    case(rms, ValueError, "eps must be finite, got inf", X, eps=float("inf")),
    case(rms, ValueError, "eps must be finite in float32, got 1e+39", X, eps=1e39),
    case(
        rms,
        ValueError,
        "eps must be 0 or at least 1.175e-38, float32's smallest normal number, got 1e-50",
        X,
        eps=1e-50,
    ),
    case(rms, ValueError, "eps must be 0 or at least 1.175e-38, ", X16, eps=1.17e-38),
    case(layer, ValueError, "eps must not be negative, got -1.0", X, eps=-1),
    case(rms, TypeError, "weight_offset must be a real number, got None", X, W, weight_offset=None),
    case(rms, ValueError, "weight_offset must be finite, got nan", X, W, weight_offset=np.nan),
    case(
        rms,
        ValueError,
        "weight_offset must be 0 without a weight, got 1.0",
        X,
        weight_offset=1,
    ),
    case(rms, ValueError, TRAILING + "0: move the axis to the end first", X, axis=0),
    case(rms, ValueError, TRAILING + "-2: move the axis to the end first", X, axis=-2),
    case(rms, ValueError, TRAILING + "(0, 2): move the axis to the end first", X, axis=(0, 2)),
    case(rms, ValueError, TRAILING + "(-1, 2): move the axis to the end first", X, axis=(-1, 2)),
    case(rms, ValueError, TRAILING + "(): move the axis to the end first", X, axis=()),
    case(rms, ValueError, "axis must be within the 3 axes of x, got 3", X, axis=3),
    case(rms, ValueError, "axis must be within the 3 axes of x, got (-4, -1)", X, axis=(-4, -1)),
    case(rms, TypeError, "axis must be an int or a tuple of ints, got None", X, axis=None),
    case(rms, TypeError, "axis must be an int or a tuple of ints, got 'last'", X, axis="last"),
    case(rms, TypeError, "axis must be an int or a tuple of ints, got [-1]", X, axis=[-1]),
    case(rms, TypeError, "axis must be an int or a tuple of ints, got True", X, axis=True),
    case(rms, TypeError, "axis must be an int or a tuple of ints, got 1.0", X, axis=1.0),
    case(rms, ValueError, "cast must be 'once' or 'before_weight', got 'twice'", X, cast="twice"),
    case(rms, TypeError, "cast must be a string, got None", X, cast=None),
    case(rms, TypeError, "per_head must be True or False, got int", X, W, per_head=1),
    case(
        rms,
        ValueError,
        "per_head needs a head axis before the normalised axes of x, got shape (4,)",
        X[0, 0],
        W,
        per_head=True,
    ),
    case(rms, TypeError, "groups must be an int, got float", X, groups=2.0),
    case(rms, TypeError, "groups must be an int, got True", X, groups=True),
    case(rms, ValueError, "groups must be at least 1, got 0", X, groups=0),
    case(rms, ValueError, "groups must divide x's hidden size 4, got 3", X, groups=3),
    case(rms, ValueError, "groups must be 1 with per_head=True, got 2", X, groups=2, per_head=True),
    case(
        rms,
        ValueError,
        "groups must be 1 where 2 axes are normalised, got 2",
        X,
        groups=2,
        axis=(-2, -1),
    ),
    case(rms, ValueError, "weight must have shape (4,), got (2, 2)", X, new((2, 2)), groups=2),
    case(
        rms_forward,
        ValueError,
        "rstd_out must have shape (2, 3, 2), got (2, 3)",
        X,
        groups=2,
        rstd_out=new(ROWS),
    ),
    case(rms, TypeError, "partial must be an int, got float", X, partial=2.0),
    case(rms, ValueError, "partial must be at least 1, got 0", X, partial=0),
    case(rms, ValueError, "partial must be at most 4, the size of a row, got 5", X, partial=5),
    case(rms, ValueError, "partial must be at most 2, the ", X, partial=3, groups=2),
    case(rms, ValueError, "masked must be 'keep' or 'zero', got 'drop'", X, masked="drop"),
    case(rms, TypeError, "masked must be a string, got None", X, masked=None),
]

MASK_CASES = [
    case(rms, TypeError, "where must be bool, got uint8", X, where=new(ROWS, np.uint8)),
    case(rms, ValueError, "where must have shape (2, 3), got (3,)", X, where=new((3,), bool)),
    case(rms, TypeError, "where must be an array, got bool", X, where=True),
    case(rms, TypeError, "valid_rows must be int32 or int64, got float32", X, valid_rows=new(())),
    case(rms, TypeError, "valid_rows must be an array, got int", X, valid_rows=3),
    case(
        rms,
        ValueError,
        "valid_rows must have shape () or (1,), got (2,)",
        X,
        valid_rows=new((2,), np.int64),
    ),
    case(
        rms,
        ValueError,
        "masked='keep' leaves rows untouched and needs out, got None: pass out or masked='zero'",
        X,
        where=np.ones(ROWS, bool),
    ),
    case(
        add,
        ValueError,
        "masked='keep' leaves rows untouched and needs residual_out, got None: "
        "pass residual_out or masked='zero'",
        X,
        RESIDUAL,
        where=np.ones(ROWS, bool),
        out=new(),
    ),
    case(
        layer_forward,
        ValueError,
        "masked='keep' leaves rows untouched and needs mean_out, got None: "
        "pass mean_out or masked='zero'",
        X,
        valid_rows=np.array(1),
        out=new(),
        rstd_out=new(ROWS),
    ),
]

OUTPUT_CASES = [
    case(rms, ValueError, "out must have shape (2, 3, 4), got (3, 4)", X, out=new((3, 4))),
    case(rms, TypeError, f"out must be {BESIDE}, got int32", X, out=new(dtype=np.int32)),
    case(rms, TypeError, f"out must be {BESIDE}, got float64", X, out=new(dtype=np.float64)),
    case(rms, TypeError, "out must be an array, got list", X, out=[0.0]),
    case(rms, ValueError, "out must be writable, got a read-only array", X, out=read_only(X)),
    case(
        rms,
        ValueError,
        "out must not have a stride of 0, got strides (0, 4, 1)",
        X,
        out=np.lib.stride_tricks.as_strided(new(), X.shape, (0, 16, 4)),
    ),
    case(
        rms,
        ValueError,
        "out must reach each element once, got shape (2, 3, 4) with strides (4, 2, 1)",
        X,
        out=np.lib.stride_tricks.as_strided(new(), X.shape, (16, 8, 4)),
    ),
    case(
        rms,
        ValueError,
        "out must have strides of whole elements, got a field of a wider record",
        X,
        out=np.zeros(X.shape, [("pad", "u2"), ("value", "f4")])["value"],
    ),
    case(rms, TypeError, "out_dtype must be a dtype, got 3", X, out_dtype=3),
    case(rms, TypeError, "out_dtype must be a dtype, got 'single bed'", X, out_dtype="single bed"),
    *(
        case(rms, TypeError, f"out_dtype must be a dtype, got {value!r}", X, out_dtype=value)
        for value in (1, True, 1.0, np.float32(1), W, "(2,", "a", ">f4", np.dtype(">f4"), "", ())
    ),
    case(rms, TypeError, f"out_dtype must be {BESIDE}, got int8", X, out_dtype="int8"),
    case(rms, TypeError, f"out_dtype must be {BESIDE}, got float64", X, out_dtype=float),
    case(
        rms,
        TypeError,
        "out_dtype must agree with out, float32, got float16",
        X,
        out=new(),
        out_dtype="float16",
    ),
    case(
        add,
        TypeError,
        "residual_out must be float32, residual's dtype, got float16",
        X,
        RESIDUAL,
        residual_out=new(dtype=np.float16),
    ),
    case(
        rms_forward,
        TypeError,
        "rstd_out must be float32, got float16",
        X,
        rstd_out=new(ROWS, np.float16),
    ),
    case(
        rms_forward,
        ValueError,
        "rstd_out must have shape (2, 3), got (2, 3, 1)",
        X,
        rstd_out=new((2, 3, 1)),
    ),
    case(
        layer_forward,
        TypeError,
        "mean_out must be float64, got float32",
        X64,
        mean_out=new(ROWS),
    ),
]

BACKWARD_CASES = [
    case(rms_backward, TypeError, "dout must be an array, got NoneType", None, X),
    case(rms_backward, ValueError, "dout must have shape (2, 3, 4), got (3, 4)", DOUT[0], X),
    case(rms_backward, TypeError, f"dout must be {BESIDE}, got float64", X64, X),
    case(rms_backward, TypeError, "x must be an array, got NoneType", DOUT, None),
    case(
        rms_backward,
        ValueError,
        "rstd must have shape (2, 3), got (6,)",
        DOUT,
        X,
        W,
        STATISTIC.ravel(),
    ),
    case(
        rms_backward,
        TypeError,
        "rstd must be float32, got float64",
        DOUT,
        X,
        W,
        STATISTIC.astype(np.float64),
    ),
    case(
        layer_backward,
        ValueError,
        "mean must have shape (2, 3), got (3, 2)",
        DOUT,
        X,
        W,
        STATISTIC.T,
        STATISTIC,
    ),
    *(
        case(
            function,
            ValueError,
            "rstd must be given where mean is, got None: mean is the first of the two by position, "
            "pass both by name",
            *arguments,
            STATISTIC,
        )
        for function, *arguments in (
            (layer_backward, DOUT, X, W),
            (norms.add_layer_norm_backward, DOUT, None, X, W),
        )
    ),
    case(rms_backward, ValueError, "eps must not be negative, got -1.0", DOUT, X, eps=-1),
    case(rms_backward, ValueError, "weight must have shape (4,), got (5,)", DOUT, X, new((5,))),
    case(rms_backward, TypeError, "need_dx must be True or False, got None", DOUT, X, need_dx=None),
    case(
        rms_backward,
        TypeError,
        "need_dweight must be True or False, got int",
        DOUT,
        X,
        need_dweight=0,
    ),
    case(
        rms_backward,
        TypeError,
        "dx_out must be float32, x's dtype, got float16",
        DOUT,
        X,
        dx_out=new(dtype=np.float16),
    ),
    case(
        rms_backward,
        ValueError,
        "dx_out must have shape (2, 3, 4), got (6, 4)",
        DOUT,
        X,
        dx_out=new((6, 4)),
    ),
    case(
        rms_backward,
        ValueError,
        "dx_out needs need_dx=True: there is no such gradient, got an array",
        DOUT,
        X,
        need_dx=False,
        dx_out=new(),
    ),
    case(
        rms_backward,
        ValueError,
        "dweight_out needs a weight array and need_dweight=True: "
        "there is no such gradient, got an array",
        DOUT,
        X,
        2.0,
        dweight_out=new((4,)),
    ),
    case(
        rms_backward,
        ValueError,
        "dbias_out needs a bias array: there is no such gradient, got an array",
        DOUT,
        X,
        1.0,
        bias=1.0,
        dbias_out=new((4,)),
    ),
    case(
        rms_backward,
        ValueError,
        "dweight_out must have shape (4,), got (2, 4)",
        DOUT,
        X,
        W,
        dweight_out=new((2, 4)),
    ),
    case(
        rms_backward,
        TypeError,
        "dweight_dtype must agree with dweight_out, float32, got bfloat16",
        DOUT,
        X,
        W,
        dweight_out=new((4,)),
        dweight_dtype="bfloat16",
    ),
    case(
        rms_backward,
        TypeError,
        f"dweight_dtype must be {BESIDE}, got float64",
        DOUT,
        X,
        W,
        dweight_dtype="float64",
    ),
    case(
        rms_backward,
        TypeError,
        "dbias_out must be float32, bias's dtype, got float16",
        DOUT,
        X,
        W,
        bias=W,
        dbias_out=new((4,), np.float16),
    ),
    case(
        rms_backward,
        ValueError,
        "dweight_out must be writable, got a read-only array",
        DOUT,
        X,
        W,
        dweight_out=read_only(W),
    ),
    case(
        add_backward,
        ValueError,
        "dresidual_out must have shape (2, 3, 4), got (4,)",
        DOUT,
        W,
        X,
    ),
    # dresidual_out was left out, and each argument stands in the place of the one before.
    *(
        case(
            add_backward,
            ValueError,
            "dout must have shape (4,), got (2, 3, 4): "
            "the first arguments are dout, dresidual_out (or None) and residual_out",
            DOUT,
            X,
            W,
            *statistics,
        )
        for statistics in ((), (STATISTIC,))
    ),
    case(add_backward, TypeError, "residual_out must be an array, got NoneType", DOUT, None, None),
    case(
        add_backward,
        TypeError,
        "x_dtype must be float16, bfloat16 or float32 with a float32 residual_out, got float64",
        DOUT,
        None,
        X,
        x_dtype="float64",
    ),
    case(
        add_backward,
        TypeError,
        "x_dtype must agree with dx_out, float32, got float16",
        DOUT,
        None,
        X,
        x_dtype="float16",
        dx_out=new(),
    ),
]

QK_CASES = [
    case(qk, TypeError, "k must be float32, q's dtype, got float16", X, X16),
    case(qk, ValueError, "k must have q's head size 4, got 3", X, X[..., :3]),
    case(qk, ValueError, "q_weight must have shape (4,), got (3,)", X, X + 1, new((3,))),
    case(qk, ValueError, "k_weight must have shape (3, 4), got (2, 4)", X, X, W, new((2, 4))),
    case(qk, ValueError, "q_out must have shape (2, 3, 4), got (4,)", X, X, q_out=new((4,))),
    case(qk, TypeError, "k must be an array, got NoneType", X, None),
    case(qk, TypeError, "eps must be a real number, got None", X, X, eps=None),
    case(qk, TypeError, f"k must be {ROW}, got int8", X, X.astype("i1"), q_out=new()),
    case(qk, TypeError, f"q_out must be {BESIDE[:-1]}q, got int8", X, X, q_out=new(dtype="i1")),
    case(qk, TypeError, f"k_out must be {BESIDE[:-1]}k, got int8", X, X, k_out=new(dtype="i1")),
    case(
        qk,
        TypeError,
        f"q_weight must be {BESIDE[:-1]}q, got int8",
        X,
        X,
        W.astype("i1"),
        k_out=new(),
    ),
    case(
        qk,
        TypeError,
        f"k_weight must be {BESIDE[:-1]}k, got int8",
        X,
        X,
        W,
        W.astype("i1"),
        q_out=new(),
    ),
    case(
        qk,
        ValueError,
        "weight_offset must be 0 without a q_weight, got 1.0",
        X,
        X,
        None,
        W,
        weight_offset=1,
    ),
    case(
        qk,
        ValueError,
        "weight_offset must be 0 without a k_weight, got 1.0",
        X,
        X,
        W,
        weight_offset=1,
    ),
    case(qk, ValueError, "k_weight must be finite in float32, got 1e+39", X, X, W, 1e39),
    case(qk, ValueError, "q_weight must have shape (4,), got (1, 4)", X[0, 0], X, new((1, 4))),
]

bind = norms.bind_rms_norm
BIND_CASES = [
    case(bind, TypeError, f"weight must be {ROW}, got int64", np.arange(4)),
    case(bind, TypeError, "weight must be an array or a real number, got tuple", (4,)),
    case(
        bind,
        TypeError,
        "weight must be an array of the normalised shape or a Python number, got a 0-d array",
        np.array(1, F32),
    ),
    case(bind, ValueError, "eps must not be negative, got -1.0", W, eps=-1),
    case(bind, TypeError, "bias must be an array unless weight is a number, got 0.01: ", W, 0.01),
    case(bind, ValueError, "cast must be 'once' or 'before_weight', got 'x'", W, cast="x"),
    case(bind, TypeError, "out_dtype must be a dtype, got 'wide'", W, out_dtype="wide"),
    case(
        bind, ValueError, "weight_offset must be 0 without a weight, got 1.0", None, weight_offset=1
    ),
    *(
        case(bind, ValueError, TRAILING + f"{axis}: move the axis to the end first", W, axis=axis)
        for axis in (-2, (), (-3, -1), (-1, -1), (1, 1))
    ),
    case(bind, TypeError, "axis must be an int or a tuple of ints, got 'last'", W, axis="last"),
    case(bind, TypeError, f"out_dtype must be {ROW}, got int8", W, out_dtype="int8"),
]

warm = norms.warmup
SIZE = {"hidden_size": 64, "dtype": "float32"}
QK = {"op": "qk_norm", **SIZE}
WARMUP_CASES = [
    case(warm, TypeError, "op must be a string, got None", **SIZE),
    case(warm, ValueError, "op must be 'rms_norm', 'rms_norm_forward', ", "batch_norm", **SIZE),
    case(warm, TypeError, "hidden_size must be an int, got None", "rms_norm", dtype="float32"),
    case(
        warm,
        ValueError,
        "hidden_size must be at least 1, got 0",
        "rms_norm",
        hidden_size=0,
        dtype="float32",
    ),
    case(warm, TypeError, "dtype must be a dtype, got None", "rms_norm", hidden_size=64),
    case(
        warm, TypeError, f"dtype must be {ROW}, got int8", "rms_norm", hidden_size=64, dtype="int8"
    ),
    case(
        warm,
        TypeError,
        "weight_dtype must be float64, got float32",
        "rms_norm",
        hidden_size=64,
        dtype="float64",
        weight_dtype="float32",
    ),
    case(
        warm,
        ValueError,
        "residual_dtype must be None, since the call has no such array",
        "rms_norm",
        residual_dtype="float32",
        **SIZE,
    ),
    case(
        warm,
        TypeError,
        "calls must come alone, got other arguments beside it",
        "rms_norm",
        calls=[],
    ),
    *(
        case(warm, TypeError, "calls must come alone, got other arg", calls=[], **{name: value})
        for name, value in (
            ("cast", "before_weight"),
            ("per_head", True),
            ("masked", "keep"),
            ("need_dx", False),
            ("need_dweight", False),
        )
    ),
    *(
        case(warm, TypeError, f"calls must be an iterable of mappings, got {got}", calls=calls)
        for calls, got in ((5, "int"), ("rms_norm", "'rms_norm'"), ({"op": "rms_norm"}, "dict"))
    ),
    case(warm, TypeError, "calls[1] must be a mapping, got int", calls=[QK, 5]),
    case(
        warm,
        TypeError,
        "calls[0] must have keys of op, hidden_size, cast, per_head, masked, groups, partial, "
        "need_dx, need_dweight, dtype, weight_dtype, bias_dtype, residual_dtype, out_dtype, "
        "dout_dtype, dweight_dtype, "
        "got 'size'",
        calls=[{"op": "rms_norm", "size": 64}],
    ),
    case(warm, TypeError, "calls[0] must have keys of op, ", calls=[{1: 2}]),
    case(
        warm,
        ValueError,
        "partial must be None, since the call has no such option",
        "layer_norm",
        partial=4,
        **SIZE,
    ),
    case(
        warm,
        ValueError,
        "groups must be 1, since the call has no such option, got 2",
        "qk_norm",
        groups=2,
        **SIZE,
    ),
    case(
        warm,
        ValueError,
        "calls[1]: hidden_size must be at least 1, got 0",
        calls=(call for call in (QK, QK | {"hidden_size": 0})),
    ),
    case(
        warm,
        TypeError,
        "calls[0]: weight_dtype must be a dtype, got 3",
        calls=[QK | {"weight_dtype": 3}],
    ),
    *(
        case(warm, ValueError, f"{name} must be None, since the call has no {what}", **QK, **option)
        for name, what, option in (
            ("bias_dtype", "such array", {"bias_dtype": "float32"}),
            ("masked", "mask", {"masked": "zero"}),
        )
    ),
    *(
        case(
            warm,
            ValueError,
            f"{name} must be True, since the call has no such option, got False",
            **QK,
            **{name: False},
        )
        for name in ("need_dx", "need_dweight")
    ),
    case(
        warm,
        TypeError,
        "need_dx must be True or False, got int",
        "rms_norm_backward",
        need_dx=1,
        **SIZE,
    ),
    case(
        warm,
        ValueError,
        "out_dtype must be float32, since dx has x's dtype, got float16",
        "layer_norm_backward",
        out_dtype="float16",
        **SIZE,
    ),
]


@pytest.mark.parametrize(
    ("function", "error", "message", "args", "options"),
    [
        *X_CASES,
        *PARAMETER_CASES,
        *OPTION_CASES,
        *MASK_CASES,
        *OUTPUT_CASES,
        *BACKWARD_CASES,
        *QK_CASES,
        *BIND_CASES,
        *WARMUP_CASES,
    ],
)
def test_error(
    function: Callable[..., Any],
    error: type[Exception],
    message: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    before = [value.tobytes() for value in (X, W, RESIDUAL, DOUT)]
    with pytest.raises(error, match="^" + re.escape(message)) as raised:
        function(*args, **options)
    assert type(raised.value) is error
    assert before == [value.tobytes() for value in (X, W, RESIDUAL, DOUT)]


FORWARD = [
    norms.rms_norm,
    norms.layer_norm,
    norms.add_rms_norm,
    norms.add_layer_norm,
    norms.rms_norm_forward,
    norms.layer_norm_forward,
    norms.add_rms_norm_forward,
    norms.add_layer_norm_forward,
]
BACKWARD = [
    norms.rms_norm_backward,
    norms.layer_norm_backward,
    norms.add_rms_norm_backward,
    norms.add_layer_norm_backward,
]


@pytest.mark.parametrize("function", [*FORWARD, *BACKWARD], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "eps must not be negative, got -1.0", {"eps": -1}),
        (TypeError, "eps must be a real number, got None", {"eps": None}),
        (ValueError, "weight must have shape (4,), got (5,)", {"weight": new((5,))}),
        (TypeError, "weight must be float16, bfloat16 or float32", {"weight": np.arange(4)}),
        (ValueError, "bias must have shape (4,), got (2,)", {"bias": new((2,))}),
        (TypeError, "bias must be an array unless weight is a number", {"bias": 0.5}),
        (ValueError, "cast must be 'once' or 'before_weight'", {"cast": "no"}),
        (ValueError, "axis must be -1 or a tuple", {"axis": 0}),
        (ValueError, "masked must be 'keep' or 'zero'", {"masked": "no"}),
        (ValueError, "where must have shape (2, 3), got (2,)", {"where": new((2,), bool)}),
        (TypeError, "valid_rows must be int32 or int64", {"valid_rows": new((1,))}),
        (ValueError, "weight_offset must be 0 without a weight", {"weight_offset": 1.0}),
        (TypeError, "per_head must be True or False", {"per_head": None}),
        (ValueError, "groups must divide", {"groups": 3}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_every_function_has_the_shared_rules(
    function: Callable[..., Any], error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters
    required = [
        X for parameter in parameters.values() if parameter.default is inspect.Parameter.empty
    ]
    with pytest.raises(error, match="^" + re.escape(message)):
        function(*required, **options)


@pytest.mark.parametrize("dtype", ["i1", "u8", "c8", "V0", "S3", object])
@pytest.mark.parametrize("function", [*FORWARD, *BACKWARD, norms.qk_norm], ids=lambda f: f.__name__)
def test_any_array_of_another_dtype_is_named(function: Callable[..., Any], dtype: Any) -> None:
    """Before memory is compared, which needs the size of an element."""
    parameters = inspect.signature(function).parameters
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("weight", "bias"), (4,))
    shapes |= dict.fromkeys(("q_weight", "k_weight", "dweight_out", "dbias_out"), (4,))
    shapes |= dict.fromkeys(("mean", "rstd", "mean_out", "rstd_out", "where"), ROWS)
    shapes |= dict.fromkeys(("x", "residual", "residual_out", "q", "k", "out"), X.shape)
    shapes |= dict.fromkeys(("q_out", "k_out", "dout", "dresidual_out", "dx_out"), X.shape)
    shapes["valid_rows"] = ()
    arrays = {name: new(shapes[name]) for name in parameters if name in shapes}
    if "where" in arrays:
        arrays |= {"where": np.ones(ROWS, bool), "valid_rows": np.array(6)}
    assert len(arrays) >= 6
    for name in arrays:
        wrong = np.zeros(shapes[name], dtype)
        with pytest.raises(TypeError, match=f"^{name} must be "):
            function(**arrays | {name: wrong})


@pytest.mark.parametrize(
    "eps", [3, 3.0, np.int64(3), np.float64(3), np.float32(3), np.float16(3), ml_dtypes.bfloat16(3)]
)
def test_any_real_scalar_is_an_eps(eps: Any) -> None:
    y = rms(np.ones((1, 4), F32), eps=eps)
    np.testing.assert_array_equal(y, np.full((1, 4), 0.5, F32))


def test_float64_has_smaller_eps() -> None:
    y = rms(np.full((1, 4), 1e-170), eps=1e-320)
    assert 0 < y[0, 0] < 1


def test_sums_of_weight_and_offset_that_overflow_are_quiet() -> None:
    weight = np.full(4, 3e38, F32)
    y = rms(X, weight, weight_offset=3e38)
    assert np.isinf(y).all()


def test_a_tiny_eps_survives() -> None:
    y = rms(np.full((1, 4), 1e-4, np.float16), eps=1e-8)
    np.testing.assert_allclose(y.astype(float), 0.7072, atol=5e-4)


def test_an_error_leaves_the_next_call_alone() -> None:
    expected = rms(X, W)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms(X, new((5,)))
    np.testing.assert_array_equal(rms(X, W), expected)


@pytest.mark.parametrize(
    ("norm", "x", "message"),
    [
        (bind(W), X[..., :3], "x must end in the axes (4,), got shape (2, 3, 3)"),
        (bind(None, W), X[..., :3], "x must end in the axes (4,), got shape (2, 3, 3)"),
        (bind(X[0], per_head=True), X[:, :2], "x must end in the axes (3, 4), got shape (2, 2, 4)"),
        (bind(X[0], axis=(-2, -1)), X[0, 0], "x must end in the axes (3, 4), got shape (4,)"),
        (bind(W, axis=(-2, -1)), X, "weight must have shape (3, 4), got (4,)"),
        (bind(W, new((5,))), X, "x must end in the axes (5,), got shape (2, 3, 4)"),
        (bind(2.0, groups=3), X, "groups must divide x's hidden size 4, got 3"),
    ],
)
def test_a_bound_norm_does_not_blame_what_it_holds(norm: Any, x: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        norm(x)


def test_warmup_takes_what_calls_can_have() -> None:
    backward = {"op": "add_rms_norm_backward", "out_dtype": "float16", "masked": "zero", **SIZE}
    warm(calls=[QK | {"out_dtype": "float16", "per_head": True}, backward])
    warm(calls=[], cast="once", per_head=False)
