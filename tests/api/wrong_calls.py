"""Wrong calls of attention, each with its error: the table of `test_errors`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import Blocks, Config
from tests.api.wrong_hints import HINTS

Q = jnp.zeros((2, 6, 4, 8))
K = jnp.zeros((2, 5, 2, 8))
GOOD = {"query": Q, "key": K, "value": K}
SINGLE = {"query": Q[0, :, 0], "key": K[0, :, 0], "value": K[0, :, 0]}
RNG = jax.random.key(0)
ids = functools.partial(jnp.zeros, dtype=jnp.int32)


def dropout(rate, rng=RNG):
    return {"dropout_rate": rate, "dropout_rng": rng}


QUERY_IDS, KEY_VALUE_IDS = "query_segment_ids", "key_value_segment_ids"
QUERY_LENGTHS, KEY_VALUE_LENGTHS = "query_seq_lengths", "key_value_seq_lengths"

TYPE, VALUE = TypeError, ValueError
# (arguments that replace the good ones, error, words that its message must hold)
WRONG = {
    "query_list": ({"query": [[1.0]]}, TYPE, ["query", "array", "list"]),
    "key_none": ({"key": None}, TYPE, ["key", "array", "NoneType"]),
    "value_float": ({"value": 1.0}, TYPE, ["value", "array", "float"]),
    "query_int": ({"query": Q.astype(int)}, TYPE, ["query", "float64", "int32"]),
    "query_bool": ({"query": Q > 0}, TYPE, ["query", "bfloat16", "bool"]),
    "query_complex": (
        {"query": Q.astype(jnp.complex64)},
        TYPE,
        ["query", "float32", "complex64"],
    ),
    "key_int": ({"key": K.astype(int)}, TYPE, ["key", "bfloat16", "int32"]),
    "query_float64": (
        {"query": np.zeros(Q.shape)},
        TYPE,
        ["same dtype", "query float64", "key float32"],
    ),
    "key_dtype": (
        {"key": K.astype(jnp.bfloat16)},
        TYPE,
        ["key bfloat16", "same dtype", "query float32", "key.astype(query.dtype)"],
    ),
    "value_dtype": (
        {"value": K.astype(jnp.float16)},
        TYPE,
        ["value", "same dtype", "float16"],
    ),
    "float8": ({"query": Q.astype("float8_e4m3fn")}, TYPE, ["query", "float8_e4m3fn"]),
    "scale_digits": ({"scale": "1.0"}, TYPE, ["scale", "number", "str"]),
    "scale_bool": ({"scale": True}, TYPE, ["scale", "number", "bool"]),
    "precision_bool": ({"precision": True}, VALUE, ["precision", "highest", "True"]),
    "dropout_text": (dropout(0.0, "x"), TYPE, ["dropout_rng", "array", "str"]),
    "dropout_3_words": (dropout(0.1, np.zeros(3, "u4")), VALUE, ["single key", "(3,)"]),
    "query_rank_1": ({"query": Q[0, 0, 0]}, VALUE, ["query", "(8,)"]),
    "query_scalar": ({"query": jnp.float32(1)}, VALUE, ["query", "()"]),
    "ranks": ({"key": K[0]}, VALUE, ["same rank", "(2, 6, 4, 8)", "(5, 2, 8)"]),
    "value_rank": ({"value": K[0]}, VALUE, ["same rank", "value (5, 2, 8)"]),
    "query_rank_5": (
        {"query": Q[None]},
        VALUE,
        ["same rank", "(1, 2, 6, 4, 8)", "key (2, 5, 2, 8)"],
    ),
    "key_rank_1": ({"key": K[0, 0, 0]}, VALUE, ["key", "(8,)"]),
    "head_size": (
        {"key": K[..., :4], "value": K[..., :4]},
        VALUE,
        ["same head size", "(2, 5, 2, 4)"],
    ),
    "head_size_0": ({"value": K[..., :0]}, VALUE, ["value", "head size", "0)"]),
    "query_head_size_0": (
        {"query": Q[..., :0], "key": K[..., :0]},
        VALUE,
        ["query", "head size", "0)"],
    ),
    "key_value_rows": ({"value": K[:, :4]}, VALUE, ["key and value", "(2, 4, 2, 8)"]),
    "key_value_heads": ({"value": K[:, :, :1]}, VALUE, ["key and value"]),
    "batch": (
        {"key": K[:1], "value": K[:1]},
        VALUE,
        ["same batch shape", "(1, 5, 2, 8)"],
    ),
    "value_batch": ({"value": K[:1]}, VALUE, ["key and value", "(1, 5, 2, 8)"]),
    "groups": ({"query": Q[:, :, :3]}, VALUE, ["2 key heads", "3 query heads"]),
    "more_kv_heads": (
        {**dict.fromkeys(("key", "value"), jnp.zeros((2, 5, 8, 8)))},
        VALUE,
        ["8 key heads", "4 query heads", "divide"],
    ),
    "no_kv_heads": (
        {"key": K[:, :, :0], "value": K[:, :, :0]},
        VALUE,
        ["0 key heads", "4 query heads"],
    ),
    "mask_float": (
        {"mask": jnp.ones((6, 5))},
        TYPE,
        ["mask", "bool", "float32", "added to the scores", "bias=", "astype(bool)"],
    ),
    "mask_int": ({"mask": ids((6, 5))}, TYPE, ["mask", "bool", "int32"]),
    "mask_bool": ({"mask": True}, TYPE, ["mask", "array", "bool"]),
    "mask_batch": (
        {"mask": np.ones((3, 1, 6, 5), bool)},
        VALUE,
        ["mask", "(2, 4, 6, 5)", "(3, 1, 6, 5)"],
    ),
    "mask_rows": (
        {"mask": np.ones((5, 5), bool)},
        VALUE,
        ["mask", "(2, 4, 6, 5)", "(5, 5)"],
    ),
    "mask_list": ({"mask": [[True]]}, TYPE, ["mask", "array", "list"]),
    "mask_shape": (
        {"mask": np.ones((6, 4), bool)},
        VALUE,
        ["mask", "(2, 4, 6, 5)", "(6, 4)"],
    ),
    "mask_heads": (
        {"mask": np.ones((2, 2, 6, 5), bool)},
        VALUE,
        ["mask", "(2, 2, 6, 5)"],
    ),
    "mask_rank": ({"mask": np.ones((1, 1, 1, 1, 1), bool)}, VALUE, ["mask"]),
    "scale_text": ({"scale": "big"}, TYPE, ["scale", "number", "str"]),
    "scale_array": ({"scale": jnp.ones(2)}, TYPE, ["scale", "number"]),
    "scale_list": ({"scale": [1.0]}, TYPE, ["scale", "number", "list"]),
    "scale_complex": ({"scale": 1j}, TYPE, ["scale", "number", "complex"]),
    "scale_nan": ({"scale": float("nan")}, VALUE, ["scale", "finite", "nan"]),
    "scale_inf": ({"scale": float("inf")}, VALUE, ["scale", "finite", "inf"]),
    "causal_array": ({"is_causal": jnp.array(True)}, TYPE, ["is_causal", "bool"]),
    "causal_int": ({"is_causal": 1}, TYPE, ["is_causal", "bool", "1"]),
    "causal_text": ({"is_causal": "yes"}, TYPE, ["is_causal", "bool", "yes"]),
    "max_logit_int": ({"return_max_logit": 1}, TYPE, ["return_max_logit", "bool"]),
    "residual_none": ({"return_residual": None}, TYPE, ["return_residual", "bool"]),
    "q_lengths_float": (
        {QUERY_LENGTHS: jnp.ones(2)},
        TYPE,
        [QUERY_LENGTHS, "int32", "float32"],
    ),
    "q_lengths_3": ({QUERY_LENGTHS: ids(3)}, VALUE, [QUERY_LENGTHS, "(2,)", "(3,)"]),
    "q_lengths_rank": (
        {QUERY_LENGTHS: ids((2, 1))},
        VALUE,
        [QUERY_LENGTHS, "(2,)", "(2, 1)"],
    ),
    "q_lengths_list": ({QUERY_LENGTHS: [1, 2]}, TYPE, ["list", "jnp.array(query_seq"]),
    "kv_lengths_float": (
        {KEY_VALUE_LENGTHS: jnp.ones(2)},
        TYPE,
        [KEY_VALUE_LENGTHS, "int32", "float32"],
    ),
    "kv_lengths_shape": (
        {KEY_VALUE_LENGTHS: ids(3)},
        VALUE,
        [KEY_VALUE_LENGTHS, "(2,)", "(3,)"],
    ),
    "kv_length_5": ({KEY_VALUE_LENGTHS: 5}, TYPE, [KEY_VALUE_LENGTHS, "array", "int"]),
    "kv_lengths_scalar": (
        {KEY_VALUE_LENGTHS: jnp.int32(5)},
        VALUE,
        [KEY_VALUE_LENGTHS, "(2,)", "()"],
    ),
    "kv_lengths_bool": (
        {KEY_VALUE_LENGTHS: np.ones(2, bool)},
        TYPE,
        [KEY_VALUE_LENGTHS, "bool"],
    ),
    "window_text": (
        {"local_window_size": "wide"},
        TYPE,
        ["local_window_size", "ints", "wide"],
    ),
    "window_three": (
        {"local_window_size": (1, 2, 3)},
        VALUE,
        ["local_window_size", "pair", "(1, 2, 3)"],
    ),
    "window_empty": ({"local_window_size": ()}, VALUE, ["pair", "got ()"]),
    "window_one": ({"local_window_size": (1,)}, VALUE, ["pair", "(1,)"]),
    "window_array": (
        {"local_window_size": np.array([1, 2])},
        TYPE,
        ["local_window_size", "ints", "array"],
    ),
    "window_inf": ({"local_window_size": np.inf}, TYPE, ["ints", "None", "inf"]),
    "window_minus_1": (
        {"local_window_size": -1},
        VALUE,
        ["local_window_size", "negative", "-1"],
    ),
    "window_right_negative": (
        {"local_window_size": (1, -2)},
        VALUE,
        ["local_window_size", "negative", "(1, -2)"],
    ),
    "window_bools": (
        {"local_window_size": (True, 1)},
        TYPE,
        ["local_window_size", "ints", "True"],
    ),
    "window_negative": (
        {"local_window_size": (-1, 2)},
        VALUE,
        ["local_window_size", "negative", "(-1, 2)", "None"],
    ),
    "window_float": (
        {"local_window_size": (1.5, 2)},
        TYPE,
        ["local_window_size", "1.5"],
    ),
    "window_bool": ({"local_window_size": True}, TYPE, ["local_window_size"]),
    "q_segments_shape": (
        {QUERY_IDS: ids((2, 5)), KEY_VALUE_IDS: ids((2, 5))},
        VALUE,
        [QUERY_IDS, "(2, 6)", "(2, 5)"],
    ),
    "kv_segments_shape": (
        {QUERY_IDS: ids((2, 6)), KEY_VALUE_IDS: ids((5,))},
        VALUE,
        [KEY_VALUE_IDS, "(2, 5)", "(5,)"],
    ),
    "segments_float": (
        {QUERY_IDS: jnp.zeros((2, 6)), KEY_VALUE_IDS: ids((2, 5))},
        TYPE,
        [QUERY_IDS, "int32", "float32"],
    ),
    "segments_bool": (
        {QUERY_IDS: ids((2, 6)) == 0, KEY_VALUE_IDS: ids((2, 5))},
        TYPE,
        [QUERY_IDS, "int32", "bool"],
    ),
    "segments_heads": (
        {QUERY_IDS: ids((2, 6, 4)), KEY_VALUE_IDS: ids((2, 5))},
        VALUE,
        [QUERY_IDS, "(2, 6)", "(2, 6, 4)"],
    ),
    "kv_segments_float": (
        {QUERY_IDS: ids((2, 6)), KEY_VALUE_IDS: jnp.ones((2, 5))},
        TYPE,
        [KEY_VALUE_IDS, "int32", "float32"],
    ),
    "kv_segments_list": (
        {QUERY_IDS: ids((2, 6)), KEY_VALUE_IDS: [[0] * 5] * 2},
        TYPE,
        [KEY_VALUE_IDS, "array", "list"],
    ),
    "kv_segments_alone": (
        {KEY_VALUE_IDS: ids((2, 5))},
        VALUE,
        [KEY_VALUE_IDS, QUERY_IDS, "both"],
    ),
    "q_segments_alone": (
        {QUERY_IDS: ids((2, 6))},
        VALUE,
        [KEY_VALUE_IDS, QUERY_IDS, "T == S", "T=6", "S=5"],
    ),
    "offset_float": (
        {"query_offset": 1.5, "is_causal": True},
        TYPE,
        ["query_offset", "array", "float"],
    ),
    "offset_bool": ({"query_offset": True}, TYPE, ["query_offset", "bool"]),
    "offset_3": ({"query_offset": ids((3,))}, VALUE, ["query_offset", "(2,)", "(3,)"]),
    "offset_rank": (
        {"query_offset": ids((2, 1))},
        VALUE,
        ["query_offset", "(2,)", "(2, 1)"],
    ),
    "offset_none": ({"query_offset": None}, TYPE, ["query_offset", "NoneType"]),
    "offset_list": (
        {"query_offset": [1, 2]},
        TYPE,
        ["list", "jnp.array(query_offset)"],
    ),
    "offset_array_float": (
        {"query_offset": jnp.ones(2)},
        TYPE,
        ["query_offset", "int32", "float32"],
    ),
    "precision": ({"precision": "perfect"}, VALUE, ["precision", "perfect"]),
    "precision_pair": (
        {"precision": ("high", "some")},
        VALUE,
        ["precision", "('high', 'some')"],
    ),
    "precision_triple": ({"precision": ("high",) * 3}, VALUE, ["precision", "pair"]),
    "implementation": (
        {"implementation": "cuda"},
        VALUE,
        ["implementation", "cuda", "mosaic_gpu", "triton", "xla"],
    ),
    "implementation_list": (
        {"implementation": ["xla"]},
        VALUE,
        ["implementation", "None or one of", "['xla']", "one name"],
    ),
    "config": ({"config": {"block_q": 64}}, TYPE, ["config", "Config", "block_q"]),
    "config_class": ({"config": Config}, TYPE, ["config", "Config", "class"]),
    "config_blocks": (
        {"config": Blocks(16, 16, 4, 1)},
        TYPE,
        ["config", "jax_flash2.Config", "Blocks(block_q=16"],
    ),
    "triton_head_size": (
        {
            **dict.fromkeys(("query", "key", "value"), jnp.zeros((1, 4, 1, 600))),
            "implementation": "triton",
            "config": Config(interpret=True),
        },
        VALUE,
        ["triton", "head size 600", "512"],
    ),
    "bias_int": ({"bias": ids((6, 5))}, TYPE, ["bias", "float", "int32"]),
    "bias_bool": ({"bias": ids((6, 5)) == 0}, TYPE, ["bias", "float", "bool", "mask="]),
    "bias_complex": (
        {"bias": jnp.zeros((6, 5), jnp.complex64)},
        TYPE,
        ["bias", "float", "complex64"],
    ),
    "bias_number": ({"bias": 0.0}, TYPE, ["bias", "array", "got float"]),
    "bias_list": ({"bias": [0.0]}, TYPE, ["bias", "array", "list"]),
    "bias_shape": (
        {"bias": jnp.zeros((4, 6, 6))},
        VALUE,
        ["bias", "(2, 4, 6, 5)", "(4, 6, 6)"],
    ),
    "bias_kv_heads": (
        {"bias": jnp.zeros((2, 6, 5))},
        VALUE,
        ["bias", "(2, 4, 6, 5)", "(2, 6, 5)", "bias[:, None, :, :]"],
    ),
    "bias_keys": ({"bias": jnp.zeros(6)}, VALUE, ["bias", "(2, 4, 6, 5)", "(6,)"]),
    "bias_batch": (
        {"bias": jnp.zeros((3, 1, 1, 1))},
        VALUE,
        ["bias", "(2, 4, 6, 5)", "(3, 1, 1, 1)"],
    ),
    "bias_rank": (
        {"bias": jnp.zeros((1, 2, 4, 6, 5))},
        VALUE,
        ["bias", "(1, 2, 4, 6, 5)"],
    ),
    "soft_cap_0": ({"logits_soft_cap": 0.0}, VALUE, ["logits_soft_cap", "> 0"]),
    "soft_cap_nan": (
        {"logits_soft_cap": np.nan},
        VALUE,
        ["logits_soft_cap", "finite", "nan"],
    ),
    "soft_cap_bool": ({"logits_soft_cap": True}, TYPE, ["number", "bool"]),
    "soft_cap_text": ({"logits_soft_cap": "5"}, TYPE, ["number", "str"]),
    "soft_cap_negative": ({"logits_soft_cap": -1}, VALUE, ["logits_soft_cap"]),
    "soft_cap_inf": ({"logits_soft_cap": np.inf}, VALUE, ["finite", "inf"]),
    "soft_cap_array": (
        {"logits_soft_cap": jnp.ones(4)},
        TYPE,
        ["logits_soft_cap", "number", "compiled"],
    ),
    "slopes_shape": (
        {"alibi_slopes": jnp.ones(3)},
        VALUE,
        ["alibi_slopes", "(4,)", "(2, 4)", "(3,)"],
    ),
    "slopes_batch": (
        {"alibi_slopes": jnp.ones((3, 4))},
        VALUE,
        ["alibi_slopes", "(2, 4)", "(3, 4)"],
    ),
    "slopes_kv_heads": (
        {"alibi_slopes": jnp.ones(2)},
        VALUE,
        ["alibi_slopes", "(4,)", "got shape (2,)"],
    ),
    "slopes_list": ({"alibi_slopes": [1.0] * 4}, TYPE, ["alibi_slopes", "list"]),
    "slopes_scalar": ({"alibi_slopes": jnp.float32(1)}, VALUE, ["alibi_slopes"]),
    "slopes_int": ({"alibi_slopes": ids(4)}, TYPE, ["alibi_slopes", "int32"]),
    "sinks_shape": ({"sinks": jnp.ones((2, 4))}, VALUE, ["sinks", "(4,)", "(2, 4)"]),
    "sinks_kv_heads": ({"sinks": jnp.ones(2)}, VALUE, ["sinks", "(4,)", "shape (2,)"]),
    "sinks_bool": ({"sinks": ids(4) == 0}, TYPE, ["sinks", "float", "bool"]),
    "sinks_int": ({"sinks": ids(4)}, TYPE, ["sinks", "float", "int32"]),
    "sinks_float": ({"sinks": 0.0}, TYPE, ["sinks", "array", "float"]),
    "dropout_no_key": (
        {"dropout_rate": 0.1},
        VALUE,
        ["dropout_rate=0.1", "dropout_rng"],
    ),
    "dropout_1": (dropout(1.0), VALUE, ["dropout_rate", "[0, 1)", "1.0"]),
    "dropout_nan": (dropout(np.nan), VALUE, ["dropout_rate", "[0, 1)", "nan"]),
    "dropout_large": (dropout(10), VALUE, ["dropout_rate", "[0, 1)", "10"]),
    "dropout_bool": (dropout(True), TYPE, ["dropout_rate", "number", "bool"]),
    "dropout_none": ({"dropout_rate": None}, TYPE, ["dropout_rate", "NoneType"]),
    "dropout_negative": (dropout(-0.1), VALUE, ["dropout_rate", "-0.1"]),
    "dropout_array": (
        dropout(jnp.float32(0.1)),
        TYPE,
        ["dropout_rate", "number", "compiled"],
    ),
    "dropout_keys": (
        dropout(0.1, jax.random.split(RNG)),
        VALUE,
        ["dropout_rng", "single key", "(2,)"],
    ),
    "dropout_seed": (dropout(0.1, 3), TYPE, ["array", "int", "jax.random.key(3)"]),
    "dropout_float_key": (
        dropout(0.1, jnp.zeros(2)),
        VALUE,
        ["dropout_rng", "single key", "float32"],
    ),
    "dropout_raw_keys": (
        dropout(0.1, jnp.zeros((2, 2), jnp.uint32)),
        VALUE,
        ["dropout_rng", "single key", "(2, 2)"],
    ),
    "dropout_numpy_rng": (
        dropout(0.1, np.random.default_rng(0)),
        TYPE,
        ["dropout_rng", "array", "Generator"],
    ),
    # A single head has no axis of heads, and none of batch entries.
    "single_sinks": ({**SINGLE, "sinks": jnp.ones(1)}, VALUE, ["sinks", "()"]),
    "single_slopes": (
        {**SINGLE, "alibi_slopes": jnp.ones(1)},
        VALUE,
        ["alibi_slopes", "()", "(1,)"],
    ),
    "single_mask": (
        {**SINGLE, "mask": np.ones((1, 6, 5), bool)},
        VALUE,
        ["mask", "(6, 5)", "(1, 6, 5)"],
    ),
    "single_lengths": (
        {**SINGLE, QUERY_LENGTHS: ids(1)},
        VALUE,
        [QUERY_LENGTHS, "()", "(1,)"],
    ),
    "dropout_int_key": (dropout(0.1, ids(2)), VALUE, ["dropout_rng", "int32"]),
    "broadcast_int": ({"broadcast_dropout": 1}, TYPE, ["broadcast_dropout", "bool"]),
    **HINTS,
}
