"""The table of a kernel's runs: what it says, and whom it keeps."""

from __future__ import annotations

import gc

from fake_rank import LIMIT_S, FakeRank, run_of

from notebook_launcher.core import events
from notebook_launcher.launcher import past_runs
from notebook_launcher.launcher.run import all_facts


def test_a_run_that_goes_on_and_one_that_nobody_holds_are_both_told_of():
    gone = FakeRank().starts().returns(1).exits()
    run_of([gone]).wait(LIMIT_S)
    rank = FakeRank().starts()
    run = run_of([rank])
    gc.collect()
    before, last = all_facts()[-2:]
    assert (before.status, last.number) == ("finished", before.number + 1)
    assert last.summary == ""
    rank.returns(1).exits()
    run.wait(LIMIT_S)
    assert all_facts()[-1].summary.startswith("finished in ")
    assert all_facts()[-1].number == last.number


def test_a_run_has_its_options_and_the_last_values_of_its_metrics():
    rank = FakeRank().starts()
    run = run_of([rank])
    for value in (1.0, 0.5):
        rank.reports(events.Metric({"loss": value, "text": "x", "ok": True}, 1, 0.0))
    rank.returns(1).exits()
    facts = run.wait(LIMIT_S).facts
    assert facts.last_values == {"loss": 0.5}
    assert facts.name == "fake"


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(past_runs, "_kept", past_runs._kept.copy())
    for number in range(1000, 1300):
        past_runs.keep(past_runs.RunFacts(number, "f", "finished", "", (), 0.0, 0.0, "finished", {}))
    assert [facts.number for facts in past_runs.joined([])] == list(range(1100, 1300))
