# The serving image of one target. `python build.py --target X` calls it; by hand:
#
#   docker buildx build --target serve-gpu --build-arg SERVE_FROM=plain --build-arg BASE=IMAGE@DIGEST --build-arg PYTHON_VERSION=3.11 \
#     --build-arg SOURCE_DATE_EPOCH=SECONDS --build-context wheels=DIR --build-context wheelhouse=DIR .
#
# wheels      what sparkforge built: *.whl, ours.txt (NAME==VERSION --hash=sha256:… of each, as the build
#             recorded it), requirements.txt (everything else, with hashes), sources.list (all that apt reads; empty:
#             the base's own sources), and optionally share/
#             (profile.json: how the model is served; what it was made of), needs.json (what has to be
#             there at last, and what must not), emulated (a mark: this machine runs the image's programs by an emulator)
# wheelhouse  the wheels that requirements.txt names, and uv for the target's platform
#
# No `# syntax=` line: it would fetch a frontend from a registry, unpinned, before anything else.
ARG BASE
# base or plain: what the image starts from
ARG SERVE_FROM=base

# Stand-ins that the two --build-context options replace. Without them a forgotten option would make the
# builder look for images of these names in a public registry.
FROM scratch AS wheels
FROM scratch AS wheelhouse


# ---- steps: scripts that are mounted where they are needed, and in no layer of the image ---------------
FROM scratch AS steps
# sources.list: the archive at the moment that pins.yaml names, whose lists expired long ago; empty for a base
# of one's own, which has its own sources. Ubuntu has the snapshots of all platforms on the host `snapshot` of
# its domain. ca.crt is a secret: the CA bundle of a machine behind a proxy.
COPY --chmod=0555 <<'EOS' /apt-install
#!/bin/sh
set -eu
ca=
if [ -s /run/ca.crt ]; then ca='-o Acquire::https::CAInfo=/run/ca.crt'; fi
at=
list="$(mktemp)"
if [ -s /run/sources.list ]; then
  archive="$(find /etc/apt -name '*.list' -o -name '*.sources' | xargs cat |
    sed -nE 's,.*https?://[^./]+[.]([^/ ]+)/ubuntu(-ports)?(/| |$).*,http://snapshot.\1/ubuntu,p' | sort -u)"
  sed "s,@ARCHIVE@,${archive}," /run/sources.list >"${list}"
  at="-o Dir::Etc::SourceList=${list} -o Dir::Etc::SourceParts=/dev/null -o Acquire::Check-Valid-Until=false"
  at="${at} -o APT::Update::Error-Mode=any" # a list that is missing would give older versions
fi
apt-get ${ca} ${at} -q update
DEBIAN_FRONTEND=noninteractive apt-get ${ca} ${at} -qy install --no-install-recommends "$@"
rm "${list}"
EOS

# Logs, caches and lists are what differs between two builds of one day.
COPY --chmod=0555 <<'EOS' /clean
#!/bin/sh
set -eu
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt \
  /var/log/dpkg.log /var/log/alternatives.log /var/lib/dpkg/*-old /var/cache/debconf/*-old
EOS

# strip: remove what NVIDIA published, also held packages, what only that needed (apt knows), and what its
# images have beside their packages. dpkg refuses where a package of somebody else needs one of them. Nothing
# changes in a base that has nothing of it.
COPY --chmod=0555 <<'EOS' /strip
#!/bin/sh
set -eu
theirs="$(dpkg-query --show --showformat '${binary:Package}|${Maintainer}|${Origin}\n' |
  sed -nE 's/^([^|]+)[|]([^|]*@nvidia[.]com.*|[^|]*[|]NVIDIA.*)$/\1/Ip')"
if [ -n "${theirs}" ]; then
  apt-mark unhold ${theirs} >/dev/null
  dpkg --purge ${theirs}
  # what others only recommend or suggest goes, too: apt suggests dpkg-dev, and that recommends gcc
  apt-get -qy -o APT::AutoRemove::RecommendsImportant=false -o APT::AutoRemove::SuggestsImportant=false \
    autoremove --purge
fi
rm -rf /usr/local/cuda /usr/local/cuda-* /usr/local/nvidia /opt/nvidia /etc/ld.so.conf.d/nvidia.conf \
  /usr/share/keyrings/cuda-* /etc/apt/trusted.gpg.d/*cuda* /etc/apt/trusted.gpg.d/*nvidia*
grep -rlis 'nvidia[.]com' /etc/apt/sources.list.d | while read -r list; do rm "${list}"; done
ldconfig
EOS


# ---- plain: the base without NVIDIA's packages and compilers, as one layer -----------------------------
# The base is given by digest, or is a local image; there is no default that could drift.
# hadolint ignore=DL3006
FROM ${BASE} AS base

FROM base AS stripped
RUN --network=none --mount=type=bind,from=steps,target=/run/steps \
    /run/steps/strip && /run/steps/clean

# What is removed in a layer stays in the one below; so the rest is copied.
FROM scratch AS plain
# hadolint ignore=DL3067
COPY --from=stripped / /


# ---- system: Python and the shared libraries, where the base lacks them ------------------------------
# hadolint ignore=DL3006
FROM ${SERVE_FROM} AS system
ARG PYTHON_VERSION
# Extra packages of a target.
ARG SYSTEM_PACKAGES=""
ARG SOURCE_DATE_EPOCH
SHELL ["/bin/sh", "-euc"]
# libnuma1, libstdc++6: what vLLM's and torch's extensions link to and no wheel brings. ca-certificates: for
# the model's download. tini: see the end. haproxy: the front door (docs/trust.md)
# .pyc checked by date would all be stale once the exporter rewrites the dates.
# SC2086: the packages are words of a list.
# hadolint ignore=SC2086
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=bind,from=steps,target=/run/steps \
    --mount=type=bind,from=wheels,source=sources.list,target=/run/sources.list \
    packages="ca-certificates libnuma1 libstdc++6 tini haproxy ${SYSTEM_PACKAGES}"; \
    fresh_python=; \
    if ! command -v "python${PYTHON_VERSION}" >/dev/null; then \
      packages="${packages} python${PYTHON_VERSION}"; fresh_python=1; \
    fi; \
    /run/steps/apt-install ${packages}; \
    if [ -n "${fresh_python}" ]; then \
      "python${PYTHON_VERSION}" -m compileall -qf --invalidation-mode unchecked-hash \
        -x '(lib2to3|/test)/' "/usr/lib/python${PYTHON_VERSION}"; \
    fi; \
    /run/steps/clean


# ---- tools: mounted where they are needed and in no layer of the image --------------------------------
FROM system AS tools
ARG PYTHON_VERSION
RUN --network=none --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    "python${PYTHON_VERSION}" -m zipfile -e /run/wheelhouse/uv-[0-9]*.whl /uv; \
    install -D -m 0755 /uv/uv-*.data/scripts/uv /tools/uv
# install DIR REQUIREMENTS: nothing but exactly these wheels out of DIR, by their hashes, from no network.
# The .pyc are held against the hash of their source, not its date, which the exporter rewrites. Unchecked
# ones would be as good for serving, but a source file mounted over one of the image would then be ignored
# in silence. uv's note on each wheel holds the date of the wheel's file, which differs between machines,
# and serves only uv's next install.
COPY --chmod=0555 <<'EOS' /tools/install
#!/bin/sh
set -eu
export UV_NO_CACHE=1 UV_NO_CONFIG=1 UV_OFFLINE=1 UV_LINK_MODE=hardlink PYC_INVALIDATION_MODE=CHECKED_HASH
# Seconds for one file: emulated, on a busy machine, a large one takes longer than uv's 60.
export UV_COMPILE_BYTECODE_TIMEOUT=900
/run/tools/uv pip install --quiet --python /opt/sparkforge/venv --no-index --find-links "$1" \
  --only-binary :all: --require-hashes --no-deps --compile-bytecode -r "$2"
rm -f /opt/sparkforge/venv/.lock
find /opt/sparkforge/venv -name uv_cache.json | while read -r note; do
  rm "${note}"
  sed -i '/\/uv_cache\.json,/d' "${note%/*}/RECORD"
done
EOS

# check: are the declared requirements of all that is installed met? uv also holds the platform that a wheel
# notes inside against the machine's, and NVIDIA's nvidia-cusparselt-cu13 for arm64 notes one that no
# installer knows (manylinux2014_sbsa). What it notes decides nothing: the file's name has been compared with
# the platform when it was installed.
COPY --chmod=0555 <<'EOS' /tools/check
#!/bin/sh
set -u
said="$(/run/tools/uv pip check --no-cache --no-config --offline --python /opt/sparkforge/venv 2>&1)" && exit 0
echo "${said}"
problems="$(echo "${said}" | grep '^The package ')" || exit 1 # uv itself has failed
! echo "${problems}" | grep -v ' was built for a different platform$'
EOS


# ---- packages: third-party packages; a change of our patches leaves this layer as it is ----------------
# Of uv's own files, links stay and two lines: `build.py verify` compares each file of the environment.
FROM system AS packages
ARG PYTHON_VERSION
RUN --network=none \
    --mount=type=bind,from=tools,source=/tools,target=/run/tools \
    --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=bind,from=wheels,source=requirements.txt,target=/run/requirements.txt \
    /run/tools/uv venv --quiet --no-cache --no-config --offline --python "/usr/bin/python${PYTHON_VERSION}" \
      /opt/sparkforge/venv; \
    find /opt/sparkforge/venv -type f -delete; \
    printf 'home = /usr/bin\ninclude-system-site-packages = false\n' >/opt/sparkforge/venv/pyvenv.cfg; \
    /run/tools/install /run/wheelhouse /run/requirements.txt


# ---- prebuilt: the one C file that Triton would compile on the user's machine --------------------------
# Nothing for a target without a GPU. Here and not in the image, so that only this needs the compiler: it and
# Python's headers are a target's BUILD_PACKAGES.
FROM system AS prebuilt
ARG PYTHON_VERSION
ARG BUILD_PACKAGES=""
# hadolint ignore=SC2086
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=bind,from=steps,target=/run/steps \
    --mount=type=bind,from=wheels,source=sources.list,target=/run/sources.list \
    if [ -n "${BUILD_PACKAGES}" ]; then /run/steps/apt-install ${BUILD_PACKAGES}; fi
RUN --network=none \
    --mount=type=bind,from=wheelhouse,target=/run/wheelhouse \
    --mount=type=bind,from=wheels,target=/run/wheels \
    --mount=type=bind,source=sparkforge/serving/image_build.py,target=/run/image_build.py \
    install -d /prebuilt; \
    "python${PYTHON_VERSION}" -IB /run/image_build.py triton /run/wheels /run/wheelhouse /prebuilt/triton


# ---- builder: what wheels are compiled in (--wheels compile); no part of the image ----------------------
# The same steps with other arguments: SYSTEM_PACKAGES are the compilers, requirements.txt is what the
# upstreams' builds require.
FROM packages AS builder
ENV PATH=/opt/sparkforge/venv/bin:${PATH}
USER 10001:10001
WORKDIR /build


# ---- compiled: one wheel from its patched tree (--wheels compile), as files; no part of the image -------
# sources: tree/ (patched), externals/, and compile.sh, which sparkforge/build/stages/natives.py writes.
# ccache keeps results of compilers for the next build.
FROM scratch AS sources

FROM builder AS compile
COPY --from=sources --chown=10001:10001 / /build/
RUN --network=none \
    --mount=type=cache,id=sparkforge-ccache,target=/build/ccache,uid=10001,gid=10001 \
    sh /build/compile.sh

FROM scratch AS compiled
COPY --from=compile /build/out /


# ---- serve: the image ----------------------------------------------------------------------------------
FROM packages AS serve
# Our wheels through the same door, then the declared requirements of all that is installed are checked.
# fastsafetensors looks for libcudart.so, and NVIDIA's wheel has only libcudart.so.13: the link leads to the
# one library that torch loads. The user is written by hand because useradd notes the day in /etc/shadow. At
# last: is all there that the target needs, and no compiler? Old emulators die of an import (QEMU 7.2: SIGSEGV in torch's), which says nothing of the image.
RUN --network=none \
    --mount=type=bind,from=tools,source=/tools,target=/run/tools \
    --mount=type=bind,from=wheels,target=/run/wheels \
    --mount=type=bind,from=prebuilt,source=/prebuilt,target=/run/prebuilt \
    --mount=type=bind,source=sparkforge/serving/image_build.py,target=/run/image_build.py \
    --mount=type=tmpfs,target=/run/home \
    /run/tools/install /run/wheels /run/wheels/ours.txt; \
    /run/tools/check; \
    for library in /opt/sparkforge/venv/lib/python*/site-packages/nvidia/cu*/lib/libcudart.so.*; do \
      if [ -e "${library}" ]; then ln -s "${library}" /usr/local/lib/libcudart.so; fi; \
    done; \
    ldconfig; \
    rm -f /var/cache/ldconfig/aux-cache; \
    if [ -d /run/wheels/share ]; then \
      cp -r /run/wheels/share /opt/sparkforge/share; \
      cp -r /run/prebuilt/. /opt/sparkforge/share; \
      chmod -R u=rwX,go=rX /opt/sparkforge/share; \
    fi; \
    echo 'sparkforge:x:10001:10001:sparkforge:/var/cache/sparkforge:/usr/sbin/nologin' >>/etc/passwd; \
    echo 'sparkforge:x:10001:' >>/etc/group; \
    install -d -o 10001 -g 10001 /var/cache/sparkforge /var/cache/sparkforge/huggingface; \
    install -d /model; \
    if [ -e /run/wheels/needs.json ]; then \
      PATH="/opt/sparkforge/venv/bin:${PATH}" HOME=/run/home TMPDIR=/run/home \
        /opt/sparkforge/venv/bin/python -IB /run/image_build.py needs /run/wheels/needs.json || { code=$?; \
          if [ "${code}" -le 128 ] || [ ! -e /run/wheels/emulated ]; then exit "${code}"; fi; \
          echo "the emulator ended by a signal: not all imports were tried"; }; \
    fi
COPY --chmod=0555 scripts/entrypoint.py scripts/healthcheck.py /opt/sparkforge/bin/
COPY --chmod=0444 sparkforge/__init__.py /opt/sparkforge/bin/sparkforge/
COPY --chmod=0444 sparkforge/serving/*.j2 sparkforge/serving/*.py /opt/sparkforge/bin/sparkforge/serving/

# Everything that is written at run time lies under one folder, so that the root can be read-only and one
# volume keeps compiled kernels over restarts. Where each library compiles to, the entrypoint says: to a
# folder of this build and device below SPARKFORGE_JIT_DIR (docs/serving.md).
ENV PATH=/opt/sparkforge/venv/bin:${PATH} \
    HOME=/var/cache/sparkforge \
    XDG_CACHE_HOME=/var/cache/sparkforge \
    XDG_CONFIG_HOME=/var/cache/sparkforge/config \
    HF_HOME=/var/cache/sparkforge/huggingface \
    VLLM_CONFIG_ROOT=/var/cache/sparkforge/config/vllm \
    SPARKFORGE_JIT_DIR=/var/cache/sparkforge/jit \
    PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1

# Last, because they change most often and make no layer. SERVE_ARGS: the target's options of `vllm serve`.
ARG RELEASE="" SERVE_ARGS="" PYTHON_VERSION
# Where vllm lies: the smoke test mounts the original files there, to show what the release does unpatched.
LABEL org.sparkforge.site-packages=/opt/sparkforge/venv/lib/python${PYTHON_VERSION}/site-packages
ENV SPARKFORGE_RELEASE=${RELEASE} \
    SPARKFORGE_SERVE_ARGS=${SERVE_ARGS} \
    SPARKFORGE_MODEL=/model

USER 10001:10001
WORKDIR /var/cache/sparkforge
VOLUME /var/cache/sparkforge
EXPOSE 8000
# Loading takes minutes for a large model, its first warm-up 15 more at most, and a download before both as
# long as the network makes it; failures count only after the start period, which the first success ends. A
# server that stops is unhealthy 45 s later at most: a look that still sees the last step, then three that
# see none.
HEALTHCHECK --interval=5s --timeout=8s --start-period=60m --start-interval=2s --retries=3 \
    CMD ["/opt/sparkforge/venv/bin/python", "-I", "/opt/sparkforge/bin/healthcheck.py"]
# tini is process 1: a process 1 without handlers ignores SIGTERM, which vLLM is while it loads,
# and vLLM does not collect the children that its workers leave behind.
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/sparkforge/venv/bin/python", "-I", "/opt/sparkforge/bin/entrypoint.py"]


# ---- serve-gpu: the same for a target with a GPU ---------------------------------------------------------
FROM serve AS serve-gpu
# For NVIDIA's container toolkit: which devices, and libcuda beside nvidia-smi. Images of CUDA say so, too.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
