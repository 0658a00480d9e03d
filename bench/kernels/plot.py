"""The benchmark of kernels as one SVG file: a row for each shape, for readers in light and dark.

On the left, a bar: how much of the machine's limit our kernel reaches, with a tick for each peer. On the right, dots:
how many times as long as ours each peer takes, on a logarithmic axis; right of the line at 1 we are faster. Hollow
dots are our own kernel with another task. Numbers show on hover.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from pipeline.report.style import CSS

WIDTH, NAME, BAR, GAP = 1080, 260, 300, 40
LEFT_BAR = NAME + 20
LEFT_DOTS = LEFT_BAR + BAR + GAP
RIGHT = WIDTH - 24
ROW, SECTION, TOP = 20, 62, 96
LOW, HIGH = 0.5, 8.0
"""Ends of the ratio axis; what lies outside is a triangle at its end."""
STYLE = f"""{CSS}
  svg {{ width: {WIDTH}px; max-width: none; margin: 0; --c: var(--c1); }}
  .page {{ fill: var(--card); }} .title {{ font-size: 17px; }} .part {{ font-size: 14px; }}
  .strong {{ fill: var(--ink); font-weight: 600; }} .red {{ fill: var(--bad); font-weight: 600; }}
  .ring {{ fill: none; stroke: var(--c1); stroke-width: 1.8; }}
"""


def draw(joined: dict[str, Any]) -> str:
    """The joined results as an SVG document."""
    parts = joined["parts"]
    families = _families(parts, "peer")
    paints = {family: f'fill="hsl({number * 137.5 % 360:.0f} 50% 50%)"' for number, family in enumerate(families)}
    paints |= dict.fromkeys(_families(parts, "baseline"), 'class="ring"')
    pieces, y = [*_header(joined, paints)], TOP
    for part in parts:
        pieces += _section(part, y, paints)
        y += SECTION + ROW * len(part["cases"])
    size = f'width="{WIDTH}" height="{y + 12}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" {size}><style>{STYLE}</style>'
    return "\n".join([opening, f'<rect class="page" {size} rx="8"/>', *pieces, "</svg>"]) + "\n"


def _family(name: str) -> str:
    """One color for the forms of a peer: `contiguous_flex` and `flex`, `liger + index_copy` and `liger`."""
    return name.removeprefix("contiguous_").split(" ")[0]


def _families(parts: Sequence[dict[str, Any]], role: str) -> list[str]:
    """Everybody who was measured in this role, in order of appearance."""
    listed = (item for part in parts for case in part["cases"] for item in case["candidates"].items())
    return list(dict.fromkeys(_family(name) for name, it in listed if (it["role"], it["status"]) == (role, "measured")))


def _header(joined: dict[str, Any], paints: dict[str, str]) -> Iterator[str]:
    title = "tiny shapes: that they run, not how fast" if joined["tiny"] else f"kernels on {joined['gpu']}"
    yield _text(20, 32, f"potstill, {title}", "strong title")
    x, y = 20.0, 56
    for name, paint in paints.items():
        length = 26 + 6.8 * len(name)
        if x + length > RIGHT:
            x, y = 20.0, y + 18
        yield f'<circle cx="{x + 4:.0f}" cy="{y - 4}" r="4" {paint}/>'
        yield _text(x + 13, y, name)
        x += length


def _section(part: dict[str, Any], y: int, paints: dict[str, str]) -> Iterator[str]:
    bottom = y + SECTION - 14 + ROW * len(part["cases"])
    copy, product = part["limits"]["copy_bytes_per_s"] / 1e12, part["limits"]["matmul_flop_per_s"] / 1e12
    yield _text(20, y + 22, part["part"], "strong part")
    yield _text(LEFT_BAR, y + 22, f"fraction of the limit ({copy:.2f} TB/s, {product:.0f} TFLOP/s)")
    yield _text(LEFT_DOTS, y + 22, "time of a peer over ours")
    ticks = [(LEFT_BAR + BAR * percent / 100, f"{percent}%") for percent in (0, 25, 50, 75, 100)]
    ticks += [(_ratio_x(ratio), f"{ratio:g}") for ratio in (0.5, 1.0, 2.0, 4.0, 8.0)]
    for x, text in ticks:
        kind = "axis" if text == "1" else "grid"
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 44}" y2="{bottom}"/>'
        yield _text(x, y + 40, text, anchor="middle")
    for index, case in enumerate(part["cases"]):
        yield from _row(case, y + SECTION - 8 + ROW * index, paints)


def _row(case: dict[str, Any], y: int, paints: dict[str, str]) -> Iterator[str]:
    yield _text(20, y + 9, case["name"])
    ours = next((found for found in case["candidates"].values() if found["role"] == "ours"), {"status": "failed"})
    if ours["status"] == "measured":
        length = BAR * min(ours["roofline_fraction"], 1.0)
        yield f'<rect class="rail" x="{LEFT_BAR}" y="{y}" width="{BAR}" height="10"/>'
        yield f'<rect class="bar" x="{LEFT_BAR}" y="{y}" width="{length:.1f}" height="10">{_hover("ours", ours)}</rect>'
    else:
        yield _text(LEFT_BAR, y + 9, ours["status"].upper(), "red")
    for name, found in case["candidates"].items():
        paint = paints.get(_family(name), "")
        if found["status"] == "measured" and found["role"] == "peer":
            x = LEFT_BAR + BAR * min(found["roofline_fraction"], 1.0)
            yield f'<rect x="{x - 1:.1f}" y="{y - 2}" width="2" height="14" {paint}>{_hover(name, found)}</rect>'
        if "times_ours" in found:
            yield _dot(name, found, y + 5, paint)


def _text(x: float, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(name: str, found: dict[str, Any], y: int, paint: str) -> str:
    ratio, x = found["times_ours"], _ratio_x(found["times_ours"])
    if LOW <= ratio <= HIGH:
        return f'<circle cx="{x:.1f}" cy="{y}" r="4.5" {paint}>{_hover(name, found)}</circle>'
    tip = 7 if ratio > HIGH else -7
    corners = f"{x:.1f},{y - 5} {x:.1f},{y + 5} {x + tip:.1f},{y}"
    return f'<polygon points="{corners}" {paint}>{_hover(name, found)}</polygon>'


def _hover(name: str, found: dict[str, Any]) -> str:
    ratio = f", {found['times_ours']:.2f} times ours" if "times_ours" in found else ""
    fraction = f", {found['roofline_fraction']:.0%} of the limit" if "roofline_fraction" in found else ""
    memory = f", {found['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in found else ""
    return f"<title>{escape(name)}: {found['median_s'] * 1e6:.1f} µs{ratio}{fraction}{memory}</title>"


def _ratio_x(ratio: float) -> float:
    share = math.log(min(max(ratio, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return LEFT_DOTS + share * (RIGHT - LEFT_DOTS)
