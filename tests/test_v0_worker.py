"""V0's worker and executor: two pools, moves before the forward, a driver and those who follow it.

Tests named `test_field_…` are rows of the field reports.
"""
import json
import random
import subprocess
import sys
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from v0_tiny import BLOCK, LAYERS, Seq, greedy, random_prompt, tiny_config, tokens_of

from minengine.config import DeviceConfig, ParallelConfig, cdiv
from minengine.model.memory import GIB
from minengine.sampling_params import SamplingParams
from minengine.v0 import worker as worker_module
from minengine.v0.executor import Executor, GPUExecutor, smallest_pools
from minengine.v0.sequence import ExecuteModelRequest
from minengine.v0.worker import CacheEngine, Worker, WorkerInput, as_tensor_dict, from_tensor_dict

# Bytes of a block: 2 (K, V) x layers x tokens x 2 heads x 8 numbers x 4 bytes.
BLOCK_BYTES = 2 * LAYERS * BLOCK * 2 * 8 * 4


def start(num_gpu_blocks=64, num_cpu_blocks=16, config=None, **kw) -> Worker:
    worker = Worker(config or tiny_config(), **kw)
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(num_gpu_blocks, num_cpu_blocks)
    return worker


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    "The same weights everywhere, those that the dense oracle uses."
    from v0_tiny import tiny_model
    monkeypatch.setattr(worker_module, "load_model", lambda config: tiny_model())


def run(worker, *seqs, chunks=(), **order):
    told = [seq.told(dict(chunks).get(seq.name)) for seq in seqs]
    outputs = worker.execute_model(ExecuteModelRequest(told, **order))
    for i, seq in enumerate(seqs): seq.update(tokens_of(outputs, i))
    return outputs


# --- two pools --------------------------------------------------------------------

@settings(max_examples=40, deadline=None)
@given(st.data())
def test_swapping_is_bit_for_bit(data):
    "Any blocks, any order, out, overwritten, in to any other blocks: equal in every layer."
    engine = CacheEngine(tiny_config(), 12, 8)
    for pool in engine.gpu_cache: pool.view(torch.int32).random_(-2**31, 2**31 - 1)   # all bit patterns
    count = data.draw(st.integers(1, 8))
    out = list(zip(data.draw(st.permutations(range(12)))[:count], data.draw(st.permutations(range(8)))[:count]))
    back = data.draw(st.permutations(range(12)))[:count]
    before = [pool.view(torch.int32)[:, [src for src, _ in out]].clone() for pool in engine.gpu_cache]
    engine.swap_out(out)
    for pool in engine.gpu_cache: pool.fill_(float("nan"))
    engine.swap_in([(host, target) for (_, host), target in zip(out, back)])
    for pool, old in zip(engine.gpu_cache, before): assert torch.equal(pool.view(torch.int32)[:, list(back)], old)


def test_moves_that_cannot_be_are_refused():
    engine = CacheEngine(tiny_config(), 4, 2)
    for move, pairs in ((engine.swap_out, [(4, 0)]), (engine.swap_out, [(0, 2)]), (engine.swap_in, [(2, 0)]), (engine.copy, [(0, 4)])):
        with pytest.raises(IndexError, match="block"): move(pairs)
    with pytest.raises(ValueError, match="target block is written twice"): engine.swap_out([(0, 0), (1, 0)])
    nothing = CacheEngine(tiny_config(), 4, 0)
    nothing.swap_in([]), nothing.swap_out([]), nothing.copy([])
    for move in (nothing.swap_in, nothing.swap_out):
        with pytest.raises(ValueError, match="1 blocks to swap, but the host's pool has 0 blocks"): move([(0, 0)])


def test_a_big_pool_costs_nothing_until_it_is_used():
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine = CacheEngine(tiny_config(), GIB // BLOCK_BYTES, GIB // BLOCK_BYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000   # KiB
    assert engine.cpu_cache[0].shape[1] == GIB // BLOCK_BYTES


# --- a step -----------------------------------------------------------------------------

def test_worker_from_nothing_to_tokens():
    worker, a = start(), Seq("a", [5, 17, 80, 2, 33], [3, 4, 6])
    for _ in range(5): run(worker, a)
    assert a.output == greedy(a.prompt, 5)
    summary = worker.startup_summary()
    assert (summary["num_gpu_blocks"], summary["num_cpu_blocks"], summary["kv_cache_tokens"]) == (64, 16, 256)
    assert summary["kv_cache_bytes"] == 64 * BLOCK_BYTES == sum(c.nbytes for c in worker.cache_engine.gpu_cache)
    assert summary["swap_space_bytes"] == 16 * BLOCK_BYTES == sum(c.nbytes for c in worker.cache_engine.cpu_cache)
    json.dumps(summary)   # plain values: a process boundary may lie between


def test_v073_1_11_in_out_copies_then_the_forward():
    worker, log = start(), []
    engine, runner = worker.cache_engine, worker.model_runner
    for name in ("swap_in", "swap_out", "copy"):
        setattr(engine, name, lambda pairs, name=name: log.append((name, pairs)))
    forward = runner.run_model
    runner.run_model = lambda *x: log.append("forward") or forward(*x)
    run(worker, Seq("a", [1], [0]), blocks_to_swap_in=[(0, 1)], blocks_to_swap_out=[(2, 3)], blocks_to_copy=[(4, 5)],
        async_callback=lambda: log.append("callback"))
    assert log == [("swap_in", [(0, 1)]), ("swap_out", [(2, 3)]), ("copy", [(4, 5)]), "forward", "callback"]


def test_v073_1_11_a_step_of_moves_only():
    worker = start()
    worker.cache_engine.gpu_cache[0][:, 3] = 5.0
    assert worker.execute_model(ExecuteModelRequest([], blocks_to_swap_out=[(3, 9)])) == []
    assert (worker.cache_engine.cpu_cache[0][:, 9] == 5.0).all()
    # What has ended is forgotten in such a step as well.
    run(worker, Seq("a", [1], [0], SamplingParams(seed=1)))
    worker.execute_model(ExecuteModelRequest([], finished_requests_ids=["a"]))
    assert worker.model_runner.generators == {}


def test_field_vllm_190_out_and_in_while_others_use_the_blocks():
    "A sequence leaves, another takes its blocks in that very step, it returns elsewhere: tokens as if nothing had been."
    worker, rng = start(), random.Random(1)
    a, b = Seq("a", random_prompt(rng, 10, 11), [0, 1, 2]), Seq("b", random_prompt(rng, 9, 10), [3, 4, 5])
    run(worker, a, b)
    # The books say that 0, 1, 2 are free; c is prefilled into them in the same step.
    c = Seq("c", random_prompt(rng, 11, 12), [0, 1, 2, 9])
    run(worker, c, b, blocks_to_swap_out=[(0, 7), (1, 3), (2, 0)])
    run(worker, c, b)
    a.blocks = [20, 21, 22, 23]
    run(worker, a, b, c, blocks_to_swap_in=[(7, 20), (3, 21), (0, 22)])
    b.blocks.append(30)
    for _ in range(3): run(worker, a, b, c)
    for seq in (a, b, c): assert seq.output == greedy(seq.prompt, len(seq.output))


def test_a_fork_is_copied_before_the_first_write():
    worker, rng = start(), random.Random(2)
    parent = Seq("p", random_prompt(rng, 10, 11), [0, 1, 2])
    run(worker, parent)
    child = parent.fork("c", [0, 1, 2], 1)
    parent.blocks = [0, 1, 8]
    run(worker, parent, child, blocks_to_copy=[(2, 8)])
    parent.blocks, child.blocks = [0, 1, 8, 9], [0, 1, 2, 10]
    for _ in range(3): run(worker, parent, child)
    assert parent.output == child.output == greedy(parent.prompt, 5)


@pytest.mark.parametrize("num_steps", [4, 8])
def test_bursts_through_the_worker(num_steps):
    "The engine calls once for each step of a burst and counts; moves come with the first."
    worker, log = start(), []
    a, b = Seq("a", [1, 2, 3], range(8)), Seq("b", [4, 5], range(8, 16))
    run(worker, a, b)
    told = [a.told(num_steps=num_steps), b.told(num_steps=num_steps)]
    for step in range(num_steps):
        outputs = worker.execute_model(ExecuteModelRequest(
            told, blocks_to_copy=[(20, 21)] if not step else [], num_steps=num_steps, async_callback=lambda: log.append(1)))
        assert len(outputs) == (num_steps if step == num_steps - 1 else 0)
        for one in told: one.state.finish_step()
    a.update(tokens_of(outputs, 0)), b.update(tokens_of(outputs, 1))
    assert a.output == greedy(a.prompt, num_steps + 1) and b.output == greedy(b.prompt, num_steps + 1)
    assert len(log) == num_steps
    run(worker, a, b)            # and on, with a schedule of its own
    assert a.output == greedy(a.prompt, num_steps + 2)


# --- the driver and those who follow ---------------------------------------------------------

class Queue:
    "Stands in for the broadcast between processes; messages go through as copies."
    def __init__(self): self.messages, self.sent = deque(), []
    def send(self, found):
        copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
        self.messages.append(copy), self.sent.append(copy)
    def receive(self): return self.messages.popleft()


def test_v073_1_11_a_follower_ends_with_the_same_cache():
    "Prompts, chunks, decodes, moves, bursts: it knows no request, and computes the same."
    channel, rng = Queue(), random.Random(3)
    driver, follower = start(channel=channel), start(channel=channel, is_driver_worker=False, rank=1)
    a, b = Seq("a", random_prompt(rng, 11, 12), range(8)), Seq("b", random_prompt(rng, 6, 7), range(8, 16), SamplingParams(seed=2))
    run(driver, a, b, chunks={"a": 5})
    run(driver, a, b)
    run(driver, a, b, blocks_to_copy=[(30, 31)])
    driver.execute_model(ExecuteModelRequest([], blocks_to_swap_out=[(8, 0), (9, 1)]))
    told = [a.told(num_steps=4)]
    for step in range(4):
        outputs = driver.execute_model(ExecuteModelRequest(told, blocks_to_swap_in=[] if step else [(0, 40), (1, 41)]))
        told[0].state.finish_step()
    a.update(tokens_of(outputs, 0))
    run(driver, a)
    driver.execute_model(None)
    assert [len(m) for m in channel.sent[-6:]] == [15, 5, 5, 5, 15, 0]
    follower.start_worker_execution_loop()
    assert not channel.messages
    for own, other in zip(driver.cache_engine.gpu_cache, follower.cache_engine.gpu_cache): assert torch.equal(own, other)
    for own, other in zip(driver.cache_engine.cpu_cache, follower.cache_engine.cpu_cache): assert torch.equal(own, other)
    assert a.output == greedy(a.prompt, len(a.output))
    assert follower.model_runner.generators == {} and follower.burst is None


def test_what_travels_holds_no_request():
    worker, a = start(), Seq("secret", [1, 2, 3], [0])
    made = worker.model_runner.prepare_model_input([a.told()])
    sent = as_tensor_dict(WorkerInput(1, [], [], [(1, 2)]), made)
    for value in sent.values(): assert isinstance(value, (int, list, torch.Tensor))
    moves, again = from_tensor_dict(sent)
    assert moves == WorkerInput(1, [], [], [(1, 2)])
    assert again.sampling_metadata is None and again.told == [] and torch.equal(again.input_tokens, made.input_tokens)
    assert from_tensor_dict(as_tensor_dict(WorkerInput(0, [], [], []), None))[1] is None


def test_one_worker_sends_nothing():
    assert start().execute_model(None) is None


# --- starting ---------------------------------------------------------------------------------

def test_sizes_of_both_pools(monkeypatch):
    monkeypatch.setattr(worker_module, "available_host_memory", lambda: 3 * GIB)
    worker = Worker(tiny_config(cpu_kv_cache_space=1.0, swap_space=0.5))
    worker.init_device()
    assert worker.get_kv_cache_block_bytes() == BLOCK_BYTES
    assert worker.determine_num_available_blocks() == (GIB // BLOCK_BYTES, GIB // 2 // BLOCK_BYTES)
    # The default of 4 GiB is fitted: half of what the other pool leaves.
    worker.vllm_config.cache_config.swap_space = 4
    assert worker.determine_num_available_blocks() == (GIB // BLOCK_BYTES, GIB // BLOCK_BYTES)
    worker.vllm_config.cache_config.swap_space = 16
    with pytest.raises(ValueError, match="swap_space is 16 GiB, but only 2.00 GiB"): worker.determine_num_available_blocks()
    worker.vllm_config.cache_config.swap_space = 0
    assert worker.determine_num_available_blocks()[1] == 0


def test_a_gpu_is_measured(monkeypatch):
    "Without one here: the numbers that torch would report."
    config = tiny_config(swap_space=1)
    worker = Worker(config)
    worker.init_device(), worker.load_model()
    monkeypatch.setattr(worker, "device", torch.device("cuda"))
    monkeypatch.setattr(worker_module, "measure_gpu_peak", lambda step: step() or 2 * GIB)
    monkeypatch.setattr(worker_module, "available_host_memory", lambda: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * GIB, 10 * GIB))
    gpu, cpu = worker.determine_num_available_blocks()
    assert (gpu, cpu) == (7 * GIB // BLOCK_BYTES, GIB // BLOCK_BYTES)
    assert worker.summary["activation_bytes"] == 2 * GIB - worker.summary["weights_bytes"]


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = tiny_config()
    config.device_config = DeviceConfig("cuda")
    with pytest.raises(ValueError, match="rank 0 needs a GPU of its own, 0 are there"): Worker(config).init_device()


def test_threads_and_generators_are_left_alone():
    torch.manual_seed(3)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    executor = GPUExecutor(tiny_config())
    executor.initialize_cache(8, 2)
    run(executor, Seq("a", [1, 2], [0], SamplingParams()))
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


# --- executor -----------------------------------------------------------------------------------

def test_the_smallest_worker_decides_for_each_pool():
    assert smallest_pools([(10, 7), (8, 9)], most=50) == (8, 7)
    assert smallest_pools([(10, 7)], most=5) == (5, 5)
    assert smallest_pools([(10, 7)], most=50, override=99) == (99, 7)
    assert smallest_pools([(0, 0)], most=50) == (0, 0)     # the engine will refuse to start


def test_executor_sizes_starts_and_ends():
    executor = GPUExecutor(tiny_config(cpu_kv_cache_space=0.01, swap_space=0.001, max_num_seqs=64, budget=256))
    sizes = executor.determine_num_available_blocks()
    # 64 sequences of 128 tokens in blocks of 4, a spare one for each and one for all, 1 % in reserve, and no more.
    assert sizes == (cdiv((64 * 33 + 1) * 100, 99), int(0.001 * GIB) // BLOCK_BYTES)
    executor.initialize_cache(*sizes)
    a = Seq("a", [5, 6], [0, 1])
    for _ in range(3): run(executor, a)
    assert a.output == greedy(a.prompt, 3)
    assert executor.startup_summary()["num_cpu_blocks"] == sizes[1]
    assert executor.collective_rpc(lambda worker, x, y=0: (worker.rank, x, y), (1,), {"y": 2}) == [(0, 1, 2)]
    assert executor.collective_rpc("get_kv_cache_block_bytes") == [BLOCK_BYTES]
    executor.check_health()
    executor.stop_remote_worker_execution_loop()
    executor.shutdown(), executor.shutdown()
    executor.stop_remote_worker_execution_loop()
    for call in (executor.check_health, lambda: executor.execute_model(ExecuteModelRequest([])), lambda: executor.collective_rpc("check_health")):
        with pytest.raises(RuntimeError, match="was shut down"): call()


def test_the_users_number_of_blocks_wins():
    assert GPUExecutor(tiny_config(num_gpu_blocks_override=9, swap_space=0)).determine_num_available_blocks() == (9, 0)


def test_get_class():
    config = tiny_config()
    assert Executor.get_class(config) is GPUExecutor
    class Mine(GPUExecutor): pass
    for backend, found in ((Mine, Mine), ("uni", GPUExecutor)):
        config.parallel_config = ParallelConfig(distributed_executor_backend=backend)
        assert Executor.get_class(config) is found
    for backend in ("ray", int):
        config.parallel_config = ParallelConfig(distributed_executor_backend=backend)
        with pytest.raises(ValueError, match="must be 'uni', 'mp' or a class of V0 executors, got"): Executor.get_class(config)
    config.parallel_config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ValueError, match=".uni. has 1 worker, 2 are asked for"): Executor.get_class(config)


def test_a_worker_imports_no_scheduler_and_no_v1():
    code = ("import sys, minengine.v0.executor; bad = [m for m in sys.modules if m.startswith('minengine.v1')"
            " or m in ('minengine.v0.scheduler', 'minengine.v0.block_manager')]; sys.exit(str(bad) if bad else 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
