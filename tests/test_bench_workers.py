"""`minengine bench workers`: bytes of both engines' messages, and a ring between real processes."""
import json

import pytest

from minengine.bench_workers import main, time_ring, v0_message_bytes, v1_message_bytes, weigh_steps
from minengine.cli import main as minengine


def test_bytes_grow_with_requests_and_v0_sends_more():
    rows = {(engine, n): weigh_steps(engine, n) for engine in ("v0", "v1") for n in (4, 16)}
    for engine in ("v0", "v1"): assert rows[engine, 16]["bytes_per_step"] > 2 * rows[engine, 4]["bytes_per_step"] * 0.9
    assert rows["v0", 16]["bytes_per_step"] > 2 * rows["v1", 16]["bytes_per_step"]
    # Token 4, position 8, slot 8, selected row 8, length 4, start 4, and seventeen blocks or eighteen of 4.
    assert 36 + 17 * 4 <= rows["v0", 16]["tensors"] / 16 <= 37 + 18 * 4
    assert all(row["largest"] >= row["bytes_per_step"] for row in rows.values())


def test_the_weights_are_those_of_the_real_channels(monkeypatch):
    "What the channel and the ring would carry, byte for byte."
    from minengine.bench import V0Loop, make_loaded_scheduler
    from minengine.shm_ring import ShmRing
    from minengine.v1.worker.worker_process import Call
    output = make_loaded_scheduler(3, 200).schedule()
    ring = ShmRing.create(1)
    try: assert ring.send(Call(1, "execute_model", (output,), {}, 0)) == sum(v1_message_bytes(output))
    finally: ring.unlink(), ring.close()
    from minengine.v0 import worker_process
    from minengine.v0.model_runner import make_model_input, make_sequence_input
    from minengine.v0.sampling_metadata import prepare_sampling
    from minengine.v0.worker import WorkerInput, as_tensor_dict
    told = V0Loop(3, 200).schedule().metadata
    sequences = [make_sequence_input(one, one.get_first_seq_id(), 16) for one in told]
    made = make_model_input(told, sequences, 0, prepare_sampling(told, [len(s.token_ids) for s in sequences], {}, {}))
    sent = []
    monkeypatch.setattr(worker_process.dist, "broadcast", lambda x, source: sent.append(x.nbytes))
    channel = worker_process.BroadcastChannel()
    channel.send(as_tensor_dict(WorkerInput(3, [], [], []), made))
    assert channel.last_bytes == sum(v0_message_bytes(told)) == sum(sent) - 8


def test_a_ring_between_processes():
    row = time_ring(1000, num_readers=2, num_messages=30, pause_ms=0.1)
    assert row["num_readers"] == 2 and 0 < row["p50_us"] <= row["p99_us"]
    with pytest.raises(ValueError, match="num_messages"): time_ring(1000, num_messages=1)


def test_the_command(tmp_path, capsys):
    assert minengine(["bench", "workers", "--num-seqs", "4", "--num-messages", "0", "--json", str(tmp_path / "w.json")]) == 0
    assert [row["engine"] for row in json.loads((tmp_path / "w.json").read_text())["rows"]] == ["v0", "v1"]
    assert capsys.readouterr().out.count("bytes_per_step") == 2
    with pytest.raises(SystemExit): main(["--what"])
