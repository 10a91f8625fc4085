"""What the PyTorch sweep knows not to agree, and why: kinks, limits and defects of PyTorch.

Each line is a `Known`: the first that covers an outcome tells it, and one that tells nothing fails
the sweep. What is simply a defect of gradtools has no line here.
"""

from __future__ import annotations

from gradtools.testing.sweeps import DIFFERS, LEFT_OUT, REFUSED, Known
from gradtools.testing.sweeps.torch_programs import BY_THE_TABLE, EVERY_WAY

REVERSE_MODE = "PyTorch's own reverse mode"
_FORWARD = ("jvp", "hvp, forward over reverse")


def _lines(
    programs: tuple[str, ...],
    ways: tuple[str, ...],
    result: str,
    reason: str,
    upstream: str = "",
    dtype: str = "*",
    whole: bool = False,
) -> tuple[Known, ...]:
    return tuple(
        Known(program, way, result, reason, upstream, dtype, whole)
        for program in programs
        for way in ways
    )


NOTHING = (
    Known("*", BY_THE_TABLE, LEFT_OUT, "PyTorch's table says so", whole=True),
    *_lines(
        ("sparse.sampled_addmm", "sparse.mm.reduce"),
        (EVERY_WAY,),
        LEFT_OUT,
        "its operands are sparse matrices; the operators of gradtools take strided ones",
    ),
    *_lines(
        ("__rpow__",),
        (EVERY_WAY,),
        LEFT_OUT,
        "a negative number to a real power is not a number",
    ),
)

KINKS = (
    *_lines(
        ("nn.functional.cosine_embedding_loss", "nn.functional.hinge_embedding_loss"),
        (REVERSE_MODE, "hvp*", "frozen, second order"),
        LEFT_OUT,
        "the loss branches on whether a target is 1 or -1, and the target is differentiated too",
    ),
    *_lines(
        ("linalg.norm.subgradients_at_zero",),
        ("hvp, forward over reverse", "frozen, second order"),
        DIFFERS,
        "a norm has no second derivative at zero: NaN by double backward, 0 in forward mode",
    ),
    *_lines(
        ("corrcoef",),
        ("*",),
        DIFFERS,
        "of two observations the correlation is 1 or -1: its derivative is rounding noise",
    ),
)

CONVENTIONS = (
    *_lines(
        ("bfloat16", "half", "float", "cfloat", "chalf"),
        ("*",),
        DIFFERS,
        "a cast to fewer digits: a derivative has no more of them, a finite difference fewer",
    ),
    *_lines(
        ("normal", "normal.number_mean"),
        (REVERSE_MODE,),
        DIFFERS,
        "a drawn number is a constant to PyTorch, though with one seed it moves with its mean",
    ),
    *_lines(
        ("ScaleGradGenVmapAutogradFunction", "ZeroGradientsGenVmapAutogradFunction"),
        ("*",),
        DIFFERS,
        "the table's own Function declares another derivative than that of what it computes",
    ),
    *_lines(
        ("nn.functional.max_unpool*", "as_strided_scatter"),
        ("*",),
        DIFFERS,
        "several entries are written to one place: which one stays is not determined",
    ),
)

NO_FORWARD_MODE = (
    *_lines(
        (
            "cdist",
            "cholesky",
            "grid_sampler_?d",
            "index_reduce.*",
            "native_dropout_backward",
            "nn.CTCLoss",
            "nn.Multi*MarginLoss",
            "nn.Transformer*",
            "nn.functional.ctc_loss",
            "nn.functional.embedding_bag",
            "nn.functional.grid_sample",
            "nn.functional.multi*_margin_loss",
            "nn.functional.pdist",
            "ormqr",
            "_segment_reduce.*",
            "to_sparse",
        ),
        _FORWARD,
        REFUSED,
        "PyTorch has no forward mode of it",
    ),
    *_lines(
        (
            "nn.HuberLoss",
            "nn.SoftMarginLoss",
            "nn.functional.hardsigmoid",
            "nn.functional.huber_loss",
            "nn.functional.soft_margin_loss",
        ),
        ("hvp, forward over reverse",),
        REFUSED,
        "PyTorch has no forward mode of its backward formula; reverse over reverse is right",
    ),
    *_lines(
        ("*CustomOp", "nn.functional.linear_cross_entropy.chunked*", "NumpyCubeNotComposable*"),
        ("hvp, forward over reverse",),
        REFUSED,
        "the operator has a reverse rule only",
    ),
    *_lines(
        ("NumpyCubeNotComposable*",),
        ("jvp", "frozen, second order"),
        REFUSED,
        "the Function has a reverse rule only, which may be differentiated once",
    ),
)

DEFECTS = (
    *_lines(
        ("nn.CTCLoss",),
        (REVERSE_MODE,),
        DIFFERS,
        "its gradient is that of log probabilities which log_softmax made",
        "torch#52241",
    ),
)

LEDGER: tuple[Known, ...] = (*NOTHING, *KINKS, *CONVENTIONS, *NO_FORWARD_MODE, *DEFECTS)
