"""Other engines on exported folders, behind one small contract, so that `compare` treats all alike."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dragoman.decoding.options import DecodingConfig
from dragoman.tokens.tokenizer import Tokenizer, load_tokenizer

BATCH = 32
"""Sentences searched at once by the engines that are told so."""

PATIENCE = 2.0
"""CTranslate2 stops at beam size * patience ended hypotheses: at 2 it looks about as far as our stopping rule does, and
its answers can be held against ours. Its own default, 1, is faster."""


class Engine(Protocol):
    """An engine with a model in it."""

    version: str

    def translate(self, texts: Sequence[str], options: DecodingConfig) -> list[str]:
        """One text for each text, by the engine's own search as near to `options` as it can."""

    def greedy_logits(self, source: Sequence[int], max_length: int) -> tuple[list[int], Tensor]:
        """Ids without EOS -> the greedy ids, and the logits [T, V] that each was chosen by."""


def exponent(options: DecodingConfig) -> float:
    """The length penalty as engines know it, which divide by length ** exponent."""
    return {"paper": options.alpha, "power": options.alpha, "average": 1.0, "none": 0.0}[options.penalty]


class HuggingFace:
    """transformers, on the folder that `export --to huggingface` writes."""

    def __init__(self, folder: Path, threads: int, tokenizer: Tokenizer) -> None:
        transformers: Any = importlib.import_module("transformers")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        transformers.utils.logging.disable_progress_bar()
        self.version = f"transformers {transformers.__version__}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends a package that it does not use for this
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()
        self.eos_id = tokenizer.eos_id

    def translate(self, texts: Sequence[str], options: DecodingConfig) -> list[str]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        results = [""] * len(texts)
        search: dict[str, Any] = {"num_beams": 1}
        if not options.greedy:
            search = {"num_beams": options.beam_size, "length_penalty": exponent(options), "early_stopping": False}
        for start in range(0, len(order), BATCH):
            chunk = order[start : start + BATCH]
            batch = self.tokenizer([texts[i] for i in chunk], return_tensors="pt", padding=True)
            caps = batch["attention_mask"].sum(1) + options.max_extra
            with torch.inference_mode():
                found = self.model.generate(**batch, **search, max_new_tokens=int(caps.max()), max_length=None)
            # One limit holds for a batch there, and one for each line here; the first token is the start.
            ids = [row[: 1 + cap].tolist() for row, cap in zip(found, caps.tolist(), strict=True)]
            for i, text in zip(chunk, self.tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
                results[i] = text
        return results

    def greedy_logits(self, source: Sequence[int], max_length: int) -> tuple[list[int], Tensor]:
        src = torch.tensor([[*source, self.eos_id]])
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=src,
                attention_mask=torch.ones_like(src),
                num_beams=1,
                max_new_tokens=max_length,
                max_length=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return found.sequences[0, 1:].tolist(), torch.cat(found.logits).float()


class CTranslate2:
    """CTranslate2, on the folder that `export --to ctranslate2` writes."""

    def __init__(self, folder: Path, threads: int, tokenizer: Tokenizer) -> None:
        import ctranslate2

        self.version = f"ctranslate2 {ctranslate2.__version__}"
        self.translator = ctranslate2.Translator(
            str(folder), device="cpu", intra_threads=threads, inter_threads=1, compute_type="default"
        )
        self.tokenizer = load_tokenizer(folder)

    def translate(self, texts: Sequence[str], options: DecodingConfig) -> list[str]:
        sources = self.tokenizer.encode_batch(texts)
        caps = [len(ids) + 1 + options.max_extra for ids in sources]
        found = self.translator.translate_batch(
            [self._pieces(ids) for ids in sources],
            beam_size=1 if options.greedy else options.beam_size,
            length_penalty=exponent(options),
            patience=PATIENCE,
            max_batch_size=BATCH,
            min_decoding_length=0,
            max_input_length=0,
            max_decoding_length=max(caps),
        )
        # One limit holds for a call there, and one for each line here.
        outputs = [self._ids(result.hypotheses[0])[:cap] for result, cap in zip(found, caps, strict=True)]
        return [self.tokenizer.decode(ids) for ids in outputs]

    def greedy_logits(self, source: Sequence[int], max_length: int) -> tuple[list[int], Tensor]:
        import numpy as np

        (found,) = self.translator.translate_batch(
            [self._pieces(source)],
            beam_size=1,
            min_decoding_length=0,
            max_decoding_length=max_length,
            return_logits_vocab=True,
            return_end_token=True,
        )
        ids = self._ids(found.hypotheses[0])
        rows = [torch.from_numpy(np.array(row, dtype=np.float32)) for row in found.logits[0][: len(ids)]]
        return ids, torch.stack(rows)

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.id_to_piece(index) for index in ids]

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [self.tokenizer.piece_to_id(piece) for piece in pieces]


class Onnx:
    """ONNX Runtime with our runner, on the folder that `export --to onnx` writes."""

    def __init__(self, folder: Path, threads: int, tokenizer: Tokenizer) -> None:
        import onnxruntime

        from dragoman.exchange.onnx_runner import OnnxTranslator

        self.version = f"onnxruntime {onnxruntime.__version__}"
        self.translator = OnnxTranslator(folder, threads)

    def translate(self, texts: Sequence[str], options: DecodingConfig) -> list[str]:
        return self.translator.translate(
            texts,
            batch_size=BATCH,
            beam_size=1 if options.greedy else options.beam_size,
            alpha=options.alpha,
            penalty=options.penalty,
            max_extra=options.max_extra,
        )

    def greedy_logits(self, source: Sequence[int], max_length: int) -> tuple[list[int], Tensor]:
        (found,) = self.translator.search([source], beam_size=1, max_extra=max(0, max_length - len(source) - 1))
        return found.ids, torch.from_numpy(self.translator.logits(source, found.ids[:-1]))


ENGINES: dict[str, Callable[[Path, int, Tokenizer], Engine]] = {
    "huggingface": HuggingFace,
    "ctranslate2": CTranslate2,
    "onnx": Onnx,
}
