"""Quantised keys and values beside queries that are not, on every backend."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash2 import Context, attention, explain, quantize_kv
from tests import tolerances
from tests.cases import ON_GPU
from tests.lowering import kernel_modules, lower_for_gpu
from tests.paged import E4M3, E5M2, INT8, only
from tests.tiers import deep

B, N, K = 2, 4, 2
KINDS = pytest.mark.parametrize("kind", [INT8, E4M3, E5M2], ids=lambda x: x.__name__)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call, with a scale of keys and one of values by the letters of their axes.

    Attributes:
      kinds: dtypes of keys and of values; None for that of the query.
      more: other arguments. Keys that these drop for all queries hold anything.
    """

    name: str
    kinds: tuple[Any, Any]
    scales: tuple[str, str] = ("BSK", "BS1")
    dtype: Any = jnp.float32
    t: int = 3
    s: int = 45
    h: int = 16
    more: tuple[tuple[str, Any], ...] = ()


def _mask(t: int, s: int) -> np.ndarray:
    """Which drops pairs, and some keys for all queries."""
    mask = np.random.default_rng(1).random((t, s)) < 0.6
    return mask & (np.arange(s) % 7 != 2)


LENGTHS = ("key_value_seq_lengths", np.int32([45, 30]))
PROBLEMS = [
    Problem(
        "lengths_and_starts",
        (INT8, INT8),
        dtype=jnp.bfloat16,
        h=32,
        more=(LENGTHS, ("key_value_seq_starts", np.int32([3, 17]))),
    ),
    Problem(
        "masked_keys",
        (E5M2, INT8),
        ("BS1", "BSK"),
        t=70,
        more=(("mask", _mask(70, 45)), ("logits_soft_cap", 3.0)),
    ),
    Problem("keys_alone", (E4M3, None), ("K", ""), more=(("is_causal", True),)),
    Problem("values_alone", (None, E5M2), ("", "BK"), jnp.float16, more=(LENGTHS,)),
    Problem("heads", (E4M3, E4M3), ("BK", ""), more=(("sinks", np.ones(N)),)),
]


class Made:
    """The arguments of a problem, and what they stand for."""

    def __init__(self, problem: Problem):
        self.problem, rng = problem, np.random.default_rng(0)
        self.more = dict(problem.more)
        self.read = np.ones((B, problem.s), bool)
        numbers = np.arange(problem.s)
        if "key_value_seq_lengths" in self.more:
            self.read &= numbers < self.more["key_value_seq_lengths"][:, None]
        if "key_value_seq_starts" in self.more:
            self.read &= numbers >= self.more["key_value_seq_starts"][:, None]
        if "mask" in self.more:
            self.read &= self.more["mask"].any(0)
        query = rng.standard_normal((B, problem.t, N, problem.h))
        self.query = jnp.asarray(query, problem.dtype)
        self.arguments: dict[str, Any] = {"query": self.query, **self.more}
        self.exact = [self.query, *(self._operand(rng, i) for i in (0, 1))]

    def _operand(self, rng, side: int) -> np.ndarray:
        """The numbers of keys or values; 0 where no query reads them."""
        x, name = self.problem, ("key", "value")[side]
        kind, shape = x.kinds[side], (B, x.s, K, x.h)
        read = self.read[..., None, None]
        codes = rng.standard_normal(shape) * (40 if kind == INT8 else 1)
        codes = jnp.asarray(np.rint(codes) if kind == INT8 else codes, jnp.float32)
        codes = codes.astype(x.dtype if kind is None else kind)
        anything = jnp.asarray(-128 if kind == INT8 else np.nan, codes.dtype)
        self.arguments[name] = jnp.where(read, codes, anything)
        wide = np.where(read, np.asarray(codes, np.float64), 0.0)
        if kind is None:
            return wide
        sizes = {"B": B, "S": x.s, "K": K, "1": 1}
        scale = rng.uniform(0.5, 2.0, [sizes[a] for a in x.scales[side]])
        scale = np.float32(scale / 40 if kind == INT8 else scale)
        of_rows = "S" in x.scales[side]
        if not of_rows and scale.ndim == 2:
            wide = wide * scale[:, None, :, None]
        else:
            wide = wide * scale[..., None]
        if of_rows:
            scale = np.where(self.read[..., None], scale, np.nan)
        self.arguments[f"{name}_scale"] = jnp.asarray(scale)
        return wide

    def check(self, out, lse) -> None:
        """Asserts the error rule."""
        rows = self.query.shape[:3]
        cotangents = np.zeros((*rows, self.problem.h)), np.zeros(rows)
        found = []
        for of in (tolerances.exact, tolerances.plain):
            results = of(self.exact, cotangents, self.more)
            kept = {n: x for n, x in results.items() if n.split()[0] in ("out", "lse")}
            found.append(kept)
        actual = {"out": np.float64(out), "lse": np.float64(lse)}
        unit = tolerances.unit_roundoff(self.problem.dtype)
        tolerances.check(actual, *found, unit)


def _runs():
    first = {"xla": range(5), "triton": range(2), "reference": range(1, 2)}
    for backend, numbers in first.items():
        for i, problem in enumerate(PROBLEMS):
            marks = [] if ON_GPU or i in numbers else [deep]
            label = f"{problem.name}-{backend}"
            yield pytest.param(problem, backend, id=label, marks=marks)


@pytest.mark.parametrize(("problem", "backend"), [*_runs()])
def test_scales_are_of_keys_and_values(problem, backend):
    made = Made(problem)
    given = made.arguments
    data = {n: x for n, x in given.items() if isinstance(x, jax.Array | np.ndarray)}
    static = {n: x for n, x in given.items() if n not in data}
    options = {**static, **only(backend), "return_residual": True}
    out, lse = jax.jit(functools.partial(attention, **options))(**data)
    assert out.dtype == problem.dtype and lse.dtype == jnp.float32
    made.check(out, lse)


@KINDS
def test_of_every_code(kind):
    """One key for each of the 256 codes, whose value is it."""
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), kind)
    numbers = np.asarray(codes).astype(np.float32)
    is_finite = np.isfinite(numbers)
    out = attention(
        jnp.zeros((256, 1)),
        jnp.zeros((256, 1), kind),
        codes[:, None],
        mask=jnp.asarray(np.eye(256, dtype=bool) & is_finite),
        key_scale=1.0,
        value_scale=jnp.full(256, 0.5),
        implementation="xla",
    )
    expected = np.where(is_finite, numbers, 0.0) / 2
    np.testing.assert_array_equal(out[:, 0], expected)


def _operands(kind=INT8):
    made = Made(Problem("plain", (kind, kind), ("BSK", "BSK"), t=40, s=40))
    return made.arguments


NAMES = ("query", "key", "value", "key_scale", "value_scale")


def of_arrays(*arrays, **options):
    return attention(**dict(zip(NAMES, arrays, strict=True)), **options)


def test_maps():
    """`vmap` over an axis that lies anywhere."""
    call = functools.partial(of_arrays, is_causal=True, implementation="xla")
    arrays = [_operands()[name] for name in NAMES]
    last = [jnp.moveaxis(x, 0, -1) for x in arrays]
    mapped = jax.vmap(call, in_axes=-1)(*last)
    np.testing.assert_allclose(mapped, call(*arrays), atol=1e-6)


@pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")
def test_meshes():
    """Batch and heads over devices."""
    call = functools.partial(of_arrays, is_causal=True, implementation="xla")
    arrays = [_operands()[name] for name in NAMES]
    plain = call(*arrays)
    mesh = jax.make_mesh((2, 2), ("b", "n"), devices=jax.devices()[:4])
    placed = NamedSharding(mesh, PartitionSpec("b", None, "n"))
    divided = jax.jit(call)(*(jax.device_put(x, placed) for x in arrays))
    np.testing.assert_allclose(divided, plain, atol=1e-6)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("is_explicit", [False, True], ids=["context", "mesh"])
def test_rows_are_not_divided_over_devices(is_explicit):
    kinds = (AxisType.Explicit if is_explicit else AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), kinds, devices=jax.devices()[:2])
    rows = PartitionSpec(None, "x")
    arrays, call = [_operands()[name] for name in NAMES], of_arrays
    if is_explicit:
        arrays = [jax.device_put(x, NamedSharding(mesh, rows)) for x in arrays]
    else:
        call = functools.partial(of_arrays, context=Context("x"))
        call = jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows)
    text = "(context must be None|rows must not be divided) .* quantised operands"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=text):
        call(*arrays)


def test_what_quantize_kv_gives_is_near():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((B, 50, K, 16))) for _ in range(3))
    exact = attention(q, k, v, implementation="xla")
    for axes in (-1, (-2, -1)):
        (k8, of_key), (v8, of_value) = (quantize_kv(x, INT8, axes) for x in (k, v))
        scales = {"key_scale": of_key, "value_scale": of_value}
        out = attention(q, k8, v8, **scales, implementation="xla")
        np.testing.assert_allclose(out, exact, atol=0.02)


@pytest.mark.parametrize("argument", ["query", "key", "value_scale", "bias"])
def test_derivatives_are_refused(argument):
    given = _operands(E4M3) | {"bias": jnp.zeros((40, 40))}

    def loss(x):
        return jnp.sum(attention(**{**given, argument: x}))

    for derive in (jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(TypeError, match=r"quantised operands\) has no derivatives"):
            derive(given[argument])
    stopped = jax.grad(lambda x: loss(jax.lax.stop_gradient(x)))(given[argument])
    assert not np.any(stopped.astype(jnp.float32))


def test_kernels_lower_for_gpus():
    """Elements of one byte in pairs; Hopper's kernels leave the call to Triton."""
    given = {
        "query": jax.ShapeDtypeStruct((8, 1, 32, 128), jnp.bfloat16),
        **dict.fromkeys(
            ["key", "value"], jax.ShapeDtypeStruct((8, 4096, 8, 128), INT8)
        ),
        **dict.fromkeys(
            ["key_scale", "value_scale"],
            jax.ShapeDtypeStruct((8, 4096, 8), jnp.float32),
        ),
    }

    def call(given):
        texts.append(explain(**given))
        return attention(**given)

    texts: list[str] = []
    program = lower_for_gpu(call, given, device="NVIDIA H100 80GB HBM3")
    assert "x64x!tt.ptr<i16>>" in kernel_modules(program)["flash2_forward"]
    assert texts[0].startswith("implementation: triton")
    assert "mosaic_gpu: its kernels read no quantised keys" in texts[0]
