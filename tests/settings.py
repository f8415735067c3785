"""JAX's settings, changed for a while."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def configured(settings):
    """With these settings of JAX, and as before in the end."""
    before = {name: getattr(jax.config, name) for name in settings}

    def update(values):
        compilation_cache.reset_cache()
        for name, value in values.items():
            jax.config.update(name, value)

    update(settings)
    try:
        yield
    finally:
        update(before)
