"""Times kernels of other libraries beside torch's on one GPU, rounds of all in turn: docs/bench/kernel_speeds.py OUT.json

What is not installed is left out, what fails is named. TransformerEngine, apex's extensions amp_C and
fused_weight_gradient_mlp_cuda, and flash_attn_interface (FlashAttention 3) are looked for.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from engine.attention import flash
from engine.batch.packed import PackedSequences

Cases = dict[str, Callable[[], Any]]
TOKENS, ROUNDS, CALLS = 16384, 7, 5
BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - what an extension raises that was built for other versions
        print(f"without {name}: {error!r}"[:200])
        return None


def medians(cases: Cases) -> dict[str, Any]:
    """Milliseconds of a call, the median of rounds in which all take turns; of a failing one what it raised."""
    found: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    for name, call in cases.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            times[name] = []
        except Exception as error:  # noqa: BLE001 - likewise
            found[name] = f"{error!r}"[:200]
    for _ in range(ROUNDS):
        for name, each in times.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                cases[name]()
            end.record()
            torch.cuda.synchronize()
            each.append(start.elapsed_time(end) / CALLS)
    return found | {name: round(statistics.median(each), 4) for name, each in times.items()}


def parameter(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, **BF16, requires_grad=True)


def both_passes(run: Callable[[], Any], inputs: list[torch.Tensor], gradient: torch.Tensor) -> Callable[[], Any]:
    def call() -> Any:
        out = run()
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, inputs, gradient.view_as(out))

    return call


def attention() -> Iterator[tuple[str, Cases, float]]:
    three = library("flash_attn_interface")
    for lengths in ([512] * 32, [700, 1300, 350, 2048, 90, 1500] * 2, [2048] * 8, [4096] * 4, [8192] * 2, [32768]):
        for heads, groups in ((16, 2), (32, 8)):
            q, gradient = parameter(sum(lengths), heads, 128), parameter(sum(lengths), heads, 128)
            k, v = (parameter(sum(lengths), groups, 128) for _ in range(2))
            packed = PackedSequences.from_lengths(lengths, torch.device("cuda"))
            ends, longest = packed.cu_seqlens_q, max(lengths)
            runs: Cases = {"torch": lambda a=(q, k, v, packed): flash.attend(*a, None)}
            if three:
                run, sizes = three.flash_attn_varlen_func, (ends, ends, longest, longest)
                runs["FlashAttention 3"] = lambda f=run, a=(q, k, v, *sizes): f(*a, causal=True)
            name = f"attention, {len(lengths)} sequences of up to {longest}, {heads} heads on {groups}"
            flops = 3.5 * 2 * sum(length**2 for length in lengths) * heads * 128
            yield name, {key: both_passes(run, [q, k, v], gradient) for key, run in runs.items()}, flops


def norms() -> Iterator[tuple[str, Cases, float]]:
    te, apex = library("transformer_engine.pytorch"), library("apex.normalization")
    x, gradient = parameter(TOKENS, 2048), parameter(TOKENS, 2048)
    modules: dict[str, Any] = {"torch": torch.nn.RMSNorm(2048, eps=1e-6, **BF16)}
    if te:
        modules["TransformerEngine"] = te.RMSNorm(2048, eps=1e-6, **BF16)
    if apex:
        modules["apex"] = apex.MixedFusedRMSNorm(2048, eps=1e-6).to(**BF16)
    runs = {key: both_passes(lambda m=m: m(x), [x, *m.parameters()], gradient) for key, m in modules.items()}
    yield "RMSNorm [16384, 2048]", runs, 0.0


def adam() -> Iterator[tuple[str, Cases, float]]:
    te, apex = library("transformer_engine.pytorch.optimizers"), library("apex.optimizers")
    weights = [torch.nn.Parameter(torch.randn(11008, 2048, device="cuda")) for _ in range(60)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    options: Any = {"lr": 1e-6, "weight_decay": 0.1}
    steps: Cases = {"torch": torch.optim.AdamW(weights, fused=True, **options).step}
    steps |= {"TransformerEngine": te.FusedAdam(weights, **options).step} if te else {}
    steps |= {"apex": apex.FusedAdam(weights, **options).step} if apex else {}
    yield "Adam, 1.35 G float32", steps, 0.0
    gradients, flag = [weight.grad for weight in weights], torch.zeros(1, dtype=torch.int, device="cuda")
    runs: Cases = {"torch": lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))}
    if te:
        runs["TransformerEngine"] = lambda: te.multi_tensor_applier(te.multi_tensor_l2norm, flag, [gradients], False)
    yield "norm of 1.35 G float32 gradients", runs, 0.0


def weight_gradients() -> Iterator[tuple[str, Cases, float]]:
    te, apex = library("transformer_engine.pytorch.cpp_extensions"), library("fused_weight_gradient_mlp_cuda")
    for rows, tokens in ((22016, TOKENS), (22016, TOKENS // 4), (2560, TOKENS)):
        x, gradient = torch.randn(tokens, 2048, **BF16), torch.randn(tokens, rows, **BF16)
        main = torch.zeros(rows, 2048, device="cuda")
        runs: Cases = {"torch": lambda a=(main, gradient, x): a[0].add_(a[1].t() @ a[2])}
        if apex:
            runs["apex"] = lambda a=(x, gradient, main): apex.wgrad_gemm_accum_fp32(*a)
        if te:
            options = {"out_dtype": torch.float32, "layout": "NT", "accumulate": True, "grad": True}
            runs["TransformerEngine"] = lambda a=(x, gradient), o=main, k=options: te.general_gemm(*a, out=o, **k)
        yield f"gradient of [{rows}, 2048] by {tokens} tokens, added in float32", runs, 2.0 * rows * 2048 * tokens


def linears() -> Iterator[tuple[str, Cases, float]]:
    te = library("transformer_engine.pytorch")
    x, gradient, weight = parameter(TOKENS, 2048), parameter(TOKENS, 22016), parameter(22016, 2048)
    runs = {"torch": both_passes(lambda: F.linear(x, weight), [x, weight], gradient)}
    if te:
        linear = te.Linear(2048, 22016, bias=False, params_dtype=torch.bfloat16, device="cuda")
        runs["TransformerEngine"] = both_passes(lambda: linear(x), [x, *linear.parameters()], gradient)
    yield "linear [22016, 2048], 16384 tokens", runs, 6.0 * TOKENS * 2048 * 22016


def experts() -> Iterator[tuple[str, Cases, float]]:
    te, num_rows = library("transformer_engine.pytorch"), 8 * TOKENS
    sizes = torch.multinomial(torch.ones(128), num_rows, replacement=True).bincount(minlength=128)
    x, gradient, weight = parameter(num_rows, 2048), parameter(num_rows, 1536), parameter(128, 1536, 2048)
    ends = sizes.cumsum(0).to("cuda", torch.int32)
    runs = {"torch": both_passes(lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends), [x, weight], gradient)}
    if te:
        grouped = te.GroupedLinear(128, 2048, 1536, bias=False, params_dtype=torch.bfloat16, device="cuda")
        runs["TransformerEngine"] = both_passes(lambda: grouped(x, sizes.tolist()), [x, *grouped.parameters()], gradient)
    yield "128 experts of [1536, 2048], 131072 rows", runs, 6.0 * num_rows * 1536 * 2048


def main() -> None:
    torch.manual_seed(0)
    te = library("transformer_engine")
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": te and te.__version__,
        "milliseconds": {},
    }
    for part in (attention, norms, adam, weight_gradients, linears, experts):
        for name, cases, flops in part():
            found["milliseconds"][name] = measured = medians(cases)
            torch.cuda.empty_cache()
            rates = {key: round(flops / ms / 1e9) for key, ms in measured.items() if flops and isinstance(ms, float)}
            print(name, measured, f"TFLOP/s: {rates}" * bool(rates), flush=True)
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
