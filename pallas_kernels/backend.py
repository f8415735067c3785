"""The contract of a backend, and what it is asked before it gets a call.

A backend is a module with the functions of `Backend`, and one line in
`jax_flash2._backends`. It may decline a call by a reason; the next in line serves it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.configs import Config
from pallas_kernels.core.axes import Named, batch_axes, sizes
from pallas_kernels.core.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything that is static about a call of `attention`.

    Attributes:
      query, key, value: `Named`; only shapes, dtypes and axes may be read.
      spec: of such `Named`: which masks and score features the call has.
      config: the caller's, or None.
      precision: of products of float32 operands.
    """

    query: Named
    key: Named
    value: Named
    spec: AttentionSpec
    config: Config | None = None
    precision: Any = None

    @property
    def operands(self) -> list[Named]:
        """query, key, value, and the leaves of the spec."""
        return [self.query, self.key, self.value, *jax.tree.leaves(self.spec)]

    @property
    def dtype(self):
        return self.query.dtype

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
        return self.size["n"] // self.size["k"] if "n" in self.size else 1

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
        """Of the largest array whose size is a number."""
        return max((n for n in self._elements if isinstance(n, int)), default=0)

    @property
    def interpret(self) -> bool:
        """Whether the caller asks for interpreted kernels."""
        return self.config is not None and self.config.interpret

    def of_gradients(self) -> Call:
        """For a backend that makes the gradients only."""
        if self.config is None:
            return self
        config = dataclasses.replace(self.config, forward=None)
        return dataclasses.replace(self, config=config)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of what has a gradient, beside query, key and value."""
        fields = {**self.spec.score.operands, "sink": self.spec.sink}
        return tuple(
            name
            for name, x in fields.items()
            if x is not None and jnp.issubdtype(x.dtype, jnp.floating)
        )


class Backend(Protocol):
    """What the module of a backend has."""

    def unsupported(self, call: Call, /) -> str | None:
        """Why this backend cannot serve a call here and now, or None.

        A call that it serves it serves in both directions, with every gradient of
        `Call.gradients`, and under `jax.vmap`.
        """
        ...

    def slower(self, call: Call, /) -> str | None:
        """Why the next backend in line is faster for a call that this one serves.

        As measured; None where it is not. The next one then gets the call, unless the
        caller names this one.
        """
        ...

    def other_backward(self, call: Call, /) -> str | None:
        """Why another backend makes the gradients of a call that this one serves.

        Asked only where the list of backends names another for that.
        """
        ...

    def other_score_gradients(self, call: Call, /) -> str | None:
        """Why that other backend makes the gradients of the score's operands, or None.

        They are `Score.operands`; the question is asked only of calls that have some.
        """
        ...

    def slower_backward(self, call: Call, /) -> str | None:
        """Why that other backend makes the gradients of a call faster, or None.

        As measured. It then makes them, unless the caller names this backend.
        """
        ...

    def division(self, call: Call, /) -> Sequence[str]:
        """How the work of a call is divided, in words; none if it is not.

        For `jax_flash2.explain`, while tracing.
        """
        ...

    def lowering_context(self) -> AbstractContextManager:
        """In which `forward` and `backward` are traced and lowered."""
        ...

    def forward(
        self,
        q: Named,
        k: Named,
        v: Named,
        spec: AttentionSpec,
        outputs: tuple[Named, Named],
        *,
        config: Config | None,
        precision: Any,
    ) -> Sequence[jax.Array]:
        """Output and log-sum-exp.

        Args:
          q, k, v: arrays, with axes in any order but head sizes `h` and `d`.
          spec: of `Named` arrays.
          outputs: shape structs: the results' shapes, dtypes and orders of axes. The
            log-sum-exp has its rows last.
          config, precision: the caller's.
        """
        ...

    def backward(
        self,
        q: Named,
        k: Named,
        v: Named,
        spec: AttentionSpec,
        saved: tuple[Named, Named, Named, Named],
        outputs: tuple[Named, ...],
        *,
        config: Config | None,
        precision: Any,
    ) -> Sequence[jax.Array]:
        """Gradients of q, k, v, and of the spec's leaves that are differentiable.

        Without the score's operands where the list of backends names another for those.

        Args:
          saved: o, lse, do and dlse (the cotangents of both results).
          outputs: shape structs, in the order of the operands. An axis that an output
            lacks is summed over; one that it has beyond its operand is `jax.vmap`'s.
        """
        ...

    def score_gradients(
        self,
        q: Named,
        k: Named,
        v: Named,
        spec: AttentionSpec,
        saved: tuple[Named, Named, Named, Named],
        outputs: tuple[Named, ...],
        *,
        config: Config | None,
        precision: Any,
    ) -> Sequence[jax.Array]:
        """Gradients of the score's operands (`Score.operands`), in their order.

        Asked only of a backend that another has in the list for its gradients.
        """
        ...
