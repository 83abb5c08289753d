"""Pieces of text join to what `decode` says, for every kind of vocabulary."""
import codecs
import functools
import random
import time

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minengine.tokenizer import (
    MAX_BYTE_RUN, REPLACEMENT, ByteTokenizer, IncrementalDetokenizer, apply_chat_template,
    check_stop_strings, decode_token, find_content_forms, get_tokenizer)

SPECIALS = ["<s>", "</s>", "<|end of turn|>"]
WORDS = ["▁", "▁Hello", "▁world", "llo", ".", "▁It", "a", "▁a", "中", "😀", "é", "\ufffd", "▁▁", "\n", "s"]


def wrap(backend, **kwargs):
    backend.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    backend.add_tokens(["plain added"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **kwargs)


def byte_level():
    "A GPT-2-like vocabulary: all bytes, and merges that cut through characters."
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)}
    merges = [("Ġ", "a"), ("ð", "Ł"), ("ä", "¸"), ("Ã", "©"), ("e", "r"), ("¸", "Ń")]
    for a, b in merges: vocab[a + b] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def sentencepiece(strip=True):
    "A Llama-like vocabulary: words that carry their space, and 256 bytes to fall back on."
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for word in WORDS: vocab.setdefault(word, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    return wrap(backend)


def other(decoder):
    "A vocabulary of words only, under some other decoder."
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, "##s", "lo</w>"])}, unk_token="a"))
    if decoder: backend.decoder = decoder
    return wrap(backend)


class SlowBytes:
    "A tokenizer in plain Python that tells nothing about its bytes but `decode`."
    eos_token_id, errors = 257, "replace"
    inner = ByteTokenizer()
    all_special_ids = inner.all_special_ids

    def __len__(self): return len(self.inner)
    def encode(self, text, **kwargs): return self.inner.encode(text)
    def convert_ids_to_tokens(self, ids): return self.inner.convert_ids_to_tokens(ids)

    def decode(self, ids, skip_special_tokens=False, **kwargs):
        shown = [i for i in ids if i < 256 or not skip_special_tokens]
        return b"".join(map(self.inner.token_bytes, shown)).decode(errors=self.errors)


class SlowBytesOneMarkEach(SlowBytes):
    "As SentencePiece does it: every byte that is no text is a mark of its own."
    errors = "one mark each"


codecs.register_error("one mark each", lambda e: ("\ufffd" * (e.end - e.start), e.end))


MAKERS = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": lambda: sentencepiece(strip=False),
    "metaspace": lambda: other(decoders.Metaspace()),
    "wordpiece": lambda: other(decoders.WordPiece()),
    "bpe suffix": lambda: other(decoders.BPEDecoder()),
    "no decoder": lambda: other(None),
    "our bytes": ByteTokenizer,
    "slow bytes": SlowBytes,
    "slow bytes, marks": SlowBytesOneMarkEach,
}
BYTES = ["byte level", "sentencepiece", "gemma", "our bytes", "slow bytes", "slow bytes, marks"]  # can say anything


@functools.cache
def make(name): return MAKERS[name]()


def whole(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def pieces(tokenizer, ids, skip=True, step=1, prompt=()):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    parts = [detokenizer.update(ids[i:i + step]) for i in range(0, len(ids), step)]
    parts.append(detokenizer.flush())
    assert "".join(parts) == detokenizer.output_text and detokenizer.token_ids == list(ids)
    return parts


def check(tokenizer, ids, skip, step=1):
    assert "".join(pieces(tokenizer, ids, skip, step)) == whole(tokenizer, ids, skip)


characters = st.characters(exclude_categories=["Cs"])
texts = st.text(st.one_of(st.sampled_from("aé中文😀👩‍👩‍👧 \n▁.s\ufffd"), characters), max_size=12)


@st.composite
def mixed_ids(draw, name):
    "Random ids, encoded text and long runs of bytes, in any order."
    tokenizer = make(name)
    top = len(tokenizer) + 3  # a few are outside the vocabulary
    part = st.one_of(st.lists(st.integers(0, top), max_size=12),
                     texts.map(lambda t: tokenizer.encode(t, add_special_tokens=False)),
                     st.lists(st.integers(top - 12, top), max_size=4))
    return sum(draw(st.lists(part, max_size=5)), [])


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), skip=st.booleans(), step=st.integers(1, 4))
def test_pieces_join_to_decode(name, data, skip, step):
    check(make(name), data.draw(mixed_ids(name)), skip, step)


@pytest.mark.parametrize("name", BYTES)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_bytes_join_to_decode(name, data, skip):
    tokenizer = make(name)
    first = tokenizer.convert_tokens_to_ids("<0x00>") if name in ("sentencepiece", "gemma") else 0
    ids = data.draw(st.lists(st.integers(first, first + 255), max_size=40))
    check(tokenizer, ids, skip)


@settings(max_examples=150, deadline=None)
@given(text=texts, skip=st.booleans())
def test_default_model_tokenizer(default_tokenizer, text, skip):
    "The real vocabulary, with its special tokens between the words."
    ids = default_tokenizer.encode(f"<|im_start|>{text} 👩🏽‍🚀<|im_end|>{text}")
    check(default_tokenizer, ids, skip)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49_160), max_size=40), skip=st.booleans())
def test_default_model_random_ids(default_tokenizer, ids, skip):
    check(default_tokenizer, ids, skip)


@pytest.fixture(scope="module")
def default_tokenizer():
    from minengine.model.checkpoint import resolve_model
    return get_tokenizer(str(resolve_model(None).path))


@pytest.mark.parametrize("name", MAKERS)
def test_never_half_a_character(name):
    "waybarrios/vllm-mlx#109, Blaizzy/mlx-vlm#1076: no replacement marks inside a valid text."
    tokenizer = make(name)
    text = "a 😀éď中文 a👩‍🚀" if name in BYTES else "▁a😀é中"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, ids)
    assert REPLACEMENT not in "".join(parts) and "".join(parts) == whole(tokenizer, ids)


@pytest.mark.parametrize("name,lag", [("byte level", 0), ("our bytes", 0), ("sentencepiece", 0), ("gemma", 0),
                                      ("slow bytes", 3), ("slow bytes, marks", 3)])
def test_broken_bytes_do_not_block(name, lag):
    "A thousand bytes that will never be text come out as they come in."
    tokenizer = make(name)
    byte = tokenizer.convert_tokens_to_ids("<0x80>") if name in ("sentencepiece", "gemma") else \
        tokenizer.convert_tokens_to_ids("Ģ") if name == "byte level" else 128
    detokenizer, out = IncrementalDetokenizer(tokenizer), 0
    for i in range(1000):
        out += len(detokenizer.update([byte]))
        assert out >= i + 1 - lag
    assert detokenizer.output_text + detokenizer.flush() == REPLACEMENT * 1000


def test_real_replacement_character():
    "U+FFFD itself, as a token or as bytes, is text like any other."
    for name in ("metaspace", *BYTES):
        tokenizer = make(name)
        ids = tokenizer.encode("a\ufffd\ufffd\ufffd\ufffd\ufffda", add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer)
        sizes = [len(detokenizer.update([i])) for i in ids]
        assert detokenizer.output_text == whole(tokenizer, ids)
        assert sum(sizes[:-1]) >= len(whole(tokenizer, ids)) - 4, name


@pytest.mark.parametrize("char", ["🦀", "မ", "é", "a"])
def test_run_of_bytes_is_bounded(char):
    "Fallback bytes wait for the end of their run, but not for ever."
    tokenizer = make("sentencepiece")
    ids = tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in char.encode()])
    detokenizer, longest, waited = IncrementalDetokenizer(tokenizer), 0, 0
    for token_id in ids * 200:
        waited = 0 if detokenizer.update([token_id]) else waited + 1
        longest = max(longest, waited)
    assert longest <= MAX_BYTE_RUN + 3
    assert detokenizer.output_text + detokenizer.flush() == char * 200


def test_one_bad_byte_spoils_a_run():
    "All of a run that is still held, and what follows in it, at once."
    tokenizer = make("sentencepiece")
    ids = tokenizer.convert_tokens_to_ids(["<0x41>", "<0x0A>", "<0x80>", "<0x41>", "a"])
    assert pieces(tokenizer, ids) == ["", "", REPLACEMENT * 3, REPLACEMENT, "a", ""]
    assert whole(tokenizer, ids) == REPLACEMENT * 4 + "a"


def test_a_mark_in_the_prompt_is_not_output():
    for name in BYTES:
        tokenizer = make(name)
        prompt, output = (tokenizer.encode(t, add_special_tokens=False) for t in ("a\ufffd", "a"))
        assert "".join(pieces(tokenizer, output, prompt=prompt)) == "a", name


def test_newline_after_a_word():
    "Llama's newline is a byte token: it comes with the next token, or at the end."
    tokenizer = make("sentencepiece")
    ids = [*tokenizer.convert_tokens_to_ids(["▁Hello", "<0x0A>", "▁world", "<0x0A>"])]
    assert pieces(tokenizer, ids) == ["Hello", "", "\n world", "", "\n"]


@pytest.mark.parametrize("name,prompt,output,expected", [
    ("sentencepiece", ["▁Hello"], ["▁world", "."], " world."),     # no space is lost
    ("metaspace", ["▁Hello"], ["▁world", "."], " world."),
    ("sentencepiece", ["▁Hello", "<0x0A>"], ["<0xE4>", "<0xB8>", "<0xAD>", "a"], "中a"),
    ("sentencepiece", ["a", "<0xE4>", "<0xB8>"], ["<0xAD>", "a"], "中a"),  # begun in the prompt
    ("sentencepiece", ["<s>"], ["▁Hello"], "Hello"),               # specials are no text
    ("sentencepiece", ["a", "<0x80>"], ["a", "▁a"], "a a"),        # broken before we came
    ("byte level", ["a", "ä", "¸"], ["Ń", "a"], "中a"),
    ("byte level", ["a", "ä"], ["a"], "\ufffda"),
    ("wordpiece", ["a"], ["a", "##s"], " as"),
    ("no decoder", ["a"], ["a", "s"], " a s"),
])
def test_output_after_a_prompt(name, prompt, output, expected):
    "vllm#984: a space after the prompt, or after a full stop, is not lost."
    tokenizer = make(name)
    prompt, output = map(tokenizer.convert_tokens_to_ids, (prompt, output))
    assert "".join(pieces(tokenizer, output, prompt=prompt)) == expected
    assert "".join(pieces(tokenizer, output, prompt=[*prompt, 10**9])) == expected


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prompt_and_output_read_as_one(name, data):
    "For whole words, the output is what the prompt's text grows by."
    tokenizer = make(name)
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    before = whole(tokenizer, ids[:cut])
    if REPLACEMENT in before: return  # the cut goes through a character
    assert before + "".join(pieces(tokenizer, ids[cut:], prompt=ids[:cut])) == whole(tokenizer, ids)


def test_ids_outside_the_vocabulary():
    "vllm#48567: an id that nobody knows is no text, and no error."
    for name in MAKERS:
        tokenizer = make(name)
        wild = [-1, len(tokenizer), 2**32, 2**70]
        assert [decode_token(tokenizer, i) for i in wild] == [""] * 4, name
        a = tokenizer.encode("a", add_special_tokens=False)
        assert "".join(pieces(tokenizer, wild + a + wild)) == whole(tokenizer, a)


@pytest.mark.parametrize("name", MAKERS)
def test_same_cost_per_token_however_long(name, monkeypatch):
    "Counted, not timed: how many ids are decoded again for each new one."
    tokenizer, looked_at = make(name), [0]
    decode = type(tokenizer).decode
    def counting(self, ids, **kwargs):
        looked_at[0] += len(ids)
        return decode(self, ids, **kwargs)
    monkeypatch.setattr(type(tokenizer), "decode", counting)
    detokenizer, rng, costs = IncrementalDetokenizer(tokenizer), random.Random(0), []
    for _ in range(20):
        before = looked_at[0]
        detokenizer.update([rng.randrange(len(tokenizer)) for _ in range(500)])
        costs.append((looked_at[0] - before) / 500)
    assert max(costs) <= 16 and costs[-1] <= costs[0] + 2, costs


def test_long_text_in_reasonable_time():
    tokenizer, ids = make("byte level"), list(range(97, 120)) * 4000
    detokenizer, started = IncrementalDetokenizer(tokenizer), time.perf_counter()
    for token_id in ids: detokenizer.update([token_id])
    assert time.perf_counter() - started < 5, "92 000 tokens"
    assert detokenizer.output_text == whole(tokenizer, ids)


def test_added_tokens_are_noticed():
    tokenizer = byte_level()
    a = tokenizer.encode("a")
    assert "".join(pieces(tokenizer, a)) == "a"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    ids = tokenizer.encode("a<|new|>a")
    assert "".join(pieces(tokenizer, ids)) == "aa" and "".join(pieces(tokenizer, ids, skip=False)) == "a<|new|>a"


def test_decode_token_is_its_own_piece():
    "vllm#5334, vllm#44319: no neighbour's text, and the space that tells two tokens apart."
    tokenizer = make("sentencepiece")
    a, spaced = tokenizer.convert_tokens_to_ids(["a", "▁a"])
    assert decode_token(tokenizer, a) == "a" and decode_token(tokenizer, spaced) == " a"
    assert decode_token(tokenizer, tokenizer.convert_tokens_to_ids("<0x0A>")) == "\n"
    assert decode_token(tokenizer, tokenizer.convert_tokens_to_ids("</s>")) == "</s>"
    assert decode_token(make("byte level"), 0) == make("byte level").decode([0])
    assert decode_token(ByteTokenizer(), 0xE4) == REPLACEMENT


# Stop strings ---------------------------------------------------------------

@pytest.mark.parametrize("text,new,stop,include,expected", [
    ("abcdef", 6, ["ef", "cd"], False, ("ef", 4)),   # first in the list, not in the text
    ("abcdef", 6, ["cd", "ef"], False, ("cd", 2)),
    ("abcdef", 6, ["ef"], True, ("ef", -1)),         # at the very end: nothing to cut
    ("abcdef", 6, ["cd"], True, ("cd", 4)),
    ("abcdef", 1, ["cd"], False, None),              # completed earlier: not new
    ("abcdef", 1, ["def"], False, ("def", 3)),       # completed by the last character
    ("abcdef", 0, ["def"], False, None),
    ("hello world", 3, ["lo w"], False, None),
    ("hello world", 6, ["lo w"], False, ("lo w", 3)),    # vllm#3672: in the middle of a token
    ("For organization", 13, ["gani"], False, ("gani", 6)),
    ("For organization", 13, ["gani"], True, ("gani", 10)),
    ("ab", 2, ["abc"], False, None),
    ("", 0, ["a"], False, None),
    ("aaaa", 1, ["aa"], False, ("aa", 2)),
])
def test_check_stop_strings(text, new, stop, include, expected):
    assert check_stop_strings(text, new, stop, include) == expected


def test_special_token_as_a_stop_string():
    "vllm#792: what is skipped is no text; such a stop is given as an id."
    tokenizer, ids = ByteTokenizer(), ByteTokenizer().encode("a<|eos|>")
    for skip, expected in ((True, None), (False, ("<|eos|>", 1))):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        new = sum(len(detokenizer.update([i])) for i in ids)
        assert check_stop_strings(detokenizer.output_text, new, ["<|eos|>"], False) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=4), cuts=st.lists(st.integers(1, 4)))
def test_stop_string_is_found_once_it_is_there(text, stop, cuts):
    "vllm#3574, vllm#2577: streaming in any portions finds the same first place."
    seen, found = 0, None
    for size in [*cuts, len(text)]:
        new = min(size, len(text) - seen)
        seen += new
        found = check_stop_strings(text[:seen], new, [stop], False)
        if found: break
    at = text.find(stop)
    assert found == (None if at < 0 else (stop, at))


# Chat templates -------------------------------------------------------------

def test_chat_template():
    tokenizer = ByteTokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    ids = apply_chat_template(tokenizer, messages)
    assert tokenizer.decode(ids) == "<|user|>Hi<|eos|><|assistant|>Ho<|eos|><|assistant|>"
    ids = apply_chat_template(tokenizer, messages, add_generation_prompt=False)
    assert tokenizer.decode(ids).endswith("Ho<|eos|>")
    parts = [{"role": "tool", "content": [{"type": "text", "text": "18"}, {"type": "text", "text": "degrees"}]}]
    ids = apply_chat_template(tokenizer, parts, chat_template="{{ messages[0].content }}")
    assert tokenizer.decode(ids) == "18\ndegrees"  # vllm#25001


def test_chat_template_of_the_default_model(default_tokenizer):
    ids = apply_chat_template(default_tokenizer, [{"role": "user", "content": "Hi"}])
    assert default_tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_chat_template_errors():
    "vllm#39279: a base model has no template; say what to do instead."
    tokenizer, hi = byte_level(), [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="chat_template=.*plain prompt"): apply_chat_template(tokenizer, hi)
    assert apply_chat_template(tokenizer, hi, chat_template="a") == tokenizer.encode("a")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"): apply_chat_template(tokenizer, hi)
    for bad, word in [([], "empty"), (["Hi"], "role"), ([{"content": "Hi"}], "role"),
                      ([{"role": "user", "content": [{"type": "image"}]}], "image"),
                      ([{"role": "user", "content": ["Hi"]}], "str")]:
        with pytest.raises(ValueError, match=word): apply_chat_template(ByteTokenizer(), bad)


# As the makers of models that see pictures write them, each in its own way.
WALKS = ("{% for m in messages %}{{ m['role'] }}:{% for line in m['content'] %}{% if line['type'] == 'text' %}"
         "{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}|{% endfor %}")
IMAGES_FIRST = ("{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}"
                "<image>{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
                "{% endfor %}|{% endfor %}")
BOTH = ("{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if 'image' in c or c.type == 'image' %}<image>{% elif 'text' in c %}{{ c.text }}"
        "{% endif %}{% endfor %}{% endif %}|{% endfor %}")
TEXT = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
STRIPS = "{% for m in messages %}{{ m['role'] + ':' + m['content'].strip() + '|' }}{% endfor %}"


@pytest.mark.parametrize("template,forms,pictured", [
    (WALKS, (False, True), "user:a<image>b|assistant:c|user:de|"), (BOTH, (True, True), "user:a<image>b|assistant:c|user:d\ne|"),
    (IMAGES_FIRST, (False, True), "user:<image>ab|assistant:c|user:de|"), (TEXT, (True, False), None),
    (STRIPS, (True, False), None)])
def test_chat_templates_get_what_they_read(template, forms, pictured):
    tokenizer, text = ByteTokenizer(), lambda t: {"type": "text", "text": t}
    assert find_content_forms(tokenizer, template) == forms
    turns = [{"role": "user", "content": [text("a"), {"type": "image"}, text("b")]},
             {"role": "assistant", "content": "c"}, {"role": "user", "content": [text("d"), text("e")]}]
    if pictured is None:
        with pytest.raises(ValueError, match="no place for images"):
            apply_chat_template(tokenizer, turns, chat_template=template)
    else: assert tokenizer.decode(apply_chat_template(tokenizer, turns, chat_template=template)) == pictured
    ids = apply_chat_template(tokenizer, turns[1:], chat_template=template)
    assert tokenizer.decode(ids) in ("assistant:c|user:de|", "assistant:c|user:d\ne|")
    assert turns[2]["content"] == [text("d"), text("e")], "the caller's messages have changed"


# Loading --------------------------------------------------------------------

def test_get_tokenizer(tmp_path):
    byte_level().save_pretrained(tmp_path)
    loaded = get_tokenizer(str(tmp_path))
    assert loaded.encode("héllo") == byte_level().encode("héllo")
    assert isinstance(get_tokenizer("byte"), ByteTokenizer)


def test_get_tokenizer_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("minengine.tokenizer.hub_is_reachable", lambda name: False)
    for name in (str(tmp_path), str(tmp_path / "nothing"), "./nothing", "no-such/model", str(tmp_path / "x.gguf")):
        with pytest.raises(ValueError, match="no tokenizer in"): get_tokenizer(name)
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="skip_tokenizer_init"): get_tokenizer(nothing)


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    text = "<|user|>né 😀<|eos|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == "né 😀"
    assert ids[-1] == tokenizer.eos_token_id and ids[0] in tokenizer.all_special_ids
    assert tokenizer("a b")["input_ids"] == [97, 32, 98] and tokenizer(["a"])["input_ids"] == [[97]]
    assert max(tokenizer.all_special_ids) < tokenizer.vocab_size == len(tokenizer)
    assert tokenizer.convert_ids_to_tokens([97, 257]) == ["<0x61>", "<|eos|>"]
    assert tokenizer.decode([-1, 97, 10**9]) == "a" == tokenizer.decode(97)
