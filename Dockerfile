# syntax=docker/dockerfile:1
# The images of helm/penstock.
#   router: a router, Ray and the command line; no torch, no compiler
#   cuda:   everything; with a C compiler, which Triton needs, and compiled kernels (the default)
# BASE is an image of Python 3.11 on Debian for x86-64. It must have a digest, so that builds can be
# repeated:
#   docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
#   docker build --build-arg BASE=python:3.11-slim-bookworm@sha256:... --target cuda .
ARG BASE

FROM ${BASE} AS base
ARG BASE
RUN case "$BASE" in *@sha256:*) ;; *) echo "BASE has no digest: $BASE" >&2; exit 1 ;; esac

# The tools of the build, and the wheel of Penstock. No image contains files of this stage.
FROM base AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY locks locks
RUN python -m venv /opt/tools \
    && /opt/tools/bin/pip install --require-hashes --only-binary :all: --requirement locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY cluster cluster
COPY kernels kernels
COPY loadtests loadtests
COPY protos protos
COPY router router
COPY workers workers
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels .

# pip installs packages from a lock, with hashes. Modules are compiled here, because the root file
# system of a pod is read-only.
FROM tools AS router-packages
RUN python -m venv --without-pip /opt/penstock \
    && /opt/tools/bin/pip --python /opt/penstock install --no-compile --require-hashes \
       --only-binary :all: --requirement locks/router.txt
RUN /opt/tools/bin/pip --python /opt/penstock install --no-compile --no-deps --no-index /wheels/*.whl \
    && /opt/penstock/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/penstock/lib \
    && mkdir -p /opt/penstock/share/penstock \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible \
       --output-file /opt/penstock/share/penstock/sbom.cdx.json /opt/penstock/bin/python

FROM tools AS cuda-packages
RUN python -m venv --without-pip /opt/penstock \
    && /opt/tools/bin/pip --python /opt/penstock install --no-compile --require-hashes \
       --only-binary :all: --requirement locks/cuda.txt
# torch contains a module in the syntax of Python 3.12, which Python 3.11 cannot compile.
RUN /opt/tools/bin/pip --python /opt/penstock install --no-compile --no-deps --no-index /wheels/*.whl \
    && /opt/penstock/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
       -x '/py312_intrinsics[.]py$' /opt/penstock/lib \
    && mkdir -p /opt/penstock/share/penstock \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible \
       --output-file /opt/penstock/share/penstock/sbom.cdx.json /opt/penstock/bin/python
# Compiles kernels of the bundled model, of an 8B Llama and of gpt-oss for sm_80, 89, 90 and 100.
COPY tests tests
RUN /opt/penstock/bin/python -m tests.aot.seed /opt/penstock/share/penstock/kernels

FROM base AS router
RUN useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin penstock
COPY --from=router-packages /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["penstock", "--help"]

FROM base AS cuda
# Triton compiles a module in C when it first meets a GPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin penstock
COPY --from=cuda-packages /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
# Fails the build if the compiler or a header is missing; the folder is not kept.
RUN TRITON_CACHE_DIR=/tmp/stub python -m penstock.kernels.triton_common.check_compiler && rm -r /tmp/stub
ENTRYPOINT []
# Without API keys this refuses to start: set PENSTOCK_API_KEY, or add --allow-anonymous.
CMD ["penstock", "serve", "--host", "0.0.0.0"]
