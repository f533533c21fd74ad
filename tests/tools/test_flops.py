"""``bench.flops`` against the models of transformers, and published figures."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from bench import flops
from bench.flops import Architecture, Workload

TINY = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
TINY |= dict(vocab_size=50, head_dim=8)
MIXTURE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)
SHARED = MIXTURE | dict(shared_expert_intermediate_size=20, mlp_only_layers=[1], head_dim=6, num_hidden_layers=7)
CASES = [(Qwen3MoeConfig, MIXTURE), (Qwen3MoeConfig, MIXTURE | dict(decoder_sparse_step=2, num_hidden_layers=5))]
CASES += [(Qwen2MoeConfig, SHARED), (MixtralConfig, dict(num_local_experts=5, num_experts_per_tok=3))]


@pytest.mark.parametrize(("config_class", "changes"), CASES)
def test_active_weights_of_mixtures_match_transformers(tmp_path, config_class, changes):
    config = config_class(**TINY | changes)
    config.save_pretrained(tmp_path)
    model = Architecture.load(str(tmp_path))
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).model.layers.named_parameters()
    share = model.experts_per_token / model.num_experts
    expected = sum(x.numel() * (share if ".experts." in name else 1) for name, x in weights if x.dim() > 1)
    assert model.expert_layers and model.active_weights == pytest.approx(expected)


def test_published_figures(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["flops", "--check"])
    assert flops.main() == 0
    monkeypatch.setattr(flops, "PUBLISHED_WORK", Workload(50, 16, 105, 250))
    assert flops.main() == 1 and "DIFFERS" in capsys.readouterr().out
