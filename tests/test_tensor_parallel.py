"""Ranks in processes of their own give what one rank gives.

The rule: tokens are equal, greedy ones and those drawn with a seed; log-probabilities are within 1e-4. More
cannot be had: a sum over ranks adds the same float32 numbers in another order. All ranks of a size are started
once, and lent to every engine of this module.
"""
import math
import random

import pytest
import torch
from test_equality import FAMILIES, default_model, expected, chat_prompts, tiny_config
from tp_tiny import answers, lender_class
from transformers import AutoModelForCausalLM

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.model.checkpoint import create_engine_config
from minengine.model.memory import model_bytes
from minengine.sampling_params import SamplingParams
from minengine.v1.multiproc_executor import MultiprocExecutor

SIZES = {"smollm2": [3]}   # heads of the tiny one: 3; of the others: 4, with 2 key/value heads


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "A tiny model of each family, with weights in files."
    made = {}
    def folder(family):
        if family not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
            for name, p in model.named_parameters():
                if p.dim() == 1: p.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
            made[family] = str(tmp_path_factory.mktemp(family))
            model.save_pretrained(made[family])
        return made[family]
    return folder


@pytest.fixture(scope="module")
def lenders(folders):
    "The ranks of each size, started when they are first asked for."
    made = {}
    def lend(size):
        if size not in made: made[size] = MultiprocExecutor(create_engine_config(EngineArgs(
            model=folders("smollm2" if size == 3 else "llama"), skip_tokenizer_init=True, use_tqdm_on_load=False,
            tensor_parallel_size=size, dtype="float32")))
        return made[size]
    yield lend
    for lender in made.values(): lender.shutdown()


def requests():
    "Prompts that share beginnings, and one of everything that can be asked for."
    rng = random.Random(1)
    start = [rng.randrange(3, 160) for _ in range(20)]
    prompts = [start[:n] + [rng.randrange(3, 160) for _ in range(m)] for n, m in
               ((20, 5), (20, 12), (0, 1), (16, 0), (16, 0), (8, 40), (0, 33), (20, 30))]
    def params(**kw): return SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **kw)
    return prompts, [
        params(temperature=0, logprobs=5), params(temperature=0, prompt_logprobs=3),
        params(temperature=1, seed=5, logprobs=2), params(temperature=0),
        params(temperature=0.8, seed=6, top_p=0.9, top_k=30), params(temperature=0, repetition_penalty=1.3),
        params(temperature=1, seed=7, n=2, logprobs=1), params(temperature=0.7, seed=8, min_p=0.05, presence_penalty=0.4)]


def flat(rows): return [(token, entry.rank, entry.logprob) for row in rows or [] for token, entry in (row or {}).items()]


def check_equal(got, wanted):
    "Tokens and why they ended are equal, log-probabilities nearly."
    for ours, theirs in zip(got, wanted, strict=True):
        assert len(ours.outputs) == len(theirs.outputs)
        pairs = [(flat(ours.prompt_logprobs), flat(theirs.prompt_logprobs))]
        for a, b in zip(ours.outputs, theirs.outputs):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            pairs.append((flat(a.logprobs), flat(b.logprobs)))
        for a, b in pairs:
            assert [x[:2] for x in a] == [x[:2] for x in b]
            for (*_, p), (*_, q) in zip(a, b): assert math.isclose(p, q, abs_tol=1e-4), (p, q)


WAYS = {
    "wide": dict(num_gpu_blocks_override=512, enable_prefix_caching=False),
    # Prompts are cut, beginnings found in the cache, and three requests of ten fit at a time.
    "narrow": dict(num_gpu_blocks_override=280 // 8, block_size=8, max_num_batched_tokens=16),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family, size", [(f, n) for f in FAMILIES for n in SIZES.get(f, [2, 4])])
def test_ranks_equal_one(folders, lenders, family, size, way):
    prompts, params = requests()
    if way == "narrow":   # the release refuses scores of a prompt that may be cached
        params[1] = params[0]
    common = dict(max_model_len=112, max_num_seqs=8, num_preallocate_tokens=0) | WAYS[way]
    wanted, _ = answers(folders(family), prompts, params, **common)
    got, preempted = answers(folders(family), prompts, params, lender_class(lenders(size)),
                             tensor_parallel_size=size, **common)
    check_equal(got, wanted)
    if way == "narrow": assert preempted > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_the_same_on_every_rank(folders, lenders, method):
    "Each rank proposes and verifies for itself: one that guessed otherwise would compute other tokens."
    prompts, params = requests()
    params[1] = params[0]   # no scores of prompts
    spec = dict(method=method, num_speculative_tokens=3)
    if method == "draft_model": spec["model"] = folders("qwen2")
    common = dict(max_model_len=112, max_num_seqs=8, num_gpu_blocks_override=256, block_size=8, speculative_config=spec)
    wanted, _ = answers(folders("llama"), prompts, params, **common)
    got, _ = answers(folders("llama"), prompts, params, lender_class(lenders(2)), tensor_parallel_size=2, **common)
    check_equal(got, wanted)


@pytest.mark.parametrize("family", ["llava", "idefics3", "qwen2_5_vl"])
def test_ranks_see_the_same_images(tmp_path, lenders, family):
    "The model of words is cut, the encoder of images is whole on every rank."
    import mm_tiny
    import mm_tiny_qwen
    make = dict(llava=mm_tiny.make_tiny_llava, idefics3=mm_tiny.make_tiny_idefics3,
                qwen2_5_vl=mm_tiny_qwen.make_tiny_qwen2_5_vl)[family]
    folder = make(tmp_path / family)
    image = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}.get(family, "<image>")
    prompts = [{"prompt": f"{image} a b c", "multi_modal_data": {"image": mm_tiny.make_image(seed=i)}} for i in range(2)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    found = []
    for size in 1, 2:
        llm = LLM(folder, use_tqdm_on_load=False, dtype="float32", num_gpu_blocks_override=256, tensor_parallel_size=size,
                  distributed_executor_backend=lender_class(lenders(2)) if size > 1 else None)
        found.append(llm.generate(prompts, params, use_tqdm=False))
        llm.shutdown()
    check_equal(*reversed(found))


def shapes(worker):
    "Of every weight, and of a layer's cache."
    weights = {name: tuple(w.shape) for name, w in worker.model.state_dict().items()}
    return weights, tuple(worker.model_runner.kv_caches[0].shape), model_bytes(worker.model)


def test_each_rank_holds_its_part(folders, lenders):
    "Weights, cache and blocks: half of each on two ranks; with four, key/value heads are copies."
    common = dict(max_model_len=112, pack_cpu_weights=False, num_gpu_blocks_override=32)
    def held(size, executor=None):
        llm = LLM(folders("llama"), skip_tokenizer_init=True, use_tqdm_on_load=False, tensor_parallel_size=size,
                  distributed_executor_backend=executor, **common)
        return llm.llm_engine.engine_core.engine_core.executor.collective_rpc(shapes)
    (whole, cache, num_bytes), = held(1)
    for size, kv_heads in (2, 1), (4, 1):
        for weights, own_cache, own_bytes in held(size, lender_class(lenders(size))):
            assert own_cache == (*cache[:3], kv_heads, cache[4])
            for name, shape in weights.items():
                if "norm" in name: assert shape == whole[name]
                elif "qkv" not in name: assert math.prod(shape) * size == math.prod(whole[name]), name
            assert own_bytes < num_bytes / size * 1.3


def test_the_smallest_rank_decides(lenders, folders, monkeypatch):
    "Every rank says what it has; all get the same number of blocks."
    lender = lenders(2)
    answers(folders("llama"), [[5, 6]], [SamplingParams(max_tokens=1, detokenize=False)], lender_class(lender),
            tensor_parallel_size=2, max_model_len=112)
    real = lender.collective_rpc
    def unequal(method, *args, **kwargs):
        if method == "determine_available_memory": return [1 << 20, 1 << 19]
        return real(method, *args, **kwargs)
    monkeypatch.setattr(lender, "collective_rpc", unequal)
    a, b = real("get_kv_cache_block_bytes")
    assert a == b
    assert lender.determine_num_available_blocks() == (1 << 19) // a


@pytest.mark.parametrize("field, size, allowed", [("vllm#2652", 8, "1, 2, 4"), ("vllm#5003", 3, "1, 2, 4")])
def test_field_heads_that_do_not_divide_are_refused_at_once(folders, field, size, allowed):
    "Before a process is started, with the sizes that would do."
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} does not fit 4 query heads and 2 "
                                         f"key/value heads and an MLP of 96; allowed sizes: {allowed}$"):
        create_engine_config(EngineArgs(model=folders("llama"), tensor_parallel_size=size))


@pytest.mark.slow
def test_smollm2_on_three_ranks_equals_transformers(lenders):
    "The real model, its nine heads on three ranks, in two ways."
    prompts = chat_prompts()
    longest = max(map(len, prompts)) + 48
    params = [SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)] * len(prompts)
    for way in dict(num_gpu_blocks_override=512), dict(num_gpu_blocks_override=longest * 5 // 2 // 16,
                                                       max_num_batched_tokens=64):
        got, _ = answers(default_model()[0], prompts, params, lender_class(lenders(3)), tensor_parallel_size=3,
                         max_model_len=longest, max_num_seqs=8, num_preallocate_tokens=0, **way)
        assert [o.outputs[0].token_ids for o in got] == expected()
