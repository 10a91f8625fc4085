"""The demo: reversal does what it says, both frameworks agree, and the count is real."""

import numpy as np
import pytest

import gradtools
from gradtools.demo import data
from gradtools.demo.compare import Record, relative_difference
from gradtools.demo.settings import QUICK, Settings
from gradtools.testing.plugin import wanted_backends

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from gradtools.demo import run
from gradtools.demo.training import FrameworkRun

HEAD_LEAVES = 6  # labels: matrix and bias; domain: two of each


@pytest.fixture(scope="module", params=["torch", "jax"])
def backend(request):
    chosen = request.config.getoption("--gradtools-backend", default=None) or "both"
    if request.param not in gradtools.available_backends():
        pytest.skip(f"{request.param} is not installed")
    if request.param not in chosen and chosen not in ("both", "all"):
        pytest.skip(f"--gradtools-backend {chosen}")
    return request.param


@pytest.fixture(scope="module")
def side(backend):
    """A side at its first weights, working."""
    made = FrameworkRun(backend, QUICK)
    with made.working():
        yield made


@pytest.fixture(scope="module")
def batch():
    return next(data.batches(data.load_domains(0), QUICK, seed=0))


def first_gradients(side, batch, scale):
    side.start(data.initial_weights(QUICK, seed=0))
    return side.step(batch, scale)[1]


def test_one_reversed_evaluation_gives_what_two_plain_ones_give(side, batch):
    side.start(data.initial_weights(QUICK, seed=0))
    plain = side.plain_gradients(batch, 0.3)
    assert relative_difference(side.step(batch, 0.3)[1], plain) < 1e-14


def test_steps_descend_along_the_gradients_with_momentum(side, batch):
    side.start(data.initial_weights(QUICK, seed=0))
    before = side._leaves(side._params)
    first, second = (side.step(batch, 0.3)[1] for _ in range(2))
    moves = [QUICK.momentum * g + h + g for g, h in zip(first, second, strict=True)]
    expected = [x - QUICK.learning_rate * m for x, m in zip(before, moves, strict=True)]
    assert relative_difference(side._leaves(side._params), expected) < 1e-14


def test_reversal_changes_the_features_gradient_and_no_heads(side, batch):
    without, with_ = (first_gradients(side, batch, scale) for scale in (0.0, 0.3))
    heads, features = slice(-HEAD_LEAVES, None), slice(-HEAD_LEAVES)
    assert relative_difference(with_[heads], without[heads]) == 0
    assert relative_difference(with_[features], without[features]) > 1e-3


def test_the_reversed_part_is_linear_in_the_scale(side, batch):
    plain = first_gradients(side, batch, -1.0)  # scale -1 is no reversal
    none, half = (first_gradients(side, batch, scale) for scale in (0.0, 0.5))
    expected = [zero - 0.5 * (one - zero) for zero, one in zip(none, plain, strict=True)]
    assert relative_difference(half, expected) < 1e-13


def test_a_step_evaluates_the_cost_once_and_the_plain_way_twice(side, batch):
    before = side.evaluations()
    first_gradients(side, batch, 0.3)
    between = side.evaluations()
    side.plain_gradients(batch, 0.3)
    assert (between - before, side.evaluations() - between) == (1, 2)


def test_a_side_works_in_double_precision_or_on_one_thread(backend):
    with FrameworkRun(backend, QUICK).working():
        assert _switch(backend) == 1


def test_what_a_side_switches_is_restored_also_after_an_error(backend):
    before = _switch(backend)
    with pytest.raises(KeyError), FrameworkRun(backend, QUICK).working():
        raise KeyError
    assert _switch(backend) == before


def _switch(backend):
    if backend == "torch":
        import torch

        return torch.get_num_threads()
    import jax

    return int(jax.config.jax_enable_x64)


def test_the_frameworks_agree_along_the_way():
    if gradtools.available_backends() != ("torch", "jax"):
        pytest.skip("needs both frameworks")
    sides = [FrameworkRun(name, QUICK) for name in ("torch", "jax")]
    for record in run.train_all(sides, QUICK, seeds=[0]):
        assert len(record.gradient_differences) == QUICK.steps
        assert max(record.loss_differences) < 1e-12
        assert max(record.gradient_differences) < 1e-11
        assert np.array_equal(record.predictions["torch"], record.predictions["jax"])
        assert record.evaluations == record.steps == 2 * QUICK.steps
        assert record.plain_evaluations == 2 * record.plain_steps > 0


def test_the_comparison_sees_a_flipped_sign_and_a_lost_leaf():
    grads = [np.ones(3), np.ones((2, 2))]
    assert relative_difference([-grads[0], grads[1]], grads) == pytest.approx((12 / 7) ** 0.5)
    with pytest.raises(ValueError, match="longer"):
        relative_difference(grads[:1], grads)


def test_no_target_image_is_a_shifted_source_image(monkeypatch):
    from sklearn.datasets import load_digits

    monkeypatch.setattr(data, "shift", lambda images, rng: images)
    domains = data.load_domains(3)
    together = np.concatenate([domains.source, domains.target, domains.held_out])
    everything = load_digits().images.reshape(-1, 64) / 16.0
    assert np.array_equal(np.sort(together, axis=0), np.sort(everything, axis=0))
    assert sorted(map(bytes, together)) == sorted(map(bytes, np.ascontiguousarray(everything)))


def test_both_trainings_of_a_seed_get_the_same_data():
    first, second = (next(data.batches(data.load_domains(2), QUICK, 2)) for _ in range(2))
    assert np.array_equal(first.source, second.source)
    assert np.array_equal(first.target, second.target)


def test_the_scale_rises_from_zero_to_its_maximum():
    settings = Settings()
    scales = [settings.scale(step) for step in range(settings.steps + 1)]
    assert scales[0] == 0
    assert scales == sorted(scales)
    assert scales[-1] == pytest.approx(settings.max_scale, rel=1e-3)


def test_the_quick_demo_prints_its_table_and_writes_its_picture(backend, tmp_path, capsys):
    assert run.run_demo((backend,), seeds=2, out=tmp_path, quick=True) == 0
    printed = capsys.readouterr().out
    assert "mean" in printed
    assert ": 1 a step" in printed
    assert ": 2 a step" in printed
    assert f"picture: {tmp_path / 'demo.png'}" in printed
    assert (tmp_path / "demo.png").stat().st_size > 10_000


SHARES = {"torch": (0, 1, 2), "jax": (2, 3, 4)}


@pytest.mark.slow
def test_reversal_helps_by_five_points_in_the_mean_of_five_seeds(pytestconfig):
    """The frameworks, which agree at each step, share the seeds; on the one of both they agree."""
    wanted = wanted_backends(pytestconfig)
    shares = SHARES if len(wanted) == 2 else {wanted[0]: range(5)}
    settings, found, gains = Settings(), {}, {}
    for backend, seeds in shares.items():
        records = run.train_all([FrameworkRun(backend, settings)], settings, seeds)
        of_one = {b.seed: b.final(backend) - a.final(backend) for a, b in _pairs(records)}
        assert tuple(of_one) == tuple(seeds)
        assert np.mean(list(of_one.values())) >= 5, (backend, of_one)
        gains |= of_one
        for record in records:
            found.setdefault((record.seed, record.reverses), []).append(record.accuracy[backend])
    assert len(gains) == 5 and np.mean(list(gains.values())) >= 5, gains
    both = [pair for pair in found.values() if len(pair) == 2]
    assert len(both) == (2 if len(shares) == 2 else 0)
    assert all(by_torch == by_jax for by_torch, by_jax in both)


def _pairs(records: list[Record]):
    return zip(records[::2], records[1::2], strict=True)
