import subprocess
import sys

import pytest
from IPython.core.error import UsageError
from IPython.utils.capture import capture_output

from notebook_launcher.core.errors import ConfigError, PayloadError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.kernel_ext import magics
from notebook_launcher.launcher.past_runs import RunFacts


def usage(shell, *arguments):
    run = shell.run_line_magic if len(arguments) == 1 else shell.run_cell_magic
    with pytest.raises(UsageError) as caught:
        run("launch", *arguments)
    return str(caught.value)


# --- %launch ---------------------------------------------------------------------------------------------------------


def test_a_call_is_launched_and_its_run_given_back(shell, launcher):
    run = shell.run_line_magic("launch", "-n 4 --mixed-precision bf16 train(3, lr=1e-3)")
    assert run is launcher.runs[0]
    assert (run.payload["source"], run.payload["name"]) == ("train(3, lr=1e-3)", "train")
    assert run.payload["namespace"] is shell.user_ns
    assert (run.config.num_processes, run.config.mixed_precision, run.wait) == (4, "bf16", True)
    assert run.config.sources == {"num_processes": "argument", "mixed_precision": "argument"}


def test_background_does_not_wait(shell, launcher):
    assert shell.run_line_magic("launch", "--background train(3)").wait is False


def test_a_monitor_is_asked_for_by_an_option(shell, launcher):
    shell.run_line_magic("launch", "train(3)")
    assert launcher.has_monitor is False
    shell.run_line_magic("launch", "--monitor -n 2 train(3)")
    assert launcher.has_monitor is True


def test_runs_are_shown_as_a_table(shell, launcher):
    launcher.facts = [RunFacts(1, "train", "finished", "2 processes", (), 0.0, 1.0, "finished in 1.0 s", {"loss": 0.5})]
    with capture_output(stdout=False, stderr=False) as captured:
        shell.run_line_magic("launcher", "runs")
    (output,) = captured.outputs
    assert "<table" in output.data["text/html"]
    assert "loss 0.5" in output.data["text/plain"]


def test_assignment_and_save(shell, launcher):
    assert shell.run_cell("run = %launch -n 3 --save values train(3)").success
    assert shell.user_ns["run"] is launcher.runs[0]
    assert shell.user_ns["values"] == ["rank 0", "rank 1", "rank 2"]


def test_braces_in_the_call_stay_and_in_an_option_are_filled_in(shell, launcher):
    shell.user_ns["n"] = 3
    run = shell.run_line_magic("launch", "-n {n} train({n})")
    assert (run.config.num_processes, run.payload["source"]) == (3, "train({n})")
    assert "{m}" in usage(shell, "-n {m} train(1)")


def test_a_config_file(shell, launcher, tmp_path):
    (tmp_path / "c.yaml").write_text("num_processes: 3\nmixed_precision: bf16\n")
    run = shell.run_line_magic("launch", f"--config {tmp_path}/c.yaml -n 4 train(3)")
    assert (run.config.num_processes, run.config.mixed_precision) == (4, "bf16")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["%launch needs a call, such as", "no call was given"]),
        ("-n 2", ["no call was given"]),
        ("train", ["'train' is none", "Did you mean train()?"]),
        ("3 + 4", ["needs a call", "'3 + 4' is none"]),
        ("train(3", ["can't read 'train(3'", "%%launch"]),
        ("trian(3)", ["'trian'", "Did you mean 'train'?"]),
        ("train()", ["can't be called with ()", "train(epochs, lr=0.1)", "missing a required argument: 'epochs'"]),
        ("train(3, rl=1)", ["train(epochs, lr=0.1)", "unexpected keyword argument 'rl'"]),
        ("train(1, 2, 3)", ["train(epochs, lr=0.1)", "too many positional arguments"]),
        ("train(*a, rl=1)", ["unexpected keyword argument 'rl'"]),
        ("number(3)", ["number, which is a int"]),
        ("-n 0 train(3)", ["num_processes='0'", "from 1 to 1024"]),
        ("-n 2 --precision bf16 train(3)", ["option '--precision' is not known"]),
        ("-d cpu -p fp16 train(3)", ["fp16", "bf16", "cpu"]),
        ("train('refuse')", ["'refuse' can't travel"]),
    ],
)
def test_mistakes_are_told_before_anything_starts(shell, launcher, line, words):
    shell.user_ns["number"] = 3
    text = usage(shell, line)
    for word in words:
        assert word in text
    assert launcher.runs == []


@pytest.mark.parametrize(
    "call", ["train(*a)", "train(**k)", "train(1, *a, lr=1)", "Box().fit(1)", "print(3)", "Box.make(3)", "max(1, 2)"]
)
def test_calls_that_only_the_workers_can_judge_pass(shell, launcher, call):
    shell.run_cell(
        "class Box:\n    def fit(self): ...\n    @property\n    def made(self): raise SystemExit\n"
        "    @classmethod\n    def make(cls, a): ...\n",
        silent=True,
    )
    assert shell.run_line_magic("launch", call).payload["source"] == call


def test_methods_are_checked_and_properties_are_not_run(shell, launcher):
    shell.run_cell(
        "class Box:\n    def fit(self, x): ...\n    @property\n    def made(self): raise SystemExit\nbox = Box()",
        silent=True,
    )
    assert "Box.fit(x)" in usage(shell, "box.fit()")
    assert shell.run_line_magic("launch", "box.made(1)").payload["name"] == "box.made"


def test_a_mistake_is_one_line_in_the_cell(shell, launcher, capsys):
    result = shell.run_cell("%launch -n 0 train(3)")
    assert isinstance(result.error_in_exec, UsageError)
    out, err = capsys.readouterr()
    assert (out + err).strip().startswith("UsageError: num_processes='0' can't be")
    assert len((out + err).strip().splitlines()) == 1


# --- %%launch --------------------------------------------------------------------------------------------------------


def test_a_cell_travels_with_its_line_numbers(shell, launcher):
    run = shell.run_cell_magic("launch", "-n 2 --save out", "\n\nx = 1\n1 / 0\n")
    lines = run.payload["source"].splitlines()
    assert lines[0] == "# %%launch -n 2 --save out"
    assert lines[4] == "1 / 0"  # the cell's fifth line, as the notebook counts
    assert run.payload["name"] == "cell"
    assert shell.user_ns["out"] == ["rank 0", "rank 1"]


def test_a_cell_may_hold_ipython_s_syntax_and_await(shell, launcher):
    run = shell.run_cell_magic("launch", "", "!ls\nimport asyncio\nawait asyncio.sleep(0)\n")
    assert "get_ipython().system('ls')" in run.payload["source"]


def test_an_indented_cell_is_python(shell, launcher):
    run = shell.run_cell_magic("launch", "", "    x = 1\n    x\n")
    assert run.payload["source"].splitlines()[1:] == ["x = 1", "x"]


def test_a_syntax_error_shows_the_cell_s_line(shell, launcher, capsys):
    result = shell.run_cell("%%launch -n 2\nx = 1\ny = = 2\n")
    assert not result.success
    told = "".join(capsys.readouterr()).strip().splitlines()
    assert "line 3" in told[0]
    assert [line.strip() for line in told[1:]] == ["y = = 2", "^", "SyntaxError: invalid syntax"]
    assert launcher.runs == []


@pytest.mark.parametrize("error", [ConfigError("a rank's own"), PayloadError("a rank's own")])
def test_a_rank_s_own_error_keeps_its_type_and_traceback(shell, launcher, error):
    launcher.error = error
    with pytest.raises(type(error), match="a rank's own") as caught:
        shell.run_line_magic("launch", "train(3)")
    assert caught.value.run.payload["name"] == "train"


@pytest.mark.parametrize("counts_early", [True, False])
def test_places_are_numbered_as_the_running_cell(shell, launcher, counts_early, monkeypatch):
    # IPython 9 counts a cell when it begins to run, earlier ones when it has ended.
    hook = type(shell.displayhook)
    monkeypatch.setattr(hook, "prompt_count", property(lambda hook: hook.shell.execution_count - counts_early))
    monkeypatch.setattr(shell, "execution_count", 7 + counts_early)
    monkeypatch.setattr(shell.compile, "_filename_map", {}, raising=False)
    monkeypatch.setattr(shell.compile, "cache", lambda _source, number: f"cell {number}")
    assert shell.run_line_magic("launch", "train(3)").payload["filename"] == "cell 7"
    monkeypatch.delattr(shell.compile, "_filename_map")
    assert shell.run_line_magic("launch", "train(4)").payload["filename"] == "Cell In[7]"


def test_a_call_has_its_line_in_the_cell(shell, launcher):
    shell.run_cell("x = 1\n\nif x:\n    run = %launch train(3)")
    assert launcher.runs[0].payload["source"] == "\n\n\ntrain(3)"


def test_python_in_the_magic_s_own_line_is_refused(shell, launcher):
    assert "'train(3)' was left over" in usage(shell, "-n 2 train(3)", "x = 1")


# --- %launcher and -h ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("magic", "line"), [("launch", "-h"), ("launch", "-n 2 --help"), ("launcher", "-h"), ("launcher", "--help")]
)
def test_help(shell, launcher, capsys, magic, line):
    assert shell.run_line_magic(magic, line) is None
    out = capsys.readouterr().out
    expected = ("--num-processes", "{no,fp16,bf16}", "%%launch") if magic == "launch" else ("devices", "status", "stop")
    assert all(word in out for word in expected)
    assert launcher.runs == []


def test_alone_it_shows_the_panel(shell, launcher, capsys):
    assert shell.run_line_magic("launcher", "") is None
    assert capsys.readouterr().out == "the panel\n"


def test_code_of_no_panel_is_refused(shell, launcher, monkeypatch):
    from notebook_launcher.widgets import panel

    monkeypatch.setattr(panel, "_shown", [])
    with pytest.raises(UsageError, match="no panel is shown: run %launcher"):
        shell.run_line_magic("launcher", "code")


def test_code_of_a_panel_goes_into_a_new_cell(shell, launcher, monkeypatch):
    from notebook_launcher.widgets import panel
    from notebook_launcher.widgets.form_model import FormError

    class Shown:
        def code(self):
            if cells:
                raise FormError({"function": "train has gone"})
            return "run = launch(train)", "..."

    shown, cells = Shown(), []
    monkeypatch.setattr(panel, "latest", lambda: shown)
    monkeypatch.setattr(shell, "set_next_input", cells.append)
    shell.run_line_magic("launcher", "code")
    assert cells == ["run = launch(train)"]
    with pytest.raises(UsageError, match="train has gone"):
        shell.run_line_magic("launcher", "code")


def test_help_of_the_cell_magic(shell, launcher, capsys):
    shell.run_cell_magic("launch", "-h", "\n")
    assert "--num-processes" in capsys.readouterr().out


def test_devices(shell, launcher, capsys):
    launcher.rows = (*launcher.rows, DeviceRow("xpu", 2, ("Max", "Max"), (2**34, 2**34), {"no": "", "bf16": ""}))
    shell.run_line_magic("launcher", "devices")
    assert capsys.readouterr().out.splitlines() == [
        "device  name     memory    precisions",
        "cpu     8 cores            fp32, bf16",
        "xpu:0   Max      16.0 GiB  fp32, bf16",
        "xpu:1   Max      16.0 GiB  fp32, bf16",
        "",
        "cpu: no fp16: a cpu emulates it",
        "cuda: not here: this build of torch has no CUDA",
        "",
        "auto takes xpu: 2 processes, one a device",
    ]


def test_check(shell, launcher, capsys):
    launcher.finding = "preflight: all is well"
    shell.run_line_magic("launcher", "check")
    assert capsys.readouterr().out == "preflight: all is well\n"


def test_status_and_stop(shell, launcher, capsys):
    shell.run_line_magic("launcher", "status")
    assert "no run yet" in capsys.readouterr().out
    shell.run_line_magic("launch", "train(1)")
    shell.run_line_magic("launch", "--background train(2)")
    shell.run_line_magic("launcher", "status")
    assert capsys.readouterr().out.splitlines() == ["<train finished>", "<train running>"]
    shell.run_line_magic("launcher", "stop")
    assert capsys.readouterr().out.splitlines() == ["asked 1 run to stop:", "<train stopped>"]
    assert [run.status for run in launcher.runs] == ["finished", "stopped"]
    shell.run_line_magic("launcher", "stop")
    assert "no run is going on" in capsys.readouterr().out


def test_a_run_that_does_not_stop_is_told(shell, launcher, capsys, monkeypatch):
    monkeypatch.setattr(magics, "_STOP_WAIT_S", 0.1)
    for _ in range(2):
        shell.run_line_magic("launch", "--background train(2)").deaf = True
    shell.run_line_magic("launcher", "stop")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["asked 2 runs to stop:", "<train stopping>", "<train stopping>"]
    assert "once more kills" in lines[3]
    shell.run_line_magic("launcher", "stop")
    assert capsys.readouterr().out.splitlines()[1:] == ["<train stopped>"] * 2


def test_an_unknown_command(shell, launcher):
    with pytest.raises(UsageError, match="Did you mean 'status'"):
        shell.run_line_magic("launcher", "stats")


# --- loading ---------------------------------------------------------------------------------------------------------

LOADING = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config(); config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
from notebook_launcher import kernel_ext
from notebook_launcher.launcher import warm
warm.get_ready = lambda: print("server started")
kernel_ext.load_ipython_extension(shell)
heavy = {"torch", "pydantic", "yaml"} & set(sys.modules)
print("heavy:", *sorted(heavy))
print("magics:", {"launch", "launcher"} <= set(shell.magics_manager.magics["line"]))
kernel_ext.unload_ipython_extension(shell)
kernel_ext.unload_ipython_extension(shell)
kinds = shell.magics_manager.magics
print("left:", *({"launch", "launcher"} & {*kinds["line"], *kinds["cell"]}))
"""


def test_loading_starts_the_server_and_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LOADING], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["server started", "heavy:", "magics: True", "left:"]
