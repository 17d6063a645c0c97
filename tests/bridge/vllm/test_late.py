"""Modules of vLLM that a replica imports at their first use (bridge/vllm/serving/late.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bridge.vllm.serving import late

SOURCE = "class Parser:\n    kind = 'real'\n    def __init__(self, size): self.size = size\ndef double(x): return 2 * x\n"


@pytest.mark.parametrize("use", ["attribute", "call", "instance", "subclass", "base"])
def test_a_name_is_the_real_one_once_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    place = f"megasync_late_{use}"
    (tmp_path / f"{place}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(late, "MODULES", (place,))
    late.import_late()
    late.import_late()
    module = sys.modules[place]
    parser, double = module.Parser, module.double
    assert sys.modules[place] is module and isinstance(module, late.LateModule) and not hasattr(module, "__path__")
    if use == "attribute":
        assert parser.kind == "real"
    elif use == "call":
        assert parser(3).size == 3 and double(4) == 8
    elif use == "instance":
        assert not isinstance(1, parser) and isinstance(parser(1), parser)
    elif use == "subclass":
        assert not issubclass(int, parser)
    else:
        assert type("Own", parser.__mro_entries__((parser,)), {}).kind == "real"
    assert sys.modules.pop(place) is not module


def test_what_has_been_imported_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "MODULES", ("json",))
    before = sys.modules["json"]
    late.import_late()
    assert sys.modules["json"] is before


def test_vllm_has_the_late_modules_and_they_have_what_its_engine_takes_of_them() -> None:
    import vllm  # noqa: F401 # late.py stands in for them only before

    names = {"vllm.reasoning": "ReasoningParserManager", "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter"}
    names["vllm.entrypoints.serve.elastic_ep.middleware"] = "set_scaling_elastic_ep"
    assert tuple(names) == late.MODULES
    for module, name in names.items():
        stand_in = late.LateModule(module)
        real = getattr(stand_in, name)._real()
        assert real is getattr(sys.modules[module], name)
