# syntax=docker/dockerfile:1
# jaxtrain in a container (docs/container.md):  docker build --build-arg EXTRA=cuda12 --tag jaxtrain .
# EXTRA is empty for the CPU, or cuda12 or cuda13 for NVIDIA GPUs. CUDA libraries are installed with the Python packages;
# the host provides the driver. constraints.txt pins the versions.

FROM python:3.11-slim-bookworm AS build
ARG EXTRA=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/source/constraints.txt
RUN case "$EXTRA" in ""|cuda12|cuda13) ;; *) echo "EXTRA must be empty, cuda12 or cuda13, got $EXTRA"; exit 2 ;; esac
RUN python -m venv /opt/jaxtrain
ENV PATH=/opt/jaxtrain/bin:$PATH
WORKDIR /source
COPY constraints.txt pyproject.toml README.md ./
COPY jaxtrain jaxtrain
COPY parity parity
COPY benchmarks benchmarks
# constraints.txt pins the versions.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip pip install ".[recipes${EXTRA:+,$EXTRA}]" tensorboard

FROM build AS build-notebook
ARG JUPYTERLAB=4.6.6
RUN --mount=type=cache,target=/root/.cache/pip pip install "jupyterlab==$JUPYTERLAB"

FROM python:3.11-slim-bookworm AS base
# To let a user of the host own the volumes: docker build --build-arg UID=$(id -u) --build-arg GID=$(id -g)
ARG UID=1000 GID=1000
RUN groupadd --gid "$GID" jaxtrain \
    && useradd --uid "$UID" --gid "$GID" --create-home jaxtrain \
    && install --directory --owner jaxtrain --group jaxtrain /training /training/runs /cache
ENV PATH=/opt/jaxtrain/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, because Kubernetes cannot verify that a named user is not root.
USER ${UID}:${GID}
WORKDIR /training
# A new volume inherits the owner of the folder at its mount point.
VOLUME ["/training/runs", "/cache"]

FROM base AS notebook
COPY --from=build-notebook /opt/jaxtrain /opt/jaxtrain
EXPOSE 8888
# JUPYTER_TOKEN is read by jupyter_server, which would generate and print a token if it is unset, and require none if it is
# empty.
ENTRYPOINT ["sh", "-c", ": \"${JUPYTER_TOKEN:?set JUPYTER_TOKEN}\" && exec jupyter lab --ip=0.0.0.0 --no-browser \"$@\"", "jupyter"]

FROM base AS train
COPY --from=build /opt/jaxtrain /opt/jaxtrain
ENTRYPOINT ["jaxtrain"]
CMD ["--help"]
