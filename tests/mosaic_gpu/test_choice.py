"""Which calls, and which of their passes, go to the Mosaic GPU backend on Hopper."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import attention, explain
from pallas_kernels.mosaic_gpu import measured, support
from tests.lowering import lower_for_gpu, string_attributes
from tests.modules import hashes, mosaic_modules, without_locations
from tests.mosaic import MOSAIC
from tests.tiers import deeply


def _choice(shape: tuple[int, ...], keys=None, key_heads=None, **arguments) -> str:
    batch, rows, heads, head = shape
    found = []
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    other = (batch, keys or rows, key_heads or heads, head)
    k = jax.ShapeDtypeStruct(other, jnp.bfloat16)

    def ask(q, k):
        found.append(explain(q, k, k, **arguments).splitlines()[0])
        return q

    lower_for_gpu(ask, q, k)
    return found[0].removeprefix("implementation: ")


def test_calls_go_to_the_backend_that_measured_faster():
    assert _choice((2, 8192, 16, 128)) == "mosaic_gpu"
    assert _choice((2, 8192, 16, 128), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 512, 16, 128), is_causal=True) == "mosaic_gpu"
    assert _choice((2, 128, 4, 64)) == "triton"
    assert _choice((8, 2048, 32, 64), is_causal=True) == "mosaic_gpu"
    assert _choice((8, 1496, 32, 64), is_causal=True) == "mosaic_gpu"
    assert _choice((8, 1488, 32, 64), is_causal=True) == "triton"
    assert _choice((1, 2048, 1, 128)) == "triton"  # programs on a few multiprocessors
    assert _choice((16, 1024, 8, 256), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 512, 8, 256), is_causal=True) == "mosaic_gpu"
    assert _choice((32, 256, 8, 256), is_causal=True) == "mosaic_gpu"
    assert _choice((64, 96, 16, 256), is_causal=True) == "triton"
    assert _choice((64, 256, 16, 64)) == "mosaic_gpu"
    assert _choice((64, 256, 16, 64), is_causal=True) == "triton"
    assert _choice((32, 512, 21, 96), is_causal=True) == "mosaic_gpu"
    for size, head, chosen in (
        (130, 128, "mosaic_gpu"),
        (120, 128, "triton"),
        (1024, 64, "triton"),
        (3600, 64, "mosaic_gpu"),
        (130, 256, "mosaic_gpu"),
    ):
        window = {"is_causal": True, "local_window_size": (size, 0)}
        assert _choice((4, 8192, 2048 // head, head), **window) == chosen
    for rows, head, chosen in (
        (512, 128, "mosaic_gpu"),
        (120, 128, "triton"),
        (8192, 64, "triton"),
        (16384, 64, "mosaic_gpu"),
        (1024, 48, "triton"),
        (2048, 48, "mosaic_gpu"),
    ):
        ids = {"query_segment_ids": jnp.zeros((2, rows), jnp.int32)}
        assert _choice((2, rows, 16, head), is_causal=True, **ids) == chosen


def test_documents_have_a_point_for_each_pass(monkeypatch):
    table = measured.here()
    documents = {128: measured.Crossover(forward=64, backward=8192)}
    crossovers = {**table.crossovers, "documents": documents}
    table = dataclasses.replace(table, crossovers=crossovers)
    monkeypatch.setattr(measured, "here", lambda: table)
    ids = jnp.zeros((2, 4096), jnp.int32)
    call = functools.partial(attention, is_causal=True, query_segment_ids=ids)
    q = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)

    def both(q, k, v, do):
        out, vjp = jax.vjp(call, q, k, v)
        return out, vjp(do)

    text = lower_for_gpu(both, q, q, q, q)
    forward, *backward = re.findall(r"custom_call @([\w$.]+)", text)
    assert forward == "mosaic_gpu_v2" and {*backward} == {"__gpu$xla.gpu.triton"}


def _kernels_under_vmap(axes: int, which: str, **options) -> set[str]:
    """Custom calls of 16 heads and 2 batch entries, of which so many are mapped."""
    q = jax.ShapeDtypeStruct((2, 16, 4096, 128)[-2 - axes :], jnp.bfloat16)

    def one(q, k, v, do):
        call = functools.partial(attention, is_causal=True, **options)
        rows = [x[:, None] for x in (q, k, v, do)]  # [T, 1, H]
        out, vjp = jax.vjp(call, *rows[:3])
        return out if which == "forward" else vjp(rows[3])

    for _ in range(axes):
        one = jax.vmap(one)
    text = lower_for_gpu(one, q, q, q, q)
    return set(re.findall(r"custom_call @([\w$.]+)", text))


@pytest.mark.parametrize("which", [*deeply("forward"), "backward"])
def test_mapped_calls_go_to_the_backend_that_measured_faster(which):
    """`vmap` over heads: one of them would leave most multiprocessors idle."""
    mosaic_gpu, triton = {"mosaic_gpu_v2"}, {"__gpu$xla.gpu.triton"}
    assert _kernels_under_vmap(0, which) == triton
    assert _kernels_under_vmap(2, which) == mosaic_gpu
    assert _kernels_under_vmap(2, which, implementation="triton") == triton


@pytest.mark.parametrize(
    "shape", [(2, 8, 4, 64), (0, 8, 4, 64), (2, 0, 4, 64), (2, 8, 0, 64)]
)
def test_nothing_to_do_on_hopper(shape):
    """The choice of a backend divides work, of which there may be none."""
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    k = jax.ShapeDtypeStruct((shape[0], 0, *shape[2:]), jnp.bfloat16)

    def both(q, k):
        out, vjp = jax.vjp(attention, q, k, k)
        return out, vjp(out)

    assert "custom_call" not in lower_for_gpu(both, q, k)


def test_operands_that_must_be_copied():
    """For TMA; at heads of 64 rows may end anywhere, and smaller ones of 8 be whole."""
    for rows, chosen in ((2047, "triton"), (1504, "mosaic_gpu"), (3071, "mosaic_gpu")):
        assert _choice((8, rows, 16, 128)) == chosen
    small = "mosaic_gpu" if support.COPIES_ANY_WIDTH else "triton"
    of_heads = {72: "triton", 80: "mosaic_gpu", 40: small, 36: "triton"}
    for head, chosen in of_heads.items():
        assert _choice((8, 2048, 16, head)) == chosen
    assert _choice((8, 1500, 16, 64)) == "mosaic_gpu"
    assert _choice((8, 1500, 16, 40)) == small


def test_gradients_go_to_the_backend_that_measured_faster():
    """Unless the caller names the backend of the forward."""
    q = jax.ShapeDtypeStruct((2, 448, 16, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 448, 4, 64), jnp.bfloat16)
    texts = []

    def ask(q, k):
        texts.extend(explain(q, k, k, **options) for options in ({}, MOSAIC))
        return q

    def loss(q, k, **options):
        return attention(q, k, k, **options).astype(jnp.float32).sum()

    lower_for_gpu(ask, q, k)
    chosen, named = texts
    assert "backward: triton (not mosaic_gpu: about 448 keys" in chosen
    assert "backward: mosaic_gpu\n" in named
    for text in texts:  # the division is that of the kernel that makes them
        backward = text.partition("    backward: ")[2]
        assert "        dkv: heads of a group" in backward
    gradients = [
        lower_for_gpu(jax.grad(functools.partial(loss, **options)), q, k)
        for options in ({}, MOSAIC)
    ]
    assert ["__gpu$xla.gpu.triton" in text for text in gradients] == [True, False]
    # Few keys that many queries look at.
    q = jax.ShapeDtypeStruct((2, 4096, 16, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 77, 16, 64), jnp.bfloat16)
    lower_for_gpu(ask, q, k)
    assert texts[-2].startswith("implementation: mosaic_gpu")
    assert "backward: mosaic_gpu\n" in texts[-2]


def test_short_rows_with_lengths():
    lengths = {"is_causal": True, "key_value_seq_lengths": np.full(32, 300, np.int32)}
    assert _choice((32, 512, 16, 128), **lengths) == "mosaic_gpu"
    assert _choice((32, 510, 16, 128), **lengths) == "triton"  # copied
    assert _choice((32, 512, 16, 64), **lengths) == "triton"
    q = jax.ShapeDtypeStruct((32, 384, 16, 128), jnp.bfloat16)
    texts = []
    lower_for_gpu(lambda q: texts.append(explain(q, q, q, **lengths)) or q, q)
    assert "backward: triton (not mosaic_gpu: about 192 keys" in texts[0]


def _features(rows: int) -> dict[str, dict]:
    return {
        "dropout": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
        "mask": {"mask": np.ones((2, 1, 1, rows), bool)},
        "bias of keys": {"bias": np.zeros((16, 1, rows), np.float32)},
        "bias of pairs": {"bias": np.zeros((16, rows, rows), jnp.bfloat16)},
        "wide bias of pairs": {"bias": np.zeros((16, rows, rows), np.float32)},
    }


@pytest.mark.parametrize("name", _features(1))
def test_features_go_to_the_backend_that_measured_faster(name):
    def choice(rows: int, head: int) -> str:
        return _choice((2, rows, 16, head), **_features(rows)[name])

    assert choice(2048, 128) == "mosaic_gpu"
    assert choice(2048, 64) == "mosaic_gpu"
    causal = _choice((2, 2048, 16, 64), is_causal=True, **_features(2048)[name])
    assert causal == "mosaic_gpu"
    assert choice(512, 128) == "mosaic_gpu"


@pytest.mark.parametrize("rows", [1, 8, 64, 127])
@pytest.mark.parametrize("key_heads", [1, 8, 32])
def test_few_queries_go_to_triton(rows, key_heads):
    """It divides their keys, and reads keys once for the heads of a group."""
    shape = (64, rows, 32, 128)
    assert _choice(shape, 4096, key_heads) == "triton"
    assert _choice((64, 128, 32, 128), 4096, key_heads) == "mosaic_gpu"


def test_a_window_is_faster_here_backward_before_it_is_forward():
    """Of 1,024 keys, heads of 64: 1.13 times as fast; the forward is not."""
    q = jax.ShapeDtypeStruct((2, 8192, 32, 64), jnp.bfloat16)
    of_window = functools.partial(
        attention, is_causal=True, local_window_size=(1023, 0)
    )

    def both(which, q):
        out, vjp = jax.vjp(lambda q: of_window(q, q, q, implementation=which), q)
        return out, vjp(out)

    def kernels(which):
        text = lower_for_gpu(functools.partial(both, which), q)
        return text.count("@mosaic_gpu_v2("), text.count("xla.gpu.triton(")

    assert kernels(None) == (1, 1)
    assert kernels("triton") == (0, 3)
    assert kernels("mosaic_gpu") == (2, 0)


def test_a_window_of_all_rows_is_none():
    q = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)

    def text(**arguments):
        def loss(q):
            return attention(q, q, q, **arguments).astype(jnp.float32).sum()

        found = lower_for_gpu(jax.grad(loss), q)
        kernels = [without_locations(x) for x in string_attributes(found, "ir")]
        return kernels, mosaic_modules(found), hashes(found)["rest"]

    causal = text(is_causal=True)
    assert all(map(len, causal))  # a kernel of Triton's forward, and Hopper's backward
    assert text(is_causal=True, local_window_size=(1023, 0)) == causal
    assert text(is_causal=True, local_window_size=(1022, 0)) != causal
    assert text(local_window_size=1023) == text()
    offset = {"is_causal": True, "query_offset": 1}
    assert text(**offset, local_window_size=(1023, 0)) != text(**offset)
