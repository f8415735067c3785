"""Pools of pages as callers give them: checks, and the axes of their layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_flash2._arrays import as_array, as_scale
from pallas_kernels.core import nibbles
from pallas_kernels.core.axes import Axes, Named, bytes_of
from pallas_kernels.core.quantise import STORED

# Axes of a pool by the letters of `kv_layout`, but for "2" and "H".
AXES = {"P": "p", "S": "r", "K": "k"}


@dataclasses.dataclass(frozen=True)
class Pools:
    """The pools of a call, and their sizes."""

    key: Named
    value: Named
    pages: int
    page: int
    heads: int

    @classmethod
    def of(cls, query, key, value, layout: str, value_head_size) -> Pools:
        letters = letters_of(layout)
        both = "2" in letters
        if both and value is not None:
            raise ValueError(
                f"value_pages must be None with kv_layout={layout!r}, of which "
                f"key_pages has both, got an array"
            )
        if not both and (value is None) != (value_head_size is not None):
            raise ValueError(
                "value_head_size must be given if, and only if, value_pages is None, "
                f"got value_head_size={value_head_size!r}"
            )
        if both and value_head_size is not None:
            raise ValueError(
                f"value_head_size must be None with kv_layout={layout!r}, got "
                f"{value_head_size!r}"
            )
        key = _pool("key_pages", key, letters, query.dtype)
        size = dict(zip(letters, key.shape, strict=True))
        size["H"] *= 1 if head_of(key, "h") == "h" else 2
        if both and size["2"] != 2:
            raise ValueError(
                f"key_pages must have an axis of 2 where kv_layout={layout!r} says, "
                f"got shape {key.shape}"
            )
        if size["H"] != query.shape[-1]:
            raise ValueError(
                f"key_pages must have the head size of query, {query.shape[-1]}, got "
                f"{size['H']} (shape {key.shape})"
            )
        heads, n = size["K"], query.shape[-2]
        if (heads == 0 and n != 0) or (heads != 0 and n % heads):
            raise ValueError(
                "key_pages must have a number of heads that divides those of query, "
                f"{n}, got {heads} (shape {key.shape})"
            )
        axes = AXES | {"2": "u0", "H": head_of(key, "h")}
        names: Axes = tuple(axes[x] for x in letters)
        own, head = key, head_of(key, "d")
        if value is not None:
            own = _pool("value_pages", value, letters, query.dtype)
            if own.shape[:-1] != key.shape[:-1]:
                raise ValueError(
                    "value_pages must have the shape of key_pages except for the head "
                    f"size, {key.shape}, got {own.shape}"
                )
            head = head_of(own, "d")
        elif not both:
            if head != "d":
                raise ValueError(
                    "value_head_size must be None for key_pages in uint8 (int4, two "
                    f"elements a byte), got {value_head_size!r}: pass value_pages"
                )
            is_int = isinstance(value_head_size, int | np.integer)
            if not is_int or not 1 <= value_head_size <= size["H"]:
                raise ValueError(
                    f"value_head_size must be an int from 1 to {size['H']}, the head "
                    f"size of keys, got {value_head_size!r}"
                )
            head = f"d{value_head_size}"
        axes = axes | {"2": "u1", "H": head}
        value_names: Axes = tuple(axes[x] for x in letters)
        pools = Named(key, names), Named(own, value_names)
        return cls(*pools, size["P"], size["S"], heads)

    def scale(self, name: str, x, pool: Named, batch: int) -> Named | None:
        """The scale of a quantised pool, with its axes."""
        is_quantised = pool.dtype in STORED
        if x is None:
            return None
        if not is_quantised:
            raise ValueError(
                f"{name} must be None for {name.split('_')[0]}s in {pool.dtype.name}, "
                "which are not quantised, got a scale"
            )
        x = as_scale(name, x, widest=4)
        heads = (self.heads,)
        shapes: dict[tuple[int, ...], Axes] = {
            (self.pages, self.page, 1): ("p", "r", None),
            (self.pages, self.page, *heads): ("p", "r", "k"),
            (batch, *heads): ("b0", "k"),
            heads: ("k",),
            (): (),
        }
        if x.shape not in shapes:
            expected = ", ".join(map(str, reversed(shapes)))
            raise ValueError(
                f"{name} must have one of the shapes {expected}, got shape {x.shape}"
            )
        return Named(x, shapes[x.shape])


def head_of(x, name: str) -> str:
    """The name of the head axis, `name`, of a pool of these elements."""
    return bytes_of(name) if x.dtype == nibbles.BYTES else name


def letters_of(layout: Any) -> str:
    """A `kv_layout`; raises a ValueError if it is none."""
    known = isinstance(layout, str) and layout[-1:] == "H"
    if not known or sorted(layout.replace("2", "", 1)) != sorted("PSKH"):
        raise ValueError(
            "kv_layout must have each of the letters P, S, K and H once, at most one "
            f"2, and end with H, got {layout!r}"
        )
    return layout


def _pool(name: str, x, letters: str, dtype) -> jax.Array:
    x = as_array(name, x)
    if x.dtype != dtype and x.dtype not in STORED:
        raise TypeError(
            f"{name} must have the dtype of query, {dtype.name}, or int8, "
            "float8_e4m3fn, float8_e5m2 or uint8 (int4, two elements a byte), got "
            f"{x.dtype.name}"
        )
    if x.ndim != len(letters):
        axes = ", ".join(letters)
        raise ValueError(
            f"{name} must have axes [{axes}] (kv_layout={letters!r}), got shape "
            f"{x.shape}"
        )
    if x.shape[-1] == 0 or x.shape[letters.index("S")] == 0:
        raise ValueError(
            f"{name} must have pages of at least one row, and a head size of at least "
            f"1, got shape {x.shape}"
        )
    return x
