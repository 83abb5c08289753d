"""AsyncLLM: streams and their slots, aborts, ends; and many readers at once.

Tests named `test_vllm_…` are scenarios of vLLM's own tests.
"""
import asyncio
import copy
import gc
import logging
import os
import random
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from front_tiny import ARGS, ToyExecutor, make_config, make_folder

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.outputs import CompletionOutput, EngineDeadError, Logprob, RequestMetrics, RequestOutput
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v1.engine.async_llm import AsyncLLM
from minengine.v1.engine.output_handler import MAX_SLICE
from minengine.v1.engine.output_streams import RequestOutputCollector, merge_deltas
from minengine.v1.messages import EngineCoreOutput, EngineCoreOutputs

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def run(main, limit_s=30):
    "Nothing here may hang."
    async def limited():
        async with asyncio.timeout(limit_s): return await main()
    return asyncio.run(limited())


class SlowExecutor(ToyExecutor):
    "Steps take a while: nothing is over before one can look."
    def check_health(self): pass

    def execute_model(self, order):
        if order.total_num_scheduled_tokens: time.sleep(0.003)
        return super().execute_model(order)


def make_llm(executor=ToyExecutor, log_stats=False, tokenizer=None, **config) -> AsyncLLM:
    return AsyncLLM(make_config(**config), executor, log_stats, tokenizer or ByteTokenizer())


def params(max_tokens=8, **kw): return SamplingParams(max_tokens=max_tokens, **kw)


async def collect(llm, request_id="r", prompt="abc", *args, **kw):
    return [o async for o in llm.generate(prompt, params(*args, **kw), request_id)]


def executor_of(llm): return llm.engine_core.engine_core.executor


async def settled(llm):
    "Wait until the core has nothing left to do: then nobody may remember anything."
    core = llm.engine_core.engine_core
    async with asyncio.timeout(5):
        while core.scheduler.has_unfinished_requests() or llm.handler.aborts.tasks: await asyncio.sleep(0.002)
        await llm.check_health()   # behind all aborts in the core's queue
    assert_at_rest(llm)


def assert_at_rest(llm):
    scheduler = llm.engine_core.engine_core.scheduler
    scheduler.check_invariants(), llm.streams.check_invariants()
    assert not (scheduler.requests or scheduler.running or scheduler.waiting)
    assert not llm.streams.collectors and not llm.output_processor.parents and not llm.output_processor.request_states
    assert not llm.handler.aborts.tasks
    manager = scheduler.kv_cache_manager
    assert manager.usage == 0 and manager.num_free_blocks == llm.vllm_config.cache_config.num_gpu_blocks


# One slot

def delta(text, *answers, finished=False, **kw):
    answers = answers or [(0, text)]
    return RequestOutput("r", "p", [1], kw.pop("prompt_logprobs", None),
                         [CompletionOutput(i, t, list(t.encode()), **kw) for i, t in answers], finished)


def test_merged_deltas_keep_what_073_drops():
    old = delta("ab", prompt_logprobs=[None], cumulative_logprob=-1.0, logprobs=[{97: Logprob(-.5)}, {98: Logprob(-.5)}])
    new = delta("c", finished=True, finish_reason="stop", stop_reason="x", cumulative_logprob=-3.0, logprobs=[{99: Logprob(-2.)}])
    new.metrics, new.num_cached_tokens = RequestMetrics(1.0), 4
    merge_deltas(old, new)
    answer = old.outputs[0]
    assert (answer.text, answer.token_ids, answer.cumulative_logprob) == ("abc", [97, 98, 99], -3.0)
    assert [list(d) for d in answer.logprobs] == [[97], [98], [99]]
    assert (answer.finish_reason, answer.stop_reason, old.finished) == ("stop", "x", True)
    assert old.prompt_logprobs == [None]   # the later output has none
    assert old.metrics.arrival_time == 1.0 and old.num_cached_tokens == 4


def test_merged_deltas_of_several_answers():
    old = delta("", (1, "b"))
    merge_deltas(old, delta("", (0, "x"), (2, "z")))
    merge_deltas(old, delta("", (1, "c"), finish_reason="length"))
    assert [(a.index, a.text, a.finish_reason) for a in old.outputs] == [(0, "x", None), (1, "bc", "length"), (2, "z", None)]
    merge_deltas(old, delta("", (0, "y")))   # an answer that has ended stays ended
    assert [(a.text, a.finish_reason) for a in old.outputs] == [("xy", None), ("bc", "length"), ("z", None)]


def test_slot():
    async def main():
        slot = RequestOutputCollector()
        assert slot.get_nowait() is None
        slot.put(delta("a")), slot.put(delta("ab"))
        assert (await slot.get()).outputs[0].text == "ab" and slot.get_nowait() is None
        slot.merge = True
        slot.put(delta("c")), slot.put(delta("d"))
        assert (await slot.get()).outputs[0].text == "cd"
        reader = asyncio.create_task(slot.get())
        await asyncio.sleep(0)
        assert not reader.done()
        slot.put(delta("e"))
        assert (await reader).outputs[0].text == "e"
        slot.put(delta("f")), slot.put(ValueError("bad"))   # an error is not merged
        with pytest.raises(ValueError, match="bad"): await slot.get()
        assert slot.get_nowait() is None
    run(main)


# Streams

@pytest.mark.parametrize("wishes", [{}, dict(n=3, temperature=1.0), dict(stop=["hi"]), dict(logprobs=1)])
def test_three_kinds_tell_the_same_story(wishes):
    async def main():
        llm = make_llm()
        all_of = {k: await collect(llm, prompt="abc", output_kind=k, **wishes) for k in RequestOutputKind}
        final, = all_of[FINAL_ONLY]
        assert final.finished and [a.index for a in final.outputs] == list(range(wishes.get("n", 1)))
        assert all_of[CUMULATIVE][-1].outputs == final.outputs
        texts = [o.outputs[0].text for o in all_of[CUMULATIVE]]
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:]))
        merged = all_of[DELTA][0]
        for o in all_of[DELTA][1:]: merge_deltas(merged, o)
        assert merged.outputs == final.outputs and merged.finished
        assert merged.prompt == final.prompt == "abc" and merged.prompt_token_ids == list(b"abc")
        await settled(llm)
        llm.shutdown()
    run(main)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_slow_reader_gets_everything(kind):
    async def main():
        llm = make_llm()
        stream = llm.generate("abc", params(20, logprobs=0, stop=["pq"], output_kind=kind), "slow")
        seen = [await anext(stream)]
        await settled_core(llm)
        held = llm.streams.collectors
        assert not held   # ended: what nobody has read is in the reader's own slot
        seen += [o async for o in stream]
        texts = [o.outputs[0].text for o in seen]
        whole = "".join(texts) if kind == DELTA else texts[-1]
        ids = [t for o in seen for t in o.outputs[0].token_ids] if kind == DELTA else seen[-1].outputs[0].token_ids
        assert whole == "defghijklmno" and ids == list(b"defghijklmnopq")
        last = seen[-1].outputs[0]
        assert (last.finish_reason, last.stop_reason, seen[-1].finished) == ("stop", "pq", True)
        assert len(seen) <= 3, "one at the start, one for all the rest"
        logprobs = [p for o in seen for p in o.outputs[0].logprobs] if kind == DELTA else last.logprobs
        assert len(logprobs) == 14 and last.cumulative_logprob == -14
        llm.shutdown()
    async def settled_core(llm):
        while llm.engine_core.engine_core.scheduler.has_unfinished_requests() or llm.streams.collectors:
            await asyncio.sleep(0.002)
    run(main)


def test_prompt_logprobs_come_once_in_deltas():
    async def main():
        llm = AsyncLLM.from_engine_args(EngineArgs(model=make_tiny(), **ARGS))
        outputs = await collect(llm, prompt="hello", output_kind=DELTA, prompt_logprobs=0, ignore_eos=True)
        assert [o.prompt_logprobs is not None for o in outputs] == [True] + [False] * (len(outputs) - 1)
        assert len(outputs[0].prompt_logprobs) == 5
        llm.shutdown()
    run(main)


def test_scoring_and_skipped_tokenizer():
    async def main():
        llm = make_llm()
        only, = await collect(llm, prompt=[1, 2, 3], max_tokens=0)
        assert only.finished and only.outputs[0].finish_reason == "length" and only.outputs[0].token_ids == []
        llm.shutdown()
        config = make_config()
        config.model_config.skip_tokenizer_init = True
        llm = AsyncLLM(config, ToyExecutor)
        last = (await collect(llm, prompt=[1, 2]))[-1]
        assert last.outputs[0].text == "" and last.outputs[0].token_ids[:2] == [3, 4] and await llm.get_tokenizer() is None
        llm.shutdown()
    run(main)


# Readers who leave

async def leave_by_break(llm):
    async for _ in llm.generate("abc", params(40), "r"): break


async def leave_by_aclose(llm):
    stream = llm.generate("abc", params(40), "r")
    await anext(stream)
    await stream.aclose()


async def leave_by_error(llm):
    async def read():
        async for _ in llm.generate("abc", params(40), "r"): raise KeyError("reader")
    with pytest.raises(KeyError): await read()


async def leave_by_cancel(llm):
    task = asyncio.create_task(collect(llm, max_tokens=40))
    while "r" not in llm.output_processor.parents: await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError): await task


async def leave_before_the_first_token(llm):
    task = asyncio.create_task(collect(llm, max_tokens=40))
    await asyncio.sleep(0)   # being tokenised
    task.cancel()
    with pytest.raises(asyncio.CancelledError): await task


async def leave_by_two_cancels(llm):
    "The second hits the task while it tells the core of the first."
    task = asyncio.create_task(collect(llm, max_tokens=40))
    while "r" not in llm.output_processor.parents: await asyncio.sleep(0)
    task.cancel()
    while not llm.handler.aborts.tasks: await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError): await task


@pytest.mark.parametrize("leave", [
    leave_by_break, leave_by_aclose, leave_by_error, leave_by_cancel, leave_before_the_first_token, leave_by_two_cancels])
def test_leaving_aborts(leave):
    async def main():
        llm = make_llm(SlowExecutor)
        other = asyncio.create_task(collect(llm, "other", max_tokens=20))
        await leave(llm)
        await asyncio.sleep(0.01)
        num_steps = len(executor_of(llm).steps)
        assert len((await other)[-1].outputs[0].token_ids) == 20
        assert len(executor_of(llm).steps) - num_steps < 25
        await settled(llm)
        assert "r" not in executor_of(llm).tokens
        assert (await collect(llm, "r"))[-1].outputs[0].text == "defghijk"   # the name is free
        await settled(llm)
        llm.shutdown()
    run(main)


def test_blocks_are_back_at_the_next_step():
    async def main():
        llm = make_llm(SlowExecutor)
        scheduler = llm.engine_core.engine_core.scheduler
        stream = llm.generate("abc", params(50), "r")
        await anext(stream)
        await stream.aclose()   # waits until the core knows
        assert not scheduler.requests and scheduler.kv_cache_manager.usage == 0
        await settled(llm)
        llm.shutdown()
    run(main)


def test_many_answers_are_left_half_sent():
    "Cancelled while its answers are added one by one, in every position."
    async def main():
        for num_added in range(4):
            llm = make_llm()
            real, added, waits = llm.engine_core.add_request_async, [], asyncio.Event()
            async def add(request):
                if len(added) == num_added: await waits.wait()
                added.append(request.request_id)
                await real(request)
            llm.engine_core.add_request_async = add
            task = asyncio.create_task(collect(llm, max_tokens=40, n=4))
            while len(added) < num_added: await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            if num_added % 2: task.cancel()
            else: await llm.abort("r")
            waits.set()
            await asyncio.wait([task])
            assert len(added) <= num_added + 1
            await settled(llm)
            llm.shutdown()
    run(main)


# Aborts by others

@pytest.mark.parametrize("kind", RequestOutputKind)
def test_abort_by_another_task_ends_the_reader(kind):
    # 0.7.3: the reader waits for ever.
    async def main():
        llm = make_llm(SlowExecutor)
        task = asyncio.create_task(collect(llm, max_tokens=50, output_kind=kind))
        while not any(c.token_ids for p in llm.output_processor.parents.values() for c in p.children): await asyncio.sleep(0.001)
        await llm.abort("r")
        outputs = await task
        last = outputs[-1]
        assert last.finished and last.outputs[0].finish_reason == "abort" and last.metrics.finished_time
        text = "".join(o.outputs[0].text for o in outputs) if kind == DELTA else last.outputs[0].text
        assert text and "defghijklmnopqrstuvwxyz".startswith(text)
        await llm.abort("r"), await llm.abort("nobody")   # no-ops
        await settled(llm)
        llm.shutdown()
    run(main)


def test_abort_of_some_answers():
    "One has ended already: it keeps its reason."
    async def main():
        llm = make_llm(SlowExecutor)
        seen = {}
        async for o in llm.generate("abc", params(50, n=2, temperature=1.0, stop=["gh"], output_kind=CUMULATIVE), "r"):
            seen = {a.index: (a.text, a.finish_reason) for a in o.outputs}
            if len(seen) == 2 and not o.finished and any(r for _, r in seen.values()): await llm.abort("r")
        assert o.finished and {r for _, r in seen.values()} <= {"stop", "abort"}
        await settled(llm)
        llm.shutdown()
    run(main)


def test_abort_while_it_is_tokenised():
    async def main():
        llm = make_llm(tokenizer=WaitingTokenizer())
        task = asyncio.create_task(collect(llm, "long", "wait", max_tokens=50))
        await until(llm.tokenizer.entered)
        await llm.abort("long")
        llm.tokenizer.release.set()
        only, = await task
        assert only.finished and only.outputs[0].finish_reason == "abort" and only.prompt_token_ids == list(b"wait")
        assert executor_of(llm).steps == []   # the core has never heard of it
        await settled(llm)
        llm.shutdown()
    run(main)


def test_the_name_is_free_after_an_abort():
    async def main():
        llm = make_llm(SlowExecutor)
        first = asyncio.create_task(collect(llm, "r", "abc", max_tokens=50))
        while not llm.output_processor.parents: await asyncio.sleep(0)
        aborting = asyncio.create_task(llm.abort("r"))
        await asyncio.sleep(0)
        second = await collect(llm, "r", "mno", max_tokens=3)   # no token of the first in it
        assert second[-1].outputs[0].text == "pqr"
        assert (await first)[-1].outputs[0].finish_reason == "abort"
        await aborting
        await settled(llm)
        llm.shutdown()
    run(main)


# Bad input

@pytest.mark.parametrize("wrong, message", [
    (dict(prompt=""), "empty"), (dict(prompt=[264]), "264"), (dict(prompt="x" * 64), "max_model_len"),
    (dict(prompt={"image": 1}), "image"), (dict(sampling_params=None), "SamplingParams"), (dict(request_id=7), "request_id"),
    (dict(request_id=[]), "request_id"), (dict(sampling_params=params(best_of=2)), "best_of"), (dict(priority=1), "priority"),
    (dict(lora_request="x"), "lora_request"), (dict(sampling_params=params(logprobs=99)), "logprobs")])
def test_bad_input_leaves_nothing_behind(wrong, message):
    async def main():
        llm = make_llm()
        call = dict(prompt="abc", sampling_params=params(), request_id="r") | wrong
        good = asyncio.create_task(collect(llm, "good"))
        with pytest.raises(ValueError, match=message): await anext(llm.generate(**call))
        assert len((await good)[-1].outputs[0].token_ids) == 8
        await settled(llm)
        llm.shutdown()
    run(main)


def test_a_name_in_use_harms_nobody():
    async def main():
        llm = make_llm(SlowExecutor)
        first, second = await asyncio.gather(collect(llm, "r"), collect(llm, "r"), return_exceptions=True)
        assert len(first[-1].outputs[0].token_ids) == 8
        assert isinstance(second, ValueError) and "'r' is in use" in str(second)
        await settled(llm)
        llm.shutdown()
    run(main)


def test_the_core_refuses_one():
    "A core elsewhere says so later, by the names of single answers."
    async def main():
        llm = make_llm(SlowExecutor)
        real = llm.engine_core.add_request_async
        async def add(request):
            if request.request_id.startswith("bad"):
                if request.request_id.endswith("1"): llm.engine_core.refused.append((request.request_id, "it is too large"))
                return
            await real(request)
        llm.engine_core.add_request_async = add
        results = await asyncio.gather(
            collect(llm, "bad", n=2), *(collect(llm, f"good {i}") for i in range(3)), return_exceptions=True)
        assert isinstance(results[0], ValueError) and "it is too large" in str(results[0])
        assert all(len(r[-1].outputs[0].token_ids) == 8 for r in results[1:])
        await settled(llm)
        llm.shutdown()
    run(main)


# Tokenising

class WaitingTokenizer(ByteTokenizer):
    "Takes its time over some texts."
    def __init__(self):
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def encode(self, text, *args, **kw):
        if text.startswith("wait"):
            self.entered.set()
            assert self.release.wait(10)
        return super().encode(text, *args, **kw)


async def until(event):
    while not event.is_set(): await asyncio.sleep(0.001)


def test_a_long_prompt_does_not_stop_the_others():
    async def main():
        llm = make_llm(SlowExecutor, tokenizer=WaitingTokenizer())
        stream = llm.generate("abc", params(40), "running")
        await anext(stream)
        waiting = asyncio.create_task(collect(llm, "long", "wait"))
        await until(llm.tokenizer.entered)
        rest = [o async for o in stream]   # all of it, while the other is tokenised
        assert len(rest[-1].outputs[0].token_ids) == 40 and not waiting.done()
        await llm.check_health()
        llm.tokenizer.release.set()
        assert (await waiting)[-1].finished
        await settled(llm)
        llm.shutdown()
    run(main)


def test_requests_stay_in_order():
    async def main():
        llm = make_llm(tokenizer=WaitingTokenizer(), max_num_seqs=1)
        order, real = [], llm.engine_core.add_request_async
        async def add(request):
            order.append(request.request_id)
            await real(request)
        llm.engine_core.add_request_async = add
        tasks = [asyncio.create_task(collect(llm, f"{i}", "wait" if i == 0 else "abc", max_tokens=2)) for i in range(5)]
        await until(llm.tokenizer.entered)
        llm.tokenizer.release.set()
        await asyncio.gather(*tasks)
        assert order == [f"{i}#{i}" for i in range(5)]
        llm.shutdown()
    run(main)


# Ends

def test_a_failing_step_ends_everybody_within_a_second(caplog):
    async def main():
        llm = make_llm(SlowExecutor)
        tasks = [asyncio.create_task(collect(llm, f"{i}", max_tokens=40)) for i in range(20)]
        while len(llm.output_processor.parents) < 20: await asyncio.sleep(0.001)
        executor_of(llm).fail_with = RuntimeError("out of memory")
        async with asyncio.timeout(1): results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(type(r) is EngineDeadError and "out of memory" in str(r) for r in results), results
        assert len(set(map(id, results))) == 20   # one error for each
        assert llm.errored and "out of memory" in str(llm.dead_error)
        for call in (collect(llm), llm.check_health(), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="out of memory"): await call
        assert not llm.streams.collectors and not llm.output_processor.parents
        llm.shutdown()
    run(main)


def test_a_failing_handler_ends_everybody_and_stops_the_core(caplog):
    async def main():
        llm = make_llm(SlowExecutor)
        tasks = [asyncio.create_task(collect(llm, f"{i}", max_tokens=40)) for i in range(3)]
        while len(llm.output_processor.parents) < 3: await asyncio.sleep(0.001)
        def broken(*args): raise KeyError("a bug")
        llm.output_processor.process_outputs = broken
        async with asyncio.timeout(1): results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(type(r) is EngineDeadError and "a bug" in str(r) for r in results), results
        assert isinstance(llm.dead_error.__cause__, KeyError)
        scheduler = llm.engine_core.engine_core.scheduler
        while scheduler.requests: await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError, match="a bug"): await llm.check_health()
        llm.shutdown()
    run(main)
    assert "a bug" in caplog.text


def test_one_broken_answer_ends_alone(caplog):
    class Broken(ByteTokenizer):
        def token_bytes(self, token_id):
            if token_id == 66: raise KeyError("token 66")
            return super().token_bytes(token_id)
    async def main():
        llm = make_llm(tokenizer=Broken())
        bad, good = await asyncio.gather(collect(llm, "bad", [64]), collect(llm, "good", [97]))
        assert bad[-1].outputs[0].finish_reason == "abort" and "token 66" in bad[-1].outputs[0].stop_reason
        assert good[-1].outputs[0].text == "bcdefghi" and not llm.errored
        await settled(llm)
        llm.shutdown()
    run(main)


def test_shutdown_while_somebody_reads():
    async def main():
        llm = make_llm(SlowExecutor)
        tasks = [asyncio.create_task(collect(llm, f"{i}", max_tokens=40)) for i in range(3)]
        while len(llm.output_processor.parents) < 3: await asyncio.sleep(0.001)
        llm.shutdown(), llm.shutdown()
        async with asyncio.timeout(1): results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(type(r) is EngineDeadError and "shut down" in str(r) for r in results), results
        with pytest.raises(EngineDeadError, match="shut down"): await collect(llm)
        await llm.handler.task   # over
    run(main)


def test_shutdown_of_an_engine_that_never_ran():
    llm = make_llm()
    llm.shutdown()
    assert llm.errored


def test_a_stuck_core_is_found_out():
    entered, release = threading.Event(), threading.Event()
    class Stuck(ToyExecutor):
        def execute_model(self, order):
            entered.set()
            release.wait(10)
            return super().execute_model(order)
    async def main():
        llm = make_llm(Stuck)
        task = asyncio.create_task(collect(llm))
        await until(entered)
        with pytest.raises(TimeoutError): await llm.check_health(timeout_s=0.05)
        assert not llm.errored
        release.set()
        assert (await task)[-1].finished
        await llm.check_health(timeout_s=5)
        llm.shutdown()
    run(main)


# Event loops

def test_one_engine_in_two_event_loops():
    llm = make_llm(SlowExecutor)
    async def first():
        stream = llm.generate("abc", params(50), "left behind")
        await anext(stream)
        task = asyncio.create_task(collect(llm, "task", max_tokens=50))
        while len(llm.output_processor.parents) < 2: await asyncio.sleep(0.001)
        return stream, task
    async def second():
        assert len((await collect(llm, "left behind"))[-1].outputs[0].token_ids) == 8   # the same name, another loop
        await settled(llm)
        llm.shutdown()
    run(first)
    assert not llm.streams.collectors and not llm.output_processor.parents
    run(second)


def test_a_loop_that_was_closed_without_a_word():
    llm = make_llm(SlowExecutor)
    loop = asyncio.new_event_loop()
    stream = llm.generate("abc", params(50), "r")
    loop.run_until_complete(anext(stream))
    loop.close()
    async def second():
        assert len((await collect(llm, "r"))[-1].outputs[0].token_ids) == 8
        await settled(llm)
        llm.shutdown()
    run(second)


def test_two_loops_at_once_are_refused():
    llm = make_llm()
    async def main():
        await collect(llm)
        def elsewhere(): return asyncio.run(collect(llm, "other"))
        with pytest.raises(RuntimeError, match="another event loop"): await asyncio.to_thread(elsewhere)
        assert (await collect(llm))[-1].finished and not llm.errored
        llm.shutdown()
    run(main)


def test_a_cancelled_handler_is_replaced():
    async def main():
        llm = make_llm(SlowExecutor)
        task = asyncio.create_task(collect(llm, max_tokens=50))
        while not llm.output_processor.parents: await asyncio.sleep(0.001)
        llm.handler.task.cancel()
        with pytest.raises(RuntimeError, match="event loop"): await task
        assert (await collect(llm))[-1].finished and not llm.errored
        await settled(llm)
        llm.shutdown()
    run(main)


def test_two_engines_side_by_side():
    async def main():
        one, two = make_llm(), make_llm()
        task = asyncio.create_task(collect(two, "r", "mno"))
        assert (await collect(one, "r"))[-1].outputs[0].text == "defghijk"
        one.shutdown()
        assert (await task)[-1].outputs[0].text == "pqrstuvw" and not two.errored
        two.shutdown()
    run(main)


def test_dropped_without_shutdown():
    async def main():
        llm = make_llm()
        await collect(llm)
        core, task, gone = llm.engine_core, llm.handler.task, weakref.ref(llm)
        executor = core.engine_core.executor
        del llm
        gc.collect()
        assert gone() is None and core.closed
        await task
        while not executor.closed: await asyncio.sleep(0.001)
    run(main)


# Numbers

def test_stat_loggers_hear_of_every_step_once():
    records = []
    class Logger:
        def record(self, scheduler_stats, iteration_stats): records.append((scheduler_stats, iteration_stats))
    class Broken(Logger):
        def record(self, *stats): raise KeyError("broken logger")
    async def main():
        llm = make_llm(SlowExecutor, log_stats=True)
        llm.stat_loggers += [Broken(), Logger()]
        await asyncio.gather(*(collect(llm, f"{i}", max_tokens=6) for i in range(4)))
        assert len(llm.stat_loggers) == 1
        llm.shutdown()
        assert sum(s.num_generation_tokens for _, s in records) == 24
        assert sum(s.num_prompt_tokens for _, s in records) == 12
        assert sum(len(s.finished) for _, s in records) == 4
        assert max(stats.num_running_reqs for stats, _ in records) >= 2
        assert len(records) <= len(executor_of(llm).steps)
        quiet = make_llm()
        quiet.stat_loggers.append(Broken())
        await collect(quiet)
        assert quiet.stat_loggers
        quiet.shutdown()
    logging.disable()
    try: run(main)
    finally: logging.disable(logging.NOTSET)


def test_metrics_of_a_request():
    async def main():
        llm = make_llm(SlowExecutor, log_stats=True, max_num_seqs=1)
        before = time.time()
        first, second = await asyncio.gather(collect(llm, "1", max_tokens=10), collect(llm, "2", max_tokens=10))
        for outputs in (first, second):
            m = outputs[-1].metrics
            assert before <= m.arrival_time <= time.time()
            assert m.first_scheduled_time < m.first_token_time < m.last_token_time <= m.finished_time
            prefill, decode = m.first_token_time - m.first_scheduled_time, m.last_token_time - m.first_token_time
            assert prefill >= 0.003 and decode >= 9 * 0.003
            assert m.time_to_first_token >= m.time_in_queue + prefill
        assert second[-1].metrics.time_in_queue >= 0.02 > first[-1].metrics.time_in_queue
        assert first[0].metrics is not first[-1].metrics   # a moment's, not changed later
        llm.shutdown()
    run(main)


# Many at once

class FakeClient:
    "A core that is a list of steps."
    dead, refused = None, []
    def __init__(self): self.steps, self.added, self.aborted = asyncio.Queue(), [], []
    async def add_request_async(self, request): self.added.append(request.request_id)
    async def abort_requests_async(self, ids): self.aborted += ids
    async def get_output_async(self): return await self.steps.get()
    async def check_health_async(self, timeout_s): pass
    def shutdown(self): pass


def test_others_get_their_turn_between_slices():
    async def main():
        llm = make_llm()
        llm.shutdown()
        client = FakeClient()
        again = AsyncLLM.__new__(AsyncLLM)
        again.__dict__ |= llm.__dict__
        from concurrent.futures import ThreadPoolExecutor
        from minengine.v1.engine.output_handler import OutputHandler
        again.engine_core, again._tokenizer_thread = client, ThreadPoolExecutor(1)
        again.handler = OutputHandler(client, again.streams, False)
        num_requests, counts, real = 300, [], again.streams.take
        again.streams.take = lambda outputs, *args: counts.append(len(outputs)) or real(outputs, *args)
        tasks = [asyncio.create_task(collect(again, f"{i}", max_tokens=50)) for i in range(num_requests)]
        while len(client.added) < num_requests: await asyncio.sleep(0.001)
        turns = []
        async def watch():
            while True:
                await asyncio.sleep(0)
                turns.append(len(counts))
        watcher = asyncio.create_task(watch())
        for end in (None, 1): client.steps.put_nowait(EngineCoreOutputs([EngineCoreOutput(i, [97], finish_reason=end) for i in client.added]))
        await asyncio.gather(*tasks)
        watcher.cancel()
        assert counts == [128, 128, 44] * 2 and MAX_SLICE == 128
        assert set(turns) >= {1, 2, 3, 4, 5, 6}   # seen at every stage
        again._tokenizer_thread.shutdown()
    run(main)


def test_vllm_load():
    async def main():
        llm = make_llm(num_blocks=256, max_num_seqs=32)
        results = await asyncio.gather(*(collect(llm, f"request-{i}", "Hello my name is", 10, output_kind=DELTA) for i in range(100)))
        assert all(sum(len(o.outputs[0].token_ids) for o in r) == 10 for r in results)
        assert not llm.output_processor.has_unfinished_requests()
        await settled(llm)
        llm.shutdown()
    run(main)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_vllm_abort(kind):
    async def main():
        llm = make_llm(SlowExecutor, num_blocks=512, max_num_seqs=100, budget=128)
        tasks = [asyncio.create_task(collect(llm, f"request-{i}", "Hello my name is", 30 if i % 10 == 1 else 10, output_kind=kind))
                 for i in range(100)]
        while len(llm.output_processor.parents) < 100: await asyncio.sleep(0.001)
        for i in range(1, 100, 10): tasks[i].cancel()
        for i, task in enumerate(tasks):
            if i % 10 == 1:
                with pytest.raises(asyncio.CancelledError): await task
            else: assert sum(len(o.outputs[0].token_ids) for o in await task) == 10
        assert not llm.output_processor.has_unfinished_requests()
        again = await collect(llm, "request-1", "Hello my name is", 10, output_kind=kind)   # the name is free
        assert sum(len(o.outputs[0].token_ids) for o in again) == 10
        await settled(llm)
        llm.shutdown()
    run(main)


_folder = None


def make_tiny() -> str:
    return _folder


@pytest.fixture(scope="module", autouse=True)
def tiny_folder(tmp_path_factory):
    global _folder
    _folder = make_folder(tmp_path_factory.mktemp("tiny"))


def two_hundred_streams(args, prompts, wishes, num_rounds, limit_s, limit_mib):
    "A third leaves, by itself or cancelled; all others get the offline engine's tokens; nothing stays behind."
    rng, count = random.Random(0), len(prompts)
    offline = LLM(**copy.copy(args).__dict__)
    expected = [o.outputs[0].token_ids for o in offline.generate(prompts, [offline_params(p) for p in wishes], use_tqdm=False)]
    offline.shutdown()
    num_objects, resident = [], []
    async def main():
        llm = AsyncLLM.from_engine_args(args)
        async def read(i, leaves_after):
            ids = []
            async for o in llm.generate(prompts[i], wishes[i], f"{i}"):
                ids += o.outputs[0].token_ids
                if leaves_after is not None and len(ids) >= leaves_after: return None
            return ids
        for _ in range(num_rounds):
            leaving, started = set(rng.sample(range(count), count // 3)), time.monotonic()
            tasks = [asyncio.create_task(read(i, rng.randrange(1, 6) if i in leaving else None)) for i in range(count)]
            for i in sorted(leaving)[::2]:   # half of them break, half are cancelled
                asyncio.get_running_loop().call_later(rng.random() * 0.3, tasks[i].cancel)
            await asyncio.wait(tasks)
            for i in set(range(count)) - leaving: assert tasks[i].result() == expected[i], i
            del tasks
            await settled(llm)
            gc.collect()
            num_objects.append(len(gc.get_objects()))
            resident.append(int(open("/proc/self/statm").read().split()[1]) * 4 // 1024)
            print(f"round of {time.monotonic() - started:.1f} s, {num_objects[-1]} objects, {resident[-1]} MiB")
        llm.shutdown()
    run(main, limit_s)
    assert num_objects[-1] - num_objects[0] < 500, num_objects
    # oneDNN remembers up to 1024 ways of multiplying, one for each number of rows that it has met.
    assert resident[-1] - resident[0] < limit_mib, resident


def test_two_hundred_streams_and_a_third_leaves():
    rng, count = random.Random(0), 200
    prompts = [[rng.randrange(1, 256) for _ in range(rng.randrange(2, 20))] for _ in range(count)]
    wishes = [SamplingParams(max_tokens=rng.randrange(4, 12), ignore_eos=True, output_kind=rng.choice([DELTA, FINAL_ONLY]),
                             temperature=rng.choice([0.0, 1.0]), seed=i) for i in range(count)]
    args = EngineArgs(model=make_tiny(), **ARGS | dict(num_gpu_blocks_override=96, max_num_seqs=16))
    two_hundred_streams(args, prompts, wishes, 3, 50, limit_mib=100)


@pytest.mark.slow   # the default model, minutes on two cores
def test_two_hundred_streams_of_smollm2():
    rng, count = random.Random(0), 200
    words = "the sea a ship sails north under stars while people sing old songs of rain and gold".split()
    prompts = [" ".join(rng.choices(words, k=rng.randrange(4, 20))) for _ in range(count)]
    wishes = [SamplingParams(max_tokens=rng.randrange(8, 24), temperature=0, output_kind=rng.choice([DELTA, FINAL_ONLY]))
              for _ in range(count)]
    args = EngineArgs(max_model_len=256, max_num_seqs=64, num_gpu_blocks_override=400, use_tqdm_on_load=False)
    two_hundred_streams(args, prompts, wishes, 3, 900, limit_mib=500)


def offline_params(p: SamplingParams) -> SamplingParams:
    p = p.clone()
    p.output_kind = FINAL_ONLY
    return p


def test_text_equals_the_offline_engine():
    prompts = ["hello", "the quick brown fox", "ünïcödé €", "a" * 30]
    wishes = SamplingParams(max_tokens=20, temperature=0, logprobs=2, ignore_eos=True)
    args = EngineArgs(model=make_tiny(), **ARGS)
    offline = LLM(**copy.copy(args).__dict__)
    expected = offline.generate(prompts, wishes, use_tqdm=False)
    offline.shutdown()
    async def main():
        llm = AsyncLLM.from_engine_args(args)
        results = await asyncio.gather(*(last(llm.generate(p, wishes, f"{i}")) for i, p in enumerate(prompts)))
        for got, want in zip(results, expected):   # logprobs differ by rounding: other requests share the steps
            a, b = got.outputs[0], want.outputs[0]
            assert (a.text, a.token_ids, a.finish_reason, got.prompt_token_ids) == (
                b.text, b.token_ids, b.finish_reason, want.prompt_token_ids)
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
        assert (await llm.get_model_config()).max_model_len == llm.vllm_config.model_config.max_model_len
        assert await llm.reset_prefix_cache() and llm.startup_summary()
        llm.shutdown()
    async def last(outputs): return [o async for o in outputs][-1]
    run(main)


# The core in a process of its own

def make_mp_llm(**kw) -> AsyncLLM:
    return AsyncLLM(make_config(**kw), SlowExecutor, log_stats=True, tokenizer=ByteTokenizer(), multiprocess_mode=True)


async def mp_settled(llm):
    "Behind all aborts in the core's queue: nobody may remember anything."
    await llm.engine_core.call_utility_async("check_invariants")
    assert await llm.engine_core.call_utility_async("num_free_blocks") == llm.vllm_config.cache_config.num_gpu_blocks
    llm.streams.check_invariants()
    assert not llm.streams.collectors and not llm.output_processor.request_states and not llm.handler.aborts.tasks


def test_a_core_elsewhere():
    records = []
    llm = make_mp_llm(max_model_len=64)
    llm.stat_loggers.append(SimpleNamespace(record=lambda *stats: records.append(stats)))

    async def first():
        results = await asyncio.gather(
            *(collect(llm, f"{k}", output_kind=k) for k in RequestOutputKind), collect(llm, "two", n=2),
            collect(llm, "bad", [999]), return_exceptions=True)
        cumulative, deltas, final = results[:3]
        assert cumulative[-1].outputs == final[-1].outputs and final[0].outputs[0].text == "defghijk"
        assert "".join(o.outputs[0].text for o in deltas) == "defghijk"
        assert [a.finish_reason for a in results[3][-1].outputs] == ["length"] * 2 and isinstance(results[4], ValueError)
        m = final[0].metrics
        assert m.first_scheduled_time < m.first_token_time < m.last_token_time and m.time_to_first_token > m.time_in_queue
        for leave in (leave_by_break, leave_by_aclose, leave_by_cancel, leave_by_error, leave_before_the_first_token):
            await leave(llm)
            while "r" in llm.streams.collectors: await asyncio.sleep(0.001)
        task = asyncio.create_task(collect(llm, "aborted", max_tokens=50))
        while "aborted" not in llm.output_processor.parents: await asyncio.sleep(0.001)
        await llm.abort("aborted")
        assert (await task)[-1].outputs[0].finish_reason == "abort"
        await llm.check_health()
        await mp_settled(llm)
        assert sum(s.num_generation_tokens for _, s in records) >= 5 * 8
        assert records[-1][0].num_running_reqs == 0   # the last abort is reported too
        stream = llm.generate("abc", params(50), "left behind")
        await anext(stream)

    async def refused():
        "What passes the front end's door and not the core's ends one request."
        llm.processor.vllm_config = copy.deepcopy(llm.vllm_config)
        llm.processor.vllm_config.model_config.max_model_len = 1000
        bad, good = await asyncio.gather(collect(llm, "bad", "x" * 100), collect(llm, "good"), return_exceptions=True)
        assert isinstance(bad, ValueError) and "max_model_len 64" in str(bad)
        assert good[-1].outputs[0].text == "defghijk" and await llm.reset_prefix_cache()
        await mp_settled(llm)
    run(first), run(refused)
    llm.shutdown()
    assert not llm.engine_core.core.process.is_alive()


def test_kill_9_under_load():
    async def main():
        llm = make_mp_llm(max_num_seqs=32, num_blocks=512, max_model_len=250)
        tasks = [asyncio.create_task(collect(llm, f"{i}", max_tokens=240, output_kind=DELTA)) for i in range(20)]
        streams = [llm.generate("abc", params(240), f"slow {i}") for i in range(3)]
        for s in streams: await anext(s)
        os.kill(llm.engine_core.core.process.pid, signal.SIGKILL)
        async with asyncio.timeout(1.5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for s in streams:
                with pytest.raises(EngineDeadError): await read_to_the_end(s)
        assert all(type(r) is EngineDeadError and "SIGKILL" in str(r) for r in results), results
        assert llm.errored
        for call in (collect(llm), llm.check_health(), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="SIGKILL"): await call
        assert not llm.streams.collectors and not llm.output_processor.request_states
        llm.shutdown()
    async def read_to_the_end(stream): return [o async for o in stream]
    run(main)


@pytest.mark.slow   # a third process
def test_kill_9_while_idle():
    "Nobody waits, nobody has asked yet: it is seen all the same."
    async def main():
        llm = make_mp_llm()
        await llm.check_health()
        os.kill(llm.engine_core.core.process.pid, signal.SIGKILL)
        async with asyncio.timeout(1.5):
            while not llm.errored: await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="SIGKILL"): await llm.check_health()
        with pytest.raises(EngineDeadError, match="SIGKILL"): await collect(llm)
        llm.shutdown()
    run(main)
