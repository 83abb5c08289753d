"Reads settings.ini, the one place for name, version, requirements and scripts."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser(delimiters=["="])
parser.read("settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {
    "dev": cfg["dev_requirements"].split(),
    "notebooks": cfg["notebooks_requirements"].split(),
}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: " + cfg["audience"],
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
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
