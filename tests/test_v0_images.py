"""Images in V0: transformers' own tokens from whole prompts, bursts, recorded steps, forks and after preemption; and
how often an image goes through the tower there: once for each step that computes its prompt.
"""
import asyncio
import warnings
from collections import deque

import pytest
import torch
from mm_engine import NUM_TOKENS, Family, make_image
from mm_tiny import FAMILIES
from v0_front import assert_at_rest

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.model.checkpoint import create_engine_config
from minengine.sampling_params import SamplingParams
from minengine.v0.async_llm_engine import AsyncLLMEngine
from minengine.v0.images import ImageRunner
from minengine.v0.llm_engine import LLMEngineV0
from minengine.v0.worker import Worker
from minengine.v1.engine.llm_engine import LLMEngineV1

SQUARE, FLAT, TALL = make_image(40, 40, 1), make_image(64, 24, 2), make_image(20, 60, 3)
PROMPTS = {
    "one": ("What can be seen here? IMAGE Say it.", [SQUARE]),
    "first": ("IMAGE What is it?", [FLAT]),
    "last": ("Look at this: IMAGE", [TALL]),
    "two sizes": ("Compare IMAGE with IMAGE please", [SQUARE, FLAT]),
    "same twice": ("Is IMAGE the same as IMAGE ?", [FLAT, FLAT]),
    "three side by side": ("IMAGEIMAGEIMAGE?", [SQUARE, TALL, SQUARE]),
    "words only": ("No picture at all, just words.", []),
}
WAYS = {
    "plain": {}, "bursts": dict(num_scheduler_steps=3), "late outputs": dict(use_async_output_proc=True),
    "recorded": dict(compilation_config={"use_cudagraph": True, "cudagraph_capture_sizes": [1, 2, 4, 8]}),
    "all": dict(num_scheduler_steps=3, use_async_output_proc=True,
                compilation_config={"use_cudagraph": True, "cudagraph_capture_sizes": [1, 4, 8]}),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param) / "tiny")


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Family: return Family("llava", tmp_path_factory.mktemp("llava") / "tiny")


class Engine:
    "A V0 engine, what was asked and what came."

    def __init__(self, family: Family, kind=LLMEngineV0, **args):
        args = dict(max_model_len=512, num_gpu_blocks_override=64, max_num_seqs=8, swap_space=0.01) | args
        engine = "v0" if kind is LLMEngineV0 else "v1"
        if engine == "v1": del args["swap_space"]
        self.family, self.asked, self.outputs = family, {}, {}
        self.engine = kind.from_engine_args(EngineArgs(family.folder, engine=engine, use_tqdm_on_load=False, **args))

    @property
    def scheduler(self): return self.engine.scheduler

    @property
    def runner(self): return self.engine.executor.driver_worker.model_runner

    @property
    def runs(self) -> int: return self.runner.images.num_encoder_runs

    def add(self, req_id, text, images=(), max_tokens=NUM_TOKENS, **params):
        prompt = {"prompt": self.family.prompt(text)}
        if images: prompt["multi_modal_data"] = {"image": list(images)}
        params = dict(temperature=0, ignore_eos=True) | params
        self.engine.add_request(req_id, prompt, SamplingParams(max_tokens=max_tokens, **params))
        self.asked[req_id] = text, tuple(images), max_tokens

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.engine.has_unfinished_requests(): return self
            for output in self.engine.step():
                if output.finished: self.outputs[output.request_id] = output
        raise AssertionError(f"not done after {max_steps} steps")

    def check(self):
        "Every answer is transformers', and nothing is left."
        for req_id, asked in self.asked.items():
            for one in self.outputs[req_id].outputs: assert list(one.token_ids) == self.family.greedy(*asked), req_id
        if isinstance(self.engine, LLMEngineV0): assert_at_rest(self.engine)
        return self


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_transformers(family, way):
    "One after the other, then all at once."
    engine = Engine(family, **WAYS[way])
    for name, prompt in PROMPTS.items():
        engine.add(name, *prompt)
        engine.run()
    for name, prompt in PROMPTS.items(): engine.add(f"{name} again", *prompt)
    engine.run().check()
    graphs = engine.runner.decode_graphs
    if way in ("recorded", "all"): assert graphs.dispatcher.num_replayed > 10
    else: assert graphs is None


def test_tokens_equal_v1s(family):
    ours, theirs = Engine(family), Engine(family, LLMEngineV1, max_num_batched_tokens=24)
    for engine in (ours, theirs):
        for name, prompt in PROMPTS.items(): engine.add(name, *prompt, max_tokens=16)
        engine.run()
    for name in PROMPTS:
        a, b = ours.outputs[name], theirs.outputs[name]
        assert a.outputs[0].token_ids == b.outputs[0].token_ids and a.prompt_token_ids == b.prompt_token_ids


def test_these_tests_would_notice_rows_shifted_by_one(family, monkeypatch):
    real = ImageRunner.model_inputs
    def shifted(self, model_input):
        model_input.placeholder_map = [(i, low, high - 1, row + 1) for i, low, high, row in model_input.placeholder_map]
        return real(self, model_input)
    monkeypatch.setattr(ImageRunner, "model_inputs", shifted)
    engine = Engine(family)
    for name in ("one", "first", "last", "two sizes"): engine.add(name, *PROMPTS[name])
    engine.run()
    assert any(list(engine.outputs[n].outputs[0].token_ids) != family.greedy(*PROMPTS[n]) for n in engine.asked)


@pytest.mark.parametrize("way", WAYS)
def test_these_tests_would_notice_positions_of_words(tmp_path_factory, way, monkeypatch):
    "What M-RoPE adds behind an image matters in decodes, too."
    family = Family("qwen2_5_vl", tmp_path_factory.mktemp("qwen") / "tiny")
    engine = Engine(family, **WAYS[way])
    real = engine.runner.prepare_model_input
    def forgetful(told, *args):
        for one in told:
            for data in one.seq_data.values(): data.mrope_position_delta = 0
        return real(told, *args)
    monkeypatch.setattr(engine.runner, "prepare_model_input", forgetful)
    for name, prompt in PROMPTS.items(): engine.add(name, *prompt, max_tokens=24)
    engine.run()
    wrong = [n for n in engine.asked if list(engine.outputs[n].outputs[0].token_ids) != family.greedy(*PROMPTS[n], 24)]
    assert wrong and "words only" not in wrong


# --- how often an image is encoded, and prepared ---------------------------------------------------

def test_an_image_is_encoded_for_every_prompt_step(llava):
    engine = Engine(llava)
    def runs(*asked):
        before = engine.runs, engine.engine.preprocessor.images.num_prepared
        for i, (text, images) in enumerate(asked): engine.add(str(i), text, images)
        engine.run()
        return engine.runs - before[0], engine.engine.preprocessor.images.num_prepared - before[1]
    assert runs(PROMPTS["one"]) == (1, 1)
    assert runs(PROMPTS["one"]) == (1, 1), "the second question about an image costs as much as the first"
    assert runs(PROMPTS["one"], PROMPTS["one"]) == (2, 2), "two at once"
    assert runs(PROMPTS["same twice"]) == (2, 2)
    assert runs(PROMPTS["words only"]) == (0, 0)
    engine.check()


def test_after_a_step_nothing_of_an_image_is_left_but_its_pixels(llava):
    engine = Engine(llava)
    engine.add("a", *PROMPTS["one"])
    engine.engine.step()
    group, = engine.scheduler.running
    assert [set(item) for item in group.multi_modal_data.items] == [{"pixel_values", "span_token_ids"}]
    told, _, _ = engine.scheduler.schedule()
    assert not told[0].is_prompt and told[0].multi_modal_data is None
    made = engine.runner.prepare_model_input(told)
    assert made.multi_modal_kwargs is None and made.placeholder_map is None


# --- preemption ----------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("way", ["plain", "bursts", "all"])
def test_preempted_by_a_small_pool(family, mode, way):
    steps = WAYS[way].get("num_scheduler_steps", 1)
    engine = Engine(family, num_gpu_blocks_override=20, max_model_len=256, preemption_mode=mode, **WAYS[way])
    num_images = 0
    for i in range(3):
        for name in ("one", "last"):
            text, images = PROMPTS[name]
            engine.add(f"{name}{i}", f"{'abc'[i]} {text}", images, max_tokens=40)
            num_images += len(images)
    engine.run().check()
    preempted = engine.scheduler.num_cumulative_preemption
    assert preempted > 0, steps
    # A prompt that is computed again sees its image again; one that was swapped finds its keys and values.
    assert engine.runs == num_images + (preempted if mode == "recompute" else 0)


# --- several answers -------------------------------------------------------------------------------

def test_several_greedy_answers_share_a_prompt(family):
    engine = Engine(family)
    for name, prompt in PROMPTS.items():
        engine.add(name, *prompt, n=2 if len(engine.asked) % 2 else 3, temperature=1.0, top_k=1)
    engine.run().check()
    assert engine.runs == sum(len(images) for _, images in PROMPTS.values())


LETTERS = 256   # an answer of bytes: transformers takes no placeholder in it


@torch.no_grad()
def oracle_logprobs(family, text, images, token_ids) -> list[float]:
    "transformers' log-probability of each token of an answer, among letters."
    inputs = family.oracle.inputs(family.prompt(text), images)
    n, more = inputs["input_ids"].shape[1], torch.tensor([token_ids])
    fill = {"input_ids": more, "attention_mask": more * 0 + 1, "mm_token_type_ids": more * 0}
    long = {k: torch.cat([v, fill[k].to(v.dtype)], 1) if k in fill else v for k, v in inputs.items()}
    logprobs = family.oracle.model(**long).logits[0, :, :LETTERS].float().log_softmax(-1)
    return [logprobs[n - 1 + i, t].item() for i, t in enumerate(token_ids)]


@pytest.mark.parametrize("args", [{}, dict(num_gpu_blocks_override=20, max_model_len=256), dict(num_scheduler_steps=3)],
                         ids=["plain", "swapped", "bursts"])
def test_sampled_answers_know_their_own_tokens(family, args):
    "Children of a fork see the image through shared blocks, and stand where their parent stood."
    engine = Engine(family, **args)
    for i, name in enumerate(("one", "first", "last")):
        engine.add(name, *PROMPTS[name], n=3, temperature=1.0, seed=i, logprobs=0, max_tokens=30,
                   allowed_token_ids=list(range(LETTERS)))
    engine.run()
    assert (engine.scheduler.num_cumulative_preemption > 0) == ("max_model_len" in args)
    for name, output in engine.outputs.items():
        assert len({tuple(one.token_ids) for one in output.outputs}) == 3
        for one in output.outputs:
            found = [step[t].logprob for step, t in zip(one.logprobs, one.token_ids)]
            assert found == pytest.approx(oracle_logprobs(family, *PROMPTS[name], list(one.token_ids)), abs=1e-3)
    assert_at_rest(engine.engine)


def test_prompt_logprobs(family):
    engine = Engine(family)
    text, images = PROMPTS["two sizes"]
    engine.add("a", text, images, prompt_logprobs=0, temperature=1.0, seed=0)
    engine.run()
    ids, scores = engine.outputs["a"].prompt_token_ids, engine.outputs["a"].prompt_logprobs
    want = family.oracle.logits(family.prompt(text), images).log_softmax(-1)
    found = [step[t].logprob for step, t in zip(scores[1:], ids[1:])]
    assert scores[0] is None and found == pytest.approx([want[i, t].item() for i, t in enumerate(ids[1:])], abs=1e-3)


# --- the door --------------------------------------------------------------------------------------

def test_what_the_door_refuses(llava):
    "Each with numbers, and nothing left behind."
    engine = Engine(llava, max_model_len=64, limit_mm_per_prompt={"image": 3})
    text, images = PROMPTS["one"]
    for message, ask in {
            "1 image placeholders .* but there are 2 images": (text, [SQUARE, FLAT]),
            "1 image placeholders .* but there are 0 images": (text, []),
            "4 images, at most 3 are allowed": ("IMAGE" * 4, [SQUARE] * 4),
            "7[0-9] tokens with its first .* max_model_len is 64": ("IMAGE" * 3, [SQUARE] * 3),
            "image 1 of the prompt: .*example.com": ("IMAGE IMAGE", [SQUARE, "http://example.com/a.png"])}.items():
        with pytest.raises(ValueError, match=message): engine.add("x", *ask)
    with pytest.raises(ValueError, match="truncate_prompt_tokens would cut .* got 5 and 1 images"):
        engine.add("x", text, images, truncate_prompt_tokens=5)
    assert not engine.engine.has_unfinished_requests()
    engine.add("x", "IMAGE?", [SQUARE])
    engine.run().check()


def test_a_prompt_with_images_that_fits_exactly(llava):
    "As long as the window, which V0 takes; without images, one that is longer is not an error but no answer."
    length = len(llava.request("x", *PROMPTS["one"]).prompt_token_ids)
    engine = Engine(llava, max_model_len=length)
    engine.add("fits", *PROMPTS["one"], max_tokens=1)
    engine.run().check()
    with pytest.raises(ValueError, match=f"{length + 1} tokens with its first 1 images, but max_model_len is {length}"):
        engine.add("long", PROMPTS["one"][0] + "!", PROMPTS["one"][1])
    engine.add("words", "x" * (length + 1))
    assert engine.run().outputs["words"].outputs[0].finish_reason == "length"


def test_what_v0_cannot_combine_with_images(llava):
    def start(**args): return create_engine_config(EngineArgs(llava.folder, engine="v0", use_tqdm_on_load=False, **args))
    with pytest.warns(UserWarning, match="cannot tell one image from another"):
        assert not start(enable_prefix_caching=True).cache_config.enable_prefix_caching
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = start()
    assert not config.cache_config.enable_prefix_caching and not config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 5120
    with pytest.raises(ValueError, match="V0 computes prompts with images whole"): start(enable_chunked_prefill=True)
    with pytest.raises(ValueError, match="V0 with drafts: .* sees images"): start(speculative_config={"num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="mm_processor_cache_gb=2 is for V1"): start(mm_processor_cache_gb=2)
    no_images = start(limit_mm_per_prompt={"image": 0}, enable_prefix_caching=True, enable_chunked_prefill=True)
    assert no_images.cache_config.enable_prefix_caching and no_images.scheduler_config.enable_chunked_prefill


def test_a_model_that_shall_see_no_images(family):
    "Chunks and prefix hits of words are right there, and images are refused."
    engine = Engine(family, limit_mm_per_prompt={"image": 0}, enable_prefix_caching=True, enable_chunked_prefill=True,
                    max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="limit_mm_per_prompt allows none"): engine.add("x", *PROMPTS["one"])
    for i in range(3):
        engine.add(str(i), "Nothing to be seen, but much to be read in these words.")
        engine.run()
    engine.check()
    assert engine.outputs["2"].num_cached_tokens >= 32


def test_a_prompt_that_is_an_image_and_nothing_else(llava):
    "Where one token makes a whole step, a recorded decode must not answer for it."
    engine = Engine(llava, **WAYS["recorded"])
    placeholder = llava.processor.placeholder
    engine.engine.add_request("x", {"prompt_token_ids": [placeholder], "multi_modal_data": {"image": SQUARE}},
                              SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.run()
    item = llava.processor.process([placeholder], [SQUARE]).mm_inputs[0]
    inputs = dict(input_ids=torch.tensor([[placeholder] * 25]), pixel_values=item["pixel_values"][None])
    want = llava.oracle.model.generate(**inputs, do_sample=False, max_new_tokens=4, min_new_tokens=4, eos_token_id=10**6)
    assert list(engine.outputs["x"].outputs[0].token_ids) == want[0, 25:].tolist()


# --- a worker who follows -----------------------------------------------------------------------

def test_a_follower_sees_the_same_images(family):
    "Pixels and places travel; both workers end with the same keys and values."
    class Queue(deque):
        def send(self, found): self.append(found)
        def receive(self): return self.popleft()

    engine, channel = Engine(family, num_scheduler_steps=3), Queue()
    engine.engine.executor.driver_worker.channel = channel
    follower = Worker(engine.engine.vllm_config, rank=1, is_driver_worker=False, channel=channel)
    follower.init_device(), follower.load_model()
    follower.initialize_cache(64, 8)
    for name, prompt in PROMPTS.items(): engine.add(name, *prompt)
    engine.run().check()
    follower.start_worker_execution_loop()
    assert not channel and follower.model_runner.images.num_encoder_runs == engine.runs
    for own, other in zip(engine.engine.executor.driver_worker.cache_engine.gpu_cache, follower.cache_engine.gpu_cache):
        assert torch.allclose(own, other, atol=1e-5)


# --- the front doors -----------------------------------------------------------------------------

def test_chat(family):
    "Two turns about one image, in messages; V0 and V1 say the same."
    question = {"role": "user", "content": [{"type": "image_pil", "image_pil": SQUARE}, {"type": "text", "text": "What is it?"}]}
    told = [question, {"role": "assistant", "content": "A patch."}, {"role": "user", "content": "And what colour?"}]
    params, answers = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), {}
    for engine in ("v0", "v1"):
        llm = LLM(family.folder, engine=engine, max_model_len=512, num_gpu_blocks_override=64, use_tqdm_on_load=False)
        answers[engine] = [list(o.outputs[0].token_ids) for o in llm.chat([[question], told], params, use_tqdm=False)]
        llm.reset_mm_cache()
        llm.shutdown()
    template = family.oracle.tokenizer.apply_chat_template
    def ask(messages): return template([m | {"content": [
        {"type": "image"} if p["type"] == "image_pil" else p for p in m["content"]]} if isinstance(m["content"], list) else m
        for m in messages], add_generation_prompt=True, tokenize=False)
    want = []
    for messages in ([question], told):
        inputs = family.oracle.processor(text=ask(messages), images=[SQUARE], return_tensors="pt", add_special_tokens=False)
        out = family.oracle.model.generate(**inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=10**6)
        want.append(out[0, inputs["input_ids"].shape[1]:].tolist())
    assert answers == {"v0": want, "v1": want}


def test_async_engine_an_error_is_one_streams_own(llava):
    async def play():
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(
            llava.folder, engine="v0", max_model_len=512, num_gpu_blocks_override=64, use_tqdm_on_load=False))
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        async def ask(name, text, images):
            prompt = {"prompt": llava.prompt(text), "multi_modal_data": {"image": images}}
            async for output in engine.generate(prompt, params, name): pass
            return list(output.outputs[0].token_ids)
        asks = {**PROMPTS, "bad": ("IMAGE IMAGE", [SQUARE]), "worse": ("IMAGE", [SQUARE.crop((0, 0, 0, 0))])}
        found = await asyncio.gather(*(ask(n, *p) for n, p in asks.items()), return_exceptions=True)
        assert_at_rest(engine.engine)
        engine.shutdown()
        return dict(zip(asks, found))
    found = asyncio.run(play())
    for name, prompt in PROMPTS.items(): assert found[name] == llava.greedy(*prompt), name
    assert isinstance(found["bad"], ValueError) and "2 image placeholders" in str(found["bad"])
    assert isinstance(found["worse"], ValueError) and "image 0 of the prompt" in str(found["worse"])


def test_an_abort_frees_what_it_held(llava):
    engine = Engine(llava)
    engine.add("gone", *PROMPTS["two sizes"])
    engine.add("stays", *PROMPTS["one"])
    engine.engine.step()
    engine.engine.abort_request("gone")
    del engine.asked["gone"]
    engine.run().check()
