"""Several devices for the GPT example: they divide sequences, and rows of each.

Each device has the whole model, some sequences of every batch, and stripes of their
rows. It computes the loss of its rows; attention alone reads rows of other devices.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash2
from benchmarks import text

SEQUENCES, ROWS = "sequences", "rows"  # axes of the mesh
# Rows of a stripe: the first of these that divides the rows of a device.
STRIPES = (256, 128, 64, 32, 16)


class Parallel:
    """B sequences of T rows, divided over devices.

    Attributes:
      data: devices that divide the sequences (data parallelism).
      context: devices that divide the rows, in stripes (context parallelism).
      stripe: rows of a stripe; None where context is 1.
      mesh: data x context devices along `SEQUENCES` and `ROWS`, the first of all.

    Args:
      data, context: as above.
      batch_size: B, a multiple of data.
      seq_len: T, a multiple of 16 * context where rows are divided.

    Raises:
      ValueError: if B or T is no such multiple, or JAX has fewer devices.
    """

    def __init__(
        self, *, data: int = 1, context: int = 1, batch_size: int, seq_len: int
    ):
        if batch_size % data:
            raise ValueError(
                f"{data} devices do not divide a batch of {batch_size} sequences"
            )
        stripes = [size for size in STRIPES if seq_len % (context * size) == 0]
        if context > 1 and not stripes:
            raise ValueError(
                f"sequences must have a multiple of 16 * {context} = {16 * context} "
                f"rows, got {seq_len}"
            )
        devices = data * context
        if devices > jax.device_count():
            raise ValueError(f"JAX has {jax.device_count()} devices, not {devices}")
        self.data = data
        self.context = context
        self.stripe = stripes[0] if context > 1 else None
        self.mesh = jax.make_mesh(
            (data, context),
            (SEQUENCES, ROWS),
            axis_types=(AxisType.Auto,) * 2,
            devices=jax.devices()[:devices],
        )

    def __str__(self) -> str:
        rows = "whole rows"
        if self.stripe is not None:
            rows = f"rows on {self.context}, stripes of {self.stripe}"
        return f"{self.data * self.context}: sequences on {self.data}, {rows}"

    def striped(self, batch: text.Batch) -> text.Batch:
        """A batch `[B, T]` whose T rows lie by device: see `jax_flash2.stripe`."""
        if self.stripe is None:
            return batch

        def arranged(x: np.ndarray) -> np.ndarray:
            return jax_flash2.stripe(x, self.context, self.stripe)

        return text.Batch(*(None if x is None else arranged(x) for x in batch))

    def replicated(self, tree):
        """A tree of arrays, the same on all devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def total(self, loss_sum: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """The sum of a loss over all devices.

        Args:
          loss_sum: (model, batch, positions=, context=) -> scalar, the loss of a
            device's rows. batch is `[B / data, T / context]`, and positions are int32
            `[T / context]`.

        Returns:
          (model, batch) -> scalar, for a striped batch `[B, T]`. The gradient of the
          model is the sum over devices, too: that is the transpose of replicating it.
        """
        context = None
        if self.stripe is not None:
            context = jax_flash2.Context(ROWS, self.stripe)

        def on_device(model, batch, positions):
            own = loss_sum(model, batch, positions=positions, context=context)
            return jax.lax.psum(own, (SEQUENCES, ROWS))

        divided = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(P(), P(SEQUENCES, ROWS), P(ROWS)),
            out_specs=P(),
        )

        def total(model, batch: text.Batch) -> jax.Array:
            rows = batch.tokens.shape[1]
            positions = np.arange(rows, dtype=np.int32)
            if self.stripe is not None:
                positions = jax_flash2.stripe_positions(rows, self.context, self.stripe)
            return divided(model, batch, positions)

        return total
