"""Wrong calls: an error that names the argument, what came and what was expected."""

import dataclasses
import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash2 import Blocks, Config, _api, _vjp, attention, explain
from pallas_kernels import device
from tests.api.wrong_calls import GOOD, WRONG
from tests.cases import BACKENDS, ON_GPU
from tests.lowering import lower_for_gpu
from tests.tiers import MAINLY_XLA


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


@pytest.mark.parametrize("name", WRONG)
def test_explain_raises_what_attention_raises(name):
    """The same error; where a named implementation cannot serve, a text with it."""
    changes, error, _ = WRONG[name]
    arguments = {**GOOD, **changes}
    with pytest.raises(error) as expected:
        attention(**arguments)
    if name == "triton_head_size":
        assert explain(**arguments).startswith(f"error: {expected.value}")
        return
    with pytest.raises(error) as caught:
        explain(**arguments)
    assert str(caught.value) == str(expected.value)


# JAX makes float64 float32; and one is an error of the machine.
_NOT_OF_SHAPES = {"query_float64", "window_array", "triton_head_size"}


@pytest.mark.parametrize("name", [x for x in WRONG if x not in _NOT_OF_SHAPES])
def test_explain_raises_for_shapes(name):
    """The same again, with every array replaced by its shape and dtype."""
    changes, error, words = WRONG[name]
    arguments = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x
        for k, x in {**GOOD, **changes}.items()
    }
    with pytest.raises(error) as caught:
        explain(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_explain_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="causal"):
        explain(**GOOD, causal=True)
    with pytest.raises(TypeError, match="value"):
        explain(GOOD["query"], GOOD["key"])


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("causal", "'is_causal'"),
        ("softmax_scale", "'scale'"),
        ("segment_ids", "'query_segment_ids'"),
        ("attn_logits_soft_cap", "'logits_soft_cap'"),
        ("return_residuals", "'return_residual'"),
        ("deterministic", "pass flax_attention"),
    ],
)
def test_names_of_other_libraries(keyword, meant):
    """The error for an unknown keyword says which one is meant."""
    for call in (attention, explain):
        with pytest.raises(TypeError, match=rf"keyword argument '{keyword}'.*{meant}"):
            call(**GOOD, **{keyword: None})
    with pytest.raises(TypeError, match=r"keyword argument 'color'$"):
        attention(**GOOD, color="red")


def test_explain_refuses_shardings_that_attention_refuses():
    mesh = jax.make_mesh(
        *((1,), ("x",)), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
        heads = NamedSharding(mesh, PartitionSpec(None, None, None, "x"))
        x = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.float32, sharding=heads)
        with pytest.raises(ValueError, match="query is sharded along its head size"):
            explain(x, x, x)


def test_types_name_every_keyword():
    """The overloads of `attention` and its `Arguments` have its keywords and types."""
    types = dict(inspect.get_annotations(attention))
    del types["return"]
    fields = dataclasses.fields(_api.Arguments)
    assert [(x.name, x.type) for x in fields] == list(types.items())
    arrays = ("query", "key", "value", "bias", "mask")
    for name in (*arrays, "return_residual", "return_max_logit"):
        del types[name]
    options = inspect.get_annotations(_api._Options)
    assert {k: x.__forward_arg__ for k, x in options.items()} == types


def test_explain_computes_nothing():
    """Of arrays or of shapes: 2**38 products would not end."""
    x = jax.ShapeDtypeStruct((8, 2**18, 16, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((8, 2**18), jnp.int32)
    slopes, key = jax.ShapeDtypeStruct((16,), jnp.float32), jax.random.key(0)
    text = explain(
        *(x, x, x),
        query_segment_ids=ids,
        alibi_slopes=slopes,
        dropout_rate=0.1,
        dropout_rng=jax.ShapeDtypeStruct((), key.dtype),
        scale=jax.ShapeDtypeStruct((), jnp.float32),
        query_offset=jax.ShapeDtypeStruct((8,), jnp.int32),
        implementation="xla",
    )
    assert text.startswith("implementation: xla")


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("logits_soft_cap", jnp.float32(1), "Python number because it is compiled"),
        ("dropout_rate", jnp.float32(0.1), "Python number because it is compiled"),
        ("local_window_size", jnp.int32(1), "Python ints or None"),
        ("is_causal", jnp.bool_(True), "Python bool, got .*static_argnames"),
        ("broadcast_dropout", jnp.bool_(True), "Python bool"),
        ("return_residual", jnp.bool_(True), "Python bool"),
    ],
)
def test_what_must_be_known_may_not_be_traced(name, number, words):
    def call(x):
        return attention(**GOOD, **{name: x})

    with pytest.raises(TypeError, match=f"{name} must .*{words}") as caught:
        jax.jit(call)(number)
    assert re.search(r"got \w*Tracer", str(caught.value))


def test_wrong_calls_are_distinct():
    calls = {str(sorted(changes.items())) for changes, *_ in WRONG.values()}
    assert len(calls) == len(WRONG)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((24, 64, 4, 1), ["block_q", "multiple of 16", "24"]),
        ((64, 8, 4, 1), ["block_kv", "multiple of 16", "8"]),
        ((64, 64, 0, 1), ["num_warps", "1 to 16", "0"]),
        ((64, 64, 32, 1), ["num_warps", "16", "32"]),
        ((64, 64, 4, 0), ["num_stages", "0"]),
        ((64, 64, 4, 1, 100), ["max_registers", "multiple of 8", "100"]),
        ((64, 64, 4, 1, 256), ["max_registers", "248", "256"]),
        ((64, 64, 4, 1, "no"), ["max_registers", "'no'"]),
        ((64, 64, 4, 1, None, 3), ["left_in_registers", "0, 1 or 2", "3"]),
        ((64, 64, 4, 1, None, True), ["left_in_registers", "0, 1 or 2", "True"]),
    ],
)
def test_wrong_blocks(arguments, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        Blocks(*arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Blocks(64.0, 64, 4, 1), ["block_q", "int", "64.0"]),
        (lambda: Blocks(64, 64, 4, True), ["num_stages", "int", "True"]),
        (lambda: Config(forward=(64, 64, 4, 1)), ["forward", "Blocks", "(64"]),
        (lambda: Config(interpret="no"), ["interpret", "bool", "'no'"]),
    ],
)
def test_fields_of_a_wrong_type(make, words):
    with pytest.raises(TypeError, match=".*".join(map(re.escape, words))):
        make()


@pytest.mark.skipif(ON_GPU, reason="a GPU serves this call")
def test_kernels_do_not_run_on_a_cpu_unasked():
    with pytest.raises(ValueError, match=r"triton.*NVIDIA GPUs.*'cpu'.*interpret=True"):
        attention(**GOOD, implementation="triton")


def test_explain_names_every_implementation():
    text = explain(**GOOD)
    for name in ("mosaic_gpu", "triton", "xla", "reference"):
        assert f"  {name}: " in text
    assert text.startswith("implementation: " + ("triton" if ON_GPU else "xla"))
    wide = jax.ShapeDtypeStruct((1, 4, 1, 600), jnp.float32)
    asked = explain(wide, wide, wide, implementation="triton")
    assert asked.startswith("error: implementation='triton'")


def test_explain_says_how_it_read_the_axes():
    """And notes what is legal, but seldom meant."""

    def lines(q, k, **more):
        q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q, k))
        text = explain(q, k, k, **more)
        return [x.strip() for x in text.splitlines() if "read as" in x or "note:" in x]

    words = "read as: batch (2,), 1 query rows of 4 heads, 40 key rows of 2 heads"
    decoding = ((2, 1, 4, 16), (2, 40, 2, 16))
    assert lines(*decoding) == [f"{words}, head size 16"]
    (_, note) = lines(*decoding, is_causal=True)
    assert "no query attends to keys 1 to 39" in note
    for offset in (39, np.int32([39, 20])):
        assert len(lines(*decoding, is_causal=True, query_offset=offset)) == 1
    (_, note) = lines(*[(2, 4, 40, 16)] * 2)
    assert "fewer rows than heads" in note
    assert lines((40, 16), (30, 16)) == [
        "read as: batch (), 40 query rows, 30 key rows, head size 16"
    ]


def test_arrays_that_kernels_cannot_address():
    """More elements than an int32 counts: said, mapped or not, and never wrong."""
    call = functools.partial(attention, implementation="triton")
    x = jax.ShapeDtypeStruct((3, 2**19, 16, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"array has 3221225472 elements.*2\*\*31"):
        lower_for_gpu(call, x, x, x)
    with pytest.raises(ValueError, match=r"array has 3221225472 elements.*2\*\*31"):
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
    with pytest.warns(UserWarning, match=r"'xla', slower.*600 is above"):
        lower_for_gpu(attention, x, x, x)


def test_a_backend_leaves_a_call_to_one_that_is_faster():
    """In silence, and not if it is asked for by name."""
    x = jax.ShapeDtypeStruct((4, 2048, 1, 512), jnp.bfloat16)
    few = jax.ShapeDtypeStruct((4, 512, 1, 512), jnp.bfloat16)
    lines = []

    def call(x, **options):
        lines.append(explain(x, x, x, **options).splitlines())
        return attention(x, x, x, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lower_for_gpu(call, x)
        assert "flash2_forward" not in text
        assert lines[-1][0] == "implementation: xla"
        assert any("slower: a block of head size 512" in line for line in lines[-1])
        assert "flash2_forward" in lower_for_gpu(call, few)
        window = functools.partial(call, local_window_size=64)
        assert "flash2_forward" in lower_for_gpu(window, x)
        named = functools.partial(call, implementation="triton")
        assert "flash2_forward" in lower_for_gpu(named, x)
        assert lines[-1][0] == "implementation: triton"


def test_slower_choice_is_said_once():
    """Once for a line of the caller's code, however often it runs."""
    x = jax.ShapeDtypeStruct((1, 4, 1, 600), jnp.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            lower_for_gpu(lambda x: attention(x, x, x), x)
    assert len(said) == 1
    assert said[0].filename == __file__


def test_gpus_too_old_are_refused(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 4, 1, 64), jnp.float32)
    monkeypatch.setattr(device, "capability", lambda: 75)
    call = functools.partial(attention, implementation="triton")
    with pytest.raises(ValueError, match=r"compute capability 7\.5 is below 8\.0"):
        lower_for_gpu(call, x, x, x)


def test_views_of_numpy_arrays():
    """Strides are no matter."""
    x = np.random.default_rng(0).standard_normal((4, 3, 12, 16), np.float32)
    view = x.transpose(1, 2, 0, 3)[:, ::-2]
    np.testing.assert_array_equal(
        attention(view, view, view), attention(*[jnp.asarray(view.copy())] * 3)
    )


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (2, 0), (0, 0)])
def test_no_batch_or_heads(backend, batch, heads):
    """Nothing to attend is no error: results and gradients of their shapes, all 0."""
    options = BACKENDS.get(backend, {"implementation": "reference"})
    x = jnp.ones((batch, 5, heads, 8))
    bias, sinks = jnp.ones((1, 1, 5, 5)), jnp.ones(heads)

    def call(x, bias, sinks):
        options_ = {"is_causal": True, "return_residual": True, **options}
        return attention(x, x, x, bias, sinks=sinks, **options_)

    (out, lse), vjp = jax.vjp(call, x, bias, sinks)
    assert out.shape == x.shape
    assert lse.shape == x.shape[:-1]
    for gradient, primal in zip(vjp((out, lse)), (x, bias, sinks), strict=True):
        assert gradient.shape == primal.shape
        assert not np.any(gradient)


@functools.lru_cache(maxsize=8)
def _program(backend: str, is_causal: bool):
    """Output and gradient of one array, of the arguments that are arrays."""
    options = {"is_causal": is_causal, **BACKENDS[backend]}

    @jax.jit
    def run(x, arguments):
        def call(x):
            return attention(x, x, x, **arguments, **options)

        out, vjp = jax.vjp(call, x)
        return out, vjp(x)[0]

    return run


def _same(arguments, others, backend, *, is_causal=False, atol=2e-2 if ON_GPU else 0.0):
    x = jax.random.normal(jax.random.key(0), (2, 20, 2, 16), jnp.float32)
    run = _program(backend, is_causal)
    for a, b in zip(run(x, arguments), run(x, others), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def _same_offset(far, near, backend):
    offsets = {"query_offset": far}, {"query_offset": near}
    _same(*offsets, backend, is_causal=True, atol=2e-2 if ON_GPU else 1e-5)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_lengths_beyond_the_rows_are_clipped(backend):
    few, many = np.int32([-5, 2**31 - 1]), np.int32([-(2**31), 21])
    lengths = {"query_seq_lengths": few, "key_value_seq_lengths": many}
    clipped = dict.fromkeys(lengths, np.int32([0, 20]))
    _same(lengths, clipped, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_segment_ids_may_be_any_int32(backend):
    """Negative and extreme ids are ids like others."""
    small = np.repeat(np.int32([[3, 1, 2, 0, 3]]), 4, axis=1).repeat(2, axis=0)
    large = np.int32([-1, -(2**31), 2**31 - 1, 7])[small]
    ids = "query_segment_ids"
    _same({ids: large}, {ids: small}, backend)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_far_offsets_are_clipped(backend):
    """Beyond 2**28, traced or not: every key is before the rows, or none is."""
    for far, near in ((2**31 - 1, 20), (-(2**31), -20)):
        _same_offset(jnp.int32(far), jnp.int32(near), backend)


def test_offsets_compile_nothing_anew():
    """A decoding loop hands over another int at every step."""
    call = functools.partial(attention, is_causal=True, implementation="xla")
    q, k = (jax.random.normal(jax.random.key(i), (2, i, 1, 8)) for i in (1, 9))
    call(q, k, k, query_offset=3)
    before = _vjp.attend._cache_size()
    outs = [call(q, k, k, query_offset=i) for i in (1, 2, np.int64(4))]
    assert _vjp.attend._cache_size() == before
    assert not np.array_equal(outs[0], outs[1])


def test_numbers_that_are_arrays():
    """jnp scalars where numbers are taken; a scale may also be traced."""
    call = functools.partial(attention, GOOD["query"], GOOD["key"], GOOD["value"])
    plain = call(scale=0.5, logits_soft_cap=2.0)
    found = call(scale=jnp.float32(0.5), logits_soft_cap=jnp.float32(2.0))
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-6)
    traced = jax.jit(lambda scale: call(scale=scale, logits_soft_cap=2.0))(0.5)
    np.testing.assert_allclose(traced, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_wide_integers_lose_nothing(backend):
    """Of 64 bits, or unsigned: clipped, or compared, before 32 bits are left."""
    few = {"query_seq_lengths": np.int32([3, 20])}
    _same({"query_seq_lengths": np.uint32([3, 2**32 - 1])}, few, backend)
    with jax.enable_x64(True):
        _same({"query_seq_lengths": np.int64([3, 2**40])}, few, backend)
        _same_offset(jnp.int64(2**40), jnp.int32(20), backend)
        small = np.repeat(np.int64([[0, 1, 2, 0, 1]]), 4, axis=1).repeat(2, axis=0)
        ids = "query_segment_ids"
        for factor in (2**32, 2**32 + 1):
            wide = {ids: jnp.asarray(small * factor)}
            _same(wide, {ids: small.astype(np.int32)}, backend)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_wide_operands_of_narrow_queries(backend):
    """Under x64 an array made without a dtype is float64; its gradient is too."""
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (1, 20, 2, 16), jnp.float32)
        wide = {"bias": jnp.ones((20, 20)), "alibi_slopes": jnp.ones(2)}
        wide["sinks"] = jnp.ones(2)

        def loss(arguments):
            return jnp.sum(attention(x, x, x, **arguments, **BACKENDS[backend]) ** 2)

        gradient = jax.jit(jax.grad(loss))
        gradients = gradient(wide)
        narrow = gradient({k: v.astype(jnp.float32) for k, v in wide.items()})
    for name, x in gradients.items():
        assert x.dtype == jnp.float64
        np.testing.assert_array_equal(x, narrow[name])
