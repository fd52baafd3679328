# Two images with the same code: `api`, which has no torch and is a tenth as large, and `worker`. docker-compose.yml builds
# both.
#     docker build --target api --tag potstill-api .
#     docker build --target worker --tag potstill-worker .          CUDA 13 comes with torch's wheel
#     docker build --target worker --tag potstill-worker \
#         --build-arg CUDA=12 .                                              CUDA 12.6: older drivers and cards
#     docker build --target worker --tag potstill-worker \
#         --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .     without CUDA: gigabytes less

FROM python:3.11-slim AS python
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv
WORKDIR /app
COPY constraints.txt ./


# Layers are ordered by how rarely they change: torch, then the other packages, and the code last.
FROM python AS api-packages
COPY pyproject.toml LICENSE README.md ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
print(*project["dependencies"], *extras["obstore"], sep="\n")' > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt
# Installs only the command `kd` and the metadata; the code is imported from /app (PYTHONPATH), where `base` puts it. The
# build wants the other files that belong to a wheel, and copies them; the image has them in /app already.
COPY docs/troubleshooting.md docs/
COPY examples/austen examples/austen
RUN pip install --no-deps --editable . && rm -r /opt/venv/lib/python3*/site-packages/services
# The image is a third smaller without what no process of it uses: debug symbols of compiled modules, the packages' own
# tests, and the installer. Modules with a `.libs` folder beside them are left alone: strip would break their alignment.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && find /opt/venv -path '*/numcodecs/*.so' -exec strip --strip-debug {} + \
    && find /opt/venv -path '*/sqlalchemy/*.so' -exec strip --strip-debug {} + \
    && find /opt/venv -type d -name tests -path '*/site-packages/*' -prune -exec rm -r {} + \
    && pip uninstall --yes setuptools pip


FROM python AS worker-packages
# CUDA of torch's build: 13 (13.0) for driver 580 and newer, or 12 (12.6) for driver 525 and newer.
ARG CUDA=13
# A second index for torch; empty = the one of CUDA. The default index has the build for CUDA 13.0.
ARG TORCH_INDEX=""
RUN case "$CUDA" in \
        13) index="$TORCH_INDEX" ;; \
        12) index="${TORCH_INDEX:-https://download.pytorch.org/whl/cu126}" ;; \
        *) echo "CUDA is '$CUDA'; expected 13 or 12" >&2; exit 1 ;; \
    esac \
    && pip install -c constraints.txt ${index:+--extra-index-url "$index"} "$(grep '^torch==' constraints.txt)"
# More extras of pyproject.toml to install, separated by commas: track, eval, quantization.
ARG EXTRAS=""
COPY pyproject.toml LICENSE README.md ./
RUN python -c 'import os, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
names = ["obstore", "worker", "gguf", *os.environ.get("EXTRAS", "").replace(",", " ").split()]; \
print(*project["dependencies"], *(each for name in names for each in extras[name]), sep="\n")' > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt
COPY docs/troubleshooting.md docs/
COPY examples/austen examples/austen
RUN pip install --no-deps --editable . && rm -r /opt/venv/lib/python3*/site-packages/services


FROM scratch AS code
COPY LICENSE README.md pyproject.toml /app/
COPY docs/troubleshooting.md /app/docs/
COPY examples /app/examples
COPY cache /app/cache
COPY kd /app/kd
COPY services /app/services


FROM python:3.11-slim AS base
LABEL org.opencontainers.image.title="potstill" \
      org.opencontainers.image.description="A knowledge-distillation service" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini reaps the children of a killed run and passes SIGTERM on. The folders belong to the user, and so does a new volume
# that is mounted at one of them.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp potstill \
    && install --directory --owner=10001 --group=10001 /data /models /secrets /keys \
    && install --directory /app/files
WORKDIR /app
# PYTHONPATH puts our packages before any other `cache` or `services` that may be installed beside them.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/models \
    KD_HOME=/data \
    KD_ROOT=/app
USER 10001:10001
VOLUME ["/data", "/models"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--"]


FROM base AS api
COPY --from=api-packages /opt/venv /opt/venv
COPY --from=code /app /app
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=3 CMD ["python", "-m", "services.process.health", "api"]
CMD ["kd", "serve", "--host", "0.0.0.0", "--port", "8000"]


FROM base AS worker
# torch.compile needs g++.
USER root
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
USER 10001:10001
COPY --from=worker-packages /opt/venv /opt/venv
COPY --from=code /app /app
# With a driver that is too old the container does not start, instead of failing its jobs. Every CUDA 12.x runs on a driver
# for 12.0, and every 13.x on one for 13.0.
ARG CUDA=13
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=${CUDA}.0"
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s --retries=4 CMD ["python", "-m", "services.process.health", "worker"]
CMD ["kd", "worker", "--queues", "precompute,train"]
