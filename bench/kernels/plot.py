"""The benchmark of kernels as one SVG file: a row for each shape, for readers in light and dark.

On the left, a bar: how much of the machine's limit our kernel reaches, with a tick for each peer. On the right, dots:
how many times as long as ours each peer takes, on a logarithmic axis; right of the line at 1 we are faster. Hollow
dots are our own kernel with another task. Numbers show on hover.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

WIDTH, NAME, BAR, GAP = 1080, 260, 300, 40
LEFT_BAR = NAME + 20
LEFT_DOTS = LEFT_BAR + BAR + GAP
RIGHT = WIDTH - 24
ROW, SECTION, TOP = 20, 62, 96
LOW, HIGH = 0.5, 8.0
"""Ends of the ratio axis; what lies outside is a triangle at its end."""
COLORS = (
    "#3b6fb5", "#4f9a3b", "#8a5ab5", "#c0392b", "#c99700", "#16999c", "#e07bb0", "#7d5a3c", "#8c98a4", "#5f5fd3",
    "#1f3f6e", "#9bc53d", "#c79ae0", "#ff7f66", "#e8c468", "#5ec4c8", "#a3195b", "#b08968", "#4a5560", "#2e7d5b",
)  # fmt: skip
STYLE = """
  svg { font: 12px system-ui, "Segoe UI", Roboto, sans-serif; }
  .page { fill: #ffffff; } text { fill: #63676f; } .strong { fill: #1d1f23; font-weight: 600; }
  .title { font-size: 17px; } .part { font-size: 14px; } .red { fill: #b3261e; font-weight: 600; }
  .rail { fill: #f1efe9; } .bar { fill: #b3541e; }
  .ring { fill: none; stroke: #b3541e; stroke-width: 1.8; } .grid { stroke: #e3e1db; } .one { stroke: #63676f; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1f2228; } text { fill: #9aa0a9; } .strong { fill: #e8e6e1; } .red { fill: #f28b82; }
    .rail { fill: #282c33; } .bar { fill: #e98a4f; }
    .ring { stroke: #e98a4f; } .grid { stroke: #33373f; } .one { stroke: #9aa0a9; }
  }
"""


def draw(joined: dict[str, Any]) -> str:
    """The joined results as an SVG document."""
    parts = joined["parts"]
    height = TOP + sum(SECTION + ROW * len(part["cases"]) for part in parts) + 12
    colors = {family: COLORS[index % len(COLORS)] for index, family in enumerate(_families(parts, "peer"))}
    colors |= dict.fromkeys(_families(parts, "baseline"), "")
    size = f'width="{WIDTH}" height="{height}"'
    pieces = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size}><style>{STYLE}</style>']
    pieces += [f'<rect class="page" {size} rx="8"/>', *_header(joined, colors)]
    y = TOP
    for part in parts:
        pieces += _section(part, y, colors)
        y += SECTION + ROW * len(part["cases"])
    return "\n".join([*pieces, "</svg>"]) + "\n"


def _family(name: str) -> str:
    """One color for the forms of a peer: `contiguous_flex` and `flex`, `liger + index_copy` and `liger`."""
    return name.removeprefix("contiguous_").split(" ")[0]


def _families(parts: Sequence[dict[str, Any]], role: str) -> list[str]:
    """Everybody who was measured in this role, in order of appearance."""
    listed = (item for part in parts for case in part["cases"] for item in case["candidates"].items())
    return list(dict.fromkeys(_family(name) for name, it in listed if (it["role"], it["status"]) == (role, "measured")))


def _header(joined: dict[str, Any], colors: dict[str, str]) -> Iterator[str]:
    title = "tiny shapes: that they run, not how fast" if joined["tiny"] else f"kernels on {joined['gpu']}"
    yield f'<text class="strong title" x="20" y="32">potstill, {escape(title)}</text>'
    x, y = 20.0, 56
    for name, color in colors.items():
        length = 26 + 6.8 * len(name)
        if x + length > RIGHT:
            x, y = 20.0, y + 18
        yield f'<circle cx="{x + 4:.0f}" cy="{y - 4}" r="4" {_paint(color)}/>'
        yield f'<text x="{x + 13:.0f}" y="{y}">{escape(name)}</text>'
        x += length


def _section(part: dict[str, Any], y: int, colors: dict[str, str]) -> Iterator[str]:
    bottom = y + SECTION - 14 + ROW * len(part["cases"])
    yield f'<text class="strong part" x="20" y="{y + 22}">{escape(part["part"])}</text>'
    copy, product = part["limits"]["copy_bytes_per_s"] / 1e12, part["limits"]["matmul_flop_per_s"] / 1e12
    limit = f"fraction of the limit ({copy:.2f} TB/s, {product:.0f} TFLOP/s)"
    yield f'<text x="{LEFT_BAR}" y="{y + 22}">{limit}</text>'
    yield f'<text x="{LEFT_DOTS}" y="{y + 22}">time of a peer over ours</text>'
    ticks = [(LEFT_BAR + BAR * percent / 100, f"{percent}%") for percent in (0, 25, 50, 75, 100)]
    ticks += [(_ratio_x(ratio), f"{ratio:g}") for ratio in (0.5, 1.0, 2.0, 4.0, 8.0)]
    for x, text in ticks:
        kind = "one" if text == "1" else "grid"
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 44}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{y + 40}" text-anchor="middle">{text}</text>'
    for index, case in enumerate(part["cases"]):
        yield from _row(case, y + SECTION - 8 + ROW * index, colors)


def _row(case: dict[str, Any], y: int, colors: dict[str, str]) -> Iterator[str]:
    yield f'<text x="20" y="{y + 9}">{escape(case["name"])}</text>'
    ours = next((found for found in case["candidates"].values() if found["role"] == "ours"), None)
    if ours is None or ours["status"] != "measured":
        status = "FAILED" if ours is None else ours["status"].upper()
        yield f'<text class="red" x="{LEFT_BAR}" y="{y + 9}">{escape(status)}</text>'
    else:
        length = BAR * min(ours["roofline_fraction"], 1.0)
        yield f'<rect class="rail" x="{LEFT_BAR}" y="{y}" width="{BAR}" height="10"/>'
        yield f'<rect class="bar" x="{LEFT_BAR}" y="{y}" width="{length:.1f}" height="10">{_hover("ours", ours)}</rect>'
    for name, found in case["candidates"].items():
        if found["status"] == "measured" and found["role"] == "peer":
            x = LEFT_BAR + BAR * min(found["roofline_fraction"], 1.0)
            color = colors[_family(name)]
            yield f'<rect x="{x - 1:.1f}" y="{y - 2}" width="2" height="14" fill="{color}">{_hover(name, found)}</rect>'
        if "times_ours" in found:
            yield _dot(name, found, y + 5, colors[_family(name)])


def _dot(name: str, found: dict[str, Any], y: int, color: str) -> str:
    ratio, x = found["times_ours"], _ratio_x(found["times_ours"])
    if LOW <= ratio <= HIGH:
        return f'<circle cx="{x:.1f}" cy="{y}" r="4.5" {_paint(color)}>{_hover(name, found)}</circle>'
    tip = 7 if ratio > HIGH else -7
    corners = f"{x:.1f},{y - 5} {x:.1f},{y + 5} {x + tip:.1f},{y}"
    return f'<polygon points="{corners}" {_paint(color)}>{_hover(name, found)}</polygon>'


def _paint(color: str) -> str:
    """Filled with a color; without one, a ring."""
    return f'fill="{color}"' if color else 'class="ring"'


def _hover(name: str, found: dict[str, Any]) -> str:
    ratio = f", {found['times_ours']:.2f} times ours" if "times_ours" in found else ""
    fraction = f", {found['roofline_fraction']:.0%} of the limit" if "roofline_fraction" in found else ""
    memory = f", {found['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in found else ""
    return f"<title>{escape(name)}: {found['median_s'] * 1e6:.1f} µs{ratio}{fraction}{memory}</title>"


def _ratio_x(ratio: float) -> float:
    share = math.log(min(max(ratio, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return LEFT_DOTS + share * (RIGHT - LEFT_DOTS)
