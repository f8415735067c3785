"""Who computes attention with rows divided over devices, and how.

jax_flash2 with the method that it chooses and with each by name, and what users of JAX
have without it: `jax.nn` after a gathering of all keys, or left to XLA's partitioner,
and Transformer Engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_flash2
from benchmarks import context_te
from benchmarks.context_calls import AXIS, ROWS, Case, by_rows
from benchmarks.peers import OURS
from jax_flash2._rows import METHODS

Arrays = Mapping[str, Any]


def _ids(case: Case) -> dict[str, np.ndarray]:
    ids = case.ids()
    return {} if ids is None else {"query_segment_ids": ids}


def _natural(case: Case) -> np.ndarray:
    return np.arange(case.total)


@dataclasses.dataclass(frozen=True)
class Peer:
    """An attention function of arrays whose rows are divided.

    Attributes:
      name: what flags and rows call it.
      label: what tables call it.
      build: of a case and a mesh: a function of query, key, value and other arrays. May
        raise ImportError, or NotImplementedError.
      order: of a case: which row is where.
      arrays: of a case: other arrays [1, total], in the order of rows.
      setting: of a mesh: a context in which the function is traced and compiled.
      ours: whether it is jax_flash2.
    """

    name: str
    label: str
    build: Callable[[Case, Mesh], Callable]
    order: Callable[[Case], np.ndarray] = _natural
    arrays: Callable[[Case], dict[str, np.ndarray]] = _ids
    setting: Callable[[Mesh], Any] = lambda mesh: contextlib.nullcontext()
    ours: bool = False

    def passes(self, case: Case, mesh: Mesh) -> dict[str, Callable]:
        """Functions of query, key, value, output gradient and other arrays."""
        attention = self.build(case, mesh)

        def forward(q, k, v, do, arrays):
            del do
            return (attention(q, k, v, arrays),)

        def both(q, k, v, do, arrays):
            out, vjp = jax.vjp(lambda *x: attention(*x, arrays), q, k, v)
            return (out, *vjp(do))

        return {"forward": forward, "forward_backward": both}

    def placed(self, case: Case, mesh: Mesh) -> dict[str, jax.Array]:
        """The other arrays, with the rows that each device needs."""
        order = self.order(case)
        return {
            name: jax.device_put(x[:, order], by_rows(mesh))
            for name, x in self.arrays(case).items()
        }


def _ours(method: str | None, case: Case, mesh: Mesh) -> Callable:
    def local(q, k, v, arrays):
        context = case.context(method)
        return jax_flash2.attention(
            q, k, v, **case.options(), **arrays, context=context
        )

    return jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS)


def chosen(case: Case, mesh: Mesh) -> str | None:
    """The method that jax_flash2 chooses; None for one device."""
    texts = []

    def local(q, k, v, arrays):
        context = case.context(None)
        found = jax_flash2.explain(q, k, v, **case.options(), **arrays, context=context)
        texts.append(found)
        return q

    function = jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    jax.eval_shape(function, *case.structs(by_rows(mesh))[:3], _ids(case))
    name = re.search(r"^context: (\w+)", texts[0], re.M)
    return name[1] if name and name[1] in METHODS else None


def _kept(case: Case, rows, arrays: Arrays, ids) -> jax.Array | None:
    """A mask [1, 1, T, total] of queries at `rows`; None if all pairs are kept."""
    keys = jnp.arange(case.total)
    kept = None
    if case.mask.causal:
        kept = rows[:, None] >= keys
    if case.mask.window is not None:
        kept = kept & (rows[:, None] < keys + case.mask.window)
    if ids is not None:
        kept = kept & (arrays["query_segment_ids"][0, :, None] == ids[0])
    return None if kept is None else kept[None, None]


def _gathered(implementation: str, case: Case, mesh: Mesh) -> Callable:
    """`jax.nn` on each device's queries and all keys: a user's first way."""

    def local(q, k, v, arrays):
        def everything(x):
            return lax.all_gather(x, AXIS, axis=1, tiled=True)

        k, v = everything(k), everything(v)
        ids = arrays.get("query_segment_ids")
        rows = lax.axis_index(AXIS) * case.rows + jnp.arange(case.rows)
        mask = _kept(case, rows, arrays, None if ids is None else everything(ids))
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, implementation=implementation
        )

    # jax.nn's cuDNN knows nothing of varying types.
    return jax.shard_map(
        local, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False
    )


def _partitioned(implementation: str, case: Case, mesh: Mesh) -> Callable:
    """`jax.nn` on all rows, and XLA divides it as the operands are."""

    def attention(q, k, v, arrays):
        ids = arrays.get("query_segment_ids")
        window = case.mask.window
        out = jax.nn.dot_product_attention(
            *(q, k, v),
            is_causal=case.mask.causal,
            local_window_size=None if window is None else (window - 1, 0),
            mask=None if ids is None else (ids[:, :, None] == ids[:, None])[:, None],
            implementation=implementation,
        )
        return lax.with_sharding_constraint(out, by_rows(mesh))

    def divided(q, k, v, arrays):
        # Of the gradients, too.
        q, k, v = (lax.with_sharding_constraint(x, by_rows(mesh)) for x in (q, k, v))
        return attention(q, k, v, arrays)

    return divided


def _all() -> list[Peer]:
    found = [
        Peer(
            *(OURS, OURS, functools.partial(_ours, None), Case.order),
            ours=True,
        )
    ]
    found += [
        Peer(
            *(name, f"{OURS}, {name}", functools.partial(_ours, name), Case.order),
            ours=True,
        )
        for name in METHODS
    ]
    labels = {"cudnn": "cuDNN (jax.nn)", "xla": "XLA standard"}
    for name, label in labels.items():
        gathered = functools.partial(_gathered, name)
        found.append(Peer(f"{name}_gathered", f"{label}, all_gather", gathered))
    for name, label in labels.items():
        divided = functools.partial(_partitioned, name)
        found.append(Peer(f"{name}_partitioned", f"{label}, by XLA", divided))
    for name, strategy in context_te.STRATEGIES.items():
        found.append(
            Peer(
                *(f"te_{name}", f"Transformer Engine, {name}"),
                functools.partial(context_te.build, strategy),
                functools.partial(context_te.order, strategy),
                context_te.arrays,
                context_te.setting,
            )
        )
    return found


PEERS = {peer.name: peer for peer in _all()}
EVERYWHERE = [OURS, "ring", "gather", "heads", "xla_gathered", "xla_partitioned"]
ON_GPUS = [
    *(OURS, "ring", "gather", "heads"),
    *("cudnn_gathered", "cudnn_partitioned", "xla_gathered", "xla_partitioned"),
    *(f"te_{name}" for name in context_te.STRATEGIES),
]
