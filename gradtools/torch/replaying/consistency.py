"""Verifies that a recomputation equals the first pass, in its outputs and in the leaves reached.

Before a function runs again, the state that it can reach is restored (`state`). Other state may
differ, which this module detects. The first pass stores checksums ("figures") of each chunk's
outputs, and the leaves that its graph reaches; the recomputation must have the same. This is done
in the first backward pass for each `RunKey`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.coefficients import HERE, closed_over, coefficients_noted
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_wrapped, unwrapped
from gradtools.torch.open_derivatives import is_spent
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.patches import hooks_set
from gradtools.torch.replaying.checksums import Figures, checksum, differ, differences_of, figures
from gradtools.torch.replaying.guards import is_recorded, was_queried
from gradtools.torch.replaying.run_keys import RunKey, is_compiled, run_key
from gradtools.torch.replaying.slicing import Entries, primal_of

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

Tensor = torch.Tensor
left_to_python(__name__)

_KEEPS = (
    "f keeps something from one call to the next (a cached function of a weight, an attached "
    "tensor); compute it in each call, or pass it to f as an argument. The gradient would be wrong."
)
_EDITS = {"scale_gradient": "scale_gradient or reverse_gradient"}  # which share a rule
_HELD = " that holds "  # between a node's name and its numbers
_PRODUCTS = ("MulBackward0", "DivBackward0")
_RULES = ("gradtools.torch.rules.", "gradtools.torch.hooks")  # the modules of rules' Functions
_AccumulateGrad, _first_of = upstream.AccumulateGrad, itemgetter(0)


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


@dataclass(eq=False)
class ChunkRecord:
    """What is kept of one computation of a chunk, to compare the other one with.

    Attributes:
        coefficients: Those of edits.
        hooks: The numbers and tensors that hooks on tensors close over.
        places: The positions of the compared outputs.
        figures: The figures of these outputs.
        leaves: The leaves that the graph reaches, by their ids; None without a graph.
        kinds: The kinds of the graph's nodes.
    """

    coefficients: list[Coefficient] = field(default_factory=list)
    hooks: list[list[Coefficient]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    leaves: dict[int, Tensor] | None = None
    kinds: Counter[str] = field(default_factory=Counter)


class Verification:
    """The records of one call's first pass, to compare recomputations with.

    exact: Whether to compare bits on accelerators as well, where results may differ by rounding.
    """

    def __init__(self, forward: Forward, key: RunKey | None, exact: bool) -> None:
        self.caller, self.reached = forward.caller, forward.start.reached
        self.run_key, self.exact = key, exact
        self.is_compiled = is_compiled(forward)
        # Code that is compiled again, by torch.compile or TorchScript, may have other nodes.
        scripted = any(
            isinstance(m, torch.jit.ScriptModule) for m, _ in self.reached.modules.values()
        )
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

        Synchronizes with an accelerator here, once for all chunks.
        """
        pending, self._pending = self._pending, []
        if pending:
            on_device = torch.stack([x.to(pending[0][1].device) for _, x in pending])
            for (i, _), differs in zip(pending, on_device.tolist(), strict=True):
                if differs:
                    raise self._other(i)
        if self.run_key is not None and self.compared:
            self.run_key.mark_verified()

    def wrong(self) -> None:
        if self.run_key is not None:
            self.run_key.discard()

    @contextmanager
    def watching(self, i: int) -> Iterator[ChunkRecord]:
        """Yields a record, to which the coefficients of edits and hooks are added."""
        seen, first = ChunkRecord(), self.first.get(i)

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
            yield seen

    def _coefficient(self, edit: str, x: Any, variable: Any) -> Coefficient:
        if isinstance(x, Tensor):
            known = self._figures(unwrapped(x))
            return Coefficient(edit, known, lambda: None if variable is None else weakref.ref(x)())
        number = repr(x) if isinstance(x, bool | int | float | complex) else None
        return Coefficient(edit, number, lambda: variable)

    def keep(self, i: int, outs: Sequence[Any], seen: ChunkRecord, batches: Any) -> None:
        """Stores the first pass's chunk i. batches: The vmaps under which it ran."""
        self.batches, self.first[i] = batches, seen
        seen.places = _differentiated(outs)
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
            self._compare_coefficients(i, seen.coefficients)
        if own is not None and torch.is_grad_enabled() and first.leaves is not None:
            self._compare_graphs(i, first, ChunkGraph.of(outs, own))

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
        first = self.first[i].coefficients
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

    def _compare_graphs(self, i: int, first: ChunkRecord, new: ChunkGraph) -> None:
        """Raises if the graph reaches other leaves, or has other nodes."""
        old, leaves = first.leaves or {}, new.leaves
        if leaves.keys() == old.keys():
            if self._compares_nodes:
                self._compare_nodes(i, first.kinds, kinds_of(new.nodes))
            return
        names = {id(x): name for x, name in (*self.reached.watched, *self.later)}
        others = [x for k, x in {**old, **leaves}.items() if (k in old) != (k in leaves)]
        # Leaves that f itself creates differ in each run.
        lasting = [x for x in others if id(x) in names or isinstance(x, torch.nn.Parameter)]
        gone, made = ([x for x in lasting if (id(x) in old) == was] for was in (True, False))
        is_replaced = not any(id(x) in names for x in lasting) and _shapes(gone) == _shapes(made)
        if not lasting or is_replaced:
            return
        other = lasting[0]
        name = names.get(id(other), f"a parameter of shape {tuple(other.shape)}")
        lost = "does not reach" if id(other) in old else "also reaches"
        raise GradtoolsError(
            f"{self.caller}: chunk {i} is differentiated with respect to other tensors when it is "
            f"computed again: its graph {lost} {name}. {_KEEPS}"
        )

    def _compare_nodes(self, i: int, first: Counter[str], new: Counter[str]) -> None:
        """Raises if the graphs have other nodes, although leaves and numbers are the same."""
        if any(kind.startswith("CompiledFunction") for kind in (*first, *new)):
            return  # compiled in the first pass, but not in the recomputation, or vice versa
        other = (first - new) + (new - first)
        if other:
            kind = min(other)
            if _HELD in kind:
                raise self._other_coefficient(i, f"the node {kind.split(_HELD)[0]}")
            raise GradtoolsError(
                f"{self.caller}: chunk {i} is differentiated through other operations when it is "
                f"computed again: its graph holds {kind} inputs {first[kind]} times first, "
                f"then {new[kind]} times. {_KEEPS}"
            )


class ChunkGraph(NamedTuple):
    """The graph of a chunk's outputs, from its inputs on.

    Attributes:
        nodes: All of its nodes.
        leaves: The leaves that it reaches besides the inputs, by their ids.
    """

    nodes: list[Any]
    leaves: dict[int, Tensor]

    @classmethod
    def of(cls, outs: Entries, inputs: Entries) -> ChunkGraph:
        ends, leaves, nodes = {*map(id, inputs)}, dict[int, Tensor](), list[Any]()
        seen = {None, *[x.grad_fn for x in inputs if isinstance(x, Tensor)]}
        tracked = [y for y in outs if isinstance(y, Tensor) and y.requires_grad]
        todo: list[Any] = [y.grad_fn or get_gradient_edge(y).node for y in tracked]
        for node in todo:  # appended to below
            if node in seen:
                continue
            seen.add(node)
            nodes.append(node)
            if type(node) is not _AccumulateGrad:
                todo += map(_first_of, node.next_functions)
            elif id(node.variable) not in ends and not is_spent(node.variable):
                leaves[id(node.variable)] = node.variable
        return cls(nodes, leaves)


def _shapes(xs: list[Tensor]) -> list[tuple[Any, ...]]:
    return sorted((tuple(x.shape), str(x.dtype)) for x in xs)


def _is_number(x: Any) -> bool:
    """Whether x is a scalar on the CPU, as PyTorch makes of a Python number."""
    return type(x) is Tensor and x.ndim == 0 and x.device.type == "cpu" and not is_wrapped(x)


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

    All Functions of gradtools' rules count as one class. A user's Function counts with the numbers
    that its ctx holds, and a product with its scalar factors: the outputs need not depend on them.
    """
    counts = Counter[str]()
    for node in nodes:
        kind, count = type(node).__name__, sum(x is not None for x, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            home = upstream.forward_class(type(node)).__module__
            numbers = [x for x in vars(node).values() if type(x) in (int, float, complex)]
            if home.startswith(_RULES):
                kind = "a rule"
            elif numbers and not home.startswith(("torch.", "gradtools.")):
                kind = f"{kind}{_HELD}{numbers}"
        elif kind in _PRODUCTS:
            factors = filter(_is_number, upstream.factors_of(node))
            with upstream.disable_current_modes():  # which would see the reading of a number
                kind += "".join([f"{_HELD}{x.item()}" for x in factors])
        if kind != "AccumulateGrad":
            counts[f"{kind} on {count}"] += 1
    return counts
