"""Functions of pairs, which cases have as their `score_mod` and `mask_mod`.

Each is a pytree of the arrays that it captures: as an argument of a compiled function,
and in gradients and tangents, it stands for these. Beside what `attention` calls is the
same in NumPy, for `tests.oracle`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from tests.cases import Case


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Learnt:
    """s' = s (1 + tanh(gain[h]) / 2) + (keys[b, kv] / 2 where kv < q).

    Attributes:
      gain: [N], has a gradient.
      keys: [product of B, S], has a gradient.
    """

    gain: Any
    keys: Any

    def __call__(self, score, b, h, q, kv):
        score = score * (1 + 0.5 * jnp.tanh(self.gain[h]))
        return score + jnp.where(kv < q, 0.5 * self.keys[b, kv], 0.0)

    def in_numpy(self, s: np.ndarray, position: np.ndarray):
        """The scores, and their derivatives by s and by each array, [*B, N, T, S].

        Args:
          s: scores [*B, N, T, S].
          position: of queries, [*B, 1, T, 1].
        """
        gain, keys = (np.asarray(x).astype(s.dtype) for x in (self.gain, self.keys))
        tanh = np.tanh(gain)[:, None, None]
        half = np.where(np.arange(s.shape[-1]) < position, 0.5, 0.0).astype(s.dtype)
        slope = 1 + tanh / 2
        more = half * keys.reshape(*s.shape[:-3], 1, 1, s.shape[-1])
        of = {"score_mod_gain": s * (1 - tanh**2) / 2, "score_mod_keys": half}
        return s * slope + more, slope, of

    @staticmethod
    def summed(name: str, x: np.ndarray) -> np.ndarray:
        """Terms of pairs, [*B, N, T, S], summed to the array's shape."""
        if name == "score_mod_gain":
            return x.sum((-2, -1)).reshape(-1, x.shape[-3]).sum(0)
        return x.sum((-3, -2)).reshape(-1, x.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Relative:
    """s' = s + table[h, q - kv], whose ends stand for all distances beyond them.

    Attributes:
      table: [N, 2 far + 1], distance 0 in the middle; has a gradient.
    """

    table: Any

    def _places(self, distance):
        far = self.table.shape[-1] // 2
        return distance.clip(-far, far) + far

    def __call__(self, score, b, h, q, kv):
        return score + self.table[h, self._places(q - kv)]

    def in_numpy(self, s: np.ndarray, position: np.ndarray):
        """As `Learnt.in_numpy`."""
        table = np.asarray(self.table).astype(s.dtype)
        heads = np.arange(s.shape[-3])[:, None, None]
        found = table[heads, self._places(position - np.arange(s.shape[-1]))]
        of = {"score_mod_table": np.ones((), s.dtype)}
        return s + found, 1.0, of

    def summed(self, name: str, x: np.ndarray) -> np.ndarray:
        """As `Learnt.summed`, with as many positions as rows."""
        del name
        rows, keys = map(np.arange, x.shape[-2:])
        places = self._places(rows[:, None] - keys).ravel()
        x = x.reshape(-1, x.shape[-3], rows.size * keys.size).sum(0)
        size = self.table.shape[-1]
        return np.stack([np.bincount(places, of_head, size) for of_head in x])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """Keeps a pair where keys[b, kv] <= rows[b, q].

    Attributes:
      rows: [product of B, T], int32.
      keys: [product of B, S], int32.
    """

    rows: Any
    keys: Any

    def __call__(self, b, h, q, kv):
        return self.keys[b, kv] <= self.rows[b, q]

    def in_numpy(self, position: np.ndarray) -> np.ndarray:
        """Of positions of queries, [*B, 1, T, 1]: which pairs are kept, [*B, 1, T, S].

        A position beyond the rows has the number of the nearest.
        """
        rows, keys = map(np.asarray, (self.rows, self.keys))
        batch = position.shape[:-3]
        rows = rows.reshape(*batch, 1, -1, 1)
        position = np.clip(position, 0, rows.shape[-2] - 1)
        keys = keys.reshape(*batch, 1, 1, -1)
        return keys <= np.take_along_axis(rows, position, axis=-2)


def is_data(x: Any) -> bool:
    """Whether an argument is an array, or one of these functions of arrays."""
    return isinstance(x, np.ndarray | jax.Array | Learnt | Relative | Kept)


def learnt(rng, case: Case) -> dict:
    entries = math.prod(case.batch)
    arrays = rng.standard_normal(case.n), rng.standard_normal((entries, case.s))
    return {"score_mod": Learnt(*(jnp.asarray(x, jnp.float32) for x in arrays))}


def kept(rng, case: Case) -> dict:
    """Half of the queries skip whole blocks of keys, and nobody attends to some keys.

    In each batch entry these are the first queries or the last ones. The blocks begin
    and end at a power of two, as the kernels' blocks do.
    """
    entries = math.prod(case.batch)
    first = 16 * 2 ** max(math.floor(math.log2(max(case.s, 1) / 32)), 0)
    key = np.arange(case.s)
    keys = np.tile((key >= first) & (key < 2 * first), (entries, 1)).astype(np.int32)
    keys[rng.random(keys.shape) < 0.1] = 2
    flips = rng.random((entries, 1)) < 0.5
    rows = (np.arange(case.t) < case.t // 2) ^ flips
    return {"mask_mod": Kept(*(jnp.asarray(x, jnp.int32) for x in (rows, keys)))}
