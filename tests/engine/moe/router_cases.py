"""What tests/engine/moe/test_router.py runs: layers with a shared expert, the load-balancing loss and given experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bridge.export.source import whole_tensors
from engine.moe import experts
from engine.runtime import parallel
from engine.config import ParallelConfig
from engine.runtime.megatron import get_gpt_decoder_block_spec
from engine.sample import Sample
from bench.equivalence.measure import leave_groups
from tests.engine.engine_cases import engine, exporter, log_probs, random_samples
from tests.engine.moe.expert_cases import GRADIENT_STEP


def shared_expert(*, gated: bool) -> float:
    """Largest difference of outputs and inputs' gradients to transformers' Qwen2Moe block, over the largest value.

    Not `gated`: that block's gate is open.
    """
    from transformers import Qwen2MoeConfig, Qwen3MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    parallel.initialize(ParallelConfig(), seed=0)
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64, "moe_intermediate_size": 32}
    hf_config = Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=96, norm_topk_prob=False)
    hf_block = Qwen2MoeSparseMoeBlock(hf_config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in hf_block.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    shared_sizes = {"shared_expert_intermediate_size": 96} if gated else {"n_shared_experts": 3}
    fields = experts.config_arguments(Qwen3MoeConfig(**sizes, **shared_sizes, norm_topk_prob=False))
    layer = _expert_layer(**fields)
    with torch.no_grad():
        layer.router.weight.copy_(hf_block.gate.weight)
        layer.experts.linear_fc1.weight.copy_(hf_block.experts.gate_up_proj.flatten(0, 1))
        layer.experts.linear_fc2.weight.copy_(hf_block.experts.down_proj.flatten(0, 1))
        shared = hf_block.shared_expert
        layer.shared_experts.linear_fc1.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
        layer.shared_experts.linear_fc2.weight.copy_(shared.down_proj.weight)
        if gated:
            layer.shared_experts.gate_weight.copy_(hf_block.shared_expert_gate.weight)
        else:
            hf_block.shared_expert_gate = _Open()
    given = torch.randn(7, 1, 64, generator=generator)
    found = []
    for block in (layer, hf_block):
        inputs = given.clone().requires_grad_()
        output = block(inputs)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        found.append((output.detach(), inputs.grad))
    leave_groups()
    return max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in zip(*found, strict=True))


def _expert_layer(**fields: Any) -> Any:
    """8 experts, of which 3 are chosen, on tokens of 64 numbers."""
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, num_moe_experts=8, moe_ffn_hidden_size=32, moe_router_topk=3,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, moe_token_dispatcher_type="alltoall", **fields,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm").layer_specs[0]
    experts.use_grouped_experts(spec)
    layer = build_module(spec.submodules.mlp, config=config)
    layer.set_layer_number(1)
    return layer


def recomputed_layer() -> float:
    """Largest difference of gradients to those of a layer that is not computed again, after two passes with other experts."""
    from engine.batch.packed import Routing

    parallel.initialize(ParallelConfig(), seed=0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 7, 1, 64, generator=generator)
    given = [torch.rand(7, 1, 8, generator=generator).argsort(-1)[..., :3].to(torch.int16) for _ in inputs]
    plain = _expert_layer()
    again = _expert_layer(recompute_granularity="selective", recompute_modules=["moe"])
    with torch.no_grad():
        for mine, other in zip(again.parameters(), plain.parameters(), strict=True):
            mine.copy_(other)
    assert again.is_recomputed and not plain.is_recomputed
    gradients = []
    for layer in (plain, again):
        losses = []
        for each, chosen in zip(inputs, given, strict=True):
            layer.router.token_routing = Routing(torch.ones(7, dtype=torch.bool), 1.0, chosen)
            losses.append(layer(each.clone().requires_grad_())[0].square().sum())
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
        assert layer.router.sums["compared"] == 2 * 7 * 3
        layer.router.token_routing = Routing(torch.zeros(7, dtype=torch.bool), 0.0, given[0])
        layer(inputs[0])
        assert layer.router.sums["compared"] == 2 * 7 * 3, "tokens of a stand-in count nowhere"
    leave_groups()
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


class _Open(torch.nn.Module):
    """A gate whose sigmoid is 1."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.full_like(inputs[..., :1], torch.inf)


def balance_against_hf(path: str, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The load-balancing loss of a step of several micro-batches, and the gradients with it, against transformers' own."""
    results = []
    for case in cases:
        samples = random_samples(16, seed=3)
        with engine(path, name="sft", optimizer=GRADIENT_STEP, load_balancing=0.3, tokens=100, **case) as built:
            before = {name: tensor.clone() for name, tensor in whole_tensors(exporter(built))}
            minibatches = built.prepare(samples)
            mine = [micro.samples for micro in minibatches[0].microbatches]
            metrics = built.update(minibatches)
            found = {name: before[name] - tensor for name, tensor in whole_tensors(exporter(built))}
            pairs: list[Any] = [None] * built.layout.world_size
            dist.all_gather_object(pairs, (built.layout.data_rank, mine))
            each = dict(pairs).values()
        loss, expected = _hf_balance(path, samples, [micro for of_rank in each for micro in of_rank if micro], 0.3)
        compared = [name for name in found if name in expected]
        worst = max([float((found[name] - expected[name]).abs().max()) for name in compared], default=0.0)
        reported = {"difference": abs(metrics["loss/load_balancing"] - loss), "num_compared": len(compared), "worst": worst}
        results.append({**reported, "num_microbatches": len(mine), "loss": loss})
    return results


def _hf_balance(
    path: str, samples: list[Sample], microbatches: list[list[int]], coefficient: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over layers and tokens, and the gradients of the whole loss of what has the same names there."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = model.config
    num_tokens, num_answers = sum(s.num_tokens for s in samples), sum(len(s.response_ids) for s in samples)
    logged = 0.0
    for micro in microbatches:
        layers: list[list[torch.Tensor]] = [[] for _ in range(config.num_hidden_layers)]
        loss = torch.zeros(())
        for index in micro:
            prompt, answer = samples[index].prompt_ids.tolist(), samples[index].response_ids.tolist()
            output = model(torch.tensor([prompt + answer]), output_router_logits=True)
            log_probs = torch.log_softmax(output.logits[0, len(prompt) - 1 : -1], -1)
            loss = loss - log_probs.gather(1, torch.tensor(answer)[:, None]).sum() / num_answers
            for layer, logits in zip(layers, output.router_logits, strict=True):
                layer.append(logits)
        share = sum(samples[index].num_tokens for index in micro) / num_tokens
        for layer in layers:
            probs = torch.cat(layer).softmax(-1)
            chosen = torch.zeros_like(probs).scatter(1, probs.topk(config.num_experts_per_tok).indices, 1.0)
            balance = config.num_experts * (probs.mean(0) * chosen.mean(0)).sum() / config.num_experts_per_tok
            loss = loss + coefficient * share * balance
            logged += float(balance) * share / len(layers)
        loss.backward()
    return logged, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def replay_against_hf(path: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probs and gradients where every token goes through experts drawn at random, and where through transformers' choice."""
    results = []
    samples = random_samples(12, seed=3)
    own_log_probs, own_gradients, chosen = hf_routed(path, samples, None)
    drawn = _random_experts(samples, chosen)
    drawn_log_probs, drawn_gradients, _ = hf_routed(path, samples, drawn)
    own = [dataclasses.replace(sample, routed_experts=rows[:-1]) for sample, rows in zip(samples, chosen, strict=True)]
    moved = [dataclasses.replace(sample, routed_experts=rows[:-1]) for sample, rows in zip(samples, drawn, strict=True)]
    for case in cases:
        found: dict[str, Any] = {}
        options = {"optimizer": GRADIENT_STEP, "tokens": 100, "router_replay": "rollout", **case}
        for name, given, log_probs_there, gradients in (
            ("own", own, own_log_probs, own_gradients),
            ("drawn", moved, drawn_log_probs, drawn_gradients),
        ):
            with engine(path, name="sft", **options) as built:
                mine = log_probs(built, given)
                plain = log_probs(built, samples)  # no experts given
                found[f"{name} same"] = all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
                found[f"{name} log-probs"] = max(float((a - b).abs().max()) for a, b in zip(mine, log_probs_there, strict=True))
                before = {key: tensor.clone() for key, tensor in whole_tensors(exporter(built))}
                built.update(built.prepare(given))
                moves = {key: before[key] - tensor for key, tensor in whole_tensors(exporter(built)) if key in gradients}
            found[f"{name} gradients"] = max([float((moves[key] - gradients[key]).abs().max()) for key in moves], default=0.0)
        with engine(path, name="grpo", log_router_gap=True, kl_coefficient=0.1, **options) as built:
            metrics = built.update(built.prepare(moved))
        found["moved"] = metrics["router_replay/moved_fraction"]
        for name, values in (("mean", drawn_log_probs), ("own_experts_mean", own_log_probs)):
            expected = float((torch.cat(values) + 4.8).abs().mean())
            found[f"gap {name}"] = abs(metrics[f"logprob_gap/{name}"] - expected)
        apart = torch.cat(own_log_probs) - torch.cat(drawn_log_probs)  # the reference goes through its own experts
        expected = float((apart.exp() - apart - 1).mean())
        found["kl"] = abs(metrics["loss/kl"] - expected) / expected
        results.append(found)
    return results


def _random_experts(samples: list[Sample], chosen: list[Any]) -> list[Any]:
    """As `chosen`, of other experts; the last token, of which nothing is known in a rollout, keeps its own."""
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for rows in chosen:
        num_tokens, num_layers, num_chosen = rows.shape
        order = torch.rand(num_tokens, num_layers, 8, generator=generator).argsort(-1)[..., :num_chosen].numpy()
        order[-1] = rows[-1]
        drawn.append(order.astype(np.uint8))
    return drawn


def hf_routed(
    path: str, samples: list[Sample], given: list[Any] | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[Any]]:
    """Log-probs of the responses, gradients of their mean, and each token's experts, which are `given` or the model's choice.

    As vLLM tells them: 0 in layers without experts.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    gates = {number: layer.mlp.gate for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    factor = getattr(model.config, "routed_scaling_factor", None)  # of routers with sigmoid scores
    chosen: dict[int, Any] = {}
    rows: Any = None

    def route(number: int, result: Any) -> Any:
        logits, scores, indices = result
        if rows is not None:
            indices = torch.from_numpy(rows[:, number].astype(np.int64))
            scores = (logits.sigmoid() if factor else logits.softmax(-1)).gather(1, indices)
            scores = scores / scores.sum(-1, keepdim=True) * (factor or 1.0)
        chosen[number] = indices
        return logits, scores, indices

    for number, gate in gates.items():
        gate.register_forward_hook(lambda _module, _inputs, result, number=number: route(number, result))
    num_answers = sum(len(sample.response_ids) for sample in samples)
    values, experts_of = [], []
    for index, sample in enumerate(samples):
        rows = None if given is None else given[index]
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        every = torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1], -1)
        picked = every.gather(1, ids[0, len(sample.prompt_ids) :, None]).squeeze(1)
        (-picked.sum() / num_answers).backward()
        values.append(picked.detach())
        none = torch.zeros_like(next(iter(chosen.values())))
        layers = [chosen.get(number, none) for number in range(model.config.num_hidden_layers)]
        experts_of.append(torch.stack(layers, 1).numpy().astype(np.uint8))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return values, gradients, experts_of
