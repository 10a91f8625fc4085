"""Lists the private PyTorch names that gradtools uses, and the reasons for their use.

`tests/house/test_upstream.py` checks that other modules import private names only from this module.
`tests/torch/test_upstream.py` tests the names that the tests of the operators do not cover. All
names exist in PyTorch 2.8 to 2.15. The modules `_upstream` of `gradtools.seeing.torch` and
`gradtools.bridge` list the private names that only `gradtools.seeing` and `gradtools.bridge` use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack,
)
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

Tensor = torch.Tensor
_functorch: Any = torch._C._functorch
_c: Any = torch._C

pytree = _pytree
tree_leaves, tree_map_only = pytree.tree_leaves, pytree.tree_map_only
disable_current_modes = _disable_current_modes
"""`pytree` is torch.func's registry of pytree nodes, in which users register classes
(pytorch#65761). `disable_current_modes` is a context manager that disables all dispatch modes.
`temporarily_clear_interpreter_stack` is a context manager in which no level of torch.func is
active. `TracingContext` and `detect_fake_mode` detect whether a compiler is tracing.
"""

# --- levels of torch.func ----------------------------------------------------------------------

peek_interpreter_stack: Callable[[], Any] = _functorch.peek_interpreter_stack
get_interpreter_stack: Callable[[], Any] = _functorch.get_interpreter_stack
TransformType: Any = _functorch.TransformType
"""`peek_interpreter_stack` returns the innermost level of torch.func, or None;
`get_interpreter_stack` returns all levels, outermost first. `TransformType` is the enum of
transforms: vmap, grad, jvp and functionalize."""

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batchedtensor: Callable[[Tensor], bool] = _functorch.is_batchedtensor
is_gradtrackingtensor: Callable[[Tensor], bool] = _functorch.is_gradtrackingtensor
get_unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
maybe_get_level: Callable[[Tensor], int] = _functorch.maybe_get_level
maybe_get_bdim: Callable[[Tensor], int] = _functorch.maybe_get_bdim
"""`is_wrapped` returns whether a tensor is a functorch wrapper, `is_batchedtensor` returns whether
vmap created the wrapper, and `is_gradtrackingtensor` returns whether grad or jvp created it.
`get_unwrapped` returns the wrapped tensor, `maybe_get_level` returns the wrapper's level (-2 if the
transform has ended), and `maybe_get_bdim` returns the batch axis of vmap (-1 if there is none)."""

wrap_for_grad: Callable[[Tensor, int], Tensor] = _functorch._wrap_for_grad
add_vmap_axis: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim
"""`wrap_for_grad` wraps a tensor for a level of `torch.func.grad`; `add_vmap_axis` wraps a tensor
for a level of vmap, with the given axis as the batch axis."""

batch_size_of: Callable[[Any], int] = lambda v: _functorch.CVmapInterpreterPtr(v).batchSize()
"""Returns the batch size of a level of vmap."""

is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
enter_vmap: Callable[[], int] = _c._vmapmode_increment_nesting
leave_vmap: Callable[[], int] = _c._vmapmode_decrement_nesting
add_batch_axis: Callable[..., Tensor] = torch._add_batch_dim
remove_batch_axis: Callable[..., Tensor] = torch._remove_batch_dim
"""Functions of the legacy vmap, with which `torch.autograd.grad` implements `is_grads_batched`.
`is_legacy_batched` returns whether a tensor is batched, `enter_vmap` and `leave_vmap` enter and
exit a level and return the number of active levels, and `add_batch_axis` and `remove_batch_axis`
wrap and unwrap a tensor."""

# --- forward mode ------------------------------------------------------------------------------

forward_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
"""Returns the active level of forward mode, or -1 if there is none."""


def enter_forward_level() -> int | None:
    """Enters and returns a level of forward mode; returns None if any thread has an active level.

    If another thread exits `torch.func.jvp` at the same moment, PyTorch's own function raises an
    error without exiting the level that it has entered; this copy of PyTorch's code exits the
    level.
    """
    try:
        level = int(_c._enter_dual_level())
    except RuntimeError:
        return None
    if level != forward_ad._current_level + 1:
        _c._exit_dual_level(level=level)
        return None
    forward_ad._current_level = level
    _load_decompositions()
    return level


def leave_forward_level(level: int) -> None:
    """Exits a level of forward mode, in a third of the time of PyTorch's own function."""
    _c._exit_dual_level(level=level)
    forward_ad._current_level = level - 1


_load_decompositions = cache(forward_ad._maybe_load_decompositions)
make_dual: Callable[..., Tensor] = torch._make_dual
unpack_dual: Callable[..., Any] = torch._unpack_dual
"""`make_dual` and `unpack_dual` omit `forward_ad`'s argument checks, which double the run time."""

is_forward_mode_enabled: Callable[[], bool] = _c._is_fwd_grad_enabled
set_forward_mode_enabled: Callable[[bool], None] = _c._set_fwd_grad_enabled
forward_mode_enabled: Any = forward_ad._set_fwd_grad_enabled
"""`is_forward_mode_enabled` returns whether forward mode propagates tangents,
`set_forward_mode_enabled` sets this flag, and `forward_mode_enabled` is a context manager that sets
and restores the flag."""

is_any_autocast_enabled: Callable[[], bool] = _c._is_any_autocast_enabled
"""Returns whether autocast is on for any device."""

# --- autograd's engine and its graph -----------------------------------------------------------

set_grad_enabled: Callable[[bool], None] = _c._set_grad_enabled
"""The C function that `torch.set_grad_enabled` calls and that function modes intercept."""

run_engine: Callable[..., tuple[Any, ...]] = torch.autograd.graph._engine_run_backward
engine: Callable[..., tuple[Any, ...]] = torch.autograd.Variable._execution_engine.run_backward
"""The functions of autograd's engine that `torch.autograd.grad` calls. `run_engine` skips argument
checks, which take a third of the time of a small function's derivative; `engine` also does not set
the context variable that compiled code reads."""

current_graph_task: Callable[[], int] = _c._current_graph_task_id
will_run: Callable[[Any], bool] = _c._will_engine_execute_node
"""`current_graph_task` returns the id of the running backward pass, or -1; `will_run` returns
whether the running backward pass will execute a node."""

AccumulateGrad: Any = _c._functions.AccumulateGrad
ModuleHook: Any = torch.nn.modules._functions.BackwardHookFunction
backward_class: Callable[[Any], Any] = attrgetter("_backward_cls")
"""`AccumulateGrad` is the class of leaf nodes, and `ModuleHook` is the `torch.autograd.Function`
that runs a module's full backward hooks. `backward_class` returns the class of the nodes that a
Function creates."""


def nodes_of_function(nodes: Sequence[Any], function: Any) -> list[Any]:
    """Returns the nodes that a Function created outside of vmap."""
    return [node for node in nodes if type(node) is function._backward_cls]


def function_of(node: Any) -> Any:
    """Returns the class of the user's Function that created a node, or None for a built-in node.

    vmap generates another Function, whose `forward` closes over the user's Function.
    """
    function = getattr(type(node), "_forward_cls", None)
    while function is not None and function.__module__ == "torch._functorch.autograd_function":
        made_by = function.forward
        names = dict(zip(made_by.__code__.co_freevars, made_by.__closure__, strict=True))
        function = names["autograd_function"].cell_contents
    return function


nodes_made: Callable[[], int] = _c._autograd._get_sequence_nr
sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
hooks_made: Callable[[], int] = partial(getattr, RemovableHandle, "next_id")
"""`nodes_made` returns the sequence number of the next node in this thread, `sequence_of` returns
the sequence number of a node (nodes that were created earlier have smaller numbers), and
`hooks_made` returns the number of hooks that the process has registered."""

saved_tensors_hooks_on: Callable[[bool], Any] = _c._autograd._top_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[..., None] = _c._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _c._autograd._pop_saved_tensors_default_hooks
"""`saved_tensors_hooks_on` returns the top of the stack of saved-tensor hooks, and
`push_saved_tensors_hooks` and `pop_saved_tensors_hooks` change the stack. The user's saved-tensor
hooks must not pack the tensors that gradtools' temporary graphs save."""

# --- modes -------------------------------------------------------------------------------------

EnableTorchFunction: Any = _c._EnableTorchFunction
function_modes: Callable[[], Sequence[Any]] = torch.overrides._get_current_function_mode_stack
count_of_function_modes: Callable[[], int] = _c._len_torch_function_stack
count_of_dispatch_modes: Callable[[], int] = _c._len_torch_dispatch_stack
"""`EnableTorchFunction` enables function modes, which are disabled in the backward pass of a tensor
subclass. `function_modes` returns the active function modes; `count_of_function_modes` and
`count_of_dispatch_modes` return the numbers of active modes."""

_PROXY = _c._TorchDispatchModeKey.PROXY
is_traced_by_make_fx: Callable[[], bool] = lambda: _c._get_dispatch_mode(_PROXY) is not None
tracing_state: Callable[[], Any] = _c._get_tracing_state
"""`is_traced_by_make_fx` returns whether torch.fx is tracing with proxies, which have no values;
`tracing_state` returns the state of `torch.jit.trace`, or None."""

# --- tensors -----------------------------------------------------------------------------------

version_of: Callable[[Tensor], int] = attrgetter("_version")
set_version_counters: Callable[..., None] = _c._autograd._unsafe_set_version_counter
"""`version_of` (a documented attribute) returns the version counter of a tensor, and
`set_version_counters` sets the counters of tensors. After a saved tensor's contents are restored,
the tensor's counter is reset, so that autograd considers the tensor unchanged."""

is_zero: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
is_alias_of: Callable[[Tensor, Tensor], bool] = _c._is_alias_of
tensor_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""`is_zero` returns whether x is a zero tensor without memory (forward mode creates such tensors),
`is_view` returns whether autograd tracks x as a view, and `is_alias_of` returns whether two tensors
share a storage. `tensor_hooks` returns the hooks that are registered on x, or None if there are
none."""

add_each_, multiply_each = torch._foreach_add_, torch._foreach_mul
divide_each, divide_each_ = torch._foreach_div, torch._foreach_div_
"""Functions that add, multiply or divide lists of tensors in one operation."""


def storage_key(x: Tensor) -> int:
    """Returns a key that is equal for two existing tensors if and only if they share a storage.

    A tensor without a storage (sparse, or wrapped by a transform) has its own key.
    """
    try:
        with _c.DisableTorchFunction():
            return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(x)


def size_hint(n: Any, fallback: int) -> int:
    """Returns the example value of a symbolic size, or `fallback` if there is none."""
    from torch.fx.experimental import symbolic_shapes

    hint = getattr(symbolic_shapes, "optimization_hint", None) or vars(symbolic_shapes)["hint_int"]
    return int(hint(n, fallback=fallback))


# --- modules -----------------------------------------------------------------------------------

SLOTS = ("_parameters", "_buffers", "_modules")
slots_of: Callable[[torch.nn.Module], tuple[Any, Any, Any]] = attrgetter(*SLOTS)
NOT_SAVED, COMPILED_CALL = "_non_persistent_buffers_set", "_compiled_call_impl"
"""`SLOTS` names the attributes that contain a module's own parameters, buffers and children, some
of which may be None. The attribute `NOT_SAVED` contains the names of non-persistent buffers. The
attribute `COMPILED_CALL` contains the code that `module.compile()` creates, which a copy of the
module must not run."""

BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
"""The base class of all batch normalization modules, including SyncBatchNorm."""


class ModuleLike(torch.nn.Module):
    """A module that delegates conversions and loading to another module, `_own`."""

    _own: torch.nn.Module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._own._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._own._load_from_state_dict(*args, **kwargs)


caches_weights: Callable[[], int] = partial(getattr, parametrize, "_cache_enabled")
"""Returns the number of active `parametrize.cached` contexts."""

# --- dynamo, which is not imported until a function is compiled -----------------------------------

DYNAMO = "torch._dynamo"
_compiler_of_frames = getattr(_c._dynamo.eval_frame, "get_eval_frame_callback", None)
"""Returns dynamo's callback that compiles frames in this thread, or None if there is none."""


def compiles_here() -> bool:
    """Returns whether dynamo compiles functions that are called in the current thread."""
    return DYNAMO in sys.modules if _compiler_of_frames is None else bool(_compiler_of_frames())


def break_graph(reason: str) -> None:
    """Causes a graph break in dynamo. The reason appears in dynamo's logs."""
    sys.modules[DYNAMO].graph_break(msg=reason)


is_exporting: Callable[[], bool] = partial(getattr, torch.compiler, "_is_exporting_flag")
"""Returns whether `torch.export` is tracing. The flag is read directly, because dynamo evaluates
the public function to True."""


def skip_module(name: str) -> None:
    """Makes dynamo skip the module's frames, but not the functions that these frames call."""
    from torch._dynamo import trace_rules

    trace_rules.add(name)


def skip_code(fun: Callable[..., Any]) -> None:
    """Makes dynamo compile a function only where it is inlined into another function."""
    from torch._dynamo.eval_frame import skip_code as skip

    skip(fun.__code__)


def marked_constant(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Applies `torch.compiler.assume_constant_result` to fun without importing dynamo."""
    fun._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fun


# --- hacks that a maintainer of PyTorch would reject --------------------------------------------
#
# PyTorch has no public interface for the operations below. Each workaround is in one module:
#
# - `known_errors` matches error messages, since PyTorch's errors have no types.
# - `code_origin` inspects the instruction that raised an error, to distinguish a user's `raise`
#   from an error of PyTorch.
# - `thread_patches` patches classes during a call that modes cannot intercept.
# - `compiling` installs an import hook, since dynamo identifies marked functions by object and
#   importing dynamo takes seconds.
# - `host` registers one operator, since compiled programs contain no Python objects.
# - `state` reads the memory of Python's and NumPy's random generators, since copying their states
#   takes longer than evaluating a small layer.
# - `lazy_graphs` removes the hooks of leaves during a second evaluation, so that each hook runs
#   once.
