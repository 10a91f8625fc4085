"""Provides transforms and bit patterns of both frameworks under common names.

This module does not use gradtools, so tests can compare gradtools with its results.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np


class TorchNative:
    name = "torch"
    compile_options = {"backend": "aot_eager", "fullgraph": True}  # noqa: RUF012 - never changed

    @cached_property
    def torch(self) -> Any:
        return import_module("torch")

    def array(self, x: Any, dtype: str | None = None) -> Any:
        x = self.torch.from_numpy(np.array(x))
        return x if dtype is None else x.to(getattr(self.torch, dtype))

    def bits(self, x: Any) -> bytes:
        return x.detach().clone().reshape(-1).view(self.torch.uint8).numpy().tobytes()

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def grad(self, f: Any) -> Any:
        return self.torch.func.grad(f)

    def vjp(self, f: Any, *xs: Any) -> Any:
        return self.torch.func.vjp(f, *xs)

    def jvp(self, f: Any, xs: Any, dxs: Any) -> Any:
        return self.torch.func.jvp(f, xs, dxs)

    def vmap(self, f: Any, in_axes: Any = 0) -> Any:
        return self.torch.vmap(f, in_dims=in_axes)

    def jit(self, f: Any) -> Any:
        self.torch._dynamo.reset()
        return self.torch.compile(f, **self.compile_options)

    def loop(self, body: Any, x: Any, times: int) -> Any:
        for _ in range(times):
            x = body(x)
        return x

    while_loop = loop

    def cond(self, which: bool, yes: Any, no: Any, x: Any) -> Any:
        return yes(x) if which else no(x)

    def checkpoint(self, f: Any) -> Any:
        checkpoint = import_module("torch.utils.checkpoint").checkpoint
        return lambda *xs: checkpoint(f, *xs, use_reentrant=False)


class JaxNative:
    name = "jax"
    compile_options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @cached_property
    def jax(self) -> Any:
        return import_module("jax")

    def array(self, x: Any, dtype: str | None = None) -> Any:
        return self.jax.numpy.asarray(np.array(x), dtype)

    def bits(self, x: Any) -> bytes:
        return np.asarray(x).tobytes()

    def dtype(self, x: Any) -> str:
        return str(x.dtype)

    def grad(self, f: Any) -> Any:
        return self.jax.grad(f)

    def vjp(self, f: Any, *xs: Any) -> Any:
        return self.jax.vjp(f, *xs)

    def jvp(self, f: Any, xs: Any, dxs: Any) -> Any:
        return self.jax.jvp(f, xs, dxs)

    def vmap(self, f: Any, in_axes: Any = 0) -> Any:
        return self.jax.vmap(f, in_axes)

    def jit(self, f: Any) -> Any:
        return self.jax.jit(f)

    def loop(self, body: Any, x: Any, times: int) -> Any:
        return self.jax.lax.scan(lambda c, _: (body(c), None), x, None, length=times)[0]

    def while_loop(self, body: Any, x: Any, times: int) -> Any:
        going, step = lambda c: c[0] < times, lambda c: (c[0] + 1, body(c[1]))
        return self.jax.lax.while_loop(going, step, (0, x))[1]

    def cond(self, which: Any, yes: Any, no: Any, x: Any) -> Any:
        return self.jax.lax.cond(which, yes, no, x)

    def checkpoint(self, f: Any) -> Any:
        return self.jax.checkpoint(f)


NATIVE = {"torch": TorchNative(), "jax": JaxNative()}


def second_order(gt: Any, mix: str, f: Any, x: Any, v: Any, w: Any) -> Any:
    """Return w^T H v for a scalar f, in a mix of forward and reverse mode such as "fr".

    The first letter of the mix is the mode of the outer derivative: f is forward, r is reverse.
    The arguments may have any shape.
    """

    def along_v(x: Any) -> Any:
        if mix[1] == "f":
            return gt.jvp(f, (x,), (v,))[1]
        return (gt.grad(f)(x) * v).sum()

    if mix[0] == "f":
        return gt.jvp(along_v, (x,), (w,))[1]
    return (gt.grad(along_v)(x) * w).sum()


MIXES = ("rr", "fr", "rf", "ff")
