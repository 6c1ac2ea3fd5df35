"""Bytes are laid out once and mapped by whoever receives them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from notebook_launcher.core import shared_memory
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.shared_memory import INLINE_BYTES, FileDescriptor, pack, unpack

_LARGE = INLINE_BYTES + 1


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [1], [INLINE_BYTES], [_LARGE], [3, _LARGE, 5, 2 * _LARGE], [1 << 22]],
    ids=str,
)
def test_pickle_and_buffers_come_back_as_they_were(sizes):
    buffers = [os.urandom(size) for size in sizes]
    packed = pack(b"the pickle", buffers)
    head, views = unpack(packed)
    assert bytes(head) == b"the pickle"
    assert [bytes(view) for view in views] == buffers
    assert packed.size_bytes == len(b"the pickle") + sum(sizes)


def test_a_large_pickle_is_mapped_too():
    data = os.urandom(_LARGE)
    packed = pack(data, [])
    assert packed.mapping is not None
    assert bytes(unpack(packed)[0]) == data


def test_small_parts_need_no_mapping():
    assert pack(b"x" * INLINE_BYTES, [b"y" * INLINE_BYTES]).mapping is None


def test_buffers_start_where_torch_and_numpy_want_them():
    packed = pack(b"", [b"a" * (_LARGE + 7), b"b" * (_LARGE + 13), b"c" * _LARGE])
    offsets = [part[0] for part in packed.parts if isinstance(part, tuple)]
    assert len(offsets) == 3
    assert [offset % 64 for offset in offsets] == [0, 0, 0]


def test_typed_memory_is_taken_as_bytes():
    import numpy as np

    array = np.arange(30_000, dtype=np.float64)
    packed = pack(b"", [memoryview(array)])
    assert np.array_equal(np.frombuffer(unpack(packed)[1][0]), array)


@pytest.mark.parametrize("size", [10, _LARGE])
def test_a_write_stays_with_the_writer(size):
    packed = pack(b"", [b"a" * size])
    (mine,), (other,) = unpack(packed)[1], unpack(packed)[1]
    mine[0] = ord("z")
    assert bytes(mine[:2]) == b"za"
    assert bytes(other[:2]) == b"aa"
    assert bytes(unpack(packed)[1][0][:2]) == b"aa"


def test_views_outlive_the_descriptor():
    packed = pack(b"", [b"a" * _LARGE])
    (view,) = unpack(packed)[1]
    packed.mapping.close()
    assert bytes(view[-2:]) == b"aa"


def test_the_mapping_goes_with_its_last_reference():
    packed = pack(b"", [b"a" * _LARGE])
    number = packed.mapping.fileno()
    os.fstat(number)
    del packed
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_packed_travels_to_another_process():
    ours, theirs = SocketChannel.pair()
    code = """
import socket, sys
from notebook_launcher.core import shared_memory
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.shared_memory import unpack
channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])))
head, (large, small) = unpack(channel.receive(20))
large[0] = 0
channel.send((bytes(head), len(large), bytes(large[-3:]), bytes(small)))
"""
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        packed = pack(b"head", [b"q" * 1_000_000, b"small"])
        ours.send(packed)
        assert ours.receive(30) == (b"head", 1_000_000, b"qqq", b"small")
        assert process.wait(10) == 0
    assert bytes(unpack(packed)[1][0][:1]) == b"q", "the receiver's write reached the sender"
    ours.close()
    theirs.close()


def test_descriptor_closes_once():
    reader, writer = os.pipe()
    descriptor = FileDescriptor(writer)
    descriptor.close()
    descriptor.close()
    assert descriptor.fileno() == -1
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_descriptor_is_closed_when_dropped_and_kept_when_detached():
    reader, writer = os.pipe()
    number = FileDescriptor(writer).detach()
    gc.collect()
    os.write(number, b"open")
    assert os.read(reader, 4) == b"open"
    FileDescriptor(number)
    gc.collect()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_descriptor_may_be_closed_while_it_is_being_held(monkeypatch):
    monkeypatch.setattr(shared_memory, "_POPULATE_BYTES", 4096)
    size_bytes = 16 << 20
    packed = pack(b"", [bytes(size_bytes)])
    begun = threading.Event()
    closer = threading.Thread(target=lambda: begun.wait(10) and packed.mapping.close())
    closer.start()
    real = shared_memory.mmap.mmap

    def mapped(*arguments, **options):
        begun.set()
        return real(*arguments, **options)

    monkeypatch.setattr(shared_memory.mmap, "mmap", mapped)
    packed.mapping.hold(packed.mapping_bytes)
    closer.join(10)
    assert packed.mapping.fileno() == -1
    packed.mapping.hold(packed.mapping_bytes)  # nothing to hold any more
    assert packed.mapping._held is None
