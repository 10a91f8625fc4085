"""`make_functional` converts a model to a pure function of its parameters and state.

A model becomes ``apply(params, state, *args, key=key) -> (out, new_state)`` with the same signature
in every framework, so that derivatives are taken with respect to an ordinary argument. The
backends' ``modules.py`` implement the conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gradtools.arguments.checks import check_choice, tuple_of_names
from gradtools.backend import Operators

Apply = Callable[..., tuple[Any, Any]]


class Models(Operators):
    """The operator `make_functional`."""

    def make_functional(
        self,
        module: Any,
        *,
        variables: Any = None,
        train: bool | None = None,
        rng_names: tuple[str, ...] = ("dropout",),
    ) -> tuple[Apply, Any, Any]:
        """Converts a module to a pure function of its parameters and state.

        ``apply(params, state, *args, key=None, **kwargs)`` returns ``(out, new_state)`` and does
        not change the module's parameters and buffers or its arguments (in-place changes of other
        attributes remain). Many threads may call ``apply`` concurrently, each with its own
        parameters. ``args`` and ``kwargs`` are the module's arguments. With ``key``, the random
        numbers of the call depend only on the key. make_functional reads the module when it is
        called; later changes of the module's mode or structure do not affect apply.

        In PyTorch::

            apply, params, state = gt.make_functional(net)          # a torch.nn.Module
            (loss, state), grads = gt.value_and_grad(
                lambda params: loss_of(*apply(params, state, x, key=key)), has_aux=True
            )(params)
            gt.assign_gradients(dict(net.named_parameters()), grads)
            optimizer.step()                # params are aliases of the parameters

        In JAX::

            variables = net.init(key, x)                          # flax.linen
            apply, params, state = gt.make_functional(net, variables=variables, train=True)
            apply, params, state = gt.make_functional(net)          # flax.nnx
            net, memory = eqx.nn.make_with_state(Net)(key)        # equinox
            apply, params, state = gt.make_functional(net, variables=memory)

        params and state by library:

        - ``torch.nn``: params maps the name of each parameter that requires grad to a detached
          alias (same storage, ``requires_grad=False``: a training step builds no second graph);
          state maps each buffer's name to a copy, and the name of each frozen parameter to an
          alias, for which no gradient is computed. Tied parameters appear once, under their first
          name. Each call evaluates a structural copy of the module tree; hooks are shared; a number
          that forward assigns to an attribute remains on that copy. In-place changes that forward
          makes to parameters, or to a shared list or dictionary, are not detected. With a key,
          PyTorch's global generators (of the CPU and of the accelerators of the call's tensors) are
          seeded and restored, under one process-wide lock; the ``random`` modules of Python and
          NumPy are unaffected. On the CPU a seed has 32 effective bits, so one in 2^32 pairs of
          keys draws equal numbers. Under ``torch.func.vmap`` use ``randomness="different"`` and a
          key that is not mapped. Under ``torch.compile`` a call with a key runs uncompiled; without
          a key, numbers that forward assigns to attributes remain on a private copy of the module
          between calls.
        - ``flax.linen``: params is ``variables["params"]``; state contains all other collections,
          each mutable. ``train`` is passed as the module's own argument: ``train``,
          ``deterministic`` or ``use_running_average``. The key is split over ``rng_names``.
        - ``flax.nnx``: params contains the ``nnx.Param``s; state contains the random streams and
          all other variables. With a key, every stream receives its own key and state keeps its
          streams unchanged; without a key, the streams in state are used and advanced.
        - ``equinox``: params is the module with only its inexact arrays; state is the
          ``eqx.nn.State`` passed as ``variables`` (passed to the module after the other positional
          arguments, and returned by it), or an empty dictionary. The key is passed as ``key=`` if
          the module's ``__call__`` takes it; the user must split the key over a batch and provide
          the ``axis_name`` that batch normalization needs.
        - Keras 3, on this framework's backend: params maps the paths of the trainable variables
          to arrays; state likewise contains all other variables, including the seeds of the random
          streams. ``train`` is passed as ``training``.

        Conventions differ: PyTorch's running variance is unbiased, and its momentum m corresponds
        to ``1 - m`` in the other libraries; flax and equinox use the biased variance, and equinox
        divides its statistics by ``1 - m^calls`` in evaluation.

        Args:
            module: A ``torch.nn.Module``, a ``flax.linen``, ``flax.nnx`` or ``equinox`` module,
                or a built Keras model.
            variables: For flax.linen the result of ``init``; for equinox a State or None; otherwise
                None.
            train: True or False sets the mode of the copy; None keeps the module's mode.
            rng_names: flax.linen's names of the streams over which a key is split.

        Returns:
            ``(apply, params, state)``. params and state are pytrees of arrays with the module's
            shapes and dtypes; the leaves passed to apply may have other dtypes.

        Raises:
            GradtoolsError: The module's class is not supported, or its parameters cannot be passed
                as arguments (the module is scripted or sharded, or is lazy and has not been
                called); ``train`` is not True, False or None, or the module has no argument for it;
                rng_names is not a tuple of names. From apply: params or state is not a pytree as
                make_functional returned it, for example if they are swapped; a name is missing or
                unexpected (flax.linen reports missing names itself), or, in PyTorch and Keras, an
                array in params has a wrong shape; in JAX, a module draws random numbers and no key
                is given.

        Example:
            >>> gt.make_functional(3)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            gradtools.errors.GradtoolsError: make_functional: got an int; ...
        """
        check_choice("make_functional", "train", train, (True, False, None))
        rng_names = tuple_of_names("make_functional", "rng_names", rng_names)
        modules = self._backend.submodule("modules", "make_functional")
        apply, params, state = modules.make_functional(
            module, variables=variables, train=train, rng_names=rng_names
        )
        return PureFunction(apply.func, *apply.args, **apply.keywords), params, state


class PureFunction(partial[Any]):
    """The function of parameters and state that `make_functional` returns."""

    def __repr__(self) -> str:
        return "<apply, called with (params, state, *args, key=None, **kwargs)>"
