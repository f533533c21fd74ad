"""Tiny random models, value heads and checkpoints."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from lenvm_kernels.loading import VALUE, model_path
from lenvm_kernels.values import ValueModel, ValueModelConfig

VOCAB, HIDDEN = 97, 48
EOS = 2
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
IMAGE, VIDEO = 90, 91
# Patches of 4 x 4 pixels, four of which become a token, in windows of 2 x 2 tokens.
VISION = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    patch_size=4,
    window_size=16,
    fullatt_block_indexes=[1],
    out_hidden_size=HIDDEN,
)


def vl_config(vision=VISION, image=IMAGE, mrope_section=(1, 2, 3), **changes):
    """The configuration of a tiny Qwen2.5-VL with the image token ``image``, and changes to its language model."""
    text = TINY | dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=0)
    text |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*mrope_section]})
    text.pop("tie_word_embeddings")
    return Qwen2_5_VLConfig(
        text_config=text | changes,
        vision_config=vision,
        image_token_id=image,
        video_token_id=image + 1,
        vision_start_token_id=image - 2,
        vision_end_token_id=image - 1,
    )


ARCHITECTURES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY)),
    # head_dim is not hidden_size / num_attention_heads
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=16)),
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY)),
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, vl_config()),
}
WORDS = ["<pad>", "<unk>", "<eos>", *(f"w{i}" for i in range(40))]


def random_model(model_class, config, seed=0):
    """A ``transformers`` model in which every weight matters, including biases and norms; all activations are O(1)."""
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).eval()
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
        shift = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + shift
    model.get_input_embeddings().weight.data *= HIDDEN**0.5
    return model


def random_head(seed=1, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (hidden, hidden), "fc.bias": (hidden,), "summary.weight": (1, hidden), "summary.bias": (1,)}
    return {f"v_head.{x}": torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for x, shape in shapes.items()}


def random_pair(architecture):
    """A ``transformers`` model of one of :data:`ARCHITECTURES`, and a value head."""
    return random_model(*ARCHITECTURES[architecture]), random_head()


def value_model_of(model, head, **options):
    """The value model with the weights of a ``transformers`` model and of a head."""
    return ValueModel(ValueModelConfig.from_hf(model.config), {**model.state_dict(), **head}, **options)


@torch.no_grad()
def value_logits(model, head, tokens, **images):
    """Value logits, fp32, one per token, from a full forward of ``transformers`` and a plain head."""
    h = model.model(tokens, use_cache=False, **images).last_hidden_state
    h = F.silu(F.linear(h, head["v_head.fc.weight"], head["v_head.fc.bias"]))
    return F.linear(h, head["v_head.summary.weight"], head["v_head.summary.bias"])[..., 0]


def last_value_logits(model, head, sequences):
    """The value logit at the last token of each sequence, from one forward over all sequences."""
    lens = torch.tensor([len(tokens) for tokens in sequences])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in sequences], batch_first=True)
    return value_logits(model, head, padded)[torch.arange(len(lens)), lens - 1]


def tiny_value_model(device, dtype=None, layers=1):
    """A Qwen3, which has all operations of a layer, with widths that are not multiples of the kernels' tiles."""
    config = Qwen3Config(**{**TINY, "num_hidden_layers": layers}, head_dim=16)
    return value_model_of(random_model(Qwen3ForCausalLM, config), random_head(), device=device, dtype=dtype)


def tokenizer_of(words, pad="<pad>", **options):
    """A tokenizer of words separated by blanks."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token=pad, unk_token="<unk>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def save_checkpoint(path, seed, words=WORDS, value_head=False, layers=1, template=None):
    """Save a tiny Llama, a tokenizer over ``words`` with a chat template, and, if ``value_head``, a value head; returns
    the path."""
    sizes = TINY | dict(vocab_size=len(words), intermediate_size=64, num_hidden_layers=layers)
    config = LlamaConfig(**sizes, eos_token_id=EOS, pad_token_id=0, bos_token_id=None)
    random_model(LlamaForCausalLM, config, seed=seed).save_pretrained(path)
    tokenizer_of(words, chat_template=template).save_pretrained(path)
    if value_head:
        save_file(random_head(), path / "value_head.safetensors")
    return str(path)


def change_checkpoint(config_file, tensors_file, change):
    """Change fields of a configuration (None removes a field), or tensors by a function of their dictionary."""
    if callable(change):
        tensors = change(load_file(tensors_file))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tensors_file)
    else:
        fields = json.loads(config_file.read_text()) | change
        config_file.write_text(json.dumps({name: x for name, x in fields.items() if x is not None}))


def write_smollm2(folder):
    """Write the demo's models in fp32 to ``base`` and ``value`` in the folder; returns the base model and tokenizer."""
    source = dict(pretrained_model_name_or_path=model_path().parent, gguf_file=model_path().name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # AutoModelForCausalLM.from_pretrained would need accelerate, which the engines do not install.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(model_path(), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)  # the output layer is tied to the embedding
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "value").mkdir()
    for saved in (*(folder / "base").iterdir(), *VALUE.iterdir()):
        (folder / "value" / saved.name).symlink_to(saved)
    return model, tokenizer
