"""paged_attention(): queries against keys and values in pages of a pool."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _backends, _options, _vjp
from jax_flash2._arguments import Array, Precision, Window
from jax_flash2._arrays import as_array, as_floats, as_integers, clipped
from jax_flash2._operation import Problem
from jax_flash2._pools import Pools
from jax_flash2._ragged import Blocks, Ragged
from jax_flash2._shape import Shape
from pallas_kernels import division
from pallas_kernels.backend import Call
from pallas_kernels.configs import Config
from pallas_kernels.core.axes import Axes, Named
from pallas_kernels.core.masks import Atom, Lengths, Starts, Tree
from pallas_kernels.core.masks.tree import MOST
from pallas_kernels.core.pages import Pages
from pallas_kernels.core.promotion import own_rules
from pallas_kernels.core.scores import Alibi, Score, SoftCap, Term
from pallas_kernels.core.spec import AttentionSpec

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_NO_GRADIENT = (
    "paged_attention has no derivatives: gather the pages of each sequence and call "
    "jax_flash2.attention, which has"
)


@own_rules()
def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    page_table: Array,
    key_value_seq_lengths: Array,
    *,
    cu_query_lengths: Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_starts: Array | None = None,
    key_scale: float | Array | None = None,
    value_scale: float | Array | None = None,
    tree_mask: Array | None = None,
    is_causal: bool = True,
    local_window_size: Window | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    scale: float | Array | None = None,
    value_head_size: int | None = None,
    kv_layout: str = "PSKH",
    precision: Precision | None = None,
    implementation: str | None = None,
    config: Config | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention over keys and values that lie in pages of a pool.

    It is `attention` of each sequence over the rows that its line of the page table
    names, for servers and for sampling: the queries are the newest tokens, whose keys
    are in the cache by then (`append_to_pages`). The last query of a sequence stands at
    its last key.

    B is the number of sequences, T of queries of each, N and K of query and key/value
    heads, H and Hv the head sizes, P the number of pages of the pool, C of those that a
    sequence may have. A page has any number of rows; from 16 on a power of two is the
    fastest.

    Args:
      query: [B, T, N, H], or [tokens, N, H] with `cu_query_lengths`; bfloat16, float16
        or float32.
      key_pages: [P, page, K, H], in the dtype of query, or quantised: int8,
        float8_e4m3fn or float8_e5m2; or [P, page, K, H / 2] of uint8 with two elements
        of int4 a byte, the even one in the low half (`quantize_kv`, or
        `jax.lax.bitcast_convert_type` of pairs of int4). K must divide N.
      value_pages: [P, page, K, Hv], likewise. None: values are the first
        `value_head_size` elements of keys (absorbed multi-head latent attention), or
        the second half of `key_pages`, if its layout has a "2".
      page_table: int32 [B, C], the pages of each sequence in order. Sequences may share
        pages. Entries whose page has no needed row are never followed: of rows beyond
        a length, before a start, or outside the window of every query. So pages behind
        a window may be freed. Other entries are clamped to [0, P).
      key_value_seq_lengths: int32 [B], keys in the cache, the new ones among them;
        clipped to [0, C * page]. What lies beyond (even NaN) reaches no result.
      cu_query_lengths: int32 [B + 1], rising from 0, for sequences with their own
        numbers of queries: those of sequence b are tokens cu[b] to cu[b + 1]. Tokens
        from the last of these numbers on are padding; their output is 0.
      query_seq_lengths: int32 [B], how many of the T queries count, from the first on;
        clipped to [0, T]. Others are padding, and their output is 0.
      key_value_seq_starts: int32 [B], the first valid key (padding on the left).
      key_scale, value_scale: what quantised keys and values are multiplied by, in any
        float dtype: a number or (), [K], [B, K], [P, page, 1] or [P, page, K] (always
        in this order of axes).
      tree_mask: bool [T, T] or [B, T, T], for trees of speculative tokens: whether
        query t (second to last axis) attends to the i-th of the newest T keys, as to
        its ancestors and itself. All attend to the keys before those. T is at most 32.
        It is in place of `is_causal`, and goes with no window, `alibi_slopes` or
        `cu_query_lengths`.
      is_causal: if True, a query attends only to keys at or before its position.
      local_window_size, logits_soft_cap, sinks, scale, precision: as in `attention`.
      alibi_slopes: float [N] or [B, N], as in `attention`.
      value_head_size: Hv, where values are a part of keys.
      kv_layout: the axes of pools in memory, by letters: P pages, S rows, K heads, H
        elements (last), 2 keys and values in one array (`value_pages` is None then).
        "PSKH", "PKSH" and "KPSH" are in use, and "P2SKH", "PSK2H" of arrays of both.
      implementation: "triton", "xla", "reference", "mosaic_gpu" (Hopper GPUs; it copies
        the keys of all sequences into rows first), or None, as in `attention`: the last
        of these for prompts (T * N / K of 8,192 or more, beside a table with room for
        at most 2 T keys).
      config: as in `attention`; `Config.forward` and `Config.splits` count.
      return_residual: if True, also return the log-sum-exp of the scores.

    Returns:
      out: in the dtype and shape of query, with head size Hv. A query without keys,
      such as one before position 0 or of a sequence of length 0, has output 0.
      If return_residual is True, a tuple (out, lse). lse is the natural logarithm
      [B, T, N] or [tokens, N] in float32, -inf for a query without keys. `merge` takes
      both.

    Raises:
      TypeError, ValueError: if an argument is wrong. The message names the argument,
        what was given and what was expected.
      TypeError: if JAX asks for a derivative.

    Numerics: products are made in the dtype of query, to which quantised elements are
    converted in registers. The scale of a key multiplies its scores, that of a value
    its probabilities, in float32.

    Lengths, tables and scales are data: new values compile nothing. The numbers of
    sequences, tokens, pages and entries are compiled in: pad tokens to few sizes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash2 import paged_attention
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 10, 16, 2, 64))  # 10 pages
      >>> q = jax.random.normal(jax.random.key(1), (2, 1, 8, 64))  # a token each
      >>> table = jnp.array([[7, 3, 1], [2, 0, 0]])
      >>> paged_attention(q, k, v, table, jnp.array([40, 9])).shape
      (2, 1, 8, 64)

    References: Kwon et al., "Efficient Memory Management for Large Language Model
    Serving with PagedAttention" (2023); Dao et al., "Flash-Decoding for long-context
    inference" (2023).
    """
    _options.check_bool("is_causal", is_causal)
    _options.check_bool("return_residual", return_residual)
    _options.check_implementation(implementation)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a jax_flash2.Config, got {config!r}")
    query = _query(query, cu_query_lengths)
    pools = Pools.of(query, key_pages, value_pages, kv_layout, value_head_size)
    given = _table(page_table, key_value_seq_lengths, pools)
    batch, heads = given["table"].shape[0], query.shape[-2]
    optional = {
        "query_seq_lengths": _lengths("query_seq_lengths", query_seq_lengths, batch),
        "key_value_seq_starts": _lengths(
            "key_value_seq_starts", key_value_seq_starts, batch
        ),
        "alibi_slopes": _slopes(alibi_slopes, batch, heads),
        "key_scale": pools.scale("key_scale", key_scale, pools.key, batch),
        "value_scale": pools.scale("value_scale", value_scale, pools.value, batch),
    }
    given |= {name: x for name, x in optional.items() if x is not None}
    if cu_query_lengths is None and query.shape[0] != batch:
        raise ValueError(
            f"page_table must have a line for each of the {query.shape[0]} sequences "
            f"of query, got shape {given['table'].shape}"
        )
    tree = _tree(
        tree_mask,
        query,
        batch,
        {
            "local_window_size": local_window_size,
            "alibi_slopes": alibi_slopes,
            "cu_query_lengths": cu_query_lengths,
        },
    )
    rows = given["table"].shape[1] * pools.page
    if config is not None:
        division.check(config.splits, rows)
    precision = _options.check_precision(precision)

    def attend(query, given):
        """Of [B, T, N, H], with what the sequences of these are given."""
        seen = jax.ShapeDtypeStruct(
            (query.shape[0], rows, pools.heads, query.shape[-1]), query.dtype
        )
        shape, causal = Shape(query, seen), is_causal and tree is None
        masks = _masks(given, shape, local_window_size, causal)
        spec = AttentionSpec(
            _score(given, shape, scale, logits_soft_cap),
            masks if tree is None else (*masks, tree),
            sink=None if sinks is None else shape.sinks(sinks),
            value_scale=given.get("value_scale"),
            pages=Pages(given["table"], pools.pages, pools.page),
        )
        if spec.is_positional:
            first = _first_position(given, shape)
            spec = dataclasses.replace(spec, offset=first)
        named = Named(query, ("b0", "t", "n", "h"))
        call = Call(named, pools.key, pools.value, spec, config, precision)
        out, lse = run(call, implementation)
        return out, jnp.swapaxes(lse, -1, -2)

    if cu_query_lengths is None:
        out, lse = attend(query, given)
    else:
        given["lengths"] = _inside(given["lengths"], rows)
        ragged = _cut(query, cu_query_lengths, given, heads // max(1, pools.heads))
        found = [attend(x.queries(query), _by_block(x, given)) for x in ragged.calls]
        out, lse = map(ragged.tokens, zip(*found, strict=True), (0, -jnp.inf))
    return (out, lse) if return_residual else out


def run(call: Call, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """Output and lse (rows last) of a call with keys in pages."""
    backend = _backends.choose(implementation, call)
    problem = Problem.of(call, backend, is_named=implementation is not None)
    out, lse = _attend(problem, *(x.value for x in call.operands))
    return out, lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(problem: Problem, *arrays):
    return _vjp.attend(problem, arrays)


@_attend.defjvp
def _no_tangents(problem, primals, tangents):
    del problem, primals, tangents
    raise TypeError(_NO_GRADIENT)


def _query(x, cu_query_lengths) -> jax.Array:
    x = as_array("query", x)
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"query must have dtype bfloat16, float16 or float32, got {x.dtype.name}"
        )
    is_ragged = cu_query_lengths is not None
    if x.ndim != (3 if is_ragged else 4):
        wanted = (
            "[tokens, N, H], with cu_query_lengths," if is_ragged else "[B, T, N, H]"
        )
        raise ValueError(f"query must have shape {wanted} got shape {x.shape}")
    if x.shape[-1] == 0:
        raise ValueError(f"query must have a head size of at least 1, got {x.shape}")
    return x


def _table(table, lengths, pools: Pools) -> dict[str, Named]:
    table = as_integers("page_table", table)
    if table.ndim != 2:
        raise ValueError(
            f"page_table must have shape [B, C], pages of each sequence, got shape "
            f"{table.shape}"
        )
    of_keys = _lengths("key_value_seq_lengths", lengths, table.shape[0])
    if of_keys is None:
        raise TypeError("key_value_seq_lengths must be an array, got NoneType")
    if table.dtype != jnp.int32:
        table = clipped(table, -1, np.iinfo(np.int32).max)
    return {"table": Named(jnp.asarray(table), ("b0", "c")), "lengths": of_keys}


def _lengths(name: str, x, count: int) -> Named | None:
    if x is None:
        return None
    x = as_integers(name, x)
    if x.shape != (count,):
        raise ValueError(
            f"{name} must have shape ({count},) because of page_table's lines, got "
            f"shape {x.shape}"
        )
    x = x if x.dtype == jnp.int32 else clipped(x, -_options.FAR, _options.FAR)
    return Named(jnp.asarray(x), ("b0",))


def _tree(mask, query, batch: int, others: dict[str, Any]) -> Tree | None:
    """The mask of a tree of tokens; `others` are arguments that it does not go with."""
    if mask is None:
        return None
    mask, t = as_array("tree_mask", mask), query.shape[1]
    for name, x in others.items():
        if x is not None:
            raise ValueError(f"{name} must be None beside tree_mask, got both")
    if mask.dtype != jnp.bool_:
        raise TypeError(f"tree_mask must have dtype bool, got {mask.dtype.name}")
    if t > MOST:
        raise ValueError(f"tree_mask must be of at most {MOST} queries, got {t}")
    shapes: dict[tuple[int, ...], Axes] = {(t, t): ("t",), (batch, t, t): ("b0", "t")}
    if mask.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"tree_mask must have shape {expected}, got {mask.shape}")
    return Tree(Named(Tree.bits(mask), shapes[mask.shape]))


def _slopes(x, batch: int, heads: int) -> Named | None:
    if x is None:
        return None
    x = as_floats("alibi_slopes", x, widest=4)
    shapes: dict[tuple[int, ...], Axes] = {
        (heads,): ("n",),
        (batch, heads): ("b0", "n"),
    }
    if x.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(
            f"alibi_slopes must have shape {expected}, got shape {x.shape}"
        )
    return Named(x, shapes[x.shape])


def _cut(query, cu_query_lengths, given: dict[str, Named], group: int) -> Ragged:
    """How the tokens of sequences lie in blocks."""
    if "query_seq_lengths" in given:
        raise ValueError(
            "query_seq_lengths must be None beside cu_query_lengths, got both"
        )
    batch = given["table"].shape[0]
    if not batch:
        raise ValueError(
            "page_table must have a line at least beside cu_query_lengths, got shape "
            f"{given['table'].shape}"
        )
    cu = _lengths("cu_query_lengths", cu_query_lengths, batch + 1)
    assert cu is not None
    return Ragged.of(query.shape[0], cu.value, group, query.shape[-1])


def _by_block(blocks: Blocks, given: dict[str, Named]) -> dict[str, Named]:
    """What sequences have one of, for blocks of their queries."""
    own = {name: x for name, x in given.items() if "b0" in x.axes}
    found = blocks.arguments({name: x.value for name, x in own.items()})
    axes = {name: own[name].axes if name in own else ("b0",) for name in found}
    return given | {name: Named(x, axes[name]) for name, x in found.items()}


def _score(given: dict[str, Named], shape: Shape, scale, logits_soft_cap) -> Score:
    factor, of_data = shape.scale(scale)
    soft_cap = _options.check_soft_cap(logits_soft_cap)
    slopes, terms = given.get("alibi_slopes"), list[Term]()
    if slopes is not None:
        terms.append(Alibi(slopes))
    if soft_cap is not None:
        terms.append(SoftCap(soft_cap))
    return Score(factor, tuple(terms), of_data, given.get("key_scale"))


def _masks(
    given: dict[str, Named], shape: Shape, window, is_causal: bool
) -> tuple[Atom, ...]:
    # Of one query they are as they came: ranges and limits end with the rows that there
    # are, and to clip them would be a kernel of its own, a tenth of a short call.
    lengths = given["lengths"]
    lengths = lengths if shape.t == 1 else _inside(lengths, shape.s)
    masks: list[Atom] = [Lengths(_queries(given, shape), lengths)]
    if "key_value_seq_starts" in given:
        first = jnp.clip(given["key_value_seq_starts"].value, 0, shape.s)
        masks.append(Starts(Named(first, ("b0",))))
    # The newest key is that of the only query: the length alone is a causal mask.
    is_last = shape.t == 1 and not {"offset", "alibi_slopes"} & given.keys()
    if window is not None or not is_last:
        found = _options.check_window(window, is_causal)
        masks += [] if found is None else [found]
    return tuple(masks)


def _queries(given: dict[str, Named], shape: Shape) -> Named | None:
    """How many queries count; None for all."""
    if "query_seq_lengths" not in given:
        return None
    return _inside(given["query_seq_lengths"], shape.t)


def _first_position(given: dict[str, Named], shape: Shape) -> Named:
    if "offset" in given:
        return given["offset"]
    end, count = _inside(given["lengths"], shape.s), _queries(given, shape)
    return Named(end.value - (shape.t if count is None else count.value), end.axes)


def _inside(lengths: Named, size: int) -> Named:
    return Named(jnp.clip(lengths.value, 0, size), lengths.axes)
