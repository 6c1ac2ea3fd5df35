from notebook_launcher.core import cores


def test_a_container_may_use_fewer_cores_than_there_are(monkeypatch):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert cores.num_cores() == 3


def test_where_the_system_does_not_tell_all_count(monkeypatch):
    monkeypatch.delattr(cores.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: None)
    assert cores.num_cores() == 1
