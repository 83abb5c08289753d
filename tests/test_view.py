"""Every object that can be shown is shown, of both engines: right, readable everywhere, and never in the way.

What a picture says is taken from its text and its HTML; no browser is needed.
"""
import re
from html.parser import HTMLParser

import pytest
from front_tiny import make_folder
from v1_tiny import Engine as EngineV1

from minengine.drawing import NEUTRAL, PALETTE, View, beside, colour_of, label, pale, stack
from minengine.llm import LLM
from minengine.record import record
from minengine.replay import film, replay, view_lives, view_steps
from minengine.sampling_params import SamplingParams
from minengine.snapshot import (
    LOOKS, BatchRow, BatchSnapshot, OrderPart, OrderSnapshot, PoolSnapshot, QueuesSnapshot, RequestSnapshot,
    TableSnapshot, short_names, snapshot)
from minengine.view import draw, enable, disable, show, view_batch, view_pool, view_queues, view_tables


class Reader(HTMLParser):
    "What a picture is made of; fails where tags do not close."
    VOID = {"br", "path"}

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attrs, self.text = [], [], [], ""
        self.feed(html)
        assert not self.open, f"open at the end: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += attrs
        if tag not in self.VOID: self.open.append(tag)

    def handle_startendtag(self, tag, attrs): self.tags.append(tag); self.attrs += attrs

    def handle_endtag(self, tag):
        if tag in self.VOID: return
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data): self.text += data + " "


def check(view: View) -> Reader:
    "What holds for every view."
    html = view._repr_html_()
    found = Reader(html)
    assert not {"script", "style", "link", "img", "iframe", "table"} & set(found.tags)
    names = [name for name, _ in found.attrs]
    assert "id" not in names and "class" not in names and not any(n.startswith("on") for n in names)
    assert found.tags.count("svg") == found.tags.count("title")
    labels = [value for name, value in found.attrs if name == "aria-label"]
    assert labels and all(labels), "no alternative text"
    for name, value in found.attrs:
        if name != "style": continue
        # On black as on white: a filled box has its own text colour, and nothing else sets one.
        assert not re.search(r"(^|;)color:(?!#000)", value), value
        widths = [int(w) for w in re.findall(r"(?:^|;)(?:width|min-width):(\d+)px", value)]
        assert all(w <= 300 for w in widths), f"too wide for a phone: {value}"
    assert repr(view) == view.text and view.text.strip()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("view") / "tiny")


def make(folder, engine, **kw) -> LLM:
    return LLM(folder, engine=engine, load_format="dummy", tokenizer="byte", max_num_seqs=4, max_model_len=96,
               enforce_eager=True, use_tqdm_on_load=False, **dict(block_size=4, num_gpu_blocks_override=30) | kw)


def busy(folder, engine, names=("A", "B"), **kw) -> LLM:
    "An engine in the middle of things: A and B decode, C has just come."
    llm = make(folder, engine, enable_prefix_caching=True, num_preallocate_tokens=0, **kw)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for i, name in enumerate(names):
        llm.llm_engine.add_request(name, {"prompt_token_ids": [3, 1, 4, 1, 5, 9, 2, 6, i]}, params)
        llm.llm_engine.step()
    llm.llm_engine.add_request("C", {"prompt_token_ids": [7] * 20}, params)
    return llm


def objects_of(llm) -> list:
    engine = llm.llm_engine
    if llm.engine_name == "v0":
        s, allocator = engine.scheduler, engine.scheduler.block_manager.block_allocator
        pool = next(iter(allocator.allocators.values()))
        return [llm, engine, s, s.block_manager, allocator, pool, pool.evictor,
                next(iter(s.block_manager.block_tables.values())), s.running[0], s.waiting[0]]
    core = engine.engine_core.engine_core
    s, batch = core.scheduler, core.executor.worker.model_runner.batch
    return [llm, engine, core, s, s.kv_cache_manager, s.kv_cache_manager.pool, s.kv_cache_manager.pool.free_queue,
            batch, batch.block_table, s.running[0], s.waiting[0]]


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_all_objects_of_an_engine(engine, folder):
    llm = busy(folder, engine)
    shown = set()
    for obj in objects_of(llm):
        check(show(obj))
        kinds = [k for k in type(obj).__mro__ if k in LOOKS]
        shown |= set(kinds[:1])
    for kind, order in watch_order(llm):
        check(show(order))
        shown.add(kind)
    wing = f"minengine.{engine}"
    assert shown >= {k for k in LOOKS if k.__module__.startswith(wing)}
    llm.shutdown()


def watch_order(llm) -> list:
    "The work orders of one step, looked at as they pass by: (class, snapshot)."
    engine, found = llm.llm_engine, []
    core = engine if llm.engine_name == "v0" else engine.engine_core.engine_core
    def schedule():
        result = planned()
        order = result[1] if llm.engine_name == "v0" else result
        found.append((type(order), snapshot(order)))
        return result
    def execute_model(request):   # its lists go on living
        found.append((type(request), snapshot(request, block_size=4)))
        return execute(request)
    planned, core.scheduler.schedule = core.scheduler.schedule, schedule
    if llm.engine_name == "v0": execute, engine.executor.execute_model = engine.executor.execute_model, execute_model
    engine.step()
    return found


@pytest.mark.parametrize("engine", ["v0", "v1"])
def test_a_scheduler_says_who_is_where(engine, folder):
    llm = busy(folder, engine)
    text = show(llm).text
    queues = dict(line.split(maxsplit=1) for line in text.splitlines()[1:3])
    assert queues["waiting"] == "C 0/20"
    # V0's second step was B's prompt, and A stood still.
    assert queues["running"] == {"v0": "A 9/10  B 9/10", "v1": "A 10/11  B 9/10"}[engine]
    assert text.splitlines()[0].startswith(f"{engine.upper()} scheduler")
    found = check(show(llm))
    assert "C 0/20" in found.text and queues["running"].split("  ")[0] in found.text
    assert ("Swap space on the host: " in text) is (engine == "v0")   # empty: a line is enough
    # Two blocks of the common beginning are shared, and everybody can see it.
    counts = snapshot(llm.llm_engine.scheduler if engine == "v0" else llm.llm_engine.engine_core.engine_core.scheduler
                      ).pools[0].counts()
    assert counts["shared"] == 2 and "(2 shared)" in text and text.count("A+B") == 2
    assert found.text.count("A B") == 2
    llm.shutdown()


def test_an_order_says_what_is_new(folder):
    "V1: a decode's part has no blocks. V0: the whole table, again."
    v0, v1 = busy(folder, "v0"), busy(folder, "v1")
    (_, decision), (_, request) = watch_order(v0)
    (_, order), = watch_order(v1)
    assert "new: positions 0–19, block table" in show(order).text
    assert "A  1   running: position 10, no new block" in show(order).text
    assert show(request).text.splitlines()[0] == "V0 step, 20 tokens"   # C's prompt, and nobody else
    assert "prefill: positions 0–19, block table" in show(request).text
    assert "C  20  prefill: positions 0–19" in show(decision).text
    total = show(v1, order=order).text
    assert "V1 step, 22 tokens of 2,048" in total
    for view in (show(order), show(request), show(decision), show(v0, v1)): check(view)
    v0.shutdown()
    v1.shutdown()


def test_a_batch_says_what_moved():
    engine = EngineV1()
    for name, length in (("A", 5), ("B", 6), ("C", 7)): engine.add(name, [3] * length, max_tokens=9)
    engine.step()
    before = snapshot(engine.runner.batch)
    engine.abort("A")
    engine.add("D", [5] * 4, max_tokens=3)
    engine.step()
    view = show(engine.runner.batch, before=before)
    check(view)
    changes = snapshot(engine.runner.batch).changes_since(before)
    assert changes["A"] == "went" and changes["D"] == "came" and changes["B"] == "stayed"
    assert "went   A" in view.text and re.search(r"D .*came", view.text)


def test_show_leaves_everything_as_it_is(folder):
    "Looking is reading: the same tokens come, whoever watched."
    tokens = []
    for watched in (False, True):
        llm = busy(folder, "v1")
        while llm.llm_engine.has_unfinished_requests():
            if watched:
                scheduler = llm.llm_engine.engine_core.engine_core.scheduler
                for obj in (llm, scheduler.kv_cache_manager.pool.free_queue, *scheduler.running): show(obj)
            tokens.append([(o.request_id, o.outputs[0].token_ids) for o in llm.llm_engine.step()])
        llm.shutdown()
    assert tokens[:len(tokens) // 2] == tokens[len(tokens) // 2:]


def test_names_are_text():
    "A request may be called anything."
    evil = "<script>alert('x')</script>\"&"
    request = RequestSnapshot(evil, 8, 9, 4, "RUNNING")
    pool = PoolSnapshot(4, 4, [TableSnapshot(evil, [0, 1], 8), TableSnapshot("B", [0], 4)], name="KV cache")
    order = OrderSnapshot("V0", [OrderPart(evil, "prefill", 4, 0, [0, 1], True)], 8, [evil], [(0, 1)], [(1, 0)])
    rows = BatchSnapshot([BatchRow(evil, 4, 9, 2)], 4)
    queues = QueuesSnapshot("V0", {"waiting": [request], "running": [request]}, [pool], 8, 2)
    for view in (draw(pool), view_pool(pool, 1), draw(pool.tables), draw(queues), view_queues(queues, order),
                 draw(order), draw(rows), view_batch(BatchSnapshot([], 4), rows), draw([request])):
        found = check(view)
        assert "script" not in found.tags


def test_names_are_text_in_a_trace(folder):
    evil = "<script>alert('x')</script>\"&"
    for engine in ("v0", "v1"):
        llm = make(folder, engine)
        with record(llm) as trace:
            llm.llm_engine.add_request(evil, "four", SamplingParams(max_tokens=3))
            while llm.llm_engine.has_unfinished_requests(): llm.llm_engine.step()
        llm.shutdown()
        assert evil in trace.requests
        for view in (view_steps(trace), view_lives(trace), film(trace), replay(trace).view): check(view)


def test_large_pools_and_long_queues_stay_small():
    tables = [TableSnapshot(f"r{i}", list(range(i * 90, i * 90 + 90)), 1440) for i in range(100)]
    pool = PoolSnapshot(10_000, 16, tables, list(range(9000, 9500)))
    many = [RequestSnapshot(f"r{i}", 20, 20, 0, "WAITING") for i in range(5000)]
    order = OrderSnapshot("V1", [OrderPart(f"r{i}", "running", 1, 20, [], False) for i in range(500)], 8192)
    view = view_queues(QueuesSnapshot("V1", {"waiting": many, "running": []}, [pool], 8192, 1000), order)
    found = check(view)
    assert len(view._repr_html_()) < 300_000 and len(view.text) < 10_000
    assert "and 4,976 more" in found.text and "each dot is 3 blocks" in found.text
    assert "9,000 in use, 500 cached, 500 free" in view.text


def test_empty_things():
    for obj in ([], PoolSnapshot(1, None), QueuesSnapshot("V1", {"waiting": []}, [], 1, 1), OrderSnapshot("V1", []),
                BatchSnapshot([], 1)): check(draw(obj))
    check(view_tables([TableSnapshot("A", [], 0)], 4))


def test_colours():
    "A name alone decides; black text can be read on every colour, strong or pale."
    assert colour_of("A") == colour_of("0") and colour_of("?") == NEUTRAL
    assert len({colour_of(str(i)) for i in range(6)}) == 6 == len(PALETTE)
    assert colour_of("some-request") == colour_of("some-request") in PALETTE
    def light(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), parts))
    for colour in (*PALETTE, NEUTRAL):
        for shade in (colour, pale(colour)): assert (light(shade) + 0.05) / 0.05 >= 4.5
    assert [label(n) for n in ("0", "7/1", "A")] == ["#0", "#7/1", "A"]


def test_short_names():
    assert short_names(["A#1", "B#2", "x"]) == {"A#1": "A", "B#2": "B", "x": "x"}
    assert short_names(["A#1", "A#2"]) == {"A#1": "A#1", "A#2": "A#2"}
    assert short_names(["a#b", "c#"]) == {"a#b": "a#b", "c#": "c#"}


def test_side_by_side():
    one, two = View("1", "<b>1</b>", "One."), View("2", "<b>2</b>", "Two.")
    assert beside(one, two).text == stack(one, two).text == "1\n\n2"
    for view in (beside(one, two), stack(one, two)):
        assert check(view).text.split() == ["1", "2"] and view.label == "One. Two."


def test_enable(folder):
    "After `enable()` a notebook draws the objects; after `disable()` it does not."
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    llm = busy(folder, "v1")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    try:
        plain = shell.display_formatter.format(scheduler)[0]
        enable()
        drawn = shell.display_formatter.format(scheduler)[0]
        assert drawn["text/plain"] == show(scheduler).text
        assert drawn["text/html"] == show(scheduler)._repr_html_()
        disable()
        assert shell.display_formatter.format(scheduler)[0].keys() == plain.keys()
        disable()   # twice is once
    finally:
        type(shell).clear_instance()
        llm.shutdown()
    with pytest.raises(RuntimeError, match="for notebooks and IPython"): enable()


def test_what_cannot_be_shown():
    with pytest.raises(TypeError, match="no view of int objects, only of Request"): show(3)
