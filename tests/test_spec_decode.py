"""Speculative decoding in V1: the same tokens as without, or as likely ones; fewer steps."""
import random

import pytest
import torch
from compiled_tiny import FAMILIES, generate, make_args, make_model, some_prompts, wanted
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_tiny import Oracle, SpecEngine, chi_square
from test_equality import Running, chat_prompts, default_model, expected, run_engine
from transformers import LlamaConfig
from v1_tiny import VOCAB, alone, random_prompt

from minengine.config import EngineArgs, ModelConfig, SpeculativeConfig, VllmConfig
from minengine.llm import LLM
from minengine.logits import SamplingMetadata, sample_random
from minengine.model.checkpoint import create_engine_config, fill_dummy_weights
from minengine.model.decoder import DecoderForCausalLM
from minengine.sampling_params import SamplingParams
from minengine.v1.sampler import Sampler
from minengine.v1.spec_decode.draft_model import DraftModelProposer
from minengine.v1.spec_decode.rejection_sampler import RejectionSampler

CONFIGS = [
    dict(),
    dict(budget=8),                               # prompts in chunks, drafts cut by the budget
    dict(num_blocks=16),                          # preemption
    dict(num_blocks=14, caching=False, budget=9), # both
    dict(block_size=16, num_blocks=8),
    dict(max_num_seqs=3, preallocate=16, num_blocks=30),
    dict(backend="reference", num_blocks=18),
]
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def workload(n=8, seed=1):
    "Prompts, and what each says alone; some say the same thing again and again."
    rng = random.Random(seed)
    prompts = {str(i): random_prompt(rng) for i in range(n)}
    return prompts, {r: alone(p, max_tokens=6 + int(r)) for r, p in prompts.items()}


def run_all(engine, prompts, arrivals=(0, 0, 1, 2, 3, 5, 5, 9), **params):
    for step in range(600):
        for i, (req_id, prompt) in enumerate(prompts.items()):
            if arrivals[i] == step:
                engine.add(req_id, prompt, SamplingParams(
                    temperature=0, ignore_eos=True, max_tokens=6 + int(req_id), **params))
        if step > max(arrivals) and not engine.scheduler.has_unfinished_requests(): break
        engine.step()
    pool = engine.scheduler.kv_cache_manager
    assert pool.num_free_blocks == pool.num_gpu_blocks, "blocks leaked"
    return engine.tokens


# --- greedy: the same tokens ---------------------------------------------------

@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_greedy_tokens_are_those_without_drafts(config, k):
    "A proposer that is right, wrong and silent by turns."
    prompts, tokens = workload()
    texts = {r: prompts[r] + tokens[r] for r in prompts}
    engine = SpecEngine(Oracle(texts, k, lies=0.3, silent=0.2, seed=k), nan_in_free_blocks=True, **config)
    assert run_all(engine, prompts) == tokens
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    if config.get("num_blocks") in (14, 16): assert engine.scheduler.num_preempted > 0   # the test tests


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("proposer", ["ngram", "small", "itself"])
def test_real_proposers_change_no_token(proposer, config):
    prompts, tokens = workload()
    engine = SpecEngine(proposer, k=3, **config)
    assert run_all(engine, prompts) == tokens
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.get("backend") != "reference"], ids=str)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_draft_models_cache_is_right_whatever_happens_to_the_blocks(config, k):
    "The model guesses for itself: a wrong key or value would be a wrong guess."
    prompts, tokens = workload(seed=5)
    engine = SpecEngine("itself", k=k, **config)
    assert run_all(engine, prompts) == tokens
    assert engine.stats.acceptance_rate == 1


def test_drafts_save_steps():
    prompts, tokens = workload()
    texts = {r: prompts[r] + tokens[r] for r in prompts}
    steps = {}
    for k in (0, 2, 4):
        engine = SpecEngine(Oracle(texts, k), budget=512)
        assert run_all(engine, prompts, arrivals=[0] * 8) == tokens
        steps[k] = len(engine.orders)
    # 13 tokens: one from the prompt's step, then k + 1 a step.
    assert steps == {0: 13, 2: 5, 4: 4}


def test_counts_by_position():
    prompt = [5, 6, 7]
    text = prompt + alone(prompt, max_tokens=12)
    lying = list(text)
    lying[3 + 3] += 1   # the third of the first three drafts
    engine = SpecEngine(Oracle({"a": lying}, 3))
    engine.add("a", prompt, max_tokens=12)
    assert engine.run()["a"] == text[3:]
    # Steps: 1 | 2 of 3 and one more | then 3 of 3 and one more, twice.
    assert engine.stats.num_accepted_tokens_per_pos == [3, 3, 2]
    assert (engine.stats.num_drafts, engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens) == (3, 9, 8)
    assert engine.stats.system_efficiency == 11 / 12


def test_requests_that_opt_out_and_others_in_one_batch():
    prompts, tokens = workload()
    texts = {r: prompts[r] + tokens[r] for r in prompts}
    engine = SpecEngine(Oracle(texts, 4), budget=512)
    for r, p in prompts.items():
        engine.add(r, p, SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=6 + int(r), num_speculative_tokens=[0, None, 1][int(r) % 3]))
    assert engine.run() == tokens
    most = {r: max((len(o.scheduled_spec_decode_tokens.get(r, [])) for o in engine.orders), default=0) for r in prompts}
    assert {most[r] for r in ("0", "3", "6")} == {0}
    assert {most[r] for r in ("1", "4", "7")} == {4} and {most[r] for r in ("2", "5")} == {1}


def test_preemption_drops_drafts():
    rng = random.Random(3)
    prompts = {str(i): random_prompt(rng, 20, 21) for i in range(3)}
    tokens = {r: alone(p, max_tokens=16) for r, p in prompts.items()}
    engine = SpecEngine(Oracle({r: prompts[r] + tokens[r] for r in prompts}, 3, lies=0.5),
                        num_blocks=18, caching=False, budget=64, nan_in_free_blocks=True)
    for r, p in prompts.items(): engine.add(r, p, max_tokens=16)
    resumed = 0
    while engine.scheduler.has_unfinished_requests():
        order, _ = engine.step()
        for data in order.scheduled_cached_reqs:
            if data.resumed_from_preemption:
                resumed += 1
                assert data.req_id not in order.scheduled_spec_decode_tokens
        for request in engine.scheduler.waiting: assert request.spec_token_ids == []
    assert resumed and engine.tokens == tokens


def test_rejected_drafts_are_never_found_in_the_prefix_cache():
    "A second prompt continues with what was guessed wrongly: its blocks may not be hit."
    prompt = list(range(1, 9))
    said = alone(prompt, max_tokens=12)
    wrong = [(t + 1) % VOCAB for t in said]
    engine = SpecEngine(Oracle({"a": prompt + wrong}, 8))
    engine.add("a", prompt, max_tokens=12)
    assert engine.run()["a"] == said and engine.stats.num_accepted_tokens == 0
    continued = prompt + said[:1] + wrong[1:8]
    request = engine.add("b", continued, max_tokens=6)
    assert engine.run()["b"] == alone(continued, max_tokens=6)
    assert request.num_cached_tokens == 8


# --- an end inside of a draft ----------------------------------------------------

def ending(prompt, wanted, k=6, **params):
    "Run with a perfect proposer that goes on past the end."
    text = prompt + alone(prompt, max_tokens=40)
    engine = SpecEngine(Oracle({"a": text}, k))
    request = engine.add("a", prompt, SamplingParams(temperature=0, **params))
    assert engine.run()["a"] == wanted
    assert engine.stats.num_accepted_tokens > 0
    pool = engine.scheduler.kv_cache_manager
    assert pool.num_free_blocks == pool.num_gpu_blocks
    return request


@pytest.mark.parametrize("place", range(2, 9))
def test_a_stop_token_inside_of_a_draft_ends_the_output_there(place):
    prompt = [7, 3, 9]
    said = alone(prompt, max_tokens=40)
    first = said.index(said[place])   # the token may come earlier
    request = ending(prompt, said[:first + 1], stop_token_ids=[said[place]], max_tokens=40)
    assert request.stop_reason == said[place]


def test_eos_inside_of_a_draft_and_eos_that_is_ignored():
    prompt = [7, 3, 9]
    said = alone(prompt, max_tokens=40)
    end = said[3]
    first = said.index(end)
    ending(prompt, said[:first + 1], eos_token_ids=[end], max_tokens=40)
    ending(prompt, said[:20], eos_token_ids=[end], ignore_eos=True, max_tokens=20)


@pytest.mark.parametrize("max_tokens", range(3, 12))
def test_max_tokens_inside_of_a_draft(max_tokens):
    prompt = [7, 3, 9]
    said = alone(prompt, max_tokens=40)
    request = ending(prompt, said[:max_tokens], ignore_eos=True, max_tokens=max_tokens)
    assert request.num_output_tokens == max_tokens


def test_min_tokens_reached_inside_of_a_draft():
    prompt = [3, 1, 4]
    end = alone(prompt, max_tokens=1)[0]   # the very first token would end it
    params = dict(temperature=0, min_tokens=4, max_tokens=9, stop_token_ids=[end])
    plain = SpecEngine()
    plain.add("a", prompt, SamplingParams(**params))
    said = plain.run()["a"]
    engine = SpecEngine(Oracle({"a": prompt + said}, 6))
    engine.add("a", prompt, SamplingParams(**params))
    assert engine.run()["a"] == said and end not in said[:4]


# --- wishes: honoured with drafts as without --------------------------------------

WISHES = {
    "repetition": dict(temperature=0, repetition_penalty=1.8),
    "counts": dict(temperature=0, frequency_penalty=0.7, presence_penalty=0.5),
    "bias": dict(temperature=0, logit_bias={5: 3.0, 6: -100.0}),
    "allowed": dict(temperature=0, allowed_token_ids=list(range(0, 97, 3))),
    "bad words": dict(temperature=0, bad_words_token_ids=[[5], [8, 9], [20]]),
    "seed": dict(temperature=1.0, seed=11),
    "seed, cuts": dict(temperature=1.3, seed=4, top_k=20, top_p=0.9, min_p=0.02),
    "seed, penalty": dict(temperature=0.8, seed=5, repetition_penalty=1.5),
}


@pytest.mark.parametrize("proposer", ["ngram", "itself", "oracle"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_every_wish_gives_the_tokens_and_logprobs_that_it_gives_without_drafts(proposer, mode):
    "All in one batch, with log-probabilities, prompts in chunks."
    rng, plain = random.Random(8), SpecEngine(budget=20, logprobs_mode=mode)
    def params(name): return SamplingParams(max_tokens=14, ignore_eos=True, logprobs=3, **WISHES[name])
    prompts = {name: random_prompt(rng, 3, 30) for name in WISHES}
    for name in WISHES: plain.add(name, prompts[name], params(name))
    tokens = plain.run()
    texts = {name: prompts[name] + tokens[name] for name in WISHES}
    engine = SpecEngine(Oracle(texts, 3, lies=0.3) if proposer == "oracle" else proposer, k=3, budget=20, logprobs_mode=mode)
    for name in WISHES: engine.add(name, prompts[name], params(name))
    assert engine.run() == tokens
    assert engine.stats.num_accepted_tokens > 0
    for name in WISHES:
        ours, theirs = ([row for o in e.outputs[name] for row in zip(*o.new_logprobs)] for e in (engine, plain))
        assert len(ours) == len(theirs) == 14
        for (ids, values, rank), (ids0, values0, rank0) in zip(ours, theirs):
            assert ids[0] == ids0[0] and rank == rank0
            assert values == pytest.approx(values0, abs=1e-4)


def test_logprobs_belong_to_their_request_beside_an_unfinished_prompt():
    "As many tokens as rows, but not one each."
    prompt = [5, 6, 7]
    said = alone(prompt, max_tokens=9)
    engine = SpecEngine(Oracle({"a": prompt + said}, 1), budget=16)
    engine.add("a", prompt, SamplingParams(temperature=0, logprobs=0, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.add("b", list(range(40)), SamplingParams(temperature=0, logprobs=0, max_tokens=2, ignore_eos=True))
    engine.run()
    rows = [ids[0] for o in engine.outputs["a"] for ids in o.new_logprobs.logprob_token_ids]
    assert rows == engine.tokens["a"] == said


def test_prompt_logprobs_with_drafts_around():
    rng = random.Random(9)
    prompts = [random_prompt(rng, 20, 30) for _ in range(3)]
    found = {}
    for proposer in (None, "ngram", "small"):
        engine = SpecEngine(proposer, budget=12)
        for i, p in enumerate(prompts):
            engine.add(str(i), p, SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=8, ignore_eos=True))
        engine.run()
        found[proposer] = [o.new_prompt_logprobs for r in "012" for o in engine.outputs[r] if o.new_prompt_logprobs]
    for proposer in ("ngram", "small"):
        assert len(found[proposer]) == 3
        for ours, theirs in zip(found[proposer], found[None]):
            assert ours.logprob_token_ids == theirs.logprob_token_ids
            assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4)


# --- random: the same distribution ------------------------------------------------

V, N = 16, 24_000


def first_and_second():
    generator = torch.Generator().manual_seed(3)
    return (2 * torch.randn(1, V, generator=generator), 2 * torch.randn(V, V, generator=generator))


def drawing(n, **params):
    return SamplingMetadata.from_params([SamplingParams(**params)] * n, [[]] * n, [[]] * n, V)


def exact_pairs(**params):
    "Joint probabilities of two tokens, from the cuts alone."
    first, second = first_and_second()
    def probs(logits):
        from minengine.v1.sampler import apply_cuts
        return apply_cuts(logits.clone(), drawing(len(logits), **params), slice(None)).softmax(-1)
    return (probs(first).T * probs(second)), probs(first), probs(second)


PROPOSERS = ["wrong", "right", "certain", "certain and likely", "half"]


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("cuts", [dict(), dict(temperature=0.7, top_k=9), dict(temperature=1.5, top_p=0.8, min_p=0.05)], ids=str)
def test_chi_square_of_pairs_from_the_sampler(kind, cuts):
    "One draft a request, 24,000 requests: the first token, and both together."
    (first, second), (exact, p1, p2) = first_and_second(), exact_pairs(**cuts)
    rng = torch.Generator().manual_seed(11)
    q = {"wrong": torch.randn(1, V, generator=rng).mul(3).softmax(-1), "right": p1, "half": (p1 + 1 / V) / 2}.get(kind)
    if q is None: drafts = torch.full((N,), int(p1.argmax()) if kind.endswith("likely") else 3)
    else: drafts = sample_random(q.repeat(N, 1), {}, rng)
    logits = torch.stack([first.expand(N, V), second[drafts]], 1).flatten(0, 1)
    verifier = RejectionSampler(Sampler(generator=torch.Generator().manual_seed(12)))
    rows = verifier(logits, drawing(N, **cuts), drafts[:, None].tolist(),
                    None if q is None else list(q.expand(N, 1, V))).sampled_token_ids
    a = torch.tensor([ids[0] for ids in rows])
    # Whoever lost the draft draws its second token in the next step.
    b = sample_random(p2[a].clone(), {}, rng)
    two = torch.tensor([len(ids) == 2 for ids in rows])
    b[two] = torch.tensor([ids[1] for ids in rows if len(ids) == 2], dtype=torch.int64)
    counts = torch.bincount(a * V + b, minlength=V * V).view(V, V)
    assert chi_square(counts.sum(1), N * p1[0]) > 0.001
    assert chi_square(counts, N * exact) > 0.001
    # The share that is kept is the overlap of both.
    kept = (p1 if q is None else torch.minimum(p1, q))[0]
    overlap = float(kept[drafts[0]] if q is None else kept.sum())
    assert abs(float(two.float().mean()) - overlap) < 0.02


def test_the_chi_square_would_notice():
    "Drafts that are kept whenever they are likely: wrong, and seen."
    _, p1, _ = exact_pairs()
    rng = torch.Generator().manual_seed(1)
    drafts, own = torch.full((N,), int(p1.argmax())), sample_random(p1.repeat(N, 1), {}, rng)
    taken = torch.where(torch.rand(N, generator=rng) < 0.1, drafts, own)
    assert chi_square(torch.bincount(taken, minlength=V), N * p1[0]) < 1e-6
    assert chi_square(torch.bincount(own, minlength=V), N * p1[0]) > 0.001


def toy_model(seed, layers=1):
    hf_config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, architectures=["LlamaForCausalLM"])
    config = ModelConfig(f"toy {seed}", hf_config, dtype="float32", max_model_len=32)
    model = DecoderForCausalLM(config)
    fill_dummy_weights(model, seed=seed, std=0.5, use_tqdm=False)
    return config, model.requires_grad_(False).eval()


@pytest.mark.parametrize("proposer", ["other model", "same model", "lookup"])
def test_chi_square_of_tokens_from_the_whole_engine(proposer):
    "20,000 requests of one prompt: tokens two and three, both from a step with drafts if they are kept."
    from minengine.attention.metadata import AttentionMetadata, set_forward_context
    from minengine.config import CacheConfig, SchedulerConfig
    from minengine.v1.core.scheduler import Scheduler
    from minengine.v1.request import Request
    from minengine.v1.spec_decode.ngram_proposer import NgramProposer
    from minengine.v1.worker.model_runner import ModelRunner, make_kv_caches
    n, prompt = 20_000, [3, 5, 3, 5, 3, 7, 3, 5]
    config, model = toy_model(0, layers=2)
    draft = {"other model": toy_model(4), "same model": (config, model)}.get(proposer)
    spec = SpeculativeConfig(2, prompt_lookup_max=1) if draft is None else SpeculativeConfig(
        2, model="draft", draft_model_config=draft[0])
    engine = VllmConfig(
        config, CacheConfig(4, num_gpu_blocks=6000, enable_prefix_caching=True, num_preallocate_tokens=0),
        SchedulerConfig(4096, 1000, 32, True, num_lookahead_slots=2 if draft else 0), speculative_config=spec)
    runner = ModelRunner(engine, model, proposer=DraftModelProposer(engine, draft[1]) if draft else NgramProposer(engine))
    runner.initialize_kv_cache(6000)
    scheduler = Scheduler(engine.scheduler_config, engine.cache_config)
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    requests = [Request(str(i), None, prompt, params) for i in range(n)]
    for r in requests: scheduler.add_request(r)
    while scheduler.has_unfinished_requests():
        order = scheduler.schedule()
        scheduler.update_from_output(order, runner.execute_model(order))
    said = torch.tensor([list(r.output_token_ids)[:3] for r in requests])

    def next_probs(prefixes):
        caches = make_kv_caches(config, 4 * len(prefixes), 4, torch.float32, "cpu", "cpu")
        lens = [len(p) for p in prefixes]
        step = AttentionMetadata.from_lists(lens, lens, [list(range(4 * i, 4 * i + 4)) for i in range(len(lens))], 4)
        with set_forward_context(step, caches, "reference"), torch.inference_mode():
            hidden = model(torch.tensor([t for p in prefixes for t in p]), torch.tensor([i for p in prefixes for i in range(len(p))]))
            return model.compute_logits(hidden[step.query_start_loc[1:].long() - 1]).softmax(-1)
    p1 = next_probs([prompt])[0]
    p2 = next_probs([prompt + [a] for a in range(V)])
    p3 = next_probs([prompt + [a, b] for a in range(V) for b in range(V)]).view(V, V, V)
    joint = p1[:, None, None] * p2[:, :, None] * p3
    assert scheduler.spec_stats.num_draft_tokens > 5_000
    if proposer == "same model": assert scheduler.spec_stats.acceptance_rate > 0.98
    a, b, c = said.T
    assert chi_square(torch.bincount(a, minlength=V), n * p1) > 0.001
    assert chi_square(torch.bincount(a * V + b, minlength=V * V), n * joint.sum(2)) > 0.001
    assert chi_square(torch.bincount(b * V + c, minlength=V * V), n * joint.sum(0)) > 0.001


@pytest.mark.parametrize("proposer", ["ngram", "small", "itself"])
@pytest.mark.parametrize("config", CONFIGS[:5], ids=str)
def test_a_seed_gives_the_same_text_whoever_guesses(proposer, config):
    rng = random.Random(7)
    prompts = [random_prompt(rng) for _ in range(7)]
    def seeded(i): return SamplingParams(temperature=1.0, seed=i, max_tokens=10, ignore_eos=True)
    tokens = {str(i): alone(p, params=seeded(i)) for i, p in enumerate(prompts)}
    engine = SpecEngine(proposer, k=3, **config)
    for i, p in enumerate(prompts): engine.add(str(i), p, seeded(i))
    for i in range(3): engine.add(f"other{i}", random_prompt(rng), SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True))
    engine.run()
    assert {r: engine.tokens[r] for r in tokens} == tokens


# --- whole engines -----------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_every_family_through_the_engine(family, method):
    folder = make_model(family)[0]
    drafts = LOOKUP if method == "ngram" else {"model": folder, "num_speculative_tokens": 3}
    running = Running(make_args(folder, speculative_config=drafts))
    assert generate(running, some_prompts(), late=method == "ngram") == wanted(family)
    stats = running.scheduler.spec_stats
    assert stats.num_draft_tokens > 0 and running.num_preempted > 0
    if method == "draft_model": assert stats.acceptance_rate > 0.99   # it guesses for itself
    running.engine.shutdown()


def test_a_draft_model_from_a_folder():
    folder = make_model("llama")[0]
    running = Running(make_args(folder, small_pool=False, max_num_batched_tokens=256, speculative_config={
        "model": folder, "num_speculative_tokens": 3}))
    assert generate(running, some_prompts()) == wanted("llama")
    assert running.scheduler.spec_stats.acceptance_rate > 0.99
    summary = running.engine.startup_summary()
    running.engine.shutdown()
    plain = Running(make_args(folder))
    one = plain.engine.startup_summary()
    plain.engine.shutdown()
    assert summary["weights_bytes"] == 2 * one["weights_bytes"]
    per_block = [s["kv_cache_bytes"] // s["num_gpu_blocks"] for s in (summary, one)]
    assert per_block[0] == 2 * per_block[1]


def test_a_core_in_a_process_of_its_own_reports_drafts():
    llm = LLM(make_model("llama")[0], skip_tokenizer_init=True, dtype="float32", use_tqdm_on_load=False, block_size=8,
              num_gpu_blocks_override=64, max_model_len=112, enable_multiprocessing=True, disable_log_stats=False,
              speculative_config=LOOKUP)
    counts = []
    llm.llm_engine.add_request("a", {"prompt_token_ids": some_prompts()[0]}, SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False))
    while llm.llm_engine.has_unfinished_requests():
        last = llm.llm_engine.step()
        stats = llm.llm_engine.last_stats and llm.llm_engine.last_stats[0]
        if stats and stats.spec_decoding_stats: counts.append(stats.spec_decoding_stats)
    llm.shutdown()
    assert last[0].outputs[0].token_ids == wanted("llama")[0]
    assert counts and sum(s.num_draft_tokens for s in counts) > 0


@pytest.mark.parametrize("k", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_smollm2_with_lookup_says_what_it_says_without(k):
    prompts = chat_prompts()
    longest = max(map(len, prompts)) + max(map(len, expected()))
    args = EngineArgs(
        model=default_model()[0], dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=8,
        max_num_batched_tokens=64, max_model_len=longest, num_preallocate_tokens=16,
        num_gpu_blocks_override=longest * 5 // 2 // 16,
        speculative_config={"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 2, "prompt_lookup_min": 1})
    tokens, preempted = run_engine(args, prompts, len(expected()[0]), [3 * i for i in range(len(prompts))])
    assert tokens == expected() and preempted > 0


# --- field reports, section 12 -------------------------------------------------------

def test_field_vllm_14519_13673_all_drafts_kept_gives_one_token_more():
    verifier = RejectionSampler(Sampler())
    logits = torch.eye(8)[[4, 5, 6, 7]]
    greedy = SamplingMetadata.from_params([SamplingParams(temperature=0)], [[]], [[]], 8)
    assert verifier(logits.clone(), greedy, [[4, 5, 6]]).sampled_token_ids == [[4, 5, 6, 7]]
    assert verifier(logits.clone(), greedy, [[4, 5, 0]]).sampled_token_ids == [[4, 5, 6]]   # no bonus


@pytest.mark.parametrize("proposer", ["oracle", "itself", "reckless"])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_field_vllm_16087_drafts_at_the_end_of_the_window(proposer, k):
    "From every length, to the very last position; one proposer does not care where the window ends."
    for length in range(24, 31):
        prompt = random_prompt(random.Random(length), length, length + 1)
        said = alone(prompt, max_tokens=32 - length)
        oracle = Oracle({"a": prompt + said}, k, 32 if proposer == "oracle" else 99)
        engine = SpecEngine("itself" if proposer == "itself" else oracle, k=k, max_model_len=32)
        request = engine.add("a", prompt, SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=99 if proposer == "reckless" else 32 - length))
        assert engine.run()["a"] == said and request.num_tokens == 32


@pytest.mark.parametrize("window", [16, 23, 40])
def test_field_vllm_22935_5342_57941_a_draft_model_with_a_shorter_window(window):
    prompts, tokens = workload()
    engine = SpecEngine("itself", k=4, draft_window=window)
    assert run_all(engine, prompts) == tokens
    assert engine.stats.acceptance_rate == 1


def test_field_vllm_58080_past_its_window_a_request_has_no_draft_and_its_neighbours_have():
    rng = random.Random(2)
    long, short = random_prompt(rng, 30, 31), random_prompt(rng, 4, 5)
    engine = SpecEngine("itself", k=3, draft_window=24, budget=64)
    engine.add("long", long, max_tokens=12)
    engine.add("short", short, max_tokens=12)
    assert engine.run() == {"long": alone(long, max_tokens=12), "short": alone(short, max_tokens=12)}
    assert not any("long" in order.scheduled_spec_decode_tokens for order in engine.orders)
    assert engine.stats.num_accepted_tokens >= 8 and engine.stats.acceptance_rate == 1


@pytest.mark.parametrize("wish", [dict(repetition_penalty=1.3), dict(min_p=0.2, temperature=1.0, seed=3), dict(logprobs=2)], ids=str)
def test_field_vllm_13933_drafting_knows_nothing_of_wishes_and_the_sampler_all(wish):
    params = dict(temperature=0, max_tokens=20, ignore_eos=True) | wish
    prompt = [4, 5, 6] * 5
    tokens = []
    for proposer in (None, "ngram", "itself"):
        engine = SpecEngine(proposer, k=4)
        engine.add("a", prompt, SamplingParams(**params))
        tokens.append(engine.run()["a"])
        if proposer: assert engine.stats.num_draft_tokens > 0
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("change,words", [
    (dict(engine="v0", num_scheduler_steps=4), "num_scheduler_steps=4 is not supported"),
    (dict(speculative_config={"num_speculative_tokens": 2, "method": "eagle"}), "method must be one of"),
    (dict(speculative_config={"num_speculative_tokens": 2, "guided": True}), "unexpected keyword argument 'guided'"),
    (dict(speculative_config={"method": "ngram"}), "num_speculative_tokens"),
    (dict(speculative_config={"num_speculative_tokens": 0}), "at least 1, got 0"),
], ids=str)
def test_field_vllm_15554_20284_pairs_that_do_not_work_are_refused_at_the_start(change, words):
    with pytest.raises(ValueError, match=words):
        create_engine_config(EngineArgs(make_model("llama")[0], **dict(speculative_config=LOOKUP) | change))


def test_field_vllm_15554_20284_guided_output_and_adapters_are_refused_with_drafts_as_without():
    llm = LLM(make_model("llama")[0], skip_tokenizer_init=True, use_tqdm_on_load=False, max_model_len=64,
              num_gpu_blocks_override=16, speculative_config=LOOKUP)
    prompt = {"prompt_token_ids": [4, 5, 4, 5]}
    with pytest.raises(ValueError, match="guided_decoding"):
        llm.generate(prompt, SamplingParams(guided_decoding={"json": {}}), use_tqdm=False)
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False, lora_request="x")
    assert len(llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 2
    llm.shutdown()


def test_another_vocabulary_is_refused(tmp_path):
    folder = make_model("llama")[0]
    other = make_model("llama", '{"vocab_size": 161}')[0]
    with pytest.raises(ValueError, match="knows 161 tokens, the model 160"):
        create_engine_config(EngineArgs(folder, speculative_config={"model": other, "num_speculative_tokens": 2}))


# --- properties -----------------------------------------------------------------------

@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_schedule_any_drafts(seed):
    "Random arrivals, aborts, wishes and proposers: every check holds, every finished request says what it says alone."
    rng = random.Random(seed)
    k = rng.randrange(1, 9)
    kind = rng.choice(["oracle", "oracle", "ngram", "small", "itself"])
    texts = {}
    oracle = Oracle(texts, k, lies=rng.random(), silent=rng.random() / 2, seed=seed)
    engine = SpecEngine(
        oracle if kind == "oracle" else kind, k=k, nan_in_free_blocks=kind in ("oracle", "ngram"),
        lookahead=rng.choice([0, k]), num_blocks=rng.choice([20, 30, 64]), budget=rng.choice([8, 12, 32]),
        max_num_seqs=8, caching=rng.random() < 0.5, preallocate=rng.choice([0, 4]))
    shared, expected_tokens = random_prompt(rng, 8, 9), {}
    for i in range(12):
        if rng.random() < 0.8:
            prompt = (shared if rng.random() < 0.4 else []) + random_prompt(rng, 1, 30)
            params = SamplingParams(
                temperature=rng.choice([0, 0, 1]), seed=rng.randrange(9), max_tokens=rng.randrange(1, 12), ignore_eos=True,
                num_speculative_tokens=rng.choice([None, None, 0, 2]))
            expected_tokens[str(i)] = alone(prompt, params=params.clone())
            texts[str(i)] = prompt + expected_tokens[str(i)]
            engine.add(str(i), prompt, params)
        for _ in range(rng.randrange(0, 4)): engine.step()
        alive = list(engine.scheduler.requests)
        if alive and rng.random() < 0.2:
            gone = rng.choice(alive)
            engine.abort(gone)
            expected_tokens.pop(gone)
    engine.run()
    engine.step()
    assert {r: engine.tokens[r] for r in expected_tokens} == expected_tokens
    assert engine.runner.requests == {} and engine.runner.batch.num_reqs == 0
    assert engine.scheduler.kv_cache_manager.num_free_blocks == engine.config.cache_config.num_gpu_blocks
    if isinstance(engine.runner.proposer, DraftModelProposer): assert engine.runner.proposer.states == {}
    if kind == "itself" and engine.stats.num_draft_tokens and engine.stats.acceptance_rate < 1:
        # Only those that draw may lose a draft: their model guesses its best token.
        assert any(r.sampling_params.temperature for r in engine.requests.values())
