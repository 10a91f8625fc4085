"""What the PyTorch sweep knows not to agree, and why: kinks, limits and defects of PyTorch.

Each line is a `LedgerLine`: the first that covers an outcome tells it, and one that tells nothing
fails the sweep. What is simply a defect of gradtools has no line here.
"""

from __future__ import annotations

from gradtools.conformance.sweeps import DIFFERS, LEFT_OUT, RAISED, REFUSED, LedgerLine
from gradtools.conformance.sweeps.torch_programs import BY_THE_TABLE, EVERY_WAY

REVERSE_MODE = "PyTorch's own reverse mode"
_CASTS = ("bfloat16", "half", "float", "cfloat", "chalf")


def _lines(
    programs: tuple[str, ...],
    ways: tuple[str, ...],
    result: str,
    reason: str,
    upstream: str = "",
    dtype: str = "*",
    whole: bool = False,
) -> tuple[LedgerLine, ...]:
    return tuple(
        LedgerLine(program, way, result, reason, upstream, dtype, whole)
        for program in programs
        for way in ways
    )


NOTHING = (
    LedgerLine("*", BY_THE_TABLE, LEFT_OUT, "PyTorch's table says so", whole=True),
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
    *_lines(
        ("nn.LPPool?d",),
        (EVERY_WAY,),
        LEFT_OUT,
        "the root of a negative sum is not a number",
        whole=True,
    ),
    *_lines(
        ("nn.KLDivLoss",),
        (EVERY_WAY,),
        LEFT_OUT,
        "the table takes logarithms of negative numbers",
        whole=True,
    ),
    *_lines(
        ("renorm",),
        (EVERY_WAY,),
        LEFT_OUT,
        "PyTorch's gradient of the maximum norm is NaN in complex64; no report was found",
        dtype="complex64",
        whole=True,
    ),
    *_lines(
        ("*",),
        ("vmap of *", "torch.func.grad of *"),
        LEFT_OUT,
        "torch.func's own vjp or jvp raises there, too",
        whole=True,
    ),
)

KINKS = (
    *_lines(
        ("nn.functional.cosine_embedding_loss", "nn.functional.hinge_embedding_loss"),
        ("*",),
        LEFT_OUT,
        "the loss branches on whether a target is 1 or -1, and the target is differentiated too",
    ),
    *_lines(
        ("linalg.norm.subgradients_at_zero",),
        ("hvp*", "frozen, second order"),
        DIFFERS,
        "a norm has no second derivative at zero: NaN by double backward, 0 in forward mode",
    ),
    *_lines(
        ("linalg.norm.subgradients_at_zero",),
        ("linearize of grad", "jacobian, forward over reverse"),
        DIFFERS,
        "a norm has no second derivative at zero: NaN by double backward, 0 in forward mode",
        whole=True,
    ),
    *_lines(
        ("linalg.norm.subgradients_at_zero",),
        ("jvp of jvp",),
        LEFT_OUT,
        "a norm has no second derivative at zero",
        whole=True,
    ),
    *_lines(
        ("corrcoef",),
        ("*",),
        DIFFERS,
        "of two observations the correlation is 1 or -1: its derivative is rounding noise",
        whole=True,  # noise differs from one processor to the next
    ),
    *_lines(
        ("masked.logaddexp",),
        ("*",),
        DIFFERS,
        "what is masked out is -inf, of which PyTorch's derivatives are NaN",
        whole=True,
    ),
)

CONVENTIONS = (
    *_lines(
        _CASTS,
        ("*",),
        DIFFERS,
        "a cast to fewer digits: a derivative has no more of them, a finite difference fewer",
    ),
    *_lines(
        ("float", "cfloat"),
        ("*",),
        LEFT_OUT,
        "a cast to fewer digits: finite differences do not settle",
        whole=True,
    ),
    *(
        line
        for result in (DIFFERS, LEFT_OUT)
        for line in _lines(
            ("cov",), ("*",), result, "one sample's weights are in single precision", whole=True
        )
    ),
    *_lines(
        ("svd_lowrank", "pca_lowrank"),
        ("jvp*", "linearize"),
        DIFFERS,
        "single precision: at the limit of its tolerance",
        dtype="complex64",
        whole=True,
    ),
    *_lines(
        ("nn.BCELoss", "nn.functional.binary_cross_entropy"),
        ("custom_rule by defjvp, vjp",),
        DIFFERS,
        "reverse mode adds 1e-12 to a denominator, forward mode does not",
        whole=True,
    ),
    *_lines(
        ("normal", "normal.number_mean"),
        (REVERSE_MODE,),
        DIFFERS,
        "a drawn number is a constant to PyTorch, though with one seed it moves with its mean",
    ),
    *_lines(
        ("nn.functional.dropout", "nn.functional.alpha_dropout"),
        ("jacobian, forward*",),
        DIFFERS,
        "under vmap PyTorch draws another mask from the same seed",
        whole=True,
    ),
    *_lines(
        (
            "CubeGenVmapAutogradFunction",
            "NumpySortAutogradFunction",
            "ScaleGradGenVmapAutogradFunction",
            "ZeroGradientsGenVmapAutogradFunction",
        ),
        ("*",),
        DIFFERS,
        "the table's own Function declares another derivative than that of what it computes",
    ),
    *_lines(
        ("CubeGenVmapAutogradFunction",),
        ("*",),
        REFUSED,
        "the table's own Function has a backward that is not linear",
    ),
    *_lines(
        ("NumpyCubeNotComposableAutogradFunction",),
        ("*",),
        DIFFERS,
        "the table's own Function does not multiply by the gradient that comes in",
    ),
    *_lines(
        ("nn.functional.max_unpool3d", "as_strided_scatter"),
        ("*",),
        DIFFERS,
        "several entries are written to one place: which one stays is not determined",
    ),
    *_lines(
        ("nn.functional.max_unpool?d", "as_strided_scatter"),
        ("frozen, second order",),
        REFUSED,
        "the same: reverse mode is not the transpose of forward mode, and frozen compares them",
    ),
    *_lines(
        ("nn.functional.max_unpool1d", "nn.functional.max_unpool2d"),
        ("*",),
        DIFFERS,
        "several entries are written to one place: which one stays is not determined",
        whole=True,
    ),
    *_lines(
        ("zero_",),
        ("dependence",),
        DIFFERS,
        "nothing of the input is left: reverse mode gives a zero, no data flows",
        whole=True,
    ),
    *_lines(
        ("linalg.eig", "linalg.eigh"),
        ("grad of jvp",),
        REFUSED,
        "PyTorch's own check: a tangent of eigenvectors depends on their phase",
        whole=True,
    ),
    *(
        line
        for name, orders in (("linalg.eig", ("vjp", "hvp")), ("linalg.eigh", ("vjp",)))
        for line in _lines(
            (name,),
            tuple([f"custom_rule by defjvp, {order}" for order in orders]),
            DIFFERS,
            "PyTorch's tangent of eigenvectors has a derivative of NaN, to the tangent too",
            whole=True,
        )
    ),
    *_lines(
        ("nn.Transformer*",),
        ("custom_rule by def*, hvp",),
        REFUSED,
        "fused attention pulled back by torch.func has first derivatives alone",
        whole=True,
    ),
    *_lines(
        ("NumpySplitCopy*CustomOp",),
        ("jacobian, reverse", "hessian"),
        RAISED,
        "the table's own vmap rule takes several tensors for one",
        whole=True,
    ),
)

NO_FORWARD_MODE = (
    *_lines(
        (
            "cdist",
            "nn.CTCLoss",
            "nn.Multi*MarginLoss",
            "nn.functional.ctc_loss",
            "nn.functional.embedding_bag",
            "nn.functional.multi*_margin_loss",
            "nn.functional.pdist",
            "_segment_reduce.*",
            "to_sparse",
        ),
        ("*",),
        REFUSED,
        "PyTorch has neither forward mode nor double backward of it",
    ),
    *_lines(
        ("nn.functional.hardsigmoid*",),
        ("*",),
        REFUSED,
        "PyTorch has no double backward of it; forward over reverse is right",
    ),
    *_lines(
        ("*CustomOp", "nn.functional.linear_cross_entropy.chunked*", "NumpyCubeNotComposable*"),
        ("*",),
        REFUSED,
        "it has a reverse rule only, which torch.func does not take",
    ),
)

TANGENTS = (
    *_lines(
        ("*native_batch_norm*", "_batch_norm_with_update", "native_layer_norm"),
        ("*",),
        REFUSED,
        "called in torch.ops.aten, where the derivative of the tangent lacks a term; by "
        "torch.nn.functional it goes another way",
        "torch#196699",
        whole=True,
    ),
    *_lines(
        (
            "nn.BatchNorm?d*",
            "nn.InstanceNorm?d*",
            "nn.functional.batch_norm",
            "nn.functional.instance_norm",
            "nn.LayerNorm",
            "nn.functional.layer_norm",
        ),
        ("torch.func.grad of jvp", "custom_rule by defjvp, hvp"),
        REFUSED,
        "a third derivative in reverse mode, which lacks a term",
        "torch#186256",
        whole=True,
    ),
    *_lines(
        ("index_reduce.*, in place*", "nn.functional.rrelu, in place*"),
        ("*",),
        REFUSED,
        "PyTorch has no forward mode of it in place",
        whole=True,
    ),
    *_lines(
        ("nn.functional.rrelu",),
        ("jacobian, forward*",),
        RAISED,
        "vmap has no rule for its random numbers",
        whole=True,
    ),
    *_lines(
        ("nn.functional.hardsigmoid*",),
        ("custom_rule*",),
        DIFFERS,
        "PyTorch's kernel has 1/6 in single precision",
        whole=True,
    ),
)

WITHIN_TRANSFORMS = (
    *_lines(
        ("as_strided_scatter",),
        ("jacobian, forward*",),
        REFUSED,
        "PyTorch's vmap has no rule for it",
        whole=True,
    ),
    *_lines(
        ("nn.RNN, evaluation",),
        ("jacobian, forward*",),
        REFUSED,
        "it adds in place to what vmap does not map",
        whole=True,
    ),
    *_lines(
        ("tensor_split",),
        ("custom_rule*",),
        REFUSED,
        "torch.func's transforms hide the numbers of the tensor that says where",
        whole=True,
    ),
    *_lines(
        ("linalg.eigh",),
        ("custom_rule*", "torch.func.grad of jvp"),
        REFUSED,
        "its backward pass has no derivative inside of torch.func's transforms",
        dtype="complex128",
        whole=True,
    ),
    *_lines(
        ("to_sparse",),
        ("*, tensor subclass",),
        RAISED,
        "PyTorch makes no sparse tensor of a subclass",
        whole=True,
    ),
    *_lines(
        ("nn.functional.conv_transpose?d",),
        ("linearize of grad",),
        REFUSED,
        "of output_padding its backward pass cannot be differentiated twice",
        whole=True,
    ),
)

_UNCLAIMED = ", in place beyond the table"
_INTEGERS = ", of integers too"

UNCLAIMED = (
    *(
        line
        for result, names in (
            (DIFFERS, ("*float*", "*half", "as_strided_scatter", "nn.functional.max_unpool3d")),
            (DIFFERS, ("native_group_norm", "normal")),
            (REFUSED, ("nn.functional.multi*margin_loss", "nn.functional.ctc_loss", "to_sparse")),
            (REFUSED, ("nn.functional.embedding_bag",)),
            (LEFT_OUT, ("__rpow__",)),
        )
        for line in _lines(
            tuple([f"{name}{_INTEGERS}" for name in names]),
            ("*",),
            result,
            "as of floating numbers alone",
            whole=True,
        )
    ),
    *_lines(
        (f"ldexp{_INTEGERS}",),
        (REVERSE_MODE,),
        DIFFERS,
        "2 to a negative integer is taken in integers: zero; gradtools is right",
        "torch#186556",
        whole=True,
    ),
    *_lines(
        (f"nn.functional.silu.complex{_UNCLAIMED}",),
        (REVERSE_MODE,),
        DIFFERS,
        "a conjugate is missing; gradtools is right",
        whole=True,
    ),
    *_lines(
        (f"nn.functional.mse_loss{_INTEGERS}", f"nn.functional.smooth_l1_loss{_INTEGERS}"),
        ("jvp*",),
        RAISED,
        "PyTorch's forward-mode rule gives the tangent the integer target's dtype",
        whole=True,
    ),
)

DEFECTS = (
    *_lines(
        (f"logical_*{_UNCLAIMED}",),
        (REVERSE_MODE,),
        DIFFERS,
        "the gradient of the numbers that were overwritten",
        whole=True,
    ),
    *_lines(
        ("native_group_norm",),
        ("vjp, outputs one by one",),
        DIFFERS,
        "the gradient of the mean or the reciprocal deviation alone",
        "torch#183980",
    ),
    *_lines(
        ("native_group_norm",),
        ("jacobian, reverse*",),
        DIFFERS,
        "the gradient of the mean or the reciprocal deviation alone",
        "torch#183980",
        whole=True,
    ),
    *_lines(
        ("nn.CTCLoss",),
        (REVERSE_MODE,),
        DIFFERS,
        "its gradient is that of log probabilities which log_softmax made",
        "torch#52241",
    ),
)

LEDGER: tuple[LedgerLine, ...] = (
    *NOTHING,
    *KINKS,
    *CONVENTIONS,
    *NO_FORWARD_MODE,
    *TANGENTS,
    *WITHIN_TRANSFORMS,
    *UNCLAIMED,
    *DEFECTS,
)
