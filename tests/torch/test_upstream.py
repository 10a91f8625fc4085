"""Each private name of PyTorch does what we rely on, and has no public sister yet."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from contextlib import nullcontext
from threading import Thread

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from gradtools.bridge import _upstream as bridge
from gradtools.seeing.torch import _upstream as seeing
from gradtools.seeing.torch.thread_patches import functions_applied
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import pulled

Tensor = torch.Tensor


def _x() -> Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


backwards: list = []  # what the backward of Double saw


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
    """Notes the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, fun, types, args=(), kwargs=None):
        self.seen.append(fun)
        return fun(*args, **(kwargs or {}))


def dispatched(note, mode=seeing.Watching):
    """A dispatch mode that calls `note(fun)` before each operation."""

    class Noting(mode):
        def __torch_dispatch__(self, fun, types, args=(), kwargs=None):
            note(fun)
            return fun(*args, **(kwargs or {}))

    return Noting()


# --- no longer needed? ---------------------------------------------------------------------------

# What is public in 2.8 to 2.15 where a public way may come. A new name may take the place of one of
# the room's: look, and then add it to the list.
_PUBLIC = {
    torch.func: (
        "debug_unwrap functional_call functionalize grad grad_and_value hessian jacfwd jacrev jvp "
        "linearize rearrange replace_all_batch_norm_modules_ stack_module_state vjp vmap"
    ),
    torch.autograd.graph: (
        "GradientEdge Node allow_mutation_on_saved_tensors disable_saved_tensors_hooks "
        "get_gradient_edge increment_version node_creation_hook queue_callback "
        "region_activation_memory_budget "
        "register_multi_grad_hook save_on_cpu saved_tensors_hooks "
        "set_override_stale_capture_stream set_warn_on_accumulate_grad_stream_mismatch"
    ),
    forward_ad: (
        "UnpackedDualTensor dual_level enter_dual_level exit_dual_level make_dual unpack_dual"
    ),
}


@pytest.mark.parametrize("module", _PUBLIC, ids=lambda module: module.__name__)
def test_nothing_public_has_come_that_may_take_the_place_of_a_private_name(module):
    made_here = {
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
    }
    assert {*getattr(module, "__all__", made_here)} <= set(_PUBLIC[module].split())


def test_there_are_no_public_names():
    for holder, names in {
        Tensor: "version is_view is_zerotensor hooks",
        torch: "is_any_autocast_enabled",
        torch.compiler: "graph_break is_compiled",
        torch.nn.Module: "hooks forward_hooks",
        torch.autograd: "current_node",
    }.items():
        assert not [name for name in names.split() if hasattr(holder, name)]
    assert importlib.util.find_spec("torch.utils.pytree") is None  # pytorch#65761, #175082


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


def test_an_axis_is_hidden_by_a_level_of_vmap():
    level = lambda: upstream.peek_interpreter_stack().level()
    f = lambda x: x + upstream.add_vmap_axis(torch.arange(3.0), 0, level())
    assert torch.vmap(f)(torch.zeros(3)).tolist() == [0.0, 1.0, 2.0]


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
        assert upstream.enter_forward_level() is None  # there is one
        x = upstream.make_dual(torch.ones(2), torch.full((2,), 3.0), level=0)
        assert upstream.unpack_dual(x * 2, level=0)[1].tolist() == [6.0, 6.0]
        with upstream.forward_mode_enabled(False):
            assert not upstream.is_forward_mode_enabled()
            assert upstream.unpack_dual(x * 2, level=0)[1] is None
        upstream.set_forward_mode_enabled(True)
        assert upstream.is_forward_mode_enabled()
    finally:
        upstream.leave_forward_level(level)
    # As between the two lines of `forward_ad.exit_dual_level` in another thread: it is left again.
    monkeypatch.setattr(forward_ad, "_current_level", 3)
    assert upstream.enter_forward_level() is None
    monkeypatch.undo()
    with forward_ad.dual_level():  # is entered as if nothing had been
        assert upstream.forward_level() == 0


@pytest.mark.slow
def test_the_first_level_loads_what_pytorch_loads_at_the_first_dual_number():
    """The decompositions by which some operations have a forward mode."""
    run = (
        "import sys, torch\n"
        "from gradtools.torch import _upstream as upstream\n"
        "upstream.leave_forward_level(upstream.enter_forward_level())\n"
        "print('torch._decomp.decompositions_for_jvp' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True"]


def test_any_autocast_is_seen():
    assert not upstream.is_any_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert upstream.is_any_autocast_enabled()


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
    assert found[0] < upstream.nodes_made()  # of this thread


def test_hooks_of_saved_tensors_are_seen():
    assert upstream.saved_tensors_hooks_on(False) is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        hooks = upstream.saved_tensors_hooks_on(False)
        upstream.pop_saved_tensors_hooks()
        assert upstream.saved_tensors_hooks_on(False) is None
        upstream.push_saved_tensors_hooks(*hooks)
        assert upstream.saved_tensors_hooks_on(False) == hooks


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


def test_where_a_mode_looks_on_the_engine_is_called_as_by_autograd_grad(monkeypatch):
    seen, plain, x = [], upstream.run_engine, _x()
    monkeypatch.setattr(upstream, "run_engine", lambda *a, **k: seen.append(1) or plain(*a, **k))
    with dispatched(lambda fun: None):
        (found,) = pulled([x.sin()], [x], [torch.ones(2)], False, False)
    assert seen == [1] and torch.equal(found, x.detach().cos())


def test_what_modes_see_and_how_they_are_counted():
    with Watch() as watch:
        assert len(upstream.function_modes()) == upstream.count_of_function_modes() == 1
        torch.set_grad_enabled(True)
        with seeing.DisableTorchFunction():
            torch.ones(1) + 1
            torch.exp(_x())
            with upstream.EnableTorchFunction():  # as in the backward of a subclass
                torch.sin(_x())
    assert upstream.set_grad_enabled in watch.seen
    assert torch.sin in watch.seen and torch.exp not in watch.seen
    with Watch() as watch:
        torch.func.grad(lambda x: Double.apply(x).sum())(torch.ones(2))
    assert seeing.custom_function_call in watch.seen
    assert upstream.count_of_function_modes() == upstream.count_of_dispatch_modes() == 0


def test_who_keeps_a_bound_apply_is_met_by_a_patch_or_by_its_node():
    kept, seen = Double.apply, []

    def noting(kind, beneath, args, kwargs):
        seen.append(kind)
        return beneath(*args, **kwargs)

    def note(node):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            seen.append(upstream.function_of(node))

    assert torch.autograd.function._SingleLevelFunction in seeing.Functions
    hook = seeing.node_creation_hook or (lambda note: nullcontext())
    with functions_applied(noting), hook(note):
        kept(_x())
    assert seen == [Double]


def test_every_hook_that_is_set_counts():
    x = _x()
    y, before = 2 * x, upstream.hooks_made()
    y.register_hook(lambda g: g), y.grad_fn.register_hook(lambda given, taken: None)
    x.register_post_accumulate_grad_hook(lambda x: None)
    assert upstream.hooks_made() == before + 3


# --- tensors -------------------------------------------------------------------------------------


def test_zeros_views_and_aliases_are_told():
    zero = torch._efficientzerotensor((2,))
    x = torch.zeros(2)
    assert upstream.is_zero(zero) and not upstream.is_zero(x)
    assert upstream.is_view(x.view(2)) and not upstream.is_view(x)
    assert upstream.is_alias_of(x, x[1:]) and not upstream.is_alias_of(x, x.clone())
    assert upstream.storage_key(x) == upstream.storage_key(x[1:]) != upstream.storage_key(x + 1)
    assert upstream.storage_key(torch.eye(2).to_sparse()) is not None
    alone = bridge.owners_of_memory(x)
    y = x[1:]
    assert bridge.owners_of_memory(y) == alone + 1
    kind = type("Mine", (Tensor,), {})
    made = upstream.make_subclass(kind, x)
    assert type(made) is kind and made.data_ptr() == x.data_ptr() and not upstream.is_view(made)
    x += 1
    assert upstream.version_of(x) == 1
    upstream.set_version_counters((x,), (0,))
    assert upstream.version_of(x) == 0
    leaf = _x()
    assert upstream.tensor_hooks(leaf) is None
    leaf.register_hook(lambda g: g).remove()
    assert upstream.tensor_hooks(leaf) is not None


def test_many_tensors_are_changed_by_one_operation():
    xs = [torch.ones(2), torch.ones(3)]
    upstream.add_each_(xs, [torch.ones(2), torch.ones(3)], alpha=2.0)
    upstream.divide_each_(xs, 2.0)
    doubled = upstream.multiply_each(upstream.divide_each(xs, 0.5), 1.0)
    assert [x.tolist() for x in (*xs, *doubled)] == [[1.5] * 2, [1.5] * 3, [3.0] * 2, [3.0] * 3]


def test_the_storages_of_a_tensor_are_one_object_for_as_long_as_it_lives():
    """So that a storage is known by its `id`."""
    x = torch.ones(3)
    first = id(x.untyped_storage())
    others = [object() for _ in range(1000)]
    assert id(x[1:].untyped_storage()) == first and others


def test_fake_tensors_and_those_of_a_compiler_are_known():
    with bridge.fake_tensors() as mode:
        y = torch.ones(2, 3) @ torch.ones(3, 4)
        assert upstream.detect_fake_mode([torch.ones(2)]) is mode
    assert y.shape == (2, 4) and y.device.type == "cpu"
    assert upstream.detect_fake_mode([torch.ones(2)]) is None
    assert upstream.TracingContext.try_get() is None
    assert upstream.size_hint(3, fallback=2) == 3


def test_tracing_is_told():
    seen = []

    def f(x):
        seen.append((upstream.tracing_state() is not None, upstream.is_traced_by_make_fx()))
        return x + 1

    f(torch.ones(1)), make_fx(f)(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        torch.jit.trace(f, torch.ones(1), check_trace=False)
    assert seen == [(False, False), (False, True), (True, False)]


# --- operators and modes below -------------------------------------------------------------------


def test_operators_are_described():
    assert isinstance(torch.ops.higher_order.cond, seeing.HigherOrderOperator)
    names = [argument.name for argument in seeing.schema_of(torch.ops.aten.add.Tensor).arguments]
    assert names == ["self", "other", "alpha"]
    assert torch.ops.aten.silu.default in seeing.decompositions()


def test_a_sum_of_gradients_is_autograds_own_and_a_rules_code_is_not():
    said = []

    class Watching(seeing.Watching):  # whose method asks, as a recorder's does
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            said.append((func, seeing.is_summed_by_autograd(seeing.current_node())))
            return func(*args, **(kwargs or {}))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x, 2 * x

        @staticmethod
        def backward(ctx, a, b):
            return torch.add(a, b)

    h = _x() * 1
    y, z = Twice.apply(h)
    w, _ = Twice.apply(h)
    total = (y + z + w).sum()
    with Watching():
        total.backward()
    adds = [summed for func, summed in said if func is torch.ops.aten.add.Tensor]
    assert adds.count(True) == 1 and adds.count(False) == 2


def test_a_frame_of_checkpoint_is_known():
    seen = []

    def f(x):
        frame = sys._getframe()
        while frame is not None:
            seen.append(seeing.is_of_checkpoint(frame))
            frame = frame.f_back
        return x

    torch.utils.checkpoint.checkpoint(f, _x(), use_reentrant=False)
    assert any(seen) and not seen[0]


def test_beneath_autograd_an_outermost_block_is_dispatched_as_in_a_new_thread():
    key, seen = bridge.DispatchKey.AutogradFunctionality, []

    def note(fun):
        x = torch.ones(1, requires_grad=True)
        before = bridge.is_dispatch_key_excluded(key), (2 * x).requires_grad
        with bridge.outermost(), torch.enable_grad():
            inside = (2 * x).requires_grad, upstream.count_of_dispatch_modes()
        with upstream.disable_current_modes():
            seen.append((*before, *inside, upstream.count_of_dispatch_modes()))

    with dispatched(note, bridge.TorchDispatchMode):
        torch.ones(1) + 1
    assert seen[-1] == (True, False, True, 0, 0)
    assert not bridge.is_dispatch_key_excluded(key)


# --- containers and modules ----------------------------------------------------------------------


def test_containers_of_pytorch_are_taken_apart_and_put_together():
    leaves, spec = upstream.pytree.tree_flatten({"a": [1, 2]})
    assert leaves == upstream.tree_leaves({"a": [1, 2]}) == [1, 2]
    assert upstream.pytree.tree_unflatten([3, 4], spec) == {"a": [3, 4]}
    assert upstream.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


def test_a_module_shows_its_slots_and_its_compiled_call():
    m = torch.nn.BatchNorm1d(2, affine=False)
    assert isinstance(m, upstream.BatchNorm)
    parameters, buffers, children = upstream.slots_of(m)
    assert parameters["weight"] is None and "running_mean" in buffers and not children
    assert [vars(m)[name] for name in upstream.SLOTS] == [parameters, buffers, children]
    assert vars(m)[upstream.NOT_SAVED] == set()
    m.compile()
    assert callable(vars(m)[upstream.COMPILED_CALL])


def test_conversion_and_loading_of_a_wrapper_reach_what_it_wraps():
    wrapper = upstream.ModuleLike()
    wrapper._own = torch.nn.Linear(1, 1)
    wrapper.double()
    torch.nn.Sequential(wrapper).load_state_dict({"0.weight": _x()[:1, None] * 7}, strict=False)
    assert wrapper._own.weight.dtype == torch.float64 and wrapper._own.weight.item() == 7.0


def test_cached_weights_are_seen_in_their_block_alone():
    assert not upstream.caches_weights()
    with torch.nn.utils.parametrize.cached():
        assert upstream.caches_weights() == 1
        other: dict = {}
        upstream.set_cached_weights(other)
        assert upstream.cached_weights() is other


# --- dynamo --------------------------------------------------------------------------------------


def test_compiled_code_is_no_exported_program():
    class Net(torch.nn.Module):
        def forward(self, x):
            return x + 1 if upstream.is_exporting() else x

    x = torch.zeros(2)
    assert torch.compile(Net(), backend="eager", fullgraph=True)(x).sum() == 0
    assert torch.export.export(Net(), (x,)).module()(x).sum() == 2


def test_dynamo_takes_a_constant_and_the_end_of_a_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    constant = upstream.marked_constant(lambda: len(graphs) + 41)

    def f(x):
        y = x * constant()
        upstream.break_graph("here one ends")
        return y + 1

    assert torch.compile(f, backend=backend)(torch.ones(1)).item() == 42.0
    assert len(graphs) == 2 and upstream.DYNAMO in sys.modules


def test_no_line_of_a_skipped_module_is_compiled(tmp_path, monkeypatch):
    def refuse_to_compile(graph, inputs):
        raise AssertionError("it was compiled")

    (tmp_path / "passed_by.py").write_text("def f(x):\n    return x.exp()\n")
    monkeypatch.syspath_prepend(tmp_path)
    upstream.skip_module("passed_by")
    compiled = torch.compile(importlib.import_module("passed_by").f, backend=refuse_to_compile)
    assert compiled(torch.zeros(1)).item() == 1.0


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_function_whose_code_is_skipped_is_compiled_only_within_another():
    seen = []

    def fun(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def asking(x):
        seen.append(upstream.compiles_here())
        return x + 1

    upstream.skip_code(fun)
    torch.compile(fun, backend="eager")(_x())
    torch.compile(asking, backend="eager")(_x())
    assert seen == [False, True] and not upstream.compiles_here()
