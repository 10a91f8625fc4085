"""Operations that plain programs differentiate: to third order, by all mixes of modes and of vmap.

Each program is a scalar function of parameters; each derivative of it, again a scalar function of
them, is differentiated once more. The oracle is a central difference of what is differentiated.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.errors import LostDerivativeError

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 4, 5, dtype=D, generator=GENERATOR)
P = {
    "W": torch.randn(5, 6, dtype=D, generator=GENERATOR) / 2,
    "w": torch.rand(6, dtype=D, generator=GENERATOR) + 0.5,
    "b": torch.randn(6, dtype=D, generator=GENERATOR),
}
T = {k: torch.randn(v.shape, dtype=D, generator=GENERATOR) for k, v in P.items()}


def _normalised(norm):
    return lambda p, x: norm(torch.tanh(x @ p["W"]), p["w"], p["b"]).tanh().square().sum()


def _positive(p):
    return (p["W"] * p["w"]) @ p["W"].T + 3 * torch.eye(5, dtype=D) + p["b"].outer(p["b"])[:5, :5]


def _attention(p, x):
    q = (x @ p["W"])[None, None]
    return F.scaled_dot_product_attention(q * p["w"], q * p["b"], q).tanh().square().sum()


def _recurrent(kind, gates):
    def f(p, x):
        zeros = torch.zeros(1, 1, 6, dtype=D)
        state = (zeros, zeros) if kind is torch.lstm else zeros
        w = torch.cat([p["W"].T * (1 - k / 5) for k in range(gates)])
        u = torch.outer(p["w"], p["b"]).repeat(gates, 1) / 10
        result = kind(x[:, None], state, [w, u], False, 1, 0.0, False, False, False)
        return result[0].square().sum()

    return f


def _cell(p, x):
    w, u = (torch.cat([a] * 3) for a in (p["W"].T, torch.outer(p["w"], p["b"])))
    return torch.gru_cell(x, torch.tanh(x @ p["W"]), w, u).square().sum()


PROGRAMS = {
    "layer_norm": _normalised(lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "layer_norm with a bias alone": _normalised(lambda x, w, b: w * F.layer_norm(x, (6,), bias=b)),
    "batch_norm": _normalised(lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
    "instance_norm": _normalised(lambda x, w, b: F.instance_norm(x.T[None], weight=w, bias=b)),
    "group_norm": _normalised(lambda x, w, b: F.group_norm(x, 2, w, b)),
    "hardsigmoid": lambda p, x: F.hardsigmoid(x @ p["W"] * p["w"] + p["b"]).pow(3).sum(),
    "cdist": lambda p, x: torch.cdist(x @ p["W"], (p["w"] * p["b"])[None]).pow(3).sum(),
    "pdist": lambda p, x: F.pdist(x @ p["W"] * p["w"] * p["b"]).pow(3).sum(),
    "sinc": lambda p, x: torch.sinc((x @ p["W"]) * p["w"] - p["b"]).pow(2).sum(),
    "solve": lambda p, x: torch.linalg.solve(_positive(p), x.T).square().sum(),
    "slogdet": lambda p, x: torch.linalg.slogdet(_positive(p))[1] * x.sum(),
    "attention": _attention,
    "gru": _recurrent(torch.gru, 3),
    "lstm": _recurrent(torch.lstm, 4),
    "gru_cell": _cell,
}


def _size(tree):
    return sum(v.square().sum() for v in tree.values())


def _along(tree):
    return sum((tree[k] * T[k]).sum() for k in tree)


DERIVATIVES = {
    "grad": lambda f: lambda p: _size(gt.grad(f)(p, X[0])),
    "grad of grad": lambda f: lambda p: _size(gt.grad(lambda p: _size(gt.grad(f)(p, X[0])))(p)),
    "per_example_grad": lambda f: lambda p: _size(gt.per_example_grad(f)(p, X)),
    "grad of per_example_grad": lambda f: (
        lambda p: _size(gt.grad(lambda p: _size(gt.per_example_grad(f)(p, X)))(p))
    ),
    "vmap of hvp": lambda f: (
        lambda p: gt.vmap(lambda x: _along(gt.hvp(lambda p: f(p, x), (p,), (T,))[1][0]))(X).sum()
    ),
    "forward over reverse": lambda f: (
        lambda p: _size(gt.hvp(lambda p: f(p, X[0]), (p,), (T,), mode="forward_over_reverse")[1][0])
    ),
    "linearize": lambda f: lambda p: gt.linearize(lambda p: f(p, X[0]), p)[1](T) ** 2,
    "jvp of per_example_grad": lambda f: (
        lambda p: _size(gt.jvp(lambda p: gt.per_example_grad(f)(p, X), (p,), (T,))[1])
    ),
}


def _by_backward(h):
    leaves = {k: v.clone().requires_grad_() for k, v in P.items()}
    h(leaves).backward()
    return _along({k: v.grad for k, v in leaves.items()})


OUTER = {
    "grad": lambda h: _along(gt.grad(h)(P)),
    "backward": _by_backward,
    "torch.func.grad": lambda h: _along(torch.func.grad(h)(P)),
    "jvp": lambda h: gt.jvp(h, (P,), (T,))[1],
    "linearize": lambda h: gt.linearize(h, P)[1](T),
}


@pytest.mark.sampled(48, 120)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_mix_of_modes_is_right(program, derivative):
    h = DERIVATIVES[derivative](PROGRAMS[program])
    moved = lambda step: {k: P[k] + step * T[k] for k in P}
    slope = lambda step: (h(moved(step)) - h(moved(-step))).detach() / (2 * step)
    expected = (4 * slope(1e-4) - slope(2e-4)) / 3
    for outer, way in OUTER.items():
        found = way(h).detach()
        torch.testing.assert_close(
            found, expected, rtol=2e-6, atol=1e-6, msg=lambda text, outer=outer: f"{outer}: {text}"
        )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_modules_have_per_example_gradients(kind, bidirectional):
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(
        5, 3, num_layers=2, bidirectional=bidirectional, batch_first=True, dtype=D
    )
    params = {k: v.detach() for k, v in module.named_parameters()}
    loss = lambda p, x: torch.func.functional_call(module, p, (x[None],))[0].square().sum()
    found = gt.per_example_grad(loss)(params, X)
    for k, row in enumerate(X):
        for name, g in gt.grad(loss)(params, row).items():
            torch.testing.assert_close(found[name][k], g)


@pytest.mark.parametrize("kind", ["RNNCell", "GRUCell", "LSTMCell"])
def test_a_derivative_of_native_per_example_gradients_of_a_cell_is_refused_in_words(kind):
    torch.manual_seed(0)
    module, x = getattr(torch.nn, kind)(5, 3, dtype=D), torch.randn(4, 2, 5, dtype=D)
    params = {k: v.detach() for k, v in module.named_parameters()}

    def loss(p, x):
        out = torch.func.functional_call(module, p, (x,))
        return (out if isinstance(out, torch.Tensor) else out[0]).square().sum()

    def penalty(grad, p):
        return sum(g.sin().sum() for g in torch.vmap(grad(loss), (None, 0))(p, x).values())

    of_ours = gt.grad(lambda p: penalty(gt.grad, p))(params)
    one_by_one = lambda p: sum(g.sin().sum() for row in x for g in gt.grad(loss)(p, row).values())
    torch.testing.assert_close(of_ours, gt.grad(one_by_one)(params))
    with pytest.raises(GradtoolsError, match="For these use per_example_grad"):
        gt.grad(lambda p: penalty(torch.func.grad, p))(params)


def test_first_derivatives_run_the_fused_kernels():
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, fun, types, args=(), kwargs=None):
            seen.add(fun.overloadpacket._qualified_op_name)
            return fun(*args, **(kwargs or {}))

    captured = torch.ones(6, dtype=D, requires_grad=True)  # so that the gradient keeps a graph
    for scale in (torch.ones(6, dtype=D), captured):
        seen: set[str] = set()
        f = lambda x, scale=scale: F.layer_norm(x, (6,), scale).tanh().sum()
        with Names():
            gt.grad(f)(X[0] @ P["W"])
        assert {"aten::native_layer_norm", "aten::native_layer_norm_backward"} <= seen


# --- special points ------------------------------------------------------------------------------

MATRICES = {
    "regular": torch.tensor([[2.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.5, 0.0, 1.0]], dtype=D),
    "the identity": torch.eye(3, dtype=D),
    "of rank 2": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [5.0, 7.0, 9.0]], dtype=D),
    "of rank 2, with a zero pivot": torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=D)),
    "of rank 1": torch.ones(3, 3, dtype=D),
    "zero": torch.zeros(3, 3, dtype=D),
}


def _leibniz(a):
    return sum(
        a[..., 0, i] * (a[..., 1, j] * a[..., 2, k] - a[..., 1, k] * a[..., 2, j])
        for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1))
    )


DET_WAYS = {
    "grad": lambda f, a, t: (gt.grad(f)(a) * t).sum(),
    "jvp": lambda f, a, t: gt.jvp(f, (a,), (t,))[1],
    "hvp": lambda f, a, t: gt.hvp(f, (a,), (t,))[1][0],
    "hvp, forward": lambda f, a, t: gt.hvp(f, (a,), (t,), mode="forward_over_reverse")[1][0],
    "grad of jvp": lambda f, a, t: gt.grad(lambda a: gt.jvp(f, (a,), (t,))[1])(a),
    "hessian": lambda f, a, t: gt.hessian(f)(a),
    "third": lambda f, a, t: gt.grad(
        lambda a: (gt.grad(lambda a: (gt.grad(f)(a) * t).sum())(a) * t).sum()
    )(a),
    "frozen": lambda f, a, t: gt.hvp(gt.frozen(f), (a,), (t,))[1][0],
    "vmap of hvp": lambda f, a, t: gt.vmap(lambda a: gt.hvp(f, (a,), (t,))[1][0])(a[None]),
    "under torch.func": lambda f, a, t: torch.func.grad(lambda a: gt.grad(f)(a).mul(t).sum())(a),
}


@pytest.mark.sampled(30, 60)
@pytest.mark.parametrize("way", DET_WAYS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_determinant_has_every_derivative(matrix, way):
    a, t = MATRICES[matrix], torch.randn(3, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    found, expected = (DET_WAYS[way](f, a, t) for f in (torch.linalg.det, _leibniz))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_complex_and_stacked_determinants_have_second_derivatives():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 3, 3, dtype=torch.complex128, generator=generator)
    a[1], a[2, 0] = 0, a[2, 1]
    f = lambda det: lambda a: (det(a).abs() ** 2 + det(a).real).sum()
    for way in (lambda f: gt.grad(f)(a), lambda f: gt.hvp(f, (a,), (a,))[1][0]):
        torch.testing.assert_close(way(f(torch.linalg.det)), way(f(_leibniz)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_sinc_has_every_derivative_at_and_next_to_zero(dtype):
    x = torch.tensor([0.0, 1e-9, 1e-3, 0.3, 0.32, 1.0, -1.5], dtype=dtype)
    even = lambda f: lambda x: (f(x) * x.new_ones(())).real.sum()
    series = lambda x: sum(
        (-1) ** n
        * (torch.pi * x) ** (2 * n)
        / torch.lgamma(torch.tensor(2.0 * n + 2, dtype=D)).exp()
        for n in range(20)
    ).to(x.dtype)
    ones = torch.ones_like(x)
    for way in (
        lambda f: gt.grad(f)(x),
        lambda f: gt.hvp(f, (x,), (ones,))[1][0],
        lambda f: gt.hvp(f, (x,), (ones,), mode="forward_over_reverse")[1][0],
    ):
        found, expected = way(even(torch.sinc)), way(even(series))
        rtol = 1e-3 if dtype is torch.float32 else 1e-7
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


def test_as_strided_scatter_has_the_gradient_of_what_it_keeps():
    base, source = torch.arange(6, dtype=D) + 1, torch.arange(3, dtype=D) - 7

    def by_index(base, source):
        return base.index_copy(0, torch.tensor([0, 2, 4]), source)

    loss = lambda f: lambda base, source: (f(base, source) ** 3).sum()
    scatter = lambda base, source: torch.as_strided_scatter(base, source, (3,), (2,))
    for way in (
        lambda f: gt.grad(f, argnums=(0, 1))(base, source),
        lambda f: gt.hvp(f, (base, source), (base, source))[1],
        lambda f: gt.jvp(f, (base, source), (base, source))[1],
        lambda f: torch.func.grad(lambda b: gt.grad(f)(b, source).pow(2).sum())(base),
    ):
        torch.testing.assert_close(way(loss(scatter)), way(loss(by_index)))


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances_of_equal_points_have_no_gradient(p):
    """As in PyTorch, also where it is differentiated again."""
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.5, -1.0]], dtype=D)
    f = lambda x: torch.cdist(x, x, p).sum()
    (expected,) = torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf)
    torch.testing.assert_close(gt.grad(f)(x), expected)
    torch.testing.assert_close(torch.func.vmap(gt.grad(f))(x[None])[0], expected)
    assert gt.hessian(f)(x).isfinite().all()


@pytest.mark.parametrize("outer", ["grad", "torch.func.grad"])
def test_under_autocast_and_in_bfloat16_a_norm_has_second_derivatives(outer):
    x, w = X[0].to(torch.bfloat16), torch.ones(5)
    f = lambda x: F.layer_norm(x, (5,), w.to(x.dtype)).float().pow(3).sum()
    grad = gt.grad if outer == "grad" else torch.func.grad
    found = grad(lambda x: gt.grad(f)(x).float().square().sum())(x)
    expected = grad(lambda x: gt.grad(f)(x).square().sum())(x.float())
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() <= 0.1 * expected.norm()


# --- checkpoints and compiled code ---------------------------------------------------------------

Q = torch.randn(1, 2, 5, 4, dtype=D, generator=torch.Generator().manual_seed(2))


def _attending(attend):
    return lambda q: attend(q, 2 * q, q).pow(3).sum()


def _by_softmax(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


CHECKPOINTED = _attending(
    lambda *xs: torch.utils.checkpoint.checkpoint(
        F.scaled_dot_product_attention, *xs, use_reentrant=False
    )
)


@pytest.mark.parametrize(
    "way",
    [
        lambda f: gt.grad(lambda q: gt.grad(f)(q).square().sum())(Q),
        lambda f: gt.hvp(f, (Q,), (Q,))[1][0],
        lambda f: gt.hvp(f, (Q,), (Q,), mode="forward_over_reverse")[1][0],
        lambda f: gt.linearize(f, Q)[1](Q),
        lambda f: gt.grad(lambda q: gt.hvp(f, (q,), (q,))[1][0].square().sum())(Q),
    ],
)
def test_fused_attention_in_a_checkpoint_of_pytorchs_has_second_derivatives(way):
    """What such a checkpoint saved may be read once in a pullback."""
    torch.testing.assert_close(way(CHECKPOINTED), way(_attending(_by_softmax)))


def test_per_example_gradients_through_a_checkpoint_of_pytorchs_say_what_to_do():
    f = lambda p, q: CHECKPOINTED(p * q[None])
    p = torch.tensor(1.5, dtype=D)
    with pytest.raises(GradtoolsError, match=r"torch\.utils\.checkpoint.*gt\.checkpoint"):
        gt.per_example_grad(f)(p, Q[0])
    assert gt.per_example_grad(f, chunk_size=1)(p, Q[0]).shape == (2,)


COMPILED = {
    "norm": lambda x: gt.grad(lambda x: F.layer_norm(x, (4,)).pow(3).sum())(x).square().sum(),
    "distances": lambda x: gt.grad(lambda x: torch.cdist(x, x + 1).pow(3).sum())(x).pow(2).sum(),
    "per example": lambda x: (
        gt.per_example_grad(lambda w, x: F.layer_norm(w * x, (4,), w).pow(3).sum())(x[0], x)
        .square()
        .sum()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_derivative_is_that_of_plain_programs(case):
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4).sin()
    fun = gt.grad(COMPILED[case])
    torch.testing.assert_close(gt.compile(fun, backend="aot_eager")(x), fun(x))


@pytest.mark.slow
def test_a_compiled_derivative_that_updates_statistics_says_what_to_do():
    torch._dynamo.reset()
    net = torch.nn.BatchNorm1d(4, dtype=D)
    loss = lambda x: net(x).pow(3).sum()
    with pytest.raises(GradtoolsError, match=r"^compile: f changes a tensor in place that it capt"):
        gt.compile(gt.value_and_grad(loss), backend="aot_eager")(torch.ones(3, 4, dtype=D))


def test_the_tangent_of_a_norm_by_running_statistics_is_differentiated():
    mean, var, x = torch.zeros(6, dtype=D), P["w"], X[0] @ P["W"]
    f = lambda x: F.batch_norm(x, mean, var, P["w"], P["b"]).pow(3).sum()
    by_hand = lambda x: (x / (var + 1e-5).sqrt() * P["w"] + P["b"]).pow(3).sum()
    way = lambda f: gt.grad(lambda x: gt.jvp(f, (x,), (x + 1,))[1])(x)
    torch.testing.assert_close(way(f), way(by_hand))


def test_sinc_in_place_writes_where_it_is_differentiated_again():
    x = torch.tensor([0.0, 0.3, 1.5], dtype=D)

    def f(x):
        y = 1 * x
        y.sinc_()
        return y.pow(2).sum()

    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        way = lambda f, mode=mode: gt.hvp(f, (x,), (x + 1,), mode=mode)
        torch.testing.assert_close(way(f), way(lambda x: torch.sinc(x).pow(2).sum()))


def test_prelu_has_second_derivatives_under_vmap():
    torch.manual_seed(0)
    x, a = torch.randn(3, 2, 4, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    f = lambda x, a: torch.nn.functional.prelu(x, a).pow(3).sum()
    found = gt.vmap(gt.hessian(f), (0, None))(x, a)
    expected = torch.stack([gt.hessian(f)(one, a) for one in x])
    torch.testing.assert_close(found, expected)
    weights = a.expand(4).clone()
    found = gt.vmap(gt.hessian(f, argnums=1), (0, None))(x, weights)
    torch.testing.assert_close(found, torch.stack([gt.hessian(f, 1)(one, weights) for one in x]))


@pytest.mark.parametrize("lengths", [((6,), (2,)), (torch.tensor([6]), torch.tensor([2]))])
def test_ctc_loss_takes_lengths_of_any_kind_example_by_example(lengths):
    torch.manual_seed(0)
    scores = torch.randn(3, 6, 1, 5, dtype=torch.float64)
    targets, scale = (
        torch.tensor([[[1, 2]], [[3, 4]], [[2, 2]]]),
        torch.ones(5, dtype=torch.float64),
    )
    loss = lambda scale, scores, targets: torch.nn.functional.ctc_loss(
        (scores * scale).log_softmax(-1), targets, *lengths
    )
    found = gt.per_example_grad(loss)(scale, scores, targets)
    rows = [gt.grad(loss)(scale, *one) for one in zip(scores, targets, strict=True)]
    torch.testing.assert_close(found, torch.stack(rows))


NORMS = {
    "layer_norm": lambda w, x: F.layer_norm(x, (4,), w, w),
    "batch_norm": lambda w, x: F.batch_norm(x, None, None, w, w, True),
    "instance_norm": lambda w, x: F.instance_norm(x[None], None, None, w[:3], w[:3]),
    "group_norm": lambda w, x: F.group_norm(x, 2, w, w),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("operator", ["jacobian", "hessian"])
def test_a_jacobian_of_a_norm_is_differentiable(norm, operator):
    """Its rows are pulled back under vmap, whose rules take mean and deviation for constants."""
    x = torch.linspace(-1, 2, 12, dtype=D).sin().reshape(3, 4)
    w = torch.linspace(0.5, 1, 4, dtype=D)

    def rows(x, **how):
        f = lambda w, x: (NORMS[norm](w, x) ** 3).sum(-1)
        if operator == "jacobian":
            return gt.jacobian(f, mode="reverse", **how)(w, x).square().sum()
        gradient = gt.grad(lambda w, x: f(w, x).sum())
        return gt.jacobian(gradient, mode="reverse", **how)(w, x).square().sum()

    loop = gt.grad(lambda x: rows(x, chunk_size=1))(x)
    torch.testing.assert_close(gt.grad(rows)(x), loop)
    torch.testing.assert_close(gt.jvp(rows, (x,), (x,))[1], (loop * x).sum())
    y = x.clone().requires_grad_()
    rows(y).backward()
    torch.testing.assert_close(y.grad, loop)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.log_softmax(x, -1),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: torch.linalg.norm(x, dim=1),
        lambda x: F.huber_loss(x, torch.zeros_like(x), delta=0.7),
        lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
        lambda x: F.mse_loss(x, x.flip(0), reduction="sum"),
        lambda x: torch.linalg.solve(x @ x.mT + torch.eye(3, dtype=D), x[:, 0]),
    ],
    ids=["softmax", "log_softmax", "cross_entropy", "norm", "huber", "soft_margin", "mse", "solve"],
)
def test_a_jacobian_by_reverse_mode_is_pushed_along(f):
    x = torch.linspace(-1, 2, 12, dtype=D).sin().reshape(3, 4)
    rows = lambda x: gt.jacobian(f, mode="reverse")(x).square().sum()
    torch.testing.assert_close(gt.jvp(rows, (x,), (x,))[1], (gt.grad(rows)(x) * x).sum())
    forward = lambda x: gt.jacobian(f, mode="forward")(x).square().sum()
    torch.testing.assert_close(gt.jvp(forward, (x,), (x,))[1], (gt.grad(rows)(x) * x).sum())
    torch.testing.assert_close(gt.grad(forward)(x), gt.grad(rows)(x))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weighted_cross_entropy_whose_weights_f_makes_has_forward_jacobians(reduction):
    x, labels = torch.linspace(-1, 2, 9, dtype=D).reshape(3, 3), torch.tensor([0, 2, 1])

    def f(x):
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=D)
        return F.cross_entropy(x, labels, weight=weights, reduction=reduction)

    found = gt.jacobian(gt.grad(f), mode="forward")(x)
    torch.testing.assert_close(found, gt.hessian(f)(x))


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "instance_norm"])
def test_pytorchs_own_vmap_of_the_gradient_of_a_norm_is_refused_inside_a_derivative(norm):
    """Its rules take mean and deviation for constants (functorch#534)."""
    x = torch.linspace(-1, 2, 24, dtype=D).sin().reshape(2, 3, 4)
    w = torch.linspace(0.5, 1, 4, dtype=D)
    f = lambda w, x: (NORMS[norm](w, x) ** 3).sum()
    native = lambda x: torch.func.vmap(torch.func.grad(f), (None, 0))(w, x).square().sum()
    ours = lambda x: gt.vmap(gt.grad(f), (None, 0))(w, x).square().sum()
    loop = lambda x: sum(torch.func.grad(f)(w, each).square().sum() for each in x)
    linear = lambda w, x: (NORMS[norm](w, x) * torch.arange(4.0)).sum()
    of_linear = lambda x: torch.func.vmap(torch.func.grad(linear), (None, 0))(w, x).square().sum()
    for lossy in (native, of_linear):  # of which the graph holds no normalisation
        with pytest.raises(LostDerivativeError, match="PyTorch's own vmap"):
            gt.grad(lossy)(x)
    torch.testing.assert_close(gt.grad(ours)(x), gt.grad(loop)(x))
    mean, scale = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    by_hand = lambda x: ((x - mean) * scale).sum() + gt.grad(lambda x: f(w, x[0]))(x).sum()
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(gt.grad(by_hand)(x), torch.autograd.grad(by_hand(leaf), leaf)[0])
    nested = lambda x: gt.grad(lambda x: f(w, x))(x[0]).square().sum()
    gt.grad(lambda x: gt.grad(nested)(x).sum())(x)  # a third derivative
    mapped = lambda x: torch.func.vmap(f, (None, 0))(w, x).sum()
    torch.testing.assert_close(gt.grad(mapped)(x), gt.grad(lambda x: f(w, x[0]) + f(w, x[1]))(x))
