"""The wheel and the source archive, and an installation of the wheel in an environment of its own.

The environment sees this one's libraries, not this checkout.
"""
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_string
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from front_tiny import make_folder
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LIMIT_S = 300
TINY = ["--load-format", "dummy", "--tokenizer", "byte", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8",
        "--no-use-tqdm-on-load"]


def settings() -> dict:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def run(*command, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=LIMIT_S, **options)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    "A folder with the archives in dist/ and the installed wheel in venv/, made once for all test processes."
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ: base = base.parent
    folder = base / "packaging"
    with FileLock(base / "packaging.lock"):
        if not (folder / "done").exists(): make(folder)
    return folder


def make(folder: Path):
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, files):
        source, target = ROOT / name, folder / "source" / name
        if not source.is_file() or name.startswith("tests/"): continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    # The wheel is made from the source archive: what is not in it is missed here.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source")
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    wheel, = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    packages = run(venv / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Path files within a folder that a path file names are not read: this
    # checkout's own stays out.
    (Path(packages) / "libraries.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    (folder / "done").touch()


def metadata(made: Path):
    wheel, = (made / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name, = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_archives_hold_what_they_should(made):
    version = settings()["version"]
    wheel, sdist = made / f"dist/minengine-{version}-py3-none-any.whl", made / f"dist/minengine-{version}.tar.gz"
    with zipfile.ZipFile(wheel) as archive: names = archive.namelist()
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT / "minengine").rglob("*") if p.suffix in (".py", ".csv")}
    assert ours <= set(names)
    strange = [n for n in names if not n.startswith(("minengine/", f"minengine-{version}.dist-info/"))]
    assert not strange, strange
    assert any(n.endswith("/LICENSE") for n in names)
    with tarfile.open(sdist) as archive: names = archive.getnames()
    for name in ("settings.ini", "setup.py", "README.md", "LICENSE", "nbs/43_v1_free_block_queue.ipynb", "tools/nb.py"):
        assert f"minengine-{version}/{name}" in names, name


def test_metadata_is_whole(made):
    found, wanted = metadata(made), settings()
    assert found["Name"] == "minengine" and found["Version"] == wanted["version"] == installed_version("minengine")
    assert found["Summary"] == wanted["description"] and found["License"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=" + wanted["min_python"]
    assert found["License-File"] == "LICENSE" and found["Description-Content-Type"] == "text/markdown"
    for field in ("Author", "Author-email", "Keywords"): assert found[field], field
    urls = dict(u.split(", ") for u in found.get_all("Project-URL"))
    assert {"Documentation", "Source", "Issues"} <= set(urls) and all(u.startswith("https://") for u in urls.values())
    classifiers = found.get_all("Classifier")
    assert any(c.startswith("Topic ::") for c in classifiers) and "Programming Language :: Python :: 3.11" in classifiers


def test_description_has_no_link_into_nowhere(made):
    "On PyPI there is no folder beside the description."
    text = metadata(made).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 50 and all(link.startswith(("https://", "#")) for link in links), links[:5]
    blob = settings()["git_url"] + "/blob/main/"
    for link in links:
        if link.startswith(blob): assert (ROOT / link.removeprefix(blob).partition("#")[0]).exists(), link


def test_requirements(made):
    "One list, in settings.ini; the extra for notebooks brings JupyterLab."
    wanted = settings()
    required = [Requirement(r) for r in metadata(made).get_all("Requires-Dist")]
    def names(extra): return {r.name for r in required if (r.marker and r.marker.evaluate({"extra": extra})) and "extra" in str(r.marker)}
    plain = {r.name for r in required if not r.marker or "extra" not in str(r.marker)}
    assert plain == {Requirement(r.replace(";", " ; ")).name for r in wanted["requirements"].split()}
    assert names("notebooks") == {Requirement(r).name for r in wanted["notebooks_requirements"].split()}
    assert names("ray") == {"ray"}
    assert names("dev") == {Requirement(r).name for r in wanted["dev_requirements"].split()}
    assert "jupyterlab" in names("notebooks") and not {"nbdev", "pytest", "fastcore", "jupyterlab"} & plain


def test_dependencies_are_declared():
    "Whatever the package imports is required, or comes with Python."
    known = {"PIL": "pillow", "zmq": "pyzmq", "pydantic_core": "pydantic", "starlette": "fastapi"}
    required = {Requirement(r.replace(";", " ; ")).name for r in settings()["requirements"].split()}
    # Imported inside functions: by those that draw, and the extra for notebooks has it; by those that ask for Ray.
    optional = {"matplotlib", "IPython", "ray"}
    for path in (ROOT / "minengine").rglob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (\w+)(?=[. \n,]|$)", path.read_text(), re.M):
            if name in sys.stdlib_module_names or name == "minengine": continue
            if re.search(rf"^\s+(?:from|import) {name}\b", path.read_text(), re.M) and name in optional: continue
            assert known.get(name, name) in required, f"{path.relative_to(ROOT)} imports {name}"


@pytest.fixture
def elsewhere(made, tmp_path):
    "A folder that is not this one, and an environment that names no other."
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{made / 'venv/bin'}:{os.environ['PATH']}"}
    return dict(cwd=tmp_path, env=env)


def test_installed_package_is_the_wheels(made, elsewhere):
    code = "import json, minengine; print(json.dumps([minengine.__file__, minengine.__version__]))"
    file, version = json.loads(run(made / "venv/bin/python", "-c", code, **elsewhere))
    assert Path(file).is_relative_to(made / "venv") and version == settings()["version"]


def test_installed_command_generates(made, elsewhere, tmp_path):
    model = make_folder(tmp_path / "tiny")
    command = made / "venv/bin/minengine"
    assert run(command, "--version", **elsewhere).strip() == f"minengine {settings()['version']}"
    for engine in ("v0", "v1"):
        out = run(command, "generate", "hello", "--engine", engine, "--max-tokens", "5", "--ignore-eos",
                  "--model", model, *TINY, **elsewhere)
        assert out.strip(), engine


def test_installed_package_runs_a_script(made, elsewhere, tmp_path):
    "The script of vLLM's first page, with the import changed."
    script = tmp_path / "script.py"
    script.write_text("from minengine import LLM, SamplingParams\n"
                      "llm = LLM(__import__('sys').argv[1], load_format='dummy', tokenizer='byte', num_gpu_blocks_override=64,\n"
                      "          max_num_seqs=8, use_tqdm_on_load=False)\n"
                      "for out in llm.generate(['one', 'two'], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False):\n"
                      "    print(len(out.outputs[0].token_ids))\n")
    out = run(made / "venv/bin/python", script, make_folder(tmp_path / "tiny"), **elsewhere)
    assert out.split()[-2:] == ["3", "3"]


# ---------------------------------------------------------------- the workflows

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.y*ml"))


def test_there_are_workflows_for_tests_and_site():
    assert [w.name for w in WORKFLOWS] == ["deploy.yaml", "test.yaml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflow_runs_what_is_here(path):
    flow = yaml.safe_load(path.read_text())
    assert flow["name"] and flow[True], "YAML reads `on` as true"
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    scripts = re.findall(r"(?:^|\s)((?:\.ci|tools|tests)/[\w./-]+)", "\n".join(s.get("run", "") for s in steps))
    assert scripts, "runs nothing of this repository"
    for script in scripts: assert (ROOT / script).exists(), script
    for step in steps:
        if "uses" in step: assert re.search(r"@v\d+$", step["uses"]), step["uses"]


def test_workflow_pythons_are_the_supported_ones():
    flow = yaml.safe_load((ROOT / ".github/workflows/test.yaml").read_text())
    pythons = flow["jobs"]["test"]["strategy"]["matrix"]["python"]
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "setup.py").read_text())
    assert pythons == classified and pythons[0] == settings()["min_python"]
