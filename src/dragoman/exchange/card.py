"""The model card of an export: data, tokenizer, normalisation, metrics and command, as far as the folder knows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dragoman import __version__
from dragoman.checkpoints.store import METRICS
from dragoman.exchange.layout import Export
from dragoman.tokens.marian import MarianTokenizer

_LOST = (
    "control characters (category Cc) but TAB are dropped, `▁` is read as a space, runs of spaces become one and those "
    "at the ends go"
)


def card(export: Export, usage: str, search: str, library: str) -> str:
    """README.md of an exported folder. `usage`: code that runs it; `search`: how its search differs from ours."""
    config = export.loaded.config
    data = config.data
    languages = [code for code in (data.src_lang, data.tgt_lang) if code]
    front = [f"library_name: {library}", "pipeline_tag: translation", "tags: [translation, dragoman]"]
    if languages:
        front.append(f"language: {json.dumps(languages)}")
    parameters = sum(parameter.numel() for parameter in export.loaded.model.parameters())
    name = export.source.resolve().name
    pair = f"{data.src_lang or '?'} → {data.tgt_lang or '?'}"
    sections = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {name}\n\nMachine translation, {pair}; a Transformer of {parameters:,} parameters "
        f"(`{config.model.kind}`), exported by dragoman {__version__} in {export.precision}.",
        f"## Use\n\n{usage}\n\n{search}",
        f"## Data\n\n{_data(config)}",
        f"## Tokenizer\n\n{_tokenizer(export)}",
        f"## Metrics\n\n{_metrics(export.source / METRICS)}",
        f"## Command\n\n```\n{export.command}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _data(config: Any) -> str:
    try:
        corpora = config.data.train_corpora
    except Exception:  # an imported model does not know its corpora
        return "Not recorded in this model."
    names = [Path(path).name for corpus in corpora for path in (corpus.tsv, corpus.src, corpus.tgt) if path]
    return f"Trained on {', '.join(names)}; at most {config.data.max_length} tokens a side."


def _tokenizer(export: Export) -> str:
    tokenizer = export.loaded.tokenizer
    special = f"pad {tokenizer.pad_id}, unk {tokenizer.unk_id}, start {tokenizer.bos_id}, end {tokenizer.eos_id}"
    if isinstance(tokenizer, MarianTokenizer):
        return (
            f"Two SentencePiece models over one vocabulary of {len(tokenizer):,} ({special}); they bring their own "
            f"normalisation. Before it, {_LOST}."
        )
    return (
        f"One SentencePiece model for both sides, {len(tokenizer):,} pieces ({special}). "
        f"Normalisation: {tokenizer.normalization}; {_LOST}."
    )


def _metrics(path: Path) -> str:
    """The last validation that training wrote down."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError):
        lines = []
    dev = [line for line in lines if isinstance(line, dict) and line.get("kind") == "dev"]
    if not dev:
        return "None recorded with this model; `dragoman evaluate` measures it."
    last = dev[-1]
    numbers = [f"{key} {last[key]:.4g}" for key in ("bleu", "chrf", "perplexity", "loss") if last.get(key) is not None]
    return f"On the development set at step {last.get('step')}: {', '.join(numbers)}."
