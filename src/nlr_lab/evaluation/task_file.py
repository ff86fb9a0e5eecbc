"""What a task over local rows is: the declarative part as lm-eval's task files have it, and its questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rows import DataFile


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of lm-eval whose questions lie here."""

    name: str
    config: dict[str, Any]
    """A task file of lm-eval, but for `task` and what names its data."""
    docs: Sequence[dict[str, Any]]
    """The questions, in the file's order, with the fields that `config` reads; all of the same fields."""
    shots: Sequence[dict[str, Any]] = ()
    """Answered examples to put in front, in this order."""
    published: int
    """Questions of the published test; with another number, a score is not comparable with published ones."""
    files: Sequence[DataFile]
    """What the questions and examples were read from."""


@dataclass(frozen=True, kw_only=True)
class LocalGroup:
    """Tasks that are reported together."""

    name: str
    members: Sequence[str]
    """Names of tasks, or of groups that come before this one."""
    by: str
    """"questions": the share of right answers over all questions; "members": the mean of the members' shares."""
    published: int
    """Questions of the published tests, also of members that have none here."""
    metric: str = "acc"
    """The name under which it is reported."""


@dataclass(frozen=True, kw_only=True)
class LocalTasks:
    """All that was asked for of one kind."""

    tasks: Sequence[LocalTask] = ()
    groups: Sequence[LocalGroup] = ()
    hidden: frozenset[str] = field(default_factory=frozenset)
    """Tasks that a table need not show, being many and part of a group; results have them."""

    def files(self) -> list[DataFile]:
        """Every file once, in the order of the tasks."""
        return list(dict.fromkeys(file for task in self.tasks for file in task.files))

    def only(self, wanted: Callable[[str], bool]) -> "LocalTasks":
        """The tasks and groups of some names."""
        return LocalTasks(
            tasks=[task for task in self.tasks if wanted(task.name)],
            groups=[group for group in self.groups if wanted(group.name)],
            hidden=self.hidden,
        )

    def __add__(self, other: "LocalTasks") -> "LocalTasks":
        return LocalTasks(
            tasks=[*self.tasks, *other.tasks],
            groups=[*self.groups, *other.groups],
            hidden=self.hidden | other.hidden,
        )
