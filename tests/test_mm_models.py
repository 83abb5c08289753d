"""Tiny models that see images: the logits of transformers, whatever the images, and nothing loaded by accident."""
import json
import shutil
import subprocess
import sys

import mm_tiny
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parallel import Ranks
from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration

from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.metadata import AttentionMetadata, set_forward_context
from minengine.config import EngineArgs, ModelConfig
from minengine.model import idefics3, llava
from minengine.model.checkpoint import create_engine_config, load_model
from minengine.model.decoder import DecoderForCausalLM, get_model_class
from minengine.model.idefics3 import longest_span, pixel_shuffle
from minengine.model.memory import model_bytes
from minengine.model.vision import ACTIVATIONS, CLIPVisionModel, SiglipVisionModel, cut_into_patches, position_buckets

IMAGES = [mm_tiny.make_image(*size, seed=i) for i, size in enumerate([(40, 40), (90, 30), (20, 70), (48, 24)])]
PROMPTS = {
    "no image": ("What do you see?", []), "one image": ("See <image>, and?", IMAGES[:1]),
    "image first": ("<image>What is it?", IMAGES[1:2]), "image last": ("This is <image>", IMAGES[2:3]),
    "two at once": ("Compare <image><image> now", IMAGES[:2]),
    "four sizes": ("A <image> b <image>\n\nc <image> d<image>?", IMAGES),
    "one twice": ("First <image>, then <image>.", [IMAGES[0], IMAGES[0]]),
}
QWEN2 = dict(model_type="qwen2", rms_norm_eps=1e-6)
CLIP, SIGLIP = mm_tiny.make_tiny_llava, mm_tiny.make_tiny_idefics3
MODELS = {
    "llava": (CLIP, {}),
    "llava, class token kept": (CLIP, dict(vision_feature_select_strategy="full", vision_feature_layer=-1)),
    "llava, several layers": (CLIP, dict(vision_feature_layer=[0, -3, 2], multimodal_projector_bias=False)),
    "llava, tied Qwen2": (CLIP, dict(text_config=QWEN2, tie_word_embeddings=True)),
    "idefics3": (SIGLIP, {}),
    "idefics3, untied": (SIGLIP, dict(tie_word_embeddings=False, text_config=dict(tie_word_embeddings=False))),
    "idefics3, one tile": (SIGLIP, dict(longest_edge=24)),
    "smolvlm": (SIGLIP, dict(architecture="SmolVLM", longest_edge=72, text_config=dict(
        num_attention_heads=3, num_key_value_heads=1, hidden_size=36))),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


class Tiny:
    "A folder, transformers' model of it and this project's."

    def __init__(self, folder, name):
        make, fields = MODELS[name]
        self.folder = make(folder, **fields)
        self.oracle = mm_tiny.Oracle(self.folder)
        self.model = load_model(config_for(self.folder))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A function from a name in `MODELS` to its one `Tiny`."
    made = {}
    def get(name) -> Tiny:
        if name not in made: made[name] = Tiny(tmp_path_factory.mktemp("mm") / "tiny", name)
        return made[name]
    return get


def config_for(folder, **fields):
    return create_engine_config(EngineArgs(model=str(folder), use_tqdm_on_load=False, **fields))


def item_of(oracle, image) -> dict:
    "One image as the front end sends it: alone through transformers' processor."
    found = oracle.processor(text="<image>", images=[image], return_tensors="pt", add_special_tokens=False)
    keys = ("pixel_values", "pixel_attention_mask")
    return {k: found[k][0] for k in keys if k in found} | {"span_token_ids": found["input_ids"][0]}


def spans_in(ids: list[int], items: list[dict]) -> list[int]:
    "Where each item's span starts."
    starts, at = [], 0
    for item in items:
        span = item["span_token_ids"].tolist()
        at = next(i for i in range(at, len(ids)) if ids[i:i + len(span)] == span)
        starts.append(at)
        at += len(span)
    return starts


def embed(model, ids: torch.Tensor, items: list[dict]) -> torch.Tensor:
    "The embeddings of a prompt, its images merged by position."
    embeds = model.get_input_embeddings(ids)
    for item, rows, start in zip(items, model.get_multimodal_embeddings(items), spans_in(ids.tolist(), items)):
        assert len(rows) == len(item["span_token_ids"]) == model.num_image_tokens(model.config, item)
        embeds[start:start + len(rows)] = rows
    return embeds


def logits_of(model, embeds, backend="reference", chunks=None) -> torch.Tensor:
    config, n = model.config, len(embeds)
    caches = [make_kv_cache(40, 16, layer.self_attn.attn.num_kv_heads, config.head_dim, embeds.dtype)
              for layer in model.language_model.model.layers]
    done, hidden = 0, []
    for size in chunks or [n]:
        size = min(size, n - done)
        if not size: continue
        metadata = AttentionMetadata.from_lists([size], [done + size], [list(range(39, -1, -1))], 16)
        with set_forward_context(metadata, caches, backend):
            hidden.append(model(None, torch.arange(done, done + size), inputs_embeds=embeds[done:done + size]))
        done += size
    return model.compute_logits(torch.cat(hidden))


def close(got, wanted, atol=1e-4): torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-5)


# The promise

@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tiny, name, prompt):
    "In one piece with the obvious attention; in chunks, across images, with the fast one; with packed weights."
    tiny, (text, images) = tiny(name), PROMPTS[prompt]
    wanted = tiny.oracle.logits(text, images)
    assert wanted.std() > 0.1   # logits that say something
    ids = tiny.oracle.inputs(text, images)["input_ids"][0]
    embeds = embed(tiny.model, ids, [item_of(tiny.oracle, image) for image in images])
    close(logits_of(tiny.model, embeds), wanted)
    close(logits_of(tiny.model, embeds, "cpu", [7, 16, 1, 30, 300]), wanted)


def test_the_prompts_are_what_they_should_be(tiny):
    "Images matter, their order and size, too; the several sizes are several shapes."
    for name in ("llava", "idefics3"):
        oracle = tiny(name).oracle
        last = lambda *images: oracle.logits("a <image> b <image>", images)[-1]
        a, b, c = last(IMAGES[0], IMAGES[1]), last(IMAGES[1], IMAGES[0]), last(IMAGES[0], IMAGES[2])
        assert min((a - b).abs().max(), (a - c).abs().max()) > 0.01
    lengths = {len(item_of(tiny("smolvlm").oracle, image)["span_token_ids"]) for image in IMAGES}
    assert len(lengths) >= 3


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_unpacked_weights_compute_the_same(tiny, name):
    tiny, (text, images) = tiny(name), PROMPTS["four sizes"]
    plain = load_model(config_for(tiny.folder, pack_cpu_weights=False))
    assert not plain.packed and tiny.model.packed
    items = [item_of(tiny.oracle, image) for image in images]
    ids = tiny.oracle.inputs(text, images)["input_ids"][0]
    close(logits_of(plain, embed(plain, ids, items)), tiny.oracle.logits(text, images))
    matrices = [m for m in tiny.model.modules() if hasattr(m, "packed_weight")]
    assert all(m.packed for m in matrices) and len(matrices) > 15
    with pytest.raises(ValueError, match="load before packing"): tiny.model.load_weights([])


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("name", ["llava", "smolvlm"])
def test_half_precision(tiny, name, dtype):
    tiny, (text, images) = tiny(name), PROMPTS["two at once"]
    half = load_model(config_for(tiny.folder, dtype=dtype))
    ids = tiny.oracle.inputs(text, images)["input_ids"][0]
    embeds = embed(half, ids, [item_of(tiny.oracle, image) for image in images])
    assert embeds.dtype == getattr(torch, dtype)
    wanted = tiny.oracle.logits(text, images)
    assert (logits_of(half, embeds) - wanted).abs().max() < 0.05 * (wanted.max() - wanted.min())


# Many images in one call

@pytest.mark.parametrize("name", ["llava", "idefics3", "smolvlm"])
def test_a_group_of_images_is_as_good_as_one_at_a_time(tiny, name):
    "The order is kept, and images of one shape share one call of the tower."
    tiny, calls = tiny(name), []
    items = [item_of(tiny.oracle, image) for image in IMAGES + IMAGES[::-1]]
    tower = getattr(tiny.model, "vision_tower", None) or tiny.model.vision_model
    handle = tower.register_forward_hook(lambda *args: calls.append(args))
    together = tiny.model.get_multimodal_embeddings(items)
    handle.remove()
    assert len(calls) == 1
    for item, rows in zip(items, together, strict=True):
        close(rows, tiny.model.get_multimodal_embeddings([item])[0], atol=1e-5)
    assert tiny.model.get_multimodal_embeddings([]) == []


def test_tiles_of_two_sizes_are_two_calls(tiny):
    tiny, calls = tiny("idefics3"), []
    items = [item_of(tiny.oracle, image) for image in IMAGES[:2]]
    small = dict(pixel_values=torch.randn(3, 12, 12), span_token_ids=torch.tensor([5, 260, 6]))
    mixed = [items[0], small, items[1]]
    handle = tiny.model.vision_model.register_forward_hook(lambda *args: calls.append(args))
    together = tiny.model.get_multimodal_embeddings(mixed)
    handle.remove()
    assert len(calls) == 2
    for item, rows in zip(mixed, together): close(rows, tiny.model.get_multimodal_embeddings([item])[0], atol=1e-5)
    words = tiny.model.get_input_embeddings(torch.tensor([5, 6]))
    assert torch.equal(together[1][[0, 2]], words)


# Towers alone

@pytest.mark.parametrize("learned", [1, 2, 4, 7, 27, 28])
def test_position_buckets_equal_transformers(learned):
    "Any number of patches finds the places that transformers gives them, rounding and all."
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
    config = AutoConfig.for_model("idefics3_vision", hidden_size=1, image_size=2 * learned, patch_size=2)
    theirs = Idefics3VisionEmbeddings(config)
    theirs.patch_embedding.weight.zero_()
    theirs.patch_embedding.bias.zero_()
    theirs.position_embedding.weight.copy_(torch.arange(learned ** 2)[:, None])
    for rows in range(1, 2 * learned + 2):
        inside = torch.ones(1, rows, 3, dtype=torch.bool)
        wanted = theirs(torch.zeros(1, 3, 2 * rows, 6), inside)[0, :, 0].reshape(rows, 3)[:, 0] / learned
        got = position_buckets(torch.tensor([rows]), rows, learned)[0]
        assert got.tolist() == wanted.floor().tolist(), (learned, rows)


@pytest.mark.parametrize("height, width", [(24, 24), (12, 18), (18, 30), (36, 12), (25, 29), (6, 6)])
def test_siglip_with_padding_equals_transformers(tiny, height, width):
    "Pictures that fill only a part of their tensor; half a patch is a patch."
    tiny = tiny("idefics3")
    torch.manual_seed(height * width)
    pixels = torch.randn(3, 3, height, width)
    mask = torch.ones(3, height, width, dtype=torch.int64)
    mask[1, :, width // 2 + 1:] = 0
    mask[2, height // 2 + 1:] = 0
    side = 6
    cut = mask[:, :height // side * side, :width // side * side]
    inside = cut.unfold(1, side, side).unfold(2, side, side).sum((-1, -2)) > 0
    wanted = tiny.oracle.model.model.vision_model(pixels, patch_attention_mask=inside).last_hidden_state
    got = tiny.model.vision_model(pixels, mask)
    close(got[inside.flatten(1)], wanted[inside.flatten(1)])


def test_every_activation_equals_transformers():
    from transformers.activations import ACT2FN
    x = torch.linspace(-4, 4, 101)
    for name, ours in ACTIVATIONS.items(): close(ours(x), ACT2FN[name](x), atol=1e-6)


def test_patches_of_an_image_that_does_not_divide():
    "What is left at the right and below is dropped, as a convolution does."
    pixels, weight = torch.randn(2, 3, 13, 9), torch.randn(5, 3, 4, 4)
    wanted = torch.conv2d(pixels, weight, stride=4).flatten(2).transpose(1, 2)
    close(cut_into_patches(pixels, 4) @ weight.flatten(1).T, wanted, atol=1e-5)
    with pytest.raises(ValueError, match="9 x 3 pixels has no patch of 4 x 4"):
        cut_into_patches(torch.zeros(1, 3, 3, 9), 4)


@pytest.mark.parametrize("side, scale", [(4, 2), (6, 3), (8, 4), (5, 1)])
def test_pixel_shuffle_equals_transformers(side, scale):
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
    x = torch.arange(2 * side * side * 3.0).reshape(2, side * side, 3)
    assert torch.equal(pixel_shuffle(x, scale), Idefics3Connector.pixel_shuffle(None, x, scale))


# How many tokens

def test_the_longest_span(tmp_path):
    "Over many sizes no image is longer than the bound, and one comes within the one token of a merged line end."
    for edge, tile in [(48, 24), (72, 24), (100, 24), (24, 24), (72, 12), (49, 7)]:
        if edge == 49:   # sides are made even: a square of 50 has eight rows
            with pytest.raises(ValueError, match="49 pixels in tiles of 7 has 8 rows; there are marks for 6"):
                longest_span(4, edge, tile)
            continue
        vision = dict(image_size=tile)
        folder = SIGLIP(tmp_path / f"{edge}-{tile}", longest_edge=edge, vision_config=vision)
        config = config_for(folder).model_config
        bound = get_model_class(config.hf_config).max_image_tokens(config)
        oracle = mm_tiny.Oracle(folder)
        found = [len(item_of(oracle, mm_tiny.make_image(w, h))["span_token_ids"])
                 for w in (1, 24, 37, 100) for h in (1, 24, 36, 100)]
        assert max(found) <= bound <= max(found) + 1, (edge, tile)
    short = config_for(folder, max_model_len=64).model_config
    assert get_model_class(short.hf_config).max_image_tokens(short) == 64


def test_the_longest_span_heeds_the_processor_and_the_user(tiny, tmp_path):
    folder = tiny("smolvlm").folder
    kind = idefics3.SmolVLMForConditionalGeneration
    def longest(**fields): return kind.max_image_tokens(config_for(folder, **fields).model_config)
    assert longest() == longest_span(4, edge=72, tile=24) == 3 * (3 * 6 + 1) + 1 + 7
    assert longest(mm_processor_kwargs={"do_image_splitting": False}) == 7
    assert longest(mm_processor_kwargs={"size": {"longest_edge": 48}}) == longest_span(4, 48, 24)
    with pytest.raises(ValueError, match=r"size\['longest_edge'\].*at least 1, got -3"):
        longest(mm_processor_kwargs={"size": {"longest_edge": -3}})
    (tmp_path / "config.json").write_text(json.dumps(mm_tiny.config_of(folder)))   # no processor's settings
    bare = config_for(tmp_path, load_format="dummy").model_config
    assert kind.max_image_tokens(bare) == longest_span(4, edge=4 * 24, tile=24)


def test_llava_images_have_one_length(tiny):
    for name, wanted in [("llava", 25), ("llava, class token kept", 26)]:
        config = tiny(name).model.config
        assert llava.LlavaForConditionalGeneration.max_image_tokens(config) == wanted
        assert all(len(item_of(tiny(name).oracle, image)["span_token_ids"]) == wanted for image in IMAGES)


# What a tower does not take

def test_items_that_do_not_fit_are_refused(tiny):
    model = tiny("llava").model
    def refused(match, **item):
        with pytest.raises(ValueError, match=match): model.get_multimodal_embeddings([item])
    refused(r"takes pixel_values \(1, 3, 30, 30\), got \(1, 3, 28, 28\)", pixel_values=torch.zeros(3, 28, 28))
    refused(r"got \(2, 3, 30, 30\)", pixel_values=torch.zeros(2, 3, 30, 30))
    refused("needs pixel_values .* among image_grid_thw", image_grid_thw=torch.zeros(3))
    refused(r"needs pixel_values .*, got \(3, 0, 30\)", pixel_values=torch.zeros(3, 0, 30))
    model, span = tiny("idefics3").model, torch.tensor([260] * 4)
    refused("2 tiles are 8 tokens, but the span has 4 placeholders", pixel_values=torch.zeros(2, 3, 24, 24), span_token_ids=span)
    refused("needs span_token_ids, got pixel_values", pixel_values=torch.zeros(2, 3, 24, 24))
    refused("4 x 2 patches is no square", pixel_values=torch.zeros(1, 3, 24, 12), span_token_ids=span)
    refused("3 x 3 patches is no square with sides of 2", pixel_values=torch.zeros(1, 3, 18, 18), span_token_ids=span)
    refused("takes 3 channels, got 4", pixel_values=torch.zeros(1, 4, 24, 24), span_token_ids=span)
    refused("pixel_attention_mask must be", pixel_values=torch.zeros(1, 3, 24, 24), span_token_ids=span,
            pixel_attention_mask=torch.ones(1, 5, 5))


# Which model

def test_configs_of_models_that_see():
    config = LlavaConfig(text_config=dict(model_type="mistral", num_hidden_layers=3, sliding_window=9,
                                          architectures=["VLlama3ForCausalLM"]))
    model = ModelConfig("tiny", config, max_model_len=64)
    assert model.is_multimodal and model.hf_text_config is config.text_config and model.num_layers == 3
    assert get_model_class(config) is llava.LlavaForConditionalGeneration   # made in code: by its model_type
    config.architectures = ["SmolVLMForConditionalGeneration"]
    assert get_model_class(config) is idefics3.SmolVLMForConditionalGeneration
    config.architectures = ["LlavaNextForConditionalGeneration"]
    with pytest.raises(ValueError, match="unknown architecture LlavaNext.*; with images, supported are Llava"):
        get_model_class(config)
    assert not ModelConfig("tiny", config.text_config, max_model_len=64).is_multimodal
    assert not getattr(DecoderForCausalLM, "supports_multimodal", False)
    assert llava.LlavaForConditionalGeneration.supports_multimodal


def test_what_would_be_computed_wrongly_is_refused():
    def refused(match, **fields):
        text = dict(model_type="llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=50,
                    intermediate_size=8)
        vision = dict(model_type="clip_vision_model", hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=8, image_size=8, patch_size=4) | fields.pop("vision_config", {})
        config = LlavaConfig(text_config=text | fields.pop("text_config", {}), vision_config=vision, **fields)
        with pytest.raises(ValueError, match=match):
            get_model_class(config)(ModelConfig("tiny", config, max_model_len=32))
    refused("vision_feature_layer -4 is not among 0..2", vision_feature_layer=-4)
    refused("tower must be a clip_vision_model, got 'siglip_vision_model'",
            vision_config=dict(model_type="siglip_vision_model"))
    refused("unknown activation 'mish'", projector_hidden_act="mish")
    refused("hidden_act must be 'silu', got 'gelu'", text_config=dict(hidden_act="gelu"))


def test_who_serves_text_loads_no_tower():
    code = ("import sys\nfrom minengine.model import checkpoint\n"
            "seen = {'minengine.model.llava', 'minengine.model.vision', 'minengine.model.idefics3'} & set(sys.modules)\n"
            "assert not seen, seen")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


LLAVA_15 = dict(
    architectures=["LlavaForConditionalGeneration"], model_type="llava", image_token_index=32000, pad_token_id=32001,
    projector_hidden_act="gelu", tie_word_embeddings=False, torch_dtype="float16", vocab_size=32064,
    text_config=dict(architectures=["LlamaForCausalLM"], max_position_embeddings=4096, model_type="llama",
                     rms_norm_eps=1e-5, torch_dtype="float16", vocab_size=32064),
    vision_config=dict(hidden_size=1024, image_size=336, intermediate_size=4096, model_type="clip_vision_model",
                       num_attention_heads=16, num_hidden_layers=24, patch_size=14, projection_dim=768, vocab_size=32000),
    vision_feature_layer=-2, vision_feature_select_strategy="default")
SMOLVLM_256M = dict(
    architectures=["Idefics3ForConditionalGeneration"], model_type="idefics3", image_token_id=49190, scale_factor=4,
    torch_dtype="bfloat16", tie_word_embeddings=False, vocab_size=49280,
    text_config=dict(architectures=["VLlama3ForCausalLM"], model_type="llama", hidden_size=576, intermediate_size=1536,
                     num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49280,
                     max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000, tie_word_embeddings=False),
    vision_config=dict(hidden_size=768, image_size=512, max_image_size={"longest_edge": 512}, num_attention_heads=12,
                       patch_size=16, size={"longest_edge": 2048}))


@pytest.mark.parametrize("raw, longest, millions", [(LLAVA_15, 576, 7050), (SMOLVLM_256M, 1128, 256)],
                         ids=["llava-1.5-7b", "smolvlm-256m"])
def test_configs_of_real_models(tmp_path, raw, longest, millions):
    "As the hub has them: the right sizes, without allocating them."
    (tmp_path / "config.json").write_text(json.dumps(raw))
    vllm_config = config_for(tmp_path, load_format="dummy", max_model_len=2048)
    config = vllm_config.model_config
    kind = get_model_class(config.hf_config)
    assert kind.max_image_tokens(config) == longest
    assert vllm_config.scheduler_config.encoder_cache_size >= longest
    with torch.device("meta"): model = kind(config)
    assert sum(p.numel() for p in model.parameters()) // 10**6 == millions
    assert config.head_dim == raw["text_config"].get("head_dim", 128)


def test_dummy_weights(tiny, tmp_path):
    for name in ("llava", "idefics3"):
        (tmp_path / "config.json").write_text(json.dumps(mm_tiny.config_of(tiny(name).folder)))
        one, two = (load_model(config_for(tmp_path, load_format="dummy")) for _ in "ab")
        item = item_of(tiny(name).oracle, IMAGES[0])
        rows, again = (model.get_multimodal_embeddings([item])[0] for model in (one, two))
        assert torch.equal(rows, again) and rows.isfinite().all() and rows.std() > 0
        tower = getattr(one, "vision_tower", None) or one.vision_model
        norm = tower.encoder.layers[0].layer_norm1
        assert norm.weight.eq(1).all() and norm.bias.eq(0).all()


def test_the_whole_model_is_weighed(tiny):
    "Packed or not, tower and projector count; what the decoder does not look at is not even built."
    tiny = tiny("llava")
    plain = load_model(config_for(tiny.folder, pack_cpu_weights=False))
    stored = load_file(tiny.folder + "/model.safetensors")
    unused = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.")
    wanted = sum(t.nbytes for name, t in stored.items() if not name.startswith(unused))
    assert sum(p.nbytes for p in plain.parameters()) == wanted and len(plain.vision_tower.encoder.layers) == 2
    assert model_bytes(plain) >= wanted and abs(model_bytes(tiny.model) / model_bytes(plain) - 1) < 0.2


def test_end_tokens_and_overrides(tiny, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny("llava").folder, folder)
    (folder / "generation_config.json").unlink()
    config = config_for(folder, hf_overrides={"text_config": {"rope_theta": 5e5}}).model_config
    eos = tiny("llava").oracle.tokenizer.eos_token_id
    assert config.generation_config["eos_token_id"] == eos == config.hf_text_config.eos_token_id
    assert config.hf_text_config.rope_parameters["rope_theta"] == 5e5 and config.num_layers == 2


# Weights

def stored(tiny, name) -> dict: return load_file(tiny(name).folder + "/model.safetensors")


def hub_llava(name):
    "As LLaVA-1.5 lies on the hub."
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def later_llava(name):
    "As transformers 4.52 and later may write it."
    name = hub_llava(name)
    if name.startswith("language_model.lm_head."): return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)


def latest_llava(name): return later_llava(name).replace("vision_tower.vision_model.", "vision_tower.")


def base_llava(name):
    "A model without its head, saved alone."
    return latest_llava(name).removeprefix("model.")


def base_idefics3(name): return name.removeprefix("model.")


@pytest.mark.parametrize("name, change", [
    ("llava", hub_llava), ("llava", later_llava), ("llava", latest_llava), ("llava, tied Qwen2", later_llava),
    ("llava, tied Qwen2", base_llava),
    ("idefics3", base_idefics3)])
def test_names_of_both_generations(tiny, name, change):
    tiny_, weights = tiny(name), stored(tiny, name)
    weights = {change(k): v for k, v in weights.items()}
    fresh = get_model_class(tiny_.model.config.hf_config)(tiny_.model.config)
    fresh.load_weights(weights.items())
    fresh.process_weights_after_loading()
    item = item_of(tiny_.oracle, IMAGES[0])
    assert torch.equal(fresh.get_multimodal_embeddings([item])[0], tiny_.model.get_multimodal_embeddings([item])[0])
    embeds = tiny_.model.get_input_embeddings(torch.arange(20))
    assert torch.equal(logits_of(fresh, embeds), logits_of(tiny_.model, embeds))


@pytest.mark.parametrize("name, key, here", [
    ("llava", "vision_tower.encoder.layers.1.self_attn.v_proj.bias", None),
    ("llava", "vision_tower.embeddings.class_embedding", None),
    ("llava", "multi_modal_projector.linear_2.weight", None),
    ("llava", "language_model.lm_head.weight", "lm_head.weight"),
    ("idefics3", "model.connector.modality_projection.proj.weight", "connector.modality_projection.proj.weight"),
    ("idefics3", "model.vision_model.embeddings.patch_embedding.bias", "vision_model.embeddings.patch_embedding.bias"),
    ("idefics3", "model.text_model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")])
def test_missing_unexpected_renamed_and_misshapen_weights_are_named(tiny, name, key, here):
    good, here = stored(tiny, name), here or key
    config = tiny(name).model.config
    def refused(match, weights):
        with pytest.raises(ValueError, match=match):
            get_model_class(config.hf_config)(config).load_weights(weights.items())
    rest = {k: v for k, v in good.items() if k != key}
    refused(f"missing: {here}", rest)
    refused(f"missing: {here}.*unexpected: .*misspelled", rest | {key + "_misspelled": good[key]})
    refused(f"unexpected: {here}x$", good | {key + "x": good[key]})
    refused(f"{here}: ", good | {key: good[key][1:]})


def test_unused_weights_may_be_there_or_not(tiny):
    config, weights = tiny("llava").model.config, stored(tiny, "llava")
    make = get_model_class(config.hf_config)
    behind = {k for k in weights if "encoder.layers.2." in k or "post_layernorm" in k}
    assert len(behind) == 18
    used = make(config).load_weights((k, v) for k, v in weights.items() if k not in behind)
    assert used == make(config).load_weights(weights.items())
    old = weights | {"vision_tower.vision_model.embeddings.position_ids": torch.arange(26)}
    assert make(config).load_weights(old.items()) == used
    with pytest.raises(ValueError, match="unexpected: vision_tower.encoder.layers.3."):
        make(config).load_weights((k.replace("layers.2.", "layers.3."), v) for k, v in weights.items())


def test_a_checkpoint_in_a_folder_names_the_folder(tiny, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny("idefics3").folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["adapter"] = weights.pop("model.connector.modality_projection.proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{folder}: .*missing: connector.*; unexpected: adapter"):
        load_model(config_for(folder))


# Tensor parallel, simulated with threads

@pytest.mark.parametrize("name, size", [("llava", 2), ("smolvlm", 3), ("idefics3", 4)])
def test_ranks_together_give_the_logits_of_one(tiny, name, size):
    "The decoder is shared out, the tower is whole on every rank: its heads need not divide."
    tiny_, (text, images), ranks = tiny(name), PROMPTS["two at once"], Ranks(size)
    config, weights = tiny_.model.config, stored(tiny, name)
    items = [item_of(tiny_.oracle, image) for image in images]
    ids = tiny_.oracle.inputs(text, images)["input_ids"][0]
    def make():
        model = get_model_class(config.hf_config)(config)
        model.load_weights(weights.items())
        return model
    models = [ranks.build(rank, make) for rank in range(size)]
    def work(rank):
        with torch.no_grad(): return logits_of(models[rank], embed(models[rank], ids, items), chunks=[30, 300])
    wanted = tiny_.oracle.logits(text, images)
    for logits in ranks.run(work): close(logits, wanted)
    towers = [m for m in models[0].modules() if isinstance(m, (CLIPVisionModel, SiglipVisionModel))]
    assert len(towers) == 1 and all(
        a.shape == b.shape for a, b in zip(towers[0].parameters(), [
            p for m in models[1].modules() if isinstance(m, (CLIPVisionModel, SiglipVisionModel)) for p in m.parameters()]))


def test_transformers_saves_llava_under_one_of_the_known_names(tmp_path):
    "Guards the tests above: what this version of transformers writes is what they rename."
    folder = CLIP(tmp_path / "tiny")
    names = set(load_file(folder + "/model.safetensors"))
    assert {"language_model.lm_head.weight", "multi_modal_projector.linear_1.weight"} <= names
    assert LlavaForConditionalGeneration.__name__ in mm_tiny.config_of(folder)["architectures"]
