"""The teacher that the config names, as the engine takes it; a version of the run becomes a folder again.

    Engine(..., teacher=teacher_choice(config))      # collective

Leaves out teachers that are asked in the rollout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bridge.versions.reader import VersionReader
from engine.algorithm import TeacherObjective
from engine.teacher import TeacherChoice
from megasync.config.files import VERSIONS, teacher_folder
from megasync.config.schema import Config
from megasync.config.teacher_section import START
from megasync.run.checkpoints import rebuild
from megasync.run.rank_zero import on_rank_zero


def teacher_choice(config: Config) -> TeacherChoice | None:
    """None without a teacher. Collective.

    Raises:
        RankZeroError: the version cannot be rebuilt.
    """
    teacher = config.teacher
    if not teacher.is_set:
        return None
    objective = TeacherObjective(**{name: getattr(teacher, name) for name in TeacherObjective.model_fields})
    if teacher.is_served:
        return TeacherChoice(objective)
    path: str | Path = teacher.path if isinstance(teacher.path, str) else ""
    if teacher.version not in ("", START):
        path = on_rank_zero(lambda: version_folder(config, int(teacher.version)))
    return TeacherChoice(objective, is_in_trainer=True, path=path, adapter_path=teacher.adapter_path)


def version_folder(config: Config, version: int) -> Path:
    """The run's version as a model folder, rebuilt once, so that it stays when the log is cut or pruned. On rank 0."""
    folder = teacher_folder(config.run.folder, version)
    if not folder.is_dir():
        partial = folder.with_name(f".partial_{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        rebuild(VersionReader(config.run.folder / VERSIONS), version, Path(config.model.path), partial)
        partial.rename(folder)
    return folder
