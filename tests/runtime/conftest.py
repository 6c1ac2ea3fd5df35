"""``on_ranks``: run a function of the test module on several processes, and get back what each returned."""

import functools
import os

import pytest
import torch

from notebook_launcher import launch

# Each within its test's own. Only what hangs needs that long, or many ranks on few cores that are busy.
_LIMIT_S, _SLOW_LIMIT_S = 100, 240


def run_on_ranks(function, *args, num_processes=2, timeout_s=_LIMIT_S, **options):
    """Each rank's result, by rank; what a rank raised is raised here."""
    return list(
        launch(function, args, num_processes=num_processes, device="cpu", timeout_s=timeout_s, **options).results
    )


# The same object for each test: files remember by it what it has given.
run_slowly_on_ranks = functools.partial(run_on_ranks, timeout_s=_SLOW_LIMIT_S)


@pytest.fixture(scope="session", autouse=True)
def _torch_has_set_its_variables():
    parameter = torch.zeros(1, requires_grad=True)
    parameter.sum().backward()
    torch.optim.SGD([parameter]).step()  # the first step of all sets this variable
    yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """What is computed here is tiny: threads that wait for each other on busy cores would take the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def on_ranks(request):
    """``run_on_ranks``: a test takes it as a fixture, so that what stands behind it can be changed in one place."""
    return run_slowly_on_ranks if request.node.get_closest_marker("slow") else run_on_ranks
