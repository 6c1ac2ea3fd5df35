"""The preflight: on real ranks, and what it says of invented ones that are broken."""

from __future__ import annotations

import json
import types

import pytest

from notebook_launcher.core.errors import ConfigError, EngineError, RunTimeoutError
from notebook_launcher.launcher.launch import launch_payload
from notebook_launcher.launcher.preflight import check, explained, findings

GOOD = {
    "began_s": 100.5,
    "device": "cuda:0",
    "reduced_on": "cuda:0",
    "precisions": {"no": "", "bf16": ""},
    "latency_us": 20.4,
    "bandwidth_mb_s": 12_345.6,
    "num_bytes": 64_000_000,
}
SLOWER = GOOD | {
    "began_s": 101.25,
    "device": "cuda:1",
    "reduced_on": "cuda:1",
    "latency_us": 31.0,
    "bandwidth_mb_s": 9000.0,
}


def test_two_ranks_on_the_cpu():
    found = check(device="cpu")
    assert found.ok, str(found)
    assert found.headline == "2 processes · CPU (gloo) · fp32 · DDP"
    assert [one.name for one in found.checks] == ["workers", "fp32", "bf16", "all-reduce"]
    assert found.figures["num_bytes"] == 16_000_000
    assert all(value > 0 for value in found.figures.values())
    assert found.lines()[-1] == "preflight: all is well"


def test_one_rank_has_nobody_to_exchange_with():
    found = check(device="cpu", num_processes=1)
    assert found.ok, str(found)
    assert set(found.figures) == {"start_s", "latency_us"}
    assert "with one process nothing is exchanged, so no bandwidth is told" in found.lines()[-2]


def test_the_slowest_rank_gives_the_figures():
    found = findings("2 processes", [GOOD, SLOWER], 100.0)
    assert found.figures == {"start_s": 1.25, "latency_us": 31.0, "bandwidth_mb_s": 9000.0, "num_bytes": 64_000_000}
    assert found.lines() == [
        "2 processes",
        "ok     workers     2 started in 1.25 s, on cuda:0, cuda:1",
        "ok     fp32        products and sums over the ranks are right",
        "ok     bf16        products and sums over the ranks are right",
        "ok     all-reduce  latency 31 µs, bandwidth 9,000 MB/s for 64 MB (medians)",
        "preflight: all is well",
    ]
    assert json.loads(json.dumps(found.facts()))["checks"][0] == {
        "name": "workers",
        "ok": True,
        "text": "2 started in 1.25 s, on cuda:0, cuda:1",
    }


def test_a_wrong_sum_is_told_with_its_rank_and_what_helps():
    broken = SLOWER | {"precisions": {"no": "the sum over the ranks came out as 0 where 3 is right", "bf16": ""}}
    found = findings("2 processes · CUDA (NCCL)", [GOOD, broken], 100.0)
    assert not found.ok
    assert "WRONG  fp32        rank 1: the sum over the ranks came out as 0 where 3 is right.\nWhat often" in str(found)
    assert "NCCL_P2P_DISABLE" in str(found)
    assert "NCCL" not in str(findings("2 processes · CPU (gloo)", [GOOD, broken], 100.0))  # there it can't help
    assert found.lines()[-1] == "preflight: something is wrong with fp32"


def test_a_device_whose_sums_go_through_the_host_says_so():
    tpu = GOOD | {"device": "xla:0", "reduced_on": "cpu"}
    assert "for 64 MB, through the host's memory (medians)" in str(findings("", [tpu, tpu], 100.0))


def test_what_the_machine_cannot_do_is_a_finding_and_nothing_starts():
    found = check(device="cpu", strategy="single")
    assert [(one.name, one.ok) for one in found.checks] == [("options", False)]
    assert "strategy='single' with 2 processes" in str(found)


def test_what_only_a_training_wants_is_left_out(tmp_path):
    found = check(device="cpu", num_processes=1, log_dir=str(tmp_path / "logs"), max_restarts=3)
    assert found.ok, str(found)
    assert not (tmp_path / "logs").exists()


def test_a_check_that_is_stopped_says_so():
    def launching(*args, **options):
        run = launch_payload(*args, **options)
        run.kill()
        return run

    found = check(device="cpu", launching=launching)
    assert found.is_stopped
    assert not found.ok
    assert str(found) == f"{found.headline}\npreflight: stopped before its end, so nothing is known"
    assert found.facts()["checks"] == ()


def test_an_option_that_cannot_be_is_an_error():
    with pytest.raises(ConfigError, match="Did you mean 'cuda'"):
        check(device="cupa")


def _run(error):
    def wait():
        raise error

    facts = types.SimpleNamespace(headline="2 processes · CUDA (NCCL)")
    return types.SimpleNamespace(facts=facts, wait=wait, results=[])


def test_ranks_that_hang_are_told_with_what_to_try():
    asked = []

    def launching(payload, config, **options):
        asked.append((payload.name, config.timeout_s, options))
        return _run(RunTimeoutError("the run was stopped after timeout_s=120\nrank 0: was in all_reduce"))

    found = check(device="cpu", launching=launching)
    assert asked == [("preflight", 120.0, {"wait": False, "sink": "none"})]
    assert not found.ok
    for part in ("no answer in time", "rank 0: was in all_reduce", "NCCL_P2P_DISABLE", "preflight: something is wrong"):
        assert part in str(found)


def test_a_time_limit_of_ones_own():
    def launching(_, config, **__):
        return _run(RunTimeoutError(f"after {config.timeout_s:g} s"))

    assert "after 3 s" in str(check(device="cpu", timeout_s=3, launching=launching))
    assert "after 4 s" in str(check({"device": "cpu", "timeout_s": 4}, launching=launching))


def test_other_errors_in_words():
    assert explained(EngineError("no more processes"), "") == "no more processes"
    assert explained(RunTimeoutError("stopped"), "2 processes · CPU (gloo)") == "no answer in time: stopped"
    error = RuntimeError("NCCL Error 2")
    error.add_note("[rank 1 on here]")
    assert explained(error, "") == "RuntimeError: NCCL Error 2\n[rank 1 on here]"
