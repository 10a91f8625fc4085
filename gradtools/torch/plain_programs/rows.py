"""The table of PyTorch's wrong and missing derivatives, and the plain programs that replace them.

Found by sweeps over PyTorch's own table of operators, OpInfo (`tests/support/sweeps`). An operation
with a wrong derivative is differentiated by a decomposition (`programs.py`):

- in reverse mode the fused kernel still runs; if its gradient is wrong, or is differentiated again,
  a hook at its node in autograd's graph returns the program's gradient (`backward_nodes.py`);
- inside of torch.func, which has no graph, the program replaces the operation if several levels
  differentiate it (`modes.py`);
- in forward mode the program replaces the operation (`forward_mode/pushing.py`).

`docs/upstream-bugs.md` is generated from this table, and a test runs each example: it fails once
PyTorch is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.plain_programs import programs

Tensor = torch.Tensor

GRADIENT = "gradient"
GRADIENT_AGAIN = "derivative of the gradient"
THIRD = "third derivative"
MAPPED = "derivative of the gradient under vmap"
UNDER_VMAP = "gradient under vmap"
OF_STRIDED = "gradient of strided parameters"
TANGENT = "tangent"
TANGENT_AGAIN = "derivative of the tangent"
TANGENT_OF_GRADIENT = "tangent of the gradient"


@dataclass(frozen=True, eq=False, repr=False)
class PlainProgram:
    """An operation that PyTorch differentiates wrongly, or not at all.

    Attributes:
        operation: Its name in PyTorch's documentation, without `torch.`.
        wrong: The wrong derivatives, and what plain PyTorch returns for each: "gradient",
            "derivative of the gradient" (reverse over reverse mode), "third derivative" (in reverse
            mode), "gradient under vmap", "derivative of the gradient under vmap", "gradient of
            strided parameters", "tangent" (forward mode), "derivative of the tangent" (reverse or
            forward mode over forward mode), "tangent of the gradient" (forward over reverse mode).
        program: The decomposition, with the same arguments. If None, wrong tangents are computed by
            transposing reverse mode.
        issue: The upstream issue, such as "torch#196702"; empty if no report was found.
        when: A predicate of its arguments: whether it is wrong at them; None for always.
        examples: For each wrong derivative, a loss of x that shows it, as Python code with `torch`.
        seen: The newest version of PyTorch in which it was seen.
    """

    operation: str
    wrong: dict[str, str]
    program: Callable[..., Any] | None = None
    issue: str = ""
    when: Callable[..., bool] | None = None
    examples: dict[str, str] = field(default_factory=dict)
    seen: str = "2.13"

    @property
    def name(self) -> str:
        return self.operation.rpartition(".")[2]

    def applies(self, args: Any, kwargs: Any) -> bool:
        """Whether PyTorch is wrong at these arguments."""
        return self.when is None or self.when(*args, **kwargs)


# --- when they are wrong ----------------------------------------------------------------------


def _is_complex(*args: Any, **kwargs: Any) -> bool:
    return bool(args[0].is_complex())


def _is_real(*args: Any, **kwargs: Any) -> bool:
    return not _is_complex(*args)  # the phases of complex eigenvectors are not determined


def _by_integers(input: Tensor, other: Tensor) -> bool:
    return not is_inexact(other)


def _trains(*args: Any, **kwargs: Any) -> bool:
    return bool(args[5])


def _is_whole(input: Tensor, *args: Any, **kwargs: Any) -> bool:
    return input.is_contiguous() and not input.storage_offset()


def _is_not_packed(*args: Any, **kwargs: Any) -> bool:
    return isinstance(args[3], bool)


def _of_products(*args: Any, **kwargs: Any) -> bool:
    return "prod" in (*args[4:5], kwargs.get("reduce"))


def _of_numbers(log_probs: Tensor, targets: Tensor, lengths: Any, *args: Any) -> bool:
    return not isinstance(lengths, Tensor)


def _of_options(*args: Any, **kwargs: Any) -> bool:
    return kwargs.get("options") is not None


# --- the table ---------------------------------------------------------------------------------

_F = "nn.functional."
_SPD = "x @ x.mT + torch.eye(3, dtype=x.dtype)"
_OTHER, _ERROR = "another number", "an error"
_LOGICAL = tuple([f"logical_{name}_" for name in ("not", "and", "or", "xor")])
_NORM = {TANGENT_AGAIN: _OTHER, THIRD: _OTHER, MAPPED: _OTHER}
_LINEAR_ALGEBRA = {TANGENT_AGAIN: f"{_OTHER}, or zero"}
_ATTENTION = f"{_F}scaled_dot_product_attention"

_in_place = programs.in_place

TABLE = (
    PlainProgram(
        "ldexp",
        {GRADIENT: "zero", TANGENT: _OTHER},
        programs.ldexp,
        "torch#186556",
        _by_integers,
        {
            GRADIENT: "torch.ldexp(x, torch.tensor([-1, -1, -2])).sum()",
            TANGENT: "torch.ldexp(x, torch.tensor([1, -1, -2])).sum()",
        },
    ),
    PlainProgram(
        f"{_F}silu",
        {GRADIENT: _OTHER, TANGENT: _OTHER},
        programs.silu,
        when=_is_complex,
        examples={
            GRADIENT: f"torch.{_F}silu(torch.complex(x, 1 - x), inplace=True).abs().sum()",
            TANGENT: f"torch.{_F}silu(torch.complex(x, 1 - x)).abs().sum()",
        },
    ),
    PlainProgram(
        "logcumsumexp",
        {GRADIENT_AGAIN: "NaN at a cotangent of zero", TANGENT: f"NaN, or {_OTHER}"},
        programs.logcumsumexp,
        "torch#196705",
        examples={
            GRADIENT_AGAIN: "(0 * x * torch.logcumsumexp(x, 0) + x**3).sum()",
            TANGENT: "torch.logcumsumexp(1000 * x, 0).sum()",
        },
    ),
    PlainProgram(
        "sparse_coo_tensor",  # its cotangent is looked up, by `backward_nodes.py`
        {GRADIENT_AGAIN: f"{_OTHER}, or an error"},
        examples={
            GRADIENT_AGAIN: "(torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 0, 2]]), "
            "x[0] ** 2, (3, 3)).to_dense() ** 2).sum()"
        },
    ),
    PlainProgram(
        "_weight_norm",
        {GRADIENT_AGAIN: _OTHER, TANGENT: _ERROR},
        programs.weight_norm,
        examples={
            GRADIENT_AGAIN: "torch._weight_norm(x, x[:, :1] ** 2, 0).pow(3).sum()",
            TANGENT: "torch._weight_norm(x, x[:, :1], 0).sum()",
        },
    ),
    PlainProgram(
        f"{_F}layer_norm",
        _NORM,
        programs.layer_norm,
        "torch#196700, torch#175754",
        examples={
            TANGENT_AGAIN: f"(torch.{_F}layer_norm(x, (3,)) ** 2 * x).sum()",
            THIRD: f"(torch.{_F}layer_norm(x, (3,)) ** 2 * x).sum()",
            MAPPED: f"(torch.{_F}layer_norm(x, (3,), x[0]) ** 2).sum()",
        },
    ),
    PlainProgram(
        f"{_F}batch_norm",
        {OF_STRIDED: _OTHER, **_NORM},
        programs.batch_norm,
        "torch#196699, torch#186256",
        _trains,
        {
            OF_STRIDED: f"torch.{_F}batch_norm(x**2, None, None, torch.arange(6).to(x)[::2], None, "
            "True).mul(x).sum()",
            TANGENT_AGAIN: f"(torch.{_F}batch_norm(x, None, None, training=True) ** 2 * x).sum()",
            THIRD: f"(torch.{_F}batch_norm(x, None, None, training=True) ** 2 * x).sum()",
            MAPPED: f"(torch.{_F}batch_norm(x, None, None, x[0], None, True) ** 2).sum()",
        },
    ),
    PlainProgram(
        f"{_F}instance_norm",
        _NORM,
        programs.instance_norm,
        "torch#196699, torch#186256",
        _trains,
        {
            TANGENT_AGAIN: f"(torch.{_F}instance_norm(x[None]) ** 2 * x).sum()",
            THIRD: f"(torch.{_F}instance_norm(x[None]) ** 2 * x).sum()",
            MAPPED: f"(torch.{_F}instance_norm(x[None], weight=x[0]) ** 2).sum()",
        },
    ),
    PlainProgram(
        f"{_F}group_norm",
        {TANGENT: f"{_ERROR} if it is not contiguous", MAPPED: _ERROR},
        programs.group_norm,
        examples={
            TANGENT: f"torch.{_F}group_norm(torch.stack((x, x**2))[None]"
            ".to(memory_format=torch.channels_last), 1).pow(3).sum()",
        },
    ),
    PlainProgram("native_layer_norm", _NORM, programs.native_layer_norm, "torch#196700"),
    PlainProgram("native_batch_norm", _NORM, programs.native_batch_norm, "torch#196699", _trains),
    PlainProgram(
        "_native_batch_norm_legit",
        _NORM,
        programs.native_batch_norm_legit,
        "torch#196699",
        lambda *args: bool(args[-3]),
    ),
    PlainProgram("_batch_norm_with_update", _NORM, programs.batch_norm_with_update, "torch#196699"),
    PlainProgram(
        _ATTENTION,
        {GRADIENT_AGAIN: _ERROR, TANGENT_AGAIN: _ERROR},
        programs.attention,
        examples={
            GRADIENT_AGAIN: f"torch.{_ATTENTION}(*[x[None, None] ** 2] * 3).sum()",
            TANGENT_AGAIN: f"torch.{_ATTENTION}(x, 2 * x, x).sum()",
        },
    ),
    *[
        PlainProgram(
            name, {UNDER_VMAP: _ERROR}, programs.recurrent_layers(name), when=_is_not_packed
        )
        for name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    ],
    *[
        PlainProgram(f"{name}_cell", {UNDER_VMAP: _ERROR}, programs.recurrent_cell(name))
        for name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    ],
    PlainProgram("prelu", {UNDER_VMAP: _ERROR}, programs.prelu),
    PlainProgram("ctc_loss", {UNDER_VMAP: _ERROR}, programs.ctc_loss, when=_of_numbers),
    PlainProgram(
        f"{_F}hardsigmoid",
        {GRADIENT_AGAIN: _ERROR},
        programs.hardsigmoid,
        examples={GRADIENT_AGAIN: f"(torch.{_F}hardsigmoid(x) ** 2).sum()"},
    ),
    PlainProgram(
        "cdist",
        {GRADIENT_AGAIN: _ERROR, MAPPED: _OTHER},
        programs.cdist,
        examples={GRADIENT_AGAIN: "torch.cdist(x, 1 - 2 * x).sum()"},
    ),
    PlainProgram(
        f"{_F}pdist",
        {GRADIENT_AGAIN: _ERROR},
        programs.pdist,
        examples={GRADIENT_AGAIN: f"torch.{_F}pdist(x**3).sum()"},
    ),
    PlainProgram(
        "sinc",
        {GRADIENT_AGAIN: "NaN at zero", TANGENT_OF_GRADIENT: "zero at zero"},
        programs.sinc,
        examples={
            GRADIENT_AGAIN: "torch.sinc(x - x0).sum()",
            TANGENT_OF_GRADIENT: "torch.sinc(x - x0).sum()",
        },
    ),
    PlainProgram(
        "as_strided_scatter",
        {GRADIENT: _OTHER},
        programs.as_strided_scatter,
        when=_is_whole,
        examples={GRADIENT: "(torch.as_strided_scatter(1 * x, x[0], (3,), (2,)) ** 2).sum()"},
    ),
    PlainProgram(
        "linalg.det",
        {
            GRADIENT: "zero at a singular matrix",
            TANGENT: "zero at a singular matrix",
            TANGENT_OF_GRADIENT: "NaN at equal singular values",
            **_LINEAR_ALGEBRA,
        },
        programs.det,
        "torch#192540",
        None,
        {
            GRADIENT: "torch.linalg.det(x - x0 + torch.diag(torch.tensor([1.0, 2.0, 0.0])))",
            TANGENT: "torch.linalg.det(x - x0 + torch.diag(torch.tensor([1.0, 2.0, 0.0])))",
            TANGENT_OF_GRADIENT: "torch.linalg.det(x - x0)",
            TANGENT_AGAIN: "torch.linalg.det(x)",
        },
    ),
    *[
        PlainProgram(name, _LINEAR_ALGEBRA, None, "torch#192540", None, examples)
        for name, examples in (
            ("logdet", {TANGENT_AGAIN: f"torch.logdet({_SPD})"}),
            ("linalg.slogdet", {TANGENT_AGAIN: "torch.linalg.slogdet(x)[1]"}),
            ("linalg.solve", {TANGENT_AGAIN: "torch.linalg.solve(x + 3, x).sum()"}),
            ("linalg.solve_ex", {}),
            ("linalg.tensorsolve", {}),
        )
    ],
    PlainProgram(
        "linalg.householder_product",
        {TANGENT_AGAIN: _OTHER},
        issue="torch#198017",
        examples={TANGENT_AGAIN: "torch.linalg.householder_product(x, x[0]).sum()"},
    ),
    PlainProgram("orgqr", {TANGENT_AGAIN: _OTHER}, issue="torch#198017"),
    PlainProgram(
        "linalg.eigh",
        {TANGENT_AGAIN: "NaN"},
        when=_is_real,
        examples={TANGENT_AGAIN: "(torch.linalg.eigh(x + x.mT)[1].abs() * x).sum()"},
    ),
    PlainProgram(
        "cumprod",
        {TANGENT_AGAIN: "NaN at a zero factor"},
        examples={
            TANGENT_AGAIN: "torch.cumprod(x * torch.tensor([[1.0], [0.0], [1.0]], dtype=x.dtype), "
            "0).sum()"
        },
    ),
    PlainProgram(
        "scatter_reduce",
        {TANGENT: _OTHER},
        issue="torch#196702",
        when=_of_products,
        examples={
            TANGENT: "x.scatter_reduce(0, torch.tensor([[0, 0, 1]]), x[1:2] + 2, 'prod').sum()"
        },
    ),
    PlainProgram(
        "triangular_solve",
        {TANGENT: _OTHER},
        issue="torch#196707",
        examples={TANGENT: "torch.triangular_solve(x, x + 3, unitriangular=True)[0].sum()"},
    ),
    PlainProgram(
        "cholesky_inverse",
        {TANGENT: _OTHER},
        programs.cholesky_inverse,
        "torch#196682",
        examples={TANGENT: "torch.cholesky_inverse(x.tril()).sum()"},
    ),
    PlainProgram("cholesky_solve", {TANGENT: _OTHER}, programs.cholesky_solve, "torch#196694"),
    PlainProgram(f"{_F}linear_cross_entropy", {TANGENT: "zero"}, when=_of_options),
    *[
        PlainProgram(
            name,
            {GRADIENT: _OTHER, TANGENT: _OTHER},
            _in_place(getattr(torch, name[:-1])),
            examples={TANGENT: f"(1 * x).{name}({'' if 'not' in name else 'x'}).sum()"},
        )
        for name in _LOGICAL
    ],
    *[
        PlainProgram(name, {TANGENT_AGAIN: _ERROR}, examples={TANGENT_AGAIN: f"{code}.sum()"})
        for name, code in (
            ("softmax", "(torch.softmax(x, 0) * x)"),
            ("log_softmax", "(torch.log_softmax(x, 0) * x)"),
            ("logsumexp", "torch.logsumexp(x, 0)"),
            (f"{_F}glu", f"torch.{_F}glu(x[:, :2], 1)"),
        )
    ],
    *[
        PlainProgram(name, {TANGENT_AGAIN: _ERROR})
        for name in (
            *("_softmax", "_log_softmax", "_safe_softmax", "cross_entropy_loss", "aminmax"),
            *("renorm", "linalg.norm", "linalg.vector_norm", "linalg.matrix_norm", "norm"),
        )
    ],
    *[
        PlainProgram(
            f"{_F}{name}",
            {TANGENT_OF_GRADIENT: _ERROR},
            getattr(programs, name),
            issue,
            examples={TANGENT_OF_GRADIENT: f"torch.{_F}{name}(x, torch.ones_like(x))"},
        )
        for name, issue in (
            ("mse_loss", "torch#123996"),
            ("soft_margin_loss", ""),
            ("huber_loss", ""),
        )
    ],
)
TABLE += tuple(
    [
        replace(row, operation=f"{row.name}_", program=programs.in_place(row.program), examples={})
        for row in TABLE
        if row.name in ("ldexp", "silu", "hardsigmoid", "sinc") and row.program is not None
    ]
)
_BY_NAME = {row.name: row for row in TABLE}
_IN_PYTHON = (
    *(upstream.linear_cross_entropy, torch.cdist),
    *(torch.nn.functional.hardsigmoid, torch.nn.functional.silu),
)


def row_of(fun: Any) -> PlainProgram | None:
    """The row of a function or operator of PyTorch, or None."""
    if type(fun) is FunctionType:
        return _BY_NAME[fun.__name__] if fun in _IN_PYTHON else None
    name = getattr(fun, "__name__", "").partition(".")[0]
    for prefix in ("linalg_", "special_"):
        name = name.removeprefix(prefix)
    return _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("_"))


def is_wrong_at(fun: Any, args: Any, kwargs: Any) -> bool:
    row = row_of(fun)
    return row is not None and row.applies(args, kwargs)


# --- the same by the signatures of torch.nn.functional, which dynamo sees ----------------------


def functional_norm(
    plain: Any,
    program: Any,
    default: bool,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    use_input_stats: bool | None = None,
) -> Tensor:
    """batch_norm or instance_norm, by the statistics of the input or by running ones."""
    training = use_input_stats if training is None else training
    running = running_mean, running_var
    if not (default if training is None else training):
        return plain(input, *running, weight, bias, False, momentum, eps)
    return program(input, weight, bias, *running, True, momentum, eps, True)


def traced_programs(kinds: tuple[str, ...]) -> dict[Any, PlainProgram]:
    """The rows with one of these kinds of errors, by the function that dynamo sees."""
    spaces = (torch, Tensor, torch.linalg, torch.special, torch.nn.functional)
    result = {
        getattr(space, row.name): row
        for row in TABLE
        for space in spaces
        if any(kind in row.wrong for kind in kinds) and hasattr(space, row.name)
    }
    for name, default in (("batch_norm", False), ("instance_norm", True)):
        fun = getattr(torch.nn.functional, name)
        if fun in result:
            program = partial(functional_norm, fun, getattr(programs, name), default)
            result[fun] = replace(result[fun], program=program, when=None)
    return result
