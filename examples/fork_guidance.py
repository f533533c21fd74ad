"""The guidance of the LenVM fork of SGLang, as a function for ``lenvm fuzz``.

With the fork (eric-ai-lab/Length-Value-Model, sglang-LenVM) and its dependencies installed, in this directory::

    lenvm fuzz --against fork_guidance:reweight_scatter --reference-only --only "values=of candidates"
"""

from types import SimpleNamespace

import torch
from sglang.srt.lvm.lvm_guided_sampling import LvmGuidedSampler, lvm_combined_guidance

from lenvm_kernels import Mode, Status

CONSTRAINTS = (Mode.EQ, Mode.GE, Mode.LE, Mode.EQ_SOFT)


def reweight_scatter(candidates, value_logits, table, *, table_rows=None, generated=None, probs=None):
    """Guided probabilities ``[B, K]``: constraints by the fork's scalar path, all other modes by its batched one."""
    rows = range(len(value_logits)) if table_rows is None else table_rows.tolist()
    counts = [0] * len(rows) if generated is None else generated.tolist()
    requests = [request(table, row, count) for row, count in zip(rows, counts, strict=True)]
    modes, listed = [int(table.mode[row]) for row in rows], candidates.probs > 0
    result = candidates.probs / candidates.probs.sum(1, keepdim=True).clamp(min=1e-38)

    guided = [i for i, status in enumerate(candidates.status.tolist()) if status == Status.GUIDE and modes[i]]
    tilted = [i for i in guided if modes[i] not in CONSTRAINTS]
    if tilted:
        ids = candidates.token_ids[tilted].long().clamp(min=0)
        pending = SimpleNamespace(
            req_list=requests,
            send_batch_indices=tilted,
            gpu_candidates=(candidates.probs[tilted], ids, listed[tilted]),
            guided=torch.zeros(len(rows), int(ids.max()) + 1, device=ids.device),
        )
        LvmGuidedSampler._apply_guidance_gpu(None, pending, value_logits[tilted])
        result[tilted] = torch.where(listed[tilted], pending.guided[tilted].gather(1, ids), 0.0)
    for i in guided:
        if modes[i] in CONSTRAINTS:
            ids, values = candidates.token_ids[i][listed[i]].tolist(), value_logits[i][listed[i]].double().sigmoid()
            ended = torch.tensor([token in requests[i].eos_token_ids for token in ids], device=values.device)
            values = values.masked_fill(ended, 0.0).tolist()
            chosen = lvm_combined_guidance(result[i][listed[i]].tolist(), values, ids, req=requests[i])
            result[i][listed[i]] = torch.tensor(chosen, device=result.device)
    return result


def request(table, row, generated):
    """The attributes of a request that the fork reads."""
    mode = Mode(int(table.mode[row]))
    params = {"gamma": float(torch.exp(-table.nats_per_token[row].double()))}
    if mode in CONSTRAINTS:
        length_mode = "total" if table.counts_down[row] else "remaining"
        params |= {"target_length": float(table.target_length[row]), "target_length_mode": length_mode}
        params["value_constraint"] = mode.name.lower()
    elif mode != Mode.UNGUIDED:
        params |= {"value_mode": mode.name.lower(), "value_scale": float(table.scale[row])}
    if table.value_min[row].isfinite():
        params["value_min"] = float(table.value_min[row])
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params),
        eos_token_ids=set(table.eos_token_ids[row].tolist()),
        output_ids=range(generated),
    )
