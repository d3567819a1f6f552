"""The parameter table: every parameter once, ties named."""

from __future__ import annotations

import pytest
import torch

from dragoman.inspection.counts import parameter_table, split_name
from dragoman.model.transformer import Transformer, TransformerConfig


def test_the_base_model_is_63_million_and_each_part_is_counted() -> None:
    with torch.device("meta"):
        table = parameter_table(Transformer(TransformerConfig(37_000)))
    assert table.total == 63_082_496
    parts = {part.name: part for part in table.parts}
    assert parts["embedding"].parameters == 37_000 * 512
    attention = parts["decoder.layers.*.cross_attention"]
    assert attention.parameters == 6 * 4 * (512 * 512 + 512)
    assert attention.copies == set("012345")
    assert attention.shapes["q.weight"] == (512, 512)
    assert parts["encoder.layers.*.feed_forward"].parameters == 6 * (2 * 512 * 2048 + 2048 + 512)
    assert table.tied == {"generator.weight": "embedding.weight"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layers.3.self_attention.q.weight", ("encoder.layers.*.self_attention", "3", "q.weight")),
        ("embedding.weight", ("embedding", "", "weight")),
        ("scale", ("scale", "", "scale")),
        ("encoder.norm.bias", ("encoder.norm", "", "bias")),
        ("layers.0.experts.1.inner.weight", ("layers.*.experts", "0", "1.inner.weight")),
    ],
)
def test_names_fall_into_part_layer_and_leaf(name: str, expected: tuple[str, str, str]) -> None:
    assert split_name(name) == expected


def test_any_module_can_be_counted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2, bias=False))
    table = parameter_table(model)
    assert table.total == 3 * 5 + 5 + 10 == sum(part.parameters for part in table.parts)
