"""What must come through a translation: found in the line, and missed where it is not there."""

from __future__ import annotations

from dragoman.text.keep import cut, is_lost


def test_what_stands_only_inside_something_longer_is_lost() -> None:
    parts = cut("Pay $1 at gate $10 now", [r"\$\d+"])
    assert parts == ["Pay ", "$1", " at gate ", "$10", " now"]
    assert is_lost(parts, "Zahlen Sie $10 am Tor")
    assert is_lost(parts, "Zahlen Sie $1 am Tor $1")
    assert not is_lost(parts, "Am Tor $10 zahlen Sie $1")
    assert not is_lost(parts, "Zahlen Sie $1 am Tor $10, ja $10")


def test_every_occurrence_counts() -> None:
    parts = cut("<b>a</b> <b>c</b>", ["</?b>"])
    assert not is_lost(parts, "<b>x</b><b>y</b>")
    assert is_lost(parts, "<b>x y</b>")
    assert not is_lost(cut("nothing", ["x"]), "")
