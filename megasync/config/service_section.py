"""The keys of `service`. No torch in here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from bridge.config import ByteSize
from engine.config import Section


class ServiceConfig(Section):
    """`megasync serve`: a server for clients that write the training loop themselves."""

    host: str = "127.0.0.1"
    """Address to listen on. Others than loopback need a key in the environment variable MEGASYNC_API_KEY."""
    base_model: str = ""
    """Name of the base model for clients, such as Qwen/Qwen3-8B; empty: the name of the model's folder."""
    frozen_unembed: bool = False
    """true: clients that ask for an adapter of the output layer (train_unembed, their default) get none there; false: they get an
    error, since the output layer has no adapter."""
    full_parameters: bool = False
    """true: one client at a time trains all parameters of the model, and engine.lora.rank is 0. Clients still ask for an adapter,
    the only call that they have: its rank is not looked at. A second client is refused until the first session has ended."""
    max_body_bytes: Annotated[ByteSize, Field(ge=4096)] = 64 * 2**20
    """Largest request body; larger ones are refused."""
    max_waiting: PositiveInt = 1000
    """Largest number of requests that wait or run; further ones are answered with 429, after which clients try again."""
    max_arriving_bytes: Annotated[ByteSize, Field(ge=4096)] = 2**30
    """Memory for bodies that are on their way here; while there is none for another, it is answered with 429."""
    max_models: PositiveInt = 64
    """Largest number of training clients in memory; a session that its client finishes makes room."""
    silent_seconds: PositiveFloat = 120.0
    """Where there is no room for another client, sessions are finished whose clients have sent nothing for so long."""
    shared_clients: PositiveInt = 8
    """forward_backward requests of so many clients that wait at the same time go through the base model together, on CPUs each
    with the bits that it has alone; 1: in turns. One waits up to 50 ms for clients that had one in the last 5 s.
    Some layouts have only turns (megasync/service)."""
    adapter_slots: PositiveInt = 8
    """With engine.lora.sync=adapter the replicas hold so many versions, of any clients, and sample from them at the same time;
    a further one replaces the version that was sampled least recently. With merged weights they hold one."""
    checkpoint_every: NonNegativeInt = 200
    """State is written after this many training requests, so that a restart repeats at most as many; 0: never."""
    poll_seconds: PositiveFloat = 20.0
    """How long a client's question for a result waits before it is answered with 408."""

    @property
    def num_models(self) -> int:
        """The largest number of training clients at a time."""
        return 1 if self.full_parameters else self.max_models
