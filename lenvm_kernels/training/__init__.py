"""A value model for a base model of one's own: answers are collected, a value model is fitted to their lengths.

:mod:`.collect` samples answers and :mod:`.answers` keeps them; :mod:`.packs` lays them out for a forward;
:mod:`.fit` trains; :mod:`.measures` says how well values predict lengths; :mod:`.checkpoint` writes what engines load;
:mod:`.cost` computes what all of it takes. :mod:`.command` has ``lenvm collect``, ``lenvm fit`` and ``lenvm train``.
"""
