"""``lenvm fuzz``: the operators, or somebody else's, against the fp64 reference on inputs drawn at random.

``ops/`` has a file for each operator: what its inputs can be, how they are made, how a result is compared. The property
tests draw from the same. ``check.py`` runs one case, ``shrink.py`` makes a failing one small, ``run.py`` goes on until
the time is up, ``report.py`` says what was found, ``command.py`` is the command.
"""

# In the order in which a guided step calls them.
OPERATORS = (
    "limit_span",
    "gather_requests",
    "expand_drafts",
    "topk_candidates",
    "select_scored",
    "pack_drafts",
    "catch_up",
    "ragged_layout",
    "embed_tokens",
    "ragged_linear",
    "rope_cache",
    "value_tree_attention",
    "value_head",
    "candidate_values",
    "reweight_scatter",
    "sample_candidates",
    "verify_drafts",
)
