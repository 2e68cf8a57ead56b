#!/usr/bin/env bash
# Tries the units and the Debian packages under a real systemd: boots Debian in a
# temporary container and runs inside.sh there as a systemd unit. Without root or the
# tools it prints what is missing and exits with 0.
#
#   SUITE=trixie test/systemd/run.sh     another Debian release (default bookworm)
#   CACHE=DIR    test/systemd/run.sh     where its root file system is kept
#
# The host's cgroups may be of the old kind, so that MemoryMax= and TasksMax= are checked
# as settings only; everything else of a unit is in force inside.
set -euo pipefail
cd "$(dirname "$0")/../.."
SUITE=${SUITE:-bookworm}
CACHE=${CACHE:-/var/cache/agentctl-test/$SUITE}

skip() { echo "test-systemd: skipped: $*"; exit 0; }
[ "$(id -u)" = 0 ] || skip "it needs root to boot a container; try: sudo make test-systemd"
for tool in systemd-nspawn:systemd-container mmdebstrap:mmdebstrap dpkg-deb:dpkg; do
  command -v "${tool%:*}" > /dev/null || skip "${tool%:*} is not installed; try: apt-get install ${tool#*:}"
done

work=$(mktemp -d)
pid=
cleanup() {
  if [ -n "$pid" ] && kill -0 "$pid" 2> /dev/null; then
    kill "$pid" 2> /dev/null || true # nspawn shuts the container down
    wait "$pid" 2> /dev/null || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT

if [ ! -e "$CACHE/etc/os-release" ]; then
  echo "test-systemd: making a root file system of Debian $SUITE in $CACHE"
  rm -rf "$CACHE" "$CACHE.new"
  mkdir -p "$(dirname "$CACHE")"
  mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,dbus,procps,init-system-helpers \
    "$SUITE" "$CACHE.new" > "$work/mmdebstrap" 2>&1 \
    || { tail -n 5 "$work/mmdebstrap" >&2; rm -rf "$CACHE.new"; skip "Debian's packages are not to be had from here"; }
  mv "$CACHE.new" "$CACHE"
fi

# Two releases, so that an upgrade can be tried, and the client that asks meanwhile.
platform=linux/$(go env GOARCH)
mkdir "$work/in" "$work/out"
for v in 0.0.1 0.0.2; do
  make --no-print-directory -s deb DEB_PLATFORMS="$platform" DIST="$work/dist" VERSION="v$v" > "$work/make" 2>&1 \
    || { cat "$work/make" >&2; exit 1; }
done
# The same packages from another place, hour and umask are the same bytes.
mkdir "$work/again"
cp "$work"/dist/agentctl-*linux* "$work/again/"
(umask 077; TZ=Asia/Tokyo make --no-print-directory -s deb DEB_PLATFORMS="$platform" DIST="$work/again" VERSION=v0.0.2 > "$work/make" 2>&1) \
  || { cat "$work/make" >&2; exit 1; }
for deb in "$work"/again/*.deb; do
  cmp "$deb" "$work/dist/${deb##*/}" || { echo "test-systemd: ${deb##*/} is not reproducible" >&2; exit 1; }
done
echo "ok    packages are reproducible"
# The next release has other settings files, so that it is seen which ones an upgrade takes.
for deb in "$work"/dist/*_0.0.2_*.deb; do
  rm -rf "$work/repack"
  dpkg-deb -R "$deb" "$work/repack"
  for f in "$work"/repack/etc/default/* "$work/repack/etc/agentctl/config.yaml"; do echo '# of the next release' >> "$f"; done
  dpkg-deb --root-owner-group -b "$work/repack" "$deb" > /dev/null
done
mkdir "$work/in/notes"
cp docs/examples/notes/plugin.json "$work/in/notes/"
CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$work/in/notes/run" ./docs/examples/notes
mv "$work"/dist/*.deb "$work/in/"
CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$work/in/client" ./test/systemd/client
cp test/systemd/inside.sh relay/plugins/process/testdata/server.py "$work/in/"
# The container has no node. That of this machine is used if it runs there; an MCP server needs no
# other file of its package.
node=$(node -p process.execPath 2> /dev/null) && cp "$node" "$work/in/node" || true

cat > "$work/agentctl-test.service" << 'UNIT'
[Unit]
Description=The test itself
After=multi-user.target
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
ExecStart=/bin/bash /in/inside.sh
StandardOutput=append:/out/log
StandardError=append:/out/log
TimeoutStartSec=240
UNIT
: > "$work/out/log"
begin=$SECONDS
# Landlock is what the sandbox of plugins needs; nspawn forbids it by default.
# --volatile=overlay: nothing the test does is kept. The exit status of the test's unit is
# the container's.
timeout --kill-after=20 300 systemd-nspawn --quiet --register=no --keep-unit --private-network \
  --system-call-filter="landlock_create_ruleset landlock_add_rule landlock_restrict_self" \
  --volatile=overlay --directory="$CACHE" --bind-ro="$work/in:/in" --bind="$work/out:/out" \
  --bind-ro="$work/agentctl-test.service:/etc/systemd/system/agentctl-test.service" \
  --boot --console=pipe systemd.unit=multi-user.target systemd.wants=agentctl-test.service \
  > "$work/console" 2>&1 < /dev/null &
pid=$!
tail -n +1 -f --pid="$pid" "$work/out/log" &
status=0
wait "$pid" || status=$?
wait $! 2> /dev/null || true
pid=
if [ "$status" != 0 ] || ! grep -q '^all passed' "$work/out/log"; then
  echo "test-systemd: failed (status $status); the container's console ended so:" >&2
  tail -n 15 "$work/console" >&2
  exit 1
fi
echo "test-systemd: passed in $((SECONDS - begin)) s under $(head -n 1 "$work/out/systemd")"
