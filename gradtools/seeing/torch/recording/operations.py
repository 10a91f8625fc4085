"""The neutral names of PyTorch's functions, and why some of them carry no derivative.

Variants of a function have one name: `add`, `add_` and `__radd__` are one operation. The neutral
names are those of `seeing/formulas/words.py`; other functions keep PyTorch's name. Autograd's
nodes have neutral names too, because a call such as cross_entropy makes several nodes.
"""

from __future__ import annotations

import re
from typing import Any

from gradtools.code_origin import Lines, calls_below_the_user
from gradtools.rules import Rule
from gradtools.seeing.graphs.operation_names import SHARED, by_native

_NEUTRAL = SHARED | by_native("""
subtract          rsub isub
add               radd iadd foreach_add
multiply          rmul imul
divide            true_divide truediv rtruediv rdiv idiv itruediv
power             rpow ipow float_power
floor_divide      floordiv rfloordiv ifloordiv
remainder         mod rmod imod fmod
matmul            mm bmm mv dot vdot rmatmul imatmul inner linear bilinear tensordot addmm baddbmm
    addmv addbmm addr chain_matmul multi_dot
compare           greater greater_equal less less_equal equal not_equal isclose
logical_and       and rand bitwise_and
logical_or        or ror bitwise_or
logical_xor       xor rxor bitwise_xor
logical_not       invert bitwise_not
is_nan            isnan
is_finite         isfinite
concatenate       cat concat hstack vstack dstack column_stack row_stack block_diag
abs               absolute
trunc             fix
sign              sgn
sigmoid           expit special_expit
log_sigmoid       logsigmoid log_sigmoid_forward
clip              clamp_min clamp_max hardtanh relu6
max               amax
min               amin
maximum           fmax
minimum           fmin
norm              vector_norm linalg_vector_norm linalg_norm
variance          var var_mean
deviation         std std_mean
transpose         t T mT H mH permute movedim moveaxis swapaxes swapdims adjoint
reshape           view view_as reshape_as flatten unflatten squeeze unsqueeze ravel contiguous
    reshape_alias reshape_copy view_copy unsafe_view
broadcast         expand expand_as broadcast_to broadcast_tensors expand_copy
identity          clone alias positive copy_fresh resolve_conj resolve_neg view_of fused_moving
conj              conj_physical
negate            negative neg_view
erfinv            special_erfinv
log1p             special_log1p
exp2              special_exp2
digamma           special_digamma
lgamma            special_gammaln
stop              detach data
cast              to float double half bfloat16 long int short char byte bool type type_as cfloat
    cdouble chalf to_copy
index             getitem select narrow index_select masked_select take unsafe_index
take_along        gather take_along_dim
split             chunk unbind unsafe_chunk unsafe_split tensor_split hsplit vsplit split_with_sizes
    unsafe_split_with_sizes
triangle          triu tril
diagonal_matrix   diag_embed
scatter           setitem index_put index_copy index_fill masked_scatter masked_fill slice_scatter
    select_scatter diagonal_scatter fill_diagonal unsafe_index_put
scatter_add       index_add
update            copy set_data
convolution       conv1d conv2d conv3d convolution_overrideable mkldnn_convolution
convolution_transposed conv_transpose1d conv_transpose2d conv_transpose3d
max_pool          max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool3d
avg_pool          avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d
attention         scaled_dot_product_attention multi_head_attention_forward
    scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention
    scaled_dot_product_flash_attention
inverse           inv linalg_inv linalg_inv_ex
dropout           dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout native_dropout
branch            is_nonzero allclose contains
constant          tensor as_tensor asarray zeros ones full empty eye ones_like zeros_like full_like
    new_zeros new_ones new_full scalar_tensor lift_fresh
iota              arange linspace logspace
random            rand randn randint randperm
layer_norm        native_layer_norm
det               linalg_det
slogdet           linalg_slogdet
cholesky          linalg_cholesky_ex
expm              linalg_matrix_exp
triangular_solve  linalg_solve_triangular
cholesky_solve    cholesky_solve_helper
solve             linalg_solve_ex
group_norm        native_group_norm
batch_norm        native_batch_norm
rms_norm          fused_rms_norm
leave             local_scalar_dense
prelu             prelu_kernel
cdist             cdist_forward euclidean_dist
view_as_real      view_as_real_copy
view_as_complex   view_as_complex_copy
cross             linalg_cross
outer             ger
reflection_pad    reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad   replication_pad1d replication_pad2d replication_pad3d
""")


def neutral(name: str) -> str:
    """The name in the vocabulary of both frameworks, or PyTorch's own."""
    return _NEUTRAL.get(name, name)


# --- why a call carries no derivative ----------------------------------------------------

ZERO_DERIVATIVE = frozenset(
    {"round", "floor", "ceil", "trunc", "sign", "floor_divide", "heaviside", "nextafter"}
)
DRAWS = frozenset({"bernoulli", "normal", "poisson", "binomial"})
_DISCRETE = DRAWS | {"histc", "histogram", "histogramdd"}

# These have a grad_fn, but no backward formula.
UNDIFFERENTIABLE = frozenset(
    {"unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)

# The result takes shape, dtype or device from the first argument, and none of its contents.
NO_DATA = frozenset(
    {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_empty_strided", "full_like", "new_full"}
    | {"new_tensor"}
)
# The argument is overwritten without being read.
OVERWRITES = frozenset(
    {"zero_", "fill_", "copy_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_"}
    | {"geometric_", "normal_", "bernoulli_"}
)

# Functions by which data leaves for NumPy or Python, as PyTorch spells them.
LEAVES = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__complex__", "__index__"}
)
BRANCHES = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})


def loss_of(name: str, grad_enabled: bool, to_inexact: bool) -> str:
    """Why an output has no derivative with respect to a floating input: a key of `KINDS`.

    Args:
        name: The function's name, from `name_of`.
        grad_enabled: Whether grad mode was on.
        to_inexact: Whether the output's dtype is floating or complex.
    """
    if not to_inexact:
        return "integer_cast" if neutral(name) == "cast" else "discrete"
    if name in _DISCRETE:
        return "discrete"
    return "detached" if grad_enabled or name == "detach" else "no_grad"


def library_call(lines: Lines) -> tuple[str, str] | None:
    """The function of PyTorch that the user called and that stops gradients, with the kind of loss.

    lines: The frames of the running operation, innermost first.
    """
    for module, name, owner in calls_below_the_user(lines):
        if module.startswith("torch.distributions.") and name == "sample":
            return ("sample", "no_grad") if getattr(owner, "has_rsample", False) else None
        if module == "torch.nn.modules.module" and name == "load_state_dict":
            return name, "no_grad"
    return None


# --- the names of autograd's nodes -------------------------------------------------------

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BACKWARD = {
    "index_put": "scatter",
    "max_pool2_d_with_indices": "max_pool",
    "max_pool3_d_with_indices": "max_pool",
    "adaptive_max_pool2_d": "max_pool",
    "hardtanh": "clip",
    "nll_loss": "index",
    "safe_softmax": "softmax",
}


def neutral_of_node(node: Any) -> str:
    """The neutral name of a node of autograd, such as "multiply" of MulBackward0."""
    words = name_of_node(node)
    return _BACKWARD.get(words) or neutral(words)


def name_of_node(node: Any) -> str:
    """The aten name of an autograd node's forward operation."""
    return _WORDS.sub("_", word_of(node)).lower()


def word_of(node: Any) -> str:
    """An autograd node's name without namespace and "Backward", or its rule's name."""
    rule = getattr(getattr(node, "point", None), "rule", None)
    if isinstance(rule, Rule):
        return rule.name
    return node.name().rpartition("::")[2].partition("Backward")[0]
