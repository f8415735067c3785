"""What XLA's partitioner calls, with a name that means the same in every process.

JAX's `custom_partitioning` leaves the address of a Python object in the program. So a
persistent compilation cache never finds the program again; and where JAX is told to
leave the address out (`jax_remove_custom_partitioning_ptr_from_cache_key`), it finds
one program for another, for nothing is left in the key that says what is computed. It
also traces and lowers the part of a device anew for each layer of a model.

Here the call gets a target of our own. Its name is a digest of what is computed, if a
cache is set, and the parts that were lowered once serve all equal layers of a program.
The names of JAX that this takes are private; without them the call stays as JAX made
it, and only carries the digest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters.mlir import ir
from jax.sharding import Mesh

from jax_flash2 import _kept
from pallas_kernels.core.axes import Named, is_batch

try:
    from jax._src import custom_partitioning as stock
    from jax._src import xla_bridge
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    _OBJECTS = stock._sharding_callbacks
    _PARTITION = stock._custom_partitioning_partition
    _OTHERS = (
        stock._custom_partitioning_propagate_user_sharding,
        stock._custom_partitioning_infer_sharding_from_operands,
    )
    _REGISTER = xla_client.register_custom_call_partitioner
    _ON_PLUGINS = xla_bridge.register_plugin_callbacks
except (ImportError, AttributeError):
    stock = None

_JAX_TARGET = "CustomSPMDPartitioning"
_TARGET = "jax_flash2"


@dataclasses.dataclass
class _Known:
    """What is known of an object of JAX that is called back for a program.

    Attributes:
      x64: whether 64-bit types were enabled as the program was lowered.
      parts: the lowered parts of a device, by how the partitioner divides the arrays.
    """

    x64: bool
    parts: dict[tuple[str, ...], tuple] = dataclasses.field(default_factory=dict)


# JAX keeps the objects alive as long as programs that may call them back. Those of a
# name, which also says the devices, serve each other's programs.
_by_name: dict[bytes, weakref.WeakSet] = {}
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _object(name: bytes):
    return next(iter(_by_name[name]))


def _address(found) -> bytes:
    return str(id(found)).encode()


def _partition(arg_shapes, arg_shardings, result_shape, result_sharding, name: bytes):
    found = _object(name)
    known = _known[found]
    key = (*map(str, arg_shardings), str(result_sharding))  # the name implies shapes
    if key not in known.parts:
        with jax.enable_x64(known.x64):
            known.parts[key] = _PARTITION(
                arg_shapes,
                arg_shardings,
                result_shape,
                result_sharding,
                _address(found),
            )
    return known.parts[key]


def _of_name(function: Callable) -> Callable:
    def call(*arguments):
        *others, name = arguments
        return function(*others, _address(_object(name)))

    return call


@functools.cache
def _register() -> None:
    propagate, infer = map(_of_name, _OTHERS)
    options = {"can_side_effecting_have_replicated_sharding": True}
    _REGISTER(_TARGET, propagate, _partition, infer, **options)
    _ON_PLUGINS(
        functools.partial(
            _REGISTER,
            name=_TARGET,
            prop_user_sharding=propagate,
            partition=_partition,
            infer_sharding_from_operands=infer,
            **options,
        )
    )


def named(results: Sequence[ir.Value], describe: Callable[[], str]) -> None:
    """Names the call of the partitioner that has these results.

    Args:
      results: of what was lowered; if that is no such call, nothing happens (JAX makes
        none for one device).
      describe: says all that decides what is computed, but shapes, devices and the
        code of this library.
    """
    attributes: Any = getattr(results[0].owner, "attributes", {})
    target = "call_target_name"
    if target not in attributes or attributes[target] != ir.StringAttr.get(_JAX_TARGET):
        return
    found = None
    if stock is not None:
        address = ir.StringAttr(attributes["backend_config"]).value.encode()
        found = _OBJECTS[address]
    name = uuid.uuid4().hex
    if jax.config.jax_compilation_cache_dir is not None:
        text = f"{_kept.code()} {_devices(found)} {describe()}"
        name = hashlib.sha256(text.encode()).hexdigest()
        digest = ir.DictAttr.get({_TARGET: ir.StringAttr.get(name)})
        attributes["mhlo.frontend_attributes"] = digest
    if found is None:
        return
    _register()
    _known[found] = _Known(jax.config.jax_enable_x64)
    for other, objects in list(_by_name.items()):
        if not objects:
            _by_name.pop(other, None)
    _by_name.setdefault(name.encode(), weakref.WeakSet()).add(found)
    attributes[target] = ir.StringAttr.get(_TARGET)
    attributes["backend_config"] = ir.StringAttr.get(name)


def _devices(found) -> tuple | None:
    """Of the mesh that an object of JAX divides arrays over, and its shape."""
    if found is None:
        return None
    if not found.mesh.empty:
        return found.mesh.devices.shape, *(x.id for x in found.mesh.devices.flat)
    context = found.module_context.axis_context
    assigned = getattr(context, "device_assignment", None) or ()
    return context.num_devices, *(x.id for x in assigned)


# How it divides an array.


def divisible_shape(array: Named, sharding) -> tuple[int, ...]:
    """A shape that the sharding divides evenly, as it may not divide the array's.

    The partitioner pads 127 rows on 8 devices; JAX's description of them would raise.
    """
    return (sharding.num_devices,) * len(array.axes)


def mesh_axes(mesh: Mesh, array: Named, sharding):
    """A mesh of the same devices in the same order, and its axes for each name.

    Every axis of the mesh is split into its prime factors, for the partitioner may
    divide an array along a part of a mesh axis.
    """
    index_of_device = sharding.devices_indices_map(divisible_shape(array, sharding))
    devices = np.array(list(index_of_device))
    shape = mesh.devices.shape if not mesh.empty else devices.shape
    shape = tuple(p for n in shape for p in _prime_factors(n))
    names = tuple(f"axis{i}" for i in range(len(shape)))
    along = {}
    for i, name in enumerate(array.axes):
        if name is None or not (is_batch(name) or name == "n"):
            continue
        starts = [index[i].start or 0 for index in index_of_device.values()]
        steps = _steps(np.reshape(starts, shape))
        if array.shape[i] % math.prod(shape[j] for j in steps) == 0:
            along[name] = tuple(names[j] for j in steps)
    return Mesh(devices.reshape(shape), names), along


def _steps(starts: np.ndarray) -> list[int]:
    """The axes along which numbers rise, steepest first; none if along others too."""
    units = np.eye(starts.ndim, dtype=int)
    steps = [int(starts[tuple(unit)]) for unit in units]
    if not np.array_equal(starts, np.tensordot(steps, np.indices(starts.shape), 1)):
        return []
    return sorted((j for j, step in enumerate(steps) if step), key=lambda j: -steps[j])


@functools.lru_cache
def _prime_factors(n: int) -> tuple[int, ...]:
    for p in range(2, n + 1):
        if n % p == 0:
            return (p, *_prime_factors(n // p))
    return ()
