"""Settings from a configuration file and the environment, each with its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from quire.base.errors import SettingError
from quire.config.admin_keys import read_api_keys
from quire.config.config_file import read_config_file, write_config
from quire.config.environment import read_environment
from quire.config.flags import flag_of
from quire.config.foreign_variables import INSTEAD, unread_variables
from quire.config.sources import SETTINGS, Setting, Source, Sourced, merged, with_sources
from tests.cases import each_case

EVERY = list(SETTINGS.values())


def _example(setting: Setting) -> Any:
    """Return a value of the setting's type that is not its default."""
    kind = setting.kind
    if kind is bool:
        return not setting.field.default
    if get_origin(kind) is Literal:
        return next(one for one in get_args(kind) if one != setting.field.default)
    if get_origin(kind) is tuple:
        return (
            ("one", 'two "quoted" \\ \t\x7f') if setting.is_secret else ("one", "t\u00f6\U0001f600")
        )
    return {int: 12345, float: 2.5, str: 'a "b" \\ \x01\x7f = # c\n'}[kind]


def _file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "quire.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def _values(folder: Path, text: str) -> dict[str, Any]:
    values, _ = read_config_file(_file(folder, text))
    return {name: sourced.value for name, sourced in values.items()}


@pytest.mark.parametrize("value_of", [lambda one: one.field.default, _example])
def test_all_settings_are_written_to_a_file_and_read_back(
    value_of: Callable[[Setting], Any], tmp_path: Path
) -> None:
    source = Source(kind="flag", place="--x\n[y]")
    values = {one.name: Sourced(value=value_of(one), source=source) for one in EVERY}
    text = write_config(values)
    hidden = {one.name for one in EVERY if one.is_secret and values[one.name].value}
    assert _values(tmp_path, text) == {
        name: one.value
        for name, one in values.items()
        if one.value is not None and name not in hidden
    }
    assert all(f"# {SETTINGS[name].key}: (set)  # --x?[y]" in text for name in hidden)
    assert "quoted" not in text


@each_case("setting", EVERY, ids=lambda setting: setting.key)
def test_every_setting_has_a_variable(setting: Setting) -> None:
    value = _example(setting)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, tuple):
        value, text = (value[:1], value[0]) if setting.is_secret else (value, ",".join(value))
    values, warnings = read_environment({setting.variable: text, "PATH": "x"})
    assert values == {
        setting.name: Sourced(
            value=value, source=Source(kind="environment", place=setting.variable)
        )
    }
    assert warnings == []


@each_case("setting", EVERY, ids=lambda setting: setting.key)
def test_a_value_of_a_wrong_type_is_rejected_in_a_file(setting: Setting, tmp_path: Path) -> None:
    path = _file(tmp_path, f"\n{setting.key} = 1979-05-27\n")
    with pytest.raises(SettingError) as caught:
        read_config_file(path)
    shown = "(set)" if setting.is_secret else "datetime.date(1979, 5, 27)"
    assert str(caught.value) == f"{path}:2: {setting.key} is {shown}; {setting.allowed} is expected"


@each_case(
    "setting",
    [one for one in EVERY if one.kind not in (str,) and get_origin(one.kind) is not tuple],
    ids=lambda setting: setting.key,
)
def test_an_invalid_variable_is_rejected_with_its_name(setting: Setting) -> None:
    with pytest.raises(SettingError) as caught:
        read_environment({setting.variable: "many"})
    where = f"{setting.variable} ({flag_of(setting.field)})"
    assert str(caught.value) == f"{where} is 'many'; {setting.allowed} is expected"


def test_keys_may_stand_at_the_top_or_in_a_table_with_dashes_or_underscores(tmp_path: Path) -> None:
    text = (
        'model = "m"\nmax_num_seqs = 3\nscheduler.policy-aging = 2\nexecutor = "torch"\n'
        '[cache]\nkv-cache-memory = "2GiB"\n[server]\napi_key = "k"\n'
    )
    values, warnings = read_config_file(_file(tmp_path, text))
    assert {name: one.value for name, one in values.items()} == {
        "model": "m",
        "max_num_seqs": 3,
        "policy_aging": 2.0,
        "executor": "torch",
        "kv_cache_memory_bytes": 2**31,
        "api_key": ("k",),
    }
    lines = [one.source.place.rpartition(":")[2] for one in values.values()]
    assert lines == ["1", "2", "3", "4", "6", "8"]
    assert warnings == []


@each_case(
    ("text", "told"),
    [
        ("\nmax-num-seq = 3", ":2: max-num-seq is not a setting; did you mean max-num-seqs?"),
        ("kv-cache-memory-bytes = 3", ":1: kv-cache-memory-bytes is not a setting; the KV cache's"),
        ("tp-size = 2", ":1: tp-size is not a setting; the degree of tensor parallelism is"),
        ("spec_ngram_mod_n_match = 2", ":1: spec_ngram_mod_n_match is not a setting; prompt loo"),
        ("cache-type-k-draft = 1", ":1: cache-type-k-draft is not a setting; a draft model is"),
        ("threads-draft = 1", ":1: threads-draft is not a setting; a draft model is computed"),
        ('speculate = "eagle3"', "medusa, eagle is expected; write eagle"),
        ("zzz = 1", ":1: zzz is not a setting; quire config show lists"),
        ("[schedular]\nport = 1", ": there is no table [schedular]; did you mean [scheduler]?"),
        ("\n[zzz]", ":2: there is no table [zzz]; there are: server, model"),
        ("[cache]\nport = 1", ":2: port is in the table [cache], but belongs in [server]"),
        ("port = 1\n[server]\nport = 2", ":3: port is already set at"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", ":2: max_num_seqs is already set at"),
        ("port = 1\nport = 2", "not valid TOML: Cannot overwrite a value (at line 2"),
        ("port = ", "not valid TOML: Invalid value (at line 1"),
        ('port = "80"', ":1: port is '80'; a whole number from 0 to 65535 is"),
        ("port = true", ":1: port is True; a whole number from 0 to 65535 is"),
        ("insecure = 1", ":1: insecure is 1; true or false is expected"),
        ("cors-origin = [1]", ":1: cors-origin is [1]; a string or a list of strings is expected"),
        ('dtype = "f64"', ":1: dtype is 'f64'; one of auto, f32, bf16, float32, bfloat16 is"),
        ('max-body = "lots"', ":1: max-body is 'lots'; a size in bytes"),
        ("api-key = [98765]", ":1: api-key is (set); a string or a list"),
        ("server = {max-num-seqs = 3}", ": max-num-seqs is in the table [server], but belongs"),
        ('root-path = """\nport = 3\n"""\nport = "x"', ":4: port is 'x'"),
    ],
)
def test_an_invalid_file_is_rejected_with_the_line(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        read_config_file(_file(tmp_path, text))
    assert told in str(caught.value)
    assert "98765" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="No such file"):
        read_config_file(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(SettingError, match="not UTF-8"):
        read_config_file(str(tmp_path / "binary"))
    (tmp_path / "large").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(SettingError, match="more than 1048576 bytes"):
        read_config_file(str(tmp_path / "large"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o600])
def test_a_secret_in_a_file_of_others_warns(mode: int, tmp_path: Path) -> None:
    _, warnings = read_config_file(_file(tmp_path, '\napi-key = "hidden"', mode))
    assert len(warnings) == (mode != 0o600)
    assert all(":2: api-key is a secret" in one and "hidden" not in one for one in warnings)
    assert read_config_file(_file(tmp_path, "port = 1", mode))[1] == []


def test_unknown_variables_warn_with_the_nearest_one() -> None:
    values, warnings = read_environment(
        {
            "QUIRE_MAX_NUM_SEQ": "3",
            "QUIRE_ISA": "avx2",
            "QUIRE_CONFIG": "f",
            "QUIRE_EXACT_CASES": "1",
        }
    )
    assert values == {}
    [warning] = warnings
    assert "QUIRE_MAX_NUM_SEQ is not known" in warning
    assert "did you mean QUIRE_MAX_NUM_SEQS?" in warning


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    values, warnings = read_environment(
        {
            "QUIRE_PORT": "tcp://10.0.0.1:8000",
            "QUIRE_SERVICE_HOST": "10.0.0.1",
            "QUIRE_SERVICE_PORT_HTTP": "8000",
            "QUIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
        }
    )
    assert values == {}
    [warning] = warnings
    assert "QUIRE_PORT=tcp://10.0.0.1:8000 is ignored" in warning


def test_words_of_booleans_and_empty_variables() -> None:
    for text, value in (("1", True), ("Yes", True), ("off", False), ("FALSE", False)):
        values, _ = read_environment({"QUIRE_INSECURE": text, "QUIRE_PORT": ""})
        assert {name: one.value for name, one in values.items()} == {"insecure": value}


def test_flags_override_the_environment_and_that_the_file() -> None:
    def given(kind: Any, value: int, *names: str) -> dict[str, Sourced]:
        source = Source(kind=kind, place=kind)
        return {name: Sourced(value=value, source=source) for name in names}

    file = given("file", 1, "port", "max_num_seqs", "block_size")
    environment = given("environment", 2, "port", "max_num_seqs")
    values = merged({"port": 3}, environment, file)
    found = {name: (one.value, str(one.source)) for name, one in values.items()}
    assert found == {
        "port": (3, "--port"),
        "max_num_seqs": (2, "environment"),
        "block_size": (1, "file"),
    }


def test_an_error_names_the_place_of_a_value() -> None:
    values = {
        "port": Sourced(value=0, source=Source(kind="file", place=r"q\1.toml:3")),
        "host": Sourced(value="", source=Source(kind="flag", place="--host")),
    }
    text = with_sources("--port is 0, --port, --admin-port, --host", values)
    assert text == r"--port (q\1.toml:3) is 0, --port, --admin-port, --host"


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n one \ntwo\n")
    assert read_api_keys(str(path)) == ("one", "two")
    assert read_api_keys(None) == ()
    path.write_text("one\nsha256:00\n")
    with pytest.raises(SettingError, match="line 2 begins with sha256:"):
        read_api_keys(str(path))
    path.write_text("\n")
    with pytest.raises(SettingError, match="has no key; write one per line"):
        read_api_keys(str(path))


@each_case("variable", INSTEAD)
def test_a_variable_of_another_engine_is_answered_by_what_is_read_here(variable: str) -> None:
    said = unread_variables({variable: "a secret"}, ())
    assert f"are set and not read: {variable} (set " in said
    assert "secret" not in said
    for name in INSTEAD[variable]:
        assert (name if name == "HF_HOME" else SETTINGS[name].variable) in said
    assert not unread_variables({variable: "x", "HF_HOME": "y"}, INSTEAD[variable])


@pytest.mark.parametrize("flag", ["TYPE", "DRAFT_MODEL", "DRAFT_HF_REPO", "DRAFT_N_MAX"])
def test_later_names_of_variables_for_drafts_are_known(flag: str) -> None:
    variable = f"LLAMA_ARG_SPEC_{flag}"
    assert f"{variable} (set QUIRE_" in unread_variables({variable: "x"}, ())


def test_variables_of_other_engines_are_one_warning() -> None:
    environment = {
        "OLLAMA_HOST": "0.0.0.0:11434",
        "VLLM_API_KEY": "k",
        "VLLM_PORT": "",
        "HOME": "x",
    }
    assert unread_variables(environment, ()) == (
        "variables of other programs are set and not read: OLLAMA_HOST (set QUIRE_HOST and "
        "QUIRE_PORT), VLLM_API_KEY (set QUIRE_API_KEY); quire config show --env lists those that "
        "are"
    )
    assert "OLLAMA_HOST (set QUIRE_HOST), " in unread_variables(environment, {"port"})
    assert not unread_variables({"VLLM_PORT": "tcp://10.0.0.1:8000", "HOME": "x"}, ())
