"""`dragoman translate` and `dragoman score` as processes: pipes, bytes, exit codes, files."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import subprocess
import sys
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
    for seed, name in ((1, "model"), (2, "other")):
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


def test_one_line_out_for_each_line_in(dragoman, folder, expected, tmp_path) -> None:
    source = f"{TEXTS[0]}\r\n\n{TEXTS[1]}\u2028{TEXTS[2]}\n \t\n{TEXTS[3]}"  # no line feed at the end
    done = dragoman("translate", folder, stdin=source.encode(), LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, b"")
    found = lines_of(done.stdout)
    assert len(found) == 5
    assert [found[0], found[1], found[3], found[4]] == [expected[0], "", "", expected[3]]
    file = tmp_path / "source.txt.gz"
    file.write_bytes(gzip.compress(b"\xef\xbb\xbf" + source.encode()))
    assert dragoman("translate", folder, file).stdout == done.stdout
    assert dragoman("translate", folder, "-", "--unbuffered", stdin=source.encode()).stdout == done.stdout


def test_json_has_the_promised_fields(dragoman, folder, expected) -> None:
    done = dragoman("translate", folder, "--json", "--n-best", 2, stdin=f"{TEXTS[0]}\n\n".encode())
    full, blank = (json.loads(line) for line in lines_of(done.stdout))
    first = full["hypotheses"][0]
    assert list(first) == ["text", "score", "log_prob", "length", "finished", "tokens", "token_log_probs"]
    assert {key: full[key] for key in first} == first
    assert (full["line"], full["source"], full["text"]) == (1, TEXTS[0], expected[0])
    assert (full["truncated"], full["pieces"], len(full["hypotheses"])) == (False, 1, 2)
    assert first["score"] == pytest.approx(first["log_prob"] / ((5 + first["length"]) / 6) ** 0.6)
    assert len(first["tokens"]) == len(first["token_log_probs"]) == first["length"]
    assert (blank["line"], blank["text"], blank["hypotheses"], blank["score"]) == (2, "", [], None)


def test_n_best_is_tsv_and_escapes(dragoman, folder) -> None:
    done = dragoman(
        "translate", folder, "--n-best", 3, "--prefix", "a \\ b\tc", stdin=f"{TEXTS[0]}\n\n{TEXTS[1]}\n".encode()
    )
    rows = [line.split("\t") for line in lines_of(done.stdout)]
    assert [row[:2] for row in rows] == [
        ["1", "1"],
        ["1", "2"],
        ["1", "3"],
        ["2", "1"],
        ["3", "1"],
        ["3", "2"],
        ["3", "3"],
    ]
    assert all(row[3].startswith("a \\\\ b\\tc") for row in rows if row[0] != "2")
    assert rows[3][2:] == ["", ""]
    scores = [float(row[2]) for row in rows[:3]]
    assert scores == sorted(scores, reverse=True)


def test_score_gives_the_numbers_of_translate(dragoman, folder, tmp_path) -> None:
    options = ["--alpha", 0.9, "--n-best", 2]
    done = dragoman("translate", folder, "--json", *options, stdin="\n".join(TEXTS).encode())
    found = [
        (answer["source"], hypothesis)
        for answer in map(json.loads, lines_of(done.stdout))
        for hypothesis in answer["hypotheses"]
    ]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{' '.join(h['tokens'])}\n" for source, h in found), encoding="utf-8")
    scored = lines_of(dragoman("score", folder, "--tsv", pairs, "--tokens", "--alpha", 0.9).stdout)
    for row, (_, hypothesis) in zip(scored, found, strict=True):
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


def test_out_is_written_whole_or_not_at_all(dragoman, folder, expected, tmp_path) -> None:
    source, out = tmp_path / "source", tmp_path / "target"
    source.write_text("\n".join(TEXTS), encoding="utf-8")
    assert dragoman("translate", folder, source, "-o", out).stdout == b""
    assert lines_of(out.read_bytes()) == expected
    again = dragoman("translate", folder, source, "-o", out)
    assert again.returncode == 1
    assert b"is there already; --force overwrites it" in again.stderr
    source.write_bytes(b"a dog\n" * 3 + b"a \xc3\x28 dog\n")
    broken = dragoman("translate", folder, source, "-o", out, "--force")
    assert broken.returncode == 1
    assert f"{source}, line 4, byte 20".encode() in broken.stderr
    assert lines_of(out.read_bytes()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    source.write_bytes(b"a \xc3\x28 dog\n")
    assert dragoman("translate", folder, source, "-o", out, "--force", "--invalid-utf8", "replace").returncode == 0
    assert len(lines_of(out.read_bytes())) == 1


@pytest.fixture
def in_process(monkeypatch, capsys):
    """The command line without a process of its own; the logging that it sets up is taken back."""
    log = logging.getLogger("dragoman")
    monkeypatch.setattr(log, "handlers", log.handlers)
    monkeypatch.setattr(log, "propagate", log.propagate)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = exit_code([*map(str, arguments)])
        return code, *capsys.readouterr()

    return run


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
        ([folder, source, "--min-length", 99], 1, "which is the cap of line 1: its 3 source tokens with EOS"),
        ([folder, source, "--draft", folder], 1, "ask for greedy or sample"),
        ([folder, source, "--device", "abacus"], 1, "device 'abacus' cannot be used"),
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


def test_long_lines(dragoman, folder) -> None:
    long = " ".join(TEXTS * 6)
    done = dragoman("translate", folder, "--json", "--long-input", "truncate", stdin=f"a dog\n{long}\n".encode())
    assert [json.loads(line)["truncated"] for line in lines_of(done.stdout)] == [False, True]
    assert done.stderr.startswith(b"warning: line 2 has ")
    quiet = dragoman("translate", folder, "--quiet", "--long-input", "truncate", stdin=f"a dog\n{long}\n".encode())
    assert quiet.stderr == b""
    done = dragoman("translate", folder, "--json", stdin=f"{long}\n".encode())
    assert json.loads(done.stdout)["pieces"] > 5
    done = dragoman("translate", folder, "--long-input", "error", stdin=f"a dog\n{long}\n".encode())
    assert done.returncode == 1
    assert b"line 2 has" in done.stderr


def test_ensemble_draft_and_alignment(dragoman, folder, expected) -> None:
    other = folder.parent / "other"
    source = "\n".join(TEXTS).encode()
    twice = dragoman("translate", folder, "--ensemble", folder, stdin=source)
    assert lines_of(twice.stdout) == expected
    both = dragoman("translate", folder, "--ensemble", other, "--json", stdin=source)
    reverse = dragoman("translate", other, "--ensemble", folder, "--json", stdin=source)
    assert lines_of(both.stdout) != expected
    for a, b in zip(map(json.loads, lines_of(both.stdout)), map(json.loads, lines_of(reverse.stdout)), strict=True):
        assert a["text"] == b["text"]
        assert a["score"] == pytest.approx(b["score"], abs=1e-4)
    greedy = dragoman("translate", folder, "--greedy", stdin=source)
    assert dragoman("translate", folder, "--greedy", "--draft", other, stdin=source).stdout == greedy.stdout
    aligned = lines_of(dragoman("translate", folder, "--alignment", stdin=source).stdout)
    for line, text in zip(aligned, expected, strict=True):
        told, pairs = line.split("\t")
        assert told == text
        targets = [int(pair.split("-")[1]) for pair in pairs.split()]
        assert targets == list(range(len(targets)))


def test_models_with_other_tokenizers_cannot_work_together(dragoman, folder, tmp_path) -> None:
    tokenizer = train_tokenizer([*TEXTS * 5, "zebra"], TokenizerConfig(vocab_size=310), tmp_path / "t", seed=1)
    spec = PaperSpec(n_layers=1, d_model=16, d_ff=24, n_heads=2)
    model = spec.build(len(tokenizer), tokenizer.pad_id)
    save_model(tmp_path / "stranger", model, tokenizer, RunConfig(DataConfig(), model=spec))
    done = dragoman("translate", folder, "--ensemble", tmp_path / "stranger", stdin=b"a dog\n")
    assert done.returncode == 1
    assert b"only models with the same tokenizer can work together" in done.stderr


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_other_precisions_answer(dragoman, folder, precision) -> None:
    done = dragoman("translate", folder, "--precision", precision, stdin="\n".join(TEXTS).encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(lines_of(done.stdout)) == len(TEXTS)
