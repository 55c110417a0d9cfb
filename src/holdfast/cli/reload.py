"""Restarts the worker of `dev` when graph code has changed and the new code loads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog
from watchfiles import Change, DefaultFilter, watch

from holdfast.errors import ConfigError
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.dependencies import import_directories

log = structlog.get_logger(__name__)

DEBOUNCE_MILLISECONDS = 300
"""Changes within this time are one change, because editors and formatters write a file more than once."""
STOP_POLL_MILLISECONDS = 500
"""How often the watch checks whether it was stopped."""


class _SourceFilter(DefaultFilter):
    """Selects Python files, langgraph.json and the env file. The default filter leaves out .venv, .git and the like."""

    def __init__(self, project: ProjectConfig) -> None:
        super().__init__()
        self._definitions = definition_files(project)

    def __call__(self, change: Change, path: str) -> bool:
        return (path.endswith(".py") or Path(path) in self._definitions) and super().__call__(change, path)


def definition_files(project: ProjectConfig) -> set[Path]:
    """The files besides Python code that define the project."""
    env = project.raw.get("env")
    files = {project.path, project.directory / ".env"}
    if isinstance(env, str):
        files.add(project.directory / env)
    return {file.resolve() for file in files}


def has_web_code(project: ProjectConfig) -> bool:
    """Whether the web process runs code of the project, an app or an auth handler."""
    sections = (project.raw.get("http"), project.raw.get("auth"))
    return any(isinstance(section, dict) and (section.get("app") or section.get("path")) for section in sections)


class ProjectWatch:
    """Watches the project in a thread, from `start` to `stop`. `watching` is set once no change can be missed.

    Calls `restart` with the name of each child to replace: the worker, and also the web process if langgraph.json or
    the env file has changed or the web process runs code of the project. After a change that does not load, the worker
    continues with the code that it has.
    """

    def __init__(
        self,
        project: ProjectConfig,
        *,
        problem: Callable[[Callable[[], bool]], str | None],
        restart: Callable[[str], None],
    ) -> None:
        """`problem` returns why the project does not load, or None if it does. It may take long. Its argument is a
        function that returns true when the result is no longer needed, because a file has changed again or the watch
        was stopped."""
        self.watching = threading.Event()
        self._project = project
        self._problem = problem
        self._restart = restart
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        try:
            batches = watch(
                *_roots(self._project),
                watch_filter=_SourceFilter(self._project),
                debounce=DEBOUNCE_MILLISECONDS,
                step=100,
                rust_timeout=STOP_POLL_MILLISECONDS,
                yield_on_timeout=True,
                stop_event=self._stopped,
                raise_interrupt=False,
            )
            for batch in batches:
                self.watching.set()
                if batch:
                    self._changed(sorted({Path(path) for _, path in batch}))
        except (OSError, RuntimeError) as error:
            log.warning("project.unwatched", error=str(error))

    def _changed(self, files: list[Path]) -> None:
        names = ", ".join(file.name for file in files[:3]) + (" …" if len(files) > 3 else "")
        seen = _modification_times(files)
        if (problem := self._problem(lambda: self._stopped.is_set() or _modification_times(files) != seen)) is not None:
            log.warning("project.broken", files=names, error=problem)
            return
        log.info("project.changed", files=names)
        if has_web_code(self._project) or any(file in definition_files(self._project) for file in files):
            self._restart("web")
        self._restart("worker")


def _modification_times(files: list[Path]) -> list[int]:
    """When each file was last changed; 0 for a file that does not exist."""
    times = []
    for file in files:
        try:
            times.append(file.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return times


def _roots(project: ProjectConfig) -> list[Path]:
    """The directories to watch. None lies inside another, because changes there would be reported twice."""
    try:
        directories = import_directories(project)
    except ConfigError:
        directories = [project.directory]
    resolved = {directory.resolve() for directory in directories}
    return [place for place in resolved if not any(other in place.parents for other in resolved)]
