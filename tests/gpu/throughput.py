"Part 3: tokens per second on ShareGPT's lengths, and decode steps against the roofline."
import csv
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from common import (ROOT, Settings, dispatcher_of, emit, engine, load_config, log, model_of, random_prompts, recorded,
                    write_config)
from timing import copy_bandwidth

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
RUNS = ("v1 graphs", "v0 eager", "v0 graphs", "v1 eager")   # the most telling first
BATCHES = (1, 8, 64, 256)
NUM_REQUESTS = {"qwen3-0.6b": 256, "llama-3.1-8b": 192}
SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]   # recorded
CONTEXT, DECODE_STEPS, MAX_LEN = 512, 40, 4096


def sharegpt_lengths(num: int, seed: int) -> list[tuple[int, int]]:
    "(prompt, output) tokens of real conversations."
    with open(ROOT / "minengine" / "data" / "sharegpt_lengths.csv") as file:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return random.Random(seed).sample(rows, num)


def params(max_tokens: int):
    from minengine.sampling_params import RequestOutputKind, SamplingParams
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                          output_kind=RequestOutputKind.DELTA)


def add(llm, prompts: list, max_tokens: list[int], name: str):
    for i, (prompt, most) in enumerate(zip(prompts, max_tokens)):
        llm.llm_engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, params(most))


def drain(llm, limit_s: float) -> tuple[list[tuple[float, int]], bool]:
    "(seconds, new tokens) of each step until all have ended or time is over."
    own, steps, end = llm.llm_engine, [], time.perf_counter() + limit_s
    start = time.perf_counter()
    while own.has_unfinished_requests():
        new = sum(len(output.outputs[0].token_ids) for output in own.step())
        now = time.perf_counter()
        steps.append((now - start, new))
        start = now
        if now > end: break
    complete = not own.has_unfinished_requests()
    return steps, complete


def abort(llm, name: str, num: int):
    llm.llm_engine.abort_request([f"{name}-{i}" for i in range(num)])
    for _ in range(3):   # late outputs, and the news of the aborts
        if llm.llm_engine.has_unfinished_requests(): llm.llm_engine.step()


def warm_up(llm, settings: Settings, vocab_size: int):
    "All kernels that the runs will need: short and long prompts, decodes."
    rng = random.Random(1)
    lens = [3, 9] if settings.dry else [3, 700, 60, 1500, 200]
    add(llm, random_prompts(rng, lens, vocab_size), [3 if settings.dry else 6] * len(lens), "warm")
    drain(llm, 60)


def run_sharegpt(llm, model: str, mode: str, settings: Settings, limit_s: float, vocab_size: int):
    "All requests at once, as fast as it goes."
    lengths = sharegpt_lengths(NUM_REQUESTS[model], 0)
    if settings.dry: lengths = [(1 + p % 12, 2 + o % 3) for p, o in lengths[:3]]
    prompts = random_prompts(random.Random(0), [p for p, _ in lengths], vocab_size)
    dispatcher = dispatcher_of(llm)
    before = (dispatcher.num_replayed, dispatcher.num_eager) if dispatcher else (0, 0)
    started = time.perf_counter()
    add(llm, prompts, [o for _, o in lengths], "share")
    steps, complete = drain(llm, limit_s)
    seconds, tokens = time.perf_counter() - started, sum(new for _, new in steps)
    if not complete: abort(llm, "share", len(prompts))
    row = dict(what="sharegpt", model=model, mode=mode, num_requests=len(prompts), complete=complete,
               seconds=round(seconds, 3), output_tokens=tokens, output_tokens_per_s=round(tokens / seconds, 1),
               num_steps=len(steps), median_step_ms=round(1000 * median(s for s, _ in steps), 3))
    if complete: row["total_tokens_per_s"] = round((tokens + sum(map(len, prompts))) / seconds, 1)
    if dispatcher: row |= dict(replayed=dispatcher.num_replayed - before[0], eager=dispatcher.num_eager - before[1])
    emit(**row)


def bytes_of_step(llm, batch: int, context: float) -> int:
    "What a decode step must at least read and write: weights, keys and values."
    model, config = model_of(llm), llm.vllm_config.model_config
    weights = {p.data_ptr(): (name, p.nbytes) for name, p in model.named_parameters()}
    tied = getattr(config.hf_config, "tie_word_embeddings", False)
    read = sum(size for name, size in weights.values() if tied or "embed_tokens" not in name)
    itemsize = next(model.parameters()).element_size()
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    return int(read + batch * (context + 1) * per_token)


def run_decode(llm, model: str, mode: str, batch: int, settings: Settings, bandwidth: float, limit_s: float, vocab_size: int):
    "Decode steps of a full batch: their median beside the time of the bytes alone."
    cache = llm.vllm_config.cache_config
    pool, num_steps = cache.num_gpu_blocks * cache.block_size, 3 if settings.dry else DECODE_STEPS
    context = min(CONTEXT, pool // (batch + 1) - num_steps - 80)
    if settings.dry: context = 12
    if context < 8:
        emit(what="decode", model=model, mode=mode, batch=batch, skipped=f"the pool holds {pool} tokens")
        return
    add(llm, random_prompts(random.Random(batch), [context] * batch, vocab_size), [num_steps + 4] * batch, f"b{batch}")
    steps, complete = drain(llm, limit_s)
    if not complete: abort(llm, f"b{batch}", batch)
    full = [s for s, new in steps if new == batch][1:]   # the first may hold a prompt
    if not full: raise RuntimeError(f"no step of {batch} decodes in {limit_s:.0f} s")
    step_s, moved = median(full), bytes_of_step(llm, batch, context + num_steps / 2)
    emit(what="decode", model=model, mode=mode, batch=batch, context=context, num_steps=len(full),
         step_ms=round(1000 * step_s, 4), tokens_per_s=round(batch / step_s, 1), bytes_moved=moved,
         roofline_ms=round(1000 * moved / bandwidth, 4), share_of_roofline=round(moved / bandwidth / step_s, 4))


def run_engine(model: str, mode: str, settings: Settings, bandwidth: float, limit_s: float):
    end = time.monotonic() + limit_s
    left = lambda: max(3.0, end - time.monotonic())
    fields = load_config(model, settings.dry)
    args = dict(dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, num_gpu_blocks_override=64,
                enable_prefix_caching=False, swap_space=0)
    if not settings.dry: args = dict(
        dtype="bfloat16", max_model_len=MAX_LEN, max_num_seqs=256, max_num_batched_tokens=8192,
        enable_prefix_caching=False, swap_space=0)   # random prompts share nothing
    started = time.perf_counter()
    with engine(write_config(fields), mode, settings, [1, 2, 4] if settings.dry else SIZES, **args) as llm:
        summary = {k: v for k, v in llm.llm_engine.startup_summary().items() if isinstance(v, (int, float, str))}
        emit(what="start-up", model=model, mode=mode, seconds=round(time.perf_counter() - started, 2), **summary)
        warm_up(llm, settings, fields["vocab_size"])
        with recorded("sharegpt", False, model=model, mode=mode):
            run_sharegpt(llm, model, mode, settings, 0.6 * left(), fields["vocab_size"])
        for batch in (1, 2) if settings.dry else BATCHES:
            with recorded("decode", False, model=model, mode=mode, batch=batch):
                run_decode(llm, model, mode, batch, settings, bandwidth, left(), fields["vocab_size"])


def run_others(settings: Settings, first: int):
    "Go on with the engine `first` in a new process: the device is lost to this one."
    command = [sys.executable, str(Path(__file__).parent / "check.py"), "--part", "throughput",
               "--budget", f"{settings.left_s:.0f}", "--seed", str(settings.seed), "--share", f"{first}/0"]
    subprocess.run(command)


def device_works(device: str) -> bool:
    "False after an error that a CUDA context does not survive."
    import torch
    try: torch.ones(1, device=device).item()
    except RuntimeError: return False
    return True


def run(settings: Settings, first: int = 0, *_):
    bandwidth = copy_bandwidth(settings.device)
    emit(what="copy bandwidth", bytes_per_s=bandwidth)
    todo = [(model, mode) for model in MODELS for mode in RUNS]
    if settings.dry: todo = [("qwen3-0.6b", mode) for mode in RUNS]
    for i, (model, mode) in enumerate(todo):
        if i < first: continue
        if settings.left_s < 10:
            emit(what="sharegpt", model=model, mode=mode, skipped="out of time")
            continue
        share_s = (settings.left_s - 5) / (len(todo) - i) * 1.3   # others may need less
        log(model, mode, f"{share_s:.0f} of {settings.left_s:.0f} s")
        with recorded("engine", False, model=model, mode=mode):
            run_engine(model, mode, settings, bandwidth, min(share_s, settings.left_s - 5))
        if not device_works(settings.device): return run_others(settings, i + 1)
