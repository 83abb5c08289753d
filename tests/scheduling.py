"Shared by the scheduler's tests: build one, run steps, read what it decided."
from minengine.config import CacheConfig, SchedulerConfig
from minengine.sampling_params import SamplingParams
from minengine.v1.core.scheduler import Scheduler
from minengine.v1.messages import ModelRunnerOutput, PlaceholderRange
from minengine.v1.request import Request

EOS = 50256


def make_scheduler(num_blocks=10_000, block_size=16, budget=8192, max_seqs=16, max_model_len=8192,
                   prealloc=64, caching=True, encoder_budget=0, encoder_cache=None, log_stats=False):
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len,
            enable_chunked_prefill=True, max_num_encoder_input_tokens=encoder_budget,
            encoder_cache_size=encoder_budget if encoder_cache is None else encoder_cache),
        CacheConfig(block_size=block_size, num_gpu_blocks=num_blocks, enable_prefix_caching=caching,
                    num_preallocate_tokens=prealloc), log_stats)


def make_request(name, prompt, max_tokens=16, images=(), eos=EOS, **params):
    "`prompt` is token ids or a length; `images` are (offset, length) or (offset, length, hash)."
    if isinstance(prompt, int): prompt = [hash_token(name, i) for i in range(prompt)]
    images = [(*image, f"{name}-{i}")[:3] for i, image in enumerate(images)]
    return Request(
        name, None, prompt, SamplingParams(max_tokens=max_tokens, **params), eos,
        mm_positions=[PlaceholderRange(o, n) for o, n, _ in images],
        mm_hashes=[h for *_, h in images])


def hash_token(name, i): return (sum(map(ord, name)) * 7919 + i * 31) % 50_000


def make_result(order, tokens=None, drafts=None):
    "One sampled token (0) for each scheduled request, unless `tokens` says otherwise."
    ids, tokens = list(order.num_scheduled_tokens), tokens or {}
    sampled = [tokens.get(i, [0]) for i in ids]
    return ModelRunnerOutput(
        ids, {i: row for row, i in enumerate(ids)}, sampled,
        None if drafts is None else [drafts.get(i, []) for i in ids])


def step(scheduler, tokens=None, drafts=None):
    "Schedule, pretend to compute, update: the order and the outputs by id."
    order = scheduler.schedule()
    order.check_invariants()
    scheduler.check_invariants()
    outputs = scheduler.update_from_output(order, make_result(order, tokens, drafts)).outputs
    scheduler.check_invariants()
    return order, {o.request_id: o for o in outputs}


def counts(order): return dict(order.num_scheduled_tokens)


def new_blocks(order): return {
    r.req_id: r.new_block_ids if hasattr(r, "new_block_ids") else r.block_ids
    for r in [*order.scheduled_new_reqs, *order.scheduled_cached_reqs]}


def names(requests): return [r.request_id for r in requests]
