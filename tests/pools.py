"""Replicas that also tell what the product never asks: log-probs of given tokens, whole tensors read back, versions.

    pool = OpenPool.start(ReplicaConfig(folder), num_replicas=2)
    pool.score([(5, 6, 7)])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.receive import vllm_adapter
from bridge.replicas.pool import CONTROL_SECONDS, ReplicaPool
from bridge.replicas.replica import Replica


class OpenReplica(Replica):
    async def score(self, token_id_lists: list[tuple[int, ...]]) -> list[list[float]]:
        """Log-probs of given tokens, from the second of each list on."""

        async def submit(queues: list[Any]) -> None:
            for ids in token_id_lists:
                queue = await submit_score(self._engine, ids, self._new_id(), with_adapter=self._has_adapter)
                queues.append(queue)

        return [to_scores(output) for output in await self._run(submit)]

    async def read_back(self, names: list[str] | None) -> dict[str, torch.Tensor]:
        """Full tensors by HF name, rebuilt from what all workers hold."""
        from bridge.receive.shards import assemble
        from bridge.receive.vllm_readback import to_shard

        answers = await self._engine.collective_rpc("megasync_read_shards", args=(names,))
        return assemble(to_shard(fields) for answer in answers for fields in answer)

    async def serves(self) -> int | None:
        """The version; None where there is none that it could serve."""
        self._notice_death()
        return self.version


class OpenPool(ReplicaPool):
    replica_class = OpenReplica

    def score(self, token_id_lists: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log-probs (temperature 1) of the tokens of each list, from its second token on."""
        lists = [tuple(ids) for ids in token_id_lists]
        num_shares = min(self.num_replicas, len(lists))
        refs = []
        for replica, actor in enumerate(self._chosen(range(num_shares))):
            refs.append(actor.handle.score.remote(lists[replica::num_shares]))
            actor.num_sent += 1
        parts = self.gather(refs)
        return [parts[i % num_shares][i // num_shares] for i in range(len(lists))]

    def read_back(self, names: list[str] | None = None, replica: int = 0) -> dict[str, torch.Tensor]:
        """Full tensors by HF name of what a replica computes with; all when `names` is None."""
        (tensors,) = self._call(lambda actor: actor.read_back.remote(names), None, [replica])
        return dict(tensors)

    @property
    def versions(self) -> list[int | None]:
        """What each replica serves; None while it has nothing that it may serve."""
        return [self._serves(replica) for replica in range(self.num_replicas)]

    def _serves(self, replica: int) -> int | None:
        try:
            return self._call(lambda actor: actor.serves.remote(), CONTROL_SECONDS, [replica])[0]
        except RuntimeError:
            return None


async def submit_score(
    engine: Any, token_ids: tuple[int, ...], request_id: str, *, with_adapter: bool = False
) -> Any:
    """Like submit, for the log-probs of given tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = {"prompt_token_ids": list(token_ids)}
    return await engine.add_request(request_id, prompt, parameters, lora_request=vllm_adapter.request(with_adapter))


def to_scores(output: Any) -> list[float]:
    """Log-probs of a finished scoring request's tokens from the second on; the first has none."""
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in entries]
