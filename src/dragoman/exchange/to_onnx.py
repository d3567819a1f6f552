"""`export --to onnx`: the model in two graphs, as decoding uses it, for ONNX Runtime or any other engine of the format.

encoder.onnx   input_ids [B, S], attention_mask [B, S]  ->  memory_k.i, memory_v.i [B, H, S, K] of each decoder layer i
decoder.onnx   token [B], attention_mask [B, S], past_k.i, past_v.i [B, H, T, K], memory_k.i, memory_v.i
               ->  logits [B, V], present_k.i, present_v.i [B, H, T + 1, K]

B, S and T are free, T from 0: the first step has no past. The graphs are those of `start` and `step`, so whatever the
family computes there is what is exported; `onnx_runner.py` searches on them.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.errors import ModelError
from dragoman.exchange.card import card
from dragoman.exchange.layout import Export
from dragoman.model.choices import EncoderDecoderSpec, PaperSpec
from dragoman.model.transformer import DecoderState, LayerState

FORMAT_VERSION = 1
ENCODER, DECODER, CONFIG = "encoder.onnx", "decoder.onnx", "config.json"


class FixedPositions(nn.Module):
    """The model's own position table, long enough and without the growing, which a graph cannot express."""

    table: Tensor

    def __init__(self, position: nn.Module, length: int, d_model: int) -> None:
        super().__init__()
        with torch.no_grad():
            self.register_buffer("table", position(torch.zeros(1, length, d_model))[0].clone())  # [length, D]

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, T, D] at positions start ... start + T - 1 -> [B, T, D]."""
        return x + self.table[torch.arange(start, start + x.size(1), device=x.device)]


class EncoderHalf(nn.Module):
    """`start`: the source to the keys and values that every decoder layer looks at."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """[B, S] twice -> memory_k.0, memory_v.0, memory_k.1, ..."""
        state = self.model.start(input_ids, attention_mask)
        return tuple(tensor for layer in state.layers for tensor in (layer.memory_k, layer.memory_v))


class DecoderHalf(nn.Module):
    """`step`: one token of each row, with its past, to the logits of the next."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token: Tensor, attention_mask: Tensor, past: list[Tensor], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """token [B]; past and memory hold k and v of every layer in turn -> logits, present_k.0, present_v.0, ..."""
        layers = tuple(LayerState(past[i], past[i + 1], memory[i], memory[i + 1]) for i in range(0, len(past), 2))
        state = DecoderState(layers, attention_mask[:, None, None], past[0].size(2))
        logits, state = self.model.step(token, state)
        return (logits, *(tensor for layer in state.layers for tensor in (layer.k, layer.v)))


def write(export: Export, out: Path) -> None:
    """Fill the folder `out`."""
    spec = export.loaded.config.model
    if export.precision not in ("float32", "int8"):
        raise ModelError(f"an onnx export is float32 or int8, not {export.precision}")
    if not isinstance(spec, PaperSpec | EncoderDecoderSpec):
        raise ModelError(f"a model of kind {spec.kind!r} cannot be exported to onnx")
    model = copy.deepcopy(export.loaded.model).float().cpu().eval()
    model.position = FixedPositions(model.position, export.max_positions, spec.d_model)
    n_layers = len(model.decoder.layers)
    heads = model.decoder.layers[0].self_attention
    n_heads, d_k, d_v = heads.n_heads, heads.d_k, heads.d_v

    names = [f"{part}.{layer}" for layer in range(n_layers) for part in ("k", "v")]
    widths = [d_k, d_v] * n_layers
    source = torch.ones(2, 5, dtype=torch.long)
    mask = torch.ones(2, 5, dtype=torch.bool)
    past = [torch.zeros(2, n_heads, 3, width) for width in widths]
    memory = [torch.zeros(2, n_heads, 5, width) for width in widths]
    b, s, t = (torch.export.Dim(name) for name in ("batch", "source", "past"))
    _graph(
        EncoderHalf(model),
        (source, mask),
        out / ENCODER,
        ["input_ids", "attention_mask"],
        [f"memory_{name}" for name in names],
        {"input_ids": {0: b, 1: s}, "attention_mask": {0: b, 1: s}},
    )
    _graph(
        DecoderHalf(model),
        (torch.ones(2, dtype=torch.long), mask, past, memory),
        out / DECODER,
        ["token", "attention_mask", *(f"past_{name}" for name in names), *(f"memory_{name}" for name in names)],
        ["logits", *(f"present_{name}" for name in names)],
        {
            "token": {0: b},
            "attention_mask": {0: b, 1: s},
            "past": [{0: b, 2: t}] * len(names),
            "memory": [{0: b, 2: s}] * len(names),
        },
    )
    if export.precision == "int8":
        for name in (ENCODER, DECODER):
            _quantize(out / name)
    export.loaded.tokenizer.save(out)
    config = _config(export, {"n_layers": n_layers, "n_heads": n_heads, "d_k": d_k, "d_v": d_v})
    (out / CONFIG).write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card(export, _USAGE, _SEARCH, "onnx"), encoding="utf-8")


_USAGE = """```python
from dragoman.exchange.onnx_runner import OnnxTranslator

translator = OnnxTranslator(".")  # this folder; needs onnxruntime, and neither torch nor a network
print(translator.translate(["…"]))
```

The inputs and outputs of both graphs are told in config.json; another engine needs no more than that."""

_SEARCH = "The runner searches by dragoman's own rules: the same length penalty, the same stopping rule, the same cap."


def _graph(
    module: nn.Module,
    example: tuple[Any, ...],
    path: Path,
    inputs: list[str],
    outputs: list[str],
    shapes: dict[str, Any],
) -> None:
    """Trace a module into one file."""
    loud = logging.getLogger("torch.onnx")
    before = loud.level
    loud.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                example,
                str(path),
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=shapes,
                dynamo=True,
                external_data=False,
                optimize=True,
                verbose=False,
            )
    finally:
        loud.setLevel(before)


def _quantize(path: Path) -> None:
    """Weights of matrix products to int8; activations follow while it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = path.with_suffix(".float32.onnx")
    path.rename(whole)
    quantize_dynamic(whole, path, weight_type=QuantType.QInt8, per_channel=True)
    whole.unlink()


def _config(export: Export, shape: dict[str, int]) -> dict[str, Any]:
    """What a runner must know."""
    tokenizer, config = export.loaded.tokenizer, export.loaded.config
    decoding = config.decoding
    return {
        "format_version": FORMAT_VERSION,
        "kind": "dragoman-onnx",
        "precision": export.precision,
        "src_lang": config.data.src_lang,
        "tgt_lang": config.data.tgt_lang,
        "vocab_size": len(tokenizer),
        "pad_id": tokenizer.pad_id,
        "unk_id": tokenizer.unk_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "banned_ids": list(tokenizer.banned_ids),
        **shape,
        "max_source": export.max_source,
        "max_positions": export.max_positions,
        "decoding": {
            "beam_size": 1 if decoding.greedy else decoding.beam_size,
            "alpha": decoding.alpha,
            "penalty": decoding.penalty,
            "max_extra": decoding.max_extra,
        },
    }
