"""Forward mode where PyTorch's own is wrong or lacking: custom operators, formulas, guards."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents

X = torch.tensor([0.7, -1.2, 2.0], dtype=torch.float64)
T = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
F = torch.nn.functional


@torch.library.custom_op("gradtools_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(x.detach().numpy() ** 3)


@cube.register_fake
def _(x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


cube.register_autograd(lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2, setup_context=_save)


@torch.library.custom_op("gradtools_tests::lossy", mutates_args=())
def lossy(x: torch.Tensor) -> torch.Tensor:
    return x**3


lossy.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0].detach() ** 2, setup_context=_save
)


@torch.library.custom_op("gradtools_tests::without", mutates_args=())
def without(x: torch.Tensor) -> torch.Tensor:
    return x**3


WAYS = {
    "jvp": lambda f: gt.jvp(f, (X,), (T,))[1],
    "jvp under no_grad": lambda f: torch.no_grad()(gt.jvp)(f, (X,), (T,))[1],
    "linearize": lambda f: gt.linearize(f, X)[1](T),
    "forward jacobian": lambda f: gt.jacobian(f, mode="forward")(X) @ T,
    "jvp of vmap": lambda f: gt.jvp(torch.func.vmap(f), (X[None],), (T[None],))[1][0],
    "vmap of jvp": lambda f: torch.func.vmap(lambda x: gt.jvp(f, (x,), (T,))[1])(X[None])[0],
    "hvp, forward over reverse": lambda f: gt.hvp(
        lambda x: f(x).sum(), (X,), (T,), mode="forward_over_reverse"
    )[1][0],
    "hvp, reverse over reverse": lambda f: gt.hvp(lambda x: f(x).sum(), (X,), (T,))[1][0],
    "grad of jvp": lambda f: gt.grad(lambda x: gt.jvp(f, (x,), (T,))[1].sum())(X),
    "jvp of jvp": lambda f: gt.jvp(lambda x: gt.jvp(f, (x,), (T,))[1], (X,), (T,))[1],
    "reverse over forward jacobian": lambda f: torch.einsum(
        "abc,b,c->a", gt.jacobian(gt.jacobian(f, mode="forward"), mode="reverse")(X), T, T
    ),
    "third order": lambda f: gt.grad(
        lambda x: gt.hvp(lambda x: f(x).sum(), (x,), (T,), mode="forward_over_reverse")[1][0] @ T
    )(X),
}


@pytest.mark.slow_at("jvp of jvp", "reverse over forward jacobian")
@pytest.mark.parametrize("way", WAYS)
def test_a_custom_operator_with_a_backward_alone_has_every_mode(way):
    torch.testing.assert_close(WAYS[way](cube), WAYS[way](lambda x: x**3))


def named(name):
    """A custom operator, the cube, with the name of one of PyTorch's."""
    op = torch.library.custom_op(
        f"gradtools_named::{name}", lambda x: x**3, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2, setup_context=_save)
    return op


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "prelu", "silu", "det"])
def test_a_custom_operator_with_the_name_of_one_of_pytorchs_is_itself(name):
    op = named(name)
    for way in ("jvp", "jvp under no_grad", "hvp, forward over reverse", "jvp of vmap"):
        torch.testing.assert_close(WAYS[way](op), WAYS[way](lambda x: x**3))


def test_plain_pytorch_still_drops_a_custom_operators_tangent():
    """When this fails, upstream has mended it: `_is_custom` in pushing.py may go."""
    with torch.autograd.forward_ad.dual_level():
        y = cube(torch.autograd.forward_ad.make_dual(X, T))
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is None


def test_mixed_partial_and_frozen_take_a_custom_operator_in_G():
    y, z = (torch.tensor(v, dtype=torch.float64) for v in (2.0, 2.0))
    f = lambda y, g: y**2 * g
    assert float(gt.mixed_partial(f, cube, y, z, torch.ones_like(z))) == 48  # 2 y 3 z^2
    G = gt.frozen(cube)
    slope = lambda y: gt.grad(lambda z: f(y, G(z)))(z)  # y^2 3 z^2
    assert float(gt.grad(lambda y: slope(y) ** 2)(y)) == 4608  # 4 y^3 (3 z^2)^2


def test_what_a_custom_operator_lacks_is_refused_by_name():
    with pytest.raises(GradtoolsError, match=r"gradtools_tests\.without.*no autograd formula"):
        gt.jvp(without, (X,), (T,))
    for way in ("grad of jvp", "hvp, forward over reverse", "hvp, reverse over reverse"):
        with pytest.raises(GradtoolsError, match=r"lossy.*second derivative is lost"):
            WAYS[way](lossy)
    torch.testing.assert_close(gt.jvp(lossy, (X,), (T,))[1], 3 * X**2 * T)


@pytest.mark.slow
def test_compiled_forward_mode_leaves_a_custom_operator_out_of_the_graph():
    torch._dynamo.reset()
    pushed = lambda x: gt.jvp(cube, (x,), (T,))[1]
    found = torch.compile(pushed, backend="aot_eager")(X)
    torch.testing.assert_close(found, 3 * X**2 * T)
    torch._dynamo.reset()
    with pytest.raises(TorchDynamoException, match="PyTorch traces no tangent of"):
        torch.compile(pushed, backend="aot_eager", fullgraph=True)(X)


@pytest.mark.sweep_at("det", "layer_norm", "softmax")
@pytest.mark.parametrize("name", ["det", "slogdet", "layer_norm", "softmax"])
def test_compiled_tangents_are_differentiated_rightly(name):
    f = {
        "det": torch.linalg.det,
        "slogdet": lambda x: torch.linalg.slogdet(x)[1],
        "layer_norm": lambda x: (F.layer_norm(x, (3,)) ** 3).sum(),
        "softmax": lambda x: (torch.softmax(x, 0) ** 2).sum(),
    }[name]
    torch._dynamo.reset()
    A, t = torch.outer(X, T) + 2 * torch.eye(3, dtype=X.dtype), torch.outer(T, X)
    found = torch.compile(
        lambda x: gt.grad(lambda x: gt.jvp(f, (x,), (t,))[1])(x),
        backend="aot_eager",
        fullgraph=True,
    )(A)
    torch.testing.assert_close(found, gt.hvp(f, (A,), (t,))[1][0])


def test_an_operation_without_forward_mode_is_pushed_by_its_backward():
    index = torch.tensor([0, 2, 2])
    f = lambda x: X.index_reduce(0, index, x, "mean")
    with pytest.raises(NotImplementedError, match="Trying to use forward AD"):
        torch.func.jvp(f, (X,), (T,))
    expected = gt.jacobian(f, mode="reverse")(X) @ T
    torch.testing.assert_close(gt.jvp(f, (X,), (T,))[1], expected)


@torch.library.custom_op("gradtools_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.rand_like(x)
    return x.sin() * noise, noise


noisy.register_autograd(
    lambda ctx, g, _: g * ctx.saved_tensors[0].cos() * ctx.saved_tensors[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
)


@pytest.mark.quick_at("_standard_gamma")
@pytest.mark.parametrize("draws", [torch._standard_gamma, lambda x: noisy(x)[0]])
def test_what_draws_and_is_pushed_by_its_backward_draws_once(draws):
    positive = X.abs()

    def seeded(run):
        torch.manual_seed(0)
        return run(), torch.rand(2)

    expected, after = seeded(lambda: gt.jacobian(draws, mode="reverse")(positive))
    forward = [
        lambda: gt.jvp(draws, (positive,), (T,))[1],
        lambda: gt.jacobian(draws, mode="forward", chunk_size=1)(positive) @ T,
    ]
    if draws is torch._standard_gamma:
        forward.append(lambda: gt.jacobian(draws, mode="forward")(positive) @ T)
    for run in forward:
        found, then = seeded(run)
        torch.testing.assert_close(found, expected @ T)
        assert torch.equal(then, after)


NORMS = {
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w, w),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w, w, True),
    "batch_norm, eval": lambda x, w: F.batch_norm(x, w.detach(), w.detach() ** 2, w, w),
    "instance_norm": lambda x, w: F.instance_norm(x[None], None, None, w[:3], w[:3]),
    "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_normalisation_of_16_bits_with_weights_of_32_keeps_its_dtype(norm, trained):
    weight = torch.tensor([1.0, 2.0, -1.0, 0.5], requires_grad=trained)
    x = torch.linspace(-1, 2, 12).reshape(3, 4).sin()
    wide, expected = gt.jvp(lambda x: norm(x, weight), (x,), (x.cos(),))
    narrow = [x.bfloat16(), x.cos().bfloat16()]
    y, pushed = gt.jvp(lambda x: norm(x, weight), narrow[:1], narrow[1:])
    assert y.dtype == pushed.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), wide, rtol=0.05, atol=0.05)
    torch.testing.assert_close(pushed.float(), expected, rtol=0.05, atol=0.05)


def test_draws_of_examples_that_cannot_be_repeated_are_refused():
    with pytest.raises(GradtoolsError, match=r"noisy\.default draws random"):
        gt.vmap(lambda x: gt.jvp(lambda x: noisy(x)[0], (x,), (T,))[1])(X[None])


def test_linearize_pushes_where_backward_has_no_derivative_or_none_at_zero():
    wide = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    for f in (F.hardsigmoid, lambda x: torch.logcumsumexp(x, 0)[-1], lambda x: F.pdist(x[:, None])):
        slope = lambda h, f=f: (f(wide + h * T) - f(wide - h * T)) / (2 * h)
        expected = (4 * slope(1e-4) - slope(2e-4)) / 3
        torch.testing.assert_close(gt.linearize(f, wide)[1](T), expected, rtol=1e-7, atol=1e-9)


def test_in_place_forms_go_the_same_way():
    index = torch.tensor([0, 1, 1])

    def f(x):
        y = x.clone()
        return y.scatter_reduce_(0, index, 2 * x, "prod") + y

    expected = gt.jacobian(f, mode="reverse")(X) @ T
    torch.testing.assert_close(gt.jvp(f, (X,), (T,))[1], expected)


def test_what_no_mode_sees_is_refused_along_its_input_alone():
    @torch.jit.script
    def scripted(x):
        return torch.linalg.slogdet(x)[1]

    A, t = torch.outer(X, T) + 2 * torch.eye(3, dtype=X.dtype), torch.outer(T, X)
    with pytest.raises(GradtoolsError, match=r"^jvp: .*TorchScript that holds LinalgSlogdet"):
        gt.grad(lambda x: gt.jvp(scripted, (x,), (t,))[1])(A)
    W = A.clone().requires_grad_()
    pushed = gt.jvp(lambda x: torch.linalg.det(W) * (x**2).sum(), (X,), (T,))[1]
    expected = torch.linalg.det(W) * torch.linalg.inv(W).mT * 2 * (X @ T)
    torch.testing.assert_close(torch.autograd.grad(pushed, W)[0], expected)


def test_cdist_is_not_mapped_by_the_batching_rule_that_is_wrong():
    A = torch.outer(X, T)
    f = lambda x: torch.cdist(x, 1 - 2 * x)
    rows = gt.jacobian(f, chunk_size=1)(A)
    torch.testing.assert_close(gt.jacobian(f)(A), rows)
    torch.testing.assert_close(torch.func.vmap(gt.jacobian(f))(A[None])[0], rows)
    torch.testing.assert_close(gt.jacobian(f, mode="forward")(A), rows)


def test_frozen_takes_complex_linear_algebra_rightly():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(3, 3, dtype=torch.complex128, generator=generator)
    x, w, s = draw().requires_grad_(), draw().requires_grad_(), draw()
    found = []
    for G in (torch.linalg.pinv, gt.frozen(torch.linalg.pinv)):
        (g,) = torch.autograd.grad(G(x), x, w, create_graph=True)
        found.append(torch.autograd.grad(g, (x, w), s))
    for plain, frozen in zip(*found, strict=True):
        torch.testing.assert_close(frozen, plain)


def test_a_tangent_is_an_ordinary_tensor():
    A = torch.outer(X, T) + 2 * torch.eye(3, dtype=X.dtype)
    sign, _ = gt.jvp(torch.linalg.slogdet, (A,), (A,))[1]
    assert sign.numpy() == 0


def test_gradients_switched_off_within_a_function_of_pytorch_are_on_again_behind_it():
    target = torch.zeros(3, dtype=torch.float64)
    f = lambda x: F.gaussian_nll_loss(x, target, x**2 + 1, reduction="none") * x
    expected = gt.jacobian(f, mode="reverse")(X) @ T
    for keep in (True, False):
        with torch.set_grad_enabled(keep):
            torch.testing.assert_close(gt.jvp(f, (X,), (T,))[1], expected)
    found = gt.mixed_partial(lambda y, g: (y * g).sum(), f, torch.ones_like(X), X, T)
    torch.testing.assert_close(found, expected)


COMPLEX = (torch.tensor([0.7 + 0.5j, -1.1 + 0.3j]).to(torch.complex128), torch.tensor([0.3, 0.6j]))
REAL = (torch.tensor([0.7, -1.1], dtype=torch.float64), torch.tensor([0.3, 0.6]))
EXPONENTS = torch.tensor([-2, 1])
WRONG_IN_REVERSE_TOO = {
    "silu of complex numbers": (F.silu, COMPLEX),
    "silu of complex numbers, in place": (lambda z: F.silu(z * 1, inplace=True), COMPLEX),
    "ldexp with integers": (lambda x: torch.ldexp(x, EXPONENTS), REAL),
    "ldexp with integers, in place": (lambda x: (x * 1).ldexp_(EXPONENTS), REAL),
}


@pytest.mark.parametrize("case", WRONG_IN_REVERSE_TOO)
@pytest.mark.parametrize("way", ["jvp", "linearize", "jvp under torch.func"])
def test_a_tangent_is_right_where_pytorch_has_neither_mode_right(case, way):
    """Against central differences; PyTorch takes 2 to a negative integer in integers."""
    f, (x, t) = WRONG_IN_REVERSE_TOO[case]
    t = t.to(x.dtype)
    push = {
        "jvp": lambda: gt.jvp(f, (x,), (t,))[1],
        "linearize": lambda: gt.linearize(f, x)[1](t),
        "jvp under torch.func": lambda: torch.func.grad(
            lambda s: torch.view_as_real(gt.jvp(f, (x,), (s * t,))[1] + 0j).sum()
        )(torch.ones((), dtype=torch.float64)),
    }
    expected = (f(x + 1e-5 * t) - f(x - 1e-5 * t)) / 2e-5
    if way == "jvp under torch.func":
        expected = torch.view_as_real(expected + 0j).sum()
    torch.testing.assert_close(push[way](), expected, rtol=1e-9, atol=1e-9)


BLOCKS = {
    "off": torch.no_grad,
    "on": torch.enable_grad,
    "set off": lambda: torch.set_grad_enabled(False),
    "set on": lambda: torch.set_grad_enabled(True),
}


@pytest.mark.parametrize("blocks", [*itertools.product(BLOCKS, repeat=3)], ids=" ".join)
def test_blocks_in_blocks_stop_what_they_stop_in_reverse_mode(blocks):
    def nested(x, names):
        if not names:
            return x**2
        with BLOCKS[names[0]]():
            return x**3 + nested(x, names[1:]) + x**4

    f = lambda x: x + nested(x, blocks) + x**5
    x = torch.tensor(1.3, dtype=torch.float64)
    torch.testing.assert_close(gt.jvp(f, (x,), (torch.ones_like(x),))[1], gt.grad(f)(x))


def test_a_derivative_within_f_of_a_forward_rule_has_its_tangent_each_time():
    """The block in a Function's forward leaves off what autograd switched off, and f did not."""
    cube = gt.custom_rule(lambda x: x**3)
    cube.defjvp(lambda primals, tangents: (primals[0] ** 3, 3 * primals[0] ** 2 * tangents[0]))

    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(cube(x).sum(), x, create_graph=True)[0]

    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(gt.jvp(slope, (x,), (torch.ones_like(x),))[1], 6 * x)


@pytest.mark.slow_at("function")
@pytest.mark.parametrize("place", ["function", "module", "inside"])
def test_what_is_compiled_keeps_its_tangent(place):
    """Compiled code drops it in silence; so it runs as it was written, and compiled afterwards."""
    calls = []

    def backend(graph, example_inputs):
        compiled = lambda *args: calls.append(1) or graph(*[x.detach() for x in args])
        return compiled

    class Square(torch.nn.Module):
        def forward(self, x):
            return x**2

    square = torch.compile(Square() if place == "module" else lambda x: x**2, backend=backend)
    square(X)
    f = (lambda x: square(x) + 0 * x) if place == "inside" else square
    torch.testing.assert_close(gt.jvp(f, (X,), (T,))[1], 2 * X * T)
    ran = len(calls)
    square(X)
    assert len(calls) == ran + 1


def test_blocks_that_stop_inside_of_a_block_that_autograd_has_around_it_stop_nothing_behind_it():
    with torch.autograd.forward_ad.dual_level(), NoGradStopsTangents(hidden=False) as mode:
        with torch._C.DisableTorchFunction():  # as autograd, which no mode sees
            torch._C._set_grad_enabled(False)
        with torch.enable_grad(), torch.no_grad(), torch.no_grad():
            pass
        assert mode._stopped is None
        torch.set_grad_enabled(True)


def test_nested_checkpoints_have_their_tangent():
    """What the outer one packs for the inner one is packed while autograd has gradients off."""
    inner = partial(checkpoint, torch.sin, use_reentrant=False)
    f = lambda x: checkpoint(lambda x: inner(x) * x, x, use_reentrant=False) * x
    expected = (2 * X * X.sin() + X**2 * X.cos()) * T
    torch.testing.assert_close(gt.jvp(f, (X,), (T,))[1], expected)
    with torch.no_grad():
        torch.testing.assert_close(gt.jvp(f, (X,), (T,))[1], expected)


def test_the_method_norm_is_pushed_in_compiled_code():
    f = lambda x: x.norm() ** 3
    found = gt.compile(lambda x: gt.jvp(f, (x,), (T,))[1], backend="eager")(X)
    torch.testing.assert_close(found, gt.jvp(f, (X,), (T,))[1])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_weight_norm_has_its_second_derivative_in_each_mode(dim):
    v = torch.stack((X, T, X * T))
    at = lambda norm: norm.reshape(()) if dim == -1 else norm
    g = at((v**2).sum([k for k in range(2) if k != dim], keepdim=True) + 1)
    plain = lambda v, g: (v * g / (v**2).sum([k for k in range(2) if k != dim], True).sqrt()).sin()
    fused = lambda v, g: torch._weight_norm(v, g, dim).sin()
    tangents = v.cos(), g.cos()
    (_, expected), *others = [
        gt.hvp(lambda v, g, f=f: f(v, g).sum(), (v, g), tangents, mode=mode)
        for f in (plain, fused)
        for mode in ("reverse_over_reverse", "forward_over_reverse")
    ]
    for _, found in others:
        torch.testing.assert_close(found, expected)
    slope = lambda v: gt.grad(lambda v: fused(v, g).sum())(v)
    found = gt.vmap(lambda v: gt.jvp(slope, (v,), (v,))[1])(torch.stack((v, 2 * v)))
    torch.testing.assert_close(found[0], gt.jvp(slope, (v,), (v,))[1])


@pytest.mark.slow
def test_a_forward_jacobian_in_compiled_code_whose_graph_breaks():
    def broken(x):
        torch._dynamo.graph_break()
        return x**3

    x = torch.tensor([0.5, -0.7], dtype=torch.float64)
    found = gt.compile(lambda x: gt.jacobian(broken, mode="forward")(x))(x)
    torch.testing.assert_close(found, torch.diag(3 * x**2))


REDUCTIONS = {
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: (x.softmax(0) * x).sum(),
    "cross_entropy": lambda x: F.cross_entropy(x[None], torch.tensor([1])),
    "norm": lambda x: torch.linalg.vector_norm(x, 3),
    "cumprod": lambda x: x.cumprod(0).sum(),
    "aminmax": lambda x: sum(x.aminmax()) ** 3,
    "solve": lambda x: torch.linalg.solve(torch.diag(x) + 1, x).sum(),
}


@pytest.mark.parametrize("f", REDUCTIONS.values(), ids=REDUCTIONS)
def test_repeated_pushforwards_train_what_f_captures_and_are_attached_to_nothing_else(f):
    x, u = (torch.linspace(-1, 2, 4, dtype=torch.float64).add(k).sin() for k in (0.3, 2.0))
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    pushed, pulled = lambda x: f(x * w), lambda x: f(x * w)
    for _ in range(3):
        pushed = lambda x, g=pushed: gt.jvp(g, (x,), (u,))[1]
        pulled = lambda x, g=pulled: (gt.grad(g)(x) * u).sum()
        torch.testing.assert_close(pushed(x), pulled(x))
        results = [torch.autograd.grad(g(x), w)[0] for g in (pushed, pulled)]
        torch.testing.assert_close(*results)
        w.requires_grad_(False)
        assert not pushed(x).requires_grad
        w.requires_grad_(True)


@pytest.mark.parametrize("tracked", [False, True])
def test_a_derivative_in_f_leaves_no_graph_to_its_aliases(tracked):
    x, w = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    w.requires_grad_(tracked)
    f = lambda x: gt.jacobian(lambda y: w * y**3)(x).sum(0)
    y, dy = gt.jvp(f, (x,), (x,))
    torch.testing.assert_close((y, dy), (3 * w * x**2, 6 * w * x**2))
    assert y.requires_grad == dy.requires_grad == tracked
    if tracked:
        (g,) = torch.autograd.grad(dy.sum(), w)
        torch.testing.assert_close(g, 6 * x**2)
