"""The training loops, each on one page. Everything they call is collective: every rank calls it, in the same order.

Leaves out how it is done: session.py puts engine, weight bridge, rollouts and log together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.run.session import Session


def train_grpo(session: Session) -> None:
    """Generate, reward, train, publish. Version v is the weights after v steps; step s trains version s.

    With `rollout.max_staleness` n, no token that it trains on is of a version before s - n.
    """
    engine = session.engine
    session.start_replicas()
    session.publish(version=session.first_step)
    session.evaluate_at_start()
    for step in session.steps():
        session.start_rollouts(step)
        rollout = session.take_rollout(step)
        with session.span("log-probs"):
            batch = engine.prepare(rollout.samples)
        with session.span("train"):
            metrics = {**rollout.metrics, **engine.update(batch)}
        metrics |= session.step_log.compare(step, batch)
        session.log_samples(rollout, batch)
        synced = session.publish(version=step + 1, trained=metrics)
        session.step_log.write(step, {**metrics, **synced})
        session.evaluate_if_due(step + 1)
        session.checkpoint_if_due(step + 1)


def train_sft(session: Session) -> None:
    """Supervised steps on prompts and answers, until the steps are done or held-out accuracy is high enough."""
    engine = session.engine
    session.evaluate_at_start()
    for step in session.steps():
        with session.span("log-probs"):
            batch = engine.prepare(session.supervised_batch(step))
        with session.span("train"):
            metrics = engine.update(batch)
        session.step_log.write(step, metrics)
        accuracy = session.evaluate_if_due(step + 1)
        session.checkpoint_if_due(step + 1)
        if accuracy is not None and 0 < session.config.run.stop_at_accuracy <= accuracy:
            break
