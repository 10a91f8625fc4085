"""Computes the gradients of f with respect to y and of -f with respect to x in one evaluation.

x = g(z) and y = g(w) are features that an encoder g computes with shared parameters: w are real
images of digits, and z are the same images with noise. f measures the distance between the features
x and y. In adversarial training x maximizes f and y minimizes f. Without gradtools, f is evaluated
twice, with a stopped gradient in each evaluation. With ``reverse_gradient(x)``, one evaluation
suffices.
"""

import numpy as np
from common import claim, counter, difference, flat, main
from sklearn.datasets import load_digits

STEPS, RATE = 30, 0.1


def show(gt, backend):
    xp = gt.xp
    count, evaluations = counter(backend)

    def g(params, images):
        hidden = xp.tanh(images @ params["w1"] + params["b1"])
        return hidden @ params["w2"] + params["b2"]

    def f(x, y):
        count()
        return xp.mean(xp.sqrt(1 + xp.sum((x - y) ** 2, axis=1)))

    def one_evaluation(params, z, w):
        return gt.grad(lambda p: f(gt.reverse_gradient(g(p, z)), g(p, w)))(params)

    def two_evaluations(params, z, w):
        def players(p):
            x, y = g(p, z), g(p, w)
            return f(gt.stop_gradient(x), y) - f(x, gt.stop_gradient(y))

        return gt.grad(players)(params)

    def train(gradient):
        params, before = {n: gt.asarray(a) for n, a in weights().items()}, evaluations()
        for _ in range(STEPS):
            grads = gradient(params, z, w)
            params = {name: params[name] - RATE * grads[name] for name in params}
        return params, evaluations() - before

    z, w = map(gt.asarray, images())
    if backend == "jax":
        one_evaluation, two_evaluations = map(gt.compile, (one_evaluation, two_evaluations))
    (params, ones), (plain, twos) = train(one_evaluation), train(two_evaluations)
    apart = difference(flat(gt, params), flat(gt, plain))

    claim(f"reverse_gradient: {ones} evaluations of f in {STEPS} steps", ones == STEPS)
    claim(f"stop_gradient, without gradtools: {twos} evaluations", twos == 2 * STEPS)
    claim(f"parameters after {STEPS} steps differ by {apart:.1e}", apart < 1e-12)
    return {"parameters": params, "gradients": one_evaluation(params, z, w)}


def images():
    clean = load_digits().data[:64] / 16
    return clean + np.random.default_rng(0).normal(scale=0.3, size=clean.shape), clean


def weights():
    rng = np.random.default_rng(1)
    return {
        "w1": rng.normal(scale=0.1, size=(64, 32)),
        "b1": np.zeros(32),
        "w2": rng.normal(scale=0.2, size=(32, 8)),
        "b2": np.zeros(8),
    }


if __name__ == "__main__":
    main(show)
