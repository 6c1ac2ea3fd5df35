"""One rank's life: put on the notebook's surroundings, run the function, report how it ended, wait to be let go."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_launcher.core import endings, events, pickling
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.shared_memory import unpack
from notebook_launcher.worker import failure, inspection, rendezvous, streams, surroundings
from notebook_launcher.worker.device_memory import DeviceMemoryWatch
from notebook_launcher.worker.metric_batch import MetricBatch
from notebook_launcher.worker.stillness import StillnessWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from notebook_launcher.core.channel import Channel

# Starting to listen takes the interpreter for a moment, and by then the function has most likely begun.
_HEAD_START_S = 0.002
_TICK_S = 0.2  # how often unfinished lines are handed over and an interrupt that was heard is reported
_HEAR_S = 0.2  # in which an interrupt is heard by a function that hears it; the launcher waits longer
_CLOSING_S = 5.0  # how long a failure waits to be told while what the function owes is done


class Server:
    """Serves one ``Run`` command on a channel."""

    def __init__(self, channel: Channel) -> None:
        """Serve on ``channel``; a worker serves once."""
        self._channel = channel
        self._main_thread = threading.get_ident()
        self._interrupted = threading.Event()
        self._sending = self._late = self._is_nobody = False
        self._untold = threading.Lock()  # free until the end has been told
        self._may_leave = threading.Event()
        self._metrics = MetricBatch(channel.send)
        self._memory: DeviceMemoryWatch | None = None
        self._stillness: StillnessWatch | None = None
        self._head_start = _thread.allocate_lock()
        self._head_start.acquire()

    def run(self, command: events.Run) -> int:
        """Run the payload and report; returns the process's exit code once the launcher lets go."""
        self.carry_out(command)
        say_goodbye()
        return 0

    def carry_out(self, command: events.Run) -> None:
        """Run the payload and report; returns once the launcher lets go."""
        # Not threading.Thread, whose start waits for the thread's first step: the function waits for nothing.
        _thread.start_new_thread(self._listen, (command,))
        last: events.Finished | events.Failed
        try:
            self._prepare(command)
            # From here on an interrupt means the function, so it raises in the main thread, wherever that is.
            self._on_interrupt(self._hear)
            task = self._load(command)
            self._report(events.Started(os.getpid(), socket.gethostname(), time.monotonic_ns()))
            os.register_at_fork(after_in_child=self._become_nobody)
            last = self._finish(self._call(task))
        except BaseException as error:  # noqa: BLE001 - whatever the function raised is the launcher's to show
            self._on_interrupt(signal.SIG_IGN)
            last = failure.describe(error)
            if endings.pending():
                self._close(last)
        self._on_interrupt(signal.SIG_IGN)
        self._head_start.release()
        self._tell(last)
        while not self._may_leave.wait(timeout=3600):
            pass

    def rehearse(self, command: events.Run) -> None:
        """Take the steps of ``run`` that leave nothing behind which a later ``run`` in this process does not replace.

        The caller restores the environment, and reads what is reported.
        """
        _thread.start_new_thread(time.sleep, (0,))
        self._prepare(command)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        task = self._load(command)
        self._report(events.Started(os.getpid(), socket.gethostname(), time.monotonic_ns()))
        self._finish(task())
        events.install(None)

    def _prepare(self, command: events.Run) -> None:
        given = pickle.loads(unpack(command.surroundings)[0])
        surroundings.put_on(given, command.world)
        events.install(self._report)
        rendezvous.lead_to(command.world)

    def _load(self, command: events.Run) -> Any:
        surroundings.use_device(command.world)
        return self._loaded(command)

    @staticmethod
    def _loaded(command: events.Run) -> Any:
        task = pickling.loads(command.payload, device="cpu" if command.world.device == "cpu" else None)
        pickling.by_value_in_children()
        return task

    def _call(self, task: Any) -> Any:
        try:
            result = task()
            surroundings.show_figures()
        except BaseException as error:
            if self._is_nobody:
                _end_child(error)
            surroundings.show_figures()
            raise
        if self._is_nobody:
            _end_child(None)
        endings.run()
        return result

    def _close(self, last: events.Failed) -> None:
        """Do what the function that failed owes. Its failure is told in time: other ranks may wait for this one."""
        late = threading.Timer(_CLOSING_S, self._tell, (last,))
        late.daemon = True
        late.start()
        endings.run(failed=True)
        late.cancel()

    def _release(self) -> None:
        # Apart: taking connections down may fail, or wait for a rank that hangs.
        _thread.start_new_thread(surroundings.leave_process_groups, ())

    def _interrupting(self) -> None:
        _thread.start_new_thread(self._close_if_deaf, ())

    def _close_if_deaf(self) -> None:
        """Do what the function owes in its stead, where it hears no interrupt and will be terminated."""
        if not self._interrupted.wait(_HEAR_S):
            # One that came in the instant before a call that waits is seen after that call: this one ends the wait.
            signal.pthread_kill(self._main_thread, signal.SIGINT)
            if not self._interrupted.wait(_HEAR_S):
                endings.run(failed=True)

    def _tell(self, last: events.Finished | events.Failed) -> None:
        if self._untold.acquire(blocking=False):
            streams.flush()
            self._metrics.flush()
            self._channel.send(last)

    def _become_nobody(self) -> None:
        """In a process that the function has forked: it is not the rank, and does not speak for it."""
        self._is_nobody = True
        events.install(None)
        self._channel.abandon()

    def _on_interrupt(self, action: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        """Have an interrupt mean ``action`` from here on."""
        signal.signal(signal.SIGINT, action)

    def _finish(self, result: Any) -> events.Finished:
        self._on_interrupt(signal.SIG_IGN)
        try:
            return events.Finished(pickling.dumps_result(result))
        except BaseException as error:  # noqa: BLE001 - any object's own pickling code may run and fail here
            text = f"the result, a {type(result).__qualname__}, can't be pickled: {type(error).__name__}: {error}"
            return events.Finished(None, text)

    def _report(self, event: events.Event) -> None:
        """Send an event. An interrupt waits until the message is whole: half of one spoils the channel."""
        if threading.get_ident() != self._main_thread:
            self._send(event)
            return
        self._sending = True
        try:
            self._send(event)
        finally:
            self._sending = False
        if self._late:
            self._late = False
            raise KeyboardInterrupt

    def _send(self, event: events.Event) -> None:
        if isinstance(event, events.Metric):
            self._metrics.add(event)
        else:
            self._metrics.flush()
            self._channel.send(event)

    def _hear(self, _signal: int, _frame: FrameType | None) -> None:
        self._interrupted.set()  # only a flag: the channel's lock may be held by the very code that was interrupted
        if self._sending:
            self._late = True
        else:
            raise KeyboardInterrupt

    def _listen(self, run: events.Run) -> None:
        self._head_start.acquire(timeout=_HEAD_START_S)
        command: events.Command | None = run
        told = False
        while True:
            try:
                streams.flush()
                self._metrics.flush()
                if self._interrupted.is_set() and not told:
                    told = True
                    self._channel.send(events.Interrupted())
                self._obey(command)
                for watch in (self._memory, self._stillness):
                    news = watch.news() if watch is not None else None
                    if news is not None:
                        self._channel.send(news)
            except ChannelClosedError:
                _end_group()
            except Exception:  # noqa: BLE001 - whatever it was, who listens no more can be neither asked nor let go
                traceback.print_exc()
            try:
                command = self._channel.receive(_TICK_S)
            except TimeoutError:
                command = None
            except ChannelClosedError:
                # The kernel has gone: nothing outlives it, whatever the function is doing.
                _end_group()

    def _obey(self, command: events.Command | None) -> None:
        if isinstance(command, events.Run):
            self._memory = DeviceMemoryWatch(command.world.device, command.world.local_rank)
            self._stillness = StillnessWatch(self._main_thread, command.world)
            if command.store is not None:
                rendezvous.serve_when_asked(command.world, command.store.detach())
        elif isinstance(command, events.AskWhere):
            self._channel.send(inspection.where(self._main_thread))
        elif isinstance(command, events.Interrupting):
            self._interrupting()
        elif isinstance(command, events.Release):
            self._release()
        elif isinstance(command, events.Leave):
            self._may_leave.set()


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that the function forked and that came back to us, as an interpreter would end."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    streams.flush()
    os._exit(code)


def _end_group() -> NoReturn:
    """End this worker and what it started: loader workers are in its process group."""
    with contextlib.suppress(OSError):
        os.write(2, b"the connection to the notebook is closed, so this rank ends\n")
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def say_goodbye() -> None:
    """Do what an interpreter's end would: the process leaves by ``os._exit``, which does none of it.

    Who takes longer than the launcher's patience is killed; results have arrived by now.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - trackers finish their runs here
    for item in gc.get_objects():
        if issubclass(type(item), io.IOBase):  # not isinstance: a proxy's __class__ is somebody's code
            with contextlib.suppress(Exception):
                item.flush()
    streams.flush()
