"""What the PyTorch sweep knows not to agree, and why: kinks, limits and defects of PyTorch.

The first line that covers an outcome tells it, and one that tells nothing fails the sweep; how a
table is read, `ledger_lines` says. What is simply a defect of gradtools has no line here.
"""

from __future__ import annotations

from tests.support.sweeps import LedgerLine, ledger_lines

REVERSE_MODE = "PyTorch's own reverse mode"

DEFECTS = ledger_lines("""
logical_*, in place beyond the table | PyTorch's own reverse mode | differs, whole
    the gradient of the numbers that were overwritten
native_group_norm | vjp, outputs one by one | differs, torch#183980
    the gradient of the mean or the reciprocal deviation alone
native_group_norm | jacobian, reverse* | differs, whole, torch#183980
    the gradient of the mean or the reciprocal deviation alone
nn.CTCLoss | PyTorch's own reverse mode | differs, torch#52241
    its gradient is that of log probabilities which log_softmax made
*CustomOp; nn.functional.linear_cross_entropy.chunked* | jvp* | differs
    PyTorch's own: of an operator with a reverse rule only it drops tangents without an error
nn.functional.linear_cross_entropy.chunked | hvp, reverse over reverse; frozen, second order |
differs
    PyTorch's own: its backward pass is differentiated as a constant
nn.functional.linear_cross_entropy.chunked* | hvp, reverse over reverse | raised
    PyTorch's own: its backward pass writes into out=..., which autograd cannot differentiate
cholesky_inverse | jvp*; hvp, forward over reverse; frozen, second order | differs, torch#196682
    PyTorch's own forward mode is wrong
scatter_reduce.prod | jvp*; hvp, forward over reverse; hvp, inputs one by one; frozen, second order
| differs, torch#196702
    PyTorch's own forward mode is wrong
triangular_solve | jvp*; hvp, forward over reverse; hvp, inputs one by one; frozen, second order |
differs, torch#196707
    PyTorch's own forward mode is wrong
""")

LEDGER: tuple[LedgerLine, ...] = (
    *ledger_lines("""
# There is nothing to compare
* | every way, by the table | left out, whole
    PyTorch's table says so
sparse.sampled_addmm; sparse.mm.reduce | every way | left out
    its operands are sparse matrices; the operators of gradtools take strided ones
__rpow__ | every way | left out
    a negative number to a real power is not a number
nn.LPPool?d | every way | left out, whole
    the root of a negative sum is not a number
nn.KLDivLoss | every way | left out, whole
    the table takes logarithms of negative numbers
renorm | every way | left out, whole, complex64
    PyTorch's gradient of the maximum norm is NaN in complex64; no report was found
* | vmap of *; torch.func.grad of * | left out, whole
    torch.func's own vjp or jvp raises there, too

# Kinks
nn.functional.cosine_embedding_loss; nn.functional.hinge_embedding_loss | * | left out
    the loss branches on whether a target is 1 or -1, and the target is differentiated too
linalg.norm.subgradients_at_zero | hvp*; frozen, second order | differs
    a norm has no second derivative at zero: NaN by double backward, 0 in forward mode
linalg.norm.subgradients_at_zero | linearize of grad; jacobian, forward over reverse | differs,
whole
    a norm has no second derivative at zero: NaN by double backward, 0 in forward mode
linalg.norm.subgradients_at_zero | jvp of jvp | left out, whole
    a norm has no second derivative at zero
corrcoef | * | differs, whole
    of two observations the correlation is 1 or -1: its derivative is rounding noise, which differs
    from one processor to the next
masked.logaddexp | * | differs, whole
    what is masked out is -inf, of which PyTorch's derivatives are NaN

# Conventions
bfloat16; half; float; cfloat; chalf | * | differs
    a cast to fewer digits: a derivative has no more of them, a finite difference fewer
float; cfloat | * | left out, whole
    a cast to fewer digits: finite differences do not settle
cov | * | differs, whole
    one sample's weights are in single precision
cov | * | left out, whole
    one sample's weights are in single precision
svd_lowrank; pca_lowrank | jvp*; linearize | differs, whole, complex64
    single precision: at the limit of its tolerance
nn.BCELoss; nn.functional.binary_cross_entropy | custom_rule by defjvp, vjp | differs, whole
    reverse mode adds 1e-12 to a denominator, forward mode does not
normal; normal.number_mean | PyTorch's own reverse mode | differs
    a drawn number is a constant to PyTorch, though with one seed it moves with its mean
nn.functional.dropout; nn.functional.alpha_dropout | jacobian, forward* | differs, whole
    under vmap PyTorch draws another mask from the same seed
CubeGenVmapAutogradFunction; NumpySortAutogradFunction; ScaleGradGenVmapAutogradFunction;
ZeroGradientsGenVmapAutogradFunction | * | differs
    the table's own Function declares another derivative than that of what it computes
NumpyCubeNotComposableAutogradFunction | * | differs
    the table's own Function does not multiply by the gradient that comes in
nn.functional.max_unpool3d; as_strided_scatter | * | differs
    several entries are written to one place: which one stays is not determined
nn.functional.max_unpool1d; nn.functional.max_unpool2d | * | differs, whole
    several entries are written to one place: which one stays is not determined
zero_ | dependence | differs, whole
    nothing of the input is left: reverse mode gives a zero, no data flows
linalg.eig; linalg.eigh | grad of jvp | refused, whole
    PyTorch's own check: a tangent of eigenvectors depends on their phase
linalg.eig | custom_rule by defjvp, vjp; custom_rule by defjvp, hvp | differs, whole
    PyTorch's tangent of eigenvectors has a derivative of NaN, to the tangent too
linalg.eigh | custom_rule by defjvp, vjp | differs, whole
    PyTorch's tangent of eigenvectors has a derivative of NaN, to the tangent too
nn.Transformer* | custom_rule by def*, hvp | refused, whole
    fused attention pulled back by torch.func has first derivatives alone
NumpySplitCopy*CustomOp | jacobian, reverse; hessian | raised, whole
    the table's own vmap rule takes several tensors for one

# No forward mode
nn.CTCLoss; nn.Multi*MarginLoss; nn.functional.ctc_loss; nn.functional.embedding_bag;
nn.functional.multi*_margin_loss; _segment_reduce.*; to_sparse | * | refused
    PyTorch has neither forward mode nor double backward of it
*CustomOp; nn.functional.linear_cross_entropy.chunked*; NumpyCubeNotComposable* | * | refused
    it has a reverse rule only, which torch.func does not take

index_reduce.*; native_dropout_backward; nn.functional.grid_sample; grid_sampler_?d; cdist;
nn.functional.pdist; cholesky; ormqr | jvp*; hvp, forward over reverse; hvp, inputs one by one |
refused
    PyTorch has no forward mode of it
nn.functional.soft_margin_loss; nn.functional.huber_loss; nn.functional.hardsigmoid;
nn.SoftMarginLoss; nn.HuberLoss | hvp, forward over reverse; hvp, inputs one by one
| refused
    PyTorch has no forward mode of its backward pass
nn.functional.hardsigmoid; cdist; nn.functional.pdist | hvp, reverse over reverse;
frozen, second order | refused
    PyTorch has no double backward of it
nn.functional.multi*_margin_loss; nn.functional.hardsigmoid; nn.functional.embedding_bag;
nn.functional.ctc_loss; nn.functional.pdist; cdist; _segment_reduce.*; nn.CTCLoss;
nn.Multi*MarginLoss | linearize | raised
    PyTorch has no double backward of it, by which tangents are pushed through a recorded graph
nn.functional.mse_loss | hvp, inputs one by one | raised, torch#123996
    PyTorch's own forward mode of its backward pass writes into an immutable zero
nn.MSELoss | hvp, forward over reverse | raised, torch#123996
    PyTorch's own forward mode of its backward pass writes into an immutable zero

# Tangents
index_reduce.*, in place*; nn.functional.rrelu, in place* | * | refused, whole
    PyTorch has no forward mode of it in place
nn.functional.rrelu | jacobian, forward* | raised, whole
    vmap has no rule for its random numbers
nn.functional.hardsigmoid* | custom_rule by defvjp*; linearize; hvp, reverse over reverse |
refused, whole
    by the rule's own torch.func.vjp, or in place on a view, it has first derivatives alone
cdist; nn.functional.pdist | custom_rule by defvjp* | refused, whole
    by the rule's own torch.func.vjp it has first derivatives alone
native_layer_norm | custom_rule by defvjp, hvp | refused, whole
    with a bias alone, pulled back by the rule's own torch.func.vjp
nn.functional.hardsigmoid* | custom_rule* | differs, whole
    PyTorch's kernel has 1/6 in single precision

# Within torch.func's transforms
as_strided_scatter | jacobian, forward* | refused, whole
    PyTorch's vmap has no rule for it
nn.RNN, evaluation | jacobian, forward* | refused, whole
    it adds in place to what vmap does not map
tensor_split | custom_rule* | refused, whole
    torch.func's transforms hide the numbers of the tensor that says where
linalg.eigh | custom_rule*; torch.func.grad of jvp | refused, whole, complex128
    its backward pass has no derivative inside of torch.func's transforms
to_sparse | *, tensor subclass | raised, whole
    PyTorch makes no sparse tensor of a subclass
nn.functional.conv_transpose?d | linearize of grad | refused, whole
    of output_padding its backward pass cannot be differentiated twice

# Beyond what the table claims
*float*, of integers too; *half, of integers too; as_strided_scatter, of integers too;
nn.functional.max_unpool3d, of integers too; native_group_norm, of integers too; normal, of
integers too | * | differs, whole
    as of floating numbers alone
nn.functional.multi*margin_loss, of integers too; nn.functional.ctc_loss, of integers too;
to_sparse, of integers too; nn.functional.embedding_bag, of integers too | * | refused, whole
    as of floating numbers alone
__rpow__, of integers too | * | left out, whole
    as of floating numbers alone
ldexp, of integers too | PyTorch's own reverse mode | differs, whole, torch#186556
    2 to a negative integer is taken in integers: zero; gradtools is right
nn.functional.silu.complex, in place beyond the table | PyTorch's own reverse mode | differs,
whole
    a conjugate is missing; gradtools is right
nn.functional.mse_loss, of integers too; nn.functional.smooth_l1_loss, of integers too | jvp* |
raised, whole
    PyTorch's forward-mode rule gives the tangent the integer target's dtype
"""),
    *DEFECTS,
)
