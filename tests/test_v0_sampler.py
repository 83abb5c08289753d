"""V0's sampler: whose row is whose, V0's order, processed log-probabilities, Python functions, seeds.

Tests named `test_field_…` are rows of the field reports.
"""
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minengine.logits import SamplingMetadata as RowMetadata
from minengine.sampling_params import SamplingParams
from minengine.v0.sampler import (
    Sampler, SamplingTensors, build_sampler_output, make_logprob_dict, process_logits)
from minengine.v0.sampling_metadata import (
    apply_logits_processors, make_logits_processors, num_samples_of, prepare_sampling, seeded_generators, takes_prompt)
from minengine.v0.sequence import SequenceData, SequenceGroupMetadata
from minengine.v1.sampler import Sampler as SamplerV1

VOCAB = 40


def tell(name, prompt=(1, 2), outputs=((3,),), seq_ids=None, is_prompt=False, do_sample=True, **params):
    seq_ids = seq_ids or range(len(outputs))
    data = {i: SequenceData(list(prompt), list(out)) for i, out in zip(seq_ids, outputs)}
    for index, one in enumerate(data.values()): one.index = index
    return SequenceGroupMetadata(name, is_prompt, data, SamplingParams(**params), {}, do_sample=do_sample)


def prompt(name, tokens=(1, 2, 3), **params): return tell(name, tokens, [[]], is_prompt=True, **params)


def prepare(*told, lens=None, store=None):
    lens = lens or [1] * sum(len(one.seq_data) for one in told)
    return prepare_sampling(list(told), lens, {} if store is None else store, {})


def logits_of(rows, seed=0): return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits, *told, generator=None, store=None, lens=None):
    metadata = prepare(*told, store=store, lens=lens)
    apply_logits_processors(logits := logits.clone(), metadata)
    sampled = Sampler(generator or torch.Generator().manual_seed(0))(logits, metadata)
    return build_sampler_output(sampled, metadata, {})


def tokens(output): return [[s.output_token for s in one.samples] for one in output.outputs]


# --- rows and draws ------------------------------------------------------------

def test_rows_draws_and_kinds_of_a_mixed_step():
    told = [tell("chunk", [1] * 9, [[]], is_prompt=True, do_sample=False), prompt("three", n=3, seed=7),
            tell("again", [1] * 4, [[9, 9]], is_prompt=True), tell("two", outputs=[[1], [2]], n=2), tell("greedy", temperature=0)]
    metadata = prepare(*told, lens=[4, 3, 6, 1, 1, 1])
    assert metadata.selected_token_indices == [6, 12, 13, 14, 15]
    assert metadata.sample_rows == [0, 0, 0, 1, 2, 3, 4] and metadata.first_draws() == [0, 3, 4, 5, 6]
    assert {k.name: v for k, v in metadata.categories.items()} == {
        "RANDOM_SEED": [0, 1, 2], "RANDOM": [3, 4, 5], "GREEDY": [6]}
    output = sample(logits_of(5), *told, lens=[4, 3, 6, 1, 1, 1])
    assert [[s.parent_seq_id for s in one.samples] for one in output.outputs] == [[], [0, 0, 0], [0], [0, 1], [0]]


@pytest.mark.parametrize("told, num", [
    (prompt("a"), 1), (prompt("a", n=4), 4), (prompt("a", n=2, best_of=5), 5),
    (tell("a", [1], [[]], is_prompt=True, do_sample=False, n=4), 0),
    (tell("a", outputs=[[5]], is_prompt=True, n=4), 1),   # recomputed after output: its siblings exist
    (tell("a", outputs=[[5], [6]], n=4), 1)])
def test_number_of_samples(told, num): assert num_samples_of(told) == num


def test_nothing_to_sample_gives_an_entry_for_each_group():
    metadata = prepare(*[tell(str(i), [1] * 4, [[]], is_prompt=True, do_sample=False) for i in range(2)], lens=[2, 2])
    assert metadata.sample_rows == [] and metadata.categories == {}
    output = build_sampler_output(None, metadata, {"1": [{5: None}]})
    assert [one.samples for one in output.outputs] == [[], []]
    assert [one.prompt_logprobs for one in output.outputs] == [None, [{5: None}]]


# --- drawing -----------------------------------------------------------------------

def test_v073_1_13_all_greedy_is_argmax():
    logits = logits_of(6)
    output = sample(logits, *[tell(str(i), temperature=0) for i in range(6)])
    assert tokens(output) == [[int(t)] for t in logits.argmax(-1)]


def test_v073_1_13_a_dominating_logit_wins_in_every_kind():
    logits = torch.full((6, VOCAB), 0.01)
    for row in range(6): logits[row, row + 3] = 100.0
    kinds = [dict(temperature=0), dict(), dict(seed=5), dict(temperature=0), dict(seed=5, top_p=0.5), dict(top_k=3)]
    output = sample(logits, *[prompt(str(i), **kind) for i, kind in enumerate(kinds)])
    assert tokens(output) == [[i + 3] for i in range(6)]


def test_v073_1_13_seeded_twice_is_equal_and_the_global_generator_is_left_alone():
    "Field: vllm#17929, vllm#11953."
    torch.manual_seed(3)
    state, logits = torch.get_rng_state(), logits_of(4)
    runs = [tokens(sample(logits, *[prompt(str(i), seed=i) for i in range(4)])) for _ in range(2)]
    assert runs[0] == runs[1] and torch.equal(torch.get_rng_state(), state)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 5))
def test_field_vllm_5639_rows_do_not_depend_on_their_company(order, keep):
    "Greedy and seeded rows, penalties of different lengths, in any order and in part."
    params = [dict(temperature=0, repetition_penalty=2.0), dict(seed=99, top_k=1), dict(seed=3, presence_penalty=1.5),
              dict(temperature=0), dict(seed=8, top_p=0.7, min_p=0.1), dict(temperature=0, logit_bias={5: 3.0}, min_tokens=3, stop_token_ids=[7])]
    told = [tell(str(i), [i + 1] * (2 + 5 * i), [[i, i + 7]], is_prompt=True, **p) for i, p in enumerate(params)]
    logits, alone = logits_of(6), {}
    for i, one in enumerate(told): alone[i] = tokens(sample(logits[i:i + 1], one))[0]
    chosen = order[:keep + 1]
    together = sample(logits[list(chosen)], *[told[i] for i in chosen])
    assert tokens(together) == [alone[i] for i in chosen]


def test_same_draws_as_v1_for_seeded_rows():
    "One arithmetic, two wings: with temperature, top-k and top-p the orders agree."
    params = [dict(seed=1), dict(seed=2, temperature=0.5), dict(seed=3, top_k=5), dict(seed=4, top_p=0.6, top_k=9), dict(temperature=0)]
    logits = logits_of(5)
    v0 = tokens(sample(logits, *[prompt(str(i), **p) for i, p in enumerate(params)]))
    rows = [SamplingParams(**p) for p in params]
    generators = {i: torch.Generator().manual_seed(p.seed) for i, p in enumerate(rows) if p.seed is not None}
    metadata = RowMetadata.from_params(rows, [[1, 2, 3]] * 5, [[]] * 5, VOCAB, generators)
    v1 = SamplerV1(generator=torch.Generator().manual_seed(0))(logits.clone(), metadata)
    assert v0 == v1.sampled_token_ids.tolist()


def test_greedy_rows_draw_no_numbers():
    "Field: vllm#6719, nano-vllm#249."
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    sample(logits_of(2), tell("a", temperature=0, top_p=0.9), tell("b", seed=1, is_prompt=True), generator=generator)
    assert torch.equal(generator.get_state(), state)


# --- seeds ---------------------------------------------------------------------------

def test_field_vllm_11898_answer_i_has_the_seed_plus_i():
    logits, store = logits_of(1), {}
    output = sample(logits, prompt("a", n=4, seed=7), store=store)
    assert [g.initial_seed() for g in store["a"].values()] == [7, 8, 9, 10]
    assert tokens(output)[0] == [tokens(sample(logits, prompt("b", seed=7 + i)))[0][0] for i in range(4)]
    # And so it goes on, when the first of the four has ended.
    decode = tell("a", outputs=[[1], [2], [3]], n=4, seed=7)
    for index, data in enumerate(decode.seq_data.values(), 1): data.index = index
    later = tokens(sample(logits_of(3, 5), decode, store=store))
    for i in range(3):
        own = {}
        sample(logits, prompt("b", seed=8 + i), store=own)
        alone = tell("b", outputs=[[9]], seed=8 + i)
        assert tokens(sample(logits_of(3, 5)[i:i + 1], alone, store=own)) == [[later[0][i]]]


def test_a_chunk_makes_and_moves_no_generator():
    store = {}
    chunk = tell("a", [1] * 9, [[]], is_prompt=True, do_sample=False, seed=3)
    assert prepare(chunk, lens=[4], store=store).generators() == [] and store == {}


def test_v073_1_13_seeded_stream_restarts_at_a_new_prefill():
    "V0's documented failure: outputs with a seed change under recompute."
    store, logits = {}, logits_of(1)
    first = tokens(sample(logits, prompt("a", seed=5), store=store))
    second = tokens(sample(logits, tell("a", outputs=[first[0]], seed=5), store=store))
    again = tokens(sample(logits, tell("a", outputs=[first[0]], seed=5, is_prompt=True), store=store))
    assert again == first and store["a"][0].initial_seed() == 5
    assert second != first   # what V1 would have drawn


def test_a_decode_without_a_prompt_is_an_error():
    with pytest.raises(ValueError, match="request a decodes, but its prompt was never seen"): sample(logits_of(1), tell("a", seed=3))


def test_the_largest_seed_has_answers_too():
    seeds = [g.initial_seed() for g in seeded_generators(prompt("a", n=3, seed=2**63 - 1), 3, {}, "cpu")]
    assert len(set(seeds)) == 3


# --- processing ------------------------------------------------------------------------

def processed(logits, *told):
    metadata = prepare(*told)
    return process_logits(logits.clone(), metadata, SamplingTensors.from_sampling_metadata(metadata, VOCAB))


@pytest.mark.parametrize("params", [
    dict(temperature=0.7), dict(top_k=5), dict(top_p=0.6), dict(min_p=0.2), dict(temperature=1.5, top_k=9, top_p=0.8, min_p=0.3),
    dict(top_k=1, top_p=0.1), dict(top_k=9999999)], ids=str)
def test_v073_1_13_cuts_equal_the_warpers_in_v0s_order(params):
    logits = logits_of(8)
    found = processed(logits, *[tell(str(i), **params) for i in range(8)])
    p = SamplingParams(**params)
    expected = TemperatureLogitsWarper(p.temperature)(None, logits.clone()) if p.temperature != 1 else logits.clone()
    if p.top_k > 0: expected = TopKLogitsWarper(min(p.top_k, VOCAB))(None, expected)
    if p.top_p < 1: expected = TopPLogitsWarper(p.top_p)(None, expected)
    if p.min_p > 0: expected = MinPLogitsWarper(p.min_p)(None, expected)
    torch.testing.assert_close(found, expected)


def test_field_sendnn_542_a_greedy_row_beside_top_k_and_a_top_k_past_the_vocabulary():
    logits = logits_of(3)
    found = processed(logits, tell("a", temperature=0), tell("b", top_k=4, top_p=0.95), tell("c", top_k=9999999))
    assert torch.equal(found[0], logits[0]) and torch.equal(found[2], logits[2])
    assert int((found[1] > float("-inf")).sum()) <= 4


def test_field_nano_vllm_260_the_token_that_crosses_p_is_kept():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, :4] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert (processed(logits, tell("a", top_p=0.6))[0] > float("-inf")).nonzero().flatten().tolist() == [2, 3]


@pytest.mark.parametrize("output, forbidden", [([], True), ([1], True), ([1, 2], False)])
def test_v073_1_13_min_tokens_masks_exactly_the_stop_ids(output, forbidden):
    params = dict(min_tokens=2, stop_token_ids=[5, 9], temperature=0)
    told = tell("a", [1], [output], **params)
    told.sampling_params.eos_token_ids = [7]
    found = processed(torch.zeros(2, VOCAB), told, tell("b", temperature=0))
    assert torch.isinf(found[0]).nonzero().flatten().tolist() == ([5, 7, 9] if forbidden else [])
    assert torch.isfinite(found[1]).all()   # the neighbour


def test_penalties_equal_a_loop():
    rng, logits = random.Random(0), logits_of(5)
    params = [dict(presence_penalty=0.5), dict(frequency_penalty=0.7), dict(repetition_penalty=1.7), dict(), dict(repetition_penalty=0.5, frequency_penalty=-0.3)]
    told = [tell(str(i), [rng.randrange(VOCAB) for _ in range(3 + 4 * i)], [[rng.randrange(VOCAB) for _ in range(6)]], **p)
            for i, p in enumerate(params)]
    expected = logits.clone()
    for row, one in enumerate(told):
        p, data = one.sampling_params, one.seq_data[0]
        for t in range(VOCAB):
            x, count = expected[row, t], data.output_token_ids.count(t)
            if count or t in data.prompt_token_ids: x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
            expected[row, t] = x - p.frequency_penalty * count - p.presence_penalty * (count > 0)
    torch.testing.assert_close(processed(logits, *told), expected)


def test_field_vllm_1424_prompt_tokens_count_in_the_repetition_penalty_only():
    logits = torch.ones(2, VOCAB)
    found = processed(logits, tell("a", [4], [[]], repetition_penalty=2.0), tell("b", [4], [[]], presence_penalty=2.0))
    assert found[0, 4] == 0.5 and torch.equal(found[1], logits[1])


def test_no_tensors_for_what_nobody_wants():
    plain = SamplingTensors.from_sampling_metadata(prepare(tell("a"), tell("b", temperature=0)), VOCAB)
    assert (plain.top_ks, plain.top_ps, plain.min_ps, plain.prompt_tokens) == (None,) * 4
    one = SamplingTensors.from_sampling_metadata(prepare(tell("a", top_k=3), tell("b", frequency_penalty=1.0)), VOCAB)
    assert one.top_ks.tolist() == [3, VOCAB] and one.prompt_tokens.shape == (2, 2)   # all rows pay for one


def test_tensors_are_made_anew_in_every_step():
    metadata = [prepare(tell("a", top_k=3)) for _ in range(2)]
    made = [SamplingTensors.from_sampling_metadata(m, VOCAB) for m in metadata]
    assert made[0].top_ks is not made[1].top_ks and metadata[0].seq_groups[0] is not metadata[1].seq_groups[0]


# --- functions ------------------------------------------------------------------------------

def test_both_forms_of_functions_and_their_arguments():
    seen = []
    def two(output_ids, logits): seen.append(("two", output_ids)); return logits
    def three(prompt_ids, output_ids, logits): seen.append(("three", prompt_ids, output_ids)); return logits
    sample(logits_of(2), tell("a", [4, 5], [[6], [7, 8]], logits_processors=[two, three]))
    assert seen == [("two", [6]), ("three", [4, 5], [6]), ("two", [7, 8]), ("three", [4, 5], [7, 8])]
    class Object:
        def __call__(self, output_ids, logits): return logits
        def method(self, prompt_ids, output_ids, logits): return logits
    assert [takes_prompt(f) for f in (Object(), Object().method, max, lambda o, x, *, scale=1: x)] == [False, True, False, False]


def test_the_ids_are_the_functions_own():
    "A function that empties its argument harms nobody."
    told = tell("a", [4, 5], [[6]], logits_processors=[lambda p, o, x: (p.clear(), o.clear(), x)[-1]])
    sample(logits_of(1), told)
    assert told.seq_data[0].get_token_ids() == [4, 5, 6] and told.seq_data[0].output_token_ids == [6]


def test_the_users_functions_come_first_and_promises_last():
    def force(output_ids, logits):   # what it wants is forbidden
        logits[:] = 0.0
        logits[9] = 50.0
        return logits
    told = tell("a", logits_processors=[force], allowed_token_ids=[3, 4, 9], logit_bias={4: 5.0}, bad_words_token_ids=[[3, 9], [8]], temperature=0)
    assert len(make_logits_processors(told.sampling_params)) == 4
    assert tokens(sample(logits_of(1), told)) == [[4]]


def test_a_new_tensor_or_the_same_one_may_come_back():
    new = tell("a", logits_processors=[lambda o, x: torch.where(torch.arange(VOCAB) == 7, 9.0, -9.0)], temperature=0)
    def in_place(output_ids, logits): logits[7] = 99.0; return logits
    assert tokens(sample(logits_of(2), new, tell("b", logits_processors=[in_place], temperature=0))) == [[7], [7]]


@pytest.mark.parametrize("function, words", [
    (lambda o, x: None, "returned None, not a row of logits"), (lambda o, x: x[:3], "not a row"), (lambda o, x: 1 / 0, "ZeroDivisionError")])
def test_a_bad_function_is_reported_with_its_request(function, words):
    with pytest.raises(RuntimeError, match=f"(?s)request the-bad-one: .*{words}"):
        sample(logits_of(1), tell("the-bad-one", logits_processors=[function]))


def test_bias_allowed_ids_and_bad_words_equal_the_batched_way():
    params = [dict(logit_bias={3: 2.0, 5: -1.0}), dict(allowed_token_ids=[1, 2]), dict(bad_words_token_ids=[[3, 4], [5]]), dict()]
    told = [tell(str(i), [1], [[9, 3]], **p) for i, p in enumerate(params)]
    logits = logits_of(4)
    found = apply_logits_processors(logits.clone(), prepare(*told))
    rows = RowMetadata.from_params([SamplingParams(**p) for p in params], [[1]] * 4, [[9, 3]] * 4, VOCAB)
    from minengine.v1.sampler import apply_rules
    torch.testing.assert_close(found, apply_rules(logits.clone(), rows))


def test_functions_are_not_called_for_a_chunk_and_live_as_long_as_the_request():
    calls, processors = [], {}
    def count(output_ids, logits): calls.append(1); return logits
    chunk = tell("a", [1] * 9, [[]], is_prompt=True, do_sample=False, logits_processors=[count])
    metadata = prepare_sampling([chunk], [4], {}, processors)
    apply_logits_processors(torch.zeros(0, VOCAB), metadata)
    assert calls == []
    decode = tell("a", logits_processors=[count], allowed_token_ids=[1, 2])
    prepare_sampling([decode], [1], {}, processors)
    assert len(processors["a"]) == 1    # those of the request's own prefill


# --- log-probabilities -------------------------------------------------------------------------

def test_v073_3_logprobs_are_of_the_processed_distribution():
    logits = logits_of(1)
    one = sample(logits, tell("a", temperature=0.5, top_k=3, logprobs=5))[0].samples[0]
    expected = TopKLogitsWarper(3)(None, logits / 0.5).log_softmax(-1)[0]
    for token_id, entry in one.logprobs.items(): assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
    assert sum(entry.logprob == float("-inf") for entry in one.logprobs.values()) == 2   # cut off before anybody looked


def test_v073_3_rank_is_one_more_than_the_number_of_likelier_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    told = tell("a", logprobs=0, logits_processors=[lambda o, x: x])
    metadata = prepare(told)
    ranks = []
    for seed in range(8):
        sampled = Sampler(torch.Generator().manual_seed(seed))(logits.clone(), metadata)
        ranks.append((int(sampled.token_ids[0]), int(sampled.ranks[0])))
    assert all(rank == (1 if token == 7 else 2) for token, rank in ranks) and len({r for _, r in ranks}) == 2   # ties do not count


def test_a_sum_exists_without_logprobs():
    "V0 adds them up for every sequence: best_of ranks by it."
    logits = logits_of(2)
    output = sample(logits, tell("a", temperature=0), prompt("b", n=1, best_of=3, seed=1))
    for one, row in zip(output.outputs, logits.log_softmax(-1)):
        for s in one.samples:
            assert list(s.logprobs) == [s.output_token]
            assert s.logprobs[s.output_token].logprob == pytest.approx(float(row[s.output_token]), abs=1e-5)


def test_field_vllm_44319_entries_are_by_id_and_k_or_k_plus_1():
    logits = logits_of(3)
    wide = sample(logits, tell("a", temperature=0, logprobs=4), tell("b", seed=11, is_prompt=True, logprobs=2), tell("c", logprobs=None))
    a, b, c = (one.samples[0] for one in wide.outputs)
    assert list(a.logprobs) == logits[0].topk(4).indices.tolist()       # the chosen one is among them
    assert set(b.logprobs) == {b.output_token, *logits[1].topk(2).indices.tolist()} and len(b.logprobs) in (2, 3)
    assert list(c.logprobs) == [c.output_token]                         # the widest wish of the batch is not everybody's
    assert [entry.rank for entry in a.logprobs.values()] == [1, 2, 3, 4]
    assert make_logprob_dict([5, 7, 8], [-3.0, -0.5, -1.5], 9, 2)[5].rank == 9


def test_logprobs_of_all_of_n_answers():
    logits = logits_of(1)
    output = sample(logits, prompt("a", n=5, logprobs=3))
    plain = logits.log_softmax(-1)[0]
    assert len(output[0].samples) == 5
    for s in output[0].samples:
        assert s.logprobs[s.output_token].logprob == pytest.approx(float(plain[s.output_token]), abs=1e-5)
        assert s.logprobs[s.output_token].rank == 1 + int((plain > plain[s.output_token]).sum())
