"""Lowered halves of calls that are kept beside JAX's compiled programs."""

import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash2 import Blocks, Config, _kept, attention
from jax_flash2._operation import Operation
from pallas_kernels import device, user_tables
from tests.cases import INTERPRETED, ON_GPU
from tests.lowering import kernel_modules, lower_for_gpu, on_gpu
from tests.modules import mosaic_modules
from tests.settings import configured
from tests.tiers import deeply

importlib.import_module("pallas_kernels.triton")  # whose tables are then known
X = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
LONG = jax.ShapeDtypeStruct((2, 2048, 4, 128), jnp.bfloat16)  # for Hopper's kernels
A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"


def gradients(*arrays, **options):
    call = functools.partial(attention, is_causal=True, **options)
    out, vjp = jax.vjp(call, *arrays)
    return out, *vjp(out)


def lower(*arrays, gpu=A100, **options) -> str:
    jax.clear_caches()
    run = functools.partial(gradients, **options)
    return lower_for_gpu(run, *(arrays or (X, X, X)), device=gpu)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where halves are kept: a cache that only lowering uses."""
    monkeypatch.delenv(_kept.VARIABLE)
    with configured({"jax_compilation_cache_dir": str(tmp_path)}):
        yield tmp_path / "jax_flash2"
    jax.clear_caches()


@pytest.fixture
def made(monkeypatch):
    """The names of halves as they are traced."""
    names, make = [], Operation._implementation

    def counted(self, *arrays, **params):
        names.append(self.name)
        return make(self, *arrays, **params)

    monkeypatch.setattr(Operation, "_implementation", counted)
    return names


HALVES = ["flash2_forward", "flash2_backward"]


@pytest.mark.parametrize("gpu", [A100, *deeply(H200)])
def test_read_again(folder, made, monkeypatch, gpu):
    first = lower(LONG, LONG, LONG, gpu=gpu)
    assert made == HALVES
    assert sorted(x.name.split("-")[0] for x in folder.iterdir()) == sorted(HALVES)
    assert lower(LONG, LONG, LONG, gpu=gpu) == first
    assert made == HALVES  # nothing was traced again
    monkeypatch.setenv(_kept.VARIABLE, _kept.OFF)
    anew = lower(LONG, LONG, LONG, gpu=gpu)
    assert kernel_modules(anew) == kernel_modules(first)
    ours, others = map(mosaic_modules, (first, anew))
    assert ours == others
    assert len(ours or kernel_modules(anew)) >= 2


IN_ANOTHER = """
from jax_flash2._operation import Operation
from tests.transforms.test_kept import LONG, OPTIONS, lower
def fail(*_, **__): raise AssertionError("traced again")
Operation._implementation = fail
lower(LONG, LONG, LONG, **OPTIONS[{name!r}])
"""
OPTIONS = {
    "plain": {},
    "hopper": {"gpu": H200},
    "function": {"mask_mod": lambda b, h, q, kv: (q - kv) % 3 < 2},
}


@pytest.mark.parametrize("name", ["plain", *deeply("hopper", "function")])
def test_read_by_another_process(folder, name):
    """The names of files say the same there, whatever Python hashes texts to."""
    lower(LONG, LONG, LONG, **OPTIONS[name])
    here = sorted(folder.iterdir())
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent)}
    env = {**os.environ, "PYTHONHASHSEED": "7", **cache}
    command = [sys.executable, "-c", IN_ANOTHER.format(name=name)]
    done = subprocess.run(command, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(folder.iterdir()) == here and len(here) >= 2


def test_what_decides_is_in_the_name(folder):
    """Each of these lowers to something else, or might."""
    longer = jax.ShapeDtypeStruct((2, 1088, 4, 64), jnp.bfloat16)
    half = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    blocks = Config(forward=Blocks(64, 32, 4, 2))
    calls = [
        lower,
        functools.partial(lower, longer, longer, longer),
        functools.partial(lower, half, half, half),
        functools.partial(lower, X, longer, longer),
        functools.partial(lower, gpu="NVIDIA A10"),
        functools.partial(lower, config=blocks),
        functools.partial(lower, scale=0.5),
        functools.partial(lower, scale=np.float32(0.25).item()),
        functools.partial(lower, mask_mod=lambda b, h, q, kv: q - kv < 3),
        functools.partial(lower, mask_mod=lambda b, h, q, kv: q - kv < 4),
    ]
    texts = [call() for call in calls]
    names = {x.name for x in folder.iterdir() if x.name.startswith(HALVES[0])}
    assert len(names) == len(set(texts)) == len(calls)
    assert [call() for call in calls] == texts


def test_settings_are_in_the_name(monkeypatch):
    """Without them a program of other settings would be found."""
    digest = functools.partial(_kept.digest, ["triton"])
    found = [digest(1), digest(1, 2), _kept.digest(["mosaic_gpu"], 1)]
    for name in (A100, "NVIDIA A10"):
        with monkeypatch.context() as patch:
            patch.setattr(device, "gpu", functools.partial(device.Gpu.named, name))
            found.append(digest(1))
    tables = {"blocks": {"forward": 1}, "crossovers": {}}
    with monkeypatch.context() as patch:
        patch.setattr(user_tables, "read", lambda *_: tables)
        found.append(digest(1))
    with jax.enable_x64(True):
        found.append(digest(1))
    with jax.default_matmul_precision("highest"):
        found.append(digest(1))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    found.append(digest(1))
    monkeypatch.setattr(_kept, "code", lambda: "other code")
    found.append(digest(1))
    assert None not in found and len(set(found)) == len(found)
    assert digest(1) == found[-1]


def test_what_others_imported_is_not_in_the_name(monkeypatch):
    """Their tables, and where JAX finds Mosaic GPU's libraries."""
    monkeypatch.delenv("MOSAIC_GPU_RUNTIME_LIB_PATH", raising=False)
    first = _kept.digest(["triton"], 1)
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "there")
    monkeypatch.setitem(user_tables.KNOWN, "another", user_tables.KNOWN["triton"])
    assert _kept.digest(["triton"], 1) == first


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-1], *deeply(lambda x: b"", lambda x: x + b"0")]
)
def test_damaged_files_are_made_again(folder, made, damage):
    first = lower()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path, data in before.items():
        path.write_bytes(damage(data))
    assert lower() == first
    assert made == HALVES * 2
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_whole_file_that_is_no_module_is_made_again(folder, made):
    """As of another build of the same version of jaxlib."""
    first = lower()
    for path in folder.iterdir():
        path.unlink()
        _kept._write(path, b"another build's")
    assert lower() == first and made == HALVES * 2
    assert lower() == first and made == HALVES * 2


def test_a_folder_that_cannot_be_written(folder, made):
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="not kept in .*JAX_FLASH2_KEPT=off"):
        lower()
    assert made == HALVES


def test_files_are_for_all_users_and_nothing_else_is_left(folder):
    lower()
    here = sorted(folder.iterdir())
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in here} == {0o666 & ~mask}
    for path in here:
        path.unlink()
        path.mkdir()
    with pytest.warns(UserWarning, match="not kept"):
        lower()
    assert sorted(folder.iterdir()) == here


@pytest.mark.parametrize("first", ["within", *deeply("without")])
def test_a_context_is_not_kept(folder, first):
    """JAX writes it into each operation that is lowered there."""

    def found(where: str) -> bool:
        with set_xla_metadata(mine="1") if where == "within" else nullcontext():
            return "mine" in lower()

    others = {"within": "without", "without": "within"}
    for where in (first, others[first], first):
        assert found(where) == (where == "within")


def test_code_that_changes_while_it_runs_is_not_kept(folder, monkeypatch):
    (path, *state), *others = _kept._IMPORTED
    changed = [(path, state[0] - 1, *state[1:]), *others]
    for states in (changed, []):  # none: of code that lies in no files
        monkeypatch.setattr(_kept, "_IMPORTED", states)
        lower()
        assert not folder.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"jax_compilation_cache_dir": None},
        {"jax_compilation_cache_dir": "gs://bucket/cache"},
        {"jax_enable_compilation_cache": False},
    ],
)
def test_nothing_is_kept_without_a_cache_on_a_disk(folder, settings):
    with configured(settings):
        lower()
    assert not folder.exists()


@pytest.mark.parametrize(
    "options", [{"implementation": "xla"}, {"config": INTERPRETED}]
)
def test_loops_and_interpreted_kernels_are_not_kept(folder, options):
    """XLA joins the loops with what stands around them."""
    small = jax.ShapeDtypeStruct((1, 32, 1, 16), jnp.float32)
    lower(small, small, small, **options)
    assert not folder.exists()


def test_exports_are_lowered_anew(folder):
    kernels = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with on_gpu(A100):
        run = jax.jit(gradients)
        found = export.export(run, platforms=["cuda"], disabled_checks=kernels)(X, X, X)
    assert "flash2_forward" in found.mlir_module() and not folder.exists()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_the_part_of_a_device(folder, made, kind):
    """A mesh whose axes types name: each device's part is a half of its own."""
    gpu = AbstractDevice(device_kind=A100, num_cores=None, platform="cuda")
    mesh = AbstractMesh((2,), ("x",), axis_types=(kind,), abstract_device=gpu)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("x")))
    manual = functools.partial(jax.shard_map, in_specs=P("x"), out_specs=P("x"))
    run = gradients if kind is AxisType.Explicit else manual(gradients, mesh=mesh)

    def text() -> str:
        jax.clear_caches()
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    first = text()
    assert made == HALVES and len(list(folder.iterdir())) == 2
    assert text() == first and made == HALVES
    assert "1x1024x4x64" in first


def test_vmap_has_halves_of_its_own(folder, made):
    mapped = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)

    def text():
        jax.clear_caches()
        return lower_for_gpu(jax.vmap(gradients), *[mapped] * 3, device=A100)

    lower()
    first = text()
    assert len(list(folder.iterdir())) == 4
    assert text() == first and made == HALVES * 2


def test_unread_operands(folder, made):
    """Those of a sequence without rows are none of what is lowered."""
    none = jax.ShapeDtypeStruct((2, 0, 4, 64), jnp.bfloat16)
    first = lower(X, none, none)
    assert lower(X, none, none) == first and made == HALVES


@pytest.mark.skipif(not ON_GPU, reason="kernels run on GPUs")
@pytest.mark.parametrize("implementation", ["triton", None])
def test_same_results(folder, made, monkeypatch, implementation):
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, X.shape, X.dtype) for key in keys]

    def results():
        jax.clear_caches()
        run = functools.partial(gradients, implementation=implementation)
        return jax.device_get(jax.jit(run)(*arrays))

    kept, again = results(), results()
    assert made == HALVES
    monkeypatch.setenv(_kept.VARIABLE, _kept.OFF)
    for a, b, c in zip(kept, again, results(), strict=True):
        assert np.any(a) and a.tobytes() == b.tobytes() == c.tobytes()


# What a text says.

_VALUES = [
    *(None, True, 1, 1.0, -0.0, 0.0, "1", b"1", (), (1,), [1], (1, (2,)), (1, 2)),
    *({}, {1: 2}, {1: (2,)}, frozenset({1, 2}), {1, 2}, "(1)", float("nan")),
    *(np.dtype("float32"), jnp.dtype(jnp.bfloat16), np.float32, np.float32(1)),
    *(np.zeros(2000), np.zeros(2000, np.float32), np.zeros((2, 1000))),
    np.eye(1, 2000, 1000)[0],
    *(AxisType.Auto, AxisType.Explicit, Config(), Config(interpret=True)),
    *(jax.lax.add_p, jax.lax.mul_p, Blocks(16, 16, 4, 1), Blocks(16, 16, 1, 4)),
]


def test_different_values_have_different_texts():
    for a, b in itertools.combinations(_VALUES, 2):
        assert _kept.text(a) != _kept.text(b)
    for x in _VALUES:
        assert not re.search(" at 0x", _kept.text(x))


def test_the_order_of_a_set_is_that_of_its_texts():
    """Python's own differs from process to process."""
    names = [f"name{i}" for i in range(20)]
    assert (
        _kept.text(set(names)).split(", ")[1:-1]
        == [repr(x) for x in sorted(names)][1:-1]
    )


@pytest.mark.parametrize("x", [len, lambda: 0, object(), np.array([None]), {1: len}])
def test_what_has_no_text(x):
    with pytest.raises(_kept.Unknown):
        _kept.text((1, x))
    assert _kept.digest([], x) is None


def test_calls_without_a_text_are_lowered_anew(folder, made, monkeypatch):
    monkeypatch.setattr(_kept, "digest", lambda *_: None)
    lower()
    assert not folder.exists() and made == []
