"""A summary of what a run will do, printed by rank 0 at its start, and by `--check`. No torch in here.

Leaves out keys without effect (unused.py).

    print(banner(config, num_ranks=2, data=load_data(config)))
"""

from __future__ import annotations

from pathlib import Path

from bridge.versions.file import there
from engine.algorithm import PRESETS
from megasync.checks.resume import first_step, resumed_checkpoint
from megasync.config.errors import explain
from megasync.config.files import VERSIONS, has_results
from megasync.config.schema import Config
from megasync.data.load import RunData
from megasync.models.folder import model_shape
from megasync.models.tensors import num_parameters
from megasync.rewards.resolve import weights

SHOWN = 240  # characters of the first prompt


def banner(config: Config, num_ranks: int, data: RunData | None) -> str:
    """Several lines. `data`: None where it was not read."""
    checkpoint = resumed_checkpoint(config)
    first = first_step(config)
    lines = {"model": _model(config), "layout": _layout(config, num_ranks)}
    if config.algorithm.name == "grpo":
        lines |= {"preset": _preset(config), "rollouts": _rollouts(config), "reward": _reward(config)}
    lines |= _data(data, first * config.data.batch_size, config) if data is not None else {}
    lines["folder"] = str(config.run.folder)
    lines["resumes"] = _resumed(checkpoint, first) if checkpoint else _beginning(config)
    lines["will do"] = _plan(config, first)
    return explain(f"megasync: {config.algorithm.name} run {config.run.name!r}", **lines)


def _resumed(checkpoint: Path, first: int) -> str:
    is_newer = checkpoint != checkpoint.with_name(f"step_{first:08d}")
    return f"from {checkpoint}" + (f", with the weights of step {first}" if is_newer else "")


def _model(config: Config) -> str:
    folder, lora = Path(config.model.path), config.engine.lora
    kind = f"{model_shape(folder).model_type}, {_count(num_parameters(folder))} parameters, {config.model.dtype}"
    adapter = f"; adapters of rank {lora.rank}, sent {'merged' if lora.sync == 'merged' else 'alone'}" if lora.rank else ""
    return f"{folder}: {kind}{adapter}"


def _count(number: int) -> str:
    units = ((1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))
    scale, unit = next(((scale, unit) for scale, unit in units if number >= scale), units[-1])
    return f"{number / scale:.3g}{unit}"


def _layout(config: Config, num_ranks: int) -> str:
    own = config.engine.parallel
    data = num_ranks // (own.tensor * own.pipeline * own.context)
    sizes = {"data": data, "tensor": own.tensor, "pipeline": own.pipeline, "context": own.context, "expert": own.expert}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{_plural(num_ranks, 'rank')}{f' ({split})' if split else ''}, wrap {config.engine.wrap}"


def _rollouts(config: Config) -> str:
    own, batch = config.rollout, config.data.batch_size
    workers = f" of {own.tensor_parallel} workers" if own.tensor_parallel > 1 else ""
    workers += " in FP8" if own.dtype == "fp8" else ""
    behind = f"at most {_plural(own.max_staleness, 'version')} behind" if own.max_staleness else "in turns with training"
    where = "on the trainer's GPUs, in turns" if own.is_colocated else behind
    if own.episode:
        turns = f"up to {_plural(own.episode_max_turns, 'turn')} of up to {own.max_new_tokens} tokens each"
        samples = f"{_plural(batch, 'prompt')} x {own.group_size} episodes of {own.episode} a step, {turns}"
    else:
        samples = f"{_plural(batch, 'prompt')} x {own.group_size} samples a step, up to {own.max_new_tokens} tokens each"
    return f"{_plural(own.replicas, 'vLLM replica')}{workers}, {where}; {samples}"


def _preset(config: Config) -> str:
    """The keys that it sets, with the values that they have now."""
    name = config.algorithm.preset
    shown = ", ".join(f"{key} {getattr(config.algorithm, key)}" for key in PRESETS.get(name, {}))
    return f"{name}: {shown}" if shown else ""


def _reward(config: Config) -> str:
    named = [name if weight == 1 else f"{weight:g} x {name}" for name, weight in weights(config.rollout.reward).items()]
    return f"{'of the episode; where it returns none: ' if config.rollout.episode else ''}{', '.join(named)}"


def _data(data: RunData, num_trained: int, config: Config) -> dict[str, str]:
    lines = {"data": "; ".join(_examples(key, kept, read) for key, (kept, read) in data.counts.items())}
    example = data.train[data.order(config).index(num_trained)]
    text = data.prompts.prompt_text(example)
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    num_tokens = len(data.prompts.prompt_ids(example))
    lines["first prompt"] = f"{shown!r} ({_plural(num_tokens, 'token')}; answer {example.answer[:40]!r})"
    return lines


def _examples(key: str, kept: int, read: int) -> str:
    return f"{key} has {_plural(kept, 'example')}" + (f" ({read - kept} of {read} dropped: too long)" if kept < read else "")


def _beginning(config: Config) -> str:
    aside = ", the results of a former run are moved aside" if has_results(config.run.folder) else ""
    newest = max(there(config.run.folder / VERSIONS), default=0) if config.checkpoint.resume == "newest_weights" and aside else 0
    aside += f", and their log, up to version {newest}: checkpoint.resume=newest_weights needs a checkpoint" if newest else ""
    return f"nothing: from the weights of model.path{aside}"


def _plan(config: Config, first_step: int) -> str:
    run, every = config.run, config.checkpoint.every_steps
    parts = [f"steps {first_step + 1} to {run.steps}" if first_step < run.steps else f"nothing but the end of step {run.steps}"]
    if config.data.eval:
        due = config.rollout.evaluate_every_steps
        when = ["before the first"] if config.rollout.evaluate_at_start else []
        when += [_every(due)] if due else []
        parts.append(f"evaluation {', '.join([*when, 'after the last'])}")
    parts.append(f"checkpoint {_every(every)}, after the last" if every else "no checkpoint (checkpoint.every_steps = 0)")
    parts += ["weights to hf"] if run.export_hf else []
    return "; ".join(parts)


def _every(steps: int) -> str:
    return f"every {steps} steps" if steps > 1 else "every step"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
