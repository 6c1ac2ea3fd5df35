import os

import pytest

from notebook_launcher.core import endings


@pytest.fixture(autouse=True)
def _nothing_owed():
    yield
    endings._owed.clear()


def test_what_is_owed_is_done_once_the_latest_first():
    done = []
    endings.register(first := lambda failed: done.append(("first", failed)))
    endings.register(lambda failed: done.append(("second", failed)))
    endings.register(first)
    assert endings.pending()
    endings.run(failed=True)
    endings.run()
    assert done == [("second", True), ("first", True)]
    assert not endings.pending()


def test_what_is_not_owed_any_more_is_not_done():
    done = []
    endings.register(done.append)
    endings.unregister(done.append)
    endings.unregister(done.append)
    endings.run()
    assert done == []


@pytest.mark.parametrize("error", [ValueError("no disk"), KeyboardInterrupt("no disk")])
def test_an_error_is_shown_and_keeps_no_other_from_being_done(capsys, error):
    def fail(failed):
        raise error

    done = []
    endings.register(done.append)
    endings.register(fail)
    endings.run()
    assert done == [False]
    assert f"{type(error).__name__}: no disk" in capsys.readouterr().err


def test_a_forked_child_owes_nothing():
    endings.register(print)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, b"1" if endings.pending() else b"0")
        os._exit(0)
    os.wait()
    assert os.read(reader, 1) == b"0"
    assert endings.pending()
    os.close(reader)
    os.close(writer)
