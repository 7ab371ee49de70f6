"""Object stores as remotes: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`.

Credentials, region and endpoint come from where each store's own tools look: AWS_* and ~/.aws,
GOOGLE_APPLICATION_CREDENTIALS and gcloud's login, AZURE_*. An endpoint of `http://` is meant as it
is written; without one nothing is ever sent unencrypted.

Where an endpoint redirects to another host, obstore takes the signature out but not a temporary
AWS_SESSION_TOKEN, which nobody can use without the secret key, nor Azure's token in the referer.
"""

from __future__ import annotations

import os
from typing import Any

from obstore.store import AzureStore, GCSStore, S3Store

from kvsnap.kvstore.remotes.aws_files import from_profile
from kvsnap.kvstore.remotes.obstore_remote import NO_RETRY, ObstoreRemote, is_http, place


class S3(ObstoreRemote):
    def __init__(self, url: str, timeout: float) -> None:
        bucket, prefix, shown = place(url, "s3://team-kv/prod")
        endpoint = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        config: dict[str, Any] = dict(from_profile(os.environ))
        http = is_http(os.environ, *endpoint) or config.get("endpoint", "").startswith("http://")
        config["disable_bulk_delete"] = True  # not in every server that speaks S3

        def store(client: dict[str, Any]) -> S3Store:
            options: Any = {**client, "allow_http": http}
            return S3Store(
                bucket, prefix=prefix, client_options=options, retry_config=NO_RETRY, **config
            )

        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        super().__init__(shown, hint, timeout, store)


class Gcs(ObstoreRemote):
    def __init__(self, url: str, timeout: float) -> None:
        bucket, prefix, shown = place(url, "gs://team-kv/prod")
        http = is_http(os.environ, "GOOGLE_BASE_URL")

        def store(client: dict[str, Any]) -> GCSStore:
            options: Any = {**client, "allow_http": http}
            return GCSStore(bucket, prefix=prefix, client_options=options, retry_config=NO_RETRY)

        hint = "set GOOGLE_APPLICATION_CREDENTIALS, or: gcloud auth application-default login"
        super().__init__(shown, hint, timeout, store)


class Azure(ObstoreRemote):
    def __init__(self, url: str, timeout: float) -> None:
        container, prefix, shown = place(url, "az://container/prod")
        http = is_http(os.environ, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")

        def store(client: dict[str, Any]) -> AzureStore:
            options: Any = {**client, "allow_http": http}
            return AzureStore(
                container, prefix=prefix, client_options=options, retry_config=NO_RETRY
            )

        hint = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
        super().__init__(shown, hint, timeout, store)
