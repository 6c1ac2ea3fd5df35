"""What a display opens ends with it, and whole HTML stays as it was.

The expected texts were checked against html5lib, which parses as browsers do: behind each of them a page goes on.
"""

from __future__ import annotations

import pytest

from notebook_launcher.widgets.containment import contained


@pytest.mark.parametrize(
    "page",
    [
        "",
        "plain & <b>bold</b> text",
        "1 < 2 <3 > a<",
        '<table border="1"><tr><th>a > b<th>c</table>',
        "<style>p > b { }</style><p>one<p>two",
        "<script>if (a < b) { x = '</div>' }</script>",
        "<SCRIPT src=x></Script >",
        "<script><!--\nold();\n//--></script>",
        "<textarea></div><!--</textarea>",
        "<!-- <div> --><!--><!---><br/><img src=x><hr>",
        "<svg viewBox='0 0 1 1'><path d='M0'/><title>t</title><![CDATA[<div>]]></svg>",
        "<a b=\"1\"c='>' d=3/e f = g>x</a>",
        "<!DOCTYPE html><html><body>x</body></html>",
        "<b><i>wrongly</b> nested</i>",
    ],
)
def test_what_is_whole_stays(page):
    assert contained(page) == page


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<!-- x", "&lt;!-- x"),
        ("<!", "&lt;!"),
        ("</", "&lt;/"),
        ("<?php", "&lt;?php"),
        ("<div", "&lt;div"),
        ('<a b="<i>', '&lt;a b="&lt;i>'),
        ("<p don't='>", "&lt;p don't='>"),
        ("<script>a<b", "&lt;script>a&lt;b"),
        ("<style>p {", "&lt;style>p {"),
        ("<textarea>a</textarea", "&lt;textarea>a&lt;/textarea"),
        ("<b>x<script><!--<script></script>", "<b>x&lt;script>&lt;!--&lt;script>&lt;/script></b>"),
        ("<plaintext>x", "&lt;plaintext>x"),
        ("<svg><![CDATA[x</svg>", "<svg>&lt;![CDATA[x&lt;/svg></svg>"),
        ("<details><b>x", "<details><b>x</b></details>"),
        ("<div/>x", "<div/>x</div>"),
        ("<p>x", "<p>x"),
        ("x</div></pre></span>", "x"),
        ("<table><td></div>", "<table><td></td></table>"),
        ("<svg><style>a", "<svg><style>a</style></svg>"),
        ("<svg><script/>", "<svg><script/></svg>"),
    ],
)
def test_what_breaks_off_becomes_text_and_what_is_open_is_closed(page, expected):
    assert contained(page) == expected


@pytest.mark.timeout(10)  # a millisecond or so is usual
@pytest.mark.parametrize("piece", ["<", "<a ", "<a b=", "<!--", '<a b="', "<b>", "<b></i>", "<script>", "<b "])
def test_long_pages_take_no_long_time(piece):
    page = piece * 10_000
    assert len(contained(page)) >= len(page)
    assert len(contained(f"{page}>")) >= len(page)
