#!/usr/bin/env bash
# Make a site of docs/: scripts/site.sh NEW-FOLDER https://FORGE/OWNER/REPOSITORY
# README.md is its first page. A link to a file that is no page leads to the repository; a broken one ends it.
set -euo pipefail
: "${2:?usage: scripts/site.sh NEW-FOLDER https://FORGE/OWNER/REPOSITORY}"
out=$(realpath "$1") files=$2/blob/HEAD/
if [[ -e $out ]]; then
  printf 'site: error: %s exists; name a new folder\n' "$out" >&2
  exit 1
fi
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'rm -rf "$work"' EXIT
pages=$work/docs
cp -r docs .github/zensical.toml "$work"
cp README.md "$pages/index.md"
cp CHANGELOG.md CONTRIBUTING.md SECURITY.md "$pages"

page='(CHANGELOG|CONTRIBUTING|SECURITY)\.md'
sed -Ei "s#\]\((LICENSE|NOTICE|[a-z.]+/)#]($files\1#g; s#\]\(${files}docs/#](#g" \
  "$pages"/{index,CHANGELOG,CONTRIBUTING,SECURITY}.md
sed -Ei "s#\]\(\.\./$page#](\1.md#g; s#\]\(\.\./README\.md#](index.md#g; s#\]\(\.\./#]($files#g" "$pages"/*.md
sed -Ei "s#\]\(\.\./\.\./$page#](../\1.md#g; s#\]\(\.\./\.\./README\.md#](../index.md#g; s#\]\(\.\./\.\./#]($files#g" \
  "$pages"/evidence/*.md

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --require-hashes --only-binary :all: --requirement requirements/site.txt
cd "$work"
venv/bin/zensical build --strict --config-file zensical.toml
cp -r site "$out"
