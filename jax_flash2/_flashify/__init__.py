"""`flashify`: the attention of any function, computed by `jax_flash2.attention`."""

from jax_flash2._flashify.transform import flashify

__all__ = ["flashify"]
