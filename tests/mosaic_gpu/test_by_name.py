"""Mosaic GPU kernels that run only by name: what they take, and what they become.

That they compute what others do is tested in `tests/kernels`, in JAX's interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash2 import Blocks, Config, attention, explain
from pallas_kernels.core.axes import Named
from pallas_kernels.mosaic_gpu import ampere, blackwell, by_name
from pallas_kernels.mosaic_gpu.ampere.heads import RowHeads
from tests import mosaic_interpreter, ptxas, tolerances
from tests.cases import Case
from tests.kernels.runners import RUNNERS
from tests.lowering import described_as_here, lower_for_gpu, on_gpu, string_attributes
from tests.tiers import deeply

# The architecture, and a compute capability of it, times ten.
GPUS = {"ampere": 80, "ampere_tma": 120, "blackwell": 100}
OTHERS = {"ampere": 100, "blackwell": 120}
Q = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)
K = jax.ShapeDtypeStruct((2, 300, 2, 64), jnp.bfloat16)

from_jax_0_12 = pytest.mark.skipif(
    jax.__version_info__ < by_name.FIRST_JAX, reason="JAX lacks what they are made of"
)


def named(architecture: str) -> str:
    return f"mosaic_gpu_{architecture.removesuffix('_tma')}"


def explained(architecture: str, capability: int, q=Q, k=K, **arguments) -> list[str]:
    with described_as_here(capability) as gpu, on_gpu(gpu):
        name = named(architecture)
        return explain(q, k, k, implementation=name, **arguments).splitlines()


@from_jax_0_12
@pytest.mark.parametrize("architecture", GPUS)
def test_who_makes_which_pass(architecture):
    lines = explained(architecture, GPUS[architecture], is_causal=True)
    name = named(architecture)
    assert lines[0] == f"implementation: {name} (not run on a card)"
    assert f"    forward: {name}" in lines
    why = "it has a kernel for the forward pass alone"
    assert f"    backward: triton (not {name}: {why})" in lines
    assert f"  {name}: can serve this call, if named (not run on a card)" in lines


@from_jax_0_12
@pytest.mark.parametrize("architecture", GPUS)
def test_no_call_gets_them_without_their_name(architecture):
    with described_as_here(GPUS[architecture]) as gpu, on_gpu(gpu):
        text = explain(Q, K, K, is_causal=True)
        assert text.startswith("implementation: triton\n")


@pytest.mark.skipif(
    jax.__version_info__ >= by_name.FIRST_JAX, reason="of versions before"
)
def test_older_versions_are_declined():
    for architecture in OTHERS:
        lines = explained(architecture, GPUS[architecture])
        assert f"its kernels need JAX 0.12, and this is {jax.__version__}" in lines[0]


def _heads(h: int, dtype=jnp.bfloat16):
    return {"q": jax.ShapeDtypeStruct((2, 30, 4, h), dtype)} | {
        "k": jax.ShapeDtypeStruct((2, 30, 2, h), dtype)
    }


DECLINED = {
    "float32": (_heads(64, jnp.float32), "dtype float32 is not bfloat16 or float16"),
    "head_80": (_heads(80), "head size 80 is not 64 or 128"),
    "mask": (
        {"mask": jnp.ones((300, 300), bool)},
        "an operand has an element for each query or key",
    ),
    "dropout": (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.PRNGKey(0)},
        "its kernels have no dropout",
    ),
    "lists": (
        {"mask_mod": lambda b, h, q, kv: (q == kv) | (kv < 3)},
        "its kernels walk no lists of blocks",
    ),
    "max_logit": (
        {"return_max_logit": True},
        "its kernels do not give the largest scores",
    ),
    "splits": (
        {"config": Config(splits=2)},
        "Config(splits=2): its programs are not divided",
    ),
    "stages": (
        {"config": Config(forward=Blocks(128, 64, 4, 1))},
        {
            "ampere": "num_warps=4 is not 4 for each 64 rows of block_q",
            "blackwell": "num_stages=1 is not 2 or more",
        },
    ),
    "shared_memory": (
        {"config": Config(forward=Blocks(128, 128, 8, 9))},
        {
            "ampere": "needs 288 KiB of shared memory and this GPU has 163",
            "blackwell": "num_warps=8 is not 4 for each 128 rows of block_q",
        },
    ),
    "tensor_memory": (
        {**_heads(128), "config": Config(forward=Blocks(256, 128, 8, 2))},
        {
            "ampere": "block_q=256 is not 64 or 128",
            "blackwell": "needs 640 of 512 columns of tensor memory",
        },
    ),
}


@from_jax_0_12
@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("name", DECLINED)
def test_declined_by_a_reason(architecture, name):
    arguments, reason = DECLINED[name]
    reason = reason if isinstance(reason, str) else reason[architecture]
    lines = explained(architecture, GPUS[architecture], **arguments)
    assert lines[0].startswith("error: ") and lines[0].endswith(reason), lines[0]


@from_jax_0_12
@pytest.mark.parametrize("architecture", OTHERS)
def test_other_gpus_are_declined(architecture):
    backend = {"ampere": ampere, "blackwell": blackwell}[architecture]
    other = OTHERS[architecture]
    known = ", ".join(str(x / 10) for x in backend.CAPABILITIES)
    reason = f"compute capability {other / 10} is not one of {known}"
    assert explained(architecture, other)[0].endswith(reason)
    with on_gpu("NVIDIA B200" if architecture == "blackwell" else "NVIDIA L4"):
        text = explain(Q, K, K, implementation=named(architecture))
    assert "only on a machine that has one" in text.splitlines()[0]


@from_jax_0_12
@pytest.mark.parametrize("architecture", OTHERS)
def test_gradients_are_made_by_another_backend(architecture):
    """And `vmap` over heads moves no operand but in the kernels' own way."""

    def loss(q, k, v):
        call = functools.partial(attention, implementation=named(architecture))
        return jax.vmap(call, 2)(q, k, v).astype(jnp.float32).sum()

    with described_as_here(GPUS[architecture]) as gpu:
        text = lower_for_gpu(jax.grad(loss), Q, Q, Q, device=gpu)
    (module,) = string_attributes(text, "module")
    assert b"flash2_forward" in module
    assert len(string_attributes(text, "ir")) == 2  # dq; dk and dv


@from_jax_0_12
@pytest.mark.parametrize(
    "name",
    [
        *deeply("ampere 8.0, head size 128, causal lengths"),
        "ampere 12.0, head size 64, window",
        *deeply("blackwell 10.3, head size 128, lengths"),
    ],
)
def test_variants_have_a_kernel(name):
    (module,) = ptxas.by_name()[name].modules
    assert len(module) > 10_000


SCALARS = {
    "alibi": {"is_causal": True, "alibi_slopes": jnp.ones(4)},
    "others": {
        "local_window_size": (90, 3),
        "query_offset": jnp.int32([5, 7]),
        "logits_soft_cap": 30.0,
        "sinks": jnp.zeros(4),
        "score_mod": lambda score, b, h, q, kv: score * jnp.exp(-0.01 * (q - kv)),
        "mask_mod": lambda b, h, q, kv: q - kv >= 3 - b,
    },
}


@from_jax_0_12
@pytest.mark.parametrize(
    ("features", "architecture"),
    [
        ("alibi", "ampere"),
        ("others", "blackwell"),
        *deeply(("alibi", "blackwell"), ("others", "ampere")),
    ],
)
def test_what_needs_scalars_alone_lowers(features, architecture):
    call = functools.partial(
        attention, implementation=named(architecture), **SCALARS[features]
    )
    with described_as_here(GPUS[architecture]) as gpu:
        text = lower_for_gpu(call, Q, K, K, device=gpu)
    assert len(string_attributes(text, "module")) == 1


def test_where_a_head_lies_in_a_row():
    x = np.arange(2 * 5 * 1 * 3 * 2 * 4).reshape(2, 5, 1, 3, 2, 4)
    keys = Named(jnp.asarray(x), ("b", "s", None, "v0", "k", "h"))
    heads = RowHeads.of(keys)
    row = heads.array(keys)
    assert row.shape == (2, 5, 24) and row.axes[:2] == ("b", "s")
    for at in np.ndindex(3, 2):
        where = heads.at({"v0": at[0], "k": at[1], "b": 0})
        part = where[row.axes[2]]
        found = row.value[:, :, int(part.start) :][..., : part.size]
        np.testing.assert_array_equal(found, x[:, :, 0, at[0], at[1]])


BY_NAME = [
    RUNNERS[f"mosaic_gpu_{x}"].param(x, id=x, deep_too=True)
    for x in GPUS
    if f"mosaic_gpu_{x}" in RUNNERS and RUNNERS[f"mosaic_gpu_{x}"].forward_only
]


@pytest.mark.parametrize(("architecture", "runner"), BY_NAME)
def test_padding_never_comes_through(architecture, runner, monkeypatch):
    """NaN beyond lengths changes no bit, and barriers order all accesses to memory."""
    capability = GPUS[architecture]
    races = architecture != "ampere"  # of cp.async the interpreter knows nothing
    mosaic_interpreter.install(monkeypatch, races=races, capability=capability)
    case = runner.shaped(Case("padding", batch=(2,), n=2, k=1))
    arrays, _ = case.inputs(runner.dtypes[0])
    cotangents = tolerances.cotangents_for(case, runner.dtypes[0])
    lengths = np.int32([case.s, case.s // 3]), np.int32([case.t // 2, case.t])
    arguments = dict(
        zip(("key_value_seq_lengths", "query_seq_lengths"), lengths, strict=True)
    )

    def poisoned(x, lengths):
        rows = np.arange(x.shape[1]) >= lengths[:, None]
        return jnp.where(rows[..., None, None], jnp.nan, x)

    q, k, v = arrays
    dirty = poisoned(q, lengths[1]), poisoned(k, lengths[0]), poisoned(v, lengths[0])
    clean = runner.evaluate(arrays, cotangents, arguments)
    found = runner.evaluate(dirty, cotangents, arguments)
    for name, x in clean.items():
        np.testing.assert_array_equal(x, found[name], err_msg=name)
    assert np.isfinite(clean["out"]).all()
    assert not races or not mosaic_interpreter.found_races()
