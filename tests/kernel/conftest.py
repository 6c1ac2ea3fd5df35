"""A kernel that the tests share: each takes seconds to start and to warm up."""

from __future__ import annotations

import pytest
from jupyter_kernel import Kernel
from real_rank import WITHOUT_TORCH

SETUP = """
import os, sys, time, json, signal
import torch, torch.distributed as dist
from notebook_launcher import launch, LaunchConfig, WorkerError
%load_ext notebook_launcher
def rank(): return int(os.environ["RANK"])
"""
LIGHT_SETUP = f"""
import os, sys, time, json, signal
from notebook_launcher import launch, LaunchConfig, WorkerError
from notebook_launcher.launcher import warm
warm._PRELOAD = {WITHOUT_TORCH}
%load_ext notebook_launcher
"""


@pytest.fixture(scope="session")
def shared_kernel(tmp_path_factory):
    """A kernel with the extension loaded, for tests that leave it as they found it."""
    one = Kernel(directory=str(tmp_path_factory.mktemp("notebook")))
    one.ok(SETUP)
    one.ok("from notebook_launcher.launcher import warm; assert warm._warm.server.warm.wait(60)")
    yield one
    one.shut_down(now=True)


@pytest.fixture
def own_kernel(kernel):
    """A kernel of the test's own, with the extension loaded; neither it nor its fork server loads torch."""
    kernel.ok(LIGHT_SETUP)
    return kernel
