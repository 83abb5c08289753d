"""A two-layer Llama with random weights, and hand-made metadata for V0's worker side.

Shared by the tests of V0's sampler, runner and worker; no test by itself.
"""
import functools
import itertools
import random

import torch
from transformers import LlamaConfig

from minengine.attention.kv_cache import make_kv_cache
from minengine.attention.metadata import AttentionMetadata, set_forward_context
from minengine.config import (
    CacheConfig, CompilationConfig, DeviceConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig)
from minengine.model.checkpoint import fill_dummy_weights
from minengine.model.decoder import DecoderForCausalLM
from minengine.sampling_params import SamplingParams
from minengine.v0.sequence import SequenceData, SequenceGroupMetadata, SequenceGroupState

VOCAB, BLOCK, LAYERS = 97, 4, 2


def tiny_config(max_model_len=128, num_blocks=64, budget=128, max_num_seqs=16, enforce_eager=False,
                backend="cpu", seed=0, use_cudagraph=False, **cache) -> VllmConfig:
    hf_config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, architectures=["LlamaForCausalLM"])
    return VllmConfig(
        ModelConfig("tiny", hf_config, dtype="float32", max_model_len=max_model_len,
                    enforce_eager=enforce_eager, seed=seed),
        CacheConfig(BLOCK, num_gpu_blocks=num_blocks, **cache),
        SchedulerConfig(budget, max_num_seqs=max_num_seqs, max_model_len=max_model_len),
        device_config=DeviceConfig("cpu", backend), load_config=LoadConfig("dummy", use_tqdm=False),
        compilation_config=CompilationConfig(use_cudagraph=use_cudagraph))


@functools.cache
def tiny_model() -> DecoderForCausalLM:
    "Weights large enough that the next token depends on the whole prefix."
    model = DecoderForCausalLM(tiny_config().model_config)
    fill_dummy_weights(model, seed=0, std=0.3, use_tqdm=False)
    return model.requires_grad_(False).eval()


@torch.inference_mode()
def dense_logits(tokens: list[int]) -> torch.Tensor:
    "One plain forward of all tokens: logits at every position."
    pools = [make_kv_cache(16, 16, 2, 8) for _ in range(LAYERS)]
    metadata = AttentionMetadata.from_lists([len(tokens)], [len(tokens)], [list(range(16))], 16)
    with set_forward_context(metadata, pools, "reference"):
        hidden = tiny_model()(torch.tensor(tokens), torch.arange(len(tokens)))
    return tiny_model().compute_logits(hidden)


def greedy(tokens: list[int], num_tokens: int) -> list[int]:
    "The tokens that follow, one dense forward for each."
    tokens = list(tokens)
    for _ in range(num_tokens): tokens.append(int(dense_logits(tokens)[-1].argmax()))
    return tokens[-num_tokens:]


class Seq:
    "A sequence, its blocks, and the metadata of its next step."
    seq_ids = itertools.count()

    def __init__(self, name, prompt, blocks, params=None, index=0):
        self.name, self.data, self.blocks = name, SequenceData(list(prompt)), list(blocks)
        self.params = params or SamplingParams(temperature=0)
        self.seq_id, self.data.index = next(Seq.seq_ids), index
        self.prompt = list(prompt)

    @property
    def output(self) -> list[int]: return list(self.data.output_token_ids)

    def fork(self, name, blocks, index) -> "Seq":
        child = Seq(name, self.prompt, blocks, self.params, index)
        child.data = self.data.copy()
        child.data.index = index
        return child

    def restart(self): self.data.reset_state_for_recompute()

    def told(self, chunk=None, hit=(), num_steps=1) -> SequenceGroupMetadata:
        left = self.data.get_num_uncomputed_tokens()
        is_prompt = left > 1 or not self.data.get_output_len()
        self.chunk = (chunk or left) if is_prompt else 1
        return SequenceGroupMetadata(
            self.name, is_prompt, {self.seq_id: self.data}, self.params, {self.seq_id: list(self.blocks)},
            do_sample=self.chunk == left, token_chunk_size=self.chunk, computed_block_nums=list(hit) or None,
            state=SequenceGroupState(num_steps))

    def update(self, token_ids):
        "What an engine does with the tokens of one step, or of a burst."
        self.data.update_num_computed_tokens(self.chunk)
        for n, token_id in enumerate(token_ids):
            if n: self.data.update_num_computed_tokens(1)
            self.data.append_token_id(token_id, 0.0)


def prefills_first(told): return sorted(told, key=lambda one: not one.is_prompt)


def tokens_of(outputs, i) -> list[int]:
    "The tokens that group `i` got, over all model steps."
    return [sample.output_token for output in outputs for sample in output[i].samples]


def random_prompt(rng: random.Random, low=1, high=30) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(low, high))]
