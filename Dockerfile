# Two images of one file: `--target controller` (no root, nothing but Python) and `--target node` (with the tools that volumes need).
#
#   docker build --target controller -t REGISTRY/kvtier/controller:TAG .
#   docker build --target node       -t REGISTRY/kvtier/node:TAG .
#
# Reproducible as far as its inputs are: BASE_IMAGE by digest, DEBIAN_SNAPSHOT for the packages, constraints.txt for PyPI, and
# SOURCE_DATE_EPOCH for times. Byte code is checked by hash, not by time, and nothing of a build (caches, logs) stays.
ARG BASE_IMAGE=docker.io/library/debian:bookworm-slim

FROM ${BASE_IMAGE} AS base
# Such as 20261101T000000Z of snapshot.debian.org; empty: the mirror of today.
ARG DEBIAN_SNAPSHOT=""
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
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*.log /var/log/apt

FROM base AS build
ARG PIP_CERT
ARG SOURCE_DATE_EPOCH=0
RUN set -eu; \
    if ! python3 -c 'import ensurepip' 2>/dev/null; then \
      apt-get update -qq; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
    fi
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY crds crds
COPY operator operator
COPY engine engine
COPY cli cli
# The build's own tools too come in the versions of constraints.txt.
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_COMPILE=1 \
    PYTHONHASHSEED=0 \
    SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH}
RUN set -eu; \
    python3 -m venv /build; \
    /build/bin/pip wheel -q --no-deps -w /wheel .; \
    for extra in operator node; do \
      python3 -m venv --without-pip "/opt/$extra"; \
      /build/bin/pip --python "/opt/$extra/bin/python" install -q "$(ls /wheel/kvtier-*.whl)[$extra]"; \
      "/opt/$extra/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "/opt/$extra/lib"; \
    done; \
    find /opt -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

FROM base AS controller
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvtier controller" \
      org.opencontainers.image.description="Reconciles KVCacheTiers; one active replica by a Lease" \
      org.opencontainers.image.source="https://kvtier.dev" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/operator /opt/operator
ENV PATH=/opt/operator/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER 65532:65532
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "kvtier_operator"]

FROM base AS node
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvtier node agent" \
      org.opencontainers.image.description="Provisions, guards and erases the volumes of one node; its CSI node service" \
      org.opencontainers.image.source="https://kvtier.dev" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# mkfs.ext4, cryptsetup, dmsetup: the programs that the agent starts. All else it does by system calls.
RUN set -eu; \
    apt-get update -qq; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends cryptsetup-bin dmsetup e2fsprogs; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*.log /var/log/apt; \
    mkdir -p -m 0755 /etc/kvtier/tiers.d
COPY --from=build /opt/node /opt/node
ENV PATH=/opt/node/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Root: it mounts. Which capabilities are used for what: charts/kvtier/templates/node-daemonset.yaml.
USER 0:0
EXPOSE 9464
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=4 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["kvtier", "node"]
