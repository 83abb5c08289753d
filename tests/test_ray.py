"""Ray's actors as workers, and servers side by side in Ray Serve: on a cluster of this machine alone.

Skipped where Ray is not installed (`pip install 'minengine[ray]'`), but for what needs none of it.
"""
import builtins
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import httpx
import pytest
from process_tiny import is_alive, wait_until
from served import make_model
from v1_tiny import tiny_config

from minengine.config import EngineArgs, ParallelConfig
from minengine.model.checkpoint import create_engine_config
from minengine.sampling_params import SamplingParams
from minengine.server.launcher import bind
from minengine.server.ray_serve import build_serve_app
from minengine.v1.engine.llm_engine import LLMEngineV1
from minengine.v1.executor import Executor

ROOT = Path(__file__).parent.parent
SMALL = dict(include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)


# ---------------------------------------------------------------- without Ray

def test_without_ray_the_extra_is_named(monkeypatch):
    real = builtins.__import__
    def no_ray(name, *args, **kwargs):
        if name.split(".")[0] == "ray": raise ImportError("no module named ray")
        return real(name, *args, **kwargs)
    config = replace(tiny_config(), parallel_config=ParallelConfig(distributed_executor_backend="ray"))
    monkeypatch.setattr(builtins, "__import__", no_ray)
    with pytest.raises(ImportError, match=r"pip install 'minengine\[ray\]'"): Executor.get_class(config)(config)
    with pytest.raises(ImportError, match=r"pip install 'minengine\[ray\]'"): build_serve_app(EngineArgs())


# ---------------------------------------------------------------- one cluster for the module

@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'minengine[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))   # or Ray writes one to the user's home
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        ray.init(num_cpus=4, **SMALL)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)


def engine_config(folder, size=1, **args):
    backend = "ray" if size > 1 else None
    return create_engine_config(EngineArgs(
        folder, tokenizer="byte", num_gpu_blocks_override=64, max_num_seqs=8, use_tqdm_on_load=False,
        max_num_batched_tokens=32, tensor_parallel_size=size, distributed_executor_backend=backend, device="cpu", **args))


PROMPTS = [[5, 17, 80], list(range(40, 80)), list(range(40, 75)) + [3], [9]]
PARAMS = [dict(temperature=0, logprobs=2), dict(temperature=0), dict(temperature=1, seed=3), dict(temperature=1, seed=5, n=2)]


def answers(config):
    "Tokens and logprobs of all prompts, together and then one more that begins like the second."
    engine, found = LLMEngineV1(config), {}
    try:
        for i, (prompt, params) in enumerate(zip(PROMPTS + [PROMPTS[1][:33] + [7]], PARAMS + [dict(temperature=0)])):
            if i == 4: run(engine, found)
            params = SamplingParams(max_tokens=6, ignore_eos=True, **params)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        run(engine, found)
        return found
    finally: engine.shutdown()


def run(engine, found):
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished: found[output.request_id] = [(list(c.token_ids), c.logprobs) for c in output.outputs]


def pids(executor) -> list[int]: return executor.collective_rpc(lambda worker: os.getpid())


def make_executor(folder, size=2):
    config = engine_config(folder, size)
    executor = Executor.get_class(config)(config)
    executor.initialize(64)
    return executor


def test_two_ranks_give_one_ranks_tokens(ray, folder):
    one, two = answers(engine_config(folder)), answers(engine_config(folder, 2))
    assert one.keys() == two.keys() and len(one) == 5
    for req_id in one:
        assert [tokens for tokens, _ in one[req_id]] == [tokens for tokens, _ in two[req_id]], req_id
    for here, there in zip(one["0"][0][1], two["0"][0][1]):
        assert here.keys() == there.keys()
        assert all(abs(here[t].logprob - there[t].logprob) < 1e-4 for t in here)


def test_exceptions_and_timeouts_pass_but_a_death_is_the_end(ray, folder):
    executor = make_executor(folder)
    def refuse(worker):
        if worker.rank == 1: raise IndexError("row 9 of 8")
        return worker.rank
    with pytest.raises(IndexError, match="row 9 of 8") as found: executor.collective_rpc(refuse)
    assert "the worker of rank 1" in found.value.__notes__[0] and "in refuse" in found.value.__notes__[0]
    with pytest.raises(TimeoutError, match="2 of 2 workers have not answered within 0.1 s"):
        executor.collective_rpc(lambda worker: time.sleep(0.5), timeout=0.1)
    assert executor.collective_rpc(lambda worker: worker.rank) == [0, 1]   # not the answers to the last call
    processes = pids(executor)
    def wait_or_die(worker):
        if worker.rank == 0: time.sleep(600)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the worker of rank 1 has died"): executor.collective_rpc(wait_or_die)
    assert time.monotonic() - start < 3
    for call in (executor.check_health, lambda: executor.collective_rpc("startup_summary")):
        with pytest.raises(RuntimeError, match="the worker of rank 1 has died"): call()
    wait_until(lambda: not any(map(is_alive, processes)))
    wait_until(lambda: ray.available_resources().get("CPU") == 4)   # the placement group has gone, too
    executor.shutdown()


def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(ray, folder):
    executor = make_executor(folder)
    processes = pids(executor)
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the worker of rank 0 has died"): executor.check_health()
    wait_until(lambda: not any(map(is_alive, processes)))


def test_an_executor_that_is_forgotten_ends_its_workers(ray, folder):
    executor = make_executor(folder)
    processes = pids(executor)
    del executor
    wait_until(lambda: not any(map(is_alive, processes)))


def test_refusals_at_the_start_leave_nothing(ray, folder):
    config = engine_config(folder)
    config.parallel_config = ParallelConfig(tensor_parallel_size=8, distributed_executor_backend="ray")
    with pytest.raises(ValueError, match="8 workers need 8 CPU, the Ray cluster has 4"): Executor.get_class(config)(config)
    config.parallel_config = ParallelConfig(tensor_parallel_size=3, distributed_executor_backend="ray")
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not fit"): Executor.get_class(config)(config)
    wait_until(lambda: ray.available_resources().get("CPU") == 4)


ORPHANS = """
import os, sys, time
from test_ray import make_executor, pids
if __name__ == "__main__":
    executor = make_executor(sys.argv[1])
    print(*pids(executor), flush=True)
    time.sleep(600)
"""


def test_workers_follow_an_engine_that_is_killed(ray, folder, tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}   # this cluster, should there be others
    engine = subprocess.Popen([sys.executable, tmp_path / "orphans.py", folder], stdout=subprocess.PIPE, text=True, env=env)
    processes = list(map(int, engine.stdout.readline().split()))
    assert len(processes) == 2 and all(map(is_alive, processes))
    engine.kill()
    engine.communicate()
    wait_until(lambda: not any(map(is_alive, processes)), 20)


# ---------------------------------------------------------------- servers side by side

CHARS = 64        # of a piece of a beginning
IMBALANCE = 3     # requests that a known beginning may wait behind


@pytest.fixture(scope="module")
def url(ray, folder):
    from ray import serve
    with closing(bind("127.0.0.1", 0)) as sock: port = sock.getsockname()[1]
    args = EngineArgs(folder, tokenizer="byte", num_gpu_blocks_override=512, max_num_seqs=8, max_model_len=2048,
                      use_tqdm_on_load=False, device="cpu", generation_config="vllm")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_serve_app(args, 2, ["tiny"], max_imbalance=IMBALANCE, num_cpus=0.5, health_check_period_s=1),
              name="minengine")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def ask(url, start, max_tokens=4, stream=False):
    body = dict(model="tiny", prompt=start.ljust(CHARS, "."), max_tokens=max_tokens, ignore_eos=True, temperature=0, stream=stream)
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)


def who(answer) -> str: return answer.headers["x-minengine-replica"]


def replica_of(url, start) -> str:
    with ask(url, start) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text
        return who(answer)


def num_running(url) -> dict[str, float]:
    "Requests that run, by replica; asked until two have answered."
    found = {}
    for _ in range(50):
        answer = httpx.get(f"{url}/metrics")
        line, = (line for line in answer.text.splitlines() if line.startswith("vllm:num_requests_running{"))
        found[who(answer)] = float(line.split()[-1])
        if len(found) == 2: break
    return found


def test_the_servers_answer_as_one_does(url, folder):
    from minengine.llm import LLM
    llm = LLM(folder, tokenizer="byte", max_model_len=2048, num_gpu_blocks_override=512, use_tqdm_on_load=False, device="cpu")
    want = llm.generate("once".ljust(CHARS, "."), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
                        use_tqdm=False)[0].outputs[0].text
    with ask(url, "once", 12) as answer: assert json.loads(answer.read())["choices"][0]["text"] == want
    with ask(url, "once", 12, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]" and "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == want
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/nowhere").status_code == 404
    assert httpx.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400


def test_a_beginning_comes_back_to_who_has_seen_it_unless_that_one_is_loaded(url):
    starts = [f"start {i}" for i in range(6)]
    first = {start: replica_of(url, start) for start in starts}
    assert sorted(Counter(first.values()).values()) == [3, 3]
    for _ in range(3): assert {start: replica_of(url, start) for start in starts} == first
    with ExitStack() as stack:   # the same beginning, again and again, and none of them ends
        held = [who(stack.enter_context(ask(url, starts[0], 1500, stream=True))) for _ in range(2 + IMBALANCE)]
    assert held == [first[starts[0]]] * (1 + IMBALANCE) + list(set(first.values()) - {first[starts[0]]})
    # All have been left in the middle: nobody computes for nobody.
    wait_until(lambda: sum(num_running(url).values()) == 0 and len(num_running(url)) == 2)


def test_a_killed_server_takes_its_own_requests_with_it_and_no_others(ray, url):
    doomed, ends, begun = {}, {}, Barrier(9)
    def read(i):
        with ask(url, f"under load {i}", 300, stream=True) as answer:
            doomed[i] = who(answer)
            lines = answer.iter_lines()
            next(lines)
            begun.wait(60)
            ends[i] = [line.removeprefix("data: ") for line in lines if line][-2:]
    threads = [Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads: thread.start()
    begun.wait(60)
    victim = doomed[0]
    assert sorted(Counter(doomed.values()).values()) == [4, 4]
    ray.kill(ray.get_actor(f"SERVE_REPLICA::minengine#Server#{victim}", namespace="serve"))
    others = {replica_of(url, f"meanwhile {i}") for i in range(3)}   # served by whoever is there
    for thread in threads: thread.join(60)
    assert victim not in others
    for i in range(8):
        last, done = ends[i]
        assert done == "[DONE]"
        if doomed[i] == victim: assert "has died" in json.loads(last)["error"]["message"]
        else: assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: len(num_running(url)) == 2, 60)   # another has taken its place
    assert victim not in num_running(url)
