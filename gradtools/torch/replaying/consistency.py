"""A recomputation compared with the first pass: figures of the outputs, and the leaves reached.

What a function's result depends on is put back before it runs again (`state`), as far as it can
be reached; that the rest made no difference is seen here. Of each chunk the first pass keeps
figures of its outputs, a few numbers each, and the leaves that its graph reaches; the pass that
computes it again must give the same. That is asked of the first backward pass in each way to run:
of a function, the shapes and dtypes of its arguments, the modes of its modules, autocast.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.compiling import left_to_python, nodes_of
from gradtools.torch.functorch_wrappers import is_dual
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.replaying.guards import is_recorded
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
_WAYS = 256  # of one function that are remembered, where each batch has another shape
_PARTS = 64  # of a list or tuple that are looked at
_DEPTH = 3  # of functions that functions close over, by which they are known
_RULES = ("gradtools.torch.rules.", "gradtools.torch.hooks")  # where Functions of rules are
_BLOCK = 1 << 18  # entries that are summed at a time
_SAMPLE = 1 << 16  # entries of a module's output that are looked at, to say where it differs


class Way:
    """One way to run a function: whether a second run was seen to be right, or is about to be.

    known: What is known of the function's ways.
    """

    def __init__(self, known: dict[Any, Callable[[], Any]], key: tuple[Any, ...]) -> None:
        self._known, self._key = known, key

    @classmethod
    def of(cls, f: Callable[..., Any], *key: Any) -> Way:
        """That in which f runs now. key: What besides f makes it another one."""
        f, parts = _looks(f)
        return cls(_verified(f), (*key, parts))

    def about(self, what: str) -> Way:
        """The same, of which something else is to be known."""
        return Way(self._known, (what, self._key))

    def is_known(self) -> bool:
        known = self._known.get(self._key)
        return known is not None and known() is not None

    def wait_for(self, looking: Any) -> None:
        """Notes that an object looks at the second run: while it lives, none else needs to."""
        known = self._known
        for old, value in list(known.items()):
            if value() is None or _is_gone(old):
                known.pop(old, None)
        if len(known) >= _WAYS:
            known.clear()
        known[self._key] = weakref.ref(looking)

    def is_right(self) -> None:
        self._known[self._key] = lambda: True

    def is_wrong(self) -> None:
        self._known.pop(self._key, None)


class Verification:
    """What the first pass of one call gave, for those that compute it again.

    exact: Whether to compare bits, at every chunk and module. Otherwise outputs on another device
        than the CPU may differ by rounding, and modules are looked at for the first chunk only.
    """

    def __init__(self, forward: Forward, way: Way | None, exact: bool) -> None:
        self.caller, self.reached = forward.caller, forward.start.reached
        self.way, self.exact = way, exact
        self.is_compiled = is_compiled(forward)  # and would be compiled anew for a hook
        # Kernels are deterministic there; compiled code may be another the second time.
        self._outputs_exactly = self.exact or (forward.compares_bits and not self.is_compiled)
        self.places: dict[int, list[int]] = {}  # among a chunk's outputs, of what is compared
        self.outs: dict[int, list[Figures]] = {}
        self.modules: dict[int, list[tuple[torch.nn.Module, list[Figures]]]] = {}
        self.leaves: dict[int, dict[int, Tensor]] = {}
        self.kinds: dict[int, Counter[str]] = {}  # of the nodes of each chunk's graph
        self.batches: Any = ()
        self.held: list[tuple[Tensor, str]] = []  # what f can reach after the first pass besides
        self.compared = False  # whether anything was
        # Of chunks whether they differ, on an accelerator, and what their modules gave.
        self._answers: list[tuple[int, Tensor, Any]] = []

    @classmethod
    def of(cls, forward: Forward, exact: bool | None) -> Verification | None:
        """That of a call; None where it need not be verified again, or never (exact=False)."""
        if exact is False or not forward.modes.grad or is_recorded():
            return None
        if exact:
            return cls(forward, None, forward.compares_bits)
        way = way_of(forward)
        if way.is_known():
            return None
        result = cls(forward, way, False)
        way.wait_for(result)
        return result

    def done(self) -> None:
        """Notes that a backward pass in this way was seen to be right.

        An accelerator is waited for here, once for all chunks.
        """
        answers, self._answers = self._answers, []
        if answers:
            differ_there = torch.stack([x.to(answers[0][1].device) for _, x, _ in answers])
            for (i, _, modules), differs in zip(answers, differ_there.tolist(), strict=True):
                if differs:
                    raise self._other(i, self._where(i, modules))
        if self.way is not None and self.compared:
            self.way.is_right()

    def wrong(self) -> None:
        if self.way is not None:
            self.way.is_wrong()

    @contextmanager
    def watching(self, i: int) -> Iterator[list[tuple[torch.nn.Module, list[Figures]]]]:
        """What modules give inside, in their order."""
        seen: list[tuple[torch.nn.Module, list[Figures]]] = []
        if not (self.exact or (i == 0 and not self.is_compiled)):
            yield seen
            return
        thread = threading.get_ident()

        def note(module: Any, args: Any, out: Any) -> None:
            if threading.get_ident() == thread:
                seen.append((module, self._figures(out, _SAMPLE)))

        handle = torch.nn.modules.module.register_module_forward_hook(note)
        OWN_HOOKS[0] += 1
        try:
            yield seen
        finally:
            handle.remove()

    def keep(self, i: int, outs: Sequence[Any], modules: Any, batches: Any) -> None:
        """What the first pass gave at chunk i. batches: Of vmap, that it ran under."""
        self.batches, self.modules[i] = batches, modules
        self.places[i] = _differentiated(outs)
        self.outs[i] = self._figures_of_outputs(outs, i)

    def compare(self, i: int, outs: Any, modules: Any, own: Any, batches: Any) -> None:
        """Raises if chunk i, computed again, is another one.

        own: The inputs of its graph, where that is to be compared as well.
        """
        if batches != self.batches:
            return  # a batch is computed where one was alone before
        result = self._figures_of_outputs(outs, i)
        self.compared |= list(map(len, result)) == list(map(len, self.outs[i]))
        answers = _differences(self.outs[i], result)
        if any(x is True for x in answers):
            raise self._other(i, self._where(i, modules))
        if waiting := [x for x in answers if isinstance(x, Tensor)]:
            self._answers.append((i, torch.stack(waiting).any(), modules))
        if self.exact and not self._same_modules(self.modules[i], modules):
            raise self._other(i, self._where(i, modules))
        if own is not None and torch.is_grad_enabled() and i in self.leaves:
            self._compare_leaves(i, outs, own)

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
        pairs = zip(old, new, strict=False)  # f may make modules anew
        same = [type(a[0]) is type(b[0]) and self._same(a[1], b[1]) for a, b in pairs]
        return len(old) == len(new) and all(same)

    def _where(self, i: int, modules: Any) -> str:
        pairs = zip(self.modules[i], modules, strict=False)
        for old, new in pairs:
            if not self._same_modules([old], [new]):
                _, name = self.reached.modules.get(id(new[0]), (None, "a module"))
                return f"in {name} ({type(new[0]).__name__})"
        return (
            "outside of its modules" if self.modules[i] else "(verify=True tells in which module)"
        )

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

    # --- graphs

    def _compare_leaves(self, i: int, outs: Any, own: Any) -> None:
        ends = {id(x) for x in own}
        stop = {x.grad_fn for x in own if isinstance(x, Tensor) and x.grad_fn is not None}
        nodes = nodes_of([y for y in outs if isinstance(y, Tensor)], stop)
        result = {
            id(node.variable): node.variable
            for node in nodes
            if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in ends
        }
        first = self.leaves[i]
        if result.keys() == first.keys():
            # Compiled code gets other nodes while it is optimised.
            if self.reached.comparable and not self.is_compiled:
                self._compare_nodes(i, kinds_of(nodes))
            return
        names = {id(x): name for x, name in (*self.reached.watched, *self.held)}
        others = [x for k, x in {**first, **result}.items() if (k in first) != (k in result)]
        # A leaf that f makes anew is another one each time.
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
        """Of the same leaves and numbers there may still be less of a graph."""
        if any(kind.startswith("CompiledFunction") for kind in (*self.kinds[i], *found)):
            return  # f is compiled where it is called from compiled code, and not in its backward
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
    """The places of those on which the gradient depends; what a clock says does not matter."""
    result = [k for k, y in enumerate(outs) if isinstance(y, Tensor) and y.requires_grad]
    return result or list(range(len(outs)))


def register_own_hook(x: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """As x.register_hook, that is not counted."""
    OWN_HOOKS[0] += 1
    return x.register_hook(hook)


def refuse_others(reading: list[bool], *xs: Any) -> None:
    """Has whoever else differentiates a graph that begins at xs be told that it ends there."""

    def refuse(ct: Tensor) -> None:
        if not reading[0]:
            raise GradtoolsError(
                "chunked: what f kept aside (in an attribute, a list, a hook) is differentiated, "
                "and of its gradient the part of an argument would be lost. Return it from f, "
                "detach it, or use keep_graphs=0."
            )

    for x in xs:
        if isinstance(x, Tensor) and x.requires_grad:
            register_own_hook(x, refuse)


def kinds_of(nodes: Iterable[Any]) -> Counter[str]:
    """How many nodes of each kind there are, leaves apart, and on how many inputs they depend.

    A rule of gradtools' is one kind, by whichever Function of ours it was called.
    """
    result = Counter[str]()
    for node in nodes:
        kind, count = type(node).__name__, sum(x is not None for x, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            home = upstream.forward_class(type(node)).__module__
            kind = "a rule" if home.startswith(_RULES) else kind
        if kind != "AccumulateGrad":
            result[f"{kind} on {count}"] += 1
    return result


def is_compiled(forward: Forward) -> bool:
    modules = (m for m, _ in forward.start.reached.modules.values())
    functions = forward.start.reached.functions
    return any(map(upstream.is_compiled, (forward.chunks.call.f, *functions, *modules)))


def way_of(forward: Forward) -> Way:
    shapes = tuple([(x.shape, x.dtype, x.requires_grad) for x in forward.tensors])
    modes, modules = forward.modes, forward.start.reached.modules.values()
    training = tuple([module.training for module, _ in modules])
    key = forward.caller, shapes, training, tuple(modes.autocast), forward.beneath, forward.count
    return Way.of(forward.chunks.call.f, *key)


class _Same:
    """An object, equal to itself alone, which is not kept alive."""

    def __init__(self, x: Any) -> None:
        self.of, self.number = weakref.ref(x), id(x)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.of() is other.of() is not None


def _is_gone(part: Any) -> bool:
    """Whether part of a way is an object that died, so that no call can go this way again."""
    if isinstance(part, tuple):
        return any(map(_is_gone, part))
    return isinstance(part, _Same) and part.of() is None


def _looks(f: Any) -> tuple[Any, Any]:
    """Whom it is remembered for that f is right, and what of f must be the same.

    A function that is made anew at each step, a lambda or a method, is known by its code and by
    what it closes over: of tensors and numbers the kind, of lists and tuples the parts, of all else
    the very object.
    """
    if isinstance(f, MethodType):
        of, parts = _looks(f.__func__)
        return of, (parts, part_of(f.__self__))
    if isinstance(f, partial):
        of, parts = _looks(f.func)
        given = (*f.args, *f.keywords.values())
        return of, (parts, tuple(f.keywords), *[part_of(x, 0) for x in given])
    if type(f) is not FunctionType:
        return f, None
    return f.__code__, _parts(f, 0)


def _parts(f: FunctionType, depth: int) -> tuple[Any, ...]:
    cells = [contents_of(cell) for cell in f.__closure__ or ()]
    held = (*cells, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
    return (id(f.__globals__), *[part_of(x, depth + 1) for x in held])


def part_of(x: Any, depth: int = 0) -> Any:
    """What of an object that a function closes over must be the same."""
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
        return _Same(x)
    except TypeError:  # it cannot be referred to weakly
        return kind


def _verified(f: Callable[..., Any]) -> dict[Any, Callable[[], Any]]:
    """The ways of f that were seen to be right, or are about to be."""
    try:
        return _VERIFIED.setdefault(f, {})
    except TypeError:  # it cannot be referred to weakly, or has no hash
        return {}


def is_shown(x: Tensor) -> bool:
    """Whether the numbers can be read."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    known = plain and x.layout is torch.strided and x.device.type != "meta" and not x.is_quantized
    return known and not (upstream.is_wrapped(x) or upstream.is_legacy_batched(x))


def figures(x: Tensor, sample: int | None = None) -> Figures:
    """Shape, dtype, and for each entry of the first axis its size and weighted sums.

    The weights all differ. An entry is an example, so that a difference in one of many shows.
    """
    looks = (x.shape, x.dtype)
    if not is_shown(x) or not x.numel():
        return looks
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
        # Asked of an accelerator only once it is compared.
        return *looks, total.numpy().copy() if total.device.type == "cpu" else total


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.device.type != "mps" else torch.float32


def _sums(part: Tensor, weights: Tensor) -> Tensor:
    """Of each row the sum of the moduli, of the weighted entries, and of the entries."""
    wide = part.to(_wide(part))
    if part.dtype == torch.float64:
        wide = wide * 2.0**-64  # sums of the largest numbers are finite
    wide = wide.nan_to_num(nan=1.25, posinf=1.5, neginf=-1.75)
    return torch.stack([wide.abs().sum(1), wide @ weights[: wide.shape[1]], wide.sum(1)])


def is_near(a: Figures, b: Figures) -> bool:
    """Whether two figures are the same but for rounding; checksums exactly."""
    return not bool(differ(a, b))


def _differences(old: list[Figures], new: list[Figures]) -> list[bool | Tensor]:
    if len(old) != len(new):
        return [True]
    return [differ(a, b) for a, b in zip(old, new, strict=True)]


def differ(a: Figures, b: Figures) -> bool | Tensor:
    """Whether two figures differ by more than rounding; of an accelerator's the answer is there."""
    if len(a) != len(b):
        return False  # one of them could not be read: it is a batch of vmap's, say
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
    if not is_shown(x) or not x.numel():
        return x.shape, x.dtype
    plain = x.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return x.shape, x.dtype, zlib.crc32(plain.view(torch.uint8).numpy().tobytes())
