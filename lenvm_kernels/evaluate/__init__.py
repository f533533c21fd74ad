"""``lenvm evaluate`` and ``lenvm demo``: how well a target length is met, and at what cost in quality.

:mod:`.command` and :mod:`.demo` are the commands. :mod:`.run` makes the answers of a :mod:`.plan`, in process or by
:mod:`.servers`. :mod:`.measures`, :mod:`.accuracy` and :mod:`.calibration` score them, and :mod:`.report` writes tables
and the plot. Nothing heavy is imported before a command runs.
"""
