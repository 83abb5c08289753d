"""The command line: answers to standard output, everything else beside it."""
import io
import subprocess
import sys
from dataclasses import fields

import pytest
from front_tiny import make_folder

import minengine
from minengine.cli import main, make_params, make_parser, pick
from minengine.config import EngineArgs
from minengine.sampling_params import RequestOutputKind, SamplingParams


@pytest.fixture
def model(tmp_path):
    "Options for a tiny model with a chat template."
    return ["--model", make_folder(tmp_path / "tiny"), "--load-format", "dummy", "--tokenizer", "byte",
            "--num-gpu-blocks-override", "64", "--max-num-seqs", "8", "--no-use-tqdm-on-load"]


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def parse(*words): return make_parser().parse_args(list(words))


def test_generate_streams_one_answer(model, capsys):
    code, out, err = run(capsys, "generate", "hello", "--max-tokens", "5", "--ignore-eos", *model)
    assert code == 0 and out.endswith("\n") and len(out) > 1
    assert "[5 tokens" in err and "tokens/s" in err and "engine v1" in err
    again = run(capsys, "generate", "hello", "--max-tokens", "5", "--ignore-eos", *model)[1]
    assert again == out  # greedy unless something else is asked for


def test_template_and_raw(model, capsys, monkeypatch):
    import minengine.llm as llm
    prompts = []
    stream = llm.LLM.stream
    monkeypatch.setattr(llm.LLM, "stream", lambda self, prompt, params: prompts.append(prompt) or stream(self, prompt, params))
    run(capsys, "generate", "hello", "--max-tokens", "1", *model)
    run(capsys, "generate", "hello", "--max-tokens", "1", "--system", "be brief", *model)
    run(capsys, "generate", "hello", "--max-tokens", "1", "--raw", *model)
    assert prompts[0]["prompt"] == "<|user|>hello<|eos|><|assistant|>"
    assert prompts[1]["prompt"].startswith("<|system|>be brief<|eos|><|user|>")
    assert prompts[2] == "hello"
    code, out, err = run(capsys, "generate", "hello", "--raw", "--system", "x", *model)
    assert code == 2 and "--system needs a chat template" in err


def test_generate_many(model, capsys):
    code, out, err = run(capsys, "generate", "one", "two", "--n", "2", "--seed", "3", "--max-tokens", "3", *model)
    assert code == 0 and out.count("--- one") == out.count("--- two") == 1
    assert "Processed prompts" in err


def test_generate_from_standard_input(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    out = run(capsys, "generate", "-", "--max-tokens", "4", *model)[1]
    assert out == run(capsys, "generate", "hello", "--max-tokens", "4", *model)[1]


def test_chat(model, capsys, monkeypatch):
    import minengine.llm as llm
    lines, conversations = iter(["hi", "", "there", "/new", "x" * 400, "bye"]), []
    def fake_input(prompt):
        try: return next(lines)
        except StopIteration: raise EOFError
    monkeypatch.setattr("builtins.input", fake_input)
    render = llm.render_chat
    monkeypatch.setattr(llm, "render_chat", lambda tokenizer, messages: conversations.append([m["role"] for m in messages]) or render(tokenizer, messages))
    code, out, err = run(capsys, "chat", "--max-tokens", "3", *model)
    assert code == 0
    assert conversations == [["user"], ["user", "assistant", "user"], ["user"], ["user"]]
    assert "max_model_len is 256" in err  # the long message was refused, the next one answered


# Errors: one line, code 2

@pytest.mark.parametrize("words, message", [
    (["--temperature", "nan"], "temperature must be a number, got nan"),
    (["--top-p", "0"], "top_p must be above 0"),
    (["--model", "/no/such/folder"], "/no/such/folder"),
    (["--num-scheduler-steps", "4"], "num_scheduler_steps=4 is for V0"),
    (["--engine", "v0", "--logprobs-mode", "raw_logprobs"], "logprobs_mode='raw_logprobs' is for V1"),
    (["--engine", "v9"], "engine must be one of"),
    (["--block-size", "0"], "block_size must be at least 1, got 0"),
    (["--max-num-batched-tokens", "8"], "max_num_batched_tokens"),
    (["--num-gpu-blocks-override", "2", "--max-model-len", "128"], "set max_model_len to at most 32"),
    (["--stop-token-ids", "264"], "go from 0 to 263"),
])
def test_errors_are_one_line(model, capsys, words, message):
    code, out, err = run(capsys, "generate", "hi", *model, *words)
    last = err.rstrip("\n").split("\n")[-1]
    assert code == 2 and out == "" and last.startswith("minengine: error: ") and message in last
    assert "Traceback" not in err


def test_bad_params_cost_nothing(model, capsys):
    assert "weights" not in run(capsys, "generate", "hi", "--temperature", "nan", *model)[2]


def test_traceback_on_request(capsys):
    assert "Traceback" in run(capsys, "--traceback", "generate", "hi", "--model", "/no/such/folder")[2]


@pytest.mark.parametrize("words", [[], ["nothing"], ["generate"], ["generate", "hi", "--max-tokens", "x"]])
def test_usage_errors(words, capsys):
    with pytest.raises(SystemExit) as error: main(words)
    assert error.value.code == 2


def test_interrupt_of_a_stream_keeps_what_was_shown(model, capsys, monkeypatch):
    import minengine.llm as llm
    def two_pieces(self, prompt, params):
        for i, output in enumerate(stream(self, prompt, params)):
            yield output
            if i == 1: raise KeyboardInterrupt
    stream = llm.LLM.stream
    monkeypatch.setattr(llm.LLM, "stream", two_pieces)
    code, out, err = run(capsys, "generate", "hello", "--ignore-eos", *model)
    assert code == 130 and out.endswith("\n") and "[stopped after 2 tokens" in err


def test_interrupt(model, capsys, monkeypatch):
    import minengine.llm as llm
    def interrupted(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(llm.LLM, "generate", interrupted)
    assert run(capsys, "generate", "a", "b", *model)[0] == 130


# Options

def test_every_engine_argument_has_an_option():
    options = vars(parse("generate", "hi", "--no-enable-prefix-caching", "--block-size", "8", "--swap-space", "1.5",
                         "--hf-overrides", '{"a": 1}', "--dtype", "float32"))
    assert options["enable_prefix_caching"] is False and options["block_size"] == 8
    assert options["swap_space"] == 1.5 and options["hf_overrides"] == {"a": 1} and options["dtype"] == "float32"
    text = subprocess.run([sys.executable, "-c", "from minengine.cli import main; main(['generate', '--help'])"],
                          capture_output=True, text=True).stdout
    for f in fields(EngineArgs):
        assert "--" + f.name.replace("_", "-") in text


def test_sampling_options():
    options = parse("generate", "hi", "--stop", "a b", "--stop", "c", "--stop-token-ids", "7", "--top-k", "5", "--seed", "1")
    params = make_params(options, {"temperature": 0.6, "top_k": 50})
    assert (params.stop, params.stop_token_ids, params.top_k, params.seed, params.temperature) == (["a b", "c"], [7], 5, 1, 0.6)
    assert params.output_kind is RequestOutputKind.DELTA
    assert make_params(parse("generate", "hi"), {}).temperature == 0
    assert make_params(parse("generate", "hi", "--n", "2"), {}).temperature == 1
    assert pick(options, {"top_k"}) == {"top_k": 5}


def test_options_collide_nowhere():
    assert not ({f.name for f in fields(EngineArgs)} - {"seed"}) & set(SamplingParams.__struct_fields__)


def test_bench_hands_the_words_on(monkeypatch):
    import minengine.bench
    got = []
    monkeypatch.setattr(minengine.bench, "main", lambda argv: got.append(argv) or 0)
    assert main(["bench", "scheduler", "--num-seqs", "16", "--json", "x"]) == 0
    assert got == [["scheduler", "--num-seqs", "16", "--json", "x"]]


def test_version_and_help_are_quick():
    "No torch, no transformers: they take seconds."
    code = ("import sys\nfrom minengine.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'transformers') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == [f"minengine {minengine.__version__}", "[]"]


# Both engines

@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_engines_are_chosen_and_named(model, capsys, engine):
    words = ["--max-tokens", "4", "--temperature", "0", "--ignore-eos", *model]
    code, out, err = run(capsys, "generate", "hi", *words, "--engine", engine)
    assert code == 0 and f"engine {engine}" in err.splitlines()[0] and err.rstrip().endswith(f"engine {engine}]")
    assert run(capsys, "generate", "hi", *words)[1] == out   # greedy: the same answer


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_a_prompt_that_is_too_long_is_an_error_on_both(model, capsys, engine):
    code, out, err = run(capsys, "generate", "x" * 300, *model, "--engine", engine)
    assert code == 2 and out == "" and "303 tokens" in err.splitlines()[-1]


def test_best_of_on_v0(model, capsys):
    words = ["generate", "hi", "--best-of", "3", "--max-tokens", "4", "--ignore-eos", *model]
    code, out, err = run(capsys, *words, "--engine", "v0")
    assert code == 0 and out.startswith("--- hi\n")
    assert "best_of is not supported by engine 'v1'" in run(capsys, *words)[2]
