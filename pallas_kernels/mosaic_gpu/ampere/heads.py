"""Keys and values as cp.async copies them: the heads of a row are one axis.

JAX lowers such a copy only of a part of the last two axes. The axes between rows and
head elements are adjacent to these, so that the array with one axis in their place has
the same bytes.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.core.axes import Named
from pallas_kernels.layout import Rows
from pallas_kernels.program import Where

_AXIS = "heads"


@dataclasses.dataclass(frozen=True)
class RowHeads:
    """The heads, and perhaps batch entries, of a row of keys.

    Attributes:
      sizes: of the axes that lie after `s`, by name, the head elements last.
    """

    sizes: dict[str, int]

    @classmethod
    def of(cls, x: Named) -> RowHeads:
        """Of an operand with axes `s` and, at the end, `h` or `d`."""
        x = x.squeezed()
        after = x.axes.index("s") + 1
        pairs = zip(x.axes[after:], x.shape[after:], strict=True)
        return cls({str(name): size for name, size in pairs})

    def array(self, x: Named) -> Named:
        """The operand with one axis for all of them."""
        x = x.squeezed()
        kept = x.axes[: -len(self.sizes)]
        shape = *x.shape[: len(kept)], math.prod(self.sizes.values())
        return Named(x.value.reshape(shape), (*kept, _AXIS))

    def at(self, where: Where) -> Where:
        """`where`, with where its head lies in the axis of all."""
        *names, elements = self.sizes
        number = jnp.int32(0)
        for name in names:
            number = number * self.sizes[name] + where[name]
        width = self.sizes[elements]
        return {**where, _AXIS: Rows(number * width, width)}
