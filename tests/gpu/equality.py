"Part 2: compiled and replayed runs say what eager runs say, and V0 what V1 says."
import functools
import os
import random
import subprocess
import sys
from pathlib import Path

from common import Settings, dispatcher_of, emit, engine, log, recorded, write_config

FAMILIES = {   # what is special about each
    "llama": dict(architectures=["LlamaForCausalLM"], model_type="llama"),
    "mistral": dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24),
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", tie_word_embeddings=True),
}
MAX_TOKENS = {False: 24, True: 5}   # by dry
# Two sums in another order differ by so much, relative to numbers around 1.
TIE = {"float32": 1e-4, "bfloat16": 0.25}        # logprobs so close are a tie
MEAN_ERROR = {"float32": 1e-4, "bfloat16": 0.05} # of logprobs, at most


def tiny(family: str, dry: bool) -> dict:
    size = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                vocab_size=97)
    if not dry: size = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
                            head_dim=64, vocab_size=997)
    return dict(num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-5, **size, **FAMILIES[family])


def weigh_more(folder_fields: dict):
    "Weights so large that the next token depends on the whole prefix."
    from minengine.model import checkpoint
    std = 1.7 / folder_fields["hidden_size"] ** 0.5
    if isinstance(checkpoint.fill_dummy_weights, functools.partial): return
    checkpoint.fill_dummy_weights = functools.partial(checkpoint.fill_dummy_weights, std=std)


def prompts_for(vocab_size: int, settings: Settings) -> list[list[int]]:
    "Ragged, some with a common start, some longer than a step's budget."
    rng = random.Random(settings.seed)
    token = functools.partial(rng.randrange, vocab_size)
    shared = [token() for _ in range(9 if settings.dry else 36)]
    lens = [1, 3, 21, 10] if settings.dry else [1, 2, 3, 17, 31, 64, 90, 120, 5, 16, 48, 77]
    own = [[token() for _ in range(n)] for n in lens]
    return own + [shared + [token() for _ in range(n)] for n in ((2, 3) if settings.dry else (2, 5, 9, 20, 33, 50))]


def generate(folder: str, mode: str, dtype: str, settings: Settings, prompts: list) -> tuple[list, dict]:
    "Greedy tokens of all prompts, with log-probabilities; and what was run how."
    from minengine.sampling_params import SamplingParams
    most = MAX_TOKENS[settings.dry]
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, logprobs=3, detokenize=False)
    # A pool too small for all: some are preempted. A budget below the longest: chunks.
    args = dict(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=44)
    if settings.dry: args = dict(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16, block_size=4,
                                 num_gpu_blocks_override=12)
    if mode.startswith("v0"): args["max_num_batched_tokens"] = 256   # a prompt is one step
    args |= dict(dtype=dtype, num_preallocate_tokens=0, gpu_memory_utilization=0.2)
    sizes = [1, 2, 4, 8] if settings.dry else [1, 2, 4, 8, 16, 24, 32]
    with engine(folder, mode, settings, sizes, **args) as llm:
        if mode.startswith("v1"): count_preemptions(llm)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        dispatcher = dispatcher_of(llm)
        facts = dict(num_preempted=getattr(llm, "num_preempted", None))
        if dispatcher: facts |= dict(replayed=dispatcher.num_replayed, eager=dispatcher.num_eager)
    return [output.outputs[0] for output in outputs], facts


def count_preemptions(llm):
    "Let `llm.num_preempted` count how often V1 takes blocks away."
    scheduler, llm.num_preempted = llm.llm_engine.engine_core.engine_core.scheduler, 0
    schedule = scheduler.schedule

    def count():
        before = scheduler.num_preempted
        output = schedule()
        llm.num_preempted += scheduler.num_preempted - before
        return output
    scheduler.schedule = count


def compare(ours: list, theirs: list, dtype: str) -> dict:
    "Equal answers; where they part, whether it was a tie; how far logprobs are apart."
    equal, ties, wrong, errors = 0, 0, [], []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        parted = None
        for place, (x, y) in enumerate(zip(a.token_ids, b.token_ids)):
            if x != y:
                parted = place
                break
            errors.append(abs(a.logprobs[place][x].logprob - b.logprobs[place][x].logprob))
        if parted is None and len(a.token_ids) == len(b.token_ids):
            equal += 1
            continue
        step = a.logprobs[parted] if parted is not None else {}
        x, y = a.token_ids[parted or 0], b.token_ids[parted or 0]
        if y in step and step[x].logprob - step[y].logprob < TIE[dtype]: ties += 1
        else: wrong.append([i, parted])
    mean = sum(errors) / max(len(errors), 1)
    return dict(equal=equal, of=len(ours), ties=ties, wrong=wrong[:5], mean_error=mean, max_error=max(errors, default=0.0),
                ok=not wrong and mean < MEAN_ERROR[dtype] and len(errors) > 0)


def check_family(family: str, settings: Settings):
    fields = tiny(family, settings.dry)
    weigh_more(fields)
    folder, runs = write_config(fields), {}
    prompts = prompts_for(fields["vocab_size"], settings)
    for dtype in ("float32", "bfloat16"):
        # V1 eager is what the others are held against; graphs before the rest.
        modes = ("v1 eager", "v1 graphs", "v0 graphs", "v0 eager", "v1 compiled")
        for mode in modes[:2] if settings.dry and dtype == "bfloat16" else modes:
            what = f"{family} {dtype} {mode}"
            log(what, f"{settings.left_s:.0f} s left")
            if settings.left_s < 8:
                emit(what=what, ok=False, problem="not run: out of time")
                continue
            with recorded(what):
                runs[mode, dtype], facts = generate(folder, mode, dtype, settings, prompts)
                if mode == "v1 eager": continue
                row = compare(runs["v1 eager", dtype], runs[mode, dtype], dtype)
                if "graphs" in mode and not facts.get("replayed"): row |= dict(ok=False, problem="nothing was replayed")
                emit(what=what, **facts, **row)


def run(settings: Settings, share: int = 0, shares: int = 1):
    families = list(FAMILIES)[:1] if settings.dry else list(FAMILIES)
    if shares == 1 and len(families) > 1:   # compiling takes most of the time
        command = [sys.executable, str(Path(__file__).parent / "check.py"), "--part", "equality",
                   "--budget", f"{settings.left_s:.0f}", "--seed", str(settings.seed)]
        children = [subprocess.Popen([*command, "--share", f"{i}/{len(families)}"], env=os.environ)
                    for i in range(len(families))]
        codes = [child.wait() for child in children]
        if any(codes): sys.exit(f"processes ended with {codes}")
        return
    for family in families[share::shares]: check_family(family, settings)
