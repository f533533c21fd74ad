"""Triton kernels for LenVM length-guided decoding (arXiv 2604.27039), with pure-PyTorch references.

The operators, in the order of a decode step: :func:`topk_candidates`, :func:`value_tree_attention`,
:func:`value_head`, :func:`reweight_scatter`.
"""
