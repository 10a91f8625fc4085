"""Verifies that a recomputation equals the first pass, in its outputs and in the leaves reached.

Before a function runs again, the state that it can reach is restored (`state`). Other state may
differ, which this module detects. The first pass stores checksums ("figures") of each chunk's
outputs, and the leaves that its graph reaches; the recomputation must have the same. This is done
in the first backward pass for each `RunKey`: the function, the shapes and dtypes of its arguments,
the training mode of its modules, autocast.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent, nodes_of
from gradtools.torch.coefficients import HERE, closed_over, coefficients_noted
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_wrapped, unwrapped
from gradtools.torch.operation_marks import OWN_HOOKS, is_recorded
from gradtools.torch.patches import hooks_set
from gradtools.torch.replaying.recomputing import (
    Entries,
    primal_of,
    tensors_of,
    was_queried,
)
from gradtools.torch.snapshots import contents_of, read_together

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

Tensor = torch.Tensor
Figures = tuple[Any, ...]
left_to_python(__name__)

_BLOCK = 1 << 18  # entries that are summed at a time
_MOST_KEYS = 256  # remembered for one function, if each batch has another shape
_PARTS = 64  # the most entries of a list or tuple in a key
_DEPTH = 3  # of nested closures in a key
_KEEPS = (
    "f keeps something from one call to the next (a cached function of a weight, an attached "
    "tensor); compute it in each call, or pass it to f as an argument. The gradient would be wrong."
)
_EDITS = {"scale_gradient": "scale_gradient or reverse_gradient"}  # which share a rule
_PRODUCTS = ("MulBackward0", "DivBackward0")
_RULES = ("gradtools.torch.rules.", "gradtools.torch.hooks")  # the modules of rules' Functions
_AccumulateGrad = upstream.AccumulateGrad


class Coefficient(NamedTuple):
    """A coefficient of an edit."""

    edit: str  # its name
    figures: Any  # the checksum, or a number; None if it is something else
    variable: Callable[[], Any]  # returns what holds it; both passes may share that

    def differs(self, new: Coefficient) -> bool | Tensor:
        same = self.variable()
        if same is not None and same is new.variable():
            return False  # such as a count of calls
        pair = self.figures, new.figures
        if all(isinstance(x, tuple) for x in pair):
            return differ(*pair)
        return None not in pair and bool(pair[0] != pair[1])


class NodeKind(NamedTuple):
    """What is compared of a node of autograd's graph."""

    name: str  # of its class; all Functions of gradtools' rules count as one class
    # The numbers that a user's Function holds in its ctx, or the scalar factors of a product:
    # outputs need not depend on them.
    numbers: str
    inputs: int  # how many of them are connected

    @classmethod
    def of(cls, node: Any) -> NodeKind:
        name, numbers = type(node).__name__, ""
        if isinstance(node, BackwardCFunction):
            home = upstream.forward_class(type(node)).__module__
            held = [x for x in vars(node).values() if type(x) in (int, float, complex)]
            if home.startswith(_RULES):
                name = "a rule"
            elif held and not home.startswith(("torch.", "gradtools.")):
                numbers = str(held)
        elif name in _PRODUCTS:
            factors = [x for x in upstream.factors_of(node) if type(x) is Tensor]
            scalars = [x for x in factors if x.ndim == 0 and x.device.type == "cpu"]
            with upstream.disable_current_modes():  # which would see the reading of a number
                numbers = " and ".join([str(x.item()) for x in scalars if not is_wrapped(x)])
        return cls(name, numbers, sum(x is not None for x, _ in node.next_functions))

    def __str__(self) -> str:
        held = f" that holds {self.numbers}" if self.numbers else ""
        return f"{self.name}{held} on {self.inputs}"


@dataclass(eq=False)
class ChunkRecord:
    """What is kept of one computation of a chunk, to compare the other one with."""

    coefficients: list[Coefficient] = field(default_factory=list)  # of edits
    hooks: list[list[Coefficient]] = field(default_factory=list)  # what hooks close over
    places: list[int] = field(default_factory=list)  # the positions of the compared outputs
    figures: list[Figures] = field(default_factory=list)  # of these outputs
    leaves: dict[int, Tensor] | None = None  # of the graph, by their ids; None without a graph
    kinds: Counter[NodeKind] = field(default_factory=Counter)  # of the graph's other nodes
    is_packed: bool = False  # whether saved tensors hooks packed what the nodes saved

    def note_graph(self, nodes: list[Any], leaves: dict[int, Tensor], is_packed: bool) -> None:
        counted = [NodeKind.of(node) for node in nodes if type(node) is not _AccumulateGrad]
        self.leaves, self.kinds, self.is_packed = leaves, Counter(counted), is_packed


class Verification:
    """The records of one call's first pass, to compare recomputations with.

    exact: Whether to compare bits on accelerators as well, where results may differ by rounding.
    """

    def __init__(self, forward: Forward, key: RunKey | None, exact: bool) -> None:
        self.caller, self.reached = forward.caller, forward.start.reached
        self.run_key, self.exact = key, exact
        self.is_compiled = is_compiled(forward)
        # Code that is compiled again, by torch.compile or TorchScript, may have other nodes.
        modules = self.reached.modules.values()
        scripted = any(isinstance(m, torch.jit.ScriptModule) for m, _ in modules)
        self._compares_nodes = not (self.is_compiled or scripted)
        self.first: dict[int, ChunkRecord] = {}  # of the first pass, by chunk
        self.batches: Any = ()
        self.later: list[tuple[Tensor, str]] = []  # tensors that f can reach after the first pass
        self.compared = False  # whether anything was
        # Asynchronous results of accelerators: the chunk, and whether it differs.
        self._pending: list[tuple[int, Tensor]] = []

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

        It waits for accelerators here, once for all chunks.
        """
        pending, self._pending = self._pending, []
        differing = read_together([x for _, x in pending])
        for (i, _), differs in zip(pending, differing, strict=True):
            if differs:
                raise self._other(i)
        if self.run_key is not None and self.compared:
            self.run_key.mark_verified()

    @contextmanager
    def watching(self, i: int) -> Iterator[ChunkRecord]:
        """Yields a record, to which the coefficients of edits and hooks are added."""
        seen, first = ChunkRecord(), self.first.get(i)

        def coefficient(edit: str, x: Any, variable: Any) -> Coefficient:
            if isinstance(x, Tensor):
                holder: Any = (lambda: None) if variable is None else weakref.ref(x)
                return Coefficient(edit, self._figures(unwrapped(x)), holder)
            number = repr(x) if isinstance(x, bool | int | float | complex) else None
            return Coefficient(edit, number, lambda: variable)

        def note_hook(x: Any, register: Any, args: Any, kwargs: Any) -> Any:
            if HERE.note is None:
                return register(*args, **kwargs)
            hook = args[0] if args else kwargs["hook"]
            held = [coefficient("hook", x, cell) for x, cell in closed_over(hook)]
            seen.hooks.append(held)
            old = first.hooks[len(seen.hooks) - 1 :] if first is not None else []
            if not old or not any(bool(a.differs(b)) for a, b in zip(old[0], held, strict=False)):
                return register(hook)

            @wraps(hook)
            def refusing_an_edit(ct: Tensor) -> None:
                if hook(ct) is not None:
                    raise self._other_coefficient(i, "a hook on a gradient")

            return register(refusing_an_edit)

        note_edit = lambda *edit: seen.coefficients.append(coefficient(*edit))
        with coefficients_noted(note_edit), hooks_set(note_hook):
            yield seen

    def keep(self, i: int, outs: Sequence[Any], seen: ChunkRecord, batches: Any) -> None:
        """Stores the first pass's chunk i. batches: The vmaps under which it ran."""
        self.batches, self.first[i] = batches, seen
        tracked = [k for k, y in enumerate(outs) if isinstance(y, Tensor) and y.requires_grad]
        seen.places = tracked or list(range(len(outs)))
        seen.figures = self._figures_of_outputs(outs, i)

    def compare(
        self,
        i: int,
        outs: Any,
        seen: ChunkRecord,
        own: Any,
        batches: Any,
        again: Callable[[], Any] | None,
    ) -> None:
        """Raises if the recomputation of chunk i differs.

        own: The inputs of its graph, if the graph is compared as well.
        again: Computes the outputs by the kernels of the first pass, if other ones computed `outs`.
        """
        if batches != self.batches:
            return  # a batch of examples is recomputed for a first pass of one
        first, new = self.first[i], self._figures_of_outputs(outs, i)
        self.compared |= list(map(len, new)) == list(map(len, first.figures))
        differences = differences_of(first.figures, new)
        if again is not None and any(x is True for x in differences):
            differences = differences_of(first.figures, self._figures_of_outputs(again(), i))
        if any(x is True for x in differences):
            raise self._other(i)
        if asynchronous := [x for x in differences if isinstance(x, Tensor)]:
            self._pending.append((i, torch.stack(asynchronous).any()))
        if not was_queried():
            old, later = first.coefficients, seen.coefficients
            # An edit may run once more in one of them, in a check of a rule.
            same_edits = [x.edit for x in old] == [x.edit for x in later]
            for k, x in enumerate(later):
                known = [old[k]] if same_edits else [a for a in old if a.edit == x.edit]
                if all(bool(a.differs(x)) for a in known):
                    raise self._other_coefficient(i, _EDITS.get(x.edit, x.edit))
        if own is not None and torch.is_grad_enabled() and first.leaves is not None:
            is_packed = upstream.saved_tensors_hooks_on(False) is not None
            seen.note_graph(*graph_of(outs, own), is_packed)
            self._compare_graphs(i, first, seen)

    # --- numbers

    def _figures_of_outputs(self, outs: Sequence[Any], i: int) -> list[Figures]:
        compared = [outs[k] for k in self.first[i].places]
        return [self._figures(x) for x in compared if isinstance(x, Tensor)]

    def _figures(self, x: Tensor) -> Figures:
        x = primal_of(x).detach() if not is_wrapped(x) else x.detach()
        # CPU kernels are deterministic, but compiled code may be recompiled.
        exact = self.exact or (x.device.type == "cpu" and not self.is_compiled)
        return checksum(x) if exact else figures(x)

    def _other(self, i: int) -> GradtoolsError:
        return GradtoolsError(
            f"{self.caller}: chunk {i} gives other numbers when it is computed again. It depends "
            "on something that is neither an argument, a random stream, nor held by a module or "
            "variable that f can reach (an iterator, a file, a cache, the clock, __slots__ of an "
            "object, a tensor changed through .data), another thread draws from a random stream of "
            "f, or a kernel is not deterministic (torch.use_deterministic_algorithms). Its "
            "gradient would be wrong. Make it a buffer of a module or an argument."
        )

    def _other_coefficient(self, i: int, edit: str) -> GradtoolsError:
        return GradtoolsError(
            f"{self.caller}: the coefficient of {edit} is another one when chunk {i} is computed "
            "again. f takes it from an iterator, a file, a cache or the clock. The gradient would "
            "be wrong. Make it a buffer of a module or an argument."
        )

    # --- graphs

    def _compare_graphs(self, i: int, first: ChunkRecord, new: ChunkRecord) -> None:
        """Raises if the graph reaches other leaves, or has other nodes."""
        old, leaves = first.leaves or {}, new.leaves or {}
        if leaves.keys() == old.keys():
            if self._compares_nodes:
                self._compare_nodes(i, first, new)
            return
        names = {id(x): name for x, name in (*self.reached.watched, *self.later)}
        others = [x for k, x in {**old, **leaves}.items() if (k in old) != (k in leaves)]
        # Leaves that f itself creates differ in each run.
        lasting = [x for x in others if id(x) in names or isinstance(x, torch.nn.Parameter)]
        gone, made = (
            sorted((tuple(x.shape), str(x.dtype)) for x in lasting if (id(x) in old) == was)
            for was in (True, False)
        )
        is_replaced = not any(id(x) in names for x in lasting) and gone == made
        if not lasting or is_replaced:
            return
        other = lasting[0]
        name = names.get(id(other), f"a parameter of shape {tuple(other.shape)}")
        lost = "does not reach" if id(other) in old else "also reaches"
        raise GradtoolsError(
            f"{self.caller}: chunk {i} is differentiated with respect to other tensors when it is "
            f"computed again: its graph {lost} {name}. {_KEEPS}"
        )

    def _compare_nodes(self, i: int, first: ChunkRecord, new: ChunkRecord) -> None:
        """Raises if the graphs have other nodes, although leaves and numbers are the same."""
        old, kinds = first.kinds, new.kinds
        if any(kind.name.startswith("CompiledFunction") for kind in (*old, *kinds)):
            return  # compiled in the first pass, but not in the recomputation, or vice versa
        if first.is_packed != new.is_packed:  # hooks may have packed the factors of products
            bare = lambda kind: kind._replace(numbers="") if kind.name in _PRODUCTS else kind
            old, kinds = (Counter([*map(bare, each.elements())]) for each in (old, kinds))
        other = (old - kinds) + (kinds - old)
        if other:
            kind = min(other)
            if kind.numbers:
                raise self._other_coefficient(i, f"the node {kind.name}")
            raise GradtoolsError(
                f"{self.caller}: chunk {i} is differentiated through other operations when it is "
                f"computed again: its graph holds {kind} inputs {old[kind]} times first, "
                f"then {kinds[kind]} times. {_KEEPS}"
            )


def graph_of(outs: Entries, inputs: Entries) -> tuple[list[Any], dict[int, Tensor]]:
    """The nodes of the outputs' graph from the inputs on, and its other leaves, by their ids."""
    ends, own = {x.grad_fn for x in tensors_of(inputs)}, {*map(id, inputs)}
    nodes = [node for node in nodes_of(tensors_of(outs), ends) if node not in ends]
    leaves = [node.variable for node in nodes if type(node) is _AccumulateGrad]
    return nodes, {id(x): x for x in leaves if id(x) not in own and not is_spent(x)}


def register_own_hook(x: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """`x.register_hook(hook)` that does not count as the user's hook."""
    OWN_HOOKS[0] += 1
    return x.register_hook(hook)


# --- checksums of tensors ("figures"): exact ones, and sums that tolerate rounding ---------------


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
        width, dtype = min(rows.shape[1], _BLOCK), torch.float64
        dtype = torch.float32 if x.device.type == "mps" else dtype
        weights = torch.cos(torch.arange(width, device=x.device, dtype=dtype) * 1.618033988749895)
        totals = []
        for some in rows.split(max(1, _BLOCK // width)):
            parts = list[Tensor]()
            for part in some.split(width, 1):
                wide = part.to(dtype)
                if part.dtype == torch.float64:
                    wide = wide * 2.0**-64  # so that sums do not overflow
                wide = wide.nan_to_num(nan=1.25, posinf=1.5, neginf=-1.75)
                weighted = wide @ weights[: wide.shape[1]]
                parts.append(torch.stack([wide.abs().sum(1), weighted, wide.sum(1)]))
            totals.append(sum(parts[1:], parts[0]))
        sums = torch.cat(totals, 1)
        # On an accelerator they stay there, without synchronization, until they are compared.
        return *aval, sums.numpy().copy() if sums.device.type == "cpu" else sums


def differences_of(old: list[Figures], new: list[Figures]) -> list[bool | Tensor]:
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


def checksum(x: Tensor) -> Figures:
    """Shape, dtype and a checksum of all bits."""
    if not is_readable(x) or not x.numel():
        return x.shape, x.dtype
    plain = x.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return x.shape, x.dtype, zlib.crc32(plain.view(torch.uint8).numpy().tobytes())


# --- the configurations in which functions run ---------------------------------------------------


VERIFIED: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The verified and pending configurations of functions."""


class RunKey:
    """The configuration in which a function runs, and whether its recomputation was verified.

    known: The verified and pending configurations of the function.
    """

    def __init__(self, known: dict[Any, Callable[[], Any]], key: tuple[Any, ...]) -> None:
        self._known, self._key = known, key

    @classmethod
    def of(cls, f: Callable[..., Any], *key: Any) -> RunKey:
        """The key of f, with further parts `key`."""
        own = f
        while isinstance(own, MethodType | partial):
            own = own.__func__ if isinstance(own, MethodType) else own.func
        try:  # a function's configurations are stored with its code
            of = own.__code__ if type(own) is FunctionType else own
            known = VERIFIED.setdefault(of, {})
        except TypeError:  # f does not support weak references, or has no hash
            known = {}
        return cls(known, (*key, part_of(f)))

    def for_aspect(self, what: str) -> RunKey:
        """A key of the same configuration for another property than equal numbers."""
        return RunKey(self._known, (what, self._key))

    def is_verified(self) -> bool:
        return self._known.get(self._key, lambda: None)() is not None

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


def is_compiled(forward: Forward) -> bool:
    modules = (m for m, _ in forward.start.reached.modules.values())
    functions = forward.start.reached.functions
    return any(map(upstream.is_compiled, (forward.chunks.call.f, *functions, *modules)))


def run_key(forward: Forward) -> RunKey:
    shapes = tuple([(x.shape, x.dtype, x.requires_grad) for x in forward.tensors])
    training = tuple([m.training for m, _ in forward.start.reached.modules.values()])
    key = forward.caller, shapes, training, tuple(forward.modes.autocast)
    return RunKey.of(forward.chunks.call.f, *key, forward.in_functorch, forward.count)


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


def part_of(x: Any, depth: int = 0) -> Any:
    """The key of a function, or of an object that one closes over.

    A function that is created in each step (a lambda, a method) has the key of its code and of its
    closure: tensors by shape and dtype, numbers by type, lists and tuples by their entries, other
    objects by identity.
    """
    kind = type(x)
    parts: tuple[Any, ...] = ()
    if kind in (bool, str, type(None)):
        return x
    if isinstance(x, Tensor):
        return kind, x.shape, x.dtype, x.requires_grad
    if depth > _DEPTH:
        pass
    elif kind is FunctionType:
        defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        parts = x.__code__, *map(contents_of, x.__closure__ or ()), *defaults
    elif kind is MethodType:
        parts = x.__func__, x.__self__
    elif isinstance(x, partial):
        parts = x.func, *x.args, *x.keywords, *x.keywords.values()
    elif kind in (list, tuple) and len(x) <= _PARTS:
        parts = tuple(x)
    if parts:
        space = id(x.__globals__) if kind is FunctionType else None
        return kind, space, *[part_of(y, depth + 1) for y in parts]
    if kind in (int, float, complex, list, dict, tuple, set):
        return kind
    try:
        return _WeakIdentity(x)
    except TypeError:  # x does not support weak references
        return kind
