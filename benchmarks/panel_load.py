"""What a panel costs while eight ranks flood it: lines and metrics by the thousand, seen as the browser would see them.

In a real kernel, whose messages are counted where a front end reads them. The same run is watched in turns without a
panel and with one. Meanwhile the kernel's main thread counts as fast as it can. What it loses is the time that it waits
for Python's lock while a core is free for it; what the ranks take of the machine's cores is told apart.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient

LIMIT_S = 300
THREADS = {"supervisor": "notebook-launcher-run", "monitor": "notebook-launcher-monitor", "IOPub": "IOPub"}
UNITS = {
    "main_thread_waits": "% of the time in which a core was free for it",
    "main_thread_counts": "% of what it counts alone",
    "supervisor": "% of a CPU",
    "monitor": "% of a CPU",
    "IOPub": "% of a CPU",
    "updates": "a second, of the part that changes most often",
    "longest_gap": "s between two updates of what changes more than twice a second",
    "to_the_browser": "MB/s",
    "memory": "MB more than before",
}
SETUP = """
import pathlib, threading, time, psutil
from notebook_launcher.core import events
%load_ext notebook_launcher
from notebook_launcher import panel
from notebook_launcher.launcher import warm
assert warm._warm.server.warm.wait(120)

def flood(seconds: int, num_lines: int = 2000, num_metrics: int = 500):
    began_s, lines, metrics = time.monotonic(), 0, 0
    while metrics < seconds * num_metrics or lines < seconds * num_lines:
        passed_s = min(seconds, time.monotonic() - began_s)
        for lines in range(lines + 1, int(passed_s * num_lines) + 1):
            print(f"line {lines} of a training loop that has a lot to say, loss {1 / lines:.6f}")
        for metrics in range(metrics + 1, int(passed_s * num_metrics) + 1):
            events.emit(events.Metric({"loss": 1 / metrics, "lr": 0.1}, metrics, time.time()))
        time.sleep(0.002)
    return time.monotonic() - began_s

def waited_s():
    "Seconds that the main thread was ready to run and no core was free: not the panel's doing."
    return int(pathlib.Path("/proc/self/schedstat").read_text().split()[1]) / 1e9

def count(seconds, until=lambda: False):
    "Counts made a second of the time that the machine left to this thread; and the share of it that it waited."
    began_s, cpu_s, queue_s, num = time.monotonic(), time.thread_time(), waited_s(), 0
    while time.monotonic() - began_s < seconds and not until():
        for _ in range(20000):
            num += 1
    took_s, cpu_s = time.monotonic() - began_s - (waited_s() - queue_s), time.thread_time() - cpu_s
    return num / took_s, 1 - cpu_s / took_s
"""
RUN = """
import itertools
import json
if {shown}:
    one = panel()
    display(one)
    one._looking.join()
else:
    one = None
from notebook_launcher import LaunchConfig
from notebook_launcher.launcher import payload
from notebook_launcher.launcher.launch import launch_payload
resident = psutil.Process().memory_info().rss
if one is not None:
    for name, value in (("function", "flood"), ("seconds()", "{seconds}"), ("num_processes", "{ranks}")):
        one.set(name, value)
    one.launch()
    run = one.run
else:
    packed = payload.for_call(flood, ({seconds},), dict())
    run = launch_payload(packed, LaunchConfig(num_processes={ranks}), wait=False, sink="none")
while run.status == "starting": time.sleep(0.01)
time.sleep(1)
"""
COUNT = """
def threads_s():
    names = {t.native_id: t.name for t in threading.enumerate()}
    return {names.get(t.id, "?"): t.user_time + t.system_time for t in psutil.Process().threads()}
before = threads_s()
counted, waited = count({seconds})
used = {{name: (now - before.get(name, 0)) / {seconds} for name, now in threads_s().items()}}
going_on = run.status
"""
REPORT = """
run.wait()
time.sleep(0.5)
lines = [run.logs(rank).splitlines()[-1].split()[1] for rank in range({ranks})]
points = [[row["step"] for row in run.metrics if row["rank"] == rank][-1] for rank in range({ranks})]
page = one._bundle()["text/html"] if one is not None else ""
print(json.dumps(dict(
    counted=counted, waited=waited, used=used, going_on=going_on, took=max(run.results),
    memory=psutil.Process().memory_info().rss - resident, num_points=len(run.metrics),
    lines_right=lines == [str({seconds} * 2000)] * {ranks}, points_right=points == [{seconds} * 500] * {ranks},
    page_right=one is None or all(page.count(f"line {{lines[0]}} of") >= 2 for _ in [0]), page_bytes=len(page),
)))
"""


class Messages:
    """What a front end would read of a kernel's messages."""

    def __init__(self, client: BlockingKernelClient) -> None:
        """Read from now on."""
        self.num_bytes = 0
        self.times: dict[str, list[float]] = collections.defaultdict(list)  # of updates, by widget
        self.idle = threading.Event()
        self.text = ""
        self.error = ""
        self._client = client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def run(self, code: str) -> str:
        """Run a cell; returns what it printed."""
        self.text, self.awaited = "", ""
        self.idle.clear()
        self.awaited = self._client.execute(code)
        if not self.idle.wait(LIMIT_S) or self.error:
            raise SystemExit(self.error or "the cell has not ended")
        return self.text

    def forget(self) -> None:
        """Count anew."""
        self.num_bytes = 0
        self.times.clear()

    def close(self) -> None:
        """Read no more."""
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        from queue import Empty

        while not self._over.is_set():
            try:
                message = self._client.get_iopub_msg(timeout=0.2)
            except Empty:
                continue
            self._take(message["header"]["msg_type"], message)

    def _take(self, kind: str, message: dict[str, Any]) -> None:
        content = message["content"]
        self.num_bytes += len(json.dumps(content)) + 600  # and its headers
        if kind == "comm_msg" and content["data"].get("method") == "update":
            self.times[content["comm_id"]].append(time.monotonic())
        elif kind == "stream":
            self.text += content["text"]
        elif kind == "error":
            self.error = "\n".join(content["traceback"])
        elif (
            kind == "status"
            and content["execution_state"] == "idle"
            and message["parent_header"].get("msg_id") == self.awaited
        ):
            self.idle.set()


def main() -> None:
    """Print a row for each way to look at the run, and what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    manager = KernelManager(kernel_name="python3")
    with tempfile.TemporaryDirectory() as folder:
        manager.start_kernel(cwd=folder, extra_arguments=["--HistoryManager.enabled=False"])
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        messages = Messages(client)
        try:
            measure(messages, options.num_ranks, options.seconds, options.rounds)
        finally:
            messages.close()
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def measure(messages: Messages, num_ranks: int, seconds: int, rounds: int) -> None:
    """Run the load without a panel and with one, in turns."""
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    messages.run(SETUP)
    told: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(rounds):
        for shown, rows in told.items():
            rows.append(watch(messages, num_ranks, seconds, shown=shown))
            print(f"round {number + 1}, {'with' if shown else 'without'} a panel: {rows[-1]}", flush=True)
    for shown, rows in sorted(told.items()):
        print(f"\n{'with' if shown else 'without'} a panel: medians of {rounds} rounds (least to most)")
        for name, unit in UNITS.items():
            values = sorted(row[name] for row in rows)
            spread = f"{statistics.median(values):.3g} ({values[0]:.3g} to {values[-1]:.3g})"
            print(f"  {name.replace('_', ' ')}: {spread} {unit}")
    print("  last lines and points right:", all(row["right"] for rows in told.values() for row in rows))


def watch(messages: Messages, num_ranks: int, seconds: int, *, shown: bool) -> dict[str, Any]:
    """One run, and what it cost."""
    looked_s = seconds - 4
    alone = json.loads(messages.run("import json; print(json.dumps(count(1)))"))[0]
    messages.run(RUN.format(shown=shown, seconds=seconds, ranks=num_ranks))
    messages.forget()
    began_s = time.monotonic()
    messages.run(COUNT.replace("{seconds}", str(looked_s)).replace("{{", "{").replace("}}", "}"))
    took_s = time.monotonic() - began_s
    num_bytes, times = messages.num_bytes, {name: list(one) for name, one in messages.times.items()}
    told = json.loads(messages.run(REPORT.format(seconds=seconds, ranks=num_ranks)))
    if told["going_on"] != "running":
        raise SystemExit(f"the run was over before it had been looked at: it is {told['going_on']}")
    rates = [len(one) / took_s for one in times.values()]
    often = [stamps for stamps in times.values() if len(stamps) > 2 * took_s]
    gaps = [later - one for stamps in often for one, later in itertools.pairwise(stamps)]
    used = dict.fromkeys(THREADS, 0.0)
    for name, share in told["used"].items():
        for thread, part in THREADS.items():
            used[thread] += share * (part in name)
    return {
        "main_thread_waits": round(100 * told["waited"], 1),
        "main_thread_counts": round(100 * told["counted"] / alone, 1),
        **{thread: round(100 * share, 1) for thread, share in used.items()},
        "updates": round(max(rates, default=0), 1),
        "longest_gap": round(max(gaps, default=0), 2),
        "to_the_browser": round(num_bytes / took_s / 1e6, 3),
        "memory": round(told["memory"] / 1e6, 1),
        "right": told["lines_right"] and told["points_right"] and told["page_right"],
    }


if __name__ == "__main__":
    main()
