"""Responses of a run, a checkpoint or a Hugging Face folder to prompts, as JSON lines.

    megasync generate runs/rl --prompt "12+34="
    megasync generate models/mine --data prompts.jsonl --samples 4 --temperature 0.8 --to answers.jsonl data.prompt_key=problem

Through the same replicas as in training, with the run's chat template, stop texts and dtype. Greedy for one sample, else at
rollout.temperature. Exit codes: 0 done; 2 nothing was started; 1 failed on the way. Leaves out rewards (evaluate).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from bridge.generation import Sampling
from megasync.config.errors import main_errors, refuse_if
from megasync.config.schema import Config
from megasync.data.data import Example, load_examples
from megasync.data.load import check_turns, unrendered
from megasync.data.prompts import Prompts
from megasync.data.tables import SURROGATE
from megasync.models.folder import check_model_folder
from megasync.rollouts.evaluation import Evaluation, requests_of
from megasync.tools.serving import answers, options
from megasync.tools.serving.replicas import Serve, machine_errors, scratch_folder, served
from megasync.tools.serving.source import Source, find_source


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = options.sampling_parser("generate", "Responses to prompts, as JSON lines.")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument("--data", metavar="FILE", help="as data.train takes; answers in it are not needed")
    given = parser.parse_intermixed_args(list(arguments))
    for option in ("limit", "split") if given.prompt else ():
        if getattr(given, option):
            parser.error(f"--{option} is for --data; leave it out beside --prompt")
    return given


def main(arguments: Sequence[str], serve: Serve = served) -> int:
    """The exit code. `serve`: replicas that have the config's weights."""
    given = parse(arguments)
    with scratch_folder() as scratch, contextlib.ExitStack() as files:
        with main_errors():
            source = find_source(given.what, scratch, given.step, given.overrides)
            config, prompts, asked = prepared(source, given)
            file = files.enter_context(answers.opened(given.to)) if given.to else sys.stdout
        for note in [*options.unused_overrides(given.overrides), *prompts.notes]:
            print(note, file=sys.stderr)
        if config.rollout.episode:
            print("rollout.episode is not played here: these are responses of one turn", file=sys.stderr)
        with machine_errors():
            with serve(config) as pool:
                got = pool.generate(requests_of(asked, prompts, config.run.seed)).result()
            answers.write(file, answers.lines(asked, prompts, got, None), empties=given.to is not None)
    return 0


def prepared(source: Source, given: argparse.Namespace) -> tuple[Config, Prompts, Evaluation]:
    """
    Raises:
        ConfigError: something in the config or the prompts cannot be used.
    """
    config = source.config.model_copy(update={"data": source.config.data.model_copy(update={"eval": ""})})
    options.check_servable(config)
    prompts = Prompts(config.model.path, config.data)
    found = examples(config, given)
    if options.has_default_length(source, given):
        config = options.with_room(config, prompts, found)
    asked = Evaluation("generate", found, sampling(config, given))
    check_lengths(config, asked, prompts)
    return options.with_model_len(source, config, [asked], prompts), prompts, asked


def examples(config: Config, given: argparse.Namespace) -> list[Example]:
    """The examples of --prompt, or of --data by data.prompt_key."""
    if given.prompt:
        for number, text in enumerate(given.prompt, start=1):
            refuse_if(not text.strip(), f"--prompt {number}: is empty", remedy="leave it out, or write one")
            message = f"--prompt {number}: is not UTF-8: {text!r:.80}"
            refuse_if(SURROGATE.search(text), message, remedy="write it in a terminal that speaks UTF-8, or take --data FILE")
        return [Example(text, "", number) for number, text in enumerate(given.prompt, start=1)]
    notes = list[str]()
    own = {"split": given.split, "split_key": "--split", "note": notes.append}
    found = load_examples(given.data, config.data.prompt_key, "", is_supervised=True, trains=False, **own)[: given.limit]
    check_turns(given.data, found, config.data)
    for note in [*notes, *unrendered(found, config.data)]:
        print(f"{given.data}: {note}", file=sys.stderr)
    return found


def sampling(config: Config, given: argparse.Namespace) -> Sampling:
    rollout, samples = config.rollout, given.samples or 1
    temperature = given.temperature if given.temperature is not None else rollout.temperature if samples > 1 else 0.0
    longest = given.max_new_tokens or rollout.max_new_tokens
    found = Sampling(num_samples=samples, max_new_tokens=longest, temperature=temperature, stop=rollout.stop)
    return replace(found, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p) if temperature else found


def check_lengths(config: Config, asked: Evaluation, prompts: Prompts) -> None:
    """ConfigError for a prompt that leaves no room for its response."""
    limit = config.rollout.max_model_len or check_model_folder(config.model.path).max_position_embeddings
    for example in asked.examples if limit else ():
        length, response = len(prompts.prompt_ids(example)), asked.sampling.max_new_tokens
        message = f"prompt {example.line}: its {length} tokens and {response} new ones are more than the {limit} that fit"
        remedy = f"write --max-new-tokens {max(1, limit - length)}, or shorten it"
        refuse_if(length + response > limit, message, remedy=remedy)
