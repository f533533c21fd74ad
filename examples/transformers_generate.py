"""Length-guided ``model.generate`` of transformers: prompts of one batch, each with its own guidance.

    python examples/transformers_generate.py
    python examples/transformers_generate.py BASE VALUE

BASE and VALUE are directories in Hugging Face format with the same vocabulary. The default is the demo's models.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lenvm_kernels
from lenvm_kernels import ValueModel
from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.loading.models import Models

SAMPLING = dict(temperature=0.8, top_k=8, min_p=0.02)  # the processor applies the filters; generate samples without any
PROMPTS = ["What is a comet?", "Why is the sky blue?"]
# Unguided; shorter; as close to 40 tokens as candidates allow. A list would give each prompt its own guidance.
GUIDANCE = [None, {"value_mode": "centered_exp", "value_scale": -60}, {"target_length": 40, "entropy_threshold": 0.5}]

if sys.argv[1:]:
    BASE, VALUE = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    value_model = ValueModel.from_pretrained(VALUE)
else:
    models = Models.load("demo", "demo", device="cpu", dtype=torch.float32)
    tokenizer, model, value_model = models.tokenizer, models.model, models.value_model

texts = PROMPTS
if tokenizer.chat_template:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)

# Without a value model, and with the model's own sampling parameters: one call.
inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
output = lenvm_kernels.generate(model, **inputs, tokenizer=tokenizer, target_length=60, max_new_tokens=200)
width = inputs["input_ids"].shape[1]
print(tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))

for guidance in GUIDANCE:
    processor = LenVMLogitsProcessor(
        model,
        value_model,
        guidance,
        inputs["attention_mask"],
        max_new_tokens=100,
        tokenizers=(tokenizer, tokenizer),  # so that texts end with a sentence
        **SAMPLING,
    )
    output = model.generate(**inputs, **processor.generation_kwargs)
    for prompt, tokens in zip(PROMPTS, output[:, width:], strict=True):
        print(f"{guidance}\n{prompt}\n  {tokenizer.decode(tokens, skip_special_tokens=True)}\n")
