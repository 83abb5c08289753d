"""The model runner: deltas in, tokens out, and the same tokens whoever shares the batch."""
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from v1_tiny import VOCAB, Engine, alone, random_prompt, tiny_config, tiny_model

from minengine.attention.kv_cache import slot_mapping
from minengine.sampling_params import SamplingParams
from minengine.v1.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from minengine.v1.worker.input_batch import CachedRequestState, InputBatch
from minengine.v1.worker.model_runner import (
    ModelRunner, PromptLogprobs, StepBuffers, apply_delta, logits_rows, ragged_positions, update_batch)

GREEDY = SamplingParams(temperature=0)


# --- index arithmetic -------------------------------------------------------

def test_v073_2_16_ragged_positions():
    rows, positions, starts = ragged_positions(np.array([2, 5, 3]), np.array([0, 0, 0]))
    assert rows.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert starts.tolist() == [0, 2, 7, 10]


def test_positions_start_where_the_computed_tokens_end():
    rows, positions, starts = ragged_positions(np.array([1, 3, 2]), np.array([9, 0, 40], np.int32))
    assert positions.tolist() == [9, 0, 1, 2, 40, 41] and positions.dtype == np.int64


def test_v073_2_16_logits_rows_with_drafts():
    rows = logits_rows(np.array([4, 100, 3, 100, 2]), np.array([3, 0, 2, 0, 1]))
    assert rows.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]


def small_batch(block_size=4):
    batch = InputBatch(4, 40, 10, "cpu", VOCAB)
    for i, (prompt, computed, blocks) in enumerate([(9, 8, [5, 2, 7]), (20, 0, [1, 9, 3, 0, 8]), (13, 6, [4, 6, 10, 11])]):
        batch.add_request(CachedRequestState(str(i), list(range(10 * i, 10 * i + prompt)), GREEDY, blocks, computed))
    return batch


def test_step_buffers_equal_a_loop():
    "Decode, first chunk and continued chunk in one step, element by element."
    batch, counts = small_batch(), np.array([1, 7, 4])
    buffers = StepBuffers(64, 4, 4)
    m = buffers.fill(batch, counts)
    m.check(num_blocks=12, block_size=4)
    ids, positions, slots = [], [], []
    for row, n in enumerate(counts):
        start = int(batch.tokens.num_computed_tokens[row])
        ids += batch.tokens.token_ids[row, start:start + n].tolist()
        positions += range(start, start + n)
        slots += slot_mapping(batch.block_table.row(row).tolist(), start, start + int(n), 4)
    assert buffers.input_ids.np[:12].tolist() == ids
    assert buffers.positions.np[:12].tolist() == positions
    assert m.slot_mapping.tolist() == slots and m.slot_mapping.dtype == torch.int64
    assert m.query_start_loc.tolist() == m.query_start_loc_cpu == [0, 1, 8, 12]
    assert m.seq_lens.tolist() == m.seq_lens_cpu == [9, 7, 10]
    assert (m.max_query_len, m.max_seq_len, m.num_tokens) == (7, 10, 12)


def test_field_vllm_11596_buffers_keep_their_addresses():
    batch, buffers = small_batch(), StepBuffers(64, 4, 4)
    first = buffers.fill(batch, np.array([1, 2, 3]))
    second = buffers.fill(batch, np.array([1, 5, 3]))
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr(), name


# --- applying the scheduler's deltas ---------------------------------------

def new_data(req_id, prompt=(4, 5, 6), blocks=(0,), computed=0, params=GREEDY):
    return NewRequestData(req_id, list(prompt), None, [], [], [], params, list(blocks), computed)


def order(new=(), cached=(), counts=None, drafts=None, finished=()):
    counts = counts or {}
    return SchedulerOutput(list(new), list(cached), counts, sum(counts.values()), drafts or {}, {}, 0, set(finished), [])


class Worker:
    "Just enough of a runner to apply orders."
    def __init__(self): self.batch, self.requests = InputBatch(8, 40, 10, "cpu", VOCAB), {}
    def apply(self, order): update_batch(self.batch, self.requests, order)
    def tokens(self, req_id):
        row = self.batch.req_id_to_index[req_id]
        return self.batch.tokens.token_ids[row, :self.batch.tokens.num_tokens[row]].tolist()


def test_v073_t_new_finished_unscheduled_resumed():
    w = Worker()
    w.apply(order([new_data("a"), new_data("b")], counts={"a": 3, "b": 3}))
    assert w.batch.req_ids == ["a", "b"] and set(w.requests) == {"a", "b"}
    first = w.batch.sampling_metadata()
    # No change: a decode step for both keeps the metadata object.
    step = order(cached=[CachedRequestData(r, False, [7], [], 3) for r in "ab"], counts={"a": 1, "b": 1})
    w.apply(step)
    assert w.batch.sampling_metadata() is first and w.tokens("a") == [4, 5, 6, 7]
    # Unscheduled: the row goes, the state stays, the metadata is made again.
    w.apply(order(cached=[CachedRequestData("b", False, [8], [3], 4)], counts={"b": 1}))
    assert w.batch.req_ids == ["b"] and set(w.requests) == {"a", "b"}
    assert w.batch.sampling_metadata() is not first
    assert w.batch.block_table.row(0).tolist() == w.requests["b"].block_ids == [0, 3]
    # Resumed: blocks are replaced, all tokens come again.
    w.apply(order(cached=[CachedRequestData("a", True, [4, 5, 6, 7], [8, 9], 0)], counts={"a": 4}))
    assert w.batch.req_ids == ["a"] and w.batch.block_table.row(0).tolist() == [8, 9]
    assert w.tokens("a") == [4, 5, 6, 7] and w.batch.tokens.num_computed_tokens[0] == 0
    # Finished: gone from everywhere.
    w.apply(order(finished=["a", "b", "never heard of"]))
    assert w.batch.req_ids == [] and w.requests == {}


def test_v073_2_16_drafts_of_a_readded_row_are_written():
    "Skipped for a step, then back with drafts: row was [4,5,6,20,0,0]."
    w = Worker()
    w.apply(order([new_data("a")], counts={"a": 3}))
    w.apply(order())
    w.apply(order(cached=[CachedRequestData("a", False, [20], [], 3)], counts={"a": 3}, drafts={"a": [77, 78]}))
    assert w.tokens("a") == [4, 5, 6, 20, 77, 78] and w.batch.tokens.num_tokens_no_spec[0] == 4
    w.apply(order(cached=[CachedRequestData("a", False, [77, 50], [], 4)], counts={"a": 2}))
    assert w.tokens("a") == [4, 5, 6, 20, 77, 50]   # no drafts: the old ones are gone


def test_v073_2_7_finished_and_new_in_the_same_order():
    w = Worker()
    w.apply(order([new_data("a", blocks=[3])], counts={"a": 3}))
    w.apply(order([new_data("a", prompt=[9], blocks=[5])], counts={"a": 1}, finished=["a"]))
    w.batch.check_invariants()
    assert w.tokens("a") == [9] and w.batch.block_table.row(0).tolist() == [5]
    # An end that was never told is no reason to mix two requests up.
    w.apply(order([new_data("a", prompt=[8])], counts={"a": 1}))
    assert w.tokens("a") == [8] and w.batch.num_reqs == 1


def test_resumed_while_the_row_is_still_there():
    w = Worker()
    w.apply(order([new_data("a", blocks=[3])], counts={"a": 3}))
    w.apply(order(cached=[CachedRequestData("a", True, [4, 5], [6], 0)], counts={"a": 2}))
    assert w.batch.block_table.row(0).tolist() == [6] and w.batch.tokens.num_computed_tokens[0] == 0


def test_tokens_that_are_missing_between_are_an_error():
    state = CachedRequestState("a", [1, 2, 3], GREEDY, [0], 0)
    with pytest.raises(ValueError, match="a: 5 tokens are computed, the worker knows 3"):
        apply_delta(state, CachedRequestData("a", False, [9], [], 5))
    assert apply_delta(state, CachedRequestData("a", False, [3, 9], [4], 2)) == [9]
    assert state.output_token_ids == [9] and state.block_ids == [0, 4]


def test_images_are_refused_by_name():
    engine = Engine()
    engine.add("a", [1, 2])
    step = engine.scheduler.schedule()
    step.scheduled_encoder_inputs["a"] = [0]
    with pytest.raises(NotImplementedError, match="images"): engine.runner.execute_model(step)


def test_an_empty_order_only_cleans_up():
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=1)
    engine.run()
    assert list(engine.runner.requests) == ["a"]
    _, result = engine.step()
    assert result.req_ids == [] and engine.runner.requests == {} and engine.runner.batch.req_ids == []


def rows_behind_the_layers(engine) -> tuple[list[int], dict]:
    "How many rows leave the last layer in each step, and the tokens."
    seen = []
    handle = tiny_model().model.norm.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    try: tokens = engine.run()
    finally: handle.remove()
    return seen, tokens


def test_the_last_layer_finishes_only_rows_that_are_sampled(monkeypatch):
    "Two prompts in chunks of at most 16, then decodes; with the switch off, all rows and the same tokens."
    def play(**params):
        engine, rng = Engine(budget=16, caching=False), random.Random(3)
        for name, n in ("a", 10), ("b", 17):
            engine.add(name, random_prompt(rng, n, n + 1), SamplingParams(temperature=0, ignore_eos=True, max_tokens=3, **params))
        return rows_behind_the_layers(engine)
    some, tokens = play()
    assert some == [2, 2, 2, 1]                  # 10 + 6 tokens, 1 + 11, then decodes
    assert play(prompt_logprobs=1) == ([16, 12, 2, 1], tokens)   # scores look at all of a prompt
    monkeypatch.setattr(type(tiny_model()), "takes_rows", False)
    assert play() == ([16, 12, 2, 1], tokens)


# --- equality ----------------------------------------------------------------

CONFIGS = [
    dict(),
    dict(budget=8),                               # chunks
    dict(num_blocks=24),                          # preemption
    dict(num_blocks=24, caching=False, budget=9), # both
    dict(block_size=16, num_blocks=8),
    dict(max_num_seqs=3, preallocate=16, num_blocks=30),
    dict(backend="reference", num_blocks=18),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_field_vllm_27367_any_batch_gives_the_tokens_of_a_request_alone(config):
    "Decode rows, first and continued chunks side by side; rows move as others end."
    rng = random.Random(1)
    prompts = [random_prompt(rng) for _ in range(8)]
    wanted = {str(i): alone(p, max_tokens=6 + i) for i, p in enumerate(prompts)}
    engine = Engine(nan_in_free_blocks=True, **config)
    arrivals = [0, 0, 1, 2, 3, 5, 5, 9]
    for step in range(400):
        for i, p in enumerate(prompts):
            if arrivals[i] == step: engine.add(str(i), p, max_tokens=6 + i)
        if step > 9 and not engine.scheduler.has_unfinished_requests(): break
        engine.step()
    assert engine.tokens == wanted
    if config.get("num_blocks", 64) <= 24: assert engine.scheduler.num_preempted > 0   # the test tests


def test_a_mixed_batch_holds_all_three_kinds_of_rows():
    rng = random.Random(2)
    prompts = {"decode": random_prompt(rng, 5, 6), "continued": random_prompt(rng, 40, 41), "first": random_prompt(rng, 20, 21)}
    engine = Engine(budget=24, max_num_seqs=4)
    engine.add("decode", prompts["decode"], max_tokens=9)
    engine.step()
    engine.add("continued", prompts["continued"], max_tokens=9)
    engine.step()
    engine.add("first", prompts["first"], max_tokens=9)
    step, _ = engine.step()
    assert step.num_scheduled_tokens == {"decode": 1, "continued": 17, "first": 6}
    assert engine.run() == {r: alone(p, max_tokens=9) for r, p in prompts.items()}


def test_field_nano_vllm_144_preempted_after_output_is_recomputed():
    rng = random.Random(3)
    prompts = {str(i): random_prompt(rng, 20, 21) for i in range(3)}
    engine = Engine(num_blocks=18, caching=False, budget=64, nan_in_free_blocks=True)
    for req_id, p in prompts.items(): engine.add(req_id, p, max_tokens=16)
    resumed = []
    while engine.scheduler.has_unfinished_requests():
        order, _ = engine.step()
        resumed += [d for d in order.scheduled_cached_reqs if d.resumed_from_preemption]
    assert resumed and any(len(d.new_token_ids) > 20 for d in resumed)   # with output
    assert engine.tokens == {r: alone(p, max_tokens=16) for r, p in prompts.items()}


def test_field_vllm_37076_nan_in_freed_blocks_never_reaches_an_output():
    "Short requests, a long one, aborts and retries: reuse that comes too early would show."
    rng, engine = random.Random(4), Engine(nan_in_free_blocks=True, num_blocks=40, budget=24)
    seen = []
    compute_logits = tiny_model().compute_logits
    engine.runner.model = SimpleNamespace(compute_logits=lambda h: seen.append(compute_logits(h)) or seen[-1])
    for i in range(4): engine.add(f"short{i}", random_prompt(rng, 3, 12), max_tokens=12)
    for _ in range(3): engine.step()
    engine.add("long", random_prompt(rng, 100, 101), max_tokens=8)
    for _ in range(2): engine.step()
    for i in range(3): engine.abort(f"short{i}")
    for i in range(3): engine.add(f"again{i}", random_prompt(rng, 3, 12), max_tokens=12)
    engine.run()
    assert seen and all(torch.isfinite(logits).all() for logits in seen)


def test_the_nan_helper_would_be_noticed():
    engine = Engine()
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=4)
    engine.step()
    for kv_cache in engine.runner.kv_caches: kv_cache.fill_(float("nan"))   # blocks in use
    engine.step()
    assert engine.tokens["a"][1:] != alone([1, 2, 3, 4, 5], max_tokens=4)[1:2]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_field_vllm_13418_13922_the_padded_tail_never_writes_kv(backend):
    "A key tensor longer than the slots; stale tokens run through the model."
    plain, padded = Engine(backend=backend), Engine(backend=backend, num_input_tokens=lambda n: -(-n // 8) * 8)
    rng = random.Random(5)
    for i in range(3):
        prompt = random_prompt(rng)
        for engine in (plain, padded): engine.add(str(i), prompt, max_tokens=7)
    for kv_cache in padded.runner.kv_caches: kv_cache.fill_(5.0)   # the mark of the untouched
    for kv_cache in plain.runner.kv_caches: kv_cache.fill_(5.0)
    assert padded.run() == plain.run()
    for a, b in zip(padded.runner.kv_caches, plain.runner.kv_caches): torch.testing.assert_close(a, b)


def test_repetition_penalty_over_chunks_and_moves_equals_alone():
    "The penalty looks at the whole prompt, also at tokens whose chunk is yet to come."
    kw = dict(params=SamplingParams(temperature=0, repetition_penalty=1.8, frequency_penalty=0.5, max_tokens=8, ignore_eos=True))
    rng, engine = random.Random(6), Engine(budget=10)
    engine.add("short", random_prompt(rng, 3, 4), max_tokens=1)
    long = random_prompt(rng, 38, 39)
    engine.add("long", long, **kw)
    assert engine.run()["long"] == alone(long, **kw)


def test_field_vllm_5639_57719_penalties_do_not_depend_on_order_or_length():
    rng = random.Random(12)
    wanted = {
        "a": (random_prompt(rng, 30, 31), SamplingParams(temperature=0, repetition_penalty=2.0, max_tokens=8, ignore_eos=True)),
        "b": (random_prompt(rng, 5, 6), SamplingParams(seed=99, top_k=1, max_tokens=8, ignore_eos=True)),
        "c": (random_prompt(rng, 12, 13), SamplingParams(seed=4, presence_penalty=1.0, max_tokens=8, ignore_eos=True))}
    seen = []
    for ids in ("abc", "cba", "bca"):
        engine = Engine(budget=64)
        for req_id in ids: engine.add(req_id, wanted[req_id][0], wanted[req_id][1].clone())
        seen.append(dict(engine.run()))
    assert seen[0] == seen[1] == seen[2] == {r: alone(p, params=params.clone()) for r, (p, params) in wanted.items()}


def test_field_vllm_26317_min_tokens_holds_back_the_end():
    prompt = [3, 1, 4]
    end = alone(prompt, max_tokens=1)[0]   # the very first token would end it
    params = SamplingParams(temperature=0, min_tokens=4, max_tokens=6, stop_token_ids=[end])
    engine = Engine()
    engine.add("a", prompt, params)
    tokens = engine.run()["a"]
    assert end not in tokens[:4] and len(tokens) >= 4


# --- seeds -------------------------------------------------------------------

def seeded(seed, **kw): return SamplingParams(temperature=1.0, seed=seed, max_tokens=10, ignore_eos=True, **kw)


@pytest.mark.parametrize("config", CONFIGS[:5], ids=str)
def test_seeded_tokens_do_not_depend_on_chunks_preemption_or_company(config):
    rng = random.Random(7)
    prompts = [random_prompt(rng) for _ in range(7)]
    wanted = {str(i): alone(p, params=seeded(i)) for i, p in enumerate(prompts)}
    engine = Engine(**config)
    for i, p in enumerate(prompts): engine.add(str(i), p, seeded(i))
    for i in range(3): engine.add(f"other{i}", random_prompt(rng), SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True))
    engine.run()
    assert {r: engine.tokens[r] for r in wanted} == wanted


def test_an_unfinished_prompt_does_not_advance_its_generator():
    engine = Engine(budget=10)
    engine.add("short", [5, 6], max_tokens=20)   # so that the batch does sample
    engine.step()
    engine.add("a", list(range(40)), seeded(3))
    engine.step()
    state = engine.runner.requests["a"].generator.get_state()
    for _ in range(2):
        engine.step()
        assert torch.equal(engine.runner.requests["a"].generator.get_state(), state)
    while not engine.tokens["a"]: engine.step()
    assert not torch.equal(engine.runner.requests["a"].generator.get_state(), state)


def test_field_vllm_17929_11953_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    runs = []
    for _ in range(2):
        engine = Engine()
        engine.add("a", [1, 2, 3], SamplingParams(temperature=1.0, max_tokens=8))
        runs.append(engine.run()["a"])
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0] == runs[1]   # the engine's own seed decides
    other = Engine(seed=5)
    other.add("a", [1, 2, 3], SamplingParams(temperature=1.0, max_tokens=8))
    assert other.run()["a"] != runs[0]


# --- logprobs ------------------------------------------------------------------

def plain_logprobs(tokens: list[int]) -> torch.Tensor:
    "Raw log-softmax at each position, from one forward without chunks."
    config = tiny_config(budget=512, backend="reference")
    runner = ModelRunner(config, tiny_model())
    runner.initialize_kv_cache(64)
    w = InputBatch(1, 128, 32, "cpu", VOCAB)
    w.add_request(CachedRequestState("a", tokens, GREEDY, list(range(32)), 0))
    with torch.inference_mode():
        hidden = runner.forward(runner.buffers.fill(w, np.array([len(tokens)])))
        # `forward` reads the buffers of the runner, which `fill` has written.
        return tiny_model().compute_logits(hidden).log_softmax(-1)


@pytest.mark.parametrize("config", [dict(), dict(budget=8), dict(budget=8, num_blocks=20, caching=False)], ids=str)
@pytest.mark.parametrize("k", [0, 3])
def test_field_vllm_15420_prompt_logprobs_over_chunks_equal_a_plain_forward(config, k):
    rng = random.Random(8)
    prompt = random_prompt(rng, 30, 31)
    engine = Engine(**config)
    engine.add("other", random_prompt(rng, 20, 21), max_tokens=12)
    engine.add("a", prompt, SamplingParams(temperature=0, prompt_logprobs=k, max_tokens=5, ignore_eos=True))
    engine.run()
    found = [o.new_prompt_logprobs for o in engine.outputs["a"] if o.new_prompt_logprobs is not None]
    assert len(found) == 1 and engine.runner.prompt_logprobs == {}
    expected = plain_logprobs(prompt)
    assert len(found[0].logprobs) == 29
    for i, (ids, values, rank) in enumerate(zip(*found[0])):
        assert ids[0] == prompt[i + 1] and len(ids) == k + 1
        assert values == pytest.approx(expected[i, ids].tolist(), abs=1e-4)
        assert rank == int((expected[i] >= expected[i, ids[0]] - 1e-6).sum())
        assert ids[1:] == expected[i].topk(k).indices.tolist()


def test_prompt_logprobs_once_although_preempted():
    "Before the prompt is complete: it starts over. After: nothing comes twice."
    rng = random.Random(9)
    engine = Engine(num_blocks=20, budget=16, caching=False)
    prompts = [random_prompt(rng, 24, 30) for _ in range(4)]
    params = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=20, ignore_eos=True)
    for i, p in enumerate(prompts): engine.add(str(i), p, params.clone())
    engine.run()
    assert engine.scheduler.num_preempted > 0
    for i, p in enumerate(prompts):
        found = [o.new_prompt_logprobs for o in engine.outputs[str(i)] if o.new_prompt_logprobs is not None]
        assert len(found) == 1
        assert [ids[0] for ids in found[0].logprob_token_ids] == p[1:]
        expected = plain_logprobs(p)
        values = [v[0] for v in found[0].logprobs]
        assert values == pytest.approx(expected[range(len(p) - 1), p[1:]].tolist(), abs=1e-4)


def test_a_prompt_of_one_token_has_no_scores():
    engine = Engine()
    engine.add("a", [7], SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=1))
    engine.run()
    assert engine.outputs["a"][0].new_prompt_logprobs == ([], [], [])


def test_prompt_logits_are_made_in_slices():
    calls = []
    def compute_logits(hidden):
        calls.append(len(hidden))
        return torch.zeros(len(hidden), 11)
    scores = PromptLogprobs([1] * 31, 2)
    scores.write(0, torch.zeros(20, 4), compute_logits, max_rows=8)
    scores.write(20, torch.zeros(11, 4), compute_logits, max_rows=8)
    assert calls == [8, 8, 4, 8, 2] and len(scores.tolists().logprobs) == 30
    with pytest.raises(ValueError, match="0 to 4 were never seen"):
        PromptLogprobs([1] * 9, 2).write(5, torch.zeros(2, 4), compute_logits, 8)
    with pytest.raises(ValueError, match="0 of 8"): PromptLogprobs([1] * 9, 2).tolists()


def test_sampled_logprobs_are_raw_and_by_row():
    engine, prompt = Engine(), [9, 8, 7]
    engine.add("quiet", [1, 2], max_tokens=3)
    engine.add("a", prompt, SamplingParams(temperature=0, logprobs=2, logit_bias={5: 100.0}, max_tokens=3, ignore_eos=True))
    engine.run()
    assert engine.tokens["a"] == [5, 5, 5]
    expected = plain_logprobs(prompt + [5, 5])
    for i, output in enumerate(engine.outputs["a"]):
        (ids,), (values,), _ = output.new_logprobs
        assert ids[0] == 5 and values == pytest.approx(expected[2 + i, ids].tolist(), abs=1e-4)


def test_scoring_a_prompt_as_long_as_the_model_takes():
    engine = Engine(max_model_len=64, budget=16)
    prompt = random_prompt(random.Random(10), 64, 65)
    engine.add("a", prompt, SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=0))
    engine.check = False   # the worker has a token more that nobody wants
    engine.run()
    assert engine.tokens["a"] == [] and len(engine.outputs["a"][-1].new_prompt_logprobs.logprobs) == 63


# --- mirror, aliasing, counting ---------------------------------------------------

@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_worker_mirror_under_random_scheduling(seed):
    "After each step the worker's rows equal the scheduler's requests (see `check_mirror`)."
    rng = random.Random(seed)
    engine = Engine(
        nan_in_free_blocks=True, num_blocks=rng.choice([20, 30, 64]), budget=rng.choice([8, 12, 32]),
        max_num_seqs=8, caching=rng.random() < 0.5, preallocate=rng.choice([0, 4]))
    shared = random_prompt(rng, 8, 9)
    for i in range(14):
        if rng.random() < 0.8:
            prompt = (shared if rng.random() < 0.4 else []) + random_prompt(rng, 1, 30)
            params = SamplingParams(
                temperature=rng.choice([0, 1]), seed=rng.choice([None, 3]), max_tokens=rng.randrange(1, 12), ignore_eos=True)
            engine.add(str(i), prompt, params)
        for _ in range(rng.randrange(0, 4)): engine.step()
        alive = list(engine.scheduler.requests)
        if alive and rng.random() < 0.25:
            gone = rng.choice(alive)
            engine.abort(gone)
            if rng.random() < 0.5: engine.add(gone, random_prompt(rng), max_tokens=3)   # the same id again
    engine.run()
    engine.step()
    assert engine.runner.requests == {} and engine.runner.batch.num_reqs == 0
    assert engine.scheduler.kv_cache_manager.num_free_blocks == engine.config.cache_config.num_gpu_blocks


def test_skipped_requests_keep_their_state():
    "More running requests than tokens in a step: some are left out, and come back right."
    rng = random.Random(11)
    prompts = {str(i): random_prompt(rng, 10, 20) for i in range(8)}
    engine = Engine(budget=64, num_blocks=128)
    for req_id, p in prompts.items(): engine.add(req_id, p, max_tokens=10)
    while any(not tokens for tokens in engine.tokens.values()): engine.step()
    engine.config.scheduler_config.max_num_batched_tokens = 5
    for _ in range(4): engine.step()
    engine.scheduler.running.reverse()      # those in front would starve the others
    engine.run()
    assert engine.num_skipped > 10
    assert engine.tokens == {r: alone(p, max_tokens=10) for r, p in prompts.items()}


def test_outputs_are_copies():
    engine = Engine()
    engine.add("a", [1, 2], max_tokens=3)
    engine.add("b", [3, 4], max_tokens=1)
    _, first = engine.step()
    kept = (list(first.req_ids), dict(first.req_id_to_index), [list(t) for t in first.sampled_token_ids])
    engine.run()
    assert (first.req_ids, first.req_id_to_index, first.sampled_token_ids) == kept


def test_metadata_is_rebuilt_only_when_a_row_comes_or_goes():
    engine, changes, before = Engine(), 0, None
    for i in range(5): engine.add(str(i), [1 + i, 2, 3], max_tokens=4 + 3 * i)
    while engine.scheduler.has_unfinished_requests():
        order, _ = engine.step()
        changes += set(order.num_scheduled_tokens) != before
        before = set(order.num_scheduled_tokens)
    assert engine.runner.batch.num_metadata_rebuilds == changes == 5
    assert len(engine.orders) == 16


def test_profile_run_needs_no_cache():
    runner = ModelRunner(tiny_config(), tiny_model())
    runner.profile_run()
    assert runner.kv_caches == []


def test_a_failed_step_leaves_a_runner_that_works():
    "The engine ends all requests after a failure; the next ones must not notice."
    engine, model, fail = Engine(), tiny_model(), [False]
    def run_model(input_ids, positions):
        if fail[0]: raise RuntimeError("out of luck")
        return model(input_ids, positions)
    engine.runner.run_model = run_model
    engine.add("a", [1, 2, 3], max_tokens=9)
    engine.step()
    engine.add("b", [4, 5, 6], SamplingParams(temperature=0, prompt_logprobs=1))
    fail[0] = True
    with pytest.raises(RuntimeError): engine.step()
    fail[0] = False
    for req_id in "ab": engine.abort(req_id)
    engine.add("a", [7, 8, 9], max_tokens=5)
    assert engine.run()["a"] == alone([7, 8, 9], max_tokens=5)
    engine.step()
    assert engine.runner.requests == {} and engine.runner.prompt_logprobs == {}
