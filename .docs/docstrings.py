"""For the reference: docstrings as Markdown wants them."""

import re

import griffe


class Docstrings(griffe.Extension):
    """Shapes as code, and doctests as code of a section of examples."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is None:
            return
        text, example, code = obj.docstring.value.partition("\nExample:\n")
        text = re.sub(r"(?<!`)\[\*[^\]`]*\]", r"`\g<0>`", text)  # [*B, T, N, H]
        obj.docstring.value = text + example.replace("Example", "Examples") + code
