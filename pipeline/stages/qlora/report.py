"""The report's section on adapters: what is trained beside how small a base, and what each way of merging costs."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report.table import count, html_table, size
from pipeline.results import Result

_WAYS = {
    "adapter": "adapter beside its base",
    "merged": "merged, bf16",
    "requantized": "merged, quantized again",
}
_COLUMNS = ("handed over as", "perplexity", "KL to base with adapter", "same first token", "gate")


def adapters(results: Sequence[Result]) -> str:
    """HTML of every stage `qlora` that finished; empty without one."""
    return "".join(_stage(result) for result in results if result.kind == "qlora")


def merge_lines(result: Result) -> list[list[str]]:
    """One line for each way of handing over base and adapter; the columns' headings come first."""
    bound = result.details.get("max_merge_kl", 0.0)
    lines = [list(_COLUMNS)] if result.details.get("merges") else []
    for row in result.details.get("merges", ()):
        kl, agreement = row["kl"]["value"], row["agreement"]["value"]
        verdict = "–" if row["way"] == "adapter" else _verdict(row["kl"], bound)
        lines.append([_WAYS[row["way"]], f"{row['perplexity']:.3f}", f"{kl:.5f}", f"{agreement:.1%}", verdict])
    return lines


def _verdict(kl: Mapping[str, float | None], bound: float) -> str:
    worst = (kl["value"] or 0.0) + (kl["margin"] or 0.0)
    return f"{'holds' if worst <= bound else 'refused'}: {worst:.4g} of {bound:g}"


def _stage(result: Result) -> str:
    return (
        f"<h2>Adapter: {escape(result.stage)}</h2><p>{escape(_summary(result))}</p>"
        f'{html_table(merge_lines(result))}<p class="note">Held-out text. The gate compares the worst end of the 95 % '
        "interval of the KL; a merged model above it is not published.</p>"
    )


def _summary(result: Result) -> str:
    details: Mapping[str, Any] = result.details
    adapter, quantized = details["adapter"], details["quantized"]
    dense, base, after = (row.quality.perplexity for row in result.models if row.quality)
    trained = count(adapter["parameters"])
    text = f"Rank {adapter['rank']} on {adapter['layers']} layers: {trained} numbers were trained. "
    if quantized:
        text += (
            f"The quantized weights of these layers take {size(quantized['bytes'])}, "
            f"{quantized['bits_per_weight']:.3f} bits each. "
            f"Held-out perplexity: {dense:.2f} before quantization, {base:.2f} after it, "
        )
    else:
        text += f"Held-out perplexity: {base:.2f} before training, "
    return f"{text}{after:.2f} with the adapter ({after / base - 1:+.1%})."
