"""Keys of the YAML section `teacher`: which model is distilled, and where it runs. No torch in here.

The objective's own keys are the engine's (engine.algorithm.TeacherObjective). Leaves out what goes with what (checks/teacher.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from engine.algorithm import TeacherObjective
from engine.config import FilePath
from megasync.config.replica_keys import ReplicaKeys

START = "start"


def _path_form(value: object) -> str:
    return "*sources" if isinstance(value, Mapping) else "*path"


def _version(value: object) -> str:
    text = str(value)
    if isinstance(value, bool) or not (text in ("", START) or text.isdecimal()):
        lines = {"choices": f"{START}, or a number of steps", "example": START}
        raise PydanticCustomError("version", "a version of the run is expected", lines)
    return text


BySource = Annotated[dict[str, FilePath], Field(min_length=1)]


class TeacherConfig(ReplicaKeys, TeacherObjective):
    """Distillation: the policy learns from a teacher's log-probs. One of path, endpoint, version and adapter_path names it."""

    path: Annotated[Annotated[FilePath, Tag("*path")] | Annotated[BySource, Tag("*sources")], Discriminator(_path_form)] = ""
    """A Hugging Face folder with the policy's vocabulary; or several by the source of the data, {SOURCE: FOLDER}."""
    endpoint: str = ""
    """URL of a vLLM server with the OpenAI API, such as http://host:8000/v1, which is asked for prompt log-probs."""
    version: Annotated[str, BeforeValidator(_version)] = ""
    """An older version of this run. start: the model that it started from, with LoRA the start adapter; a number: the version
    after so many steps, of sync.log=deltas."""
    adapter_path: FilePath = ""
    """A PEFT folder on the policy's base model, with the rank, alpha and targets of engine.lora."""
    place: Literal["auto", "replicas", "trainer"] = "auto"
    """replicas: vLLM engines of its own, which never sync; trainer: a forward pass of the trainer, on its own GPUs, of a model of
    the policy's shape. auto: trainer for version and adapter_path, else replicas."""

    @property
    def is_set(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.names)

    @property
    def names(self) -> list[str]:
        """The keys that are set of those that name a teacher."""
        return [key for key in ("path", "endpoint", "version", "adapter_path") if getattr(self, key)]

    @property
    def is_in_trainer(self) -> bool:
        """Whether the trainer computes the teacher's log-probs, and not replicas or an endpoint."""
        return self.is_set and (
            self.place == "trainer" or (self.place == "auto" and self.names[0] in ("version", "adapter_path"))
        )

    @property
    def is_frozen_model(self) -> bool:
        """Whether the trainer holds its weights, and not an adapter alone."""
        return self.is_in_trainer and not self.adapter_path

    @property
    def is_served(self) -> bool:
        """Whether samples come with the teacher's log-probs."""
        return self.is_set and not self.is_in_trainer

    @property
    def paths(self) -> dict[str, str]:
        """All folders that are set, by full key."""
        folders = {"": self.path} if isinstance(self.path, str) else {f".{source}": path for source, path in self.path.items()}
        paths = {f"teacher.path{source}": path for source, path in folders.items()}
        return {key: path for key, path in {**paths, "teacher.adapter_path": self.adapter_path}.items() if path}
