"""An executor without a model, and V0 engines around it.

Shared by the tests of V0's outputs and engines; no test by itself.
"""
from types import SimpleNamespace

from minengine.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minengine.outputs import Logprob
from minengine.sampling_params import SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v0.llm_engine import LLMEngineV0
from minengine.v0.sequence import CompletionSequenceGroupOutput, SequenceOutput

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_token_id
VOCAB = 264


def next_token(token_id: int, index: int = 0) -> int:
    "The toy's rule: after a comes b; answer number i takes the i-th letter after."
    return (token_id + 1 + index) % 256


class ToyExecutor:
    "Reads the last token of each sequence where V0's runner would."
    num_gpu_blocks, num_cpu_blocks = 64, 32
    fail_with = None  # an exception, raised by the next step
    eos_at = None     # {sequence length: an end token comes}

    def __init__(self, vllm_config):
        self.vllm_config, self.sizes, self.closed = vllm_config, None, 0
        self.requests = []    # every ExecuteModelRequest, as (ids, moves)
        self.burst = None     # sampled tokens of the burst under way, by seq id
        self.finished_ids, self.num_idle = [], 0

    def determine_num_available_blocks(self): return self.num_gpu_blocks, self.num_cpu_blocks

    def initialize_cache(self, num_gpu, num_cpu): self.sizes = num_gpu, num_cpu

    def startup_summary(self): return {"weights_bytes": 0, "kv_cache_bytes": 0}

    def stop_remote_worker_execution_loop(self): self.num_idle += 1

    def check_health(self): pass

    def shutdown(self): self.closed += 1

    def execute_model(self, request):
        groups = request.seq_group_metadata_list
        self.finished_ids += request.finished_requests_ids
        moves = request.blocks_to_swap_in, request.blocks_to_swap_out, request.blocks_to_copy
        self.requests.append(([g.request_id for g in groups], moves))
        if self.fail_with:
            error, self.fail_with = self.fail_with, None
            raise error
        if not groups: return []
        if request.is_first_multi_step: self.burst = [{} for _ in groups]
        if request.async_callback: request.async_callback()
        for group, sampled in zip(groups, self.burst): self._run(group, sampled)
        if not request.is_last_step: return []
        return [SimpleNamespace(outputs=[self._group_output(g, s, step) for g, s in zip(groups, self.burst)])
                for step in range(request.num_steps)]

    def _run(self, group, sampled):
        "Sample one token for each sequence, or n for a prompt."
        if not group.do_sample: return
        params, num_samples = group.sampling_params, max(group.sampling_params.n, group.sampling_params.best_of or 1)
        for seq_id, data in group.seq_data.items():
            tokens = sampled.setdefault(seq_id, [])
            if not tokens and group.is_prompt and not data.get_output_len():
                tokens.append([self._sample(params, data, [], i) for i in range(num_samples)])
            else:
                done = [t[0] for t in tokens]
                tokens.append([self._sample(params, data, done, 0)])

    def _sample(self, params, data, done, index):
        tokens = data.get_token_ids() + done
        if self.eos_at and self.eos_at.get(len(tokens)) and len(tokens) - data.get_prompt_len() >= params.min_tokens: return EOS
        return next_token(tokens[-1], index)

    def _group_output(self, group, sampled, step):
        prompt = None
        if group.sampling_params.prompt_logprobs is not None and group.is_prompt and group.do_sample:
            ids = next(iter(group.seq_data.values())).prompt_token_ids
            prompt = [{t: Logprob(-0.5, 1)} for t in ids[1:]]
        samples = [SequenceOutput(seq_id, t, {t: Logprob(-1.0 - i, 1)})
                   for seq_id, tokens in sampled.items() for i, t in enumerate(tokens[step])]
        return CompletionSequenceGroupOutput(samples, prompt if step == 0 else None)


def make_config(max_model_len: int | None = 64, num_blocks: int | None = None, block_size=4, budget=64, max_num_seqs=8,
                caching=False, limit=256, chunked=False, num_steps=1, use_async=False, **scheduler) -> VllmConfig:
    "A config by hand: no files, no model."
    hf_config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=limit)
    model = ModelConfig("toy", hf_config, max_model_len=max_model_len, generation_config={"eos_token_id": EOS})
    return VllmConfig(
        model, CacheConfig(block_size, enable_prefix_caching=caching, num_gpu_blocks_override=num_blocks),
        SchedulerConfig(max(budget, 1 if chunked else model.max_model_len), max_num_seqs, model.max_model_len,
                        enable_chunked_prefill=chunked, num_scheduler_steps=num_steps,
                        use_async_output_proc=use_async, **scheduler))


def make_engine(log_stats=False, tokenizer=TOKENIZER, executor=ToyExecutor, **config) -> LLMEngineV0:
    return LLMEngineV0(make_config(**config), executor, log_stats, tokenizer)


def run(engine, max_steps=2000) -> list:
    "Step until nothing is left; every output, in order."
    outputs = []
    for _ in range(max_steps):
        if not engine.has_unfinished_requests(): return outputs
        outputs += engine.step()
        engine.scheduler.check_invariants() if not engine.scheduler.use_async_output_proc else None
    raise AssertionError(f"not done after {max_steps} steps")


def generate(engine, prompts, params=None, **kw) -> dict:
    "The final output of each prompt, by its number."
    for i, prompt in enumerate(prompts): engine.add_request(str(i), prompt, params or SamplingParams(**kw))
    return {o.request_id: o for o in run(engine) if o.finished}


def assert_at_rest(engine):
    "Nothing is held by anybody."
    blocks, cache = engine.scheduler.block_manager, engine.scheduler.cache_config
    assert blocks.get_num_free_gpu_blocks() == cache.num_gpu_blocks
    assert blocks.get_num_free_cpu_blocks() == (cache.num_cpu_blocks or 0)
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    assert engine.output_queue.pending is None and engine.burst is None
    engine.scheduler.check_invariants()
