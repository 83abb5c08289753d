"""A core with a tiny model that sees, step by step, and everything in reach; no test by itself."""
from mm_tiny import FAMILIES, Oracle, make_image

from minengine.config import EngineArgs
from minengine.model.checkpoint import create_engine_config
from minengine.multimodal.processor import MultiModalProcessor
from minengine.sampling_params import SamplingParams
from minengine.tokenizer import get_tokenizer
from minengine.v1.engine.core import EngineCore
from minengine.v1.executor import Executor
from minengine.v1.messages import EngineCoreRequest, PlaceholderRange

PLACEHOLDER = {"llava": "<image>", "idefics3": "<image>", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
NUM_TOKENS = 6


class Family:
    "One folder: its oracle, its front end, and what the oracle has said."

    def __init__(self, name: str, folder):
        self.name, self.folder = name, FAMILIES[name](folder)
        self.oracle, self.answers = Oracle(self.folder), {}
        config = create_engine_config(EngineArgs(self.folder, use_tqdm_on_load=False)).model_config
        self.processor = MultiModalProcessor(config, get_tokenizer(self.folder))

    def prompt(self, text: str) -> str:
        return text.replace("IMAGE", PLACEHOLDER[self.name])

    def greedy(self, text: str, images, max_tokens=NUM_TOKENS) -> list[int]:
        key = text, tuple((image.size, image.tobytes()) for image in images), max_tokens
        if key not in self.answers: self.answers[key] = self.oracle.greedy(self.prompt(text), images, max_tokens)
        return self.answers[key]

    def request(self, req_id: str, text: str, images, max_tokens=NUM_TOKENS, **params) -> EngineCoreRequest:
        p = self.processor.process(self.prompt(text), list(images))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)
        return EngineCoreRequest(
            req_id, None, p.prompt_token_ids, params, None, 0.0, mm_inputs=p.mm_inputs, mm_hashes=p.mm_hashes,
            mm_placeholders=[PlaceholderRange(*span) for span in p.mm_placeholders])


class Core:
    "An engine core and what came out of it."

    def __init__(self, family: Family, **args):
        args = dict(block_size=16, max_num_batched_tokens=256, max_num_seqs=8, num_gpu_blocks_override=64, max_model_len=512) | args
        self.family = family
        config = create_engine_config(EngineArgs(family.folder, use_tqdm_on_load=False, **args))
        self.core = EngineCore(config, Executor.get_class(config))
        self.tokens: dict[str, list[int]] = {}
        self.asked: dict[str, tuple] = {}
        self.cached: dict[str, int] = {}   # prompt tokens found in the prefix cache

    @property
    def scheduler(self): return self.core.scheduler

    @property
    def runner(self): return self.core.executor.worker.model_runner

    @property
    def runs(self) -> int: return self.runner.images.num_encoder_runs

    def budget(self, num_tokens: int):
        self.scheduler.config.max_num_batched_tokens = num_tokens

    def add(self, req_id: str, text: str, images=(), max_tokens=NUM_TOKENS):
        self.core.add_request(self.family.request(req_id, text, images, max_tokens))
        self.asked[req_id], self.tokens[req_id] = (text, tuple(images), max_tokens), []

    def step(self):
        for output in self.core.step().outputs:
            self.tokens[output.request_id] += output.new_token_ids
            self.cached.setdefault(output.request_id, output.num_cached_tokens)
        self.core.check_invariants()
        images = self.runner.images
        images.check_invariants()
        assert images.num_misses == 0
        held = {r: set(inputs) for r, inputs in images.outputs.held.items()}
        # The worker hears of an end with the next order.
        assert all(held.get(r, set()) >= set(inputs) for r, inputs in self.scheduler.encoder_cache_manager.cached.items())

    def run(self, max_steps=1000):
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests(): return self
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def check(self):
        "Every request has said what transformers says."
        for req_id, (text, images, max_tokens) in self.asked.items():
            assert self.tokens[req_id] == self.family.greedy(text, images, max_tokens), f"{self.family.name}, {req_id}: {text!r}"
        return self

    def forget(self):
        "Nothing is remembered: no block, no encoder output; and nobody was asked."
        assert self.core.reset_prefix_cache()
        self.runner.images.outputs.make_room(self.runner.images.outputs.capacity)
        self.asked, self.tokens, self.cached = {}, {}, {}
        return self


__all__ = ["Core", "Family", "NUM_TOKENS", "make_image"]
