"""Text with terminal colours as HTML: everything is escaped, SGR colours become spans with inline styles."""

from __future__ import annotations

import functools
import html
import re

from notebook_launcher.launcher.sgr import Style, runs

# Mid-tones, legible on light and on dark; the bright eight follow the eight. Black and white are greys for that reason.
PALETTE = (
    *("#5f6368", "#c62f2f", "#26873d", "#96700a", "#2f6fd0", "#9a3fb5", "#0f808f", "#7c8188"),
    *("#75797f", "#d9483b", "#2f9a4c", "#a87f12", "#4684e3", "#b154cc", "#17909f", "#8b9097"),
)
# The terminal's own, for text on a background that the worker chose too.
_TERMINAL = (
    *("#000000", "#cd3131", "#0e8a3e", "#a88c00", "#2472c8", "#a03aa0", "#11808c", "#d0d0d0"),
    *("#666666", "#f14c4c", "#23b070", "#d8c400", "#3b8eea", "#d670d6", "#29b8db", "#ffffff"),
)
_NUM_NAMED = 16
_CUBE_END = 232
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def to_html(text: str) -> str:
    """``text`` as HTML. Every SGR colour becomes a ``<span style=...>``; other control characters are left out."""
    if "\x1b" not in text:
        return _escaped(text)
    parts = []
    for style, piece in runs(text):
        css = css_of(style)
        parts.append(f'<span style="{css}">{_escaped(piece)}</span>' if css else _escaped(piece))
    return "".join(parts)


def on_any_theme(colour: str) -> str:
    """CSS for text in ``colour``, drawn towards the theme's own text colour where the browser can mix colours."""
    return f"color:{colour};color:color-mix(in srgb,{colour} 70%,currentColor)"


@functools.lru_cache(maxsize=1024)
def css_of(style: Style) -> str:
    """The inline style of ``style``; "" for plain."""
    foreground, background = style.foreground, style.background
    parts = []
    if style.inverse:
        foreground, background = background, foreground
        if not foreground:
            parts.append("color:var(--jp-layout-color0,#fff)")
        if not background:
            parts.append("background-color:#666;background-color:var(--jp-ui-font-color1,#666)")
    if foreground:
        parts.append(_text_colour(foreground, on_background=bool(background)))
    if background:
        parts.append(f"background-color:{_colour(background, _TERMINAL)}")
    parts += [
        css
        for on, css in (
            (style.bold, "font-weight:bold"),
            (style.faint, "opacity:0.7"),
            (style.italic, "font-style:italic"),
        )
        if on
    ]
    lines = " ".join(name for on, name in ((style.underline, "underline"), (style.strike, "line-through")) if on)
    return ";".join([*parts, f"text-decoration:{lines}"] if lines else parts)


def _text_colour(parameters: str, *, on_background: bool) -> str:
    if on_background:
        return f"color:{_colour(parameters, _TERMINAL)}"
    colour = _colour(parameters, PALETTE)
    return on_any_theme(colour) if colour in PALETTE else f"color:{colour}"


def _colour(parameters: str, palette: tuple[str, ...]) -> str:
    """The CSS colour of "31", "104", "38;5;n" or "48;2;r;g;b"."""
    numbers = [int(number) for number in parameters.split(";")]
    if len(numbers) == 1:
        code = numbers[0]
        return palette[code % 10 + (_NUM_NAMED // 2 if code >= 90 else 0)]  # noqa: PLR2004 - 90 and 100 on are bright
    if numbers[1] == 2:  # noqa: PLR2004 - r, g, b
        return "#{:02x}{:02x}{:02x}".format(*numbers[2:])
    index = numbers[2]
    if index < _NUM_NAMED:
        return palette[index]
    if index < _CUBE_END:
        levels = [(index - _NUM_NAMED) // step % 6 for step in (36, 6, 1)]
        return "#{:02x}{:02x}{:02x}".format(*(55 + 40 * level if level else 0 for level in levels))
    return "#{0:02x}{0:02x}{0:02x}".format(8 + 10 * (index - _CUBE_END))


def _escaped(text: str) -> str:
    return html.escape(_CONTROLS.sub("", text))
