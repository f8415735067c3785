"""Functions of one pair: traced to steps, run on blocks, on intervals, derived."""

from pallas_kernels.core.pointwise import intervals, tables
from pallas_kernels.core.pointwise.binding import (
    Bound,
    Place,
    Positions,
    bind,
    of_bound,
)
from pallas_kernels.core.pointwise.program import (
    DISTANCE,
    FLOAT_REMAINDERS,
    INDICES,
    OPERATIONS,
    SCORE,
    TABLES,
    Program,
    compact,
)
from pallas_kernels.core.pointwise.trace import Traced, float_reads, trace
from pallas_kernels.core.pointwise.walk import NotPointwise

__all__ = [
    "DISTANCE",
    "FLOAT_REMAINDERS",
    "INDICES",
    "OPERATIONS",
    "SCORE",
    "TABLES",
    "Bound",
    "NotPointwise",
    "Place",
    "Positions",
    "Program",
    "Traced",
    "bind",
    "compact",
    "float_reads",
    "intervals",
    "of_bound",
    "tables",
    "trace",
]
