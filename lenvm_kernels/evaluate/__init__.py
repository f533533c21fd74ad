"""``lenvm evaluate`` and ``lenvm demo``: how well a target length is met, and at what cost in quality.

:mod:`.command` and :mod:`.demo` are the commands. :mod:`.run` plans and generates the answers, in process or with
:mod:`.servers`. :mod:`.measures` and :mod:`.accuracy` score them, and :mod:`.report` writes tables and plots.
"""
