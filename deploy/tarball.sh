#!/usr/bin/env bash
# Makes out/locks-kvd-VERSION-linux-x86_64.tar.gz: a folder that runs from wherever it is unpacked, on any x86-64 Linux
# with glibc 2.36 or later. The same sources, tools and libraries make the same bytes.
# usage: deploy/tarball.sh [--build-dir=DIR] [--out=DIR]      (defaults: build/release, which it builds; out)
#   --build-dir=DIR  takes the programs of a build folder as they are, for example build/cpu
#   --out=DIR        the folder and the archive are made there
# In it: bin/locks-kvd, bin/locksctl; lib/, what they link besides glibc; share/locks-kvd/, an example configuration, the
# systemd unit with its configuration and user, our licence and those of lib/.
# RDMA: UCX's modules for it are in lib/ucx; they use the machine's own libibverbs and librdmacm, and are passed over where
# there are none.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."

build=""
out=out
for argument in "$@"; do
  case "$argument" in
    --build-dir=?*) build=${argument#--build-dir=} ;;
    --out=?*) out=${argument#--out=} ;;
    -h | --help) sed -n '2,11p' "$0" | cut -c3-; exit 0 ;;
    *) echo "tarball.sh: unknown argument '$argument': expected --build-dir=DIR or --out=DIR" >&2; exit 2 ;;
  esac
done
command -v patchelf >/dev/null || { echo "tarball.sh: no patchelf: run deploy/install_deps.sh build" >&2; exit 1; }
if [ -z "$build" ]; then
  build=build/release
  cmake --preset release >/dev/null
  cmake --build --preset release --target locks-kvd locksctl -j "$(nproc)"
fi

version=$(sed -n 's/^project(locks_kvd VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
name=locks-kvd-$version-linux-x86_64
folder=$out/$name
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib/ucx" "$folder/share/locks-kvd/licenses"
cp "$build/service/locks-kvd" "$build/client/locksctl" "$folder/bin/"

# Libraries: all but glibc's own, which must be the machine's. A module brings nothing: what it links beyond this is the
# RDMA stack, which has to fit the machine's kernel and devices.
ldd "$folder"/bin/* | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux-x86-64)\.so' >"$folder/libraries"
xargs cp -L -t "$folder/lib" <"$folder/libraries"
modules=$(dirname "$(grep '/libucs\.so' "$folder/libraries")")/ucx
cp -L "$modules"/libuct_ib.so.0 "$modules"/libuct_rdmacm.so.0 "$folder/lib/ucx/"

chmod 755 "$folder"/bin/*
chmod 644 "$folder"/lib/*.so* "$folder"/lib/ucx/*
strip --strip-unneeded "$folder"/bin/* "$folder"/lib/*.so* "$folder"/lib/ucx/*
for file in "$folder"/bin/*; do patchelf --set-rpath '$ORIGIN/../lib' "$file"; done
for file in "$folder"/lib/*.so*; do patchelf --set-rpath '$ORIGIN' "$file"; done
for file in "$folder"/lib/ucx/*; do patchelf --set-rpath '$ORIGIN/..' "$file"; done

cp LICENSE "$folder/"
cp deploy/examples/locks-kvd.textproto "$folder/share/locks-kvd/"
cp -r deploy/systemd "$folder/share/locks-kvd/"
# Which package each library is of, with its version and licence. A library may be listed under / or /usr.
while read -r library; do
  package=$(dpkg-query -S "$library" "/usr$library" "${library#/usr}" 2>/dev/null | head -n 1 | cut -d: -f1 || true)
  [ -n "$package" ] || { echo "tarball.sh: $library: expected a file of a Debian package, which has its licence" >&2; exit 1; }
  cp "/usr/share/doc/$package/copyright" "$folder/share/locks-kvd/licenses/$package"
  echo "$(basename "$library") $package $(dpkg-query -W -f='${Version}' "$package")"
done <"$folder/libraries" | sort >"$folder/share/locks-kvd/libraries.txt"
rm "$folder/libraries"
chmod -R u=rwX,go=rX "$folder"

# One time for all files: that of the commit.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
tar -C "$out" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --format=gnu -cf - "$name" | gzip -n -6 >"$out/$name.tar.gz"
echo "tarball.sh: $out/$name.tar.gz, $(du -m "$out/$name.tar.gz" | cut -f1) MiB"
