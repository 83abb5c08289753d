"""Recorded steps: every rule that a CUDA graph takes for granted, each broken once, and both engines with graphs.

On a CPU the recorder makes its calls again on the recorded memory and checks
what a GPU would not. Tests named `test_field_…` are rows of the field reports.
"""
import dataclasses
import random

import pytest
import torch
import v0_tiny
import v1_tiny
from compiled_tiny import FAMILIES, Running, generate, make_args, make_model, record_only, runner_of, some_prompts, wanted
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

import minengine.v1.worker.worker
from minengine.attention.metadata import set_forward_context
from minengine.config import CompilationConfig
from minengine.llm import LLM
from minengine.model.graphs import (
    MOST_CAPTURED, CudaGraphBackend, GraphError, RecordingBackend, SizeDispatcher, SizedGraphs, capture_sizes, check_padding,
    check_places, make_graph_backend, place_of, weak_view)
from minengine.parallel import can_pack
from minengine.v0.decode_graphs import MAX_SEQ_LEN_TO_CAPTURE, DecodeGraphs, make_decode_graphs, row_sizes
from minengine.v0.model_runner import ModelRunner, get_graph_batch_size
from minengine.v0.worker import CacheEngine
from minengine.v1.worker.cuda_graph import PieceGraphs, make_run_model, token_sizes

ON = {"v0": dict(level=0, use_cudagraph=True), "v1": dict(level=3, use_cudagraph=True)}


def as_it_is(piece, example_inputs): return piece


# --- sizes, and who gets which ---------------------------------------------------------------

def test_v073_1_12_the_references_sizes():
    assert capture_sizes(10**6) == [1, 2, 4] + [8 * i for i in range(1, 65)] and MOST_CAPTURED == 512
    assert capture_sizes(0) == [] and capture_sizes(7) == [1, 2, 4] and capture_sizes(9, [9, 10, 3, 3]) == [3, 9]


@given(st.sets(st.integers(1, 600), max_size=12), st.integers(1, 700))
def test_a_step_gets_the_smallest_size_that_holds_it(sizes, n):
    dispatcher, fits = SizeDispatcher(sorted(sizes)), [size for size in sizes if size >= n]
    assert dispatcher.padded_size(n) == min(fits, default=None)
    dispatcher.check_invariants()


def test_v0_and_its_dispatcher_pad_alike():
    "`get_graph_batch_size` is a formula, the dispatcher a search: one table."
    for most in (1, 3, 8, 200, 256):
        dispatcher = SizeDispatcher(row_sizes(CompilationConfig(use_cudagraph=True), most))
        for n in range(1, most + 1): assert dispatcher.padded_size(n) == get_graph_batch_size(n), (most, n)
    # More sequences than the reference ever records: these run eagerly.
    dispatcher = SizeDispatcher(row_sizes(CompilationConfig(use_cudagraph=True), 1024))
    assert dispatcher.sizes[-1] == 512 and dispatcher.padded_size(513) is None


def test_v1_records_no_single_token():
    "A compiled model takes two or more."
    assert token_sizes(CompilationConfig(3, True), 8192) == [2, 4] + [8 * i for i in range(1, 65)]
    assert token_sizes(CompilationConfig(3, True, [1]), 8192) == [2]
    assert token_sizes(CompilationConfig(3, True, [100]), 64) == []


@pytest.mark.parametrize("sizes", [[2, 1], [1, 1], [0, 1]])
def test_a_dispatcher_knows_wrong_sizes(sizes):
    with pytest.raises(AssertionError): SizeDispatcher(sizes).check_invariants()


# --- the recorder ------------------------------------------------------------------------------

BUFFER = torch.zeros(4, 6)
OTHER_PLACES = {
    "another tensor": lambda: BUFFER.clone(), "a shorter view": lambda: BUFFER[:3], "a later view": lambda: BUFFER[:, 1:],
    "other strides": lambda: BUFFER.view(6, 4).t(), "another type": lambda: BUFFER.view(torch.int32), "no tensor": lambda: 4}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_field_vllm_11596_an_input_that_was_rebound(name):
    graphs = SizedGraphs(lambda n, x: x * n, RecordingBackend())
    graphs.capture(4, 2, BUFFER)
    BUFFER.fill_(3)
    assert (graphs.replay(4, 2, BUFFER[:]) == 6).all()     # another view of the same memory is the same
    with pytest.raises(GraphError, match="argument 1 was rebound"): graphs.replay(4, 2, OTHER_PLACES[name]())
    with pytest.raises(GraphError, match="argument 0 was rebound"): graphs.replay(4, 5, BUFFER)


def test_a_replay_reads_and_writes_the_recorded_memory():
    x, y = torch.ones(3), torch.ones(3)
    graph, (total, double, number) = RecordingBackend().capture(lambda: (x + y, x * 2, 7))
    x.fill_(5)
    again = graph.replay()
    assert again[0] is total and again[1] is double and again[2] == number == 7
    assert total.tolist() == [6, 6, 6] and double.tolist() == [10, 10, 10]
    held, x = x, torch.zeros(3)      # the name is bound to another tensor
    held.fill_(1)
    assert x.sum() == 0 and graph.replay()[1].tolist() == [0, 0, 0]     # this call closes over a name, not a tensor:
    graphs = SizedGraphs(lambda x: x * 2, RecordingBackend())           # `SizedGraphs` hands its arguments in
    graphs.capture(3, held)
    with pytest.raises(GraphError, match="rebound"): graphs.replay(3, x)


def test_an_output_may_be_its_input():
    x = torch.ones(3)
    graph, out = RecordingBackend().capture(lambda: x)
    x.fill_(2)
    assert graph.replay() is out and out.tolist() == [2, 2, 2]


def test_missed_and_recorded_twice():
    graphs = SizedGraphs(lambda x: x, RecordingBackend())
    graphs.capture(4, BUFFER)
    with pytest.raises(GraphError, match=r"size 8 was not recorded, only \[4\]"): graphs.replay(8, BUFFER)
    with pytest.raises(GraphError, match="size 4 is recorded"): graphs.capture(4, BUFFER)
    graphs.check_invariants()
    graphs.places.clear()
    with pytest.raises(AssertionError): graphs.check_invariants()


def test_a_call_that_fails_records_nothing():
    def fail(x): raise ZeroDivisionError
    graphs = SizedGraphs(fail, RecordingBackend())
    with pytest.raises(ZeroDivisionError): graphs.capture(4, BUFFER)
    with pytest.raises(GraphError, match="not recorded"): graphs.replay(4, BUFFER)


@pytest.mark.parametrize("slots, num_real, message", [
    ([3, -1, -1], 1, None), ([3, 4], 2, None), ([], 0, None),
    ([3, -1, 0], 1, "row 2 is padding and would write slot 0"), ([3, 9, -1], 1, "row 1 is padding and would write slot 9"),
    ([5], 0, "row 0 is padding")])
def test_padding_has_no_slot(slots, num_real, message):
    slots = torch.tensor(slots, dtype=torch.int64)
    if message is None: return check_padding(slots, num_real)
    with pytest.raises(GraphError, match=message): check_padding(slots, num_real)


@pytest.mark.skipif(not can_pack(torch.rand(2, 2)), reason="no packed weights here")
def test_a_packed_weight_is_itself():
    weight = torch.rand(8, 8)
    packed, other = (torch.ops.mkldnn._reorder_linear_weight(weight, 4) for _ in range(2))
    check_places([place_of(packed)], (packed,))
    with pytest.raises(GraphError, match="rebound"): check_places([place_of(packed)], (other,))


def test_weak_views():
    for owner in (torch.arange(12.), torch.arange(24.).view(4, 6)[1:, ::2], torch.ones(2, dtype=torch.bfloat16)):
        view = weak_view(owner)
        assert place_of(view) == place_of(owner) and torch.equal(view, owner)
        assert view.untyped_storage()._cdata != owner.untyped_storage()._cdata
    assert weak_view(None) is None


def test_the_recorder_of_each_device():
    assert isinstance(make_graph_backend("cpu"), RecordingBackend) and RecordingBackend.checks and not CudaGraphBackend.checks


# --- V1: the pieces between attentions -------------------------------------------------------------

def recorded(engine: v1_tiny.Engine, sizes) -> PieceGraphs:
    "Give an engine of the tests recorded pieces."
    graphs = PieceGraphs(v1_tiny.tiny_model(), sizes, compile_piece=as_it_is)
    runner = engine.runner
    runner.run_model, runner.num_input_tokens = graphs, graphs.num_input_tokens
    most = graphs.num_input_tokens(sizes[-1])
    graphs.warm_up(runner.buffers.input_ids.commit(most), runner.buffers.positions.commit(most), runner.backend)
    return graphs


class Pieces:
    "Recorded pieces of the tiny model, and the buffers they read."

    def __init__(self, sizes=(2, 4, 8, 16)):
        self.model, self.graphs = v1_tiny.tiny_model(), PieceGraphs(v1_tiny.tiny_model(), list(sizes), compile_piece=as_it_is)
        self.ids, self.positions = torch.zeros(40, dtype=torch.int32), torch.zeros(40, dtype=torch.int64)
        self.graphs.warm_up(self.ids, self.positions, "cpu")

    def fill(self, n) -> tuple:
        self.ids[:n], self.positions[:n] = torch.randint(v1_tiny.VOCAB, (n,)), torch.arange(n)
        size = self.graphs.num_input_tokens(n)
        return self.ids[:size], self.positions[:size]

    def __call__(self, n):
        with set_forward_context(None, [], "cpu"): return self.graphs(*self.fill(n))


@pytest.fixture(scope="module")
def shared_pieces():
    return Pieces()


@pytest.fixture
def pieces(shared_pieces):
    with torch.inference_mode(): yield shared_pieces
    shared_pieces.graphs.check_invariants()     # whatever was broken is whole again


def test_replayed_pieces_equal_the_model_to_the_last_bit(pieces):
    with set_forward_context(None, [], "cpu"):
        for n in [*range(1, 41), 16, 1, 40, 2, 7]:
            step = pieces.fill(n)
            assert torch.equal(pieces.graphs(*step), pieces.model(*step)), n


def test_every_step_is_counted_and_none_captures_again(pieces):
    dispatcher, report = pieces.graphs.dispatcher, pieces.graphs.compiled.report
    before = dispatcher.num_replayed, dispatcher.num_eager
    for n in (1, 16, 17, 40, 3): pieces(n)
    assert (dispatcher.num_replayed - before[0], dispatcher.num_eager - before[1]) == (3, 2)
    assert report.num_graphs == 1 and report.num_pieces == 5 and report.num_compiled == 3
    assert pieces.graphs.summary() | dict(compile_seconds=0) == dict(
        compile_seconds=0, num_pieces=5, num_programs=3, num_cached_programs=0, num_graph_sizes=4, graph_bytes=0)


def test_planted_inputs_of_a_step_are_rebound(pieces):
    ids, positions = pieces.fill(4)
    with set_forward_context(None, [], "cpu"):
        for step in ((ids.clone(), positions), (ids, positions.clone()), (pieces.ids[4:8], positions)):
            with pytest.raises(GraphError, match="was rebound"): pieces.graphs(*step)


def test_planted_a_weight_is_rebound(pieces):
    "Weights may be filled again; another tensor in a weight's place is an error."
    arguments = pieces.graphs.compiled._arguments
    place, weight = next((i, x) for i, x in enumerate(arguments) if isinstance(x, torch.nn.Parameter))
    arguments[place] = weight.clone()
    with pytest.raises(GraphError, match="was rebound"): pieces(4)
    arguments[place] = weight
    before = weight.clone()
    weight *= 2
    with set_forward_context(None, [], "cpu"):
        step = pieces.fill(4)
        assert torch.equal(pieces.graphs(*step), pieces.model(*step))
    weight.copy_(before)


@pytest.mark.parametrize("piece", range(3))
def test_planted_a_size_was_missed_by_one_piece(pieces, piece):
    graphs = pieces.graphs.pieces[piece].graphs
    forgotten = graphs.pop(8)
    with pytest.raises(GraphError, match="size 8 was not recorded, only"): pieces(7)
    with pytest.raises(AssertionError): pieces.graphs.check_invariants()
    graphs[8] = forgotten
    pieces(7)


def test_planted_a_size_is_recorded_again(pieces):
    with pytest.raises(GraphError, match="size 16 is recorded"): pieces.graphs.warm_up(pieces.ids, pieces.positions, "cpu")
    pieces.graphs._recording = False


def test_planted_what_lies_between_two_pieces_moves(pieces):
    "Attention's output is written in place; a piece that gets it elsewhere would read old numbers."
    middle = pieces.graphs.compiled.backend.split.get_submodule("submod_2")
    replay, seen = middle.program, []
    def move_attention(*args):
        place = next(i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.shape == (8, 4, 8))
        seen.append(place)
        return replay(*args[:place], args[place].clone(), *args[place + 1:])
    middle.program = move_attention
    try:
        with pytest.raises(GraphError, match="was rebound") as error: pieces(7)
    finally: middle.program = replay
    assert f"argument {seen[0]} " in str(error.value)
    pieces(7)


@pytest.mark.parametrize("seed", range(3))
def test_v1_with_recorded_pieces_gives_the_tokens_of_a_request_alone(seed):
    "Random requests, chunks, hits, preemption, NaN in free blocks; the worker's mirror is checked in every step."
    rng = random.Random(seed)
    engine = v1_tiny.Engine(nan_in_free_blocks=True, num_blocks=rng.choice([40, 64]), budget=rng.choice([16, 32]), preallocate=4)
    graphs, shared = recorded(engine, [2, 4, 8, 16]), v1_tiny.random_prompt(rng, 16, 17)
    prompts = {f"r{i}": shared[:rng.choice([0, 8, 16])] + v1_tiny.random_prompt(rng) for i in range(8)}
    steps = 0
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
        for _ in range(rng.randrange(4)):
            steps += bool(engine.step()[0].total_num_scheduled_tokens)
    while engine.scheduler.has_unfinished_requests(): steps += bool(engine.step()[0].total_num_scheduled_tokens)
    for name, prompt in prompts.items(): assert engine.tokens[name] == v1_tiny.alone(prompt, max_tokens=12), name
    assert graphs.dispatcher.num_replayed + graphs.dispatcher.num_eager == steps and graphs.dispatcher.num_replayed > 10
    assert graphs.compiled.report.num_graphs == 1
    graphs.check_invariants()


def test_field_vllm_13418_vllm_13922_five_tokens_padded_to_eight_write_five_slots():
    "The length of what is written comes from the slot mapping, not from the padded keys."
    engine = v1_tiny.Engine(caching=False)
    graphs = recorded(engine, [8, 16])
    for i in range(5): engine.add(str(i), [i + 1, 2, 3], max_tokens=8)
    engine.step()      # 15 tokens, padded to 16
    held = {b.block_id for blocks in engine.scheduler.kv_cache_manager.req_to_blocks.values() for b in blocks}
    pools = engine.runner.kv_caches
    for pool in pools: pool[:, [i for i in range(64) if i not in held]] = 7.0
    before = [pool.clone() for pool in pools]
    order, _ = engine.step()
    assert order.total_num_scheduled_tokens == 5 and graphs.dispatcher.num_replayed == 2
    for old, new in zip(before, pools):
        changed = (old != new).flatten(3).any(-1)      # by keys or values, block and offset
        assert changed.sum(dim=(1, 2)).tolist() == [5, 5]
    assert engine.run()["3"] == v1_tiny.alone([4, 2, 3], max_tokens=8)


# --- V0: the whole decode step ----------------------------------------------------------------------

class Decodes:
    "A runner of V0 whose decode steps are recorded, and prompts that have been read."

    def __init__(self, num_seqs=3, **config):
        self.config = v0_tiny.tiny_config(use_cudagraph=True, **config)
        self.runner, self.pools = ModelRunner(self.config, v0_tiny.tiny_model()), CacheEngine(self.config, 64, 8).gpu_cache
        self.graphs = self.runner.decode_graphs = make_decode_graphs(self.config, v0_tiny.tiny_model())
        self.graphs.warm_up(self.pools)
        self.seqs = [v0_tiny.Seq(str(i), range(i + 1, 2 * i + 4), range(8 * i + 1, 8 * i + 9)) for i in range(num_seqs)]
        self.step()

    def prepare(self): return self.runner.prepare_model_input([seq.told() for seq in self.seqs])

    def run(self, step):
        output = self.runner.execute_model(step, self.pools)
        for i, seq in enumerate(self.seqs): seq.update([output[i].samples[0].output_token])

    def step(self): self.run(self.prepare())

    def check(self):
        for seq in self.seqs: assert seq.output == v0_tiny.greedy(seq.prompt, len(seq.output))


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_v0_decodes_replay_and_are_right(num_seqs, backend):
    "Lengths that grow over block borders: whatever were frozen would show."
    decodes = Decodes(num_seqs, backend=backend, max_num_seqs=8)
    for _ in range(10): decodes.step()
    decodes.check()
    assert (decodes.graphs.dispatcher.num_replayed, decodes.graphs.dispatcher.num_eager) == (10, 1)
    decodes.graphs.check_invariants()


def test_v0_batches_change_between_replays():
    decodes, rng = Decodes(6, max_num_seqs=8), random.Random(0)
    everybody = decodes.seqs
    for _ in range(15):
        decodes.seqs = rng.sample(everybody, rng.randrange(1, 7))
        decodes.step()
    decodes.seqs = everybody
    decodes.check()
    assert decodes.graphs.dispatcher.num_replayed == 15


def test_v0_recording_and_replaying_writes_only_real_slots():
    decodes = Decodes(5)
    for pool in decodes.pools: pool[:, 0] = pool[:, 63] = 7.0     # block 0: what the padding's tables point at
    before = [pool.clone() for pool in decodes.pools]
    decodes.step()
    for old, new in zip(before, decodes.pools):
        assert (old != new).flatten(3).any(-1).sum(dim=(1, 2)).tolist() == [5, 5]
    decodes.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_v0_padding_reads_garbage_and_hurts_nobody(value):
    decodes = Decodes(3)
    for pool in decodes.pools: pool[:, 0] = value
    for _ in range(4): decodes.step()
    decodes.check()


@pytest.mark.parametrize("name, argument", [
    ("input_ids", 0), ("positions", 1), ("query_start_loc", 2), ("seq_lens", 3), ("block_table", 4), ("slot_mapping", 5)])
def test_field_vllm_11596_v0_buffers_are_filled_not_replaced(name, argument):
    decodes = Decodes()
    buffers, step = decodes.graphs.buffers, decodes.prepare()
    here = getattr(buffers, name)
    setattr(buffers, name, here.clone())
    with pytest.raises(GraphError, match=f"argument {argument} was rebound"): decodes.run(step)
    setattr(buffers, name, here)
    for _ in range(3): decodes.step()
    decodes.check()


def test_planted_v0_other_pools():
    "The pools are recorded, too: a cache that was made again needs new recordings."
    decodes = Decodes()
    step, decodes.pools = decodes.prepare(), [pool.clone() for pool in decodes.pools]
    with pytest.raises(GraphError, match="argument 6 was rebound"): decodes.run(step)


def test_planted_v0_a_padded_row_with_a_slot():
    decodes = Decodes()
    step, before = decodes.prepare(), [pool.clone() for pool in decodes.pools]
    step.attn_metadata.slot_mapping[3] = 40
    with pytest.raises(GraphError, match="row 3 is padding and would write slot 40"): decodes.run(step)
    assert all(map(torch.equal, before, decodes.pools))


def test_planted_v0_a_missed_size_and_a_second_recording():
    decodes = Decodes()
    forgotten = decodes.graphs.graphs.graphs.pop(4)
    with pytest.raises(GraphError, match=r"size 4 was not recorded, only \[1, 2, 8, 16\]"): decodes.step()
    with pytest.raises(AssertionError): decodes.graphs.check_invariants()
    decodes.graphs.graphs.graphs[4] = forgotten
    with pytest.raises(GraphError, match="size 16 is recorded"): decodes.graphs.warm_up(decodes.pools)


def test_planted_v0_starts_that_do_not_count():
    decodes = Decodes()
    decodes.graphs.buffers.query_start_loc[2] = 1
    with pytest.raises(AssertionError): decodes.graphs.check_invariants()


def test_v0_no_list_of_a_step_reaches_a_recording(monkeypatch):
    "Attention inside of a replay sees the static tensors and numbers that hold for every step of the size."
    from minengine.attention import layer
    decodes, seen = Decodes(), []
    def attend(query, cache, metadata, scale, window, out):
        seen.append((metadata.seq_lens_cpu, metadata.query_start_loc_cpu, dict(metadata.plans)))
        assert metadata.max_seq_len == 128 and metadata.max_query_len == 1 and metadata.num_tokens == 4
        assert metadata.seq_lens.data_ptr() == decodes.graphs.buffers.seq_lens.data_ptr()
        assert metadata.block_table.shape == (4, 128 // v0_tiny.BLOCK)
        found = layer.reference_attention(query, cache, metadata, scale, window, out)
        metadata.seq_lens_cpu = metadata.query_start_loc_cpu = None
        return found
    monkeypatch.setattr(layer, "get_attention_backend", lambda name: (layer._by_slots(layer.write_kv), attend))
    decodes.step()
    assert seen == [(None, None, {})] * v0_tiny.LAYERS
    monkeypatch.undo()
    decodes.check()


def test_v0_limits():
    "Longer than recorded, a prompt among them, more than any size: eagerly, and without padding."
    decodes = Decodes(max_num_seqs=3)
    assert decodes.graphs.dispatcher.sizes == [1, 2, 4]
    assert [decodes.graphs.num_rows(*step) for step in ((3, 128), (3, 129), (4, 5), (5, 5))] == [4, 3, 4, 5]
    decodes.graphs.max_seq_len = 6     # the three sequences have 4, 5 and 6 tokens now
    decodes.step()
    assert decodes.graphs.dispatcher.num_replayed == 1
    decodes.step()
    assert (decodes.graphs.dispatcher.num_replayed, decodes.graphs.dispatcher.num_eager) == (1, 2)
    decodes.check()


def test_v0_window_of_what_is_recorded():
    def made(max_model_len, **config):
        config = v0_tiny.tiny_config(use_cudagraph=True, **config)
        config.model_config.max_model_len = max_model_len
        return make_decode_graphs(config, v0_tiny.tiny_model())
    long, short = made(2 * MAX_SEQ_LEN_TO_CAPTURE), made(126)
    assert (long.max_seq_len, short.max_seq_len) == (MAX_SEQ_LEN_TO_CAPTURE, 126)
    assert (long.buffers.block_table.shape, short.buffers.block_table.shape) == ((16, MAX_SEQ_LEN_TO_CAPTURE // 4), (16, 32))
    assert made(126, enforce_eager=True) is None
    assert make_decode_graphs(v0_tiny.tiny_config(), v0_tiny.tiny_model()) is None


def test_v0_a_table_that_is_wider_than_the_recorded_one():
    "Bursts take blocks ahead, perhaps beyond the last position; only those that are read matter."
    decodes = Decodes(2)
    for seq in decodes.seqs: seq.blocks += list(range(40, 70))     # 38 blocks, 32 are recorded
    for _ in range(3): decodes.step()
    decodes.check()
    assert decodes.graphs.dispatcher.num_replayed == 3


# --- whole engines -------------------------------------------------------------------------------------

@pytest.fixture
def recorded_v1(monkeypatch):
    "V1's pieces are recorded without being compiled first: exact, and quick."
    monkeypatch.setattr(minengine.v1.worker.worker, "make_run_model", record_only)


@pytest.mark.parametrize("family", FAMILIES)
def test_v1_with_graphs_equals_transformers(family, recorded_v1):
    "Chunks, hits and preemption, at once; then the same again, larger, alone: nothing is captured a second time."
    running = Running(make_args(make_model(family)[0], compilation_config=ON["v1"] | dict(cudagraph_capture_sizes=[1, 4, 8, 16])))
    graphs = runner_of(running).run_model
    assert generate(running, some_prompts()) == wanted(family)
    assert running.num_preempted > 0 and running.num_cached > 0
    num_captured = counters["stats"]["unique_graphs"]
    for prompt, tokens in list(zip(some_prompts(), wanted(family)))[:3]: assert generate(running, [prompt]) == [tokens]
    dispatcher, report = graphs.dispatcher, graphs.compiled.report
    assert dispatcher.num_replayed > 60 and dispatcher.num_eager > 3, "steps of more than 16 tokens were meant to be there"
    assert report.num_graphs == 1 and counters["stats"]["unique_graphs"] == num_captured
    graphs.check_invariants()
    running.engine.shutdown()


V0_KINDS = {
    "plain": dict(small_pool=False), "chunks": dict(enable_chunked_prefill=True, max_num_batched_tokens=16),
    "cache": dict(enable_prefix_caching=True, preemption_mode="recompute"), "swap": dict(preemption_mode="swap"),
    "bursts": dict(num_scheduler_steps=4, enable_prefix_caching=True), "late": dict(use_async_output_proc=True, small_pool=False)}


@pytest.mark.parametrize("kind", V0_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_v0_with_graphs_equals_transformers(family, kind):
    running = Running(make_args(make_model(family)[0], "v0", compilation_config=ON["v0"], **V0_KINDS[kind]))
    graphs = runner_of(running).decode_graphs
    assert isinstance(graphs, DecodeGraphs) and graphs.dispatcher.sizes == [1, 2, 4, 8]
    assert generate(running, some_prompts()) == wanted(family)
    if V0_KINDS[kind].get("small_pool", True): assert running.num_preempted > 0, "the pool was meant to be too small"
    assert graphs.dispatcher.num_replayed > 20 and graphs.dispatcher.num_eager > 2
    assert running.engine.startup_summary()["num_graph_sizes"] == 4
    graphs.check_invariants()
    running.engine.shutdown()


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_a_fault_in_a_running_engine_is_no_silent_nonsense(engine, recorded_v1):
    running = Running(make_args(make_model("llama")[0], engine, compilation_config=ON[engine]))
    runner = runner_of(running)
    assert generate(running, some_prompts()[:1]) == wanted("llama")[:1]
    if engine == "v0": runner.decode_graphs.buffers.positions = runner.decode_graphs.buffers.positions.clone()
    else: runner.buffers.positions = type(runner.buffers.positions)(24, dtype=torch.int64)
    with pytest.raises(Exception, match="argument . was rebound"): generate(running, some_prompts()[1:2])


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_enforce_eager_and_no_config_record_nothing(engine):
    for options in (dict(enforce_eager=True), {}):
        running = Running(make_args(make_model("llama")[0], engine, **options))
        runner = runner_of(running)
        assert (runner.decode_graphs is None) if engine == "v0" else (runner.run_model is runner.model)
        assert "num_graph_sizes" not in running.engine.startup_summary()
        running.engine.shutdown()


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_the_start_says_what_was_prepared(engine, recorded_v1, capsys):
    args = make_args(make_model("llama")[0], engine, compilation_config=ON[engine])
    llm = LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    table = capsys.readouterr().err
    assert f"  graphs             0.0 MiB   steps of {dict(v0=4, v1=5)[engine]} sizes are recorded\n" in table
    assert ("s     3 programs, 0 of them found in the cache\n" in table) == (engine == "v1")
    llm.llm_engine.shutdown()
    llm = LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)} | dict(compilation_config=0))
    table = capsys.readouterr().err
    assert "KV cache" in table and "graphs" not in table and "compiled" not in table
    llm.llm_engine.shutdown()


def test_level_0_runs_the_model_itself():
    model = v1_tiny.tiny_model()
    assert make_run_model(model, CompilationConfig(), 64, "cpu") is model
