"""The few errors that a user can meet.

Each carries every problem of one input, in plain sentences that say what was wrong, where, and what to do next.
The command line prints them on stderr and exits with `exit_code`; a traceback is kept for our own mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence


class DragomanError(Exception):
    """The user's input or environment is at fault; `problems` holds one plain sentence for each fault."""

    exit_code = 1

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in self.problems)


class ConfigError(DragomanError, ValueError):
    """A TOML file, a `--set` or an option holds something that dragoman cannot use.

    A ValueError too, so that a dataclass may raise it from `__post_init__` and `config.build` still names all faults.
    """


class DataError(DragomanError):
    """A corpus or an input text is missing, malformed or not parallel."""


class ModelError(DragomanError):
    """A model folder, a checkpoint or a foreign model cannot be used as it stands."""


class TrainingError(DragomanError):
    """Training cannot go on: the loss is not finite, a rank has died, a disk is full."""


class UsageError(DragomanError):
    """The command line itself is wrong."""

    exit_code = 2
