"""Where a tenant's key comes from, which one counts, and that no error shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, NotFound, UsageError
from kvsnap.formats.tenant import Tenant, parse_key
from kvsnap.kvstore.tenant_key import FILE_VARIABLE, VARIABLE, find_tenant
from tests.tenants import ALICE, BOB, assert_not_in, shown

CAROL = Tenant(bytes(range(32)))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path: Path) -> dict[Tenant, Path]:
    found = {}
    for number, tenant in enumerate((ALICE, BOB, CAROL)):
        found[tenant] = tmp_path / f"{number}.key"
        found[tenant].write_bytes(tenant.key if number else tenant.key.hex().encode() + b"\n")
    return found


def test_no_key_is_given_by_default() -> None:
    assert find_tenant() is None


def test_the_option_goes_before_the_environment(
    files: dict[Tenant, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_tenant(files[ALICE]) == ALICE
    monkeypatch.setenv(FILE_VARIABLE, str(files[BOB]))
    assert find_tenant() == BOB
    assert find_tenant(files[ALICE]) == ALICE
    monkeypatch.delenv(FILE_VARIABLE)
    monkeypatch.setenv(VARIABLE, CAROL.key.hex())
    assert find_tenant() == CAROL
    assert find_tenant(files[ALICE]) == ALICE
    monkeypatch.setenv(FILE_VARIABLE, str(files[BOB]))
    assert find_tenant(files[ALICE]) == ALICE, "what the variables say does not matter then"


def test_two_variables_that_may_say_two_things_are_a_usage_error(
    files: dict[Tenant, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(files[BOB]))
    monkeypatch.setenv(VARIABLE, BOB.key.hex())
    with pytest.raises(UsageError, match="both set") as refused:
        find_tenant()
    assert_not_in(BOB.key, [shown(refused.value), refused.value.hint])


@pytest.mark.parametrize("name", [VARIABLE, FILE_VARIABLE])
@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_a_key_that_a_script_failed_to_fill_in_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} is set and empty"):
        find_tenant()


@pytest.mark.parametrize(
    "value", [ALICE.key.hex(), ALICE.key.hex().upper(), f"\n{ALICE.key.hex()} "]
)
def test_a_variable_holds_64_hex_characters(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert find_tenant() == ALICE


MALFORMED = [
    ALICE.key.hex()[:63],
    ALICE.key.hex() + "0",
    ALICE.key.hex()[:62] + "zz",
    f"0x{ALICE.key.hex()[:62]}",
    "+Oz09fb3yMnKy8zNzs/Q0dLT1NXW19jZ2tvc3d7f4OE=",
    "a" * 31,
    "ключ-" * 8,
    "\udc80" * 64,
]


@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_variable_is_refused_in_one_line_without_its_value(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UsageError) as refused:
        find_tenant()
    assert refused.value.what == f"{VARIABLE} is not 64 hex characters"
    assert value[:20] not in shown(refused.value) + refused.value.hint


@pytest.mark.parametrize("value", [*MALFORMED, ALICE.key.hex()[:31], ALICE.key[:31].hex()])
@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_malformed_file_is_refused_in_one_line_without_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, how: str
) -> None:
    path = tmp_path / "team.key"
    path.write_bytes(os.fsencode(value))
    if how == "variable":
        monkeypatch.setenv(FILE_VARIABLE, str(path))
    with pytest.raises(UsageError) as refused:
        find_tenant(path if how == "option" else None)
    size = len(os.fsencode(value))
    assert refused.value.what == (
        f"{path} holds no tenant key: a tenant key has 32 bytes, this one has {size}"
    )
    assert "keygen" in refused.value.hint
    told = shown(refused.value) + refused.value.hint
    assert value[:20] not in told
    assert repr(os.fsencode(value))[2:22] not in told


@pytest.mark.parametrize("key", [ALICE.key.hex(), ALICE.key.hex().upper(), f" {ALICE.key.hex()}\n"])
@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_key_in_place_of_its_files_name_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, key: str, how: str
) -> None:
    if how == "variable":
        monkeypatch.setenv(FILE_VARIABLE, key)
    with pytest.raises(UsageError, match="takes the name of a file") as refused:
        find_tenant(Path(key) if how == "option" else None)
    # What was given as an option stands in the frames of whoever read the command line, too.
    told = str(refused.value) if how == "option" else shown(refused.value)
    assert_not_in(ALICE.key, [told, refused.value.hint])


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"cannot read .*none: No such file"):
        find_tenant(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no tenant key"):
        find_tenant(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        find_tenant(tmp_path / "pipe")
    (tmp_path / "disk.img").write_bytes(bytes(5000))
    with pytest.raises(UsageError, match="has 5000 bytes"):
        find_tenant(tmp_path / "disk.img")


@pytest.mark.parametrize("wrong", [ALICE.key[:31], ALICE.key.hex(), bytearray(ALICE.key), None])
def test_a_tenant_of_something_else_shows_nothing_of_it(wrong: object) -> None:
    with pytest.raises(UsageError, match="a tenant key has 32 bytes") as refused:
        Tenant(wrong)  # type: ignore[arg-type]
    assert_not_in(ALICE.key, [shown(refused.value), refused.value.hint])
    if isinstance(wrong, bytes):
        with pytest.raises(UsageError) as refused:
            parse_key(wrong)
        assert_not_in(ALICE.key, [shown(refused.value), refused.value.hint])


def test_errors_below_a_tenant_do_not_show_its_key(tmp_path: Path) -> None:
    """Their frames hold the tenant, and roots that follow from it."""
    from kvsnap.kvstore.session import Session
    from kvsnap.kvstore.sharing.pull import pull
    from kvsnap.kvstore.store import Store
    from kvsnap.testing.memory_remote import MemoryRemote
    from kvsnap.testing.stamped import StampedEngine

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError

    with Store(tmp_path / "s") as store:
        session = Session(store, StampedEngine(), "chat", tenant=ALICE)
        session.engine.landing = fails  # type: ignore[assignment, method-assign]
        engine = StampedEngine()
        engine.evaluate(session.engine.token_ids())
        tries = [
            lambda: session.resume([1] * 10_000),
            lambda: session.resume(["no id"]),  # type: ignore[list-item]
            lambda: session.stored_token_ids(),
            lambda: pull(store, MemoryRemote(), "chat", tenant=ALICE),
            lambda: Session(store, StampedEngine(), "\x1b", tenant=ALICE),
        ]
        for attempt in tries:
            with pytest.raises(KvsnapError) as raised:
                attempt()
            told = shown(raised.value)
            assert "tenant = Tenant()" in told or "self = <" in told, "variables are shown"
            assert_not_in(ALICE.key, [told])
            assert_not_in(ALICE.naming_key, [told])
