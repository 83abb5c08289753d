"""The V1 sampler: rows never influence each other, and each gets its due."""
import math
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minengine import logits as L
from minengine.sampling_params import SamplingParams
from minengine.v1.messages import LogprobsLists
from minengine.v1.sampler import Sampler, logprobs_to_lists

VOCAB = 131   # no multiple of a vector's width
quick = settings(max_examples=20, deadline=None, derandomize=True)


def generator(seed): return torch.Generator().manual_seed(seed)


def randn(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=generator(seed)) * 3


def metadata(params, prompts=None, outputs=None, vocab=VOCAB):
    n = len(params)
    own = {row: generator(p.seed) for row, p in enumerate(params) if p.seed is not None}
    return L.SamplingMetadata.from_params(
        params, prompts or [[]] * n, outputs or [[] for _ in range(n)], vocab, own)


def sample(logits, params, prompts=None, outputs=None, sampler=None):
    m = metadata(params, prompts, outputs, logits.shape[1])
    return (sampler or Sampler())(logits.clone(), m)


# --- rows never influence each other ---------------------------------------

rows_of_any_kind = st.lists(st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 129, 10**7]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
    logprobs=st.sampled_from([None, 0, 3, 9]),
    logit_bias=st.sampled_from([None, {3: 4.0}]),
    allowed_token_ids=st.sampled_from([None, list(range(0, VOCAB, 2))]),
    bad_words_token_ids=st.sampled_from([None, [[4], [7, 8]]]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([[], [2, 6]]),
    seed=st.integers(0, 10**6),
    poison=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
), min_size=1, max_size=5)


def make_rows(specs):
    params, logits = [], []
    for i, spec in enumerate(specs):
        spec = dict(spec)
        poison = spec.pop("poison")
        row = randn(1, seed=spec["seed"])[0]
        if poison is not None: row[i::3] = poison
        logits.append(row)
        params.append(SamplingParams(**spec))
    return params, torch.stack(logits)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@quick
@given(rows_of_any_kind, st.integers(0, 1000))
def test_a_row_is_the_same_alone_and_in_any_batch(mode, specs, seed):
    params, logits = make_rows(specs)
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(9))] for _ in params]
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(6))] for _ in params]
    order = rng.sample(range(len(params)), len(params))
    pick = lambda rows: (logits[rows], [params[r] for r in rows],
                         [prompts[r] for r in rows], [outputs[r] for r in rows])
    batch = sample(*pick(order), Sampler(mode))
    for place, row in enumerate(order):
        alone = sample(*pick([row]), Sampler(mode))
        assert torch.equal(alone.sampled_token_ids[0], batch.sampled_token_ids[place])
        k = params[row].logprobs
        if k is None or logits[row].softmax(-1).isnan().any(): continue   # all NaN
        for one, many in zip(alone.logprobs_tensors[:2], batch.logprobs_tensors[:2]):
            assert torch.equal(one[0, :1 + k], many[place, :1 + k])
        assert alone.logprobs_tensors[2][0] == batch.logprobs_tensors[2][place]


@quick
@given(rows_of_any_kind)
def test_the_rules_are_bit_identical_alone_and_in_a_batch(specs):
    params, logits = make_rows(specs)
    ids = [[5, 5, 9]] * len(params)
    many = logits.clone()
    sampler = Sampler("processed_logprobs")   # leaves the cut logits behind
    sampler(many, metadata(params, ids, ids))
    for row, p in enumerate(params):
        one = logits[row:row + 1].clone()
        sampler(one, metadata([p], ids[:1], ids[:1]))
        assert one[0].isclose(many[row], rtol=0, atol=0, equal_nan=True).all()


def test_two_threads_change_nothing():
    # A float sum of one long row is split between threads, a batch's is not.
    params = [SamplingParams(temperature=1.1, top_p=0.9, min_p=0.001, seed=r, logprobs=2) for r in range(3)]
    logits, before = randn(3, vocab=49_157), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        batch = sample(logits, params)
        for row in range(3):
            alone = sample(logits[row:row + 1], params[row:row + 1])
            assert torch.equal(alone.sampled_token_ids[0], batch.sampled_token_ids[row])
            for one, many in zip(alone.logprobs_tensors, batch.logprobs_tensors):
                assert torch.equal(one[0], many[row])
    finally: torch.set_num_threads(before)


def test_vllm_5639_the_order_of_requests_does_not_matter():
    a = SamplingParams(temperature=0, repetition_penalty=2.0)
    b = SamplingParams(seed=99, top_k=1)
    logits, prompts = randn(2), [[1, 2, 3], [4]]
    ab = sample(logits, [a, b], prompts).sampled_token_ids
    ba = sample(logits.flip(0), [b, a], prompts[::-1]).sampled_token_ids
    assert torch.equal(ab, ba.flip(0))


# --- draws and generators ---------------------------------------------------

def test_nano_vllm_249_greedy_rows_leave_the_draws_of_others_alone():
    hot, greedy = SamplingParams(temperature=0.6), SamplingParams(temperature=0)
    logits = randn(4)
    alone = sample(logits[:2], [hot, hot], sampler=Sampler(generator=generator(5)))
    mixed = sample(logits[[2, 0, 3, 1]], [greedy, hot, greedy, hot], sampler=Sampler(generator=generator(5)))
    assert torch.equal(mixed.sampled_token_ids[[1, 3]], alone.sampled_token_ids)
    assert torch.equal(mixed.sampled_token_ids[[0, 2], 0], logits[2:].argmax(-1))


def test_vllm_6719_greedy_ignores_the_cuts_and_draws_nothing():
    own, engine = generator(3), generator(4)
    before = own.get_state(), engine.get_state()
    params = [SamplingParams(temperature=0, top_p=0.9, seed=3)] * 2
    m = metadata(params)
    m.generators = {0: own, 1: own}
    logits = randn(2)
    got = Sampler(generator=engine)(logits.clone(), m)
    assert torch.equal(got.sampled_token_ids[:, 0], logits.argmax(-1))
    assert torch.equal(own.get_state(), before[0]) and torch.equal(engine.get_state(), before[1])


def test_a_seeded_row_leaves_the_engines_generator_alone():
    engine = generator(4)
    before = engine.get_state()
    sample(randn(2), [SamplingParams(seed=1)] * 2, sampler=Sampler(generator=engine))
    assert torch.equal(engine.get_state(), before)


def test_vllm_17929_the_users_global_generator_is_left_alone():
    before = torch.get_rng_state()
    sample(randn(3), [SamplingParams(), SamplingParams(seed=1), SamplingParams(temperature=0)])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_gives_the_same_tokens_wherever_its_row_moves():
    params, logits = SamplingParams(seed=11, temperature=1.2), randn(6)
    own, alone = generator(11), []
    for step in range(6):
        m = metadata([params]); m.generators = {0: own}
        alone.append(Sampler()(logits[step:step + 1].clone(), m).sampled_token_ids.item())
    own, moved = generator(11), []
    for step in range(6):   # another row each time, beside others
        row = step % 3
        m = metadata([SamplingParams()] * row + [params] + [SamplingParams(temperature=0)])
        m.generators = {row: own}
        batch = randn(row + 2, seed=50 + step)
        batch[row] = logits[step]
        moved.append(Sampler()(batch, m).sampled_token_ids[row].item())
    assert moved == alone


def test_two_samplers_agree_step_by_step():
    # Two workers with the same seed need not talk to each other.
    first, second = Sampler(generator=generator(0)), Sampler(generator=generator(0))
    for step in range(3):
        got = [sample(randn(4, step), [SamplingParams()] * 4, sampler=s).sampled_token_ids for s in (first, second)]
        assert torch.equal(*got)


# --- order, rules, errors ---------------------------------------------------

def test_vllm_metal_646_a_greedy_row_beside_top_k():
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=64, top_p=0.95),
              SamplingParams(top_k=9_999_999)]
    assert sample(randn(3, vocab=128), params).sampled_token_ids.shape == (3, 1)


def test_a_logit_that_towers_wins_for_random_rows():
    logits = torch.full((5, VOCAB), 0.01)
    logits[range(5), [3, 1, 4, 1, 5]] = 100
    got = sample(logits, [SamplingParams(temperature=0.8)] * 5)
    assert got.sampled_token_ids.tolist() == [[3], [1], [4], [1], [5]]


def test_vllm_5849_no_stop_token_before_min_tokens():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    params.eos_token_ids = [4, 5]
    logits = torch.zeros(1, 10)
    logits[0, 3:6] = torch.tensor([9.0, 8, 7])
    logits[0, 0] = 1
    assert sample(logits, [params], outputs=[[0]]).sampled_token_ids.item() == 0
    assert sample(logits, [params], outputs=[[0, 0]]).sampled_token_ids.item() == 3


def test_bias_and_penalties_hold_for_greedy_rows():
    logits = torch.tensor([[3.0, 2, 1, 0]])
    greedy = lambda **kw: sample(logits, [SamplingParams(temperature=0, **kw)], [[0]], [[0]]).sampled_token_ids.item()
    assert greedy() == 0
    assert greedy(repetition_penalty=2.0) == 1
    assert greedy(presence_penalty=1.5) == 1
    assert greedy(frequency_penalty=1.5) == 1
    assert greedy(logit_bias={3: 5.0}) == 3
    assert greedy(allowed_token_ids=[2, 3]) == 2
    assert greedy(bad_words_token_ids=[[0, 0], [1]]) == 2


def test_output_lists_are_read_anew_each_step():
    output, params = [], SamplingParams(temperature=0, presence_penalty=2.0)
    m = metadata([params], outputs=[output])
    logits = torch.tensor([[3.0, 2, 0]])
    tokens = []
    for _ in range(3):
        tokens.append(Sampler()(logits.clone(), m).sampled_token_ids.item())
        output.append(tokens[-1])
    assert tokens == [0, 1, 0]


def test_metadata_of_another_batch_is_an_error():
    with pytest.raises(ValueError, match="2 rows of logits, 3 of temperature"):
        Sampler()(randn(2), metadata([SamplingParams()] * 3))
    with pytest.raises(ValueError, match="logprobs_mode"): Sampler("cooked")


def test_a_greedy_batch_costs_one_argmax(monkeypatch):
    import minengine.v1.sampler as module
    calls = []
    for name in dir(module):
        if name.startswith(("apply_", "sample_", "compute_", "gather_")):
            monkeypatch.setattr(module, name, lambda *a, name=name, f=getattr(module, name): calls.append(name) or f(*a))
    sample(randn(3), [SamplingParams(temperature=0)] * 3)
    assert calls == ["apply_rules", "sample_greedy"]


# --- log-probabilities ------------------------------------------------------

def test_vllm_9453_raw_logprobs_are_the_models_own():
    logits = randn(2)
    params = SamplingParams(temperature=0.6, top_k=3, seed=1, logprobs=2, repetition_penalty=1.5)
    got = sample(logits, [params] * 2, [[1], [2]])
    want = logits.log_softmax(-1)
    ids = got.logprobs_tensors.logprob_token_ids
    assert torch.equal(got.logprobs_tensors.logprobs, want.gather(1, ids))
    assert torch.equal(ids[:, 0], got.sampled_token_ids[:, 0])


@pytest.mark.parametrize("mixed", [False, True])
def test_processed_logprobs_are_those_that_were_drawn_from(mixed):
    logits = torch.tensor([[2.0, 1, 0, -1]] * 2)
    hot = SamplingParams(temperature=0.5, top_k=2, seed=1, logprobs=4)
    params = [SamplingParams(temperature=0, logprobs=4) if mixed else hot, hot]
    tensors = sample(logits, params, sampler=Sampler("processed_logprobs")).logprobs_tensors
    values = dict(zip(tensors.logprob_token_ids[1].tolist(), tensors.logprobs[1].tolist()))
    z = math.log(math.exp(4) + math.exp(2))
    assert [values[t] for t in range(4)] == pytest.approx([4 - z, 2 - z, -math.inf, -math.inf])
    if mixed: assert tensors.logprobs[0, 0].item() == pytest.approx(logits[0].log_softmax(-1)[0].item())


def test_logprobs_are_left_out_where_nobody_asks():
    assert sample(randn(2), [SamplingParams()] * 2).logprobs_tensors is None
    got = sample(randn(2), [SamplingParams(temperature=0, logprobs=0), SamplingParams()]).logprobs_tensors
    assert got.logprobs.shape == (2, 1)


def test_lists_hold_plain_numbers():
    lists = logprobs_to_lists(sample(randn(2), [SamplingParams(temperature=0, logprobs=2)] * 2).logprobs_tensors)
    assert isinstance(lists, LogprobsLists)
    assert [len(x) for x in lists] == [2, 2, 2]
    assert type(lists.logprob_token_ids[0][0]) is int and type(lists.logprobs[0][0]) is float
    assert lists.sampled_token_ranks == [1, 1]
    assert lists.slice(1, 2).logprob_token_ids == lists.logprob_token_ids[1:]
