"""What the Tab key offers, asked for as a kernel asks."""

import pytest
from IPython.core.completer import provisionalcompleter

from notebook_launcher.kernel_ext import completion
from notebook_launcher.kernel_ext.arguments import flags


def completions(shell, line):
    """As a kernel asks for them."""
    with provisionalcompleter():
        return [found.text for found in shell.Completer.completions(line, len(line))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%launch --mi", ["--mixed-precision"]),
        ("%%launch -n 2 --mi", ["--mixed-precision"]),
        ("run = %launch --mi", ["--mixed-precision"]),
        ("%launch --mixed-precision b", ["bf16"]),
        ("%launch -p ", ["no", "fp16", "bf16"]),
        ("%launch --device=cu", ["cuda"]),
        ("%launch -n 2 --start-method for", ["forkserver", "fork"]),
        ("%launcher st", ["status", "stop"]),
        ("%launcher ", ["check", "code", "devices", "runs", "status", "stop"]),
        ("x = %launcher de", ["devices"]),
        ("%launch --output ", ["all", "main"]),
        ("%launch tra", ["train"]),
        ("%launch -n 2 tra", ["train"]),
        ("%launch box.fi", ["box.fit"]),
        ("x = 1\n%launch tra", ["train"]),
    ],
)
@pytest.mark.parametrize("use_jedi", [True, False])
def test_completion_offers_what_fits_and_nothing_else(shell, launcher, line, expected, use_jedi):
    shell.run_cell("class Box:\n    def fit(self): ...\nbox = Box()", silent=True)
    shell.Completer.use_jedi = use_jedi
    try:
        assert sorted(completions(shell, line)) == sorted(expected)
    finally:
        shell.Completer.use_jedi = False


def test_options_and_then_the_call(shell, launcher):
    options = [flag.long for flag in flags()]
    assert sorted(completions(shell, "%launch --")) == sorted(options)
    assert sorted(completions(shell, "%launch -n 2 ")) == sorted(["train", *options])


def test_completion_as_ipython_before_8_6_asks_for_it(shell, launcher):
    matcher = completion._old_matcher(shell, completion._for_lines(shell))
    shell.Completer.text_until_cursor = "%launch -p b"
    assert matcher("%launch -p bf16 train(3)") == ["bf16"]


@pytest.mark.parametrize("text", ["tra", "train(--mi", "-n 2 train(3) --mi", "--save --mi"])
def test_no_options_where_python_or_a_free_value_stands(text):
    assert completion.launch_candidates(text) == []


def test_uninstall_takes_the_completion_away(shell, launcher):
    completion.uninstall(shell)
    completion.uninstall(shell)
    assert "status" not in completions(shell, "%launcher sta")
