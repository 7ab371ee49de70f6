"""The tenant's key decides root and names, and is never shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
from blake3 import blake3

from kvsnap.formats.errors import UsageError
from kvsnap.formats.identity import Identity, Root, root_of
from kvsnap.formats.names import chain_names, token_array
from kvsnap.formats.tenant import NO_TENANT_ID, Tenant, parse_key, tenant_id

KEY = bytes(range(200, 232))
ONE, TWO = Tenant(KEY), Tenant(bytes(32))


def test_each_tenant_has_its_own_root_root_id_and_names(identity: Identity) -> None:
    roots = [root_of(identity, tenant) for tenant in (None, ONE, TWO)]
    assert len({root.key for root in roots}) == 3
    assert len({root.root_id for root in roots}) == 3
    names = [chain_names(root.key, token_array(range(16)), 4) for root in roots]
    assert len({name for chain in names for name in chain}) == 12


def test_the_keyed_root_follows_from_the_formula(identity: Identity) -> None:
    naming = blake3(KEY, derive_key_context="kvsnap naming key").digest()
    key = blake3(identity.canonical().encode(), key=naming).digest()
    assert root_of(identity, ONE).key == key
    golden = "31485cbbe90e148f684a7bcea55a35f83de724f9cf92480bb846c66abaf13f97"
    assert root_of(identity, ONE).root_id == golden


def test_the_tenant_id_is_derived_from_the_key() -> None:
    golden = "a1a7e56916f1227bc7aca819100811783745a7dd3cf2a78382eee4e6b546803b"
    assert tenant_id(ONE) == golden
    assert blake3(KEY, derive_key_context="kvsnap tenant id").hexdigest() == golden
    assert tenant_id(None) == NO_TENANT_ID
    assert tenant_id(TWO) != golden


def test_no_derived_key_is_another_one_or_the_secret(identity: Identity) -> None:
    root = root_of(identity, ONE)
    derived = [KEY.hex(), ONE.naming_key.hex(), ONE.tenant_id, root.key.hex(), root.root_id]
    assert len(set(derived)) == 5


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format, "%s".__mod__])
def test_no_text_of_a_tenant_or_root_shows_a_secret(
    identity: Identity, show: Callable[[object], str]
) -> None:
    root = root_of(identity, ONE)
    text = show([ONE]) + show([root])
    for secret in (KEY, ONE.naming_key, root.key):
        assert secret.hex() not in text.lower()
        assert repr(secret)[2:-1] not in text
    assert str(list(KEY))[1:-1] not in text


@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_a_key_of_another_length_is_refused_without_showing_it(size: int) -> None:
    key = bytes(range(size))
    with pytest.raises(UsageError, match=f"32 bytes, this one has {size}") as caught:
        Tenant(key)
    shown = "".join(traceback.format_exception(caught.value))
    assert not size or key.hex() not in shown


@pytest.mark.parametrize(
    "data",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode(), b"\n  " + KEY.hex().encode() + b" \r\n"],
)
def test_a_key_file_holds_32_raw_bytes_or_64_hex_digits(data: bytes) -> None:
    assert parse_key(data) == ONE


@pytest.mark.parametrize("edge", [b" ", b"\n", b"\t"])
def test_white_space_at_the_ends_of_a_raw_key_belongs_to_it(edge: bytes) -> None:
    key = edge + bytes(30) + edge
    assert parse_key(key).key == key


@pytest.mark.parametrize(
    "data", [b"", KEY[:31], KEY + b"\n", KEY.hex()[:63].encode(), b"g" * 64, b"0" * 65]
)
def test_other_key_files_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="tenant key"):
        parse_key(data)


def test_roots_are_equal_only_with_equal_keys(identity: Identity) -> None:
    root = root_of(identity, ONE)
    assert root == Root(root.key, root.root_id, root.identity, ONE.tenant_id)
    assert root != Root(bytes(32), root.root_id, root.identity, ONE.tenant_id)
