"""What the tuner times of the Mosaic GPU kernels: blocks, and when they win.

Candidates are all blocks that a kernel can have by its own declaration of shared memory
(`forward_plan.unfit`, `gradient_blocks.unfit`). A condition of
`pallas_kernels.mosaic_gpu.measured` has problems that grow, `ladder`.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash2 import _api
from jax_flash2.tune.problems import HIDDEN, TOKENS, Problem, Shape, random_mask
from pallas_kernels.backend import Call
from pallas_kernels.configs import Blocks
from pallas_kernels.mosaic_gpu import measured, memory
from pallas_kernels.mosaic_gpu.hopper import forward_plan, gradient_blocks, tuning

BACKEND = measured.BACKEND
KERNELS = tuple(measured.REGIMES)
# A table's size serves those below it, too; 160 is for `backward`, 256 for `dkv`, `dq`.
HEAD_SIZES = (64, 128, 160, 256)
REGIMES = tuple(dict.fromkeys(itertools.chain(*measured.REGIMES.values())))
_FORWARD_SIZES = (64, 128, 256)
_STAGES = range(1, 9)

# Head sizes that have crossover points of their own, each up to it. Where tiles of
# heads are wider than heads, up to 63 and up to 95, a part of the products is lost.
# Above 192 the gradients of a head are made by two kernels.
BANDS = (32, 63, 64, 95, 128, 192, 256)
# What stands for them.
CROSSOVER_SIZES = (32, 48, 64, 80, 128, 160, 256)
# Of the Triton kernels there are 128 rows at least (`measured.Numbers`).
_FEWEST_QUERIES = 128
_LONG = 4096  # rows that a window is a part of


def _size(head_size: int) -> dict[str, int]:
    rows = {"t": TOKENS, "s": TOKENS}
    return {**rows, "h": head_size, "d": head_size}


def kernels(regime: str, head_size: int) -> list[str]:
    """Those that have blocks for a regime and a head size of a table."""
    if regime != "any":
        return ["forward"] if head_size in _FORWARD_SIZES else []
    width = memory.forward_tiles(_size(head_size))
    found = list(tuning.of_backward((width["h"], width["d"])) or [])
    return found + ["dbias"] * (tuning.of_dbias(_size(head_size)) is not None)


def field(kernel: str) -> str:
    """Of `Config`, the field that has a kernel's blocks."""
    return gradient_blocks.FIELDS.get(kernel, kernel)


def problems(regime: str, head_size: int) -> list[Problem]:
    """What the blocks of a regime are chosen on."""
    shape = functools.partial(_shape, head_size)
    if regime == "many keys":
        return [
            Problem(shape(x, causal))
            for x, causal in ((2048, False), (4096, True), (8192, True))
        ]
    if regime == "few keys":
        return [
            Problem(shape(512, False)),
            Problem(shape(1024, True)),
            _with_documents(shape(8192, True), rows=1024),
        ]
    cases = [Problem(shape(x, causal)) for x, causal in ((2048, False), (4096, True))]
    return cases + [
        Problem(shape(2048, True), arrays={"bias": _bias(n, 2048)}, operand="bias")
        for n in (1, shape(2048, True).heads)
    ]


def problems_of(kernel: str, regime: str, head_size: int) -> list[Problem]:
    """Those that a kernel is timed on: with a bias if it is `dbias`."""
    found = problems(regime, head_size)
    return [x for x in found if (kernel == "dbias") == (x.operand is not None)]


def candidates(kernel: str, head_size: int, regime: str) -> list[Blocks]:
    """Blocks that a kernel can have; the table's first."""
    size = _size(head_size)
    if kernel == "forward":
        width = memory.forward_tiles(size)
        heads = width["h"], width["d"]
        own, other = (64, 128, 192), (64, 128, 192, 256)
        unfit = functools.partial(_unfit_forward, heads)
        now = measured.here().blocks_of("forward", max(heads), regime)
    else:
        own, other = gradient_blocks.ROWS_OF_BLOCKS[kernel]
        pair_values = jnp.bfloat16 if kernel == "dbias" else None
        unfit = functools.partial(
            gradient_blocks.unfit, kernel, size=size, pair_values=pair_values
        )
        now = _now(kernel, size)
    found = [now]
    for q, kv, stages in itertools.product(own, other, _STAGES):
        if kernel == "forward":
            warps = q // 16
        else:
            warps = 4 * gradient_blocks.consumers(kernel, Blocks(q, kv, 4, stages))
        blocks = Blocks(q, kv, warps, stages)
        if unfit(blocks=blocks) is None:
            found.append(blocks)
    return list(dict.fromkeys(found))


def _unfit_forward(heads: tuple[int, int], blocks: Blocks) -> str | None:
    return forward_plan.unfit(blocks, heads, jnp.bfloat16)


def _now(kernel: str, size: dict[str, int]) -> Blocks:
    """The table's blocks of a kernel of the backward pass."""
    if kernel == "dbias":
        found = tuning.of_dbias(size)
    else:
        width = memory.forward_tiles(size)
        found = (tuning.of_backward((width["h"], width["d"])) or {}).get(kernel)
    assert found is not None, kernel
    return found


def _shape(head_size: int, length: int, causal: bool) -> Shape:
    heads, batch = max(1, HIDDEN // head_size), max(1, TOKENS // length)
    return Shape(batch, length, heads, heads, head_size, causal, "bfloat16")


def _bias(heads: int, rows: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (1, heads, rows, rows), dtype)


def ladder(condition: str, head_size: int, keys: int) -> list[Problem]:
    """Calls with a condition and about so many keys for a query, on average."""
    shape = functools.partial(_shape, head_size)
    causal, plain = shape(2 * keys, True), shape(max(keys, _FEWEST_QUERIES), False)
    all_keys = functools.partial(Problem, plain, keys=keys)
    if condition == "plain":
        return [all_keys()]
    if condition == "causal":
        return [Problem(causal)]
    if condition == "causal window":
        rows = shape(max(_LONG, 4 * keys), True)
        return [Problem(rows, {"local_window_size": (keys, 0)})]
    if condition == "window":  # of which all later keys are a part
        rows = shape(max(_FEWEST_QUERIES, 8 * (keys // 7)), False)
        return [Problem(rows, {"local_window_size": (rows.length // 2, None)})]
    if condition == "mask":
        mask = {"mask": random_mask(plain.length)[..., :keys]}
        return [all_keys(arrays=mask)]
    if condition == "dropout":
        seed = {"dropout_rng": jax.random.PRNGKey(0)}
        return [all_keys({"dropout_rate": 0.1}, seed)]
    if condition in ("causal lengths", "uneven"):
        rows = causal if condition == "causal lengths" else shape(keys, False)
        if rows.length < _FEWEST_QUERIES:
            return []
        # The longest entry has all keys, so that lengths say little of the average.
        draw = np.random.default_rng(0).integers
        lengths = draw(rows.length // 2, rows.length + 1, rows.batch)
        arrays = {"key_value_seq_lengths": jnp.asarray(lengths, jnp.int32)}
        return [Problem(rows, arrays=arrays)]
    if condition == "documents":
        return [_with_documents(causal, rows=512)]
    if condition == "copied":
        # One row beyond those that TMA copies at once.
        is_copied = head_size > 64 and keys >= _FEWEST_QUERIES
        return [Problem(shape(keys + 1, False))] if is_copied else []
    return [_with_bias(condition, all_keys, plain, keys)]


def _with_documents(shape: Shape, rows: int) -> Problem:
    numbers = np.arange(shape.length) // rows
    numbers = np.broadcast_to(numbers, (shape.batch, shape.length))
    return Problem(shape, arrays={"query_segment_ids": jnp.asarray(numbers, jnp.int32)})


def _with_bias(
    condition: str, problem: Callable[..., Problem], shape: Shape, keys: int
) -> Problem:
    dtype = jnp.float32 if condition == "wide bias" else jnp.bfloat16
    arrays = {"bias": _bias(shape.heads, shape.length, dtype)[..., :keys]}
    if condition == "bias":  # of two operands `dbias` makes no gradient
        arrays["alibi_slopes"] = jnp.exp2(-jnp.arange(1.0, shape.heads + 1))
    operand = "bias" if condition == "bias and its gradient" else None
    return problem(arrays=arrays, operand=operand)


def call_of(problem: Problem) -> Call:
    """The call that a backend is asked about, of shapes."""
    q, k, v, _ = jax.eval_shape(problem.rows, *problem.shape.structs())
    options = {"is_causal": problem.shape.causal, **problem.static}

    found: list[Call] = []

    def check(q, k, v, arrays) -> None:
        call = _api.given(q, k, v, **options, **arrays).checked()
        found.append(call.structs)

    jax.eval_shape(check, q, k, v, problem.arrays)
    return found[0]


def mean_keys(problem: Problem) -> int:
    """Keys for a query, on average, as the library reckons them."""
    call = call_of(problem)
    return call.spec.mean_keys(call.size["s"])


def key(kernel: str, head_size: int) -> int:
    """The size in a table that has the blocks of a kernel for a head size."""
    return min(x for x in measured.here().blocks[kernel] if head_size <= x)


def band(head_size: int) -> int:
    """The size in a table that has the crossover points of a head size."""
    return min(x for x in BANDS if head_size <= x)
