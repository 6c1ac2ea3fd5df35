"""Use the panel as a person does, by the messages that a front end sends, and check what comes back.

No browser is needed, so that it runs with every version of ipywidgets: it is one of the checks of the oldest supported
ones. Starts a kernel of the environment that it runs in; needs jupyter_client.
"""

from __future__ import annotations

import html
import importlib.metadata
import queue
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import IPython
import ipywidgets  # type: ignore[import-untyped]
from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERSION = importlib.metadata.version("ipykernel")
LIMIT_S = 60  # for anything to appear
VIEW = "application/vnd.jupyter.widget-view+json"
REFERENCE = "IPY_MODEL_"
SETUP = """\
%load_ext notebook_launcher
import os, sys, time
from notebook_launcher import Accelerator, LaunchConfig, launch, monitor
def train(num_steps: int = 5, lr: float = 0.1):
    accelerator = Accelerator()
    for step in accelerator.progress(range(num_steps)):
        accelerator.log({"loss": 1 / (1 + step)}, step=step)
        print(f"step {step} on rank {accelerator.process_index}")
        time.sleep(0.05)
    return lr * (1 + accelerator.process_index)
def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("bad <b>batch</b>")
    time.sleep(60)
"""
FAILING_LINE = 1 + SETUP.split("\n").index('        raise ValueError("bad <b>batch</b>")')
POINTS = re.compile(r'<polyline points="([^"]*)"')


class Page:
    """A front end without a screen: the widgets that the kernel has made, and each cell's displays."""

    def __init__(self, folder: Path) -> None:
        """Start a kernel, and wait until it answers."""
        # Over TCP a kernel warns that others can listen; the sockets lie beside this file.
        self._manager = KernelManager(
            kernel_name="python3", transport="ipc", connection_file=str(folder / "kernel.json")
        )
        self._manager.start_kernel(extra_arguments=["--HistoryManager.enabled=False"])
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT_S)
        self.widgets: dict[str, dict[str, Any]] = {}  # state by model
        self._displays: dict[str, dict[str, Any]] = {}  # bundle by display id
        self._printed: dict[str, str] = {}  # by the message that asked
        self._shown: dict[str, list[str]] = {}  # display ids by the message that asked
        self._idle: set[str] = set()

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def run(self, code: str) -> str:
        """Run a cell to its end; returns the message that asked for it."""
        return self.until_idle(self.start(code))

    def start(self, code: str) -> str:
        """Run a cell without waiting for its end; returns the message that asked for it."""
        return str(self._client.execute(code))

    def until_idle(self, asked: str) -> str:
        """Wait for a cell's end; returns the message that asked for it."""
        self.until(lambda: asked in self._idle, "the end of a cell")
        return asked

    def printed(self, code: str) -> str:
        """What a cell prints."""
        return self._printed.get(self.run(code), "").strip()

    def displays(self, asked: str) -> list[dict[str, Any]]:
        """The bundles of the cell that this message asked for, as they are now."""
        return [self._displays[name] for name in self._shown.get(asked, [])]

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Take in messages until ``condition`` holds; leave with an error where it does not come to that."""
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                sys.exit(f"FAILED: waited {LIMIT_S} s for {what}. The page:\n{self._text()}")
            try:
                message = self._client.get_iopub_msg(timeout=min(left_s, 1))
            except queue.Empty:
                if not self._manager.is_alive():
                    sys.exit(f"FAILED: the kernel has died while waiting for {what}. The page:\n{self._text()}")
            else:
                self._take(message["msg_type"], message["content"], str(message["parent_header"].get("msg_id")))

    def send(self, model: str, data: dict[str, Any]) -> None:
        """Tell the kernel what a person did to a widget."""
        message = self._client.session.msg("comm_msg", {"comm_id": model, "data": data})
        self._client.shell_channel.send(message)

    def _take(self, kind: str, content: dict[str, Any], asked: str) -> None:
        if kind == "comm_open" and content["target_name"] == "jupyter.widget":
            self.widgets[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.widgets[content["comm_id"]].update(content["data"]["state"])
        elif kind == "comm_close":
            self.widgets.pop(content["comm_id"], None)
        elif kind in ("display_data", "update_display_data"):
            name = content["transient"].get("display_id") or f"unnamed {len(self._displays)}"
            self._displays[name] = content["data"]
            if kind == "display_data":
                self._shown.setdefault(asked, []).append(name)
        elif kind == "stream":
            self._printed[asked] = self._printed.get(asked, "") + content["text"]
        elif kind == "error":
            sys.exit("FAILED: a cell has raised:\n" + "\n".join(content["traceback"]))
        elif kind == "status" and content["execution_state"] == "idle":
            self._idle.add(asked)

    def _text(self) -> str:
        values = (str(state.get("value", "")) for state in self.widgets.values())
        return "\n".join(filter(None, map(plain, values)))


class Shown:
    """What a widget and all that lies in it show."""

    def __init__(self, page: Page, bundle: dict[str, Any]) -> None:
        """The widget of a display's ``bundle``."""
        self._page = page
        self._root = bundle[VIEW]["model_id"]

    @property
    def html(self) -> str:
        """All values that are not folded away."""
        return "\n".join(str(state.get("value", "")) for _, state in self._parts(self._root))

    @property
    def text(self) -> str:
        """The same as a person reads it."""
        return plain(self.html)

    def sees(self, *texts: str) -> None:
        """Wait until all of these can be read."""
        for text in texts:
            self._page.until(lambda text=text: text in self.text, f"{text!r}")  # type: ignore[misc]

    def num_points(self) -> list[int]:
        """How many points each curve has."""
        return [len(points.split(" ")) for points in POINTS.findall(self.html)]

    def fill(self, label: str, text: str) -> None:
        """Fill in a field."""
        model, _ = self._control(label)
        self._update(model, value=text)

    def choose(self, label: str, choice: str) -> None:
        """Choose from a list."""
        model, state = self._control(label, lambda state: choice in state["_options_labels"])
        self._update(model, index=list(state["_options_labels"]).index(choice))

    def press(self, label: str) -> None:
        """Press a button, as soon as it can be pressed."""
        model, _ = self._control(label, lambda state: not state["disabled"])
        self._page.send(model, {"method": "custom", "content": {"event": "click"}})

    def values(self, model_name: str) -> list[str]:
        """The values of all widgets of this kind."""
        return [state["value"] for _, state in self._parts(self._root) if state["_model_name"] == model_name]

    def _control(
        self, label: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> tuple[str, dict[str, Any]]:
        """The model and state of the first control of this label, once it is there and fits."""

        def found() -> list[tuple[str, dict[str, Any]]]:
            return [part for part in self._parts(self._root) if part[1].get("description") == label and fits(part[1])]

        self._page.until(found, f"the control {label!r}")
        return found()[0]

    def _update(self, model: str, **state: object) -> None:
        self._page.widgets[model].update(state)
        self._page.send(model, {"method": "update", "state": state, "buffer_paths": []})

    def _parts(self, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self._page.widgets.get(model, {})
        layout = self._page.widgets.get(str(state.get("layout", "")).removeprefix(REFERENCE), {})
        if not state or layout.get("display") == "none":
            return
        yield model, state
        for child in state.get("children", ()):
            yield from self._parts(child.removeprefix(REFERENCE))


def plain(page: str) -> str:
    """HTML as text."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def check(holds: object, what: str) -> None:
    """Leave with an error where something does not hold."""
    if not holds:
        sys.exit(f"FAILED: {what}")


# --- what a person does -----------------------------------------------------------------------------------------------


def check_the_machine(page: Page, panel: Shown) -> None:
    """The processes are tried out while the kernel is free; the answer is in words, and leaves no widgets."""
    panel.sees("2 processes · CPU (gloo)")
    num_widgets = len(page.widgets)
    panel.press("Check")
    panel.sees("Checking 2 processes · CPU (gloo)")
    check(page.printed("print(6 * 7)") == "42", "another cell runs while a check goes on")
    panel.sees("All is well: 2 processes · CPU (gloo)", "✓ workers: 2 started", "✓ bf16: ", "✓ all-reduce: latency")
    check(len(page.widgets) == num_widgets, "a check leaves no widgets")


def launch_and_stop(page: Page, panel: Shown) -> None:
    """A run from the form is watched, another cell runs, and the run is stopped."""
    panel.sees("2 processes · CPU (gloo)")
    panel.choose("Function", "train")
    panel.fill("num_steps", "10000")
    panel.fill("Processes", "2")
    panel.choose("Precision", "bf16")
    panel.sees("2 processes · CPU (gloo) · bf16 · DDP")
    panel.press("Launch")
    panel.sees("step 3 on rank 0", "step 3 on rank 1", "▸ running")
    page.until(panel.num_points, "a curve")
    before = max(panel.num_points())
    page.until(lambda: max(panel.num_points(), default=0) > before + 2, "the curve to grow")
    check(page.printed("print(6 * 7, run.status)") == "42 running", "another cell runs while the run goes on")
    with tempfile.TemporaryDirectory() as folder:
        busy = page.start(f"while not os.path.exists({folder!r} + '/go'): time.sleep(0.05)")
        before = max(panel.num_points())
        page.until(lambda: max(panel.num_points(), default=0) > before + 5, "the curve to grow while a cell runs")
        if not VERSION.startswith(("7.0.", "7.1.", "7.2.", "7.3.")):  # these hear it at once, others after the cell
            panel.sees("A cell is running")
        panel.press("Stop")
        (Path(folder) / "go").touch()
        page.until_idle(busy)
    panel.sees("■ stopped")
    check(page.printed("run.wait(); print(run.status)") == "stopped", "the run has been stopped")


def see_an_error(page: Page, panel: Shown) -> None:
    """An error is shown by the notebook's own line."""
    panel.choose("Function", "fail")
    panel.press("Launch")
    has_names = IPython.version_info >= (8,)  # before, no file had a cell's name
    place = f"Cell In[1], line {FAILING_LINE}" if has_names else f"line {FAILING_LINE}"
    panel.sees('raise ValueError("bad <b>batch</b>")', place)
    panel.sees("rank 1 of 2 raised ValueError: bad <b>batch</b>", "✗ failed · 2 processes")
    check("<b>batch</b>" not in panel.html, "an error's text is escaped")
    check(page.printed("print(run.status)") == "failed", "the run has failed")


def copy_as_code(page: Page, panel: Shown) -> None:
    """The code that the panel shows gives the same results."""
    panel.choose("Function", "train")
    panel.fill("num_steps", "4")
    panel.fill("lr", "0.5")
    panel.press("Launch")
    panel.sees("✓ finished", "step 3 on rank 1")
    first = page.printed("run.wait(); first = run; print(first.results)")
    check(first == "[0.5, 1.0]", f"the form's arguments reach the function: {first}")
    num_widgets = len(page.widgets)
    panel.press("Launch")
    page.until(lambda: page.printed("print(run is not first and run.status)") == "finished", "the next run's end")
    panel.sees("✓ finished", "step 3 on rank 1")
    check(len(page.widgets) == num_widgets, f"a launch leaves no widgets: {num_widgets}, then {len(page.widgets)}")
    panel.press("Copy as code")
    page.until(lambda: all(panel.values("TextareaModel") or [""]), "the code")
    for code in panel.values("TextareaModel"):
        page.run(code)
        same = "run is not first and run.results == first.results and run.config == first.config"
        check(page.printed(f"print({same})") == "True", f"the code gives the same: {code}")


def watch_by_a_monitor(page: Page) -> None:
    """``monitor(run)`` is live while the run goes on, and plain HTML at its end."""
    asked = page.run("run = launch(train, (10000,), num_processes=2, device='cpu', wait=False)\nmonitor(run)")
    bundle = next(one for one in page.displays(asked) if VIEW in one)
    live = Shown(page, bundle)
    live.sees("▸ running", "step 2 on rank 0", "step 2 on rank 1")
    live.press("Stop")
    page.until(lambda: not any(VIEW in one for one in page.displays(asked)), "the monitor's final form")
    final = page.displays(asked)[-1]
    check(sorted(final) == ["text/html", "text/plain"], "plain HTML takes the monitor's place")
    check("■ stopped" in final["text/html"] and "data:image/svg+xml" in final["text/html"], "with its curves")


def main() -> int:
    """Do all of it; return the exit code."""
    told = f"IPython {IPython.__version__}, ipykernel {VERSION}, ipywidgets {ipywidgets.__version__}"
    print(f"Using the panel by messages: {told} ...", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nl-") as folder:
        page = Page(Path(folder))
        try:
            page.run(SETUP)
            (bundle,) = (one for one in page.displays(page.run("%launcher")) if VIEW in one)
            check("num_steps" in bundle["text/html"] or "fail" in bundle["text/html"], "the form is stored as HTML")
            panel = Shown(page, bundle)
            check_the_machine(page, panel)
            launch_and_stop(page, panel)
            see_an_error(page, panel)
            copy_as_code(page, panel)
            watch_by_a_monitor(page)
        finally:
            page.close()
    print(f"All of it works ({time.monotonic() - started:.0f} s).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
