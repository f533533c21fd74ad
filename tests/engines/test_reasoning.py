"""A model that thinks and calls tools, with next tokens from a table, in the engine of this environment.

Each guided token must be the token drawn from the table by a guided step in this process, so guided text is the same in
all engines.
"""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lenvm_kernels
from lenvm_kernels.guidance import Thoughts, parse_guidance, text_breaks_of
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import ConstantValues, GuidedStep, Sampling, StepBatch, StepConfig
from tests.helpers.models import tokenizer_of

MARKS = {"<pad>": ".", "<unk>": ".", "<eos>": "$", "<think>": "[", "</think>": "]"}
MARKS |= {"<tool_call>": "(", "</tool_call>": ")"}
# Words of thoughts and answers in any order, and words of plans and calls in a fixed order.
THOUGHT, ANSWER = ([*(f"{kind}{i}" for i in range(20)), f"{kind}."] for kind in "ta")
PLAN, CALL = ([f"{kind}{i}" for i in range(40)] for kind in "pc")
WORDS = [*MARKS, *THOUGHT, *ANSWER, *PLAN, *CALL]
WORDS += [f"w{i}" for i in range(256 - len(WORDS))]
ID = {word: i for i, word in enumerate(WORDS)}
EOS, MAX_TOKENS = ID["<eos>"], 150
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ '<think>' }}"


def next_words():
    """Probabilities of the next word, by word."""
    after = {"<think>": dict.fromkeys(THOUGHT, 1.0), "</think>": dict.fromkeys(ANSWER, 1.0), "<tool_call>": {"c0": 1.0}}
    for words, end in ((THOUGHT, "</think>"), (ANSWER, "<eos>")):
        *inside, stop = words
        after |= dict.fromkeys(inside, {word: 0.85 / 20 for word in inside} | {stop: 0.15})
        after[stop] = {word: 0.98 / 20 for word in inside} | {end: 0.02}
    for words, end in ((PLAN, "<tool_call>"), (CALL, "</tool_call>")):
        after |= {word: {following: 1.0} for word, following in zip(words, [*words[1:], end], strict=True)}
    return after | {"</tool_call>": {"<eos>": 1.0}}


def scripted_model():
    """A Llama with a layer of zeros, so that the next token only depends on the last token."""
    size = len(WORDS)
    sizes = dict(vocab_size=size, hidden_size=size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8)
    config = LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.fill_(float("norm" in name))
    model.model.embed_tokens.weight.data = torch.eye(size)
    probs = torch.full((size, size), 1e-7)
    for word, after in next_words().items():
        for following, p in after.items():
            probs[ID[following], ID[word]] = p
    model.lm_head.weight.data = probs.log() / size**0.5  # the norm multiplies a unit vector by this root
    return model


# Parameters, the prompt after two words, and a pattern of the output with one letter per token, its kind.
BUDGET, BOTH = {"thinking_budget": 40}, {"thinking_budget": 40, "target_length": 30}
CASES = [
    (BUDGET, "<think>", "t{20,50}]a+[$]?"),  # the answer is drawn by the engine
    (BOTH, "<think>", "t{20,50}]a{20,36}[$]"),
    (BOTH | {"thinking_budget": 0}, "<think>", "]a{20,36}[$]"),
    (BOTH | {"thinking_budget": 0, "end_message": "t1 t2 t."}, "<think>", "ttt]a{20,36}[$]"),
    (BOTH | {"end_message": "t1 t.", "hard_limit": 15}, "<think> t1 t1", "t{13}tt]a{20,36}[$]"),
    # 30 tokens of the thought are in the prompt.
    (BOTH, "<think>" + " t1" * 30, "t{0,20}]a{20,36}[$]"),
    ({"target_length": 90, "target_length_mode": "total", **BUDGET}, "<think>", "t{20,50}]a{20,60}[$]"),
    ({"target_sentences": 3, **BUDGET}, "<think>", "t{20,50}]a+[$]"),
    ({"soft_max_tokens": True}, "<think>", "t+]a+[$]"),
    ({"target_length": 30}, "<think> t1 </think>", "a{20,36}[$]"),
    ({"target_length": 30}, "<think>", "t+(]a{20,36}[$])?"),
    # A plan of 39 more words, a call and its end.
    ({"target_length": 10}, "<think> p0", r"p{39}\(c{40}\)[$]"),
    (BOTH, "<think> p0", r"p{39}\(c{40}\)[$]"),
    (BOTH | {"target_length": 60}, "<think> t1 </think> p0", r"p{39}\(c{40}\)[$]"),
    ({"target_length": 60}, "<think> t1 </think> p0", r"p{39}\(c{40}\)[$]"),
    ({"thinking_budget": 10}, "<think> p0", r"p{12}\]a+[$]?"),
    # Without a hard limit, the end is drawn later.
    ({"thinking_budget": 10, "hard_limit": 1_000_000_000}, "<think> p0", r"p{13,39}\]a+[$]?"),
]


def tokens_of(text):
    return [ID[word] for word in ["w0", "w1", *text.split()]]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """The model, its tokenizer, and their folder."""
    folder, model, tokenizer = tmp_path_factory.mktemp("scripted"), scripted_model(), tokenizer_of(WORDS)
    tokenizer.chat_template = TEMPLATE
    for each in (model, tokenizer):
        each.save_pretrained(folder / "base")
    return SimpleNamespace(folder=folder, model=model, tokenizer=tokenizer)


def answer_of_transformers(scripted, guidance, prompt, seed, temperature):
    torch.manual_seed(seed)
    options = dict(tokenizer=scripted.tokenizer, do_sample=temperature > 0, top_k=0, max_new_tokens=MAX_TOKENS)
    output = lenvm_kernels.generate(scripted.model, torch.tensor([prompt]), guidance=guidance, **options)
    return output[0, len(prompt) :].tolist()


def answer_of_sglang(server, guidance, prompt, seed, temperature):
    sampling = {"max_new_tokens": MAX_TOKENS, "temperature": temperature, "sampling_seed": seed}
    response = server.post(input_ids=prompt, sampling_params=sampling | {"custom_params": guidance})
    assert response.ok, response.text
    return response.json()["output_ids"]


def answer_of_vllm(server, guidance, prompt, seed, temperature):
    options = {"max_tokens": MAX_TOKENS, "temperature": temperature, "top_k": 0, "ignore_eos": False}
    response = server.post(model="base", prompt=prompt, seed=seed, vllm_xargs=guidance, **options)
    assert response.ok, response.text
    return response.json()["choices"][0]["token_ids"]


# Functions that complete a prompt, and options of the server, None without a server. SGLang's warm-up request has no
# token of this vocabulary.
ENGINES = {
    "sglang": (answer_of_sglang, ["--skip-server-warmup"]),
    "vllm": (answer_of_vllm, []),
    "transformers": (answer_of_transformers, None),
}


def draws(scripted, guidance, prompt, output, seed, temperature):
    """Tokens drawn by guided steps at each token of an output, -1 where the request is unguided."""
    thoughts, breaks = Thoughts.of(scripted.tokenizer), text_breaks_of(scripted.tokenizer)
    params = parse_guidance(guidance, thoughts=thoughts, has_values=False, max_tokens=MAX_TOKENS)
    config = StepConfig(vocab_size=len(WORDS), text_breaks=breaks)
    step = GuidedStep(ConstantValues(), PagedSlots(1, max_len=256, device="cpu"), config)
    span = params.span_state(prompt)
    step.add_request(0, params, {EOS}, prompt_len=len(prompt), seed=seed, span=span)
    sampling = Sampling(0, 1.0, 0.0, temperature=temperature, is_logits=True, sample=True)
    row, sequence = torch.tensor([0]), list(prompt)
    for token in output:
        logits = scripted.model.lm_head.weight[:, sequence[-1]][None] * len(WORDS) ** 0.5
        batch = StepBatch(torch.tensor(sequence[-1:]), row, torch.tensor([len(sequence)], dtype=torch.int32))
        prepared = step.prepare(logits.detach().clone(), batch)
        yield step.step(prepared, sampling).tokens.item()
        sequence.append(token)


@pytest.fixture(scope="module")
def outputs(scripted):
    """The name of this environment's engine, and its outputs by case and temperature. Servers get all requests at
    once."""
    name = next(name for name in ENGINES if importlib.util.find_spec(name))
    (complete, options), engine = ENGINES[name], nullcontext(scripted)
    if options is not None:
        helper = importlib.import_module(f"tests.helpers.{name}_server")
        engine = helper.running_server(scripted.folder, name, *options, LENVM_VALUE_MODEL="none")
    requests = [*product(range(len(CASES)), (1.0, 0.0))]
    with engine as target, ThreadPoolExecutor(1 if options is None else 16) as pool:

        def answer(request):
            (guidance, text, _), temperature = CASES[request[0]], request[1]
            return complete(target, guidance, tokens_of(text), 3, temperature)

        return name, dict(zip(requests, pool.map(answer, requests), strict=True))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_thoughts_tool_calls_and_answers(scripted, outputs, case):
    """One sampled and one greedy output per request. transformers samples with torch's generator."""
    (name, of_requests), (guidance, text, pattern) = outputs, CASES[case]
    prompt = tokens_of(text)
    for temperature in (1.0, 0.0):
        output = of_requests[case, temperature]
        kinds = "".join(MARKS.get(word, word[0]) for word in (WORDS[token] for token in output))
        if temperature > 0:
            assert re.fullmatch(pattern, kinds), kinds
        if temperature == 0 or name != "transformers":
            expected = draws(scripted, guidance, prompt, output, 3, temperature)
            assert output == [token if drawn < 0 else drawn for token, drawn in zip(output, expected, strict=True)]
