"""The report as one HTML file: no network, no library, readable from a disk years later.

Text and tables are written here, curves are SVG from `charts`, and a page of plain JavaScript draws the heatmaps from
numbers that lie in the file. All text that comes from a user, a vocabulary or a config is escaped.
"""

from __future__ import annotations

import json
import math
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from dragoman.inspection.attention import KINDS, AttentionMap, Kind, entropy_bits
from dragoman.inspection.charts import Series, line_chart, links_picture
from dragoman.inspection.positions import similarity
from dragoman.inspection.sentence import Sentence

if TYPE_CHECKING:
    from torch import Tensor

    from dragoman.inspection.report import Report

TITLES: dict[Kind, tuple[str, str]] = {
    "encoder": ("Encoder self-attention", "each source token (row) looks at all source tokens (columns)"),
    "cross": ("Cross-attention", "each target token, when it is chosen (row), looks at the source (columns)"),
    "decoder": (
        "Decoder self-attention",
        "each target position (row, its input token) looks at itself and those before",
    ),
}
DIMENSIONS = 256
"""Columns of the picture of positions; a wider model shows every second, third, … pair of them."""


def render(report: Report) -> str:
    """The page of a report."""
    sections = [
        *(_sentence_sections(report.sentence) if report.sentence is not None else []),
        ("training", "Training", _curves(report)),
        ("parameters", "Parameters", _parameters(report)),
        ("positions", "Positions", _positions(report)),
        ("config", "Tokenizer and config", _config(report)),
    ]
    menu = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{escape(title)}</h2>{html}</section>' for key, title, html in sections)
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in report.facts())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The browser itself holds the promise that nothing is fetched.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(report.name)} · dragoman inspect</title><style>{_file('style.css')}</style></head><body>"
        f"<header><h1>{escape(report.name)}</h1><nav>{menu}</nav></header>"
        f'<main><dl class="facts">{facts}</dl>{body}</main>'
        '<div id="tip" role="status"></div>'
        "<noscript><p>The heatmaps are drawn by the script in this file; it is switched off here.</p></noscript>"
        f'<script type="application/json" id="data">{_data(report)}</script><script>{_file("script.js")}</script>'
        "</body></html>\n"
    )


def _sentence_sections(sentence: Sentence) -> list[tuple[str, str, str]]:
    perplexity = math.exp(min(-sentence.log_prob / len(sentence.tokens), 700))
    whose = "given target" if sentence.given else "translation"
    pair = (
        f'<p class="pair"><span>source</span>{escape(sentence.source)}</p>'
        f'<p class="pair"><span>{whose}</span>{escape(sentence.target)}</p>'
        f'<h3>Source tokens</h3><p class="tokens">{"".join(map(_chip, sentence.source_pieces))}</p>'
        "<h3>Target tokens and their probabilities</h3>"
        f'<p class="tokens">{"".join(_target_chip(sentence, i) for i in range(len(sentence.tokens)))}</p>'
        f'<p class="note">log-probability {sentence.log_prob:.3f} for {len(sentence.tokens)} tokens, perplexity '
        f"{perplexity:.2f}. Point at a token for what the model held likeliest there.</p>"
    )
    sections = [("sentence", "Sentence", pair)]
    if sentence.alignment.numel():
        words = [token.piece for token in sentence.tokens[:-1]]
        alignment = (
            '<p class="note">Cross-attention averaged over all layers and heads; each target token is joined to the '
            "source token that it looks at most, the end of the sentence left out.</p>"
            f"{links_picture(sentence.source_pieces[:-1], words, sentence.links)}"
            '<canvas class="heat" data-map="alignment" aria-label="alignment"></canvas>'
        )
        sections.append(("alignment", "Alignment", alignment))
    sections.append(("attention", "Attention", _attention(sentence)))
    return sections


def _chip(piece: str) -> str:
    return f"<span>{escape(piece)}</span>"


def _target_chip(sentence: Sentence, index: int) -> str:
    token = sentence.tokens[index]
    probability = math.exp(token.log_prob)
    others = "\n".join(f"{math.exp(value):7.2%}  {piece}" for piece, value in token.alternatives)
    tip = f"{token.piece}: log-probability {token.log_prob:.3f}\n\nlikeliest here:\n{others}"
    return (
        f'<span class="p" style="--p:{probability:.3f}" title="{escape(tip)}">{escape(token.piece)}'
        f"<small>{probability:.0%}</small></span>"
    )


def _attention(sentence: Sentence) -> str:
    """A figure for every head of every layer, in three groups; the script draws into them."""
    if not sentence.maps:
        return '<p class="none">this family has no attention of the paper&#x27;s kind to show</p>'
    groups = []
    for kind in KINDS:
        maps = sorted((found for found in sentence.maps if found.kind == kind), key=lambda found: found.layer)
        if not maps:
            continue
        title, caption = TITLES[kind]
        rows = "".join(_layer(found) for found in maps)
        groups.append(
            f'<div class="group" id="attention-{kind}"><h3>{title}</h3><p class="note">{caption}. '
            "Bits say how widely a head looks: 0 is one place.</p>"
            f'<div class="viewer"><div class="layers">{rows}</div>'
            '<figure class="large"><figcaption></figcaption>'
            f'<canvas class="heat" data-kind="{kind}"></canvas></figure></div></div>'
        )
    return (
        '<p class="scale"><span>0</span><canvas id="scale" width="220" height="12"></canvas><span>1</span> attention '
        "(colour grows with the square root). Choose a head to see it large with its tokens.</p>" + "".join(groups)
    )


def _layer(found: AttentionMap) -> str:
    bits = entropy_bits(found.weights[0])
    heads = "".join(
        f'<figure class="head" tabindex="0" data-kind="{found.kind}" data-layer="{found.layer}" data-head="{head}">'
        f"<canvas></canvas><figcaption>head {head + 1} · {float(bits[head]):.1f} bits</figcaption></figure>"
        for head in range(found.weights.size(1))
    )
    return f'<div class="layer"><h4>layer {found.layer + 1}</h4><div class="heads">{heads}</div></div>'


def _curves(report: Report) -> str:
    history = report.history
    if not history.train and not history.dev:
        return '<p class="none">this folder has no metrics.jsonl: the model was not trained here</p>'
    losses = [
        Series("train, smoothed", *history.curve("train", "loss"), colour=1),
        Series("train, nll", *history.curve("train", "nll"), colour=2),
        Series("dev, nll", *history.curve("dev", "nll"), colour=3, dots=True),
    ]
    scores = [
        Series("dev BLEU", *history.curve("dev", "bleu"), colour=1, dots=True),
        Series("dev chrF", *history.curve("dev", "chrf"), colour=2, dots=True),
    ]
    charts = [
        ("Loss per target token", line_chart(losses, "update", "loss")),
        ("Translation of the dev set", line_chart(scores, "update", "score", from_zero=True)),
        (
            "Learning rate",
            line_chart(
                [Series("learning rate", *history.curve("train", "lr"))], "update", "learning rate", from_zero=True
            ),
        ),
        (
            "Gradient norm",
            line_chart(
                [Series("gradient norm", *history.curve("train", "grad_norm"))], "update", "norm", from_zero=True
            ),
        ),
    ]
    return '<div class="charts">' + "".join(f"<div><h3>{title}</h3>{chart}</div>" for title, chart in charts) + "</div>"


def _parameters(report: Report) -> str:
    table = report.parameters
    rows = []
    for part in table.parts:
        share = part.parameters / max(table.total, 1)
        shapes = ", ".join(f"{leaf} {' × '.join(map(str, shape))}" for leaf, shape in part.shapes.items())
        rows.append(
            f'<tr><td>{escape(part.name)}<small>{escape(shapes)}</small></td><td class="n">{len(part.copies)}</td>'
            f'<td class="n">{part.parameters:,}</td><td class="n">{share:.1%}</td>'
            f'<td class="bar"><i style="width:{100 * share:.2f}%"></i></td></tr>'
        )
    tied = "".join(
        f'<p class="note">{escape(name)} is {escape(owner)}: one tensor, counted once (§3.4).</p>'
        for name, owner in table.tied.items()
    )
    return (
        "<table><thead><tr><th>part</th><th>copies</th><th>parameters</th><th>share</th><th></th></tr></thead>"
        f'<tbody>{"".join(rows)}</tbody><tfoot><tr><td>total</td><td></td><td class="n">{table.total:,}</td>'
        f'<td class="n">100.0%</td><td></td></tr></tfoot></table>{tied}'
    )


def _positions(report: Report) -> str:
    if report.positions is None:
        return '<p class="none">this family adds no table of positions to its embeddings</p>'
    length, width = report.positions.shape
    return (
        f'<p class="note">What §3.5 adds to the embeddings: sines and cosines in pairs whose waves grow longer from '
        f"dimension 0 to dimension {width - 1}, here for the first {length} positions; beside it, how alike two "
        "positions are (cosine), which depends on their distance alone.</p>"
        '<div class="charts"><div><h3>Value by position (rows) and dimension (columns)</h3>'
        '<canvas class="heat wide" data-map="positions" aria-label="positional encoding"></canvas></div>'
        "<div><h3>Likeness of positions</h3>"
        '<canvas class="heat" data-map="similarity" aria-label="likeness of positions"></canvas></div></div>'
    )


def _config(report: Report) -> str:
    facts = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(str(value))}</td></tr>" for key, value in report.tokenizer.items()
    )
    config = f"<details><summary>config.toml</summary><pre>{escape(report.config)}</pre></details>"
    return f"<table><tbody>{facts}</tbody></table>{config}"


def _data(report: Report) -> str:
    """The numbers of the heatmaps, as whole thousandths: what a colour and a tool tip need."""
    data: dict[str, Any] = {}
    if report.positions is not None:
        width = report.positions.size(1)
        stride = max(1, math.ceil(width / DIMENSIONS))
        # Whole pairs of sine and cosine, so that the picture keeps its texture.
        columns = [d for d in range(width) if (d // 2) % stride == 0]
        data["positions"] = {
            "values": _thousandths(report.positions[:, columns]),
            "columns": [f"dimension {d}" for d in columns],
            "rows": [f"position {pos}" for pos in range(report.positions.size(0))],
            "signed": True,
        }
        names = [f"position {pos}" for pos in range(report.positions.size(0))]
        data["similarity"] = {
            "values": _thousandths(similarity(report.positions)),
            "columns": names,
            "rows": names,
            "signed": True,
        }
    sentence = report.sentence
    if sentence is not None:
        source, inputs = list(sentence.source_pieces), list(sentence.input_pieces)
        target = [token.piece for token in sentence.tokens]
        if sentence.alignment.numel():
            data["alignment"] = {"values": _thousandths(sentence.alignment), "rows": target, "columns": source}
        sides = {"encoder": (source, source), "cross": (target, source), "decoder": (inputs, inputs)}
        data["labels"] = {kind: {"rows": rows, "columns": columns} for kind, (rows, columns) in sides.items()}
        data["attention"] = {f"{found.kind}-{found.layer}": _thousandths(found.weights[0]) for found in sentence.maps}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # Nothing in here can end the script element or begin another.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _thousandths(values: Tensor) -> Any:
    return (values * 1000).round().int().tolist()


def _file(name: str) -> str:
    return resources.files("dragoman.inspection").joinpath("assets", name).read_text(encoding="utf-8")
