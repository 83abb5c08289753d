"""A model that sees, without a network: each embedding says what it stands for, so that a wrong one is noticed.

Shared by the tests of images in V1's core and worker; no test by itself. A word's embedding is (token, 0, 0), a row
of an image's (-1, which image, which row). "KV" is the embedding and the position, kept by slot. Before a token is
sampled, the whole prefix is read back through the block table and compared with what it must be; the next token is a
digest of it.
"""
from hashlib import blake2b

import numpy as np
import torch
from transformers import LlamaConfig

from minengine.attention.metadata import get_forward_context
from minengine.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from minengine.sampling_params import SamplingParams
from minengine.v1.core.scheduler import Scheduler
from minengine.v1.messages import PlaceholderRange
from minengine.v1.request import Request, RequestStatus
from minengine.v1.worker.encoder_runner import EncoderRunner
from minengine.v1.worker.model_runner import ModelRunner

VOCAB, IMAGE_TOKEN = 97, 96


def fake_config(max_model_len=128, block_size=4, num_blocks=64, budget=32, max_num_seqs=8, caching=True,
                encoder_budget=32, encoder_cache=None) -> VllmConfig:
    hf_config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096)
    return VllmConfig(
        ModelConfig("fake", hf_config, dtype="float32", max_model_len=max_model_len),
        CacheConfig(block_size=block_size, enable_prefix_caching=caching, num_gpu_blocks=num_blocks, num_preallocate_tokens=0),
        SchedulerConfig(
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=max_model_len, enable_chunked_prefill=True,
            max_num_encoder_input_tokens=encoder_budget,
            encoder_cache_size=encoder_budget if encoder_cache is None else encoder_cache),
        device_config=DeviceConfig("cpu"), load_config=LoadConfig("dummy", use_tqdm=False))


def image_item(identity: int, length: int) -> dict:
    return {"identity": torch.tensor([identity]), "length": length}


class FakeModel:
    supports_multimodal = True

    def __init__(self, uses_mrope=False):
        self.uses_mrope, self.calls, self.fail = uses_mrope, [], False
        self.expected = {}   # request -> its `expected_rows`

    def get_input_embeddings(self, input_ids):
        return torch.stack([input_ids, input_ids * 0, input_ids * 0], -1).float()

    def get_multimodal_embeddings(self, items):
        self.calls.append([int(item["identity"]) for item in items])
        if self.fail: raise RuntimeError("out of luck")
        outputs = []
        for item in items:
            n = item["length"]
            outputs.append(torch.stack([-torch.ones(n), item["identity"].float().expand(n), torch.arange(n).float()], -1))
        return outputs

    def largest_image(self, model_config): return image_item(0, 9)

    def num_image_tokens(self, model_config, item): return item["length"]

    def get_mrope_input_positions(self, prompt_token_ids, items, mm_positions):
        assert [item["length"] for item in items] == [p.length for p in mm_positions]
        return mrope(len(prompt_token_ids), mm_positions)

    def __call__(self, input_ids, positions, inputs_embeds):
        assert input_ids is None and positions.shape[-1] == len(inputs_embeds)
        assert (positions.dim() == 2) == self.uses_mrope
        return torch.cat([inputs_embeds, positions.view(-1, len(inputs_embeds)).T.float()], -1)

    def compute_logits(self, hidden):   # `run_model` has put the token there
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


def mrope(num_tokens, mm_positions):
    "An image: time stands still, rows of three; then on from the largest position."
    parts, at, done = [], 0, 0
    for p in mm_positions:
        parts.append(np.arange(p.offset - done)[None].repeat(3, 0) + at)
        at, done = at + p.offset - done, p.offset + p.length
        i = np.arange(p.length)
        parts.append(np.stack([i * 0, i // 3, i % 3]) + at)
        at += max((p.length - 1) // 3, min(p.length - 1, 2)) + 1
    parts.append(np.arange(num_tokens - done)[None].repeat(3, 0) + at)
    return torch.tensor(np.concatenate(parts, 1)), at - done


def expected_rows(request: Request, tokens, uses_mrope: bool) -> list[tuple]:
    "What the model must see of a request at each position, from the request alone."
    rows = [(token, 0, 0) for token in tokens]
    for p, item in zip(request.mm_positions, request.mm_inputs):
        for row in range(p.length): rows[p.offset + row] = (-1, int(item["identity"]), row)
    positions = [(i,) for i in range(len(tokens))]
    if uses_mrope:
        table, delta = mrope(request.num_prompt_tokens, request.mm_positions)
        positions = [tuple(table[:, i].tolist()) if i < request.num_prompt_tokens else (i + delta,) * 3 for i in range(len(tokens))]
    return [(*row, *position) for row, position in zip(rows, positions)]


def next_token(rows) -> int:
    return int.from_bytes(blake2b(repr([tuple(map(int, row)) for row in rows]).encode(), digest_size=8).digest(), "big") % (VOCAB - 1)


def alone(request: Request, num_tokens: int, uses_mrope=False) -> list[int]:
    "The tokens of a request, without an engine."
    tokens = list(request.prompt_token_ids)
    for _ in range(num_tokens): tokens.append(next_token(expected_rows(request, tokens, uses_mrope)))
    return tokens[request.num_prompt_tokens:]


def make_prompt(parts) -> tuple[list[int], list[PlaceholderRange], list[dict], list[str]]:
    "Token ids, and pairs (image, length), in order."
    tokens, positions, items, hashes = [], [], [], []
    for part in parts:
        if isinstance(part, int): tokens.append(part)
        else:
            identity, length = part
            positions.append(PlaceholderRange(len(tokens), length))
            tokens += [IMAGE_TOKEN] * length
            items.append(image_item(identity, length))
            hashes.append(f"image-{identity}-{length}")
    return tokens, positions, items, hashes


class Engine:
    "Scheduler, model runner and encoder runner; every step is checked against the requests."

    def __init__(self, uses_mrope=False, check=True, **config):
        self.config = fake_config(**config)
        self.model = FakeModel(uses_mrope)
        self.scheduler = Scheduler(self.config.scheduler_config, self.config.cache_config)
        self.images = EncoderRunner(self.config, self.model)
        self.runner = ModelRunner(self.config, self.model, self.run_model, images=self.images)
        self.runner.initialize_kv_cache(self.config.cache_config.num_gpu_blocks)
        self.kv: dict[int, tuple] = {}
        self.requests, self.tokens, self.orders = {}, {}, []

    @property
    def runs(self): return self.images.num_encoder_runs

    def add(self, req_id: str, parts, max_tokens=4, hashes=True) -> Request:
        tokens, positions, items, digests = make_prompt(parts)
        request = Request(
            req_id, None, tokens, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            mm_inputs=items, mm_hashes=digests if hashes else None, mm_positions=positions)
        self.scheduler.add_request(request)
        self.requests[req_id], self.tokens[req_id] = request, []
        return request

    def run_model(self, *inputs):
        hidden, metadata = self.model(*inputs), get_forward_context().attn_metadata
        block_size, batch = self.config.cache_config.block_size, self.runner.batch
        for slot, row in zip(metadata.slot_mapping.tolist(), hidden.tolist()): self.kv[slot] = tuple(row)
        for row, req_id in enumerate(batch.req_ids):
            n, request, state = metadata.seq_lens_cpu[row], self.requests[req_id], self.runner.requests[req_id]
            blocks = metadata.block_table[row].tolist()
            found = [self.kv[blocks[i // block_size] * block_size + i % block_size] for i in range(n)]
            known = list(state.prompt_token_ids) + state.output_token_ids
            expected = [tuple(map(float, r)) for r in expected_rows(request, known, self.model.uses_mrope)[:n]]
            assert found == expected, [(i, f, e) for i, (f, e) in enumerate(zip(found, expected)) if f != e][:3]
            hidden[metadata.query_start_loc_cpu[row + 1] - 1, 0] = next_token(expected)
        return hidden

    def abort(self, req_id):
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def step(self):
        order = self.scheduler.schedule()
        order.check_invariants()
        self.orders.append(order)
        self.check_encoder_inputs(order)
        result = self.runner.execute_model(order)
        self.check_books()
        for output in self.scheduler.update_from_output(order, result).outputs:
            self.tokens[output.request_id] += output.new_token_ids
        self.scheduler.check_invariants()
        return order

    def check_encoder_inputs(self, order):
        "No more rows than the budget, each image once, and only such that the chunk touches."
        computed = {d.req_id: d.num_computed_tokens for d in order.scheduled_new_reqs + order.scheduled_cached_reqs}
        total = 0
        for req_id, inputs in order.scheduled_encoder_inputs.items():
            assert len(set(inputs)) == len(inputs)
            for i in inputs:
                p, start = self.requests[req_id].mm_positions[i], computed[req_id]
                assert p.offset < start + order.num_scheduled_tokens[req_id] and p.offset + p.length > start
                total += p.length
        assert total <= self.config.scheduler_config.max_num_encoder_input_tokens

    def check_books(self):
        "The worker holds what the scheduler says it holds: an entry for an entry."
        self.images.check_invariants()
        assert self.images.num_misses == 0
        held = {r: set(inputs) for r, inputs in self.images.outputs.held.items()}
        assert held == {r: set(inputs) for r, inputs in self.scheduler.encoder_cache_manager.cached.items()}

    def run(self, max_steps=2000) -> dict[str, list[int]]:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.runner.execute_model(self.scheduler.schedule())   # the news of the last end
                self.check_books()
                return self.tokens
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def check_tokens(self):
        for req_id, request in self.requests.items():
            wanted = alone(request, request.max_tokens, self.model.uses_mrope)
            assert self.tokens[req_id] == wanted, f"{req_id}: {self.tokens[req_id]}, alone {wanted}"

    def preempt(self, req_id):
        "Take a running request's blocks, as a full pool would."
        self.scheduler._preempt(self.scheduler.requests[req_id])
