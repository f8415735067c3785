"""Programs for GPUs that are not here: what types of arrays say of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import attention, explain
from tests.cases import ON_GPU
from tests.lowering import kernel_modules

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU is here")
SHAPE = (2, 256, 2, 64)


def gradients(x, **options):
    call = functools.partial(attention, is_causal=True, **options)
    out, vjp = jax.vjp(call, x, x, x)
    return out, *vjp(out)


def _of_mesh(kind: str):
    """The type of arguments that lie on a mesh of such GPUs."""
    gpu = AbstractDevice(device_kind=kind, num_cores=77, platform="cuda")
    kinds = (AxisType.Auto,)
    mesh = AbstractMesh((1,), ("x",), axis_types=kinds, abstract_device=gpu)
    return jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, P()))


@pytest.mark.parametrize("kind", ["NVIDIA GeForce RTX 5090", "NVIDIA A100-SXM4-80GB"])
def test_types_name_the_gpu_that_a_program_is_for(kind):
    texts = []

    def call(x):
        texts.append(explain(x, x, x))
        return gradients(x)

    lowered = jax.jit(call).trace(_of_mesh(kind)).lower(lowering_platforms=("cuda",))
    assert texts[0].startswith("implementation: triton")
    assert f"GPU: {kind}, capability" in texts[0]
    assert "77 multiprocessors" in texts[0]
    kernels = {"flash2_forward", "flash2_dq", "flash2_dkv"}
    assert {*kernel_modules(lowered.as_text())} == kernels


def test_a_program_for_gpus_of_one_device_is_refused():
    """Its types do not say which, and loops on a GPU would be slow, in silence."""
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    words = r"traced for 'cpu', where 'xla' is best, and is lowered for 'cuda'"
    traced = jax.jit(gradients).trace(x)
    with pytest.raises(ValueError, match=words):
        traced.lower(lowering_platforms=("cuda",))
    by_name = jax.jit(functools.partial(gradients, implementation="xla")).trace(x)
    text = by_name.lower(lowering_platforms=("cuda",)).as_text()
    assert not kernel_modules(text)
    # One for several platforms is that of the machine, on each of them.
    exported = export.export(jax.jit(gradients), platforms=("cpu", "cuda"))(x)
    assert np.size(exported.platforms) == 2
