"""A term of the score that the library lacks: nothing outside this file knows it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.flash2 import Scores
from pallas_kernels.core.scores import Setting, Term, TermTraits
from pallas_kernels.core.scores.base import term_dataclass


@term_dataclass(data=("gain",))
class Gain(Term):
    """s + gain * s**2 / 8, with a gain for each head."""

    gain: Any
    traits = TermTraits(
        is_positional=False,
        is_absolute=False,
        may_mask=False,
        keeps_lowest=False,  # the square of -inf is inf
        is_additive=False,
        is_heavy=False,
        maximum_may_grow=False,
    )
    kept = "argument"

    @property
    def operands(self) -> dict[str, Any]:
        return {"gain": self.gain}

    def apply(self, scores: Scores, setting: Setting) -> Scores:
        x = scores.settled.x
        return Scores(x + self.gain * (x * x * 0.125), 1.0)

    def pull(self, ds, kept, setting, may_mask):
        return ds * (1.0 + self.gain * (self._finite(kept, may_mask) * 0.25))

    def pull_operand(self, name, ds, kept, setting):
        x = self._finite(kept, True)
        return ds * (x * x * 0.125)

    def push(self, ds, tangents, kept, setting):
        x = self._finite(kept, True)
        ds = ds * (1.0 + self.gain * (x * 0.25))
        return ds + tangents["gain"] * (x * x * 0.125) if "gain" in tangents else ds

    @staticmethod
    def _finite(kept: Scores, may_mask: bool):
        """ds is 0 where the argument is -inf."""
        return jnp.maximum(kept.x, -1e9) if may_mask else kept.x


class InNumPy:
    """The same for `tests.oracle`, of scores [*B, N, T, S] and a gain [N]."""

    @staticmethod
    def value(s, gain):
        return s + gain[:, None, None] * s**2 / 8

    @staticmethod
    def slope(s, gain):
        return 1 + gain[:, None, None] * s / 4

    @staticmethod
    def of_operand(s):
        return np.square(s) / 8
