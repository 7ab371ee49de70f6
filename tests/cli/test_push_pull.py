"""push and pull over a folder: what moves, what is said, and what is refused. No engine is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.sharing.pull import PullReport
from kvsnap.kvstore.sharing.push import PushReport
from kvsnap.kvstore.store import Store
from kvsnap.testing.recount import stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 64
Run = Callable[..., Any]


def save(store: Path, name: str, blocks: int, seed: int = 1, tail: int = 5) -> None:
    with Store(store) as opened:
        turn(opened, StampedEngine(), some_ids(blocks * SIZE + tail, seed), name)


def objects(folder: Path) -> dict[str, int]:
    """Path → length of what stands in a folder remote."""
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.safetensors")
    }


def one_error(done: Any, code: int, *words: str) -> None:
    lines = done.err.strip().splitlines()
    assert done.code == code, done.err
    assert lines[-2].startswith("error: "), done.err
    assert lines[-1].startswith("  "), "a line that says what to do"
    for word in words:
        assert word in done.err


def test_a_pushed_session_is_pulled_and_computes_nothing(
    kvsnap: Run, store: Path, other: Path, url: str
) -> None:
    save(store, "s", 3)
    assert kvsnap("push", "s", url).code == 0
    assert kvsnap("pull", "s", url, "--store", other).code == 0
    engine = StampedEngine()
    with Store(other) as opened:
        found = turn(opened, engine, [*some_ids(3 * SIZE + 5, 1), 7], "s", save=False)
    assert found.computed == 1
    engine.check_rows()
    assert kvsnap("verify", "--store", other).code == 0


def test_the_reports_are_the_fields_of_json(
    kvsnap: Run, store: Path, other: Path, url: str, folder: Path
) -> None:
    save(store, "s", 3)
    pushed = PushReport(**kvsnap("push", "s", url, "--json").json)
    there = objects(folder)
    files = {key: size for key, size in there.items() if not key.startswith("manifests/")}
    assert (pushed.session, pushed.remote, pushed.dry_run) == ("s", url, False)
    assert (pushed.files, pushed.moved_files, pushed.blocks, pushed.evicted_blocks) == (4, 4, 3, 0)
    assert pushed.moved_bytes == pushed.bytes == sum(files.values())
    pulled = PullReport(**kvsnap("pull", "s", url, "--json", "--store", other).json)
    blocks = {key: size for key, size in files.items() if key.startswith("blocks/")}
    assert (pulled.session, pulled.files, pulled.moved_files) == ("s", 3, len(blocks))
    assert pulled.moved_bytes == sum(blocks.values())
    assert (pulled.blocks, pulled.stored_blocks) == (3, 3)


def test_what_is_there_does_not_move_again(
    kvsnap: Run, store: Path, other: Path, url: str, folder: Path
) -> None:
    save(store, "s", 3)
    kvsnap("push", "s", url)
    before = {key: (folder / key).stat().st_mtime_ns for key in objects(folder)}
    again = kvsnap("push", "s", url)
    assert "0 of 4 files to move" in again.err
    assert again.out.startswith(f"pushed 's' to {url}: 0 of 4 files, 0 B")
    assert {key: (folder / key).stat().st_mtime_ns for key in objects(folder)} == before
    kvsnap("pull", "s", url, "--store", other)
    assert kvsnap("pull", "s", url, "--json", "--store", other).json["moved_files"] == 0


def test_a_longer_session_moves_its_new_blocks_only(
    kvsnap: Run, store: Path, url: str, folder: Path
) -> None:
    save(store, "s", 3)
    kvsnap("push", "s", url)
    before = objects(folder)
    with Store(store) as opened:
        longer = [*some_ids(3 * SIZE + 5, 1), *some_ids(2 * SIZE, 9)]
        turn(opened, StampedEngine(), longer, "s")
    pushed = kvsnap("push", "s", url, "--json").json
    after = objects(folder)
    new = {
        k: size for k, size in after.items() if k not in before and not k.startswith("manifests/")
    }
    assert pushed["moved_files"] == len(new) == 3  # two blocks and the session's own file
    assert pushed["moved_bytes"] == sum(new.values())


@pytest.mark.parametrize("command", ["push", "pull"])
def test_a_dry_run_says_what_would_move_and_writes_nothing(
    kvsnap: Run, store: Path, other: Path, url: str, folder: Path, command: str
) -> None:
    save(store, "s", 3)
    if command == "pull":
        kvsnap("push", "s", url)
    run = ["pull", "s", url, "--store", other] if command == "pull" else ["push", "s", url]
    before = objects(folder)
    planned = kvsnap(*run, "--dry-run", "--json").json
    told = kvsnap(*run, "--dry-run")
    assert told.out.startswith(f"would {command} 's'")
    assert "resume" not in told.err
    assert objects(folder) == before
    assert not other.exists()
    done = kvsnap(*run, "--json").json
    differing = {"dry_run", "seconds", "stored_blocks"}
    assert {k: v for k, v in planned.items() if k not in differing} == {
        k: v for k, v in done.items() if k not in differing
    }
    assert (planned["dry_run"], done["dry_run"]) == (True, False)


def test_the_plan_goes_to_stderr_before_the_summary_goes_to_stdout(
    kvsnap: Run, store: Path, other: Path, url: str
) -> None:
    save(store, "s", 3)
    pushed = kvsnap("push", "s", url)
    assert pushed.err.startswith(f"'s' to {url}: 4 of 4 files to move, ")
    assert pushed.out.startswith(f"pushed 's' to {url}: 4 of 4 files, ")
    assert len(pushed.out.splitlines()) == 1
    pulled = kvsnap("pull", "s", url, "--as", "it's mine", "--store", other)
    assert "kvsnap resume 'it'\"'\"'s mine' --model M" in pulled.err
    assert kvsnap("pull", "s", url, "--quiet", "--store", other).err == ""
    assert "━" not in pushed.err + pulled.err


def test_the_remote_of_the_environment_is_used_where_none_is_named(
    kvsnap: Run, store: Path, other: Path, url: str, tmp_path: Path
) -> None:
    save(store, "s", 1)
    assert kvsnap("push", "s", KVSNAP_REMOTE=url).code == 0
    elsewhere = (tmp_path / "elsewhere").as_uri()
    done = kvsnap("pull", "s", "--store", other, KVSNAP_REMOTE=elsewhere)
    one_error(done, 1, "no session 's'", elsewhere)
    assert kvsnap("pull", "s", url, "--store", other, KVSNAP_REMOTE=elsewhere).code == 0


@pytest.mark.parametrize("command", ["push", "pull"])
@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (["s"], {}, "no remote was named"),
        (["s"], {"KVSNAP_REMOTE": ""}, "no remote was named"),
        (["s"], {"KVSNAP_REMOTE": "/mnt/kv"}, "not the URL of a remote"),
        (["s", "/mnt/kv"], {}, "not the URL of a remote"),
        (["s", ""], {}, "not the URL of a remote"),
        (["s", "file://mnt/kv"], {}, "absolute path"),
        (["file:///mnt/kv"], {}, "and no session"),
        (["file:///mnt/kv"], {"KVSNAP_REMOTE": "file:///mnt/kv"}, "and no session"),
        ([], {}, "Missing argument"),
    ],
)
def test_a_command_without_a_remote_or_a_session_is_a_usage_error(
    kvsnap: Run, command: str, words: list[str], environment: dict[str, str], says: str
) -> None:
    one_error(kvsnap(command, *words, **environment), 2, says)


def test_an_unknown_scheme_is_refused_with_those_that_are_known(kvsnap: Run) -> None:
    one_error(kvsnap("push", "s", "ftp://host/kv"), 1, "'ftp'", "file", "redis", "s3")


def test_a_session_that_is_not_there_is_one_error(kvsnap: Run, store: Path, url: str) -> None:
    one_error(kvsnap("push", "s", url), 1, "no session 's'", "kvsnap ls")
    one_error(kvsnap("pull", "s", url), 1, "no session 's'", f"kvsnap ls {url}")
    assert not store.exists()


def test_sessions_that_parted_are_refused_until_they_are_forced(
    kvsnap: Run, store: Path, other: Path, url: str
) -> None:
    save(store, "s", 2, seed=1)
    save(other, "s", 2, seed=2)
    kvsnap("push", "s", url)
    one_error(kvsnap("push", "s", url, "--store", other), 1, "has another 's'", "--force")
    one_error(kvsnap("pull", "s", url, "--store", other), 1, "another session 's'", "--as")
    assert kvsnap("pull", "s", url, "--as", "theirs", "--store", other).code == 0
    names = [row["session"] for row in kvsnap("ls", "--json", "--store", other).json]
    assert sorted(names) == ["s", "theirs"]
    assert kvsnap("pull", "s", url, "--force", "--store", other).code == 0
    shown = kvsnap("show", "s", "--json", "--store", other).json
    assert shown["token_ids"] == some_ids(2 * SIZE + 5, 1).tolist()
    save(other, "s", 2, seed=3)
    assert kvsnap("push", "s", url, "--force", "--store", other).code == 0


def test_a_session_whose_end_was_evicted_is_pushed_and_partly_done(
    kvsnap: Run, store: Path, other: Path, url: str
) -> None:
    save(store, "s", 4)
    with Store(store) as opened:
        (last,) = [
            opened.place.block(name)
            for name in stored_blocks(opened.place)
            if name not in {parent for parent, _ in stored_blocks(opened.place).values()}
        ]
    kvsnap("gc", "--capacity", sum(objects(store).values()) - last.stat().st_size)
    done = kvsnap("push", "s", url, "--json")
    assert done.code == 3
    assert (done.json["blocks"], done.json["evicted_blocks"]) == (4, 1)
    one_error(done, 3, "1 of 4 blocks were evicted here")
    pulled = kvsnap("pull", "s", url, "--json", "--store", other)
    assert (pulled.code, pulled.json["stored_blocks"]) == (3, 3)
    one_error(pulled, 3, "the front of 's', 3 of 4 blocks")


def test_a_block_that_is_gone_there_leaves_a_shorter_session_and_code_3(
    kvsnap: Run, store: Path, other: Path, url: str, folder: Path
) -> None:
    save(store, "s", 3)
    kvsnap("push", "s", url)
    with Store(store) as opened:
        chain = opened.sessions.load("default", "s").record.chain
    name = chain[1].hex()
    (folder / "blocks" / name[:2] / f"{name}.safetensors").unlink()
    done = kvsnap("pull", "s", url, "--store", other)
    one_error(done, 3, "and 1 after it of 's'", name[:12])
    assert done.out.startswith("pulled 's'")
    assert "kvsnap resume s" in done.err
    assert kvsnap("ls", "--json", "--store", other).json[0]["stored_blocks"] == 1


def test_a_tenants_session_is_seen_with_its_key_only(
    kvsnap: Run, store: Path, other: Path, url: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    from kvsnap.formats.tenant import parse_key

    with Store(store) as opened:
        ids = some_ids(2 * SIZE, 1)
        turn(opened, StampedEngine(), ids, "s", tenant=parse_key(key.read_bytes()))
    one_error(kvsnap("push", "s", url), 1, "no session 's'")
    assert kvsnap("push", "s", url, "--tenant-key-file", key).code == 0
    one_error(kvsnap("pull", "s", url, "--store", other), 1, "no session 's'")
    done = kvsnap("pull", "s", url, "--store", other, KVSNAP_TENANT_KEY_FILE=str(key))
    assert done.code == 0
    assert "--tenant-key-file F" in done.err


def test_a_file_in_the_folders_place_is_one_error(
    kvsnap: Run, store: Path, folder: Path, url: str
) -> None:
    save(store, "s", 1)
    folder.write_text("no folder")
    one_error(kvsnap("push", "s", url), 1, url)
    one_error(kvsnap("pull", "s", url), 1, url)
    one_error(kvsnap("ls", url), 1, url)


def test_another_block_size_is_refused_with_what_to_do(
    kvsnap: Run, store: Path, other: Path, url: str
) -> None:
    save(store, "s", 2)
    kvsnap("push", "s", url)
    other.mkdir(mode=0o700)
    text = json.dumps({"block_size": 16, "created": 1, "format": "1"})
    (other / "kvsnap.json").write_text(text)
    one_error(kvsnap("pull", "s", url, "--store", other), 1, "64 tokens", '"block_size": 64')
