"""The output processor: text, stop strings, logprobs, n answers, failures.

Tests named `test_field_…` are rows of the field reports.
"""
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minengine.v1.engine.request_state as module
from minengine.inputs import child_seed
from minengine.output_text import make_logprobs, num_held_back
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v1.engine.output_processor import OutputProcessor
from minengine.v1.messages import (
    EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsLists)

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_token_id


def make_request(request_id="r", prompt="Q: ", **params) -> EngineCoreRequest:
    params = SamplingParams(**{"max_tokens": 1000, **params})
    return EngineCoreRequest(request_id, prompt, TOKENIZER.encode(prompt), params, EOS, 0.0)


def start(**params):
    "A processor with one request, and the core's names for its answers."
    processor = OutputProcessor(TOKENIZER)
    return processor, [r.request_id for r in processor.add_request(make_request(**params))]


def feed(processor, core_id, tokens, **fields):
    "One step's output for one request: what users see, what the core must abort."
    out = processor.process_outputs([EngineCoreOutput(core_id, list(tokens), **fields)])
    processor.check_invariants()
    return out.request_outputs, out.reqs_to_abort


def run(text, chunk=1, finish=FinishReason.LENGTH, processor_and_ids=None, **params):
    "Feed `text` until the answer ends; every output, every abort."
    processor, ids = processor_and_ids or start(**params)
    data, shown, aborts = list(text.encode()), [], []
    for i in range(0, len(data), chunk):
        last = i + chunk >= len(data)
        outputs, abort = feed(processor, ids[0], data[i:i + chunk], finish_reason=finish if last else None)
        shown += outputs; aborts += abort
        if outputs and outputs[-1].finished: break
    return shown, aborts


# The way through

def test_cumulative_delta_final_tell_the_same_story():
    text = "héllo wörld 🎈 end"
    for chunk in (1, 2, 3, 100):
        cumulative, _ = run(text, chunk)
        deltas, _ = run(text, chunk, output_kind=DELTA)
        final, _ = run(text, chunk, output_kind=FINAL_ONLY)
        assert cumulative[-1].outputs[0].text == text
        assert "".join(o.outputs[0].text for o in deltas) == text
        assert sum((o.outputs[0].token_ids for o in deltas), []) == list(text.encode())
        assert len(final) == 1 and final[0].outputs[0].text == text
        assert all(text.startswith(o.outputs[0].text) for o in cumulative)
        assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]


def test_outputs_do_not_change_after_they_were_given():
    shown, _ = run("abc", logprobs=None)
    assert [o.outputs[0].token_ids for o in shown] == [[97], [97, 98], [97, 98, 99]]


def test_unfinished_characters_come_out_at_the_end():
    text = "é".encode()[:1]
    processor, ids = start()
    shown, _ = feed(processor, ids[0], text, finish_reason=FinishReason.LENGTH)
    assert shown[0].outputs[0].text == "\N{REPLACEMENT CHARACTER}" == TOKENIZER.decode(list(text))


def test_field_vllm_mlx109_no_half_characters_in_a_stream():
    shown, _ = run("ď🎈", output_kind=DELTA)
    assert [o.outputs[0].text for o in shown] == ["", "ď", "", "", "", "🎈"]


def test_no_output_while_the_prompt_is_computed():
    processor, ids = start(prompt_logprobs=0, output_kind=DELTA)
    rows = LogprobsLists([[58], [32]], [[-1.0], [-2.0]], [1, 2])
    assert feed(processor, ids[0], [], new_prompt_logprobs=rows) == ([], [])
    (first,), _ = feed(processor, ids[0], b"a")
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == 3
    (second,), _ = feed(processor, ids[0], b"b")
    assert second.prompt_logprobs is None  # a delta says it once


def test_unknown_ids_are_skipped():
    assert feed(OutputProcessor(TOKENIZER), "nobody", b"a") == ([], [])


def test_detokenize_false_and_no_tokenizer():
    for tokenizer in (TOKENIZER, None):
        processor = OutputProcessor(tokenizer)
        core, = processor.add_request(make_request(detokenize=False, logprobs=1))
        rows = LogprobsLists([[97, 97]], [[-1.0, -1.0]], [1])
        (out,), _ = feed(processor, core.request_id, b"a", new_logprobs=rows)
        assert (out.outputs[0].text, out.outputs[0].token_ids) == ("", [97])
        assert out.outputs[0].logprobs[0][97].decoded_token is None


def test_special_tokens_are_left_out_unless_asked_for():
    for skip, text in ((True, "a"), (False, "a<|eos|>")):
        processor, ids = start(skip_special_tokens=skip)
        feed(processor, ids[0], b"a")
        (out,), _ = feed(processor, ids[0], [EOS], finish_reason=FinishReason.STOP)
        assert (out.outputs[0].text, out.outputs[0].token_ids) == (text, [97, EOS])
        assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)


def test_cached_tokens_and_metrics_are_reported():
    processor, ids = start()
    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 10.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 12.5)]
    out = EngineCoreOutput(ids[0], [97], events=events, num_cached_tokens=16)
    first = processor.process_outputs([out], timestamp=13.0).request_outputs[0]
    assert first.num_cached_tokens == 16
    assert (first.metrics.first_scheduled_time, first.metrics.time_in_queue) == (12.5, 2.5)
    out = EngineCoreOutput(ids[0], [98], finish_reason=FinishReason.LENGTH, num_cached_tokens=0)
    last = processor.process_outputs([out], timestamp=14.0).request_outputs[0]
    assert last.num_cached_tokens == 16  # a preemption later does not rewrite it
    m = last.metrics
    assert (m.first_token_time, m.last_token_time, m.finished_time) == (13.0, 14.0, 14.0)
    assert first.metrics.finished_time is None


# Stop strings

@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
@pytest.mark.parametrize("include, text", [(False, "hel"), (True, "hello w")])
def test_field_vllm3672_stop_string_inside_and_across_tokens(chunk, include, text):
    shown, aborts = run("hello world", chunk, stop=["lo w"], include_stop_str_in_output=include)
    answer = shown[-1].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", "lo w")
    assert aborts == (["r#0"] if chunk < 11 else [])  # the core does not know yet
    assert answer.token_ids == list(b"hello w")  # up to the token that completed it


@pytest.mark.parametrize("text, stop, final", [
    ("abcDEFGHIJxyz", ["DEFGHIJ"], "abc"), ("think\nObservation: 3", ["\nObservation"], "think")])
def test_field_vllm3574_vllm2577_streams_never_leak_a_stop_string(text, stop, final):
    for chunk in (1, 2, 5):
        deltas, _ = run(text, chunk, stop=stop, output_kind=DELTA)
        assert "".join(o.outputs[0].text for o in deltas) == final
        cumulative, _ = run(text, chunk, stop=stop)
        assert all(final.startswith(o.outputs[0].text) for o in cumulative)


def test_held_back_text_comes_when_it_can_not_be_a_stop_string():
    deltas, _ = run("abENcENDx", stop=["END"], output_kind=DELTA)
    assert [o.outputs[0].text for o in deltas] == ["a", "b", "", "", "ENc", "", "", ""]
    deltas, _ = run("xEN", stop=["END"], output_kind=DELTA)
    assert [o.outputs[0].text for o in deltas] == ["x", "", "EN"]  # the end lets it out


def test_earliest_token_wins():
    # "b" comes first in the text, "d" first in the list of stop strings.
    for chunk in (1, 4):
        shown, _ = run("abcd", chunk, stop=["d", "b"])
        assert (shown[-1].outputs[0].text, shown[-1].outputs[0].stop_reason) == ("a", "b")
        assert shown[-1].outputs[0].token_ids == [97, 98]


def test_logprobs_are_cut_with_the_tokens():
    processor, ids = start(stop=["b"], logprobs=0)
    rows = LogprobsLists([[97], [98], [99]], [[-1.0], [-2.0], [-4.0]], [1, 1, 1])
    (out,), _ = feed(processor, ids[0], b"abc", new_logprobs=rows)
    assert [list(position) for position in out.outputs[0].logprobs] == [[97], [98]]
    assert out.outputs[0].cumulative_logprob == -3.0


def test_a_stop_string_beats_a_later_end_of_the_core():
    for reason in FinishReason:
        shown, aborts = run("ab?c", 4, finish=reason, stop=["?"])
        assert (shown[-1].outputs[0].finish_reason, shown[-1].outputs[0].stop_reason) == ("stop", "?")
        assert aborts == []  # it has ended there too


def test_the_cores_own_stop_keeps_its_reason():
    processor, ids = start(stop=["b"])
    (out,), aborts = feed(processor, ids[0], b"ab", finish_reason=FinishReason.STOP, stop_reason=98)
    assert (out.outputs[0].stop_reason, aborts) == (98, [])


@pytest.mark.parametrize("chunk", [1, 3])
def test_field_vllm21987_stop_strings_wait_for_min_tokens(chunk):
    shown, _ = run("a\nbcd\nef", chunk, stop=["\n"], min_tokens=4, output_kind=DELTA)
    assert "".join(o.outputs[0].text for o in shown) == "a\nbcd"
    shown, _ = run("abc\n", 1, stop=["\n"], min_tokens=4)  # the fourth token counts
    assert (shown[-1].outputs[0].text, shown[-1].outputs[0].finish_reason) == ("abc", "stop")


def test_field_vllm792_special_tokens_stop_by_id_not_by_string():
    processor, ids = start(stop=["<|eos|>"])
    (out,), _ = feed(processor, ids[0], [97, EOS])
    assert not out.finished  # skipped tokens have no text to match
    processor, ids = start(stop=["<|eos|>"], skip_special_tokens=False)
    (out,), _ = feed(processor, ids[0], [97, EOS])
    assert out.finished and out.outputs[0].text == "a"


def test_field_vllm4188_the_prompt_is_not_searched():
    shown, _ = run("n: yes", prompt="Questio", stop=["Question:"])
    assert shown[-1].outputs[0].text == "n: yes" and shown[-1].outputs[0].finish_reason == "length"


@settings(max_examples=300, deadline=None)
@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
       st.booleans(), st.integers(0, 12), st.integers(1, 5))
def test_streams_agree_with_a_plain_search(text, stop, include, min_tokens, chunk):
    "Any text, any stop strings, any cut into steps: one token at a time decides."
    data, expected = text.encode(), None
    for n in range(max(min_tokens, 1), len(data) + 1):  # tokens known
        seen = data[:n].decode(errors="ignore")
        new = len(seen) - len(data[:n - 1].decode(errors="ignore"))
        for s in stop:
            at = seen.find(s, max(0, len(seen) - new - len(s) + 1))
            if new and at >= 0:
                expected = seen[:at + len(s) * include], s
                break
        if expected: break
    params = dict(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    if not data: return
    for kind in RequestOutputKind:
        shown, _ = run(text, chunk, output_kind=kind, **params)
        last = shown[-1].outputs[0]
        got = "".join(o.outputs[0].text for o in shown) if kind is DELTA else last.text
        assert (got, last.stop_reason) == (expected or (text, None))
        if kind is CUMULATIVE: assert all(got.startswith(o.outputs[0].text) for o in shown)


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_num_held_back_is_the_longest_possible_beginning(text, stop):
    ends = [n for n in range(len(text) + 1) if any(len(s) > n and s.startswith(text[len(text) - n:]) for s in stop)]
    assert num_held_back(text, stop) == max(ends, default=0)


# Logprobs

def test_logprobs_have_k_or_k_plus_one_entries():
    rows = LogprobsLists([[5, 7, 9], [7, 7, 9]], [[-3.0, -0.5, -1.0], [-0.5, -0.5, -1.0]], [4, 1])
    first, second = make_logprobs(rows, 2, None)
    assert [(t, p.rank) for t, p in first.items()] == [(5, 4), (7, 1), (9, 2)]
    assert [(t, p.rank) for t, p in second.items()] == [(7, 1), (9, 2)]


def test_wider_rows_than_asked_for_are_cut():
    # The batch's widest request decides how many columns there are.
    rows = LogprobsLists([[5, 7, 9, 11]], [[-3.0, -0.5, -1.0, -2.0]], [4])
    assert [list(p) for p in make_logprobs(rows, 1, None)] == [[5, 7]]
    assert [list(p) for p in make_logprobs(rows, 0, None)] == [[5]]


def test_field_vllm48567_ids_outside_the_vocabulary_have_no_text():
    rows = LogprobsLists([[2**32, -1]], [[-1.0, -2.0]], [1])
    position, = make_logprobs(rows, 1, TOKENIZER)
    assert [p.decoded_token for p in position.values()] == ["", ""]


def test_field_vllm44319_entries_are_kept_by_id():
    rows = LogprobsLists([[200, 201, 202]], [[-1.0, -1.5, -2.0]], [1])  # three broken bytes, one look
    position, = make_logprobs(rows, 2, TOKENIZER)
    assert list(position) == [200, 201, 202] and len({p.decoded_token for p in position.values()}) == 1


def test_delta_logprobs_are_the_new_ones_only():
    processor, ids = start(logprobs=0, output_kind=DELTA)
    rows = lambda *tokens: LogprobsLists([[t] for t in tokens], [[-1.0]] * len(tokens), [1] * len(tokens))
    (a,), _ = feed(processor, ids[0], b"ab", new_logprobs=rows(97, 98))
    (b,), _ = feed(processor, ids[0], b"c", new_logprobs=rows(99))
    (c,), _ = feed(processor, ids[0], b"", finish_reason=FinishReason.LENGTH)
    assert [len(o.outputs[0].logprobs) for o in (a, b, c)] == [2, 1, 0]
    assert c.outputs[0].cumulative_logprob == -3.0


# n answers

def test_field_vllm11898_children_have_seeds_of_their_own_and_stream_on():
    processor = OutputProcessor(TOKENIZER)
    cores = processor.add_request(make_request(n=3, seed=7, output_kind=DELTA))
    assert [c.sampling_params.seed for c in cores] == [7, 8, 9]
    assert all(c.sampling_params.n == 1 for c in cores) and len({c.request_id for c in cores}) == 3
    ids = [c.request_id for c in cores]
    (out,), _ = feed(processor, ids[1], b"x", finish_reason=FinishReason.LENGTH)
    assert [(c.index, c.text, c.finish_reason) for c in out.outputs] == [(1, "x", "length")] and not out.finished
    (out,), _ = feed(processor, ids[0], b"y")  # the others go on
    assert [(c.index, c.text) for c in out.outputs] == [(0, "y")]
    feed(processor, ids[0], b"", finish_reason=FinishReason.STOP)
    (out,), _ = feed(processor, ids[2], b"z", finish_reason=FinishReason.STOP)
    assert out.finished and not processor.has_unfinished_requests()


def test_one_output_a_step_for_all_answers():
    processor, ids = start(n=2)
    step = [EngineCoreOutput(i, list(b"ab")) for i in ids]
    out, = processor.process_outputs(step).request_outputs
    assert [(c.index, c.text) for c in out.outputs] == [(0, "ab"), (1, "ab")]


def test_final_only_waits_for_the_last_answer():
    processor, ids = start(n=2, output_kind=FINAL_ONLY)
    assert feed(processor, ids[1], b"b", finish_reason=FinishReason.LENGTH) == ([], [])
    (out,), _ = feed(processor, ids[0], b"a", finish_reason=FinishReason.LENGTH)
    assert [(c.index, c.text) for c in out.outputs] == [(0, "a"), (1, "b")] and out.finished


def test_only_the_first_answer_scores_the_prompt():
    processor = OutputProcessor(TOKENIZER)
    cores = processor.add_request(make_request(n=2, prompt_logprobs=0, output_kind=DELTA))
    assert [c.sampling_params.prompt_logprobs for c in cores] == [0, None]
    (out,), _ = feed(processor, cores[1].request_id, b"x")  # overtakes the first
    assert out.prompt_logprobs is None
    rows = LogprobsLists([[58], [32]], [[-1.0], [-2.0]], [1, 2])
    (out,), _ = feed(processor, cores[0].request_id, b"y", new_prompt_logprobs=rows)
    assert len(out.prompt_logprobs) == 3


def test_field_vllm14326_abort_reaches_every_child():
    processor, ids = start(n=3)
    feed(processor, ids[1], b"", finish_reason=FinishReason.LENGTH)
    assert processor.abort_requests(["r", "nobody", "r"]) == [ids[0], ids[2]]
    assert not processor.parents and not processor.request_states


@pytest.mark.parametrize("seed", [0, 7, -5, -2, -1000, 2**63 - 2, -2**63])
def test_child_seeds_are_valid_and_different(seed):
    seeds = [child_seed(seed, i) for i in range(10)]
    assert seeds[0] == seed and len(set(seeds)) == 10
    for s in seeds: assert SamplingParams(seed=s).seed == s  # -1 would mean none
    assert child_seed(None, 3) is None


# Ids

def test_field_vllm8393_an_id_in_use_is_refused_and_the_first_goes_on():
    processor, ids = start()
    with pytest.raises(ValueError, match="request id 'r' is in use"): processor.add_request(make_request())
    processor.check_invariants()
    (out,), _ = feed(processor, ids[0], b"a")
    assert out.outputs[0].text == "a"


def test_field_vllm29355_an_id_is_free_at_once_and_late_outputs_hurt_nobody():
    processor, old = start()
    processor.abort_requests(["r"])
    new = processor.add_request(make_request())[0].request_id
    assert new != old[0]
    assert feed(processor, old[0], b"late") == ([], [])  # a step that was under way
    (out,), _ = feed(processor, new, b"a")
    assert out.outputs[0].text == "a"


# Failures

def test_field_vllm21951_a_failing_detokenizer_ends_its_request_only(monkeypatch):
    class Broken(module.IncrementalDetokenizer):
        def update(self, new_token_ids):
            if 66 in new_token_ids: raise RuntimeError("broken vocabulary")
            return super().update(new_token_ids)
    monkeypatch.setattr(module, "IncrementalDetokenizer", Broken)
    processor = OutputProcessor(TOKENIZER)
    a, b = (processor.add_request(make_request(i))[0].request_id for i in "ab")
    step = [EngineCoreOutput(a, [65, 66]), EngineCoreOutput(b, [65])]
    out = processor.process_outputs(step)
    bad, good = out.request_outputs
    assert bad.finished and bad.outputs[0].finish_reason == "abort"
    assert "broken vocabulary" in bad.outputs[0].stop_reason
    assert not good.finished and good.outputs[0].text == "A"
    assert out.reqs_to_abort == [a]
    processor.check_invariants()


# Statistics

def test_iteration_stats():
    processor = OutputProcessor(TOKENIZER, log_stats=True)
    prompts = {"a": "12345", "b": "123", "c": "1"}
    ids = {k: processor.add_request(make_request(k, p))[0].request_id for k, p in prompts.items() if k != "c"}
    step = lambda now, **last: processor.process_outputs(
        [EngineCoreOutput(i, [97], finish_reason=last.get(k)) for k, i in ids.items()], now).iteration_stats
    first = step(1.0)
    assert (first.num_prompt_tokens, first.num_generation_tokens) == (8, 2)
    assert len(first.time_to_first_token_s) == 2 and not first.time_per_output_token_s
    ids["c"] = processor.add_request(make_request("c", prompts["c"]))[0].request_id
    second = step(1.5, a=FinishReason.LENGTH)
    assert (second.num_prompt_tokens, second.num_generation_tokens) == (1, 3)
    assert second.time_per_output_token_s == [0.5, 0.5]
    done, = second.finished
    assert (done.num_prompt_tokens, done.num_generation_tokens, done.decode_time_s) == (5, 2, 0.5)


def test_preemptions_are_counted_and_prompts_are_not_counted_twice():
    processor = OutputProcessor(TOKENIZER, log_stats=True)
    core_id = processor.add_request(make_request())[0].request_id
    processor.process_outputs([EngineCoreOutput(core_id, [97])], 1.0)
    out = EngineCoreOutput(core_id, [98], events=[EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.2)])
    stats = processor.process_outputs([out], 2.0).iteration_stats
    assert (stats.num_preempted_reqs, stats.num_prompt_tokens) == (1, 0)


# Anything in any order

def test_random_traffic_keeps_the_books():
    rng, processor, alive = random.Random(0), OutputProcessor(TOKENIZER, log_stats=True), {}
    for i in range(3000):
        action = rng.random()
        if action < 0.2:
            cores = processor.add_request(make_request(f"r{i}", n=rng.randint(1, 3), stop=["ab"], output_kind=rng.choice(list(RequestOutputKind))))
            alive[f"r{i}"] = {c.request_id for c in cores}
        elif action < 0.25 and alive:
            name = rng.choice(list(alive))
            assert set(processor.abort_requests([name])) == alive.pop(name)
        elif alive:
            cores = [c for children in alive.values() for c in children if rng.random() < 0.5]
            step = [EngineCoreOutput(c, [rng.choice(b"abc") for _ in range(rng.randint(1, 2))],
                                     finish_reason=rng.choice([None, None, FinishReason.STOP])) for c in cores]
            result = processor.process_outputs(step)
            over = set(result.reqs_to_abort) | {o.request_id for o in step if o.finish_reason is not None}
            for name, children in list(alive.items()):
                children -= over
                if not children: del alive[name]
        assert set(processor.parents) == set(alive)
        processor.check_invariants()
