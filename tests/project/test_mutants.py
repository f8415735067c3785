"""Faults find their places wherever code moves (`tests.mutants`)."""

import ast
import textwrap

from tests.faults.catalogue import MUTANTS
from tests.mutants import ROOT, sources
from tests.tiers import deep


@deep
def test_a_move_breaks_no_fault():
    """With every file elsewhere, and its code indented by four more spaces."""
    texts = sources(ROOT)
    moved = {
        f"elsewhere/{i}.py": "if True:\n" + textwrap.indent(text, " " * 4)
        for i, text in enumerate(texts.values())
    }
    for mutant in MUTANTS:
        here, there = mutant.place(texts), mutant.place(moved)
        fault = mutant.applied(moved[there.file], there)
        expected = mutant.applied(texts[here.file], here)
        assert ast.dump(ast.parse(fault)) == ast.dump(
            ast.parse("if True:\n" + textwrap.indent(expected, " " * 4))
        ), mutant.name
