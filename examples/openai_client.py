"""Request a length target from a guided SGLang or vLLM server with the OpenAI client (``pip install openai``).

LENVM_VALUE_MODEL=VALUE python -m sglang.launch_server --model-path BASE   # or, with the demo's models: make serve
python examples/openai_client.py --prompt "What is photosynthesis?" --target-length 60

LENVM_VALUE_MODEL=VALUE vllm serve BASE
python examples/openai_client.py --engine vllm --url http://127.0.0.1:8000/v1
"""

import argparse

import openai

GUIDANCE = {"sglang": "custom_params", "vllm": "vllm_xargs"}  # name of the field in each engine

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--engine", choices=GUIDANCE, default="sglang")
parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
parser.add_argument("--prompt", default="What is photosynthesis?")
parser.add_argument("--target-length", type=int, default=60, help="tokens of the answer")
args = parser.parse_args()

client = openai.OpenAI(base_url=args.url, api_key="none")
guidance = {"target_length": args.target_length}
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": args.prompt}],
    temperature=0.8,
    max_tokens=200,
    seed=1,
    extra_body={"top_k": 8, "min_p": 0.1, GUIDANCE[args.engine]: guidance},
)

print(answer.choices[0].message.content)
print(f"{answer.usage.completion_tokens} tokens; the target was {args.target_length}")
