"""What one sync over one link took, and the same for links that are too fast to be emulated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

COMPUTED_GBPS = (25.0, 100.0, 200.0)


@attrs.frozen(kw_only=True)
class LinkRow:
    """One link.

    Attributes:
        gbps: Its nominal rate.
        how: ``measured`` or ``computed``.
        note: What was emulated, what scaled, what modelled.
        sync_s: From the begin of the publish to the last rank's acknowledgement.
        encode_s: The trainer's whole side alone, until the version is visible: compare, code, compress, sum, put into a store that
            nobody reads.
        decode_s: The engines' whole side alone: stage and activate from their relay's memory.
        wire_s: Bytes that crossed over the link's own rate, as a plain transfer reached it in the same run.
        pause_s: Longest time for which a rank was paused.
        paper_sync_s: COO32 in 64 MB buckets, whole tensors, over the same link; ``None`` if it was not run.
        bytes_sent: What crossed.
        spans: Begin and end of what happened, in seconds from the begin, for the time line.
    """

    gbps: float
    how: str
    note: str
    sync_s: float
    encode_s: float
    decode_s: float
    wire_s: float
    pause_s: float
    paper_sync_s: float | None
    bytes_sent: int
    spans: tuple[tuple[str, float, float], ...] = ()

    @property
    def codec_s(self) -> float:
        """Return the codec's whole time, encoding and decoding."""
        return self.encode_s + self.decode_s

    @property
    def overhead_fraction(self) -> float:
        """Return how much longer the sync took than the longer of codec and wire, as a share of that."""
        return self.sync_s / max(self.codec_s, self.wire_s) - 1

    @property
    def pipelined_overhead_fraction(self) -> float:
        """Return the same against the longest of encoding, decoding and wire: what a perfect pipeline would take."""
        return self.sync_s / max(self.encode_s, self.decode_s, self.wire_s) - 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        data = attrs.asdict(self)
        del data["gbps"]
        return {
            **data,
            "codec_s": self.codec_s,
            "overhead_fraction": self.overhead_fraction,
            "pipelined_overhead_fraction": self.pipelined_overhead_fraction,
        }


@attrs.frozen(kw_only=True)
class PaperCosts:
    """What the paper's scheme took apart from the wire: bytes, and seconds of encoding and applying."""

    bytes: int
    encode_s: float
    decode_s: float


def computed_rows(measured: Sequence[LinkRow], paper: PaperCosts | None, gbps: Sequence[float]) -> tuple[LinkRow, ...]:
    """Return rows for faster links from the fastest measured one.

    The codec's time and what the sync took beyond the longer of codec and wire (fixed costs) stay as measured; the wire's time follows
    the rate. The paper's scheme, which has no overlap, takes the sum of its parts.
    """
    if not measured:
        return ()
    base = max(measured, key=lambda row: row.gbps)
    fixed_s = max(0.0, base.sync_s - max(base.codec_s, base.wire_s))
    note = (
        f"computed from the codec and fixed costs measured at {base.gbps:g} Gbps; wire time modelled as bytes over rate"
    )
    return tuple(
        LinkRow(
            gbps=rate,
            how="computed",
            note=note,
            sync_s=max(base.codec_s, _wire_s(base.bytes_sent, rate)) + fixed_s,
            encode_s=base.encode_s,
            decode_s=base.decode_s,
            wire_s=_wire_s(base.bytes_sent, rate),
            pause_s=base.pause_s,
            paper_sync_s=None if paper is None else paper.encode_s + _wire_s(paper.bytes, rate) + paper.decode_s,
            bytes_sent=base.bytes_sent,
        )
        for rate in gbps
    )


def _wire_s(num_bytes: int, gbps: float) -> float:
    return num_bytes * 8 / (gbps * 1e9)


def links_json(rows: Sequence[LinkRow]) -> Mapping[str, Any]:
    """Return the rows by rate, slowest first."""
    return {f"{row.gbps:g}": row.to_json() for row in sorted(rows, key=lambda row: row.gbps)}
