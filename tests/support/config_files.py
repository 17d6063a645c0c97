"""Configs and models' folders to check, and what is said of bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from megasync.tools.assets.command import build_tokenizer
from bench.config import BenchRoot
from megasync.checks.check import check_config
from megasync.config.keys import all_keys, bounds, choices
from megasync.config.load import load_config
from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.models.folder import check_model_folder, model_shape
from megasync.models.tensors import expected_tensors

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "head_dim": 32,
    "intermediate_size": 256, "hidden_size": 128, "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


KEYS = all_keys(BenchRoot)
CHOICES = {key: choices(field) for key, field in KEYS.items() if choices(field)}
RANGES = {key: bounds(field) for key, field in KEYS.items() if bounds(field)}


def root_of(key: str) -> type[Config]:
    return BenchRoot if key.startswith("bench") else Config


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What this Python gives."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str, root: type[Config] = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, root)
    message = str(caught.value)
    assert len(message.splitlines()) <= 12
    return message


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    try:
        save_file(weights_of(MODEL | changes, folder), folder / "model.safetensors")
    except (ConfigError, TypeError):  # no model is like this
        save_file(weights_of(MODEL, folder), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    return folder


def weights_of(fields: dict[str, Any], folder: Path) -> dict[str, npt.NDArray[np.float16]]:
    """Zeros, of the tensors that a model with this config.json has; written to the folder's."""
    (folder / "config.json").write_text(json.dumps(fields))
    sizes = expected_tensors(model_shape(folder), fields)
    return {name: np.zeros(size, np.float16) for name, size in sizes.items()}


def write_runnable(folder: Path) -> Path:
    """A config that can run, with the model and the data that it names."""
    model = write_model(folder / "model")
    build_tokenizer().save_pretrained(model)
    data = write(folder / "train.jsonl", '{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": 3}\n')
    text = f"run: {{dir: {folder}/runs}}\nmodel: {{path: {model}}}\ndata: {{train: {data}, batch_size: 4}}\n"
    return write(folder / "run.yaml", text)


def refusal(path: Path, *overrides: str, world_size: int = 2) -> ConfigError:
    """The error of a config that is read and cannot run."""
    config = load_config(path, overrides)
    with pytest.raises(ConfigError) as caught:
        check_config(config, world_size)
    assert len(str(caught.value).splitlines()) <= 10
    return caught.value


def cannot_run(path: Path, *overrides: str, world_size: int = 2) -> str:
    return str(refusal(path, *overrides, world_size=world_size))


def model_refused(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_model_folder(folder)
    assert caught.value.remedy
    return caught.value
