"Make README.md from nbs/index.ipynb, the page it is the same as."
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def as_markdown(cell) -> str:
    "One cell; code with its text output behind it, hidden cells as nothing."
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown": return source
    if source.startswith("#| hide"): return ""
    outputs = []
    for out in cell["outputs"]:
        text = out.get("text") or out.get("data", {}).get("text/plain") or []
        outputs.append("".join(text).rstrip())
    shown = "\n".join(outputs)
    return f"```python\n{source}\n```" + (f"\n\n```text\n{shown}\n```" if shown else "")


def readme() -> str:
    "The whole file; links and pictures start from the repository's root."
    cells = json.loads((ROOT / "nbs" / "index.ipynb").read_text())["cells"]
    text = "\n\n".join(filter(None, map(as_markdown, cells))) + "\n"
    pages = [p.name for p in (ROOT / "nbs").glob("*.ipynb")]
    for name in pages: text = text.replace(f"]({name}", f"](nbs/{name}")
    return text.replace("](images/", "](nbs/images/")


if __name__ == "__main__": (ROOT / "README.md").write_text(readme())
