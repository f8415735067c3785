"""The version, where packaging can read it without importing JAX."""

__version__ = "0.1.0"
