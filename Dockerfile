# Three images from one file (docs/operating.md):
#
#   docker build --target gateway -t sgl-kvc-gateway .   the gateway alone: no torch, no SGLang
#   docker build --target cpu -t sgl-kvc-cpu .           gateway and worker on the embedded model
#   docker build --target cuda -t sgl-kvc-worker .       SGLang with the plugin, for NVIDIA GPUs
#
# Base images are arguments, so that a mirror or an image of your own can stand in; both need
# Python 3.11, which the locked versions were tested with. Pin them by digest in production:
#   --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# PyTorch's wheels bring CUDA's libraries and nvcc; the driver comes from the host.
ARG CUDA_IMAGE=${PYTHON_IMAGE}

# ---------------------------------------------------------------- the gateway's libraries
FROM ${PYTHON_IMAGE} AS gateway-libraries
# Further arguments of pip, such as --index-url of a mirror.
ARG PIP_ARGS=""
COPY requirements-gateway.lock /tmp/
RUN python3 -m venv --without-pip /opt/venv \
 && python3 -m pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --only-binary :all: \
        --disable-pip-version-check ${PIP_ARGS} -r /tmp/requirements-gateway.lock

# ---------------------------------------------------------------- gateway
FROM ${PYTHON_IMAGE} AS gateway
LABEL org.opencontainers.image.title="sgl-kvc gateway" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 kvc && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kvc
COPY --from=gateway-libraries /opt/venv /opt/venv
# The spec reads scorers and apportioners as text, so that a request can be checked without torch.
COPY sgl_kvc /opt/sgl-kvc/sgl_kvc
COPY server/kvc_server /opt/sgl-kvc/kvc_server
COPY evaluation/kvc_eval /opt/sgl-kvc/kvc_eval
COPY LICENSE NOTICE /opt/sgl-kvc/
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/sgl-kvc \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-c", \
  "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/readiness'); raise SystemExit(c.getresponse().status != 200)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "kvc_server.cli"]
CMD ["serve", "--host", "0.0.0.0", "--worker-url", "http://worker:30000"]

# ---------------------------------------------------------------- what both kinds of worker have
FROM ${CUDA_IMAGE} AS worker-base
# Triton compiles a launcher for every kernel, with a C compiler, when it is first called.
# libnuma1: SGLang's kernels. Versions: those of the base image's Debian.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 kvc \
 && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/kvc kvc \
 && mkdir /models && chown 10001:10001 /models
ARG PIP_ARGS=""
# Third-party packages in a layer of their own: it stays when only our code changes. pip takes of
# the lock what is needed, and nothing of what tests and linters need.
COPY requirements.lock pyproject.toml /tmp/sgl-kvc/
COPY deploy/dependencies.py /tmp/sgl-kvc/deploy/
RUN python3 -m venv /opt/venv \
 && python3 /tmp/sgl-kvc/deploy/dependencies.py > /tmp/wanted.txt \
 && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} \
        --constraint /tmp/sgl-kvc/requirements.lock -r /tmp/wanted.txt setuptools==80.9.0 \
 && rm -rf /tmp/wanted.txt /tmp/sgl-kvc

FROM worker-base AS worker
COPY pyproject.toml README.md LICENSE NOTICE /tmp/sgl-kvc/
COPY sgl_kvc /tmp/sgl-kvc/sgl_kvc
COPY kernels /tmp/sgl-kvc/kernels
COPY server /tmp/sgl-kvc/server
COPY evaluation /tmp/sgl-kvc/evaluation
COPY models /tmp/sgl-kvc/models
RUN /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
        --no-build-isolation /tmp/sgl-kvc \
 && rm -rf /tmp/sgl-kvc \
 && ln -s "$(/opt/venv/bin/python -c 'import kvc_recall; print(kvc_recall.model_path())')" /opt/recall
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 \
    HOME=/home/kvc HF_HOME=/models/huggingface SGL_KVC_CACHE=/models/sgl-kvc
USER 10001:10001
WORKDIR /home/kvc
STOPSIGNAL SIGTERM

# ---------------------------------------------------------------- cpu: the demo, in one container
FROM worker AS cpu
LABEL org.opencontainers.image.title="sgl-kvc on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["python", "-c", \
  "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/readiness'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["sgl-kvc"]
CMD ["serve", "--host", "0.0.0.0"]

# ---------------------------------------------------------------- cuda: a worker
FROM worker AS cuda
LABEL org.opencontainers.image.title="sgl-kvc worker for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# nvcc of the locked wheels is what FlashInfer compiles with.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13
EXPOSE 30000
# SGLang's /health takes a second at least: it waits for the engine.
HEALTHCHECK --interval=30s --timeout=25s --start-period=1800s --retries=3 CMD ["python", "-c", \
  "import http.client as h; c = h.HTTPConnection('127.0.0.1', 30000, timeout=24); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["python", "-m", "sglang.launch_server"]
CMD ["--help"]
