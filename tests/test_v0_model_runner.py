"""V0's runner: everything anew from metadata, the same logits as one dense forward, and bursts of steps.

Tests named `test_field_…` are rows of the field reports.
"""
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from v0_tiny import (
    BLOCK, VOCAB, Seq, dense_logits, greedy, prefills_first, random_prompt, tiny_config, tiny_model, tokens_of)

from minengine.sampling_params import SamplingParams
from minengine.v0.decode_graphs import make_decode_graphs
from minengine.v0.model_runner import (
    ModelRunner, PromptScores, get_graph_batch_size, make_sequence_input, positions_to_compute)
from minengine.v0.multi_step import MultiStepModelRunner, advance_metadata
from minengine.v0.sequence import SequenceData, SequenceGroupMetadata
from minengine.v0.worker import CacheEngine

GREEDY = SamplingParams(temperature=0)


class Rig:
    "A runner, its two pools, and the logits that it looked at; decode steps are replayed."

    def __init__(self, num_blocks=64, use_cudagraph=True, **config):
        self.config = tiny_config(num_blocks=num_blocks, use_cudagraph=use_cudagraph, **config)
        self.runner = ModelRunner(self.config, SimpleNamespace(compute_logits=self._look), tiny_model())
        self.caches = CacheEngine(self.config, num_blocks, 32)
        self.bursts, self.logits = MultiStepModelRunner(self.runner), None
        self.graphs = self.runner.decode_graphs = make_decode_graphs(self.config, tiny_model())
        if self.graphs: self.graphs.warm_up(self.caches.gpu_cache)

    def _look(self, hidden):
        self.logits = tiny_model().compute_logits(hidden)   # last of all, of the rows that are sampled
        return self.logits.clone()

    def step(self, *seqs, chunks=(), hits=None, callback=None, finished=()):
        "One step of these sequences, prefills first; each grows by its token."
        told = {seq.name: seq.told(dict(chunks).get(seq.name), (hits or {}).get(seq.name, ())) for seq in seqs}
        ordered = prefills_first(told.values())
        self.made = made = self.runner.prepare_model_input(ordered, finished)
        output = self.runner.execute_model(made, self.caches.gpu_cache, callback)
        results = {one.request_id: output[i] for i, one in enumerate(ordered)}
        for seq in seqs: seq.update([s.output_token for s in results[seq.name].samples])
        return made, results

    def check_dense(self, *seqs):
        "The last step's logits equal those of one dense forward, for each sequence that drew."
        row = 0
        for one in self.made.told:
            if not one.do_sample: continue
            (seq,) = [s for s in seqs if s.name == one.request_id]
            tokens = seq.data.get_token_ids()[:-1]
            torch.testing.assert_close(self.logits[row], dense_logits(tokens)[-1], atol=2e-4, rtol=1e-3)
            row += 1

    def poison(self, *blocks):
        for pool in self.caches.gpu_cache: pool[:, list(blocks)] = float("nan")


def tell(tokens, output=(), computed=0, chunk=None, hit=(), blocks=None, is_prompt=True):
    data = SequenceData(list(tokens), list(output))
    data.update_num_computed_tokens(computed)
    return SequenceGroupMetadata(
        "r", is_prompt, {0: data}, GREEDY, {0: list(blocks or range(9))}, token_chunk_size=chunk, computed_block_nums=list(hit) or None)


# --- which tokens --------------------------------------------------------------------

@pytest.mark.parametrize("told, span", [
    (tell(range(9)), (0, 9)), (tell(range(9), chunk=4), (0, 4)), (tell(range(9), computed=4, chunk=4), (4, 8)),
    (tell(range(9), computed=8, chunk=4), (8, 9)),
    (tell(range(9), hit=[0, 1]), (8, 9)),                      # a partial hit is left out
    (tell(range(8), hit=[0, 1]), (7, 8)),                      # a full hit computes the last token
    (tell(range(9), computed=8, chunk=1, hit=[0]), (8, 9)),    # an old hit: no longer news
    (tell(range(20), computed=4, chunk=6, hit=[0, 1]), (8, 10)),
    (tell(range(20), chunk=8, hit=[0, 1, 2, 3]), (7, 8)),      # the hit reaches past the chunk
    (tell(range(6), [7, 8], chunk=8), (0, 8)),                 # recomputed with its output
    (tell(range(6), [7, 8], computed=7, chunk=1, is_prompt=False), (7, 8))])
def test_v073_1_12_prefix_hits_chunks_and_decodes(told, span):
    assert positions_to_compute(told, told.seq_data[0], 4) == span


def test_field_nano_vllm_144_decoding_without_a_cache_is_an_error():
    told = tell(range(6), [7], chunk=1, is_prompt=False)
    with pytest.raises(ValueError, match="request r decodes at position 6, but only 0 tokens are computed"):
        positions_to_compute(told, told.seq_data[0], 4)


def test_a_block_table_that_is_too_short_is_an_error():
    told = tell(range(9), blocks=[0, 1])
    with pytest.raises(IndexError, match="position 8 is past 2 blocks"): make_sequence_input(told, 0, 4)


# --- inputs ----------------------------------------------------------------------------

def test_v073_1_12_prepare_prompt():
    "[T] Selected rows are the last ones of each prompt; without block tables nothing has a slot."
    rig, lens = Rig(), [3, 1, 7, 4]
    told = [SequenceGroupMetadata(str(i), True, {i: SequenceData([5] * n)}, GREEDY, {}) for i, n in enumerate(lens)]
    made = rig.runner.prepare_model_input(told)
    assert made.selected_token_indices.tolist() == [2, 3, 10, 14]
    assert made.attn_metadata.query_start_loc.tolist() == [0, 3, 4, 11, 15]
    assert made.attn_metadata.slot_mapping.tolist() == [-1] * 15 and made.attn_metadata.block_table.shape == (4, 0)
    assert made.input_positions.tolist() == [p for n in lens for p in range(n)]


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5, 8, 9, 15])
def test_v073_1_12_prepare_decode_pads_to_the_graphs_size(num_seqs):
    "[T] Token 0, position 0, length 1, slot -1, in as many rows as the graph has."
    rig, seqs = Rig(), []
    for i in range(num_seqs):
        seqs.append(Seq(str(i), range(i + 1), range(4 * i, 4 * i + 4)))
        seqs[-1].data.update_num_computed_tokens(i + 1)
        seqs[-1].data.append_token_id(50 + i, 0.0)
    made = rig.runner.prepare_model_input([s.told() for s in seqs])
    size, m = get_graph_batch_size(num_seqs), made.attn_metadata
    pad = size - num_seqs
    assert made.input_tokens.tolist() == [50 + i for i in range(num_seqs)] + [0] * pad
    assert made.input_positions.tolist() == [i + 1 for i in range(num_seqs)] + [0] * pad
    assert m.seq_lens.tolist() == m.seq_lens_cpu == [i + 2 for i in range(num_seqs)] + [1] * pad
    assert m.slot_mapping.tolist()[num_seqs:] == [-1] * pad and m.num_tokens == size
    assert m.query_start_loc.tolist() == m.query_start_loc_cpu == list(range(size + 1))
    assert made.selected_token_indices.tolist() == list(range(num_seqs)) and made.num_seqs == num_seqs
    m.check(num_blocks=64, block_size=BLOCK)


def test_v073_0_pad_table():
    assert [get_graph_batch_size(n) for n in (3, 5, 9, 250, 257, 511)] == [4, 8, 16, 256, 264, 512]
    assert len({get_graph_batch_size(n) for n in range(1, 257)}) == 35


def test_when_there_is_no_graph_there_is_no_padding():
    rig = Rig(max_num_seqs=12)
    assert rig.runner.num_decode_rows(9, 100) == 16
    assert rig.runner.num_decode_rows(17, 100) == 17     # a batch larger than any graph
    assert rig.runner.num_decode_rows(9, 129) == 9       # a sequence longer than recorded
    for off in dict(enforce_eager=True), dict(use_cudagraph=False): assert Rig(**off).runner.num_decode_rows(9, 100) == 9
    a, b, c = (Seq(n, [1, 2, 3], [i]) for i, n in enumerate("abc"))
    rig.step(a, b)
    made, _ = rig.step(a, b, c)      # a prompt among them: not a decode step
    assert made.attn_metadata.num_seqs == 3


def test_v073_1_12_a_hybrid_batch_equals_its_parts():
    "[T] Prompt, chunk and decode prepared together or apart: the same numbers, one behind the other."
    rig = Rig(enforce_eager=True)
    decode = Seq("d", [1, 2, 3], [7, 9])
    rig.step(decode)
    told = [Seq("p", range(6), [1, 2]).told(), Seq("c", range(9), [3, 4, 5]).told(chunk=5), decode.told()]
    parts, whole = [rig.runner.prepare_model_input([one]) for one in told], rig.runner.prepare_model_input(told)
    for name in ("input_tokens", "input_positions"):
        assert getattr(whole, name).tolist() == [x for part in parts for x in getattr(part, name).tolist()]
    for name in ("seq_lens", "slot_mapping"):
        assert getattr(whole.attn_metadata, name).tolist() == [x for part in parts for x in getattr(part.attn_metadata, name).tolist()]
    assert [row[:len(t)] for row, t in zip(whole.attn_metadata.block_table.tolist(), ([1, 2], [3, 4, 5], [7, 9]))] == [[1, 2], [3, 4, 5], [7, 9]]
    assert whole.selected_token_indices.tolist() == [5, 11]      # the chunk draws nothing
    whole.attn_metadata.check(num_blocks=64, block_size=BLOCK)


def test_prefills_come_first():
    rig, a = Rig(), Seq("a", [1, 2], [0])
    rig.step(a)
    with pytest.raises(ValueError, match="prefills must come before decodes"):
        rig.runner.prepare_model_input([a.told(), Seq("b", [1], [1]).told()])


def test_everything_is_made_anew():
    "Two identical steps share no tensor: that is V0's cost, and must stay so."
    rig, a = Rig(), Seq("a", [1, 2, 3], [0, 1])
    rig.step(a)
    first, second = (rig.runner.prepare_model_input([a.told()]) for _ in range(2))
    for one, other in ((first, second), (first.attn_metadata, second.attn_metadata)):
        for name in ("input_tokens", "input_positions", "query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            if hasattr(one, name): assert getattr(one, name).data_ptr() != getattr(other, name).data_ptr(), name
    assert first.sampling_metadata is not second.sampling_metadata


# --- equality with one dense forward ------------------------------------------------------

@pytest.mark.parametrize("config", [dict(), dict(enforce_eager=True), dict(backend="reference")], ids=str)
def test_prefill_chunk_decode_and_prefix_hit_equal_a_dense_forward(config):
    rig, rng = Rig(**config), random.Random(0)
    shared = random_prompt(rng, 8, 9)
    a = Seq("a", shared + random_prompt(rng, 5, 6), [3, 9, 4, 12, 20])
    b = Seq("b", random_prompt(rng, 15, 16), [1, 0, 7, 8, 2])
    hit = Seq("hit", shared + random_prompt(rng, 3, 4), [3, 9, 30, 31])     # a's first two blocks
    full = Seq("full", shared, [3, 9, 40])                                  # nothing but them
    rig.poison(*range(13, 20), *range(21, 30), *range(32, 40), *range(41, 64))   # nobody's
    rig.step(a); rig.check_dense(a)
    rig.step(b, a, chunks={"b": 6}); rig.check_dense(a)
    rig.step(b, hit, a, chunks={"b": 6}, hits={"hit": [3, 9]}); rig.check_dense(hit, a)
    rig.step(b, full, hit, a, hits={"full": [3, 9]}); rig.check_dense(b, full, hit, a)
    for _ in range(4):
        rig.step(a, b, hit, full)
        rig.check_dense(a, b, hit, full)
    for seq in (a, b, hit, full): assert seq.output == greedy(seq.prompt, len(seq.output))


def test_after_swap_out_and_in_at_other_places_the_logits_are_dense():
    rig, rng = Rig(), random.Random(1)
    a, b = Seq("a", random_prompt(rng, 10, 11), [3, 9, 4]), Seq("b", random_prompt(rng, 9, 10), [5, 6, 7, 8])
    rig.step(a, b)
    before = [pool[:, [3, 9, 4]].clone() for pool in rig.caches.gpu_cache]
    rig.caches.swap_out([(3, 2), (9, 0), (4, 5)])
    rig.poison(3, 9, 4)                       # others' now
    for _ in range(3): rig.step(b)
    rig.caches.swap_in([(2, 20), (0, 21), (5, 9)])
    a.blocks = [20, 21, 9, 22]
    for pool, old in zip(rig.caches.gpu_cache, before): assert torch.equal(pool[:, [20, 21, 9]], old)
    for _ in range(3):
        rig.step(a, b)
        rig.check_dense(a, b)
    assert a.output == greedy(a.prompt, 4)


def test_after_a_fork_and_a_copy_the_logits_are_dense():
    "Two sequences share all blocks; the first to write gets a copy of the last one."
    rig, rng = Rig(), random.Random(2)
    parent = Seq("parent", random_prompt(rng, 10, 11), [3, 9, 4])
    rig.step(parent)
    child = parent.fork("child", parent.blocks, index=1)
    child.data.output_token_ids[-1] = child.data.get_token_ids()[-1] = (parent.output[0] + 1) % VOCAB
    parent.blocks = [3, 9, 11]                # copy-on-write: the first appender moves
    rig.caches.copy([(4, 11)])
    for _ in range(5):
        rig.step(parent, child)
        rig.check_dense(parent, child)
        if len(parent.output) == 3: parent.blocks.append(12), child.blocks.append(13)
    assert parent.output == greedy(parent.prompt, 6) and child.output[1:] == greedy(child.prompt + child.output[:1], 5)


def test_recompute_of_prompt_and_output_gives_the_next_token():
    rig, rng = Rig(), random.Random(3)
    a, b = Seq("a", random_prompt(rng, 10, 11), [3, 9, 4, 5]), Seq("b", random_prompt(rng, 9, 10), [6, 7, 8, 10])
    rig.step(a, b); rig.step(a, b); rig.step(a, b)
    rig.poison(3, 9, 4, 5)
    a.restart()
    a.blocks = [20, 21, 22, 23, 24]
    rig.step(a, b, chunks={"a": 7})           # in two pieces
    rig.step(a, b); rig.check_dense(a, b)
    rig.step(a, b)
    assert a.output == greedy(a.prompt, 5)


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_schedule_gives_dense_logits(rng):
    "Chunks of any size, arrivals, pauses, restarts, moves; NaN in every block that nobody owns."
    rig, free, seqs = Rig(), list(range(64)), []
    rng.shuffle(free)
    for number in range(14):
        if number < 5: seqs.append(Seq(str(number), random_prompt(rng, 1, 14), []))
        chosen = [s for s in seqs if rng.random() < 0.8 and s.data.get_len() < 22]
        chunks = {}
        for seq in chosen:
            if rng.random() < 0.1:            # preempted before this step
                free += seq.blocks
                seq.blocks = []
                seq.restart()
            left = seq.data.get_num_uncomputed_tokens()
            if left > 1 and rng.random() < 0.5: chunks[seq.name] = rng.randint(1, left)
            while len(seq.blocks) * BLOCK < seq.data.get_len(): seq.blocks.append(free.pop())
        rig.poison(*free)
        if chosen:
            rig.step(*chosen, chunks=chunks)
            rig.check_dense(*chosen)


def test_field_vllm_13418_padded_rows_write_nowhere():
    plain, padded = Rig(enforce_eager=True), Rig()
    for rig in (plain, padded):
        for pool in rig.caches.gpu_cache: pool.fill_(7.0)
        seqs = [Seq(n, list(range(3 + i)), [10 + 3 * i, 11 + 3 * i, 12 + 3 * i]) for i, n in enumerate("abc")]
        for _ in range(5): rig.step(*seqs)
        rig.outputs = [s.output for s in seqs]
    assert plain.outputs == padded.outputs and len(padded.made.input_tokens) == 4
    for a, b in zip(plain.caches.gpu_cache, padded.caches.gpu_cache):
        torch.testing.assert_close(a, b)
        assert (b[:, 0] == 7.0).all()         # what the padding's block table points at


def test_the_last_layer_finishes_only_rows_that_are_sampled(monkeypatch):
    "A whole prompt and a chunk that draws nothing, the chunk's end, a chunk alone; scores look at all rows."
    def play(**params):
        seen, rig, rng = [], Rig(use_cudagraph=False), random.Random(4)
        params = SamplingParams(temperature=0, **params)
        a, b = (Seq(n, random_prompt(rng, 9, 10), blocks, params) for n, blocks in (("a", [3, 9, 4]), ("b", [6, 7, 8])))
        handle = tiny_model().model.norm.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        try:
            rig.step(a, b, chunks={"b": 4})
            rig.check_dense(a, b)
            rig.step(b)
            rig.check_dense(b)
        finally: handle.remove()
        return seen[::2]                         # behind each is `check_dense`
    assert play() == [1, 1]
    assert play(prompt_logprobs=1) == [13, 5]
    monkeypatch.setattr(type(tiny_model()), "takes_rows", False)
    assert play() == [13, 5]


# --- scores of prompts ----------------------------------------------------------------------

def check_scores(found, prompt, k, params):
    "Against one forward, processed as the request wants; nothing for the first token."
    logits = dense_logits(prompt)[:-1] / (params.temperature or 1.0)
    if params.top_k > 0: logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], float("-inf"))
    expected = logits.log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for row, (position, token) in enumerate(zip(found, prompt[1:])):
        assert next(iter(position)) == token and len(position) in (k, k + 1) if k else list(position) == [token]
        for token_id, entry in position.items():
            assert entry.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-3)
        assert position[token].rank == 1 + int((expected[row] > expected[row, token] + 1e-6).sum())


@pytest.mark.parametrize("k, params", [(0, {}), (3, {}), (2, dict(temperature=0.7)), (2, dict(temperature=1.0, top_k=9))], ids=str)
def test_field_vllm_15420_prompt_logprobs_over_chunks(k, params):
    rig, rng = Rig(), random.Random(5)
    params = SamplingParams(**{"temperature": 0, **params}, prompt_logprobs=k)
    a, b = Seq("a", random_prompt(rng, 13, 14), [3, 9, 4, 5], params), Seq("b", random_prompt(rng, 9, 10), [6, 7, 8], params)
    _, results = rig.step(a, b, chunks={"a": 4})
    assert results["a"].prompt_logprobs is None
    check_scores(results["b"].prompt_logprobs, b.prompt, k, params)
    _, results = rig.step(a, b, chunks={"a": 4})
    assert results["a"].prompt_logprobs is results["b"].prompt_logprobs is None     # decode steps bring none
    _, results = rig.step(a, b)
    check_scores(results["a"].prompt_logprobs, a.prompt, k, params)
    assert rig.runner.prompt_scores == {}


def test_prompt_logprobs_start_over_with_the_prompt_and_come_once():
    rig, rng = Rig(), random.Random(6)
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    a = Seq("a", random_prompt(rng, 13, 14), [3, 9, 4, 5], params)
    rig.step(a, chunks={"a": 6})
    a.restart()                               # preempted half-way
    rig.poison(3, 9, 4, 5)
    a.blocks = [20, 21, 22, 23]
    rig.step(a, chunks={"a": 5})
    _, results = rig.step(a)
    check_scores(results["a"].prompt_logprobs, a.prompt, 1, params)
    rig.step(a)
    a.restart()                               # preempted with output: all is scored already
    _, results = rig.step(a)
    assert results["a"].prompt_logprobs is None and a.output == greedy(a.prompt, 3)


def test_field_vllm_3251_42245_skipped_positions_are_an_error():
    rig = Rig()
    a = Seq("a", range(33), range(9), SamplingParams(temperature=0, prompt_logprobs=1))
    rig.step(Seq("x", range(33), range(9)))
    with pytest.raises(ValueError, match="prompt positions 0 to 31 were skipped.*must not use the prefix cache"):
        rig.step(a, hits={"a": list(range(8))})


def test_a_prompt_of_one_token_has_no_scores():
    rig = Rig()
    _, results = rig.step(Seq("a", [5], [0], SamplingParams(temperature=0, prompt_logprobs=2)))
    assert results["a"].prompt_logprobs == []


def test_prompt_logits_are_made_in_slices():
    calls = []
    def compute_logits(hidden):
        calls.append(len(hidden))
        return torch.zeros(len(hidden), 11)
    scores = PromptScores([1] * 31, SamplingParams(prompt_logprobs=2))
    scores.write(0, torch.zeros(20, 4), compute_logits, max_rows=8)
    scores.write(20, torch.zeros(11, 4), compute_logits, max_rows=8)
    assert calls == [8, 8, 4, 8, 2] and scores.complete and len(scores.found) == 30


def test_finished_requests_are_forgotten():
    rig = Rig()
    params = SamplingParams(seed=3, prompt_logprobs=0, logit_bias={1: 1.0})
    rig.step(Seq("a", range(9), [0, 1, 2], params), chunks={"a": 4})
    rig.step(b := Seq("b", [1, 2], [5], SamplingParams(seed=1)))
    stores = rig.runner.generators, rig.runner.processors, rig.runner.prompt_scores
    assert [sorted(store) for store in stores] == [["b"], ["a", "b"], ["a"]]
    rig.step(b, finished=["a", "never heard of"])
    assert [sorted(store) for store in stores] == [["b"], ["b"], []]
    rig.step(Seq("b", [1, 2], [6], SamplingParams(temperature=0)), finished=["b"])   # ended and new in one step
    assert [sorted(store) for store in stores] == [[], ["b"], []]


# --- around the forward ------------------------------------------------------------------------

def test_v073_1_10_the_callback_runs_between_the_model_and_the_draw():
    rig, log = Rig(), []
    model, sampler = rig.runner.run_model, rig.runner.sampler.forward
    rig.runner.run_model = lambda *x: log.append("model") or model(*x)
    rig.runner.sampler = lambda *x: log.append("draw") or sampler(*x)
    a = Seq("a", range(9), [0, 1, 2])
    rig.step(a, chunks={"a": 4}, callback=lambda: log.append("callback"))
    assert log == ["model", "callback"]       # also when nobody draws
    rig.step(a, callback=lambda: log.append("callback"))
    assert log[2:] == ["model", "callback", "draw"]


def test_profile_run_leaves_nothing_behind():
    rig = Rig(budget=130, max_num_seqs=4)
    state = rig.runner.sampler.generator.get_state()
    sizes = []
    model = rig.runner.run_model
    rig.runner.run_model = lambda ids, positions: sizes.append((len(ids), int(positions.max()))) or model(ids, positions)
    rig.runner.profile_run()
    assert sizes == [(130, 32)] and torch.equal(rig.runner.sampler.generator.get_state(), state)
    assert rig.runner.generators == rig.runner.processors == rig.runner.prompt_scores == {}


def test_field_vllm_17929_the_engines_seed_decides_and_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    before, runs = torch.get_rng_state(), []
    for seed in (0, 0, 5):
        rig, a = Rig(seed=seed), Seq("a", [1, 2, 3], [0, 1, 2], SamplingParams())
        for _ in range(6): rig.step(a)
        runs.append(a.output)
    assert runs[0] == runs[1] != runs[2] and torch.equal(torch.get_rng_state(), before)


def test_a_users_function_decides_what_is_drawn():
    "Called with the live output, in every step: here no token may come twice."
    def only_new(prompt_ids, output_ids, logits): return logits.index_fill(0, torch.tensor(prompt_ids + output_ids), float("-inf"))
    rig, a = Rig(), Seq("a", [4, 5, 6], range(6), SamplingParams(temperature=0, logits_processors=[only_new]))
    for _ in range(12): rig.step(a)
    tokens = list(a.prompt)
    for _ in range(12):
        logits = dense_logits(tokens)[-1].clone()
        logits[tokens] = float("-inf")
        tokens.append(int(logits.argmax()))
    assert a.output == tokens[3:] and len(set(a.output)) == 12


# --- several answers ---------------------------------------------------------------------------

def test_n_answers_from_one_prompt_equal_single_requests():
    "Forked with copies of the last block; seeds seed + i; in any company."
    rig, rng = Rig(), random.Random(8)
    prompt = random_prompt(rng, 10, 11)
    alone = []
    for i in range(4):
        other, s = Rig(), Seq("s", prompt, [0, 1, 2, 3, 4], SamplingParams(seed=20 + i))
        for _ in range(6): other.step(s)
        alone.append(s.output)
    group = Seq("g", prompt, [0, 1, 2], SamplingParams(n=4, seed=20))
    output = rig.runner.execute_model(rig.runner.prepare_model_input([group.told()]), rig.caches.gpu_cache)
    first = [s.output_token for s in output[0].samples]
    group.data.update_num_computed_tokens(10)
    seqs, pairs = [group], []
    for i in range(1, 4): seqs.append(group.fork("g", [0, 1, 10 + i], i)); pairs.append((2, 10 + i))
    rig.caches.copy(pairs)
    for i, (seq, token) in enumerate(zip(seqs, first)):
        seq.blocks += [20 + i]
        seq.data.append_token_id(token, 0.0)
    for step in range(5):
        alive = [seq for i, seq in enumerate(seqs) if not (i == 1 and step > 2)]   # the second one ends early
        told = SequenceGroupMetadata("g", False, {s.seq_id: s.data for s in alive}, group.params, {s.seq_id: s.blocks for s in alive})
        output = rig.runner.execute_model(rig.runner.prepare_model_input([told]), rig.caches.gpu_cache)
        for seq, s in zip(alive, output[0].samples):
            assert s.parent_seq_id == seq.seq_id
            seq.data.update_num_computed_tokens(1)
            seq.data.append_token_id(s.output_token, 0.0)
    assert [s.output for s in seqs] == [alone[0], alone[1][:4], alone[2], alone[3]]


# --- bursts ---------------------------------------------------------------------------------------

def run_in_bursts(num_steps, params, num_tokens=16, num_seqs=5, config=None):
    rig, rng = Rig(num_blocks=128, **(config or {})), random.Random(11)
    seqs = [Seq(str(i), random_prompt(rng, 3, 12), range(12 * i, 12 * i + 12), params[i % len(params)]) for i in range(num_seqs)]
    rig.poison(*range(12 * num_seqs, 128))
    rig.step(*seqs)
    while len(seqs[0].output) < num_tokens:
        steps = min(num_steps, num_tokens - len(seqs[0].output))
        burst = rig.bursts.start([s.told(num_steps=steps) for s in seqs])
        for i in range(steps):
            outputs = rig.bursts.execute_model(burst, rig.caches.gpu_cache)
            assert len(outputs) == (steps if i == steps - 1 else 0)
        for i, s in enumerate(seqs): s.update(tokens_of(outputs, i))
    return [s.output for s in seqs]


BURST_PARAMS = {
    "greedy": [dict(temperature=0)], "seeded": [dict(seed=3), dict(seed=4, top_p=0.8), dict(temperature=0)],
    "unseeded": [dict()], "penalties": [dict(temperature=0, repetition_penalty=1.6), dict(seed=4, frequency_penalty=1.0)],
    "rules": [dict(temperature=0, min_tokens=6, stop_token_ids=list(range(0, VOCAB, 3))), dict(temperature=0, logit_bias={7: 9.0}),
              dict(temperature=0, bad_words_token_ids=[[5], [7, 7], [46, 66]])],
    "functions": [SamplingParams(temperature=0, logits_processors=[lambda o, x: x.index_fill(0, torch.tensor(o[-3:]).long(), -50.0)])]}


@pytest.mark.parametrize("name", BURST_PARAMS)
@pytest.mark.parametrize("config", [dict(), dict(enforce_eager=True, backend="reference")], ids=str)
def test_v073_1_9_bursts_give_the_same_tokens(name, config):
    "Steps 1, 4 and 8; what is drawn, and what penalties see, does not depend on when the host looks."
    params = [p if isinstance(p, SamplingParams) else SamplingParams(**p) for p in BURST_PARAMS[name]]
    single = run_in_bursts(1, params, config=config)
    assert single == run_in_bursts(4, params, config=config) == run_in_bursts(8, params, config=config)


def test_bursts_equal_dense_greedy():
    rng, found = random.Random(11), run_in_bursts(8, [GREEDY])
    for output in found: assert output == greedy(random_prompt(rng, 3, 12), 16)


def test_logprobs_of_a_burst_equal_those_of_single_steps():
    rig, other = Rig(), Rig()
    params = SamplingParams(temperature=0, logprobs=3)
    a, b = Seq("a", [4, 5, 6], [0, 1, 2, 3], params), Seq("a", [4, 5, 6], [0, 1, 2, 3], params)
    rig.step(a), other.step(b)
    burst = rig.bursts.start([a.told(num_steps=4)])
    for _ in range(4): outputs = rig.bursts.execute_model(burst, rig.caches.gpu_cache)
    for output in outputs:
        _, single = other.step(b)
        for token_id, entry in single["a"].samples[0].logprobs.items():
            assert output[0].samples[0].logprobs[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert output[0].samples[0].logprobs[token_id].rank == entry.rank


def test_v073_1_9_a_burst_may_begin_with_prompts_beside_decodes():
    "With chunked prefill, prompts and decodes share a burst; from its second step on all decode, padded."
    rig, rng = Rig(), random.Random(12)
    old = Seq("old", random_prompt(rng, 5, 6), [0, 1, 2, 3, 4], SamplingParams(seed=9))
    new = Seq("new", random_prompt(rng, 9, 10), [5, 6, 7, 8, 9])
    many = Seq("many", random_prompt(rng, 7, 8), [10, 11, 12, 13], SamplingParams(n=3, seed=5))
    rig.step(old)
    burst = rig.bursts.start([new.told(num_steps=4), many.told(num_steps=4), old.told(num_steps=4)])
    rows = []
    for _ in range(4):
        outputs = rig.bursts.execute_model(burst, rig.caches.gpu_cache)
        rows.append(len(burst.model_input.input_tokens))
    assert rows == [17, 4, 4, 4]
    assert tokens_of(outputs, 0) == greedy(new.prompt, 4)
    single, s = Rig(), Seq("s", old.prompt, old.blocks, old.params)
    for _ in range(5): single.step(s)
    assert tokens_of(outputs, 2) == s.output[1:]
    assert [len(output[1].samples) for output in outputs] == [3, 1, 1, 1]   # children are forked after the burst
    single, s = Rig(), Seq("s", many.prompt, [10, 11, 12, 13], SamplingParams(seed=5))
    for _ in range(4): single.step(s)
    assert [output[1].samples[0].output_token for output in outputs] == s.output


def test_prompt_scores_of_a_burst():
    rig = Rig()
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    a = Seq("a", [4, 5, 6, 7, 8], [0, 1, 2, 3], params)
    burst = rig.bursts.start([a.told(num_steps=3)])
    for _ in range(3): outputs = rig.bursts.execute_model(burst, rig.caches.gpu_cache)
    check_scores(outputs[0][0].prompt_logprobs, a.prompt, 1, params)
    assert [output[0].prompt_logprobs for output in outputs[1:]] == [None, None]


def test_a_burst_writes_its_own_slots_only():
    "Garbage after a stop is computed into slots that the sequence owns."
    rig = Rig()
    a, b = Seq("a", [4, 5, 6], [3, 1, 7]), Seq("b", [4, 5], [2, 9, 5])
    rig.step(a, b)
    for pool in rig.caches.gpu_cache: pool[:, [0, 4, 6, 8]] = 7.0
    burst = rig.bursts.start([a.told(num_steps=8), b.told(num_steps=8)])
    for _ in range(8): rig.bursts.execute_model(burst, rig.caches.gpu_cache)
    assert all((pool[:, [0, 4, 6, 8]] == 7.0).all() for pool in rig.caches.gpu_cache)
    assert (rig.caches.gpu_cache[0][:, 7] != 0).any()


def test_the_callback_runs_in_every_step_of_a_burst():
    rig, calls = Rig(), []
    a = Seq("a", [4, 5, 6], [0, 1, 2])
    rig.step(a)
    burst = rig.bursts.start([a.told(num_steps=4)])
    for _ in range(4): rig.bursts.execute_model(burst, rig.caches.gpu_cache, lambda: calls.append(1))
    assert len(calls) == 4


def test_outputs_are_read_when_they_are_there_and_at_the_latest_at_the_end():
    rig, a = Rig(), Seq("a", [4, 5, 6], [0, 1, 2])
    rig.step(a)
    burst = rig.bursts.start([a.told(num_steps=4)])
    for step in range(3):
        rig.bursts.execute_model(burst, rig.caches.gpu_cache)
        assert [o.output is not None for o in burst.outputs] == [True] * step + [False]   # a CPU is always ready
    class Busy:
        waited = 0
        def query(self): return False
        def synchronize(self): self.waited += 1
    burst.outputs[-1].ready = busy = Busy()
    assert len(rig.bursts.execute_model(burst, rig.caches.gpu_cache)) == 4 and busy.waited == 1


def test_bursts_that_cannot_be_are_refused():
    rig = Rig()
    a, b = Seq("a", range(9), [0, 1, 2]), Seq("b", [1], [3])
    with pytest.raises(ValueError, match=r"one burst, but \[1, 4\] steps"): rig.bursts.start([a.told(num_steps=4), b.told()])
    with pytest.raises(ValueError, match="request a: a prompt that is cut draws no token, so 4 steps"):
        rig.bursts.start([a.told(chunk=4, num_steps=4)])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_advancing_equals_preparing(lens, rest):
    "On the device without a loop, or from lists: the same metadata, three steps in a row."
    from minengine.v0.model_runner import PADDING, make_attention_metadata
    def prepared(extra, padding):
        rows = []
        for i, n in enumerate(lens):
            told = tell([1] * n, [2] * (1 + extra), computed=n + extra, chunk=1, blocks=range(10 * i, 10 * i + 10), is_prompt=False)
            rows.append(make_sequence_input(told, 0, BLOCK))
        return make_attention_metadata(rows + [PADDING] * padding)
    made = prepared(0, 0)
    for extra in range(1, 4):
        made = advance_metadata(made, len(lens), len(lens) + rest, BLOCK)
        expected = prepared(extra, rest)
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
            assert torch.equal(getattr(made, name), getattr(expected, name)), name
        assert (made.seq_lens_cpu, made.query_start_loc_cpu, made.num_tokens) == (
            expected.seq_lens_cpu, expected.query_start_loc_cpu, expected.num_tokens)
        assert (made.max_query_len, made.max_seq_len) == (expected.max_query_len, expected.max_seq_len)


def test_the_helpers_notice_what_they_must():
    "A wrong block, and the dense check fails."
    rig, a = Rig(), Seq("a", [4, 5, 6, 7, 8], [0, 1, 2])
    rig.step(a)
    a.blocks = [3, 1, 2]
    rig.step(a)
    with pytest.raises(AssertionError): rig.check_dense(a)
