"""Computes the gradient of the mean over all tokens for ranks and chunks with unequal token counts.

Each of two ranks accumulates gradients over three chunks, and one chunk contains only padding. The
mean of all chunk means differs from the mean over tokens. The mean over ranks of each rank's token
mean, which DistributedDataParallel computes, also differs. ``GradientAccumulator.mean`` divides the
sum over ranks and chunks by the total number of tokens. In PyTorch the ranks are two processes; in
JAX they are an axis of ``vmap``.
"""

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from common import claim, difference, flat, main

RANKS, CHUNKS = 2, ((0, 3), (3, 8), (8, 10))


def batch():
    """Returns ten sentences of five positions for each rank, and a mask that is 0 at padding."""
    rng = np.random.default_rng(0)
    x, lengths = rng.normal(size=(RANKS, 10, 5, 3)), rng.integers(0, 6, size=(RANKS, 10))
    lengths[1] //= 2
    lengths[1, 8:] = 0  # the last chunk of rank 1 is only padding
    return x, (np.arange(5) < lengths[..., None]).astype(float)


def loss(w, x, there):
    """Returns the mean loss over the tokens that are not padding."""
    return (there * ((x @ w) ** 2 - x[..., 0]) ** 2).sum() / there.sum()


def of_one_rank(gt, x, there, everywhere):
    """Returns mean gradients: over all ranks, and over this rank with and without weights."""
    w = gt.asarray(np.array([0.5, -1.0, 2.0]))
    weighted, equal = gt.GradientAccumulator(), gt.GradientAccumulator()
    for a, b in CHUNKS:
        grads = gt.grad(loss)(w, x[a:b], there[a:b])
        weighted.add(grads, weight=there[a:b].sum())
        equal.add(grads, weight=(there[a:b].sum() > 0) * 1.0)
    return [weighted.mean(**everywhere), weighted.mean(), equal.mean()]


def in_process(rank, folder):
    """Runs one of two ranks in a process and returns its results."""
    import torch.distributed as dist

    import gradtools.torch as gt

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS
    )
    x, there = batch()
    mine = gt.asarray(x[rank]), gt.asarray(there[rank])
    found = of_one_rank(gt, *mine, {"group": dist.group.WORLD})
    dist.barrier()  # waits until both ranks have finished
    dist.destroy_process_group()
    return np.stack([gt.to_numpy(g) for g in found])


def of_all_ranks(gt, backend):
    """Returns the mean gradients that each rank computes."""
    if backend == "jax":
        of_rank = lambda x, there: gt.xp.stack(of_one_rank(gt, x, there, {"axis_name": "rank"}))
        import jax

        return gt.to_numpy(jax.vmap(of_rank, axis_name="rank")(*map(gt.asarray, batch())))
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(RANKS, mp_context=spawn) as pool,
    ):
        return np.stack([*pool.map(in_process, range(RANKS), [folder] * RANKS)])


def show(gt, backend):
    x, there = (gt.asarray(a.reshape(-1, *a.shape[2:])) for a in batch())
    full = gt.grad(loss)(gt.asarray(np.array([0.5, -1.0, 2.0])), x, there)
    full = flat(gt, full)
    found = of_all_ranks(gt, backend)
    weighted, own, equal = (found[:, k] for k in range(3))
    right = max(difference(g, full) for g in weighted)
    claim(f"the error of the mean over ranks and chunks is {right:.1e} on each rank", right < 1e-12)
    ddp, naive = (difference(g.mean(0), full) for g in (own, equal))
    claim(f"the error of the mean of the ranks' token means is {ddp:.1%}", ddp > 0.01)
    claim(f"the error of the mean of all chunks' means is {naive:.1%}", naive > 0.01)
    return {"mean": weighted.ravel().tolist()}


if __name__ == "__main__":
    main(show)
