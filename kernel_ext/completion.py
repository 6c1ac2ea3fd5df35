"""Tab completion of the magics: options, their values, the notebook's functions."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

# Also behind an assignment: `run = %launch --`.
_LINE = re.compile(r"\s*(?:[\w.\s,]+=\s*)?%%?(?P<magic>launch|launcher)\s(?P<rest>.*)", re.DOTALL)
_PRIORITY = 1000.0  # before IPython's own, so that those needn't run
COMMANDS = {
    "check": "Try out the workers: each precision, an all-reduce's value and time, and what is wrong.",
    "code": "What the form (%launcher alone) would launch, as code in a new cell.",
    "devices": "What this machine has, what each device can do, and what auto would take.",
    "runs": "This kernel's runs, the latest first: status, options, last metrics, in a table.",
    "status": "This kernel's runs, oldest first.",
    "stop": "Stop every run that goes on.",
}


def install(ip: InteractiveShell) -> None:
    """Hook the completion into the shell; where it has something to offer, nothing else is offered."""
    uninstall(ip)
    complete = _for_lines(ip)
    matcher = _matcher(complete)
    if matcher is None:
        completer: Any = ip.Completer
        completer.magic_arg_matchers.append(_old_matcher(ip, complete))
    else:
        ip.Completer.custom_matchers.append(matcher)


def uninstall(ip: InteractiveShell) -> None:
    """Take the completion out again."""
    completer: Any = ip.Completer
    for matchers in (completer.custom_matchers, completer.magic_arg_matchers):
        if isinstance(matchers, list):  # of the newer IPythons, a property whose list nobody keeps
            matchers[:] = [one for one in matchers if not getattr(one, "of_notebook_launcher", False)]


def _for_lines(ip: InteractiveShell) -> Callable[[str], tuple[str, list[str]]]:
    """From a line up to the cursor to the word that is completed and what may stand in its place."""

    def complete(text: str) -> tuple[str, list[str]]:
        line = _LINE.fullmatch(text)
        if line is None:
            return "", []
        if line["magic"] == "launcher":
            word, found = line["rest"].lstrip(), list(COMMANDS)
        else:
            word = re.split(r"[\s=]", line["rest"])[-1]
            found = _callables(ip, line["rest"]) + launch_candidates(line["rest"])
        return word, [one for one in found if one.startswith(word)]

    return complete


def _matcher(complete: Callable[[str], tuple[str, list[str]]]) -> Any:
    """For IPython from 8.6 on; None before."""
    try:
        from IPython.core.completer import SimpleCompletion, context_matcher
    except ImportError:
        return None

    def complete_line(context: Any) -> Any:
        word, found = complete(context.text_until_cursor)
        completions = [SimpleCompletion(text=text, type="magic") for text in found]
        return {"completions": completions, "suppress": True, "ordered": True, "matched_fragment": word}

    as_matcher: Any = context_matcher(identifier="notebook_launcher", priority=_PRIORITY)
    matcher = as_matcher(complete_line)
    matcher.of_notebook_launcher = True
    return matcher


def _old_matcher(ip: InteractiveShell, complete: Callable[[str], tuple[str, list[str]]]) -> Any:
    """For IPython up to 8.5, which asks these matchers first, and no others once one has an answer."""

    def notebook_launcher(_line: str) -> list[str]:
        completer: Any = ip.Completer
        return complete(completer.text_until_cursor)[1]

    notebook_launcher.of_notebook_launcher = True  # type: ignore[attr-defined]
    return notebook_launcher


def launch_candidates(text: str) -> list[str]:
    """What may stand where the word at the end of ``text`` stands: options, an option's values; [] for Python.

    ``text`` is the line after the magic's name, up to the cursor.
    """
    from notebook_launcher.kernel_ext.arguments import spellings

    before, word = _last_word(text)
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
    if word and not word.startswith("-"):
        return []
    return sorted(text for text in spellings() if text.startswith("--"))


def _callables(ip: InteractiveShell, text: str) -> list[str]:
    """What the notebook can call, where the call may begin; IPython itself takes a magic's line for a sum's."""
    before, word = _last_word(text)
    if _flag_waiting(before) != "" or not re.fullmatch(r"[\w.]*", word):
        return []
    if "." in word:
        completer: Any = ip.Completer
        return list(completer.attr_matches(word))
    names = (name for name in ip.user_ns if name not in ip.user_ns_hidden and not name.startswith("_"))
    return sorted(name for name in names if word or inspect.isroutine(ip.user_ns[name]))


def _last_word(text: str) -> tuple[str, str]:
    before, word = re.fullmatch(r"(.*?)(\S*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return before, word


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
