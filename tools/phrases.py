"""Count phrases of unnatural English in tracked files. ``python tools/phrases.py`` exits with 1 above the limit."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMIT = 150
FILES = ("*.py", "*.md", "*.sh", "*.toml", "Makefile")
THINGS = (
    "tokens?|requests?|rows?|steps?|kernels?|operators?|models?|tensors?|engines?|servers?|cache|tables?|graphs?|batch|"
    "launch|programs?|probes?|layers?|processors?|states?|values?|slots?|functions?|method|files?|adapters?|plugins?|it"
)
START = r'(?:[.:;!?|#] |"|\n\n)'  # the end of a sentence or the start of a comment, string or paragraph
# A blank in a pattern matches blanks, line ends and comment signs.
PATTERNS = {
    "person": r"\b(?:[Nn]obody|[Ss]omebody|[Ww]hoever|whom|whose)\b",
    "None:": r"\bNone:\x20(?:the|an?|it|they|that|nothing|no|none|as|there|every|all|one)\b",
    "own": r"\b(?:of|on) (?:its|their) own\b",
    "so many": r"\b(?:[Ss]o|[Tt]hat|[Aa]s) (?:many|much|often)\b(?! [\w`]+ as)|\bas (?:many|much) [\w`]+s? as\b",
    "all else": r"\ball else\b|\b(?:and|or) nothing else\b",
    "to the bit": r"\bto the (?:last )?bit\b",
    "thing as person": rf"\b(?:is|are|was|were|be|been) (?:told|asked|heard|looked at)\b|\b(?:{THINGS}) "
    r"(?:asks?|hears?|knows?|tells?|says?|wants?|minds?)\b",
    "genitive start": rf"{START}Of (?!course)|\"of (?:the|an?|each|its|all)\b",
    "pronoun start": rf"{START}(?:Those|That which|Likewise)\b|(?:[.:;] |[^#]# )What (?![^.?]{{0,90}}\?)",
    "pronoun subject": r"(?:, |\band |\bwhat )(?:those|that which|all that) (?:is|are|was|were|has|have)\b",
    "those of": r"\b(?:those|that|these|the ones) (?:of|in|at) (?:the|an?|its|their|all|one|other|another)\b"
    r"|\bthose (?:that|who|with|without|to)\b",
    "of these": r"\bof (?:these|those)(?=[,.;:)\n]| (?:is|are|was|has|have|it)\b)|\b(?:to|for|by|with) those\b",
    "what became": r"\bwhat (?:became|becomes|comes|came) of\b",
    "what clause": r"\b(?:of|by|from|for|with|beside|in|to|and|at|on) what (?:an?|is|are|was|were|it|they|the)\b",
    "inversion": r"\b(?:[Nn]or|[Nn]either) (?:is|are|does|do|has|have|can|was|may)\b",
}


def main() -> int:
    """Print every phrase and the total. Returns 1 above ``LIMIT``, else 0."""
    counts: Counter[str] = Counter()
    listed = subprocess.run(["git", "ls-files", *FILES], check=True, capture_output=True, text=True).stdout.split()
    for path in (Path(name) for name in listed if name != "tools/phrases.py"):
        text = path.read_text()
        for name, pattern in PATTERNS.items():
            for match in re.finditer(pattern.replace(" ", r"[ \t\n#]+"), text):
                print(f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {name}: {' '.join(match[0].split())}")
                counts[name] += 1
    print(*(f"{name} {number}" for name, number in counts.most_common()), sep=", ")
    print(f"{counts.total()} phrases, {LIMIT} are allowed")
    return int(counts.total() > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
