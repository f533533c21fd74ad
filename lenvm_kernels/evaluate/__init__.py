"""``lenvm evaluate`` and ``lenvm demo``: how well a target length is met, and at what cost in quality.

:mod:`.command` and :mod:`.demo` are the commands. :mod:`.run` plans and makes the answers, in process or by
:mod:`.servers`. :mod:`.measures` and :mod:`.accuracy` score them, and :mod:`.report` writes tables and plots.
"""
