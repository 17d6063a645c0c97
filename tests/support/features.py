"""Features of whole runs as keys of the config, in groups (a run has at most one of each), and their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasync.tools.assets.command import VOCABULARY, build_tokenizer, write_assets
from tests.engine.model.lora_cases import write_peft_adapter
from tests.support.judge_server import MODEL
from tests.support.tiny_models import write_tiny_model

OWN = "tests.support.own_parts"
Keys = dict[str, Any]


def of_teachers(folder: Path) -> dict[str, Keys]:
    other = {"teacher.path": str(folder / "other" / "model"), "teacher.reward_weight": 0.5}
    inside, start = {**other, "teacher.place": "trainer"}, {"teacher.version": "start"}
    full, top = {"teacher.objective": "full"}, {"teacher.objective": "top_k", "teacher.top_k": 8}
    jsd, forward = {"teacher.divergence": "jsd"}, {"teacher.divergence": "forward_kl"}
    return {
        "sampled": inside,
        "full": {**inside, **full},
        "jsd": {**inside, **full, **jsd},
        "start_forward": {**start, **top, **forward},
        "start_jsd": {**start, **full, **jsd},
        "served": other,
        "served_top": {**other, **top, **jsd},
        "adapter": {"teacher.adapter_path": str(folder / "adapter"), **full, **forward},
        "adapter_sampled": {"teacher.adapter_path": str(folder / "adapter")},
    }


def features(folder: Path, url: str) -> list[dict[str, Keys]]:
    """Groups of features with their keys; a run has at most one feature of a group."""
    judge = {"endpoint": [url], "model": MODEL, "prompt": "{{ prompt }}|{{ response }}", "scale": [0, 10], "on_unparsed": "zero"}
    judged = {"judges.quality": judge}
    source, sampler = str(folder / "assets" / "train.jsonl"), {"data.sampler": f"{OWN}:Sampler"}
    sources = {"some": {"path": source, "weight": 2}, "others": {"path": str(folder / "other" / "train.jsonl")}}
    rewarded = {name: {**each, "rewards": "token_count"} if name == "some" else each for name, each in sources.items()}
    taught = {"some": str(folder / "other" / "model"), "others": str(folder / "assets" / "model")}
    in_reward = {"algorithm.kl_coefficient": 0.01, "algorithm.kl_estimator": "k1", "algorithm.kl_in": "reward"}
    losses = {name: {"algorithm.preset": name} for name in ("cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "gspo", "dapo")}
    named = ("remax", "pass_at_k", "reinforce_plus_plus_baseline")
    experts, lora = {"model.path": str(folder / "experts")}, {"engine.lora.rank": 4, "engine.lora.alpha": 8}
    drafts = {"rollout.speculation.method": "draft_model", "rollout.speculation.path": str(folder / "other" / "model")}
    episodes = {"rollout.episode": "tests.support.fuzzed:scored", "rollout.episode_max_turns": 2, "rollout.max_model_len": 48}
    return [
        of_teachers(folder),
        {**losses, "own_loss": {"algorithm.loss": f"{OWN}:loss"}, "entropy": {"algorithm.entropy_coefficient": 0.01}},
        {
            **{name: {"algorithm.advantage": name} for name in named},
            "own_advantage": {"algorithm.advantage": f"{OWN}:advantage"},
            "reinforce_plus_plus": {"algorithm.advantage": "reinforce_plus_plus", **in_reward},
            "gdpo": {"algorithm.advantage": "gdpo", "rollout.reward": {"token_count": 1.0, "exact_match": 0.5}},
        },
        {"judge": {**judged, "rollout.reward": {"judge:quality": 1.0}},
         "judges": {**judged, "rollout.reward": {"judge:quality": 1.0, "token_count": 0.5}}},
        {"ties": {"algorithm.filter_groups": True}, "own_filter": {"rollout.filter": f"{OWN}:keep"}},
        {"own_sampler": {**sampler, "data.sampler_arguments": {"stride": 3}}, "difficulty": {"data.sampler": "difficulty"}},
        {"sources": {"data.train": sources}, "taught": {"data.train": sources, "teacher.path": taught},
         "rewarded": {"data.train": rewarded, "rollout.reward": {"token_count": 1.0, "exact_match": 0.5}}},
        {"oversample": {"rollout.oversample": 1.5}},
        {"support": {"algorithm.support_replay": True, "rollout.top_k": 16, "rollout.top_p": 0.8}},
        {"lora": lora, "lora_adapter": {**lora, "engine.lora.sync": "adapter"}},
        {"experts": experts, "routes": {**experts, "algorithm.router_replay": "rollout"}},
        {"episodes": episodes, "turns": {**episodes, "algorithm.credit": "turn"}},
        {"stale": {"rollout.max_staleness": 4}, "stale_continue": {"rollout.max_staleness": 4, "rollout.on_update": "continue"}},
        {"ngram": {"rollout.speculation.method": "ngram", "rollout.speculation.prompt_lookup_min": 1}, "draft_model": drafts},
        {"packed": {"engine.tokens_per_microbatch": 64}},
        {"ddp": {"engine.wrap": "ddp"}},
    ]  # fmt: skip


def prepared(folder: Path) -> None:
    """The folders that the features name."""
    assets = write_assets(folder / "assets", seed=0)
    write_assets(folder / "other", seed=7)
    write_tiny_model(folder / "experts", "qwen3_moe", vocab_size=len(VOCABULARY))
    build_tokenizer().save_pretrained(folder / "experts")
    write_peft_adapter(folder / "adapter", str(assets.model), shared=True)
