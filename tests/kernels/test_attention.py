"""Every case on every backend, forward and backward, by the one error rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, _chunked, attention
from pallas_kernels.core import flash2
from tests import tolerances
from tests.cases import BACKENDS, ON_GPU, Case, by_name
from tests.kernels.runners import ALIKE, ALL, DTYPES, RUNNERS
from tests.tiers import MAINLY_XLA, deeply
from tests.tolerances import cotangents_for


def _problems():
    """All cases, in all dtypes where kernels are compiled; elsewhere in turns."""
    for number, case in enumerate(ALL):
        for name, runner in RUNNERS.items():
            for dtype, deep_too in runner.problems(case, number):
                label = f"{case.name}-{dtype}-{name}"
                yield runner.param(case, dtype, id=label, deep_too=deep_too)


@pytest.mark.parametrize(
    ("case", "dtype", "runner"), list(_problems()), indirect=["runner"]
)
def test_error_rule(case, dtype, runner, record_property):
    runner.check(runner.shaped(case), dtype, record_property)


@pytest.mark.parametrize("backend", ["xla_blocks", *deeply(*BACKENDS)])
@pytest.mark.parametrize("rows", [{"s": 4096}, {"t": 4096}], ids=["keys", "queries"])
def test_long_sums_are_in_float32(backend, rows, record_property):
    """Of 4,096 terms, where a sum in bfloat16 would lose most; see `test_sums`."""
    case = Case("long", **{"t": 8, "s": 8, "batch": (1,), "n": 1, "k": 1, **rows})
    check_error_rule(case, "bfloat16", [backend], record_property)


def check_error_rule(case, dtype, backends, record_property, **more):
    for runner in map(RUNNERS.get, backends):
        runner.check(runner.shaped(case), dtype, record_property, **more)


@pytest.mark.parametrize("rows", [32, 1024], ids=["loop", "one_block"])
@pytest.mark.parametrize("name", ["mqa", "dropout", *deeply("alibi_alone")])
def test_whole_rows_as_gpus_get_them(name, rows, monkeypatch, record_property):
    """Of the xla backend, which leaves a softmax that is whole to XLA there."""
    monkeypatch.setattr(_chunked, "_on_cpu", lambda: False)
    asked = []
    whole = flash2.of_whole_rows
    monkeypatch.setattr(
        flash2, "of_whole_rows", lambda *x: asked.append(x) or whole(*x)
    )
    blocks = Blocks(rows, 1024, num_warps=4, num_stages=1)
    more = {"config": Config(forward=blocks, dkv=blocks)}
    check_error_rule(by_name(name), "float32", ["xla"], record_property, **more)
    assert asked


@pytest.mark.parametrize("name", ["gqa", *deeply("causal", "head_1_3")])
def test_highest_precision_is_float32(name, record_property):
    more = {"precision": "highest"}
    check_error_rule(by_name(name), "float32", BACKENDS, record_property, **more)


HELD = ("plain", "causal_more_keys", "gqa", "head_40", "head_192_128", "everything")


@pytest.mark.skipif(not ON_GPU, reason="registers are a GPU's")
@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HELD)
def test_blocks_held_in_registers(name, dtype, held, record_property):
    case = by_name(name)
    small = 16 if max(case.h, case.d) > 128 or dtype == "float32" else 64
    rows, keys = (
        Blocks(64, small, 4, 2, left_in_registers=held),
        Blocks(small, 64, 4, 2, left_in_registers=held),
    )
    config = Config(forward=rows, dq=rows, dkv=keys, dk=keys, dv=keys)
    check_error_rule(case, dtype, ["triton"], record_property, config=config)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize(("t", "s"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows(backend, t, s):
    """Without keys the output is 0 and lse -inf; gradients are 0."""
    options = BACKENDS.get(backend, {"implementation": "reference"})
    q = jnp.ones((2, t, 4, 8))
    k = jnp.ones((2, s, 2, 8))

    def call(q, k, v):
        return attention(q, k, v, return_residual=True, **options)

    (out, lse), vjp = jax.vjp(call, q, k, k)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]
    assert not np.any(out)
    assert np.all(np.isneginf(lse))
    for gradient, x in zip(vjp((out, lse)), (q, k, k), strict=True):
        assert gradient.shape == x.shape
        assert not np.any(gradient)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_zero_heads_and_batch(backend):
    options = BACKENDS.get(backend, {"implementation": "reference"})
    assert attention(*[jnp.ones((2, 3, 0, 8))] * 3, **options).shape == (2, 3, 0, 8)
    assert attention(*[jnp.ones((0, 3, 2, 8))] * 3, **options).shape == (0, 3, 2, 8)


@pytest.mark.parametrize("backend", [*MAINLY_XLA, *deeply("reference")])
def test_fully_masked_rows(backend):
    """Rows without keys: output 0, lse -inf, gradients 0, whatever the cotangents."""
    options = BACKENDS.get(backend, {"implementation": "reference"})
    arrays, _ = by_name("plain").inputs(jnp.float32)
    mask = np.ones((40, 40), bool)
    mask[[0, 17, 18, 39]] = False

    def call(q, k, v):
        return attention(q, k, v, mask=mask, return_residual=True, **options)

    (out, lse), vjp = jax.vjp(call, *arrays)
    rows = ~mask.any(axis=1)
    assert not np.any(out[:, rows])
    assert np.all(np.isneginf(lse[:, rows]))
    # Of a log-sum-exp of -inf a loss may well make NaN.
    dlse = jnp.where(jnp.isneginf(lse), jnp.nan, 1.0)
    gradients = vjp((jnp.ones_like(out), dlse))
    assert not np.any(gradients[0][:, rows])
    assert all(np.all(np.isfinite(g)) for g in gradients)


def _paddings():
    """(poison, whether documents are packed, dtype, runner), but by threads."""
    packed = (False, True) if ON_GPU else (False,)
    for name, runner in RUNNERS.items():
        dtypes = (*runner.dtypes, *runner.other_dtypes) if ON_GPU else runner.dtypes[:1]
        poisons = () if runner.by_threads else (np.nan, np.inf, -np.inf)
        for problem in itertools.product(poisons, packed, dtypes):
            label = "-".join((*map(str, problem), name))
            deep_too = runner.one_of_each and not np.isnan(problem[0])
            yield runner.param(*problem, id=label, deep_too=deep_too)


@pytest.mark.parametrize(
    ("poison", "packed", "dtype", "runner"), list(_paddings()), indirect=["runner"]
)
def test_padding_never_comes_through(poison, packed, dtype, runner):
    """What lies beyond the lengths changes no bit of any result."""
    case = runner.shaped(by_name("lengths_causal"))
    q_lengths = np.int32(case.t * np.array([1, 0.53, 0.4, 0]))
    kv_lengths = np.int32(case.s * np.array([0.43, 1, 0, 0.8]))
    dtype = jnp.dtype(dtype)
    arrays, _ = case.inputs(dtype)
    cotangents = tolerances.cotangents_for(case, dtype)
    arguments = {
        "query_seq_lengths": q_lengths,
        "key_value_seq_lengths": kv_lengths,
        "is_causal": True,
    }
    if packed:
        arguments |= by_name("segments").arguments(np.random.default_rng(0), case)

    def poisoned(x, lengths):
        rows = np.arange(x.shape[1])[None, :] >= lengths[:, None]
        return jnp.where(rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), poison, x)

    clean = runner.evaluate(arrays, cotangents, arguments)
    q, k, v = arrays
    arrays = poisoned(q, q_lengths), poisoned(k, kv_lengths), poisoned(v, kv_lengths)
    cotangents = tuple(poisoned(x, q_lengths) for x in cotangents)
    check_same_bits(clean, runner.evaluate(arrays, cotangents, arguments))


def check_same_bits(clean, dirty, about=""):
    """And that all are finite, but for log-sum-exps of rows without keys."""
    assert "query" in clean
    for name, a in clean.items():
        np.testing.assert_array_equal(a, dirty[name], err_msg=f"{name} {about}")
        assert name == "lse" or np.all(np.isfinite(a)), name


DROPPING = {
    "keys": (("b", "s"), {"bias": ("s",)}),
    "rows": (("b", "t", "s"), {"bias": ("n", "t", "s"), "is_causal": True}),
    "heads": (("b", "n", "t", "s"), {"logits_soft_cap": 3.0}),
    "entries": (("b",), {}),
}


def _masked():
    """(name, runner), but by threads: `tests.mosaic_gpu.test_interpreted` has those."""
    for label, runner in RUNNERS.items():
        for name in () if runner.by_threads else DROPPING:
            deep_too = name in ("rows", "heads") or label in ALIKE
            deep_too |= name == "entries" and runner.one_of_each
            yield runner.param(name, id=f"{name}-{label}", deep_too=deep_too)


@pytest.mark.parametrize(("name", "runner"), list(_masked()), indirect=["runner"])
def test_masked_keys_never_come_through(name, runner):
    """Those that a mask drops for all queries of a batch entry, whatever they hold."""
    axes, arguments = DROPPING[name]
    # Few keys are one block; of more, a batch entry drops a block, another two keys.
    # With many queries, keys that a mask of pairs drops are zeros before the kernels.
    t, s = {"heads": (20, 5), "rows": (80, 40)}.get(name, (20, 40))
    case = Case("", batch=(3,), n=4, k=2, t=t, s=s)
    case = runner.shaped(case)
    dtype = jnp.dtype(runner.dtypes[0])
    size = {"b": 3, "n": case.n, "t": case.t, "s": case.s}
    rng = np.random.default_rng(0)

    def shape(axes):
        return tuple(size[a] if a in axes else 1 for a in size)

    dropped = np.zeros((3, size["s"]), bool)
    dropped[0] = True
    if "s" in axes:
        dropped[1, [0, 3]] = dropped[2, size["s"] // 2 :] = True
    mask = ~dropped[:, None, None, :1] if "s" not in axes else ~dropped[:, None, None]
    if "t" in axes:
        mask = mask & (rng.random(shape(axes)) < 0.8)
    (q, k, v), _ = case.inputs(dtype)
    cotangents = cotangents_for(case, dtype)
    arguments = {**arguments, "mask": mask}
    if "bias" in arguments:
        bias = rng.standard_normal(shape(arguments["bias"]))
        arguments["bias"] = bias.astype(np.float32)
    clean = runner.evaluate((q, k, v), cotangents, arguments)
    poisons = (np.nan, np.inf, float(jnp.finfo(dtype).max))
    for poison in poisons:
        dirty = (jnp.where(dropped[..., None, None], poison, x) for x in (k, v))
        found = runner.evaluate((q, *dirty), cotangents, arguments)
        check_same_bits(clean, found, poison)


@pytest.mark.parametrize("backend", MAINLY_XLA)
@pytest.mark.parametrize("change", ["nan", *deeply("other numbers", "inf")])
def test_segments_do_not_touch_each_other(backend, change, small_blocks):
    """Other numbers change no bit of another segment; nor does NaN, a block away."""
    t = 512 if backend == "xla" or ON_GPU else 64
    border = t // 2 if change != "other numbers" else t // 2 - 5
    case = Case("", t=t, s=t, n=4, k=2)
    (q, k, v), _ = case.inputs(jnp.float32)
    cotangents = cotangents_for(case, jnp.float32)
    ids = np.broadcast_to((np.arange(t) >= border) * 7, (2, t)).astype(np.int32)
    arguments = {
        "query_segment_ids": ids,
        "sinks": np.ones(4, np.float32),
        "is_causal": True,
        "dropout_rate": 0.2,
        "dropout_rng": jax.random.key(0),
        **BACKENDS[backend],
    }

    def changed(x):
        new = {"other numbers": -2 * x, "nan": jnp.nan * x, "inf": jnp.inf * x}[change]
        return jnp.where((ids == 7).reshape(*ids.shape, *[1] * (x.ndim - 2)), new, x)

    before = tolerances.evaluate((q, k, v), cotangents, arguments)
    arrays, cotangents = jax.tree.map(changed, ((q, k, v), cotangents))
    after = tolerances.evaluate(arrays, cotangents, arguments)
    for name in ("out", "lse", "query", "key", "value"):
        here = slice(None), slice(0, border)
        np.testing.assert_array_equal(before[name][here], after[name][here], name)
        assert not np.array_equal(before[name], after[name])


@pytest.mark.parametrize("name", ["everything_learnt", *deeply("lengths_causal")])
def test_float64(name):
    """Under x64 the xla backend takes and gives float64."""
    case = by_name(name)
    arrays, arguments = case.inputs(jnp.float32)
    cotangents = cotangents_for(case, jnp.float32)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (arrays, cotangents))
        options = {**arguments, "implementation": "xla"}
        assert attention(*wide[0], **options).dtype == jnp.float64
        actual = tolerances.evaluate(*wide, options)
        with pytest.raises(ValueError, match="float64 is not bfloat16"):
            attention(*wide[0], implementation="triton", config=Config(interpret=True))
    exact = tolerances.exact(arrays, cotangents, arguments)
    for result, x in actual.items():
        scale = 1e-13 if result not in tolerances.OPERANDS else 1e-6  # float32 ones
        np.testing.assert_allclose(x, exact[result], rtol=scale, atol=20 * scale)


def test_bias_gradient_takes_the_memory_of_the_bias(small_blocks):
    """Not that of every batch entry's own: [1, N, T, S], not [B, N, T, S]."""
    batch, n, t, h = 32, 1, 1024, 4
    x = jax.ShapeDtypeStruct((batch, t, n, h), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, n, t, t), jnp.float32)

    def loss(q, k, v, bias):
        return jnp.sum(attention(q, k, v, bias, implementation="xla"))

    compiled = jax.jit(jax.grad(loss, 3)).lower(x, x, x, bias).compile()
    every = 4 * batch * n * t * t
    assert compiled.memory_analysis().temp_size_in_bytes < every / 4


@pytest.mark.parametrize("backend", [*MAINLY_XLA, *deeply("reference")])
def test_bias_of_minus_infinity_masks(backend):
    options = BACKENDS.get(backend, {"implementation": "reference"})
    arrays, _ = by_name("plain").inputs(jnp.float32)
    mask = np.random.default_rng(0).random((40, 40)) < 0.6
    mask[[0, 17, 39]] = False
    bias = jnp.where(mask, 0.0, -jnp.inf)

    def call(q, k, v, **arguments):
        return attention(q, k, v, return_residual=True, **arguments, **options)

    results = []
    for arguments in ({"bias": bias}, {"mask": mask}):
        outputs, vjp = jax.vjp(functools.partial(call, **arguments), *arrays)
        results.append((*outputs, *vjp(jax.tree.map(jnp.ones_like, outputs))))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 if ON_GPU else 1e-5)
        assert not np.any(np.isnan(a))


def _deterministic():
    """But in the interpreter of threads, which would only repeat its order."""
    for name, runner in RUNNERS.items():
        if name in BACKENDS or (name.startswith("mosaic_gpu") and ON_GPU):
            yield runner.param(id=name, deep_too=runner.one_of_each)


@pytest.mark.parametrize("runner", list(_deterministic()), indirect=True)
def test_same_inputs_same_bits(runner):
    case = runner.shaped(by_name("everything_learnt" if ON_GPU else "bias_keys"))
    dtype = runner.dtypes[0]
    arrays, arguments = case.inputs(dtype)
    cotangents = cotangents_for(case, dtype)
    first = runner.evaluate(arrays, cotangents, arguments)
    for _ in range(3 if ON_GPU else 1):
        jax.clear_caches()  # compiled anew
        again = runner.evaluate(arrays, cotangents, arguments)
        for name, a in first.items():
            np.testing.assert_array_equal(a, again[name], err_msg=name)
