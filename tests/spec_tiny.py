"""Proposers that are right, wrong or in between, on the tiny engine of `v1_tiny`.

Shared by the tests of drafts; no test by itself.
"""
import functools
import math
import random

import torch
from transformers import LlamaConfig
from v1_tiny import VOCAB, Engine, tiny_model

from minengine.config import ModelConfig, SpeculativeConfig
from minengine.model.checkpoint import fill_dummy_weights
from minengine.model.decoder import DecoderForCausalLM
from minengine.v1.core.scheduler import Scheduler
from minengine.v1.spec_decode.draft_model import DraftModelProposer
from minengine.v1.spec_decode.ngram_proposer import NgramProposer, num_drafts_wanted


class Oracle:
    "Knows each request's text, and lies as often as it is told to."

    def __init__(self, texts: dict[str, list[int]], k: int, max_model_len=128, lies=0.0, silent=0.0, seed=0):
        self.texts, self.k, self.max_model_len = texts, k, max_model_len
        self.lies, self.silent, self.rng = lies, silent, random.Random(seed)

    def initialize_kv_cache(self, num_blocks): pass
    def update(self, output): pass
    def draft_probs(self, req_ids, drafts): return [None] * len(drafts)

    def propose(self, batch, requests, seq_lens, token_ids):
        drafts = []
        for req_id, new in zip(batch.req_ids, token_ids):
            state = requests[req_id]
            wanted = num_drafts_wanted(state, self.k, self.max_model_len) if new else 0
            if self.rng.random() < self.silent: wanted = 0
            known = state.num_tokens
            truth = (self.texts.get(req_id, []) + [0] * 200)[known:known + wanted]
            drafts.append([(t + 1) % VOCAB if self.rng.random() < self.lies else t for t in truth])
        return drafts


@functools.cache
def small_model() -> tuple[ModelConfig, DecoderForCausalLM]:
    "One layer of random weights: guesses at random."
    hf_config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, architectures=["LlamaForCausalLM"])
    config = ModelConfig("small", hf_config, dtype="float32", max_model_len=128)
    model = DecoderForCausalLM(config)
    fill_dummy_weights(model, seed=1, std=0.3, use_tqdm=False)
    return config, model.requires_grad_(False).eval()


class SpecEngine(Engine):
    "The tiny engine with a proposer; its rows are checked with drafts in mind."

    def __init__(self, proposer=None, k=4, lookahead=None, max_n=2, draft_window=None, **config):
        super().__init__(**config)
        limits, model = self.config.scheduler_config, self.config.model_config
        if proposer == "ngram":
            self.config.speculative_config = SpeculativeConfig(k, prompt_lookup_max=max_n, prompt_lookup_min=1)
            proposer = NgramProposer(self.config)
        elif proposer in ("itself", "small"):
            draft, weights = (model, tiny_model()) if proposer == "itself" else small_model()
            if draft_window: draft = ModelConfig("short", draft.hf_config, dtype="float32", max_model_len=draft_window)
            self.config.speculative_config = SpeculativeConfig(k, model="draft", draft_model_config=draft)
            limits.num_lookahead_slots = k if lookahead is None else lookahead
            proposer = DraftModelProposer(self.config, weights)
        self.runner.proposer = proposer
        if proposer: proposer.initialize_kv_cache(self.config.cache_config.num_gpu_blocks)
        self.scheduler = Scheduler(limits, self.config.cache_config)

    @property
    def stats(self): return self.scheduler.spec_stats

    def check_mirror(self, order):
        batch = self.runner.batch
        batch.check_invariants()
        assert set(batch.req_ids) == set(order.num_scheduled_tokens)
        held = self.scheduler.kv_cache_manager.req_to_blocks
        for req_id, row in batch.req_id_to_index.items():
            request, state = self.scheduler.requests[req_id], self.runner.requests[req_id]
            known = state.prompt_token_ids + state.output_token_ids
            drafts = order.scheduled_spec_decode_tokens.get(req_id, [])
            assert known[:request.num_tokens] == list(request.all_token_ids)
            ahead = len(known) - request.num_tokens   # what it sampled just now
            end = request.num_computed_tokens + order.num_scheduled_tokens[req_id]
            assert 1 <= ahead <= len(drafts) + 1 if end >= request.num_tokens else ahead == 0
            if drafts: assert known[request.num_tokens:][:ahead - 1] == drafts[:ahead - 1]
            assert batch.tokens.token_ids[row, :len(known)].tolist() == known
            assert batch.block_table.row(row).tolist() == state.block_ids == [b.block_id for b in held[req_id]]
        if isinstance(self.runner.proposer, DraftModelProposer):
            self.runner.proposer.check_invariants()
            alive = set(self.scheduler.requests)
            assert set(self.runner.proposer.states) <= alive
        self.scheduler.check_invariants()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    "Probability of counts as far off as these; cells that are rare are taken together."
    counts, expected = counts.flatten().double(), expected.flatten().double()
    rare = expected < 5
    def pool(x): return torch.cat([x[~rare], x[rare].sum()[None]]) if rare.any() else x
    counts, expected = pool(counts), pool(expected)
    kept = expected > 0
    assert not counts[~kept].any(), "something came that has no probability"
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    df = int(kept.sum()) - 1
    # Wilson and Hilferty: the cube root is nearly normal.
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))
