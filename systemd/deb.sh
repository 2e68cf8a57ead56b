#!/usr/bin/env bash
# Makes the Debian packages of the binaries in $DIST (make deb calls it):
#
#   $DIST/agentctl_VERSION_ARCH.deb         the board build
#   $DIST/agentctl-relay_VERSION_ARCH.deb   the full build
#
# for each GOOS/GOARCH[/GOARM] of $PLATFORMS. The same commit gives the same bytes.
# $NFPM is the command that makes a package, $VERSION the release, $BUILT_AT the commit's
# time, $HOST_BINARY a build that runs here. The man pages are written by TestMan.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${DIST:=dist}" "${PLATFORMS:?}" "${VERSION:?}" "${BUILT_AT:?}" "${NFPM:?}" "${HOST_BINARY:?}" "${GO:=go}"

# debian_version prints a version that Debian sorts as the releases came: v1.2.0 is 1.2.0,
# five commits later it is 1.2.0+5.gabc1234, and without any tag 0.0~DATE.COMMIT.
debian_version() {
  local v=${VERSION#v}
  case $v in
    [0-9]*.[0-9]*)
      if [[ $v =~ ^(.*)-([0-9]+)-g([0-9a-f]+)(-dirty)?$ ]]; then
        v="${BASH_REMATCH[1]}+${BASH_REMATCH[2]}.g${BASH_REMATCH[3]}${BASH_REMATCH[4]}"
      fi ;;
    *) v="0.0~$(date -u -d "@$BUILT_AT" +%Y%m%d%H%M%S).$v" ;;
  esac
  v=${v/%-dirty/+dirty} # a hyphen would start Debian's own revision
  v=${v//-/\~}          # 1.0.0-rc1 comes before 1.0.0
  printf '%s' "${v//[^A-Za-z0-9.+~]/.}"
}

extra=$(mktemp -d)
trap 'rm -rf "$extra"' EXIT
for shell in bash zsh fish; do
  "$HOST_BINARY" completion "$shell" > "$extra/agentctl.$shell"
done
# man_pages PACKAGE TAGS writes the man pages of the commands that a build with TAGS has.
man_pages() {
  SOURCE_DATE_EPOCH=$BUILT_AT CGO_ENABLED=0 $GO test -count=1 -tags "$2" -run '^TestMan$' ./cmd/agentctl \
    -args -man-dir "$extra/man/$1" -man-version "$VERSION" > /dev/null
}
man_pages agentctl agentctl_omit_relay
man_pages agentctl-relay ""
gzip -9n "$extra"/man/*/*.1

SOURCE_DATE_EPOCH=$BUILT_AT
DEB_VERSION=$(debian_version)
DEB_EXTRA=$extra
DEB_MAINTAINER=${DEB_MAINTAINER:-agentctl maintainers <maintainers@agentctl.invalid>}
export SOURCE_DATE_EPOCH DEB_VERSION DEB_EXTRA DEB_MAINTAINER
umask 022
for p in $PLATFORMS; do
  IFS=/ read -r os arch arm <<< "$p"
  DEB_GOARCH=$arch$arm # nfpm knows arm6 as Debian's armhf
  export DEB_GOARCH DEB_BINARY
  for package in agentctl agentctl-relay; do
    kind=agentctl-board
    [ "$package" = agentctl ] || kind=agentctl
    DEB_BINARY=$DIST/$kind-$os-$arch${arm:+v$arm}
    [ -x "$DEB_BINARY" ] || { echo "deb.sh: no $DEB_BINARY; make it with: make cross PLATFORMS=$p" >&2; exit 1; }
    $NFPM package --packager deb --config "systemd/deb/$package.yaml" --target "$DIST/" | sed -n 's/^created package: //p'
  done
done
