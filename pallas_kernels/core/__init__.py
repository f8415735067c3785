"""What attention means: masks, scores, recurrences.

Only `jax.numpy` and `jax.lax`, so that every function here works on arrays outside a
kernel, on loaded blocks inside one, and (the block ranges) on plain Python integers.
"""
