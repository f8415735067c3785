"""The gradients that the Mosaic GPU backend makes itself."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, attention, explain
from pallas_kernels import device
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Window
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu import memory
from pallas_kernels.mosaic_gpu.hopper import tuning
from tests.cases import Case, by_name
from tests.lowering import kernel_modules, lower_for_gpu
from tests.mosaic import (
    MOSAIC,
    SERVED,
    assert_same_bits,
    check,
    lowered,
    off_hopper,
    on_hopper,
    with_heads,
)
from tests.tiers import deep, deeply

# Cases whose gradients the backend makes itself, where it has the head size.
WIDER = {
    **{
        "96": (96, 96),
        "48": (48, 40),
        "40_24": (40, 24),
        "100_128": (100, 128),
        "80": (80, 80),
    },
    **{"192_128": (192, 128), "160": (160, 160), "130_136": (130, 136)},
    # Narrow beside wide, which have tiles of their own.
    **{"64_192": (64, 192), "64_256": (64, 256), "256_32": (256, 32)},
}

BACKWARD = [case for case in SERVED if case.h == case.d == 16]

NAMED = ("lengths_causal", "segments_causal_gqa")  # the first is deep


def _lowered() -> Iterator:
    """A sixth of the cases, with heads of each size in turn; a GPU runs them all."""
    for i, case in enumerate(BACKWARD):
        if case.name in NAMED or i % 6 == 0:
            head, marks = (64, 128)[i // 6 % 2], [] if case.name == NAMED[1] else deep
            yield pytest.param(case, head, id=f"{case.name}-{head}", marks=marks)


@off_hopper
@pytest.mark.parametrize(("case", "head"), list(_lowered()))
def test_backward_lowers(case, head, any_size):
    text = lowered(with_heads(case, head), jnp.bfloat16)
    of_score = _of_score(case)
    own = of_score if of_score == {"flash2_dbias"} and _of_pairs(case) else set()
    assert text.count("custom_call @mosaic_gpu") == 2 + len(own)
    assert all(name in text for name in ("flash2_backward", *own))
    assert set(kernel_modules(text)) == of_score - own


def _of_score(case: Case) -> set[str]:
    """The kernels for gradients of the score's operands."""
    _, arguments = case.inputs("float32")
    is_data = isinstance(arguments.get("scale"), np.ndarray)
    has = {
        "bias": case.has("bias"),
        "slopes": case.has("alibi_slopes"),
        "factor": is_data,
    }
    return {f"flash2_d{field}" for field, there in has.items() if there}


def _of_pairs(case: Case) -> bool:
    """Whether a bias has an element for each pair: this backend makes its gradient."""
    _, arguments = case.inputs("float32")
    return all(size > 1 for size in (1, *arguments["bias"].shape)[-2:])


def test_score_gradients_of_another_backend(any_size):
    """`explain` names who makes them."""
    arrays, arguments = with_heads(by_name("alibi"), 64).inputs(jnp.bfloat16)
    texts = []

    def run(q, k, v):
        texts.append(explain(q, k, v, **arguments, **MOSAIC))
        return q

    lower_for_gpu(run, *arrays)
    assert (
        "    gradients of alibi_slopes: triton (not mosaic_gpu: there is a" in texts[0]
    )


OTHER = {
    "head_size": (by_name("head_72_24"), "head sizes (72, 24)"),
    "few": (with_heads(by_name("plain"), 64), "few blocks of keys"),
    "soft_cap": (with_heads(by_name("soft_cap"), 64), "registers do not suffice"),
}


@pytest.mark.parametrize("name", OTHER)
def test_gradients_of_another_backend(name):
    case, words = OTHER[name]
    arrays, arguments = case.inputs(jnp.bfloat16)
    texts = []

    def ask(q, k, v):
        texts.append(explain(q, k, v, **arguments, **MOSAIC))
        return q

    lower_for_gpu(ask, *arrays)
    (line,) = (x for x in texts[0].splitlines() if x.startswith("    backward: triton"))
    assert words in line


# Of one tile of keys, and divided by heads, by queries and by both. Wide heads have
# smaller blocks, and so more parts of queries.
DIVIDED = {
    "whole": (1, {}, ()),
    "heads": (8, {}, ("heads of a group in 4 parts",)),
    "queries": (100, {"n": 1}, ("queries in {} parts",)),
    "both": (4000, {}, ("heads of a group in 4 parts", "queries in {} parts")),
}


def divided_case(name: str, head: int, shape: dict) -> Case:
    sizes = {"batch": (1,), "t": 1100, "s": 700, "n": 4, "k": 1, "h": head, "d": head}
    return dataclasses.replace(by_name(name), **sizes | shape)


@pytest.mark.parametrize(("head", "of_queries"), [(64, 2), *deeply((256, 4))])
@pytest.mark.parametrize("name", ["both", *deeply("whole", "heads", "queries")])
def test_divided_backward_lowers(name, head, of_queries, multiprocessors, any_size):
    count, shape, words = DIVIDED[name]
    multiprocessors(count)
    case = divided_case("causal", head, shape)
    arrays, arguments = case.inputs(jnp.bfloat16)
    texts = []

    def run(q, k, v):
        texts.append(explain(q, k, v, **arguments, **MOSAIC))
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(call, q, k, v)
        return vjp(out)

    lowered = lower_for_gpu(run, *arrays)
    kernels = 2 + tuning.separate_dq({"h": head, "d": head})
    assert lowered.count("custom_call @mosaic_gpu") == kernels
    for part in words:
        assert part.format(of_queries) in texts[0]
    assert ("parts" in texts[0]) == bool(words)


@pytest.mark.parametrize("name", ["96", *deeply(*(x for x in WIDER if x != "96"))])
def test_tiles_wider_than_heads_lower(name, any_size):
    h, d = WIDER[name]
    case = dataclasses.replace(by_name("causal"), h=h, d=d)
    kernels = 2 + tuning.separate_dq({"h": h, "d": d})
    assert lowered(case, jnp.bfloat16).count("custom_call @mosaic_gpu") == kernels


@on_hopper
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", WIDER)
def test_tiles_wider_than_heads(name, group, any_size, record_property):
    h, d = WIDER[name]
    sizes = {"h": h, "d": d, "n": 2 * group, "k": 2, "t": 300, "s": 333}
    case = dataclasses.replace(by_name("causal"), **sizes)
    check(case, "bfloat16", record_property)


def test_what_lies_beyond_queries():
    """Whatever the scores of such rows, their probabilities are 0."""
    lse = memory.Filled(np.zeros((2, 5), np.float32), ("b", "t"), np.inf)
    padded = memory._as_loaded(lse, {"t": 4})
    assert padded.shape == (2, 8) and np.isinf(padded.value[:, 5:]).all()
    assert not np.any(padded.value[:, :5])


@on_hopper
@pytest.mark.parametrize(("dtype", "size"), [("float16", 20), ("bfloat16", 100)])
def test_queries_beyond_the_array(dtype, size, any_size, record_property):
    """Their scores are so high that a query of zeros would have infinite ones."""
    case = dataclasses.replace(by_name("plain"), t=300, s=512, h=64, d=64)
    bias = np.full((512,), size, np.float32)
    case = dataclasses.replace(case, arguments=lambda rng, case: {"bias": bias})
    check(case, dtype, record_property)


def test_heads_of_any_size():
    """The backward kernels have blocks for them, or there is none; nothing raises."""
    sizes = range(16, 257, 16)
    for heads in itertools.product(sizes, sizes):
        size = dict(zip("hd", heads, strict=True))
        width = tuning.head_tiles(size)
        blocks = tuning.of_backward(heads)
        assert tuning.pipelines_scores(width) == (max(heads) <= 128)
        if tuning.separate_dq(size):
            assert blocks is not None and set(blocks) == {"dkv", "dq"}
            assert all(x % 32 == 0 for x in width.values())
        elif blocks is not None:
            assert max(heads) <= 192 and sum(width.values()) <= 320


WIDE = [(192, 128), (160, 160), (256, 256), (200, 72)]
OF_WIDE_HEADS = (
    *("plain", "window_offset", "lengths_causal", "segments_causal_gqa"),
    *("alibi_batch", "sinks", "scale_data", "dropout", "mask_full", "bias_shared"),
    *("bias_keys_heads", "mask_keys_heads"),
)


@on_hopper
@pytest.mark.parametrize("heads", WIDE, ids=["_".join(map(str, x)) for x in WIDE])
@pytest.mark.parametrize("name", OF_WIDE_HEADS)
def test_error_rule_of_wide_heads(name, heads, any_size, record_property):
    h, d = heads
    case = dataclasses.replace(by_name(name).full(), h=h, d=d)
    check(case, "bfloat16", record_property)


def test_gradients_beside_a_bias_of_one_byte():
    """Kernels take it in two bytes: that of its own gradient, too."""
    q = jax.ShapeDtypeStruct((4, 2048, 8, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((4, 8, 2048, 2048), jnp.float8_e4m3fn)

    def loss(q, bias):
        return attention(q, q, q, bias=bias).astype(jnp.float32).sum()

    text = lower_for_gpu(jax.grad(loss), q, bias)
    assert "flash2_backward" in text and "__gpu$xla.gpu.triton" not in text


@on_hopper
@pytest.mark.parametrize("case", SERVED[::4], ids=lambda x: x.name)
def test_gradients_after_the_forward_of_another(case, any_size, monkeypatch):
    """As windows at heads of 64, whose forward is faster by Triton's kernels."""
    monkeypatch.setattr(tuning, "slower", lambda *_: "it was said to be")
    monkeypatch.setattr(tuning, "slower_backward", lambda *_, **__: None)
    jax.clear_caches()
    check(case.full(), "bfloat16", lambda *_: None, implementation=None)
    jax.clear_caches()


@on_hopper
@pytest.mark.parametrize("sums", [2, 4])
@pytest.mark.parametrize("name", ["plain", "causal", "gqa", "lengths_causal"])
def test_several_dq_accumulators(name, sums, any_size, monkeypatch, record_property):
    monkeypatch.setattr(tuning, "dq_accumulators", lambda *_: sums)
    case = dataclasses.replace(by_name(name), h=128, d=128, t=700, s=900)
    jax.clear_caches()
    check(case, "bfloat16", record_property)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("t", "s", "heads", "expected"),
    [
        (16384, 16384, 2, 4),
        (8192, 8192, 8, 2),
        (16384, 16384, 32, 1),
        (2048, 2048, 2, 1),  # of so few rows another sum takes as long as it saves
        (16384, 77, 2, 1),  # one block of keys waits for nobody
    ],
)
def test_how_many_dq_accumulators(t, s, heads, expected, monkeypatch):
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q = Named(struct((1, t, heads, 128)), ("b0", "t", "n", "h"))
    k, v = (Named(struct((1, s, heads, 128)), ("b0", "s", "k", name)) for name in "hd")
    spec = AttentionSpec(Score(1.0), (Window(None, 0),) if t == s else ())
    launch = Launch(Blocks(64, 128, 8, 2), None, PLAIN, False, None)
    layout = memory.TileGrid.of("dkv", [q, k, v], launch, by_block=True)
    assert tuning.dq_accumulators(spec, layout) == expected


@on_hopper
@pytest.mark.parametrize("heads", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("name", ["plain", "causal", "gqa", "lengths_causal"])
def test_same_bits(name, heads, any_size):
    """Where many programs add to the same blocks of a gradient."""
    h, d = heads
    case = dataclasses.replace(by_name(name), h=h, d=d, t=2048, s=2048)
    arrays, arguments = case.inputs(jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(functools.partial(call, return_residual=True), q, k, v)
        return out, vjp(out)

    assert_same_bits(run, arrays, 100)


@on_hopper
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("mask", ["plain", "causal", "lengths_causal", "segments"])
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_gradients(
    name, mask, head, multiprocessors, any_size, record_property
):
    count, shape, _ = DIVIDED[name]
    multiprocessors(count)
    case = divided_case(mask, head, shape)
    arrays, arguments = case.inputs(jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        call = functools.partial(attention, **arguments, **MOSAIC)
        out, vjp = jax.vjp(call, q, k, v)
        return vjp(out)

    assert_same_bits(run, arrays, 100)
    check(case, "bfloat16", record_property)


@on_hopper
@pytest.mark.parametrize("axes", [(0, 0, 0), (2, None, None), (3, 1, 1), (None, 2, 2)])
def test_under_vmap(axes, any_size):
    """Wherever the mapped axis lies, the bits of a loop."""
    rng = np.random.default_rng(0)
    shape = (2, 136, 3, 64)

    def operand(axis):
        full = shape if axis is None else (*shape[:axis], 4, *shape[axis:])
        return jnp.asarray(rng.standard_normal(full), jnp.bfloat16)

    arrays = [operand(axis) for axis in axes]
    call = functools.partial(attention, is_causal=True, return_residual=True, **MOSAIC)

    def run(*arrays):
        found, vjp = jax.vjp(call, *arrays)
        return found, vjp(found)

    mapped = jax.vmap(run, axes)(*arrays)
    for i in range(4):
        one = [
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(arrays, axes, strict=True)
        ]
        found = jax.tree.leaves(run(*one))
        pairs = zip(found, jax.tree.leaves(mapped), strict=True)
        for number, (a, b) in enumerate(pairs):
            # XLA sums delta, in an order that may change with the shape.
            close = {} if number < 2 else {"rtol": 2**-6, "atol": 2**-6}
            check = np.testing.assert_allclose if close else _equal
            check(np.float32(a), np.float32(b[i]), **close)


def _equal(a, b):
    np.testing.assert_array_equal(a, b)
