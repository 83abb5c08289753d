"""A core in a process of its own: it lives, answers, dies and leaves nothing behind.

Every test has a time limit; nothing here may hang.
"""
import asyncio
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

import minengine.v1.engine.core_handle as core_handle
from front_tiny import ARGS, ToyExecutor, make_config, make_folder
from minengine.llm import LLM
from minengine.outputs import EngineDeadError
from minengine.sampling_params import SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v1.engine.core import EngineCore
from minengine.v1.engine.core_client import AsyncMPClient, SyncMPClient, make_client
from minengine.v1.engine.core_handle import CoreHandle, make_directory, remote_error
from minengine.v1.engine.core_process import EngineCoreProcess, encode_or_refuse
from minengine.v1.engine.llm_engine import LLMEngineV1
from minengine.v1.engine.wire import FrameType, UtilityCall, WireError, decode, encode
from minengine.v1.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from process_tiny import (
    BAD_OUTPUT, DIE, HANG, RAISE, SLOW, DiesAtStart, FailsAtStart, MoodyExecutor, NeverStarts, is_alive, wait_until)

LIMIT_S = 60  # a process under load needs seconds to start; no test needs this


@pytest.fixture(autouse=True)
def time_limit():
    def stop(*args): raise TimeoutError(f"test not done after {LIMIT_S} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_request(request_id, prompt=(1, 2, 3), **params) -> EngineCoreRequest:
    params = SamplingParams(**({"temperature": 0, "ignore_eos": True, "max_tokens": 5} | params))
    return EngineCoreRequest(request_id, None, list(prompt), params, 257, 0.0)


def start(asyncio_mode=False, executor=MoodyExecutor, log_stats=False, **config):
    return make_client(True, asyncio_mode, make_config(**config), executor, log_stats)


def handle_of(client) -> CoreHandle: return client.core


def pid_of(client) -> int: return client.core.process.pid


class Awaited:
    "The asynchronous clients behind the synchronous interface, so that one test serves all."

    def __init__(self, client, loop): self.client, self.loop = client, loop

    def __getattr__(self, name):
        method = getattr(self.client, name + "_async", None)
        if method is None: return getattr(self.client, name)
        async def call(*args):
            async with asyncio.timeout(30): return await method(*args)
        return lambda *args: self.loop.run_until_complete(call(*args))


MODES = {"inproc": (False, False), "async-inproc": (False, True), "process": (True, False),
         "async-process": (True, True)}


@pytest.fixture(scope="module", params=MODES)
def any_client(request):
    modes = MODES[request.param]
    client, loop = make_client(*modes, make_config(), MoodyExecutor), asyncio.new_event_loop()
    yield Awaited(client, loop) if modes[1] else client
    client.shutdown()
    loop.close()


@pytest.fixture(scope="module", params=["process", "async-process"])
def process_client(request):
    modes = MODES[request.param]
    client, loop = make_client(*modes, make_config(), MoodyExecutor), asyncio.new_event_loop()
    yield Awaited(client, loop) if modes[1] else client
    client.shutdown()
    loop.close()


def collect(client, ids) -> dict[str, list[int]]:
    tokens, left = {i: [] for i in ids}, set(ids)
    while left:
        for output in client.get_output().outputs:
            if output.request_id not in left: continue
            tokens[output.request_id] += output.new_token_ids
            if output.finished: left.discard(output.request_id)
    return tokens


# Life

def test_ten_requests_and_every_second_one_aborted(any_client):
    ids = [f"r{i}" for i in range(10)]
    for i in ids: any_client.add_request(make_request(i, max_tokens=20))
    assert all(len(t) == 20 for t in collect(any_client, ids).values())
    for i in ids:  # the same names again
        any_client.add_request(make_request(i, max_tokens=20))
        if int(i[1:]) % 2 == 0: any_client.abort_requests([i])
    assert all(t == list(range(4, 24)) for t in collect(any_client, ids[1::2]).values())
    assert any_client.reset_prefix_cache() is True


def test_aborts_of_the_unknown_the_finished_and_twice(any_client):
    any_client.abort_requests(["nobody"])
    any_client.abort_requests([])
    any_client.add_request(make_request("a", max_tokens=2))
    collect(any_client, ["a"])
    any_client.abort_requests(["a"])
    any_client.add_request(make_request("b", max_tokens=50))
    any_client.abort_requests(["b", "b"])
    any_client.abort_requests(["b"])
    any_client.add_request(make_request("c"))
    assert collect(any_client, ["c"])["c"] == [4, 5, 6, 7, 8]
    assert any_client.reset_prefix_cache() is True  # nobody holds a block


def test_prefix_cache_is_in_use_while_a_request_runs(any_client):
    any_client.add_request(make_request("a", [SLOW, *range(19)], max_tokens=40))
    any_client.get_output()
    assert any_client.reset_prefix_cache() is False
    any_client.abort_requests(["a"])
    assert any_client.reset_prefix_cache() is True


def test_summary_and_health(any_client):
    assert any_client.startup_summary() == {"weights_bytes": 0, "kv_cache_bytes": 0}
    assert any_client.dead is None and any_client.refused == []
    if hasattr(any_client, "check_health"): any_client.check_health()


def test_utilities(process_client):
    call = process_client.call_utility
    assert call("echo", "testarg") == "testarg"
    with pytest.raises(RuntimeError, match="Call to echo method failed: help!"): call("echo", "testarg", "help!")
    with pytest.raises(ValueError, match="Call to run method failed: known are reset_prefix_cache"): call("run")
    with pytest.raises(TypeError, match="Call to echo method failed"): call("echo")
    call("check_invariants")
    assert call("num_free_blocks") == 64


def test_what_the_core_found_out_comes_back():
    config = make_config(max_model_len=None, num_blocks=16)  # 64 tokens, the model takes 256
    client = make_client(True, False, config, ToyExecutor)
    try: assert (config.model_config.max_model_len, config.scheduler_config.max_model_len,
                 config.cache_config.num_gpu_blocks, config.cache_config.num_cpu_blocks) == (64, 64, 16, 0)
    finally: client.shutdown()


def test_two_engines_side_by_side_and_one_ends():
    a, b = start(), start()
    try:
        assert a.core.connection.directory != b.core.connection.directory and pid_of(a) != pid_of(b)
        for client in (a, b): client.add_request(make_request("same"))
        assert collect(a, ["same"]) == collect(b, ["same"])
        a.shutdown()
        b.add_request(make_request("again"))
        assert collect(b, ["again"])["again"] == [4, 5, 6, 7, 8]
    finally: a.shutdown(), b.shutdown()


# Bad requests harm themselves

def test_a_refused_request_alone_is_refused(process_client):
    process_client.add_request(make_request("twice", [SLOW, 2, 3], max_tokens=20))
    process_client.add_request(make_request("twice"))
    no_params = make_request("no params")
    no_params.sampling_params = None
    process_client.add_request(no_params)
    process_client.add_request(make_request("good"))
    assert len(collect(process_client, ["twice", "good"])["twice"]) == 20
    refused = dict(process_client.refused)
    assert set(refused) == {"twice", "no params"} and "'twice'" in refused["twice"]
    process_client.refused.clear()


def test_bad_frames_harm_nobody(process_client):
    tag, data = encode(FrameType.ADD, make_request("half"))
    process_client.add_request(make_request("before", max_tokens=20))
    for frames in ([b""], [b"?", b"?"], [b"\x00", b"\xc1"], [tag, data[:-3]], [tag, data, b"extra"], [b"\x11", b"\x90"],
                   [b"\x02", b"\x00"], [b"\x01", b"\xa1x"], [os.urandom(8) for _ in range(5)]):
        assert handle_of(process_client).connection.send(frames)
    process_client.add_request(make_request("after"))
    assert len(collect(process_client, ["before", "after"])["before"]) == 20
    # One of them was somebody's request, and says so.
    while not process_client.refused: assert process_client.get_output().outputs == []
    assert process_client.refused[0][0] == "half" and "ADD" in process_client.refused[0][1]
    process_client.refused.clear()


def test_what_cannot_travel_is_not_sent(process_client):
    request = make_request("f")
    request.sampling_params.logits_processors = [print]
    with pytest.raises(WireError, match="logits_processors"): process_client.add_request(request)
    process_client.add_request(make_request("g"))
    assert collect(process_client, ["g"])["g"] == [4, 5, 6, 7, 8]


def test_an_output_that_cannot_travel_harms_its_request(process_client):
    process_client.add_request(make_request("bad", [BAD_OUTPUT, 1], max_tokens=20, logprobs=1))
    process_client.add_request(make_request("good"))
    assert collect(process_client, ["good"])["good"] == [4, 5, 6, 7, 8]
    while not process_client.refused: process_client.get_output()
    assert process_client.refused.pop()[0] == "bad" and not process_client.refused
    wait_until(lambda: process_client.call_utility("num_free_blocks") == 64)


def test_encode_or_refuse_splits_a_step():
    outputs = [EngineCoreOutput(name, tokens) for name, tokens in (("a", [1]), ("b", [object()]), ("c", [3]))]
    messages, bad = encode_or_refuse(FrameType.OUTPUTS, EngineCoreOutputs(outputs, None, 1.5))
    kinds, parts = zip(*map(decode, messages))
    assert bad == ["b"] and kinds == (FrameType.OUTPUTS, FrameType.REFUSED, FrameType.OUTPUTS)
    assert [parts[0].outputs[0].request_id, parts[1].request_id, parts[2].outputs[0].request_id] == ["a", "b", "c"]
    assert parts[0].timestamp == 1.5


def test_engine_ends_the_refused_request_and_no_other():
    engine = LLMEngineV1(make_config(), MoodyExecutor, tokenizer=ByteTokenizer(), multiprocess=True)
    try:
        engine.add_request("bad", [BAD_OUTPUT, 1], SamplingParams(max_tokens=20, logprobs=1))
        engine.add_request("good", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0))
        last = errors = None
        while engine.has_unfinished_requests():
            try: last = engine.step() or last
            except ValueError as e: errors = str(e)
        assert "request 'bad'" in errors and last[0].request_id == "good"
        assert last[0].outputs[0].token_ids == list(range(4, 24))
        assert engine.step() == []  # an idle core says nothing: nobody waits for it
    finally: engine.shutdown()


# The loop, without any process

def run_loop(messages, log_stats=False, **config):
    core, inbox, outbox = EngineCore(make_config(**config), ToyExecutor, log_stats), SimpleQueue(), SimpleQueue()
    for message in messages: inbox.put(message)
    inbox.put((FrameType.UTILITY, UtilityCall(0, "shutdown")))
    EngineCoreProcess(core, inbox, outbox, log_stats).run()
    return core, [outbox.get() for _ in range(outbox.qsize())]


def test_loop_drains_its_queue_before_each_step():
    core, sent = run_loop([(FrameType.ADD, make_request("a")), (FrameType.ABORT, ["a"]),
                           (FrameType.ADD, make_request("a")), (FrameType.ADD, make_request("b"))])
    assert sum(core.executor.steps) == 0  # told to stop before a step was due
    assert [kind for kind, _ in sent] == [FrameType.UTILITY_OUTPUT]


def test_an_end_by_abort_is_seen_in_the_statistics():
    _, sent = run_loop([(FrameType.ADD, make_request("a")), (FrameType.ABORT, ["a"])], log_stats=True)
    stats = [m.scheduler_stats for kind, m in sent if kind is FrameType.OUTPUTS]
    assert len(stats) == 1 and stats[0].num_running_reqs == stats[0].num_waiting_reqs == 0


def test_a_thread_that_fails_ends_the_loop():
    core, inbox = EngineCore(make_config(), ToyExecutor), SimpleQueue()
    inbox.put((None, OSError("socket gone")))
    with pytest.raises(OSError, match="socket gone"): EngineCoreProcess(core, inbox, SimpleQueue()).run()


def test_the_cores_process_knows_no_text():
    "No tokenisation, no detokenisation: there is nothing there that could do it."
    code = ("import sys, minengine.v1.engine.core_process; "
            "print({'transformers', 'tokenizers', 'minengine.tokenizer', 'minengine.output_text', 'minengine.inputs', "
            "'minengine.v1.engine.processor', 'minengine.v1.engine.output_processor'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


# Death

def in_thread(function):
    "Start `function` in a thread; the function returned waits for its exception."
    box = []
    def run():
        try: box.append(function())
        except BaseException as e: box.append(e)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    def result():
        thread.join(20)
        assert box, "still waiting"
        return box[0]
    return result


def assert_dead(client, match):
    for call in (client.get_output, client.reset_prefix_cache, client.check_health,
                 lambda: client.add_request(make_request("late"))):
        with pytest.raises(EngineDeadError, match=match): call()
    client.abort_requests(["late"])  # they have ended: nothing to do
    assert isinstance(client.dead, EngineDeadError)
    directory = client.core.connection.directory
    client.shutdown()
    assert not is_alive(pid_of(client)) and not Path(directory).exists()


def test_kill_9_reaches_a_waiting_call():
    client = start()
    result = in_thread(client.get_output)
    time.sleep(0.1)
    os.kill(pid_of(client), signal.SIGKILL)
    begin = time.monotonic()
    error = result()
    assert isinstance(error, EngineDeadError) and "SIGKILL" in str(error) and time.monotonic() - begin < 1
    assert_dead(client, "SIGKILL")


def test_kill_9_reaches_every_awaited_call():
    client = start(asyncio_mode=True)
    async def main():
        await client.add_request_async(make_request("r", [SLOW], max_tokens=60))
        calls = [asyncio.ensure_future(c) for c in (
            client.call_utility_async("echo", 1), client.check_health_async())]
        os.kill(pid_of(client), signal.SIGSTOP)  # no answer can come any more
        calls += [asyncio.ensure_future(client.call_utility_async("echo", 2))]
        await asyncio.sleep(0.1)
        os.kill(pid_of(client), signal.SIGKILL)
        begin = time.monotonic()
        async with asyncio.timeout(20):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                while True: await client.get_output_async()
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - begin < 1.5 and isinstance(results[2], EngineDeadError), results
    asyncio.run(main())
    assert_dead(Awaited(client, loop := asyncio.new_event_loop()), "SIGKILL")
    loop.close()


@pytest.mark.parametrize("asyncio_mode", [False, True])
@pytest.mark.parametrize("wish, match", [(RAISE, "the engine's loop failed: RuntimeError: out of luck"),
                                         (DIE, "ended with exit code 7")])
def test_a_failing_step(wish, match, asyncio_mode, capfd):
    client, loop = start(asyncio_mode), asyncio.new_event_loop()
    both = Awaited(client, loop) if asyncio_mode else client
    both.add_request(make_request("good", max_tokens=3))
    assert len(collect(both, ["good"])["good"]) == 3
    both.add_request(make_request("bad", [wish, 1]))
    with pytest.raises(EngineDeadError, match=match): both.get_output()
    wait_until(lambda: not is_alive(pid_of(client)))
    if wish == RAISE: assert "out of luck" in capfd.readouterr().err  # logged where it happened, too
    assert_dead(both, match)
    loop.close()


def test_a_failing_step_in_a_thread(caplog):
    async def main():
        client = make_client(False, True, make_config(), MoodyExecutor)
        await client.add_request_async(make_request("bad", [RAISE, 1]))
        async with asyncio.timeout(20):
            with pytest.raises(EngineDeadError, match="RuntimeError: out of luck"): await client.get_output_async()
            for call in (client.get_output_async, client.check_health_async):
                with pytest.raises(EngineDeadError, match="out of luck"): await call()
            await client.abort_requests_async(["bad"])
        assert client.dead is not client.dead  # a new error for everybody who raises it
        client.shutdown()
    asyncio.run(main())
    assert "a step failed" in caplog.text


@pytest.mark.parametrize("asyncio_mode", [False, True])
def test_a_stuck_loop(asyncio_mode, monkeypatch):
    client, loop = start(asyncio_mode), asyncio.new_event_loop()
    both = Awaited(client, loop) if asyncio_mode else client
    both.add_request(make_request("bad", [HANG, 1]))
    with pytest.raises(TimeoutError):
        while True: both.check_health(0.3)  # the first ones may come before the step
    assert both.dead is None and is_alive(pid_of(client))  # it is for others to judge
    monkeypatch.setattr(core_handle, "SHUTDOWN_TIMEOUT_S", 0.3)
    begin = time.monotonic()
    client.shutdown()
    assert not is_alive(pid_of(client)) and time.monotonic() - begin < 5
    loop.close()


# Start

@pytest.fixture
def no_child_left():
    "Whatever a test starts has ended with it: processes and directories."
    def found(): return {p.pid for p in multiprocessing.active_children()} | set(Path(tempfile.gettempdir()).glob("me-*"))
    before = found()
    yield
    wait_until(lambda: found() <= before)


def named(name, **config):
    config = make_config(**config)
    config.model_config.model = name
    return config


def test_start_up_errors_are_the_childs_own(no_child_left):
    with pytest.raises(ValueError, match="^no such model here") as caught: SyncMPClient(named("value"), FailsAtStart)
    assert "FailsAtStart" in str(caught.value.__notes__) or "process_tiny.py" in str(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="^OddError: no such model here"): AsyncMPClient(named("odd"), FailsAtStart)
    with pytest.raises(RuntimeError, match="^SystemExit: no such"): SyncMPClient(named("exit"), FailsAtStart)
    with pytest.raises(ValueError, match="max_model_len"):  # the core's own check, as in process
        SyncMPClient(make_config(max_model_len=256, num_blocks=2), ToyExecutor)


def test_a_silent_death_at_the_start(no_child_left):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="ended with exit code 3 before it was ready"):
        SyncMPClient(make_config(), DiesAtStart)
    assert time.monotonic() - begin < 20


def test_start_has_a_time_limit(no_child_left):
    with pytest.raises(TimeoutError, match="no answer from the engine process after 0.5 s"):
        CoreHandle(make_config(), NeverStarts, start_timeout_s=0.5)


def test_what_cannot_be_pickled_is_refused_at_once():
    class Local(ToyExecutor): pass
    with pytest.raises((AttributeError, TypeError), match="Local"): SyncMPClient(make_config(), Local)


def test_remote_errors():
    assert type(remote_error("ValueError", "x")) is ValueError
    for name in ("OutOfMemoryError", "KeyboardInterrupt", "print", "__doc__"):
        error = remote_error(name, "x", "trace")
        assert type(error) is RuntimeError and str(error) == f"{name}: x" and "trace" in error.__notes__[0]
    assert type(remote_error("UnicodeDecodeError", "x")) is RuntimeError  # takes five arguments


# Addresses

def test_a_long_temporary_folder(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    client = start()
    try:
        assert Path(client.core.connection.directory).parent == Path("/tmp")
        assert client.call_utility("echo", 5) == 5
    finally: client.shutdown()


def test_no_short_folder_at_all(monkeypatch):
    monkeypatch.setattr(core_handle, "MAX_PATH_BYTES", 3)
    a, b = start(), start()
    try:
        assert a.core.connection.directory is None
        assert a.core.connection.input_address.startswith("tcp://127.0.0.1:")
        assert len({c.core.connection.input_address for c in (a, b)}) == 2
        assert a.call_utility("echo", 5) == 5 and b.call_utility("echo", 6) == 6
    finally: a.shutdown(), b.shutdown()


def test_directories(tmp_path, caplog):
    made = make_directory((str(tmp_path / "missing"), tempfile.gettempdir()))
    assert made.startswith(os.path.join(tempfile.gettempdir(), "me-")) and "missing" in caplog.text
    assert os.stat(made).st_mode & 0o777 == 0o700  # nobody else may connect
    shutil.rmtree(made)
    assert make_directory(("/" + "y" * 120,)) is None


# The end

def test_shutdown_leaves_nothing_and_wakes_who_waits():
    client = start()
    result, directory = in_thread(client.get_output), Path(client.core.connection.directory)
    assert directory.exists()
    client.shutdown()
    client.shutdown()
    error = result()
    assert isinstance(error, EngineDeadError) and "shut down" in str(error)
    assert not is_alive(pid_of(client)) and not directory.exists()
    assert client.core.process.exitcode == 0  # it went by itself


@pytest.mark.parametrize("modes", [(True, True), (False, True)])
def test_shutdown_wakes_who_awaits(modes):
    client = make_client(*modes, make_config(), MoodyExecutor)
    async def main():
        waiting = asyncio.ensure_future(client.get_output_async())
        await asyncio.sleep(0.05)
        client.shutdown()
        async with asyncio.timeout(10):
            with pytest.raises(EngineDeadError, match="shut down"): await waiting
    asyncio.run(main())


@pytest.mark.parametrize("asyncio_mode", [False, True])
def test_garbage_collection_ends_the_process(asyncio_mode):
    client = start(asyncio_mode)
    pid, directory = pid_of(client), client.core.connection.directory
    client.me = client  # a cycle: only the collector frees it
    del client
    gc.collect()
    wait_until(lambda: not is_alive(pid) and not Path(directory).exists())


def test_another_event_loop_may_take_over():
    for modes in ((False, True), (True, True)):
        client = make_client(*modes, make_config(), MoodyExecutor)
        async def one(name):
            await client.add_request_async(make_request(name))
            tokens = []
            while len(tokens) < 5:
                async with asyncio.timeout(20): outputs = await client.get_output_async()
                tokens += [t for o in outputs.outputs if o.request_id == name for t in o.new_token_ids]
            return tokens
        async def leave():
            await client.add_request_async(make_request("left"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0): await client.get_output_async()
        try:
            assert asyncio.run(one("a")) == [4, 5, 6, 7, 8]
            asyncio.run(leave())  # a cancelled wait loses nothing
            assert asyncio.run(one("b")) == [4, 5, 6, 7, 8]
        finally: client.shutdown()


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from front_tiny import make_config
from process_tiny import MoodyExecutor
from minengine.v1.engine.core_client import make_client
def main():
    client = make_client(True, {asyncio_mode}, make_config(), MoodyExecutor)
    print(client.core.process.pid, client.core.connection.directory, flush=True)
    {end}
if __name__ == "__main__": main()
"""


def run_script(tmp_path, end, asyncio_mode=False, **kw):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parent), end=end, asyncio_mode=asyncio_mode))
    script = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)
    pid, directory = script.stdout.readline().split()
    return script, int(pid), Path(directory)


@pytest.mark.parametrize("asyncio_mode", [False, True])
@pytest.mark.parametrize("end, code", [
    ("pass", 0), ("raise KeyError('mine')", 1), ("os._exit(5)", 5), ("sys.exit(4)", 4),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("client.core.stopped = True", 0)])
def test_no_way_out_leaves_an_orphan(end, code, asyncio_mode, tmp_path):
    if "stopped" in end: end += "; os._exit(0)"  # nobody tells the child
    script, pid, directory = run_script(tmp_path, end, asyncio_mode)
    _, errors = script.communicate(timeout=30)
    assert script.returncode == code, errors
    wait_until(lambda: not is_alive(pid) and not directory.exists())
    assert "Traceback" not in errors or "mine" in errors


@pytest.mark.parametrize("asyncio_mode", [False, True])
def test_ctrl_c_ends_both_and_is_the_parents_to_tell(asyncio_mode, tmp_path):
    script, pid, directory = run_script(tmp_path, "time.sleep(60)", asyncio_mode, start_new_session=True)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    _, errors = script.communicate(timeout=30)
    assert errors.count("KeyboardInterrupt") == 1 and script.returncode == -signal.SIGINT, errors
    wait_until(lambda: not is_alive(pid) and not directory.exists())


def test_sigterm_to_all_is_the_parents_to_obey(tmp_path):
    script, pid, directory = run_script(tmp_path, "time.sleep(60)", start_new_session=True)
    os.killpg(script.pid, signal.SIGTERM)  # as a service manager does
    script.communicate(timeout=30)
    assert script.returncode == -signal.SIGTERM
    wait_until(lambda: not is_alive(pid) and not directory.exists())


def test_signals_are_left_to_the_parent():
    client = start()
    for _ in range(3):
        os.kill(pid_of(client), signal.SIGINT)
        os.kill(pid_of(client), signal.SIGTERM)
    assert client.call_utility("echo", 1) == 1
    client.shutdown()


def test_ctrl_c_while_the_core_starts(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parent), end="pass", asyncio_mode=False)
                    .replace("MoodyExecutor", "NeverStarts").replace("def main():", "def main():\n    print(flush=True)"))
    script = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              start_new_session=True)
    script.stdout.readline()
    group = lambda: [p for p in Path("/proc").glob("[0-9]*") if is_alive(int(p.name)) and _group(p) == script.pid]
    wait_until(lambda: len(group()) >= 2)  # the child is there, and not ready
    time.sleep(0.3)
    os.killpg(script.pid, signal.SIGINT)
    _, errors = script.communicate(timeout=30)
    assert errors.count("KeyboardInterrupt") == 1, errors
    wait_until(lambda: not group())


def _group(proc: Path) -> int:
    try: return int((proc / "stat").read_text().rpartition(")")[2].split()[2])
    except (FileNotFoundError, ProcessLookupError): return -1


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parent), end="pass", asyncio_mode=False)
                    .replace('if __name__ == "__main__": main()', "main()"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and 'if __name__ == "__main__":' in done.stderr.split("RuntimeError")[-1], done.stderr


def test_a_forked_copy_of_the_parent_ends_nothing():
    client = start()
    pid = os.fork()
    if pid == 0:
        client.shutdown()
        os._exit(0)
    os.waitpid(pid, 0)
    assert client.call_utility("echo", 1) == 1
    client.shutdown()


# The front door

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_folder(tmp_path_factory.mktemp("model") / "tiny")


def test_llm_across_the_border(folder):
    prompts, params = ["hello", "a longer prompt", "x"], [
        SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1, seed=7, max_tokens=9, n=2), SamplingParams(temperature=0, stop=["e"], max_tokens=20)]
    answers = []
    for process in (False, True):
        llm = LLM(folder, enable_multiprocessing=process, **ARGS)
        outs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([[(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outs])
        with pytest.raises(ValueError, match="max_model_len"): llm.generate([[1] * 300], use_tqdm=False)
        streamed = list(llm.stream("hello", params[0]))
        assert streamed[-1].outputs[0].token_ids == outs[0].outputs[0].token_ids
        assert llm.reset_prefix_cache() is True
        if process:
            os.kill(pid_of(llm.llm_engine.engine_core), signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="SIGKILL"): llm.generate(prompts, params, use_tqdm=False)
            assert not llm.llm_engine.has_unfinished_requests()
        llm.shutdown()
    assert answers[0] == answers[1]


def test_engine_dies_under_generate():
    engine = LLMEngineV1(make_config(), MoodyExecutor, tokenizer=ByteTokenizer(), multiprocess=True)
    engine.add_request("good", [1, 2, 3], SamplingParams(max_tokens=30))
    engine.step()
    engine.add_request("bad", [RAISE, 2], SamplingParams(max_tokens=30))
    with pytest.raises(EngineDeadError, match="out of luck"):
        while engine.has_unfinished_requests(): engine.step()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="out of luck"): engine.add_request("new", [1], SamplingParams())
    assert not engine.has_unfinished_requests()
    engine.shutdown()
