"""Wrong calls: an error that names the argument, what came and what was expected."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention, explain
from tests.cases import ON_GPU
from tests.lowering import lower_for_gpu

Q = jnp.zeros((2, 6, 4, 8))
K = jnp.zeros((2, 5, 2, 8))
GOOD = {"query": Q, "key": K, "value": K}
RNG = jax.random.key(0)
ids = functools.partial(jnp.zeros, dtype=jnp.int32)

# (arguments that replace the good ones, error, words that its message must hold)
WRONG = {
    "query_list": ({"query": [[1.0]]}, TypeError, ["query", "array", "list"]),
    "key_none": ({"key": None}, TypeError, ["key", "array", "NoneType"]),
    "value_float": ({"value": 1.0}, TypeError, ["value", "array", "float"]),
    "query_int": ({"query": Q.astype(int)}, TypeError, ["query", "bfloat16", "int32"]),
    "key_dtype": (
        {"key": K.astype(jnp.bfloat16)},
        TypeError,
        ["key", "one dtype", "bfloat16", "float32"],
    ),
    "value_dtype": (
        {"value": K.astype(jnp.float16)},
        TypeError,
        ["value", "one dtype", "float16"],
    ),
    "query_rank_1": ({"query": Q[0, 0, 0]}, ValueError, ["query", "(8,)"]),
    "query_scalar": ({"query": jnp.float32(1)}, ValueError, ["query", "()"]),
    "ranks": ({"key": K[0]}, ValueError, ["same rank", "(2, 6, 4, 8)", "(5, 2, 8)"]),
    "head_size": (
        {"key": K[..., :4], "value": K[..., :4]},
        ValueError,
        ["same head size", "(2, 5, 2, 4)"],
    ),
    "head_size_0": ({"value": K[..., :0]}, ValueError, ["value", "head size 0"]),
    "key_value_rows": (
        {"value": K[:, :4]},
        ValueError,
        ["key and value", "(2, 4, 2, 8)"],
    ),
    "key_value_heads": ({"value": K[:, :, :1]}, ValueError, ["key and value"]),
    "batch": (
        {"key": K[:1], "value": K[:1]},
        ValueError,
        ["same batch axes", "(1, 5, 2, 8)"],
    ),
    "groups": ({"query": Q[:, :, :3]}, ValueError, ["2 heads", "3 heads", "divide"]),
    "no_kv_heads": (
        {"key": K[:, :, :0], "value": K[:, :, :0]},
        ValueError,
        ["0 heads", "4 heads"],
    ),
    "mask_float": ({"mask": jnp.ones((6, 5))}, TypeError, ["mask", "bool", "float32"]),
    "mask_list": ({"mask": [[True]]}, TypeError, ["mask", "array", "list"]),
    "mask_shape": (
        {"mask": np.ones((6, 4), bool)},
        ValueError,
        ["mask", "(2, 4, 6, 5)", "(6, 4)"],
    ),
    "mask_heads": (
        {"mask": np.ones((2, 2, 6, 5), bool)},
        ValueError,
        ["mask", "(2, 2, 6, 5)"],
    ),
    "mask_rank": ({"mask": np.ones((1, 1, 1, 1, 1), bool)}, ValueError, ["mask"]),
    "scale_text": ({"scale": "big"}, TypeError, ["scale", "number", "str"]),
    "scale_array": ({"scale": jnp.ones(2)}, TypeError, ["scale", "number"]),
    "scale_nan": ({"scale": float("nan")}, ValueError, ["scale", "finite", "nan"]),
    "scale_inf": ({"scale": float("inf")}, ValueError, ["scale", "finite", "inf"]),
    "causal_array": ({"is_causal": jnp.array(True)}, TypeError, ["is_causal", "bool"]),
    "causal_int": ({"is_causal": 1}, TypeError, ["is_causal", "bool", "1"]),
    "residual_none": (
        {"return_residual": None},
        TypeError,
        ["return_residual", "bool"],
    ),
    "q_lengths_float": (
        {"query_seq_lengths": jnp.ones(2)},
        TypeError,
        ["query_seq_lengths", "int32", "float32"],
    ),
    "q_lengths_shape": (
        {"query_seq_lengths": ids(3)},
        ValueError,
        ["query_seq_lengths", "(2,)", "(3,)"],
    ),
    "kv_lengths_int": (
        {"key_value_seq_lengths": 5},
        TypeError,
        ["key_value_seq_lengths", "array", "int"],
    ),
    "kv_lengths_scalar": (
        {"key_value_seq_lengths": jnp.int32(5)},
        ValueError,
        ["key_value_seq_lengths", "(2,)", "()"],
    ),
    "kv_lengths_bool": (
        {"key_value_seq_lengths": np.ones(2, bool)},
        TypeError,
        ["key_value_seq_lengths", "bool"],
    ),
    "window_text": (
        {"local_window_size": "wide"},
        TypeError,
        ["local_window_size", "ints", "wide"],
    ),
    "window_three": (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        ["local_window_size", "pair", "(1, 2, 3)"],
    ),
    "window_negative": (
        {"local_window_size": (-1, 2)},
        ValueError,
        ["local_window_size", "negative", "(-1, 2)"],
    ),
    "window_float": (
        {"local_window_size": (1.5, 2)},
        TypeError,
        ["local_window_size", "1.5"],
    ),
    "window_bool": ({"local_window_size": True}, TypeError, ["local_window_size"]),
    "q_segments_shape": (
        {"query_segment_ids": ids((2, 5)), "key_value_segment_ids": ids((2, 5))},
        ValueError,
        ["query_segment_ids", "(2, 6)", "(2, 5)"],
    ),
    "kv_segments_shape": (
        {"query_segment_ids": ids((2, 6)), "key_value_segment_ids": ids((5,))},
        ValueError,
        ["key_value_segment_ids", "(2, 5)", "(5,)"],
    ),
    "segments_float": (
        {"query_segment_ids": jnp.zeros((2, 6)), "key_value_segment_ids": ids((2, 5))},
        TypeError,
        ["query_segment_ids", "int32", "float32"],
    ),
    "kv_segments_alone": (
        {"key_value_segment_ids": ids((2, 5))},
        ValueError,
        ["key_value_segment_ids", "query_segment_ids", "both"],
    ),
    "q_segments_alone": (
        {"query_segment_ids": ids((2, 6))},
        ValueError,
        ["query_segment_ids", "T == S", "T=6", "S=5"],
    ),
    "offset_float": (
        {"query_offset": 1.5, "is_causal": True},
        TypeError,
        ["query_offset", "array", "float"],
    ),
    "offset_bool": ({"query_offset": True}, TypeError, ["query_offset", "bool"]),
    "offset_shape": (
        {"query_offset": ids((3,))},
        ValueError,
        ["query_offset", "(2,)", "(3,)"],
    ),
    "offset_array_float": (
        {"query_offset": jnp.ones(2)},
        TypeError,
        ["query_offset", "int32", "float32"],
    ),
    "precision": ({"precision": "perfect"}, ValueError, ["precision", "perfect"]),
    "implementation": (
        {"implementation": "cuda"},
        ValueError,
        ["implementation", "cuda", "triton", "xla"],
    ),
    "config": ({"config": {"block_q": 64}}, TypeError, ["config", "Config", "block_q"]),
    "triton_head_size": (
        {
            **dict.fromkeys(("query", "key", "value"), jnp.zeros((1, 4, 1, 600))),
            "implementation": "triton",
            "config": Config(interpret=True),
        },
        ValueError,
        ["triton", "head size 600", "512"],
    ),
    "bias_int": ({"bias": ids((6, 5))}, TypeError, ["bias", "float", "int32"]),
    "bias_bool": ({"bias": ids((6, 5)) == 0}, TypeError, ["bias", "float", "bool"]),
    "bias_list": ({"bias": [0.0]}, TypeError, ["bias", "array", "list"]),
    "bias_shape": (
        {"bias": jnp.zeros((4, 6, 6))},
        ValueError,
        ["bias", "(2, 4, 6, 5)", "(4, 6, 6)"],
    ),
    "bias_rank": (
        {"bias": jnp.zeros((1, 2, 4, 6, 5))},
        ValueError,
        ["bias", "(1, 2, 4, 6, 5)"],
    ),
    "soft_cap_0": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "> 0"]),
    "soft_cap_negative": ({"logits_soft_cap": -1}, ValueError, ["logits_soft_cap"]),
    "soft_cap_inf": ({"logits_soft_cap": np.inf}, ValueError, ["finite", "inf"]),
    "soft_cap_array": (
        {"logits_soft_cap": jnp.ones(4)},
        TypeError,
        ["logits_soft_cap", "number", "compiled"],
    ),
    "slopes_shape": (
        {"alibi_slopes": jnp.ones(3)},
        ValueError,
        ["alibi_slopes", "(4,)", "(2, 4)", "(3,)"],
    ),
    "slopes_scalar": ({"alibi_slopes": jnp.float32(1)}, ValueError, ["alibi_slopes"]),
    "slopes_int": ({"alibi_slopes": ids(4)}, TypeError, ["alibi_slopes", "int32"]),
    "sinks_shape": (
        {"sinks": jnp.ones((2, 4))},
        ValueError,
        ["sinks", "(4,)", "(2, 4)"],
    ),
    "sinks_int": ({"sinks": ids(4)}, TypeError, ["sinks", "float", "int32"]),
    "sinks_float": ({"sinks": 0.0}, TypeError, ["sinks", "array", "float"]),
    "dropout_no_key": (
        {"dropout_rate": 0.1},
        ValueError,
        ["dropout_rate=0.1", "dropout_rng"],
    ),
    "dropout_1": (
        {"dropout_rate": 1.0, "dropout_rng": RNG},
        ValueError,
        ["dropout_rate", "[0, 1)", "1.0"],
    ),
    "dropout_negative": (
        {"dropout_rate": -0.1, "dropout_rng": RNG},
        ValueError,
        ["dropout_rate", "-0.1"],
    ),
    "dropout_array": (
        {"dropout_rate": jnp.float32(0.1), "dropout_rng": RNG},
        TypeError,
        ["dropout_rate", "number", "compiled"],
    ),
    "dropout_keys": (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.split(RNG)},
        ValueError,
        ["dropout_rng", "one key", "(2,)"],
    ),
    "dropout_seed": (
        {"dropout_rate": 0.1, "dropout_rng": 3},
        TypeError,
        ["dropout_rng", "array", "int"],
    ),
    "dropout_int_key": (
        {"dropout_rate": 0.1, "dropout_rng": ids(2)},
        ValueError,
        ["dropout_rng", "int32"],
    ),
    "broadcast_dropout": (
        {"broadcast_dropout": 1},
        TypeError,
        ["broadcast_dropout", "bool"],
    ),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name, jit):
    changes, error, words = WRONG[name]
    arguments = {**GOOD, **changes}
    traced = {k: x for k, x in arguments.items() if isinstance(x, jax.Array)}
    fixed = {k: x for k, x in arguments.items() if k not in traced}

    def call(traced):
        return attention(**traced, **fixed)

    with pytest.raises(error) as caught:
        (jax.jit(call) if jit else call)(traced)
    message = str(caught.value)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((24, 64, 4, 1), ["block_q", "power of two", "24"]),
        ((64, 8, 4, 1), ["block_kv", ">= 16", "8"]),
        ((64, 64, 3, 1), ["num_warps", "power of two", "3"]),
        ((64, 64, 32, 1), ["num_warps", "16", "32"]),
        ((64, 64, 4, 0), ["num_stages", "0"]),
        ((64.0, 64, 4, 1), ["block_q", "64.0"]),
    ],
)
def test_wrong_blocks(arguments, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        Blocks(*arguments)


@pytest.mark.skipif(ON_GPU, reason="a GPU serves this call")
def test_kernels_do_not_run_on_a_cpu_unasked():
    with pytest.raises(ValueError, match=r"triton.*NVIDIA GPUs.*'cpu'.*interpret=True"):
        attention(**GOOD, implementation="triton")


def test_explain_names_every_implementation():
    text = explain(**GOOD)
    for name in ("triton", "xla", "reference"):
        assert f"  {name}: " in text
    assert text.startswith("implementation: " + ("triton" if ON_GPU else "xla"))
    wide = jax.ShapeDtypeStruct((1, 4, 1, 600), jnp.float32)
    asked = explain(wide, wide, wide, implementation="triton")
    assert asked.startswith("error: implementation='triton'")


def test_arrays_that_kernels_cannot_address():
    """More elements than an int32 counts: said, mapped or not, and never wrong."""
    call = functools.partial(attention, implementation="triton")
    x = jax.ShapeDtypeStruct((3, 2**19, 16, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"array of 3221225472 elements.*2\*\*31"):
        lower_for_gpu(call, x, x, x)
    with pytest.raises(ValueError, match=r"array of 3221225472 elements.*2\*\*31"):
        lower_for_gpu(jax.vmap(call), x, x, x)
    one = jax.ShapeDtypeStruct((1, 2**19, 1, 16), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((2**19, 2**19), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"2\*\*31"):
        lower_for_gpu(call, one, one, one, bias)
    fits = jax.ShapeDtypeStruct((2, 2**19, 16, 128), jnp.bfloat16)
    assert "flash2_forward" in lower_for_gpu(call, fits, fits, fits)


def test_slower_choice_on_a_gpu_is_said():
    """Head size 600 is beyond the kernels: the call says that a GPU could do better."""
    x = jax.ShapeDtypeStruct((1, 4, 1, 600), jnp.float32)
    with pytest.warns(UserWarning, match=r"'xla', slower than 'triton'.*600 is above"):
        lower_for_gpu(attention, x, x, x)
