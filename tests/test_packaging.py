"""What installing the project brings, and that it changes nothing in Google Colab's runtime."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
EXTRAS = {
    name: [Requirement(text) for text in requirements]
    for name, requirements in PROJECT["project"]["optional-dependencies"].items()
}
MAPPED = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]


def pins(path: Path) -> dict[str, str]:
    """The versions that a freeze or constraints file names, by canonical package name."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def folder(package: str) -> Path:
    return ROOT / MAPPED.get(package, package.replace(".", "/"))


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=lambda requirement: requirement.name)
def test_installing_in_colab_changes_nothing(requirement):
    installed = pins(ROOT / "tests" / "data" / "colab-freeze.txt")
    name = canonicalize_name(requirement.name)
    assert name in installed, f"{name} would be installed in Colab's runtime"
    assert requirement.specifier.contains(installed[name]), f"{requirement} would replace {name} {installed[name]}"
    assert not requirement.extras, f"{requirement} could bring packages that Colab lacks"
    assert requirement.marker is None


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_tested_versions_are_among_those_allowed(file):
    versions = pins(ROOT / "tests" / file)
    requirements = list(DEPENDENCIES)
    if file == "constraints.txt":
        requirements += EXTRAS["lab"] + EXTRAS["test"]
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} is not pinned in {file}"
        assert requirement.specifier.contains(versions[name]), f"{file} pins {name} {versions[name]}, not {requirement}"


def test_the_oldest_set_is_colabs():
    colab = pins(ROOT / "tests" / "data" / "colab-freeze.txt")
    oldest = pins(ROOT / "tests" / "constraints-oldest.txt")
    different = {name for name in colab if oldest.get(name) != colab[name]}
    assert different == {"torch"}, different  # CI runs one torch for both sets


def test_both_sets_have_the_same_torch():
    assert pins(ROOT / "tests" / "constraints.txt")["torch"] == pins(ROOT / "tests" / "constraints-oldest.txt")["torch"]


def test_extras_are_the_promised_ones():
    assert set(EXTRAS) == {"deepspeed", "lab", "ray", "test", "tpu"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_listed_package_is_there(package):
    assert (folder(package) / "__init__.py").is_file()


def test_each_folder_with_modules_is_listed():
    roots = {"notebook_launcher": ROOT / "notebook_launcher", **{name: ROOT / path for name, path in MAPPED.items()}}
    found = {
        ".".join([name, *file.parent.relative_to(root).parts])
        for name, root in roots.items()
        for file in root.rglob("*.py")
    }
    assert found == set(PACKAGES)


@pytest.mark.slow
def test_wheel_holds_the_mapped_names_and_no_generic_ones(tmp_path):
    sources = tmp_path / "sources"
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        target = sources / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    for package in PACKAGES:
        target = sources / folder(package).relative_to(ROOT)
        target.mkdir(parents=True, exist_ok=True)
        for file in [*folder(package).glob("*.py"), *folder(package).glob("py.typed")]:
            (target / file.name).write_bytes(file.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sources],
        check=True,
        capture_output=True,
        timeout=200,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == {"notebook_launcher"}
    for package in PACKAGES:
        assert f"{package.replace('.', '/')}/__init__.py" in names
    assert "notebook_launcher/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in text
