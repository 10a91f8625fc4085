"""The scenario matrix: which operator is tried on which function, in which dtype and transform.

A `Cell` is data: one operator, one program, one dtype, one transform around it, one way of passing
arguments. All combinations would be hundreds of thousands; `cells` takes every program with every
operator as it is, and then each further choice (dtype, transform, arguments) with every operator
and every program, in rotation, so that each pair of choices meets. The rotation is fixed: the
matrix is the same on every machine.

A combination that cannot be is not dropped in silence: it is a cell with a `reason`.
What a cell computes, and what it is held against, stands in `trial.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle

from gradtools.testing.records import Scenario, scenarios

DTYPES = ("float64", "float32", "bfloat16", "complex128", "complex64")
TRANSFORMS = ("eager", "compile", "vmap", "checkpoint", "loop")
ARGUMENTS = ("plain", "several", "integer", "disconnected", "keyword", "aux", "shared")


@dataclass(frozen=True)
class Operator:
    """A row of the matrix.

    Attributes:
        name: As in the namespaces; with the mode or order in words where there are several.
        order: How many derivatives it takes.
        aux: Whether it knows has_aux.
        real: Whether it refuses complex arguments.
        batched: Whether it makes a batch of the program's first argument itself.
    """

    name: str
    order: int = 1
    aux: bool = False
    real: bool = False
    batched: bool = False


OPERATORS = (
    Operator("grad", aux=True),
    Operator("value_and_grad", aux=True),
    Operator("vjp", aux=True),
    Operator("jvp", aux=True),
    Operator("linearize"),
    Operator("jacobian, forward", real=True),
    Operator("jacobian, reverse", real=True),
    Operator("hvp, forward over reverse", 2),
    Operator("hvp, reverse over reverse", 2),
    Operator("grad of jvp", 2),
    Operator("hessian", 2, real=True),
    Operator("per_example_grad", batched=True),
    Operator("minimax_value_and_grad"),
    Operator("mixed_partial", 2),
    Operator("reverse_gradient"),
    Operator("reverse_gradient, twice", 2),
    Operator("scale_gradient"),
    Operator("scale_gradient, forward"),
    Operator("stop_gradient"),
    Operator("clip_gradient"),
    Operator("transform_gradient"),
    Operator("known_gradient"),
    Operator("straight_through"),
    Operator("straight_through, twice", 2),
    Operator("custom_rule"),
    Operator("custom_rule, twice", 2),
    Operator("custom_rule, forward"),
    Operator("chunked", batched=True),
    Operator("chunked, twice", 2, batched=True),
    Operator("microbatched", batched=True),
    Operator("frozen"),
    Operator("frozen, twice", 2),
    Operator("checkpoint"),
    Operator("checkpoint, twice", 2),
)


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix.

    Attributes:
        operator: What is tried.
        program: On what.
        dtype: Of the program's floating arguments.
        transform: Around the operator: eager, compile, vmap, checkpoint, loop.
        arguments: How they come: plain, several active, an integer leaf elsewhere, a disconnected
            leaf, a keyword, with aux, one array for two.
        reason: Why it is left out; empty where it runs.
    """

    operator: Operator
    program: Scenario
    dtype: str = "float64"
    transform: str = "eager"
    arguments: str = "plain"
    reason: str = ""

    def __str__(self) -> str:
        return " | ".join(
            (self.operator.name, self.program.name, self.dtype, self.transform, self.arguments)
        )


@lru_cache
def programs() -> tuple[Scenario, ...]:
    """The records that are smooth and of ordinary size where they are tried, in 64 bits."""
    special = {"kink", "large", "tiny", "cancels"}
    return tuple(
        s
        for s in scenarios(order=2, dtype=("float64", "complex128"))
        if not special & s.tags and s.name != "an argument of which nothing is used"
    )


def cells(backend: str) -> Iterator[Cell]:
    """Every cell for one backend, those that are left out with their reasons among them."""
    seen = set()
    for cell in _chosen():
        if str(cell) not in seen:
            seen.add(str(cell))
            yield replace(cell, reason=_reason(cell, backend))


def _chosen() -> Iterator[Cell]:
    every = programs()
    for operator in OPERATORS:
        for program in every:
            yield Cell(operator, program, _own_dtype(program))
    turns = cycle(range(len(every)))
    for operator in OPERATORS:
        for dtype in DTYPES[1:]:
            for _ in range(3):
                yield Cell(operator, _with_dtype(every, dtype, next(turns)), dtype)
        for transform in TRANSFORMS[1:]:
            for _ in range(4):
                program = every[next(turns)]
                yield Cell(operator, program, _own_dtype(program), transform)
        for arguments in ARGUMENTS[1:]:
            for k in range(3):
                program = every[next(turns)]
                transform = TRANSFORMS[0] if k else TRANSFORMS[2]
                yield Cell(operator, program, _own_dtype(program), transform, arguments)
    for program, operator in zip(every, cycle(OPERATORS), strict=False):
        for transform in TRANSFORMS[1:]:
            yield Cell(operator, program, _own_dtype(program), transform)


def _own_dtype(program: Scenario) -> str:
    return program.dtype


def _with_dtype(every: tuple[Scenario, ...], dtype: str, turn: int) -> Scenario:
    """A program that can be cast to the dtype: complex ones stay complex, real ones real."""
    wanted = "complex128" if dtype.startswith("complex") else "float64"
    fitting = [p for p in every if p.dtype == wanted]
    return fitting[turn % len(fitting)]


# --- what cannot be ----------------------------------------------------------------------

_LINALG = "the framework has no linear algebra in bfloat16"
_COMPLEX = "a Jacobian of a complex function is no complex matrix; refused by name"


_LOSE_A_TERM = ("solve", "determinant", "log determinant")


def _reason(cell: Cell, backend: str) -> str:
    """Why a cell cannot be, or an empty string."""
    operator, program = cell.operator, cell.program
    is_complex = cell.dtype.startswith("complex")
    if operator.real and is_complex:
        return _COMPLEX
    if cell.arguments == "aux" and not operator.aux:
        return "the operator has no has_aux"
    if cell.dtype == "bfloat16" and "linear algebra" in program.tags:
        return _LINALG
    if backend == "torch" and cell.transform == "vmap" and "checkpoint" in operator.name:
        return "torch.func does not support the saved-tensor hooks of checkpoint"
    if backend == "torch" and cell.transform == "checkpoint" and operator.batched:
        return "torch.func.vmap cannot map a checkpoint (its saved-tensor hooks)"
    if backend == "torch" and cell.transform == "checkpoint" and operator.name == "grad of jvp":
        return "PyTorch's checkpoint computes again without the tangents, and says so"
    if backend == "torch" and operator.name == "grad of jvp" and program.name in _LOSE_A_TERM:
        return "refused: PyTorch's forward rule loses a term when differentiated, torch#192540"
    if operator.batched and program.shape == "empty":
        return "a batch of empty examples says nothing"
    return ""
