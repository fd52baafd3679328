# One image for the API and for the workers; the command decides (docker-compose.yml). CUDA comes with torch's wheel.
#     docker build -t potstill .
#     docker build -t potstill --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .     without CUDA: gigabytes less

FROM python:3.11-slim AS build
# Where to look for torch besides the default index; empty = the default index, whose build for Linux has CUDA.
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv
WORKDIR /app

# From what changes least to what changes most: torch, then the other dependencies, then this project.
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["gguf"], sep="\n")' > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt
COPY LICENSE README.md ./
# Only the command `kd` and the metadata: the code is imported from /app (PYTHONPATH), where the next stage puts it.
RUN pip install --no-deps --editable .


FROM python:3.11-slim
LABEL org.opencontainers.image.title="potstill" \
      org.opencontainers.image.description="A knowledge-distillation service" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini reaps the children of a killed run and passes SIGTERM on; g++ is what torch.compile compiles with.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp potstill \
    && install --directory --owner=10001 --group=10001 /data /models \
    && install --directory /app/files

COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY LICENSE README.md pyproject.toml ./
COPY examples ./examples
COPY cache ./cache
COPY kd ./kd
COPY services ./services

# PYTHONPATH puts our packages before any other `cache` or `services` that may ever be installed beside them.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/models \
    KD_HOME=/data \
    KD_ROOT=/app \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 10001:10001
VOLUME ["/data", "/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-m", "services.health", "api"]
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["kd", "serve", "--host", "0.0.0.0", "--port", "8000"]
