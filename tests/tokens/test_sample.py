"""A seeded sample of a stream."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dragoman.tokens.sample import sample


@given(n=st.integers(0, 200), size=st.integers(1, 50), seed=st.integers(0, 2**40))
def test_so_many_in_order_and_each_once(n: int, size: int, seed: int) -> None:
    texts = [f"{number:03d}" for number in range(n)]
    chosen, total = sample(iter(texts), size, seed)
    assert total == n
    assert len(chosen) == min(n, size)
    assert chosen == sorted(set(chosen))
    assert sample(iter(texts), size, seed) == (chosen, total)


def test_each_line_is_as_likely_as_any_other() -> None:
    texts = [str(number) for number in range(40)]
    seen = Counter(text for seed in range(4000) for text in sample(texts, 10, seed)[0])
    # Each stands in a quarter of 4,000 samples: 1,000, with a standard deviation of 27.
    assert all(850 < seen[text] < 1150 for text in texts)
    first, second = sum(seen[text] for text in texts[:20]), sum(seen[text] for text in texts[20:])
    assert abs(first - second) < 1000
