"""Hooks on gradients at second order: PyTorch's own number where it is right, else a refusal."""

import pytest
import torch

import gradtools.torch as gt
from gradtools.errors import GradtoolsError, LostDerivativeError
from gradtools.torch import double_backward, hook_trials

D = torch.float64


class Equilibrium(torch.nn.Module):
    """z = tanh(W z + x), with the gradient of the tutorial on deep equilibrium models."""

    def __init__(self, dtype=D):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 3, dtype=dtype)
        self.linear.weight.data *= 0.3

    def cell(self, z, x):
        return torch.tanh(self.linear(z) + x)

    def solved(self, x):
        z = torch.zeros_like(x)
        for _ in range(60):
            z = self.cell(z, x)
        return z

    def forward(self, x):
        with torch.no_grad():
            z = self.solved(x)
        z = self.cell(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.cell(z0, x)

        def hook(g):
            v = g
            for _ in range(60):
                v = torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g
            return v

        if z.requires_grad:
            self.handle = z.register_hook(hook)
        return z


def _x(dtype=D):
    return torch.tensor([0.3, -0.8, 0.5], dtype=dtype)


def _ways(f, x, net):
    """Second derivatives of the sum of squares of f."""
    loss, v = lambda x: f(x).square().sum(), torch.ones_like(x)

    def to_parameters():
        net.zero_grad()
        gt.grad(loss)(x).square().sum().backward()
        return net.linear.weight.grad

    return {
        "hvp": lambda: gt.hvp(loss, (x,), (v,))[1][0],
        "hessian": lambda: gt.hessian(loss)(x),
        "jvp of grad": lambda: gt.jvp(gt.grad(loss), (x,), (v,))[1],
        "grad of grad": lambda: gt.grad(lambda x: gt.grad(loss)(x).square().sum())(x),
        "backward to parameters": to_parameters,
    }


WITHIN = {
    "plain": lambda f: f,
    "checkpoint": gt.checkpoint,
    "chunked": lambda f: lambda x: gt.chunked(f, 1)(x[None]),
}


@pytest.mark.slow
@pytest.mark.sampled(slow=6)
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_hook_that_solves_without_a_graph_is_refused_at_second_order_alone(within, dtype):
    net, x = Equilibrium(dtype), _x(dtype)
    loss = lambda f: lambda x: f(x).square().sum()
    expected = gt.grad(loss(net.solved))(x)
    torch.testing.assert_close(gt.grad(loss(WITHIN[within](net)))(x).detach(), expected.detach())
    for name, way in _ways(WITHIN[within](net), x, net).items():
        with pytest.raises(LostDerivativeError, match="sets a hook on a gradient whose result"):
            raise AssertionError(f"{name}: {way()}")


FINE = {
    "scaled": lambda g: 2 * g,
    "clamped": lambda g: g.clamp(-0.3, 0.3),
    "clipped": lambda g: g / (1 + g.norm()),
    "looked at": lambda g: None,
    "constant": lambda g: torch.ones_like(g),
}


def _hooked(net, hook):
    def f(x):
        z = net.cell(net.cell(torch.zeros_like(x), x), x)
        if z.requires_grad:
            z.register_hook(hook)
        return z.sin()

    return f


@pytest.mark.parametrize("hook", FINE)
def test_a_hook_of_pytorchs_operations_passes(hook):
    net, x = Equilibrium(), _x()
    f, v = _hooked(net, FINE[hook]), torch.ones(3, dtype=D)
    y = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(y).square().sum(), y, create_graph=True)
    (expected,) = torch.autograd.grad(g, y, v, retain_graph=True)
    weight = torch.autograd.grad(g.square().sum(), net.linear.weight)[0]
    ways = _ways(f, x, net)
    torch.testing.assert_close(ways["hvp"]().detach(), expected)
    torch.testing.assert_close(ways["backward to parameters"](), weight)
    for within in ("checkpoint", "chunked"):
        way = _ways(WITHIN[within](f), x, net)["hvp"]
        if hook in ("scaled", "looked at"):
            torch.testing.assert_close(way().detach(), expected)
            continue
        with pytest.raises(LostDerivativeError, match="a gradient that is not linear in it"):
            way()


def test_a_hook_that_loses_what_comes_in_is_refused():
    net, x = Equilibrium(), _x()
    for name, way in _ways(_hooked(net, lambda g: g.detach() ** 3), x, net).items():
        with pytest.raises(LostDerivativeError, match="respect to what comes in"):
            raise AssertionError(f"{name}: {way()}")


def _at_module(register, hook):
    def set_at(net):
        getattr(net.act, register)(hook)
        return lambda x: net.act(net.linear(x))

    return set_at


def _at_node(register, hook):
    def set_at(net):
        def f(x):
            y = net.linear(x).sin()
            getattr(y.grad_fn, register)(hook)
            return y

        return f

    return set_at


def _behind_node(hook):
    def set_at(net):
        def f(x):
            y = net.linear(x).sin().exp()
            y.grad_fn.next_functions[0][0].register_prehook(hook)
            return y

        return f

    return set_at


def _cut(g):
    return (g[0].detach() * g[0],)


ELSEWHERE = {
    "full": (_at_module, "register_full_backward_hook", lambda m, gi, go: (gi[0] * go[0],), None),
    "pre": (_at_module, "register_full_backward_pre_hook", lambda m, go: (go[0] ** 2,), None),
    "node": (_at_node, "register_hook", lambda gi, go: (gi[0] * go[0],), None),
    "node pre": (_at_node, "register_prehook", lambda go: (go[0] ** 2,), None),
    "full, lossy": (
        *(_at_module, "register_full_backward_hook"),
        *(lambda m, gi, go: (gi[0] * go[0].detach(),), "what comes in"),
    ),
    "pre, lossy": (
        *(_at_module, "register_full_backward_pre_hook"),
        *(lambda m, go: _cut(go), "what comes in"),
    ),
    "node, lossy": (_at_node, "register_hook", lambda gi, go: _cut(gi), "what comes in"),
    "node pre, lossy": (_at_node, "register_prehook", _cut, "what comes in"),
}


@pytest.mark.parametrize("kind", [*ELSEWHERE, "node behind, lossy"])
def test_hooks_of_modules_and_nodes_are_tried(kind):
    net, x = Equilibrium(), _x()
    net.act = torch.nn.Tanh()
    place, register, hook, lost = ELSEWHERE.get(kind, (None, None, None, "what comes in"))
    f = _behind_node(_cut)(net) if place is None else place(register, hook)(net)
    ways = _ways(f, x, net)
    if lost is None:
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(y).square().sum(), y, create_graph=True)
        (expected,) = torch.autograd.grad(g.sum(), y, retain_graph=True)
        torch.testing.assert_close(ways["hvp"]().detach(), expected)
        net.zero_grad()
        (weight,) = torch.autograd.grad(g.square().sum(), net.linear.weight)
        torch.testing.assert_close(ways["backward to parameters"](), weight)
        return
    for name in ("hvp", "grad of grad", "backward to parameters"):
        with pytest.raises(LostDerivativeError, match=f"respect to {lost}"):
            raise AssertionError(f"{kind}, {name}: {ways[name]()}")


def _batched(f):
    """Derivatives of per-example gradients of f(w x), where f is sum(z ** 3)."""
    x, w = torch.tensor([[0.3, -0.8], [0.5, 1.2]], dtype=D), torch.tensor(1.5, dtype=D)

    def to_captured():
        y = x.clone().requires_grad_()
        gt.per_example_grad(lambda w, x: f(w * x))(w, y).sum().backward()
        return y.grad

    return {
        "vmap": lambda: gt.grad(lambda x: gt.vmap(gt.grad(f))(x).sum())(x) / (6 * x),
        "per example": lambda: (
            gt.grad(lambda x: gt.per_example_grad(lambda w, x: f(w * x))(w, x).sum())(x)
            / (9 * x**2 * w**2)
        ),
        "backward": lambda: to_captured() / (9 * x**2 * w**2),
        "in vmap": lambda: gt.vmap(gt.grad(lambda x: gt.grad(f)(x).sum()))(x) / (6 * x),
    }


@pytest.mark.parametrize("way", ["vmap", "per example", "backward", "in vmap"])
def test_hooks_and_functions_in_a_batch_are_tried(way):
    def hooked(hook):
        def f(x):
            z = x * 1
            z.register_hook(lambda g: hook(z, g))
            return (z**3).sum()

        return f

    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, ct):
            return 3 * ctx.saved_tensors[0].detach() ** 2 * ct

    for hook in (lambda z, g: None, lambda z, g: g.nan_to_num()):
        right = _batched(hooked(hook))[way]()
        torch.testing.assert_close(right.detach(), torch.ones(2, 2, dtype=D))
    for hook, told in ((lambda z, g: g * z.detach(), "cannot diff"), (lambda z, g: 2 * g, "edits")):
        with pytest.raises(LostDerivativeError, match=told):
            _batched(hooked(hook))[way]()
    with pytest.raises(LostDerivativeError, match="Cube"):
        _batched(lambda x: Cube.apply(x).sum())[way]()


def test_the_trial_leaves_everything_as_it_was():
    net, x = Equilibrium(), _x()
    f = lambda x: torch.nn.functional.dropout(net(x), 0.5)
    torch.manual_seed(3)
    g = gt.value_and_grad(lambda x: f(x).square().sum())(x.clone().requires_grad_())[1]
    weight, state = net.linear.weight.detach().clone(), torch.get_rng_state()
    with pytest.raises(LostDerivativeError):
        g.sum().backward()
    assert torch.equal(net.linear.weight, weight) and torch.equal(torch.get_rng_state(), state)
    assert net.linear.weight.grad is None


@pytest.mark.parametrize(
    ("hook", "passes"),
    [
        (lambda g: 3.0 * g, True),
        (lambda g: g.flip(0), True),
        (lambda g: None, True),
        (lambda g: g.clamp(max=1.0), False),
        (lambda g: g / (g.norm() + 1e-6), False),
        (lambda g: torch.where(g > 0, g, 0 * g), False),
    ],
    ids=["scaled", "reversed", "looks", "clamped", "normalized", "positive part"],
)
def test_a_pushforward_by_transposition_needs_hooks_linear_in_the_gradient(hook, passes):
    def f(x):
        y = x**2
        y.register_hook(hook)
        return (y**2).sum()

    x = torch.tensor([0.3, 2.0], dtype=torch.float64)
    if passes:
        pushed = gt.linearize(f, x)[1](torch.ones_like(x))
        (pulled,) = gt.vjp(f, x)[1](torch.ones((), dtype=torch.float64))
        torch.testing.assert_close(pushed, pulled.sum())
    else:
        with pytest.raises(GradtoolsError, match=r"linearize: f sets a hook .* not linear in it"):
            gt.linearize(f, x)[1](torch.ones_like(x))


def test_a_trial_writes_to_no_parameter_of_the_user():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    before, versions = weight.detach().clone(), []

    def f(x):
        y = x * (weight + 1)
        y.register_hook(lambda g: (versions.append(weight._version), 2 * g)[1])
        return (y**2).sum()

    gt.hvp(f, (torch.ones(3, dtype=torch.float64),), (torch.ones(3, dtype=torch.float64),))
    assert set(versions) == {0} and torch.equal(weight, before)


def test_a_hook_that_crosses_a_kink_within_a_step_passes():
    for seed in range(40):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))

        def f(x):
            y = x * 1.0
            y.register_hook(lambda g: g * torch.relu(x))
            return (y**3).sum()

        gt.hvp(f, (x,), (torch.ones(3),))


def test_a_hook_of_half_precision_is_linear_where_it_overflows():
    x = torch.full((2,), 10.0, dtype=torch.float16)

    def f(x):
        y = x * 1.0
        y.register_hook(lambda g: 2 * g)
        return (y * y).sum() * 5

    pushed = gt.linearize(f, x)[1](torch.ones_like(x))
    assert float(pushed) == 400.0


@pytest.mark.parametrize("operator", [gt.checkpoint, lambda f: gt.chunked(f, 2)])
def test_a_hook_that_f_sets_on_a_parameter_stays_one(operator):
    net = torch.nn.Linear(2, 1)
    net.handle = None

    def f(x):
        if net.handle is None:
            net.handle = net.weight.register_hook(lambda g: 2 * g)
        return net(x)

    operator(f)(torch.ones(2, 2)).sum().backward()
    assert len(net.weight._backward_hooks) == 1
    torch.testing.assert_close(net.weight.grad, torch.full((1, 2), 4.0))


def test_a_gate_at_custom_code_is_no_hook_of_the_user():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, ct):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * ct

    y = Cube.apply(_x().requires_grad_())
    double_backward.gate_graph("grad", lambda x: ([Cube.apply(x)], []), [_x()], [y], [])
    handle = y.grad_fn.register_hook(print)
    assert len(handle.hooks_dict_ref()) == 2
    handle.remove()
    assert hook_trials._set_on_nodes([y], 0) == []
