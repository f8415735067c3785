"""What `flashify` did, as text and as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
from jax.extend import source_info_util

from jax_flash2._explain import explain
from jax_flash2._flashify import rewrite
from jax_flash2._flashify.graph import Node, Value
from jax_flash2._flashify.plan import Left, Plan
from jax_flash2._flashify.sites import Site


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """A softmax over scores in the function.

    Attributes:
      line: file, line and function of the user's code.
      arguments: of `attention`, by name: shapes and types of arrays, and numbers. Empty
        if it is left alone.
      kernels: what `explain` says of these.
      bytes_saved: of scores and probabilities that are no longer written.
      reason: why it is left alone; empty if it is not.
    """

    line: str
    arguments: dict
    kernels: str = ""
    bytes_saved: int = 0
    reason: str = ""

    @property
    def is_replaced(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if self.reason:
            return f"{self.line}: left alone: {self.reason}"
        words = ", ".join(f"{k} {_words(x)}" for k, x in self.arguments.items())
        kernel = self.kernels.splitlines()[0]
        saved = f"{self.bytes_saved / 2**20:,.3g} MiB of scores and probabilities"
        return f"{self.line}: attention({words}); {kernel}; saves {saved}"


@dataclasses.dataclass(frozen=True)
class Report:
    """All softmaxes over scores that a function has; `str` has a line for each."""

    sites: tuple[SiteReport, ...]

    @property
    def replaced(self) -> list[SiteReport]:
        return [x for x in self.sites if x.is_replaced]

    @property
    def left(self) -> list[SiteReport]:
        return [x for x in self.sites if not x.is_replaced]

    def __str__(self) -> str:
        first = f"flashify: {len(self.replaced)} replaced, {len(self.left)} left alone"
        return "\n".join([first, *(f"  {x}" for x in self.sites)])


def _words(x) -> str:
    if not hasattr(x, "shape"):
        return repr(x)
    return f"{x.dtype.name}[{', '.join(map(str, x.shape))}]"


def report_of(plan: Plan) -> Report:
    return Report(tuple(_sites(plan)))


def _sites(plan: Plan) -> Iterator[SiteReport]:
    for own in plan.all_plans():
        yield from map(_of_site, own.sites.values())
        yield from map(_of_left, own.left)


def _of_left(left: Left) -> SiteReport:
    return SiteReport(_line(left.node), {}, reason=left.reason)


def _of_site(site: Site) -> SiteReport:
    form, numbers = site.form, {}

    def function(*arrays):
        given = rewrite.arguments(form, rewrite.reader(form, arrays))
        arrays = {k: x for k, x in given.items() if isinstance(x, jax.Array)}
        numbers.update({k: x for k, x in given.items() if k not in arrays})
        return arrays

    given = {**jax.eval_shape(function, *map(_struct, site.arrays)), **numbers}
    return SiteReport(_line(site.root), given, explain(**given), form.bytes_saved)


def _struct(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.aval.dtype)


def _line(node: Node) -> str:
    return source_info_util.summarize(node.equation.source_info)
