"""Configs, model folders, data and rewards that are broken on purpose, as rows of the table."""

from __future__ import annotations

import json
from pathlib import Path


from megasync.diagnosis import inputs
from megasync.diagnosis.finding import Finding
from tests.megasync.diagnosis import broken

from tests.megasync.diagnosis.table import case


# What the config names.


@case("error", "there is no such folder", "hf download Qwen/Qwen3-0.6B --local-dir")
def model_of_the_hub(_: Path) -> list[Finding]:
    return inputs.check_model("Qwen/Qwen3-0.6B")


@case("error", "the folder holds no config.json", "Hugging Face format")
def model_without_config(folder: Path) -> list[Finding]:
    (broken.sharded(folder / "model") / "config.json").unlink()
    return inputs.check_model(str(folder / "model"))


@case("error", "names 1 files that are not in the folder", "hf download")
def model_without_a_shard(folder: Path) -> list[Finding]:
    (broken.sharded(folder / "model") / "model-1.safetensors").unlink()
    return inputs.check_model(str(folder / "model"))


@case("error", "cut off, or not a safetensors file", "hf download")
def model_with_a_shard_cut_off(folder: Path) -> list[Finding]:
    broken.cut_off(broken.sharded(folder / "model") / "model-1.safetensors")
    return inputs.check_model(str(folder / "model"))


@case("error", "model.embed_tokens.weight, which is in no file", "take weights and index of one download")
def model_of_two_downloads(folder: Path) -> list[Finding]:
    model = broken.sharded(folder / "model")
    (model / "model-1.safetensors").write_bytes((model / "model-0.safetensors").read_bytes())
    return inputs.check_model(str(model))


@case("error", "Git LFS pointers in the place of files: tokenizer.json", "lfs pull")
def model_of_a_clone_without_lfs(folder: Path) -> list[Finding]:
    broken.pointer(broken.sharded(folder / "model") / "tokenizer.json")
    return inputs.check_model(str(folder / "model"))


@case("error", "a download that was broken off", "hf download")
def model_half_downloaded(folder: Path) -> list[Finding]:
    (broken.sharded(folder / "model") / ".cache").mkdir()
    (folder / "model/.cache/model-2.safetensors.incomplete").touch()
    return inputs.check_model(str(folder / "model"))


@case("error", "holds no tokenizer.json", "AutoTokenizer")
def model_without_tokenizer(folder: Path) -> list[Finding]:
    (folder / "model").mkdir()
    config = broken.config(folder)
    (folder / "model/tokenizer.json").unlink()
    return inputs.check_tokenizer(config)[0]


@case("error", "its tokenizer cannot be read", "hf download")
def tokenizer_cut_off(folder: Path) -> list[Finding]:
    config = broken.config(folder)
    broken.cut_off(folder / "model/tokenizer.json")
    return inputs.check_tokenizer(config)[0]


@case("error", "tokens, and the model's embeddings have 8 rows", "tokenizer of this model")
def tokenizer_of_another_model(folder: Path) -> list[Finding]:
    config, file = broken.config(folder), folder / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 8}))
    return inputs.check_tokenizer(config)[0]


@case("error", "has no chat template", "data.chat_template=false")
def no_chat_template(folder: Path) -> list[Finding]:
    return inputs.check_tokenizer(broken.config(folder, "data.chat_template=true"))[0]


@case("warning", "is no token of the tokenizer's", "generation_config.json")
def end_that_is_no_token(folder: Path) -> list[Finding]:
    config = broken.config(folder)
    (folder / "model/generation_config.json").write_text('{"eos_token_id": 999}')
    return inputs.check_tokenizer(config)[0]


@case("error", "has no key 'problem'", "data.prompt_key=question")
def data_with_other_keys(folder: Path) -> list[Finding]:
    config = broken.config(folder, "data.prompt_key=problem")
    found = inputs.check_data(config, None)
    return [Finding(each.check, each.level, each.seen, each.remedy.replace("KEY", "question")) for each in found]


@case("error", "cannot be imported: ModuleNotFoundError", "PYTHONPATH")
def reward_that_is_not_there(folder: Path) -> list[Finding]:
    return inputs.check_reward(broken.config(folder, "rollout.reward=no_such_package.module:score"))


@case("error", "needs the package math_verify", "pip install math-verify")
def reward_without_its_package(folder: Path) -> list[Finding]:
    return inputs.check_reward(broken.config(folder, "rollout.reward=math_verify"), lambda _: None)


@case("error", "engine.parallel.tensor = 4", "engine.parallel.tensor=2")
def config_that_does_not_divide(folder: Path) -> list[Finding]:
    config = broken.config(folder, "engine.parallel.tensor=4")
    found = inputs.check_whole_config(config, 4)
    assert not config.run.folder.exists(), "nothing is written"
    return found
