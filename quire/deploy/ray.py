"""build_app: Quire as an application of Ray Serve, for `import_path: quire.deploy.ray:build_app`.

Importing this package does not import Ray, so that arguments can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import SettingError
from quire.deploy.ray_serve.app_args import read_args


def build_app(args: Mapping[str, Any]) -> Any:
    """Return a ray.serve.Application: engines, a directory of them, and routers as its ingress.

    args: the keys of AppArgs (docs/ray.md). Raises SettingError.
    """
    given = read_args(args)
    try:
        from quire.deploy.ray_serve.app import application
    except ModuleNotFoundError as error:
        raise SettingError(
            f"the package {error.name} is not installed; pip install 'quire-llm[ray]'"
        ) from error
    return application(given)
