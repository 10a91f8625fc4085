"""Finds the line at which one term of a style-transfer loss loses its gradient, with `why_zero`.

The style of one photograph is transferred to another under two constraints: smoothness and a given
fraction of bright pixels (the volume fraction). The fraction is computed on a binarized image in
NumPy, so its gradient is lost silently, and the term has no effect. ``why_zero`` reports the line
and the fix, ``straight_through`` with a sigmoid surrogate. A picture is written to ``out/``.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
from common import claim, main
from sklearn.datasets import load_sample_image
from tqdm import tqdm

TARGET = 0.6  # the desired fraction of bright pixels
STEPS = 60
CHANNELS = (3, 8, 12)
WEIGHTS = {"content": 1.0, "style": 3.0, "smooth": 0.02, "fraction": 2.0}


def show(gt, backend):
    xp = gt.xp
    photo, painting = (gt.asarray(sample(name)) for name in ("flower.jpg", "china.jpg"))
    filters = [gt.asarray(w) for w in fixed_filters()]

    def brightness(image):
        return xp.mean(image, axis=2)

    def fraction_through_numpy(image):
        """Computes the bright fraction with NumPy: the value is right, but the gradient is lost."""
        if backend == "torch":
            import torch

            bright = brightness(image).detach().numpy() > 0.5
            return torch.tensor(bright.mean())
        import jax

        count = lambda b: np.asarray(np.mean(np.asarray(b) > 0.5))
        like = jax.ShapeDtypeStruct((), np.float64)
        return jax.pure_callback(count, like, jax.lax.stop_gradient(brightness(image)))

    is_bright = gt.straight_through(
        lambda b: b > 0.5, surrogate=lambda b: 1 / (1 + xp.exp(-10 * (b - 0.5)))
    )

    def fraction_fixed(image):
        return xp.mean(is_bright(brightness(image)))

    def features(image):
        """Returns the activations of each layer of a small fixed network."""
        found = []
        for weights in filters:
            image = rectified(xp, convolved(image, weights))
            found.append(image)
            image = pooled(xp, image)
        return found

    content, style = features(photo)[-1], [gram(xp, x) for x in features(painting)]

    def loss_with(fraction):
        def terms(image):
            here = features(image)
            return {
                "content": xp.mean((here[-1] - content) ** 2),
                "style": sum(
                    xp.mean((gram(xp, x) - g) ** 2) for x, g in zip(here, style, strict=True)
                ),
                "smooth": total_variation(xp, image),
                "fraction": (fraction(image) - TARGET) ** 2,
            }

        return lambda image: sum(WEIGHTS[name] * term for name, term in terms(image).items())

    ignored = trained(gt, backend, loss_with(fraction_through_numpy), photo)
    before, after = (float(fraction_fixed(x)) for x in (photo, ignored))
    claim(
        f"computed in NumPy, the fraction goes from {before:.2f} to {after:.2f}, not {TARGET}",
        abs(after - TARGET) > 0.1,
    )

    report = gt.why_zero(loss_with(fraction_through_numpy), photo)
    print("\n".join(f"  | {line}" for line in str(report).splitlines()))
    places = {finding.source.function for finding in report if finding.source}
    claim("why_zero names fraction_through_numpy", places == {"fraction_through_numpy"})
    kinds = {finding.kind for finding in report}
    claim(f"the kinds of the findings are {', '.join(sorted(kinds))}", "left_framework" in kinds)
    claim(
        "each finding concerns one term of the loss", not any(finding.whole for finding in report)
    )

    fixed = trained(gt, backend, loss_with(fraction_fixed), photo)
    reached = float(fraction_fixed(fixed))
    claim(
        f"with straight_through the volume fraction reaches {reached:.3f}",
        abs(reached - TARGET) < 0.01,
    )
    claim("why_zero reports no lost gradient", not gt.why_zero(loss_with(fraction_fixed), photo))
    draw(gt, backend, {"photograph": photo, "term ignored": ignored, "term fixed": fixed})
    return {"ignored": ignored, "fixed": fixed}


def trained(gt, backend, loss, image):
    """Returns the image after STEPS steps of gradient descent with momentum."""
    step = gt.value_and_grad(loss)
    step = gt.compile(step) if backend == "jax" else step
    speed = 0.0 * image
    for _ in tqdm(range(STEPS), desc=f"  {backend}", leave=False, disable=None):
        _, slope = step(image)
        speed = 0.9 * speed - 25.0 * slope
        image = gt.xp.clip(image + speed, 0.0, 1.0)
    return image


def sample(name):
    """Loads a photograph from scikit-learn: 53 by 80 pixels with values from 0 to 1."""
    image = load_sample_image(name)[:424, :640] / 255.0
    return image.reshape(53, 8, 80, 8, 3).mean(axis=(1, 3))


def fixed_filters():
    """Returns random filters of 3 by 3 pixels, which are not trained."""
    rng = np.random.default_rng(0)
    shapes = [(3, 3, a, b) for a, b in pairwise(CHANNELS)]
    return [rng.normal(scale=(2 / (9 * shape[2])) ** 0.5, size=shape) for shape in shapes]


def convolved(image, weights):
    """Convolves an image (h, w, a) with weights (3, 3, a, b); returns (h - 2, w - 2, b)."""
    h, w = image.shape[0] - 2, image.shape[1] - 2
    return sum(image[i : i + h, j : j + w] @ weights[i, j] for i in range(3) for j in range(3))


def rectified(xp, x):
    return xp.where(x > 0, x, 0.1 * x)


def pooled(xp, x):
    """Averages blocks of 2 by 2 pixels."""
    h, w = x.shape[0] // 2, x.shape[1] // 2
    return xp.mean(xp.reshape(x[: 2 * h, : 2 * w], (h, 2, w, 2, -1)), axis=(1, 3))


def gram(xp, x):
    """Returns the correlations of channels, which represent the style (Gatys et al.)."""
    flat = xp.reshape(x, (-1, x.shape[2]))
    return flat.T @ flat / flat.shape[0]


def total_variation(xp, image):
    return xp.mean((image[1:] - image[:-1]) ** 2) + xp.mean((image[:, 1:] - image[:, :-1]) ** 2)


def draw(gt, backend, images):
    """Draws the images, and the bright pixels of each image below it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(images), figsize=(9, 4.4), layout="constrained")
    for (name, image), (above, below) in zip(images.items(), axes.T, strict=True):
        pixels = gt.to_numpy(image)
        bright = pixels.mean(axis=2) > 0.5
        above.imshow(pixels)
        above.set_title(name)
        below.imshow(bright, cmap="gray", vmin=0, vmax=1)
        below.set_title(f"bright: {bright.mean():.2f} (target {TARGET})")
    for axis in axes.flat:
        axis.set_axis_off()
    path = Path(__file__).parents[1] / "out" / f"u10_lost_gradient_{backend}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"  picture: out/{path.name}")


if __name__ == "__main__":
    main(show, tolerance=1e-10)
