"""`dragoman translate` and `dragoman score` as processes: pipes, bytes, exit codes, files."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dragoman.checkpoints.store import save_model
from dragoman.cli.main import exit_code
from dragoman.decoding.options import DecodingConfig
from dragoman.model.choices import PaperSpec
from dragoman.run import RunConfig
from dragoman.text.corpus import DataConfig
from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer
from dragoman.translator import load

TEXTS = ["the cat sat on a mat.", "a dog ran!", "one two three four five", "we are here , you are there ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder: random weights, a real tokenizer."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([*TEXTS * 5, "\\ tab"], TokenizerConfig(vocab_size=320), path / "tokenizer", seed=1)
    for seed, name in ((4, "model"), (7, "other")):  # whose translations are not empty
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            spec = PaperSpec(n_layers=1, d_model=16, d_ff=24, n_heads=2)
            model = spec.build(len(tokenizer), tokenizer.pad_id)
            with torch.no_grad():
                model.embedding.weight.mul_(2.5)
        data = DataConfig(src_lang="en", tgt_lang="de", max_length=30)
        save_model(path / name, model, tokenizer, RunConfig(data, model=spec, decoding=DecodingConfig(max_extra=4)))
    return path / "model"


@pytest.fixture(scope="module")
def expected(folder) -> list[str]:
    return [t.text for t in load(folder).translate(TEXTS)]


def lines_of(output: bytes) -> list[str]:
    assert output.endswith(b"\n")
    return output.decode().removesuffix("\n").split("\n")


@pytest.fixture
def in_process(monkeypatch, capsys):
    """The command line without a process of its own; the logging that it sets up is taken back."""
    log = logging.getLogger("dragoman")
    monkeypatch.setattr(log, "handlers", log.handlers)
    monkeypatch.setattr(log, "propagate", log.propagate)
    log.setLevel(logging.NOTSET)  # another verb's --quiet, called in this process before

    def run(*arguments: object) -> tuple[int, str, str]:
        code = exit_code([*map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def translate(in_process, tmp_path):
    """`translate(folder, lines, *options)` -> the lines of stdout and the talk on stderr, of a run that ends well."""

    def run(folder: Path, lines: list[str], *options: object) -> tuple[list[str], str]:
        source = tmp_path / "to-translate"
        source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        code, output, talk = in_process("translate", folder, source, *options)
        assert code == 0, talk
        return lines_of(output.encode()), talk

    return run


def test_one_line_out_for_each_line_in(dragoman, in_process, folder, expected, tmp_path) -> None:
    source = f"{TEXTS[0]}\r\n\n{TEXTS[1]}\u2028{TEXTS[2]}\n \t\n{TEXTS[3]}"  # no line feed at the end
    done = dragoman("translate", folder, stdin=source.encode(), LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, b"")
    found = lines_of(done.stdout)
    assert len(found) == 5
    assert [found[0], found[1], found[3], found[4]] == [expected[0], "", "", expected[3]]
    file = tmp_path / "source.txt.gz"
    file.write_bytes(gzip.compress(b"\xef\xbb\xbf" + source.encode()))
    code, output, _ = in_process("translate", folder, file)
    assert (code, output) == (0, done.stdout.decode())
    assert dragoman("translate", folder, "-", "--unbuffered", stdin=source.encode()).stdout == done.stdout


def test_json_has_the_promised_fields(translate, folder, expected) -> None:
    found, _ = translate(folder, [TEXTS[0], ""], "--json", "--n-best", 2)
    full, blank = map(json.loads, found)
    first = full["hypotheses"][0]
    assert list(first) == ["text", "score", "log_prob", "length", "finished", "tokens", "token_log_probs"]
    assert {key: full[key] for key in first} == first
    assert (full["line"], full["source"], full["text"]) == (1, TEXTS[0], expected[0])
    assert (full["truncated"], full["pieces"], len(full["hypotheses"])) == (False, 1, 2)
    assert first["score"] == pytest.approx(first["log_prob"] / ((5 + first["length"]) / 6) ** 0.6)
    assert len(first["tokens"]) == len(first["token_log_probs"]) == first["length"]
    assert (blank["line"], blank["text"], blank["hypotheses"], blank["score"]) == (2, "", [], None)


def test_n_best_is_tsv_and_escapes(translate, folder) -> None:
    found, _ = translate(folder, [TEXTS[0], "", TEXTS[1]], "--n-best", 3, "--prefix", "a \\ b\tc")
    rows = [line.split("\t") for line in found]
    assert [row[0] + row[1] for row in rows] == ["11", "12", "13", "21", "31", "32", "33"]
    assert all(row[3].startswith("a \\\\ b\\tc") for row in rows if row[0] != "2")
    assert rows[3][2:] == ["", ""]
    scores = [float(row[2]) for row in rows[:3]]
    assert scores == sorted(scores, reverse=True)


def test_score_gives_the_numbers_of_translate(dragoman, translate, in_process, folder, tmp_path) -> None:
    answers, _ = translate(folder, TEXTS, "--json", "--alpha", 0.9, "--n-best", 2)
    found = [(a["source"], hypothesis) for a in map(json.loads, answers) for hypothesis in a["hypotheses"]]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{' '.join(h['tokens'])}\n" for source, h in found), encoding="utf-8")
    code, scored, _ = in_process("score", folder, "--tsv", pairs, "--tokens", "--alpha", 0.9)
    assert code == 0
    for row, (_, hypothesis) in zip(lines_of(scored.encode()), found, strict=True):
        score, log_prob, length = row.split("\t")
        assert float(score) == pytest.approx(hypothesis["score"], abs=1e-4)
        assert float(log_prob) == pytest.approx(hypothesis["log_prob"], abs=1e-4)
        assert int(length) == hypothesis["length"]
    text = dragoman("score", folder, "--tsv", "-", "--json", stdin=b"a dog ran!\twe are here\n")
    answer = json.loads(text.stdout)
    assert (answer["line"], answer["source"], answer["text"]) == (1, "a dog ran!", "we are here")
    assert answer["finished"]
    assert answer["log_prob"] == pytest.approx(sum(answer["token_log_probs"]), abs=1e-4)


def test_a_program_that_waits_for_each_answer_gets_it(folder, expected) -> None:
    """One line by pipe and no end of input: the answer arrives before the next line is written."""
    with subprocess.Popen(
        [sys.executable, "-m", "dragoman", "translate", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        for text, answer in zip(TEXTS, expected, strict=True):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode() == f"{answer}\n"
        process.stdin.write(TEXTS[0].encode())
        process.stdin.close()
        assert process.stdout.read().decode() == f"{expected[0]}\n"
    assert process.returncode == 0


def test_a_reader_that_leaves_is_nobody_s_fault(folder, tmp_path) -> None:
    source = tmp_path / "source"
    source.write_text("".join(f"{text}\n" for text in TEXTS * 100), encoding="utf-8")
    script = f'"{sys.executable}" -m dragoman translate "{folder}" --greedy < "{source}" | head -1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, check=False)
    assert done.stderr == b""
    assert len(lines_of(done.stdout)) == 1
    assert done.returncode == 0


def test_ctrl_c_ends_with_130(folder) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dragoman", "translate", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdin.write(f"{TEXTS[0]}\n".encode())
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in talk


def test_out_is_written_whole_or_not_at_all(in_process, folder, expected, tmp_path) -> None:
    source, out = tmp_path / "source", tmp_path / "target"
    source.write_text("\n".join(TEXTS), encoding="utf-8")
    assert in_process("translate", folder, source, "-o", out) == (0, "", "")
    assert lines_of(out.read_bytes()) == expected
    code, _, talk = in_process("translate", folder, source, "-o", out)
    assert code == 1
    assert "is there already; --force overwrites it" in talk
    source.write_bytes(b"a dog\n" * 3 + b"a \xc3\x28 dog\n")
    code, _, talk = in_process("translate", folder, source, "-o", out, "--force")
    assert code == 1
    assert f"{source}, line 4, byte 20" in talk
    assert lines_of(out.read_bytes()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    source.write_bytes(b"a \xc3\x28 dog\n")
    assert in_process("translate", folder, source, "-o", out, "--force", "--invalid-utf8", "replace")[0] == 0
    assert len(lines_of(out.read_bytes())) == 1


def test_out_writes_the_file_that_a_link_names(dragoman, in_process, folder, expected, tmp_path) -> None:
    source, out, link = tmp_path / "source", tmp_path / "target", tmp_path / "link"
    source.write_text("\n".join(TEXTS), encoding="utf-8")
    link.symlink_to(out)
    for force in ([], ["--force"]):
        assert in_process("translate", folder, source, "-o", link, *force) == (0, "", "")
        assert link.is_symlink()
        assert lines_of(out.read_bytes()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "source", "target"]
    if Path("/dev/stdout").exists():  # here a link to a pipe
        done = dragoman("translate", folder, source, "-o", "/dev/stdout")
        assert (lines_of(done.stdout), done.stderr) == (expected, b"")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_read_like_a_file(in_process, folder, expected, tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def answers(text: str, *arguments: object) -> list[str]:
        threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
        code, output, talk = in_process(*arguments)
        assert code == 0, talk
        return lines_of(output.encode())

    assert answers("".join(f"{text}\n" for text in TEXTS), "translate", folder, pipe) == expected
    assert len(answers("a dog ran!\twe are here\n", "score", folder, "--tsv", pipe)) == 1


def test_score_names_the_line_of_the_file(in_process, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dragoman.cli.score.CHUNK", 2)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a dog\t</s>\n" * 4 + "a dog\tnonsense-piece\n", encoding="utf-8")
    code, output, talk = in_process("score", folder, "--tsv", pairs, "--tokens")
    assert (code, output.count("\n")) == (1, 4)
    assert "target line 5: 'nonsense-piece' is no piece" in talk


def test_what_the_user_did_wrong_is_one_plain_sentence(in_process, folder, tmp_path) -> None:
    source = tmp_path / "source"
    source.write_text("a dog\n", encoding="utf-8")
    for arguments, code, told in (
        (["nowhere", source], 1, "nowhere does not exist"),
        ([folder, "no-such-file"], 1, "no-such-file: no such file"),
        ([folder, source, "--beam-sise", 3], 2, "did you mean --beam-size"),
        ([folder, source, "--penalty", "wu"], 2, "--penalty"),
        ([folder, source, "--n-best", 9], 1, "n_best 9 is more than the 4 of beam_size"),
        ([folder, source, "--greedy", "--sample"], 1, "greedy and sample exclude each other"),
        ([folder, source, "--greedy", "--beam-size", 8], 1, "beam_size belongs to beam search, and greedy search has"),
        ([folder, source, "--sample", "--beam-size", 8], 1, "beam_size belongs to beam search, and sampling has no"),
        ([folder, source, "--min-length", 99], 1, "which is the cap of line 1: its 3 source tokens with EOS"),
        ([folder, source, "--draft", folder], 1, "ask for greedy or sample"),
        ([folder, source, "--device", "abacus"], 1, "device 'abacus' cannot be used"),
        ([folder, source, "--threads", 3_000_000_000], 2, "invalid value for '--threads'"),
        ([folder, source, "--max-extra", 10**20], 1, "max_extra must be at most 1,000,000"),
    ):
        assert told in str(found := in_process("translate", *arguments))
        assert found[:2] == (code, "")
        assert found[2].count("\n") == 1
    bad = tmp_path / "bad.tsv"
    bad.write_text("a\tb\nc\n", encoding="utf-8")
    code, output, talk = in_process("score", folder, "--tsv", bad)
    assert code == 1
    assert "line 2: 1 column" in talk
    assert output.count("\n") <= 1


def test_long_lines(translate, in_process, folder, tmp_path) -> None:
    long = " ".join(TEXTS * 6)
    found, talk = translate(folder, ["a dog", long], "--json", "--long-input", "truncate")
    assert [json.loads(line)["truncated"] for line in found] == [False, True]
    assert talk.startswith("warning: line 2 has ")
    assert translate(folder, ["a dog", long], "--quiet", "--long-input", "truncate")[1] == ""
    found, _ = translate(folder, [long], "--json")
    assert json.loads(found[0])["pieces"] > 5
    code, _, talk = in_process("translate", folder, tmp_path / "to-translate", "--long-input", "error")
    assert code == 1
    assert "line 1 has" in talk


def test_ensemble_draft_and_alignment(translate, folder, expected) -> None:
    other = folder.parent / "other"
    assert translate(folder, TEXTS, "--ensemble", folder)[0] == expected
    both, _ = translate(folder, TEXTS, "--ensemble", other, "--json")
    reverse, _ = translate(other, TEXTS, "--ensemble", folder, "--json")
    assert [json.loads(line)["text"] for line in both] != expected
    for a, b in zip(map(json.loads, both), map(json.loads, reverse), strict=True):
        assert a["text"] == b["text"]
        assert a["score"] == pytest.approx(b["score"], abs=1e-4)
    assert translate(folder, TEXTS, "--greedy", "--draft", other) == translate(folder, TEXTS, "--greedy")
    aligned, _ = translate(folder, TEXTS, "--alignment")
    for line, text in zip(aligned, expected, strict=True):
        told, pairs = line.split("\t")
        assert told == text
        targets = [int(pair.split("-")[1]) for pair in pairs.split()]
        assert targets == list(range(len(targets)))


def test_models_with_other_tokenizers_cannot_work_together(in_process, folder, tmp_path) -> None:
    tokenizer = train_tokenizer([*TEXTS * 5, "zebra"], TokenizerConfig(vocab_size=310), tmp_path / "t", seed=1)
    spec = PaperSpec(n_layers=1, d_model=16, d_ff=24, n_heads=2)
    model = spec.build(len(tokenizer), tokenizer.pad_id)
    save_model(tmp_path / "stranger", model, tokenizer, RunConfig(DataConfig(), model=spec))
    (tmp_path / "source").write_text("a dog\n", encoding="utf-8")
    code, _, talk = in_process("translate", folder, tmp_path / "source", "--ensemble", tmp_path / "stranger")
    assert code == 1
    assert "only models with the same tokenizer can work together" in talk


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_other_precisions_answer(translate, folder, precision) -> None:
    found, talk = translate(folder, TEXTS, "--precision", precision)
    assert len(found) == len(TEXTS)
    assert talk == ""
