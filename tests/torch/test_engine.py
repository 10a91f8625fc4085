"""Tests the PyTorch engine: global state, running statistics, grad mode, hooks and pullbacks."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from functools import reduce
from typing import Any

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError
from tests.support.live_bytes import LiveBytes

F64 = torch.float64


def _x(*values: float) -> torch.Tensor:
    return torch.tensor(values or (0.7, -1.3), dtype=F64)


def _operators(f: Any, x: torch.Tensor) -> dict[str, Any]:
    return {
        "grad": lambda: gt.grad(f)(x),
        "value_and_grad": lambda: gt.value_and_grad(f)(x),
        "vjp": lambda: gt.vjp(f, x)[1](torch.ones((), dtype=F64)),
        "jvp": lambda: gt.jvp(f, (x,), (torch.ones_like(x),)),
        "linearize": lambda: gt.linearize(f, x)[1](torch.ones_like(x)),
        "jacobian": lambda: gt.jacobian(f)(x),
        "hvp": lambda: gt.hvp(f, (x,), (torch.ones_like(x),)),
        "hvp, forward over reverse": lambda: gt.hvp(
            f, (x,), (torch.ones_like(x),), "forward_over_reverse"
        ),
        "hessian": lambda: gt.hessian(f)(x),
        "minimax": lambda: gt.minimax_value_and_grad(lambda x, y: f(x * y), 0, 1)(x, x + 1),
    }


OPERATORS = tuple(_operators(None, _x()))
operators = pytest.mark.parametrize("operator", OPERATORS)


def _run(operator: str, f: Any, x: torch.Tensor) -> Any:
    return _operators(f, x)[operator]()


# --- one evaluation ----------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_the_columns_of_a_jacobian_have_one_draw(chunk_size):
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2))
    net = net.double()

    def f(x, y):
        return net(x * y) + torch.randn(2, dtype=F64) * y.sum()

    def seeded(**options):
        torch.manual_seed(0)
        blocks = gt.jacobian(f, (0, 1), **options)(_x(), _x(0.4, 2.0))
        return blocks, torch.rand(2)

    expected, found = seeded(mode="reverse"), seeded(mode="forward", chunk_size=chunk_size)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow_at("None", "2")
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_the_columns_of_a_compiled_jacobian_come_in_chunks(chunk_size):
    jacobian = gt.jacobian(lambda x: x * x.sum(), mode="forward", chunk_size=chunk_size)
    found = torch.compile(jacobian, backend="eager", fullgraph=True, dynamic=False)(_x())
    torch.testing.assert_close(found, jacobian(_x()))


def test_the_columns_of_a_jacobian_update_a_batch_normalisation_once():
    norm = torch.nn.BatchNorm1d(2).double()
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]], dtype=F64)
    for f, args in ((norm, (x,)), (lambda norm, x: norm(x).sum(0), (norm, x))):
        norm.reset_running_stats()
        gt.jacobian(f, mode="forward", chunk_size=1)(*args)
        assert int(norm.num_batches_tracked) == 1


NORMS = {
    "batch": (torch.nn.BatchNorm1d(3), (5, 3)),
    "instance": (torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 4)),
}
SECOND = {
    "jacobian": lambda norm, x: gt.jacobian(norm, mode="reverse")(x),
    "hessian": lambda norm, x: gt.hessian(lambda x: (norm(x) ** 3).sum())(x),
    "forward": lambda norm, x: gt.jacobian(
        lambda x: torch.batch_norm(
            x, None, None, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False
        ),
        mode="forward",
    )(x),
}


@pytest.mark.parametrize(
    ("kind", "derivative"),
    [(k, d) for k in NORMS for d in SECOND if (k, d) != ("instance", "forward")],
)
def test_running_statistics_are_updated_as_in_one_call(kind, derivative):
    """Batch norm inside of gradtools' own vmap must update the running statistics once."""
    norm, shape = NORMS[kind]
    ours, plain = copy.deepcopy(norm).to(F64), copy.deepcopy(norm).to(F64)
    x = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    SECOND[derivative](ours, x)
    plain(x)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name))


@operators
def test_f_is_evaluated_once(operator):
    calls = []
    _run(operator, lambda x: calls.append(1) or (x**3).sum(), _x())
    assert len(calls) == 1


# --- no state is left behind -------------------------------------------------------------


@operators
def test_grad_attributes_are_never_touched(operator):
    w = torch.nn.Parameter(_x())
    kept = torch.full_like(w, 5.0)
    w.grad = kept
    x = _x().requires_grad_()
    _run(operator, lambda x: (x**2 * w).sum(), x)
    assert w.grad is kept and torch.equal(kept, torch.full_like(kept, 5.0))
    assert x.grad is None and x.requires_grad and x.is_leaf


# --- attached or detached ----------------------------------------------------------------

COMBINATIONS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize(("grad_mode", "argument", "captured"), COMBINATIONS)
@pytest.mark.parametrize(
    "operator", ["grad", "value_and_grad", "vjp", "hvp", "hessian", "jacobian"]
)
def test_results_are_attached_exactly_when_grad_mode_is_on_and_something_requires_grad(
    operator, grad_mode, argument, captured
):
    x = _x().requires_grad_(argument)
    w = _x().requires_grad_(captured)
    with torch.set_grad_enabled(grad_mode):
        found = _run(operator, lambda x: (x**4 * w).sum(), x)
    attached = grad_mode and (argument or captured)
    for leaf in torch.utils._pytree.tree_leaves(found):
        assert leaf.requires_grad == attached
        assert (leaf.grad_fn is not None) == attached


def test_a_detached_result_keeps_no_graph():
    saved = []

    class Watched:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def pack(x):
        box = Watched(x)
        saved.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.x):
        kept = gt.value_and_grad(lambda x: (x.exp() * x.sin()).sum())(_x())
    gc.collect()
    assert saved and not [s for s in saved if s() is not None]
    assert kept[0].grad_fn is None


def test_a_forward_mode_derivative_saves_nothing():
    x = torch.ones(1000)

    def peak(depth):
        with LiveBytes() as live:
            gt.jvp(lambda x: reduce(lambda y, _: y.sin(), range(depth), x), (x,), (x,))
        return live.peak

    assert peak(12) == peak(4) > 0


# --- functions of every kind -------------------------------------------------------------


def test_hooks_on_the_arguments_themselves_do_not_fire():
    fired = []
    x = _x().requires_grad_()
    x.register_hook(lambda g: fired.append(1))
    with torch.no_grad():
        gt.grad(lambda x: (x**2).sum())(x)
    assert fired == []


# --- pullbacks ---------------------------------------------------------------------------


def test_a_pullback_called_without_grad_mode_is_detached():
    _, pullback = gt.vjp(lambda x: x.exp(), _x().requires_grad_())
    with torch.no_grad():
        assert not pullback(torch.ones(2, dtype=F64))[0].requires_grad


# --- second derivatives through results --------------------------------------------------


def test_forward_over_reverse_is_right_where_a_backward_formula_asks_for_grad_mode():
    """Without grad mode, the backward formula of slogdet drops the tangent."""
    torch.manual_seed(0)
    a, v = torch.randn(2, 3, 3, dtype=F64)
    f = lambda a: torch.linalg.slogdet(a @ a.T + 3 * torch.eye(3, dtype=F64))[1]
    _, (one,) = gt.hvp(f, (a,), (v,), "forward_over_reverse")
    _, (other,) = gt.hvp(f, (a,), (v,), "reverse_over_reverse")
    assert torch.allclose(one, other, rtol=1e-12)


# --- f disables gradients -----------------------------------------------------------------


def test_a_derivative_by_autograd_in_forward_mode_is_refused_where_it_has_no_graph():
    def f(x):
        return torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0]

    x = torch.ones(3)
    with pytest.raises(
        GradtoolsError, match=r"f registers a gradient hook .* Use gt\.grad, gt\.jvp or"
    ):
        gt.jvp(f, (x,), (x,))


# --- mixed_partial is differentiable with respect to all inputs

POINT = {
    "y": torch.tensor([2.0, 1.0], dtype=torch.float64),
    "z": torch.tensor([3.0, 0.5], dtype=torch.float64),
    "u": torch.tensor([1.0, -2.0], dtype=torch.float64),
}
MIX = torch.tensor([[0.3, -0.8], [0.5, 0.1]], dtype=torch.float64)
ALONG = {
    "y captured by G": lambda v: ((lambda z: torch.tanh(v * z**2)), v, "z", "u"),
    "an array that G passes by keyword": lambda v: (
        (lambda w: lambda z: torch.nn.functional.linear(z**2, weight=w).tanh())(torch.outer(v, v)),
        "y",
        "z",
        "u",
    ),
    "z": lambda v: ((lambda z: torch.tanh(z**2 @ MIX)), "y", v, "u"),
    "u": lambda v: ((lambda z: torch.tanh(z**2 @ MIX)), "y", "z", v),
    "z and u computed from y": lambda v: (
        (lambda z: torch.tanh(z**2 @ MIX * v)),
        v,
        v * 2,
        v.cos(),
    ),
}


def _mixed(along, mixed):
    def result(v):
        G, *rest = along(v)
        return mixed(G, *[POINT[x] if isinstance(x, str) else x for x in rest])

    return result


def _by_frozen_formula(G, y, z, u):
    f = lambda y, g: (y.sin() * g).sum() ** 2
    inner = lambda y: (torch.func.grad(lambda z: f(y, G(z)))(z) * u).sum()
    return torch.func.grad(inner)(y)


_DERIVATIVES = {
    "grad": lambda m, v, t: gt.grad(lambda v: m(v).sin().sum())(v),
    "jvp": lambda m, v, t: gt.jvp(m, (v,), (t,))[1],
    "jacobian": lambda m, v, t: gt.jacobian(m)(v),
    "forward jacobian": lambda m, v, t: gt.jacobian(m, mode="forward")(v),
    "hessian": lambda m, v, t: gt.hessian(lambda v: m(v).sin().sum())(v),
    "torch.func.grad": lambda m, v, t: torch.func.grad(lambda v: m(v).sin().sum())(v),
    "torch.func.jvp": lambda m, v, t: torch.func.jvp(m, (v,), (t,))[1],
    "vmap of grad": lambda m, v, t: gt.vmap(gt.grad(lambda v: m(v).sin().sum()))(
        torch.stack([v, v])
    )[1],
}


@pytest.mark.parametrize("along", ALONG.values(), ids=ALONG)
@pytest.mark.parametrize("derivative", _DERIVATIVES.values(), ids=_DERIVATIVES)
def test_a_mixed_partial_is_differentiable_in_all_that_it_depends_on(derivative, along):
    f = lambda y, g: (y.sin() * g).sum() ** 2
    v, t = (torch.tensor(x, dtype=torch.float64) for x in ([0.3, 0.9], [1.0, -0.4]))
    found = derivative(_mixed(along, lambda *a: gt.mixed_partial(f, *a)), v, t)
    plain = _mixed(along, _by_frozen_formula)
    jacobian = torch.func.jacrev(plain)(v)
    total = lambda v: plain(v).sin().sum()
    wanted = {1: torch.func.grad(total)(v), 2: torch.func.hessian(total)(v)}
    known = {
        _DERIVATIVES["jvp"]: jacobian @ t,
        _DERIVATIVES["torch.func.jvp"]: jacobian @ t,
        _DERIVATIVES["jacobian"]: jacobian,
        _DERIVATIVES["forward jacobian"]: jacobian,
        _DERIVATIVES["hessian"]: wanted[2],
    }
    torch.testing.assert_close(found, known.get(derivative, wanted[1]), rtol=1e-9, atol=1e-11)


def test_a_mixed_partial_trains_the_parameters_of_G():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    net, f = net.double(), lambda y, g: (y.sin() * g).sum() ** 2
    directions = [POINT["u"], POINT["u"].cos()]
    found = gt.mixed_partial(f, net, POINT["y"], POINT["z"], directions)
    sum(r.sin().sum() for r in found).backward()
    params = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    G = lambda z: torch.func.functional_call(net, params, (z,))
    wanted = [_by_frozen_formula(G, POINT["y"], POINT["z"], u).sin().sum() for u in directions]
    grads = torch.autograd.grad(sum(wanted), list(params.values()))
    for p, g in zip(net.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-10, atol=1e-12)


class _Detached(torch.autograd.Function):
    """A Function for x^2 whose backward pass records no graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, ct):
        return 2 * ctx.saved_tensors[0].detach() * ct.detach()


def test_a_pullback_without_a_graph_is_not_transposed():
    """If the pullback records no graph, its transpose would be zero, so an error is raised."""
    x = torch.tensor([1.0, 2.0])
    for f in (
        lambda x: torch.cond(x.sum() > 0, lambda x: x**3, lambda x: x**2, (x,)),
        _Detached.apply,
    ):
        push = gt.linearize(f, x)[1]
        with pytest.raises(RuntimeError, match="records no graph"):
            push(torch.ones(2))
    zero = gt.linearize(lambda x: x.clamp(max=0.0) * 3, x)[1](torch.ones(2))
    assert zero.tolist() == [0.0, 0.0]


# --- Jacobians that used to be wrong -------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (3, 3)])
def test_the_dtype_of_a_jacobian_depends_on_no_size_where_f_changes_the_precision(sizes):
    weight = torch.randn(sizes[1], sizes[0])
    f = lambda x: weight @ x.float()
    found = gt.jacobian(f)(torch.ones(sizes[0], dtype=F64))
    torch.testing.assert_close(found, weight.to(F64))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_are_mapped_right(p):
    """The batching rule of cdist's backward kernel is wrong: `jacrev` has errors of 0.7 to 2."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 2, dtype=F64), torch.randn(4, 2, dtype=F64)
    f = lambda x: torch.cdist(x, y, p)
    expected = torch.stack([gt.grad(lambda x, k=k: f(x).ravel()[k])(x) for k in range(12)])
    torch.testing.assert_close(gt.jacobian(f)(x).reshape(12, 3, 2), expected)
    plain = lambda x: torch.linalg.vector_norm(x[:, None] - y, p, -1)
    torch.testing.assert_close(
        gt.hessian(lambda x: f(x).sum())(x), gt.hessian(lambda x: plain(x).sum())(x)
    )


@pytest.mark.parametrize("point", ["jacobian", "hessian"])
def test_a_tangent_passes_through_a_jacobian_to_a_second_derivative(point):
    """Under a dual level, the Jacobian has a graph, whose leaves are constants."""
    x, v = torch.linspace(0.1, 1, 4, dtype=torch.float64), torch.linspace(1, 2, 4).double()
    of = {
        "jacobian": lambda x: gt.jacobian(torch.sin)(x).sum(0),
        "hessian": lambda x: gt.hessian(lambda x: -x.cos().sum())(x).sum(0),
    }[point]
    f = lambda x: gt.hvp(lambda y: (y**4).sum(), (of(x),), (torch.ones_like(x),))[1][0].sum()
    expected = (24 * x.cos() * -x.sin() * v).sum()
    torch.testing.assert_close(gt.jvp(f, (x,), (v,))[1], expected)
