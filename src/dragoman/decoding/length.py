"""Length penalties: what a hypothesis' log-probability is divided by, so that short ones do not win by being short.

The same word means four formulas in as many toolkits; here each has a name:

- `paper`: ((5 + n) / 6)^alpha, of Wu et al. 2016 (arXiv:1609.08144, equation 14), which §6.1 of the paper follows;
- `power`: n^alpha, as in fairseq, Hugging Face, Marian and CTranslate2;
- `average`: n, the mean log-probability of a token;
- `none`: 1.

n counts the target tokens with EOS. Every penalty is monotone in n, which is what makes `bound` one.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from dragoman.decoding.options import Penalty


@overload
def length_penalty(length: float, alpha: float, penalty: Penalty = "paper") -> float: ...
@overload
def length_penalty(length: Tensor, alpha: float, penalty: Penalty = "paper") -> Tensor: ...
def length_penalty(length: float | Tensor, alpha: float, penalty: Penalty = "paper") -> float | Tensor:
    """The divisor for a hypothesis of `length` tokens; a tensor of lengths gives a float64 tensor of its shape."""
    n = length.double() if isinstance(length, Tensor) else float(length)
    if penalty == "paper":
        return ((5.0 + n) / 6.0) ** alpha
    if penalty == "power":
        return n**alpha
    if penalty == "average":
        return n
    if penalty == "none":
        return torch.ones_like(n) if isinstance(n, Tensor) else 1.0
    raise ValueError(f"unknown penalty {penalty!r}: one of paper, none, power, average")


@overload
def score(log_prob: float, length: float, alpha: float, penalty: Penalty = "paper") -> float: ...
@overload
def score(log_prob: Tensor, length: Tensor, alpha: float, penalty: Penalty = "paper") -> Tensor: ...
def score(log_prob: float | Tensor, length: float | Tensor, alpha: float, penalty: Penalty = "paper") -> float | Tensor:
    """log_prob / penalty: what hypotheses are compared by. A hypothesis of no tokens counts as one of one."""
    if isinstance(length, Tensor):
        return log_prob / length_penalty(length.clamp(min=1), alpha, penalty)
    return log_prob / length_penalty(max(length, 1.0), alpha, penalty)


def bound(log_prob: Tensor, length: Tensor, cap: Tensor, alpha: float, penalty: Penalty = "paper") -> Tensor:
    """The best score that a running hypothesis of `length` tokens can still reach with at most `cap` tokens.

    A further token can only lower log_prob, which is negative, so the best end is the one with the largest penalty:
    the cap for alpha >= 0, the very next token for alpha < 0.
    """
    largest = torch.maximum(length_penalty(length + 1, alpha, penalty), length_penalty(cap, alpha, penalty))
    return log_prob / largest
