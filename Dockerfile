# One image for every part: the command says which (`indexer`, `publish`, `simulate-engine`, ...).
FROM python:3.11-slim AS build
WORKDIR /source
RUN python -m venv /opt/kvatlas
COPY pyproject.toml constraints.txt ./
COPY kvatlas ./kvatlas
COPY kvatlas_cli ./kvatlas_cli
COPY publishers ./publishers
COPY indexer ./indexer
COPY router_client ./router_client
COPY simulator ./simulator
RUN /opt/kvatlas/bin/pip install --no-cache-dir --constraint constraints.txt '.[publisher,indexer,router,simulator]'

FROM python:3.11-slim
RUN useradd --system --uid 10001 --user-group --no-create-home kvatlas \
    && install --directory --owner=kvatlas --group=kvatlas /var/lib/kvatlas
COPY --from=build /opt/kvatlas /opt/kvatlas
ENV PATH=/opt/kvatlas/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/kvatlas
ENTRYPOINT ["kvatlas"]
CMD ["--help"]
