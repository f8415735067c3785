"""attention(): the user's words, turned into a `Problem`."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp

from jax_flash2 import _arguments, _backends, _derivatives, _vjp
from jax_flash2._operation import Problem
from pallas_kernels.backend import Call
from pallas_kernels.configs import Config
from pallas_kernels.core.mask import Atom, Lengths
from pallas_kernels.core.score import Score
from pallas_kernels.core.spec import AttentionSpec


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal: bool = False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    query_offset=0,
    logits_soft_cap: float | None = None,
    alibi_slopes=None,
    sinks=None,
    dropout_rate: float = 0.0,
    dropout_rng=None,
    broadcast_dropout: bool = False,
    precision=None,
    implementation: str | None = None,
    config: Config | None = None,
    return_residual: bool = False,
):
    """Exact attention with memory linear in the lengths (FlashAttention-2).

        s = soft_cap(scale * query . key + bias + alibi)
        p = softmax(s over the keys that the query may attend to, and the sink)
        out = dropout(p) . value

    B stands for any number of batch axes (none included), T for query rows, S for key
    rows, N for query heads, K for key/value heads, H and Hv for head sizes. T and S may
    be any number, 0 included; H and Hv from 1 to 512 in the GPU kernels.

    Args:
      query: [*B, T, N, H], bfloat16, float16 or float32 (float64 under x64 with
        "xla"); or [T, H], a single head.
      key: [*B, S, K, H] in the dtype of query; or [S, H]. K divides N: query head n
        reads key/value head n // (N // K) (grouped-query attention).
      value: [*B, S, K, Hv] in the dtype of query; or [S, Hv].
      bias: added to the scaled products: any float dtype, broadcasts against
        [*B, N, T, S] ([T, S] for a single head), missing axes on the left. -inf masks.
        To mask, pass `mask` rather than large negative numbers: a row whose scores are
        all below about -1e5 may have inexact gradients, and from -1e7 on none, for the
        float32 log-sum-exp that the backward pass works from has no digits left.
        Differentiable; its gradient is summed inside the kernels, in memory of its own
        size (one for each element of an axis that `jax.vmap` maps).
      mask: bool, True where a query may attend to a key; broadcasts against
        [*B, N, T, S] ([T, S] for a single head), missing axes on the left.
      scale: multiplies query . key: a number, which becomes part of the program, or a
        scalar `jax.Array`, traced or not, which is data and has a gradient (a learnt
        temperature). 1 / sqrt(H) by default.
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
        equal. Ids need not be sorted; blocks without a common id are skipped. What
        finite numbers a segment holds changes no bit of another's results. NaN and inf
        stay in their segment where no block of rows has both, and may pass where one
        has: blocks are of 16 to 256 rows, see `Config`.
      key_value_segment_ids: int32 [*B, S]; query_segment_ids by default if T == S.
      query_offset: position of query row 0 (that of key row 0 is 0): an int, an int32
        scalar or [*B]. 0 is top-left causal, S - T bottom-right. Used by is_causal,
        local_window_size and alibi_slopes. Other values compile nothing anew, ints
        included. Values beyond +-2**28 are clipped.
      logits_soft_cap: c > 0: scores become c * tanh(score / c) (Gemma 2), before masks.
      alibi_slopes: float [N] or [*B, N] (a scalar for a single head), mostly >= 0:
        adds -slope * |query position - key position| (Press et al. 2021), computed in
        the kernel. Differentiable.
      sinks: float [N] (a scalar for a single head): one more logit for each head that
        takes part in the softmax, and so in the log-sum-exp, and has no value
        (gpt-oss). A row without keys is 0 and -inf nevertheless. Differentiable.
      dropout_rate: chance in [0, 1) that a probability is dropped; the others are
        multiplied by 1 / (1 - rate). The rate is rounded to a multiple of 2**-16.
      dropout_rng: a JAX key (typed, or raw uint32), needed if dropout_rate > 0. What is
        dropped follows from the key and from batch entry, head, query row and key row
        alone: the same on every backend, with every block size and under vmap.
      broadcast_dropout: drop the same pairs in every batch entry and head (Flax).
      precision: of products of float32 inputs: "default" and "high" (TF32 on a GPU),
        "highest" (true float32), or a `jax.lax.Precision`. A
        `jax.lax.DotAlgorithmPreset` takes the one of these that is at least as exact, a
        pair its more exact half. None takes `jax.default_matmul_precision`.
      implementation: "triton" (Pallas kernels, NVIDIA GPUs), "xla" (plain JAX loops,
        any platform), "reference" (quadratic memory, for tests), or None: the first
        of "triton" and "xla" that serves the call. A name never falls back.
      config: block sizes, or interpreted kernels: see `Config`.
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

    Derivatives: reverse mode, and both modes over reverse mode (`jax.grad` of
    `jax.grad`, `jax.hessian`), in linear memory; with "triton" the tangents of second
    derivatives run as "xla". Forward mode itself (`jax.jvp`, `jax.linearize`) with
    "xla". Third derivatives by forward mode over second ones, or with "reference".

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

      A learnt bias shared by the batch, Gemma's soft cap, dropout; ALiBi and sinks:

      >>> bias = jnp.zeros((1, 8, 100, 100))
      >>> rng = jax.random.key(2)
      >>> out = attention(
      ...     q, k, k, bias, logits_soft_cap=50.0, dropout_rate=0.1, dropout_rng=rng
      ... )
      >>> slopes = 2.0 ** -jnp.arange(1, 9)
      >>> out = attention(q, k, k, alibi_slopes=slopes, sinks=jnp.zeros(8))

      A new chunk of 4 queries against a cache of which each row has its own length:

      >>> lengths = jnp.array([60, 96])  # keys in the cache, the chunk's among them
      >>> out = attention(
      ...     q[:, :4],
      ...     k,
      ...     k,
      ...     is_causal=True,
      ...     query_offset=lengths - 4,
      ...     key_value_seq_lengths=lengths,
      ... )

    References: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and
    Work Partitioning" (2023), section 3; Ainslie et al. (2023) for grouped queries;
    Press et al. (2021) for ALiBi; Salmon et al. (2011) for dropout's Philox bits.
    """
    query, key, value = _arguments.check_operands(query, key, value)
    _arguments.check_bool("is_causal", is_causal)
    _arguments.check_bool("return_residual", return_residual)
    _arguments.check_implementation(implementation)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a jax_flash2.Config, got {config!r}")
    precision = _arguments.check_precision(precision)

    shape = _arguments.Shape(query, key, value)
    masks: list[Atom] = []
    window = _arguments.check_window(local_window_size, is_causal)
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
    masks += shape.segments(query_segment_ids, key_value_segment_ids)
    if mask is not None:
        masks.append(shape.mask(mask))
    scale, factor = shape.scale(scale)
    score = Score(
        scale,
        _arguments.check_soft_cap(logits_soft_cap),
        None if bias is None else shape.bias(bias),
        None if alibi_slopes is None else shape.slopes(alibi_slopes),
        factor,
    )
    spec = AttentionSpec(
        score,
        tuple(masks),
        shape.offset(query_offset),
        sink=None if sinks is None else shape.sinks(sinks),
        dropout=shape.dropout(dropout_rate, dropout_rng, broadcast_dropout),
    )
    if not spec.positional:
        spec = dataclasses.replace(spec, offset=None)
    call = Call(*shape.operands(query, key, value), spec, config, precision)
    operands = call.operands
    problem = Problem(
        axes=tuple(x.axes for x in operands),
        spec_tree=jax.tree.structure(spec),
        backend=_backends.choose(implementation, call),
        config=config,
        precision=precision,
    )
    with _derivatives.named_mode(problem.backend):
        out, lse = _vjp.attend(problem, tuple(x.value for x in operands))
    if not return_residual:
        return out
    return out, lse if shape.single else jnp.swapaxes(lse, -1, -2)


def explain(*arguments, **keywords) -> str:
    """Which implementation serves a call on this machine, and why the others do not.

    Args:
      *arguments, **keywords: as for `attention`; arrays or `jax.ShapeDtypeStruct`.

    Returns:
      A text of one line for the decision and one for each implementation.

    Raises:
      TypeError: if `attention` has no such argument.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import explain
      >>> x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
      >>> print(explain(x, x, x, implementation="xla").splitlines()[0])
      implementation: xla
    """
    given = inspect.signature(attention).bind(*arguments, **keywords).arguments
    for name in ("query", "key", "value"):
        _arguments.check_array(name, given[name])
    implementation = given.get("implementation")
    _arguments.check_implementation(implementation)
    arrays = [x for x in given.values() if hasattr(x, "shape")]
    return _backends.explain(implementation, _facts(arrays, given.get("config")))


def _facts(arrays, config) -> dict:
    """What the choice of a backend depends on; arrays: query, key, value and others."""
    query, key, value, *_ = arrays
    elements = [math.prod(x.shape) for x in arrays]
    return {
        "dtype": query.dtype,
        "head_sizes": (key.shape[-1], value.shape[-1]),
        # Symbolic sizes (`jax.export`) cannot be compared.
        "elements": max((n for n in elements if isinstance(n, int)), default=0),
        "symbolic": not all(isinstance(n, int) for n in elements),
        "config": config,
    }
