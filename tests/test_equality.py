"""Greedy tokens are exactly those of transformers, whatever the engine does
on the way: prefix caching, chunks, preemption, late arrivals.
"""
import functools
import itertools
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minengine.config import EngineArgs
from minengine.sampling_params import SamplingParams
from minengine.v1.engine.llm_engine import LLMEngineV1

OUTPUT_TOKENS = 48
PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Explain gravity to a child in two sentences.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet? Answer with the name only, then say one thing about the author.",
    "What is 12 times 12? Think step by step.",
    "Name a fruit that is red.",
]


@functools.cache
def default_model():
    "Folder of the default model, transformers' model and tokenizer."
    from transformers import AutoTokenizer

    from minengine.model.checkpoint import resolve_model
    folder = str(resolve_model(None).path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, model, AutoTokenizer.from_pretrained(folder)


@functools.cache
def chat_prompts() -> list[list[int]]:
    "The prompts as chats: they share the template's first blocks."
    tokenizer = default_model()[2]
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False,
                                           add_generation_prompt=True) for p in PROMPTS]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def transformers_tokens(model, prompt: list[int], num_tokens: int) -> list[int]:
    "Greedy tokens of one prompt alone, end tokens ignored."
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1,
                             min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0,
                             eos_token_id=None, temperature=None, top_p=None, top_k=None)
    return out[0, len(prompt):].tolist()


@functools.cache
def expected() -> list[list[int]]:
    model = default_model()[1]
    return [transformers_tokens(model, p, OUTPUT_TOKENS) for p in chat_prompts()]


@pytest.fixture(scope="module", autouse=True)
def load_weights_once():
    "The engine of each combination is new; the default model's weights are not."
    import minengine.v1.worker.worker as worker
    original, loaded = worker.load_model, {}

    def load_once(vllm_config):
        key = (vllm_config.model_config.model, vllm_config.model_config.pack_cpu_weights)
        if key not in loaded: loaded[key] = original(vllm_config)
        return loaded[key]

    worker.load_model = load_once
    yield
    worker.load_model = original


def run_engine(args: EngineArgs, prompts, num_tokens, arrivals=None):
    "Tokens of each prompt; `arrivals[i]` is the step before which i is added."
    engine = LLMEngineV1.from_engine_args(args)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    arrivals = arrivals or [0] * len(prompts)
    tokens, preempted, step = {}, 0, 0
    while len(tokens) < len(prompts):
        for i, prompt in enumerate(prompts):
            if arrivals[i] == step: engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        for out in engine.step():
            if out.finished: tokens[int(out.request_id)] = out.outputs[0].token_ids
        core = engine.engine_core.engine_core
        core.scheduler.check_invariants()
        preempted = core.scheduler.num_preempted
        step += 1
        assert step < 10_000, "the engine does not finish"
    pool = core.scheduler.kv_cache_manager
    assert pool.num_free_blocks == pool.num_gpu_blocks, "blocks leaked"
    engine.shutdown()
    return [tokens[i] for i in range(len(prompts))], preempted


COMBINATIONS = list(itertools.product([True, False], [16, 64, 2048], [8, 16], [False, True], [False, True]))


@pytest.mark.parametrize("caching,budget,block_size,small_pool,late", COMBINATIONS)
def test_smollm2_equals_transformers(caching, budget, block_size, small_pool, late):
    folder = default_model()[0]
    prompts = chat_prompts()
    longest = max(map(len, prompts)) + OUTPUT_TOKENS
    args = EngineArgs(
        model=folder, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False,
        enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=8,
        block_size=block_size, max_model_len=longest, num_preallocate_tokens=block_size,
        # A small pool holds two or three requests of eight: the others wait or are preempted.
        num_gpu_blocks_override=(longest * 5 // 2 if small_pool else 4096) // block_size)
    arrivals = [3 * i for i in range(len(prompts))] if late else None
    tokens, preempted = run_engine(args, prompts, OUTPUT_TOKENS, arrivals)
    assert tokens == expected()
    if small_pool: assert preempted > 0, "the pool was meant to be too small"


def tiny_config(family: str):
    "A two-layer model of each family, small enough to be slow nowhere."
    common = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                  initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    special = {
        "llama": {}, "smollm2": {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
        "mistral": {"sliding_window": 24}, "qwen2": {}, "qwen3": {"head_dim": 32},
    }[family]
    kind = {"smollm2": "llama"}.get(family, family)
    return AutoConfig.for_model(kind, **(common | special))


@pytest.fixture(scope="module", params=["llama", "smollm2", "mistral", "qwen2", "qwen3"])
def tiny_model(request, tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(request.param), dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    rng = random.Random(1)
    start = [rng.randrange(3, 160) for _ in range(20)]
    prompts = [start[:n] + [rng.randrange(3, 160) for _ in range(m)] for n, m in
               ((20, 5), (20, 12), (0, 1), (16, 0), (16, 0), (8, 40), (0, 33), (20, 30))]
    return str(folder), prompts, [transformers_tokens(model, p, OUTPUT_TOKENS) for p in prompts]


@pytest.mark.parametrize("caching,budget,block_size,small_pool", list(itertools.product(
    [True, False], [16, 64, 2048], [8, 16], [False, True])))
def test_tiny_models_equal_transformers(tiny_model, caching, budget, block_size, small_pool):
    folder, prompts, want = tiny_model
    args = EngineArgs(
        model=folder, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False,
        enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=8,
        block_size=block_size, max_model_len=112, num_preallocate_tokens=block_size,
        num_gpu_blocks_override=(280 if small_pool else 4096) // block_size)
    arrivals = [2 * i for i in range(len(prompts))] if budget == 64 else None
    tokens, preempted = run_engine(args, prompts, OUTPUT_TOKENS, arrivals)
    assert tokens == want
    if small_pool: assert preempted > 0, "the pool was meant to be too small"
