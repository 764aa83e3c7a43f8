# Two images of one file: `--target controller` (no root, nothing but Python) and `--target node` (with the tools that volumes need).
#
#   docker build --target controller -t REGISTRY/kvtier/controller:TAG .
#   docker build --target node       -t REGISTRY/kvtier/node:TAG .
#
# `make images` builds both without a registry or a container engine, and the tests run what it built.
#
# Reproducible as far as its inputs are: BASE_IMAGE by digest, DEBIAN_SNAPSHOT for the packages, constraints.txt for PyPI, and
# SOURCE_DATE_EPOCH for times. Byte code is checked by hash, not by time, and nothing of a build (caches, logs) stays.
ARG BASE_IMAGE=docker.io/library/debian:bookworm-slim

FROM ${BASE_IMAGE} AS base
# Such as 20261101T000000Z of snapshot.debian.org; empty: the mirror of today.
ARG DEBIAN_SNAPSHOT=""
# As set, Debian's packages too compile Python's modules for a check by hash.
ARG SOURCE_DATE_EPOCH=0
ENV LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN set -eu; \
    if [ -n "$DEBIAN_SNAPSHOT" ]; then \
      rm -f /etc/apt/sources.list.d/*; \
      echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian/$DEBIAN_SNAPSHOT bookworm main" > /etc/apt/sources.list; \
      echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian-security/$DEBIAN_SNAPSHOT bookworm-security main" >> /etc/apt/sources.list; \
    fi; \
    if ! command -v python3 >/dev/null; then \
      apt-get update -qq; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates python3; \
    fi; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/ldconfig/aux-cache /var/log/*.log /var/log/apt

# What kvtier needs, fetched once for both images: neither the layer nor the fetching changes with kvtier's own sources.
FROM base AS needs
ARG SOURCE_DATE_EPOCH=0
RUN set -eu; \
    if ! python3 -c 'import ensurepip' 2>/dev/null; then \
      apt-get update -qq; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
    fi
WORKDIR /src
# The build's own tools too come in the versions of constraints.txt.
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_COMPILE=1 \
    PYTHONHASHSEED=0
COPY pyproject.toml constraints.txt ./
# Where PyPI is reached by a mirror or a proxy: `--secret id=pip_conf,src=pip.conf`, which may say `cert = /run/secrets/pip_ca` if
# there is `--secret id=pip_ca,src=CA.pem` too. No secret is left in a layer.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=pip_ca,target=/run/secrets/pip_ca \
    set -eu; \
    python3 -c 'import tomllib; \
      found = tomllib.load(open("pyproject.toml", "rb")); project = found["project"]; extras = project["optional-dependencies"]; \
      open("/build.txt", "w").write("\n".join(found["build-system"]["requires"])); \
      [open(f"/{name}.txt", "w").write("\n".join(project["dependencies"] + extras[name])) for name in ("operator", "node")]'; \
    python3 -m venv /build; \
    /build/bin/pip wheel -q -w /wheels -r /build.txt -r /operator.txt -r /node.txt; \
    for extra in operator node; do \
      python3 -m venv --without-pip "/opt/$extra"; \
      /build/bin/pip --python "/opt/$extra/bin/python" install -q --no-index --find-links /wheels -r "/$extra.txt"; \
      "/opt/$extra/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "/opt/$extra/lib"; \
    done; \
    find /opt -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

# kvtier itself, in a tree of its own for each image: /kvtier/operator/opt/operator/..., /kvtier/node/opt/node/...
FROM needs AS build
ARG SOURCE_DATE_EPOCH=0
COPY README.md LICENSE ./
COPY crds crds
COPY operator operator
COPY engine engine
COPY cli cli
RUN set -eu; \
    /build/bin/pip wheel -q --no-deps --no-index --find-links /wheels -w /wheel .; \
    for extra in operator node; do \
      /build/bin/pip --python "/opt/$extra/bin/python" install -q --no-deps --no-index --root "/kvtier/$extra" /wheel/kvtier-*.whl; \
      python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "/kvtier/$extra" "/kvtier/$extra"; \
    done; \
    find /kvtier -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

FROM base AS controller
COPY --from=needs /opt/operator /opt/operator
COPY --from=build /kvtier/operator /
ENV PATH=/opt/operator/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER 65532:65532
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "kvtier_operator"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvtier controller" \
      org.opencontainers.image.description="Reconciles KVCacheTiers; one active replica by a Lease" \
      org.opencontainers.image.source="https://kvtier.dev" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM base AS node
# mkfs.ext4, cryptsetup, dmsetup: the programs that the agent starts. All else it does by system calls.
RUN set -eu; \
    apt-get update -qq; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends cryptsetup-bin dmsetup e2fsprogs; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/ldconfig/aux-cache /var/log/*.log /var/log/apt; \
    mkdir -p -m 0755 /etc/kvtier/tiers.d
COPY --from=needs /opt/node /opt/node
COPY --from=build /kvtier/node /
ENV PATH=/opt/node/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Root: it mounts. Which capabilities are used for what: charts/kvtier/templates/node-daemonset.yaml.
USER 0:0
EXPOSE 9464
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["kvtier", "node"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvtier node agent" \
      org.opencontainers.image.description="Provisions, guards and erases the volumes of one node; its CSI node service" \
      org.opencontainers.image.source="https://kvtier.dev" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
