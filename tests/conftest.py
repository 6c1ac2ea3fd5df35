"""Fixtures of all tests: nothing may be left behind, and a real kernel."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import leaks
import pytest
from jupyter_core.utils import ensure_event_loop

_LIMIT_S = 8.0  # processes have five seconds to be gone, and the machine may be busy


def pytest_configure(config):
    """Give the tests, and all they start, a folder for temporary files of their own: what is in it is theirs."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where it is kept for a look
    folder = tempfile.mkdtemp(prefix="nbl-")  # short: a path to a socket has 107 bytes
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["IPYTHONDIR"] = f"{folder}/ipython-home"  # no start-up files or history of a person's
    os.environ["MPLBACKEND"] = "agg"
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    leaks.mark()


@pytest.fixture(scope="session", autouse=True)
def _the_session_leaves_nothing_behind():
    ensure_event_loop()  # jupyter_client makes one for good on first use, and with it three descriptors
    before = leaks.take()
    yield
    leaks.end_kept()
    found = leaks.left_behind(before, _LIMIT_S)
    if found:
        leaks.put_back(before)
        pytest.fail("The whole session left behind:\n" + "\n".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _the_test_leaves_nothing_behind(_the_session_leaves_nothing_behind):
    before = leaks.take()
    yield
    found = leaks.left_behind(before, _LIMIT_S)
    if found:
        leaks.put_back(before)
        pytest.fail("The test left behind:\n" + "\n".join(found), pytrace=False)


@pytest.fixture
def kernel(tmp_path):
    """A Jupyter kernel in an empty folder; see ``jupyter_kernel.Kernel``."""
    from jupyter_kernel import Kernel

    one = Kernel(directory=str(tmp_path))
    yield one
    one.shut_down(now=True)


def pytest_collection_finish():
    """Leave what all tests share out of the garbage collections to come: hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """A test that asks for a kernel has the marker that says so; one that is slow, more time."""
    for item in items:
        if "kernel" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.kernel)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(not _has_cuda(), reason="no CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
