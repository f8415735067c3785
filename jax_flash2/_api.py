"""attention(): what a caller gives, checked and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _context, _fp8, _options, _sharding, _vjp
from jax_flash2._arguments import Arguments, Array, Precision, Window
from jax_flash2._arrays import unwrapped
from jax_flash2._block_mask import BlockMask
from jax_flash2._rows import Context
from pallas_kernels.configs import Config


class _Options(TypedDict, total=False):
    """The keywords of `attention` that do not change the type of its result.

    For the overloads below alone: what they share can only be said in this form.
    """

    scale: float | Array | None
    is_causal: bool
    query_seq_lengths: Array | None
    key_value_seq_lengths: Array | None
    key_value_seq_starts: Array | None
    local_window_size: Window | None
    query_segment_ids: Array | None
    key_value_segment_ids: Array | None
    query_offset: int | np.integer | Array
    logits_soft_cap: float | None
    alibi_slopes: Array | None
    sinks: Array | None
    dropout_rate: float
    dropout_rng: Array | None
    broadcast_dropout: bool
    precision: Precision | None
    implementation: str | None
    config: Config | None
    context: Context | None
    score_mod: Callable | None
    mask_mod: Callable | None
    block_mask: BlockMask | None
    query_scale: float | Array | None
    key_scale: float | Array | None
    value_scale: float | Array | None


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    return_residual: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    return_residual: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    return_residual: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, ...]: ...


@_options.names_unknown_keywords
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    key_value_seq_starts: Array | None = None,
    local_window_size: Window | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    query_offset: int | np.integer | Array = 0,
    logits_soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    precision: Precision | None = None,
    implementation: str | None = None,
    config: Config | None = None,
    context: Context | None = None,
    return_residual: bool = False,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    return_max_logit: bool = False,
    block_mask: BlockMask | None = None,
    query_scale: float | Array | None = None,
    key_scale: float | Array | None = None,
    value_scale: float | Array | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Computes exact attention in memory linear in the sequence lengths.

        s = score_mod(soft_cap(scale * query . key + bias + alibi))
        p = softmax(s over the keys that the query may attend to, and the sink)
        out = dropout(p) . value

    B stands for any number of batch axes (including none), T for the number of queries,
    S for the number of keys, N for query heads, K for key/value heads, and H and Hv for
    the head sizes. T and S may be any number, including 0. The GPU kernels support H
    and Hv from 1 to 512.

    Args:
      query: [*B, T, N, H], or [T, H] for a single head. The dtype is bfloat16, float16,
        float32 or float64. float64 requires x64 mode and runs on "xla". Or it is
        float8_e4m3fn, with `query_scale`.
      key: [*B, S, K, H], or [S, H], in the dtype of query; beside wider queries also
        int8, float8_e4m3fn or float8_e5m2, with `key_scale`. K must divide N: query
        head n reads key/value head n // (N // K) (grouped-query attention).
      value: [*B, S, K, Hv], or [S, Hv], likewise, with `value_scale`.
      bias: added to the scaled products. It has any float dtype and broadcasts to
        [*B, N, T, S] ([T, S] for a single head). -inf masks a pair: the query does not
        attend to the key, whatever the rest of its score. With a soft cap, so does a
        bias of at most -2**24 (as -1e9) or of the lowest number of its dtype, of which
        the cap would make the score -logits_soft_cap. Differentiable:
        the kernels sum its gradient, which takes as much memory as the bias (times the
        size of each axis that `jax.vmap` maps). Use `mask`, not large negative numbers,
        to mask pairs: gradients of a row lose accuracy if all its scores are below
        about -1e5, and all digits from about -1e7, because the backward pass recomputes
        probabilities from the float32 log-sum-exp.
      mask: bool, True where a query may attend to a key. Broadcasts to [*B, N, T, S]
        ([T, S] for a single head). [B, T, S] is a mask for each head if B = N, as in
        jax.nn, and an error if not: for one for each batch entry pass mask[:, None].
        Of keys alone, pass [B, 1, 1, S]. If all queries and heads of a batch entry drop
        a key, its contents and those of its value (even NaN and inf) never reach a
        result. If only some do, finite contents never change their results, but NaN,
        inf and products that overflow can leak, because 0 * NaN is NaN.
      scale: multiplies query . key. Default: 1 / sqrt(H). A Python number is compiled
        into the program. A scalar `jax.Array` is data, may be traced, and has a
        gradient (a learnt temperature).
      is_causal: if True, a query attends only to keys at or before its position.
      query_seq_lengths: int32 [*B], the number of valid queries. Later rows are padding
        and their output is 0. Values are clipped to [0, T].
      key_value_seq_lengths: int32 [*B], the number of valid keys. No query attends to
        later rows, and their contents (even NaN and inf) never reach a result. Values
        are clipped to [0, S].
      key_value_seq_starts: int32 [*B], the first valid key (padding on the left), with
        its position unchanged. What is said of later rows holds for those before it.
      local_window_size: (left, right): a query at position p attends to the keys from
        p - left to p + right, inclusive. None means unbounded on that side. An int w
        means (w, w). If is_causal is True, right is 0.
      query_segment_ids: int32 [*B, T]. A query attends only to keys with the same id.
        Ids may come in any order, and NumPy's may have 64 bits (others only under x64:
        `jax.numpy` and `jax.jit` cut them to 32). The kernels skip blocks without a
        common id. Finite values in one segment never change another segment's results
        by a single bit (with precision="fp8" they may: all of a head have one scale).
        NaN and inf can leak between segments that share a block: 16 to 256 rows in the
        kernels, or more keys in "xla" if queries are few (see `Config`).
      key_value_segment_ids: int32 [*B, S]. Default: query_segment_ids, if T == S.
      query_offset: the position of query row 0, as an int, an int32 scalar or int32
        [*B]. Key row 0 has position 0, so 0 aligns a causal mask to the top left and
        S - T to the bottom right. is_causal, local_window_size and alibi_slopes use
        positions. A new value never triggers a compilation, not even an int. Values are
        clipped to +-2**28.
      logits_soft_cap: c > 0 replaces each score by c * tanh(score / c) before masking
        (Gemma 2). Very negative biases still mask; see `bias`.
      alibi_slopes: float [N] or [*B, N] (a scalar for a single head), usually >= 0.
        Adds -slope * |query position - key position| to the scores (Press et al. 2021).
        The kernels compute this term. Differentiable.
      sinks: float [N] (a scalar for a single head), one extra logit per head. It takes
        part in the softmax and in the log-sum-exp but has no value (gpt-oss). A row
        without keys still returns 0 and -inf. Differentiable.
      dropout_rate: the probability in [0, 1) of dropping each attention weight. Kept
        weights are multiplied by 1 / (1 - rate). It is rounded to a multiple of 2**-16.
      dropout_rng: a JAX random key, typed or raw uint32. Required if dropout_rate > 0.
        The dropped pairs depend only on its words, batch entry, head, query row and key
        row. They do not depend on the kind of key, on the implementation, on block
        sizes, on vmap or on a setting of JAX. Inside `jax.shard_map` each device counts
        its batch entries and heads from 0: fold its place along their mesh axes into
        the key.
        For a query, keys 8 or 24 apart may have a correlation of up to 1/256, unless
        the rate is a multiple of 1/256.
      broadcast_dropout: if True, every batch entry and head drops the same pairs (as
        in Flax).
      precision: the precision of products of float32 inputs: "default" or "high" (TF32
        on a GPU), "highest" (true float32), or a `jax.lax.Precision`. For a
        `jax.lax.DotAlgorithmPreset`, attention uses the first of these that is at least
        as exact. For a pair, it uses the more exact half. Default:
        `jax.default_matmul_precision`. Or "fp8": bfloat16 or float16 inputs are
        quantised to float8_e4m3fn, with a scale for each batch entry and head, for
        products that are up to twice as fast on Hopper. Forward only; see Numerics.
      implementation: "mosaic_gpu" (Pallas kernels for Hopper; gradients and tangents
        that these lack are those of "triton"), "triton" (Pallas kernels, NVIDIA GPUs),
        "xla" (plain JAX loops, any platform), "reference" (quadratic memory, for
        tests), or None. None takes the first of the first three that supports the call,
        unless the next one supports it too and is known to be faster. A named
        implementation runs or raises; it never falls back. Only by name:
        "mosaic_gpu_ampere" and "mosaic_gpu_blackwell", forward kernels, which have not
        run on a card.
      config: block sizes, or interpreted kernels; see `Config`.
      context: inside `jax.shard_map` or `jax.pmap`, over which devices the rows are
        divided, and how; see `Context`. query, key, value, segment ids and the results
        then have this device's rows. A bias or mask with T = 1 or S = 1 has this
        device's rows along the other axis. One with both has this device's queries and
        the keys of all devices, in their order (not striped). Lengths and positions
        count the rows of all devices.
      return_residual: if True, also return the log-sum-exp of the scores, which has a
        gradient (that of jax.nn has none). For results over parts of the keys, call
        `jax_flash2.merge`: a formula of your own has NaN gradients where a part has no
        keys for a row (-inf - -inf).
      score_mod: a function (score, b, h, q, kv) -> score of one pair, as FlexAttention
        has it (Dong et al. 2024). It gets the float32 score (float64 for float64
        inputs) that the softmax would see otherwise, and returns another. Masks come
        after it, and -inf masks the pair. b is the number of the batch entry (row-major
        of several batch axes, 0 without any), h that of the query head, q and kv are
        positions, with query_offset in q; all are int32 scalars. Inside `jax.shard_map`
        b and h count what the device has, and positions the rows of all devices of a
        `context`.
        It is a JAX function of numbers that is traced once: its operations are
        pointwise, and every axis of a captured array is indexed by a number, as in x[h,
        kv] or table[h, jnp.clip(q - kv, 0, 9)]. An index beyond an array is clamped, in
        its gradient too. Captured arrays are data, may be traced, and have gradients if
        they are of floats, in memory of their own size and summed in one order. Python
        numbers are compiled in; functions of equal steps share a program. What an index
        of b, h and q, of b, h and kv, or of b, h and q - kv finds is found once before
        the kernels. They read other tables pair by pair, and "xla" makes their
        gradients. With operations that kernels lack, calls run on "xla"; `explain` says
        all that.
        NaN that it makes of masked pairs, or its derivative, reaches no result.
      mask_mod: a function (b, h, q, kv) -> bool, True where a query may attend to a
        key, if all other masks agree. Traced as score_mod is; it has no gradient.
        Blocks are skipped as far as intervals of positions and of captured arrays tell
        that it keeps none of their pairs. What it joins by `&` and only compares q - kv
        with a Python number, or ids at q and kv for equality, runs as the built-in
        window and segments. Keys that it drops must be finite.
      return_max_logit: if True, also return the largest score of each row, for users
        who clip the weights of heads with large scores (QK-clip) or log them. It has no
        gradient: its cotangent counts as zero. The kernels find it in the same pass.
      block_mask: what `make_block_mask` returned for calls of these sizes: a mask that
        must agree, too, with lists of the blocks that it keeps, made once for many
        calls. It brings its `query_offset`. Beside other masks the call makes lists of
        what all of them keep.
      query_scale, key_scale, value_scale: of quantised inputs, and required there: what
        each number is multiplied by to give the real one (descale). A number (1.0 for
        none), one for each head, [N] or [K], or [*B, N] and [*B, K], in any float
        dtype. Keys and values beside wider queries may have one for each row, too, as
        `quantize_kv` gives them: [*B, S, K] or [*B, S, 1] ([S] for a single head).

    Returns:
      out: [*B, T, N, Hv] ([T, Hv] for a single head) in the dtype of query, bfloat16
      for float8_e4m3fn. If a row may attend to no key, its output and all its gradients
      are 0.
      If return_residual is True, a tuple (out, lse). lse is the natural logarithm
      [*B, T, N] ([T] for a single head) in float32 (float64 for float64 inputs), and
      -inf for a row without keys. Both results are differentiable.
      If return_max_logit is True, a tuple whose last element is max_logit: of each row,
      the largest score over the keys that it may attend to, as the softmax sees it
      (with scale, bias, soft cap and score_mod; without sink and dropout), up to
      roundings in float32. Its shape and dtype are those of lse, and it is -inf for a
      row without keys. For that of a head, take the maximum over the other axes, and
      over devices (`jax.lax.pmax`).

    Raises:
      TypeError, ValueError: if an argument is wrong. The message names the argument,
        what was given and what was expected. TypeError, too, if JAX asks for a
        derivative of a call with quantised operands.

    Numerics: the softmax and all sums use float32 (float64 for float64 inputs).
    Probabilities are rounded to the dtype of value before they multiply value, as in
    `jax.nn.dot_product_attention`. The same inputs on the same GPU give the same bits.

    Eight bits: the query's dtype is that of products. Quantised keys and values beside
    wider queries are converted to it in registers; a key's scale multiplies its scores,
    a value's its probabilities, in float32.

    With precision="fp8", the output of normal inputs has an error of 6 % of its own
    size (root mean square; 0.2 % in bfloat16), and about as much if one element
    of a thousand is ten times larger, or some elements of all keys or values share an
    offset: the mean key and the mean value are taken out, and a Hadamard matrix rotates
    queries and keys, which no softmax sees (without these, up to 10 % and more). Scores
    s get an error of 4 % of their spread, so sharp softmaxes suffer most. The kernel
    for Hopper adds 0.003 to the error of the log-sum-exp of normal inputs (measured),
    and more where all scores of a row are alike or most keys have small probabilities
    (0.15, estimated): keys whose probability is below 2**-18 of the largest one, or a
    sixteenth of a row in all, may not count. Inputs that are float8_e4m3fn are taken as
    they are. Then Hopper's tensor cores, which add products of eight bits with 14 bits,
    lose up to a tenth of a mean that values have, at 8,192 keys: take it out before you
    quantise, and add it to the output. The kernel for Hopper has masks of all kinds but
    `mask`, and grouped heads, of size 64, 128 or 256; other calls run on "xla".

    Derivatives: every implementation supports reverse mode, forward mode (`jax.jvp`,
    `jax.linearize`; `jax.experimental.jet`, not with "reference" and masks), and each
    on top of the other (`jax.hessian`, `jax.grad` of `jax.grad`). Memory stays linear,
    except with "reference". The tangent of a call is a kernel, of "mosaic_gpu" or of
    "triton" (`explain` says which, or why neither serves it); tangents of gradients and
    of tangents run as "xla". The output is linear
    in value, and may be transposed by it (`jax.linear_transpose`, gradients through
    iterative solvers). Third derivatives require forward mode on top of second
    derivatives, or "reference". With `context` all of this holds, too.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import attention, quantize_kv
      >>> q = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))  # 8 query heads
      >>> k = jax.random.normal(jax.random.key(1), (2, 100, 2, 64))  # 2 key/value heads
      >>> out = attention(q, k, k, is_causal=True, local_window_size=(31, 0))
      >>> out.shape
      (2, 100, 8, 64)

      A single head, mapped over a heads axis in the middle (without a transpose):

      >>> heads = jax.vmap(attention, in_axes=1, out_axes=1)
      >>> heads(q[0], q[0], q[0]).shape
      (100, 8, 64)

      A learnt bias shared by the batch, with a soft cap and dropout; ALiBi and sinks:

      >>> bias = jnp.zeros((1, 8, 100, 100))
      >>> rng = jax.random.key(2)
      >>> out = attention(
      ...     q, k, k, bias, logits_soft_cap=50.0, dropout_rate=0.1, dropout_rng=rng
      ... )
      >>> slopes = 2.0 ** -jnp.arange(1, 9)
      >>> out = attention(q, k, k, alibi_slopes=slopes, sinks=jnp.zeros(8))

      Four new queries against a cache in which each batch entry has its own length:

      >>> lengths = jnp.array([60, 96])  # keys in the cache, including the new ones
      >>> out = attention(
      ...     q[:, :4],
      ...     k,
      ...     k,
      ...     is_causal=True,
      ...     query_offset=lengths - 4,
      ...     key_value_seq_lengths=lengths,
      ... )

      A function of scores with a learnt gate for each head, and a mask of a prefix:

      >>> gate, prefix = jnp.ones(8), jnp.array([10, 20])
      >>> out = attention(
      ...     q,
      ...     k,
      ...     k,
      ...     score_mod=lambda score, b, h, q, kv: score * gate[h],
      ...     mask_mod=lambda b, h, q, kv: (kv <= q) | (kv < prefix[b]),
      ... )

    In eight bits, quantised here or by the caller:

      >>> q, k = (x.astype(jnp.bfloat16) for x in (q, k))
      >>> out = attention(q, k, k, precision="fp8")
      >>> kv, scale = quantize_kv(k, jnp.float8_e4m3fn, (-3, -1))
      >>> scales = {"key_scale": scale[:, 0], "value_scale": scale[:, 0]}
      >>> q8 = q.astype(jnp.float8_e4m3fn)
      >>> attention(q8, kv, kv, query_scale=1.0, **scales).dtype
      dtype(bfloat16)

    References: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and
    Work Partitioning" (2023), section 3; Ainslie et al. (2023) for grouped queries;
    Press et al. (2021) for ALiBi; Salmon et al. (2011) for the Philox bits of dropout;
    Dong et al., "Flex Attention" (2024) for score_mod and mask_mod; Shah et al. (2024),
    "FlashAttention-3", section 3.3, for eight bits.
    """
    arguments = Arguments(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        key_value_seq_starts=key_value_seq_starts,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        implementation=implementation,
        config=config,
        context=context,
        return_residual=return_residual,
        score_mod=score_mod,
        mask_mod=mask_mod,
        return_max_logit=return_max_logit,
        block_mask=block_mask,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    call = arguments.checked()
    if arguments.in_eight_bits:
        found = _fp8.run(call, implementation)
    elif context is not None:
        _sharding.check_divided(call.operands[:3], context.axes)
        found = _context.attend(call, implementation, context)
    else:
        found = _context.on_mesh(_context.attend, call, implementation)
        found = _vjp.run(call, implementation) if found is None else found
    out, *of_rows = found
    of_rows = of_rows if return_residual else of_rows[1:]
    if "n" in call.size:
        of_rows = [jnp.swapaxes(x, -1, -2) for x in of_rows]
    return (out, *of_rows) if of_rows else out


def given(*arguments: Any, **keywords: Any) -> Arguments:
    """The arguments of a call of `attention`, its defaults among them, unwrapped."""
    bound = inspect.signature(attention).bind(*arguments, **keywords)
    bound.apply_defaults()
    return Arguments(**{name: unwrapped(x) for name, x in bound.arguments.items()})
