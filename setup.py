"""Packaging. Installs plain packages and the vLLM plug-in; the runtime itself comes from locks/."""

from setuptools import find_packages, setup

setup(
    name="megasync",
    version="0.1.0",
    description="Megatron-Core training engine for RL whose weights reach vLLM bucket by bucket, verified",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megasync*", "engine*", "bridge*"]),
    package_data={"megasync.planning": ["measured.json"]},
    entry_points={"vllm.general_plugins": ["megasync = bridge.vllm.serving.api:register"]},
)
