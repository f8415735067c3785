"""What the tuner times of the Triton kernels: blocks, by regime."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2.tune.problems import (
    HIDDEN,
    TOKENS,
    Paged,
    Problem,
    Shape,
    random_mask,
)
from pallas_kernels import configs, device, tables
from pallas_kernels.configs import Blocks
from pallas_kernels.triton import estimates, tuning

BACKEND = "triton"
KERNELS = configs.KERNELS
HEAD_SIZES = tuple(tuning.TUNED_SIZES.get(size, size) for size in tables.HEADS)
REGIMES = tuple(tables.REGIMES)
_MANY, _BOUND = "paged many", "paged byte bound"
# Of keys in a cache: page sizes and kinds of pools, or None for keys without pages.
_CACHED: dict[str, tuple | None] = {
    "decode": None,
    "paged": ((64, jnp.bfloat16), (128, jnp.bfloat16)),
    "paged rows": ((16, jnp.bfloat16),),
    "paged byte": ((64, jnp.int8), (64, jnp.float8_e4m3fn)),
    _BOUND: ((64, jnp.int8), (16, jnp.int8), (64, jnp.float8_e4m3fn)),
    _MANY: ((64, jnp.bfloat16), (64, jnp.int8)),
}
_REGISTERS = 65536  # of a multiprocessor


def kernels(regime: str, head_size: int) -> list[str]:
    if head_size > 256 and regime not in ("plain", "float32"):
        return []  # as those
    names = ["forward"] if regime in _CACHED else tuning.kernels((head_size, head_size))
    with_operand = regime in ("plain", "bias")
    return [name for name in names if name != "dbias" or with_operand]


def candidates(kernel: str, head_size: int, regime: str) -> list[Blocks]:
    """Blocks that fit shared memory, and registers by a rough count; the table's first.

    The rows of the block that a program owns are divided among its warps, 16 each. What
    is too small to be fast is left out.
    """
    heads, size = (head_size, head_size), tuning.ITEMSIZES.get(regime, 2)
    gpu = device.gpu()
    limit, products = gpu.shared_memory, gpu.family.products
    pair_bytes = {"bias": 2, "heavy": 1}.get(regime, 0)
    room = {"gpu": gpu, "dropout": regime == "dropout"}
    options = {"rows": (1 << 20, 1 << 20), "heads": heads, "itemsize": size}
    options |= {"pair_bytes": pair_bytes, **room}
    found = [tuning.choose(kernel, None, regime=regime, **options)]
    if regime in _CACHED and regime != _MANY:  # its block of queries holds them all
        shapes = itertools.product([64], (32, 64, 128, 256), (1, 2, 4, 8), (2, 3, 4))
        found += itertools.starmap(Blocks, shapes)
        if regime == _BOUND:
            at_once = 1 + tables.number("triton", "paged_programs")
            found += [
                dataclasses.replace(x, max_registers=min(most, 248))
                for x in found
                if (most := _REGISTERS // (32 * x.num_warps * at_once) // 8 * 8)
            ]
        return [
            blocks
            for blocks in dict.fromkeys(found)
            if tuning.fits(kernel, blocks, heads, size, **room)
        ]
    rows = (16, 32, 64, 128, 256)
    half = size == 2 and head_size <= 256
    left = estimates.LEFT[kernel] if half and products == "wgmma" else 0
    shapes = itertools.product(rows, rows[:-1], (4, 8, 16), (1, 2, 3))
    for sizes, kept in itertools.product(shapes, range(left + 1)):
        blocks = Blocks(*sizes, left_in_registers=kept)
        own, other = blocks.block_q, blocks.block_kv
        if kernel in ("dkv", "dk", "dv"):
            own, other = other, own
        accumulators = 2 if kernel == "dkv" else 0 if kernel == "dbias" else 1
        scores = 1 if kernel in ("forward", "dv") else 2
        values = own * (accumulators * head_size + scores * other)
        in_registers = estimates.LEFT[kernel] if products == "mma.sync" else kept
        values += own * in_registers * head_size * size / 4
        each = values / (32 * blocks.num_warps)  # of a thread's 255 registers
        taken = kernel, blocks, heads, size, pair_bytes
        need = estimates.shared_memory(*taken, products=products)
        has_room = half and head_size <= 128 and limit > 200 << 10
        large = 2**12 if has_room else 2**10
        if half and (own < 16 * blocks.num_warps or other < 32):
            continue
        if head_size <= 128 and half and blocks.num_stages == 1:
            continue
        if not tuning.fits(kernel, blocks, heads, size, pair_bytes, **room):
            continue
        if 64 <= each <= 208 and large <= own * other <= 2**14:
            found.append(blocks)
            # Registers for as many programs as shared memory has room for: it is 1 KiB
            # larger than a program may use, and each takes 1 KiB more than it uses.
            programs = (limit + 1024) // (need + 1024)
            most = _REGISTERS // (32 * blocks.num_warps * programs) // 8 * 8
            if each + 24 <= most <= 248:
                found.append(dataclasses.replace(blocks, max_registers=most))
    return list(dict.fromkeys(found))


def problems_of(kernel: str, regime: str, head_size: int) -> list[Problem]:
    """Those that a kernel is timed on."""
    found = problems(regime, head_size)
    return [x for x in found if kernel != "dbias" or x.operand is not None]


def field(kernel: str) -> str:
    """Of `Config`, the field that has a kernel's blocks."""
    return kernel


def key(kernel: str, head_size: int) -> int:
    """The size in a table that has the blocks of a kernel for a head size."""
    del kernel
    return tables.bucket(head_size)


def problems(regime: str, head_size: int) -> list[Problem]:
    """What the blocks of a regime are chosen on."""
    # Enough for more than a few programs.
    hidden_heads = max(16, HIDDEN // head_size)

    def shape(length, causal=True, heads=hidden_heads, batch=None, dtype="bfloat16"):
        batch = batch or TOKENS // length
        return Shape(batch, length, heads, heads, head_size, causal, dtype)

    documents = np.arange(8192) // 1024
    rows = jnp.asarray(np.broadcast_to(documents, (2, 8192)), jnp.int32)
    if regime == "plain":
        cases = [(2048, False), (4096, True), (4096, False)]
        alibi = {"alibi_slopes": jnp.exp2(-jnp.arange(1.0, hidden_heads + 1))}
        return [
            *(Problem(shape(*case)) for case in cases),
            Problem(shape(4096), arrays=alibi, operand="alibi_slopes"),
        ]
    if regime == "long":
        cases = [(8192, True), (TOKENS, True), (TOKENS, False)]
        return [Problem(shape(*case)) for case in cases]
    if regime == "single":
        return [Problem(shape(TOKENS, x, heads=1, batch=1)) for x in (True, False)]
    if regime == "few":
        cases = [(2, True), (4, False), (8, True)]
        return [Problem(shape(TOKENS, x, heads=n, batch=1)) for n, x in cases]
    if regime == "short":
        return [
            Problem(shape(8192), arrays={"query_segment_ids": rows}),
            Problem(shape(8192), arrays={"query_segment_ids": jnp.zeros_like(rows)}),
            Problem(shape(8192), {"local_window_size": (1023, None)}),
            Problem(shape(1024)),
        ]
    if regime == "whole":
        lengths = jnp.asarray(np.arange(1, 1 + TOKENS // 512) * 16, jnp.int32)
        return [
            Problem(shape(512, False)),
            Problem(shape(512, False), arrays={"key_value_seq_lengths": lengths}),
        ]
    if regime in _CACHED:
        pools, found = _CACHED[regime], []
        few = (16, 1, 8192, 8), (1, 1, 65536, 8), (4, 8, 8192, 8)
        many = (16, 16, 8192, 8), (1, 2048, 16384, 8)
        turn = ((4 * device.multiprocessors() // 8, 1, 4096, 8),)
        for b, t, s, k in {_MANY: many, _BOUND: turn}.get(regime, few):
            of = Shape(b, s, 32, k, head_size, True, "bfloat16")
            if pools is None:
                found.append(Problem(of, queries=t))
            found += [Paged.of(of, t, *pool) for pool in pools or ()]
        return found
    if regime == "heavy":
        mask = random_mask(4096)
        return [
            Problem(shape(4096), arrays={"mask": mask}),
            Problem(shape(4096), {"logits_soft_cap": 30.0}),
        ]
    if regime == "dropout":
        key = jax.random.PRNGKey(0)
        return [Problem(shape(4096), {"dropout_rate": 0.1}, {"dropout_rng": key})]
    if regime == "bias":
        # One that fits the GPU's cache, and one that does not.
        draw = functools.partial(jax.random.normal, jax.random.key(0))
        biases = [draw((1, n, 4096, 4096), jnp.bfloat16) for n in (1, hidden_heads)]
        return [
            Problem(shape(4096), arrays={"bias": b}, operand="bias") for b in biases
        ]
    precision = "highest" if regime == "float32 highest" else "default"
    return [Problem(shape(4096, dtype="float32"), {"precision": precision})]
