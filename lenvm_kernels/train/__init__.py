"""Training of value sources for a base model: ``lenvm collect``, ``lenvm fit`` and ``lenvm train``.

:mod:`.collect` samples answers and :mod:`.answers` stores them. :mod:`.targets` turns their
lengths into values. :mod:`.fit` trains a probe (:mod:`.probe`) or a value model (:mod:`.value_model`) on them, and
:mod:`.measures` compares its values with held-out answers. :mod:`.train` runs the stages in turn, and :mod:`.cost`
estimates what they take. The flags are in :mod:`.command`.
"""
