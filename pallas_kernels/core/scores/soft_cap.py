"""A soft cap: no score is larger in size than it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.scores.base import Setting, Term, TermTraits, term_dataclass


@term_dataclass(meta=("cap",))
class SoftCap(Term):
    """cap * tanh(s / cap), with a static cap > 0."""

    cap: float
    traits = TermTraits(
        is_positional=False,
        is_absolute=False,
        may_mask=False,
        keeps_lowest=False,
        is_additive=False,
        is_heavy=True,
        maximum_may_grow=False,
    )
    kept = "result"  # all of the score is in x: the hyperbolic tangent

    @property
    def operands(self) -> dict[str, Any]:
        return {}

    def apply(self, scores: Scores, setting: Setting) -> Scores:
        x = setting.tanh(scores.x * (scores.unit / self.cap))
        return scores._replace(x=x, unit=self.cap)

    def pull(self, ds, kept, setting, may_mask):
        return ds * self._slope(kept, may_mask)

    def push(self, ds, tangents, kept, setting):
        return ds * self._slope(kept, True)

    def _slope(self, kept: Scores | None, may_mask: bool):
        assert kept is not None
        x = (
            jnp.maximum(kept.x, -1.0) if may_mask else kept.x
        )  # -inf has a cotangent of 0
        return 1.0 - x * x
