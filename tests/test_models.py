"""Tiny random models of every family: the logits of transformers, however the batch is cut."""
import inspect
import json
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_parallel import Ranks
from transformers import DynamicCache
from transformers import LlamaConfig
from transformers import LlamaForCausalLM
from transformers import MistralConfig
from transformers import MistralForCausalLM
from transformers import Qwen2Config
from transformers import Qwen2ForCausalLM
from transformers import Qwen3Config
from transformers import Qwen3ForCausalLM

from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.metadata import AttentionMetadata
from minengine.attention.metadata import set_forward_context
from minengine.config import ModelConfig
from minengine.model.decoder import FAMILIES
from minengine.model.decoder import DecoderForCausalLM
from minengine.model.decoder import get_family
from minengine.model.decoder import get_model_class
from minengine.model.decoder import hidden_of_rows
from minengine.model.decoder import sliding_windows
from minengine.model.layers import get_rope
from minengine.model.layers import rope_parameters
from minengine.parallel import can_pack
from minengine.parallel import tensor_parallel_group

VOCAB, BLOCK_SIZE, MAX_LEN, NUM_TOKENS = 97, 4, 64, 40
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_LEN,
             initializer_range=0.15)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "smollm2": (LlamaForCausalLM, LlamaConfig, dict(
        tie_word_embeddings=True, hidden_size=36, num_attention_heads=9, num_key_value_heads=3)),
    "llama, all biases": (LlamaForCausalLM, LlamaConfig, dict(
        attention_bias=True, mlp_bias=True, head_dim=12)),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=9)),
    "mistral, no window": (MistralForCausalLM, MistralConfig, dict(sliding_window=None, head_dim=16)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2, window from layer 1": (Qwen2ForCausalLM, Qwen2Config, dict(
        use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=16)),
    "qwen3, windows by layer type": (Qwen3ForCausalLM, Qwen3Config, dict(
        head_dim=16, attention_bias=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
}
ROPES = {
    "default": {},
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=2.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=16),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


def theirs(name="llama", rope="default", seed=0, **changes):
    "A tiny random model of transformers; norms and biases are random, too."
    model_class, config_class, settings = MODELS[name]
    config = config_class(**SHAPE | settings | changes, rope_parameters=dict(
        rope_type=rope, rope_theta=100.0, **ROPES[rope]))
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for key, p in model.named_parameters():
        if p.dim() == 1: p.normal_(1.0 if "norm" in key else 0.0, 0.3)
    return model


def ours(model, pack=False, dtype="float32", max_len=None) -> DecoderForCausalLM:
    "The same weights in a decoder of this project."
    config = ModelConfig("tiny", model.config, dtype=dtype)
    if max_len: config.max_model_len = max_len
    decoder = get_model_class(model.config)(config).eval()
    decoder.load_weights(model.state_dict().items())
    decoder.process_weights_after_loading(pack)
    return decoder


def caches(decoder, num_blocks=64):
    "An empty pool for each layer."
    attention = [layer.self_attn.attn for layer in decoder.model.layers]
    dtype = decoder.model.norm.weight.dtype
    return [make_kv_cache(num_blocks, BLOCK_SIZE, a.num_kv_heads, a.head_dim, dtype) for a in attention]


def run(decoder, prompts, steps, backend="reference"):
    "Logits of every token of `prompts`, computed `steps[i][j]` tokens of prompt j in step i."
    kv_caches, done = caches(decoder), [0] * len(prompts)
    tables = [list(range(j, 60, len(prompts))) for j in range(len(prompts))]   # interleaved blocks
    hidden = [[] for _ in prompts]
    for step in steps:
        rows = [(j, n) for j, n in enumerate(step) if n]
        ids = torch.cat([prompts[j][done[j]:done[j] + n] for j, n in rows])
        positions = torch.cat([torch.arange(done[j], done[j] + n) for j, n in rows])
        metadata = AttentionMetadata.from_lists([n for _, n in rows], [done[j] + n for j, n in rows],
                                                [tables[j] for j, _ in rows], BLOCK_SIZE)
        with set_forward_context(metadata, kv_caches, backend): out = decoder(ids, positions)
        for (j, n), part in zip(rows, out.split([n for _, n in rows])):
            hidden[j].append(part)
            done[j] += n
    return [decoder.compute_logits(torch.cat(parts)) for parts in hidden]


def prompts(*lengths, seed=1):
    torch.manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,)) for n in lengths]


def close(got, wanted, atol=1e-4): torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, rope):
    "In one piece and packed; then two prompts in chunks and single tokens, side by side."
    reference = theirs(name, rope)
    batch = prompts(NUM_TOKENS, 23)
    wanted = [reference(ids[None]).logits[0] for ids in batch]
    assert wanted[0].std() > 0.1   # logits that say something
    decoder = ours(reference, pack=False)
    one_piece = run(decoder, batch[:1], [[NUM_TOKENS]])
    close(one_piece[0], wanted[0])
    decoder.process_weights_after_loading(pack=True)
    steps = [[7, 0], [9, 18], [15, 1], [1, 1]] + [[1, 1]] * 3 + [[5, 0]]
    for backend in ("reference", "cpu"):
        for got, logits in zip(run(decoder, batch, steps, backend), wanted): close(got, logits)


def test_every_family_of_the_table_is_tested():
    assert {MODELS[name][0].__name__ for name in MODELS} == set(FAMILIES)


@pytest.mark.skipif(not can_pack(torch.empty(4, 4)), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("name", ["smollm2", "llama, all biases", "qwen3"])
def test_packed_or_not_the_hidden_state_is_the_same(name):
    reference = theirs(name)
    decoder, ids = ours(reference), prompts(NUM_TOKENS)[0]
    metadata = AttentionMetadata.from_lists([NUM_TOKENS], [NUM_TOKENS], [list(range(10))], BLOCK_SIZE)
    with set_forward_context(metadata, caches(decoder), "reference"):
        plain = decoder(ids, torch.arange(NUM_TOKENS))
    assert not decoder.packed
    decoder.process_weights_after_loading(pack=True)
    assert decoder.packed
    with set_forward_context(metadata, caches(decoder), "reference"):
        packed = decoder(ids, torch.arange(NUM_TOKENS))
    close(packed, plain, atol=1e-5)
    with pytest.raises(ValueError, match="load before packing"): decoder.load_weights([])


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_fewer_rows_are_the_same_rows_and_all_keys_are_kept(name, backend, pack):
    "The last layer leaves rows out: what comes out, and what later steps find, must not change."
    decoder, ids, n = ours(theirs(name), pack=pack), prompts(NUM_TOKENS)[0], NUM_TOKENS
    metadata = AttentionMetadata.from_lists([n - 5, 5], [n - 5, 5], [list(range(10)), [11, 12, 13]], BLOCK_SIZE)
    positions = torch.cat([torch.arange(n - 5), torch.arange(5)])
    pools = caches(decoder), caches(decoder)
    with set_forward_context(metadata, pools[0], backend): whole = decoder(ids, positions)
    for rows in ([n - 6, n - 1], [0], list(range(n))):
        rows = torch.tensor(rows)
        with set_forward_context(metadata, pools[1], backend): some = decoder(ids, positions, rows=rows)
        close(some, whole[rows], atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(*pools))


def test_who_cannot_leave_rows_out_is_asked_for_all():
    decoder, rows, calls = ours(theirs()), torch.tensor([2, 5]), []
    class Recorded:                              # like a compiled model: two arguments, all rows
        def __call__(self, ids, positions):
            calls.append(len(ids))
            return decoder(ids, positions)
    inputs = prompts(8)[0], torch.arange(8)
    with set_forward_context(None, [], "cpu"):
        wanted = decoder(*inputs)[rows]
        close(hidden_of_rows(Recorded(), inputs, rows), wanted, atol=1e-6)
        close(hidden_of_rows(decoder, inputs, rows), wanted, atol=1e-6)
        assert calls == [8] and len(hidden_of_rows(decoder, inputs, None)) == 8


def test_embeddings_may_be_given_instead_of_ids():
    decoder, ids = ours(theirs()), prompts(8)[0]
    metadata = AttentionMetadata.from_lists([8], [8], [[0, 1]], BLOCK_SIZE)
    embeds = decoder.model.embed_tokens(ids)
    before = embeds.clone()
    with set_forward_context(metadata, caches(decoder), "reference"):
        wanted = decoder(ids, torch.arange(8))
        got = decoder(None, torch.arange(8), inputs_embeds=embeds)
    assert torch.equal(got, wanted) and torch.equal(embeds, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3"])
def test_vllm_9729_half_precision(name, dtype):
    "vllm#9729: casts in the order of transformers; logits within two percent of their spread."
    reference = theirs(name).to(getattr(torch, dtype))
    reference.config.dtype = dtype
    ids = prompts(24)[0]
    wanted = reference(ids[None]).logits[0].float()
    got = run(ours(reference, dtype=dtype), [ids], [[24]])[0]
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() < 0.02 * (wanted.max() - wanted.min())


# Dynamic rope

def test_dynamic_rope_decodes_like_transformers_past_the_trained_length():
    "One token at a time, transformers and this project turn each position the same way."
    reference = theirs("llama", "dynamic", max_position_embeddings=16)
    ids, cache, wanted = prompts(NUM_TOKENS)[0], DynamicCache(), []
    # The argument's name changed within transformers 5.
    new_name = "cache" in inspect.signature(reference.forward).parameters
    kept = {"cache" if new_name else "past_key_values": cache}
    for start, end in [(0, 12)] + [(i, i + 1) for i in range(12, NUM_TOKENS)]:
        wanted.append(reference(ids[None, start:end], use_cache=True, **kept).logits[0])
    decoder = ours(reference, max_len=64)
    for steps in ([[12]] + [[1]] * 28, [[NUM_TOKENS]], [[30], [10]]):
        close(run(decoder, [ids], steps)[0], torch.cat(wanted))


# Sliding windows

def test_vllm_49795_the_layer_type_decides_not_the_field():
    "vllm#49795: a window in the config, full attention in every layer."
    full = ["full_attention"] * 3
    config = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=4, layer_types=full)
    assert sliding_windows(config) == [None] * 3
    reference = theirs("qwen3", use_sliding_window=True, sliding_window=4, layer_types=full)
    ids = prompts(NUM_TOKENS)[0]
    close(run(ours(reference), [ids], [[NUM_TOKENS]])[0], reference(ids[None]).logits[0])


@pytest.mark.parametrize("fields, wanted", [
    (dict(model_type="llama", sliding_window=8), [None, None, None]),
    (dict(model_type="mistral", sliding_window=8), [8, 8, 8]),
    (dict(model_type="mistral", sliding_window=None), [None, None, None]),
    (dict(model_type="mistral", sliding_window=8, layer_types=[
        "full_attention", "sliding_attention", "full_attention"]), [None, 8, None]),
    (dict(model_type="qwen2", sliding_window=8, use_sliding_window=False), [None, None, None]),
    (dict(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2), [None, None, 8]),
    (dict(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3), [None, None, None]),
])
def test_sliding_windows(fields, wanted):
    assert sliding_windows(SimpleNamespace(num_hidden_layers=3, **fields)) == wanted


def test_the_window_is_felt():
    with_window, without = theirs("mistral"), theirs("mistral", sliding_window=None)
    ids = prompts(NUM_TOKENS)[0]
    a, b = (run(ours(model), [ids], [[NUM_TOKENS]])[0] for model in (with_window, without))
    assert torch.allclose(a[:9], b[:9], atol=1e-3) and not torch.allclose(a[20:], b[20:], atol=1e-2)


def test_unknown_layer_types_are_refused():
    config = SimpleNamespace(num_hidden_layers=2, model_type="qwen3", sliding_window=4,
                             layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="linear_attention"): sliding_windows(config)


# Which model

def test_unknown_architectures_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown architecture GPT2LMHeadModel") as error:
        get_model_class(SimpleNamespace(architectures=["GPT2LMHeadModel"], model_type="llama"))
    assert all(name in str(error.value) for name in FAMILIES)
    with pytest.raises(ValueError, match="model_type 'gpt2'"):
        get_model_class(SimpleNamespace(model_type="gpt2"))


def test_the_architecture_wins_over_the_model_type():
    config = SimpleNamespace(architectures=["Qwen2ForCausalLM"], model_type="llama")
    assert get_family(config) is FAMILIES["Qwen2ForCausalLM"]
    assert get_family(SimpleNamespace(model_type="qwen3")) is FAMILIES["Qwen3ForCausalLM"]


def test_what_would_be_computed_wrongly_is_refused():
    config = ModelConfig("tiny", LlamaConfig(**SHAPE, hidden_act="gelu"))
    with pytest.raises(ValueError, match="hidden_act must be 'silu', got 'gelu'"): DecoderForCausalLM(config)
    config = ModelConfig("tiny", LlamaConfig(**SHAPE | dict(num_key_value_heads=3)))
    with pytest.raises(ValueError, match="4 does not divide by 3"): DecoderForCausalLM(config)
    config = ModelConfig("tiny", LlamaConfig(**SHAPE))
    with tensor_parallel_group(0, 3), pytest.raises(ValueError, match="allowed sizes: 1, 2, 4"):
        DecoderForCausalLM(config)


@pytest.mark.parametrize("name, biases, tied, windows", [
    ("llama", (False, False, False), False, {None}), ("mistral", (False, False, False), False, {8}),
    ("qwen2", (True, False, False), True, {None}), ("qwen3", (False, False, False), True, {None})])
def test_raw_config_files(tmp_path, name, biases, tied, windows):
    "Files as hubs have them, before transformers 5 moved the rope settings."
    from transformers import AutoConfig
    raw = SHAPE | dict(model_type=name, architectures=[MODELS[name][0].__name__], rope_theta=500.0,
                       tie_word_embeddings=tied, rms_norm_eps=1e-5, torch_dtype="bfloat16")
    if name == "mistral": raw["sliding_window"] = 8
    if name == "llama":
        raw["rope_scaling"] = dict(rope_type="llama3") | ROPES["llama3"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)
    decoder = DecoderForCausalLM(ModelConfig("tiny", config))
    layer = decoder.model.layers[0]
    assert (layer.self_attn.qkv_proj.bias is not None, layer.self_attn.o_proj.bias is not None,
            layer.mlp.down_proj.bias is not None) == biases
    assert decoder.tied == tied and set(sliding_windows(config)) == windows
    assert (layer.self_attn.qk_norm is not None) == (name == "qwen3")


# Weights

def weights_of(model): return {k: v.clone() for k, v in model.state_dict().items()}


def test_missing_unexpected_and_misshapen_weights_are_named():
    model = theirs("qwen2", tie_word_embeddings=False)
    decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
    good, key = weights_of(model), "model.layers.1.self_attn.k_proj.weight"
    def load(weights): return decoder.load_weights(weights.items())
    assert load(good) == set(good)
    with pytest.raises(ValueError, match=f"missing: {key}$"): load({k: v for k, v in good.items() if k != key})
    with pytest.raises(ValueError, match="unexpected: extra.weight$"): load(good | {"extra.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=f"{key}: expected 16 along dimension 0"):
        load(good | {key: torch.zeros(8, 32)})
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \(31,\) does not fit \(32,\)"):
        load(good | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(ValueError, match=f"{key} is in the checkpoint twice"):
        decoder.load_weights(list(good.items()) + [(key, good[key])])
    with pytest.raises(ValueError, match="missing: .* and 34 more"): load({})
    load(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})   # old files


def test_sglang_18024_an_untied_head_stays_its_own():
    "sglang#18024: the head is not overwritten with the embedding."
    model = theirs("llama")
    decoder = ours(model)
    assert torch.equal(decoder.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(decoder.lm_head.weight, decoder.model.embed_tokens.weight)


def test_qwen3_vl_embedding_89_untied_but_no_head_is_stored():
    "QwenLM/Qwen3-VL-Embedding#89: a clear error that says what to do."
    model = theirs("llama")
    weights = {k: v for k, v in weights_of(model).items() if k != "lm_head.weight"}
    decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
    with pytest.raises(ValueError, match="missing: lm_head.weight; .*set tie_word_embeddings to true"):
        decoder.load_weights(weights.items())


@pytest.mark.parametrize("stored", ["table only", "head only", "both, equal", "both, head first"])
def test_a_tied_checkpoint_may_hold_the_table_under_either_name(stored):
    model, ids = theirs("smollm2"), prompts(8)[0]
    weights = weights_of(model)
    table = weights.pop("model.embed_tokens.weight")
    weights.pop("lm_head.weight", None)
    if stored == "both, head first": weights = {"lm_head.weight": table} | weights
    elif stored != "table only": weights["lm_head.weight"] = table
    if stored != "head only": weights["model.embed_tokens.weight"] = table
    decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.load_weights(weights.items())
    assert decoder.tied
    close(run(decoder, [ids], [[8]])[0], model(ids[None]).logits[0])


def test_a_tied_config_with_another_head_stored_warns_and_uses_it():
    "As transformers does."
    model = theirs("smollm2")
    weights = weights_of(model) | {"lm_head.weight": torch.randn(VOCAB, 36)}
    decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
    with pytest.warns(UserWarning, match="untied"): decoder.load_weights(weights.items())
    assert not decoder.tied and torch.equal(decoder.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(decoder.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("change", [
    lambda name: "language_model." + name,
    lambda name: name.replace("model.", "model.language_model.", 1)])
def test_vllm_32673_prefixes_of_larger_models(change):
    "vllm#32673: names under `language_model.` find their place; other prefixes are reported."
    model = theirs("llama")
    decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
    good = weights_of(model)
    assert decoder.load_weights((change(k), v) for k, v in good.items()) == set(good)
    with pytest.raises(ValueError, match="unexpected: thinker.model.embed_tokens.weight"):
        decoder.load_weights(("thinker." + k, v) for k, v in good.items())


def test_a_base_model_saved_without_its_head():
    model = theirs("smollm2")
    decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
    decoder.load_weights(model.model.state_dict().items())
    ids = prompts(8)[0]
    close(run(decoder, [ids], [[8]])[0], model(ids[None]).logits[0])


# Tensor parallel, simulated with threads

@pytest.mark.parametrize("name, size", [
    ("llama", 2), ("llama", 4), ("llama, all biases", 2), ("smollm2", 3), ("qwen2", 2), ("qwen3", 4)])
def test_ranks_together_give_the_logits_of_one(name, size):
    "Each rank holds its part and a cache of its heads; size 4 shares 2 key/value heads."
    model, ids = theirs(name), prompts(NUM_TOKENS)[0]
    ranks = Ranks(size)
    def make():
        decoder = DecoderForCausalLM(ModelConfig("tiny", model.config))
        decoder.load_weights(model.state_dict().items())
        return decoder
    decoders = [ranks.build(rank, make) for rank in range(size)]
    def work(rank):
        with torch.no_grad(): return run(decoders[rank], [ids], [[25], [15]])[0]
    for logits in ranks.run(work): close(logits, model(ids[None]).logits[0])
    assert threading.active_count() < 50


# One graph

@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", ["smollm2", "qwen3, windows by layer type"])
def test_the_whole_model_is_one_graph_with_opaque_attention(name, pack):
    "No data decides a Python branch: it traces once, and holds for other batches."
    decoder, graphs = ours(theirs(name), pack), []
    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward
    compiled = torch.compile(decoder, backend=keep, fullgraph=True, dynamic=True)
    for n in (24, 5, 17):
        ids = prompts(n)[0]
        metadata = AttentionMetadata.from_lists([n], [n], [list(range(8))], BLOCK_SIZE)
        with set_forward_context(metadata, caches(decoder), "reference"):
            wanted = decoder(ids, torch.arange(n))
            close(compiled(ids, torch.arange(n)), wanted, atol=1e-5)
    assert len(graphs) == 1
    calls = [node for node in graphs[0].graph.nodes if "minengine.attention" in str(node.target)]
    assert len(calls) == 3


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "configs").glob("*.json")),
                         ids=lambda path: path.stem)
def test_configs_of_real_models(path):
    "Every family, as its files are: one layer of it can be built, with the right rope."
    from transformers import AutoConfig
    raw = json.loads(path.read_text())
    config = AutoConfig.for_model(**raw | dict(num_hidden_layers=1))
    assert get_family(config) is FAMILIES[raw["architectures"][0]]
    assert sliding_windows(config) == [None]
    model_config = ModelConfig(path.stem, config, max_model_len=64)
    with torch.device("meta"): decoder = DecoderForCausalLM(model_config)
    assert decoder.tied == raw["tie_word_embeddings"]
    kind = (raw.get("rope_scaling") or {}).get("rope_type", "default")
    assert rope_parameters(config)["rope_type"] == rope_parameters(SimpleNamespace(**raw))["rope_type"] == kind
    assert rope_parameters(config)["rope_theta"] == raw["rope_theta"]
    assert torch.equal(get_rope(config, 64).table, get_rope(SimpleNamespace(**raw), 64).table)
