"""A model's files: cut off, of another format, in several parts, as links. Real files throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file


from megasync.models.folder import check_model_folder
from tests.support.config_files import model_refused, refusal, write_model


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"], ids=len)
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in model_refused(tmp_path).headline


def test_safetensors_cut_off_anywhere(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for length in (*range(0, 2000, 7), *range(2000, len(whole), 9973)):
        weights.write_bytes(whole[:length])
        error = model_refused(tmp_path)
        assert error.headline.startswith(f"{weights}: ") and error.lines["actual"] == f"{length} bytes"
    for content in (whole[:-1], whole + b"x"):
        weights.write_bytes(content)
        error = model_refused(tmp_path)
        assert error.headline.startswith(f"{weights}: ") and error.lines["actual"] == f"{len(content)} bytes"


def test_safetensors_that_are_none(tmp_path: Path) -> None:
    weights = write_model(tmp_path) / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "git lfs pull" in model_refused(tmp_path).remedy
    for content in (
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x02" + b"\0" * 7 + b"{(",
        (8).to_bytes(8, "little") + b'{"a": 1}',
    ):
        weights.write_bytes(content)
        assert model_refused(tmp_path).headline.startswith(f"{weights}: ")
    weights.unlink()
    assert model_refused(tmp_path).remedy == "convert the weights to safetensors"


def write_shards(folder: Path, **other: object) -> dict[str, str]:
    """A model in two files, with their index; `other`: what the index says of some tensors instead, None: nothing."""
    whole = write_model(folder) / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, folder / file)
    index = {name: file for name, file in (places | other).items() if file is not None}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return places


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
TENSOR = "model.layers.1.mlp.up_proj.weight"


def test_an_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    places = write_shards(tmp_path)
    check_model_folder(tmp_path)
    other = FIRST if places[TENSOR] == SECOND else SECOND
    write_shards(tmp_path, **{TENSOR: other})
    assert model_refused(tmp_path).lines["wrong"] == TENSOR
    write_shards(tmp_path, no_such_tensor=FIRST)
    assert model_refused(tmp_path).lines["wrong"] == "no_such_tensor"
    write_shards(tmp_path, **{TENSOR: None})
    assert model_refused(tmp_path).lines["left_out"] == TENSOR
    write_shards(tmp_path, **{TENSOR: 3})
    assert INDEX in model_refused(tmp_path).headline


def test_no_tensor_is_in_two_files_that_are_read(tmp_path: Path) -> None:
    """Which of them counts would be another one for the engine, vLLM and transformers."""
    write_shards(tmp_path)
    first, second = load_file(tmp_path / FIRST), load_file(tmp_path / SECOND)
    save_file(second | {name: first[name] for name in list(first)[:1]}, tmp_path / SECOND)
    assert model_refused(tmp_path).lines["twice"] == next(iter(first))
    save_file(second, tmp_path / SECOND)
    save_file(first | second, tmp_path / "model.safetensors")
    assert model_refused(tmp_path).headline.startswith(f"{tmp_path}: holds model.safetensors and the index")
    (tmp_path / INDEX).unlink()
    check_model_folder(tmp_path)


@pytest.mark.parametrize("target", ["../../blobs/0123abcd", "itself"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", INDEX])
def test_a_link_of_the_hubs_cache_whose_blob_is_gone(runnable: Path, name: str, target: str) -> None:
    """A generation_config.json would be taken for none, an index too; the others for files that a user may not read."""
    path = runnable.parent / "model" / name
    path.unlink(missing_ok=True)
    path.symlink_to(path if target == "itself" else target)
    error = refusal(runnable)
    assert error.headline.startswith(f"{path}: ") and "cp -rL" in error.remedy
    path.unlink()
    (runnable.parent / "model" / "README.md").symlink_to("../../blobs/none")
    if name in ("generation_config.json", INDEX):
        check_model_folder(runnable.parent / "model")


def test_links_of_a_whole_cache_are_followed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    check_model_folder(snapshot)


def test_index_with_missing_shards(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors", "x": "model-00002.safetensors"}}))
    assert model_refused(tmp_path).lines["missing"] == "model-00002.safetensors"
    for text in ("{", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[]"):
        index.write_text(text)
        assert model_refused(tmp_path).headline.startswith(f"{index}: ")
    names = load_file(tmp_path / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    check_model_folder(tmp_path)
