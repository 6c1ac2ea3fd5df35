import pytest

from notebook_launcher.core.config import LaunchConfig, field_rows
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.kernel_ext.arguments import flags, help_text, parse


def test_options_end_where_the_python_begins():
    given = parse("-n 4 --mixed-precision bf16  train(3, lr=-1e-3, name='-n 2')  ")
    assert given.options == {"num_processes": "4", "mixed_precision": "bf16"}
    assert given.rest == "train(3, lr=-1e-3, name='-n 2')"


@pytest.mark.parametrize(
    "line",
    ["-n 4", "-n=4", "-n4", "--num-processes 4", "--num-processes=4", "--num_processes=4", "-n '4'", '  -n="4" '],
)
def test_ways_to_spell_an_option(line):
    given = parse(line)
    assert (given.options, given.rest) == ({"num_processes": "4"}, "")


@pytest.mark.parametrize(
    ("short", "name"), [("-n", "num_processes"), ("-d", "device"), ("-p", "mixed_precision"), ("-s", "strategy")]
)
def test_short_names(short, name):
    assert parse(f"{short} x f()").options == {name: "x"}


def test_every_field_is_an_option():
    names = {flag.name for flag in flags()}
    assert {row.name for row in field_rows()} < names
    assert "extra" not in names


def test_env_is_repeatable_and_quotes_keep_spaces():
    given = parse("""--env A=1 --env "B=x y" --env=C=a=b --log-dir 'my logs' f()""")
    assert given.options == {"env": {"A": "1", "B": "x y", "C": "a=b"}, "log_dir": "my logs"}
    assert given.rest == "f()"


def test_lists_are_comma_separated():
    config = LaunchConfig.make(environment={}, **parse("--device-ids 0,1 --preload numpy,scipy f()").options)
    assert (config.device_ids, config.preload) == ([0, 1], ["numpy", "scipy"])


def test_the_magic_s_own_options():
    given = parse("--config c.yaml --save results f()")
    assert (given.config, given.save, given.background, given.help, given.options) == (
        "c.yaml",
        "results",
        False,
        False,
        {},
    )
    assert parse("--background f()").background
    assert parse("-h").help
    assert parse("--help").help


def test_values_are_expanded_and_the_python_is_not():
    given = parse("-n {n} --env A={n} f({n})", lambda text: text.replace("{n}", "3"))
    assert (given.options, given.rest) == ({"num_processes": "3", "env": {"A": "3"}}, "f({n})")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--num-proceses 2 f()", ["option '--num-proceses' is not known", "Did you mean '--num-processes'?"]),
        ("-x f()", ["option '-x' is not known"]),
        ("-n", ["--num-processes needs a value", "--num-processes 2"]),
        ("--mixed-precision ", ["needs a value", "bf16"]),
        (
            "--device-ids 0, 1 f()",
            ["--device-ids 0, ends with a comma: a list has no spaces here, as in --device-ids 0,1."],
        ),
        ("--preload numpy, scipy f()", ["--preload numpy, ends with a comma", "--preload numpy,scipy."]),
        ("--background=yes f()", ["--background takes no value", "=yes"]),
        ("--env A f()", ["--env A", "A=1"]),
        ("--save 2x f()", ["--save 2x", "variable's name"]),
        ("--save x --background f()", ["--save waits", "--background"]),
        ("--log-dir 'a f()", ["quotation mark '"]),
    ],
)
def test_mistakes(line, words):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    for word in words:
        assert word in str(caught.value)


def test_help_shows_every_option_with_its_choices():
    text = help_text("%launch [options] train(3)", "Run it.")
    for flag in flags():
        assert flag.long in text
        assert flag.description.split(maxsplit=1)[0] in text
    assert "--mixed-precision {no,fp16,bf16}" in text
    assert "-n, --num-processes N" in text
    assert max(map(len, text.splitlines())) <= 100
