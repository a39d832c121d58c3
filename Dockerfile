# CPU:   docker build -t skyrl-tx .
# CUDA:  docker build -t skyrl-tx --build-arg EXTRA=cuda12 .
# Serve: docker run -v skyrl-tx:/data -v skyrl-tx-cache:/cache -p 127.0.0.1:8000:8000 skyrl-tx --base-model Qwen/Qwen3-0.6B
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# "cuda12", "cuda13" or "tpu"; empty: CPU. JAX's CUDA wheels contain the CUDA libraries, so the host needs only a driver.
ARG EXTRA=""

LABEL org.opencontainers.image.title="skyrl_tx" \
      org.opencontainers.image.description="A self-hosted server of the Tinker training API" \
      org.opencontainers.image.source="https://github.com/skyrl-tx/skyrl_tx" \
      org.opencontainers.image.licenses="Apache-2.0 AND MIT AND 0BSD"

RUN useradd --create-home --uid 1000 skyrl && install --directory --owner=skyrl --mode=0700 /data /cache
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY skyrl_tx ./skyrl_tx
COPY deploy/container-start.sh /usr/local/bin/
RUN pip install --no-cache-dir --constraint constraints.txt ".[postgres,storage${EXTRA:+,$EXTRA}]"

USER skyrl
WORKDIR /home/skyrl
# The server writes only to /data, /cache and /tmp, so the root file system may be read-only:
# `docker run --read-only --tmpfs /tmp`. /cache has downloaded models and compiled programs and can be deleted safely.
VOLUME /data /cache
EXPOSE 8000
ENV SKYRL_TX_DATA_DIR=/data
ENV XDG_CACHE_HOME=/cache
# Checks that the API answers, over plain HTTP. `healthz` would also check that the engine is ready. With TLS, give `docker run`
# another --health-cmd or --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/api/v1/livez', timeout=8)"]
# Clients never connect through the loopback of the container, so the published port decides who can reach the server.
# Arguments of `docker run` replace CMD. The first start creates an admin key and prints it once, unless they contain
# --no-auth. Create more keys with `docker exec CONTAINER skyrl-tx keys create OWNER`.
ENTRYPOINT ["container-start.sh"]
CMD ["--base-model", "tiny"]
