"""What a worker tells the launcher (events), what the launcher tells a worker (commands), and ``emit``.

Events and commands are plain data. A worker's code anywhere below the function, the runtime's ``Accelerator.log`` for
one, reports by ``emit``; in a process that nobody launched, ``emit`` does nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.forking import Fork  # noqa: TC001 - part of the messages' shape
from notebook_launcher.core.shared_memory import Packed  # noqa: TC001
from notebook_launcher.core.world import World  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Callable

# --- events, worker to launcher -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started:
    """The function is about to run. ``time_ns`` is the worker's ``time.monotonic_ns()``."""

    pid: int
    host: str
    time_ns: int


@dataclasses.dataclass(frozen=True)
class Output:
    """Bytes written to a stream. Local workers write to pipes that the launcher reads; others send this."""

    stream: str  # "stdout" or "stderr"
    data: bytes


@dataclasses.dataclass(frozen=True)
class Display:
    """A rich display, as Jupyter's display_data: ``data`` is the MIME bundle."""

    data: dict[str, Any]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    transient: dict[str, Any] = dataclasses.field(default_factory=dict)
    update: bool = False


@dataclasses.dataclass(frozen=True)
class Metric:
    """Values of one step, from ``Accelerator.log``; ``time_s`` is ``time.time()`` at the worker."""

    values: dict[str, Any]
    step: int | None
    time_s: float


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Several of them, of the same names, in the order in which they were logged: a list for each, as in a table.

    Who logs by the hundred a second sends these.
    """

    columns: dict[str, list[Any]]
    steps: list[int | None]
    times_s: list[float]


@dataclasses.dataclass(frozen=True)
class Steps:
    """How far a loop has come, from ``Accelerator.progress``."""

    done: int
    total: int | None
    name: str
    elapsed_s: float  # since the loop began, by the rank's clock
    level: int = 0  # how many such loops are around it


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory of the rank's device: what this process holds of it, and all that there is (None: not known)."""

    used_bytes: int
    total_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """The rank heard the interrupt: a ``KeyboardInterrupt`` was raised in its function."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Answer to ``AskWhere``: the innermost call and line of the function, and the whole stack as text."""

    call: str  # "all_reduce", or the function's name
    line: str  # "cell 3, line 7"-like place in the user's code, "" when there is none
    stack: str
    last_collective: str = ""  # in words, as torch's flight recorder has it; "" where it has none


@dataclasses.dataclass(frozen=True)
class Pending:
    """A collective that has been begun and is not done: what is to be known of it to tell who waits for whom."""

    group: str  # the process group's name, the same on all its ranks
    number: int  # which of the group's collectives it is
    name: str  # "all_reduce"
    inputs: str  # "Float (64, 10)"
    sizes: tuple[tuple[str, int], ...]  # dtype and number of elements of each input
    members: tuple[int, ...]  # the ranks of the group; () where nobody knows
    reached: dict[str, int]  # the number of the last collective that this rank began, by group
    is_whole: bool  # whether a group that is not in ``reached`` is one in which this rank began none


@dataclasses.dataclass(frozen=True)
class Waits:
    """The rank's thread stands still with this collective begun; with None it goes on."""

    pending: Pending | None


@dataclasses.dataclass(frozen=True)
class Finished:
    """The function returned. ``result`` is the packed value, or None where ``problem`` says why it could not travel."""

    result: Packed | None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The function raised. ``error`` is the packed exception, or None where it could not be pickled."""

    error: Packed | None
    type_name: str
    message: str
    traceback_text: str
    time_ns: int  # time.monotonic_ns() when it was caught: the earliest failure of a run is its cause
    peer_lost: bool = False  # a torch.distributed error that follows from another rank's end


@dataclasses.dataclass(frozen=True)
class Devices:
    """Answer to ``Probe``: a row for each kind of device, present or not."""

    rows: tuple[DeviceRow, ...]


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """One kind of device on this machine. ``precisions`` gives, by name, "" where it can, else the reason why not."""

    kind: str  # "cuda", "mps", "xpu", "tpu", "cpu"
    num_devices: int
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    precisions: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why there is none
    per_process: int = 1  # devices that one process drives, a rank a thread of it
    is_stand_in: bool = False  # another kind's hardware in this one's place, for tests: "auto" passes it over
    uuids: tuple[str, ...] = ()  # one a device, where the driver tells
    no_peers: tuple[tuple[int, int], ...] = ()  # pairs of devices that can't read each other's memory


Event = (
    Started
    | Output
    | Display
    | Metric
    | Metrics
    | Steps
    | DeviceMemory
    | Interrupted
    | Where
    | Waits
    | Finished
    | Failed
    | Devices
)

# --- commands, launcher to worker -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The notebook as it is now, for a worker to put on: the same for every rank of a run, so it is packed once."""

    environment: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    sources: dict[str, str]  # file name of code made in cells -> its text, for tracebacks and inspect.getsource


@dataclasses.dataclass(frozen=True)
class Run:
    """Become ``world.rank`` and run the payload. On ``store``, a listening socket, rank 0 serves the rendezvous."""

    world: World
    surroundings: Packed
    payload: Packed
    store: Any = None  # core.channel.FileDescriptor


@dataclasses.dataclass(frozen=True)
class RunThreads:
    """Become several ranks, each a thread of this process; all but the first have lines of their own."""

    runs: tuple[Run, ...]
    lines: tuple[Fork, ...]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Look at this machine's devices, as the environment given allows, and leave: answered by ``Devices``."""

    environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class AskWhere:
    """Say where the function is: answered by ``Where`` from another thread, so also from inside a collective."""


@dataclasses.dataclass(frozen=True)
class Interrupting:
    """An interrupt is on its way; whom it finds in a collective, where it is not heard, is about to be terminated."""


@dataclasses.dataclass(frozen=True)
class Release:
    """You have finished and others have not: leave the process groups, so that who waits for you gets an error."""


@dataclasses.dataclass(frozen=True)
class Leave:
    """Every rank has ended: exit."""


Command = Run | RunThreads | Probe | AskWhere | Interrupting | Release | Leave

# --- reporting from anywhere below the function ---------------------------------------------------------------------

_emitter: Callable[[Event], None] | None = None


def emit(event: Event) -> None:
    """Send ``event`` to whoever launched this process; do nothing where nobody did."""
    if _emitter is not None:
        _emitter(event)


def install(emitter: Callable[[Event], None] | None) -> None:
    """Name the function that ``emit`` calls; the worker does this once, and None takes it away."""
    global _emitter  # noqa: PLW0603 - the one explicit, process-wide seam between runtime and worker
    _emitter = emitter
