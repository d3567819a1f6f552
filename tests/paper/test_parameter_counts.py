"""Table 3 by the formula, and by the built model. The paper prints 65 M and 213 M: no single vocabulary gives both."""

from __future__ import annotations

import pytest
import torch

from dragoman.model.transformer import Transformer, TransformerConfig

V = 37_000

# (row, knobs, exact count with V = 37,000, the paper's figure in millions or None)
TABLE_3 = [
    ("base", {}, 63_082_496, 65),
    ("A h=1", {"n_heads": 1}, 63_082_496, None),
    ("A h=4", {"n_heads": 4}, 63_082_496, None),
    ("A h=16", {"n_heads": 16}, 63_082_496, None),
    ("A h=32", {"n_heads": 32}, 63_082_496, None),
    ("B d_k=16", {"d_k": 16}, 55_990_784, 58),
    ("B d_k=32", {"d_k": 32}, 58_354_688, 60),
    ("C N=2", {"n_layers": 2}, 33_656_832, 36),
    ("C N=4", {"n_layers": 4}, 48_369_664, 50),
    ("C N=8", {"n_layers": 8}, 77_795_328, 80),
    ("C d_model=256", {"d_model": 256}, 26_834_944, 28),
    ("C d_model=1024", {"d_model": 1024}, 163_889_152, 168),
    ("C d_ff=1024", {"d_ff": 1024}, 50_487_296, 53),
    ("C d_ff=4096", {"d_ff": 4096}, 88_272_896, 90),
    ("D dropout=0", {"dropout": 0.0}, 63_082_496, None),
    ("D dropout=0.2", {"dropout": 0.2}, 63_082_496, None),
    ("big", {"d_model": 1024, "d_ff": 4096, "n_heads": 16, "dropout": 0.3}, 214_245_376, 213),
]


def built(**knobs: object) -> Transformer:
    with torch.device("meta"):
        return Transformer(TransformerConfig(V, **knobs))  # type: ignore[arg-type]


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def by_formula(config: TransformerConfig) -> int:
    d, h = config.d_model, config.n_heads
    d_k, d_v = config.d_k or d // h, config.d_v or d // h
    attention = d * (2 * h * d_k + h * d_v) + h * d_v * d + (2 * h * d_k + h * d_v + d)
    feed_forward = 2 * d * config.d_ff + config.d_ff + d
    norm = 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return config.n_layers * (encoder_layer + decoder_layer) + config.vocab_size * d


@pytest.mark.parametrize(("row", "knobs", "exact", "printed"), TABLE_3, ids=[row[0] for row in TABLE_3])
def test_rows_of_table_3(row: str, knobs: dict[str, object], exact: int, printed: int | None) -> None:
    model = built(**knobs)
    assert count(model) == exact == by_formula(model.config)
    if printed is not None:
        assert exact / 1e6 == pytest.approx(printed, rel=0.08)


@pytest.mark.parametrize(
    ("knobs", "attention", "feed_forward", "norm", "encoder_layer", "decoder_layer"),
    [
        ({}, 1_050_624, 2_099_712, 1_024, 3_152_384, 4_204_032),
        ({"d_model": 1024, "d_ff": 4096, "n_heads": 16}, 4_198_400, 8_393_728, 2_048, 12_596_224, 16_796_672),
    ],
)
def test_parts(
    knobs: dict[str, object], attention: int, feed_forward: int, norm: int, encoder_layer: int, decoder_layer: int
) -> None:
    layer = built(**knobs).decoder.layers[0]
    assert count(layer.self_attention) == count(layer.cross_attention) == attention
    assert count(layer.feed_forward) == feed_forward
    assert count(layer.self_attention_residual.norm) == norm
    assert count(layer) == decoder_layer
    assert count(built(**knobs).encoder.layers[0]) == encoder_layer


def test_three_way_tying_saves_two_matrices_and_stands_once() -> None:
    model = built()
    assert model.generator.weight is model.embedding.weight
    assert count(model) + 2 * V * 512 == 100_970_496
    assert [name for name, _ in model.named_parameters()].count("embedding.weight") == 1


def test_the_share_of_the_feed_forward() -> None:
    model = built()
    feed_forward = count(model.encoder.layers[0].feed_forward)
    assert feed_forward / count(model.encoder.layers[0]) == pytest.approx(0.66607, abs=1e-5)
    assert feed_forward / count(model.decoder.layers[0]) == pytest.approx(0.49945, abs=1e-5)
    assert 12 * feed_forward / count(model) == pytest.approx(0.39942, abs=1e-5)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"d_model": 7, "n_heads": 7}, "d_model must be even"),
        ({"n_heads": 3}, "does not divide into 3 heads"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"pad_id": V}, "pad_id 37000 is not an entry"),
        ({"n_layers": 0}, "n_layers must be at least 1"),
    ],
)
def test_impossible_rows_are_refused(knobs: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TransformerConfig(V, **knobs)  # type: ignore[arg-type]
