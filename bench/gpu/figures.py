"""What a part finds: figures of ours beside peers, goals and limits of the machine; and the table of all of them."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

ROOFLINE, ITSELF = "roofline", ""
LEAST = 1e-9
"""In place of nothing at all, where less is better."""


@dataclass(frozen=True)
class Goal:
    """At least so many times (where less is better: at most) a peer's figure, the roofline, or 1, `ITSELF`."""

    of: str
    times: float


@dataclass(frozen=True)
class Figure:
    """One line of the table. A part that measures a peer alone yields one of the same name without `ours`."""

    name: str
    unit: str
    ours: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    roofline: float | None = None
    """What ours would be if the machine were the only limit, by rates measured on it."""
    goals: tuple[Goal, ...] = ()
    less_is_better: bool = False
    references: dict[str, float] = field(default_factory=dict)
    """What goals name beside peers, such as our own kernel with less to do."""
    note: str = ""
    part: str = ""
    """That has found it; the hour fills this in."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Figure":
        return cls(**{**plain, "goals": tuple(Goal(**goal) for goal in plain["goals"])})

    def joined(self, other: "Figure") -> "Figure":
        """Both as one: what this one does not know is the other's."""
        known = {name: value for name, value in vars(self).items() if value not in (None, "", {}, ())}
        peers, references = other.peers | self.peers, other.references | self.references
        return Figure(**{**vars(other), **known, "peers": peers, "references": references})

    def best_peer(self) -> tuple[str, float] | None:
        choose = min if self.less_is_better else max
        return choose(self.peers.items(), key=lambda peer: peer[1], default=None)

    def goal(self) -> float | None:
        """The hardest of the goals whose reference is known, in the unit of the figure; without one, the best peer."""
        known = {ITSELF: 1.0, **self.references, **self.peers}
        known |= {} if self.roofline is None else {ROOFLINE: self.roofline}
        values = [goal.times * known[goal.of] for goal in self.goals if goal.of in known]
        if not values and (peer := self.best_peer()) is not None:
            values = [peer[1]]
        return (min if self.less_is_better else max)(values, default=None)

    def ratio(self) -> float | None:
        """How far the goal is reached: from 1 on it is. None without a goal, or where ours was not measured."""
        goal = self.goal()
        if self.ours is None or not goal:
            return None
        return goal / (self.ours or LEAST) if self.less_is_better else self.ours / goal


def join(figures: Iterable[Figure]) -> list[Figure]:
    """One figure of each name, in the order in which the names come."""
    joined: dict[str, Figure] = {}
    for figure in figures:
        joined[figure.name] = joined[figure.name].joined(figure) if figure.name in joined else figure
    return list(joined.values())


def table_of(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """The rows as JSON, the worst ratio first; those without one last."""
    rows = []
    for figure in join(figures):
        peer, ratio = figure.best_peer(), figure.ratio()
        row: dict[str, Any] = {name: getattr(figure, name) for name in ("part", "name", "unit", "ours")}
        row |= {"best_peer": peer and peer[0], "peer": peer and peer[1], "goal": figure.goal(), "ratio": ratio}
        rows.append(row | {name: getattr(figure, name) for name in ("roofline", "less_is_better", "note")})
    return sorted(rows, key=lambda row: (row["ratio"] is None, row["ratio"] or 0.0))


def lines_of(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The table as text; `<` marks what misses its goal."""
    yield f"{'part':22} {'figure':54} {'ours':>9} {'best peer':>22} {'goal':>9} {'roofline':>9} {'ratio':>6}"
    for row in rows:
        peer = "" if row["best_peer"] is None else f"{row['best_peer']} {short(row['peer'])}"
        numbers = [short(row[name]) for name in ("goal", "roofline")]
        ratio, mark = ("", "") if row["ratio"] is None else (f"{row['ratio']:.2f}", " <" * (row["ratio"] < 1))
        name = f"{row['name']}, {row['unit']}"
        cells = f"{short(row['ours']):>9} {peer:>22} {numbers[0]:>9} {numbers[1]:>9} {ratio:>6}{mark}"
        yield f"{row['part']:22} {name:54} {cells}" + (f"  ({row['note']})" if row["note"] else "")


def short(number: float | None) -> str:
    """Three digits that count, more before the point."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
