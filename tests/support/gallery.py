"""Defines the pictures of docs/gallery.md: graphs of PyTorch and JAX programs with short texts.

`python -m tests.support.gallery` writes the page and its pictures. Tests compare these files with
the program's output, and compare the evaluated graphs with PyTorch's own derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

import gradtools.torch as gt

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURES_AT = DOCS / "gallery.md", DOCS / "assets" / "gallery"


@dataclass(frozen=True)
class Picture:
    """A program whose graph is drawn.

    Attributes:
        name: The name of the picture's file.
        title: The heading.
        words: The text below the heading; {kept} and {operations} are filled in from the graph.
        f: The program.
        args: The arguments of the program.
        order: The order of differentiation.
        held: The captured parameters and buffers by their names in the graph.
        gt: The gradtools namespace of the framework in which the program runs.
    """

    name: str
    title: str
    words: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    order: int = 1
    held: Mapping[str, Tensor] = field(default_factory=dict)
    gt: Any = gt

    def graph(self) -> Any:
        """Return the gradient graph of the program."""
        argnums = tuple(range(len(self.args)))
        return self.gt.gradient_graph(self.f, *self.args, order=self.order, argnums=argnums)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the captured parameters."""
        return {name: x for name, x in self.held.items() if isinstance(x, nn.Parameter)}


# --- rules and their second derivatives --------------------------------------------------


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


class Exp(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y


class SinhLost(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.up, ctx.down = torch.exp(x), torch.exp(-x)
        return (ctx.up - ctx.down) / 2

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.up + ctx.down) / 2


class Sinh(Function):
    @staticmethod
    def forward(ctx, x):
        up, down = torch.exp(x), torch.exp(-x)
        ctx.save_for_backward(up, down)
        return (up - down) / 2, up, down

    @staticmethod
    def backward(ctx, g, g_up, g_down):
        up, down = ctx.saved_tensors
        return g * (up + down) / 2 + g_up * up - g_down * down


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return CubeBackward.apply(g, x)


class CubeBackward(Function):
    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g, x)
        return 3 * g * x**2

    @staticmethod
    def backward(ctx, v):
        g, x = ctx.saved_tensors
        return 3 * v * x**2, 6 * v * g * x


# --- networks ----------------------------------------------------------------------------


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _seeded(module: nn.Module) -> nn.Module:
    """Fill the parameters of a module with the same numbers in each run."""
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(0.3 * _drawn(*p.shape, seed=k) + (1.0 if p.ndim == 1 else 0.0))
    return module


class ResidualBlock(nn.Module):
    """A residual block: two convolutions with batch norm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2)
        self.conv2 = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


def _held(module: nn.Module, name: str = "") -> dict[str, Tensor]:
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name + path: x for path, x in found.items()}


TRANSFORMER = _seeded(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
RESNET = _seeded(ResidualBlock())
critic = _seeded(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))


def penalty(x):
    slope = gt.grad(lambda x: critic(x).sum())(x)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


encode = gt.chunked(lambda w, x: torch.tanh(x @ w), chunk_size=2, in_axes=(None, 0))


def contrastive(w, x):
    z = encode(w, x)
    return (z @ z.T).mean()


G = gt.frozen(lambda z: torch.tanh(torch.tanh(z)).sum())


def through_frozen(y, z):
    slope = gt.grad(lambda z: y**2 * G(z))(z)
    return (slope**2).sum()


def commitment(w, x):
    h = torch.tanh(x @ w)
    return (h - h.detach().round()).square().sum()


X = torch.tensor([0.5, 1.0, 2.0])
PICTURES = (
    Picture(
        "stopped",
        "A loss with a stopped gradient",
        "The program is the commitment loss of a quantized layer. `h.detach()` stops the gradient "
        "at the red edge to `round`; the other edge of `h` still propagates a gradient. Dashed "
        "edges are values that are saved for the backward pass, {kept} bytes in total.",
        commitment,
        (_drawn(4, 2), _drawn(3, 4, seed=1)),
    ),
    Picture(
        "square",
        "Square: an input is saved",
        "The backward pass reads the saved input `a` and can be differentiated with respect to "
        "`a`. The program saves {kept} bytes in addition to its arguments.",
        lambda x: Square.apply(x),
        (X,),
        2,
    ),
    Picture(
        "exp",
        "Exp: an output is saved",
        "The saved output `b` depends on x through the rule itself. The program saves {kept} new "
        "bytes.",
        lambda x: Exp.apply(x),
        (X,),
        2,
    ),
    Picture(
        "sinh_lost",
        "Sinh: the second gradient is lost",
        "The rule saves two exponentials on `ctx` that are not connected to x by a graph. PyTorch "
        "therefore returns None for the second gradient, and the picture contains no second "
        "gradient.",
        lambda x: SinhLost.apply(x),
        (X,),
        2,
    ),
    Picture(
        "sinh",
        "Sinh: the rule is corrected",
        "The exponentials are additional outputs of the rule, and the second gradient flows "
        "through the cotangents of these outputs.",
        lambda x: Sinh.apply(x)[0],
        (X,),
        2,
    ),
    Picture(
        "cube",
        "Cube: a rule for the rule's backward",
        "The backward pass is a separate rule, `CubeBackward`. The backward pass of a C or NumPy "
        "kernel requires a separate rule.",
        lambda x: Cube.apply(x),
        (X,),
        2,
    ),
    Picture(
        "transformer_block",
        "A transformer block",
        "The graph has {operations} operations, and each block represents a module. The residual "
        "connections bypass `self_attn` and the linear layers. The program saves {kept} bytes in "
        "addition to its arguments.",
        TRANSFORMER,
        (_drawn(2, 3, 8, seed=1),),
        held=_held(TRANSFORMER),
    ),
    Picture(
        "resnet_block",
        "A residual block",
        "`relu` saves its output, a convolution saves its input, and batch normalization saves its "
        "input and two numbers per channel. In total, the program saves {kept} bytes.",
        RESNET,
        (_drawn(2, 2, 4, 4, seed=1),),
        held=_held(RESNET),
    ),
    Picture(
        "wgan_gp",
        "The gradient penalty of WGAN-GP",
        "The loss contains a gradient, so its forward pass contains an inner backward pass. The "
        "outer backward pass adds the gradients from both uses of the weights. The program saves "
        "{kept} bytes in addition to its arguments.",
        penalty,
        (_drawn(3, 2, seed=1),),
        held=_held(critic, "critic."),
    ),
    Picture(
        "chunked_loss",
        "A chunked loss",
        "The encoder saves no activations: no dashed edge starts at its `tanh`, and the backward "
        "pass runs `matmul` and `tanh` of each chunk again. The {kept} saved bytes are the "
        "embeddings.",
        contrastive,
        (_drawn(3, 2), _drawn(4, 3, seed=1)),
    ),
    Picture(
        "frozen_network",
        "A second derivative through a frozen network",
        "The loss is a function of the derivative of y² G(z). Double backward would keep two "
        "graphs of G. With `frozen`, {kept} bytes are saved, and the backward pass runs G in "
        "forward-over-reverse mode.",
        through_frozen,
        (torch.tensor(2.0), torch.tensor([1.0, 3.0])),
    ),
)

HEAD = """# Gallery of graphs

[`gradient_graph`](graphs.md) draws the pictures on this page. On the site, click a picture to open
its interactive page. The forward pass is blue, the backward pass is orange, and the backward pass
of the backward pass is violet. Dashed edges are values that are saved for a later pass, and red
edges are lost derivatives. The last two programs use JAX.
"""


def pictures() -> tuple[Any, ...]:
    """Return all pictures in the order of the page."""
    from tests.support import gallery_jax

    return (*PICTURES, *gallery_jax.PICTURES)


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for picture in pictures():
        graph = picture.graph()
        words = picture.words.format(
            kept=f"{sum(graph.kept.values()):,}", operations=len(graph.nodes)
        )
        image = f"![{picture.title}](assets/gallery/{picture.name}.svg)"
        parts.append(f"## {picture.title}\n\n{_wrapped(words)}\n\n{image}\n")
    return "\n".join(parts)


def _wrapped(words: str) -> str:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + 1 + len(word) > 100:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    PICTURES_AT.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    for each in pictures():
        (PICTURES_AT / f"{each.name}.svg").write_text(each.graph().to_svg())
