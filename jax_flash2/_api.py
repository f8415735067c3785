"""attention(): the user's words, checked and turned into a `Problem`."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _backends, _vjp
from jax_flash2._operation import Problem
from pallas_kernels.configs import Config
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.mask import Atom, DenseMask, Lengths, SegmentIds, Window
from pallas_kernels.core.score import Score
from pallas_kernels.core.spec import AttentionSpec

# Positions stay below this, so that int32 sums of a few of them do not overflow.
_FAR = 1 << 28


def attention(
    query,
    key,
    value,
    *,
    mask=None,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    query_offset=0,
    precision=None,
    implementation: str | None = None,
    config: Config | None = None,
    return_residual: bool = False,
):
    """Exact attention with memory linear in the lengths (FlashAttention-2).

        s = scale * query . key
        p = softmax(s over the keys that the query may attend to)
        out = p . value

    B stands for any number of batch axes (none included), T for query rows, S for key
    rows, N for query heads, K for key/value heads, H and Hv for head sizes. T and S may
    be any number, 0 included; H and Hv from 1 to 256 in the GPU kernels.

    Args:
      query: [*B, T, N, H], bfloat16, float16 or float32; or [T, H], a single head.
      key: [*B, S, K, H] in the dtype of query; or [S, H]. K divides N: query head n
        reads key/value head n // (N // K) (grouped-query attention).
      value: [*B, S, K, Hv] in the dtype of query; or [S, Hv].
      mask: bool, True where a query may attend to a key; broadcasts against
        [*B, N, T, S] ([T, S] for a single head), missing axes on the left.
      scale: multiplies query . key; 1 / sqrt(H) by default.
      is_causal: attend only to keys at or before the query's position.
      query_seq_lengths: int32 [*B], rows of query from here on are padding: their
        output is 0. Values outside [0, T] are clipped.
      key_value_seq_lengths: int32 [*B], rows of key and value from here on are padding:
        they are attended to by none, and nothing in them (NaN, inf) reaches any result.
        Values outside [0, S] are clipped.
      local_window_size: (left, right): a query at position p attends to keys from
        p - left to p + right, both inclusive; None is unbounded on that side, an int w
        is (w, w). With is_causal the right side is 0.
      query_segment_ids: int32 [*B, T]; attend only where the ids of query and key are
        equal. Ids need not be sorted; blocks without a common id are skipped.
      key_value_segment_ids: int32 [*B, S]; query_segment_ids by default if T == S.
      query_offset: position of query row 0 (that of key row 0 is 0): an int, an int32
        scalar or [*B]. 0 is top-left causal, S - T bottom-right. Used by is_causal and
        local_window_size. Values beyond +-2**28 are clipped.
      precision: of products of float32 inputs: None or "default" (TF32 on a GPU),
        "highest" (true float32), or a `jax.lax.Precision`.
      implementation: "triton" (Pallas kernels, NVIDIA GPUs), "xla" (plain JAX loops, any
        platform), "reference" (quadratic memory, for tests), or None: the first of
        "triton" and "xla" that serves the call. A name never falls back.
      config: block sizes of the kernels, or interpreted kernels: see `Config`.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      out: [*B, T, N, Hv] ([T, Hv]) in the dtype of query. A row that may attend to no
      key is 0, and all its gradients are 0.
      With return_residual, (out, lse): lse float32 [*B, T, N] ([T]), natural logarithm,
      -inf for a row without keys. Both are differentiable.

    Raises:
      TypeError, ValueError: naming the argument, what came and what was expected.

    Numerics: softmax and sums are in float32; probabilities are rounded to the dtype of
    value before they multiply it, as in `jax.nn.dot_product_attention`. Same inputs on
    the same GPU give the same bits.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import attention
      >>> q = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))  # 8 query heads
      >>> k = jax.random.normal(jax.random.key(1), (2, 100, 2, 64))  # 2 key/value heads
      >>> out = attention(q, k, k, is_causal=True, local_window_size=(31, 0))
      >>> out.shape
      (2, 100, 8, 64)

      A single head, mapped over heads that lie in the middle (no transpose is made):

      >>> heads = jax.vmap(attention, in_axes=1, out_axes=1)
      >>> heads(q[0], q[0], q[0]).shape
      (100, 8, 64)

    References: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and
    Work Partitioning" (2023), section 3; Ainslie et al. (2023) for grouped queries.
    """
    problem, arrays = _prepare(**locals())
    out, lse = _vjp.attend(problem, arrays)
    if not return_residual:
        return out
    return out, lse if lse.ndim == 1 else jnp.swapaxes(lse, -1, -2)


def explain(query, key, value, **arguments) -> str:
    """Which implementation serves a call on this machine, and why the others do not.

    Args:
      query, key, value, **arguments: as for `attention`; arrays or
        `jax.ShapeDtypeStruct`.

    Returns:
      A text of one line for the decision and one for each implementation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import explain
      >>> x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
      >>> print(explain(x, x, x, implementation="xla").splitlines()[0])
      implementation: xla
    """
    shapes = {"query": query, "key": key, "value": value}
    for name, x in shapes.items():
        _check_array(name, x)
    implementation = arguments.get("implementation")
    _check_implementation(implementation)
    facts = _facts(query, key, value, arguments.get("config"))
    return _backends.explain(implementation, facts)


def _facts(query, key, value, config) -> dict:
    head_sizes = (key.shape[-1], value.shape[-1])
    return {"dtype": query.dtype, "head_sizes": head_sizes, "config": config}


def _prepare(
    query,
    key,
    value,
    *,
    mask,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    query_segment_ids,
    key_value_segment_ids,
    query_offset,
    precision,
    implementation,
    config,
    return_residual,
) -> tuple[Problem, tuple[jax.Array, ...]]:
    """Checks every argument; returns what is static and what is not."""
    query, key, value = _check_operands(query, key, value)
    _check_bool("is_causal", is_causal)
    _check_bool("return_residual", return_residual)
    _check_implementation(implementation)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a jax_flash2.Config, got {config!r}")
    scale = _check_scale(scale, query.shape[-1])
    precision = _check_precision(precision)

    shape = _Shape(query, key, value)
    masks: list[Atom] = []
    window = _check_window(local_window_size, is_causal)
    if window is not None:
        masks.append(window)
    lengths = [
        shape.lengths(name, x, size)
        for name, x, size in (
            ("query_seq_lengths", query_seq_lengths, shape.t),
            ("key_value_seq_lengths", key_value_seq_lengths, shape.s),
        )
    ]
    if any(x is not None for x in lengths):
        masks.append(Lengths(*lengths))
    segments = shape.segments(query_segment_ids, key_value_segment_ids)
    if segments is not None:
        masks.append(segments)
    if mask is not None:
        masks.append(shape.mask(mask))
    offset, traced_offset = shape.offset(query_offset)
    if window is None:
        offset, traced_offset = 0, None  # nothing asks for positions
    spec = AttentionSpec(Score(scale), tuple(masks), offset, traced_offset)

    leaves, tree = jax.tree.flatten(spec)
    operands = [*shape.operands(query, key, value), *leaves]
    problem = Problem(
        axes=tuple(x.axes for x in operands),
        spec_tree=tree,
        backend=_backends.choose(implementation, _facts(query, key, value, config)),
        config=config,
        precision=precision,
    )
    return problem, tuple(x.value for x in operands)


class _Shape:
    """The sizes of a call, and the checks of arguments against them."""

    def __init__(self, query, key, value):
        del value
        self.single = query.ndim == 2
        self.batch = query.shape[:-3]
        self.batch_axes = tuple(f"b{i}" for i in range(len(self.batch)))
        self.t, self.s = (
            x.shape[0] if self.single else x.shape[-3] for x in (query, key)
        )
        self.heads = () if self.single else (query.shape[-2],)

    def operands(self, query, key, value) -> list[Named]:
        def axes(rows: str, heads: str, head: str) -> Axes:
            return (*self.batch_axes, rows, *([] if self.single else [heads]), head)

        return [
            Named(query, axes("t", "n", "h")),
            Named(key, axes("s", "k", "h")),
            Named(value, axes("s", "k", "d")),
        ]

    def _ids(self, name: str, x, shape: tuple[int, ...], axes: Axes) -> Named:
        """An integer array of exactly this shape."""
        x = _as_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be int32, got {x.dtype.name}")
        if x.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} for query of batch shape "
                f"{self.batch}, got {x.shape}"
            )
        return Named(x.astype(jnp.int32), axes)

    def lengths(self, name: str, x, size: int) -> Named | None:
        if x is None:
            return None
        x = self._ids(name, x, self.batch, self.batch_axes)
        return Named(jnp.clip(x.value, 0, size), x.axes)

    def segments(self, query_ids, key_value_ids) -> SegmentIds | None:
        if query_ids is None and key_value_ids is None:
            return None
        if query_ids is None:
            raise ValueError(
                "key_value_segment_ids came without query_segment_ids: give both"
            )
        if key_value_ids is None:
            if self.t != self.s:
                raise ValueError(
                    "query_segment_ids alone stand for the keys' too, which needs "
                    f"T == S, got T={self.t} and S={self.s}: give "
                    "key_value_segment_ids"
                )
            key_value_ids = query_ids
        rows = (
            ("query_segment_ids", query_ids, "t", self.t),
            ("key_value_segment_ids", key_value_ids, "s", self.s),
        )
        return SegmentIds(
            *(
                self._ids(name, ids, (*self.batch, size), (*self.batch_axes, axis))
                for name, ids, axis, size in rows
            )
        )

    def mask(self, x) -> DenseMask:
        x = _as_array("mask", x)
        if x.dtype != jnp.bool_:
            raise TypeError(
                f"mask must be bool (True = attend), got {x.dtype.name}; "
                "use mask.astype(bool) or mask != 0"
            )
        full = (*self.batch, *self.heads, self.t, self.s)
        names = (*self.batch_axes, *(["n"] if self.heads else []), "t", "s")
        return DenseMask(_broadcast("mask", x, full, names))

    def offset(self, x) -> tuple[int, Named | None]:
        """The static and the traced part of query_offset."""
        if isinstance(x, int | np.integer) and not isinstance(x, bool):
            return int(min(max(x, -_FAR), _FAR)), None
        x = _as_array("query_offset", x)
        shape = self.batch if x.ndim else ()
        x = self._ids("query_offset", x, shape, self.batch_axes if x.ndim else ())
        return 0, Named(jnp.clip(x.value, -_FAR, _FAR), x.axes)


def _broadcast(name: str, x, full: tuple[int, ...], names: Axes) -> Named:
    """Names the axes of `x`, which broadcasts against `full` (axes `names`)."""
    fits = x.ndim <= len(full) and all(
        size in (1, whole)
        for size, whole in zip(x.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast against {full}, got shape {x.shape}")
    last = len(full) - x.ndim
    axes = (
        None if size == 1 and whole != 1 else axis
        for size, whole, axis in zip(x.shape, full[last:], names[last:], strict=True)
    )
    return Named(x, tuple(axes))


def _as_array(name: str, x) -> jax.Array:
    _check_array(name, x)
    return jnp.asarray(x)


def _check_array(name: str, x) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")


def _check_operands(query, key, value):
    operands = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        _check_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name} must be bfloat16, float16 or float32, got {x.dtype.name}"
            )
        if x.dtype != query.dtype:
            raise TypeError(
                "query, key and value must have one dtype, got query "
                f"{query.dtype.name} and {name} {x.dtype.name}"
            )
        if x.ndim == 1 or x.ndim == 0:
            raise ValueError(
                f"{name} must be [*B, rows, heads, head size] or [rows, head size], "
                f"got shape {x.shape}"
            )
        if x.ndim != query.ndim:
            raise ValueError(
                "query, key and value must have the same rank, got query "
                f"{query.shape} and {name} {x.shape}"
            )
        if x.shape[-1] == 0:
            raise ValueError(f"{name} has head size 0: shape {x.shape}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same head size, got query {query.shape} and "
            f"key {key.shape}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            "key and value must agree in all but the head size, got key "
            f"{key.shape} and value {value.shape}"
        )
    if query.ndim > 2:
        if query.shape[:-3] != key.shape[:-3]:
            raise ValueError(
                "query and key must have the same batch axes, got query "
                f"{query.shape} and key {key.shape}"
            )
        n, k = query.shape[-2], key.shape[-2]
        if (k == 0 and n != 0) or (k != 0 and n % k):
            raise ValueError(
                f"the {k} heads of key must divide the {n} heads of query, got query "
                f"{query.shape} and key {key.shape}"
            )
    return tuple(jnp.asarray(x) for x in operands.values())


def _check_bool(name: str, x) -> None:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be a Python bool, got {x!r}")


def _check_implementation(implementation) -> None:
    if implementation is not None and implementation not in _backends.NAMES:
        raise ValueError(
            f"implementation must be None or one of {_backends.NAMES}, got "
            f"{implementation!r}"
        )


def _check_scale(scale, head_size: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_size)
    try:
        scale = float(scale)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            "scale must be a Python number, known when the program is compiled, got "
            f"{type(scale).__name__}; fold a traced scale into query"
        ) from error
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def _check_precision(precision) -> jax.lax.Precision | None:
    if precision is None or isinstance(precision, jax.lax.Precision):
        return precision
    try:
        return jax.lax.Precision(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "precision must be None, 'default', 'high', 'highest' or a "
            f"jax.lax.Precision, got {precision!r}"
        ) from error


def _check_window(window: Any, is_causal: bool) -> Window | None:
    if window is None:
        return Window(None, 0) if is_causal else None
    sides = (window, window) if not isinstance(window, tuple | list) else window
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be an int or a pair (left, right), got {window!r}"
        )
    bounds: list[int | None] = []
    for side in sides:
        if side is not None:
            if isinstance(side, bool):
                raise TypeError(f"local_window_size must hold ints, got {window!r}")
            try:
                side = operator.index(side)
            except TypeError as error:
                raise TypeError(
                    f"local_window_size must hold Python ints or None, got {window!r}"
                ) from error
            if side < 0:
                raise ValueError(
                    f"local_window_size must not be negative, got {window!r}"
                )
            side = side if side < _FAR else None
        bounds.append(side)
    left, right = bounds
    return Window(left, 0 if is_causal else right)
