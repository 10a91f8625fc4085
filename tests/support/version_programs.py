"""One small program for each promise about versions: ``python -m tests.support.version_programs``.

Each compares with a closed form, or with plain code of the framework, and raises where they differ.
It prints JSON: the versions, and for each program and framework an empty text, or the error.
`tests.support.versions` runs this in every environment and writes the table of docs/support.md.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

import gradtools

PROGRAMS: dict[str, dict[str, Callable[[], None]]] = {"torch": {}, "jax": {}, "both": {}}
close = np.testing.assert_allclose


def program(needs: str, title: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a program. needs: ``"torch"``, ``"jax"`` or ``"both"``."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[needs][title] = run
        return run

    return register


SECOND = "second derivative of a user's Function, plain, chunked, checkpointed, frozen"
RANDOM = "`checkpoint` of dropout, the same mask twice"
BATCHES = "`chunked` of batch normalization in bfloat16, and its running statistics"
FROZEN = "`frozen`: a second derivative through a network"
ATTENTION = "`jvp` and `hvp` of attention"
COMPILED = "`compile` of a gradient"
SEEN = "`why_zero` and `formula`"


@program("torch", SECOND)
def _() -> None:
    import torch

    import gradtools.torch as gt

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * ctx.saved_tensors[0]

    class Lossy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.x = x.detach()
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 3 * ctx.x**2

    def second(f: Any, x: Any) -> Any:
        return gt.hvp(lambda x: (f(x) ** 2).sum(), (x,), (torch.ones_like(x),))[1][0]

    x = torch.tensor([1.5], dtype=torch.float64)
    ways = [lambda f: f, lambda f: gt.chunked(f, chunk_size=1), gt.checkpoint, gt.frozen]
    for exp in (Exp.apply, lambda x: Exp.apply(x)):  # a bound one, and one by its class
        for way in ways:
            close(second(way(exp), x), 4 * torch.exp(2 * x))
    for way in ways:
        with suppress(gradtools.GradtoolsError):  # refused, or right
            close(second(way(Lossy.apply), x), 30 * x**4)


@program("torch", RANDOM)
def _() -> None:
    import torch

    import gradtools.torch as gt

    f = lambda x: torch.nn.functional.dropout(x, 0.5) ** 3
    x = torch.linspace(1, 2, 64, dtype=torch.float64)
    torch.manual_seed(1)
    plain, after = torch.func.grad(lambda x: f(x).sum())(x), torch.rand(1)
    torch.manual_seed(1)
    close(gt.grad(lambda x: gt.checkpoint(f)(x).sum())(x), plain)
    close(torch.rand(1), after)


@program("torch", BATCHES)
def _() -> None:
    import torch

    import gradtools.torch as gt

    def net() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))

    one, other = net(), net()
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.cat([one(c) for c in x.split(2)])
        result = gt.chunked(other, chunk_size=2)(x)
        for y in (expected, result):
            (y.float() ** 3).sum().backward()
    close(result.detach().float(), expected.detach().float())
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        close(q.grad, p.grad, rtol=2e-2, atol=2e-2)
    for p, q in zip(one.buffers(), other.buffers(), strict=True):
        close(q, p)


@program("torch", FROZEN)
def _() -> None:
    import torch

    import gradtools.torch as gt

    torch.manual_seed(3)
    layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)]
    net = torch.nn.Sequential(*layers).double().requires_grad_(False)
    z = torch.linspace(-1, 1, 3, dtype=torch.float64)

    def outer(run: Any, y: Any) -> Any:
        slope = gt.grad(lambda z: (y * run(z)).sum() ** 3)(z)
        return (slope**2).sum()

    y = torch.tensor([0.3, -0.7], dtype=torch.float64)
    close(
        gt.grad(lambda y: outer(gt.frozen(net), y))(y),
        torch.func.grad(
            lambda y: (torch.func.grad(lambda z: (y * net(z)).sum() ** 3)(z) ** 2).sum()
        )(y),
    )


@program("torch", ATTENTION)
def _() -> None:
    import torch

    import gradtools.torch as gt

    torch.manual_seed(4)
    k, v, q, t = torch.randn(4, 2, 3, 5, 4, dtype=torch.float64).unbind()
    attend = lambda q: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    plain = lambda q: torch.softmax(q @ k.mT / 2, -1) @ v
    close(gt.jvp(attend, (q,), (t,))[1], torch.func.jvp(plain, (q,), (t,))[1])
    total = lambda f: lambda q: (f(q) ** 3).sum()
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        result = gt.hvp(total(attend), (q,), (t,), mode=mode)[1][0]
        close(result, torch.func.jvp(torch.func.grad(total(plain)), (q,), (t,))[1])


@program("torch", COMPILED)
def _() -> None:
    import torch

    import gradtools.torch as gt

    x = torch.linspace(0, 1, 4, dtype=torch.float64)
    close(torch.compile(gt.grad(lambda x: x.sin().sum()), backend="aot_eager")(x), x.cos())
    f = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    with suppress(gradtools.GradtoolsError):  # PyTorch has no double backward of compiled code
        close(gt.hvp(f, (x,), (torch.ones_like(x),))[1][0], -x.sin())


@program("torch", SEEN)
def _() -> None:
    import torch

    import gradtools.torch as gt

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return (x > 0.5).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g

    x = torch.linspace(0, 1, 4, dtype=torch.float64)
    assert "Nothing is lost" in str(gt.why_zero(lambda x: Through.apply(x).sum(), x))
    assert "detach" in str(gt.why_zero(lambda x: Through.apply(x).detach().sum(), x))
    assert "vjp[Through]" in str(gt.formula(lambda x: Through.apply(x), x))
    assert "exp" in str(gt.formula(torch.exp, x))
    bound = Through.apply
    assert "Nothing is lost" in str(gt.why_zero(lambda x: bound(x).sum(), x))
    assert "custom rule Through" in str(gt.gradient_graph(bound, x))


@program("jax", SECOND)
def _() -> None:
    import jax
    import jax.numpy as jnp

    import gradtools.jax as gt

    exp = jax.custom_vjp(jnp.exp)
    exp.defvjp(lambda x: (exp(x),) * 2, lambda y, g: (g * y,))
    own = gt.custom_rule(jnp.exp)
    own.defvjp(lambda x: (own(x),) * 2, lambda y, g: (g * y,))

    def second(f: Any, x: Any) -> Any:
        slope = gt.grad(lambda x: (f(x) ** 2).sum())
        return gt.grad(lambda x: slope(x).sum())(x)

    x = jnp.array([1.5])
    ways = [lambda f: f, lambda f: gt.chunked(f, chunk_size=1), gt.checkpoint, gt.frozen]
    for f in (exp, own):
        for way in ways:
            close(second(way(f), x), 4 * jnp.exp(2 * x))


@program("jax", RANDOM)
def _() -> None:
    import jax
    import jax.numpy as jnp

    import gradtools.jax as gt

    key = jax.random.key(1)
    f = lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0) ** 3
    x = jnp.linspace(1, 2, 64)
    total = lambda f: lambda x: f(x, key).sum()
    close(gt.grad(total(gt.checkpoint(f)))(x), jax.grad(total(f))(x))


@program("jax", BATCHES)
def _() -> None:
    import jax.numpy as jnp
    from flax import nnx

    import gradtools.jax as gt

    net = lambda: nnx.BatchNorm(4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    one, other = net(), net()
    x = jnp.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
    expected = jnp.concatenate([one(c) for c in jnp.split(x, 3)])
    close(np.float32(gt.chunked(other, chunk_size=2)(x)), np.float32(expected))
    close(other.mean[...], one.mean[...], rtol=1e-6)


@program("jax", FROZEN)
def _() -> None:
    import jax
    import jax.numpy as jnp

    import gradtools.jax as gt

    w, y, z = np.linspace(-1, 1, 6).reshape(2, 3), jnp.array([0.3, -0.7]), jnp.linspace(-1, 1, 3)
    net = lambda z: jnp.tanh(w @ z)

    def outer(run: Any, grad: Any) -> Any:
        inner = lambda y: grad(lambda z: (y * run(z)).sum() ** 3)(z)
        return grad(lambda y: (inner(y) ** 2).sum())(y)

    close(outer(gt.frozen(net), gt.grad), outer(net, jax.grad), rtol=1e-12)
    run = gt.frozen(lambda z: jnp.tanh(w @ z))
    pull = jax.vjp(lambda z: jax.vjp(run, z)[1](y)[0], z)[1]
    before = np.array(pull(z)[0])
    w[:] = 100.0  # what was recorded keeps the numbers of its time
    close(pull(z)[0], before)


@program("jax", ATTENTION)
def _() -> None:
    import jax
    import jax.numpy as jnp

    import gradtools.jax as gt

    k, v, q, t = jax.random.normal(jax.random.key(4), (4, 2, 5, 3, 4), "float32")
    attend = lambda q: jax.nn.dot_product_attention(q, k, v)
    weights = lambda q: jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1)
    plain = lambda q: jnp.einsum("bhqk,bkhd->bqhd", weights(q), v)
    close(gt.jvp(attend, (q,), (t,))[1], jax.jvp(plain, (q,), (t,))[1], rtol=1e-4, atol=1e-5)
    total = lambda f: lambda q: (f(q) ** 3).sum()
    result = gt.hvp(total(attend), (q,), (t,))[1][0]
    expected = jax.jvp(jax.grad(total(plain)), (q,), (t,))[1]
    close(result, expected, rtol=1e-3, atol=1e-4)


@program("jax", COMPILED)
def _() -> None:
    import jax.numpy as jnp

    import gradtools.jax as gt

    x = jnp.linspace(0, 1, 4)
    close(gt.compile(gt.grad(lambda x: jnp.sin(x).sum()))(x), jnp.cos(x))
    close(gt.hvp(gt.compile(lambda x: jnp.sin(x).sum()), (x,), (x,))[1][0], -x * jnp.sin(x))


@program("jax", SEEN)
def _() -> None:
    import jax
    import jax.numpy as jnp

    import gradtools.jax as gt

    x = jnp.linspace(0, 1, 4)
    assert "Nothing is lost" in str(gt.why_zero(lambda x: jnp.exp(x).sum(), x))
    lost = gt.why_zero(lambda x: jax.lax.stop_gradient(x).sum(), x)
    assert "stop_gradient" in str(lost)
    assert "exp" in str(gt.formula(jnp.exp, x))


@program("both", "`cross_check` of a network")
def _() -> None:
    import jax.numpy as jnp
    import torch

    from gradtools.testing import AgreementError, cross_check

    args = (np.linspace(-1, 1, 6).reshape(2, 3), np.linspace(1, 2, 3))
    right = lambda w, x: jnp.tanh(w @ x)
    cross_check(torch=lambda w, x: torch.tanh(w @ x), jax=right, args=args, order=2)
    found = False
    try:
        cross_check(torch=lambda w, x: torch.sin(w @ x), jax=right, args=args)
    except AgreementError:
        found = True
    assert found


@program("both", "the bridge, both ways: values, `grad`, `jvp`")
def _() -> None:
    import jax
    import jax.numpy as jnp
    import torch

    from gradtools import bridge

    x = np.linspace(0.1, 1, 4)
    there = bridge.to_torch(lambda x: jnp.sin(x) ** 2)
    t = torch.tensor(x, requires_grad=True)
    close(torch.autograd.grad(there(t).sum(), t)[0], np.sin(2 * x))
    close(torch.func.jvp(there, (t.detach(),), (t.detach(),))[1], x * np.sin(2 * x))
    here = bridge.to_jax(lambda x: torch.sin(x) ** 2)
    close(jax.grad(lambda x: here(x).sum())(jnp.array(x)), np.sin(2 * x))
    close(jax.jit(jax.grad(lambda x: here(x).sum()))(jnp.array(x)), np.sin(2 * x))
    close(jax.jvp(here, (jnp.array(x),), (jnp.array(x),))[1], x * np.sin(2 * x))


def main() -> None:
    """Runs what the installed frameworks allow."""
    warnings.simplefilter("ignore")
    there = gradtools.available_backends()
    if "jax" in there:
        import jax

        jax.config.update("jax_enable_x64", True)
    versions = {name: import_module(name).__version__ for name in ("numpy", *there)}
    result: dict[str, dict[str, str]] = {}
    for needs, programs in PROGRAMS.items():
        if needs in there or (needs == "both" and len(there) == 2):
            for title, run in programs.items():
                try:
                    run()
                    said = ""
                except Exception as error:
                    said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                result.setdefault(title, {})[needs] = said
    versions["python"] = platform.python_version()
    json.dump({"versions": versions, "programs": result}, sys.stdout)


if __name__ == "__main__":
    main()
