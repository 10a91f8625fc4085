"""Implements `vmap`, `checkpoint` and `compile` for both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gradtools.arguments.batches import Batch
from gradtools.arguments.checks import check_function, refuse_axes
from gradtools.arguments.chunks import ChunkOptions, Verify, checked_verify
from gradtools.arguments.in_axes import arguments_of_call
from gradtools.backend import F, Operators, P, R
from gradtools.boundary import like_function


class Transforms(Operators):
    """The operators `vmap`, `checkpoint` and `compile`."""

    def vmap(self, f: Callable[P, R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[P, R]:
        """Maps f, a function of one example, over a batch axis.

        Uses the framework's vmap: ``torch.func.vmap`` (with different random numbers for each
        example) or ``jax.vmap``. In both frameworks, keyword arguments are mapped, as in
        ``jax.vmap``.

        Args:
            f: A function of pytrees of arrays.
            in_axes: The batch axis of each positional argument, None for a shared argument, or a
                dict from f's parameters to axes. Keyword arguments, and arguments that a dict does
                not name, are mapped over axis 0, except for scalars and non-arrays.
            out_axes: The batch axis of each output.

        Returns:
            The mapped function.

        Raises:
            GradtoolsError: f is not a function, or in_axes or out_axes contains an array or a
                module. The framework raises its own errors for wrong axes and sizes.

        Example:
            >>> rows = gt.asarray(np.ones((2, 3), np.float32))
            >>> gt.to_numpy(gt.vmap(lambda row: (row * row).sum())(rows))
            array([3., 3.], dtype=float32)
        """
        check_function("vmap", f)
        refuse_axes(self._backend, "vmap", in_axes, out_axes)
        return like_function(
            "", f, partial(self._mapped, f, in_axes, out_axes), "", "{}, mapped over a batch."
        )

    def _mapped(self, f: Any, in_axes: Any, out_axes: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and type(in_axes) is not dict:
            return self._backend.vmap(f, in_axes, out_axes)(*args)
        backend = self._backend
        batch = Batch(backend, "vmap", arguments_of_call("vmap", f, args, kwargs, in_axes))

        def one(*example: Any) -> Any:
            args, kwargs = batch.at(example)
            return f(*args, **kwargs)

        axes = tuple([axis for _, axis in batch.split])
        return backend.vmap(one, axes, out_axes)(*[x for x, _ in batch.split])

    def checkpoint(self, f: F, verify: Verify = "first") -> F:
        """Wraps f so that the backward pass recomputes the intermediate results of f.

        Checkpointing costs an additional forward pass of f and saves the memory of f's graph.
        PyTorch: f is recomputed as one chunk of `chunked`: random generators and the buffers of
        modules are restored, so batch normalization updates its statistics once. f may capture
        tensors that have a graph. In compiled code, ``torch.utils.checkpoint`` (not reentrant) is
        used. JAX: ``jax.checkpoint`` is used; f may branch on Python numbers among its arguments.

        Args:
            f: A function of pytrees of arrays.
            verify: PyTorch: whether to compare the recomputation with the first pass, as in
                `chunked`.

        Returns:
            A function with the same value and derivatives as f.

        Raises:
            GradtoolsError: f is not a function, or verify is unknown; (when differentiated) f
                returns different values when it is recomputed.

        Example:
            >>> square = gt.checkpoint(lambda x: (x * x).sum())
            >>> gt.to_numpy(gt.grad(square)(gt.asarray(np.ones(2, np.float32))))
            array([2., 2.], dtype=float32)
        """
        check_function("checkpoint", f)
        options = ChunkOptions(checked_verify("checkpoint", verify))
        return self._backend.like_module(f, partial(self._checkpoint_of, options))

    def _checkpoint_of(self, options: ChunkOptions, f: Callable[..., Any]) -> Callable[..., Any]:
        doc = "{}, recomputed in the backward pass."
        return like_function("checkpointed_", f, self._backend.checkpoint(f, options), "", doc)

    def compile(self, f: Callable[P, R], **options: Any) -> Callable[P, R]:
        """Compiles f on its first call, with ``torch.compile`` or ``jax.jit``.

        Args:
            f: A function of pytrees of arrays.
            options: The framework's options, such as ``fullgraph=True`` or ``static_argnums=0``.

        Returns:
            A function with the same value and derivatives as f.

        Raises:
            GradtoolsError: f is not a function. Unknown options raise the framework's error.

        Example:
            >>> fast = gt.compile(lambda x: x + 1)
            >>> callable(fast)
            True
        """
        check_function("compile", f)
        return self._backend.compile(f, **options)
