"Part 4: what the CPU and the GPU do during one step of V1, and where the GPU waits."
import random
import warnings
from collections import Counter

from common import Settings, emit, engine, load_config, random_prompts, recorded, write_config
from throughput import SIZES, add, warm_up

MODEL, BATCH, NUM_STEPS, MODES = "qwen3-0.6b", 32, 4, ("v1 graphs", "v1 eager", "v0 graphs")


def merge(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    "(start, end) pairs, ascending, with those that touch or overlap joined."
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]: merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else: merged.append((start, end))
    return merged


def describe(kernels: list[tuple[float, float, str]], start: float, end: float) -> dict:
    "Busy and idle time of the device between two moments, in µs, and its longest gaps."
    inside = [k for k in kernels if start <= k[0] < end]
    busy = merge([(a, b) for a, b, _ in inside])
    gaps = [(b[0] - a[1], a[1] - start) for a, b in zip(busy, busy[1:])]
    if busy: gaps += [(busy[0][0] - start, 0.0), (max(0.0, end - busy[-1][1]), busy[-1][1] - start)]
    return dict(step_us=round(end - start, 1), num_kernels=len(inside),
                busy_us=round(sum(b - a for a, b in busy), 1), num_gaps=len(gaps),
                idle_us=round(end - start - sum(min(b, end) - a for a, b in busy), 1),
                longest_gaps=[[round(length, 1), round(at, 1)] for length, at in sorted(gaps, reverse=True)[:8]])


def watch_parts(llm):
    "Put the names of an engine's parts on the profiler's CPU row."
    import torch
    from minengine.bench import _clocks
    for owner, name in _clocks(llm.llm_engine):
        call = getattr(owner, name)

        def named(*args, call=call, name=name, **kwargs):
            with torch.profiler.record_function(f"minengine.{name}"): return call(*args, **kwargs)
        setattr(owner, name, named)


def profile(llm, device: str) -> tuple[list, list]:
    "(kernels, parts): each (start, end, name) in µs, over some decode steps."
    import torch
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda": kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(NUM_STEPS): llm.llm_engine.step()
        if device == "cuda": torch.cuda.synchronize()
    events = found.profiler.kineto_results.events()
    rows = [(e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3, e.name(), str(e.device_type())) for e in events]
    parts = [row[:3] for row in rows if row[2].startswith("minengine.") and "CUDA" not in row[3]]
    on_gpu = [row[:3] for row in rows if "CUDA" in row[3] and not row[2].startswith("minengine.")]
    # Without a GPU, PyTorch's operators stand in for kernels.
    if device == "cpu": on_gpu = [row[:3] for row in rows if row[2].startswith("aten::")]
    return sorted(on_gpu), sorted(parts)


def count_syncs(llm, device: str):
    "Where a decode step of V1 waits for the device: once, for the tokens."
    import torch
    if device != "cuda":
        emit(what="waits for the device", skipped="no device to wait for")
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(NUM_STEPS): llm.llm_engine.step()
        finally: torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{w.filename.split('minengine/')[-1]}:{w.lineno}" for w in found if "called a synchronizing" in str(w.message))
    emit(what="waits for the device", steps=NUM_STEPS, places=dict(places),
         per_step=round(sum(places.values()) / NUM_STEPS, 2))


def run_mode(mode: str, settings: Settings):
    fields = load_config(MODEL, settings.dry)
    batch = 2 if settings.dry else BATCH
    args = dict(dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, num_gpu_blocks_override=64)
    if not settings.dry: args = dict(dtype="bfloat16", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=4096,
                                     gpu_memory_utilization=0.5, swap_space=0)
    sizes = [1, 2, 4] if settings.dry else [s for s in SIZES if s <= 64]
    with engine(write_config(fields), mode, settings, sizes, **args) as llm:
        warm_up(llm, settings, fields["vocab_size"])
        length = 8 if settings.dry else 256
        add(llm, random_prompts(random.Random(0), [length] * batch, fields["vocab_size"]), [60] * batch, "t")
        for _ in range(6): llm.llm_engine.step()   # prompts, first decodes
        if mode.startswith("v1"): count_syncs(llm, settings.device)
        watch_parts(llm)
        kernels, parts = profile(llm, settings.device)
        emit_timeline(mode, batch, kernels, parts, settings.dry)


def emit_timeline(mode: str, batch: int, kernels: list, parts: list, dry: bool):
    "Each step in numbers; one of them event by event; the kernels by their time."
    steps = [(a, b) for a, b, name in parts if name == "minengine.step"][1:]
    if not steps: raise RuntimeError("the profiler saw no step")
    for start, end in steps:
        emit(what="step", model=MODEL, mode=mode, batch=batch, **describe(kernels, start, end))
    start, end = steps[-1]
    emit(what="timeline", model=MODEL, mode=mode, batch=batch, step_us=round(end - start, 1),
         kernels=[[round(a - start, 1), round(b - a, 2), name[:48]] for a, b, name in kernels if start <= a < end][:1500],
         cpu=[[round(a - start, 1), round(b - a, 1), name.removeprefix("minengine.")]
              for a, b, name in parts if start <= a < end])
    seconds, counts = Counter(), Counter()
    for a, b, name in kernels:
        seconds[name] += b - a
        counts[name] += 1
    for name, total in seconds.most_common(12):
        emit(what="kernel", model=MODEL, mode=mode, name=name[:100], us_per_step=round(total / NUM_STEPS, 2),
             per_step=round(counts[name] / NUM_STEPS, 2))


def run(settings: Settings, *share):
    for mode in MODES:
        if settings.left_s < 8:
            emit(what="step", mode=mode, skipped="out of time")
            continue
        with recorded("timeline", False, mode=mode): run_mode(mode, settings)
