"""Every private name of PyTorch that gradtools uses, each with its reason; no other file uses any.

All other files import them from here (`tests/house/test_upstream.py` checks their source).
`tests/torch/test_upstream.py` tests the behaviour of each name, and that no public alternative
exists yet. Each entry says what it is for; "Gone:" says what to do once it no longer exists. All
exist in PyTorch 2.8 to 2.15 but where an entry names versions; upstream issues are named. An alias
costs nothing, a function costs a call, so names that are used at every operation are aliases.

No public alternative was found in any of these versions. Hacks that a maintainer of PyTorch would
reject, and for which there is no alternative, are at the end, with benefit and cost.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from torch._C import DispatchKey as DispatchKey
from torch._functorch.autograd_function import custom_function_call as custom_function_call
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack,
)
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.autograd import function
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

Tensor = torch.Tensor
_functorch: Any = torch._C._functorch
_autograd: Any = torch.autograd
_c: Any = torch._C

# --- names that are imported above -------------------------------------------------------------
#
# DispatchKey: identifies an operator's kernels. Gone: compare keys by their names.
# custom_function_call: the operator that torch.func calls instead of `Function.apply`, so that a
#   mode can intercept it. Gone: refuse Functions inside of torch.func where a derivative is lost.
# temporarily_clear_interpreter_stack: runs code outside of all torch.func levels: communication
#   between processes, a trial of a rule. Gone: refuse these within levels.
# TracingContext, detect_fake_mode: whether a compiler traces with fake tensors.
#   Gone: `torch.compiler.is_compiling`, which covers dynamo only.
# HigherOrderOperator: the class of operators such as cond.
#   Gone: `type(torch.ops.higher_order.cond)`.
# pytree: the registry of containers that torch.func itself uses, so that containers registered
#   with `torch.utils._pytree.register_pytree_node` are known. Gone: `torch.utils.pytree`
#   (pytorch#65761, #175082).
# TorchDispatchMode: documented under this name ("Extending PyTorch with Python").

disable_current_modes = _disable_current_modes
"""Context in which no dispatch mode intercepts gradtools' own operations. Gone: a flag of each of
our modes, as in `gradient_graph`; modes of other packages then intercept them."""


class Watching(TorchDispatchMode):
    """A dispatch mode that does not import dynamo, an import slower than any code under the mode.

    It never runs inside of compiled code. Gone: dynamo's frames are below each call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


pytree = _pytree
tree_leaves, tree_map_only = pytree.tree_leaves, pytree.tree_map_only

# --- levels of torch.func ----------------------------------------------------------------------

peek_interpreter_stack: Callable[[], Any] = _functorch.peek_interpreter_stack
get_interpreter_stack: Callable[[], Any] = _functorch.get_interpreter_stack
TransformType: Any = _functorch.TransformType
"""The innermost level of torch.func, or None; all levels, outermost first; their kinds. Gone: there
is no public way; apply a transform to a number and check whether it is wrapped."""


def batch_size_of(level: Any) -> int:
    """The batch size of a level of vmap. Gone: from a tensor that the level batches."""
    return int(_functorch.CVmapInterpreterPtr(level).batchSize())


is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
get_unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
"""Whether a tensor is a wrapper of a torch.func level; the tensor beneath one level. Gone:
`torch.func.debug_unwrap(x, recurse=False)`, which is slower and meant for debugging."""


wrap_for_grad: Callable[[Tensor, int], Tensor] = _functorch._wrap_for_grad
"""A tensor inside of a level of `torch.func.grad`, which it enters: how a recomputed function finds
what it captures. Gone: refuse `chunked` and `checkpoint` inside of torch.func."""

maybe_get_level: Callable[[Tensor], int] = _functorch.maybe_get_level
"""A wrapper's level; -2 if the transform has ended, as when a pullback runs after it."""

maybe_get_bdim: Callable[[Tensor], int] = _functorch.maybe_get_bdim
"""The axis that vmap hides, -1 if none: a trial takes the numbers of one example of the batch."""

add_vmap_axis: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim
"""A tensor whose axis a level of vmap hides: an array that is added at a mark inside of vmap. Gone:
refuse `retain_gradient` inside of vmap."""

is_batchedtensor: Callable[[Tensor], bool] = _functorch.is_batchedtensor
is_gradtrackingtensor: Callable[[Tensor], bool] = _functorch.is_gradtrackingtensor
"""Which transform wrapped a tensor. Gone: the kinds of the open levels, which say less."""

is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of the legacy vmap (before functorch), which autograd's
`is_grads_batched` still uses. Gone: together with that vmap."""

enter_vmap: Callable[[], int] = _c._vmapmode_increment_nesting
leave_vmap: Callable[[], int] = _c._vmapmode_decrement_nesting
add_batch_axis: Callable[..., Tensor] = torch._add_batch_dim
remove_batch_axis: Callable[..., Tensor] = torch._remove_batch_dim
"""Enter and leave a level of the legacy vmap, which return the number of open levels; wrap a tensor
in its batches, and unwrap it. Gone: together with that vmap."""

# --- forward mode ------------------------------------------------------------------------------

forward_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
"""The open level of forward mode, -1 if none. Gone: `forward_ad.make_dual` raises outside of a
level."""


def enter_forward_level() -> int | None:
    """Enters a level of forward mode; None if one is active, in this thread or another.

    If another thread enters `torch.func.jvp` at the same moment,
    `torch.autograd.forward_ad.enter_dual_level` raises and leaves a level open; this copy of its
    code closes it. Gone: use that function.
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
    """Exits the level. Gone: `torch.autograd.forward_ad.exit_dual_level`, three times as slow."""
    _c._exit_dual_level(level=level)
    forward_ad._current_level = level - 1


_load_decompositions = cache(forward_ad._maybe_load_decompositions)
"""The decompositions that `forward_ad.make_dual` loads at its first call. Gone: see below."""

make_dual: Callable[..., Tensor] = torch._make_dual
unpack_dual: Callable[..., Any] = torch._unpack_dual
"""`forward_ad.make_dual` and `unpack_dual` without their checks, for the operations of a
pushforward that frozen computes itself. Gone: the public functions, which take twice as long."""

is_forward_mode_enabled: Callable[[], bool] = _c._is_fwd_grad_enabled
set_forward_mode_enabled: Callable[[bool], None] = _c._set_fwd_grad_enabled
forward_mode_enabled: Any = forward_ad._set_fwd_grad_enabled
"""Whether forward mode propagates tangents, a setter, and a context manager: constants of f must
have no tangents. Gone: detach each tensor instead."""

is_any_autocast_enabled: Callable[[], bool] = _c._is_any_autocast_enabled
"""Whether autocast is on for any device. Gone: `torch.is_autocast_enabled(kind)` for each."""

# --- autograd's engine and its graph -----------------------------------------------------------

set_grad_enabled: Callable[[bool], None] = _c._set_grad_enabled
"""The function beneath the class `torch.set_grad_enabled`, a third of its cost; modes intercept it
when f uses the class. Gone: the class, and its `__init__` in modes."""

run_engine: Callable[..., tuple[Any, ...]] = torch.autograd.graph._engine_run_backward
engine: Callable[..., tuple[Any, ...]] = torch.autograd.Variable._execution_engine.run_backward
"""The functions beneath `torch.autograd.grad`: the first skips its argument checks, a third of the
time for a small function; the second also skips the context that compiled code reads and the
logging of nodes. Gone: `torch.autograd.grad`."""

current_graph_task: Callable[[], int] = _c._current_graph_task_id
will_run: Callable[[Any], bool] = _c._will_engine_execute_node
"""The id of the running backward pass, -1 if none, and whether it will execute a node: nodes of one
pass share sums of gradients. Gone: each node sums on its own, without the sums of other towers."""

keeps_graph: Callable[[], bool] = _c._autograd._get_current_graph_task_keep_graph
"""Whether the running backward pass has retain_graph=True. Gone: always keep, and document it."""

current_node: Callable[[], Any] = _c._current_autograd_node
"""The node whose backward runs, so that pictures show operations of a backward pass with their
source line of the forward pass. Gone: backward operations have no line."""

nodes_made: Callable[[], int] = _c._autograd._get_sequence_nr
sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""How many nodes this thread has created, and how many it had when it created a node: captured
tensors have earlier ones. Gone: walk graphs."""

saved_tensors_hooks_on: Callable[[bool], Any] = _c._autograd._top_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[..., None] = _c._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _c._autograd._pop_saved_tensors_default_hooks
"""The stack of hooks on saved tensors, which must not pack the short-lived graphs that gradtools
builds. Gone: push hooks that change nothing, inside of which torch.func refuses tiles."""

set_version_counters: Callable[..., None] = _c._autograd._unsafe_set_version_counter
"""Restore version counters, so that a tensor whose contents are restored counts as unchanged for
the graphs that saved it. `torch.autograd.graph.increment_version` is the public half. Gone:
recomputing a program with changing state raises autograd's own error."""

DisableTorchFunction: Any = _c.DisableTorchFunction
EnableTorchFunction: Any = _c._EnableTorchFunction
"""The first reads attributes of the tensor itself, not of what a mode substitutes for it. (For
subclasses, `torch._C.DisableTorchFunctionSubclass` is documented.) Gone: a flag in our modes. The
second enables modes in the backward pass of a subclass, which disables them. Gone: refuse these."""

Functions: tuple[Any, ...] = (function._SingleLevelFunction,)
"""The classes whose `apply` is patched for the time of a call. Patching the base of
`torch.autograd.Function` also catches a bound `Function.apply`; from PyTorch 2.14 on both classes
have an `apply` of their own in C."""
if not isinstance(vars(torch.autograd.Function)["apply"], classmethod):
    Functions += (torch.autograd.Function,)

node_creation_hook: Any = getattr(_autograd.graph, "node_creation_hook", None)
"""Context that calls a hook for each new node, public from PyTorch 2.14 on: catches a bound `apply`
there. None before, where patching `Functions` does."""


def size_hint(n: Any, fallback: int) -> int:
    """The example value of a symbolic size. `hint_int` before 2.12."""
    from torch.fx.experimental import symbolic_shapes

    hint = getattr(symbolic_shapes, "optimization_hint", None) or vars(symbolic_shapes)["hint_int"]
    return int(hint(n, fallback=fallback))


function_modes: Callable[[], Sequence[Any]] = torch.overrides._get_current_function_mode_stack
count_of_function_modes: Callable[[], int] = _c._len_torch_function_stack
count_of_dispatch_modes: Callable[[], int] = _c._len_torch_dispatch_stack
"""The active modes, and their counts. Gone: assume that there are some, which is slower."""


def is_traced_by_make_fx() -> bool:
    """Whether torch.fx traces by proxies, which have no values. Gone: assume that it does not."""
    return _c._get_dispatch_mode(_c._TorchDispatchModeKey.PROXY) is not None


is_dispatch_key_excluded: Callable[[Any], bool] = _c._dispatch_tls_is_dispatch_key_excluded
"""Whether a dispatch key is excluded, as autograd's in `__torch_dispatch__`, where no tensor has a
tangent. Gone: ask for the tangent, and catch the error."""


@contextmanager
def outermost() -> Iterator[None]:
    """Context in which operations are dispatched as in a new thread: to autograd, without modes.

    Gone: use a thread, which costs as much as a small call.
    """
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        _c._ForceDispatchKeyGuard(*_keys_of_a_thread()),
    ):
        yield


@cache
def _keys_of_a_thread() -> tuple[Any, Any]:
    """The dispatch keys that are included and excluded in a new thread."""
    result: list[Any] = []

    def ask() -> None:
        result.extend((_c._dispatch_tls_local_include_set(), _c._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return result[0], result[1]


AccumulateGrad: Any = _c._functions.AccumulateGrad
"""The class of the nodes of leaves. Gone: compare the name of the class."""


ModuleHook: Any = torch.nn.modules._functions.BackwardHookFunction
"""The Function by which a module's full backward hooks run. Gone: name it as any Function."""


def function_of(node: Any) -> Any:
    """The user's `torch.autograd.Function` of a node; None for PyTorch's own.

    vmap generates a class from it, whose closure holds the user's. Gone: use the node's name.
    """
    function = getattr(type(node), "_forward_cls", None)
    while function is not None and function.__module__ == "torch._functorch.autograd_function":
        made_by = function.forward
        names = dict(zip(made_by.__code__.co_freevars, made_by.__closure__, strict=True))
        function = names["autograd_function"].cell_contents
    return function


backward_class: Callable[[Any], Any] = attrgetter("_backward_cls")
"""The class of the nodes that a `torch.autograd.Function` makes. Gone: `type(y.grad_fn)`."""


def saved(node: Any, name: str, *default: Any) -> Any:
    """A saved value of a node: documented ("Autograd mechanics"), though with an underscore.

    Gone: operations with wrong gradients are refused instead of corrected.
    """
    return getattr(node, f"_saved_{name}", *default)


def described(node: Any) -> Sequence[Any]:
    """The shape, dtype and device of each output of a node.

    Gone: they are not reported; hooks on nodes are not tested, and derivatives through them are
    refused.
    """
    described: Sequence[Any] = getattr(node, "_input_metadata", ())
    return described


# --- tensors -----------------------------------------------------------------------------------


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often x was changed in place. `Tensor._version` is documented, but its name is private. Gone:
compare contents instead of versions."""

is_zero: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
"""Whether x is a zero tensor without memory, as forward mode creates. Gone: clone."""

is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd tracks x as a view of another tensor. Gone: copy the results of rules."""

tensor_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks that edit x's gradient; None if there never was one. They must run once, on the sum
over chunks, so recomputations remove them from the leaves and restore them afterwards. Gone: a hook
would run for each chunk; refuse leaves with hooks."""


tracing_state: Callable[[], Any] = _c._get_tracing_state
"""As `torch.jit.is_tracing`, which is not exported: TorchScript does not trace hooks."""


def owners_of_memory(x: Tensor) -> int:
    """The reference count of x's storage, which may be donated if it is one. Gone: copy."""
    return int(_c._storage_Use_Count(x.untyped_storage()._cdata))


def fake_tensors(**options: Any) -> Any:
    """A `FakeTensorMode`: operations compute shapes only. Its import takes a second.

    Gone: tensors on the meta device, which lose their device.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


is_alias_of: Callable[[Tensor, Tensor], bool] = _c._is_alias_of
"""Whether two tensors share a storage. Gone: compare `untyped_storage()`, which wrappers refuse."""

add_each_: Any = torch._foreach_add_
multiply_each: Any = torch._foreach_mul
divide_each: Any = torch._foreach_div
divide_each_: Any = torch._foreach_div_
"""One operation for many tensors. Gone: a loop over them."""


def storage_key(x: Tensor) -> int:
    """A key that two living tensors share if and only if they share a storage.

    A tensor without a storage (sparse, wrapped by a transform) has a key of its own. No mode
    intercepts this. Gone: `is_alias_of`, for each pair.
    """
    try:
        if type(x) is Tensor and not count_of_function_modes():
            return x.untyped_storage()._cdata
        with _c.DisableTorchFunction():
            return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(x)


make_subclass: Callable[[type, Tensor], Tensor] = Tensor._make_subclass  # type: ignore[attr-defined]
"""A tensor of a class in the memory of another. Gone: `x.as_subclass(kind)`, which is a view."""

# --- operators ---------------------------------------------------------------------------------

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's name and arguments. Gone: those of its documentation."""


def decompositions() -> Any:
    """PyTorch's own decompositions of operators; the import takes a second. Gone: do without."""
    from torch._decomp import decomposition_table

    return decomposition_table


# --- modules -----------------------------------------------------------------------------------

SLOTS = ("_parameters", "_buffers", "_modules")
slots_of: Callable[[torch.nn.Module], tuple[Any, Any, Any]] = attrgetter(*SLOTS)
"""The fields with a module's own parameters, buffers and children, by which it is copied, put back
and shared with its wrapper; they include entries that are None. Gone:
`named_parameters(recurse=False)` and so on, which omit None and cannot be assigned to."""

NOT_SAVED = "_non_persistent_buffers_set"
"""The field with the names of buffers that no `state_dict` holds."""

COMPILED_CALL = "_compiled_call_impl"
"""The field for the code of `module.compile()`, which is specialized to the module's own tensors: a
copy gets None. Gone: a copy would run the original's code."""


def forward_hooks_of(module: torch.nn.Module) -> dict[int, Any]:
    """A module's forward hooks and pre-hooks, by their ids from a counter of the process.

    PyTorch has no public list of them.
    """
    return {**module._forward_hooks, **module._forward_pre_hooks}


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has a hook of any kind."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
"""The base class of all batch normalizations, SyncBatchNorm included. Gone: list the classes."""


class ModuleLike(torch.nn.Module):
    """A module that delegates conversions and loading to another one, `_own`.

    `to`, `half`, `cuda` call `_apply`, and a parent's `load_state_dict` calls
    `_load_from_state_dict`, which is documented for overriding. Gone: override those methods.
    """

    _own: torch.nn.Module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._own._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._own._load_from_state_dict(*args, **kwargs)


cached_weights: Callable[[], dict[Any, Any]] = partial(getattr, parametrize, "_cache")
caches_weights: Callable[[], int] = partial(getattr, parametrize, "_cache_enabled")
set_cached_weights: Callable[[Any], None] = partial(setattr, parametrize, "_cache")
"""The cache of `torch.nn.utils.parametrize.cached`, whose tensors belong to another graph; how many
of these contexts are open; and the cache's replacement. Gone: refuse recomputations there."""

# --- the process -------------------------------------------------------------------------------

device_set: Callable[[], Any] = partial(
    getattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", None
)
"""The context of `torch.set_default_device`, or None. Gone: `torch.get_default_device`, which
imports and searches at every call."""


def default_device() -> torch.device:
    """As `torch.get_default_device`, which fails in 2.8 after `torch.set_default_device(None)`."""
    context = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(context, "device_context", context) is None:
        del context.device_context
    return torch.get_default_device()


# --- dynamo, which is not imported until someone compiles ---------------------------------------

_compiler_of_frames = getattr(_c._dynamo.eval_frame, "get_eval_frame_callback", None)
"""What compiles Python's frames in this thread; None if nothing does. Gone: see `compiles_here`."""


def compiles_here() -> bool:
    """Whether dynamo would compile a function that is called here, as after a graph break.

    `torch.func` imports dynamo, so that it is loaded says little. Gone: that it is loaded.
    """
    return DYNAMO in sys.modules if _compiler_of_frames is None else bool(_compiler_of_frames())


DYNAMO = "torch._dynamo"
"""The compiler's module. Gone: use the module that `torch.compile` then imports."""


def break_graph(reason: str) -> None:
    """Causes a graph break in dynamo, with a reason for its logs.

    Gone: call a function wrapped by `torch.compiler.disable`, without a reason.
    """
    sys.modules[DYNAMO].graph_break(msg=reason)


is_exporting: Callable[[], bool] = torch.compiler.is_exporting
"""Whether `torch.export` is tracing. Before PyTorch 2.12 dynamo assumes that the public function
returns True in everything that it compiles, so the flag is read instead."""
if torch.__version__ < "2.12":

    def is_exporting() -> bool:
        return torch.compiler._is_exporting_flag  # type: ignore[no-any-return]


def skip_module(name: str) -> None:
    """Makes dynamo skip the frames of a module; functions that it calls may be compiled."""
    from torch._dynamo import trace_rules

    trace_rules.add(name)


def skip_code(fun: Callable[..., Any]) -> None:
    """Makes dynamo compile a function only where it is inlined into another one.

    Gone: a graph break in it would resume inside of it.
    """
    from torch._dynamo.eval_frame import skip_code as skip

    skip(fun.__code__)


def marked_constant(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result` without importing dynamo. Gone: use that."""
    fun._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fun


# --- hacks that a maintainer of PyTorch would reject --------------------------------------------
#
# Each of these depends on stack frames, on the identity of a code object, or on a counter of the
# process, because PyTorch offers nothing else. Further hacks, each in one module, with benefit and
# cost:
#
# - Matching the texts of PyTorch's errors, for which it has no types (`known_errors`). Benefit:
#   messages that teach, and other kernels where one lacks a derivative. Cost: if upstream changes
#   the text, PyTorch's own error is raised.
# - Inspecting the instruction that raised an error (`code_origin`): a `raise` statement outside of
#   the framework is the user's, even with the same text. Benefit: a user's error is never mistaken
#   for PyTorch's. Cost: reading bytecode once an error was raised.
# - Patching classes for the time of a call (`thread_patches`). Benefit: calls that no mode sees are
#   intercepted. Cost: a check in each other thread's calls.
# - An import hook (`compiling`). Dynamo identifies marked functions by identity, and importing it
#   to mark them takes seconds. Cost: a comparison of names at each import until it is imported.
# - One registered operator (`host`), since compiled programs hold no Python objects. Cost: a name
#   in `torch.ops` for the lifetime of the process.
# - Reading the memory of CPython's generator (`randomness`), since copying its state takes longer
#   than a small layer. Cost: a test of the layout at import; if it fails, states are copied.
# - Removing the hooks of leaves during a second evaluation (`lazy_graphs`), so that they run once.
#   Cost: another thread's backward pass does not see them meanwhile.


def _package(frame: Any) -> str:
    """The package of a frame's code, by its module."""
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


def is_of_checkpoint(frame: Any) -> bool:
    """Whether a frame runs the code of `torch.utils.checkpoint`.

    Benefit: pictures mark recomputed operations. Cost: code that PyTorch moves out of that module
    is not marked.
    """
    return frame.f_globals is vars(torch.utils.checkpoint)


def is_summed_by_autograd(node: Any) -> bool:
    """Whether an addition is autograd's own accumulation of gradients, not code of a backward.

    Must be called in a dispatch mode. Its frames and those of gradtools are skipped, except for the
    backward of the node itself if it is one of ours.

    Benefit: pictures do not draw such a sum as a part of the preceding rule. Cost: they do if
    PyTorch renames `_engine_run_backward`.
    """
    if not isinstance(node, function.BackwardCFunction):
        return False
    backward = getattr(type(node).apply, "__code__", None)
    frame: Any = sys._getframe(2)  # of the caller's caller
    while _package(frame) == "gradtools" and frame.f_code is not backward:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


hooks_made: Callable[[], int] = partial(getattr, RemovableHandle, "next_id")
"""How many hooks of any kind this process has registered: the number of the next handle.

No mode intercepts `Node.register_hook`, or a bound method kept by a library. Benefit: hooks that f
sets on gradients run once, although chunks are recomputed. Cost: hooks that another thread sets
meanwhile count as f's, whose backward pass is then slower, but right."""


def collective_device(group: Any) -> torch.device:
    """The device of the tensors that the group's collectives send."""
    from torch.distributed.distributed_c10d import _get_object_coll_device  # importing it is slow

    return torch.device(_get_object_coll_device(group))
