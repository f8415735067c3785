"""jax.nn's attention by the kernels: the same call, and a way to put it in its place.

For libraries that call `jax.nn.dot_product_attention` and take no function of the
user's, as `flax.nnx` by default and Keras on JAX. In code of your own, call
`jax_flash2.attention`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash2._api import attention
from jax_flash2._arrays import as_array, unwrapped
from pallas_kernels.core.promotion import at_least_float32


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
):
    """`jax.nn.dot_product_attention`: its arguments, its results, our kernels.

    B, T, S, N, K and H are as for `jax_flash2.attention`, with one batch axis. Arrays
    may have fewer axes: the first ones are then 1, so [T, N, H] is one batch entry.

    What differs: a query without keys gets 0, where jax.nn gives the mean of all
    values; its residual is -inf there.

    Args:
      query: [B, T, N, H], bfloat16, float16, float32, or float64 under x64.
      key: [B, S, K, H], in the dtype of query; K divides N.
      value: [B, S, K, H] (or of another head size), in the dtype of query.
      bias: added to the scaled products, of any float or integer dtype, or bool.
        Broadcasts to [B, N, T, S].
      mask: bool, True where a query may attend to a key. Broadcasts to [B, N, T, S].
      scale: multiplies query . key; None for 1 / sqrt(H).
      is_causal: if True, query row t attends to keys up to row t.
      query_seq_lengths: [B] integers, the number of valid queries; later rows get 0.
      key_value_seq_lengths: [B] integers, the number of valid keys.
      local_window_size: (left, right), or an int for both.
      implementation: None, "xla" or "cudnn". All mean the same: the best implementation
        of `jax_flash2.attention` for the call.
      return_residual: if True, also return the log-sum-exp.

    Returns:
      [B, T, N, H], with the axes and the dtype of query. If return_residual is True,
      with the log-sum-exp [B, T, N] in that dtype. It has no gradient, as in jax.nn;
      that of `jax_flash2.attention` has one.

    Raises:
      ValueError, TypeError: as `jax_flash2.attention`; or if an array has more than 4
        axes, or `implementation` is another one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_flash2.nn
      >>> x = jax.random.normal(jax.random.key(0), (2, 50, 4, 32))
      >>> out = jax_flash2.nn.dot_product_attention(x, x, x, is_causal=True)
      >>> expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
      >>> bool(jnp.allclose(out, expected, atol=2e-2))
      True
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            "implementation must be None, 'xla' or 'cudnn', as in jax.nn, got "
            f"{implementation!r}: jax_flash2.attention has implementations by name"
        )
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    given = {k: _array(k, x) for k, x in arrays.items() if x is not None}
    q = given["query"]
    added = given.get("bias")
    if added is not None and not jnp.issubdtype(added.dtype, jnp.inexact):
        given["bias"] = added.astype(at_least_float32(q.dtype))
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    options: Any = {
        "scale": scale,
        "is_causal": bool(is_causal) if isinstance(is_causal, int) else is_causal,
        "local_window_size": local_window_size,
        "return_residual": bool(return_residual),
        **{k: _numbers(x) for k, x in lengths.items()},
    }
    four = {k: _with_four_axes(k, x) for k, x in given.items()}
    found: Any = attention(**four, **options)
    out, *residuals = found if return_residual else (found,)
    out = out.reshape(*q.shape[:-1], out.shape[-1])
    if not residuals:
        return out
    residual = residuals[0].reshape(q.shape[:-1]).astype(q.dtype)
    return out, jax.lax.stop_gradient(residual)


def _array(name: str, x: Any) -> jax.Array:
    """Of anything that `jax.numpy.asarray` takes."""
    x = unwrapped(x)
    return as_array(name, x if hasattr(x, "dtype") else jnp.asarray(x))


def _numbers(x: Any) -> Any:
    """Of lists, too."""
    return np.asarray(x) if isinstance(x, Sequence) else x


def _with_four_axes(name: str, x: jax.Array) -> jax.Array:
    if x.ndim > 4:
        raise ValueError(f"{name} must have at most 4 axes, got shape {x.shape}")
    return x.reshape(*(1,) * (4 - x.ndim), *x.shape)


_lock = threading.Lock()
_replaced: list[Any] = []  # jax.nn's own, once for each `install`


def install() -> None:
    """Puts `dot_product_attention` in the place of `jax.nn.dot_product_attention`.

    For the whole process, all threads, until `uninstall` was called as often. What
    calls it as `jax.nn.dot_product_attention` gets this one; who has made a name of
    its own for it before (`from jax.nn import dot_product_attention`) does not. What
    was traced before stays as it is: a function that `jax.jit` has compiled keeps the
    attention that it was traced with until it is traced anew, then, and after
    `uninstall` alike (`jax.clear_caches` forgets all).

    Raises:
      RuntimeError: if something else took its place since the first `install`.

    Example:
      >>> import jax, jax_flash2.nn
      >>> jax_flash2.nn.install()
      >>> jax.nn.dot_product_attention is jax_flash2.nn.dot_product_attention
      True
      >>> jax_flash2.nn.uninstall()
      >>> jax.nn.dot_product_attention is jax_flash2.nn.dot_product_attention
      False
    """
    with _lock:
        if _replaced:
            _check_place()
        _replaced.append(_replaced[0] if _replaced else jax.nn.dot_product_attention)
        jax.nn.dot_product_attention = dot_product_attention


def uninstall() -> None:
    """Undoes one `install`; the last one puts jax.nn's own function back.

    Raises:
      RuntimeError: if it is not installed, or something else took its place since:
        that stays.

    Example:
      >>> import jax_flash2.nn
      >>> jax_flash2.nn.install()
      >>> jax_flash2.nn.uninstall()
    """
    with _lock:
        if not _replaced:
            raise RuntimeError("jax_flash2.nn is not installed: call install() first")
        own = _replaced.pop()
        if not _replaced:
            _check_place()
            jax.nn.dot_product_attention = own


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A context with `install` on entry and `uninstall` on exit. Contexts may nest.

    Raises:
      RuntimeError: as these do.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_flash2.nn
      >>> x = jnp.ones((2, 50, 4, 32))
      >>> with jax_flash2.nn.installed():
      ...     print(jax.nn.dot_product_attention(x, x, x, implementation="cudnn").shape)
      (2, 50, 4, 32)
    """
    install()
    try:
        yield
    finally:
        uninstall()


def _check_place() -> None:
    found = jax.nn.dot_product_attention
    if found is not dot_product_attention:
        raise RuntimeError(
            "jax.nn.dot_product_attention was replaced by something else after "
            f"jax_flash2.nn.install(), and stays as it is: {found!r}"
        )
