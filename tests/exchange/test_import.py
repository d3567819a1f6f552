"""`import`: MarianMT folders give the answers that transformers gives, and bad ones are refused whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dragoman.checkpoints.store import load_model
from dragoman.cli.main import exit_code
from dragoman.errors import ModelError
from dragoman.exchange.huggingface import import_folder

transformers = pytest.importorskip("transformers")

Get = Callable[[str], Path]
Lines = Callable[[int, int], list[str]]
Flickr = Callable[[str, int], list[str]]


def padded(rows: list[list[int]], pad_id: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])


def compare(theirs: Path, ours: Path, sources: list[str], targets: list[str], steps: int = 30) -> tuple[float, int]:
    """The largest difference of logits, teacher-forced; and how many greedy outputs are the same tokens."""
    foreign = transformers.MarianMTModel.from_pretrained(theirs).eval()
    loaded = load_model(ours)
    model, tokenizer = loaded.model, loaded.tokenizer
    pad, eos, bos = tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id
    src = padded([[*ids, eos] for ids in tokenizer.encode_batch(sources)], pad)
    tgt_in = padded([[bos, *ids] for ids in tokenizer.encode_target_batch(targets)], pad)
    seen = {"input_ids": src, "attention_mask": (src != pad).long()}
    real = tgt_in != pad
    real[:, 0] = True
    with torch.no_grad():
        difference = float((model(src, tgt_in) - foreign(**seen, decoder_input_ids=tgt_in).logits)[real].abs().max())
        chosen = foreign.generate(**seen, num_beams=1, do_sample=False, max_new_tokens=steps)[:, 1:]
        state, newest, greedy = model.start(src), torch.full((len(src),), bos), []
        for _ in range(steps):
            logits, state = model.step(newest, state)
            logits[:, list(tokenizer.banned_ids)] = -torch.inf
            newest = logits.argmax(-1)
            greedy.append(newest)

    def until_eos(row: torch.Tensor) -> list[int]:
        ids: list[int] = row.tolist()
        return ids[: ids.index(eos)] if eos in ids else ids

    pairs = zip(torch.stack(greedy, 1), chosen, strict=True)
    return difference, sum(until_eos(a)[: len(until_eos(b))] == until_eos(b) for a, b in pairs)


SHAPES = ["tiny", "swish-uneven", "untied", "softmax-apart", "target-tied"]


@pytest.mark.parametrize("name", [*SHAPES, pytest.param("base", marks=pytest.mark.slow)])
def test_random_models_have_equal_logits_and_greedy_tokens(
    name: str, marian: Get, lines: Lines, tmp_path: Path
) -> None:
    import_folder(marian(name), tmp_path / "ours")
    difference, equal = compare(marian(name), tmp_path / "ours", lines(50, 5), lines(50, 6))
    assert difference < 1e-4
    assert equal == 50


def test_the_trained_model_has_equal_logits_and_greedy_tokens(trained: Path, flickr: Flickr, tmp_path: Path) -> None:
    import_folder(trained, tmp_path / "ours")
    difference, equal = compare(trained, tmp_path / "ours", flickr("en", 50), flickr("de", 50), steps=60)
    assert difference < 5e-5
    assert equal == 50


ODD = [
    "",
    "a  b",
    " Badefar ",
    "▁x ▁y",
    "日本 ☃ 3.14 1,000",
    "ﬁne ｆｕｌｌ",
    "👨‍👩‍👧 ❤️",
    "\tx\t",
    "<0x41>",
    "a\u00a0b",
    "e\u0301",
    "\u200bzero",
]


def test_ids_and_texts_are_those_of_the_hub_tokenizer(marian: Get, lines: Lines, tmp_path: Path) -> None:
    assert_same_ids_and_texts(marian("tiny"), [*lines(50, 8), *ODD, ">>deu<< Badefar."], tmp_path / "ours")


def test_ids_and_texts_of_the_trained_model(trained: Path, flickr: Flickr, tmp_path: Path) -> None:
    assert_same_ids_and_texts(trained, [*flickr("en", 300), *flickr("de", 300), *ODD], tmp_path / "ours")


def assert_same_ids_and_texts(folder: Path, texts: list[str], out: Path) -> None:
    import_folder(folder, out)
    ours = load_model(out).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        ids = ours.encode(text)
        assert [*ids, ours.eos_id] == theirs(text).input_ids, text
        assert [*ours.encode_target(text), ours.eos_id] == theirs(text_target=text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_text_never_becomes_a_control_token(marian: Get, tmp_path: Path) -> None:
    import_folder(marian("tiny"), tmp_path / "ours")
    tokenizer = load_model(tmp_path / "ours").tokenizer
    for text in ("</s>", "<pad>", "Bade </s> <pad> <unk>"):
        assert not {tokenizer.pad_id, tokenizer.eos_id} & set(tokenizer.encode(text))
    assert tokenizer.bos_id == tokenizer.pad_id == 300
    assert tokenizer.eos_id == 0
    assert 300 in tokenizer.banned_ids
    assert 1 not in tokenizer.banned_ids  # theirs may choose <unk>, and so may what is exported; `translate` never does


def test_the_folder_says_where_its_search_comes_from(marian: Get, tmp_path: Path) -> None:
    import_folder(marian("tiny"), tmp_path / "ours", tgt_lang="de")
    config = load_model(tmp_path / "ours").config
    assert (config.data.src_lang, config.data.tgt_lang, config.data.max_length) == ("eng", "de", 512)
    assert (config.decoding.beam_size, config.decoding.penalty, config.decoding.alpha) == (4, "power", 1.0)


def test_shards_are_read_like_one_file(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    import_folder(folder, tmp_path / "whole")
    shard(folder)
    import_folder(folder, tmp_path / "sharded")
    one, other = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "sharded"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def shard(folder: Path) -> list[str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::3]}, folder / file)
    places = {name: files[i % 3] for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return files


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def refusal(folder: Path, out: Path) -> list[str]:
    with pytest.raises(ModelError) as error:
        import_folder(folder, out)
    assert not out.exists()
    assert not list(out.parent.glob(".*"))
    return list(error.value.problems)


def test_what_old_files_of_the_hub_say_is_understood(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    (folder / "generation_config.json").unlink()  # as it was before there were any
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "eng", "target_lang": "deu"}))
    edit(
        folder / "config.json",
        _num_labels=3,
        add_bias_logits=False,
        add_final_layer_norm=False,
        bad_words_ids=[[300]],
        bos_token_id=0,
        classif_dropout=0.0,
        classifier_dropout=0.0,
        extra_pos_embeddings=301,
        force_bos_token_to_be_generated=False,
        forced_eos_token_id=0,
        gradient_checkpointing=False,
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        max_length=512,
        normalize_before=False,
        normalize_embedding=False,
        num_beams=6,
        num_hidden_layers=2,
        static_position_embeddings=True,
        transformers_version="4.22.0.dev0",
    )
    import_folder(folder, tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    assert loaded.config.decoding.beam_size == 6
    assert loaded.tokenizer.banned_ids == (300,)


def test_a_missing_shard_is_named(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    lost = shard(folder)[1]
    (folder / lost).unlink()
    (problem,) = refusal(folder, tmp_path / "ours")
    assert lost in problem
    assert "missing" in problem


def test_an_unknown_architecture_is_named(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    edit(folder / "config.json", model_type="bart")
    (problem,) = refusal(folder, tmp_path / "ours")
    assert "'bart' is not supported" in problem
    assert "marian" in problem


def test_a_wrong_shape_and_a_lost_and_a_strange_tensor_are_named_together(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.layers.1.fc1.weight"] = torch.zeros(41, 24)
    del tensors["model.decoder.layers.0.fc2.bias"]
    tensors["model.encoder.layernorm_embedding.weight"] = torch.zeros(24)
    save_file(tensors, folder / "model.safetensors")
    problems = refusal(folder, tmp_path / "ours")
    assert len(problems) == 3
    assert any("fc1.weight has the shape [41, 24], and config.json makes it [40, 24]" in p for p in problems)
    assert any("lacks the tensor model.decoder.layers.0.fc2.bias" in p for p in problems)
    assert any("layernorm_embedding.weight, which this version does not know" in p for p in problems)


def test_a_vocabulary_that_disagrees_with_the_embedding(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    pieces = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps({**pieces, "one too many": 301}), encoding="utf-8")
    (problem,) = refusal(folder, tmp_path / "ours")
    assert "302 pieces" in problem
    assert "vocab_size 301" in problem


def test_a_pickle_is_never_opened(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (problem,) = refusal(folder, tmp_path / "ours")
    assert "pytorch_model.bin" in problem
    assert "docs/exchange.md" in problem
    page = Path(__file__).resolve().parents[2] / "docs" / "exchange.md"
    assert "Models that ship a pickle" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalize_before", True),
        ("encoder_layerdrop", 0.1),
        ("activation_function", "mish"),
        ("decoder_vocab_size", 17),
        ("bad_words_ids", [[1, 2]]),
        ("quantization_config", {"bits": 4}),
        ("layer_scale", 0.5),
        ("d_model", "24"),
        ("repetition_penalty", 1.2),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: Any, copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    generation = folder / "generation_config.json"
    edit(generation, bad_words_ids=None)
    edit(folder / "config.json", **{key: value})
    assert any(key in problem for problem in refusal(folder, tmp_path / "ours"))


def test_all_problems_are_told_at_once(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    edit(folder / "config.json", normalize_before=True, attention_dropout=0.1)
    edit(folder / "tokenizer_config.json", separate_vocabs=True)
    (folder / "target.spm").write_bytes(b"no model")
    (folder / "source.spm").unlink()
    (folder / "model.safetensors").unlink()
    problems = "\n".join(refusal(folder, tmp_path / "ours"))
    for word in ("normalize_before", "attention_dropout", "separate_vocabs", "source.spm", "target.spm", "model.saf"):
        assert word in problems


def test_a_truncated_file_and_damaged_json(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    (folder / "vocab.json").write_text("{", encoding="utf-8")
    problems = "\n".join(refusal(folder, tmp_path / "ours"))
    assert "model.safetensors is damaged or cut short" in problems
    assert "vocab.json is not JSON" in problems


def test_learned_positions_are_refused(copy_of: Get, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.embed_positions.weight"] = torch.randn(512, 24)
    save_file(tensors, folder / "model.safetensors")
    (problem,) = refusal(folder, tmp_path / "ours")
    assert "sinusoids" in problem


def test_nothing_is_overwritten_without_force(marian: Get, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(ModelError, match="exists already"):
        import_folder(marian("tiny"), out)
    assert (out / "mine.txt").read_text() == "kept"
    import_folder(marian("tiny"), out, force=True)
    assert not (out / "mine.txt").exists()
    assert load_model(out).tokenizer.eos_id == 0


def test_a_name_that_is_neither_folder_nor_on_the_hub(tmp_path: Path) -> None:
    for name in ("no-such-folder", "some/deeper/folder"):
        with pytest.raises(ModelError, match="is not a folder"):
            import_folder(name, tmp_path / "ours")
    with pytest.raises(ModelError, match="the hub did not give it"):
        import_folder("nobody/nothing", tmp_path / "ours")


def test_the_command(marian: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "dragoman", "import", str(marian("tiny")), "--out", str(tmp_path / "ours")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert exit_code(command[3:]) == 1
    assert capsys.readouterr().err.startswith("error: ")
