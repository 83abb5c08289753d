"""A two-layer Llama with random weights, and a loop of scheduler and runner.

Shared by the tests of V1's worker side; no test by itself.
"""
import functools
import random

from transformers import LlamaConfig

from minengine.config import (
    CacheConfig, DeviceConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig)
from minengine.model.checkpoint import fill_dummy_weights
from minengine.model.decoder import DecoderForCausalLM
from minengine.sampling_params import SamplingParams
from minengine.v1.core.scheduler import Scheduler
from minengine.v1.request import Request, RequestStatus
from minengine.v1.worker.model_runner import ModelRunner

VOCAB = 97


def tiny_config(max_model_len=128, block_size=4, num_blocks=64, budget=32, max_num_seqs=8,
                caching=True, preallocate=0, backend="cpu", **model) -> VllmConfig:
    "An engine small enough to reach every corner in milliseconds."
    hf_config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        architectures=["LlamaForCausalLM"])
    return VllmConfig(
        ModelConfig("tiny", hf_config, dtype="float32", max_model_len=max_model_len, **model),
        CacheConfig(block_size=block_size, enable_prefix_caching=caching, num_gpu_blocks=num_blocks,
                    num_preallocate_tokens=preallocate),
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs,
                        max_model_len=max_model_len, enable_chunked_prefill=True),
        device_config=DeviceConfig("cpu", backend), load_config=LoadConfig("dummy", use_tqdm=False))


@functools.cache
def tiny_model() -> DecoderForCausalLM:
    "Weights large enough that the next token depends on the whole prefix."
    model = DecoderForCausalLM(tiny_config().model_config)
    fill_dummy_weights(model, seed=0, std=0.3, use_tqdm=False)
    return model.requires_grad_(False).eval()


class Engine:
    "Scheduler and model runner, step by step, with everything in reach."

    def __init__(self, nan_in_free_blocks=False, check=True, run_model=None, num_input_tokens=None, **config):
        self.config = tiny_config(**config)
        self.scheduler = Scheduler(self.config.scheduler_config, self.config.cache_config)
        self.runner = ModelRunner(self.config, tiny_model(), run_model, num_input_tokens)
        self.runner.initialize_kv_cache(self.config.cache_config.num_gpu_blocks)
        self.nan_in_free_blocks, self.check = nan_in_free_blocks, check
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}      # by id, as they came out
        self.outputs: dict[str, list] = {}          # by id, every EngineCoreOutput
        self.orders, self.num_skipped = [], 0

    def add(self, req_id: str, prompt: list[int], params: SamplingParams | None = None, **kw) -> Request:
        params = params or SamplingParams(temperature=0, ignore_eos=True, **kw)
        request = Request(req_id, None, list(prompt), params)
        self.scheduler.add_request(request)
        self.requests[req_id] = request
        self.tokens[req_id], self.outputs[req_id] = [], []
        return request

    def abort(self, req_id: str):
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def step(self):
        if self.nan_in_free_blocks: self.fill_free_blocks()
        order = self.scheduler.schedule()
        order.check_invariants()
        self.orders.append(order)
        self.num_skipped += sum(r.request_id not in order.num_scheduled_tokens for r in self.scheduler.running)
        result = self.runner.execute_model(order)
        if self.check: self.check_mirror(order)
        for output in self.scheduler.update_from_output(order, result).outputs:
            self.tokens[output.request_id] += output.new_token_ids
            self.outputs[output.request_id].append(output)
        return order, result

    def run(self, max_steps=2000) -> dict[str, list[int]]:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests(): return self.tokens
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def fill_free_blocks(self):
        "Whoever reads a block that is free and not cached reads NaN."
        pool = self.scheduler.kv_cache_manager.pool
        ids = [b.block_id for b in pool.free_queue if b.block_hash is None]
        for kv_cache in self.runner.kv_caches: kv_cache[:, ids] = float("nan")

    def check_mirror(self, order):
        "Between execution and update, worker rows equal the scheduler's requests."
        batch = self.runner.batch
        batch.check_invariants()
        assert set(batch.req_ids) == set(order.num_scheduled_tokens)
        held = self.scheduler.kv_cache_manager.req_to_blocks
        for req_id, row in batch.req_id_to_index.items():
            request = self.scheduler.requests[req_id]
            state, tokens = self.runner.requests[req_id], batch.tokens
            known = state.prompt_token_ids + state.output_token_ids
            # The worker is ahead by the token it has just sampled.
            assert known[:request.num_tokens] == list(request.all_token_ids)
            complete = request.num_computed_tokens + order.num_scheduled_tokens[req_id] >= request.num_tokens
            assert len(known) == request.num_tokens + complete
            assert tokens.token_ids[row, :len(known)].tolist() == known
            assert tokens.num_computed_tokens[row] == state.num_computed_tokens == request.num_computed_tokens
            assert batch.block_table.row(row).tolist() == state.block_ids == [b.block_id for b in held[req_id]]
        alive = set(self.scheduler.requests)
        assert alive >= set(self.runner.requests) >= set(batch.req_ids)


def random_prompt(rng: random.Random, low=1, high=40) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))]


def alone(prompt: list[int], **kw) -> list[int]:
    "The tokens of a request that has an engine to itself, with reference attention."
    engine = Engine(backend="reference", budget=512, num_blocks=128, block_size=16, caching=False)
    engine.add("alone", prompt, **kw)
    return engine.run()["alone"]
