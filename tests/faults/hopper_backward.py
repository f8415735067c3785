"""Faults of the backward kernels for Hopper that a CPU can see: see `tests.mutants`."""

from __future__ import annotations

from tests.faults.kernels import of, rule
from tests.faults.mosaic_gpu import APART

DIVIDED = "tests/mosaic_gpu/test_backward.py -k divided_backward"
OF_GRADIENTS = (
    "tests/mosaic_gpu/test_interpreted.py -m '' -k 'parts_of_gradients and 64'"
)
SHARED = "tests/kernels/test_block_mask.py -m '' -k 'mosaic_gpu_kernels and shared-128'"
SHARES = "tests/mosaic_gpu/test_listed_visits.py -k share"
OF_BIAS = "tests/mosaic_gpu/test_interpreted.py -m '' -k parts_of_a_bias"
OF_TABLE = "tests/mosaic_gpu/test_functions.py -m '' -k table"
ORDER = "tests/mosaic_gpu/test_any_order.py"

MUTANTS = [
    *of(
        "pallas_kernels/mosaic_gpu/tiles.py",
        (
            "in any order none waits for the one that stores",
            "self.before if in_order else minimum(self.before, 1)",
            "self.before if in_order else minimum(self.before, 0)",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward.py",
        (
            "there is never an order",
            "in_order = plan.launch.deterministic",
            "in_order = False",
            ORDER,
        ),
        (
            "nobody waits to add to dq",
            "plgpu.semaphore_wait(semaphore, done",
            "(lambda *_, **__: None)(semaphore, done",
            ORDER,
        ),
        (
            "no addition to dq is told",
            "plgpu.wait_smem_to_gmem(0)\nplgpu.semaphore_signal(",
            "plgpu.wait_smem_to_gmem(0)\n(lambda *_, **__: None)(",
            SHARED,
        ),
        (
            "each addition to dq is told twice",
            "plgpu.wait_smem_to_gmem(0)\nplgpu.semaphore_signal(semaphore, 1",
            "plgpu.wait_smem_to_gmem(0)\nplgpu.semaphore_signal(semaphore, 2",
            SHARED,
        ),
        (
            "without an order nobody is told of the first",
            "pl.when(turn.before == 0)(tell)",
            "pass",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward_consumer.py",
        (
            "parts of a shared block are not told",
            "tiles.shared_number]\nplgpu.semaphore_signal(",
            "tiles.shared_number]\n(lambda *_, **__: None)(",
            SHARED,
        ),
        (
            "nobody waits for parts of a shared block",
            "plgpu.semaphore_wait(semaphore, count",
            "(lambda *_, **__: None)(semaphore, count",
            SHARED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward_plan.py",
        (
            "several accumulators of dq without an order",
            "if launch.deterministic:",
            "if launch:",
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/__init__.py",
        (
            "the caller's wish for any order is lost",
            '{"deterministic": call.is_deterministic}',
            '{"deterministic": True}',
            ORDER,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/tuning.py",
        (
            "parts of shared blocks take twice the memory of gradients",
            "bytes_of_float32 = 2",
            "bytes_of_float32 = 1",
            "tests/mosaic_gpu/test_listed_visits.py -k parts_take",
        ),
        (
            "parts of shared blocks as small as can be",
            "visited // numbers.rows_of_a_part",
            "visited",
            "tests/mosaic_gpu/test_listed_visits.py -k not_too_small",
        ),
    ),
    *of(
        "pallas_kernels/core/visits.py",
        (
            "programs that are not used visit",
            "_NO_VISITS + is_used * (1 - _NO_VISITS)",
            "1 + is_used * 0",
            SHARES,
        ),
        (
            "more programs than blocks where none is shared",
            "is_used = maximum(minimum(-(-keys // rows) - place, 1), 0)",
            "is_used = maximum(minimum(-(-keys // rows) - place + 1, 1), 0)",
            "tests/mosaic_gpu/test_listed_visits.py -k not_shared",
        ),
        (
            "a third block is shared",
            "end = minimum(self.many, self.sharing.blocks) * parts",
            "end = self.many * parts",
            SHARES,
        ),
        (
            "blocks after those that are shared come too early",
            "block + maximum(after - end, 0)",
            "block + 0 * maximum(after - end, 0)",
            SHARES,
        ),
        (
            "blocks of a larger list are counted, not the kernel's",
            "dtype=jnp.int32) * (listed.own // rows)",
            "dtype=jnp.int32)",
            "tests/mosaic_gpu/test_listed_visits.py -m '' -k all_attend",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward.py",
        (
            "turns of the last tile once more",
            "following = turn_of(minimum(tile + step, tiles.count - 1))",
            "following = turn",
            SHARED,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/tiles.py",
        (
            "all programs of a shared block visit the same",
            "found.part(share.part, share.parts)",
            "found.part(0 * share.part, share.parts)",
            SHARES,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/dbias.py",
        (
            "dropout's scale forgotten",
            "total * program.spec.dropout_scale",
            "total",
            OF_BIAS,
        ),
        (
            "the first element's keys for all",
            "saved.do.at(here), inputs.v.at(here))",
            "saved.do.at(here), "
            "inputs.v.at({**here, **dict.fromkeys(plan.layout.looped, 0)}))",
            OF_BIAS,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/ddistance.py",
        (
            "tiles of a diagonal all lie on the middle one",
            "i = j + self.after",
            "i = j",
            OF_TABLE,
        ),
        (
            "zeros over the sums of a diagonal",
            "@pl.when(jnp.logical_not(visited))",
            "@pl.when(visited)",
            OF_TABLE,
        ),
        (
            "a diagonal's tiles, not the elements of each",
            "(end - block) * plan.layout.elements",
            "end - block",
            OF_TABLE,
        ),
        (
            "parts of a tile all on its own diagonals",
            "start = ROWS * (parts - 1 + row - column)",
            "start = ROWS * (parts - 1)",
            OF_TABLE,
        ),
        (
            "a warpgroup's sums in the place of another's",
            "own = Rows(self.warpgroup * parts, parts)",
            "own = Rows(0 * self.warpgroup, parts)",
            OF_TABLE,
        ),
        (
            "one number for a diagonal that has several",
            "lax.cond(count == 0,",
            "lax.cond(count >= 0,",
            OF_TABLE,
        ),
        (
            "not the number that a diagonal has",
            'pairs.along(least, "t")',
            'pairs.along(least * 0, "t")',
            OF_TABLE,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward.py",
        (
            "sums of dq to which nothing was added",
            "met.to(axes) > number",
            "met.to(axes) > 0",
            "tests/mosaic_gpu/test_interpreted.py -m '' -k 'accumulators and lengths'",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/dq.py",
        (
            "dq by itself with another vector of rows",
            'pairs.along(consumer.delta, "t")).astype',
            'pairs.along(consumer.lse, "t")).astype',
            APART,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/dkv.py",
        (
            "dk of probabilities",
            "refs.dz.ref.at[slot], q_own",
            "refs.p.ref.at[slot], q_own",
            APART,
        ),
        (
            "parts of dk in the place of those of dv",
            "_result(self.q_or_dk, self.k)",
            "_result(self.do_or_dv, self.k)",
            "tests/mosaic_gpu/test_interpreted.py -m '' -k parts_of_gradients_apart",
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward_consumer.py",
        (
            "pairs of the last tile once more",
            "ahead = consumer.prefetch(tile.next)",
            "ahead = consumer.prefetch(tile.number)",
            rule("bias_half", "bias_half_heads", backend="mosaic_gpu"),
        ),
        (
            "all parts of shared blocks in one place",
            "number = share.block * (sharing.parts - 1) + part",
            "number = share.block * (sharing.parts - 1) + 0 * part",
            SHARED,
        ),
        (
            "the last part of a shared block alone",
            "lax.cond(share.part > 0, together",
            "lax.cond(share.part < 0, together",
            SHARED,
        ),
        (
            "consumers' parts of dk in the same place",
            "stage, row = (0, me * ROWS)",
            "stage, row = (0, 0 * ROWS)",
            OF_GRADIENTS,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward.py",
        (
            "both warps add the first rows of dq",
            "source = plan.dq_part.of(part, source)",
            "source = plan.dq_part.of(0 * part, source)",
            OF_GRADIENTS,
        ),
        (
            "the second rows of dq where the first ones are",
            'Rows(here["t"].start + part * ROWS, ROWS)',
            'Rows(here["t"].start + 0 * ROWS, ROWS)',
            OF_GRADIENTS,
        ),
    ),
    *of(
        "pallas_kernels/mosaic_gpu/hopper/backward.py",
        (
            "parts of a division left apart",
            "division.summed(dkv[:2], dkv_structs)",
            "[x.value for x in dkv]",
            DIVIDED,
        ),
    ),
]
