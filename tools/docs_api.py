"""The site's API reference, read from the source of `minengine/`.

Nothing is imported: signatures, types and defaults are written as the source
writes them, and a parameter's or a field's description is the comment beside
it. One page a module, and one with every public name.
"""
import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Methods with underscores that a reader calls without naming them.
SPOKEN = {"__call__", "__len__", "__iter__", "__enter__", "__aenter__", "__contains__", "__getitem__"}
MAX_WIDTH = 78   # columns of a signature on one line
MAX_VALUE = 60   # characters shown of a constant or a default


@dataclass
class Row:
    "One line of a parameter table."
    name: str
    type: str = ""
    default: str | None = None   # None: must be given
    text: str = ""


@dataclass
class Entry:
    "A public name: a class, a function, a method, a property or a constant."
    module: str        # minengine.v1.core.scheduler
    name: str          # Scheduler.schedule
    kind: str
    line: int          # where it starts in its file
    doc: str = ""
    signature: str = ""
    rows: list[Row] = field(default_factory=list)
    columns: str = "Parameter"                      # what the rows are
    bases: list[str] = field(default_factory=list)
    members: list["Entry"] = field(default_factory=list)

    @property
    def summary(self) -> str: return self.doc.partition("\n\n")[0].replace("\n", " ")


def comments_of(source: str) -> dict[int, str]:
    "The comment at the end of each line that has one."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens
            if t.type == tokenize.COMMENT and not t.line.lstrip().startswith("#")}


def text_of(node: ast.AST | None) -> str:
    "An expression as the source has it; a quoted annotation without quotes."
    if node is None: return ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str): return node.value
    return re.sub(r"'(\w+)'", r"\1", ast.unparse(node))


def value_of(node: ast.AST | None) -> str | None:
    "A default or a constant, cut short."
    if node is None: return None
    text = " ".join(ast.unparse(node).split())
    text = re.sub(r"^(?:\w+\.)?field\(default_factory=([\w.]+)\)$", r"\1()", text, flags=re.I)
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE - 1] + "…"


def parameters(node, comments: dict[int, str]) -> list[Row]:
    "What a function takes: name, type, default and the comment beside it."
    args = node.args
    plain = args.posonlyargs + args.args
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    pairs = [("", a, d) for a, d in zip(plain, defaults)]
    if args.vararg: pairs.append(("*", args.vararg, None))
    pairs += [("", a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    if args.kwarg: pairs.append(("**", args.kwarg, None))
    last = {}   # the last parameter of each line owns the line's comment
    for _, arg, default in pairs: last[(default or arg).end_lineno] = arg
    head = node.body[0].lineno if node.body else node.lineno
    rows = []
    for star, arg, default in pairs:
        if arg.arg in ("self", "cls") and arg is plain[0]: continue
        line = (default or arg).end_lineno
        # One comment behind `def f(a) -> int:` is the result's.
        own = last[line] is arg and not (node.returns and node.returns.end_lineno == line) and line < head + 1
        default = "" if star else value_of(default)
        rows.append(Row(star + arg.arg, text_of(arg.annotation), default, comments.get(line, "") if own else ""))
    return rows


def result(node, comments: dict[int, str]) -> list[Row]:
    "What a function returns, if it says so."
    if node.returns is None or text_of(node.returns) == "None": return []
    return [Row("returns", text_of(node.returns), "", comments.get(node.returns.end_lineno, ""))]


def signature(name: str, node, rows: list[Row], makes: bool = False) -> str:
    "A call as one line, or a line for each parameter; `makes` an object."
    parts = [row.name + (f": {row.type}" if row.type else "")
             + ("" if not row.default else f" = {row.default}" if row.type else f"={row.default}")
             for row in rows if row.name != "returns"]
    names = {row.name: i for i, row in enumerate(rows)}
    if node is not None:
        only = node.args.kwonlyargs
        if only and not node.args.vararg: parts.insert(names[only[0].arg], "*")
    returns = f" -> {text_of(node.returns)}" if node is not None and node.returns is not None and not makes else ""
    head = "async def " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{head}{name}({', '.join(parts)}){returns}"
    if len(line) <= MAX_WIDTH or not parts: return line
    return f"{head}{name}(\n" + "".join(f"    {p},\n" for p in parts) + f"){returns}"


def decorators(node) -> list[str]: return [ast.unparse(d) for d in node.decorator_list]


def function_entry(module: str, node, comments, owner: str = "") -> Entry:
    "A function, a method or a property."
    name = f"{owner}.{node.name}" if owner else node.name
    marks = decorators(node)
    kind = "method" if owner else "function"
    if "property" in marks: kind = "property"
    if "classmethod" in marks or "staticmethod" in marks: kind = marks[0].replace("method", " method")
    rows = parameters(node, comments)
    returned = result(node, comments)
    if kind == "property":
        text = name + (f": {text_of(node.returns)}" if node.returns else "")
        if returned and not returned[0].text: returned = []
        return Entry(module, name, kind, node.lineno, ast.get_docstring(node) or "", text, returned)
    return Entry(module, name, kind, node.lineno, ast.get_docstring(node) or "",
                 signature(name, node, rows), rows + returned)


def field_rows(node: ast.ClassDef, comments) -> list[Row]:
    "The annotated fields of a class body."
    rows = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name): continue
        if item.target.id.startswith("_") or text_of(item.annotation).startswith("ClassVar"): continue
        rows.append(Row(item.target.id, text_of(item.annotation), value_of(item.value),
                        comments.get(item.end_lineno, "") or comments.get(item.lineno, "")))
    return rows


def member_rows(node: ast.ClassDef, comments) -> list[Row]:
    "The members of an enumeration."
    return [Row(target.id, "", value_of(item.value), comments.get(item.end_lineno, ""))
            for item in node.body if isinstance(item, ast.Assign)
            for target in item.targets if isinstance(target, ast.Name)]


def class_entry(module: str, node: ast.ClassDef, comments) -> Entry:
    "A class: how it is made, or its fields; then its methods."
    bases = [text_of(b) for b in node.bases]
    entry = Entry(module, node.name, "class", node.lineno, ast.get_docstring(node) or "", bases=bases)
    methods = {n.name: n for n in node.body if isinstance(n, FUNCTIONS)
               and not any(d.endswith((".setter", ".deleter")) for d in decorators(n))}
    if any("Enum" in b for b in bases):
        entry.kind, entry.rows, entry.columns = "enumeration", member_rows(node, comments), "Member"
    elif "__init__" in methods:
        entry.rows = parameters(methods["__init__"], comments)
        entry.signature = signature(node.name, methods["__init__"], entry.rows, makes=True)
    elif rows := field_rows(node, comments):
        entry.rows, entry.columns = rows, "Field"
        made = [d for d in decorators(node) if "dataclass" in d] or [b for b in bases if b.endswith(("Struct", "NamedTuple"))]
        if made: entry.signature = signature(node.name, None, rows, makes=True)
    for name, method in methods.items():
        if name.startswith("_") and name not in SPOKEN: continue
        entry.members.append(function_entry(module, method, comments, node.name))
    return entry


def constant_entries(module: str, node, comments) -> list[Entry]:
    "A constant or an alias of a type: its value is its description."
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names, values = [], []
    for target in targets:
        many = isinstance(target, ast.Tuple)
        names += target.elts if many else [target]
        values += node.value.elts if many and isinstance(node.value, ast.Tuple) else [node.value] * (len(target.elts) if many else 1)
    text = comments.get(node.end_lineno, "") or comments.get(node.lineno, "")
    return [Entry(module, n.id, "constant", node.lineno, text, f"{n.id} = {value_of(v)}")
            for n, v in zip(names, values) if isinstance(n, ast.Name)]


@dataclass
class Module:
    "The public names of one module, in the order of its source."
    name: str
    file: str      # from the repository's root
    doc: str
    entries: list[Entry]

    @property
    def short(self) -> str: return self.name.partition(".")[2] or self.name

    def every(self) -> list[Entry]:
        "All entries, methods behind their classes."
        return [e for top in self.entries for e in (top, *top.members)]


def read_module(path: Path, root: Path) -> Module:
    "Read one file; its `__all__` says what is public."
    source = path.read_text()
    tree, comments = ast.parse(source), comments_of(source)
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    public = [ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)
              and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "__all__"]
    entries = []
    for node in tree.body:
        if isinstance(node, FUNCTIONS): entries.append(function_entry(name, node, comments))
        if isinstance(node, ast.ClassDef): entries.append(class_entry(name, node, comments))
        if isinstance(node, (ast.Assign, ast.AnnAssign)): entries += constant_entries(name, node, comments)
    wanted = set(public[0]) if public else set()
    entries = [e for e in entries if e.name in wanted]
    missing = wanted - {e.name for e in entries}
    if missing: raise SystemExit(f"{path}: {sorted(missing)} in __all__, but not found in the file")
    return Module(name, path.relative_to(root).as_posix(), ast.get_docstring(tree) or "", entries)


def take_over(entry: Entry, base: Entry):
    "What a method leaves unsaid, its base class may have said."
    entry.doc = entry.doc or base.doc
    said = {row.name: row for row in base.rows}
    for row in entry.rows:
        if other := said.get(row.name): row.type, row.text = row.type or other.type, row.text or other.text


def inherit(modules: list[Module]):
    "Fill in what methods leave to a base class of the package, the nearest first."
    classes = {e.name: e for m in modules for e in m.entries if e.kind == "class"}
    def bases_of(entry, seen=()):
        for name in (b.rpartition(".")[2] for b in entry.bases):
            if name in classes and name not in seen:
                yield classes[name]
                yield from bases_of(classes[name], (*seen, name))
    for entry in classes.values():
        for base in bases_of(entry):
            for member in entry.members:
                for other in base.members:
                    if member.name.rpartition(".")[2] == other.name.rpartition(".")[2]: take_over(member, other)


def read_package(root: Path, package: str = "minengine") -> list[Module]:
    "Every module that has public names, by name."
    files = sorted(p for p in (root / package).rglob("*.py") if p.name != "_modidx.py")
    modules = [m for m in (read_module(p, root) for p in files) if m.entries]
    inherit(modules)
    return modules


# ---------------------------------------------------------------- as Markdown

def cell(text: str) -> str: return " ".join(text.split()).replace("|", r"\|")


def code(text: str) -> str: return f"`{cell(text)}`" if text else ""


def prose(text: str) -> str:
    "A comment or a docstring as Markdown: nothing in it is markup but `code`."
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") and len(p) > 1 else re.sub(r"([\\*_<>\[\]#~$^{}])", r"\\\1", p) for p in parts)


def table(entry: Entry) -> str:
    "The parameters, fields or members of an entry."
    if not entry.rows: return ""
    if entry.columns == "Member":
        head, rows = ["Member", "Value", "Description"], [[code(r.name), code(r.default or ""), cell(prose(r.text))] for r in entry.rows]
    else:
        head = [entry.columns, "Type", "Default", "Description"]
        rows = [[r.name if r.name == "returns" else code(r.name), code(r.type),
                 "required" if r.default is None else code(r.default), cell(prose(r.text))] for r in entry.rows]
    if not any(row[-1] for row in rows): head, rows = head[:-1], [row[:-1] for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"::: {{.api-table}}\n{text}\n:::"


def source_link(entry: Entry, file: str, blob: str) -> str:
    return f"[source]({blob}/{file}#L{entry.line}){{.source-link}}"


def body(entry: Entry, with_table: bool = True) -> str:
    "Signature, docstring and table of one entry."
    parts = []
    if entry.signature: parts.append(f"```python\n{entry.signature}\n```")
    if entry.doc: parts.append("\n\n".join(prose(p) for p in entry.doc.split("\n\n")))
    bases = [b for b in entry.bases if b not in ("ABC", "object")]
    if bases and entry.kind == "class": parts.append("A kind of " + ", ".join(code(b) for b in bases) + ".")
    if with_table: parts.append(table(entry))
    return "\n\n".join(p for p in parts if p)


def module_page(module: Module, blob: str, story: str) -> str:
    "The reference page of a module; `story` is a line that leads to its page."
    title = module.doc.partition("\n")[0]
    out = [f"---\ntitle: {json.dumps(module.short)}\ndescription: {json.dumps(title, ensure_ascii=False)}\n---", story]
    for top in module.entries:
        for entry in (top, *top.members):
            level = "##" if entry is top else "###"
            out += [f"{level} {entry.name.replace('_', chr(92) + '_')} {{#{entry.name}}}",
                    f"[{entry.kind}]{{.api-kind}} {source_link(entry, module.file, blob)}", body(entry)]
    return "\n\n".join(p for p in out if p) + "\n"


def index_page(modules: list[Module], groups: list[tuple[str, list[str]]]) -> str:
    "Every module in the story's order, then every public name by letter."
    by_name = {m.name: m for m in modules}
    out = ['---\ntitle: "API reference"\ndescription: "Every public name, read from the source"\n---',
           "Each module has a page here with the signature, the parameters and the source line of all "
           "it offers. The pages of the story explain why it is so.", "## Modules"]
    for part, names in groups:
        rows = [f"- [`{by_name[n].short}`]({by_name[n].short}.qmd): {prose(by_name[n].doc.partition(chr(10))[0])}" for n in names]
        out += [f"### {part}", "\n".join(rows)]
    homes: dict[str, list[Module]] = {}
    for module in modules:
        for entry in module.entries: homes.setdefault(entry.name, []).append(module)
    out.append("## Names")
    for letter in sorted({name[0].upper() for name in homes}):
        lines = [f"- [{prose(name)}]{{#{name} .api-name}} " + ", ".join(f"[{m.short}]({m.short}.qmd#{name})" for m in homes[name])
                 for name in sorted(homes, key=str.lower) if name[0].upper() == letter]
        out += [f"### {letter} {{#letter-{letter}}}", "::: {.api-names}\n" + "\n".join(lines) + "\n:::"]
    return "\n\n".join(out) + "\n"
