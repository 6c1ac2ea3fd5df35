"""The form's widgets, in process: what a person sees of the model, and what the model hears of a person."""

import html
import re

import ipywidgets
import pytest
from fake_notebook import ON_CPU, ON_GPUS, Notebook, num_widgets

from notebook_launcher.widgets.form import Form
from notebook_launcher.widgets.form_model import FormModel

TRAIN = "def train(num_epochs: int, lr: float = 0.1, shuffle: bool = True): ..."
VERSION = int(ipywidgets.__version__.partition(".")[0])


def form_of(*cells, devices=ON_CPU, **options):
    notebook = Notebook(*cells)
    model = FormModel(notebook.namespace, cell_numbers=lambda: notebook.numbers, environment=dict, **options)
    model.devices = devices

    def changed(name, held):
        model.set(name, held)
        form.show()

    form = Form(model, changed)
    return form, model, notebook


def text_of(widget):
    return html.unescape(re.sub(r"<[^>]*>", "", widget.value))


def shown(form, name):
    """Whether a control is on the page: neither it nor what it lies in is folded away."""
    return form[name].box in everything(form.box)


def everything(box):
    if box.layout.display == "none":
        return []
    return [box, *(one for child in getattr(box, "children", ()) for one in everything(child))]


def test_every_control_has_a_label_that_fits_and_a_tooltip():
    form, model, _ = form_of("def train(a_rather_long_name_of_an_argument: int = 1): ...")
    widths = set()
    for control in model.controls():
        widget = form[control.name].widget
        assert widget.description == control.label
        assert widget.tooltip if VERSION > 7 else widget.description_tooltip
        assert (widget.layout.width, widget.layout.max_width) == ("100%", "40em")
        widths.add(widget.style.description_width)
    (width,) = widths
    assert float(width.removesuffix("em")) > 0.5 * max(len(one.label) for one in model.controls())


def test_what_is_typed_reaches_the_model():
    form, model, _ = form_of(TRAIN)
    form["num_epochs()"].widget.value = "3"
    form["shuffle()"].widget.value = False
    form["mixed_precision"].widget.value = "bf16"
    form["num_processes"].widget.value = "4"
    chosen = model.chosen()
    assert (chosen.args, chosen.kwargs) == ((3,), {"shuffle": False})
    assert (chosen.config.num_processes, chosen.config.mixed_precision) == (4, "bf16")
    assert "4 processes · CPU (gloo) · bf16 · DDP" in form.box.children[-1].value
    assert 'role="status"' in form.box.children[-1].value


def test_errors_stand_beside_their_controls_and_go_when_mended():
    form, *_ = form_of(TRAIN)
    note = form["num_epochs()"].note
    form["num_epochs()"].widget.value = "<b>"
    assert 'role="alert"' in note.value
    assert "✗ '<b>' can't be: num_epochs takes a whole number." in text_of(note)
    assert "<b>'" not in note.value
    assert "1 field above needs a change" in text_of(form.box.children[-1])
    form["num_epochs()"].widget.value = "2"
    assert (note.value, note.layout.display) == ("", "none")


def test_what_the_device_can_t_do_is_shown_with_its_reason_and_refused_when_chosen():
    form, *_ = form_of(TRAIN)
    precision = form["mixed_precision"]
    assert "fp16 (not on CPU)" in [label for label, _ in precision.widget.options]
    assert "fp16: not on CPU: a CPU emulates it" in text_of(precision.note)
    assert "alert" not in precision.note.value
    precision.widget.value = "fp16"
    assert "✗ fp16: not on CPU: a CPU emulates it" in text_of(precision.note)
    form["device"].widget.value = "cuda"
    assert "this build of torch has no CUDA" in text_of(form["device"].note)


def test_choices_follow_the_machine_without_being_taken_for_a_person_s():
    form, model, _ = form_of(TRAIN, devices=None)
    form["mixed_precision"].widget.value = "bf16"
    model.devices = ON_GPUS
    form.show()
    assert form["device"].widget.options[0] == ("auto (cuda)", "auto")
    assert form["mixed_precision"].widget.value == "bf16"
    assert model.config().sources == {"mixed_precision": "argument"}


def test_the_arguments_are_those_of_the_chosen_function():
    form, *_ = form_of(TRAIN, "def other(k=1): ...")
    assert "k()" in form.names
    form["function"].widget.value = "train"
    assert "num_epochs()" in form.names
    assert "k()" not in form.names
    form["num_epochs()"].widget.value = "7"
    form["function"].widget.value = "other"
    form["function"].widget.value = "train"
    assert form["num_epochs()"].widget.value == "7"  # kept for each function


def test_controls_that_go_leave_nothing_behind():
    form, *_ = form_of(TRAIN, "def other(a_much_longer_name_than_any_other=1): ...")
    before = num_widgets()
    for _ in range(3):
        for name in ("train", "other"):
            form["function"].widget.value = name
    assert num_widgets() == before


def test_controls_that_stay_keep_their_widgets():
    form, model, notebook = form_of(TRAIN)
    before = {name: form[name].widget for name in form.names}
    notebook.run("def train(num_epochs: int, rate: float = 0.1, shuffle: bool = True): ...")
    model.look()
    form.show()
    assert "other arguments" in text_of(form["function"].note)
    assert "lr()" not in form.names
    assert all(form[name].widget is before[name] for name in form.names if name != "rate()")


def test_a_function_that_is_defined_later_appears():
    form, model, notebook = form_of("x = 1")
    assert "defines no function yet" in text_of(form["function"].note)
    notebook.run(TRAIN)
    model.look()
    form.show()
    assert form["function"].widget.value == "train"
    assert form["function"].note.value == ""


def test_rarer_options_are_behind_a_button_and_open_where_something_is_wrong():
    form, model, _ = form_of("def train(): ...")
    assert not shown(form, "seed")
    assert shown(form, "device")
    form.more.click()
    assert shown(form, "seed")
    assert form.more.description.startswith("Fewer")
    form.more.click()
    assert not shown(form, "seed")
    model.set("seed", "x")
    form.show()
    assert shown(form, "seed")


def test_a_strategy_s_options_appear_when_it_is_chosen():
    form, *_ = form_of("def train(): ...", strategies=("ddp", "fsdp"))
    assert "fsdp_config.fsdp_offload_params" not in form.names
    form["strategy"].widget.value = "fsdp"
    assert shown(form, "fsdp_config.fsdp_offload_params")
    form["strategy"].widget.value = "ddp"
    assert "fsdp_config.fsdp_offload_params" not in form.names


def test_the_order_of_the_page_is_that_of_the_model():
    form, model, _ = form_of(TRAIN)
    form.more.click()
    fields = {id(form[name].box): name for name in form.names}
    assert [fields[id(one)] for one in everything(form.box) if id(one) in fields] == [
        one.name for one in sorted(model.controls(), key=lambda one: one.group == "rarer")
    ]


@pytest.mark.skipif(VERSION < 8, reason="ipywidgets 7 has no way to tell")
def test_no_widget_makes_the_browser_say_null():
    form, *_ = form_of(TRAIN)
    named = [one for one in everything(form.box) if getattr(one, "description", "")]
    assert all(one.tooltip for one in named)
