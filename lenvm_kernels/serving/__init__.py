"""A value model behind HTTP: ``engine.py`` computes what calls wait for, ``app.py`` answers them.

``command.py`` is ``lenvm serve``, which starts both; it imports them when it runs.
"""
