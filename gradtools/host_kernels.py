"""Host kernels call NumPy, SciPy or ctypes functions inside a framework's program.

A framework that traces a program needs the shape and dtype of a kernel's result before it runs the
kernel. An `ArraySpec` declares the shape and dtype, and `KernelCall` checks each result against its
spec, because the framework could cast or misinterpret the result. Under vmap a kernel is called
once per example, or once with leading batch axes on every argument. A kernel has no
derivative. `torch/host.py` and `jax/host.py` embed kernel calls in the frameworks' programs.
"""

from __future__ import annotations

import numbers
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from gradtools.arguments.checks import check_function
from gradtools.arguments.wording import in_words, name_of, with_article
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.integrations.containers import is_same, whole
from gradtools.rules import ARRAY, KEYS, refilled

T = TypeVar("T")
Shape = tuple[Any, ...]  # integers, or symbolic sizes while the framework traces

_SIZES = {"int": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_SIZES["uint"] = _SIZES["int"]
_DTYPES = {"bool", "bfloat16"} | {f"{kind}{n}" for kind, sizes in _SIZES.items() for n in sizes}
_PLAIN_KINDS = "biufc"
_CARRIED = {"bfloat16": "float32"}  # NumPy lacks bfloat16; kernels receive float32
_SCALARS = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
_FRAMEWORKS = {"torch": "torch.Tensor", "jax": "jax.Array", "jaxlib": "jax.Array"}


@whole
@dataclass(frozen=True)
class ArraySpec:
    """The shape and the dtype name of an array.

    Args:
        shape: A tuple of integers; an integer n means (n,).
        dtype: A name such as "float32", "bfloat16", "complex128", "int64" or "bool", or a dtype of
            NumPy or of the framework. The dtype is stored by name.

    Raises:
        GradtoolsError: shape or dtype is invalid.

    Example:
        >>> gt.ArraySpec((3,), "float32")
        ArraySpec(shape=(3,), dtype='float32')
        >>> gt.ArraySpec(3, np.float32) == gt.ArraySpec((3,), "float32")
        True
    """

    __gradtools_array__ = True  # see `integrations.containers`
    shape: Shape
    dtype: str

    @user_facing
    def __init__(self, shape: Any, dtype: Any) -> None:
        dims = (shape,) if isinstance(shape, numbers.Integral) else shape
        try:
            if hasattr(shape, "dtype") and type(shape).__module__.split(".")[0] in _FRAMEWORKS:
                raise TypeError  # an array was passed instead of a shape
            object.__setattr__(self, "shape", tuple([_dim(d) for d in dims]))
        except (TypeError, ValueError):
            raise GradtoolsError(
                f"ArraySpec: shape is {shape!r}; it must be a tuple of "
                "nonnegative integers, such as (2, 3), or () for a number."
            ) from None
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            with suppress(TypeError):
                name = np.dtype(dtype).name if dtype is not None else ""
        if name not in _DTYPES:
            raise GradtoolsError(
                f"ArraySpec: dtype is {dtype!r}; it must name one of bool, int8 to int64, uint8 to "
                "uint64, float16, bfloat16, float32, float64, complex64 and complex128."
            )
        object.__setattr__(self, "dtype", name)


def _dim(d: Any) -> Any:
    if type(d).__module__.partition(".")[0] in _FRAMEWORKS:
        return d  # int(d) would specialize a symbolic size
    if isinstance(d, bool) or operator.index(d) < 0:
        raise ValueError(d)
    return operator.index(d)


@dataclass(frozen=True, eq=False, repr=False)
class Kernel:
    """A function of NumPy arrays, and the specs of its results.

    Attributes:
        fun: Receives the program's arrays as read-only NumPy arrays in C order (bfloat16 as
            float32), and other arguments unchanged; returns NumPy arrays.
        out: None (one array like the first array argument), a pytree of ArraySpecs, or a function
            that returns such a pytree for the arguments, with each array replaced by its ArraySpec
            of one example.
        vectorized: Whether vmap calls fun once, with leading batch axes on every array, instead of
            once per example.
        name: The kernel's name in messages.
        raw: Whether fun takes arrays of any strides (0 for a broadcast axis), and returns a list of
            arrays that are never written to and therefore are not copied.
        inside: An object with `name` and `fun`, the function of another framework that this kernel
            wraps; None if there is none.
        declared: Whether the user declares `out`; False for an adjoint.
    """

    __gradtools_holds__ = ("fun", "out")  # see `rules.captured_objects`

    fun: Callable[..., Any]
    out: Any = None
    vectorized: bool = False
    name: str = ""
    raw: bool = False
    inside: Any = None
    declared: bool = True
    traced: dict[str, KernelCall] = field(default_factory=dict, init=False)
    calls: dict[Any, KernelCall] = field(default_factory=dict, init=False)
    known: dict[Any, tuple[KernelCall, Results]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_function("host_function", self.fun, "kernel")
        if not self.name:
            object.__setattr__(self, "name", name_of(self.fun))

    def __repr__(self) -> str:
        return f"<host kernel {self.name}>"

    def note(self, error: ValueError) -> None:
        """Adds a note to NumPy's error for writing to an argument."""
        if "read-only" in str(error):
            error.add_note(f"host function {self.name!r}: the arguments are read-only; copy them.")

    def bind(self, backend: Any, args: Sequence[Any]) -> tuple[KernelCall, list[Any]]:
        """Returns the `KernelCall` for the arguments' structure, and the arrays in order.

        NumPy arrays are treated as arrays; Python and NumPy scalars are treated as non-arrays.
        """
        leaves, treedef = backend.flatten(tuple(args))
        arrays = [backend.is_array(x) or isinstance(x, np.ndarray) for x in leaves]
        xs = [backend.asarray(x) for x, a in zip(leaves, arrays, strict=True) if a]
        others = tuple([ARRAY if a else x for x, a in zip(leaves, arrays, strict=True)])
        key = (backend, treedef, others, *type_key(others))
        try:
            call = self.calls.get(key)  # Compiled programs refer to the call by its key.
        except TypeError:  # An argument is not hashable.
            return KernelCall(self, backend, treedef, others), xs
        if call is None:
            call = remember(self.calls, key, KernelCall(self, backend, treedef, others))
        return call, xs

    def known_call(
        self, avals: Any, backend: Any, args: Sequence[Any]
    ) -> tuple[KernelCall, Results]:
        """Returns the `KernelCall` for the arguments and its result specs, memoized by `avals`.

        avals: A cache key; calls with equal keys must have equal result specs.
        """
        result = self.known.get(avals)
        if result is None:
            call, xs = self.bind(backend, args)
            result = remember(self.known, avals, (call, call.results_of(xs)))
        return result


def remember(cache: dict[Any, T], key: Any, value: T) -> T:
    """Adds an entry to a cache, and removes the oldest entry if the cache is full."""
    cache[key] = value
    if len(cache) > _MOST_CALLS:
        del cache[next(iter(cache))]
    return value


def type_key(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a key that distinguishes equal values such as 1, 1.0 and True, or 0.0 and -0.0."""
    return tuple([(type(v), repr(v) if isinstance(v, (float, complex)) else "") for v in values])


_MOST_CALLS = 256
_BY_KEY: weakref.WeakValueDictionary[str, KernelCall] = weakref.WeakValueDictionary()


def call_by_key(key: str) -> KernelCall:
    """Returns the `KernelCall` with the given key; raises an error if it was garbage collected."""
    call = call_if_kept(key)
    if call is None:
        raise GradtoolsError(
            "host_function: a compiled program calls a host function that was deleted. Keep "
            "a reference to the host function as long as the program is used."
        )
    return call


def call_if_kept(key: str) -> KernelCall | None:
    """Returns the `KernelCall` with the given key, or None if it was garbage collected."""
    return _BY_KEY.get(key)


@dataclass(frozen=True)
class Results:
    """A kernel's results for one example: their ArraySpecs and tree structure.

    Attributes:
        specs: One ArraySpec for each array.
        treedef: The tree structure of the results.
        alone: Whether the result is a single array without a container.
        avals: The shapes and NumPy dtypes, with float32 in place of bfloat16.
        widened: Whether any array is bfloat16.
    """

    specs: tuple[ArraySpec, ...]
    treedef: Any
    alone: bool
    avals: tuple[Any, ...] = field(init=False, compare=False)
    widened: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        avals = [(s.shape, np.dtype(carrier(s.dtype))) for s in self.specs]
        object.__setattr__(self, "avals", tuple(avals))
        object.__setattr__(self, "widened", any(s.dtype in _CARRIED for s in self.specs))


@dataclass(frozen=True, eq=False, repr=False)
class KernelCall:
    """A kernel as a function of a flat list of arrays, for one tree structure of the arguments.

    Attributes:
        kernel: The kernel that is called.
        trees: The backend that flattens and unflattens pytrees.
        treedef: The structure of the tuple of arguments.
        others: The leaves of the arguments, with ARRAY for each array.
        key: A string that compiled code embeds to refer to the call; see `call_by_key`.
        flat: Whether the arguments are arrays without containers.
    """

    kernel: Kernel
    trees: Any
    treedef: Any
    others: tuple[Any, ...]
    key: str = field(default_factory=lambda: next(KEYS))
    flat: bool = field(init=False)

    def __post_init__(self) -> None:
        _BY_KEY[self.key] = self
        leaf = self.trees.flatten(ARRAY)[1]
        entries = self.trees.entries_of(self.treedef, self.others)
        flat = all(x is ARRAY for x in self.others) and all(is_same(t, leaf) for _, t in entries)
        object.__setattr__(self, "flat", flat)

    def __repr__(self) -> str:
        return f"<call of {self.kernel!r}>"

    def keep(self) -> None:
        """Keeps the call alive as long as the kernel exists; compiled code stores only the key."""
        self.kernel.traced[self.key] = self

    def results_of(self, xs: Sequence[Any], batch_axes: int = 0) -> Results:
        """Returns the result specs for the arguments, with `batch_axes` leading batch axes."""
        name = self.trees.dtype_name
        return self.results([ArraySpec(tuple(x.shape[batch_axes:]), name(x)) for x in xs])

    def results(self, specs: Sequence[ArraySpec]) -> Results:
        """Returns the result specs for one example with arguments of the given ArraySpecs."""
        out = self.kernel.out
        if isinstance(out, type) and issubclass(out, np.generic | bool | int | float | complex):
            raise self.error(f"out is {out!r}; it must be an ArraySpec(shape, dtype).")
        if callable(out):
            out = out(*self._arguments(specs))
        elif out is None:
            if not specs:
                raise self.error(
                    "without an array argument the result's shape is unknown. Pass an array "
                    "instead of numbers, or give out=ArraySpec(shape, dtype)."
                )
            out = specs[0]
        result, treedef = self.trees.flatten(out)
        for spec, path in zip(result, self.trees.leaf_paths(out), strict=True):
            if not isinstance(spec, ArraySpec):
                raise self.error(f"out{path} is {spec!r}; it must be an ArraySpec(shape, dtype).")
        return Results(tuple(result), treedef, isinstance(out, ArraySpec))

    def run(
        self,
        xs: Sequence[np.ndarray],
        expected: Results,
        batch: Shape = (),
    ) -> list[np.ndarray]:
        """Calls the kernel.

        Args:
            xs: NumPy arrays with len(batch) leading axes. The length of each of these axes is 1 or
                the length in `batch`.
            expected: The result specs of one example; see `results`.
            batch: The sizes of the batch axes.

        Returns:
            New arrays with batch axes and the expected shapes, in float32 if a spec has dtype
            bfloat16.
        """
        if not self.kernel.raw:
            xs = [read_only(x) for x in xs]
        n = len(batch)
        full = [
            x if x.shape[:n] == batch else np.broadcast_to(x, (*batch, *x.shape[n:])) for x in xs
        ]
        if self.kernel.raw:
            return self._checked(self._called(full), expected, batch)
        if not batch or self.kernel.vectorized:
            full = [x if x.flags.c_contiguous else read_only(x) for x in full]
            return self.fresh(full, expected, batch)
        ys = [np.empty((*batch, *s.shape), carrier(s.dtype)) for s in expected.specs]
        for i in np.ndindex(*batch):
            example = self._checked(self._called([x[(*i, ...)] for x in full]), expected)
            for y, one in zip(ys, example, strict=True):
                y[i] = one
        return ys

    def fresh(
        self, xs: Sequence[np.ndarray], expected: Results, batch: Shape = ()
    ) -> list[np.ndarray]:
        """Calls the kernel with read-only arrays in C order; returns copies of the results."""
        return self.owned(self._called(xs), expected, batch)

    def owned(self, tree: Any, expected: Results, batch: Shape = ()) -> list[np.ndarray]:
        """Returns copies of the kernel's results; rejects results that differ from their specs.

        Copies are necessary because the kernel may return its argument or a reused workspace.
        """
        pairs = zip(self._checked(tree, expected, batch), expected.avals, strict=True)
        return [np.array(y, dtype, order="C") for y, (_, dtype) in pairs]

    def _called(self, xs: Sequence[np.ndarray]) -> Any:
        try:
            return self.kernel.fun(*xs) if self.flat else self.kernel.fun(*self._arguments(xs))
        except ValueError as error:
            self.kernel.note(error)
            raise

    def _checked(self, tree: Any, expected: Results, batch: Shape = ()) -> list[Any]:
        """Flattens the kernel's results; raises an error if a result differs from its spec."""
        ys = [tree]
        if self.kernel.raw:
            ys = tree
            if len(ys) != len(expected.specs):
                count = len(expected.specs)
                raise self.error(
                    f"the kernel returned {len(ys)} arrays, but out specifies {count}."
                )
        elif not (expected.alone and type(tree) is np.ndarray):
            wanted = expected.treedef
            try:
                ys = wanted.flatten_up_to(tree)  # dict keys may be in a different order
            except (ValueError, TypeError):
                ys = [None]
            if any(y is None or isinstance(y, (tuple, list, dict)) for y in ys):
                if tree is None:
                    raise self.error(
                        "the kernel returned None; expected the structure of out, "
                        f"{in_words(wanted)}. A kernel that fills an array must return the array."
                    )
                came = in_words(self.trees.flatten(tree)[1])
                raise self.error(
                    f"the kernel returned the structure {came}; expected the structure of out, "
                    f"{in_words(wanted)}."
                )
        for y, (shape, dtype) in zip(ys, expected.avals, strict=True):
            if type(y) is not np.ndarray or y.dtype != dtype or y.shape != (*batch, *shape):
                break
        else:
            return ys
        for i, (y, spec) in enumerate(zip(ys, expected.specs, strict=True)):
            if wrong := _wrong(y, spec, batch, self.kernel.declared):
                path = self.trees.leaf_paths(self.trees.unflatten(expected.treedef, ys))[i]
                raise self.error(f"result{path} {wrong}")
        return ys

    def _arguments(self, values: Sequence[Any]) -> Any:
        """Unflattens the arguments with `values` as the array leaves."""
        return self.trees.unflatten(self.treedef, refilled(self.others, values))

    def error(self, text: str) -> GradtoolsError:
        """Returns an error that names the kernel."""
        inside = self.kernel.inside
        who = f"bridged {inside.name}" if inside else f"host function {self.kernel.name!r}"
        return GradtoolsError(f"{who}: {text}")

    def no_derivative(self) -> GradtoolsError:
        """Returns the error for differentiating a kernel without a rule."""
        return self.error("the kernel has no derivative. Define a rule (defvjp or defjvp).")


def _wrong(y: Any, spec: ArraySpec, batch: Shape, declared: bool) -> str:
    """Describes how y differs from its spec, and the fix; returns "" if y matches the spec.

    declared: Whether the user declares the spec; otherwise the kernel is an adjoint.
    """
    shape = (*batch, *spec.shape)
    behind = f", with the leading batch axes {batch} (vectorized=True)" if batch else ""
    expected = f"expected shape {shape} and dtype {spec.dtype}{behind}"
    if isinstance(y, (np.ndarray, np.generic)):
        if y.shape == shape and y.dtype.name in (spec.dtype, carrier(spec.dtype)):
            return ""
        own, fix = f"out=ArraySpec({y.shape}, {y.dtype.name!r})", ""
        if not declared:
            fix = " adjoint must return a cotangent like the kernel's argument."
        elif not batch and y.shape == shape:
            fix = f" No result is cast: return y.astype({carrier(spec.dtype)!r}), or declare {own}."
        elif not batch:
            fix = f" Declare the result: {own}, or a function of the arguments' ArraySpecs."
        return f"has shape {y.shape} and dtype {y.dtype}; {expected}.{fix}"
    if shape == () and _fits(y, spec.dtype):
        return ""
    return f"is {_described(y)}; {expected}. Return NumPy arrays."


def carrier(dtype: str) -> str:
    """Returns the NumPy dtype for a spec's dtype: float32 for bfloat16, which NumPy lacks."""
    return _CARRIED.get(dtype, dtype)


def read_only(x: np.ndarray) -> np.ndarray:
    """Returns x in C order, as an array that cannot be made writable."""
    if x.dtype.kind not in _PLAIN_KINDS:  # a dtype of ml_dtypes, which NumPy reads as raw bytes
        x = x.astype(carrier(x.dtype.name))
    return np.asarray(np.asarray(x, order="C").data.toreadonly())


def _fits(y: Any, dtype: str) -> bool:
    """Returns whether a Python number has the kind of the dtype and lies within its range."""
    try:
        kind = np.dtype(carrier(dtype)).kind
        return type(y) is _SCALARS[kind] and np.array(y, carrier(dtype)) is not None
    except OverflowError:
        return False


def _described(y: Any) -> str:
    for base in type(y).__mro__:
        if framework := _FRAMEWORKS.get(base.__module__.partition(".")[0]):
            return f"a {framework}"
    if isinstance(y, (bool, int, float, complex)):
        return f"the Python {type(y).__name__} {y!r}"
    return with_article(type(y).__name__)
