"""Text in, text out, with a real tokenizer and random models: order, blanks, long lines, options and promises."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import random

import pytest
import torch

from dragoman.decoding.ensemble import Ensemble
from dragoman.decoding.options import DecodingConfig
from dragoman.errors import ConfigError, DataError
from dragoman.model.transformer import Transformer, TransformerConfig
from dragoman.text.corpus import DataConfig
from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer
from dragoman.translator import Defaults, Translator

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "with",
    "hat",
    "and",
    "ran",
    "away",
    "from",
    "big",
    "red",
    "house",
    "near",
    "small",
    "green",
    "tree",
]


def sentences(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + draw.choice([".", "!", " ?"]) for _ in range(n)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [*sentences(400), *["我们在这里。", "你好，世界！"] * 20]
    config = TokenizerConfig(vocab_size=380, character_coverage=1.0)
    return train_tokenizer(texts, config, tmp_path_factory.mktemp("tokenizer"), seed=1)


def random_model(tokenizer, seed: int = 0, sharpness: float = 2.5) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(
            TransformerConfig(len(tokenizer), n_layers=2, d_model=24, d_ff=40, n_heads=3, pad_id=tokenizer.pad_id)
        ).eval()
        with torch.no_grad():
            model.embedding.weight.mul_(sharpness)
            for name, parameter in model.named_parameters():
                if "bias" in name:
                    parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def model(tokenizer) -> Transformer:
    return random_model(tokenizer)


@pytest.fixture
def translator(model, tokenizer) -> Translator:
    settings = Defaults(DataConfig(src_lang="en", tgt_lang="de", max_length=40), DecodingConfig(max_extra=6))
    return Translator(model, tokenizer, settings)


def forbidden(*args, **kwargs):
    raise AssertionError("the model was called")


def test_a_text_gives_a_translation_and_a_list_gives_a_list_in_order(translator) -> None:
    texts = sentences(9)
    one = translator.translate(texts[4])
    many = translator.translate(texts)
    assert [t.line for t in many] == list(range(1, 10))
    assert [t.source for t in many] == texts
    assert many[4].text == one.text
    assert many[4].score == pytest.approx(one.score, abs=1e-4)
    assert translator.translate([]) == []
    assert one.text == one.hypotheses[0].text
    assert one.length == len(one.tokens) == len(one.token_log_probs)
    assert one.log_prob == pytest.approx(sum(one.token_log_probs), abs=1e-4)
    assert one.score == pytest.approx(one.log_prob / ((5 + one.length) / 6) ** 0.6, abs=1e-6)
    assert one.finished == (one.tokens[-1] == translator.tokenizer.id_to_piece(translator.tokenizer.eos_id))


@pytest.mark.parametrize("blank", ["", "   ", "\t", " \t ", "\x01\x02", "▁", "\u3000"])
def test_blank_in_blank_out_and_the_model_is_not_called(translator, monkeypatch, blank) -> None:
    expected = translator.translate(["a cat.", "a dog."])
    mixed = translator.translate(["a cat.", blank, "a dog."])
    assert [t.text for t in mixed] == [expected[0].text, "", expected[1].text]
    monkeypatch.setattr("dragoman.translator.decode", forbidden)
    t = translator.translate(blank)
    assert (t.text, t.hypotheses, t.score, t.source) == ("", [], None, blank)
    assert t.as_dict()["score"] is None


OPTIONS = {
    "greedy": {"greedy": True},
    "beam": {"beam_size": 4, "n_best": 3},
    "power": {"penalty": "power", "alpha": 1.2},
    "rules": {"min_length": 5, "no_repeat_ngram": 2, "ban": ("cat", "big red"), "prefix": "the dog"},
    "sample": {"sample": True, "temperature": 0.7, "n_best": 2, "seed": 3},
    "nucleus": {"sample": True, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batch_order_and_neighbours_change_nothing(translator, options) -> None:
    texts = sentences(20, seed=5)
    alone = [translator.translate(text, **options) for text in texts]
    order = random.Random(1).sample(range(20), 20)
    for batch_tokens in (1, 150, 8192):
        together = translator.translate([texts[i] for i in order], batch_tokens=batch_tokens, **options)
        for i, t in zip(order, together, strict=True):
            assert [h.text for h in t.hypotheses] == [h.text for h in alone[i].hypotheses]
            assert [h.score for h in t.hypotheses] == pytest.approx([h.score for h in alone[i].hypotheses], abs=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_score_recomputes_every_number(translator, options) -> None:
    texts = sentences(7, seed=8)
    chosen = {key: value for key, value in options.items() if key in ("alpha", "penalty")}
    for t in translator.translate(texts, **options):
        scored = translator.score([(t.source, h) for h in t.hypotheses], **chosen)
        again = translator.score([(t.source, h.tokens) for h in t.hypotheses], **chosen)
        for h, s, a in zip(t.hypotheses, scored, again, strict=True):
            assert (s.tokens, s.text, s.length, s.finished) == (h.tokens, h.text, h.length, h.finished)
            assert s.score == pytest.approx(h.score, abs=1e-4)
            assert s.log_prob == pytest.approx(h.log_prob, abs=1e-4)
            assert s.token_log_probs == pytest.approx(h.token_log_probs, abs=1e-4)
            assert a == s


def test_score_of_texts(translator) -> None:
    pairs = [("the cat sat.", "a dog ran."), ("a hat", ""), ("the cat sat.", "我们在这里。")]
    found = translator.score(pairs, alpha=1.0)
    eos = translator.tokenizer.id_to_piece(translator.tokenizer.eos_id)
    for (_, target), s in zip(pairs, found, strict=True):
        assert s.text == target
        assert s.tokens[-1] == eos
        assert s.score == pytest.approx(s.log_prob / ((5 + s.length) / 6))
    assert found[1].length == 1
    alone = [translator.score([pair], alpha=1.0)[0] for pair in pairs]
    assert [s.log_prob for s in found] == pytest.approx([s.log_prob for s in alone], abs=1e-4)


def test_the_cap_is_the_source_with_eos_and_max_extra(tokenizer, model) -> None:
    class Endless:
        """The model with no wish to end."""

        pad_id = model.pad_id
        start = staticmethod(model.start)

        @staticmethod
        def step(tokens, state):
            logits, state = model.step(tokens, state)
            logits[:, tokenizer.eos_id] -= 100.0
            return logits, state

    translator = Translator(Endless(), tokenizer)
    for options in ({"greedy": True}, {"beam_size": 3}, {"sample": True}):
        t = translator.translate("the cat sat on a mat.", **options)
        assert t.length == len(tokenizer.encode("the cat sat on a mat.")) + 1 + 50
        assert not t.finished
        assert t.score == pytest.approx(t.log_prob / ((5 + t.length) / 6) ** 0.6, abs=1e-6)
        assert tokenizer.eos_id not in [tokenizer.piece_to_id(token) for token in t.tokens]


def test_rules_are_kept(translator) -> None:
    tokenizer = translator.tokenizer
    texts = sentences(12, seed=3)
    for options in ({"greedy": True}, {"beam_size": 3, "n_best": 3}, {"sample": True, "n_best": 3}):
        for t in translator.translate(texts, prefix="the big dog", min_length=9, no_repeat_ngram=2, **options):
            for h in t.hypotheses:
                assert h.text.startswith("the big dog")
                assert h.length >= 9 or not h.finished
                after = h.tokens[len(tokenizer.encode_target("the big dog")) :]
                pairs = list(zip(h.tokens, h.tokens[1:], strict=False))
                assert len(pairs) == len(set(pairs)) or not after
                assert not {"<unk>", "<pad>", "<s>"} & set(h.tokens)
    # What is banned is what came out without the ban.
    for options in ({"greedy": True}, {"beam_size": 3}):
        for t in translator.translate(texts, **options):
            words = [piece for piece in t.tokens if piece.startswith("▁") and len(piece) > 2]
            if not words:
                continue
            banned = words[0].lstrip("▁")
            ids = tokenizer.encode_target(banned)
            again = translator.translate(t.source, ban=(banned,), **options)
            found = [tokenizer.piece_to_id(piece) for piece in again.tokens]
            assert all(found[i : i + len(ids)] != ids for i in range(len(found)))
            # The probabilities reported are the model's own, ban or no ban.
            assert again.log_prob == pytest.approx(translator.score([(t.source, again)])[0].log_prob, abs=1e-4)


def test_a_minimum_above_the_cap_is_an_error_that_names_the_line(translator) -> None:
    with pytest.raises(DataError, match=r"min_length 60 is above \d+, which is the cap of line 2"):
        translator.translate(["", "a cat."], min_length=60)
    with pytest.raises(DataError, match=r"the prefix has \d+ tokens, more than"):
        translator.translate("a cat.", prefix="cat " * 30)


LONG = "the cat sat on the mat near a tree. " * 6 + "a dog ran away, and the cat with the hat and the dog ran!"


def test_a_long_line_is_split_into_pieces_that_are_translated_as_themselves(translator) -> None:
    t = translator.translate(["a cat.", LONG, "a dog."])[1]
    assert t.pieces == 7
    assert not t.truncated
    parts = [translator.translate(s) for s in ["the cat sat on the mat near a tree."] * 6 + [LONG.split(". ")[-1]]]
    assert t.text == " ".join(part.text for part in parts)
    assert t.length == sum(part.length for part in parts)
    assert t.log_prob == pytest.approx(sum(part.log_prob for part in parts), abs=1e-3)
    assert t.score == pytest.approx(t.log_prob / ((5 + t.length) / 6) ** 0.6)
    assert t.tokens == [token for part in parts for token in part.tokens]
    assert len(t.token_log_probs) == t.length


def test_a_long_line_is_truncated_with_a_flag_and_a_warning(translator, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="dragoman"):
        short, long = translator.translate(["a cat.", LONG], long_input="truncate")
    assert (short.truncated, long.truncated, long.pieces) == (False, True, 1)
    assert "line 2 has" in caplog.text
    assert "the 40 of data.max_length" in caplog.text
    ids = translator.tokenizer.encode(LONG)[:40]
    kept = translator.tokenizer.decode(ids)
    assert long.length <= 40 + 1 + 6
    assert translator.tokenizer.encode(kept) != ids or long.text == translator.translate(kept).text


def test_a_long_line_is_an_error_where_that_is_asked_for(translator, monkeypatch) -> None:
    monkeypatch.setattr("dragoman.translator.decode", forbidden)
    with pytest.raises(DataError) as caught:
        translator.translate(["a cat.", LONG, "a dog.", LONG], long_input="error")
    assert [problem.split(" has")[0] for problem in caught.value.problems] == ["line 2", "line 4"]


def test_a_very_long_line_without_a_space(translator) -> None:
    t = translator.translate("我们在这里你好世界" * 60)
    assert t.pieces > 3
    assert translator.translate("x" * 2000).pieces > 3


def test_an_empty_translation_is_warned_of(tokenizer, model, caplog) -> None:
    class Mute:
        pad_id = model.pad_id
        start = staticmethod(model.start)

        @staticmethod
        def step(tokens, state):
            logits, state = model.step(tokens, state)
            logits[:, tokenizer.eos_id] += 100.0
            return logits, state

    with caplog.at_level(logging.WARNING, logger="dragoman"):
        translations = Translator(Mute(), tokenizer).translate(["", "a cat."])
    assert [t.text for t in translations] == ["", ""]
    assert [record.getMessage() for record in caplog.records] == [
        "line 2: the translation of a line that is not blank is empty"
    ]
    assert Translator(Mute(), tokenizer).translate("a cat.", min_length=3, max_extra=5).length >= 3


def test_a_text_that_is_not_unicode_is_a_plain_error(translator) -> None:
    with pytest.raises(DataError, match=r"line 2, character 3: U\+D800 is half of a surrogate pair"):
        translator.translate(["a cat.", "a \ud800."])
    with pytest.raises(DataError, match=r"U\+DFFF"):
        translator.score([("a cat.", "\udfff")])


def test_options_are_checked(translator) -> None:
    with pytest.raises(ConfigError, match="no such option: beam_sise; did you mean beam_size"):
        translator.translate("a cat.", beam_sise=3)
    with pytest.raises(ConfigError, match="n_best 5 is more than the 4 of beam_size"):
        translator.translate("a cat.", n_best=5)
    with pytest.raises(ConfigError, match="penalty"):
        translator.translate("a cat.", penalty="wu")
    with pytest.raises(ConfigError, match="greedy and sample exclude each other"):
        translator.translate("a cat.", greedy=True, sample=True)
    sampling = dataclasses.replace(translator.config, decoding=DecodingConfig(sample=True, n_best=4))
    other = Translator(translator.model, translator.tokenizer, sampling)
    assert len(other.translate("a cat.").hypotheses) == 4
    assert len(other.translate("a cat.", greedy=True).hypotheses) == 1
    assert not other.options(beam_size=5).sample


def test_samples_are_drawn_by_seed_and_text_and_the_first_is_the_first_of_many(translator) -> None:
    texts = sentences(10, seed=2)
    one = [t.text for t in translator.translate(texts, sample=True)]
    four = [[h.text for h in t.hypotheses] for t in translator.translate(texts, sample=True, n_best=4)]
    assert [row[0] for row in four] == one
    assert all(len(set(row)) > 1 for row in four)
    assert [t.text for t in translator.translate(texts, sample=True, seed=1)] != one


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_draft_changes_no_greedy_text_in_any_precision(tokenizer, model, precision) -> None:
    draft = random_model(tokenizer, seed=9)
    texts = sentences(5, seed=13)
    settings = Defaults(DataConfig(), DecodingConfig(max_extra=6))
    plain = Translator(model, tokenizer, settings, precision=precision).translate(texts, greedy=True)
    helped = Translator(model, tokenizer, settings, draft=draft, precision=precision)
    assert [t.text for t in helped.translate(texts, greedy=True)] == [t.text for t in plain]
    drawn = helped.translate(texts, sample=True, n_best=2)
    assert [t.text for t in drawn] == [t.text for t in helped.translate(texts, sample=True)]


def test_partial_output_grows_to_the_whole(translator) -> None:
    for text in (*sentences(4, seed=11), LONG):
        shown = list(translator.stream_text(text))
        assert shown[-1] == translator.translate(text, greedy=True).text
        assert len(shown) > 1
    assert list(translator.stream_text(" ")) == []
    with pytest.raises(ConfigError, match="greedy"):
        next(translator.stream_text("a cat.", greedy=False))


def test_a_stream_is_the_same_as_a_list(translator) -> None:
    texts = [*sentences(70, seed=4), "", *sentences(3)]
    taken = []

    def lines():
        for text in texts:
            taken.append(text)
            yield text

    stream = translator.stream(lines(), greedy=True)
    first = next(stream)
    assert len(taken) < len(texts)
    found = [first, *stream]
    assert [t.line for t in found] == list(range(1, len(texts) + 1))
    assert [t.text for t in found] == [t.text for t in translator.translate(texts, greedy=True)]


def test_alignment_names_a_source_token_for_each_target_token(translator) -> None:
    short, blank, long = translator.translate(["the cat sat on a mat.", "", LONG], alignment=True, n_best=2)
    for t in (short, long):
        for h in t.hypotheses:
            eos = t.source_tokens[-1]
            words = [i for i, token in enumerate(h.tokens) if token != eos]
            assert [target for _, target in h.alignment] == words
            assert all(t.source_tokens[source] != eos for source, _ in h.alignment)
    assert [source for source, _ in long.alignment] != sorted({source for source, _ in long.alignment})
    assert blank.alignment is None
    assert "alignment" in short.as_dict()["hypotheses"][0]
    assert "alignment" not in translator.translate("a cat.").as_dict()["hypotheses"][0]


def test_several_lines_in_one_text_are_read_as_one(translator) -> None:
    assert translator.translate("the cat\r\nsat.\na dog").text == translator.translate("the cat sat. a dog").text
    assert "\n" not in translator.translate("the cat\nsat.").text


def test_a_training_model_is_put_back_to_training(translator) -> None:
    translator.model.train()
    try:
        a, b = (translator.translate("the cat sat.").score for _ in range(2))
        assert a == b
        assert translator.model.training
    finally:
        translator.model.eval()


def test_chinese_pieces_are_joined_without_spaces() -> None:
    from dragoman.text.split import join

    assert join(["你好。", "世界！"]) == "你好。世界！"
    assert join(["Ja.", "Nein.", "", "Doch."]) == "Ja. Nein. Doch."
    assert join(["안녕.", "세계"]) == "안녕. 세계"


def test_what_is_to_be_kept_comes_through(translator) -> None:
    """Random models keep nothing of their own accord; the rest of the line is translated around it."""
    line = "the cat {name} sat on <b>a mat</b>."
    options = {"keep": (r"\{\w+\}", r"</?\w+>"), "greedy": True}
    plain, kept, blank = translator.translate(["a dog.", line, ""], **options)
    first, second, third, last = (translator.translate(s, greedy=True) for s in ("the cat", "sat on", "a mat", "."))
    assert kept.text == f"{first.text} {{name}} {second.text} <b>{third.text}</b>{last.text}"
    assert kept.log_prob == pytest.approx(sum(t.log_prob for t in (first, second, third, last)), abs=1e-4)
    assert (kept.pieces, kept.line, kept.source) == (4, 2, line)
    assert plain.text == translator.translate("a dog.", greedy=True).text
    assert blank.text == ""
    assert translator.translate("{a}", keep=[r"\{a\}"]).text == "{a}"
    assert "<B>" in translator.translate("a <B> cat", keep=[r"(?i)<b>", r"(?P<x>cat)", r"(?P<x>{a})"], greedy=True).text
    for other in ({"n_best": 2}, {"prefix": "a"}, {"alignment": True}):
        with pytest.raises(ConfigError, match="keep repairs one hypothesis of each line"):
            translator.translate("a dog.", keep=("a",), **other)
    with pytest.raises(ConfigError, match="keep repairs whole lines"):
        next(translator.stream_text("a dog.", keep=("a",)))
    with pytest.raises(ConfigError, match="keep '\\(' is not a regular expression"):
        translator.translate("a dog.", keep=("(",))


def test_options_without_an_effect_are_refused(translator) -> None:
    for option in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} belongs to sampling"):
            translator.translate("a dog.", **option)
        translator.translate("a dog.", sample=True, **option)
    translator.translate("a dog.", temperature=1.0)
    with pytest.raises(ConfigError, match="only plain greedy search"):
        next(translator.stream_text("a dog.", beam_size=4))
    for option, told in (({"alpha": 1000.0}, "alpha must be from -20 to 20"), ({"beam_size": 9000}, "at most 8,192")):
        with pytest.raises(ConfigError, match=told):
            translator.translate("a dog.", **option)
    for alpha in (-20.0, 20.0):
        assert math.isfinite(translator.translate("a dog.", alpha=alpha).score)


def test_unk_is_never_generated_and_a_prefix_must_be_known(translator, monkeypatch) -> None:
    tokenizer = translator.tokenizer
    assert tokenizer.unk_id in translator._rules(translator.options()).banned
    monkeypatch.setattr(type(tokenizer), "encode_target", lambda self, text: [tokenizer.unk_id])
    with pytest.raises(DataError, match="the prefix 'x' holds what the model's vocabulary has no pieces for"):
        translator.translate("a dog.", prefix="x")


def test_score_needs_no_greedy_for_a_draft_and_names_unknown_pieces(translator) -> None:
    drafted = Translator(translator.model, translator.tokenizer, translator.config, draft=translator.model)
    plain = translator.score([("a cat.", "a dog.")])[0]
    assert drafted.score([("a cat.", "a dog.")])[0].log_prob == pytest.approx(plain.log_prob, abs=1e-5)
    with pytest.raises(DataError, match="target line 2: 'nonsense-piece' is no piece"):
        translator.score([("a cat.", "a dog."), ("a cat.", ["nonsense-piece"])])


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_an_ensemble_in_low_precision_scores_what_it_says(translator, precision) -> None:
    both = Translator(
        Ensemble([translator.model, translator.model]), translator.tokenizer, translator.config, precision=precision
    )
    found = both.translate(["the cat sat.", "a dog."], n_best=2)
    pairs = [(t.source, h) for t in found for h in t.hypotheses]
    for (_, h), scored in zip(pairs, both.score(pairs), strict=True):
        assert scored.score == pytest.approx(h.score, abs=1e-4)


def test_int8_without_a_compiler_depends_on_no_neighbour(translator, monkeypatch) -> None:
    monkeypatch.setattr("dragoman.decoding.precision.can_pack", lambda model: False)
    texts = ["the cat sat on a mat.", "a dog.", LONG[:200]]
    small = Translator(translator.model, translator.tokenizer, translator.config, precision="int8")
    together = small.translate(texts)
    for text, t in zip(texts, together, strict=True):
        alone = small.translate(text)
        assert (alone.text, alone.score) == (t.text, pytest.approx(t.score, abs=1e-4))
    exact = translator.score([(t.source, t) for t in together])
    for t, scored in zip(together, exact, strict=True):
        assert t.log_prob == pytest.approx(scored.log_prob, rel=0.15, abs=0.5)


def test_weights_that_were_exchanged_are_noticed(translator) -> None:
    model = copy.deepcopy(translator.model)
    changing = Translator(model, translator.tokenizer, translator.config)
    before = changing.translate("a dog.")
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    after = changing.translate("a dog.")
    assert after.log_prob == pytest.approx(changing.score([("a dog.", after)])[0].log_prob, abs=1e-3)
    assert after.log_prob != before.log_prob


def test_a_model_made_in_inference_mode_translates(translator) -> None:
    with torch.inference_mode():
        model = copy.deepcopy(translator.model)
    assert all(parameter.is_inference() for parameter in model.parameters())
    made = Translator(model, translator.tokenizer, translator.config)
    assert made.translate("a dog.").text == translator.translate("a dog.").text
