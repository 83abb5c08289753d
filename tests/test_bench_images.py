"""`minengine bench images`: its counts, on both engines, as a user starts it."""
import asyncio
import json

import pytest

from minengine.bench_images import draw_picture, gaps_between, interrupt, make_prompt, make_seeing_model
from minengine.cli import main
from minengine.config import EngineArgs
from minengine.server.launcher import make_async_engine

SMALL = "--image-size 112 --tower 64 2 --decoder 64 2 --picture 200 150 --others 2 --words 40 --repeats 2".split()


def test_rows(tmp_path, capsys):
    path = tmp_path / "images.json"
    assert main(["bench", "images", *SMALL, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["bench"] == "images" and len(report["rows"]) == 8 == len(capsys.readouterr().out.splitlines())
    others = {row["engine"]: row for row in report["rows"] if "others" in row}
    assert set(others) == {"v0", "v1"}
    for row in others.values():
        assert 0 < row["usual_gap_ms"] <= row["longest_gap_ms"] and row["image_first_token_ms"] > 0
    counts = {(row["engine"], row["question"]): (row["encoder_runs"], row["tokens_computed"])
              for row in report["rows"] if "question" in row}
    # 3 + 64 + 40 tokens; 64 of them are full blocks that the second question shares.
    assert counts == {
        ("v0", "first"): (1, 107), ("v0", "same image again"): (1, 107), ("v0", "another image"): (1, 107),
        ("v1", "first"): (1, 107), ("v1", "same image again"): (0, 43), ("v1", "another image"): (1, 107)}


def test_others_that_end_too_early(tmp_path):
    folder = make_seeing_model(tmp_path, 112, (64, 2), (64, 2), 128)
    engine = make_async_engine(EngineArgs(
        folder, engine="v0", load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, num_gpu_blocks_override=64))
    config = engine.vllm_config.model_config.hf_config
    async def play():
        others, question = [make_prompt(config, 100, 0)], make_prompt(config, 8, 1, draw_picture(100, 100))
        with pytest.raises(ValueError, match="others ended after"): await interrupt(engine, others, question, tokens_before=28)
    asyncio.run(asyncio.wait_for(play(), 30))
    engine.shutdown()


def test_pictures_and_gaps():
    assert len({draw_picture(50, 40, seed).tobytes() for seed in range(6)}) == 6
    assert gaps_between([1, 2, 5, 6], 2.5, 4) == [3] and gaps_between([1, 2], 3, 4) == []
