# One recipe for three images: EXTRAS says what each contains. `make image` builds all three with docker, podman or buildah.
#   kvatlas            publisher,indexer,router,gateway  every service and every query
#   kvatlas-sidecar    publisher                         the publisher, in each engine pod
#   kvatlas-simulator  simulator                         simulated engines and the demo
# Another base needs python3 (3.11 or later) with its venv module.
ARG EXTRAS=publisher,indexer,router,gateway
ARG BASE=docker.io/library/python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${BASE} AS build
WORKDIR /source
COPY locks ./locks
# pip and the tool that lists the packages stay in this stage; neither is in the environment that is copied
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir --require-hashes --requirement locks/build.txt --requirement locks/tools.txt
COPY pyproject.toml README.md LICENSE ./
COPY kvatlas ./kvatlas
COPY kvatlas_cli ./kvatlas_cli
COPY publishers ./kvatlas_publishers
COPY indexer ./kvatlas_indexer
COPY router ./kvatlas_router
COPY router_client ./router_client
COPY simulator ./kvatlas_simulator
ARG EXTRAS
# --no-build-isolation: packages without a wheel are built by the locked setuptools, not by one that pip would fetch without a hash
RUN python3 -m venv --without-pip /opt/kvatlas \
    && /opt/tools/bin/pip --python /opt/kvatlas/bin/python3 install --no-cache-dir --require-hashes \
        --requirement locks/build.txt \
    && /opt/tools/bin/pip --python /opt/kvatlas/bin/python3 install --no-cache-dir --require-hashes --no-build-isolation \
        --requirement "locks/$(echo "${EXTRAS}" | tr , -).txt" \
    && /opt/tools/bin/pip --python /opt/kvatlas/bin/python3 uninstall --yes --quiet setuptools pip \
    && /opt/tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/wheels . \
    && /opt/tools/bin/pip --python /opt/kvatlas/bin/python3 install --no-cache-dir --no-deps /opt/wheels/*.whl \
    && /opt/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/kvatlas/sbom.cdx.json /opt/kvatlas/bin/python3

FROM ${BASE}
# the base's own pip goes too: nothing in the image can install anything
RUN useradd --system --uid 10001 --user-group --no-create-home kvatlas \
    && install --directory --owner=kvatlas --group=kvatlas /var/lib/kvatlas \
    && { python3 -m pip uninstall --yes --quiet --root-user-action=ignore pip setuptools wheel 2>&1 || true; } \
    && ! python3 -c 'import pip' 2>/dev/null
COPY --from=build /opt/kvatlas /opt/kvatlas
ENV PATH=/opt/kvatlas/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/kvatlas
ENTRYPOINT ["kvatlas"]
CMD ["--help"]
ARG BASE
ARG EXTRAS
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvatlas" \
      org.opencontainers.image.description="An atlas of a fleet's KV cache (${EXTRAS})" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      com.kvatlas.extras="${EXTRAS}" \
      com.kvatlas.sbom="/opt/kvatlas/sbom.cdx.json"
