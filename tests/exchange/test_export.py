"""`export`: other engines give our answers from our weights, wherever the folder is moved, and never half of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch
from safetensors.torch import load_file

import dragoman
from dragoman.checkpoints.store import load_model
from dragoman.cli.main import exit_code
from dragoman.errors import ModelError, UsageError
from dragoman.exchange import formats
from dragoman.exchange.compare import logit_difference
from dragoman.exchange.engines import ENGINES
from dragoman.exchange.formats import export_model
from dragoman.exchange.huggingface import import_folder
from dragoman.model import native
from dragoman.model.choices import PaperSpec

Get = Callable[[str], Path]
Lines = Callable[[int, int], list[str]]

ODD = [
    "",
    "   ",
    "a  b",
    " lead and trail ",
    "▁x ▁y",
    "日本，你好。 ☃ 3.14 1,000",
    "ﬁne ｆｕｌｌ Straße ½",
    "👨‍👩‍👧 ❤️",
    "\tx\t",
    "<s> a </s> <unk> <pad> <0x41>",
    "a\u00a0b\u3000c",
    "e\u0301 \u0000\u0007bell",
    "\u200bzero \ufeffbom",
    "hahahahahahaha ababababab ......",
]

# ONNX graphs take their time to be traced: one in the fast tests, the others in the slow ones.
slow = pytest.mark.slow
CASES = [
    ("huggingface", "paper"),
    pytest.param("huggingface", "untied", marks=slow),
    pytest.param("huggingface", "softmax-apart", marks=slow),
    pytest.param("huggingface", "swish-uneven", marks=slow),
    ("ctranslate2", "paper"),
    ("ctranslate2", "pre_norm"),
    ("ctranslate2", "tiny"),
    ("ctranslate2", "swish-uneven"),
    ("ctranslate2", "untied"),
    pytest.param("onnx", "paper", marks=slow),
    pytest.param("onnx", "pre_norm", marks=slow),
    pytest.param("onnx", "swish-uneven", marks=slow),
    pytest.param("onnx", "untied", marks=slow),
    pytest.param("ctranslate2", "base", marks=slow),
    pytest.param("huggingface", "base", marks=slow),
    pytest.param("onnx", "base", marks=slow),
]


@pytest.fixture(scope="module")
def exported(ours: Get, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The export of a model in a format, made once."""
    made: dict[tuple[str, str], Path] = {}

    def get(engine: str, name: str) -> Path:
        if (engine, name) not in made:
            made[engine, name] = tmp_path_factory.mktemp(engine) / name
            export_model(ours(name), engine, made[engine, name])
        return made[engine, name]

    return get


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_logits_and_greedy_tokens_are_ours(
    engine: str, name: str, ours: Get, exported: Callable[[str, str], Path], lines: Lines
) -> None:
    loaded = load_model(ours(name))
    other = ENGINES[engine](exported(engine, name), 1, loaded.tokenizer)
    texts = lines(50, 21)
    assert logit_difference(loaded, other, texts[:20]) < 1e-4
    translator = dragoman.load(ours(name))
    options = translator.options(greedy=True, max_extra=12)
    expected = [translation.text for translation in translator.translate(texts, greedy=True, max_extra=12)]
    assert other.translate(texts, options) == expected
    assert len(set(expected)) > 25  # a model that says the same to everything would prove nothing


@pytest.mark.parametrize("name", ["paper", "unigram"])
def test_the_hub_tokenizer_gives_our_ids_and_texts(name: str, ours: Get, lines: Lines, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_model(ours(name), "huggingface", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer = load_model(ours(name)).tokenizer
    for text in [*lines(200, 3), *ODD]:
        ids = tokenizer.encode(text)
        assert theirs(text).input_ids == [*ids, tokenizer.eos_id], text
        assert theirs.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == tokenizer.decode(ids), text
    assert (theirs.pad_token_id, theirs.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id)


def test_a_hugging_face_folder_says_how_to_search_and_what_it_is(
    ours: Get, exported: Callable[[str, str], Path]
) -> None:
    folder = exported("huggingface", "paper")
    tokenizer = load_model(ours("paper")).tokenizer
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["decoder_start_token_id"] == tokenizer.bos_id
    assert generation["num_beams"] == 4
    assert generation["bad_words_ids"] == [[i] for i in tokenizer.banned_ids]
    card = (folder / "README.md").read_text(encoding="utf-8")
    for word in ("train.tsv", "nfc", "Metrics", "dragoman export", "AutoTokenizer", "520 pieces"):
        assert word in card
    assert "somewhere" not in (folder / "dragoman" / "config.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["paper", "swish-uneven", "softmax-apart"])
def test_ours_to_hugging_face_and_back(
    name: str, ours: Get, exported: Callable[[str, str], Path], lines: Lines, tmp_path: Path
) -> None:
    import_folder(exported("huggingface", name), tmp_path / "back")
    before, after = dragoman.load(ours(name)), dragoman.load(tmp_path / "back")
    texts = lines(30, 4)
    options = {"beam_size": 4, "max_extra": 8}
    for a, b in zip(before.translate(texts, **options), after.translate(texts, **options), strict=True):
        assert a.text == b.text
        assert a.score == pytest.approx(b.score, abs=1e-4)
    assert before.tokenizer.fingerprint == after.tokenizer.fingerprint
    assert before.config.decoding == after.config.decoding


def test_a_marian_folder_comes_back_from_hugging_face_bit_for_bit(
    marian: Get, exported: Callable[[str, str], Path]
) -> None:
    there, back = (
        load_file(marian("tiny") / "model.safetensors"),
        load_file(exported("huggingface", "tiny") / "model.safetensors"),
    )
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)


def test_an_export_whose_tokenizer_was_exchanged_is_not_imported(
    exported: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported("huggingface", "paper"), tmp_path / "hf"))
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**tree, "decoder_start_token_id": 7}))
    with pytest.raises(ModelError, match=r"decoder_start_token_id 2, and .* says 7"):
        import_folder(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


FRESH = {
    "ctranslate2": """
import ctranslate2, json, sentencepiece, sys
pieces = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
options = {**json.load(open("generation_config.json")), "beam_size": 1, "max_decoding_length": 12}
found = ctranslate2.Translator(".").translate_batch([pieces.encode(l, out_type=str) for l in LINES], **options)
print(json.dumps([pieces.decode_pieces(f.hypotheses[0]) for f in found]))
""",
    "huggingface": """
import json
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForSeq2SeqLM.from_pretrained(".")
batch = tokenizer(LINES, return_tensors="pt", padding=True)
ids = model.generate(**batch, num_beams=1, max_new_tokens=12, max_length=None)
print(json.dumps(tokenizer.batch_decode(ids, skip_special_tokens=True)))
""",
    "onnx": """
import json, sys
from dragoman.exchange.onnx_runner import OnnxTranslator
translator = OnnxTranslator(".")
sources = translator.tokenizer.encode_batch(LINES)
found = [translator.search([s], beam_size=1, max_extra=12 - len(s) - 1)[0] for s in sources]
print(json.dumps([translator.tokenizer.decode(f.ids) for f in found]))
assert "torch" not in sys.modules
""",
}


@pytest.mark.parametrize(
    "engine", ["ctranslate2", pytest.param("huggingface", marks=slow), pytest.param("onnx", marks=slow)]
)
def test_an_export_works_where_it_is_moved_in_a_fresh_process_without_network(
    engine: str, ours: Get, exported: Callable[[str, str], Path], tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(exported(engine, "paper"), tmp_path / "else where" / "mödel"))
    texts = ["Bade fe.", "Gila bo.", "Na."]
    no_network = (
        "import socket\ndef refuse(*a, **k): raise OSError('no network here')\nsocket.socket.connect = refuse\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{no_network}LINES = {texts!r}\n{FRESH[engine]}"],
        cwd=moved,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    translator = dragoman.load(ours("paper"))
    sources = translator.tokenizer.encode_batch(texts)
    expected = [
        translator.translate(text, greedy=True, max_extra=12 - len(ids) - 1).text
        for text, ids in zip(texts, sources, strict=True)
    ]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@slow
def test_the_onnx_runner_searches_as_we_do(ours: Get, exported: Callable[[str, str], Path], lines: Lines) -> None:
    from dragoman.exchange.onnx_runner import OnnxTranslator

    runner, translator = OnnxTranslator(exported("onnx", "paper"), 1), dragoman.load(ours("paper"))
    texts = [*lines(20, 9), "", "  "]
    for options in (
        {"beam_size": 4, "alpha": 0.6, "penalty": "paper"},
        {"beam_size": 3, "alpha": 1.0, "penalty": "power"},
        {"beam_size": 2, "penalty": "none"},
        {"beam_size": 1},
    ):
        ours_ = translator.translate(texts, max_extra=10, **options)
        assert runner.translate(texts, max_extra=10, **options) == [t.text for t in ours_]
        found = runner.search(translator.tokenizer.encode_batch(texts[:20]), max_extra=10, **options)
        for one, translation in zip(found, ours_, strict=False):
            assert one.log_prob == pytest.approx(translation.log_prob, abs=1e-4)
            assert one.finished == translation.finished


@slow
def test_onnx_in_int8_is_smaller_and_close(ours: Get, exported: Callable[[str, str], Path], tmp_path: Path) -> None:
    export_model(ours("paper"), "onnx", tmp_path / "int8", precision="int8")
    whole = exported("onnx", "paper")
    assert (tmp_path / "int8" / "decoder.onnx").stat().st_size < (whole / "decoder.onnx").stat().st_size
    loaded = load_model(ours("paper"))
    other = ENGINES["onnx"](tmp_path / "int8", 1, loaded.tokenizer)
    assert 1e-4 < logit_difference(loaded, other, ["Bade fe."]) < 1.0


@slow
def test_an_onnx_folder_of_another_version_is_refused(exported: Callable[[str, str], Path], tmp_path: Path) -> None:
    from dragoman.exchange.onnx_runner import OnnxTranslator

    folder = Path(shutil.copytree(exported("onnx", "paper"), tmp_path / "onnx"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 2}))
    with pytest.raises(ModelError, match="format_version 2, and this dragoman reads up to 1"):
        OnnxTranslator(folder)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_ctranslate2_in_fewer_bits(
    precision: Any, ours: Get, exported: Callable[[str, str], Path], tmp_path: Path
) -> None:
    export_model(ours("paper"), "ctranslate2", tmp_path / precision, precision=precision)
    assert (tmp_path / precision / "model.bin").stat().st_size < 0.8 * (
        exported("ctranslate2", "paper") / "model.bin"
    ).stat().st_size
    loaded = load_model(ours("paper"))
    other = ENGINES["ctranslate2"](tmp_path / precision, 1, loaded.tokenizer)
    if precision == "bfloat16" or "avx512_vnni" in native._processor():
        assert logit_difference(loaded, other, ["Bade fe."]) < 1.0
    # What the folder holds, in float32: without VNNI the engine's products of int8 run over, by more than a logit here.
    other.translator = ctranslate2.Translator(str(tmp_path / precision), intra_threads=1, compute_type="float32")
    assert 1e-4 < logit_difference(loaded, other, ["Bade fe."]) < 0.3


def test_hugging_face_in_bfloat16(ours: Get, tmp_path: Path) -> None:
    export_model(ours("paper"), "huggingface", tmp_path / "hf", precision="bfloat16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    import_folder(tmp_path / "hf", tmp_path / "back")  # and it comes home as float32
    assert load_model(tmp_path / "back").model.embedding.weight.dtype == torch.float32


def test_what_a_format_cannot_say_is_refused_and_nothing_is_written(ours: Get, tmp_path: Path) -> None:
    for to, name, options, words in (
        ("huggingface", "pre_norm", {}, "normalises after each sub-layer"),
        ("huggingface", "paper", {"precision": "int8"}, "int8 is for ctranslate2 and onnx"),
        ("onnx", "paper", {"precision": "bfloat16"}, "float32 or int8"),
    ):
        with pytest.raises(ModelError, match=words):
            export_model(ours(name), to, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())


def test_heads_of_another_width_are_refused_by_name(tmp_path: Path) -> None:
    from dragoman.exchange.layout import opened

    with pytest.raises(ModelError, match="d_k 16"):
        opened(PaperSpec(d_model=24, n_heads=3, d_k=16), "CTranslate2")


def test_unknown_formats_and_existing_folders(ours: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["export", str(ours("paper")), "--to", "marian", "--out", str(tmp_path / "x")]) == 2
    assert "'marian' is not known" in capsys.readouterr().err
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("kept")
    assert exit_code(["export", str(ours("paper")), "--to", "ctranslate2", "--out", str(tmp_path / "x")]) == 1
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "x" / "mine").exists()
    forced = ["export", str(ours("paper")), "--to", "ctranslate2", "--out", str(tmp_path / "x"), "--force"]
    assert exit_code(forced) == 0
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "x" / "mine").exists()
    assert (tmp_path / "x" / "tokenizer.model").exists()
    with pytest.raises(ModelError, match="is the model itself"):
        export_model(ours("paper"), "ctranslate2", ours("paper"), force=True)


def test_a_missing_engine_names_the_extra(ours: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.FORMATS, "onnx", ("dragoman.exchange.to_onnx", ("no_such_package",)))
    with pytest.raises(ModelError, match=r"no_such_package.*pip install 'dragoman\[export\]'"):
        export_model(ours("paper"), "onnx", tmp_path / "out")
    with pytest.raises(UsageError, match="it can be huggingface, ctranslate2, onnx"):
        formats.check_format("gguf")
