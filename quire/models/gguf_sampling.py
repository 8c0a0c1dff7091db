"""The sampling that a GGUF file recommends (`general.sampling.*`), as defaults of SamplingParams.

What llama.cpp does with these entries: mirostat replaces the filters and the penalties, and a
sequence switches off the steps that it leaves out. Knows nothing of requests. Always holds: an
entry is a default, has no effect by its nature, or is refused by name.
Source: common_init_sampler_from_model in common.cpp (ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.sampling_checks import SAMPLERS, SMALLEST_TEMPERATURE
from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.gguf_values import plain_values

SAMPLING = "general.sampling."
Defaults = dict[str, float | int | tuple[str, ...]]

_NUMBERS = (
    ("temp", "temperature", 0.0, 100.0),
    ("top_p", "top_p", 1e-9, 1.0),
    ("min_p", "min_p", 0.0, 1.0),
    ("xtc_probability", "xtc_probability", 0.0, 1.0),
    ("xtc_threshold", "xtc_threshold", 0.0, 1.0),
    ("penalty_repeat", "repetition_penalty", 0.01, 100.0),
    ("mirostat_tau", "mirostat_tau", 0.0, 100.0),
    ("mirostat_eta", "mirostat_eta", 0.0, 10.0),
)
_MOST = 2**31 - 1
_WHOLE_NUMBERS = (
    ("top_k", "top_k", -1, _MOST),
    ("penalty_last_n", "repeat_last_n", -1, _MOST),
    ("mirostat", "mirostat", 0, 2),
)
_PENALTIES = "penalties"
# Names of steps in a sequence, in which hyphens are underscores. Those without one of ours are
# switched on by no entry.
_STEPS: Mapping[str, str] = {
    **{name: name for name in ("top_k", "top_p", "min_p", "top_n_sigma", "xtc", "temperature")},
    **{"temp": "temperature", "nucleus": "top_p"},
    **dict.fromkeys(("typ_p", "typ", "typical_p", "typical"), "typical_p"),
    **{_PENALTIES: _PENALTIES, "dry": "", "adaptive_p": ""},
}
_MIROSTAT = frozenset({"temperature", "mirostat", "mirostat_tau", "mirostat_eta"})
_NO_NOISE = ("mirostat", "mirostat_tau", "mirostat_eta", "xtc_probability", "xtc_threshold")


def read_sampling(metadata: Mapping[str, Any], where: str) -> Defaults:
    """Return what a request that leaves it open gets, by SamplingParams' names. Raises
    ConfigError."""
    config = ConfigReader(plain_values(metadata, SAMPLING), where=f"{where}: {SAMPLING}*")
    defaults: Defaults = {}
    for key, name, low, high in _NUMBERS:
        if config.has(key):
            defaults[name] = config.number(key, low, high)
    for key, name, least, most in _WHOLE_NUMBERS:
        if config.has(key):
            defaults[name] = config.whole(key, least, most)
    steps = _sequence(config)
    if defaults.get("mirostat"):
        defaults = {name: value for name, value in defaults.items() if name in _MIROSTAT}
    elif steps:
        defaults = _in_order(config, steps, defaults)
    if not defaults.get("mirostat"):
        defaults = {name: value for name, value in defaults.items() if "mirostat" not in name}
    temperature = defaults.get("temperature")
    if isinstance(temperature, float) and temperature < SMALLEST_TEMPERATURE:
        defaults = {name: value for name, value in defaults.items() if name not in _NO_NOISE}
    config.finish()
    return defaults


def _sequence(config: ConfigReader) -> list[str]:
    """Return the steps of `sequence`, by our names; a problem is noted."""
    text = config.take("sequence")
    if text is None or text == "":
        return []
    names = text.split(";") if isinstance(text, str) else []
    steps = [_STEPS.get(name.strip().lower().replace("-", "_")) for name in names]
    known = [step for step in steps if step is not None]
    on = [step for step in known if step]
    if not names or len(known) < len(steps) or len(set(on)) < len(on):
        config.note(
            f"sequence is {show(text)}; names of steps with ; between them are allowed, each once: "
            f"{', '.join(_STEPS)}"
        )
        return []
    return on


def _in_order(config: ConfigReader, steps: list[str], defaults: Defaults) -> Defaults:
    """Return the defaults of steps in a sequence, and their order."""
    filters = [step for step in steps if step != _PENALTIES]
    penalty = defaults.get("repetition_penalty", 1.0)
    if _PENALTIES in steps[1:] and penalty != 1.0:
        config.note(
            f"sequence has {_PENALTIES} after {steps[0]}, and penalty_repeat is {show(penalty)}; "
            "penalties come before the filters here: take the model with another sequence, or "
            "without one",
        )
    off = {field for step, field in SAMPLERS.items() if step not in filters}
    off |= {"xtc_threshold"} if "xtc_probability" in off else set()
    off |= set() if _PENALTIES in steps else {"repetition_penalty", "repeat_last_n"}
    kept = {name: value for name, value in defaults.items() if name not in off}
    return {**kept, "samplers": tuple(filters)} if filters else kept
