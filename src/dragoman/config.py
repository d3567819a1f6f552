"""Strict TOML <-> frozen dataclasses. Knows no station: each owns its dataclass, `run.py` joins them.

Precedence is preset < file < `--set`; the trees are merged here before they are checked once, as a whole, so that every
fault is named together with its dotted key and, for a misspelt key, the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ConfigDict, TypeAdapter, ValidationError

from dragoman.errors import ConfigError

T = TypeVar("T")
Tree = dict[str, Any]

_STRICT = ConfigDict(extra="forbid", strict=False)


def read_toml(path: str | Path) -> Tree:
    """The tables of a TOML file. Raises ConfigError with file, line and column."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; a run is one TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8 at byte {error.start}; TOML files are UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def merge(cls: type[Any], below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """`above` laid over `below`, both trees of the dataclass `cls`, table by table.

    Where both name a `kind`, and no class has both kinds, the table above replaces the whole one below: the one's keys
    mean nothing to the other. A `kind` that is a plain field of one class (a tokenizer's algorithm) is a key like any.
    """
    return _merge([cls], below, above)


def _merge(classes: list[Any], below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """As `merge`, where the tree may be of any of `classes`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = value
        if isinstance(old, dict) and isinstance(value, dict):
            inner = _classes_at(classes, key)
            if not _names_another_class(inner, old, value):
                merged[key] = _merge(inner, old, value)
    return merged


def _names_another_class(classes: list[Any], old: Tree, new: Tree) -> bool:
    """Whether two tables, each of one of `classes`, name kinds that no one of these has both of."""
    if "kind" not in old or "kind" not in new or old["kind"] == new["kind"]:
        return False
    kinds = [typing.get_args(typing.get_type_hints(each).get("kind")) for each in classes]
    return not any(old["kind"] in each and new["kind"] in each for each in kinds)


def set_values(tree: Mapping[str, Any], assignments: Iterable[str]) -> Tree:
    """The tree with `a.b=value` laid over it; a value is a TOML literal, or else a bare string.

    Nothing but the keys assigned changes, in whatever order: what a `kind` replaces is for `merge`, once all are there.
    """
    wrong = []
    merged = dict(tree)
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            wrong.append(f"--set {assignment!r}: expected key=value, such as training.max_steps=1000")
            continue
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        merged = _overlay(merged, functools.reduce(lambda inner, key: {key: inner}, reversed(keys), value))
    if wrong:
        raise ConfigError(wrong)
    return merged


def _overlay(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def build(cls: type[T], tree: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from a tree. Raises ConfigError with every fault, each with its dotted key."""
    try:
        config: T = _adapter(cls).validate_python(merge(cls, _defaults(cls), tree))
        return config
    except ValidationError as error:
        prefix = f"{where}: " if where else ""
        faults = _innermost(error.errors(), cls)
        raise ConfigError([prefix + line for fault in faults for line in _sentences(cls, fault)]) from None


def tree_of(config: Any) -> Tree:
    """A dataclass as plain tables; None, which TOML cannot write, is left out."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a dataclass instance is expected, not {type(config).__name__}")
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) is not None
    }


def dump_toml(config: Any) -> str:
    """A dataclass as TOML text that `build` reads back to an equal one."""
    return tomli_w.dumps(tree_of(config))


def json_schema(cls: type[Any]) -> Tree:
    """The JSON schema of a config, from which editors complete."""
    return _adapter(cls).json_schema()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tree_of(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value


def _defaults(cls: type[Any]) -> Tree:
    """The tables that `cls` has by default, so that a table which names no `kind` alters the default one."""
    return {
        field.name: tree_of(field.default_factory())
        for field in dataclasses.fields(cls)
        if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(field.default_factory())
    } | {
        field.name: tree_of(field.default)
        for field in dataclasses.fields(cls)
        if dataclasses.is_dataclass(field.default) and not isinstance(field.default, type)
    }


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    """pydantic's checker of a dataclass, made once."""
    if cls not in _adapters:
        for part in _dataclasses_in(cls):
            part.__pydantic_config__ = _STRICT  # pydantic's own hook for plain dataclasses
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def _dataclasses_in(hint: Any) -> Iterator[Any]:
    """Every dataclass that a type hint can hold, itself included."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from _dataclasses_in(inner)
    else:
        for argument in typing.get_args(hint):
            yield from _dataclasses_in(argument)


def _innermost(faults: Iterable[Any], cls: type[Any]) -> list[Any]:
    """The faults without those of union members that a value was never meant for: the deepest says what is wrong."""
    keyed = [(tuple(part for part in map(str, fault["loc"]) if not _is_tag(part, cls)), fault) for fault in faults]

    def is_shadowed(key: tuple[str, ...]) -> bool:
        return any(other[: len(key)] == key and len(other) > len(key) for other, _ in keyed)

    return [fault for key, fault in keyed if not (fault["type"].endswith("_type") and is_shadowed(key))]


def _sentences(cls: type[Any], fault: Any) -> list[str]:
    """One pydantic fault as plain sentences: several, where a `__post_init__` found several."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(part for part in path if not _is_tag(part, cls))
    if fault["type"] == "value_error":
        cause = fault["ctx"]["error"]
        reasons = cause.problems if isinstance(cause, ConfigError) else [str(cause)]
        return [reason if not key or key in reason else f"{key}: {reason}" for reason in reasons]
    return [_sentence(cls, fault, path, key)]


def _sentence(cls: type[Any], fault: Any, path: list[str], key: str) -> str:
    match fault["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            known = _known_keys(cls, path[:-1])
            near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
            return f"unknown key {key!r}{hint}"
        case "missing" | "missing_argument":
            return f"{key} is required and missing"
        case "union_tag_invalid":
            expected = fault["ctx"]["expected_tags"]
            tag = fault["ctx"]["tag"]
            near = difflib.get_close_matches(str(tag), [word.strip("' ") for word in expected.split(",")], n=1)
            return f"{key}.kind: {tag!r} is not known; expected one of {expected}" + (
                f"; did you mean {near[0]!r}?" if near else ""
            )
        case "literal_error":
            return f"{key} must be {fault['ctx']['expected']}, not {fault['input']!r}"
        case _:
            reason = fault["msg"].removeprefix("Input should be ")
            return f"{key} should be {reason}, not {fault['input']!r}"


def _is_tag(part: str, cls: type[Any]) -> bool:
    """pydantic names the member of a union in a fault's path: not a key that the user wrote."""
    names = {inner.__name__ for inner in _dataclasses_in(cls)}
    kinds = {_kind(inner) for inner in _dataclasses_in(cls)}
    return (
        part in names
        or part in kinds
        or part.startswith(("function-", "list[", "dict[", "tuple["))
        or part in ("str", "int", "float", "bool")
    )


def _kind(cls: Any) -> str | None:
    for field in dataclasses.fields(cls):
        if field.name == "kind" and isinstance(field.default, str):
            return field.default
    return None


def _known_keys(cls: type[Any], path: list[str]) -> list[str]:
    """The keys that the table at `path` may hold."""
    hint: Any = cls
    for part in path:
        candidates = (
            list(_dataclasses_in(hint)) if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)) else [hint]
        )
        tagged = [inner for inner in candidates if part in (inner.__name__, _kind(inner))]
        if tagged:
            hint = tagged[0]
            continue
        fields = [typing.get_type_hints(inner)[part] for inner in candidates if part in typing.get_type_hints(inner)]
        if fields:
            hint = fields[0]
    candidates = [hint] if isinstance(hint, type) and dataclasses.is_dataclass(hint) else list(_top_dataclasses(hint))
    return [field.name for inner in candidates for field in dataclasses.fields(inner)]


def _classes_at(classes: Iterable[Any], key: str) -> list[Any]:
    """The dataclasses that the table under `key` of one of `classes` may become."""
    hints = [typing.get_type_hints(each).get(key) for each in classes]
    return [inner for hint in hints for inner in ([hint] if dataclasses.is_dataclass(hint) else _top_dataclasses(hint))]


def _top_dataclasses(hint: Any) -> Iterator[Any]:
    """The dataclasses among a union's members, without what they hold."""
    for argument in typing.get_args(hint):
        if isinstance(argument, type) and dataclasses.is_dataclass(argument):
            yield argument
        elif isinstance(argument, types.UnionType) or typing.get_args(argument):
            yield from _top_dataclasses(argument)
