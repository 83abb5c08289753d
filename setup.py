"Reads settings.ini, the one place for name, version, requirements and scripts."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser(delimiters=["="])
parser.read("settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {
    "dev": cfg["dev_requirements"].split(),
    "notebooks": cfg["notebooks_requirements"].split(),
    "ray": cfg["ray_requirements"].split(),
}


def whole_links(text: str) -> str:
    "README.md with links that lead to the repository from anywhere, such as PyPI."
    blob = f"{cfg['git_url']}/blob/{cfg['branch']}/"
    raw = blob.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{raw}", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{blob}", text)


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=whole_links(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    project_urls={
        "Documentation": cfg["doc_host"] + cfg["doc_baseurl"],
        "Source": cfg["git_url"],
        "Issues": cfg["git_url"] + "/issues",
    },
    keywords=cfg["keywords"].split(),
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: " + cfg["audience"],
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
    ],
    packages=find_packages(include=["minengine", "minengine.*"]),
    package_data={"minengine": ["data/*.csv"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": ["minengine=minengine._modidx:d"],
    },
    zip_safe=False,
)
