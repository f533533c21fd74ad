"""``lenvm doctor``: packages, device, kernels, settings of the plugins, and how they fit SGLang and vLLM.

:mod:`.command` is the command, :mod:`.sections` names the sections and looks at one: at what is :mod:`.installed`, at
the :mod:`.device` or at the :mod:`.engines`. Whatever is broken becomes a :class:`~.check.Check` that says so. Accepted
versions come from the package's own metadata, variables and hooks from the adapter. Nothing heavy is imported before
the command runs.
"""
