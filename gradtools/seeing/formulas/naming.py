"""The names of inputs, captured values and results.

The wing gives the path of a leaf, such as ``argument 0['layers'][1].weight``. The formula calls
it by the shortest end of the path that is not the same for two leaves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.typesetting import Written


def leaf_names(
    leaves: Sequence[Expr], outputs: Sequence[Expr]
) -> tuple[dict[Expr, Written], list[Written]]:
    """The names of all leaves and of the outputs."""
    chosen = short_names([p["name"] for p in leaves])
    names = {p: ts.symbol(n) for p, n in zip(leaves, chosen, strict=True)}
    return names, _output_names(outputs, set(chosen))


def short_names(paths: Sequence[str]) -> list[str]:
    """Different names for the paths, as short as can be."""
    parts = [_parts(p) for p in paths]
    length = [_shortest(p) for p in parts]
    for _ in range(max((len(p) for p in parts), default=0)):
        chosen = [_joined(p[-n:]) for p, n in zip(parts, length, strict=True)]
        same = {c for c in chosen if chosen.count(c) > 1}
        length = [n + (c in same) for n, c in zip(length, chosen, strict=True)]
    return _numbered([_joined(p[-n:]) for p, n in zip(parts, length, strict=True)])


def _parts(path: str) -> list[str]:
    result = re.findall(r"[^\W_][\w]*|_\w+", path.replace("argument ", "arg"))
    return result or [path.strip() or "x"]


def _shortest(parts: Sequence[str]) -> int:
    """How many parts of a path make a name: a number alone is none."""
    numbers = next((k for k, part in enumerate(reversed(parts)) if not part.isdigit()), 0)
    return numbers + 1


def _joined(parts: Sequence[str]) -> str:
    """Parts of a path as one name: 0.weight is weight_0."""
    numbers = next((k for k, part in enumerate(parts) if not part.isdigit()), len(parts))
    name = [*parts[numbers:], *parts[:numbers]]
    return "_".join(name if numbers < len(parts) else ["x", *name])


def _numbered(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return result


def _output_names(outputs: Sequence[Expr], taken: set[str]) -> list[Written]:
    if len(outputs) == 1:
        (y,) = outputs
        wanted = ["L"] if not y.rank and not y.is_complex else []
        wanted += ["Y", "F", "O"] if y.rank > 1 else ["y", "f", "o"]
        return [ts.symbol(next((w for w in wanted if w not in taken), "out"))]
    base = next(
        b for b in ("y", "f", "out") if not any(t.startswith(b) for t in taken) or b == "out"
    )
    return [ts.symbol(f"{base}{k + 1}") for k in range(len(outputs))]
