"""The contract of a backend: a call, its passes, and who makes each of them.

A backend is a module with the functions of `Backend`, and one line in
`jax_flash2._backends`. It may decline a pass by a reason; the next in line makes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.configs import Config
from pallas_kernels.core.axes import Named, batch_axes, group_of, sizes
from pallas_kernels.core.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `attention`: a tree of `Named`, of arrays or of their shapes.

    Attributes:
      query, key, value: `Named`.
      spec: of `Named`: which masks and score features the call has.
      config: the caller's, or None (static).
      precision: of products of float32 operands (static).
    """

    query: Named
    key: Named
    value: Named
    spec: AttentionSpec
    config: Config | None = dataclasses.field(default=None, metadata={"static": True})
    precision: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def operands(self) -> list[Named]:
        """query, key, value, and the leaves of the spec."""
        return jax.tree.leaves(self)

    def argument(self, place: int) -> str:
        """The argument of `attention` that the operand at a place came by, for errors.

        What has fields with other names says so, in `arguments`.
        """
        path, _ = jax.tree.leaves_with_path(self)[place]
        owner: Any = self
        holder, field = owner, ""
        for key in path:
            if isinstance(key, jax.tree_util.GetAttrKey):
                owner, field = holder, key.name
                holder = getattr(owner, field)
            else:  # of a tuple
                holder = holder[key.idx]
        return getattr(owner, "arguments", {}).get(field, field)

    @property
    def structs(self) -> Call:
        """The same with shape structs in place of arrays."""

        def struct(x: Named) -> Named:
            return Named(jax.ShapeDtypeStruct(x.shape, x.dtype), x.axes)

        return jax.tree.map(struct, self)

    @property
    def static(self) -> Hashable:
        """All that plans are made of: the tree, and shapes, dtypes and axes."""
        leaves, tree = jax.tree.flatten(self)
        return tree, tuple((x.axes, x.shape, x.dtype) for x in leaves)

    @property
    def dtype(self):
        return self.query.dtype

    @property
    def is_quantised(self) -> bool:
        """Whether queries, too, have eight bits (`core.quantise`)."""
        return self.dtype.itemsize == 1

    @property
    def reads_bytes(self) -> bool:
        """Whether queries, keys or values have one byte an element."""
        operands = self.query, self.key, self.value
        return any(x.dtype.itemsize == 1 for x in operands)

    @property
    def widened(self) -> Call:
        """The same, of operands in bfloat16 if all of them have eight bits.

        Scales stay with the spec.
        """
        if not self.is_quantised:
            return self
        query, key, value = (
            Named(x.value.astype(jnp.bfloat16), x.axes)
            for x in (self.query, self.key, self.value)
        )
        return dataclasses.replace(self, query=query, key=key, value=value)

    @property
    def has_gradients(self) -> bool:
        """Whether its operands have: no pages, and no eight bits."""
        return self.spec.pages is None and not self.reads_bytes

    @functools.cached_property
    def size(self) -> dict[str, int]:
        """Of every named axis (`core.axes`)."""
        return sizes(self.operands)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Of key and value."""
        return self.size["h"], self.size["d"]

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return group_of(self.size)

    @property
    def flops(self) -> tuple[int, int]:
        """About how many operations the products of both passes have.

        Counted as in FlashAttention's papers: two of each pair and element of a head in
        two products of the forward, and in five of the backward, of the pairs that are
        kept as far as is known without data. XLA's own count knows neither how often a
        loop runs nor what a kernel does (`Compiled.cost_analysis`).
        """
        names = (*batch_axes(self.operands), "n", "t")
        pairs = math.prod(self.size.get(name, 1) for name in names)
        pairs *= self.spec.mean_keys(self.size["s"])
        of_key, of_value = self.head_sizes
        forward = 2 * pairs * (of_key + of_value)
        return forward, 2 * pairs * (3 * of_key + 2 * of_value)

    @property
    def _elements(self) -> list:
        return [math.prod(x.shape) for x in self.operands]

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is a symbol (`jax.export`), which has no number."""
        return not all(isinstance(n, int) for n in self._elements)

    @property
    def most_elements(self) -> int:
        """Of the largest array whose size is a number; pools of pages may be larger."""
        arrays = (x for x in self.operands if "p" not in x.axes)
        sizes = (math.prod(x.shape) for x in arrays)
        return max((n for n in sizes if isinstance(n, int)), default=0)

    def lacking(self, operations: frozenset[str]) -> str | None:
        """Why kernels with these operations alone do not make a call, or None."""
        names = sorted(self.spec.operations - operations)
        if not names:
            return None
        return f"its kernels lack {', '.join(names)} (score_mod or mask_mod)"

    @property
    def interpret(self) -> bool:
        """Whether the caller asks for interpreted kernels."""
        return self.config is not None and self.config.interpret

    @property
    def is_invariant(self) -> bool:
        """Whether the caller wants bits that no cut of the call changes (`Config`)."""
        return self.config is not None and self.config.invariant

    @property
    def is_configured(self) -> bool:
        """Whether the caller's `Config` asks for more than sums in any order."""
        if self.config is None:
            return False
        return dataclasses.replace(self.config, deterministic=True) != Config()

    @property
    def is_deterministic(self) -> bool:
        """Whether sums of gradients must have one order (`Config`)."""
        return self.config is None or self.config.deterministic

    @property
    def differentiable(self) -> dict[str, Named]:
        """What has a gradient, by name: query, key, value, operands of the score, sink.

        Every floating-point array of a call is one of these.
        """
        spec = self.spec
        named = {"query": self.query, "key": self.key, "value": self.value}
        named |= spec.score.operands
        return named if spec.sink is None else {**named, "sink": spec.sink}


Pass = Literal["forward", "backward", "operand_gradients", "tangent"]


class Plan:
    """How the kernels of a backend make a pass of a call.

    Attributes:
      slower: why the next backend in line is faster, as measured; None where it is not.
        The next one then makes the pass, unless the caller names this one.
      words: how the work is divided, for `jax_flash2.explain`; none if it is not.
    """

    slower: str | None = None
    words: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Declined:
    """Why a backend does not make a pass of a call, here and now.

    Attributes:
      reason: in words.
      to_loops: whether loops in plain JAX should make the pass, beside kernels that
        make the others.
    """

    reason: str
    to_loops: bool = False


class Backend(Protocol):
    """What the module of a backend has.

    One that declines both passes of gradients needs no `backward`, and one that
    declines tangents, or through which JAX can push them, no `tangent`. It may also
    have `lowering_context`, a function without arguments: the context in which its
    other functions are traced and lowered.
    """

    def plan(self, call: Call, pass_: Pass, /) -> Plan | Declined:
        """How the backend makes a pass of a call of shape structs, or why it does not.

        A pass that it makes it makes for every call of those shapes, under `jax.vmap`
        too. The passes are the forward one, the gradients of query, key, value and
        sink ("backward"), those of the score's operands, and the tangents of output and
        log-sum-exp. Another backend may make each of them.
        """
        ...

    def forward(
        self, plan: Plan, call: Call, outputs: tuple[Named, ...]
    ) -> Sequence[jax.Array]:
        """Output, log-sum-exp and, with `spec.gives_largest`, the largest scores.

        Args:
          plan: of the forward pass.
          call: of `Named` arrays, with axes in any order but head sizes `h` and `d`.
          outputs: shape structs: the results' shapes, dtypes and orders of axes. The
            log-sum-exp has its rows last, and the largest scores are like it.
        """
        ...

    def backward(
        self,
        plans: Mapping[Pass, Plan],
        call: Call,
        saved: tuple[Named, Named, Named, Named],
        wanted: Mapping[str, Named],
    ) -> Mapping[str, jax.Array]:
        """Gradients.

        Args:
          plans: of those passes that this backend makes: "backward",
            "operand_gradients", or both.
          call: of `Named` arrays.
          saved: o, lse, do and dlse (the cotangents of both results).
          wanted: shape structs of the gradients of these passes, by the names of
            `Call.differentiable`. An axis that one lacks is summed over; one that it
            has beyond its operand is `jax.vmap`'s.
        """
        ...

    def tangent(
        self,
        plan: Plan,
        call: Call,
        saved: tuple[Named, Named],
        tangents: Mapping[str, Named],
        outputs: tuple[Named, Named],
    ) -> Sequence[jax.Array]:
        """The tangents of output and log-sum-exp.

        Args:
          plan: of the tangent.
          call: of `Named` arrays.
          saved: o and lse.
          tangents: by the names of `Call.differentiable`, those that are not zero. They
            have the axes of their operands, and may have more of `jax.vmap`'s.
          outputs: shape structs of the results.
        """
        ...
