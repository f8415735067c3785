"""Products in registers, by mma.sync: every warp has rows of the left operand.

The 64 rows of a warpgroup are 16 for each warp. Results lie in registers as wgmma's do,
so that `support.ARITHMETIC` is right for them. Right operands come from shared memory
by ldmatrix, the whole tile to every warp.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.mosaic_gpu import support


def zeros(rows: int, columns: int) -> jax.Array:
    """Sums of products before there are any, float32."""
    return plgpu.layout_cast(jnp.zeros((rows, columns)), plgpu.Layout.WGMMA)


def multiply(sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """sums + left @ right."""
    return plgpu.mma(sums, left, right)


def load_left(ref) -> jax.Array:
    """A left operand from global memory."""
    layout = plgpu.Layout.MMA_LHS(ref.dtype)
    return plgpu.load(ref, layout=layout, optimized=False)


def load_right(ref) -> jax.Array:
    """A right operand from a tile in shared memory."""
    return plgpu.load(ref, layout=plgpu.Layout.MMA_RHS(ref.dtype))


def as_left(x: jax.Array) -> jax.Array:
    """A result, rounded to 16 bits, as left operand: the same registers in each thread.

    A product of 16 columns takes as left operand what two of 8 columns gave.
    """
    layout = plgpu.Layout.MMA_LHS(x.dtype)
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @support.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def renamed(_, x):
        to = layout.to_mgpu()
        word = ir.IntegerType.get_signless(32)
        # Without an operation in between, the compiler undoes the change of layout.
        words = (utils.bitcast(r, word) for r in x.registers.flat)
        moved = [utils.bitcast(w, x.registers.flat[0].type) for w in words]
        registers = np.array(moved, dtype=object).reshape(to.registers_shape(x.shape))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=to, _is_signed=x.is_signed
        )

    return renamed(x)
