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
from dataclasses import dataclass, replace
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


_always = lambda *args, **kwargs: True


@dataclass(frozen=True, eq=False, repr=False)
class PlainProgram:
    """An operation that PyTorch differentiates wrongly, or not at all.

    Attributes:
        operation: Its name in PyTorch's documentation, without `torch.`.
        wrong: The wrong derivatives, and for each a loss of x that shows it, as Python code with
            `torch` (and x0, the value of x); empty if none is simple. The derivatives are
            "gradient", "derivative of the gradient" (reverse over reverse mode), "third derivative"
            (in reverse mode), "gradient under vmap", "derivative of the gradient under vmap",
            "gradient of strided parameters", "tangent" (forward mode), "derivative of the tangent"
            (reverse or forward mode over forward mode), "tangent of the gradient" (forward over
            reverse mode). What PyTorch returns instead is measured in `docs/upstream-bugs.md`.
        program: The decomposition, with the same arguments. If None, wrong tangents are computed by
            transposing reverse mode.
        issue: The upstream issue, such as "torch#196702"; empty if no report was found.
        when: A predicate of its arguments: whether it is wrong at them.
        seen: The newest version of PyTorch in which it was seen.
    """

    operation: str
    wrong: dict[str, str]
    program: Callable[..., Any] | None = None
    issue: str = ""
    when: Callable[..., bool] = _always
    seen: str = "2.13"

    @property
    def name(self) -> str:
        return self.operation.rpartition(".")[2]

    def applies(self, args: Any, kwargs: Any) -> bool:
        """Whether PyTorch is wrong at these arguments."""
        return bool(self.when(*args, **kwargs))


# --- the table ---------------------------------------------------------------------------------

_F = "nn.functional."
_SPD = "x @ x.mT + torch.eye(3, dtype=x.dtype)"
_TRIANGULAR = "torch.triangular_solve(x, x + 3, unitriangular=True)[0].sum()"
_HOUSEHOLDER = "torch.linalg.householder_product(x, x[0]).sum()"
_ZERO_FACTOR = "torch.tensor([[1.0], [0.0], [1.0]], dtype=x.dtype)"
_SINGULAR = "torch.linalg.det(x - x0 + torch.diag(torch.tensor([1.0, 2.0, 0.0])))"
_ATTENTION = f"{_F}scaled_dot_product_attention"
_LAYER_NORM = f"(torch.{_F}layer_norm(x, (3,)) ** 2 * x).sum()"
_BATCH_NORM = f"(torch.{_F}batch_norm(x, None, None, training=True) ** 2 * x).sum()"
_INSTANCE_NORM = f"(torch.{_F}instance_norm(x[None]) ** 2 * x).sum()"
_ANY_NORM = {TANGENT_AGAIN: "", THIRD: "", MAPPED: ""}
_RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")
_by_integers = lambda input, other: not is_inexact(other)
_trains = lambda *args, **kwargs: args[5]

TABLE = (
    PlainProgram(
        "ldexp",
        {
            GRADIENT: "torch.ldexp(x, torch.tensor([-1, -1, -2])).sum()",
            TANGENT: "torch.ldexp(x, torch.tensor([1, -1, -2])).sum()",
        },
        programs.ldexp,
        "torch#186556",
        _by_integers,
    ),
    PlainProgram(
        f"{_F}silu",
        {
            GRADIENT: f"torch.{_F}silu(torch.complex(x, 1 - x), inplace=True).abs().sum()",
            TANGENT: f"torch.{_F}silu(torch.complex(x, 1 - x)).abs().sum()",
        },
        programs.silu,
        when=lambda input, *args, **kwargs: input.is_complex(),
    ),
    PlainProgram(
        "logcumsumexp",
        {
            GRADIENT_AGAIN: "(0 * x * torch.logcumsumexp(x, 0) + x**3).sum()",
            TANGENT: "torch.logcumsumexp(1000 * x, 0).sum()",
        },
        programs.logcumsumexp,
        "torch#196705",
    ),
    PlainProgram(
        "sparse_coo_tensor",  # its cotangent is looked up, by `backward_nodes.py`
        {
            GRADIENT_AGAIN: "(torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 0, 2]]), "
            "x[0] ** 2, (3, 3)).to_dense() ** 2).sum()"
        },
    ),
    PlainProgram(
        "_weight_norm",
        {
            GRADIENT_AGAIN: "torch._weight_norm(x, x[:, :1] ** 2, 0).pow(3).sum()",
            TANGENT: "torch._weight_norm(x, x[:, :1], 0).sum()",
        },
        programs.weight_norm,
    ),
    PlainProgram(
        f"{_F}layer_norm",
        {
            TANGENT_AGAIN: _LAYER_NORM,
            THIRD: _LAYER_NORM,
            MAPPED: f"(torch.{_F}layer_norm(x, (3,), x[0]) ** 2).sum()",
        },
        programs.layer_norm,
        "torch#196700, torch#175754",
    ),
    PlainProgram(
        f"{_F}batch_norm",
        {
            OF_STRIDED: f"torch.{_F}batch_norm(x**2, None, None, torch.arange(6).to(x)[::2], None, "
            "True).mul(x).sum()",
            TANGENT_AGAIN: _BATCH_NORM,
            THIRD: _BATCH_NORM,
            MAPPED: f"(torch.{_F}batch_norm(x, None, None, x[0], None, True) ** 2).sum()",
        },
        programs.batch_norm,
        "torch#196699, torch#186256",
        _trains,
    ),
    PlainProgram(
        f"{_F}instance_norm",
        {
            TANGENT_AGAIN: _INSTANCE_NORM,
            THIRD: _INSTANCE_NORM,
            MAPPED: f"(torch.{_F}instance_norm(x[None], weight=x[0]) ** 2).sum()",
        },
        programs.instance_norm,
        "torch#196699, torch#186256",
        _trains,
    ),
    PlainProgram(
        f"{_F}group_norm",  # whose tangent is missing if the input is not contiguous
        {
            TANGENT: f"torch.{_F}group_norm(torch.stack((x, x**2))[None]"
            ".to(memory_format=torch.channels_last), 1).pow(3).sum()",
            MAPPED: "",
        },
        programs.group_norm,
    ),
    PlainProgram("native_layer_norm", _ANY_NORM, programs.native_layer_norm, "torch#196700"),
    PlainProgram(
        "native_batch_norm", _ANY_NORM, programs.native_batch_norm, "torch#196699", _trains
    ),
    PlainProgram(
        "_native_batch_norm_legit",
        _ANY_NORM,
        programs.native_batch_norm_legit,
        "torch#196699",
        lambda *args: args[-3],
    ),
    PlainProgram(
        "_batch_norm_with_update", _ANY_NORM, programs.batch_norm_with_update, "torch#196699"
    ),
    PlainProgram(
        _ATTENTION,
        {
            GRADIENT_AGAIN: f"torch.{_ATTENTION}(*[x[None, None] ** 2] * 3).sum()",
            TANGENT_AGAIN: f"torch.{_ATTENTION}(x, 2 * x, x).sum()",
        },
        programs.attention,
    ),
    *[
        PlainProgram(
            name,
            {UNDER_VMAP: ""},
            programs.recurrent_layers(name),
            when=lambda *args, **kwargs: isinstance(args[3], bool),  # the sequences are not packed
        )
        for name in _RECURRENT
    ],
    *[
        PlainProgram(f"{name}_cell", {UNDER_VMAP: ""}, programs.recurrent_cell(name))
        for name in _RECURRENT
    ],
    PlainProgram("prelu", {UNDER_VMAP: ""}, programs.prelu),
    PlainProgram(
        "ctc_loss",
        {UNDER_VMAP: ""},
        programs.ctc_loss,
        when=lambda log_probs, targets, lengths, *args: not isinstance(lengths, Tensor),
    ),
    PlainProgram(
        f"{_F}hardsigmoid",
        {GRADIENT_AGAIN: f"(torch.{_F}hardsigmoid(x) ** 2).sum()"},
        programs.hardsigmoid,
    ),
    PlainProgram(
        "cdist", {GRADIENT_AGAIN: "torch.cdist(x, 1 - 2 * x).sum()", MAPPED: ""}, programs.cdist
    ),
    PlainProgram(f"{_F}pdist", {GRADIENT_AGAIN: f"torch.{_F}pdist(x**3).sum()"}, programs.pdist),
    PlainProgram(
        "sinc",
        {
            GRADIENT_AGAIN: "torch.sinc(x - x0).sum()",
            TANGENT_OF_GRADIENT: "torch.sinc(x - x0).sum()",
        },
        programs.sinc,
    ),
    PlainProgram(
        "as_strided_scatter",
        {GRADIENT: "(torch.as_strided_scatter(1 * x, x[0], (3,), (2,)) ** 2).sum()"},
        programs.as_strided_scatter,
        when=lambda input, *args, **kwargs: input.is_contiguous() and not input.storage_offset(),
    ),
    PlainProgram(
        "linalg.det",
        {
            GRADIENT: _SINGULAR,
            TANGENT: _SINGULAR,
            TANGENT_OF_GRADIENT: "torch.linalg.det(x - x0)",
            TANGENT_AGAIN: "torch.linalg.det(x)",
        },
        programs.det,
        "torch#192540",
    ),
    *[
        PlainProgram(
            name,
            {GRADIENT: "", TANGENT: f"(1 * x).{name}({'' if 'not' in name else 'x'}).sum()"},
            programs.in_place(getattr(torch, name[:-1])),
        )
        for name in ("logical_not_", "logical_and_", "logical_or_", "logical_xor_")
    ],
    *[
        PlainProgram(
            f"{_F}{name}",
            {TANGENT_OF_GRADIENT: f"torch.{_F}{name}(x, torch.ones_like(x))"},
            getattr(programs, name),
            "torch#123996" if name == "mse_loss" else "",
        )
        for name in ("mse_loss", "soft_margin_loss", "huber_loss")
    ],
    PlainProgram(
        "cholesky_inverse",
        {TANGENT: "torch.cholesky_inverse(x.tril()).sum()"},
        programs.cholesky_inverse,
        "torch#196682",
    ),
    PlainProgram("cholesky_solve", {TANGENT: ""}, programs.cholesky_solve, "torch#196694"),
    # Right in reverse mode, which is transposed:
    PlainProgram(
        "linalg.eigh",
        {TANGENT_AGAIN: "(torch.linalg.eigh(x + x.mT)[1].abs() * x).sum()"},
        when=lambda A, *args, **kwargs: not A.is_complex(),  # whose eigenvectors' phases are free
    ),
    PlainProgram(
        "scatter_reduce",
        {TANGENT: "x.scatter_reduce(0, torch.tensor([[0, 0, 1]]), x[1:2] + 2, 'prod').sum()"},
        issue="torch#196702",
        when=lambda *args, **kwargs: "prod" in (*args[4:5], kwargs.get("reduce")),
    ),
    PlainProgram(
        f"{_F}linear_cross_entropy",
        {TANGENT: ""},
        when=lambda *args, **kwargs: kwargs.get("options") is not None,
    ),
    *[
        PlainProgram(name, {wrong: example}, issue=issue)
        for wrong, issue, name, example in (
            (TANGENT, "torch#196707", "triangular_solve", _TRIANGULAR),
            (TANGENT_AGAIN, "torch#192540", "logdet", f"torch.logdet({_SPD})"),
            (TANGENT_AGAIN, "torch#192540", "linalg.slogdet", "torch.linalg.slogdet(x)[1]"),
            (TANGENT_AGAIN, "torch#192540", "linalg.solve", "torch.linalg.solve(x + 3, x).sum()"),
            (TANGENT_AGAIN, "torch#192540", "linalg.solve_ex", ""),
            (TANGENT_AGAIN, "torch#192540", "linalg.tensorsolve", ""),
            (TANGENT_AGAIN, "torch#198017", "linalg.householder_product", _HOUSEHOLDER),
            (TANGENT_AGAIN, "torch#198017", "orgqr", ""),
            (TANGENT_AGAIN, "", "cumprod", f"torch.cumprod(x * {_ZERO_FACTOR}, 0).sum()"),
            (TANGENT_AGAIN, "", "softmax", "(torch.softmax(x, 0) * x).sum()"),
            (TANGENT_AGAIN, "", "log_softmax", "(torch.log_softmax(x, 0) * x).sum()"),
            (TANGENT_AGAIN, "", "logsumexp", "torch.logsumexp(x, 0).sum()"),
            (TANGENT_AGAIN, "", f"{_F}glu", f"torch.{_F}glu(x[:, :2], 1).sum()"),
            *[
                (TANGENT_AGAIN, "", name, "")
                for name in (
                    *("_softmax", "_log_softmax", "_safe_softmax", "cross_entropy_loss", "aminmax"),
                    *("renorm", "linalg.norm", "linalg.vector_norm", "linalg.matrix_norm", "norm"),
                )
            ],
        )
    ],
)
_BY_NAME = {row.name: row for row in TABLE}
_BY_NAME |= {
    f"{name}_": replace(_BY_NAME[name], program=programs.in_place(getattr(programs, name)))
    for name in ("ldexp", "silu", "hardsigmoid", "sinc")
}
_IN_PYTHON = (
    *(upstream.linear_cross_entropy, torch.cdist),
    *(torch.nn.functional.hardsigmoid, torch.nn.functional.silu),
)


OPERATORS = (upstream.OpOverload, upstream.OpOverloadPacket)
OWN = ("aten", "prim", "prims", "gradtools")
_OWN_MODULES = tuple([f"{upstream.OPERATORS}.{name}" for name in OWN])


def is_custom_operator(fun: Any) -> bool:
    """Whether fun is an operator of others, which may have the name of one of PyTorch's."""
    return isinstance(fun, OPERATORS) and fun.__module__ not in _OWN_MODULES


def row_of(fun: Any) -> PlainProgram | None:
    """The row of a function or operator of PyTorch, or None."""
    if type(fun) is FunctionType:
        return _BY_NAME[fun.__name__] if fun in _IN_PYTHON else None
    if is_custom_operator(fun):
        return None
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
        getattr(space, name): row
        for name, row in _BY_NAME.items()
        for space in spaces
        if any(kind in row.wrong for kind in kinds) and hasattr(space, name)
    }
    for name, default in (("batch_norm", False), ("instance_norm", True)):
        fun = getattr(torch.nn.functional, name)
        if fun in result:
            program = partial(functional_norm, fun, getattr(programs, name), default)
            result[fun] = replace(result[fun], program=program, when=_always)
    return result
