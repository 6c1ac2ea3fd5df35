"""Memory limits, from the files of a made-up machine."""

import psutil
import pytest

from notebook_launcher.launcher.memory import MemoryMeter
from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.launcher.record import Record

GIB = 1 << 30
HUGE = 9223372036854771712  # v1's "no limit"


def a_machine(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))
    return root


def v2(root, *, limit="max", parent_limit="max", current=0, inactive=0, kills=0, name="/jobs/one"):
    base = f"sys/fs/cgroup{name}"
    return a_machine(
        root,
        {
            "proc/self/cgroup": f"0::{name}\n",
            f"{base}/memory.max": f"{limit}\n",
            f"{base}/memory.current": f"{current}\n",
            f"{base}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
            f"{base}/memory.events": f"low 0\nhigh 0\nmax 9\noom {kills}\noom_kill {kills}\n",
            "sys/fs/cgroup/jobs/memory.max": f"{parent_limit}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{2 * current}\n",
        },
    )


def v1(root, base, *, limit, used, inactive=0, kills=0):
    return a_machine(
        root,
        {
            "proc/self/cgroup": "5:devices:/x\n4:memory,hugetlb:/docker/abc:def\n0::/\n",
            f"{base}/memory.limit_in_bytes": limit,
            f"{base}/memory.usage_in_bytes": used,
            f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
            f"{base}/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        },
    )


@pytest.fixture(autouse=True)
def _sixty_four_gib(monkeypatch):
    memory = type(psutil.virtual_memory())(**{**psutil.virtual_memory()._asdict(), "total": 64 * GIB, "available": GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_without_a_limit_it_is_the_machines(tmp_path):
    for root in (tmp_path, v2(tmp_path / "no limit"), v2(tmp_path / "more than there is", limit=65 * GIB)):
        meter = MemoryMeter(root)
        assert meter.used_bytes() == 63 * GIB
        assert meter.told(meter.used_bytes()) == "63.0 of 64.0 GiB in use just before"


def test_a_containers_limit(tmp_path):
    meter = MemoryMeter(v2(tmp_path, limit=16 * GIB, current=15 * GIB, inactive=3 * GIB))
    assert meter.used_bytes() == 12 * GIB
    text = "12.0 of 16.0 GiB in use just before, which is the limit of this container or job"
    assert meter.told(12 * GIB) == text
    v2(tmp_path, limit=16 * GIB, kills=1)
    assert meter.told(12 * GIB) == f"{text}; the system has killed a process of it for want of memory"


def test_kills_from_before_the_run_are_not_its(tmp_path):
    meter = MemoryMeter(v2(tmp_path, limit=16 * GIB, kills=3))
    assert "killed" not in meter.told(GIB)


def test_the_tightest_of_nested_limits_counts(tmp_path):
    meter = MemoryMeter(v2(tmp_path, limit=32 * GIB, parent_limit=8 * GIB, current=3 * GIB))
    assert meter.told(meter.used_bytes()).startswith("6.0 of 8.0 GiB")


def test_a_container_that_sees_its_group_as_the_root(tmp_path):
    meter = MemoryMeter(v2(tmp_path, limit=4 * GIB, current=GIB, name="/"))
    assert meter.told(meter.used_bytes()).startswith("1.0 of 4.0 GiB")


@pytest.mark.parametrize("base", ["sys/fs/cgroup/memory/docker/abc:def", "sys/fs/cgroup/memory"])
def test_the_old_control_groups(tmp_path, base):
    meter = MemoryMeter(v1(tmp_path, base, limit=8 * GIB, used=7 * GIB, inactive=GIB))
    assert meter.told(meter.used_bytes()).startswith("6.0 of 8.0 GiB in use just before, which is the limit")
    v1(tmp_path, base, limit=8 * GIB, used=7 * GIB, kills=1)
    assert "the system has killed a process" in meter.told(GIB)


def test_the_old_control_groups_without_a_limit(tmp_path):
    meter = MemoryMeter(v1(tmp_path, "sys/fs/cgroup/memory", limit=HUGE, used=GIB))
    assert meter.told(GIB) == "1.0 of 64.0 GiB in use just before"


def test_a_record_notes_the_highest_use_before_a_death(tmp_path):
    record = Record("", [], OutputLog(1), 1)
    record._meter = MemoryMeter(v2(tmp_path, limit=16 * GIB, current=2 * GIB))
    for now_s, gib in ((10.0, 3), (11.0, 15), (11.5, 16), (12.0, 4)):
        v2(tmp_path, limit=16 * GIB, current=gib * GIB)
        record.watch_memory(now_s)
    record.note_memory()
    assert record.memory.startswith("15.0 of 16.0 GiB")
