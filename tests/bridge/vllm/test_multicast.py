"""multicast.py: the fields of EngineArgs without vLLM's fused all-reduce, and what vLLM's own choice of it depends on."""

from __future__ import annotations

import inspect

import pytest

from bridge.vllm.serving import multicast


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"pass_config": {"fuse_allreduce_rms": False}}),
        ({"mode": 0}, {"mode": 0, "pass_config": {"fuse_allreduce_rms": False}}),
        ({"pass_config": {"fuse_norm_quant": True}}, {"pass_config": {"fuse_allreduce_rms": False, "fuse_norm_quant": True}}),
        ({"pass_config": {"fuse_allreduce_rms": True}}, {"pass_config": {"fuse_allreduce_rms": True}}),
    ],
)
def test_the_fusion_is_off_unless_the_config_sets_it(given: dict[str, object], expected: dict[str, object]) -> None:
    fields = {"model": "m", "compilation_config": given} if given else {"model": "m"}
    assert multicast.without_fusion(fields) == {"model": "m", "compilation_config": expected}


@pytest.mark.parametrize(("name", "value"), multicast.SWITCHED_OFF.items())
def test_a_variable_switches_multicast_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setattr(multicast, "run_in_fork", lambda look: True)
    for other in multicast.SWITCHED_OFF:
        monkeypatch.delenv(other, raising=False)
    assert multicast.is_available()
    monkeypatch.setenv(name, value)
    assert not multicast.is_available()


@pytest.mark.vllm_on_cpu
def test_vllm_still_chooses_the_fusion_without_a_look_at_multicast() -> None:
    from vllm.config import vllm as config

    source = inspect.getsource(config.enable_allreduce_rms_fusion)
    assert "has_flashinfer" in source
    assert "multicast" not in source.lower()
