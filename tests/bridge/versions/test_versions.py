"""The log of versions: deltas round trip bit for bit, any version comes back, and a log that is not whole is refused.

python -m pytest tests/bridge/versions/test_versions.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.layout.digest import digest_tensor
from bridge.layout.words import words
from bridge.versions import weight_delta
from bridge.versions.file import MARK, PARTIAL, VersionLogError, path_of, there
from bridge.versions.prune import VersionPruner, first_needed
from bridge.versions.reader import VersionReader
from bridge.versions.writer import VersionWriter, cut

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float64)
SPECIAL = (float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-40)
Weights = dict[str, torch.Tensor]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 400), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.01, 0.2, 0.5, 1.0]))
def test_a_delta_round_trips_bit_for_bit(seed: int, size: int, dtype: torch.dtype, share: float) -> None:
    rng = np.random.default_rng(seed)
    width = size * dtype.itemsize
    old, new = (torch.frombuffer(bytearray(rng.bytes(width + 8)), dtype=torch.uint8)[:width].view(dtype) for _ in range(2))
    kept = torch.from_numpy(rng.random(size) >= share)
    new = torch.where(kept, old, new)
    if dtype.is_floating_point and size > len(SPECIAL):
        new[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)
        old[: len(SPECIAL)] = torch.tensor(list(reversed(SPECIAL)), dtype=dtype)
    encoding, data = weight_delta.encode(new, old)
    held = old.clone()
    weight_delta.apply(held, encoding, data)
    assert torch.equal(held.view(torch.uint8), new.view(torch.uint8))
    changed = int((words(new) != words(old)).sum())
    assert weight_delta.num_changed(encoding, data, size) == (size if encoding == "dense" else changed)
    assert (encoding == "same") == (changed == 0)
    held = old.clone()
    assert weight_delta.advance(held, new) == (encoding, data)
    assert torch.equal(held.view(torch.uint8), new.view(torch.uint8))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.05, 0.2, 1.0]))
def test_parts_that_are_compared_one_by_one_give_the_same_delta(seed: int, size: int, dtype: torch.dtype, share: float) -> None:
    rng = np.random.default_rng(seed)
    old = torch.from_numpy(rng.integers(0, 256, size * dtype.itemsize, np.uint8))
    moved = torch.from_numpy(rng.random(size) < share).repeat_interleave(dtype.itemsize)
    new = torch.where(moved, old ^ 255, old).view(dtype)
    with mock.patch.object(weight_delta, "COMPARED_ELEMENTS", 7):
        found = weight_delta.find_changes(new, old.view(dtype))
    encoding, data = weight_delta.encode(new, old.view(dtype))
    if found is None:
        assert encoding == "dense"
    else:
        assert weight_delta.encode_changes(found) == (encoding, data)
        weight_delta.add(old.view(dtype), found)
        assert torch.equal(old, new.view(torch.uint8))


@settings(deadline=None)
@given(st.binary(max_size=80), st.sampled_from(["sparse", "dense", "other"]))
def test_bytes_of_no_delta_are_refused(data: bytes, encoding: str) -> None:
    with pytest.raises(weight_delta.DamagedError):
        weight_delta.apply(torch.zeros(50), encoding, data)


def test_few_steps_of_one_take_few_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(200_000, generator=generator).bfloat16()
    moved = torch.rand(old.shape, generator=generator) < 0.02
    new = torch.where(moved, (old.view(torch.int16) + 1).view(torch.bfloat16), old)
    encoding, data = weight_delta.encode(new, old)
    assert encoding == "sparse" and len(data) < old.nbytes / 50


# ---------------------------------------------------------------------------------------------------- a log


def weights(version: int, stage: int = 0) -> Weights:
    """Of a stage: a matrix of which one row changes at each version, one that does not, one that changes all over."""
    generator = torch.Generator().manual_seed(stage)
    fixed, matrix = torch.randn(7, generator=generator), torch.randn(12, 5, generator=generator).bfloat16()
    for number in range(version):
        matrix[number % 12] += 1
    moving = torch.randn(30, generator=torch.Generator().manual_seed(version))
    empty = torch.zeros(0, 3)
    return {f"s{stage}.matrix": matrix, f"s{stage}.fixed": fixed, f"s{stage}.empty": empty, f"s{stage}.moving": moving}


def write(
    folder: Path, versions: range, stages: int = 1, *, keeps_weights: bool = True, full_every: int = 4, device: str = "cpu"
) -> None:
    for stage in range(stages):
        writer = VersionWriter(folder, stage=stage, num_stages=stages, keeps_weights=keeps_weights, full_every=full_every)
        for version in versions:
            writer.write(version, ((name, tensor.to(device)) for name, tensor in weights(version, stage).items()))


def equal(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
def test_every_version_comes_back(count: int, full_every: int, stages: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, range(3, 3 + count), stages, full_every=full_every)
        log = VersionReader(folder)
        assert log.versions == list(range(3, 3 + count))
        for version in log.versions:
            expected = {name: tensor for stage in range(stages) for name, tensor in weights(version, stage).items()}
            assert equal(dict(log.tensors(version)), expected)
            assert log.digests(version) == {name: digest_tensor(tensor) for name, tensor in expected.items()}
            assert len(log.chain(version, 0)) == 1 + (version - 3) % full_every


@pytest.mark.gpu
def test_weights_on_a_gpu_make_the_same_files(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        write(tmp_path / device, range(9), stages=2, device=device)
    files = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cuda").iterdir())
    assert all((tmp_path / "cpu" / name).read_bytes() == (tmp_path / "cuda" / name).read_bytes() for name in files)


def test_a_log_of_digests_has_no_weights(tmp_path: Path) -> None:
    write(tmp_path, range(2), keeps_weights=False)
    log = VersionReader(tmp_path)
    assert log.digests(1) == {name: digest_tensor(tensor) for name, tensor in weights(1).items()}
    with pytest.raises(VersionLogError, match="holds digests alone"):
        dict(log.tensors(1))


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 12))
def test_no_version_goes_that_a_kept_one_is_made_of(kinds: list[bool], keep: int) -> None:
    whole = [True, *kinds]  # by version; the others are made of the one before them
    first = first_needed(range(len(whole)), keep, whole.__getitem__)
    oldest_kept = max(0, len(whole) - keep)
    assert whole[first] and first <= oldest_kept and not any(whole[first + 1 : oldest_kept + 1])


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_old_versions_go_and_the_others_come_back(tmp_path: Path, keeps_weights: bool) -> None:
    write(tmp_path, range(11), stages=2, keeps_weights=keeps_weights)  # 0, 4 and 8 are whole
    pruner = VersionPruner(tmp_path, keep=4)
    first = 4 if keeps_weights else 7
    assert pruner.prune() == list(range(first)) and pruner.prune() == []
    log = VersionReader(tmp_path)
    assert log.versions == list(range(first, 11))
    for version in log.versions if keeps_weights else ():
        assert equal(dict(log.tensors(version)), weights(version, 0) | weights(version, 1))


def test_a_damaged_file_takes_no_others_with_it(tmp_path: Path) -> None:
    write(tmp_path, range(10))
    path_of(tmp_path, 4, 0).write_bytes(b"torn")
    assert VersionPruner(tmp_path, keep=3).prune() == [], "version 7 would be made of the damaged one: the one before it stays"
    assert VersionPruner(tmp_path, keep=1).prune() == list(range(8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Versions 0 to 7, of which 0 and 4 are whole."""
    write(tmp_path, range(8))
    return tmp_path


def refused(folder: Path, version: int, match: str) -> None:
    with pytest.raises(VersionLogError, match=match):
        dict(VersionReader(folder).tensors(version))


def test_a_torn_file_is_refused_wherever_it_ends(folder: Path) -> None:
    path = path_of(folder, 6, 0)
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(folder, 7, r"version_00000006.stage_000: is torn")
    assert equal(dict(VersionReader(folder).tensors(5)), weights(5)), "versions before it are whole"
    path.write_bytes(whole[10:])
    refused(folder, 6, "is torn: bytes are missing in the middle")


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 255))
@example(-33 - len(MARK), 255)  # the highest byte of the header's length, which is more than there is memory for then
def test_a_changed_byte_is_refused(place: int, change: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, range(2))
        path = path_of(folder, 1, 0)
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= change
        path.write_bytes(data)
        try:
            assert equal(dict(VersionReader(folder).tensors(1)), weights(1)), "a byte that compression has no use for"
        except VersionLogError as error:
            assert "is damaged" in str(error) or "is torn" in str(error)  # noqa: PT017


def test_a_missing_step_is_named(folder: Path) -> None:
    path_of(folder, 5, 0).unlink()
    refused(folder, 7, "version 5 of stage 0 is missing, which version 6 was added to")
    refused(folder, 5, "has no version 5; the last there are: 0, 1, 2, 3, 4, 6, 7")
    assert equal(dict(VersionReader(folder).tensors(4)), weights(4))


def test_a_wrong_order_is_named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path_of(folder, 5, 0).rename(path_of(folder, 9, 0))
    path_of(folder, 6, 0).rename(path_of(folder, 5, 0))
    refused(folder, 5, "is out of order: it holds version 6")
    other = tmp_path_factory.mktemp("other")
    writer = VersionWriter(other, stage=0, num_stages=1, keeps_weights=True, full_every=4)
    for version in range(8):
        writer.write(version, iter(weights(version + 1).items()))
    shutil.copyfile(path_of(other, 5, 0), path_of(folder, 5, 0))
    refused(folder, 5, "version_00000004.stage_000: is out of order: version 5 was added to other weights")


def test_a_version_of_which_a_stage_is_missing_is_no_version(tmp_path: Path) -> None:
    write(tmp_path, range(3), stages=2)
    path_of(tmp_path, 2, 1).unlink()
    assert VersionReader(tmp_path).versions == [0, 1]
    refused(tmp_path, 2, "version 2 lacks stage 1 of 2")


def test_a_write_that_fails_leaves_nothing_and_the_next_is_whole(tmp_path: Path) -> None:
    writer = VersionWriter(tmp_path, stage=0, num_stages=1, keeps_weights=True, full_every=9)
    writer.write(0, iter(weights(0).items()))
    taken = []

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1).items():
            taken.append(name)
            yield name, tensor.to_sparse() if name == "s0.fixed" else tensor

    with pytest.raises(RuntimeError):
        writer.write(1, failing())
    assert taken == list(weights(1)), "all ranks walk all tensors"
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, 0, 0).name]
    writer.write(2, iter(weights(2).items()))
    assert len(VersionReader(tmp_path).chain(2, 0)) == 1


def test_what_a_resumed_run_cuts(folder: Path) -> None:
    (folder / f"{PARTIAL}version_00000008.stage_000").write_bytes(b"half")
    assert cut(folder, 6) == [6, 7]
    assert list(there(folder)) == list(range(6)) and not list(folder.glob(f"{PARTIAL}*"))
    writer = VersionWriter(folder, stage=0, num_stages=1, keeps_weights=True, full_every=4)
    writer.write(6, iter(weights(6).items()))
    writer.write(7, iter(weights(7).items()))
    log = VersionReader(folder)
    assert log.versions == list(range(8)) and len(log.chain(7, 0)) == 2
    assert all(equal(dict(log.tensors(version)), weights(version)) for version in range(8))


def test_a_folder_that_cannot_be_made_leaves_no_tensor_untaken(tmp_path: Path) -> None:
    """Others of the stage may wait for each."""
    (tmp_path / "file").touch()
    writer = VersionWriter(tmp_path / "file" / "versions", stage=0, num_stages=1, keeps_weights=True, full_every=5)
    tensors = iter([(str(number), torch.zeros(2)) for number in range(3)])
    with pytest.raises(OSError, match="Not a directory"):
        writer.write(1, tensors)
    assert list(tensors) == []


@pytest.mark.parametrize(("error", "num_left"), [(RuntimeError("a sum failed"), 0), (SystemExit(143), 8)])
def test_a_failure_takes_what_others_wait_for_and_a_signal_takes_nothing_more(
    tmp_path: Path, error: BaseException, num_left: int
) -> None:
    left = 12

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal left
        while left:
            left -= 1
            if left == 8:
                yield "bad", Unreadable()
            yield str(left), torch.zeros(2)

    class Unreadable(torch.Tensor):
        def contiguous(self, *_: object) -> torch.Tensor:
            raise error

    writer = VersionWriter(tmp_path, stage=0, num_stages=1, keeps_weights=True, full_every=5)
    with pytest.raises(type(error)):
        writer.write(1, tensors())
    assert left == num_left and not list(tmp_path.iterdir())
