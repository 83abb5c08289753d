"""A recording says what happened, changes nothing, costs little, and is gone when it is off.

What a trace says of each step is compared with a look at the living scheduler after that step.
"""
import json
import random

import pytest
from front_tiny import make_folder

from minengine.llm import LLM
from minengine.record import Hooks, measure_cost, record
from minengine.replay import film, replay, view_lives, view_steps
from minengine.sampling_params import SamplingParams
from minengine.snapshot import snapshot
from minengine.trace import Trace, TraceState, life_of, own_times

ENGINES = {
    "v1": dict(engine="v1", num_preallocate_tokens=0),
    "v1-preallocate": dict(engine="v1", num_preallocate_tokens=16),
    "v1-no-cache": dict(engine="v1", enable_prefix_caching=False),
    "v1-small-budget": dict(engine="v1", max_num_batched_tokens=16),
    "v0": dict(engine="v0"),
    "v0-cache": dict(engine="v0", enable_prefix_caching=True),
    "v0-chunked": dict(engine="v0", enable_chunked_prefill=True, max_num_batched_tokens=24),
    "v0-chunked-cache": dict(engine="v0", enable_chunked_prefill=True, max_num_batched_tokens=24,
                             enable_prefix_caching=True),
    "v0-swap": dict(engine="v0", preemption_mode="swap", swap_space=0.001),
    "v0-swap-cache": dict(engine="v0", preemption_mode="swap", swap_space=0.001, enable_prefix_caching=True),
    "v0-burst": dict(engine="v0", num_scheduler_steps=3),
    "v0-async": dict(engine="v0", use_async_output_proc=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("record") / "tiny")


def make(folder, blocks=16, **kw) -> LLM:
    "Few blocks of eight tokens: preemption is never far away."
    args = dict(load_format="dummy", tokenizer="byte", block_size=8, num_gpu_blocks_override=blocks, max_num_seqs=4,
                max_model_len=80, enforce_eager=True, use_tqdm_on_load=False) | kw
    return LLM(folder, **args)


def scheduler_of(llm):
    engine = llm.llm_engine
    return engine.scheduler if llm.engine_name == "v0" else engine.engine_core.engine_core.scheduler


def params(max_tokens, **kw): return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kw)


def random_run(llm, seed, num_requests=10):
    "Requests that come and go by chance, some with a common beginning; yields after each step."
    rng, engine, left, n = random.Random(seed), llm.llm_engine, num_requests, 0
    shared = [rng.randrange(200) for _ in range(17)]
    while left or engine.has_unfinished_requests():
        while left and (rng.random() < 0.3 or not engine.has_unfinished_requests()):
            prompt = shared[:rng.randrange(18)] + [rng.randrange(200) for _ in range(rng.randrange(1, 25))]
            engine.add_request(f"R{n}", {"prompt_token_ids": prompt}, params(rng.randrange(1, 24)))
            left, n = left - 1, n + 1
        if n > 3 and rng.random() < 0.05: engine.abort_request(f"R{rng.randrange(n)}")
        yield engine.step()


@pytest.mark.parametrize("name", ENGINES)
def test_trace_equals_what_was_seen(name, folder):
    "After every step: the same blocks, tables and queues as the living scheduler; all steps, forward and back."
    llm = make(folder, **ENGINES[name])
    scheduler, seen = scheduler_of(llm), []
    with record(llm) as trace:
        for _ in random_run(llm, seed=len(name)):
            scheduler.check_invariants()
            seen.append(snapshot(scheduler))
    llm.shutdown()
    assert len(trace.steps) == len(seen) and not trace.truncated
    trace.check_invariants()
    state = TraceState(trace)
    for i, (step, look) in enumerate(zip(trace.steps, seen)):
        state.plan(step)
        state.finish(step)
        now = state.scheduler()
        by_name = [{t.name: t.block_ids for t in p.tables} for p in now.pools]
        # Aborts are known to a trace in the next step, where their blocks are missed.
        for pool, live, tables in zip(now.pools, look.pools, by_name):
            assert {t.name: t.block_ids for t in live.tables} == tables, f"step {i}"
            assert pool.findable == live.findable, f"step {i}"
            assert pool.counts() == live.counts(), f"step {i}"
        # These look at a step's tokens one step late, or at several at once.
        if name in ("v0-async", "v0-burst"): continue
        assert {q: [r.name for r in rs] for q, rs in now.queues.items()} == {
            q: [r.name for r in rs] for q, rs in look.queues.items()}, f"step {i}"
        assert now.queues == look.queues, f"step {i}"


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_a_trace_of_many_seeds_ends_empty(engine, folder):
    llm = make(folder, engine=engine, enable_prefix_caching=True)
    for seed in range(5):
        with record(llm) as trace:
            for _ in random_run(llm, seed): pass
        trace.check_invariants()
        play = replay(trace, len(trace.steps))
        assert play.state.pools()[0].counts()["used"] == 0
        assert not any(play.state.queues.values()) and not play.state.requests
        assert play.state.pools()[0] == snapshot(scheduler_of(llm)).pools[0]
    llm.shutdown()


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_tokens_and_lives(engine, folder):
    "What the trace says of tokens is what the user got, with and without a recording."
    llm = make(folder, engine=engine)
    prompts = [[7] * 20, [9] * 33, [11] * 6]
    alone = llm.generate(prompt_token_ids=prompts, sampling_params=params(9), use_tqdm=False)
    with record(llm) as trace:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params(9), use_tqdm=False)
    llm.shutdown()
    for before, output in zip(alone, outputs):
        answer, name = output.outputs[0], output.request_id
        assert before.outputs[0].token_ids == answer.token_ids
        sampled = [t for step in trace.steps for t in step.sampled.get(name, [])]
        assert sampled[:len(answer.token_ids)] == list(answer.token_ids)
        assert trace.requests[name].text == answer.text
        assert trace.requests[name].num_prompt_tokens == len(output.prompt_token_ids)
        life = life_of(trace, name)
        assert life[-1].ended == "length" and [s.ended for s in life[:-1]] == [""] * (len(life) - 1)
        computed = sum(s.num_tokens for s in life if s.what == "prefill")
        assert computed + (output.num_cached_tokens or 0) >= len(output.prompt_token_ids)
        assert [s.step for s in life] == list(range(life[0].step, life[-1].step + 1))


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_several_answers_have_names(engine, folder):
    llm = make(folder, blocks=32, engine=engine, seed=1)
    several = SamplingParams(n=3, max_tokens=5, seed=3, ignore_eos=True)
    with record(llm) as trace: outputs = llm.generate([[7] * 12], several, use_tqdm=False)
    llm.shutdown()
    trace.check_invariants()
    ended = {name for step in trace.steps for name in step.ended}
    assert len(ended) == 3 and ended == set(trace.requests)
    assert sorted(r.text for r in trace.requests.values()) == sorted(c.text for c in outputs[0].outputs)


def hooked_objects(llm):
    engine = llm.llm_engine
    if llm.engine_name == "v0":
        s, worker = engine.scheduler, engine.executor.driver_worker
        return [engine, s, engine.executor, worker, worker.model_runner, engine.output_queue,
                *s.block_manager.block_allocator.allocators.values()]
    core = engine.engine_core.engine_core
    runner = core.executor.worker.model_runner
    return [engine, core, core.scheduler, core.executor, runner, runner.buffers, engine.output_processor,
            core.scheduler.kv_cache_manager.pool.cached]


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_off_is_off(engine, folder):
    "No attribute, no class and no other engine is touched once the recording has ended."
    llm, other = make(folder, engine=engine), make(folder, engine=engine)
    objects = hooked_objects(llm)
    classes = {type(o): dict(vars(type(o))) for o in objects}
    before = [{n for n, v in vars(o).items() if callable(v)} for o in objects]
    recording = record(llm)
    on = [{n for n, v in vars(o).items() if getattr(v, "is_hook", False)} for o in objects]
    assert sum(map(len, on)) >= 12
    assert not any(getattr(v, "is_hook", False) for o in hooked_objects(other) for v in vars(o).values())
    assert all(dict(vars(kind)) == old for kind, old in classes.items())
    llm.generate([[5] * 9], params(3), use_tqdm=False)
    trace = recording.stop()
    assert recording.stop() is trace and len(trace.steps) >= 3
    assert [{n for n, v in vars(o).items() if callable(v)} for o in objects] == before
    num = len(trace.steps)
    llm.generate([[5] * 9], params(3), use_tqdm=False)
    assert len(trace.steps) == num
    llm.shutdown()
    other.shutdown()


def test_hooks_come_off_in_any_case():
    class Thing:
        def work(self): return 1
    thing, hooks = Thing(), Hooks()
    thing.work = earlier = lambda: 2   # somebody else's
    hooks.wrap(thing, "work", lambda call: lambda: call() + 10)
    assert thing.work() == 12
    hooks.remove()
    hooks.remove()
    assert thing.work is earlier


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_one_recording_at_a_time(engine, folder):
    llm = make(folder, engine=engine)
    with record(llm) as trace:
        with pytest.raises(ValueError, match="is being recorded already"): record(llm)
        llm.generate([[5] * 9], params(3), use_tqdm=False)
    assert len(trace.steps) >= 3
    with record(llm) as again: llm.generate([[5] * 9], params(3), use_tqdm=False)
    assert len(again.steps) >= 3
    llm.shutdown()


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_recording_begins_in_the_middle(engine, folder):
    llm = make(folder, engine=engine)
    run = random_run(llm, seed=3)
    for _ in range(6): next(run)
    with record(llm) as trace:
        for _ in run: pass
    trace.check_invariants()
    assert any(trace.start.queues.values())
    assert replay(trace, len(trace.steps)).state.pools()[0] == snapshot(scheduler_of(llm)).pools[0]
    llm.shutdown()


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_a_step_that_fails_is_recorded(engine, folder):
    llm = make(folder, engine=engine)
    with record(llm) as trace:
        runner = (llm.llm_engine.executor.driver_worker if engine == "v0"
                  else llm.llm_engine.engine_core.engine_core.executor.worker).model_runner
        llm.llm_engine.add_request("A", {"prompt_token_ids": [5] * 9}, params(3))
        run, runner.run_model = runner.run_model, lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError): llm.llm_engine.step()
        runner.run_model = run
    assert trace.steps[-1].failed == "ZeroDivisionError: division by zero"
    assert "failed: ZeroDivisionError" in repr(view_steps(trace))
    assert not any(getattr(v, "is_hook", False) for o in hooked_objects(llm) for v in vars(o).values())
    assert llm.generate([[5] * 9], params(3), use_tqdm=False)[0].finished
    llm.shutdown()


def test_a_long_recording_ends_by_itself(folder):
    llm = make(folder)
    with record(llm, max_steps=4) as trace: llm.generate([[5] * 9], params(12), use_tqdm=False)
    assert len(trace.steps) == 4 and trace.truncated
    trace.check_invariants()
    llm.shutdown()


def test_what_cannot_be_recorded(folder):
    with pytest.raises(TypeError, match="an LLM or one of its engines, got str"): record("llm")
    llm = make(folder, enable_multiprocessing=True)
    try:
        with pytest.raises(ValueError, match="enable_multiprocessing=False"): record(llm)
    finally: llm.shutdown()


@pytest.fixture(scope="module")
def traces(folder) -> list[Trace]:
    found = []
    for engine in ("v0", "v1"):
        llm = make(folder, engine=engine, enable_prefix_caching=True)
        with record(llm) as trace:
            for _ in random_run(llm, seed=1): pass
        llm.shutdown()
        found.append(trace)
    return found


def test_files(traces, tmp_path):
    for trace in traces:
        trace.save(tmp_path / "trace.json")
        assert Trace.load(tmp_path / "trace.json") == trace
        size = (tmp_path / "trace.json").stat().st_size
        assert size < 3000 * len(trace.steps)
    (tmp_path / "trace.json").write_text('{"start": 1}')
    with pytest.raises(ValueError, match="trace.json is no trace"): Trace.load(tmp_path / "trace.json")


def test_chrome_trace(traces, tmp_path):
    "What Perfetto asks for: names for all threads, times that nest, numbers in the curves."
    v0, v1 = traces
    v0.to_chrome_trace(tmp_path / "both.json", v1)
    found = json.loads((tmp_path / "both.json").read_text())
    events = found["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["V0 engine", "V0 requests", "V1 engine", "V1 requests"]
    for e in events:
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int) and e["name"]
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and (e["pid"], e["tid"]) in threads
        if e["ph"] == "C": assert all(isinstance(v, (int, float)) for v in e["args"].values())
    for pid, tid in threads: check_nesting([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)])
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ") and e["pid"] == 1]
    assert len(steps) == len(v0.steps)


def check_nesting(events):
    "Two events of a thread lie within each other, or apart."
    ends = []
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while ends and ends[-1] <= e["ts"] + 1e-6: ends.pop()
        end = e["ts"] + e["dur"]
        assert not ends or end <= ends[-1] + 1e-6, e
        ends.append(end)


def test_times_add_up(traces):
    for trace in traces:
        for step in trace.steps:
            own = own_times(step.spans)
            assert min(own.values()) >= 0 and sum(own.values()) == step.duration_ns
            assert {"step", "schedule", "execute", "model"} <= own.keys()


def test_replay_goes_both_ways(traces):
    for trace in traces:
        play, texts = replay(trace), []
        for i in range(len(trace.steps) + 1):
            assert play.goto(i).index == i
            texts.append(repr(play))
        for i in reversed(range(len(trace.steps))): assert repr(play.back()) == texts[i]
        with pytest.raises(IndexError, match="step -1, the trace has steps 0 to"): play.back()
        assert "step 0" in texts[0] and "The end" in texts[-1]


def test_pictures_of_a_trace(traces):
    for trace in traces:
        names = set(trace.requests)
        for view in (view_steps(trace), view_lives(trace), film(trace, 0, 3), replay(trace, 2).view):
            html = view._repr_html_()
            assert "<script" not in html and " id=" not in html and "aria-label" in html and repr(view)
        assert names == {line.split()[0].removeprefix("#") for line in repr(view_lives(trace)).splitlines()[2:]}
        with pytest.raises(IndexError, match="the trace has"): view_steps(trace, 0, 10**6)


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_on_costs_less_than_a_twentieth(engine, folder):
    "Measured in pairs, on the same steps of the same engine; a noisy machine gets three tries."
    llm = make(folder, blocks=512, engine=engine, max_num_seqs=32)
    ratios = []
    for _ in range(3):
        ratios.append(measure_cost(llm, num_seqs=16, num_tokens=48)["ratio"])
        if ratios[-1] < 1.05: break
    llm.shutdown()
    assert min(ratios) < 1.05, ratios
