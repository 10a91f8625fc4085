"""Tests frozen functions in PyTorch: kernels without forward mode, state and parameters."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.errors import WARNED

D = torch.float64


@pytest.fixture(autouse=True)
def nothing_told_yet():
    WARNED.clear()


def loss(y, g):
    return (0.01 * (y.sum() + g) ** 3).sum() + (g.reshape(-1)[0] * y).sin().sum()


def second(G, zs, y, order="one use at a time", along=False):
    """Return the derivative of a function of all df/dz_i with respect to y, and all df/dz_i."""
    if along:
        zs = [(z * y.mean()).sin() for z in zs]
    if order == "one use at a time":
        gs = [torch.autograd.grad(loss(y, G(z)), z, create_graph=True)[0] for z in zs]
    else:
        values = [loss(y, G(z)) for z in zs]
        pairs = zip(values, zs, strict=True)
        gs = [torch.autograd.grad(v, z, create_graph=True)[0] for v, z in pairs]
    total = sum((i + 1) * g.pow(2).sum().tanh() for i, g in enumerate(gs))
    total = total + torch.stack(gs).prod(0).sum()
    return [torch.autograd.grad(total, y)[0], *(g.detach() for g in gs)]


def same(found, expected, tolerance=1e-11):
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 1e-8, "the expected derivative is zero"
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def inputs(*shape, count=3, dtype=D):
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    make = lambda *s: torch.randn(s, generator=generator, dtype=dtype).mul(0.5).requires_grad_()
    return [make(*shape) for _ in range(count)], make(2)


def decoder():
    layers = [nn.Unflatten(1, (1, 2, 2)), nn.ConvTranspose2d(1, 2, 3), nn.Tanh()]
    return nn.Sequential(*layers, nn.Conv2d(2, 3, 3, stride=2, padding=1, groups=1))


def encoder(dropout=0.0):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, activation="gelu")


def normalised():
    parts = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)]
    return nn.Sequential(*parts)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5)

    def forward(self, x):
        return self.lstm(x)[0]


NETWORKS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (2, 4)),
    "decoder": (decoder, (2, 4)),
    "batch norm and dropout": (normalised, (5, 4)),
    "encoder": (encoder, (2, 3, 8)),
    "encoder with dropout": (lambda: encoder(0.2), (2, 3, 8)),
    "encoder, evaluated": (lambda: encoder(0.2).eval(), (2, 3, 8)),
    "recurrent": (Recurrent, (3, 2, 4)),
}


@pytest.mark.sampled(40, 80)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("order", ["one use at a time", "all forwards first"])
@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.filterwarnings("ignore:frozen. _scaled_dot_product")
def test_it_is_double_backward_bit_for_bit_in_state(name, order, along, tracked):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain = make().to(D).requires_grad_(tracked)
    ours = copy.deepcopy(plain)
    zs, y = inputs(*shape)
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH):
        expected = second(plain, zs, y, order, along)
    after = torch.rand(2)
    torch.manual_seed(3)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        found = second(gt.frozen(ours), zs, y, order, along)
    same(found, expected)
    assert torch.equal(torch.rand(2), after)
    for key, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


# --- kernels without forward mode -------------------------------------------------------------


class WithoutJvp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, ct):
        return 3 * ctx.saved_tensors[0] ** 2 * ct


@pytest.mark.parametrize("along", [False, True])
def test_a_function_without_jvp_takes_double_backward(along):
    zs, y = inputs(2, 4)
    found = second(gt.frozen(lambda z: WithoutJvp.apply(z.sin())), zs, y, along=along)
    same(found, second(lambda z: z.sin() ** 3, zs, y, along=along))


def test_mixed_partial_names_frozen_where_g_has_no_forward_mode():
    G = WithoutJvp.apply
    z, u, y = (torch.randn(3, 2, 4, dtype=D) for _ in range(3))
    f = lambda y, g: (y.sum() * g).sin().sum()
    with pytest.raises(
        GradtoolsError, match=r"no forward mode in PyTorch\. PyTorch says: .*gt\.frozen"
    ):
        gt.mixed_partial(f, G, y, z, u)
    slope = lambda y: (gt.grad(lambda z: f(y, gt.frozen(G)(z)))(z) * u).sum()
    plain = lambda y: (gt.grad(lambda z: f(y, G(z)))(z) * u).sum()
    same([gt.grad(slope)(y)], [gt.grad(plain)(y)])


# --- operations that stop or change gradients in reverse mode ---------------------------------


def under_no_grad(z):
    with torch.no_grad():
        s = nn.functional.linear(z.sin(), torch.ones(4, 4, dtype=D))
    return z * s


def in_inference_mode(z):
    with torch.inference_mode():
        s = z @ torch.ones(4, 4, dtype=D)
    return z * s.clone()


def a_hook(z):
    h = z.sin()
    h.register_hook(lambda g: 0.5 * g)
    return h**2


def a_hook_where_gradients_are_wanted(z):
    h = z.sin()
    if h.requires_grad:
        h.register_hook(lambda g: 0.5 * g)
    return h**2


def own_derivative(z):
    return torch.autograd.grad((z.sin() * z).sum(), z, create_graph=True)[0]


def forward_mode_of_functorch(z):
    return torch.func.jvp(lambda x: x.sin() * x, (z,), (z.cos(),))[1]


STOPPED = [
    *(under_no_grad, in_inference_mode, a_hook, own_derivative),
    *(forward_mode_of_functorch, a_hook_where_gradients_are_wanted),
]


@pytest.mark.parametrize("G", STOPPED, ids=lambda G: G.__name__)
@pytest.mark.parametrize("along", [False, True])
@pytest.mark.filterwarnings("ignore:frozen. .* lacks")
def test_gradients_stop_and_change_in_forward_mode_as_in_reverse_mode(G, along):
    zs, y = inputs(3, 4)
    expected = second(lambda z: G(z * 1), zs, y, along=along)
    same(second(gt.frozen(lambda z: G(z * 1)), zs, y, along=along), expected)
    assert torch.is_grad_enabled()
    assert torch._C._is_fwd_grad_enabled()


# --- third order ------------------------------------------------------------------------------


@pytest.mark.slow_at("fff")
@pytest.mark.parametrize("operator", ["frozen", "chunked", "checkpoint"])
@pytest.mark.parametrize("mix", [*map("".join, itertools.product("fr", repeat=3))])
def test_each_mix_of_modes_at_third_order_is_that_of_the_function_itself(operator, mix):
    z, v = torch.linspace(-1, 1, 6, dtype=D).reshape(3, 2).cos(), torch.ones(3, 2, dtype=D)
    v[0] = -2.0
    own = {"chunked": lambda: gt.chunked(torch.tanh, 2)}
    G = own.get(operator, lambda: getattr(gt, operator)(torch.tanh))()
    modes = {
        "f": lambda h: lambda z: gt.jvp(h, (z,), (v,))[1],
        "r": lambda h: lambda z: (gt.grad(h)(z) * v).sum(),
    }
    found, expected = lambda z: (G(z) ** 2).sum(), lambda z: (z.tanh() ** 2).sum()
    for mode in mix:
        found, expected = (
            modes[mode](found),
            (lambda h: lambda z: torch.func.jvp(h, (z,), (v,))[1])(expected),
        )
    same([found(z)], [expected(z)])


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("along", [False, True])
def test_an_argument_may_be_expanded(tracked, along):
    """The entries of z share memory, and the tangent of z has the same strides."""
    base, y = torch.linspace(-1, 1, 4, dtype=D, requires_grad=True), torch.ones(3, dtype=D)
    model, y = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).to(D), y.requires_grad_()
    model.requires_grad_(tracked)
    found = []
    for G in (model, gt.frozen(model)):
        z = base.expand(5, 4)
        (slope,) = torch.autograd.grad((y * G(z)).square().sum(), z, create_graph=True)
        asked = [y, base] if along else [y]
        found.append(torch.autograd.grad(slope.pow(3).sum(), asked))
    for own, plain in zip(*found, strict=True):
        torch.testing.assert_close(own, plain)


def test_a_mixed_partial_is_freed_without_the_garbage_collector():
    y, net = torch.ones(3, dtype=D), nn.Linear(3, 3).to(D)
    z = torch.linspace(-1, 1, 3, dtype=D)
    partial = lambda: gt.mixed_partial(lambda y, g: (y * g).square().sum(), net, y, z, z.cos())
    partial()  # imports modules
    gc.collect()
    gc.disable()
    try:
        partial()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_directions_of_mixed_partial_see_one_mask():
    G = lambda z: nn.functional.dropout(torch.tanh(z), 0.5, True)
    f = lambda y, g: (torch.sin(y * g) * y).sum()
    u = torch.ones(64)
    first, second, third = gt.mixed_partial(f, G, u, torch.linspace(-1, 1, 64), [u, u, 2 * u])
    assert torch.equal(first, second) and torch.equal(2 * first, third)
    assert first.count_nonzero() > 8


# --- parameters -------------------------------------------------------------------------------

REFUSED = "a derivative is needed with respect to a parameter that G reads"


@pytest.mark.parametrize("order", [1, 2])
def test_asking_for_a_parameters_derivative_raises(order):
    model = nn.Linear(4, 3).to(D)
    (z,), y = inputs(2, 4, count=1)
    G = gt.frozen(model)
    value = loss(y, G(z))
    if order == 2:
        (g,) = torch.autograd.grad(value, z, create_graph=True)
        value = g.pow(2).sum()
    with pytest.raises(GradtoolsError, match=REFUSED):
        torch.autograd.grad(value, model.weight, retain_graph=True)
    with pytest.raises(GradtoolsError, match=REFUSED):
        value.backward(retain_graph=True)
    value.backward(inputs=[y], retain_graph=True)
    assert y.grad is not None and model.weight.grad is None


DERIVATIVES = {
    "gt.jvp": lambda G, z, t: gt.jvp(G, (z,), (t,))[1],
    "gt.jacobian, reverse": lambda G, z, t: gt.jacobian(G, mode="reverse")(z),
    "gt.hvp": lambda G, z, t: gt.hvp(lambda z: G(z).pow(2).sum(), (z,), (t,))[1][0],
    "torch.func.jvp": lambda G, z, t: torch.func.jvp(G, (z,), (t,))[1],
    "torch.func.jacrev": lambda G, z, t: torch.func.jacrev(G)(z),
    "vmap of grad": lambda G, z, t: torch.vmap(torch.func.grad(lambda z: G(z).pow(2).sum()))(
        torch.stack([z, t])
    ),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_of_each_derivative_that_of_a_parameter_raises_and_that_of_an_argument_is_right(derivative):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(D)
    z, t = torch.randn(3, dtype=D, requires_grad=True), torch.randn(3, dtype=D)
    found = derivative(gt.frozen(model), z, t).sum()
    expected = torch.autograd.grad(derivative(model, z, t).sum(), z)
    same(torch.autograd.grad(found, z, retain_graph=True), expected)
    with pytest.raises(GradtoolsError, match="a derivative is needed with respect to a parameter"):
        torch.autograd.grad(found, model[0].weight)


def test_a_captured_tensor_that_is_computed_from_others_is_a_constant():
    (z,), y = inputs(2, 4, count=1)
    scaled = 2 * y.sum()
    value = gt.frozen(lambda z: z * scaled)(z).sum()
    (g,) = torch.autograd.grad(value, z, retain_graph=True)
    torch.testing.assert_close(g, scaled.detach().expand(2, 4))
    with pytest.raises(GradtoolsError, match=REFUSED):
        torch.autograd.grad(value, y)


# --- engines ----------------------------------------------------------------------------------


def net(z):
    return (z.sin() @ torch.ones(4, 3, dtype=D).tril()).exp()


def test_uses_that_are_pulled_back_more_than_once():
    (z,), y = inputs(2, 4, count=1)

    def twice(G):
        value = loss(y, G(z))
        (a,) = torch.autograd.grad(value, z, create_graph=True)
        (b,) = torch.autograd.grad(value.sin(), z, create_graph=True)
        total = (a * b).sum()
        first = torch.autograd.grad(total, (y, z), retain_graph=True)
        return [*first, *torch.autograd.grad(total, (y, z))]

    same(twice(gt.frozen(net)), twice(net))


@pytest.mark.parametrize("place", ["a global", "an attribute", "a closure"])
def test_a_tensor_of_torch_func_that_G_captures_is_differentiated(place):
    class Holder:
        pass

    def slope(wrap):
        def of(w):
            held = Holder()
            held.w, HELD["w"] = 2 * w, 2 * w
            captured = held.w
            G = {
                "a global": lambda z: z @ HELD["w"],
                "an attribute": lambda z: z @ held.w,
                "a closure": lambda z: z @ captured,
            }[place]
            return torch.func.grad(lambda z: (wrap(G)(z) ** 3).sum())(zs[0].detach()).square().sum()

        return torch.func.grad(of)(torch.linspace(-1, 1, 16, dtype=D).reshape(4, 4))

    zs, _ = inputs(2, 4)
    same([slope(gt.frozen)], [slope(lambda G: G)])


HELD = {}


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_of_G_that_is_changed_before_the_second_derivative_is_told(requires_grad):
    module = torch.nn.Linear(3, 3).requires_grad_(requires_grad)
    z, y = torch.ones(3), torch.ones(3, requires_grad=True)
    slope = gt.grad(lambda z: (y * gt.frozen(module)(z).tanh()).sum())(z)
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation: frozen computes G again"):
        slope.square().sum().backward(inputs=[y])


@pytest.mark.parametrize("tracked", [False, True])
def test_a_plain_backward_computes_no_derivative_along_aliases_of_a_finished_grad(tracked):
    calls, w = itertools.count(), torch.full((3,), 0.5, dtype=torch.float64)

    def G(z):
        next(calls)
        return torch.tanh(z * w)

    y = torch.full((), 0.7, dtype=torch.float64, requires_grad=True)
    z = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=tracked)

    def total(G):
        slope = gt.grad(lambda z: (y * G(z) ** 2).sum())(z)
        return slope.square().sum()

    expected = torch.autograd.grad(total(G), [y, z] if tracked else [y])
    result = total(gt.frozen(G))
    before = next(calls)
    result.backward()
    # the backward pass evaluates G once more, in forward mode or by double backward
    assert next(calls) - before - 1 == 1
    assert torch.allclose(y.grad, expected[0])
    assert z.grad is None or torch.allclose(z.grad, expected[1])
    assert (z.grad is not None) == tracked


def _energy(z):
    rows = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4)
    return torch.vmap(lambda row: (row * z).sin().sum())(rows).sum()


def _gradients_at_new_parameters(z):
    """Return z cos(z) six times; each inner derivative is taken at a constant."""
    for _ in range(6):
        z = z * nn.Parameter(torch.full((4,), 1.1, dtype=D))
        z = gt.vjp(lambda w: (w * z).sin().sum(), torch.ones(4, dtype=D))[1](ONE)[0]
    return z


ONE = torch.ones((), dtype=D)
DERIVATIVES_WITHIN = {
    "vjp of vmap": lambda z: gt.vjp(_energy, z)[1](ONE)[0],
    "grad of vmap": gt.grad(_energy),
    "hvp of vmap": lambda z: gt.hvp(_energy, (z,), (z.cos(),))[1][0],
    "linearize of vmap": lambda z: gt.linearize(_energy, z)[1](z.cos()).expand(4),
    "linearize of an edit": lambda z: gt.linearize(lambda q: gt.scale_gradient(q, 2.0), z)[1](
        z.cos()
    ),
    "new parameters": _gradients_at_new_parameters,
}


@pytest.mark.parametrize("name", DERIVATIVES_WITHIN)
def test_a_function_that_takes_derivatives_is_differentiated_in_forward_mode(name):
    G, y = DERIVATIVES_WITHIN[name], torch.linspace(0.2, 1, 4, dtype=D)
    f = lambda y, g: (y * g).sin().sum()
    for k in range(20):  # the ids of tensors that G frees are used again
        z = (y * (k + 1)).sin()
        expected = gt.grad(lambda y: gt.grad(lambda z: f(y, G(z)))(z).sum())(y)
        torch.testing.assert_close(gt.mixed_partial(f, G, y, z, torch.ones(4, dtype=D)), expected)
        frozen, x = gt.frozen(G), z.clone().requires_grad_()
        torch.autograd.grad((frozen(x) + frozen(2 * x)).sum(), x)
        slope = lambda y: gt.grad(lambda z: f(y, frozen(z)))(z).sum()
        torch.testing.assert_close(gt.grad(slope)(y), expected)


@pytest.mark.parametrize("remade", ["checkpoint", "chunked"])
def test_parameters_of_a_frozen_function_stay_constants_in_a_recomputed_function(remade):
    W, V = (torch.linspace(-1, k, 9, dtype=D).reshape(3, 3).requires_grad_() for k in (1, 2))
    x = torch.linspace(-1, 2, 12, dtype=D).reshape(4, 3).requires_grad_()
    G = gt.frozen(lambda x: (x @ W).tanh())
    again = {"checkpoint": gt.checkpoint, "chunked": lambda f: gt.chunked(f, 2)}[remade]

    def derivatives(f):
        slope, of_v = torch.autograd.grad(f(x).sin().sum(), [x, V], create_graph=True)
        return slope, of_v, *torch.autograd.grad(slope.square().sum(), [x, V])

    result = derivatives(again(lambda x: G(x) @ V))
    expected = derivatives(lambda x: (x @ W.detach()).tanh() @ V)
    torch.testing.assert_close(result, expected)
    with pytest.raises(GradtoolsError, match="frozen: a derivative is needed with respect to"):
        again(lambda x: G(x) @ V)(x).sum().backward()
