#!/usr/bin/env bash
# Completes a release in $DIST, which holds the binaries and packages of one version: an SPDX
# document for each binary, made by syft from the module list inside it, and SHA256SUMS over
# everything. It checks what it wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${DIST:?}" "${VERSION:?}" "${GO:?}" "${SYFT:?}"
cd "$DIST"
rm -f SHA256SUMS ./*.spdx.json
syft=$(mktemp -d)
trap 'rm -rf "$syft"' EXIT
echo "release: building syft, which takes some minutes the first time"
GOBIN=$syft CGO_ENABLED=0 "$GO" install "$SYFT"
for f in agentctl-linux-* agentctl-board-linux-* agentctl-darwin-* agentctl-windows-*; do
  # A binary is the source: the document lists what is linked, and not what go.mod allows.
  SYFT_CHECK_FOR_APP_UPDATE=false "$syft/syft" scan -q "file:$f" --source-name "$f" --source-version "$VERSION" -o "spdx-json=$f.spdx.json"
  while read -r module version; do
    grep -qF "\"$module\"" "$f.spdx.json" && grep -qF "\"$version\"" "$f.spdx.json" ||
      { echo "release: $f.spdx.json lacks $module $version" >&2; exit 1; }
  done < <("$GO" version -m "$f" | awk '$1 == "dep" { print $2, $3 }')
  echo "release: $f.spdx.json"
done
sha256sum -- *.deb agentctl-* > SHA256SUMS
sha256sum --check --quiet SHA256SUMS
echo "release: SHA256SUMS of $(wc -l < SHA256SUMS) files in $DIST; check them with: sha256sum --check SHA256SUMS"
