"""Where the frameworks' derivatives differ on purpose: kinks, ties and the complex pullback.

A derivative at a kink is a choice. Each row is one such point, with what each framework chooses,
measured by running it: nothing here is remembered from a manual. `cross_check` names the row when
a disagreement is explained by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

import gradtools
from gradtools.testing.sides import double_precision

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Kink:
    """One function at one point.

    Attributes:
        name: What the table calls it.
        torch: A function of (the module torch, the point) to an array.
        jax: The same of (the module jax, the point).
        point: Where the derivative is taken.
        torch_ops: Beginnings of the names of PyTorch's nodes by which a graph is recognised.
        jax_ops: Names of JAX's primitives or of its named functions, likewise.
    """

    name: str
    torch: Function
    jax: Function
    point: Any
    torch_ops: tuple[str, ...] = ()
    jax_ops: tuple[str, ...] = ()


Derivative = tuple[Any, ...]


@dataclass(frozen=True)
class Convention:
    """A row of the table, as each installed framework gives it.

    Attributes:
        name: The function and the point.
        torch: PyTorch's pullback of ones, flat; None where PyTorch is not installed.
        jax: JAX's.
        torch_twice: The pullback of ones of that pullback; None also where the framework has no
            second derivative there, and for complex points.
        jax_twice: JAX's.
    """

    name: str
    torch: Derivative | None
    jax: Derivative | None
    torch_twice: Derivative | None = None
    jax_twice: Derivative | None = None

    @property
    def differs(self) -> bool:
        """Whether the two frameworks chose differently, at first or second order."""
        return self.differs_at(1) or self.differs_at(2)

    def at(self, order: int) -> tuple[Derivative | None, Derivative | None]:
        """Both frameworks' derivative of that order."""
        return (self.torch, self.jax) if order == 1 else (self.torch_twice, self.jax_twice)

    def differs_at(self, order: int) -> bool:
        """Whether they chose differently at order 1 or 2."""
        first, second = self.at(order)
        if first is None or second is None:
            return False
        return not np.array_equal(np.asarray(first), np.asarray(second), equal_nan=True)


def _same(
    name: str, path: str, point: Any, torch_ops: Sequence[str], jax_ops: Sequence[str]
) -> Kink:
    """A kink of a function that both have under one name in torch and in jax.numpy."""
    return Kink(
        name,
        lambda t, x: getattr(t, path)(x),
        lambda j, x: getattr(j.numpy, path)(x),
        point,
        tuple(torch_ops),
        tuple(jax_ops),
    )


def _nn(name: str, path: str, point: Any, torch_ops: Sequence[str], jax_ops: Sequence[str]) -> Kink:
    """The same in torch.nn.functional and jax.nn."""
    hard = {"hardtanh": "hard_tanh", "hardsigmoid": "hard_sigmoid", "hardswish": "hard_swish"}
    return Kink(
        name,
        lambda t, x: getattr(t.nn.functional, path)(x),
        lambda j, x: getattr(j.nn, hard.get(path, path))(x),
        point,
        tuple(torch_ops),
        tuple(jax_ops),
    )


def _pair(name: str, path: str, point: Any, torch_op: str, *jax_ops: str) -> Kink:
    """The same of the two halves of one array."""
    return Kink(
        name,
        lambda t, x: getattr(t, path)(x[0], x[1]),
        lambda j, x: getattr(j.numpy, path)(x[0], x[1]),
        point,
        (torch_op,),
        jax_ops,
    )


_NORM = ("LinalgVectorNorm", "NormBackward", "Sqrt")
_TIE = [1.0, 1.0, 0.0]
KINKS: tuple[Kink, ...] = (
    _same("|x| at 0", "abs", [0.0], ["Abs"], ["abs"]),
    _same("|x| at -0", "abs", [-0.0], ["Abs"], ["abs"]),
    _same("|z| at 0, complex", "abs", [0j], ["Abs"], ["abs"]),
    Kink(
        "clip at its lower edge",
        lambda t, x: t.clamp(x, 0.0, 1.0),
        lambda j, x: j.numpy.clip(x, 0.0, 1.0),
        [0.0],
        ("Clamp",),
        ("clip", "clamp", "max", "min"),
    ),
    Kink(
        "clip at its upper edge",
        lambda t, x: t.clamp(x, 0.0, 1.0),
        lambda j, x: j.numpy.clip(x, 0.0, 1.0),
        [1.0],
        ("Clamp",),
        ("clip", "clamp", "max", "min"),
    ),
    Kink(
        "norm at 0",
        lambda t, x: t.linalg.vector_norm(x),
        lambda j, x: j.numpy.linalg.norm(x),
        [0.0, 0.0],
        _NORM,
        ("norm", "sqrt"),
    ),
    Kink(
        "1-norm at 0",
        lambda t, x: t.linalg.vector_norm(x, 1),
        lambda j, x: j.numpy.linalg.norm(x, 1),
        [0.0, 2.0],
        _NORM,
        ("abs", "norm"),
    ),
    Kink(
        "maximum norm, ties",
        lambda t, x: t.linalg.vector_norm(x, float("inf")),
        lambda j, x: j.numpy.linalg.norm(x, j.numpy.inf),
        [1.0, -1.0, 0.0],
        _NORM,
        ("reduce_max", "norm"),
    ),
    Kink(
        "x**0 at 0 (a number)",
        lambda t, x: x**0.0,
        lambda j, x: x**0.0,
        [0.0],
        ("Pow",),
        ("pow", "integer_pow"),
    ),
    Kink(
        "x**y at x = 0, y = 0 (arrays)",
        lambda t, x: x ** t.zeros_like(x),
        lambda j, x: x ** j.numpy.zeros_like(x),
        [0.0],
        ("Pow",),
        ("pow",),
    ),
    Kink(
        "x**0.5 at 0",
        lambda t, x: x**0.5,
        lambda j, x: x**0.5,
        [0.0],
        ("Pow",),
        ("pow", "sqrt"),
    ),
    _same("sqrt at 0", "sqrt", [0.0], ["Sqrt"], ["sqrt"]),
    _same("max over an axis, ties", "amax", _TIE, ["Amax", "Max"], ["reduce_max", "max"]),
    _same(
        "min over an axis, ties", "amin", [0.0, 0.0, 1.0], ["Amin", "Min"], ["reduce_min", "min"]
    ),
    Kink(
        "max over axis 0 with its index, ties",
        lambda t, x: t.max(x, 0).values,
        lambda j, x: x.max(0),
        _TIE,
        ("Max",),
        ("reduce_max", "max"),
    ),
    _pair("maximum(x, y), x = y", "maximum", [[1.0], [1.0]], "Maximum", "max", "maximum"),
    _pair("minimum(x, y), x = y", "minimum", [[1.0], [1.0]], "Minimum", "min", "minimum"),
    _same("median, ties", "median", [1.0, 1.0, 0.0], ["Median"], ["sort", "median", "quantile"]),
    _same(
        "median of two (values differ too)", "median", [1.0, 2.0], ["Median"], ["sort", "median"]
    ),
    Kink(
        "sort, ties, times 1, 2, 3",
        lambda t, x: t.sort(x).values * t.tensor([1.0, 2.0, 3.0]),
        lambda j, x: j.numpy.sort(x) * j.numpy.array([1.0, 2.0, 3.0]),
        _TIE,
        ("Sort",),
        ("sort",),
    ),
    Kink(
        "two largest of three, ties",
        lambda t, x: t.topk(x, 2).values * t.tensor([1.0, 2.0]),
        lambda j, x: j.lax.top_k(x, 2)[0] * j.numpy.array([1.0, 2.0]),
        [1.0, 1.0, 1.0],
        ("Topk",),
        ("top_k",),
    ),
    Kink(
        "cumulative maximum, ties",
        lambda t, x: t.cummax(x, 0).values,
        lambda j, x: j.lax.cummax(x, 0),
        [1.0, 1.0],
        ("Cummax",),
        ("cummax",),
    ),
    _nn("relu at 0", "relu", [0.0], ["Relu"], ["relu", "max"]),
    _nn("relu6 at 6", "relu6", [6.0], ["Hardtanh"], ["relu6", "min", "max"]),
    _nn("leaky_relu at 0", "leaky_relu", [0.0], ["LeakyRelu"], ["leaky_relu"]),
    _nn("elu at 0", "elu", [0.0], ["Elu"], ["elu"]),
    _nn("hardtanh at 1", "hardtanh", [1.0], ["Hardtanh"], ["hard_tanh", "min", "max"]),
    _nn("hardsigmoid at 3", "hardsigmoid", [3.0], ["Hardsigmoid"], ["hard_sigmoid", "relu6"]),
    _nn("hardswish at 3", "hardswish", [3.0], ["Hardswish"], ["hard_swish", "relu6"]),
    Kink(
        "where(x > 0, x, 0) at 0",
        lambda t, x: t.where(x > 0, x, t.zeros_like(x)),
        lambda j, x: j.numpy.where(x > 0, x, 0.0),
        [0.0],
        ("Where",),
        ("select_n",),
    ),
    _pair("arctan2 at (0, 0)", "arctan2", [[0.0], [0.0]], "Atan2", "atan2"),
    _pair("hypot at (0, 0)", "hypot", [[0.0], [0.0]], "Hypot", "hypot", "sqrt"),
    _pair("remainder of 2 by 1", "remainder", [[2.0], [1.0]], "Remainder", "rem", "remainder"),
    _pair(
        "logaddexp at (-inf, -inf)", "logaddexp", [[-np.inf], [-np.inf]], "Logaddexp", "logaddexp"
    ),
    Kink(
        "logsumexp of -inf alone",
        lambda t, x: t.logsumexp(x, 0),
        lambda j, x: j.scipy.special.logsumexp(x, 0),
        [-np.inf, -np.inf],
        ("Logsumexp",),
        ("logsumexp", "log", "exp"),
    ),
    Kink(
        "x log y at x = 0, y = 0",
        lambda t, x: t.xlogy(x[0], x[1]),
        lambda j, x: j.scipy.special.xlogy(x[0], x[1]),
        [[0.0], [0.0]],
        ("Xlogy",),
        ("xlogy", "log"),
    ),
    _same("product with one zero", "prod", [0.0, 2.0, 3.0], ["Prod"], ["reduce_prod", "prod"]),
    _same("sinc at 0", "sinc", [0.0], ["Sinc"], ["sinc"]),
    _same("round at 0.5", "round", [0.5], ["Round"], ["round"]),
    Kink(
        "standard deviation of equal numbers",
        lambda t, x: t.std(x, unbiased=False),
        lambda j, x: j.numpy.std(x),
        [1.0, 1.0],
        ("Std",),
        ("std", "sqrt", "_std"),
    ),
    Kink(
        "pullback of z**2 at 1 + 2i, native",
        lambda t, x: x * x,
        lambda j, x: x * x,
        [1 + 2j],
    ),
)


def conventions(containing: str = "") -> tuple[Convention, ...]:
    """The table, measured on the installed versions in float64 (each row once in a process).

    Each row is the pullback of ones by the framework's own `torch.autograd.grad` or `jax.vjp`, once
    and twice.

    Args:
        containing: Only rows whose name has this text; the others are not measured.

    Returns:
        One `Convention` for each row; None stands for a framework that is not installed.

    Example:
        >>> from gradtools.testing import conventions
        >>> (row,) = conventions("|x| at 0")
        >>> row.torch, row.jax
        ((0.0,), (1.0,))

    Source: the frameworks' own choices, measured; |x| at 0, clip at its edges, the norm at 0,
    x**0 at 0 and median ties were known to differ.
    """
    return tuple(measured(kink) for kink in KINKS if containing in kink.name)


@cache
def measured(kink: Kink) -> Convention:
    """One row of the table."""
    installed = gradtools.available_backends()
    none = (None, None)
    torch, torch_twice = _measure_torch(kink) if "torch" in installed else none
    jax, jax_twice = _measure_jax(kink) if "jax" in installed else none
    return Convention(kink.name, torch, jax, torch_twice, jax_twice)


def explaining(torch_ops: set[str], jax_ops: set[str] | None, order: int) -> list[Convention]:
    """The rows that differ, up to an order, and whose operations both programs hold.

    Args:
        torch_ops: The names of the nodes of PyTorch's graph.
        jax_ops: The names of JAX's primitives and named functions; None if it was not traced.
        order: 1 or 2.
    """
    rows = [measured(kink) for kink in KINKS if _holds(kink, torch_ops, jax_ops)]
    return [row for row in rows if row.differs_at(1) or row.differs_at(order)]


def _holds(kink: Kink, torch_ops: set[str], jax_ops: set[str] | None) -> bool:
    in_torch = bool(kink.torch_ops) and any(op.startswith(kink.torch_ops) for op in torch_ops)
    return in_torch and (jax_ops is None or bool(jax_ops & set(kink.jax_ops)))


def convention_table(rows: Sequence[Convention] | None = None, colour: bool = False) -> str:
    """The table as text; rows that differ are marked with a star."""
    rows = conventions() if rows is None else rows
    cells = [(_star(row), row.name, *map(_values, (*row.at(1), *row.at(2)))) for row in rows]
    head = ("", "function and point", "torch", "jax", "torch, twice", "jax, twice")
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(head, widths, strict=True)).rstrip()]
    for row, line in zip(rows, cells, strict=True):
        text = "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        lines.append(f"\x1b[33m{text}\x1b[0m" if colour and row.differs else text)
    different = sum(row.differs for row in rows)
    return "\n".join([*lines, f"{different} of {len(rows)} differ (*)"])


def _star(row: Convention) -> str:
    return "*" if row.differs else ""


def _values(values: Derivative | None) -> str:
    return "-" if values is None else ", ".join(f"{v:.4g}" for v in values)


def _measure_torch(kink: Kink) -> tuple[Derivative, Derivative | None]:
    torch = import_module("torch")
    with torch.enable_grad():
        x = torch.tensor(kink.point, dtype=_dtype(torch, kink), requires_grad=True)
        out = kink.torch(torch, x)
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        second = None if g.is_complex() else _torch_twice(torch, g, x)
    return tuple(g.detach().reshape(-1).resolve_conj().tolist()), second


def _torch_twice(torch: Any, g: Any, x: Any) -> Derivative | None:
    if not g.requires_grad:
        return tuple(0 * v for v in g.reshape(-1).tolist())
    try:
        (h,) = torch.autograd.grad(g, x, torch.ones_like(g), allow_unused=True)
    except RuntimeError:  # some of PyTorch's derivatives have no derivative
        return None
    h = torch.zeros_like(x) if h is None else h.clone()
    return tuple(h.reshape(-1).tolist())


def _measure_jax(kink: Kink) -> tuple[Derivative, Derivative | None]:
    jax = import_module("jax")
    ones = jax.numpy.ones_like

    def gradient(x: Any) -> Any:
        out, pullback = jax.vjp(lambda x: kink.jax(jax, x), x)
        return pullback(ones(out))[0]

    with double_precision(True):
        x = jax.numpy.asarray(kink.point, _dtype(jax.numpy, kink))
        g, pullback = jax.vjp(gradient, x)
        twice = None if np.iscomplexobj(g) else pullback(ones(g))[0]
        second = None if twice is None else tuple(twice.reshape(-1).tolist())
        return tuple(g.reshape(-1).tolist()), second


def _dtype(library: Any, kink: Kink) -> Any:
    return library.complex128 if np.iscomplexobj(kink.point) else library.float64
