"""Foreign models made on the spot: MarianMT folders with random weights, written by transformers itself."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may need a network
transformers = pytest.importorskip("transformers")

_SYLLABLES = [a + b for a in "bdfglmnprst" for b in ("a", "e", "i", "o", "u", "ar", "en", "il")]


def sentences(n: int, seed: int) -> list[str]:
    """Lines of invented words, always the same for a seed."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=rng.randint(2, 9))).capitalize() + "." for _ in range(n)]


def sentencepiece_model(lines: list[str], vocab_size: int, **options: Any) -> bytes:
    """A SentencePiece model trained on `lines`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, minloglevel=2, **options
    )
    return model.getvalue()


@dataclass(frozen=True)
class Shape:
    """A MarianMT model to be."""

    activation: str = "relu"
    share: bool = True
    tie: bool = True
    d_model: int = 24
    encoder_layers: int = 2
    decoder_layers: int = 2
    heads: int = 3
    d_ff: int = 40
    vocab_size: int = 301
    bias: bool = True
    scale: bool = True


SHAPES = {
    "tiny": Shape(),
    "swish-uneven": Shape("swish", decoder_layers=1, vocab_size=277, scale=False),
    "untied": Shape("gelu", share=False, tie=False, vocab_size=333, bias=False),
    "softmax-apart": Shape("swish", tie=False),
    "target-tied": Shape("relu", share=False),
}
BASE = Shape("swish", d_model=512, encoder_layers=6, decoder_layers=6, heads=8, d_ff=2048, vocab_size=4097)


def make_marian(folder: Path, shape: Shape, **settings: Any) -> Path:
    """A Hugging Face folder with random weights, large enough for logits to differ clearly."""
    folder.mkdir(parents=True)
    source = sentencepiece_model(sentences(400, 1), 150, model_type="bpe")
    target = sentencepiece_model(sentences(400, 2), 160, model_type="unigram")
    pieces: list[str] = ["</s>", "<unk>", ">>deu<<"]
    for data in (source, target):
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        pieces += [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    pieces = list(dict.fromkeys(pieces))[: shape.vocab_size - 1]
    pieces += [f"filler{i}" for i in range(shape.vocab_size - 1 - len(pieces))] + ["<pad>"]
    pad = shape.vocab_size - 1
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
    names = {"tokenizer_class": "MarianTokenizer", "source_lang": "eng", "target_lang": "deu", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    config = transformers.MarianConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.d_ff,
        decoder_ffn_dim=shape.d_ff,
        activation_function=shape.activation,
        share_encoder_decoder_embeddings=shape.share,
        tie_word_embeddings=shape.tie,
        scale_embedding=shape.scale,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=None,
        max_position_embeddings=512,
        **settings,
    )
    torch.manual_seed(11)
    model = transformers.MarianMTModel(config)
    std = 0.6 * shape.d_model**-0.5  # larger, and attention is so sharp that rounding alone moves it
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.1 if parameter.dim() == 1 else std)
            if name.endswith(("shared.weight", "embed_tokens.weight")):
                parameter[pad].zero_()
        if shape.bias:
            model.final_logits_bias.normal_(std=0.3)
    model.generation_config.bad_words_ids = [[pad]]
    model.generation_config.num_beams = 4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def lines() -> Callable[[int, int], list[str]]:
    return sentences


@pytest.fixture(scope="session")
def trained(shared: Path) -> Path:
    """The MarianMT model that was trained on Multi30k."""
    return shared / "models" / "marian-small-en-de"


@pytest.fixture(scope="session")
def flickr(shared: Path) -> Callable[[str, int], list[str]]:
    """The first lines of Multi30k's test_2016_flickr in a language."""

    def get(language: str, n: int) -> list[str]:
        path = shared / "data" / "multi30k-en-de" / f"test_2016_flickr.{language}"
        return path.read_text(encoding="utf-8").split("\n")[:n]

    return get


@pytest.fixture(scope="session")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a named shape, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            shape = {**SHAPES, "base": BASE}[name]
            made[name] = make_marian(tmp_path_factory.mktemp("marian") / name, shape)
        return made[name]

    return get


@pytest.fixture
def copy_of(marian: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a folder that a test may spoil."""

    def get(name: str) -> Path:
        import shutil

        return Path(shutil.copytree(marian(name), tmp_path / f"{name}-copy"))

    return get


PAPER_SIZES = {"n_layers": 2, "d_model": 24, "d_ff": 40, "n_heads": 3}


def make_paper(folder: Path, kind: str = "bpe", spec: Any = None) -> Path:
    """A model folder of our own with random weights, large enough for logits to differ clearly."""
    from dragoman.checkpoints.store import save_model
    from dragoman.model.choices import PaperSpec
    from dragoman.run import RunConfig
    from dragoman.text.corpus import DataConfig
    from dragoman.tokens.tokenizer import TokenizerConfig, train_tokenizer

    config = TokenizerConfig(kind=kind, vocab_size=520, byte_fallback=True)
    words = [*sentences(400, 1), *sentences(400, 2), "日本，你好。", "Straße 3.14"]
    tokenizer = train_tokenizer(words, config, folder, seed=1, log=lambda *words: None)
    spec = spec or PaperSpec(**PAPER_SIZES)
    torch.manual_seed(5)
    model = spec.build(len(tokenizer), tokenizer.pad_id).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.1 if parameter.dim() == 1 else 0.2)
        # Random bytes are no text, and tokenizers show such runs each in their own way: keep them unlikely.
        rows = [tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        model.generator.weight[rows] *= 0.01
    data = DataConfig(src_lang="en", tgt_lang="de", train="somewhere/train.tsv", max_length=200)
    save_model(folder, model, tokenizer, RunConfig(data=data, tokenizer=config, model=spec))
    return folder


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory, marian: Callable[[str], Path]) -> Callable[[str], Path]:
    """Model folders of ours: `paper`, `unigram`, `pre_norm`, and imported ones by the name of their shape."""
    from dragoman.exchange.huggingface import import_folder
    from dragoman.model.choices import EncoderDecoderSpec, Positionwise, PreLN

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name in made:
            return made[name]
        folder = tmp_path_factory.mktemp("ours") / name
        if name == "pre_norm":
            gelu = Positionwise(activation="gelu")
            spec = EncoderDecoderSpec(**PAPER_SIZES, residual=PreLN(), feed_forward=gelu, tie_output=False)
            make_paper(folder, spec=spec)
        elif name in ("paper", "unigram"):
            make_paper(folder, "bpe" if name == "paper" else "unigram")
        else:
            import_folder(marian(name), folder)
        made[name] = folder
        return folder

    return get
