"""A server with a configuration file, the environment and flags."""

from __future__ import annotations

from pathlib import Path

from tests.serve import preloaded
from tests.serve.running_server import RunningServer

COMPLETIONS = "/v1/completions"


def test_a_server_takes_settings_from_the_file_the_environment_and_flags(
    tiny: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of clients\nfrom-file\n")
    file = tmp_path / "quire.toml"
    file.write_text(
        f'model = "{tiny}"\nserved-model-name = ["of-file", "other"]\nthreads = 1\n'
        f'[server]\nport = 1\nmax-output-tokens = 5\nunknown-fields = "refuse"\n'
        f'api-key-file = "{keys}"\n'
    )
    environment = {"QUIRE_UNKNOWN_FIELDS": "warn", "QUIRE_SERVED_NAME": "x"}
    with RunningServer(tiny, "--config", str(file), environment=environment) as server:
        assert server.get("/v1/models")[0] == 401
        keyed = {"Authorization": "Bearer from-file"}
        body = {"prompt": "a", "temprature": 1, "ignore_eos": True}
        status, headers, raw = server.request("POST", COMPLETIONS, body, **keyed)
        assert (status, headers["x-quire-ignored-fields"]) == (200, "temprature")
        assert b'"of-file"' in raw
        assert b'"completion_tokens":5' in raw.replace(b" ", b"")
        stderr = server.stderr()
        assert "did you mean QUIRE_SERVED_MODEL_NAME?" in stderr
        assert "from-file" not in stderr


def test_a_server_takes_its_model_from_the_file_and_logs_errors_in_its_format(
    tmp_path: Path,
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('model = "/no/such/model"\nlog-format = "json"\n[server]\nport = 0\n')
    done = preloaded.run("serve", QUIRE_CONFIG=str(file))
    assert done.returncode != 0
    assert "/no/such/model" in done.stderr
    assert all(line.startswith("{") for line in done.stderr.splitlines())
