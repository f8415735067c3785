"""The shared memory of the Mosaic GPU kernels is what they declare."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import device
from pallas_kernels.mosaic_gpu import memory, shared_memory
from tests.cases import by_name
from tests.lowering import string_attributes
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
