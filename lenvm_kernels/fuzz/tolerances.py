"""Every tolerance of the equivalence tests, in one table.

``TOLERANCE[operator][dtype of the inputs]`` is (relative, absolute) against the fp64 reference on the same inputs. The
kernels compute in fp32, so the dtype matters only if operands or results are rounded to it.
"""

import torch

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

TOLERANCE = {
    # probabilities: one exp and one sum in fp32
    "topk_candidates": {FP32: (1e-5, 1e-7), BF16: (1e-5, 1e-7), FP16: (1e-5, 1e-7)},
    # outputs O(1); probabilities and results are rounded to the inputs' dtype
    "value_tree_attention": {FP32: (1e-4, 1e-5), BF16: (2e-2, 2e-2), FP16: (2e-3, 2e-3)},
    # logits O(1) accumulated in fp32 over up to H products
    "value_head": {FP32: (1e-4, 1e-4), BF16: (1e-4, 1e-4), FP16: (1e-4, 1e-4)},
    # logits O(1), fp32 sums; one of the 64 or more outputs of SiLU may be close to a rounding boundary of the dtype and
    # be rounded the other way
    "candidate_values": {FP32: (1e-4, 1e-4), BF16: (1e-3, 2e-3), FP16: (1e-4, 3e-4)},
    # guided probabilities; fp32 values and a root found to 1e-6 of the value range
    "reweight_scatter": {FP32: (0.0, 2e-5)},
    # predicted lengths: an exponential, with an error relative to the exponent, and a logarithm
    "draw": {FP32: (1e-5, 1e-30)},
    # rotated pairs, relative to their length; bf16 and fp16 against the reference in the same dtype, where each of
    # three roundings (two of the norm, one of the rotation) may go the other way: one ulp for both numbers of a pair
    "rope_cache": {FP32: (0.0, 1e-5), BF16: (0.0, 4 * 2**-7), FP16: (0.0, 4 * 2**-10)},
    # fp32 sums of 64 squares; cosine and sine of an fp32 angle
    "embed_tokens": {FP32: (1e-5, 1e-6), BF16: (1e-5, 1e-6), FP16: (1e-5, 1e-6)},
    # results O(1), fp32 sums of up to K products, rounded once to the inputs' dtype (half an ulp)
    "ragged_linear": {FP32: (1e-4, 1e-4), BF16: (2**-8, 1e-4), FP16: (2**-11, 1e-4)},
}
