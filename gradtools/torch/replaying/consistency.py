"""Verifies that a recomputation equals the first pass, in its outputs and in the leaves reached.

Before a function runs again, the state that it can reach is restored (`state`). Other state may
differ, which this module detects. The first pass stores checksums ("figures") of each chunk's
outputs, and the leaves that its graph reaches; the recomputation must have the same. This is done
in the first backward pass for each `RunKey`: the function, the shapes and dtypes of its arguments,
the training mode of its modules, autocast.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.coefficients import HERE, closed_over, coefficients_noted
from gradtools.torch.compiling import left_to_python, nodes_of
from gradtools.torch.functorch_wrappers import is_dual, unwrapped
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.patches import hooks_set
from gradtools.torch.replaying.guards import is_recorded, was_queried
from gradtools.torch.state import contents_of

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

Tensor = torch.Tensor
left_to_python(__name__)
Figures = tuple[Any, ...]

_VERIFIED: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_KEEPS = (
    "f keeps something from one call to the next (a cached function of a weight, an attached "
    "tensor); compute it in each call, or pass it to f as an argument. The gradient would be wrong."
)
_EDITS = {"scale_gradient": "scale_gradient or reverse_gradient"}  # which share a rule
_MOST_KEYS = 256  # remembered for one function, if each batch has another shape
_PARTS = 64  # the most entries of a list or tuple in a key
_DEPTH = 3  # of nested closures in a key
_RULES = ("gradtools.torch.rules.", "gradtools.torch.hooks")  # the modules of rules' Functions
_BLOCK = 1 << 18  # entries that are summed at a time
_SAMPLE = 1 << 16  # entries of a module's output that are compared, to locate a difference


class RunKey:
    """The configuration in which a function runs, and whether its recomputation was verified.

    known: The verified and pending configurations of the function.
    """

    def __init__(self, known: dict[Any, Callable[[], Any]], key: tuple[Any, ...]) -> None:
        self._known, self._key = known, key

    @classmethod
    def of(cls, f: Callable[..., Any], *key: Any) -> RunKey:
        """The key of f, with further parts `key`."""
        f, parts = _identity(f)
        return cls(_verified(f), (*key, parts))

    def for_aspect(self, what: str) -> RunKey:
        """A key of the same configuration for another property than equal numbers."""
        return RunKey(self._known, (what, self._key))

    def is_verified(self) -> bool:
        known = self._known.get(self._key)
        return known is not None and known() is not None

    def mark_pending(self, verifier: Any) -> None:
        """Records that `verifier` will verify it: while that is alive, nothing else needs to."""
        known = self._known
        for old, value in list(known.items()):
            if value() is None or _is_dead(old):
                known.pop(old, None)
        if len(known) >= _MOST_KEYS:
            known.clear()
        known[self._key] = weakref.ref(verifier)

    def mark_verified(self) -> None:
        self._known[self._key] = lambda: True

    def discard(self) -> None:
        self._known.pop(self._key, None)


class Coefficient(NamedTuple):
    """A coefficient of an edit.

    Attributes:
        edit: The edit's name.
        figures: Its checksum, or a number; None if it is something else.
        variable: Returns the variable or tensor that holds it; both passes may share it.
    """

    edit: str
    figures: Any
    variable: Callable[[], Any]

    def differs(self, new: Coefficient) -> bool | Tensor:
        same = self.variable()
        if same is not None and same is new.variable():
            return False  # such as a count of calls
        pair = self.figures, new.figures
        if all(isinstance(x, tuple) for x in pair):
            return differ(*pair)
        return None not in pair and bool(pair[0] != pair[1])


class Seen(NamedTuple):
    """What was seen while a chunk ran: its modules with their outputs, and coefficients.

    hooks: The numbers and tensors that hooks on tensors close over.
    """

    modules: list[tuple[torch.nn.Module, list[Figures]]]
    coefficients: list[Coefficient]
    hooks: list[list[Coefficient]]


class Verification:
    """The checksums and leaves of one call's first pass, to compare recomputations with.

    exact: Whether to compare bits, in every chunk and module. Otherwise outputs on accelerators may
        differ by rounding, and modules are compared in the first chunk only.
    """

    def __init__(self, forward: Forward, key: RunKey | None, exact: bool) -> None:
        self.caller, self.reached = forward.caller, forward.start.reached
        self.run_key, self.exact = key, exact
        self.is_compiled = is_compiled(forward)  # a hook would recompile it
        # CPU kernels are deterministic, but compiled code may be recompiled.
        self._outputs_exactly = self.exact or not self.is_compiled
        self.places: dict[int, list[int]] = {}  # the positions of compared outputs
        self.outs: dict[int, list[Figures]] = {}
        self.seen: dict[int, Seen] = {}
        self.leaves: dict[int, dict[int, Tensor]] = {}
        self.kinds: dict[int, Counter[str]] = {}  # of the nodes of each chunk's graph
        self.batches: Any = ()
        self.later: list[tuple[Tensor, str]] = []  # tensors that f can reach after the first pass
        self.compared = False  # whether anything was
        # Asynchronous results of accelerators: chunk, whether it differs, its modules' figures.
        self._pending: list[tuple[int, Tensor, Any]] = []

    @classmethod
    def of(cls, forward: Forward, exact: bool | None) -> Verification | None:
        """The verification of a call; None if it was verified before, or if exact is False."""
        if exact is False or not forward.modes.grad or is_recorded():
            return None
        if exact:
            return cls(forward, None, forward.compares_bits)
        key = run_key(forward)
        if key.is_verified():
            return None
        result = cls(forward, key, False)
        key.mark_pending(result)
        return result

    def done(self) -> None:
        """Marks the configuration as verified, at the end of a backward pass.

        Synchronizes with an accelerator here, once for all chunks.
        """
        pending, self._pending = self._pending, []
        if pending:
            on_device = torch.stack([x.to(pending[0][1].device) for _, x, _ in pending])
            for (i, _, modules), differs in zip(pending, on_device.tolist(), strict=True):
                if differs:
                    raise self._other(i, self._where(i, modules))
        if self.run_key is not None and self.compared:
            self.run_key.mark_verified()

    def wrong(self) -> None:
        if self.run_key is not None:
            self.run_key.discard()

    @contextmanager
    def watching(self, i: int) -> Iterator[Seen]:
        """Yields lists, to which outputs of modules and coefficients are added as they run."""
        seen, first = Seen([], [], []), self.seen.get(i)

        def note_coefficient(edit: str, x: Any, variable: Any) -> None:
            seen.coefficients.append(self._coefficient(edit, x, variable))

        def note_hook(x: Any, register: Any, args: Any, kwargs: Any) -> Any:
            if HERE.note is None:
                return register(*args, **kwargs)
            hook = args[0] if args else kwargs["hook"]
            held = [self._coefficient("hook", x, cell) for x, cell in closed_over(hook)]
            seen.hooks.append(held)
            old = first.hooks[len(seen.hooks) - 1 :] if first is not None else []
            if not old or not any(bool(a.differs(b)) for a, b in zip(old[0], held, strict=False)):
                return register(hook)
            return register(self._refusing(i, hook))

        with coefficients_noted(note_coefficient), hooks_set(note_hook):
            if self.exact or (i == 0 and not self.is_compiled):
                with self._modules_noted(seen):
                    yield seen
            else:
                yield seen

    @contextmanager
    def _modules_noted(self, seen: Seen) -> Iterator[None]:
        thread = threading.get_ident()

        def note(module: Any, args: Any, out: Any) -> None:
            if threading.get_ident() == thread:
                seen.modules.append((module, self._figures(out, _SAMPLE)))

        handle = torch.nn.modules.module.register_module_forward_hook(note)
        OWN_HOOKS[0] += 1
        try:
            yield
        finally:
            handle.remove()

    def _coefficient(self, edit: str, x: Any, variable: Any) -> Coefficient:
        if isinstance(x, Tensor):
            known = self._figures([unwrapped(x)], exact=self._outputs_exactly)[0]
            return Coefficient(edit, known, lambda: None if variable is None else weakref.ref(x)())
        number = repr(x) if isinstance(x, bool | int | float | complex) else None
        return Coefficient(edit, number, lambda: variable)

    def keep(self, i: int, outs: Sequence[Any], seen: Seen, batches: Any) -> None:
        """Stores the first pass's chunk i. batches: The vmaps under which it ran."""
        self.batches, self.seen[i] = batches, seen
        self.places[i] = _differentiated(outs)
        self.outs[i] = self._figures_of_outputs(outs, i)

    def compare(
        self, i: int, outs: Any, seen: Seen, own: Any, batches: Any, anew: Callable[[], Any] | None
    ) -> None:
        """Raises if the recomputation of chunk i differs.

        own: The inputs of its graph, if the graph is compared as well.
        anew: Computes the outputs by the kernels of the first pass, if other ones computed `outs`.
        """
        if batches != self.batches:
            return  # a batch of examples is recomputed for a first pass of one
        new = self._figures_of_outputs(outs, i)
        self.compared |= list(map(len, new)) == list(map(len, self.outs[i]))
        differences = _differences(self.outs[i], new)
        if anew is not None and any(x is True for x in differences):
            differences = _differences(self.outs[i], self._figures_of_outputs(anew(), i))
        if any(x is True for x in differences):
            raise self._other(i, self._where(i, seen.modules))
        if asynchronous := [x for x in differences if isinstance(x, Tensor)]:
            self._pending.append((i, torch.stack(asynchronous).any(), seen.modules))
        if self.exact and not self._same_modules(self.seen[i].modules, seen.modules):
            raise self._other(i, self._where(i, seen.modules))
        if own is not None and torch.is_grad_enabled() and i in self.leaves:
            self._compare_leaves(i, outs, own)
        if not was_queried():
            self._compare_coefficients(i, seen.coefficients)

    # --- numbers

    def _figures_of_outputs(self, outs: Sequence[Any], i: int) -> list[Figures]:
        compared = [outs[k] for k in self.places[i]]
        return self._figures(compared, exact=self._outputs_exactly)

    def _figures(
        self, tree: Any, sample: int | None = None, exact: bool | None = None
    ) -> list[Figures]:
        leaves = [x for x in trees.flatten(tree)[0] if isinstance(x, Tensor)]
        wrapped = upstream.is_wrapped
        duals = [is_dual(x) and not wrapped(x) for x in leaves]
        pairs = zip(leaves, duals, strict=True)
        leaves = [forward_ad.unpack_dual(x).primal if dual else x for x, dual in pairs]
        leaves = [x.detach() for x in leaves]
        if exact is None:
            exact = self.exact
        return [
            _checksum(x) if self.exact or (exact and x.device.type == "cpu") else figures(x, sample)
            for x in leaves
        ]

    def _same(self, old: list[Figures], new: list[Figures]) -> bool:
        return not any(map(bool, _differences(old, new)))

    def _same_modules(self, old: Any, new: Any) -> bool:
        pairs = zip(old, new, strict=False)  # f may create modules in each call
        same = [type(a[0]) is type(b[0]) and self._same(a[1], b[1]) for a, b in pairs]
        return len(old) == len(new) and all(same)

    def _where(self, i: int, modules: Any) -> str:
        first = self.seen[i].modules
        pairs = zip(first, modules, strict=False)
        for old, new in pairs:
            if not self._same_modules([old], [new]):
                _, name = self.reached.modules.get(id(new[0]), (None, "a module"))
                return f"in {name} ({type(new[0]).__name__})"
        return "outside of its modules" if first else "(verify=True tells in which module)"

    def _other(self, i: int, where: str) -> GradtoolsError:
        return GradtoolsError(
            f"{self.caller}: chunk {i} gives other numbers when it is computed again, first "
            f"{where}. It depends on something that is neither an argument, a random stream, nor "
            "held by a module or variable that f can reach (an iterator, a file, a cache, the "
            "clock, __slots__ of an object, a tensor changed through .data), another thread draws "
            "from a random stream of f, or a kernel is not deterministic "
            "(torch.use_deterministic_algorithms). Its gradient would be wrong. Make it a buffer "
            "of a module or an argument."
        )

    def _refusing(self, i: int, hook: Any) -> Any:
        """A hook that raises if it edits the gradient."""

        @wraps(hook)
        def refusing(ct: Tensor) -> None:
            if hook(ct) is not None:
                raise self._other_coefficient(i, "a hook on a gradient")

        return refusing

    def _other_coefficient(self, i: int, edit: str) -> GradtoolsError:
        return GradtoolsError(
            f"{self.caller}: the coefficient of {edit} is another one when chunk {i} is computed "
            "again. f takes it from an iterator, a file, a cache or the clock. The gradient would "
            "be wrong. Make it a buffer of a module or an argument."
        )

    def _compare_coefficients(self, i: int, new: list[Coefficient]) -> None:
        first = self.seen[i].coefficients
        if [x.edit for x in first] == [x.edit for x in new]:
            others = [(b.edit, a.differs(b)) for a, b in zip(first, new, strict=True)]
        else:  # an edit may run once more in one of them, in a check of a rule
            others = [
                (b.edit, all(bool(a.differs(b)) for a in first if a.edit == b.edit)) for b in new
            ]
        for edit, other in others:
            if bool(other):
                raise self._other_coefficient(i, _EDITS.get(edit, edit))

    # --- graphs

    def _compare_leaves(self, i: int, outs: Any, own: Any) -> None:
        ends = {id(x) for x in own}
        stop = {x.grad_fn for x in own if isinstance(x, Tensor) and x.grad_fn is not None}
        nodes = nodes_of([y for y in outs if isinstance(y, Tensor)], stop)
        leaves = {
            id(node.variable): node.variable
            for node in nodes
            if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in ends
        }
        first = self.leaves[i]
        if leaves.keys() == first.keys():
            # Recompiled code may have other nodes.
            if self.reached.comparable and not self.is_compiled:
                self._compare_nodes(i, kinds_of(nodes))
            return
        names = {id(x): name for x, name in (*self.reached.watched, *self.later)}
        others = [x for k, x in {**first, **leaves}.items() if (k in first) != (k in leaves)]
        # Leaves that f itself creates differ in each run.
        lasting = [x for x in others if id(x) in names or isinstance(x, torch.nn.Parameter)]
        gone, new = ([x for x in lasting if (id(x) in first) == was] for was in (True, False))
        if not any(id(x) in names for x in lasting) and _shapes(gone) == _shapes(new):
            return
        if not lasting:
            return
        other = lasting[0]
        name = names.get(id(other), f"a parameter of shape {tuple(other.shape)}")
        lost = "does not reach" if id(other) in first else "also reaches"
        raise GradtoolsError(
            f"{self.caller}: chunk {i} is differentiated with respect to other tensors when it is "
            f"computed again: its graph {lost} {name}. {_KEEPS}"
        )

    def _compare_nodes(self, i: int, found: Counter[str]) -> None:
        """Raises if the graphs have other nodes, although leaves and numbers are the same."""
        if any(kind.startswith("CompiledFunction") for kind in (*self.kinds[i], *found)):
            return  # compiled in the first pass, but not in the recomputation, or vice versa
        other = (self.kinds[i] - found) + (found - self.kinds[i])
        if other:
            kind = min(other)
            raise GradtoolsError(
                f"{self.caller}: chunk {i} is differentiated through other operations when it is "
                f"computed again: its graph holds {kind} inputs {self.kinds[i][kind]} times first, "
                f"then {found[kind]} times. {_KEEPS}"
            )


def _shapes(xs: list[Tensor]) -> list[tuple[Any, ...]]:
    return sorted((tuple(x.shape), str(x.dtype)) for x in xs)


def _differentiated(outs: Sequence[Any]) -> list[int]:
    """The positions of outputs that require grad; all if none does."""
    tracked = [k for k, y in enumerate(outs) if isinstance(y, Tensor) and y.requires_grad]
    return tracked or list(range(len(outs)))


def register_own_hook(x: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """`x.register_hook(hook)` that does not count as the user's hook."""
    OWN_HOOKS[0] += 1
    return x.register_hook(hook)


def refuse_other_differentiation(in_kept_graph: list[bool], *xs: Any) -> None:
    """Hooks on xs that raise if a kept chunk graph is differentiated outside of its node.

    in_kept_graph: A cell that holds True while the node differentiates the graph.
    """

    def refuse(ct: Tensor) -> None:
        if not in_kept_graph[0]:
            raise GradtoolsError(
                "chunked: what f kept aside (in an attribute, a list, a hook) is differentiated, "
                "and of its gradient the part of an argument would be lost. Return it from f, "
                "detach it, or use keep_graphs=0."
            )

    for x in xs:
        if isinstance(x, Tensor) and x.requires_grad:
            register_own_hook(x, refuse)


def kinds_of(nodes: Iterable[Any]) -> Counter[str]:
    """Counts nodes by class and number of connected inputs, without leaves.

    All Functions of gradtools' rules count as one class.
    """
    counts = Counter[str]()
    for node in nodes:
        kind, count = type(node).__name__, sum(x is not None for x, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            home = upstream.forward_class(type(node)).__module__
            kind = "a rule" if home.startswith(_RULES) else kind
        if kind != "AccumulateGrad":
            counts[f"{kind} on {count}"] += 1
    return counts


def is_compiled(forward: Forward) -> bool:
    modules = (m for m, _ in forward.start.reached.modules.values())
    functions = forward.start.reached.functions
    return any(map(upstream.is_compiled, (forward.chunks.call.f, *functions, *modules)))


def run_key(forward: Forward) -> RunKey:
    shapes = tuple([(x.shape, x.dtype, x.requires_grad) for x in forward.tensors])
    modes, modules = forward.modes, forward.start.reached.modules.values()
    training = tuple([module.training for module, _ in modules])
    key = forward.caller, shapes, training, tuple(modes.autocast), forward.beneath, forward.count
    return RunKey.of(forward.chunks.call.f, *key)


class _WeakIdentity:
    """A weak reference that is equal only to one to the same living object."""

    def __init__(self, x: Any) -> None:
        self.of, self.number = weakref.ref(x), id(x)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _WeakIdentity) and self.of() is other.of() is not None


def _is_dead(part: Any) -> bool:
    """Whether a key refers to an object that was garbage collected."""
    if isinstance(part, tuple):
        return any(map(_is_dead, part))
    return isinstance(part, _WeakIdentity) and part.of() is None


def _identity(f: Any) -> tuple[Any, Any]:
    """The object under which f's keys are cached, and a key of what f closes over.

    A function that is created in each step (a lambda, a method) is identified by its code and its
    closure: tensors by shape and dtype, numbers by type, lists and tuples by their entries, other
    objects by identity.
    """
    if isinstance(f, MethodType):
        of, parts = _identity(f.__func__)
        return of, (parts, part_of(f.__self__))
    if isinstance(f, partial):
        of, parts = _identity(f.func)
        given = (*f.args, *f.keywords.values())
        return of, (parts, tuple(f.keywords), *[part_of(x, 0) for x in given])
    if type(f) is not FunctionType:
        return f, None
    return f.__code__, _parts(f, 0)


def _parts(f: FunctionType, depth: int) -> tuple[Any, ...]:
    cells = [contents_of(cell) for cell in f.__closure__ or ()]
    captured = (*cells, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
    return (id(f.__globals__), *[part_of(x, depth + 1) for x in captured])


def part_of(x: Any, depth: int = 0) -> Any:
    """The key of an object that a function closes over."""
    kind = type(x)
    if kind in (bool, str, type(None)):
        return x
    if isinstance(x, Tensor):
        return kind, x.shape, x.dtype, x.requires_grad
    if depth < _DEPTH and kind is FunctionType:
        return x.__code__, _parts(x, depth)
    if depth < _DEPTH and kind is MethodType:
        return part_of(x.__func__, depth + 1), part_of(x.__self__, depth + 1)
    if kind in (list, tuple) and depth < _DEPTH and len(x) <= _PARTS:
        return kind, tuple([part_of(y, depth + 1) for y in x])
    if kind in (int, float, complex, list, dict, tuple, set):
        return kind
    try:
        return _WeakIdentity(x)
    except TypeError:  # x does not support weak references
        return kind


def _verified(f: Callable[..., Any]) -> dict[Any, Callable[[], Any]]:
    """The verified and pending configurations of f."""
    try:
        return _VERIFIED.setdefault(f, {})
    except TypeError:  # f does not support weak references, or has no hash
        return {}


def is_readable(x: Tensor) -> bool:
    """Whether the values can be read: a plain, strided tensor on a real device."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    known = plain and x.layout is torch.strided and x.device.type != "meta" and not x.is_quantized
    return known and not (upstream.is_wrapped(x) or upstream.is_legacy_batched(x))


def figures(x: Tensor, sample: int | None = None) -> Figures:
    """Shape, dtype, and for each entry of the first axis the sums of moduli, weighted and plain.

    The weights are all different. An entry of the first axis is an example, so that a difference
    in a single example is detected.
    """
    aval = (x.shape, x.dtype)
    if not is_readable(x) or not x.numel():
        return aval
    with torch.no_grad():
        x = x.resolve_conj().resolve_neg()
        x = torch.view_as_real(x) if x.is_complex() else x
        rows = x.reshape(len(x) if x.ndim > 1 else 1, -1)
        if sample is not None and x.numel() > sample:
            rows = rows.reshape(1, -1)[:, :: x.numel() // sample]
        width = min(rows.shape[1], _BLOCK)
        weights = torch.arange(width, device=x.device, dtype=_wide(x))
        weights = torch.cos(weights * 1.618033988749895)
        totals = []
        for some in rows.split(max(1, _BLOCK // width)):
            parts = [_sums(part, weights) for part in some.split(width, 1)]
            totals.append(sum(parts[1:], parts[0]))
        total = torch.cat(totals, 1)
        # On an accelerator it stays there, without synchronization, until it is compared.
        return *aval, total.numpy().copy() if total.device.type == "cpu" else total


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.device.type != "mps" else torch.float32


def _sums(part: Tensor, weights: Tensor) -> Tensor:
    """For each row the sums of the moduli, of the weighted entries, and of the entries."""
    wide = part.to(_wide(part))
    if part.dtype == torch.float64:
        wide = wide * 2.0**-64  # so that sums do not overflow
    wide = wide.nan_to_num(nan=1.25, posinf=1.5, neginf=-1.75)
    return torch.stack([wide.abs().sum(1), wide @ weights[: wide.shape[1]], wide.sum(1)])


def is_near(a: Figures, b: Figures) -> bool:
    """Whether two figures are equal up to rounding; checksums are compared exactly."""
    return not bool(differ(a, b))


def _differences(old: list[Figures], new: list[Figures]) -> list[bool | Tensor]:
    if len(old) != len(new):
        return [True]
    return [differ(a, b) for a, b in zip(old, new, strict=True)]


def differ(a: Figures, b: Figures) -> bool | Tensor:
    """Whether two figures differ by more than rounding: on an accelerator as a tensor there."""
    if len(a) != len(b):
        return False  # one of them could not be read, as under vmap
    if a[:2] != b[:2] or len(a) == 2 or isinstance(a[2], int):
        return bool(a != b)
    dtype = a[1]
    inexact = dtype.is_floating_point or dtype.is_complex
    slack = torch.finfo(dtype).eps ** (2 / 3) if inexact else 0.0
    if isinstance(a[2], Tensor):
        return (a[2] - b[2]).abs().le(slack * torch.maximum(a[2][0], b[2][0])).all().logical_not()
    return not (np.abs(a[2] - b[2]) <= slack * np.maximum(a[2][0], b[2][0])).all()


def _checksum(x: Tensor) -> Figures:
    """Shape, dtype and a checksum of all bits."""
    if not is_readable(x) or not x.numel():
        return x.shape, x.dtype
    plain = x.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return x.shape, x.dtype, zlib.crc32(plain.view(torch.uint8).numpy().tobytes())
