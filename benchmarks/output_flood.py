"""How fast output is taken in and what showing it costs: half a million lines, logged, and repainted as in a cell."""

from __future__ import annotations

import argparse
import pathlib
import random
import tempfile
import time
import types

from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.widgets.rendering import render, render_text

CHUNK_BYTES = 64 * 1024
LIVE_LINES = 200
PAINT_S = 0.1
BYTES_PER_S = 1_000_000

KINDS = {
    "plain": "step {0} of the training loop, loss 0.{0}\n",
    "coloured": "\x1b[32mINFO\x1b[0m step {0} of the training loop, loss 0.{0}\n",
    "bars": "\rtraining {0}: 42%|####      | 42/100",
    "binary": "",  # random bytes without a newline, 50 for a line
}


def main() -> None:
    """Print one row for each kind of output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-lines", type=int, default=500_000)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain", "coloured", "binary"])
    options = parser.parse_args()
    heads = f"{'slowest paint':>15}{'painted/s':>12}{'final paint':>13}{'final page':>12}"
    print(f"{'kind':<10}{'lines/s':>12}{'MB/s':>8}{'paints':>8}{heads}")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(kind, options.num_lines, options.num_ranks, pathlib.Path(folder)))


def measure(kind: str, num_lines: int, num_ranks: int, folder: pathlib.Path) -> str:
    """One row of the table: rates are of the feeding thread, which also paints."""
    data = sample(kind, num_lines // num_ranks)
    log = OutputLog(num_ranks, folder=folder)
    view = types.SimpleNamespace(
        headline=f"{num_ranks} processes", notes=[], status="running", elapsed_s=0.0, summary="", output=log
    )
    paints: list[tuple[float, int]] = []
    began_s = time.perf_counter()
    next_paint_s = began_s
    for start in range(0, len(data), CHUNK_BYTES):
        for rank in range(num_ranks):
            log.feed(rank, "stdout", data[start : start + CHUNK_BYTES])
        if time.perf_counter() >= next_paint_s:
            paints.append(paint(view, LIVE_LINES))
            next_paint_s = time.perf_counter() + max(PAINT_S, paints[-1][1] / BYTES_PER_S)
    took_s = time.perf_counter() - began_s
    log.close()
    final_s, page_bytes = paint(view, None)
    written = sum(path.stat().st_size for path in folder.iterdir())
    num_bytes = len(data) * num_ranks
    if written != num_bytes:
        msg = f"the logs hold {written:,} bytes of {num_bytes:,}"
        raise SystemExit(msg)
    painted = sum(size for _, size in paints[1:]) / took_s
    return (
        f"{kind:<10}{num_lines / took_s:>12,.0f}{num_bytes / took_s / 1e6:>8.0f}{len(paints):>8}"
        f"{max(paints)[0] * 1e3:>12.1f} ms{painted / 1e3:>9.0f} kB{final_s * 1e3:>10.0f} ms{page_bytes / 1e3:>9.0f} kB"
    )


def sample(kind: str, num_lines: int) -> bytes:
    """What one rank writes."""
    if kind == "binary":
        return random.Random(0).randbytes(num_lines * 50).replace(b"\n", b"")  # noqa: S311 - not a secret
    return "".join(KINDS[kind].format(number) for number in range(num_lines)).encode()


def paint(view: types.SimpleNamespace, last: int | None) -> tuple[float, int]:
    """Seconds that both forms took, and their size in bytes."""
    began_s = time.perf_counter()
    size = len(render(view, last=last).encode()) + len(render_text(view, last=last).encode())
    return time.perf_counter() - began_s, size


if __name__ == "__main__":
    main()
