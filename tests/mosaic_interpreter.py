"""The Mosaic GPU kernels on a CPU, in JAX's interpreter for GPUs (from JAX 0.12 on).

It runs warpgroups and warps as threads, with barriers, copies by TMA and products, and
programs one after the other. What it lacks is put in its place here:

- what kernels say to the GPU in PTX: plain JAX;
- semaphores: counts of signals and waits. No wait needs to block, as programs of lower
  numbers have ended: what it waits for must be there (`tests.semaphores`);
- products of registers, stores to sums of products, and additions by TMA;
- products by mma.sync, and copies without a barrier (cp.async): at once.

It does not see that products run on beside other instructions, nor registers and their
layouts. So it shows that barriers and arithmetic are right, and not that a GPU agrees.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash2 import _api, _backends, _operation
from jax_flash2._operation import Problem
from pallas_kernels import device
from pallas_kernels.backend import Declined
from pallas_kernels.core.axes import Named, batch_axes
from pallas_kernels.core.pointwise import tables
from pallas_kernels.mosaic_gpu import gather, hopper, pairwise, support
from pallas_kernels.mosaic_gpu.ampere import products
from pallas_kernels.mosaic_gpu.hopper import ddistance, fp8_bytes
from pallas_kernels.mosaic_gpu.tile_scheduler import DynamicTiles
from tests import semaphores

# Few, so that programs go through several tiles.
PROGRAMS = 3
_ARGUMENTS = {"sink": "sinks"}  # of `attention`, for gradients
IS_SUPPORTED = jax.__version_info__ >= (0, 12)


def _jax(name: str) -> Any:
    return importlib.import_module(f"jax._src.pallas.mosaic_gpu.{name}")


# In place of PTX.


def _named_barrier(instruction: str, number, warpgroups: int) -> None:
    operation, num_threads = instruction, support.WARPGROUP * warpgroups

    # The interpreter knows it by its name and those of what it needs.
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def bar_op(_, number):
        del number
        return operation, num_threads

    bar_op(number)  # pyright: ignore[reportCallIssue]


def _numbers_along(axis: int, size: int, of_block=None) -> jax.Array:
    del axis, of_block
    return jnp.arange(size, dtype=jnp.int32)


def _sums_of_rows(x: jax.Array, so_far: jax.Array | None = None) -> jax.Array:
    parts = x.reshape(len(x), -1, support.COLUMNS).sum(1)
    return parts if so_far is None else so_far + parts


def _load(ref, shape, *, transposed: bool):
    del shape
    x = plgpu.load(ref)
    return x.T if transposed else x


def _load_words(ref, shape, *, transposed: bool):
    words = _load(ref, shape, transposed=transposed).astype(jnp.int32)
    words = words.reshape(shape[0], -1, 1, pairwise.WORDS, 1)
    places = jnp.arange(16).reshape(8, 1, 2)
    return ((words >> places) & 1).reshape(shape).astype(jnp.uint32)


def _elements(ref, places):
    return plgpu.load(ref)[places]


def _are_equal(ref) -> jax.Array:
    numbers = plgpu.load(ref)
    return jnp.int32(jnp.all(numbers == numbers[0]))


def _diagonals(ref, shape, *, transposed: bool):
    rows, columns = (lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
    distance, last = rows - columns, shape[1] - 1
    if transposed:
        distance, last = columns - rows, shape[0] - 1
    return plgpu.load(ref)[distance + last]


def _take(tiles: DynamicTiles, slot) -> None:
    """One outcome of many: the first program takes as many tiles as it may.

    The next ones take what is left, the last ones nothing.
    """
    most = tiles.schedule.most_tiles

    @pl.when(slot < most)
    def _():
        tiles.words[tiles._word(slot)] = lax.axis_index("program") * most + slot
        plgpu.barrier_arrive(tiles.taken.at[slot])


def _store(ref, x, *, first: int = 0) -> None:
    ref[...] = x[:, first : first + ref.shape[-1]]


def _store_sums(ref, tile, row: int) -> None:
    sums = tables.diagonals(plgpu.load(tile))
    ref[row, :] = jnp.pad(sums, (0, 1))


def _store_zeros(ref, row: int) -> None:
    ref[row] = jnp.zeros(ref.shape[-1:], ref.dtype)


def _rounded(p: jax.Array) -> jax.Array:
    return jnp.minimum(p, 448.0).astype(fp8_bytes.DTYPE)


def _by_bits(x: jax.Array, unit: jax.Array, shift: jax.Array) -> jax.Array:
    z = jnp.clip((x * unit + shift + fp8_bytes.LOW) * (8 / 126), 0.0, 1.0)
    z = jnp.where(jnp.isnan(x), 0.0, z)
    byte = jnp.round(126 * z).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, fp8_bytes.DTYPE)


def _joined(p: jax.Array) -> jax.Array:
    """With columns in the order in which values have their keys."""
    groups = p.reshape(p.shape[0], -1, 2, 4, 2)
    return jnp.swapaxes(groups, 2, 3).reshape(p.shape)


def _cleared(sums: jax.Array, after: jax.Array) -> jax.Array:
    return sums.at[:, -after.shape[1] :].set(0.0 * after)


# What the interpreter does not know.


def _product(callbacks, original, *, a_allocation_key_as_array, a_transforms, **rest):
    """`wgmma`, whose left operand may be in registers: then it is no key."""
    left = np.asarray(a_allocation_key_as_array)
    if left.ndim == 1:
        return original(
            a_allocation_key_as_array=a_allocation_key_as_array,
            a_transforms=a_transforms,
            **rest,
        )
    memory = callbacks._get_shared_memory()
    where = rest["mesh_location"], rest["thread"], rest["source_info"]
    info = callbacks.memory.GPULoggingInfo(*where)

    def place(name: str):
        key = callbacks.HostAllocationKey.from_array(
            rest[f"{name}_allocation_key_as_array"]
        )
        kept = callbacks._remove_noop_transforms(rest[f"{name}_transforms"])
        return key, memory.access(key, jax.tree.map(int, kept))

    def content(name: str):
        return memory.get_buffer_content(
            *place(name), rest["thread"], logging_info=info
        )[0]

    right, total = content("b"), content("acc")
    with np.errstate(over="ignore", invalid="ignore"):  # sums that a retry makes again
        total = total + np.matmul(*(x.astype(total.dtype) for x in (left, right)))
    memory.store_buffer_content(*place("acc"), total, rest["thread"], logging_info=info)
    return rest["token"]


def _adding(callbacks):
    """The task of a copy to global memory, which adds."""

    class Addition(callbacks.AsyncCopySmemToGmemTask):
        def post_read(self, tma_thread_id: int, shared_memory):
            """Additions of several programs are ordered by semaphores."""
            if shared_memory.detect_races:
                self.clock.inc(tma_thread_id)
                self.write_clock = self.clock.copy()

        def __call__(self, tma_thread_id: int):
            memory = callbacks._get_shared_memory()
            about = {"logging_info": self.logging_info}
            self.pre_read(tma_thread_id, memory)
            source = self.src_allocation_key, self.src_access
            more, _, _ = memory.get_buffer_content(*source, self.thread, **about)
            self.post_read(tma_thread_id, memory)
            key = self.dst_allocation_key
            shape = tuple(memory.buffer_shape_and_dtype(key).shape)
            part = callbacks._clip_store_to_shape(self.dst_access, more, shape)
            if part is not None:
                where, more = part
                there, _, _ = memory.get_buffer_content(
                    key, where, self.thread, **about
                )
                memory.store_buffer_content(
                    key, where, there + more, self.thread, **about
                )
            self.post_write(tma_thread_id, memory)

    return Addition


def _copy(callbacks, original, *, reduction_op, **rest):
    if reduction_op is None:
        return original(reduction_op=None, **rest)
    assert reduction_op == "add"
    memory, about = callbacks._get_shared_memory(), {}
    for name in ("src", "dst"):
        key = callbacks.HostAllocationKey.from_array(
            rest[f"{name}_allocation_key_as_array"]
        )
        kept = callbacks._remove_noop_transforms(rest[f"{name}_transforms"])
        about[f"{name}_allocation_key"] = key
        about[f"{name}_access"] = memory.access(key, jax.tree.map(int, kept))
    for name in ("mesh_location", "thread", "source_info"):
        about[name] = rest[name]
    if memory.detect_races:
        about["clock"] = memory.incr_clock(rest["thread"])
    memory.execute_async_task(_adding(callbacks)(**about))
    return rest["token"]


def _with_stores_to_sums(interpreter, callbacks):
    """The interpreter's method with one more primitive among its cases."""
    text = textwrap.dedent(inspect.getsource(interpreter.JaxprInterpreter.interpret))
    line = next(x for x in text.splitlines() if "case gpu_primitives.commit_grou" in x)
    margin = line[: len(line) - len(line.lstrip())]
    more = (
        f"{margin}case gpu_primitives.wgmma_accumulator_store_p:\n"
        f"{margin}  token, out = _store_to_sum(self, eqn, token, deferred_invals())\n"
    )

    def store_to_sum(self, eqn, token, operands):
        key, value = operands
        token, _ = callbacks.call_swap(
            token=token,
            result_shape_and_dtype=eqn.invars[1].aval,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=key,
            transforms=(),
            val=value,
            mask=None,
            source_info=eqn.source_info,
        )
        return token, value

    names = {**interpreter.__dict__, "_store_to_sum": store_to_sum}
    exec(text.replace(line, more + line), names)
    return names["interpret"]


def _call_back(*arrays, callback, result_avals, **_):
    """In place of JAX's, which makes arrays of JAX first: most of the time was that."""
    found = callback(*(np.array(x) for x in arrays))
    pairs = zip(found, result_avals, strict=True)
    return [np.asarray(x, like.dtype) for x, like in pairs]


def _to_int(x):
    return x if isinstance(x, jax.core.Tracer) else int(x)


def _multiply(sums, left, right):
    return sums + jnp.dot(left, right, preferred_element_type=sums.dtype)


def _copy_at_once(original):
    """As `plgpu.copy_gmem_to_smem`: the interpreter knows copies with a barrier."""

    def copy(source, tile, barrier=None, **options):
        if barrier is None:
            tile[...] = source[...]
        else:
            original(source, tile, barrier, **options)

    return copy


def install(monkeypatch, *, races: bool = False, capability: int = 90) -> None:
    """Until the end of a test, Mosaic GPU kernels are interpreted.

    Args:
      monkeypatch: pytest's.
      races: whether it is an error if no barrier orders two accesses to memory.
      capability: compute capability of the GPU, times ten.
    """
    put = monkeypatch.setattr
    callbacks, interpreter = map(
        _jax, ("interpret.gpu_callbacks", "interpret.jaxpr_interpret")
    )
    parameters = _jax("interpret.params").InterpretGPUParams(
        inline_mgpu="_hack_model_inline_mgpu_tokamax", detect_races=races
    )
    put(device, "gpu", lambda: device.Gpu.of(None, capability))
    put(device, "gpu_is_here", lambda: True)
    put(device, "multiprocessors", lambda: PROGRAMS)
    put(support, "numbers_along", _numbers_along)
    put(support, "sums_of_rows", _sums_of_rows)
    put(support, "opaque", lambda number: number)
    put(support, "warpgroup_any", lambda me, flags, *_: jnp.sum(flags))
    put(support, "named_barrier", _named_barrier)
    put(support, "finish_loads", plgpu.commit_smem)
    put(DynamicTiles, "take", _take)
    put(support, "warp_uniform", lambda number: number)
    one_form = support.tile  # the interpreter's tiles have no parts
    put(support, "tile", lambda *x, array=None: one_form(*x[:3]))
    put(support, "in_one_place", lambda *forms: forms)  # nor two forms
    put(hopper, "_ARITHMETIC", support.ARITHMETIC)
    for name in ("rounded", "by_bits", "joined", "cleared"):
        put(fp8_bytes, name, globals()[f"_{name}"])
    put(pairwise, "load", _load)
    put(pairwise, "load_words", _load_words)
    put(pairwise, "fetch", functools.partial(_load, transposed=True))
    put(pairwise, "turned", lambda words, dtype: words)
    put(pairwise, "store", _store)
    put(ddistance, "store_sums", _store_sums)
    put(ddistance, "store_zeros", _store_zeros)
    put(gather, "elements", _elements)
    put(gather, "diagonals", _diagonals)
    put(gather, "are_equal", _are_equal)
    put(products, "multiply", _multiply)
    put(products, "as_left", lambda x: x)
    put(plgpu, "copy_gmem_to_smem", _copy_at_once(plgpu.copy_gmem_to_smem))
    put(plgpu, "wait_gmem_to_smem", lambda n: None)
    semaphores.forget()
    put(pl, "get_global", semaphores.new)
    put(plgpu, "semaphore_wait", semaphores.counting("wait"))
    put(plgpu, "semaphore_signal", semaphores.counting("signal"))
    put(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=parameters))
    for name, instead in (("wgmma", _product), ("copy_smem_to_gmem", _copy)):
        original = getattr(callbacks, name)
        put(callbacks, name, functools.partial(instead, callbacks, original))
    method = _with_stores_to_sums(interpreter, callbacks)
    put(interpreter.JaxprInterpreter, "interpret", method)
    put(importlib.import_module("jax._src.callback"), "io_callback_impl", _call_back)
    put(_jax("interpret.shared_memory"), "_to_int", _to_int)
    callbacks.reset_gpu_interpret_mode_state()


def found_races() -> bool:
    return _jax("interpret.gpu_callbacks").get_races().races_found


def evaluate(arrays, cotangents, arguments) -> dict[str, np.ndarray]:
    """As `tolerances.evaluate`, of what the backend's own kernels make.

    These are out, lse, max_logit and, where its backward kernel serves the call, the
    gradients of query, key, value and sinks.

    Args:
      arguments: of `attention`. If they name no backend, it is that for Hopper.
    """
    arguments = dict(arguments)
    name = arguments.pop("implementation", "mosaic_gpu")
    backend = _backends.module(name)
    call = _api.given(*arrays, **arguments).checked()
    problem = Problem.of(call, name, is_named=True)
    names = ("forward", "backward", "operand_gradients")[
        : 2 + bool(call.spec.score.operands)
    ]
    plans = {x: backend.plan(call, x) for x in names}
    plans = {x: plan for x, plan in plans.items() if not isinstance(plan, Declined)}

    @jax.jit
    def run(arrays, cotangents):
        with support.lowering_context():
            operands = list(map(Named, arrays, problem.axes))
            rows = (*batch_axes(operands), "t", "n")
            structs = _operation.forward_outputs(problem, operands)
            call = problem.named(arrays)
            found = backend.forward(plans["forward"], call, structs)
            named = [Named(x, s.axes) for x, s in zip(found, structs, strict=True)]
            o, lse, *others = named
            results = {"out": o.to((*rows, "d")), "lse": lse.to(rows)}
            results |= dict(
                zip(["max_logit"], (x.to(rows) for x in others), strict=False)
            )
            if "backward" not in plans:
                return results
            do, dlse = cotangents
            saved = (
                *(o, lse, Named(Named(do, (*rows, "d")).to(o.axes), o.axes)),
                Named(Named(dlse, rows).to(lse.axes), lse.axes),
            )
            wanted = _operation.wanted_gradients(problem, [*operands, *saved])
            made = {
                n: x for n, x in wanted.items() if n not in call.spec.score.operands
            }
            made = wanted if "operand_gradients" in plans else made
            found = backend.backward(plans, call, saved, made)
            return results | {_ARGUMENTS.get(n, n): x for n, x in found.items()}

    results = run(tuple(x.value for x in call.operands), cotangents)
    found = {name: np.asarray(x, np.float64) for name, x in results.items()}
    assert not semaphores.unmet(), semaphores.unmet()
    return found
