"""The GPU check: it can say no, and its dry run goes through every part.

The check itself is tests/gpu/check.sh; on a machine with a GPU run that.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
PARTS = {"kernels", "equality", "ranks", "attention", "throughput", "timeline"}


@pytest.fixture
def gpu(monkeypatch):
    "A module of the check by name."
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    yield __import__
    for name in [*PARTS, "check", "common", "timing"]: sys.modules.pop(name, None)


def answer(token_ids, logprobs=(-0.5, -0.6, -3.0)):
    "An output whose best, second and third token have these log-probabilities."
    steps = [{t: SimpleNamespace(logprob=logprobs[0]), t + 100: SimpleNamespace(logprob=logprobs[1]),
              t + 200: SimpleNamespace(logprob=logprobs[2])} for t in token_ids]
    return SimpleNamespace(token_ids=list(token_ids), logprobs=steps)


def test_compare_tells_a_tie_from_a_mistake(gpu):
    compare = gpu("equality").compare
    same = compare([answer([1, 2, 3])], [answer([1, 2, 3])], "float32")
    assert same["ok"] and (same["equal"], same["ties"]) == (1, 0)
    second = compare([answer([1, 2, 3])], [answer([1, 102, 3])], "float32")
    assert not second["ok"] and second["wrong"] == [[0, 1]]
    close = compare([answer([1, 2], (-0.5, -0.50001, -3))], [answer([1, 102])], "float32")
    assert close["ok"] and close["ties"] == 1
    third = compare([answer([1, 2])], [answer([1, 202])], "bfloat16")
    assert not third["ok"]
    shorter = compare([answer([1, 2])], [answer([1])], "float32")
    assert not shorter["ok"]
    drifted = compare([answer([1, 2])], [answer([1, 2], (-0.7, -0.8, -3))], "bfloat16")
    assert not drifted["ok"] and drifted["mean_error"] == pytest.approx(0.2)


def test_the_gaps_of_a_timeline(gpu):
    timeline = gpu("timeline")
    assert timeline.merge([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    found = timeline.describe([(10.0, 12.0, "a"), (11.0, 13.0, "b"), (16.0, 18.0, "c"), (99.0, 100.0, "later")], 9.0, 20.0)
    assert (found["num_kernels"], found["busy_us"], found["idle_us"], found["step_us"]) == (3, 5.0, 6.0, 11.0)
    assert found["longest_gaps"] == [[3.0, 4.0], [2.0, 9.0], [1.0, 0.0]]
    assert timeline.describe([], 0.0, 5.0)["idle_us"] == 5.0


def test_what_is_wrong_is_named(gpu):
    check = gpu("check")
    good = check.Part("kernels", 1, 1, True, rows=[dict(what="a", ok=True)], end="done")
    assert check.verdict([good]) == []
    bad = check.Part("kernels", 1, 1, True, rows=[dict(what="a", ok=False, problem="differs")], end="done")
    assert check.verdict([bad]) == ["kernels: a: differs"]
    assert check.verdict([check.Part("equality", 1, 1, True, end="done")]) == ["equality: nothing was checked"]
    assert check.verdict([check.Part("kernels", 1, 1, True, good.rows, end="out of time")]) == ["kernels: out of time"]
    assert check.verdict([check.Part("throughput", 1, 1, False, end="failed")]) == []


def test_a_part_that_dies_keeps_its_rows(gpu, monkeypatch, tmp_path):
    check = gpu("check")
    script = tmp_path / "part.py"
    script.write_text("import os; print('ROW {\"what\": \"a\", \"ok\": true}', flush=True); print('last words', flush=True)\n"
                      "os.abort()")
    monkeypatch.setattr(check, "__file__", str(script))
    part = check.Part("kernels", 1, 1, True)
    check.run_part(part, argparse.Namespace(dry=True, seed=0, verbose=False), 20)
    assert part.rows == [{"what": "a", "ok": True, "part": "kernels"}]
    assert part.end == "failed" and "last words" in part.tail
    assert check.verdict([part]) == ["kernels: failed"]


def test_needs_a_gpu_unless_dry(tmp_path):
    import torch
    if torch.cuda.is_available(): pytest.skip("there is one")
    done = subprocess.run(["bash", ROOT / "tests/gpu/check.sh", "--json", tmp_path / "a.json"], capture_output=True, text=True)
    assert done.returncode == 2 and "--dry" in done.stderr
    assert not (tmp_path / "a.json").exists()


def test_committed_results_are_whole():
    for path in (ROOT / "tests" / "gpu" / "results").glob("*.json"):
        report = json.loads(path.read_text())
        assert {"device", "date", "versions", "rows", "parts", "correct"} <= report.keys(), path
        assert not report["dry"], f"{path} is a dry run"


@pytest.mark.slow
def test_dry_run_goes_through_every_part(tmp_path):
    path = tmp_path / "check.json"
    done = subprocess.run(["bash", ROOT / "tests/gpu/check.sh", "--dry", "--json", path], capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert report["correct"] and report["dry"]
    assert {part["part"]: part["end"] for part in report["parts"]} == dict.fromkeys(PARTS, "done")
    problems = [row for row in report["rows"] if "problem" in row]
    assert not problems, problems
    rows = {part: [row for row in report["rows"] if row["part"] == part] for part in PARTS}
    assert {row["what"].split()[0] for row in rows["kernels"] if row.get("ok")} >= {"decode", "long", "drafts", "chunk", "mixed"}
    assert {"llama float32 v1 graphs", "llama float32 v0 graphs", "llama bfloat16 v1 graphs"} <= {
        row["what"] for row in rows["equality"]}
    modes = {row["mode"] for row in rows["throughput"] if row["what"] == "decode"}
    assert modes == {"v1 graphs", "v1 eager", "v0 graphs", "v0 eager"}
    assert any(row["num_kernels"] > 0 for row in rows["timeline"] if row["what"] == "step")
