"""Models and arrays: `make_functional`, `asarray`, `random_key`, `vmap`, `checkpoint`, `compile`.

A model becomes ``apply(params, state, *args, key=key) -> (out, new_state)``, in every framework
the same, so that derivatives are taken with respect to an argument like any other. Arrays come
in and go out with the dtype that they have; randomness comes in as a key.
The backends implement them (``modules.py`` and ``arrays.py``); this module documents them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gradtools.arguments.batches import Batch
from gradtools.arguments.checks import check_function
from gradtools.arguments.chunks import ChunkOptions, Verify, checked_verify
from gradtools.arguments.in_axes import arguments_of_call
from gradtools.backend import F, Operators, P, R
from gradtools.function_names import like_function

Array = Any
Apply = Callable[..., tuple[Any, Any]]


class Models(Operators):
    """The public functions on models and arrays, bound to one backend."""

    def make_functional(
        self,
        module: Any,
        *,
        variables: Any = None,
        train: bool | None = None,
        rng_names: tuple[str, ...] = ("dropout",),
    ) -> tuple[Apply, Any, Any]:
        """A module as a pure function of its parameters and state.

        ``apply(params, state, *args, key=None, **kwargs)`` returns ``(out, new_state)`` and
        changes nothing: not the module, not its arguments. Many threads may call it at once, each
        with parameters of its own. ``args`` and ``kwargs`` are the module's. With ``key`` the
        call's randomness is a function of the key alone. The module is read when make_functional
        is called; its mode or structure may change afterwards without effect on apply.

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
          alias of it (one storage, ``requires_grad=False``: a training step builds no second
          graph); state maps each buffer's name to a copy, and the name of each frozen parameter
          to an alias, for which no gradient is computed. Tied parameters appear once, under their
          first name. Each call works on a structural copy of the module tree; hooks are kept; a
          number that forward assigns to an attribute stays on that copy. What forward changes
          inside a shared list or dictionary, and what it writes into its parameters, is not
          detected. With a key, PyTorch's global generators (CPU, and the accelerators that the
          call's tensors live on) are seeded and restored, under one lock for the whole process;
          the ``random`` modules of Python and NumPy are left alone. On the CPU a seed has 32
          effective bits, so one pair in 2^32 of different keys draws alike. Under
          ``torch.func.vmap`` choose ``randomness="different"`` and a key that is not mapped. Under
          ``torch.compile`` a call with a key runs uncompiled, and without a key numbers that
          forward assigns stay on a private copy between calls.
        - ``flax.linen``: params is ``variables["params"]``, state all other collections, each
          mutable. ``train`` is passed as the module's own argument: ``train``, ``deterministic`` or
          ``use_running_average``. The key is split over ``rng_names``.
        - ``flax.nnx``: params holds the ``nnx.Param``s, state the random streams and all other
          variables. With a key, every stream gets a key of its own and state keeps its streams as
          they were; without one, the streams of state are used and counted on.
        - ``equinox``: params is the module with its inexact arrays only, state the
          ``eqx.nn.State`` given as ``variables`` (handed to the module after the other positional
          arguments, and returned by it), or an empty dictionary. The key is handed over as
          ``key=`` if the module's ``__call__`` takes it; splitting it over a batch, and the
          ``axis_name`` that batch normalisation needs, are up to the user.
        - haiku: what ``hk.transform`` or ``hk.transform_with_state`` gave; ``variables`` is what
          its ``init`` returned, params or ``(params, state)``. The key is handed over as ``rng``.
        - Keras 3, on this framework's backend: params maps the paths of the trainable variables to
          arrays, state those of all others, including the seeds of its random streams. ``train`` is
          its ``training``.

        Conventions differ: PyTorch's running variance is unbiased and its momentum m is
        ``1 - m`` elsewhere; flax's and equinox's is biased, and equinox, in evaluation, divides its
        statistics by ``1 - m^calls``.

        Args:
            module: A ``torch.nn.Module``, a ``flax.linen``, ``flax.nnx`` or ``equinox`` module,
                what haiku's transform gave, or a built Keras model.
            variables: For flax.linen and haiku what ``init`` returned; for equinox a State, or
                None; else None.
            train: True or False sets the mode of the copy; None keeps the module's.
            rng_names: flax.linen's names of the streams that a key is split over.

        Returns:
            ``(apply, params, state)``. params and state are pytrees of arrays with the module's
            shapes and dtypes; the leaves given to apply may have other dtypes.

        Raises:
            GradtoolsError: The module is of no accepted class, or of one whose parameters cannot
                be given from outside (scripted, sharded, lazy and not yet called); ``train``
                cannot be passed on. From apply: params or state with a missing or unexpected
                name, or params of another shape; in JAX, randomness without a key.

        Example:
            >>> gt.make_functional(3)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            gradtools.errors.GradtoolsError: make_functional: got an int; ...
        """
        modules = self._backend.submodule("modules", "make_functional")
        return modules.make_functional(
            module, variables=variables, train=train, rng_names=rng_names
        )

    @property
    def xp(self) -> Any:
        """The backend's array-API namespace, so that a function can be written once.

        It is ``array_api_compat.torch`` in PyTorch, imported at first use, and ``jax.numpy``.

        Example:
            >>> gt.to_numpy(gt.xp.sum(gt.xp.ones((2, 3), dtype=gt.xp.float32), axis=0))
            array([2., 2., 2.], dtype=float32)
        """
        return self._backend.xp

    def asarray(self, x: Any) -> Array:
        """Converts to an array of the framework, with the dtype that it has in NumPy.

        The result does not share memory with x; an array of the framework is returned as it is.
        Python numbers and lists of them get the framework's default dtype.

        Args:
            x: A NumPy array or scalar of any shape (bfloat16 and float8 through ml_dtypes
                included), a Python number, a nested list of those, or anything that
                ``numpy.asarray`` reads.

        Returns:
            The array.

        Raises:
            GradtoolsError: The backend cannot hold the dtype: float64, int64 and complex128 in
                JAX without x64, extended precision everywhere; or x is not one array of numbers.

        Example:
            >>> gt.to_numpy(gt.asarray(np.array([1, 2], np.int16)))
            array([1, 2], dtype=int16)
        """
        return self._backend.asarray(x)

    def to_numpy(self, x: Array) -> np.ndarray:
        """One array as a NumPy array, a copy without gradient.

        Args:
            x: An array of the backend, of any shape, dtype and device.

        Returns:
            A writable ``numpy.ndarray`` of the same shape and dtype. bfloat16 and float8 are
            those of ml_dtypes; where that is not installed (PyTorch alone), float32.

        Raises:
            GradtoolsError: x is traced or mapped (inside jit, vmap, grad of the framework's
                functional transforms) and has no values to read.

        Example:
            >>> gt.to_numpy(gt.asarray(np.ones(2, np.float32)) * 3)
            array([3., 3.], dtype=float32)
        """
        return self._backend.to_numpy(x)

    def random_key(self, seed: int) -> Array:
        """A random key, made from a seed.

        Args:
            seed: An integer of 64 bits with its sign; in JAX without x64 of 32 bits.

        Returns:
            JAX's typed key, or in PyTorch an int64 tensor of shape (2,). The two frameworks draw
            different numbers from the same seed.

        Raises:
            GradtoolsError: The seed is no integer, or too large.

        Example:
            >>> a, b = gt.random_key(0), gt.random_key(0)
            >>> bool((gt.to_numpy(a) == gt.to_numpy(b)).all())
            True
        """
        return self._backend.random_key(seed)

    def split_key(self, key: Array, n: int = 2) -> Array:
        """Independent keys derived from one key, which must not be used again.

        In PyTorch child i is a hash of the key and i (splitmix64), so it does not depend on n.

        Args:
            key: One key.
            n: How many.

        Returns:
            An array of n keys along axis 0; it unpacks, and vmap maps over it.

        Raises:
            GradtoolsError: ``key`` is not one key, or n is not a positive integer.

        Example:
            >>> first, second, third = gt.split_key(gt.random_key(0), 3)
            >>> bool((gt.to_numpy(first) == gt.to_numpy(second)).all())
            False

        Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
        """
        return self._backend.split_key(key, n)

    def vmap(self, f: Callable[P, R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[P, R]:
        """The function f, written for one example, mapped over a batch axis.

        The framework's own: ``torch.func.vmap`` (whose random operations then differ from
        example to example) or ``jax.vmap``. Keyword arguments are examples in both, as in
        ``jax.vmap``.

        Args:
            f: A function of pytrees of arrays.
            in_axes: The batch axis of each positional argument, None for one that is shared, or
                a dict from f's parameters to axes. Keyword arguments, and arguments that a dict
                does not name, are mapped over axis 0, except for scalars and non-arrays.
            out_axes: The batch axis of each output.

        Returns:
            The mapped function.

        Raises:
            GradtoolsError: f is no function. Wrong axes and sizes raise the framework's own error.

        Example:
            >>> rows = gt.asarray(np.ones((2, 3), np.float32))
            >>> gt.to_numpy(gt.vmap(lambda row: (row * row).sum())(rows))
            array([3., 3.], dtype=float32)
        """
        check_function("vmap", f)
        return like_function("", f, partial(self._mapped, f, in_axes, out_axes))

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
        """The function f; its intermediate results are recomputed in the backward pass.

        It trades one more forward pass of f for the memory of its graph. PyTorch: f is recomputed
        as one chunk of `chunked`: random generators, buffers, attributes and containers are
        restored, so batch normalization counts once. f may capture computed tensors. In compiled
        code it is ``torch.utils.checkpoint`` (not reentrant). JAX: ``jax.checkpoint``.

        Args:
            f: A function of pytrees of arrays.
            verify: PyTorch: whether the recomputation is compared with the first pass, as in
                `chunked`.

        Returns:
            A function of the same value and derivatives.

        Raises:
            GradtoolsError: f is no function, or verify is unknown; (on call, on differentiating)
                as `chunked`, if f changes state that cannot be restored, or recomputes other
                numbers.

        Example:
            >>> square = gt.checkpoint(lambda x: (x * x).sum())
            >>> gt.to_numpy(gt.grad(square)(gt.asarray(np.ones(2, np.float32))))
            array([2., 2.], dtype=float32)
        """
        check_function("checkpoint", f)
        options = ChunkOptions(0, verify=checked_verify("checkpoint", verify))
        return self._backend.like_module(f, partial(self._checkpoint_of, options))

    def _checkpoint_of(self, options: ChunkOptions, f: Callable[..., Any]) -> Callable[..., Any]:
        return like_function("checkpointed_", f, self._backend.checkpoint(f, options))

    def compile(self, f: Callable[P, R], **options: Any) -> Callable[P, R]:
        """The function f, compiled at its first call: ``torch.compile`` or ``jax.jit``.

        Args:
            f: A function of pytrees of arrays.
            options: The framework's own, for example ``fullgraph=True`` or ``static_argnums=0``.

        Returns:
            A function of the same value and derivatives.

        Raises:
            GradtoolsError: f is no function. Unknown options raise the framework's own error.

        Example:
            >>> fast = gt.compile(lambda x: x + 1)
            >>> callable(fast)
            True
        """
        check_function("compile", f)
        return self._backend.compile(f, **options)
