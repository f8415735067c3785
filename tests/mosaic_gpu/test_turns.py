"""How long programs wait for each other, by a model of multiprocessors."""

import collections
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.configs import Blocks
from pallas_kernels.core.arithmetic import PLAIN
from pallas_kernels.core.axes import Named
from pallas_kernels.core.masks import Lengths, Window
from pallas_kernels.core.scores import Score
from pallas_kernels.core.spec import AttentionSpec
from pallas_kernels.layout import Launch
from pallas_kernels.mosaic_gpu.tiles import KeyGrid
from tests.mosaic_gpu.test_visits import operands, programs
from tests.tiers import deeply


def _time(visits: list[list[int]], multiprocessors: int) -> tuple[float, float]:
    """How long programs take that visit these blocks, and how long they must.

    A tile takes 1, and to add it 0.65, after the one before it in turn. A program
    computes two tiles ahead.
    """
    turn = collections.defaultdict(list)
    added: dict[tuple[int, int], float] = {}
    free = [0.0] * multiprocessors
    for number, blocks in enumerate(visits):
        now, own = heapq.heappop(free), []
        for i, block in enumerate(blocks):
            now = max(now, own[i - 2] if i >= 2 else 0.0) + 1
            before = [added[x, block] for x in turn[block][-1:]]
            own.append(max([now, *before, *own[-1:]]) + 0.65)
            added[number, block] = own[-1]
            turn[block].append(number)
        heapq.heappush(free, max([now, *own[-1:]]))
    work = sum(map(len, visits)) / multiprocessors
    return max(free), max(work, *map(len, visits))


LONG_CALLS = {
    "causal": (Window(None, 0),),
    "window": (Window(150, 0),),
    "two_sided": (Window(100, 100),),
    "lengths": (Window(None, 0), Lengths(*[Named(np.int32([450, 250]), ("b0",))] * 2)),
}


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("name", LONG_CALLS)
@pytest.mark.parametrize("count", [32, *deeply(8, 128)])
def test_programs_do_not_wait_for_the_end_of_others(
    name, heads, count, multiprocessors
):
    multiprocessors(count)
    n, k = heads
    size = {"t": 512, "s": 512, "n": n, "k": k}
    spec = AttentionSpec(Score(1.0), LONG_CALLS[name])
    taken, least = times(size, spec, count)
    assert taken < 1.3 * least


def times(
    size, spec: AttentionSpec, multiprocessors: int, sharing=None
) -> tuple[float, float]:
    """`_time` of the programs of a call with blocks of 16 queries and 32 keys.

    Args:
      sharing: of blocks of keys (`core.visits.Sharing`).
    """
    launch = Launch(Blocks(16, 32, 8, 2), None, PLAIN, interpret=False, splits=1)
    layout = KeyGrid.of("dkv", operands(size, spec), launch, sharing=sharing)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        tiles_of = programs(spec, layout, jnp.asarray)
        group = size["n"] // size["k"]
        most = jnp.arange(group * size["t"] // 16, dtype=jnp.int32)

        @jax.jit
        @jax.vmap
        def all_of(number):
            tiles = tiles_of(number)
            number_of = jax.vmap(lambda tile: tiles.number(tiles.place(tile)))
            return number_of(most), tiles.count

        found = jax.device_get(all_of(jnp.arange(layout.tiles)))
    visits = [blocks[:own].tolist() for blocks, own in zip(*found, strict=True)]
    return _time(visits, multiprocessors)
