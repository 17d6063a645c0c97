"""The report of `bench train`: a table of speed and one of memory. No torch in here."""

from __future__ import annotations

from bench.common.results import Results, print_table

GIB = 2**30


def show(results: Results) -> None:
    """Tables for people."""
    tera = {name: f"{results[f'{name}_flops_per_gpu'] / 1e12:.4g}" for name in ("model", "attention")}
    speed = {
        "tokens/s/GPU": f"{results['tokens_per_second_per_gpu']:.0f}",
        "model TFLOP/s/GPU": tera["model"],
        "attention TFLOP/s/GPU": tera["attention"],
        "ceiling": f"{results['ceiling_flops'] / 1e12:.4g}",
        "share": f"{results['share_of_ceiling']:.1%}",
        "with attention": f"{results['share_with_attention']:.1%}",
        "last loss": f"{results['steps'][-1]['loss']:.4f}",
    }
    sizes = {"peak": results["peak_bytes"], "peak of a step": results["step_peak_bytes"], **results["state_bytes"]}
    memory = {name: f"{size / GIB:.4g}" for name, size in sizes.items()}
    memory["gradients' dtype"] = ", ".join(results["gradient_dtypes"])
    print_table(f"training with {results['config']['engine']['wrap']}, median step", list(speed), [list(speed.values())])
    print_table("memory of a rank, GiB: the most of all ranks", list(memory), [list(memory.values())])
