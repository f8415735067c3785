"""Programs that the tuner times: a forward, or some gradients of a backward."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future

import jax

from jax_flash2.tune import timing
from jax_flash2.tune.problems import Problem
from jax_flash2.tune.timing import Program


def lower(function: Callable, *arguments) -> jax.stages.Lowered:
    """`function` lowered for `arguments` (arrays or structs), jitted."""
    return jax.jit(function).lower(*arguments)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A pass of a problem.

    Attributes:
      problem: the call.
      attention: of q, k, v and the problem's arrays.
      wanted: which gradients a backward makes, of q, k, v and the problem's `operand`;
        None for the forward.
    """

    problem: Problem
    attention: Callable
    wanted: tuple[int, ...] | None = None

    @property
    def _saving(self) -> Callable:
        """Of the same; the backward pass."""
        own = 3 if self.wanted is None else max(3, 1 + max(self.wanted))

        def saving(*x):
            return jax.vjp(lambda *y: self.attention(*y, *x[own:]), *x[:own])[1]

        return saving

    def _rows(self) -> list:
        """Shapes and dtypes of query, key, value and the output's gradient."""
        structs = self.problem.shape.structs()
        return list(jax.eval_shape(self.problem.rows, *structs))

    def _inputs(self, rows: Sequence) -> list:
        return [*rows[:3], *self.problem.arrays.values()]

    def lower(self) -> jax.stages.Lowered:
        *rows, do = self._rows()
        inputs = self._inputs(rows)
        if self.wanted is None:
            return lower(self.attention, *inputs)
        saved, tree = jax.tree.flatten(jax.eval_shape(self._saving, *inputs))

        def backward(saved, do):
            gradients = tree.unflatten(saved)(do)
            return [gradients[i] for i in self.wanted or ()]

        return lower(backward, saved, do)

    def compile(self, pool: Executor) -> Future:
        """Lowers it now, and compiles it in the pool. Failures are of the result."""
        try:
            return pool.submit(self.lower().compile)
        except Exception as error:  # a call that a backend declines is a result
            failed: Future = Future()
            failed.set_exception(error)
            return failed

    def compile_saving(self, pool: Executor) -> Future | None:
        """Likewise the forward that saves what a backward takes; None if none does."""
        if self.wanted is None:
            return None
        lowered = lower(self._saving, *self._inputs(self._rows()))
        return pool.submit(lowered.compile)

    def arguments(self, saving: Future | None) -> list:
        """The inputs, or what a forward saved and the output's gradient.

        Args:
          saving: as of `compile_saving`.
        """
        *rows, do = self.problem.rows(*self.problem.shape.operands())
        inputs = self._inputs(rows)
        if saving is None:
            return inputs
        return [jax.tree.leaves(saving.result()(*inputs)), do]


def times(
    compiling: Mapping[Hashable, Future],
    arguments: Callable[[Hashable], list],
    rounds: int,
    *,
    in_bursts: bool,
) -> tuple[dict, dict]:
    """Timings by name, and failures, of programs that are timed side by side.

    Args:
      compiling: by name, as of `Timed.compile`.
      arguments: by name; called once for each that compiled.
      rounds: as of `timing.time_interleaved`.
      in_bursts: shortly, where there are many: before the clocks have settled.
    """
    running, failures = {}, {}
    for name, future in compiling.items():
        try:
            call = functools.partial(future.result(), *arguments(name))
        except Exception as error:  # what does not compile is a result
            failures[name] = timing.describe(error)
            continue
        running[name] = Program(call, jax.block_until_ready)
    short = {"min_seconds": 0.01, "settle_seconds": 0.02} if in_bursts else {}
    timings, later = timing.time_interleaved(running, rounds=rounds, **short)
    return timings, {**failures, **later}
