"""PyTorch's own errors about lost gradients, with the kind of loss of each.

Errors are identified by a part of their text. The corpus `tests/support/torch_lost_gradients.py`
raises each, so that tests notice a new wording.
"""

from __future__ import annotations

from gradtools.torch.known_errors import known

KINDS = {
    "Can't call numpy() on Tensor that requires grad": "left_framework",
    "Can't export tensors that require gradient": "left_framework",
    "only integer tensors of a single element can be converted to an index": "integer_cast",
    "a leaf Variable that requires grad is being used in an in-place operation": "in_place_data",
    "a view of a leaf Variable that requires grad is being used in an in-place": "in_place_data",
    "modified by an inplace operation": "in_place_data",
    "only Tensors of floating point": "integer_cast",
    "Only Tensors created explicitly by the user": "detached",
    "Inference tensors cannot be saved for backward": "no_grad",
    "Inplace update to inference tensor outside InferenceMode": "no_grad",
    "Setting requires_grad=True on inference tensor": "no_grad",
    "appears to not have been used in the graph": "unused",
    "does not require grad and does not have a grad_fn": "detached",
}


def refusal_of(error: BaseException) -> str | None:
    """The kind of loss that an error of PyTorch reports; None for any other error."""
    if not isinstance(error, RuntimeError | TypeError | ValueError | BufferError):
        return None
    return known(error, KINDS)
