"""Calls of the tests have the blocks that the library ships, wherever they run."""

import os

os.environ["JAX_FLASH2_TUNING"] = "off"
