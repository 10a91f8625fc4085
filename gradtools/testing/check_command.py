"""`gradtools check`: tests every operator on this machine against finite differences in NumPy.

A `Cell` is one operator on one `Scenario`, in one dtype, under one transform. Scenarios use the
array API namespace, which NumPy has too. So the oracle needs no framework: with y = f(x) and random
weights w, the loss

    L(x) = sum over outputs of Re<w, y> + |y|^2 / 2

is evaluated in NumPy, in 64 bits. An operator's result is a known multiple of dL/dx or of H t, so
its inner product with a direction is a first or second derivative of L, which central differences
of sixth order give. The test suite runs more cells in the same way (tests/conformance).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

import gradtools
from gradtools.testing.checking.probe import inner, size
from gradtools.testing.cross_checking.devices import described, placed
from gradtools.testing.cross_checking.precision import described_precision, highest_precision
from gradtools.testing.cross_checking.sides import in_double_precision
from gradtools.testing.cross_checking.tolerances import FINITE_DIFFERENCES, real_name, tolerance
from gradtools.testing.operators import OPERATORS, Operator, cube
from gradtools.testing.scenario_table import Scenario, scenarios

BACKENDS = ("torch", "jax")
DTYPES = ("float64", "float32", "bfloat16", "complex128", "complex64")
TRANSFORMS = ("eager", "compile", "vmap")
_FORGET = 250  # cells after which JAX forgets what it compiled: of a thousand it is gigabytes
_STENCIL = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))
try:  # NumPy with the names of the array API, which it has by itself from 2.1 on
    _array_api: Any = import_module("array_api_compat.numpy")
except ModuleNotFoundError:  # JAX alone
    _array_api = np
_NUMPY = SimpleNamespace(xp=_array_api, asarray=np.asarray)  # what scenarios use of `gt`


@dataclass(frozen=True)
class Cell:
    """One operator on one scenario.

    Attributes:
        left_out: Why it cannot be run, or empty.
        worst: The error in units of the tolerance; NaN if it raised.
        failure: The error's text, or empty.
    """

    backend: str
    operator: str
    scenario: Scenario
    dtype: str
    transform: str = "eager"
    left_out: str = ""
    worst: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        return " | ".join((self.operator, self.scenario.name, self.dtype, self.transform))


# --- the cells ---------------------------------------------------------------------------


@lru_cache
def cells(backend: str) -> tuple[Cell, ...]:
    """Every operator in every dtype and transform, and every scenario with several operators."""
    smooth = [
        s
        for s in scenarios(order=2, dtype=("float64", "complex128"))
        if not {"kink", "large", "tiny", "cancels"} & s.tags and "nothing is used" not in s.name
    ]
    result: dict[str, Cell] = {}
    for i, operator in enumerate(OPERATORS):
        choices = [(d, "eager") for d in DTYPES] + [("float64", t) for t in TRANSFORMS[1:]]
        for j, (dtype, transform) in enumerate(choices):
            kind = "complex128" if dtype.startswith("complex") else "float64"
            fitting = [s for s in smooth if s.dtype == kind]
            scenario = fitting[(7 * i + j) % len(fitting)]
            cell = Cell(backend, operator, scenario, dtype, transform)
            result.setdefault(str(cell), cell)
    for k, scenario in enumerate(smooth):
        for operator in list(OPERATORS)[k % 5 :: 5]:
            cell = Cell(backend, operator, scenario, scenario.dtype)
            result.setdefault(str(cell), cell)
    return tuple(replace(cell, left_out=_reason(cell)) for cell in result.values())


def _reason(cell: Cell) -> str:
    """Why a cell cannot be run, or an empty string."""
    operator, torch = cell.operator, cell.backend == "torch"
    if OPERATORS[operator].real and cell.dtype.startswith("complex"):
        return "a Jacobian of a complex function is not a complex matrix; refused by name"
    if cell.scenario.name == "cumulative sum" and not hasattr(_array_api, "cumulative_sum"):
        return "NumPy before 2.1 has no cumulative_sum, and array-api-compat is not installed"
    if cell.dtype == "bfloat16" and "linear algebra" in cell.scenario.tags:
        return "the framework has no linear algebra in bfloat16"
    if torch and cell.transform == "compile" and "checkpoint" in operator:
        return "torch.func does not support the saved-tensor hooks of a compiled checkpoint"
    if torch and cell.transform == "compile" and operator in ("frozen, twice", "chunked, twice"):
        return "PyTorch has no compiled double backward, torch#91469"
    loses = cell.scenario.name in ("solve", "determinant", "log determinant")
    if torch and operator == "grad of jvp" and loses:
        return "refused: PyTorch's forward rule loses a term when differentiated, torch#192540"
    return ""


# --- one cell ----------------------------------------------------------------------------


class Problem:
    """A cell's loss, in its framework and in NumPy.

    Attributes:
        gt: The namespace of the backend.
        xs: The floating leaves of the arguments, in NumPy, rounded to the dtype.
        ts: A direction, of the same shapes.
        tangents: The same in the framework.
    """

    gt: Any
    backend: Any
    positions: tuple[int, ...]
    tangents: tuple[Any, ...]

    def __init__(self, cell: Cell) -> None:
        self.cell, self.gt = cell, import_module(f"gradtools.{cell.backend}")
        self.backend = self.gt._api._backend
        leaves, self._tree = self.backend.flatten(cell.scenario.args)
        self._leaves = [np.asarray(x) for x in leaves]
        self._moving = [i for i, x in enumerate(self._leaves) if x.dtype.kind in "fc"]
        self.positions = tuple(range(len(self._moving)))
        self.xs = [self._rounded(self._leaves[i]) for i in self._moving]
        self.ts, self.ss = self._drawn(1, self.xs), self._drawn(2, self.xs)
        self._weights = self._drawn(3, self._outputs(_NUMPY, self._leaves, self.xs))
        self._constants = [self.array(x) for x in self._leaves]
        self._weights_there = [self.array(w) for w in self._weights]
        self.tangents = tuple([self.array(t) for t in self.ts])

    def array(self, x: Any) -> Any:
        """A NumPy array in the framework; a floating one in the cell's dtype."""
        x = np.asarray(x)
        made = self.gt.asarray(x)
        dtype = self.cell.dtype if x.dtype.kind == "c" else real_name(self.cell.dtype)
        return self.backend.cast(made, dtype) if x.dtype.kind in "fc" else made

    def _rounded(self, x: Any) -> Any:
        """An array rounded to the cell's dtype, in 64 bits."""
        kind = "complex128" if np.iscomplexobj(x) else "float64"
        return np.asarray(self.gt.to_numpy(self.array(x))).astype(kind)

    def _drawn(self, seed: int, like: Sequence[Any]) -> list[Any]:
        rng = np.random.default_rng([seed, 20261121])
        normal = lambda x: rng.standard_normal(np.shape(x))
        return [
            self._rounded(normal(x) + 1j * normal(x) if np.iscomplexobj(x) else normal(x))
            for x in like
        ]

    def _outputs(self, gt: Any, leaves: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
        """The floating outputs, in NumPy or in the framework."""
        moved = dict(zip(self._moving, moving, strict=True))
        every = [moved.get(i, x) for i, x in enumerate(leaves)]
        out = self.cell.scenario.function(gt, *self.backend.unflatten(self._tree, every))
        is_inexact = lambda y: "float" in str(y.dtype) or "complex" in str(y.dtype)
        return [y for y in self.backend.flatten(out)[0] if is_inexact(y)]

    def outputs(self, *xs: Any) -> list[Any]:
        """The program as a function of its floating leaves."""
        return self._outputs(self.gt, self._constants, xs)

    def total(self, outputs: Sequence[Any]) -> Any:
        """The loss as a function of the outputs."""
        xp, parts = self.gt.xp, []
        for y, w in zip(outputs, self._weights_there, strict=True):
            v = self.backend.cast(w, y)
            if self.backend.is_complex(y):
                square = xp.real(y) ** 2 + xp.imag(y) ** 2
                parts.append(xp.sum(xp.real(xp.conj(v) * y) + square / 2))
            else:
                parts.append(xp.sum(v * y + y * y / 2))
        return sum(parts[1:], parts[0])

    def loss(self, *xs: Any) -> Any:
        """The loss as a function of the floating leaves."""
        return self.total(self.outputs(*xs))

    def grad(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The gradient function along all leaves."""
        return self.gt.grad(loss, self.positions, disconnected_inputs="zeros")  # type: ignore[no-any-return]

    def product(self, loss: Callable[..., Any], xs: Any, mode: str = "reverse_over_reverse") -> Any:
        """The Hessian of a loss times the direction."""
        return self.gt.hvp(loss, tuple(xs), self.tangents, mode=mode)[1]

    # --- the oracle

    def expected(self, operator: Operator) -> tuple[float, float]:
        """The first or second derivative that an operator should compute, and its scale."""
        through = cube if operator.cubed else lambda x: x

        def at(*steps: tuple[float, Sequence[Any]]) -> float:
            """The loss in NumPy at x moved by these steps, in 64 bits."""
            moved = self.xs
            for step, ts in steps:
                moved = [x + step * t for x, t in zip(moved, ts, strict=True)]
            outs = self._outputs(_NUMPY, self._leaves, [through(x) for x in moved])
            pairs = zip(outs, self._weights, strict=True)
            parts = [np.sum(np.real(np.conj(w) * y) + np.abs(y) ** 2 / 2) for y, w in pairs]
            return float(sum(parts))

        if operator.order == 2:
            line = lambda a: _slope(lambda b: at((a, self.ss), (b, self.ts)), 5e-3)
            value = operator.factor * _slope(line, 5e-3)
            return value, abs(value)
        each = [[t if i == j else 0 * t for j, t in enumerate(self.ts)] for i in self.positions]
        along = lambda t: lambda e: at((e, t))
        slopes = [operator.factor * _slope(along(t), 3e-3) for t in each]
        return sum(slopes), sum(map(abs, slopes))


def _slope(at: Callable[[float], float], step: float) -> float:
    return sum(c * (at(k * step) - at(-k * step)) / step for k, c in _STENCIL)


def error_of(cell: Cell) -> float:
    """The error of a cell in units of the tolerance."""
    operator, p = OPERATORS[cell.operator], Problem(cell)
    flat = lambda *xs: list(p.backend.flatten(operator.compute(p, xs))[0])
    expected, scale = p.expected(operator)
    along = p.ss if operator.order == 2 else p.ts
    xs = [p.array(x) for x in p.xs]
    if cell.transform == "eager":
        rows = [flat(*xs)]
    elif cell.transform == "vmap":  # over two equal rows
        mapped = p.gt.vmap(flat)(*[p.gt.xp.stack([x, x]) for x in xs])
        rows = [[y[i] for y in mapped] for i in range(2)]
    elif cell.backend == "jax":
        rows = [p.gt.compile(flat)(*xs)]
    else:  # dynamo runs eagerly after eight recompilations of one code object
        import_module("torch").compiler.reset()
        rows = [p.gt.compile(flat, backend="aot_eager")(*xs)]
    errors = []
    for row in rows:
        result = [p.gt.to_numpy(y) for y in row]
        found = float(np.real(result[0])) if operator.number else inner(result, along)
        sizes = scale if operator.number else max(scale, size(result, along))
        errors.append(abs(found - expected) / max(sizes, 1e-30))
    dtype = real_name(cell.dtype)
    allowed = tolerance(dtype, operator.order)
    if dtype == "float64":
        allowed = FINITE_DIFFERENCES[dtype] * (10 if operator.order == 2 else 1)
    return float(np.max(errors)) / allowed


def judged(cell: Cell) -> Cell:
    """Runs a cell, unless it is left out, and returns it with its result."""
    if cell.left_out:
        return cell
    try:
        worst = error_of(cell)
    except Exception as error:  # a cell that raises is a result of the check
        return replace(cell, worst=float("nan"), failure=f"{type(error).__name__}: {error}")
    failure = "" if worst <= 1 else f"finite differences: off by {worst:.3g} tolerances"
    return replace(cell, worst=worst, failure=failure)


# --- the command -------------------------------------------------------------------------


def chosen(backend: str, quick: bool = False, containing: str = "") -> list[Cell]:
    """The cells of a backend, including those that are left out.

    Args:
        backend: "torch" or "jax".
        quick: Every operator in its first dtype, and a few under vmap.
        containing: A substring of the cell's name, such as "hvp" or "vmap".
    """
    result = [cell for cell in cells(backend) if containing in str(cell)]
    if quick:
        few = [c for c in result if c.transform == "vmap"][::4]
        result = [
            *{c.operator: c for c in reversed(result) if c.transform == "eager"}.values(),
            *few,
        ]
    return sorted(result, key=lambda cell: cell.scenario.name)  # reuses JAX's compilations


def check(options: argparse.Namespace) -> int:
    """Runs the cells. Exit status: 0 if all passed, 1 if one failed, 2 if none could be run."""
    wanted = BACKENDS if options.backend == "both" else (options.backend,)
    here = [name for name in wanted if name in gradtools.available_backends()]
    todo = [cell for name in here for cell in chosen(name, options.quick, options.filter)]
    if all(cell.left_out for cell in todo):
        what = f"no cell that runs has {options.filter!r} in its name" if here else "not installed"
        print(f"gradtools check: {' and '.join(wanted)}: {what}", file=sys.stderr)
        return 2
    if "torch" in here:
        import_module("torch").set_num_threads(1)  # arrays are tiny
    if "jax" in here and "jax" not in sys.modules:  # XLA reads its flags once
        quick = "--xla_backend_optimization_level=0"
        os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}".strip()
    try:  # a progress bar on standard error, if tqdm is installed
        from tqdm import tqdm as progress
    except ImportError:
        progress = lambda cells, **options: cells
    with ExitStack() as inside:
        inside.enter_context(in_double_precision("jax" in here))
        for name in here:
            inside.enter_context(placed(name, options.device))
        inside.enter_context(highest_precision(here))
        done = []
        for i, cell in enumerate(progress(todo, desc="cells", file=sys.stderr, disable=None)):
            if cell.backend == "jax" and i % _FORGET == _FORGET - 1:
                import_module("jax").clear_caches()
            done.append(judged(cell))
        devices = [f"{name}: {described(name)}; {described_precision(name)}" for name in here]
    devices += [f"{name}: not run" for name in BACKENDS if name not in here]
    _print(options, devices, done)
    return 1 if any(c.failure for c in done) else 0


def _print(options: argparse.Namespace, devices: list[str], done: Sequence[Cell]) -> None:
    """Prints all cells as JSON, or the worst errors in a table, what was left out, what failed."""
    run = [c for c in done if not c.left_out]
    failed = [c for c in run if c.failure]
    if options.json:
        rows = []
        for c in done:
            more = {"program": c.scenario.name, "order": OPERATORS[c.operator].order}
            more |= {"worst": c.worst if np.isfinite(c.worst) else None}
            rows.append({k: v for k, v in vars(c).items() if k != "scenario"} | more)
        print(json.dumps({"devices": devices, "held": not failed, "cells": rows}, indent=1))
        return
    columns = [*TRANSFORMS, *DTYPES]  # in each the worst error, in units of the tolerance
    head = f"{'operator':<27}{'backend':<8}{'held':>8}" + "".join(f"{c:>11}" for c in columns)
    print("\n".join([*devices, "", head]))
    for operator in OPERATORS:
        for backend in BACKENDS:
            mine = [c for c in run if (c.operator, c.backend) == (operator, backend)]
            if mine:
                held = f"{sum(not c.failure for c in mine)}/{len(mine)}"
                per = [[c.worst for c in mine if x in (c.transform, c.dtype)] for x in columns]
                worst = "".join(f"{np.max(e):>11.0e}" if e else f"{'-':>11}" for e in per)
                print(f"{operator:<27}{backend:<8}{held:>8}{worst}")
    print("\nleft out:")
    for (backend, reason), number in Counter((c.backend, c.left_out) for c in done).items():
        if reason:
            print(f"{number:>5}  {backend:<6} {reason}")
    for c in failed:
        print(f"FAILED {c.backend}: {c}\n       {c.failure}")
    programs = len({c.scenario.name for c in run})
    print(f"\n{len(run)} cells run over {programs} programs; {len(failed)} failed")
