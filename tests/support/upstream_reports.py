"""Writes bug reports about wrong derivatives in PyTorch and JAX to docs/upstream.

    python -m tests.support.upstream_reports    # writes docs/upstream/*.md

A report consists of a title, a minimal program, its output and the versions. The program imports
only the framework and prints a directional derivative and its central difference.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"

_TORCH = """import torch
import torch.autograd.forward_ad as fwAD

torch.set_default_dtype(torch.float64)
x = {x}
v = {v}


def f(x):
    {f}

"""
_DIFFERENCES = """
h = 1e-5
expected = ({at_plus} - {at_minus}) / (2 * h)
print("{framework}:", float(found))
print("central differences:", round(float(expected), 6))
"""
_BY_VALUES = {"at_plus": "f(x + h * v)", "at_minus": "f(x - h * v)"}
_BY_GRADIENTS = {"at_plus": "slope(x + h * v)", "at_minus": "slope(x - h * v)"}
_SLOPE = """
def slope(x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x)
    return (g * v).sum()

"""
_WAYS = {
    "gradient": (
        """
x.requires_grad_()
(g,) = torch.autograd.grad(f(x), x)
found = (g * v).sum()
x = x.detach()
""",
        _BY_VALUES,
    ),
    "forward mode": (
        """
with fwAD.dual_level():
    found = fwAD.unpack_dual(f(fwAD.make_dual(x, v))).tangent
""",
        _BY_VALUES,
    ),
    "double backward": (
        _SLOPE
        + """
x.requires_grad_()
(g,) = torch.autograd.grad(f(x), x, create_graph=True)
(gg,) = torch.autograd.grad((g * v).sum(), x)
found = (gg * v).sum()
x = x.detach()
""",
        _BY_GRADIENTS,
    ),
    "reverse mode over forward mode": (
        _SLOPE
        + """
x.requires_grad_()
with fwAD.dual_level():
    tangent = fwAD.unpack_dual(f(fwAD.make_dual(x, v))).tangent
    (g,) = torch.autograd.grad(tangent, x)
found = (g * v).sum()
x = x.detach()
""",
        _BY_GRADIENTS,
    ),
}


@dataclass(frozen=True)
class Report:
    """A report of a wrong derivative for which no upstream issue exists.

    Attributes:
        name: The file's name.
        title: The issue's title.
        way: The kind of derivative, which is a key of `_WAYS` or an empty string.
        f: The body of the loss function of x, or the whole program if `way` is empty.
        x: The point.
        v: The direction.
        note: Additional remarks.
    """

    name: str
    title: str
    way: str
    f: str
    x: str = "torch.tensor([0.3, 0.7, 1.1])"
    v: str = "torch.tensor([1.0, -0.5, 0.2])"
    note: str = ""
    framework: str = "torch"

    def program(self) -> str:
        """Return the program, which imports only the framework."""
        if not self.way:
            return self.f
        way, by = _WAYS[self.way]
        text = _TORCH.format(x=self.x, v=self.v, f=self.f) + way
        text += _DIFFERENCES.format(framework="PyTorch", **by)
        return text if "fwAD" in way else text.replace(_TORCH.splitlines()[1] + "\n", "")


_JAX_SIGN = """import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)
x, v = jnp.array([0.3, 0.7]), jnp.array([1.0, -0.5])


def f(x):
    z = jnp.sign(x + 2j * x**2)  # z / |z|
    return jnp.sum(z.real)


h = 1e-5
expected = (f(x + h * v) - f(x - h * v)) / (2 * h)
print("JAX:", float(jnp.vdot(jax.grad(f)(x), v)))
print("central differences:", round(float(expected), 6))
"""

REPORTS = (
    Report(
        "silu-complex-forward",
        "Forward mode of complex nn.functional.silu is wrong",
        "forward mode",
        "return torch.nn.functional.silu(torch.complex(x, 1 - x)).abs().sum()",
    ),
    Report(
        "silu-complex-inplace",
        "Gradient of complex nn.functional.silu(inplace=True) is wrong",
        "gradient",
        """z = torch.complex(x, 1 - x)
    return torch.nn.functional.silu(z, inplace=True).abs().sum()""",
    ),
    Report(
        "sparse-coo-tensor-double-backward",
        "Double backward through the values of torch.sparse_coo_tensor is wrong",
        "double backward",
        """indices = torch.tensor([[0, 1, 2]])
    return (torch.sparse_coo_tensor(indices, x**2, (3,)).to_dense() ** 2).sum()""",
    ),
    Report(
        "weight-norm-double-backward",
        "Double backward of torch._weight_norm is wrong if g depends on v",
        "double backward",
        "return torch._weight_norm(x, x[:, :1] ** 2, 0).pow(3).sum()",
        x="torch.tensor([[0.3, 0.7], [1.1, 0.4]])",
        v="torch.tensor([[1.0, -0.5], [0.2, 0.3]])",
        note="`torch.nn.utils.parametrizations.weight_norm` calls this kernel.",
    ),
    Report(
        "as-strided-scatter-gradient",
        "Gradient of torch.as_strided_scatter is wrong",
        "gradient",
        "return (torch.as_strided_scatter(1 * x, x[0], (3,), (2,)) ** 2).sum()",
        x="torch.arange(1.0, 10.0).reshape(3, 3)",
        v="torch.eye(3) - 0.3",
    ),
    *(
        Report(
            f"logical-{name}-inplace-forward",
            f"Forward mode of Tensor.logical_{name}_ keeps the tangent of the overwritten tensor",
            "forward mode",
            f"return (1 * x).logical_{name}_({'' if name == 'not' else 'x'}).sum()",
        )
        for name in ("not", "and", "or", "xor")
    ),
    Report(
        "eigh-reverse-over-forward",
        "Reverse mode over forward mode of torch.linalg.eigh's eigenvectors is NaN",
        "reverse mode over forward mode",
        "return (torch.linalg.eigh(x + x.mT)[1].abs() * x).sum()",
        x="torch.tensor([[0.3, 0.7, 0.1], [0.2, 1.1, 0.4], [0.9, 0.5, 0.6]])",
        v="torch.tensor([[1.0, -0.5, 0.2], [0.1, 0.3, -0.2], [0.4, 0.0, 0.6]])",
    ),
    Report(
        "jax-sign-complex",
        "Derivative of jnp.sign is zero for complex arguments",
        "",
        _JAX_SIGN,
        note="The derivative is wrong in JAX versions up to 0.10.",
        framework="jax",
    ),
)


def page(report: Report) -> str:
    """Return the report as the text of an issue."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", report.program()],
        capture_output=True,
        text=True,
        check=True,
    )
    version = importlib.import_module(report.framework).__version__.partition("+")[0]
    framework = {"torch": "PyTorch", "jax": "JAX"}[report.framework]
    python = ".".join(platform.python_version_tuple()[:2])
    return (
        f"# {report.title}\n\n"
        f"```python\n{report.program()}```\n\nThe program prints:\n\n"
        f"```text\n{ran.stdout}```\n\n"
        + (f"{textwrap.fill(report.note, 100)}\n\n" if report.note else "")
        + f"The program was run with {framework} {version} on the CPU and Python {python}.\n"
    )


def index() -> str:
    """Return the index page of all reports."""
    lines = [f"- [{report.title}]({report.name}.md)\n" for report in REPORTS]
    return (
        "# Reports for PyTorch and JAX\n\n"
        "[`checked`](../answers-for.md#check-the-rest) or gradtools' tests found the following\n"
        "wrong derivatives, for which no upstream issue was found. Each page can be filed as an\n"
        "issue. `python -m tests.support.upstream_reports` generates the pages.\n\n"
        + "".join(lines)
    )


def pages() -> dict[str, str]:
    """Return the text of each file in docs/upstream."""
    return {"index.md": index(), **{f"{each.name}.md": page(each) for each in REPORTS}}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {len(REPORTS)} reports\n")
