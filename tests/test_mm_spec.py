"""Images and drafts in one request: the text is transformers', whoever guesses and however often it is wrong."""
import pytest
from mm_engine import Core, Family, make_image
from mm_tiny import FAMILIES
from spec_tiny import Oracle

from minengine.v1.spec_decode.ngram_proposer import num_drafts_wanted

SQUARE, FLAT = make_image(40, 40, 1), make_image(64, 24, 2)
PROMPTS = {
    "one": ("What can be seen here? IMAGE Say it.", [SQUARE]),
    "two": ("Compare IMAGE with IMAGE please", [SQUARE, FLAT]),
    "words": ("No picture at all, just words.", []),
}
NUM_TOKENS = 16


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param) / "tiny")


def count_drafts(core: Core) -> list[int]:
    "Of each step: drafts that were verified."
    counts, execute = [], core.core.executor.execute_model

    def watch(order):
        counts.append(sum(map(len, order.scheduled_spec_decode_tokens.values())))
        return execute(order)

    core.core.executor.execute_model = watch
    return counts


def run(family, k, oracle=None, **args) -> tuple[Core, list[int]]:
    spec = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    core = Core(family, speculative_config=spec, **args)
    if oracle: core.runner.proposer = oracle
    counts = count_drafts(core)
    for name, prompt in PROMPTS.items(): core.add(name, *prompt, max_tokens=NUM_TOKENS)
    core.run().check()
    return core, counts


@pytest.mark.parametrize("k", [1, 4])
def test_lookup(family, k):
    _, counts = run(family, k)
    assert sum(counts) > 0   # a tiny model repeats itself soon


class Truth(Oracle):
    "Vocabularies differ: a lie is another token of this family's."

    def __init__(self, family, k, lies):
        texts = {}
        for name, (text, images) in PROMPTS.items():
            prompt = family.request("x", text, images).prompt_token_ids
            texts[name] = prompt + family.greedy(text, images, NUM_TOKENS)
        super().__init__(texts, k, max_model_len=512, lies=lies)

    def propose(self, batch, requests, seq_lens, token_ids):
        drafts = []
        for req_id, new in zip(batch.req_ids, token_ids):
            state = requests[req_id]
            wanted = num_drafts_wanted(state, self.k, self.max_model_len) if new else 0
            truth = self.texts[req_id][state.num_tokens:state.num_tokens + wanted]
            drafts.append([t ^ 1 if self.rng.random() < self.lies else t for t in truth])
        return drafts


@pytest.mark.parametrize("lies", [0.0, 0.4])
@pytest.mark.parametrize("args", [{}, dict(max_num_batched_tokens=19, num_gpu_blocks_override=8, max_model_len=112)], ids=["roomy", "tight"])
def test_guesses_of_every_quality(family, args, lies):
    "Tight: images are cut, drafts are cut by the budget, and requests are preempted in the middle of both."
    core, counts = run(family, 3, Truth(family, 3, lies), **args)
    assert sum(counts) > 0
    assert not args or core.scheduler.num_preempted
    if not args and not lies: assert len(counts) < NUM_TOKENS   # several tokens a step


def test_as_many_tower_runs_with_drafts_as_without(family):
    core, _ = run(family, 3, Truth(family, 3, 0.4))
    assert core.runs == 2   # SQUARE is shared by two requests
