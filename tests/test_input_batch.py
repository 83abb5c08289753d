"""The persistent batch: whatever comes, goes and moves, a row belongs to one request.

The oracle is a batch built from nothing with the same requests in the same rows.
"""
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine.sampling_params import SamplingParams
from minengine.v1.worker.block_table import BlockTable, compute_slot_mapping
from minengine.v1.worker.input_batch import (
    CachedRequestState, InputBatch, pad_prompts, sampling_numbers)

VOCAB, MAX_LEN, BLOCKS = 64, 40, 10


def random_params(rng: random.Random) -> SamplingParams:
    "Any mixture of options, each absent half of the time."
    greedy = rng.random() < 0.3
    some = lambda make, off: make() if rng.random() < 0.5 else off
    params = SamplingParams(
        temperature=0 if greedy else rng.uniform(0.1, 2),
        top_p=some(lambda: rng.uniform(0.1, 1), 1.0),
        top_k=some(lambda: rng.choice([0, -1, 1, 5, VOCAB, 10**7]), -1),
        min_p=some(lambda: rng.random(), 0.0),
        presence_penalty=some(lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(lambda: rng.uniform(-2, 2), 0.0),
        repetition_penalty=some(lambda: rng.uniform(0.1, 2), 1.0),
        seed=some(lambda: rng.randrange(99), None),
        min_tokens=some(lambda: rng.randrange(5), 0), max_tokens=20,
        stop_token_ids=some(lambda: [rng.randrange(VOCAB)], None),
        logprobs=some(lambda: rng.randrange(5), None),
        logit_bias=some(lambda: {rng.randrange(VOCAB): 5.0}, None),
        allowed_token_ids=some(lambda: rng.sample(range(VOCAB), 3), None))
    if rng.random() < 0.2: params.bad_words_token_ids = [[1, 2]]
    return params


def random_state(req_id: str, rng: random.Random) -> CachedRequestState:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20))]
    params = random_params(rng)
    generator = None if params.seed is None else torch.Generator()
    return CachedRequestState(
        req_id, prompt, params, rng.sample(range(1000), rng.randrange(0, BLOCKS)),
        rng.randrange(0, len(prompt) + 1), generator, output)


def new_batch(max_num_reqs=8) -> InputBatch:
    return InputBatch(max_num_reqs, MAX_LEN, BLOCKS, "cpu", VOCAB)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor): return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b


def check_against_fresh(batch: InputBatch, states: dict[str, CachedRequestState]):
    "Every row and every field of the metadata, against a batch made anew."
    batch.check_invariants()
    fresh = new_batch(batch.max_num_reqs)
    for req_id in batch.req_ids: fresh.add_request(states[req_id])
    for row, req_id in enumerate(batch.req_ids):
        state = states[req_id]
        tokens = state.prompt_token_ids + state.output_token_ids
        assert batch.tokens.token_ids[row, :len(tokens)].tolist() == tokens
        assert batch.tokens.num_prompt_tokens[row] == len(state.prompt_token_ids)
        assert batch.tokens.num_computed_tokens[row] == state.num_computed_tokens
        assert batch.block_table.row(row).tolist() == state.block_ids
        assert batch.output_token_ids[row] is state.output_token_ids
    made, wanted = batch.sampling_metadata(), fresh.sampling_metadata()
    for name in wanted.__dataclass_fields__:
        assert same(getattr(made, name), getattr(wanted, name)), name
    for row, req_id in enumerate(batch.req_ids):
        check_row_of_metadata(made, row, states[req_id])


def check_row_of_metadata(made, row, state):
    "The same from the request's own parameters, without the batch's code."
    p = state.sampling_params
    assert made.generators.get(row) is state.generator
    assert made.logit_bias[row] == p.logit_bias
    assert made.bad_words_token_ids.get(row) == p.bad_words_token_ids
    assert made.output_token_ids[row] is state.output_token_ids
    for name in ("temperature", "top_p", "min_p"):
        column = getattr(made, name)
        if column is not None: assert float(column[row]) == pytest.approx(getattr(p, name))
    if made.top_k is not None:
        assert int(made.top_k[row]) == (p.top_k if 0 < p.top_k < VOCAB else VOCAB)
    mask = made.allowed_token_ids_mask
    if mask is not None:
        allowed = p.allowed_token_ids or range(VOCAB)
        assert set((~mask[row]).nonzero().flatten().tolist()) == set(allowed)
    stops = set(p.stop_token_ids)
    wanted = (p.min_tokens, stops) if p.min_tokens and stops else None
    assert made.min_tokens.get(row) == wanted
    if made.prompt_token_ids is not None:
        n = len(state.prompt_token_ids)
        assert made.prompt_token_ids[row, :n].tolist() == state.prompt_token_ids
        assert (made.prompt_token_ids[row, n:] == VOCAB).all()


@pytest.mark.parametrize("size", [1, 2, 32, 64])
def test_random_batch_after_removal_and_condense(size):
    rng = random.Random(size)
    batch, states = new_batch(size), {}
    for i in range(size):
        states[str(i)] = random_state(str(i), rng)
        assert batch.add_request(states[str(i)]) == i
    gone = rng.sample(sorted(states), rng.randrange(0, size + 1))
    for req_id in gone: batch.remove_request(req_id); del states[req_id]
    for i in range(len(gone) // 2):   # some holes are filled again
        req_id = f"new{i}"
        states[req_id] = random_state(req_id, rng)
        batch.add_request(states[req_id])
    batch.condense()
    check_against_fresh(batch, states)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_history(seed):
    "Adds, removals, tokens and blocks in any order; the batch is right after each step."
    rng, batch, states, waiting = random.Random(seed), new_batch(6), {}, {}
    for step in range(12):
        for req_id in list(batch.req_id_to_index):
            if rng.random() < 0.3:
                batch.remove_request(req_id)
                state = states.pop(req_id)
                if rng.random() < 0.5: waiting[req_id] = state   # comes back later
        while batch.num_reqs < 6 and rng.random() < 0.6:
            if waiting and rng.random() < 0.5: req_id, state = waiting.popitem()
            else: req_id = f"{step}-{rng.random()}"; state = random_state(req_id, rng)
            states[req_id] = state
            batch.add_request(state)
        batch.condense()
        for req_id, row in batch.req_id_to_index.items():
            state = states[req_id]
            if state.num_tokens < MAX_LEN:
                state.output_token_ids.append(7)
                batch.tokens.append(row, [7])
            if len(state.block_ids) < BLOCKS and rng.random() < 0.5:
                state.block_ids.append(1000 + step)
                batch.block_table.append_row([1000 + step], row)
        check_against_fresh(batch, states)


def greedy(req_id, prompt=(1, 2, 3), **kw):
    kw.setdefault("temperature", 0)
    return CachedRequestState(req_id, list(prompt), SamplingParams(**kw), [0], 0)


def test_metadata_is_the_same_object_until_the_batch_changes():
    batch = new_batch()
    state = greedy("a")
    batch.add_request(state)
    first = batch.sampling_metadata()
    state.output_token_ids.append(5)
    batch.tokens.append(0, [5])
    batch.block_table.append_row([9], 0)
    assert batch.sampling_metadata() is first and batch.num_metadata_rebuilds == 1
    assert first.output_token_ids == [[5]]   # a live list
    batch.add_request(greedy("b"))
    assert batch.sampling_metadata() is not first and batch.num_metadata_rebuilds == 2
    batch.remove_request("nobody")
    batch.condense()
    assert batch.num_metadata_rebuilds == 2 and batch.sampling_metadata() is batch.sampling_metadata()


def test_smallest_hole_is_filled_first():
    batch = new_batch()
    for name in "abcde": batch.add_request(greedy(name))
    for name in "dbe": batch.remove_request(name)
    assert batch.add_request(greedy("f")) == 1
    batch.condense()
    assert batch.req_ids == ["a", "f", "c"]
    for name in "afc": batch.remove_request(name)
    batch.condense()
    assert batch.req_ids == [] and batch.add_request(greedy("g")) == 0


def test_stale_logit_bias_does_not_reach_the_next_request():
    "V073 2.17: condense left the moved row's bias in the vacated row."
    batch = new_batch()
    batch.add_request(greedy("a"))
    batch.add_request(greedy("b", logit_bias={5: 100.0}))
    batch.remove_request("a")
    batch.condense()               # b moves from row 1 to row 0
    batch.add_request(greedy("c")) # c gets row 1
    assert batch.sampling_metadata().logit_bias == [{5: 100.0}, None]


def test_condense_moves_the_whole_prompt_of_a_chunked_request():
    "V073 2.16: only the tokens up to the chunk's end were moved."
    batch = new_batch()
    batch.add_request(greedy("a"))
    long = list(range(30))
    batch.add_request(greedy("b", long, repetition_penalty=1.5))
    batch.tokens.num_computed_tokens[1] = 8     # a first chunk was computed
    batch.remove_request("a")
    batch.condense()
    assert batch.tokens.token_ids[0, :30].tolist() == long
    assert batch.sampling_metadata().prompt_token_ids.tolist() == [long]


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 9_999_999])
def test_field_vllm_metal_646_top_k_off_is_the_vocabulary(top_k):
    "A greedy or unlimited row beside one with top-k; -1 was an index out of range."
    batch = new_batch()
    batch.add_request(greedy("a"))
    batch.add_request(greedy("b", temperature=1, top_k=top_k))
    assert batch.sampling_metadata().top_k is None   # off in all rows
    batch.add_request(greedy("c", temperature=1, top_k=3))
    assert batch.sampling_metadata().top_k.tolist() == [VOCAB, VOCAB, 3]


def test_block_table_add_row_with_no_blocks_forgets_the_old_ones():
    table = BlockTable(4, BLOCKS)
    table.add_row([3, 4], 2)
    table.add_row([], 2)
    assert table.row(2).tolist() == []
    table.append_row([8], 2)
    assert table.row(2).tolist() == [8]


def test_generators_and_min_tokens_move_with_the_row():
    batch, generator = new_batch(), torch.Generator()
    batch.add_request(greedy("a"))
    state = greedy("b", temperature=1, seed=3, min_tokens=4, stop_token_ids=[9])
    state.generator = generator
    batch.add_request(state)
    batch.remove_request("a")
    batch.condense()
    made = batch.sampling_metadata()
    assert made.generators == {0: generator} and made.min_tokens == {0: (4, {9})}


def test_field_vllm_5849_32163_min_tokens_masks_every_end_token():
    batch = new_batch()
    state = greedy("a", min_tokens=5, stop_token_ids=[9])
    state.sampling_params.eos_token_ids = [2, 3, VOCAB + 7]   # the last can not come
    batch.add_request(state)
    assert batch.sampling_metadata().min_tokens == {0: (5, {2, 3, 9})}


def test_drafts_replace_drafts():
    batch = new_batch()
    batch.add_request(greedy("a", [4, 5, 6]))
    batch.tokens.set_drafts(0, [77, 78, 79])
    batch.tokens.set_drafts(0, [80])
    assert batch.tokens.num_tokens[0] == 4 and batch.tokens.num_tokens_no_spec[0] == 3
    batch.tokens.append(0, [81, 82])
    assert batch.tokens.token_ids[0, :5].tolist() == [4, 5, 6, 81, 82] and batch.tokens.num_tokens[0] == 5


def test_limits_are_named():
    batch = new_batch(1)
    batch.add_request(greedy("a"))
    with pytest.raises(ValueError, match="a has row 0"): batch.add_request(greedy("a"))
    with pytest.raises(ValueError, match="all 1 are taken"): batch.add_request(greedy("b"))
    with pytest.raises(ValueError, match=f"at most {MAX_LEN + 1} fit"): batch.tokens.append(0, [1] * MAX_LEN)
    with pytest.raises(IndexError, match=f"at most {BLOCKS}"): batch.block_table.append_row([1] * BLOCKS, 0)


def test_a_greedy_request_uses_no_number():
    numbers = sampling_numbers(SamplingParams(temperature=0, top_p=0.3, top_k=7), VOCAB)
    assert numbers == new_batch().sampling.off


def test_field_vllm_1486_slots_equal_the_loop_and_are_wide():
    rng = np.random.default_rng(0)
    table = rng.permutation(200).reshape(4, 50).astype(np.int32)
    rows, positions = rng.integers(0, 4, 99), rng.integers(0, 400, 99)
    slots = compute_slot_mapping(table, rows, positions, 8)
    assert slots.tolist() == [int(table[r, p // 8]) * 8 + p % 8 for r, p in zip(rows, positions)]
    wide = compute_slot_mapping(np.array([[2**28]], np.int32), np.array([0]), np.array([15]), 16)
    assert wide.dtype == np.int64 and wide[0] == 2**32 + 15


def test_pad_prompts():
    ids = np.array([[1, 2, 3, 9], [4, 9, 9, 9]], np.int32)
    assert pad_prompts(ids, np.array([3, 1]), 50).tolist() == [[1, 2, 3], [4, 50, 50]]
