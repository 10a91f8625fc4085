"""Lists operations for which derivatives in PyTorch are wrong or missing.

The bugs were found by sweeps over OpInfo, PyTorch's own table of operators (`tests/sweeps`).
`docs/upstream-bugs.md` is generated from this table. A test runs each example and fails when
PyTorch has fixed the bug.
"""

from __future__ import annotations

from dataclasses import dataclass

GRADIENT = "gradient"
GRADIENT_AGAIN = "derivative of the gradient"  # computed in reverse over reverse mode
THIRD = "third derivative"  # computed by three applications of reverse mode
MAPPED = "derivative of the gradient under vmap"
OF_STRIDED = "gradient of strided parameters"
TANGENT = "tangent"  # computed in forward mode
# computed in reverse or forward mode over forward mode
TANGENT_AGAIN = "derivative of the tangent"
TANGENT_OF_GRADIENT = "tangent of the gradient"  # computed in forward over reverse mode


@dataclass(frozen=True)
class Bug:
    """An operation whose derivative in PyTorch is wrong.

    Attributes:
        operation: The name in PyTorch's documentation without `torch.`.
        wrong: The wrong derivatives, each with a loss of x that shows the bug, as Python code with
            `torch` and x0, the value of x.
        issue: The upstream issue, such as "torch#196702", or an empty string if there is no report.
    """

    operation: str
    wrong: dict[str, str]
    issue: str = ""


TABLE = (
    Bug(
        "ldexp",
        {
            GRADIENT: "torch.ldexp(x, torch.tensor([-1, -1, -2])).sum()",
            TANGENT: "torch.ldexp(x, torch.tensor([1, -1, -2])).sum()",
        },
        "torch#186556",
    ),
    Bug(
        "nn.functional.silu",
        {
            GRADIENT: "torch.nn.functional.silu(torch.complex(x, 1 - x), inplace=True).abs().sum()",
            TANGENT: "torch.nn.functional.silu(torch.complex(x, 1 - x)).abs().sum()",
        },
    ),
    Bug(
        "logcumsumexp",
        {
            GRADIENT_AGAIN: "(0 * x * torch.logcumsumexp(x, 0) + x**3).sum()",
            TANGENT: "torch.logcumsumexp(1000 * x, 0).sum()",
        },
        "torch#196705",
    ),
    Bug(
        "sparse_coo_tensor",
        {
            GRADIENT_AGAIN: "(torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 0, 2]]), x[0] "
            "** 2, (3, 3)).to_dense() ** 2).sum()"
        },
    ),
    Bug(
        "_weight_norm",
        {
            GRADIENT_AGAIN: "torch._weight_norm(x, x[:, :1] ** 2, 0).pow(3).sum()",
            TANGENT: "torch._weight_norm(x, x[:, :1], 0).sum()",
        },
    ),
    Bug(
        "nn.functional.layer_norm",
        {
            TANGENT_AGAIN: "(torch.nn.functional.layer_norm(x, (3,)) ** 2 * x).sum()",
            THIRD: "(torch.nn.functional.layer_norm(x, (3,)) ** 2 * x).sum()",
            MAPPED: "(torch.nn.functional.layer_norm(x, (3,), x[0]) ** 2).sum()",
        },
        "torch#196700, torch#175754",
    ),
    Bug(
        "nn.functional.batch_norm",
        {
            OF_STRIDED: "torch.nn.functional.batch_norm(x**2, None, None, "
            "torch.arange(6).to(x)[::2], None, True).mul(x).sum()",
            TANGENT_AGAIN: "(torch.nn.functional.batch_norm(x, None, None, training=True) ** 2 * "
            "x).sum()",
            THIRD: "(torch.nn.functional.batch_norm(x, None, None, training=True) ** 2 * x).sum()",
            MAPPED: "(torch.nn.functional.batch_norm(x, None, None, x[0], None, True) ** 2).sum()",
        },
        "torch#196699, torch#186256",
    ),
    Bug(
        "nn.functional.instance_norm",
        {
            TANGENT_AGAIN: "(torch.nn.functional.instance_norm(x[None]) ** 2 * x).sum()",
            THIRD: "(torch.nn.functional.instance_norm(x[None]) ** 2 * x).sum()",
            MAPPED: "(torch.nn.functional.instance_norm(x[None], weight=x[0]) ** 2).sum()",
        },
        "torch#196699, torch#186256",
    ),
    Bug(
        "nn.functional.group_norm",
        {
            TANGENT: "torch.nn.functional.group_norm(torch.stack((x, "
            "x**2))[None].to(memory_format=torch.channels_last), 1).pow(3).sum()"
        },
    ),
    Bug(
        "nn.functional.scaled_dot_product_attention",
        {
            GRADIENT_AGAIN: "torch.nn.functional.scaled_dot_product_attention(*[x[None, None] ** "
            "2] * 3).sum()",
            TANGENT_AGAIN: "torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x).sum()",
        },
    ),
    Bug(
        "nn.functional.hardsigmoid",
        {GRADIENT_AGAIN: "(torch.nn.functional.hardsigmoid(x) ** 2).sum()"},
    ),
    Bug("cdist", {GRADIENT_AGAIN: "torch.cdist(x, 1 - 2 * x).sum()"}),
    Bug("nn.functional.pdist", {GRADIENT_AGAIN: "torch.nn.functional.pdist(x**3).sum()"}),
    Bug(
        "sinc",
        {
            GRADIENT_AGAIN: "torch.sinc(x - x0).sum()",
            TANGENT_OF_GRADIENT: "torch.sinc(x - x0).sum()",
        },
        "torch#196703, torch#89459",
    ),
    Bug(
        "as_strided_scatter",
        {GRADIENT: "(torch.as_strided_scatter(1 * x, x[0], (3,), (2,)) ** 2).sum()"},
    ),
    Bug(
        "linalg.det",
        {
            GRADIENT: "torch.linalg.det(x - x0 + torch.diag(torch.tensor([1.0, 2.0, 0.0])))",
            TANGENT: "torch.linalg.det(x - x0 + torch.diag(torch.tensor([1.0, 2.0, 0.0])))",
            TANGENT_OF_GRADIENT: "torch.linalg.det(x - x0)",
            TANGENT_AGAIN: "torch.linalg.det(x)",
        },
        "torch#192540",
    ),
    Bug("logical_not_", {TANGENT: "(1 * x).logical_not_().sum()"}),
    Bug("logical_and_", {TANGENT: "(1 * x).logical_and_(x).sum()"}),
    Bug("logical_or_", {TANGENT: "(1 * x).logical_or_(x).sum()"}),
    Bug("logical_xor_", {TANGENT: "(1 * x).logical_xor_(x).sum()"}),
    Bug(
        "nn.functional.mse_loss",
        {TANGENT_OF_GRADIENT: "torch.nn.functional.mse_loss(x, torch.ones_like(x))"},
        "torch#123996",
    ),
    Bug(
        "nn.functional.soft_margin_loss",
        {TANGENT_OF_GRADIENT: "torch.nn.functional.soft_margin_loss(x, torch.ones_like(x))"},
    ),
    Bug(
        "nn.functional.huber_loss",
        {TANGENT_OF_GRADIENT: "torch.nn.functional.huber_loss(x, torch.ones_like(x))"},
    ),
    Bug("cholesky_inverse", {TANGENT: "torch.cholesky_inverse(x.tril()).sum()"}, "torch#196682"),
    Bug("linalg.eigh", {TANGENT_AGAIN: "(torch.linalg.eigh(x + x.mT)[1].abs() * x).sum()"}),
    Bug(
        "scatter_reduce",
        {TANGENT: "x.scatter_reduce(0, torch.tensor([[0, 0, 1]]), x[1:2] + 2, 'prod').sum()"},
        "torch#196702",
    ),
    Bug(
        "triangular_solve",
        {TANGENT: "torch.triangular_solve(x, x + 3, unitriangular=True)[0].sum()"},
        "torch#196707",
    ),
    Bug(
        "logdet",
        {TANGENT_AGAIN: "torch.logdet(x @ x.mT + torch.eye(3, dtype=x.dtype))"},
        "torch#192540",
    ),
    Bug("linalg.slogdet", {TANGENT_AGAIN: "torch.linalg.slogdet(x)[1]"}, "torch#192540"),
    Bug("linalg.solve", {TANGENT_AGAIN: "torch.linalg.solve(x + 3, x).sum()"}, "torch#192540"),
    Bug(
        "linalg.householder_product",
        {TANGENT_AGAIN: "torch.linalg.householder_product(x, x[0]).sum()"},
        "torch#198017",
    ),
    Bug(
        "cumprod",
        {
            TANGENT_AGAIN: "torch.cumprod(x * torch.tensor([[1.0], [0.0], [1.0]], dtype=x.dtype), "
            "0).sum()"
        },
        "torch#196701",
    ),
    Bug("softmax", {TANGENT_AGAIN: "(torch.softmax(x, 0) * x).sum()"}),
    Bug("log_softmax", {TANGENT_AGAIN: "(torch.log_softmax(x, 0) * x).sum()"}),
    Bug("logsumexp", {TANGENT_AGAIN: "torch.logsumexp(x, 0).sum()"}),
    Bug("nn.functional.glu", {TANGENT_AGAIN: "torch.nn.functional.glu(x[:, :2], 1).sum()"}),
)
