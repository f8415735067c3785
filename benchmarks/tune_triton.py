"""What `benchmarks.tune` times of the Triton kernels: blocks, by regime."""

import dataclasses
import itertools

from benchmarks.tune_problems import Problem, problems
from pallas_kernels import configs, device, tables
from pallas_kernels.configs import Blocks
from pallas_kernels.triton import tuning

BACKEND = "triton"
KERNELS = configs.KERNELS
# A table's size serves those below it, too: of 192, 160 is one for keys and values.
HEAD_SIZES = (64, 80, 96, 128, 160, 256, 512)
REGIMES = tuple(tables.REGIMES)
_REGISTERS = 65536  # of a multiprocessor


def kernels(regime: str, head_size: int) -> list[str]:
    if head_size > 256 and regime not in ("plain", "float32"):
        return []  # as those
    names = (
        ["forward"] if regime == "decode" else tuning.kernels((head_size, head_size))
    )
    with_operand = regime in ("plain", "bias")
    return [name for name in names if name != "dbias" or with_operand]


def itemsize(regime: str) -> float:
    sizes = {"float32": 4, "float32 highest": tuning.SPLIT_ITEMSIZE}
    return sizes.get(regime, 2)


def candidates(kernel: str, head_size: int, regime: str) -> list[Blocks]:
    """Blocks that fit shared memory, and registers by a rough count; the table's first.

    The rows of the block that a program owns are divided among its warps, 16 each. What
    is too small to be fast is left out.
    """
    heads, size = (head_size, head_size), itemsize(regime)
    gpu = device.gpu()
    limit, products = gpu.shared_memory, gpu.family.products
    pair_bytes = {"bias": 2, "heavy": 1}.get(regime, 0)
    room = {"gpu": gpu, "dropout": regime == "dropout"}
    options = {"rows": (1 << 20, 1 << 20), "heads": heads, "itemsize": size}
    options |= {"pair_bytes": pair_bytes, **room}
    found = [tuning.choose(kernel, None, regime=regime, **options)]
    if regime == "decode":  # its block of queries holds them all
        shapes = itertools.product([64], (32, 64, 128, 256), (1, 2, 4, 8), (2, 3, 4))
        found += itertools.starmap(Blocks, shapes)
        return [
            blocks
            for blocks in dict.fromkeys(found)
            if tuning.fits(kernel, blocks, heads, size, **room)
        ]
    rows = (16, 32, 64, 128, 256)
    half = size == 2 and head_size <= 256
    left = tuning.LEFT[kernel] if half and products == "wgmma" else 0
    shapes = itertools.product(rows, rows[:-1], (4, 8, 16), (1, 2, 3))
    for sizes, kept in itertools.product(shapes, range(left + 1)):
        blocks = Blocks(*sizes, left_in_registers=kept)
        own, other = blocks.block_q, blocks.block_kv
        if kernel in ("dkv", "dk", "dv"):
            own, other = other, own
        accumulators = 2 if kernel == "dkv" else 0 if kernel == "dbias" else 1
        scores = 1 if kernel in ("forward", "dv") else 2
        values = own * (accumulators * head_size + scores * other)
        in_registers = tuning.LEFT[kernel] if products == "mma.sync" else kept
        values += own * in_registers * head_size * size / 4
        each = values / (32 * blocks.num_warps)  # of a thread's 255 registers
        taken = kernel, blocks, heads, size, pair_bytes
        need = tuning.shared_memory(*taken, products=products)
        large = 2**12 if half and head_size <= 128 else 2**10
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
