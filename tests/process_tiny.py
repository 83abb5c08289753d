"""Executors with moods, for cores in processes of their own.

Shared by the tests of processes; no test by itself. Imports no torch: a process starts quickly.
"""
import os
import time
from pathlib import Path

from front_tiny import ToyExecutor

RAISE, HANG, DIE, BAD_OUTPUT, SLOW = 201, 202, 203, 204, 205  # first tokens of prompts


class MoodyExecutor(ToyExecutor):
    "The first token of a prompt may be a wish for trouble."

    def execute_model(self, order):
        output = super().execute_model(order)
        wishes = {r.prompt_token_ids[0] for r in order.scheduled_new_reqs}
        if RAISE in wishes: raise RuntimeError("out of luck")
        if HANG in wishes: time.sleep(3600)
        if DIE in wishes: os._exit(7)
        if any(tokens[0] == SLOW for tokens in self.tokens.values()): time.sleep(0.02)
        for new in order.scheduled_new_reqs:
            if new.prompt_token_ids[0] == BAD_OUTPUT:
                output.logprobs.logprobs[output.req_id_to_index[new.req_id]] = [object()]
        return output


class NeverStarts(ToyExecutor):
    def __init__(self, vllm_config): time.sleep(3600)


class DiesAtStart(ToyExecutor):
    def __init__(self, vllm_config): os._exit(3)


class OddError(Exception): pass


class FailsAtStart(ToyExecutor):
    "Raises what the model's name says."
    def __init__(self, vllm_config):
        kind = {"value": ValueError, "odd": OddError, "exit": SystemExit}[vllm_config.model_config.model]
        raise kind("no such model here")


def is_alive(pid: int) -> bool:
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
