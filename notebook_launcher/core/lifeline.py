"""A lifeline: a pipe whose writing end only the kernel has. It ends with the kernel, however that ends.

A rank also reads its channel's end, on a thread; but native code may hold the interpreter's lock for hours, and a
process that was stopped runs nothing at all. So the system itself is asked to send a signal when the pipe ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import weakref

from notebook_launcher.core.errors import ChannelClosedError


class Lifeline:
    """The kernel's end. Who holds ``reader`` learns from the system when this process has ended."""

    def __init__(self) -> None:
        """Open both ends."""
        self.reader, self.writer = os.pipe()
        _open.add(self)

    def hand_over(self) -> None:
        """Another process has ``reader`` now: close this one's; harmless when repeated."""
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def let_go(self) -> None:
        """Close ``writer``: in the one process that has it, that is the lifeline's end; harmless when repeated."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """End it, as the end of this process would."""
        self.hand_over()
        self.let_go()


_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lifeline in list(_open):
        lifeline.let_go()


# A process that the user's code forks from the kernel must not keep alive what ends with the kernel.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def hold(reader: int, number: int, owner: int) -> int:
    """Have the system send signal ``number`` to the process ``owner``, a group where negative, when the pipe ends.

    ``reader`` may be shared with other processes, and stays open. Returns the descriptor that the arrangement lasts as
    long as, or -1 where the system has none such. Raises ``ChannelClosedError`` when the pipe has ended already.
    """
    if sys.platform != "linux":  # elsewhere the signal can't be chosen
        return -1
    try:
        # Whom to tell is kept with the open file, so each process needs one of its own. Not to wait for a writer.
        own = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return -1
    try:
        fcntl.fcntl(own, fcntl.F_SETSIG, number)
        fcntl.fcntl(own, fcntl.F_SETOWN, owner)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:  # a sandbox that has not the whole of Linux
        os.close(own)
        return -1
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    if poller.poll(0):  # before there was anybody to tell
        os.close(own)
        msg = "the process at the other end is gone"
        raise ChannelClosedError(msg)
    return own
