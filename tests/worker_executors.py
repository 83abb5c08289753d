"""Executors of workers without a model, for engines whose core is a process of its own: it must import them.

Shared by the tests of workers in processes; no test by itself.
"""
from front_tiny import ToyExecutor
from worker_moods import MoodyWorker

from minengine.v1.multiproc_executor import MultiprocExecutor


class Moody(MultiprocExecutor): worker_class = MoodyWorker


class ToyWorker(ToyExecutor):
    "The next token is the last one plus one, on every rank."
    def __init__(self, vllm_config, rank, local_rank, init_method): super().__init__(vllm_config)
    def init_device(self): pass
    def load_model(self): pass
    def determine_available_memory(self): return 64
    def get_kv_cache_block_bytes(self): return 1
    def initialize_cache(self, num_blocks): pass


class Toys(MultiprocExecutor): worker_class = ToyWorker
