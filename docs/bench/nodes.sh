#!/usr/bin/env bash
# Sync between nodes: docs/bench/nodes.sh OUT.json [ROUNDS] [CASES]; root, iproute2. Nodes are namespaces of network, processes, mounts
# and host name on a bridge of this machine, their links limited to RATE each way (tc tbf) and counted by the kernel. A case is
# SENDERSxNODES, or SENDERSxNODESxREPLICAS for several replicas on each receiving node. docs/scale.md has the table.
set -euo pipefail
out=$(realpath -m "$1") rounds=${2:-7} cases=${3:-"1x1 1x2 1x4 2x1 2x2 2x4 4x1 4x2 4x4 2x1x2 4x2x2"}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3} rate=${RATE:-400mbit} name=${PREFIX:-msl} subnet=${SUBNET:-10.82.0}
largest() { tr ' ' '\n' <<< "$cases" | sed 's/$/x1/' | cut -dx -f"$1" | sort -n | tail -1; } # of all cases
senders=$(largest 1) receiving=$(largest 2) replicas=$(largest 3)
nodes=$((senders + receiving)) pids=()

down() {
  for pid in "${pids[@]:-}"; do [ -z "$pid" ] || kill -9 "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  for i in $(seq $nodes); do ip netns del "$name$i" 2>/dev/null || true; done
  ip link del "${name}br" 2>/dev/null || true
}
trap down EXIT; trap "exit 1" INT TERM

ip link add "${name}br" type bridge; ip link set "${name}br" up
declare -A init
for i in $(seq $nodes); do
  ip netns add "$name$i"
  ip link add "${name}v$i" type veth peer name eth0 netns "$name$i"
  ip link set "${name}v$i" master "${name}br" up
  ip -n "$name$i" addr add "$subnet.$i/24" dev eth0; ip -n "$name$i" link set eth0 up; ip -n "$name$i" link set lo up
  for side in "-n $name$i qdisc add dev eth0" "qdisc add dev ${name}v$i"; do tc $side root tbf rate "$rate" burst 256kb latency 100ms; done
  ip netns exec "$name$i" unshare --mount --uts --pid --fork --mount-proc --kill-child sh -c "hostname $name$i
    mount -t tmpfs -o size=4g tmpfs /dev/shm; exec sleep infinity" > /dev/null 2>&1 &
  pids+=($!)
  for _ in $(seq 50); do pid=$(pgrep -P "${pids[-1]}" | head -1) && [ -n "$pid" ] && break; sleep 0.1; done
  init[$i]=$pid
done
sleep 0.5

on() { # NODE COMMAND...: beside all others
  local i=$1; shift
  (cd "$here" && exec nsenter -t "${init[$i]}" -n -m -u -p env GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 PYTHONPATH="$here" "$@") &
}

receivers=()
for i in $(seq $((senders + 1)) $nodes); do
  addresses=()
  for port in $(seq 7000 $((6999 + replicas))); do
    on "$i" "$python" -m megasync.bench.nodes.receiver "$subnet.$i" "$port"
    addresses+=("$subnet.$i:$port")
  done
  receivers+=("$(IFS=,; echo "${addresses[*]}")")
done
ranks=()
for i in $(seq $senders); do
  on "$i" env MASTER_ADDR="$subnet.1" MASTER_PORT=29400 RANK=$((i - 1)) WORLD_SIZE=$senders \
    "$python" -m megasync.bench.nodes.rank "$out" "$rounds" "$cases" "${receivers[@]}"
  ranks+=($!)
done
on 1 "$python" -m megasync.bench.nodes.probe answer "$subnet.1"
on $((senders + 1)) "$python" -m megasync.bench.nodes.probe ask "$subnet.1" "$out.over"; probe=$!
wait -n "${ranks[@]}"; for rank in "${ranks[@]}"; do wait "$rank" || exit 1; done
touch "$out.over"; wait "$probe"; rm "$out.over"
"$python" -m megasync.bench.nodes.report "$out" --rate "$rate"
