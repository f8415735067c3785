"""Scores: how a product q.k becomes one. One file a term, `base` for the contract.

`score.Score` folds the terms of a call in the order of the equation.
"""

from pallas_kernels.core.scores.alibi import Alibi
from pallas_kernels.core.scores.base import PairPositions, Setting, Term, TermTraits
from pallas_kernels.core.scores.bias import Bias, masking_bias
from pallas_kernels.core.scores.mod import ScoreMod
from pallas_kernels.core.scores.score import Score
from pallas_kernels.core.scores.soft_cap import SoftCap

__all__ = [
    "Alibi",
    "Bias",
    "PairPositions",
    "Score",
    "ScoreMod",
    "Setting",
    "SoftCap",
    "Term",
    "TermTraits",
    "masking_bias",
]
