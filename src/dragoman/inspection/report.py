"""All of an inspection joined: one value that can be shown as text, as JSON, or as a page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.checkpoints.store import CONFIG
from dragoman.errors import DataError
from dragoman.inspection.attention import entropy_bits
from dragoman.inspection.counts import ParameterTable, parameter_table
from dragoman.inspection.history import History, read_history
from dragoman.inspection.positions import position_table
from dragoman.inspection.sentence import Sentence, look

if TYPE_CHECKING:
    from torch import Tensor

    from dragoman.translator import Translator


@dataclass(frozen=True)
class Report:
    """What there is to know about one model folder."""

    name: str
    family: str
    """The `kind` of its model table."""
    src_lang: str
    tgt_lang: str
    parameters: ParameterTable
    tokenizer: dict[str, Any]
    """Kind, size, normalisation, special ids."""
    config: str
    """The text of config.toml."""
    history: History
    positions: Tensor | None
    """[L, D], or None where no table is added."""
    sentence: Sentence | None

    def facts(self) -> list[tuple[str, str]]:
        """What one asks first, as (question, answer)."""
        seen = self.history.facts()
        facts = [
            ("parameters", f"{self.parameters.total:,}"),
            ("family", self.family),
            ("languages", f"{self.src_lang or '?'} → {self.tgt_lang or '?'}"),
            ("vocabulary", f"{self.tokenizer['vocab_size']:,}"),
        ]
        if "steps" in seen:
            facts.append(("updates", f"{int(seen['steps']):,}"))
        if "best_dev_bleu" in seen:
            facts.append(("best dev BLEU", f"{seen['best_dev_bleu']:.2f} at {int(seen['best_dev_bleu_step']):,}"))
        if "best_dev_chrf" in seen:
            facts.append(("best dev chrF", f"{seen['best_dev_chrf']:.2f} at {int(seen['best_dev_chrf_step']):,}"))
        if "best_dev_perplexity" in seen:
            step = int(seen["best_dev_perplexity_step"])
            facts.append(("best dev perplexity", f"{seen['best_dev_perplexity']:.2f} at {step:,}"))
        if "last_loss" in seen:
            facts.append(("last training loss", f"{seen['last_loss']:.3f}"))
        return facts

    def as_text(self) -> str:
        """The summary for a person: facts, the parameter table, the tokenizer, the config."""
        facts = self.facts()
        width = max(len(name) for name, _ in facts)
        lines = [self.name, *(f"  {name:<{width}}  {value}" for name, value in facts)]
        table = self.parameters
        names = max([len(part.name) for part in table.parts] + [len("part")])
        lines += ["", f"  {'part':<{names}}  {'copies':>6}  {'parameters':>12}  {'share':>6}"]
        for part in table.parts:
            share = part.parameters / max(table.total, 1)
            lines.append(f"  {part.name:<{names}}  {len(part.copies):>6}  {part.parameters:>12,}  {share:>6.1%}")
        lines.append(f"  {'total':<{names}}  {'':>6}  {table.total:>12,}  {1:>6.1%}")
        lines += [f"  {name} is {owner}: counted once" for name, owner in table.tied.items()]
        lines += ["", "  tokenizer", *(f"    {key} = {value}" for key, value in self.tokenizer.items())]
        lines += ["", f"  {CONFIG}", *(f"    {line}".rstrip() for line in self.config.splitlines())]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The raw numbers, whole. Log-probabilities are natural logarithms; attention is [heads][T][S]."""
        table = self.parameters
        report: dict[str, Any] = {
            "name": self.name,
            "family": self.family,
            "src_lang": self.src_lang,
            "tgt_lang": self.tgt_lang,
            "parameters": {
                "total": table.total,
                "parts": [
                    {
                        "name": part.name,
                        "copies": len(part.copies),
                        "shapes": {leaf: list(shape) for leaf, shape in part.shapes.items()},
                        "parameters": part.parameters,
                        "share": part.parameters / max(table.total, 1),
                    }
                    for part in table.parts
                ],
                "tied": table.tied,
            },
            "tokenizer": self.tokenizer,
            "config": self.config,
            "training": {**self.history.facts(), "train": self.history.train, "dev": self.history.dev},
            "positions": None if self.positions is None else self.positions.tolist(),
        }
        if self.sentence is not None:
            report["sentence"] = sentence_as_dict(self.sentence)
        return report

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False) + "\n"

    def as_html(self) -> str:
        """One self-contained page."""
        from dragoman.inspection.page import render

        return render(self)


def sentence_as_dict(sentence: Sentence) -> dict[str, Any]:
    """A sentence under the lens as plain values."""
    return {
        "source": sentence.source,
        "target": sentence.target,
        "target_given": sentence.given,
        "source_tokens": list(sentence.source_pieces),
        "input_tokens": list(sentence.input_pieces),
        "target_tokens": [token.piece for token in sentence.tokens],
        "token_log_probs": [token.log_prob for token in sentence.tokens],
        "alternatives": [[list(other) for other in token.alternatives] for token in sentence.tokens],
        "log_prob": sentence.log_prob,
        "length": len(sentence.tokens),
        "attention": [
            {
                "kind": found.kind,
                "layer": found.layer,
                "entropy_bits": entropy_bits(found.weights[0]).tolist(),
                "heads": found.weights[0].tolist(),
            }
            for found in sentence.maps
        ],
        "alignment": {"weights": sentence.alignment.tolist(), "links": list(sentence.links)},
    }


def inspect_model(
    translator: Translator, folder: str | Path, text: str | None = None, target: str | None = None
) -> Report:
    """The report on a model folder and, where `text` is given, on one sentence pair.

    translator: what `load(folder)` gave, in float32. Without `target`, the model's own translation is looked at.
    """
    folder = Path(folder)
    config = translator.config
    try:
        config_text = (folder / CONFIG).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder / CONFIG} cannot be read: {error.strerror}") from None
    return Report(
        name=folder.resolve().name,
        family=str(config.model.kind),
        src_lang=config.data.src_lang,
        tgt_lang=config.data.tgt_lang,
        parameters=parameter_table(translator.model),
        tokenizer=_tokenizer_facts(translator.tokenizer),
        config=config_text,
        history=read_history(folder),
        positions=position_table(translator.model),
        sentence=None if text is None else look(translator, text, target),
    )


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": tokenizer.kind,
        "vocab_size": len(tokenizer),
        "normalization": tokenizer.normalization,
    }
    if hasattr(tokenizer, "byte_fallback"):
        facts["byte_fallback"] = bool(tokenizer.byte_fallback)
    return facts | {name: getattr(tokenizer, name) for name in ("pad_id", "unk_id", "bos_id", "eos_id")}
