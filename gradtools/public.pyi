"""The public names as a type checker and an editor see them, for both wings: bound operators.

It is never imported: a wing looks a name up in its `Api` when the name is first read.
"""

from gradtools.api import Api as _Api

_api: _Api

GradientAccumulator = _api.GradientAccumulator
Spec = _api.Spec
accumulate_gradients = _api.accumulate_gradients
asarray = _api.asarray
assign_gradients = _api.assign_gradients
attention = _api.attention
checkpoint = _api.checkpoint
chunked = _api.chunked
clip_gradient = _api.clip_gradient
compile = _api.compile
contrastive_loss = _api.contrastive_loss
custom_rule = _api.custom_rule
dependence = _api.dependence
formula = _api.formula
frozen = _api.frozen
functionalize = _api.functionalize
gather = _api.gather
grad = _api.grad
gradient_graph = _api.gradient_graph
graph_diff = _api.graph_diff
guard_gradients = _api.guard_gradients
hessian = _api.hessian
host_function = _api.host_function
hvp = _api.hvp
is_replaying = _api.is_replaying
jacobian = _api.jacobian
jvp = _api.jvp
key = _api.key
known_gradient = _api.known_gradient
linear_cross_entropy = _api.linear_cross_entropy
linearize = _api.linearize
measure = _api.measure
microbatched = _api.microbatched
minimax_value_and_grad = _api.minimax_value_and_grad
mixed_partial = _api.mixed_partial
per_example_grad = _api.per_example_grad
reverse_gradient = _api.reverse_gradient
scale_gradient = _api.scale_gradient
split = _api.split
stop_gradient = _api.stop_gradient
straight_through = _api.straight_through
tiled = _api.tiled
to_numpy = _api.to_numpy
transform_gradient = _api.transform_gradient
value_and_grad = _api.value_and_grad
vjp = _api.vjp
vmap = _api.vmap
why_zero = _api.why_zero
