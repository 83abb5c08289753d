"""Workers in processes fail: whoever waits hears of it at once, and nothing is left behind."""
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import worker_moods as moods
from worker_executors import Moody, Toys
from worker_moods import is_running, wait_until

from minengine.llm import LLM
from minengine.outputs import EngineDeadError
from minengine.sampling_params import SamplingParams
from minengine.v1 import multiproc_executor
from minengine.v1.engine.core_client import make_client
from minengine.v1.messages import EngineCoreRequest
from minengine.v1.multiproc_executor import MultiprocExecutor, WorkerGroup

SOON_S = 1.0   # what is promised; see `took`


def took(seconds: float) -> bool:
    "Whether it was in time; a machine that is busy with other tests gets some more."
    return seconds < SOON_S + 1


def exists(memory: str, directory: str) -> list[bool]:
    "Whether the ring's memory and the place where ranks meet are there."
    return [os.path.exists(f"/dev/shm/{memory}"), os.path.exists(directory)]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    "Of any group of workers that a test has made."
    groups, init = [], WorkerGroup.__init__
    def remember(group, *args):
        init(group, *args)
        groups.append((group.ring.handle.name, group.directory))
        assert exists(*groups[-1]) == [True, True]
    monkeypatch.setattr(WorkerGroup, "__init__", remember)
    yield
    gc.collect()
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("worker")]
    assert [exists(*group) for group in groups] == [[False, False]] * len(groups)


@pytest.fixture
def executor():
    made = Moody(moods.config())
    yield made
    made.shutdown()


def pids(executor): return [h.process.pid for h in executor.group.handles]


def fails_with(executor, kind, match, call):
    "`call()` raises in time; afterwards all processes are gone and every call says why."
    processes, start = pids(executor), time.monotonic()
    with pytest.raises(kind, match=match) as error: call()
    assert took(time.monotonic() - start)
    wait_until(lambda: not any(map(is_running, processes)), 2)
    with pytest.raises(RuntimeError, match=match.split(":")[0]): executor.check_health()
    with pytest.raises(RuntimeError): executor.collective_rpc("who")
    return error.value


# --- all is well ------------------------------------------------------------------

def test_calls_and_answers(executor):
    assert executor.collective_rpc("who") == list(enumerate(pids(executor)))
    assert executor.collective_rpc(moods.MoodyWorker.slow, args=(0,)) == [0, 0]
    assert executor.collective_rpc("slow", kwargs={"seconds": 0}, timeout=10) == [0, 0]
    answers = [executor.execute_model(("go on", None)) for _ in range(3)]
    assert [a.req_ids for a in answers] == [["step 1"], ["step 2"], ["step 3"]]
    assert all(a.sampled_token_ids == [[0]] for a in answers)       # rank 0's
    assert [len(b) for b in executor.collective_rpc("big", args=(3_000_000,))] == [3_000_000] * 2
    executor.check_health()
    # As soon as all are there, nobody can find the memory, and nothing can leave it behind.
    assert not os.path.exists(f"/dev/shm/{executor.group.ring.handle.name}")


def test_an_error_that_all_have_answered_is_only_an_error(executor):
    with pytest.raises(ZeroDivisionError) as error: executor.collective_rpc("fail", args=(1,))
    assert "the process of worker 1" in error.value.__notes__[0]
    with pytest.raises(AttributeError, match="no attribute 'nobody'"): executor.collective_rpc("nobody")
    with pytest.raises(AttributeError): executor.collective_rpc(lambda worker: 1)   # cannot travel
    assert [rank for rank, _ in executor.collective_rpc("who")] == [0, 1]


def test_a_call_that_was_given_up_is_not_mistaken_for_the_next(executor):
    with pytest.raises(TimeoutError, match=r"no answer from workers \[0, 1\] within 0.1 s"):
        executor.collective_rpc("slow", timeout=0.1, args=(0.5,))
    assert [rank for rank, _ in executor.collective_rpc("who", timeout=10)] == [0, 1]


def test_threads_take_turns(executor):
    found = []
    threads = [threading.Thread(target=lambda: found.append(executor.collective_rpc("who"))) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(20)
    assert found == [list(enumerate(pids(executor)))] * 8


# --- while it starts ---------------------------------------------------------------

@pytest.mark.parametrize("worker", [moods.DiesAtOnce, moods.DiesInLoad])
def test_killed_in_load(worker):
    kind = type("Dying", (MultiprocExecutor,), dict(worker_class=worker))
    with pytest.raises(RuntimeError, match="worker 1 was ended by SIGKILL"): kind(moods.config())
    again = Moody(moods.config())   # a fresh one starts at once
    assert len(again.collective_rpc("who")) == 2
    again.shutdown()


@pytest.mark.parametrize("worker", [moods.RaisesInLoad, moods.RaisesAlone])
def test_an_error_in_load_is_the_users(worker):
    "Even if the other rank would wait for ever."
    kind, start = type("Failing", (MultiprocExecutor,), dict(worker_class=worker)), time.monotonic()
    with pytest.raises(KeyError, match="here"): kind(moods.config())
    assert time.monotonic() - start < 30


# --- idle -------------------------------------------------------------------------------

@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_idle(executor, rank):
    heard = []
    executor.register_failure_callback(heard.append)
    os.kill(pids(executor)[rank], signal.SIGKILL)
    assert took(wait_until(lambda: heard))
    assert heard == [f"worker {rank} was ended by SIGKILL"]
    fails_with(executor, RuntimeError, heard[0], executor.check_health)
    executor.register_failure_callback(heard.append)   # too late: told at once
    assert len(heard) == 2


# --- in a step ----------------------------------------------------------------------------

@pytest.mark.parametrize("rank", [0, 1])
def test_killed_in_a_step(executor, rank):
    fails_with(executor, RuntimeError, f"worker {rank} was ended by SIGKILL",
               lambda: executor.execute_model(("die", rank)))


def test_killed_from_outside_while_others_wait(executor):
    "A kill while rank 0 computes and another thread waits for the lock."
    waiting = []
    def call():
        try: executor.execute_model(("sleep", 0))
        except RuntimeError as error: waiting.append(str(error))
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads: thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    os.kill(pids(executor)[1], signal.SIGKILL)
    for thread in threads: thread.join(10)
    assert took(time.monotonic() - start) and waiting == ["worker 1 was ended by SIGKILL"] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_step_is_raised_with_its_class(executor, rank):
    error = fails_with(executor, LookupError, f"rank {rank} is lost", lambda: executor.execute_model(("raise", rank)))
    assert f"the process of worker {rank}" in error.__notes__[0] and "execute_model" in error.__notes__[0]


def test_an_error_after_rank_0_has_answered_ends_the_next_call(executor):
    assert executor.execute_model(("raise late", 1)).req_ids == ["step 1"]
    fails_with(executor, LookupError, "rank 1 is lost", lambda: executor.collective_rpc("slow", args=(0.6,)))


# --- the end ----------------------------------------------------------------------------------

def test_shutdown_ends_all_and_twice_is_once(executor):
    processes = pids(executor)
    executor.shutdown()
    executor.shutdown()
    assert not any(map(is_running, processes))
    with pytest.raises(RuntimeError, match="was shut down"): executor.execute_model(("go on", None))


def test_one_that_is_stuck_is_killed(executor, monkeypatch):
    monkeypatch.setattr(multiproc_executor, "END_TIMEOUT_S", 0.2)
    processes = pids(executor)
    with pytest.raises(TimeoutError): executor.collective_rpc("slow", timeout=0.1, args=(3600,))
    executor.shutdown()
    assert not any(map(is_running, processes))


def test_an_executor_that_nobody_has_takes_its_workers_along():
    executor = Moody(moods.config())
    processes = pids(executor)
    del executor
    gc.collect()
    wait_until(lambda: not any(map(is_running, processes)), 5)


SCRIPT = """
import sys, time

def main():   # the workers import this script, but nothing that takes long
    import worker_moods as moods
    from worker_executors import Moody
    executor = Moody(moods.config())
    group = executor.group
    print(group.ring.handle.name, group.directory, *[h.process.pid for h in group.handles], flush=True)
    if sys.argv[1] == "killed": time.sleep(3600)
    if sys.argv[1] == "raises": raise ValueError("enough")

if __name__ == "__main__": main()
"""


@pytest.mark.parametrize("end", ["killed", "raises", "returns"])
def test_no_orphans_when_the_parent_ends(tmp_path, end):
    "Killed, by an exception, or by the end of the script, without a shutdown."
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    script = subprocess.Popen([sys.executable, "script.py", end], cwd=tmp_path, env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    memory, directory, *processes = script.stdout.readline().split()
    processes = list(map(int, processes))
    assert len(processes) == 2 and exists(memory, directory) == [False, True]
    if end == "killed": script.kill()
    errors = script.communicate(timeout=30)[1]
    assert script.returncode == {"killed": -9, "raises": 1, "returns": 0}[end], errors
    wait_until(lambda: not any(map(is_running, processes)), 5)
    assert exists(memory, directory) == [False, False]


# --- the whole engine, its core in a process of its own ---------------------------------------

def children(pid: int) -> list[int]:
    "Processes that a process has started and that run."
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError): continue
        if fields[1] == str(pid) and fields[0] != "Z": found.append(int(stat.parent.name))
    return found


def name(pid: int) -> str: return Path(f"/proc/{pid}/cmdline").read_text()


def start_core():
    "A core of toys, and the pids of its workers."
    client = make_client(True, False, moods.config(), Toys)
    core = client.core.process.pid
    workers = sorted(pid for pid in children(core) if "spawn_main" in name(pid))
    assert len(workers) == 2
    return client, core, workers


def next_tokens(client):
    "Of a request of three."
    client.add_request(EngineCoreRequest("a", None, [1, 2, 3], SamplingParams(max_tokens=3, temperature=0), None, 0.0))
    found = []
    while len(found) < 3: found += [t for o in client.get_output().outputs for t in o.new_token_ids]
    return found


def test_a_core_ends_with_its_worker_and_workers_with_their_core():
    client, core, workers = start_core()
    assert next_tokens(client) == [4, 5, 6]
    os.kill(workers[1], signal.SIGKILL)   # nobody is calling: the core waits for requests
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="worker 1 was ended by SIGKILL"): client.get_output()
    assert took(time.monotonic() - start)
    wait_until(lambda: not any(map(is_running, [core, *workers])), 5)
    again, core, workers = start_core()   # a fresh one starts at once
    assert next_tokens(again) == [4, 5, 6]
    os.kill(core, signal.SIGKILL)         # with no chance to say goodbye to anybody
    with pytest.raises(EngineDeadError, match="was ended by SIGKILL"): again.get_output()
    wait_until(lambda: not any(map(is_running, [core, *workers])), 5)
    for each in client, again: each.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.3)).save_pretrained(made)
    return str(made)


def start_engine(folder, **args):
    "With its pids: of the core, and of its workers."
    llm = LLM(folder, tokenizer="byte", dtype="float32", tensor_parallel_size=2, enable_multiprocessing=True,
              num_gpu_blocks_override=512, use_tqdm_on_load=False, **args)
    core = llm.llm_engine.engine_core.core.process.pid
    workers = [pid for pid in children(core) if "spawn_main" in name(pid)]
    assert len(workers) == 2
    return llm, core, sorted(workers)


@pytest.mark.slow
def test_a_worker_dies_in_an_idle_engine_and_a_fresh_one_starts(folder):
    long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True, detokenize=False)
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm, core, workers = start_engine(folder)
    wanted = llm.generate("hello", short, use_tqdm=False)[0].outputs[0].token_ids
    os.kill(workers[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="worker 1 was ended by SIGKILL"):
        while True: llm.generate("hello", short, use_tqdm=False)
    assert took(time.monotonic() - start)
    wait_until(lambda: not any(map(is_running, [core, *workers])), 5)

    llm, core, workers = start_engine(folder)   # the other one has not even been shut down
    assert llm.generate("hello", short, use_tqdm=False)[0].outputs[0].token_ids == wanted
    # Now the core, in the middle of a step, and with no chance to say goodbye to anybody.
    threading.Timer(0.5, os.kill, (core, signal.SIGKILL)).start()
    with pytest.raises(EngineDeadError, match="was ended by SIGKILL"): llm.generate("hello", long, use_tqdm=False)
    wait_until(lambda: not any(map(is_running, [core, *workers])), 5)
    llm.shutdown()


def test_a_worker_dies_in_a_forward_pass(folder):
    "Rank 0 waits for its part of a sum: what it says when the connection breaks is not the cause."
    llm = LLM(folder, tokenizer="byte", dtype="float32", tensor_parallel_size=2, num_gpu_blocks_override=512,
              use_tqdm_on_load=False)
    executor = llm.llm_engine.engine_core.engine_core.executor
    processes = pids(executor)
    threading.Timer(0.5, os.kill, (processes[1], signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match="^worker 1 was ended by SIGKILL$"):
        llm.generate("hello", SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True), use_tqdm=False)
    wait_until(lambda: not any(map(is_running, processes)), 2)
    llm.shutdown()
