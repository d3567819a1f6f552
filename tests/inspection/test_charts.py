"""Curves as SVG: every point inside the frame, axes with round numbers, long curves thinned."""

from __future__ import annotations

import re

import pytest

from dragoman.inspection.charts import (
    HEIGHT,
    WIDTH,
    Series,
    display_width,
    line_chart,
    links_picture,
    number,
    thinned,
    ticks,
)


def test_points_stay_in_the_frame() -> None:
    svg = line_chart([Series("loss", [1, 2, 3], [5.0, -1.0, 2.0])], "update", "loss")
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r'points="([^"]+)"', svg)[0].split()]
    assert len(points) == 3
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert points[0][1] < points[2][1] < points[1][1]  # larger is higher


@pytest.mark.parametrize("values", [[0.0], [7.0, 7.0], [1e-9, 2e-9], [-3.0, -3.0], [1e6, 3e6]])
def test_flat_tiny_and_large_curves_have_a_frame(values: list[float]) -> None:
    svg = line_chart([Series("x", list(range(len(values))), values)], "update", "y", from_zero=True)
    assert "nan" not in svg
    assert "<polyline" in svg


def test_nothing_recorded_is_said() -> None:
    assert "nothing recorded" in line_chart([Series("x", [], [])], "a", "b")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0007), (3.2, 9.7), (-5, 5), (0, 12_345), (4, 4), (0, 0)])
def test_ticks_enclose_and_are_few(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high - 1e-12
    assert 2 <= len(marks) <= 8


def test_numbers_on_axes() -> None:
    assert [number(value) for value in (0, 12_000, 0.35, 7e-4, 2.5e-4, 1e-10, -2)] == [
        "0",
        "12,000",
        "0.35",
        "7e-4",
        "2.5e-4",
        "1e-10",
        "-2",
    ]


def test_a_long_curve_is_thinned_to_means() -> None:
    curve = thinned(Series("x", list(range(10_000)), [float(i % 2) for i in range(10_000)]))
    assert len(curve.xs) == 400
    assert curve.xs[-1] == 9999
    assert curve.ys == pytest.approx([0.5] * 400, abs=0.03)


def test_links_join_and_escape() -> None:
    svg = links_picture(["<b>", "cat"], ["katze", "&"], [1, None])
    assert svg.count('class="link"') == 1
    assert "katze looks at cat" in svg
    assert "&lt;b&gt;" in svg
    assert "<b>" not in svg


def test_ideographs_are_two_wide() -> None:
    assert (display_width("abc"), display_width("▁a"), display_width("猫，")) == (3, 2, 4)
