"""Backend "triton": Pallas kernels that lower to XLA's Triton custom call."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import configs, device, passes, tables
from pallas_kernels.backend import Call, Declined, Pass, Plan
from pallas_kernels.core.axes import Named, operand_sum, sizes
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.division import Packing, words
from pallas_kernels.triton import estimates, memory, support, tuning
from pallas_kernels.triton.backward import dbias, ddistance, dkv, dq
from pallas_kernels.triton.forward import forward as forward_kernel
from pallas_kernels.triton.memory import Launch
from pallas_kernels.triton.packed import is_served
from pallas_kernels.triton.tangent import tangent as tangent_kernel

MAX_HEAD_SIZE = 512
# Of latent keys in pages, of which values are the first elements (DeepSeek-V3).
_MAX_LATENT = 576
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

lowering_context = support.lowering_context


@dataclasses.dataclass(frozen=True)
class _Plan(Plan):
    """Of a pass; the blocks of each kernel are chosen when it is launched."""

    call: Call
    kernels: tuple[str, ...]
    slower: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        found: list[str] = []

        def ask(*arrays):
            axes = (x.axes for x in leaves)
            call = tree.unflatten(map(Named, arrays, axes))
            for kernel in self.kernels:
                found.extend(self._division(call, kernel))

        leaves, tree = jax.tree.flatten(self.call)
        jax.eval_shape(ask, *(x.value for x in leaves))
        return tuple(found)

    @staticmethod
    def _division(call: Call, kernel: str) -> list[str]:
        """How the work of a kernel is divided, in words, where it is."""
        options = {}
        arrays, spec = [call.query, call.key, call.value], call.spec
        packing = Packing.of(call.query, call.key, spec)
        found = []
        if kernel == "forward" and packing is not None:
            found.append(f"forward: {packing.heads.group} heads of a group as rows")
            arrays, spec = [packing.array(x) for x in arrays], packing.spec(spec)
        if kernel == "dbias":
            operands = list(spec.score.pair_operands.values())
            if not operands:
                return []  # made for every head and batch entry
            elements = passes.axes_of_elements(call.operands)
            own, looped = operand_sum(operands[0], elements)
            options = {"own": own, "looped": looped}
        launch = _launch(kernel, call.config, call.precision, arrays, spec)
        operands = [*arrays, *jax.tree.leaves(spec)]
        layout = memory.BlockGrid.of(kernel, operands, launch, **options)
        return [*found, *filter(None, [words(kernel, layout.parts)])]


def plan(call: Call, pass_: Pass, /) -> Plan | Declined:
    """The plan of a pass (`backend.Backend`)."""
    why_not = _unsupported(call)
    if why_not is not None:
        return Declined(why_not)
    of_pass = {
        "forward": ("forward",),
        "backward": tuple(tuning.kernels(_head_blocks([call.key, call.value]))),
        "operand_gradients": ("dbias",),
        "tangent": ("tangent",),
    }
    kernels = of_pass[pass_]
    if pass_ == "backward":
        kernels = tuple(x for x in kernels if x not in ("forward", "dbias"))
    if pass_ == "operand_gradients" and (why_not := passes.unmade_table(call.spec)):
        return Declined(why_not, to_loops=True)
    for kernel in kernels:
        why_not = _unfit(kernel, call)
        if why_not is not None:
            return Declined(why_not)
    return _Plan(call, kernels, _slower(call) if pass_ == "forward" else None)


def _unsupported(call: Call) -> str | None:
    """Why this backend has no kernels for a call here and now, or None."""
    if not call.interpret and (capability := device.capability()) < 80:
        return f"compute capability {capability / 10} is below 8.0"
    if call.dtype not in DTYPES:
        return f"dtype {jnp.dtype(call.dtype).name} is not bfloat16, float16 or float32"
    if lacking := call.lacking(support.operations(call.interpret)):
        return lacking
    if call.is_symbolic:
        return "the kernels need static sizes, and this call has a symbolic one"
    if call.most_elements > memory.MOST_ELEMENTS:
        return memory.too_large(call.most_elements)
    largest, most = max(call.head_sizes), MAX_HEAD_SIZE
    if call.spec.pages is not None and call.head_sizes[1] <= most:
        most = _MAX_LATENT
    if largest > most:
        return f"head size {largest} is above {most}"
    operands = zip((call.key, call.value), call.head_sizes, strict=True)
    if odd := [size for x, size in operands if not is_served(x.dtype, size)]:
        return f"head size {odd[0]} of int4 is no power of two from 64 on"
    return None


def _unfit(kernel: str, call: Call) -> str | None:
    """Why a kernel cannot have the blocks that it is given, or any, or None."""
    heads, largest = _head_blocks([call.key, call.value]), max(call.head_sizes)
    field = f"Config.{configs.LIKE.get(kernel, kernel)}"
    blocks = call.config and call.config.blocks(kernel)
    odd = tuning.no_power_of_two(blocks) if blocks else None
    if odd is not None:
        return f"{odd} of {field} is no power of two"
    if call.interpret:
        return None
    gpu = device.gpu()
    itemsize, _ = _products(kernel, call.dtype, call.precision, heads, gpu)
    limit, least = gpu.shared_memory, tuning.smallest(kernel, heads, itemsize, gpu)
    needs = f"head size {largest} in {jnp.dtype(call.dtype).name} needs"
    if blocks and least <= limit and not any(n % 16 for n in call.head_sizes):
        least = estimates.least_shared_memory(kernel, blocks, heads, itemsize)
        needs = f"{field} needs at least"
    if least <= limit:
        return None
    return f"{needs} {least >> 10} KiB of shared memory and this GPU has {limit >> 10}"


def _slower(call: Call) -> str | None:
    """Why the next backend is faster for a call that this one serves, or None."""
    size, largest = call.size, max(call.head_sizes)
    keys = call.spec.mean_keys(size["s"])
    # XLA's products of whole matrices serve calls of so many rows faster then.
    rows = tables.number("triton", "many_rows")
    many = min(size["t"], size["s"]) >= rows and 2 * keys >= size["s"]
    if not call.is_configured and largest > 256 and many:
        return f"a block of head size {largest} leaves few rows to a program"
    return None


def _head_blocks(operands) -> tuple[int, int]:
    """Elements that blocks of key and value have for each row."""
    size = sizes(operands)
    return sum(tables.pieces(size["h"])), sum(tables.pieces(size["d"]))


def _products(kernel: str, dtype, precision, heads: tuple[int, int], gpu: device.Gpu):
    """Bytes of an element and the precision of products that a GPU has room for.

    As `support.product_precision`, but of float32 as it is where pieces do not fit.
    """
    found = support.product_precision(dtype, precision, False)
    in_pieces = found[0] == estimates.SPLIT_ITEMSIZE
    if in_pieces and tuning.smallest(kernel, heads, found[0], gpu) > gpu.shared_memory:
        return estimates.OWN_ITEMSIZE, precision
    return found


def _launch(
    kernel: str, config, precision, operands, spec, looped: str = "s"
) -> Launch:
    size = sizes([*operands, *jax.tree.leaves(spec.pages)])
    dtype = operands[0].dtype
    interpret = config is not None and config.interpret
    heads = _head_blocks(operands)
    gpu = device.gpu()
    if interpret:  # no memory of a GPU is asked for
        itemsize, product = support.product_precision(dtype, precision, True)
        least = tuning.smallest(kernel, heads, itemsize, gpu)
        enough = max(gpu.shared_memory, least)
        gpu = dataclasses.replace(gpu, shared_memory=enough)
    else:
        itemsize, product = _products(kernel, dtype, precision, heads, gpu)
    blocks = tuning.choose(
        kernel,
        config,
        rows=(size["t"], size["s"]),
        heads=heads,
        itemsize=itemsize,
        gpu=gpu,
        dropout=spec.dropout is not None,
        regime=tables.regime(operands, spec),
        pair_bytes=tables.pair_bytes(spec),
        looped=looped,
    )
    if spec.pages is not None:
        # The compiler loads the number of a page ahead of its rows, in stages of its
        # own: half of them remain to keys and values (benchmarks/lab/108).
        stages = 2 * blocks.num_stages - 1
        blocks = dataclasses.replace(blocks, num_stages=stages)
    arithmetic = support.arithmetic(dtype, interpret)
    splits = None if config is None else config.splits
    fixed = kernel == "forward" and config is not None and config.invariant
    return Launch(blocks, product, arithmetic, interpret, splits, fixed)


def _square(launch: Launch) -> Launch:
    """With as many queries as keys in a block."""
    rows = min(launch.blocks.block_q, launch.blocks.block_kv)
    blocks = dataclasses.replace(launch.blocks, block_q=rows, block_kv=rows)
    return dataclasses.replace(launch, blocks=blocks)


_KERNELS = {
    "forward": forward_kernel,
    "dq": dq,
    "dkv": dkv,
    "dk": dkv,
    "dv": dkv,
    "dbias": dbias,
    "tangent": tangent_kernel,
    "ddistance": ddistance,
}


def _run(
    kernel: str,
    looped: str,
    q: Named,
    k: Named,
    v: Named,
    spec: AttentionSpec,
    *rest,
    config: configs.Config | None,
    precision,
    **options,
) -> tuple[jax.Array, ...]:
    """Runs a kernel whose programs loop over blocks of keys ("s") or queries ("t")."""
    by_distance = kernel == "ddistance"
    blocks_of = "dbias" if by_distance else kernel
    over = "e" if by_distance else looped
    launch = _launch(blocks_of, config, precision, [q, k, v], spec, over)
    if by_distance:
        launch = _square(launch)
    blocks, size = launch.blocks, sizes([q, k, *jax.tree.leaves(spec.pages)])
    rows = blocks.block_q, blocks.block_kv, size["t"], size["s"]
    spec = spec.with_table(looped, *rows, lists=not launch.invariant)
    return _KERNELS[kernel](q, k, v, spec, *rest, launch=launch, **options)


def forward(plan: Plan, call: Call, outputs):
    """Output and log-sum-exp (`backend.Backend`)."""
    return passes.forward(_runner(call), call, outputs)


def backward(plans, call: Call, saved, wanted):
    """Gradients (`backend.Backend`)."""
    apart = "dkv" not in tuning.kernels(_head_blocks([call.query, call.value]))
    return passes.backward(_runner(call), call, saved, wanted, dk_and_dv_apart=apart)


def tangent(plan: Plan, call: Call, saved, tangents, outputs):
    """Tangents of output and log-sum-exp (`backend.Backend`)."""
    return passes.tangent(_runner(call), call, saved, tangents, outputs)


def _runner(call: Call):
    return functools.partial(_run, config=call.config, precision=call.precision)
