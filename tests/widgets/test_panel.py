"""The panel over a launcher that starts nothing: buttons, what they answer, what a saved notebook keeps."""

import html
import re
import threading

import ipywidgets
import pytest
from fake_notebook import ON_CPU, FakeShell, num_widgets

from notebook_launcher.core.errors import ConfigError, EngineError, PayloadError
from notebook_launcher.core.notices import warn
from notebook_launcher.launcher.preflight import Check, Preflight
from notebook_launcher.widgets import panel as panels
from notebook_launcher.widgets.panel import EntryPoints, Panel, has_front_end

LIMIT_S = 10
TRAIN = "def train(num_epochs: int = 3, lr: float = 0.1): ..."


class FakeRun:
    """A run that ends when it is told to."""

    def __init__(self, chosen):
        self.chosen = chosen
        self.status = "running"
        self.num_stops = 0
        self.sinks = []

    def stop(self):
        self.num_stops += 1
        self.status = "stopping"

    def show_in(self, sink):
        if self.status in ("finished", "stopped"):
            return False
        self.sinks.append(sink)
        return True

    def end(self, status):
        self.status = status
        for sink in self.sinks:
            sink.closed(None)


class FakeMonitor:
    def __init__(self, run):
        self.run = run
        self.widget = ipywidgets.HTML("live")
        self.has_stop = True
        self.closed = False

    def close(self):
        self.closed = True

    def without_stop(self):
        self.has_stop = False

    def html(self):
        return f"<p>a run, {self.run.status}</p>"


class FakeCell:
    """Where a panel is displayed: the bundle that is there now."""

    live = True
    number = None

    def __init__(self):
        self.number = FakeCell.number if FakeCell.number is not None else len(CELLS)
        self.bundles = {}
        self.num_updates = 0
        self.closed = False
        CELLS.append(self)

    @property
    def bundle(self):
        return next(iter(self.bundles.values()))

    def is_run_again_by(self, other):
        return self.number == other.number and self is not other

    def display(self, bundle, *, name=""):
        assert name not in self.bundles
        self.bundles[name] = bundle

    def update(self, bundle, *, name):
        assert name in self.bundles
        self.bundles[name] = bundle
        self.num_updates += 1

    def close(self):
        self.closed = True


CELLS: list[FakeCell] = []


class FakeLauncher:
    def __init__(self):
        self.runs = []
        self.error = None
        self.warning = ""
        self.ends_at_once = False
        self.devices_error = None
        self.may_look = threading.Event()
        self.may_look.set()
        self.checks = []
        self.found = Preflight("2 processes", (Check("workers", ok=True, text="2 started"),))
        self.may_answer = threading.Event()
        self.may_answer.set()

    def launch(self, chosen):
        if self.error is not None:
            raise self.error
        if self.warning:
            warn(self.warning)
        run = FakeRun(chosen)
        if self.ends_at_once:
            run.status = "finished"
        self.runs.append(run)
        return run

    def devices(self):
        assert self.may_look.wait(LIMIT_S)
        if self.devices_error is not None:
            raise self.devices_error
        return ON_CPU

    def check(self, config, begun):
        run = FakeRun(None)
        run.view = run
        begun(run)
        self.checks.append((config, run))
        assert self.may_answer.wait(LIMIT_S)
        return self.found


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr(panels, "Cell", FakeCell)
    monkeypatch.setattr(panels, "_shown", [])
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    CELLS.clear()
    return FakeLauncher()


@pytest.fixture
def show(launcher):
    """Show a panel over a notebook with these cells."""
    made = []

    def show(*cells, looked=True):
        one = Panel(FakeShell(*cells), EntryPoints(launcher.launch, launcher.devices, FakeMonitor, launcher.check))
        made.append(one)
        one._ipython_display_()
        if looked:
            one._looking.join(LIMIT_S)
        return one

    yield show
    launcher.may_look.set()
    launcher.may_answer.set()
    for one in made:
        one.close()


def view(panel):
    return panel._view


def said(panel):
    return html.unescape(re.sub(r"<[^>]*>", "", view(panel).message.value))


def fill(panel, name, held):
    view(panel).form[name].widget.value = held


# --- launching and stopping ------------------------------------------------------------------------------------------


def test_launch_runs_what_the_form_says(show, launcher):
    panel = show(TRAIN)
    fill(panel, "num_epochs()", "5")
    fill(panel, "num_processes", "2")
    view(panel).launch_button.click()
    (run,) = launcher.runs
    assert (run.chosen.function.__name__, run.chosen.kwargs) == ("train", {"num_epochs": 5})
    assert run.chosen.config.num_processes == 2
    assert panel.run is run
    assert panel._shell.user_ns["run"] is run
    assert view(panel).run_box.children == (panel._monitor.widget,)
    assert not panel._monitor.has_stop
    assert view(panel).launch_button.disabled
    assert not view(panel).stop_button.disabled


def test_stop_climbs_the_ladder_and_the_second_time_kills(show, launcher):
    panel = show(TRAIN)
    assert view(panel).stop_button.disabled
    view(panel).launch_button.click()
    (run,) = launcher.runs
    view(panel).stop_button.click()
    assert run.num_stops == 1
    assert view(panel).stop_button.description == "Stop at once"
    view(panel).stop_button.click()
    assert run.num_stops == 2
    run.end("stopped")
    assert view(panel).stop_button.disabled
    assert view(panel).stop_button.description == "Stop"
    assert not view(panel).launch_button.disabled


def test_the_next_launch_takes_the_last_one_s_place(show, launcher):
    panel = show(TRAIN)
    view(panel).launch_button.click()
    first = panel._monitor
    launcher.runs[0].end("finished")
    assert not first.closed
    view(panel).launch_button.click()
    assert first.closed
    assert panel.run is launcher.runs[1]
    assert panel._shell.user_ns["run"] is launcher.runs[1]
    assert view(panel).run_box.children == (panel._monitor.widget,)


def test_a_double_click_launches_once_and_one_run_goes_on_at_a_time(show, launcher):
    panel = show(TRAIN)
    view(panel).launch_button.click()
    view(panel).launch_button.click()
    assert len(launcher.runs) == 1
    assert said(panel) == ""
    with pytest.raises(ConfigError, match="still goes on"):
        panel.launch()
    launcher.runs[0].end("finished")
    view(panel).stop_button.click()
    assert launcher.runs[0].num_stops == 0


def test_a_run_that_is_over_before_it_is_shown(show, launcher):
    launcher.ends_at_once = True
    panel = show(TRAIN)
    view(panel).launch_button.click()
    assert not view(panel).launch_button.disabled
    assert "a run, finished" in CELLS[0].bundle["text/html"]


def test_a_run_may_end_on_another_thread(show, launcher):
    panel = show(TRAIN)
    view(panel).launch_button.click()
    thread = threading.Thread(target=launcher.runs[0].end, args=("failed",))
    thread.start()
    thread.join(LIMIT_S)
    assert not view(panel).launch_button.disabled


# --- checking --------------------------------------------------------------------------------------------------------


def press_check(panel):
    """Press the button, and wait for the answer."""
    view(panel).check_button.click()
    checked(panel)


def checked(panel):
    check = panel._check
    if check is not None:
        check.thread.join(LIMIT_S)
        assert not check.thread.is_alive()


def test_check_tries_out_what_the_form_says_and_answers_in_the_panel(show, launcher, capfd):
    panel = show(TRAIN)
    for name, held in {"num_processes": "3", "mixed_precision": "bf16", "timeout_s": "7", "num_epochs()": "x"}.items():
        fill(panel, name, held)
    press_check(panel)
    ((config, _),) = launcher.checks
    assert (config.num_processes, config.mixed_precision, config.timeout_s) == (3, "bf16", None)
    assert said(panel) == "All is well: 2 processes\n✓ workers: 2 started"
    assert 'role="status"' in view(panel).message.value
    assert launcher.runs == []
    assert "run" not in panel._shell.user_ns
    assert capfd.readouterr() == ("", "")


def test_what_is_wrong_is_announced(show, launcher):
    launcher.found = Preflight("", (Check("fp32", ok=False, text="rank 1: the sum came out as <0>"),))
    panel = show(TRAIN)
    press_check(panel)
    assert said(panel) == "✗ Something is wrong\n✗ fp32: rank 1: the sum came out as <0>"
    assert 'role="alert"' in view(panel).message.value


def test_while_a_check_goes_on_the_kernel_is_free_and_nothing_else_begins(show, launcher):
    launcher.may_answer.clear()
    panel = show(TRAIN)
    view(panel).check_button.click()  # returns at once
    assert said(panel).startswith("Checking 2 processes · CPU (gloo) · fp32 · DDP: ")
    assert 'role="status"' in view(panel).message.value
    assert view(panel).launch_button.disabled
    assert view(panel).check_button.disabled
    view(panel).check_button.click()
    view(panel).launch_button.click()
    with pytest.raises(ConfigError, match="the panel's check still goes on"):
        panel.launch()
    fill(panel, "num_processes", "2")  # the form can be filled in
    launcher.may_answer.set()
    checked(panel)
    assert len(launcher.checks) == 1
    assert launcher.runs == []
    assert not view(panel).launch_button.disabled
    assert not view(panel).check_button.disabled
    assert view(panel).stop_button.disabled


def test_stop_ends_a_check_and_the_second_time_kills(show, launcher):
    launcher.may_answer.clear()
    panel = show(TRAIN)
    view(panel).check_button.click()
    view(panel).stop_button.click()
    assert view(panel).stop_button.description == "Stop at once"
    view(panel).stop_button.click()
    launcher.may_answer.set()
    checked(panel)
    assert launcher.checks[0][1].num_stops == 2
    assert view(panel).stop_button.description == "Stop"


def test_no_check_while_a_run_goes_on(show, launcher):
    panel = show(TRAIN)
    view(panel).launch_button.click()
    assert view(panel).check_button.disabled
    view(panel).check_button.click()
    with pytest.raises(ConfigError, match="the panel's last run still goes on"):
        panel.check()
    launcher.runs[0].end("finished")
    press_check(panel)
    assert len(launcher.checks) == 1
    assert view(panel).run_box.children == (panel._monitor.widget,)  # the run stays to be seen


def test_options_that_can_t_be_are_said_and_nothing_checked(show, launcher):
    panel = show("x = 1")  # without a function it can be checked, too
    fill(panel, "num_processes", "many")
    press_check(panel)
    assert launcher.checks == []
    assert said(panel).startswith("✗ Nothing was checked.\nProcesses: 'many' can't be")
    view(panel).save_button.click()
    assert said(panel).startswith("✗ Nothing was saved.\nProcesses: 'many' can't be")
    fill(panel, "num_processes", "")
    press_check(panel)
    assert len(launcher.checks) == 1


def test_a_panel_that_is_closed_stops_its_check(show, launcher):
    launcher.may_answer.clear()
    panel = show(TRAIN)
    view(panel).check_button.click()
    check = panel._check
    panel._leave()
    launcher.may_answer.set()
    check.thread.join(LIMIT_S)
    assert launcher.checks[0][1].num_stops == 1
    assert panel._view is None


def test_a_check_before_the_machine_is_known(show, launcher):
    launcher.may_look.clear()
    launcher.may_answer.clear()
    panel = show(TRAIN, looked=False)
    view(panel).check_button.click()
    assert said(panel).startswith("Checking: ")


# --- nothing is launched ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "typed", "words"),
    [
        ([TRAIN], {"num_epochs()": "x"}, "num_epochs: 'x' can't be"),
        ([TRAIN], {"lr()": "[", "seed": "-1"}, "Seed: '-1' can't be"),
        ([TRAIN], {"mixed_precision": "fp16"}, "Precision: fp16: not on CPU"),
        (["x = 1"], {}, "Function: The notebook defines no function yet"),
    ],
)
def test_what_can_t_be_is_said_and_nothing_launched(show, launcher, cells, typed, words):
    panel = show(*cells)
    for name, held in typed.items():
        fill(panel, name, held)
    view(panel).launch_button.click()
    assert launcher.runs == []
    assert "Nothing was launched." in said(panel)
    assert words in said(panel)
    assert 'role="alert"' in view(panel).message.value
    assert "run" not in panel._shell.user_ns


def test_an_argument_that_can_t_be_evaluated_is_said_beside_it(show, launcher):
    panel = show("def train(layers=None): ...")
    fill(panel, "layers()", "missing")
    view(panel).launch_button.click()
    assert launcher.runs == []
    assert "NameError" in html.unescape(view(panel).form["layers()"].note.value)


@pytest.mark.parametrize("by_hook", [True, False])
def test_a_function_defined_anew_with_other_arguments(show, launcher, by_hook):
    panel = show(TRAIN)
    again = "def train(steps: int = 1): ..."
    (panel._shell.run if by_hook else panel._shell.notebook.run)(again)
    if not by_hook:  # the press comes before the panel has heard of it
        view(panel).launch_button.click()
        assert launcher.runs == []
        assert "other arguments" in said(panel)
    assert "other arguments" in view(panel).form["function"].note.value
    assert "steps()" in view(panel).form.names
    view(panel).launch_button.click()
    assert launcher.runs[0].chosen.function is panel._shell.user_ns["train"]
    assert view(panel).form["function"].note.value == ""


def test_a_function_that_has_gone(show, launcher):
    panel = show("def other(): ...", TRAIN)
    panel._shell.notebook.run("del train")  # the press comes before the panel has heard of it
    view(panel).launch_button.click()
    assert launcher.runs == []
    assert "no longer defines train" in said(panel)
    assert "no longer defines train" in view(panel).form["function"].note.value
    fill(panel, "function", "other")
    view(panel).launch_button.click()
    assert launcher.runs[0].chosen.function.__name__ == "other"


def test_the_function_that_is_shown_is_launched_whatever_was_defined_meanwhile(show, launcher):
    panel = show(TRAIN)
    panel._shell.notebook.run("def later(): ...")
    view(panel).launch_button.click()
    assert launcher.runs[0].chosen.function.__name__ == "train"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PayloadError("'lock' can't travel"), ["'lock' can't travel"]),
        (EngineError("no workers"), ["no workers"]),
        (ZeroDivisionError("odd"), ["ZeroDivisionError: odd", "Traceback", "line"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt"]),
    ],
)
def test_what_a_callback_raises_is_shown_in_the_panel(show, launcher, error, words, capfd):
    panel = show(TRAIN)
    launcher.error = error
    view(panel).launch_button.click()
    for word in words:
        assert word in said(panel)
    assert not view(panel).launch_button.disabled
    assert capfd.readouterr() == ("", "")
    launcher.error = None
    view(panel).launch_button.click()
    assert said(panel) == ""


def test_a_warning_of_a_launch_is_shown_in_the_panel(show, launcher, capfd):
    launcher.warning = "the launch sends 'data' along, 200 MB"
    panel = show(TRAIN)
    view(panel).launch_button.click()
    assert "200 MB" in said(panel)
    assert "alert" not in view(panel).message.value
    assert capfd.readouterr() == ("", "")


def test_devices_that_can_t_be_told_are_said(show, launcher):
    launcher.devices_error = EngineError("no worker could look")
    panel = show(TRAIN)
    assert "no worker could look" in said(panel)


# --- the form follows the notebook -----------------------------------------------------------------------------------


def test_the_panel_is_there_before_the_machine_is_known(show, launcher):
    launcher.may_look.clear()
    panel = show(TRAIN, looked=False)
    assert "looking at this machine" in CELLS[0].bundle["text/html"]
    launcher.may_look.set()
    panel._looking.join(LIMIT_S)
    assert view(panel).form["device"].widget.options[0] == ("auto (cpu)", "auto")


def test_functions_appear_as_cells_run(show):
    panel = show("x = 1")
    panel._shell.run(TRAIN)
    assert view(panel).form["function"].widget.value == "train"
    panel._shell.run("def later(): ...")
    assert view(panel).form["function"].widget.value == "later"


def test_closing_leaves_nothing_in_the_shell(show):
    panel = show(TRAIN)
    assert panel._shell.events.after_cell
    panel.close()
    panel.close()
    assert panel._shell.events.callbacks == {"pre_run_cell": [], "post_run_cell": []}


def test_closing_leaves_no_widgets(show):
    before = num_widgets()
    panel = show(TRAIN)
    view(panel).launch_button.click()
    kept = panel._monitor
    panel.close()
    kept.widget.layout.close()
    kept.widget.style.close()
    kept.widget.close()
    assert kept.closed
    assert num_widgets() == before


# --- code and configuration ------------------------------------------------------------------------------------------


def test_the_code_is_shown_to_be_copied_and_hidden_again(show):
    panel = show(TRAIN)
    fill(panel, "num_processes", "2")
    view(panel).code_button.click()
    one, two = (area.value for area in view(panel).code_texts)
    assert one.endswith("run = launch(train, num_processes=2)")
    assert "config = LaunchConfig(num_processes=2)" in two
    assert view(panel)._code_box.layout.display == ""
    view(panel).code_button.click()
    assert view(panel)._code_box.layout.display == "none"


def test_code_of_what_can_t_be_launched_is_refused(show):
    panel = show(TRAIN)
    fill(panel, "num_epochs()", "x")
    view(panel).code_button.click()
    assert "num_epochs" in said(panel)
    assert view(panel)._code_box.layout.display == "none"


def test_a_configuration_is_saved_and_loaded(show, tmp_path, capfd):
    panel = show(TRAIN)
    view(panel).path.value = str(tmp_path / "c.yaml")
    fill(panel, "num_processes", "3")
    fill(panel, "mixed_precision", "bf16")
    view(panel).save_button.click()
    assert f"Saved to {tmp_path}/c.yaml" in said(panel)
    fill(panel, "num_processes", "1")
    view(panel).load_button.click()
    assert f"Loaded from {tmp_path}/c.yaml" in said(panel)
    assert view(panel).form["num_processes"].widget.value == "3"
    (tmp_path / "c.yaml").write_text("mixed_precision: fp8")
    view(panel).load_button.click()
    assert "fp8" in said(panel)
    assert view(panel).form["mixed_precision"].widget.value == "bf16"
    (tmp_path / "c.yaml").write_text("num_processes: 2\ncommands: [ls]")
    view(panel).load_button.click()
    assert "without a meaning here" in said(panel)  # said here, not printed somewhere
    assert "commands" in said(panel)
    assert "alert" not in view(panel).message.value
    assert view(panel).form["num_processes"].widget.value == "2"
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_not_there_is_said(show, tmp_path):
    panel = show(TRAIN)
    view(panel).path.value = str(tmp_path / "none.yaml")
    view(panel).load_button.click()
    assert "there is no configuration file" in said(panel)
    view(panel).path.value = str(tmp_path / "folder" / "c.yaml")
    view(panel).save_button.click()
    assert "can't be written" in said(panel)


def test_a_config_is_saved_over_nothing_but_a_config(show, tmp_path):
    panel = show(TRAIN)
    for name, words in (
        ("", "no file is named"),
        ("folder", "can't be written"),
        ("train.py", "would be lost"),
        ("old.yml", "Saved"),
    ):
        (tmp_path / "folder").mkdir(exist_ok=True)
        for file in ("train.py", "old.yml"):
            (tmp_path / file).write_text("mine")
        view(panel).path.value = str(tmp_path / name) if name else " "
        view(panel).save_button.click()
        assert words in said(panel)
        assert (tmp_path / "train.py").read_text() == "mine"
    view(panel).path.value = ""
    view(panel).load_button.click()
    assert "no file is named" in said(panel)


# --- what a saved notebook keeps -------------------------------------------------------------------------------------


def test_the_panel_is_a_widget_with_a_static_form_beside_it(show):
    panel = show(TRAIN)
    bundle = CELLS[0].bundle
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view(panel).box.model_id
    assert "num_epochs" in bundle["text/html"]
    assert "num_epochs: 3" in bundle["text/plain"]


def test_the_static_form_shows_the_finished_run(show, launcher):
    panel = show(TRAIN)
    fill(panel, "num_processes", "2")
    view(panel).launch_button.click()
    before = CELLS[0].num_updates
    launcher.runs[0].end("finished")
    assert CELLS[0].num_updates == before + 1
    page = CELLS[0].bundle["text/html"]
    assert "<p>a run, finished</p>" in page
    assert "2 processes · CPU (gloo) · fp32 · DDP" in page


def test_in_jupyterlab_the_run_is_stored_below_the_panel_which_is_not_drawn_anew(show, launcher, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "a notebook")
    panel = show(TRAIN)
    (drawn, stored) = CELLS[0].bundles.values()
    assert "run this cell" in stored["text/html"]  # where JupyterLab can draw nothing but "Loading widget..."
    view(panel).launch_button.click()
    (_, stored) = CELLS[0].bundles.values()
    assert "A run was going on when this was stored" in stored["text/html"]
    launcher.runs[0].end("finished")
    (still_drawn, stored) = CELLS[0].bundles.values()
    assert still_drawn is drawn
    assert "<p>a run, finished</p>" in stored["text/html"]
    assert "widget" not in "".join(stored)


def test_what_was_chosen_is_stored_when_a_cell_has_run(show):
    panel = show(TRAIN)
    panel._shell.run("x = 1")
    stored = CELLS[0].num_updates
    fill(panel, "num_processes", "3")
    assert CELLS[0].num_updates == stored  # a front end would draw the panel anew under the person's hands
    panel._shell.run("x = 2")
    assert CELLS[0].num_updates == stored + 1
    assert "3 processes" in CELLS[0].bundle["text/html"]
    panel._shell.run("x = 3")
    assert CELLS[0].num_updates == stored + 1


def test_a_panel_that_is_displayed_twice_is_one_panel(show, launcher):
    panel = show(TRAIN)
    panel._ipython_display_()
    ids = {cell.bundle["application/vnd.jupyter.widget-view+json"]["model_id"] for cell in CELLS}
    assert len(CELLS) == 2
    assert len(ids) == 1
    view(panel).launch_button.click()
    launcher.runs[0].end("finished")
    assert all("a run, finished" in cell.bundle["text/html"] for cell in CELLS)
    assert len(panel._shell.events.after_cell) == 2  # the panel, and the hint of a cell that runs


def test_a_cell_that_is_run_again_closes_the_panel_that_it_has_shown(show, launcher, monkeypatch):
    elsewhere = show(TRAIN)
    monkeypatch.setattr(FakeCell, "number", 7)
    first = show(TRAIN)
    view(first).launch_button.click()
    second = show(TRAIN)
    assert first._view is None
    assert first._monitor.closed
    assert launcher.runs[0].status == "running"
    assert elsewhere._view is not None
    assert panels.latest() is second
    monkeypatch.setattr(FakeCell, "number", 8)
    second._ipython_display_()
    monkeypatch.setattr(FakeCell, "number", 7)
    show(TRAIN)
    assert second._view is not None  # it is in another cell too


def test_without_a_front_end_the_static_form_alone_is_shown(launcher, monkeypatch):
    monkeypatch.delenv("VOILA_BASE_URL", raising=False)
    shell = FakeShell(TRAIN)
    shell.kernel._allow_stdin = False
    panel = Panel(shell, EntryPoints(launcher.launch, launcher.devices, FakeMonitor, launcher.check))
    panel._ipython_display_()
    assert set(CELLS[0].bundle) == {"text/html", "text/plain"}
    assert "2 processes · CPU (gloo)" in CELLS[0].bundle["text/html"]
    assert CELLS[0].closed
    assert panel._view is None
    assert not has_front_end(object())
    monkeypatch.setenv("VOILA_BASE_URL", "/")
    assert has_front_end(shell)


def test_what_the_notebook_holds_is_escaped(show):
    panel = show("def train(tag: str = '<script>alert(1)</script>'): ...")
    assert "<script>" not in CELLS[0].bundle["text/html"]
    fill(panel, "num_processes", "<img onerror=x>")
    view(panel).launch_button.click()
    assert "<img" not in view(panel).message.value
    assert "<img" not in view(panel).form["num_processes"].note.value


def test_the_latest_panel_gives_its_code(show):
    assert panels.latest() is None
    first = show(TRAIN)
    second = show("def other(): ...")
    assert panels.latest() is second
    assert "launch(other)" in panels.latest().code()[0]
    first._ipython_display_()
    assert panels.latest() is first
