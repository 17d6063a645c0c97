"""The training loops, each on one page. Everything they call is collective: every rank calls it, in the same order.

Leaves out how it is done: session.py and rollout_session.py put engine, weight bridge, rollouts and log together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.run.rollout_session import RolloutSession
    from megasync.run.supervised import SupervisedSession


def train_grpo(session: RolloutSession) -> None:
    """Generate, reward, train, publish. Version v is the weights after v steps; step s trains version s.

    With `rollout.max_staleness` n, no token that it trains on is of a version before s - n.
    """
    engine = session.engine
    session.publish(version=session.first_step)
    session.evaluate_at_start()
    for step in session.steps():
        session.start_rollouts(step)
        while (rollout := session.take_rollout(step)) is None:  # too few replicas are left
            session.publish(version=step)  # restarted ones get the weights
        with session.span("log-probs"):
            batch = engine.prepare(rollout.samples)
        with session.span("train"):
            metrics = {**rollout.metrics, **engine.update(batch)}
        metrics |= session.step_log.compare(step, rollout, batch)
        session.log_samples(rollout, batch)
        synced = session.publish(version=step + 1, trained=metrics)
        session.step_log.write(step, {**metrics, **synced})
        session.evaluate_if_due(step + 1)
        session.checkpoint_if_due(step + 1)


def train_sft(session: SupervisedSession) -> None:
    """Supervised steps on prompts and answers, until the steps are done or held-out accuracy is high enough."""
    engine = session.engine
    session.evaluate_at_start()
    for step in session.steps():
        with session.span("log-probs"):
            batch = engine.prepare(session.batch(step))
        with session.span("train"):
            metrics = engine.update(batch)
        session.step_log.write(step, metrics)
        accuracy = session.evaluate_if_due(step + 1)
        session.checkpoint_if_due(step + 1)
        if accuracy is not None and 0 < session.config.run.stop_at_accuracy <= accuracy:
            break
