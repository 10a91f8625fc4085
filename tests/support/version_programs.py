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

close = np.testing.assert_allclose
X = np.linspace(0.1, 1, 4)


def second(gt: Any) -> None:
    """The second derivative of exp(x)^2 is 4 exp(2 x)."""
    ways = [lambda f: f, lambda f: gt.chunked(f, chunk_size=1), gt.checkpoint, gt.frozen]
    x = gt.asarray(np.array([1.5]))
    for f in _exponentials(gt):
        for way in ways:
            run = way(f)
            slope = gt.grad(lambda x, run=run: gt.xp.sum(run(x) ** 2))
            close(gt.grad(lambda x, slope=slope: gt.xp.sum(slope(x)))(x), 4 * np.exp(2 * 1.5))


def _exponentials(gt: Any) -> Any:
    if gt.__name__.endswith("jax"):
        import jax

        for make in (jax.custom_vjp, gt.custom_rule):
            exp = make(jax.numpy.exp)
            exp.defvjp(lambda x, exp=exp: (exp(x),) * 2, lambda y, g: (g * y,))
            yield exp
        return
    import torch

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * ctx.saved_tensors[0]

    yield from (Exp.apply, lambda x: Exp.apply(x))  # a bound one, and one by its class


def random(gt: Any) -> None:
    x = gt.asarray(np.linspace(1, 2, 64))
    if gt.__name__.endswith("jax"):
        import jax

        key = jax.random.key(1)
        f = lambda x: jax.numpy.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0) ** 3
        close(gt.grad(lambda x: gt.checkpoint(f)(x).sum())(x), jax.grad(lambda x: f(x).sum())(x))
        return
    import torch

    found = []
    f = lambda x: torch.nn.functional.dropout(x, 0.5) ** 3
    for way in (lambda f: f, gt.checkpoint):
        torch.manual_seed(1)
        grad = torch.func.grad if way is not gt.checkpoint else gt.grad
        run = way(f)
        found.append((grad(lambda x, run=run: run(x).sum())(x), torch.rand(1)))
    close(found[1][0], found[0][0])
    close(found[1][1], found[0][1])


def batches(gt: Any) -> None:
    if gt.__name__.endswith("jax"):
        import jax.numpy as jnp
        from flax import nnx

        net = lambda: nnx.BatchNorm(4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        one, other = net(), net()
        x = jnp.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
        expected = jnp.concatenate([one(c) for c in jnp.split(x, 3)])
        close(np.float32(gt.chunked(other, chunk_size=2)(x)), np.float32(expected))
        close(other.mean[...], one.mean[...], rtol=1e-6)
        return
    import torch

    torch.manual_seed(2)
    one = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    other.load_state_dict(one.state_dict())
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        outs = torch.cat([one(c) for c in x.split(2)]), gt.chunked(other, chunk_size=2)(x)
    for y in outs:
        (y.float() ** 3).sum().backward()
    close(outs[1].detach().float(), outs[0].detach().float())
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        close(q.grad, p.grad, rtol=2e-2, atol=2e-2)
    for p, q in zip(one.buffers(), other.buffers(), strict=True):
        close(q, p)


def frozen(gt: Any) -> None:
    w, y, z = (gt.asarray(np.linspace(-1, 1, n)) for n in (6, 2, 3))
    net = lambda z: gt.xp.tanh(gt.xp.reshape(w, (2, 3)) @ z)

    def outer(run: Any) -> Any:
        inner = lambda y: gt.grad(lambda z: gt.xp.sum(y * run(z)) ** 3)(z)
        return gt.grad(lambda y: gt.xp.sum(inner(y) ** 2))(y)

    close(outer(gt.frozen(net)), outer(net), rtol=1e-12)


def attention(gt: Any) -> None:
    if gt.__name__.endswith("jax"):
        import jax
        import jax.numpy as jnp

        k, v, q, t = jax.random.normal(jax.random.key(4), (4, 2, 5, 3, 4), "float32")
        attend = lambda q: jax.nn.dot_product_attention(q, k, v)
        weights = lambda q: jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1)
        plain = lambda q: jnp.einsum("bhqk,bkhd->bqhd", weights(q), v)
        native, rtol, atol = jax, 1e-3, 1e-4
    else:
        import torch

        torch.manual_seed(4)
        k, v, q, t = torch.randn(4, 2, 3, 5, 4, dtype=torch.float64).unbind()
        attend = lambda q: torch.nn.functional.scaled_dot_product_attention(q, k, v)
        plain = lambda q: torch.softmax(q @ k.mT / 2, -1) @ v
        native, rtol, atol = torch.func, 1e-7, 1e-12
    pushed = native.jvp(plain, (q,), (t,))[1]
    close(gt.jvp(attend, (q,), (t,))[1], pushed, rtol=rtol, atol=atol)
    total = lambda f: lambda q: (f(q) ** 3).sum()
    expected = native.jvp(native.grad(total(plain)), (q,), (t,))[1]
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        product = gt.hvp(total(attend), (q,), (t,), mode=mode)[1][0]
        close(product, expected, rtol=rtol, atol=atol)


def compiled(gt: Any) -> None:
    x, total = gt.asarray(X), lambda x: gt.xp.sum(gt.xp.sin(x))
    if gt.__name__.endswith("jax"):
        close(gt.compile(gt.grad(total))(x), np.cos(X))
        close(gt.hvp(gt.compile(total), (x,), (x,))[1][0], -X * np.sin(X))
        return
    import torch

    close(torch.compile(gt.grad(total), backend="aot_eager")(x), np.cos(X))
    f = torch.compile(total, backend="aot_eager")
    with suppress(gradtools.GradtoolsError):  # PyTorch has no double backward of compiled code
        close(gt.hvp(f, (x,), (torch.ones_like(x),))[1][0], -np.sin(X))


def seen(gt: Any) -> None:
    x = gt.asarray(X)
    assert "Nothing is lost" in str(gt.why_zero(lambda x: gt.xp.sum(gt.xp.exp(x)), x))
    lost = str(gt.why_zero(lambda x: gt.xp.sum(gt.stop_gradient(x)), x))
    assert "stop_gradient" in lost or "detach" in lost
    assert "exp" in str(gt.formula(gt.xp.exp, x))
    rule = gt.custom_rule(lambda x: gt.xp.round(x))
    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (g,))
    assert "Nothing is lost" in str(gt.why_zero(lambda x: gt.xp.sum(rule(x)), x))
    assert "custom rule" in str(gt.gradient_graph(rule, x))


def cross_checked() -> None:
    import jax.numpy as jnp
    import torch

    from gradtools.testing import AgreementError, cross_check

    args = (np.linspace(-1, 1, 6).reshape(2, 3), np.linspace(1, 2, 3))
    right = lambda w, x: jnp.tanh(w @ x)
    cross_check(torch=lambda w, x: torch.tanh(w @ x), jax=right, args=args, order=2)
    try:
        cross_check(torch=lambda w, x: torch.sin(w @ x), jax=right, args=args)
    except AgreementError:
        return
    raise AssertionError("a wrong port passed")


def bridged() -> None:
    import jax
    import jax.numpy as jnp
    import torch

    from gradtools import bridge

    there = bridge.to_torch(lambda x: jnp.sin(x) ** 2)
    t = torch.tensor(X, requires_grad=True)
    close(torch.autograd.grad(there(t).sum(), t)[0], np.sin(2 * X))
    close(torch.func.jvp(there, (t.detach(),), (t.detach(),))[1], X * np.sin(2 * X))
    here, x = bridge.to_jax(lambda x: torch.sin(x) ** 2), jnp.array(X)
    close(jax.jit(jax.grad(lambda x: here(x).sum()))(x), np.sin(2 * X))
    close(jax.jvp(here, (x,), (x,))[1], X * np.sin(2 * X))


PROGRAMS: dict[str, Callable[..., None]] = {
    "second derivative of a user's Function, plain, chunked, checkpointed, frozen": second,
    "`checkpoint` of dropout, the same mask twice": random,
    "`chunked` of batch normalization in bfloat16, and its running statistics": batches,
    "`frozen`: a second derivative through a network": frozen,
    "`jvp` and `hvp` of attention": attention,
    "`compile` of a gradient": compiled,
    "`why_zero` and `formula`": seen,
    "`cross_check` of a network": cross_checked,
    "the bridge, both ways: values, `grad`, `jvp`": bridged,
}
OF_BOTH = (cross_checked, bridged)


def said(run: Callable[[], None]) -> str:
    """An empty text, or the error."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return ""


def main() -> None:
    """Runs what the installed frameworks allow."""
    warnings.simplefilter("ignore")
    there = gradtools.available_backends()
    if "jax" in there:
        import jax

        jax.config.update("jax_enable_x64", True)
    result: dict[str, dict[str, str]] = {}
    for title, run in PROGRAMS.items():
        if run not in OF_BOTH:
            spaces = {name: import_module(f"gradtools.{name}") for name in there}
            result[title] = {name: said(lambda gt=gt: run(gt)) for name, gt in spaces.items()}
        elif len(there) == 2:
            result[title] = {"both": said(run)}
    versions = {name: import_module(name).__version__ for name in ("numpy", *there)}
    versions["python"] = platform.python_version()
    json.dump({"versions": versions, "programs": result}, sys.stdout)


if __name__ == "__main__":
    main()
