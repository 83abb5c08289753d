"""The engine core: start-up, the life of requests, failed steps; no model, no text."""
import random
import subprocess
import sys

import pytest
from front_tiny import ToyExecutor, make_config

from minengine.model.memory import fit_max_model_len
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v1.engine.core import EngineCore
from minengine.v1.engine.core_client import (
    AsyncEngineCoreClient, AsyncInprocClient, EngineCoreClient, InprocClient, make_client)
from minengine.v1.engine.llm_engine import LLMEngineV1
from minengine.v1.messages import EngineCoreRequest, FinishReason


def make_core(log_stats=False, executor=ToyExecutor, **config) -> EngineCore:
    return EngineCore(make_config(**config), executor, log_stats)


def make_request(request_id, prompt=(1, 2, 3), max_tokens=4, **params) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, None, list(prompt), SamplingParams(max_tokens=max_tokens, **params), 257, 0.0)


def run(core, max_steps=1000) -> dict[str, list[int]]:
    "Step until nothing is left; tokens by request."
    tokens = {}
    for _ in range(max_steps):
        if not core.scheduler.has_unfinished_requests(): return tokens
        for out in core.step().outputs: tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
        core.check_invariants()
    raise AssertionError(f"not done after {max_steps} steps")


def is_idle(core) -> bool:
    manager = core.scheduler.kv_cache_manager
    return not core.executor.tokens and not core.scheduler.requests and manager.num_free_blocks == core.executor.num_blocks


def queues(core): return len(core.scheduler.waiting), len(core.scheduler.running)


# Start-up

@pytest.mark.parametrize("num_blocks, max_model_len, may_lower, limit", [
    (16, 64, False, 64), (17, 64, False, 64), (16, 65, True, 64), (1, 4096, True, 4)])
def test_fit_max_model_len(num_blocks, max_model_len, may_lower, limit):
    assert fit_max_model_len(num_blocks, 4, max_model_len, may_lower) == limit


@pytest.mark.parametrize("num_blocks, may_lower, advice", [(15, False, "at most 60"), (0, True, "give the cache"), (0, False, "give the cache")])
def test_field_vllm2163_vllm2418_a_pool_too_small_for_one_request(num_blocks, may_lower, advice):
    with pytest.raises(ValueError, match=f"holds {num_blocks * 4} tokens .*max_model_len=64.*{advice}"):
        fit_max_model_len(num_blocks, 4, 64, may_lower)


def test_start_up_refuses_and_lets_the_workers_go():
    made = []
    class Recorded(ToyExecutor):
        def __init__(self, config): super().__init__(config); made.append(self)
    with pytest.raises(ValueError, match="set max_model_len to at most 32"): make_core(executor=Recorded, num_blocks=8)
    assert made[0].closed == 1 and made[0].num_blocks is None


def test_a_limit_nobody_set_is_lowered_everywhere(caplog):
    core = make_core(max_model_len=None, num_blocks=8)
    config = core.vllm_config
    assert config.model_config.max_model_len == config.scheduler_config.max_model_len == core.scheduler.max_model_len == 32
    assert "lowered from 256 to 32" in caplog.text
    core.add_request(make_request("r", range(31), 100))
    assert len(run(core)["r"]) == 1


def test_the_executor_is_asked_when_no_size_is_given():
    core = make_core(num_blocks=None)
    assert core.executor.num_blocks == core.vllm_config.cache_config.num_gpu_blocks == 64


def test_core_imports_no_tokenizer_and_no_torch():
    code = "import sys, minengine.v1.engine.core as c; print([m for m in ('torch', 'transformers', 'minengine.tokenizer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# The life of requests

def test_life_of_requests():
    core = make_core()
    core.add_request(make_request("a"))
    assert queues(core) == (1, 0)
    core.step()
    assert queues(core) == (0, 1)
    core.add_request(make_request("b"))
    core.step()
    assert queues(core) == (0, 2)
    for i in "cd": core.add_request(make_request(i))
    core.step()
    assert queues(core) == (0, 4)
    tokens = run(core)
    assert queues(core) == (0, 0) and tokens["d"] == [5, 6, 7]  # its first came before
    assert is_idle(core)


def test_abort_while_running_and_waiting():
    core = make_core(max_num_seqs=2)
    for i in "abc": core.add_request(make_request(i, max_tokens=50))
    core.step()
    assert queues(core) == (1, 2)
    core.abort_requests(["b", "nobody"])
    assert queues(core) == (1, 1) and "b" not in [o.request_id for o in core.step().outputs]
    core.abort_requests(["a", "c"])
    assert queues(core) == (0, 0) and is_idle(core)
    core.abort_requests(["a"])  # field vllm#25067: once more does nothing


def test_same_id_after_its_end():
    core = make_core()
    for _ in range(3):
        core.add_request(make_request("r"))
        assert run(core)["r"] == [4, 5, 6, 7]
        assert is_idle(core)


def test_an_id_in_use_is_refused_and_the_first_goes_on():
    core = make_core()
    core.add_request(make_request("r"))
    with pytest.raises(ValueError, match="request id 'r' is in use"): core.add_request(make_request("r", [9]))
    assert run(core)["r"] == [4, 5, 6, 7]


def test_a_prompt_that_got_past_the_front_end_is_refused():
    core = make_core()
    with pytest.raises(ValueError, match="64"): core.add_request(make_request("r", range(65)))
    assert queues(core) == (0, 0)


def test_scoring_and_reasons():
    core = make_core()
    core.add_request(make_request("score", range(10), 0))
    core.add_request(make_request("stop", [40], 10, stop_token_ids=[43]))
    outs = [o for _ in range(4) for o in core.step().outputs]
    score, = (o for o in outs if o.request_id == "score")
    assert (score.new_token_ids, score.finish_reason) == ([], FinishReason.LENGTH)
    stop = [o for o in outs if o.request_id == "stop"][-1]
    assert (stop.finish_reason, stop.stop_reason) == (FinishReason.STOP, 43)
    assert is_idle(core)


def test_idle_step_is_empty():
    core = make_core(log_stats=True)
    out = core.step()
    assert out.outputs == [] and out.scheduler_stats.num_running_reqs == 0 and core.executor.steps == []


def test_stats_and_events_when_asked_for():
    core = make_core(log_stats=True)
    core.add_request(make_request("r"))
    out = core.step()
    assert out.scheduler_stats.num_running_reqs == 1 and len(out.outputs[0].events) == 2
    assert make_core().step().scheduler_stats is None


def test_prefix_cache_across_requests_and_reset():
    core = make_core()
    core.add_request(make_request("a", range(20)))
    assert not core.reset_prefix_cache() or queues(core) == (1, 0)
    run(core)
    core.add_request(make_request("b", range(20)))
    assert core.step().outputs[0].num_cached_tokens == 16  # field nano-vllm#199: the last block is computed again
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()
    core.add_request(make_request("c", range(20)))
    assert core.step().outputs[0].num_cached_tokens == 0


def test_preemption_is_not_seen_from_outside():
    tokens = {}
    for num_blocks in (16, 64):
        core = make_core(num_blocks=num_blocks)
        for i in range(6): core.add_request(make_request(f"r{i}", [i] * 10, 40))
        tokens[num_blocks] = run(core)
        assert is_idle(core)
    assert tokens[16] == tokens[64] == {f"r{i}": list(range(i + 1, i + 41)) for i in range(6)}


# A step that fails

@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_failed_step_leaves_a_clean_engine(error):
    core = make_core()
    core.add_request(make_request("a", range(16), 30))
    core.step()
    core.add_request(make_request("b", range(100, 120)))
    core.executor.fail_with = error
    with pytest.raises(type(error)): core.step()
    assert queues(core) == (0, 0)
    core.check_invariants()
    # Blocks registered by the failed step hold nothing: they may not be hit.
    core.add_request(make_request("c", range(100, 120)))
    assert core.step().outputs[0].num_cached_tokens == 0
    assert run(core)["c"] == [121, 122, 123] and is_idle(core)


# The client

def test_client_is_the_core_behind_an_interface():
    client = make_client(False, False, make_config(), ToyExecutor)
    assert isinstance(client, InprocClient) and isinstance(client, EngineCoreClient)
    client.add_request(make_request("r"))
    tokens = []
    while len(tokens) < 4: tokens += client.get_output().outputs[0].new_token_ids
    assert tokens == [4, 5, 6, 7] and client.get_output().outputs == []
    client.abort_requests([])
    assert client.reset_prefix_cache() is True
    client.shutdown()
    client.shutdown()
    assert client.engine_core.executor.closed == 1


def test_asyncio_mode_is_another_interface():
    client = make_client(False, True, make_config(), ToyExecutor)
    assert isinstance(client, AsyncInprocClient) and isinstance(client, AsyncEngineCoreClient)
    client.shutdown()


# The engine around it

def make_engine(log_stats=False, **config) -> LLMEngineV1:
    return LLMEngineV1(make_config(**config), ToyExecutor, log_stats, ByteTokenizer())


def finish(engine) -> dict:
    done = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            if out.finished: done[out.request_id] = out
    return done


def core_of(engine) -> EngineCore: return engine.engine_core.engine_core


def test_engine_end_to_end():
    engine = make_engine()
    engine.add_request("r", "abc", SamplingParams(max_tokens=5, logprobs=1))
    out = finish(engine)["r"]
    assert (out.prompt, out.outputs[0].text, out.outputs[0].finish_reason) == ("abc", "defgh", "length")
    assert len(out.outputs[0].logprobs) == 5 and is_idle(core_of(engine))


def test_stop_strings_end_the_core_too():
    engine = make_engine()
    engine.add_request("r", "abc", SamplingParams(max_tokens=50, stop=["fg"]))
    assert finish(engine)["r"].outputs[0].text == "de"
    assert is_idle(core_of(engine))


def test_n_answers_share_the_prompts_blocks():
    engine = make_engine()
    engine.add_request("r", list(range(20)), SamplingParams(n=3, max_tokens=5))
    out = finish(engine)["r"]
    assert [c.index for c in out.outputs] == [0, 1, 2] and all(c.token_ids == [20, 21, 22, 23, 24] for c in out.outputs)
    assert core_of(engine).executor.steps[0] < 60  # not three times the prompt
    assert is_idle(core_of(engine))


def test_abort_of_one_while_others_run():
    engine = make_engine()
    for i in "abc": engine.add_request(i, i, SamplingParams(max_tokens=10, n=2))
    engine.step()
    engine.abort_request("b")
    engine.abort_request(["b", "zzz"])
    assert set(finish(engine)) == {"a", "c"} and is_idle(core_of(engine))
    engine.add_request("b", "b", SamplingParams(max_tokens=2))
    assert finish(engine)["b"].outputs[0].text == "cd"


def test_a_refused_request_leaves_nothing_and_harms_nobody():
    engine = make_engine()
    engine.add_request("good", "abc", SamplingParams(max_tokens=5))
    with pytest.raises(ValueError): engine.add_request("bad", [999], SamplingParams())
    with pytest.raises(ValueError, match="'good' is in use"): engine.add_request("good", "x", SamplingParams())
    assert finish(engine)["good"].outputs[0].text == "defgh"


def test_a_core_that_refuses_one_of_n_gets_none(monkeypatch):
    engine, calls = make_engine(), []
    def add(request):
        calls.append(request.request_id)
        if len(calls) == 2: raise ValueError("no more")
        core_of(engine).add_request(request)
    monkeypatch.setattr(engine.engine_core, "add_request", add)
    with pytest.raises(ValueError, match="no more"): engine.add_request("r", "abc", SamplingParams(n=3))
    assert not engine.has_unfinished_requests() and is_idle(core_of(engine))


@pytest.mark.parametrize("where", ["core", "front end"])
def test_a_failed_step_ends_all_requests_and_the_engine_goes_on(where, monkeypatch):
    engine = make_engine()
    for i in "ab": engine.add_request(i, i, SamplingParams(max_tokens=10))
    engine.step()
    with monkeypatch.context() as patch:
        if where == "core": core_of(engine).executor.fail_with = RuntimeError("lost")
        else: patch.setattr(engine.output_processor, "process_outputs", lambda *a: 1 / 0)
        with pytest.raises((RuntimeError, ZeroDivisionError)): engine.step()
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "a", SamplingParams(max_tokens=3))
    assert finish(engine)["a"].outputs[0].text == "bcd" and is_idle(core_of(engine))


def test_stats_of_the_last_step():
    engine = make_engine(log_stats=True)
    engine.add_request("r", "abc", SamplingParams(max_tokens=2))
    out, = engine.step()
    scheduler, iteration = engine.last_stats
    assert scheduler.num_running_reqs == 1 and iteration.num_prompt_tokens == 3
    assert out.metrics.time_in_queue >= 0 and out.metrics.first_scheduled_time is not None


def test_random_traffic_through_the_engine():
    rng, engine, want = random.Random(3), make_engine(num_blocks=24), {}
    got = {}
    for i in range(400):
        if rng.random() < 0.3 and len(want) - len(got) < 20:
            prompt = [rng.randrange(4)] * rng.randrange(1, 30)
            n_tokens = rng.randrange(1, 30)
            engine.add_request(f"r{i}", prompt, SamplingParams(
                max_tokens=n_tokens, n=rng.randint(1, 2), output_kind=rng.choice(list(RequestOutputKind))))
            want[f"r{i}"] = [(prompt[-1] + 1 + k) % 256 for k in range(min(n_tokens, 64 - len(prompt)))]
        if rng.random() < 0.05 and want:
            name = rng.choice(list(want))
            if name not in got: del want[name]
            engine.abort_request(name)
        for out in engine.step():
            if out.request_id not in want: continue
            for c in out.outputs:
                if c.finish_reason: got.setdefault(out.request_id, {})[c.index] = c
        core_of(engine).check_invariants()
        engine.output_processor.check_invariants()
    for out in finish(engine).values():
        for c in out.outputs: got.setdefault(out.request_id, {})[c.index] = c
    assert set(got) == set(want) and is_idle(core_of(engine))
    assert all(c.token_ids == want[name][-len(c.token_ids):] for name, answers in got.items() for c in answers.values())
