"""The kernel that other tests run cells in."""

from __future__ import annotations

import psutil
import pytest


def test_streams_results_displays_and_errors_come_back(kernel):
    cell = kernel.ok("import sys; print('out'); print('err', file=sys.stderr); 40 + 2")
    assert (cell.stdout, cell.stderr, cell.result["text/plain"]) == ("out\n", "err\n", "42")
    kernel.ok("from IPython.display import HTML, display; handle = display(HTML('<b>1</b>'), display_id=True)")
    cell = kernel.ok("handle = display(HTML('<b>1</b>'), display_id=True); handle.update(HTML('<b>2</b>'))")
    assert (cell.html, cell.num_updates) == ("<b>2</b>", 1)
    cell = kernel.run("raise ValueError('no')")
    assert (cell.error, cell.message) == ("ValueError", "no")
    assert "raise ValueError('no')" in cell.traceback
    assert "print" in kernel.complete("pri")


def test_interrupt_restart_and_kill(kernel):
    kernel.start("import time\nprint('on')\ntime.sleep(60)")
    kernel.wait_for("on")
    kernel.interrupt()
    assert kernel.wait(10).error == "KeyboardInterrupt"
    first = kernel.pid
    kernel.restart(now=True)
    assert kernel.pid != first
    kernel.ok("import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)")
    (child,) = kernel.children()
    kernel.kill()
    assert not kernel.alive
    with pytest.raises(RuntimeError, match="the kernel has died"):
        kernel.run("1")
    psutil.wait_procs([child], 10)
    assert not child.is_running()
