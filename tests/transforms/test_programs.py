"""Attention in programs: exported, compiled ahead, scanned; and JAX's settings."""

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

import jax_flash2
from jax_flash2 import Config, attention
from jax_flash2._operation import Operation
from tests.cases import BACKENDS, INTERPRETED, ON_GPU, Case, by_name
from tests.lowering import lower_for_gpu, string_attributes
from tests.tiers import MAINLY_XLA, deep, deeply
from tests.tolerances import OPERANDS, cotangents_for

KERNEL = "__gpu$xla.gpu.triton"  # the custom call of a kernel
FOR_HOPPER = "mosaic_gpu_v2"
PLAIN = Case("plain", lambda rng, case: {"is_causal": True}, n=4)
RICH = by_name("everything_learnt")  # every feature but lengths, masks and offsets
BIAS = by_name("bias_shared")  # summed over the batch, in loops of known length


def empty_rows(rng, case):
    """No keys for batch entry 0, and rows of padding."""
    lengths = {
        "query_seq_lengths": np.int32([40, 21]),
        "key_value_seq_lengths": np.int32([0, 33]),
    }
    return RICH.arguments(rng, case) | lengths


RICH_EMPTY = dataclasses.replace(RICH, name="rich_empty", arguments=empty_rows)


def program(case, dtype=jnp.float32, **options):
    """(arrays, learnt, cotangents) -> outputs, gradients; and arguments for it."""
    arrays, arguments = case.inputs(dtype)
    learnt = {k: jnp.asarray(arguments.pop(k)) for k in OPERANDS if k in arguments}
    fixed = {**arguments, **options, "return_residual": True}

    def run(arrays, learnt, cotangents):
        def call(arrays, learnt):
            return attention(*arrays, **learnt, **fixed)

        outputs, vjp = jax.vjp(call, arrays, learnt)
        return outputs, vjp(cotangents)

    return run, (arrays, learnt, cotangents_for(case, dtype))


@functools.cache
def results(case, backend):
    """What the program of a case gives, jitted and under no setting."""
    run, args = program(case, **BACKENDS[backend])
    return jax.jit(run)(*args)


def assert_same(a, b):
    """Equal but for float32's rounding, or TF32's on a GPU."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        y = np.asarray(y)
        size = np.max(np.abs(y), initial=1.0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=0, atol=(2e-2 if ON_GPU else 1e-5) * size)


def structs(args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


# jax.export.


def reloaded(exported, vjp_order=0):
    """An export after a way through bytes, if there is the package that JAX needs."""
    if importlib.util.find_spec("flatbuffers") is None:
        return exported
    data = bytes(exported.serialize(vjp_order))
    return export.deserialize(bytearray(data))


def test_export_for_every_platform():
    """One export of forward and gradients for CPU, GPU and TPU gives the same here."""
    run, args = program(RICH, **BACKENDS["xla"])
    platforms = ("cpu", "cuda", "tpu")
    exported = export.export(jax.jit(run), platforms=platforms)(*structs(args))
    exported = reloaded(exported)
    assert exported.platforms == platforms
    assert_same(exported.call(*args), results(RICH, "xla"))


def test_export_is_differentiable():
    """The gradient that an export carries, with lengths among the arguments."""
    (q, k, v), _ = PLAIN.inputs(jnp.float32)
    lengths = jnp.int32([40, 17])

    def call(q, k, v, lengths):
        return attention(q, k, v, key_value_seq_lengths=lengths, **BACKENDS["xla"])

    def gradients(call):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(call(q, k, v, lengths)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    exported = export.export(jax.jit(call))(*structs((q, k, v, lengths)))
    exported = reloaded(exported, vjp_order=1)
    assert_same(gradients(exported.call), gradients(call))
    assert len(exported.vjp().out_avals) == 4


@pytest.mark.parametrize("config", [Config(), *deeply(INTERPRETED)])
def test_export_with_a_symbolic_batch(config):
    """With a bias, a mask and functions of pairs, in calls of one block and several."""
    (batch,) = export.symbolic_shape("batch")
    bias, mask = jnp.zeros((1, 4, 40, 40)), jnp.ones((1, 4, 40, 40), bool)
    keys = jax.random.normal(jax.random.key(1), (2, 40))
    mods = {
        "score_mod": lambda s, b, h, q, kv: s * (h + 1) + keys[b, kv] + b,
        "mask_mod": lambda b, h, q, kv: (keys[b, kv] < 1) & (q >= kv),
    }
    q = jax.random.normal(jax.random.key(0), (3, 40, 4, 8))

    def call(q, bias):
        options = {"implementation": "xla", "return_residual": True, "config": config}
        more = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
        f = functools.partial(attention, mask=mask, **options, **more, **mods)
        outputs, vjp = jax.vjp(lambda q, bias: f(q, q, q, bias), q, bias)
        return outputs, vjp(outputs)

    shape = jax.ShapeDtypeStruct((batch, *q.shape[1:]), q.dtype)
    exported = export.export(jax.jit(call))(shape, bias)
    assert_same(exported.call(q, bias), jax.jit(call)(q, bias))


def export_for_gpu(run, args, **options):
    """`export` on a machine that need not have a GPU."""
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        exporter = export.export(jax.jit(run), platforms=("cuda",), **options)
        return exporter(*structs(args))


def test_export_of_kernels():
    """Kernels export if the caller says that their custom call may be: see JAX's docs.

    Without that word export refuses: XLA does not promise that it stays the same.
    """
    run, args = program(PLAIN, jnp.bfloat16, implementation="triton")
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        export_for_gpu(run, args)
    allowed = [export.DisabledSafetyCheck.custom_call(KERNEL)]
    exported = export_for_gpu(run, args, disabled_checks=allowed)
    again = reloaded(exported)
    assert again.platforms == ("cuda",)
    assert again.nr_devices == 1
    assert again.mlir_module() == exported.mlir_module()
    assert again.mlir_module().count(KERNEL) == 3  # forward, dq, dkv
    if not ON_GPU:
        with pytest.raises(ValueError, match=r"cuda.*cpu"):
            again.call(*args)


def test_a_loaded_export_is_lowered_already(monkeypatch):
    """A second process neither traces nor lowers: it has kernels of both kinds."""
    allowed = list(map(export.DisabledSafetyCheck.custom_call, (KERNEL, FOR_HOPPER)))
    run, args = program(PLAIN, jnp.bfloat16, implementation="mosaic_gpu")
    exported = export_for_gpu(run, args, disabled_checks=allowed)
    monkeypatch.setattr(Operation, "_whole", None)  # what a rule would call
    text = lower_for_gpu(reloaded(exported).call, *structs(args))
    for field in ("ir", "module"):
        kernels = string_attributes(exported.mlir_module(), field)
        is_same = string_attributes(text, field) == kernels
        assert kernels and is_same, field


# Compiled ahead of time, donated, scanned, rematerialised.


def test_compiled_ahead_of_time():
    """From shapes alone, with every array an argument: what closed-over arrays give."""
    (arrays, arguments), options = RICH.inputs(jnp.float32), BACKENDS["xla"]
    traced = {k: x for k, x in arguments.items() if hasattr(x, "shape")}
    fixed = {k: x for k, x in arguments.items() if k not in traced}

    def call(arrays, traced):
        return attention(*arrays, **traced, **fixed, **options, return_residual=True)

    args = (arrays, jax.tree.map(jnp.asarray, traced))
    shapes = structs(args)
    stages = jax.jit(call).trace(*shapes)
    assert_same(stages.lower().compile()(*args), results(RICH, "xla")[0])
    assert stages.out_info[0].shape == (2, 40, 4, 24)
    lowered = jax.jit(call).lower(*shapes)
    assert lowered.as_text() == stages.lower().as_text()
    with pytest.raises(TypeError, match="compiled"):
        lowered.compile()(arrays[:2], traced)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_donated_query(backend):
    """The output may take the query's memory, which is gone then."""
    (q, k, v), _ = PLAIN.inputs(jnp.float32)
    call = functools.partial(attention, is_causal=True, **BACKENDS[backend])
    expected = jax.jit(call)(q, k, v)
    out = jax.jit(call, donate_argnums=0)(q, k, v)
    assert_same(out, expected)
    assert q.is_deleted()
    assert not (k.is_deleted() or v.is_deleted())


def layers(wrap, loop, **options):
    """(weights of the layers, x) -> loss of a stack of causal layers."""

    def layer(x, weight):
        q = jnp.einsum("btnh,hi->btni", x, weight)
        return x + attention(q, x, x, is_causal=True, **options), None

    def scanned(weights, x):
        return jax.lax.scan(wrap(layer), x, weights)[0]

    def unrolled(weights, x):
        for weight in weights:
            x, _ = wrap(layer)(x, weight)
        return x

    stack = scanned if loop == "scan" else unrolled
    return lambda weights, x: jnp.sum(jnp.sin(stack(weights, x).astype(jnp.float32)))


NAMES = (jax_flash2.OUTPUT_NAME, jax_flash2.LSE_NAME)
SAVE = jax.checkpoint_policies.save_only_these_names(*NAMES)


def remat(policy):
    return functools.partial(jax.checkpoint, policy=policy)


@deep
@pytest.mark.parametrize("backend", BACKENDS)
def test_scan_over_layers(backend):
    """Scanned, with and without a checkpoint policy: as the loop written out."""
    (x, _, _), _ = by_name("plain").inputs(jnp.float32)
    weights = 0.3 * jax.random.normal(jax.random.key(0), (3, 16, 16))

    def gradients(wrap, loop):
        loss = layers(wrap, loop, **BACKENDS[backend])
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, x)

    expected = gradients(lambda f: f, "unrolled")
    assert_same(gradients(lambda f: f, "scan"), expected)
    assert_same(gradients(remat(SAVE), "scan"), expected)


def test_checkpoint_policy_in_a_scan():
    """The named residuals spare the second run of the forward kernel in scans too."""
    x = jax.ShapeDtypeStruct((2, 40, 2, 16), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((3, 16, 16), jnp.bfloat16)

    def kernels(policy):
        loss = layers(remat(policy), "scan", implementation="triton")
        return lower_for_gpu(jax.grad(loss), weights, x).count(KERNEL)

    assert kernels(SAVE) == 3
    assert kernels(jax.checkpoint_policies.nothing_saveable) == 4


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_tracing_needs_no_values(backend):
    """Every array may be abstract: shapes, offsets and the dropout key among them."""
    options = BACKENDS.get(backend, {"implementation": "reference"})
    b, t, s, n, k, h, d = 2, 40, 33, 4, 2, 16, 24

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    inputs = {
        "query": f32(b, t, n, h),
        "key": f32(b, s, k, h),
        "value": f32(b, s, k, d),
        "bias": f32(n, t, s),
        "alibi_slopes": f32(n),
        "sinks": f32(n),
    }
    others = {
        "mask": jax.ShapeDtypeStruct((1, 1, t, s), jnp.bool_),
        "query_seq_lengths": i32(b),
        "key_value_seq_lengths": i32(b),
        "query_segment_ids": i32(b, t),
        "key_value_segment_ids": i32(b, s),
        "query_offset": i32(b),
        "dropout_rng": jax.eval_shape(lambda: jax.random.key(0)),
    }
    fixed = {"is_causal": True, "local_window_size": 9, "logits_soft_cap": 5.0}

    def call(inputs, others):
        made = {**inputs, **others, **fixed, **options}
        return attention(**made, dropout_rate=0.1, return_residual=True)

    def loss(inputs, others):
        return sum(map(jnp.sum, call(inputs, others)))

    out, lse = jax.eval_shape(call, inputs, others)
    assert (out.shape, out.dtype) == ((b, t, n, d), jnp.float32)
    assert (lse.shape, lse.dtype) == ((b, t, n), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(inputs, others)
    assert len(jaxpr.in_avals) == len(inputs) + len(others)
    assert [x.shape for x in jaxpr.out_avals] == [
        inputs[name].shape for name in sorted(inputs)
    ]


# JAX's settings.

SETTINGS = {
    "rank": lambda: jax.numpy_rank_promotion("raise"),
    "dtype": lambda: jax.numpy_dtype_promotion("strict"),
    "leaks": jax.check_tracer_leaks,
}


def lowered(case, target):
    """The module of outputs and gradients, on a backend or with compiled kernels.

    In bfloat16, so that dtypes meet.
    """
    options = {"implementation": "triton"} if target == "gpu" else BACKENDS[target]
    run, args = program(case, jnp.bfloat16, **options)
    if target == "gpu":
        return lower_for_gpu(run, *args)
    return jax.jit(run).lower(*args).as_text()


plainly_lowered = functools.cache(lowered)


@pytest.mark.parametrize(
    ("target", "setting"),
    [
        *(("xla", name) for name in SETTINGS),
        ("gpu", "dtype"),
        *deeply(*(("gpu", name) for name in SETTINGS if name != "dtype")),
        *deeply(*(("triton", name) for name in SETTINGS)),
    ],
)
def test_settings_that_watch_tracing(target, setting):
    """The user's rules are for the user's code: attention lowers to the same module."""
    with SETTINGS[setting]():
        text = lowered(RICH_EMPTY, target)
    assert _functions(text) == _functions(plainly_lowered(RICH_EMPTY, target))


def _functions(text: str) -> set[str]:
    """Of a module, without numbers: JAX's caches say which helpers are there twice."""
    unnumbered = re.sub(r"(@\w+?)_\d+\b", r"\1", text).rstrip().removesuffix("}")
    return {x.strip() for x in unnumbered.split("func.func private")}


@pytest.mark.parametrize(
    ("backend", "case"),
    [("xla", RICH), *deeply(("xla", BIAS), ("triton", BIAS))],
    ids=lambda x: getattr(x, "name", x),
)
def test_x64(backend, case):
    """Under x64 float32 inputs give the same float32 results."""
    run, args = program(case, **BACKENDS[backend])
    with jax.enable_x64(True):
        actual = jax.jit(run)(*args)
    assert_same(actual, results(case, backend))


@pytest.mark.parametrize("case", [RICH, *deeply(BIAS)], ids=lambda case: case.name)
def test_x64_compiled_kernels(case):
    """Under x64 the kernels lower for a GPU, with no number of 64 bits among theirs."""
    with jax.enable_x64(True):
        text = lowered(case, "gpu")
    calls = [x.split(" : ")[-1] for x in text.splitlines() if KERNEL in x]
    assert len(calls) == 3 + case.has("bias") + case.has("alibi_slopes")
    assert not any("i64" in types or "f64" in types for types in calls)


@pytest.mark.parametrize("backend", MAINLY_XLA)
def test_debug_nans(backend):
    """Rows without keys and padding make no NaN, which `debug_nans` would raise on."""
    run, args = program(RICH_EMPTY, **BACKENDS[backend])
    with jax.debug_nans(True):
        (out, lse), gradients = jax.jit(run)(*args)
    assert not np.any(out[0])
    assert np.all(np.isneginf(lse[0]))
    assert not np.any(out[1, 21:])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradients))
    assert np.any(gradients[0][2][1, :33])
    assert not np.any(gradients[0][2][1, 33:])


_PROGRAM = """
import hashlib, jax, jax.numpy as jnp
from jax_flash2 import attention
from tests.lowering import lower_for_gpu

def run(q, k, v):
    out, vjp = jax.vjp(lambda *x: attention(*x, implementation="mosaic_gpu"), q, k, v)
    return out, vjp(out)

rows = jax.ShapeDtypeStruct((2, 2048, 16, 128), jnp.bfloat16)
print(hashlib.sha256(lower_for_gpu(run, rows, rows, rows).encode()).hexdigest())
"""


@deep
def test_processes_lower_to_the_same_bytes():
    """So a persistent compilation cache finds in one what another one put there."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "12"
    ]
    found = [run.communicate()[0] for run in runs]
    assert found[0] == found[1] != ""
