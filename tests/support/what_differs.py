"""Measures derivatives at kinks and ties in both frameworks for docs/what-differs.md.

`python -m tests.support.what_differs` rewrites the table, and a test checks that the table is
current. The derivative at a kink is a convention. Each row shows the first and second pullback of a
cotangent of ones, computed by `torch.autograd.grad` or `jax.vjp` in float64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradtools.testing.cross_checking.sides import in_double_precision

PAGE = Path(__file__).parents[2] / "docs" / "what-differs.md"
START, END = "<!-- measured: written by tests/support/what_differs.py -->\n", "<!-- end -->"
Values = list[Any] | None  # None if the framework does not define the second derivative

# Each entry consists of a name, a point and an indented line with the functions in PyTorch and JAX.
# The functions take x and use t for torch, f for torch.nn.functional, j for jax and n for
# jax.numpy.
_TABLE = """
|x| at 0; [0.0]
    t.abs(x); n.abs(x)
|x| at -0; [-0.0]
    t.abs(x); n.abs(x)
|z| at 0, complex; [0j]
    t.abs(x); n.abs(x)
clip at its lower edge; [0.0]
    t.clamp(x, 0.0, 1.0); n.clip(x, 0.0, 1.0)
clip at its upper edge; [1.0]
    t.clamp(x, 0.0, 1.0); n.clip(x, 0.0, 1.0)
norm at 0; [0.0, 0.0]
    t.linalg.vector_norm(x); n.linalg.norm(x)
1-norm at 0; [0.0, 2.0]
    t.linalg.vector_norm(x, 1); n.linalg.norm(x, 1)
maximum norm, ties; [1.0, -1.0, 0.0]
    t.linalg.vector_norm(x, inf); n.linalg.norm(x, inf)
x**0 at 0 (0 is a Python number); [0.0]
    x**0.0; x**0.0
x**y at x = 0, y = 0 (y is an array); [0.0]
    x ** t.zeros_like(x); x ** n.zeros_like(x)
x**0.5 at 0; [0.0]
    x**0.5; x**0.5
sqrt at 0; [0.0]
    t.sqrt(x); n.sqrt(x)
max over an axis, ties; [1.0, 1.0, 0.0]
    t.amax(x); n.amax(x)
min over an axis, ties; [0.0, 0.0, 1.0]
    t.amin(x); n.amin(x)
max over axis 0 with its index, ties; [1.0, 1.0, 0.0]
    t.max(x, 0).values; x.max(0)
maximum(x, y), x = y; [[1.0], [1.0]]
    t.maximum(x[0], x[1]); n.maximum(x[0], x[1])
minimum(x, y), x = y; [[1.0], [1.0]]
    t.minimum(x[0], x[1]); n.minimum(x[0], x[1])
median, ties; [1.0, 1.0, 0.0]
    t.median(x); n.median(x)
median of two (the values also differ); [1.0, 2.0]
    t.median(x); n.median(x)
sort, ties, times 1, 2, 3; [1.0, 1.0, 0.0]
    t.sort(x).values * t.tensor([1.0, 2.0, 3.0]); n.sort(x) * n.array([1.0, 2.0, 3.0])
two largest of three, ties; [1.0, 1.0, 1.0]
    t.topk(x, 2).values * t.tensor([1.0, 2.0]); j.lax.top_k(x, 2)[0] * n.array([1.0, 2.0])
cumulative maximum, ties; [1.0, 1.0]
    t.cummax(x, 0).values; j.lax.cummax(x, 0)
relu at 0; [0.0]
    f.relu(x); j.nn.relu(x)
relu6 at 6; [6.0]
    f.relu6(x); j.nn.relu6(x)
leaky_relu at 0; [0.0]
    f.leaky_relu(x); j.nn.leaky_relu(x)
elu at 0; [0.0]
    f.elu(x); j.nn.elu(x)
hardtanh at 1; [1.0]
    f.hardtanh(x); j.nn.hard_tanh(x)
hardsigmoid at 3; [3.0]
    f.hardsigmoid(x); j.nn.hard_sigmoid(x)
hardswish at 3; [3.0]
    f.hardswish(x); j.nn.hard_swish(x)
where(x > 0, x, 0) at 0; [0.0]
    t.where(x > 0, x, t.zeros_like(x)); n.where(x > 0, x, 0.0)
arctan2 at (0, 0); [[0.0], [0.0]]
    t.arctan2(x[0], x[1]); n.arctan2(x[0], x[1])
hypot at (0, 0); [[0.0], [0.0]]
    t.hypot(x[0], x[1]); n.hypot(x[0], x[1])
remainder of 2 by 1; [[2.0], [1.0]]
    t.remainder(x[0], x[1]); n.remainder(x[0], x[1])
logaddexp at (-inf, -inf); [[-inf], [-inf]]
    t.logaddexp(x[0], x[1]); n.logaddexp(x[0], x[1])
logsumexp of -inf alone; [-inf, -inf]
    t.logsumexp(x, 0); j.scipy.special.logsumexp(x, 0)
x log y at x = 0, y = 0; [[0.0], [0.0]]
    t.xlogy(x[0], x[1]); j.scipy.special.xlogy(x[0], x[1])
product with one zero; [0.0, 2.0, 3.0]
    t.prod(x); n.prod(x)
sinc at 0; [0.0]
    t.sinc(x); n.sinc(x)
round at 0.5; [0.5]
    t.round(x); n.round(x)
standard deviation of equal numbers; [1.0, 1.0]
    t.std(x, unbiased=False); n.std(x)
pullback of z**2 at 1 + 2i, native; [1 + 2j]
    x * x; x * x
"""


def measured() -> Iterator[tuple[str, list[Values], list[Values]]]:
    """Yield the name of each row and the first and second pullbacks in PyTorch and in JAX."""
    for entry in re.split(r"\n(?!    )", _TABLE.strip()):
        head, _, functions = entry.partition("\n")
        name, point = head.split("; ")
        of_torch, of_jax = functions.split(";")
        at = np.asarray(eval(point, {"inf": np.inf}))
        yield name, _in_torch(of_torch.strip(), at), _in_jax(of_jax.strip(), at)


def _in_torch(text: str, at: np.ndarray) -> list[Values]:
    import torch

    with torch.enable_grad():
        x = torch.tensor(at, requires_grad=True)
        out = eval(text, {"t": torch, "f": torch.nn.functional, "inf": np.inf, "x": x})
        (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        first = g.detach().reshape(-1).resolve_conj().tolist()
        if g.is_complex():
            return [first, None]
        if not g.requires_grad:
            return [first, [0 * v for v in first]]
        try:
            (h,) = torch.autograd.grad(g, x, torch.ones_like(g), allow_unused=True)
        except RuntimeError:  # some backward formulas are not differentiable
            return [first, None]
    return [first, (torch.zeros_like(x) if h is None else h.clone()).reshape(-1).tolist()]


def _in_jax(text: str, at: np.ndarray) -> list[Values]:
    import jax

    ones, names = jax.numpy.ones_like, {"j": jax, "n": jax.numpy, "inf": np.inf}

    def gradient(x: Any) -> Any:
        out, pullback = jax.vjp(lambda x: eval(text, {**names, "x": x}), x)
        return pullback(ones(out))[0]

    with in_double_precision(True):
        g, pullback = jax.vjp(gradient, jax.numpy.asarray(at))
        first = g.reshape(-1).tolist()
        return [first, None if np.iscomplexobj(g) else pullback(ones(g))[0].reshape(-1).tolist()]


def _differs(one: Values, other: Values) -> bool:
    if one is None or other is None:
        return False
    return not np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


def table() -> str:
    """Return the table, with the rows that differ first."""
    text = lambda values: "" if values is None else ", ".join(f"{v:.4g}" for v in values)
    rows = []
    for name, of_torch, of_jax in measured():
        pairs = [*zip(of_torch, of_jax, strict=True)]
        differs = any(_differs(*pair) for pair in pairs)
        cells = [name.replace("|", r"\|"), *(text(v) for pair in pairs for v in pair)]
        rows.append((not differs, f"| {' | '.join([*cells, 'yes' if differs else ''])} |"))
    lines = [line for _, line in sorted(rows, key=lambda row: row[0])]
    head = "| function and point | PyTorch | JAX | PyTorch, twice | JAX, twice | differs |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines, ""])


def written(page: str) -> str:
    """Return the text of the page with the current table."""
    head, rest = page.split(START)
    return head + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
