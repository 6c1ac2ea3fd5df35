"""Who goes first, who gets which piece."""

import pytest
import torch

from notebook_launcher import Accelerator, PartialState
from notebook_launcher.core.errors import PeerError


def in_turn(name):
    """What each rank finds written before it goes."""
    accelerator = Accelerator(cpu=True)
    store = torch.distributed.distributed_c10d._get_default_store()
    with getattr(accelerator, name)():
        found = store.check(["written"])
        if accelerator.is_main_process:
            store.set("written", "")
    return found


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_the_main_process_goes_first(on_ranks, name):
    assert on_ranks(in_turn, name) == [False, True]


def failing_first():
    accelerator = Accelerator(cpu=True)
    try:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise FileNotFoundError("no data")  # noqa: TRY301 - it is to leave the context
    except (FileNotFoundError, PeerError) as error:
        told = f"{type(error).__name__}: {error}"
    accelerator.wait_for_everyone()
    return told


def test_an_error_on_the_main_process_releases_the_others(on_ranks):
    main, other = on_ranks(failing_first)
    assert main == "FileNotFoundError: no data"
    assert other.startswith("PeerError: rank 0 raised FileNotFoundError: no data\nRank 1 waited for it in main_process")


def failing_alone():
    with Accelerator(cpu=True).main_process_first():
        if PartialState().is_main_process:
            raise FileNotFoundError("no data")


def test_the_main_processs_own_error_is_the_runs(on_ranks):
    with pytest.raises(FileNotFoundError, match="no data") as caught:
        on_ranks(failing_alone)
    assert "PeerError" in str(caught.value.__cause__)


def failing_second():
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        if not accelerator.is_main_process:
            raise LookupError("a word of the others")


def test_an_error_of_the_others_is_their_own(on_ranks):
    with pytest.raises(LookupError, match="a word of the others"):
        on_ranks(failing_second)


def test_alone_there_is_nobody_to_wait_for_and_nothing_to_split():
    state = PartialState(cpu=True)
    with state.main_process_first(), state.local_main_process_first():
        pass
    inputs = [1, 2]
    with state.split_between_processes(inputs, apply_padding=True) as mine:
        assert mine is inputs
    state.destroy_process_group()


def pieces():
    state = PartialState(cpu=True)
    with (
        state.split_between_processes(["a", "b", "c"]) as mine,
        state.split_between_processes([1], apply_padding=True) as padded,
    ):
        return mine, padded


def test_each_process_gets_its_piece(on_ranks):
    assert on_ranks(pieces) == [(["a", "b"], [1]), (["c"], [1])]


def triggers():
    accelerator = Accelerator(cpu=True)
    seen = [accelerator.check_trigger()]
    if not accelerator.is_main_process:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_set_anywhere_is_seen_once_everywhere(on_ranks):
    assert on_ranks(triggers) == [[False, True, False]] * 2
    accelerator = Accelerator(cpu=True)
    accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]


def leave():
    accelerator = Accelerator(cpu=True)
    accelerator.destroy_process_group()
    return torch.distributed.is_initialized()


def test_the_process_group_can_be_taken_down(on_ranks):
    assert on_ranks(leave) == [False, False]
