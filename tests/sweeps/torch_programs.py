"""Makes pure functions from the samples in PyTorch's own databases, for the PyTorch sweep.

`torch.testing._internal` contains the databases: `op_db` (operators), `custom_op_db`
(`torch.library.custom_op`), `autograd_function_db` (`torch.autograd.Function`) and `module_db`
(`torch.nn`). A sample becomes a function f of its differentiated tensors that returns a tuple of
its differentiable outputs and has no side effects: each call seeds and restores the random state
and copies tensors that the operation overwrites, so f can be evaluated repeatedly.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gradtools.errors import GradtoolsError

TABLES = {
    "op_db": "common_methods_invocations",
    "custom_op_db": "custom_op_db",
    "autograd_function_db": "autograd_function_db",
    "module_db": "common_modules",
}
FUNCTION, IN_PLACE, ON_VIEW = "function", "in place", "in place on a view"
# Samples with more input entries are used only if there is no smaller sample.
_FEW = 600
_MANY = 20_000
_LARGE = 1e3  # Samples with larger inputs or gradients are selected last.
_LOOKED_AT = 24  # Maximum number of samples of one operator.
_SEED = 20


@dataclass(frozen=True, eq=False)
class TableProgram:
    """One sample of a table entry as a function of the differentiated tensors.

    Attributes:
        name: The name of the table entry and its variant, such as "add, in place".
        dtype: The dtype of the differentiated tensors.
        sample: The index of the sample in the table entry.
        f: A function of the primals that returns the tuple of differentiable outputs.
        primals: Detached tensors.
        random: Whether f draws random numbers from a fixed seed.
        alone: Whether f is elementwise and all tensors have the same shape.
    """

    name: str
    dtype: str
    sample: int
    f: Callable[..., tuple[Any, ...]]
    primals: tuple[Any, ...]
    random: bool = False
    alone: bool = False


@dataclass(frozen=True)
class TableEntry:
    """A table entry for an operator or module, in one variant."""

    table: str
    name: str
    info: Any
    variant: str = FUNCTION


# --- the tables ---------------------------------------------------------------------------------


def entries(
    tables: Iterable[str] = tuple(TABLES), variants: Iterable[str] = (FUNCTION,)
) -> list[TableEntry]:
    """Return the entries of the tables in their order."""
    result = []
    for table in tables:
        for info in _table(table):
            for variant in variants:
                if variant == FUNCTION or _has(table, info, variant):
                    result.append(TableEntry(table, _name(table, info, variant), info, variant))
    return result


def operator_tables(name: str) -> Any:
    """Import a module of PyTorch's OpInfo tables, which imports the packages of PyTorch's tests."""
    return import_module(f"torch.testing._internal.{name}")


def _table(name: str) -> Any:
    try:
        with _as_before():
            return getattr(operator_tables(TABLES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "expecttest":
            raise
        raise GradtoolsError(
            "sweep: PyTorch's tables of operators, torch.testing._internal, need the package "
            "expecttest, which is not installed: pip install expecttest."
        ) from error


@contextmanager
def _as_before() -> Iterator[None]:
    """Keep the backend flags writable although PyTorch's test utilities make them read-only."""
    import torch

    flags: Any = torch.backends.flags_frozen  # type: ignore[attr-defined]
    state, name = flags.__globals__, "__allow_nonbracketed_mutation_flag"
    allowed = state[name]
    try:
        yield
    finally:
        state[name] = allowed


def _name(table: str, info: Any, variant: str) -> str:
    own = info.name
    if table != "module_db" and info.variant_test_name:
        own += f".{info.variant_test_name}"
    return own if variant == FUNCTION else f"{own}, {variant}"


def _has(table: str, info: Any, variant: str) -> bool:
    if table == "module_db" or info.inplace_variant is None:
        return False
    return bool(info.supports_autograd and info.supports_inplace_autograd)


# --- from an entry to programs ------------------------------------------------------------------


def programs(
    entry: TableEntry, dtype: str = "float64", most: int = 1
) -> tuple[list[TableProgram], str]:
    """Return at most `most` programs of an entry, and a reason if the entry has no program."""
    import torch

    with _seeded(zlib.crc32(entry.name.encode())), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = _of_module if entry.table == "module_db" else _of_operator
        try:
            return _chosen(make(entry, getattr(torch, dtype), most), most), ""
        except _Nothing as nothing:
            return [], str(nothing)


class _Nothing(Exception):
    """The reason why an entry has no program."""


def _chosen(found: list[tuple[bool, int, TableProgram]], most: int) -> list[TableProgram]:
    """Select programs, first by moderate numbers and nonzero gradients, and then by size."""
    found = [x for x in found if x[1] <= _MANY] or found
    order = sorted(found, key=lambda x: (not x[0], x[1] > _FEW, x[2].sample))
    return sorted((program for _, _, program in order[:most]), key=lambda p: p.sample)


@contextmanager
def _seeded(seed: int = _SEED) -> Iterator[None]:
    """Seed the random number generator in a block and restore its state afterwards."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


# --- operators ----------------------------------------------------------------------------------


def _of_operator(entry: TableEntry, dtype: Any, most: int) -> list[tuple[bool, int, TableProgram]]:
    op = entry.info
    claimed = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    if not claimed or dtype not in op.dtypes:
        raise _Nothing("the table declares no derivative in this dtype")
    result: list[tuple[bool, int, TableProgram]] = []
    why = "no sample requires a gradient"
    for number, sample in enumerate(_samples(op, dtype)):
        if result and number >= max(_LOOKED_AT, most):
            break
        if entry.variant != FUNCTION and sample.broadcasts_input:
            continue
        try:
            result += _of_sample(entry, number, sample, dtype)
        except Exception as error:  # PyTorch itself may raise an error.
            why = f"{type(error).__name__}: {error}"[:160]
        if sum(good and size <= _FEW for good, size, _ in result) >= most:
            break
    if not result:
        raise _Nothing(why)
    return result


def _samples(op: Any, dtype: Any) -> Iterator[Any]:
    try:
        yield from op.sample_inputs("cpu", dtype, requires_grad=True)
    except Exception as error:
        raise _Nothing(f"the samples raise {type(error).__name__}: {error}"[:160]) from error


def _of_sample(
    entry: TableEntry, number: int, sample: Any, dtype: Any
) -> list[tuple[bool, int, TableProgram]]:
    from gradtools.torch._upstream import pytree

    op = entry.info
    call = _variant(op, entry.variant)

    def whole(tree: Any) -> Any:
        x, args, kwargs = tree
        # only the rules of the Function use the other outputs
        if entry.table == "autograd_function_db":
            out = call(x, *args, **kwargs)
            return out[0] if isinstance(out, tuple | list) else out
        if entry.table == "custom_op_db":  # the wrappers of custom operators have another signature
            return call(x, *args, **kwargs)
        return sample.output_process_fn_grad(op.gradcheck_wrapper(call, x, *args, **kwargs))

    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    outer = _pure(lambda xs: whole(pytree.tree_unflatten(xs, spec)), leaves)
    if outer is None:
        return []
    f, primals, random, good = outer
    size = sum(x.numel() for x in primals)
    program = TableProgram(
        entry.name, _dtype_name(dtype), number, f, primals, random, _alone(op, leaves, primals)
    )
    return [(good, size, program)]


def _variant(op: Any, variant: str) -> Callable[..., Any]:
    if variant == FUNCTION:
        result: Callable[..., Any] = op.op
        return result
    if variant == IN_PLACE:
        return lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs)

    def on_view(x: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        base = torch.stack((x, x))
        op.inplace_variant(base[0], *args, **kwargs)
        return base

    return on_view


def _alone(op: Any, leaves: list[Any], primals: tuple[Any, ...]) -> bool:
    import torch

    core = operator_tables("opinfo.core")
    if not isinstance(op, core.UnaryUfuncInfo | core.BinaryUfuncInfo):
        return False
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    shapes = {x.shape for x in tensors}
    return len(shapes) == 1 and len(tensors) == len(primals) and primals[0].dim() > 0


# --- modules ------------------------------------------------------------------------------------


def _of_module(entry: TableEntry, dtype: Any, most: int) -> list[tuple[bool, int, TableProgram]]:
    import torch

    info = entry.info
    if dtype not in info.dtypes:
        raise _Nothing("the table has no sample in this dtype")
    result: list[tuple[bool, int, TableProgram]] = []
    why = "no input requires a gradient"
    for training in (False, True) if info.train_and_eval_differ else (True,):
        try:
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
        except Exception as error:
            why = f"the samples raise {type(error).__name__}: {error}"[:160]
            continue
        for number, one in enumerate(inputs[:_LOOKED_AT]):
            try:
                torch.manual_seed(_SEED)
                result += _of_module_input(entry, number, one, dtype, training)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:160]
    if not result:
        raise _Nothing(why)
    return result


def _of_module_input(
    entry: TableEntry, number: int, given: Any, dtype: Any, training: bool
) -> list[tuple[bool, int, TableProgram]]:
    import torch

    from gradtools.torch._upstream import pytree

    made = given.constructor_input
    kwargs = dict(made.kwargs)
    module = entry.info.module_cls(*made.args, **kwargs).to(dtype).train(training)
    if entry.info.is_lazy:
        with torch.no_grad():
            module(*given.forward_input.args, **given.forward_input.kwargs)
    names = [name for name, _ in module.named_parameters()]
    weights = [x for _, x in module.named_parameters()]
    buffers = dict(module.named_buffers())
    own, spec = pytree.tree_flatten((given.forward_input.args, dict(given.forward_input.kwargs)))

    def whole(xs: list[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(xs[len(names) :], spec)
        state = {**buffers, **dict(zip(names, xs, strict=False))}
        state = {k: x.clone() if k in buffers else x for k, x in state.items()}
        return torch.func.functional_call(module, state, args, kwargs)

    outer = _pure(whole, weights + own)
    if outer is None:
        return []
    f, primals, random, good = outer
    name = f"{entry.name}, training" if training else f"{entry.name}, evaluation"
    if not entry.info.train_and_eval_differ:
        name = entry.name
    program = TableProgram(name, _dtype_name(dtype), number, f, primals, random)
    return [(good, sum(x.numel() for x in primals), program)]


# --- pure functions -----------------------------------------------------------------------------


def _is_primal(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and x.requires_grad


def _pure(whole: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
    """Return (f, primals, is_random, is_moderate), or None if there is no differentiable tensor."""
    import torch

    from gradtools.torch import _upstream as upstream

    pytree = upstream.pytree
    at = [i for i, x in enumerate(leaves) if _is_primal(x) and x.numel()]
    if not at or any(leaves[i].layout != torch.strided for i in at):
        return None
    fixed = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
    primals = tuple(leaves[i].detach().clone() for i in at)

    def run(xs: Iterable[Any], copied: bool, kept: list[int] | None) -> tuple[Any, ...]:
        full = [x.clone() if copied and isinstance(x, torch.Tensor) else x for x in fixed]
        for i, x in zip(at, xs, strict=True):
            full[i] = x
        outs = pytree.tree_leaves(whole(full))
        return tuple(outs if kept is None else (outs[k] for k in kept))

    versions = [upstream.version_of(x) for x in fixed if isinstance(x, torch.Tensor)]
    stream = torch.get_rng_state()
    live = [x.clone().requires_grad_() for x in primals]
    outs = run(live, True, None)
    random = not torch.equal(stream, torch.get_rng_state())
    kept = [i for i, y in enumerate(outs) if _is_primal(y) and y.numel()]
    kept = [i for i in kept if outs[i].layout == torch.strided]
    if not kept:
        return None
    with torch.no_grad():
        run(primals, False, None)
    copied = versions != [upstream.version_of(x) for x in fixed if isinstance(x, torch.Tensor)]
    ones = [torch.ones_like(outs[k]) for k in kept]
    grads = torch.autograd.grad([outs[k] for k in kept], live, ones, allow_unused=True)
    there = [g for g in grads if g is not None]
    good = bool(there) and all(bool(g.isfinite().all()) for g in there)
    good = good and all(bool(outs[k].isfinite().all()) for k in kept)
    good = good and any(bool((g != 0).any()) for g in there)
    good = good and all(bool((x.abs() <= _LARGE).all()) for x in (*primals, *there))

    def f(*xs: Any) -> tuple[Any, ...]:
        if not random:
            return run(xs, copied, kept)
        with _seeded():
            return run(xs, copied, kept)

    return f, primals, random, good


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
