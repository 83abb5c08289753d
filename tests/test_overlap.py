"""Two processes at once: the core's loop computes, and knows no text; the front end makes text meanwhile. What it costs."""
import json
import sys
import time
from collections import Counter

import pytest
from overlap_tiny import TracedExecutor
from served import LLM_ARGS, make_model

from minengine import bench
from minengine.config import EngineArgs
from minengine.model.checkpoint import create_engine_config
from minengine.sampling_params import SamplingParams
from minengine.v1.engine.llm_engine import LLMEngineV1

# Whoever turns text into tokens or tokens into text, or messages into bytes.
TEXT = ("transformers", "tokenizers", "jinja2", "minengine.tokenizer", "minengine.output_text", "minengine.inputs",
        "minengine.v1.engine.processor", "minengine.v1.engine.output_processor", "minengine.v1.engine.request_state")
MESSAGES = "minengine.v1.engine.wire", "minengine.v1.engine.packing", "msgspec", "zmq"


def calls_into(calls: dict, modules) -> dict:
    "Of counts by module, those of `modules` and what is inside them."
    return {name: n for name, n in calls.items() if any(name == m or name.startswith(m + ".") for m in modules)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_model(tmp_path_factory.mktemp("overlap") / "tiny")


def traced(folder, path, multiprocess):
    "Texts of a few requests; what the core's thread did; when the front end made text; what its thread called."
    config = create_engine_config(EngineArgs(folder, download_dir=str(path), **LLM_ARGS))
    engine = LLMEngineV1(config, TracedExecutor, multiprocess=multiprocess)
    calls, texts, times = Counter(), {}, []
    make_text = engine.output_processor.process_outputs
    def timed(*args):
        start = time.monotonic()
        try: return make_text(*args)
        finally: times.append((start, time.monotonic()))
    engine.output_processor.process_outputs = timed
    def see(frame, event, arg):
        if event == "call": calls[str(frame.f_globals.get("__name__"))] += 1
    try:
        for i in range(8): engine.add_request(str(i), f"request {i}", SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, stop=["never there"], logprobs=2))
        sys.setprofile(see)
        while engine.has_unfinished_requests():
            for output in engine.step(): texts[output.request_id] = output.outputs[0].text
    finally:
        sys.setprofile(None)
        engine.shutdown()
    return texts, json.loads((path / "trace.json").read_text()), times, calls


def test_the_loop_knows_no_text_and_works_while_text_is_made(folder, tmp_path):
    "A trace of both threads that matter, over the same requests."
    texts, core, times, calls = traced(folder, tmp_path / "own", True)
    assert len(texts) == 8 and all(texts.values())
    assert calls_into(core["calls"], TEXT) == {} == calls_into(core["calls"], MESSAGES)
    for name in ("minengine.v1.core.scheduler", "minengine.v1.worker.model_runner", "minengine.v1.engine.core_process"):
        assert core["calls"][name] >= 40, "the trace has seen the loop"
    assert sum(calls_into(calls, ("minengine.tokenizer",)).values()) > 8 * 40   # it was done, over here

    # Text is made while the core takes the next step.
    def during_a_step(start, end): return any(s < end and start < e for s, e in core["steps"])
    share = sum(during_a_step(*t) for t in times) / len(times)
    assert share > 0.5, share

    # In one process, the same thread does it all, one after the other: the trace would see it.
    same, core, times, _ = traced(folder, tmp_path / "here", False)
    assert same == texts and not any(during_a_step(*t) for t in times)
    assert sum(calls_into(core["calls"], ("minengine.tokenizer",)).values()) > 8 * 40


def test_bench_processes(folder, capsys):
    "Two rows a batch size; what is measured is what is said."
    rows = bench.bench_processes([2, 3], folder, 8, 5, repeats=2, **LLM_ARGS)
    assert [(r["engine"], r["batch"], r["mode"].strip()) for r in rows] == [
        ("v1", n, mode) for n in (2, 3) for mode in ("in process", "own process")]
    assert all(r["tokens_per_s"] > 0 for r in rows) and [r["ratio_to_in_process"] for r in rows[::2]] == [1.0, 1.0]
    assert rows[1]["ratio_to_in_process"] > 0 and "own process" in capsys.readouterr().out
    assert bench.make_parser().parse_args(["processes", "--batch", "4"]).repeats == 5


@pytest.mark.slow
def test_smollm2_across_the_border_is_as_fast():
    "Offline, 32 requests: at least 0.95 of what one process does."
    rows = bench.bench_processes([32], repeats=5, num_gpu_blocks_override=512, max_model_len=512, use_tqdm_on_load=False)
    assert rows[1]["ratio_to_in_process"] >= 0.95, rows
