"""A tiny Qwen2.5-VL with random weights: model, tokenizer, chat template and image processor in one folder.

Shared by the tests of multimodal models; no test by itself.
"""
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
IDS = {name: 256 + i for i, name in enumerate(SPECIAL)}   # after one token for each byte
IMAGE_ID = IDS["<|image_pad|>"]

# Each role's turn between <|im_start|> and <|im_end|>; an image is a placeholder in brackets.
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

# Patches of 4 x 4 pixels, 2 x 2 of them are one token, 2 x 2 tokens are one window.
# Blocks 0, 2 and 3 look within windows, block 1 at everything.
VISION = dict(depth=4, hidden_size=32, intermediate_size=40, num_heads=2, patch_size=4, spatial_merge_size=2,
              temporal_patch_size=2, window_size=16, fullatt_block_indexes=[1], out_hidden_size=64,
              initializer_range=0.15)
TEXT = dict(vocab_size=256 + len(SPECIAL), hidden_size=64, intermediate_size=80, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6,
            initializer_range=0.15, bos_token_id=IDS["<|endoftext|>"], eos_token_id=IDS["<|im_end|>"],
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]))
PREPROCESSOR = dict(image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor",
                    patch_size=4, merge_size=2, temporal_patch_size=2,
                    size={"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 48})   # 1 to 48 tokens


def make_tokenizer() -> PreTrainedTokenizerFast:
    "One token for each byte, then the special ones."
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=TEXT["max_position_embeddings"])


def make_config(text_config: dict | None = None, vision_config: dict | None = None, **fields) -> Qwen2_5_VLConfig:
    "The config; `fields` replace fields of it, the two dicts parts of its parts."
    return Qwen2_5_VLConfig(
        text_config=TEXT | (text_config or {}), vision_config=VISION | (vision_config or {}), **dict(
            image_token_id=IMAGE_ID, video_token_id=IDS["<|video_pad|>"],
            vision_start_token_id=IDS["<|vision_start|>"], vision_end_token_id=IDS["<|vision_end|>"],
            bos_token_id=IDS["<|endoftext|>"], eos_token_id=IDS["<|im_end|>"]) | fields)


def make_model(config: Qwen2_5_VLConfig | None = None, seed=0) -> Qwen2_5_VLForConditionalGeneration:
    "A random model of transformers; norms and biases are random, too."
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config or make_config()).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1: p.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    return model


def make_tiny_qwen2_5_vl(folder: Path, seed=0, **fields) -> str:
    """Qwen2.5-VL: an image of any size in patches of 4 × 4 pixels, 2 × 2 of them a token: 1 to 48 tokens, more if very long.

    `fields` are those of `make_config`. `AutoProcessor` wants torchvision for videos: `make_processor` does not.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    make_model(make_config(**fields), seed).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IDS["<|im_end|>"]}))
    return str(folder)


class ImagesOnly(Qwen2_5_VLProcessor):
    "Transformers' processor without its part for videos, which needs torchvision."

    def check_argument_for_proper_class(self, name, value):
        if name != "video_processor": return super().check_argument_for_proper_class(name, value)


def make_processor(folder: str) -> Qwen2_5_VLProcessor:
    "What `AutoProcessor` gives for a folder where torchvision is installed."
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return ImagesOnly(AutoImageProcessor.from_pretrained(folder), tokenizer, None)
