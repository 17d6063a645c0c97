"""Usage of the service: tokens, passes and steps of each session, as a page, and a line of metrics.jsonl a step of a client.

Counts are those since this server was started, requests of the log that it repeats included. Leaves out what a request means.

    usage = Usage(desk, lambda: worker.present, log.step)
    usage.count(request, result)              # of each request that is finished
    usage.report()                            # {"sessions": {"0-ab": {"steps": 3, ...}}, "slots": {"base": 0}, ...}
"""

from __future__ import annotations

import html
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from megasync.service import wire
from megasync.service.calls import SAMPLE
from megasync.service.desk import Desk
from megasync.service.requests import Request, Result

LogStep = Callable[[int, dict[str, float | str]], None]
COUNTS = ("passes", "trained_tokens", "steps", "samples", "sampled_tokens", "errors")


class Usage:
    """Threads may call at once."""

    def __init__(self, desk: Desk, slots: Callable[[], Mapping[str, int]], log_step: LogStep) -> None:
        """`slots`: the versions that the replicas have; `log_step` gets the metrics of each optimizer step."""
        self._desk, self._slots, self._log_step = desk, slots, log_step
        self._lock, self._start_seconds = threading.Lock(), time.monotonic()
        self._sessions: dict[str, Counter[str]] = defaultdict(Counter)
        self._passed: dict[str, tuple[int, float]] = {}  # tokens and loss of a model's passes since its last step

    def count(self, request: Request, result: Result) -> None:
        """Before the desk gets the result, which drops the arguments."""
        call = request.call
        with self._lock:
            own = self._sessions[session_of(call.scope)]
            if result.form == "error":
                own["errors"] += 1
            elif call.kind == "forward_backward" and call.arguments["has_gradients"]:
                num_tokens = sum(len(datum.tokens) for datum in call.arguments["data"])
                own.update(passes=1, trained_tokens=num_tokens)
                former_tokens, former_loss = self._passed.get(call.scope, (0, 0.0))
                self._passed[call.scope] = former_tokens + num_tokens, former_loss + wire.loss_sum(result.body)
            elif call.kind == SAMPLE:
                own.update(samples=call.count, sampled_tokens=wire.num_sampled(result.body))
            elif call.kind == "optim_step":
                own["steps"] += 1
                self._log_step(request.order + 1, self._step(call.scope, result))

    def _step(self, model: str, result: Result) -> dict[str, float | str]:
        num_tokens, loss = self._passed.pop(model, (0, 0.0))
        waiting, in_flight = self._desk.queue.num_open()
        return {
            "service/client": model,
            "grad_norm": json.loads(result.body)["metrics"]["grad_norm:mean"],
            "service/loss": loss,
            "service/trained_tokens": float(num_tokens),
            "service/sampled_tokens": float(self._sessions[session_of(model)]["sampled_tokens"]),
            "service/waiting": float(sum(waiting.values()) + sum(in_flight.values())),
        }

    def report(self) -> dict[str, Any]:
        """The usage as values of JSON. Slots are those of the replicas, by version."""
        waiting, in_flight = self._desk.queue.num_open()
        with self._lock:
            names = sorted({*self._sessions, *waiting, *in_flight})
            sessions = {
                name: {key: self._sessions[name][key] for key in COUNTS}
                | {"waiting": waiting[name], "in_flight": in_flight[name]}
                for name in names
            }
        slots = {version or "base": slot for version, slot in self._slots().items()}
        return {"seconds": round(time.monotonic() - self._start_seconds), "slots": slots, "sessions": sessions}

    def page(self, models: Mapping[str, Any]) -> str:
        """The same in HTML, with the models in memory."""
        found = self.report()
        rows = [[name, *each.values()] for name, each in found["sessions"].items()]
        tables = [
            _table(["session", *COUNTS, "waiting", "in flight"], rows),
            _table(["model in memory", "rank"], [[name, each.rank or "all parameters"] for name, each in models.items()]),
            _table(["version in the replicas", "slot"], list(found["slots"].items())),
        ]
        return f"<!doctype html><title>megasync serve</title><p>{found['seconds']} s since the start</p>{''.join(tables)}"


def session_of(scope: str) -> str:
    """Samples without a session are one's."""
    return scope.partition(":")[0] or "none"


def _table(head: list[str], rows: list[Any]) -> str:
    lines = [f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in (head, *rows)]
    return f"<table border=1>{''.join(lines)}</table><p>"
