"""Every metric that a run writes: its human name, unit and meaning, for the report and docs/metrics.md (reference.py).

Leaves out how metrics come about (engine/objective/metrics.py, megasync/rollouts/, megasync/run/) and which are drawn together
(curves.py). No torch in here.

    metric("reward/mean").label            # "Sampled reward"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

GROUPS = {
    "learning": "What the policy is trained on and how it changes.",
    "rollouts": "What the replicas generate, and how old it is when it is trained on.",
    "speed": "Where the time goes, and memory.",
    "sync": "Weights on their way from the trainer to vLLM.",
    "sameness": "How much trainer and vLLM agree about the same tokens.",
}
SHARE, NATS, SECONDS, BYTES, TOKENS_A_SECOND = "share", "nats", "s", "bytes", "tokens/s"


@dataclass(frozen=True)
class Metric:
    """`key` as in metrics.jsonl and evaluations.jsonl; a word in capitals in it stands for any. `unit`: empty for none."""

    key: str
    label: str
    unit: str
    meaning: str
    group: str

    def named(self, key: str) -> str:
        """The label of one key that this metric stands for, with what its capitals are there."""
        match = _pattern(self.key).fullmatch(key)
        values = match.groupdict() if match else {}
        return re.sub("|".join(values), lambda name: values[name[0]], self.label) if values else self.label


def _of(group: str, *rows: tuple[str, str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(*row, group) for row in rows)


METRICS = (
    *_of(
        "learning",
        ("eval/reward", "Held-out reward", "", "Mean reward of greedy responses to data.eval, where that is one file."),
        ("eval/reward_error", "Held-out reward's error", "", "Its standard error, over the prompts."),
        ("eval/accuracy", "Held-out accuracy", SHARE, "sft: examples of data.eval of which greedy decoding gives the answer."),
        ("eval/loss", "Held-out loss", NATS, "sft: negative log-likelihood of the answers of data.eval, a token."),
        ("eval/perplexity", "Held-out perplexity", "", "sft: the exponential of the held-out loss."),
        ("eval/accuracy_error", "Held-out accuracy's error", SHARE, "Its standard error, over the examples."),
        ("eval/NAME/avg@K", "NAME avg@K", "", "Mean reward of K samples a prompt of an evaluation set."),
        ("eval/NAME/pass@K", "NAME pass@K", SHARE, "Chance that one of K samples passes, that is has `pass_reward` or more."),
        ("eval/NAME/error", "NAME's error", "", "Standard error of avg@K, over the prompts."),
        ("eval/NAME/truncated", "NAME truncated", SHARE, "Responses to an evaluation set that were cut off at the limit."),
        ("reward/mean", "Sampled reward", "", "Mean reward of the step's responses, before any penalty for length."),
        ("reward/std", "Reward deviation", "", "Standard deviation of the rewards of the step's responses."),
        ("reward/penalty_mean", "Length penalty", "", "Mean of what algorithm.truncated=penalise adds to rewards, -1 to 0."),
        ("reward/failures", "Failed rewards", "calls", "Calls of rewards that failed and counted as 0."),
        ("reward/NAME", "Reward NAME", "", "Mean of one reward, where rollout.reward names several; without its weight."),
        ("groups/tied_fraction", "Tied groups", SHARE,
         "Groups whose rewards are all equal: their advantage is 0, nothing is learnt."),
        ("loss/policy", "Policy loss", "",
         "The clipped policy gradient's loss; its sign and size say little, only that it is not 0."),
        ("loss/sft", "Supervised loss", NATS, "Negative log-likelihood of the answers, a token."),
        ("loss/total", "Total loss", "", "All that has gradients: policy, KL and load balancing with their coefficients."),
        ("loss/kl", "KL to the reference", NATS,
         "Where algorithm.kl_coefficient is above 0: estimate (k3) of the KL divergence to the start model, without it."),
        ("loss/load_balancing", "Load-balancing loss", "", "Of the routers; 1 where all experts get the same."),
        ("grad_norm", "Gradient norm", "", "Global norm before clipping, mean of the step's mini-batches."),
        ("learning_rate", "Learning rate", "", "After the schedule's last optimizer step."),
        ("entropy/mean", "Policy entropy", NATS, "Mean entropy of the next token's distribution at the rollouts' temperature."),
        ("ratio/mean", "Policy ratio", "", "Mean of new over old probability of the trained tokens."),
        ("ratio/first_minibatch_mean", "First policy ratio", "", "The same in the first mini-batch, where it must be 1."),
        ("ratio/clipped_fraction", "Clipped tokens", SHARE, "Tokens whose loss is at the clip's bound and gives no gradient."),
        ("ratio/dual_clipped_fraction", "Dual-clipped tokens", SHARE, "Tokens at algorithm.dual_clip."),
        ("train/skipped_steps", "Skipped optimizer steps", "steps", "Left out since loss or gradient norm was not finite."),
        ("train/loss_scale", "Loss scale", "", "model.dtype=float16: what the loss of the step was multiplied by."),
        ("lora/merge_error", "LoRA merge error", SHARE, "Share of the adapters' update that rounding the merged weights loses."),
    ),
    *_of(
        "rollouts",
        ("response/tokens_mean", "Response length", "tokens", "Mean length of the step's responses."),
        ("response/truncated_fraction", "Truncated responses", SHARE, "Cut off at rollout.max_new_tokens before they ended."),
        ("staleness/mean", "Mean staleness", "versions", "How many versions the trained tokens are behind, on average."),
        ("staleness/max", "Largest staleness", "versions", "The same of the oldest token; at most rollout.max_staleness."),
        ("rollout/lead_batches", "Lead of the replicas", "batches", "How many batches they may be ahead of the trainer."),
        ("rollout/filtered_groups", "Filtered groups", "groups",
         "Groups with equal rewards that were replaced (algorithm.filter_groups)."),
        ("train/response_tokens", "Trained tokens", "tokens", "Sampled tokens in the step's loss."),
        ("episode/turns_mean", "Turns", "turns", "Mean number of the turns of an episode."),
        ("episode/tool_seconds", "Time in tools", SECONDS,
         "Mean of an episode: its tools, its environment and its own code, without what it waited for the model or a thread."),
        ("episode/tool_share", "Share of time in tools", SHARE, "The same over the episodes' whole time."),
        ("episode/sampled_tokens", "Sampled tokens", "tokens", "Mean of an episode: what is trained."),
        ("episode/given_tokens", "Given tokens", "tokens", "Mean of an episode: its prompt, tool results, separators of turns."),
        ("episode/branches", "Branches", "", "Mean number of training sequences of an episode."),
        ("episode/prefix_hits", "Prefix hits", SHARE, "Of the turns' prompt tokens: those that their replica had before."),
        ("episode/failures", "Failed episodes", "episodes", "What went wrong in the batch's episodes, retries included."),
        ("episode/dropped", "Dropped episodes", "episodes", "Left out of the batch (rollout.episode_on_failure=drop)."),
        ("episode/resumed", "Resumed episodes", "episodes", "Went on with the turns that they had at a checkpoint."),
        ("episode/anew", "Episodes begun anew", "episodes",
         "At a checkpoint they had turns, and when they were resumed something answered otherwise."),
        ("episode/NAME", "NAME of an episode", "",
         "Mean of what episodes return in `metrics` under that name; with `_returned` behind one that is in this table."),
    ),
    *_of(
        "speed",
        ("step/seconds", "Step time", SECONDS, "Wall time of the step."),
        ("step/NAME_seconds", "NAME", SECONDS, "Wall time of one phase of the step; the phases add up to it."),
        ("rollout/seconds", "Generation time", SECONDS,
         "From a batch's first request to its last response, or since the batch before."),
        ("rollout/wait_seconds", "Trainer waits", SECONDS, "How long the trainer waited for the step's batch."),
        ("rollout/tokens_per_second", "Generated", TOKENS_A_SECOND, "Response tokens of the batch over its generation time."),
        ("train/tokens_per_second", "Whole step", TOKENS_A_SECOND, "Trained response tokens over the step's wall time."),
        ("memory/host_bytes", "Host memory of rank 0", BYTES, "Resident memory of the process at the end of the step."),
        ("memory/host_peak_bytes", "Peak host memory of rank 0", BYTES, "The most that was resident since the process began."),
        ("memory/device_bytes", "Memory in use on rank 0's GPU", BYTES,
         "By all processes; rank 0's view at the end of the step."),
        ("memory/training_device_bytes", "The same while it trains", BYTES,
         "Where replicas share the GPU and sleep meanwhile; once the batch is trained."),
        ("memory/worker_device_bytes", "Memory in use on a vLLM worker's GPU", BYTES,
         "In summary.json: by all processes, at the end of the run; the most of all workers."),
        ("memory/worker_host_peak_bytes", "Peak host memory of a vLLM worker", BYTES,
         "In summary.json: the most that was resident since the process began; of the largest worker."),
        ("memory/device_total_bytes", "Memory of rank 0's GPU", BYTES, "All there is."),
        ("memory/tensors_bytes", "Tensors of rank 0", BYTES, "Allocated by torch on the GPU at the end of the step."),
        ("memory/tensors_peak_bytes", "Peak tensors of rank 0", BYTES, "The most that torch had allocated during the step."),
        ("train/padding_fraction", "Padding", SHARE, "Tokens of the micro-batches that are padding."),
    ),
    *_of(
        "sync",
        ("sync/sent_bytes", "Sent", BYTES, "Of the sync to each worker, by transport delta."),
        ("sync/seconds", "Sync time", SECONDS, "From the last running request to where vLLM could go on."),
        ("sync/pause_seconds", "Generation paused", SECONDS, "How long the replicas stood still for the sync."),
        ("sync/bytes", "Sync size", BYTES, "Weights that one sync sends."),
        ("sync/gb_per_second", "Sync bandwidth", "GB/s", "Size over time."),
        ("sync/verified", "Verified", "0 or 1", "1 where every bucket's digest was compared and agreed."),
        ("sync/replicas", "Replicas", "", "That were brought to the version."),
        ("sync/canary_seconds", "Canary time", SECONDS, "What scoring the canary prompt on both sides took."),
        ("sync/log_seconds", "Log time", SECONDS, "What writing the version into sync.log took."),
        ("sync/log_bytes", "Log size", BYTES, "Of the version in sync.log."),
        ("sync/changed_fraction", "Changed weights", SHARE, "Elements that differ from the version before, in whole bits."),
        ("version", "Version", "", "Number of optimizer steps behind the weights that the replicas have after the step."),
    ),
    *_of(
        "sameness",
        ("logprob_gap/mean", "Mean log-prob gap", NATS,
         "Mean absolute difference between trainer's and vLLM's log-probs of a token; staleness adds what was learnt since."),
        ("logprob_gap/max", "Largest log-prob gap", NATS, "The same of the worst token."),
        ("exact/compared_tokens", "Tokens compared", "tokens",
         "model.exact: tokens of the step that were sampled by the very weights that it trains, prefix and all."),
        ("exact/differing_tokens", "Tokens that differ", "tokens", "Those whose two log-probs have not the same bits."),
        ("logprob_gap/own_experts_mean", "Gap with own experts", NATS,
         "The mean gap, were the trainer's routers to choose the experts."),
        ("router_replay/moved_fraction", "Replayed choices", SHARE,
         "Choices of experts in which vLLM's routers and the trainer's differ."),
        ("importance/mean", "Importance weight", "",
         "With algorithm.importance_correction: mean weight of the tokens for being sampled by another policy."),
        ("importance/ess", "Effective sample size", SHARE,
         "With algorithm.importance_correction: of its weights, over their number; 1 where all are equal."),
        ("importance/masked_fraction", "Masked tokens", SHARE,
         "Tokens left out of the loss by algorithm.importance_correction=mask."),
        ("sync/canary_gap", "Canary gap", NATS, "Largest difference of both sides' log-probs of a fixed prompt after a sync."),
    ),
)  # fmt: skip


def metric(key: str) -> Metric | None:
    """What the table says of `key`; None where it says nothing. A row of that very key comes before one with capitals."""
    return next((each for each in METRICS if _pattern(each.key).fullmatch(key)), None)


def label(key: str) -> str:
    found = metric(key)
    return found.named(key) if found else key


@lru_cache(maxsize=1000)
def _pattern(key: str) -> re.Pattern[str]:
    """A name at the key's end, such as of an episode's own metric, may have slashes in it."""
    escaped = re.escape(key)
    return re.compile(re.sub("[A-Z]+", lambda name: rf"(?P<{name[0]}>{'.' if name.end() == len(escaped) else '[^/]'}+)", escaped))
