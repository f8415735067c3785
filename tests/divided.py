"""A call whose rows are divided over simulated devices, called like `attention`."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_flash2 import Context, attention, stripe, unstripe
from tests import tolerances
from tests.cases import Arguments, Case
from tests.functions import is_data


@dataclasses.dataclass(frozen=True)
class Divided:
    """`attention` on as many devices as the shape says, of which each has some rows.

    With fewer devices here, `jax.vmap` with the axis's name takes their place: then one
    GPU runs the kernels of a ring, of gathered keys and of divided heads.

    Attributes:
      context: of the call; its axes are the mesh's.
      shape: of the mesh.
      checked: whether `shard_map` checks what differs between devices.
      mapped: whether `jax.vmap` takes the place of devices that are here.
    """

    context: Context
    shape: tuple[int, ...]
    checked: bool = True
    mapped: bool = False

    @property
    def parts(self) -> int:
        return math.prod(self.shape)

    @property
    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: self.parts]).reshape(self.shape)
        kinds = (AxisType.Auto,) * len(self.shape)
        return Mesh(devices, self.context.axes, axis_types=kinds)

    def striped(self, x, axis: int):
        if self.context.stripe is None:
            return x
        return stripe(x, self.parts, self.context.stripe, axis)

    def unstriped(self, x, axis: int):
        if self.context.stripe is None:
            return x
        return unstripe(x, self.parts, self.context.stripe, axis)

    def __call__(self, query, key, value, return_residual=False, **arguments):
        count = 2 + arguments.get("return_max_logit", False)
        given = {"query": query, "key": key, "value": value, **arguments}
        arrays = {n: x for n, x in given.items() if is_data(x)}
        static = {n: x for n, x in given.items() if n not in arrays}
        axes = {n: _axis_of_rows(n, x) for n, x in arrays.items()}

        def call(arrays):
            return attention(
                **arrays, **static, context=self.context, return_residual=True
            )

        rows = axes["query"]
        is_mapped = self.mapped or self.parts > jax.device_count()
        over = self._over_names if is_mapped else self._over_devices
        on_devices = over(call, axes, rows, count)
        striped = {
            n: x if axes[n] is None else self.striped(x, axes[n])
            for n, x in arrays.items()
        }
        results = tuple(self.unstriped(x, rows) for x in on_devices(striped))
        return results if return_residual else results[0]

    def _over_devices(self, call, axes, rows: int, count: int):
        def spec(axis: int | None) -> P:
            if axis is None:
                return P()
            return P(*[None] * axis, self.context.axes)

        return jax.shard_map(
            call,
            mesh=self.mesh,
            in_specs=({n: spec(axis) for n, axis in axes.items()},),
            out_specs=(spec(rows),) * count,
            check_vma=self.checked,
        )

    def _over_names(self, call, axes, rows: int, count: int):
        (name,) = self.context.axes
        mapped = jax.vmap(call, (axes,), (rows,) * count, axis_name=name)

        def apart(x, axis: int):
            own = x.shape[axis] // self.parts
            return x.reshape(*x.shape[:axis], self.parts, own, *x.shape[axis + 1 :])

        def joined(x):
            return x.reshape(*x.shape[:rows], -1, *x.shape[rows + 2 :])

        def run(arrays):
            own = {
                n: x if axes[n] is None else apart(jnp.asarray(x), axes[n])
                for n, x in arrays.items()
            }
            return tuple(map(joined, mapped(own)))

        return run


def _axis_of_rows(name: str, x) -> int | None:
    """The axis of an argument that is divided; its keys are whole beside query rows.

    Functions capture arrays that each device has whole.
    """
    if name in ("score_mod", "mask_mod"):
        return None
    shape = x.shape
    last = len(shape)
    if name in ("query", "key", "value"):
        return last - 3
    if name.endswith("segment_ids"):
        return last - 1
    if name in ("bias", "mask"):
        sizes = (1, 1, *shape)[-2:]
        return next((last - 2 + i for i in (0, 1) if sizes[i] != 1), None)
    return None


def without_pairs(arguments: Arguments) -> Arguments:
    """A bias or mask of keys in place of one of pairs."""

    def made(rng, case: Case) -> dict:
        given = arguments(rng, case)
        pairs = {n: x for n, x in given.items() if n in ("bias", "mask") and x.ndim > 1}
        of_keys = {n: x[..., :1, :] for n, x in pairs.items() if x.shape[-1] > 1}
        return {**given, **of_keys}

    return made


def check_in_float64(call: Divided, case: Case, seed: int = 0) -> None:
    """All results and every gradient are those of the oracle, to 1e-11."""
    with jax.enable_x64(True):
        arrays, arguments = case.inputs(jnp.float64, seed)
        arguments = {n: jax.tree.map(_wide, x) for n, x in arguments.items()}
        arguments["return_max_logit"] = True
        cotangents = tolerances.cotangents_for(case, jnp.float64, seed + 1)
        cotangents = tuple(map(_wide, cotangents))
        options = {**arguments, "implementation": "xla"}
        actual = tolerances.evaluate(arrays, cotangents, options, call)
        exact = tolerances.exact(arrays, cotangents, arguments)
    for name, x in actual.items():
        expected = exact[name]
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(x), finite, err_msg=name)
        expected, x = (np.where(finite, a, 0.0) for a in (expected, x))
        size = np.max(np.abs(expected), initial=1.0)
        assert np.max(np.abs(x - expected), initial=0.0) < 1e-11 * size, name


def _wide(x):
    """In float64, if it is an array of numbers with a fraction."""
    floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x, jnp.float64) if floating else x
