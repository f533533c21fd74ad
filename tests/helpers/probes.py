"""Probes with random tensors, and their expected values."""

import torch
from transformers import AutoModelForCausalLM

from lenvm_kernels.engines.probe_states import ProbeStates
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.values import LengthProbe
from lenvm_kernels.values.probe import ProbeConfig, embedding_signs, write_probe

BIN_EDGES = (1, 2, 4, 8, 16, 32, 64, 128)


def write_random_probe(folder, base, layers=None, seed=5, gamma=0.99):
    """Write a probe of a ``transformers`` model that reads states of ``layers``. If None, of the last layer."""
    count, embedding = model_sizes(base)
    config = ProbeConfig(
        "tiny",
        layers=layers or (count,),
        num_layers=count,
        hidden_size=embedding.shape[1],
        vocab_size=len(embedding),
        embedding_signs=embedding_signs(embedding),
        bin_edges=BIN_EDGES,
    )
    generator, size, outputs, tensors = torch.Generator().manual_seed(seed), 16, 24, {}
    for name, *shape in (
        ("projection", 2 * size, config.state_size),
        ("embedding", size, config.hidden_size),
        ("fc", outputs, size),
        ("bins", len(BIN_EDGES) - 1, outputs),
    ):
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * 2 * shape[1] ** -0.5
        tensors[f"{name}.bias"] = torch.randn(shape[:1], generator=generator)
    write_probe(config, tensors, gamma, folder)


def model_sizes(base):
    """Number of layers and input embedding of a ``transformers`` model."""
    return base.config.num_hidden_layers, base.get_input_embeddings().weight.detach()


@torch.no_grad()
def probe_values(base_path, probe_path, rows):
    """Value logits for guidance and for prediction, ``[rows, K]``, from a ``transformers`` forward per row: the
    parameters of the request, the prompt length, the tokens of the sequence, and the candidates."""
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32).eval()
    probe = LengthProbe.from_pretrained(probe_path, *model_sizes(base))
    states = ProbeStates(base, probe.config.layers, last=True)
    table, found = GuidanceTable(len(rows), torch.device("cpu"), max_eos=1, max_scaled_tokens=1), []
    for row, (guidance, prompt_len, tokens, _) in enumerate(rows):
        params = parse_guidance(guidance, gamma=0.99, strength=probe.lenvm_config.strength)
        table.add_request(row, params, set(), prompt_len=prompt_len)
        base(torch.tensor([tokens]))
        found.append(states.take())
    table.flush()
    return probe.value_logits(
        torch.cat(found),
        torch.tensor([candidates for *_, candidates in rows], dtype=torch.int32),
        table.columns,
        table_rows=torch.arange(len(rows)),
        generated=torch.tensor([len(tokens) - prompt_len for _, prompt_len, tokens, _ in rows], dtype=torch.int32),
    )
