"""A tiny random Qwen2.5-VL: positions, tower and logits of transformers, however the prompt is cut."""
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F
from mm_tiny import Oracle, make_image
from mm_tiny_qwen import IMAGE_ID, TEXT, VISION, make_config, make_model, make_tiny_qwen2_5_vl
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.metadata import AttentionMetadata, set_forward_context
from minengine.config import EngineArgs, ModelConfig
from minengine.model.checkpoint import create_engine_config, load_model
from minengine.model.decoder import get_model_class
from minengine.model.mrope import get_mrope_input_positions, slice_mrope_positions
from minengine.model.qwen2_5_vl import (
    MAX_PIXELS, Qwen2_5_VLForConditionalGeneration, longest_image, patch_positions, window_order)
from minengine.llm import LLM
from minengine.parallel import tensor_parallel_group
from minengine.sampling_params import SamplingParams
from minengine.v1.messages import PlaceholderRange

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
BLOCK_SIZE = 4
# (prompt, sizes of its images in pixels)
PROMPTS = {
    "no image": ("What is there?", []),
    "one": (f"a{IMAGE}?", [(20, 30)]),
    "one token": (f"{IMAGE} tiny", [(8, 8)]),
    "first and last": (IMAGE, [(40, 24)]),
    "two of one size": (f"{IMAGE}and{IMAGE}", [(24, 40), (24, 40)]),
    "three sizes": (f"a {IMAGE} b{IMAGE}{IMAGE} c", [(64, 16), (8, 56), (48, 48)]),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen") / "tiny")


@pytest.fixture(scope="module")
def oracle(folder) -> Oracle: return Oracle(folder)


@pytest.fixture(scope="module")
def model(folder): return load(folder)


def load(folder, **args) -> Qwen2_5_VLForConditionalGeneration:
    "Through the front door."
    model = load_model(create_engine_config(EngineArgs(folder, use_tqdm_on_load=False, **args)))
    assert isinstance(model, Qwen2_5_VLForConditionalGeneration)
    return model


def ours(theirs, pack=False, dtype="float32") -> Qwen2_5_VLForConditionalGeneration:
    "The weights of a model of transformers."
    model = get_model_class(theirs.config)(ModelConfig("tiny", theirs.config, dtype=dtype)).eval()
    model.load_weights(theirs.state_dict().items())
    model.process_weights_after_loading(pack)
    return model


def images_of(sizes): return [make_image(w, h, seed) for seed, (w, h) in enumerate(sizes)]


def split(inputs) -> tuple[list[int], list[dict], list[PlaceholderRange]]:
    "Token ids, items and spans, from what transformers' processor makes of a prompt."
    ids, items, spans, end = inputs["input_ids"][0].tolist(), [], [], 0
    grids = inputs.get("image_grid_thw", [])
    pixels = inputs["pixel_values"].split([int(g.prod()) for g in grids]) if len(grids) else []
    for grid, part in zip(grids, pixels):
        items.append({"pixel_values": part, "image_grid_thw": grid})
        spans.append(PlaceholderRange(ids.index(IMAGE_ID, end), len(part) // 4))
        end = spans[-1].offset + spans[-1].length
    return ids, items, spans


def random_items(model, grids, seed=0) -> list[dict]:
    "Noise of given grids."
    generator = torch.Generator().manual_seed(seed)
    size = model.visual.patch_embed.proj.input_size
    return [{"pixel_values": torch.randn(math.prod(grid), size, generator=generator),
             "image_grid_thw": torch.tensor(grid)} for grid in grids]


class Sequence:
    "A prompt with images in a model, computed in pieces."

    def __init__(self, model, ids, items, spans, backend="reference", max_len=256):
        self.model, self.backend, self.done = model, backend, 0
        self.positions, self.delta = model.get_mrope_input_positions(ids, items, spans)
        self.embeds = model.get_input_embeddings(torch.tensor(ids)).clone()
        for span, rows in zip(spans, model.get_multimodal_embeddings(items)):
            self.embeds[span.offset:span.offset + span.length] = rows
        decoder = model.language_model
        attention = [layer.self_attn.attn for layer in decoder.model.layers]
        self.blocks = list(range(0, 2 * max_len // BLOCK_SIZE, 2))   # every second block of the pool
        self.caches = [make_kv_cache(2 * len(self.blocks), BLOCK_SIZE, a.num_kv_heads, a.head_dim,
                                     decoder.model.norm.weight.dtype) for a in attention]

    def compute(self, n) -> torch.Tensor:
        "Logits of the next `n` tokens of the prompt."
        return self.run(self.embeds[self.done:self.done + n])

    def decode(self, token) -> torch.Tensor:
        "Logits behind one more token."
        return self.run(self.model.get_input_embeddings(torch.tensor([token])))

    def run(self, embeds):
        n, end = len(embeds), self.done + len(embeds)
        positions = slice_mrope_positions(self.positions, self.delta, self.done, end)
        metadata = AttentionMetadata.from_lists([n], [end], [self.blocks[:-(-end // BLOCK_SIZE)]], BLOCK_SIZE)
        with set_forward_context(metadata, self.caches, self.backend):
            hidden = self.model(None, positions, embeds)
        self.done = end
        return self.model.compute_logits(hidden)


def close(got, wanted, atol=1e-4): torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-5)


# Positions

def random_prompt(rng, merge=2):
    "Types of tokens (1: image), grids and spans; transformers wants some text between images."
    types, grids, spans = [0] * rng.choice([0, 1, 5]), [], []
    for i in range(rng.randrange(5)):
        if i: types += [0] * rng.randrange(1, 7)
        rows, columns = rng.randrange(1, 9), rng.randrange(1, 9)
        grids.append([1, merge * rows, merge * columns])
        spans.append(PlaceholderRange(len(types), rows * columns))
        types += [1] * (rows * columns)
    types += [0] * rng.choice([0, 1, 9])
    return (types or [0]), grids, spans


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_positions_equal_transformers(merge):
    with torch.device("meta"): theirs = make_model(make_config(vision_config=dict(spatial_merge_size=merge))).model
    rng, seen = random.Random(merge), set()
    for _ in range(300):
        types, grids, spans = random_prompt(rng, merge)
        got, delta = get_mrope_input_positions(types, grids, spans, merge)
        wanted, wanted_delta = theirs.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long), torch.tensor([types]), torch.tensor(grids) if grids else None)
        assert torch.equal(got, wanted[:, 0]) and delta == wanted_delta.item()
        assert got.dtype == torch.int64 and delta <= 0 and got.max() < len(types)
        seen.add(len(grids))
    assert seen == {0, 1, 2, 3, 4}


def test_positions_of_any_stretch():
    "A chunk, the rest of a prompt and recomputed answers read from one table and one number."
    rng = random.Random(0)
    for _ in range(20):
        types, grids, spans = random_prompt(rng)
        table, delta = get_mrope_input_positions(types, grids, spans)
        n = len(types)
        whole = slice_mrope_positions(table, delta, 0, n + 10)
        assert torch.equal(whole[:, :n], table)
        assert whole[:, n:].tolist() == [[p + delta for p in range(n, n + 10)]] * 3
        assert whole[0, n] == table.max() + 1
        for _ in range(20):
            start, end = sorted(rng.choices(range(n + 11), k=2))
            assert torch.equal(slice_mrope_positions(table, delta, start, end), whole[:, start:end])


def test_a_prefix_has_its_positions_whatever_follows():
    "What block sharing rests on."
    rng = random.Random(1)
    for _ in range(50):
        types, grids, spans = random_prompt(rng)
        table, _ = get_mrope_input_positions(types, grids, spans)
        for k in range(len(spans) + 1):
            end = spans[k].offset if k < len(spans) else len(types)
            part, _ = get_mrope_input_positions(types[:end], grids[:k], spans[:k])
            assert torch.equal(part, table[:, :end])


def test_images_side_by_side_stay_two():
    "Transformers sees one image in a run of placeholders; spans know better."
    table, delta = get_mrope_input_positions(
        range(12), [[1, 4, 4], [1, 4, 6]], [PlaceholderRange(1, 4), PlaceholderRange(5, 6)])
    assert table.tolist() == [[0, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 6],
                              [0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 6],
                              [0, 1, 2, 1, 2, 3, 4, 5, 3, 4, 5, 6]]
    assert delta == -5


@pytest.mark.parametrize("grids, spans, words", [
    ([[1, 4, 6]], [], "1 grids for 0 images"),
    ([[1, 4, 6]], [(2, 5)], "5 placeholders for 2 × 3 image tokens"),
    ([[1, 4, 6]], [(5, 6)], "an image at 5, 6 tokens long, is not between 0 and 10"),
    ([[1, 4, 6]], [(-1, 6)], "an image at -1, 6 tokens long, is not between 0 and 10"),
    ([[1, 4, 6], [1, 2, 2]], [(0, 6), (5, 1)], "an image at 5, 1 tokens long, is not between 6 and 10"),
    ([[2, 4, 6]], [(0, 12)], "one frame of patches that merge 2 × 2, got a grid of 2 × 4 × 6"),
    ([[1, 4, 5]], [(0, 5)], "got a grid of 1 × 4 × 5"),
    ([[1, 0, 2]], [(0, 0)], "got a grid of 1 × 0 × 2"),
])
def test_spans_that_do_not_fit(grids, spans, words):
    with pytest.raises(ValueError, match=words):
        get_mrope_input_positions(range(10), grids, [PlaceholderRange(*span) for span in spans])


# The tower

def test_windows_of_an_image():
    for rows, columns, window in [(1, 1, 2), (2, 2, 2), (4, 6, 2), (5, 7, 2), (5, 7, 4), (3, 9, 8), (4, 1, 3)]:
        order, groups = window_order(rows, columns, window)
        assert sorted(order.tolist()) == list(range(rows * columns))
        assert sum(n * size for n, size in groups) == rows * columns
        assert len({size for _, size in groups}) == len(groups) <= 4
        start, seen = 0, set()
        for n, size in groups:
            for part in order[start:start + n * size].view(n, size).tolist():
                windows = {(i // columns // window, i % columns // window) for i in part}
                assert len(windows) == 1 and part == sorted(part)
                seen |= windows
            start += n * size
        assert len(seen) == math.ceil(rows / window) * math.ceil(columns / window) == sum(n for n, _ in groups)


def test_patches_are_where_the_processor_puts_them(folder, oracle):
    "A picture whose pixels say where they are, cut by transformers' image processor."
    rows, columns = 3, 5
    height, width = rows * 8, columns * 8
    picture = torch.stack([torch.arange(height)[:, None].expand(-1, width), torch.arange(width).expand(height, -1),
                           torch.zeros(height, width)]).to(torch.uint8)
    cut = oracle.processor.image_processor([picture.numpy()], do_rescale=False, do_normalize=False, do_resize=False,
                                           input_data_format="channels_first", return_tensors="pt")["pixel_values"]
    corners = cut.view(-1, 3, 2, 4, 4)[:, :2, 0, 0, 0] // 4
    assert torch.equal(corners.long(), patch_positions(rows, columns, merge=2))


GRIDS = [(1, 2, 2), (1, 4, 4), (1, 2, 8), (1, 6, 10), (1, 14, 4), (1, 8, 8)]


@pytest.mark.parametrize("changes", [
    {}, dict(window_size=8), dict(window_size=24), dict(window_size=1000), dict(fullatt_block_indexes=[]),
    dict(fullatt_block_indexes=[0, 1, 2, 3]), dict(spatial_merge_size=1, window_size=12),
    dict(patch_size=14, window_size=112, hidden_size=48, num_heads=3)], ids=str)
def test_the_tower_equals_transformers(changes):
    theirs = make_model(make_config(vision_config=changes))
    model = ours(theirs)
    grids = GRIDS + GRIDS[:2] + GRIDS[-1:]   # some sizes twice, apart from each other
    items = random_items(model, grids)
    wanted = theirs.model.get_image_features(
        torch.cat([item["pixel_values"] for item in items]), torch.tensor(grids)).pooler_output
    assert min(x.std() for x in wanted if len(x) > 1) > 0.1
    for packed in (False, True):
        model.process_weights_after_loading(packed)
        got = model.get_multimodal_embeddings(items)
        for rows, theirs_rows in zip(got, wanted, strict=True): close(rows, theirs_rows)
    assert [model.num_image_tokens(model.config, item) for item in items] == [len(rows) for rows in wanted]


def test_windows_and_the_whole_are_both_felt():
    "One patch changes: nearby tokens feel it through windows, far ones only through the block that sees all."
    for full, far in ([1], True), ([], False):
        model = ours(make_model(make_config(vision_config=dict(fullatt_block_indexes=full))))
        item, = random_items(model, [(1, 8, 8)])
        before, = model.get_multimodal_embeddings([item])
        item["pixel_values"][0] += 1   # of token 0, which is in the window of tokens 0, 1, 4, 5
        after, = model.get_multimodal_embeddings([item])
        felt = ((before - after).abs().amax(1) > 1e-4).nonzero().flatten().tolist()
        assert felt == (list(range(16)) if far else [0, 1, 4, 5])


def test_no_mask_and_no_more_than_a_window(model, monkeypatch):
    "Windows cost what windows cost: small calls without a mask, one for each size of window."
    calls, real = [], F.scaled_dot_product_attention
    def spy(query, key, value, attn_mask=None, **kw):
        assert attn_mask is None and not kw
        calls.append((len(query), query.shape[-2]))
        return real(query, key, value)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model.get_multimodal_embeddings(random_items(model, [(1, 10, 14)] * 3))   # 5 × 7 tokens, windows of 2 × 2
    windows = [(3 * 1, 4 * 1), (3 * (2 + 3), 4 * 2), (3 * 6, 4 * 4)]   # corner, edges, inside; of three images
    assert calls == windows + [(3, 4 * 35)] + windows * 2   # block 1 sees all


def test_one_call_for_each_size(model, monkeypatch):
    seen, forward = [], model.visual.forward
    monkeypatch.setattr(model.visual, "forward", lambda pixels, *size: seen.append((len(pixels), size)) or forward(pixels, *size))
    items = random_items(model, [(1, 4, 4), (1, 2, 8), (1, 4, 4), (1, 8, 2), (1, 4, 4)])
    got = model.get_multimodal_embeddings(items)
    assert seen == [(3, (2, 2)), (1, (1, 4)), (1, (4, 1))]   # 1 × 4 is not 4 × 1
    alone = [model.get_multimodal_embeddings([item])[0] for item in items]
    for a, b in zip(got, alone): close(a, b, atol=1e-5)
    assert model.get_multimodal_embeddings([]) == []


@pytest.mark.parametrize("rows, grid, words", [
    (16, [1, 4, 5], "got a grid of 1 × 4 × 5"),
    (32, [2, 4, 4], "one frame of patches that merge 2 × 2, got a grid of 2 × 4 × 4"),
    (15, [1, 4, 4], r"the tower takes pixel_values \(16, 96\) for a grid of \[1, 4, 4\], got \(15, 96\)"),
    (16, [4, 4], r"image_grid_thw must be three numbers, got \[4, 4\]"),
])
def test_items_that_the_tower_does_not_take(model, rows, grid, words):
    item = {"pixel_values": torch.zeros(rows, 96), "image_grid_thw": torch.tensor(grid)}
    with pytest.raises(ValueError, match=words): model.num_image_tokens(model.config, item)
    with pytest.raises(ValueError, match=words): model.get_multimodal_embeddings([item])


# The whole model

@pytest.mark.parametrize("name", PROMPTS)
def test_logits_equal_transformers(oracle, model, name):
    prompt, sizes = PROMPTS[name]
    images = images_of(sizes)
    ids, items, spans = split(oracle.inputs(prompt, images))
    assert len(items) == len(sizes)
    wanted = oracle.logits(prompt, images)
    assert wanted.std() > 0.1
    for backend in ("reference", "cpu"):
        close(Sequence(model, ids, items, spans, backend).compute(len(ids)), wanted)


def test_packed_or_not_the_logits_are_the_same(oracle, folder, model):
    prompt, sizes = PROMPTS["three sizes"]
    inputs = split(oracle.inputs(prompt, images_of(sizes)))
    plain = load(folder, pack_cpu_weights=False)
    assert not plain.packed
    n = len(inputs[0])
    close(Sequence(model, *inputs).compute(n), Sequence(plain, *inputs).compute(n))


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_cut_anywhere(oracle, model, chunk):
    "Also inside of images: the same logits."
    prompt, sizes = PROMPTS["three sizes"]
    ids, items, spans = split(oracle.inputs(prompt, images_of(sizes)))
    sequence, logits = Sequence(model, ids, items, spans, "cpu"), []
    while sequence.done < len(ids): logits.append(sequence.compute(chunk))
    close(torch.cat(logits), oracle.logits(prompt, images_of(sizes)))


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_transformers(oracle, model, name):
    "Each token behind the prompt stands at its index and `delta`."
    prompt, sizes = PROMPTS[name]
    ids, items, spans = split(oracle.inputs(prompt, images_of(sizes)))
    sequence = Sequence(model, ids, items, spans)
    tokens = [int(sequence.compute(len(ids))[-1].argmax())]
    while len(tokens) < 12: tokens.append(int(sequence.decode(tokens[-1])[-1].argmax()))
    assert tokens == oracle.greedy(prompt, images_of(sizes), max_tokens=12)


def test_delta_matters(oracle, model):
    "Without it, decoding gives other logits: the test above can fail."
    prompt, sizes = PROMPTS["three sizes"]
    inputs = split(oracle.inputs(prompt, images_of(sizes)))
    right, wrong = Sequence(model, *inputs), Sequence(model, *inputs)
    assert right.delta < 0
    for sequence in (right, wrong): sequence.compute(len(inputs[0]))
    wrong.delta = 0
    assert (right.decode(5) - wrong.decode(5)).abs().max() > 0.05


def test_text_alone_may_have_one_row_of_positions(oracle, model):
    ids = oracle.tokenizer("some words").input_ids
    decoder, n = model.language_model, len(ids)
    metadata = AttentionMetadata.from_lists([n], [n], [list(range(n))], 1)
    hidden = []
    for positions in (torch.arange(n), torch.arange(n).expand(3, -1)):
        caches = [make_kv_cache(n, 1, a.num_kv_heads, a.head_dim, torch.float32)
                  for a in (layer.self_attn.attn for layer in decoder.model.layers)]
        with set_forward_context(metadata, caches, "reference"): hidden.append(model(torch.tensor(ids), positions))
    assert torch.equal(*hidden)
    close(model.compute_logits(hidden[0]), oracle.logits("some words"))


def test_half_precision():
    "bfloat16: rounded where transformers rounds, logits within two percent of their spread."
    theirs = make_model().to(torch.bfloat16)
    model = ours(theirs, dtype="bfloat16")
    item, = random_items(model, [(1, 6, 8)])
    types = [0] * 5 + [1] * 12 + [0] * 6
    ids = [IMAGE_ID if t else 3 + i for i, t in enumerate(types)]
    wanted = theirs(input_ids=torch.tensor([ids]), mm_token_type_ids=torch.tensor([types]), image_grid_thw=torch.tensor(
        [[1, 6, 8]]), pixel_values=item["pixel_values"].bfloat16()).logits[0].float()
    got = Sequence(model, ids, [item], [PlaceholderRange(5, 12)]).compute(len(ids))
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() < 0.02 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("budget", [16, 256])
def test_greedy_tokens_through_the_engine(oracle, folder, budget):
    "All prompts at once, images cut by the step's budget; then again, from blocks and rows that are there."
    llm = LLM(folder, engine="v1", max_num_batched_tokens=budget, max_num_seqs=6, num_gpu_blocks_override=96,
              use_tqdm_on_load=False)
    cases = PROMPTS | {"a strip, longer than the pixels say": (f"x{IMAGE}y", [(8, 1600)])}
    prompts, wanted = [], []
    for prompt, sizes in cases.values():
        images = images_of(sizes)
        prompts.append({"prompt": prompt} | ({"multi_modal_data": {"image": images}} if images else {}))
        wanted.append(oracle.greedy(prompt, images, max_tokens=8))
    assert oracle.inputs(f"x{IMAGE}y", images_of([(8, 1600)]))["image_grid_thw"].prod() // 4 > 48
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(2):
        got = llm.generate(prompts, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in got] == wanted


# Weights and configs

def weights_of(theirs): return {k: v.clone() for k, v in theirs.state_dict().items()}


def test_missing_unexpected_and_misshapen_weights_are_named():
    theirs = make_model()
    model = get_model_class(theirs.config)(ModelConfig("tiny", theirs.config, dtype="float32"))
    weights = weights_of(theirs)
    for name, words in [("model.visual.blocks.2.attn.qkv.bias", "missing: visual.blocks.2.attn.qkv.bias"),
                        ("model.visual.blocks.3.mlp.up_proj.weight", "missing: visual.blocks.3.mlp.up_proj.weight"),
                        ("model.visual.merger.ln_q.weight", "missing: visual.merger.ln_q.weight"),
                        ("model.language_model.layers.1.self_attn.k_proj.bias",
                         "missing: model.layers.1.self_attn.k_proj.bias")]:
        part = weights_of(theirs)
        del part[name]
        with pytest.raises(ValueError, match=words): model.load_weights(part.items())
    for name in ("visual.blocks.4.norm1.weight", "visual.merger.mlp.4.bias", "model.layers.2.mlp.up_proj.weight"):
        with pytest.raises(ValueError, match=f"unexpected: {name}"):
            model.load_weights((weights | {name: torch.zeros(1)}).items())
    for name, shape in [("visual.patch_embed.proj.weight", (32, 3, 2, 4, 5)), ("visual.merger.mlp.0.weight", (128, 127)),
                        ("visual.blocks.0.norm1.weight", (31,)), ("visual.blocks.0.mlp.gate_proj.bias", (41,))]:
        with pytest.raises(ValueError, match=f"{name}: .*{shape[-1] if len(shape) < 3 else 3 * 2 * 4 * 5}"):
            model.load_weights((weights | {f"model.{name}": torch.zeros(shape)}).items())
    model.load_weights(weights.items())
    model.process_weights_after_loading(True)
    if model.packed:
        with pytest.raises(ValueError, match="load before packing"): model.load_weights([])


@pytest.mark.parametrize("rename", [
    lambda name: name,   # as transformers 5 holds them
    lambda name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model."),   # as files have them
], ids=["in memory", "in files"])
def test_names_of_both_generations(rename):
    theirs = make_model()
    model = get_model_class(theirs.config)(ModelConfig("tiny", theirs.config, dtype="float32")).eval()
    used = model.load_weights({rename(k): v for k, v in theirs.state_dict().items()}.items())
    assert len(used) == len(theirs.state_dict())
    item, = random_items(model, [(1, 4, 6)])
    wanted, = theirs.model.get_image_features(item["pixel_values"], torch.tensor([[1, 4, 6]])).pooler_output
    close(model.get_multimodal_embeddings([item])[0], wanted)


def test_a_tied_head(tmp_path):
    folder = make_tiny_qwen2_5_vl(tmp_path, tie_word_embeddings=True)
    model, oracle = load(folder), Oracle(folder)
    assert model.language_model.tied
    prompt, sizes = PROMPTS["one"]
    ids, items, spans = split(oracle.inputs(prompt, images_of(sizes)))
    close(Sequence(model, ids, items, spans).compute(len(ids)), oracle.logits(prompt, images_of(sizes)))


def test_a_config_as_on_the_hub(tmp_path):
    "The text's fields at the top, positions under `mrope`: as files before transformers 5 have them."
    flat = {k: v for k, v in TEXT.items() if k not in ("rope_parameters", "initializer_range")} | dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", hidden_act="silu",
        rope_theta=500.0, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, image_token_id=IMAGE_ID,
        tie_word_embeddings=True, use_sliding_window=False, sliding_window=128, max_window_layers=1,
        vision_config=VISION | {"in_chans": 3, "spatial_patch_size": 4, "hidden_act": "silu"}, torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(flat))
    model = load(str(tmp_path), load_format="dummy")
    config, decoder = model.config, model.language_model
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.max_model_len) == (2, 2, 16, 512)
    assert decoder.tied and decoder.model.rotary.sections == [2, 3, 3] * 2
    assert all(layer.self_attn.attn.sliding_window is None for layer in decoder.model.layers)
    item, = random_items(model, [(1, 4, 4)])
    ids = [7] + [IMAGE_ID] * 4 + [9]
    logits = Sequence(model, ids, [item], [PlaceholderRange(1, 4)]).compute(6)
    assert logits.isfinite().all() and logits.std() > 0


@pytest.mark.parametrize("changes, words", [
    (dict(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
    (dict(out_hidden_size=32), "out_hidden_size must be 64, got 32"),
    (dict(hidden_size=36), "hidden_size must be 32, got 36"),
    (dict(window_size=7), "window_size must be at least 8, one token, got 7"),
    (dict(fullatt_block_indexes=[1, 4]), r"fullatt_block_indexes \[4\] for 4 blocks"),
])
def test_towers_that_are_not_computed_here(changes, words):
    config = make_config(vision_config=changes)
    with pytest.raises(ValueError, match=words): get_model_class(config)(ModelConfig("tiny", config))


def test_every_rank_has_the_whole_tower():
    "The decoder is shared out between ranks; the tower talks to nobody."
    theirs = make_model()
    item, = random_items(ours(theirs), [(1, 6, 6)])
    wanted, = ours(theirs).get_multimodal_embeddings([item])
    for rank in range(2):
        with tensor_parallel_group(rank, 2): model = ours(theirs)
        assert model.language_model.model.layers[0].self_attn.qkv_proj.num_heads == 2
        close(model.get_multimodal_embeddings([item])[0], wanted, atol=0)


# How long an image can be

@pytest.mark.parametrize("most", [48, 200, 1280])
def test_no_image_is_longer(most):
    "Every shape that transformers' image processor takes, against the bound; and the bound is not far off."
    side, longest = 8, 0
    rng = random.Random(most)
    sizes = [(h, w) for h in range(1, 60) for w in range(1, 60)] + [(h, 200 * h) for h in range(1, 80)]
    sizes += [(rng.randrange(1, 3000), rng.randrange(1, 3000)) for _ in range(2000)]
    for height, width in sizes:
        if max(height, width) > 200 * min(height, width): continue
        h, w = smart_resize(height, width, side, min_pixels=4 * side**2, max_pixels=most * side**2)
        longest = max(longest, h * w // side**2)
    bound = longest_image(most * side**2, side)
    assert 0.95 * bound <= longest <= bound


def test_the_processors_settings_are_heeded(folder, tmp_path):
    def tokens(place=folder, **args):
        config = create_engine_config(EngineArgs(place, use_tqdm_on_load=False, load_format="dummy", **args)).model_config
        return Qwen2_5_VLForConditionalGeneration.max_image_tokens(config)
    assert tokens() == longest_image(48 * 64, 8) == 97
    assert tokens(max_model_len=64) == 64
    assert tokens(mm_processor_kwargs={"max_pixels": 300 * 64}) == 300
    (tmp_path / "config.json").write_text(make_config().to_json_string())
    assert tokens(str(tmp_path)) == min(MAX_PIXELS // 64, 512)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 222 * 64}))
    assert tokens(str(tmp_path)) == 222
