"""Workers without a model that fail in every way, and executors for them.

Shared by the tests of workers in processes; no test by itself. Imports no torch: a process starts quickly.
"""
import os
import signal
import time
from pathlib import Path

from front_tiny import make_config

from minengine.config import ParallelConfig
from minengine.v1.messages import ModelRunnerOutput


class MoodyWorker:
    "Does what it is told, on the rank that it is told of."
    dies_in = raises_in = sleeps_in = None   # a method, on rank 1

    def __init__(self, vllm_config, rank, local_rank, init_method):
        self.rank, self.steps = rank, 0
        self._mood("make_worker")

    def _mood(self, method):
        if self.rank != 1: return
        if method == self.dies_in: os.kill(os.getpid(), signal.SIGKILL)
        if method == self.raises_in: raise KeyError(f"no {method} here")
        if method == self.sleeps_in: time.sleep(3600)

    def init_device(self): self._mood("init_device")
    def load_model(self): self._mood("load_model")

    def execute_model(self, order):
        "An order is a wish: what to do, and the rank that does it."
        self.steps += 1
        wish, rank = order
        if rank in (self.rank, None):
            if wish == "die": os.kill(os.getpid(), signal.SIGKILL)
            if wish == "raise": raise LookupError(f"rank {self.rank} is lost")
            if wish == "raise late":
                time.sleep(0.3)
                raise LookupError(f"rank {self.rank} is lost")
            if wish == "sleep": time.sleep(3600)
        elif wish in ("die", "raise"): time.sleep(3600)   # waits for the other's part of a sum
        return ModelRunnerOutput([f"step {self.steps}"], {}, [[self.rank]])

    def who(self): return self.rank, os.getpid()
    def slow(self, seconds): time.sleep(seconds); return seconds
    def fail(self, rank): return 1 / (self.rank != rank)
    def big(self, size): return b"x" * size


class DiesInLoad(MoodyWorker): dies_in = "load_model"
class DiesAtOnce(MoodyWorker): dies_in = "make_worker"
class RaisesInLoad(MoodyWorker): raises_in = "load_model"
class RaisesAlone(MoodyWorker):
    "Rank 1 fails, and rank 0 would wait for it for ever."
    raises_in = "init_device"
    def init_device(self):
        if self.rank == 0: time.sleep(3600)
        super().init_device()


def config(size=2):
    made = make_config()
    made.parallel_config = ParallelConfig(size)
    return made


def is_running(pid: int) -> bool:
    "True while a process runs; a zombie does not."
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError): return False


def wait_until(condition, timeout_s=10.0) -> float:
    "Seconds until `condition()`; fails after `timeout_s`."
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - start
