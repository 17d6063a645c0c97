"""Whether the teacher that a config names can be one: keys against each other, folders against the policy's, the version log.

Leaves out how it is built (run/teacher.py, engine/teacher.py). No torch in here.

    refuse(teacher_errors(config))
    check_teacher(config)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bridge.versions.file import there
from engine.peft.fields import AdapterError
from engine.peft.folder import check_peft_folder
from megasync.checks.data import beside_errors
from megasync.checks.resume import first_step
from megasync.checks.served_sizes import even_workers, is_served_here, uneven_problem, unserved_errors
from megasync.checks.sizes import size_error
from megasync.config.errors import ConfigError, nearest_name, refuse, some, wrong
from megasync.config.files import VERSIONS, teacher_folder
from megasync.config.schema import Config
from megasync.config.teacher_section import START, TeacherConfig
from megasync.data.tokenizer import vocabulary_difference
from megasync.launch.devices import visible_devices
from megasync.models.computed import different_fields
from megasync.models.folder import check_model_folder, model_shape


def teacher_errors(config: Config) -> Iterator[ConfigError]:
    """Errors for keys of `teacher` that exclude each other or other keys."""
    teacher, defaults = config.teacher, TeacherConfig()
    given = [name for name in TeacherConfig.model_fields if getattr(teacher, name) != getattr(defaults, name)]
    if not teacher.is_set:
        for name in given:
            lines = {"needs": "one of teacher.path, endpoint, version, adapter_path", "remedy": f"leave teacher.{name} out"}
            yield wrong(config, f"teacher.{name}", "there is no teacher", **lines)
        return
    if len(teacher.names) > 1:
        remedy = f"leave teacher.{teacher.names[1]} out"
        yield wrong(config, f"teacher.{teacher.names[1]}", f"teacher.{teacher.names[0]} names another one", remedy=remedy)
        return
    for name in teacher.given_replica_keys if not teacher.is_served or teacher.endpoint else ():
        yield wrong(config, f"teacher.{name}", "no replicas of a teacher are started", remedy=f"leave teacher.{name} out")
    if teacher.is_served and not teacher.endpoint:
        yield from beside_errors("teacher", teacher)
    yield from _place_errors(config)
    yield from _source_errors(config)
    yield from _objective_errors(config)


def _place_errors(config: Config) -> Iterator[ConfigError]:
    teacher, name = config.teacher, config.teacher.names[0]
    in_trainer = name in ("version", "adapter_path")
    if in_trainer and teacher.is_served:
        problem = f"teacher.{name} is of the trainer, whose base and adapters replicas do not have"
        yield wrong(config, "teacher.place", problem, choices="auto, trainer", remedy="leave teacher.place out")
    if teacher.is_in_trainer and name == "endpoint":
        problem = "teacher.endpoint is a server elsewhere"
        yield wrong(config, "teacher.place", problem, choices="auto, replicas", remedy="leave teacher.place out")
    if teacher.is_in_trainer and not isinstance(teacher.path, str):
        problem = "the trainer has one teacher, and teacher.path names one for each source"
        yield wrong(config, "teacher.place", problem, choices="replicas", remedy="write teacher.place=replicas, or one folder")
    if name == "adapter_path" and not config.engine.lora.rank:
        remedy = "merge it into a folder, and write teacher.path=FOLDER teacher.place=trainer"
        problem = "the policy has no adapters to switch"
        yield wrong(config, "teacher.adapter_path", problem, needs="engine.lora.rank above 0", remedy=remedy)


def _source_errors(config: Config) -> Iterator[ConfigError]:
    """Errors of teachers by source: each source of data.train has one teacher, and each teacher a source."""
    path, sources = config.teacher.path, config.data.train_sources
    if isinstance(path, str) or config.teacher.is_in_trainer:
        return
    for source in (source for source in path if source not in sources):
        key, lines = f"teacher.path.{source}", {"choices": ", ".join(sources) or "none: data.train is one file"}
        lines["nearest"] = nearest_name(source, sources)
        remedy = "name a source of data.train, or write one folder as teacher.path=FOLDER"
        yield ConfigError(f"{key} = {path[source]}: data.train has no such source", **lines, remedy=remedy)
    for source in (source for source in sources if source not in path):
        message = f"teacher.path = {', '.join(path)}: data.train.{source} has no teacher"
        yield ConfigError(message, remedy=f"write teacher.path.{source}=FOLDER")


def _objective_errors(config: Config) -> Iterator[ConfigError]:
    teacher, is_sft = config.teacher, config.algorithm.name == "sft"
    if is_sft and teacher.objective == "sampled":
        problem, lines = "supervised steps sample no tokens", {"choices": "top_k, full", "remedy": "write teacher.objective=full"}
        yield wrong(config, "teacher.objective", problem, **lines)
    if is_sft and teacher.is_served:
        problem = "supervised steps ask no replicas: algorithm.name = sft has a teacher in the trainer alone"
        yield wrong(config, "teacher.place", problem, choices="trainer", remedy="write teacher.place=trainer")
    if teacher.is_served and teacher.objective == "full":
        problem = "vLLM gives log-probs of the most likely tokens, not of the whole vocabulary"
        lines = {"choices": "sampled, top_k", "remedy": "write teacher.objective=top_k, or teacher.place=trainer"}
        yield wrong(config, "teacher.objective", problem, **lines)
    if config.algorithm.support_replay:
        problem = "the policy's log-probs would be over the kept tokens, and the teacher's over all"
        yield wrong(config, "algorithm.support_replay", problem, choices="false", remedy="leave algorithm.support_replay out")
    if teacher.is_served and not is_sft and config.rollout.temperature != 1:
        problem = "vLLM gives a prompt's log-probs at temperature 1, and the policy's would be at this one"
        remedy = "write rollout.temperature=1, or teacher.place=trainer"
        yield wrong(config, "rollout.temperature", problem, choices="1", remedy=remedy)


def check_teacher(config: Config) -> None:
    """ConfigError where a folder, an adapter or a version cannot be the teacher of this policy."""
    teacher = config.teacher
    if teacher.adapter_path and config.engine.lora.rank:
        try:
            check_peft_folder(teacher.adapter_path, config.engine.lora, config.model.path)
        except AdapterError as error:
            problem = error.problem.removeprefix(f"{teacher.adapter_path}: ")
            raise wrong(config, "teacher.adapter_path", problem, remedy=error.remedy) from error
    if teacher.version not in ("", START):
        _check_version(config)
    own = Path(config.model.path)
    refuse(error for key, path in teacher.paths.items() if key != "teacher.adapter_path"
           for error in _folder_errors(config, key, Path(path), own))  # fmt: skip
    if teacher.objective == "top_k" and teacher.top_k > (size := model_shape(own).vocab_size):
        raise wrong(config, "teacher.top_k", f"the vocabulary has {size} tokens", remedy=f"write teacher.top_k={size} or less")


def _folder_errors(config: Config, key: str, folder: Path, own: Path) -> Iterator[ConfigError]:
    try:
        shape = check_model_folder(folder)
    except ConfigError as error:  # which speaks of model.path
        yield error.about("model.path", key)
        return
    if difference := vocabulary_difference(own, folder):
        remedy = "name a teacher with the policy's tokenizer: log-probs are compared token by token"
        problem = f"its tokenizer is another one than that of model.path = {own}: {difference}"
        yield ConfigError(f"{key} = {folder}: {problem}", remedy=remedy)
    if not config.teacher.is_in_trainer:
        if shape.vocab_size < (size := model_shape(own).vocab_size):
            problem = f"it cannot score all tokens of model.path = {own}, whose config.json has vocab_size = {size}"
            remedy = f"name a teacher with vocab_size = {size} or more, padding included"
            yield ConfigError(f"{key} = {folder}: {problem}", vocab_size=str(shape.vocab_size), remedy=remedy)
        remedy = "name another teacher, or one of the policy's shape with teacher.place=trainer"
        if is_served_here(config):
            found = unserved_errors(config, folder, shape, remedy, on_gpus=bool(visible_devices()))
            yield from (error.about("model.path", key) for error in found)
        if config.teacher.tensor_parallel not in even_workers(shape):
            yield size_error(config, "teacher.tensor_parallel", uneven_problem(shape), even_workers(shape), folder)
        return
    different = different_fields(own, folder)
    if different or shape != model_shape(own):
        problem = f"the trainer builds it as the policy, and its config.json differs in {some(different) or 'sizes'}"
        remedy = "write teacher.place=replicas, with teacher.objective=sampled or top_k"
        yield ConfigError(f"{key} = {folder}: {problem}", policy=str(own), remedy=remedy)


def _check_version(config: Config) -> None:
    version, log = int(config.teacher.version), config.run.folder / VERSIONS
    if teacher_folder(config.run.folder, version).is_dir() and config.checkpoint.resumes:
        return
    steps = first_step(config)
    if version > steps or version not in there(log):
        listed = some([each for each in sorted(there(log)) if each <= steps][-6:]) if steps else "none: it does not resume"
        other = "of another run's log `megasync export` makes a folder for teacher.path"
        remedy = f"write one of them, or teacher.version=start; {other}"
        raise wrong(config, "teacher.version", "the run resumes after no such version", versions=listed, remedy=remedy)
