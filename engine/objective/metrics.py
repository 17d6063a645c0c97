"""Metrics of an optimizer step: sums over all ranks, metrics computed from them, and the error where they are not finite.

Log-probs of a few samples are gathered on rank 0, to inspect single tokens. Leaves out where the sums come from
(loss.py). The functions that take a device are collective.

    chosen_log_probs([(0, micro)], table, chosen=[0, 8], device)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine.batch.batch import MicroBatch, SampleTable

if TYPE_CHECKING:
    from engine.algorithm import AlgorithmConfig
    from engine.objective.loss import Sums

MAXIMA = ("gap_max", "teacher_kl_max")
SUMS = {
    "sft": ("loss", "data", "tokens"),
    "grpo": (
        *("loss", "policy", "tokens", "ratio", "gap", "gap_max", "importance", "kl"),
        *("masked", "weight_count", "weight", "weight_square", "entropy", "own_gap"),
    ),
}
TEACHER_SUMS = {"sampled": ("teacher_kl",), "top_k": ("teacher_kl", "teacher"), "full": ("teacher_kl", "teacher")}


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; the message names the step's ranks."""


def reduce(outputs: Sequence[Sums], names: Sequence[str], device: torch.device) -> dict[str, float]:
    """Sums, or maxima, of the micro-batches' reports over all ranks; `outputs` is empty on ranks that report nothing."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = torch.stack([sum((out.get(name, zero) for out in outputs), zero) for name in names])
    maxima = torch.stack([max((out.get(name, zero) for out in outputs), default=zero) for name in MAXIMA])
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return {**dict(zip(names, sums.tolist(), strict=True)), **dict(zip(MAXIMA, maxima.tolist(), strict=True))}


def non_finite_error(loss: float, grad_norm: float, gradients: Iterable[torch.Tensor], device: torch.device) -> NonFiniteError:
    """The error of a step whose loss or gradient norm is not finite; it names the ranks whose `gradients` are not."""
    num_ranks = dist.get_world_size()
    bad = torch.zeros(num_ranks, device=device)
    bad[dist.get_rank()] = float(any(not bool(torch.isfinite(gradient).all()) for gradient in gradients))
    dist.all_reduce(bad)
    ranks = bad.nonzero().flatten().tolist()
    what = "gradient norm" if math.isfinite(loss) else "loss"
    return NonFiniteError(
        f"{what} is not finite (loss {loss}, gradient norm {grad_norm}); "
        f"non-finite gradients on rank(s) {ranks or 'none'} of {num_ranks}; algorithm.non_finite=skip leaves such steps out"
    )


def step_metrics(history: Sequence[dict[str, float]], algorithm: AlgorithmConfig) -> dict[str, float]:
    """The metrics of an update.

    `history` has for each optimizer step the sums, the gradient norm, the learning rate and whether it was skipped. Means are
    over the steps that were not, if there are any. `loss/total` is all that has gradients; `loss/kl` has no coefficient. What
    the algorithm does not measure, such as a KL without a coefficient, has no metric.
    """
    num_skipped = sum(sums["skipped"] for sums in history)
    scale = history[-1].get("loss_scale", 0.0)
    history = [sums for sums in history if not sums["skipped"]] or history
    tokens = sum(sums["tokens"] for sums in history)
    average = {name: sum(sums[name] for sums in history) / len(history) for name in history[0]}
    total = {name: sum(sums[name] for sums in history) for name in history[0]}
    mean = {name: value / max(tokens, 1) for name, value in total.items()}
    metrics = {
        **({"loss/policy": average["policy"]} if algorithm.name == "grpo" else {"loss/sft": average["data"]}),
        "grad_norm": average["grad_norm"],
        "learning_rate": history[-1]["learning_rate"],
        "train/response_tokens": tokens,
        "train/skipped_steps": num_skipped,
    }
    metrics |= {"train/loss_scale": scale} if scale else {}
    metrics |= {"loss/load_balancing": average["balance"]} if algorithm.load_balancing else {}
    metrics |= teacher_metrics(mean, average, history) if "teacher_kl" in mean else {}
    if algorithm.name == "grpo":
        metrics["loss/total"] = average["loss"] + algorithm.load_balancing * average.get("balance_of_layers", 0.0)
        metrics |= policy_metrics(mean, total, history, algorithm)
    return metrics


def policy_metrics(
    mean: Mapping[str, float], total: Mapping[str, float], history: Sequence[dict[str, float]], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """From means over tokens and totals of the steps of `history`: ratios, gap to the rollouts, weights, KL and entropy."""
    first = history[0]
    metrics = {
        "ratio/first_minibatch_mean": first["ratio"] / max(first["tokens"], 1),
        "ratio/mean": mean["ratio"],
        **({"ratio/clipped_fraction": mean["clipped"]} if "clipped" in mean else {}),
        "logprob_gap/mean": mean["gap"],
        "logprob_gap/max": max(sums["gap_max"] for sums in history),
    }
    if algorithm.importance_correction != "none":
        metrics["importance/mean"] = mean["importance"]
        metrics["importance/ess"] = effective_share(total["weight_count"], total["weight"], total["weight_square"])
    metrics |= {"importance/masked_fraction": mean["masked"]} if algorithm.importance_correction == "mask" else {}
    metrics |= {"loss/kl": mean["kl"]} if algorithm.kl_coefficient > 0 else {}
    metrics |= {"ratio/dual_clipped_fraction": mean["dual_clipped"]} if "dual_clipped" in mean else {}
    metrics |= {"logprob_gap/own_experts_mean": mean["own_gap"]} if algorithm.log_router_gap else {}
    if algorithm.router_replay == "rollout":
        metrics["router_replay/moved_fraction"] = total["moved"] / max(total["compared"], 1)
    metrics |= {"entropy/mean": mean["entropy"]} if algorithm.log_entropy or algorithm.entropy_coefficient else {}
    return metrics | {name: value for name, value in mean.items() if name.startswith("loss/")}  # reported by the loss function


def teacher_metrics(
    mean: Mapping[str, float], average: Mapping[str, float], history: Sequence[dict[str, float]]
) -> dict[str, float]:
    """From means over tokens, averages over the steps of `history`, and its maxima; the loss if the teacher has a term in it."""
    found = {"teacher/kl_mean": mean["teacher_kl"], "teacher/kl_max": max(sums["teacher_kl_max"] for sums in history)}
    return found | ({"loss/teacher": average["teacher"]} if "teacher" in average else {})


def effective_share(count: float, total: float, total_of_squares: float) -> float:
    """Kish's effective sample size of weights, (sum w)^2 / sum w^2, over their number.

    From 1 / count, where one weight has all, to 1, where all are equal; 0 where all weights are 0 or there are none.
    """
    return min(total**2 / (count * total_of_squares), 1.0) if total_of_squares else 0.0  # NaN stays NaN


def chosen_log_probs(
    packed: Iterable[tuple[int, MicroBatch]], samples: SampleTable, chosen: Sequence[int], device: torch.device
) -> list[npt.NDArray[np.float32]]:
    """For each of the `chosen` samples `policy_log_probs` of its response tokens; on other ranks than 0 [].

    One reduction of these tokens alone, to which each sample comes from one rank. `packed`: micro-batches of the ranks that
    speak for theirs, on others none, each with the place in the batch of its mini-batch's first sample.
    """
    if not chosen:
        return []
    lengths, prompts = samples.response_lengths[list(chosen)], samples.prompt_lengths
    ends = np.cumsum(lengths)
    places = dict(zip(chosen, zip((ends - lengths).tolist(), lengths.tolist(), strict=True), strict=True))
    flat = torch.zeros(int(lengths.sum()), device=device)
    for first_sample, micro in packed:
        for index, start in zip(micro.samples, micro.starts, strict=False):  # a stand-in has no samples
            sample = first_sample + index
            if sample in places:
                assert micro.policy_log_probs is not None, "the batch was not trained on"
                (place, length), begin = places[sample], start + int(prompts[sample]) - 1
                flat[place : place + length] = micro.policy_log_probs[begin : begin + length]
    dist.reduce(flat, dst=0)
    return np.split(flat.cpu().numpy(), ends[:-1]) if dist.get_rank() == 0 else []
