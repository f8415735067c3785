"""What the text of a Triton module says: which elements its programs touch.

Numbers of a program that depend on nothing it loads can be computed here: they are a
few operations on integers. So addresses are known without a GPU. Of rows that the
forward may store a second time, in a branch, the first store is seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

_BINARY = {
    "addi": np.add,
    "andi": np.logical_and,
    "divsi": np.floor_divide,
    "divui": np.floor_divide,
    "maxsi": np.maximum,
    "minsi": np.minimum,
    "muli": np.multiply,
    "remsi": np.remainder,
    "remui": np.remainder,
    "subi": np.subtract,
}
_COMPARED = {"slt": np.less, "sle": np.less_equal, "sge": np.greater_equal}


def _shape(type_: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"(\d+)x", type_)))


class Program:
    """One program of a kernel.

    Args:
      text: the module (`lowering.kernel_modules`).
      ids: the program's number along x, y and z.
    """

    def __init__(self, text: str, ids: tuple[int, int, int]):
        self._ids = dict(zip("xyz", ids, strict=True))
        self._known: dict[str, np.ndarray] = {}
        # Only what is in no loop: names in two of them may be the same.
        lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        found = (re.match(r"(%\w+) = (\S+) ?(.*)", line) for line in lines)
        self._operations = {m[1]: (m[2], m[3]) for m in found if m}
        self._touched = [
            line for line in lines if re.search(r"\btt.(load|store) ", line)
        ]

    def touched(self, kind: str) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the argument, its elements) that are loaded or stored, in order.

        Args:
          kind: "load" or "store"; outside of loops.
        """
        for line in self._touched:
            match = re.search(rf"\btt.{kind} ([^:{{]*)", line)
            if match is None:
                continue
            address, *others = match[1].strip().split(", ")
            mask = others[0 if kind == "load" else 1 :][:1]
            elements = self._number(address)
            if mask:
                elements = elements[
                    np.broadcast_to(self._number(*mask), elements.shape)
                ]
            yield self._argument(address), elements

    def _argument(self, name: str) -> int:
        while not name.startswith("%arg"):
            _, rest = self._operations[name]
            name = re.match(r"%\w+", rest)[0]
        return int(name[4:])

    def _number(self, name: str) -> np.ndarray:
        if name not in self._known:
            self._known[name] = np.asarray(self._computed(name))
        return self._known[name]

    def _computed(self, name: str):
        if name.startswith("%arg"):
            return 0  # so that addresses are numbers of elements
        operation, rest = self._operations[name]
        kind = operation.split(".")[-1]
        operands = re.findall(r"%\w+", rest.split(" : ")[0])
        if kind == "constant":
            word = rest.split(" : ")[0]
            return word == "true" if word in ("true", "false") else int(word)
        if kind == "ori":
            # Which rows a first store takes depends on what was loaded: all, here.
            return np.ones(_shape(rest.split(" : ")[-1]), bool)
        if kind == "get_program_id":
            return self._ids[rest[0]]
        if kind == "make_range":
            return np.arange(int(re.search(r"end = (\d+)", rest)[1]))
        values = [self._number(x) for x in operands]
        if kind == "expand_dims":
            return np.expand_dims(*values, int(re.search(r"axis = (\d+)", rest)[1]))
        if kind in ("splat", "broadcast"):
            return np.broadcast_to(*values, _shape(rest.split(" -> ")[-1]))
        if kind in ("extsi", "index_cast"):
            return values[0]
        if kind == "cmpi":
            return _COMPARED[rest.split(",")[0]](*values)
        if kind == "addptr":
            return np.add(*values)
        return _BINARY[kind](*values)
