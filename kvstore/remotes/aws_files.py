"""Keys of ~/.aws for S3, which obstore does not read by itself.

Plain keys, region and endpoint of a profile are taken; what asks a server for keys (sso, role_arn,
credential_process) is not: `aws configure export-credentials --format env` turns any into variables.
"""

from __future__ import annotations

import configparser
import contextlib
from collections.abc import Mapping
from pathlib import Path

_IN_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def from_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of obstore's S3Store from the profile AWS_PROFILE (or `default`), as far as the
    environment does not give them. Empty where there are none or the files cannot be read."""
    profile = environment.get("AWS_PROFILE") or "default"
    home = Path(environment.get("HOME") or Path.home()) / ".aws"
    keys = _section(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", profile)
    named = profile if profile == "default" else f"profile {profile}"
    config = _section(environment.get("AWS_CONFIG_FILE") or home / "config", named)
    found = dict[str, str]()
    if not any(environment.get(name) for name in _IN_ENVIRONMENT):
        source = keys if "aws_access_key_id" in keys else config
        found |= {_KEYS[name]: value for name, value in source.items() if name in _KEYS}
    if not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        found |= {"region": config["region"]} if "region" in config else {}
    if not any(name.startswith("AWS_ENDPOINT") for name in environment):
        found |= {"endpoint": config["endpoint_url"]} if "endpoint_url" in config else {}
    return found


def _section(path: str | Path, name: str) -> Mapping[str, str]:
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
        parser.read_string(Path(path).read_text(encoding="utf-8"))
        return dict(parser[name]) if parser.has_section(name) else {}
    return {}
