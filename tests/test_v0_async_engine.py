"""AsyncLLMEngine of V0: streams, the tracker, the loop, and its ends.

Tests named `test_vllm_…` are scenarios of vLLM's own tests.
"""
import asyncio
import gc
import threading
import time
from types import SimpleNamespace

import pytest
from v0_front import assert_at_rest, make_engine

from minengine.outputs import CompletionOutput, EngineDeadError, RequestOutput
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.v0.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine
from minengine.v0.request_tracker import AsyncStream, RequestTracker

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def output(request_id, finished=False):
    return RequestOutput(request_id, None, [1], None, [CompletionOutput(0, "", [])], finished)


def params(max_tokens=32, **kw): return SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, **kw)


async def collect(engine, request_id="r", prompt="abc", **kw):
    return [o async for o in engine.generate(prompt, params(**kw), request_id)]


def slowed(inner, step_s=0.005):
    "An engine whose steps take a while: nothing is over before one can look."
    real = inner.executor.execute_model
    inner.executor.execute_model = lambda request: time.sleep(step_s) or real(request)
    return inner


async def settled(async_engine):
    "Wait until the engine has nothing left to do."
    for _ in range(200):
        if not async_engine.engine.has_unfinished_requests() and not async_engine.tracker._aborted_requests: break
        await asyncio.sleep(0.01)
    assert_at_rest(async_engine.engine)


# Tracker and streams

def test_vllm_request_tracker():
    async def main():
        tracker = RequestTracker()
        stream_1 = tracker.add_request("1")
        assert tracker.new_requests_event.is_set()
        await tracker.wait_for_new_requests()
        new, aborted = tracker.get_new_and_aborted_requests()
        assert not tracker.new_requests_event.is_set()
        assert [k["request_id"] for _, k in new] == ["1"] and not aborted and not stream_1.finished
        stream_2, stream_3 = tracker.add_request("2"), tracker.add_request("3")
        await tracker.wait_for_new_requests()
        new, _ = tracker.get_new_and_aborted_requests()
        assert [k["request_id"] for _, k in new] == ["2", "3"]
        with pytest.raises(KeyError, match="'1' is in use"): tracker.add_request("1")
        assert not tracker.new_requests_event.is_set()
        tracker.abort_request("1")
        new, aborted = tracker.get_new_and_aborted_requests()
        assert aborted == {"1"} and not new and stream_1.finished
        stream_4 = tracker.add_request("4")
        tracker.abort_request("4")
        new, aborted = tracker.get_new_and_aborted_requests()
        assert stream_4.finished and not new and not aborted
        stream_5 = tracker.add_request("5")
        tracker.process_request_output(output("2", finished=True))
        new, aborted = tracker.get_new_and_aborted_requests()
        assert [k["request_id"] for _, k in new] == ["5"] and not aborted
        assert stream_2.finished and not stream_3.finished and not stream_5.finished
    asyncio.run(main())


def test_abort_and_the_same_name_again_before_the_loop_runs():
    # 0.7.3 ends the new stream, and lets the old request run on.
    async def main():
        tracker = RequestTracker()
        tracker.add_request("r")
        tracker.get_new_and_aborted_requests()   # the engine has it
        tracker.abort_request("r")
        again = tracker.add_request("r", prompt="new")
        new, aborted = tracker.get_new_and_aborted_requests()
        assert aborted == {"r"} and new == [(again, {"request_id": "r", "prompt": "new"})] and not again.finished
    asyncio.run(main())


def test_a_stream_ends_once():
    async def main():
        cancelled = []
        stream = AsyncStream("r", cancelled.append)
        for text in "12": stream.put(output(text))
        stream.finish(), stream.finish(ValueError()), stream.put(output("3"))
        assert [o.request_id async for o in stream.generator()] == ["1", "2"] and cancelled == []
        stream = AsyncStream("r", cancelled.append)
        stream.put(output("r")), stream.finish(ValueError("bad"))
        with pytest.raises(ValueError, match="bad"): [o async for o in stream.generator()]
        stream = AsyncStream("r", cancelled.append)
        stream.put(output("r"))
        reader = stream.generator()
        async for _ in reader: break
        await reader.aclose()
        assert cancelled == ["r"]
    asyncio.run(main())


def test_unknown_names_are_skipped():
    async def main():
        tracker = RequestTracker()
        tracker.abort_request("nobody")
        tracker.process_request_output(output("nobody", True))
        tracker.propagate_exception(ValueError(), "nobody")
        assert tracker.get_new_and_aborted_requests() == ([], set())
    asyncio.run(main())


# The loop

class MockEngine:
    log_stats = False
    "Counts what the loop does."

    def __init__(self):
        self.num_steps, self.added, self.aborted, self.unfinished, self.outputs = 0, [], [], False, []

    def has_unfinished_requests(self): return self.unfinished

    def add_request(self, **kwargs): self.added.append(kwargs["request_id"])

    def abort_request(self, ids): self.aborted += ids

    def step(self):
        self.num_steps += 1
        outputs, self.outputs = self.outputs, []
        return outputs

    def shutdown(self): pass


def test_vllm_new_requests_event():
    async def main():
        mock = MockEngine()
        engine = AsyncLLMEngine(mock)
        await asyncio.sleep(0.02)
        assert mock.num_steps == 0
        engine.add_request("1")
        await asyncio.sleep(0.05)
        assert (mock.num_steps, mock.added) == (1, ["1"])
        engine.add_request("2")
        mock.outputs = [output("2", True)]
        await asyncio.sleep(0.05)
        assert (mock.num_steps, mock.added) == (2, ["1", "2"])
        mock.unfinished = True
        engine.add_request("3")
        await asyncio.sleep(0.05)
        assert mock.num_steps > 5
        mock.unfinished = False
        await asyncio.sleep(0.05)
        before = mock.num_steps
        await asyncio.sleep(0.05)
        assert mock.num_steps == before
        engine.shutdown()
    asyncio.run(main())


@pytest.mark.parametrize("num_steps,use_async", [(1, False), (1, True), (8, False), (8, True)])
def test_vllm_asyncio_run(num_steps, use_async):
    async def main():
        engine = AsyncLLMEngine(make_engine(num_steps=num_steps, use_async=use_async, multi_step_stream_outputs=False))
        both = await asyncio.gather(collect(engine, "a"), collect(engine, "b", "xyz"))
        await settled(engine)
        engine.shutdown()
        for outputs in both:
            assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 32
            assert len(outputs) == 32 if num_steps == 1 else 2 <= len(outputs) <= 31
    asyncio.run(main())


@pytest.mark.parametrize("use_async", [False, True])
def test_vllm_output_kinds(use_async):
    async def main():
        engine = AsyncLLMEngine(make_engine(use_async=use_async))
        all_, deltas, final = await asyncio.gather(*(collect(engine, k.name, output_kind=k) for k in RequestOutputKind))
        engine.shutdown()
        assert (len(all_), len(deltas), len(final)) == (32, 32, 1)
        assert "".join(o.outputs[0].text for o in deltas) == all_[-1].outputs[0].text == final[0].outputs[0].text
        assert [o.prompt_token_ids for o in deltas] == [[97, 98, 99]] + [None] * 31
    asyncio.run(main())


def test_vllm_cancellation():
    async def main():
        # 0.7.3's reader gets CancelledError; ours a last output, as V1's does.
        engine, seen = AsyncLLMEngine(slowed(make_engine())), []
        async for out in engine.generate("abc", params(13), "r"):
            seen.append(out.outputs[0])
            if len(seen) == 5: await engine.abort("r")
        assert [c.finish_reason for c in seen] == [None] * 5 + ["abort"] and out.finished
        assert seen[5].token_ids == seen[4].token_ids and out.prompt_token_ids == [97, 98, 99]
        await settled(engine)
        engine.shutdown()
    asyncio.run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_abort_by_name_ends_the_reader_with_a_last_output(kind):
    async def main():
        engine, stream = AsyncLLMEngine(slowed(make_engine())), []
        async def read():
            async for out in engine.generate("abc", params(50, n=2, output_kind=kind), "r"): stream.append(out)
        reader = asyncio.create_task(read())
        while not engine.engine.has_unfinished_requests() or (kind is not FINAL_ONLY and len(stream) < 3):
            await asyncio.sleep(0.001)
        await engine.abort("r")
        await engine.abort("r"), await engine.abort("nobody")
        await asyncio.wait_for(reader, 5)
        last = stream[-1]
        assert last.finished and [(c.index, c.finish_reason) for c in last.outputs] == [(0, "abort"), (1, "abort")]
        if kind is CUMULATIVE: assert [c.text for c in last.outputs] == [c.text for c in stream[-2].outputs]
        else: assert [c.text for c in last.outputs] == ["", ""]
        await settled(engine)
        # Before the loop has heard of it.
        reader = asyncio.create_task(collect(engine, "new", output_kind=kind))
        await asyncio.sleep(0)
        await engine.abort("new")
        only, = await reader
        assert only.finished and only.prompt_token_ids == [] and only.outputs[0].finish_reason == "abort"
        engine.shutdown()
    asyncio.run(main())


def test_a_delta_does_not_end_an_answer_twice():
    async def main():
        engine, ends = AsyncLLMEngine(slowed(make_engine())), []
        wish = SamplingParams(n=2, max_tokens=20, stop=["d"], output_kind=DELTA)   # "defg…", "efgh…"
        async for out in engine.generate("abc", wish, "r"):
            ends += [(c.index, c.finish_reason) for c in out.outputs if c.finish_reason]
            if ends == [(0, "stop")]: await engine.abort("r")
        assert ends == [(0, "stop"), (1, "abort")]
        engine.shutdown()
    asyncio.run(main())


def test_vllm_delayed_consumer():
    async def main():
        engine, i = AsyncLLMEngine(make_engine()), 0
        async for out in engine.generate("abc", params(10, output_kind=DELTA), "r"):
            if i == 0: await asyncio.sleep(0.2)
            i += 1
        assert i == 10 and out.finished
        engine.shutdown()
    asyncio.run(main())


def test_leaving_a_stream_aborts_the_request():
    async def main():
        engine = AsyncLLMEngine(slowed(make_engine()))
        async for _ in engine.generate("abc", params(50), "left"): break   # a lost client
        gc.collect()
        await asyncio.sleep(0.05)
        await settled(engine)
        stream = engine.generate("abc", params(50), "closed")
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(0.05)
        await settled(engine)
        task = asyncio.create_task(collect(engine, "cancelled", max_tokens=50, n=3, temperature=1.0))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        await asyncio.sleep(0.05)
        await settled(engine)
        assert len(await collect(engine, "next", max_tokens=4)) == 4
        engine.shutdown()
    asyncio.run(main())


def test_field_vllm8393_two_requests_under_one_name():
    async def main():
        engine = AsyncLLMEngine(make_engine())
        first, second = await asyncio.gather(collect(engine, "r"), collect(engine, "r"), return_exceptions=True)
        assert len(first) == 32 and isinstance(second, ValueError)
        assert len(await collect(engine, "r")) == 32   # free again
        engine.shutdown()
    asyncio.run(main())


def test_a_bad_request_ends_its_own_stream_only():
    async def main():
        engine = AsyncLLMEngine(make_engine())
        good, bad = await asyncio.gather(collect(engine, "good"), collect(engine, "bad", [300]), return_exceptions=True)
        assert len(good) == 32 and isinstance(bad, ValueError) and "go from 0 to 263" in str(bad)
        await engine.check_health()
        engine.shutdown()
    asyncio.run(main())


def test_a_failed_step_ends_all_streams_and_the_engine():
    async def main():
        engine = AsyncLLMEngine(slowed(make_engine()))
        tasks = [asyncio.create_task(collect(engine, i, max_tokens=40)) for i in "ab"]
        while not engine.engine.executor.requests: await asyncio.sleep(0.001)
        engine.engine.executor.fail_with = RuntimeError("out of memory")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [AsyncEngineDeadError] * 2 and "out of memory" in str(results[0])
        assert isinstance(results[0], EngineDeadError) and str(engine.dead_error.__cause__) == "out of memory" and engine.errored and not engine.is_running
        for call in (collect(engine, "c"), engine.check_health()):
            with pytest.raises(AsyncEngineDeadError, match="out of memory"): await call
        engine.shutdown()
    asyncio.run(main())


def test_a_step_that_hangs_is_a_failure():
    async def main():
        engine, released = AsyncLLMEngine(make_engine(), step_timeout_s=0.1), threading.Event()
        engine.engine.executor.execute_model = lambda request: released.wait(5)
        with pytest.raises(AsyncEngineDeadError, match="longer than 0.1 s"): await collect(engine)
        with pytest.raises(AsyncEngineDeadError): await engine.check_health()
        engine.shutdown()
        released.set()
    asyncio.run(main())


def test_the_event_loop_is_free_while_a_step_runs():
    async def main():
        inner, ticks = make_engine(), []
        entered, release, real = threading.Event(), threading.Event(), inner.executor.execute_model
        def slow(request):
            entered.set()
            release.wait(5)
            return real(request)
        inner.executor.execute_model = slow
        engine = AsyncLLMEngine(inner)
        task = asyncio.create_task(collect(engine, max_tokens=2))
        while not entered.is_set(): await asyncio.sleep(0.001)
        for _ in range(3): ticks.append(await asyncio.sleep(0.001))   # the step still waits
        release.set()
        assert len(await task) == 2 and len(ticks) == 3
        engine.shutdown()
    asyncio.run(main())


def test_one_engine_in_two_event_loops():
    engine = AsyncLLMEngine(slowed(make_engine(), 0.001))
    async def first():
        stream = engine.generate("abc", params(50), "left behind")
        await anext(stream)
    asyncio.run(first())
    async def second():
        assert len(await collect(engine, "left behind")) == 32   # the same name, another loop
        await settled(engine)
        engine.shutdown()
    asyncio.run(second())


def test_what_a_server_asks():
    async def main():
        engine = AsyncLLMEngine(make_engine())
        assert engine.engine_name == "v0" and engine.dead_error is None and engine.stat_loggers == []
        assert engine.vllm_config is engine.engine.vllm_config
        assert await engine.get_model_config() is engine.vllm_config.model_config
        assert await engine.get_tokenizer() is engine.engine.tokenizer
        assert await engine.reset_prefix_cache() in (True, False)
        await engine.check_health()
        engine.shutdown()
    asyncio.run(main())


def test_health_waits_for_a_step_but_not_for_ever():
    async def main():
        engine, entered, released = AsyncLLMEngine(make_engine()), threading.Event(), threading.Event()
        real = engine.engine.executor.execute_model
        def slow(request):
            entered.set()
            released.wait(5)
            return real(request)
        engine.engine.executor.execute_model = slow
        task = asyncio.create_task(collect(engine, max_tokens=2))
        while not entered.is_set(): await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError): await engine.check_health(timeout_s=0.02)
        released.set()
        await engine.check_health(timeout_s=5)
        assert len(await task) == 2
        engine.shutdown()
    asyncio.run(main())


def test_shutdown_ends_those_who_wait():
    async def main():
        engine = AsyncLLMEngine(slowed(make_engine()))
        task = asyncio.create_task(collect(engine, max_tokens=50))
        while not engine.engine.has_unfinished_requests(): await asyncio.sleep(0.001)
        engine.shutdown()
        with pytest.raises(AsyncEngineDeadError, match="shut down"): await asyncio.wait_for(task, 5)
    asyncio.run(main())


def test_after_shutdown():
    async def main():
        engine = AsyncLLMEngine(make_engine())
        await collect(engine)
        engine.shutdown()
        with pytest.raises(AsyncEngineDeadError, match="shut down"): await collect(engine)
        assert engine.engine.executor.closed == 1
    asyncio.run(main())


def test_n_streams_and_aborts_as_one():
    async def main():
        engine, seen = AsyncLLMEngine(make_engine()), {0: 0, 1: 0}
        async for out in engine.generate("abc", params(6, n=2, output_kind=DELTA), "r"):
            for c in out.outputs: seen[c.index] += len(c.token_ids)
        assert seen == {0: 6, 1: 6}
        engine.shutdown()
    asyncio.run(main())


def test_the_engine_that_is_wrapped():
    async def main():
        engine = AsyncLLMEngine(SimpleNamespace(log_stats=False, has_unfinished_requests=lambda: False, shutdown=lambda: None))
        assert not engine.errored and not engine.is_running
        engine.shutdown()
    asyncio.run(main())


# Numbers

class Recorder:
    def __init__(self): self.records = []
    def record(self, scheduler_stats, iteration_stats): self.records.append((scheduler_stats, iteration_stats))
    def total(self, name): return sum(getattr(i, name) for _, i in self.records)
    def all(self, name): return [x for _, i in self.records for x in getattr(i, name)]


@pytest.mark.parametrize("num_steps,use_async", [(1, False), (1, True), (4, False)])
def test_stat_loggers_are_told_every_token_once(num_steps, use_async):
    async def main():
        engine = AsyncLLMEngine(make_engine(log_stats=True, num_steps=num_steps, use_async=use_async))
        recorder = Recorder()
        engine.stat_loggers.append(recorder)
        wish = dict(max_tokens=8, output_kind=FINAL_ONLY)   # callers are told nothing in between
        await asyncio.gather(collect(engine, "a", **wish), collect(engine, "b", "xyz!", n=2, **wish))
        await settled(engine)
        assert recorder.total("num_prompt_tokens") == 3 + 4 and recorder.total("num_generation_tokens") == 24
        assert len(recorder.all("time_to_first_token_s")) == 2
        done = recorder.all("finished")
        assert [(f.finish_reason, f.num_generation_tokens) for f in done] == [("length", 8)] * 3
        assert all(f.e2e_latency_s >= f.inference_time_s >= f.decode_time_s >= 0 and f.queue_time_s >= 0 for f in done)
        if num_steps == 1: assert len(recorder.all("time_per_output_token_s")) == 24 - 3
        assert recorder.records[-1][0].num_running_reqs == 0 and not engine._step_stats._counted
        engine.shutdown()
    asyncio.run(main())


def test_an_abort_brings_the_gauges_down():
    async def main():
        engine, recorder = AsyncLLMEngine(slowed(make_engine(log_stats=True))), Recorder()
        engine.stat_loggers.append(recorder)
        async for _ in engine.generate("abc", params(50), "left"): break
        await settled(engine)
        while recorder.records[-1][0].num_running_reqs: await asyncio.sleep(0.001)
        engine.shutdown()
    asyncio.run(asyncio.wait_for(main(), 10))
