"""Build the documentation site without Quarto: `python tools/docs.py [--out _docs]`.

1. nbdev turns the pages into notebooks for the site: hidden cells go, every
   public name gets an entry. Its entries are then written anew from the
   source (docs_api.py), with whole types and the right line.
2. One reference page for each module comes from the same source.
3. smalldocs renders both by the `_quarto.yml` that Quarto reads.
4. In the finished pages, every `name` in the text becomes a link to the entry
   that is meant: where both engines have a `Scheduler`, a page about V1 means
   V1's. smalldocs' search gives way to docs_search.js, which weighs titles
   above text and lets no page fill the list.

The build fails on a broken link, on a link to a missing entry and on anything
that smalldocs does not understand. Links inside the site are relative, so that
it works under any address.
"""
import argparse
import html
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import docs_api   # noqa: E402

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"^\d+[a-zA-Z0-9]*_")
KIND = re.compile(r"^(?:class|enumeration|constant|function|property|(?:class |static )?method) (?:reference )?source\s+")
SHOW_DOC = re.compile(r"^show_doc\(\s*([\w.]+)", re.M)


def settings() -> dict:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


@dataclass(frozen=True)
class Page:
    "One notebook of the story, and where it goes."
    source: Path          # nbs/43_v1_free_block_queue.ipynb
    module: str | None    # what it exports

    @property
    def name(self) -> str:
        "nbdev's links leave the number out: 43_x.ipynb is x.html."
        return NUMBER.sub("", self.source.stem)

    @property
    def wing(self) -> str | None: return wing_of(self.module or "minengine." + self.name.replace("_", ".", 1))


def wing_of(module: str) -> str | None:
    "The engine a module belongs to; None for what both share."
    room = module.split(".")[1]
    return room if room in ("v0", "v1") else None


def read_pages() -> list[Page]:
    pages = []
    for path in sorted((ROOT / "nbs").glob("*.ipynb")):
        text = "\n".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"])
        found = re.search(r"^#\|\s*default_exp\s+(\S+)", text, re.M)
        pages.append(Page(path, found and f"minengine.{found[1]}"))
    names = [p.name for p in pages]
    if len(set(names)) < len(names): sys.exit("two pages get the same name on the site")
    if len(names) < 2: sys.exit(f"only {len(names)} pages: nothing to publish")
    return pages


# ---------------------------------------------------------------- names and what they lead to

class Names:
    "Finds the entry that a name in a page's text means."

    def __init__(self, modules: list[docs_api.Module], pages: list[Page]):
        self.modules = {m.name: m for m in modules}
        self.page_of = {p.module: p for p in pages if p.module}
        self.entries: dict[str, list[docs_api.Entry]] = {}
        for module in modules:
            for entry in module.every(): self.entries.setdefault(entry.name, []).append(entry)
        self.anchors: dict[str, set[str]] = {}   # ids on each page of the story, once rendered

    def find(self, text: str, module: str | None, wing: str | None) -> docs_api.Entry | None:
        "The entry of `text` as a page of this module and wing means it."
        called, name = text.endswith("()"), text.removesuffix("()")
        if name.startswith("minengine."): return self.find_whole(name)
        found = self.entries.get(name, [])
        if not found and "." in name: return self.find_inherited(name, module, wing)
        own = [e for e in found if e.module == module]
        if not own and called and module in self.modules and "." not in name:
            own = [e for e in self.modules[module].every() if e.name.endswith("." + name)]
            if len(own) > 1: return None
        # `start` in the text is a word, unless this page defines it.
        if not own and name.islower() and name.isalpha(): return None
        for some in (own, [e for e in found if wing and wing_of(e.module) == wing],
                     [e for e in found if wing_of(e.module) is None], found):
            if some: return some[0] if len(some) == 1 else None
        return None

    def find_inherited(self, name: str, module: str | None, wing: str | None) -> docs_api.Entry | None:
        "Class.method, where a class above defines the method."
        owner, _, method = name.rpartition(".")
        entry = self.find(owner, module, wing)
        if entry is None or entry.kind != "class": return None
        for base in entry.bases:
            if found := self.find(f"{base}.{method}", entry.module, wing_of(entry.module)): return found
        return None

    def find_whole(self, name: str) -> docs_api.Entry | None:
        "The entry of minengine.module.name."
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module, rest = ".".join(parts[:cut]), ".".join(parts[cut:])
            if module in self.modules:
                return next((e for e in self.entries.get(rest, []) if e.module == module), None)
        return None

    def several(self, name: str) -> bool:
        "Whether a name has more than one home, and none of them is meant."
        return "." not in name and len(self.entries.get(name, [])) > 1

    def href(self, text: str, module: str | None, wing: str | None, in_api: bool) -> str | None:
        "Where a name leads, from the site's root; None for what is no name of ours."
        name = text.removesuffix("()")
        if name in self.modules: return f"api/{self.modules[name].short}.html"
        entry = self.find(text, module, wing)
        if entry is None: return f"api/index.html#{name}" if self.several(name) and not name.islower() else None
        story = self.page_of.get(entry.module)
        if story and not in_api and entry.name.lower() in self.anchors.get(story.name, ()):
            return f"{story.name}.html#{entry.name.lower()}"
        return f"api/{self.modules[entry.module].short}.html#{entry.name}"


# ---------------------------------------------------------------- pages for smalldocs

def process(source: str, target: str):
    "What nbdev does to a notebook of the site, without its links."
    from nbdev.processors import FilterDefaults, add_links
    from nbdev.serve_drv import exec_nb

    class Processors(FilterDefaults):
        def base_procs(self): return [p for p in super().base_procs() if p is not add_links]

    os.chdir(ROOT)
    os.environ["IN_TEST"] = "1"
    exec_nb(Path(source), Path(target), Processors)


def process_all(pages: list[Page], proc: Path, workers: int):
    "All pages, in a few processes."
    import docs   # by this name: a page's shell takes the place of `__main__`
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        jobs = {p: pool.submit(docs.process, str(p.source), str(proc / f"{p.name}.ipynb")) for p in pages}
        for page, job in jobs.items():
            try: job.result()
            except Exception as error: sys.exit(f"{page.source.name}: {error}")


def entry_markdown(entry: docs_api.Entry, module: docs_api.Module, blob: str) -> str:
    "An entry on a page of the story; a method's parameters are shown, a class's are in the source below."
    links = (f"[{entry.kind}]{{.api-kind}} [reference](api/{module.short}.qmd#{entry.name}){{.source-link}} "
             + docs_api.source_link(entry, module.file, blob))
    title = entry.name.replace("_", r"\_")
    return f"### {title}\n\n{links}\n\n{docs_api.body(entry, with_table='.' in entry.name)}"


def rewrite(page: Page, path: Path, pages: list[Page], names: Names, blob: str):
    "Links to pages by their names on the site, and our entries for nbdev's."
    cells = json.loads(path.read_text())
    targets = {p.source.name: f"{p.name}.ipynb" for p in pages}
    link = re.compile(r"(?<=\]\()(" + "|".join(map(re.escape, targets)) + r")(?=[#)])")
    for cell in cells["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(r'(?<=href=")[\w.]+\.ipynb(?=[#"])', lambda m: targets.get(m[0], m[0]).replace(".ipynb", ".html"), text)
            cell["source"] = link.sub(lambda m: targets[m[0]], text)
        if cell["cell_type"] == "raw": cell["source"] = re.sub(r"^output-file: .*\n", "", text, flags=re.M)
        shown = SHOW_DOC.search(text) if cell["cell_type"] == "code" else None
        if not shown: continue
        entry = names.find(shown[1], page.module, page.wing)
        if entry is None: sys.exit(f"{page.source.name}: show_doc({shown[1]}): no such public name")
        markdown = entry_markdown(entry, names.modules[entry.module], blob)
        cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {"text/markdown": markdown}}]
    path.write_text(json.dumps(cells))


def parts_of(sidebar: list, pages: list[Page]) -> list[tuple[str, list[Page]]]:
    "The story's parts, from sidebar.yml."
    by_file = {p.source.name: p for p in pages}
    return [(item["section"], [by_file[f] for f in item["contents"]]) for item in sidebar if isinstance(item, dict)]


def write_config(proc: Path, pages: list[Page], modules: list[docs_api.Module]):
    "One `_quarto.yml` of ours, nbdev's and the sidebar, with the reference's own sidebar."
    config, sidebar = (yaml.safe_load(p.read_text()) for p in (ROOT / "_quarto.yml", ROOT / "nbs/sidebar.yml"))
    config.pop("metadata-files", None)
    site = config["website"] | yaml.safe_load((ROOT / "nbs/nbdev.yml").read_text())["website"]
    contents = sidebar["website"]["sidebar"]["contents"]
    by_file = {p.source.name: f"{p.name}.ipynb" for p in pages}
    story = [by_file[c] if isinstance(c, str) else c | {"contents": [by_file[f] for f in c["contents"]]} for c in contents]
    parts = parts_of(contents, pages)
    groups = reference_groups(parts, modules)
    api = ["api/index.qmd"] + [{"section": part, "contents": [f"api/{n.partition('.')[2]}.qmd" for n in names]} for part, names in groups]
    look = site["sidebar"] | {"collapse-level": 1}
    site["sidebar"] = [look | {"id": "story", "contents": story}, look | {"id": "reference", "contents": api}]
    site["navbar"] |= {"left": [{"text": "Story", "href": "index.ipynb"}, {"text": "Tour", "href": "tour.ipynb"},
                                {"text": "Reference", "href": "api/index.qmd"}],
                       "tools": [{"icon": "github", "text": "Source on GitHub", "href": site["repo-url"]}]}
    config["website"] = site
    (proc / "_quarto.yml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return parts, groups


def reference_groups(parts, modules) -> list[tuple[str, list[str]]]:
    "The modules by the story's parts; those that no page exports come last."
    known = {m.name for m in modules}
    groups = [(part, [p.module for p in pages if p.module in known]) for part, pages in parts]
    placed = {n for _, names in groups for n in names}
    return [g for g in (*groups, ("Elsewhere", sorted(known - placed))) if g[1]]


def write_reference(proc: Path, names: Names, groups, blob: str):
    "The reference pages."
    folder = proc / "api"
    folder.mkdir()
    modules = list(names.modules.values())
    for module in modules:
        page = names.page_of.get(module.name)
        story = f"Explained in [{page_title(page)}](../{page.name}.ipynb). " if page else ""
        story += f"Source: [{module.file}]({blob}/{module.file})."
        (folder / f"{module.short}.qmd").write_text(docs_api.module_page(module, blob, story))
    (folder / "index.qmd").write_text(docs_api.index_page(modules, groups))


def page_title(page: Page) -> str:
    first = json.loads(page.source.read_text())["cells"][0]["source"]
    return "".join(first).split("\n")[0].removeprefix("# ").strip()


# ---------------------------------------------------------------- finished pages

TAG = re.compile(r"(<[^>]+>)")
CLOSED = ("a", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "script", "style", "svg", "summary")   # no links inside these
CAMEL = re.compile(r"[A-Z]\w*[a-z]\w*")


def link_names(text: str, href) -> str:
    "Make each `name` in the main part of a page a link, where `href` knows it."
    start, end = text.index("<main"), text.index("</main>")
    out, closed, in_cell, piece = [], 0, False, iter(TAG.split(text[start:end]))
    for part in piece:
        tag = re.match(r"<(/?)([a-z0-9]+)", part)
        if tag and tag[2] in CLOSED: closed += -1 if tag[1] else 1
        if tag and tag[2] == "td": in_cell = not tag[1]
        if part == "<code>" and not closed:
            inner, close = next(piece), next(piece)
            if close == "</code>":
                out.append(linked_code(inner, href, in_cell))
                continue
            part += inner + close
        out.append(part)
    return text[:start] + "".join(out) + text[end:]


def linked_code(inner: str, href, in_cell: bool) -> str:
    "A name as a link; in a table, every class within a type as one."
    name = html.unescape(inner)
    target = href(name) if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", name) else None
    if target: return f'<a href="{target}"><code>{inner}</code></a>'
    if not in_cell: return f"<code>{inner}</code>"
    def one(found):
        target = href(found[0])
        return f'<a href="{target}">{found[0]}</a>' if target else found[0]
    return f"<code>{CAMEL.sub(one, inner)}</code>"


def ids_of(text: str) -> set[str]: return set(re.findall(r'\sid="([^"]+)"', text))


def note_source(text: str, page: Page, names: Names, blob: str) -> str:
    "Under the title: which notebook this is, and what it exports."
    line = f'<a href="{blob}/nbs/{page.source.name}">nbs/{page.source.name}</a>'
    if page.module in names.modules:
        line += f' exports <a href="api/{names.modules[page.module].short}.html">{page.module}</a>'
    head = text.index('id="title-block-header"')
    end = text.index("</header>", head)
    return f'{text[:end]}<p class="page-source">{line}</p>{text[end:]}'


def shorten_contents(text: str) -> str:
    "The list of what is on the page says `schedule`, below `Scheduler`."
    start = text.find('<nav id="TOC"')
    if start < 0: return text
    end = text.index("</nav>", start)
    return text[:start] + re.sub(r">[A-Z]\w+\.(\w+)<", r">\1<", text[start:end]) + text[end:]


def finish(docs: Path, pages: list[Page], names: Names, parts, blob: str):
    "Links in all pages; the part and the notebook in their heads."
    texts = {p: p.read_text() for p in sorted(docs.rglob("*.html"))}
    by_name = {f"{p.name}.html": p for p in pages}
    part_of = {p: part for part, some in parts for p in some}
    names.anchors = {p.stem: ids_of(t) for p, t in texts.items() if p.parent == docs}
    for path, text in texts.items():
        page = by_name.get(path.relative_to(docs).as_posix())
        in_api = path.parent != docs
        module = page.module if page else f"minengine.{path.stem}" if in_api else None
        wing = page.wing if page else wing_of(module) if module in names.modules else None
        def href(name):
            target = names.href(name, module, wing, in_api)
            return target and (os.path.relpath(target, "api") if in_api else target)
        text = link_names(text, href)
        if page: text = note_source(text, page, names, blob)
        # V0 and V1 have pages of the same title.
        if page in part_of: text = re.sub(r"<title>(.*?) – ", rf"<title>\1 · {html.escape(part_of[page])} – ", text, count=1)
        path.write_text(shorten_contents(text))


def check_links(docs: Path) -> list[str]:
    "Every link inside the site that leads nowhere, page or part of a page."
    texts = {p.resolve(): p.read_text() for p in docs.rglob("*.html")}
    ids, broken = {p: ids_of(t) for p, t in texts.items()}, []
    for path, text in texts.items():
        text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
        for link in re.findall(r'\s(?:href|src)="([^"]*)"', text):
            link = html.unescape(link)
            if re.match(r"[a-z]+:|//", link) or link in ("", "#"): continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            if target.is_dir(): target = target / "index.html"
            if not target.exists(): broken.append(f"{path.relative_to(docs.resolve())}: {link}: no such file")
            elif anchor and target in ids and anchor not in ids[target]:
                broken.append(f"{path.relative_to(docs.resolve())}: {link}: no such place")
    return broken


def write_search(docs: Path, parts):
    "Search entries that say which part they are from; our search for Fuse.js."
    part_of = {f"{p.name}.html": part for part, some in parts for p in some}
    entries = json.loads((docs / "search.json").read_text())
    for entry in entries:
        page = entry["href"].split("#")[0]
        label = "Reference" if page.startswith("api/") else part_of.get(page)
        if label: entry["title"] += f" · {label}"
        entry["text"] = KIND.sub("", entry["text"])
    (docs / "search.json").write_text(json.dumps(entries, ensure_ascii=False, separators=(",", ":")))
    shutil.copy(ROOT / "tools/docs_search.js", docs / "site_libs/fuse/fuse.min.js")


def drop_foreign_fonts(docs: Path):
    "The themes fetch letters from Google; readers' own are as good, and nobody is told who reads."
    for path in docs.glob("site_libs/themes/*.css"):
        path.write_text(re.sub(r"@import\s+url\([^)]*https?:[^)]*\)\s*;?", "", path.read_text()))


def build(out: Path, workers: int = 2, draft: bool = False):
    "The whole site, into `out`; a draft may have links into pages that are still to come."
    from smalldocs.site import build as render
    config, pages, modules = settings(), read_pages(), docs_api.read_package(ROOT)
    blob = f"{config['git_url']}/blob/{config['branch']}"
    if out.exists() and any(out.iterdir()) and not (out / "site_libs").is_dir():
        sys.exit(f"{out} holds something else than a site; it would be replaced")
    names = Names(modules, pages)
    with tempfile.TemporaryDirectory(prefix="minengine-site-") as folder:
        proc = Path(folder).resolve() / "proc"
        proc.mkdir()
        process_all(pages, proc, workers)
        for page in pages: rewrite(page, proc / f"{page.name}.ipynb", pages, names, blob)
        parts, groups = write_config(proc, pages, modules)
        write_reference(proc, names, groups, blob)
        shutil.copy(ROOT / "nbs/styles.css", proc)
        shutil.copytree(ROOT / "nbs/images", proc / "images", dirs_exist_ok=True)
        site = render(proc, quiet=True)
        docs = proc / "_docs"
        drop_foreign_fonts(docs)
        write_search(docs, parts)
        finish(docs, pages, names, parts, blob)
        problems = site.warnings + check_links(docs)
        for problem in problems: print(problem, file=sys.stderr)
        if problems and not draft: sys.exit(f"{len(problems)} problems")
        (docs / ".nojekyll").touch()
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(docs, out)
    print(f"{len(pages)} pages and {len(modules)} of the reference in {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "_docs", help="folder of the site; it is replaced")
    parser.add_argument("--workers", type=int, default=2, help="processes for nbdev's part")
    parser.add_argument("--draft", action="store_true", help="write the site in spite of broken links")
    args = parser.parse_args()
    build(args.out.resolve(), args.workers, args.draft)


if __name__ == "__main__": main()
