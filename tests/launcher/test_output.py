import random
import threading
import time

import pytest

from notebook_launcher.launcher.output import Line, OutputLog
from notebook_launcher.launcher.sgr import runs


def texts(log, rank=None):
    return [line.text for line in log.lines(rank)]


def live(log, rank=None):
    return [line.text for line in log.live(rank)]


def fed(*pieces, **options):
    log = OutputLog(1, **options)
    for piece in pieces:
        log.feed(0, "stdout", piece)
    return log


def test_lines_carry_their_rank_and_stream_in_order_of_arrival():
    log = OutputLog(2)
    log.feed(1, "stdout", b"one\n")
    log.feed(0, "stderr", b"two\nthree\n")
    log.feed(1, "stdout", b"four\n")
    assert log.lines() == [
        Line(1, "stdout", "one"),
        Line(0, "stderr", "two"),
        Line(0, "stderr", "three"),
        Line(1, "stdout", "four"),
    ]
    assert log.lines(last=2) == log.lines()[-2:]
    assert texts(log, 0) == ["two", "three"]


def test_a_line_that_has_begun_is_live_until_its_newline():
    log = fed(b"a\nloss: ")
    assert (texts(log), live(log)) == (["a"], ["loss: "])
    log.feed(0, "stdout", b"0.5\n")
    assert (texts(log), live(log)) == (["a", "loss: 0.5"], [])


@pytest.mark.parametrize("cut", range(1, 10))
def test_characters_split_between_reads_are_whole_and_never_shown_half(cut):
    data = "ü漢🎉\n".encode()
    log = fed(data[:cut])
    assert all("\\x" not in text for text in live(log))
    log.feed(0, "stdout", data[cut:])
    assert texts(log) == ["ü漢🎉"]


def test_what_is_not_utf8_is_escaped_and_control_characters_are_left_out():
    assert texts(fed(b"\xff\xfe ok\x00\x07\tend\n")) == ["\\xff\\xfe ok\tend"]


@pytest.mark.parametrize("pieces", [[b"a\r\nb\r\n"], [b"a\r", b"\nb", b"\r\n"], [b"a\r\r\nb\r\r", b"\n"]])
def test_carriage_return_and_newline_end_a_line(pieces):
    log = fed(*pieces)
    assert (texts(log), live(log)) == (["a", "b"], [])


def test_the_last_lines_are_kept_and_all_are_counted():
    log = fed(*(b"line %d\n" % number for number in range(50)), b"x\ny\n", keep_lines=10)
    assert texts(log) == [f"line {number}" for number in range(42, 50)] + ["x", "y"]
    assert (log.num_lines(0), log.num_dropped(0)) == (52, 42)


def test_many_lines_in_one_read_are_cut_to_those_kept():
    log = fed(b"".join(b"%d\n" % number for number in range(5_000)), keep_lines=100)
    assert texts(log) == [str(number) for number in range(4_900, 5_000)]
    assert (log.num_lines(0), log.num_dropped(0)) == (5_000, 4_900)


def test_what_is_kept_is_bounded_in_bytes_too():
    log = fed(*(b"%03d" % number + b"x" * 200_000 + b"\n" for number in range(100)))
    kept = texts(log)
    assert 5_000_000 < sum(map(len, kept)) < 10_000_000
    assert kept[-1].startswith("099")
    assert log.num_dropped(0) == 100 - len(kept)


def test_a_line_of_a_hundred_kilobytes_is_whole():
    assert texts(fed(b"x" * 40_000, b"x" * 60_000, b"\n")) == ["x" * 100_000]


@pytest.mark.parametrize("size", [64_000, 3_000_000])
def test_a_line_without_end_is_cut_and_says_by_how_much(size):
    log = fed(*[b"x" * size] * (3_000_000 // size), b"\nnext\n")
    assert [len(text) < 1_100_000 for text in texts(log)] == [True, True]
    num_cut = 3_000_000 // size * size - (1 << 20)
    assert texts(log)[0].endswith(f"x ... [{num_cut:,} more bytes of this line not kept]")
    assert texts(log)[1] == "next"


@pytest.mark.parametrize("newline", [b"\n", b""], ids=["lines", "one line"])
def test_binary_output_is_taken_in_as_fast_as_text(newline, tmp_path):
    data = random.Random(0).randbytes(4_000_000).replace(b"\n", newline)  # noqa: S311 - not a secret
    log = OutputLog(1, folder=tmp_path)
    began_s = time.process_time()
    for start in range(0, len(data), 64_000):
        log.feed(0, "stdout", data[start : start + 64_000])
        log.live()
    assert time.process_time() - began_s < 0.5
    log.close()
    assert log.path(0).read_bytes() == data
    assert not any(control in log.text(0) for control in "\x00\x08\r\x1b")


def test_a_binary_line_is_cut_to_what_anybody_looks_at_and_text_after_it_is_text():
    log = OutputLog(1)
    for piece in (b"\rloss", b"\x00\x01\x02\x03a\r" * 2000, b"\x1b[A b\r1%", b"\n\r50%\r99%", b"\nend\n"):
        log.feed(0, "stdout", piece)
    start, binary, *rest = texts(log)
    assert (start, rest) == ("loss", ["99%", "end"])
    assert binary == "a" * 1365 + " ... [3,816 more bytes of this line not kept]"


def test_a_few_control_characters_make_no_binary():
    log = fed(b"\r\x01\x1b[32m\x02>>>\x00 1%", b"\r\x01\x1b[32m\x02>>>\x00 2%\x1b[0m")
    assert live(log) == ["\x1b[32m>>> 2%\x1b[0m"]


def test_a_bar_is_one_live_line_and_becomes_a_line_when_text_follows():
    log = OutputLog(2)
    for rank in (0, 1):
        for step in range(101):
            log.feed(rank, "stderr", b"\r%d%%" % step)
    assert log.live() == [Line(0, "stderr", "100%"), Line(1, "stderr", "100%")]
    log.feed(0, "stderr", b"\n")
    log.feed(0, "stderr", b"done\n")
    assert texts(log, 0) == ["100%", "done"]
    assert log.lines(1) == []


def test_tqdm_with_nested_bars_and_messages_leaves_no_stray_line():
    tqdm = pytest.importorskip("tqdm").tqdm
    log = OutputLog(1)

    class Stream:
        def write(self, text):
            log.feed(0, "stderr", text.encode())

        def flush(self):
            pass

    stream = Stream()
    with tqdm(range(3), file=stream, mininterval=0, desc="outer", ncols=70) as outer:
        for epoch in outer:
            for _ in tqdm(range(5), file=stream, mininterval=0, desc="inner", ncols=70, leave=False):
                assert len(log.live()) <= 3
            tqdm.write(f"epoch {epoch}", file=stream)
    stream.write("end\n")
    lines = texts(log)
    assert lines[:3] == ["epoch 0", "epoch 1", "epoch 2"]
    assert lines[3].startswith("outer: 100%")
    assert lines[4:] == ["end"]
    assert log.live() == []


def test_bars_that_each_end_with_a_newline_become_lines():
    log = fed(*(b"\rstep 1\rstep %d\n" % number for number in range(10)))
    assert [*texts(log), *live(log)] == [f"step {number}" for number in range(10)]
    assert len(live(log)) <= 1


def test_colours_stay_and_other_sequences_go():
    assert texts(fed(b"\x1b[31mred\x1b[0m plain\n")) == ["\x1b[31mred\x1b[0m plain"]
    assert texts(fed(b"\x1b]0;title\x07a\x1b[?25lb\x1b(Bc\n")) == ["abc"]


def test_a_colour_left_on_reaches_into_the_next_lines():
    log = fed(b"\x1b[31mred\nstill\x1b[0m\nplain\n")
    assert texts(log) == ["\x1b[31mred\x1b[0m", "\x1b[31mstill\x1b[0m", "plain"]


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_read_that_ends_in_a_sequence_changes_nothing(cut):
    data = b"a\x1b[1;31mb\x1b[0mc\n\rd\x1b[2Ke\n\nf\n"
    log = fed(data[:cut], data[cut:])
    assert texts(log) == texts(fed(data)) == ["a\x1b[1;31mb\x1b[0mc", " e", "", "f"]


def test_lines_do_not_depend_on_how_the_bytes_were_read():
    pieces = [
        b"text",
        b"x",
        " ü🎉".encode(),
        b"\n",
        b"\n",
        b"\r",
        b"\r\n",
        b"\x08",
        b"\x1b[K",
        b"\x1b[31m",
        b"\x1b[0m",
        b"\xff",
    ]
    for seed in range(300):
        chance = random.Random(seed)  # noqa: S311 - not a secret
        data = b"".join(chance.choices(pieces, k=40))
        results = []
        for size in (len(data), 1, chance.randint(2, 20)):
            log = fed(*(data[start : start + size] for start in range(0, len(data), size)))
            log.close()
            results.append([[(style, char) for style, run in runs(text) for char in run] for text in texts(log)])
        assert results[0] == results[1] == results[2], (seed, data)


def test_ranks_that_are_not_shown_are_kept_but_not_merged():
    log = OutputLog(2, shown_ranks={0})
    log.feed(1, "stdout", b"hidden\nbar")
    log.feed(1, "stdout", b"more\n")
    assert (log.lines(), log.live()) == ([], [])
    assert log.text(1) == "hidden\nbarmore\n"


def test_text_is_plain_and_has_the_live_line():
    assert fed(b"\x1b[1ma\x1b[0m\nb").text(0) == "a\nb\n"


def test_log_files_hold_every_byte_of_both_streams(tmp_path):
    folder = tmp_path / "logs" / "run"
    log = OutputLog(2, folder=folder, keep_lines=1)
    assert log.path(1) is None
    assert not folder.exists()
    log.feed(1, "stdout", b"\xff\r1%")
    log.feed(1, "stderr", b"oops\n")
    log.feed(1, "stdout", b"\r2%\n")
    assert log.path(1).read_bytes() == b"\xff\r1%oops\n\r2%\n"
    log.close()
    assert [path.name for path in folder.iterdir()] == ["rank_1.log"]


def test_a_log_that_cannot_be_written_is_named_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("in the way")
    log = fed(b"a\n", b"b\n", folder=tmp_path / "file")
    assert texts(log) == ["a", "b"]
    assert "the log of rank 0 ends early" in log.problem(0)


def test_close_makes_lines_of_what_has_begun():
    log = OutputLog(2)
    log.feed(1, "stderr", b"\r50%")
    log.feed(0, "stdout", b"no newline \xc3")
    log.close()
    log.close()
    assert texts(log) == ["no newline \\xc3", "50%"]
    assert log.live() == []


def test_a_follower_gets_every_line_also_those_not_kept():
    log = OutputLog(1, keep_lines=10)
    taken = []
    follower = log.follow(lambda: taken.extend(follower.take()))
    for start in range(0, 200_000, 1000):
        log.feed(0, "stdout", b"".join(b"a line with a number, %d\n" % (start + number) for number in range(1000)))
    assert taken, "nothing was handed over while it piled up"
    taken += follower.take()
    assert [int(line.text.split()[-1]) for line in taken] == list(range(200_000))
    log.unfollow(follower)
    log.feed(0, "stdout", b"more\n")
    assert follower.take() == []


def test_readers_on_other_threads_see_whole_lines():
    log = OutputLog(2, keep_lines=100)
    done = threading.Event()
    wrong = []

    def read():
        while not done.is_set():
            wrong.extend(line for line in log.lines() if not line.text.startswith("line "))
            log.text(0), log.live(), log.path(0)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3000):
        log.feed(number % 2, "stdout", b"line %d\nline" % number + b" ")
    done.set()
    reader.join()
    assert not wrong
