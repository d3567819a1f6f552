"""`import`: a Hugging Face folder becomes a model folder of ours. Nothing in it is run, and nothing in it is ignored.

A family of models is one row of `FAMILIES`: how to read its configuration, its tokenizer and its names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dragoman import config as toml
from dragoman.checkpoints import store
from dragoman.checkpoints.atomic import write_folder
from dragoman.decoding.options import DecodingConfig
from dragoman.errors import ModelError
from dragoman.exchange import marian_config
from dragoman.exchange import marian_names as names
from dragoman.exchange.folder import read_bytes, read_json, read_tensors
from dragoman.exchange.layout import KEPT
from dragoman.model.choices import EncoderDecoderSpec
from dragoman.model.positions.sinusoidal import halves_order
from dragoman.model.transformer import sinusoids
from dragoman.run import RunConfig
from dragoman.text.corpus import DataConfig
from dragoman.tokens.marian import SOURCE, TARGET, VOCABULARY, MarianTokenizer, read_processor
from dragoman.tokens.tokenizer import FACTS_FILE, Tokenizer, TokenizerConfig, load_tokenizer


@dataclass(frozen=True)
class Imported:
    """What a foreign folder holds, in our terms."""

    spec: EncoderDecoderSpec
    tensors: dict[str, Tensor]
    """By our names, float32."""
    tokenizer: Tokenizer
    config: RunConfig
    """What `config.toml` will say."""


def import_folder(
    source: str | Path, out: str | Path, *, force: bool = False, src_lang: str = "", tgt_lang: str = ""
) -> None:
    """Read the folder (or the hub's `owner/name`) `source` and write a model folder `out`, all of it or nothing.

    `src_lang` and `tgt_lang` stand in for what the folder says. Raises ModelError with every problem at once.
    """
    folder, out = locate(source), Path(out)
    problems = []
    if out.exists() and not force:
        problems.append(f"{out} exists already: choose another --out, or give --force to replace it")
    found = read(folder, problems)
    if found is None or problems:
        raise ModelError(problems)
    data = found.config.data
    data = replace(data, src_lang=src_lang or data.src_lang, tgt_lang=tgt_lang or data.tgt_lang)
    config = replace(found.config, data=data)
    model = store.empty_model(found.spec, found.tokenizer)
    _load(model, found.tensors)
    write_folder(
        out,
        lambda target: store.save_model(target, model, found.tokenizer, config, {"imported_from": str(source)}),
    )


def locate(source: str | Path) -> Path:
    """A local folder as it is; `owner/name` is fetched from the hub, or from its cache without a network."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    parts = str(source).split("/")
    if folder.exists() or len(parts) != 2 or not all(parts) or parts[0].startswith((".", "~")):
        raise ModelError(f"{source} is not a folder; a model is a folder, or a name on the hub such as owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.spm", "*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{source} is no folder here, and the hub did not give it: {reason}") from None


def read(folder: Path, problems: list[str]) -> Imported | None:
    """What the folder holds, or None; everything that is wrong with it is added to `problems`."""
    config = read_json(folder / "config.json", problems)
    if not config:
        read_tensors(folder, problems)
        return None
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        problems.append(
            f"{folder / 'config.json'}: the architecture {kind!r} is not supported; this version imports "
            + ", ".join(FAMILIES)
        )
        read_tensors(folder, problems)
        return None
    return family(folder, config, problems)


def read_marian(folder: Path, config: Mapping[str, Any], problems: list[str]) -> Imported | None:
    """A MarianMT folder: sinusoids in halves, two SentencePiece models, and a decoder that starts with padding."""
    where = str(folder / "config.json")
    architectures = config.get("architectures") or ["MarianMTModel"]
    if architectures != ["MarianMTModel"]:
        problems.append(f"{where}: the architecture {architectures} is not supported; marian means MarianMTModel here")
    generation = read_json(folder / "generation_config.json", problems, required=False)
    problems += marian_config.check_keys(config, where)
    problems += marian_config.check_keys(generation, str(folder / "generation_config.json"))
    merged = {**config, **{key: value for key, value in generation.items() if value is not None}}
    spec = marian_config.spec_of(merged, where, problems)
    settings = read_json(folder / "tokenizer_config.json", problems, required=False)
    kept = folder / KEPT if (folder / KEPT / FACTS_FILE).exists() else None
    tokenizer: Tokenizer | None
    if kept is None:
        tokenizer = _tokenizer(folder, merged, settings, problems)
    else:
        tokenizer = _kept_tokenizer(kept, merged, problems)
    tensors = read_tensors(folder, problems)
    if spec is not None and tensors is not None:
        spec, tensors = _ours(spec, tensors, config["vocab_size"], folder, problems)
    if spec is None or tokenizer is None or tensors is None or problems:
        return None
    if kept is not None:  # our own export comes home
        return Imported(spec, tensors, tokenizer, replace(store.read_config(kept), model=spec))
    lengths = [settings.get("model_max_length"), config.get("max_position_embeddings")]
    limits = [int(length) for length in lengths if isinstance(length, int) and 0 < length < 1_000_000]
    data = DataConfig(
        # "src" and "tgt" are what transformers writes where nobody said the language.
        src_lang=_language(settings.get("source_lang"), "src"),
        tgt_lang=_language(settings.get("target_lang"), "tgt"),
        max_length=min(limits, default=512),
    )
    decoding = toml.build(DecodingConfig, marian_config.decoding_of(merged), where=where)
    # What [tokenizer] says is how to train one; this one came trained.
    pieces = TokenizerConfig(vocab_size=len(tokenizer), normalization="identity")
    return Imported(spec, tensors, tokenizer, RunConfig(data=data, tokenizer=pieces, model=spec, decoding=decoding))


FAMILIES: dict[str, Callable[[Path, Mapping[str, Any], list[str]], Imported | None]] = {"marian": read_marian}


def _language(code: Any, placeholder: str) -> str:
    return str(code) if code and code != placeholder else ""


def _tokenizer(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], problems: list[str]
) -> MarianTokenizer | None:
    """The two models and their vocabulary."""
    before = len(problems)
    where = folder / "tokenizer_config.json"
    if settings.get("separate_vocabs"):
        problems.append(f"{where}: separate_vocabs is set: a vocabulary of its own for each side is not supported")
    if settings.get("sp_model_kwargs"):
        problems.append(f"{where}: sp_model_kwargs {settings['sp_model_kwargs']!r} are not supported")
    if settings.get("tokenizer_class", "MarianTokenizer") != "MarianTokenizer":
        problems.append(f"{where}: the tokenizer {settings['tokenizer_class']!r} is not supported; MarianTokenizer is")
    models = {name: read_bytes(folder / name, problems) for name in (SOURCE, TARGET)}
    for name, data in models.items():
        try:
            if data:
                read_processor(data)
        except ModelError as error:
            problems.append(f"{folder / name}: {error}")
    vocabulary = read_json(folder / VOCABULARY, problems)
    banned = marian_config.banned_of(config, str(folder / "config.json"), problems)
    size = config.get("vocab_size")
    if vocabulary and len(vocabulary) != size:
        problems.append(
            f"{folder / VOCABULARY} has {len(vocabulary)} pieces, and {folder / 'config.json'} says vocab_size {size}: "
            "the vocabulary and the embedding must agree"
        )
    unk = _content(settings.get("unk_token"), "<unk>")
    if vocabulary and unk not in vocabulary:
        problems.append(f"{folder / VOCABULARY} has no entry for the unknown token {unk!r}")
    if len(problems) > before or not all(isinstance(config.get(key), int) for key in marian_config.REQUIRED):
        return None
    try:
        return MarianTokenizer(
            models[SOURCE],
            models[TARGET],
            vocabulary,
            pad_id=config["pad_token_id"],
            unk_id=vocabulary[unk],
            bos_id=config["decoder_start_token_id"],
            eos_id=config["eos_token_id"],
            banned_ids=banned,
        )
    except ModelError as error:
        problems += [f"{folder}: {problem}" for problem in error.problems]
        return None


def _kept_tokenizer(kept: Path, config: Mapping[str, Any], problems: list[str]) -> Tokenizer | None:
    """The tokenizer of an export of ours, which must still be that of the model around it."""
    try:
        tokenizer = load_tokenizer(kept)
    except ModelError as error:
        problems += error.problems
        return None
    facts = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
    }
    wrong = [
        f"{kept}: the tokenizer has {key} {value}, and {kept.parent / 'config.json'} says {config.get(key)!r}"
        for key, value in facts.items()
        if config.get(key) != value
    ]
    problems += wrong
    return None if wrong else tokenizer


def _content(token: Any, default: str) -> str:
    """A special token is a string, or an object whose `content` is one."""
    return str(token.get("content", default)) if isinstance(token, dict) else str(token or default)


def _ours(
    spec: EncoderDecoderSpec, tensors: dict[str, Tensor], vocab_size: int, folder: Path, problems: list[str]
) -> tuple[EncoderDecoderSpec, dict[str, Tensor]]:
    """Their tensors under our names, and the spec with what only the tensors tell (a bias, embeddings of their own)."""
    theirs = dict(tensors)
    table = dict(names.layer_names(spec.n_layers, spec.decoder_layers))
    if spec.share_embeddings and not spec.tie_output and names.SOURCE in theirs and names.TARGET in theirs:
        # transformers 5 reads three matrices here, whatever "shared" holds
        spec = replace(spec, share_embeddings=False)
        theirs.pop(names.SHARED, None)
    shared = names.SHARED if names.SHARED in theirs else names.SOURCE
    if spec.share_embeddings:
        table[shared] = "embedding.weight"
    else:
        table |= {names.SOURCE: "embedding.weight", names.TARGET: "target_embedding.weight"}
    if not spec.tie_output:
        table[names.OUTPUT] = "generator.weight"
    bias = theirs.pop(names.BIAS, None)
    if bias is not None and bool(bias.count_nonzero()):
        spec = replace(spec, output_bias=True)
        theirs[names.BIAS] = bias.flatten()
        table[names.BIAS] = "generator.bias"
    elif bias is not None and bias.numel() != vocab_size:
        problems.append(f"{folder}: {names.BIAS} has {bias.numel()} entries, and the vocabulary {vocab_size}")

    _drop_copies(theirs, table, folder, problems)
    for position in names.POSITIONS:
        _drop_sinusoids(theirs, position, folder, problems)

    with torch.device("meta"):
        own = spec.build(vocab_size, 0).state_dict()
    ours = {}
    for name, mine in table.items():
        given = theirs.pop(name, None)
        if given is None:
            problems.append(f"{folder} lacks the tensor {name}")
        elif given.shape != own[mine].shape:
            wanted = list(own[mine].shape)
            problems.append(f"{folder}: {name} has the shape {list(given.shape)}, and config.json makes it {wanted}")
        elif not given.is_floating_point():
            problems.append(f"{folder}: {name} holds {given.dtype}; only floating-point weights are supported")
        else:
            ours[mine] = given.float()
    problems += [f"{folder} has a tensor {name}, which this version does not know" for name in theirs]
    return spec, ours


def _drop_copies(theirs: dict[str, Tensor], table: Mapping[str, str], folder: Path, problems: list[str]) -> None:
    """Tied matrices may stand in a file under each of their names; they must then be the same."""
    matrix = theirs.get(names.SHARED, theirs.get(names.TARGET, theirs.get(names.SOURCE)))
    for name in (names.SOURCE, names.TARGET, names.OUTPUT):
        if name in theirs and name not in table:
            copy = theirs.pop(name)
            if matrix is not None and (copy.shape != matrix.shape or not torch.equal(copy, matrix)):
                problems.append(f"{folder}: {name} is tied by config.json, but differs from the matrix it is tied to")


def _drop_sinusoids(theirs: dict[str, Tensor], name: str, folder: Path, problems: list[str]) -> None:
    """Positions are computed; a file that holds others than the usual ones is another model."""
    table = theirs.pop(name, None)
    if table is None:
        return
    length, d_model = table.shape
    if d_model % 2 or not torch.allclose(
        table.float(), sinusoids(length, d_model)[:, halves_order(d_model)], atol=1e-3
    ):
        problems.append(f"{folder}: {name} does not hold Marian's sinusoids; learned positions are not supported")


def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors, whose names and shapes have been checked, in the model; tied names follow."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
