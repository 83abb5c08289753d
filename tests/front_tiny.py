"""A model folder without weights and an executor without a model.

Shared by the tests of V1's front end; no test by itself.
"""
import json
from pathlib import Path
from types import SimpleNamespace

from minengine.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minengine.v1.messages import LogprobsLists, ModelRunnerOutput

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=264,
    max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=257)

ARGS = dict(load_format="dummy", tokenizer="byte", num_gpu_blocks_override=64, max_num_seqs=8, use_tqdm_on_load=False)


def make_folder(folder: Path, **fields) -> str:
    "A folder with a config.json: enough for `load_format='dummy'`."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return str(folder)


def make_config(max_model_len: int | None = 64, num_blocks: int | None = 64, block_size=4, budget=64,
                max_num_seqs=8, caching=True, limit=256, **scheduler) -> VllmConfig:
    "A config by hand: no files, no model."
    hf_config = SimpleNamespace(vocab_size=264, max_position_embeddings=limit)
    model = ModelConfig("toy", hf_config, max_model_len=max_model_len, generation_config={"eos_token_id": 257})
    return VllmConfig(
        model, CacheConfig(block_size, enable_prefix_caching=caching, num_gpu_blocks_override=num_blocks,
                           num_preallocate_tokens=0),
        SchedulerConfig(budget, max_num_seqs, model.max_model_len, enable_chunked_prefill=True, **scheduler))


class ToyExecutor:
    "Knows what its orders told it; the next token is the last one plus one."
    num_available_blocks = 64
    fail_with = None  # an exception, raised by the next step

    def __init__(self, vllm_config):
        self.vllm_config, self.num_blocks, self.closed = vllm_config, None, 0
        self.tokens, self.num_known = {}, {}  # by request id
        self.steps = []                       # tokens of each order

    def determine_num_available_blocks(self): return self.num_available_blocks

    def initialize(self, num_blocks): self.num_blocks = num_blocks

    def startup_summary(self): return {"weights_bytes": 0, "kv_cache_bytes": 0}

    def check_health(self): pass

    def register_failure_callback(self, callback): pass

    def shutdown(self): self.closed += 1

    def execute_model(self, order):
        order.check_invariants()
        for req_id in order.finished_req_ids: self.tokens.pop(req_id, None)
        for new in order.scheduled_new_reqs: self.tokens[new.req_id] = list(new.prompt_token_ids)
        for old in order.scheduled_cached_reqs:
            tokens = self.tokens[old.req_id]
            tokens[old.num_computed_tokens:] = old.new_token_ids + tokens[old.num_computed_tokens + len(old.new_token_ids):]
        self.steps.append(order.total_num_scheduled_tokens)
        if self.fail_with:
            error, self.fail_with = self.fail_with, None
            raise error
        start = {r.req_id: r.num_computed_tokens for r in (*order.scheduled_new_reqs, *order.scheduled_cached_reqs)}
        ids = list(order.num_scheduled_tokens)
        ends = [start[i] + order.num_scheduled_tokens[i] for i in ids]
        sampled = [[(self.tokens[i][end - 1] + 1) % 256] for i, end in zip(ids, ends)]
        logprobs = LogprobsLists([s * 2 for s in sampled], [[-1.0, -1.0]] * len(ids), [1] * len(ids))
        return ModelRunnerOutput(ids, {i: row for row, i in enumerate(ids)}, sampled, logprobs=logprobs)
