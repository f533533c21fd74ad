"""``lenvm fuzz``: compare the operators, or a replacement for one, with the fp64 reference on random inputs.

``ops/`` describes each operator: its options, the generator of its inputs, and the comparison of its results. The
property tests draw from the same descriptions. ``check.py`` checks and reports cases, ``command.py`` is the command.
"""

# In the order of their calls in a guided step.
OPERATORS = (
    *("limit_span", "begin_step", "topk_candidates", "pack_drafts", "lay_out", "embed_tokens", "ragged_linear"),
    *("rope_cache", "value_tree_attention", "value_head", "candidate_values", "reweight_scatter", "draw"),
    "verify_drafts",
)
