"""Hooks of ``mkdocs.yml``: links out of ``docs/`` become text, and docstrings get the form that griffe parses."""

import re
from typing import Any

import griffe

# A link to a file outside of docs/ is valid in the repository, but not in the site.
_LINK_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?\.?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of mkdocs: links out of ``docs/`` become plain text."""
    return _LINK_OUT.sub(r"\1", markdown)


class Docstrings(griffe.Extension):
    """Replace roles by code, and ``Example:`` by griffe's section ``Examples:``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
