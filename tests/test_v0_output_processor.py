"""V0's output processor: stops, text, forks, bursts, best_of, kinds.

Tests named `test_field_…` are rows of the field reports, `test_vllm_…` are
scenarios of vLLM's own tests.
"""
import itertools
import random
from types import SimpleNamespace

import pytest

from minengine.outputs import Logprob
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v0.output_processor import (
    Detokenizer, MultiStepOutputProcessor, SingleStepOutputProcessor, StopChecker, make_request_output)
from minengine.v0.sequence import (
    CompletionSequenceGroupOutput, Sequence, SequenceGroup, SequenceOutput, SequenceStatus)

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_token_id
STOPPED, CAPPED = SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED
ABORTED = SequenceStatus.FINISHED_ABORTED


class Setup:
    "One group, its processor, and the scheduler's part of it."

    def __init__(self, prompt="Q: ", kind=SingleStepOutputProcessor, max_model_len=4096, tokenizer=TOKENIZER, **params):
        ids = prompt if isinstance(prompt, list) else TOKENIZER.encode(prompt)
        self.params = SamplingParams(**{"max_tokens": 1000, **params})
        seq = Sequence(0, {"prompt_token_ids": ids, "prompt": None}, 16, EOS)
        seq.status = SequenceStatus.RUNNING
        self.group, self.seq = SequenceGroup("r", [seq], 0.0, self.params), seq
        self.freed, self.forks = [], []
        scheduler = SimpleNamespace(
            free_seq=lambda seq: self.freed.append(seq.seq_id),
            fork_seq=lambda parent, child: self.forks.append((parent.seq_id, child.seq_id)))
        self.processor = kind(Detokenizer(tokenizer), scheduler, itertools.count(100), StopChecker(max_model_len))
        self.group.update_num_computed_tokens(len(ids))

    def step(self, samples, is_async=False):
        "`samples`: (sequence id, token) pairs of one model step."
        rows = [SequenceOutput(s, t, {t: Logprob(-1.0, 1)}) for s, t in samples]
        self.processor.process_outputs(self.group, [CompletionSequenceGroupOutput(rows)], is_async)
        return make_request_output(self.group)

    def feed(self, tokens) -> list:
        "One step a token, until the sequence ends; what the user sees."
        shown = []
        for token in tokens.encode() if isinstance(tokens, str) else tokens:
            shown.append(self.step([(0, token)]))
            if self.seq.is_finished(): break
        return [s for s in shown if s]


# When a sequence ends

@pytest.mark.parametrize("ignore_eos,include,status,text", [
    (True, False, SequenceStatus.RUNNING, "text</s>"), (False, True, STOPPED, "text</s>"), (False, False, STOPPED, "text")])
def test_vllm_stop_checker(ignore_eos, include, status, text):
    s = Setup(ignore_eos=ignore_eos, include_stop_str_in_output=include)
    s.seq.append_token_id(EOS, {EOS: Logprob(0.0)})
    s.seq.output_text = "text</s>"
    s.processor.stop_checker.maybe_stop_sequence(s.seq, 4, s.params)
    assert (s.seq.status, s.seq.output_text) == (status, text)


def test_eos_as_the_last_allowed_token_is_a_stop():
    # V1 says "length" here.
    s = Setup(max_tokens=3)
    s.feed([97, 98, EOS])
    assert (s.seq.status, s.seq.stop_reason, s.seq.output_text) == (STOPPED, None, "ab")


@pytest.mark.parametrize("prompt_len,limit,num_tokens", [(10, 12, 3), (12, 12, 1), (1, 2, 2)])
def test_one_token_past_the_window(prompt_len, limit, num_tokens):
    s = Setup([97] * prompt_len, max_model_len=limit)
    s.feed([98] * 20)
    assert (s.seq.get_output_len(), s.seq.status) == (num_tokens, CAPPED)


def test_nothing_ends_below_min_tokens():
    s = Setup(min_tokens=4, stop=["bb"], stop_token_ids=[99])
    s.feed("abbc")
    assert (s.seq.status, s.seq.output_text, s.seq.stop_reason) == (STOPPED, "abb", 99)
    s = Setup(min_tokens=4, stop=["bb"])
    s.feed("abbcd")  # the stop string lies behind when it would count
    assert (s.seq.status, s.seq.output_text) == (SequenceStatus.RUNNING, "abbcd")


@pytest.mark.parametrize("ids,eos,extra,reason", [([], EOS, [], None), ([99], 98, [], 99), ([EOS], EOS, [], None), ([], 98, [99], 99)])
def test_which_token_stopped(ids, eos, extra, reason):
    s = Setup(stop_token_ids=ids)
    s.params.eos_token_ids = extra
    s.seq.eos_token_id = eos
    s.feed([97, reason or EOS])
    assert (s.seq.status, s.seq.stop_reason, s.seq.output_text) == (STOPPED, reason, "a")


def test_stop_tokens_stay_on_request():
    for include, text in ((True, "abc"), (False, "ab")):
        s = Setup(stop_token_ids=[99], include_stop_str_in_output=include)
        s.feed("abcd")
        assert (s.seq.output_text, s.seq.get_output_token_ids()) == (text, [97, 98, 99])


def test_a_stop_token_takes_only_its_own_text():
    # Half a character waits in the detokenizer when the end token comes.
    for skip, include, text in ((True, False, "a\ufffd"), (False, False, "a\ufffd"), (False, True, "a\ufffd<|eos|>")):
        s = Setup(skip_special_tokens=skip, include_stop_str_in_output=include)
        s.feed([97, "é".encode()[0], EOS])
        assert s.seq.output_text == text


@pytest.mark.parametrize("stop,include,text,reason", [
    (["."], False, "one", "."), (["."], True, "one.", "."), (["two", "wo"], False, "one. ", "two"),
    (["zzz"], False, "one. two. ", None), (["e. t"], False, "on", "e. t")])
def test_stop_strings(stop, include, text, reason):
    s = Setup(stop=stop, include_stop_str_in_output=include, max_tokens=10)
    s.feed("one. two. three.")
    assert (s.seq.output_text, s.seq.stop_reason) == (text, reason)
    assert s.seq.status is (CAPPED if reason is None else STOPPED)


def test_a_stop_inside_a_token():
    # "gani" in "organization": the token that completes it is cut.
    words = {300: "or", 301: "ganization", 302: " is"}
    for include, text in ((False, "or"), (True, "organi")):
        s = Setup(stop=["gani"], include_stop_str_in_output=include)
        s.seq.detokenizer = SimpleNamespace(update=lambda ids: words[ids[0]], flush=lambda: "")
        s.feed([300, 301, 302])
        assert (s.seq.output_text, s.seq.stop_reason) == (text, "gani")


def test_half_a_character_comes_out_at_the_end():
    for n in (1, 2, 3):
        s = Setup(max_tokens=n)
        s.feed(list("🎈".encode()))
        assert s.seq.output_text == TOKENIZER.decode(list("🎈".encode()[:n]))


def test_a_scoring_request_gets_no_token():
    s = Setup(max_tokens=0)
    out = s.step([(0, 97)])
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason, s.freed) == ([], "length", [0])


# What users see

def test_kinds_tell_the_same_story():
    text = "héllo 🎈 wörld"
    shown = {kind: Setup(output_kind=kind, max_tokens=len(text.encode())).feed(text) for kind in RequestOutputKind}
    assert shown[CUMULATIVE][-1].outputs[0].text == text == shown[FINAL_ONLY][0].outputs[0].text
    assert "".join(o.outputs[0].text for o in shown[DELTA]) == text
    assert sum((o.outputs[0].token_ids for o in shown[DELTA]), []) == list(text.encode())
    assert len(shown[FINAL_ONLY]) == 1 and len(shown[DELTA]) == len(shown[CUMULATIVE]) == len(text.encode())
    assert [o.prompt_token_ids is None for o in shown[DELTA]] == [False] + [True] * (len(shown[DELTA]) - 1)
    assert all(o.prompt_token_ids for o in shown[CUMULATIVE])


def test_what_was_given_does_not_change():
    shown = Setup(logprobs=0).feed("abc")
    assert [o.outputs[0].token_ids for o in shown] == [[97], [97, 98], [97, 98, 99]]
    assert [len(o.outputs[0].logprobs) for o in shown] == [1, 2, 3]


def test_a_stream_holds_back_what_may_be_a_stop_string():
    shown = Setup(stop=["END"], output_kind=DELTA).feed("abENcEND")
    assert [o.outputs[0].text for o in shown] == ["", "", "a", "b", "E", "N", "c", ""]
    shown = Setup(stop=["END"], output_kind=DELTA, include_stop_str_in_output=True).feed("aEND")
    assert [o.outputs[0].text for o in shown] == list("aEND")


def test_logprobs_are_decoded_and_summed():
    s = Setup(logprobs=1)
    s.feed("ab")
    out = make_request_output(s.group).outputs[0]
    assert [{t: e.decoded_token for t, e in p.items()} for p in out.logprobs] == [{97: "a"}, {98: "b"}]
    assert out.cumulative_logprob == -2.0
    out = Setup().feed("ab")[-1].outputs[0]
    assert (out.logprobs, out.cumulative_logprob) == (None, None)


def test_logprobs_of_deltas():
    shown = Setup(logprobs=0, output_kind=DELTA).feed("abc")
    assert [[*o.outputs[0].logprobs[0]] for o in shown] == [[97], [98], [99]]


def test_prompt_logprobs_have_nothing_for_the_first():
    s = Setup(prompt_logprobs=0, output_kind=DELTA)
    rows = [{58: Logprob(-1.0, 1)}, {32: Logprob(-2.0, 2)}]
    s.processor.process_prompt_logprob(s.group, CompletionSequenceGroupOutput([], rows))
    first, second = s.feed("ab")
    assert first.prompt_logprobs[0] is None and [p[t].decoded_token for p, t in zip(first.prompt_logprobs[1:], (58, 32))] == [":", " "]
    assert second.prompt_logprobs is None   # a stream says it once


def test_no_text_without_a_tokenizer():
    for kw in (dict(tokenizer=None), dict(detokenize=False)):
        s = Setup(logprobs=0, **kw)
        out = s.feed("ab")[-1].outputs[0]
        assert (out.text, out.token_ids) == ("", [97, 98])


def test_an_empty_output_for_a_chunk_of_a_prompt():
    # V0: something was scheduled, so something is shown.
    s = Setup(output_kind=DELTA)
    s.processor.process_outputs(s.group, [])
    out = make_request_output(s.group)
    assert (out.outputs[0].text, out.outputs[0].token_ids, out.finished) == ("", [], False)
    assert make_request_output(Setup(output_kind=FINAL_ONLY).group) is None


# Several sequences

def test_further_samples_of_a_parent_become_children():
    s = Setup(n=3)
    out = s.step([(0, 97), (0, 98), (0, 99)])
    assert s.forks == [(0, 100), (0, 101)]
    assert [(q.seq_id, q.data.index, q.get_output_token_ids()) for q in s.group.seqs] == [(0, 0, [97]), (100, 1, [98]), (101, 2, [99])]
    assert [(c.index, c.text) for c in out.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    out = s.step([(101, 67), (0, 65), (100, 66)])
    assert [c.text for c in out.outputs] == ["aA", "bB", "cC"]


def test_children_whose_parent_ends_at_once():
    s = Setup(n=2)
    out = s.step([(0, EOS), (0, 98)])
    assert s.forks == [(0, 100)] and s.freed == [0] and not out.finished
    assert [(c.text, c.finish_reason) for c in out.outputs] == [("", "stop"), ("b", None)]
    out = s.step([(100, EOS)])
    assert out.finished and s.freed == [0, 100]


def test_field_vllm11898_each_child_streams_until_its_own_end():
    s = Setup(n=2, output_kind=DELTA, stop=["z"])
    seen = {0: "", 1: ""}
    steps = [[(0, 97), (0, 98)], [(0, 122), (100, 99)], [(100, 100)], [(100, 101)], [(100, 122)]]
    outputs = [s.step(step) for step in steps]
    for out in outputs:
        for c in out.outputs: seen[c.index] += c.text
    assert seen == {0: "a", 1: "bcde"}
    assert [[(c.index, c.finish_reason) for c in o.outputs] for o in outputs] == [
        [(0, None), (1, None)], [(0, "stop"), (1, None)], [(1, None)], [(1, None)], [(1, "stop")]]
    assert [o.finished for o in outputs] == [False] * 4 + [True]


def test_best_of_ranks_at_the_end():
    s = Setup(best_of=3, n=2, logprobs=0, max_tokens=2)
    def sampled(pairs): return [SequenceOutput(i, t, {t: Logprob(p, 1)}) for i, t, p in pairs]
    def step(pairs):
        s.processor.process_outputs(s.group, [CompletionSequenceGroupOutput(sampled(pairs))])
        return make_request_output(s.group)
    assert step([(0, 97, -1.0), (0, 98, -5.0), (0, 99, -2.0)]) is None   # not known yet
    out = step([(0, 97, -4.0), (100, 98, -1.0), (101, 99, -1.0)])
    assert [(c.index, c.text, c.cumulative_logprob) for c in out.outputs] == [(0, "cc", -3.0), (1, "aa", -5.0)]


# One bad answer

def test_field_vllm48567_an_error_ends_its_own_request_only():
    bad, good = Setup(), Setup()
    bad.seq.detokenizer = SimpleNamespace()  # has no `update`
    out, other = bad.step([(0, 97)]), good.step([(0, 97)])
    assert (bad.seq.status, out.finished, out.outputs[0].finish_reason) == (ABORTED, True, "abort")
    assert "output processing failed" in out.outputs[0].stop_reason and bad.freed == [0]
    assert other.outputs[0].text == "a"


def test_ids_outside_the_vocabulary_have_no_text():
    s = Setup(logprobs=0)
    out = s.feed([97, 5000, -1, 98])[-1].outputs[0]
    assert out.text == "ab" and out.logprobs[1][5000].decoded_token == ""


# One step late

def test_async_looks_at_a_token_that_was_appended_before():
    s = Setup(max_tokens=2)
    for token in b"ab":
        sample = SequenceOutput(0, token, {token: Logprob(-1.0, 1)})
        s.processor.append_token(s.group, sample)
        assert not s.seq.is_finished()
        out = s.step([(0, token)], is_async=True)
        s.group.update_num_computed_tokens(1)
    assert (s.seq.get_output_token_ids(), out.outputs[0].text, out.finished) == ([97, 98], "ab", True)


# Bursts

def burst(s, tokens):
    "All model steps of one burst, as the runner hands them over."
    rows = [CompletionSequenceGroupOutput([SequenceOutput(0, t, {t: Logprob(-1.0, 1)})]) for t in tokens]
    s.processor.process_outputs(s.group, rows)
    return s.seq.get_output_token_ids()


def long_decode(num_output=128, **params):
    "A sequence of 1024 + 128 tokens whose next burst comes."
    s = Setup([97] * 1024, kind=MultiStepOutputProcessor, tokenizer=None, **params)
    for _ in range(num_output): s.seq.append_token_id(98, {98: Logprob(0.0)})
    s.seq.data.update_num_computed_tokens(num_output - 1)
    return s


@pytest.mark.parametrize("num_new", [1, 12])
def test_vllm_a_burst_is_appended(num_new):
    s = long_decode()
    assert burst(s, range(num_new))[128:] == list(range(num_new))
    assert s.seq.data.get_num_uncomputed_tokens() == 1


@pytest.mark.parametrize("num_new", [5, 6, 7, 8])
def test_vllm_a_burst_is_cut_at_max_tokens(num_new):
    s = long_decode(max_tokens=131)
    assert burst(s, range(num_new))[128:] == [0, 1, 2] and s.seq.status is CAPPED


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_vllm_a_burst_is_cut_at_the_end_token(seed, ignore_eos):
    tokens, at = list(range(12)), random.Random(seed).randrange(12)
    tokens[at] = EOS
    s = long_decode(ignore_eos=ignore_eos)
    assert burst(s, tokens)[128:] == (tokens if ignore_eos else tokens[:at + 1])


def test_a_burst_is_cut_at_a_stop_string():
    s = Setup(kind=MultiStepOutputProcessor, stop=["cd"])
    s.seq.append_token_id(97, {97: Logprob(0.0)})
    burst(s, b"bcdefghi")
    assert (s.seq.output_text, s.seq.get_output_token_ids()) == ("b", list(b"abcd"))
    assert s.seq.data.get_num_computed_tokens() == len("Q: ") + 3


def test_a_prompts_own_step_counts_no_token_of_a_burst():
    s = Setup(kind=MultiStepOutputProcessor)
    burst(s, b"a")                   # the prompt's step
    assert s.seq.data.get_num_uncomputed_tokens() == 1
    burst(s, b"bcd")
    assert s.seq.data.get_num_computed_tokens() == len("Q: ") + 3


def test_bursts_of_several_sequences():
    s = Setup(n=2, kind=MultiStepOutputProcessor, stop=["y"])
    s.step([(0, 97), (0, 98)])
    rows = [CompletionSequenceGroupOutput([SequenceOutput(i, t, {t: Logprob(-1.0, 1)}) for i, t in ((0, a), (100, b))])
            for a, b in zip(b"xyz", b"pqr")]
    s.processor.process_outputs(s.group, rows)
    assert [q.output_text for q in s.group.seqs] == ["ax", "bpqr"] and s.freed == [0]
