"""What is refused, and in which words: the operator, the argument, what came, the mend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from derivative_table import lift

from gradtools import GradtoolsError


@dataclass(frozen=True)
class Bad:
    """A call that must raise a `GradtoolsError` whose text matches every pattern."""

    name: str
    call: Callable[[Any, Any], Any]  # (gt, array maker)
    says: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def total(gt: Any) -> Callable[[Any], Any]:
    return lambda x: gt.xp.sum(x * x)


V = np.array([1.0, 2.0])
S = np.array(3.0)
N = np.array([1, 2])
F32 = np.array([1.0, 2.0], np.float32)

BAD = (
    # what is differentiated
    Bad(
        "integer array",
        lambda gt, a: gt.grad(total(gt))(a(N)),
        (r"^grad: argument 0 is an array of dtype int64 and shape \(2,\)", "Cast it"),
    ),
    Bad(
        "integer leaf in a dict",
        lambda gt, a: gt.grad(lambda p: p["x"])({"x": a(S), "n": a(N)}),
        (r"^grad: argument 0\['n'\] is an array of dtype int64", "floating or complex"),
    ),
    Bad(
        "integer leaf, nested",
        lambda gt, a: gt.value_and_grad(lambda y, p: y, argnums=(0, 1))(a(S), {"k": [a(S), a(N)]}),
        (r"^value_and_grad: argument 1\['k'\]\[1\] is",),
    ),
    Bad("boolean array", lambda gt, a: gt.grad(total(gt))(a(N > 1)), ("dtype bool",)),
    Bad(
        "Python integer", lambda gt, a: gt.grad(lambda x: x)(3), ("argument 0 is the Python int 3",)
    ),
    Bad("Python boolean", lambda gt, a: gt.grad(lambda x: x)(True), ("the Python bool True",)),
    Bad(
        "string",
        lambda gt, a: gt.grad(lambda x, s: x, (0, 1))(a(S), "adam"),
        ("argument 1 is an object of type str", "argnums does not name"),
    ),
    Bad(
        "object",
        lambda gt, a: gt.grad(lambda x: x)(object()),
        ("argument 0 is an object of type object",),
    ),
    Bad("function", lambda gt, a: gt.grad(lambda x: x)(len), ("type builtin_function_or_method",)),
    Bad("NumPy integers", lambda gt, a: gt.grad(total(gt))(N), ("dtype int64", r"shape \(2,\)")),
    Bad(
        "integer to vjp",
        lambda gt, a: gt.vjp(lambda x, y: x, a(S), a(N)),
        (r"^vjp: argument 1 is",),
    ),
    Bad(
        "integer to jvp",
        lambda gt, a: gt.jvp(lambda x: x, (a(N),), (a(N),)),
        (r"^jvp: argument 0 is",),
    ),
    Bad(
        "integer to linearize",
        lambda gt, a: gt.linearize(lambda x: x, a(N)),
        (r"^linearize: argument 0",),
    ),
    Bad(
        "integer to hvp", lambda gt, a: gt.hvp(total(gt), (a(N),), (a(N),)), (r"^hvp: argument 0",)
    ),
    Bad(
        "integer to jacobian",
        lambda gt, a: gt.jacobian(lambda x: x)(a(N)),
        (r"^jacobian: argument 0",),
    ),
    Bad(
        "integer to hessian", lambda gt, a: gt.hessian(total(gt))(a(N)), (r"^hessian: argument 0",)
    ),
    Bad(
        "integer to per_example_grad",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(np.array(2)), a(V)),
        (r"^per_example_grad: argument 0 is",),
    ),
    Bad(
        "integer to minimax",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: x * y, 0, 1)(a(S), a(np.array(2))),
        (r"^minimax_value_and_grad: argument 1",),
    ),
    Bad(
        "complex to jacobian",
        lambda gt, a: gt.jacobian(lambda z: z)({"z": a(V + 1j)}),
        (
            r"^jacobian: argument 0\['z'\] is complex \(complex128\)",
            "two real arrays",
            "hvp, jvp or vjp",
        ),
    ),
    Bad(
        "complex to hessian",
        lambda gt, a: gt.hessian(lambda z: gt.xp.sum(gt.xp.abs(z)))(a(V + 1j)),
        (r"^hessian: argument 0 is complex", "real-linear"),
    ),
    # what f returns
    Bad(
        "vector output",
        lambda gt, a: gt.grad(lambda x: x * x)(a(V)),
        (
            r"^grad: f must return one real number",
            r"got an array of shape \(2,\) and dtype float64",
            r"\.sum\(\) or \.mean\(\)",
        ),
    ),
    Bad(
        "one-element vector",
        lambda gt, a: gt.grad(lambda x: x[:1])(a(V)),
        (r"shape \(1,\)", "Reduce it"),
    ),
    Bad(
        "complex output",
        lambda gt, a: gt.grad(lambda z: gt.xp.sum(z))(a(V + 1j)),
        (r"an array of shape \(\) and dtype complex128", "real part"),
    ),
    Bad(
        "integer output",
        lambda gt, a: gt.grad(lambda x: gt.xp.argmax(x))(a(V)),
        ("dtype int64", "Keep it floating"),
    ),
    Bad(
        "boolean output",
        lambda gt, a: gt.grad(lambda x: x[0] > 1)(a(V)),
        ("dtype bool", "Keep it floating"),
    ),
    Bad(
        "None",
        lambda gt, a: gt.grad(lambda x: None)(a(V)),
        (r"^grad: f must return one real number", "got None"),
    ),
    Bad(
        "tuple output",
        lambda gt, a: gt.grad(lambda x: (x[0], x))(a(V)),
        ("got a tuple of 2", "has_aux=True"),
    ),
    Bad(
        "dict output",
        lambda gt, a: gt.value_and_grad(lambda x: {"loss": x[0]})(a(V)),
        (r"^value_and_grad:", "got a dict of 1"),
    ),
    Bad("empty tuple", lambda gt, a: gt.grad(lambda x: ())(a(V)), ("got a tuple of 0",)),
    Bad(
        "string output",
        lambda gt, a: gt.vjp(lambda x: "done", a(V)),
        (r"^vjp: f returned a str at output", "Return arrays"),
    ),
    Bad(
        "object in the output",
        lambda gt, a: gt.jvp(lambda x: {"m": object()}, (a(V),), (a(V),)),
        (r"^jvp: f returned an object at output\['m'\]", "has_aux"),
    ),
    Bad(
        "vector output of hvp",
        lambda gt, a: gt.hvp(lambda x: x, (a(V),), (a(V),)),
        (r"^hvp: f must return one real number",),
    ),
    Bad(
        "vector output of hessian",
        lambda gt, a: gt.hessian(lambda x: x)(a(V)),
        (r"^hessian: f must return one real number",),
    ),
    Bad(
        "vector output of one example",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(V), a(V)),
        (r"^per_example_grad: f must return one real number",),
    ),
    Bad(
        "integer output of hvp",
        lambda gt, a: gt.hvp(lambda x: gt.xp.argmax(x), (a(V),), (a(V),)),
        ("Keep it floating",),
    ),
    Bad(
        "no pair with has_aux",
        lambda gt, a: gt.grad(total(gt), has_aux=True)(a(V)),
        (r"^grad: with has_aux=True f must return a pair", r"got an array of shape \(\)"),
    ),
    Bad(
        "three results with has_aux",
        lambda gt, a: gt.vjp(lambda x: (x, x, x), a(V), has_aux=True),
        (r"^vjp: with has_aux=True", "got a tuple of 3"),
    ),
    Bad(
        "a list with has_aux",
        lambda gt, a: gt.jvp(lambda x: [x, x], (a(V),), (a(V),), has_aux=True),
        ("got a list of 2",),
    ),
    # argnums
    Bad(
        "argnums too large",
        lambda gt, a: gt.grad(total(gt), argnums=1)(a(V)),
        (
            r"^grad: argnums holds 1, but f was called with 1 positional",
            "Keyword arguments are not",
        ),
    ),
    Bad(
        "argnums too negative",
        lambda gt, a: gt.grad(total(gt), argnums=-2)(a(V)),
        ("argnums holds -2",),
    ),
    Bad(
        "argnums twice",
        lambda gt, a: gt.grad(lambda x, y: x, argnums=(1, -1))(a(S), a(S)),
        (r"argnums \(1, -1\) names an argument twice",),
    ),
    Bad("argnums empty", lambda gt, a: gt.grad(total(gt), argnums=())(a(V)), ("argnums is empty",)),
    Bad(
        "argnums boolean",
        lambda gt, a: gt.grad(total(gt), argnums=True)(a(V)),
        ("argnums must hold integers, got True",),
    ),
    Bad("argnums a name", lambda gt, a: gt.grad(total(gt), argnums="x")(a(V)), ("got 'x'",)),
    Bad(
        "argnums a float",
        lambda gt, a: gt.jacobian(total(gt), argnums=(0.0,))(a(V)),
        (r"^jacobian:", "got 0.0"),
    ),
    Bad(
        "only keywords",
        lambda gt, a: gt.grad(lambda *, x: x)(x=a(S)),
        ("called with no positional argument",),
    ),
    Bad(
        "a player on both sides",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: x, (0, 1), 1)(a(S), a(S)),
        (r"^minimax_value_and_grad: .*twice",),
    ),
    # tangents and cotangents
    Bad(
        "tangents no tuple",
        lambda gt, a: gt.jvp(total(gt), (a(V),), a(V)),
        (r"^jvp: tangents must be a tuple", r"write \(x,\)"),
    ),
    Bad(
        "primals no tuple",
        lambda gt, a: gt.hvp(total(gt), a(V), (a(V),)),
        (r"^hvp: primals must be a tuple",),
    ),
    Bad(
        "one tangent too few",
        lambda gt, a: gt.jvp(lambda x, y: x, (a(V), a(V)), (a(V),)),
        ("got 2 primals and 1 tangents",),
    ),
    Bad("no primals", lambda gt, a: gt.jvp(lambda: 1.0, (), ()), ("at least one",)),
    Bad("no primals to vjp", lambda gt, a: gt.vjp(lambda: 1.0), (r"^vjp: no primals were given",)),
    Bad(
        "no primals to linearize",
        lambda gt, a: gt.linearize(lambda: 1.0),
        (r"^linearize: no primals",),
    ),
    Bad(
        "tangent of another structure",
        lambda gt, a: gt.jvp(lambda p: p["x"], ({"x": a(V)},), ({"y": a(V)},)),
        (
            r"^jvp: tangent 0 has the structure .*\{'y': \*\}",
            r"expected that of argument 0, .*\{'x': \*\}",
        ),
    ),
    Bad(
        "tangent of another shape",
        lambda gt, a: gt.jvp(lambda p: p["x"], ({"x": a(V)},), ({"x": a(S)},)),
        (
            r"^jvp: tangent 0\['x'\] has shape \(\) and dtype float64, expected \(2,\) and float64",
            r"argument 0\['x'\]",
            "Reshape or cast",
        ),
    ),
    Bad(
        "tangent of another dtype",
        lambda gt, a: gt.hvp(total(gt), (a(V),), (a(F32),)),
        (r"^hvp: tangent 0 has shape \(2,\) and dtype float32, expected \(2,\) and float64",),
    ),
    Bad("integer tangent", lambda gt, a: gt.jvp(total(gt), (a(V),), (a(N),)), ("dtype int64",)),
    Bad(
        "complex tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), (a(V + 1j),)),
        ("dtype complex128",),
    ),
    Bad(
        "complex Python tangent",
        lambda gt, a: gt.jvp(lambda x: x * x, (a(S),), (1j,)),
        (r"^jvp: tangent 0", "complex"),
    ),
    Bad(
        "string tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), ("x",)),
        (r"tangent 0 is a str, expected an array of shape",),
    ),
    Bad(
        "None as tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), (None,)),
        (r"tangent 0 is None, expected an array of shape",),
    ),
    Bad(
        "pushforward of another shape",
        lambda gt, a: gt.linearize(total(gt), a(V))[1](a(S)),
        (r"^linearize: tangent 0 has shape \(\)",),
    ),
    Bad(
        "pushforward of too many",
        lambda gt, a: gt.linearize(total(gt), a(V))[1](a(V), a(V)),
        ("got 1 primals and 2 tangents",),
    ),
    Bad(
        "cotangent of another structure",
        lambda gt, a: gt.vjp(lambda x: {"y": x}, a(V))[1]({"z": a(V)}),
        (r"^vjp: the cotangent has the structure .*\{'z': \*\}", r"\{'y': \*\}"),
    ),
    Bad(
        "cotangent of another shape",
        lambda gt, a: gt.vjp(lambda x: {"y": x}, a(V))[1]({"y": a(S)}),
        (r"cotangent\['y'\] has shape \(\) .*expected \(2,\)", r"output\['y'\]"),
    ),
    Bad(
        "cotangent of another dtype",
        lambda gt, a: gt.vjp(lambda x: x, a(V))[1](a(F32)),
        ("cotangent has shape .*float32, expected .*float64",),
    ),
    Bad(
        "complex Python cotangent",
        lambda gt, a: gt.vjp(lambda x: x * x, a(S))[1](1j),
        ("cotangent", "complex"),
    ),
    Bad(
        "mixed_partial, direction of another shape",
        lambda gt, a: gt.mixed_partial(
            lambda y, g: y * g, lambda z: gt.xp.sum(z), a(S), a(V), a(S)
        ),
        (r"tangent 0 has shape \(\)",),
    ),
    Bad(
        "mixed_partial, wrong tree of directions",
        lambda gt, a: gt.mixed_partial(
            lambda y, g: y * g, lambda z: gt.xp.sum(z), a(S), a(V), {"u": a(V)}
        ),
        ("tangent 0 has the structure",),
    ),
    # options
    Bad(
        "unknown jacobian mode",
        lambda gt, a: gt.jacobian(total(gt), mode="backward"),
        (r"^jacobian: mode is 'backward'; expected one of .*'forward', 'reverse'",),
    ),
    Bad(
        "unknown hvp mode",
        lambda gt, a: gt.hvp(total(gt), (a(V),), (a(V),), "fwd"),
        (r"^hvp: mode is 'fwd'", "forward_over_reverse"),
    ),
    Bad(
        "unknown policy",
        lambda gt, a: gt.grad(total(gt), disconnected_inputs="ignore"),
        (r"^grad: disconnected_inputs is 'ignore'", "'zeros'"),
    ),
    Bad(
        "chunk_size 0",
        lambda gt, a: gt.jacobian(total(gt), chunk_size=0),
        (r"^jacobian: chunk_size is 0", "1 or more"),
    ),
    Bad(
        "chunk_size negative",
        lambda gt, a: gt.per_example_grad(total(gt), chunk_size=-1),
        (r"^per_example_grad: chunk_size is -1",),
    ),
    Bad(
        "chunk_size a float",
        lambda gt, a: gt.jacobian(total(gt), chunk_size=2.0),
        ("chunk_size is 2.0",),
    ),
    Bad(
        "chunk_size a boolean",
        lambda gt, a: gt.jacobian(total(gt), chunk_size=True),
        ("chunk_size is True",),
    ),
    # batches
    Bad(
        "in_axes too short",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None,))(a(S), a(V)),
        (r"in_axes is \(None,\); expected one entry for each of the 2",),
    ),
    Bad(
        "in_axes a string",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes="0")(a(S), a(V)),
        ("in_axes is '0'",),
    ),
    Bad(
        "an axis that is a string",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None, "x"))(a(S), a(V)),
        (r"in_axes", "'x'", "integer or None|integer, None"),
    ),
    Bad(
        "an axis beyond the array",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None, 1))(a(S), a(V)),
        (r"argument 1 of shape \(2,\) has no axis 1", "None to share"),
    ),
    Bad(
        "a number to split",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(S), a(S)),
        (r"argument 1 of shape \(\) has no axis 0",),
    ),
    Bad(
        "a tree of axes that does not fit",
        lambda gt, a: gt.per_example_grad(lambda w, p: w * p["x"], in_axes=(None, {"y": 0}))(
            a(S), {"x": a(V)}
        ),
        (r"in_axes\[1\] is \{'y': 0\}", "a tree"),
    ),
    Bad(
        "a Python number to split",
        lambda gt, a: gt.per_example_grad(lambda w, p: w * p["x"], in_axes=(None, {"x": 0}))(
            a(S), {"x": 2.0}
        ),
        (r"argument 1\['x'\] is a float", "share"),
    ),
    Bad(
        "batch sizes differ",
        lambda gt, a: gt.per_example_grad(lambda w, x, y: w * x * y)(a(S), a(V), a(np.ones(3))),
        ("the batch sizes differ: 2 in argument 1, 3 in argument 2",),
    ),
    Bad(
        "no batch", lambda gt, a: gt.per_example_grad(lambda w: w)(a(S)), ("no argument is split",)
    ),
    Bad(
        "an empty batch",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(S), a(np.ones(0))),
        (r"the batch is empty \(argument 1 has size 0\)",),
    ),
    # f
    *(
        Bad(
            f"{name} of no function",
            lambda gt, a, name=name: getattr(gt, name)(3.0)(a(S)),
            (rf"^{name}: f must be a function, got 3.0",),
        )
        for name in ("grad", "value_and_grad", "jacobian", "hessian", "per_example_grad")
    ),
    Bad(
        "vjp of no function",
        lambda gt, a: gt.vjp(3.0, a(S)),
        (r"^vjp: f must be a function, got 3.0",),
    ),
    Bad(
        "jvp of no function",
        lambda gt, a: gt.jvp(3.0, (a(S),), (a(S),)),
        (r"^jvp: f must be a function",),
    ),
    Bad(
        "linearize of no function",
        lambda gt, a: gt.linearize(None, a(S)),
        (r"^linearize: f must be a function",),
    ),
    Bad(
        "hvp of no function",
        lambda gt, a: gt.hvp("f", (a(S),), (a(S),)),
        (r"^hvp: f must be a function",),
    ),
    Bad(
        "minimax of no function",
        lambda gt, a: gt.minimax_value_and_grad(1, 0, 1)(a(S), a(S)),
        (r"^minimax_value_and_grad: f must be a function",),
    ),
    Bad(
        "mixed_partial of no function",
        lambda gt, a: gt.mixed_partial(3.0, lambda z: z, a(S), a(S), a(S)),
        (r"^mixed_partial: f must be a function",),
    ),
    Bad(
        "mixed_partial through no function",
        lambda gt, a: gt.mixed_partial(lambda y, g: y, 3.0, a(S), a(S), a(S)),
        (r"^mixed_partial: G must be a function",),
    ),
    # forward mode through what has a reverse rule only
    *(
        Bad(
            f"{mode} through {name}",
            lambda gt, a, edit=edit, run=run: run(gt, edit(gt, a), a(V)),
            ("reverse rule only|reverse-only", "Use vjp or grad"),
        )
        for name, edit in {
            "clip_gradient": lambda gt, a: lambda x: gt.clip_gradient(x, max_norm=1.0) ** 2,
            "transform_gradient": lambda gt, a: (
                lambda x: gt.transform_gradient(x, lambda c: 2 * c) ** 2
            ),
            "known_gradient": lambda gt, a: lambda x: gt.known_gradient(x, a(V)) ** 2,
        }.items()
        for mode, run in {
            "jvp": lambda gt, f, x: gt.jvp(f, (x,), (x,)),
            "linearize": lambda gt, f, x: gt.linearize(f, x)[1](x),
            "forward hvp": lambda gt, f, x: gt.hvp(
                lambda x: gt.xp.sum(f(x)), (x,), (x,), "forward_over_reverse"
            ),
            "nested jvp": lambda gt, f, x: gt.jvp(lambda x: gt.jvp(f, (x,), (x,))[1], (x,), (x,)),
            "forward jacobian": lambda gt, f, x: gt.jacobian(f, mode="forward")(x),
        }.items()
    ),
)


def test_the_table_holds_at_least_forty_five_bad_calls_with_names_of_their_own():
    assert len(BAD) >= 45
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_is_refused_in_words_that_say_what_to_do(bad, gt, backend_name):
    with pytest.raises(GradtoolsError) as caught:
        bad.call(gt, lambda x: lift(backend_name, x))
    for pattern in bad.says:
        assert caught.match(pattern)


def test_an_error_of_f_reaches_the_user_as_it_is(gt, backend_name):
    def f(x):
        raise KeyError("mine")

    x = lift(backend_name, V)
    for run in (
        lambda: gt.grad(f)(x),
        lambda: gt.vjp(f, x),
        lambda: gt.jvp(f, (x,), (x,)),
        lambda: gt.linearize(f, x),
        lambda: gt.hvp(f, (x,), (x,)),
        lambda: gt.jacobian(f)(x),
        lambda: gt.hessian(f)(x),
    ):
        with pytest.raises(KeyError, match="mine"):
            run()


def test_an_integer_leaf_in_another_argument_is_welcome(gt, backend_name):
    x, n = lift(backend_name, (V, N))
    assert gt.grad(lambda x, p: gt.xp.sum(x * p["n"]))(x, {"n": n, "s": "name"}) is not None


def test_the_same_bad_call_is_refused_under_vmap(gt, backend_name):
    x = lift(backend_name, np.ones((3, 2)))
    with pytest.raises(GradtoolsError, match="f must return one real number"):
        gt.vmap(gt.grad(lambda x: x * x))(x)
    with pytest.raises(GradtoolsError, match="Keep it floating"):
        gt.vmap(gt.grad(lambda x: gt.xp.argmax(x)))(x)
