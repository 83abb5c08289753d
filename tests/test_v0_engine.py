"""LLMEngineV0: the loop, its two shortcuts, and everything that goes wrong.

A toy that counts letters stands for the model here; tests/test_equality.py
runs real ones. Tests named `test_field_…` are rows of the field reports,
`test_vllm_…` are scenarios of vLLM's own tests.
"""
import itertools
import random

import pytest
from v0_front import EOS, TOKENIZER, ToyExecutor, assert_at_rest, generate, make_config, make_engine, next_token, run

from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.v0.executor import most_blocks, smallest_pools
from minengine.v0.llm_engine import LLMEngineV0
from minengine.v0.sequence import SequenceStatus

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def letters(prompt: str, num_tokens: int) -> list[int]:
    "What the toy answers."
    tokens = TOKENIZER.encode(prompt)
    for _ in range(num_tokens): tokens.append(next_token(tokens[-1]))
    return tokens[len(tokens) - num_tokens:]


# The loop

def test_add_and_step():
    engine = make_engine()
    engine.add_request("r", "abc", SamplingParams(max_tokens=4))
    texts = [o.outputs[0].text for _ in range(4) for o in engine.step()]
    assert texts == ["d", "de", "def", "defg"] and engine.step() == []
    assert_at_rest(engine)
    assert engine.executor.sizes == (64, 32)


SETTINGS = [dict(zip(("chunked", "num_steps", "use_async", "caching"), s))
            for s in itertools.product((False, True), (1, 4, 8), (False, True), (False, True))]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("pool", [dict(), dict(num_blocks=18), dict(num_blocks=18, preemption_mode="swap")], ids=["wide", "narrow", "swap"])
def test_every_setting_gives_the_same_tokens(settings, pool):
    settings = {**settings, **pool}
    if settings["chunked"]: settings["budget"] = 64 if settings["num_steps"] > 1 else 8
    engine, rng = make_engine(**settings), random.Random(0)
    prompts = ["".join(rng.choice("abcdefgh") for _ in range(rng.randrange(1, 30))) for _ in range(12)]
    prompts[5] = prompts[3]
    want = [letters(p, 5 + i) for i, p in enumerate(prompts)]
    got, left, num_steps = {}, list(enumerate(prompts)), 0
    while left or engine.has_unfinished_requests():
        num_steps += 1
        assert num_steps < 2000
        for i, p in left[:2]: engine.add_request(str(i), p, SamplingParams(max_tokens=5 + i))
        left = left[2:]
        for out in engine.step():
            if out.finished: got[int(out.request_id)] = out.outputs[0].token_ids
    assert [got[i] for i in range(12)] == want
    assert_at_rest(engine)
    if pool and settings["num_steps"] < 8: assert engine.scheduler.num_cumulative_preemption > 0, "the pool was meant to be too small"


def test_swapped_blocks_are_told_to_the_worker_once():
    for num_steps in (1, 4):
        engine = make_engine(num_blocks=18, preemption_mode="swap", num_steps=num_steps)
        generate(engine, ["abcdefgh" * 3] * 4, max_tokens=16)
        out = sum((m[1] for _, m in engine.executor.requests), [])
        back = sum((m[0] for _, m in engine.executor.requests), [])
        assert out and len(out) == len(back)
        # A step may consist of moves alone.
        assert_at_rest(engine)


# Several answers

def test_n_is_one_prefill_and_then_a_fork():
    engine = make_engine()
    engine.add_request("r", "abcdef", SamplingParams(n=3, max_tokens=4))
    outputs = run(engine)
    first_step = engine.executor.requests[0][0]
    assert first_step == ["r"] and len(engine.executor.requests) == 4
    copies = sum((m[2] for _, m in engine.executor.requests), [])
    assert len(copies) == 2   # of the prompt's last, half empty block
    assert [c.text for c in outputs[-1].outputs] == ["ghij", "hijk", "ijkl"]
    assert_at_rest(engine)


@pytest.mark.parametrize("settings", [dict(), dict(use_async=True), dict(num_steps=4), dict(chunked=True, budget=8), dict(caching=True)], ids=str)
def test_n_beside_others(settings):
    engine = make_engine(**settings)
    engine.add_request("one", "abc", SamplingParams(max_tokens=9))
    engine.add_request("two", "xyzabcd", SamplingParams(n=2, max_tokens=6))
    done = {o.request_id: o for o in run(engine) if o.finished}
    assert done["one"].outputs[0].token_ids == letters("abc", 9)
    assert [c.token_ids for c in done["two"].outputs] == [list(b"efghij"), list(b"fghijk")]
    assert_at_rest(engine)


@pytest.mark.parametrize("chunked", [False, True])
def test_field_vllm4451_groups_are_swapped_and_go_on(chunked):
    class Roomy(ToyExecutor): num_cpu_blocks = 64
    engine = make_engine(executor=Roomy, num_blocks=24, chunked=chunked, budget=16 if chunked else 64)
    prompts = ["abcdefgh" + c for c in "ijkl"]
    done = generate(engine, prompts, n=2, max_tokens=24)
    assert engine.scheduler.num_cumulative_preemption > 0
    assert sum((m[1] for _, m in engine.executor.requests), []), "nothing was swapped out"
    for i, p in enumerate(prompts):
        start = TOKENIZER.encode(p)[-1]
        assert [c.token_ids for c in done[str(i)].outputs] == [[start + 1 + j + k for k in range(24)] for j in (0, 1)]
    assert_at_rest(engine)


def test_field_vllm5578_many_groups_do_not_fill_the_swap_space():
    # Three groups fit at first, one at the end: two may have to leave.
    class Small(ToyExecutor): num_gpu_blocks, num_cpu_blocks = 24, 36
    engine = make_engine(executor=Small, chunked=True, budget=16, max_model_len=32)
    done = generate(engine, ["abcdefgh"] * 40, n=2, max_tokens=16)
    assert engine.scheduler.num_cumulative_preemption > 0
    assert all(len(c.token_ids) == 16 for o in done.values() for c in o.outputs)
    assert_at_rest(engine)


def test_a_child_whose_parent_ended_is_recomputed():
    # The first answer ends early; the second is alone when blocks run out.
    engine = make_engine(num_blocks=17)
    engine.executor.eos_at = {}
    engine.add_request("two", "abcdef", SamplingParams(n=2, max_tokens=40, stop=["hi"]))
    engine.add_request("one", "abc", SamplingParams(max_tokens=50))
    engine.add_request("six", "xyz", SamplingParams(max_tokens=20))
    done = {o.request_id: o for o in run(engine) if o.finished}
    assert [len(c.token_ids) for c in done["two"].outputs] == [3, 2] or engine.scheduler.num_cumulative_preemption
    assert done["one"].outputs[0].token_ids == letters("abc", 50)
    assert_at_rest(engine)


def test_field_vllm14326_abort_reaches_every_sequence():
    engine = make_engine()
    engine.add_request("r", "abcdef", SamplingParams(n=4, max_tokens=50, ignore_eos=True))
    group = engine.scheduler.waiting[0]
    for _ in range(3): engine.step()
    assert len(group.seqs) == 4
    engine.abort_request("r")
    assert {s.status for s in group.seqs} == {SequenceStatus.FINISHED_ABORTED}
    assert engine.step() == []
    assert_at_rest(engine)


def test_best_of():
    engine = make_engine()
    engine.add_request("r", "abc", SamplingParams(best_of=3, n=2, max_tokens=2, logprobs=0))
    outputs = run(engine)
    assert len(outputs) == 1   # nothing is shown before the end
    assert [(c.index, c.text) for c in outputs[0].outputs] == [(0, "de"), (1, "ef")]
    assert_at_rest(engine)


# What V0 does at the edges

def test_a_prompt_that_is_too_long_is_ignored():
    engine = make_engine(max_model_len=16)
    done = generate(engine, ["x" * 17, "abc"], max_tokens=3)
    assert (done["0"].outputs[0].token_ids, done["0"].outputs[0].finish_reason, done["0"].finished) == ([], "length", True)
    assert done["1"].outputs[0].token_ids == letters("abc", 3)


def test_the_window_has_one_token_more_than_v1s():
    engine = make_engine(max_model_len=12)
    done = generate(engine, ["abcdefghij", "abcdefghijkl"], max_tokens=None)
    assert [len(done[i].outputs[0].token_ids) for i in "01"] == [3, 1]
    for use_async in (False, True):
        engine = make_engine(max_model_len=12, use_async=use_async)
        done = generate(engine, ["abcdefghij"] * 3, max_tokens=50, min_tokens=50)
        assert all(len(o.outputs[0].token_ids) == 3 for o in done.values())
        assert_at_rest(engine)


def test_vllm_infeasible_requests_end():
    # Two blocks of prompt and three of output, for an answer of six blocks.
    for mode in (None, "swap"):
        engine = make_engine(num_blocks=5, block_size=16, max_model_len=80, budget=96, preemption_mode=mode)
        done = generate(engine, ["x" * 30] * 2, max_tokens=96)
        assert all(o.outputs[0].finish_reason == "length" and o.outputs[0].token_ids for o in done.values())
        assert_at_rest(engine)


def test_no_host_memory_for_several_sequences_is_said():
    class NoSwap(ToyExecutor): num_cpu_blocks = 0
    engine = make_engine(executor=NoSwap, num_blocks=17)
    done = generate(engine, ["abcdefgh"] * 2, n=2, max_tokens=40)
    ends = [c for o in done.values() for c in o.outputs if c.stop_reason]
    assert ends and all(c.finish_reason == "length" and "no host memory" in c.stop_reason for c in ends)
    assert_at_rest(engine)


def test_scoring_requests():
    for settings in (dict(), dict(use_async=True), dict(num_steps=4), dict(chunked=True, budget=8)):
        engine = make_engine(**settings)
        engine.add_request("score", "abcdefghijkl", SamplingParams(max_tokens=0, prompt_logprobs=0))
        engine.add_request("other", "abc", SamplingParams(max_tokens=6))
        done = {o.request_id: o for o in run(engine) if o.finished}
        assert (done["score"].outputs[0].token_ids, done["score"].outputs[0].finish_reason) == ([], "length")
        assert len(done["score"].prompt_logprobs) == 12 and done["score"].prompt_logprobs[0] is None
        assert done["other"].outputs[0].token_ids == letters("abc", 6)
        assert_at_rest(engine)


def test_a_chunk_of_a_prompt_shows_an_empty_output():
    engine = make_engine(chunked=True, budget=8)
    engine.add_request("r", "abcdefgh" * 2 + "a", SamplingParams(max_tokens=1, output_kind=DELTA))
    assert [[c.text for c in o.outputs] for o in run(engine)] == [[""], [""], ["b"]]


def test_priorities():
    engine = make_engine(policy="priority", max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -5), ("middle", 0)):
        engine.add_request(name, "abc", SamplingParams(max_tokens=4), priority=priority)
    ends = [o.request_id for o in run(engine) if o.finished]
    assert ends.index("high") < ends.index("middle")
    assert_at_rest(engine)


# Bursts

def test_vllm_computed_tokens_of_bursts():
    for num_steps, chunked in itertools.product((1, 8), (False, True)):
        engine = make_engine(num_steps=num_steps, chunked=chunked)
        engine.add_request("r", "abcdefghij", SamplingParams(max_tokens=17))
        seq = engine.scheduler.waiting[0].first_seq
        for _ in range(100):
            if seq.is_finished(): break
            engine.step()
            if not engine.burst: assert seq.get_num_computed_tokens() == 10 + seq.get_output_len() - 1
        assert seq.get_output_len() == 17
        assert_at_rest(engine)


def test_a_burst_is_scheduled_once():
    engine = make_engine(num_steps=4)
    calls, real = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: calls.append(1) or real()
    generate(engine, ["abc"], max_tokens=9)
    assert len(calls) == 3 and len(engine.executor.requests) == 1 + 4 + 4   # prompt, and two bursts


def test_a_burst_goes_on_for_nothing():
    # The second token of eight is the end; six more are computed.
    engine = make_engine(num_steps=8)
    engine.executor.eos_at = {5: True}
    done = generate(engine, ["abc"], max_tokens=50)
    assert (done["0"].outputs[0].text, done["0"].outputs[0].finish_reason) == ("de", "stop")
    assert len(engine.executor.requests) == 1 + 8


def test_abort_in_a_burst():
    engine = make_engine(num_steps=8)
    engine.add_request("a", "abc", SamplingParams(max_tokens=20))
    engine.add_request("b", "abc", SamplingParams(max_tokens=20))
    for _ in range(4): engine.step()   # in the middle of a burst
    assert engine.burst
    engine.abort_request("a")
    engine.add_request("a", "xyz", SamplingParams(max_tokens=2))   # the same name again
    done = {o.request_id: o for o in run(engine) if o.finished}
    assert done["a"].outputs[0].token_ids == letters("xyz", 2) and done["b"].outputs[0].token_ids == letters("abc", 20)
    engine.add_request("c", "abc", SamplingParams(max_tokens=20))
    for _ in range(4): engine.step()
    engine.abort_request("c")
    assert_at_rest(engine)


def test_streams_of_bursts():
    for use_async, stream, sizes in ((False, True, [1, 4, 4]), (True, True, [1] * 9), (True, False, [1, 4, 4])):
        engine = make_engine(num_steps=4, use_async=use_async, multi_step_stream_outputs=stream)
        engine.add_request("r", "abc", SamplingParams(max_tokens=9, output_kind=DELTA))
        got = [len(o.outputs[0].token_ids) for o in run(engine)]
        assert got == sizes, (use_async, stream)


# One step late

def test_async_costs_one_step_for_each_end():
    for use_async, steps in ((False, 5), (True, 6)):
        engine = make_engine(use_async=use_async)
        done = generate(engine, ["abc"], max_tokens=5)
        assert done["0"].outputs[0].token_ids == letters("abc", 5)
        assert len(engine.executor.requests) == steps
        assert_at_rest(engine)


def test_async_outputs_come_one_step_late():
    engine = make_engine(use_async=True)
    engine.add_request("r", "abc", SamplingParams(max_tokens=2))
    assert [[o.outputs[0].text for o in engine.step()] for _ in range(3)] == [[], ["d"], ["de"]]


def test_async_is_left_while_several_answers_grow():
    engine = make_engine(use_async=True)
    engine.add_request("one", "abc", SamplingParams(max_tokens=8))
    engine.step()
    assert engine.output_queue.pending
    engine.add_request("two", "abc", SamplingParams(n=2, max_tokens=2))
    engine.step()
    assert not engine.output_queue.pending
    done = {o.request_id: o for o in run(engine) if o.finished}
    assert done["one"].outputs[0].token_ids == letters("abc", 8) and len(done["two"].outputs) == 2


def test_async_abort_while_an_output_waits():
    engine = make_engine(use_async=True)
    for name in "ab": engine.add_request(name, "abc", SamplingParams(max_tokens=10))
    engine.step(), engine.step()
    engine.abort_request("a")
    engine.add_request("a", "xyz", SamplingParams(max_tokens=2))
    done = {o.request_id: o for o in run(engine) if o.finished}
    assert done["a"].outputs[0].token_ids == letters("xyz", 2) and done["b"].outputs[0].token_ids == letters("abc", 10)
    engine.add_request("c", "abc", SamplingParams(max_tokens=10))
    engine.step()
    engine.abort_request("c")
    assert_at_rest(engine)


def test_same_outputs_with_stops_sync_and_async():
    for settings in (dict(), dict(use_async=True), dict(num_steps=4), dict(num_steps=4, use_async=True)):
        engine = make_engine(**settings)
        done = generate(engine, ["abc", "xyzabc", "ghi"], max_tokens=20, stop=["hij", "m"], stop_token_ids=[111])
        assert [(done[i].outputs[0].text, done[i].outputs[0].stop_reason) for i in "012"] == [
            ("defg", "hij"), ("defg", "hij"), ("jkl", "m")], settings
        assert_at_rest(engine)


# All or nothing

BAD = [("", {}, "0 tokens"), ([300], {}, "go from 0 to 263"), ([], {}, "0 tokens"), (None, {}, "list of token ids"),
       ({"prompt": "x", "cache_salt": "s"}, {}, "cache_salt is not supported by engine 'v0'"),
       ({"prompt": "x", "multi_modal_data": {"image": "a.png"}}, {}, "but the model takes text only"),
       ("x", dict(guided_decoding={}), "guided_decoding is not supported by engine 'v0'"),
       ("x", dict(best_of=3, n=2, output_kind=DELTA), "best_of=3 with n=2 excludes output_kind"),
       ("x", dict(n=9), "max_num_seqs is 8"), ("x", dict(logprobs=21), "logprobs must be at most 20"),
       ("x", dict(stop_token_ids=[264]), "stop_token_ids[0] is 264"), ("x", dict(logits_processors=[3]), "list of functions")]


@pytest.mark.parametrize("prompt,params,message", BAD, ids=[m for _, _, m in BAD])
def test_a_bad_request_leaves_nothing_behind(prompt, params, message):
    engine = make_engine()
    engine.add_request("good", "abc", SamplingParams(max_tokens=2))
    with pytest.raises(ValueError) as error: engine.add_request("bad", prompt, SamplingParams(**params))
    assert message in str(error.value)
    assert [o.request_id for o in run(engine)] == ["good", "good"]
    assert_at_rest(engine)


def test_options_that_exclude_each_other():
    engine = make_engine(num_steps=4)
    with pytest.raises(ValueError, match="logits_processors exclude num_scheduler_steps=4"):
        engine.add_request("r", "abc", SamplingParams(logits_processors=[lambda ids, row: row]))
    with pytest.raises(ValueError, match="priority is 1, but scheduling_policy is 'fcfs'"):
        engine.add_request("r", "abc", SamplingParams(), priority=1)
    with pytest.raises(ValueError, match="lora_request"): engine.add_request("r", "abc", SamplingParams(), lora_request=object())
    with pytest.raises(ValueError, match="params must be SamplingParams"): engine.add_request("r", "abc", {"n": 1})
    with pytest.raises(ValueError, match="request_id must be a string"): engine.add_request(3, "abc", SamplingParams())


def test_names_are_free_again_at_once():
    for settings in (dict(), dict(use_async=True), dict(num_steps=4, use_async=True)):
        engine = make_engine(**settings)
        for _ in range(3):
            engine.add_request("r", "abc", SamplingParams(max_tokens=3))
            with pytest.raises(ValueError, match="'r' is in use"): engine.add_request("r", "abc", SamplingParams())
            outputs = []
            while not (outputs and outputs[-1].finished): outputs = engine.step()
            assert outputs[-1].outputs[0].token_ids == letters("abc", 3)
        run(engine)
        assert engine.executor.finished_ids.count("r") + engine.finished_ids.count("r") + len(
            engine.scheduler._finished_requests_ids) == 3
        assert_at_rest(engine)


def test_abort_of_anything():
    engine = make_engine()
    engine.abort_request("nobody")
    for name in "abc": engine.add_request(name, "abc", SamplingParams(max_tokens=20))
    engine.step()
    engine.abort_request("b"), engine.abort_request(["b", "nobody"])
    assert sorted(o.request_id for o in engine.step()) == ["a", "c"]
    engine.abort_request(["a", "c"])
    assert_at_rest(engine)


@pytest.mark.parametrize("settings", [dict(), dict(use_async=True), dict(num_steps=4), dict(caching=True)], ids=str)
def test_a_failed_step_ends_its_requests_and_not_the_engine(settings):
    engine = make_engine(**settings)
    for name in "ab": engine.add_request(name, "abc", SamplingParams(max_tokens=20))
    for _ in range(3): engine.step()
    engine.executor.fail_with = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"): engine.step()
    assert_at_rest(engine)
    done = generate(engine, ["abc"], max_tokens=3)
    assert done["0"].outputs[0].token_ids == letters("abc", 3)
    assert set("ab") <= set(engine.executor.finished_ids), "the workers were not told"


# Starting

def test_pools_that_are_too_small():
    with pytest.raises(ValueError, match="holds 60 tokens"): make_engine(num_blocks=15, max_model_len=64)
    config = make_config(num_blocks=15, max_model_len=None, limit=64)
    engine = LLMEngineV0(config, ToyExecutor, tokenizer=TOKENIZER)
    assert config.model_config.max_model_len == 60 == config.scheduler_config.max_model_len
    done = generate(engine, ["x" * 60, "x" * 61], max_tokens=9)
    assert [len(done[i].outputs[0].token_ids) for i in "01"] == [1, 0]


def test_a_limit_leaves_room_for_a_burst():
    config = make_config(num_blocks=16, max_model_len=None, limit=64, num_steps=8)
    engine = LLMEngineV0(config, ToyExecutor, tokenizer=TOKENIZER)
    assert config.model_config.max_model_len == 56   # 16 blocks of 4; seven slots ahead take two
    done = generate(engine, ["x" * 50], max_tokens=9)
    assert done["0"].outputs[0].token_ids == letters("x" * 50, 7) and done["0"].outputs[0].stop_reason is None
    with pytest.raises(ValueError, match="holds 56 tokens"): make_engine(num_blocks=16, num_steps=8)
    with pytest.raises(ValueError, match="holds 0 tokens"): make_engine(num_blocks=1, num_steps=8)


def random_engine(rng, executor, num_blocks=None):
    "Settings of all kinds, with windows of a few tokens."
    block_size, max_model_len, num_steps = rng.choice([1, 2, 4, 16]), rng.choice([5, 16, 17, 32, 100]), rng.choice([1, 1, 4, 8])
    chunked, max_num_seqs = rng.random() < 0.5, rng.choice([1, 1, 2, 3])
    cut = chunked and num_steps == 1
    budget = max(block_size, max_num_seqs, rng.choice([2, 8, 16]) if cut else max_model_len)
    return make_engine(
        executor=executor, max_model_len=max_model_len, block_size=block_size, num_blocks=num_blocks, budget=budget,
        max_num_seqs=max_num_seqs, chunked=chunked, num_steps=num_steps, use_async=rng.random() < 0.3,
        caching=rng.random() < 0.5, preemption_mode=rng.choice([None, "swap", "recompute"]))


def ask_at_random(rng, engine, n=1) -> dict[str, int]:
    "Prompts of any length; tokens that each should get."
    wanted, limit = {}, engine.vllm_config.model_config.max_model_len
    for i in range(rng.choice([1, 2, 4, 6])):
        length, max_tokens = rng.randrange(1, limit + 1), rng.choice([1, 5, 40, 1000])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        engine.add_request(str(i), [rng.randrange(200) for _ in range(length)], params)
        wanted[str(i)] = min(max_tokens, limit + 1 - length)
    return wanted


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_of_its_own_size_stops_nobody(seed):
    "Plenty of memory, few sequences: the pool is cut to what they can use, and no request may be worse for it."
    class Plenty(ToyExecutor):
        def determine_num_available_blocks(self): return smallest_pools([(10**6, 10**6)], most_blocks(self.vllm_config))
    rng = random.Random(seed)
    for _ in range(80):
        engine = random_engine(rng, Plenty)
        n = 2 if engine.vllm_config.scheduler_config.max_num_seqs > 1 and rng.random() < 0.3 else 1
        wanted = ask_at_random(rng, engine, n)
        done = {o.request_id: o for o in run(engine) if o.finished}
        assert {i: [len(c.token_ids) for c in o.outputs] for i, o in done.items()} == {i: [w] * n for i, w in wanted.items()}
        assert engine.scheduler.num_cumulative_preemption == 0
        assert_at_rest(engine)


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_that_is_accepted_serves_everybody(seed):
    "The smallest pools that an engine starts with: slow perhaps, but each request gets all its tokens."
    rng, num_preempted, num_started = random.Random(seed), 0, 0
    for _ in range(300):
        class Tight(ToyExecutor): num_cpu_blocks = rng.choice([0, 4, 40])
        try: engine = random_engine(rng, Tight, num_blocks=rng.randrange(1, 30))
        except ValueError: continue
        num_started += 1
        wanted = ask_at_random(rng, engine)
        done = {o.request_id: o for o in run(engine) if o.finished}
        assert {i: len(o.outputs[0].token_ids) for i, o in done.items()} == wanted
        num_preempted += engine.scheduler.num_cumulative_preemption
        assert_at_rest(engine)
    assert num_started > 100 and num_preempted > 10   # the test tests


def test_a_failing_start_lets_the_executor_go():
    closed = []
    class Failing(ToyExecutor):
        def initialize_cache(self, *sizes): raise RuntimeError("no")
        def shutdown(self): closed.append(1)
    with pytest.raises(RuntimeError): make_engine(executor=Failing)
    assert closed == [1]


def test_statistics():
    engine = make_engine(log_stats=True, max_num_seqs=1)
    for name in "ab": engine.add_request(name, "abc", SamplingParams(max_tokens=2))
    engine.step()
    stats = engine.last_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_swapped_reqs) == (1, 1, 0)
    assert stats.gpu_cache_usage == 1 / 64 and stats.cpu_cache_usage == 0.0 and stats.prefix_cache_hit_rate is None


def test_metrics():
    for use_async in (False, True):
        engine = make_engine(use_async=use_async)
        out = generate(engine, ["abc"], max_tokens=3)["0"]
        m = out.metrics
        assert m.first_scheduled_time <= m.first_token_time <= m.last_token_time <= m.finished_time and m.time_in_queue >= 0


def test_cached_tokens_are_reported():
    engine = make_engine(caching=True)
    first = generate(engine, ["abcdefghijkl"], max_tokens=2)["0"]
    again = generate(engine, ["abcdefghijkl"], max_tokens=2)["0"]
    longer = generate(engine, ["abcdefghijklmn"], max_tokens=2)["0"]
    assert [o.num_cached_tokens for o in (first, again, longer)] == [0, 11, 12]
    assert engine.reset_prefix_cache()
    assert generate(engine, ["abcdefghijkl"], max_tokens=2)["0"].num_cached_tokens == 0


def test_end_tokens():
    engine = make_engine()
    engine.executor.eos_at = {6: True}
    done = generate(engine, ["abc"], max_tokens=20)
    assert (done["0"].outputs[0].token_ids, done["0"].outputs[0].text) == ([*b"def", EOS], "def")
