"""Locates where a cotangent becomes zero, NaN or vanishing, on a tape of the jaxpr.

The jaxpr runs once on a tape (`tape.py`) for all leaves of a program, then one cotangent is pulled
back step by step::

    ct of an operand += pull of a step (ct of its results)

The gradient is lost at a step with a nonzero cotangent that passes only zeros to an operand. If
several nonzero cotangents of a value add up to zero, they cancel; the reported step is where the
paths from that value meet. Zeros are propagated, because zero times an infinite slope is NaN.

Rounding noise counts as zero (`seeing/diagnostics/bad_gradients.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.errors import GradtoolsError, is_of
from gradtools.jax import jaxprs
from gradtools.jax.trees import is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.diagnostics import bad_gradients
from gradtools.seeing.graphs.derivative_flow import any_of
from gradtools.seeing.graphs.losing_operations import joined
from gradtools.seeing.graphs.recording import Run, Vanished
from gradtools.seeing.jax.recorded_run import Traced, graph_once, trace
from gradtools.seeing.jax.tape import Moving, Tape, TapeStep


def vanishing(
    run: Run, leaves: Sequence[Any], index: int, held: Sequence[Any] = ()
) -> list[Vanished] | None:
    """Where the cotangent of a leaf becomes zero, NaN or vanishing; None if neither."""
    traced = trace(run, leaves)
    if traced not in _known:
        _known[traced] = _returned(traced, leaves)
    returned = _known[traced]
    if index in returned.extremes:
        return returned.extremes[index]
    if returned.reached >> index & 1 or not leaves[index].size:
        return None
    places = [*_stopped(returned, 1 << index), *_cancelled(returned, 1 << index)]
    return [vanished for _, vanished in sorted(places, key=lambda place: place[0])]


_known: WeakKeyDictionary[Traced, _Returned] = WeakKeyDictionary()


@dataclass
class _Returned:
    """The record of one backward pass over the tape.

    Attributes:
        steps: The tape.
        reached: A bit mask of the leaves that have a gradient, or whose gradient is unknown.
        stops: For the steps, by position, that pass zeros to some operand: the cotangents of
            their results, and those operands.
        sums: The values whose cotangents cancel, with the steps that passed them.
        extremes: For each leaf whose gradient is NaN or vanishing, where it became so.
        noise: A bit mask of the leaves whose gradients are rounding noise, which counts as zero.
        noisy_values: The numbers of the values whose cotangents are.
        noisy_operands: Operands whose cotangents are: the positions of the step and the operand.
    """

    steps: Sequence[TapeStep]
    reached: int = 0
    stops: dict[int, tuple[dict[int, Any], list[int]]] = field(default_factory=dict)
    sums: list[tuple[Moving, list[int]]] = field(default_factory=list)
    extremes: dict[int, list[Vanished] | None] = field(default_factory=dict)
    noise: int = 0
    noisy_values: Set[int] = frozenset()
    noisy_operands: Set[tuple[int, int]] = frozenset()


def _returned(traced: Traced, leaves: Sequence[Any]) -> _Returned:
    closed, graph = traced.closed, graph_once(traced)
    tape = Tape()
    args = [tape.moving(x, 1 << i) for i, x in enumerate(leaves)]
    try:
        outs = tape.run(closed, graph, args)
        returned = _Returned(tape.steps)
        ys = [y for y in outs if is_inexact(y.array)]
        grads = _Back(returned, ys).gradients(args)
        if any(map(_is_nan, grads.values())) and not _is_nan_at_once(closed, leaves):
            returned = _Returned(tape.steps)  # the zero is symbolic in JAX, so it gives no NaN
            grads = _Back(returned, ys, zeros=False).gradients(args)
        returned.reached |= sum(args[k].leaves for k in grads)
        if noise := _noise(tape.steps, ys, args, grads):
            returned = _without_noise(returned, ys, [args[k] for k in noise])
        returned.extremes = _extremes(
            returned, args, ys, {k: grads[k] for k in grads.keys() - noise}
        )
        if any(not math.isfinite(_size(y.array)) for y in ys):
            origins = bad_gradients.ValueOrigins()
            ends = Tape(origins=origins).run(closed, graph, args)
            nodes = origins.of(id(y.array) for y in ends)
            returned.extremes = {
                k: bad_gradients.at_origins(places, nodes)
                for k, places in returned.extremes.items()
            }
        if jaxprs.uses_primitive(
            closed, lambda e: jaxprs.targets(e) != list(e.outvars)
        ):  # gradients through mutable references are not on the tape
            at_once = _gradients_at_once(closed, leaves)
            returned.reached |= sum(1 << i for i, g in at_once.items() if _any(g))
            unseen = [i for i, g in at_once.items() if _is_nan(g) and i not in returned.extremes]
            returned.extremes |= {i: bad_gradients.places("nan", []) for i in unseen}
        else:
            # what no output depends on differentiably has its own findings
            returned.reached |= any_of(x.leaves for x in args) & ~any_of(y.leaves for y in outs)
    except GradtoolsError:
        raise
    except Exception as error:
        raise GradtoolsError(
            f"why_zero: the gradient of f raised {type(error).__name__}: {error}"
        ) from error
    return returned


class _Back:
    """One backward pass over a tape, from the last step to the first.

    Args:
        returned: The record that is filled.
        outs: The outputs, which get random cotangents.
        kept: A dict that receives all cotangents, or None.
        draw: The seed of rounding errors that perturb the cotangents, or None.
        zeros: Whether zeros are propagated.
    """

    def __init__(
        self,
        returned: _Returned,
        outs: Sequence[Moving],
        kept: _Kept | None = None,
        draw: int | None = None,
        zeros: bool = True,
    ) -> None:
        self._returned, self._kept, self._draw, self._zeros = returned, kept, draw, zeros
        self._cts: dict[int, Any] = {}
        self._from: dict[int, list[int]] = {}
        for y, seed in zip(outs, _seeds([y.array for y in outs]), strict=True):
            if y.leaves:
                self._add(y, seed, len(returned.steps))
        for at in reversed(range(len(returned.steps))):
            self._back(at, returned.steps[at])

    def gradients(self, args: Sequence[Moving]) -> dict[int, Any]:
        """The nonzero gradients of the leaves, by position."""
        taken = {k: self._taken(x) for k, x in enumerate(args) if x.leaves}
        return {k: ct for k, ct in taken.items() if ct is not None and _any(ct)}

    def _back(self, at: int, step: TapeStep) -> None:
        cts = {k: self._taken(y) for k, y in step.results.items()}
        given = {k: self._shaken(ct, at, k) for k, ct in cts.items() if ct is not None}
        if not given:
            return
        wanted = list(step.operands)
        stopped = []
        pulled = self._pulled(step, given, wanted)
        if self._kept is not None:
            pairs = zip(wanted, pulled, strict=True)
            self._kept[at] = given, {i: ct for i, ct in pairs if ct is not None}
        noise = self._returned.noisy_operands
        for i, ct in zip(wanted, pulled, strict=True):
            moves = ct is None or _any(ct)
            if (at, i) in noise or not moves:
                stopped.append(i)
            if (at, i) not in noise:
                self._add(step.operands[i], ct, at, moves)
        moving = {k: ct for k, ct in given.items() if _any(ct)}
        if stopped and moving and not step.packs:
            self._returned.stops[at] = moving, stopped

    def _shaken(self, ct: Any, at: int, k: int) -> Any:
        """A cotangent, with rounding errors if asked for."""
        if self._draw is None:
            return ct
        info = jnp.finfo(ct.dtype)
        uniform = np.random.default_rng((self._draw, at, k)).uniform(-1.0, 1.0, ct.shape)
        return bad_gradients.shaken(ct, uniform.astype(info.dtype), float(info.eps)).astype(
            ct.dtype
        )

    def _pulled(self, step: TapeStep, given: dict[int, Any], wanted: list[int]) -> list[Any]:
        """The operands' cotangents; None if the step leaves JAX, which has its own finding."""
        try:
            return step.pulled(given, wanted)
        except Exception as error:
            closed = jax.make_jaxpr(step.apply)(step.arrays)
            is_callback = lambda eqn: eqn.primitive.name.endswith("_callback")
            if not (is_of("jax", error) and jaxprs.uses_primitive(closed, is_callback)):
                raise
        for x in step.operands.values():
            self._returned.reached |= x.leaves
        return [None] * len(wanted)

    def _add(self, x: Moving, ct: Any, at: int, moves: bool = True) -> None:
        """Adds a cotangent to a value; moves: whether it is nonzero."""
        if ct is None or not (moves or self._zeros):
            return
        known = self._cts.get(x.number)
        self._cts[x.number] = ct if known is None else known + ct
        if moves:
            self._from.setdefault(x.number, []).append(at)

    def _taken(self, x: Moving) -> Any:
        """The whole cotangent of a value; None if there is none."""
        ct, readers = self._cts.pop(x.number, None), self._from.get(x.number, [])
        if len(readers) > 1:
            is_noise = x.number in self._returned.noisy_values
            if is_noise or not _any(ct):
                self._returned.sums.append((x, readers))
                return None if is_noise or not self._zeros else ct
        return ct


_Kept = dict[int, tuple[dict[int, Any], dict[int, Any]]]  # per step: results', operands'


# --- rounding noise ----------------------------------------------------------------------


def _noise(
    steps: Sequence[TapeStep],
    outs: Sequence[Moving],
    args: Sequence[Moving],
    grads: Mapping[int, Any],
) -> set[int]:
    noisy = set(grads)
    for draw in range(bad_gradients.DRAWS):
        if noisy:
            again = _Back(_Returned(steps), outs, draw=draw).gradients(args)
            noisy = {k for k in noisy if _is_noise(grads[k], again.get(k))}
    return noisy


def _without_noise(
    returned: _Returned, outs: Sequence[Moving], leaves: Sequence[Moving]
) -> _Returned:
    steps, plain, other = returned.steps, _Kept(), _Kept()
    _Back(_Returned(steps), outs, plain)
    _Back(_Returned(steps), outs, other, draw=0)
    values, operands = {x.number for x in leaves}, set()
    for at in plain.keys() & other.keys():
        (given, on), (given_again, on_again) = plain[at], other[at]
        same = steps[at].results.items()
        values |= {x.number for k, x in same if _is_noise(given.get(k), given_again.get(k))}
        operands |= {(at, i) for i, ct in on.items() if _is_noise(ct, on_again.get(i))}
    lost = sum(x.leaves for x in leaves)
    reached = returned.reached & ~lost
    again = _Returned(steps, reached, noise=lost, noisy_values=values, noisy_operands=operands)
    _Back(again, outs).gradients(leaves)
    return again


def _is_noise(ct: Any, other: Any) -> bool:
    """Whether a cotangent differs by its own size from that of a perturbed backward pass."""
    if ct is None:
        return False
    change = ct if other is None else other - ct
    return bad_gradients.is_noise(_size(ct), _size(change), float(jnp.finfo(ct.dtype).eps))


# --- NaN and vanishing gradients ---------------------------------------------------------


def _extremes(
    returned: _Returned, args: Sequence[Moving], ys: Sequence[Moving], grads: Mapping[int, Any]
) -> dict[int, list[Vanished] | None]:
    """For each leaf with a NaN or vanishing gradient, where it became so."""
    output = max((_size(y.array) for y in ys), default=0.0)
    eps = {k: float(jnp.finfo(ct.dtype).eps) for k, ct in grads.items()}
    kinds = {
        k: bad_gradients.extreme(_size(ct), _size(args[k].array), output, eps[k])
        for k, ct in grads.items()
    }
    odd = {k: kind for k, kind in kinds.items() if kind}
    if not odd:
        return {}
    kept = _Kept()
    _Back(_Returned(returned.steps), ys, kept)
    places: dict[int, list[Vanished] | None] = {}
    for k, kind in odd.items():
        handed = []
        for at in sorted(kept):
            given, on = kept[at]
            operands = returned.steps[at].operands
            mine = [_size(ct) for i, ct in on.items() if operands[i].leaves >> k & 1]
            if mine and not returned.steps[at].packs:
                sizes = [float(np.max(each)) for each in ([*map(_size, given.values())], mine)]
                handed.append(bad_gradients.CotangentRange(returned.steps[at].node, *sizes))
        places[k] = bad_gradients.places(kind, handed)
    return places


def _size(x: Any) -> float:
    """The greatest modulus of an array's entries; NaN if one is NaN."""
    return float(jnp.max(jnp.abs(x))) if x.size else 0.0


def _seeds(outs: Sequence[Any]) -> list[Any]:
    """The outputs' cotangents: 1 for a single scalar, random otherwise."""
    rng = np.random.default_rng(0)
    if len(outs) == 1 and outs[0].size == 1:
        return [jnp.ones_like(outs[0])]
    return [jnp.asarray(rng.uniform(0.5, 1.5, y.shape), y.dtype) for y in outs]


def _any(x: Any) -> bool:
    """Whether an array has a nonzero entry; on the CPU without compiling anything."""
    if x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices()):
        return bool(np.any(np.asarray(x) != 0))
    return bool(_is_any_nonzero(x))


_is_any_nonzero = jax.jit(lambda x: jnp.any(x != 0))


# --- which operation ---------------------------------------------------------------------


def _stopped(returned: _Returned, leaf: int) -> Iterator[tuple[int, Vanished]]:
    """The steps that pass zeros to an operand on the leaf's path, with positions."""
    for at, (cts, operands) in returned.stops.items():
        step = returned.steps[at]
        given = {k: ct for k, ct in cts.items() if step.results[k].leaves & leaf}
        stopped = [i for i in operands if step.operands[i].leaves & leaf]
        if given and stopped:
            noise = any((at, i) in returned.noisy_operands for i in stopped)
            cancels = Vanished(step.node, operands=tuple(stopped), cancelled=True)
            yield at, _at(step, given, stopped) if not noise else _noted(returned, leaf, cancels)


def _at(step: TapeStep, given: dict[int, Any], stopped: list[int]) -> Vanished:
    if step.node.mark == "custom rule" and _is_always_zero(step, given, stopped):
        return Vanished(replace(step.node, loss="rule"))
    if all(not step.operands[i].array.size for i in stopped):
        return Vanished(step.node, operands=tuple(stopped), empty=True)
    sizes = {k: jnp.max(jnp.abs(ct)) for k, ct in given.items()}
    sized = {k: ct / sizes[k] for k, ct in given.items()}
    factor = max(map(_size, step.pulled(sized, stopped)))
    least = max(4 * float(jnp.finfo(ct.dtype).tiny) for ct in given.values())
    cancels = factor * max(map(float, sizes.values())) >= least  # but for a rounding error
    return Vanished(step.node, factor > 0 and not cancels, tuple(stopped), cancels)


def _is_always_zero(step: TapeStep, given: dict[int, Any], stopped: list[int]) -> bool:
    """Whether a rule passes zeros at other points, too."""
    rng = np.random.default_rng(0)
    ones = {k: jnp.ones_like(ct) for k, ct in given.items()}
    for _ in range(3):
        arrays = [
            jnp.asarray(rng.normal(size=x.shape), x.dtype) if is_inexact(x) else x
            for x in step.arrays
        ]
        try:
            pulled = step.pulled(ones, stopped, arrays)
        except Exception:  # outside of its domain nothing can be concluded
            return False
        if any(map(_any, pulled)):
            return False
    return True


def _cancelled(returned: _Returned, leaf: int) -> Iterator[tuple[int, Vanished]]:
    """The steps at which the paths of cancelling cotangents meet, with positions."""
    for x, readers in returned.sums:
        if x.leaves & leaf:
            numbers = lambda xs: [x.number for x in xs.values()]
            flows = [(numbers(step.operands), numbers(step.results)) for step in returned.steps]
            at = joined(flows, readers)
            if at is not None:
                yield at, _noted(returned, leaf, Vanished(returned.steps[at].node, cancelled=True))


def _noted(returned: _Returned, leaf: int, cancels: Vanished) -> Vanished:
    """A cancellation on a leaf's path, marked as noise if the leaf's gradient is noise."""
    return replace(cancels, noise=bool(returned.noise & leaf))


# --- references --------------------------------------------------------------------------


def _gradients_at_once(closed: Any, leaves: Sequence[Any]) -> dict[int, Any]:
    """The gradient of each leaf by `jax.vjp` of the whole program."""
    inexact = [i for i, x in enumerate(leaves) if is_inexact(x)]

    def fun(*xs: Any) -> list[Any]:
        full = replaced_at(leaves, inexact, xs)
        outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *full)
        return [y for y in outs if is_inexact(y)]

    outs, pullback = jax.vjp(fun, *[leaves[i] for i in inexact])
    return dict(zip(inexact, pullback(_seeds(outs)), strict=True))


def _is_nan_at_once(closed: Any, leaves: Sequence[Any]) -> bool:
    """Whether a gradient by `jax.vjp` is NaN; True if it raises."""
    try:
        return any(map(_is_nan, _gradients_at_once(closed, leaves).values()))
    except Exception:  # some step leaves JAX, which has its own finding
        return True


def _is_nan(x: Any) -> bool:
    return not math.isfinite(_size(x))


__all__ = ["vanishing"]
