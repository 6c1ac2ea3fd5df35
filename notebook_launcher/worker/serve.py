"""One rank's life: put on the notebook's surroundings, run the function, report how it ended, wait to be let go."""

from __future__ import annotations

import _thread
import os
import pickle
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_launcher.core import events, pickling
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.shared_memory import unpack
from notebook_launcher.worker import failure, inspection, streams, surroundings

if TYPE_CHECKING:
    from types import FrameType

    from notebook_launcher.core.channel import Channel
    from notebook_launcher.core.world import World

_TICK_S = 0.2  # how often unfinished lines are handed over and an interrupt that was heard is reported


class Server:
    """Serves one ``Run`` command on a channel."""

    def __init__(self, channel: Channel) -> None:
        """Serve on ``channel``; a worker serves once."""
        self._channel = channel
        self._main_thread = threading.get_ident()
        self._interrupted = threading.Event()
        self._may_leave = threading.Event()
        self._store: list[Any] = []

    def run(self, command: events.Run) -> int:
        """Run the payload and report; returns the process's exit code once the launcher lets go."""
        # Not threading.Thread, whose start waits for the thread's first step: the function waits for nothing.
        _thread.start_new_thread(self._listen, ())
        last: events.Finished | events.Failed
        try:
            self._prepare(command)
            # From here on an interrupt means the function, so it raises in the main thread, wherever that is.
            signal.signal(signal.SIGINT, self._hear)
            last = self._finish(self._call(command))
        except BaseException as error:  # noqa: BLE001 - whatever the function raised is the launcher's to show
            last = failure.describe(error)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        streams.flush()
        self._channel.send(last)
        while not self._may_leave.wait(timeout=3600):
            pass
        return 0

    def _prepare(self, command: events.Run) -> None:
        given = pickle.loads(unpack(command.surroundings)[0])
        surroundings.put_on(given, command.world)
        events.install(self._channel.send)
        if command.store is not None:
            _thread.start_new_thread(self._serve_store, (command.world, command.store.detach()))

    def _serve_store(self, world: World, listening: int) -> None:
        """Host the rendezvous store once somebody knocks: who joins no process group pays nothing for it."""
        poller = select.poll()
        poller.register(listening, select.POLLIN)
        poller.poll()
        self._store.append(serve_store(world, listening))

    def _call(self, command: events.Run) -> Any:
        surroundings.use_device(command.world)
        task = pickling.loads(command.payload, device="cpu" if command.world.device == "cpu" else None)
        pickling.by_value_in_children()
        self._channel.send(events.Started(os.getpid(), socket.gethostname(), time.monotonic_ns()))
        try:
            return task()
        finally:
            surroundings.show_figures()

    def _finish(self, result: Any) -> events.Finished:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return events.Finished(pickling.dumps_result(result))
        except Exception as error:  # noqa: BLE001 - any object's own pickling code may run and fail here
            text = f"the result, a {type(result).__qualname__}, can't be pickled: {type(error).__name__}: {error}"
            return events.Finished(None, text)

    def _hear(self, _signal: int, _frame: FrameType | None) -> NoReturn:
        self._interrupted.set()  # only a flag: the channel's lock may be held by the very code that was interrupted
        raise KeyboardInterrupt

    def _listen(self) -> None:
        told = False
        while True:
            try:
                command = self._channel.receive(_TICK_S)
            except TimeoutError:
                command = None
            except ChannelClosedError:
                # The kernel has gone: nothing outlives it, whatever the function is doing.
                _end_group()
            try:
                streams.flush()
                if self._interrupted.is_set() and not told:
                    told = True
                    self._channel.send(events.Interrupted())
                self._obey(command)
            except ChannelClosedError:
                _end_group()

    def _obey(self, command: events.Command | None) -> None:
        if isinstance(command, events.AskWhere):
            self._channel.send(inspection.where(self._main_thread))
        elif isinstance(command, events.Release):
            surroundings.leave_process_groups()
        elif isinstance(command, events.Leave):
            self._may_leave.set()


def _end_group() -> NoReturn:
    """End this worker and what it started: loader workers are in its process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def serve_store(world: World, listening: int) -> Any:
    """Host the rendezvous store on a socket that listens already; all ranks, this one too, are its clients."""
    from torch import distributed

    return distributed.TCPStore(  # type: ignore[attr-defined]
        world.main_address,
        world.main_port,
        world.world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
