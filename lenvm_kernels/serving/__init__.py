"""A value model behind HTTP: ``engine.py`` computes what calls wait for, ``app.py`` answers them."""
