"""Compiled engines give the tokens of eager ones, compile once, and find their programs again.

All tests of a run share one folder of compiled code: the first that needs a
program waits for the C++ compiler. Tests named `test_field_…` are rows of the
field reports.
"""
import dataclasses
import gc
import os
import weakref

import pytest
import torch
from compiled_tiny import FAMILIES, Running, generate, make_args, make_model, runner_of, some_prompts, wanted
from test_equality import OUTPUT_TOKENS, chat_prompts, default_model, expected
from torch import fx
from torch._dynamo.utils import counters

import minengine.attention.layer
import minengine.v1.worker.cuda_graph
import minengine.v1.worker.worker
from minengine.attention.metadata import set_forward_context
from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.model.checkpoint import compilation_config, create_engine_config
from minengine.sampling_params import SamplingParams
from minengine.v1.compilation import CompiledModel, PiecewiseBackend, inductor_cache, is_attention, piece_text, split_at_attention
from minengine.v1.worker.cuda_graph import PieceGraphs

PROFILE = None, [], "cpu"   # a forward context without caches


def as_it_is(piece, example_inputs): return piece


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> str:
    "One folder of compiled code for all processes of a test run."
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ: base = base.parent
    return str(base / "compiled")


class Watched(PiecewiseBackend):
    "Keeps what PyTorch assumed about sizes while it compiled."
    made: list["Watched"] = []

    def __call__(self, graph, example_inputs):
        call = super().__call__(graph, example_inputs)
        self.shapes = torch._guards.detect_fake_mode(example_inputs).shape_env
        self.num_tokens = next(node.meta["example_value"] for node in graph.graph.nodes
                               if isinstance(node.meta.get("example_value"), torch.SymInt)).node.expr
        Watched.made.append(self)
        return call


def compiled_args(folder, cache_dir, graphs=False, **options) -> EngineArgs:
    sizes = dict(use_cudagraph=True, cudagraph_capture_sizes=[1, 4, 8, 16]) if graphs else {}
    return make_args(folder, compilation_config=dict(level=3, cache_dir=cache_dir) | sizes, **options)


# --- the same tokens -------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_eager_and_a_second_start_finds_every_program(family, cache_dir, monkeypatch):
    "In float32, token for token; chunks, hits and preemption included; then again with graphs, from the cache."
    monkeypatch.setattr(minengine.v1.worker.cuda_graph, "PiecewiseBackend", Watched)
    for graphs in (False, True):
        running = Running(compiled_args(make_model(family)[0], cache_dir, graphs))
        compiled, num_captured = runner_of(running).run_model.compiled, counters["stats"]["unique_graphs"]
        assert generate(running, some_prompts()) == wanted(family)
        assert running.num_preempted > 0 and running.num_cached > 0
        for prompt, tokens in list(zip(some_prompts(), wanted(family)))[:2]: assert generate(running, [prompt]) == [tokens]
        report, summary = compiled.report, running.engine.startup_summary()
        assert (report.num_graphs, report.num_pieces, report.num_compiled) == (1, 5, 3)
        assert counters["stats"]["unique_graphs"] == num_captured, "something was captured after the start"
        assert summary["num_programs"] == 3 and summary["compile_seconds"] == report.seconds > 0
        backend = compiled.backend
        assumed = [guard.expr for guard in backend.shapes.guards if backend.num_tokens in guard.expr.free_symbols]
        # Nobody asks again before a step, so nothing may be taken for granted of its size.
        assert not assumed and str(backend.shapes.var_to_range[backend.num_tokens]) == "VR[2, int_oo]"
        running.engine.shutdown()
    assert report.num_cache_hits == summary["num_cached_programs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("budget, caching, small_pool", [(24, False, True), (64, True, False), (2048, False, False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_eager_in_more_ways(family, budget, caching, small_pool, cache_dir):
    for pack in (True, False):
        running = Running(compiled_args(
            make_model(family)[0], cache_dir, graphs=True, small_pool=small_pool, max_num_batched_tokens=budget,
            enable_prefix_caching=caching, pack_cpu_weights=pack))
        assert generate(running, some_prompts(), late=budget == 64) == wanted(family)
        assert runner_of(running).run_model.compiled.report.num_graphs == 1
        running.engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
@pytest.mark.parametrize("budget, caching, small_pool", [(48, True, True), (2048, True, False), (16, False, False)])
def test_smollm2_compiled_equals_transformers(budget, caching, small_pool, graphs, cache_dir):
    longest = max(map(len, chat_prompts())) + OUTPUT_TOKENS
    args = dataclasses.replace(
        compiled_args(default_model()[0], cache_dir, graphs, max_num_batched_tokens=budget, enable_prefix_caching=caching),
        block_size=16, max_model_len=longest, num_gpu_blocks_override=(longest * 5 // 2 if small_pool else 4096) // 16)
    running = Running(args)
    assert generate(running, chat_prompts(), OUTPUT_TOKENS) == expected()
    if small_pool: assert running.num_preempted > 0, "the pool was meant to be too small"
    report = runner_of(running).run_model.compiled.report
    assert (report.num_graphs, report.num_pieces, report.num_compiled) == (1, 61, 3)
    running.engine.shutdown()


# --- several engines --------------------------------------------------------------------------------

def test_two_compiled_engines_side_by_side(cache_dir):
    "Step by step in turn, two families and the same one twice: each has its own weights and counts."
    folders = {family: make_model(family)[0] for family in ("llama", "mistral")}   # one shape: they share programs
    engines = [Running(compiled_args(folders[family], cache_dir, graphs)) for family, graphs in
               (("llama", False), ("mistral", True), ("llama", True))]
    tokens = [generate(engine, some_prompts()[:1]) for engine in engines]       # one after the other
    assert tokens == [wanted(family)[:1] for family in ("llama", "mistral", "llama")]
    tokens = interleave(engines, some_prompts()[1:4])
    assert tokens == [wanted(family)[1:4] for family in ("llama", "mistral", "llama")]
    assert [runner_of(engine).run_model.compiled.report.num_graphs for engine in engines] == [1, 1, 1]
    for engine in engines: engine.engine.shutdown()


def interleave(engines, prompts):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    found = [{} for _ in engines]
    for i, prompt in enumerate(prompts):
        for running in engines: running.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while any(running.engine.has_unfinished_requests() for running in engines):
        for running, tokens in zip(engines, found):
            for out in running.engine.step():
                if out.finished: tokens[int(out.request_id)] = out.outputs[0].token_ids
    return [[tokens[i] for i in range(len(prompts))] for tokens in found]


def test_more_models_than_dynamo_compiles_again():
    "Each brings its own code to be captured: the tenth of a process is compiled like the first, the same one or another."
    toy, ids, positions = Toy(), torch.arange(5, dtype=torch.int32), torch.arange(5)
    alive = []
    with torch.inference_mode(), set_forward_context(*PROFILE):
        for i in range(torch._dynamo.config.recompile_limit + 2):
            for model in (toy, Toy()):
                compiled = CompiledModel(model, PiecewiseBackend(as_it_is))
                alive.append(compiled)
                for n in (3, 5): assert torch.equal(compiled(ids[:n], positions[:n]), toy(ids[:n], positions[:n])), i
                assert compiled.report.num_graphs == 1


def test_an_engine_beside_the_users_own_compiling(cache_dir, monkeypatch):
    "Dynamo's settings and the cache's place are the user's again afterwards."
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/users/own")
    before = torch._dynamo.config.specialize_float, torch._inductor.config.size_asserts
    running = Running(compiled_args(make_model("llama")[0], cache_dir))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/users/own"
    assert (torch._dynamo.config.specialize_float, torch._inductor.config.size_asserts) == before
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    x = torch.arange(4.)
    assert torch.compile(lambda x: x * 2.5, backend=lambda graph, inputs: graph)(x).tolist() == [0, 2.5, 5, 7.5]
    assert generate(running, some_prompts()[:1]) == wanted("llama")[:1]
    running.engine.shutdown()


# --- the cache of compiled code -----------------------------------------------------------------------

def test_the_place_of_the_cache(tmp_path, monkeypatch):
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(name, "before")
    with inductor_cache(tmp_path / "a"):
        assert os.environ[name] == str(tmp_path / "a")
        with inductor_cache(None): assert os.environ[name] == str(tmp_path / "a")
        with pytest.raises(ZeroDivisionError), inductor_cache(tmp_path / "b"): raise ZeroDivisionError
        assert os.environ[name] == str(tmp_path / "a")
    assert os.environ[name] == "before"
    monkeypatch.delenv(name)
    with inductor_cache("~/x"): assert os.environ[name] == os.path.expanduser("~/x")
    assert name not in os.environ


@pytest.mark.parametrize("named", [True, False])
def test_the_users_cache_unless_another_is_named(named, tmp_path, monkeypatch):
    places = []
    def compile_piece(piece, inputs):
        places.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return piece
    def make(model, config, most, device, cache_dir):
        return PieceGraphs(model, [], device, config.cache_dir or cache_dir, compile_piece)
    monkeypatch.setattr(minengine.v1.worker.worker, "make_run_model", make)
    monkeypatch.setenv("MINENGINE_CACHE", str(tmp_path / "users"))
    own = dict(cache_dir=str(tmp_path / "named")) if named else {}
    running = Running(make_args(make_model("llama")[0], compilation_config=dict(level=3) | own))
    assert set(places) == {str(tmp_path / "named") if named else str(tmp_path / "users" / "compiled")} and len(places) == 3
    running.engine.shutdown()


def test_the_cache_survives_a_restart(cache_dir):
    "A core in a new process finds what this one has compiled, and gives the same tokens."
    args = compiled_args(make_model("llama")[0], cache_dir)
    Running(args).engine.shutdown()
    llm = LLM(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)} | dict(enable_multiprocessing=True))
    try:
        summary = llm.llm_engine.startup_summary()
        assert (summary["num_programs"], summary["num_cached_programs"]) == (3, 3)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([some_prompts()[0]], params, use_tqdm=False)
        assert output.outputs[0].token_ids == wanted("llama")[0]
    finally: llm.llm_engine.shutdown()


CHANGES = {   # of a Llama; how many of its three programs the plain one has, too
    "another norm": ('{"rms_norm_eps": 0.125}', {}, 0),
    "a wider MLP": ('{"intermediate_size": 80}', {}, None),   # a packed weight's size is a symbol: perhaps all
    "a wider MLP, not packed": ('{"intermediate_size": 80}', dict(pack_cpu_weights=False), 1),   # up to the first attention
    "one layer more": ('{"num_hidden_layers": 3}', {}, 3),
    "another rotation": ('{"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}', {}, 3),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "not packed" in n else n for n in CHANGES])
def test_field_vllm_28759_vllm_14953_vllm_53366_a_changed_model_gets_its_own_programs(name, cache_dir):
    "Every constant counts: what differs is compiled again, what is equal is found, and the tokens are the model's own."
    changes, options, num_shared = CHANGES[name]
    plain = Running(compiled_args(make_model("llama")[0], cache_dir, **options))      # the cache knows the plain one
    plain.engine.shutdown()
    running = Running(compiled_args(make_model("llama", changes)[0], cache_dir, **options))
    report = runner_of(running).run_model.compiled.report
    assert report.num_compiled == 3 and num_shared in (None, report.num_cache_hits)
    assert generate(running, some_prompts()) == wanted("llama", changes) != wanted("llama")
    running.engine.shutdown()


# --- splitting, and which pieces are equal ----------------------------------------------------------------

class Toy(torch.nn.Module):
    "Two calls of attention in a row of plain operators, as in vLLM's own test."

    def forward(self, input_ids, positions):
        x = input_ids.float() * 1.0
        for layer in range(2):
            x, query = x + 1, x.view(-1, 1, 1)
            output = torch.empty_like(query)
            torch.ops.minengine.attention(query, query, query, output, layer, 1.0, None)
            x = x + output.view(-1)
        return x * 2 + positions


def test_v073_2_19_pieces_captures_and_calls(monkeypatch):
    "[T] 1 graph, 5 pieces, 3 compiled; sizes 2 and 4 are recorded once each; then only attention runs anew."
    num_attended, num_compiled = [], []
    def attend(query, key, value, output, layer, scale, window):
        num_attended.append(layer)
        output.copy_(query * 10)
    monkeypatch.setattr(minengine.attention.layer, "_run_attention", attend)
    def compile_piece(piece, inputs):
        num_compiled.append(piece)
        return piece
    graphs, toy = PieceGraphs(Toy(), [2, 4], compile_piece=compile_piece), Toy()
    ids, positions = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    graphs.warm_up(ids, positions, "cpu")
    report = graphs.compiled.report
    assert (report.num_graphs, report.num_pieces, len(num_compiled), len(graphs.pieces)) == (1, 5, 3, 3)
    assert sum(len(piece.graphs) for piece in graphs.pieces) == 6
    for n in (2, 8, 4, 2, 7):
        num_attended.clear()
        ids[:n], positions[:n] = torch.arange(n), torch.arange(n) + 5
        size = graphs.num_input_tokens(n)
        with torch.inference_mode(), set_forward_context(*PROFILE): found = graphs(ids[:size], positions[:size])[:n]
        assert num_attended == [0, 1]
        assert torch.equal(found, toy(ids[:n], positions[:n]))
    assert (report.num_graphs, len(num_compiled)) == (1, 3)
    assert (graphs.dispatcher.num_replayed, graphs.dispatcher.num_eager) == (3, 2)


def traced(function, *inputs) -> fx.GraphModule:
    "A graph with what Dynamo would know of its inputs."
    graph = fx.symbolic_trace(function)
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, value in zip(places, inputs, strict=True): node.meta["example_value"] = value
    return graph


class Holds(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, x): return x * self.held


X, W = torch.zeros(4, 6), torch.ones(6)
SAME = traced(lambda x, w: x * w + 2, X, W)
DIFFERENT = {
    "another operator": traced(lambda x, w: x * w - 2, X, W), "another constant": traced(lambda x, w: x * w + 3, X, W),
    "a float": traced(lambda x, w: x * w + 2.0, X, W), "another order": traced(lambda x, w: w * x + 2, X, W),
    "another use": traced(lambda x, w: x * x + 2, X, W), "another shape": traced(lambda x, w: x * w + 2, X[:3], W),
    "another type": traced(lambda x, w: x * w + 2, X.double(), W), "other strides": traced(lambda x, w: x * w + 2, X.t().contiguous().t(), W),
    "another device": traced(lambda x, w: x * w + 2, X.to("meta"), W), "a keyword": traced(lambda x, w: torch.add(x * w, 2, alpha=2), X, W),
    "a number": traced(lambda x, w: x * w + 2, X, 6), "nothing": traced(lambda x, w: x, X, W)}


def test_equal_pieces_whatever_their_names():
    assert piece_text(SAME) == piece_text(traced(lambda hidden, weight: hidden * weight + 2, X.clone(), W.clone()))


@pytest.mark.parametrize("name", DIFFERENT)
def test_pieces_that_differ(name):
    texts = [piece_text(graph) for graph in (SAME, *DIFFERENT.values())]
    assert texts.count(piece_text(DIFFERENT[name])) == 1


def test_field_vllm_28759_a_piece_that_holds_a_tensor_is_equal_to_itself_alone():
    "Same name, same shape, other numbers: other programs."
    held, other = torch.ones(6), torch.full((6,), 2.0)
    assert piece_text(traced(Holds(held), X)) == piece_text(traced(Holds(held), X)) != piece_text(traced(Holds(other), X))


def test_a_graph_without_attention_is_one_piece():
    graph = traced(lambda x, w: x * w + 2, X, W)
    (piece,) = split_at_attention(graph).children()
    assert not any(map(is_attention, piece.graph.nodes))


def test_a_single_token_is_refused_before_anything_is_captured():
    compiled = CompiledModel(Toy())
    with pytest.raises(ValueError, match="takes at least 2 tokens, got 1"): compiled(torch.zeros(1), torch.zeros(1))
    assert compiled.report.num_graphs == 0
    compiled.check_invariants()


def test_planted_sizes_that_disagree():
    "`check_invariants` knows a size that was not filled in."
    compiled = CompiledModel(Toy(), PiecewiseBackend(as_it_is))
    with torch.inference_mode(), set_forward_context(*PROFILE):
        compiled(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    compiled.check_invariants()
    compiled._arguments[compiled._places["size"][0]] = 3
    with pytest.raises(AssertionError): compiled.check_invariants()
    compiled._places["ids"] = []
    with pytest.raises(AssertionError): compiled.check_invariants()


# --- switches -----------------------------------------------------------------------------------------------

def resolved(device="cpu", **args) -> tuple[int, bool]:
    config = compilation_config(EngineArgs(**args), device)
    return config.level, config.use_cudagraph


def test_defaults_by_device_and_engine():
    assert resolved() == resolved(engine="v0") == (0, False)
    assert resolved("cuda") == (3, True) and resolved("cuda", engine="v0") == (0, True)
    for engine in ("v0", "v1"): assert resolved("cuda", engine=engine, enforce_eager=True) == (0, False)
    assert resolved(compilation_config=3) == (3, False) and resolved("cuda", compilation_config=3) == (3, True)
    assert resolved("cuda", compilation_config=0) == (0, False)
    assert resolved("cuda", engine="v0", compilation_config=0) == (0, True)
    assert resolved("cuda", compilation_config=dict(use_cudagraph=False)) == (3, False)
    assert resolved(engine="v0", compilation_config=dict(level=0, use_cudagraph=True)) == (0, True)
    assert resolved(enforce_eager=True, compilation_config=0) == (0, False)


@pytest.mark.parametrize("message, args", [
    ("level must be 0 or 3, got 1", dict(compilation_config=1)), ("level must be 0 or 3, got 2", dict(compilation_config=dict(level=2))),
    ("level must be 0 or 3, got '3'", dict(compilation_config="3")), ("level must be 0 or 3, got True", dict(compilation_config=True)),
    ("use_cudagraph must be one of", dict(compilation_config=dict(level=3, use_cudagraph="yes"))),
    ("cudagraph_capture_sizes must be at least 1, got 0", dict(compilation_config=dict(level=3, cudagraph_capture_sizes=[8, 0]))),
    ("cudagraph_capture_sizes must be an integer, got 2.5", dict(compilation_config=dict(level=3, cudagraph_capture_sizes=[2.5]))),
    ("compilation_config: .*cudagraph_sizes", dict(compilation_config=dict(cudagraph_sizes=[8]))),
    ("enforce_eager=True exclude each other", dict(compilation_config=3, enforce_eager=True)),
    ("enforce_eager=True exclude each other", dict(engine="v0", compilation_config=dict(use_cudagraph=True), enforce_eager=True)),
    ("compilation level 3 is V1's; V0 allows 0", dict(engine="v0", compilation_config=3)),
    ("needs compilation level 3", dict(compilation_config=dict(use_cudagraph=True)))])
def test_bad_configs_are_refused(message, args):
    for device in ("cpu", "cuda") if "needs" not in message else ("cpu",):
        with pytest.raises(ValueError, match=message): compilation_config(EngineArgs(**args), device)
    with pytest.raises(ValueError, match=message): create_engine_config(EngineArgs(model=make_model("llama")[0], **args))


def test_enforce_eager_never_calls_the_compiler(monkeypatch):
    def refuse(*args, **kw): raise AssertionError("torch.compile was called")
    monkeypatch.setattr(torch, "compile", refuse)
    for engine in ("v0", "v1"):
        running = Running(make_args(make_model("llama")[0], engine, enforce_eager=True))
        assert generate(running, some_prompts()[:2]) == wanted("llama")[:2]
        assert not {"num_programs", "num_graph_sizes"} & set(running.engine.startup_summary())
        running.engine.shutdown()
    with pytest.raises(AssertionError, match="was called"): Running(make_args(make_model("llama")[0], compilation_config=3))


def test_a_captured_model_can_be_let_go():
    "PyTorch remembers code and compilers for ever; the weights must not hang on them."
    model = Toy().eval()
    compiled = CompiledModel(model, PiecewiseBackend(as_it_is))
    ids, positions = torch.arange(5, dtype=torch.int32), torch.arange(5)
    with torch.inference_mode(), set_forward_context(*PROFILE): compiled(ids, positions)
    alive = weakref.ref(model), weakref.ref(compiled)
    del model, compiled
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
