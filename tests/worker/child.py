"""A child of the process of the tests, for what would change it."""

from __future__ import annotations

import json
import os


def in_child(function):
    """What ``function`` returns in a child of this process, which ends then."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(pid, 0)
    assert data, "the child raised"
    return json.loads(data)
