"""Tests dicts whose keys are in a different order, and dataclasses as arguments of rules."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from gradtools.errors import GradtoolsError

X = np.array([1.0, 2.0, 3.0])


@dataclasses.dataclass
class Pair:
    p: object
    q: object


def numbers(gt, tree):
    return {key: gt.to_numpy(x).tolist() for key, x in tree.items()}


def ab(gt, a, b, swapped=False):
    pair = {"a": gt.asarray(np.array(a)), "b": gt.asarray(np.array(b))}
    return dict(reversed(pair.items())) if swapped else pair


def test_edits_take_a_dict_in_another_order(gt):
    x = ab(gt, [1.0, 2.0], [3.0, 4.0])
    loss = lambda y: (y["a"] ** 2).sum() + (y["b"] ** 2).sum()
    new = ab(gt, [5.0, 6.0], [7.0, 8.0], swapped=True)
    edits = (
        lambda x: gt.replace_gradient(x, new),
        lambda x: gt.transform_gradient(x, lambda _: new),
    )
    for edit in edits:
        g = gt.grad(lambda x, edit=edit: loss(edit(x)))(x)
        assert numbers(gt, g) == {"a": [5.0, 6.0], "b": [7.0, 8.0]}
    hard = gt.straight_through(lambda x: {"b": 10 * x, "a": x}, lambda x: {"a": x, "b": 2 * x})
    assert numbers(gt, hard(gt.asarray(X))) == {"a": X.tolist(), "b": (10 * X).tolist()}
    g = gt.grad(lambda x: (hard(x)["a"] + 3 * hard(x)["b"]).sum())(gt.asarray(X))
    assert gt.to_numpy(g).tolist() == [7.0, 7.0, 7.0]


def test_threads_that_add_first_in_other_orders_of_keys_agree(gt, monkeypatch):
    """Both threads flatten their first gradients before one of the threads adds its gradients."""
    total, x = gt.GradientAccumulator(), gt.asarray(np.ones(2))
    meet = threading.Barrier(2)
    term = total._term

    def flattened_together(*args):
        result = term(*args)
        with suppress(threading.BrokenBarrierError):
            meet.wait(timeout=0.2)
        return result

    monkeypatch.setattr(total, "_term", flattened_together)
    trees = {"a": x, "b": 2 * x}, {"b": 2 * x, "a": x}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(total.add, trees))
    assert numbers(gt, total.sum()) == {"a": [2, 2], "b": [4, 4]}


def test_an_accumulator_takes_a_dict_in_another_order(gt):
    total = gt.GradientAccumulator()
    total.add(ab(gt, 1.0, 2.0))
    total.add(ab(gt, 10.0, 20.0, swapped=True), weight=2)
    assert numbers(gt, total.sum()) == {"a": 21.0, "b": 42.0}
    with pytest.raises(GradtoolsError, match=r"grads\['c'\] is new"):
        total.add({"a": gt.asarray(1.0), "c": gt.asarray(1.0)})
    with pytest.raises(GradtoolsError, match=r"grads\['b'\] is missing"):
        total.add({"a": gt.asarray(1.0), "b": None})


def test_chunks_may_return_a_dict_in_another_order(gt):
    def f(x):
        pair = {"a": x, "b": 2 * x}
        return pair if x.shape[0] == 2 else dict(reversed(pair.items()))

    y = gt.chunked(f, 2)(gt.asarray(X))
    assert numbers(gt, y) == {"a": X.tolist(), "b": (2 * X).tolist()}

    def step(carry, x):
        return x, {"b": carry["b"] + 1, "a": carry["a"] + x.sum()}

    steps = gt.chunked(step, 2, in_axes=(None, 0), carry_argnums=0)
    _, carry = steps(ab(gt, 0.0, 5.0), gt.asarray(X))
    assert numbers(gt, carry) == {"a": 6.0, "b": 7.0}


def test_metrics_of_chunks_are_added_by_their_keys(gt):
    def f(w, x):
        pair = {"a": x.sum(), "b": 2 * x.sum()}
        return (w * x).sum(), pair if x.shape[0] == 2 else dict(reversed(pair.items()))

    total = gt.microbatched_value_and_grad(f, 2, reduction="sum", has_aux=True)
    (value, aux), g = total(gt.asarray(1.0), gt.asarray(X))
    assert (float(value), float(g)) == (6.0, 6.0)
    assert numbers(gt, aux) == {"a": 6.0, "b": 12.0}


def test_metrics_of_another_structure_are_refused(gt):
    def f(w, x):
        return (w * x).sum(), {"a" if x.shape[0] == 2 else "c": x.sum()}

    total = gt.microbatched_value_and_grad(f, 2, reduction="sum", has_aux=True)
    with pytest.raises(GradtoolsError, match=r"aux has the structure .* in one chunk and"):
        total(gt.asarray(1.0), gt.asarray(X))


def test_counts_are_summed_over_chunks(gt):
    def f(w, x):
        return (w * x).sum(), {"n": gt.asarray(np.int32(1)) * x.shape[0], "size": (x**2).sum()}

    total = gt.microbatched_value_and_grad(f, 1, reduction="sum", has_aux=True)
    (_, aux), _ = total(gt.asarray(1.0), gt.asarray(X))
    assert numbers(gt, aux) == {"n": 3, "size": 14.0}


def test_fwd_and_an_equation_may_return_a_dict_in_another_order(gt):
    f = gt.custom_rule(lambda x: {"a": x, "b": 3 * x})
    f.defvjp(lambda x: ({"b": 3 * x, "a": x}, None), lambda _, ct: (ct["a"] + 3 * ct["b"],))
    out, pullback = gt.vjp(f, gt.asarray(X))
    assert numbers(gt, out) == {"a": X.tolist(), "b": (3 * X).tolist()}
    ct = {"b": gt.asarray(10 * X), "a": gt.asarray(X)}
    assert gt.to_numpy(pullback(ct)[0]).tolist() == (31 * X).tolist()

    root = gt.implicit_solution(
        lambda z, a: {"q": z["q"] - 2 * z["p"], "p": z["p"] - a}, lambda a: {"p": a, "q": 2 * a}
    )
    assert np.isclose(float(gt.grad(lambda a: root(a)["q"])(gt.asarray(3.0))), 2.0)


def test_a_list_is_not_a_dataclass(gt):
    one, two = gt.asarray(np.array([1.0])), gt.asarray(np.array([2.0]))
    pair, both = Pair(one, two), [one, two]
    square = lambda x: [x, 2 * x] if x.shape[0] == 2 else Pair(x, 2 * x)
    rule = gt.custom_rule(lambda x: [x, x])
    rule.defvjp(lambda x: (Pair(x, x), None), lambda _, ct: (ct[0],))
    total = gt.GradientAccumulator()
    total.add(both)
    wrong = (
        lambda: gt.replace_gradient(both, pair),
        lambda: gt.replace_gradient(pair, both),
        lambda: gt.straight_through(lambda x: pair, lambda x: both)(one),
        lambda: gt.chunked(square, 2)(gt.asarray(X)),
        lambda: gt.implicit_solution(lambda z, a: [z.p, z.q], lambda a: pair)(one),
        lambda: gt.vjp(rule, one),
        lambda: total.add(pair),
    )
    for call in wrong:
        with pytest.raises(GradtoolsError, match=r"structure|is new") as caught:
            call()
        assert "* with Pair of ['p', 'q']" in str(caught.value)


def test_rules_take_dataclasses(gt):
    square = gt.custom_rule(lambda x: Pair(x.p**2, [x.q[0] ** 2]))
    square.defvjp(
        lambda x: (Pair(x.p**2, [x.q[0] ** 2]), x),
        lambda x, ct: (Pair(2 * x.p * ct.p, [2 * x.q[0] * ct.q[0]]),),
    )
    loss = lambda x: (square(x).p + 3 * square(x).q[0]).sum()
    x = Pair(gt.asarray(X), [gt.asarray(X + 1)])
    g = gt.grad(loss)(x)
    assert gt.to_numpy(g.p).tolist() == (2 * X).tolist()
    assert gt.to_numpy(g.q[0]).tolist() == (6 * (X + 1)).tolist()
    _, (h,) = gt.hvp(loss, (x,), (x,))
    assert gt.to_numpy(h.q[0]).tolist() == (6 * (X + 1)).tolist()


def test_host_functions_take_and_return_dataclasses(gt):
    double = gt.host_function(lambda x: Pair(2 * x.p, 3 * x.q), out=lambda x: x)
    y = double(Pair(gt.asarray(X), gt.asarray(X[:2])))
    assert gt.to_numpy(y.p).tolist() == (2 * X).tolist()
    assert gt.to_numpy(y.q).tolist() == (3 * X[:2]).tolist()


def test_solutions_and_their_arguments_may_be_dataclasses(gt):
    def solve(a):
        return Pair(a.p**0.5, a.q)

    root = gt.implicit_solution(lambda z, a: Pair(z.p**2 - a.p, z.q - a.q), solve)
    at = Pair(gt.asarray(np.array([4.0])), gt.asarray(X))
    g = gt.grad(lambda a: root(a).p.sum() + 2 * root(a).q.sum())(at)
    assert np.allclose(gt.to_numpy(g.p), 0.25) and np.allclose(gt.to_numpy(g.q), 2.0)

    def captures(b):
        root = gt.implicit_solution(
            lambda z, a: Pair(z.p**2 - b * a.p, z.q - a.q), lambda a: Pair((b * a.p) ** 0.5, a.q)
        )
        return root(at).p.sum()

    assert np.isclose(float(gt.grad(captures)(gt.asarray(np.array(1.0)))), 1.0)


NUMPY = {
    "zero": lambda gt, f: gt.grad(lambda x: (f(x) * 0).sum()),
    "jacobian": lambda gt, f: gt.jacobian(lambda x: f(x) ** 2),
    "vmap": lambda gt, f: gt.vmap(f),
    "chunked": lambda gt, f: gt.grad(lambda x: gt.chunked(f, 2)(x).sum()),
    "per_example_grad": lambda gt, f: lambda x: gt.per_example_grad(lambda w, x: f(w * x))(x[0], x),
}


@pytest.mark.parametrize("way", NUMPY)
def test_to_numpy_in_a_value_is_as_np_asarray(gt, way):
    x = gt.asarray(np.array([1.0, -2.0, 3.0]))
    results = [
        gt.to_numpy(NUMPY[way](gt, gt.straight_through(lambda x, r=read: np.sign(r(x))))(x))
        for read in (np.asarray, gt.to_numpy)
    ]
    assert np.array_equal(*results)


def test_a_bound_beyond_a_dtype_clips_nothing(gt):
    x = gt.asarray(np.array([1.0, -2.0], np.float16))
    for bound in ({"max_value": 1e10}, {"max_norm": 1e10}):
        g = gt.grad(lambda x, b=bound: (gt.clip_gradient(x, **b) ** 2).sum())(x)
        assert gt.to_numpy(g).tolist() == [2.0, -4.0]
