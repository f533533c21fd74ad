"""``lenvm evaluate``: how well a target length is met, and at what price.

:mod:`.command` is the command, :mod:`.run` makes the answers, :mod:`.servers` gets them from a server, :mod:`.measures`
scores them, :mod:`.accuracy` says which are right, :mod:`.calibration` compares them with what was predicted, and
:mod:`.report` writes tables and plots. Nothing heavy is imported before the command runs.
"""
