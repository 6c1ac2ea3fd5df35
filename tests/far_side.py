"""A notebook without Jupyter and a worker without a launcher: two processes, and what travels between them."""

from __future__ import annotations

import linecache
import socket
import subprocess
import sys
import traceback
import types

from notebook_launcher.core import pickling, sources
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.tasks import Call

_LIMIT_S = 60


class Notebook:
    """Runs cells in a ``__main__`` of its own, with their texts where IPython puts them."""

    def __init__(self):
        self.module = types.ModuleType("__main__")
        self.names = self.module.__dict__
        self.num_cells = 0

    def cell(self, text):
        """Run one cell; returns the name of its file."""
        self.num_cells += 1
        filename = f"/tmp/ipykernel_1/cell{id(self)}-{self.num_cells}.py"  # noqa: S108 - no such file, as in Jupyter
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        exec(compile(text, filename, "exec", dont_inherit=True), self.names)  # noqa: S102
        return filename

    def __getitem__(self, name):
        return self.names[name]


class FarSide:
    """A worker process that runs what it is sent."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._channel = SocketChannel(ours)

    def run(self, function, *args, **kwargs):
        """What ``function`` returns over there; raises what it raises."""
        dumped = pickling.dump(Call(function, args, kwargs))
        return self.run_packed(dumped.packed, dumped.sources)

    def run_packed(self, packed, texts):
        """Run a packed task; its error gets the far traceback as ``far_traceback``."""
        self._channel.send((packed, texts))
        result, error, text = self._channel.receive(_LIMIT_S)
        if result is not None:
            return pickling.loads(result)
        if error is None:
            raise RuntimeError(text)
        back = pickling.load_error(error)
        back.far_traceback = text
        raise back

    def close(self):
        """Hang up, and wait until the process is gone."""
        self._channel.close()
        self._process.wait(_LIMIT_S)


def _serve(channel):
    sys.modules["__main__"] = types.ModuleType("__main__")
    pickling.by_value_in_children()
    while True:
        try:
            packed, texts = channel.receive(None)
        except ChannelClosedError:
            return
        sources.install(texts)
        try:
            channel.send((pickling.dumps_result(pickling.loads(packed)()), None, ""))
        except Exception as error:  # noqa: BLE001
            channel.send((None, pickling.dump_error(error), traceback.format_exc()))


if __name__ == "__main__":
    _serve(SocketChannel(socket.socket(fileno=int(sys.argv[1]))))
