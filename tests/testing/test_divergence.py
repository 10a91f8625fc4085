"""first_divergence names the lines of a planted bug, and no lines for correct ports."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from gradtools.testing import AgreementError, first_divergence, match_parameters

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402  only where the libraries are installed

from tests.support import ports  # noqa: E402
from tests.support.planted_mistakes import MISTAKES, both, built  # noqa: E402
from tests.support.right_ports import RIGHT_PORTS  # noqa: E402

X = np.random.default_rng(0).normal(size=(4, 3))


def number_of(text, lines):
    return next(k for k, line in enumerate(lines, 1) if text in line)


def lines_in(place, folder):
    """Return the lines of a location that are in the port's own files, innermost first."""
    return [line.line for line in place.lines if line.file.startswith(str(folder))]


@pytest.mark.sampled(20, 72)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_both_lines_of_a_mistake_are_named(mistake, tmp_path):
    name, side, old, new = mistake.port, mistake.side, mistake.old, mistake.new
    report = first_divergence(*both(name, tmp_path, side, old, new), ports.ARGUMENTS[name])
    assert not report
    sources = [built(name, x, tmp_path)[1] for x in ("torch", "jax")]
    changed = number_of(old, sources[side == "jax"])
    expected = [changed, changed]
    if mistake.lines:
        texts = zip(mistake.lines, sources, strict=True)
        expected = [number_of(text, source) for text, source in texts]
    named = [lines_in(place, tmp_path)[0] for place in (report.torch, report.jax)]
    assert named == expected, str(report)


@pytest.mark.slow_at("loss_in_linen")
@pytest.mark.parametrize("name", [*ports.ARGUMENTS, *RIGHT_PORTS])
def test_a_right_port_is_not_blamed(name, tmp_path):
    torch.manual_seed(0)
    if name in ports.ARGUMENTS:
        report = first_divergence(*both(name, tmp_path), ports.ARGUMENTS[name])
    else:
        report = first_divergence(*name())
    assert report, str(report)
    assert (report.kind, report.torch, report.jax) == ("agrees", None, None)
    assert len(report) > 1


# --- the report


def test_a_report_explains_itself_and_can_be_required():
    report = first_divergence(lambda x: (2 * x).tanh(), lambda x: jnp.tanh(3 * x), (X,))
    with pytest.raises(
        AgreementError, match=r"The programs diverge in a value: 2 x in torch, 3 x in jax"
    ) as e:
        report.require()
    assert "torch: mul at test_divergence.py:" in str(e.value)
    assert str(pickle.loads(pickle.dumps(report))) == str(report)


def test_a_value_that_falls_to_float32_is_named():
    g = lambda x: jnp.tanh((x @ x.T).astype(jnp.float32))
    report = first_divergence(lambda x: (x @ x.T).tanh(), g, (X,))
    assert report.relation.startswith("float64 in torch and float32 in jax from here on")
    assert report.jax.operation == "convert_element_type"


def test_a_layer_that_computes_in_float32_inside_is_named():
    f = lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q)
    g = lambda q: jnp.swapaxes(jax.nn.dot_product_attention(*[jnp.swapaxes(q, 1, 2)] * 3), 1, 2)
    q = np.random.default_rng(0).normal(size=(2, 2, 5, 4))
    assert "float32 in jax from here on" in first_divergence(f, g, (q,)).relation
    assert first_divergence(f, g, (q.astype(np.float32),))


@pytest.mark.slow
def test_a_long_loop_is_compared_iteration_by_iteration():
    def g(xs, broken=-1):
        def step(carry, x):
            i, y = carry
            y = jnp.where(i == broken, 0.9, 1.0) * jnp.sin(y + x)
            return (i + 1, y), None

        return jax.lax.scan(step, (0, jnp.zeros(3)), xs)[0][1]

    def f(xs):
        y = torch.zeros(3, dtype=xs.dtype)
        for x in xs:
            y = torch.sin(y + x)
        return y

    xs = np.random.default_rng(0).normal(size=(150, 3))
    assert first_divergence(f, g, (xs,))
    assert first_divergence(f, lambda xs: g(xs, 120), (xs,)).jax.iteration == (120,)


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_a_rule_that_is_not_the_derivative_is_named(side):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y := x.tanh())
            return y

        @staticmethod
        def backward(ctx, c):
            return c * (1 - ctx.saved_tensors[0])

    wrong = jax.custom_vjp(jnp.tanh)
    wrong.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, c: (c * (1 - y),))
    f = lambda x: (Wrong.apply if side == "torch" else torch.tanh)(2 * x).sum()
    g = lambda x: (wrong if side == "jax" else jnp.tanh)(2 * x).sum()
    report = first_divergence(f, g, (X,))
    assert report.kind == "gradient" and report.relation.startswith("different derivatives")
    names = ("tanh", "custom_vjp_call" if side == "jax" else "tanh")
    assert (report.torch.operation, report.jax.operation) == names


def test_an_array_without_a_finite_entry_is_a_failure_and_other_entries_are_counted():
    f = lambda x: (x * float("nan")).sum()
    report = first_divergence(f, lambda x: (3 * x * float("nan")).sum(), (X,))
    assert not report and report.kind == "not finite" and "why_zero" in str(report)
    report = first_divergence(torch.log, jnp.log, (X,))
    count = int((X < 0).sum())
    assert report and f"{count} entries are NaN or infinite on both sides" in report.summary()


def test_a_parameter_with_other_numbers_is_named():
    mine = torch.nn.Linear(3, 3)
    mapping = match_parameters(mine, {"kernel": np.ones((3, 3)), "bias": np.ones(3)})
    params = mapping.to_jax(mine)
    port = lambda params, state, x: (x @ params["kernel"] + params["bias"], state)
    wrong = {**params, "kernel": params["kernel"].T}
    assert first_divergence(mine, (port, params, {}), (X,), mapping)
    report = first_divergence(mine, (port, wrong, {}), (X,), mapping)
    assert report.kind == "parameter"
    assert "kernel in JAX differs from the parameter in PyTorch (transposed" in report.relation


def test_the_model_is_left_as_it_was():
    mine = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = {name: x.clone() for name, x in mine.state_dict().items()}
    assert not first_divergence(mine, lambda x: jnp.tile(x[:, :1], 4), (X,))
    assert all(torch.equal(x, before[name]) for name, x in mine.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in mine.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in mine.modules())
