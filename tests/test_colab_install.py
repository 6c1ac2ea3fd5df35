"""pip's own resolver, given what Colab's runtimes have: installing this project there replaces nothing.

torch is a stand-in with the dependencies of its own metadata, all but the CUDA libraries: Colab's is a build for
another CUDA than the registry's. Everything else is resolved from the registry. Nothing is downloaded but metadata.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest
from packaging.utils import canonicalize_name
from test_packaging import DEPENDENCIES, EXTRAS, ROOT, pins

RUNTIME = pins(ROOT / "tests" / "data" / "colab-runtime.txt")
PYTHON = "3.13"
OF_TORCH = [
    "filelock",
    "typing-extensions>=4.10",
    "setuptools<82",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec",
]
FOR_CUDA = ("cuda-", "nvidia-", "torch", "triton")  # what differs between Colab's runtimes, as names begin
# Colab's IPython lacks its jedi, which pip adds with whatever needs IPython. overrides is jupyter-server's before
# Python 3.12: pip goes by the Python that it runs with.
MISSING_IN_COLAB = {"jedi", "overrides"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _pip(*arguments):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    done = _pip(
        "--no-deps", "--ignore-installed", "--target", tmp_path_factory.mktemp("none"), f"typer=={RUNTIME['typer']}"
    )
    if done.returncode:
        pytest.skip(f"the package registry can't be reached: {done.stderr.strip().splitlines()[-1]}")


def _stand_in(folder, version):
    """A wheel of torch that holds nothing but its name, version and dependencies."""
    stem = f"torch-{version}+standin"
    told = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}+standin"]
    files = {
        "METADATA": "\n".join([*told, *(f"Requires-Dist: {one}" for one in OF_TORCH), ""]),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{name}", text)


def _resolved(folder, runtime, requirements):
    """What pip would have in an environment with ``runtime``, by canonical name; torch's version without its label."""
    _stand_in(folder, runtime["torch"])
    constraints, wanted, report = (folder / name for name in ("constraints.txt", "wanted.txt", "report.json"))
    constraints.write_text("\n".join(f"{name}=={version}" for name, version in runtime.items()))
    wanted.write_text("\n".join(map(str, requirements)))
    done = _pip(
        *("--python-version", PYTHON, "--only-binary=:all:", "--target", folder / "target", "--find-links", folder),
        *("--report", report, "--constraint", constraints, "--requirement", wanted),
    )
    assert done.returncode == 0, done.stderr
    found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonicalize_name(one["name"]): one["version"].partition("+")[0] for one in found}


def _changed(resolved, runtime):
    return {name: version for name, version in resolved.items() if name in runtime and runtime[name] != version}


@pytest.mark.usefixtures("registry")
def test_the_gpu_and_cpu_runtimes_stay_as_they_are(tmp_path):
    resolved = _resolved(tmp_path, RUNTIME, DEPENDENCIES)
    assert resolved["torch"] == "2.11.0"
    assert not _changed(resolved, RUNTIME)
    assert set(resolved) - set(RUNTIME) <= MISSING_IN_COLAB


@pytest.mark.usefixtures("registry")
def test_the_tpu_runtime_stays_as_it_is(tmp_path):
    common = {name: version for name, version in RUNTIME.items() if not name.startswith(FOR_CUDA)}
    runtime = common | {"torch": "2.9.0", "torch-xla": "2.9.0"}
    resolved = _resolved(tmp_path, runtime, [*DEPENDENCIES, *EXTRAS["tpu"]])
    assert (resolved["torch"], resolved["torch-xla"]) == ("2.9.0", "2.9.0")
    assert not _changed(resolved, runtime)
    assert set(resolved) - set(runtime) <= MISSING_IN_COLAB


@pytest.mark.usefixtures("registry")
def test_a_dependency_that_would_replace_something_is_found(tmp_path):
    with pytest.raises(AssertionError, match="conflicting dependencies"):
        _resolved(tmp_path, RUNTIME, ["psutil>=6"])


def test_the_short_list_agrees_with_the_whole_one():
    short = pins(ROOT / "tests" / "data" / "colab-freeze.txt")
    assert {name: RUNTIME[name] for name in short} == short
