"""Every private name of PyTorch that gradtools uses, each with its reason; no other file uses any.

All other files import them from here (`tests/house/test_upstream.py` checks their source).
`tests/torch/test_upstream.py` tests the behaviour of each name, and that no public alternative
exists yet. Each entry says what it is for; "Gone:" says what to do once it no longer exists. All
exist in PyTorch 2.8 to 2.15 but where an entry names versions; upstream issues are named. An alias
costs nothing, a function costs a call, so names that are used at every operation are aliases.

No public alternative was found in any of these versions. Hacks that a maintainer of PyTorch would
reject, and for which there is no other way, are at the end, with benefit and cost.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, methodcaller
from types import FunctionType
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
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
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
# DispatchKey: which of an operator's kernels is the plain one. Gone: compare keys by their names.
# custom_function_call: what torch.func calls in the place of `Function.apply`, where a mode sees
#   it. Gone: Functions inside of torch.func are not seen; refuse them where a derivative is lost.
# temporarily_clear_interpreter_stack: code that runs outside of all of torch.func's levels, from
#   within them: what is sent to another process, a trial of a rule. Gone: refuse within levels.
# TracingContext, detect_fake_mode: whether a compiler looks on with tensors that have no numbers.
#   Gone: `torch.compiler.is_compiling` knows it of dynamo, not of what runs beneath.
# HigherOrderOperator, OpOverload, OpOverloadPacket: the classes of PyTorch's operators, which the
#   public decorators return. Gone: `type(torch.ops.aten.add)` and its like give them.
# pytree: the registry of containers that torch.func itself uses: what a user registers there with
#   `register_pytree_node` holds here. Gone: `torch.utils.pytree` (pytorch#65761, #175082).
# TorchDispatchMode: documented under this very name ("Extending PyTorch with Python").

disable_current_modes = _disable_current_modes
"""A block in which no dispatch mode sees what we do on our own account. Gone: a flag of the mode
that is asked in its `__torch_dispatch__`, as `gradient_graph` has; other modes see us then."""


class Watching(TorchDispatchMode):
    """A dispatch mode that does not import dynamo, an import slower than any code under the mode.

    It never runs inside of compiled code. Gone: dynamo's frames are below each call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


pytree = _pytree
tree_flatten, tree_unflatten = pytree.tree_flatten, pytree.tree_unflatten
tree_leaves, tree_map = pytree.tree_leaves, pytree.tree_map
tree_map_only = pytree.tree_map_only

# --- levels of torch.func ----------------------------------------------------------------------

peek_interpreter_stack: Callable[[], Any] = _functorch.peek_interpreter_stack
"""The innermost level of torch.func, None outside of all. Gone: nothing public tells; wrap a number
by `torch.func` and see. The first of these to be asked at every call, so a plain name."""

get_interpreter_stack: Callable[[], Any] = _functorch.get_interpreter_stack
"""All levels, outermost first: whether one differentiates, and how. Gone: as above."""

TransformType: Any = _functorch.TransformType
"""The kinds of levels: Grad, Jvp, Vmap, Functionalize."""

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor is of a level. `torch.func.debug_unwrap` could tell, by
`debug_unwrap(x, recurse=False) is not x`, which is slower, and for debugging by its own words."""

get_unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
"""The tensor beneath one level. Gone: `torch.func.debug_unwrap(x, recurse=False)`."""

unwrap_for_grad: Callable[[Tensor, int], Tensor] = _functorch._unwrap_for_grad
"""The tensor beneath one level of `torch.func.grad`, attached as it was outside: whether an operand
requires grad for the caller. Gone: attention under `torch.func` is pushed as if it did."""

maybe_get_level: Callable[[Tensor], int] = _functorch.maybe_get_level
"""A wrapper's level; -2 if the transform has ended: a pullback may still run on its wrappers."""

maybe_get_bdim: Callable[[Tensor], int] = _functorch.maybe_get_bdim
"""The axis that vmap hides, -1 if none: one example of a batch has the numbers for a trial."""

is_batchedtensor: Callable[[Tensor], bool] = _functorch.is_batchedtensor
is_gradtrackingtensor: Callable[[Tensor], bool] = _functorch.is_gradtrackingtensor
"""Which transform wrapped a tensor. Gone: by the kinds of levels, which are one for all tensors."""

is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of the vmap of before functorch, which autograd's own
`is_grads_batched` still uses. Gone: with that vmap."""

enter_vmap: Callable[[], int] = _c._vmapmode_increment_nesting
leave_vmap: Callable[[], int] = _c._vmapmode_decrement_nesting
"""Levels of that vmap: each gives the number that are open then. Counting is entering and leaving;
standing outside of them is leaving and entering. Gone: with that vmap."""

add_batch_axis: Callable[..., Tensor] = torch._add_batch_dim
remove_batch_axis: Callable[..., Tensor] = torch._remove_batch_dim
"""What that vmap wraps a tensor in. Gone: with it."""

# --- forward mode ------------------------------------------------------------------------------


forward_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
"""The level of forward mode that is open, -1 if none. Gone: `forward_ad.make_dual` raises outside
of a level."""


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
"""What `forward_ad.make_dual` loads at its first call. Gone: with `make_dual` below."""


make_dual: Callable[..., Tensor] = torch._make_dual
unpack_dual: Callable[..., Any] = torch._unpack_dual
"""`forward_ad.make_dual` and `unpack_dual` less their checks, at each operation of a pushforward
that frozen runs by its own table. Gone: the public ones, at twice the time."""

is_forward_mode_enabled: Callable[[], bool] = _c._is_fwd_grad_enabled
set_forward_mode_enabled: Callable[[bool], None] = _c._set_fwd_grad_enabled
forward_mode_enabled: Any = forward_ad._set_fwd_grad_enabled
"""Whether tangents are followed, and a block in which they are or are not: what is constant to f
must be constant to its tangent. Gone: detach each tensor instead."""

softmax_pullback: Callable[..., Tensor] = torch._softmax_backward_data
"""y (g - sum(g y)) in one kernel. Gone: by that formula, three kernels and a copy."""

fp32_precision: Any = getattr(_c, "_get_fp32_precision_getter", None)
"""How products of float32 are computed by a library and operation, which each use of a frozen
function asks several times; None before PyTorch 2.9. Gone: the attributes `fp32_precision` of
`torch.backends`, in Python."""

flag_getters: dict[str, Callable[[], Any]] = {
    "deterministic": _c._get_deterministic_algorithms,
    "warn only": _c._get_deterministic_algorithms_warn_only,
    "float32 products": _c._get_float32_matmul_precision,
    "flash": _c._get_flash_sdp_enabled,
    "lean": _c._get_mem_efficient_sdp_enabled,
    "plain": _c._get_math_sdp_enabled,
    "cudnn": _c._get_cudnn_sdp_enabled,
}
"""How flags are read that change numbers, which each use of a frozen function does several times.
Gone: the public functions of the same sense, in Python, of `torch` and `torch.backends.cuda`."""

is_any_autocast_enabled: Callable[[], bool] = _c._is_any_autocast_enabled
"""Whether anything may be cast. Gone: `torch.is_autocast_enabled(kind)` for each device in use."""

# --- autograd's engine and its graph -----------------------------------------------------------

set_grad_enabled: Callable[[bool], None] = _c._set_grad_enabled
"""What `torch.set_grad_enabled` calls, a class that costs three times as much; and what a mode sees
when f calls that. Gone: the class, and its `__init__` in modes."""

run_engine: Callable[..., tuple[Any, ...]] = torch.autograd.graph._engine_run_backward
engine: Callable[..., tuple[Any, ...]] = torch.autograd.Variable._execution_engine.run_backward
"""What `torch.autograd.grad` calls when it has looked at its arguments, which are ours and known:
a third of its time at a small function; and what that calls when it has noted the context, of which
compiled code alone asks, and whether each node is to be logged. Gone: `torch.autograd.grad`."""


current_graph_task: Callable[[], int] = _c._current_graph_task_id
"""Which call of the engine runs here, -1 if none: nodes of one pass share sums, others none.
Gone: a node's own pass is one, so sums are not shared between towers."""

will_run: Callable[[Any], bool] = _c._will_engine_execute_node
"""Whether the engine's present call comes to a node. Gone: as above."""

keeps_graph: Callable[[], bool] = _c._autograd._get_current_graph_task_keep_graph
"""Whether the pass that runs was given retain_graph. Gone: keep always, and say so."""

current_node: Callable[[], Any] = _c._current_autograd_node
"""The node whose backward runs: an operation of a backward pass is drawn with its line of the
forward pass. Gone: backward operations have no line."""

nodes_made: Callable[[], int] = _c._autograd._get_sequence_nr
"""How many nodes this thread has made: what is captured was made before. Gone: walk both graphs."""

saved_tensors_hooks_on: Callable[[bool], Any] = _c._autograd._top_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[..., None] = _c._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _c._autograd._pop_saved_tensors_default_hooks
"""The stack of hooks of saved tensors: a graph of our own that ends inside must not pass through
them. Gone: enter hooks that change nothing, in which torch.func refuses tiles."""

version_counter_kept: Any = _autograd._unsafe_preserve_version_counter
set_version_counters: Callable[..., None] = _c._autograd._unsafe_set_version_counter
"""A tensor that is put back to what it held counts as unchanged for the graphs that saved it.
`torch.autograd.graph.increment_version` is the public half. Gone: replay of a program whose state
moves is refused by autograd's own error."""

EnableTorchFunction: Any = _c._EnableTorchFunction
"""Modes act inside of the backward of a subclass, which switches them off. Gone: refuse them."""

DisableTorchFunction: Any = _c.DisableTorchFunction
"""A tensor is asked itself, and not what a mode puts in its place. Its sister for subclasses,
`torch._C.DisableTorchFunctionSubclass`, is documented. Gone: a flag in each of our modes."""

Functions: tuple[Any, ...] = (function._SingleLevelFunction,)
"""The classes whose `apply` is replaced for the time of a call. In the base of
`torch.autograd.Function` a bound `Function.apply` meets it, too; from PyTorch 2.14 on that is a
function in C of its own, and so is Function's."""
if not isinstance(vars(torch.autograd.Function)["apply"], classmethod):
    Functions += (torch.autograd.Function,)

node_creation_hook: Any = getattr(_autograd.graph, "node_creation_hook", None)
"""A block that shows each node which is made, public from PyTorch 2.14 on: what was applied by a
bound `apply` there. None before, where `Functions` meets those."""

_checkpoint = vars(torch.utils.checkpoint)
checkpoint_passes: Callable[..., Any] = _checkpoint.get(
    "_checkpoint_without_reentrant_generator_impl",  # from PyTorch 2.14 on
    _checkpoint["_checkpoint_without_reentrant_generator"],
)
"""What `torch.utils.checkpoint` does before and after the first pass of a function: to keep
tangents as well. Gone: in forward mode refuse checkpoints, whose second pass would have none."""


def checkpoint_call(args: Any, kwargs: Any) -> tuple[Any, Any, Callable[..., Any]]:
    """Splits the arguments of a checkpoint call: the inputs, and a function to call with others.

    From PyTorch 2.14 on the inputs are a tuple and a dict, and options have names; before, options
    stand between the function and its inputs.
    """
    if checkpoint_passes.__name__.endswith("_impl"):
        return *args, lambda fun, *xs: checkpoint_passes(fun, xs, {}, **kwargs)
    count = checkpoint_passes.__code__.co_argcount - 1
    options, inputs = args[:count], args[count:]
    return inputs, kwargs, lambda fun, *xs: checkpoint_passes(fun, *options, *xs)


def bookkeeping() -> tuple[Any, ...]:
    """The Functions of DDP and FSDP2 that are identities with bookkeeping in the backward pass.

    Empty without distributed training. Gone: forward mode through them is refused.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ()
    functions = [vars(torch.nn.parallel.distributed)["_DDPSink"]]
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    return (*functions, *([] if fsdp is None else [fsdp.RegisterPostBackwardFunction]))


OPERATORS = "torch._ops"
"""The module whose submodules, one for each namespace, define the operators."""


def checkpoint_operator() -> Any:
    """The operator that dynamo takes `torch.utils.checkpoint` for. Gone: the graph breaks there."""
    module = sys.modules.get("torch._higher_order_ops.wrap")
    return None if module is None else module.tag_activation_checkpoint


def flex_attention_module() -> Any:
    """The module in which `flex_attention` rejects CPU operands that require grad, if imported.

    Gone: forward mode through it is refused on the CPU, as reverse mode is.
    """
    return sys.modules.get("torch.nn.attention.flex_attention")


def flex_operator() -> Any:
    """The operator that `flex_attention` calls, if imported. Gone: find it by name."""
    module = sys.modules.get("torch._higher_order_ops.flex_attention")
    return None if module is None else module.flex_attention


def gathers_parameters(hook: Any) -> bool:
    """Whether a hook on a layer's output is FSDP2's, which does not change the gradient.

    Gone: forward mode through FSDP2 is refused, as with any hook on a gradient.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    made = getattr(hook, "__func__", None)
    return fsdp is not None and made is not None and made is fsdp.FSDPState._pre_backward


_HANDLERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _redispatch(fun: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function from inside of its own ``__torch_function__``, without its check for modes.

    Modes still intercept its operations. A Python function checks by one of `_HANDLERS`, so a copy
    of it runs in which these return False; a higher-order operator dispatches to its kernel.
    """
    if isinstance(fun, HigherOrderOperator):
        keys = torch._ops._compute_keyset(args, kwargs, fun.non_fallthrough_keys)  # type: ignore[arg-type]
        return fun.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)
    looks = [name for name in _HANDLERS if name in fun.__code__.co_names]
    if not all(name in fun.__globals__ for name in looks):  # as `torch.overrides.has_...`
        with _c.DisableTorchFunction():
            return fun(*args, **kwargs)
    scope = {**fun.__globals__, **dict.fromkeys(looks, lambda *args: False)}
    copy = FunctionType(fun.__code__, scope, fun.__name__, fun.__defaults__, fun.__closure__)
    copy.__kwdefaults__ = fun.__kwdefaults__
    return copy(*args, **kwargs)


redispatch_function: Callable[..., Any] = getattr(
    torch.overrides, "redispatch_function", _redispatch
)
"""Public from PyTorch 2.13 on."""


def size_hint(n: Any, fallback: int) -> int:
    """The example value of a symbolic size. `hint_int` before 2.12."""
    from torch.fx.experimental import symbolic_shapes

    hint = getattr(symbolic_shapes, "optimization_hint", None) or vars(symbolic_shapes)["hint_int"]
    return int(hint(n, fallback=fallback))


linear_cross_entropy: Any = getattr(torch.nn.functional, "linear_cross_entropy", None)
"""The loss without all logits, from PyTorch 2.13 on; None before."""

function_modes: Callable[[], Sequence[Any]] = torch.overrides._get_current_function_mode_stack
count_of_function_modes: Callable[[], int] = _c._len_torch_function_stack
count_of_dispatch_modes: Callable[[], int] = _c._len_torch_dispatch_stack
"""The modes that look on. Gone: assume that some do, and take the slow way."""


def is_traced_by_make_fx() -> bool:
    """Whether `make_fx` is tracing, where values are unknown. Gone: assume that it is not."""
    return _c._get_dispatch_mode(_c._TorchDispatchModeKey.PROXY) is not None


is_dispatch_key_excluded: Callable[[Any], bool] = _c._dispatch_tls_is_dispatch_key_excluded
has_kernel_for: Callable[[str, str], bool] = _c._dispatch_has_kernel_for_dispatch_key
"""Whether we stand beneath autograd, as in a `__torch_dispatch__`; whether an operator has a kernel
of its own. Gone: the latter is `OpOverload.has_kernel_for_dispatch_key`."""


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
"""The class of the nodes at which a graph ends in a leaf. Gone: its name."""


sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""When a node was made, as `nodes_made` counts. Gone: walk both graphs."""


def factors_of(node: Any) -> list[Any]:
    """The operands that a product's or quotient's node saved, packed if hooks did so.

    Gone: a factor of detached values is not compared.
    """
    saved = (getattr(node, f"_raw_saved_{name}", None) for name in ("self", "other"))
    return [getattr(x, "data", None) for x in saved]


def forward_class(kind: Any) -> Any:
    """The `torch.autograd.Function` of a class of nodes. Gone: use its name."""
    return users_class(kind._forward_cls)


def users_class(function: Any) -> Any:
    """The user's `torch.autograd.Function` behind the class that vmap generates from it.

    Gone: a Function under vmap whose derivative is differentiated again is refused.
    """
    while function.__module__ == "torch._functorch.autograd_function":
        made_by = function.forward
        names = dict(zip(made_by.__code__.co_freevars, made_by.__closure__, strict=True))
        function = names["autograd_function"].cell_contents
    return function


backward_class: Callable[[Any], Any] = attrgetter("_backward_cls")
"""The class of the nodes that a `torch.autograd.Function` makes. Gone: `type(y.grad_fn)`."""


def saves(node: Any, name: str) -> bool:
    """Whether a node of the graph has a saved value of this name."""
    return hasattr(node, f"_saved_{name}")


def saved(node: Any, name: str, *default: Any) -> Any:
    """A saved value of a node: documented ("Autograd mechanics"), though with an underscore.

    Gone: operations with wrong gradients are refused instead of corrected.
    """
    return getattr(node, f"_saved_{name}", *default)


def described(node: Any) -> Sequence[Any]:
    """The shape, dtype and device of each output of a node.

    Gone: they are not reported; hooks on nodes are not tested, and a derivative through them is
    refused.
    """
    described: Sequence[Any] = getattr(node, "_input_metadata", ())
    return described


# --- tensors -----------------------------------------------------------------------------------


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often x was written in place. `Tensor._version` is documented, and has no public name. Gone:
compare contents, where today a count is compared."""


is_zero: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
"""Whether x is a zero without memory, as forward mode and double backward make. Gone: clone."""


is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd follows x as a view of another tensor. Gone: copy what a rule returns."""

tensor_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks that edit x's gradient; None if there was never one. They fire once, on the sum over
chunks, so a replay takes them away from the leaves and puts them back. Gone: a hook would fire for
each chunk; refuse leaves with hooks."""

tracing_state: Callable[[], Any] = _c._get_tracing_state
"""What `torch.jit.is_tracing` asks: TorchScript does not trace a hook."""


def set_tensor_hooks(x: Tensor, hooks: Any) -> None:
    """Restores a tensor's hooks attribute to None after our hook: only None can be pickled."""
    x._backward_hooks = hooks


def owners_of_memory(x: Tensor) -> int:
    """The reference count of x's storage, which may be donated if it is one. Gone: copy."""
    return int(_c._storage_Use_Count(x.untyped_storage()._cdata))


def fake_tensors(**options: Any) -> Any:
    """A `FakeTensorMode`: operations compute shapes only. Its import takes a second.

    Gone: tensors on the meta device, which lose their device.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


def is_fake(x: Tensor) -> bool:
    """Whether a tensor is a fake tensor. Gone: `detect_fake_mode`."""
    from torch._subclasses import fake_tensor

    return bool(fake_tensor.is_fake(x))


is_alias_of: Callable[[Tensor, Tensor], bool] = _c._is_alias_of
"""Whether two tensors share a storage. Gone: compare `untyped_storage()`, which wrappers refuse."""


add_each_: Any = torch._foreach_add_
multiply_each: Any = torch._foreach_mul
divide_each: Any = torch._foreach_div
divide_each_: Any = torch._foreach_div_
"""One operation for many tensors. Gone: a loop over them."""


def clone_each(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """A clone of each tensor, by one foreach operation for plain tensors if PyTorch has it."""
    if all(type(x) is Tensor and x.layout is torch.strided for x in xs):
        clone = getattr(torch, "_foreach_clone", None)
        if clone and xs:
            return tuple(clone(xs))
    return [x.clone() for x in xs]


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


indices_of: Callable[[Tensor], Tensor] = methodcaller("_indices")
values_of: Callable[[Tensor], Tensor] = methodcaller("_values")
"""Those of a sparse tensor that need not be coalesced. Gone: coalesce first."""

# --- operators ---------------------------------------------------------------------------------

arguments_of: Callable[[Any], Sequence[Any]] = attrgetter("_schema.arguments")
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's schema; its arguments, with which of them it writes to. Gone: parse
`str(operator)`."""


def decompositions() -> Any:
    """PyTorch's own decompositions of operators; the import takes a second. Gone: do without."""
    from torch._decomp import decomposition_table

    return decomposition_table


# --- modules -----------------------------------------------------------------------------------


SLOTS = ("_parameters", "_buffers", "_modules")
"""The fields of a module that hold its parameters, buffers and children, as `slots_of`.
A module is copied, put back, and shared with its wrapper by them. Gone: by their new names."""

NOT_SAVED = "_non_persistent_buffers_set"
"""The field with the names of buffers that no `state_dict` holds."""


COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` puts its code, which is for that module's own tensors: a copy gets None
in its place. Gone: a copy then runs the original's code."""

slots_of: Callable[[torch.nn.Module], tuple[Any, Any, Any]] = attrgetter(*SLOTS)
"""A module's own parameters, buffers and children, with those that are None.
`named_parameters(recurse=False)` leaves None out, and cannot be assigned to. Gone: those."""


def forward_hooks_of(module: torch.nn.Module) -> list[Any]:
    """A module's forward hooks and pre-hooks. PyTorch has no public list of them."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def forward_hook_numbers(module: torch.nn.Module) -> list[int]:
    """The ids of a module's forward hooks, from a counter of the process."""
    return [*module._forward_hooks, *module._forward_pre_hooks]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has a hook of any kind."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has a hook that may edit gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def takes_whole_gradients(module: torch.nn.Module) -> bool:
    """Whether a module's backward hooks are full backward hooks, not the deprecated kind."""
    return module._is_full_backward_hook is not False


BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
"""What all batch normalisations are, those over processes too. Gone: list the public classes."""


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
"""What `torch.nn.utils.parametrize.cached` keeps, and how many of its blocks are open. Gone: as
below."""


def set_cached_weights(kept: dict[Any, Any]) -> None:
    """Replaces the parametrization cache: its tensors are in another graph. Gone: refuse."""
    parametrize._cache = kept  # type: ignore[assignment]


# --- the process -------------------------------------------------------------------------------


device_set: Callable[[], Any] = partial(
    getattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", None
)
"""The block of `torch.set_default_device`, None if none was set. `torch.get_default_device` imports
and searches at every call. Gone: that."""


def default_device() -> torch.device:
    """PyTorch's, without a failure of 2.8 after `torch.set_default_device(None)`. Gone: that."""
    context = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(context, "device_context", context) is None:
        del context.device_context
    return torch.get_default_device()


def operator_tables(name: str) -> Any:
    """A table of PyTorch's own tests (OpInfo), for the sweeps. Needs the packages of the tests."""
    from importlib import import_module

    return import_module(f"torch.testing._internal.{name}")


# --- dynamo, which is not imported until someone compiles ---------------------------------------

DYNAMO = "torch._dynamo"
"""The compiler's own module. Gone: hold what `torch.compile` imports then."""


def dynamo_is_loaded() -> bool:
    """Whether dynamo is imported; its import takes longer than that of the rest of PyTorch."""
    return DYNAMO in sys.modules


def break_graph(reason: str) -> None:
    """Causes a graph break in dynamo, with a reason for its logs.

    Gone: call a function wrapped by `torch.compiler.disable`, without a reason.
    """
    sys.modules[DYNAMO].graph_break(msg=reason)


COMPILED_CODE = "torch._functorch."
"""The modules whose Functions hold compiled code: their backward is no code of a user's."""


saved_views_are_detached: bool = torch.__version__ < "2.13"
"""Whether compiled code saves an input that is a view without its graph, so that a second
derivative is lost. No name tells; seen in 2.8 to 2.12.
"""


is_exporting: Callable[[], bool] = torch.compiler.is_exporting
"""Whether `torch.export` traces. Before PyTorch 2.12 dynamo takes the public function for true in
all that it compiles, so its flag is read there."""
if torch.__version__ < "2.12":

    def is_exporting() -> bool:
        return torch.compiler._is_exporting_flag  # type: ignore[no-any-return]


def skip_module(name: str) -> None:
    """Makes dynamo skip the frames of a module; functions that it calls may be compiled."""
    from torch._dynamo import trace_rules

    trace_rules.add(name)


def skip_code(fun: Callable[..., Any]) -> None:
    """A function is compiled only where it is inlined into another.

    Gone: its code may break the graph, and go on as if it were traced.
    """
    from torch._dynamo.eval_frame import skip_code as skip

    skip(fun.__code__)


def marked_constant(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result` without importing dynamo. Gone: use that."""
    fun._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fun


def is_compiled(f: Any) -> bool:
    """Whether f was returned by torch.compile. There is no public way to tell."""
    return hasattr(f, "_torchdynamo_orig_callable") or type(f).__name__ == "OptimizedModule"


# --- what a maintainer of PyTorch would refuse --------------------------------------------------
#
# Each of these depends on stack frames, on the identity of a code object, or on a counter of the
# process, because PyTorch offers nothing else. Further hacks, each in one module, with benefit
# ("buys") and cost:
#
# - Texts of PyTorch's errors, for which it has no types (`known_errors`). Buys words that
#   say what to do, and another way where a kernel lacks a derivative. Costs: reworded upstream,
#   PyTorch's own error is raised in their place.
# - The instruction at which an error was made (`code_origin`): a `raise` statement outside of the
#   framework is the user's, whose words may be the same. Buys that a user's error is never taken
#   for PyTorch's. Costs a look at bytecode where an error is under way.
# - Classes that are patched for the time of a call (`patches`). Buys calls that no mode sees. Costs
#   each thread's call of them a look at whether it is meant.
# - An import hook (`compiling`). Dynamo takes marks by identity, and importing it to set them takes
#   seconds. Costs each import until dynamo is there one comparison of names.
# - One operator of ours, registered for the process (`host`): a compiled program holds no Python
#   objects. Costs a name in `torch.ops` that is there as long as the process.
# - CPython's generator, read in memory (`randomness`): to copy its state takes longer than a small
#   layer. Costs a test of the layout at import; where it fails, states are copied.
# - Hooks of leaves, taken away while chunks are computed again (`replay`): they fire once, on the
#   sum. Costs that another thread's pass does not see them meanwhile.


def is_frameworks_own_question(depth: int) -> bool:
    """Whether PyTorch or gradtools made the intercepted call, `depth` frames above the caller's.

    In forward mode `x.requires_grad` is True for a tensor with a tangent if the user reads it, as
    in reverse mode; PyTorch's own Python code must read the true value, or it takes other branches.
    Buys: f that branches on it is differentiated as in reverse mode. Costs: a frame for each such
    read in a pushforward, 0.3 us; a library that reads it for PyTorch is taken for the user.
    """
    return _package(_asker(depth + 1)) in ("torch", "gradtools")


def is_leaving_a_block(depth: int) -> bool:
    """Whether a context manager such as no_grad restores the gradient mode on exit.

    A mode intercepts the same call if f enables gradients because it needs them. Buys that the exit
    of `with torch.no_grad()` in f does not enable a graph, which doubles the time. Costs that a
    context manager of another package counts as f's own request: slower, and right.
    """
    frame = _asker(depth + 1)
    if frame.f_code is torch.set_grad_enabled.__init__.__code__:
        frame = frame.f_back
    return frame.f_code.co_name == "__exit__" and _package(frame) in ("torch", "gradtools")


def _asker(depth: int) -> Any:
    """The frame of the intercepted call."""
    frame: Any = sys._getframe(depth + 1)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _package(frame: Any) -> str:
    """The package of a frame's code, by its module."""
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


def is_of_checkpoint(frame: Any) -> bool:
    """Whether a frame runs the code of `torch.utils.checkpoint`.

    Buys that pictures mark recomputed operations; nothing else shows that a call runs inside of a
    checkpoint. Costs that code which PyTorch moves out of that module is not marked.
    """
    return frame.f_globals is vars(torch.utils.checkpoint)


def is_summed_by_autograd(node: Any) -> bool:
    """Whether an addition is autograd's own accumulation of gradients, not code of a backward.

    Must be called in a dispatch mode. Its frames and those of gradtools are skipped, except for the
    backward of the node itself if it is one of ours.

    Buys that pictures do not draw such a sum as a part of the rule before it; costs that they do if
    PyTorch renames `_engine_run_backward`.
    """
    if not isinstance(node, function.BackwardCFunction):
        return False
    backward = getattr(type(node).apply, "__code__", None)
    frame: Any = sys._getframe(2)  # below who asks
    while _package(frame) == "gradtools" and frame.f_code is not backward:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


hooks_made: Callable[[], int] = partial(getattr, RemovableHandle, "next_id")
"""How many hooks of any kind this process has set: the number that the next handle gets.

No mode sees `Node.register_hook`, nor what a library keeps bound. Buys that hooks which f sets on
gradients fire once, though chunks are computed again; costs that those which another thread sets
meanwhile are taken for f's, which then goes back in a way that is slower, and right."""


def is_once_differentiable(kind: Any) -> bool:
    """Whether the backward of a node's Function is decorated with `once_differentiable`.

    The decorator's wrapper has no name of its own, so its code object is compared. Buys an error
    before a chunk is recomputed in vain; costs that another wrapper around it hides the decorator.
    """
    backward = getattr(forward_class(kind), "backward", None)
    return getattr(backward, "__code__", None) is _ONCE


_ONCE = function.once_differentiable(lambda ctx: None).__code__
