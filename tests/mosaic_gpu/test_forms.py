"""The functions of `pallas_kernels.core` lower in Mosaic GPU kernels, too.

Mosaic GPU, the other of Pallas's ways to a GPU, knows fewer operations than Triton:
vectors and row numbers must have the shape of their block. So it gets its own
`Arithmetic`. Only lowered here: what a warpgroup of a Hopper GPU would run.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import flash2
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.masks import Lengths, SegmentIds, Window
from pallas_kernels.core.pairs import Pairs
from pallas_kernels.core.scores import Alibi, Score, SoftCap
from pallas_kernels.core.spec import AttentionSpec
from tests.lowering import lower_for_gpu

ROWS, KEYS, HEAD = 64, 128, 64
F32, BF16 = jnp.float32, jnp.bfloat16


def _along(x, axis, shape):
    return lax.broadcast_in_dim(x, shape, (len(shape) + axis,))


def _numbers(start, axis, shape):
    return start + lax.broadcasted_iota(jnp.int32, shape, axis)


MOSAIC = Arithmetic(along=_along, numbers=_numbers, constant=lambda x: x)


def _load(ref, rows, axis):
    """A vector of the rows of a block, or of its columns, as products deal them."""
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref.at[pl.ds(0, rows)], *index, layout=layout, optimized=False)


def _product(shape, a, b):
    def run(sum_ref):
        plgpu.wgmma(sum_ref, a, b)
        return sum_ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, F32))


def lowered(body) -> str:
    """The module of a kernel whose body gets products and vectors of a block.

    Args:
      body: `body(qk, product, rows, keys)` of the products of queries and keys, a
        function p -> p @ v, a float32 for each row, an int32 for each key. It returns
        a block [ROWS, HEAD].
    """
    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    shapes = [(ROWS, HEAD), (KEYS, HEAD), (KEYS, HEAD)]

    def kernel(q, k, v, rows, keys, out, q_tile, k_tile, v_tile, barrier):
        for ref, tile in ((q, q_tile), (k, k_tile), (v, v_tile)):
            plgpu.copy_gmem_to_smem(ref, tile, barrier)
        plgpu.barrier_wait(barrier)
        old = jax.__version_info__ < (0, 11)
        k_t = plgpu.transpose_ref(k_tile, (1, 0)) if old else k_tile.T
        qk = _product((ROWS, KEYS), q_tile, k_t)
        product = lambda p: _product((ROWS, HEAD), p.astype(BF16), v_tile)  # noqa: E731
        found = body(qk, product, _load(rows, ROWS, 0), _load(keys, KEYS, 1))
        q_tile[...] = found.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out)
        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((ROWS, HEAD), BF16),
        scratch_types=[
            *(plgpu.SMEM(shape, BF16, transforms=tile) for shape in shapes),
            plgpu.Barrier(num_arrivals=3, num_barriers=1),
        ],
        grid=(4,),
        grid_names=("i",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )
    structs = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    structs += [jax.ShapeDtypeStruct((n,), t) for n, t in ((ROWS, F32), (KEYS, "i4"))]
    return lower_for_gpu(call, *structs)


def _spec(name, rows, keys) -> AttentionSpec:
    """As it is in a kernel, with what lies along rows or keys in the block's shape."""
    at, shape = lax.axis_index("i"), (ROWS, KEYS)
    ids = _along(rows.astype(jnp.int32), -2, shape), _along(keys, -1, shape)
    plain, causal = Score(0.1), (Window(None, 0),)
    return {
        "plain": AttentionSpec(plain),
        "causal": AttentionSpec(plain, causal),
        "window": AttentionSpec(plain, (Window(5, 7),), offset=at),
        "lengths": AttentionSpec(plain, (Lengths(at, at + 3), Lengths(None, 100))),
        "segments": AttentionSpec(plain, (*causal, SegmentIds(*ids))),
        "soft cap": AttentionSpec(Score(0.1, (SoftCap(3.0),)), causal),
        "alibi": AttentionSpec(Score(0.1, (Alibi(jnp.float32(0.5)),)), causal),
    }[name]


FEATURES = ["plain", "causal", "window", "lengths", "segments", "soft cap", "alibi"]


def _pairs(spec) -> Pairs:
    at = lax.axis_index("i")
    rows = {"t": (at * ROWS, ROWS), "s": (at * KEYS, KEYS)}
    return Pairs(spec, rows, arithmetic=MOSAIC)


@pytest.mark.parametrize("name", FEATURES)
def test_forward(name):
    def body(qk, product, rows, keys):
        spec = _spec(name, rows, keys)
        state = flash2.State(rows, rows, product(qk))
        scores = _pairs(spec).scores_of(qk, BF16)
        state = flash2.step(state, scores, product, MOSAIC)
        state = flash2.accumulate(state, scores, product, MOSAIC)
        return flash2.finish(state, None, MOSAIC)[0]

    assert "mosaic_gpu" in lowered(body)


@pytest.mark.parametrize("name", FEATURES)
def test_backward(name):
    def body(qk, product, rows, keys):
        pairs = _pairs(_spec(name, rows, keys))
        again = pairs.recompute(pairs.scores_of(qk, BF16), pairs.along(rows, "t"))
        return product(again.dz(qk, pairs.along(rows, "t")) + again.dropped)

    assert "mosaic_gpu" in lowered(body)


def test_walks_of_two_kinds_of_warps():
    """One that computes folds a range, one that loads walks it by number."""

    def body(qk, product, rows, keys):
        del rows, keys
        at = lax.axis_index("i")
        spec = AttentionSpec(Score(0.1), (Window(300, 200), Lengths(None, at * 5)))
        blocks = spec.kv_blocks(at * ROWS, at * ROWS + ROWS, 1000, KEYS)
        scaled = blocks.fold(lambda masked, j, x: x * (1.5 + masked), qk)

        def walk(index, total):
            masked, block = blocks.at(index)
            return total + block + masked.astype(jnp.int32)

        total = lax.fori_loop(jnp.int32(0), blocks.count, walk, jnp.int32(0))
        return product(scaled * total.astype(F32))

    assert "mosaic_gpu" in lowered(body)


def test_rows_that_were_not_in_range():
    def body(qk, product, rows, keys):
        del keys
        state = flash2.State(rows, rows, product(qk))
        lost = jnp.max(jnp.where(flash2.in_range(state, BF16), 0, 1)) > 0
        return lax.cond(lost, lambda: state.acc * 2, lambda: state.acc)

    assert "mosaic_gpu" in lowered(body)
