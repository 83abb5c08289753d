"""Every stage of the logits page against transformers or a plain loop."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

from minengine import logits as L
from minengine.sampling_params import SamplingParams

INF = float("inf")
quick = settings(max_examples=30, deadline=None, derandomize=True)


def randn(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_ids(rows, vocab, longest, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (rows,), generator=g).tolist()
    return [torch.randint(0, vocab, (n,), generator=g).tolist() for n in lengths]


def column(value, rows): return torch.full((rows,), float(value))


# --- penalties ------------------------------------------------------------

def plain_penalties(logits, prompts, outputs, presence, frequency, repetition):
    logits = logits.clone()
    for r, (prompt, output) in enumerate(zip(prompts, outputs)):
        for t in set(prompt) | set(output):
            x = logits[r, t]
            logits[r, t] = x / repetition[r] if x > 0 else x * repetition[r]
        for t in set(output):
            logits[r, t] -= frequency[r] * output.count(t)
            logits[r, t] -= presence[r]
    return logits


@quick
@given(st.integers(1, 6), st.integers(2, 40), st.integers(0, 30), st.integers(0, 10**6))
def test_penalties_equal_a_plain_loop(rows, vocab, longest, seed):
    prompts, outputs = random_ids(rows, vocab, longest, seed), random_ids(rows, vocab, longest, seed + 1)
    g = torch.Generator().manual_seed(seed)
    presence, frequency = (torch.rand(rows, generator=g) * 4 - 2 for _ in range(2))
    repetition = torch.rand(rows, generator=g) + 0.5
    x = randn(rows, vocab, seed)
    want = plain_penalties(x, prompts, outputs, presence, frequency, repetition)
    args = presence, frequency, repetition
    got = L.apply_penalties(x.clone(), prompts, outputs, *args)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    padded = L.pad_token_ids(prompts, vocab)
    assert torch.equal(L.apply_penalties(x.clone(), padded, outputs, *args), got)


def test_repetition_penalty_equals_transformers():
    ids = torch.tensor([[1, 2, 3, 3], [0, 0, 5, 6]])
    x, zero = randn(2, 10), torch.zeros(2)
    got = L.apply_penalties(x.clone(), ids[:, :2], ids[:, 2:].tolist(), zero, zero, column(1.7, 2))
    assert torch.equal(got, RepetitionPenaltyLogitsProcessor(1.7)(ids, x.clone()))


def test_penalties_that_are_off_change_nothing():
    x, zero = randn(3, 20), torch.zeros(3)
    ids = random_ids(3, 20, 8)
    assert torch.equal(L.apply_penalties(x.clone(), ids, ids, zero, zero, column(1, 3)), x)


def test_vllm_57719_rows_of_very_different_length_and_missing_ids():
    x, zero = randn(3, 50), torch.zeros(3)
    prompts = [list(range(50)) * 18, [7] * 300, []]   # padded with 50
    got = L.apply_penalties(x.clone(), prompts, [[], [], []], zero + 1, zero + 1, column(1.5, 3))
    want = plain_penalties(x, prompts, [[], [], []], zero + 1, zero + 1, column(1.5, 3))
    torch.testing.assert_close(got, want)
    assert torch.equal(got[2], x[2])
    none = L.apply_penalties(x.clone(), None, None, zero + 1, zero + 1, column(1.5, 3))
    assert torch.equal(none, x)


def test_vllm_metal_69_prompt_tokens_count_for_repetition_only():
    x, zero = torch.ones(1, 4), torch.zeros(1)
    prompt = [[2, 2, 2]]
    assert L.apply_penalties(x.clone(), prompt, [[]], zero + 2, zero + 2, zero + 1).tolist() == [[1, 1, 1, 1]]
    assert L.apply_penalties(x.clone(), prompt, [[]], zero, zero, zero + 2).tolist() == [[1, 1, 0.5, 1]]
    assert L.apply_penalties(x.clone(), prompt, [[3, 3]], zero + 0.25, zero + 0.5, zero + 1).tolist() == [[1, 1, 1, -0.25]]


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_a_penalised_id_outside_the_vocabulary_is_an_error(bad):
    x, zero = randn(1, 10), torch.zeros(1)
    with pytest.raises(IndexError, match=str(bad)):
        L.apply_penalties(x, [[1]], [[2, bad]], zero, zero, zero)
    if bad != 10:   # in a tensor, 10 is the padding
        with pytest.raises(IndexError, match=str(bad)):
            L.apply_penalties(x, torch.tensor([[1, bad]]), [[2]], zero, zero, zero)


def test_pad_token_ids():
    assert L.pad_token_ids([[1, 2], [], [3]], 9).tolist() == [[1, 2], [9, 9], [3, 9]]
    assert L.pad_token_ids([[], []], 9).shape == (2, 0)


# --- bias and masks -------------------------------------------------------

def test_logit_bias_hits_exactly_its_cells():
    x = torch.zeros(3, 6)
    got = L.apply_logit_bias(x, [{0: 1.5, 5: -100.0}, None, {5: 2.0}])
    want = torch.zeros(3, 6)
    want[0, 0], want[0, 5], want[2, 5] = 1.5, -100, 2
    assert torch.equal(got, want)
    x = randn(1, 6)
    hf = SequenceBiasLogitsProcessor([[[2], 4.0], [[3], -4.0]])(torch.tensor([[0]]), x.clone())
    assert torch.equal(L.apply_logit_bias(x, [{2: 4.0, 3: -4.0}]), hf)


def test_allowed_token_ids():
    mask = torch.ones(2, 5, dtype=torch.bool)
    L.forbid_all_but(mask[0], [1, 3])
    L.forbid_all_but(mask[1], None)
    got = L.apply_allowed_token_ids(torch.ones(2, 5), mask)
    assert got.tolist() == [[-INF, 1, -INF, 1, -INF], [1] * 5]
    with pytest.raises(ValueError, match=r"\(2, 5\)"):
        L.apply_allowed_token_ids(torch.ones(2, 6), mask)
    with pytest.raises(ValueError, match="empty"): L.forbid_all_but(mask[0], [])


def test_min_tokens_equals_transformers_and_masks_every_stop_id():
    # vllm#5849, vllm#32163: all EOS ids and the user's stop ids.
    x, stop_ids = randn(2, 8), {1, 4, 7}
    outputs = [[0, 0], [0, 0, 0]]
    got = L.apply_min_tokens(x.clone(), {0: (3, stop_ids), 1: (3, stop_ids)}, outputs)
    hf = MinNewTokensLengthLogitsProcessor(2, 3, sorted(stop_ids), device="cpu")
    prompt = torch.tensor([[9, 9]])
    for row in range(2):
        ids = torch.cat([prompt, torch.tensor([outputs[row]])], dim=1)
        assert torch.equal(got[row:row + 1], hf(ids, x[row:row + 1].clone()))
    assert torch.isinf(got[0]).nonzero().flatten().tolist() == [1, 4, 7]
    assert torch.equal(got[1], x[1])


def test_bad_words_equal_transformers():
    words = [[3], [1, 2], [4, 4, 5], [1, 1, 1]]
    for output in ([], [1], [4], [4, 4], [1, 1], [2, 1], [0, 4, 4], [5, 1, 1]):
        x = randn(1, 9)
        got = L.apply_bad_words(x.clone(), {0: words}, [output])
        hf = NoBadWordsLogitsProcessor(words, eos_token_id=8)
        want = hf(torch.tensor([[7, *output]]), x.clone())
        assert torch.equal(got, want), output


def test_bad_words_do_not_look_into_the_prompt_or_wrap_around():
    x = randn(2, 9)
    got = L.apply_bad_words(x.clone(), {1: [[1, 2, 3]]}, [[1, 2], [2]])
    assert torch.equal(got, x)
    with pytest.raises(ValueError, match="empty"): L.apply_bad_words(x, {0: [[]]}, [[], []])


@pytest.mark.parametrize("bad", [-1, 6, 2**33])
@pytest.mark.parametrize("stage", [
    lambda x, i: L.apply_logit_bias(x, [None, {i: 1.0}]),
    lambda x, i: L.apply_min_tokens(x, {1: (2, {i})}, [[], []]),
    lambda x, i: L.apply_bad_words(x, {1: [[i]]}, [[], []]),
    lambda x, i: L.forbid_all_but(torch.zeros(6, dtype=torch.bool), [0, i])])
def test_vllm_54195_an_id_outside_never_lands_in_a_neighbour(stage, bad):
    x = torch.zeros(2, 6)
    with pytest.raises(IndexError, match=f"{bad} is outside"): stage(x, bad)
    assert not x.any()


def test_a_row_outside_is_an_error():
    with pytest.raises(IndexError, match="row 2"):
        L.apply_logit_bias(torch.zeros(2, 6), [None, None, {0: 1.0}])


# --- temperature and cuts -------------------------------------------------

def test_temperature_equals_transformers_and_greedy_rows_are_divided_by_one():
    x = randn(3, 50)
    got = L.apply_temperature(x.clone(), torch.tensor([0.7, 0.0, 1e-6]))
    assert torch.equal(got[:1], TemperatureLogitsWarper(0.7)(None, x[:1].clone()))
    assert torch.equal(got[1:], x[1:])   # vllm#22180


@quick
@given(st.floats(0.001, 1.0), st.integers(0, 10**6))
def test_min_p_equals_transformers(min_p, seed):
    x = randn(3, 60, seed)
    want = MinPLogitsWarper(min_p)(None, x.clone())
    got = L.apply_min_p(x.clone(), torch.tensor([min_p, 0.0, min_p]))
    assert torch.equal(got[::2], want[::2]) and torch.equal(got[1], x[1])


CUTS = [L.apply_top_k_top_p, L.sort_top_k_top_p]


@pytest.mark.parametrize("cut", CUTS)
@quick
@given(st.integers(1, 400), st.integers(1, 1000), st.booleans(), st.integers(0, 10**6))
def test_top_k_equals_transformers(cut, vocab, k, rounded, seed):
    x = randn(3, vocab, seed)
    if rounded: x = x.round()   # many ties: all tokens that tie are kept
    want = TopKLogitsWarper(k)(None, x.clone())
    got = cut(x.clone(), torch.tensor([k, -1, k]), None)
    assert torch.equal(got[::2], want[::2]) and torch.equal(got[1], x[1])


def assert_same_nucleus(got, want, x, top_p):
    "Equal, but for tokens that the rounding of a sum puts on either side."
    if torch.equal(got, want): return
    for row in range(len(x)):
        if torch.equal(got[row], want[row]): continue
        total = x[row].double().softmax(-1).sort(descending=True).values.cumsum(-1)
        kept = [int((r[row] > -INF).sum()) for r in (got, want)]
        if kept[0] == kept[1]:   # of tokens that tie, transformers keeps any
            assert torch.equal(got[row].sort().values, want[row].sort().values)
            continue
        between = total[min(kept) - 1:max(kept) - 1]
        assert (between - top_p).abs().max() < 2e-6, (kept, top_p, between)


@pytest.mark.parametrize("cut", CUTS)
@quick
@given(st.integers(1, 3000), st.floats(0.01, 1.0), st.sampled_from([0.1, 1.0, 5.0]),
       st.booleans(), st.integers(0, 10**6))
def test_top_p_equals_transformers(cut, vocab, top_p, scale, rounded, seed):
    x = randn(2, vocab, seed, scale)
    if rounded: x = x.bfloat16().float()   # ties: the smallest set still
    want = x.clone() if top_p == 1.0 else TopPLogitsWarper(top_p)(None, x.clone())
    got = cut(x.clone(), None, torch.tensor([top_p, top_p]))
    assert_same_nucleus(got, want, x, top_p)


@pytest.mark.parametrize("cut", CUTS)
def test_top_k_then_top_p_equals_transformers(cut):
    x = randn(4, 500)
    k, p = [5, 40, -1, 200], [0.5, 0.9, 0.7, 1.0]
    got = cut(x.clone(), torch.tensor(k), torch.tensor(p))
    for row in range(4):
        want = x[row:row + 1].clone()
        if k[row] > 0: want = TopKLogitsWarper(k[row])(None, want)
        before = want.clone()
        if p[row] < 1: want = TopPLogitsWarper(p[row])(None, want)
        assert_same_nucleus(got[row:row + 1], want, before, p[row])


@pytest.mark.parametrize("cut", CUTS)
def test_nano_vllm_260_the_token_that_crosses_the_threshold_is_kept(cut):
    x = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    kept = lambda p: (cut(x.clone(), None, torch.tensor([p]))[0] > -INF).nonzero().flatten().tolist()
    assert kept(0.6) == [2, 3]
    assert kept(0.3) == [3] and kept(1e-9) == [3]     # at least one
    assert kept(0.95) == [0, 1, 2, 3] == kept(1.0)


@pytest.mark.parametrize("cut", CUTS)
def test_vllm_metal_646_top_k_off_or_too_large_beside_a_small_one(cut):
    x = randn(6, 128)
    got = cut(x.clone(), torch.tensor([-1, 0, 128, 9_999_999, 64, 1]), None)
    assert torch.equal(got[:4], x[:4])
    assert (got > -INF).sum(-1).tolist() == [128] * 4 + [64, 1]


@pytest.mark.parametrize("cut", CUTS)
def test_top_p_of_one_keeps_tokens_too_unlikely_to_count(cut):
    x = torch.full((2, 300), -50.0)
    x[:, 0] = 50
    got = cut(x.clone(), None, torch.tensor([1.0, 0.5]))
    assert torch.equal(got[0], x[0]) and (got[1] > -INF).sum() == 1


@pytest.mark.parametrize("cut", CUTS)
def test_of_tokens_that_tie_at_the_edge_of_the_nucleus_the_smaller_ids_stay(cut):
    x = torch.tensor([[1.0, 1, 3, 1, 1, -9]])
    kept = lambda p: (cut(x.clone(), None, torch.tensor([p]))[0] > -INF).nonzero().flatten().tolist()
    probs = x.softmax(-1)[0].tolist()
    assert kept(probs[2] + 1.5 * probs[0]) == [0, 1, 2]
    assert kept(probs[2] + 0.5 * probs[0]) == [0, 2]
    x = torch.zeros(1, 9)
    assert kept(1e-6) == [int(L.sample_greedy(x))]


def test_the_wide_nucleus_needs_every_token():
    x = torch.zeros(2, 5000)   # all alike: no short list will do
    got = L.apply_top_p(x.clone(), torch.tensor([0.5, 0.9991]))
    assert (got > -INF).sum(-1).tolist() == [2500, 4996]
    want = TopPLogitsWarper(0.5)(None, x[:1].clone())
    assert_same_nucleus(got[:1], want, x[:1], 0.5)


# --- drawing --------------------------------------------------------------

def generator(seed): return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_first_of_equals():
    x = torch.tensor([[1.0, 3, 3], [2, 2, 2], [-INF, -INF, 0]])
    assert L.sample_greedy(x).tolist() == [1, 0, 2]
    assert L.sample_greedy(x.bfloat16()).tolist() == [1, 0, 2]
    assert L.sample_greedy(x[:0]).tolist() == []


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    n = 20_000
    tokens = L.sample_random(probs.repeat(n, 1), {}, generator(0))
    counts = torch.bincount(tokens, minlength=5).double()
    assert counts[4] == 0
    expected = probs[:4].double() * n
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3   # p = 0.001


def test_nothing_forbidden_is_ever_drawn():
    x = torch.full((2000, 50), -INF)
    x[:, 7] = 0
    assert L.sample_random(x.softmax(-1), {}, generator(1)).unique().tolist() == [7]


def test_a_seeded_row_draws_the_same_alone_and_in_any_batch():
    probs = randn(5, 1001).softmax(-1)
    alone = L.sample_random(probs[3:4].clone(), {0: generator(7)}, None)
    for rows in ([3], [0, 3, 1], [4, 2, 3], [3, 3, 3]):
        at = rows.index(3)
        got = L.sample_random(probs[rows], {at: generator(7)}, generator(0))
        assert got[at] == alone[0]
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        L.sample_random(probs[:2].clone(), {0: generator(7)}, None)


def test_vllm_17929_the_users_global_generator_is_left_alone():
    before = torch.get_rng_state()
    L.sample_random(randn(3, 50).softmax(-1), {1: generator(3)}, generator(0))
    assert torch.equal(torch.get_rng_state(), before)


# --- log-probabilities ----------------------------------------------------

def test_logprobs_and_ranks_equal_a_plain_loop():
    x = randn(4, 30)
    logprobs = L.compute_logprobs(x)
    tokens = torch.tensor([3, 29, int(x[2].argmax()), int(x[3].argmin())])
    got = L.gather_logprobs(logprobs, 5, tokens)
    for row in range(4):
        z = math.log(sum(math.exp(v) for v in x[row].tolist()))
        order = sorted(range(30), key=lambda t: -x[row, t].item())
        want = [tokens[row].item(), *order[:5]]
        assert got.logprob_token_ids[row].tolist() == want
        assert got.logprobs[row].tolist() == pytest.approx([x[row, t].item() - z for t in want], abs=1e-5)
        assert got.selected_token_ranks[row] == 1 + order.index(tokens[row].item())


def test_rank_of_a_tie_in_v1_and_v0():
    logprobs = L.compute_logprobs(torch.tensor([[1.0, 2, 2, 0]]))
    rank = lambda t, **kw: L.gather_logprobs(logprobs, 0, torch.tensor([t]), **kw).selected_token_ranks.item()
    assert [rank(t) for t in range(4)] == [3, 2, 2, 4]                      # count(>=)
    assert [rank(t, count_ties=False) for t in range(4)] == [3, 1, 1, 4]    # count(>) + 1


@quick
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 10**6))
def test_the_first_k_do_not_depend_on_k(vocab, k, seed):
    # vllm#44319, and a neighbour may ask for more: ties go by id.
    x = randn(3, vocab, seed).round()
    logprobs, tokens = L.compute_logprobs(x), torch.zeros(3, dtype=torch.int64)
    got = L.gather_logprobs(logprobs, k, tokens).logprob_token_ids
    assert got.shape == (3, 1 + min(k, vocab))
    for row in range(3):
        order = sorted(range(vocab), key=lambda t: (-x[row, t].item(), t))
        assert got[row, 1:].tolist() == order[:k]


def test_zero_logprobs_means_the_sampled_token_only():
    got = L.gather_logprobs(L.compute_logprobs(randn(2, 9)), 0, torch.tensor([4, 5]))
    assert got.logprob_token_ids.tolist() == [[4], [5]]


def test_logprobs_are_float32_whatever_the_logits():
    assert L.compute_logprobs(randn(1, 9).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("bad", [-1, 9])
def test_a_logprob_of_no_token_is_an_error(bad):
    with pytest.raises(IndexError, match=str(bad)):
        L.gather_logprobs(torch.zeros(2, 9), 1, torch.tensor([0, bad]))
    with pytest.raises(ValueError, match="2 rows"):
        L.gather_logprobs(torch.zeros(2, 9), 1, torch.tensor([0]))


# --- metadata -------------------------------------------------------------

def test_metadata_from_params_leaves_out_what_nobody_asked_for():
    plain = SamplingParams(temperature=0)
    m = L.SamplingMetadata.from_params([plain] * 2, [[1], [2]], [[], []], 10)
    assert m.all_greedy and not m.all_random and m.no_penalties
    assert m.temperature is m.top_p is m.top_k is m.min_p is m.prompt_token_ids is None
    assert m.max_num_logprobs is None and m.allowed_token_ids_mask is None and m.random_rows()[1] == []
    mixed = [plain, SamplingParams(temperature=0.5, top_k=3, logprobs=0, allowed_token_ids=[2])]
    m = L.SamplingMetadata.from_params(mixed, [[1], [2]], [[], []], 10)
    assert not m.all_greedy and not m.all_random and m.random_rows()[1] == [1]
    assert m.top_k.tolist() == [-1, 3] and m.max_num_logprobs == 0
    assert m.allowed_token_ids_mask.sum(-1).tolist() == [0, 9]
