"""The waist in PyTorch.

Which engine differentiates depends on where the call stands:

- in eager code `torch.autograd.grad` on aliases of the inputs, which takes any eager function;
- inside functorch's transforms and in compiled code `torch.func`, which is what traces there.

Results stay differentiable exactly when grad mode is on at entry and an argument or a captured
tensor requires grad; otherwise they are detached and the graph is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.backend import Array, Evaluation, Fun, Staged
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule
from gradtools.torch import accumulate, arrays, modules, trees
from gradtools.torch.compiling import is_compiling
from gradtools.torch.rules import apply_rule, is_inexact

Tensor = torch.Tensor


_SPENT = "gradtools_spent"
_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


class TorchBackend:
    """What `gradtools.backend.Backend` asks, by PyTorch."""

    name = "torch"
    hvp_mode = "reverse_over_reverse"
    accumulation = accumulate

    @property
    def xp(self) -> Any:
        return arrays.xp()

    # --- pytrees

    flatten = staticmethod(trees.flatten)
    unflatten = staticmethod(trees.unflatten)
    leaf_paths = staticmethod(trees.leaf_paths)

    # --- arrays

    def is_array(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def is_inexact(self, x: Array) -> bool:
        return is_inexact(x)

    def is_complex(self, x: Array) -> bool:
        return x.is_complex()

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    asarray = staticmethod(arrays.asarray)
    to_numpy = staticmethod(arrays.to_numpy)
    key = staticmethod(arrays.key)
    split = staticmethod(arrays.split)

    def cast(self, x: Any, like: Array | str) -> Array:
        dtype = getattr(torch, like) if isinstance(like, str) else like.dtype
        if isinstance(x, Tensor):
            return x.to(dtype)
        if isinstance(like, str):
            return torch.as_tensor(x).to(dtype)
        if isinstance(x, bool | int | float | complex):
            return torch.full((), x, dtype=dtype, device=like.device)
        return torch.as_tensor(x, device=like.device).to(dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        dtype = _REAL.get(like.dtype, like.dtype)
        return x.to(dtype) if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype)

    def zeros_like(self, x: Array) -> Array:
        return torch.zeros_like(x, requires_grad=False)

    def ones_like(self, x: Array) -> Array:
        return torch.ones_like(x, requires_grad=False)

    def unit_basis(self, x: Array) -> Array:
        eye = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
        return eye.reshape(x.numel(), *x.shape)

    def is_known_zero(self, x: Array) -> bool:
        return False

    # --- derivatives

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged:
        return Staged(fun)

    def vjp(
        self, fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool
    ) -> Evaluation:
        _note_derivative()
        with _explained():
            if _in_functorch():
                return _functorch_vjp(fun, leaves, groups)
            return _eager_vjp(fun, leaves, once)

    def jvp(
        self, fun: Fun, leaves: list[Array], tangents: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        _note_derivative()
        with _explained():
            if _in_functorch():
                return _functorch_jvp(fun, leaves, tangents)
            if forward_ad._current_level >= 0:
                outs, extras, push = self.linearize(fun, leaves)
                return outs, extras, push(tangents)
            return _dual_jvp(fun, leaves, tangents)

    def linearize(
        self, fun: Fun, leaves: list[Array]
    ) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]:
        """The pushforward as the transpose of the pullback: f is evaluated once, in any mode."""
        _note_derivative()
        with _explained():
            if _in_functorch():
                return _functorch_linearize(fun, leaves)
            return _eager_linearize(fun, leaves)

    def without_graph(self, fun: Callable[[], Any]) -> Any:
        with torch.no_grad():
            return fun()

    def constant(self, x: Array, message: str, *sources: Any) -> Array:
        tracked = [s for s in sources if isinstance(s, Tensor) and s.requires_grad]
        if not tracked or not torch.is_grad_enabled() or not is_inexact(x):
            return x
        return _Constant.apply(message, x, *tracked)

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        return apply_rule(rule, *xs)

    def stop_gradient(self, x: Array) -> Array:
        return x.detach()

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        """`f(args)`; inside functorch's levels, if f wants NumPy arrays, under all of them."""
        try:
            return f(args)
        except RuntimeError as error:
            if "Cannot access data pointer" not in str(error):
                raise
            shapes, treedef = trees.flatten(like)
            xs, argdef = trees.flatten(args)

            def run(*values: Tensor) -> list[Tensor]:
                found, came = trees.flatten(f(trees.unflatten(argdef, values)))
                if came != treedef:
                    raise GradtoolsError(
                        f"straight_through: the function returned the structure {came}, its "
                        f"surrogate {treedef}; they must be the same."
                    ) from None
                return [self.cast(y, s) for y, s in zip(found, shapes, strict=True)]

            return trees.unflatten(treedef, _OnHost.apply(run, *xs))

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        def constant(*args: Any) -> Any:
            return fun(*args)

        # What torch.compiler.assume_constant_result does, without importing dynamo.
        setattr(constant, "_dynamo_marked_constant", True)  # noqa: B010 (mypy)
        return constant

    def refuse_to_compile(self, reason: str) -> None:
        if is_compiling():
            torch._dynamo.graph_break(msg=reason)

    # --- the framework's own transforms

    def vmap(self, f: Any, in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
        return torch.vmap(f, in_axes, out_axes, randomness="different")

    def map_batches(self, f: Any, batch: list[Array], chunk_size: int | None) -> list[Array]:
        if chunk_size == 1:
            rows = [f(*example) for example in zip(*batch, strict=True)]
            return [torch.stack(column) for column in zip(*rows, strict=True)]
        with _explained():
            mapped = torch.vmap(
                lambda *xs: tuple(f(*xs)), randomness="different", chunk_size=chunk_size
            )
            return list(mapped(*batch))

    def checkpoint(self, f: Any) -> Callable[..., Any]:
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(f, *args, use_reentrant=False, **kwargs)

        return checkpointed

    def compile(self, f: Any, **options: Any) -> Callable[..., Any]:
        return torch.compile(f, **options)

    functionalize = staticmethod(modules.functionalize)


# --- the eager engine --------------------------------------------------------------------


def _eager_vjp(fun: Fun, leaves: list[Tensor], once: bool) -> Evaluation:
    outs, extras, aliases, attached, nested = _evaluate(fun, leaves)

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [
            (y, ct) for y, ct in zip(outs, cts, strict=True) if ct is not None and y.requires_grad
        ]
        if not pairs:
            return [None] * len(aliases)
        create = torch.is_grad_enabled() and (attached or any(ct.requires_grad for _, ct in pairs))
        with _explained():
            grads = torch.autograd.grad(
                [y for y, _ in pairs],
                aliases,
                [ct for _, ct in pairs],
                retain_graph=create or not once,
                create_graph=create or forward_ad._current_level >= 0,  # else tangents go wrong
                allow_unused=True,
            )
        return [g if g is None or create else _free(g) for g in grads]

    free = (lambda x: x) if attached else _free
    return Evaluation(
        [free(y) for y in outs], [free(x) for x in extras], pullback, nested=lambda: nested
    )


def _eager_linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    outs, extras, aliases, attached, _ = _evaluate(fun, leaves)
    tracked = [y for y in outs if y.requires_grad]
    with torch.enable_grad():
        dummies = [torch.zeros_like(y, requires_grad=True) for y in tracked]
        pulled = (
            torch.autograd.grad(tracked, aliases, dummies, create_graph=True, allow_unused=True)
            if tracked
            else ()
        )

    def push(tangents: list[Tensor]) -> list[Tensor]:
        pairs = (
            [
                (p, t)
                for p, t in zip(pulled, tangents, strict=True)
                if p is not None and p.requires_grad
            ]
            if tracked
            else []
        )
        found: Iterator[Tensor | None] = iter([None] * len(tracked))
        if pairs:
            create = torch.is_grad_enabled() and (
                attached or any(t.requires_grad for _, t in pairs)
            )
            ps, ts = zip(*pairs, strict=True)
            found = iter(
                torch.autograd.grad(
                    ps,
                    dummies,
                    ts,
                    retain_graph=True,
                    create_graph=create
                    or forward_ad._current_level >= 0,  # else tangents go wrong allow_unused=True
                )
            )
        pushed = [next(found) if y.requires_grad else None for y in outs]
        return [torch.zeros_like(y) if t is None else t for y, t in zip(outs, pushed, strict=True)]

    free = (lambda x: x) if attached else _free
    return [free(y) for y in outs], [free(x) for x in extras], push


def _evaluate(fun: Fun, leaves: list[Tensor]) -> Any:
    """f at aliases of the leaves, once, with a graph: outs, extras, aliases, attached, nested."""
    keep = torch.is_grad_enabled()
    aliases = [_alias(x, keep) for x in leaves]
    with torch.inference_mode(False), torch.enable_grad():
        outs, extras, nested = _watched(fun, aliases)
    attached = keep and (any(x.requires_grad for x in leaves) or _reaches_other(outs, aliases))
    for alias in aliases:
        # Nobody asks for it again, so it is no reason for another result to stay attached.
        setattr(alias, _SPENT, True)
    return outs, extras, aliases, attached, nested


def _alias(x: Tensor, keep: bool) -> Tensor:
    """x under another name, tracked: a view of x if it is tracked already, else a leaf.

    The tangent of a dual number stays, which `detach` alone would drop in silence.
    """
    with torch.inference_mode(False):
        if x.is_inference():
            return x.clone().requires_grad_()
        alias = x.view_as(x) if keep and x.requires_grad else _detached(x)
    return alias if alias.requires_grad else alias.requires_grad_()


def _detached(x: Tensor) -> Tensor:
    """x cut from its graph; its tangent, if it is a dual number, stays."""
    primal, tangent = _unpacked(x)
    if tangent is None:
        return x.detach()
    return forward_ad.make_dual(primal.detach(), tangent.detach())


def _free(x: Tensor) -> Tensor:
    """x, detached if there is anything to detach it from."""
    return _detached(x) if x.requires_grad else x


def _unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return (x, None) if forward_ad._current_level < 0 else forward_ad.unpack_dual(x)


def _reaches_other(outs: Sequence[Tensor], aliases: Sequence[Tensor]) -> bool:
    """Whether the graph of outs holds a leaf that is not an alias of ours."""
    own = {id(a) for a in aliases}
    return any(id(leaf) not in own and not hasattr(leaf, _SPENT) for leaf in _leaves_of(outs))


def _leaves_of(outs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves of the autograd graph of outs."""
    seen: set[Any] = set()
    todo = [y.grad_fn for y in outs if y.grad_fn is not None]
    yield from (y for y in outs if y.grad_fn is None and y.requires_grad)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        todo += [parent for parent, _ in node.next_functions if parent is not None]


class _Constant(torch.autograd.Function):
    """The identity; whoever asks for a derivative through it is told that there is none."""

    @staticmethod
    def forward(message: str, x: Tensor, *sources: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        raise GradtoolsError(ctx.message)


class _OnHost(torch.autograd.Function):
    """A function on plain tensors, called beneath functorch's levels. It has no derivative."""

    @staticmethod
    def forward(run: Callable[..., list[Tensor]], *xs: Any) -> tuple[Tensor, ...]:
        return tuple(run(*xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.count = len(inputs)
        ctx.mark_non_differentiable(*outputs)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *dxs: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Any, *xs: Any) -> Any:
        def example(i: int) -> list[Any]:
            dims = zip(xs, in_dims[1:], strict=True)
            return [x if d is None else x.select(d, i) for x, d in dims]

        rows = [_OnHost.apply(run, *example(i)) for i in range(info.batch_size)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), 0


# --- forward mode ------------------------------------------------------------------------


def _dual_jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    with torch.inference_mode(False), forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.clone() if x.is_inference() else x, t)
            for x, t in zip(leaves, tangents, strict=True)
        ]
        outs, extras = fun(*duals)
        unpacked = [forward_ad.unpack_dual(y) for y in outs]
        extras = [forward_ad.unpack_dual(x).primal if is_inexact(x) else x for x in extras]
    primals = [y.primal for y in unpacked]
    pushed = [torch.zeros_like(y) if t is None else t for y, t in unpacked]
    if torch.is_grad_enabled():
        return primals, extras, pushed
    return [[_free(x) for x in xs] for xs in (primals, extras, pushed)]


@contextmanager
def _explained() -> Iterator[None]:
    """PyTorch's refusals, in words that say what to do."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        mend = next((mend for part, mend in _MENDS.items() if part in str(error)), None)
        if mend is None:
            raise
        raise GradtoolsError(f"{mend} PyTorch says: {error}") from error


_MENDS = {
    "must implement the jvp function": (
        "f holds a function with a reverse rule only (clip_gradient, transform_gradient, "
        "known_gradient, or a torch.autograd.Function without jvp), which forward mode cannot "
        "enter. Use vjp or grad, or for second derivatives mode='reverse_over_reverse'."
    ),
    "Trying to use forward AD with": (
        "f holds an operation that has no forward mode in PyTorch. For attention use "
        "sdpa_kernel(SDPBackend.MATH), for an LSTM on CPU mkldnn.flags(enabled=False); or use "
        "linearize, which needs double backward instead."
    ),
    "vmap: It looks like you're attempting to use a Tensor in some data-dependent": (
        "f branches on values, which vmap cannot follow. chunk_size=1 is a plain loop that can."
    ),
    "vmap: inplace arithmetic": (
        "f changes a tensor in place that is shared by all examples (such as batch "
        "normalisation's running statistics in training mode), which vmap cannot follow. Put "
        "the module in evaluation mode, functionalize it, or use chunk_size=1, a plain loop."
    ),
    "would mutate a captured Tensor": (
        "f changes a tensor in place that it captured (such as batch normalisation's running "
        "statistics in training mode), which torch.func's transforms cannot follow. Put the "
        "module in evaluation mode or functionalize it; or take the derivative outside of the "
        "transform (per_example_grad and jacobian: chunk_size=1 is a plain loop)."
    ),
    "use_reentrant=True": (
        "f holds a reentrant torch.utils.checkpoint, which takes no derivative with respect to "
        "chosen inputs. Pass use_reentrant=False to it, or use gt.checkpoint."
    ),
    "marked with @once_differentiable": (
        "f holds a torch.autograd.Function marked once_differentiable, which has no second "
        "derivative in reverse mode."
    ),
    "it must override the setup_context staticmethod": (
        "f holds an old-style torch.autograd.Function (forward takes ctx), which torch.func's "
        "transforms cannot enter. Split its forward into forward and setup_context, or take the "
        "derivative outside of the transform (chunk_size=1 is a plain loop)."
    ),
    "it does not have vmap support": (
        "f holds a torch.autograd.Function without a vmap rule. Give it one "
        "(generate_vmap_rule = True), or use chunk_size=1, a plain loop."
    ),
    "It looks like you're either (1) calling .item()": (
        "f takes a Python number out of a tensor, which vmap cannot follow. chunk_size=1 is a "
        "plain loop that can."
    ),
}


# --- inside functorch and dynamo ---------------------------------------------------------


def _in_functorch() -> bool:
    return is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _functorch_vjp(fun: Fun, leaves: list[Tensor], groups: Sequence[int] | None) -> Evaluation:
    reached: list[bool] = []
    nested: list[bool] = []

    def paired(*xs: Tensor) -> Any:
        asked = groups if groups is not None and is_compiling() else ()
        outs, extras, inside = _watched(lambda *a: _probed(fun, a, asked, reached), xs)
        nested[:] = [inside]
        if groups is not None and not is_compiling():
            found = {id(leaf) for leaf in _leaves_of(outs)}
            reached[:] = [id(x) in found for x in xs]
        return tuple(outs), tuple(extras)

    outs, pull, extras = torch.func.vjp(paired, *leaves, has_aux=True)  # type: ignore[misc]

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        filled = tuple(
            torch.zeros_like(y) if ct is None else ct for ct, y in zip(cts, outs, strict=True)
        )
        # A view, because what a rule hands back as it was may be a wrapper of a level that ended.
        with _explained():
            grads = [g.view_as(g) for g in pull(filled)]
        if not reached:
            return list(grads)
        return [g if r else None for g, r in zip(grads, reached, strict=True)]

    return Evaluation(list(outs), list(extras), pullback, nested=lambda: nested[0])


def _probed(fun: Fun, xs: Sequence[Tensor], groups: Sequence[int], reached: list[bool]) -> Any:
    """f, noting at trace time for each leaf whether its group reaches an output.

    Dynamo shows no graph to walk, but knows at each level whether a result depends on what that
    level differentiates: so each group gets a level of its own. It adds nothing to what runs.
    """
    if not groups:
        return fun(*xs)
    mine, others = xs[: groups[0]], xs[groups[0] :]
    deeper: list[bool] = []

    def level(*tracked: Tensor) -> Any:
        def rest(*a: Tensor) -> Any:
            return fun(*tracked, *a)

        outs, extras = _probed(rest, others, groups[1:], deeper)
        hit = any(y.requires_grad for y in outs)
        reached[:] = [hit for _ in tracked] + deeper
        return tuple(outs), tuple(extras)

    if not mine:
        return level()
    outs, _, extras = torch.func.vjp(level, *mine, has_aux=True)  # type: ignore[misc]
    return list(outs), list(extras)


def _functorch_jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    def paired(*xs: Tensor) -> Any:
        outs, extras = fun(*xs)
        return tuple(outs), tuple(extras)

    outs, pushed, extras = torch.func.jvp(paired, tuple(leaves), tuple(tangents), has_aux=True)  # type: ignore[misc]
    return list(outs), list(extras), list(pushed)


def _functorch_linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    def paired(*xs: Tensor) -> Any:
        outs, extras = fun(*xs)
        return tuple(outs), tuple(extras)

    outs, pull, extras = torch.func.vjp(paired, *leaves, has_aux=True)  # type: ignore[misc]
    zeros = tuple(torch.zeros_like(y) for y in outs)
    _, push = torch.func.vjp(pull, zeros)  # type: ignore[misc]
    return list(outs), list(extras), lambda tangents: list(push(tuple(tangents))[0])


# --- whether f takes a derivative itself -------------------------------------------------

_eager = threading.local()
_compiled: list[list[bool]] = []  # dynamo follows a plain list; it is empty before and after


def _open_derivatives() -> list[list[bool]]:
    """One flag for each derivative whose function is being evaluated."""
    return _compiled if is_compiling() else _eager.__dict__.setdefault("open", [])


def _note_derivative() -> None:
    for flag in _open_derivatives():
        flag[0] = True


def _watched(fun: Fun, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """f at xs, and whether it took a gradtools derivative itself."""
    flag = [False]
    still_open = _open_derivatives()
    still_open.append(flag)
    try:
        outs, extras = fun(*xs)
    finally:
        still_open.pop()
    return outs, extras, flag[0]
