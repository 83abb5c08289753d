"""Speculative decoding in V0: its own path through a step, the same tokens, and what it is refused with."""
import random

import pytest
import torch
from compiled_tiny import FAMILIES, make_args, make_model, some_prompts, wanted
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_tiny import chi_square
from test_equality import Running, chat_prompts, default_model, expected, run_engine

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.logits import sample_random
from minengine.model.checkpoint import create_engine_config
from minengine.sampling_params import SamplingParams
from minengine.v0.batch_expansion import expand_batch
from minengine.v0.sequence import SequenceData, SequenceGroupMetadata
from minengine.v0.spec_decode_worker import DraftedSequence, SpecDecodeWorker, accept_tokens

LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class Oracle:
    "V0's kind of proposer: knows the texts, by their prompts, and lies as often as it is told to."

    def __init__(self, k, max_model_len, lies=0.0, seed=0):
        self.k, self.max_model_len, self.lies = k, max_model_len, lies
        self.rng, self.texts = random.Random(seed), {}

    def get_spec_proposals(self, told):
        drafts = []
        for one in told:
            data = next(iter(one.seq_data.values()))
            text, n = self.texts.get(tuple(data.prompt_token_ids), []), data.get_len()
            if len(one.seq_data) > 1 or n + self.k >= self.max_model_len or one.sampling_params.num_speculative_tokens == 0:
                drafts.append([])
            else:
                truth = (text + [7] * 200)[n:n + self.k]
                drafts.append([(t + 1) % 160 if self.rng.random() < self.lies else t for t in truth])
        return drafts


def start(folder, k=4, lies=None, seed=0, **options):
    running = Running(make_args(folder, engine="v0", speculative_config=LOOKUP | {"num_speculative_tokens": k}, **options))
    worker = running.engine.executor.driver_worker
    assert isinstance(worker, SpecDecodeWorker)
    if lies is not None:
        worker.proposer = Oracle(k, running.engine.vllm_config.model_config.max_model_len, lies, seed)
        worker.proposer.texts = {tuple(p): p + t for p, t in zip(some_prompts(), wanted("llama"))}
    return running


def drive(running, prompts, params, late=0):
    "All outputs, in the order of the prompts; every step is checked."
    params = params if isinstance(params, list) else [params] * len(prompts)
    engine, done, step = running.engine, {}, 0
    while len(done) < len(prompts):
        for i, prompt in enumerate(prompts):
            if step == late * i: engine.add_request(str(i), {"prompt_token_ids": prompt}, params[i].clone())
        for out in engine.step():
            if out.finished: done[int(out.request_id)] = out
        running.check_step()
        step += 1
        assert step < 5000
    while engine.has_unfinished_requests(): engine.step()
    running.check_rest()
    running.num_steps = step
    return [done[i] for i in range(len(prompts))]


def tokens_of(outputs): return [[list(c.token_ids) for c in o.outputs] for o in outputs]


def greedy(n=24, **kw): return SamplingParams(**dict(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) | kw)


# --- greedy ---------------------------------------------------------------------

@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("options", [
    dict(), dict(enable_prefix_caching=True), dict(preemption_mode="swap"), dict(preemption_mode="recompute", small_pool=False)], ids=str)
def test_greedy_tokens_are_those_without_drafts(options, k):
    running = start(make_model("llama")[0], k, lies=0.25, seed=k, **options)
    outputs = drive(running, some_prompts(), greedy(), late=2)
    assert [t for t, in tokens_of(outputs)] == wanted("llama")
    stats = running.engine.spec_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if options.get("small_pool", True): assert running.num_preempted > 0   # the test tests
    running.engine.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_lookup(family):
    running = start(make_model(family)[0], small_pool=False)
    assert [t for t, in tokens_of(drive(running, some_prompts(), greedy()))] == wanted(family)
    assert running.engine.spec_stats.num_draft_tokens > 0
    running.engine.shutdown()


def test_drafts_save_steps():
    running = start(make_model("llama")[0], 3, lies=0.0, small_pool=False)
    drive(running, some_prompts()[:1], greedy(25))
    assert running.num_steps == 1 + 6   # the prompt's, then four tokens each
    assert running.engine.spec_stats.num_accepted_tokens_per_pos == [6, 6, 6]
    assert running.engine.spec_stats.system_efficiency == 1
    running.engine.shutdown()


@pytest.mark.parametrize("k", [4])
def test_smollm2_with_lookup_says_what_it_says_without(k):
    prompts = chat_prompts()
    longest = max(map(len, prompts)) + max(map(len, expected()))
    args = EngineArgs(
        model=default_model()[0], engine="v0", dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=8,
        max_model_len=longest + k, num_gpu_blocks_override=4096 // 16, swap_space=0.01,
        speculative_config=LOOKUP | {"num_speculative_tokens": k})
    tokens, _ = run_engine(args, prompts, len(expected()[0]), [3 * i for i in range(len(prompts))])
    assert tokens == expected()


@pytest.mark.parametrize("place", range(2, 9))
def test_an_end_inside_of_a_draft(place):
    prompt, said = some_prompts()[0], wanted("llama")[0]
    first = said.index(said[place])
    running = start(make_model("llama")[0], 6, lies=0.0, small_pool=False)
    stop, cut = drive(running, [prompt, prompt], [greedy(stop_token_ids=[said[place]]), greedy(place + 1)])
    assert stop.outputs[0].token_ids == said[:first + 1] and stop.outputs[0].stop_reason == said[place]
    assert cut.outputs[0].token_ids == said[:place + 1] and cut.outputs[0].finish_reason == "length"
    running.engine.shutdown()


def test_mixed_batch_of_those_who_want_drafts_and_those_who_do_not():
    running = start(make_model("llama")[0], 4, lies=0.2, small_pool=False)
    params = [greedy(num_speculative_tokens=[None, 0][i % 2]) for i in range(len(some_prompts()))]
    assert [t for t, in tokens_of(drive(running, some_prompts(), params))] == wanted("llama")
    running.engine.shutdown()


def test_several_answers_are_served_without_drafts_beside_others_that_have_them():
    prompts = some_prompts()[:3]
    def params(): return [SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, detokenize=False),
                          greedy(9), greedy(9)]
    found = []
    for running in (start(make_model("llama")[0], 3, lies=0.3, small_pool=False),
                    Running(make_args(make_model("llama")[0], engine="v0", small_pool=False))):
        found.append(tokens_of(drive(running, prompts, params())))
        running.engine.shutdown()
    assert found[0] == found[1] and len(found[0][0]) == 3


WISHES = [
    dict(temperature=0, repetition_penalty=1.8), dict(temperature=0, frequency_penalty=0.7, presence_penalty=0.5),
    dict(temperature=0, logit_bias={5: 3.0, 6: -100.0}), dict(temperature=0, allowed_token_ids=list(range(0, 97, 3))),
    dict(temperature=0, bad_words_token_ids=[[5], [8, 9]]), dict(temperature=0, min_tokens=6, stop_token_ids=[30, 40, 50]),
    dict(temperature=1.2, seed=11, top_k=30, top_p=0.9, min_p=0.02), dict(temperature=1.0, seed=4),
]


def test_every_wish_gives_the_tokens_and_logprobs_that_it_gives_without_drafts():
    prompts = some_prompts()
    params = [greedy(14, logprobs=3, **wish) for wish in WISHES]
    plain = Running(make_args(make_model("llama")[0], engine="v0", small_pool=False))
    alone = drive(plain, prompts, params)
    plain.engine.shutdown()
    running = start(make_model("llama")[0], 3, lies=0.3, small_pool=False)
    running.engine.executor.driver_worker.proposer.texts = {
        tuple(p): p + list(o.outputs[0].token_ids) for p, o in zip(prompts, alone)}
    found = drive(running, prompts, params)
    assert tokens_of(found) == tokens_of(alone) and running.engine.spec_stats.num_accepted_tokens > 0
    for ours, theirs in zip(found, alone):
        for a, b in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            for token_id in a: assert a[token_id].logprob == pytest.approx(b[token_id].logprob, abs=1e-4)
    running.engine.shutdown()


def test_user_functions_see_the_drafts_before_a_row():
    "A logits processor that forbids to say a token twice, in V0's own way."
    def never_twice(output, logits):
        logits[output] = -torch.inf
        return logits
    prompt, params = some_prompts()[0], [greedy(12, logits_processors=[never_twice])]
    plain = Running(make_args(make_model("llama")[0], engine="v0", small_pool=False))
    alone = drive(plain, [prompt], params)
    plain.engine.shutdown()
    running = start(make_model("llama")[0], 3, lies=0.2, small_pool=False)
    running.engine.executor.driver_worker.proposer.texts = {tuple(prompt): prompt + list(alone[0].outputs[0].token_ids)}
    assert tokens_of(drive(running, [prompt], params)) == tokens_of(alone)
    running.engine.shutdown()


# --- random -----------------------------------------------------------------------

V, N = 16, 24_000


@pytest.mark.parametrize("draft", ["likely", "unlikely", "never"])
def test_chi_square_of_pairs(draft):
    "A lookup is certain, right or wrong; the first token and both together are as likely as without."
    generator = torch.Generator().manual_seed(3)
    first, second = (2 * torch.randn(1, V, generator=generator)), 2 * torch.randn(V, V, generator=generator)
    if draft == "never": first[0, 5] = -torch.inf
    p1, p2 = first.softmax(-1), second.softmax(-1)
    token = {"likely": int(p1.argmax()), "unlikely": int(p1.argmin()), "never": 5}[draft]
    sequences = [DraftedSequence(i, i, SamplingParams(), 2 * i, [token]) for i in range(N)]
    logits = torch.stack([first[0], second[token]]).repeat(N, 1)
    tokens = accept_tokens(sequences, logits, [None] * (2 * N), torch.Generator().manual_seed(1))
    a = torch.tensor([ids[0] for ids in tokens])
    b = sample_random(p2[a].clone(), {}, torch.Generator().manual_seed(2))
    two = torch.tensor([len(ids) == 2 for ids in tokens])
    b[two] = torch.tensor([ids[1] for ids in tokens if len(ids) == 2], dtype=torch.int64)
    counts = torch.bincount(a * V + b, minlength=V * V).view(V, V)
    assert chi_square(counts.sum(1), N * p1[0]) > 0.001
    assert chi_square(counts, N * (p1.T * p2)) > 0.001
    assert abs(float(two.float().mean()) - float(p1[0, token])) < 0.01


def test_a_seed_gives_the_same_text_with_and_without_drafts():
    prompts = some_prompts()
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True, detokenize=False) for i in range(len(prompts))]
    found = []
    for running in (start(make_model("llama")[0], 3, small_pool=False),
                    Running(make_args(make_model("llama")[0], engine="v0", small_pool=False))):
        found.append(tokens_of(drive(running, prompts, params, late=1)))
        running.engine.shutdown()
    assert found[0] == found[1]


def test_requests_without_a_seed_run_beside_all_others():
    params = [SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, detokenize=False) if i % 2 else greedy(12)
              for i in range(len(some_prompts()))]
    running = start(make_model("llama")[0], 4, lies=0.3, small_pool=False)
    outputs = tokens_of(drive(running, some_prompts(), params))
    for i, (ids,) in enumerate(outputs):
        if i % 2: assert len(ids) == 12
        else: assert ids == wanted("llama")[i][:12]
    running.engine.shutdown()


# --- restrictions -------------------------------------------------------------------

@pytest.mark.parametrize("options,words", [
    (dict(num_scheduler_steps=4), "num_scheduler_steps=4 is not supported, a drafting step"),
    (dict(enable_chunked_prefill=True), "enable_chunked_prefill=True is not supported, its scorer"),
    (dict(use_async_output_proc=True), "use_async_output_proc=True is not supported"),
    (dict(speculative_config={"num_speculative_tokens": 2, "model": "x"}), "method 'draft_model' is V1's here"),
], ids=str)
def test_what_v0_could_not_combine_with_drafts_is_refused_with_a_reason(options, words):
    with pytest.raises(ValueError, match=words):
        create_engine_config(EngineArgs(make_model("llama")[0], engine="v0", **dict(speculative_config=LOOKUP) | options))


def test_slots_ahead_are_asked_for():
    config = create_engine_config(EngineArgs(make_model("llama")[0], engine="v0", speculative_config=LOOKUP))
    assert config.scheduler_config.num_lookahead_slots == 4 and not config.scheduler_config.use_async_output_proc
    config = create_engine_config(EngineArgs(make_model("llama")[0], engine="v1", speculative_config=LOOKUP))
    assert config.scheduler_config.num_lookahead_slots == 0   # a lookup writes nothing


def test_field_vllm_16087_v0_drafts_end_before_the_window():
    "From every length to the last position of the window: V0's last token is one past it."
    folder = make_model("llama")[0]
    for length in (100, 104, 106, 107, 109, 111):
        prompt = [random.Random(length).randrange(3, 160) for _ in range(length)]
        found = []
        for running in (start(folder, 5, lies=0.0, small_pool=False), Running(make_args(folder, engine="v0", small_pool=False))):
            found.append(tokens_of(drive(running, [prompt], greedy(50))))
            running.engine.shutdown()
        assert found[0] == found[1]


def test_copies_share_blocks_and_leave_the_sequence_alone():
    data = SequenceData([1, 2, 3], [4])
    data.update_num_computed_tokens(3)
    told = SequenceGroupMetadata("a", False, {3: data}, greedy(), {3: [9, 8]})
    expanded = expand_batch([told], [[5, 6]])
    assert [one.seq_data[i].get_token_ids() for one, i in zip(expanded, (3, 4, 5))] == [
        [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert all(one.block_tables[one.get_first_seq_id()] is told.block_tables[3] for one in expanded)
    assert data.get_len() == 4 and data.get_num_computed_tokens() == 3


def test_stats_are_told_after_each_step():
    llm = LLM(make_model("llama")[0], engine="v0", skip_tokenizer_init=True, use_tqdm_on_load=False, max_model_len=112,
              num_gpu_blocks_override=64, block_size=8, disable_log_stats=False, speculative_config=LOOKUP)
    llm.generate({"prompt_token_ids": [4, 5] * 6}, greedy(), use_tqdm=False)
    stats = llm.llm_engine.last_stats.spec_decoding_stats
    assert stats == llm.llm_engine.spec_stats and stats is not llm.llm_engine.spec_stats and stats.num_drafts > 0
    llm.shutdown()


# --- property --------------------------------------------------------------------------

@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_schedule_any_drafts(seed):
    rng = random.Random(seed)
    running = start(make_model("llama")[0], rng.randrange(1, 8), lies=rng.random(), seed=seed,
                    enable_prefix_caching=rng.random() < 0.5, preemption_mode=rng.choice([None, "swap", "recompute"]),
                    small_pool=rng.random() < 0.7)
    prompts, engine, done = some_prompts(), running.engine, {}
    lengths = [rng.randrange(1, 25) for _ in prompts]
    gone = set()
    for i in range(len(prompts)):
        engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, greedy(lengths[i], num_speculative_tokens=rng.choice([None, 0])))
        for _ in range(rng.randrange(0, 5)):
            done |= {o.request_id: o for o in engine.step() if o.finished}
            running.check_step()
        if rng.random() < 0.15 and str(i) not in done:
            gone.add(str(i))
            engine.abort_request(str(i))
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        running.check_step()
    running.check_rest()
    assert {r: list(done[r].outputs[0].token_ids) for r in done if r not in gone} == {
        str(i): wanted("llama")[i][:lengths[i]] for i in range(len(prompts)) if str(i) not in gone}
    engine.shutdown()
