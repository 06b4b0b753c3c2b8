# The serving image: the wheel and its base dependencies, no torch.
# .ci/image.py runs these steps without a container engine, so RUN uses relative paths only.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY runtime runtime/
COPY export export/
COPY fed_sync fed_sync/
COPY server_api server_api/
RUN pip wheel --no-deps --wheel-dir dist . && mkdir state

FROM python:3.11-slim
WORKDIR /srv
COPY --from=build /src/dist dist/
RUN pip install --no-cache-dir dist/*.whl && rm -r dist
# Sessions outlive a container in a volume here.
COPY --from=build --chown=10001:10001 /src/state state/
ENV FEDNL_SERVE_STATE_DIR=/srv/state
VOLUME /srv/state
USER 10001:10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health/ready')"]
ENTRYPOINT ["fednl-runtime"]
CMD ["serve", "--host", "0.0.0.0"]
