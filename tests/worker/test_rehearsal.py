"""Rehearsals, in children of this process: what stays of one is what the next command replaces."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from child import in_child
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

from notebook_launcher.core import events, origins
from notebook_launcher.core.world import World
from notebook_launcher.worker import rehearsal, rendezvous, surroundings


def process():
    """Of this process, all that a rehearsal goes through."""
    main = sys.modules["__main__"].__dict__
    return {
        "descriptors": sorted(map(str, Path("/dev/fd").iterdir())),  # the listing's own has the same number each time
        "directory": str(Path.cwd()),
        "path": sys.path,
        "argv": sys.argv,
        "threads": torch.get_num_threads(),
        "main": sorted(main),
        "emitter": events._emitter is None,
        "received": len(origins._received),
    }


def draw():
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002, S311 - global ones


def test_nothing_stays_but_a_rank_s_environment_and_seeds():
    def child():
        rehearsal.rehearse()  # what it loads, it loads once
        before = process()
        rehearsal.rehearse()
        return before, process(), os.environ["RANK"], os.environ["MASTER_ADDR"]

    before, after, rank, address = in_child(child)
    assert after == before
    assert (rank, address) == ("0", "127.0.0.1")


def test_the_fork_server_puts_its_environment_back():
    def child():
        before = dict(os.environ)
        rehearsal.prepare()
        return before, dict(os.environ)

    before, after = in_child(child)
    assert after == before
    assert "RANK" not in after


def test_the_meeting_of_a_rehearsal_gives_way_to_the_ranks_own():
    def child():
        own = handlers["env"]
        rehearsal.rehearse()
        rehearsal.rehearse()
        rendezvous.lead_to(World(main_port=7))
        meeting = handlers["env"]
        return [isinstance(meeting, rendezvous.Meeting), meeting.otherwise is own, meeting._world.main_port]

    assert in_child(child) == [True, True, 7]


def test_workers_of_a_server_that_has_rehearsed_draw_different_numbers():
    def server():
        rehearsal.prepare()

        def worker():
            rehearsal.rehearse()
            surroundings.put_on(_surroundings(), World())
            return draw()

        return [in_child(worker), in_child(worker)]

    one, other = in_child(server)
    assert all(mine != yours for mine, yours in zip(one, other, strict=True))


@pytest.mark.parametrize("rehearsals", [0, 1])
def test_a_seed_counts_after_a_rehearsal_too(rehearsals):
    def worker():
        for _ in range(rehearsals):
            rehearsal.rehearse()
        surroundings.put_on(_surroundings(), World(seed=11))
        return draw()

    random.seed(11)
    np.random.seed(11)  # noqa: NPY002 - the global one
    torch.manual_seed(11)
    assert in_child(worker) == draw()


def test_the_seeds_of_a_rehearsal_are_kept():
    """To draw them takes a tenth of a first line's time."""

    def worker():
        rehearsal.rehearse()
        before = random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        surroundings.put_on(_surroundings(), World())
        after = random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        return before == after

    assert in_child(worker)


def _surroundings():
    return events.Surroundings(dict(os.environ), str(Path.cwd()), sys.path, sys.argv, {})
