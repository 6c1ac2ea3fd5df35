"""Both channels carry whole messages in order, and say when the other end is gone."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

from notebook_launcher.core.channel import MemoryChannel, SocketChannel
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.shared_memory import FileDescriptor

_ECHO = """
import socket, sys
from notebook_launcher.core.channel import SocketChannel
channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])))
while True:
    channel.send(channel.receive(None))
"""


@pytest.fixture(params=[SocketChannel, MemoryChannel], ids=["socket", "memory"])
def pair(request):
    one, other = request.param.pair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def sockets():
    one, other = SocketChannel.pair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def peer():
    """A channel to a process that sends everything back."""
    ours, theirs = SocketChannel.pair()
    number = theirs.fileno()
    process = subprocess.Popen([sys.executable, "-c", _ECHO, str(number)], pass_fds=[number], stderr=subprocess.DEVNULL)
    theirs.abandon()
    yield ours, process
    process.kill()
    process.wait()
    ours.close()


# --- the contract, for both -----------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order(pair):
    one, other = pair
    messages = [None, 0, "text", b"bytes", {"a": [1, 2]}, (), ValueError("x").args]
    for message in messages:
        one.send(message)
    assert [other.receive(1) for _ in messages] == messages


def test_both_directions_at_once(pair):
    one, other = pair
    one.send("to other")
    other.send("to one")
    assert (one.receive(1), other.receive(1)) == ("to one", "to other")


def test_what_is_drained_has_nothing_more_to_give(pair):
    one, other = pair
    for message in ("first", "second"):
        one.send(message)
    assert other.receive(1) == "first"
    assert not other.drained
    assert other.receive(0) == "second"
    assert other.drained
    with pytest.raises(TimeoutError):
        other.receive(0)
    assert other.drained
    one.send("third")
    assert other.receive(0) == "third"


def test_looking_returns_at_once(pair):
    one, other = pair
    with pytest.raises(TimeoutError):
        other.receive(0)
    one.send(1)
    assert other.receive(0) == 1


def test_waiting_ends_in_time(pair):
    with pytest.raises(TimeoutError):
        pair[1].receive(0.05)


def test_a_waiting_receiver_is_woken_by_a_message(pair):
    one, other = pair
    timer = threading.Timer(0.02, one.send, ["late"])
    timer.start()
    assert other.receive(10) == "late"
    timer.join()


def test_a_waiting_receiver_is_woken_by_the_end(pair):
    one, other = pair
    timer = threading.Timer(0.02, one.close)
    timer.start()
    with pytest.raises(ChannelClosedError):
        other.receive(10)
    timer.join()


def test_what_was_sent_before_the_end_is_still_read(pair):
    one, other = pair
    one.send("last words")
    one.close()
    assert other.receive(1) == "last words"
    with pytest.raises(ChannelClosedError):
        other.receive(1)


def test_sending_to_who_has_gone_is_an_error(pair):
    one, other = pair
    other.close()
    with pytest.raises(ChannelClosedError):
        one.send("anybody there?")


def test_a_closed_end_neither_sends_nor_receives(pair):
    one, _ = pair
    one.close()
    one.close()
    with pytest.raises(ChannelClosedError):
        one.send(1)
    with pytest.raises(ChannelClosedError):
        one.receive(1)


def test_threads_may_send_at_once(pair):
    one, other = pair
    num_threads, num_messages = 8, 50
    filler = b"x" * 3000  # more in all than a socket's buffer holds, so that senders block and interleave

    def send(sender: int) -> None:
        for number in range(num_messages):
            one.send((sender, number, filler))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(num_threads)]
    for thread in threads:
        thread.start()
    received = [other.receive(10) for _ in range(num_threads * num_messages)]
    for thread in threads:
        thread.join()
    for sender in range(num_threads):
        assert [number for who, number, _ in received if who == sender] == list(range(num_messages))
    assert all(data == filler for *_, data in received)


def test_large_messages(pair):
    one, other = pair
    message = os.urandom(3 << 20)
    sender = threading.Thread(target=one.send, args=(message,))
    sender.start()
    assert other.receive(10) == message
    sender.join()


# --- the socket's own -----------------------------------------------------------------------------------------------


def test_nobody_else_can_connect(sockets):
    raw = socket.socket(fileno=os.dup(sockets[0].fileno()))
    assert raw.family == socket.AF_UNIX
    assert raw.getsockname() == ""
    raw.close()


def test_descriptors_travel(sockets):
    one, other = sockets
    reader, writer = os.pipe()
    one.send({"writer": FileDescriptor(writer), "again": None, "number": 7})
    message = other.receive(1)
    assert message["number"] == 7
    os.write(message["writer"].fileno(), b"through the copy")
    assert os.read(reader, 100) == b"through the copy"
    message["writer"].close()
    assert os.read(reader, 100) == b"", "sending kept a copy open"
    os.close(reader)


def test_several_descriptors_keep_their_order_and_identity(sockets):
    one, other = sockets
    pipes = [os.pipe() for _ in range(5)]
    shared = FileDescriptor(pipes[0][1])
    one.send([shared, *(FileDescriptor(writer) for _, writer in pipes[1:]), shared])
    one.send("next")
    received = other.receive(1)
    assert received[0] is received[-1]
    for place, (reader, _) in enumerate(pipes):
        os.write(received[place].fileno(), bytes([place]))
        assert os.read(reader, 10) == bytes([place])
        os.close(reader)
    assert other.receive(1) == "next"


def test_descriptors_of_several_messages_do_not_mix(sockets):
    one, other = sockets
    pipes = [os.pipe() for _ in range(4)]
    for place, (_, writer) in enumerate(pipes):
        one.send((place, FileDescriptor(writer), b"y" * 20_000))
        one.send("between")
    for place, (reader, _) in enumerate(pipes):
        number, descriptor, _ = other.receive(1)
        assert (number, other.receive(1)) == (place, "between")
        os.write(descriptor.fileno(), bytes([place]))
        assert os.read(reader, 10) == bytes([place])
        os.close(reader)


def test_unread_descriptors_are_closed_with_the_channel(sockets):
    one, other = sockets
    reader, writer = os.pipe()
    one.send([FileDescriptor(writer)])
    other._read()  # into its buffer, descriptors and all
    other.close()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_message_that_comes_in_pieces(sockets):
    one, other = sockets
    one.send(list(range(1000)))
    whole = b""
    while True:
        try:
            whole += other._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    raw = one._socket
    for start, end in ((0, 3), (3, 15), (15, 500), (500, len(whole) - 1)):
        raw.sendall(whole[start:end])
        with pytest.raises(TimeoutError):
            other.receive(0.01)
    raw.sendall(whole[-1:] + whole)
    assert other.receive(1) == list(range(1000))
    assert other.receive(1) == list(range(1000))


def test_an_end_in_the_middle_of_a_message_is_the_end(sockets):
    one, other = sockets
    one._socket.sendall(struct.pack("!QI", 1000, 0) + b"only the beginning")
    one.close()
    with pytest.raises(ChannelClosedError):
        other.receive(1)


def test_descriptor_numbers_past_what_select_can(sockets):
    one, other = sockets
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        import fcntl

        number = fcntl.fcntl(other.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)
        high = SocketChannel(socket.socket(fileno=number))
        one.send("high")
        assert high.receive(1) == "high"
        high.abandon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_process_answers(peer):
    channel, _ = peer
    channel.send({"value": 1})
    assert channel.receive(30) == {"value": 1}


def test_a_killed_process_is_noticed_by_who_waits(peer):
    channel, process = peer
    channel.send("ready?")
    channel.receive(30)
    timer = threading.Timer(0.05, os.kill, [process.pid, signal.SIGKILL])
    timer.start()
    with pytest.raises(ChannelClosedError):
        channel.receive(10)
    timer.join()


def test_a_killed_process_is_noticed_by_who_sends_more_than_fits(peer):
    channel, process = peer
    channel.send("ready?")
    channel.receive(30)
    os.kill(process.pid, signal.SIGSTOP)  # it reads no more, so that the sender blocks
    timer = threading.Timer(0.1, os.kill, [process.pid, signal.SIGKILL])
    timer.start()
    with pytest.raises(ChannelClosedError):
        channel.send(b"z" * (8 << 20))
    timer.join()


def test_closing_wakes_this_ends_own_receiver(sockets):
    one, _ = sockets
    timer = threading.Timer(0.02, one.close)
    timer.start()
    with pytest.raises(ChannelClosedError):
        one.receive(10)
    timer.join()


def test_abandon_leaves_the_line_to_the_other_copy(sockets):
    one, other = sockets
    copy = SocketChannel(socket.socket(fileno=os.dup(one.fileno())))
    one.abandon()
    copy.send("still here")
    assert other.receive(1) == "still here"
    copy.close()


def test_detach_gives_the_descriptor_away(sockets):
    one, other = sockets
    descriptor = one.detach()
    again = SocketChannel(socket.socket(fileno=descriptor.detach()))
    again.send("moved")
    assert other.receive(1) == "moved"
    again.close()
