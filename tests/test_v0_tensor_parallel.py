"""V0 with several ranks: a driver in this process, followers in processes of their own.

Greedy and seeded tokens equal those of one rank, logprobs to 1e-4: float32 sums in another order. Tests named
`test_field_…` are rows of the field reports.
"""
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_equality import chat_prompts, default_model, expected
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minengine.config import EngineArgs
from minengine.model.checkpoint import create_engine_config
from minengine.parallel import get_tensor_model_parallel_world_size
from minengine.sampling_params import SamplingParams
from minengine.v0.distributed_executor import MultiprocessingDistributedExecutor
from minengine.v0.executor import Executor, GPUExecutor
from minengine.v0.llm_engine import LLMEngineV0

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict:
    "A model of each family; weights large enough that tokens depend on the prompt."
    found = {}
    for name, (config, model) in FAMILIES.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        model(config(vocab_size=265, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3,
                     tie_word_embeddings=name == "qwen3", bos_token_id=256, eos_token_id=257)).save_pretrained(found[name])
    return found


def start(folder, size=2, **args) -> LLMEngineV0:
    args = dict(max_model_len=128, block_size=4, num_gpu_blocks_override=64, max_num_seqs=8, dtype="float32",
                device="cpu", swap_space=0.001, enforce_eager=True) | args
    return LLMEngineV0.from_engine_args(EngineArgs(
        str(folder), engine="v0", tokenizer="byte", tensor_parallel_size=size, use_tqdm_on_load=False, **args))


def play(engine, requests, check=lambda: None) -> dict:
    "Every answer of every request: tokens, logprobs; prompt logprobs too."
    for i, (prompt, params) in enumerate(requests): engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished: found[output.request_id] = output
        check()
    return {i: ([a.token_ids for a in o.outputs], [a.logprobs for a in o.outputs], o.prompt_logprobs)
            for i, o in sorted(found.items())}


def assert_same(one, many):
    def close(a, b):
        assert (a is None) == (b is None)
        for x, y in zip(a or (), b or (), strict=True):
            if x is None or y is None: assert x is y; continue
            assert x.keys() == y.keys()
            for token in x: assert x[token].logprob == pytest.approx(y[token].logprob, abs=1e-4)
    assert one.keys() == many.keys()
    for i in one:
        assert one[i][0] == many[i][0], i
        for a, b in zip(one[i][1], many[i][1], strict=True): close(a, b)
        close(one[i][2], many[i][2])


def prompt(seed, length, shared=0): return [(7 * j + 3) % 250 for j in range(shared)] + [(seed * 31 + 11 * j * j) % 250 for j in range(length)]


def requests(num_tokens=12) -> list:
    P = lambda **kw: SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True} | kw)
    return [(prompt(1, 9, 16), P(temperature=0, logprobs=3)), (prompt(2, 14, 16), P(temperature=0, prompt_logprobs=2)),
            (prompt(3, 5, 16), P(temperature=0.9, seed=5, n=3)), (prompt(4, 11), P(temperature=0.8, top_k=20, seed=9, logprobs=1)),
            (prompt(5, 21), P(temperature=0, repetition_penalty=1.3, min_tokens=3)), (prompt(1, 12, 16), P(temperature=0, n=1))]


def processes(engine): return [f.process for f in engine.executor.followers.all]


def shared_memory() -> set:
    "What of /dev/shm this process has mapped. (Others use that directory as well.)"
    try: maps = Path("/proc/self/maps").read_text().split("\n")
    except OSError: return set()
    return {line.split()[-1] for line in maps if "/dev/shm/" in line}


def assert_nothing_left(procs, directory, shm):
    for process in procs: assert not process.is_alive()
    assert not Path(directory).exists() and not dist.is_initialized()
    assert shared_memory() <= shm


SETTINGS = {
    "plain, swap": dict(num_gpu_blocks_override=36, preemption_mode="swap"),
    "cached, chunked, recompute": dict(num_gpu_blocks_override=36, preemption_mode="recompute", enable_prefix_caching=True,
                                       enable_chunked_prefill=True, max_num_batched_tokens=24),
    "bursts": dict(num_scheduler_steps=4),
    "drafts": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
                                              "prompt_lookup_min": 1}),
}


@pytest.mark.parametrize("family, size, setting", [
    ("llama", 2, "plain, swap"), ("llama", 2, "cached, chunked, recompute"), ("llama", 2, "bursts"), ("llama", 2, "drafts"),
    ("qwen3", 2, "cached, chunked, recompute"), ("qwen2", 4, "plain, swap")])
def test_tokens_are_those_of_one_rank(alone, folders, family, size, setting):
    found, preempted, work = [], [], requests()
    if setting == "drafts": work = [([5, 6, 7, 8] * 5, SamplingParams(temperature=t, seed=3, max_tokens=40, logprobs=1, ignore_eos=True)) for t in (0, 0.5)]
    for ranks in (1, size):
        engine = start(folders[family], ranks, **SETTINGS[setting])
        found.append([play(engine, work), play(engine, work[::-1])])   # the second finds cached prefixes, if there is a cache
        preempted.append(engine.scheduler.num_cumulative_preemption)
        if ranks > 1: compare_caches(engine)
        engine.shutdown()
    for one, many in zip(*found): assert_same(one, many)
    assert preempted[0] == preempted[1]
    if "swap" in setting or "recompute" in setting: assert preempted[0] > 0
    if setting == "drafts": assert engine.spec_stats.num_draft_tokens > 0


def pool_sums(worker) -> tuple:
    cache = worker.cache_engine
    return tuple(cache.gpu_cache[0].shape), tuple(cache.cpu_cache[0].shape) if cache.cpu_cache else None, \
        [int((pool != 0).any((0, 2, 3, 4)).sum()) for pool in [*cache.gpu_cache, *cache.cpu_cache]]


def compare_caches(engine):
    "Each rank has written, swapped and copied the same blocks, of heads of its own."
    first, *others = engine.executor.collective_rpc(pool_sums)
    for other in others: assert other == first
    heads = max(1, 2 // (len(others) + 1))
    assert first[0][3] == heads


def test_the_executor_is_chosen_by_the_number(folders):
    def choose(size, **args): return Executor.get_class(create_engine_config(EngineArgs(
        str(folders["llama"]), engine="v0", tokenizer="byte", device="cpu", tensor_parallel_size=size, **args)))
    assert choose(1) is GPUExecutor is choose(1, distributed_executor_backend="mp")
    assert choose(2) is MultiprocessingDistributedExecutor
    with pytest.raises(ValueError, match="'uni' has 1 worker, 2 are asked for"): choose(2, distributed_executor_backend="uni")


def test_field_vllm_2652_sizes_are_refused_before_anything_starts(folders):
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not fit 4 query heads.*allowed sizes: 1, 2, 4"):
        start(folders["llama"], 3)
    assert not dist.is_initialized()


SHARED = []   # one engine for all tests that leave it well; there can be only one in a process


@pytest.fixture
def engine(folders) -> LLMEngineV0:
    if not SHARED: SHARED.append(start(folders["llama"]))
    return SHARED[0]


@pytest.fixture
def alone():
    "Nobody else's ranks in this process."
    while SHARED: SHARED.pop().shutdown()


@pytest.fixture(scope="module", autouse=True)
def in_the_end():
    yield
    while SHARED: SHARED.pop().shutdown()


def method_of(worker): return worker.rank, worker.is_driver_worker, worker.channel.num_messages


def test_v073_1_11_the_loop_is_entered_and_left(engine):
    "Calls are served before, between and after steps; the empty message is the only way out."
    followers = engine.executor.followers
    assert not followers.looping
    engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    assert followers.looping
    sent = engine.executor.channel.num_messages
    assert [rank for rank, *_ in engine.executor.collective_rpc(method_of)] == [0, 1]   # in the middle of a request
    assert not followers.looping and engine.executor.channel.num_messages == sent + 1
    while engine.has_unfinished_requests(): engine.step()
    assert not followers.looping     # the engine let them go itself
    assert engine.executor.collective_rpc(method_of)[1] == (1, False, 0)
    engine.executor.stop_remote_worker_execution_loop()      # nobody is in it
    assert engine.executor.channel.num_messages == sent + 1 + 3 + 1


def test_bytes_are_counted_and_prepared_inputs_travel(engine):
    "Decodes: 8 + 4 bytes of token and position, 8 of the slot, tables, lengths; and the same names every time."
    channel, sizes = engine.executor.channel, []
    before = channel.tensor_bytes
    for i in range(4): engine.add_request(f"b{i}", {"prompt_token_ids": [1 + i] * 8}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        sizes.append(channel.last_bytes)
    channel.check_invariants()
    decode = 4 * (4 + 8 + 8 + 8) + 4 * 4 + 5 * 4    # ids, positions, slots, selected; lengths; starts
    assert channel.tensor_bytes - before > 5 * (decode + 4 * 3 * 4)   # and block tables, three blocks each or more
    assert min(sizes) < 20 < 500 < sizes[0]           # the last one, {}, and a step


def test_an_error_of_the_drivers_own_leaves_the_engine_alive(engine):
    "A function on logits fails after the gather: the followers are in step, and the next request is answered."
    def fails(ids, logits): raise KeyError("mine")
    engine.add_request("bad", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=3, logits_processors=[fails]))
    with pytest.raises(RuntimeError, match="request bad: logits processor"): engine.step()
    engine.executor.check_health()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert len(play(engine, [([1, 2], params)])["0"][0][0]) == 3


def test_another_engine_may_live_in_this_process_but_not_a_second_of_ranks(engine, folders):
    assert get_tensor_model_parallel_world_size() == 1
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    other = start(folders["llama"], 1)
    assert play(other, [([1, 2], params)]) == play(engine, [([1, 2], params)])
    with pytest.raises(RuntimeError, match="one V0 engine with several workers in a process at a time"): start(folders["llama"], 2)
    assert len(play(engine, [([1, 2], params)])["0"][0][0]) == 3


def shared_of(worker): return sorted(shared_memory())


def test_followers_have_no_shared_memory_that_could_stay(engine):
    "Whatever ends them: there is nothing with a name."
    assert engine.executor.collective_rpc(shared_of)[1] == []


def test_a_name_that_no_worker_has_asks_nobody(engine):
    with pytest.raises(AttributeError, match="no_such_method"): engine.executor.collective_rpc("no_such_method")
    assert engine.executor.collective_rpc("check_health") == [None, None]


# --- faults -------------------------------------------------------------------------

def fails_on_followers(worker):
    if worker.rank: raise ZeroDivisionError(f"rank {worker.rank} divides")


def dies_in_the_next_forward(worker):
    def die(*args): os.kill(os.getpid(), signal.SIGKILL)
    if worker.rank == 1: worker.model_runner.forward = die


def raises_in_the_next_forward(worker):
    def fail(*args): raise ZeroDivisionError("in the forward")
    if worker.rank == 1: worker.model_runner.forward = fail


def dies_while_loading(worker):
    if worker.rank == 1: os.kill(os.getpid(), signal.SIGKILL)


class DiesInLoad(MultiprocessingDistributedExecutor):
    def collective_rpc(self, method, args=(), kwargs=None):
        return super().collective_rpc(dies_while_loading if method == "load_model" else method, args, kwargs)


def in_a_second(function, match, kind=RuntimeError):
    "It takes half a second alone; this machine may do other things as well."
    start_s, own_s = time.monotonic(), time.process_time()
    with pytest.raises(kind, match=match): function()
    waited = time.monotonic() - start_s
    assert waited < 1 + SLACK_S, (waited, time.process_time() - own_s)


SLACK_S = float(os.environ.get("MINENGINE_TEST_SLACK_S", 1))


@pytest.mark.parametrize("where", ["idle", "between steps", "in the forward", "error in the forward"])
def test_field_vllm_11996_a_follower_that_goes_ends_every_wait(alone, folders, where):
    "Its own error, within a second; then every call raises, nobody is left, and a new engine starts at once."
    shm = shared_memory()
    engine = start(folders["llama"])
    procs, directory = processes(engine), engine.executor.followers.directory
    add = lambda: engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    match, kind = "worker 1 was ended by SIGKILL", RuntimeError
    if where == "in the forward": engine.executor.collective_rpc(dies_in_the_next_forward)
    if where == "error in the forward":
        engine.executor.collective_rpc(raises_in_the_next_forward)
        match, kind = "in the forward", ZeroDivisionError
    add()
    if where == "between steps": engine.step()
    if where in ("idle", "between steps"):
        os.kill(procs[0].pid, signal.SIGKILL)
        procs[0].join(5)
    in_a_second(engine.step, match, kind)
    assert_nothing_left(procs, directory, shm)
    with pytest.raises(RuntimeError, match="the workers have ended"): engine.executor.check_health()
    add()
    with pytest.raises(RuntimeError, match="the workers have ended"): engine.step()
    engine.shutdown(), engine.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"): engine.executor.check_health()


def test_a_follower_killed_while_loading(alone, folders):
    shm = shared_memory()
    config = create_engine_config(EngineArgs(str(folders["llama"]), engine="v0", tokenizer="byte", device="cpu", tensor_parallel_size=2,
                                             use_tqdm_on_load=False))
    with pytest.raises(RuntimeError, match="worker 1 was ended by SIGKILL"): DiesInLoad(config)
    assert not dist.is_initialized() and shared_memory() <= shm


def test_field_vllm_11996_the_reason_among_four_and_a_fresh_start(alone, folders):
    "One of four fails while the others are in a sum: its error counts, not theirs. And the next engine is well."
    engine = start(folders["llama"], 4)
    procs = processes(engine)
    with pytest.raises(ZeroDivisionError, match="rank . divides"): engine.executor.collective_rpc(fails_on_followers)
    for process in procs: assert not process.is_alive()
    fresh = start(folders["llama"], 2)
    procs = processes(fresh)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert len(play(fresh, [([1, 2], params)])["0"][0][0]) == 3
    fresh.add_request("left behind", {"prompt_token_ids": [1, 2]}, params)
    fresh.step()
    del fresh          # nobody shuts it down, its followers are in their loop
    gc.collect()
    for process in procs: process.join(5)
    assert not any(process.is_alive() for process in procs) and not dist.is_initialized()


def test_field_vllm_21728_followers_do_not_outlive_the_engine(folders, tmp_path):
    "The engine's process is killed: nobody stays, neither in a loop nor in a call."
    import subprocess
    import sys
    script = tmp_path / "engine.py"
    script.write_text(f"""
import sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_v0_tensor_parallel import SamplingParams, processes, start

if __name__ == "__main__":
    engine = start({str(folders["llama"])!r})
    engine.add_request("a", {{"prompt_token_ids": [1, 2, 3]}}, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    print(processes(engine)[0].pid, engine.executor.followers.directory, flush=True)
    time.sleep(600)
""")
    engine = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid, directory = engine.stdout.readline().split()
    engine.kill(), engine.wait(), engine.stdout.close()
    end = time.monotonic() + 10
    def alive():
        try: return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError: return False
    while time.monotonic() < end and (alive() or Path(directory).exists()): time.sleep(0.05)
    assert not alive() and not Path(directory).exists()


def test_field_vllm_11996_health_tells_of_a_dead_follower_while_nothing_runs(alone, folders):
    "No step has to fail first: who asks an idle engine hears it, and so does the next caller."
    import asyncio

    from minengine.v0.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine
    engine = AsyncLLMEngine(start(folders["llama"]))
    async def ask():
        await engine.check_health()
        os.kill(processes(engine.engine)[0].pid, signal.SIGKILL)
        processes(engine.engine)[0].join(5)
        with pytest.raises(AsyncEngineDeadError, match="worker 1 was ended by SIGKILL"): await engine.check_health()
        with pytest.raises(AsyncEngineDeadError): engine.add_request("a", prompt="b", params=SamplingParams())
    asyncio.run(ask())
    engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_smollm2_on_three_ranks_equals_transformers(chunked):
    "The real model, its nine heads on three ranks, in a pool that is too small for all."
    prompts = chat_prompts()
    longest = max(map(len, prompts)) + 48
    engine = start(default_model()[0], 3, max_model_len=longest, block_size=16, max_num_seqs=8,
                   num_gpu_blocks_override=longest * 5 // 2 // 16, enable_chunked_prefill=chunked,
                   **dict(max_num_batched_tokens=64) if chunked else {})
    try:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
        found = play(engine, [(p, params) for p in prompts])
        assert [found[str(i)][0][0] for i in range(len(prompts))] == expected()
    finally: engine.shutdown()
