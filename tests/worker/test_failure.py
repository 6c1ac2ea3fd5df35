"""What a rank tells of the exception that ended it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed

from notebook_launcher.core import pickling, tasks
from notebook_launcher.core.errors import PeerError
from notebook_launcher.worker import failure


def told(function):
    """The report of what ``function`` raises, as ``serve`` makes it."""
    try:
        tasks.Call(function)()
    except BaseException as error:  # noqa: BLE001
        return failure.describe(error)
    pytest.fail("nothing was raised")


def test_the_traceback_begins_with_the_users_own_code():
    def train():
        raise ValueError("no")

    report = told(train)
    assert (report.type_name, report.message) == ("ValueError", "no")
    lines = report.traceback_text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_failure.py" in lines[1]  # the caller of the call: this file's own frame
    assert "in train" in report.traceback_text
    assert lines[-1] == "ValueError: no"


def test_frames_of_the_worker_are_left_out():
    with pytest.raises(ZeroDivisionError) as caught:
        tasks.Call(lambda: 1 / 0)()
    all_frames = caught.value.__traceback__
    inner = all_frames.tb_next
    assert inner.tb_frame.f_code.co_filename.endswith("tasks.py")
    assert failure.without_our_frames(inner) is inner.tb_next
    assert failure.without_our_frames(all_frames) is all_frames


def test_where_all_frames_are_the_workers_they_are_shown():
    with pytest.raises(AttributeError) as caught:
        pickling.loads(None)
    inner = caught.value.__traceback__.tb_next
    assert failure.without_our_frames(inner) is inner
    assert failure.without_our_frames(None) is None


def test_a_folder_beside_ours_is_not_ours():
    assert not f"{failure._PACKAGE}/core_of_a_user.py".startswith(failure._OURS)
    assert f"{failure._PACKAGE}/core/tasks.py".startswith(failure._OURS)


def test_the_exception_itself_travels_with_its_causes():
    def train():
        try:
            {}["inner"]
        except KeyError as error:
            raise ValueError("outer") from error

    report = told(train)
    error = pickling.load_error(report.error)
    assert type(error) is ValueError
    assert type(error.__cause__) is KeyError
    assert "KeyError: 'inner'" in report.traceback_text
    assert "direct cause" in report.traceback_text


def test_an_exception_whose_text_raises():
    class OddError(Exception):
        def __str__(self):
            raise LookupError

    def train():
        raise OddError

    report = told(train)
    assert report.message == "(its text can't be shown: LookupError)"
    assert "in train" in report.traceback_text


def test_an_exception_whose_traceback_cannot_be_made(monkeypatch):
    monkeypatch.setattr(failure.traceback, "format_exception", lambda *_: 1 / 0)
    report = told([].pop)
    assert report.traceback_text == "IndexError (its traceback can't be shown: ZeroDivisionError)\n"


def test_a_recursion_without_end():
    def deeper(depth):
        return deeper(depth + 1)

    report = told(lambda: deeper(0))
    assert report.type_name == "RecursionError"
    assert "more times" in report.traceback_text
    assert len(report.traceback_text) < 10_000


def test_a_text_without_end_is_cut_in_the_middle():
    def train():
        raise ValueError("begin" + "x" * 1_000_000 + "end")

    report = told(train)
    text = report.traceback_text
    assert len(text) < failure._MAX_TEXT
    assert text.startswith("Traceback")
    assert "in train" in text
    for one in (report.message, text.rstrip()):
        assert "characters not shown" in one
        assert one.endswith("end")
    assert len(str(pickling.load_error(report.error))) == 1_000_008


def test_half_a_surrogate_pair_is_escaped():
    def train():
        raise ValueError("file \udcff")

    report = told(train)
    assert report.message == "file \\udcff"
    report.traceback_text.encode()


def test_what_cannot_be_pickled_is_text_only():
    @dataclasses.dataclass
    class LockedError(Exception):
        lines: object

    def train():
        raise LockedError(line for line in ())

    report = told(train)
    assert report.error is None
    assert report.type_name.endswith("LockedError")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_is_no_exception_is_reported_too(error):
    def train():
        raise error

    assert told(train).type_name == type(error).__name__


LOST = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4011",
    "[../third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for recv operation to complete",
    "Gloo connectFullMesh failed with [pair.cc] no error",
    "Application timeout caused pair closure",
    "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error, NCCL version 2.27",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "ncclSystemError: It can be also caused by unexpected exit of a remote peer",
    "Broken pipe",
    "Socket closed",
    "wait timeout after 1ms, keys: /x",
    "Timed out after 1 seconds waiting for clients. 1/2 clients joined.",
]


@pytest.mark.parametrize("text", LOST)
def test_the_loss_of_a_peer_is_recognised(text):
    def train():
        raise RuntimeError(text)

    assert told(train).peer_lost


def test_another_ranks_failure_is_a_peers_loss():
    def train():
        raise PeerError("rank 0 raised KeyError: 'x'")

    assert told(train).peer_lost


def test_errors_of_the_rendezvous_are_a_peers_loss():
    def connect():
        raise torch.distributed.DistNetworkError("The client socket has timed out after 1000ms")

    def wait():
        raise torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0")

    assert told(connect).peer_lost
    assert told(wait).peer_lost


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA out of memory"), ConnectionResetError("Connection reset by peer"), ValueError("Broken pipe")],
)
def test_other_errors_are_no_loss_of_a_peer(error):
    def train():
        raise error

    assert not told(train).peer_lost
