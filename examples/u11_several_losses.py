"""Sums the gradients of several losses and of unequal chunks with the correct weights.

A model predicts the next letter in ten sentences, which are split into chunks of 4, 4 and 2. Each
chunk's loss is the mean over its letters, so its weight is its number of letters. With these
weights a ``GradientAccumulator`` returns the gradient of the mean over all letters; with equal
weights, the gradient is wrong. ``microbatched_value_and_grad`` computes the same gradient in one
call, with a weight for each sentence.
"""

import numpy as np
from common import claim, difference, flat, main

SENTENCES = """
beautiful is better than ugly
explicit is better than implicit
simple is better than complex
complex is better than complicated
flat is better than nested
sparse is better than dense
readability counts
in the face of ambiguity refuse the temptation to guess
now is better than never
if the implementation is hard to explain it may be a bad idea
""".strip().splitlines()
LETTERS = sorted(set("".join(SENTENCES)))
CHUNKS = [SENTENCES[:4], SENTENCES[4:8], SENTENCES[8:]]


def show(gt, backend):
    xp = gt.xp

    def misfit(W, pairs):
        """Returns the mean of -log p(next | letter), where p is the softmax of the letter's row."""
        here, after = pairs
        logits = here @ W
        return xp.mean(xp.log(xp.sum(xp.exp(logits), axis=1)) - xp.sum(logits * after, axis=1))

    def roughness(W, pairs):
        return 0.1 * xp.mean(W**2)

    W = gt.asarray(np.random.default_rng(0).normal(size=(len(LETTERS), len(LETTERS))))
    pairs = lambda sentences: tuple(map(gt.asarray, letter_pairs(sentences)))
    full = gt.grad(misfit)(W, pairs(SENTENCES))

    weighted, equal = gt.GradientAccumulator(), gt.GradientAccumulator()
    for chunk in CHUNKS:
        grads, letters = gt.grad(misfit)(W, pairs(chunk)), len(pairs(chunk)[0])
        weighted.add(grads, weight=letters)
        equal.add(grads)
        print(f"  {len(chunk)} sentences, {letters} letters")
    right, wrong = (difference(flat(gt, a.mean()), flat(gt, full)) for a in (weighted, equal))
    claim(
        f"with chunks weighted by letters, the error of the gradient is {right:.1e}", right < 1e-12
    )
    claim(f"with equal weights, the error is {wrong:.1%}", wrong > 0.01)

    *padded, letters = map(gt.asarray, padded_pairs(SENTENCES))

    def padded_misfit(W, here, after, there):
        """Returns the mean of -log p over padded sentences; the mask `there` is 0 at padding."""
        logits = here @ W
        each = xp.log(xp.sum(xp.exp(logits), axis=2)) - xp.sum(logits * after, axis=2)
        return xp.sum(each * there) / xp.sum(there)

    chunked = gt.microbatched_value_and_grad(padded_misfit, chunk_size=4, weights=letters)
    value, grads = chunked(W, *padded)
    apart = difference(flat(gt, grads), flat(gt, full))
    claim(
        f"the error of microbatched_value_and_grad in chunks of 4, 4 and 2 is {apart:.1e}",
        apart < 1e-12,
    )
    apart = abs(float(value) - float(misfit(W, pairs(SENTENCES))))
    claim(f"the error of the loss is {apart:.1e}", apart < 1e-12)

    both = gt.grad(lambda W: misfit(W, pairs(SENTENCES)) + roughness(W, None))(W)
    losses = gt.GradientAccumulator()
    for loss in (misfit, roughness):
        losses.add(gt.grad(loss)(W, pairs(SENTENCES)))
    apart = difference(flat(gt, losses.sum()), flat(gt, both))
    claim(f"the summed gradients differ from the gradient of the sum by {apart:.1e}", apart < 1e-12)
    return {
        "chunks": weighted.mean(),
        "microbatched_value_and_grad": [value, grads],
        "losses": losses.sum(),
    }


def letter_pairs(sentences):
    """Returns each letter and the next letter, as one-hot rows."""
    one_hot = np.eye(len(LETTERS))
    index = {letter: i for i, letter in enumerate(LETTERS)}
    here = [index[a] for line in sentences for a in line[:-1]]
    after = [index[a] for line in sentences for a in line[1:]]
    return one_hot[here], one_hot[after]


def padded_pairs(sentences):
    """Returns the zero-padded letter pairs of each sentence, a mask, and the numbers of pairs."""
    rows = [letter_pairs([line]) for line in sentences]
    letters = np.array([len(here) for here, _ in rows], dtype=float)
    longest = int(letters.max())
    pad = lambda x: np.pad(x, ((0, longest - len(x)), (0, 0)))
    here, after = (np.stack([pad(row[i]) for row in rows]) for i in (0, 1))
    return here, after, (np.arange(longest) < letters[:, None]).astype(float), letters


if __name__ == "__main__":
    main(show)
