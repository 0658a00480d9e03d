"""The report's style sheet: one page, light or dark as the reader's system asks, no fonts or files from elsewhere."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --ink: #1d1f23; --soft: #63676f; --rule: #e3e1db; --tint: #f1efe9;
  --c1: #b3541e; --c2: #2f6f8f; --c3: #5b7f3a; --c4: #8a5a9e; --good: #2e7d4f; --bad: #b3261e; --mark: #fbe3c8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181c; --card: #1f2228; --ink: #e8e6e1; --soft: #9aa0a9; --rule: #33373f; --tint: #282c33;
    --c1: #e98a4f; --c2: #6cb6d9; --c3: #9cc373; --c4: #c49ad6; --good: #6cc28d; --bad: #f28b82; --mark: #5a3a1e;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 4px 0 0; color: var(--soft); }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 44px 0 12px; }
h2 + p { margin: -6px 0 14px; color: var(--soft); max-width: 80ch; }
code, pre, .digest { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin-top: 26px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 25px; font-weight: 650; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
.card { padding: 6px 18px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 8px; text-align: right; border-top: 1px solid var(--rule); white-space: nowrap; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 13px; white-space: normal;
  vertical-align: bottom; line-height: 1.3; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 600; white-space: normal; min-width: 18ch; }
td.text, th.text { text-align: left; white-space: normal; }
.note { color: var(--soft); font-size: 13px; margin: 8px 2px 0; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(390px, 100%), 1fr)); gap: 16px; }
.charts.bars { grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); align-items: start; }
.card + .charts, .note + .charts, .charts + .card, .card + .card { margin-top: 16px; }
figure { margin: 0; padding: 14px 16px 10px; }
figcaption { font-weight: 600; font-size: 14px; display: flex; justify-content: space-between; gap: 12px; }
.legend { font-weight: 400; color: var(--soft); font-size: 13px; }
.key { margin-left: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; vertical-align: middle;
  margin-right: 6px; background: var(--c); }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
svg { display: block; width: 100%; max-width: 600px; height: auto; margin: 8px auto 0; overflow: visible; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .name { font-size: 13px; } svg .value { fill: var(--ink); font-size: 13px; font-weight: 600; }
svg .rail { fill: var(--tint); }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .dot, svg .hover, svg .bar { fill: var(--c); }
svg .hit { fill: transparent; } svg .hover { opacity: 0; } svg .point:hover .hover { opacity: 1; }
.talk { padding: 16px 20px; margin-bottom: 14px; }
.talk .asked { font-weight: 600; margin: 0 0 10px; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 20px; }
.answers h3 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 0 0 4px; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 10px 12px;
  background: var(--tint); border-radius: 8px; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 1px 0; }
pre { overflow-x: auto; margin: 8px 0; }
details summary { cursor: pointer; padding: 10px 0; color: var(--soft); }
footer { margin-top: 48px; color: var(--soft); font-size: 13px; }
"""
