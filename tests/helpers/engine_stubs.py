"""Packages with only the signatures of an engine's recorded version."""

from lenvm_kernels.engines.signatures import ANYTHING, recorded


def stubs(engine, version, **changed):
    """Files by path. ``changed``: other parameters, by the last part of a name."""
    classes = {}  # lines by module and class
    for target, parameters in recorded(engine)[version].items():
        module, name = target.split(":")
        *owner, last = name.split(".")
        parameters = changed.get(last, parameters)
        if last[0].isupper():  # a dataclass
            fields = [f"{field}: object" for field in parameters.split(", ")]
            classes.setdefault((module, last), []).extend(fields)
        else:
            taken = "*args" if parameters == ANYTHING else parameters.replace("=", "=None")
            taken = ", ".join(filter(None, ["self" if owner else "", taken]))
            classes.setdefault((module, *owner), []).append(f"def {last}({taken}): ...")
    files = {}
    for (module, *owner), lines in classes.items():
        path = f"{module.replace('.', '/')}.py"
        text = "".join(f"{'    ' * len(owner)}{line}\n" for line in lines)
        head = f"@dataclasses.dataclass\nclass {owner[0]}:\n" if owner else ""
        files[path] = files.get(path, "import dataclasses\n\n") + head + text
    return files
