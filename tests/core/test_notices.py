"""A warning points at the line of whoever called the package."""

from __future__ import annotations

import inspect
import types

import pytest

from notebook_launcher.core import notices


def test_frames_of_the_package_and_of_ipython_are_passed_over():
    inner = types.FunctionType(notices.warn.__code__, {**vars(notices), "__name__": "notebook_launcher.core.notices"})
    source = "def call(function, *args):\n    function(*args)"
    for name, filename in (
        ("notebook_launcher.kernel_ext.magics", "m.py"),
        ("fun", "<decorator-gen-7>"),
        ("IPython.x", "i.py"),
    ):
        space = {"__name__": name}
        exec(compile(source, filename, "exec"), space)  # noqa: S102 - a caller by that name
        inner = types.MethodType(space["call"], inner)
    with pytest.warns(UserWarning, match="half the cake") as seen:
        inner("half the cake")
    assert (seen[0].filename, seen[0].lineno) == (__file__, inspect.currentframe().f_lineno - 1)
