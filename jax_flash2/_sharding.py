"""Attention on several devices: inside `shard_map`, and on explicitly sharded arrays.

Batch entries and heads are independent, so each device attends to its own. Inside
`shard_map` the operation sees local arrays like any other; arrays whose type carries a
sharding (explicit meshes) enter a `shard_map` of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels.core.axes import Axes, Named, sizes

_EMPTY = AbstractMesh((), ())


def like(aval, shape, dtype):
    """The type of a result beside the type of an operand: local, and as varying."""
    spec = PartitionSpec(*[None] * len(shape))
    sharding = NamedSharding(aval.sharding.mesh, spec)
    return aval.update(shape=shape, dtype=dtype, sharding=sharding)


def local(aval):
    """The type of one device's part, without the mesh."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def one_device():
    """The context in which one device's part is traced."""
    return jax.sharding.use_abstract_mesh(_EMPTY)


def varying_alike(arrays: tuple) -> tuple:
    """Inside `shard_map`: all arrays vary along whatever mesh axis one of them does.

    The transpose sums the gradient of what was shared.
    """
    along = [_varying(x) for x in arrays]
    everything = frozenset().union(*along)
    return tuple(
        jax.lax.pcast(x, tuple(everything - axes), to="varying")
        if axes != everything
        else x
        for x, axes in zip(arrays, along, strict=True)
    )


def _varying(x) -> frozenset:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def on_each_device(
    function: Callable, operands: Sequence[Named], outputs: Sequence[Axes]
) -> tuple:
    """`function(arrays)`, on every device's own part where types carry shardings.

    Args:
      function: of the arrays of `operands`; its results have the axes of `outputs`.
      operands: query, key, value and others.
      outputs: the axes of each result.

    Raises:
      ValueError: if an operand is sharded along rows or head sizes, if operands are
        sharded differently along the same axis, or if key/value heads do not divide.
    """
    arrays = tuple(x.value for x in operands)
    along = _mesh_axes(operands)
    if not along:
        return function(varying_alike(arrays))

    def spec(axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(along.get(name) for name in axes))

    mesh = _mesh(arrays)
    in_specs = tuple(spec(x.axes) for x in operands)
    arrays = tuple(
        jax.reshard(x, NamedSharding(mesh, p))
        for x, p in zip(arrays, in_specs, strict=True)
    )
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    return jax.shard_map(
        lambda *parts: function(varying_alike(parts)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=tuple(map(spec, outputs)),
        axis_names=explicit,
    )(*arrays)


def _mesh(arrays):
    """The mesh in use, or that of the arrays where none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    return next(m for x in arrays if not (m := x.sharding.mesh).empty)


def _mesh_axes(operands: Sequence[Named]) -> dict:
    """For each name, the mesh axes that explicit types say it is divided along."""
    found: dict = {}
    shards: dict[str, int] = {}
    arguments = ("query", "key", "value")
    for i, x in enumerate(operands):
        argument = arguments[i] if i < len(arguments) else "an argument"
        sharding = jax.typeof(x.value).sharding
        for name, axes in zip(x.axes, sharding.spec, strict=True):
            if axes is None or name is None:
                continue
            where = "heads" if name in ("n", "k") else "a batch axis"
            if name in ("t", "s", "h", "d"):
                kind = "rows" if name in ("t", "s") else "head size"
                raise ValueError(
                    f"{argument} is sharded along its {kind} (mesh axes {axes!r}): every "
                    "device needs them whole; see jax.reshard"
                )
            name = "n" if name == "k" else name
            if found.setdefault(name, axes) != axes:
                raise ValueError(
                    f"{argument} is sharded along {where} by mesh axes {axes!r}, "
                    f"another argument by {found[name]!r}"
                )
            names = (axes,) if isinstance(axes, str) else axes
            shards[name] = math.prod(sharding.mesh.shape[a] for a in names)
    if "n" in found:
        kv_heads = sizes(operands)["k"]
        if kv_heads % shards["n"] == 0:
            found["k"] = found["n"]
        elif kv_heads > 1:
            raise ValueError(
                f"key and value have {kv_heads} heads, which do not divide among the "
                f"{shards['n']} parts of the query's heads (mesh axes {found['n']!r})"
            )
    return found
