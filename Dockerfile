# The image of helm/penstock: Python, Penstock and what it needs; no compiler, no cache, no root.
FROM python:3.11-slim-bookworm AS build
RUN python -m venv /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# For pip: an index of CPU builds, a mirror. What depends on it changes seldom, so it comes first.
ARG PIP_ARGS=""
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY penstock/__init__.py penstock/__init__.py
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > needed.txt \
    && pip install --no-cache-dir --no-compile --constraint constraints.txt $PIP_ARGS -r needed.txt
COPY . .
RUN pip install --no-cache-dir --no-compile --no-deps . \
    && find /opt/penstock -name '*.a' -delete

FROM python:3.11-slim-bookworm
COPY --from=build /opt/penstock /opt/penstock
RUN useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["penstock", "serve", "--host", "0.0.0.0"]
