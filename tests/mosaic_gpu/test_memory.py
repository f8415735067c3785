"""The shared memory of the Mosaic GPU kernels is what they declare."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from jax_flash2 import attention
from pallas_kernels import device
from pallas_kernels.mosaic_gpu import memory, shared_memory
from tests.cases import by_name
from tests.lowering import lower_for_gpu, string_attributes
from tests.modules import without_locations
from tests.mosaic import lowered, off_hopper, with_heads
from tests.tiers import deeply


def asked(module: bytes) -> int:
    """The bytes of shared memory that a lowered kernel asks for."""
    text = without_locations(module)
    (size,) = re.findall(r'gpu\.launch"\(.*(%\w+)\)', text)
    (found,) = re.findall(size + r" = .*constant.*value = (\d+) : i32", text)
    return int(found)


@off_hopper
@pytest.mark.parametrize(
    ("name", "head"), [("bias_half", 64), *deeply(("gqa", 160), ("gqa", 256))]
)
def test_gradients(name, head, any_size, monkeypatch):
    """Of every kernel for gradients: for narrow heads, wide ones, and the widest."""
    declared, call = [], memory.call

    def keep(*arguments, scratch, **options):
        declared.append(shared_memory.num_bytes(scratch))
        return call(*arguments, scratch=scratch, **options)

    monkeypatch.setattr(memory, "call", keep)
    jax.clear_caches()
    case = with_heads(by_name(name), head)
    modules = string_attributes(lowered(case, jnp.bfloat16), "module")
    assert sorted(map(asked, modules)) == sorted(declared)
    assert len(declared) == (2 if head == 160 else 3)
    assert max(declared) <= device.shared_memory_limit()


@off_hopper
def test_gradients_of_distances_take_little():
    """A tile's sums along its diagonals are far fewer than its pairs."""
    q = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((2, 257), jnp.float32)

    def gradients(q, table):
        def call(q, table):
            def of_distance(score, b, h, i, j):
                return score + table[h, jnp.clip(i - j, -128, 128) + 128]

            options = {"is_causal": True, "implementation": "mosaic_gpu"}
            return attention(q, q, q, score_mod=of_distance, **options)

        out, vjp = jax.vjp(call, q, table)
        return vjp(out)

    text = lower_for_gpu(gradients, q, table)
    *_, kernel = (x for x in text.splitlines() if "@mosaic_gpu_v2" in x)
    (shape,) = re.findall(r"-> tensor<([\dx]+)xf32>$", kernel)
    assert math.prod(map(int, shape.split("x"))) < q.size / 4
