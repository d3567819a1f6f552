"""The paper's equations as plain loops in float64, importing nothing of ours but the weights."""

from __future__ import annotations

import math

import numpy as np
import torch

from dragoman.model.transformer import Transformer, TransformerConfig

Weights = dict[str, np.ndarray]


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def multi_head(x: np.ndarray, y: np.ndarray, w: Weights, name: str, heads: int, causal: bool) -> np.ndarray:
    q, k, v = linear(x, w, f"{name}.q"), linear(y, w, f"{name}.k"), linear(y, w, f"{name}.v")
    d_k, d_v = q.shape[1] // heads, v.shape[1] // heads
    out = np.zeros((len(x), heads * d_v))
    for h in range(heads):
        for i in range(len(x)):
            seen = i + 1 if causal else len(y)
            scores = [
                q[i, h * d_k : (h + 1) * d_k] @ k[j, h * d_k : (h + 1) * d_k] / math.sqrt(d_k) for j in range(seen)
            ]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= weights.sum()
            for j in range(seen):
                out[i, h * d_v : (h + 1) * d_v] += weights[j] * v[j, h * d_v : (h + 1) * d_v]
    return linear(out, w, f"{name}.o")


def feed_forward(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return linear(np.maximum(0, linear(x, w, f"{name}.inner")), w, f"{name}.outer")


def embed(tokens: list[int], w: Weights) -> np.ndarray:
    matrix = w["embedding.weight"]
    d = matrix.shape[1]
    out = np.zeros((len(tokens), d))
    for pos, token in enumerate(tokens):
        for i in range(d // 2):
            angle = pos / 10_000 ** (2 * i / d)
            out[pos, 2 * i] = matrix[token, 2 * i] * math.sqrt(d) + math.sin(angle)
            out[pos, 2 * i + 1] = matrix[token, 2 * i + 1] * math.sqrt(d) + math.cos(angle)
    return out


def the_paper(src: list[int], tgt_in: list[int], w: Weights, layers: int, heads: int) -> np.ndarray:
    x = embed(src, w)
    for n in range(layers):
        p = f"encoder.layers.{n}"
        x = layer_norm(
            x + multi_head(x, x, w, f"{p}.self_attention", heads, False), w, f"{p}.self_attention_residual.norm"
        )
        x = layer_norm(x + feed_forward(x, w, f"{p}.feed_forward"), w, f"{p}.feed_forward_residual.norm")
    y = embed(tgt_in, w)
    for n in range(layers):
        p = f"decoder.layers.{n}"
        y = layer_norm(
            y + multi_head(y, y, w, f"{p}.self_attention", heads, True), w, f"{p}.self_attention_residual.norm"
        )
        y = layer_norm(
            y + multi_head(y, x, w, f"{p}.cross_attention", heads, False), w, f"{p}.cross_attention_residual.norm"
        )
        y = layer_norm(y + feed_forward(y, w, f"{p}.feed_forward"), w, f"{p}.feed_forward_residual.norm")
    return y @ w["embedding.weight"].T


def test_the_model_is_the_papers_equations() -> None:
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(13, 2, 12, 20, 3, d_k=5, d_v=7)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.position.table = model.position.table.double()
    src, tgt_in = [4, 9, 7, 5, 3], [2, 8, 11, 6, 12, 5, 4]
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    expected = the_paper(src, tgt_in, weights, layers=2, heads=3)
    logits = model(torch.tensor([src]), torch.tensor([tgt_in]))[0].detach().numpy()
    assert np.abs(logits - expected).max() < 1e-6
