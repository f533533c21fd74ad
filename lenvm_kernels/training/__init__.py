"""A value model for a base model of one's own: answers are collected, and a value model is fitted to their lengths.

:mod:`.collect` has answers made, :mod:`.decode` in process, and :mod:`.answers` keeps them. :mod:`.targets` makes
values of their lengths, and :mod:`.packs` lays them out for a forward of :mod:`.network`, which :mod:`.fit` trains.
:mod:`.measures` and :mod:`.report` say how well it predicts, :mod:`.checkpoint` writes what engines load, and
:mod:`.cost` computes what all of it takes. :mod:`.stages` and :mod:`.train` put them together for :mod:`.command`.
"""
