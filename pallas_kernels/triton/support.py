"""What differs between JAX versions, and the GPU's own instructions."""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import configs, device
from pallas_kernels.core import axes, pointwise
from pallas_kernels.core.arithmetic import Arithmetic
from pallas_kernels.core.flash2 import Block
from pallas_kernels.triton.estimates import SPLIT_ITEMSIZE
from pallas_kernels.triton.packed import Packed

# Of functions of pairs: what kernels make of them (`Call.lacking`).
_LACKING = "digamma erf erf_inv erfc lgamma round"
_NARROW = {f"arrays of {x}" for x in ("int8", "int16", "uint8", "uint16")}
OPERATIONS = pointwise.OPERATIONS - {*_LACKING.split()}
OPERATIONS |= {pointwise.TABLES, *_NARROW}
# For some arguments a thread branches here, while products run beside it.
# What ptxas makes of that is wrong where these are wgmma's (benchmarks/lab/123).
_BRANCHING = "atan atan2 cos pow sin tan"


def operations(interpret: bool) -> frozenset[str]:
    """Of functions of pairs, those that kernels have on the GPU that is meant."""
    if interpret or device.gpu().family.products != "wgmma":
        return OPERATIONS
    return OPERATIONS - {*_BRANCHING.split()}


@contextlib.contextmanager
def lowering_context():
    """In which kernels are traced and lowered.

    Hides upstream's note that its Triton backend is deprecated (JAX >= 0.11), and keeps
    indices in 32 bits where the caller has 64 enabled.
    """
    with warnings.catch_warnings(), jax.enable_x64(False):
        warnings.filterwarnings(
            "ignore", message="The Pallas Triton backend is deprecated"
        )
        yield


def pallas_call(kernel, *, blocks: configs.Blocks, interpret: bool, **kwargs):
    params = plgpu.CompilerParams(
        num_warps=blocks.num_warps, num_stages=blocks.num_stages
    )
    return pl.pallas_call(kernel, compiler_params=params, interpret=interpret, **kwargs)


def product_precision(dtype, precision, interpret: bool):
    """How a kernel multiplies blocks of `dtype`, for a caller's `precision`.

    "highest" cuts each float32 in three pieces of bfloat16 and sums the six largest of
    their products: as accurate as float32 (what is left out is 2**-24 of a product), on
    tensor cores, which have no float32 of their own.

    Returns:
      The bytes that an element takes in shared memory, and the precision of `dot`.
    """
    size = jnp.dtype(dtype).itemsize
    if dtype != jnp.float32 or precision is None:
        # For bfloat16 and float16 the products are exact in float32 either way.
        return size, lax.Precision.DEFAULT
    if precision == lax.Precision.HIGHEST and not interpret:
        return SPLIT_ITEMSIZE, lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    return size, precision


def arithmetic(dtype, interpret: bool) -> Arithmetic:
    """The GPU's own instructions, where the interpreter is not asked for."""
    if interpret:
        return Arithmetic()
    # The approximate tanh is off by 2^-11: less than the rounding of bfloat16.
    tanh = jnp.tanh if dtype == jnp.float32 else plgpu.approx_tanh
    return Arithmetic(
        exp2=_exp2,
        where_below=_where_below,
        widened=_widened,
        tanh=tanh,
        wide_product=_wide_product,
    )


def _widened(x: jax.Array | Packed, dtype) -> Block:
    if isinstance(x, Packed):
        return x.unpacked(dtype)
    if x.dtype == jnp.float8_e4m3fn and device.capability() < 89:
        # No instruction converts it. Its bits, moved, are a float16 of 2^-8 the size,
        # but those of NaN.
        bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
        moved = ((bits & 0x7F) << 7) | (bits & jnp.int16(-0x8000))
        x = lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32) * 256.0
        x = jnp.where(bits & 0x7F == 0x7F, jnp.nan, x)
    elif x.dtype == jnp.int8:
        x = x.astype(jnp.float32)
    return x.astype(dtype)


def _exp2(x: jax.Array, scale: float, shift) -> jax.Array:
    """In two instructions, where XLA makes seven.

    XLA multiplies and subtracts apart, and computes results below the normal numbers by
    a comparison and two multiplications more; here they are 0. With one rounding for
    the two, a result may be above 1 by as much as the roundoff of a large shift says.
    """
    bits = np.float32(scale).view(np.uint32)
    (result,) = plgpu.elementwise_inline_asm(
        "{.reg .f32 e; neg.f32 e, $2; "
        f"fma.rn.ftz.f32 e, $1, 0f{bits:08X}, e; ex2.approx.ftz.f32 $0, e;}}",
        args=[x, jnp.broadcast_to(jnp.asarray(shift, x.dtype), x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def in_registers(x: jax.Array) -> jax.Array:
    """x, dealt to threads as a product of its shape is.

    A left operand of products then comes from registers; otherwise Triton reads it from
    shared memory for each of them. The operation is empty, but in Triton's eyes it
    takes x and the product, here of zeros, element by element: so it deals x alike.
    """
    rows, columns = x.shape
    zeros = jnp.zeros((rows, 16), x.dtype), jnp.zeros((16, columns), x.dtype)
    product = axes.product(*zeros, ((1,), (0,)))
    pack = 4 // x.dtype.itemsize
    kept = "=r,0" if pack > 1 else "=f,0"
    (result,) = plgpu.elementwise_inline_asm(
        "",
        args=[x, product],
        constraints=kept + pack * ",f",
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def unforeseen_one(index: jax.Array, interpret: bool) -> jax.Array:
    """An int32 1 that the compiler cannot know before the kernel runs.

    Args:
      index: any int32 scalar of the kernel.
    """
    if interpret:
        return jnp.ones_like(index)
    (one,) = plgpu.elementwise_inline_asm(
        "mov.b32 $0, 1;",
        args=[jnp.broadcast_to(index, (1,))],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), index.dtype)],
    )
    return jnp.max(one)


def _where_below(x: jax.Array, bits: jax.Array, limit: int) -> jax.Array:
    """In two instructions; the compiler would choose after rounding to two bytes."""
    (result,) = plgpu.elementwise_inline_asm(
        f"{{.reg .pred p; setp.lt.u32 p, $2, {limit}; "
        "selp.f32 $0, $1, 0f00000000, p;}",
        args=[x, lax.bitcast_convert_type(bits, jnp.int32)],
        constraints="=f,f,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def _wide_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = jnp.broadcast_arrays(a, b)
    (high,) = plgpu.elementwise_inline_asm(
        "mul.hi.u32 $0, $1, $2;",
        args=[a.astype(jnp.int32), b.astype(jnp.int32)],
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.int32)],
    )
    return high.astype(jnp.uint32), a * b
