"""Tiny models of every family in folders, and engines that record or compile them.

Shared by the tests of graphs and of compilation; no test by itself.
"""
import atexit
import functools
import json
import random
import shutil
import tempfile

import torch
from test_equality import FAMILIES, Running, tiny_config, transformers_tokens
from transformers import AutoModelForCausalLM

from minengine.config import EngineArgs
from minengine.sampling_params import SamplingParams
from minengine.v1.worker.cuda_graph import PieceGraphs, token_sizes

NUM_TOKENS, MAX_LEN = 24, 112


@functools.cache
def make_model(family: str, changes: str = "{}") -> tuple[str, torch.nn.Module]:
    "A folder with random weights, and transformers' model of it; `changes` of the config are JSON."
    config = tiny_config(family)
    for name, value in json.loads(changes).items(): setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    model.save_pretrained(folder)
    return folder, model


@functools.cache
def some_prompts() -> list[list[int]]:
    "Some begin alike, one is a single token, some are longer than a step."
    rng = random.Random(1)
    start = [rng.randrange(3, 160) for _ in range(20)]
    return [start[:n] + [rng.randrange(3, 160) for _ in range(m)] for n, m in
            ((20, 5), (20, 12), (0, 1), (16, 0), (16, 0), (8, 40), (0, 33), (20, 30))]


@functools.cache
def wanted(family: str, changes: str = "{}") -> list[list[int]]:
    "What transformers says to each prompt alone."
    model = make_model(family, changes)[1]
    return [transformers_tokens(model, prompt, NUM_TOKENS) for prompt in some_prompts()]


def make_args(folder: str, engine="v1", small_pool=True, **options) -> EngineArgs:
    "Chunks, hits in the prefix cache and, in a small pool, preemption."
    if engine == "v1": options = dict(num_preallocate_tokens=8, enable_prefix_caching=True, max_num_batched_tokens=24) | options
    else: options = dict(swap_space=0.01) | options
    return EngineArgs(
        model=folder, engine=engine, dtype="float32", skip_tokenizer_init=True, use_tqdm_on_load=False, max_num_seqs=8,
        block_size=8, max_model_len=MAX_LEN, num_gpu_blocks_override=22 if small_pool else 512, **options)


def runner_of(running: Running):
    "The model runner inside of an engine of this process."
    if running.is_v0: return running.engine.executor.driver_worker.model_runner
    return running.engine.engine_core.engine_core.executor.worker.model_runner


def generate(running: Running, prompts, num_tokens=NUM_TOKENS, late=True) -> list[list[int]]:
    "Greedy tokens; with `late`, two steps between arrivals. Notes in `running` how many tokens were found in the cache."
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    tokens, step, running.num_cached = {}, 0, 0
    while len(tokens) < len(prompts):
        for i, prompt in enumerate(prompts):
            if step == 2 * i * late: running.engine.add_request(f"{id(tokens)} {i}", {"prompt_token_ids": prompt}, params)
        for out in running.engine.step():
            if not out.finished: continue
            tokens[int(out.request_id.split()[1])] = out.outputs[0].token_ids
            running.num_cached += out.num_cached_tokens or 0
        running.check_step()
        step += 1
        assert step < 10_000, "the engine does not finish"
    while running.engine.has_unfinished_requests(): running.engine.step()
    running.check_rest()
    return [tokens[i] for i in range(len(prompts))]


def record_only(model, config, max_num_batched_tokens, device, cache_dir=None):
    "In place of `make_run_model`: pieces are recorded, but not compiled."
    if config.level == 0: return model
    return PieceGraphs(model, token_sizes(config, max_num_batched_tokens), device, compile_piece=lambda piece, inputs: piece)


__all__ = ["FAMILIES", "MAX_LEN", "NUM_TOKENS", "Running", "generate", "make_args", "make_model", "record_only", "runner_of",
           "some_prompts", "wanted"]
