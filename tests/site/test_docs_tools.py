"What the site's builder reads from source, and which entry a name means; no site is built."
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "tools"))
import docs          # noqa: E402
import docs_api      # noqa: E402

SOURCE = '''"What it is about"
__all__ = ["LIMIT", "A", "B", "Pair", "Kind", "Space", "join", "first"]
LIMIT = 4   # blocks
A, B = 1, "two"

@dataclass
class Pair:
    "Two of them."
    left: int             # the one
    right: "Pair | None" = None   # the other
    rest: list[int] = field(default_factory=list)
    _secret: int = 0

class Kind(enum.Enum):
    "Which."
    FULL = 0   # no room
    FREE = 1

class Space(Base):
    "Room for blocks."
    def __init__(self,
        num_blocks: int,   # how many
        *,
        size: int = 16,    # tokens each
    ):
        self.x = num_blocks

    @property
    def used(self) -> int:   # blocks
        "Blocks in use."

    @used.setter
    def used(self, value): "Never shown."

    @classmethod
    def make(cls, n: int) -> "Space": return cls(n)

    def __len__(self) -> int: "How many."

    def _hidden(self): pass

async def join(
    parts: dict[str, list[int]],   # by name, `a | b`
    *more,
    sep: str = ", ",               # between them
    **options,
) -> str:                          # one text
    """Join them.

    A second paragraph.
    """

def first(a, b: int) -> int: return a   # the result
def unlisted(): pass
'''


@pytest.fixture
def module(tmp_path):
    (tmp_path / "minengine").mkdir()
    path = tmp_path / "minengine/sample.py"
    path.write_text(SOURCE)
    return docs_api.read_module(path, tmp_path)


def rows(entry): return [(r.name, r.type, r.default, r.text) for r in entry.rows]


def test_public_names_in_order(module):
    assert [e.name for e in module.entries] == ["LIMIT", "A", "B", "Pair", "Kind", "Space", "join", "first"]
    assert module.doc == "What it is about" and module.short == "sample"
    names = [e.name for e in module.every()]
    assert "Space.used" in names and "Space.__len__" in names and "Space._hidden" not in names
    assert names.count("Space.used") == 1, "a setter is no second property"


def test_constants(module):
    limit, a, b = module.entries[:3]
    assert (limit.signature, limit.doc) == ("LIMIT = 4", "blocks")
    assert [a.signature, b.signature] == ["A = 1", "B = 'two'"]


def test_fields_and_members(module):
    pair, kind = module.entries[3:5]
    assert rows(pair) == [("left", "int", None, "the one"), ("right", "Pair | None", "None", "the other"),
                          ("rest", "list[int]", "list()", "")]
    assert pair.signature == "Pair(left: int, right: Pair | None = None, rest: list[int] = list())"
    assert kind.columns == "Member" and rows(kind) == [("FULL", "", "0", "no room"), ("FREE", "", "1", "")]


def test_class_and_methods(module):
    space = module.entries[5]
    assert rows(space) == [("num_blocks", "int", None, "how many"), ("size", "int", "16", "tokens each")]
    assert space.signature == "Space(num_blocks: int, *, size: int = 16)" and space.bases == ["Base"]
    kinds = {m.name: (m.kind, m.signature) for m in space.members}
    assert kinds["Space.used"] == ("property", "Space.used: int")
    assert kinds["Space.make"] == ("class method", "Space.make(n: int) -> Space")


def test_function_parameters_and_result(module):
    join, first = module.entries[6:]
    assert rows(join) == [("parts", "dict[str, list[int]]", None, "by name, `a | b`"), ("*more", "", "", ""),
                          ("sep", "str", "', '", "between them"), ("**options", "", "", ""), ("returns", "str", "", "one text")]
    assert join.signature.startswith("async def join(\n    parts: dict[str, list[int]],\n") or len(join.signature) <= docs_api.MAX_WIDTH
    assert join.summary == "Join them."
    assert rows(first) == [("a", "", None, ""), ("b", "int", None, ""), ("returns", "int", "", "the result")]


def test_table_keeps_its_columns(module):
    text = docs_api.table(module.entries[6])
    assert r"`dict[str, list[int]]`" in text and r"by name, `a \| b`" in text
    lines = [line for line in text.split("\n") if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1


def test_a_method_says_what_its_base_class_says_unless_it_speaks_for_itself(tmp_path):
    (tmp_path / "minengine").mkdir()
    (tmp_path / "minengine/base.py").write_text('''
__all__ = ["Base", "Between"]
class Base:
    def go(self,
        n: int, # steps
    ) -> bool:  # False: it stood still
        "Move on."
    def stop(self):
        "Stand still."
class Between(Base):
    def stop(self):
        "Stop at once."
''')
    (tmp_path / "minengine/child.py").write_text('''
__all__ = ["Child"]
class Child(base.Between, abc.ABC):
    def go(self, n) -> bool: return n > 0
    def stop(self): pass
    def own(self): pass
''')
    child = docs_api.read_package(tmp_path)[1].entries[0]
    go, stop, own = child.members
    assert go.doc == "Move on." and rows(go) == [("n", "int", None, "steps"), ("returns", "bool", "", "False: it stood still")]
    assert stop.doc == "Stop at once." and own.doc == ""


def test_a_name_that_is_not_there_stops_the_build(tmp_path):
    (tmp_path / "minengine").mkdir()
    (tmp_path / "minengine/bad.py").write_text('__all__ = ["gone"]\n')
    with pytest.raises(SystemExit, match="gone"): docs_api.read_package(tmp_path)


# ---------------------------------------------------------------- which entry a name means

NAMES = docs.Names(docs_api.read_package(ROOT), docs.read_pages())


@pytest.mark.parametrize("text, module, wing, expected", [
    ("Scheduler", "minengine.v1.core.scheduler", "v1", "minengine.v1.core.scheduler"),
    ("Scheduler", "minengine.v1.engine.core", "v1", "minengine.v1.core.scheduler"),
    ("Scheduler", "minengine.v0.llm_engine", "v0", "minengine.v0.scheduler"),
    ("Scheduler.schedule()", None, "v0", "minengine.v0.scheduler"),
    ("Scheduler.finish_requests", None, "v1", "minengine.v1.core.scheduler"),   # from a class above
    ("FreeKVCacheBlockQueue", None, None, "minengine.v1.core.free_block_queue"),
    ("popleft()", "minengine.v1.core.free_block_queue", "v1", "minengine.v1.core.free_block_queue"),
    ("minengine.v0.scheduler.Scheduler", None, "v1", "minengine.v0.scheduler"),
    ("cdiv", "minengine.config", None, "minengine.config"),
])
def test_the_entry_that_is_meant(text, module, wing, expected):
    assert NAMES.find(text, module, wing).module == expected


@pytest.mark.parametrize("text, module, wing", [
    ("Scheduler", None, None),            # either engine's
    ("popleft()", None, None),            # a deque has one, too
    ("start", "minengine.config", None),  # a word, unless the page defines it
    ("start()", "minengine.v1.engine.core_handle", "v1"),
    ("torch.Tensor", None, None), ("block_size", None, None), ("NoSuchName", None, "v1"),
])
def test_no_entry_is_guessed(text, module, wing):
    assert NAMES.find(text, module, wing) is None


def test_a_name_of_both_engines_leads_to_both():
    assert NAMES.href("Scheduler", None, None, in_api=False) == "api/index.html#Scheduler"


def test_names_become_links_where_links_may_be():
    page = ("<nav><code>Scheduler</code></nav><main><h2><code>Scheduler</code></h2><pre><code>Scheduler</code></pre>"
            '<p><code>Scheduler</code> <a href="x"><code>Scheduler</code></a> <code>a &lt; b</code></p>'
            "<table><td><code>list[Request] | None</code></td></table></main>")
    def href(name): return {"Scheduler": "s.html", "Request": "r.html"}.get(name)
    made = docs.link_names(page, href)
    assert made.count('<a href="s.html"><code>Scheduler</code></a>') == 1 and made.count("s.html") == 1
    assert '<code>list[<a href="r.html">Request</a>] | None</code>' in made and "<code>a &lt; b</code>" in made


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a> <a href="b.html#gone">x</a> <a href="c.html">x</a> '
                                     '<a href="#me">x</a><h1 id="me"></h1> <img src="d.svg"> <a href="https://e.org/f">x</a>')
    (tmp_path / "b.html").write_text('<h1 id="here"></h1>')
    found = docs.check_links(tmp_path)
    assert [f.split(": ")[1] for f in found] == ["b.html#gone", "c.html", "d.svg"]
