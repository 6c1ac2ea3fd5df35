"""The design's rules, read from the sources: rooms, cycles, sizes, environment, output, swallowed errors, names.

Every rule is one function from a file to what breaks it, so that it is also tried on a piece of code that does.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "notebook_launcher"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLACES = {
    PACKAGE: ROOT / PACKAGE,
    **{name: ROOT / path for name, path in PROJECT["tool"]["setuptools"]["package-dir"].items()},
}

ROOMS = {  # room -> the rooms it may import, besides itself
    "core": set(),
    "launcher": {"core"},
    "worker": {"core"},
    "runtime": {"core"},
    "notebooks": {"core", "launcher"},
    "cli": {"core", "launcher", "notebooks"},
    "widgets": {"core", "launcher"},
    "kernel_ext": {"core", "launcher", "widgets"},
}
CORE_PACKAGES = {"pydantic", "yaml", "cloudpickle"}
TORCH_ROOMS = {"runtime", "worker"}
TORCH_MODULES = {f"{PACKAGE}.core.torch_pickling"}
ENVIRONMENT_MODULE = f"{PACKAGE}.core.config"
PRINTING_MODULES = {f"{PACKAGE}.launcher.terminal", f"{PACKAGE}.kernel_ext.magics"}
MAX_LINES = 400
MAX_FUNCTION_LINES = 50
IMPORT_NAMES = {"ipython": "IPython", "pyyaml": "yaml"}  # where they differ from the distribution's name


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in PLACES.items():
        for file in sorted(folder.rglob("*.py")):
            name = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
            found[name.removesuffix(".__init__")] = file
    return found


def room(module: str) -> str:
    """The room a module is in: its second name; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


MODULES = _modules()


def each_module_that(keep: Callable[[str], object]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Makes a rule about a module one test of all those modules, whose failure names each that breaks it."""

    def make(rule: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for module in filter(keep, MODULES):
                try:
                    rule(module)
                except AssertionError as error:
                    broken.append(f"{module}: {error}")
            assert not broken, "\n".join(broken)

        return test

    return make


each_module = each_module_that(lambda _: True)


@functools.cache
def source(module: str) -> str:
    return MODULES[module].read_text()


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


# --- imports --------------------------------------------------------------------------------------------------------


def imports(node: ast.AST, module: str, *, only_at_import: bool = False) -> Iterator[str]:
    """Every module that the code names in an import; ``only_at_import`` leaves out functions and TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            # "from package import module" names the module, not only the package
            yield from (f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in child.names)
        if only_at_import and _is_deferred(child):
            yield from imports(ast.Module(getattr(child, "orelse", []), []), module, only_at_import=True)
        else:
            yield from imports(child, module, only_at_import=only_at_import)


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    is_package = MODULES[module].name == "__init__.py"
    parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _is_deferred(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return True
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _third_party(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {PACKAGE}


@each_module_that(room)
def test_rooms_import_only_the_rooms_they_may(module):
    own = room(module)
    others = {room(name) for name in imports(tree(module), module) if name.startswith(f"{PACKAGE}.")} - {own}
    assert own in ROOMS, f"{module} is in no known room"
    assert others <= ROOMS[own], f"{module} may not import {sorted(others - ROOMS[own])}"


@each_module_that(lambda name: room(name) not in TORCH_ROOMS and name not in TORCH_MODULES)
def test_torch_is_imported_only_where_models_run(module):
    assert "torch" not in _third_party(imports(tree(module), module))


@each_module_that(lambda name: room(name) == "core")
def test_core_imports_little(module):
    allowed = CORE_PACKAGES | ({"torch"} if module in TORCH_MODULES else set())
    assert _third_party(imports(tree(module), module)) <= allowed


@each_module
def test_what_a_module_needs_to_be_imported_is_a_dependency(module):
    distributions = {re.split(r"[^\w-]", text)[0].lower() for text in PROJECT["project"]["dependencies"]}
    declared = {IMPORT_NAMES.get(name, name) for name in distributions} | {"traitlets"}  # IPython's own foundation
    assert _third_party(imports(tree(module), module, only_at_import=True)) <= declared


def test_no_import_cycle():
    edges = {name: set(imports(tree(name), name, only_at_import=True)) & set(MODULES) - {name} for name in MODULES}
    leaves = True
    while leaves:  # take away who imports nothing that is left; what stays is a cycle, or leads to one
        leaves = {name for name, needed in edges.items() if not needed & set(edges)}
        edges = {name: needed for name, needed in edges.items() if name not in leaves}
    assert not edges, f"these import each other: {sorted(edges)}"


def _loaded_after(statements: str) -> set[str]:
    return {name.split(".")[0] for name in _modules_after(statements)}


def _modules_after(statements: str) -> set[str]:
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "IPython", "ipywidgets", "ipykernel", "numpy", "pandas", "matplotlib"}
    assert not _loaded_after(f"import {PACKAGE}") & heavy


def test_importing_the_kernel_side_loads_no_torch():
    kernel_side = [name for name in MODULES if room(name) not in TORCH_ROOMS and name not in TORCH_MODULES]
    kernel_side = [name for name in kernel_side if not name.endswith("__main__")]
    assert "torch" not in _loaded_after("\n".join(f"import {name}" for name in kernel_side))


def test_importing_the_accelerator_loads_nothing_of_torchs_that_takes_a_second():
    """In a cell or a script nothing has been loaded ahead, as the fork server has it for a launch."""
    slow = {"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "tensorboard", "deepspeed"}
    assert not _modules_after(f"import torch\nfrom {PACKAGE} import Accelerator") & slow


# --- sizes and names ------------------------------------------------------------------------------------------------


@each_module
def test_no_file_is_long(module):
    assert len(source(module).splitlines()) <= MAX_LINES


def long_functions(code: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(code):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            if length > MAX_FUNCTION_LINES:
                found.append(f"{node.name} has {length} lines")
    return found


@each_module
def test_no_function_is_long(module):
    assert not long_functions(tree(module))


@each_module
def test_no_file_name_says_nothing(module):
    assert not re.search(r"(^|_)(utils?|helpers?|managers?|handlers?)(_|$)", MODULES[module].stem)


# --- rules on code --------------------------------------------------------------------------------------------------


def _parents(code: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(code) for child in ast.iter_child_nodes(node)}


def environment_uses(code: ast.Module, *, may_write: bool) -> list[str]:
    """Places that read the environment, or write it where that is not allowed."""
    parents = _parents(code)
    found = []
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [
                f"line {node.lineno}: {a.name}" for a in node.names if a.name in ("environ", "getenv", "environb")
            ]
        if not isinstance(node, ast.Attribute) or ast.unparse(node) not in ("os.environ", "os.getenv", "os.environb"):
            continue
        if not (may_write and _is_write(node, parents)):
            found.append(f"line {node.lineno}: {ast.unparse(parents[node])}")
    return found


def _is_write(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Subscript):
        return not isinstance(parent.ctx, ast.Load)
    call = parents[parent]
    is_statement = isinstance(call, ast.Call) and isinstance(parents[call], ast.Expr)
    return is_statement and parent.attr in ("update", "clear", "pop", "setdefault")


@each_module_that(lambda name: name != ENVIRONMENT_MODULE)
def test_only_config_reads_the_environment(module):
    assert not environment_uses(tree(module), may_write=room(module) == "worker")


def prints(code: ast.Module) -> list[str]:
    """Calls of print, but for those inside a function that is itself called print."""
    own = {
        inner
        for node in ast.walk(code)
        if isinstance(node, ast.FunctionDef) and node.name == "print"
        for inner in ast.walk(node)
    }
    calls = (node for node in ast.walk(code) if isinstance(node, ast.Call) and node not in own)
    return [f"line {node.lineno}" for node in calls if ast.unparse(node.func) in ("print", "builtins.print")]


@each_module_that(lambda name: name not in PRINTING_MODULES)
def test_library_code_does_not_print(module):
    assert not prints(tree(module))


def swallows(text: str) -> list[str]:
    """Where any exception at all is dropped without a word of why."""
    lines = text.splitlines()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type))
            silent = all(isinstance(s, ast.Pass | ast.Continue | ast.Break) or _is_constant(s) for s in node.body)
            place = lines[node.lineno - 1 : node.end_lineno]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            broad = any(re.fullmatch(r"(Base)?Exception", ast.unparse(arg)) for arg in node.args)
            silent, place = True, lines[max(0, node.lineno - 2) : node.end_lineno]
        else:
            continue
        if broad and silent and not any(_says_why(line) for line in place):
            found.append(f"line {node.lineno}: {lines[node.lineno - 1].strip()}")
    return found


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return | ast.Expr) and isinstance(statement.value, ast.Constant | None)


def _says_why(line: str) -> bool:
    comment = line.partition("#")[2]
    return bool(re.search(r"[a-z]{2}", re.sub(r"noqa:[ A-Z0-9,]*", "", comment)))


@each_module
def test_no_error_is_swallowed_without_a_reason(module):
    assert not swallows(source(module))


def type_tests(code: ast.Module) -> list[str]:
    """Where code asks which strategy or backend it has, instead of asking the object."""
    found = []
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            suspicious = re.search(r"(Strategy|Backend)\b", ast.unparse(node.args[1]))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks_name = any(re.search(r"(strategy|backend)\.(name|kind)$", ast.unparse(side)) for side in sides)
            asks_type = any(re.match(r"type\(.*(strategy|backend)\)", ast.unparse(side)) for side in sides)
            suspicious = asks_name or asks_type
        else:
            continue
        if suspicious:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@each_module_that(lambda name: not re.search(r"\.runtime\.(strategies|backends)\b", name))
def test_nobody_asks_which_strategy_or_backend_it_is(module):
    assert not type_tests(tree(module))


# --- each rule finds what it is for ---------------------------------------------------------------------------------

BREAKS: list[tuple[Callable[[str], list[str]], str]] = [
    (lambda text: environment_uses(ast.parse(text), may_write=True), "import os\nx = os.environ['A']"),
    (lambda text: environment_uses(ast.parse(text), may_write=True), "import os\nx = os.environ.pop('A')"),
    (lambda text: environment_uses(ast.parse(text), may_write=True), "import os\nx = os.getenv('A')"),
    (lambda text: environment_uses(ast.parse(text), may_write=True), "from os import environ"),
    (lambda text: environment_uses(ast.parse(text), may_write=False), "import os\nos.environ['A'] = '1'"),
    (lambda text: prints(ast.parse(text)), "def f():\n    print(1)"),
    (swallows, "try:\n    f()\nexcept Exception:\n    pass"),
    (swallows, "try:\n    f()\nexcept:  # noqa: E722\n    return None"),
    (swallows, "try:\n    f()\nexcept (OSError, BaseException):\n    ..."),
    (swallows, "with contextlib.suppress(Exception):\n    f()"),
    (lambda text: type_tests(ast.parse(text)), "isinstance(s, strategies.DDPStrategy)"),
    (lambda text: type_tests(ast.parse(text)), "self.strategy.name == 'ddp'"),
    (lambda text: type_tests(ast.parse(text)), "type(self.backend) is XLA"),
    (lambda text: long_functions(ast.parse(text)), "def f():\n" + "    x = 1\n" * 51),
]
KEEPS: list[tuple[Callable[[str], list[str]], str]] = [
    (lambda text: environment_uses(ast.parse(text), may_write=True), "import os\nos.environ['A'] = '1'"),
    (
        lambda text: environment_uses(ast.parse(text), may_write=True),
        "import os\nos.environ.update(a)\ndel os.environ['A']",
    ),
    (lambda text: prints(ast.parse(text)), "def print(*a):\n    builtins.print(*a)"),
    (swallows, "try:\n    f()\nexcept Exception:  # its repr is the user's own\n    pass"),
    (swallows, "try:\n    f()\nexcept OSError:\n    pass"),
    (swallows, "try:\n    f()\nexcept Exception as error:\n    report(error)"),
    (lambda text: type_tests(ast.parse(text)), "isinstance(module, torch.nn.Module)"),
    (lambda text: long_functions(ast.parse(text)), 'def f():\n    """' + "a\n" * 60 + '"""\n' + "    x = 1\n" * 50),
]


@pytest.mark.parametrize(("rule", "text"), BREAKS, ids=range(len(BREAKS)))
def test_rule_finds_what_breaks_it(rule, text):
    assert rule(text)


@pytest.mark.parametrize(("rule", "text"), KEEPS, ids=range(len(KEEPS)))
def test_rule_lets_the_rest_be(rule, text):
    assert not rule(text)
