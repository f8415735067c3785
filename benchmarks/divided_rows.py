"""Context parallelism for the GPT example: devices divide the rows of every batch.

Each device has stripes of all sequences and the whole model. It computes the loss of
its rows; attention alone reads rows of other devices.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash2
from benchmarks import text

AXIS = "rows"
# Rows of a stripe: the first of these that divides the rows of a device.
STRIPES = (256, 128, 64, 32, 16)


class DividedRows:
    """T rows, divided over devices in stripes.

    Attributes:
      devices: their number, N.
      stripe: rows of a stripe.
      mesh: the devices along `AXIS`.

    Args:
      devices: N. The first N devices are taken.
      seq_len: T, a multiple of 16 * N.

    Raises:
      ValueError: if T is no such multiple, or JAX has fewer devices.
    """

    def __init__(self, devices: int, seq_len: int):
        stripes = [size for size in STRIPES if seq_len % (devices * size) == 0]
        if not stripes:
            raise ValueError(
                f"sequences must have a multiple of 16 * {devices} = {16 * devices} "
                f"rows, got {seq_len}"
            )
        if devices > jax.device_count():
            raise ValueError(f"JAX has {jax.device_count()} devices, not {devices}")
        self.devices = devices
        self.stripe = stripes[0]
        self.mesh = jax.make_mesh(
            (devices,),
            (AXIS,),
            axis_types=(AxisType.Auto,),
            devices=jax.devices()[:devices],
        )

    def __str__(self) -> str:
        return f"{self.devices} devices, stripes of {self.stripe} rows"

    def striped(self, batch: text.Batch) -> text.Batch:
        """A batch `[R, T]` whose T rows lie by device: see `jax_flash2.stripe`."""

        def arranged(x: np.ndarray) -> np.ndarray:
            return jax_flash2.stripe(x, self.devices, self.stripe)

        return text.Batch(*(None if x is None else arranged(x) for x in batch))

    def replicated(self, tree):
        """A tree of arrays, the same on all devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def total(self, loss_sum: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """The sum of a loss over the rows of all devices.

        Args:
          loss_sum: (model, batch, positions=, context=) -> scalar, the loss of a
            device's rows. batch is `[R, T / N]`, and positions are int32 `[T / N]`.

        Returns:
          (model, batch) -> scalar, for a striped batch `[R, T]`. The gradient of the
          model is the sum over devices, too: that is the transpose of replicating it.
        """
        context = jax_flash2.Context(AXIS, self.stripe)

        def on_device(model, batch, positions):
            own = loss_sum(model, batch, positions=positions, context=context)
            return jax.lax.psum(own, AXIS)

        divided = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(P(), P(None, AXIS), P(AXIS)),
            out_specs=P(),
        )

        def total(model, batch: text.Batch) -> jax.Array:
            rows = batch.tokens.shape[1]
            positions = jax_flash2.stripe_positions(rows, self.devices, self.stripe)
            return divided(model, batch, positions)

        return total
