# SPDX-License-Identifier: Apache-2.0
"""Arrays of every library, in and out."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_rmsnorm as norms
from cupy_rmsnorm import _info, _libraries
from cupy_rmsnorm._call import Device

F32 = np.float32
X = np.arange(1, 25, dtype=F32).reshape(2, 3, 4)
W = np.array([1, -2, 0.5, 3], F32)
Y = norms.rms_norm(X, W)


class DLPackOnly:
    """An array of a library that offers DLPack and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


class Namespaced(DLPackOnly):
    """The same with an array API namespace, whose from_dlpack makes such arrays."""

    def __array_namespace__(self, **_: Any) -> Any:
        return Namespace


class Namespace:
    @staticmethod
    def from_dlpack(values: Any) -> Namespaced:
        return Namespaced(np.from_dlpack(values))

    @staticmethod
    def asarray(values: Any) -> Namespaced:
        return Namespaced(values)


class InterfaceOnly:
    """An array that offers `__array_interface__` and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__


# NumPy ---------------------------------------------------------------------------------------


def test_numpy_in_numpy_out() -> None:
    assert type(Y) is np.ndarray
    assert Y.flags.c_contiguous
    assert Y.dtype == F32


def test_subclasses_come_back_as_plain_arrays(tmp_path: Any) -> None:
    path = tmp_path / "x.npy"
    np.save(path, X)
    mapped = np.load(path, mmap_mode="r")
    y = norms.rms_norm(mapped, W)
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, Y)


def test_bfloat16_in_bfloat16_out() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    y = norms.rms_norm(x, W)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(y.astype(F32), Y, rtol=2**-8)


class Float16:
    """A dtype object that is none of NumPy's."""

    def __str__(self) -> str:
        return "another_library.float16"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("<f2", np.float16),
        (F32, F32),
        (np.dtype(np.float16), np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (Float16(), np.float16),
    ],
    ids=str,
)
def test_out_dtype_in_any_spelling(dtype: Any, expected: Any) -> None:
    assert norms.rms_norm(X, W, out_dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    "view",
    [
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: x[..., ::-1].copy()[..., ::-1],
        lambda x: x[::-1].copy()[::-1],
        lambda x: np.rec.fromarrays([np.zeros(x.shape, "u2"), x], names="pad,value")["value"],
    ],
    ids=["fortran", "strided", "reversed-rows", "reversed", "record-field"],
)
def test_any_strides(view: Any) -> None:
    x = view(X)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(norms.rms_norm(x, W), Y)
    np.testing.assert_array_equal(norms.rms_norm(X, view(np.array([[W]]))[0, 0]), Y)


def test_axes_of_length_one_may_have_any_stride() -> None:
    x = np.lib.stride_tricks.as_strided(X, (6, 1, 4), (16, 1 << 40, 4))
    array_ = _libraries.NUMPY.describe("x", x, output=False)
    assert array_.strides == (4, 4, 1)
    np.testing.assert_array_equal(norms.rms_norm(x, W).reshape(X.shape), Y)


def test_strided_out_is_filled_and_nothing_else() -> None:
    buffer = np.full((2, 3, 9), np.nan, F32)
    out = buffer[..., 1::2]
    assert norms.rms_norm(X, W, out=out) is out
    np.testing.assert_array_equal(out, Y)
    assert np.isnan(buffer[..., ::2]).all()


def test_object_with_a_buffer() -> None:
    x = array.array("f", [1.0, 2.0, 3.0, 4.0])
    y = norms.rms_norm(x)
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, norms.rms_norm(np.array(x)))
    np.testing.assert_array_equal(norms.rms_norm(memoryview(x)), y)


def test_object_with_an_array_interface() -> None:
    y = norms.rms_norm(InterfaceOnly(X), InterfaceOnly(W))
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, Y)


# Libraries known by DLPack only --------------------------------------------------------------


def test_dlpack_in_numpy_out() -> None:
    y = norms.rms_norm(DLPackOnly(X), DLPackOnly(W))
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, Y)


def test_dlpack_out_is_written_in_place() -> None:
    out = DLPackOnly(np.empty_like(X))
    assert norms.rms_norm(DLPackOnly(X), W, out=out) is out
    np.testing.assert_array_equal(out.values, Y)


@pytest.mark.parametrize("dtype", [np.float16, F32, np.float64])
def test_an_array_namespace_comes_back_as_itself(dtype: Any) -> None:
    x = X.astype(dtype)
    y, mean, rstd = norms.layer_norm_forward(Namespaced(x))
    for got, want in zip((y, mean, rstd), norms.layer_norm_forward(x), strict=True):
        assert type(got) is Namespaced
        np.testing.assert_array_equal(got.values, want)


def test_a_namespace_gets_bfloat16_too() -> None:
    x = X.astype(ml_dtypes.bfloat16)

    class Bfloat16(Namespaced):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.values

    y = norms.rms_norm(Bfloat16(x), W)
    assert type(y) is Namespaced
    np.testing.assert_array_equal(y.values, norms.rms_norm(x, W))


def test_out_of_another_namespace_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^out must be of x's library, numpy, got tests$"):
        norms.rms_norm(X, W, out=Namespaced(np.empty_like(X)))


def test_a_read_only_exchange_is_no_output() -> None:
    values = X.copy()
    values.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out must be writable, got a read-only array$"):
        norms.rms_norm(X, W, out=InterfaceOnly(values))


class Legacy(DLPackOnly):
    """A library that knows no versions of DLPack."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.values.__dlpack__()


def test_legacy_dlpack_out_is_written_in_place() -> None:
    out = Legacy(np.empty_like(X))
    assert norms.rms_norm(Legacy(X), W, out=out) is out
    np.testing.assert_array_equal(out.values, Y)


def read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.flags.writeable = False
    return values


def test_a_read_only_dlpack_array_is_no_output() -> None:
    x = DLPackOnly(read_only(X))
    np.testing.assert_array_equal(norms.rms_norm(x, W), Y)
    with pytest.raises(ValueError, match=r"^out must be writable, got a read-only array$"):
        norms.rms_norm(X, W, out=x)


def test_a_failed_export_says_why() -> None:
    x = Legacy(read_only(X))
    rule = r"must be an array whose memory NumPy can {}, got tests\.test_border\.Legacy, whose "
    why = r"DLPack export failed \(Cannot export readonly array .*\)$"
    with pytest.raises(TypeError, match="^x " + rule.format("read") + why):
        norms.rms_norm(x)
    with pytest.raises(TypeError, match="^out " + rule.format("write") + why):
        norms.rms_norm(X, out=x)


def test_bfloat16_by_dlpack_alone_is_refused(torch: Any) -> None:
    x = DLPackOnly(torch.from_numpy(X).bfloat16())  # type: ignore[arg-type]
    why = r"\(Unsupported dtype in DLTensor\.\); NumPy reads no bfloat16 by DLPack$"
    for out in (None, x):
        with pytest.raises(
            TypeError, match=r"^(x|out) must be an array whose memory NumPy .*" + why
        ):
            norms.rms_norm(x if out is None else X, out=out)


class Copied(DLPackOnly):
    """An array whose bfloat16 values NumPy gets as a copy alone."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values.copy()


def test_an_output_is_never_a_copy() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    out = Copied(np.zeros_like(x))
    np.testing.assert_array_equal(norms.rms_norm(Copied(x), W), norms.rms_norm(x, W))
    with pytest.raises(TypeError, match=r"^out must be an array whose memory NumPy can write, got"):
        norms.rms_norm(x, W, out=out)


def test_a_protocol_that_is_none_is_not_there() -> None:
    class No(InterfaceOnly):
        __dlpack__ = None
        __dlpack_device__ = None
        __cuda_array_interface__ = None
        __array_namespace__ = None

    np.testing.assert_array_equal(norms.rms_norm(No(X), W), Y)
    with pytest.raises(TypeError, match=r"^x must be an array, got "):
        norms.rms_norm(type("Not", (), {"__dlpack__": None, "__dlpack_device__": None})())


def test_misaligned_host_arrays_work() -> None:
    x = np.empty(X.nbytes + 1, np.uint8)[1:].view(F32).reshape(X.shape)
    x[...] = X
    assert not x.flags.aligned
    np.testing.assert_array_equal(norms.rms_norm(x, W), Y)
    assert norms.rms_norm(X, W, out=x) is x
    np.testing.assert_array_equal(x, Y)


def test_another_kind_of_device_is_refused() -> None:
    class OnVulkan(DLPackOnly):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 7, 0

    with pytest.raises(ValueError, match=r"^x must be on the CPU or a CUDA device, got DLPack"):
        norms.rms_norm(OnVulkan(X))


# torch ---------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_torch_out(torch: Any, dtype: str) -> None:
    x = torch.from_numpy(X).to(getattr(torch, dtype))
    w = torch.from_numpy(W).to(x.dtype)
    y = norms.rms_norm(x, w)
    assert type(y) is torch.Tensor
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y.double().numpy(), Y, rtol=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_memory_is_shared_not_copied(torch: Any, dtype: str) -> None:
    tensor = torch.arange(12.0).to(getattr(torch, dtype)).reshape(3, 4)[:, 1:]
    described = _libraries.TORCH.describe("x", tensor, output=False)
    assert described.pointer == tensor.data_ptr()
    assert described.numpy.__array_interface__["data"][0] == tensor.data_ptr()
    assert described.numpy.dtype.name == described.dtype == dtype
    assert described.strides == tensor.stride()
    assert described.device == Device("cpu", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_out_is_written_in_place(torch: Any, dtype: str) -> None:
    x = torch.from_numpy(X.copy()).to(getattr(torch, dtype))
    expected = norms.layer_norm(x)
    pointer, version = x.data_ptr(), x._version
    assert norms.layer_norm(x, out=x) is x
    assert x.data_ptr() == pointer
    assert torch.equal(x, expected)
    assert x._version > version


def test_autograd_notices_values_that_out_replaced(torch: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    x = torch.from_numpy(X.copy())
    loss = (weight * x).sum()
    norms.rms_norm(x, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_shapes_and_strides(torch: Any) -> None:
    base = torch.from_numpy(X)
    for x in (base.transpose(0, 2), base[:, ::2], base[:, :1], base[:0], base.expand(2, 3, 4)):
        got = norms.rms_norm(x)
        np.testing.assert_array_equal(got.numpy(), norms.rms_norm(x.contiguous().numpy()))


def test_parameter_under_no_grad(torch: Any) -> None:
    weight = torch.nn.Parameter(torch.from_numpy(W))
    x = torch.nn.Parameter(torch.from_numpy(X))
    with torch.no_grad():
        y = norms.rms_norm(x, weight)
    assert type(y) is torch.Tensor
    assert not y.requires_grad
    np.testing.assert_array_equal(y.numpy(), Y)
    with torch.inference_mode():
        np.testing.assert_array_equal(norms.rms_norm(x, weight).numpy(), Y)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_tensor_that_requires_grad_is_never_detached(torch: Any, name: str) -> None:
    tensors = {"x": torch.from_numpy(X), "weight": torch.from_numpy(W), "bias": torch.ones(4)}
    tensors[name] = tensors[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"^{name} requires grad, .* torch\.no_grad\(\)"):
        norms.rms_norm_forward(**tensors)
    with pytest.raises(RuntimeError, match=rf"^{name} requires grad, .* torch\.no_grad\(\)"):
        norms.rms_norm(**tensors, out=torch.empty(2, 3, 4))
    assert norms.rms_norm(**tensors).requires_grad


def test_array_of_another_library_gives_no_road_to_autograd(torch: Any) -> None:
    weight = torch.from_numpy(W).requires_grad_()
    with pytest.raises(RuntimeError, match=r"^weight requires grad, .* torch\.no_grad\(\)"):
        norms.rms_norm(X, weight)


def test_gradient_inputs_that_require_grad_are_refused(torch: Any) -> None:
    x, dout = torch.from_numpy(X), torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^dout requires grad, .* torch\.no_grad\(\)"):
        norms.rms_norm_backward(dout, x)
    with torch.no_grad():
        norms.rms_norm_backward(dout, x)


def test_out_that_requires_grad_is_refused(torch: Any) -> None:
    x, out = torch.from_numpy(X), torch.empty(2, 3, 4, requires_grad=True)
    message = r"^out must not require grad, got a tensor that does$"
    with pytest.raises(ValueError, match=message):
        norms.rms_norm(x, out=out)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        norms.rms_norm(x, out=out)


def test_torch_dtypes(torch: Any) -> None:
    x = torch.from_numpy(X)
    assert norms.rms_norm(x, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert norms.rms_norm(x, out_dtype="float16").dtype == torch.float16
    for bad in (x.int(), x.bool(), x.to(torch.complex64), x.to(torch.float8_e4m3fn)):
        name = str(bad.dtype).removeprefix("torch.")
        with pytest.raises(TypeError, match=rf"^x must be float16, .* got {name}$"):
            norms.rms_norm(bad)
    with pytest.raises(TypeError, match=r"^out_dtype must be .* got int32$"):
        norms.rms_norm(x, out_dtype=torch.int32)


def test_torch_tensors_without_memory_are_refused(torch: Any) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.from_numpy(X))
    with pytest.raises(TypeError, match=r"^x must be a tensor with memory of its own, got torch"):
        norms.rms_norm(fake)
    with pytest.raises(TypeError, match=r"^x must be a dense tensor, got torch\.sparse_coo$"):
        norms.rms_norm(torch.eye(4).to_sparse())
    with pytest.raises(ValueError, match=r"^x must be on the CPU or a CUDA device, got meta$"):
        norms.rms_norm(torch.empty(3, 4, device="meta"))
    with pytest.raises(TypeError, match=r"^x must be a resolved tensor, got one with the negative"):
        norms.rms_norm(torch.ones(3, 4, dtype=torch.complex64).conj().imag)
    with pytest.raises(TypeError, match=r"^weight must be an array or a real number, got torch\.S"):
        norms.rms_norm(torch.from_numpy(X), torch.Size([4]))
    with pytest.raises(TypeError, match=r"^weight must be .* got a 0-d array$"):
        norms.rms_norm(torch.from_numpy(X), torch.tensor(2.0))


TORCHS_OWN = "ignore:`torch.jit.script` is deprecated"  # raised by forward_ad's first use


@pytest.mark.filterwarnings(TORCHS_OWN)
def test_torch_transforms_are_refused(torch: Any) -> None:
    message = r"^x must be a tensor with memory of its own, got "
    x = torch.from_numpy(X)
    for call in (
        lambda: torch.func.vmap(norms.rms_norm)(x),
        lambda: torch.func.jvp(norms.rms_norm, (x,), (x,)),
        lambda: torch.func.grad(lambda x: norms.rms_norm(x).sum())(x),
    ):
        with pytest.raises(TypeError, match=message + r"one within torch\.func, .*vmap"):
            call()
    with pytest.raises(TypeError, match=message + "one without$"):
        torch.func.functionalize(norms.rms_norm)(x)
    with pytest.raises(TypeError, match=message + "one without$"):
        norms.rms_norm(torch._to_functional_tensor(x))
    with pytest.raises(TypeError, match=message + "one without$"):
        norms.rms_norm(torch._efficientzerotensor((2, 4)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_nested_tensors_are_refused(torch: Any) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with pytest.raises(TypeError, match=r"^x must be a dense tensor, got a nested one$"):
        norms.rms_norm(nested)


@pytest.mark.filterwarnings(TORCHS_OWN)
@pytest.mark.parametrize("name", ["x", "weight", "out"])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_tangents_are_never_dropped(torch: Any, name: str, grad: bool) -> None:
    forward_ad = torch.autograd.forward_ad
    tensors = {"x": torch.from_numpy(X), "weight": torch.from_numpy(W), "out": torch.empty(2, 3, 4)}
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        norms.rms_norm(**tensors)
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        with pytest.raises(RuntimeError, match=rf"^{name} has a forward-mode tangent, and"):
            norms.rms_norm(**tensors)


def test_torchs_default_device_moves_no_output(torch: Any) -> None:
    x = torch.from_numpy(X).bfloat16()
    expected = norms.rms_norm(x)
    with torch.device("meta"):
        y, rstd = norms.rms_norm_forward(x)
    assert y.device == rstd.device == x.device
    assert torch.equal(y, expected)


def test_torch_out_in_inference_mode(torch: Any) -> None:
    out = torch.empty(2, 3, 4)
    with torch.inference_mode():
        x = torch.from_numpy(X)
        norms.rms_norm(x, out=out)
        np.testing.assert_array_equal(out.numpy(), norms.rms_norm(X))
        inference_out = torch.empty(2, 3, 4)
        assert norms.rms_norm(x, out=inference_out) is inference_out


def test_libraries_mix_as_inputs_but_not_as_outputs(torch: Any) -> None:
    tensor = torch.from_numpy(X)
    np.testing.assert_array_equal(norms.rms_norm(tensor, W).numpy(), Y)
    np.testing.assert_array_equal(norms.rms_norm(X, torch.from_numpy(W)), Y)
    with pytest.raises(TypeError, match=r"^out must be of x's library, numpy, got torch$"):
        norms.rms_norm(X, out=torch.empty(2, 3, 4))
    with pytest.raises(TypeError, match=r"^rstd_out must be of x's library, torch, got numpy$"):
        norms.rms_norm_forward(tensor, rstd_out=np.empty((2, 3), F32))
    with pytest.raises(TypeError, match=r"^k must be of q's library, torch, got numpy$"):
        norms.qk_norm(tensor, X)


def test_torch_gradients_and_statistics(torch: Any) -> None:
    x, weight = torch.from_numpy(X).bfloat16(), torch.from_numpy(W)
    y, mean, rstd = norms.layer_norm_forward(x, weight, weight)
    assert (y.dtype, mean.dtype, rstd.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    dx, dweight, dbias = norms.layer_norm_backward(y, x, weight, mean, rstd, bias=weight)
    assert (dx.dtype, dweight.dtype, dbias.dtype) == (x.dtype, weight.dtype, weight.dtype)
    assert all(type(one) is torch.Tensor for one in (mean, rstd, dx, dweight, dbias))


def test_torch_masks(torch: Any) -> None:
    where = torch.tensor([[True, False, True], [True, True, True]])
    got = norms.rms_norm(
        torch.from_numpy(X), where=where, valid_rows=torch.tensor([4]), masked="zero"
    )
    want = norms.rms_norm(X, where=where.numpy(), valid_rows=np.array([4]), masked="zero")
    np.testing.assert_array_equal(got.numpy(), want)


# GPU arrays, by stand-ins --------------------------------------------------------------------


class OnGpu(DLPackOnly):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


class InterfaceOnGpu:
    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (4,),
        "typestr": "<f4",
        "data": (4096, False),
        "version": 3,
    }


@pytest.mark.parametrize("array_", [OnGpu(X), InterfaceOnGpu()], ids=["dlpack", "interface"])
def test_a_gpu_array_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, array_: Any) -> None:
    monkeypatch.setattr(_info, "available", lambda: (False, "libcuda.so.1 is missing; buy one"))
    sentence = r"is on a CUDA device, but the GPU backend cannot run: libcuda.*; buy one$"
    with pytest.raises(RuntimeError, match=rf"^x {sentence}"):
        norms.rms_norm(array_)
    with pytest.raises(RuntimeError, match=rf"^weight {sentence}"):
        norms.rms_norm(X, array_)
