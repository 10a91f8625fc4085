"""The frameworks' conventions for derivatives at kinks and ties, and for the complex pullback.

A derivative at a kink is a choice. Each row of the table is one such point with the choice of each
framework, measured by running it, for docs/what-differs.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

import gradtools
from gradtools.testing.cross_checking.sides import in_double_precision


@dataclass(frozen=True, eq=False)
class Kink:
    """One function at one point.

    Attributes:
        name: Its name in the table.
        torch: The function in PyTorch, as an expression in x.
        jax: The same in JAX.
        point: The point at which the derivative is taken.
        torch_ops: Names of operations that identify it in a PyTorch graph.
        jax_ops: Names of operations or JAX functions that identify it in a JAX graph.
    """

    name: str
    torch: str
    jax: str
    point: Any
    torch_ops: tuple[str, ...] = ()
    jax_ops: tuple[str, ...] = ()


Derivative = tuple[Any, ...]


@dataclass(frozen=True)
class Convention:
    """A row of the table, measured in each installed framework.

    Attributes:
        name: The function and the point.
        torch: PyTorch's pullback of ones, flat; None if PyTorch is not installed.
        jax: The same in JAX.
        torch_twice: The pullback of ones of that pullback; None also if the framework has no
            second derivative there, and for complex points.
        jax_twice: The same in JAX.
    """

    name: str
    torch: Derivative | None
    jax: Derivative | None
    torch_twice: Derivative | None = None
    jax_twice: Derivative | None = None

    @property
    def differs(self) -> bool:
        """Whether the two frameworks differ, at first or second order."""
        return self.differs_at(1) or self.differs_at(2)

    def at(self, order: int) -> tuple[Derivative | None, Derivative | None]:
        """Both frameworks' derivatives of this order."""
        return (self.torch, self.jax) if order == 1 else (self.torch_twice, self.jax_twice)

    def differs_at(self, order: int) -> bool:
        """Whether the two frameworks differ at order 1 or 2."""
        first, second = self.at(order)
        if first is None or second is None:
            return False
        return not np.array_equal(np.asarray(first), np.asarray(second), equal_nan=True)


_TABLE = """
|x| at 0; [0.0]
    t.abs(x); n.abs(x); abs; abs
|x| at -0; [-0.0]
    t.abs(x); n.abs(x); abs; abs
|z| at 0, complex; [0j]
    t.abs(x); n.abs(x); abs; abs
clip at its lower edge; [0.0]
    t.clamp(x, 0.0, 1.0); n.clip(x, 0.0, 1.0); clip; clip maximum minimum
clip at its upper edge; [1.0]
    t.clamp(x, 0.0, 1.0); n.clip(x, 0.0, 1.0); clip; clip maximum minimum
norm at 0; [0.0, 0.0]
    t.linalg.vector_norm(x); n.linalg.norm(x); norm sqrt; norm sqrt
1-norm at 0; [0.0, 2.0]
    t.linalg.vector_norm(x, 1); n.linalg.norm(x, 1); norm sqrt; abs norm
maximum norm, ties; [1.0, -1.0, 0.0]
    t.linalg.vector_norm(x, inf); n.linalg.norm(x, inf); norm sqrt; max norm
x**0 at 0 (a number); [0.0]
    x**0.0; x**0.0; power; power
x**y at x = 0, y = 0 (arrays); [0.0]
    x ** t.zeros_like(x); x ** n.zeros_like(x); power; power
x**0.5 at 0; [0.0]
    x**0.5; x**0.5; power; power sqrt
sqrt at 0; [0.0]
    t.sqrt(x); n.sqrt(x); sqrt; sqrt
max over an axis, ties; [1.0, 1.0, 0.0]
    t.amax(x); n.amax(x); max; max
min over an axis, ties; [0.0, 0.0, 1.0]
    t.amin(x); n.amin(x); min; min
max over axis 0 with its index, ties; [1.0, 1.0, 0.0]
    t.max(x, 0).values; x.max(0); max; max
maximum(x, y), x = y; [[1.0], [1.0]]
    t.maximum(x[0], x[1]); n.maximum(x[0], x[1]); maximum; maximum
minimum(x, y), x = y; [[1.0], [1.0]]
    t.minimum(x[0], x[1]); n.minimum(x[0], x[1]); minimum; minimum
median, ties; [1.0, 1.0, 0.0]
    t.median(x); n.median(x); median; sort median quantile
median of two (values differ too); [1.0, 2.0]
    t.median(x); n.median(x); median; sort median
sort, ties, times 1, 2, 3; [1.0, 1.0, 0.0]
    t.sort(x).values * t.tensor([1.0, 2.0, 3.0]); n.sort(x) * n.array([1.0, 2.0, 3.0]); sort; sort
two largest of three, ties; [1.0, 1.0, 1.0]
    t.topk(x, 2).values * t.tensor([1.0, 2.0]); j.lax.top_k(x, 2)[0] * n.array([1.0, 2.0]);
    topk; topk
cumulative maximum, ties; [1.0, 1.0]
    t.cummax(x, 0).values; j.lax.cummax(x, 0); cummax; cummax
relu at 0; [0.0]
    f.relu(x); j.nn.relu(x); relu; relu maximum
relu6 at 6; [6.0]
    f.relu6(x); j.nn.relu6(x); clip; relu6
leaky_relu at 0; [0.0]
    f.leaky_relu(x); j.nn.leaky_relu(x); leaky_relu; leaky_relu
elu at 0; [0.0]
    f.elu(x); j.nn.elu(x); elu; elu
hardtanh at 1; [1.0]
    f.hardtanh(x); j.nn.hard_tanh(x); clip; hard_tanh
hardsigmoid at 3; [3.0]
    f.hardsigmoid(x); j.nn.hard_sigmoid(x); hardsigmoid; hard_sigmoid relu6
hardswish at 3; [3.0]
    f.hardswish(x); j.nn.hard_swish(x); hardswish; hard_silu relu6
where(x > 0, x, 0) at 0; [0.0]
    t.where(x > 0, x, t.zeros_like(x)); n.where(x > 0, x, 0.0); where; where
arctan2 at (0, 0); [[0.0], [0.0]]
    t.arctan2(x[0], x[1]); n.arctan2(x[0], x[1]); arctan2; arctan2
hypot at (0, 0); [[0.0], [0.0]]
    t.hypot(x[0], x[1]); n.hypot(x[0], x[1]); hypot; hypot sqrt
remainder of 2 by 1; [[2.0], [1.0]]
    t.remainder(x[0], x[1]); n.remainder(x[0], x[1]); remainder; fmod remainder
logaddexp at (-inf, -inf); [[-inf], [-inf]]
    t.logaddexp(x[0], x[1]); n.logaddexp(x[0], x[1]); logaddexp; logaddexp
logsumexp of -inf alone; [-inf, -inf]
    t.logsumexp(x, 0); j.scipy.special.logsumexp(x, 0); logsumexp; logsumexp log exp
x log y at x = 0, y = 0; [[0.0], [0.0]]
    t.xlogy(x[0], x[1]); j.scipy.special.xlogy(x[0], x[1]); xlogy; xlogy log
product with one zero; [0.0, 2.0, 3.0]
    t.prod(x); n.prod(x); prod; prod
sinc at 0; [0.0]
    t.sinc(x); n.sinc(x); sinc; sinc
round at 0.5; [0.5]
    t.round(x); n.round(x); round; round
standard deviation of equal numbers; [1.0, 1.0]
    t.std(x, unbiased=False); n.std(x); deviation; std sqrt _std
pullback of z**2 at 1 + 2i, native; [1 + 2j]
    x * x; x * x; ;
"""
"""Name; point, and indented: in PyTorch; in JAX; operations of PyTorch's graph; of JAX's.

The functions are of x, with t for torch, f for torch.nn.functional, j for jax, n for jax.numpy.
"""


def _kinks(table: str) -> Iterator[Kink]:
    for entry in re.split(r"\n(?!    )", table.strip()):
        head, _, functions = entry.partition("\n")
        name, point = head.split("; ")
        torch, jax, nodes, primitives = map(str.strip, functions.split(";"))
        at = eval(point, {"inf": np.inf})
        yield Kink(name, torch, jax, at, tuple(nodes.split()), tuple(primitives.split()))


KINKS = tuple(_kinks(_TABLE))


def conventions() -> tuple[Convention, ...]:
    """The table, measured on the installed versions in float64 (each row once in a process).

    Each row is the pullback of ones by the framework's own `torch.autograd.grad` or `jax.vjp`, once
    and twice; None means that the framework is not installed.
    """
    return tuple(map(measured, KINKS))


@cache
def measured(kink: Kink) -> Convention:
    """One row of the table."""
    installed = gradtools.available_backends()
    none = (None, None)
    torch, torch_twice = _measure_torch(kink) if "torch" in installed else none
    jax, jax_twice = _measure_jax(kink) if "jax" in installed else none
    return Convention(kink.name, torch, jax, torch_twice, jax_twice)


def _measure_torch(kink: Kink) -> tuple[Derivative, Derivative | None]:
    torch = import_module("torch")
    with torch.enable_grad():
        x = torch.tensor(kink.point, dtype=_dtype(torch, kink), requires_grad=True)
        out = eval(kink.torch, {"t": torch, "f": torch.nn.functional, "inf": np.inf, "x": x})
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        first = tuple(g.detach().reshape(-1).resolve_conj().tolist())
        if g.is_complex():
            return first, None
        if not g.requires_grad:
            return first, tuple(0 * v for v in first)
        try:
            (h,) = torch.autograd.grad(g, x, torch.ones_like(g), allow_unused=True)
        except RuntimeError:  # some backward formulas are not differentiable
            return first, None
    h = torch.zeros_like(x) if h is None else h.clone()
    return first, tuple(h.reshape(-1).tolist())


def _measure_jax(kink: Kink) -> tuple[Derivative, Derivative | None]:
    jax = import_module("jax")
    ones = jax.numpy.ones_like

    def gradient(x: Any) -> Any:
        names = {"j": jax, "n": jax.numpy, "inf": np.inf}
        out, pullback = jax.vjp(lambda x: eval(kink.jax, {**names, "x": x}), x)
        return pullback(ones(out))[0]

    with in_double_precision(True):
        x = jax.numpy.asarray(kink.point, _dtype(jax.numpy, kink))
        g, pullback = jax.vjp(gradient, x)
        first = tuple(g.reshape(-1).tolist())
        if np.iscomplexobj(g):
            return first, None
        return first, tuple(pullback(ones(g))[0].reshape(-1).tolist())


def _dtype(library: Any, kink: Kink) -> Any:
    return library.complex128 if np.iscomplexobj(kink.point) else library.float64
