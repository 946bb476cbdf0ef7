#!/usr/bin/env bash
# The steps of a release from its tag: the jobs of .github/workflows/release.yml, and what
# tests/e2e/nightly/test_release.py runs against a registry on loopback.
#
#   scripts/release.sh [--key FILE] image TARGET REGISTRY/NAME OPTION…  # build, verify, sign and push
#   scripts/release.sh [--key FILE] join IMAGE…                         # one name, and the files that serve it
#   scripts/release.sh publish IMAGE serve=FILES TARGET=FILES…          # the forge's release; README by a pull request
#
# Run it in a checkout of the tag, with an engine (scripts/engine.sh) and, for publish, gh. OPTION is one of
# `build.py build`. Without --key the forge's token for this job signs. Lines NAME=IMAGE@DIGEST go to stdout, and
# to the job's outputs: of images, and of images that carry files from one job to the next (FILES).
set -euo pipefail
shopt -s inherit_errexit # a push that fails in $(…) ends the job
export LC_ALL=C

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 64; }
die() { printf 'release: error: %s\n' "$*" >&2; exit 1; }

output() { printf '%s\n' "$@" | tee -a "${GITHUB_OUTPUT:-/dev/null}"; }

# value in the JSON document $1 below the keys $2…
field() {
  python3 -c 'import functools, json, operator, sys
print(functools.reduce(operator.getitem, sys.argv[2:], json.load(open(sys.argv[1]))))' "$@"
}

# Push the files $3… of the folder $2 as the image $1, of one platform for all; prints its name by digest.
carry() {
  local name=$1 folder=$2
  shift 2
  docker build --quiet --platform linux/amd64 --provenance=false --tag "$name" --file - "$folder" \
    <<<"FROM scratch"$'\n'"COPY $* /release/" >/dev/null
  docker push --quiet "$name" >/dev/null
  docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$name" | grep -F -m 1 "${name%:*}@"
  docker image rm "$name" >/dev/null
}

image() {
  local target=$1 name=${2,,} found=$work/release.json version folder pushed carried
  shift 2
  python3 build.py --version --json >"$found"
  version=$(field "$found" releases "$target") # known before hours of building
  git tag --points-at HEAD | grep -Fqx "v$version" || die "no tag v$version here: release.counter in pins.yaml"
  ! grep -q security@example.invalid SECURITY.md || die "SECURITY.md has no address for private reports yet" # the release refuses it, hours later
  python3 build.py build --target "$target" "$@" >&2
  python3 build.py verify --target "$target" --until wheels >&2
  python3 build.py release --target "$target" --push "$name" "${key[@]}" --json >"$found"
  folder=$(field "$found" folder) pushed=$(field "$found" image)
  python3 build.py verify "$pushed" --key "$trust" >&2
  carried=$(carry "$name:$version-$target-files" "$folder" .)
  output "$target=$pushed" "$target-files=$carried"
}

join() {
  local found=$work/join.json words=() one name folder carried
  for one; do words+=(--join "$one"); done
  python3 build.py release "${words[@]}" "${key[@]}" --json >"$found"
  name=$(field "$found" image) folder=$(field "$found" folder)
  python3 build.py verify "$name" --key "$trust" >&2
  one=${name%@*}:$(field "$found" release)-serve-files
  carried=$(carry "$one" "$folder" '*.yaml' '*.json' .env.example)
  output "image=$name" "serve-files=$carried"
}

publish() {
  local name=$1 tag=${GITHUB_REF_NAME:?the tag; a job of GitHub sets it, its GITHUB_REPOSITORY and GITHUB_SERVER_URL} one container line asset wheel
  shift
  export GH_REPO=$GITHUB_REPOSITORY # the checkout has no remote, and a fork's clone has two
  gh repo clone "$GITHUB_REPOSITORY" "$work/main" -- --quiet --depth=1
  grep -q '<!-- release -->$' "$work/main/README.md" || die "README.md has no line that ends with <!-- release -->"
  mkdir "$work/assets"
  for one; do
    mkdir "$work/${one%%=*}"
    container=$(docker create "${one#*=}" none)
    docker cp --quiet "$container:/release/." "$work/${one%%=*}"
    docker rm "$container" >/dev/null
  done
  # a forge renames files that begin with a dot
  for one in "$work"/serve/{*,.env*}; do
    asset=${one##*/}
    cp "$one" "$work/assets/${asset#.}"
  done
  for one in "${@%%=*}"; do
    [[ $one != serve ]] || continue
    for wheel in "$work/$one"/*.whl; do
      asset=$work/assets/${wheel##*/} # a forge has one of a name
      [[ ! -e $asset ]] || cmp --quiet "$wheel" "$asset" || die "$one: ${wheel##*/} differs from another target's"
      cp "$wheel" "$asset"
    done
    tar -C "$work/$one" --exclude='*.whl' -cf "$work/assets/$one.tar" .
  done
  awk -v "tag=${tag#v}" '/^## /{on = $2 == tag; next} on' CHANGELOG.md >"$work/notes"
  # what is there is from a run of this job that ended later on
  [[ $(gh release view "$tag" --json isDraft --jq .isDraft) == false ]] ||
    gh release create "$tag" --verify-tag --title "$tag" --notes-file "$work/notes" "$work"/assets/*
  gh auth setup-git
  cd "$work/main"
  line="**[$tag]($GITHUB_SERVER_URL/$GITHUB_REPOSITORY/releases/tag/$tag)**: \`$name\` <!-- release -->"
  sed -i "s|^.*<!-- release -->\$|$line|" README.md
  git checkout --quiet -b "release-$tag"
  git -c user.name='github-actions[bot]' -c user.email='41898282+github-actions[bot]@users.noreply.github.com' \
    commit --quiet --message "README: $tag by its digest" README.md
  git push --quiet --force origin "release-$tag"
  gh pr create --head "release-$tag" --fill
}

key=() trust=${GITHUB_SERVER_URL:-}/${GITHUB_WORKFLOW_REF:-}
if [[ ${1:-} == --key && $# -gt 1 ]]; then
  key=(--key "$2") trust=${2%.key}.pub
  shift 2
fi
case ${1:-}:$# in image:[0-2] | join:1 | publish:[0-3]) usage ;; image:* | join:* | publish:*) ;; *) usage ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$@"
