"""The arguments of `attention` as one record, which checks them and makes the `Call`.

Every error names the argument, says what was given and what was expected, and is
raised before anything else happens. (Arguments that are no arrays: `_options`; arrays
beside query, key and value: `_shape`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _options
from jax_flash2._arrays import as_array, check_array, unwrapped
from jax_flash2._block_mask import BlockMask
from jax_flash2._mods import Mods
from jax_flash2._rows import Context, sharding_of
from jax_flash2._shape import Shape
from pallas_kernels import division
from pallas_kernels.backend import Call
from pallas_kernels.configs import Config
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Atom, Lengths
from pallas_kernels.core.quantise import FP8, QUANTISED, with_scales
from pallas_kernels.core.scores import (
    Alibi,
    Bias,
    Score,
    SoftCap,
    Term,
    masking_bias,
)
from pallas_kernels.core.spec import AttentionSpec

Array = jax.Array | np.ndarray
Window = int | tuple[int | None, int | None]
Precision = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | tuple[Any, Any]

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, FP8)
_KINDS = "int8, float8_e4m3fn, float8_e5m2"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    """What `attention` was given: a field for each of its parameters, of its type."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    mask: Array | None
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
    return_residual: bool
    score_mod: Callable | None
    mask_mod: Callable | None
    return_max_logit: bool
    block_mask: BlockMask | None
    query_scale: float | Array | None
    key_scale: float | Array | None
    value_scale: float | Array | None

    def checked(self) -> Call:
        """The call that they describe, with named axes.

        Raises:
          TypeError, ValueError: as `attention`.
        """
        query, key, value = _check_operands(self.query, self.key, self.value)
        precision = self._check_options()
        sharding = None if self.context is None else sharding_of(self.context)
        shape = Shape(query, key, 1 if sharding is None else sharding.parts)
        parts, offset = shape.parts, shape.offset(self.query_offset)
        masks, score = self.masks(shape), self._score(shape)
        if self.block_mask is not None:
            self._check_block_mask()
            listed, offset = self.block_mask.in_call(shape, sharding)
            masks = (*masks, listed)
        if self.score_mod is not None or self.mask_mod is not None:
            mods = Mods(shape, offset, sharding)
            masks, score = self._with_mods(mods, shape, masks, score)
        spec = AttentionSpec(
            score,
            masks,
            offset,
            sink=None if self.sinks is None else shape.sinks(self.sinks),
            dropout=shape.dropout(
                self.dropout_rate, self.dropout_rng, self.broadcast_dropout
            ),
            gives_largest=bool(self.return_max_logit),
        )
        if not spec.is_positional:
            spec = dataclasses.replace(spec, offset=None)
        all_keys = parts * shape.s
        spec = spec.with_known_rows(parts * shape.t, all_keys)
        operands = {"query": query, "key": key, "value": value}
        spec = self._with_scales(shape, spec, operands)
        if self.config is not None:
            division.check(self.config.splits, all_keys)
        q, k, v = shape.operands(query, key, value)
        return Call(q, k, v, spec, self.config, precision)

    def _check_options(self) -> jax.lax.Precision | None:
        """Checks what says how a call is computed; returns the precision."""
        _options.check_bool("is_causal", self.is_causal)
        _options.check_bool("return_residual", self.return_residual)
        _options.check_bool("return_max_logit", self.return_max_logit)
        _options.check_implementation(self.implementation)
        if self.config is not None and not isinstance(self.config, Config):
            raise TypeError(f"config must be a jax_flash2.Config, got {self.config!r}")
        if self.context is not None and not isinstance(self.context, Context):
            raise TypeError(
                f"context must be a jax_flash2.Context, got {self.context!r}"
            )
        return None if self.wants_fp8 else _options.check_precision(self.precision)

    @property
    def wants_fp8(self) -> bool:
        """Whether `precision` asks for products of eight bits."""
        return isinstance(self.precision, str) and self.precision == _options.FP8

    @property
    def in_eight_bits(self) -> bool:
        """Whether operands have eight bits, or get them (of checked arguments)."""
        operands = map(unwrapped, (self.query, self.key, self.value))
        return self.wants_fp8 or any(x.dtype in QUANTISED for x in operands)

    def _with_scales(
        self, shape: Shape, spec: AttentionSpec, operands: dict[str, jax.Array]
    ) -> AttentionSpec:
        """The spec with the scales of quantised operands."""
        scales: dict[str, Named] = {}
        for name, x in operands.items():
            scale = getattr(self, f"{name}_scale")
            if x.dtype in QUANTISED:
                scales[name] = shape.operand_scale(f"{name}_scale", scale, x.dtype)
            elif scale is not None:
                raise ValueError(
                    f"{name}_scale must be None for a {name} in {x.dtype.name}, which "
                    "is not quantised, got a scale"
                )
        in_eight_bits = "query" in scales
        if self.wants_fp8 and not in_eight_bits:
            _check_fp8(operands)
        if self.context is not None and (scales or self.wants_fp8):
            raise ValueError(
                "context must be None with precision='fp8' or quantised operands, got "
                f"{self.context!r}"
            )
        if in_eight_bits:
            if self.precision is not None and not self.wants_fp8:
                raise ValueError(
                    "precision must be None or 'fp8' for a query in float8_e4m3fn, got "
                    f"{self.precision!r}"
                )
            of_all = (scales[name] for name in operands)
            return with_scales(spec, *of_all, group=shape.group)
        score = dataclasses.replace(spec.score, key_scale=scales.get("key"))
        return dataclasses.replace(spec, score=score, value_scale=scales.get("value"))

    def _check_block_mask(self) -> None:
        if not isinstance(self.block_mask, BlockMask):
            raise TypeError(
                "block_mask must be what jax_flash2.make_block_mask returns, got "
                f"{type(self.block_mask).__name__}"
            )
        if not _options.is_zero(self.query_offset):
            raise ValueError(
                "query_offset must be 0 beside block_mask, which has its own: pass it "
                "to make_block_mask"
            )

    def masks(self, shape: Shape) -> tuple[Atom, ...]:
        """What all arguments of masks say, but functions and block masks."""
        masks: list[Atom] = []
        window = _options.check_window(self.local_window_size, self.is_causal)
        is_known = all(isinstance(n, int) for n in (shape.t, shape.s))
        is_plain = self.context is None and _options.is_zero(self.query_offset)
        if window is not None and is_known and is_plain:
            window = window.among(shape.t, shape.s)
        if window is not None:
            masks.append(window)
        lengths = [
            shape.lengths(name, x, shape.parts * size)
            for name, x, size in (
                ("query_seq_lengths", self.query_seq_lengths, shape.t),
                ("key_value_seq_lengths", self.key_value_seq_lengths, shape.s),
            )
        ]
        if any(x is not None for x in lengths):
            masks.append(Lengths(*lengths))
        masks += shape.starts(self.key_value_seq_starts)
        masks += shape.segments(self.query_segment_ids, self.key_value_segment_ids)
        if self.mask is not None:
            masks.append(shape.mask(self.mask))
        return tuple(masks)

    def _score(self, shape: Shape) -> Score:
        scale, factor = shape.scale(self.scale)
        soft_cap = _options.check_soft_cap(self.logits_soft_cap)
        terms: list[Term] = []
        if self.bias is not None:
            bias = shape.bias(self.bias)
            terms.append(Bias(bias, masking_bias(bias.dtype, soft_cap)))
        if self.alibi_slopes is not None:
            terms.append(Alibi(shape.slopes(self.alibi_slopes)))
        if soft_cap is not None:
            terms.append(SoftCap(soft_cap))
        return Score(scale, tuple(terms), factor)

    def _with_mods(self, mods: Mods, shape: Shape, masks, score: Score):
        if self.mask_mod is not None:
            masks = (*masks, *mods.masks(self.mask_mod))
        if self.score_mod is None:
            return masks, score
        term = mods.score(self.score_mod)
        if not term.is_total:
            # Of rows that do not exist the function may make NaN: they are padding.
            sizes = (np.int32(shape.parts * size) for size in (shape.t, shape.s))
            masks = (*masks, Lengths(*(Named(size, ()) for size in sizes)))
        return masks, dataclasses.replace(score, terms=(*score.terms, term))

    def reading(self) -> list[str]:
        """How the axes were read, if the arguments are right.

        With notes on what may not be meant. (Arrays are as `unwrapped` gives them.)
        """
        shape = Shape(self.query, self.key)
        key_heads = self.key.shape[-2] if shape.heads else 0
        heads, of_keys = (
            (f" of {n} heads" for n in (*shape.heads, key_heads))
            if shape.heads
            else ("", "")
        )
        lines = [
            f"read as: batch {shape.batch}, {shape.t} query rows{heads}, {shape.s} key "
            f"rows{of_keys}, head size {shape.head_size}"
        ]
        if shape.s < key_heads:
            lines.append(
                "note: there are fewer rows than heads, and axes are [*B, rows, heads, "
                "head size]"
            )
        at_start = _options.is_zero(self.query_offset) and self.block_mask is None
        aligned = self.is_causal and at_start and self.context is None
        if aligned and shape.t < shape.s:
            lines.append(
                "note: with is_causal and query_offset=0 no query attends to keys "
                f"{shape.t} to {shape.s - 1}: pass query_offset if these queries are "
                "the last ones"
            )
        return lines


def _check_fp8(operands: dict[str, jax.Array]) -> None:
    """That operands, of which the query is not quantised, can be quantised here."""
    for name, x in operands.items():
        if x.dtype in QUANTISED:
            raise TypeError(
                "precision='fp8' quantises query, key and value, got a quantised "
                f"{name} ({x.dtype.name}): leave precision out, or pass all three in "
                "float8_e4m3fn with their scales"
            )
        if x.dtype.itemsize != 2:
            raise TypeError(
                f"precision='fp8' takes bfloat16 or float16 operands, got {name} "
                f"{x.dtype.name}: cast them, as {name}.astype(jax.numpy.bfloat16)"
            )


def _check_operands(query: Array, key: Array, value: Array) -> tuple[jax.Array, ...]:
    """As JAX arrays."""
    given = {"query": query, "key": key, "value": value}
    given = {name: unwrapped(x) for name, x in given.items()}
    check_array("query", given["query"])
    query, key, value = given.values()
    for name, x in given.items():
        check_array(name, x)
        is_quantised = x.dtype in QUANTISED and name != "query"
        if x.dtype not in _DTYPES and not is_quantised:
            kinds = "float8_e4m3fn" if name == "query" else _KINDS
            raise TypeError(
                f"{name} must have dtype bfloat16, float16, float32, float64 or "
                f"{kinds} (with scales), got {x.dtype.name}"
            )
        if x.dtype != query.dtype and (query.dtype == FP8 or not is_quantised):
            raise TypeError(
                "query, key and value must have the same dtype, got query "
                f"{query.dtype.name} and {name} {x.dtype.name}: cast one, as "
                f"{name}.astype(query.dtype)"
            )
        if x.ndim == 1 or x.ndim == 0:
            raise ValueError(
                f"{name} must have shape [*B, rows, heads, head size] or [rows, head "
                f"size], got shape {x.shape}"
            )
        if x.ndim != query.ndim:
            raise ValueError(
                "query, key and value must have the same rank, got query "
                f"{query.shape} and {name} {x.shape}"
            )
        if not all(isinstance(n, int) for n in x.shape[-3:]):
            raise ValueError(
                f"{name} must have constant numbers of rows and heads and a constant "
                f"head size (only batch axes may be symbolic), got shape {x.shape}"
            )
        if x.shape[-1] == 0:
            raise ValueError(
                f"{name} must have a head size of at least 1, got shape {x.shape}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same head size, got query {query.shape} and "
            f"key {key.shape}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            "key and value must have the same shape except for the head size, got key "
            f"{key.shape} and value {value.shape}"
        )
    if query.ndim > 2:
        if query.shape[:-3] != key.shape[:-3]:
            raise ValueError(
                "query and key must have the same batch shape, got query "
                f"{query.shape} and key {key.shape}"
            )
        n, k = query.shape[-2], key.shape[-2]
        if (k == 0 and n != 0) or (k != 0 and n % k):
            raise ValueError(
                "the number of key heads must divide the number of query heads, got "
                f"{k} key heads (key {key.shape}) and {n} query heads (query "
                f"{query.shape})"
            )
    return tuple(as_array(name, x) for name, x in given.items())
