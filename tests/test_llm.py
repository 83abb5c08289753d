"""The front door: vLLM's `LLM` on a tiny model with random weights, on both engines."""
import contextlib
import gc
import io
import os
import signal
import threading
import time

import numpy as np
import pytest
from front_tiny import ARGS, make_folder
from v0_front import assert_at_rest

from minengine.llm import (
    LLM, default_sampling_params, interrupts_wait, list_prompts, make_engine_args, one_each, render_chat)
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.tokenizer import ByteTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["hello", "The capital of France is", "a", "one two three four five six seven eight"]


def make_llm(engine, folder, **args):
    "V0 with prefix caching, which is V1's default."
    return LLM(folder, engine, **{**ARGS, "enable_prefix_caching": True, **args})


@pytest.fixture(scope="module", params=["v1", "v0"])
def llm(request, tmp_path_factory):
    return make_llm(request.param, make_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def idle_again(request):
    "Whatever a test did, nothing of it is left in the engine."
    yield
    if "llm" in request.fixturenames: assert_idle(request.getfixturevalue("llm"))


def core_of(llm): return llm.llm_engine.engine_core.engine_core


def scheduler_of(llm): return llm.llm_engine.scheduler if llm.engine_name == "v0" else core_of(llm).scheduler


def runner_of(llm):
    if llm.engine_name == "v0": return llm.llm_engine.executor.driver_worker.model_runner
    return core_of(llm).executor.worker.model_runner


def assert_idle(llm):
    if llm.engine_name == "v0":
        assert_at_rest(llm.llm_engine)
        assert not llm._streams
        return
    core = core_of(llm)
    runner, manager = runner_of(llm), core.scheduler.kv_cache_manager
    assert not llm.llm_engine.has_unfinished_requests() and not core.scheduler.requests
    assert not runner.requests and runner.batch.num_reqs == 0
    assert manager.num_free_blocks == core.vllm_config.cache_config.num_gpu_blocks
    assert not llm._streams
    core.check_invariants()
    llm.llm_engine.output_processor.check_invariants()


def tokens(outputs): return [o.outputs[0].token_ids for o in outputs]


# generate

def test_results_come_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5, 1)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(t) for t in tokens(outputs)] == [9, 2, 5, 1]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert all(o.outputs[0].text == llm.get_tokenizer().decode(o.outputs[0].token_ids, skip_special_tokens=True) for o in outputs)


def test_field_transformers45943_a_second_call_gets_its_own_results(llm):
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    again = llm.generate(PROMPTS[::-1], GREEDY, use_tqdm=False)
    assert tokens(first) == tokens(again)[::-1]
    assert not {o.request_id for o in first} & {o.request_id for o in again}


def test_alone_and_together_are_equal(llm):
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(together) == [tokens(llm.generate(p, GREEDY, use_tqdm=False))[0] for p in PROMPTS]


def test_forms_of_prompts(llm):
    ids = [104, 101, 108, 108, 111]
    want = tokens(llm.generate("hello", GREEDY, use_tqdm=False))
    for prompts in (ids, {"prompt_token_ids": ids}, [ids], ["hello"], np.array(ids), ({"prompt": "hello"},)):
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == want
    for given in (ids, [ids]):
        assert tokens(llm.generate(prompt_token_ids=given, sampling_params=GREEDY, use_tqdm=False)) == want
    named, = llm.generate("x", GREEDY, prompt_token_ids=ids, use_tqdm=False)
    assert named.prompt == "x" and named.prompt_token_ids == ids
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_list_prompts():
    assert list_prompts("a") == ["a"] and list_prompts([1, 2]) == [[1, 2]] and list_prompts([[1], [2]]) == [[1], [2]]
    assert list_prompts(None, [1, 2]) == [{"prompt": None, "prompt_token_ids": [1, 2]}]
    with pytest.raises(ValueError, match="needs prompts"): list_prompts(None)
    with pytest.raises(ValueError, match="2 prompts, but 1 lists"): list_prompts(["a", "b"], [[1]])
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling_params"): one_each("sampling_params", [1, 2], 3)


def test_the_users_params_are_not_changed(llm):
    params = SamplingParams(max_tokens=500, bad_words=["x"])
    before = params.clone()
    llm.generate("a", params, use_tqdm=False)
    assert params == before and params.output_kind is RequestOutputKind.CUMULATIVE


def test_n_and_seeds_equal_single_requests(llm):
    many, = llm.generate("hello", SamplingParams(n=3, seed=5, max_tokens=6), use_tqdm=False)
    single = [llm.generate("hello", SamplingParams(seed=5 + i, max_tokens=6), use_tqdm=False)[0] for i in range(3)]
    assert [c.token_ids for c in many.outputs] == tokens(single)
    assert len({tuple(c.token_ids) for c in many.outputs}) == 3


def test_logprobs_and_scoring(llm):
    out, = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True), use_tqdm=False)
    answer = out.outputs[0]
    assert [len(p) for p in answer.logprobs] == [2, 2, 2]
    assert answer.cumulative_logprob == pytest.approx(sum(p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids)))
    assert all(p[t].rank == 1 for p, t in zip(answer.logprobs, answer.token_ids))
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == 5
    # Scoring the same text gives the numbers that generating it gave.
    whole = out.prompt_token_ids + answer.token_ids
    score, = llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert score.outputs[0].token_ids == [] and score.outputs[0].finish_reason == "length"
    for position, sampled, token in zip(score.prompt_logprobs[5:], answer.logprobs, answer.token_ids):
        assert position[token].logprob == pytest.approx(sampled[token].logprob, abs=1e-4)


def test_scoring_a_full_window(llm):
    out, = llm.generate([[5] * 256], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert len(out.prompt_logprobs) == 256


def test_rest_of_the_window(llm):
    out, = llm.generate("x" * 240, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    # V0 goes one token past the window.
    assert len(out.outputs[0].token_ids) == {"v1": 16, "v0": 17}[llm.engine_name] and out.outputs[0].finish_reason == "length"


def test_stops(llm):
    free, = llm.generate("hello", GREEDY, use_tqdm=False)
    token, text = free.outputs[0].token_ids[3], free.outputs[0].text
    first = free.outputs[0].token_ids.index(token)
    out, = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[token]), use_tqdm=False)
    assert (out.outputs[0].token_ids, out.outputs[0].stop_reason) == (free.outputs[0].token_ids[:first + 1], token)
    out, = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=text[1:3]), use_tqdm=False)
    assert out.outputs[0].text == text[:text.index(text[1:3])] and out.outputs[0].finish_reason == "stop"


def test_eos_min_tokens_and_ignore_eos(llm):
    force = dict(temperature=0, max_tokens=6, logit_bias={257: 100.0})
    for params, num in ((SamplingParams(**force), 1), (SamplingParams(**force, min_tokens=3), 4), (SamplingParams(**force, ignore_eos=True), 6)):
        out, = llm.generate("hello", params, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == num
        assert out.outputs[0].finish_reason == ("length" if num == 6 else "stop")


def test_allowed_tokens_and_bad_words(llm):
    out, = llm.generate("hello", SamplingParams(max_tokens=20, allowed_token_ids=[97, 98, 99], bad_words=["b"]), use_tqdm=False)
    assert set(out.outputs[0].text) <= {"a", "c"}


def test_prefix_cache_is_reported_and_reset(llm):
    prompt = "a prompt that is longer than a block of sixteen"
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_detokenize_false(llm):
    out, = llm.generate("hello", SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True), use_tqdm=False)
    assert (out.outputs[0].text, len(out.outputs[0].token_ids)) == ("", 3)


def test_progress_bar(llm, capsys):
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "toks/s" in shown
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("engine,swap", [("v1", None), ("v0", "swap")])
def test_everything_at_once_under_a_pool_that_is_too_small(tmp_path, engine, swap):
    "Preemption does not show: n, scores, streams, stops and seeds as in a large pool."
    folder, answers = make_folder(tmp_path / "tiny", max_position_embeddings=96), []
    for num_blocks in (12, 64):
        llm = make_llm(engine, folder, num_gpu_blocks_override=num_blocks, block_size=8, preemption_mode=swap)
        params = [SamplingParams(n=2, seed=3, max_tokens=40, ignore_eos=True, logprobs=1, prompt_logprobs=1),
                  SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, repetition_penalty=1.3),
                  SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0),
                  SamplingParams(seed=4, max_tokens=60, ignore_eos=True, stop=["e", "a"], min_tokens=20)]
        stream = llm.stream("a stream beside them", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        next(stream)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        last = list(stream)[-1]
        assert_idle(llm)
        scheduler = scheduler_of(llm)
        preempted = scheduler.num_cumulative_preemption if engine == "v0" else scheduler.num_preempted
        assert (preempted > 0) == (num_blocks == 12)
        answers.append([(o.prompt_token_ids, o.prompt_logprobs and [p and list(p) for p in o.prompt_logprobs],
                         [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs]) for o in (*outputs, last)])
    assert answers[0] == answers[1]


# One bad prompt

@pytest.mark.parametrize("bad", [[], [300], "x" * 300, {"x": 1}])
def test_a_bad_prompt_takes_its_call_with_it_and_nothing_else(llm, bad):
    if llm.engine_name == "v0" and len(bad) == 300:   # no error, but no answer
        outputs = llm.generate(["a", "b", bad, "c"], GREEDY, use_tqdm=False)
        assert [len(t) for t in tokens(outputs)] == [8, 8, 0, 8] and outputs[2].outputs[0].finish_reason == "length"
        assert outputs[2].outputs[0].stop_reason == "300 tokens, a prompt has at most 256"
        return
    with pytest.raises(ValueError, match="prompt 2: "): llm.generate(["a", "b", bad, "c"], GREEDY, use_tqdm=False)
    assert_idle(llm)
    if llm.engine_name == "v1": assert core_of(llm).scheduler.finished_req_ids == set()
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


def test_bad_params(llm):
    for params, message in (([GREEDY], "2 prompts, but 1 sampling_params"), ([GREEDY, None], "must be SamplingParams"), ("x", "must be SamplingParams")):
        with pytest.raises(ValueError, match=message): llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(ValueError, match="2 prompts, but 1 priority"): llm.generate(["a", "b"], GREEDY, priority=[0], use_tqdm=False)
    message = {"v1": "priority is not supported", "v0": "scheduling_policy is 'fcfs'"}[llm.engine_name]
    with pytest.raises(ValueError, match=message): llm.generate("a", GREEDY, priority=[1], use_tqdm=False)


# Interrupts and failures

def test_ctrl_c_ends_the_call_after_its_step(llm):
    engine, steps = llm.llm_engine, []
    step = engine.step
    def step_with_ctrl_c():
        steps.append(0)
        if len(steps) == 3: os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        steps[-1] = 1  # the step was not torn apart
        return outputs
    engine.step = step_with_ctrl_c
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    finally: del engine.step
    assert steps == [1, 1, 1] and signal.getsignal(signal.SIGINT) is before
    assert_idle(llm)
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


def test_the_second_ctrl_c_does_not_wait():
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100): time.sleep(0.01)
            raise AssertionError("not interrupted")


def test_a_torn_step_leaves_a_sound_engine(llm):
    want = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    stream = llm.stream("bystander", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    runner = runner_of(llm)
    model, calls = runner.run_model, []
    def press_twice(*args):
        calls.append(1)
        if len(calls) == 2: os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)
        return model(*args)
    runner.run_model = press_twice
    try:
        with pytest.raises(KeyboardInterrupt): llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    finally: runner.run_model = model
    assert len(calls) == 2 and not llm.llm_engine.has_unfinished_requests()
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == want
    with pytest.raises(RuntimeError, match="ended this request"): list(stream)


def test_interrupts_are_left_alone_in_other_threads(llm):
    before, got = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: got.append(llm.generate("a", GREEDY, use_tqdm=False)))
    thread.start(); thread.join()
    assert len(got) == 1 and signal.getsignal(signal.SIGINT) is before


def test_a_failing_model_ends_the_call_and_the_next_one_works(llm):
    want = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    runner = runner_of(llm)
    model, calls = runner.run_model, []
    def failing(*args):
        calls.append(1)
        if len(calls) == 2: raise RuntimeError("out of memory")
        return model(*args)
    runner.run_model = failing
    try:
        with pytest.raises(RuntimeError, match="out of memory"): llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    finally: runner.run_model = model
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == want


def test_requests_that_got_lost_are_an_error_not_a_loop(llm):
    step = llm.llm_engine.step
    llm.llm_engine.step = lambda: llm.llm_engine._abandon() or []
    try:
        with pytest.raises(RuntimeError, match="ended this request"): llm.generate("a", GREEDY, use_tqdm=False)
    finally: llm.llm_engine.step = step


# Streams

def test_stream_kinds(llm):
    want, = llm.generate("hello", GREEDY, use_tqdm=False)
    text = want.outputs[0].text
    for kind in RequestOutputKind:
        params = GREEDY.clone()
        params.output_kind = kind
        shown = list(llm.stream("hello", params))
        assert shown[-1].finished and all(not o.finished for o in shown[:-1])
        if kind is RequestOutputKind.DELTA: assert "".join(o.outputs[0].text for o in shown) == text
        else: assert shown[-1].outputs[0].text == text
        assert len(shown) == (1 if kind is RequestOutputKind.FINAL_ONLY else 8)


def test_leaving_a_stream_aborts_it(llm):
    for output in llm.stream("hello", SamplingParams(max_tokens=200, ignore_eos=True)): break
    gc.collect()
    assert_idle(llm)
    stream = llm.stream("hello", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert_idle(llm)
    llm.stream("hello", GREEDY)  # never started: nothing to end


def test_streams_and_calls_side_by_side(llm):
    want = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    streams = [llm.stream(p, GREEDY) for p in PROMPTS[:2]]
    first = [next(s) for s in streams]
    assert tokens(llm.generate(PROMPTS[2:], GREEDY, use_tqdm=False)) == want[2:]
    assert [list(s)[-1].outputs[0].token_ids for s in streams] == want[:2]
    assert all(not o.finished for o in first)


def test_a_stream_with_a_bad_prompt(llm):
    with pytest.raises(ValueError, match="empty"): next(llm.stream([], GREEDY))


def test_a_stream_whose_engine_failed_does_not_wait_for_ever(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.llm_engine._abandon()
    with pytest.raises(RuntimeError, match="ended this request"): list(stream)


# chat

def test_chat(llm):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    out, = llm.chat(messages, GREEDY, use_tqdm=False)
    assert out.prompt == "<|system|>be brief<|eos|><|user|>hi<|eos|><|assistant|>"
    assert out.prompt_token_ids == ByteTokenizer().encode(out.prompt)
    both = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert [o.prompt.startswith("<|system|>") for o in both] == [True, False]
    bare, = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert not bare.prompt.endswith("<|assistant|>")
    own, = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert own.prompt == "be brief!"


def test_chat_errors(llm):
    with pytest.raises(ValueError, match="empty"): llm.chat([], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="role"): llm.chat([{"content": "x"}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="needs a tokenizer"): render_chat(None, [{"role": "user", "content": "x"}])


def test_field_vllm40689_the_template_is_counted(llm):
    template = len(render_chat(llm.get_tokenizer(), [{"role": "user", "content": ""}])["prompt_token_ids"])
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    out, = llm.chat([{"role": "user", "content": "x" * (250 - template)}], params, use_tqdm=False)
    assert (len(out.prompt_token_ids), len(out.outputs[0].token_ids)) == (250, 6 + (llm.engine_name == "v0"))


# Start-up

@pytest.mark.parametrize("engine", ["v1", "v0"])
def test_start_up_says_what_runs(tmp_path, capsys, engine):
    make_llm(engine, make_folder(tmp_path / "tiny"))
    shown = capsys.readouterr().err
    assert ("swap space" in shown) == (engine == "v0")
    for part in (f"engine {engine}", "tiny", "float32 on cpu", "weights", "1,024 tokens, 64 blocks of 16", "4.0 requests of max_model_len 256"):
        assert part in shown


def test_a_script_for_vllm_runs_after_its_import_has_changed(tmp_path):
    script = f"""
from minengine import LLM, SamplingParams
prompts = ["Hello, my name is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model={make_folder(tmp_path / "tiny")!r}, trust_remote_code=True, enforce_eager=True, dtype="float",
          max_model_len=64, tensor_parallel_size=1, seed=1, **{ARGS!r})
outputs = llm.generate(prompts, sampling_params)
for output in outputs: print(f"Prompt: {{output.prompt!r}}, tokens: {{len(output.outputs[0].token_ids)}}")
"""
    namespace, shown = {}, io.StringIO()
    with contextlib.redirect_stdout(shown): exec(script, namespace)
    assert shown.getvalue().splitlines() == ["Prompt: 'Hello, my name is', tokens: 16", "Prompt: 'The future of AI is', tokens: 16"]


def test_vllm_arguments(tmp_path):
    args = make_engine_args("m", "v1", trust_remote_code=True, quantization=None, block_size=8)
    assert (args.model, args.block_size) == ("m", 8)
    with pytest.raises(ValueError, match="quantization='awq' is not supported"): make_engine_args("m", "v1", quantization="awq")
    with pytest.raises(TypeError, match="no argument 'bloc_size'"): make_engine_args("m", "v1", bloc_size=8)


def test_tokenizer_objects_and_none(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    own = ByteTokenizer()
    assert LLM(folder, **ARGS | {"tokenizer": own}).get_tokenizer() is own
    llm = LLM(folder, **ARGS | {"tokenizer": None, "skip_tokenizer_init": True})
    assert llm.get_tokenizer() is None
    out, = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 8 and out.outputs[0].text == ""


def test_field_lm_eval3154_defaults_come_from_the_model(tmp_path, capsys):
    folder = make_folder(tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 7, "eos_token_id": [257, 258]}')
    params = LLM(folder, **ARGS).get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty, params.max_tokens) == (0.6, 0.9, 20, 1.1, 7)
    assert "defaults    temperature 0.6, top_k 20, top_p 0.9, repetition_penalty 1.1, max_tokens 7" in capsys.readouterr().err
    assert LLM(folder, generation_config="vllm", **ARGS).get_default_sampling_params() == SamplingParams()
    assert "defaults" not in capsys.readouterr().err
    assert default_sampling_params({}) == SamplingParams()


def test_same_seed_same_answers_and_the_users_generator_is_left_alone(tmp_path):
    import torch
    folder = make_folder(tmp_path / "tiny")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    answers = [tokens(LLM(folder, engine, **ARGS, seed=1).generate(PROMPTS, SamplingParams(max_tokens=8), use_tqdm=False))
               for engine in ("v1", "v1", "v0", "v0")]
    assert answers[0] == answers[1] and answers[2] == answers[3]  # the weights are seeded too, so no comparison with 2
    assert torch.equal(torch.get_rng_state(), before)  # field vllm#17929


# One engine's wishes

def test_what_one_engine_has_the_other_refuses(llm):
    v0 = llm.engine_name == "v0"
    def bias(token_ids, row):   # a per-request function: the token after n tokens is n
        row[:] = float("-inf")
        row[len(token_ids)] = 0.0
        return row
    for wish, field in ((dict(best_of=3, n=2), "best_of"), (dict(logits_processors=[bias], ignore_eos=True), "logits_processors")):
        params = SamplingParams(max_tokens=4, **wish)
        if v0: assert len(llm.generate("hello", params, use_tqdm=False)[0].outputs) == params.n
        else:
            with pytest.raises(ValueError, match=f"{field} is not supported by engine 'v1'"): llm.generate("hello", params, use_tqdm=False)
    if v0: assert tokens(llm.generate("hello", params, use_tqdm=False)) == [[0, 1, 2, 3]]
    salted = {"prompt": "hello", "cache_salt": "x"}
    if not v0: assert len(llm.generate(salted, GREEDY, use_tqdm=False)) == 1
    else:
        with pytest.raises(ValueError, match="cache_salt is not supported by engine 'v0'"): llm.generate(salted, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("engine,option,other", [
    ("v1", dict(preemption_mode="swap"), "V0"), ("v1", dict(swap_space=1), "V0"), ("v1", dict(num_scheduler_steps=2), "V0"),
    ("v1", dict(use_async_output_proc=True), "V0"), ("v1", dict(scheduling_policy="priority"), "V0"),
    ("v1", dict(scheduler_delay_factor=0.5), "V0"), ("v1", dict(enable_chunked_prefill=False), "V0"),
    ("v0", dict(num_preallocate_tokens=32), "V1"), ("v0", dict(logprobs_mode="raw_logprobs"), "V1")], ids=str)
def test_options_of_the_other_engine_are_refused(tmp_path, engine, option, other):
    with pytest.raises(ValueError, match=f"{[*option][0]}=.* is for {other}"):
        LLM(make_folder(tmp_path / "tiny"), engine, **ARGS, **option)


def test_async_output_has_two_switches_that_exclude_each_other(tmp_path):
    folder, both = make_folder(tmp_path / "tiny"), dict(use_async_output_proc=True, disable_async_output_proc=True)
    with pytest.raises(ValueError, match="use_async_output_proc.*disable_async_output_proc"): LLM(folder, "v0", **ARGS, **both)
    assert not make_llm("v0", folder).llm_engine.scheduler.use_async_output_proc   # on a CPU
    assert make_llm("v0", folder, use_async_output_proc=True).llm_engine.scheduler.use_async_output_proc


def test_v0_reports_processed_logprobs_and_v1_raw_ones(llm):
    out, = llm.generate("hello", SamplingParams(max_tokens=3, top_k=1, logprobs=0, ignore_eos=True), use_tqdm=False)
    values = [p[t].logprob for p, t in zip(out.outputs[0].logprobs, out.outputs[0].token_ids)]
    assert all(v == 0.0 for v in values) if llm.engine_name == "v0" else all(v < -0.1 for v in values)


def test_v0_shows_one_empty_output_for_each_chunk_of_a_prompt(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    for engine, empty in (("v0", 3), ("v1", 0)):
        llm = make_llm(engine, folder, enable_chunked_prefill=True, max_num_batched_tokens=16, enable_prefix_caching=False)
        shown = list(llm.stream("x" * 50, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
        assert [len(o.outputs[0].token_ids) for o in shown] == [0] * empty + [1, 2]


def test_priorities_on_v0(tmp_path):
    llm = make_llm("v0", make_folder(tmp_path / "tiny"), scheduling_policy="priority", max_num_seqs=1)
    order, engine = [], llm.llm_engine
    step = engine.step
    engine.step = lambda: [order.append(o.request_id) or o for o in step()]
    outputs = llm.generate(PROMPTS, GREEDY, priority=[3, 2, 1, 0], use_tqdm=False)
    assert order.index(outputs[3].request_id) < order.index(outputs[2].request_id) < order.index(outputs[1].request_id)


# The same wishes, the same answers

WISHES = dict(
    repetition=dict(temperature=0, repetition_penalty=1.5), presence=dict(temperature=0, presence_penalty=1.5),
    frequency=dict(temperature=0, frequency_penalty=1.2), bias=dict(temperature=0, logit_bias={97: 3.0, 98: -5.0}),
    bad_words=dict(temperature=0, bad_words=["a", "bc"]), allowed=dict(temperature=0, allowed_token_ids=[97, 98, 99], repetition_penalty=1.3),
    min_tokens=dict(temperature=0, logit_bias={257: 100.0}, min_tokens=5), stop=dict(temperature=0, stop=["a", "e", "i"]),
    seed=dict(seed=3, temperature=0.9), top=dict(seed=3, top_k=5, top_p=0.7), min_p=dict(seed=9, min_p=0.02, temperature=2.0),
    scores=dict(temperature=0, logprobs=3, prompt_logprobs=2))


@pytest.fixture(scope="module")
def v1_answers(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("both"))
    v1 = make_llm("v1", folder)
    return folder, {name: answers_to(v1, wish) for name, wish in WISHES.items()}


def answers_to(llm, wish):
    prompts = ["hello there", "aaaaaaaaaaaaaaaaaaaaaaaaa b", "q"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, **wish), use_tqdm=False)
    def scores(rows): return rows and [row and {t: round(p.logprob, 4) for t, p in row.items()} for row in rows]
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, scores(c.logprobs), scores(o.prompt_logprobs)) for o in outputs for c in o.outputs]


@pytest.mark.parametrize("options", [
    dict(), dict(use_async_output_proc=True), dict(num_scheduler_steps=4), dict(enable_chunked_prefill=True, max_num_batched_tokens=16),
    dict(num_scheduler_steps=3, use_async_output_proc=True, enable_chunked_prefill=True)], ids=str)
def test_both_engines_obey_the_same_wishes(v1_answers, options):
    "Penalties, biases, limits, seeds and scores, also within bursts and with late outputs."
    folder, wanted = v1_answers
    v0 = make_llm("v0", folder, **options)
    for name, wish in WISHES.items(): assert answers_to(v0, wish) == wanted[name], name
    assert_idle(v0)
