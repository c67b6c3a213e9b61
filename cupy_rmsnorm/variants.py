# SPDX-License-Identifier: Apache-2.0
"""The study kernels: each classic way to write RMSNorm and LayerNorm, callable by its name.

They are for reading, comparing and measuring. Most take a power of two as hidden size, one dtype
and a scalar gain, and are compiled with ``--use_fast_math``; some overflow in float16 and say so.
`cupy_rmsnorm.rms_norm` and `cupy_rmsnorm.layer_norm` have none of these limits.

>>> from cupy_rmsnorm import variants
>>> variants.names("rms")[:4]
('f32', 'f32x4', 'f16_f16', 'f16_f32')
>>> y = variants.rms_norm.f16x8_pack_f32(x, g=1.0)  # doctest: +SKIP

A name ``A_B`` loads A and accumulates in B. ``f16x8`` is four loads of 4 bytes a thread,
``f16x8_pack`` one of 16 bytes. `TABLE` has one entry a variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from . import _border, _kernel, _overlap, _refuse, _source
from ._call import Array, Norm
from ._device import current_device
from ._dtypes import TABLE as DTYPES
from ._enqueue import Function
from ._kernel import DeviceProperties

__all__ = [
    "TABLE",
    "Sizes",
    "Variant",
    "eps_inside",
    "eps_outside",
    "layer_norm",
    "naive_layer_norm",
    "naive_rms_norm",
    "names",
    "rms_norm",
]

OPTIONS = ("-std=c++17", "--use_fast_math", "-lineinfo")
EPS = 1e-5
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_ROWS = 2**31 - 1  # blocks of one grid
CLUSTER_SIZE = 4
HELD_VECS = 4  # packs that a thread of layer_norm_held keeps in registers
TILED_THREADS = 256
ILP_THREADS = 256
THREADS_PER_SM = 2048  # what a persistent grid fills


class Sizes(NamedTuple):
    """The hidden sizes that a variant admits."""

    minimum: int
    maximum: int | None = None  # None: no limit
    multiple: int = 1
    power_of_two: bool = True

    def __contains__(self, hidden_size: object) -> bool:
        if not isinstance(hidden_size, int) or hidden_size < self.minimum:
            return False
        if self.maximum is not None and hidden_size > self.maximum:
            return False
        if self.power_of_two:
            return hidden_size.bit_count() == 1
        return hidden_size % self.multiple == 0

    def __str__(self) -> str:
        if self.power_of_two:
            return f"a power of two from {self.minimum} to {self.maximum}"
        kind = f"a multiple of {self.multiple}" if self.multiple > 1 else "any number"
        return f"{kind} from {self.minimum}" + (f" to {self.maximum}" if self.maximum else "")


class Launch(NamedTuple):
    """One instantiation of a variant's template and how to launch it."""

    template_arguments: tuple[str, ...]  # after the variant's own `types`
    grid: int
    block: int


class Bound(NamedTuple):
    """A checked call of a variant; calling it enqueues the launch on a stream's pointer.

    The device of the arrays must be current.
    """

    function: Any  # None where there are no rows
    grid: int
    block: int
    packed: bytes
    arrays: tuple[Any, ...]  # kept alive: `packed` has their addresses alone

    def __call__(self, stream: int) -> None:
        if self.function is not None:
            _kernel.launch(self.function, self.grid, self.block, 0, stream, self.packed)


@dataclass(frozen=True)
class Variant:
    """One named kernel; call it to run it.

    Attributes
    ----------
    name : str
    norm : {"rms", "layer"}
    source, template : str
        The template ``template`` in ``kernels_cu/<source>.cu``.
    types : tuple of str
        Its first template arguments, which the name fixes.
    dtype : str
        Of x, of the output and of vector gains and shifts.
    vec_size : int
        Elements a thread holds at a time.
    accumulation : str
        The dtype in which a row is summed.
    sizes : Sizes
        The hidden sizes that the kernel admits.
    summary : str
        What the variant shows, in one line.
    vector : bool
        Whether the gain (and shift) are vectors instead of numbers.
    loads : int
        In how many loads a thread gets them.
    min_arch : int
        The least compute capability, as 10 * major + minor.
    options : tuple of str
        The compiler's options.
    """

    name: str
    norm: Norm
    source: str
    template: str
    types: tuple[str, ...]
    dtype: str
    vec_size: int
    accumulation: str
    sizes: Sizes
    summary: str
    geometry: Callable[[Variant, int, int, DeviceProperties], Launch]
    vector: bool = False
    loads: int = 1
    min_arch: int = 75
    options: tuple[str, ...] = OPTIONS

    def __call__(
        self, x: Any, g: Any = 1.0, b: Any = None, *, eps: float = EPS, out: Any = None
    ) -> Any:
        """Normalise each row of `x` on the GPU.

        Parameters
        ----------
        x : array
            CuPy array, torch tensor or DLPack array on a GPU, C-contiguous, of the variant's
            dtype; the last axis is the row.
        g : float or array, default 1.0
            The gain: a number, or for variants with a vector an array of shape
            ``(hidden_size,)``.
        b : float or array, optional
            LayerNorm's shift, of the same kind; 0 if it is not given. RMSNorm takes none.
        eps : float, default 1e-5
            Added to the mean square or variance, inside the root.
        out : array, optional
            Where to write; of x's library, shape and dtype. May be x.

        Returns
        -------
        array
            `out`, or a new array of x's library.

        Raises
        ------
        TypeError
            For a wrong dtype or kind of argument.
        ValueError
            For a hidden size that the variant does not admit, a shape, layout, alignment or
            device that does not fit, or an `out` that overlaps an input.
        RuntimeError
            Where the GPU is missing or too old for the variant.
        """
        caller, y, bound = self._bind(x, g, b, eps, out)
        with current_device(caller.x.device.index):
            bound(caller.space.stream)
        return caller.give(y, out)

    def bind(self, x: Any, g: Any = 1.0, b: Any = None, *, eps: float = EPS, out: Any) -> Bound:
        """Check a call once; the result enqueues it, at little more than a launch's cost."""
        return self._bind(x, g, b, eps, out)[2]

    def _bind(
        self, x: Any, g: Any, b: Any, eps: float, out: Any
    ) -> tuple[_border.Caller, Array, Bound]:
        caller = _border.Caller("x", x)
        gain = self._parameter("g", caller.parameter("g", g), caller.x)
        shift = self._shift(caller.parameter("b", b), caller.x)
        eps = _fits("eps", _refuse.epsilon(eps))
        self._check_x(caller.x)
        device = caller.x.device.index
        properties = _kernel.device_properties(device)
        if properties.arch < self.min_arch:
            raise RuntimeError(
                f"{self.name} needs compute capability {self.min_arch / 10}, the GPU has "
                f"{properties.arch / 10}"
            )
        y = caller.output("out", out)
        if y is None:
            y = caller.space.empty("out", caller.x.shape, self.dtype)
        self._check_out(y, caller.x, gain, shift)
        hidden_size = caller.x.shape[-1]
        rows = math.prod(caller.x.shape[:-1])
        arguments: dict[str, float] = {
            "y": y.pointer,
            "x": caller.x.pointer,
            "rows": rows,
            "hidden_size": hidden_size,
            "eps": eps,
        }
        for value, scalar, vector in ((gain, "g", "weight"), (shift, "b", "bias")):
            if isinstance(value, Array):
                arguments[vector] = value.pointer
            elif value is not None:
                arguments[scalar] = value
        launch = self.geometry(self, hidden_size, rows, properties)
        function = None
        if rows:
            with current_device(device):
                function = _function(self, launch.template_arguments, device)
        packed = _kernel.pack(self.source, "float32", arguments)
        return caller, y, Bound(function, launch.grid, launch.block, packed, (x, g, b, out))

    def name_expression(self, template_arguments: tuple[str, ...]) -> str:
        """The C++ name of one instantiation."""
        return f"{self.template}<{', '.join((*self.types, *template_arguments))}>"

    def alignment(self, hidden_size: int) -> int:
        """Bytes of one load, on multiples of which every array must lie."""
        itemsize = DTYPES[self.dtype].itemsize
        if self.geometry is _tiled:
            return itemsize * _tiled_vec_size(self, hidden_size)
        return itemsize * self.vec_size // self.loads

    def _check_x(self, x: Array) -> None:
        if x.device.kind != "cuda":
            raise ValueError(f"x must be on a CUDA device: variants are kernels, got {x.device}")
        if x.dtype != self.dtype:
            raise TypeError(f"x must be {self.dtype} for {self.name}, got {x.dtype}")
        if not x.shape:
            raise ValueError("x must have at least one axis, got shape ()")
        hidden_size = x.shape[-1]
        if hidden_size not in self.sizes:
            raise ValueError(
                f"the last axis of x must be {self.sizes} for {self.name}, got {hidden_size}"
            )
        rows = math.prod(x.shape[:-1])
        if rows * (CLUSTER_SIZE if self.geometry is _cluster else 1) > MAX_ROWS:
            raise ValueError(f"x must have at most {MAX_ROWS} blocks of rows, got {rows} rows")
        self._check_layout(x, hidden_size)

    def _check_layout(self, array: Array, hidden_size: int) -> None:
        steps = (math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))
        if array.size and array.strides != tuple(steps):
            raise ValueError(f"{array.name} must be C-contiguous, got strides {array.strides}")
        alignment = self.alignment(hidden_size)
        if array.size and array.pointer % alignment:
            raise ValueError(
                f"{array.name} must lie on a multiple of {alignment} bytes for {self.name}, got "
                f"one that is {array.pointer % alignment} past"
            )

    def _check_out(
        self, out: Array, x: Array, gain: Array | float, shift: Array | float | None
    ) -> None:
        if out.dtype != self.dtype:
            raise TypeError(f"out must be {self.dtype} for {self.name}, got {out.dtype}")
        if out.shape != x.shape:
            raise ValueError(f"out must have shape {x.shape}, got {out.shape}")
        if out.device != x.device:
            raise ValueError(f"out must be on {x.device} like x, got {out.device}")
        if out.readonly:
            raise ValueError("out must be writable, got a read-only array")
        self._check_layout(out, x.shape[-1])
        for other in (x, gain, shift):
            if (
                isinstance(other, Array)
                and not (other is x and _overlap.same(out, x))
                and _overlap.overlap(out, other)
            ):
                raise ValueError(f"out must not overlap {other.name} unless it is exactly x")

    def _shift(self, value: Array | float | None, x: Array) -> Array | float | None:
        if self.norm == "layer":
            return self._parameter("b", 0.0 if value is None and not self.vector else value, x)
        if value is not None:
            raise TypeError("b must be None: RMSNorm has no shift")
        return None

    def _parameter(self, name: str, value: Array | float | None, x: Array) -> Array | float:
        if not self.vector:
            if isinstance(value, Array) or value is None:
                raise TypeError(f"{name} must be a real number for {self.name}, got an array")
            return _fits(name, value)
        if not isinstance(value, Array):
            raise TypeError(f"{name} must be an array for {self.name}, got {value}")
        if value.dtype != self.dtype:
            raise TypeError(f"{name} must be {self.dtype} for {self.name}, got {value.dtype}")
        if value.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape {x.shape[-1:]}, got {value.shape}")
        if value.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x, got {value.device}")
        self._check_layout(value, x.shape[-1])
        return value


def _fits(name: str, value: float) -> float:
    """`value`, which the kernel takes as a float32."""
    if abs(value) > FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return value


Instance = tuple[Variant, tuple[str, ...]]  # a variant and its last template arguments

_functions: dict[tuple[Instance, int], Any] = {}


def _function(variant: Variant, template_arguments: tuple[str, ...], device: int) -> Any:
    """The loaded function; the current device must be `device`."""
    instance = (variant, template_arguments)
    try:
        return _functions[instance, device]
    except KeyError:
        load([instance], device)
        return _functions[instance, device]


def load(instances: Iterable[Instance], device: int) -> None:
    """Compile and load, one module for all of a source; the current device must be `device`."""
    for members in modules(instances, device):
        load_module(members, device)


def modules(
    instances: Iterable[Instance], device: int, most: int | None = None
) -> list[list[Instance]]:
    """What is not loaded yet, in groups of one source and set of options, of `most` at most."""
    groups: dict[tuple[str, tuple[str, ...]], list[Instance]] = {}
    for instance in dict.fromkeys(instances):
        if (instance, device) not in _functions:
            variant = instance[0]
            groups.setdefault((variant.source, variant.options), []).append(instance)
    return [
        members[first : first + (most or len(members))]
        for members in groups.values()
        for first in range(0, len(members), most or len(members))
    ]


def load_module(members: list[Instance], device: int) -> None:
    """Compile and load one of those groups; the current device must be `device`."""
    import cupy

    source, options = members[0][0].source, members[0][0].options
    expressions = [variant.name_expression(arguments) for variant, arguments in members]
    module = cupy.RawModule(
        code=_source.load(source), options=options, name_expressions=expressions
    )
    try:
        for instance, expression in zip(members, expressions, strict=True):
            kernel = module.get_function(expression).kernel
            _functions[instance, device] = Function(kernel, kernel.ptr, overlaps=False)
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(f"cannot compile {source}: {error}") from error


# Geometry: (variant, hidden size, rows, device) -> Launch ------------------------------------


def _block_a_row(variant: Variant, hidden_size: int, rows: int, _: DeviceProperties) -> Launch:
    return Launch((str(hidden_size),), rows, hidden_size // variant.vec_size)


def _persistent(variant: Variant, hidden_size: int, rows: int, device: DeviceProperties) -> Launch:
    block = hidden_size // variant.vec_size
    resident = device.sm_count * min(32, THREADS_PER_SM // block)
    return Launch((str(hidden_size),), min(rows, resident), block)


def _async(variant: Variant, hidden_size: int, rows: int, device: DeviceProperties) -> Launch:
    launch = _persistent(variant, hidden_size, rows, device)
    asynchronous = "true" if device.arch >= 80 else "false"
    return launch._replace(template_arguments=(asynchronous, str(hidden_size)))


def _cluster(variant: Variant, hidden_size: int, rows: int, _: DeviceProperties) -> Launch:
    block = hidden_size // variant.vec_size // CLUSTER_SIZE
    return Launch((str(CLUSTER_SIZE), str(hidden_size)), rows * CLUSTER_SIZE, block)


def _strided(variant: Variant, hidden_size: int, rows: int, _: DeviceProperties) -> Launch:
    threads = int(variant.types[-1])
    return Launch((), rows, threads)


def _ilp(variant: Variant, hidden_size: int, rows: int, _: DeviceProperties) -> Launch:
    return Launch((str(ILP_THREADS), str(hidden_size)), rows, ILP_THREADS)


def _held(variant: Variant, hidden_size: int, rows: int, _: DeviceProperties) -> Launch:
    packs_a_vec = -(-hidden_size // (variant.vec_size * HELD_VECS))
    threads = max(32, 1 << (packs_a_vec - 1).bit_length())
    return Launch((str(HELD_VECS), str(threads)), rows, threads)


def _tiled(variant: Variant, hidden_size: int, rows: int, _: DeviceProperties) -> Launch:
    vec_size = _tiled_vec_size(variant, hidden_size)
    return Launch((str(vec_size), str(TILED_THREADS)), rows, TILED_THREADS)


def _tiled_vec_size(variant: Variant, hidden_size: int) -> int:
    """The widest load that divides every row."""
    return math.gcd(variant.vec_size, hidden_size)


# The table -----------------------------------------------------------------------------------

_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def _classic(norm: Norm) -> list[Variant]:
    def variant(
        name: str,
        dtype: str,
        vec_size: int,
        accumulation: str,
        summary: str,
        template: str | None = None,
        loads: int = 1,
    ) -> Variant:
        types = () if template is None else (DTYPES[dtype].cpp,)
        return Variant(
            name,
            norm,
            f"study_{norm}_norm",
            f"{norm}_norm_{template or name}",
            types,
            dtype,
            vec_size,
            accumulation,
            Sizes(64, 1024 * vec_size),
            summary,
            _block_a_row,
            loads=loads,
        )

    overflows = "; float16 sums overflow past 65504"
    return [
        variant("f32", "float32", 1, "float32", "one 4-byte load a thread"),
        variant("f32x4", "float32", 4, "float32", "one 16-byte load a thread"),
        variant("f16_f16", "float16", 1, "float16", "one 2-byte load a thread" + overflows),
        variant("f16_f32", "float16", 1, "float32", "one 2-byte load a thread"),
        variant("f16x2_f16", "float16", 2, "float16", "one 4-byte load a thread" + overflows),
        variant(
            "f16x8_f16", "float16", 8, "float16", "four 4-byte loads a thread" + overflows, loads=4
        ),
        variant("f16x8_f32", "float16", 8, "float32", "four 4-byte loads a thread", loads=4),
        variant("f16x8_pack_f16", "float16", 8, "float16", "one 16-byte load a thread" + overflows),
        variant(
            "f16x8_pack_f32", "float16", 8, "float32", "one 16-byte load a thread", "x8_pack_f32"
        ),
        variant(
            "bf16x8_pack_f32", "bfloat16", 8, "float32", "one 16-byte load a thread", "x8_pack_f32"
        ),
    ]


def _vector_weight() -> list[Variant]:
    return [
        Variant(
            f"{_SHORT[dtype]}_vector_weight_{threads}",
            "rms",
            "study_vector_weight",
            "vector_weight",
            (DTYPES[dtype].cpp, str(threads)),
            dtype,
            1,
            "float32",
            Sizes(1, power_of_two=False),
            f"a gain vector and a strided loop of {threads} threads; reads x twice",
            _strided,
            vector=True,
        )
        for dtype in ("float32", "float16", "bfloat16")
        for threads in (256, 512, 1024)
    ]


def _pack_of_16_bytes(
    name: str,
    norm: Norm,
    source: str,
    template: str,
    sizes: Callable[[int], Sizes],
    summary: str,
    geometry: Callable[[Variant, int, int, DeviceProperties], Launch] = _block_a_row,
    dtypes: tuple[str, ...] = ("float32", "float16"),
    **options: Any,
) -> list[Variant]:
    """One variant for each dtype, of a template that takes it and the elements in 16 bytes."""
    variants = []
    for dtype in dtypes:
        vec_size = 16 // DTYPES[dtype].itemsize
        variants.append(
            Variant(
                f"{_SHORT[dtype]}x{vec_size}_{name}",
                norm,
                source,
                template,
                (DTYPES[dtype].cpp, str(vec_size)),
                dtype,
                vec_size,
                "float32",
                sizes(vec_size),
                summary,
                geometry,
                **options,
            )
        )
    return variants


def _reductions() -> list[Variant]:
    tree = _pack_of_16_bytes(
        "tree",
        "rms",
        "study_reduction",
        "rms_norm_tree",
        lambda vec_size: Sizes(64, 1024 * vec_size),
        "sums in a shared-memory tree instead of by shuffles: a barrier a level",
    )
    mma = Variant(
        "f16x8_mma",
        "rms",
        "study_reduction",
        "rms_norm_f16x8_mma",
        (),
        "float16",
        8,
        "float32",
        Sizes(256, 8192),
        "squares on the tensor cores: one useful multiplication in sixteen",
        _block_a_row,
    )
    ilp = [
        Variant(
            f"{_SHORT[dtype]}_ilp_{count}",
            "rms",
            "study_reduction",
            "rms_norm_ilp",
            (DTYPES[dtype].cpp, str(count)),
            dtype,
            1,
            "float32",
            Sizes(ILP_THREADS * 4, 2**16),
            f"{count} independent loads and sums a thread, one element each; reads x twice",
            _ilp,
        )
        for dtype in ("float32", "float16")
        for count in (1, 2, 4)
    ]
    groups = _pack_of_16_bytes(
        "groups",
        "rms",
        "study_cooperative_groups",
        "rms_norm_groups",
        lambda vec_size: Sizes(32 * vec_size, 1024 * vec_size),
        "sums by cooperative_groups: shorter text, slower to compile",
    )
    return [*tree, mma, *ilp, *groups]


def _schedules() -> list[Variant]:
    return [
        *_pack_of_16_bytes(
            "persistent",
            "rms",
            "study_schedule",
            "rms_norm_persistent",
            lambda vec_size: Sizes(64, 1024 * vec_size),
            "as many blocks as fit; the next row loads while this one is summed",
            _persistent,
        ),
        *_pack_of_16_bytes(
            "async",
            "rms",
            "study_schedule",
            "rms_norm_async",
            lambda vec_size: Sizes(64, 1024 * vec_size),
            "the same, the next row copied to shared memory by cp.async",
            _async,
        ),
        *_pack_of_16_bytes(
            "cluster",
            "rms",
            "study_schedule",
            "rms_norm_cluster",
            lambda vec_size: Sizes(32 * vec_size * CLUSTER_SIZE, 1024 * vec_size * CLUSTER_SIZE),
            f"a row over a cluster of {CLUSTER_SIZE} blocks",
            _cluster,
            min_arch=90,
        ),
    ]


def _layer_vectors() -> list[Variant]:
    every = ("float32", "float16", "bfloat16")
    return [
        *_pack_of_16_bytes(
            "held",
            "layer",
            "study_layer_norm_vector",
            "layer_norm_held",
            lambda vec_size: Sizes(
                vec_size, 1024 * HELD_VECS * vec_size, multiple=vec_size, power_of_two=False
            ),
            "gain and shift vectors; the row is read once and held in registers",
            _held,
            every,
            vector=True,
        ),
        *[
            Variant(
                f"{_SHORT[dtype]}_tiled",
                "layer",
                "study_layer_norm_vector",
                "layer_norm_tiled",
                (DTYPES[dtype].cpp,),
                dtype,
                16 // DTYPES[dtype].itemsize,
                "float32",
                Sizes(1, power_of_two=False),
                "gain and shift vectors; two passes for the statistics, a third for the output",
                _tiled,
                vector=True,
            )
            for dtype in every
        ],
        *_pack_of_16_bytes(
            "single_pass",
            "layer",
            "study_layer_norm",
            "layer_norm_single_pass",
            lambda vec_size: Sizes(32 * vec_size, 1024 * vec_size),
            "E[x^2] - E[x]^2: one barrier, and cancellation where the mean is large",
            dtypes=every,
        ),
    ]


TABLE: tuple[Variant, ...] = (
    *_classic("rms"),
    *_vector_weight(),
    *_reductions(),
    *_schedules(),
    *_classic("layer"),
    *_layer_vectors(),
)
"""Every variant; tests, the study and the documentation walk it."""


def names(norm: Norm | None = None) -> tuple[str, ...]:
    """The names of the variants of RMSNorm ("rms"), of LayerNorm ("layer"), or of both."""
    if norm not in (None, "rms", "layer"):
        raise ValueError(f"norm must be 'rms', 'layer' or None, got {norm!r}")
    found = (variant.name for variant in TABLE if norm in (None, variant.norm))
    return tuple(dict.fromkeys(found))


class Named(SimpleNamespace):
    """Variants as attributes; of another name it says which are near."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_variant(name, tuple(vars(self))))


def _no_variant(name: str, known: tuple[str, ...]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3)
    listed = f"did you mean {_refuse.either(near)}?" if near else f"there are {', '.join(known)}"
    return f"no variant is called {name!r}: {listed}"


rms_norm = Named(**{v.name: v for v in TABLE if v.norm == "rms"})
"""The variants of RMSNorm as attributes: ``variants.rms_norm.f16x8_pack_f32(x)``."""

layer_norm = Named(**{v.name: v for v in TABLE if v.norm == "layer"})
"""The variants of LayerNorm as attributes: ``variants.layer_norm.f32x4(x, g=1.0, b=0.0)``."""


def __getattr__(name: str) -> Any:
    places = [f"{v.norm}_norm.{name}" for v in TABLE if v.name == name]
    found = f"the variant is {_refuse.either(places)}" if places else _no_variant(name, names())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {found}")


# What the kernels are compared with ----------------------------------------------------------


def naive_rms_norm(x: Any, g: Any = 1.0, *, eps: float = EPS) -> Any:
    """RMSNorm as one writes it first, in x's own dtype: every operator is a pass over memory.

    Works on NumPy, CuPy and torch alike. In float16 the squares overflow from ``|x| = 256`` on.

    Examples
    --------
    >>> import numpy as np
    >>> naive_rms_norm(np.array([[3.0, 4.0]]), eps=0.0).round(4)
    array([[0.8485, 1.1314]])
    """
    return x / ((x * x).mean(-1)[..., None] + eps) ** 0.5 * g


def naive_layer_norm(x: Any, g: Any = 1.0, b: Any = 0.0, *, eps: float = EPS) -> Any:
    """LayerNorm as one writes it first, in x's own dtype.

    Examples
    --------
    >>> import numpy as np
    >>> naive_layer_norm(np.array([[3.0, 4.0]]), eps=0.0)
    array([[-1.,  1.]])
    """
    deviation = x - x.mean(-1)[..., None]
    return deviation / ((deviation * deviation).mean(-1)[..., None] + eps) ** 0.5 * g + b


def eps_inside(x: Any, *, eps: float = EPS) -> Any:
    """RMSNorm with eps inside the root: ``x / sqrt(mean(x ** 2) + eps)``, as in this library.

    Near zero the result falls with x: where the mean square is far below eps, x is scaled by
    ``1 / sqrt(eps)``.

    Examples
    --------
    >>> import numpy as np
    >>> round(float(eps_inside(np.full(4, 1e-3), eps=1e-6)[0]), 6)
    0.707107
    """
    return x / ((x * x).mean(-1)[..., None] + eps) ** 0.5


def eps_outside(x: Any, *, eps: float = EPS) -> Any:
    """RMSNorm with eps outside the root: ``x / (sqrt(mean(x ** 2)) + eps)``.

    The same eps counts for far less here: it is compared with the root mean square and not with
    its square.

    Examples
    --------
    >>> import numpy as np
    >>> round(float(eps_outside(np.full(4, 1e-3), eps=1e-6)[0]), 6)
    0.999001
    """
    return x / ((x * x).mean(-1)[..., None] ** 0.5 + eps)
