"""FlashAttention-2 as Pallas kernels: `core` says what is computed, backends how."""
