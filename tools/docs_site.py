"""Hooks of ``mkdocs.yml``: links out of ``docs/`` become text, and docstrings get a form that griffe parses."""

import re
from typing import Any

import griffe

# A link to a file outside docs/ is valid in the repository but not on the site.
_LINK_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")
# Annotated[type, form, description], see lenvm_kernels/types.py. griffe removes the quotes of a one-word description.
_DESCRIBED = re.compile(r"""^Annotated\[.*, (?:["'](?P<text>.+)["']|(?P<name>[^,"']+))\]$""")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?\.?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of mkdocs: links out of ``docs/`` become plain text."""
    return _LINK_OUT.sub(r"\1", markdown)


class Docstrings(griffe.Extension):
    """Replace roles by code and ``Example:`` by griffe's section ``Examples:``; read descriptions in annotations."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if match := _DESCRIBED.search(str(attr.annotation or "")):
            attr.docstring = griffe.Docstring(_ROLE.sub(r"`\1`", match["text"] or match["name"]), parent=attr)
