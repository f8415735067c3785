#!/usr/bin/env bash
# `cost_analysis` counts one round of a loop, although the program knows how many there are.
#
# Ten products of 64 x 64 matrices in `lax.fori_loop` or `lax.scan`: the compiled program says `known_trip_count` of 10 for
# the loop, and `Compiled.cost_analysis()["flops"]` is that of one product. A model whose layers are scanned reports the work
# of one layer.
#
# Seen: known trip count True, FLOPs of 1.00 products of 10 (both loops).
#
# Versions: jax and jaxlib 0.12.0.1, Python 3.12, CPU; seen on 2026-11-27. Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.2
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

x = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def loop(x):
    return jax.lax.fori_loop(0, 10, lambda _, y: y @ x, x)


def scan(x):
    return jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=10)[0]


for function in (loop, scan):
    compiled = jax.jit(function).lower(x).compile()
    knows = 'known_trip_count":{"n":"10"}' in compiled.as_text()
    products = compiled.cost_analysis()["flops"] / (2 * 64**3)
    print(f"{function.__name__}: known trip count {knows}, FLOPs of {products:.2f} products of 10")
    assert knows and round(products, 2) == 1.0
PYTHON
