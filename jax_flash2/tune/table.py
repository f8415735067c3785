"""The user's table, as the tuner writes it: only what was measured is in it."""

import datetime
import importlib.metadata
import json
import math
import platform
from pathlib import Path

import jax_flash2
from pallas_kernels import tables, user_tables


class Table:
    """The table of a backend and a GPU. What it has of earlier runs stays.

    Attributes:
      path: of its file.
    """

    def __init__(self, folder: Path, backend: str, gpu: str):
        self.path = folder / tables.table_path(backend, gpu).name
        self._facts = {"gpu": gpu, "backend": backend}
        self._entries: dict[str, dict] = {"blocks": {}, "crossovers": {}}
        if user_tables.path(backend, gpu) == self.path:  # which is checked
            self._entries = json.loads(json.dumps(user_tables.read(backend, gpu)))

    def put(self, part: str, name: str, head_size: int, entry: dict) -> None:
        """Puts an entry into "blocks" or "crossovers", and writes the file.

        Args:
          part: which.
          name: a kernel, or a condition.
          head_size: of the table.
          entry: blocks by regime, or keys by pass (infinite for never).
        """
        heads = self._entries[part].setdefault(name, {})
        entry = {k: None if x == math.inf else x for k, x in entry.items()}
        heads.setdefault(str(head_size), {}).update(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {**self._facts, "date": now, "versions": versions()}
        self.path.write_text(text({**facts, **self._entries}) + "\n")


def versions() -> dict[str, str]:
    """Of what decides how fast a kernel is."""
    return {
        "jax_flash2": jax_flash2.__version__,
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "python": platform.python_version(),
    }


def text(value, depth: int = 0) -> str:
    """JSON with a line for each entry of numbers."""
    is_dict = isinstance(value, dict)
    deep = is_dict and any(isinstance(x, dict) for x in value.values())
    if not is_dict or not (depth <= 1 or (depth == 2 and deep)):
        return json.dumps(value)
    pad = "  " * (depth + 1)
    entries = (f"{pad}{json.dumps(k)}: {text(x, depth + 1)}" for k, x in value.items())
    return "{\n" + ",\n".join(entries) + "\n" + "  " * depth + "}"
