# Two images from one file: `service` (registry, no torch) and `worker` (validation and serving).
FROM python:3.11.14-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/registry
COPY constraints.txt ./
RUN /opt/registry/bin/pip install --constraint constraints.txt pip hatchling
COPY pyproject.toml README.md ./
COPY registry_service registry_service
COPY gpu_worker gpu_worker
COPY cli cli
COPY schemas schemas
COPY migrations migrations
RUN /opt/registry/bin/pip install --constraint constraints.txt --no-build-isolation .

FROM build AS build-worker
RUN /opt/registry/bin/pip install --constraint constraints.txt torch==2.13.0
RUN /opt/registry/bin/pip install --constraint constraints.txt --no-build-isolation '.[worker]'

FROM python:3.11.14-slim-bookworm AS runtime
ENV PATH=/opt/registry/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --uid 10001 --user-group --home-dir /nonexistent --no-create-home registry \
    && mkdir -p /var/lib/registry/blobs /var/lib/registry/keys /var/lib/registry/store \
                /var/lib/registry/scratch \
    && chown -R registry:registry /var/lib/registry \
    && chmod -R 0700 /var/lib/registry
WORKDIR /

FROM runtime AS service
COPY --from=build /opt/registry /opt/registry
USER 10001:10001
EXPOSE 8400
CMD ["python", "-m", "registry_service", "serve"]

FROM runtime AS worker
COPY --from=build-worker /opt/registry /opt/registry
USER 10001:10001
EXPOSE 8500
CMD ["python", "-m", "gpu_worker.serving", "--help"]
