"""What masks by arrays of rows have in common."""

from __future__ import annotations

import abc
from collections.abc import Mapping

from pallas_kernels.core.masks.base import Atom, Limits
from pallas_kernels.core.masks.relation import Relation, Tiling
from pallas_kernels.core.positions import Positions


class ArrayMask(Atom):
    """An atom that arrays of rows decide: it has `block_relation` in place of ranges.

    How many keys a query attends is not known without data.
    """

    has_ranges = False
    ranges_are_exact = False
    limits = Limits()

    def mean_keys(self, kv_size: int) -> float:
        return kv_size

    def of_rows(self, positions: Positions, size: Mapping[str, int]) -> Atom:
        del positions, size
        return self

    @abc.abstractmethod
    def block_relation(self, tiling: Tiling) -> Relation: ...
