"""Memory of attention, forward and backward, against sequence length.

    python -m benchmarks.memory
    python -m benchmarks.memory --lengths=64k,256k,1M --peers=jax_flash2

B 1, 16 heads of 128. What one program needs for the output and all gradients, beyond
them and its operands: as the compiler plans it (temp), and on a GPU as the device's
allocator saw its peak grow (measured). Rows go to `memory.jsonl`.
"""

from dataclasses import asdict

import jax
from absl import flags

from benchmarks import cost_tables, harness, options, programs, records
from benchmarks.peers import PEERS
from benchmarks.shapes import Shape

_LENGTHS = options.integers("lengths", "1k,2k,4k,8k,16k,32k", "Sequence lengths, T.")
_HEADS = flags.DEFINE_integer("heads", 16, "N.", lower_bound=1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "H.", lower_bound=1)
_CAUSAL = flags.DEFINE_bool("causal", True, "Mask.")
_MEASURE = flags.DEFINE_bool("measure", True, "On a GPU, also run each program.")
_DTYPE = options.dtype("bfloat16")
_PEERS = options.jax_peers(["jax_flash2", "xla"])
_RESULTS_DIR, _COMMIT = options.files()
_PASS = "forward_backward"


def _peak() -> int | None:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def measured(compiled: jax.stages.Compiled, shape: Shape) -> int | None:
    """Bytes by which a call's peak passes operands and results.

    None where the device keeps no count, or saw a higher peak before.
    """
    operands = shape.operands()
    before = _peak()
    if before is None:
        return None
    in_use = jax.devices()[0].memory_stats()["bytes_in_use"]
    results = jax.block_until_ready(compiled(*operands))
    size = sum(x.nbytes for x in results)
    return _peak() - in_use - size if _peak() > before else None


def one(peer: programs.JaxPeer, shape: Shape, *, measure: bool) -> dict:
    """The row of a peer at a length."""
    row = {"shape": asdict(shape), "pass": _PASS, "peer": peer.name, "failure": None}
    try:
        function = peer.passes(shape)[_PASS]
        compiled = programs.lower(function, *shape.structs()).compile()
        row["memory"] = programs.memory(compiled)
        if measure:
            programs.check_fits(compiled)
            row["measured_bytes"] = measured(compiled, shape)
    except Exception as error:  # a peer's failure is a result, not the end
        row["failure"] = harness.describe(error)
    return row


def main():
    heads, head_size = _HEADS.value, _HEAD_SIZE.value
    peers = [PEERS[name] for name in _PEERS.value]
    run = records.Run.start("memory", _RESULTS_DIR.value, commit=_COMMIT.value)
    rows = []
    with options.Progress(len(peers) * len(_LENGTHS.value), "program") as progress:
        # A peak counts only if it is the highest so far: one peer after the other, each
        # from the shortest length on.
        for peer in peers:
            for length in sorted(_LENGTHS.value):
                shape = Shape(
                    1, length, heads, heads, head_size, _CAUSAL.value, _DTYPE.value
                )
                row = one(peer, shape, measure=_MEASURE.value and harness.is_gpu())
                rows.append(run.write(row))
                progress.step(f"{peer.label}: {shape}")
    print(f"\n{run.path}\n\n{cost_tables.memory(rows)}")


if __name__ == "__main__":
    options.launch(main)
