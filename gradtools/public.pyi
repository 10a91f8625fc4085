"""Declares the public names of both backends, the bound operators, for type checkers and editors.

This stub is never imported: a backend looks up a name in its `Api` when the name is first accessed.
"""

from gradtools.accumulate import Accumulation as _Accumulation
from gradtools.arrays import ArraysAndKeys as _Arrays
from gradtools.chunking import Chunking as _Chunking
from gradtools.custom_rules import CustomRules as _CustomRules
from gradtools.derivatives import Derivatives as _Derivatives
from gradtools.edits import Edits as _Edits
from gradtools.freezing import Freezing as _Freezing
from gradtools.gathering import Gathering as _Gathering
from gradtools.host_functions import HostFunctions as _HostFunctions
from gradtools.implicit import Implicit as _Implicit
from gradtools.intermediate_gradients import RetainedGradients as _RetainedGradients
from gradtools.jacobians import Jacobians as _Jacobians
from gradtools.mixed_partials import MixedPartials as _MixedPartials
from gradtools.models import Models as _Models
from gradtools.seeing.diagnostics.zero_gradients import SeeingOperators as _SeeingOperators
from gradtools.seeing.formulas.formulating import Formulating as _Formulating
from gradtools.seeing.graphs.gradient_graphs import Graphing as _Graphing
from gradtools.transforms import Transforms as _Transforms

_derivatives: _Derivatives
_jacobians: _Jacobians
_mixed_partials: _MixedPartials
_edits: _Edits
_implicit: _Implicit
_retained: _RetainedGradients
_custom_rules: _CustomRules
_host_functions: _HostFunctions
_freezing: _Freezing
_chunking: _Chunking
_gathering: _Gathering
_accumulation: _Accumulation
_models: _Models
_arrays: _Arrays
_transforms: _Transforms
_seeing: _SeeingOperators
_graphing: _Graphing
_formulating: _Formulating

GradientAccumulator = _accumulation.GradientAccumulator
ArraySpec = _host_functions.ArraySpec
accumulate_gradients = _accumulation.accumulate_gradients
asarray = _arrays.asarray
assign_gradients = _accumulation.assign_gradients
checkpoint = _transforms.checkpoint
chunked = _chunking.chunked
clip_gradient = _edits.clip_gradient
compile = _transforms.compile
custom_rule = _custom_rules.custom_rule
formula = _formulating.formula
frozen = _freezing.frozen
make_functional = _models.make_functional
all_gather = _gathering.all_gather
grad = _derivatives.grad
gradient_graph = _graphing.gradient_graph
hessian = _jacobians.hessian
host_function = _host_functions.host_function
hvp = _jacobians.hvp
implicit_solution = _implicit.implicit_solution
is_recomputing = _chunking.is_recomputing
jacobian = _jacobians.jacobian
jvp = _derivatives.jvp
random_key = _arrays.random_key
replace_gradient = _edits.replace_gradient
linearize = _derivatives.linearize
microbatched_value_and_grad = _chunking.microbatched_value_and_grad
minimax_value_and_grad = _derivatives.minimax_value_and_grad
mixed_partial = _mixed_partials.mixed_partial
per_example_grad = _derivatives.per_example_grad
retain_gradient = _retained.retain_gradient
retained_gradients = _retained.retained_gradients
reverse_gradient = _edits.reverse_gradient
scale_gradient = _edits.scale_gradient
split_key = _arrays.split_key
stop_gradient = _edits.stop_gradient
straight_through = _edits.straight_through
to_numpy = _arrays.to_numpy
transform_gradient = _edits.transform_gradient
value_and_grad = _derivatives.value_and_grad
vjp = _derivatives.vjp
vmap = _transforms.vmap
why_zero = _seeing.why_zero
