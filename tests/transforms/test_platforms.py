"""Where a program runs is known when it is lowered, and decides what it is made of."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

from jax_flash2 import attention
from pallas_kernels import device
from tests.cases import ON_GPU
from tests.tiers import deep, deeply

KERNELS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
X = jax.random.normal(jax.random.key(0), (2, 40, 4, 16))


def with_gradients(x, **options):
    call = functools.partial(attention, is_causal=True, **options)
    out, vjp = jax.vjp(call, x, x, x)
    return out, *vjp(jnp.cos(out))


def assert_same(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.fixture
def said_to_be_a_gpu(monkeypatch):
    """The CPU of a machine whose default backend is a GPU."""
    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "_here", lambda: None)
    jax.clear_caches()
    yield
    jax.clear_caches()


WAYS = {
    "eager": with_gradients,
    "jit": jax.jit(with_gradients),
    "vmap": lambda x: jax.vmap(with_gradients, 1, 1)(x),
    "hessian": lambda x: jax.jit(jax.jacfwd(jax.grad(_loss)))(x[0, :3, :1, :2]),
}


def _loss(x):
    return jnp.sum(jnp.sin(attention(x, x, x)))


needs_cpu = pytest.mark.skipif(ON_GPU, reason="arrays lie on the GPU")


@needs_cpu
@pytest.mark.parametrize("way", ["eager", "jit", *deeply("vmap", "hessian")])
def test_arrays_of_a_cpu_on_a_machine_with_a_gpu(said_to_be_a_gpu, way, monkeypatch):
    found = WAYS[way](X)
    monkeypatch.undo()
    jax.clear_caches()
    assert_same(found, WAYS[way](X))


@deep
@needs_cpu
def test_without_jit(said_to_be_a_gpu, monkeypatch):
    with jax.disable_jit():
        found = with_gradients(X[:1, :8])
    monkeypatch.undo()
    assert_same(found, with_gradients(X[:1, :8]))


@needs_cpu
@pytest.mark.parametrize("name", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_a_named_backend_is_refused_in_our_words(said_to_be_a_gpu, name, jit):
    x = X.astype(jnp.bfloat16)
    call = functools.partial(attention, implementation=name)
    with pytest.raises(ValueError, match=rf"'{name}': .* NVIDIA GPUs, not on 'cpu'"):
        jit(call)(x, x, x)


@needs_cpu
def test_no_word_of_slowness_where_no_kernel_could_run():
    """A platform by default is the user's: nothing is slower there than it need be."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jax.default_device("cpu"):
            attention(X, X, X)


@pytest.mark.parametrize("given", ["cpu", "device"])
def test_the_default_device_says_where(monkeypatch, given):
    (cpu, *_) = jax.devices("cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.default_device("cpu" if given == "cpu" else cpu):
        assert device.platform() == "cpu"
        gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
        with jax.sharding.use_abstract_mesh(
            AbstractMesh((1,), ("x",), abstract_device=gpu)
        ):
            assert device.platform() == "cuda"
    with device.lowering_for("cpu"):
        assert device.target() == "cpu"


@needs_cpu
def test_committed_arrays_say_where_without_jit():
    (cpu, *_) = jax.devices("cpu")
    committed = jax.device_put(X, cpu)
    with jax.default_device("gpu"):
        assert device.platform_of([committed, np.zeros(3)]) == "cpu"
        assert device.platform_of([X, np.zeros(3)]) == "cuda"
    assert device.platform_of([X]) == "cpu"


@pytest.mark.parametrize("dtype", [jnp.float32, *deeply(jnp.bfloat16)])
def test_export_for_two_platforms_has_what_is_best_for_each(dtype):
    """Kernels for the GPU, plain JAX for the CPU, in one program."""
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
    x = X.astype(dtype)
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(
            jax.jit(with_gradients),
            platforms=("cpu", "cuda"),
            disabled_checks=list(map(export.DisabledSafetyCheck.custom_call, KERNELS)),
        )(jax.ShapeDtypeStruct(x.shape, dtype))
    assert any(name in exported.mlir_module() for name in KERNELS)
    expected = jax.jit(with_gradients)(x)
    for a, e in zip(exported.call(x), expected, strict=True):
        tolerance = 1e-5 if dtype == jnp.float32 else 0.05
        np.testing.assert_allclose(
            *(np.asarray(y, np.float32) for y in (a, e)), rtol=0, atol=tolerance
        )


def test_export_for_two_platforms_of_a_named_backend_is_refused():
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
    run = jax.jit(functools.partial(with_gradients, implementation="triton"))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(ValueError, match=r"'triton': .* not on 'cpu'"),
    ):
        export.export(run, platforms=("cpu", "cuda"))(X)


def test_plain_jax_is_lowered_for_its_platform():
    """A CPU's products take float32, a GPU's what the caller has."""
    x = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.bfloat16)
    call = jax.jit(functools.partial(attention, implementation="xla"))
    for platform, operand in (("cpu", "f32"), ("cuda", "bf16")):
        text = call.trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()
        products = [y for y in text.splitlines() if "stablehlo.dot_general" in y]
        assert products
        assert all(f"x{operand}>, tensor" in y for y in products)
