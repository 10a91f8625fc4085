"""Tests undocumented behavior of JAX on which gradtools relies."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import jax
import jax.extend.core
import jax.interpreters.mlir
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools.jax import _upstream as upstream
from gradtools.jax import jaxprs
from gradtools.jax.jaxprs import equations


def test_an_equation_is_bound_again_with_its_parameters():
    @jax.custom_jvp
    def f(x):
        return x * 3.0

    f.defjvp(lambda xs, ts: (f(*xs), ts[0] * 3.0))
    for run in (f, jax.jit(f), jnp.sin):
        (eqn,) = jax.make_jaxpr(run)(jnp.ones(2)).jaxpr.eqns
        outs = upstream.bind_again(eqn, [jnp.full(2, 2.0)])
        np.testing.assert_allclose(jax.tree.leaves(outs)[0], run(jnp.full(2, 2.0)))


def test_a_type_tells_the_mesh_axes_along_which_it_varies():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    seen = []

    def look(x):
        seen.append(upstream.varying_axes(jax.typeof(x)))
        constant = jnp.ones(1)
        seen.append(upstream.varying_axes(jax.typeof(constant)))
        seen.append(upstream.varying_axes(jax.typeof(upstream.as_varying(constant, ("i",)))))
        return x

    spec = jax.sharding.PartitionSpec("i")
    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(1))
    assert seen[:3] == [{"i"}, set(), {"i"}]


@pytest.mark.parametrize(
    "name",
    ["ClosedJaxpr", "Jaxpr", "Literal", "Primitive", "get_opaque_trace_state"]
    + ["set_current_trace", "take_current_trace"],
)
def test_what_is_taken_from_its_private_place_is_what_is_public(name):
    assert getattr(upstream, name) is getattr(jax.extend.core, name)


def test_a_trace_is_told_from_none():
    seen = []
    look = lambda x: seen.append(upstream.trace_state_clean()) or x
    look(1.0), jax.make_jaxpr(look)(1.0), jax.grad(look)(1.0), jax.vmap(look)(jnp.ones(2))
    assert seen == [True, False, False, False]


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX linearizes jvp rules")
def test_a_primitive_is_linearized_by_its_rule():
    double, seen = upstream.Primitive("double"), []
    double.def_impl(lambda x: 2 * x)

    def rule(carried, x):
        seen.append(list(carried))
        return 2 * x, True, [], lambda _, dx: 2 * dx

    upstream.define_linearization(double, rule)
    assert jax.grad(double.bind)(1.0) == 2 and seen == [[True]]


def test_caches_of_jax_keep_no_rule_alive():
    class Rule:
        pass

    upstream.weakly_cached.add(Rule)
    primitive = upstream.RulePrimitive("of a rule")
    primitive.def_abstract_eval(lambda x, rule: [x])
    rules = [Rule()]
    gone = weakref.ref(rules[0])
    jax.make_jaxpr(lambda x: primitive.bind(x, rule=rules[0]))(1.0)
    rules.clear()
    gc.collect()
    assert gone() is None


def test_the_public_place_still_comes_with_pallas():
    """If this test fails, the import of the private module is no longer needed."""
    run = "import sys, jax.extend.core; sys.exit('jax._src.pallas' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", run], check=False).returncode == 0


def _made_here(x):
    with jax.named_scope("mine"):
        return jnp.sin(x)


def _eqn(f, x=1.0, name="sin"):
    return next(e for e in jax.make_jaxpr(f)(x).jaxpr.eqns if e.primitive.name == name)


def test_an_equation_keeps_the_stack_that_made_it():
    frames = upstream.stack_of(_eqn(_made_here))
    mine = [f for f in frames if f.file_name == __file__]
    assert mine[0].function_name.endswith("_made_here") and mine[0].line_num > 0


def test_an_equation_keeps_the_scopes_and_transforms_around_it():
    eqn = _eqn(jax.grad(lambda x: _made_here(_made_here(x))), name="cos")
    assert ("mine", True) in list(upstream.scopes_of(eqn))
    assert upstream.is_in_scope([eqn], "mine")
    assert not upstream.is_in_scope([eqn], "min")
    closed = jax.make_jaxpr(jax.grad(_made_here))(1.0)
    entries = [entry for eqn in closed.jaxpr.eqns for entry in upstream.scopes_of(eqn)]
    assert ("transpose", False) in entries


def test_what_chunked_makes_of_its_own_is_marked_by_a_name():
    x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
    loss = lambda w: (gt.chunked(lambda x: jnp.tanh(x @ w), 3)(x) ** 2).sum()
    found = equations(jax.make_jaxpr(loss)(w))
    scan = next(e for e in found if e.primitive.name == "scan")
    assert jaxprs.is_chunk(scan.params["jaxpr"].jaxpr)
    assert jaxprs.function_name(scan.params["jaxpr"].jaxpr) == "body"
    own = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c, y), 0, x))(x).jaxpr.eqns[0]
    assert not jaxprs.is_chunk(own.params["jaxpr"].jaxpr)


def test_the_comparison_of_an_activations_rule_is_known():
    again = jax.grad(jax.grad(jax.nn.relu))
    theirs = [e for e in _all_eqns(jax.make_jaxpr(again)(1.0)) if e.primitive.name == "gt"]
    mine = _eqn(lambda x: x > 0, name="gt")
    assert any(map(upstream.is_activation_rule, theirs))
    assert not upstream.is_activation_rule(mine)


def _all_eqns(closed):
    for eqn in closed.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _all_eqns(inner)
