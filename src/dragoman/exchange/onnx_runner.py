"""Translating with an exported ONNX folder: ONNX Runtime, NumPy and the tokenizer, without PyTorch.

A reference to read and to copy: beam search by the rules of `decoding/beam.py` (2N candidates a step, the same length
penalties, the same end), one plain loop over sentences.
Letters: R rows (running hypotheses of all sentences of a batch), V vocabulary, N beam size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dragoman.errors import DataError, ModelError
from dragoman.text.normalise import is_blank
from dragoman.tokens.tokenizer import load_tokenizer

FORMAT_VERSION = 1
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Found:
    """One translation in tokens."""

    ids: list[int]
    """With EOS at the end when `finished`."""
    score: float
    """log_prob divided by the length penalty."""
    log_prob: float
    finished: bool


class OnnxTranslator:
    """An exported folder, ready to translate."""

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        """`threads` 0: as many as ONNX Runtime thinks fit. Raises ModelError for a folder that is no such export."""
        folder = Path(folder)
        self.config = _read_config(folder / "config.json")
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise ModelError("this needs onnxruntime, which is not installed: pip install 'dragoman[export]'") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        missing = [name for name in ("encoder.onnx", "decoder.onnx") if not (folder / name).exists()]
        if missing:
            raise ModelError([f"{folder / name} is missing: not all of the export was copied" for name in missing])
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
            for name in ("encoder.onnx", "decoder.onnx")
        )
        self.tokenizer = load_tokenizer(folder)
        parts = [f"{part}.{layer}" for layer in range(self.config["n_layers"]) for part in ("k", "v")]
        self.memory_names = [f"memory_{part}" for part in parts]
        self.past_names = [f"past_{part}" for part in parts]
        self.banned = np.array(self.config["banned_ids"], dtype=np.int64)

    def translate(self, texts: Sequence[str], batch_size: int = 32, **options: Any) -> list[str]:
        """One text for each text, in order; a blank line stays blank. Options are those of `search`.

        Raises DataError for texts that are longer than the model takes.
        """
        limit = self.config["max_source"]
        sources = self.tokenizer.encode_batch(texts)
        too_long = [
            f"line {number} has {len(ids) + 1} tokens, and this model takes {limit}: split it first"
            for number, ids in enumerate(sources, 1)
            if len(ids) + 1 > limit
        ]
        if too_long:
            raise DataError(too_long)
        results = [""] * len(texts)
        # Lines of like length share a batch, so that little of it is padding.
        waiting = sorted((i for i, text in enumerate(texts) if not is_blank(text)), key=lambda i: len(sources[i]))
        for start in range(0, len(waiting), batch_size):
            chunk = waiting[start : start + batch_size]
            for i, found in zip(chunk, self.search([sources[i] for i in chunk], **options), strict=True):
                results[i] = self.tokenizer.decode(found.ids)
        return results

    def search(
        self,
        sources: Sequence[Sequence[int]],
        beam_size: int | None = None,
        alpha: float | None = None,
        penalty: str | None = None,
        max_extra: int | None = None,
    ) -> list[Found]:
        """The best hypothesis of each source (ids without EOS); what is not given is the export's default."""
        given = {"beam_size": beam_size, "alpha": alpha, "penalty": penalty, "max_extra": max_extra}
        chosen = {**self.config["decoding"], **{key: value for key, value in given.items() if value is not None}}
        sentences = [
            _Sentence(len(ids) + 1 + chosen["max_extra"], chosen["beam_size"], chosen["alpha"], chosen["penalty"])
            for ids in sources
        ]
        mask, memory = self._encode(sources)
        owners = np.arange(len(sources))  # [R] the sentence of each row
        tokens = np.full(len(sources), self.config["bos_id"], dtype=np.int64)  # [R]
        past = self._no_past(len(sources))
        while len(owners):
            logits, past = self._step(tokens, mask[owners], past, [m[owners] for m in memory])
            log_probs = self._log_probs(logits)  # [R, V]
            rows: list[int] = []
            new_tokens: list[int] = []
            for b in dict.fromkeys(owners.tolist()):
                for parent, token in sentences[b].extend(np.flatnonzero(owners == b), log_probs, self.config["eos_id"]):
                    rows.append(parent)
                    new_tokens.append(token)
            owners = owners[rows]
            tokens = np.array(new_tokens, dtype=np.int64)
            past = [array[rows] for array in past]
        return [sentence.pool[0] for sentence in sentences]

    def logits(self, source: Sequence[int], target: Sequence[int]) -> Array:
        """Teacher forcing through the cached decoder: logits [T + 1, V] for the ids `target` and what follows them."""
        mask, memory = self._encode([source])
        past = self._no_past(1)
        rows = []
        for token in (self.config["bos_id"], *target):
            logits, past = self._step(np.array([token], dtype=np.int64), mask, past, memory)
            rows.append(logits[0])
        return np.stack(rows)

    def _encode(self, sources: Sequence[Sequence[int]]) -> tuple[Array, list[Array]]:
        """Ids without EOS -> mask [B, S] and memory_k.0, memory_v.0, ..."""
        longest = max(map(len, sources)) + 1
        ids = np.full((len(sources), longest), self.config["pad_id"], dtype=np.int64)
        mask = np.zeros((len(sources), longest), dtype=bool)
        for b, source in enumerate(sources):
            ids[b, : len(source) + 1] = [*source, self.config["eos_id"]]
            mask[b, : len(source) + 1] = True
        return mask, list(self.encoder.run(self.memory_names, {"input_ids": ids, "attention_mask": mask}))

    def _no_past(self, rows: int) -> list[Array]:
        """Keys and values before the first step: none, [R, H, 0, K]."""
        config = self.config
        widths = [config["d_k"], config["d_v"]] * config["n_layers"]
        return [np.zeros((rows, config["n_heads"], 0, width), dtype=np.float32) for width in widths]

    def _step(self, tokens: Array, mask: Array, past: list[Array], memory: list[Array]) -> tuple[Array, list[Array]]:
        """tokens [R] -> logits [R, V] of the next, and the grown past."""
        feeds = {"token": tokens, "attention_mask": mask}
        feeds |= dict(zip(self.past_names, past, strict=True)) | dict(zip(self.memory_names, memory, strict=True))
        logits, *present = self.decoder.run(None, feeds)
        return logits, present

    def _log_probs(self, logits: Array) -> Array:
        """Over the whole vocabulary; then what is banned is left out of the choice."""
        wide = logits.astype(np.float64)
        peak = wide.max(axis=1, keepdims=True)
        result: Array = wide - peak - np.log(np.exp(wide - peak).sum(axis=1, keepdims=True))
        result[:, self.banned] = -np.inf
        return result


class _Sentence:
    """The running and the finished hypotheses of one sentence."""

    def __init__(self, cap: int, beam_size: int, alpha: float, penalty: str) -> None:
        self.cap, self.beam_size, self.alpha, self.penalty = cap, beam_size, alpha, penalty
        self.running: list[tuple[float, list[int]]] = [(0.0, [])]
        self.pool: list[Found] = []

    def extend(self, rows: Array, log_probs: Array, eos_id: int) -> list[tuple[int, int]]:
        """One step: (row, next token) of each hypothesis that runs on; none when the sentence is done."""
        width = 2 * self.beam_size if self.beam_size > 1 else 1
        candidates = []
        for (log_prob, ids), row in zip(self.running, rows, strict=True):
            best = np.argsort(-log_probs[row], kind="stable")[:width]
            candidates += [(log_prob + log_probs[row, token], int(row), ids, int(token)) for token in best]
        candidates = [c for c in sorted(candidates, key=lambda c: -c[0])[:width] if c[0] > -np.inf]
        length = len(self.running[0][1]) + 1
        going = []
        for log_prob, row, ids, token in candidates:
            ended = token == eos_id
            if ended or length >= self.cap:
                score = log_prob / self._divisor(length)
                self.pool.append(Found([*ids, token], score, float(log_prob), ended))
            if not ended:
                going.append((log_prob, row, ids, token))
        self.pool = sorted(self.pool, key=lambda found: -found.score)[: self.beam_size]
        going = going[: self.beam_size] if length < self.cap else []
        if going and len(self.pool) == self.beam_size:
            reach = going[0][0] / max(self._divisor(length + 1), self._divisor(self.cap))
            going = [] if reach <= self.pool[-1].score else going
        self.running = [(log_prob, [*ids, token]) for log_prob, _, ids, token in going]
        return [(row, token) for _, row, _, token in going]

    def _divisor(self, n: int) -> float:
        """The length penalties of `decoding/length.py`."""
        alpha = self.alpha
        divisors: dict[str, float] = {"paper": ((5 + n) / 6) ** alpha, "power": n**alpha, "average": n, "none": 1}
        return divisors[self.penalty]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: this is not an exported ONNX folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("kind") != "dragoman-onnx":
        raise ModelError(f"{path} is not that of an ONNX export of dragoman")
    if not isinstance(config.get("format_version"), int) or config["format_version"] > FORMAT_VERSION:
        raise ModelError(
            f"{path} has format_version {config.get('format_version')!r}, and this dragoman reads up to "
            f"{FORMAT_VERSION}: a newer version wrote it"
        )
    return config
