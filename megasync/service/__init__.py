"""The loop is the user's: `megasync serve` for clients of Tinker's package, `megasync.open` in one process.

    megasync serve CONFIG engine.wrap=ddp engine.lora.rank=32 --port 8000     # ServiceClient(base_url="http://127.0.0.1:8000")

- Each training client is an adapter with a rank up to `engine.lora.rank`, and on CPUs the bits that it would have alone.
  While adapters wait, the last used ones lie on the device, the others in host memory, until their client finishes its session,
  or is silent and another one wants the room (`service.silent_seconds`). Passes of several clients that wait are one
  (`service.shared_clients`).
- Clients take turns with `megatron_fsdp`, more than two tensor- or context-parallel ranks, interleaved stages, experts,
  `model.exact`.
- With `service.full_parameters` one client trains all parameters. Its saved states are as large as the model's and the
  optimizer's, and its external weights a Hugging Face folder. While other weights are synced its own lie in host memory.
- A request is logged in `runs/NAME/service/log.jsonl` before it is acknowledged. After a kill the same command replays the log
  from the last checkpoint (`service.checkpoint_every`), and clients that wait go on. The log is never cut; saved weights stay
  until they are deleted, whatever their ttl.
- With `engine.lora.sync=adapter` replicas have `service.adapter_slots` versions at a time, with merged weights one: samples of
  another one cause a sync. A replica that dies is replaced, and its samples repeated.
- Losses: engine/objective/token_losses.py, and the client's own in two passes. Refused by name: other losses, adapters of the
  output layer (or left frozen: `service.frozen_unembed`), and images.
- `rollout.placement=colocated`, for one GPU: replicas stay awake beside the trainer, in `rollout.gpu_memory_utilization` of its
  memory. On GPUs the last bits of a pass depend on the clients that share it: `service.shared_clients=1` and
  `run.deterministic=true` give the bits that a client has alone, also after a kill.
- It listens on loopback; for another `service.host` the environment needs MEGASYNC_API_KEY. Web pages are not answered.

bodies.py    JSON bodies of the client, and their validation
wire.py      the same of its protobuf messages
calls.py     a request as a call of the worker, in its client's order
journal.py   the log of requests and results, from which a killed server is restored
worker.py    every rank: executes commands on the engine; syncs adapters to the replicas
requests.py  a request that was accepted, and its result
work_queue.py  rank 0: which request is next
desk.py      rank 0: requests in the log, and who waits for them
sampling.py  rank 0: sampling requests through the replicas
catalog.py   rank 0: models and saved weights, as clients ask about them
queries.py   rank 0: routes of lists and downloads
usage.py     rank 0: usage of each session: GET / and /usage, metrics.jsonl
http.py      rank 0: the HTTP server, in a thread
front.py     rank 0: these together
command.py   the verb
trainer.py   the same calls in process, without a server: megasync.open

Leaves out passes and optimizer steps (engine/driven.py).
"""
