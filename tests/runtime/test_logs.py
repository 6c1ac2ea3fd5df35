import io
import logging
import sys

import pytest
import torch.distributed as dist

from notebook_launcher import Accelerator, get_logger, tqdm


def test_alone_every_message_is_heard_from_the_callers_line(caplog):
    logger = get_logger("mine", log_level="info")
    logger.info("the %s", "first", extra={"color": "red"})
    logger.warning("everywhere", main_process_only=False)
    logger.error("in order", in_order=True)
    logger.debug("too low")
    assert caplog.messages == ["the first", "everywhere", "in order"]
    assert {record.filename for record in caplog.records} == {"test_logs.py"}
    assert {record.funcName for record in caplog.records} == {
        test_alone_every_message_is_heard_from_the_callers_line.__name__
    }
    assert caplog.records[0].color == "red"


def test_an_exception_comes_with_its_traceback(caplog):
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        get_logger("mine").exception("failed")
    assert caplog.records[0].exc_info[0] is ZeroDivisionError


def test_a_warning_is_given_once(caplog):
    logger = get_logger("mine")
    for value in (1, 2, 1):
        logger.warning_once("value %d", value)
    assert caplog.messages == ["value 1", "value 2"]
    assert caplog.records[0].filename == "test_logs.py"


def test_what_is_not_hashable_may_be_warned_of_once(caplog):
    logger = get_logger("mine")
    for value in ([1], [2], [1]):
        logger.warning_once("values %s", value)
    assert caplog.messages == ["values [1]", "values [2]"]


def test_the_level_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("of the environment").logger.level == logging.ERROR
    assert get_logger("of the environment", "debug").logger.level == logging.DEBUG


def heard():
    """What each rank logs, before and after it has met the others."""
    stream = io.StringIO()
    logging.basicConfig(stream=stream, level="INFO", format="%(message)s")
    logger = get_logger("ranks")
    logger.info("main alone")
    logger.info("everywhere", main_process_only=False)
    logger.info("no order yet", in_order=True)
    accelerator = Accelerator(cpu=True)
    logger.info("main")
    logger.setLevel("INFO" if accelerator.process_index else "ERROR")
    logger.info("everywhere", main_process_only=False, in_order=True)
    accelerator.wait_for_everyone()
    return stream.getvalue().splitlines()


def test_ranks_are_heard_as_they_were_told(on_ranks):
    first = ["main alone", "everywhere", "no order yet", "main"]
    assert on_ranks(heard) == [first, ["everywhere", "no order yet", "everywhere"]]


def in_order(folder):
    accelerator = Accelerator(cpu=True)
    logger = get_logger("order")
    handler = logging.FileHandler(f"{folder}/log")
    logger.logger.addHandler(handler)
    handler.emit = lambda record: print(record.getMessage(), file=handler.stream, flush=True)
    for turn in range(3):
        logger.warning("%d %d", turn, accelerator.process_index, in_order=True)


def test_in_order_ranks_take_turns(on_ranks, tmp_path):
    on_ranks(in_order, str(tmp_path), num_processes=3)
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [
        f"{turn} {rank}" for turn in range(3) for rank in range(3)
    ]


def shown_bars():
    shown = []
    for options in ({}, {"main_process_only": False}, {"disable": True}):
        stream = io.StringIO()
        assert list(tqdm(range(2), file=stream, **options)) == [0, 1]
        shown.append(bool(stream.getvalue()))
    stream = io.StringIO()
    tqdm(False, range(1), file=stream).close()  # noqa: FBT003 - as older code does
    return [*shown, bool(stream.getvalue())]


def test_one_bar_a_machine(on_ranks):
    assert on_ranks(shown_bars) == [[True, True, False, True], [False, True, False, True]]


def test_a_missing_tqdm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ModuleNotFoundError, match="package 'tqdm', which is not installed here: pip install tqdm"):
        tqdm(range(3))


def test_a_group_that_the_user_made_says_which_rank_it_is(monkeypatch, caplog):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    get_logger("mine").warning("not rank 0")
    assert caplog.messages == []
