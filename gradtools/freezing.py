"""`frozen` computes second derivatives through a large function without storing its graph.

For y = G(z) with Jacobian J, the pullback is v -> J^H v. The pullback is linear in v, so the
transpose of its derivative along v is the pushforward u -> J u: one pass in forward mode, which
stores no graph. The derivative of <u, J^H v> along z is the tangent of the pullback along u,

    (d/dz) <u, J(z)^H v> = (d/de) J(z + e u)^H v   at e = 0

since both expressions equal H u, where H is the Hessian of <v, G(z)>. This derivative is computed
forward over reverse, with the memory of one graph of G. Double backward would keep a graph of G and
a graph of its pullback for each call until the second derivative is computed.

The backends' `freezing.py` keep the first graph of a call until the pullback of the call has run,
and replace kernels without forward mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gradtools.arguments.batches import Batch
from gradtools.arguments.checks import check_function
from gradtools.arguments.chunks import ChunkOptions, Chunks, Partition, Verify, checked_verify
from gradtools.arguments.wording import with_article
from gradtools.backend import F, Operators
from gradtools.boundary import like_function
from gradtools.errors import GradtoolsError

_ONE = Partition(1, 1)  # a call of a frozen function is one chunk


def name_of_function(caller: str) -> str:
    """Returns the name of the frozen function in error messages of the operator `caller`."""
    return "G" if caller == "frozen" else "f"


def edit_in_frozen(caller: str, edit: str) -> GradtoolsError:
    """Returns the error for a derivative that a frozen function with an edit does not support.

    The derivatives with respect to the arguments and to G's output are computed separately, so a
    nonlinear edit would be applied to each derivative instead of their sum.
    """
    fun = name_of_function(caller)
    advice = "call G without frozen" if fun == "G" else "leave out the mode"
    return GradtoolsError(
        f"{caller}: {fun} contains {edit}, which has a reverse rule only, so forward mode and "
        f"the second derivative with respect to the arguments of {fun} are not available. Edit "
        f"gradients outside of {fun}, or {advice}."
    )


class Freezing(Operators):
    """The operator `frozen`."""

    def frozen(
        self,
        G: F,
        verify: Verify = "first",
    ) -> F:
        """Wraps a function G so that second derivatives do not store the graph of G.

        `frozen` is intended for a loss that contains gradients with respect to many z_i through a
        large pretrained G. Each call stores its arguments and outputs, but nothing that grows with
        the depth of G. If a forward pass costs F, a call costs F for the forward pass, F for the
        pullback, and 2F for the second derivative: 4F in total. Double backward costs 3F and keeps
        the graphs of G for every call. In PyTorch, compute each first derivative before the next
        call of G; otherwise the cost is 5F. G's parameters are constants,
        unless they are arguments of G.

        Derivatives with respect to the arguments are exact, and are computed only if the arguments
        depend on differentiated arrays. Third derivatives are exact; they store the graph of one
        call at a time in PyTorch, and the graphs of all calls in JAX.

        PyTorch: G is a module or a function; random generators and buffers are restored as in
        `chunked`. Attention uses unfused operations in second derivatives. If G has no forward mode
        (recurrent layers on the CPU, a Function without jvp), registers gradient hooks or calls
        `torch.autograd.grad`, a second derivative requires a double backward pass through G. JAX: G
        is a function, or an equinox or flax.nnx module. If G has no forward mode (a
        `jax.custom_vjp`), the derivative applies reverse mode twice, with a warning, and forward
        mode transposes the pullback; a rule that is nonlinear in its cotangent raises an error.

        Args:
            G: A function that takes and returns pytrees of arrays.
            verify: PyTorch: whether to compare the recomputation with the first pass, as in
                `chunked`, up to rounding differences between kernels.

        Returns:
            A function of G's arguments. If G is a module, the result is a module, as in `chunked`,
            with G's tensors in its state_dict; calls of the module treat G's tensors as constants.

        Raises:
            GradtoolsError: (When differentiated) A derivative with respect to a parameter of G, or
                to an array that G captures, is needed (in PyTorch, in reverse mode). PyTorch: G
                returns different values when it is recomputed.

        Example:
            >>> G = gt.frozen(lambda z: gt.xp.exp(z).sum())
            >>> y, z = gt.asarray(np.float32(3.0)), gt.asarray(np.float32([0.0, 0.0]))
            >>> slope = lambda y: gt.grad(lambda z: y * G(z) ** 2)(z).sum()
            >>> float(gt.grad(slope)(y))
            8.0

        Source: Pearlmutter, Fast exact multiplication by the Hessian, 1994; forward over reverse in
        place of double backward as in Kemaev et al., Scalable meta-learning via mixed-mode
        differentiation, 2025.
        """
        if not callable(G) and hasattr(G, "dtype"):
            raise GradtoolsError(
                f"frozen: G must be a function or a module, got {with_article(type(G).__name__)}. "
                "For a constant array, use stop_gradient."
            )
        check_function("frozen", G, "G", curried=False)
        return self.frozen_for("frozen", G, checked_verify("frozen", verify))

    def frozen_for(self, caller: str, G: F, verify: bool | None = None) -> F:
        """Returns `frozen(G)` on behalf of the operator `caller`, which error messages name."""
        options, uses = ChunkOptions(verify), self._backend.frozen_uses()
        return self._backend.like_module(G, partial(self._frozen_of, caller, options, uses))

    def _frozen_of(self, caller: str, options: ChunkOptions, uses: Any, G: Any) -> Any:
        use = partial(self._backend.compiler.uncompiled, self._use, caller, G, options, uses)
        return like_function("frozen_", G, use, "", "{}, with constant parameters.")

    def _use(
        self, caller: str, G: Any, options: ChunkOptions, uses: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        batch = Batch.whole(self._backend, caller, args, kwargs)
        whole = Chunks.of(G, batch, _ONE, options)
        return whole.result(self._backend.run_frozen(whole, uses), [])
