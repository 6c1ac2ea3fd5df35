"""JupyterLab in a headless Chromium: one server for all tests, a page a notebook, and what a person does on it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[2] / "output" / "browser"
LIMIT_S = 60
OPENING_S = 25  # twice it and all that comes before is within a test's time
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
NAMES = ("chromium", "chromium-browser", "google-chrome")
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},  # nothing lies over the page
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells that are out of sight stay in the page
}
KERNEL = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel"
# A status of "idle" can come before the line to the kernel is up: wait for the kernel's own answer.
ANSWERS = f"""() => Promise.race([
  {KERNEL}.info.then(() => true), new Promise(leave => setTimeout(() => leave(false), 1000 * {OPENING_S}))])"""
RUN = """async ([index, source]) => {
  const notebook = jupyterapp.shell.currentWidget.content, cells = notebook.model.sharedModel;
  if (source !== null) cells.insertCell(index, {cell_type: 'code', source});
  notebook.activeCellIndex = index;
  jupyterapp.commands.execute('notebook:run-cell');
}"""


def chromium_path():
    """The browser that the variable CHROMIUM names, else one on the PATH; None where there is none."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) or named if named else next(filter(None, map(shutil.which, NAMES)), None)


def _browsers_error() -> type[Exception]:
    from playwright.sync_api import Error  # only now: whoever collects the tests waits for it

    return Error


class Server:
    """A JupyterLab in a folder of its own."""

    def __init__(self, folder):
        """Start it and wait until it answers."""
        self.folder, self.token = folder, secrets.token_hex(16)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        home = folder / ".jupyter"
        for name, values in SETTINGS.items():
            plugin, _, part = name.partition("/")
            file = home / "settings" / "@jupyterlab" / plugin / f"{part}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        environment = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")} | {
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "JUPYTER_TOKEN": self.token,
        }
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
        options += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
        self._log = (home / "server.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=os.environ | environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._wait()

    def ask(self, path, method="GET"):
        """What the server answers."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return json.loads(answer.read() or "null")

    def end_kernels(self):
        """Shut every kernel down."""
        for kernel in self.ask("/api/kernels"):
            with contextlib.suppress(urllib.error.HTTPError):  # it has gone by itself
                self.ask(f"/api/kernels/{kernel['id']}", "DELETE")

    def close(self):
        """End the server, and with it its kernels."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _wait(self):
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            try:
                self.ask("/api/status")
            except OSError:
                if self._process.poll() is None:
                    time.sleep(0.05)  # nothing tells when a server begins to listen
                    continue
                break
            return
        self._log.seek(0)
        raise AssertionError(f"JupyterLab did not start:\n{self._log.read()}")


class Notebook:
    """A notebook, open in a page."""

    def __init__(self, server, browser, cells, *, dark=False, width=1132, height=2400):
        """Write it with these cells, open it, and wait for its kernel. ``width``: the page's; 1132 leaves 700 px."""
        self.name = f"{secrets.token_hex(4)}.ipynb"
        self.path = server.folder / self.name
        import nbformat  # not above, as pytest loads this file whatever is run: it takes seconds

        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(made, self.path)
        self._context = browser.new_context(viewport={"width": width, "height": height})
        self.page = self._context.new_page()
        self.page.set_default_timeout(LIMIT_S * 1000)
        self.page.on("dialog", lambda dialog: dialog.accept())  # "leave, though it is not saved?"
        self.outside = []  # requests that left the machine
        inside = (server.url, "data:", "blob:")
        self.page.on("request", lambda sent: sent.url.startswith(inside) or self.outside.append(sent.url))
        self.page.goto(f"{server.url}/lab/workspaces/{self.name[:-6]}/tree/{self.name}?token={server.token}")
        try:
            self.wait_until_ready()
        except (
            AssertionError,
            _browsers_error(),
        ):  # JupyterLab may lose what it sends while its line to the kernel comes up
            self.picture("failure-opening", self.page)
            self.load_again()
        self.theme(dark=dark)

    def wait_until_ready(self):
        """Wait until the page and its kernel talk."""
        self.page.wait_for_function(f"() => {KERNEL}?.connectionStatus === 'connected'", timeout=1000 * OPENING_S)
        assert self.page.evaluate(ANSWERS)

    def theme(self, *, dark):
        """Choose the theme. The server remembers it between pages."""
        wanted = f"JupyterLab {'Dark' if dark else 'Light'}"
        if self.page.get_attribute("body", "data-jp-theme-name") != wanted:
            self.command("apputils:change-theme", {"theme": wanted})
            self.page.wait_for_function("t => document.body.dataset.jpThemeName === t", arg=wanted)

    def command(self, name, arguments=None):
        """Do what a menu's entry does, and wait until it is done."""
        return self.page.evaluate(
            "([name, values]) => jupyterapp.commands.execute(name, values).then(() => 1)", [name, arguments or {}]
        )

    def run(self, index, source=None):
        """Run the cell ``index``; with ``source``, a new one there. Returns its output, which may still come."""
        self.page.evaluate(RUN, [index, source])
        return self.output(index)

    def run_new(self, source):
        """Run a new cell at the end; returns its output."""
        return self.run(self.page.evaluate("jupyterapp.shell.currentWidget.content.widgets.length"), source)

    def prints(self, expression, text):
        """Wait until a new cell prints ``text`` for ``expression``."""
        self.run_new(f"print({expression})").get_by_text(text, exact=True).wait_for()

    def load_again(self):
        """Load the page anew, as it was saved."""
        self.page.reload()
        self.wait_until_ready()

    def restart_kernel(self):
        """Restart the kernel, and wait for the new one."""
        self.page.evaluate(f"{KERNEL}.restart()")
        self.wait_until_ready()

    def output(self, index):
        """The cell's output."""
        return self.page.locator(".jp-Notebook > .jp-WindowedPanel-outer .jp-Cell").nth(index).locator(".jp-OutputArea")

    def saved(self):
        """The notebook as it is saved now."""
        import nbformat

        self.command("docmanager:save")
        return nbformat.read(self.path, as_version=4)

    def picture(self, name, what):
        """Keep a picture of ``what``."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        # Given a path, Playwright would write it on a thread that stays.
        (PICTURES / f"{name}.png").write_bytes(what.screenshot(animations="disabled"))

    def close(self):
        """Close the page."""
        self._context.close()


class Panel:
    """A panel in a cell's output, used as a person does: by what its controls are called."""

    def __init__(self, output):
        """The panel that is in ``output``, once it is there."""
        self.where = output.locator(".notebook-launcher-panel").first
        self.where.wait_for()

    def choose(self, label, choice):
        """Choose from a list."""
        self._field("widget-dropdown", label).locator("select").select_option(label=choice)

    def field(self, label):
        """The field of this label."""
        return self._field("widget-text", label).locator("input")

    def fill(self, label, text):
        """Fill in a field and leave it."""
        self.field(label).fill(text)
        self.field(label).press("Tab")

    def button(self, text):
        """The button of this text."""
        return self.where.locator("button.jupyter-button").filter(has_text=text).first

    def press(self, text):
        """Press a button, as soon as it can be pressed."""
        self.button(text).click()

    def sees(self, *texts):
        """Wait until all of these can be read."""
        for text in texts:
            self.where.get_by_text(text).filter(visible=True).first.wait_for()

    def _field(self, kind, label):
        return self.where.locator(f".{kind}:has(label:text-is('{label}'))")
