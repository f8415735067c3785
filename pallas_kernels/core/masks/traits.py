"""What is known of a mask without data, for the choice of kernels."""

from __future__ import annotations

import dataclasses


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a call must know of an atom beside its pairs and its ranges.

    Traits of atoms add up: `&` gives those of pairs that both keep, `|` of pairs that
    either keeps.

    Attributes:
      is_positional: whether the atom asks where rows stand (`q_pos`, `kv_pos`).
      is_absolute: whether it asks for more than the distance of query and key.
      reach: how many positions before and after itself a query attends; None is
        without a bound.
      cost_grows: whether later query rows attend more keys, so that they should start
        first.
      cost_is_monotone: whether it is known without data that query rows attend equally
        many keys, or later rows more.
      is_sparse: whether most queries attend few of the keys, as far as one can know
        without data.
      keeps_own_key: whether it is known that each query attends the key of its own
        number, where queries and keys have the same positions.
      keeps_first_key: whether it is known that each query attends the first key, or
        that none attends any, where queries stand at or after it. Padding of queries
        does not count.
    """

    is_positional: bool
    is_absolute: bool
    reach: tuple[int | None, int | None]
    cost_grows: bool
    cost_is_monotone: bool
    is_sparse: bool
    keeps_own_key: bool
    keeps_first_key: bool

    @property
    def is_causal(self) -> bool:
        """Whether no query attends a key that stands after it."""
        return self.reach[1] == 0

    @property
    def is_windowed(self) -> bool:
        """Whether queries attend no more than so many of the keys before them."""
        return self.reach[0] is not None

    def __and__(self, other: Traits) -> Traits:
        return Traits(
            is_positional=self.is_positional or other.is_positional,
            is_absolute=self.is_absolute or other.is_absolute,
            reach=(
                _least(self.reach[0], other.reach[0]),
                _least(self.reach[1], other.reach[1]),
            ),
            cost_grows=self.cost_grows or other.cost_grows,
            cost_is_monotone=self.cost_is_monotone and other.cost_is_monotone,
            is_sparse=self.is_sparse or other.is_sparse,
            keeps_own_key=self.keeps_own_key and other.keeps_own_key,
            keeps_first_key=self.keeps_first_key and other.keeps_first_key,
        )

    def __or__(self, other: Traits) -> Traits:
        def farthest(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else max(a, b)

        return Traits(
            is_positional=self.is_positional or other.is_positional,
            is_absolute=self.is_absolute or other.is_absolute,
            reach=(
                farthest(self.reach[0], other.reach[0]),
                farthest(self.reach[1], other.reach[1]),
            ),
            cost_grows=self.cost_grows and other.cost_grows,
            cost_is_monotone=self.cost_is_monotone and other.cost_is_monotone,
            is_sparse=self.is_sparse and other.is_sparse,
            keeps_own_key=self.keeps_own_key or other.keeps_own_key,
            keeps_first_key=self.keeps_first_key and other.keeps_first_key,
        )


# Of a call without a mask.
ALL = Traits(
    is_positional=False,
    is_absolute=False,
    reach=(None, None),
    cost_grows=False,
    cost_is_monotone=True,
    is_sparse=False,
    keeps_own_key=True,
    keeps_first_key=True,
)
