"""Events and commands are plain data; ``emit`` reaches whoever launched this process."""

from __future__ import annotations

import dataclasses
import pickle
import typing

import pytest

from notebook_launcher.core import events

MESSAGES = [message for union in (events.Event, events.Command) for message in typing.get_args(union)]


@pytest.fixture
def emitted():
    found = []
    events.install(found.append)
    yield found
    events.install(None)


def test_emit_does_nothing_where_nobody_launched():
    events.emit(events.Interrupted())


def test_emit_reaches_the_installed_emitter_in_order(emitted):
    sent = [events.Interrupted(), events.Metric({"loss": 1.0}, 3, 0.5), events.Output("stdout", b"x")]
    for event in sent:
        events.emit(event)
    assert emitted == sent


def test_taking_the_emitter_away_ends_it(emitted):
    events.install(None)
    events.emit(events.Interrupted())
    assert emitted == []


def test_an_error_of_the_emitter_is_the_callers():
    def broken(_event: object) -> None:
        raise ConnectionError("gone")

    events.install(broken)
    try:
        with pytest.raises(ConnectionError):
            events.emit(events.Interrupted())
    finally:
        events.install(None)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_data_that_travels(kind):
    fields = dataclasses.fields(kind)
    required = {
        field.name: f"{field.name} value"
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    message = kind(**required)
    assert pickle.loads(pickle.dumps(message)) == message
    for field in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, 1)


def test_every_message_class_is_an_event_or_a_command():
    data = {value for value in vars(events).values() if dataclasses.is_dataclass(value) and isinstance(value, type)}
    own = {value for value in data if value.__module__ == events.__name__}
    parts = {events.Surroundings, events.Pending, getattr(events, "DeviceRow", None)}
    assert own - parts == set(MESSAGES)
