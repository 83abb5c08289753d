"""Tiny models that see, through V1's core: transformers' own tokens, however the prompt is cut, and no image encoded in vain."""
import pytest
from mm_engine import Core, Family, make_image
from mm_tiny import FAMILIES

from minengine.config import EngineArgs
from minengine.multimodal.cache import item_nbytes
from minengine.sampling_params import SamplingParams
from minengine.v1.engine.llm_engine import LLMEngineV1
from minengine.v1.messages import PlaceholderRange
from minengine.v1.worker.encoder_runner import EncoderRunner

SQUARE, FLAT, TALL = make_image(40, 40, 1), make_image(64, 24, 2), make_image(20, 60, 3)
# More than a block of words in front, so that every budget from 16 up can end inside the image.
PROMPTS = {
    "one": ("What can be seen here? IMAGE Say it.", [SQUARE]),
    "first": ("IMAGE What is it?", [FLAT]),
    "last": ("Look at this: IMAGE", [TALL]),
    "two sizes": ("Compare IMAGE with IMAGE please", [SQUARE, FLAT]),
    "same twice": ("Is IMAGE the same as IMAGE ?", [FLAT, FLAT]),
    "three side by side": ("IMAGEIMAGEIMAGE?", [SQUARE, TALL, SQUARE]),
    "words only": ("No picture at all, just words.", []),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param) / "tiny")


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "no caching"])
def core(request, family) -> Core:
    return Core(family, enable_prefix_caching=request.param)


@pytest.fixture(autouse=True)
def fresh(request):
    "Each test finds a core that remembers nothing."
    if "core" in request.fixturenames:
        core = request.getfixturevalue("core")
        core.budget(256)
        core.forget()


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_transformers(core, name):
    core.add("a", *PROMPTS[name])
    core.run().check()


def test_everybody_at_once(core):
    for name, prompt in PROMPTS.items(): core.add(name, *prompt)
    core.run().check()


def test_every_budget_that_splits_the_image(core):
    "The first chunk ends at each position from 16 on: before, at each offset inside, and behind the image."
    text, images = PROMPTS["one"]
    request = core.family.request("x", text, images)
    span, = request.mm_placeholders
    ends = range(16, len(request.prompt_token_ids) + 1)
    assert span.offset >= 16 and set(range(span.offset + 1, span.offset + span.length)) <= set(ends)
    for budget in ends:
        core.forget().budget(budget)
        core.add("a", text, images)
        core.step()
        assert core.scheduler.requests["a"].num_computed_tokens == budget
        core.budget(256)
        core.run().check()


@pytest.mark.parametrize("name", ["two sizes", "same twice", "three side by side"])
def test_budgets_from_16_up(core, name):
    text, images = PROMPTS[name]
    length = len(core.family.request("x", text, images).prompt_token_ids)
    for budget in range(16, length + 1, 1 if core.family.name == "llava" else 7):
        core.forget().budget(budget)
        core.add("a", text, images)
        core.run().check()


def test_preemption_at_positions_inside_an_image(core):
    text, images = PROMPTS["two sizes"]
    request = core.family.request("x", text, images)
    first, second = request.mm_placeholders
    stops = [first.offset, first.offset + 1, first.offset + first.length // 2, first.offset + first.length,
             second.offset + 1, second.offset + second.length - 1, len(request.prompt_token_ids) + 2]
    for stop in stops:
        core.forget().budget(256)
        core.add("a", text, images)
        while (done := core.scheduler.requests["a"].num_computed_tokens) < stop:
            core.budget(max(1, min(stop, len(request.prompt_token_ids)) - done))
            core.step()
        core.budget(256)
        core.scheduler._preempt(core.scheduler.requests["a"])
        core.run().check()


def test_preempted_by_a_small_pool(family):
    for caching in (True, False):
        core = Core(family, num_gpu_blocks_override=16, max_model_len=256, enable_prefix_caching=caching, max_num_batched_tokens=48)
        for i in range(3):
            for name in ("one", "last"):
                text, images = PROMPTS[name]
                core.add(f"{name}{i}", f"{'abc'[i]} {text}", images, max_tokens=24)
        core.run().check()
        assert core.scheduler.num_preempted > 0


def test_these_tests_would_notice_rows_shifted_by_one(core, monkeypatch):
    real = EncoderRunner._output
    monkeypatch.setattr(EncoderRunner, "_output", lambda self, state, i: real(self, state, i).roll(1, 0))
    for name in ("one", "first", "last", "two sizes"): core.add(name, *PROMPTS[name])
    core.run()
    assert any(core.tokens[name] != core.family.greedy(*PROMPTS[name]) for name in core.tokens)


# --- the image in the prefix cache's key ------------------------------------------------------

def common_blocks(one, two, block_size=16) -> int:
    "Tokens in the leading full blocks that two requests share, told by tokens and images."
    def content(request):
        rows = [(t,) for t in request.prompt_token_ids]
        for p, digest in zip(request.mm_placeholders, request.mm_hashes):
            for row in range(p.length): rows[p.offset + row] += (digest, row)
        return rows
    a, b = content(one), content(two)
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return min(n, len(b) - 1) // block_size * block_size


@pytest.mark.parametrize("first, second", [
    (("one", [SQUARE]), ("one", [SQUARE])),        # all of it
    (("one", [SQUARE]), ("one", [make_image(40, 40, 9)])),   # another picture of the same size: words before it only
    (("one", [SQUARE]), ("longer", [SQUARE])),     # another question about the same picture
    (("two sizes", [SQUARE, FLAT]), ("two sizes", [SQUARE, SQUARE])),
    (("two sizes", [SQUARE, FLAT]), ("two sizes", [FLAT, FLAT])),
], ids=["same", "other picture", "other question", "second differs", "first differs"])
def test_what_two_prompts_share(family, first, second):
    texts = {name: text for name, (text, _) in PROMPTS.items()} | {"longer": PROMPTS["one"][0] + " And then?"}
    core = Core(family)
    for req_id, (name, images) in zip("ab", (first, second)): core.add(req_id, texts[name], images); core.run()
    core.check()
    one, two = (family.request(req_id, *core.asked[req_id][:2]) for req_id in "ab")
    assert core.cached["b"] == common_blocks(one, two)


# --- how often the encoder runs ------------------------------------------------------------------

QUESTION, OTHER = ("What can be seen here? IMAGE Say it.", [SQUARE]), ("What can be seen here? IMAGE Where is it?", [SQUARE])


def ask(core, *prompts):
    "One after the other."
    for text, images in prompts:
        core.add(str(len(core.asked)), text, images)
        core.run()


def at_once(core, *prompts):
    for text, images in prompts: core.add(str(len(core.asked)), text, images)
    core.run()


def drop_rows(core):
    store = core.runner.images.outputs
    store.make_room(store.capacity)


def drop_blocks(core): assert core.core.reset_prefix_cache()


def in_two_turns(core, between):
    ask(core, QUESTION)
    between(core)
    ask(core, OTHER)


def preempted(core, then=lambda core: None):
    text, images = QUESTION
    core.add("0", text, images)
    core.budget(28)
    core.step()
    assert not core.tokens["0"]
    core.scheduler._preempt(core.scheduler.requests["0"])
    core.budget(256)
    then(core)
    core.run()


def push_out(core):
    "A request with an image as large as the cache goes first."
    request, = core.scheduler.waiting
    core.scheduler.waiting.clear()
    core.add("1", *PROMPTS["last"])
    core.scheduler.waiting.append(request)


# story, caching, cache (None: large; 1: as large as the largest image of the story), images encoded
COUNTS = {
    "words only: nothing to encode":
        (True, None, lambda c: ask(c, PROMPTS["words only"]), 0),
    "one image, in chunks: its rows outlive the step":
        (False, None, lambda c: (c.budget(17), ask(c, QUESTION)), 1),
    "the same twice in a prompt: two references to one output":
        (False, None, lambda c: ask(c, PROMPTS["same twice"]), 1),
    "the same twice, room for one: idle until the second place asks":
        (False, 1, lambda c: (c.budget(17), ask(c, PROMPTS["same twice"])), 1),
    "two requests at once: two references to one output":
        (False, None, lambda c: at_once(c, QUESTION, OTHER), 1),
    "two requests at once, the second finds the first's blocks":
        (True, None, lambda c: at_once(c, QUESTION, OTHER), 1),
    "two turns, caching: the second needs the rows behind its hit, they are idle":
        (True, None, lambda c: in_two_turns(c, lambda c: None), 1),
    "two turns, no caching: the rows are idle":
        (False, None, lambda c: in_two_turns(c, lambda c: None), 1),
    "two turns, its blocks are gone: the rows are idle":
        (True, None, lambda c: in_two_turns(c, drop_blocks), 1),
    "two turns, its rows are gone: those behind the hit are needed, so all are made":
        (True, None, lambda c: in_two_turns(c, drop_rows), 2),
    "two turns, blocks and rows are gone":
        (True, None, lambda c: in_two_turns(c, lambda c: (drop_blocks(c), drop_rows(c))), 2),
    "the same question twice, its rows are gone, all is cached: the last block is words":
        (True, None, lambda c: (ask(c, ("IMAGE" + "words " * 8, [SQUARE])), drop_rows(c), ask(c, ("IMAGE" + "words " * 8, [SQUARE]))), 1),
    "preempted inside the image: idle until it comes back":
        (False, None, preempted, 1),
    "preempted, and its rows are pushed out by another's":
        (False, 1, lambda c: preempted(c, push_out), 3),
    "three images, two of them equal":
        (False, None, lambda c: ask(c, PROMPTS["three side by side"]), 2),
}


@pytest.mark.parametrize("story", COUNTS)
def test_how_often_the_encoder_runs(family, story):
    caching, cache, tell, count = COUNTS[story]
    if cache:   # rows of the largest image, once
        cache = max(p.length for prompt in (QUESTION, PROMPTS["same twice"], PROMPTS["last"])
                    for p in family.request("x", *prompt).mm_placeholders)
    core = Core(family, enable_prefix_caching=caching, encoder_cache_size=cache, max_num_encoder_input_tokens=cache)
    tell(core)
    core.check()
    assert core.runs == count, story


# --- at the core's door -------------------------------------------------------------------------

def test_a_bad_image_harms_nobody_else(family):
    "What would fail a step is refused before it is in one; the others end as they would have."
    core = Core(family)
    core.add("good", *PROMPTS["one"], max_tokens=12)
    core.step()
    def bad(**changes):
        request = family.request("bad", *PROMPTS["two sizes"])
        for name, value in changes.items(): setattr(request, name, value)
        return request
    whole = bad()
    item, span = whole.mm_inputs[0], whole.mm_placeholders[0]
    one_less = [PlaceholderRange(span.offset, span.length - 1), whole.mm_placeholders[1]]
    for changes, message in [
            (dict(mm_inputs=[item]), "1 images for 2 places"),
            (dict(mm_inputs=[item, None]), "image 1 is a NoneType, not a dict"),
            (dict(mm_inputs=[item, {}]), "pixel_values|image_grid_thw"),
            (dict(mm_inputs=[item, item | {"pixel_values": item["pixel_values"][..., :-1]}]), "pixel|tile|square|patches"),
            (dict(mm_placeholders=one_less), f"image 0 has {span.length} rows, but {span.length - 1} places"),
            (dict(mm_hashes=None), "2 images without hashes, prefix caching needs one for each"),
            (dict(mm_placeholders=whole.mm_placeholders[::-1]), "overlaps or is past|rows, but"),
            (dict(mm_placeholders=None), "2 images for 0 places")]:
        with pytest.raises(ValueError, match=message): core.core.add_request(bad(**changes))
        core.core.check_invariants()
    core.run().check()
    core.add("two", *PROMPTS["two sizes"])
    core.run().check()


def test_field_vllm_16795_a_token_budget_below_one_image_changes_nothing_but_time(family):
    "The encoder's budget is raised to the largest image by itself; the step's budget stays."
    core = Core(family, max_num_batched_tokens=16)
    longest = core.runner.model.max_image_tokens(core.core.vllm_config.model_config)
    limits = core.core.vllm_config.scheduler_config
    assert (limits.max_num_encoder_input_tokens, limits.encoder_cache_size) == (max(longest, 16),) * 2
    for name, prompt in PROMPTS.items(): core.add(name, *prompt)
    core.run().check()


def test_field_vllm_16795_an_image_that_can_never_fit_is_refused_with_the_numbers(family):
    request = family.request("a", *PROMPTS["one"])
    length = request.mm_placeholders[0].length
    core = Core(family, encoder_cache_size=length - 1)
    with pytest.raises(ValueError, match=f"an image of {length} tokens, the encoder takes at most {length - 1}"):
        core.core.add_request(request)
    core.add("words", *PROMPTS["words only"])
    core.run().check()


def test_a_cache_that_holds_one_image(family):
    "Every request waits for the same place; all of them end, in chunks and at once."
    longest = max(p.length for name in PROMPTS for p in family.request("x", *PROMPTS[name]).mm_placeholders or [])
    for budget in (16, 256):
        core = Core(family, encoder_cache_size=longest, max_num_encoder_input_tokens=longest, max_num_batched_tokens=budget)
        for name, prompt in PROMPTS.items(): core.add(name, *prompt)
        core.run().check()
        assert core.runner.images.outputs.num_rows <= longest


def test_the_largest_image_and_the_memory_of_the_largest_step(family, monkeypatch):
    core = Core(family, max_num_batched_tokens=256)
    config, model, calls = core.core.vllm_config.model_config, core.runner.model, []
    item, longest = model.largest_image(config), model.max_image_tokens(config)
    assert model.num_image_tokens(config, item) == longest
    rows, = model.get_multimodal_embeddings([item])
    assert rows.shape == (longest, config.hidden_size)
    monkeypatch.setattr(model, "get_multimodal_embeddings", lambda items: calls.append(len(items)))
    core.runner.profile_run()
    assert calls == [256 // longest] and core.runner.images.outputs.num_rows == 0


def test_compiled_pieces_are_refused_by_name(family):
    with pytest.raises(ValueError, match="runs eager in V1, choose level 0"): Core(family, compilation_config=3)


def test_prompt_logprobs_over_a_cut_image_equal_an_uncut_one(family):
    found = []
    for budget in (256, 20):
        core = Core(family, enable_prefix_caching=False)
        core.budget(budget)
        core.core.add_request(family.request("a", *PROMPTS["one"], prompt_logprobs=0))
        rows = None
        while core.scheduler.has_unfinished_requests():
            for output in core.core.step().outputs: rows = output.new_prompt_logprobs or rows
        found.append([row[0] for row in rows.logprobs])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


# --- through the front door, in one process and in two -----------------------------------------------

class Engine:
    "`LLMEngineV1` with images as a user gives them."

    def __init__(self, family: Family, multiprocess: bool, **args):
        args = dict(max_model_len=512, num_gpu_blocks_override=64, max_num_batched_tokens=64, max_num_seqs=8) | args
        self.family, self.asked, self.tokens = family, {}, {}
        self.engine = LLMEngineV1.from_engine_args(EngineArgs(
            family.folder, use_tqdm_on_load=False, enable_multiprocessing=multiprocess, **args))

    def add(self, req_id, text, images, max_tokens=6):
        prompt = {"prompt": self.family.prompt(text), "multi_modal_data": {"image": list(images)}} if images else self.family.prompt(text)
        self.engine.add_request(req_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        self.asked[req_id] = text, tuple(images), max_tokens

    def run(self):
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished: self.tokens[output.request_id] = list(output.outputs[0].token_ids)
        return self

    def check(self):
        for req_id, asked in self.asked.items(): assert self.tokens[req_id] == self.family.greedy(*asked), req_id
        return self


@pytest.fixture(scope="module", params=[False, True], ids=["one process", "two processes"])
def started(request, family):
    "Two requests at a time, 16 tokens a step, and a cache for three small images on either side."
    nbytes, = (item_nbytes(item) for item in family.request("x", "IMAGE", [make_image(40, 24)]).mm_inputs)
    engine = Engine(family, request.param, max_num_seqs=2, max_num_batched_tokens=16, mm_processor_cache_gb=3 * nbytes / 2**30)
    yield engine
    engine.engine.shutdown()


@pytest.fixture
def engine(started):
    started.asked, started.tokens = {}, {}
    yield started
    assert not started.engine.has_unfinished_requests()


def test_all_prompts_through_the_front_door(engine):
    for turn in range(2):   # the second time the images are known on both sides
        for name, prompt in PROMPTS.items(): engine.add(f"{name} {turn}", *prompt)
        engine.run().check()


def test_field_vllm_16273_31404_34749_46747_many_images_and_a_small_cache(engine):
    "More images than either side keeps, in changing orders, some in flight while others are dropped."
    pictures = [make_image(40, 24, seed) for seed in range(5)]
    for i in range(12):
        chosen = [pictures[i % 5], pictures[(i * 2) % 5], pictures[(i * 3 + 1) % 5]][:1 + i % 3]
        engine.add(str(i), "IMAGE " * len(chosen) + f"number {i % 4}", chosen)
        if i % 4 == 3: engine.run()
    engine.run().check()


def test_an_id_that_is_in_use_takes_nothing_from_the_others(engine):
    "The second is refused; its images are known on one side or on both, and serve the third."
    engine.add("a", *PROMPTS["one"])
    with pytest.raises(ValueError, match="'a'"): engine.add("a", *PROMPTS["two sizes"])
    engine.asked["a"] = *PROMPTS["one"][:1], tuple(PROMPTS["one"][1]), 6
    engine.add("b", *PROMPTS["two sizes"])
    engine.run().check()


def test_field_vllm_17284_16875_image_requests_in_the_queue(engine):
    engine.add("a", *PROMPTS["one"])
    engine.add("b", *PROMPTS["one"])
    engine.add("c", *PROMPTS["same twice"])
    engine.run().check()


def test_an_abort_inside_an_image(engine):
    engine.add("gone", *PROMPTS["three side by side"])
    engine.add("stays", *PROMPTS["three side by side"])
    engine.engine.step()
    engine.engine.abort_request("gone")
    del engine.asked["gone"]
    engine.run().check()
    engine.add("gone", *PROMPTS["one"])
    engine.run().check()
