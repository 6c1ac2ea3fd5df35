"""Tab completion of the magics' options and values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# Also behind an assignment: `run = %launch --`.
_LAUNCH = r"\s*(?:[\w.\s,]+=\s*)?%%?launch\s"
_LAUNCHER = r"\s*(?:[\w.\s,]+=\s*)?%launcher\s"
COMMANDS = {
    "devices": "What this machine has, and which precisions it can do.",
    "status": "This kernel's runs, oldest first.",
    "stop": "Stop every run that goes on.",
}


def install(ip: InteractiveShell) -> None:
    """Hook the completion into the shell."""
    for pattern, complete in ((_LAUNCH, _complete_launch), (_LAUNCHER, _complete_launcher)):
        ip.set_hook("complete_command", complete, re_key=pattern)  # type: ignore[no-untyped-call]


def uninstall(ip: InteractiveShell) -> None:
    """Take the completion out again."""
    dispatch = ip.strdispatchers["complete_command"]
    for pattern in (_LAUNCH, _LAUNCHER):
        dispatch.regexs.pop(re.compile(pattern), None)


def launch_candidates(text: str) -> list[str]:
    """What may stand where the word at the end of ``text`` stands: options, an option's values; [] for Python.

    ``text`` is the line after the magic's name, up to the cursor.
    """
    from notebook_launcher.kernel_ext.arguments import spellings

    before, word = re.fullmatch(r"(.*?)(\S*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    place = _flag_waiting(before)
    if place is None:
        return []
    if place:
        flag = spellings().get(place)
        return list(flag.choices) if flag else []
    name, separator, _ = word.partition("=")
    if separator:
        flag = spellings().get(name.replace("_", "-"))
        return list(flag.choices) if flag else []
    return sorted(text for text in spellings() if text.startswith("--")) if word.startswith("-") else []


def _flag_waiting(before: str) -> str | None:
    """The option whose value comes next, "" where another option may come, None once the Python has begun."""
    from notebook_launcher.kernel_ext.arguments import spellings

    waiting = ""
    for word in before.split():
        if waiting:
            waiting = ""
        elif not word.startswith("-"):
            return None
        elif "=" not in word:
            spelled = word.replace("_", "-")
            flag = spellings().get(spelled)
            waiting = spelled if flag and flag.metavar else ""
    return waiting


def _complete_launch(_shell: InteractiveShell, event: Any) -> list[str]:
    return launch_candidates(re.sub(_LAUNCH, "", event.text_until_cursor, count=1))


def _complete_launcher(_shell: InteractiveShell, event: Any) -> list[str]:
    words = re.sub(_LAUNCHER, "", event.text_until_cursor, count=1).split()
    return list(COMMANDS) if len(words) <= 1 else []
