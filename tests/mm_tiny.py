"""Tiny multimodal models in folders, as transformers writes them, and transformers itself as their oracle.

Shared by the tests of images; no test by itself. Each folder holds a config, random weights (seeded, float32),
a byte tokenizer with the family's image tokens and a chat template, and the image processor's settings:
`AutoModelForImageTextToText` and `AutoProcessor` load it, and so does this project.
"""
import json
from pathlib import Path

import numpy as np
import torch
from mm_tiny_qwen import make_processor, make_tiny_qwen2_5_vl
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast

VOCAB, MAX_LEN = 320, 512
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROWS_COLS = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}")


def make_tokenizer(image: str, extra: list[str] = (), add_bos=False, placeholder=None) -> PreTrainedTokenizerFast:
    """One token per byte (two newlines are one token, as in most vocabularies), then the special ones.

    `image` is the token of an image; `placeholder` what the chat template writes for one, if more than that.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    vocab[newline * 2] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD, image, *extra])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    assert tokenizer.get_vocab_size() <= VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=MAX_LEN,
        chat_template=TEMPLATE.replace("IMAGE", placeholder or image), extra_special_tokens={"image_token": image})


def text_fields(tokenizer, **fields) -> dict:
    "The decoder's part of a config: two layers of a small Llama."
    return dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_LEN, rms_norm_eps=1e-5, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id) | fields


@torch.no_grad()
def randomize(model, seed: int):
    "Numbers that let every weight matter: norms are not ones, biases not zeros, images as loud as words."
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2, generator=generator)
        elif "embed" in name and "patch" not in name: p.normal_(0, 0.2, generator=generator)
        else: p.normal_(0, 1.2 / p[0].numel() ** 0.5, generator=generator)


def save(folder: Path, model, processor) -> str:
    "Everything that the loaders want; returns the folder's name."
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def make_tiny_llava(folder: Path, seed=0, **fields) -> str:
    """LLaVA-1.5: a CLIP tower, 30 × 30 pixels in patches of 6: an image is 25 tokens, whatever its size.

    `fields` replace fields of the config, `text_config` and `vision_config` (dicts) parts of theirs.
    """
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    tokenizer = make_tokenizer("<image>", add_bos=True)
    text = text_fields(tokenizer, **dict(model_type="llama") | fields.pop("text_config", {}))
    vision = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=40, num_hidden_layers=3,
                  num_attention_heads=2, image_size=30, patch_size=6, projection_dim=16) | fields.pop("vision_config", {})
    fields = dict(image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=25,
                  vision_feature_layer=-2, tie_word_embeddings=False) | fields
    config = LlavaConfig(text_config=text, vision_config=vision, **fields)
    model = LlavaForConditionalGeneration(config).eval()
    randomize(model, seed)
    size = vision["image_size"]
    pixels = LlavaImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return save(Path(folder), model, LlavaProcessor(
        pixels, tokenizer, patch_size=vision["patch_size"], num_additional_image_tokens=1, chat_template=tokenizer.chat_template,
        vision_feature_select_strategy=config.vision_feature_select_strategy))


def make_tiny_idefics3(folder: Path, seed=0, longest_edge=48, architecture="Idefics3", **fields) -> str:
    """Idefics3 / SmolVLM: a SigLIP tower over tiles of 24 × 24 pixels, each 4 tokens after the pixel shuffle.

    An image is stretched to 48 pixels along its longer side: a square one becomes 2 × 2 tiles and one of the whole,
    a flat one 1 × 2 and one. `architecture="SmolVLM"`: that model; transformers' own SmolVLM processor needs packages
    that this project does not, so the folder's processor is Idefics3's, which does the same to images.
    """
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    marks = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *ROWS_COLS]
    tokenizer = make_tokenizer("<image>", marks)
    text = text_fields(tokenizer, **dict(model_type="llama", tie_word_embeddings=True) | fields.pop("text_config", {}))
    vision = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=24,
                  patch_size=6) | fields.pop("vision_config", {})
    fields = dict(image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2, tie_word_embeddings=True,
                  pad_token_id=tokenizer.pad_token_id) | fields
    config = getattr(transformers, f"{architecture}Config")(text_config=text, vision_config=vision, **fields)
    model = getattr(transformers, f"{architecture}ForConditionalGeneration")(config).eval()
    randomize(model, seed)
    tile = vision["image_size"]
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": longest_edge}, max_image_size={"longest_edge": tile})
    per_tile = (tile // vision["patch_size"] // config.scale_factor) ** 2
    return save(Path(folder), model, transformers.Idefics3Processor(
        pixels, tokenizer, image_seq_len=per_tile, chat_template=tokenizer.chat_template))


FAMILIES = {"llava": make_tiny_llava, "idefics3": make_tiny_idefics3, "qwen2_5_vl": make_tiny_qwen2_5_vl}


def make_image(width=40, height=40, seed=0) -> Image.Image:
    "A picture of a few coloured patches, no two seeds alike."
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.NEAREST)


class Oracle:
    "transformers' own processor and model, from a folder."

    def __init__(self, folder: str):
        is_qwen = config_of(folder)["model_type"] == "qwen2_5_vl"
        self.processor = (make_processor if is_qwen else AutoProcessor.from_pretrained)(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = self.processor.tokenizer

    def inputs(self, prompt: str, images=()) -> dict:
        "What the model takes; `prompt` has one placeholder for each image."
        return self.processor(text=prompt, images=list(images) or None, return_tensors="pt")

    @torch.no_grad()
    def logits(self, prompt: str, images=()) -> torch.Tensor:
        "[tokens, vocabulary], of the expanded prompt."
        return self.model(**self.inputs(prompt, images)).logits[0].float()

    @torch.no_grad()
    def greedy(self, prompt: str, images=(), max_tokens=8) -> list[int]:
        "The likeliest tokens after a prompt, past the end token, too."
        inputs = self.inputs(prompt, images)
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                                  eos_token_id=VOCAB + 1)   # no token: nothing ends early, nothing is forbidden
        return out[0, inputs["input_ids"].shape[1]:].tolist()


def config_of(folder: str) -> dict:
    "A folder's config.json."
    return json.loads((Path(folder) / "config.json").read_text())
