"""The panel in a real kernel: what a front end gets, and what happens when it sends a person's clicks back."""

from __future__ import annotations

import time

import pytest

WIDGET = "application/vnd.jupyter.widget-view+json"
TRAIN = """
def train(num_epochs: int = 3, folder: str = "."):
    rank = os.environ["RANK"]
    for epoch in range(num_epochs):
        print(f"epoch {epoch} on rank {rank}", flush=True)
        time.sleep(0.05)
    return num_epochs * 10 + int(rank)
"""
LIMIT_S = 60


class Page:
    """As much of a front end as presses buttons and fills in fields."""

    def __init__(self, kernel):
        self.kernel = kernel
        kernel.ok("from notebook_launcher.widgets.panel import latest")

    def ask(self, expression):
        return self.kernel.ok(f"print({expression})").stdout.strip()

    def _send(self, widget, data):
        comm_id = self.ask(f"latest()._view.{widget}.model_id")
        message = self.kernel.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        self.kernel.client.shell_channel.send(message)

    def click(self, button):
        self._send(button, {"method": "custom", "content": {"event": "click"}})

    def fill(self, name, state):
        data = {"method": "update", "state": state, "buffer_paths": []}
        self._send(f"form[{name!r}].widget", data)

    def until(self, expression, wanted):
        deadline_s = time.monotonic() + LIMIT_S
        while (found := self.ask(expression)) != wanted:
            assert time.monotonic() < deadline_s, f"{expression} is still {found}, not {wanted}"


@pytest.fixture
def page(shared_kernel):
    shared_kernel.ok(TRAIN)
    shown = shared_kernel.ok("%launcher")
    (bundle,) = shown.displays
    assert set(bundle) == {WIDGET, "text/html", "text/plain"}
    assert "train" in bundle["text/html"]
    yield Page(shared_kernel)
    shared_kernel.ok("latest().close(); globals().pop('run', None); del train")


def test_a_run_from_the_form_while_other_cells_run(page):
    page.until("latest()._looking.is_alive()", "False")
    page.fill("num_processes", {"value": "2"})
    page.fill("num_epochs()", {"value": "2"})
    page.fill("mixed_precision", {"index": 3})
    page.until("latest()._view.form['mixed_precision'].widget.value", "bf16")
    page.click("launch_button")
    page.until("'run' in dir()", "True")
    assert page.ask("1 + 1") == "2"
    assert page.ask("run.results") == "[20, 21]"
    assert page.ask("run.config") == "LaunchConfig(num_processes=2, mixed_precision='bf16')"
    page.until("latest()._view.launch_button.disabled", "False")
    assert page.ask("'epoch 1 on rank 1' in latest()._bundle()['text/html']") == "True"


def test_stop_from_the_panel(page):
    page.fill("num_epochs()", {"value": "100000"})
    page.click("launch_button")
    page.until("'run' in dir() and 'epoch 1' in run.logs(0)", "True")
    page.click("stop_button")
    page.until("run.status", "stopped")
    page.until("latest()._view.stop_button.disabled", "True")


def test_a_field_that_can_t_be_launches_nothing_and_prints_nothing(page):
    page.fill("num_epochs()", {"value": "x"})
    page.click("launch_button")
    page.until("'Nothing was launched' in latest()._view.message.value", "True")
    assert page.ask("'run' in dir()") == "False"


def test_a_cell_that_is_run_again_closes_the_panel_that_it_has_shown(page):
    page.kernel.ok("from notebook_launcher.widgets import panel as panels")
    still_open = "[p for p in (one() for one in panels._shown) if p is not None and p._view is not None]"
    before = int(page.ask(f"len({still_open})"))
    for cell in ("a", "a", "b", "a"):
        page.kernel.run_as_cell("%launcher", cell)
    assert int(page.ask(f"len({still_open})")) == before + 2
    page.kernel.ok(f"for p in {still_open}[-2:-1]: p.close()")  # the fixture closes the last


def test_code_in_a_new_cell_gives_the_same_results(page):
    page.fill("num_processes", {"value": "1"})
    page.fill("num_epochs()", {"value": "1"})
    reply = page.kernel.client.execute("%launcher code", reply=True, timeout=LIMIT_S)
    (payload,) = reply["content"]["payload"]
    assert payload["source"] == "set_next_input"
    assert page.kernel.ok(payload["text"])
    assert page.ask("run.results") == "[10]"


@pytest.mark.slow
def test_without_a_front_end_the_panel_is_its_static_form(tmp_path):
    import nbformat  # not above: it takes seconds, also where nothing of this file is run
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook()
    cells = [
        "%load_ext notebook_launcher\nimport os, time\n" + TRAIN,
        "%launcher",
        "import notebook_launcher\nnotebook_launcher.panel()",
    ]
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    NotebookClient(
        book, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for cell in book.cells[1:]:
        (output,) = cell.outputs
        assert set(output["data"]) == {"text/html", "text/plain"}
        assert "num_epochs" in output["data"]["text/html"]
        assert "2 processes · CPU (gloo) · fp32 · DDP" in output["data"]["text/plain"]
    assert not book.metadata.get("widgets")
