"""Of every operator of PyTorch's table: calls that give other numbers have graphs that differ.

Two samples of one operator whose tensors have the same shapes are two programs of the same tensors,
which differ in what else they are given. Where their results differ, `graph_diff` says so; a call
does not differ from itself.
"""

from __future__ import annotations

import warnings
from itertools import combinations, islice

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's tables of operators need expecttest")

from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402

import gradtools.torch as gt  # noqa: E402
from tests.support.sweeps.torch_programs import entries  # noqa: E402

pytestmark = pytest.mark.slow
RANDOM = ("rand", "normal", "multinomial", "bernoulli", "dropout", "empty", "exponential", "cauchy")
RANDOM += ("geometric", "uniform", "poisson")
OTHER = ("sparse", "jiterator", "masked.", "resize_")  # which takes nothing that requires grad
FEW, LARGE = 6, 300  # pairs of one operator, entries of a tensor
GROUPS = 6


class Call:
    """A sample, as a function of its tensors."""

    def __init__(self, op, sample):
        self.op = op
        self.flat, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tensors = [x for x in self.flat if isinstance(x, torch.Tensor)]

    @property
    def kind(self):
        return tuple((tuple(x.shape), x.dtype) for x in self.tensors)

    def __call__(self, *tensors):
        left = iter(tensors)
        flat = [next(left) if isinstance(x, torch.Tensor) else x for x in self.flat]
        given, args, kwargs = tree_unflatten(flat, self.spec)
        out = tree_flatten(self.op(given, *args, **kwargs))[0]
        return [y for y in out if isinstance(y, torch.Tensor)]

    def graph(self, tensors):
        wrt = tuple(i for i, x in enumerate(tensors) if x.is_floating_point())[:1]
        return gt.gradient_graph(self, *tensors, order=0, wrt=wrt)


def calls(op):
    if torch.float32 not in op.supported_dtypes("cpu"):
        return {}
    found = {}
    for sample in islice(op.sample_inputs("cpu", torch.float32), 30):
        call = Call(op, sample)
        if all(x.numel() <= LARGE for x in call.tensors):
            found.setdefault(call.kind, []).append(call)
    return found


def same(ones, twos):
    alike = len(ones) == len(twos)
    return alike and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(ones, twos, strict=True)
    )


def pairs(op):
    """Two calls each, and the tensors at which their results differ."""
    for group in calls(op).values():
        for one, two in combinations(group[:5], 2):
            tensors = [x.detach() for x in one.tensors]
            expected = one(*(x.clone() for x in tensors))
            try:
                other = two(*(x.clone() for x in tensors))
            except (RuntimeError, ValueError, IndexError):
                continue  # the one's tensors do not fit the other's arguments
            if not same(expected, other):
                yield [call.graph(tensors) for call in (one, one, two)]


@pytest.mark.parametrize("group", range(GROUPS))
def test_calls_that_give_other_numbers_differ(group):
    silent, loud, count = [], [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in [entry.info for entry in entries(("op_db",))][group::GROUPS]:
            if any(word in op.name for word in (*RANDOM, *OTHER)):
                continue
            for one, again, two in islice(pairs(op), FEW):
                count += 1
                silent += [op.name] if not gt.graph_diff(one, two) else []
                loud += [op.name] if gt.graph_diff(one, again) else []
    assert not silent and not loud
    assert count > 150
