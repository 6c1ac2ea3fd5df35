"""A preflight: start the workers, have them reduce in each precision, and say in words what is wrong."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import pickling
from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.errors import ConfigError, NotebookLauncherError, RunTimeoutError
from notebook_launcher.core.tasks import Named
from notebook_launcher.launcher.launch import launch_payload
from notebook_launcher.launcher.payload import Payload

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.launcher.run import Run

_TASK = "notebook_launcher.runtime.preflight:measure"
_TIMEOUT_S = 120.0  # of which most is for a device's first use
_NAMES = {"no": "fp32"}
_SWITCHES = (
    "What often helps on NVIDIA cards, one at a time: env={'NCCL_P2P_DISABLE': '1'} (cards that can't read each "
    "other's memory, though they say so), {'NCCL_IB_DISABLE': '1'}, {'NCCL_SHM_DISABLE': '1'}; {'NCCL_DEBUG': 'INFO'} "
    "has NCCL say what it does."
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was tried, and what came of it."""

    name: str
    ok: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What a preflight found. ``figures`` are of an all-reduce: ``latency_us``, ``bandwidth_mb_s``, ``num_bytes``."""

    headline: str
    checks: tuple[Check, ...]
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    is_stopped: bool = False  # by somebody, before it had found anything

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and it came to its end."""
        return not self.is_stopped and all(one.ok for one in self.checks)

    def lines(self) -> list[str]:
        """The findings as text, the verdict last."""
        head = [self.headline] if self.headline else []
        if self.is_stopped:
            return [*head, "preflight: stopped before its end, so nothing is known"]
        width = max(len(one.name) for one in self.checks)
        told = [f"{'ok   ' if one.ok else 'WRONG'}  {one.name.ljust(width)}  {one.text}" for one in self.checks]
        failed = [one.name for one in self.checks if not one.ok]
        verdict = f"preflight: something is wrong with {', '.join(failed)}" if failed else "preflight: all is well"
        return [*head, *told, verdict]

    def facts(self) -> dict[str, Any]:
        """The same for programs, as what JSON holds."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        """The findings as text."""
        return "\n".join(self.lines())


def check(
    config: LaunchConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    launching: Callable[..., Run] = launch_payload,
    **options: Any,
) -> Preflight:
    """Try out the workers that a launch with these options would have, and return what was found; it takes seconds.

    Options are those of ``launch``. Raises ``ConfigError`` for an option that can't be; what this machine can't do is a
    finding. ``launching`` stands in for ``launch_payload``.
    """
    return run_check(LaunchConfig.make(config, **options), launching)


def run_check(config: LaunchConfig, launching: Callable[..., Run] = launch_payload) -> Preflight:
    """``check`` with a configuration that is taken as it stands, but for what only a training wants."""
    own = {"timeout_s": config.timeout_s or _TIMEOUT_S, "max_restarts": 0, "log_dir": None}
    began_s = time.time()
    headline = ""
    try:
        payload = Payload(pickling.dumps(Named(_TASK)), {}, "preflight")
        run = launching(payload, config.model_copy(update=own), wait=False, sink="none")
        headline = run.facts.headline
        run.wait()
    except ConfigError as error:
        return Preflight(headline, (Check("options", ok=False, text=str(error)),))
    except Exception as error:  # noqa: BLE001 - a rank's own, of whatever kind: that is the finding
        return Preflight(headline, (Check("workers", ok=False, text=explained(error, headline)),))
    if run.status != "finished":
        return Preflight(headline, (), is_stopped=True)
    return findings(headline, run.results, began_s)


def findings(headline: str, results: Sequence[Mapping[str, Any]], began_s: float) -> Preflight:
    """What the ranks measured, as checks. ``began_s`` is ``time.time()`` before the launch."""
    slowest = max(results, key=lambda one: one["latency_us"])
    narrowest = min(results, key=lambda one: one["bandwidth_mb_s"])
    figures = {
        "start_s": max(one["began_s"] for one in results) - began_s,
        "latency_us": slowest["latency_us"],
        "bandwidth_mb_s": narrowest["bandwidth_mb_s"],
        "num_bytes": narrowest["num_bytes"],
    }
    places = ", ".join(one["device"] for one in results)
    started = f"{len(results)} started in {figures['start_s']:.2f} s, on {places}"
    through = "" if slowest["device"] == slowest["reduced_on"] else ", through the host's memory"
    took = f"latency {figures['latency_us']:.0f} µs"
    if len(results) > 1:
        size = f"{figures['num_bytes'] / 1e6:.0f} MB{through} (medians)"
        took += f", bandwidth {figures['bandwidth_mb_s']:,.0f} MB/s for {size}"
    else:
        took += f"{through} (median); with one process nothing is exchanged, so no bandwidth is told"
        del figures["bandwidth_mb_s"], figures["num_bytes"]
    checks = (
        Check("workers", ok=True, text=started),
        *_precisions(results, _advice(headline)),
        Check("all-reduce", ok=True, text=took),
    )
    return Preflight(headline, checks, figures)


def _precisions(results: Sequence[Mapping[str, Any]], advice: str) -> Iterator[Check]:
    for name in results[0]["precisions"]:
        wrong = [
            f"rank {rank}: {one['precisions'][name]}" for rank, one in enumerate(results) if one["precisions"][name]
        ]
        text = f"{'; '.join(wrong)}.{advice}" if wrong else "products and sums over the ranks are right"
        yield Check(_NAMES.get(name, name), ok=not wrong, text=text)


def explained(error: BaseException, headline: str) -> str:
    """What is wrong, from the error that ended the ranks of the run with this headline."""
    if isinstance(error, RunTimeoutError):
        return f"no answer in time: {error}{_advice(headline)}"
    if isinstance(error, NotebookLauncherError):
        return str(error)
    return "\n".join([f"{type(error).__name__}: {error}", *map(str, getattr(error, "__notes__", ()))])


def _advice(headline: str) -> str:
    return f"\n{_SWITCHES}" if "NCCL" in headline else ""
