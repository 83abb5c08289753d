"""Prompts with images become tokens and tensors: as transformers does it, and nothing is left of what is refused."""
import asyncio
import base64
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from mm_tiny import Oracle, make_image, make_tiny_idefics3, make_tiny_llava
from mm_tiny_qwen import make_processor, make_tiny_qwen2_5_vl
from PIL import Image
from transformers import AutoProcessor

from minengine.config import EngineArgs
from minengine.llm import LLM, make_engine_args, render_chat
from minengine.model.checkpoint import create_engine_config
from minengine.multimodal.cache import ProcessorCache
from minengine.multimodal.processor import (
    MultiModalProcessor, check_aspect, expand_placeholders, load_images, merge_options, mm_hash, tile_text)
from minengine.sampling_params import SamplingParams
from minengine.tokenizer import get_tokenizer
from minengine.v1.engine.async_llm import AsyncLLM
from minengine.v1.engine.processor import Processor
from minengine.v1.messages import PlaceholderRange

QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = ["llava", "idefics3", "smolvlm", "qwen"]
SIZES = [(40, 40), (90, 60), (60, 90), (24, 24), (48, 12), (100, 3), (7, 1), (1, 7), (3, 3), (3, 5), (200, 1)]


def make_folder(name, path) -> str:
    if name == "llava": return make_tiny_llava(path)
    if name == "qwen": return make_tiny_qwen2_5_vl(path)
    return make_tiny_idefics3(path, architecture={"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[name])


class Family:
    "A tiny model's folder; transformers' processor of it, and ours."

    def __init__(self, name, path):
        self.name, self.folder = name, make_folder(name, path)
        self.theirs = make_processor(self.folder) if name == "qwen" else AutoProcessor.from_pretrained(self.folder)
        self.tokenizer, self.place = get_tokenizer(self.folder), QWEN if name == "qwen" else "<image>"
        self.placeholder = self.tokenizer.encode(self.place, add_special_tokens=False)[1 if name == "qwen" else 0]

    def config(self, **args):
        return create_engine_config(EngineArgs(model=self.folder, **dict(
            use_tqdm_on_load=False, num_gpu_blocks_override=64) | args))

    def processor(self, cache=None, **args):
        return MultiModalProcessor(self.config(**args).model_config, self.tokenizer, cache)

    def expected(self, prompt, images, **kwargs):
        out = self.theirs(text=prompt, images=images or None, return_tensors="pt", **kwargs)
        return out["input_ids"][0].tolist(), {
            k: v for k, v in out.items() if k in ("pixel_values", "pixel_attention_mask", "image_grid_thw")}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    made = {}
    def get(name) -> Family:
        if name not in made: made[name] = Family(name, tmp_path_factory.mktemp(name))
        return made[name]
    return get


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, families): return families(request.param)


def put_together(name, items) -> dict:
    "The items of a prompt as transformers gives them."
    if name == "llava": return {"pixel_values": torch.stack([i["pixel_values"] for i in items])}
    if name == "qwen": return {"pixel_values": torch.cat([i["pixel_values"] for i in items]),
                               "image_grid_thw": torch.stack([i["image_grid_thw"] for i in items])}
    return {k: torch.cat([i[k] for i in items])[None] for k in ("pixel_values", "pixel_attention_mask")}


def same_as_transformers(family, processor, prompt, images, **kwargs):
    ids, tensors = family.expected(prompt, images, **kwargs)
    done = processor.process(prompt, images, kwargs)
    assert done.prompt_token_ids == ids
    got = put_together(family.name, done.mm_inputs)
    assert got.keys() == tensors.keys()
    for k in got:
        assert got[k].shape == tensors[k].shape and torch.equal(got[k], tensors[k].to(got[k].dtype)), k
    # Spans are where they say, as long as the tower's output.
    for item, (offset, length) in zip(done.mm_inputs, done.mm_placeholders, strict=True):
        assert item["span_token_ids"].tolist() == ids[offset:offset + length]
        assert processor.model_class.num_image_tokens(processor.model_config, item) == length
    return done


# As transformers does it.

@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
def test_one_image_of_any_size(family, size):
    same_as_transformers(family, family.processor(), f"A {family.place} b.", [make_image(*size)])


def test_several_images_of_different_sizes(family):
    processor, p = family.processor(), family.place
    images = [make_image(*size, seed=i) for i, size in enumerate(SIZES[:5])]
    for prompt, n in ((p, 1), (p + p, 2), (f"{p}\n{p}\n\n{p} ", 3), (f"\n\n{p}\n\na{p}", 2), (f"x{p}y{p}z{p}\n{p}é{p}", 5)):
        same_as_transformers(family, processor, prompt, images[:n])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.text("ab é\n<>", max_size=5), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=3),
       st.text("a\n ", max_size=3))
def test_any_words_and_sizes(families, parts, end):
    for name in ("llava", "idefics3", "qwen"):
        family = families(name)
        images = [make_image(w, h, seed=w) for _, w, h in parts]
        same_as_transformers(family, family.processor(), "".join(words + family.place for words, *_ in parts) + end, images)


def test_text_alone(family):
    done = family.processor().process("No picture.", [])
    assert done.prompt_token_ids == family.expected("No picture.", [])[0]
    assert (done.mm_inputs, done.mm_hashes, done.mm_placeholders) == ([], [], [])


def test_the_longest_image_is_the_longest(family):
    processor = family.processor()
    limit = processor.model_class.max_image_tokens(processor.model_config)
    lengths = [processor.process(family.place, [make_image(w, h)]).mm_placeholders[0][1] for w, h in [*SIZES, (300, 300), (299, 290)]]
    assert max(lengths) <= limit
    # Of two line ends some tokenizers make two tokens; this one makes one.
    if family.name != "qwen": assert max(lengths) == limit - (family.name != "llava")


def test_options_of_the_image_processor(families):
    idefics, qwen = families("idefics3"), families("qwen")
    image, few = make_image(90, 60), {"do_image_splitting": False}
    one = same_as_transformers(idefics, idefics.processor(), "<image>", [image], **few)
    assert len(one.mm_inputs[0]["pixel_values"]) == 1
    small = {"size": {"shortest_edge": 64, "longest_edge": 64 * 6}}
    assert len(same_as_transformers(qwen, qwen.processor(), QWEN, [image], **small).mm_inputs[0]["span_token_ids"]) <= 6
    # The engine's own are the default, the request has the last word.
    engine = idefics.processor(mm_processor_kwargs=few)
    assert engine.process("<image>", [image]).mm_hashes == one.mm_hashes
    assert engine.process("<image>", [image], {"do_image_splitting": True}).mm_hashes != one.mm_hashes


def test_prompts_of_token_ids(family):
    processor, images = family.processor(), [make_image(), make_image(90, 20)]
    text = f"a{family.place}b{family.place}"
    from_text = processor.process(text, images)
    from_ids = processor.process(family.tokenizer.encode(text), images)
    assert from_ids.prompt_token_ids == from_text.prompt_token_ids
    assert from_ids.mm_hashes == from_text.mm_hashes


def test_no_tokenizer(families):
    for name in ("llava", "qwen"):
        family = families(name)
        processor = MultiModalProcessor(family.config(skip_tokenizer_init=True).model_config)
        ids = family.tokenizer.encode(family.place)
        assert processor.process(ids, [make_image()]).prompt_token_ids == family.expected(family.place, [make_image()])[0]
        with pytest.raises(ValueError, match="needs a tokenizer"): processor.process(family.place, [make_image()])
    with pytest.raises(ValueError, match="words between the tiles .* it needs a tokenizer"):
        MultiModalProcessor(families("idefics3").config().model_config)


def test_another_tokenizer_than_the_models(families):
    # The marks between tiles are no tokens of it: told, not computed.
    processor = MultiModalProcessor(families("idefics3").config().model_config, get_tokenizer("byte"))
    with pytest.raises(ValueError, match="placeholders"):
        processor.process([processor.placeholder], [make_image()])


# Names.

def test_names_cover_what_the_model_sees_and_nothing_else(family):
    processor, p = family.processor(), family.place
    def name(image, **options): return processor.process(p, [image], options).mm_hashes[0]
    a, b = make_image(40, 40, 1), make_image(40, 40, 2)
    flat = Image.frombytes("RGB", (80, 20), a.tobytes())   # the same bytes in another shape
    assert name(a) == name(a.copy()) == name(load_images({"image": np.asarray(a)})[0])
    assert len({name(a), name(b), name(flat), name(a, do_normalize=False)}) == 4
    assert mm_hash(a, "one", {}) != mm_hash(a, "another", {})
    assert mm_hash(a, "m", {"x": 1, "y": 2}) == mm_hash(a, "m", {"y": 2, "x": 1})
    with pytest.raises(ValueError, match="plain JSON"): mm_hash(a, "m", {"x": {1, 2}})


# What is refused.

def test_numbers_of_placeholders(family):
    processor, image, p = family.processor(), make_image(), family.place
    for prompt, images, words in (
            (p, [], "1 image placeholders .* 0 images"), ("no place", [image], "0 image placeholders .* 1 images"),
            (p + p, [image], "2 image placeholders .* 1 images"), (p, [image] * 3, "1 image placeholders .* 3 images")):
        with pytest.raises(ValueError, match=words): processor.process(prompt, images)
    # Once expanded is expanded: whoever sends such ids again has too many.
    expanded = processor.process(p, [image]).prompt_token_ids
    if expanded.count(processor.placeholder) > 1:
        with pytest.raises(ValueError, match="image placeholders .* 1 images"): processor.process(expanded, [image])


def test_videos_are_not_built(families):
    with pytest.raises(ValueError, match="has a video placeholder"): families("qwen").processor().process("<|video_pad|>", [])
    with pytest.raises(ValueError, match="has the key 'video', only 'image' is known"): load_images({"video": [1]})


@pytest.mark.parametrize("data, words", [
    (7, "must be a dict, got a int"), ([1], "must be a dict"), ({"image": 7}, "image 0 of the prompt: image must be"),
    ({"image": [make_image(), None]}, "image 1 of the prompt"), ({"image": b"GIF"}, "image 0 .* begins with b'GIF'"),
    ({"image": "/no/such/file.png"}, "image 0 of the prompt: image '/no/such/file.png' cannot be read"),
    ({"image": "https://example.com/x.png"}, "image 0 of the prompt: .*nobody may fetch"),
    ({"image": np.zeros((2, 2, 2))}, "shape .2, 2, 2."), ({"image": [make_image()] * 4}, "4 images, at most 3"),
])
def test_sources_that_are_no_images(data, words):
    with pytest.raises(ValueError, match=words): load_images(data, max_images=3)


def test_sources(tmp_path):
    image, file = make_image(), io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "x.png").write_bytes(file.getvalue())
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    sources = [image, np.asarray(image), file.getvalue(), tmp_path / "x.png", str(tmp_path / "x.png"), url]
    assert {i.tobytes() for i in load_images({"image": sources})} == {image.tobytes()}
    assert load_images({"image": "z://x"}, fetch=lambda url: file.getvalue())[0].tobytes() == image.tobytes()


def test_lines_are_refused_before_they_grow(family):
    check_aspect(400, 2), check_aspect(1, 200)
    processor = family.processor()
    for size in ((50_000_000, 1), (1, 201), (403, 2)):
        image = Image.new("RGB", size)
        with pytest.raises(ValueError, match="image 0 of the prompt: an image of .* pixels: one side may be 200 times"):
            processor.process(family.place, [image])


def test_options_that_nobody_knows(family):
    for options, words in (({"sise": 3}, "has 'sise', but the image processor takes .*size"),
                           ({"return_tensors": "np"}, "has 'return_tensors'"), ({"patch_size": 7}, "has 'patch_size'"),
                           ({"size": {"longest_edge": "huge"}}, "image 0 of the prompt: the image processor refuses it"),
                           ([1], "must be a dict, got a list")):
        with pytest.raises(ValueError, match=words): family.processor().process(family.place, [make_image()], options)
    with pytest.raises(ValueError, match="has 'sise'"): family.processor(mm_processor_kwargs={"sise": 3})
    with pytest.raises(ValueError, match="has 'b'"): merge_options({"a"}, {"a": 1}, {"b": 2})


def test_pixels_that_the_tower_does_not_take(families):
    llava = families("llava")
    with pytest.raises(ValueError, match=r"image 0 .* the tower takes pixel_values \(1, 3, 30, 30\), got \(1, 3, 24, 24\)"):
        llava.processor().process("<image>", [make_image()], {"crop_size": {"height": 24, "width": 24}})


def test_a_prompt_with_too_many_images_ends_at_the_first(families, monkeypatch):
    processor, made = families("llava").processor(max_model_len=64), []
    make = processor.make_item
    monkeypatch.setattr(processor, "make_item", lambda *args: made.append(1) or make(*args))
    images = [make_image(40, 40, seed) for seed in range(20)]
    with pytest.raises(ValueError, match=r"prompt has 69 tokens with its first 2 images, but max_model_len is 64"):
        processor.process("<image>" * 20, images)   # 1 + 20 + 2 * 24
    assert len(made) == 2


def test_a_folder_without_an_image_processor(families, tmp_path):
    family = families("llava")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(family.folder) / name).read_bytes())
    args = dict(model=str(tmp_path), load_format="dummy", use_tqdm_on_load=False)
    config = create_engine_config(EngineArgs(**args))
    with pytest.raises(ValueError, match="no image processor can be loaded, and limit_mm_per_prompt={'image': 0}"):
        Processor(config, family.tokenizer)
    blind = Processor(create_engine_config(EngineArgs(**args, limit_mm_per_prompt={"image": 0})), family.tokenizer)
    assert blind.process_inputs("r", "text", SamplingParams()).mm_inputs is None
    with pytest.raises(ValueError, match="has multi_modal_data .image., but limit_mm_per_prompt allows none"):
        blind.process_inputs("r", {"prompt": "<image>", "multi_modal_data": {"image": make_image()}}, SamplingParams())


# V1's door.

def with_image(prompt, *images, **more):
    return {"prompt": prompt, "multi_modal_data": {"image": list(images)}, **more}


def test_a_request(family):
    door, images = Processor(family.config(), family.tokenizer), [make_image(), make_image(90, 30)]
    params = SamplingParams(max_tokens=1000)
    request = door.process_inputs("r", with_image(f"a{family.place}b{family.place}", *images, cache_salt="s"), params)
    done = family.processor().process(f"a{family.place}b{family.place}", images)
    assert request.prompt_token_ids == done.prompt_token_ids and request.cache_salt == "s"
    assert request.prompt == f"a{family.place}b{family.place}" and request.mm_evict is None
    assert request.mm_hashes == done.mm_hashes
    assert request.mm_placeholders == [PlaceholderRange(*p) for p in done.mm_placeholders]
    assert request.sampling_params.max_tokens == 512 - len(done.prompt_token_ids)   # the window counts images
    text = door.process_inputs("r", "text", params)
    assert (text.mm_inputs, text.mm_hashes, text.mm_placeholders) == (None, None, None)
    with pytest.raises(ValueError, match="1 image placeholders .* 0 images"): door.process_inputs("r", family.place, params)


def test_only_what_is_accepted_is_kept(families):
    llava = families("llava")
    door = Processor(llava.config(max_model_len=100, limit_mm_per_prompt={"image": 3}), llava.tokenizer)
    good, bad, params = make_image(seed=1), make_image(1000, 2), SamplingParams()
    def refused(words, prompt, params=params):
        with pytest.raises(ValueError, match=words): door.process_inputs("r", prompt, params)
        assert not door.mm_processor.cache.items
        door.mm_processor.cache.check_invariants()
    refused("image 1 of the prompt: an image of 1000 x 2", with_image("<image><image>", good, bad))
    refused("4 images, at most 3 are allowed", with_image("<image>" * 4, *[good] * 4))
    refused("max_model_len is 100", with_image("<image>" + "x" * 76, good))
    refused("100 tokens, but max_model_len is 100", with_image("<image>" + "x" * 74, good))
    refused("stop_token_ids", with_image("<image>", good), SamplingParams(stop_token_ids=[10**6]))
    refused("truncate_prompt_tokens would cut", with_image("<image>", good), SamplingParams(truncate_prompt_tokens=20))
    refused("has 'x'", with_image("<image>", good, mm_processor_kwargs={"x": 1}))
    refused("has the key 'audio'", {"prompt": "<image>", "multi_modal_data": {"audio": good}})
    door.process_inputs("r", with_image("<image>", good), params)
    assert len(door.mm_processor.cache.items) == 1
    door.reset_mm_cache()
    assert not door.mm_processor.cache.items


def test_an_image_longer_than_the_encoder_takes(families):
    # vllm#16795: with both numbers, and nothing kept.
    idefics = families("idefics3")
    long, short = make_image(40, 40), make_image(60, 10)
    for limit in (dict(encoder_cache_size=32), dict(max_num_encoder_input_tokens=32)):
        door = Processor(idefics.config(**limit), idefics.tokenizer)
        with pytest.raises(ValueError, match="image 1 of the prompt has 33 tokens, but the encoder takes at most 32"):
            door.process_inputs("r", with_image("<image><image>", short, long), SamplingParams())
        assert not door.mm_processor.cache.items
        assert door.process_inputs("r", with_image("<image>", short), SamplingParams()).mm_placeholders[0].length <= 32


def test_budgets_of_the_engine(families):
    llava, idefics = families("llava"), families("idefics3")
    def limits(family, **args):
        c = family.config(**args).scheduler_config
        return c.max_num_encoder_input_tokens, c.encoder_cache_size
    assert limits(llava) == (2048, 2048)
    assert limits(llava, max_num_batched_tokens=16, max_num_seqs=4) == (25, 25)
    assert limits(idefics, max_num_batched_tokens=16, max_num_seqs=4) == (34, 34)
    assert limits(llava, max_num_encoder_input_tokens=30, encoder_cache_size=70) == (30, 70)
    assert limits(llava, limit_mm_per_prompt={"image": 0}) == (0, 0)
    assert limits(llava, engine="v0", enable_prefix_caching=False) == (0, 0)


def test_an_image_is_prepared_once(family, monkeypatch):
    door, made = Processor(family.config(), family.tokenizer), Counter()
    make = door.mm_processor.make_item
    def counted(image, options):
        made[image.tobytes()] += 1
        return make(image, options)
    monkeypatch.setattr(door.mm_processor, "make_item", counted)
    a, b, p = make_image(seed=1), make_image(seed=2), family.place
    first = door.process_inputs("1", with_image(p + p, a, a), SamplingParams())
    assert first.mm_inputs[0] is first.mm_inputs[1]
    door.process_inputs("2", with_image(p + p, b, a), SamplingParams())
    third = door.process_inputs("3", with_image(p, a.copy()), SamplingParams())
    assert third.mm_inputs[0] is first.mm_inputs[0]
    assert set(made.values()) == {1} and len(made) == 2
    door.reset_mm_cache()
    door.process_inputs("4", with_image(p, a), SamplingParams())
    assert made[a.tobytes()] == 2


def test_a_small_cache_and_many_images(families):
    # vllm#28525, #28496, #26195: 20 images, room for 5, sent twice.
    llava = families("llava")
    done = llava.processor().process("<image>", [make_image()])
    one = sum(t.nbytes for t in done.mm_inputs[0].values())
    cache = ProcessorCache(5 * one)
    processor = llava.processor(cache)
    images, prompt = [make_image(seed=i) for i in range(20)], "<image>" * 20
    expected = llava.expected(prompt, images)[1]["pixel_values"]
    for _ in range(2):
        done = processor.process(prompt, images)
        assert torch.equal(torch.stack([i["pixel_values"] for i in done.mm_inputs]), expected)
        processor.accept(done)
        cache.check_invariants()
    assert (len(cache.items), cache.num_hits) == (5, 5)


def test_a_cache_may_be_switched_off(families):
    llava = families("llava")
    door = Processor(llava.config(mm_processor_cache_gb=0), llava.tokenizer)
    for _ in range(2): request = door.process_inputs("r", with_image("<image>", make_image()), SamplingParams())
    assert len(request.mm_hashes) == 1 and not door.mm_processor.cache.items


# Conversations.

def test_chat_renders_as_transformers_does(family):
    a, b = make_image(seed=1), make_image(90, 30)
    def text(words): return {"type": "text", "text": words}
    def ours(*images): return [
        {"role": "user", "content": [{"type": "image", "image": images[0]}, text("What is it?")]},
        {"role": "assistant", "content": "A pattern."},
        {"role": "user", "content": [text("And "), {"type": "image_pil", "image_pil": images[1]}]}]
    prompt = render_chat(family.tokenizer, ours(a, b))
    assert prompt["multi_modal_data"] == {"image": [a, b]}
    theirs = [{"role": m["role"], "content": m["content"] if isinstance(m["content"], str) else [
        p if p["type"] == "text" else {"type": "image"} for p in m["content"]]} for m in ours(a, b)]
    rendered = family.theirs.tokenizer.apply_chat_template(theirs, tokenize=False, add_generation_prompt=True)
    ids, _ = family.expected(rendered, [a, b], add_special_tokens=False)
    request = Processor(family.config(), family.tokenizer).process_inputs("r", prompt, SamplingParams())
    assert request.prompt_token_ids == ids


def test_a_chat_template_in_a_file_of_its_own(families, tmp_path):
    llava = families("llava")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(llava.folder) / name).read_bytes())
    assert get_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": llava.tokenizer.chat_template}))
    hello = [{"role": "user", "content": "Hi"}]
    assert render_chat(get_tokenizer(str(tmp_path)), hello) == render_chat(llava.tokenizer, hello)


def test_chat_parts():
    byte = get_tokenizer("byte")
    assert "multi_modal_data" not in render_chat(byte, [{"role": "user", "content": "Hi"}])
    for part, words in (({"type": "image_url"}, "'image_url' needs 'image_url'"), ({"type": "image_url", "image_url": {}}, "needs"),
                        ({"type": "image_url", "image_url": 7}, "needs"), ({"type": "image_pil"}, "'image_pil' needs 'image_pil'"),
                        ({"type": "input_audio"}, "input_audio")):
        with pytest.raises(ValueError, match=words): render_chat(byte, [{"role": "user", "content": [part]}])


def test_a_placeholder_written_by_a_user(families):
    # The tokenizer makes a placeholder of it: the number is wrong, and no image is taken for another.
    llava = families("llava")
    door = Processor(llava.config(), llava.tokenizer)
    for content, words in (("I write <image>.", "1 image placeholders .* 0 images"),
                           ([{"type": "image", "image": make_image()}, {"type": "text", "text": "<image>"}], "2 .* 1 images")):
        prompt = render_chat(llava.tokenizer, [{"role": "user", "content": content}])
        with pytest.raises(ValueError, match=words): door.process_inputs("r", prompt, SamplingParams())


def test_arguments_of_llm():
    args = make_engine_args(None, "v1", limit_mm_per_prompt={"image": 2}, mm_processor_cache_gb=0.5, allowed_local_media_path="/x",
                            allowed_media_domains=["*"], mm_processor_kwargs={"size": 3})
    assert (args.limit_mm_per_prompt, args.mm_processor_cache_gb) == ({"image": 2}, 0.5)
    for bad in ({"limit_mm_per_prompt": {"video": 1}}, {"limit_mm_per_prompt": {"image": -1}},
                {"mm_processor_cache_gb": -1}, {"mm_processor_kwargs": [1]}, {"encoder_cache_size": -5}):
        with pytest.raises(ValueError): create_engine_config(make_engine_args("/tmp/none", "v1", **bad))


# Whole engines.

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def answers(families):
    "What transformers answers to every prompt of `ask_everything`."
    llava = families("llava")
    oracle = Oracle(llava.folder)
    return [oracle.greedy(p, images, 6) for p, images in prompts()]


def prompts():
    a, b = make_image(seed=1), make_image(90, 30, seed=2)
    return [("x <image>", [a]), ("<image><image>", [a, a]), ("<image> y <image>", [b, a]), ("<image>", [b]), ("text", [])]


def ask_everything(llm):
    outs = llm.generate([with_image(p, *images) for p, images in prompts()], GREEDY, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outs]


def test_in_one_process_images_travel_by_reference(families, answers):
    llm = LLM(families("llava").folder, num_gpu_blocks_override=64, use_tqdm_on_load=False)
    try:
        for _ in range(2): assert ask_everything(llm) == answers
        assert llm.llm_engine.engine_core.engine_core.mm_cache is None
        llm.reset_mm_cache()
        assert ask_everything(llm) == answers
        a = make_image(seed=1)
        chat = [{"role": "user", "content": [{"type": "image", "image": a}, {"type": "text", "text": "?"}]}]
        one, = llm.chat(chat, GREEDY, use_tqdm=False)
        two, = llm.generate(render_chat(llm.get_tokenizer(), chat), GREEDY, use_tqdm=False)
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        with pytest.raises(ValueError, match="prompt 1: .*0 image placeholders"):
            llm.generate(["a", with_image("b", a)], GREEDY, use_tqdm=False)
    finally: llm.shutdown()


@pytest.fixture(scope="module")
def remote(families):
    llm = LLM(families("llava").folder, num_gpu_blocks_override=64, use_tqdm_on_load=False, enable_multiprocessing=True)
    yield llm
    llm.shutdown()


def test_across_processes_images_travel_once(remote, answers):
    client = remote.llm_engine.engine_core
    assert ask_everything(remote) == answers
    assert (client.mm_cache.num_sent, client.mm_cache.num_left_out) == (2, 4)   # a and b, of six
    three, = remote.generate(with_image("<image>", make_image(seed=7)), SamplingParams(
        temperature=1, seed=0, max_tokens=2, n=3, ignore_eos=True), use_tqdm=False)
    assert len(three.outputs) == 3 and client.mm_cache.num_sent == 3   # three requests for the core, one image
    remote.reset_mm_cache()
    assert not client.mm_cache.sizes
    assert ask_everything(remote) == answers
    assert client.mm_cache.num_sent == 5


def test_a_refused_request_has_brought_its_images(remote):
    # vllm#16273 and its kin: what the core refuses has been booked on both sides.
    engine, image = remote.llm_engine, make_image(seed=11)
    request = engine.processor.process_inputs("r", with_image("<image>", image), GREEDY)
    request.prompt_token_ids = [request.prompt_token_ids[0]] * 5   # shorter than its image's span: refused over there
    client = engine.engine_core
    client.add_request(request)
    while not client.refused: client.get_output()
    assert "r" in client.refused.pop()[0]
    left_out = client.mm_cache.num_left_out
    out, = remote.generate(with_image("<image>", image), GREEDY, use_tqdm=False)
    assert client.mm_cache.num_left_out == left_out + 1 and len(out.outputs[0].token_ids) == 6


def test_a_miss_ends_one_request_and_the_books_begin_anew(remote):
    # vllm#45658, #42995: one side alone is emptied, as no call does it.
    image, client = make_image(seed=12), remote.llm_engine.engine_core
    whole, = remote.generate(with_image("<image>", image), GREEDY, use_tqdm=False)
    client.call_utility("reset_mm_cache")
    with pytest.raises(ValueError, match="was left out as known, but it is not in this process"):
        remote.generate(with_image("<image>", image), GREEDY, use_tqdm=False)
    assert not client.mm_cache.sizes
    again, = remote.generate(with_image("<image>", image), GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids


def test_messages_that_cannot_be_sent_change_no_books(remote):
    client, image = remote.llm_engine.engine_core, make_image(seed=13)
    request = remote.llm_engine.processor.process_inputs("r", with_image("<image>", image), GREEDY)
    before = dict(client.mm_cache.sizes)
    request.mm_inputs = [request.mm_inputs[0] | {"odd": object()}]
    with pytest.raises(ValueError, match="odd"): client.add_request(request)
    assert client.mm_cache.sizes == before
    out, = remote.generate(with_image("<image>", image), GREEDY, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 6


# Plain functions.

@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_expanding_equals_replacing(ids, data):
    n = ids.count(0)
    spans = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=n, max_size=n))
    got, where = expand_placeholders(ids, 0, spans)
    left, plain = iter(spans), []
    for i in ids: plain += next(left) if i == 0 else [i]
    assert got == plain
    assert [got[o:o + n] for o, n in where] == spans
    assert all(a[0] + a[1] <= b[0] for a, b in zip(where, where[1:]))


def test_words_between_tiles_equal_transformers(families):
    theirs = families("idefics3").theirs
    for rows, columns in ((0, 0), (1, 1), (1, 4), (3, 2)):
        wanted = theirs.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, image_idx=0)
        assert tile_text(rows, columns, theirs.image_seq_len) == wanted


def test_many_at_once_with_an_event_loop(families, answers):
    # A cache for two images: everybody evicts everybody, some are refused, somebody resets.
    llava = families("llava")
    one = sum(t.nbytes for t in llava.processor().process("<image>", [make_image()]).mm_inputs[0].values())
    args = EngineArgs(model=llava.folder, num_gpu_blocks_override=64, use_tqdm_on_load=False, enable_multiprocessing=True,
                      mm_processor_cache_gb=2.5 * one / 2**30)
    async def ask(engine, i):
        prompt, images = prompts()[i % 5]
        if i % 11 == 7: prompt += "<image>"
        outs = [o async for o in engine.generate(with_image(prompt, *images), GREEDY, f"r{i}")]
        return outs[-1].outputs[0].token_ids
    async def story():
        engine = AsyncLLM.from_engine_args(args)
        try:
            async def reset():
                for _ in range(3):
                    await asyncio.sleep(0.05)
                    await engine.reset_mm_cache()
            *got, _ = await asyncio.gather(*[ask(engine, i) for i in range(60)], reset(), return_exceptions=True)
            await engine.check_health()
            engine.engine_core.mm_cache.check_invariants()
            await engine.engine_core.call_utility_async("check_invariants")
            assert len(engine.engine_core.mm_cache.sizes) <= 2 and engine.engine_core.mm_cache.num_left_out
            return got
        finally: engine.shutdown()
    for i, got in enumerate(asyncio.run(story())):
        if i % 11 == 7: assert isinstance(got, ValueError) and "image placeholders" in str(got)
        else: assert got == answers[i % 5], i
