"""Runs domain-adversarial training in both frameworks, and compares the results at every step.

    python examples/demo.py [--backend torch|jax|both] [--seeds N] [--out FOLDER] [--quick]

A network is trained on clean, labeled digits and tested on rotated, noisy, partly inverted digits.
The labels of the rotated digits are not used in training. A second head classifies the domain. The
gradient of the domain loss is reversed at the features, so that the features of both domains become
indistinguishable (Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 17, 2016)::

    L(theta_f, theta_y, theta_d) = L_label(theta_f, theta_y) + L_domain(R(theta_f), theta_d),
    R(x) = x,  dR/dx = -scale

One evaluation of L computes every gradient. The frameworks train in lockstep on the same batches,
and each step is compared. The constants were chosen on seeds 100 to 109, and the demo uses other
seeds (0, 1, ...). The reported accuracy is measured after the last step.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

STEPS, QUICK_STEPS, LOOK_EVERY = 1000, 100, 50  # accuracy is measured every 50 steps
BATCH, RATE, MOMENTUM, MAX_SCALE = 64, 0.1, 0.5, 0.3
WIDTHS = ((64, 128), (128, 64), (64, 10), (64, 32), (32, 1))  # (in, out) of each dense layer.
FEATURES, LABELS, DOMAIN = slice(4), slice(4, 6), slice(6, 10)  # Indices of each part's parameters.
REVERSED, PLAIN = "with reverse_gradient", "without gradtools"
OPENING = """\
Domain-adversarial training on 1,797 digits: 750 clean digits with labels, 750 distorted digits
(rotated, noisy, partly inverted) without labels, and 297 distorted digits for testing.
The program runs on {} in float64, with the same weights, batches and learning rate, for {} steps.
With reversal, the scale increases from 0 to {}; without reversal, the scale is 0.
"""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Domains:
    """Three disjoint sets of images; no target image is a shifted source image."""

    source: Array
    source_labels: Array  # one-hot
    target: Array  # Unlabeled.
    held_out: Array  # Images of the target domain.
    held_out_labels: Array


def load_domains(seed: int) -> Domains:
    """Splits scikit-learn's 1,797 digits and applies `shift` to all but the source images."""
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(seed)
    source, target, held_out = np.split(rng.permutation(len(digits.images)), [750, 1500])
    images, labels = digits.images / 16.0, digits.target
    return Domains(
        source=images[source].reshape(-1, 64),
        source_labels=np.eye(10)[labels[source]],
        target=shift(images[target], rng).reshape(-1, 64),
        held_out=shift(images[held_out], rng).reshape(-1, 64),
        held_out_labels=labels[held_out],
    )


def shift(images: Array, rng: np.random.Generator) -> Array:
    """Maps images to the target domain: rotates and partly inverts the images, and adds noise.

    Images are rotated by 20 to 40 degrees and mixed with a tenth of their inverse. If images were
    inverted completely, gradient reversal would align classes of one domain with other classes of
    the other domain.
    """
    from scipy.ndimage import rotate

    turned = np.stack([rotate(x, rng.uniform(20, 40), reshape=False, order=1) for x in images])
    return np.clip(0.8 * turned + 0.1 + 0.1 * rng.standard_normal(turned.shape), 0.0, 1.0)


def draw_batch(domains: Domains, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Draws source images, their labels and target images."""
    source = rng.integers(0, len(domains.source), BATCH)
    target = rng.integers(0, len(domains.target), BATCH)
    return domains.source[source], domains.source_labels[source], domains.target[target]


def initial_weights(seed: int) -> list[Array]:
    """Draws He-initialized weights: for each layer the matrix (in, out), then the bias."""
    rng = np.random.default_rng([seed, 2])
    layers = [(rng.standard_normal(w) * np.sqrt(2 / w[0]), np.zeros(w[1])) for w in WIDTHS]
    return [x for layer in layers for x in layer]


def scale_at(progress: float) -> float:
    """Returns the reversal's scale, MAX_SCALE (2 / (1 + exp(-10 progress)) - 1)."""
    return float(MAX_SCALE * (2 / (1 + np.exp(-10 * progress)) - 1))


class FrameworkRun:
    """Runs the program in one framework, "torch" (eager) or "jax" (compiled)."""

    def __init__(self, name: str) -> None:
        self.name, self.gt = name, import_module(f"gradtools.{name}")
        self._evaluations = Counter[str]()
        run: Callable[[Any], Any] = self.gt.compile if name == "jax" else lambda f: f
        self._step, self._plain = run(self._descended), run(self._plain_gradients)
        self._scores = run(lambda params, x: self._classes(params, self._features(params, x)))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Enables double precision in JAX, and a single thread in PyTorch for the small network."""
        with ExitStack() as stack:
            if self.name == "jax":
                stack.enter_context(import_module("jax").enable_x64(True))
            else:
                torch = import_module("torch")
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            yield

    def start(self, weights: Sequence[Array]) -> None:
        """Sets the weights, and resets the momenta and the counts of evaluations."""
        self._evaluations.clear()
        self.params = [self.gt.asarray(x) for x in weights]
        self._momenta = [self.gt.xp.zeros_like(x) for x in self.params]

    def step(self, batch: Sequence[Array], scale: float) -> tuple[float, list[Array]]:
        """Runs one training step; returns the loss and the gradients."""
        result = self._step(self.params, self._momenta, *self._arrays(batch, scale))
        self.params, self._momenta, value, grads = result
        return float(value), [self.gt.to_numpy(g) for g in grads]

    def plain_gradients(self, batch: Sequence[Array], scale: float) -> list[Array]:
        """Computes the gradients with respect to all parameters in two evaluations of the loss."""
        grads = self._plain(self.params, *self._arrays(batch, scale))
        return [self.gt.to_numpy(g) for g in grads]

    def accuracy(self, domains: Domains) -> float:
        """Returns the accuracy on the held-out images, in percent."""
        scores = self.gt.to_numpy(self._scores(self.params, self.gt.asarray(domains.held_out)))
        return 100 * float(np.mean(scores.argmax(1) == domains.held_out_labels))

    def evaluations(self) -> Counter[str]:
        """Returns the number of evaluations of the cost so far, for each method."""
        if self.name == "jax":
            import_module("jax").effects_barrier()
        return self._evaluations

    def _arrays(self, batch: Sequence[Array], scale: float) -> tuple[list[Any], Any]:
        return [self.gt.asarray(x) for x in batch], self.gt.asarray(np.asarray(scale))

    def _descended(self, params: list[Any], momenta: list[Any], batch: Any, scale: Any) -> Any:
        def cost(params: list[Any]) -> Any:
            edit = partial(self.gt.reverse_gradient, scale=scale)
            return sum(self._losses(REVERSED, params, batch, edit))

        value, grads = self.gt.value_and_grad(cost)(params)
        momenta = [MOMENTUM * v + g for v, g in zip(momenta, grads, strict=True)]
        params = [p - RATE * v for p, v in zip(params, momenta, strict=True)]
        return params, momenta, value, grads

    def _plain_gradients(self, params: list[Any], batch: Any, scale: Any) -> list[Any]:
        features, heads = params[FEATURES], params[LABELS.start :]

        def for_features(features: list[Any]) -> Any:
            label, domain = self._losses(PLAIN, features + heads, batch)
            return label - scale * domain

        def for_heads(heads: list[Any]) -> Any:
            return sum(self._losses(PLAIN, features + heads, batch))

        grads: list[Any] = self.gt.grad(for_features)(features) + self.gt.grad(for_heads)(heads)
        return grads

    def _losses(
        self, way: str, params: list[Any], batch: Any, edit: Callable[[Any], Any] = lambda x: x
    ) -> tuple[Any, Any]:
        self._count(way)
        source, labels, target = batch
        features = self._features(params, self.gt.xp.concat([source, target]))
        classes = self._classes(params, features[: len(source)])
        domains = self._dense(params[DOMAIN], edit(features))[:, 0]
        return self._label_loss(classes, labels), self._domain_loss(domains, len(source))

    def _count(self, way: str) -> None:
        add = partial(self._evaluations.update, [way])
        import_module("jax").debug.callback(add) if self.name == "jax" else add()

    def _features(self, params: list[Any], x: Any) -> Any:
        return self._relu(self._dense(params[FEATURES], x))

    def _classes(self, params: list[Any], features: Any) -> Any:
        return self._dense(params[LABELS], features)

    def _dense(self, params: list[Any], x: Any) -> Any:
        """Applies dense layers with ReLU between them."""
        for i in range(0, len(params), 2):
            x = (self._relu(x) if i else x) @ params[i] + params[i + 1]
        return x

    def _relu(self, x: Any) -> Any:
        return self.gt.xp.where(x > 0, x, self.gt.xp.zeros_like(x))

    def _label_loss(self, logits: Any, labels: Any) -> Any:
        xp = self.gt.xp
        shifted = logits - self.gt.stop_gradient(xp.max(logits, axis=1, keepdims=True))
        log_total = xp.log(xp.sum(xp.exp(shifted), axis=1))
        return xp.mean(log_total - xp.sum(shifted * labels, axis=1))

    def _domain_loss(self, logits: Any, size: int) -> Any:
        """Returns the domain head's cross-entropy; the first ``size`` images are source images."""
        xp = self.gt.xp
        costs = xp.logaddexp(xp.zeros_like(logits), logits)
        return xp.mean(costs) - xp.sum(logits[:size]) / logits.shape[0]


@dataclass
class Training:
    """Records one training run on every backend, with or without reversal."""

    seed: int
    reverses: bool
    accuracy: list[list[float]]  # The accuracy on each backend in percent.
    losses: list[float]  # Relative differences between the backends.
    gradients: list[float]
    plain: list[float]  # Relative differences from the gradients that two evaluations compute.
    evaluations: Counter[str]

    def compare(
        self, results: Sequence[tuple[float, list[Array]]], plain: Sequence[list[Array]]
    ) -> None:
        """Records the relative differences between backends and between gradient methods."""
        (first_loss, first), (last_loss, last) = results[0], results[-1]
        self.losses.append(abs(first_loss - last_loss) / abs(last_loss))
        self.gradients.append(relative_difference(first, last))
        pairs = zip(results, plain, strict=False)
        self.plain.extend(relative_difference(grads, other) for (_, grads), other in pairs)


def train(sides: Sequence[FrameworkRun], seed: int, reverses: bool, steps: int = STEPS) -> Training:
    """Trains on every backend from the same weights and on the same batches."""
    from tqdm import trange

    seen = Training(seed, reverses, [], [], [], [], Counter())
    domains, rng = load_domains(seed), np.random.default_rng([seed, 1])
    for side in sides:
        side.start(initial_weights(seed))
    said = f"seed {seed}, {'with' if reverses else 'without'} reversal"
    for number in trange(steps, desc=said, leave=False, disable=None):
        batch = draw_batch(domains, rng)
        scale = scale_at(number / steps) if reverses else 0.0
        plain = []
        if number % LOOK_EVERY == 0:
            seen.accuracy.append([side.accuracy(domains) for side in sides])
            plain = [side.plain_gradients(batch, scale) for side in sides]
        seen.compare([side.step(batch, scale) for side in sides], plain)
    seen.accuracy.append([side.accuracy(domains) for side in sides])
    seen.evaluations = sum((side.evaluations() for side in sides), Counter())
    return seen


def relative_difference(a: Sequence[Array], b: Sequence[Array]) -> float:
    """Returns the norm of a - b divided by the norm of b, for all leaves together."""
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in zip(a, b, strict=True))
    return float(np.sqrt(difference / sum(float(np.sum(y**2)) for y in b)))


def train_all(
    sides: Sequence[FrameworkRun], seeds: Sequence[int], steps: int = STEPS
) -> list[Training]:
    """Trains without and then with gradient reversal for every seed."""
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.working())
        return [train(sides, seed, on, steps) for seed in seeds for on in (False, True)]


def run_demo(
    backends: Sequence[str], seeds: int = 5, out: Path = Path("out"), quick: bool = False
) -> None:
    """Trains on all seeds, prints the results and draws the picture.

    Args:
        backends: "torch", "jax" or both; with both backends, each step is compared.
        seeds: The number of seeds.
        out: The folder for the picture.
        quick: Whether to run only a few steps, as a smoke test without meaningful accuracies.
    """
    started, steps = perf_counter(), QUICK_STEPS if quick else STEPS
    print(OPENING.format(" and ".join(backends), steps, MAX_SCALE))
    trainings = train_all([FrameworkRun(name) for name in backends], range(seeds), steps)
    print("\n".join([*_accuracies(trainings, backends), *_comparison(trainings, backends)]))
    print(f"picture: {draw(trainings, backends, out)}")
    print(f"took {perf_counter() - started:.0f} s")


def _accuracies(trainings: Sequence[Training], backends: Sequence[str]) -> Iterator[str]:
    yield "\naccuracy on held-out target images, in %"
    yield "  seed" + "".join(f"{name:>9} without   with   gain" for name in backends)
    final = np.array([t.accuracy[-1] for t in trainings])
    final = final.reshape(-1, 2, len(backends))  # (seed, reversal, backend)
    for name, pairs in [*enumerate(final), ("mean", final.mean(0))]:
        yield f"  {name:>4}" + "".join(f"{a:>17.1f} {b:>6.1f} {b - a:>+6.1f}" for a, b in pairs.T)


def _comparison(trainings: Sequence[Training], backends: Sequence[str]) -> Iterator[str]:
    compared = sum(len(t.losses) for t in trainings)
    if len(backends) > 1:
        yield f"\nlargest difference between the frameworks over {compared:,} steps (relative):"
        losses, gradients = (
            max(max(vars(t)[k]) for t in trainings) for k in ("losses", "gradients")
        )
        yield f"  losses {losses:.1e}, gradients {gradients:.1e}"
    yield "\nevaluations of the cost, counted at run time:"
    counts = sum((t.evaluations for t in trainings), Counter[str]())
    steps, plain = compared * len(backends), [x for t in trainings for x in t.plain]
    yield _count(REVERSED, counts, steps)
    yield f"{_count(PLAIN, counts, len(plain))}; gradients differ by {max(plain):.1e}"


def _count(way: str, counts: Counter[str], steps: int) -> str:
    return f"  {way:<21} {counts[way]:,} in {steps:,} steps: {counts[way] / steps:g} a step"


def draw(trainings: Sequence[Training], backends: Sequence[str], out: Path) -> Path:
    """Plots the accuracy over the steps, saves demo.png in the folder, and returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)  # opens no window, regardless of the user's settings
    axes: Any = figure.subplots()
    for reverses, label, colour in ((False, "without", "#b8542c"), (True, "with", "#22688c")):
        chosen = np.array([t.accuracy for t in trainings if t.reverses is reverses])
        looks = LOOK_EVERY * np.arange(chosen.shape[1])
        for curve, name, style in zip(chosen.mean(0).T, backends, ("-", "o"), strict=False):
            axes.plot(looks, curve, style, color=colour, label=f"{label} reversal, {name}")
        band = chosen[..., 0].min(0), chosen[..., 0].max(0)
        axes.fill_between(looks, *band, color=colour, alpha=0.12)
    axes.set(xlabel="step", ylabel="accuracy on held-out target images, %")
    axes.set_title("mean over the seeds; the band shows the range")
    axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "demo.png", dpi=110)
    return out / "demo.png"


def main() -> None:
    """Runs the demo according to the command line."""
    parser = argparse.ArgumentParser(description="Domain-adversarial training on real digits.")
    parser.add_argument("--backend", choices=("both", "torch", "jax"), default="both")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    parser.add_argument("--quick", action="store_true", help="run only a few steps")
    given = parser.parse_args()
    backends = ("torch", "jax") if given.backend == "both" else (given.backend,)
    run_demo(backends, given.seeds, given.out, given.quick)


if __name__ == "__main__":
    main()
