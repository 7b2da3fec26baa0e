"""Colours and the style sheet of the report, one meaning a colour in all figures."""

from __future__ import annotations

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e4e8ec"
FIXED = "#6b7a89"
ROSE = "#c2305c"
UNGATED = "#d9962b"
SERVING = "#3b6fb6"
ROLLOUT = "#2a9d8f"
LIMIT = "#1f2933"

ARM_COLOURS = {"fixed": FIXED, "rose": ROSE, "alone": FIXED, "shared": ROSE, "ungated": UNGATED}
CODEC_COLOURS = {"dense": "#a9b4bf", "mixed": "#8fc7bf", "sparse": ROLLOUT}

RC_PARAMS = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": "#aab3bc",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
}

CSS = """
:root { --ink: #1f2933; --muted: #66727f; --line: #dfe4e9; --paper: #fff; --page: #f5f6f8;
  --bad-paper: #fff6f5; --rose: #c2305c; --good: #1f7a4d; --bad: #b42318; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial,
  "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 28px 56px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 19px; line-height: 1.35; margin: 0 0 6px; }
p { margin: 0 0 10px; max-width: 96ch; }
.subtitle, figcaption, .note { color: var(--muted); }
.verdict { display: flex; gap: 12px; align-items: baseline; margin: 20px 0; padding: 12px 16px; border-radius: 8px;
  background: var(--paper); border: 1px solid var(--line); border-left: 5px solid var(--good); }
.verdict.invalid { border-left-color: var(--bad); background: var(--bad-paper); }
.verdict b { white-space: nowrap; color: var(--good); }
.verdict.invalid b { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin: 0 0 22px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 13px 15px 12px; }
.card .label { color: var(--muted); font-size: 13px; }
.card .value { font-size: 25px; font-weight: 650; line-height: 1.3; letter-spacing: -.01em; white-space: nowrap; }
.card .detail { color: var(--muted); font-size: 13px; line-height: 1.4; }
.card .value.good { color: var(--good); } .card .value.bad { color: var(--bad); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 20px 22px; margin: 0 0 18px; }
figure { margin: 12px 0 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { font-size: 13px; margin-top: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 12px 0 2px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; font-size: 13px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
td.strong { font-weight: 650; }
ul { margin: 4px 0 0; padding-left: 20px; } li { margin: 3px 0; }
@media (max-width: 720px) { .cards { grid-template-columns: repeat(2, 1fr); } main { padding: 20px 14px; } }
@page { margin: 14mm; }
@media print {
  body { background: #fff; font-size: 11px; } main { max-width: none; padding: 0; }
  h1 { font-size: 20px; } h2 { font-size: 14px; break-after: avoid; }
  .card .value { font-size: 17px; } .card .label, .card .detail, figcaption, th { font-size: 10px; }
  .card, .verdict, figure, tr, li { break-inside: avoid; }
  section { border: 0; padding: 0; margin: 0 0 20px; }
  .scroll { overflow: visible; } th, td { padding: 3px 7px; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
