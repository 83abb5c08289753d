"""Bad input hurts only its sender: a `ValueError` with the numbers, at once,
and the engine answers the next request.
"""
import json
import math
import time

import pytest
import torch
from front_tiny import ARGS, CONFIG, make_folder
from transformers import LlamaConfig, LlamaForCausalLM
from v0_front import assert_at_rest

from minengine.llm import LLM
from minengine.sampling_params import SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", params=["v1", "v0"])
def llm(request, tmp_path_factory):
    return LLM(make_folder(tmp_path_factory.mktemp("tiny")), request.param, **ARGS | {"num_gpu_blocks_override": 32})


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    "A folder with real weights of the tiny model."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")})).save_pretrained(folder)
    return folder


def refused(llm, message, prompt="hello", params=SHORT):
    "The call is refused; a request that runs meanwhile and the next one are not harmed."
    want = llm.generate("other", LONG, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("other", LONG)
    next(stream)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, params() if callable(params) else params, use_tqdm=False)
    assert list(stream)[-1].outputs[0].token_ids == want
    assert len(llm.generate("next", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 3
    if llm.engine_name == "v0": return assert_at_rest(llm.llm_engine)
    core = llm.llm_engine.engine_core.engine_core
    core.check_invariants()
    assert core.scheduler.kv_cache_manager.num_free_blocks == 32 and not core.scheduler.requests


def test_prompt_longer_than_the_model(llm):
    if llm.engine_name == "v0":   # no error: an answer without tokens, with the reason
        long, other = llm.generate(["x" * 257, "hello"], SHORT, use_tqdm=False)
        assert (long.outputs[0].token_ids, long.outputs[0].finish_reason) == ([], "length")
        assert long.outputs[0].stop_reason == "257 tokens, a prompt has at most 256" and len(other.outputs[0].token_ids) == 3
        return
    refused(llm, "prompt has 300 tokens, but max_model_len is 256", "x" * 300)
    refused(llm, "prompt has 256 tokens, but max_model_len is 256", "x" * 256)


def test_prompt_longer_than_the_pool(tmp_path):
    # No limit was given, so it is what the pool holds: one number, everywhere.
    small = LLM(make_folder(tmp_path / "tiny"), **ARGS | {"num_gpu_blocks_override": 4})
    with pytest.raises(ValueError, match="prompt has 64 tokens, but max_model_len is 64"): small.generate("x" * 64, SHORT)
    out, = small.generate("x" * 60, LONG, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 4 and out.outputs[0].finish_reason == "length"


def test_empty_prompt(llm):
    for prompt in ("", [[]], {"prompt_token_ids": []}): refused(llm, "prompt is empty", prompt)


@pytest.mark.parametrize("token, message", [
    (264, "is 264, but this model's token ids go from 0 to 263"), (-1, "is -1, but"), (2**40, "go from 0 to 263"),
    (1.5, "must be an integer, got 1.5"), ("a", "must be an integer, got 'a'"), (None, "must be an integer, got None"),
    (math.nan, "must be an integer, got nan"), (True, "must be an integer, got True")])
def test_token_ids(llm, token, message): refused(llm, message, [[1, token]])


@pytest.mark.parametrize("params, message", [
    (dict(temperature=math.nan), "temperature must be a number, got nan"), (dict(temperature=-1), "temperature must be at least 0, got -1"),
    (dict(temperature=math.inf), "temperature must be"), (dict(top_p=0), "top_p must be above 0"), (dict(top_p=1.1), "top_p must be at most 1, got 1.1"),
    (dict(top_k=-2), "top_k must be at least -1, got -2"), (dict(n=0), "n must be at least 1, got 0"), (dict(max_tokens=-1), "max_tokens must be at least 0, got -1"),
    (dict(min_tokens=9, max_tokens=3), "min_tokens must be at most 3, got 9"), (dict(logprobs=21), "logprobs must be at most 20"),
    (dict(prompt_logprobs=21), "prompt_logprobs must be at most 20"), (dict(stop_token_ids=[264]), "stop_token_ids.* 264, .* 0 to 263"),
    (dict(allowed_token_ids=[9999]), "allowed_token_ids.* 9999, .* 0 to 263"), (dict(logit_bias={264: 1}), "logit_bias.* 264, .* 0 to 263"),
    (dict(guided_decoding="x"), "guided_decoding is not supported"), (dict(n=10**9), "n must be at most 1024"),
])
def test_sampling_params(llm, params, message): refused(llm, message, params=lambda: SamplingParams(**params))


def test_sampling_params_of_the_other_engine(llm):
    if llm.engine_name == "v1":
        refused(llm, "best_of is not supported by engine 'v1'", params=SamplingParams(best_of=2))
        refused(llm, "logits_processors is not supported by engine 'v1'", params=SamplingParams(logits_processors=[len]))
    else:
        refused(llm, "cache_salt is not supported by engine 'v0'", {"prompt": "hello", "cache_salt": "x"})
        refused(llm, "n or best_of is 9, but max_num_seqs is 8", params=SamplingParams(best_of=9))
        refused(llm, "logits_processors must be a list of functions", params=SamplingParams(logits_processors=[3]))


def test_a_huge_max_tokens_is_clamped_for_generate_and_chat(llm):
    params = SamplingParams(max_tokens=10**12, ignore_eos=True)
    past = llm.engine_name == "v0"   # one token past the window
    assert len(llm.generate("x" * 250, params, use_tqdm=False)[0].outputs[0].token_ids) == 6 + past
    out, = llm.chat([{"role": "user", "content": "x" * 240}], params, use_tqdm=False)
    assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) == 256 + past


# At start-up, before anything is loaded

@pytest.mark.parametrize("args, message", [
    (dict(max_num_batched_tokens=15), r"max_num_batched_tokens \(15\) must be at least .*block_size \(16\)"),
    (dict(num_gpu_blocks_override=3, max_model_len=64), "holds 48 tokens .* max_model_len=64: set max_model_len to at most 48"),
    (dict(max_model_len=257), "max_model_len must be at most 256, got 257"), (dict(max_model_len=0), "max_model_len must be at least 1, got 0"),
    (dict(block_size=0), "block_size must be at least 1, got 0"), (dict(max_num_seqs=0), "max_num_seqs must be at least 1, got 0"),
    (dict(dtype="int3"), "dtype must be one of"), (dict(engine="v2"), "engine must be one of 'v0', 'v1', got 'v2'"),
    (dict(engine="v0", max_num_batched_tokens=64), r"max_num_batched_tokens \(64\) must be at least max_model_len \(256\)"),
    (dict(engine="v0", num_gpu_blocks_override=3, max_model_len=64), "holds 48 tokens .* max_model_len=64: set max_model_len to at most 48"),
    (dict(engine="v0", max_num_partial_prefills=2), "max_num_partial_prefills=2 needs enable_chunked_prefill"),
    (dict(engine="v0", num_preallocate_tokens=16), "num_preallocate_tokens=16 is for V1"), (dict(enable_chunked_prefill=False), "is for V0"),
    (dict(scheduling_policy="priority"), "scheduling_policy='priority' is for V0"), (dict(num_scheduler_steps=4), "is for V0"),
    (dict(pipeline_parallel_size=2), "pipeline_parallel_size must be at most 1, got 2"),
])
def test_engine_arguments(tmp_path, args, message):
    with pytest.raises(ValueError, match=message): LLM(make_folder(tmp_path / "tiny"), **ARGS | args)


def test_unknown_model_folder(tmp_path):
    start = time.monotonic()
    with pytest.raises(ValueError, match="no/such/model"): LLM("/no/such/model")
    assert time.monotonic() - start < 20
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"): LLM(str(tmp_path / "empty"))


def test_unknown_architecture(tmp_path):
    with pytest.raises(ValueError, match="Mamba"):
        LLM(make_folder(tmp_path / "tiny", architectures=["MambaForCausalLM"]), **ARGS)


def copy_of(weights, folder):
    folder.mkdir()
    for path in weights.iterdir(): (folder / path.name).write_bytes(path.read_bytes())
    return folder


def load(folder): return LLM(str(folder), **ARGS | {"load_format": "auto"})


def test_weights_that_are_fine(weights, tmp_path):
    assert len(load(weights).generate("hello", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_truncated_weights(weights, tmp_path):
    folder = copy_of(weights, tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors"): load(folder)


def test_garbage_for_weights(weights, tmp_path):
    folder = copy_of(weights, tmp_path / "garbage")
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="model.safetensors"): load(folder)


def test_weights_of_another_model(weights, tmp_path):
    folder = copy_of(weights, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ValueError): load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"layers\.2\."): load(folder)


def test_broken_config(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"): LLM(folder, **ARGS)
