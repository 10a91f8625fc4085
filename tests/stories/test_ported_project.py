"""Tests a project that ports a model to linen, nnx and equinox and tests the ports with the plugin.

Each port has five optional bugs. The project's tests expect that the correct port passes
`cross_check` and that `first_divergence` names the line of each bug.
"""

from __future__ import annotations

import pytest

for library in ("torch", "jax", "flax", "equinox"):
    pytest.importorskip(library)

pytest_plugins = ["pytester"]

MODELS = """
import equinox as eqx, flax.linen as nn, jax, jax.numpy as jnp, torch
from flax import nnx
from torch.nn import functional as F


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        self.norm, self.last = torch.nn.LayerNorm(6), torch.nn.Linear(6, 3)

    def forward(self, x):
        h = F.silu(self.first(x)) * torch.sigmoid(self.gate(x))
        h = self.norm(h) + h
        y = self.last(h)
        return F.softplus(y) - y.detach().mean()


def computed(m, x, mistake):
    act = nn.gelu if mistake == "activation" else nn.silu
    h = act(m.first(x)) * nn.sigmoid(m.gate(x))
    h = m.norm(h) + (0 if mistake == "residual" else h)
    y = m.last(h)
    if mistake == "scale":
        y = 2 * y
    shift = y if mistake == "stop" else jax.lax.stop_gradient(y)
    return nn.softplus(y) - (shift.mean(0) if mistake == "axis" else shift.mean())


class Linen(nn.Module):
    mistake: str = ""

    def setup(self):
        self.first, self.gate, self.last = nn.Dense(6), nn.Dense(6), nn.Dense(3)
        self.norm = nn.LayerNorm(epsilon=1e-5)

    def __call__(self, x):
        return computed(self, x, self.mistake)


class Nnx(nnx.Module):
    def __init__(self, mistake=""):
        rngs, self.mistake = nnx.Rngs(0), mistake
        self.first, self.gate = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return computed(self, x, self.mistake)


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    gate: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear
    mistake: str = eqx.field(static=True)

    def __init__(self, mistake=""):
        keys = jax.random.split(jax.random.key(0), 3)
        self.first, self.gate = (eqx.nn.Linear(4, 6, key=k) for k in keys[:2])
        self.norm, self.last = eqx.nn.LayerNorm(6), eqx.nn.Linear(6, 3, key=keys[2])
        self.mistake = mistake

    def __call__(self, x):
        rows = lambda layer: jax.vmap(layer)
        m = Rows(rows(self.first), rows(self.gate), rows(self.norm), rows(self.last))
        return computed(m, x, self.mistake)


class Rows:
    def __init__(self, first, gate, norm, last):
        self.first, self.gate, self.norm, self.last = first, gate, norm, last


def ported(name, mapping_of, original, x, mistake=""):
    if name == "linen":
        blank = Linen().init(jax.random.key(0), x.astype("float32"))
        mapping = mapping_of(original, blank)
        return (Linen(mistake), mapping.to_jax(original)), mapping
    port = {"nnx": Nnx, "equinox": Equinox}[name](mistake)
    mapping = mapping_of(original, port)
    return mapping.into(port), mapping
"""

TESTS = """
import numpy as np, pytest, torch
from gradtools.testing import first_divergence, match_parameters
import models

X = np.random.default_rng(0).normal(size=(5, 4))
LINES = {
    "activation": ("h = F.silu", "h = act"),
    "residual": ("h = self.norm(h) + h", "y = m.last(h)"),  # reads h, which lacks the term
    "scale": ("return F.softplus", "y = 2 * y"),
    "stop": ("y.detach()", "shift.mean()"),
    "axis": ("y.detach().mean()", "shift.mean(0)"),
}


@pytest.fixture
def original():
    torch.manual_seed(0)
    return models.Original()


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_the_port_is_right(library, original, cross_check):
    port, mapping = models.ported(library, match_parameters, original, X)
    first_divergence(original, port, (X,), mapping).require()
    cross_check(torch=original, jax=port, args=(X,), mapping=mapping, dtype="float64", order=1)


@pytest.mark.parametrize("mistake", LINES)
@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_a_mistake_is_named(library, mistake, original):
    port, mapping = models.ported(library, match_parameters, original, X, mistake)
    report = first_divergence(original, port, (X,), mapping)
    lines = [place.line.text for place in (report.torch, report.jax)]
    assert all(text in line for text, line in zip(LINES[mistake], lines)), str(report)
    assert report.kind == ("gradient" if mistake == "stop" else "value")
"""


@pytest.mark.slow
def test_the_tests_of_a_project_with_three_ports_pass(pytester):
    pytester.makepyfile(models=MODELS, test_ports=TESTS)
    # a subprocess, because an in-process run would unload imported modules
    found = pytester.runpytest_subprocess(
        "-p", "gradtools.testing.plugin", "-p", "no:cacheprovider", "-q"
    )
    found.assert_outcomes(passed=18)
