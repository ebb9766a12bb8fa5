#!/usr/bin/env bash
# usage: ./setup_rocm.sh [--check | --dry-run | --image | --help]
#
# Prepares a ROCm image of PyTorch, or a host with ROCm and AMD's torch, for ssd. The installed torch stays as it is.
# It may be run again: what is in place is left alone. Tested against stand-ins only, not on a ROCm machine.
#
#   --check     say what is wrong or not there yet, change nothing
#   --dry-run   check, then print what would be done, change nothing
#   --image     install where an image is built, without a GPU: neither look for one, nor import FlashInfer, nor
#               write rocm.env, nor run ssd doctor; run `ssd doctor` in the container
#
# variables (for this command only, do not export them: ssd refuses SSD_ variables that it does not know):
#   PYTHON                 the Python that has torch (python3)
#   SSD_FLASHINFER_SPEC    requirement for FlashInfer (amd-flashinfer>=0.5.3+amd.2); built from source, it would be
#                          'amd-flashinfer @ git+https://github.com/AMD-Ecosystem/flashinfer@v0.5.3+amd.2'
#   SSD_FLASHINFER_INDEX   package index that has it (https://pypi.amd.com/simple)
#   SSD_TRITON_SPEC        requirement for Triton, if `import triton` fails (what torch itself asks for)
#   SSD_ROCM_CONSTRAINTS   file of exact versions (constraints-rocm.txt); empty: pip chooses
#   SSD_KFD                the driver's device file (/dev/kfd)
#   SSD_CACHE_DIR          folder of rocm.env and compiled kernels (~/.cache/ssd-serve); ssd knows this one too
#
# exit codes:
#    0  done; with --check: all is in place
#    1  something unexpected; a message says what
#    2  an option or a variable is wrong
#   10  no AMD GPU can be used: driver, device files, permissions
#   11  the GPU is neither gfx942 (MI300X, MI325X) nor gfx950 (MI350X, MI355X)
#   12  Python is older than 3.10, has no pip, or belongs to the system
#   13  torch is not there, or not built for ROCm
#   14  only with --check: something is not installed yet, or too old
#   15  pip could not reach a package index
#   16  pip refused for another reason
#   17  torch is not the one that was there before
#   18  ssd, FlashInfer or Triton is installed but cannot be used
#   19  `ssd doctor` found a problem

# shellcheck disable=SC1090,SC2329 # it writes the file that it sources; `step` calls functions by name
set -euo pipefail

# Older ones inflate the softmax sums of bf16 by 1.875 and mask the wrong heads under grouped-query attention.
readonly FLOOR="0.5.3+amd.2"
readonly WHEELS=https://repo.radeon.com/rocm/manylinux
# The runtime before this one aborts the capture of graphs while RCCL watches for errors of several GPUs.
readonly LEAST_ROCM=7.2.1
# What AMD advises for inference on MI300X; values that the user has set are kept. Also in deploy/rocm.Dockerfile.
readonly TUNING=(HSA_NO_SCRATCH_RECLAIM=1 HIP_FORCE_DEV_KERNARG=1 NCCL_MIN_NCHANNELS=112)
readonly UNREACHABLE='ConnectionError|NameResolutionError|TimeoutError|ProxyError|SSLError|Could not resolve host'

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
MODE=install IMAGE="" EXIT_CODE=0 ARCHITECTURE=unknown
declare -A FACT=()

say() { printf '%s\n' "$*"; }

# Tell what is wrong and what to do. Ends the script with the code; --check goes on and ends with the first code.
problem() { # code, what is wrong, what to do
  printf 'setup_rocm: %s\n  what to do: %s\n' "$2" "$3" >&2
  if [[ $MODE != check ]]; then exit "$1"; fi
  if ((EXIT_CODE == 0)); then EXIT_CODE=$1; fi
}

# Do a step, or tell about it.
step() { # what it is, command, arguments...
  local what=$1
  shift
  case $MODE in
    check) problem 14 "not done yet: $what" "run ./setup_rocm.sh" ;;
    dry-run) say "would $what$([[ $1 != pip ]] || printf '%s' ": $*")" ;;
    install) say "$what" && "$@" ;;
  esac
}

read_arguments() {
  local argument
  for argument in "$@"; do
    case $argument in
      --check) MODE=check ;;
      --dry-run) MODE=dry-run ;;
      --image) IMAGE=yes ;;
      -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$HERE/setup_rocm.sh" && exit 0 ;;
      *) problem 2 "the option '$argument' is unknown" "./setup_rocm.sh --help lists the options" && exit 2 ;;
    esac
  done
  PYTHON=${PYTHON:-python3}
  if [[ $PYTHON == */* ]]; then PYTHON=$(realpath -ms -- "$PYTHON"); fi
  SPEC=${SSD_FLASHINFER_SPEC:-amd-flashinfer>=$FLOOR}
  CONSTRAINTS=$(realpath -m -- "${SSD_ROCM_CONSTRAINTS-$HERE/constraints-rocm.txt}" 2>/dev/null || true)
  if [[ -n $CONSTRAINTS && ! -f $CONSTRAINTS ]]; then
    problem 2 "there is no file $CONSTRAINTS" "set SSD_ROCM_CONSTRAINTS to a constraints file, or to nothing" && exit 2
  fi
  CACHE=${SSD_CACHE_DIR:-${HOME:?}/.cache/ssd-serve}
  CACHE=$(realpath -m -- "${CACHE/#\~\//$HOME/}") # FlashInfer does not expand ~
  cd /                                            # no folder of the caller's is to shadow a Python package
}

# The architectures of the GPUs that the driver shows.
architectures() {
  local found=""
  found=$(rocminfo 2>/dev/null | awk '$1 == "Name:" && $2 ~ /^gfx[0-9a-f]+$/ { print $2 }') || found=""
  if [[ -z $found ]]; then found=$(amd-smi static --asic 2>/dev/null | grep -oE '\bgfx[0-9a-f]+\b') || found=""; fi
  sort -u <<<"$found" | paste -sd ' '
}

check_gpu() {
  local device=${SSD_KFD:-/dev/kfd} found known
  PATH=$PATH:${ROCM_PATH:-/opt/rocm}/bin
  found=$(architectures)
  known=$(tr ' ' '\n' <<<"$found" | grep -xE 'gfx942|gfx950' | paste -sd -) || true
  if [[ ! -e $device ]]; then
    problem 10 "there is no $device: the AMD driver is not loaded, or this container was not given the GPU" \
      "on a host install the amdgpu driver; start containers with --device=/dev/kfd --device=/dev/dri"
  elif [[ ! -r $device || ! -w $device ]]; then
    problem 10 "this user may not use $device" \
      "join its group, $(stat -c '%G (%g)' "$device"); containers: --group-add with that number"
  elif [[ -z $found ]]; then
    problem 10 "neither rocminfo nor amd-smi shows a GPU" "see what rocminfo says; ROCM_PATH tells where ROCm is"
  elif [[ -z $known ]]; then
    problem 11 "the GPU is $found; FlashInfer for ROCm runs on gfx942 and gfx950 only" \
      "take another machine, or use ssd without this script: SSD_ALLOW_CPU=1 make serve runs on the CPU"
  else
    ARCHITECTURE=$known
    say "GPU: $ARCHITECTURE"
  fi
  check_runtime
}

check_runtime() {
  local file=${ROCM_PATH:-/opt/rocm}/.info/version there
  if [[ ! -r $file ]]; then return; fi
  there=$(grep -oE '^[0-9]+(\.[0-9]+)+' "$file") || return 0
  if [[ $(printf '%s\n' "$there" "$LEAST_ROCM" | sort -V | head -n 1) != "$LEAST_ROCM" ]]; then
    say "warning: ROCm $there: before $LEAST_ROCM captured forwards of several GPUs may be aborted:" \
      "update ROCm, or serve with SSD_GRAPHS=false"
  fi
}

# Fills FACT: what Python, torch and the packages are like.
read_facts() {
  local lines line
  if ! lines=$("$PYTHON" -B "$HERE/deploy/rocm_packages.py" "$HERE" "$CONSTRAINTS" "$SPEC" "$FLOOR"); then
    problem 12 "$PYTHON cannot tell what is installed; its message is above" "name another: PYTHON=..." && exit 12
  fi
  while IFS= read -r line; do
    if [[ $line =~ ^([a-z_]+)=(.*)$ ]]; then FACT[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}; fi
  done <<<"$lines"
  TORCH_NOW="${FACT[torch]:-missing}, HIP ${FACT[hip]:-none}, to pip ${FACT[torch_for_pip]:-missing}"
}

# Returns 1 where --check has nothing further to look at.
check_python() {
  local get="use a rocm/pytorch image, or: $PYTHON -m pip install torch==2.9.1 -f $WHEELS/rocm-rel-7.2/"
  if ! "$PYTHON" -B -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    problem 12 "$PYTHON is not there, is older than 3.10, or has no pip" "name another: PYTHON=..." && return 1
  fi
  read_facts
  if [[ -n ${FACT[spec_error]} ]]; then
    problem 2 "SSD_FLASHINFER_SPEC '$SPEC': ${FACT[spec_error]}" "write e.g. amd-flashinfer>=$FLOOR" && return 1
  elif [[ -n ${FACT[torch_error]} ]]; then
    problem 13 "torch cannot be imported: ${FACT[torch_error]}" "$get" && return 1
  elif [[ -z ${FACT[hip]} ]]; then
    problem 13 "torch ${FACT[torch]} is for ${FACT[cuda]:+CUDA }${FACT[cuda]:-CPUs}, not for ROCm" "$get" && return 1
  elif [[ -z ${FACT[torch_for_pip]} ]]; then
    problem 13 "pip does not know of torch ${FACT[torch]}, and would install another beside it" "$get" && return 1
  elif [[ -n ${FACT[managed]} ]]; then
    problem 12 "$PYTHON belongs to the system, which forbids pip to install into it" \
      "$PYTHON -m venv --system-site-packages rocm-venv && PYTHON=rocm-venv/bin/python ./setup_rocm.sh"
  fi
  TORCH_BEFORE=$TORCH_NOW
  say "Python ${FACT[python]}, torch ${FACT[torch]} for ROCm ${FACT[rocm]}, which stays as it is"
  if [[ -n ${FACT[differs]} ]]; then say "note: another combination than in ${CONSTRAINTS##*/}: ${FACT[differs]}"; fi
}

# pip with torch and what belongs to it nailed to what is installed; the rest as in the constraints file.
pip() {
  local file=$SCRATCH/constraints.txt left_out='^torch==' network
  network="check network and HTTPS_PROXY; without network: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER_OF_WHEELS"
  if [[ -n ${SSD_FLASHINFER_SPEC-} ]]; then left_out='^(torch|amd-flashinfer)=='; fi
  grep -vE "$left_out" "${CONSTRAINTS:-/dev/null}" >"$file" || true
  tr ' ' '\n' <<<"${FACT[pins]}" >>"$file"
  if PIP_CONSTRAINT="${PIP_CONSTRAINT:+$PIP_CONSTRAINT }$file" "$PYTHON" -m pip "$@" 2>&1 | tee "$SCRATCH/log"; then
    return
  elif grep -qE "$UNREACHABLE" "$SCRATCH/log"; then
    problem 15 "pip could not reach a package index" "$network"
  fi
  problem 16 "pip refused; its message is above" "the variables in --help name other versions and sources"
}

install_flashinfer() {
  local index=(--index-url "${SSD_FLASHINFER_INDEX:-https://pypi.amd.com/simple}")
  if [[ -n ${FACT[spec_url]} ]]; then index=(); fi # it is built, with tools from the usual index
  if [[ -n ${FACT[upstream]} ]]; then
    problem 18 "flashinfer-python ${FACT[upstream]} is installed: for CUDA, in the same folder as AMD's" \
      "$PYTHON -m pip uninstall flashinfer-python amd-flashinfer, then run this again"
  fi
  case ${FACT[flashinfer_state]} in
    old) say "FlashInfer ${FACT[flashinfer]} is wrong: before $FLOOR, bf16 and tree masks gave wrong results" ;;
    other) say "FlashInfer ${FACT[flashinfer]} is not what $SPEC asks for" ;;
    ok) say "FlashInfer ${FACT[flashinfer]}" && return ;;
  esac
  step "install $SPEC" pip install --upgrade --no-deps "${index[@]}" "${FACT[spec]}"
}

install_packages() {
  local unmet=() triton
  if [[ -z ${FACT[package]} ]]; then step "install ssd-serve" pip install --no-deps -e "$HERE"; fi
  install_flashinfer
  if [[ $MODE == install ]]; then read_facts; fi # what FlashInfer needs is known only now
  if [[ -n ${FACT[prebuilt]} && ${FACT[prebuilt]} != "${FACT[flashinfer]}"* ]]; then
    step "remove kernels prebuilt for another FlashInfer, which would be used first" \
      pip uninstall --yes amd-flashinfer-jit-cache
  fi
  read -ra unmet <<<"${FACT[unmet]}"
  if ((${#unmet[@]})); then step "install what they need" pip install "${unmet[@]}"; fi
  if [[ -n ${FACT[triton]} ]]; then return; fi
  triton=${SSD_TRITON_SPEC:-${FACT[triton_spec]}}
  if [[ -n $triton ]]; then
    step "install Triton" pip install --no-deps --find-links "$WHEELS/rocm-rel-${FACT[rocm]}/" "$triton"
  else
    problem 18 "Triton cannot be imported, and torch does not say which one it needs" "set SSD_TRITON_SPEC"
  fi
}

# FlashInfer finds compiled kernels by name, not by what compiled them: each combination gets its own folder.
write_environment() {
  local key="torch-${FACT[torch]}_flashinfer-${FACT[flashinfer]:-none}_$ARCHITECTURE" text workspace each
  workspace=$CACHE/rocm/${key//[^A-Za-z0-9._+-]/-}
  ENVIRONMENT=$CACHE/rocm.env
  text=$(printf 'export %s=%q\n' FLASHINFER_WORKSPACE_BASE "$workspace" TRITON_CACHE_DIR "$workspace/triton")
  for each in "${TUNING[@]}"; do
    # shellcheck disable=SC2016 # the shell that reads the file expands it
    text+=$(printf '\nexport %s=${%s:-%s}' "${each%%=*}" "${each%%=*}" "${each#*=}")
  done
  text+=$(printf '\nROCM_PYTHON=%q' "$(command -v "$PYTHON")") # what `make serve` starts
  if [[ -n $(find "$CACHE" -maxdepth 0 \( ! -user "$(id -u)" -o -perm /022 \) 2>/dev/null) ]]; then
    problem 2 "others may write to $CACHE, and what is compiled there is run" \
      "chmod go-w it, or set SSD_CACHE_DIR to a folder that is yours alone"
  fi
  if [[ ! -d $workspace || ! -r $ENVIRONMENT || $(<"$ENVIRONMENT") != "$text" ]]; then
    step "write $ENVIRONMENT" store_environment "$workspace" "$text"
  fi
}

store_environment() { # folder of compiled kernels, text
  if (umask 077 && mkdir -p "$1" && printf '%s\n' "$2" >"$ENVIRONMENT.new" && mv "$ENVIRONMENT.new" "$ENVIRONMENT"); then
    return
  fi
  problem 2 "$ENVIRONMENT cannot be written" "set SSD_CACHE_DIR to a folder of yours"
}

verify_versions() {
  read_facts
  if [[ $TORCH_NOW != "$TORCH_BEFORE" ]]; then
    problem 17 "torch was $TORCH_BEFORE, and is now $TORCH_NOW" \
      "start again from the image, or reinstall AMD's torch from $WHEELS"
  elif [[ ${FACT[flashinfer_state]} != ok ]]; then
    problem 18 "FlashInfer is ${FACT[flashinfer]:-missing} after installing $SPEC" "set SSD_FLASHINFER_SPEC: see --help"
  fi
}

verify_imports() {
  if ! (. "$ENVIRONMENT" && "$PYTHON" -c 'import flashinfer, triton'); then
    problem 18 "FlashInfer or Triton cannot be imported; the message is above" "see SSD_FLASHINFER_SPEC in --help"
  fi
}

run_doctor() {
  local help
  unset SSD_FLASHINFER_SPEC SSD_FLASHINFER_INDEX SSD_TRITON_SPEC SSD_ROCM_CONSTRAINTS SSD_KFD # ssd does not know them
  help=$("$PYTHON" -m ssd_serve --help) || problem 18 "ssd does not start; its message is above" "see that message"
  if ! grep -qE '^ +doctor( |$)' <<<"$help"; then
    say "note: this ssd has no command 'doctor': nothing was computed on the GPU to see whether it works"
  elif ! (. "$ENVIRONMENT" && "$PYTHON" -m ssd_serve doctor --target-device cuda:0); then
    problem 19 "ssd doctor found a problem" "it says above what to do"
  fi
}

main() {
  read_arguments "$@"
  if [[ -z $IMAGE ]]; then check_gpu; fi
  if ! check_python; then exit "$EXIT_CODE"; fi
  if [[ $MODE == install ]]; then
    SCRATCH=$(mktemp -d)
    trap 'rm -rf "$SCRATCH"' EXIT
  fi
  install_packages
  if [[ -n $IMAGE ]]; then
    if [[ $MODE == install ]]; then verify_versions; fi
    exit "$EXIT_CODE"
  fi
  write_environment
  if [[ $MODE == install ]]; then
    verify_versions
    verify_imports
    run_doctor
    say "done. Without make, first in each shell:  . $(printf %q "$ENVIRONMENT")"
    say "To serve:"
    say "  make -C $(printf %q "$HERE") serve"
  elif [[ $MODE == dry-run ]]; then
    say "would check torch, FlashInfer and Triton again, and run ssd doctor. Nothing was changed."
  elif ((EXIT_CODE == 0)); then
    say "all is in place; ssd doctor was not run"
  fi
  exit "$EXIT_CODE"
}

main "$@"
