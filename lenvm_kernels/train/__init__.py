"""Training of value sources for a base model: ``lenvm collect``, ``lenvm fit`` and ``lenvm train``.

:mod:`.collect` samples answers; :mod:`.answers` stores them and turns their lengths into values. :mod:`.fit` trains a
:mod:`.probe` or a :mod:`.value_model` on them, and compares its values with held-out answers. :mod:`.train` runs the
stages in turn. The flags are in :mod:`.command`.
"""
