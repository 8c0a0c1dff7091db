"""How the vectors of an embedding model are made: what its sentence-transformers files say.

Read are modules.json, the pooling module's config.json, config_sentence_transformers.json and
sentence_bert_config.json, and from config.json the keys that vLLM reads: is_matryoshka,
matryoshka_dimensions and classifier_from_token. Anything in them that would change a vector and is
not supported is a ConfigError with the file. Knows no program. Always holds: no path of
modules.json leaves the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.gguf_model import find_gguf
from quire.base.regular_file import is_present, read_regular
from quire.base.show import show
from quire.base.strict_json import parse_object
from quire.models.config_reader import MAX_CONFIG_BYTES, ConfigReader, load_config

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
# Pooling modes of sentence-transformers that are computed, by the keys of their older files.
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_NAMED_MODES = {"lasttoken": "last", "mean": "mean"}
_OTHER_MODES = (
    "pooling_mode_cls_token",
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_ALLOWED = "lasttoken and mean are computed"
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_PROMPTS = 256
# Kinds of models that judge by a known prompt (quire/api/embeddings/scores.py).
JUDGES = ("qwen3",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """How a prompt's final hidden rows become a vector, and what texts begin with.

    pooling: "last" or "mean". normalizes: vectors have length 1. size: of a vector. dimensions: the
    shorter vectors that requests may ask for; empty: none, unless any_dimensions. prompts: texts
    that precede inputs, by name; default_prompt: the name of the one that inputs get unless a
    request says otherwise. similarity: "cosine" or "dot". judges: the tokens for a document that
    does not answer a query, and for one that does, of a model that is asked which ("no", "yes").
    embeds: False for a model that only judges.
    """

    pooling: str
    normalizes: bool
    size: int
    any_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    judges: tuple[str, str] | None = None
    embeds: bool = True


def plain_pooling(size: int) -> PoolingSpec:
    """Return what a model without such files gets: its last token's row, normalized."""
    return PoolingSpec(pooling="last", normalizes=True, size=size)


def read_pooling(folder: Path, size: int) -> PoolingSpec | None:
    """Return what the files of a model folder say; None where there are none.

    size: the width of the model's hidden rows. Raises ConfigError.
    """
    if find_gguf(folder) is not None:
        return None
    values = load_config(folder / "config.json")
    judges = _judges(values, folder / "config.json")
    if not is_present(folder / MODULES):
        return None if judges is None else replace(plain_pooling(size), judges=judges, embeds=False)
    if values.get("auto_map") is not None:
        raise ConfigError(
            f"{folder / 'config.json'}: auto_map is {show(values['auto_map'])} and {MODULES} makes "
            "it an embedding model: its own code may attend in both directions, and is never run; "
            "remove auto_map if the model is a plain one, or turn embeddings off (--convert none)"
        )
    pooling_path, normalizes = _read_modules(folder)
    pooling = _read_mode(folder / pooling_path / "config.json", size)
    any_dimensions, dimensions = _matryoshka(values, size, folder / "config.json")
    prompts, default_prompt, similarity = _read_prompts(folder / PROMPTS)
    _check_limits(folder / LIMITS)
    return PoolingSpec(
        pooling=pooling,
        normalizes=normalizes,
        size=size,
        any_dimensions=any_dimensions,
        dimensions=dimensions,
        prompts=prompts,
        default_prompt=default_prompt,
        similarity=similarity,
        judges=judges,
    )


def _read_modules(folder: Path) -> tuple[str, bool]:
    """Return the directory of the pooling module, and whether a module normalizes."""
    where = folder / MODULES
    try:
        raw = read_regular(where, limit_bytes=MAX_CONFIG_BYTES)
        document = parse_object(b'{"modules":' + raw + b"}", limit_bytes=MAX_CONFIG_BYTES + 32)
        modules = document["modules"] if len(document) == 1 else document
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; copy or download it again") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigError(f"{where}: it is {show(modules)}; a list of modules is expected")
    kinds = [_kind(module, where) for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{where}: the modules are {show(kinds)}; Transformer and Pooling, and perhaps "
            "Normalize after them, are computed"
        )
    if modules[0].get("path", "") != "":
        raise ConfigError(
            f"{where}: the Transformer's path is {show(modules[0]['path'])}; the weights must lie "
            'in the folder itself ("")'
        )
    path = modules[1].get("path")
    if not isinstance(path, str) or not _FOLDER.fullmatch(path):
        raise ConfigError(
            f"{where}: the Pooling's path is {show(path)}; the name of a directory in the folder "
            "is needed, such as 1_Pooling"
        )
    return path, len(kinds) == 3


def _kind(module: Mapping[str, Any], where: Path) -> str:
    kind = module.get("type")
    if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
        raise ConfigError(
            f"{where}: a module has the type {show(kind)}; modules of sentence_transformers are "
            "computed, and code that comes with a model is never run"
        )
    return kind.rsplit(".", 1)[-1]


def _read_mode(where: Path, size: int) -> str:
    """Return "last" or "mean"."""
    config = ConfigReader(load_config(where), where=str(where))
    key = "embedding_dimension" if config.has("embedding_dimension") else "word_embedding_dimension"
    config.require(key, (size,), f"the model's rows have {size} columns")
    config.pass_over(("word_embedding_dimension", "embedding_dimension"))
    chosen = []
    for name, mode in _MODES.items():
        if config.flag(name, default=False):
            chosen.append(mode)
    named = config.take("pooling_mode")
    if named is not None:
        if named in list(_NAMED_MODES):
            chosen.append(_NAMED_MODES[named])
        else:
            config.note(f"pooling_mode is {show(named)}; {_ALLOWED}")
    others = [name for name in _OTHER_MODES if config.flag(name, default=False)]
    for name in others:
        config.note(f"{name} is true; {_ALLOWED}")
    if len(chosen) != 1 and not config.problems:
        config.note(f"{len(chosen)} pooling modes are on; one must be: {_ALLOWED}")
    if not config.flag("include_prompt", default=True) and chosen == ["mean"]:
        config.note(
            "include_prompt is false: a mean without the rows of the instruction is not computed"
        )
    config.finish()
    return chosen[0]


def _read_prompts(where: Path) -> tuple[dict[str, str], str | None, str]:
    """Return the prompts by name, the name of the default one, and the similarity."""
    if not is_present(where):
        return {}, None, "cosine"
    config = ConfigReader(load_config(where), where=str(where))
    config.pass_over(("__version__",))
    config.require("model_type", ("SentenceTransformer",), "SentenceTransformer is computed")
    prompts = config.take("prompts")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or len(prompts) > _MAX_PROMPTS:
        config.note(f"prompts is {show(prompts)}; an object of at most {_MAX_PROMPTS} texts")
        prompts = {}
    for name, text in prompts.items():
        if not isinstance(text, str):
            config.note(f"prompts has {show(name)}: {show(text)}; a text is allowed")
    default = config.take("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        config.note(
            f"default_prompt_name is {show(default)}; one of the prompts is allowed: "
            + (", ".join(map(show, prompts)) or "there are none")
        )
    similarity = config.choice(
        "similarity_fn_name", {"cosine": "cosine", "dot": "dot"}, default="cosine"
    )
    config.finish()
    return dict(prompts), default, similarity


def _check_limits(where: Path) -> None:
    """Refuse texts in lower case; max_seq_length is passed over, since inputs are never cut here
    unless a request says so."""
    if not is_present(where):
        return
    config = ConfigReader(load_config(where), where=str(where))
    config.require("do_lower_case", (False,), "texts are not made lower case")
    config.pass_over_all()
    config.finish()


def _matryoshka(values: Mapping[str, Any], size: int, where: Path) -> tuple[bool, tuple[int, ...]]:
    """Return whether any shorter vector is allowed, and which ones are."""
    listed = values.get("matryoshka_dimensions")
    is_any = values.get("is_matryoshka")
    if is_any not in (None, True, False):
        raise ConfigError(f"{where}: is_matryoshka is {show(is_any)}; true or false is allowed")
    if listed is None:
        return is_any is True, ()
    is_list = isinstance(listed, list) and all(
        type(one) is int and 1 <= one <= size for one in listed
    )
    if not is_list or not listed:
        raise ConfigError(
            f"{where}: matryoshka_dimensions is {show(listed)}; a list of whole numbers from 1 to "
            f"{size} is allowed"
        )
    return False, tuple(sorted(set(listed)))


def _judges(values: Mapping[str, Any], where: Path) -> tuple[str, str] | None:
    given = values.get("classifier_from_token")
    if given is None:
        return None
    is_pair = isinstance(given, list) and len(given) == 2 and given[0] != given[1]
    if not is_pair or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(
            f"{where}: classifier_from_token is {show(given)}; two texts are allowed, of the token "
            'for a document that does not answer and of the one that does, such as ["no", "yes"]'
        )
    if values.get("model_type") not in JUDGES:
        raise ConfigError(
            f"{where}: classifier_from_token is {show(given)} and model_type is "
            f"{show(values.get('model_type'))}; judging is supported for the prompt of "
            "Qwen3-Reranker (model_type qwen3); remove the key to only generate"
        )
    return given[0], given[1]
