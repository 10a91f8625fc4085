"""Maps aten operations to neutral names, and to the reasons why derivatives are missing.

Variants such as `add` and `add_` have the same neutral name. `seeing/formulas/words.py` defines the
neutral names; other operations use their PyTorch names. Autograd nodes have their own neutral
names, because one call, such as cross_entropy, may create several nodes.
"""

from __future__ import annotations

import re
from typing import Any

from gradtools.code_origin import Lines, calls_below_the_user
from gradtools.rules import Rule
from gradtools.seeing.graphs.operation_names import SHARED, by_native

_NEUTRAL = SHARED | by_native("""
subtract          rsub
add               foreach_add
matmul            mm bmm mv dot linear
is_nan            isnan
concatenate       cat
sign              sgn
log_sigmoid       log_sigmoid_forward
clip              clamp_min clamp_max
max               amax
min               amin
maximum           fmax
minimum           fmin
norm              linalg_vector_norm
variance          var var_mean
deviation         std std_mean
transpose         t permute
reshape           view squeeze unsqueeze reshape_alias reshape_copy view_copy unsafe_view
broadcast         expand expand_copy
identity          clone alias
conj              conj_physical
negate            neg_view
stop              detach data
cast              to_copy
index             index_select masked_select take unsafe_index
take_along        gather
split             unsafe_split split_with_sizes unsafe_split_with_sizes
triangle          triu tril
diagonal_matrix   diag_embed
scatter           index_put index_copy index_fill masked_scatter unsafe_index_put
scatter_add       index_add
update            copy slice_scatter select_scatter set_data
convolution       convolution_overrideable mkldnn_convolution
max_pool          adaptive_max_pool2d max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool3d
avg_pool          avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d
attention         scaled_dot_product_flash_attention_for_cpu
    scaled_dot_product_efficient_attention scaled_dot_product_flash_attention
inv               linalg_inv_ex
dropout           native_dropout
constant          tensor as_tensor asarray zeros ones full empty ones_like zeros_like full_like
    new_zeros new_ones new_full scalar_tensor lift_fresh
iota              arange
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
reflection_pad    reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad   replication_pad1d replication_pad2d replication_pad3d
slice             select
pad               constant_pad_nd
tile              repeat
scatter_along     scatter
where             masked_fill
softmax           safe_softmax
""")


def neutral(name: str) -> str:
    """Returns the framework-neutral name of an operation, or `name` if there is no neutral name."""
    return _NEUTRAL.get(name, name)


# --- reasons why a call has no derivative ------------------------------------------------

ZERO_DERIVATIVE = frozenset(
    {"round", "floor", "ceil", "trunc", "sign", "floor_divide", "heaviside", "nextafter"}
)
DRAWS = frozenset({"bernoulli", "normal", "poisson", "binomial"})
_DISCRETE = DRAWS | {"histc", "histogram", "histogramdd"}

# Operations that have a grad_fn but no backward formula.
UNDIFFERENTIABLE = frozenset(
    {"unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)

# Operations that use only the shape, dtype or device of the first argument.
NO_DATA = frozenset(
    {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_empty_strided", "full_like", "new_full"}
    | {"new_tensor"}
)
# Operations that overwrite the first argument without reading its contents.
OVERWRITES = frozenset(
    {"zero_", "fill_", "copy_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_"}
    | {"geometric_", "normal_", "bernoulli_"}
)

# Functions that convert a tensor to a NumPy array or Python numbers.
LEAVES = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__complex__", "__index__"}
)
BRANCHES = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})


def loss_of(name: str, grad_enabled: bool, to_inexact: bool) -> str:
    """Returns the reason why an operation has no derivative, as a key of `KINDS`.

    Args:
        name: The name of the operation, as returned by `name_of`.
        grad_enabled: Whether grad mode was enabled.
        to_inexact: Whether the dtype of the output is floating or complex.
    """
    if not to_inexact:
        return "integer_cast" if neutral(name) == "cast" else "discrete"
    if name in _DISCRETE:
        return "discrete"
    return "detached" if grad_enabled or name == "detach" else "no_grad"


def library_call(lines: Lines) -> tuple[str, str] | None:
    """Returns (name, kind of lost gradient) if a function such as `sample` disables gradients.

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
    "rsub": "rsub",  # the operands of this node are in reverse order
}


def neutral_of_node(node: Any) -> str:
    """Returns the neutral name of an autograd node, such as "multiply" for MulBackward0."""
    words = _WORDS.sub("_", word_of(node)).lower()
    return _BACKWARD.get(words) or neutral(words)


def word_of(node: Any) -> str:
    """Returns the name of an autograd node without "Backward", or the name of its rule."""
    rule = getattr(getattr(node, "point", None), "rule", None)
    if isinstance(rule, Rule):
        return rule.name
    return node.name().rpartition("::")[2].partition("Backward")[0]
