"""The README's commands, snippets, links and options are those of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python3 ")]


def test_there_are_two_commands_and_one_for_those_who_work_on_tpus():
    names = ("quickstart", "test", "test_xla")
    assert commands() == [f"python3 scripts/{name}.py" for name in names]


@pytest.mark.parametrize("command", commands())
def test_each_command_explains_itself_without_anything_installed(command):
    # -S: no site-packages, as on a fresh clone
    done = subprocess.run(
        [sys.executable, "-S", *command.split()[1:], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name)
def test_scripts_before_installation_need_the_standard_library_only(script):
    if script.name in {"drive_panel.py", "execute_notebook.py"}:  # run inside the environment
        return
    found = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert found - sys.stdlib_module_names - {"environment", "test_xla"} == set()


def test_ci_runs_the_second_command():
    assert "scripts/test.py" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("snippet", blocks("python"), ids=range(len(blocks("python"))))
def test_python_snippets_use_public_names(snippet):
    import notebook_launcher

    imported = [
        alias.name
        for node in ast.walk(ast.parse(snippet))
        if isinstance(node, ast.ImportFrom) and node.module == "notebook_launcher"
        for alias in node.names
    ]
    assert imported
    assert set(imported) <= set(notebook_launcher.__all__)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_files_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_every_option_is_in_the_table():
    from notebook_launcher import LaunchConfig

    table = README[README.index("## Options") : README.index("## What happens when")]
    missing = [name for name in LaunchConfig.model_fields if f"`{name}`" not in table and name != "extra"]
    assert not missing
