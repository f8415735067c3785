"""ALiBi: a slope for each head times the distance (Press et al. 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.scores.base import Setting, Term, TermTraits, term_dataclass


@term_dataclass(data=("slopes",))
class Alibi(Term):
    """Subtracts slope * |query position - key position|; one slope for each head."""

    slopes: Any
    traits = TermTraits(
        is_positional=True,
        is_absolute=False,
        may_mask=False,
        keeps_lowest=True,
        is_additive=True,
        is_heavy=False,
        maximum_may_grow=True,  # scores are highest amid the keys
    )
    kept = "nothing"
    arguments: ClassVar = {"slopes": "alibi_slopes"}

    @property
    def operands(self) -> dict[str, Any]:
        return {"slopes": self.slopes}

    def apply(self, scores: Scores, setting: Setting) -> Scores:
        place = setting.place
        assert place is not None
        slopes = self.slopes * (1 / scores.unit)
        if setting.is_separable and place.is_causal:
            x, row = scores.x + slopes * place.key, slopes * place.query
            return scores._replace(x=x, row=row)
        return scores._replace(x=scores.x - slopes * setting.distance)

    def pull(self, ds, kept, setting, may_mask):
        return ds

    def pull_operand(self, name, ds, kept, setting):
        return -ds * setting.distance

    def push(self, ds, tangents, kept, setting):
        if "slopes" not in tangents:
            return ds
        return ds - tangents["slopes"] * setting.distance
