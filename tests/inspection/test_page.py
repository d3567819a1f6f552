"""The page: well-formed, whole, self-contained, and safe against what users type."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dragoman.inspection.report import Report, inspect_model

VOID = {"meta", "br", "img", "link", "hr", "input"}
# Attributes by which a page fetches something.
LOADING = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "object": "data",
    "source": "src",
    "use": "href",
}


class Page(HTMLParser):
    """Reads a page, checks that its tags nest, and keeps what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        if self.open:
            self.faults.append(f"never closed: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, text: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(text)

    def attributes(self, tag: str, kind: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and kind in (attrs.get("class") or "").split()]


@pytest.fixture
def report(translator: Any, folder: Path) -> Report:
    return inspect_model(translator, folder, "the cat <b> & sees", "die 猫 <b> sieht")


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_tags_nest(report: Report) -> None:
    assert Page(report.as_html()).faults == []


def test_every_head_of_every_layer_has_its_picture_and_its_numbers(report: Report) -> None:
    html = report.as_html()
    heads = {
        (attrs["data-kind"], attrs["data-layer"], attrs["data-head"])
        for attrs in Page(html).attributes("figure", "head")
    }
    assert heads == {
        (kind, str(layer), str(head))
        for kind in ("encoder", "cross", "decoder")
        for layer in range(2)
        for head in range(3)
    }
    data = data_of(html)
    sizes = {"encoder": (6, 6), "cross": (5, 6), "decoder": (5, 5)}
    for kind, layer, head in heads:
        rows = data["attention"][f"{kind}-{layer}"][int(head or 0)]
        assert (len(rows), len(rows[0])) == sizes[str(kind)]
        assert all(abs(sum(row) - 1000) <= 3 for row in rows)
        labels = data["labels"][kind]
        assert (len(labels["rows"]), len(labels["columns"])) == sizes[str(kind)]
    assert data["labels"]["cross"]["rows"] == ["die", "猫", "<b>", "sieht", "</s>"]
    assert data["labels"]["decoder"]["rows"][0] == "<s>"
    assert len(data["alignment"]["values"]) == 5


def test_nothing_is_loaded_from_anywhere(report: Report) -> None:
    html = report.as_html()
    for tag, attrs in Page(html).tags:
        assert LOADING.get(tag, "-") not in attrs
        for name, value in attrs.items():
            if name in ("href", "src", "xlink:href", "action"):
                assert (value or "").startswith("#")
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_what_users_type_is_text(translator: Any, folder: Path) -> None:
    evil = "<script>alert(1)</script> \"'&amp; </script><!-- 猫"
    html = inspect_model(translator, folder, evil, f"die {evil}").as_html()
    page = Page(html)
    assert page.faults == []
    assert html.count("<script") == 2  # ours: the data and the program
    assert "alert(1)" in "".join(page.text["p"])
    assert "<!--" not in html
    assert "<tag>" not in html  # of config.toml
    assert "# <tag>" in "".join(page.text["pre"])


def test_sections_of_a_report_with_a_sentence_and_without(report: Report, translator: Any, folder: Path) -> None:
    def sections(html: str) -> list[str]:
        return [str(attrs["id"]) for tag, attrs in Page(html).tags if tag == "section"]

    always = ["training", "parameters", "positions", "config"]
    assert sections(report.as_html()) == ["sentence", "alignment", "attention", *always]
    plain = inspect_model(translator, folder).as_html()
    assert Page(plain).faults == []
    assert sections(plain) == always
    assert "attention" not in data_of(plain)
    assert len(Page(plain).attributes("svg", "chart")) == 3  # loss, score, learning rate; no gradient norm was recorded


def test_numbers_of_the_table_and_of_the_positions(report: Report) -> None:
    html = report.as_html()
    assert f"{report.parameters.total:,}" in html
    assert "generator.weight is embedding.weight" in html
    data = data_of(html)
    assert data["positions"]["values"][0][:4] == [0, 1000, 0, 1000]  # sin 0, cos 0
    assert data["positions"]["values"][1][:2] == [841, 540]
    assert data["similarity"]["values"][5][5] == 1000
    assert data["similarity"]["values"][5][9] == data["similarity"]["values"][20][24]


def test_a_wide_model_shows_whole_pairs_of_dimensions(report: Report) -> None:
    from dataclasses import replace

    from dragoman.model.transformer import sinusoids

    data = data_of(replace(report, positions=sinusoids(16, 1024)).as_html())
    assert len(data["positions"]["values"][0]) == 256
    assert data["positions"]["columns"][:4] == ["dimension 0", "dimension 1", "dimension 8", "dimension 9"]


def test_a_model_that_was_not_trained_here(translator: Any, folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    html = inspect_model(translator, folder).as_html()
    assert "no metrics.jsonl" in html
    assert Page(html).faults == []


def test_json_has_the_raw_numbers(report: Report) -> None:
    numbers = json.loads(report.as_json())
    sentence = numbers["sentence"]
    assert sentence["target_tokens"] == ["die", "猫", "<b>", "sieht", "</s>"]
    assert sentence["log_prob"] == pytest.approx(sum(sentence["token_log_probs"]))
    assert sentence["length"] == 5
    assert len(sentence["attention"]) == 6
    for found in sentence["attention"]:
        assert len(found["heads"]) == len(found["entropy_bits"]) == 3
        assert sum(found["heads"][0][0]) == pytest.approx(1.0, abs=1e-5)
    assert numbers["parameters"]["total"] == sum(part["parameters"] for part in numbers["parameters"]["parts"])
    assert numbers["training"]["best_dev_bleu"] == 12.5
    assert len(numbers["training"]["train"]) == 30


def test_the_summary_answers_the_first_questions(report: Report) -> None:
    text = report.as_text()
    assert text.startswith("en-de\n")
    for fact in ("paper", "en → de", "12.50 at 20", "2.000", "encoder.layers.*.self_attention", "counted once", "nfc"):
        assert fact in text
