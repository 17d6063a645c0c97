"""Packaging. Installs plain packages and the vLLM plug-in; the runtime itself comes from locks/."""

from setuptools import find_packages, setup

setup(
    name="megasync",
    version="0.1.0",
    description="Megatron-Core training engine for RL whose weights reach vLLM bucket by bucket, verified",
    license="Apache-2.0",
    python_requires=">=3.11",
    extras_require={"wandb": ["wandb>=0.31,<1"], "trackio": ["trackio>=0.43,<1"]},  # loggers that run.loggers may name
    packages=find_packages(include=["megasync*", "engine*", "bridge*"]),
    entry_points={"vllm.general_plugins": ["megasync = bridge.vllm.serving.api:register"]},
)
