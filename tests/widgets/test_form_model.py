import textwrap

import pytest
from fake_notebook import CPU, ON_CPU, ON_GPUS, Notebook

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.strategies import STRATEGIES
from notebook_launcher.widgets.form_model import FormError, FormModel

TRAIN = """
import enum
from typing import Literal, Optional, Annotated
class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"
def train(num_epochs: int, lr: float = 1e-3, shuffle: bool = True, mode: Literal["a", "b", 3] = "a",
          colour: Colour = Colour.RED, name: Optional[str] = None, tag: str = "x", layers=[1, 2],
          depth: int | None = 4, other: "Annotated[int, 'said']" = 5, anything: object = object(), *, keep: bool):
    return num_epochs
"""


def model_of(*cells, devices=ON_CPU, environment=None, **options):
    notebook = Notebook(*cells)
    model = FormModel(
        notebook.namespace,
        cell_numbers=lambda: notebook.numbers,
        environment=lambda: environment or {},
        **options,
    )
    model.devices = devices
    return model, notebook


def control(model, name):
    return next(one for one in model.controls() if one.name == name)


def labels(model, name):
    return [choice.label for choice in control(model, name).choices]


def refused(model):
    with pytest.raises(FormError) as caught:
        model.chosen()
    return caught.value.texts


# --- functions -------------------------------------------------------------------------------------------------------


def test_the_last_defined_function_comes_first_and_is_chosen():
    model, notebook = model_of("def a(): ...\ndef b(): ...", "def c(): ...", "def a(): ...", "import json; d = 3")
    assert labels(model, "function") == ["a", "c", "b"]
    assert model.function_name == "a"
    notebook.run("def b(): ...")
    model.look()
    assert labels(model, "function")[0] == model.function_name == "b"


def test_where_cells_have_no_numbers_the_order_is_that_of_the_namespace():
    notebook = Notebook("\n".join(f"def {name}(): ..." for name in "zyxwvutsrq"))
    model = FormModel(notebook.namespace, environment=dict)
    assert labels(model, "function") == [*"qrstuvwxyz"]


def test_only_what_the_notebook_defines_is_offered():
    model, _ = model_of("from json import dumps\nimport functools\ndef train(n): ...\n_hidden = train\nagain = train")
    assert labels(model, "function") == ["train"]
    model, _ = model_of("import functools\ndef train(n): ...\nfixed = functools.partial(train, 3)\nsmall = lambda: 1")
    assert set(labels(model, "function")) == {"train", "fixed", "small"}


def test_objects_that_raise_when_they_are_looked_at_stand_in_nobody_s_way():
    cells = """
    class Proxy:  # as Flask's request is
        def __getattribute__(self, name): raise RuntimeError("outside of a request")
    request = Proxy()
    def train(n=1): ...
    def round_and_round(n=1): ...
    round_and_round.__wrapped__ = round_and_round
    """
    model, _ = model_of(textwrap.dedent(cells))
    assert set(labels(model, "function")) == {"train", "round_and_round"}
    model.set("function", "round_and_round")
    assert model.chosen().kwargs == {}


def test_a_function_that_was_chosen_stays_chosen_when_others_are_defined():
    model, notebook = model_of("def a(n=1): ...", "def b(): ...")
    model.set("function", "a")
    notebook.run("def c(): ...")
    model.look()
    assert model.function_name == "a"
    model, notebook = model_of("def a(n=1): ...")
    model.set("n()", "2")  # whoever has filled in arguments has chosen
    notebook.run("def c(): ...")
    model.look()
    assert model.function_name == "a"


def test_no_function_and_a_function_that_has_gone():
    model, notebook = model_of("x = 1")
    assert "defines no function yet" in refused(model)["function"]
    notebook.run("def train(): ...")
    assert model.chosen().function is notebook.namespace["train"]
    notebook.run("del train")
    assert "no longer defines train" in refused(model)["function"]
    assert labels(model, "function") == ["train (gone)"]


def test_a_function_defined_anew_is_the_one_that_is_launched():
    model, notebook = model_of("def train(n: int = 1): return 1")
    model.set("n()", "5")
    notebook.run("def train(n: int = 1): return 2")
    chosen = model.chosen()
    assert (chosen.function(), chosen.kwargs) == (2, {"n": 5})


def test_a_function_defined_anew_with_other_arguments_is_said_before_it_is_launched():
    model, notebook = model_of("def train(n: int = 1, lr: float = 0.1): ...")
    model.set("n()", "5")
    model.set("lr()", "0.5")
    notebook.run("def train(n: int = 1, rate: float = 0.1): ...")
    assert "other arguments" in refused(model)["function"]
    assert [one.name for one in model.controls() if one.group == "argument"] == ["n()", "rate()"]
    assert model.held(control(model, "n()")) == "5"  # what still fits is kept
    assert model.chosen().kwargs == {"n": 5}
    assert model.notice == ""


def test_a_redefinition_that_was_shown_does_not_stand_in_the_way():
    model, notebook = model_of("def train(n: int = 1): ...")
    notebook.run("def train(k: int = 1): ...")
    model.look()
    assert "other arguments" in model.notice
    assert model.chosen().kwargs == {}


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_become_controls():
    model, _ = model_of(TRAIN)
    found = {one.name: (one.kind, model.held(one)) for one in model.controls() if one.group == "argument"}
    assert found == {
        "num_epochs()": ("text", ""),
        "lr()": ("text", "0.001"),
        "shuffle()": ("flag", True),
        "mode()": ("choice", '"a"'),
        "colour()": ("choice", "RED"),
        "name()": ("text", ""),
        "tag()": ("text", "x"),
        "layers()": ("text", "[1, 2]"),
        "depth()": ("text", "4"),
        "other()": ("text", "5"),
        "anything()": ("text", ""),
        "keep()": ("choice", ""),
    }
    assert labels(model, "mode()") == ["a", "b", "3"]
    assert labels(model, "keep()") == ["choose one", "True", "False"]


@pytest.mark.parametrize(
    ("annotation", "takes"),
    [
        ("int | None", "a whole number, or nothing for None"),
        ("'Optional[float]'", "a number, or nothing for None"),
        ("Optional['int']", "a whole number, or nothing for None"),
        ("Annotated[Optional[int], 'epochs']", "a whole number, or nothing for None"),
        ("Optional[Annotated['int', 'epochs']]", "a whole number, or nothing for None"),
        ("Final[str]", "text"),
        ("Annotated[Literal['a', 1], 'which']", "one of a, 1"),
        ("Literal['a'] | None", "one of a, None"),
        ("int | str", "a Python expression"),
        ("'known.to.TypeCheckers'", "a Python expression"),
    ],
)
@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_annotations_as_people_write_them(annotation, takes, future):
    cell = f"{future}from typing import Annotated, Final, Literal, Optional\ndef train(n: {annotation}): ..."
    model, _ = model_of(cell)
    assert control(model, "n()").help.startswith(f"n: {takes}")


def test_arguments_that_are_as_the_function_has_them_are_not_passed():
    model, _ = model_of(TRAIN)
    model.set("num_epochs()", "3")
    model.set("keep()", "False")
    chosen = model.chosen()
    assert (chosen.args, chosen.kwargs) == ((3,), {"keep": False})


@pytest.mark.parametrize(
    ("name", "held", "value"),
    [
        ("num_epochs", "1_000", 1000),
        ("lr", "1e-2", 0.01),
        ("lr", " 3 ", 3.0),
        ("shuffle", False, False),
        ("mode", "3", 3),
        ("mode", '"b"', "b"),
        ("name", "a b", "a b"),
        ("tag", "", ""),
        ("layers", "[k * 2 for k in range(depth_of_it)]", [0, 2, 4]),
        ("depth", "", None),
        ("anything", "None", None),
        ("keep", "True", True),
    ],
)
def test_what_is_typed_becomes_a_value(name, held, value):
    model, _ = model_of(TRAIN, "depth_of_it = 3")
    for needed, given in {"num_epochs": "1", "keep": "True", name: held}.items():
        model.set(f"{needed}()", given)
    chosen = model.chosen()
    given = chosen.args[0] if name == "num_epochs" else chosen.kwargs[name]
    assert (given, type(given)) == (value, type(value))


def test_an_enumeration_gives_its_member():
    model, notebook = model_of(TRAIN)
    for name, held in {"num_epochs()": "1", "keep()": "True", "colour()": "BLUE"}.items():
        model.set(name, held)
    assert model.chosen().kwargs["colour"] is notebook.namespace["Colour"].BLUE


@pytest.mark.parametrize(
    ("name", "held", "words"),
    [
        ("num_epochs", "x", "'x' can't be: num_epochs takes a whole number"),
        ("num_epochs", "", "num_epochs needs a value"),
        ("num_epochs", "1.5", "whole number"),
        ("lr", "fast", "takes a number"),
        ("depth", "no", "or nothing for None"),
        ("layers", "[1,", "no Python expression"),
        ("layers", "sgd nesterov", "needs quotation marks"),
        ("layers", "missing", "NameError: name 'missing' is not defined"),
        ("layers", "1 / 0", "ZeroDivisionError"),
        ("layers", "exit()", "SystemExit"),
        ("layers", "-" * 100_000 + "1", "nested too deeply"),
        ("keep", "", "needs a choice"),
    ],
)
def test_an_argument_that_can_t_be_is_said_beside_it(name, held, words):
    model, _ = model_of(TRAIN)
    for needed, given in {"num_epochs": "1", "keep": "True", name: held}.items():
        model.set(f"{needed}()", given)
    texts = refused(model)
    assert set(texts) == {f"{name}()"}
    assert words in texts[f"{name}()"]
    assert model.errors() == texts  # also what only evaluating has shown
    model.set(f"{name}()", {"num_epochs": "1", "layers": "[]", "keep": "True"}.get(name, "1"))
    assert model.errors() == {}


def test_starred_arguments():
    model, _ = model_of("def f(a, b=2, *more, **named): ...")
    assert [one.label for one in model.controls() if one.group == "argument"] == ["a", "b", "*more", "**named"]
    model.set("a()", "'x'")
    assert model.chosen().args == ("x",)
    model.set("more()", "3, 4")
    model.set("named()", "{'k': 1}")
    chosen = model.chosen()
    assert (chosen.args, chosen.kwargs) == (("x", 2, 3, 4), {"k": 1})
    model.set("more()", "3")
    assert "a tuple" in refused(model)["more()"]
    model.set("more()", "")
    model.set("named()", "{'b': 1}")
    assert "b, which has a control of its own" in refused(model)["named()"]


def test_arguments_by_place_only():
    model, _ = model_of("def f(a, b=2, /, c=3): ...")
    model.set("a()", "1")
    model.set("c()", "4")
    chosen = model.chosen()
    assert (chosen.args, chosen.kwargs) == ((1,), {"c": 4})


def test_defaults_whose_comparison_or_repr_is_odd():
    cell = """
    class Odd:
        def __eq__(self, other): raise ValueError
        def __repr__(self): raise ValueError
        __hash__ = None
    def f(a=Odd(), b: int = Odd(), c: str | None = Odd()): ...
    """
    model, _ = model_of(textwrap.dedent(cell))
    assert model.chosen().kwargs == {}


def test_an_argument_may_have_an_option_s_name():
    model, _ = model_of("def train(seed: int = 0): ...")
    model.set("seed()", "3")
    model.set("seed", "5")
    chosen = model.chosen()
    assert (chosen.kwargs, chosen.config.seed) == ({"seed": 3}, 5)


# --- options ---------------------------------------------------------------------------------------------------------

DEF = "def train(): ..."


def test_every_option_of_a_launch_has_a_control_with_a_label_and_help():
    model, _ = model_of(DEF)
    names = [one.name for one in model.controls()]
    from notebook_launcher.core.config import field_rows

    assert set(names) == {"function", "kept_as", *(row.name for row in field_rows())}
    assert all(one.label and one.help for one in model.controls())
    main = [one.name for one in model.controls() if one.group == "main"]
    assert main == [
        *("device", "num_processes", "mixed_precision", "strategy", "gradient_accumulation_steps"),
        "kept_as",
    ]


def test_the_form_begins_with_what_the_environment_says():
    model, _ = model_of(DEF, environment={"NOTEBOOK_LAUNCHER_NUM_PROCESSES": "3", "ACCELERATE_USE_CPU": "1"})
    assert model.held(control(model, "num_processes")) == "3"
    assert model.chosen().config.sources == {
        "num_processes": "environment variable NOTEBOOK_LAUNCHER_NUM_PROCESSES",
        "device": "environment variable ACCELERATE_USE_CPU",
    }
    model.set("num_processes", "")  # open again, whatever the environment says
    assert model.chosen().config.num_processes is None


@pytest.mark.parametrize("values", [{"NOTEBOOK_LAUNCHER_NUM_PROCESSES": "many"}])
def test_an_environment_that_can_t_be_is_said(values):
    model, _ = model_of(DEF, environment=values)
    assert "NOTEBOOK_LAUNCHER_NUM_PROCESSES" in refused(model)[""]
    assert model.sentence() == ""


@pytest.mark.parametrize(
    ("name", "held", "value"),
    [
        ("num_processes", "2", 2),
        ("device_ids", "0, 1", [0, 1]),
        ("env", "A=1 B='x y' C=", {"A": "1", "B": "x y", "C": ""}),
        ("preload", "numpy, pandas", ["numpy", "pandas"]),
        ("timeout_s", "1.5", 1.5),
        ("log_dir", "logs", "logs"),
        ("output", "main", "main"),
        ("mixed_precision", "bf16", "bf16"),
    ],
)
def test_options_as_they_are_typed(name, held, value):
    model, _ = model_of(DEF, devices=ON_GPUS)
    model.set(name, held)
    config = model.chosen().config
    assert getattr(config, name) == value
    assert config == LaunchConfig(**{name: value})
    model.load(config)
    assert getattr(model.chosen().config, name) == value


@pytest.mark.parametrize(
    ("name", "held", "words"),
    [
        ("num_processes", "0", "'0' can't be: it takes a whole number from 1 to 1024, or nothing."),
        ("num_processes", "1e9", "a whole number"),
        ("timeout_s", "-1", "greater than 0"),
        ("stop_grace_s", "", "a number of 0 or more"),
        ("seed", "x", "a whole number from 0"),
        ("device_ids", "a", "with commas between"),
        ("device_ids", "0, 0", "twice"),
        ("env", "A", "names and values"),
        ("env", "A='", "not closed"),
        ("env", "RANK=3", "env can't set RANK"),
        ("preload", "1a", "no module's name"),
        ("mixed_precision", "fp16", "fp16: not on CPU: a CPU emulates it"),
        ("device", "cuda", "cuda: not here: this build of torch has no CUDA"),
        ("device", "tpu", "tpu: not here: this version does not know it yet"),
        ("num_machines", "2", "main_process_ip"),
        ("strategy", "single", "train 2 models apart"),
        ("num_processes", "1000", "too many for"),
        ("kept_as", "a b", "a variable's name"),
        ("kept_as", "class", "a variable's name"),
        ("kept_as", "train", "train is a function of the notebook's"),
    ],
)
def test_an_option_that_can_t_be_is_said_beside_it(name, held, words):
    model, _ = model_of(DEF)
    model.set(name, held)
    texts = refused(model)
    assert set(texts) == {name}
    assert words in texts[name]


def test_options_that_contradict_one_another_are_said_at_one_of_them():
    model, _ = model_of(DEF, devices=ON_GPUS)
    model.set("device_ids", "0,1")
    model.set("num_processes", "3")
    assert set(refused(model)) == {"device_ids"}
    model.set("num_processes", "")
    model.set("device_ids", "7")
    assert "sees 4 CUDA devices" in refused(model)["device_ids"]


def test_what_the_machine_can_t_do_is_refused_with_its_reason():
    model, _ = model_of(DEF)
    assert labels(model, "device") == [
        *("auto (cpu)", "cpu", "cuda (not here)", "mps (not here)", "tpu (not here)", "xpu (not here)"),
    ]
    assert control(model, "mixed_precision").refusals == {"fp16": "fp16: not on CPU: a CPU emulates it"}
    model, _ = model_of(DEF, devices=ON_GPUS)
    assert labels(model, "device")[0] == "auto (cuda)"
    assert control(model, "mixed_precision").refusals == {}
    model.set("device", "cpu")
    assert control(model, "mixed_precision").refusals == {"fp16": "fp16: not on CPU: a CPU emulates it"}


def test_before_the_machine_is_known_nothing_is_refused_but_what_never_works():
    model, _ = model_of(DEF, devices=None)
    assert labels(model, "device")[:3] == ["auto", "cpu", "cuda"]
    assert model.sentence() == "looking at this machine's devices ..."
    model.set("device", "cpu")
    assert model.sentence() == "2 processes · CPU (gloo) · fp32 · DDP"
    assert "fp16" in control(model, "mixed_precision").refusals


@pytest.mark.parametrize(
    ("devices", "typed", "sentence"),
    [
        (ON_CPU, {}, "2 processes · CPU (gloo) · fp32 · DDP"),
        (ON_GPUS, {"mixed_precision": "bf16"}, "4 processes · CUDA (NCCL) · bf16 · DDP"),
        ((CPU,), {"num_processes": "1"}, "1 process · CPU (gloo) · fp32 · single"),
        (ON_CPU, {"gradient_accumulation_steps": "4"}, "2 processes · CPU (gloo) · fp32 · DDP · accumulation 4"),
        (ON_CPU, {"num_processes": "x"}, ""),
    ],
)
def test_the_sentence_says_what_will_happen(devices, typed, sentence):
    model, _ = model_of(DEF, devices=devices)
    for name, held in typed.items():
        model.set(name, held)
    assert model.sentence() == sentence


# --- strategies ------------------------------------------------------------------------------------------------------


OF_XLA = ["xla", "spmd", "spmd_fsdp"]
TPU = DeviceRow("tpu", 8, ("TPU v5",) * 8, precisions={"no": "", "bf16": "", "fp16": "no"})
STAND_IN = DeviceRow("tpu", 4, ("XLA on the CPU",) * 4, precisions=TPU.precisions, is_stand_in=True)


def offered(model):
    return [choice.value for choice in control(model, "strategy").choices][1:]


@pytest.mark.parametrize(
    ("devices", "device", "of_xla"),
    [
        (None, "auto", []),
        (ON_CPU, "auto", []),
        (ON_GPUS, "cuda", []),
        ((TPU, CPU), "auto", OF_XLA),
        ((TPU, CPU), "cpu", []),
        ((STAND_IN, CPU), "auto", []),
        ((STAND_IN, CPU), "tpu", OF_XLA),
    ],
)
def test_only_the_strategies_that_the_device_has_are_offered(devices, device, of_xla):
    model, _ = model_of(DEF, devices=devices)
    if device != "auto":
        model.set("device", device)
    others = ["single", "ddp"] if of_xla else [name for name in STRATEGIES.names if name not in OF_XLA]
    assert offered(model) == others + of_xla


def test_a_strategy_that_was_chosen_stays_and_is_refused_where_the_device_changes():
    model, _ = model_of(DEF, devices=(TPU, CPU))
    model.set("strategy", "spmd")
    assert model.errors() == {}
    model.set("device", "cpu")
    assert refused(model) == {"strategy": "spmd: not on CPU: it is for device='tpu'"}
    assert "spmd (not on CPU)" in labels(model, "strategy")
    model.load(LaunchConfig(device="tpu", strategy="fsdp"))
    assert refused(model) == {"strategy": "fsdp: not on TPU: it isn't there"}
    model.set("strategy", "")
    assert model.errors() == {}


def test_a_strategy_s_own_options_are_shown_only_when_it_is_chosen():
    model, _ = model_of(DEF, strategies=("ddp", "fsdp", "deepspeed"))
    assert not [one.name for one in model.controls() if "." in one.name]
    model.set("strategy", "deepspeed")
    names = [one.name for one in model.controls()]
    assert names[names.index("strategy") + 1] == "deepspeed_config.zero_stage"
    model.set("strategy", "fsdp")
    assert {name.partition(".")[0] for name in (one.name for one in model.controls()) if "." in name} == {"fsdp_config"}


def test_a_strategy_s_options_go_where_accelerate_keeps_them(monkeypatch):
    from notebook_launcher.core import registry
    from notebook_launcher.launcher import plan

    monkeypatch.setattr(plan, "STRATEGIES", registry.Registry("strategy", {"deepspeed": "x:y"}))
    model, _ = model_of(DEF, strategies=("deepspeed",))
    model.load(LaunchConfig(strategy="deepspeed", extra={"deepspeed_config": {"zero3_init_flag": 1}, "debug": False}))
    model.set("deepspeed_config.zero_stage", "3")
    model.set("deepspeed_config.offload_optimizer_device", "cpu")
    extra = model.chosen().config.extra
    assert extra == {
        "deepspeed_config": {"zero3_init_flag": 1, "zero_stage": 3, "offload_optimizer_device": "cpu"},
        "debug": False,
    }
    model.load(model.config())
    assert model.held(control(model, "deepspeed_config.zero_stage")) == "3"


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_configuration_is_saved_and_loaded(tmp_path):
    model, _ = model_of(DEF)
    for name, held in {"num_processes": "3", "mixed_precision": "bf16", "seed": "7", "device": "cpu"}.items():
        model.set(name, held)
    model.config().save(tmp_path / "c.yaml")
    other, _ = model_of(DEF)
    other.set("num_processes", "5")
    other.load(LaunchConfig.load(tmp_path / "c.yaml"))
    assert other.chosen().config == model.config()
    assert other.held(control(other, "num_processes")) == "3"


def test_a_configuration_that_can_t_be_is_not_saved():
    model, _ = model_of("x = 1")
    assert model.config() == LaunchConfig()  # without any function, too
    model.set("seed", "x")
    with pytest.raises(FormError, match="whole number"):
        model.config()


def test_the_run_may_be_kept_under_a_name_that_is_free():
    model, notebook = model_of("def run(): ...")
    assert model.kept_as == "launched_run"
    notebook.namespace["launched_run"] = run = object()
    assert model.kept_as == ""  # neither name is
    model.kept(run)
    assert model.kept_as == "launched_run"
