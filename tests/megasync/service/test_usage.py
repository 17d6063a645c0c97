"""Usage: what each session has asked for and got, and a line of metrics a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.megasync.service.desks import model_body, passes_body, sample_body, session, start, step_body

from bridge.generation import Completion
from engine.adapters import AdapterSpec
from megasync.service import wire
from megasync.service.requests import Result, as_json, error
from megasync.service.usage import Usage


def test_sessions_and_steps(tmp_path: Path) -> None:
    desk = start(tmp_path)
    name = session(desk)
    model = desk.submit("create_model", model_body(name), "m").call.scope
    lines: list[tuple[int, dict[str, Any]]] = []
    usage = Usage(desk, lambda: {"": 0, "tinker://a": 1}, lambda step, values: lines.append((step, values)))
    passed = Result("protobuf", wire.forward_backward_output([np.zeros(5, np.float32)], {"loss:sum": 1.5}))
    sampled = wire.sample_response([Completion(np.zeros(4), np.zeros(4), np.zeros(4))] * 2, None, None, 0)
    done = {
        "create_model": as_json({"model_id": model}),
        "forward_backward": passed,
        "optim_step": as_json({"metrics": {"grad_norm:mean": 2.0}}),
        "asample": Result("protobuf", sampled),
    }
    for seq in (1, 2):
        desk.submit("forward_backward", passes_body(model, seq), f"f{seq}")
    desk.submit("optim_step", step_body(model, 3), "o")
    desk.submit("asample", sample_body(), "s")
    found = usage.report()["sessions"]
    assert (found[name]["waiting"], found["none"]["waiting"]) == (4, 1)
    for _ in range(5):
        for request in (work := desk.queue.next_work(lambda: {"": 0})).requests:
            if work.kind == "sample":
                assert usage.report()["sessions"]["none"]["in_flight"] == 1
            result = done[request.call.kind]
            usage.count(request, result)
            desk.finish_all([(request, result)])
    desk.submit("optim_step", step_body(model, 4), "p")
    usage.count(desk.queue.next_work(lambda: {"": 0}).requests[0], error("its norm is nan", "user"))
    found = usage.report()
    mine = {"passes": 2, "trained_tokens": 10, "steps": 1, "samples": 0, "sampled_tokens": 0, "errors": 1}
    assert found["sessions"][name] == {**mine, "waiting": 0, "in_flight": 0}
    assert (found["sessions"]["none"]["samples"], found["sessions"]["none"]["sampled_tokens"]) == (1, 8)
    assert found["slots"] == {"base": 0, "tinker://a": 1}
    ((step, values),) = lines
    assert (step, values["service/client"], values["grad_norm"], values["service/loss"]) == (4, model, 2.0, 3.0)
    assert values["service/trained_tokens"] == 10
    page = usage.page({model: AdapterSpec(rank=4), "<b>": AdapterSpec(rank=0)})
    assert f"<td>{model}</td><td>4</td>" in page and "&lt;b&gt;" in page and "<b>" not in page
