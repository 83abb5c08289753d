"""Greedy tokens are exactly those of transformers, whatever an engine does on
the way: prefix caching, chunks, preemption by recomputing or swapping, bursts
of steps, outputs taken in late, late arrivals. So both engines agree.
"""
import functools
import itertools
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minengine.config import EngineArgs
from minengine.sampling_params import SamplingParams
from minengine.v0.llm_engine import LLMEngineV0
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
    import minengine.v0.worker
    import minengine.v1.worker.worker
    workers = minengine.v0.worker, minengine.v1.worker.worker
    original, loaded = workers[0].load_model, {}

    def load_once(vllm_config):
        key = (vllm_config.model_config.model, vllm_config.model_config.pack_cpu_weights)
        if key not in loaded: loaded[key] = original(vllm_config)
        return loaded[key]

    for worker in workers: worker.load_model = load_once
    yield
    for worker in workers: worker.load_model = original


class Running:
    "An engine of either kind: its scheduler, its counts, its pool at rest."

    def __init__(self, args: EngineArgs):
        self.is_v0 = args.engine == "v0"
        self.engine = (LLMEngineV0 if self.is_v0 else LLMEngineV1).from_engine_args(args)
        self.scheduler = self.engine.scheduler if self.is_v0 else self.engine.engine_core.engine_core.scheduler

    @property
    def num_preempted(self) -> int:
        return self.scheduler.num_cumulative_preemption if self.is_v0 else self.scheduler.num_preempted

    def check_step(self):
        # While outputs wait, V0's running queue may hold a group that has ended.
        if not (self.is_v0 and (self.engine.output_queue.pending or self.engine.burst)): self.scheduler.check_invariants()

    def check_rest(self):
        if not self.is_v0:
            pool = self.scheduler.kv_cache_manager
            assert pool.num_free_blocks == pool.num_gpu_blocks, "blocks leaked"
            return
        blocks, cache = self.scheduler.block_manager, self.scheduler.cache_config
        assert blocks.get_num_free_gpu_blocks() == cache.num_gpu_blocks, "blocks leaked"
        assert blocks.get_num_free_cpu_blocks() == cache.num_cpu_blocks, "swap space leaked"


def run_engine(args: EngineArgs, prompts, num_tokens, arrivals=None):
    "Tokens of each prompt; `arrivals[i]` is the step before which i is added."
    running = Running(args)
    engine = running.engine
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    arrivals = arrivals or [0] * len(prompts)
    tokens, step = {}, 0
    while len(tokens) < len(prompts):
        for i, prompt in enumerate(prompts):
            if arrivals[i] == step: engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        for out in engine.step():
            if out.finished: tokens[int(out.request_id)] = out.outputs[0].token_ids
        running.check_step()
        step += 1
        assert step < 10_000, "the engine does not finish"
    while engine.has_unfinished_requests(): engine.step()
    running.check_rest()
    preempted = running.num_preempted
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


FAMILIES = ["llama", "smollm2", "mistral", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
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


# ---- V0 ----------------------------------------------------------------

V0_POOLS = {"wide": {}, "recompute": {"preemption_mode": "recompute"}, "swap": {"preemption_mode": "swap"}}
V0_COMBINATIONS = [dict(zip(("chunked", "caching", "pool", "num_steps", "use_async"), c)) for c in itertools.product(
    [False, True], [False, True], V0_POOLS, [1, 4, 8], [False, True])]


def v0_args(folder, longest, block_size, chunked, caching, pool, num_steps, use_async, budget=None, **more) -> EngineArgs:
    # With bursts, a prompt is never cut: the budget of a step must hold it.
    if not chunked or num_steps > 1: budget = None
    return EngineArgs(
        model=folder, engine="v0", dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=8,
        block_size=block_size, max_model_len=longest, enable_chunked_prefill=chunked, max_num_batched_tokens=budget,
        enable_prefix_caching=caching, num_scheduler_steps=num_steps, use_async_output_proc=use_async, swap_space=0.01,
        num_gpu_blocks_override=(4096 if pool == "wide" else longest * 5 // 2) // block_size, **V0_POOLS[pool], **more)


def name_of(combination: dict) -> str:
    words = [combination["pool"], "chunks" * combination["chunked"], "cache" * combination["caching"],
             f"burst{combination['num_steps']}" * (combination["num_steps"] > 1), "late" * combination["use_async"]]
    return "-".join(filter(None, words))


# Each combination runs on one family, each family runs many.
@pytest.mark.parametrize("which", range(-(-len(V0_COMBINATIONS) // 5)))
def test_v0_tiny_models_equal_transformers(tiny_model, request, which):
    folder, prompts, want = tiny_model
    family = FAMILIES.index(request.node.callspec.params["tiny_model"])
    combination = V0_COMBINATIONS[(5 * which + family) % len(V0_COMBINATIONS)]
    args = v0_args(folder, 112, 8, budget=16 if which % 2 else 40, **combination)
    arrivals = [2 * i for i in range(len(prompts))] if which % 3 == 0 else None
    tokens, preempted = run_engine(args, prompts, OUTPUT_TOKENS, arrivals)
    assert tokens == want, name_of(combination)
    if combination["pool"] != "wide": assert preempted > 0, f"{name_of(combination)}: the pool was meant to be too small"


SMOLLM2_QUICK = ["wide", "swap-chunks", "recompute-cache-burst4-late"]


@pytest.mark.parametrize("combination", [
    pytest.param(c, id=name_of(c), marks=() if name_of(c) in SMOLLM2_QUICK else pytest.mark.slow)
    for c in V0_COMBINATIONS])
def test_v0_smollm2_equals_transformers(combination):
    prompts = chat_prompts()
    longest = max(map(len, prompts)) + OUTPUT_TOKENS
    args = v0_args(default_model()[0], longest, 16, budget=48, **combination)
    tokens, preempted = run_engine(args, prompts, OUTPUT_TOKENS)
    assert tokens == expected()
    if combination["pool"] != "wide": assert preempted > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("which", range(3))
def test_both_engines_give_the_tokens_of_a_request_alone(tiny_model, request, which):
    "Random arrivals, lengths, budgets, pools and settings, the same requests on both engines."
    seed = 5 * which + FAMILIES.index(request.node.callspec.params["tiny_model"])
    folder, rng = tiny_model[0], random.Random(seed)
    start = [rng.randrange(3, 160) for _ in range(24)]
    prompts = [start[:rng.choice([0, 8, 16, 24])] + [rng.randrange(3, 160) for _ in range(rng.randrange(1, 30))] for _ in range(10)]
    num_tokens, arrivals = rng.randrange(2, 30), [rng.randrange(12) for _ in prompts]
    common = dict(model=folder, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=rng.choice([3, 8]),
                  block_size=rng.choice([4, 8, 16]), max_model_len=96)
    small = rng.choice([110, 200, 2000]) // common["block_size"]
    alone = [run_engine(EngineArgs(**common), [p], num_tokens)[0][0] for p in prompts]
    v1 = EngineArgs(**common, num_gpu_blocks_override=small, enable_prefix_caching=rng.random() < 0.5,
                    max_num_batched_tokens=rng.choice([16, 32, 512]), num_preallocate_tokens=rng.choice([0, 64]))
    assert run_engine(v1, prompts, num_tokens, arrivals)[0] == alone
    chunked, num_steps = rng.random() < 0.5, rng.choice([1, 1, 3])
    v0 = EngineArgs(**common, engine="v0", num_gpu_blocks_override=small, enable_prefix_caching=rng.random() < 0.5,
                    enable_chunked_prefill=chunked, num_scheduler_steps=num_steps, swap_space=0.01,
                    max_num_batched_tokens=rng.choice([16, 32]) if chunked and num_steps == 1 else None,
                    use_async_output_proc=rng.random() < 0.5, preemption_mode=rng.choice([None, "swap"]))
    assert run_engine(v0, prompts, num_tokens, arrivals)[0] == alone


def sample_all(args: EngineArgs, requests):
    "Tokens of each (prompt, params), in order; preemptions."
    running, got = Running(args), {}
    for i, (prompt, params) in enumerate(requests): running.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while running.engine.has_unfinished_requests():
        for out in running.engine.step():
            if out.finished: got[int(out.request_id)] = out.outputs[0].token_ids
        running.check_step()
    running.check_rest()
    preempted = running.num_preempted
    running.engine.shutdown()
    return [got[i] for i in range(len(requests))], preempted


SEEDED = [  # what both engines process in the same order
    dict(temperature=0.8), dict(temperature=1.0, top_p=0.9), dict(temperature=0.7, top_p=0.95, top_k=40), dict(temperature=1.3, top_k=5),
    dict(temperature=0.8, top_p=0.8, repetition_penalty=1.2), dict(temperature=1.0, min_tokens=12), dict(temperature=0), dict(temperature=0.5)]


def seeded_requests(prompts, num_tokens):
    return [(p, SamplingParams(**wishes, seed=10 + i, max_tokens=num_tokens, ignore_eos=True, detokenize=False))
            for i, (p, wishes) in enumerate(zip(prompts, SEEDED))]


@pytest.mark.parametrize("name, v0, v1", [
    ("plain", {}, {}),
    # Cut or whole, a prompt's last step draws the first number, and no other does.
    pytest.param("chunks", dict(enable_chunked_prefill=True, max_num_batched_tokens=48), dict(max_num_batched_tokens=32), marks=pytest.mark.slow),
    pytest.param("bursts", dict(num_scheduler_steps=4, enable_prefix_caching=True), dict(enable_prefix_caching=False), marks=pytest.mark.slow),
    pytest.param("late", dict(use_async_output_proc=True), dict(max_num_batched_tokens=64), marks=pytest.mark.slow),
    # Swapping keeps a generator; recomputing would start it again (V0's known failure).
    pytest.param("swap", dict(preemption_mode="swap", num_gpu_blocks_override=14, swap_space=0.2), dict(num_gpu_blocks_override=14), marks=pytest.mark.slow)])
def test_both_engines_draw_the_same_tokens_on_smollm2(name, v0, v1):
    "Temperature, top-p, top-k, penalties and a seed: real logits, two engines, the same draws."
    requests = seeded_requests(chat_prompts(), 24)
    longest = max(map(len, chat_prompts())) + 24
    common = dict(model=default_model()[0], dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False,
                  max_num_seqs=8, block_size=16, max_model_len=longest, num_gpu_blocks_override=256)
    (ours, *preempted), (theirs, _) = (sample_all(EngineArgs(engine=engine, **{**common, **options}), requests)
                                       for engine, options in (("v0", v0), ("v1", v1)))
    assert ours == theirs and len(set(map(tuple, ours))) == 8
    if name == "swap": assert preempted[0] > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("which", range(3))
def test_both_engines_draw_the_same_tokens(tiny_model, request, which):
    "The same on every family, with settings drawn at random."
    folder, prompts, _ = tiny_model
    rng = random.Random(31 * which + FAMILIES.index(request.node.callspec.params["tiny_model"]))
    requests = seeded_requests(prompts, OUTPUT_TOKENS)
    common = dict(model=folder, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=8,
                  block_size=rng.choice([4, 8, 16]), max_model_len=112)
    chunked, num_steps = rng.random() < 0.5, rng.choice([1, 1, 4])
    v0 = EngineArgs(**common, engine="v0", enable_chunked_prefill=chunked, num_scheduler_steps=num_steps, swap_space=0.01,
                    max_num_batched_tokens=rng.choice([16, 32]) if chunked and num_steps == 1 else None,
                    enable_prefix_caching=rng.random() < 0.5, use_async_output_proc=rng.random() < 0.5, preemption_mode="swap",
                    num_gpu_blocks_override=rng.choice([4096, 280]) // common["block_size"])
    v1 = EngineArgs(**common, max_num_batched_tokens=rng.choice([16, 64, 2048]), enable_prefix_caching=rng.random() < 0.5,
                    num_gpu_blocks_override=rng.choice([4096, 280]) // common["block_size"])
    assert sample_all(v0, requests)[0] == sample_all(v1, requests)[0]


FOUR_ANSWERS = [  # one for each family, and all of it under pressure
    dict(enable_prefix_caching=True), dict(enable_chunked_prefill=True, max_num_batched_tokens=16),
    dict(num_scheduler_steps=4), dict(use_async_output_proc=True), dict()]


@pytest.mark.parametrize("small_pool", [False, True])
def test_v0_four_answers_are_four_requests_with_the_next_seeds(tiny_model, request, small_pool):
    "One prefill and three forks, or four prefills: the same tokens; under pressure the group is swapped."
    folder, prompts, _ = tiny_model
    settings = dict(FOUR_ANSWERS[FAMILIES.index(request.node.callspec.params["tiny_model"])])
    common = dict(model=folder, engine="v0", dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False,
                  block_size=8, max_model_len=112, max_num_seqs=8, swap_space=0.01)
    # Swapped, even when one sequence is left: recomputing would start its seed again.
    pool = dict(num_gpu_blocks_override=44, preemption_mode="swap") if small_pool else {}
    def answers(requests, **pool):
        running, got = Running(EngineArgs(**common, **{**settings, **pool})), {}
        for i, (prompt, params) in enumerate(requests): running.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while running.engine.has_unfinished_requests():
            for out in running.engine.step():
                if out.finished: got[int(out.request_id)] = [c.token_ids for c in out.outputs]
        running.check_rest()
        return [got[i] for i in range(len(requests))], running.num_preempted
    params = dict(temperature=0.8, top_p=0.95, max_tokens=40, ignore_eos=True)
    groups = [(p, 100 * i) for i, p in enumerate(prompts[:3])]
    together, preempted = answers([(p, SamplingParams(n=4, seed=s, **params)) for p, s in groups], **pool)
    singles, _ = answers([(p, SamplingParams(seed=s + i, **params)) for p, s in groups for i in range(4)])
    assert sum(together, []) == sum(singles, [])
    assert len({tuple(tokens) for tokens in sum(singles, [])}) == 12
    if small_pool: assert preempted > 0, "the pool was meant to be too small"


def test_v0_seeds_start_again_when_a_request_is_recomputed(tiny_model):
    "V0's known failure, kept and documented: the generator is made at every prefill. Swapping keeps it, and so does V1."
    folder, prompts, _ = tiny_model
    def answers(engine, num_blocks, **more):
        running, got = Running(EngineArgs(
            model=folder, engine=engine, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, block_size=8,
            max_model_len=112, max_num_seqs=8, num_gpu_blocks_override=num_blocks, **more)), {}
        params = SamplingParams(seed=1, temperature=0.8, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts): running.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while running.engine.has_unfinished_requests():
            for out in running.engine.step():
                if out.finished: got[out.request_id] = out.outputs[0].token_ids
        assert running.num_preempted > 0 or num_blocks > 100
        return got
    calm = answers("v0", 512)
    assert answers("v0", 35, preemption_mode="recompute") != calm
    assert answers("v0", 35, preemption_mode="swap", swap_space=0.01) == calm
    assert answers("v1", 512) == answers("v1", 35)
