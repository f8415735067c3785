"""A bound on the registers of a kernel's threads.

The compiler takes up to 255 of them where it sees a use, and the 65,536 of a
multiprocessor then serve fewer programs, which could hide each other's waits. Triton
hands a bound on to it (`.maxnreg` in PTX) from an attribute of the module, for which
Pallas has no parameter: a scalar of the kernel passes through an operation that sets it
while it is lowered.
"""

from __future__ import annotations

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

try:
    from jax._src.pallas.triton.lowering import register_lowering
except ImportError:  # a private name: without it kernels are as right, and less fast
    register_lowering = None

_ATTRIBUTE = "ttg.maxnreg"

_with_registers = Primitive("with_registers")
_with_registers.def_abstract_eval(lambda x, *, most: x)
mlir.register_lowering(_with_registers, lambda ctx, x, *, most: [x])  # interpreted


def _lower(ctx, x: ir.Value, *, most: int) -> ir.Value:
    del ctx
    module = ir.InsertionPoint.current.block.owner
    while module.name != "builtin.module":
        module = module.parent
        assert module is not None
    number = ir.IntegerType.get_signless(32)
    module.attributes[_ATTRIBUTE] = ir.IntegerAttr.get(number, most)
    return x


if register_lowering is not None:
    register_lowering(_with_registers)(_lower)


def with_registers(x: jax.Array, most: int | None) -> jax.Array:
    """The scalar x, in a kernel whose threads use at most so many registers."""
    if most is None or register_lowering is None:
        return x
    return _with_registers.bind(x, most=most)
