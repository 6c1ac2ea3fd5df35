import ast
import math

import pytest
from fake_notebook import ON_GPUS, Notebook

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.widgets.argument_controls import literal
from notebook_launcher.widgets.code import CallText, config_code, launch_code
from notebook_launcher.widgets.form_model import FormModel

CELL = """
import enum
class Colour(enum.Enum):
    RED = 1
    BLUE = 2
numbers = [1, 2]
def train(num_epochs: int, lr: float = 0.1, colour: Colour = Colour.RED, name: str = "", f=None, *more, **named): ...
"""


def model_of(environment=None, **typed):
    notebook = Notebook(CELL)
    model = FormModel(notebook.namespace, environment=lambda: environment or {})
    model.devices = ON_GPUS
    for name, held in {"num_epochs()": "3", **typed}.items():
        model.set(name, held)
    return model, notebook


def run_of(code, notebook, environment):
    """What the code launches, as ``launch`` takes it."""
    launched = []

    def launch(fn, args=(), kwargs=None, *, config=None, **options):
        launched.append((fn, tuple(args), kwargs or {}, LaunchConfig.make(config, environment=environment, **options)))
        return "the run"

    names = dict(notebook.namespace)
    source = ast.parse(code)
    imports = [node for node in source.body if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imports] == ["notebook_launcher"]
    source.body = [node for node in source.body if node not in imports]
    available = {"launch": launch, "LaunchConfig": LaunchConfig}
    names |= {alias.name: available[alias.name] for node in imports for alias in node.names}
    exec(compile(source, "<copied>", "exec"), names)  # noqa: S102 - what a person would do with it
    (found,) = launched
    return found, names


TYPED = [
    {},
    {"num_processes": "2", "mixed_precision": "bf16"},
    {"lr()": "1e-3", "colour()": "BLUE", "name()": 'it\'s "quoted" \\ {x}'},
    {"f()": "lambda x: x + 1  # a comment"},
    {"f()": "1, 2"},
    {"f()": "[n * 2 for n in numbers]"},
    {"more()": "numbers", "named()": "{'k': 'v'}"},
    {"more()": "(1, 2) + (3,)", "lr()": "inf"},
    {"env": "A=1 B='two words'", "preload": "json", "log_dir": "C:\\logs", "timeout_s": "1.5", "device_ids": "0,1,3"},
    {"kept_as": "mine"},
    {"kept_as": ""},
]


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("environment", [{}, {"NOTEBOOK_LAUNCHER_NUM_PROCESSES": "3"}])
@pytest.mark.parametrize("typed", TYPED, ids=range(len(TYPED)))
def test_running_the_code_gives_the_same_run(typed, environment, form):
    model, notebook = model_of(environment, **typed)
    chosen = model.chosen()
    call, options = model.code()
    code = (launch_code, config_code)[form](call, options, kept_as=model.kept_as)
    (function, args, kwargs, config), names = run_of(code, notebook, environment)
    assert function is chosen.function
    assert config == chosen.config
    if "f()" in typed and "lambda" in typed["f()"]:
        assert kwargs.pop("f")(1) == chosen.kwargs["f"](1) == 2
        del chosen.kwargs["f"]
    assert (args, kwargs) == (chosen.args, chosen.kwargs)
    assert names.get(model.kept_as or "run") == ("the run" if model.kept_as else None)


@pytest.mark.parametrize("form", [0, 1])
def test_an_option_taken_back_from_the_environment_stays_open(form):
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    model, notebook = model_of(environment, mixed_precision="")
    call, options = model.code()
    code = (launch_code, config_code)[form](call, options)
    (*_, config), _ = run_of(code, notebook, environment)
    assert config.mixed_precision is None


def test_keys_of_a_file_travel_along():
    model, notebook = model_of()
    model.load(LaunchConfig(extra={"fsdp_config": {"fsdp_version": 2, "names": ["a", None, True]}}))
    (*_, config), _ = run_of(launch_code(*model.code()), notebook, {})
    assert config.extra == {"fsdp_config": {"fsdp_version": 2, "names": ["a", None, True]}}


def test_how_it_looks():
    call = CallText("train", ("3",), (("lr", "0.01"),))
    assert launch_code(call, {"num_processes": 2}) == (
        'from notebook_launcher import launch\n\nrun = launch(train, args=(3,), kwargs={"lr": 0.01}, num_processes=2)'
    )
    assert config_code(CallText("train"), {"num_processes": 2}) == (
        "from notebook_launcher import LaunchConfig, launch\n\n"
        "config = LaunchConfig(num_processes=2)\nrun = launch(train, config=config)"
    )
    long = launch_code(call, {"num_processes": 2, "mixed_precision": "bf16", "strategy": "ddp", "seed": 1})
    assert long.splitlines()[2:5] == ["run = launch(", "    train,", "    args=(3,),"]


@pytest.mark.parametrize(
    "value", [1, -2.5, math.inf, -math.inf, True, None, "a'b\"c\n\\", {"k": [1, {"x": None}]}, (1,), b"x", "it's", ""]
)
def test_literals_give_the_value_back(value):
    assert eval(literal(value)) == value  # noqa: S307
    assert math.isnan(eval(literal(math.nan)))  # noqa: S307


def test_an_enumeration_that_the_notebook_does_not_name():
    import enum

    import fake_notebook  # a module to find one in

    kind = enum.Enum("kind", ["odd name", "plain"], module="fake_notebook")
    fake_notebook.kind = kind
    try:
        assert eval(literal(kind["plain"], {})) is kind["plain"]  # noqa: S307
        assert eval(literal(kind["odd name"], {"Kind": kind}), {"Kind": kind}) is kind["odd name"]  # noqa: S307
    finally:
        del fake_notebook.kind
