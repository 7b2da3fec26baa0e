"""How strategies look, the same in every figure of a page, and the page's colours in the light and in the dark.

The colours were searched for: each has a contrast of at least 2.7 to the light and to the dark page, and any two differ without
red and without green cones too. Every strategy has a marker as well, and baselines are dashed.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from rose.observe.report import style
from rose.simulation.report.data import FIXED, POLICY, Study

PALETTE = ("#509be6", "#d10083", "#54a822", "#a85400", "#8a2ee6", "#d18369")
# One more than there are colours, so that a pair comes again only after all pairs.
MARKERS = ("o", "s", "^", "D", "v", "X", "P")
SOLID = "-"
DASHES = ((0, (5, 1.6)), (0, (2, 1.4)), (0, (6, 1.5, 1.5, 1.5)))

# What the figures draw in, and the page's variable of the same meaning.
VARIABLES = {
    style.INK: "--ink",
    style.MUTED: "--muted",
    style.GRID: "--grid",
    "#aab3bc": "--edge",
    "#ffffff": "--paper",
}
RC_PARAMS = {**style.RC_PARAMS, "figure.facecolor": "none", "axes.facecolor": "none"}

_DARK = """ --ink: #e6eaee; --muted: #a3aeb9; --line: #333c46; --paper: #1c2229; --page: #14181d; --bad-paper: #33201f;
  --grid: #2f3842; --edge: #5a6672; --good: #5cc28f; --bad: #f0857a; """
CSS = f"""{style.CSS}
:root {{ --grid: {style.GRID}; --edge: #aab3bc; color-scheme: light dark; }}
td {{ white-space: pre; vertical-align: top; color: var(--muted); font-size: 12.5px; }}
td::first-line, td:first-child {{ color: var(--ink); font-size: 15px; }}
details {{ margin: 12px 0 0; }} summary {{ cursor: pointer; color: var(--muted); }}
h3 {{ font-size: 15px; margin: 18px 0 4px; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{{_DARK}}} }}
"""


@attrs.frozen(kw_only=True)
class Look:
    """Colour, marker and dashes of one strategy."""

    colour: str
    marker: str
    dashes: object
    width: float


def assign_looks(studies: Iterable[Study]) -> dict[str, Look]:
    """Return every strategy's look, by the order in which the studies name them."""
    kinds = {strategy.name: strategy.kind for study in studies for strategy in reversed(study.strategies)}
    names = list(dict.fromkeys(strategy.name for study in studies for strategy in study.strategies))
    found: dict[str, Look] = {}
    for name in names:
        index = len([known for known in found if known != FIXED])
        found[name] = _fixed() if name == FIXED else _look(index, is_policy=kinds[name] == POLICY)
    return found


def _fixed() -> Look:
    return Look(colour=style.FIXED, marker="d", dashes=(0, (1, 1.4)), width=1.4)


def _look(index: int, *, is_policy: bool) -> Look:
    turn = index // len(PALETTE)
    return Look(
        colour=PALETTE[index % len(PALETTE)],
        marker=MARKERS[index % len(MARKERS)],
        dashes=SOLID if is_policy and not turn else DASHES[(turn + (not is_policy)) % len(DASHES) - 1],
        width=2.0 if is_policy else 1.3,
    )
