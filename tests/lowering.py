"""Lowering for an NVIDIA GPU on a machine without one."""

from __future__ import annotations

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lower_for_gpu(function, *args, device: str = "NVIDIA H200") -> str:
    """The StableHLO module of `function` for a CUDA device of that kind."""
    gpu = AbstractDevice(device_kind=device, num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
