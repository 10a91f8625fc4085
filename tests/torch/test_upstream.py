"""Private functions of PyTorch behave as gradtools expects and have no public replacement yet."""

from __future__ import annotations

from threading import Thread

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.seeing.torch import _upstream as seeing
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import pulled

Tensor = torch.Tensor


def _x() -> Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


backwards: list = []  # The backward of Double records nodes here.


class Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, ct):
        upstream.enter_vmap()
        level = upstream.leave_vmap()
        backwards.append((seeing.current_node(), level, upstream.is_legacy_batched(ct)))
        return ct * 2


class Watch(torch.overrides.TorchFunctionMode):
    """Record the functions that the mode intercepts."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, fun, types, args=(), kwargs=None):
        self.seen.append(fun)
        return fun(*args, **(kwargs or {}))


# --- levels of torch.func ------------------------------------------------------------------------


def test_levels_of_torch_func_are_seen_from_inside():
    seen, outside, kinds = {}, torch.ones(2), upstream.TransformType

    def f(x):
        top = upstream.peek_interpreter_stack()
        seen["kinds"] = [level.key() for level in upstream.get_interpreter_stack()]
        seen["wrapped"] = upstream.is_wrapped(x), upstream.is_gradtrackingtensor(x)
        inner = upstream.get_unwrapped(x)
        seen["batched"] = upstream.is_batchedtensor(inner), upstream.maybe_get_bdim(inner)
        seen["level"] = top.level() == upstream.maybe_get_level(x)
        entered = upstream.wrap_for_grad(outside, top.level())
        seen["entered"] = upstream.maybe_get_level(entered) == top.level()
        seen["size"] = upstream.batch_size_of(upstream.get_interpreter_stack()[0])
        with upstream.temporarily_clear_interpreter_stack():
            seen["cleared"] = upstream.peek_interpreter_stack()
        seen["kept"] = x
        return (x**2).sum()

    torch.func.vmap(torch.func.grad(f))(torch.ones(3, 2))
    ended = seen.pop("kept")
    assert upstream.is_wrapped(ended) and upstream.maybe_get_level(ended) == -2
    assert seen == {
        "kinds": [kinds.Vmap, kinds.Grad],
        "wrapped": (True, True),
        "batched": (True, 0),
        "level": True,
        "entered": True,
        "size": 3,
        "cleared": None,
    }
    assert upstream.peek_interpreter_stack() is None and upstream.get_interpreter_stack() is None


def test_autograds_own_vmap_is_counted_and_left():
    x = _x()
    backwards.clear()
    torch.autograd.grad(Double.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert [said for _, *said in backwards] == [[1, True]]
    assert not upstream.is_legacy_batched(x)
    level = upstream.enter_vmap()
    y = upstream.add_batch_axis(torch.ones(3, 2), 0, level)
    assert y.shape == (2,) and upstream.is_legacy_batched(y)
    assert upstream.remove_batch_axis(y, level, 3, 0).shape == (3, 2)
    upstream.leave_vmap()


# --- forward mode --------------------------------------------------------------------------------


def test_the_level_of_forward_mode_is_seen_and_entered(monkeypatch):
    assert upstream.forward_level() == -1
    level = upstream.enter_forward_level()
    try:
        assert level == upstream.forward_level() == 0
        # the result is None, because a level already exists
        assert upstream.enter_forward_level() is None
        x = upstream.make_dual(torch.ones(2), torch.full((2,), 3.0), level=0)
        assert upstream.unpack_dual(x * 2, level=0)[1].tolist() == [6.0, 6.0]
        with upstream.forward_mode_enabled(False):
            assert not upstream.is_forward_mode_enabled()
            assert upstream.unpack_dual(x * 2, level=0)[1] is None
        upstream.set_forward_mode_enabled(True)
        assert upstream.is_forward_mode_enabled()
    finally:
        upstream.leave_forward_level(level)
    # Simulate another thread between the two lines of `forward_ad.exit_dual_level`. At this point,
    # no level may be entered.
    monkeypatch.setattr(forward_ad, "_current_level", 3)
    assert upstream.enter_forward_level() is None
    monkeypatch.undo()
    with forward_ad.dual_level():  # a new level can be entered afterwards
        assert upstream.forward_level() == 0


# --- autograd ------------------------------------------------------------------------------------


def test_a_backward_pass_says_which_it_is_and_what_it_comes_to():
    y = _x().exp()
    seen, z = [], (y * 2).sum()
    ask = lambda ct: seen.append((upstream.current_graph_task(), upstream.will_run(y.grad_fn)))
    z.register_hook(ask)
    z.backward()
    ((task, will),) = seen
    assert task >= 0 and will is True and upstream.current_graph_task() == -1


def test_nodes_are_counted_and_say_their_functions():
    x = _x()
    backwards.clear()
    before = upstream.nodes_made()
    y = Double.apply(x)
    assert upstream.sequence_of(y.grad_fn) == before < upstream.nodes_made()
    assert upstream.function_of(y.grad_fn) is Double
    assert upstream.function_of((2 * x).grad_fn) is None
    assert upstream.backward_class(Double) is type(y.grad_fn)
    assert type(x.sin().grad_fn.next_functions[0][0]) is upstream.AccumulateGrad
    assert seeing.current_node() is None
    y.sum().backward()
    ((running, *_),) = backwards
    assert upstream.sequence_of(running) == upstream.sequence_of(y.grad_fn)
    (shown,) = seeing.described(torch.ones(2, 3, requires_grad=True).double().grad_fn)
    assert (tuple(shown.shape), shown.dtype, shown.device.type) == ((2, 3), torch.float64, "cpu")
    mapped = torch.vmap(torch.vmap(Double.apply))(_x().expand(3, 2)).grad_fn
    assert type(mapped)._forward_cls is not Double is upstream.function_of(mapped)
    net = torch.nn.Tanh()
    net.register_full_backward_hook(lambda module, before, after: None)
    assert upstream.function_of(net(_x()).grad_fn) is upstream.ModuleHook
    found = []
    thread = Thread(target=lambda: found.append(upstream.nodes_made()))
    thread.start()
    thread.join()
    assert found[0] < upstream.nodes_made()  # each thread counts its own nodes


def test_the_engine_gives_what_autograd_grad_gives_of_arguments_that_are_right():
    x, unused = _x(), _x()
    y = x.sin()
    how = {"allow_unreachable": True, "accumulate_grad": False}
    given = (y,), (torch.ones(2),), True, True, (x, unused)
    found, same = upstream.run_engine(*given, **how), upstream.engine(*given, **how)
    assert torch.equal(found[0], same[0]) and same[1] is None
    expected = torch.autograd.grad(y, (x, unused), torch.ones(2), True, True, allow_unused=True)
    assert torch.equal(found[0], expected[0]) and found[1] is expected[1] is None
    again = pulled([y], [x, unused], [torch.ones(2)], True, True)
    assert torch.equal(again[0], expected[0]) and again[1] is None
    assert found[0].requires_grad and x.grad is None


def test_what_modes_see_and_how_they_are_counted():
    with Watch() as watch:
        assert len(upstream.function_modes()) == upstream.count_of_function_modes() == 1
        torch.set_grad_enabled(True)
        with seeing.DisableTorchFunction():
            torch.ones(1) + 1
            torch.exp(_x())
            # the backward pass of a tensor subclass also enables torch functions
            with upstream.EnableTorchFunction():
                torch.sin(_x())
    assert upstream.set_grad_enabled in watch.seen
    assert torch.sin in watch.seen and torch.exp not in watch.seen
    with Watch() as watch:
        torch.func.grad(lambda x: Double.apply(x).sum())(torch.ones(2))
    assert seeing.custom_function_call in watch.seen
    assert upstream.count_of_function_modes() == upstream.count_of_dispatch_modes() == 0


# --- tensors -------------------------------------------------------------------------------------


def test_zeros_views_and_aliases_are_told():
    zero = torch._efficientzerotensor((2,))
    x = torch.zeros(2)
    assert upstream.is_zero(zero) and not upstream.is_zero(x)
    assert upstream.is_view(x.view(2)) and not upstream.is_view(x)
    assert upstream.is_alias_of(x, x[1:]) and not upstream.is_alias_of(x, x.clone())
    assert upstream.storage_key(x) == upstream.storage_key(x[1:]) != upstream.storage_key(x + 1)
    assert upstream.storage_key(torch.eye(2).to_sparse()) is not None
    x += 1
    assert upstream.version_of(x) == 1
    upstream.set_version_counters((x,), (0,))
    assert upstream.version_of(x) == 0
    leaf = _x()
    assert upstream.tensor_hooks(leaf) is None
    leaf.register_hook(lambda g: g).remove()
    assert upstream.tensor_hooks(leaf) is not None
