"""Converts a jaxpr to a `Graph`.

Each equation becomes a node, and each variable becomes a value. The jaxprs of loops, branches and
calls become bodies. Links are differentiable between inexact arrays and cut otherwise, except as
documented here and in `gradtools/jax/reachability.py`. A custom rule replaces the derivative of its
function, so cuts inside of the function have no effect. An equation that writes to a mutable
reference assigns a new value to the reference.

The source line of a node is the innermost line of the user's code. JAX traces each of its own
jitted functions only once, so the equations of these functions are assigned the line of the current
call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from gradtools.code_origin import Source
from gradtools.jax import jaxprs, reachability
from gradtools.jax._upstream import Literal, scopes_of
from gradtools.jax.jaxprs import Eqn, Jaxpr, function_name, is_chunk
from gradtools.seeing.diagnostics.diagnosis import source_of
from gradtools.seeing.graphs.attributes import numbers_text
from gradtools.seeing.graphs.nodes import Body, Dependence, Links, Node, PlainGraph, Value
from gradtools.seeing.graphs.passes import CUSTOM, EDITED
from gradtools.seeing.jax import operands, source_lines

_NONE, _CUT, _ZERO, _FULL = Dependence
_REVERSE_ONLY = "gradtools_reverse_only"


def graph_of(
    closed_jaxpr: Jaxpr,
    names: Sequence[str] = (),
    captured: Mapping[int, str] = MappingProxyType({}),
) -> PlainGraph:
    """Converts a jaxpr to a graph.

    Args:
        closed_jaxpr: The result of ``jax.make_jaxpr(f)(*args)``.
        names: The names of the inputs of the jaxpr, such as "argument 0['w']".
        captured: Maps the ``id`` of a closed-over array to the name of the array.

    Returns:
        The graph. ``graph.captured`` contains the closed-over arrays and the literals. The name of
        a literal is its value.

    Example:
        >>> closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
        >>> [node.operation for node in graph_of(closed).nodes]
        ['sin', 'multiply']
    """
    consts = [captured.get(id(c)) or _text(c) for c in getattr(closed_jaxpr, "consts", ())]
    jaxpr = jaxprs.open_jaxpr(closed_jaxpr)
    return _JaxprReader().graph(jaxpr, _Place(), names, consts)


@dataclass(frozen=True)
class _Place:
    """The source line, modules and pass of a jaxpr.

    Attributes:
        site: The user's line that called a function of JAX; None inside of the user's functions.
        scope: The names of the modules around the jaxpr.
        phase: The number of transpositions around the jaxpr: 0 forward, 1 backward.
    """

    site: Source | None = None
    scope: tuple[str, ...] = ()
    phase: int = 0


class _JaxprReader:
    """Converts jaxprs to graphs; a jaxpr called several times from one line is converted once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Jaxpr, PlainGraph]] = {}  # keys contain ids of jaxprs
        self._flow = reachability.Flow(raw=False)

    def graph(
        self,
        jaxpr: Jaxpr,
        place: _Place,
        names: Sequence[str] = (),
        consts: Sequence[str] = (),
    ) -> PlainGraph:
        values = _JaxprValues()
        captured = [values.new(v, n) for v, n in zip_longest(jaxpr.constvars, consts, fillvalue="")]
        inputs = [values.new(v, n) for v, n in zip_longest(jaxpr.invars, names, fillvalue="")]
        nodes = tuple([self.node(eqn, values, place) for eqn in jaxpr.eqns])
        outputs = tuple([values.read(atom) for atom in jaxpr.outvars])
        held = (*captured, *values.literals)
        return PlainGraph(nodes, values.by_number, tuple(inputs), outputs, held)

    def node(self, eqn: Eqn, values: _JaxprValues, place: _Place) -> Node:
        here, inner = _inside(eqn, place), jaxprs.bodies(eqn)
        inputs = tuple(values.read(atom) for atom in eqn.invars)
        outputs = tuple(values.new(var) for var in jaxprs.targets(eqn))
        links = self.links(eqn, inner)
        rule = eqn.params["rule"] if _is_ours(eqn) else None
        user_functions = rule.user_functions if rule is not None else ()
        source = source_lines.source(eqn, place.site)
        if source is None and user_functions:  # JAX recorded no line of the call
            source = source_of(user_functions[-1])
        node = Node(
            **_described(eqn),
            inputs=inputs,
            outputs=outputs,
            source=source,
            scope=here.scope,
            phase=here.phase,
            links=links,
            loss=_loss(eqn, links),
            bodies=tuple(self.body_of(eqn, body, here) for body in inner),
        )
        return _in_places(eqn, node, values)

    def body_of(self, eqn: Eqn, body: Any, here: _Place) -> Body:
        site, own = here.site, source_lines.is_own(body.jaxpr)
        if own is not None:
            site = source_lines.source(eqn, site) if own else None
        place = replace(here, site=site)
        key = id(body.jaxpr), place
        if key not in self._known:
            self._known[key] = body.jaxpr, self.graph(body.jaxpr, place)
        skippable = jaxprs.may_not_run(eqn)
        return Body(self._known[key][1], tuple(body.inputs), body.carries, body.gate, skippable)

    def links(self, eqn: Eqn, inner: Sequence[Any]) -> Links | None:
        """Computes the links of an equation; returns None if its bodies determine the links."""
        name = eqn.primitive.name
        if inner and not jaxprs.is_ruled(eqn):
            return None
        strength = _ZERO if name in _FLAT and _FLAT[name](eqn) else _FULL
        bits = [1 << i for i in range(len(eqn.invars))]
        smooth, data = (flow.step(eqn, bits) for flow in (self._flow, self._flow.uncut))
        inexact = [*map(jaxprs.is_inexact, eqn.invars)]
        used = [any(mask >> i & 1 for mask in data) for i in range(len(bits))]
        nothing = _CUT if _edit(eqn) else _NONE  # other inputs of an edit affect only the cotangent

        def link(k: int, i: int, target: Any) -> Dependence:
            if not data[k] >> i & 1:
                return _NONE if used[i] else nothing
            both = smooth[k] >> i & 1 and inexact[i] and jaxprs.is_inexact(target)
            return strength if both else _CUT

        targets = jaxprs.targets(eqn)
        return tuple(tuple(link(k, i, y) for i in range(len(bits))) for k, y in enumerate(targets))


class _JaxprValues:
    """The values of one jaxpr, and the index of each variable."""

    def __init__(self) -> None:
        self.by_number: dict[int, Value] = {}
        self.literals: list[int] = []
        self._numbers: dict[Any, int] = {}

    def new(self, var: Any, name: str = "") -> int:
        self._numbers[var] = number = len(self.by_number)
        self.by_number[number] = _value(var.aval, name)
        return number

    def read(self, atom: Any) -> int:
        if isinstance(atom, Literal):
            return self.literal(_value(atom.aval, _text(atom.val)))
        return self._numbers[atom]

    def literal(self, value: Value) -> int:
        """Adds a literal or static parameter; returns the index of the value."""
        number = len(self.by_number)
        self.by_number[number] = value
        self.literals.append(number)
        return number


def _value(aval: Any, name: str) -> Value:
    aval = getattr(aval, "inner_aval", aval)
    return Value(tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "")), name)


def _text(value: Any) -> str:
    """Formats the contents of a small array, for use as the name of a constant."""
    if isinstance(value, jax.core.Tracer | jax.Ref):
        return ""
    dtype = getattr(value, "dtype", None)
    known = dtype is None or isinstance(dtype, np.dtype)  # random keys have no printable contents
    return numbers_text(np.shape(value), lambda: np.asarray(value).tolist()) if known else ""


def _in_places(eqn: Eqn, node: Node, values: _JaxprValues) -> Node:
    """Returns the node with operands in the neutral order, including static exponents."""
    order, numbers = operands.operands_of(eqn)
    more = [values.literal(Value((), "int32", str(n))) for n in numbers]
    inputs = (*(node.inputs[i] for i in order), *more)
    links = node.links and tuple(
        (*(row[i] for i in order), *[_CUT for _ in more]) for row in node.links
    )
    return replace(node, inputs=inputs, links=links)


# --- names -------------------------------------------------------------------------------


def _described(eqn: Eqn) -> dict[str, Any]:
    """Returns the operation, native name, attributes and mark of an equation's node.

    The attribute "name" of a custom rule is the name of its function or gradtools rule. If the
    function belongs to a library, the operation also has the name of the function.
    """
    name, inner = eqn.primitive.name, [*jaxprs.sub_jaxprs(eqn.params)]
    native = name
    if _is_ours(eqn):
        rule = eqn.params["rule"]
        operation = "scale_gradient" if rule.name == "scale_gradient" else "custom_rule"
        native = rule.name if name in ("gradtools_primal", "gradtools_value") else name
        attributes: dict[str, Any] = {"name": str(rule.name)}
        attributes |= {"bridged": True} if rule.is_bridged else {}
        mark = EDITED if rule.reaches == "identity" else CUSTOM
        mark = "frozen" if rule.name.startswith("frozen") else mark
    elif jaxprs.is_ruled(eqn):
        function = next(map(function_name, inner), "").lstrip("_") or name
        is_own = lambda x: source_lines.is_own(x) and not source_lines.is_gradtools(x)
        operation, mark, edit = "custom_rule", CUSTOM, _edit(eqn)
        if any(map(is_own, inner)):  # functions of JAX, flax, equinox or optax
            operation, mark = function, ""
        native, mark = edit or name, EDITED if edit else mark
        attributes = {"name": function}
    else:
        operation, attributes = operands.name_of(eqn), operands.attributes_of(eqn)
        mark = "checkpoint" if operation == "checkpoint" else ""
    if not _is_ours(eqn) and any(map(is_chunk, inner)):
        mark = "chunked"
    return {"operation": operation, "native": native, "attributes": attributes, "mark": mark}


def _is_ours(eqn: Eqn) -> bool:
    """Returns whether an equation is a gradtools rule.

    The name is tested because equations of custom_vmap also have a "rule" parameter.
    """
    return eqn.primitive.name.startswith("gradtools_") and "rule" in eqn.params


def _edit(eqn: Eqn) -> str:
    """Returns the name of the edit if the equation is a reverse-only gradient edit, otherwise "".

    All inputs except the edited value affect only the cotangent, so their links are cut.
    """
    if not jaxprs.is_ruled(eqn):
        return ""
    inner = (e for jaxpr in jaxprs.sub_jaxprs(eqn.params) for e in jaxpr.eqns)
    return next((e.params["name"] for e in inner if e.primitive.name == _REVERSE_ONLY), "")


# --- links -------------------------------------------------------------------------------

_STOPS = {
    "stop_gradient": "detached",
    "pure_callback": "left_framework",
    "io_callback": "left_framework",
}
_CASTS = ("convert_element_type", "bitcast_convert_type", "reduce_precision")
_FLAT: dict[str, Callable[[Eqn], bool]] = {
    **dict.fromkeys(("round", "floor", "ceil", "sign"), lambda eqn: True),
    "integer_pow": lambda eqn: eqn.params["y"] == 0,
}


def _loss(eqn: Eqn, links: Links | None) -> str | None:
    """Returns the kind of lost gradient if a link of an inexact input is not differentiable."""
    entering = [i for i, atom in enumerate(eqn.invars) if jaxprs.is_inexact(atom)]
    if links is None:
        loses = bool(entering) and not all(map(jaxprs.is_inexact, jaxprs.targets(eqn)))
    else:
        loses = any(row[i] < _FULL for row in links for i in entering)
    name = eqn.primitive.name
    if not loses:
        return None
    if name in _STOPS:
        return _STOPS[name]
    if name in _FLAT:
        return "zero_derivative"
    if name in _CASTS:
        return "integer_cast"
    if name.startswith("gradtools_") or _edit(eqn):
        is_edit = _edit(eqn) or (_is_ours(eqn) and eqn.params["rule"].reaches == "identity")
        return "edit" if is_edit else "rule"
    return "discrete"


# --- modules -----------------------------------------------------------------------------

_OURS = "gradtools_"  # prefix of gradtools' named scopes


def _inside(eqn: Eqn, place: _Place) -> _Place:
    """Returns the `_Place` of an equation's bodies, with modules from scopes or stack frames."""
    scopes, phase = [], 0
    for name, named in scopes_of(eqn):
        if named:
            scopes.append(name)
        elif name == "transpose":
            phase += 1
    result = tuple(name for name in scopes if not name.startswith(_OURS))
    if not result and not place.scope:
        result = source_lines.modules_around(eqn)
    return replace(place, scope=(*place.scope, *result), phase=place.phase + phase)
