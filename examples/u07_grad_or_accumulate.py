"""Compares pure gradients, which change no buffer, with gradients that are added to buffers.

Eight threads share the parameters of a digit classifier, and each thread has a shard of the data.
Returned gradients belong to the calling thread, so there are no races. A lock serializes additions
to buffers. docs/grad-or-backward.md explains when to use each interface.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from common import claim, difference, flat, main
from sklearn.datasets import load_digits

THREADS, ROUNDS = 8, 5


def show(gt, backend):
    buffers = {"torch": buffers_torch, "jax": buffers_jax}[backend]
    in_small(gt, buffers)
    xp = gt.xp

    def loss(params, images, labels):
        logits = images @ params["w"] + params["b"]
        return xp.mean(xp.log(xp.sum(xp.exp(logits), axis=1)) - xp.sum(logits * labels, axis=1))

    images, classes = load_digits(return_X_y=True)
    images, labels = images / 16, np.eye(10)[classes]
    params = {"w": gt.asarray(np.zeros((64, 10))), "b": gt.asarray(np.zeros(10))}
    params, read, _ = buffers(gt, params)
    shards = [
        (gt.asarray(images[i::THREADS]), gt.asarray(labels[i::THREADS])) for i in range(THREADS)
    ]
    alone = [flat(gt, gt.grad(loss)(params, *shard)) for shard in shards]
    total = gt.GradientAccumulator()

    def work(shard):
        grads = {}
        for _ in range(ROUNDS):
            grads = gt.grad(loss)(params, *shard)
            total.add(grads, weight=len(shard[0]))
        return flat(gt, grads)

    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(work, shards))
    wrong = sum(not np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    claim(
        f"{THREADS} threads: {wrong} gradients differ from the gradients of one thread", wrong == 0
    )
    claim("the gradient buffers are unchanged", not np.any(read("w")) and not np.any(read("b")))

    full = gt.grad(loss)(params, gt.asarray(images), gt.asarray(labels))
    apart = difference(flat(gt, total.mean()), flat(gt, full))
    claim(
        f"the weighted mean of the gradients differs from the full gradient by {apart:.1e}",
        apart < 1e-12,
    )
    return {"mean": total.mean()}


def in_small(gt, buffers):
    """Compares both interfaces for y = x1^2 + 5 x2 at (3, 1), where the gradients are (6, 5)."""
    x, read, accumulate = buffers(
        gt, {"x1": gt.asarray(np.float64(3)), "x2": gt.asarray(np.float64(1))}
    )
    grads = gt.grad(lambda x: x["x1"] ** 2 + 5 * x["x2"])(x)
    claim(
        "grad returns (6, 5) and does not change the buffers",
        flat(gt, grads).tolist() == [6, 5] and read("x1") == 0 and read("x2") == 0,
    )
    for _ in range(2):
        accumulate({"x1": grads["x1"]})
    claim(
        "accumulating x1 twice adds only to the buffer of x1: (12, 0)",
        read("x1") == 12 and read("x2") == 0,
    )


def buffers_torch(gt, params):
    """Returns params, and functions that read and add to `.grad`; None counts as zero."""
    params = {name: x.requires_grad_() for name, x in params.items()}

    def read(name):
        grad = params[name].grad
        return 0.0 if grad is None else gt.to_numpy(grad)

    return params, read, lambda grads: gt.accumulate_gradients(params, grads)


def buffers_jax(gt, params):
    """Returns params, and functions that read and add to a dictionary of buffer arrays."""
    buffer = {name: 0 * x for name, x in params.items()}
    read = lambda name: gt.to_numpy(buffer[name])
    return params, read, lambda grads: buffer.update(gt.accumulate_gradients(buffer, grads))


if __name__ == "__main__":
    main(show)
