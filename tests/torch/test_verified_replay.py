"""What is computed again: programs that PyTorch's own checkpoint runs, against the plain call."""

import collections
import functools
import itertools
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

import gradtools.torch as gt
from gradtools.errors import GradtoolsError
from gradtools.torch.replaying.consistency import VERIFIED, Verification

Tensor = torch.Tensor


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class _Makes(collections.OrderedDict):
    """Holds classes and gives out instances, as transformers' table of activations does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class _Pretends(collections.OrderedDict):
    """Has keys that it does not hold, as transformers' lazy tables of models do."""

    def __iter__(self):
        return iter(["absent"])

    def __getitem__(self, key):
        raise ValueError(key)


def test_a_dict_of_its_own_class_holds_afterwards_what_it_held():
    table, lazy, count = _Makes(tanh=torch.nn.Tanh), _Pretends(), [0]

    def f(x):
        count[0] += 1
        assert lazy is not None
        return table["tanh"](x)

    x = _numbers(3).requires_grad_()
    gt.checkpoint(f)(x).sum().backward()
    assert dict.__getitem__(table, "tanh") is torch.nn.Tanh
    assert count == [1]
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, ct):
        return 2 * ctx.saved_tensors[0] * ct


def _in_a_checkpoint_inside(remade, x, h):
    outer = lambda x: remade(lambda q: torch.tanh(q @ h))(x.sin()) @ h
    return remade(outer)(x).sum()


def _given_to_a_checkpoint_inside(remade, x, h):
    outer = lambda x: remade(lambda q, h: q @ h)(x.sin(), h)
    return remade(outer)(x).cos().sum()


def _into_a_function_of_custom_code(remade, x, h):
    return remade(lambda x: x @ _Square.apply(h))(x).cos().sum()


def _returned_as_it_is(remade, x, h):
    y, again = remade(lambda x: (x @ h, h))(x)
    return (y.cos() @ again).sum()


def _kept_in_a_list(remade, x, h):
    kept = []

    def f(x):
        y = torch.tanh(x @ h)
        kept.append((y * x).mean())
        return y

    return remade(f)(x).sum() + kept[0]


class _Result:
    def __init__(self, y):
        self.y = y


def _in_an_object_of_its_own(remade, x, h):
    return remade(lambda x: _Result(torch.tanh(x @ h)))(x).y.sum()


def _a_module_keeps_its_latest_output(remade, x, h):
    module = torch.nn.Tanh()
    module.latest = None

    def f(x):
        module.latest = module(x @ h.detach())
        return module.latest

    run = remade(f)
    run(x.detach().requires_grad_()).sum().backward()
    return run(x).sum() + h.sum()


def _attached_losses_are_listed(remade, x, h):
    losses = []

    def f(x):
        losses.append((x * h.detach()).sum())
        return torch.sin(x)

    run = remade(f)
    run(x.detach().requires_grad_()).sum().backward()
    return run(x).sum() + h.sum()


def _a_parameter_is_made_anew(remade, x, h):
    return remade(lambda x: x @ torch.nn.Parameter(torch.ones(3, 3).double()) @ h)(x).cos().sum()


def _memory_that_nobody_filled(remade, x, h):
    return remade(lambda x: (torch.sin(x @ h), torch.rand(3).new_empty(9)))(x)[0].sum()


def _the_time_is_an_output(remade, x, h):
    return remade(
        lambda x: (torch.sin(x @ h), torch.tensor(time.perf_counter(), dtype=torch.float64))
    )(x)[0].sum()


def _a_method_of_it_in_c(remade, x, h):
    times, add = h.matmul, h.T.add
    return remade(lambda x: add(times(x.T)))(x).cos().sum() + remade(h.matmul)(x.T).sin().sum()


CASES = (
    _a_method_of_it_in_c,
    _in_a_checkpoint_inside,
    _given_to_a_checkpoint_inside,
    _into_a_function_of_custom_code,
    _returned_as_it_is,
    _kept_in_a_list,
    _in_an_object_of_its_own,
    _a_module_keeps_its_latest_output,
    _attached_losses_are_listed,
    _a_parameter_is_made_anew,
    _memory_that_nobody_filled,
    _the_time_is_an_output,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_a_checkpoint_has_the_gradients_of_the_plain_call(case):
    found = []
    for remade in (lambda f: f, gt.checkpoint):
        x = _numbers(3, 3, seed=1).requires_grad_()
        w = _numbers(3, 3, seed=2).requires_grad_()
        case(remade, 2 * x, torch.sin(w)).backward()
        found.append((x.grad, w.grad))
    torch.testing.assert_close(found[1], found[0])


def test_a_captured_graph_is_let_go_of_with_the_call():
    held = [_numbers(3, 3).requires_grad_().sin()]
    run = gt.checkpoint(lambda x: x @ held[0])
    run(_numbers(2, 3)).sum().backward()
    captured = weakref.ref(held.pop())
    assert captured() is None


def test_what_chunks_keep_aside_has_its_gradient():
    kept = []

    def f(x):
        kept.append((x * x).sum())
        return x.sin()

    x = _numbers(4, 3).requires_grad_()
    loss = gt.chunked(f, 2)(x).sum() + sum(kept)
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos() + 2 * x.detach())


def test_chunks_may_themselves_differentiate_with_respect_to_their_rows():
    def force(x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0]

    x, y = _numbers(4, 3).requires_grad_(), _numbers(4, 3).requires_grad_()
    gt.chunked(force, 2)(x).square().sum().backward()
    force(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


class Marked(torch.Tensor):
    """A subclass, whose backward() runs with __torch_function__ switched off."""


@pytest.mark.parametrize("cast", [False, True])
def test_a_subclass_is_computed_again_as_one(cast):
    x = torch.linspace(0, 1, 3).as_subclass(Marked).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = gt.checkpoint(lambda x: x.sin() * x)(x).sum()
    y.backward()
    expected = torch.linspace(0, 1, 3).requires_grad_()
    (expected.sin() * expected).sum().backward()
    torch.testing.assert_close(x.grad.as_subclass(torch.Tensor), expected.grad)


def test_a_replay_under_another_vmap_is_no_verification(monkeypatch):
    ticks, w = itertools.count(1), _numbers(3)
    f = lambda x: x * w * next(ticks)  # an iterator cannot be put back
    x = _numbers(2, 3).requires_grad_()
    keep = Verification.keep
    with monkeypatch.context() as patched:
        in_a_batch = lambda self, i, outs, modules, batches: keep(
            self, i, outs, modules, ((4, ""),)
        )
        patched.setattr(Verification, "keep", in_a_batch)
        gt.chunked(f, 2)(x).sum().backward()  # nothing can be compared
    with pytest.raises(GradtoolsError, match="chunk 0 gives other numbers"):
        gt.chunked(f, 2)(x).sum().backward()


@pytest.mark.parametrize(
    ("part", "said"), [(0.0, "its graph does not reach w"), (1.0, "through other operations")]
)
def test_a_graph_that_reaches_less_is_refused_though_its_numbers_are_the_same(part, said):
    w, calls = _numbers(3).requires_grad_(), itertools.count()

    def f(x):
        again = next(calls) >= 2  # out of reach, as in a cache
        return x * (part * w if part else 1) * (w.detach() if again else w)

    with pytest.raises(GradtoolsError, match=said):
        gt.chunked(f, 2)(_numbers(4, 3)).sum().backward()
    assert w.grad is None


def _plain_closure(step):
    net, mask = step
    return lambda x: net(x) * mask


def _method_of_a_module(step):
    return step[0].forward


def _partial(step):
    return functools.partial(lambda net, x: net(x), step[0])


@pytest.mark.parametrize("make", [_plain_closure, _method_of_a_module, _partial])
def test_a_function_that_is_made_anew_is_verified_once(make, monkeypatch):
    seen, compare, net = [], Verification.compare, torch.nn.Linear(3, 3).double()
    noted = lambda self, i, *more: seen.append(i) or compare(self, i, *more)
    monkeypatch.setattr(Verification, "compare", noted)
    for k in range(3):
        gt.checkpoint(make((net, _numbers(3, seed=k))))(_numbers(2, 3)).sum().backward()
    assert len(seen) == 1
    other = torch.nn.Linear(3, 3).double()
    gt.checkpoint(make((other, _numbers(3))))(_numbers(2, 3)).sum().backward()
    assert len(seen) == 2


class _Batch:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("remade", [gt.checkpoint, gt.frozen])
def test_an_object_that_was_an_argument_is_let_go_of_with_the_call(remade):
    net = torch.nn.Linear(3, 3).double()
    run = remade(lambda z, batch: net(z * batch.x))
    batch, z = _Batch(_numbers(3)), _numbers(2, 3).requires_grad_()
    torch.autograd.grad(run(z, batch).sum(), z)
    held = weakref.ref(batch)
    del batch
    assert held() is None


def test_a_pullback_of_another_function_is_refused_each_time():
    w, x, y = _numbers(3), _numbers(2, 3, seed=1), _numbers(2, 3, seed=2)

    def doubled(z):
        w.data.mul_(2)
        out = z * w
        w.data.div_(2)  # before the pullback reads it
        return out

    G = gt.frozen(doubled)
    for _ in range(2):
        with pytest.raises(GradtoolsError, match="belongs to another function"):
            gt.grad(lambda y: gt.grad(lambda z: (y * G(z)).sum())(x).sum())(y)


def test_functions_of_other_lists_are_verified_each(monkeypatch):
    seen, compare = [], Verification.compare
    noted = lambda self, i, *more: seen.append(i) or compare(self, i, *more)
    monkeypatch.setattr(Verification, "compare", noted)
    made = lambda layers: lambda x: [x := layer(x) for layer in layers][-1]
    layers = [torch.nn.Linear(3, 3).double() for _ in range(3)]
    for part in (layers, layers[:2], layers[::-1], list(layers), layers[:2]):
        gt.checkpoint(made(part))(_numbers(2, 3)).sum().backward()
    assert len(seen) == 3


def test_what_was_verified_of_objects_that_died_is_forgotten():
    made = lambda net: lambda x: net(x)
    for _ in range(5):
        run = made(torch.nn.Linear(3, 3).double())
        gt.checkpoint(run)(_numbers(2, 3)).sum().backward()
    assert len(VERIFIED[run.__code__]) == 1


@pytest.mark.parametrize("kind", ["a shared argument", "a shared leaf", "the batch"])
def test_an_argument_whose_data_is_replaced_before_the_backward_pass_is_refused(kind):
    w, x, s = torch.ones(3, requires_grad=True), torch.ones(4, 3), torch.ones(3)
    s.requires_grad_(kind == "a shared leaf")
    x.requires_grad_(kind == "the batch")
    f = gt.chunked(lambda x, s: x * w * s, 2, in_axes=(0, None), verify=False)
    z, moved = f(x, s), x if kind == "the batch" else s
    moved.data = torch.zeros_like(moved)
    with pytest.raises(GradtoolsError, match="the data of an argument was replaced after"):
        z.sum().backward()


def test_a_use_whose_argument_has_other_data_is_refused_in_the_second_derivative():
    G, y = gt.frozen(torch.sin, verify=False), torch.ones((), requires_grad=True)
    z = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad((y * G(z)).sum(), z, create_graph=True)
    z.data = torch.zeros(3)
    with pytest.raises(GradtoolsError, match="the data of an argument was replaced after"):
        torch.autograd.grad(slope.sum(), y)


class _Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.scale, None


COEFFICIENTS = {  # on which derivatives depend, and no value
    "_ScaledBackward": _Scaled.apply,
    "the node MulBackward0": lambda y, k: y.detach() + k * (y - y.detach()),
    "the node DivBackward0": lambda y, k: y.detach() + (y - y.detach()) / k,
    "scale_gradient": lambda y, k: gt.scale_gradient(y, k),
    "reverse_gradient": lambda y, k: gt.reverse_gradient(y, torch.tensor(k)),
    "clip_gradient": lambda y, k: gt.clip_gradient(y, max_norm=0.1 * k),
    "transform_gradient": lambda y, k: gt.transform_gradient(y, lambda g: k * g),
    "replace_gradient": lambda y, k: gt.replace_gradient(y, k * torch.ones_like(y)),
    "straight_through": lambda y, k: gt.straight_through(torch.round, lambda y: k * y)(y),
    "a hook on a gradient": lambda y, k: _with_hook(2 * y, lambda g: k * g),
}


def _with_hook(y, hook):
    y.register_hook(hook)
    return y


@pytest.mark.parametrize(
    ("edit", "how"),
    [
        (edit, how)
        for edit in COEFFICIENTS
        for how in ("checkpoint", "chunked", "vmap")
        if (edit, how) != ("a hook on a gradient", "vmap")  # there f runs without a graph
    ],
)
def test_a_coefficient_that_an_iterator_gives_is_refused(edit, how):
    w, x = torch.tensor(1.5), torch.ones(4)

    def gradient(next_of):
        f = lambda w, x: COEFFICIENTS[edit](w * x, next_of())
        if how == "vmap":
            return gt.per_example_grad(gt.checkpoint(f))(w, x)
        axes = {"in_axes": (None, 0)}
        again = gt.checkpoint(f) if how == "checkpoint" else gt.chunked(f, 2, **axes)
        return gt.grad(lambda w: again(w, x).sum())(w)

    assert gradient(lambda: 2.0).shape == (x.shape if how == "vmap" else ())
    with pytest.raises(
        GradtoolsError, match=f"coefficient of .*{edit} .*is another one when chunk"
    ):
        gradient(functools.partial(next, itertools.count(1.0)))


def test_per_example_gradients_of_a_function_with_a_counter_are_refused():
    numbers = itertools.count(1)
    f = gt.checkpoint(lambda w, x: w * x * next(numbers))
    with pytest.raises(GradtoolsError, match="gives other numbers when it is computed again"):
        gt.per_example_grad(f)(torch.tensor(1.0), torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_use_is_compared_bit_by_bit_when_forward_mode_computes_it_again(dtype):
    numbers = itertools.count()
    drift = lambda: 1.01 ** next(numbers)
    z, y = torch.linspace(0.1, 1.0, 8, dtype=dtype), torch.ones(8, dtype=dtype)

    def second(G):
        inner = lambda y: gt.grad(lambda z: (gt.frozen(G)(z) * y).sum())(z)
        return gt.grad(lambda y: inner(y).square().sum())(y)

    assert second(lambda z: z.tanh() * 1.01).isfinite().all()
    with pytest.raises(GradtoolsError, match="gives other numbers when it is computed again"):
        second(lambda z: z.tanh() * drift())


@pytest.mark.parametrize("hooked", ["the first pass", "the backward pass"])
def test_saved_tensors_hooks_around_one_pass_hide_the_factors_of_products(hooked):
    divisor = torch.tensor(8.0, dtype=torch.float64)
    f = gt.checkpoint(lambda x: (x / divisor).sum())
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    on_cpu = torch.autograd.graph.save_on_cpu
    with on_cpu() if hooked == "the first pass" else nullcontext():
        loss = f(x)
    with on_cpu() if hooked == "the backward pass" else nullcontext():
        (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, torch.full_like(grad, 1 / 8))
