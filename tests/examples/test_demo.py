"""Tests the claim about gradient reversal and the FLOP count in the demo."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

import gradtools
from gradtools.testing.plugin import wanted_backends

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

SPEC = spec_from_file_location("demo", Path(__file__).parents[2] / "examples" / "demo.py")
demo = module_from_spec(SPEC)
sys.modules["demo"] = demo  # dataclasses look up their module in sys.modules
SPEC.loader.exec_module(demo)


@pytest.fixture(scope="module", params=["torch", "jax"])
def backend(request):
    chosen = request.config.getoption("--gradtools-backend", default=None) or "both"
    if request.param not in gradtools.available_backends():
        pytest.skip(f"{request.param} is not installed")
    if request.param not in chosen and chosen not in ("both", "all"):
        pytest.skip(f"not selected by --gradtools-backend {chosen}")
    return request.param


@pytest.fixture(scope="module")
def side(backend):
    """Yield a `FrameworkRun` whose context is active during the tests of the module."""
    made = demo.FrameworkRun(backend)
    with made.working():
        yield made


@pytest.fixture(scope="module")
def batch():
    return drawn(seed=0)


def drawn(seed):
    return demo.draw_batch(demo.load_domains(seed), np.random.default_rng([seed, 1]))


@pytest.mark.slow_at("jax")
def test_one_reversed_evaluation_gives_what_two_plain_ones_give(side, batch):
    side.start(demo.initial_weights(seed=0))
    plain = side.plain_gradients(batch, 0.3)
    assert demo.relative_difference(side.step(batch, 0.3)[1], plain) < 1e-14


def test_a_step_evaluates_the_cost_once_and_the_plain_way_twice(side, batch):
    side.start(demo.initial_weights(seed=0))
    side.step(batch, 0.3)
    assert side.evaluations() == {demo.REVERSED: 1}
    side.plain_gradients(batch, 0.3)
    assert side.evaluations() == {demo.REVERSED: 1, demo.PLAIN: 2}


@pytest.mark.slow
def test_the_frameworks_agree_along_the_way():
    if gradtools.available_backends() != ("torch", "jax"):
        pytest.skip("needs both frameworks")
    sides = [demo.FrameworkRun(name) for name in ("torch", "jax")]
    for training in demo.train_all(sides, seeds=[0], steps=60):
        assert len(training.gradients) == 60
        assert max(training.losses) < 1e-12
        assert max(training.gradients) < 1e-11
        assert all(by_torch == by_jax for by_torch, by_jax in training.accuracy)
        assert len(training.plain) == 2 * 2  # two frameworks, each evaluated twice
        assert training.evaluations == {demo.REVERSED: 2 * 60, demo.PLAIN: 2 * 4}


def test_the_comparison_sees_a_flipped_sign_and_a_lost_leaf():
    grads = [np.ones(3), np.ones((2, 2))]
    assert demo.relative_difference([-grads[0], grads[1]], grads) == pytest.approx((12 / 7) ** 0.5)
    with pytest.raises(ValueError, match="longer"):
        demo.relative_difference(grads[:1], grads)


def test_both_trainings_of_a_seed_get_the_same_data():
    assert all(map(np.array_equal, drawn(seed=2), drawn(seed=2)))


@pytest.mark.slow
def test_the_quick_demo_prints_its_table_and_writes_its_picture(backend, tmp_path, capsys):
    demo.run_demo((backend,), seeds=2, out=tmp_path, quick=True)
    printed = capsys.readouterr().out
    assert "mean" in printed
    assert ": 1 a step" in printed
    assert ": 2 a step" in printed
    assert f"picture: {tmp_path / 'demo.png'}" in printed
    assert (tmp_path / "demo.png").stat().st_size > 10_000


SHARES = {"torch": (0, 1), "jax": (1, 2)}


@pytest.mark.slow
def test_reversal_helps_by_five_points_in_the_mean_of_three_seeds(pytestconfig):
    """With both frameworks, each framework runs two of the seeds, and one seed runs in both."""
    wanted = wanted_backends(pytestconfig)
    shares = SHARES if len(wanted) == 2 else {wanted[0]: range(3)}
    found, gains = {}, {}
    for backend, seeds in shares.items():
        trainings = demo.train_all([demo.FrameworkRun(backend)], seeds)
        final = {(t.seed, t.reverses): t.accuracy[-1][0] for t in trainings}
        of_one = {seed: final[seed, True] - final[seed, False] for seed in seeds}
        assert np.mean(list(of_one.values())) >= 5, (backend, of_one)
        gains |= of_one
        for run, accuracy in final.items():
            found.setdefault(run, []).append(accuracy)
    assert len(gains) == 3 and np.mean(list(gains.values())) >= 5, gains
    both = [pair for pair in found.values() if len(pair) == 2]
    assert len(both) == (2 if len(shares) == 2 else 0)
    assert all(by_torch == by_jax for by_torch, by_jax in both)
