# CPU:   docker build -t skyrl-tx .
# CUDA:  docker build -t skyrl-tx --build-arg EXTRA=cuda12 .
# Serve: docker run -v skyrl-tx:/data -p 127.0.0.1:8000:8000 skyrl-tx --base-model Qwen/Qwen3-0.6B
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# "cuda12", "cuda13" or "tpu"; empty: CPU. JAX's CUDA wheels contain the CUDA libraries, so the host needs only a driver.
ARG EXTRA=""

RUN useradd --create-home --uid 1000 skyrl && install --directory --owner=skyrl --mode=0700 /data
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY skyrl_tx ./skyrl_tx
RUN pip install --no-cache-dir ".[postgres${EXTRA:+,$EXTRA}]"

USER skyrl
WORKDIR /home/skyrl
VOLUME /data
EXPOSE 8000
ENV SKYRL_TX_DATA_DIR=/data
# For plain HTTP. With TLS, give `docker run` another --health-cmd or --no-healthcheck. Loading a large model takes minutes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/api/v1/healthz', timeout=8)"]
# Clients of a container never connect through its loopback; the published port decides who can reach the server. Arguments to
# `docker run` replace the default ones, --no-auth included. Create keys with `docker run --entrypoint skyrl-tx … keys create OWNER`.
ENTRYPOINT ["skyrl-tx", "serve", "--host", "0.0.0.0"]
CMD ["--base-model", "tiny", "--no-auth"]
