"""HTML that somebody else wrote, made to end where it ends: what stands behind it on the page stays visible.

A browser repairs a fragment that breaks off by reading on: an unclosed comment, tag, attribute, ``<script>`` or
``<details>`` takes in whatever follows. Here what breaks off is shown, to the fragment's end, as the text it is, and
what was opened is closed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MAX_DEPTH = 512  # browsers nest no deeper
_COMMENT = re.compile(r"<!--(?:-?>|.*?--!?>)", re.DOTALL)
_DECLARATION = re.compile(r"<(?:[!?]|/[^A-Za-z])[^>]*+>|</>")
_CDATA = re.compile(r"<!\[CDATA\[.*?\]\]>", re.DOTALL)
_TAG = re.compile(
    r"<(?P<end>/?)(?P<name>[A-Za-z][^\s/>]*+)"
    r"(?:[\s/]++|[^\s/>=]++(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s>\"'][^\s>]*+|(?=>)))?+)*+>"
)
_BEGINS_MARKUP = re.compile(r"<[A-Za-z!?/]")
# Their content is text up to their end tag.
_RAW = {"iframe", "noembed", "noframes", "noscript", "script", "style", "textarea", "title", "xmp"}
_VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"),
}
_FOREIGN = {"svg", "math"}  # only in these does <name/> close itself
_BARRIERS = {"table", "td", "th", "caption", "template", "object", "marquee", "foreignobject", *_FOREIGN}
_TABLE = {"table", "caption", "colgroup", "thead", "tbody", "tfoot", "tr", "td", "th"}
_TABLE_BARRIERS = {"table", "template"}
_OURS = {"div", "pre", "span"}  # the renderer's own elements, which a stray end tag would close


class _Open(NamedTuple):
    """An element that is open, and whether it is or lies in one of another language."""

    name: str
    foreign: bool


def contained(page: str) -> str:
    """``page``, a fragment of HTML, with everything closed that it opens and nothing else."""
    parts: list[str] = []
    opened: list[_Open] = []
    place = 0
    while (start := page.find("<", place)) >= 0:
        parts.append(page[place:start])
        tag = _TAG.match(page, start)
        place = _end_of_tag(page, tag, opened) if tag else _end_of_other(page, start, opened)
        if place < 0 and _BEGINS_MARKUP.match(page, start):
            parts.append(page[start:].replace("<", "&lt;"))
            place = len(page)
        elif place < 0:
            parts.append("<")
            place = start + 1
        elif tag and tag["end"]:
            parts += _closing(tag, opened)
        else:
            parts.append(page[start:place])
    parts.append(page[place:])
    parts += [f"</{one.name}>" for one in reversed(opened) if one.name != "p"]  # a second </p> would be a paragraph
    return "".join(parts)


def _end_of_other(page: str, start: int, opened: list[_Open]) -> int:
    """Where the comment or declaration at ``start`` ends, -1 where there is none or it has no end."""
    if page.startswith("<!--", start):
        found = _COMMENT.match(page, start)
    elif page.startswith("<![CDATA[", start) and opened and opened[-1].foreign:
        found = _CDATA.match(page, start)
    else:
        found = _DECLARATION.match(page, start)
    return found.end() if found else -1


def _end_of_tag(page: str, tag: re.Match[str], opened: list[_Open]) -> int:
    """Where ``tag``, and what is text only because of it, ends, -1 where it has no end; notes what it opens."""
    name = tag["name"].lower()
    foreign = name in _FOREIGN or (bool(opened) and opened[-1].foreign)
    if tag["end"] or name in _VOID or (foreign and tag[0].endswith("/>")):
        return tag.end()
    if name == "plaintext":
        return -1
    if name in _RAW and not foreign:
        end = re.compile(rf"</{name}[\s/][^>]*+>|</{name}>", re.IGNORECASE).search(page, tag.end())
        hidden = page[tag.end() : end.start()].rpartition("<!--") if end else ("", "", "")
        # In a script, what a comment holds may take the end tag for its own.
        return end.end() if end and not (name == "script" and hidden[1] and "-->" not in hidden[2]) else -1
    opened.append(_Open(name, foreign))
    return tag.end()


def _closing(tag: re.Match[str], opened: list[_Open]) -> list[str]:
    """Close what ``tag`` closes; return it, or nothing where it would close something that isn't the fragment's."""
    name = tag["name"].lower()
    for index in range(len(opened) - 1, max(-1, len(opened) - _MAX_DEPTH), -1):
        if opened[index].name == name:
            del opened[index:]
            return [tag[0]]
        if opened[index].name in (_TABLE_BARRIERS if name in _TABLE else _BARRIERS):
            break
    return [] if name in _OURS else [tag[0]]
