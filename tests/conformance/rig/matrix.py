"""The scenario matrix: which operator is tried on which function, in which dtype and transform.

A `Cell` is data: one operator, one program, one dtype, one transform around it, one way of passing
arguments. All combinations would be hundreds of thousands. `cells` takes every program with every
family of operators, the operators of a family by turns; then every operator with each further
choice (dtype, transform, arguments), and each two of these choices with each other, the programs
by turns. The turns are fixed: the matrix is the same on every machine.

A combination that cannot be is not dropped in silence: it is a cell with a `reason`.
What a cell computes, and what it is held against, stands in `trial.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, product, zip_longest
from typing import Any

from tests.conformance.rig.programs import smooth_programs
from tests.support.scenario_table import Scenario

DTYPES = ("float64", "float32", "bfloat16", "complex128", "complex64")
TRANSFORMS = ("eager", "compile", "vmap", "checkpoint", "loop")
ARGUMENTS = ("plain", "several", "integer", "disconnected", "keyword", "aux", "shared")


@dataclass(frozen=True)
class Operator:
    """A row of the matrix.

    Attributes:
        name: As in the namespaces; with the mode or order in words where there are several.
        family: Operators of one kind, which take turns over the programs.
        order: How many derivatives it takes.
        aux: Whether it knows has_aux.
        real: Whether it refuses complex arguments.
        batched: Whether it makes a batch of the program's first argument itself.
    """

    name: str
    family: str
    order: int = 1
    aux: bool = False
    real: bool = False
    batched: bool = False


OPERATORS = (
    Operator("grad", "gradient", aux=True),
    Operator("value_and_grad", "gradient", aux=True),
    Operator("vjp", "gradient", aux=True),
    Operator("jvp", "forward", aux=True),
    Operator("linearize", "forward"),
    Operator("jacobian, forward", "jacobian", real=True),
    Operator("jacobian, reverse", "jacobian", real=True),
    Operator("hvp, forward over reverse", "second order", 2),
    Operator("hvp, reverse over reverse", "second order", 2),
    Operator("grad of jvp", "second order", 2),
    Operator("hessian", "second order", 2, real=True),
    Operator("per_example_grad", "per example", batched=True),
    Operator("minimax_value_and_grad", "game"),
    Operator("mixed_partial", "mixed partial", 2),
    Operator("reverse_gradient", "scaled"),
    Operator("reverse_gradient, twice", "scaled", 2),
    Operator("scale_gradient", "scaled"),
    Operator("scale_gradient, forward", "scaled"),
    Operator("stop_gradient", "scaled"),
    Operator("clip_gradient", "edited cotangent"),
    Operator("transform_gradient", "edited cotangent"),
    Operator("replace_gradient", "edited cotangent"),
    Operator("straight_through", "straight through"),
    Operator("straight_through, twice", "straight through", 2),
    Operator("custom_rule", "own rule"),
    Operator("custom_rule, twice", "own rule", 2),
    Operator("custom_rule, forward", "own rule"),
    Operator("custom_rule, transposed", "own rule"),
    Operator("host_function", "host function"),
    Operator("host_function, twice", "host function", 2),
    Operator("host_function, forward", "host function"),
    Operator("chunked", "chunked", batched=True),
    Operator("chunked, twice", "chunked", 2, batched=True),
    Operator("microbatched_value_and_grad", "accumulated", batched=True),
    Operator("GradientAccumulator", "accumulated"),
    Operator("frozen", "frozen"),
    Operator("frozen, twice", "frozen", 2),
    Operator("checkpoint", "checkpoint"),
    Operator("checkpoint, twice", "checkpoint", 2),
)
GATHER = Operator("all_gather", "gather")


def families() -> dict[str, tuple[Operator, ...]]:
    """The operators by family."""
    names = dict.fromkeys(operator.family for operator in OPERATORS)
    return {name: tuple(o for o in OPERATORS if o.family == name) for name in names}


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


def cells(backend: str) -> Iterator[Cell]:
    """Every cell for one backend, those that are left out with their reasons among them."""
    return iter(_cells(backend))


@lru_cache
def _cells(backend: str) -> tuple[Cell, ...]:
    named: dict[str, Cell] = {}
    for cell in _chosen():
        named.setdefault(str(cell), cell)
    return tuple(replace(cell, reason=_reason(cell, backend)) for cell in named.values())


def _chosen() -> Iterator[Cell]:
    yield from _every_program_with_every_family()
    yield from _every_operator_with_every_choice()
    yield from _every_choice_with_every_other()
    yield Cell(GATHER, smooth_programs()[0])


def _every_program_with_every_family() -> Iterator[Cell]:
    for i, program in enumerate(smooth_programs()):
        for j, members in enumerate(families().values()):
            yield Cell(members[(i + j) % len(members)], program, program.dtype)


def _every_operator_with_every_choice() -> Iterator[Cell]:
    turns = count()
    for operator in OPERATORS:
        for transform in TRANSFORMS[1:]:
            yield _cell(operator, next(turns), transform=transform)
        for dtype, arguments in zip_longest(DTYPES[1:], ARGUMENTS[1:], fillvalue=""):
            if operator.real and dtype.startswith("complex"):
                yield _cell(operator, next(turns), dtype)
                dtype = ""
            yield _cell(operator, next(turns), dtype, arguments=arguments)
    for program in smooth_programs():
        if "linear algebra" in program.tags:
            yield Cell(OPERATORS[0], program, "bfloat16")


def _every_choice_with_every_other() -> Iterator[Cell]:
    """The operators that know has_aux have their turn where it is asked for."""
    turns, aux = count(7), tuple(o for o in OPERATORS if o.aux)
    for dtype, transform in product(DTYPES, TRANSFORMS[1:]):
        yield _cell(_turn(OPERATORS, next(turns)), next(turns), dtype, transform)
    for dtype, arguments in product(DTYPES, ARGUMENTS[1:]):
        able = aux if arguments == "aux" else OPERATORS
        yield _cell(_turn(able, next(turns)), next(turns), dtype, arguments=arguments)
    for transform, arguments in product(TRANSFORMS[1:], ARGUMENTS[1:]):
        able = aux if arguments == "aux" else OPERATORS
        yield _cell(_turn(able, next(turns)), next(turns), "float64", transform, arguments)


def _turn(among: Sequence[Any], number: int) -> Any:
    return among[number % len(among)]


def _cell(
    operator: Operator,
    number: int,
    dtype: str = "",
    transform: str = "eager",
    arguments: str = "plain",
) -> Cell:
    """A cell whose program is next; in its own dtype unless one is asked for."""
    fitting = _fitting(dtype or ("float64" if operator.real else ""))
    program = fitting[number % len(fitting)]
    return Cell(operator, program, dtype or program.dtype, transform, arguments)


def _fitting(dtype: str) -> tuple[Scenario, ...]:
    """Programs that can be cast to the dtype: complex ones stay complex, real ones real."""
    wanted = "complex128" if dtype.startswith("complex") else "float64"
    able = lambda p: dtype != "bfloat16" or "linear algebra" not in p.tags
    return tuple(p for p in smooth_programs() if not dtype or (p.dtype == wanted and able(p)))


# --- what cannot be ----------------------------------------------------------------------

_LINALG = "the framework has no linear algebra in bfloat16"
_COMPLEX = "a Jacobian of a complex function is not a complex matrix; refused by name"
_TANGENT = "PyTorch's tangent of it has a wrong derivative, torch#192540"


def wrong_in_pytorch(operator: Operator, program: Scenario) -> bool:
    """Whether PyTorch itself gives another derivative of the program's tangent."""
    programs = ("solve", "determinant", "log determinant")
    return operator.name == "grad of jvp" and program.name in programs


_NOT_COMPILED = {
    "frozen, twice": "PyTorch has no compiled double backward, torch#91469",
}


def _reason(cell: Cell, backend: str) -> str:
    """Why a cell cannot be, or an empty string."""
    operator, program = cell.operator, cell.program
    if operator == GATHER:
        return "all_gather needs several processes or devices; its tests start them"
    is_complex = cell.dtype.startswith("complex")
    if operator.real and is_complex:
        return _COMPLEX
    if cell.arguments == "aux" and not operator.aux:
        return "the operator has no has_aux"
    if cell.dtype == "bfloat16" and "linear algebra" in program.tags:
        return _LINALG
    if backend == "torch" and wrong_in_pytorch(operator, program):
        return _TANGENT
    compiled = backend == "torch" and cell.transform == "compile"
    if compiled and "checkpoint" in operator.name:
        return "torch.func does not support the saved-tensor hooks of a compiled checkpoint"
    if compiled and operator.name in _NOT_COMPILED:
        return _NOT_COMPILED[operator.name]
    return ""
