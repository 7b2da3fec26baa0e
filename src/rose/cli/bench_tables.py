"""The tables that ``rose bench transfer`` prints, made from its JSON object alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_Row = Sequence[str]


def bench_tables(result: Mapping[str, Any]) -> RenderableType:
    """Return everything that was measured, one table a section."""
    return Group(*_parts(result))


def _parts(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _head(result)
    if "density" in result:
        yield Text("")
        yield _table(
            ("changed", "lr", "one ulp", "B/changed", "entropy", "over", "of dense", "COO32/rose"), _density(result)
        )
    if "codec" in result:
        yield Text("")
        yield _table(("cores", "copy GB/s", "encode", "encode/copy", "whole side", "whole/copy"), _codec(result))
    if "peers" in result:
        yield Text("")
        yield _table(("scheme", "MB", "of dense", "encode s", "decode s"), _peers(result))
    if "apply" in result:
        yield Text("")
        yield _table(("applying", "ms"), _apply(result))
    if result.get("redundancy"):
        yield Text("")
        yield _table(("engines", "bytes over link / bytes published"), _redundancy(result))
    if result.get("links"):
        yield Text("")
        yield _table(("Gbps", "how", "sync s", "codec s", "wire s", "overhead", "pause s", "paper s"), _links(result))
        yield Text(_notes(result), style="dim")
    for name, reason in result.get("skipped", {}).items():
        yield Text(f"{name}: not measured, {reason}", style="yellow")
    if "life_cycle" in result:
        yield Text("")
        heads = ("version", "changed", "B/changed", "train s", "publish s", "stage s", "pause s", "tokens meanwhile")
        yield _table(heads, _life_cycle(result))


def _head(result: Mapping[str, Any]) -> Text:
    exact = {
        True: ("every engine bit-exact", "bold green"),
        False: ("something failed, see below", "bold red"),
        None: ("no engine was compared", "dim"),
    }[result["bit_exact"]]
    return Text.assemble(
        f"{result['model']}: {result['num_elements'] / 1e9:.3f} G elements ({result['sampled_fraction']:.1%} of the model), ",
        f"{result['changed_fraction']:.3%} changed at lr {result['lr']:.3g}, {result['one_ulp_share']:.0%} of that by one ulp; ",
        exact,
    )


def _table(heads: _Row, rows: Sequence[_Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _density(result: Mapping[str, Any]) -> list[_Row]:
    return [
        (
            f"{row['changed_fraction']:.3%}",
            f"{row['lr']:.2g}",
            f"{row['one_ulp_share']:.0%}",
            f"{row['bytes_per_changed']:.3f}",
            f"{row['entropy_bytes_per_changed']:.3f}",
            _over(row["bytes_per_changed"], row["entropy_bytes_per_changed"]),
            f"{row['rose_bytes'] / row['dense_bytes']:.2%}",
            f"{row['coo32_bytes'] / row['rose_bytes']:.2f}" if row["rose_bytes"] else "-",
        )
        for row in result["density"]
    ]


def _over(value: float, bound: float) -> str:
    """Return how far a value lies over a bound; nothing can be said where nothing changed."""
    return f"{value / bound - 1:+.1%}" if bound else "-"


def _codec(result: Mapping[str, Any]) -> list[_Row]:
    return [
        (
            str(row["num_cores"]),
            f"{row['copy_gb_per_s']:.2f}",
            f"{row['encode_gb_per_s']:.2f}",
            f"{row['encode_gb_per_s'] / row['copy_gb_per_s']:.2f}",
            f"{row['whole_gb_per_s']:.2f}",
            f"{row['whole_gb_per_s'] / row['copy_gb_per_s']:.2f}",
        )
        for row in result["codec"]["by_cores"]
    ]


def _peers(result: Mapping[str, Any]) -> list[_Row]:
    dense = result["dense_bytes"]
    return [
        (
            name,
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes'] / dense / row.get('share_of_sample', 1.0):.2%}",
            f"{row['encode_s']:.3f}",
            f"{row['decode_s']:.3f}",
        )
        for name, row in result["peers"].items()
    ]


def _apply(result: Mapping[str, Any]) -> list[_Row]:
    found = result["apply"]
    names = {
        "vllm_s": "vLLM's patch loader",
        "activate_s": f"rose, in the pause ({result['apply_speedup_over_vllm']:.1f}x)",
        "verified_activate_s": "rose, in the pause, all sums anew",
        "stage_s": f"rose, before it: fetch and decode ({found['speedup_with_decoding']:.1f}x with it)",
    }
    return [(label, f"{found[key] * 1e3:.2f}") for key, label in names.items()]


def _redundancy(result: Mapping[str, Any]) -> list[_Row]:
    rows: list[_Row] = [(str(count), f"{ratio:.4f}") for count, ratio in result["redundancy"].items()]
    if result.get("tp8_share") is not None:
        rows.append(("a TP8 rank", f"{result['tp8_share']:.4f} (needs {result['tp8_share_needed']:.4f})"))
    return rows


def _links(result: Mapping[str, Any]) -> list[_Row]:
    return [
        (
            rate,
            row["how"],
            f"{row['sync_s']:.3f}",
            f"{row['codec_s']:.3f}",
            f"{row['wire_s']:.3f}",
            f"{row['overhead_fraction']:.1%}",
            f"{row['pause_s']:.4f}",
            "-" if row["paper_sync_s"] is None else f"{row['paper_sync_s']:.3f}",
        )
        for rate, row in result["links"].items()
    ]


def _life_cycle(result: Mapping[str, Any]) -> list[_Row]:
    return [
        (
            str(row["version"]),
            f"{row['changed_fraction']:.3%}",
            f"{row['bytes_per_changed']:.3f}",
            f"{row['train_s']:.2f}",
            f"{row['publish_s']:.2f}",
            f"{row['stage_s']:.2f}",
            f"{row['pause_s']:.3f}",
            str(row["tokens_while_staging"]),
        )
        for row in result["life_cycle"]["versions"]
    ]


def _notes(result: Mapping[str, Any]) -> str:
    notes = dict.fromkeys(row["note"] for row in result["links"].values())
    return "\n".join(notes)
