"""The elements of a self-contained HTML page: style, tables, bars and pictures.

Nothing here knows what a run is. Every text is escaped where it enters the page: what a model wrote
may hold markup. Arguments called `html` are taken as they are.
"""

import base64
import html as html_text
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --wash: #f4f6f9; --ink: #1d2433; --soft: #5c6577; --line: #d9dee7;
  --c0: #0b6bb8; --c1: #d9541a; --c2: #0a8f6a; --c3: #9c4d97; --c4: #8a6d00; --c5: #7b8494;
  --sampled: #e7f1fb; --tool: #fdf0dc; --prompt: #f1f3f6; --hot: #e0245e; --good: #0a7a52;
  --bad: #b3261e; --alert: #fff4e0; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #171c26; --wash: #10141c; --ink: #e4e8f0; --soft: #9aa5b8; --line: #343c4b;
  --c0: #5fb4f5; --c1: #f79a5c; --c2: #3ecf9e; --c3: #dd9bd8; --c4: #e3c558; --c5: #8c97aa;
  --sampled: #1b2f45; --tool: #3a2d17; --prompt: #1e2430; --hot: #ff5c8a; --good: #4fd6a0;
  --bad: #ff8a80; --alert: #3a2d17; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
.sheet { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
header p { max-width: 44rem; color: var(--soft); margin: .6rem 0 0; font-size: 1.06rem; }
.kicker { color: var(--soft); font-size: .82rem; letter-spacing: .02em; }
h1 { font-size: clamp(2rem, 6vw, 3.3rem); line-height: 1.08; margin: .4rem 0 0;
  letter-spacing: -.025em; font-weight: 700; text-wrap: balance; }
h2 { font-size: 1.4rem; margin: 3.4rem 0 .3rem; letter-spacing: -.01em; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; margin: 1.7rem 0 0; padding: .7rem 0;
  border-block: 1px solid var(--line); font-size: .93rem; }
a { color: var(--c0); text-decoration: none; } a:hover { text-decoration: underline; }
.lead { max-width: 44rem; color: var(--soft); margin: 0 0 1.1rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.1rem 1.2rem; margin: 0 0 1.1rem; overflow-x: auto; }
.note { color: var(--soft); border-left: 3px solid var(--line); padding: .1rem 0 .1rem .8rem; }
.alert { background: var(--alert); border-radius: 10px; padding: .8rem 1.1rem; margin: 1.5rem 0 0; }
.alert ul { margin: .3rem 0 0; padding-left: 1.2rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr));
  gap: 1.1rem; }
figure { margin: 0; background: var(--paper); border: 1px solid var(--line);
  border-radius: 12px; padding: .7rem .8rem .9rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .88rem; padding: .3rem .4rem 0; }
.wide { margin-bottom: 1.1rem; overflow-x: auto; } .wide img { min-width: 560px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: .85rem; color: var(--soft);
  padding: .2rem .6rem .5rem 0; vertical-align: bottom; }
td { padding: .5rem .6rem .5rem 0; border-top: 1px solid var(--line); vertical-align: top; }
td small, th small { display: block; color: var(--soft); font-weight: 400; font-size: .78rem; }
small.beside { display: inline-block; margin-left: .2rem; }
th.group { color: var(--ink); font-size: .95rem; padding-top: 1.2rem; }
tbody:first-of-type small.beside { display: inline-block; margin-left: .2rem; }
th.group { padding-top: .3rem; }
td b { font-size: 1.06rem; } td:last-child, th:last-child { padding-right: 0; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
.track { position: relative; height: 5px; border-radius: 3px; background: var(--line);
  margin: .3rem 0 .1rem; max-width: 9rem; }
.track i { position: absolute; inset: 0 auto 0 0; border-radius: 3px; }
.stack { display: flex; height: 18px; border-radius: 5px; overflow: hidden; gap: 1px;
  background: var(--line); min-width: 8rem; }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem;
  margin: .6rem 0 0; padding: 0; list-style: none; }
details { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  margin: 0 0 .9rem; padding: 0 1.2rem; }
details[open] { padding-bottom: 1.2rem; }
summary { cursor: pointer; padding: .85rem 0; font-weight: 600; }
summary span { font-weight: 400; color: var(--soft); margin-left: .5rem; }
.verdict { font-weight: 600; margin: 0; }
.right { color: var(--good); } .wrong { color: var(--bad); }
.asked { margin: .5rem 0; max-width: 52rem; white-space: pre-wrap; }
.turns { margin-top: .9rem; border-left: 2px solid var(--line); padding-left: .9rem; }
.who { font-size: .8rem; color: var(--soft); margin: .8rem 0 .2rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 8px;
  padding: .6rem .8rem; font: .84rem/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.prompt { background: var(--prompt); color: var(--soft); max-height: 11rem; overflow-y: auto; }
.sampled { background: var(--sampled); } .tool { background: var(--tool); }
pre.plain { background: var(--prompt); }
#shade:checked ~ .transcripts [style] { border-radius: 3px;
  background: color-mix(in srgb, var(--hot) calc(var(--surprise) * 80%), transparent); }
.switch { display: inline-block; margin: 0 0 1rem .4rem; cursor: pointer; }
@media (max-width: 560px) {
  .sheet { padding: 1.5rem .8rem 3rem; } .card { padding: .8rem .7rem; }
  figure { padding: .4rem .3rem .7rem; } td, th { padding-right: .35rem; font-size: .88rem; }
  small.beside { display: block; margin: 0; } details { padding: 0 .8rem; }
  .turns { padding-left: .5rem; } summary span { display: block; margin-left: 0; } }
@media print { body { background: none; } details { break-inside: avoid; } }
"""


def page(title: str, body_html: str) -> str:
    """A whole document that needs no other file."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f'<body>\n<div class="sheet">\n{body_html}\n</div>\n</body>\n</html>\n'
    )


def escape(text: Any) -> str:
    """The text with everything that HTML would take as markup made visible, for any place."""
    visible = (c if c.isprintable() or c in "\n\t\r\xa0" else "\ufffd" for c in str(text))
    return html_text.escape("".join(visible), quote=True)


def section(name: str, title: str, lead: str, *parts_html: str) -> str:
    """A section that the navigation can point at; empty when it has no parts."""
    parts = [part for part in parts_html if part]
    if not parts:
        return ""
    head = f'<section id="{escape(name)}">\n<h2>{escape(title)}</h2>\n'
    return head + f'<p class="lead">{escape(lead)}</p>\n' + "\n".join(parts) + "\n</section>"


def card(*parts_html: str) -> str:
    return '<div class="card">' + "\n".join(parts_html) + "</div>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def alert(title: str, lines: Sequence[str]) -> str:
    """A box that cannot be overlooked; empty without lines."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="alert"><b>{escape(title)}</b><ul>{items}</ul></div>'


def table(heads: Sequence[str], groups: Mapping[str, Iterable[Sequence[str]]]) -> str:
    """Rows of HTML cells under group titles; a group named "" has no title."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    bodies = []
    for title, rows in groups.items():
        top = f'<tr><th class="group" colspan="{len(heads)}">{escape(title)}</th></tr>'
        cells = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
        bodies.append("<tbody>" + (top if title else "") + "".join(cells) + "</tbody>")
    return f"<table><thead><tr>{head}</tr></thead>{''.join(bodies)}</table>"


def dot(text: str, colour: int) -> str:
    """A label with the colour of its line or bar."""
    return f'<span class="dot" style="background:var(--c{colour})"></span>{escape(text)}'


def estimate(found: Mapping[str, float | None], colour: int) -> str:
    """A share in percent over a bar, with its interval."""
    width = 100 * found["value"]
    return (
        f'<b>{percent(found["value"])}</b><div class="track"><i style="width:{width:.1f}%;'
        f'background:var(--c{colour})"></i></div><small>{_span(found)}</small>'
    )


def short_estimate(found: Mapping[str, float | None], _colour: int) -> str:
    """A share in percent and its interval, without a bar."""
    return f"{percent(found['value'])} <small class=beside>{_span(found)}</small>"


def _span(found: Mapping[str, float | None]) -> str:
    low, high = found.get("low"), found.get("high")
    return "" if low is None or high is None else f"{100 * low:.0f} to {100 * high:.0f}"


def stack(shares: Mapping[str, float], colours: Mapping[str, int]) -> str:
    """One bar cut into shares of the whole."""
    parts = [
        f'<span title="{escape(name)} {percent(share)}" style="flex:{share:.4f} 0 0;'
        f'background:var(--c{colours[name]})"></span>'
        for name, share in shares.items()
        if share > 0
    ]
    return f'<div class="stack">{"".join(parts)}</div>'


def keys(texts: Mapping[str, int]) -> str:
    """What the colours of a bar mean."""
    items = "".join(f"<li>{dot(text, colour)}</li>" for text, colour in texts.items())
    return f'<ul class="keys">{items}</ul>'


def picture(light: Path, dark: Path, alt: str, caption: str, wide: bool = False) -> str:
    """A figure that follows the reader's theme, with the images inside the page."""
    shape = ' class="wide"' if wide else ""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure{shape}><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{_inline(dark)}"><img src="{_inline(light)}" alt="{escape(alt)}"></picture>'
        f"{words}</figure>"
    )


def fold(title: str, aside: str, body_html: str, is_open: bool = False) -> str:
    """A part that opens with a click."""
    shown = " open" if is_open else ""
    head = f"<summary>{escape(title)}<span>{escape(aside)}</span></summary>"
    return f"<details{shown}>{head}{body_html}</details>"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{100 * share:.1f}%" if 0 < share < 0.1 else f"{100 * share:.0f}%"


def number(value: float | None, places: int = 2) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def _inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
