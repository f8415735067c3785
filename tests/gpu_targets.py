"""GPUs that need not be here: what XLA asks of one when it compiles for it."""

from __future__ import annotations

import dataclasses

KIB, GB = 1 << 10, 10**9
# Of a multiprocessor, by compute capability: shared memory in KiB, threads, blocks of
# threads, and units for float32. What one block may use is 1 KiB less.
_MULTIPROCESSOR = {
    "8.0": (164, 2048, 32, 64),
    "8.6": (100, 1536, 16, 128),
    "8.9": (100, 1536, 24, 128),
    "9.0": (228, 2048, 32, 128),
    "10.0": (228, 2048, 32, 128),
    "10.3": (228, 2048, 32, 128),
    "12.0": (100, 1536, 24, 128),
    "12.1": (100, 1536, 24, 128),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, from its data sheet.

    Attributes:
      kind: its name, as JAX says it.
      capability: compute capability.
      multiprocessors: how many it has.
      bandwidth: of its memory, GB/s.
      memory: GB.
      l2: MiB of its second cache.
      clock: GHz.
    """

    kind: str
    capability: str
    multiprocessors: int
    bandwidth: int
    memory: int
    l2: int
    clock: float

    @property
    def shared_memory(self) -> int:
        """Bytes that one block of threads may use."""
        return (_MULTIPROCESSOR[self.capability][0] - 1) * KIB

    def programs(self, threads: int, registers: int, shared_memory: int) -> int:
        """How many blocks of threads run on a multiprocessor at once.

        Args:
          threads: of a block.
          registers: of a thread.
          shared_memory: bytes of a block.
        """
        size, most_threads, most_blocks, _ = _MULTIPROCESSOR[self.capability]
        of_registers = 65536 // (-(-registers // 8) * 8 * threads)
        of_memory = size * KIB // (shared_memory + KIB)
        return min(of_registers, of_memory, most_threads // threads, most_blocks)

    @property
    def description(self) -> str:
        """For `jax.experimental.topologies` (XLA's GpuTargetConfigProto).

        From capability 9.0 on a GPU has the features of its own family; XLA finds the
        same of a real one, and its compiler may end the process without.
        """
        size, threads, _, units = _MULTIPROCESSOR[self.capability]
        major, minor = self.capability.split(".")
        features = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {size * KIB}
  shared_memory_per_block_optin: {self.shared_memory}
  threads_per_core_limit: {threads}
  core_count: {self.multiprocessors}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {self.bandwidth * GB}
  l2_cache_size: {self.l2 * KIB * KIB}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory * GB}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {features}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.kind}"
"""


TARGETS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", "8.0", 108, 2039, 80, 40, 1.41),
    "a10": Target("NVIDIA A10", "8.6", 72, 600, 24, 6, 1.695),
    "rtx3090": Target("NVIDIA GeForce RTX 3090", "8.6", 82, 936, 24, 6, 1.695),
    "l4": Target("NVIDIA L4", "8.9", 58, 300, 24, 48, 2.04),
    "l40s": Target("NVIDIA L40S", "8.9", 142, 864, 48, 96, 2.52),
    "rtx4090": Target("NVIDIA GeForce RTX 4090", "8.9", 128, 1008, 24, 72, 2.52),
    "h200": Target("NVIDIA H200", "9.0", 132, 4800, 150, 50, 1.98),
    "gh200": Target("NVIDIA GH200 480GB", "9.0", 132, 4000, 96, 50, 1.98),
    "b200": Target("NVIDIA B200", "10.0", 148, 7700, 180, 126, 1.965),
    "b300": Target("NVIDIA B300 SXM6 AC", "10.3", 148, 7900, 288, 126, 1.965),
    "rtx5090": Target("NVIDIA GeForce RTX 5090", "12.0", 170, 1792, 32, 96, 2.41),
    "rtxpro6000": Target(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        *("12.0", 188, 1792, 96, 128, 2.6),
    ),
    "gb10": Target("NVIDIA GB10", "12.1", 48, 273, 128, 24, 2.4),
}
