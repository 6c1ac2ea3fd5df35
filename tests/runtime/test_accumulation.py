"""The schedule alone: no tensors. A fake loop reports batches to ``Progress`` and enters a ``Group`` for each."""

import contextlib

import pytest

from notebook_launcher.runtime.accumulation import Accumulation, Group, Progress


class Loop:
    """An accelerator's bookkeeping, and a log of (synced, divisor)."""

    def __init__(self, num_steps):
        self.state = Accumulation(num_steps)
        self.progress = Progress()
        self.rescaled = []
        self.abandoned = 0
        self.local = 0
        self.log = []
        self.group = self.new_group()

    def new_group(self):
        return Group(
            self.state,
            self.progress,
            local=[self],
            rescale=self.rescaled.append,
            abandon=lambda: setattr(self, "abandoned", self.abandoned + 1),
        )

    def __enter__(self):
        self.local += 1

    def __exit__(self, *exception):
        self.local -= 1

    def batches(self, num_batches, *, loader="train", is_sized=True):
        iteration = self.progress.begin(loader, num_batches if is_sized else None)
        try:
            for index in range(num_batches):
                self.progress.advance(iteration, index == num_batches - 1, (), ())
                yield index
        finally:
            self.progress.end(iteration)

    def micro_batch(self, group=None):
        with group or self.group:
            assert self.local == (not self.state.current.sync)
            self.log.append((self.state.current.sync, self.state.current.divisor))
            self.state.current.is_pending = self.state.current.has_run = True
        assert self.local == 0

    @property
    def synced(self):
        return [index for index, (sync, _) in enumerate(self.log) if sync]


def test_groups_are_full_and_the_last_is_short():
    loop = Loop(4)
    for _ in loop.batches(6):
        loop.micro_batch()
    assert loop.synced == [3, 5]
    assert [divisor for _, divisor in loop.log] == [4, 4, 4, 4, 2, 2]
    assert loop.rescaled == []


def test_where_no_length_is_known_the_short_group_is_put_right_at_its_end():
    loop = Loop(4)
    for _ in loop.batches(7, is_sized=False):
        loop.micro_batch()
    assert loop.synced == [3, 6]
    assert loop.log[-1] == (True, 3)
    assert loop.rescaled == [4 / 3]


def test_a_length_that_was_too_small_does_no_harm():
    loop = Loop(4)
    iteration = loop.progress.begin("train", 2)
    for index in range(4):
        loop.progress.advance(iteration, index == 3, (), ())
        loop.micro_batch()
    assert loop.synced == [3]
    assert loop.rescaled == [2 / 4]
    assert loop.log[-1] == (True, 4)


def test_without_a_loader_only_the_count_matters():
    loop = Loop(3)
    for _ in range(7):
        loop.micro_batch()
    assert loop.synced == [2, 5]


def test_one_step_always_syncs():
    loop = Loop(1)
    for _ in loop.batches(3):
        loop.micro_batch()
    assert loop.log == [(True, 1)] * 3


def test_an_exception_leaves_the_local_contexts():
    loop = Loop(4)
    with contextlib.suppress(KeyError), loop.group:
        assert loop.local == 1
        raise KeyError
    assert loop.local == 0


def test_a_break_drops_the_unfinished_group_and_the_next_loop_starts_afresh():
    loop = Loop(4)
    for index in loop.batches(8):
        loop.micro_batch()
        if index == 5:
            break
    for _ in loop.batches(4):
        loop.micro_batch()
    assert loop.synced == [3, 9]
    assert loop.abandoned == 1


def test_a_loop_that_ended_is_not_abandoned():
    loop = Loop(4)
    for _ in range(2):
        for _ in loop.batches(6):
            loop.micro_batch()
    assert loop.synced == [3, 5, 9, 11]
    assert loop.abandoned == 0


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("num_read", [1, 2, 8])
def test_an_evaluation_inside_changes_nothing_however_it_is_left(at, num_read):
    loop = Loop(4)
    held = []
    for index in loop.batches(6):
        if index == at:
            evaluation = loop.batches(8, loader="evaluation")
            for _ in range(num_read):
                next(evaluation)
            held.append(evaluation)  # still referenced: not closed
        loop.micro_batch()
    assert loop.synced == [3, 5]
    assert loop.abandoned == 0


@pytest.mark.parametrize("num_kept", [2, 3, 4, 6])
@pytest.mark.parametrize("at", [None, 0, 2, 5])
def test_a_pass_that_is_kept_open_at_its_last_batch_ends_no_group(num_kept, at):
    """Whether it was read before the loop or within, and however far it came by then."""
    loop = Loop(4)
    kept = loop.batches(num_kept, loader="evaluation")
    for _ in range(num_kept if at is None else 0):
        next(kept)
    for index in loop.batches(12):
        if index == at:
            for _ in range(num_kept):
                next(kept)
        loop.micro_batch()
    assert loop.synced == [3, 7, 11]


def test_a_pass_read_now_and_then_is_not_in_step():
    loop = Loop(4)
    other = loop.batches(3, loader="other")
    for index in loop.batches(8):
        for _ in range({0: 2, 2: 1}.get(index, 0)):  # its last batch comes with the third of the loop's
            next(other)
        loop.micro_batch()
    assert loop.synced == [3, 7]


def test_an_evaluation_between_groups_is_forgotten():
    loop = Loop(2)
    for _ in loop.batches(3):
        for _ in loop.batches(5, loader="evaluation"):
            pass
        loop.micro_batch()
    assert loop.synced == [1, 2]


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (9, 5, 7)])
def test_loaders_read_in_step_end_together_whichever_is_first(sizes):
    loop = Loop(4)
    for _ in zip(*(loop.batches(size, loader=size) for size in sizes), strict=False):
        loop.micro_batch()
    assert loop.synced == [3, 4]


def test_each_set_of_models_counts_for_itself():
    loop = Loop(2)
    other = loop.new_group()
    for _ in loop.batches(4):
        loop.micro_batch()
        loop.micro_batch(other)
    assert [sync for sync, _ in loop.log] == [False, False, True, True] * 2


def test_zero_grad_waits_for_the_group_wherever_it_is_called():
    group = Group(Accumulation(2), Progress(), rescale=[].append, abandon=lambda: None)
    calls = []
    with group:
        assert not group.zeroing_waits(), "before the first backward there is nothing to lose"
        group.is_pending = group.has_run = True
        assert group.zeroing_waits()
        group.owed[1] = lambda: calls.append("zeroed")
    with group:
        assert group.zeroing_waits(), "the group's last backward is still to come"
        group.has_run = True
        assert not group.zeroing_waits()
    assert calls == []
    with group:
        assert calls == ["zeroed"], "what waited is done when the next group begins"


def test_another_group_in_between_neither_zeroes_nor_forgets():
    loop = Loop(2)
    other = loop.new_group()
    calls = []
    loop.micro_batch()
    loop.group.owed[1] = lambda: calls.append("zeroed")
    loop.micro_batch(other)
    assert calls == []
    assert loop.group.is_pending


class Local:
    """Counts like a model's no_sync."""

    def __init__(self):
        self.depth = 0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *exception):
        self.depth -= 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_nested_groups_leave_their_own_contexts(ahead):
    shared, progress, contexts = Accumulation(2), Progress(), [Local(), Local()]
    outer, inner = (
        Group(shared, progress, local=[context], rescale=[].append, abandon=lambda: None) for context in contexts
    )
    for _ in range(ahead):
        with inner:
            pass
    for sync in (False, True):
        with outer:
            with inner:
                assert [context.depth for context in contexts] == [not sync, sync == bool(ahead)]
            assert shared.current is outer, "what follows in the outer context is the outer group's"
            assert contexts[0].depth == (not sync)
        assert [context.depth for context in contexts] == [0, 0]
        assert outer.sync is sync


def test_a_group_within_itself_leaves_as_often_as_it_was_entered():
    context = Local()
    group = Group(Accumulation(3), Progress(), local=[context], rescale=[].append, abandon=lambda: None)
    with group:
        with group:
            assert context.depth == 2
        assert context.depth == 1
    assert context.depth == 0


@pytest.mark.parametrize("to", [1, 2, 6])
def test_the_number_of_steps_may_change_in_mid_group(to):
    loop = Loop(4)
    for _ in range(3):
        loop.micro_batch()
    loop.state.set_num_steps(to)
    for _ in range(9):
        loop.micro_batch()
    first = max(3, to - 1)
    assert loop.synced[:2] == [first, first + to]
    assert loop.rescaled == ([] if first == 3 else [4 / 6]), "its losses were divided by four"
    assert loop.log[first] == (True, first + 1)
    assert loop.log[first + 1][1] == to
