"""Blocks of the Triton kernels: from a table, if they fit the GPU.

A block that spills registers runs 3 to 8 times slower, and one that needs more shared
memory than the GPU has does not run at all: so blocks follow from the head size, the
width of the dtype and what is unusual about a call by a table made on a GPU, or made
with the compiler for its family (`pallas_kernels.tables`), and from its shared memory,
unless the caller passes a `Config`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

from pallas_kernels import device, tables, user_tables
from pallas_kernels.configs import KERNELS, LIKE, Blocks, Config
from pallas_kernels.device import Gpu
from pallas_kernels.tables import padded
from pallas_kernels.triton import estimates, tangent_blocks
from pallas_kernels.triton.estimates import OWN_ITEMSIZE, SPLIT_ITEMSIZE

# A table of what is taken where tuned blocks do not fit, from the largest on, by kernel
# and padded head sizes up to the key.
_SMALLER = "Smaller blocks"
# In place of a regime: those alone, which serve every call. None has more rows or keys
# than `tables.FEW_ROWS`.
_ANY_CALL = "any call"

# The head size that an entry of a table is tuned for, if it is not the largest one that
# it serves.
TUNED_SIZES = {192: 160}
# The largest head size of the table of the kernel that sums both gradients.
_LARGEST_SUMMED = 192


def kernels(heads: tuple[int, int]) -> tuple[str, ...]:
    """The kernels that serve blocks of such head sizes of key and value.

    The gradients of key and value come from one kernel, or one each for large heads.
    """
    most = tables.number("triton", "most_summed")
    apart = sum(heads) > most or max(heads) > _LARGEST_SUMMED
    unused = ("dkv",) if apart else ("dk", "dv")
    return tuple(kernel for kernel in KERNELS if kernel not in unused)


def no_power_of_two(blocks: Blocks) -> str | None:
    """A field of the blocks that a kernel cannot have, or None."""
    for name in ("block_q", "block_kv", "num_warps"):
        value = getattr(blocks, name)
        if value & (value - 1):
            return f"{name}={value}"
    return None


# Of the regimes of other elements than those of two bytes.
ITEMSIZES = {"float32": 4, "float32 highest": SPLIT_ITEMSIZE}


def fits(
    kernel: str,
    blocks: Blocks,
    heads: tuple[int, int],
    itemsize: float,
    pair_bytes: int = 0,
    *,
    gpu: Gpu,
    dropout: bool = False,
    looped: str = "s",
) -> bool:
    """Whether a kernel surely has room on a GPU; arguments as for `choose`."""
    sizes = kernel, blocks, heads, itemsize
    more = {"has_bits": dropout, "products": gpu.family.products, "looped": looped}
    if estimates.shared_memory(*sizes, pair_bytes, **more) > gpu.shared_memory:
        return False
    return not gpu.tensor_memory or estimates.tensor_memory(*sizes) <= gpu.tensor_memory


@functools.cache
def _table(gpu: Gpu) -> dict[str, dict[str, dict[str, Blocks]]]:
    """The blocks that serve a GPU, by kernel, padded head size and regime.

    Warns of those in its own table that do not fit it.

    Raises:
      ValueError: if a field of the table is wrong.
    """
    found = {}
    for kernel, heads in tables.table("triton", gpu.kind, gpu.family).items():
        if kernel not in KERNELS:
            raise _wrong(gpu, kernel, f"no such kernel, of {', '.join(KERNELS)}")
        found[kernel] = {
            head: _regimes(gpu, kernel, head, regimes)
            for head, regimes in heads.items()
        }
    return found


def _regimes(gpu: Gpu, kernel: str, head: str, regimes) -> dict[str, Blocks]:
    """Of a table that serves a GPU, the blocks of a kernel for heads of a size."""
    field, found = f"{kernel}, {head}", {}
    if head not in map(str, tables.HEADS):
        raise _wrong(gpu, field, f"no such head size, of {tables.HEADS}")
    for regime, numbers in regimes.items():
        field = f"{kernel}, {head}, {regime}"
        if regime not in tables.REGIMES:
            raise _wrong(gpu, field, f"no such regime, of {', '.join(tables.REGIMES)}")
        try:
            blocks = found[regime] = Blocks(*numbers)
        except (TypeError, ValueError) as error:
            raise _wrong(gpu, field, f"{numbers!r}: {error}") from None
        if odd := no_power_of_two(blocks):
            raise _wrong(gpu, field, f"{odd} is no power of two")
        size = ITEMSIZES.get(regime, 2)
        is_own = tables.serving("triton", gpu.kind) == gpu.kind
        heads = int(head), int(head)
        if is_own and not fits(kernel, blocks, heads, size, gpu=gpu):
            text = f"{numbers!r} may need more memory than it has; others are taken"
            warnings.warn(str(_wrong(gpu, field, text)), stacklevel=2)
    if "plain" not in found:
        raise _wrong(gpu, f"{kernel}, {head}", "no blocks for 'plain'")
    return found


def _wrong(gpu: Gpu, field: str, why: str) -> ValueError:
    path = tables.table_path("triton", tables.serving("triton", gpu.kind, gpu.family))
    return ValueError(f"{path}, of blocks for {gpu.kind}: {field}: {why}")


def _candidates(
    kernel: str,
    heads: tuple[int, int],
    itemsize: float,
    gpu: Gpu,
    regime: str = "plain",
) -> list[Blocks]:
    """From the fastest on, each with fewer stages too; the last needs least."""
    itemsize = 4 if itemsize == OWN_ITEMSIZE else itemsize
    size = min(max(heads), tables.HEADS[-1])  # latent keys are larger
    head, like = str(tables.bucket(size)), LIKE.get(kernel, kernel)
    tuned = _table(gpu).get(like, {}).get(head)
    if tuned is None:
        raise _wrong(gpu, f"{like}, {head}", "no blocks")
    own = user_tables.read("triton", gpu.kind)["blocks"].get(like, {}).get(head, {})
    tuned = tuned | {name: Blocks(*numbers) for name, numbers in own.items()}
    smaller = tables.table("triton", _SMALLER)[like]
    smaller = next(blocks for n, blocks in smaller.items() if size <= int(n))
    regime = {x: name for name, x in ITEMSIZES.items()}.get(itemsize, regime)
    # What was chosen for elements of two bytes is too large for others.
    names = tables.in_order(regime) if itemsize == 2 else [regime]
    found = []
    for blocks in (tuned[name] for name in names if name in tuned):
        fewer = range(blocks.num_stages, min(blocks.num_stages, 2) - 1, -1)
        found += [dataclasses.replace(blocks, num_stages=n) for n in fewer]
    smaller = [Blocks(*blocks) for blocks in smaller]
    if regime == _ANY_CALL:
        # A program has two outputs of float32: of a part of the keys, of those before.
        wide = size > 64
        return [dataclasses.replace(x, num_warps=8) if wide else x for x in smaller]
    if kernel == like:
        return found + smaller
    in_pieces = itemsize == SPLIT_ITEMSIZE
    crowded = in_pieces or (gpu.tensor_memory and size > _LARGEST_SUMMED)
    # The Triton of JAX 0.10 and 0.11 keeps keys, which two products read, in registers.
    keeps_keys = gpu.family.products != "wgmma" and itemsize == 4
    if keeps_keys and size > _LARGEST_SUMMED:
        return smaller[-1:]
    most = 16 if keeps_keys and size > 96 else None
    return tangent_blocks.of(found, smaller, crowded=bool(crowded), most_rows=most)


def smallest(kernel: str, heads: tuple[int, int], itemsize: float, gpu: Gpu) -> int:
    """Bytes of shared memory below which a kernel cannot run with these heads.

    Args:
      kernel, heads, itemsize, gpu: as for `choose`.
    """
    sizes = kernel, _candidates(kernel, heads, itemsize, gpu)[-1], heads, itemsize
    products = gpu.family.products
    need = (estimates.shared_memory(*sizes, products=products, looped=a) for a in "st")
    return max(*need, _room(gpu, *sizes))


def _room(gpu: Gpu, *sizes) -> int:
    """Shared memory that blocks must find to be chosen, whatever they need."""
    is_hopper = gpu.family.products == "wgmma"
    return estimates.room_on_hopper(*sizes) if is_hopper else 0


def choose(
    kernel: str,
    config: Config | None,
    *,
    rows: tuple[int, int],
    heads: tuple[int, int],
    itemsize: float,
    gpu: Gpu,
    pair_bytes: int = 0,
    dropout: bool = False,
    regime: str = "plain",
    looped: str = "s",
) -> Blocks:
    """Blocks for one kernel: the caller's, or the first candidate that fits.

    Args:
      kernel: one of `KERNELS`, or of those in `LIKE`.
      config: the caller's configuration.
      rows: query and key rows; blocks are not larger than these need.
      heads: padded head sizes of key and value.
      itemsize: bytes of an element, `SPLIT_ITEMSIZE` or `OWN_ITEMSIZE`.
      gpu: the GPU, with `smallest` bytes of shared memory at least.
      pair_bytes: bytes of bias and mask for each pair of query and key.
      dropout: whether bits are made for each pair.
      regime: of a call with elements of two bytes, one of `tables.REGIMES`.
      looped: as for `estimates.shared_memory`.

    The blocks of an invariant forward (`Config.invariant`) follow from `heads`,
    `itemsize`, `gpu` and what there is for each pair alone.

    Raises:
      ValueError: if no candidate is known to fit, or the GPU's table is wrong.
    """
    chosen = None if config is None else config.blocks(kernel)
    if chosen is not None:
        return chosen
    if kernel == "forward" and config is not None and config.invariant:
        # One tile for all calls of such heads: rows beyond a call's are padding.
        regime, rows = _ANY_CALL, (tables.FEW_ROWS, tables.FEW_ROWS)
    for blocks in _candidates(kernel, heads, itemsize, gpu, regime):
        sizes = kernel, blocks, heads, itemsize, pair_bytes
        has_room = _room(gpu, *sizes) <= gpu.shared_memory
        more = {"gpu": gpu, "dropout": dropout, "looped": looped}
        if has_room and fits(*sizes, **more):
            return dataclasses.replace(
                blocks,
                block_q=min(blocks.block_q, padded(rows[0])),
                block_kv=min(blocks.block_kv, padded(rows[1])),
            )
    raise ValueError(
        f"implementation='triton': no blocks of {kernel} for head sizes {heads} fit "
        f"{gpu.shared_memory >> 10} KiB of shared memory"
    )


def _unfit(kernel: str, size: int, regime: str, blocks: Blocks) -> str | None:
    """Why a kernel cannot have blocks of a user's table, or None."""
    if odd := no_power_of_two(blocks):
        return f"{odd} is no power of two"
    head = TUNED_SIZES.get(size, size)
    gpu, itemsize = device.gpu(), ITEMSIZES.get(regime, 2)
    room = {"gpu": gpu, "dropout": regime == "dropout"}
    if fits(kernel, blocks, (head, head), itemsize, **room):
        return None
    return f"{blocks} does not fit {gpu.shared_memory >> 10} KiB of shared memory"


user_tables.KNOWN["triton"] = user_tables.Known(
    sizes=dict.fromkeys(KERNELS, tables.HEADS),
    regimes=dict.fromkeys(KERNELS, tables.REGIMES),
    conditions=(),
    unfit=_unfit,
)
