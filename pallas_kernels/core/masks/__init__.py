"""Masks: which (query, key) pairs are kept. One file a kind, `base` for the contract.

The mask of a call is the AND of its atoms (`core.spec`). Two atoms combine to one with
`&` and `|`.
"""

from pallas_kernels.core.masks.base import Atom, Limits, Relation, Tiling, Traits
from pallas_kernels.core.masks.dense import DenseMask
from pallas_kernels.core.masks.known import split
from pallas_kernels.core.masks.lengths import Lengths
from pallas_kernels.core.masks.listed import Listed
from pallas_kernels.core.masks.mod import MaskMod
from pallas_kernels.core.masks.segments import SegmentIds
from pallas_kernels.core.masks.starts import Starts
from pallas_kernels.core.masks.tree import Tree
from pallas_kernels.core.masks.window import Window

__all__ = [
    "Atom",
    "DenseMask",
    "Lengths",
    "Limits",
    "Listed",
    "MaskMod",
    "Relation",
    "SegmentIds",
    "Starts",
    "Tiling",
    "Traits",
    "Tree",
    "Window",
    "split",
]
