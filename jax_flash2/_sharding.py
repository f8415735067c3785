"""Attention on several devices: inside `shard_map`, on explicit and automatic meshes.

Batch entries and heads are independent, so each device attends to its own. Inside
`shard_map` the operation sees local arrays like any others. Where the types of arrays
carry a sharding (explicit meshes), the types of results follow from them, and what is
lowered is a `shard_map`. Where `jax.jit` divides a program by itself (automatic
meshes), XLA's partitioner is told how to divide it: left alone it could not divide
kernels, and would gather some operands of the xla backend.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_flash2 import _partitioner
from pallas_kernels import device
from pallas_kernels.core.axes import (
    Axes,
    Named,
    is_batch,
    is_whole,
    sizes,
    varying_alike,
)

_SCALAR = [Named(np.zeros(()), ())]


def local(aval):
    """The type of one device's part, without the mesh."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def one_device():
    """The context in which one device's part is traced."""
    there = device.known_to_jax()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=there))


def on_mesh(division: Division):
    """The context in which `on_each_device` of an explicit division is traced."""
    assert isinstance(division.mesh, AbstractMesh)
    return jax.sharding.use_abstract_mesh(division.mesh)


@dataclasses.dataclass(frozen=True)
class Division:
    """Which mesh axes divide each named axis of a call.

    Attributes:
      mesh: of the devices; what types say (`explicit_division`) is abstract.
      along: for names of batch, query heads and perhaps rows, the mesh axes, outermost
        first.
      size: of every name, on all devices together.
    """

    mesh: Mesh | AbstractMesh
    along: dict[str, tuple[str, ...]]
    size: dict[str, int]

    def parts(self, name: str) -> int:
        return math.prod(self.mesh.shape[a] for a in self.along.get(name, ()))

    @property
    def divides_kv_heads(self) -> bool:
        """Whether key/value heads are divided like query heads, or whole everywhere."""
        return self.size.get("k", 1) % self.parts("n") == 0

    def mesh_axes(self, axes: Axes) -> list[tuple[str, ...]]:
        """For each axis of an array, the mesh axes that divide it."""
        kv_heads = self.along.get("n", ()) if self.divides_kv_heads else ()
        along = {**self.along, "k": kv_heads, None: ()}
        return [along.get(name, ()) for name in axes]

    def sharding(self, axes: Axes) -> NamedSharding:
        spec = PartitionSpec(*(a or None for a in self.mesh_axes(axes)))
        return NamedSharding(self.mesh, spec)

    def own_heads(self) -> jax.Array | None:
        """On a device: which key/value heads its query heads read (None: all it has).

        As many as its query heads have distinct runs of a common length within groups:
        one where its heads are within one group.
        """
        if self.divides_kv_heads or self.size["k"] == 1:
            return None
        group = self.size["n"] // self.size["k"]
        query_heads = self.size["n"] // self.parts("n")
        run = math.gcd(query_heads, group)
        first = jax.lax.axis_index(self.along["n"]) * query_heads
        return (first + run * jnp.arange(query_heads // run)) // group

    def take_heads(self, x: jax.Array, axes: Axes) -> jax.Array:
        """On a device: key/value heads of `x` that its query heads read."""
        heads = self.own_heads() if "k" in axes else None
        return x if heads is None else jnp.take(x, heads, axis=axes.index("k"))

    def total(self, x: jax.Array, axes: Axes) -> jax.Array:
        """On a device: the sum over devices of a result that several share."""
        heads = self.own_heads() if "k" in axes else None
        if heads is not None:
            i = axes.index("k")
            shape = (*x.shape[:i], self.size["k"], *x.shape[i + 1 :])
            at = (*[slice(None)] * i, heads)
            x = jnp.zeros(shape, x.dtype).at[at].add(x)
        divided = {a for mesh_axes in self.mesh_axes(axes) for a in mesh_axes}
        everything = (a for mesh_axes in self.along.values() for a in mesh_axes)
        shared = tuple(a for a in everything if a not in divided)
        return jax.lax.psum(x, shared) if shared else x

    def on_one(
        self, part: Callable, operands: Sequence[Axes], outputs: Sequence[Axes]
    ) -> Callable:
        """What a device computes of a call.

        Args:
          part: of a device's part of the operands; returns its part of the results.
          operands, outputs: the axes of each.
        """

        def function(*arrays):
            arrays = map(self.take_heads, arrays, operands)
            results = part(*varying_alike(tuple(arrays)))
            return list(map(self.total, results, outputs))

        return function


# Explicit meshes.

_ARGUMENTS = ("query", "key", "value")
# What whole axes are, by the first letters of their names.
_KINDS = {"x": "axes", "p": "pages", "r": "pages", "c": "pages"}


def _argument(place: int) -> str:
    return _ARGUMENTS[place] if place < len(_ARGUMENTS) else "an array"


def explicit_division(
    operands: Sequence[Named],
    argument: Callable[[int], str] = _argument,
    *,
    rows: bool = False,
) -> Division | None:
    """How the types of operands, with query, key and value first, say they are divided.

    None where they do not.

    Args:
      operands: arrays, tracers or types.
      argument: what errors call the one at a place.
      rows: whether rows may be divided, those of queries and of keys alike.

    Raises:
      ValueError: if an operand is sharded along head sizes, or along rows unless they
        may be, or if operands are sharded differently along the same axis.
    """
    along: dict[str, tuple[str, ...]] = {}
    mesh = None
    first: dict[str, int] = {}  # the place of the operand that `along` was read from
    for i, x in enumerate(operands):
        sharding = _type(x.value).sharding
        for name, axes in zip(x.axes, sharding.spec, strict=True):
            if axes is None or name is None:
                continue
            mesh = sharding.mesh if mesh is None else mesh
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            is_row = name in ("t", "s")
            if is_row and rows:
                if i > 2:
                    continue  # as query, key and value are
            elif is_row or name in ("h", "d") or is_whole(name):
                kind = "rows" if is_row else _KINDS.get(name[0], "head size")
                raise ValueError(
                    f"{argument(i)} is sharded along its {kind} by mesh axes {axes}, "
                    "but every device needs the whole axis: use jax.reshard"
                )
            name = "n" if name == "k" else name
            if along.setdefault(name, axes) != axes:
                where = "rows" if is_row else "heads" if name == "n" else "a batch axis"
                raise ValueError(
                    f"{argument(i)} is sharded along {where} by mesh axes {axes}, but "
                    f"{argument(first[name])} by mesh axes {along[name]}: shard both "
                    "alike"
                )
            first.setdefault(name, i)
            for other, taken in along.items():
                apart = other != name and {other, name} != {"t", "s"}
                if apart and set(taken) & set(axes):
                    raise ValueError(
                        f"{argument(i)} is sharded by mesh axes {axes}, but "
                        f"{argument(first[other])} is sharded along another axis by "
                        f"mesh axes {taken}: a mesh axis can shard only one axis of a "
                        "call"
                    )
    if along.get("t") != along.get("s"):
        raise ValueError(
            f"query is sharded along its rows by mesh axes {along.get('t')}, but key "
            f"and value by mesh axes {along.get('s')}: shard the rows of all three "
            "alike, or use jax.reshard"
        )
    return None if mesh is None else Division(mesh, along, sizes(operands))


def _type(x):
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def types(operands: Sequence[Named], outputs: Sequence[Named]) -> list:
    """The types of results with these shapes: as divided, and varying, as operands."""
    first = operands[0].value
    division = explicit_division(operands)

    def sharding(axes: Axes) -> NamedSharding:
        if division is not None:
            return division.sharding(axes)
        return NamedSharding(first.sharding.mesh, PartitionSpec(*[None] * len(axes)))

    return [
        first.update(shape=x.shape, dtype=x.dtype, sharding=sharding(x.axes))
        for x in outputs
    ]


def on_each_device(
    division: Division,
    part: Callable,
    operands: Sequence[Axes],
    outputs: Sequence[Axes],
) -> Callable:
    """`Division.on_one` on every device's own part.

    Args:
      operands, outputs: the axes of each; the first output has every name that may be
        divided.
    """
    shardings = list(map(division.sharding, operands))
    mesh = division.mesh
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    call = jax.shard_map(
        division.on_one(part, operands, outputs),
        mesh=mesh,
        in_specs=tuple(x.spec for x in shardings),
        out_specs=[division.sharding(x).spec for x in outputs],
        axis_names=explicit,
    )
    return lambda *arrays: call(*map(jax.reshard, arrays, shardings))


def divided_as(x: jax.Array, like) -> jax.Array:
    """x with the sharding that the type of `like` has, as a gradient must."""
    wanted = _type(like).sharding
    if wanted.mesh.empty or wanted == _type(x).sharding:
        return x
    return jax.reshard(x, wanted)


def check_divided(operands: Sequence[Named], axes: tuple[str, ...]) -> None:
    """Raises a ValueError if only some of query, key and value differ along the axes.

    As far as JAX knows (`shard_map` with `check_vma`).
    """
    for axis in axes:
        known = [axis in jax.typeof(x.value).manual_axis_type.varying for x in operands]
        if any(known) and not all(known):
            whole, divided = (_ARGUMENTS[known.index(x)] for x in (False, True))
            raise ValueError(
                f"context: the rows of {divided} are divided along mesh axis {axis!r}, "
                f"and those of {whole} are not: divide the rows of query, key and "
                "value alike (for queries that all devices have, merge the results of "
                "each device's keys: jax_flash2.merge)"
            )


# Automatic meshes.


def divisible(arrays) -> bool:
    """Whether XLA's partitioner is told how to divide what is traced.

    Not in a process of one device, nor where types say it (explicit meshes), nor inside
    `shard_map`: where that leaves axes automatic, JAX's callback cannot read how they
    divide an array (XLA then gathers what a kernel takes). What is divisible cannot be
    lowered for devices that are only described (`AbstractMesh`), for the partitioner
    calls back.
    """
    meshes = [
        jax.sharding.get_abstract_mesh(),
        *(_type(x).sharding.mesh for x in arrays),
    ]
    if all(mesh.empty for mesh in meshes):
        return jax.device_count() > 1
    return all(
        mesh.empty or (mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto})
        for mesh in meshes
    )


@functools.lru_cache
def needs_devices():
    """A parameter for primitives that lower to `partitioned`.

    `jax.jit` tells the devices to lowering rules of programs in which it finds
    `custom_partitioning`, and it looks into parameters.
    """
    identity = partitioned(lambda x: x, lambda x: x, _SCALAR, _SCALAR)
    return jax.make_jaxpr(identity)(0.0)


def partitioned(
    function: Callable, part: Callable, operands: Sequence[Named], outputs: Sequence
) -> Callable:
    """`function(*arrays)`, divided among devices as XLA's partitioner finds best.

    Args:
      function: of the arrays of `operands`, for all of them on one device.
      part: the same, for one device's part.
      operands: with the shape and the axes of each operand.
      outputs: with the shape and the axes of each result. The first has every name
        that may be divided.
    """
    operand_axes = [x.axes for x in operands]
    output_axes = [x.axes for x in outputs]
    size = sizes([*operands, *outputs])
    query = Named(_struct(operands[0]), operand_axes[0])  # no tracer outlives its trace

    def partition(mesh, arguments, results):
        _say_what_is_gathered(query, arguments[0].sharding)
        mesh, along = _partitioner.mesh_axes(mesh, outputs[0], results[0].sharding)
        division = Division(mesh, along, size)

        on_one = division.on_one(part, operand_axes, output_axes)
        argument_shardings = tuple(map(division.sharding, operand_axes))
        result_shardings = list(map(division.sharding, output_axes))
        return mesh, on_one, result_shardings, argument_shardings

    def infer(mesh, arguments, results):
        """Of GSPMD (without Shardy): results are divided as operands are."""
        along: dict[str, tuple[str, ...]] = {}
        for x, argument in zip(operands, arguments, strict=True):
            if argument.sharding is None:  # not known yet
                continue
            mesh, found = _partitioner.mesh_axes(mesh, x, argument.sharding)
            taken = {a for axes in along.values() for a in axes}
            along |= {
                name: axes
                for name, axes in found.items()
                if name not in along and not taken & set(axes)
            }
        return list(map(Division(mesh, along, size).sharding, output_axes))

    # A `jit` keeps constants to itself, of which custom_partitioning takes none: they
    # are there under `jax.ensure_compile_time_eval`.
    call = custom_partitioning(jax.jit(function))
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_sharding_rule(operand_axes, output_axes, size),
        decode_shardings=False,
    )
    return call


def _struct(x: Named) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _say_what_is_gathered(query: Named, sharding) -> None:
    """Warns if rows are divided: the partitioner cannot know how they are laid out."""
    shape = _partitioner.divisible_shape(query, sharding)
    part = sharding.shard_shape(shape)
    if any(a == "t" and part[i] < shape[i] for i, a in enumerate(query.axes)):
        warnings.warn(
            "jax_flash2.attention: the rows of query are divided over devices, and "
            "each device gathers all of them. To keep them divided, call attention "
            "inside jax.shard_map with context=jax_flash2.Context(axis, stripe=None), "
            "or make the mesh with jax.sharding.AxisType.Explicit",
            stacklevel=2,
        )


def _sharding_rule(operands, outputs, size) -> SdyShardingRule:
    """Batch and heads may be divided; rows and head sizes are gathered."""
    unnamed = iter(range(sum(map(len, [*operands, *outputs]))))

    def factor(name: str | None) -> str:
        if name is None:
            return f"broadcast_{next(unnamed)}"
        return "n" if name == "k" and size["k"] == size["n"] else name

    def mappings(arrays):
        return tuple(ArrayMapping(*map(factor, axes)) for axes in arrays)

    names = dict.fromkeys(name for axes in (*operands, *outputs) for name in axes)
    whole = tuple(a for a in names if not (is_batch(a) or a in ("n", "k")))
    return SdyShardingRule(
        mappings(operands), mappings(outputs), need_replication_factors=whole
    )
