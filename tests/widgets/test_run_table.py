from notebook_launcher.launcher.past_runs import RunFacts
from notebook_launcher.widgets.run_table import run_table, run_text

OLD = RunFacts(1, "train", "failed", "2 processes", ("seed=3",), 0.0, 75.0, "failed after: <b>", {"loss": 0.25})
NEW = RunFacts(2, "<b>", "running", "1 process", (), 0.0, 1.0, "", {})


def test_the_latest_run_comes_first():
    lines = run_text([OLD, NEW]).splitlines()
    assert [line.split()[0] for line in lines] == ["run", "2", "1"]
    for part in ("train", "failed", "1 min 15 s", "2 processes, seed=3", "loss 0.25"):
        assert part in lines[2]


def test_the_html_says_the_same_escaped_and_why_a_run_failed():
    page = run_table([OLD, NEW])
    assert page.index("running") < page.index("train")
    for part in ("✗ failed", "failed after: &lt;b&gt;", "&lt;b&gt;</td>", "loss 0.25"):
        assert part in page
    # JupyterLab would make all columns as wide as each other, and an option run over what the run logged.
    assert "table-layout:auto" in page
    assert "overflow-wrap:anywhere" in page


def test_without_runs_it_says_so():
    assert "no run yet" in run_table([])
    assert "no run yet" in run_text([])
