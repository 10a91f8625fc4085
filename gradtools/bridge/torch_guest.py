"""PyTorch as a guest: a PyTorch function in a JAX program.

PyTorch functions may write in place, draw from global generators, and close over parameters, none
of which JAX can represent. So the first call for each signature is run twice, on copies, to detect
this. Arguments that it writes or keeps are copied in later calls. Random draws, writes to captured
buffers, and captured parameters that require grad raise an error. Later calls share memory, and
version counters verify that they write nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding

import gradtools.torch
from gradtools.backend import backend_of
from gradtools.bridge import _upstream as private
from gradtools.bridge.functions import Foreign, ForeignSignature
from gradtools.bridge.memory import (
    array_of,
    comes_back,
    is_kept,
    numpy_of_tensor,
    of_one_cpu,
    tensor_of,
    tensor_of_numpy,
    unshared,
)
from gradtools.errors import GradtoolsError
from gradtools.function_variables import globals_of
from gradtools.host_kernels import ArraySpec
from gradtools.jax.reachability import within_a_trace
from gradtools.rules import captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.modes import without_casts
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
_ARRAY = type(jax.device_put(np.zeros(())))
_REQUIRES = (
    "to_jax: {name} closes over {what}, which requires grad, and JAX would lose that derivative. "
    "Bridge the module itself, apply, params, state = to_jax(module), or pass the tensor as an "
    "argument; if it is not to be trained, say so by requires_grad_(False)."
)


class TorchGuest:
    """PyTorch's implementation of a guest."""

    name, title, operator, host_title = "torch", "PyTorch", "to_jax", "JAX"
    gt = gradtools.torch
    backend, host = backend_of("torch"), backend_of("jax")

    def entry(self, run: Any) -> Any:
        """The function as it is called: unchanged."""
        return run

    def copied(self, x: Tensor) -> Tensor:
        """A differentiable copy."""
        return x.clone()

    def as_array(self, name: str, y: Any) -> Tensor:
        """Converts a leaf of a function's result to a tensor."""
        if isinstance(y, Tensor):
            return y
        if isinstance(y, bool | int | float | complex | np.ndarray | np.generic):
            return torch.as_tensor(y)
        raise GradtoolsError(
            f"to_jax: {name} returned a {type(y).__name__}; expected a pytree of tensors."
        )

    def specs_of(self, name: str, xs: Sequence[Any]) -> tuple[ArraySpec, ...]:
        """The JAX arrays' ArraySpecs."""
        for x in xs:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                raise GradtoolsError(
                    f"to_jax: an argument of {name} is a typed key, which PyTorch does not know. "
                    "Pass jax.random.key_data(key), or bridge a module, whose apply takes key=."
                )
        return tuple([ArraySpec(x.shape, x.dtype.name) for x in xs])

    def are_plain(self, xs: Sequence[Any]) -> bool:
        """Whether all are concrete, on a device that PyTorch shares, and nothing is traced.

        Other arrays pass through the host, and results return to their device.
        """
        for x in xs:
            if type(x) is not _ARRAY or type(x.sharding) is not SingleDeviceSharding:
                return False
            if not (of_one_cpu() or comes_back(x)):
                return False
        return not within_a_trace()

    def abstract(self, of: Foreign, specs: Sequence[ArraySpec]) -> list[ArraySpec]:
        """The outputs' ArraySpecs, by fake tensors."""
        try:
            with self._faked(of, specs) as xs:
                ys = of.run(*xs)
        except GradtoolsError:
            raise
        except Exception as error:
            raise GradtoolsError(
                f"to_jax: what {of.name} returns could not be determined without running it, which "
                "a traced program (jit, vmap, scan) needs. Declare it: "
                "to_jax(f, out=ArraySpec(shape, dtype)), a pytree of ArraySpecs, or a function of "
                "the arguments' ArraySpecs. "
                f"PyTorch says: {error}"
            ) from error
        return [_spec(y) for y in ys]

    def reach(self, of: Foreign, specs: Sequence[ArraySpec]) -> Sequence[Sequence[bool]] | None:
        """For each output a mask of the inputs that reach it; None if f raises on fake tensors."""
        with self._faked(of, specs) as xs:
            at = [x.requires_grad_() for x in xs if self.backend.is_inexact(x)]
            try:
                ys = of.run(*[x.clone() for x in xs])
            except Exception:  # whatever the author's code meets there, where numbers are missing
                return None
            return [self._reaching(y, xs, at) for y in ys]

    def _reaching(self, y: Tensor, xs: Sequence[Tensor], at: Sequence[Tensor]) -> list[bool]:
        """A mask of the xs that get a cotangent from y."""
        if not y.requires_grad or not at:
            return [False] * len(xs)
        pulled = torch.autograd.grad(
            y, at, torch.ones_like(y), retain_graph=True, allow_unused=True
        )
        reached = {id(x) for x, ct in zip(at, pulled, strict=True) if ct is not None}
        return [id(x) in reached for x in xs]

    @contextmanager
    def _faked(self, of: Foreign, specs: Sequence[ArraySpec]) -> Iterator[list[Tensor]]:
        """A context of fake tensors with these shapes, in which operations compute shapes only.

        What the function writes meanwhile, such as caches of modules, is undone.
        """
        from gradtools.seeing.torch.undo import undone

        with (
            undone(of.fun, ()),
            private.outermost(),
            torch.inference_mode(False),
            private.fake_tensors(allow_non_fake_inputs=True),
            torch.enable_grad(),
        ):
            yield [torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for s in specs]

    # --- calls

    def called(
        self, signature: ForeignSignature, run: Any, xs: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Calls the function on JAX arrays."""
        if torch.is_inference_mode_enabled():  # its tensors have no version counters
            with torch.inference_mode(False):
                return self.called(signature, run, xs)
        ys = self._evaluated(signature, run, [tensor_of(x) for x in xs])
        who = f"to_jax: what {signature.of.name} returns"
        return [array_of(y, who) for y in unshared(ys)]

    def called_on_host(
        self, signature: ForeignSignature, run: Any, arrays: Sequence[np.ndarray], depth: int
    ) -> list[np.ndarray]:
        """Calls the function on NumPy arrays, in a host callback's thread."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.called_on_host(signature, run, arrays, depth)
        pairs = zip(arrays, signature.ins, strict=True)
        ts = [tensor_of_numpy(a, s) for a, s in pairs]
        ys = self._evaluated(signature, run, ts)
        return [numpy_of_tensor(y) for y in unshared(ys)]

    def _evaluated(self, signature: ForeignSignature, run: Any, ts: list[Tensor]) -> list[Tensor]:
        base = signature.base
        if private.is_dispatch_key_excluded(private.DispatchKey.AutogradFunctionality):
            with private.outermost():  # JAX was called below PyTorch's autograd
                return self._evaluated(signature, run, ts)
        if not torch.is_grad_enabled() or upstream.is_any_autocast_enabled():
            with torch.enable_grad(), without_casts(t.device.type for t in ts):
                return self._evaluated(signature, run, ts)  # as in a host callback's thread
        if not base.seen:
            example = []  # the arguments of the base function, without batch axes
            for t, spec in zip(ts, base.ins, strict=False):
                while t.dim() > len(spec.shape):
                    t = t[0]
                example.append(t)
            self._first(base, example)
        if base.captured and base is not signature:
            raise GradtoolsError(base.captured)
        held = base.held
        versions = [upstream.version_of(t) for t in held.values()] if held else []
        ys = run(*ts)
        if held:
            _refuse_written(base, versions)
        for i, t in enumerate(ts):
            if upstream.version_of(t) and i not in base.written:
                raise GradtoolsError(
                    f"to_jax: {base.of.name} wrote in its argument {i}, and did not at its first "
                    "call with such arrays, so JAX's own array was changed. Clone what you write "
                    "in: x = x.clone()."
                )
        if run is signature.of.entry and not signature.has_outs:
            signature.set_outs([_spec(y) for y in ys])
        return ys

    def mapped(self, run: Any, dims: tuple[int | None, ...]) -> Any:
        """The function under vmap, or in a loop over the examples if PyTorch cannot map it."""

        def call(*ts: Tensor) -> list[Tensor]:
            try:
                return list(torch.func.vmap(run, dims, randomness="error")(*ts))
            except Exception:  # unsupported by vmap; an error of f is raised again by the loop
                return _looped(run, dims, ts)

        return call

    # --- the first call

    def _first(self, base: ForeignSignature, ts: Sequence[Tensor]) -> None:
        """Looks at the function; streams and buffers are put back where it is refused."""
        before = RunState.now(Held([base.of.fun]))
        try:
            self._look(base, ts)
        except BaseException:
            before.restore()
            raise

    def _look(self, base: ForeignSignature, ts: Sequence[Tensor]) -> None:
        """Evaluates the function on copies, and notes what JAX would not know of."""
        name = base.of.name
        copies, held = [t.clone() for t in ts], _captured(base.of.fun)
        versions = [upstream.version_of(t) for t in held.values()]
        stream = torch.get_rng_state()
        with _Draws() as draws:
            ys = base.of.run(*copies)
        if draws.seen and not torch.equal(stream, torch.get_rng_state()):
            raise GradtoolsError(
                f"to_jax: {name} draws random numbers from PyTorch's global stream, so each "
                "evaluation would draw others: that of the derivative too. Call eval() on the "
                "module, or bridge it: apply, params, state = to_jax(module), and give apply a "
                "key."
            )
        base.held = held
        _refuse_written(base, versions)
        leaf = next(leaves_of([y for y in ys if y.requires_grad]), None)
        if leaf is not None:
            names = [key for key, t in held.items() if t is leaf]
            what = names[0] if names else f"a tensor of shape {tuple(leaf.shape)}"
            base.captured = _REQUIRES.format(name=name, what=what)
        del ys
        base.written = tuple([i for i, t in enumerate(ts) if _is_touched(t, copies, i)])
        base.of.copies.update(base.written)
        base.held = {key: t for key, t in held.items() if not isinstance(t, torch.nn.Parameter)}
        base.seen = True


class _Draws(private.TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    seen = False

    def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in getattr(fun, "tags", ())
        return fun(*args, **(kwargs or {}))


def _refuse_written(base: ForeignSignature, versions: Sequence[int]) -> None:
    """Raises if the function wrote to captured tensors."""
    for (key, t), version in zip(base.held.items(), versions, strict=True):
        if upstream.version_of(t) != version:
            raise GradtoolsError(
                f"to_jax: {base.of.name} writes in place in {key}, which it closes over, at each "
                "evaluation: that of a derivative too. Bridge the module: apply, params, state = "
                "to_jax(module) takes and returns its buffers."
            )


def _is_touched(t: Tensor, copies: Sequence[Tensor], i: int) -> bool:
    """Whether a function wrote in the copy of t that it was given, or holds it still."""
    if is_kept(copies, i) or upstream.version_of(copies[i]) > 0:
        return True
    # As bytes, of which those of NaN equal NaN's.
    before, after = (numpy_of_tensor(x).reshape(-1).view(np.uint8) for x in (t, copies[i]))
    return not np.array_equal(before, after)


def _spec(y: Tensor) -> ArraySpec:
    return ArraySpec(tuple(y.shape), str(y.dtype).removeprefix("torch."))


def _looped(run: Callable[..., Any], dims: Any, ts: Sequence[Tensor]) -> list[Tensor]:
    size = next(t.shape[0] for t, d in zip(ts, dims, strict=True) if d is not None)
    rows = [
        run(*[t if d is None else t[i] for t, d in zip(ts, dims, strict=True)]) for i in range(size)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _captured(f: Any) -> dict[str, Tensor]:
    """The tensors that a function captures, by descriptive names."""
    read = [x for x in globals_of(f).values() if isinstance(x, torch.nn.Module | Tensor)]
    modules = list(captured_objects((f, *read), lambda x: isinstance(x, torch.nn.Module), Tensor))
    named: dict[int, tuple[str, Tensor]] = {}
    for module in modules:
        kind = type(module).__name__
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            named.setdefault(id(t), (f"{name!r} of {kind}", t))
    for t in captured_objects((f, *read), lambda x: isinstance(x, Tensor), Tensor):
        named.setdefault(id(t), (f"a tensor of shape {tuple(t.shape)}", t))
    result: dict[str, Tensor] = {}
    for words, t in named.values():
        result[words if words not in result else f"{words} ({len(result)})"] = t
    return result
