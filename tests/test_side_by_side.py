"""What the pages that put V0 and V1 side by side claim as facts: counts and bytes that no machine changes."""
import json

import pytest

from minengine import cli
from minengine.compare import arrivals, bursts, command, inputs, orders, parts, preemption, prefixes
from minengine.compare.workload import CallClock, in_turn, open_llm, random_prompts, run_to_end, submit, times_of, write_tiny_model

ENGINES = ("v0", "v1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


# ---------------------------------------------------------------- the workload

def test_both_engines_give_the_same_tokens(model):
    answers = []
    for engine in ENGINES:
        llm = open_llm(engine, model)
        submit(llm, random_prompts(5, 37), 9)
        answers.append(run_to_end(llm))
        llm.shutdown()
    assert answers[0] == answers[1] and all(len(a) == 9 for a in answers[0].values())


def test_prompts_share_what_they_are_told_to():
    a, b = random_prompts(2, 40, num_shared=16)
    assert a[:16] == b[:16] and a[16:] != b[16:]
    assert random_prompts(2, 40, seed=3)[0] != random_prompts(2, 40, seed=4)[0]


def test_the_call_clock_counts_calls_and_stops():
    with CallClock() as clock: before = [abs(i) for i in range(100)]
    counted = clock()
    [abs(i) for i in before]
    assert 100 <= counted == clock() < 110


def test_times_are_medians_of_ratios_of_neighbours():
    assert times_of({"a": [1.0, 2.0, 4.0], "b": [2.0, 4.0, 80.0]}, "a") == {"a": 1.0, "b": 2.0}
    assert [len(s) for s in in_turn({"a": lambda: None, "b": lambda: None}, repeats=2).values()] == [2, 2]


# ---------------------------------------------------------------- parts

def test_calls_per_request(model):
    calls = {(e, n): parts.calls_of(e, model, n) for e in ENGINES for n in (1, 16)}
    assert calls == {key: parts.calls_of(key[0], model, key[1]) for key in calls}, "the same every time"
    total = {key: sum(found.values()) for key, found in calls.items()}
    assert total["v0", 16] > 2.5 * total["v1", 16]
    assert total["v0", 1] < 2.5 * total["v1", 1], "a single request gains less"
    assert calls["v0", 16]["schedule"] > 10 * calls["v1", 16]["schedule"]


# ---------------------------------------------------------------- arrivals

def test_gaps_while_prompts_arrive(model):
    traces = {way: arrivals.let_arrive(way, model)[0] for way in arrivals.WAYS}
    waits = {way: arrivals.count_waits(trace) for way, trace in traces.items()}
    assert waits["V0, chunked"] == waits["V1"] and waits["V1"]["longest gap, tokens"] == 128
    assert [s.num_tokens for s in traces["V0, chunked"].steps] == [s.num_tokens for s in traces["V1"].steps]
    assert waits["V0"]["longest gap, tokens"] > 2048 and waits["V0"]["steps without the readers"] == 1
    assert waits["V1, large budget"]["longest gap, tokens"] == 2048
    assert waits["V1"]["last newcomer, steps"] > 10 * waits["V0"]["last newcomer, steps"]
    for trace in traces.values():   # nobody is forgotten: 48 tokens of a reader have 47 gaps
        assert len(arrivals.gaps_of(trace, "reader3")) == 47


def test_more_prompts_make_v0_stop_longer_and_v1_not(model):
    found = {way: arrivals.count_waits(arrivals.let_arrive(way, model, num_long=6)[0]) for way in ("V0", "V1")}
    assert found["V0"]["steps without the readers"] == 3 and found["V0"]["longest gap, tokens"] > 6000
    assert found["V1"]["longest gap, tokens"] == 128


# ---------------------------------------------------------------- preemption

@pytest.fixture(scope="module")
def shortages(model):
    return {(n, way): preemption.run_short_of_blocks(way, model, n) for n in (40, 140) for way in preemption.WAYS}


def test_nobody_answers_otherwise_for_having_given_way(model, shortages):
    for n in (40, 140):
        expected = preemption.run_short_of_blocks("V1", model, n, 64)[1]
        for way in preemption.WAYS: assert shortages[n, way][1] == expected, way


def test_what_giving_way_costs(shortages):
    costs = {key: preemption.count_costs(trace, key[0]) for key, (trace, _) in shortages.items()}
    for n in (40, 140):
        swap, none, v1 = costs[n, "V0 swap"], costs[n, "V1, no cache"], costs[n, "V1"]
        assert swap["computed again"] == 0 < swap["blocks moved"] and v1["blocks moved"] == 0
        assert v1["preemptions"] == none["preemptions"] == 1 < swap["preemptions"] < costs[n, "V0 recompute"]["preemptions"]
        assert v1["computed again"] < none["computed again"] == 144 < costs[n, "V0 recompute"]["computed again"]
    assert costs[40, "V1"]["computed again"] == 32 and costs[140, "V1"]["computed again"] == 128


# ---------------------------------------------------------------- prefixes

def test_what_a_cache_costs_that_finds_nothing():
    more = {}
    for engine in ENGINES:
        off, on = (prefixes.count_bookkeeping(engine, caching) for caching in (False, True))
        more[engine] = [b - a for a, b in zip(off, on)]
    assert more["v0"][1] > 30 and more["v1"][1] < 4, "calls for each decoded token"
    assert more["v0"][0] > more["v1"][0] > 100, "both name a prompt's blocks"


@pytest.mark.parametrize("share, computed", [(0.0, 5120), (0.5, 2560), (0.9, 512), (150 / 320, 16 * 176)])
def test_what_a_cache_finds_is_the_same(model, share, computed):
    assert [prefixes.count_computed(e, model, share, True) for e in ENGINES] == [computed] * 2
    assert prefixes.count_computed("v1", model, share, False) == 5120


def test_prompts_that_arrive_together(model):
    assert prefixes.count_together("v0", model) == [5120]
    assert prefixes.count_together("v1", model) == [2720]


# ---------------------------------------------------------------- orders

def test_bytes_of_an_order(model):
    short, long = ({e: orders.weigh_orders(e, model, n) for e in ENGINES} for n in (64, 1024))
    decode, block = slice(2, 16), 17
    for step in range(2, 16):   # whatever the length, up to how many digits its numbers have
        assert abs(long["v1"]["order"][step] - short["v1"]["order"][step]) <= 8 * 4
    assert max(long["v1"]["order"][decode]) < 8 * 60
    assert min(long["v0"]["order"][decode]) > 6 * max(short["v0"]["order"][decode]) > 60 * max(short["v1"]["order"][decode])
    assert short["v0"]["order"][15] - short["v0"]["order"][5] >= 8 * 10, "each token makes the next order longer"
    assert len(set(short["v0"]["tensors"][2:15])) == 1, "a whole block of tokens later: one block more"
    assert short["v0"]["tensors"][block] - short["v0"]["tensors"][2] == 8 * 4, "a number for each new block"
    for n in short, long: assert 0 < n["v1"]["order"][block] - n["v1"]["order"][2] <= 8 * 6


# ---------------------------------------------------------------- inputs

def test_what_comes_costs_and_what_stays_does_not(model):
    def calls(engine, life):
        with CallClock() as clock: return inputs.run_lives(engine, model, life, clock)
    found = {(e, life): calls(e, life) for e in ENGINES for life in (64, 8, 2)}
    v1 = {life: found["v1", life] for life in (64, 8, 2)}
    ratios = [found["v0", life]["inputs"] / v1[life]["inputs"] for life in (64, 8, 2)]
    assert ratios[0] > 3 > ratios[1] > 2 > ratios[2] > 1
    for life, rows in v1.items():
        assert rows["stayed"] + rows["came"] == inputs.NUM_ROWS * inputs.NUM_STEPS
        assert rows["came"] == inputs.NUM_ROWS * inputs.NUM_STEPS // life
    assert v1[64]["rebuilt"] == 16 and v1[8]["rebuilt"] == v1[2]["rebuilt"] == inputs.NUM_STEPS


# ---------------------------------------------------------------- bursts

def test_gain_and_price_of_bursts(model):
    gain = {burst: bursts.count_gain("v0", model, burst) for burst in (1, 2, 4, 8)}
    v1 = bursts.count_gain("v1", model, 1)
    assert [g["schedules"] for g in gain.values()] == [33, 17, 9, 5]
    assert [g["for nobody"] for g in gain.values()] == [0, 2, 12, 24] and v1["for nobody"] == 0
    calls = [g["calls a token"] for g in gain.values()]
    assert calls == sorted(calls, reverse=True) and calls[0] > 2.3 * v1["calls a token"]
    assert calls[3] < 1.5 * v1["calls a token"], "the longest bursts come near V1"


def test_waiting_and_portions(model):
    assert [bursts.wait_of_newcomer("v0", model, 4, at) for at in range(2, 6)] == [4, 3, 2, 1]
    assert {bursts.wait_of_newcomer("v1", model, 1, at) for at in (2, 3, 5)} == {1}
    assert bursts.portions_of("v0", model, 8) == [1] + ([0] * 7 + [8]) * 2
    assert bursts.portions_of("v1", model, 1) == [1] * 17
    with pytest.raises(ValueError, match="bursts of 4 steps are V0's"): bursts.portions_of("v1", model, 4)


# ---------------------------------------------------------------- the command

def test_the_command_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert cli.main(["bench", "compare", "preemption", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {row["claim"] for row in report["rows"]} == {"preemption"} and len(report["rows"]) == 10
    said = capsys.readouterr().out
    assert said.startswith("preemption: swap against recompute") and said.count("\n") == 11
    assert cli.main(["bench", "compare", "speed"]) == 2


def test_every_claim_has_a_module():
    assert set(command.CLAIMS) == {"parts", "arrivals", "preemption", "prefixes", "orders", "inputs", "bursts"}
    for module in (parts, arrivals, preemption, prefixes, orders, inputs, bursts):
        assert module.__name__.split(".")[-1] in command.CLAIMS and callable(module.measure)
