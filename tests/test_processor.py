"""The processor: every form of prompt, every refusal, nothing left to chance.

Tests named `test_field_…` are rows of the field reports.
"""
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minengine.inputs import (
    MAX_OUTPUTS, check_limits, check_token_ids, find_eos_token_ids, fit_max_tokens, parse_prompt, tokenize_bad_words)
from minengine.sampling_params import SamplingParams
from minengine.tokenizer import ByteTokenizer
from minengine.v1.engine.processor import Processor
from minengine.v1.messages import EngineCoreRequest

VOCAB_SIZE, MAX_LEN = 300, 64


def make_config(**fields) -> VllmConfig:
    hf_config = SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=4096)
    fields = {"max_model_len": MAX_LEN, **fields}
    return VllmConfig(ModelConfig("tiny", hf_config, **fields), CacheConfig(),
                      SchedulerConfig(max_model_len=fields["max_model_len"]))


def make_processor(tokenizer="byte", **fields) -> Processor:
    return Processor(make_config(**fields), ByteTokenizer() if tokenizer == "byte" else tokenizer)


def process(prompt, processor=None, **params) -> EngineCoreRequest:
    return (processor or make_processor()).process_inputs("r", prompt, SamplingParams(**params))


def refuses(message, prompt="hello", processor=None, **params):
    with pytest.raises(ValueError, match=message): process(prompt, processor, **params)


# Forms of prompts

@pytest.mark.parametrize("prompt", [
    "hi", {"prompt": "hi"}, [104, 105], (104, 105), {"prompt_token_ids": [104, 105]},
    np.array([104, 105]), [np.int64(104), np.int32(105)], {"prompt": "hi", "prompt_token_ids": [104, 105]}])
def test_forms_of_prompts(prompt):
    request = process(prompt)
    assert request.prompt_token_ids == [104, 105]
    assert all(type(t) is int for t in request.prompt_token_ids)  # they must travel
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request


def test_prompt_text_is_kept():
    assert process({"prompt": "hi", "prompt_token_ids": [1]}).prompt == "hi"
    assert process([1]).prompt is None


def test_request_is_independent_of_the_users_objects():
    ids, params = [1, 2], SamplingParams(stop=["a"])
    request = make_processor().process_inputs("r", ids, params)
    ids.append(3); params.stop.append("b"); params.max_tokens = 1
    assert request.prompt_token_ids == [1, 2]
    assert (request.sampling_params.stop, request.sampling_params.max_tokens) == (["a"], 16)
    assert params.eos_token_ids == [] and params.bad_words_token_ids is None  # nor is theirs changed


def test_cache_salt_travels():
    assert process({"prompt": "hi", "cache_salt": "x"}).cache_salt == "x"
    refuses("cache_salt must be a string, got 3", {"prompt": "hi", "cache_salt": 3})


def test_truncate_keeps_the_end():
    assert process([1, 2, 3, 4], truncate_prompt_tokens=2).prompt_token_ids == [3, 4]
    assert process([1, 2], truncate_prompt_tokens=9).prompt_token_ids == [1, 2]
    assert len(process("x" * 1000, truncate_prompt_tokens=10).prompt_token_ids) == 10  # before the length check


# Bad prompts

@pytest.mark.parametrize("prompt, message", [
    ("", "empty"), ([], "empty"), ({"prompt_token_ids": []}, "empty"),
    ([1, -1], r"prompt_token_ids\[1\] is -1, but .* from 0 to 299"),
    ([300], r"prompt_token_ids\[0\] is 300, but .* from 0 to 299"),
    ([2**70], "from 0 to 299"),
    ([1.0], r"prompt_token_ids\[0\] must be an integer, got 1.0"),
    ([True], "must be an integer, got True"), ([None], "must be an integer, got None"),
    (["a"], "must be an integer, got 'a'"), ([[1]], "must be an integer"),
    (np.array([1.5]), "must be an integer, got 1.5"),
    (5, "must be a list of token ids, got 5"), (None, "must be a list of token ids, got None"),
    ({}, "must hold 'prompt' or 'prompt_token_ids'"), ({"prompt": None}, "must hold"),
    ({"prompt": 7}, "prompt must be a string, got 7"),
    ({"text": "a"}, "has the key 'text'"),
    ({"prompt": "a", "multi_modal_data": {"image": "x.png"}}, "has multi_modal_data .image., but the model takes text only"),
    ({"prompt": "a", "multi_modal_data": 7}, "multi_modal_data must be a dict, got a int"),
    ({"prompt": "a", "images": []}, "has the key 'images'"),
    ("\ud800", "not valid text"),
])
def test_bad_prompts(prompt, message): refuses(message, prompt)


@pytest.mark.parametrize("name", ["", None, 7, b"r"])
def test_bad_request_id(name):
    with pytest.raises(ValueError, match="request_id must be a string"):
        make_processor().process_inputs(name, "hi", SamplingParams())


def test_bad_params_object():
    with pytest.raises(ValueError, match="params must be SamplingParams, got None"):
        make_processor().process_inputs("r", "hi", None)


def test_params_are_checked_again():
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(ValueError, match="temperature must be a number, got nan"):
        make_processor().process_inputs("r", "hi", params)


@pytest.mark.parametrize("field, value", [
    ("best_of", 2), ("logits_processors", [print]), ("guided_decoding", {"regex": "a"})])
def test_v1_refuses_what_it_cannot_do(field, value):
    refuses(f"{field} is not supported by engine 'v1'", **{field: value})


def test_v1_refuses_adapters_and_priorities():
    for extra in ({"lora_request": object()}, {"priority": 3}):
        with pytest.raises(ValueError, match="not supported by engine 'v1'"):
            make_processor().process_inputs("r", "hi", SamplingParams(), **extra)
    make_processor().process_inputs("r", "hi", SamplingParams(), priority=0)


def test_too_many_outputs():
    refuses(f"n must be at most {MAX_OUTPUTS}, got 1000000", n=1_000_000)
    with pytest.raises(ValueError, match="best_of must be at most 1024, got 2000"):
        check_limits(SamplingParams(best_of=2000), max_logprobs=20)   # V0's, which ranks


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_too_many_logprobs(field):
    refuses(f"{field} must be at most 20 .* got 21", **{field: 21})
    refuses("301 logprobs asked for, but the vocabulary has 300",
            processor=make_processor(max_logprobs=1000), **{field: 301})
    process("a", **{field: 20})


# The window

@pytest.mark.parametrize("num_prompt, asked, gets", [
    (10, 16, 16), (10, None, 54), (10, 54, 54), (10, 55, 54), (10, 10**9, 54),
    (63, 16, 1), (63, 0, 0), (64, 0, 0)])
def test_fit_max_tokens(num_prompt, asked, gets):
    assert fit_max_tokens(num_prompt, asked, 64) == gets
    assert process([5] * num_prompt, max_tokens=asked).sampling_params.max_tokens == gets


@pytest.mark.parametrize("num_prompt, asked", [(64, 16), (64, None), (64, 1), (65, 0), (200, 16)])
def test_field_vllm12600_prompt_longer_than_the_model(num_prompt, asked):
    refuses(f"prompt has {num_prompt} tokens, but max_model_len is 64", [5] * num_prompt, max_tokens=asked)


def test_field_vllm40302_a_lowered_limit_is_the_only_one():
    processor = make_processor()
    process([5] * 40, processor)
    processor.vllm_config.model_config.max_model_len = 32  # as the core does after sizing the pool
    refuses("prompt has 40 tokens, but max_model_len is 32", [5] * 40, processor)
    assert process([5] * 30, processor, max_tokens=100).sampling_params.max_tokens == 2


def test_field_vllm42474_max_tokens_past_the_window_is_clamped():
    request = process([5] * 31, max_tokens=32, min_tokens=32, processor=make_processor(max_model_len=60))
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (29, 29)
    request.sampling_params.clone()  # what is clamped is still valid


# Token ids in the parameters

@pytest.mark.parametrize("field, value", [
    ("stop_token_ids", [5, 300]), ("allowed_token_ids", [300]), ("logit_bias", {300: 1.0})])
def test_field_vllm54195_ids_are_checked_against_the_logits_width(field, value):
    # 300 logits, 261 tokens in the tokenizer: 299 may be masked, 300 may not.
    refuses(rf"{field}\[\d\] is 300, but this model's token ids go from 0 to 299", **{field: value})
    process("a", **{field: {299: 1.0} if field == "logit_bias" else [299]})


def test_no_token_left_to_generate():
    refuses("leaves no token", allowed_token_ids=[97], bad_words=["a"])
    refuses("leaves no token", allowed_token_ids=[257], min_tokens=1)
    process("a", allowed_token_ids=[257])
    process("a", allowed_token_ids=[97, 98], bad_words=["a"])
    # The message names every field that may be to blame.
    everything = list(range(VOCAB_SIZE))
    for field in ("allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids"):
        refuses(f"(?s)leaves no token.*{field}|{field}.*leaves no token", allowed_token_ids=[97, 97, 98], bad_words=["a"],
                stop_token_ids=[98], min_tokens=2)
    refuses("the vocabulary of 300 leaves no token", stop_token_ids=everything, min_tokens=1)
    refuses("the vocabulary of 300 leaves no token", bad_words_token_ids=[[t] for t in everything])
    process("a", stop_token_ids=everything)                    # the first token ends it
    process("a", stop_token_ids=everything[1:257], min_tokens=1)
    process("a", allowed_token_ids=[97], bad_words=["ab"])     # no single token


def test_bad_words_that_the_model_cannot_say():
    "A tokenizer may know tokens for which there is no logit: nothing to forbid, and no index."
    narrow = Processor(make_config(), ByteTokenizer())
    narrow.vllm_config.model_config.hf_config.vocab_size = 257
    request = process("a", narrow, bad_words=["<|user|>", "b", "b<|user|>"])
    assert request.sampling_params.bad_words_token_ids == [[98]]
    for runs, message in (([[1], [257]], r"bad_words_token_ids\[1\]\[0\] is 257, .* 0 to 256"), ([[-1]], "is -1"),
                          ([[]], r"bad_words_token_ids\[0\] must not be empty"), ([["a"]], "must be an integer"),
                          ([5], "must be a list of token ids"), (5, "must be a list of lists")):
        refuses(message, "a", narrow, bad_words_token_ids=runs)


def test_eos_ids():
    tokenizer = SimpleNamespace(eos_token_id=7)
    assert find_eos_token_ids(tokenizer, {"eos_token_id": [9, 7, 8]}, 300) == (7, [7, 8, 9])
    assert find_eos_token_ids(tokenizer, {"eos_token_id": 9}, 300) == (7, [7, 9])
    assert find_eos_token_ids(tokenizer, {}, 300) == (7, [7])
    assert find_eos_token_ids(None, {"eos_token_id": [9, 8]}, 300) == (9, [8, 9])
    assert find_eos_token_ids(None, {}, 300) == (None, [])
    assert find_eos_token_ids(tokenizer, {"eos_token_id": 9}, 8) == (7, [7])  # 9 has no logit
    assert find_eos_token_ids(tokenizer, {}, 5) == (None, [])


def test_field_vllm5849_all_eos_ids_are_known():
    processor = make_processor(generation_config={"eos_token_id": [257, 258]})
    request = process("a", processor, min_tokens=10, stop_token_ids=[65])
    assert request.eos_token_id == 257
    assert request.sampling_params.all_stop_token_ids == {257, 258, 65}


# Bad words

class WordTokenizer:
    "Words as a byte-pair tokenizer knows them: with and without a space before."
    eos_token_id = None
    words = {"cat": [1], " cat": [2], "hello": [3, 4], " hello": [5], " new": [6, 7], "new": [8, 7], "\n": [9], " \n": [10, 9]}

    def encode(self, text, add_special_tokens=True): return list(self.words.get(text, []))


@pytest.mark.parametrize("words, runs", [
    (["cat"], [[1], [2]]), ([" cat"], [[1], [2]]), (["hello"], [[3, 4], [5]]), (["new"], [[8, 7], [6, 7]]), (["\n"], [[9]])])
def test_bad_words(words, runs):
    assert tokenize_bad_words(WordTokenizer(), words) == runs


def test_bad_word_without_tokens():
    with pytest.raises(ValueError, match="bad word 'dog' has no tokens"): tokenize_bad_words(WordTokenizer(), ["dog"])


# Without a tokenizer

def test_without_a_tokenizer():
    processor = make_processor(None, skip_tokenizer_init=True)
    request = process([1, 2], processor)
    assert request.sampling_params.detokenize is False and request.eos_token_id is None
    refuses("needs a tokenizer", "hi", processor)
    refuses("stop needs a tokenizer", [1], processor, stop="a")
    refuses("bad_words needs a tokenizer", [1], processor, bad_words=["a"])


# Anything at all: a request or a ValueError

anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=80), st.binary(max_size=4))


@settings(max_examples=200, deadline=None)
@given(st.one_of(anything, st.lists(st.one_of(st.integers(-2, 302), anything), max_size=70),
                 st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "x"]), anything, max_size=3)))
def test_any_prompt_gives_a_request_or_a_value_error(prompt):
    try: request = process(prompt)
    except ValueError: return
    ids = request.prompt_token_ids
    assert 0 < len(ids) < MAX_LEN and all(type(t) is int and 0 <= t < VOCAB_SIZE for t in ids)


@given(st.lists(st.integers(-5, 305), max_size=20))
def test_check_token_ids_agrees_with_the_loop(ids):
    if all(0 <= t < 300 for t in ids): assert check_token_ids(ids, 300) == ids
    else:
        with pytest.raises(ValueError): check_token_ids(ids, 300)


def test_parse_prompt():
    assert parse_prompt({"prompt": "a", "prompt_token_ids": None}) == {"prompt": "a"}
