"""Gathers the rows of all processes or devices, for losses over the global batch."""

from __future__ import annotations

from typing import Any

from gradtools.backend import Operators


class Gathering(Operators):
    """The operator `all_gather`."""

    def all_gather(self, x: Any, axis_name: Any = None, group: Any = None) -> Any:
        """Concatenates the rows of all processes (PyTorch) or devices (JAX).

        A loss over the global batch can be computed from the result. The derivative is the adjoint:
        the cotangents of each row are summed over all processes. If every process computes the
        whole loss L, or process r computes L_r and L is the mean of the L_r, then the mean of the
        processes' gradients (which DistributedDataParallel or `jax.lax.pmean` computes) is the
        gradient of L. Under `shard_map` with check_vma=True, first make shared weights varying
        (`jax.lax.pcast(w, axis, to="varying")`) or put the pmean inside the differentiated
        function; otherwise `jax.grad` itself sums the gradients over the devices.

        Args:
            x: A pytree of arrays with the local rows along axis 0, of the same shape on every rank.
            axis_name: JAX: the mapped axis or axes (of `shard_map`, `vmap` or `pmap`).
            group: PyTorch: a process group; None for the default group.

        Returns:
            A pytree of arrays with all rows along axis 0, in the order of ranks.

        Raises:
            GradtoolsError: PyTorch: axis_name is given, no process group exists, shapes differ
                between processes, or the cotangents are batched (`is_grads_batched=True`). JAX:
                group is given, or axis_name is missing or unknown.

        Example:
            >>> callable(gt.all_gather)
            True
        """
        return self._backend.compiler.uncompiled(self._backend.all_gather, x, axis_name, group)
