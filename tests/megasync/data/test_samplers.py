"""Sources by weight, samplers and their state. No run.

python -m pytest tests/megasync/data/test_samplers.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megasync.checks.data import check_data
from megasync.config.data_section import DataConfig, TrainSource
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.data.data import Example, PromptOrder, epoch_order, turn
from megasync.data.load import load_data
from megasync.data.sampler import Difficulty, SampledOrder, check_sampler
from megasync.rollouts.metrics import source_metrics
from megasync.rollouts.progress import Progress, load_progress, save_progress
from tests.support.config_files import write_runnable

FAST = settings(derandomize=True, database=None, deadline=None, max_examples=60)
WEIGHTS = st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=4).map(tuple)
EXAMPLES = [Example(str(number), "", number + 1) for number in range(12)]
NUMBER = 1000


@FAST
@given(WEIGHTS)
def test_each_source_has_its_share_at_every_time(weights: tuple[float, ...]) -> None:
    counts = Counter[int]()
    for ordinal in range(200):
        source, before = turn(weights, ordinal)
        assert before == counts[source], "its turns are counted from 0"
        counts[source] += 1
        shares = [weight / sum(weights) * (ordinal + 1) for weight in weights]
        assert all(abs(counts[each] - share) <= max(1, len(weights) / 2) for each, share in enumerate(shares))


@FAST
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.booleans(), st.integers(0, 5))
def test_a_source_has_epochs_of_its_own(sizes: list[int], shuffle: bool, seed: int) -> None:
    sources = tuple((size, 1.0 + number) for number, size in enumerate(sizes))
    order = PromptOrder(sum(sizes), seed, shuffle, sources)
    found = [order.index(ordinal) for ordinal in range(300)]
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        own = [index - first for index in found if first <= index < first + size]
        for begin in range(0, len(own) - size, size):
            assert sorted(own[begin : begin + size]) == list(range(size))
    assert [order.index(ordinal) for ordinal in reversed(range(300))] == found[::-1], "a pure function of the ordinal"


def test_many_sources_are_put_in_order_once_an_epoch() -> None:
    order, before = PromptOrder(400, 97, True, tuple((10, 1.0) for _ in range(40))), epoch_order.cache_info().misses
    assert sorted(order.index(ordinal) for ordinal in range(400)) == list(range(400))
    assert epoch_order.cache_info().misses - before == 40


def test_sources_and_a_samplers_state_are_in_the_checkpoint(tmp_path: Path) -> None:
    order = PromptOrder(5, 3, True, ((2, 0.5), (3, 1.0)))
    save_progress(tmp_path, Progress(4, 5, order=order, sampler='{"name": "ä"}'))
    back = load_progress(tmp_path)
    assert back is not None and (back.order, back.sampler) == (order, '{"name": "ä"}')


def test_sources_are_read_by_name_and_weight(tmp_path: Path) -> None:
    runnable = write_runnable(tmp_path)
    path = load_config(runnable).data.train
    given = f"data.train={{a: {{path: {path}, weight: 2, limit: 1}}, b: {{path: {path}}}}}"
    config = load_config(runnable, [given])
    data = load_data(config)
    assert {key: len(examples) for key, examples in data.by_source.items()} == {"data.train.a": 1, "data.train.b": 2}
    order = data.order(config)
    assert [data.train[order.index(ordinal)].source for ordinal in range(6)].count("a") == 4
    refused = ("a: {path: X, weight: 0}", "above 0"), ("a b: {path: X}", "a b"), ("a: {weight: 1}", "data.train.a.path")
    for wrong, words in refused:
        with pytest.raises(ConfigError) as caught:
            check_data(load_config(runnable, [f"data.train={{{wrong}}}"]))
        assert words in str(caught.value) and "data.train" in str(caught.value)


def test_metrics_are_by_source() -> None:
    found = source_metrics([("a", (1.0, 0.0)), ("b", ()), ("a", (1.0, 1.0))])
    assert found == {"source/a/prompts": 2, "source/a/reward": 0.75, "source/b/prompts": 1}
    assert source_metrics([("", (1.0,))]) == {}


def data_of(name: str, batch_size: int = 4, **arguments: Any) -> DataConfig:
    return DataConfig(sampler=name, batch_size=batch_size, sampler_arguments=arguments)


@FAST
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 40), st.randoms(use_true_random=False))
def test_easy_and_hard_prompts_rest_and_come_back(visits: int, rest_steps: int, stop: int, source: Any) -> None:
    """From any checkpoint a run goes on with the prompts that it would have taken; no batch has a prompt twice in a pass."""
    data = data_of("difficulty", visits=visits, rest_steps=rest_steps)
    share = source.choice([0.5, 1.0])  # of 1 all rest, and some are woken where a pass begins
    equal = {index for index in range(12) if source.random() < share}
    order, seen, rests = SampledOrder(data, EXAMPLES, 7), dict[int, int](), Counter[int]()
    resumed: SampledOrder | None = None
    for step in range(1, 41):
        batch = range(4 * step - 4, 4 * step)
        indices = [order.index(ordinal) for ordinal in batch]
        if resumed is not None:
            assert indices == [resumed.index(ordinal) for ordinal in batch]
        for ordinal, index in zip(batch, indices, strict=True):
            gap = step - seen.get(index, step)
            if rests[index] >= visits and len(equal) < 12:
                assert gap > rest_steps or gap == 0, "it has rested; or a pass began within the batch"
            rests[index] = min(visits, rests[index] + 1) if index in equal else 0
            seen[index] = step
            for each in (order, resumed) if resumed is not None else (order,):
                each.observe(step, [(ordinal, (0.0, 0.0) if index in equal else (0.0, 1.0))])
        if step == stop:
            resumed = SampledOrder(data, EXAMPLES, 7)
            assert resumed.restore(order.state()) == ""
    assert set(seen) == set(range(12)), "none is lost"


@FAST
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.5, 1.0, 3.0])), min_size=2, max_size=3), st.integers(0, 20))
def test_sources_keep_their_shares_while_prompts_rest(sources: list[tuple[int, float]], stop: int) -> None:
    names = [name for name, (size, _) in zip("abc", sources, strict=False) for _ in range(size)]
    examples = [Example(str(line), "", line, source=name) for line, name in enumerate(names, start=1)]
    train = {name: TrainSource(path=name, weight=weight) for name, (_, weight) in zip("abc", sources, strict=False)}
    data = DataConfig(train=train, sampler="difficulty", batch_size=4, sampler_arguments={"visits": 1, "rest_steps": 3})
    order, found, resumed = SampledOrder(data, examples, 7), list[int](), None
    for step in range(1, 25):
        batch = range(4 * step - 4, 4 * step)
        found += (indices := [order.index(ordinal) for ordinal in batch])
        if resumed is not None:
            assert indices == [resumed.index(ordinal) for ordinal in batch]
        for each in (order, resumed) if resumed is not None else (order,):
            each.observe(step, [(ordinal, (0.0, float(index % 2))) for ordinal, index in zip(batch, indices, strict=True)])
        if step == stop:
            resumed = SampledOrder(data, examples, 7)
            assert resumed.restore(order.state()) == ""
    counts, total = Counter(names[index] for index in found), sum(weight for _, weight in sources)
    for name, (_, weight) in zip("abc", sources, strict=False):
        assert abs(counts[name] - 96 * weight / total) <= 2


def test_a_prompt_that_has_begun_keeps_its_example_over_a_resume() -> None:
    order = SampledOrder(data_of("difficulty"), EXAMPLES, 0)
    begun = {ordinal: order.index(ordinal) for ordinal in range(7)}
    order.observe(1, [(ordinal, (1.0, 0.0)) for ordinal in (0, 2, 3)])
    resumed = SampledOrder(data_of("difficulty"), EXAMPLES, 0)
    resumed.restore(order.state())
    assert {ordinal: resumed.index(ordinal) for ordinal in (1, 4, 5, 6)} == {each: begun[each] for each in (1, 4, 5, 6)}
    assert [resumed.index(ordinal) for ordinal in range(7, 15)] == [order.index(ordinal) for ordinal in range(7, 15)]


def test_another_samplers_state_is_not_loaded() -> None:
    order = SampledOrder(data_of("difficulty"), EXAMPLES, 0)
    assert "'difficulty', with 12 examples" in SampledOrder(data_of("difficulty"), EXAMPLES[:9], 0).restore(order.state())
    assert "data.sampler was ''" in order.restore("")


class InOrder:
    """Of a user: in the order of the file; one pass."""

    def __init__(self, examples: Sequence[Example], seed: int, *, first: int = 0) -> None:
        self.num, self.place = len(examples), first

    def __iter__(self) -> Any:
        while self.place < self.num:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class NoState:
    def __init__(self, examples: Sequence[Example], seed: int) -> None: ...

    def __iter__(self) -> Any:
        return iter(range(9))


class OutOfRange(InOrder):
    def __iter__(self) -> Any:
        return iter([0, 99])


class Twice(InOrder):
    def __iter__(self) -> Any:
        return iter([0, 1, 0])


class Nothing(InOrder):
    def __iter__(self) -> Any:
        return iter(())


class Words(InOrder):
    def __iter__(self) -> Any:
        return iter(["one"])


class Forgets(InOrder):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Unwritable(InOrder):
    def state_dict(self) -> dict[str, Any]:
        return {"place": object()}


class Breaks(InOrder):
    def __iter__(self) -> Any:
        raise KeyError("place")


class NoIterator(InOrder):
    def __iter__(self) -> Any:
        return None


class BreaksLater(InOrder):
    def observe(self, visits: Sequence[Any]) -> None:
        raise ValueError(len(visits))


def test_a_class_of_ones_own_gives_the_prompts() -> None:
    data = data_of(f"{__name__}:InOrder", first=2)
    check_sampler(data, EXAMPLES, 0)
    order = SampledOrder(data, EXAMPLES, 0)
    assert [order.index(ordinal) for ordinal in range(12)] == [*range(2, 12), 0, 1]


def test_prompts_of_a_sampler_that_fails_are_still_drawn() -> None:
    """A checkpoint that is written then trains them."""
    order = SampledOrder(data_of(f"{__name__}:BreaksLater"), EXAMPLES, 0)
    drawn = [order.index(ordinal) for ordinal in range(4)]
    with pytest.raises(ConfigError, match="observe raised"):
        order.observe(1, [(ordinal, (0.0, 1.0)) for ordinal in range(4)])
    assert [order.index(ordinal) for ordinal in range(4)] == drawn and len(json.loads(order.state())["drawn"]) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("difficult", "nearest: difficulty"),
        ("no_such_module:Sampler", "cannot be imported"),
        (f"{__name__}:NUMBER", "is no class"),
        (f"{__name__}:NoState", "has no state_dict, load_state_dict"),
        (f"{__name__}:OutOfRange", "gave 99, and there are 12 examples"),
        (f"{__name__}:Twice", "gave 0 twice in a batch of data.batch_size = 4"),
        (f"{__name__}:Nothing", "gave no index"),
        (f"{__name__}:Words", "gave 'one'"),
        (f"{__name__}:Forgets", "with its state restored it draws other examples"),
        (f"{__name__}:Unwritable", "its state is not what JSON has"),
        (f"{__name__}:Breaks", "__iter__ raised KeyError"),
        (f"{__name__}:NoIterator", "__iter__ raised TypeError"),
        (f"{__name__}:BreaksLater", "observe raised ValueError: 4"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused_by_its_name(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sampler(data_of(name), EXAMPLES, 0)
    assert name.rpartition(":")[2] in str(caught.value) and words in str(caught.value)


ARGUMENTS = [{"visits": 0}, {"visits": True}, {"rest_steps": 1.5}, {"others": 1}, {"seed": 1}, {"weights": {"a": 1}}]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_a_sampler_does_not_take_are_refused(arguments: dict[str, Any]) -> None:
    for data in (data_of("difficulty", **arguments), data_of("", **arguments)):
        with pytest.raises(ConfigError, match=r"data\.sampler_arguments") as caught:
            check_sampler(data, EXAMPLES, 0)
        assert next(iter(arguments)) in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_sampler(data_of("difficulty", visit=3), EXAMPLES, 0)
    assert (caught.value.key, caught.value.lines["nearest"]) == ("data.sampler_arguments.visit", "visits")
    assert Difficulty(EXAMPLES, 0).visits == 2
