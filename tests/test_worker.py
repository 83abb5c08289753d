"""Worker and executors: what memory is left, who decides, and how calls travel."""
import json

import pytest
import torch
from v1_tiny import VOCAB, tiny_config

from minengine.config import DeviceConfig, ParallelConfig
from minengine.model import memory
from minengine.model.memory import (
    GIB, available_host_memory, cpu_kv_cache_bytes, gpu_kv_cache_bytes, model_bytes, num_blocks_that_fit,
    swap_space_bytes)
from minengine.sampling_params import SamplingParams
from minengine.v1.core.scheduler import Scheduler
from minengine.v1.executor import Executor, UniProcExecutor
from minengine.v1.request import Request
from minengine.v1.worker.worker import Worker

# Bytes of a block: 2 (K, V) x 2 layers x 4 tokens x 2 heads x 8 numbers x 4 bytes.
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4


def config(**kw):
    made = tiny_config(num_blocks=None)
    for name, value in kw.items(): setattr(made.cache_config, name, value)
    return made


# --- memory ---------------------------------------------------------------------

def test_cpu_default_is_a_quarter_at_most_4_gib():
    assert cpu_kv_cache_bytes(None, 100 * GIB) == 4 * GIB
    assert cpu_kv_cache_bytes(None, 8 * GIB) == 2 * GIB
    assert cpu_kv_cache_bytes(0.5, 8 * GIB) == GIB // 2
    with pytest.raises(ValueError, match="9 GiB, but only 8.00 GiB"): cpu_kv_cache_bytes(9, 8 * GIB)


def test_host_memory_is_some_number_of_bytes(monkeypatch):
    assert 0 < available_host_memory() < 2**50
    monkeypatch.setattr(memory, "_read_int", {
        "/sys/fs/cgroup/memory.max": 3 * GIB, "/sys/fs/cgroup/memory.current": 2 * GIB}.get)
    assert available_host_memory() <= GIB   # a container's limit counts


def test_swap_space_is_fitted_only_if_nobody_asked_for_it():
    assert swap_space_bytes(4, 100 * GIB) == 4 * GIB and swap_space_bytes(4, 2 * GIB) == GIB
    assert swap_space_bytes(0, 0) == 0
    with pytest.raises(ValueError, match="16 GiB, but only 8.00 GiB"): swap_space_bytes(16, 8 * GIB)


def test_field_vllm_19312_memory_of_others_is_not_charged():
    "Two servers on one GPU of 100 GiB, 0.7 then 0.2: the second starts, with its own share."
    first = gpu_kv_cache_bytes(100 * GIB, 0.7, own_peak=10 * GIB, free=90 * GIB)
    assert first == 60 * GIB
    second = gpu_kv_cache_bytes(100 * GIB, 0.2, own_peak=10 * GIB, free=20 * GIB)
    assert second == pytest.approx(10 * GIB)


def test_field_vllm_55169_2418_senseless_sizes_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"0\.1 of 100\.00 GiB is 10\.00 GiB.* need 12\.00 GiB"):
        gpu_kv_cache_bytes(100 * GIB, 0.1, 12 * GIB, 90 * GIB)
    with pytest.raises(ValueError, match=r"take 78\.00 GiB, but only 20\.00 GiB"):
        gpu_kv_cache_bytes(100 * GIB, 0.9, 12 * GIB, 20 * GIB)


def test_model_bytes_counts_shared_weights_once():
    layer = torch.nn.Linear(4, 3)
    twice = torch.nn.ModuleList([layer, torch.nn.Linear(4, 3)])
    twice[1].weight = layer.weight
    assert model_bytes(layer) == 60 and model_bytes(twice) == 72


# --- worker ---------------------------------------------------------------------------

def test_worker_from_nothing_to_a_token():
    worker = Worker(config(cpu_kv_cache_space=0.001))
    worker.init_device()
    worker.load_model()
    assert worker.get_kv_cache_block_bytes() == BLOCK_BYTES
    assert worker.determine_available_memory() == int(0.001 * GIB)
    worker.initialize_cache(16)
    summary = worker.startup_summary()
    assert summary["num_gpu_blocks"] == 16 and summary["kv_cache_tokens"] == 64
    assert summary["kv_cache_bytes"] == 16 * BLOCK_BYTES == sum(c.nbytes for c in worker.model_runner.kv_caches)
    assert summary["weights_bytes"] > 0 and summary["device"] == "cpu"
    json.dumps(summary)   # plain values: a process boundary may lie between
    worker.vllm_config.cache_config.num_gpu_blocks = 16
    scheduler = Scheduler(worker.vllm_config.scheduler_config, worker.vllm_config.cache_config)
    scheduler.add_request(Request("a", None, [1, 2, 3], SamplingParams(temperature=0, max_tokens=2)))
    (tokens,) = worker.execute_model(scheduler.schedule()).sampled_token_ids
    assert 0 <= tokens[0] < VOCAB


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    made = config()
    made.device_config = DeviceConfig("cuda")
    with pytest.raises(ValueError, match="rank 0 needs a GPU of its own, 0 are there"): Worker(made).init_device()


def test_threads_and_generators_are_left_alone():
    torch.manual_seed(3)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    executor = UniProcExecutor(config())
    executor.initialize(8)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_a_big_pool_costs_nothing_until_it_is_used():
    "4 GiB of zeros are promised by the system, not written by us."
    resource = pytest.importorskip("resource")
    worker = Worker(config())
    worker.init_device()
    worker.load_model()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker.initialize_cache(GIB // BLOCK_BYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000   # KiB


# --- executor ---------------------------------------------------------------------------

def test_number_of_blocks():
    assert num_blocks_that_fit([1000, 700], [100, 100], most=50) == 7
    assert num_blocks_that_fit([1000], [100], most=5) == 5
    assert num_blocks_that_fit([99], [100], most=5) == 0
    executor = UniProcExecutor(config(cpu_kv_cache_space=0.0001))
    assert executor.determine_num_available_blocks() == int(0.0001 * GIB) // BLOCK_BYTES
    # 8 requests of 128 tokens in blocks of 4: more can not be in use.
    assert UniProcExecutor(config()).determine_num_available_blocks() == 8 * 32
    # The user's number wins, without a look at the memory.
    assert UniProcExecutor(config(num_gpu_blocks_override=9)).determine_num_available_blocks() == 9


def test_collective_rpc_takes_names_and_functions():
    executor = UniProcExecutor(config())
    assert executor.collective_rpc("get_kv_cache_block_bytes") == [BLOCK_BYTES]
    assert executor.collective_rpc(lambda worker, a, b=0: (worker.rank, a, b), args=(1,), kwargs={"b": 2}) == [(0, 1, 2)]
    executor.initialize(4)
    assert executor.startup_summary()["num_gpu_blocks"] == 4
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"): executor.collective_rpc("check_health")
    with pytest.raises(RuntimeError, match="was shut down"): executor.check_health()


def test_get_class():
    made = config()
    assert Executor.get_class(made) is UniProcExecutor
    for backend, error, words in [
            ("uni", None, None), ("pigeon", ValueError, "'uni', 'mp', 'ray' or a class of executors, got 'pigeon'")]:
        made.parallel_config = ParallelConfig(distributed_executor_backend=backend)
        if error is None: assert Executor.get_class(made) is UniProcExecutor
        else:
            with pytest.raises(error, match=words): Executor.get_class(made)
    for backend, name in (("mp", "MultiprocExecutor"), ("ray", "RayExecutor"), (None, "MultiprocExecutor")):
        made.parallel_config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=backend)
        assert Executor.get_class(made).__name__ == name   # whether Ray is installed or not
    made.parallel_config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ValueError, match="2 are asked for"): Executor.get_class(made)
    class Mine(UniProcExecutor): pass
    made.parallel_config = ParallelConfig(distributed_executor_backend=Mine)
    assert Executor.get_class(made) is Mine


def test_a_worker_imports_no_scheduler():
    import subprocess
    import sys
    code = ("import sys, minengine.v1.executor; "
            "sys.exit('minengine.v1.core.scheduler' in sys.modules or 'minengine.v1.core.kv_cache_manager' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
