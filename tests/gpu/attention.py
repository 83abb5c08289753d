"Attention's speed: the paged kernels beside PyTorch's own attention on dense tensors."
import random
import time

from common import Settings, emit, log, recorded, synchronize
from timing import copy_bandwidth, time_calls

# (query heads, KV heads, head_dim)
MODELS = {"llama-3.1-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}
# (sequences, query rows of each, tokens of each)
STEPS = [(1, 1, 1024), (8, 1, 1024), (64, 1, 1024), (256, 1, 1024), (1, 1, 16384), (8, 1, 8192),
         (1, 2048, 2048), (4, 1024, 1024), (1, 8192, 8192), (4, 512, 4096)]
DRY_STEPS = [(2, 1, 40), (1, 20, 20)]
BLOCK_SIZE, CACHE_BYTES = 16, 256 << 20   # enough that no cache of the GPU holds it


def make_inputs(model: str, step: tuple, device: str, dtype):
    "Paged caches and dense tensors, of random numbers; several layers."
    import torch
    from minengine.attention.metadata import AttentionMetadata
    heads, kv_heads, dim = MODELS[model] if device == "cuda" else (4, 2, 64)
    n, rows, tokens = step
    per_seq = -(-tokens // BLOCK_SIZE)
    kv_bytes = 2 * n * per_seq * BLOCK_SIZE * kv_heads * dim * dtype.itemsize
    layers = min(32, max(1, CACHE_BYTES // kv_bytes)) if device == "cuda" else 1
    ids = list(range(n * per_seq))
    random.Random(0).shuffle(ids)
    tables = [ids[i * per_seq:(i + 1) * per_seq] for i in range(n)]
    metadata = AttentionMetadata.from_lists([rows] * n, [tokens] * n, tables, BLOCK_SIZE, device)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)
    caches = [make(2, n * per_seq, BLOCK_SIZE, kv_heads, dim) for _ in range(layers)]
    dense = [(make(n, kv_heads, tokens, dim), make(n, kv_heads, tokens, dim)) for _ in range(layers)]
    return make(n * rows, heads, dim), caches, dense, metadata, kv_bytes


def sdpa_inputs(query, metadata, step):
    "The query as PyTorch takes it, and how to mask."
    import torch
    n, rows, tokens = step
    query = query.view(n, rows, *query.shape[1:]).transpose(1, 2).contiguous()
    if rows == 1: return query, dict()
    if rows == tokens: return query, dict(is_causal=True)
    behind = torch.arange(tokens, device=query.device)[None, :]
    ahead = torch.arange(tokens - rows, tokens, device=query.device)[:, None]
    return query, dict(attn_mask=behind <= ahead)


def time_step(model: str, step: tuple, settings: Settings, bandwidth: float):
    import torch
    import torch.nn.functional as F
    from minengine.attention.triton import triton_attention
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    query, caches, dense, metadata, kv_bytes = make_inputs(model, step, settings.device, dtype)
    scale, out = query.shape[2] ** -0.5, torch.empty_like(query)
    q, mask = sdpa_inputs(query, metadata, step)

    def ours():
        for cache in caches: triton_attention(query, cache, metadata, scale, None, out)

    def theirs():
        for k, v in dense: F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **mask)

    repeats = 1 if settings.dry else 10
    row = dict(what="attention", model=model, num_seqs=step[0], query_len=step[1], seq_len=step[2], layers=len(caches))
    times = {}
    for name, call in (("ours", ours), ("sdpa", theirs)):
        graph_s, eager_s = time_calls(call, settings.device, repeats)
        times[name] = graph_s / len(caches)
        row |= {f"{name}_us": round(times[name] * 1e6, 2), f"{name}_launched_us": round(eager_s / len(caches) * 1e6, 2)}
    row["ratio"] = round(times["sdpa"] / times["ours"], 3)   # above 1: ours is faster
    row["share_of_copy_bandwidth"] = round(kv_bytes / times["ours"] / bandwidth, 3)
    emit(**row)


def run(settings: Settings, *share):
    bandwidth = copy_bandwidth(settings.device)
    emit(what="copy bandwidth", bytes_per_s=bandwidth)
    for step in DRY_STEPS if settings.dry else STEPS:
        for model in list(MODELS)[:1 if settings.dry else None]:
            if settings.left_s < 4:
                emit(what="attention", model=model, num_seqs=step[0], query_len=step[1], seq_len=step[2],
                     skipped="out of time")
                continue
            started = time.monotonic()
            with recorded("attention", False, model=model, step=step): time_step(model, step, settings, bandwidth)
            synchronize(settings.device)
            log(model, step, f"{time.monotonic() - started:.1f} s")
