"""Each private name of PyTorch does what we rely on, and has no public sister yet."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from gradtools.seeing.torch.thread_patches import functions_applied
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import pulled

Tensor = torch.Tensor


def _x() -> Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


# --- what older and newer versions name otherwise ------------------------------------------------


def test_many_tensors_are_changed_by_one_operation():
    xs = [torch.ones(2), torch.ones(3)]
    upstream.add_each_(xs, [torch.ones(2), torch.ones(3)], alpha=2.0)
    upstream.divide_each_(xs, 2.0)
    doubled = upstream.multiply_each(upstream.divide_each(xs, 0.5), 1.0)
    assert [x.tolist() for x in (*xs, *doubled)] == [[1.5] * 2, [1.5] * 3, [3.0] * 2, [3.0] * 3]


def test_views_have_the_key_of_their_storage():
    x = torch.ones(4)
    assert upstream.storage_key(x) == upstream.storage_key(x[1:]) != upstream.storage_key(x + 1)
    assert upstream.storage_key(torch.eye(2).to_sparse()) is not None


def test_an_open_length_has_a_hint_where_there_is_one():
    assert upstream.size_hint(3, fallback=2) == 3


def test_compiled_code_is_no_exported_program():
    class Net(torch.nn.Module):
        def forward(self, x):
            return x + 1 if upstream.is_exporting() else x

    x = torch.zeros(2)
    assert torch.compile(Net(), backend="eager", fullgraph=True)(x).sum() == 0
    assert torch.export.export(Net(), (x,)).module()(x).sum() == 2


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


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (Tensor, "version"),
        (Tensor, "is_view"),
        (Tensor, "is_zerotensor"),
        (Tensor, "hooks"),
        (torch, "is_any_autocast_enabled"),
        (torch.compiler, "graph_break"),
        (torch.compiler, "is_compiled"),
        (torch.nn.Module, "hooks"),
        (torch.nn.Module, "forward_hooks"),
        (torch.autograd, "current_node"),
        (torch.mps, "default_generators"),
    ],
)
def test_there_is_no_public_name_for(holder, name):
    assert not hasattr(holder, name)


def test_there_is_no_public_registry_of_containers():
    assert importlib.util.find_spec("torch.utils.pytree") is None  # pytorch#65761, #175082


# --- levels of torch.func ------------------------------------------------------------------------


def test_levels_of_torch_func_are_seen_from_inside():
    seen = {}

    def f(x):
        kinds = upstream.TransformType
        seen["kinds"] = [level.key() for level in upstream.get_interpreter_stack()]
        seen["top"] = upstream.peek_interpreter_stack().key()
        seen["wrapped"] = upstream.is_wrapped(x), upstream.is_gradtrackingtensor(x)
        inner = upstream.get_unwrapped(x)
        seen["batched"] = upstream.is_batchedtensor(inner), upstream.maybe_get_bdim(inner)
        seen["level"] = upstream.peek_interpreter_stack().level() == upstream.maybe_get_level(x)
        with upstream.temporarily_clear_interpreter_stack():
            seen["cleared"] = upstream.peek_interpreter_stack()
        assert kinds.Grad in seen["kinds"]
        return (x**2).sum()

    torch.func.vmap(torch.func.grad(f))(torch.ones(3, 2))
    kinds = upstream.TransformType
    assert seen == {
        "kinds": [kinds.Vmap, kinds.Grad],
        "top": kinds.Grad,
        "wrapped": (True, True),
        "batched": (True, 0),
        "level": True,
        "cleared": None,
    }
    assert upstream.peek_interpreter_stack() is None and upstream.get_interpreter_stack() is None


def test_a_wrapper_says_that_its_transform_has_ended():
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.ones(2))
    assert upstream.is_wrapped(kept[0]) and upstream.maybe_get_level(kept[0]) == -2


def test_autograds_own_vmap_is_counted_and_left():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, ct):
            upstream.enter_vmap()
            seen.append((upstream.leave_vmap(), upstream.is_legacy_batched(ct)))
            return ct

    x = _x()
    torch.autograd.grad(Watch.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert seen == [(1, True)]
    assert not upstream.is_legacy_batched(x)
    level = upstream.enter_vmap()
    y = upstream.add_batch_axis(torch.ones(3, 2), 0, level)
    assert y.shape == (2,) and upstream.is_legacy_batched(y)
    assert upstream.remove_batch_axis(y, level, 3, 0).shape == (3, 2)
    upstream.leave_vmap()


# --- forward mode --------------------------------------------------------------------------------


def test_the_level_of_forward_mode_is_seen_and_entered():
    assert upstream.forward_level() == -1
    level = upstream.enter_forward_level()
    try:
        assert level == upstream.forward_level() == 0
        assert upstream.enter_forward_level() is None  # there is one
        assert upstream.forward_level() == 0
        x = upstream.make_dual(torch.ones(2), torch.full((2,), 3.0), level=0)
        assert upstream.unpack_dual(x * 2, level=0)[1].tolist() == [6.0, 6.0]
        with upstream.forward_mode_enabled(False):
            assert not upstream.is_forward_mode_enabled()
            assert upstream.unpack_dual(x * 2, level=0)[1] is None
        upstream.set_forward_mode_enabled(False)
        upstream.set_forward_mode_enabled(True)
        assert upstream.is_forward_mode_enabled()
    finally:
        upstream.leave_forward_level(level)
    assert upstream.forward_level() == -1
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


def test_a_level_that_another_is_about_to_enter_is_left_again(monkeypatch):
    """As between the two lines of `forward_ad.enter_dual_level` in another thread."""
    monkeypatch.setattr(forward_ad, "_current_level", 3)
    assert upstream.enter_forward_level() is None
    monkeypatch.undo()
    with forward_ad.dual_level():
        assert upstream.forward_level() == 0


def test_any_autocast_is_seen():
    assert not upstream.is_any_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert upstream.is_any_autocast_enabled()


# --- autograd ------------------------------------------------------------------------------------


def test_a_backward_pass_says_which_it_is_and_what_it_comes_to():
    x = _x()
    y = x.exp()
    seen = {}

    def hook(ct):
        seen["task"] = upstream.current_graph_task()
        seen["keeps"] = upstream.keeps_graph()
        seen["will"] = upstream.will_run(y.grad_fn)

    z = (y * 2).sum()
    z.register_hook(hook)
    z.backward(retain_graph=True)
    assert seen["task"] >= 0 and seen["keeps"] is True and seen["will"] is True
    z.backward()
    assert seen["keeps"] is False and upstream.current_graph_task() == -1


def test_the_running_node_and_its_number_are_seen():
    x, seen = _x(), []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, ct):
            seen.append(upstream.current_node())
            return ct * 2

    before = upstream.nodes_made()
    y = Double.apply(x)
    assert upstream.sequence_of(y.grad_fn) == before < upstream.nodes_made()
    assert upstream.function_of(y.grad_fn) is Double
    assert upstream.function_of((2 * x).grad_fn) is None
    assert upstream.backward_class(Double) is type(y.grad_fn)
    assert upstream.current_node() is None
    y.sum().backward()
    assert upstream.sequence_of(seen[0]) == upstream.sequence_of(y.grad_fn)


def test_a_full_backward_hook_of_a_module_is_a_function_of_its_own():
    net = torch.nn.Tanh()
    net.register_full_backward_hook(lambda module, before, after: None)
    assert upstream.function_of(net(_x()).grad_fn) is upstream.ModuleHook


def test_what_a_node_saved_is_read_by_its_name():
    x = _x()
    node = x.exp().grad_fn
    assert torch.equal(upstream.saved(node, "result"), x.exp())
    assert upstream.saved(node, "other", "none") == "none"


def test_hooks_of_saved_tensors_are_seen():
    assert upstream.saved_tensors_hooks_on(False) is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        hooks = upstream.saved_tensors_hooks_on(False)
        upstream.pop_saved_tensors_hooks()
        assert upstream.saved_tensors_hooks_on(False) is None
        upstream.push_saved_tensors_hooks(*hooks)
        assert upstream.saved_tensors_hooks_on(False) == hooks


def test_versions_are_read_and_set():
    x = torch.zeros(2)
    x += 1
    assert upstream.version_of(x) == 1
    upstream.set_version_counters((x,), (0,))
    assert upstream.version_of(x) == 0


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
    class Watch(upstream.Watching):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    seen = []
    plain = upstream.run_engine
    monkeypatch.setattr(upstream, "run_engine", lambda *a, **k: seen.append(1) or plain(*a, **k))
    x = _x()
    with Watch():
        (found,) = pulled([x.sin()], [x], [torch.ones(2)], False, False)
    assert seen == [1] and torch.equal(found, x.detach().cos())


def test_a_graph_ends_in_nodes_of_one_class():
    x = _x()
    assert type(x.sin().grad_fn.next_functions[0][0]) is upstream.AccumulateGrad


def test_set_grad_enabled_is_what_a_mode_sees():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, fun, types, args=(), kwargs=None):
            seen.append(fun)
            return fun(*args, **(kwargs or {}))

    with Watch():
        assert len(upstream.function_modes()) == upstream.count_of_function_modes() == 1
        torch.set_grad_enabled(True)
        with upstream.DisableTorchFunction():
            torch.ones(1) + 1
    assert any(fun is upstream.set_grad_enabled for fun in seen)
    assert upstream.count_of_function_modes() == upstream.count_of_dispatch_modes() == 0


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_who_keeps_a_bound_apply_is_met_by_a_patch_or_by_its_node():
    kept, seen = Double.apply, []

    def noting(kind, beneath, args, kwargs):
        seen.append(kind)
        return beneath(*args, **kwargs)

    def note(node):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            seen.append(upstream.function_of(node))

    assert torch.autograd.function._SingleLevelFunction in upstream.Functions
    hook = upstream.node_creation_hook or (lambda note: nullcontext())
    with functions_applied(noting), hook(note):
        kept(_x())
    assert seen == [Double]


def test_torch_func_calls_functions_by_an_operator_that_modes_see():
    seen = []

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
            return ct * 2

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, fun, types, args=(), kwargs=None):
            seen.append(fun)
            return fun(*args, **(kwargs or {}))

    with Watch():
        torch.func.grad(lambda x: Double.apply(x).sum())(torch.ones(2))
    assert upstream.custom_function_call in seen
    mapped = torch.vmap(torch.vmap(Double.apply))(_x().expand(3, 2)).grad_fn
    assert type(mapped)._forward_cls is not Double is upstream.function_of(mapped)


# --- tensors -------------------------------------------------------------------------------------


def test_zeros_views_and_aliases_are_told():
    zero = torch._efficientzerotensor((2,))
    x = torch.zeros(2)
    assert upstream.is_zero(zero) and not upstream.is_zero(x)
    assert upstream.is_view(x.view(2)) and not upstream.is_view(x)
    assert upstream.is_alias_of(x, x[1:]) and not upstream.is_alias_of(x, x.clone())


def test_the_owners_of_memory_are_counted():
    x = torch.ones(3)
    alone = upstream.owners_of_memory(x)
    y = x[1:]
    assert upstream.owners_of_memory(y) == alone + 1


def test_fake_tensors_have_shapes_and_devices_alone():
    with upstream.fake_tensors():
        y = torch.ones(2, 3) @ torch.ones(3, 4)
    assert y.shape == (2, 4) and y.device.type == "cpu"


def test_a_subclass_is_made_in_the_same_memory_and_is_no_view():
    class Mine(Tensor):
        pass

    x = torch.ones(2)
    y = upstream.make_subclass(Mine, x)
    assert type(y) is Mine and y.data_ptr() == x.data_ptr() and not upstream.is_view(y)


def test_tracing_is_told():
    seen = []

    def f(x):
        seen.append(upstream.tracing_state() is not None)
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        torch.jit.trace(f, torch.ones(1), check_trace=False)
    assert upstream.tracing_state() is None and seen == [True]


def test_the_storages_of_a_tensor_are_one_object_for_as_long_as_it_lives():
    """So that a storage is known by its `id`, where `_cdata` was asked before."""
    x = torch.ones(3)
    first = id(x.untyped_storage())
    others = [object() for _ in range(1000)]
    assert id(x[1:].untyped_storage()) == first and others


def test_hooks_of_a_leaf_are_seen():
    x = _x()
    assert upstream.tensor_hooks(x) is None
    x.register_hook(lambda g: g).remove()
    assert upstream.tensor_hooks(x) is not None


def test_what_a_node_takes_is_described():
    y = torch.ones(2, 3, dtype=torch.float64, requires_grad=True).exp()
    (shown,) = upstream.described(y.grad_fn)
    assert (tuple(shown.shape), shown.dtype, shown.device) == ((2, 3), y.dtype, y.device)


def test_the_hooks_of_a_node_are_read_by_setting_one():
    y = _x().requires_grad_().exp()
    for register in (y.grad_fn.register_hook, y.grad_fn.register_prehook):
        hook = lambda *_: None
        number = register(hook).id
        handle = register(print)
        handle.remove()
        assert dict(handle.hooks_dict_ref()) == {number: hook}


def test_every_hook_that_is_set_counts():
    x = _x().requires_grad_()
    y, before = 2 * x, upstream.hooks_made()
    y.register_hook(lambda g: g), y.grad_fn.register_hook(lambda given, taken: None)
    x.register_post_accumulate_grad_hook(lambda x: None)
    assert upstream.hooks_made() == before + 3


def test_a_frame_of_checkpoint_is_known():
    seen = []

    def f(x):
        frame = sys._getframe()
        while frame is not None:
            seen.append(upstream.is_of_checkpoint(frame))
            frame = frame.f_back
        return x

    torch.utils.checkpoint.checkpoint(f, _x(), use_reentrant=False)
    assert any(seen) and not seen[0]


class _Asked(torch.overrides.TorchFunctionMode):
    """Notes what the room says of whoever called `fun`."""

    def __init__(self, fun, ask):
        super().__init__()
        self.fun, self.ask, self.said = fun, ask, []

    def __torch_function__(self, fun, types, args=(), kwargs=None):
        if fun == self.fun:  # not always the same object
            self.said.append(self.ask(1))
        return fun(*args, **(kwargs or {}))


def test_a_sum_of_gradients_is_autograds_own_and_a_rules_code_is_not():
    said = []

    class Watch(upstream.Watching):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            said.append((func, upstream.is_summed_by_autograd(upstream.current_node())))
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
    with Watch():
        total.backward()
    adds = [summed for func, summed in said if func is torch.ops.aten.add.Tensor]
    assert adds.count(True) == 1 and adds.count(False) == 2


def test_the_device_of_collectives_is_that_of_their_backend(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert upstream.collective_device(None) == torch.device("cpu")
    finally:
        torch.distributed.destroy_process_group()


def test_an_axis_is_hidden_by_a_level_of_vmap():
    def f(x):
        level = upstream.peek_interpreter_stack().level()
        return x + upstream.add_vmap_axis(torch.arange(3.0), 0, level)

    assert torch.vmap(f)(torch.zeros(3)).tolist() == [0.0, 1.0, 2.0]


def test_a_trace_of_make_fx_is_told():
    seen = [upstream.is_traced_by_make_fx()]

    def f(x):
        seen.append(upstream.is_traced_by_make_fx())
        return x + 1

    make_fx(f)(torch.ones(2))
    assert seen == [False, True]


# --- operators and modules -----------------------------------------------------------------------


def test_the_class_of_operators_of_functions_is_known():
    assert isinstance(torch.ops.higher_order.cond, upstream.HigherOrderOperator)


def test_containers_of_pytorch_are_taken_apart_and_put_together():
    leaves, spec = upstream.pytree.tree_flatten({"a": [1, 2]})
    assert leaves == upstream.tree_leaves({"a": [1, 2]}) == [1, 2]
    assert upstream.pytree.tree_unflatten([3, 4], spec) == {"a": [3, 4]}
    assert upstream.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


def test_modes_act_again_within_the_backward_of_a_subclass():
    with _Asked(torch.exp, lambda depth: True) as mode, torch._C.DisableTorchFunction():
        torch.exp(_x())
        with upstream.EnableTorchFunction():
            torch.exp(_x())
    assert mode.said == [True]


def test_a_module_that_is_compiled_in_place_is_called_as_it_was():
    module = torch.nn.Linear(1, 1)
    module.compile()
    assert vars(module)["_compiled_call_impl"] is not None
    assert callable(vars(module)[upstream.COMPILED_CALL])


def test_conversion_and_loading_of_a_wrapper_reach_what_it_wraps():
    wrapper = upstream.ModuleLike()
    wrapper._own = torch.nn.Linear(1, 1)
    wrapper.double()
    torch.nn.Sequential(wrapper).load_state_dict({"0.weight": _x()[:1, None] * 7}, strict=False)
    assert wrapper._own.weight.dtype == torch.float64 and wrapper._own.weight.item() == 7.0


def test_a_module_shows_its_slots_and_hooks():
    m = torch.nn.BatchNorm1d(2, affine=False)
    assert isinstance(m, upstream.BatchNorm)
    parameters, buffers, children = upstream.slots_of(m)
    assert parameters["weight"] is None and "running_mean" in buffers and not children
    assert all(vars(m)[name] is slot for name, slot in zip(upstream.SLOTS, (
        parameters, buffers, children), strict=True))  # fmt: skip
    assert vars(m)[upstream.NOT_SAVED] == set()
    assert not upstream.has_hooks(m)
    forward = m.register_forward_hook(lambda *a: None)
    assert upstream.has_hooks(m) and [*upstream.forward_hooks_of(m)] == [forward.id]
    forward.remove()
    m.register_full_backward_hook(lambda *a: None)
    assert upstream.has_hooks(m)


def test_cached_weights_are_seen_in_their_block_alone():
    parametrize = torch.nn.utils.parametrize
    assert not upstream.caches_weights()
    with parametrize.cached():
        assert upstream.caches_weights() == 1
        other: dict = {}
        upstream.set_cached_weights(other)
        assert upstream.cached_weights() is other


def test_the_block_of_a_default_device_is_seen():
    before = torch.get_default_device()
    assert upstream.device_set() is None
    try:
        torch.set_default_device("meta")
        assert upstream.device_set() is not None
    finally:
        torch.set_default_device(before)
        torch.set_default_device(None)
    assert upstream.device_set() is None
    assert upstream.default_device() == before


def test_which_kernels_stand_beneath_autograd():
    key = upstream.DispatchKey.AutogradFunctionality
    assert not upstream.is_dispatch_key_excluded(key)
    seen = []

    class Watch(upstream.TorchDispatchMode):
        def __torch_dispatch__(self, fun, types, args=(), kwargs=None):
            seen.append(
                (upstream.is_dispatch_key_excluded(key), upstream.count_of_dispatch_modes())
            )
            return fun(*args, **(kwargs or {}))

    with Watch():
        torch.ones(1) + 1
        with upstream.disable_current_modes():
            assert upstream.count_of_dispatch_modes() == 0
    assert seen[-1] == (True, 0)


def test_an_outermost_block_beneath_an_operation_is_dispatched_as_in_a_new_thread():
    tracked = []

    class Watch(upstream.TorchDispatchMode):
        def __torch_dispatch__(self, fun, types, args=(), kwargs=None):
            x = torch.ones(1, requires_grad=True)
            before = (2 * x).requires_grad
            with upstream.outermost(), torch.enable_grad():
                modes = upstream.count_of_dispatch_modes()
                tracked.append((before, (2 * x).requires_grad, modes))
            return fun(*args, **(kwargs or {}))

    with Watch():
        torch.ones(1) + 1
    assert tracked[-1] == (False, True, 0)


# --- dynamo --------------------------------------------------------------------------------------


def test_dynamo_is_known_to_be_loaded():
    f = lambda x: x
    torch.compile(f)
    assert upstream.DYNAMO in sys.modules


def test_another_thread_has_its_own_count_of_nodes():
    found = []
    _x().exp()
    thread = threading.Thread(target=lambda: found.append(upstream.nodes_made()))
    thread.start()
    thread.join()
    assert found[0] < upstream.nodes_made()


def test_fake_tensors_of_a_compiler_are_known():
    with upstream.fake_tensors() as mode:
        assert upstream.detect_fake_mode([torch.ones(2)]) is mode
    assert upstream.detect_fake_mode([torch.ones(2)]) is None
    assert upstream.TracingContext.try_get() is None


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
    (tmp_path / "passed_by.py").write_text("def f(x):\n    return x.exp()\n")
    monkeypatch.syspath_prepend(tmp_path)
    upstream.skip_module("passed_by")
    compiled = torch.compile(importlib.import_module("passed_by").f, backend=_refuse_to_compile)
    assert compiled(torch.zeros(1)).item() == 1.0


def _refuse_to_compile(graph, inputs):
    raise AssertionError("it was compiled")


# --- what frameworks put around layers -----------------------------------------------------------


def test_a_function_whose_code_is_skipped_is_compiled_only_within_another():
    seen = []

    def fun(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    upstream.skip_code(fun)
    torch.compile(fun, backend="eager")(_x())
    assert seen == [False]
    torch.compile(lambda x: fun(x) * 2, backend="eager", fullgraph=False)(_x())


def test_a_tensor_enters_a_level_of_grad_and_a_level_of_vmap_says_its_size():
    seen, outside = [], torch.ones(2)

    def f(x):
        level = upstream.peek_interpreter_stack()
        seen.append(upstream.maybe_get_level(upstream.wrap_for_grad(outside, level.level())))
        return x.sum()

    torch.func.grad(f)(torch.ones(3))
    sized = lambda x: (seen.append(upstream.batch_size_of(upstream.peek_interpreter_stack())), x)[1]
    torch.vmap(sized)(torch.ones(5, 2))
    assert seen == [1, 5]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_whether_dynamo_compiles_here_is_known_to_it_alone():
    seen = []

    def f(x):
        seen.append(upstream.compiles_here())
        return x + 1

    torch.compile(f, backend="eager")(torch.ones(2))
    assert seen == [True] and not upstream.compiles_here()


def test_an_operator_tells_its_arguments():
    names = [argument.name for argument in upstream.schema_of(torch.ops.aten.add.Tensor).arguments]
    assert names == ["self", "other", "alpha"]
