"""Translates a JAX equation to a framework-neutral name, operands and attributes.

Attributes are the parameters that differ from their defaults. Neutral names are defined in
`seeing/formulas/words.py`; other primitives use their JAX names. Layouts, devices and shardings are
omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from string import ascii_lowercase
from typing import Any

import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax.jaxprs import Eqn
from gradtools.seeing.graphs.operation_names import RELATIONS, SHARED, by_native

Attributes = dict[str, Any]


def name_of(eqn: Eqn) -> str:
    """Returns the framework-neutral name of an equation's primitive."""
    name = eqn.primitive.name
    if name == "dot_general":
        return "matmul" if _is_matmul(eqn) else "einsum"
    if name == "select_n" and not _is_choice(eqn):
        return "select"
    return _NAMES.get(name, name)


def operands_of(eqn: Eqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the operands' positions in the neutral order, and a tuple of static exponents."""
    name = eqn.primitive.name
    if name == "select_n" and _is_choice(eqn):
        return (0, 2, 1), ()
    numbers = (int(eqn.params["y"]),) if name == "integer_pow" else ()
    return (1, 0, 2) if name == "clamp" else tuple(range(len(eqn.invars))), numbers


def attributes_of(eqn: Eqn) -> Attributes:
    """Returns the static parameters that are not jaxprs and differ from their defaults."""
    name = eqn.primitive.name
    form = _FORMS.get(name)
    if form is not None:
        attributes = form(eqn.params, eqn)
        return {key: _plain(value) for key, value in attributes.items() if value is not None}
    if name in _NAMED:
        result = {"name": eqn.params["name"]} if "name" in eqn.params else {}
    else:
        said = {key: value for key, value in eqn.params.items() if key not in _UNSAID}
        result = {_RENAMED.get(key, key): value for key, value in said.items()}
    is_program = lambda value: callable(value) or any(jaxprs.sub_jaxprs(value))
    plain = {key: _plain(value) for key, value in result.items() if not is_program(value)}
    return {key: value for key, value in plain.items() if value is not None and value is not False}


def _plain(value: Any) -> Any:
    """Converts an equation parameter to numbers, strings and tuples."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    value = value.item() if isinstance(value, np.generic) else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


# --- forms -------------------------------------------------------------------------------


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in values)


def _unless(usual: Attributes, **attributes: Any) -> Attributes:
    """Returns the attributes that differ from the default values in `usual`."""
    return {k: v for k, v in attributes.items() if k not in usual or v != usual[k]}


def _is_choice(eqn: Eqn) -> bool:
    return len(eqn.invars) == 3 and eqn.invars[0].aval.dtype == np.bool_


def _reduced(p: Any, eqn: Eqn) -> Attributes:
    axes = _ints(p["axes"])
    return {"axes": axes} if len(axes) < len(_shape(eqn.invars[0])) else {}


def _broadcast(p: Any, eqn: Eqn) -> Attributes:
    shape, axes = _ints(p["shape"]), _ints(p["broadcast_dimensions"])
    last = tuple(range(len(shape) - len(axes), len(shape)))
    return _unless({"axes": last}, shape=shape, axes=axes)


def _sliced(p: Any, eqn: Eqn) -> Attributes:
    start, limit = _ints(p["start_indices"]), _ints(p["limit_indices"])
    ones = (1,) * len(start)
    stride = _ints(p["strides"] or ones)
    return _unless({"stride": ones}, start=start, limit=limit, stride=stride)


def _is_matmul(eqn: Eqn) -> bool:
    """Returns whether a dot_general is equivalent to numpy.matmul with equal batch axes."""
    (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    a, b = len(_shape(eqn.invars[0])), len(_shape(eqn.invars[1]))
    batch = tuple(range(len(batch_left)))
    if tuple(batch_left) != batch or tuple(batch_right) != batch or not (a and b):
        return False
    contracted = _ints(left) == (a - 1,) and _ints(right) == (max(b - 2, 0),)
    if batch:
        return contracted and a == b == len(batch) + 2
    return contracted and b <= 2


def subscripts(eqn: Eqn) -> str:
    """Returns the einsum subscripts of a dot_general."""
    (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    names = iter(ascii_lowercase)
    first = [next(names) for _ in _shape(eqn.invars[0])]
    tied = dict(zip((*right, *batch_right), (*left, *batch_left), strict=True))
    second = [first[tied[i]] if i in tied else next(names) for i in range(eqn.invars[1].aval.ndim)]
    out = [first[i] for i in batch_left]
    out += [letter for i, letter in enumerate(first) if i not in (*left, *batch_left)]
    out += [letter for i, letter in enumerate(second) if i not in tied]
    return f"{''.join(first)},{''.join(second)}->{''.join(out)}"


def _convolved(p: Any, eqn: Eqn) -> Attributes:
    spatial = len(p["window_strides"])
    ones = (1,) * spatial
    return _unless(
        {"stride": ones, "padding": ((0, 0),) * spatial, "dilation": ones, "groups": 1},
        stride=_ints(p["window_strides"]),
        padding=tuple(_ints(pair) for pair in p["padding"]),
        dilation=_ints(p["rhs_dilation"]),
        groups=p["feature_group_count"],
    )


_RELATIONS = {"eq_to": "==", "lt_to": "<", "le_to": "<=", **RELATIONS}  # comparisons in sorts
_OF_SHAPES = "squeeze expand_dims".split()
_OF_AXES = "reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor".split()
_SCATTERS = ["scatter", *(f"scatter{s}{of}" for s in "-_" for of in "add sub mul min max".split())]
_BARE = "copy copy_p device_put pvary pbroadcast gradtools_reverse_only gather integer_pow".split()
_FORMS: Mapping[str, Callable[[Any, Eqn], Attributes]] = {
    **dict.fromkeys(_OF_AXES, _reduced),
    **dict.fromkeys((*_SCATTERS, *_BARE), lambda p, e: {}),
    **dict.fromkeys(_RELATIONS, lambda p, e: {"relation": _RELATIONS[e.primitive.name]}),
    **dict.fromkeys(_OF_SHAPES, lambda p, e: {"shape": _shape(e.outvars[0])}),
    "reshape": lambda p, e: {
        "shape": _shape(e.outvars[0]),
        "permutation": _ints(p["dimensions"] or ()) or None,  # transpose before the reshape
    },
    "broadcast_in_dim": _broadcast,
    "dot_general": lambda p, e: {} if _is_matmul(e) else {"subscripts": subscripts(e)},
    "conv_general_dilated": _convolved,
    "slice": _sliced,
    "rev": lambda p, e: {"axes": _ints(p["dimensions"])},
}
_RENAMED = {"dimension": "axis", "new_dtype": "dtype", "slice_sizes": "sizes"}
# Primitives with a single attribute, the parameter "name".
_NAMED = {*jaxprs.CALLS, *jaxprs.RULED, "while", "cond", "shard_map"} - {"composite"}
# Parameters that are not attributes: placement, precision, and data about inner jaxprs.
_UNSAID = """
accuracy sharding out_sharding out_dtype preferred_element_type precision weak_type dimensions rule
input_dtype index_dtype linear unroll debug_info in_tree out_tree ctx_mesh inline keep_unused
update_consts indices_are_sorted unique_indices is_stable _split_transpose backend num_consts
num_carry cond_nconsts body_nconsts symbolic_zeros
""".split()

_NAMES = SHARED | by_native("""
    identity        copy copy_p pvary pbroadcast device_put gradtools_reverse_only
    stop            stop_gradient
    bitwise_and     and
    bitwise_or      or
    bitwise_xor     xor
    bitwise_not     not
    sigmoid         logistic
    erfinv          erf_inv
    add             add_any
    power           integer_pow
    maximum         max
    minimum         min
    fmod            rem
    where           select_n
    sum             reduce_sum psum psum2 psum_invariant
    sum_pool        reduce_window_sum
    prod            reduce_prod
    max             reduce_max pmax
    min             reduce_min pmin
    max_pool        reduce_window_max
    min_pool        reduce_window_min
    unbind          unstack
    all             reduce_and
    any             reduce_or
    compare         eq_to lt_to le_to
    cast            convert_element_type reduce_precision
    broadcast       broadcast_in_dim
    reshape         squeeze expand_dims
    flip            rev
    scatter         scatter-mul scatter-min scatter-max scatter_mul
    scatter_add     scatter-add scatter-sub scatter_sub select_and_scatter_add
    topk            top_k
    logcumsumexp    cumlogsumexp
    update          dynamic_update_slice addupdate swap
    convolution     conv_general_dilated
    callback        pure_callback io_callback
    checkpoint      remat remat2
    call            jit pjit closed_call core_call xla_call
""")
